//! Snapshots of sandboxes, and going back to them.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use sandhold_types::{
    Actor, Deadline, EnvName, Namespace, Resources, SandboxId, SnapshotId, Timestamp,
};

use crate::{Owner, PauseKeeps, PlatformError, SandboxView, TemplateStamp};

/// A name that a snapshot can be asked for by. Written `name:tag`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct SnapshotName {
    /// What it is called.
    pub name: String,
    /// Which of those that are called so.
    pub tag: String,
}

impl SnapshotName {
    /// The tag of a name that says none.
    pub const DEFAULT_TAG: &'static str = "default";

    /// Divides `name[:tag]`.
    #[must_use]
    pub fn split(text: &str) -> (&str, &str) {
        text.split_once(':').unwrap_or((text, Self::DEFAULT_TAG))
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.tag)
    }
}

/// For how long a snapshot is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// Until it is deleted, or its retention is over.
    #[default]
    Kept,
    /// The server's own, for copies that are being made; shown to nobody, and gone when they are
    /// made or the server begins anew (R-T2).
    Temporary,
}

/// A request for a snapshot. Already authenticated and checked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TakeSnapshot {
    /// What it is to be called. Another one of that name loses it.
    pub name: Option<SnapshotName>,
    /// For how long.
    pub kind: SnapshotKind,
    /// What sandboxes that are made from it find: its processes, or only its files.
    pub keeps: PauseKeeps,
}

/// A snapshot as those who serve callers see it.
#[derive(Debug, Clone)]
pub struct SnapshotView {
    /// Its identifier.
    pub id: SnapshotId,
    /// Whose it is.
    pub owner: Owner,
    /// What it can be asked for by.
    pub names: Vec<SnapshotName>,
    /// The sandbox that it was taken of.
    pub source: SandboxId,
    /// What that one was made from.
    pub template: TemplateStamp,
    /// The snapshots that its source stood on, the nearest first.
    pub ancestors: Vec<SnapshotId>,
    /// Limits of sandboxes made from it.
    pub resources: Resources,
    /// When it was taken.
    pub taken_at: Timestamp,
    /// For how long its source stood still.
    pub source_paused_ms: u64,
}

/// What a snapshot occupies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotSizes {
    /// Bytes that go when it is deleted.
    pub exclusive_bytes: u64,
    /// Bytes that something else holds too.
    pub shared_bytes: u64,
}

/// A snapshot in another one's history. It may have been deleted since.
#[derive(Debug, Clone)]
pub struct Descent {
    /// Which.
    pub id: SnapshotId,
    /// The snapshot, if it is still there.
    pub snapshot: Option<Arc<SnapshotView>>,
}

/// What came from what (R-T5).
#[derive(Debug, Clone)]
pub struct Lineage {
    /// The snapshot itself.
    pub snapshot: Arc<SnapshotView>,
    /// What it occupies.
    pub sizes: SnapshotSizes,
    /// What it came from, the nearest first.
    pub ancestors: Vec<Descent>,
    /// Snapshots that came from it, at whatever distance, oldest first.
    pub descendants: Vec<Arc<SnapshotView>>,
    /// Sandboxes that stand on it.
    pub sandboxes: Vec<Arc<SandboxView>>,
}

/// How full the place is where sandboxes and snapshots lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Storage {
    /// Bytes of the file system.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub available_bytes: u64,
    /// Snapshots that are there, the server's own included.
    pub snapshots: usize,
    /// Bytes of their images; shared ones count for each.
    pub snapshot_bytes: u64,
}

/// Snapshots and what they are for. Who may see which is the caller's business, as with sandboxes.
#[async_trait]
pub trait TimeTravel: Send + Sync + fmt::Debug {
    /// Captures a sandbox, which goes on (R-T1). A sleeping one is not woken for it.
    ///
    /// # Errors
    /// Busy; no room; the name belongs to a template; or the capture failed. Whatever became of the
    /// capture, the source goes on unless its engine ended it, and then its history says so.
    async fn take_snapshot(
        &self,
        sandbox: &SandboxId,
        wanted: TakeSnapshot,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SnapshotView>, PlatformError>;

    /// Every snapshot that is there for callers, oldest first.
    fn snapshots(&self) -> Vec<Arc<SnapshotView>>;

    /// The one that `reference` (an ID, a name, `name:tag`) means in this bucket.
    fn find_snapshot(
        &self,
        namespace: &Namespace,
        env: &EnvName,
        reference: &str,
    ) -> Option<Arc<SnapshotView>>;

    /// How full it is.
    fn storage(&self) -> Storage;

    /// Where a snapshot stands among others.
    fn lineage(&self, id: &SnapshotId) -> Option<Lineage>;

    /// Removes a snapshot. What was made from it lives on, and so do snapshots that came from it.
    ///
    /// # Errors
    /// [`PlatformError::SnapshotNotFound`], or it could not be removed.
    async fn delete_snapshot(&self, id: &SnapshotId) -> Result<(), PlatformError>;

    /// Takes a sandbox back to a snapshot of its own line: memory and files are as they were, the
    /// sandbox stays who it is (R-T3). A failure leaves it as it was.
    ///
    /// # Errors
    /// The snapshot is not of its line, or cannot be restored here; busy; no room; or the step that
    /// failed.
    async fn roll_back(
        &self,
        sandbox: &SandboxId,
        to: &SnapshotId,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError>;
}
