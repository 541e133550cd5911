//! `sandhold sandbox files`: a sandbox's files from here.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use futures::TryStreamExt as _;
use http::{Method, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio_util::io::ReaderStream;

use super::{
    output::{Form, Output, size},
    sandbox::ago,
    server::{AGENT_PORT, DataPlane, Options, Sent, Server, with_query},
};

/// What `sandhold sandbox files` can do.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// List a directory.
    Ls {
        /// The sandbox.
        sandbox: String,
        /// The directory; the user's home unless given.
        #[arg(default_value = ".")]
        path: String,
        /// How many levels to list.
        #[arg(long, default_value_t = 1)]
        depth: u32,
        #[command(flatten)]
        common: Common,
    },
    /// Copy a file out of the sandbox.
    Get {
        /// The sandbox.
        sandbox: String,
        /// The file in it.
        path: String,
        /// Where to; `-` is standard output. Its own name in this directory unless given.
        destination: Option<PathBuf>,
        #[command(flatten)]
        common: Common,
    },
    /// Copy a file into the sandbox; one that is there is replaced.
    Put {
        /// The sandbox.
        sandbox: String,
        /// The file here; `-` is standard input.
        source: PathBuf,
        /// Where to in the sandbox; directories that are missing are made.
        path: String,
        #[command(flatten)]
        common: Common,
    },
    /// Delete a file, or with --recursive a directory and everything in it.
    Rm {
        /// The sandbox.
        sandbox: String,
        /// What to delete.
        path: String,
        /// Delete a directory and everything in it.
        #[arg(short, long)]
        recursive: bool,
        #[command(flatten)]
        common: Common,
    },
}

/// What all of them take.
#[derive(Debug, clap::Args)]
pub(crate) struct Common {
    /// The user whose files they are; the template's default user unless given.
    #[arg(short, long)]
    user: Option<String>,
    #[command(flatten)]
    options: Options,
}

impl Common {
    async fn plane(&self, sandbox: &str) -> anyhow::Result<DataPlane> {
        let server = Server::from_options(&self.options)?;
        server.data_plane(sandbox, self.user.as_deref()).await
    }

    /// The path and query of the file routes.
    fn file_route(&self, path: &str) -> String {
        let mut query = with_query("/files");
        query.append_pair("path", path);
        if let Some(user) = &self.user {
            query.append_pair("username", user);
        }
        query.finish()
    }
}

pub(crate) async fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let (Command::Ls { common, .. }
    | Command::Get { common, .. }
    | Command::Put { common, .. }
    | Command::Rm { common, .. }) = command;
    let mut output = Output::standard(common.options.json);
    execute(command, &mut output).await?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn execute(command: &Command, output: &mut Output) -> anyhow::Result<()> {
    match command {
        Command::Ls {
            sandbox,
            path,
            depth,
            common,
        } => list(&common.plane(sandbox).await?, path, *depth, output).await,
        Command::Get {
            sandbox,
            path,
            destination,
            common,
        } => {
            let plane = common.plane(sandbox).await?;
            let destination = destination.as_deref();
            get(&plane, &common.file_route(path), path, destination, output).await
        }
        Command::Put {
            sandbox,
            source,
            path,
            common,
        } => {
            let plane = common.plane(sandbox).await?;
            put(&plane, source, &common.file_route(path), output).await
        }
        Command::Rm {
            sandbox,
            path,
            recursive,
            common,
        } => {
            let plane = common.plane(sandbox).await?;
            remove(&plane, sandbox, path, *recursive, output).await
        }
    }
}

async fn list(
    plane: &DataPlane,
    path: &str,
    depth: u32,
    output: &mut Output,
) -> anyhow::Result<()> {
    let message = json!({ "path": path, "depth": depth });
    let answer = plane
        .call("/filesystem.Filesystem/ListDir", &message)
        .await?;
    let entries = answer["entries"].as_array().cloned().unwrap_or_default();
    let rows: Vec<Vec<String>> = entries.iter().map(|entry| row(entry, depth)).collect();
    let headings = ["MODE", "OWNER", "SIZE", "CHANGED", "NAME"];
    output.rows(&headings, &rows, &json!(entries))?;
    Ok(())
}

fn row(entry: &Value, depth: u32) -> Vec<String> {
    let text = |field: &str| entry[field].as_str().unwrap_or_default();
    let mut name = if depth > 1 {
        text("path")
    } else {
        text("name")
    }
    .to_owned();
    if text("type") == "FILE_TYPE_DIRECTORY" {
        name.push('/');
    }
    if let Some(target) = entry["symlinkTarget"].as_str() {
        name = format!("{name} -> {target}");
    }
    vec![
        text("permissions").to_owned(),
        text("owner").to_owned(),
        size(whole_number(&entry["size"])),
        ago(text("modifiedTime")),
        name,
    ]
}

