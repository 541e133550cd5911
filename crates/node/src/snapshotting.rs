//! The actor's side of a snapshot: a sandbox is captured and goes on (R-T1).
//!
//! ```text
//!   running ─▶ record (snapshotting) ─▶ capture into image-<life> ─▶ runs on? ─▶ published ─▶ record (running)
//!                                                                      │
//!                              its processes went with the capture: as after a pause, and woken again
//!   paused  ─▶ its image is published as it lies there; nothing of it moves
//! ```
//!
//! Invariants:
//! - A capture goes where that of a pause goes, so whatever becomes of it leads where that of a pause
//!   leads: with an image that may be whole the source sleeps and is woken from it. Only a capture that
//!   leaves neither processes nor an image costs the source its life.
//! - Nothing is in the catalogue before its image is known to be whole.

use std::{path::PathBuf, sync::Arc, time::Duration};

use sandhold_engine::{AfterCapture, EngineIdentity};
use sandhold_images::{Snapshot, SnapshotError};
use sandhold_platform::{Pause, PauseKeeps, PlatformError, SnapshotKind, TakeSnapshot};
use sandhold_types::{Actor, Incarnation, Operation, SandboxState, SnapshotId};

use crate::{
    actor::{Next, SandboxActor},
    layout::Durability,
    record::Proof,
    sleep::{self, Captured},
};

/// How many of the snapshots that it stands on a sandbox remembers.
const LINE_MAX: usize = 256;

/// What a sandbox stands on after `newest`, which itself stands on `ancestors`.
pub(crate) fn line_from(newest: &SnapshotId, ancestors: &[SnapshotId]) -> Vec<SnapshotId> {
    let line = std::iter::once(newest).chain(ancestors);
    line.take(LINE_MAX).cloned().collect()
}

pub(crate) fn not_kept(source: SnapshotError) -> PlatformError {
    PlatformError::Node {
        step: "keeping the snapshot",
        source: source.into(),
    }
}

impl SandboxActor {
    /// Captures the sandbox and lets it go on.
    pub(crate) async fn snapshot(
        &mut self,
        wanted: TakeSnapshot,
        by: Actor,
    ) -> (Result<Arc<Snapshot>, PlatformError>, Next) {
        if let Err(error) = self.may(Operation::Snapshot) {
            return (Err(error), Next::Continue);
        }
        if self.record.state == SandboxState::Paused {
            return (self.snapshot_asleep(wanted).await, Next::Continue);
        }
        if let Err(error) = self.begin_snapshot(&by).await {
            return (Err(error), Next::Continue);
        }
        let begun = tokio::time::Instant::now();
        let captured = {
            // Not frozen from here on: a frozen one cannot be captured.
            let _awake = self.dependencies.hold(&self.entry).await;
            sleep::capture(&self.dependencies, &self.record, AfterCapture::Continue).await
        };
        match captured {
            Captured::Beside => {
                let engine = self.dependencies.engine.identity();
                let taken = self.keep(wanted, self.record.incarnation, engine, begun.elapsed());
                let taken = taken.await;
                (self.go_on(taken, by).await, Next::Continue)
            }
            Captured::Asleep(Proof::Complete) => self.keep_and_wake(wanted, by, begun).await,
            other => {
                let (told, next) = self.conclude_pause(other, Pause::default(), by).await;
                let lost = || PlatformError::Engine {
                    step: "capturing it",
                    source: "nobody knows whether the capture is whole".into(),
                };
                (Err(told.err().unwrap_or_else(lost)), next)
            }
        }
    }

    async fn begin_snapshot(&mut self, by: &Actor) -> Result<(), PlatformError> {
        self.check_disk_for_image().await?;
        let mut captured = self.record.clone();
        captured.last_activity = self.entry.last_activity();
        let now = self.dependencies.clock.now();
        let reason = "a snapshot is taken of it".to_owned();
        captured.note(SandboxState::Snapshotting, by.clone(), reason, now);
        self.commit_as(captured, Durability::Process).await?;
        self.dependencies.faults.reach("snapshot.recorded");
        Ok(())
    }

