//! The `sandhold` binary: command line and wiring, nothing else.

mod cli;
mod doctor;
mod governor;
mod kitchen;
mod settings;
mod up;

use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

/// Sandboxes for code that AI agents write, on your own machine.
#[derive(Debug, Parser)]
#[command(name = "sandhold", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the platform on this machine until it is stopped.
    Up(up::Args),
    /// Check whether this machine can run sandboxes, and say how to mend what is missing.
    Doctor(doctor::Args),
    #[command(flatten)]
    Client(cli::Command),
}

fn main() -> ExitCode {
    let matches = Arguments::command().get_matches();
    let as_json = cli::failure::wants_json(&matches);
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let result = match arguments.command {
        Command::Up(args) => up::run(args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Client(command) => client(&command),
    };
    result.unwrap_or_else(|error| {
        eprintln!("{}", cli::failure::told(&error, as_json));
        ExitCode::FAILURE
    })
}

/// Runs a command for people.
fn client(command: &cli::Command) -> anyhow::Result<ExitCode> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(cli::run(command))
}