/// A 64-bit number of proto-JSON, which may be written as text.
fn whole_number(value: &Value) -> u64 {
    value
        .as_u64()
        .or_else(|| value.as_str()?.parse().ok())
        .unwrap_or_default()
}

async fn get(
    plane: &DataPlane,
    route: &str,
    path: &str,
    destination: Option<&Path>,
    output: &mut Output,
) -> anyhow::Result<()> {
    let own_name = Path::new(path).file_name().map(PathBuf::from);
    let Some(destination) = destination.map(Path::to_owned).or(own_name) else {
        bail!("'{path}' names no file; give a destination as well");
    };
    let request = plane
        .request(AGENT_PORT, Method::GET, route)
        .header(header::ACCEPT_ENCODING, "identity")
        .body(super::server::empty())?;
    let mut body = plane.send(request).await?.into_body();
    if destination == Path::new("-") {
        while let Some(frame) = body.frame().await {
            let frame = frame.context("the connection to the sandbox broke")?;
            output.raw(frame.data_ref().map_or(&[], |data| &data[..]))?;
        }
        return Ok(());
    }
    let cannot_write = || format!("{} cannot be written", destination.display());
    let mut file = tokio::fs::File::create(&destination)
        .await
        .with_context(cannot_write)?;
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the connection to the sandbox broke; the file is not whole")?;
        if let Some(data) = frame.data_ref() {
            length += u64::try_from(data.len()).unwrap_or(u64::MAX);
            file.write_all(data).await.with_context(cannot_write)?;
        }
    }
    file.flush().await.with_context(cannot_write)?;
    if output.form() == Form::Json {
        output.json(&json!({ "path": destination, "size": length }))?;
    } else {
        output.note(&format!("{} ({})", destination.display(), size(length)))?;
    }
    Ok(())
}

async fn put(
    plane: &DataPlane,
    source: &Path,
    route: &str,
    output: &mut Output,
) -> anyhow::Result<()> {
    let mut request = plane
        .request(AGENT_PORT, Method::POST, route)
        .header(header::CONTENT_TYPE, "application/octet-stream");
    let body = if source == Path::new("-") {
        let input = tokio_stream::wrappers::ReceiverStream::new(super::stdin::chunks());
        let frames = futures::StreamExt::map(input, |chunk| Ok(Frame::data(chunk)));
        Sent::new(StreamBody::new(frames))
    } else {
        let cannot_read = || format!("{} cannot be read", source.display());
        let file = tokio::fs::File::open(source)
            .await
            .with_context(cannot_read)?;
        let about = file.metadata().await.with_context(cannot_read)?;
        if about.is_dir() {
            bail!(
                "{} is a directory; only files can be copied",
                source.display()
            );
        }
        if about.is_file() {
            request = request.header(header::CONTENT_LENGTH, about.len());
        }
        Sent::new(StreamBody::new(ReaderStream::new(file).map_ok(Frame::data)))
    };
    let response = plane.send(request.body(body)?).await?;
    let bytes = response.into_body().collect().await?.to_bytes();
    let written: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    if output.form() == Form::Json {
        output.json(&written[0])?;
    } else {
        let path = written[0]["path"].as_str().unwrap_or("written");
        output.note(path)?;
    }
    Ok(())
}

async fn remove(
    plane: &DataPlane,
    sandbox: &str,
    path: &str,
    recursive: bool,
    output: &mut Output,
) -> anyhow::Result<()> {
    let message = json!({ "path": path });
    let found = plane.call("/filesystem.Filesystem/Stat", &message).await?;
    let is_directory = found["entry"]["type"] == "FILE_TYPE_DIRECTORY";
    let is_link = found["entry"]["symlinkTarget"].is_string();
    if is_directory && !is_link && !recursive {
        bail!("{path} is a directory; --recursive deletes it and everything in it");
    }
    plane
        .call("/filesystem.Filesystem/Remove", &message)
        .await?;
    let what = found["entry"]["path"].as_str().unwrap_or(path);
    let everything = if is_directory && !is_link {
        " and everything in it"
    } else {
        ""
    };
    output.note(&format!("deleted {what}{everything} in sandbox {sandbox}"))?;
    if output.form() == Form::Json {
        output.json(&json!({ "deleted": what }))?;
    }
    Ok(())
}
