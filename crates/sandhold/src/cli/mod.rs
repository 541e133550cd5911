//! The command line for people: one file per noun.

mod template_build;

use std::process::ExitCode;

/// What can be done with templates.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum TemplateCommand {
    /// Make a template from its definition and bake it.
    Build(template_build::Args),
}

/// Runs a template command.
///
/// # Errors
/// What the command says.
pub(crate) fn run_template(command: TemplateCommand) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    match command {
        TemplateCommand::Build(args) => runtime.block_on(template_build::run(&args)),
    }
}
