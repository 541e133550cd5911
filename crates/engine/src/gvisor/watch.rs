//! Watching one instance: when it ends, why, and that it keeps within its disk.
//!
//! ```text
//!   pidfd ──────────┐
//!   control socket ─┼─▶ task of one instance ──▶ ended.json, then the waiters
//!   tick ───────────┘     (disk over its limit: kill; console too long: cut)
//! ```
//!
//! Invariants: the task holds no process alive and ends with the instance or with its [`Watched`];
//! a cause is on disk before a waiter learns it, so that it is not lost with this process (R-L12).

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use rustix::process::{Signal, pidfd_send_signal};
use tokio::{sync::watch, task::JoinHandle, time::MissedTickBehavior};

use super::{
    cgroup::{Groups, Verdicts},
    command::tail_of,
    control::{self, ExitStatus},
    files::{InstanceFiles, Note},
    process,
};
use crate::{EngineError, ExitCause, InstanceId};

/// How often disk and console are looked at. What a guest can write beyond its limit is what it can
/// write in this time.
const TICK: Duration = Duration::from_millis(250);
/// How long the exit status may come after the end of the process that sends it.
const STATUS_GRACE: Duration = Duration::from_millis(200);
/// A console longer than this is cut.
const CONSOLE_BYTES_MAX: u64 = 1024 * 1024;
/// How much of its end is kept then.
const CONSOLE_BYTES_KEPT: u64 = 256 * 1024;
/// How much of the engine's own panic message is told.
const PANIC_BYTES_MAX: u64 = 4096;
const MIB: u64 = 1024 * 1024;
/// The unit in which allocated size is told.
const BLOCK_BYTES: u64 = 512;

/// An instance under watch. Dropping it ends the watching, not the instance.
#[derive(Debug)]
pub(super) struct Watched {
    cause: watch::Receiver<Option<ExitCause>>,
    task: JoinHandle<()>,
    disk: Option<Arc<File>>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What to watch.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) id: InstanceId,
    pub(super) files: InstanceFiles,
    pub(super) socket: PathBuf,
    pub(super) groups: Groups,
    pub(super) note: Note,
}

impl Watched {
    /// Begins to watch.
    pub(super) fn start(subject: Subject) -> Self {
        let (tell, cause) = watch::channel(None);
        let disk = process::open_unlinked(subject.note.sandbox.pid, &subject.files.disk());
        let disk = disk.map(Arc::new);
        let task = tokio::spawn(run(subject, disk.clone(), tell));
        Self { cause, task, disk }
    }

    /// A receiver that learns the cause once it is known.
    pub(super) fn cause(&self) -> watch::Receiver<Option<ExitCause>> {
        self.cause.clone()
    }

    /// What is allocated to its disk, in bytes.
    pub(super) fn disk_bytes(&self) -> u64 {
        self.disk.as_deref().map_or(0, allocated_bytes)
    }
}

fn allocated_bytes(file: &File) -> u64 {
    file.metadata().map_or(0, |m| m.blocks() * BLOCK_BYTES)
}

async fn run(subject: Subject, disk: Option<Arc<File>>, tell: watch::Sender<Option<ExitCause>>) {
    let observed = observe(&subject, disk.as_deref()).await;
    let panic = tail_of(&subject.files.panic_log(), PANIC_BYTES_MAX);
    let verdicts = subject.groups.verdicts(&subject.id.to_string());
    let cause = cause(&observed, verdicts, &panic);
    if let Err(error) = subject.files.write_ended(&cause) {
        // Its directory may be on its way out already.
        tracing::debug!(instance = %subject.id, %error, "the cause of an end was not kept");
    }
    tell.send_replace(Some(cause));
}

/// What was seen of an end.
#[derive(Debug, Default)]
struct Observed {
    status: Option<ExitStatus>,
    disk_full: bool,
}

