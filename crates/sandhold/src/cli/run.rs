//! `sandhold run`: a command in a sandbox of its own, with its files, until it is done.
//!
//! ```text
//!   POST /v1/sandbox-runs ─▶ events ─┬─ artifacts ─▶ --save
//!         ▲                          ├─ broke off ─▶ attached again, from the last event
//!         └─ Ctrl-C: cancelled       └─ completed ─▶ its output, its exit status
//! ```

use std::{
    path::{Component, Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::Method;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, signal::unix::SignalKind};

use super::{
    events::{Event, Events},
    output::{Form, Output},
    server::{Options, Server, segment},
};

/// How often a stream that broke off is attached again without an event in between.
const ATTACHES_MAX: u32 = 30;
/// How long to wait before that.
const ATTACH_PAUSE: Duration = Duration::from_secs(1);
/// Without anything from the server for this long, the stream is attached again.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Options of `sandhold run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The project, a part of the owner's name.
    #[arg(long, default_value = "cli")]
    project: String,
    /// The session, a part of the owner's name. A new one unless given.
    #[arg(long)]
    session: Option<String>,
    /// For whom the sandbox is, if it is not to be made of project and session.
    #[arg(long)]
    owner: Option<String>,
    /// The lease to run under; the sandbox stays for it.
    #[arg(long)]
    lease: Option<String>,
    /// `main`, `light`, or an ID or a name of a template.
    #[arg(long, default_value = "light")]
    template: String,
    /// Write a file into the workspace before; can be repeated.
    #[arg(long = "file", value_name = "FILE[:PATH]")]
    files: Vec<String>,
    /// Tell of files that match, as they come to be; can be repeated.
    #[arg(long = "artifact", value_name = "GLOB")]
    artifacts: Vec<String>,
    /// Where to put the artifacts.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Set a variable for the command; can be repeated.
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = super::sandbox::pair)]
    env: Vec<(String, String)>,
    /// Where the command runs.
    #[arg(short = 'w', long, value_name = "DIR")]
    cwd: Option<String>,
    /// End it after this many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u32,
    /// Keep the sandbox for its lease when the command has ended.
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    options: Options,
    /// The command and its arguments, behind `--`.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Runs the command; its exit status is this command's.
pub(crate) async fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let status = execute(args, &mut Output::standard(args.options.json)).await?;
    Ok(ExitCode::from(status))
}

fn ask(args: &Args) -> anyhow::Result<Value> {
    let session = match &args.session {
        Some(session) => session.clone(),
        None => format!(
            "{}-{}",
            std::process::id(),
            jiff::Timestamp::now().as_millisecond()
        ),
    };
    let files: Vec<Value> = (args.files.iter())
        .map(|text| file(text))
        .collect::<anyhow::Result<_>>()?;
    let env: serde_json::Map<String, Value> = (args.env.iter())
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect();
    let mut body = json!({
        "project_id": args.project,
        "session_run_id": session,
        "owner_id": args.owner,
        "lease_id": args.lease,
        "files": files,
        "command": args.command,
        "env_vars": env,
        "cwd": args.cwd,
        "timeout": args.timeout,
        "artifacts": args.artifacts,
        "keep": args.keep.then_some("sandbox"),
    });
    let field = match args.template.as_str() {
        "main" | "light" => "template",
        _ => "template_id",
    };
    body[field] = json!(args.template);
    Ok(body)
}

/// A file as `FILE` or `FILE:PATH`.
fn file(text: &str) -> anyhow::Result<Value> {
    let (local, path) = match text.rsplit_once(':') {
        Some((local, path)) if !local.is_empty() && !path.is_empty() => (local, path.to_owned()),
        _ => {
            let name = Path::new(text).file_name().context("a file has no name")?;
            (text, name.to_string_lossy().into_owned())
        }
    };
    let content = std::fs::read(local).with_context(|| format!("{local} cannot be read"))?;
    Ok(json!({ "path": path, "content_base64": STANDARD.encode(content) }))
}

pub(crate) async fn execute(args: &Args, output: &mut Output) -> anyhow::Result<u8> {
    let server = Server::from_options(&args.options)?;
    let body = ask(args)?;
    let mut stream = server
        .events("/v1/sandbox-runs", Method::POST, Some(&body), None)
        .await?;
    let run = stream.run_id.clone().context("the server named no run")?;
    let mut interrupt = tokio::signal::unix::signal(SignalKind::interrupt())?;
    let mut follower = Follower {
        args,
        started: None,
        last: None,
    };
    let mut attaches = 0;
    loop {
        let followed = tokio::select! {
            followed = follower.follow(stream.body, output) => followed,
            _ = interrupt.recv() => {
                follower.cancel(&server, &run).await?;
                output.note("sandhold: asked the run to end")?;
                Ok(Followed::BrokeOff { had_events: true })
            }
        };
        match followed? {
            Followed::Ended(status) => return Ok(status),
            Followed::BrokeOff { had_events: true } => attaches = 0,
            Followed::BrokeOff { .. } => attaches += 1,
        }
        stream = loop {
            if attaches > ATTACHES_MAX {
                bail!("run {run} cannot be followed any more; it may go on");
            }
            let path = format!("/v1/sandbox-runs/{}/events", segment(&run));
            let last = follower.last.as_deref();
            match server.events(&path, Method::GET, None, last).await {
                Ok(stream) => break stream,
                Err(error) if attaches == ATTACHES_MAX => return Err(error),
                Err(_) => attaches += 1,
            }
            tokio::time::sleep(ATTACH_PAUSE).await;
        };
    }
}

