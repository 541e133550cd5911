//! Leases: grant, renew, take over, release, seal (R-G6, R-G7).
//!
//! ```text
//!   ask with a lease      same as current ───────▶ renewed
//!   of the owner          sealed ────────────────▶ STALE, for ever
//!                         new, owner has one ────▶ taken over: new generation, the old one sealed
//!                         new, owner has none ───▶ admission ─▶ a new sandbox
//!   release               same as current ───────▶ condemned, sealed
//!                         any other ─────────────▶ STALE; that lease is sealed, nothing else
//! ```
//!
//! Invariants: at most one current lease per owner; its generation is the highest ever granted on
//! its record; a sealed lease is never current again; a renewal never returns to a condemned record.

use std::time::Duration;

use sandhold_types::{Generation, SandboxId, Timestamp};

use super::{Act, Answer, Audit, Books, Claim, Grant, Stage, audit_of};
use crate::{
    ids::{Bucket, LeaseId, OwnerId, ReplicaId, SlotId},
    record::{Condemned, Ground, Holding, Record},
    rules::{Rule, Rules},
};

/// A request for a sandbox.
#[derive(Debug, Clone)]
pub(super) struct Ask {
    pub(super) slot: SlotId,
    pub(super) bucket: Bucket,
    pub(super) owner: OwnerId,
    pub(super) claim: Claim,
    pub(super) maker: ReplicaId,
}

/// How a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SealedHow {
    /// Its holder released it.
    Released,
    /// Another lease took over.
    Superseded,
    /// It named no generation that was current.
    Mismatch,
    /// Its sandbox was condemned, or died.
    SandboxEnded,
}

/// A generation that can never act again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sealed {
    /// Which lease.
    pub lease: LeaseId,
    /// How it ended.
    pub how: SealedHow,
}

/// An owner's history of leases.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Line {
    /// The record of the lease in force.
    pub current: Option<SlotId>,
    /// Ended generations, oldest first, at most `sealed_max`.
    pub sealed: Vec<Sealed>,
}

impl Line {
    fn sealed_how(&self, lease: &LeaseId) -> Option<SealedHow> {
        self.sealed
            .iter()
            .find(|s| s.lease == *lease)
            .map(|s| s.how)
    }

    /// Past the bound the oldest is forgotten. Its *generation* stays dead all the same: a lease of
    /// the same name would get a new one.
    fn seal(&mut self, lease: LeaseId, how: SealedHow, sealed_max: usize) {
        if self.sealed_how(&lease).is_some() {
            return;
        }
        if self.sealed.len() >= sealed_max {
            self.sealed.remove(0);
        }
        self.sealed.push(Sealed { lease, how });
    }
}

impl Holding {
    pub(super) fn begun_by(ask: &Ask, rules: &Rules, now: Timestamp) -> Option<Self> {
        let Claim::Lease {
            lease,
            template,
            ttl,
        } = &ask.claim
        else {
            return None;
        };
        let ttl = ttl.unwrap_or(Duration::ZERO).max(rules.black());
        let (lease, template) = (lease.clone(), template.clone());
        Some(Self {
            lease,
            template,
            ttl,
            heartbeat_at: now,
        })
    }
}

fn grant_of(record: &Record, sandbox: &SandboxId, holding: &Holding) -> Grant {
    Grant {
        slot: record.slot.clone(),
        sandbox: sandbox.clone(),
        generation: record.generation,
        expires_at: holding.heartbeat_at.plus(holding.ttl),
        ends_at: record.ends_at,
    }
}

/// The same request once more, because its answer was lost.
fn is_same_request(record: &Record, ask: &Ask) -> bool {
    let same_lease = match &ask.claim {
        Claim::Lease { lease, .. } => record.holding.as_ref().is_some_and(|h| h.lease == *lease),
        Claim::Direct => record.managed == crate::record::Managed::Directly,
    };
    record.sandbox.is_none()
        && record.condemned.is_none()
        && record.bucket == ask.bucket
        && record.owner == ask.owner
        && record.making.as_ref().is_some_and(|m| m.maker == ask.maker)
        && same_lease
}

