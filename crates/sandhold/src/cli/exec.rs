//! `sandhold sandbox exec`: runs a program in a sandbox as if it were here.
//!
//! ```text
//!  stdin ──thread──▶ SendInput … CloseStdin ──▶ process
//!  stdout, stderr ◀── Start's stream ◀──────────  │
//!  exit status ◀────── its end ◀──────────────────┘
//! ```
//!
//! Arguments reach the program as they were given: no shell is between (BC-020).

use std::{collections::BTreeMap, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{Method, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

use super::{
    connect::{Frame, FrameError, Frames, enveloped},
    failure,
    output::{Form, Output},
    server::{AGENT_PORT, DataPlane, Options, Server, whole},
    stdin, terminal,
};

/// The exit status for a failure of this command itself, as other programs that start programs
/// have it; so it is told apart from the program's own 1.
const OWN_FAILURE: u8 = 125;
/// How often the agent is asked to show that it is there, in seconds.
const KEEP_ALIVE_S: u32 = 50;
/// Without anything from the sandbox for this long, it is given up.
const SILENCE_MAX: Duration = Duration::from_secs(180);

/// Options of `sandhold sandbox exec`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The sandbox.
    sandbox: String,
    /// Set a variable for the program; can be repeated.
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = super::sandbox::pair)]
    env: Vec<(String, String)>,
    /// The directory to start in.
    #[arg(short = 'w', long, value_name = "DIR")]
    cwd: Option<String>,
    /// The user to run as; the template's default user unless given.
    #[arg(short, long)]
    user: Option<String>,
    /// Give the program a terminal, for shells and editors.
    #[arg(short, long)]
    tty: bool,
    /// End the program after this many seconds.
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u32>,
    #[command(flatten)]
    options: Options,
    /// The program and its arguments, behind `--`.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Runs the program; its exit status is this command's.
pub(crate) async fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut output = Output::standard(args.options.json);
    match execute(args, &mut output, stdin::chunks).await {
        Ok(status) => Ok(ExitCode::from(status)),
        Err(error) => {
            output.note(&failure::told(&error, args.options.json))?;
            Ok(ExitCode::from(OWN_FAILURE))
        }
    }
}

/// Runs the program with `input` as its standard input.
pub(crate) async fn execute(
    args: &Args,
    output: &mut Output,
    input: impl FnOnce() -> mpsc::Receiver<Bytes>,
) -> anyhow::Result<u8> {
    let server = Server::from_options(&args.options)?;
    let plane = server
        .data_plane(&args.sandbox, args.user.as_deref())
        .await?;
    let raw_mode = args.tty.then(terminal::RawMode::enter).transpose()?;
    let mut request = plane
        .request(AGENT_PORT, Method::POST, "/process.Process/Start")
        .header(header::CONTENT_TYPE, "application/connect+json")
        .header("connect-protocol-version", "1")
        .header("keepalive-ping-interval", KEEP_ALIVE_S);
    if let Some(seconds) = args.timeout {
        request = request.header("connect-timeout-ms", u64::from(seconds) * 1000);
    }
    let request = request.body(whole(enveloped(&start_message(args))))?;
    let body = plane.send(request).await?.into_body();
    let mut process = Process {
        plane: Arc::new(plane),
        is_tty: args.tty,
        pid: None,
        interrupts: 0,
    };
    let status = process.follow(body, output, input).await;
    drop(raw_mode);
    status
}

fn start_message(args: &Args) -> Value {
    let environment: BTreeMap<&str, &str> = args
        .env
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let mut message = json!({
        "process": {
            "cmd": args.command[0],
            "args": args.command[1..],
            "envs": environment,
        },
        "stdin": true,
    });
    if let Some(directory) = &args.cwd {
        message["process"]["cwd"] = json!(directory);
    }
    if args.tty {
        message["pty"] = json!({ "size": terminal::size() });
    }
    message
}

/// A program that runs in a sandbox.
struct Process {
    plane: Arc<DataPlane>,
    is_tty: bool,
    pid: Option<u64>,
    /// How often the caller pressed Ctrl-C.
    interrupts: u32,
}

