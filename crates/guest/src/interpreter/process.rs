//! The process of a kernel: the leader of its own session and process group.

use std::{os::unix::process::ExitStatusExt as _, process::ExitStatus, time::Duration};

use rustix::process::{Pid, Signal};
use tokio::sync::watch;

use crate::children::ExitWaiter;

/// A process that was sent SIGKILL is gone within this time, or nothing can be done about it.
const KILL_WAIT: Duration = Duration::from_secs(5);

/// How the end of a process that ended by itself is told.
pub(super) const EXIT_STATUS: &str = "exit status ";

/// A running or ended kernel process.
#[derive(Debug)]
pub(super) struct KernelProcess {
    pid: u32,
    ended: watch::Receiver<Option<String>>,
}

impl KernelProcess {
    /// Watches over the process.
    pub(super) fn watch(pid: u32, exit: ExitWaiter) -> Self {
        let (sender, ended) = watch::channel(None);
        tokio::spawn(async move {
            let status = exit.wait().await;
            sender.send_replace(Some(describe(status)));
        });
        Self { pid, ended }
    }

    /// How it ended, if it did.
    pub(super) fn end(&self) -> Option<String> {
        self.ended.borrow().clone()
    }

    /// Waits until it has ended; how it did.
    pub(super) async fn ended(&self) -> String {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(end) => end.clone().unwrap_or_default(),
            Err(_) => String::from("it is not known how"),
        }
    }

    /// Sends SIGINT to it and to what it started.
    pub(super) fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    /// Ends it and what it started, and waits until it is gone.
    pub(super) async fn kill(&self) {
        self.signal(Signal::KILL);
        if tokio::time::timeout(KILL_WAIT, self.ended()).await.is_err() {
            tracing::warn!(pid = self.pid, "a kernel does not die");
        }
    }

    fn signal(&self, signal: Signal) {
        // After its end the number may belong to another process.
        if self.end().is_some() {
            return;
        }
        if let Some(group) = Pid::from_raw(self.pid.cast_signed()) {
            // It may have ended just now.
            let _ = rustix::process::kill_process_group(group, signal);
        }
    }
}

impl Drop for KernelProcess {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (_, Some(9)) => String::from("killed by signal 9, perhaps for want of memory"),
        (_, Some(signal)) => format!("killed by signal {signal}"),
        (Some(code), None) => format!("{EXIT_STATUS}{code}"),
        (None, None) => String::from("it is not known how"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_in_words() {
        assert_eq!(describe(ExitStatus::from_raw(3 << 8)), "exit status 3");
        assert_eq!(describe(ExitStatus::from_raw(11)), "killed by signal 11");
        assert!(describe(ExitStatus::from_raw(9)).contains("memory"));
    }
}
