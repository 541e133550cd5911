//! How an actor ends its sandbox, from whatever state (R-L8).
//!
//! ```text
//!  state ──▶ [asleep, and the engine removes only what is awake: wake it] ──▶ record (killing)
//!        ──▶ remove ──▶ gone: the actor ends
//!               └─ failed: stays killing, the sweeper tries again
//! ```
//!
//! Invariant: a wake-up that is needed for a removal is nobody's resume: no lifetime changes, no
//! state but `killing` is shown, and if it fails the sandbox sleeps on as if nobody had asked.

use sandhold_engine::RemovalRule;
use sandhold_platform::{Ended, PlatformError, Waking};
use sandhold_types::{Actor, Deadline, EndReason, ErrorCode, Operation, SandboxState, Timestamp};

use crate::{
    actor::{BUSY_RETRY, Next, REMOVAL_BUDGET, SandboxActor},
    layout::Durability,
    remove,
    sleep::{self, Restored},
};

/// What a caller is told to wait after a wake-up for a removal has failed (R-L8).
const WAKE_FAILED_RETRY: std::time::Duration = std::time::Duration::from_secs(5);

impl SandboxActor {
    /// Removes the sandbox, whatever state it is in.
    pub(crate) async fn end(
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
        if self.record.state == SandboxState::Paused
            && self.dependencies.engine.removal_rule() == RemovalRule::AwakeOnly
        {
            self.wake_to_end(deadline).await?;
        }
        if self.record.state != SandboxState::Killing {
            self.condemn(reason, by.clone(), now).await;
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
                Err(PlatformError::Busy {
                    id,
                    state: SandboxState::Killing,
                    retry_after: BUSY_RETRY,
                })
            }
        }
    }

    /// Goes on with a removal that failed before.
    pub(crate) async fn end_again(&mut self) -> Next {
        let noted = self.record.ended.clone();
        let reason = noted.map_or(EndReason::TimedOut, |ended| ended.reason);
        let deadline = self.deadline(REMOVAL_BUDGET);
        self.end(reason, Actor::Sweeper, deadline)
            .await
            .unwrap_or(Next::Continue)
    }

    /// Notes that it is ending, and why.
    async fn condemn(&mut self, reason: EndReason, by: Actor, now: Timestamp) {
        self.record
            .note(SandboxState::Killing, by, reason.to_string(), now);
        self.record.ended = Some(Ended { at: now, reason });
        self.entry.publish(&self.record);
        // A full disk must not stop a delete: without the note, recovery still finds the directory
        // and removes what is left of a sandbox whose processes are gone.
        let noted = self
            .dependencies
            .persist(&self.record, Durability::Process)
            .await;
        if let Err(error) = noted {
            tracing::warn!(sandbox = %self.record.id, error = ?error, "the removal is not written down");
        }
        self.dependencies.faults.reach("remove.recorded");
    }

    /// Wakes a sleeping sandbox for an engine that removes nothing else, within its share of the
    /// caller's time (R-L9).
    async fn wake_to_end(&mut self, deadline: Deadline) -> Result<(), PlatformError> {
        let now = tokio::time::Instant::now().into_std();
        let share = Deadline::after(now, deadline.split(now).wake);
        let asleep = self.record.clone();
        let mut awake = asleep.clone();
        awake.incarnation = awake.incarnation.next();
        let mut shown = awake.clone();
        shown.state = SandboxState::Killing;
        self.entry.publish(&shown);
        let woken = match self.check_room() {
            Ok(()) => match Restored::own(&self.dependencies, &awake, Waking::AsPaused) {
                Ok(from) => self.restore_as(&awake, &from, share).await,
                Err(error) => Err(error),
            },
            refused => refused,
        };
        let Err(error) = woken else {
            self.record = awake;
            return Ok(());
        };
        self.clear(awake.incarnation).await;
        self.record.incarnation = awake.incarnation;
        self.entry.publish(&self.record);
        let (id, state) = (asleep.id, asleep.state);
        if error.code() == ErrorCode::CapacityExceeded {
            return Err(PlatformError::Conflict { id, state });
        }
        tracing::warn!(sandbox = %id, error = ?error, "it could not be woken for its removal");
        Err(PlatformError::Busy {
            id,
            state,
            retry_after: WAKE_FAILED_RETRY,
        })
    }

    /// Restores the life that `record` names, at most until `deadline`.
    pub(crate) async fn restore_as(
        &self,
        record: &crate::record::Record,
        from: &Restored,
        deadline: Deadline,
    ) -> Result<(), PlatformError> {
        let at = tokio::time::Instant::from_std(deadline.instant());
        let wake = async {
            let _turn = self.dependencies.launches.acquire().await;
            sleep::restore(&self.dependencies, record, from, deadline).await
        };
        let woken = tokio::time::timeout_at(at, wake).await;
        woken.unwrap_or(Err(PlatformError::Deadline { step: "waking it" }))
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
}