impl Books {
    pub(super) fn acquire(&mut self, ask: Ask, now: Timestamp, audit: &mut Vec<Audit>) -> Answer {
        if let Some(record) = self.records.get(&ask.slot) {
            if is_same_request(record, &ask) {
                let (slot, generation) = (ask.slot.clone(), record.generation);
                return Answer::MakeSandbox { slot, generation };
            }
            // Made and bound already, or a name that is in use: only a lease can answer for it.
            if matches!(ask.claim, Claim::Direct) {
                return Answer::Busy;
            }
        }
        let Claim::Lease { lease, .. } = &ask.claim else {
            return self.admit(&ask, now, audit);
        };
        let key = (ask.bucket.clone(), ask.owner.clone());
        let Some(line) = self.lines.get(&key) else {
            return self.admit(&ask, now, audit);
        };
        if line.sealed_how(lease).is_some() && self.rules.keeps(Rule::SealedStaysSealed) {
            return self.stale(&key);
        }
        match line.current.clone() {
            None => self.admit(&ask, now, audit),
            Some(slot) => self.acquire_current(&slot, ask, now, audit),
        }
    }

    /// The owner has a lease: renew it, take it over, or replace its sandbox.
    fn acquire_current(
        &mut self,
        slot: &SlotId,
        ask: Ask,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let Some(asked) = Holding::begun_by(&ask, &self.rules, now) else {
            return Answer::Unknown;
        };
        let Some(record) = self.records.get(slot) else {
            return Answer::Unknown;
        };
        let Some(holding) = record.holding.clone() else {
            return Answer::Unknown;
        };
        if record.condemned.is_some() {
            return Answer::BeingMade;
        }
        if holding.lease == asked.lease && record.sandbox.is_some() {
            let key = (ask.bucket, ask.owner);
            let generation = record.generation;
            return self.heartbeat(&key, &asked.lease, generation, None, now);
        }
        if record.sandbox.is_none() {
            return self.acquire_while_made(slot, ask, now, audit);
        }
        if matches!(self.stage, Stage::Settling { .. }) && self.rules.keeps(Rule::RecoverySettles) {
            return Answer::Recovering;
        }
        if holding.template != asked.template {
            self.condemn(slot, None, Ground::Replaced, now, audit);
            return self.admit(&ask, now, audit);
        }
        self.take_over(slot, asked, now, audit)
    }

    /// The owner's sandbox is being made for another request. If that was given up, this one makes
    /// its own; the slot of the other stays taken until it is settled.
    fn acquire_while_made(
        &mut self,
        slot: &SlotId,
        ask: Ask,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let since = self
            .records
            .get(slot)
            .and_then(|r| r.making.as_ref())
            .map(|m| m.since);
        if since.is_some_and(|since| now.since(since) < self.rules.grey()) {
            return Answer::BeingMade;
        }
        // The lease that was never answered goes on under the new slot, so it is not sealed.
        self.detach_holding(slot, None, now, audit);
        self.admit(&ask, now, audit)
    }

    fn take_over(
        &mut self,
        slot: &SlotId,
        asked: Holding,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        self.detach_holding(slot, Some(SealedHow::Superseded), now, audit);
        let generation = self.mint(now);
        let Some(record) = self.records.get_mut(slot) else {
            return Answer::Unknown;
        };
        record.generation = generation;
        // A run of the generation before has lost its ground; its replica stops at its next beat.
        record.run = None;
        let lease = asked.lease.clone();
        audit.push(audit_of(record, now, Act::Granted { lease }));
        record.holding = Some(asked.clone());
        let Some(sandbox) = record.sandbox.clone() else {
            return Answer::Unknown;
        };
        let grant = grant_of(record, &sandbox, &asked);
        let key = (record.bucket.clone(), record.owner.clone());
        self.lines.get_or_default(key).current = Some(slot.clone());
        Answer::Granted(grant)
    }

