//! Admission: quota, global gate, first come first served (R-G4, R-G5).
//!
//! ```text
//!   asks ─▶ queue (one order for all buckets) ─▶ room in its bucket and under the cap? ─▶ slot
//!             │ not heard for 5 s: loses its place to whoever asks next
//!             └ waited 30 s: CAPACITY_EXCEEDED
//! ```
//!
//! A waiting request asks again every second; nothing is pushed to it, so a request whose replica
//! died holds nobody up for longer than the silence. Buckets that are full do not stand in the way
//! of others; under the global cap the oldest request that its own bucket would admit comes first.

use std::time::Duration;

use sandhold_types::{TemplateId, Timestamp};

use super::{Act, Answer, Audit, Books, Stage, audit_of, lease::Ask, new_record};
use crate::{
    colour::Retention,
    ids::{Bucket, ReplicaId, SlotId},
    record::Holding,
    rules::Rule,
};

/// What a bucket may have, what it keeps, and what its runs get.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BucketPolicy {
    /// How many sandboxes it may have at once.
    pub quota: u32,
    /// For how long leased but paused ones are kept (R-G13).
    pub retention: Retention,
    /// What its runs and leases get that do not say.
    pub runs: RunDefaults,
}

impl BucketPolicy {
    /// One whose runs get what the deployment gives.
    #[must_use]
    pub fn new(quota: u32, retention: Retention) -> Self {
        Self {
            quota,
            retention,
            runs: RunDefaults::default(),
        }
    }
}

/// What the runs and leases of a bucket get that do not say, and how long its runs may be (R-G13). No
/// step on the books depends on it; they keep it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct RunDefaults {
    /// What `main` means; nothing is what it means to the deployment.
    pub main: Option<TemplateId>,
    /// What `light` means; nothing is what it means to the deployment.
    pub light: Option<TemplateId>,
    /// The time of a run that asks for none; nothing: each must ask.
    pub timeout: Option<Duration>,
    /// The longest time that a run may ask for; nothing: as long as the deployment allows.
    pub timeout_max: Option<Duration>,
}

/// Which limit is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limit {
    /// The bucket's own.
    Bucket,
    /// That of all buckets together.
    Global,
}

/// A request in the queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Waiter {
    /// The slot it would take.
    pub slot: SlotId,
    /// Its bucket.
    pub bucket: Bucket,
    /// Since when it waits, by the store's clock.
    pub since: Timestamp,
    /// When it last asked.
    pub heard_at: Timestamp,
}

impl Books {
    /// Takes a slot for `ask`, or its place in the queue: one step.
    pub(super) fn admit(&mut self, ask: &Ask, now: Timestamp, audit: &mut Vec<Audit>) -> Answer {
        let Some(quota) = self.buckets.get(&ask.bucket).map(|policy| policy.quota) else {
            return Answer::UnknownBucket;
        };
        if matches!(self.stage, Stage::Settling { .. }) && self.rules.keeps(Rule::RecoverySettles) {
            return Answer::Recovering;
        }
        if self.records.contains_key(&ask.slot) {
            return Answer::Busy;
        }
        let elsewhere = |w: &Waiter| w.slot == ask.slot && w.bucket != ask.bucket;
        if self.waiting.iter().any(elsewhere) {
            // The name of a slot is in one bucket's line only.
            return Answer::Busy;
        }
        let place = self.place_in_queue(ask, now);
        if self.may_take(place, quota) {
            self.waiting.remove(place);
            return self.take(ask, now, audit);
        }
        if now.since(self.waiting[place].since) >= self.rules.settings().wait_max {
            self.waiting.remove(place);
            return Answer::CapacityExceeded(self.limit_reached(&ask.bucket, quota));
        }
        let ahead = self.waiting[..place]
            .iter()
            .filter(|w| w.bucket == ask.bucket)
            .count();
        Answer::Waiting { ahead }
    }

