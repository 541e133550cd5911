//! The actor of a sandbox: the only one that may change it (R-L2).
//!
//! Owns the record and, through it, everything of one sandbox. Takes one command at a time from a
//! bounded mailbox; between commands it watches the sandbox's processes.
//!
//! ```text
//!            ┌──────────── Command (mailbox, at most MAILBOX_MAX wait)
//!            ▼
//!   create ─▶ loop { command | the processes ended } ─▶ removed: the actor ends
//! ```
//!
//! Invariants:
//! - The view that others see is published before a slow step begins and after it ended.
//! - A panic while handling one command loses that command's answer, not the sandbox.
//! - After a removal that failed the sandbox stays `killing`; the sweeper tries again.
//!
//! What the commands do is beside it: [`crate::create`], [`crate::sleeping`],
//! [`crate::snapshotting`], [`crate::rolling_back`], [`crate::ending`]. It is called by the node only,
//! and never calls another actor.

use std::{collections::BTreeSet, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::FutureExt;
use sandhold_engine::ExitCause;
use sandhold_images::{Lease, Snapshot};
use sandhold_platform::{
    Egress, LifetimeChange, Pause, PlatformError, Resume, SandboxView, TakeSnapshot, Woken,
};
use sandhold_types::{
    Actor, Clocking, Deadline, EndReason, Incarnation, OnTimeout, Operation, SandboxState,
    Timestamp, TransitionRefused,
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};

use crate::{
    agent::{Activity, AgentError},
    blanks::Blank,
    capacity::CapacityPolicy,
    create::{self, Source},
    layout::Durability,
    lifetime,
    node::Dependencies,
    record::Record,
    registry::{Entry, Registry},
};

/// Commands that may wait for one sandbox.
pub(crate) const MAILBOX_MAX: usize = 32;
/// How long a removal that nobody waits for may take before it is tried again.
pub(crate) const REMOVAL_BUDGET: Duration = Duration::from_secs(30);
/// How long the agent may take to say whether it is busy.
const ACTIVITY_BUDGET: Duration = Duration::from_secs(2);
/// How long after a restart an automatic pause waits for the agent to say once how busy it is.
const WARM_UP_MAX: Duration = Duration::from_secs(60);
/// When an automatic pause that failed is tried again.
const AUTO_PAUSE_RETRY: Duration = Duration::from_secs(10);
/// What a caller is told to wait while another operation holds the sandbox (R-L8).
pub(crate) const BUSY_RETRY: Duration = Duration::from_secs(2);

/// The answer to a command.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, PlatformError>>;

/// What an actor can be told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Remove it.
    Kill {
        by: Actor,
        deadline: Deadline,
        reply: Reply<()>,
    },
    /// Move its clock.
    ChangeLifetime {
        change: LifetimeChange,
        by: Actor,
        reply: Reply<Arc<SandboxView>>,
    },
    /// Replace what it may reach.
    ChangeEgress {
        egress: Egress,
        by: Actor,
        reply: Reply<Arc<SandboxView>>,
    },
    /// Put it to sleep.
    Pause {
        pause: Pause,
        by: Actor,
        reply: Reply<Arc<SandboxView>>,
    },
    /// Wake it.
    Resume {
        resume: Resume,
        by: Actor,
        deadline: Deadline,
        reply: Reply<Arc<SandboxView>>,
    },
    /// Wake it if it sleeps, else move its clock.
    Connect {
        running: LifetimeChange,
        resume: Resume,
        by: Actor,
        deadline: Deadline,
        reply: Reply<(Arc<SandboxView>, Woken)>,
    },
    /// Capture it and let it go on.
    Snapshot {
        wanted: TakeSnapshot,
        by: Actor,
        reply: Reply<Arc<Snapshot>>,
    },
    /// Take it back to a snapshot.
    RollBack {
        to: Lease,
        by: Actor,
        deadline: Deadline,
        reply: Reply<Arc<SandboxView>>,
    },
    /// Look whether its lifetime is over, or something was not finished.
    Sweep,
    /// Look whether it is idle, and freeze it if so.
    Doze,
    /// Something of it was seen on the machine though it sleeps.
    LeftOvers,
}

