//! The only place that creates processes, and the only one that reaps them.
//!
//! ```text
//!  spawn(command)  --lock--> fork, exec, register pid --unlock--> Spawned { pid, exit, stdio }
//!  reaper thread   --peek--> a child ended --lock--> waitpid(-1) ... --> exit of a registered pid
//!                                                                   \-> orphan: forgotten
//! ```
//!
//! Invariants:
//! - A pid is registered before its exit status can be taken: forking and reaping hold one lock.
//! - Every zombie is taken, also those of orphans: the agent is PID 1, or a child subreaper
//!   where it is not (BC-024).
//!
//! Everybody in the agent who needs a process comes here. Nobody else calls `wait`, and nobody
//! uses `tokio::process`, whose waiting would race with the reaper.

use std::{
    collections::HashMap,
    ffi::CString,
    io,
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt as _, process::CommandExt as _, process::ExitStatusExt as _},
    },
    path::Path,
    process::{Command, ExitStatus},
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use rustix::process::{Pid, Signal, WaitIdOptions, WaitOptions};
use tokio::sync::oneshot;

use crate::account::Account;

/// Descriptors of the agent itself.
const DESCRIPTORS_MAX: libc::rlim_t = 32_768;
/// How often it is looked whether all processes are gone that were killed.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How often the reaper looks for orphans while the agent has no child of its own.
const ORPHAN_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Creates and reaps processes. Cheap to clone; all clones share one table.
#[derive(Debug, Clone)]
pub struct Children {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<HashMap<i32, oneshot::Sender<ExitStatus>>>,
    spawned: Condvar,
}

/// A new process. Its exit status is delivered once, through `exit`.
#[derive(Debug)]
pub struct Spawned {
    /// The process id.
    pub pid: u32,
    /// Resolves when the process has ended and has been reaped.
    pub exit: ExitWaiter,
    /// The writing end of its standard input, if that was piped.
    pub stdin: Option<OwnedFd>,
    /// The reading end of its standard output, if that was piped.
    pub stdout: Option<OwnedFd>,
    /// The reading end of its standard error, if that was piped.
    pub stderr: Option<OwnedFd>,
}

/// The exit status of a process, once it is there.
#[derive(Debug)]
pub struct ExitWaiter(oneshot::Receiver<ExitStatus>);

impl ExitWaiter {
    /// Waits for the end of the process.
    pub async fn wait(self) -> ExitStatus {
        // The sender is dropped without a status only if the reaper thread is gone, and then
        // nothing better is known than that the process is not there any more.
        self.0
            .await
            .unwrap_or_else(|_| ExitStatus::from_raw(0xff00))
    }
}

impl Children {
    /// Becomes the reaper of all descendants and starts the reaping thread.
    ///
    /// # Errors
    /// The kernel refuses the role or the thread.
    pub fn start() -> io::Result<Self> {
        if rustix::process::getpid() != Pid::INIT {
            rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        }
        raise_descriptor_limit();
        let shared = Arc::new(Shared::default());
        let reaper = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(String::from("reaper"))
            .spawn(move || reaper.reap_forever())?;
        Ok(Self { shared })
    }

    /// Runs the command. It waits until the program is loaded, so it blocks for milliseconds:
    /// call it from a blocking thread, or use [`Self::spawn`].
    ///
    /// # Errors
    /// The program or its directory cannot be used.
    pub fn spawn_blocking(&self, command: &mut Command) -> io::Result<Spawned> {
        let mut waiting = self.shared.lock();
        let mut child = command.spawn()?;
        let (sender, exit) = oneshot::channel();
        let pid = child.id();
        waiting.insert(pid.cast_signed(), sender);
        drop(waiting);
        self.shared.spawned.notify_one();
        Ok(Spawned {
            pid,
            exit: ExitWaiter(exit),
            stdin: child.stdin.take().map(Into::into),
            stdout: child.stdout.take().map(Into::into),
            stderr: child.stderr.take().map(Into::into),
        })
    }

    /// Runs the command without blocking the caller's thread.
    ///
    /// # Errors
    /// The program or its directory cannot be used.
    pub async fn spawn(&self, mut command: Command) -> io::Result<Spawned> {
        let children = self.clone();
        tokio::task::spawn_blocking(move || children.spawn_blocking(&mut command))
            .await
            .map_err(io::Error::other)?
    }
}

impl Children {
    /// Sends a signal to the process group that this child leads. Says whether the child was
    /// still there: one that has been reaped is never signalled, so its number cannot be another
    /// process by now.
    #[must_use]
    pub fn signal_group(&self, pid: u32, signal: Signal) -> bool {
        let waiting = self.shared.lock();
        let pid = pid.cast_signed();
        let Some(group) = Pid::from_raw(pid).filter(|_| waiting.contains_key(&pid)) else {
            return false;
        };
        // The leader may be a zombie that is about to be reaped; that is no failure.
        let _ = rustix::process::kill_process_group(group, signal);
        true
    }
}

