//! Bash as a kernel, without Jupyter: one interactive shell on pipes, a few megabytes large, up
//! in milliseconds, and there in every template that holds bash.
//!
//! ```text
//!  execute --stdin--> eval $'…' </dev/null      what SIGINT interrupts
//!                     printf marker             to both streams, whatever happened before
//!  events  <--stdout-- text … \0marker status\0
//!          <--stderr-- text … \0marker status\0
//! ```
//!
//! An interactive shell because only that returns to its next line after SIGINT, from any depth
//! of loops and functions. Invariants: an execution ends when both markers have arrived, so all
//! that was printed before has arrived too; what background jobs print later belongs to the
//! execution that runs then, or to none.

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::unix::pipe,
    sync::mpsc,
    task::JoinHandle,
    time::{Duration, timeout},
};

use super::{
    events::{Failure, KernelEvent, Stream},
    jupyter::KernelError,
    process::KernelProcess,
    variables::bash_quoted,
};
use crate::{
    account::Account,
    children::{self, Children},
};

const START_WAIT: Duration = Duration::from_secs(20);
const READ_BYTES: usize = 64 << 10;
const EVENTS_WAITING_MAX: usize = 1024;
/// Line editing, prompts, history and job control are for a terminal. Descriptors 62 and 63 keep
/// the way to the agent open whatever a cell does to 1 and 2.
const PREPARATION: &str = "PS1= PS2= PS0= PROMPT_COMMAND=; unset MAILCHECK HISTFILE; \
                           set +H +m +o history; exec 62>&1 63>&2\n";

/// A running shell.
#[derive(Debug)]
pub(super) struct BashKernel {
    process: Arc<KernelProcess>,
    stdin: tokio::sync::Mutex<pipe::Sender>,
    marker: String,
    count: AtomicU64,
    run: Arc<Mutex<Option<Run>>>,
    readers: [JoinHandle<()>; 2],
}

/// The execution that the streams belong to.
#[derive(Debug)]
struct Run {
    events: mpsc::Sender<KernelEvent>,
    silent: bool,
    streams_open: u8,
}

/// What a shell is started with.
#[derive(Debug)]
pub(super) struct BashLaunch<'a> {
    pub(super) account: &'a Account,
    pub(super) cwd: &'a Path,
    pub(super) environment: &'a BTreeMap<String, String>,
    /// A word that nothing else prints.
    pub(super) marker: String,
}

impl BashKernel {
    /// Starts a shell and waits until it answers.
    pub(super) async fn start(
        children: &Children,
        launch: BashLaunch<'_>,
    ) -> Result<Self, KernelError> {
        let spawn_error = |source| KernelError::Spawn {
            program: String::from("bash"),
            source,
        };
        let mut command = Command::new("bash");
        command
            .args(["--noprofile", "--norc", "--noediting", "-i"])
            .env_clear()
            .envs(launch.environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        children::run_as(&mut command, launch.account, launch.cwd).map_err(spawn_error)?;
        let spawned = children.spawn(command).await.map_err(spawn_error)?;
        let process = Arc::new(KernelProcess::watch(spawned.pid, spawned.exit));
        let run = Arc::new(Mutex::new(None));
        let reader = |pipe, stream| {
            let reader = StreamReader {
                stream,
                run: Arc::clone(&run),
                marker: launch.marker.clone(),
            };
            Ok::<_, KernelError>(tokio::spawn(reader.read(receiver(pipe)?)))
        };
        let kernel = Self {
            readers: [
                reader(spawned.stdout, Stream::Stdout)?,
                reader(spawned.stderr, Stream::Stderr)?,
            ],
            stdin: tokio::sync::Mutex::new(sender(spawned.stdin)?),
            process,
            marker: launch.marker,
            count: AtomicU64::new(0),
            run,
        };
        kernel.prepare().await?;
        Ok(kernel)
    }

    /// The shell says that it has no terminal; nobody needs to hear it.
    async fn prepare(&self) -> Result<(), KernelError> {
        let mut events = self.begin(true);
        self.write(&format!("{PREPARATION}{}", self.report()))
            .await?;
        let prepared = timeout(START_WAIT, async {
            while let Some(event) = events.recv().await {
                if event == KernelEvent::Idle {
                    return true;
                }
            }
            false
        });
        match prepared.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(KernelError::EndedEarly(self.process.ended().await)),
            Err(_) => Err(KernelError::Silent),
        }
    }