/// How an actor begins.
#[derive(Debug)]
pub(crate) enum Beginning {
    /// By making the sandbox.
    Create {
        /// From this.
        source: Source,
        /// In these engine processes, if some were ready.
        blank: Option<Blank>,
        /// Until then.
        deadline: Deadline,
        /// Who waits for it.
        reply: Reply<Arc<SandboxView>>,
    },
    /// With a sandbox that was found after a restart, running or asleep.
    Adopted,
    /// With one whose capture was cut short: by finding out whether it can be woken. Says when that
    /// is known.
    Doubtful(oneshot::Sender<()>),
    /// By finishing its removal.
    Ending(EndReason),
}

/// The state of one actor.
pub(crate) struct SandboxActor {
    pub(crate) dependencies: Arc<Dependencies>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) entry: Arc<Entry>,
    pub(crate) record: Record,
    pub(crate) mailbox: mpsc::Receiver<Command>,
    pub(crate) policy: CapacityPolicy,
    pub(crate) guard: Guard,
}

/// What the actor remembers between two looks at its sandbox; nothing of it outlives the process.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Since when this process has the sandbox.
    pub(crate) since: Timestamp,
    /// Whether its activity has been read once (R-L5).
    pub(crate) is_warm: bool,
    /// Whether it was busy when its activity was last read.
    pub(crate) was_busy: bool,
    /// No automatic pause before this.
    pub(crate) pause_not_before: Timestamp,
    /// The lives of which processes, network or files may be left.
    pub(crate) left_overs: BTreeSet<Incarnation>,
    /// The removal of images that nobody needs any more; at most one at a time.
    pub(crate) discards: JoinSet<()>,
}

impl Guard {
    /// Of a sandbox that this process has had since `now`.
    pub(crate) fn new(now: Timestamp) -> Self {
        Self {
            since: now,
            is_warm: false,
            was_busy: false,
            pause_not_before: now,
            left_overs: BTreeSet::new(),
            discards: JoinSet::new(),
        }
    }
}

/// Whether the actor has anything left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Continue,
    Stop,
}

impl SandboxActor {
    /// Runs until the sandbox is gone.
    pub(crate) async fn run(mut self, beginning: Beginning) {
        let mut next = self.begin(beginning).await;
        while next == Next::Continue {
            let event = tokio::select! {
                command = self.mailbox.recv() => match command {
                    Some(command) => Event::Command(command),
                    None => return,
                },
                cause = processes_ended(&self.dependencies, &self.record) => Event::Ended(cause),
            };
            let handled = AssertUnwindSafe(self.handle(event)).catch_unwind().await;
            next = handled.unwrap_or_else(|_| {
                tracing::error!(sandbox = %self.record.id, "a command panicked; the sandbox stays");
                Next::Continue
            });
        }
    }

    async fn begin(&mut self, beginning: Beginning) -> Next {
        match beginning {
            Beginning::Create {
                source,
                blank,
                deadline,
                reply,
            } => self.create(source, blank, deadline, reply).await,
            Beginning::Adopted => Next::Continue,
            Beginning::Doubtful(done) => {
                let next = self.prove(Actor::Recovery).await;
                // Recovery waits for it within bounds.
                let _ = done.send(());
                next
            }
            Beginning::Ending(reason) => {
                let deadline = self.deadline(REMOVAL_BUDGET);
                self.end(reason, Actor::Recovery, deadline)
                    .await
                    .unwrap_or(Next::Continue)
            }
        }
    }

