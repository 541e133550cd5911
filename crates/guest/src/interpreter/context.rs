//! A context: a kernel with its state, and the executions that take turns on it.
//!
//! ```text
//!   execute ---> queue (EXECUTIONS_WAITING_MAX) ---> turn ---> kernel
//!                                                     |          |
//!   restart, remove ------- signal -------------------+          +-- ended: KernelDied
//! ```
//!
//! Invariants:
//! - One execution at a time; whoever holds the turn is the only one that talks to the kernel,
//!   but for interrupts and its side channel (BC-045).
//! - A context outlives its kernel. When that ended, the next execution gets a new one and is
//!   told so.
//! - What is set for one call is unset before the next one begins.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Semaphore, mpsc, watch},
    time::{Instant, timeout},
};

use super::{
    events::{Completion, Failure, KernelEvent, Stream},
    host::{KernelHost, StartError, Wanted},
    kernel::Kernel,
    language::{Family, Language},
    outbox::Outbox,
    output,
    process::EXIT_STATUS,
    variables::Changes,
};

/// Executions that may wait for their turn in one context; more are refused.
pub(super) const EXECUTIONS_WAITING_MAX: usize = 64;
/// When one of the two signs of an end has come, the other comes within this time or never.
const SETTLE_WAIT: Duration = Duration::from_secs(2);
/// Changing variables or seeds of an idle kernel takes milliseconds.
const UPKEEP_WAIT: Duration = Duration::from_secs(10);

/// Something that ends the running execution from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Signal {
    Run,
    Restart(u64),
    Removed,
}

/// A context.
#[derive(Debug)]
pub(super) struct Context {
    /// Its id.
    pub(super) id: String,
    /// Its language, as the client named it.
    pub(super) language: Language,
    /// The directory it started in.
    pub(super) cwd: PathBuf,
    family: Family,
    turn: tokio::sync::Mutex<Turn>,
    queue: Arc<Semaphore>,
    signal: watch::Sender<Signal>,
    /// How many kernels it has had.
    starts: watch::Sender<u64>,
    /// The same kernel as the turn's, for those who must not wait for the turn.
    kernel: Mutex<Option<Arc<Kernel>>>,
    reseed_due: AtomicBool,
}

/// What the holder of the turn knows.
#[derive(Debug, Default)]
struct Turn {
    /// The variables that the kernel has, as far as they came from the agent.
    variables: BTreeMap<String, String>,
    /// What the next execution is told first.
    notice: Option<String>,
    preload: bool,
}

/// A place in the queue of a context.
#[derive(Debug)]
pub(super) struct Place(#[allow(dead_code)] tokio::sync::OwnedSemaphorePermit);

/// What is to be run.
#[derive(Debug)]
pub(super) struct Execution {
    pub(super) code: String,
    pub(super) variables: BTreeMap<String, String>,
}

/// How an execution ended.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Restarted,
    Removed,
    Died(String),
    /// The client is gone and the kernel does not listen to interrupts.
    Stuck,
}

impl Context {
    /// A context that has no kernel yet.
    pub(super) fn new(id: String, language: Language, cwd: PathBuf, preload: bool) -> Self {
        Self {
            id,
            family: language.family(),
            language,
            cwd,
            turn: tokio::sync::Mutex::new(Turn {
                preload,
                ..Turn::default()
            }),
            queue: Arc::new(Semaphore::new(EXECUTIONS_WAITING_MAX)),
            signal: watch::channel(Signal::Run).0,
            starts: watch::channel(0).0,
            kernel: Mutex::new(None),
            reseed_due: AtomicBool::new(false),
        }
    }

    /// A place in the queue, if there is room.
    pub(super) fn queue_up(&self) -> Option<Place> {
        Arc::clone(&self.queue).try_acquire_owned().ok().map(Place)
    }

    /// Starts the kernel, unless it runs already.
    pub(super) async fn start(&self, host: &KernelHost) -> Result<(), StartError> {
        let mut turn = self.turn.lock().await;
        self.running_kernel(host, &mut turn).await.map(|_| ())
    }

    /// Whether its kernel runs.
    pub(super) fn is_running(&self) -> bool {
        self.current_kernel()
            .is_some_and(|kernel| kernel.process().end().is_none())
    }

    fn current_kernel(&self) -> Option<Arc<Kernel>> {
        self.lock_kernel().clone()
    }

