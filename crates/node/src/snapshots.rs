//! The node's snapshots, as [`TimeTravel`], and their collection (R-T5).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use async_trait::async_trait;
use sandhold_images::{Retention, Snapshot, SnapshotError};
use sandhold_platform::{
    Descent, Lineage, Platform, PlatformError, SandboxView, SnapshotKind, SnapshotView, Storage,
    TakeSnapshot, TimeTravel,
};
use sandhold_types::{Actor, Deadline, EnvName, Namespace, SandboxId, SnapshotId};

use crate::{
    actor::Command,
    node::{Dependencies, Node},
    registry::Registry,
};

/// How often it is looked for snapshots that nothing keeps.
const COLLECT_INTERVAL: Duration = Duration::from_secs(60);

#[async_trait]
impl TimeTravel for Node {
    async fn take_snapshot(
        &self,
        sandbox: &SandboxId,
        wanted: TakeSnapshot,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SnapshotView>, PlatformError> {
        if self.is_stopping() {
            return Err(PlatformError::ShuttingDown);
        }
        let entry = self.registry().live(sandbox);
        let entry = entry.ok_or_else(|| PlatformError::NotFound(sandbox.clone()))?;
        if let Some(name) = &wanted.name {
            let namespace = entry.view().owner.namespace.clone();
            // Templates are looked for first, so it could never be asked for.
            let builds = &self.dependencies().builds;
            if builds.resolve(&namespace, &name.name).is_some() {
                return Err(PlatformError::NameTaken(name.name.clone()));
            }
        }
        let command = |reply| Command::Snapshot { wanted, by, reply };
        let taken = entry.ask(deadline, command).await?;
        Ok(Arc::new(taken.view()))
    }

    fn snapshots(&self) -> Vec<Arc<SnapshotView>> {
        let all = self.dependencies().snapshots.list();
        let kept = all.iter().filter(|s| s.kind == SnapshotKind::Kept);
        kept.map(|snapshot| Arc::new(snapshot.view())).collect()
    }

    fn find_snapshot(
        &self,
        namespace: &Namespace,
        env: &EnvName,
        reference: &str,
    ) -> Option<Arc<SnapshotView>> {
        let catalogue = &self.dependencies().snapshots;
        let found = catalogue.resolve(namespace, env, reference)?;
        (found.kind == SnapshotKind::Kept).then(|| Arc::new(found.view()))
    }

    fn storage(&self) -> Storage {
        let root = self.dependencies().layout.root();
        let disk = rustix::fs::statvfs(root);
        let bytes = |blocks: fn(&rustix::fs::StatVfs) -> u64| {
            let of = |s: &rustix::fs::StatVfs| blocks(s).saturating_mul(s.f_frsize);
            disk.as_ref().map_or(0, of)
        };
        let all = self.dependencies().snapshots.list();
        Storage {
            total_bytes: bytes(|s| s.f_blocks),
            available_bytes: bytes(|s| s.f_bavail),
            snapshots: all.len(),
            snapshot_bytes: all.iter().map(|snapshot| snapshot.size_bytes).sum(),
        }
    }

    fn lineage(&self, id: &SnapshotId) -> Option<Lineage> {
        let catalogue = &self.dependencies().snapshots;
        let snapshot = catalogue.get(id)?;
        let view = |snapshot: &Arc<Snapshot>| Arc::new(snapshot.view());
        let descends = |other: &&Arc<Snapshot>| {
            other.kind == SnapshotKind::Kept && other.ancestors.contains(id)
        };
        let ancestors = snapshot.ancestors.iter().map(|id| Descent {
            id: id.clone(),
            snapshot: catalogue.get(id).as_ref().map(view),
        });
        let stands = |view: &Arc<SandboxView>| view.line.contains(id);
        Some(Lineage {
            sizes: catalogue.sizes(id).unwrap_or_default(),
            ancestors: ancestors.collect(),
            descendants: catalogue.list().iter().filter(descends).map(view).collect(),
            sandboxes: self.list().into_iter().filter(stands).collect(),
            snapshot: view(&snapshot),
        })
    }

    async fn delete_snapshot(&self, id: &SnapshotId) -> Result<(), PlatformError> {
        let catalogue = Arc::clone(&self.dependencies().snapshots);
        let wanted = id.clone();
        let removed = tokio::task::spawn_blocking(move || catalogue.remove(&wanted)).await;
        let removed = removed.map_err(|panic| PlatformError::Node {
            step: "deleting the snapshot",
            source: panic.into(),
        })?;
        removed.map_err(|error| match error {
            SnapshotError::Unknown(id) => PlatformError::SnapshotNotFound(id.to_string()),
            error => PlatformError::Node {
                step: "deleting the snapshot",
                source: error.into(),
            },
        })
    }

    async fn roll_back(
        &self,
        sandbox: &SandboxId,
        to: &SnapshotId,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        if self.is_stopping() {
            return Err(PlatformError::ShuttingDown);
        }
        let entry = self.registry().live(sandbox);
        let entry = entry.ok_or_else(|| PlatformError::NotFound(sandbox.clone()))?;
        let lease = self.dependencies().snapshots.lease(to);
        let to = lease.ok_or_else(|| PlatformError::SnapshotNotFound(to.to_string()))?;
        let command = |reply| Command::RollBack {
            to,
            by,
            deadline,
            reply,
        };
        entry.ask(deadline, command).await
    }
}

/// Removes snapshots that nothing keeps, for ever.
pub(crate) async fn collect(
    dependencies: Arc<Dependencies>,
    registry: Arc<Registry>,
    retention: Retention,
) {
    let mut ticks = tokio::time::interval(COLLECT_INTERVAL);
    loop {
        ticks.tick().await;
        let entries = registry.entries();
        let referred: BTreeSet<SnapshotId> = entries
            .iter()
            .flat_map(|entry| entry.view().line.clone())
            .collect();
        let now = dependencies.clock.now();
        let catalogue = Arc::clone(&dependencies.snapshots);
        let pass = move || catalogue.collect(&referred, retention, now);
        match tokio::task::spawn_blocking(pass).await {
            Ok(Ok(collected)) if collected.is_empty() => {}
            Ok(Ok(collected)) => tracing::info!(?collected, "snapshots collected"),
            Ok(Err(error)) => tracing::warn!(error = ?error, "snapshots not collected"),
            Err(error) => tracing::error!(%error, "the snapshot collector failed"),
        }
    }
}

/// Removes what an earlier process took for copies that it never finished.
pub(crate) async fn remove_temporary(dependencies: &Dependencies) -> Result<(), SnapshotError> {
    for id in dependencies.snapshots.temporary() {
        let catalogue = Arc::clone(&dependencies.snapshots);
        let removed = tokio::task::spawn_blocking(move || catalogue.remove(&id)).await;
        removed.unwrap_or(Ok(()))?;
    }
    Ok(())
}
