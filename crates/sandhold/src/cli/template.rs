//! `sandhold template`: what sandboxes can be made from.

use std::process::ExitCode;

use anyhow::bail;
use http::Method;
use serde_json::{Value, json};

use super::{
    output::{Form, Output, size},
    sandbox::{ago, confirmed},
    server::{Options, Server, segment},
    template_build,
};

/// What `sandhold template` can do.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Make a template from its definition and bake it, on this machine.
    Build(template_build::Args),
    /// List the templates that this key can use.
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        options: Options,
    },
    /// Show one template.
    Show {
        /// Its ID, its name, or name:tag.
        template: String,
        #[command(flatten)]
        options: Options,
    },
    /// Delete a template of this tenant; sandboxes made from it live on.
    Delete {
        /// Its ID, its name, or name:tag.
        template: String,
        /// Do not ask.
        #[arg(short, long)]
        yes: bool,
        #[command(flatten)]
        options: Options,
    },
}

pub(crate) async fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let options = match command {
        Command::Build(args) => return template_build::run(args).await,
        Command::List { options }
        | Command::Show { options, .. }
        | Command::Delete { options, .. } => options,
    };
    let mut output = Output::standard(options.json);
    execute(command, &mut output).await?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn execute(command: &Command, output: &mut Output) -> anyhow::Result<()> {
    match command {
        Command::Build(_) => Ok(()),
        Command::List { options } => list(&Server::from_options(options)?, output).await,
        Command::Show { template, options } => {
            show(&Server::from_options(options)?, template, output).await
        }
        Command::Delete {
            template,
            yes,
            options,
        } => {
            let question = format!("Delete template {template} for good?");
            if !yes && !confirmed(&question)? {
                bail!("nothing was deleted");
            }
            delete(&Server::from_options(options)?, template, output).await
        }
    }
}

async fn list(server: &Server, output: &mut Output) -> anyhow::Result<()> {
    let answer = server.call(Method::GET, "/templates", None).await?;
    let templates = answer.as_array().cloned().unwrap_or_default();
    let rows: Vec<Vec<String>> = templates.iter().map(row).collect();
    let headings = ["NAME", "ID", "CPU / MEMORY", "SIZE", "BUILT", "WARM", "FOR"];
    output.rows(&headings, &rows, &answer)?;
    Ok(())
}

fn row(template: &Value) -> Vec<String> {
    let text = |field: &str| template[field].as_str().unwrap_or_default();
    let yes = |field: &str| template[field] == true;
    vec![
        names(template),
        text("templateID").to_owned(),
        limits(template),
        size(template["sizeBytes"].as_u64().unwrap_or_default()),
        ago(text("updatedAt")),
        if yes("warm") { "yes" } else { "no" }.to_owned(),
        if yes("public") { "everybody" } else { "you" }.to_owned(),
    ]
}

fn names(template: &Value) -> String {
    let names = template["names"].as_array().into_iter().flatten();
    names
        .filter_map(Value::as_str)
        .collect::<Vec<_>>()
        .join(", ")
}

fn limits(template: &Value) -> String {
    format!("{} / {} MiB", template["cpuCount"], template["memoryMB"])
}

async fn show(server: &Server, template: &str, output: &mut Output) -> anyhow::Result<()> {
    let path = format!("/templates/{}", segment(template));
    let found = server.call(Method::GET, &path, None).await?;
    let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
    let fields = [
        ("name", names(&found)),
        ("ID", text("templateID")),
        ("build", text("buildID")),
        ("built", text("updatedAt")),
        ("CPU / memory", limits(&found)),
        ("disk", format!("{} MiB", found["diskSizeMB"])),
        (
            "size",
            size(found["sizeBytes"].as_u64().unwrap_or_default()),
        ),
        ("warm", found["warm"].to_string()),
        ("for everybody", found["public"].to_string()),
    ];
    let rows: Vec<Vec<String>> = fields
        .into_iter()
        .map(|(name, value)| vec![name.to_owned(), value])
        .collect();
    output.rows(&["", ""], &rows, &found)?;
    Ok(())
}

async fn delete(server: &Server, template: &str, output: &mut Output) -> anyhow::Result<()> {
    let path = format!("/templates/{}", segment(template));
    server.call(Method::DELETE, &path, None).await?;
    if output.form() == Form::Json {
        output.json(&json!({ "template": template, "deleted": true }))?;
    }
    output.say(&format!(
        "template {template} is deleted; sandboxes made from it live on"
    ))?;
    Ok(())
}
