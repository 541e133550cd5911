//! What the books are asked, and what they answer.
//!
//! Values only: what each verb does is [`super::Books::step`].

use std::{collections::BTreeMap, time::Duration};

use sandhold_types::{Generation, SandboxId, TemplateId, Timestamp};

use super::{BucketPolicy, GoneEvidence, Limit, RemovalRefused, SealedHow, Stage};
use crate::{
    colour::Seen,
    ids::{Bucket, LeaseId, OwnerId, ReplicaId, RunId, SlotId},
    record::{Ground, Record},
};

/// What a slot is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Claim {
    /// For a lease of its owner (R-G6).
    Lease {
        /// The caller's name for this generation, or one made for it.
        lease: LeaseId,
        /// What the sandbox must be made from.
        template: TemplateId,
        /// How long a heartbeat keeps it black; never less than the rule's 120 s.
        ttl: Option<Duration>,
    },
    /// For a sandbox made directly with an SDK (R-G19).
    Direct,
}

/// One atomic step on the books.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Reads everything; renews nothing.
    Read,
    /// Sets what a bucket may have and keeps (R-G4, R-G13).
    SetBucket {
        /// Which.
        bucket: Bucket,
        /// What.
        policy: BucketPolicy,
    },
    /// Renews, takes over, or takes a slot for a new sandbox: whichever the owner's state says, in
    /// one step. Asking again with the same slot and lease is the same request (R-G4, R-G6).
    Acquire {
        /// The name of the slot, should one be needed.
        slot: SlotId,
        /// Where it counts.
        bucket: Bucket,
        /// For whom.
        owner: OwnerId,
        /// For what.
        claim: Claim,
        /// Who would make the sandbox.
        maker: ReplicaId,
    },
    /// Gives up waiting.
    LeaveQueue {
        /// The slot that was asked for.
        slot: SlotId,
    },
    /// The create certainly failed: nothing was made (R-G5).
    ReturnSlot {
        /// Which.
        slot: SlotId,
        /// Who failed to make it.
        maker: ReplicaId,
    },
    /// The sandbox of a slot is made.
    Bind {
        /// Which slot.
        slot: SlotId,
        /// The generation it was made for; another may have taken it over since.
        generation: Generation,
        /// The sandbox.
        sandbox: SandboxId,
        /// When its life ends.
        ends_at: Timestamp,
    },
    /// The holder is alive (R-G3, R-G6).
    Heartbeat {
        /// Where it counts.
        bucket: Bucket,
        /// Whose.
        owner: OwnerId,
        /// Under which lease.
        lease: LeaseId,
        /// Of which generation.
        generation: Generation,
        /// The end of its life on the platform, if that was moved.
        ends_at: Option<Timestamp>,
    },
    /// The holder is done (R-G7).
    Release {
        /// Where it counts.
        bucket: Bucket,
        /// Whose.
        owner: OwnerId,
        /// Under which lease.
        lease: LeaseId,
    },
    /// The sandbox is not fit for use (R-G9): it is condemned, and its lease may ask for another.
    Discard {
        /// In which slot.
        slot: SlotId,
        /// The generation that found it unfit.
        generation: Generation,
    },
    /// A run begins in the sandbox (R-G3).
    BeginRun {
        /// In which slot.
        slot: SlotId,
        /// Under which generation.
        generation: Generation,
        /// Which run.
        run: RunId,
        /// Who executes it.
        replica: ReplicaId,
    },
    /// The run's replica is alive; the holder's lease is renewed with it.
    RunHeartbeat {
        /// In which slot.
        slot: SlotId,
        /// Under which generation.
        generation: Generation,
        /// Which run.
        run: RunId,
        /// Who executes it.
        replica: ReplicaId,
    },
    /// Takes a run over from a replica that has not been heard.
    ClaimRun {
        /// In which slot.
        slot: SlotId,
        /// Which run.
        run: RunId,
        /// Who takes it.
        replica: ReplicaId,
    },
    /// Asks for the end of a run.
    CancelRun {
        /// In which slot.
        slot: SlotId,
        /// Which run.
        run: RunId,
    },
    /// The run is over and what it started is gone.
    EndRun {
        /// In which slot.
        slot: SlotId,
        /// Which run.
        run: RunId,
        /// Who executed it.
        replica: ReplicaId,
        /// What stays.
        keep: Keep,
    },
    /// Something is being done that must not be cut short.
    Lock {
        /// In which slot.
        slot: SlotId,
        /// By whom.
        by: ReplicaId,
    },
    /// It is done.
    Unlock {
        /// In which slot.
        slot: SlotId,
        /// By whom.
        by: ReplicaId,
    },
    /// Condemns a sandbox, or goes on removing a condemned one (R-G10).
    BeginRemoval {
        /// Which.
        slot: SlotId,
        /// The generation that the decision is about.
        generation: Generation,
        /// Who removes it.
        by: ReplicaId,
        /// Why.
        ground: Ground,
        /// What the platform said of it just now.
        seen: Seen,
    },
    /// Asks to wake a condemned sandbox, because its platform deletes no paused one (R-G16).
    BeginWake {
        /// Which.
        slot: SlotId,
    },
    /// The sandbox is gone: the record goes, and the slot with it.
    ConfirmGone {
        /// Which.
        slot: SlotId,
        /// The sandbox that is gone.
        sandbox: SandboxId,
        /// How that is known.
        evidence: GoneEvidence,
    },
    /// The removal did not succeed this time.
    RemovalFailed {
        /// Which.
        slot: SlotId,
        /// Who tried.
        by: ReplicaId,
        /// Whether it was left awake.
        awake: bool,
    },
    /// A slot whose create nobody answers for any more, and that has no sandbox by its name.
    ExpireMaking {
        /// Which.
        slot: SlotId,
    },
    /// A sandbox of ours that has no record.
    AdoptStray {
        /// The slot its metadata names.
        slot: SlotId,
        /// The sandbox.
        sandbox: SandboxId,
        /// Where it counts, by its metadata.
        bucket: Bucket,
        /// Whose it was, by its metadata.
        owner: OwnerId,
        /// When its life ends.
        ends_at: Timestamp,
    },
    /// What the platform said of a sandbox. Evidence only: it renews nothing.
    NoteSeen {
        /// Which slot.
        slot: SlotId,
        /// What was seen.
        seen: Seen,
    },
    /// Everything is settled after lost writes; no generation below `highest` may come again.
    FinishRecovery {
        /// The highest generation that any node has seen.
        highest: Generation,
        /// When the settling began, by the store's clock.
        settled_from: Timestamp,
    },
    /// Only in simulations of what would happen otherwise: the second half of a two-step verb.
    #[cfg(feature = "mutations")]
    Unchecked(Box<Verb>),
}