    /// Drops whoever has not been heard, and finds or makes the place of `ask`.
    fn place_in_queue(&mut self, ask: &Ask, now: Timestamp) -> usize {
        let silence = self.rules.settings().wait_silence_max;
        self.waiting
            .retain(|w| w.slot == ask.slot || now.since(w.heard_at) < silence);
        let found = self.waiting.iter().position(|w| w.slot == ask.slot);
        let place = found.unwrap_or_else(|| {
            self.waiting.push(Waiter {
                slot: ask.slot.clone(),
                bucket: ask.bucket.clone(),
                since: now,
                heard_at: now,
            });
            self.waiting.len() - 1
        });
        self.waiting[place].heard_at = now;
        place
    }

    /// Room in the bucket for everybody before it and for it, and the same under the cap.
    fn may_take(&self, place: usize, quota: u32) -> bool {
        let waiter = &self.waiting[place];
        let (before, in_line) = if self.rules.keeps(Rule::FirstCome) {
            let before = &self.waiting[..place];
            (
                before,
                before.iter().filter(|w| w.bucket == waiter.bucket).count(),
            )
        } else {
            (&self.waiting[..0], 0)
        };
        if self.free_in(&waiter.bucket, quota) <= in_line {
            return false;
        }
        let Some(cap) = self.global_cap else {
            return true;
        };
        let free = (cap as usize).saturating_sub(self.used_by_all());
        free > self.admissible_among(before)
    }

    /// How many of these waiters their own buckets would admit now.
    fn admissible_among(&self, before: &[Waiter]) -> usize {
        let mut taken = std::collections::BTreeMap::<&Bucket, usize>::new();
        let mut admissible = 0;
        for waiter in before {
            let Some(policy) = self.buckets.get(&waiter.bucket) else {
                continue;
            };
            let in_line = taken.entry(&waiter.bucket).or_default();
            if self.free_in(&waiter.bucket, policy.quota) > *in_line {
                *in_line += 1;
                admissible += 1;
            }
        }
        admissible
    }

    fn free_in(&self, bucket: &Bucket, quota: u32) -> usize {
        (quota as usize).saturating_sub(self.used(bucket))
    }

    fn used_by_all(&self) -> usize {
        self.places.total
    }

    /// Whether one more sandbox fits.
    pub(super) fn has_room(&self, bucket: &Bucket) -> bool {
        let in_bucket = self
            .buckets
            .get(bucket)
            .is_some_and(|p| self.free_in(bucket, p.quota) > 0);
        in_bucket
            && self
                .global_cap
                .is_none_or(|cap| self.used_by_all() < cap as usize)
    }

    fn limit_reached(&self, bucket: &Bucket, quota: u32) -> Limit {
        if self.free_in(bucket, quota) == 0 {
            Limit::Bucket
        } else {
            Limit::Global
        }
    }

    pub(super) fn take(&mut self, ask: &Ask, now: Timestamp, audit: &mut Vec<Audit>) -> Answer {
        let generation = self.mint(now);
        let mut record = new_record(ask, generation, now);
        audit.push(audit_of(&record, now, Act::SlotTaken));
        if let Some(holding) = Holding::begun_by(ask, &self.rules, now) {
            let lease = holding.lease.clone();
            audit.push(audit_of(&record, now, Act::Granted { lease }));
            record.holding = Some(holding);
            let line = self
                .lines
                .get_or_default((ask.bucket.clone(), ask.owner.clone()));
            line.current = Some(ask.slot.clone());
        }
        self.add_record(record);
        Answer::MakeSandbox {
            slot: ask.slot.clone(),
            generation,
        }
    }

    pub(super) fn leave_queue(&mut self, slot: &SlotId) -> Answer {
        self.waiting.retain(|w| w.slot != *slot);
        Answer::Done
    }

    /// The create failed and certainly made nothing: the slot goes back at once (R-G5).
    pub(super) fn return_slot(
        &mut self,
        slot: &SlotId,
        maker: &ReplicaId,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let mine = self.records.get(slot).is_some_and(|r| {
            r.sandbox.is_none() && r.making.as_ref().is_some_and(|m| m.maker == *maker)
        });
        if !mine {
            return Answer::Unknown;
        }
        self.remove_record(slot, super::GoneEvidence::NeverMade, now, audit);
        Answer::Done
    }
}
