//! All processes that clients started: the running ones, and the ended ones for a while.
//!
//! It owns the supervision of each: the pumps, the wait for the exit, the deadline. Nothing else
//! moves a process from running to ended.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::process::Signal;
use tokio::{io::Interest, sync::watch, time::Instant};

use crate::{
    async_fd::AsyncPipe,
    children::{Children, ExitWaiter},
    process::{
        exit::Ending,
        launch::{LaunchError, LaunchPlan, Launched, TerminalSize, launch_blocking, resize},
        output::{OutputLog, Reader},
        pump::{pump, wait_for_exit},
    },
};

/// Running processes at once. A client that wants more is told so.
pub const PROCESSES_MAX: usize = 4096;
/// How long an ended process can still be connected to.
pub const ENDED_RETENTION: Duration = Duration::from_secs(60);
/// Ended processes that are kept at most.
pub const ENDED_MAX: usize = 256;

/// Names a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// By its number.
    Pid(u32),
    /// By the tag of its Start call; the newest one that has it.
    Tag(String),
}

/// What a client called the process when it started it.
#[derive(Debug, Clone, Default)]
pub struct Label {
    /// The program, as asked for.
    pub command: String,
    /// The arguments, as asked for.
    pub arguments: Vec<String>,
    /// The variables that the call added.
    pub variables: BTreeMap<String, String>,
    /// The directory, if the call named one.
    pub directory: Option<String>,
    /// A name to find it by.
    pub tag: Option<String>,
    /// Whether it belongs to the template and not to a client: then it does not count as work.
    pub of_template: bool,
}

/// A process that a client started.
#[derive(Debug)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// What the client called it.
    pub label: Label,
    /// Its output and its end.
    pub log: Arc<OutputLog>,
    has_terminal: bool,
    terminal: Option<Arc<AsyncPipe>>,
    /// One writer at a time, so that two inputs do not mix. `None` once closed.
    input: tokio::sync::Mutex<Option<Arc<AsyncPipe>>>,
    exited: watch::Receiver<bool>,
    children: Children,
}

/// Why input did not arrive.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// Input of the other kind was expected.
    #[error("the process {0}")]
    WrongKind(&'static str),
    /// It was closed, or never open.
    #[error("the standard input is closed")]
    Closed,
    /// A terminal has no end of input; send Ctrl-D.
    #[error("the input of a terminal cannot be closed; send Ctrl-D instead")]
    Terminal,
    /// The process does not read any more.
    #[error("writing to the process: {0}")]
    Write(io::Error),
}

/// Which kind of input a client sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputKind {
    /// For the pipe.
    Stdin,
    /// For the terminal.
    Pty,
}

impl Process {
    /// Writes to the process and waits until it is all in its pipe.
    ///
    /// # Errors
    /// The process takes no such input, or none any more.
    pub async fn write(&self, kind: InputKind, bytes: &[u8]) -> Result<(), InputError> {
        match (kind, self.has_terminal) {
            (InputKind::Stdin, true) => {
                return Err(InputError::WrongKind("has a terminal: send pty input"));
            }
            (InputKind::Pty, false) => {
                return Err(InputError::WrongKind("has no terminal: send stdin input"));
            }
            _ => {}
        }
        let guard = self.input.lock().await;
        let input = guard.as_ref().ok_or(InputError::Closed)?;
        let mut exited = self.exited.clone();
        tokio::select! {
            written = input.write_all(bytes) => written.map_err(InputError::Write),
            // A process that is gone never empties its pipe.
            () = wait_for_exit(&mut exited) => Err(InputError::Closed),
        }
    }

    /// Ends the standard input.
    ///
    /// # Errors
    /// The process has a terminal.
    pub async fn close_input(&self) -> Result<(), InputError> {
        if self.has_terminal {
            return Err(InputError::Terminal);
        }
        *self.input.lock().await = None;
        Ok(())
    }

