//! Running the command of a step in a sandbox, through the process service of its agent.
//!
//! What comes back is a guest's: frames, lines and their number are bounded.

use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{Method, Request, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use sandhold_agent_proto::{
    control::{InitRequest, PATH_INIT, PATH_QUIESCE},
    frame::{FLAG_END_STREAM, FrameReader, encode},
};
use sandhold_platform::Egress;
use sandhold_types::{Deadline, Resources, Token};
use serde_json::{Value, json};

use super::StepError;
use crate::{
    oven::{BakeError, Boot, Oven, RootUse, Running, printable},
    progress::Silent,
};

/// Where processes are started.
const PATH_START: &str = "/process.Process/Start";
/// How long a command may take.
const COMMAND_MAX: Duration = Duration::from_secs(3600);
/// How often the disk is looked at while a command runs.
const DISK_INTERVAL: Duration = Duration::from_millis(500);
/// What must stay free of the disk, in bytes.
const DISK_FREE_MIN_BYTES: u64 = 1 << 30;
/// The longest frame, in bytes.
const FRAME_BYTES_MAX: usize = 8 << 20;
/// Longer lines are cut here, in bytes.
const LINE_BYTES_MAX: usize = 2_000;
/// How many last lines an error shows.
const LAST_LINES: usize = 20;
/// What runs commands.
const SHELL: &str = "/bin/bash";

/// Where a line came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// Standard output.
    Standard,
    /// Standard error.
    Error,
}

/// The root that a command runs in, and how it is booted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) root: &'a Path,
    pub(crate) boot_command: &'a [String],
    pub(crate) boot_environment: &'a [String],
    pub(crate) resources: Resources,
}

/// What is run.
#[derive(Debug, Clone)]
pub(crate) struct RunOrder<'a> {
    pub(crate) command: &'a str,
    pub(crate) user: &'a str,
    pub(crate) workdir: &'a str,
    pub(crate) environment: BTreeMap<String, String>,
}

/// Runs a command in a sandbox of its own that writes into the root; returns when the sandbox is
/// gone and all that it wrote is there.
///
/// # Errors
/// It ended with an error or not in time, or its sandbox failed.
pub(crate) async fn run(
    oven: &Oven<'_>,
    place: &Place<'_>,
    order: &RunOrder<'_>,
    on_line: &mut (dyn FnMut(Output, &str) + Send),
) -> Result<(), StepError> {
    let running = Running::prepare(oven, RootUse::Changed).map_err(StepError::Sandbox)?;
    let ran = run_in(&running, place, order, on_line).await;
    let cleaned = running.clean_up().await.map_err(StepError::Sandbox);
    ran.and(cleaned)
}

async fn run_in(
    running: &Running<'_>,
    place: &Place<'_>,
    order: &RunOrder<'_>,
    on_line: &mut (dyn FnMut(Output, &str) + Send),
) -> Result<(), StepError> {
    let boot = Boot {
        root_fs: place.root,
        command: place.boot_command,
        environment: place.boot_environment,
        resources: place.resources,
        egress: Egress::Internet,
    };
    let started = running.start(&boot, &Silent).await;
    started.map_err(StepError::Sandbox)?;
    let access = open_data_plane(running).await.map_err(StepError::Sandbox)?;
    let mut lines = Lines::new(on_line);
    let followed = tokio::select! {
        followed = follow(running, &access, order, &mut lines) => followed?,
        ended = running.engine.wait(&running.instance) => {
            return Err(StepError::Sandbox(running.ended(ended)));
        }
        full = disk_is_full(place.root) => return Err(full),
    };
    lines.end();
    // What was written is on its way to the disk of the machine until now.
    let synced = running.ask(PATH_QUIESCE, Vec::new(), running.deadline());
    synced.await.map_err(StepError::Sandbox)?;
    match followed {
        0 => Ok(()),
        status => Err(StepError::Status {
            status,
            last: lines.last(),
        }),
    }
}

