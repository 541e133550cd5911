//! Between the tasks and the platform: a budget and a circuit breaker for each kind of write (R-G14).
//!
//! ```text
//!   creates ─▶ [ at most 16 under way ] ─▶ [ breaker ] ─▶ platform
//!   deletes ─▶ [ at most 16 under way ] ─▶ [ breaker ] ─▶ platform      reads pass by both
//!
//!   breaker: closed ── 5 without an answer in a row ──▶ open ── 15 s ──▶ half open: one probe
//!               ▲──────────────── answered ───────────────────────────────┘ │ none: open again
//! ```
//!
//! The budget adapts: a call without an answer halves it, one with an answer gives one back, up to
//! its setting; so a platform that is being overwhelmed is given less at once, and more again as it
//! keeps up.
//!
//! While deletes get no answer, creates are held back as well: a platform that cannot finish what it
//! has must not be given more. The reverse does not hold; clean-up is never starved by creation.

use sandhold_types::Timestamp;

use crate::{
    ports::CallKind,
    rules::{Rule, Rules},
};

/// Whether a call may go to the platform now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// Go; tell [`Valve::leave`] when it is over.
    Go,
    /// Its budget is used up: wait for one to leave.
    Full,
    /// The breaker is open: do not send it.
    Open,
}

/// How a call ended, as far as the breaker cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The platform answered, whatever it said.
    Answered,
    /// It did not.
    NoAnswer,
}

/// A circuit breaker.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Breaker {
    failures: u32,
    open_since: Option<Timestamp>,
    probing: bool,
}

impl Breaker {
    /// Whether a call may pass; if it is the probe, this says so only once.
    fn may_pass(&mut self, rules: &Rules, now: Timestamp) -> bool {
        let Some(since) = self.open_since else {
            return true;
        };
        let waited = now.since(since) >= rules.settings().breaker_open;
        if waited && !self.probing {
            self.probing = true;
            return true;
        }
        false
    }

    fn note(&mut self, exit: Exit, rules: &Rules, now: Timestamp) {
        match exit {
            Exit::Answered => *self = Self::default(),
            Exit::NoAnswer => {
                self.failures = self.failures.saturating_add(1);
                if self.failures >= rules.settings().breaker_failures {
                    self.open_since = Some(now);
                    self.probing = false;
                }
            }
        }
    }

    /// Whether it holds calls back.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open_since.is_some()
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Lane {
    under_way: u32,
    /// By how much the budget is below its setting for now.
    withheld: u32,
    breaker: Breaker,
}

impl Lane {
    fn adapt(&mut self, exit: Exit, max: u32) {
        self.withheld = match exit {
            Exit::Answered => self.withheld.saturating_sub(1),
            // Half of what was left, but never the last one.
            Exit::NoAnswer => (self.withheld + max).div_ceil(2).min(max.saturating_sub(1)),
        };
    }
}

/// What a call that is over changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Nothing but the budget.
    Quietly,
    /// The breaker closed: whatever was turned away may come again at once.
    Reopening,
}

/// The valve of one replica.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Valve {
    creates: Lane,
    deletes: Lane,
}

impl Valve {
    /// Asks to send a call of this kind.
    pub fn enter(&mut self, kind: CallKind, rules: &Rules, now: Timestamp) -> Entry {
        let settings = rules.settings();
        let (mut creates_max, mut deletes_max) = (settings.creates_max, settings.deletes_max);
        if !rules.keeps(Rule::SeparateBudgets) {
            creates_max = creates_max.saturating_sub(self.deletes.under_way);
            deletes_max = settings.creates_max.saturating_sub(self.creates.under_way);
        }
        let deletes_stuck = self.deletes.breaker.is_open();
        let (lane, max) = match kind {
            CallKind::Create if deletes_stuck && rules.keeps(Rule::Breaker) => return Entry::Open,
            CallKind::Create => (&mut self.creates, creates_max),
            CallKind::Delete => (&mut self.deletes, deletes_max),
            CallKind::Other => return Entry::Go,
        };
        if rules.keeps(Rule::Breaker) && lane.breaker.is_open() {
            // The probe needs no room: it is what finds out whether there is any.
            if !lane.breaker.may_pass(rules, now) {
                return Entry::Open;
            }
        } else if lane.under_way >= max.saturating_sub(lane.withheld) {
            return Entry::Full;
        }
        lane.under_way += 1;
        Entry::Go
    }

