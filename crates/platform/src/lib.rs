//! The seam between those who serve callers and whatever runs sandboxes.
//!
//! ```text
//!   api ──── Platform, Templates ───▶ ┐
//!   gateway ──────────── Routes ────▶ ├─ node (this machine), later: nodes behind a store
//!   governor ─────────── Platform ──▶ ┘
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

mod error;
mod routes;
mod sandbox;
mod templates;

use async_trait::async_trait;
pub use error::PlatformError;
pub use routes::{ActivityKind, DialError, Route, RouteLookup, Routes};
pub use sandbox::{
    CreateSandbox, Egress, Ended, HistoryEvent, IpBlock, LifetimeChange, LogLine, MetricSample,
    Owner, PublicTraffic, SandboxView, TemplateStamp, TimeRange,
};
use sandhold_types::{Actor, Deadline, SandboxId};
use std::sync::Arc;
pub use templates::{TemplateView, Templates, Warmth};

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