    /// Runs the code. A silent execution prints nothing.
    pub(super) async fn execute(
        &self,
        code: &str,
        silent: bool,
    ) -> Result<mpsc::Receiver<KernelEvent>, KernelError> {
        let events = self.begin(silent);
        let line = format!("eval {} </dev/null\n{}", bash_quoted(code), self.report());
        self.write(&line).await?;
        Ok(events)
    }

    fn begin(&self, silent: bool) -> mpsc::Receiver<KernelEvent> {
        let (sender, receiver) = mpsc::channel(EVENTS_WAITING_MAX);
        if !silent {
            let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
            // The channel is new and has room.
            let _ = sender.try_send(KernelEvent::Began { count });
        }
        *self.run.lock().unwrap_or_else(PoisonError::into_inner) = Some(Run {
            events: sender,
            silent,
            streams_open: 2,
        });
        receiver
    }

    /// The line that reports the status of the one before it.
    fn report(&self) -> String {
        let marker = &self.marker;
        format!(
            "{{ __sandhold=$?; printf '\\0{marker} %d\\0' \"$__sandhold\" >&62; \
             printf '\\0{marker} %d\\0' \"$__sandhold\" >&63; }} 2>/dev/null\n"
        )
    }

    async fn write(&self, text: &str) -> io::Result<()> {
        self.stdin.lock().await.write_all(text.as_bytes()).await
    }

    /// Its process.
    pub(super) fn process(&self) -> &KernelProcess {
        &self.process
    }
}

impl Drop for BashKernel {
    fn drop(&mut self) {
        for reader in &self.readers {
            reader.abort();
        }
    }
}

/// One of the two streams.
struct StreamReader {
    stream: Stream,
    run: Arc<Mutex<Option<Run>>>,
    marker: String,
}

impl StreamReader {
    async fn read(self, mut pipe: pipe::Receiver) {
        let mut splitter = Splitter::new(&self.marker);
        let mut buffer = vec![0; READ_BYTES];
        while let Ok(length @ 1..) = pipe.read(&mut buffer).await {
            for part in splitter.push(&buffer[..length]) {
                self.pass_on(part).await;
            }
        }
        for part in splitter.finish() {
            self.pass_on(part).await;
        }
        // The shell is gone, and nothing follows.
        if let Some(run) = &mut *self.lock() {
            run.streams_open = run.streams_open.saturating_sub(1);
        }
        self.end_if_both_are_closed();
    }

    async fn pass_on(&self, part: Part) {
        let (events, event) = match part {
            Part::Text(text) => {
                let Some(events) = self.audible() else {
                    return;
                };
                let stream = self.stream;
                let printed = KernelEvent::Printed {
                    stream,
                    text,
                    date: None,
                };
                (events, printed)
            }
            Part::Marker(status) => {
                let Some(events) = self.stream_done() else {
                    return;
                };
                let failure = (status != 0).then(|| exit_status(status));
                if let Some(failure) = failure.clone() {
                    let _ = events.send(KernelEvent::Failed(failure)).await;
                }
                let _ = events.send(KernelEvent::Replied(failure)).await;
                (events, KernelEvent::Idle)
            }
        };
        // The execution may have stopped listening.
        let _ = events.send(event).await;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Run>> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn audible(&self) -> Option<mpsc::Sender<KernelEvent>> {
        self.lock()
            .as_ref()
            .filter(|run| !run.silent)
            .map(|run| run.events.clone())
    }

    /// This stream's marker has come. The listener, if it was the second of the two.
    fn stream_done(&self) -> Option<mpsc::Sender<KernelEvent>> {
        let mut guard = self.lock();
        let run = guard.as_mut()?;
        run.streams_open = run.streams_open.saturating_sub(1);
        if run.streams_open == 0 {
            guard.take().map(|run| run.events)
        } else {
            None
        }
    }

    fn end_if_both_are_closed(&self) {
        let mut guard = self.lock();
        if guard.as_ref().is_some_and(|run| run.streams_open == 0) {
            guard.take();
        }
    }
}

fn exit_status(status: u8) -> Failure {
    let value = match status {
        130 => String::from("interrupted (exit status 130)"),
        other => format!("exit status {other}"),
    };
    Failure {
        name: String::from("ExitStatus"),
        value,
        traceback: String::new(),
    }
}

/// A part of what a stream said.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    Text(String),
    /// An execution is over, with this status.
    Marker(u8),
}