    /// A call of this kind is over.
    pub fn leave(&mut self, kind: CallKind, exit: Exit, rules: &Rules, now: Timestamp) -> Left {
        let settings = rules.settings();
        let (lane, max) = match kind {
            CallKind::Create => (&mut self.creates, settings.creates_max),
            CallKind::Delete => (&mut self.deletes, settings.deletes_max),
            CallKind::Other => return Left::Quietly,
        };
        lane.under_way = lane.under_way.saturating_sub(1);
        if rules.keeps(Rule::Breaker) {
            lane.adapt(exit, max);
        }
        let was_open = lane.breaker.is_open();
        lane.breaker.note(exit, rules, now);
        if was_open && !lane.breaker.is_open() {
            Left::Reopening
        } else {
            Left::Quietly
        }
    }

    /// Which kinds are held back, for the alarm.
    #[must_use]
    pub fn open(&self) -> Vec<CallKind> {
        let lanes = [
            (CallKind::Create, &self.creates),
            (CallKind::Delete, &self.deletes),
        ];
        lanes
            .into_iter()
            .filter(|(_, lane)| lane.breaker.is_open())
            .map(|(kind, _)| kind)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use CallKind::{Create, Delete};

    fn at(s: u64) -> Timestamp {
        Timestamp::from_unix_ms(s * 1000)
    }

    #[test]
    fn deletes_have_a_budget_of_their_own() {
        // R-G14, R-I1
        let (mut valve, rules) = (Valve::default(), Rules::default());
        for _ in 0..rules.settings().creates_max {
            assert_eq!(valve.enter(Create, &rules, at(0)), Entry::Go);
        }
        assert_eq!(valve.enter(Create, &rules, at(0)), Entry::Full);
        assert_eq!(valve.enter(Delete, &rules, at(0)), Entry::Go);
    }

    #[test]
    fn the_breaker_opens_probes_and_closes() {
        // R-G14
        let (mut valve, rules) = (Valve::default(), Rules::default());
        for _ in 0..rules.settings().breaker_failures {
            assert_eq!(valve.enter(Delete, &rules, at(0)), Entry::Go);
            valve.leave(Delete, Exit::NoAnswer, &rules, at(1));
        }
        assert_eq!(valve.enter(Delete, &rules, at(2)), Entry::Open);
        assert_eq!(
            valve.enter(Create, &rules, at(2)),
            Entry::Open,
            "deletes are stuck"
        );
        let later = at(1).plus(rules.settings().breaker_open);
        assert_eq!(valve.enter(Delete, &rules, later), Entry::Go, "the probe");
        assert_eq!(
            valve.enter(Delete, &rules, later),
            Entry::Open,
            "one probe only"
        );
        valve.leave(Delete, Exit::NoAnswer, &rules, later);
        assert_eq!(
            valve.enter(Delete, &rules, later.plus(Duration::from_secs(1))),
            Entry::Open
        );
        let again = later.plus(rules.settings().breaker_open);
        assert_eq!(valve.enter(Delete, &rules, again), Entry::Go);
        let left = valve.leave(Delete, Exit::Answered, &rules, again);
        assert_eq!(left, Left::Reopening);
        assert_eq!(valve.enter(Delete, &rules, again), Entry::Go);
        assert_eq!(valve.enter(Create, &rules, again), Entry::Go);
        assert!(valve.open().is_empty());
    }

    #[test]
    fn the_budget_shrinks_while_answers_are_missing_and_grows_back() {
        // R-G14, R-I1
        let (mut valve, rules) = (Valve::default(), Rules::default());
        let room = |valve: &Valve| {
            let mut valve = valve.clone();
            (0..100)
                .take_while(|_| valve.enter(Delete, &rules, at(0)) == Entry::Go)
                .count()
        };
        assert_eq!(room(&valve), 16);
        for expected in [8, 4, 2, 1] {
            valve.enter(Delete, &rules, at(0));
            valve.leave(Delete, Exit::NoAnswer, &rules, at(0));
            assert_eq!(room(&valve), expected);
        }
        for expected in 2..=16 {
            valve.enter(Delete, &rules, at(0));
            valve.leave(Delete, Exit::Answered, &rules, at(0));
            assert_eq!(room(&valve), expected);
        }
    }

    #[test]
    fn creates_without_an_answer_do_not_stop_deletes() {
        // R-G14
        let (mut valve, rules) = (Valve::default(), Rules::default());
        for _ in 0..rules.settings().breaker_failures {
            valve.enter(Create, &rules, at(0));
            valve.leave(Create, Exit::NoAnswer, &rules, at(0));
        }
        assert_eq!(valve.enter(Create, &rules, at(1)), Entry::Open);
        assert_eq!(valve.enter(Delete, &rules, at(1)), Entry::Go);
    }
}
