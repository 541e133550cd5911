//! What the governor needs from a store and from a platform.
//!
//! [`Store`] is one method, because every verb is one atomic step and nothing else; what the verbs
//! mean is [`crate::books`]. [`Platform`] is our own, or any E2B-compatible service.

use std::future::Future;

use sandhold_types::{Generation, SandboxId, TemplateId, Timestamp};

use crate::{
    books::{Step, Verb},
    colour::Seen,
    ids::{Bucket, OwnerId, RunId, SlotId},
};

/// Why a verb has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It was certainly not carried out.
    #[error("the store cannot be reached")]
    Unavailable,
    /// It may or may not have been carried out.
    #[error("the store did not answer")]
    NoAnswer,
}

/// The books, wherever they are kept.
pub trait Store: Send + Sync {
    /// Carries out one verb as one atomic step by the store's own clock, and writes its audit
    /// entries in the same step.
    ///
    /// # Errors
    /// No answer. Every verb may be sent again: the same request gets the same answer.
    fn step(&self, verb: Verb) -> impl Future<Output = Result<Step, StoreError>> + Send;
}

/// A request to the platform.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// Make a sandbox. All of this goes into its metadata, with `managed_by` (R-G2).
    Create {
        /// Its slot's name.
        slot: SlotId,
        /// Where it counts.
        bucket: Bucket,
        /// Whose it is.
        owner: OwnerId,
        /// The generation it is made for.
        generation: Generation,
        /// From what.
        template: TemplateId,
    },
    /// Look for the sandbox of a slot, by metadata.
    FindBySlot(SlotId),
    /// Every sandbox of ours, as far as the platform shows them.
    List,
    /// One sandbox.
    Ask(SandboxId),
    /// Delete it. A platform of ours refuses if it has seen a later generation (R-G8).
    Kill(SandboxId, Generation),
    /// Wake it, if it sleeps. Its node learns the generation by this (R-G8).
    Wake(SandboxId, Generation),
    /// One try of the health gate (R-G9).
    Probe(SandboxId),
    /// Write a run's workspace and context.
    WriteFiles(SandboxId, Generation, RunId),
    /// Launch its entry process, detached.
    Launch(SandboxId, Generation, RunId),
    /// Which artifacts are new since the cursor.
    ReadArtifacts(SandboxId, Generation, RunId, u64),
    /// Whether the entry process has ended.
    ReadExit(SandboxId, Generation, RunId),
    /// Kill what the run started.
    KillProcesses(SandboxId, Generation, RunId),
}

/// To which budget a call belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CallKind {
    /// A create.
    Create,
    /// A delete, or a wake-up in order to delete.
    Delete,
    /// Anything else; no budget.
    Other,
}

impl Call {
    /// To which budget it belongs (R-G14).
    #[must_use]
    pub fn kind(&self) -> CallKind {
        match self {
            Self::Create { .. } => CallKind::Create,
            Self::Kill(..) => CallKind::Delete,
            _ => CallKind::Other,
        }
    }
}

/// A sandbox as the platform shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Which.
    pub sandbox: SandboxId,
    /// The slot its metadata names.
    pub slot: SlotId,
    /// Where it counts, by its metadata.
    pub bucket: Bucket,
    /// Whose it is, by its metadata.
    pub owner: OwnerId,
    /// Whether it runs.
    pub seen: Seen,
    /// When its life ends; the far future if that is a pause.
    pub ends_at: Timestamp,
    /// The highest generation that its node has seen.
    pub generation: Generation,
}

/// What the platform answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// It is made.
    Created {
        /// Which.
        sandbox: SandboxId,
        /// When its life ends.
        ends_at: Timestamp,
    },
    /// The sandbox of the slot, if there is one.
    Found(Option<Listed>),
    /// What it shows.
    Listing(Vec<Listed>),
    /// It exists, and whether it runs.
    State(Seen),
    /// It is done.
    Done,
    /// New artifacts were read, up to this cursor.
    Artifacts {
        /// How many.
        count: u32,
        /// Where to go on.
        cursor: u64,
    },
    /// The entry process ended with this code, or still runs.
    Exit(Option<i32>),
}

/// Why the platform did not do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// There is no such sandbox.
    #[error("there is no such sandbox")]
    NotFound,
    /// It may or may not be carried out, now or later (a timeout, 408, a broken connection).
    #[error("the platform did not answer")]
    NoAnswer,
    /// It certainly was not and will not be carried out.
    #[error("the platform refused")]
    Refused,
    /// It does not delete a paused sandbox.
    #[error("the platform deletes no paused sandbox")]
    RefusedPaused,
    /// It has seen a later generation (R-G8).
    #[error("a later generation has the sandbox")]
    StaleGeneration,
    /// It was not sent: the circuit breaker is open.
    #[error("the circuit breaker is open")]
    BreakerOpen,
}

/// What runs the sandboxes.
pub trait Platform: Send + Sync {
    /// Carries out one call within the deadline of its kind.
    ///
    /// # Errors
    /// See [`CallError`]: what is known to be done, and what is not.
    fn call(&self, call: Call) -> impl Future<Output = Result<Reply, CallError>> + Send;
}