/// Finds the markers in a stream of bytes, wherever the stream is divided.
#[derive(Debug)]
pub(super) struct Splitter {
    /// A NUL, the word, and a space.
    prefix: Vec<u8>,
    /// Bytes of which it is not known yet what they are.
    pending: Vec<u8>,
}

/// After the prefix: three digits and a NUL.
const STATUS_BYTES_MAX: usize = 4;

impl Splitter {
    pub(super) fn new(marker: &str) -> Self {
        Self {
            prefix: format!("\0{marker} ").into_bytes(),
            pending: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<Part> {
        self.pending.extend_from_slice(bytes);
        let mut parts = Vec::new();
        while let Some(at) = find(&self.pending, &self.prefix) {
            let after = at + self.prefix.len();
            let Some(length) = self.pending[after..].iter().position(|byte| *byte == 0) else {
                if self.pending.len() - after < STATUS_BYTES_MAX {
                    // The rest of the marker is still to come.
                    self.text(at, &mut parts);
                    return parts;
                }
                break;
            };
            let digits = self.pending[after..after + length].to_vec();
            self.text(at, &mut parts);
            self.pending.drain(..self.prefix.len() + length + 1);
            let status = std::str::from_utf8(&digits)
                .ok()
                .and_then(|d| d.parse().ok());
            parts.push(Part::Marker(status.unwrap_or(u8::MAX)));
        }
        let keep = self.undecided();
        self.text(self.pending.len() - keep, &mut parts);
        parts
    }

    pub(super) fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        self.text(self.pending.len(), &mut parts);
        parts
    }

    /// How many bytes at the end may be the beginning of a marker or of a character.
    fn undecided(&self) -> usize {
        let longest = self.prefix.len().min(self.pending.len());
        let marker = (1..=longest)
            .rev()
            .find(|length| self.pending.ends_with(&self.prefix[..*length]))
            .unwrap_or(0);
        let character = match std::str::from_utf8(&self.pending) {
            Err(error) if error.error_len().is_none() => self.pending.len() - error.valid_up_to(),
            _ => 0,
        };
        marker.max(character)
    }

    /// Takes the first bytes as text.
    fn text(&mut self, length: usize, parts: &mut Vec<Part>) {
        if length > 0 {
            let bytes: Vec<u8> = self.pending.drain(..length).collect();
            parts.push(Part::Text(String::from_utf8_lossy(&bytes).into_owned()));
        }
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

fn receiver(pipe: Option<OwnedFd>) -> io::Result<pipe::Receiver> {
    pipe::Receiver::from_owned_fd(pipe.ok_or(io::ErrorKind::BrokenPipe)?)
}

fn sender(pipe: Option<OwnedFd>) -> io::Result<pipe::Sender> {
    pipe::Sender::from_owned_fd(pipe.ok_or(io::ErrorKind::BrokenPipe)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&[u8]]) -> (String, Vec<u8>) {
        let mut splitter = Splitter::new("MARK");
        let mut parts: Vec<Part> = chunks.iter().flat_map(|c| splitter.push(c)).collect();
        parts.extend(splitter.finish());
        let mut text = String::new();
        let mut statuses = Vec::new();
        for part in parts {
            match part {
                Part::Text(more) => text.push_str(&more),
                Part::Marker(status) => statuses.push(status),
            }
        }
        (text, statuses)
    }

    #[test]
    fn a_marker_is_found_wherever_the_stream_is_divided() {
        let bytes = "é one\n\0MARK 130\0two\0MARK 0\0".as_bytes();
        for size in 1..=bytes.len() {
            let chunks: Vec<_> = bytes.chunks(size).collect();
            let (text, statuses) = split(&chunks);
            assert_eq!(text, "é one\ntwo", "chunks of {size}");
            assert_eq!(statuses, [130, 0], "chunks of {size}");
        }
    }

    #[test]
    fn what_only_looks_like_a_marker_is_text() {
        let (text, statuses) = split(&[b"\0MAR \0MARK long status\0 \xff end"]);
        assert!(text.contains("MAR "), "{text:?}");
        assert!(text.ends_with("\u{fffd} end"), "{text:?}");
        // A program that prints the marker itself only hurts its own execution.
        assert_eq!(statuses, [u8::MAX]);
        let (text, statuses) = split(&[b"\0MARK 0000000"]);
        assert_eq!(text, "\0MARK 0000000");
        assert_eq!(statuses, [0; 0]);
    }
}
