//! The actor's side of a rollback: the sandbox goes back to a snapshot of its own line (R-T3).
//!
//! ```text
//!   record (rolling back) ─▶ freeze life n ─▶ restore the snapshot as life n+1 ─▶ identity
//!        ├─ answers ─▶ record (running, n+1) ─▶ life n goes
//!        └─ fails ───▶ life n+1 goes ─▶ thaw life n ─▶ record (running, n)
//! ```
//!
//! The state that is left is kept as it is, in its frozen processes, until the new one answers: that
//! needs no capture, which takes longer the bigger the sandbox is and with some engines may end it,
//! and a failure costs nothing, not even connections. It needs memory for both lives meanwhile, which
//! is asked for first. One that sleeps keeps its image instead.
//!
//! Invariants:
//! - The record names life n until life n+1 has answered; the one write that names n+1 is the
//!   rollback. Whatever is found of other lives after a crash goes.
//! - Identity, tokens, limits and network are the sandbox's, not the snapshot's; of the snapshot are
//!   memory and files.

use sandhold_engine::{InstanceRef, InstanceStatus};
use sandhold_images::{Lease, Snapshot, check_warm};
use sandhold_platform::{NewLifetime, PlatformError, Resume, Waking};
use sandhold_types::{Actor, Deadline, Incarnation, Operation, SandboxState};

use crate::{
    actor::SandboxActor,
    capacity,
    layout::Durability,
    lifetime,
    node::blocking,
    record::Record,
    sleep::{Joins, Restored},
    snapshotting::line_from,
};

/// Whether a sandbox may go back to a snapshot: it is of its own making, or it comes from it.
fn is_of_line(record: &Record, snapshot: &Snapshot) -> bool {
    snapshot.source == record.id || record.line.contains(&snapshot.id)
}

/// Whether this engine can restore a snapshot (BC-092).
pub(crate) fn check_engine(
    snapshot: &Snapshot,
    engine: &dyn sandhold_engine::Engine,
) -> Result<(), PlatformError> {
    let fits = check_warm(&snapshot.engine, &engine.identity());
    fits.map_err(|mismatch| PlatformError::SnapshotIncompatible {
        id: snapshot.id.clone(),
        why: mismatch.to_string(),
    })
}

impl SandboxActor {
    /// Takes the sandbox back to a snapshot.
    pub(crate) async fn roll_back(
        &mut self,
        to: &Lease,
        by: Actor,
        deadline: Deadline,
    ) -> Result<(), PlatformError> {
        self.may(Operation::RollBack)?;
        self.check_rollback(to.snapshot())?;
        self.clear_left_overs().await;
        let was_asleep = self.record.state == SandboxState::Paused;
        let mut rolling = self.record.clone();
        let now = self.dependencies.clock.now();
        let reason = format!("it is taken back to snapshot {}", to.snapshot().id);
        rolling.note(SandboxState::RollingBack, by.clone(), reason, now);
        self.commit_as(rolling, Durability::Process).await?;
        self.dependencies.faults.reach("rollback.recorded");
        let rolled_back = if was_asleep {
            self.leave_sleep(to, deadline).await
        } else {
            self.leave_life(to, deadline).await
        };
        match rolled_back {
            Ok(life) => self.begin_life(life, to.snapshot(), by).await,
            Err(error) => {
                self.stay(by, &error).await;
                Err(error)
            }
        }
    }

    /// Everything that can be known before anything is touched.
    fn check_rollback(&self, snapshot: &Snapshot) -> Result<(), PlatformError> {
        if !is_of_line(&self.record, snapshot) {
            let id = snapshot.id.to_string();
            return Err(PlatformError::SnapshotNotFound(id));
        }
        check_engine(snapshot, self.dependencies.engine.as_ref())?;
        if snapshot.template.build != self.record.template.build {
            return Err(PlatformError::Invalid(format!(
                "snapshot {} has another root file system than the sandbox",
                snapshot.id
            )));
        }
        // Both lives are there for a moment.
        let room = capacity::measure(self.dependencies.layout.root(), 0, 0);
        Ok(capacity::check_second_life(
            &room,
            &self.policy,
            snapshot.size_bytes,
        )?)
    }

    /// From sleep it is a wake-up, with the admission of one.
    async fn leave_sleep(
        &mut self,
        to: &Lease,
        deadline: Deadline,
    ) -> Result<Incarnation, PlatformError> {
        self.check_room()?;
        self.restore_snapshot(to, Joins::FreshNetwork, deadline)
            .await
    }

    async fn leave_life(
        &mut self,
        to: &Lease,
        deadline: Deadline,
    ) -> Result<Incarnation, PlatformError> {
        // Nobody thaws it meanwhile: to the others it does not doze.
        let _hold = self.dependencies.hold(&self.entry).await;
        self.stop_life().await?;
        self.restore_snapshot(to, Joins::SameNetwork, deadline)
            .await
    }