/// Returns when the disk that the root is on is nearly full: nothing else bounds what a command
/// writes while it runs.
async fn disk_is_full(root: &Path) -> StepError {
    loop {
        tokio::time::sleep(DISK_INTERVAL).await;
        let free = rustix::fs::statvfs(root).map(|disk| disk.f_bavail * disk.f_frsize);
        if free.is_ok_and(|bytes| bytes < DISK_FREE_MIN_BYTES) {
            let text = "the disk of the machine is nearly full; the command was ended";
            return StepError::Command(text.to_owned());
        }
    }
}

/// Gives the sandbox a token by which its process service can be asked.
async fn open_data_plane(running: &Running<'_>) -> Result<Token, BakeError> {
    let access = running.new_token();
    let request = InitRequest {
        access_token: Some(access.expose().to_owned()),
        ..InitRequest::default()
    };
    let body = serde_json::to_vec(&request).unwrap_or_default();
    running.ask(PATH_INIT, body, running.deadline()).await?;
    Ok(access)
}

async fn follow(
    running: &Running<'_>,
    access: &Token,
    order: &RunOrder<'_>,
    lines: &mut Lines<'_>,
) -> Result<i64, StepError> {
    let message = json!({ "process": {
        "cmd": SHELL,
        "args": ["-l", "-c", order.command],
        "envs": order.environment,
        "cwd": order.workdir,
    }});
    let broken = |what: String| StepError::Command(what);
    let body = encode(0, message.to_string().as_bytes()).map_err(|e| broken(e.to_string()))?;
    let request = Request::builder()
        .method(Method::POST)
        .uri(PATH_START)
        .header(header::CONTENT_TYPE, "application/connect+json")
        .header("connect-protocol-version", "1")
        .header("connect-timeout-ms", COMMAND_MAX.as_millis().to_string())
        .header("x-access-token", access.expose())
        .header(
            header::AUTHORIZATION,
            format!("Basic {}", STANDARD.encode(format!("{}:", order.user))),
        );
    let deadline = Deadline::after(Instant::now(), COMMAND_MAX);
    let exchange = async {
        let sent = running.send(request, body, deadline).await;
        let (status, body) = sent.map_err(|error| broken(error.to_string()))?;
        if status != StatusCode::OK {
            return Err(broken(format!("the agent answered {status}")));
        }
        read_events(body, lines).await
    };
    let limit = COMMAND_MAX;
    tokio::time::timeout(limit, exchange)
        .await
        .unwrap_or(Err(StepError::Late { limit }))
}

/// Reads events until the process has ended; its exit status.
async fn read_events(mut body: Incoming, lines: &mut Lines<'_>) -> Result<i64, StepError> {
    let broken = |what: &str| StepError::Command(what.to_owned());
    let mut frames = FrameReader::new(FRAME_BYTES_MAX);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| broken("the sandbox broke off its output"))?;
        frames.push(frame.data_ref().map_or(&[], |data| &data[..]));
        while let Some(frame) = frames
            .next_frame()
            .map_err(|error| broken(&error.to_string()))?
        {
            let message: Value = serde_json::from_slice(&frame.payload)
                .map_err(|_| broken("the sandbox sent what is no event"))?;
            if frame.flags & FLAG_END_STREAM != 0 {
                let problem = message["error"]["message"].as_str();
                let problem = problem.unwrap_or("the sandbox ended the output before the command");
                return Err(StepError::Command(printable(problem.as_bytes())));
            }
            if let Some(status) = event(&message["event"], lines) {
                return Ok(status);
            }
        }
    }
    Err(broken("the sandbox broke off its output"))
}

