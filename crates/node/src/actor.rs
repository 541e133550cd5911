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
//! It is called by the node only, and never calls another actor.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::FutureExt;
use sandhold_engine::ExitCause;
use sandhold_images::Build;
use sandhold_platform::{Egress, LifetimeChange, PlatformError, SandboxView};
use sandhold_types::{
    Actor, Clocking, Deadline, EndReason, Operation, SandboxState, TransitionRefused,
};
use tokio::sync::{mpsc, oneshot};

use crate::{
    blanks::Blank, create, layout::Durability, lifetime, node::Dependencies, record::Record,
    registry::Entry, registry::Registry, remove,
};

/// Commands that may wait for one sandbox.
pub(crate) const MAILBOX_MAX: usize = 32;
/// How long a removal that nobody waits for may take before it is tried again.
const REMOVAL_BUDGET: Duration = Duration::from_secs(30);
/// How long the agent may take to say whether it is busy.
const ACTIVITY_BUDGET: Duration = Duration::from_secs(2);
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
    /// Look whether its lifetime is over, or an unfinished removal is to be tried again.
    Sweep,
}

/// How an actor begins.
#[derive(Debug)]
pub(crate) enum Beginning {
    /// By making the sandbox.
    Create {
        /// From this build.
        build: Arc<Build>,
        /// In these engine processes, if some were ready.
        blank: Option<Blank>,
        /// Until then.
        deadline: Deadline,
        /// Who waits for it.
        reply: Reply<Arc<SandboxView>>,
    },
    /// With a sandbox that was found after a restart.
    Adopted,
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
}

/// Whether the actor has anything left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
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
                build,
                blank,
                deadline,
                reply,
            } => self.create(&build, blank, deadline, reply).await,
            Beginning::Adopted => Next::Continue,
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
        build: &Build,
        blank: Option<Blank>,
        deadline: Deadline,
        reply: Reply<Arc<SandboxView>>,
    ) -> Next {
        let made = self.make(build, blank, deadline).await;
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
        build: &Build,
        blank: Option<Blank>,
        deadline: Deadline,
    ) -> Result<(), PlatformError> {
        let at = tokio::time::Instant::from_std(deadline.instant());
        let making = async {
            let _turn = self.dependencies.launches.acquire().await;
            let dependencies = Arc::clone(&self.dependencies);
            create::make(&dependencies, &mut self.record, build, blank, deadline).await
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
            Event::Command(Command::Sweep) => self.sweep().await,
            Event::Ended(cause) => {
                let deadline = self.deadline(REMOVAL_BUDGET);
                let ended = self.end(end_reason(cause), Actor::Sandbox, deadline).await;
                ended.unwrap_or(Next::Continue)
            }
        }
    }

    /// Ends the sandbox if its lifetime is over, and goes on with a removal that failed before.
    async fn sweep(&mut self) -> Next {
        let deadline = self.deadline(REMOVAL_BUDGET);
        if self.record.state == SandboxState::Killing {
            let reason = self
                .record
                .ended
                .clone()
                .map_or(EndReason::TimedOut, |ended| ended.reason);
            return self
                .end(reason, Actor::Sweeper, deadline)
                .await
                .unwrap_or(Next::Continue);
        }
        if !self.entry.is_over(self.dependencies.clock.now()) || self.is_busy_inside().await {
            return Next::Continue;
        }
        self.end(EndReason::TimedOut, Actor::Sweeper, deadline)
            .await
            .unwrap_or(Next::Continue)
    }

    /// Whether a command or an execution keeps an idle clock from running out (R-L5). A fixed
    /// deadline asks nobody, and a window of zero means now.
    async fn is_busy_inside(&self) -> bool {
        let Clocking::Idle {
            window_ms: Some(1..),
        } = self.record.lifetime.clocking
        else {
            return false;
        };
        let deadline = self.deadline(ACTIVITY_BUDGET);
        let agent = &self.dependencies.agent;
        let token = &self.record.tokens.control;
        let busy = agent.activity(&self.record.id, token, deadline).await;
        let busy = busy.is_ok_and(|activity| activity.is_busy());
        if busy {
            self.entry.touch(self.dependencies.clock.now());
        }
        busy
    }

    /// Removes the sandbox, whatever state it is in.
    async fn end(
        &mut self,
        reason: EndReason,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Next, PlatformError> {
        let id = self.record.id.clone();
        self.record
            .state
            .begin(Operation::Kill)
            .map_err(|_| PlatformError::NotFound(id.clone()))?;
        let now = self.dependencies.clock.now();
        if self.record.state != SandboxState::Killing {
            self.record
                .note(SandboxState::Killing, by.clone(), reason.to_string(), now);
            self.record.ended = Some(sandhold_platform::Ended { at: now, reason });
            self.entry.publish(&self.record);
            // A full disk must not stop a delete: without the note, recovery still finds the
            // directory and removes what is left of a sandbox whose processes are gone.
            if let Err(error) = self
                .dependencies
                .persist(&self.record, Durability::Process)
                .await
            {
                tracing::warn!(sandbox = %id, error = ?error, "the removal is not written down");
            }
            self.dependencies.faults.reach("remove.recorded");
        }
        let mut buried = self.record.clone();
        let reason = buried
            .ended
            .take()
            .map_or(EndReason::TimedOut, |ended| ended.reason);
        buried.end(reason, by, now);
        match remove::remove(&self.dependencies, &buried, deadline).await {
            Ok(()) => {
                self.record = buried;
                self.retire();
                Ok(Next::Stop)
            }
            Err(error) => {
                tracing::warn!(sandbox = %id, error = ?error, "removal failed; it will be tried again");
                let state = SandboxState::Killing;
                Err(PlatformError::Busy {
                    id,
                    state,
                    retry_after: BUSY_RETRY,
                })
            }
        }
    }

    fn retire(&mut self) {
        tracing::info!(sandbox = %self.record.id, ended = ?self.record.ended, "sandbox gone");
        let forgotten = self.registry.retire(self.record.clone());
        if let Some(oldest) = forgotten {
            let tombstone = self
                .dependencies
                .layout
                .ended()
                .join(format!("{oldest}.json"));
            drop(tokio::task::spawn_blocking(move || {
                std::fs::remove_file(tombstone)
            }));
        }
    }

    async fn change_lifetime(
        &mut self,
        change: LifetimeChange,
        by: &Actor,
    ) -> Result<(), PlatformError> {
        self.must_run()?;
        let now = self.dependencies.clock.now();
        let mut changed = self.record.clone();
        changed.lifetime = lifetime::after(self.record.lifetime, change, now);
        changed.last_activity = now;
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
    async fn commit(&mut self, changed: Record) -> Result<(), PlatformError> {
        self.dependencies
            .persist(&changed, Durability::Synced)
            .await?;
        self.record = changed;
        self.entry.publish(&self.record);
        Ok(())
    }

    fn must_run(&self) -> Result<(), PlatformError> {
        let id = self.record.id.clone();
        match self.record.state.begin(Operation::Pause) {
            Ok(_) => Ok(()),
            Err(TransitionRefused::Gone) => Err(PlatformError::NotFound(id)),
            Err(TransitionRefused::Busy(state)) => Err(PlatformError::Busy {
                id,
                state,
                retry_after: BUSY_RETRY,
            }),
            Err(TransitionRefused::AlreadySo(state) | TransitionRefused::NotAllowed(state)) => {
                Err(PlatformError::Conflict { id, state })
            }
        }
    }

    fn deadline(&self, budget: Duration) -> Deadline {
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
