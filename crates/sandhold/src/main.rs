//! The `sandhold` binary: command line and wiring, nothing else.

mod doctor;
mod settings;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Sandboxes for code that AI agents write, on your own machine.
#[derive(Debug, Parser)]
#[command(name = "sandhold", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check whether this machine can run sandboxes, and say how to mend what is missing.
    Doctor(doctor::Args),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Doctor(args) => doctor::run(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("sandhold: {error:#}");
        ExitCode::FAILURE
    })
}
