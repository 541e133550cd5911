//! The books: who may have a sandbox, who has one, and which are ending.
//!
//! [`Books::step`] is the meaning of the store's verbs. Each verb is one atomic step, whatever the
//! store: here a method call, in SQLite a transaction, in Redis a script. The conformance suite runs
//! the same histories of verbs against all three and expects the same answers.
//!
//! ```text
//!            Acquire ──▶ lease rules ──▶ admission rules ──▶ a record (= a slot)
//!   verbs ─▶ Heartbeat, Release ──▶ lease rules
//!            BeginRemoval … ConfirmGone ──▶ removal rules
//!            BeginRun … EndRun, Lock, Unlock ──▶ roots
//! ```
//!
//! Invariants:
//! - counted records of a bucket ≤ its quota, and of all buckets ≤ the global cap, at every step;
//! - a record goes only when its sandbox is confirmed gone, or was certainly never made;
//! - generations only grow, and no two grants share one;
//! - condemned is for good; no grant, renewal or run ever returns to a condemned record;
//! - reading renews nothing.
//!
//! Who may call: the governor's tasks, through a [`crate::Store`]. Time is the store's own; no
//! caller's clock is ever compared with it. No I/O here, and no memory beyond the state.

mod admission;
mod durable;
mod lease;
mod recovery;
mod removal;
mod run;
mod table;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, time::Duration};

pub use admission::{BucketPolicy, Limit, RunDefaults, Waiter};
pub use durable::{Changes, Kept};
pub use lease::{Line, Sealed, SealedHow};
pub use recovery::Stage;
pub use removal::{GoneEvidence, RemovalRefused};
use sandhold_types::{Generation, SandboxId, TemplateId, Timestamp};

use self::table::Table;

use crate::{
    colour::Seen,
    ids::{Bucket, LeaseId, OwnerId, ReplicaId, RunId, SlotId},
    record::{Counted, Ground, Managed, Record},
    rules::{Rule, Rules},
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

/// The state behind the verbs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Books {
    rules: Rules,
    global_cap: Option<u32>,
    buckets: Table<Bucket, BucketPolicy>,
    waiting: Vec<Waiter>,
    records: Table<SlotId, Record>,
    /// The counted ones of them, so that an admission need not look at all.
    places: Places,
    lines: Table<(Bucket, OwnerId), Line>,
    /// The newest generation ever granted; kept apart from the records, so that it outlives them.
    newest: Generation,
    stage: Stage,
    /// `newest` and `stage` as they were last written down, see [`Changes`].
    written: (Generation, Stage),
}

/// How many places are filled, by bucket. A bucket without any is not in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Places {
    by_bucket: BTreeMap<Bucket, usize>,
    total: usize,
}

impl Places {
    fn recount<'a>(records: impl Iterator<Item = &'a Record>) -> Self {
        let mut places = Self::default();
        for record in records.filter(|record| record.is_counted()) {
            places.fill(&record.bucket);
        }
        places
    }

    fn of(&self, bucket: &Bucket) -> usize {
        self.by_bucket.get(bucket).copied().unwrap_or(0)
    }

    fn fill(&mut self, bucket: &Bucket) {
        *self.by_bucket.entry(bucket.clone()).or_default() += 1;
        self.total += 1;
    }

    fn free(&mut self, bucket: &Bucket) {
        self.total = self.total.saturating_sub(1);
        if let Some(count) = self.by_bucket.get_mut(bucket) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.by_bucket.remove(bucket);
            }
        }
    }
}

impl Books {
    /// Empty books.
    #[must_use]
    pub fn new(rules: Rules, global_cap: Option<u32>) -> Self {
        Self::restore(rules, global_cap, Kept::default())
    }

    /// Carries out one verb at `now`, the store's own time.
    pub fn step(&mut self, verb: Verb, now: Timestamp) -> Step {
        let mut audit = Vec::new();
        let answer = self.dispatch(verb, now, &mut audit);
        Step { answer, audit }
    }

