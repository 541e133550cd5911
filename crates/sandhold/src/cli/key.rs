//! `sandhold key`: make, list and revoke API keys.

use std::process::ExitCode;

use anyhow::bail;
use http::Method;
use serde_json::{Value, json};

use super::{
    output::{Form, Output},
    sandbox::{ago, confirmed},
    server::{Options, Server, segment},
};

/// What `sandhold key` can do. All of it needs an administrator's key.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Make a key and print it, this once.
    Create {
        /// What people call it.
        #[arg(long)]
        name: Option<String>,
        /// The tenant it is for; a new one is made. The asking key's own unless given.
        #[arg(long)]
        namespace: Option<String>,
        /// The tenant's environment it is for, such as dev or prod.
        #[arg(long)]
        env: Option<String>,
        /// What it may do: member (work with sandboxes) or admin (and manage keys).
        #[arg(long, default_value = "member")]
        role: String,
        #[command(flatten)]
        options: Options,
    },
    /// List keys; never the keys themselves.
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        options: Options,
    },
    /// Revoke a key for good: whoever uses it is refused from now on. Its sandboxes live on.
    Revoke {
        /// The key's ID, as `list` shows it.
        id: String,
        /// Do not ask.
        #[arg(short, long)]
        yes: bool,
        #[command(flatten)]
        options: Options,
    },
}

pub(crate) async fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let (Command::Create { options, .. }
    | Command::List { options }
    | Command::Revoke { options, .. }) = command;
    let mut output = Output::standard(options.json);
    execute(command, &mut output).await?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn execute(command: &Command, output: &mut Output) -> anyhow::Result<()> {
    match command {
        Command::Create {
            name,
            namespace,
            env,
            role,
            options,
        } => {
            let body = json!({
                "name": name,
                "namespace": namespace,
                "env": env,
                "role": role,
            });
            create(&Server::from_options(options)?, &body, output).await
        }
        Command::List { options } => list(&Server::from_options(options)?, output).await,
        Command::Revoke { id, yes, options } => {
            let question = format!("Revoke key {id} for good?");
            if !yes && !confirmed(&question)? {
                bail!("nothing was revoked");
            }
            revoke(&Server::from_options(options)?, id, output).await
        }
    }
}

async fn create(server: &Server, body: &Value, output: &mut Output) -> anyhow::Result<()> {
    let made = server.call(Method::POST, "/v1/keys", Some(body)).await?;
    let text = |field: &str| made[field].as_str().unwrap_or_default();
    if output.form() == Form::Json {
        output.json(&made)?;
        return Ok(());
    }
    output.say(text("key"))?;
    output.note(&format!(
        "key {} for {}/{}, {}; it is not shown again",
        text("id"),
        text("namespace"),
        text("env"),
        text("role"),
    ))?;
    Ok(())
}

async fn list(server: &Server, output: &mut Output) -> anyhow::Result<()> {
    let answer = server.call(Method::GET, "/v1/keys", None).await?;
    let keys = answer["keys"].as_array().cloned().unwrap_or_default();
    let rows: Vec<Vec<String>> = keys.iter().map(row).collect();
    let headings = [
        "ID",
        "NAME",
        "FOR",
        "ROLE",
        "KEY",
        "CREATED",
        "LAST USED",
        "STATE",
    ];
    output.rows(&headings, &rows, &json!(keys))?;
    Ok(())
}

fn row(key: &Value) -> Vec<String> {
    let text = |field: &str| key[field].as_str().unwrap_or_default();
    let state = match key["revokedAt"].as_str() {
        Some(at) => format!("revoked {}", ago(at)),
        None => String::from("works"),
    };
    vec![
        text("id").to_owned(),
        text("name").to_owned(),
        format!("{}/{}", text("namespace"), text("env")),
        text("role").to_owned(),
        text("hint").to_owned(),
        ago(text("createdAt")),
        key["lastUsedAt"]
            .as_str()
            .map_or_else(|| String::from("never"), ago),
        state,
    ]
}

async fn revoke(server: &Server, id: &str, output: &mut Output) -> anyhow::Result<()> {
    let path = format!("/v1/keys/{}", segment(id));
    server.call(Method::DELETE, &path, None).await?;
    if output.form() == Form::Json {
        output.json(&json!({ "id": id, "revoked": true }))?;
    }
    output.say(&format!(
        "key {id} is revoked: whoever uses it is refused; its sandboxes live on"
    ))?;
    Ok(())
}
