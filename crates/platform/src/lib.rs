//! The seam between those who serve callers and whatever runs sandboxes.
//!
//! ```text
//!   api ─ Platform, Templates, TimeTravel ▶ ┐
//!   gateway ─────────────────── Routes ───▶ ├─ node (this machine), later: nodes behind a store
//!   governor ────────────────── Platform ─▶ ┘
//! ```
//!
//! Invariants:
//! - Reads ([`Platform::list`], [`Platform::get`], [`Routes::route`]) never wait for writes (R-P9):
//!   they are plain functions over what was last published.
//! - Every call that can take long carries a [`Deadline`].
//! - A failure says which [`ErrorCode`] it is; callers never guess from text (R-P10).
//!
//! This crate holds no behaviour: traits and the values that pass through them.

#![forbid(unsafe_code)]

mod builds;
mod error;
mod routes;
mod sandbox;
mod templates;
mod travel;

use async_trait::async_trait;
pub use builds::{
    AnnouncedBuild, BuildBase, BuildLogLevel, BuildLogLine, BuildPart, BuildPlan, BuildState,
    BuildStep, BuildView, FilesHash, LogPage, NewBuild, RegistryLogin, StartWith, TagView,
    TemplateBuilds, Upload,
};
pub use error::{PlatformError, is_full_disk};
pub use routes::{
    ActivityKind, DialError, Hold, Holds, Route, RouteLookup, Routes, StateChange, WakeError,
};
pub use sandbox::{
    AUTO_RESUME_MIN_MS, AutoResume, BusyWith, CreateSandbox, Dozes, Egress, Ended, GuestHealth,
    HistoryEvent, IpBlock, LifetimeChange, LogLine, MetricSample, NewLifetime, Owner, Pause,
    PauseKeeps, PublicTraffic, Resume, SandboxView, Sleep, TemplateStamp, TimeRange, Waking, Woken,
};
use sandhold_types::{Actor, Deadline, SandboxId};
use std::sync::Arc;
pub use templates::{TemplateView, Templates, Warmth};
pub use travel::{
    Descent, Lineage, SnapshotKind, SnapshotName, SnapshotSizes, SnapshotView, Storage,
    TakeSnapshot, TimeTravel,
};

/// Sandboxes, as those who serve callers see them. Who may see which is the caller's business: the
/// platform answers for every tenant.
#[async_trait]
pub trait Platform: Send + Sync + std::fmt::Debug {
    /// Makes a sandbox and returns when it answers on its data plane (R-P6). A create that fails
    /// leaves nothing behind.
    ///
    /// # Errors
    /// Unknown template, no room, engine or guest failure, deadline.
    async fn create(
        &self,
        request: CreateSandbox,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError>;

    /// Every sandbox that is alive (not killed), oldest first.
    fn list(&self) -> Vec<Arc<SandboxView>>;

    /// How many sandboxes doze, and how often they do. None on a platform whose sandboxes never do.
    fn dozes(&self) -> Dozes {
        Dozes::default()
    }

    /// One sandbox, alive or recently ended ([`SandboxView::ended`] tells).
    fn get(&self, id: &SandboxId) -> Option<Arc<SandboxView>>;

    /// Removes a sandbox; success means that it is gone (R-L8).
    ///
    /// # Errors
    /// [`PlatformError::NotFound`] when there is none, or the reason why it is not gone yet.
    async fn kill(
        &self,
        id: &SandboxId,
        by: Actor,
        deadline: Deadline,
    ) -> Result<(), PlatformError>;

    /// Puts it to sleep: memory and files go to disk, and nothing of it uses memory or processor
    /// any more (R-L4). Goes on to its end if the caller gives up.
    ///
    /// # Errors
    /// [`PlatformError::AlreadySo`] if it sleeps already; busy; or the capture failed, and then it
    /// goes on running if the engine let it live.
    async fn pause(
        &self,
        id: &SandboxId,
        pause: Pause,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError>;

    /// Brings it back where it was (R-L4). A failed wake-up leaves it asleep.
    ///
    /// # Errors
    /// [`PlatformError::AlreadySo`] if it runs; busy; no room; or the step that failed.
    async fn resume(
        &self,
        id: &SandboxId,
        resume: Resume,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError>;

    /// Wakes it as `resume` says if it sleeps; if it runs, its life is changed by `running`. Which
    /// of the two is decided under its lock (R-L2).
    ///
    /// # Errors
    /// Busy; no room; or the step that failed.
    async fn connect(
        &self,
        id: &SandboxId,
        running: LifetimeChange,
        resume: Resume,
        by: Actor,
        deadline: Deadline,
    ) -> Result<(Arc<SandboxView>, Woken), PlatformError>;

    /// Changes when its life ends and returns it as it is after that (R-L11).
    ///
    /// # Errors
    /// Unknown sandbox, or a state in which a lifetime cannot change.
    async fn change_lifetime(
        &self,
        id: &SandboxId,
        change: LifetimeChange,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError>;

    /// Replaces what it may reach.
    ///
    /// # Errors
    /// Unknown sandbox, or the network refused the rules; then the old ones stay.
    async fn change_egress(
        &self,
        id: &SandboxId,
        egress: Egress,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError>;

    /// Its samples within `range`, oldest first; at most one in five seconds is kept.
    ///
    /// # Errors
    /// Unknown sandbox.
    async fn metrics(
        &self,
        id: &SandboxId,
        range: TimeRange,
    ) -> Result<Vec<MetricSample>, PlatformError>;

    /// Its newest log lines, oldest first, at most `limit`.
    ///
    /// # Errors
    /// Unknown sandbox.
    async fn logs(&self, id: &SandboxId, limit: usize) -> Result<Vec<LogLine>, PlatformError>;

    /// What happened to it, oldest first.
    ///
    /// # Errors
    /// Unknown sandbox.
    async fn history(&self, id: &SandboxId) -> Result<Vec<HistoryEvent>, PlatformError>;
}
