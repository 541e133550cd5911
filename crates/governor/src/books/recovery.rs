//! What happens when the store lost writes that it had acknowledged: a failover, a backup.
//!
//! ```text
//!   settled ── epoch went back ──▶ settling ── 180 s passed, every record and every listed sandbox
//!                                     │         settled since, generations raised ──▶ settled
//!                                     └ renewals and releases go on; nobody new, nothing swept
//! ```
//!
//! Among the lost writes may be slots whose sandbox is just being made, condemnations whose delete is
//! under way, and generations that somebody holds. All of these have run their course, or shown
//! themselves on the platform, when the settling time is over.

use sandhold_types::{Generation, Timestamp};

use super::{Answer, Books};
use crate::rules::Rule;

/// Whether lost writes are being settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Nothing is in doubt.
    Settled,
    /// Writes may have been lost.
    Settling {
        /// When it was noticed, by the store's clock.
        since: Timestamp,
    },
}

impl Books {
    /// The driver calls this when the store's identity or epoch is not what it was: its last writes
    /// may be lost.
    pub fn begin_recovery(&mut self, now: Timestamp) {
        self.stage = Stage::Settling { since: now };
        self.waiting.clear();
    }

    pub(super) fn finish_recovery(
        &mut self,
        highest: Generation,
        settled_from: Timestamp,
        now: Timestamp,
    ) -> Answer {
        let Stage::Settling { since } = self.stage else {
            return Answer::Done;
        };
        let from = since.plus(self.rules.settle());
        let all_seen = self
            .records
            .values()
            .all(|r| r.sandbox.is_some() && r.seen_at.is_some_and(|at| at >= from));
        if settled_from < from || !all_seen {
            return Answer::Recovering;
        }
        if self.rules.keeps(Rule::FenceNeverRepeats) {
            self.newest = self.newest.max(highest).max(Generation(now.unix_ms()));
        }
        self.stage = Stage::Settled;
        Answer::Done
    }
}