/// Takes an event; the exit status if it is the last.
fn event(event: &Value, lines: &mut Lines<'_>) -> Option<i64> {
    for (stream, output) in [("stdout", Output::Standard), ("stderr", Output::Error)] {
        let text = event["data"][stream].as_str();
        if let Some(bytes) = text.and_then(|text| STANDARD.decode(text).ok()) {
            lines.push(output, &bytes);
        }
    }
    let end = event["end"].as_object()?;
    let exited = end.get("exited").and_then(Value::as_bool).unwrap_or(false);
    let code = end.get("exitCode").and_then(Value::as_i64).unwrap_or(0);
    // One that a signal ended has no status of its own.
    Some(if !exited && code == 0 { -1 } else { code })
}

/// Cuts output into lines.
struct Lines<'a> {
    on_line: &'a mut (dyn FnMut(Output, &str) + Send),
    pending: [Vec<u8>; 2],
    last: VecDeque<String>,
}

impl<'a> Lines<'a> {
    fn new(on_line: &'a mut (dyn FnMut(Output, &str) + Send)) -> Self {
        Self {
            on_line,
            pending: [Vec::new(), Vec::new()],
            last: VecDeque::with_capacity(LAST_LINES),
        }
    }

    fn push(&mut self, output: Output, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let pending = &mut self.pending[index(output)];
            let room = LINE_BYTES_MAX.saturating_sub(pending.len());
            pending.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") {
                self.flush(output);
            }
        }
    }

    fn end(&mut self) {
        for output in [Output::Standard, Output::Error] {
            if !self.pending[index(output)].is_empty() {
                self.flush(output);
            }
        }
    }

    fn flush(&mut self, output: Output) {
        let bytes = std::mem::take(&mut self.pending[index(output)]);
        let line = printable(&bytes);
        let line = line.trim_end_matches('\n');
        (self.on_line)(output, line);
        if self.last.len() == LAST_LINES {
            self.last.pop_front();
        }
        self.last.push_back(line.to_owned());
    }

    fn last(&self) -> String {
        let lines: Vec<&str> = self.last.iter().map(String::as_str).collect();
        lines.join("\n")
    }
}

fn index(output: Output) -> usize {
    match output {
        Output::Standard => 0,
        Output::Error => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(pieces: &[(Output, &[u8])]) -> Vec<(Output, String)> {
        let mut seen = Vec::new();
        let mut on_line = |output, line: &str| seen.push((output, line.to_owned()));
        let mut lines = Lines::new(&mut on_line);
        for (output, bytes) in pieces {
            lines.push(*output, bytes);
        }
        lines.end();
        seen
    }

    #[test]
    fn output_comes_in_whole_lines() {
        let (out, err) = (Output::Standard, Output::Error);
        let seen = lines_of(&[(out, b"a"), (err, b"x\ny"), (out, b"b\n\nc"), (err, b"\n")]);
        let seen: Vec<(Output, &str)> = seen.iter().map(|(o, l)| (*o, l.as_str())).collect();
        assert_eq!(
            seen,
            [(err, "x"), (out, "ab"), (out, ""), (err, "y"), (out, "c")]
        );
    }

    #[test]
    fn a_line_is_cut_and_cannot_drive_a_terminal() {
        let long = vec![b'x'; 1 << 20];
        let seen = lines_of(&[
            (Output::Standard, &long),
            (Output::Standard, b"\n\x1b[2Ja\n"),
        ]);
        assert_eq!(seen[0].1.len(), LINE_BYTES_MAX);
        assert_eq!(seen[1].1, "[2Ja");
    }

    #[test]
    fn an_end_without_an_exit_is_no_success() {
        let mut ignore = |_, _: &str| {};
        let mut lines = Lines::new(&mut ignore);
        let mut status = |text: &str| event(&serde_json::from_str(text).unwrap(), &mut lines);
        assert_eq!(status(r#"{"end":{"exited":true}}"#), Some(0));
        assert_eq!(status(r#"{"end":{"exited":true,"exitCode":3}}"#), Some(3));
        assert_eq!(status(r#"{"end":{"status":"signal: killed"}}"#), Some(-1));
        assert_eq!(status(r#"{"start":{"pid":1}}"#), None);
        assert_eq!(status(r#"{"data":{"stdout":"!"}}"#), None);
    }
}