    fn lock_kernel(&self) -> std::sync::MutexGuard<'_, Option<Arc<Kernel>>> {
        self.kernel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn running_kernel(
        &self,
        host: &KernelHost,
        turn: &mut Turn,
    ) -> Result<Arc<Kernel>, StartError> {
        if let Some(kernel) = self.current_kernel() {
            let Some(end) = kernel.process().end() else {
                return Ok(kernel);
            };
            self.lock_kernel().take();
            turn.notice
                .get_or_insert_with(|| format!("the kernel had ended ({end})"));
        }
        let wanted = Wanted {
            family: &self.family,
            cwd: &self.cwd,
            preloaded: std::mem::take(&mut turn.preload),
        };
        let (kernel, variables) = host.start(wanted).await?;
        let kernel = Arc::new(kernel);
        *self.lock_kernel() = Some(Arc::clone(&kernel));
        self.starts.send_modify(|starts| *starts += 1);
        if *self.signal.borrow() == Signal::Removed {
            self.lock_kernel().take();
            kernel.process().kill().await;
        }
        turn.variables = variables;
        Ok(kernel)
    }

    /// Ends the running execution and gives the context a new kernel.
    pub(super) async fn restart(&self, host: &KernelHost) -> Result<(), StartError> {
        self.signal.send_modify(|signal| {
            *signal = match signal {
                Signal::Run => Signal::Restart(0),
                Signal::Restart(number) => Signal::Restart(number.wrapping_add(1)),
                Signal::Removed => Signal::Removed,
            };
        });
        let mut starts = self.starts.subscribe();
        self.end_kernel().await;
        tokio::select! {
            mut turn = self.turn.lock() => {
                turn.notice = None;
                self.running_kernel(host, &mut turn).await.map(|_| ())
            }
            // An execution that came in meanwhile has the turn, and the new kernel.
            _ = starts.changed() => Ok(()),
        }
    }

    /// Ends the running execution, those that wait, and the kernel.
    pub(super) async fn remove(&self) {
        self.signal.send_replace(Signal::Removed);
        self.end_kernel().await;
    }

    async fn end_kernel(&self) {
        let kernel = self.lock_kernel().take();
        if let Some(kernel) = kernel {
            kernel.process().kill().await;
        }
    }

    /// Gives the kernel new seeds: now, or if it is busy and has no side channel, before the
    /// next execution begins (R-T6).
    pub(super) async fn reseed(&self, entropy: &[u8]) {
        let Some(kernel) = self.current_kernel() else {
            return;
        };
        let turn = self.turn.try_lock();
        if turn.is_err() && !kernel.has_side_channel() {
            self.reseed_due.store(true, Ordering::Relaxed);
            return;
        }
        if let Err(error) = kernel.reseed(&self.family, entropy).await {
            tracing::warn!(%error, context = self.id, "reseeding a kernel");
        }
    }

    /// Waits for the turn, runs the code, and writes the answer.
    pub(super) async fn run(
        &self,
        host: &KernelHost,
        execution: Execution,
        outbox: Outbox,
        place: Place,
    ) {
        let mut signal = self.signal.subscribe();
        let turn = tokio::select! {
            turn = self.turn.lock() => Some(turn),
            () = outbox.cancelled() => None,
        };
        drop(place);
        if let Some(mut turn) = turn {
            // A restart while this one waited is over; it runs on the new kernel.
            if *signal.borrow_and_update() == Signal::Removed {
                outbox.push(output::failed(&removed()));
            } else {
                self.run_in_turn(host, &execution, &mut turn, &mut signal, &outbox)
                    .await;
            }
        }
        outbox.end(&host.timestamp());
    }

    async fn run_in_turn(
        &self,
        host: &KernelHost,
        execution: &Execution,
        turn: &mut Turn,
        signal: &mut watch::Receiver<Signal>,
        outbox: &Outbox,
    ) {
        let kernel = match self.running_kernel(host, turn).await {
            Ok(kernel) => kernel,
            Err(error) => {
                outbox.push(output::failed(&not_started(&error)));
                return;
            }
        };
        if let Some(notice) = turn.notice.take() {
            let text = format!("[{notice}; this is a new one, without the state of the old one]\n");
            push_printed(outbox, Stream::Stderr, &text, &host.timestamp());
        }
        self.reseed_if_due(host, &kernel).await;
        self.give_variables(host, &kernel, turn, &execution.variables)
            .await;
        let outcome = match kernel.execute(&execution.code).await {
            Ok(events) => self.relay(host, &kernel, events, signal, outbox).await,
            Err(error) => {
                Outcome::Died(kernel.process().end().unwrap_or_else(|| error.to_string()))
            }
        };
        self.conclude(outcome, turn, outbox).await;
        if !execution.variables.is_empty() && self.is_running() {
            self.give_variables(host, &kernel, turn, &BTreeMap::new())
                .await;
        }
        self.reseed_if_due(host, &kernel).await;
    }