/// What a run leaves behind (R-G3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// The sandbox, for its lease.
    Sandbox,
    /// Nothing.
    Nothing,
}

/// What a step answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It is so.
    Done,
    /// Everything, and the store's time.
    Books(Box<View>),
    /// The owner's sandbox; the lease is granted or renewed.
    Granted(Grant),
    /// A slot is taken; make the sandbox.
    MakeSandbox {
        /// Which slot.
        slot: SlotId,
        /// The generation of the lease.
        generation: Generation,
    },
    /// No room yet; ask again.
    Waiting {
        /// How many are before it in its bucket.
        ahead: usize,
    },
    /// The owner's sandbox is being made for another request; ask again.
    BeingMade,
    /// No room within the time to wait: `CAPACITY_EXCEEDED`, retryable (R-G4).
    CapacityExceeded(Limit),
    /// The bucket was never set.
    UnknownBucket,
    /// The store lost writes and is being settled; ask again later.
    Recovering,
    /// The generation is not the current one and never will be (R-G7).
    Stale {
        /// The current generation, if the owner has one.
        current: Option<Generation>,
    },
    /// There is no such lease, run or record (any more).
    Unknown,
    /// Released; the sandbox is condemned.
    Released {
        /// Which slot, unless it is gone already.
        slot: Option<SlotId>,
    },
    /// The run may go on.
    RunGoesOn {
        /// Somebody asked for its end.
        cancelled: bool,
    },
    /// Another holds the lock, runs the run, or has a slot of that name.
    Busy,
    /// Remove this sandbox now.
    Remove {
        /// The generation that is condemned; the delete names it.
        generation: Generation,
    },
    /// It must not be removed.
    Refused(RemovalRefused),
    /// Wake it.
    Wake,
    /// Too many are awake already (R-I7).
    NoWakeBudget,
}

/// A granted lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Its slot.
    pub slot: SlotId,
    /// Its sandbox.
    pub sandbox: SandboxId,
    /// The fencing token (R-G6).
    pub generation: Generation,
    /// When it turns grey unless renewed, by the store's clock.
    pub expires_at: Timestamp,
    /// When the life of its sandbox ends.
    pub ends_at: Timestamp,
}

/// Everything, as read in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// The store's clock.
    pub now: Timestamp,
    /// Whether it is being settled.
    pub stage: Stage,
    /// Every record.
    pub records: Vec<Record>,
    /// Every bucket.
    pub buckets: BTreeMap<Bucket, BucketPolicy>,
    /// The global cap, if the gate is on.
    pub global_cap: Option<u32>,
}

/// An entry of the audit trail (R-G17), written in the same step as what it tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    /// Of which slot.
    pub slot: SlotId,
    /// Where it counted.
    pub bucket: Bucket,
    /// Whose it was.
    pub owner: OwnerId,
    /// Of which sandbox, if it was bound.
    pub sandbox: Option<SandboxId>,
    /// Of which generation.
    pub generation: Generation,
    /// When, by the store's clock.
    pub at: Timestamp,
    /// What.
    pub what: Act,
}

/// What the audit trail tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// A slot was taken.
    SlotTaken,
    /// A generation began.
    Granted {
        /// Under which lease.
        lease: LeaseId,
    },
    /// A generation ended.
    SealedLease {
        /// Which lease.
        lease: LeaseId,
        /// How.
        how: SealedHow,
    },
    /// Its end was decided.
    Condemned {
        /// By whom; `None` is its owner.
        by: Option<ReplicaId>,
        /// Why.
        ground: Ground,
    },
    /// It is gone; the slot is free.
    SlotFreed {
        /// How that is known.
        evidence: GoneEvidence,
    },
    /// It could not be deleted for too long; its account is released (R-G12).
    WrittenOff,
    /// It was found without a record.
    Adopted,
}

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// For the caller.
    pub answer: Answer,
    /// For the audit trail.
    pub audit: Vec<Audit>,
}