    /// Resizes the terminal.
    ///
    /// # Errors
    /// The process has none.
    pub fn resize(&self, size: TerminalSize) -> Result<(), InputError> {
        let terminal = self
            .terminal
            .as_ref()
            .ok_or(InputError::WrongKind("has no terminal"))?;
        resize(terminal.fd(), self.pid, size).map_err(InputError::Write)
    }

    /// Signals the process and everything in its group. Says whether it was still there.
    #[must_use]
    pub fn signal(&self, signal: Signal) -> bool {
        self.children.signal_group(self.pid, signal)
    }
}

/// How many processes of clients run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientProcesses {
    /// All of them.
    pub all: usize,
    /// Those of them whose output nobody reads.
    pub unread: usize,
}

/// The table. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ProcessTable {
    children: Children,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    running: BTreeMap<u32, Arc<Process>>,
    /// The order in which they were started; the newest last.
    order: Vec<u32>,
    ended: VecDeque<(Instant, Arc<Process>)>,
}

/// A process and the first reader of its output, which misses nothing.
#[derive(Debug)]
pub struct Started {
    /// The process.
    pub process: Arc<Process>,
    /// Reads from the first byte on.
    pub reader: Reader,
}

/// Why a process was not started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Too many are running.
    #[error("{PROCESSES_MAX} processes are running already")]
    TooMany,
    /// It could not be launched.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Its pipes could not be watched.
    #[error("watching the process: {0}")]
    Watch(io::Error),
    /// The agent is stopping.
    #[error("the agent is stopping")]
    Stopping,
}

impl ProcessTable {
    /// An empty table.
    #[must_use]
    pub fn new(children: Children) -> Self {
        Self {
            children,
            inner: Arc::default(),
        }
    }

    /// Starts a process. It runs on if the future is dropped. At the deadline it is killed,
    /// whoever may be watching it.
    ///
    /// # Errors
    /// It cannot be started; nothing runs then.
    pub async fn start(
        &self,
        plan: LaunchPlan,
        label: Label,
        deadline: Option<Instant>,
    ) -> Result<Started, StartError> {
        let table = self.clone();
        tokio::spawn(async move { table.start_here(plan, label, deadline).await })
            .await
            .unwrap_or(Err(StartError::Stopping))
    }

    async fn start_here(
        &self,
        plan: LaunchPlan,
        label: Label,
        deadline: Option<Instant>,
    ) -> Result<Started, StartError> {
        if self.lock().running.len() >= PROCESSES_MAX {
            return Err(StartError::TooMany);
        }
        let children = self.children.clone();
        let launched = tokio::task::spawn_blocking(move || launch_blocking(&plan, &children))
            .await
            .map_err(|_| StartError::Stopping)??;
        let pid = launched.spawned.pid;
        let started = self.register(launched, label, deadline);
        if started.is_err() {
            let _ = self.children.signal_group(pid, Signal::KILL);
        }
        started.map_err(StartError::Watch)
    }

    fn register(
        &self,
        launched: Launched,
        label: Label,
        deadline: Option<Instant>,
    ) -> io::Result<Started> {
        let (exit_sender, exited) = watch::channel(false);
        let writer = |fd| AsyncPipe::new(fd, Interest::WRITABLE).map(Arc::new);
        let process = Arc::new(Process {
            pid: launched.spawned.pid,
            label,
            log: Arc::default(),
            has_terminal: launched.terminal.is_some(),
            terminal: launched.terminal.map(writer).transpose()?,
            input: tokio::sync::Mutex::new(launched.input.map(writer).transpose()?),
            exited,
            children: self.children.clone(),
        });
        // Before anything is pumped: without a reader, output is only kept as backlog.
        let reader = process.log.subscribe();
        let mut pumps = tokio::task::JoinSet::new();
        for (source, fd) in launched.outputs {
            let pipe = AsyncPipe::new(fd, Interest::READABLE)?;
            pumps.spawn(pump(
                pipe,
                source,
                Arc::clone(&process.log),
                process.exited.clone(),
            ));
        }
        self.lock().insert(Arc::clone(&process));
        tokio::spawn(supervise(
            self.clone(),
            Arc::clone(&process),
            launched.spawned.exit,
            exit_sender,
            pumps,
            deadline,
        ));
        Ok(Started { process, reader })
    }

