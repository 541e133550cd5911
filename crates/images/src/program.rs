//! Running a program of the machine: its lines are handed over as they come, its end is awaited,
//! and it does not outlive the one who started it.

use std::{collections::VecDeque, process::Stdio};

use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader},
    process::Command,
    sync::mpsc,
};

/// How many of a program's last lines an error shows.
const LAST_LINES: usize = 25;
/// Longer lines are cut here, in bytes.
const LINE_BYTES_MAX: u64 = 2_000;
/// How many lines may wait to be handed over; then the program waits.
const LINES_QUEUED_MAX: usize = 256;

/// A program that did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It could not be started.
    #[error(
        "could not start '{program}'; is it installed? (scripts/setup installs what is needed)"
    )]
    Start {
        /// The program.
        program: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It cannot be waited for.
    #[error("could not wait for '{program}'")]
    Wait {
        /// The program.
        program: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It ended with an error.
    #[error("'{program}' failed ({status}); it said last:\n{last}")]
    Failed {
        /// The program.
        program: &'static str,
        /// How it ended.
        status: String,
        /// Its last lines.
        last: String,
    },
}

/// A command that dies with us: killed when this process ends however it ends, and with it
/// everything that it started, because it is the first process of a namespace of its own.
pub(crate) fn contained(namespaces: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command.args([
        "--pdeathsig",
        "KILL",
        "--",
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
    ]);
    command.args(namespaces).arg("--");
    command
}

/// Runs `command` to its end and hands over each line that it prints.
pub(crate) async fn run(
    program: &'static str,
    command: &mut Command,
    mut on_line: impl FnMut(&str) + Send,
) -> Result<(), ProgramError> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command
        .spawn()
        .map_err(|source| ProgramError::Start { program, source })?;
    let (sender, mut lines) = mpsc::channel(LINES_QUEUED_MAX);
    let stdout = child.stdout.take().map(|out| forward(out, sender.clone()));
    let stderr = child.stderr.take().map(|err| forward(err, sender));
    let readers = tokio::spawn(async move {
        tokio::join!(optional(stdout), optional(stderr));
    });
    let mut last = VecDeque::with_capacity(LAST_LINES);
    while let Some(line) = lines.recv().await {
        on_line(&line);
        if last.len() == LAST_LINES {
            last.pop_front();
        }
        last.push_back(line);
    }
    let _ = readers.await;
    let status = child
        .wait()
        .await
        .map_err(|source| ProgramError::Wait { program, source })?;
    if status.success() {
        return Ok(());
    }
    let last: Vec<String> = last.into();
    Err(ProgramError::Failed {
        program,
        status: status.to_string(),
        last: last.join("\n"),
    })
}

/// Runs `command` and returns what it printed.
pub(crate) async fn output(
    program: &'static str,
    command: &mut Command,
) -> Result<String, ProgramError> {
    let mut text = String::new();
    run(program, command, |line| {
        text.push_str(line);
        text.push('\n');
    })
    .await?;
    Ok(text)
}

async fn optional(reader: Option<impl Future<Output = ()>>) {
    if let Some(reader) = reader {
        reader.await;
    }
}

async fn forward(stream: impl AsyncRead + Unpin + Send, lines: mpsc::Sender<String>) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        // A line without an end comes in pieces of the bound.
        let read = (&mut reader)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut line)
            .await;
        if !matches!(read, Ok(count) if count > 0) {
            return;
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches(['\n', '\r']).to_owned();
        if lines.send(text).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[tokio::test]
    async fn a_failure_shows_the_last_lines() {
        let mut seen = 0;
        let script = "for i in $(seq 100); do echo line $i; done; echo last >&2; exit 3";
        let error = run("sh", &mut shell(script), |_| seen += 1)
            .await
            .unwrap_err();
        assert_eq!(seen, 101);
        let text = error.to_string();
        assert!(
            text.contains("exit status: 3") && text.contains("line 100"),
            "{text}"
        );
        assert!(!text.contains("line 50\n"), "{text}");
    }

    #[tokio::test]
    async fn a_line_without_end_is_cut_into_pieces() {
        let mut longest = 0;
        let script = "head -c 1000000 /dev/zero | tr '\\0' x";
        run("sh", &mut shell(script), |line| {
            longest = longest.max(line.len())
        })
        .await
        .unwrap();
        assert_eq!(longest, 2_000);
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let error = output("no-such-program", &mut Command::new("no-such-program")).await;
        assert!(error.unwrap_err().to_string().contains("'no-such-program'"));
    }
}