    async fn create(
        &mut self,
        source: Source,
        blank: Option<Blank>,
        deadline: Deadline,
        reply: Reply<Arc<SandboxView>>,
    ) -> Next {
        let made = self.make(&source, blank, deadline).await;
        // Its bytes need not stay longer.
        drop(source);
        let failure = match made {
            Ok(()) => {
                self.entry.publish(&self.record);
                match reply.send(Ok(self.entry.view())) {
                    Ok(()) => return Next::Continue,
                    // Nobody was told of it, so nobody would ever delete it.
                    Err(_) => "the caller went away before it was made".to_owned(),
                }
            }
            Err(error) => {
                let step = error.to_string();
                tracing::warn!(sandbox = %self.record.id, error = ?error, "create failed");
                let _ = reply.send(Err(error));
                step
            }
        };
        let deadline = self.deadline(REMOVAL_BUDGET);
        let reason = EndReason::CreateFailed { step: failure };
        self.end(reason, Actor::Operator, deadline)
            .await
            .unwrap_or(Next::Continue)
    }

    /// Makes the sandbox, waiting for a turn so that a burst does not slow every create in it.
    async fn make(
        &mut self,
        source: &Source,
        blank: Option<Blank>,
        deadline: Deadline,
    ) -> Result<(), PlatformError> {
        let at = tokio::time::Instant::from_std(deadline.instant());
        let making = async {
            let _turn = self.dependencies.launches.acquire().await;
            let dependencies = Arc::clone(&self.dependencies);
            create::make(&dependencies, &mut self.record, source, blank, deadline).await
        };
        let made = tokio::time::timeout_at(at, AssertUnwindSafe(making).catch_unwind()).await;
        match made {
            Ok(Ok(result)) => result,
            Ok(Err(_panic)) => Err(PlatformError::Node {
                step: "making it",
                source: "a step panicked; the log has its place".into(),
            }),
            Err(_) => Err(PlatformError::Deadline { step: "making it" }),
        }
    }

    async fn handle(&mut self, event: Event) -> Next {
        match event {
            Event::Command(Command::Kill {
                by,
                deadline,
                reply,
            }) => {
                let outcome = self
                    .end(EndReason::Killed { by: by.clone() }, by, deadline)
                    .await;
                let next = outcome.as_ref().map_or(Next::Continue, |next| *next);
                let _ = reply.send(outcome.map(|_| ()));
                next
            }
            Event::Command(Command::ChangeLifetime { change, by, reply }) => {
                let changed = self.change_lifetime(change, &by).await;
                let _ = reply.send(changed.map(|()| self.entry.view()));
                self.sweep().await
            }
            Event::Command(Command::ChangeEgress { egress, by, reply }) => {
                let changed = self.change_egress(egress, &by).await;
                let _ = reply.send(changed.map(|()| self.entry.view()));
                Next::Continue
            }
            Event::Command(Command::Pause { pause, by, reply }) => {
                let (paused, next) = self.pause(pause, by).await;
                let _ = reply.send(paused.map(|()| self.entry.view()));
                next
            }
            Event::Command(Command::Resume {
                resume,
                by,
                deadline,
                reply,
            }) => {
                let resumed = self.resume(resume, by, deadline).await;
                let _ = reply.send(resumed.map(|()| self.entry.view()));
                Next::Continue
            }
            Event::Command(Command::Connect {
                running,
                resume,
                by,
                deadline,
                reply,
            }) => {
                let connected = self.connect(running, resume, by, deadline).await;
                let _ = reply.send(connected.map(|woken| (self.entry.view(), woken)));
                Next::Continue
            }
            Event::Command(Command::Snapshot { wanted, by, reply }) => {
                let (taken, next) = self.snapshot(wanted, by).await;
                let _ = reply.send(taken);
                next
            }
            Event::Command(Command::RollBack {
                to,
                by,
                deadline,
                reply,
            }) => {
                let rolled_back = self.roll_back(&to, by, deadline).await;
                let _ = reply.send(rolled_back.map(|()| self.entry.view()));
                Next::Continue
            }
            Event::Command(Command::Sweep) => self.sweep().await,
            Event::Command(Command::LeftOvers) => {
                if self.record.state == SandboxState::Paused {
                    self.guard.left_overs.insert(self.record.incarnation);
                }
                self.sweep().await
            }
            Event::Command(Command::Doze) => {
                self.doze().await;
                Next::Continue
            }
            Event::Ended(cause) => {
                let deadline = self.deadline(REMOVAL_BUDGET);
                let ended = self.end(end_reason(cause), Actor::Sandbox, deadline).await;
                ended.unwrap_or(Next::Continue)
            }
        }
    }