    /// The sandbox's variables and those of the call over them.
    async fn give_variables(
        &self,
        host: &KernelHost,
        kernel: &Kernel,
        turn: &mut Turn,
        of_the_call: &BTreeMap<String, String>,
    ) {
        let Ok(mut wanted) = host.environment() else {
            return;
        };
        wanted.extend(of_the_call.clone());
        let changes = Changes::between(&turn.variables, &wanted);
        let change = kernel.change_variables(&self.family, &changes);
        match timeout(UPKEEP_WAIT, change).await {
            Ok(Ok(())) => turn.variables = wanted,
            Ok(Err(error)) => tracing::warn!(%error, context = self.id, "changing variables"),
            Err(_) => tracing::warn!(context = self.id, "changing variables takes too long"),
        }
    }

    async fn reseed_if_due(&self, host: &KernelHost, kernel: &Kernel) {
        if !self.reseed_due.swap(false, Ordering::Relaxed) {
            return;
        }
        let entropy = host.fresh_bytes::<64>();
        let reseed = kernel.reseed(&self.family, &entropy);
        if !matches!(timeout(UPKEEP_WAIT, reseed).await, Ok(Ok(()))) {
            tracing::warn!(context = self.id, "a kernel was not reseeded");
        }
    }

    async fn relay(
        &self,
        host: &KernelHost,
        kernel: &Kernel,
        mut events: mpsc::Receiver<KernelEvent>,
        signal: &mut watch::Receiver<Signal>,
        outbox: &Outbox,
    ) -> Outcome {
        let mut answer = AnswerWriter::new(host, outbox);
        let mut interrupts = 0;
        let mut wake = far_away();
        loop {
            tokio::select! {
                biased;
                changed = signal.changed() => {
                    return match (changed.is_ok(), *signal.borrow()) {
                        (true, Signal::Restart(_) | Signal::Run) => Outcome::Restarted,
                        _ => Outcome::Removed,
                    };
                }
                () = outbox.cancelled(), if interrupts == 0 => {
                    kernel.interrupt().await;
                    interrupts = 1;
                    wake = Instant::now() + interrupt_interval(&self.family);
                }
                event = events.recv() => {
                    let Some(event) = event else {
                        return Outcome::Died(kernel.process().ended().await);
                    };
                    answer.write(event);
                    if answer.completion.is_complete() {
                        return Outcome::Done;
                    }
                    if answer.completion.is_settling() {
                        wake = Instant::now() + SETTLE_WAIT;
                    }
                }
                () = tokio::time::sleep_until(wake) => {
                    if answer.completion.is_settling() {
                        return Outcome::Done;
                    }
                    match after_interrupts(&self.family, interrupts) {
                        Patience::Again => {
                            kernel.interrupt().await;
                            interrupts += 1;
                            wake = Instant::now() + interrupt_interval(&self.family);
                        }
                        Patience::Endless => wake = far_away(),
                        Patience::Lost => return Outcome::Stuck,
                    }
                }
            }
        }
    }

    async fn conclude(&self, outcome: Outcome, turn: &mut Turn, outbox: &Outbox) {
        match outcome {
            Outcome::Done => {}
            Outcome::Restarted => outbox.push(output::failed(&restarted())),
            Outcome::Removed => outbox.push(output::failed(&removed())),
            Outcome::Died(end) => {
                self.end_kernel().await;
                match (&self.family, end.strip_prefix(EXIT_STATUS)) {
                    // A script may end its shell; that is no accident.
                    (Family::Bash, Some("0")) => {}
                    (Family::Bash, Some(_)) => {
                        outbox.push(output::failed(&failure("ExitStatus", end)));
                    }
                    _ => outbox.push(output::failed(&died(&end))),
                }
            }
            Outcome::Stuck => {
                self.end_kernel().await;
                turn.notice = Some(String::from(
                    "the kernel could not be interrupted when a client went away",
                ));
            }
        }
    }
}