    fn dispatch(&mut self, verb: Verb, now: Timestamp, audit: &mut Vec<Audit>) -> Answer {
        match verb {
            Verb::Read => Answer::Books(Box::new(self.view(now))),
            Verb::SetBucket { bucket, policy } => {
                self.buckets.insert(bucket, policy);
                Answer::Done
            }
            Verb::Acquire {
                slot,
                bucket,
                owner,
                claim,
                maker,
            } => {
                let ask = lease::Ask {
                    slot,
                    bucket,
                    owner,
                    claim,
                    maker,
                };
                self.acquire(ask, now, audit)
            }
            Verb::LeaveQueue { slot } => self.leave_queue(&slot),
            Verb::ReturnSlot { slot, maker } => self.return_slot(&slot, &maker, now, audit),
            Verb::Bind {
                slot,
                generation,
                sandbox,
                ends_at,
            } => self.bind(&slot, generation, (sandbox, ends_at), now),
            Verb::Heartbeat {
                bucket,
                owner,
                lease,
                generation,
                ends_at,
            } => self.heartbeat(&(bucket, owner), &lease, generation, ends_at, now),
            Verb::Release {
                bucket,
                owner,
                lease,
            } => self.release(&(bucket, owner), &lease, now, audit),
            Verb::Discard { slot, generation } => self.discard(&slot, generation, now, audit),
            Verb::BeginRun {
                slot,
                generation,
                run,
                replica,
            } => self.begin_run(&slot, generation, run, replica, now),
            Verb::RunHeartbeat {
                slot,
                generation,
                run,
                replica,
            } => self.run_heartbeat(&slot, generation, &run, &replica, now),
            Verb::ClaimRun { slot, run, replica } => self.claim_run(&slot, &run, replica, now),
            Verb::CancelRun { slot, run } => self.cancel_run(&slot, &run),
            Verb::EndRun {
                slot,
                run,
                replica,
                keep,
            } => self.end_run(&slot, &run, &replica, keep, now, audit),
            Verb::Lock { slot, by } => self.lock(&slot, by, now),
            Verb::Unlock { slot, by } => self.unlock(&slot, &by),
            Verb::BeginRemoval {
                slot,
                generation,
                by,
                ground,
                seen,
            } => {
                let decision = removal::Decision {
                    generation,
                    by,
                    ground,
                    seen,
                };
                self.begin_removal(&slot, decision, now, audit)
            }
            Verb::BeginWake { slot } => self.begin_wake(&slot),
            Verb::ConfirmGone {
                slot,
                sandbox,
                evidence,
            } => self.confirm_gone(&slot, &sandbox, evidence, now, audit),
            Verb::RemovalFailed { slot, by, awake } => {
                self.removal_failed(&slot, &by, awake, now, audit)
            }
            Verb::ExpireMaking { slot } => self.expire_making(&slot, now, audit),
            Verb::AdoptStray {
                slot,
                sandbox,
                bucket,
                owner,
                ends_at,
            } => {
                let stray = removal::Stray {
                    slot,
                    sandbox,
                    bucket,
                    owner,
                    ends_at,
                };
                self.adopt_stray(stray, now, audit)
            }
            Verb::NoteSeen { slot, seen } => self.note_seen(&slot, seen, now),
            Verb::FinishRecovery {
                highest,
                settled_from,
            } => self.finish_recovery(highest, settled_from, now),
            #[cfg(feature = "mutations")]
            Verb::Unchecked(verb) => self.unchecked(*verb, now, audit),
        }
    }

    fn view(&self, now: Timestamp) -> View {
        View {
            now,
            stage: self.stage,
            records: self.records.values().cloned().collect(),
            buckets: self.buckets.entries().clone(),
            global_cap: self.global_cap,
        }
    }

    /// Every record, for checkers and conformance tests.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.records.values()
    }

    /// The owner's history of leases, for checkers and conformance tests.
    #[must_use]
    pub fn line(&self, bucket: &Bucket, owner: &OwnerId) -> Option<&Line> {
        self.lines.get(&(bucket.clone(), owner.clone()))
    }

    /// How many places of a bucket are filled.
    #[must_use]
    pub fn used(&self, bucket: &Bucket) -> usize {
        let used = self.places.of(bucket);
        debug_assert_eq!(
            used,
            self.records
                .values()
                .filter(|r| r.is_counted() && r.bucket == *bucket)
                .count(),
            "the count is the recount"
        );
        used
    }

    /// A new record, with its place if it is counted.
    fn add_record(&mut self, record: Record) {
        if record.is_counted() {
            self.places.fill(&record.bucket);
        }
        self.records.insert(record.slot.clone(), record);
    }

    /// The place of a record is free again; the record stays.
    fn write_off(&mut self, slot: &SlotId) -> Option<&mut Record> {
        let record = self.records.get_mut(slot)?;
        if record.is_counted() {
            self.places.free(&record.bucket);
            record.counted = Counted::No;
        }
        Some(record)
    }

    /// A record and its place go.
    fn drop_record(&mut self, slot: &SlotId) -> Option<Record> {
        let record = self.records.remove(slot)?;
        if record.is_counted() {
            self.places.free(&record.bucket);
        }
        Some(record)
    }

    /// Whether lost writes are still being settled.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Whoever waits, oldest first, for checkers and conformance tests.
    #[must_use]
    pub fn waiting(&self) -> &[Waiter] {
        &self.waiting
    }

    /// A generation that was never granted before. It is a counter that also never runs behind the
    /// store's clock: a store that lost its last writes, or was restored from a backup, has by then
    /// a clock past all it ever granted. [`Verb::FinishRecovery`] covers a clock that stepped back.
    fn mint(&mut self, now: Timestamp) -> Generation {
        let counted = self.newest.next();
        self.newest = if self.rules.keeps(Rule::FenceNeverRepeats) {
            counted.max(Generation(now.unix_ms()))
        } else {
            counted
        };
        self.newest
    }
}

/// The audit entry of something that happened to a record.
fn audit_of(record: &Record, at: Timestamp, what: Act) -> Audit {
    Audit {
        slot: record.slot.clone(),
        bucket: record.bucket.clone(),
        owner: record.owner.clone(),
        sandbox: record.sandbox.clone(),
        generation: record.generation,
        at,
        what,
    }
}

/// A record of a slot that was just taken.
fn new_record(ask: &lease::Ask, generation: Generation, now: Timestamp) -> Record {
    Record {
        slot: ask.slot.clone(),
        bucket: ask.bucket.clone(),
        owner: ask.owner.clone(),
        managed: match ask.claim {
            Claim::Lease { .. } => Managed::ByGovernor,
            Claim::Direct => Managed::Directly,
        },
        generation,
        making: Some(crate::record::Making {
            maker: ask.maker.clone(),
            since: now,
        }),
        sandbox: None,
        holding: None,
        run: None,
        lock: None,
        condemned: None,
        ends_at: Timestamp::FAR_FUTURE,
        paused_since: None,
        seen_at: None,
        counted: Counted::Yes,
    }
}