    /// The running process of this name.
    #[must_use]
    pub fn running(&self, selector: &Selector) -> Option<Arc<Process>> {
        self.lock().running(selector)
    }

    /// The process of this name, running or just ended.
    #[must_use]
    pub fn find(&self, selector: &Selector) -> Option<Arc<Process>> {
        let mut inner = self.lock();
        inner.forget_old();
        inner.running(selector).or_else(|| inner.ended(selector))
    }

    /// All running processes.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Process>> {
        self.lock().running.values().cloned().collect()
    }

    /// How many are running.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().running.len()
    }

    /// How many of clients are running.
    #[must_use]
    pub fn client_processes(&self) -> ClientProcesses {
        let inner = self.lock();
        let of_clients = |process: &&Arc<Process>| !process.label.of_template;
        let mut counts = ClientProcesses::default();
        for process in inner.running.values().filter(of_clients) {
            counts.all += 1;
            counts.unread += usize::from(!process.log.has_readers());
        }
        counts
    }

    /// Whether none is running.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows a process to its end.
async fn supervise(
    table: ProcessTable,
    process: Arc<Process>,
    exit: ExitWaiter,
    exit_sender: watch::Sender<bool>,
    mut pumps: tokio::task::JoinSet<()>,
    deadline: Option<Instant>,
) {
    let exit = exit.wait();
    tokio::pin!(exit);
    let (status, deadline_passed) = tokio::select! {
        biased;
        status = &mut exit => (status, false),
        () = sleep_until(deadline) => {
            let _ = process.signal(Signal::KILL);
            (exit.await, true)
        }
    };
    let _ = exit_sender.send(true);
    *process.input.lock().await = None;
    while pumps.join_next().await.is_some() {}
    // Into the ended ones first: a reader that has seen the end must not find it running.
    table.lock().move_to_ended(&process);
    process.log.end(Ending::of(status, deadline_passed));
}

/// Sleeps until the deadline; without one, for ever.
pub async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

// === impl Inner ===

impl Inner {
    fn insert(&mut self, process: Arc<Process>) {
        let pid = process.pid;
        if let Some(previous) = self.running.insert(pid, process) {
            // The number is in use again although its last bearer still drains its output.
            self.order.retain(|other| *other != pid);
            self.ended.push_back((Instant::now(), previous));
        }
        self.order.push(pid);
        self.forget_old();
    }

    fn running(&self, selector: &Selector) -> Option<Arc<Process>> {
        match selector {
            Selector::Pid(pid) => self.running.get(pid).cloned(),
            Selector::Tag(_) => self
                .order
                .iter()
                .rev()
                .filter_map(|pid| self.running.get(pid))
                .find(|process| matches(process, selector))
                .cloned(),
        }
    }

    fn ended(&self, selector: &Selector) -> Option<Arc<Process>> {
        self.ended
            .iter()
            .rev()
            .map(|(_, process)| process)
            .find(|process| matches(process, selector))
            .cloned()
    }

    fn move_to_ended(&mut self, process: &Arc<Process>) {
        let is_current = self
            .running
            .get(&process.pid)
            .is_some_and(|current| Arc::ptr_eq(current, process));
        if is_current {
            self.running.remove(&process.pid);
            self.order.retain(|pid| *pid != process.pid);
            self.ended.push_back((Instant::now(), Arc::clone(process)));
        }
        self.forget_old();
    }

    fn forget_old(&mut self) {
        while let Some((since, _)) = self.ended.front() {
            if self.ended.len() <= ENDED_MAX && since.elapsed() < ENDED_RETENTION {
                break;
            }
            self.ended.pop_front();
        }
    }
}

fn matches(process: &Process, selector: &Selector) -> bool {
    match selector {
        Selector::Pid(pid) => process.pid == *pid,
        Selector::Tag(tag) => process.label.tag.as_deref() == Some(tag),
    }
}