    /// Does what is due: an end or a pause by the clock, or what was not finished before.
    async fn sweep(&mut self) -> Next {
        match self.record.state {
            SandboxState::Killing => self.end_again().await,
            SandboxState::Pausing
            | SandboxState::Resuming
            | SandboxState::Snapshotting
            | SandboxState::RollingBack => self.settle().await,
            SandboxState::Paused => {
                self.clear_left_overs().await;
                Next::Continue
            }
            SandboxState::Running => {
                self.clear_left_overs().await;
                self.sweep_running().await
            }
            _ => Next::Continue,
        }
    }

    async fn sweep_running(&mut self) -> Next {
        let now = self.dependencies.clock.now();
        if !self.is_over(now).await {
            return Next::Continue;
        }
        match self.record.lifetime.on_timeout {
            OnTimeout::Kill => {
                let deadline = self.deadline(REMOVAL_BUDGET);
                self.end(EndReason::TimedOut, Actor::Sweeper, deadline)
                    .await
                    .unwrap_or(Next::Continue)
            }
            OnTimeout::Pause => self.pause_by_clock(now).await,
        }
    }

    /// Puts it to sleep at the end of its lifetime, when its activity has been read at least once
    /// since this process has it (R-L5).
    async fn pause_by_clock(&mut self, now: Timestamp) -> Next {
        if now < self.guard.pause_not_before {
            return Next::Continue;
        }
        let warming_up = !self.guard.is_warm && now.since(self.guard.since) < WARM_UP_MAX;
        if warming_up && self.activity().await.is_err() {
            return Next::Continue;
        }
        let pause = Pause {
            keeps: self.record.timeout_keeps,
            ..Pause::default()
        };
        let (paused, next) = self.pause(pause, Actor::Sweeper).await;
        if let Err(error) = paused {
            tracing::warn!(sandbox = %self.record.id, error = ?error, "not paused at its end");
            self.guard.pause_not_before = now.plus(AUTO_PAUSE_RETRY);
        }
        next
    }

    /// Whether it is over. An idle clock is asked again after the agent was, because a command or an
    /// execution keeps it from running out (R-L5). A fixed deadline asks nobody, and a window of
    /// zero means now.
    async fn is_over(&mut self, now: Timestamp) -> bool {
        let asks = matches!(
            self.record.lifetime.clocking,
            Clocking::Idle {
                window_ms: Some(1..)
            }
        );
        if asks && self.entry.is_over(now) {
            // One that does not answer is not kept by that.
            let _ = self.activity().await;
        }
        self.entry.is_over(now)
    }

    /// Asks the agent how busy it is, thawing the sandbox for that if need be, and moves the idle
    /// clock by the answer: while it is busy, and once more when it is seen not to be any more,
    /// because it ended some time after the last look.
    pub(crate) async fn activity(&mut self) -> Result<Activity, AgentError> {
        // Whether it can be thawed shows in whether it answers.
        let _awake = self.dependencies.hold(&self.entry).await;
        let deadline = self.deadline(ACTIVITY_BUDGET);
        let agent = &self.dependencies.agent;
        let token = &self.record.tokens.control;
        let activity = agent.activity(&self.record.id, token, deadline).await?;
        self.guard.is_warm = true;
        let busy = activity.keeps_awake(self.record.busy_with);
        if busy || self.guard.was_busy {
            self.entry.touch(self.dependencies.clock.now());
        }
        self.guard.was_busy = busy;
        Ok(activity)
    }

