//! `sandhold sandbox snapshot`, `clone`, `rollback`, `timeline`: going through time.

use anyhow::{Context as _, bail};
use http::Method;
use serde_json::{Value, json};

use super::{
    output::{Form, Output},
    sandbox::{ago, timeout},
    server::{Options, Server, segment},
};

/// Options of `sandhold sandbox snapshot`.
#[derive(Debug, clap::Args)]
pub(crate) struct SnapshotArgs {
    /// The sandbox.
    sandbox: String,
    /// What it is to be called, as name or name:tag; a snapshot of that name loses it.
    #[arg(short, long)]
    name: Option<String>,
    /// Sandboxes that are made from it start their processes anew.
    #[arg(long)]
    files_only: bool,
    #[command(flatten)]
    options: Options,
}

/// Options of `sandhold sandbox clone`.
#[derive(Debug, clap::Args)]
pub(crate) struct CloneArgs {
    /// The sandbox.
    sandbox: String,
    /// How many copies.
    #[arg(short, long, default_value_t = 1)]
    count: u32,
    /// How many of them are made at the same time.
    #[arg(long, value_name = "COPIES")]
    concurrency: Option<u32>,
    /// Keep those that could be made when others could not.
    #[arg(long)]
    keep_going: bool,
    /// Seconds until they end; as long as the sandbox itself unless given.
    #[arg(long, value_name = "SECONDS", value_parser = timeout)]
    timeout: Option<i64>,
    #[command(flatten)]
    options: Options,
}

/// Options of `sandhold sandbox rollback`.
#[derive(Debug, clap::Args)]
pub(crate) struct RollbackArgs {
    /// The sandbox.
    sandbox: String,
    /// The snapshot, by its ID or name; the one that the sandbox stands on unless given.
    snapshot: Option<String>,
    #[command(flatten)]
    options: Options,
}

/// Options of `sandhold sandbox timeline`.
#[derive(Debug, clap::Args)]
pub(crate) struct TimelineArgs {
    /// The sandbox.
    sandbox: String,
    #[command(flatten)]
    options: Options,
}

impl SnapshotArgs {
    pub(super) fn options(&self) -> &Options {
        &self.options
    }
}

impl CloneArgs {
    pub(super) fn options(&self) -> &Options {
        &self.options
    }
}

impl RollbackArgs {
    pub(super) fn options(&self) -> &Options {
        &self.options
    }
}

impl TimelineArgs {
    pub(super) fn options(&self) -> &Options {
        &self.options
    }
}

fn text(value: &Value, field: &str) -> String {
    value[field].as_str().unwrap_or_default().to_owned()
}

pub(super) async fn snapshot(args: &SnapshotArgs, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&args.options)?;
    let path = format!("/sandboxes/{}/snapshots", segment(&args.sandbox));
    let mut body = json!({ "memory": !args.files_only });
    if let Some(name) = &args.name {
        body["name"] = json!(name);
    }
    let taken = server.call(Method::POST, &path, Some(&body)).await?;
    if output.form() == Form::Json {
        return Ok(output.json(&taken)?);
    }
    let id = taken["snapshotID"].as_str();
    output.say(id.context("the server's answer holds no snapshot")?)?;
    if output.form() == Form::Terminal {
        let paused = &taken["pausedMs"];
        output.note(&format!("the sandbox stood still for {paused} ms"))?;
    }
    Ok(())
}

pub(super) async fn clone(args: &CloneArgs, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&args.options)?;
    let path = format!("/sandboxes/{}/clones", segment(&args.sandbox));
    let mut body = json!({ "count": args.count, "allOrNothing": !args.keep_going });
    if let Some(concurrency) = args.concurrency {
        body["concurrency"] = json!(concurrency);
    }
    if let Some(seconds) = args.timeout {
        body["timeout"] = json!(seconds);
    }
    let answer = server.call(Method::POST, &path, Some(&body)).await?;
    if output.form() == Form::Json {
        output.json(&answer)?;
    }
    let copies = answer.as_array().cloned().unwrap_or_default();
    let mut failed = 0;
    for copy in &copies {
        match copy["sandbox"]["sandboxID"].as_str() {
            Some(id) => output.say(id)?,
            None => {
                failed += 1;
                output.note(&format!("not copied: {}", text(&copy["error"], "message")))?;
            }
        }
    }
    if failed > 0 {
        bail!("{failed} of {} copies could not be made", copies.len());
    }
    Ok(())
}

pub(super) async fn rollback(args: &RollbackArgs, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&args.options)?;
    let snapshot = match &args.snapshot {
        Some(snapshot) => snapshot.clone(),
        None => {
            let timeline = timeline_of(&server, &args.sandbox).await?;
            let current = timeline["currentSnapshotID"].as_str().map(str::to_owned);
            current.context("the sandbox stands on no snapshot; take one first")?
        }
    };
    let path = format!("/sandboxes/{}/rollback", segment(&args.sandbox));
    let body = json!({ "snapshotID": snapshot });
    let answer = server.call(Method::POST, &path, Some(&body)).await?;
    if output.form() == Form::Json {
        return Ok(output.json(&answer)?);
    }
    output.say(&format!("{} is back at {snapshot}", args.sandbox))?;
    Ok(())
}

async fn timeline_of(server: &Server, sandbox: &str) -> anyhow::Result<Value> {
    let path = format!("/sandboxes/{}/timeline", segment(sandbox));
    server.call(Method::GET, &path, None).await
}

pub(super) async fn timeline(args: &TimelineArgs, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&args.options)?;
    let answer = timeline_of(&server, &args.sandbox).await?;
    let current = answer["currentSnapshotID"].as_str().unwrap_or_default();
    let snapshots = answer["snapshots"].as_array().cloned().unwrap_or_default();
    let rows: Vec<Vec<String>> = snapshots
        .iter()
        .map(|snapshot| {
            let names = snapshot["names"].as_array().cloned().unwrap_or_default();
            let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
            let id = text(snapshot, "snapshotID");
            let here = if id == current { "*" } else { "" };
            let parent = match snapshot["parentID"].as_str() {
                Some(parent) => parent.to_owned(),
                None => String::from("-"),
            };
            vec![
                here.to_owned(),
                id,
                ago(&text(snapshot, "createdAt")),
                parent,
                names.join(" "),
            ]
        })
        .collect();
    if rows.is_empty() && output.form() == Form::Terminal {
        output.note("no snapshots; 'sandhold sandbox snapshot' takes one")?;
        return Ok(());
    }
    let headings = ["HERE", "SNAPSHOT", "TAKEN", "CAME FROM", "NAMES"];
    output.rows(&headings, &rows, &answer)?;
    Ok(())
}
