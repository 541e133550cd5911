//! The command line for people: a client of a running server, over its public API, and the
//! template builder, which works on this machine.
//!
//! ```text
//!   sandhold sandbox|key|lease|gc …  ──▶ server (REST)        list, create, kill, keys
//!   sandhold run …                   ──▶ server (events)      a command from its files to its end
//!                                    ──▶ gateway (data plane)  exec, run, files
//! ```
//!
//! One file per noun or large verb. What is printed to standard output is the result and nothing
//! else: a table for a person at a terminal, tab-separated lines without a heading for a pipe, JSON
//! with `--json`. Everything else goes to standard error. An error says what happened, to what, and
//! what to do.

mod connect;
mod dockerfile;
mod events;
mod exec;
pub(crate) mod failure;
mod files;
mod governor;
mod key;
mod output;
mod run;
mod run_code;
mod sandbox;
mod server;
mod stdin;
mod template;
mod template_build;
mod terminal;
#[cfg(test)]
mod tests;
mod travel;

use std::{io, process::ExitCode};

/// The commands for people.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Make, list, use and end sandboxes.
    #[command(subcommand, visible_alias = "sandboxes", visible_alias = "sbx")]
    Sandbox(sandbox::Command),
    /// Make, list and revoke API keys.
    #[command(subcommand, visible_alias = "keys")]
    Key(key::Command),
    /// Run a command in a sandbox of its own, from its files to its end.
    Run(run::Args),
    /// Tell why a sandbox lives, or who ended it.
    Why(governor::Why),
    /// Take, renew and release leases: one owner, one sandbox.
    #[command(subcommand, visible_alias = "leases")]
    Lease(governor::Lease),
    /// Show what the reclaimer does and what needs attention.
    #[command(subcommand)]
    Gc(governor::Gc),
    /// Build, list, show and delete templates.
    #[command(subcommand, visible_alias = "templates")]
    Template(template::Command),
}

/// Carries a command out.
///
/// # Errors
/// What happened, to what, and what to do, as one text.
pub(crate) async fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let result = match command {
        Command::Sandbox(command) => sandbox::run(command).await,
        Command::Key(command) => key::run(command).await,
        Command::Run(args) => run::run(args).await,
        Command::Why(command) => governor::why(command).await,
        Command::Lease(command) => governor::lease(command).await,
        Command::Gc(command) => governor::gc(command).await,
        Command::Template(command) => template::run(command).await,
    };
    match result {
        // Whoever read our output has seen enough.
        Err(error) if is_broken_pipe(&error) => Ok(ExitCode::SUCCESS),
        other => other,
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}
