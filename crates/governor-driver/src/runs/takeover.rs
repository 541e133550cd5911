//! Runs of a replica that is not heard any more: they go on here, or end with a reason (R-G3).
//!
//! ```text
//!   log open, writer silent ─┬─ in the books, root not black any more ─┬─ was started ─▶ goes on
//!                            │                                         └─ was not ────▶ ended, cleaned up
//!                            ├─ in the books, root still black ─▶ later
//!                            └─ not in the books ─▶ its sandbox went: the log is ended
//! ```

use sandhold_books::runs::{RunState, Written};
use sandhold_governor::{
    Platform, StoreError,
    books::{Answer, Verb},
    ids::RunId,
    tasks::{RunEvent, WayOut},
};

use super::{
    Begin, Executed,
    artifacts::Manifest,
    head::RunHead,
    log::note_told,
    workload::{Task, Workload},
};
use crate::{direct::DirectSandboxes, governor::Governor, guest::Guests};

impl<P: Platform + DirectSandboxes + Guests + 'static> Governor<P> {
    /// Looks for silent runs every cycle; never ends by itself.
    pub(crate) async fn keep_adopting_runs(&self) {
        let mut cycles = tokio::time::interval(self.rules().settings().cycle);
        cycles.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            cycles.tick().await;
            if let Err(error) = self.adopt_silent_runs().await {
                tracing::warn!(%error, "runs of other replicas could not be looked at");
            }
        }
    }

    /// Takes over what nobody executes.
    ///
    /// # Errors
    /// The logs or the books did not answer.
    pub async fn adopt_silent_runs(&self) -> Result<(), StoreError> {
        for state in self.logs().unfinished().await? {
            let is_here = self.shared.runs.find(&state.run).is_some();
            let silent_for = state.now.since(state.heard_at);
            if !is_here && silent_for >= self.rules().black() {
                self.adopt(state).await?;
            }
        }
        Ok(())
    }

    async fn adopt(&self, state: RunState) -> Result<(), StoreError> {
        let (run, replica) = (&state.run, &self.shared.replica);
        let Some(head) = RunHead::read(&state.head) else {
            tracing::error!(%run, "the log of a run cannot be read");
            return Ok(());
        };
        let Some(executed) = Executed::begin(&self.shared.runs, run) else {
            // As many as may be are executed here: another replica, or a later cycle.
            return Ok(());
        };
        // The books decide who executes it; the log follows.
        let answer = match head.names() {
            Some((slot, ..)) => {
                let (run, replica) = (run.clone(), replica.clone());
                self.step(Verb::ClaimRun { slot, run, replica }).await?
            }
            None => Answer::Unknown,
        };
        if answer == Answer::Busy {
            return Ok(());
        }
        let claimed = self.logs().claim(run, replica, self.rules().black());
        if claimed.await? != Written::Done {
            return Ok(());
        }
        tracing::warn!(%run, ?answer, "a run whose replica is silent is taken over");
        let manifest = self.told(run, state.last).await?;
        let mut workload = Workload::new(head, Task::default(), manifest);
        if let Answer::RunGoesOn { .. } = answer {
            let begin = match workload.head.is_started {
                true => Begin::TakenOver,
                false => Begin::Abandoned,
            };
            self.spawn_loop(executed, workload, begin, state.last);
            return Ok(());
        }
        let way_out = match &workload.head.place {
            Some(_) => WayOut::LeaseLost,
            None => WayOut::ReplicaLost,
        };
        let mut writer = self.writer(run, state.last);
        writer.tell(&RunEvent::Error(way_out), &mut workload).await;
        Ok(())
    }

    /// What its log says was told.
    async fn told(&self, run: &RunId, last: u64) -> Result<Manifest, StoreError> {
        let mut manifest = Manifest::default();
        let mut after = 0;
        while after < last {
            let entries = self.logs().read(run, after).await?;
            if entries.is_empty() {
                break;
            }
            after += entries.len() as u64;
            for entry in &entries {
                note_told(&mut manifest, entry);
            }
        }
        Ok(manifest)
    }
}
