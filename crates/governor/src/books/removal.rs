//! Removal: condemn, delete, confirm (R-G5, R-G10, R-G12, R-G16).
//!
//! ```text
//!   BeginRemoval ──▶ generation unchanged? roots dead? policy? ──▶ condemned, locked  (one step)
//!        │                                                            │ platform deletes
//!        │ condemned already: only the lock                           ├─ gone ─▶ ConfirmGone: record and slot go
//!        └──▶ refused, with the reason                                └─ not ──▶ RemovalFailed: tried again;
//!                                                                         overdue: account released
//! ```
//!
//! Invariants: the check and the condemnation are one step; nothing is deleted that was not
//! condemned first; a slot is freed only here and in `return_slot`.

use sandhold_types::{Generation, SandboxId, Timestamp};

use super::{Act, Answer, Audit, Books, SealedHow, Stage, audit_of};
use crate::{
    colour::{self, Seen},
    ids::{Bucket, OwnerId, ReplicaId, SlotId},
    record::{Counted, Ground, Managed, OperationLock, Record},
    rules::Rule,
};

/// How it is known that a sandbox is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GoneEvidence {
    /// The platform said that it deleted it.
    Killed,
    /// The platform, asked for it by name, said that there is none.
    NotFound,
    /// The create certainly made nothing.
    NeverMade,
}

/// Why a sandbox must not be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RemovalRefused {
    /// Something holds it.
    Held(colour::Colour),
    /// It is another generation than the one that was decided on.
    GenerationChanged,
    /// Another ground, or none, applies by now.
    NoGround,
    /// Somebody else is removing it.
    Locked,
    /// Its end is decided; it cannot be used any more.
    Condemned,
    /// Lost writes are being settled; nothing is condemned meanwhile.
    Recovering,
}

/// A decision to remove.
#[derive(Debug, Clone)]
pub(super) struct Decision {
    pub(super) generation: Generation,
    pub(super) by: ReplicaId,
    pub(super) ground: Ground,
    pub(super) seen: Seen,
}

/// A sandbox without a record.
#[derive(Debug, Clone)]
pub(super) struct Stray {
    pub(super) slot: SlotId,
    pub(super) sandbox: SandboxId,
    pub(super) bucket: Bucket,
    pub(super) owner: OwnerId,
    pub(super) ends_at: Timestamp,
}

impl Books {
    pub(super) fn begin_removal(
        &mut self,
        slot: &SlotId,
        decision: Decision,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let black = self.rules.black();
        let Some(record) = self.records.get(slot) else {
            return Answer::Unknown;
        };
        if record.condemned.is_none() {
            if let Err(refused) = self.may_condemn(record, &decision, now) {
                return Answer::Refused(refused);
            }
            self.condemn(slot, Some(decision.by.clone()), decision.ground, now, audit);
        }
        let Some(record) = self.records.get_mut(slot) else {
            return Answer::Unknown;
        };
        let locked_by_other = record
            .lock
            .as_ref()
            .is_some_and(|lock| lock.by != decision.by && now.since(lock.taken_at) < black);
        if locked_by_other {
            return Answer::Refused(RemovalRefused::Locked);
        }
        record.lock = Some(OperationLock {
            by: decision.by,
            taken_at: now,
        });
        Answer::Remove {
            generation: record.generation,
        }
    }

    /// The last look, in the same step as the condemnation.
    fn may_condemn(
        &self,
        record: &Record,
        decision: &Decision,
        now: Timestamp,
    ) -> Result<(), RemovalRefused> {
        if matches!(self.stage, Stage::Settling { .. }) && self.rules.keeps(Rule::RecoverySettles) {
            return Err(RemovalRefused::Recovering);
        }
        let changed = record.generation != decision.generation;
        if changed && self.rules.keeps(Rule::GenerationUnchanged) {
            return Err(RemovalRefused::GenerationChanged);
        }
        if !self.rules.keeps(Rule::RootsAgain) {
            return Ok(());
        }
        let retention = self.buckets.get(&record.bucket).map(|p| p.retention);
        let verdict = colour::verdict(
            record,
            decision.seen,
            retention.unwrap_or_default(),
            &self.rules,
            now,
        );
        match verdict.ground {
            Some(ground) if ground == decision.ground => Ok(()),
            Some(_) => Err(RemovalRefused::NoGround),
            None if verdict.colour == colour::Colour::White => Err(RemovalRefused::NoGround),
            None => Err(RemovalRefused::Held(verdict.colour)),
        }
    }

    /// How many sandboxes are awake only to be deleted is bounded over all replicas (R-I7).
    pub(super) fn begin_wake(&mut self, slot: &SlotId) -> Answer {
        let awake_max = self.rules.settings().awake_for_removal_max as usize;
        let awake = |r: &Record| r.condemned.as_ref().is_some_and(|c| c.awake);
        let others = self
            .records
            .values()
            .filter(|r| r.slot != *slot && awake(r))
            .count();
        if others >= awake_max && self.rules.keeps(Rule::WakeBudget) {
            return Answer::NoWakeBudget;
        }
        match self
            .records
            .get_mut(slot)
            .and_then(|r| r.condemned.as_mut())
        {
            Some(condemned) => {
                condemned.awake = true;
                Answer::Wake
            }
            None => Answer::Unknown,
        }
    }

