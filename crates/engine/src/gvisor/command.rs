//! Running `runsc`, always with a deadline.
//!
//! Invariants:
//! - A command that outlives its deadline, or whose caller goes away, is killed.
//! - What a command leaves running (the sandbox, the gofer) has left our session, holds none of our
//!   descriptors but the console, and survives us.
//!
//! Some releases take a visible `/proc/sys/net/core/rmem_default` for a sign that they are in the
//! machine's first network namespace, and refuse to use it; newer kernels show that file in every
//! namespace. Where it is so, commands run in a mount namespace of their own in which `/proc/sys`
//! is covered. A namespace is a property of a thread and is inherited by its children, so a
//! short-lived thread makes one and starts the command from there; no code runs between fork and
//! exec.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    thread,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use sandhold_types::Deadline;
use tokio::{
    process::{Child, Command},
    sync::oneshot,
};

use crate::{EngineError, InstanceId};

/// How much of a failed command's log goes into the error.
const LAST_WORDS_BYTES: u64 = 2048;
/// Where the file lies whose visibility misleads the engine.
const MISLEADING_FILE: &str = "/proc/sys/net/core/rmem_default";
/// The one setting under `/proc/sys` that the engine needs.
const NEEDED_SETTING: &str = "/proc/sys/vm/mmap_min_addr";

/// Whether `/proc/sys` has to be covered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcSys {
    /// The engine gets along with it.
    AsItIs,
    /// It must not see it.
    Covered,
}

impl ProcSys {
    /// Looks whether a fresh network namespace shows the misleading file.
    pub(super) fn probe() -> io::Result<Self> {
        let look = || -> io::Result<Self> {
            unshare(CloneFlags::CLONE_NEWNET)?;
            let visible = Path::new(MISLEADING_FILE).exists();
            Ok(if visible { Self::Covered } else { Self::AsItIs })
        };
        thread::spawn(look)
            .join()
            .map_err(|_| io::Error::other("the probing thread panicked"))?
    }
}

/// How to call `runsc`.
#[derive(Debug)]
pub(super) struct Runsc {
    pub(super) program: PathBuf,
    pub(super) root: PathBuf,
    pub(super) proc_sys: ProcSys,
}

/// One call.
#[derive(Debug)]
pub(super) struct Call<'a> {
    /// What is being done, for errors: "booting", "capturing".
    pub(super) step: &'static str,
    pub(super) instance: &'a InstanceId,
    /// Flags that go before the verb.
    pub(super) flags: Vec<String>,
    /// The verb and its arguments.
    pub(super) arguments: Vec<String>,
    /// Where its standard output and error go, and those of what it starts.
    pub(super) console: Option<File>,
    /// Where it writes what went wrong.
    pub(super) log: PathBuf,
}

impl Runsc {
    /// Runs one call to its end.
    pub(super) async fn run(&self, call: Call<'_>, deadline: Deadline) -> Result<(), EngineError> {
        let failed = |stderr: String| EngineError::Program {
            program: "runsc",
            step: call.step,
            instance: call.instance.clone(),
            stderr,
        };
        let command = self.command(&call).map_err(|e| failed(e.to_string()))?;
        let spawned = self.spawn(command).await;
        let mut child = spawned.map_err(|e| failed(format!("it could not be started: {e}")))?;
        match tokio::time::timeout_at(deadline.instant().into(), child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(failed(last_words(&call.log, status))),
            Ok(Err(e)) => Err(failed(format!("it could not be waited for: {e}"))),
            Err(_) => {
                // Waits for it too, so that nothing of it runs on behind the caller's back.
                let _ = child.kill().await;
                Err(EngineError::Deadline {
                    step: call.step,
                    instance: call.instance.clone(),
                })
            }
        }
    }

    fn command(&self, call: &Call<'_>) -> io::Result<Command> {
        let mut command = Command::new(&self.program);
        command
            .arg(format!("--root={}", self.root.display()))
            .arg(format!("--log={}", call.log.display()))
            .args(&call.flags)
            .args(&call.arguments)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::null())
            .kill_on_drop(true)
            // Not in our group: a signal from a terminal is for us, not for sandboxes.
            .process_group(0);
        match &call.console {
            Some(console) => {
                command.stdout(console.try_clone()?);
                command.stderr(console.try_clone()?);
            }
            None => {
                command.stdout(Stdio::null());
                command.stderr(Stdio::null());
            }
        }
        Ok(command)
    }

    async fn spawn(&self, mut command: Command) -> io::Result<Child> {
        if self.proc_sys == ProcSys::AsItIs {
            return command.spawn();
        }
        let (answer, answered) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        thread::Builder::new()
            .name("runsc-spawn".to_owned())
            .spawn(move || {
                let child = cover_proc_sys().and_then(|()| {
                    let _inside = runtime.enter();
                    command.spawn()
                });
                // If the caller is gone, the child is killed by being dropped.
                let _ = answer.send(child);
            })?;
        answered
            .await
            .map_err(|_| io::Error::other("the spawning thread panicked"))?
    }
}

/// Gives the calling thread a mount namespace of its own with an almost empty `/proc/sys`. Mounts
/// and unmounts of the machine still reach it; its own go nowhere.
fn cover_proc_sys() -> io::Result<()> {
    let needed = fs::read_to_string(NEEDED_SETTING)?;
    unshare(CloneFlags::CLONE_NEWNS)?;
    let nothing = None::<&str>;
    mount(
        nothing,
        "/",
        nothing,
        MsFlags::MS_REC | MsFlags::MS_SLAVE,
        nothing,
    )?;
    mount(
        Some("none"),
        "/proc/sys",
        Some("tmpfs"),
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC,
        Some("size=64k,mode=755"),
    )?;
    fs::create_dir("/proc/sys/vm")?;
    fs::write(NEEDED_SETTING, needed)
}

/// The end of a command's log.
fn last_words(log: &Path, status: ExitStatus) -> String {
    let tail = tail_of(log, LAST_WORDS_BYTES);
    if tail.is_empty() {
        status.to_string()
    } else {
        tail
    }
}

/// The last bytes of a file as text; empty if there is none.
pub(super) fn tail_of(path: &Path, bytes_max: u64) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes_max)))?;
        let mut bytes = Vec::new();
        file.take(bytes_max).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    };
    read().unwrap_or_default()
}