/// Returns when the instance has ended.
async fn observe(subject: &Subject, disk: Option<&File>) -> Observed {
    let mut observed = Observed::default();
    let Some(handle) = subject.note.sandbox.open() else {
        return observed;
    };
    let Ok(killer) = handle.try_clone() else {
        return observed;
    };
    let name = subject.id.to_string();
    let mut status = std::pin::pin!(control::wait(&subject.socket, &name));
    let mut status_pending = true;
    let mut ended = std::pin::pin!(process::ended(handle));
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let disk_max = u64::from(subject.note.resources.disk_mib) * MIB;
    loop {
        tokio::select! {
            _ = &mut ended => break,
            told = &mut status, if status_pending => {
                status_pending = false;
                observed.status = told.ok();
            }
            _ = tick.tick() => {
                if let Err(error) = cut_console(&subject.files) {
                    tracing::debug!(instance = %subject.id, %error, "its console was not cut");
                }
                if disk.is_some_and(|disk| allocated_bytes(disk) > disk_max) {
                    observed.disk_full = true;
                    let _ = pidfd_send_signal(&killer, Signal::KILL);
                }
            }
        }
    }
    if status_pending && let Ok(told) = tokio::time::timeout(STATUS_GRACE, status).await {
        observed.status = told.ok();
    }
    observed
}

/// Why it ended, by what can be proved (R-L12).
fn cause(observed: &Observed, verdicts: Verdicts, panic: &str) -> ExitCause {
    if observed.disk_full {
        return ExitCause::DiskFull;
    }
    match observed.status {
        Some(ExitStatus::Exited(status)) => ExitCause::Exited(status),
        _ if verdicts.memory_kills > 0 => ExitCause::OutOfMemory,
        _ if verdicts.forks_refused > 0 => {
            ExitCause::Crashed("it reached its limit of processes and threads".to_owned())
        }
        _ if !panic.is_empty() => ExitCause::Crashed(format!("the engine panicked: {panic}")),
        Some(ExitStatus::Signalled(signal)) => {
            ExitCause::Crashed(format!("its first process was ended by signal {signal}"))
        }
        None => ExitCause::Crashed("its processes were killed from outside".to_owned()),
    }
}

/// Keeps the end of a console that has become too long. Its writer appends, so that cutting the
/// file makes it go on at the start.
fn cut_console(files: &InstanceFiles) -> Result<(), EngineError> {
    let path = files.console();
    let cut = || -> io::Result<()> {
        if fs::metadata(&path).map_or(0, |m| m.len()) <= CONSOLE_BYTES_MAX {
            return Ok(());
        }
        fs::write(files.old_console(), tail_of(&path, CONSOLE_BYTES_KEPT))?;
        File::options().write(true).open(&path)?.set_len(0)
    };
    cut().map_err(|source| EngineError::File {
        step: "cut",
        path: path.clone(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(status: Option<ExitStatus>) -> Observed {
        Observed {
            status,
            disk_full: false,
        }
    }

    #[test]
    fn the_proved_cause_is_told() {
        // R-L12
        let killed = Verdicts {
            memory_kills: 1,
            forks_refused: 0,
        };
        assert_eq!(cause(&observed(None), killed, ""), ExitCause::OutOfMemory);
        // A guest process that was killed for memory long ago is not why it ended.
        let status = Some(ExitStatus::Exited(3));
        assert_eq!(cause(&observed(status), killed, ""), ExitCause::Exited(3));
        let full = Observed {
            status: None,
            disk_full: true,
        };
        assert_eq!(cause(&full, killed, ""), ExitCause::DiskFull);
        let told = cause(&observed(None), Verdicts::default(), "boom");
        assert_eq!(told, ExitCause::Crashed("the engine panicked: boom".into()));
    }

    #[test]
    fn a_flooded_console_is_cut_and_its_end_kept() {
        let directory = tempfile::tempdir().unwrap();
        let files = InstanceFiles::new(directory.path());
        let mut text = "x".repeat(2 * 1024 * 1024);
        text.push_str("the end");
        fs::write(files.console(), text).unwrap();
        cut_console(&files).unwrap();
        assert_eq!(fs::metadata(files.console()).unwrap().len(), 0);
        let kept = fs::read_to_string(files.old_console()).unwrap();
        assert!(kept.ends_with("the end"));
        assert!(kept.len() <= 256 * 1024);
    }
}