    pub(super) fn confirm_gone(
        &mut self,
        slot: &SlotId,
        sandbox: &SandboxId,
        evidence: GoneEvidence,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let Some(record) = self.records.get(slot) else {
            return Answer::Unknown;
        };
        if record.sandbox.as_ref() != Some(sandbox) {
            return Answer::Unknown;
        }
        let decided = record.condemned.is_some() || evidence == GoneEvidence::NotFound;
        if !decided {
            return Answer::Refused(RemovalRefused::NoGround);
        }
        self.remove_record(slot, evidence, now, audit);
        Answer::Done
    }

    pub(super) fn removal_failed(
        &mut self,
        slot: &SlotId,
        by: &ReplicaId,
        awake: bool,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let Some(record) = self.records.get_mut(slot) else {
            return Answer::Unknown;
        };
        if record.lock.as_ref().is_some_and(|lock| lock.by == *by) {
            record.lock = None;
        }
        if let Some(condemned) = &mut record.condemned {
            condemned.failures = condemned.failures.saturating_add(1);
            condemned.awake = awake;
        }
        if !self.rules.keeps(Rule::CondemnedForGood) {
            record.condemned = None;
            return Answer::Done;
        }
        // The best effort was made; the account is released, the sandbox is still removed (R-G12).
        if record.is_counted()
            && colour::is_overdue(record, &self.rules, now)
            && let Some(record) = self.write_off(slot)
        {
            audit.push(audit_of(record, now, Act::WrittenOff));
        }
        Answer::Done
    }

    /// Nobody has answered for this create for longer than it can take, and the platform, asked for
    /// it by its slot's name, has none.
    pub(super) fn expire_making(
        &mut self,
        slot: &SlotId,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let Some(record) = self.records.get(slot) else {
            return Answer::Unknown;
        };
        let given_up = record
            .making
            .as_ref()
            .is_none_or(|making| now.since(making.since) >= self.rules.settle());
        if record.sandbox.is_some() || !given_up {
            return Answer::Refused(RemovalRefused::Held(colour::Colour::Grey));
        }
        self.remove_record(slot, GoneEvidence::NeverMade, now, audit);
        Answer::Done
    }

    /// A sandbox of ours that the books do not know. It gets a record, so that it counts and is
    /// explained, but no root: it is white from the start.
    pub(super) fn adopt_stray(
        &mut self,
        stray: Stray,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        if let Some(record) = self.records.get_mut(&stray.slot) {
            let still_made = record
                .making
                .as_ref()
                .is_some_and(|m| now.since(m.since) < self.rules.black());
            if record.sandbox.is_some() || still_made {
                return Answer::Busy;
            }
            record.sandbox = Some(stray.sandbox);
            record.making = None;
            record.ends_at = stray.ends_at;
            record.seen_at = Some(now);
            return Answer::Done;
        }
        let settling = matches!(self.stage, Stage::Settling { .. });
        let counted = if settling || self.has_room(&stray.bucket) {
            Counted::Yes
        } else {
            Counted::No
        };
        let record = Record {
            slot: stray.slot,
            bucket: stray.bucket,
            owner: stray.owner,
            managed: Managed::ByGovernor,
            generation: self.mint(now),
            making: None,
            sandbox: Some(stray.sandbox),
            holding: None,
            run: None,
            lock: None,
            condemned: None,
            ends_at: stray.ends_at,
            paused_since: None,
            seen_at: Some(now),
            counted,
        };
        audit.push(audit_of(&record, now, Act::Adopted));
        self.add_record(record);
        Answer::Done
    }

    /// Notes what the platform said. It renews no root (R-G10).
    pub(super) fn note_seen(&mut self, slot: &SlotId, seen: Seen, now: Timestamp) -> Answer {
        let Some(record) = self.records.get_mut(slot) else {
            return Answer::Unknown;
        };
        record.seen_at = Some(now);
        match seen {
            Seen::Running => record.paused_since = None,
            Seen::Paused => {
                record.paused_since = record.paused_unheard_since().or(Some(now));
            }
            Seen::Unknown => {}
        }
        if !self.rules.keeps(Rule::ScanRenewsNothing)
            && let Some(holding) = &mut record.holding
        {
            holding.heartbeat_at = now;
        }
        Answer::Done
    }

    /// Frees the slot: the only way a record goes.
    pub(super) fn remove_record(
        &mut self,
        slot: &SlotId,
        evidence: GoneEvidence,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) {
        // A create that made nothing ends no generation that anybody has seen: its lease may ask
        // again. A sandbox that died does.
        let how = (evidence != GoneEvidence::NeverMade).then_some(SealedHow::SandboxEnded);
        self.detach_holding(slot, how, now, audit);
        if let Some(record) = self.drop_record(slot) {
            audit.push(audit_of(&record, now, Act::SlotFreed { evidence }));
        }
    }

    /// The second half of a verb that must be one step, for simulations of what happens otherwise.
    #[cfg(feature = "mutations")]
    pub(super) fn unchecked(
        &mut self,
        verb: super::Verb,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        match verb {
            super::Verb::BeginRemoval {
                slot, by, ground, ..
            } => {
                let fresh = self
                    .records
                    .get(&slot)
                    .is_some_and(|r| r.condemned.is_none());
                if fresh {
                    self.condemn(&slot, Some(by), ground, now, audit);
                }
                match self.records.get(&slot) {
                    Some(record) => Answer::Remove {
                        generation: record.generation,
                    },
                    None => Answer::Unknown,
                }
            }
            super::Verb::Acquire {
                slot,
                bucket,
                owner,
                claim,
                maker,
            } => {
                let ask = super::lease::Ask {
                    slot,
                    bucket,
                    owner,
                    claim,
                    maker,
                };
                self.take(&ask, now, audit)
            }
            other => self.dispatch(other, now, audit),
        }
    }
}
