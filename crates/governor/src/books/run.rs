//! Runs and operation locks as roots (R-G3, R-G10).
//!
//! A run is executed by one replica. If that is not heard for as long as a root is black, another
//! may claim it; the first, should it come back, is told so at its next beat and stops.

use sandhold_types::{Generation, Timestamp};

use super::{Answer, Audit, Books, Keep};
use crate::{
    ids::{ReplicaId, RunId, SlotId},
    record::{Ground, OperationLock, Record, RunRoot},
};

impl Books {
    fn usable(&mut self, slot: &SlotId) -> Option<&mut Record> {
        let record = self.records.get_mut(slot)?;
        (record.condemned.is_none() && record.sandbox.is_some()).then_some(record)
    }

    pub(super) fn begin_run(
        &mut self,
        slot: &SlotId,
        generation: Generation,
        run: RunId,
        replica: ReplicaId,
        now: Timestamp,
    ) -> Answer {
        let Some(record) = self.usable(slot) else {
            return Answer::Unknown;
        };
        if record.generation != generation || record.holding.is_none() {
            return Answer::Stale {
                current: Some(record.generation),
            };
        }
        match &record.run {
            Some(other) if other.run != run || other.replica != replica => return Answer::Busy,
            Some(_) => {}
            None => {
                let root = RunRoot {
                    run,
                    replica,
                    heartbeat_at: now,
                    cancelled: false,
                };
                record.run = Some(root);
            }
        }
        Answer::RunGoesOn { cancelled: false }
    }

    pub(super) fn run_heartbeat(
        &mut self,
        slot: &SlotId,
        generation: Generation,
        run: &RunId,
        replica: &ReplicaId,
        now: Timestamp,
    ) -> Answer {
        let settling = matches!(self.stage, super::Stage::Settling { .. });
        let black = self.rules.black();
        let Some(record) = self.usable(slot) else {
            return Answer::Unknown;
        };
        if record.generation != generation {
            return Answer::Stale {
                current: Some(record.generation),
            };
        }
        let Some(root) = record.run.as_mut().filter(|r| r.run == *run) else {
            return Answer::Unknown;
        };
        if root.replica != *replica {
            return Answer::Busy;
        }
        if settling && now.since(root.heartbeat_at) >= black {
            return Answer::Recovering;
        }
        root.heartbeat_at = now;
        let cancelled = root.cancelled;
        if let Some(holding) = &mut record.holding {
            holding.heartbeat_at = now;
        }
        Answer::RunGoesOn { cancelled }
    }

    pub(super) fn claim_run(
        &mut self,
        slot: &SlotId,
        run: &RunId,
        replica: ReplicaId,
        now: Timestamp,
    ) -> Answer {
        let black = self.rules.black();
        let Some(record) = self.usable(slot) else {
            return Answer::Unknown;
        };
        let Some(root) = record.run.as_mut().filter(|r| r.run == *run) else {
            return Answer::Unknown;
        };
        if root.replica != replica && now.since(root.heartbeat_at) < black {
            return Answer::Busy;
        }
        root.replica = replica;
        root.heartbeat_at = now;
        Answer::RunGoesOn {
            cancelled: root.cancelled,
        }
    }

    pub(super) fn cancel_run(&mut self, slot: &SlotId, run: &RunId) -> Answer {
        let Some(record) = self.usable(slot) else {
            return Answer::Unknown;
        };
        match record.run.as_mut().filter(|r| r.run == *run) {
            Some(root) => {
                root.cancelled = true;
                Answer::Done
            }
            None => Answer::Unknown,
        }
    }

    pub(super) fn end_run(
        &mut self,
        slot: &SlotId,
        run: &RunId,
        replica: &ReplicaId,
        keep: Keep,
        now: Timestamp,
        audit: &mut Vec<Audit>,
    ) -> Answer {
        let Some(record) = self.usable(slot) else {
            return Answer::Unknown;
        };
        let mine = record
            .run
            .as_ref()
            .is_some_and(|r| r.run == *run && r.replica == *replica);
        if !mine {
            return Answer::Unknown;
        }
        record.run = None;
        if keep == Keep::Nothing {
            self.condemn(slot, None, Ground::Released, now, audit);
            return Answer::Released {
                slot: Some(slot.clone()),
            };
        }
        Answer::Done
    }

    pub(super) fn lock(&mut self, slot: &SlotId, by: ReplicaId, now: Timestamp) -> Answer {
        let black = self.rules.black();
        let Some(record) = self.usable(slot) else {
            return Answer::Unknown;
        };
        let held_by_other = record
            .lock
            .as_ref()
            .is_some_and(|lock| lock.by != by && now.since(lock.taken_at) < black);
        if held_by_other {
            return Answer::Busy;
        }
        record.lock = Some(OperationLock { by, taken_at: now });
        Answer::Done
    }

    pub(super) fn unlock(&mut self, slot: &SlotId, by: &ReplicaId) -> Answer {
        let Some(record) = self.records.get_mut(slot) else {
            return Answer::Unknown;
        };
        if record.lock.as_ref().is_some_and(|lock| lock.by == *by) {
            record.lock = None;
        }
        Answer::Done
    }
}