    pub(super) fn bind(
        &mut self,
        slot: &SlotId,
        generation: Generation,
        (sandbox, ends_at): (SandboxId, Timestamp),
        now: Timestamp,
    ) -> Answer {
        let Some(record) = self.records.get_mut(slot) else {
            return Answer::Unknown;
        };
        if record
            .sandbox
            .as_ref()
            .is_some_and(|bound| *bound != sandbox)
        {
            return Answer::Unknown;
        }
        let condemned_from = record.condemned.as_ref().map(|c| c.generation);
        let by_its_maker = record.generation == generation || condemned_from == Some(generation);
        if record.sandbox.is_none() && !by_its_maker {
            // The slot is another one of the same name: the sandbox is nobody's.
            return Answer::Unknown;
        }
        let directly = record.managed == crate::record::Managed::Directly;
        if record.sandbox.is_none() {
            record.sandbox = Some(sandbox.clone());
            record.ends_at = ends_at;
            if directly && let Ok(owner) = record.bucket.owner_of_direct(sandbox.as_str()) {
                // Only now it has the name that tells whose it is (R-G19).
                record.owner = owner;
            }
        } else if directly {
            // Its own lifetime is its root, and its owner may move it (R-G19).
            record.ends_at = ends_at;
        }
        record.making = None;
        record.seen_at = Some(now);
        if record.condemned.is_some() {
            return Answer::Refused(super::RemovalRefused::Condemned);
        }
        if record.generation != generation {
            // Said again, after another lease took it over: the grant is not the maker's any more.
            return Answer::Stale {
                current: Some(record.generation),
            };
        }
        match &mut record.holding {
            Some(holding) => {
                holding.heartbeat_at = now;
                let holding = holding.clone();
                Answer::Granted(grant_of(record, &sandbox, &holding))
            }
            None if directly => Answer::Done,
            None => Answer::Unknown,
        }
    }

    /// Expiry says who may try, the generation who wins: a lease that expired but was not condemned
    /// is renewed. Not so while lost writes are settled: its condemnation may be among them.
    pub(super) fn heartbeat(
        &mut self,
        key: &(Bucket, OwnerId),
        lease: &LeaseId,
        generation: Generation,
        ends_at: Option<Timestamp>,
        now: Timestamp,
    ) -> Answer {
        let settling =
            matches!(self.stage, Stage::Settling { .. }) && self.rules.keeps(Rule::RecoverySettles);
        let Some(slot) = self.lines.get(key).and_then(|line| line.current.clone()) else {
            return self.stale(key);
        };
        let Some(record) = self.records.get_mut(&slot) else {
            return Answer::Unknown;
        };
        let matches = record.generation == generation
            && record.holding.as_ref().is_some_and(|h| h.lease == *lease);
        if !matches || record.condemned.is_some() {
            return self.stale(key);
        }
        let (Some(holding), Some(sandbox)) = (&mut record.holding, &record.sandbox) else {
            return Answer::BeingMade;
        };
        if settling && now.since(holding.heartbeat_at) >= holding.ttl {
            return Answer::Recovering;
        }
        holding.heartbeat_at = now;
        if let Some(ends_at) = ends_at {
            // Never shortens a life (R-L11).
            record.ends_at = record.ends_at.max(ends_at);
        }
        let (sandbox, holding) = (sandbox.clone(), holding.clone());
        Answer::Granted(grant_of(record, &sandbox, &holding))
    }