    async fn stop_life(&self) -> Result<(), PlatformError> {
        let layout = &self.dependencies.layout;
        let instance = layout.instance(&self.record.id, self.record.incarnation);
        let frozen = self.dependencies.set_frozen(&instance, true).await;
        frozen.map_err(|source| PlatformError::Engine {
            step: "stopping it",
            source: source.into(),
        })?;
        self.dependencies.faults.reach("rollback.stopped");
        Ok(())
    }

    /// Restores the snapshot as the next life and returns which life it is. Nothing is left of one
    /// that failed.
    async fn restore_snapshot(
        &mut self,
        to: &Lease,
        network: Joins,
        deadline: Deadline,
    ) -> Result<Incarnation, PlatformError> {
        let snapshot = to.snapshot();
        let from = Restored {
            image: to.image(),
            control_token: snapshot.control_token.clone(),
            boot_token: snapshot.boot_token.clone(),
            keeps: snapshot.keeps,
            network,
        };
        let mut next = self.record.clone();
        next.incarnation = next.incarnation.next();
        let restored = match self.make_room_for(next.incarnation).await {
            Ok(()) => self.restore_as(&next, &from, deadline).await,
            Err(error) => Err(error),
        };
        if let Err(error) = restored {
            self.clear(next.incarnation).await;
            return Err(error);
        }
        self.dependencies.faults.reach("rollback.restored");
        Ok(next.incarnation)
    }

    async fn make_room_for(&self, life: Incarnation) -> Result<(), PlatformError> {
        let instance = self.dependencies.layout.instance(&self.record.id, life);
        let make = move || std::fs::create_dir_all(instance.directory);
        blocking("making a directory for its next life", make).await
    }

    /// The new life answers: it is the sandbox's from here on.
    async fn begin_life(
        &mut self,
        life: Incarnation,
        snapshot: &Snapshot,
        by: Actor,
    ) -> Result<(), PlatformError> {
        let before = self.record.incarnation;
        let was_asleep = self.record.image.is_some();
        let now = self.dependencies.clock.now();
        let mut awake = self.record.clone();
        awake.incarnation = life;
        awake.line = line_from(&snapshot.id, &snapshot.ancestors);
        awake.tokens.boot = snapshot.boot_token.clone();
        awake.last_activity = now;
        awake.sleep = None;
        awake.image = None;
        if was_asleep {
            let as_made = Resume {
                waking: Waking::AsPaused,
                lifetime: NewLifetime::AsMade,
                on_timeout: None,
            };
            awake.lifetime = lifetime::after_wake(awake.lifetime, awake.life_ms, &as_made, now);
        }
        let reason = format!("it is back at snapshot {}", snapshot.id);
        awake.note(SandboxState::Running, by.clone(), reason, now);
        self.entry.doze.forget();
        if let Err(error) = self.commit_as(awake, Durability::Synced).await {
            self.clear(life).await;
            self.stay(by, &error).await;
            return Err(error);
        }
        self.dependencies.faults.reach("rollback.running");
        if !was_asleep {
            self.clear(before).await;
        }
        self.discard_images().await;
        self.dependencies.faults.reach("rollback.cleared");
        Ok(())
    }

    /// Gives the stopped life its network back and lets it go on.
    async fn go_on_with_life(&self, instance: &InstanceRef) -> Result<(), PlatformError> {
        let network = &self.dependencies.network;
        let unaddressed = network.unaddress(&self.record.id).await;
        unaddressed.map_err(|source| PlatformError::Node {
            step: "giving it its network back",
            source: source.into(),
        })?;
        let thawed = self.dependencies.set_frozen(instance, false).await;
        thawed.map_err(|source| PlatformError::Engine {
            step: "thawing it",
            source: source.into(),
        })
    }

    /// Whether there is nothing to thaw. Whoever watches a running sandbox finds out why.
    async fn has_ended(&self, instance: &InstanceRef) -> bool {
        let status = self.dependencies.inspect(instance).await;
        matches!(
            status,
            Ok(InstanceStatus::Ended(_) | InstanceStatus::Unknown)
        )
    }

    /// The rollback did not come about: the sandbox is as it was.
    pub(crate) async fn stay(&mut self, by: Actor, error: &PlatformError) {
        let asleep = self.record.image.is_some();
        let instance = {
            let layout = &self.dependencies.layout;
            layout.instance(&self.record.id, self.record.incarnation)
        };
        if !asleep
            && let Err(error) = self.go_on_with_life(&instance).await
            && !self.has_ended(&instance).await
        {
            // The sweeper comes back to it.
            tracing::warn!(sandbox = %self.record.id, error = ?error, "it is still stopped");
            return;
        }
        let state = if asleep {
            SandboxState::Paused
        } else {
            SandboxState::Running
        };
        let now = self.dependencies.clock.now();
        let reason = format!("it was not taken back: {error}");
        self.record.note(state, by, reason, now);
        // Not written down, it is `rolling-back` to recovery, which leads to the same.
        let noted = self.dependencies.persist(&self.record, Durability::Process);
        if let Err(error) = noted.await {
            tracing::warn!(sandbox = %self.record.id, error = ?error, "not written down");
        }
        self.entry.publish(&self.record);
    }
}