impl Children {
    /// Ends every process there is but the agent, and returns when all are gone. Where the agent is
    /// not the first process, it ends the groups that its own children lead.
    pub async fn end_all(&self) {
        while self.kill_all() == Left::Some {
            tokio::time::sleep(END_CHECK_INTERVAL).await;
        }
    }

    fn kill_all(&self) -> Left {
        // Nothing is started meanwhile.
        let waiting = self.shared.lock();
        if rustix::process::getpid() == Pid::INIT {
            // SAFETY: a plain system call; -1 means everybody but the first process, which is us.
            let killed = unsafe { libc::kill(-1, libc::SIGKILL) };
            let nobody =
                killed == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
            return if nobody && waiting.is_empty() {
                Left::None
            } else {
                Left::Some
            };
        }
        for pid in waiting.keys().copied().filter_map(Pid::from_raw) {
            // It may be a zombie that is about to be reaped.
            let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        }
        if waiting.is_empty() {
            Left::None
        } else {
            Left::Some
        }
    }
}

/// Whether there are processes left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Some,
    None,
}

// === impl Shared ===

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<i32, oneshot::Sender<ExitStatus>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reap_forever(&self) {
        // NOWAIT leaves the zombie: it is taken only under the lock.
        let peek = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        loop {
            match rustix::process::waitid(rustix::process::WaitId::All, peek) {
                Ok(_) => self.reap_all(),
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => self.wait_for_children(),
            }
        }
    }

    fn reap_all(&self) {
        let mut waiting = self.lock();
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if let Some(sender) = waiting.remove(&pid.as_raw_nonzero().get()) {
                // Nobody may be interested any more; the process is reaped all the same.
                let _ = sender.send(ExitStatus::from_raw(status.as_raw()));
            }
        }
    }

    fn wait_for_children(&self) {
        let waiting = self.lock();
        if waiting.is_empty() {
            let _ = self.spawned.wait_timeout(waiting, ORPHAN_CHECK_INTERVAL);
        }
    }
}

/// Makes the command run as this user, in this directory, in a session of its own.
///
/// The directory is entered with the user's rights. The child is the leader of a new session and
/// process group, so that a signal can reach everything it started.
pub fn run_as(command: &mut Command, account: &Account, cwd: &Path) -> io::Result<()> {
    let directory = CString::new(cwd.as_os_str().as_bytes())?;
    let (uid, gid, groups) = (account.uid, account.gid, account.groups.clone());
    let change_user = rustix::process::geteuid().is_root();
    let descriptors = DESCRIPTOR_LIMIT.get().cloned();
    let setup = move || {
        // SAFETY: only system calls on memory that was prepared before the fork.
        unsafe {
            reset_oom_score();
            if let Some(limit) = &descriptors
                && libc::setrlimit(libc::RLIMIT_NOFILE, limit) < 0
            {
                return Err(io::Error::last_os_error());
            }
            reset_signals();
            if libc::setsid() < 0 {
                return Err(io::Error::last_os_error());
            }
            if change_user
                && (libc::setgroups(groups.len(), groups.as_ptr()) < 0
                    || libc::setresgid(gid, gid, gid) < 0
                    || libc::setresuid(uid, uid, uid) < 0)
            {
                return Err(io::Error::last_os_error());
            }
            if libc::chdir(directory.as_ptr()) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only and does not allocate.
    unsafe {
        command.pre_exec(setup);
    }
    Ok(())
}

/// Signals that whoever started the agent ignored would stay ignored in every child, and a shell
/// that starts so can never be interrupted.
///
/// # Safety
/// Makes system calls only, so it may run between fork and exec.
unsafe fn reset_signals() {
    for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the default action needs no handler.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}

/// What the agent was started with, and what its children get back: many programs close every
/// descriptor that the limit allows.
static DESCRIPTOR_LIMIT: OnceLock<libc::rlimit> = OnceLock::new();

/// Every process costs the agent two descriptors, every connection one; the usual 1024 are soon
/// gone. Where the limit cannot be raised, the agent says "too many" earlier.
fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel fills the one struct that the pointer leads to.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    if !known || DESCRIPTOR_LIMIT.set(limit).is_err() {
        return;
    }
    let raised = libc::rlimit {
        rlim_cur: limit.rlim_max.min(DESCRIPTORS_MAX),
        rlim_max: limit.rlim_max,
    };
    // SAFETY: the kernel reads the one struct that the pointer leads to.
    unsafe {
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised);
    }
}

/// The agent protects itself from the out-of-memory killer; its children must not inherit that.
///
/// # Safety
/// Makes system calls only, so it may run between fork and exec.
unsafe fn reset_oom_score() {
    // SAFETY: constant NUL-terminated path and constant buffer; the descriptor is our own.
    unsafe {
        let file = libc::open(
            c"/proc/self/oom_score_adj".as_ptr(),
            libc::O_WRONLY | libc::O_CLOEXEC,
        );
        if file >= 0 {
            libc::write(file, c"0".as_ptr().cast(), 1);
            libc::close(file);
        }
    }
}