impl Process {
    /// Passes everything on until the program ends.
    async fn follow(
        &mut self,
        mut body: Incoming,
        output: &mut Output,
        input: impl FnOnce() -> mpsc::Receiver<Bytes>,
    ) -> anyhow::Result<u8> {
        let mut frames = Frames::default();
        let mut input = Some(input);
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut resize = signal(SignalKind::window_change())?;
        loop {
            let frame = tokio::select! {
                frame = tokio::time::timeout(SILENCE_MAX, body.frame()) => frame
                    .with_context(|| format!("nothing came for {SILENCE_MAX:?}; the sandbox hangs"))?,
                () = received(&mut interrupt), if !self.is_tty => {
                    self.interrupt(output).await?;
                    continue;
                }
                () = received(&mut resize), if self.is_tty => {
                    self.resize().await;
                    continue;
                }
            };
            let Some(frame) = frame else {
                bail!("the connection to the sandbox ended before the program did");
            };
            let frame = frame.context("the connection to the sandbox broke")?;
            frames.push(frame.data_ref().map_or(&[], |data| &data[..]));
            while let Some(frame) = frames.next().map_err(explained)? {
                let Frame::Message(message) = frame else {
                    bail!("the sandbox ended the stream before the program's end");
                };
                if let Some(status) = self.event(&message["event"], output)? {
                    return Ok(status);
                }
                if let Some(pid) = self.pid
                    && let Some(input) = input.take()
                {
                    let sender = forward_input(Arc::clone(&self.plane), pid, self.is_tty, input());
                    tokio::spawn(sender);
                }
            }
        }
    }

    /// Handles one event; the exit status if it was the last.
    fn event(&mut self, event: &Value, output: &mut Output) -> anyhow::Result<Option<u8>> {
        if let Some(pid) = event["start"]["pid"].as_u64() {
            self.pid = Some(pid);
        }
        for (stream, is_error) in [("stdout", false), ("pty", false), ("stderr", true)] {
            let Some(text) = event["data"][stream].as_str() else {
                continue;
            };
            let bytes = STANDARD
                .decode(text)
                .context("the sandbox sent output that is not base64")?;
            if output.form() == Form::Json {
                output.json(&json!({ stream: String::from_utf8_lossy(&bytes) }))?;
            } else if is_error {
                output.raw_error(&bytes)?;
            } else {
                output.raw(&bytes)?;
            }
        }
        let end = &event["end"];
        if end.is_null() {
            return Ok(None);
        }
        let code = end["exitCode"].as_i64().unwrap_or(0);
        if output.form() == Form::Json {
            output.json(&json!({ "exitCode": code, "status": end["status"] }))?;
        }
        Ok(Some(u8::try_from(code).unwrap_or(u8::MAX)))
    }

    /// Ctrl-C: asks the program to end; the second time it is killed.
    async fn interrupt(&mut self, output: &mut Output) -> anyhow::Result<()> {
        let Some(pid) = self.pid else {
            bail!("interrupted before the program started");
        };
        self.interrupts += 1;
        let name = if self.interrupts == 1 {
            output.note("sandhold: asked the program to end; Ctrl-C again kills it")?;
            "SIGNAL_SIGTERM"
        } else {
            "SIGNAL_SIGKILL"
        };
        let message = json!({ "process": { "pid": pid }, "signal": name });
        self.plane
            .call("/process.Process/SendSignal", &message)
            .await?;
        Ok(())
    }

    async fn resize(&self) {
        let Some(pid) = self.pid else { return };
        let message = json!({
            "process": { "pid": pid },
            "pty": { "size": terminal::size() },
        });
        // A wrong size is no reason to end.
        let _ = self.plane.call("/process.Process/Update", &message).await;
    }
}

async fn received(signal: &mut Signal) {
    if signal.recv().await.is_none() {
        std::future::pending::<()>().await;
    }
}

/// Sends standard input until it or the program ends.
async fn forward_input(
    plane: Arc<DataPlane>,
    pid: u64,
    is_tty: bool,
    mut input: mpsc::Receiver<Bytes>,
) {
    let stream = if is_tty { "pty" } else { "stdin" };
    while let Some(chunk) = input.recv().await {
        let message = json!({
            "process": { "pid": pid },
            "input": { stream: STANDARD.encode(&chunk) },
        });
        // The program has ended or closed its input; its end is told by the other stream.
        if plane
            .call("/process.Process/SendInput", &message)
            .await
            .is_err()
        {
            return;
        }
    }
    if !is_tty {
        let message = json!({ "process": { "pid": pid } });
        let _ = plane.call("/process.Process/CloseStdin", &message).await;
    }
}

fn explained(error: FrameError) -> anyhow::Error {
    let hint = match &error {
        FrameError::Failed { code, .. } if code == "not_found" || code == "invalid_argument" => {
            Some("is the program's name right, and is it installed in the sandbox?")
        }
        FrameError::Failed { code, .. } if code == "deadline_exceeded" => {
            Some("the program was ended because its --timeout passed")
        }
        _ => None,
    };
    match hint {
        Some(hint) => anyhow::anyhow!("{error}\n  {hint}"),
        None => error.into(),
    }
}