/// What became of a stream.
enum Followed {
    Ended(u8),
    BrokeOff { had_events: bool },
}

struct Follower<'a> {
    args: &'a Args,
    /// What its first event said.
    started: Option<Value>,
    last: Option<String>,
}

impl Follower<'_> {
    async fn follow(
        &mut self,
        mut body: Incoming,
        output: &mut Output,
    ) -> anyhow::Result<Followed> {
        let mut events = Events::default();
        let mut had_events = false;
        loop {
            let frame = tokio::time::timeout(SILENCE_MAX, body.frame()).await;
            let Ok(Some(Ok(frame))) = frame else {
                return Ok(Followed::BrokeOff { had_events });
            };
            events.push(frame.data_ref().map_or(&[], |data| &data[..]));
            while let Some(event) = events.next()? {
                had_events = true;
                let status = self.event(&event, output).await?;
                self.last = event.id.or_else(|| self.last.take());
                if let Some(status) = status {
                    return Ok(Followed::Ended(status));
                }
            }
        }
    }

    /// Handles one event; the exit status if it was the last.
    async fn event(&mut self, event: &Event, output: &mut Output) -> anyhow::Result<Option<u8>> {
        let data: Value = serde_json::from_str(&event.data)
            .context("the server sent an event that is no JSON")?;
        if output.form() == Form::Json {
            output.json(&json!({ "event": event.kind, "data": data }))?;
        }
        match event.kind.as_str() {
            "started" => {
                let (sandbox, owner) = (&data["sandbox_id"], &data["owner_id"]);
                output.note(&format!("sandhold: started in {sandbox} for {owner}"))?;
                self.started = Some(data);
            }
            "progress" => self.artifact(&data["artifact"], output).await?,
            "completed" => {
                self.told(&data, output)?;
                let code = data["exit_code"].as_i64().unwrap_or(0);
                return Ok(Some(u8::try_from(code).unwrap_or(u8::MAX)));
            }
            "error" => {
                self.told(&data, output)?;
                bail!(
                    "the run ended: {}",
                    data["message"].as_str().unwrap_or_default()
                );
            }
            _ => {}
        }
        Ok(None)
    }

    fn told(&self, data: &Value, output: &mut Output) -> anyhow::Result<()> {
        if output.form() != Form::Json {
            output.raw(data["stdout"].as_str().unwrap_or_default().as_bytes())?;
            output.raw_error(data["stderr"].as_str().unwrap_or_default().as_bytes())?;
        }
        Ok(())
    }

    async fn artifact(&self, artifact: &Value, output: &mut Output) -> anyhow::Result<()> {
        let path = artifact["path"].as_str().unwrap_or_default();
        if let Some(why) = artifact["omitted"].as_str() {
            output.note(&format!("sandhold: {path} is left out: {why}"))?;
            return Ok(());
        }
        if let Some(directory) = &self.args.save {
            let content = artifact["content_base64"].as_str().unwrap_or_default();
            let content = STANDARD
                .decode(content)
                .context("an artifact is not base64")?;
            let offset = artifact["offset"].as_u64().unwrap_or(0);
            save(directory, path, offset, &content).await?;
        }
        if artifact["last"] == true {
            output.note(&format!("sandhold: {path}, {} bytes", artifact["size"]))?;
        }
        Ok(())
    }

    async fn cancel(&self, server: &Server, run: &str) -> anyhow::Result<()> {
        let path = format!("/v1/sandbox-runs/{}", segment(run));
        let found = server.call(Method::GET, &path, None).await?;
        let body = json!({ "owner_id": found["owner_id"], "lease_id": found["lease_id"] });
        let path = format!("{path}/cancel");
        server.call(Method::POST, &path, Some(&body)).await?;
        Ok(())
    }
}

/// Puts a part of an artifact where it belongs: never outside of the directory, whatever the sandbox
/// called it.
async fn save(directory: &Path, path: &str, offset: u64, content: &[u8]) -> anyhow::Result<()> {
    let is_inside = Path::new(path)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    if !is_inside {
        bail!("the sandbox named an artifact {path:?}, which leads out of the directory");
    }
    let target = directory.join(path);
    let cannot = || format!("{} cannot be written", target.display());
    if let Some(parent) = target.parent() {
        tokio::fs::create_dir_all(parent)
            .await
            .with_context(cannot)?;
    }
    let mut file = tokio::fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(offset == 0)
        .append(offset > 0)
        .open(&target)
        .await
        .with_context(cannot)?;
    file.write_all(content).await.with_context(cannot)?;
    file.flush().await.with_context(cannot)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn artifacts_stay_in_their_directory() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), "a/b", 0, b"one").await.unwrap();
        save(dir.path(), "a/b", 3, b"two").await.unwrap();
        let whole = std::fs::read(dir.path().join("a/b")).unwrap();
        assert_eq!(whole, b"onetwo");
        for path in ["../x", "/etc/x", "a/../../x", ""] {
            let saved = save(dir.path(), path, 0, b"").await;
            assert!(saved.is_err(), "{path}");
        }
    }
}
