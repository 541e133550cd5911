//! How a process ended, in the words of the contract.

use std::{os::unix::process::ExitStatusExt as _, process::ExitStatus};

/// The end of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// The exit code; 128 and the signal's number if a signal killed it, as shells say it.
    pub exit_code: i32,
    /// Whether it ended by itself.
    pub exited: bool,
    /// `exit status 1`, `signal: killed`.
    pub status: String,
    /// The same, but only if it was no success.
    pub error: Option<String>,
    /// Whether it was killed because its deadline passed.
    pub deadline_passed: bool,
}

impl Ending {
    /// Describes an exit status.
    #[must_use]
    pub fn of(status: ExitStatus, deadline_passed: bool) -> Self {
        let (exit_code, exited, text) = match (status.code(), status.signal()) {
            (Some(code), _) => (code, true, format!("exit status {code}")),
            (None, Some(signal)) => {
                let dumped = if status.core_dumped() {
                    " (core dumped)"
                } else {
                    ""
                };
                let text = format!("signal: {}{dumped}", signal_text(signal));
                (128 + signal, false, text)
            }
            (None, None) => (-1, false, String::from("unknown")),
        };
        Self {
            exit_code,
            exited,
            error: (exit_code != 0).then(|| text.clone()),
            status: text,
            deadline_passed,
        }
    }
}

fn signal_text(signal: i32) -> String {
    let text = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_read_as_clients_know_them() {
        let success = Ending::of(ExitStatus::from_raw(0), false);
        assert_eq!((success.exit_code, success.exited), (0, true));
        assert_eq!(success.error, None);

        let failure = Ending::of(ExitStatus::from_raw(3 << 8), false);
        assert_eq!(failure.exit_code, 3);
        assert_eq!(failure.error.as_deref(), Some("exit status 3"));

        // BC-106: a process that was killed shows as 137.
        let killed = Ending::of(ExitStatus::from_raw(libc::SIGKILL), false);
        assert_eq!((killed.exit_code, killed.exited), (137, false));
        assert_eq!(killed.status, "signal: killed");
    }
}
