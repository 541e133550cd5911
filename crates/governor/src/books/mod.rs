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
mod verb;

use std::collections::BTreeMap;

pub use admission::{BucketPolicy, Limit, RunDefaults, Waiter};
pub use durable::{Changes, Kept};
pub use lease::{Line, Sealed, SealedHow};
pub use recovery::Stage;
pub use removal::{GoneEvidence, RemovalRefused};
use sandhold_types::{Generation, Timestamp};
pub use verb::{Act, Answer, Audit, Claim, Grant, Keep, Step, Verb, View};

use self::table::Table;

use crate::{
    ids::{Bucket, OwnerId, SlotId},
    record::{Counted, Managed, Record},
    rules::{Rule, Rules},
};

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