/// Turns events into lines.
struct AnswerWriter<'a> {
    host: &'a KernelHost,
    outbox: &'a Outbox,
    completion: Completion,
    failed: bool,
}

impl<'a> AnswerWriter<'a> {
    fn new(host: &'a KernelHost, outbox: &'a Outbox) -> Self {
        Self {
            host,
            outbox,
            completion: Completion::default(),
            failed: false,
        }
    }

    fn write(&mut self, event: KernelEvent) {
        self.completion.observe(&event);
        match event {
            KernelEvent::Began { count } => self.outbox.push(output::began(count)),
            KernelEvent::Printed { stream, text, date } => {
                let date = date.unwrap_or_else(|| self.host.timestamp());
                push_printed(self.outbox, stream, &text, &date);
            }
            KernelEvent::Showed { main, bundle } => self.outbox.push(output::showed(main, bundle)),
            KernelEvent::Failed(failure) => self.fail(&failure),
            // Some kernels tell of a failure only in their answer.
            KernelEvent::Replied(Some(failure)) if !self.failed => self.fail(&failure),
            KernelEvent::TooLarge { kind, bytes } => {
                let text = format!("[left out: {kind} of {bytes} bytes]\n");
                push_printed(self.outbox, Stream::Stderr, &text, &self.host.timestamp());
            }
            KernelEvent::Idle | KernelEvent::Replied(_) => {}
        }
    }

    fn fail(&mut self, failure: &Failure) {
        self.failed = true;
        // The sandbox's log shows it as well (BC-033).
        tracing::info!(name = failure.name, "an execution failed");
        self.outbox.push(output::failed(failure));
    }
}

fn push_printed(outbox: &Outbox, stream: Stream, text: &str, timestamp: &str) {
    for line in output::printed(stream, text, timestamp) {
        outbox.push(line);
    }
}

/// What to do about an execution that goes on after so many interrupts.
#[derive(Debug, PartialEq, Eq)]
enum Patience {
    Again,
    Endless,
    Lost,
}

/// Deno knows no interrupts at all. A shell may miss one between two commands, and its state is
/// worth less than its answering. Python's state is worth waiting for: some code swallows an
/// interrupt, but more than a few are a nuisance to clean-up code.
fn after_interrupts(family: &Family, sent: u32) -> Patience {
    match (family, sent) {
        (Family::JavaScript, _) => Patience::Lost,
        (Family::Bash, ..20) | (Family::Python, ..4) => Patience::Again,
        (Family::Python, _) => Patience::Endless,
        (_, ..4) => Patience::Again,
        _ => Patience::Lost,
    }
}

fn interrupt_interval(family: &Family) -> Duration {
    match family {
        Family::Bash => Duration::from_millis(250),
        _ => Duration::from_secs(5),
    }
}

/// Later than any execution.
fn far_away() -> Instant {
    Instant::now() + Duration::from_secs(u64::from(u32::MAX))
}

fn failure(name: &str, value: String) -> Failure {
    Failure {
        name: name.to_owned(),
        value,
        traceback: String::new(),
    }
}

fn restarted() -> Failure {
    failure("ContextRestarting", String::from("Context was restarted"))
}

fn removed() -> Failure {
    failure("ContextRemoved", String::from("Context was removed"))
}

fn died(end: &str) -> Failure {
    failure(
        "KernelDied",
        format!("the kernel ended ({end}); the next execution starts a new one"),
    )
}

fn not_started(error: &StartError) -> Failure {
    failure("KernelNotStarted", describe(error))
}

/// The error and everything beneath it.
pub(super) fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_cannot_be_interrupted_is_given_up_but_python() {
        for (family, given_up_after) in [
            (Family::JavaScript, Some(1)),
            (Family::Bash, Some(20)),
            (Family::R, Some(4)),
            (Family::Python, None),
        ] {
            let lost = (1..1000).find(|sent| after_interrupts(&family, *sent) == Patience::Lost);
            assert_eq!(lost, given_up_after, "{family:?}");
        }
        assert_eq!(after_interrupts(&Family::Python, 4), Patience::Endless);
    }
}