    /// Puts the image of `life` into the catalogue.
    async fn keep(
        &self,
        wanted: TakeSnapshot,
        life: Incarnation,
        engine: EngineIdentity,
        paused: Duration,
    ) -> Result<Arc<Snapshot>, PlatformError> {
        let record = &self.record;
        let snapshot = Snapshot {
            id: SnapshotId::generate(self.dependencies.entropy.as_ref()),
            owner: record.owner.clone(),
            kind: wanted.kind,
            names: wanted.name.into_iter().collect(),
            source: record.id.clone(),
            template: record.template.clone(),
            ancestors: record.line.clone(),
            resources: record.resources,
            env_vars: record.env_vars.clone(),
            keeps: wanted.keeps,
            taken_at: self.dependencies.clock.now(),
            source_paused_ms: u64::try_from(paused.as_millis()).unwrap_or(u64::MAX),
            engine,
            control_token: record.tokens.control.clone(),
            boot_token: record.tokens.boot.clone(),
            size_bytes: 0,
        };
        let image: PathBuf = self.dependencies.layout.image(&record.id, life);
        let catalogue = Arc::clone(&self.dependencies.snapshots);
        let publish = move || catalogue.publish(snapshot, &image);
        let published = tokio::task::spawn_blocking(publish).await;
        let published = published.map_err(|panic| PlatformError::Node {
            step: "keeping the snapshot",
            source: panic.into(),
        })?;
        self.dependencies.faults.reach("snapshot.published");
        published.map_err(not_kept)
    }

    /// It runs on, with or without a snapshot of it.
    async fn go_on(
        &mut self,
        taken: Result<Arc<Snapshot>, PlatformError>,
        by: Actor,
    ) -> Result<Arc<Snapshot>, PlatformError> {
        let mut running = self.record.clone();
        let now = self.dependencies.clock.now();
        let reason = match &taken {
            Ok(snapshot) => {
                stand_on(&mut running.line, snapshot);
                format!("snapshot {} was taken", snapshot.id)
            }
            Err(error) => format!("it goes on, because {error}"),
        };
        running.note(SandboxState::Running, by, reason, now);
        let written = self.dependencies.persist(&running, Durability::Synced);
        let taken = match (written.await, taken) {
            (Ok(()), taken) => {
                self.record = running;
                taken
            }
            (Err(error), taken) => {
                // Not written down, it is `snapshotting` to recovery, which leads to the same. What
                // the caller is not told of is not kept.
                self.record.state = SandboxState::Running;
                if let Ok(snapshot) = &taken {
                    self.discard(snapshot).await;
                }
                taken.and(Err(error))
            }
        };
        self.entry.publish(&self.record);
        self.dependencies.faults.reach("snapshot.running");
        self.remove_images().await;
        self.dependencies.faults.reach("snapshot.cleared");
        taken
    }

    async fn discard(&self, snapshot: &Snapshot) {
        let (catalogue, id) = (
            Arc::clone(&self.dependencies.snapshots),
            snapshot.id.clone(),
        );
        let removed = tokio::task::spawn_blocking(move || catalogue.remove(&id)).await;
        if !matches!(removed, Ok(Ok(()))) {
            tracing::warn!(sandbox = %self.record.id, ?removed, "a snapshot is left that nobody was told of");
        }
    }

    /// The capture is whole, and the processes went with it: it is woken from what was captured.
    async fn keep_and_wake(
        &mut self,
        wanted: TakeSnapshot,
        by: Actor,
        begun: tokio::time::Instant,
    ) -> (Result<Arc<Snapshot>, PlatformError>, Next) {
        let asleep = self.fall_asleep(Pause::default(), by.clone(), Proof::Complete);
        if let Err(error) = asleep.await {
            return (Err(error), Next::Continue);
        }
        let engine = self.dependencies.engine.identity();
        let taken = self
            .keep(wanted, self.record.incarnation, engine, begun.elapsed())
            .await;
        if let Ok(snapshot) = &taken {
            stand_on(&mut self.record.line, snapshot);
        }
        let next = self.prove(by).await;
        (taken, next)
    }

    /// A sleeping sandbox has its image already.
    async fn snapshot_asleep(
        &mut self,
        wanted: TakeSnapshot,
    ) -> Result<Arc<Snapshot>, PlatformError> {
        let whole = self
            .record
            .image
            .clone()
            .filter(|image| image.proof == Proof::Complete);
        let image = whole.ok_or_else(|| PlatformError::Engine {
            step: "capturing it",
            source: "it sleeps, and nobody knows whether its image is whole".into(),
        })?;
        let slept_for = self
            .record
            .sleep
            .map_or(PauseKeeps::Everything, |s| s.keeps);
        let wanted = TakeSnapshot {
            keeps: match wanted.keeps {
                PauseKeeps::Files => PauseKeeps::Files,
                PauseKeeps::Everything => slept_for,
            },
            ..wanted
        };
        let written_by = image.engine;
        let engine = written_by.unwrap_or_else(|| self.dependencies.engine.identity());
        let taken = self.keep(wanted, image.of, engine, Duration::ZERO);
        let taken = taken.await?;
        let mut changed = self.record.clone();
        stand_on(&mut changed.line, &taken);
        self.commit(changed).await?;
        Ok(taken)
    }
}

/// A temporary snapshot is nothing to go back to, so nothing stands on it.
fn stand_on(line: &mut Vec<SnapshotId>, taken: &Snapshot) {
    if taken.kind == SnapshotKind::Kept {
        *line = line_from(&taken.id, line);
    }
}