    pub(crate) async fn change_lifetime(
        &mut self,
        change: LifetimeChange,
        by: &Actor,
    ) -> Result<(), PlatformError> {
        self.must_run()?;
        let now = self.dependencies.clock.now();
        let mut changed = self.record.clone();
        changed.lifetime = lifetime::after(self.record.lifetime, change, now);
        changed.last_activity = now;
        if let LifetimeChange::Replace { after_ms } = change {
            changed.life_ms = after_ms;
        }
        if changed.lifetime != self.record.lifetime {
            let end = changed.lifetime.end(now);
            changed.note(
                SandboxState::Running,
                by.clone(),
                format!("its end is now {end}"),
                now,
            );
        }
        self.commit(changed).await
    }

    async fn change_egress(&mut self, egress: Egress, by: &Actor) -> Result<(), PlatformError> {
        self.must_run()?;
        let id = &self.record.id;
        self.dependencies
            .network
            .set_egress(id, &egress)
            .await
            .map_err(|source| PlatformError::Node {
                step: "changing its network rules",
                source: source.into(),
            })?;
        let mut changed = self.record.clone();
        changed.egress = egress;
        let now = self.dependencies.clock.now();
        changed.note(
            SandboxState::Running,
            by.clone(),
            "its network rules changed".to_owned(),
            now,
        );
        self.commit(changed).await
    }

    /// Makes a changed record the sandbox's own once it is on disk.
    pub(crate) async fn commit(&mut self, changed: Record) -> Result<(), PlatformError> {
        self.commit_as(changed, Durability::Synced).await
    }

    fn must_run(&self) -> Result<(), PlatformError> {
        match self.may(Operation::Pause) {
            Err(PlatformError::AlreadySo { id, state }) => {
                Err(PlatformError::Conflict { id, state })
            }
            other => other,
        }
    }

    /// Whether `operation` may begin now, by the transition table.
    pub(crate) fn may(&self, operation: Operation) -> Result<(), PlatformError> {
        let id = self.record.id.clone();
        match self.record.state.begin(operation) {
            Ok(_) => Ok(()),
            Err(TransitionRefused::Gone) => Err(PlatformError::NotFound(id)),
            Err(TransitionRefused::Busy(state)) => Err(PlatformError::Busy {
                id,
                state,
                retry_after: BUSY_RETRY,
            }),
            Err(TransitionRefused::AlreadySo(state)) => Err(PlatformError::AlreadySo { id, state }),
            Err(TransitionRefused::NotAllowed(state)) => Err(PlatformError::Conflict { id, state }),
        }
    }

    pub(crate) fn deadline(&self, budget: Duration) -> Deadline {
        Deadline::after(tokio::time::Instant::now().into_std(), budget)
    }
}

#[derive(Debug)]
enum Event {
    Command(Command),
    Ended(ExitCause),
}

/// Resolves when the processes of a running sandbox end by themselves.
async fn processes_ended(dependencies: &Dependencies, record: &Record) -> ExitCause {
    if record.state != SandboxState::Running {
        return std::future::pending().await;
    }
    let instance = dependencies.layout.instance(&record.id, record.incarnation);
    match dependencies.engine.wait(&instance).await {
        Ok(cause) => cause,
        Err(error) => ExitCause::Crashed(format!("it cannot be watched: {error}")),
    }
}

/// What an engine's cause means to the sandbox's owner (R-L12).
pub(crate) fn end_reason(cause: ExitCause) -> EndReason {
    match cause {
        ExitCause::OutOfMemory => EndReason::OutOfMemory,
        ExitCause::DiskFull => EndReason::DiskFull,
        ExitCause::Exited(status) => EndReason::EngineFailed {
            detail: format!("its first process ended with {status}"),
        },
        ExitCause::Crashed(detail) => EndReason::EngineFailed { detail },
    }
}