    /// R-G7: only an exact match with the current generation releases; it never falls back.
    pub(super) fn release(
        &mut self,
        key: &(Bucket, OwnerId),
        lease: &LeaseId,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let sealed_max = self.rules.settings().sealed_max;
        let Some(line) = self.lines.get_mut(key) else {
            return Answer::Unknown;
        };
        if line.sealed_how(lease) == Some(SealedHow::Released) {
            // The same request again: its answer was lost.
            return Answer::Released { slot: None };
        }
        let current = line
            .current
            .clone()
            .and_then(|slot| self.records.get(&slot));
        let matching = current.filter(|record| {
            !self.rules.keeps(Rule::ReleaseMatches)
                || record.holding.as_ref().is_some_and(|h| h.lease == *lease)
        });
        let Some(slot) = matching.map(|record| record.slot.clone()) else {
            line.seal(lease.clone(), SealedHow::Mismatch, sealed_max);
            return self.stale(key);
        };
        self.condemn(&slot, None, Ground::Released, now, audit);
        Answer::Released { slot: Some(slot) }
    }

    /// R-G9: what fails the health gate is never used.
    pub(super) fn discard(
        &mut self,
        slot: &SlotId,
        generation: Generation,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let Some(record) = self.records.get(slot) else {
            return Answer::Unknown;
        };
        if record.condemned.is_some() {
            return Answer::Done;
        }
        if record.generation != generation {
            return Answer::Stale {
                current: Some(record.generation),
            };
        }
        self.condemn(slot, None, Ground::NeverUsed, now, audit);
        Answer::Done
    }

    fn stale(&self, key: &(Bucket, OwnerId)) -> Answer {
        let slot = self.lines.get(key).and_then(|line| line.current.as_ref());
        let current = slot
            .and_then(|slot| self.records.get(slot))
            .map(|r| r.generation);
        Answer::Stale { current }
    }

    /// Ends the lease in force on a record. `how` seals it.
    pub(super) fn detach_holding(
        &mut self,
        slot: &SlotId,
        how: Option<SealedHow>,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) {
        let Some(record) = self.records.get_mut(slot) else {
            return;
        };
        let Some(holding) = record.holding.take() else {
            return;
        };
        let key = (record.bucket.clone(), record.owner.clone());
        let line = self.lines.get_or_default(key);
        if line.current.as_ref() == Some(slot) {
            line.current = None;
        }
        if let Some(how) = how {
            let lease = holding.lease.clone();
            audit.push(audit_of(record, now, Act::SealedLease { lease, how }));
            line.seal(holding.lease, how, self.rules.settings().sealed_max);
        }
    }

    /// Decides the end of a sandbox, for good. Its lease is sealed in the same step.
    pub(super) fn condemn(
        &mut self,
        slot: &SlotId,
        by: Option<ReplicaId>,
        ground: Ground,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) {
        let how = match ground {
            Ground::Released => Some(SealedHow::Released),
            Ground::Replaced => Some(SealedHow::Superseded),
            // Its holder did nothing wrong and asks again by the same name.
            Ground::NeverUsed => None,
            Ground::White | Ground::Retention | Ground::Overdue => Some(SealedHow::SandboxEnded),
        };
        // The delete gets a generation of its own: its node then refuses whoever held it before, and
        // a delete that the store forgot is itself refused by whoever comes after.
        let newest = self.mint(now);
        let Some(record) = self.records.get_mut(slot) else {
            return;
        };
        let generation = record.generation;
        audit.push(audit_of(record, now, Act::Condemned { by, ground }));
        record.generation = newest;
        record.condemned = Some(Condemned {
            at: now,
            ground,
            generation,
            failures: 0,
            awake: false,
        });
        record.run = None;
        if self.rules.keeps(Rule::CondemnedForGood) {
            self.detach_holding(slot, how, now, audit);
        }
        if !self.rules.keeps(Rule::SlotUntilGone)
            && let Some(record) = self.write_off(slot)
        {
            let evidence = super::GoneEvidence::Killed;
            audit.push(audit_of(record, now, Act::SlotFreed { evidence }));
        }
    }
}
