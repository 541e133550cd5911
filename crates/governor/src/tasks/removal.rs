//! Removing one sandbox: condemn, delete, confirm (R-G10, R-G16, R-L10).
//!
//! ```text
//!   (ask: paused?) ─▶ BeginRemoval ─▶ kill ─┬─ done, or not found ──────────▶ ConfirmGone ─▶ gone
//!                        │ refused          ├─ no answer ─▶ ask ─ not found ──▶    ↑
//!                        ▼                  │                └ still there ─▶ RemovalFailed ─▶ next round
//!                     left alone            └─ "paused" ─▶ BeginWake ─▶ wake ─▶ kill again
//!                                                            └ no budget ─▶ RemovalFailed
//! ```

use sandhold_types::{Generation, SandboxId, Timestamp};

use super::{Effect, Input, Outcome, Task};
use crate::{
    books::{Answer, GoneEvidence, Verb},
    colour::Seen,
    ids::{ReplicaId, SlotId},
    ports::{Call, CallError, Reply},
    reclaimer::AskFirst,
    record::Ground,
    rules::{Rule, Rules},
};

/// What is to be removed, and why.
#[derive(Debug, Clone)]
pub struct RemovalOf {
    /// Which.
    pub slot: SlotId,
    /// Its sandbox.
    pub sandbox: SandboxId,
    /// The generation that the decision is about.
    pub generation: Generation,
    /// Why.
    pub ground: Ground,
    /// Whether the platform must first say whether it is paused.
    pub ask_first: AskFirst,
}

/// The removal of one sandbox.
#[derive(Debug)]
pub struct Removal {
    of: RemovalOf,
    by: ReplicaId,
    rules: Rules,
    seen: Seen,
    state: State,
    begun_at: Timestamp,
    awake: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Fresh,
    Asking,
    /// Only in simulations without the one-step rule.
    Looking,
    Beginning,
    Killing,
    AskingTruth,
    AskingToWake,
    Waking,
    Confirming,
    Failing(&'static str),
}

impl Removal {
    /// A removal that has not begun.
    #[must_use]
    pub fn new(of: RemovalOf, by: ReplicaId, rules: Rules) -> Self {
        let begun_at = Timestamp::from_unix_ms(0);
        let seen = Seen::Unknown;
        Self {
            of,
            by,
            rules,
            seen,
            state: State::Fresh,
            begun_at,
            awake: false,
        }
    }

    fn begin(&mut self, now: Timestamp) -> Effect {
        self.begun_at = now;
        if !self.rules.keeps(Rule::AtomicRemoval) && self.state != State::Looking {
            self.state = State::Looking;
            return Effect::Store(Verb::Read);
        }
        self.state = State::Beginning;
        Effect::Store(Verb::BeginRemoval {
            slot: self.of.slot.clone(),
            generation: self.of.generation,
            by: self.by.clone(),
            ground: self.of.ground,
            seen: self.seen,
        })
    }

    fn kill(&mut self, now: Timestamp) -> Effect {
        // Whoever slept through its lock starts again from the books (R-G10). The condemnation holds
        // anyway; this is for a store that lost it meanwhile.
        if now.since(self.begun_at) >= self.rules.holder_deadline() {
            return Effect::Done(Outcome::NotYet("its lock may have passed to another"));
        }
        self.state = State::Killing;
        Effect::Platform(Call::Kill(self.of.sandbox.clone(), self.of.generation))
    }

    fn confirm(&mut self, evidence: GoneEvidence) -> Effect {
        self.state = State::Confirming;
        let (slot, sandbox) = (self.of.slot.clone(), self.of.sandbox.clone());
        Effect::Store(Verb::ConfirmGone {
            slot,
            sandbox,
            evidence,
        })
    }

    fn fail(&mut self, why: &'static str) -> Effect {
        self.state = State::Failing(why);
        let (slot, by, awake) = (self.of.slot.clone(), self.by.clone(), self.awake);
        Effect::Store(Verb::RemovalFailed { slot, by, awake })
    }

    fn after_kill(&mut self, result: Result<Reply, CallError>) -> Effect {
        match result {
            Ok(_) => self.confirm(GoneEvidence::Killed),
            Err(CallError::NotFound) => self.confirm(GoneEvidence::NotFound),
            Err(CallError::NoAnswer) if !self.rules.keeps(Rule::OnlyGoneIsGone) => {
                self.confirm(GoneEvidence::Killed)
            }
            // An error is settled by asking for the truth (R-L10).
            Err(CallError::NoAnswer | CallError::Refused) => {
                self.state = State::AskingTruth;
                Effect::Platform(Call::Ask(self.of.sandbox.clone()))
            }
            Err(CallError::RefusedPaused) if self.awake => self.fail("it fell asleep again"),
            Err(CallError::RefusedPaused) => {
                self.state = State::AskingToWake;
                Effect::Store(Verb::BeginWake {
                    slot: self.of.slot.clone(),
                })
            }
            Err(CallError::StaleGeneration) => self.fail("a later generation has it"),
            Err(CallError::BreakerOpen) => {
                // Nothing was tried, so nothing failed.
                Effect::Done(Outcome::NotYet("the circuit breaker is open"))
            }
        }
    }

    fn after_begin(&mut self, answer: Answer, now: Timestamp) -> Effect {
        match answer {
            Answer::Remove { generation } => {
                self.of.generation = generation;
                self.kill(now)
            }
            Answer::Refused(why) => Effect::Done(Outcome::Refused(why)),
            Answer::Unknown => Effect::Done(Outcome::Gone),
            _ => Effect::Done(Outcome::NotYet("the store lost writes")),
        }
    }

    /// What the check looks like when it is not one step with the act.
    #[cfg(feature = "mutations")]
    fn after_look(&mut self, answer: Answer) -> Effect {
        let Answer::Books(view) = answer else {
            return Effect::Done(Outcome::NotYet("the store did not answer"));
        };
        let Some(record) = view.records.iter().find(|r| r.slot == self.of.slot) else {
            return Effect::Done(Outcome::Gone);
        };
        let retention = view
            .buckets
            .get(&record.bucket)
            .map(|p| p.retention)
            .unwrap_or_default();
        let verdict = crate::colour::verdict(record, self.seen, retention, &self.rules, view.now);
        let unchanged = record.generation == self.of.generation;
        if verdict.ground != Some(self.of.ground) || !unchanged {
            return Effect::Done(Outcome::NotYet("held"));
        }
        self.state = State::Beginning;
        Effect::Store(Verb::Unchecked(Box::new(Verb::BeginRemoval {
            slot: self.of.slot.clone(),
            generation: self.of.generation,
            by: self.by.clone(),
            ground: self.of.ground,
            seen: self.seen,
        })))
    }

    #[cfg(not(feature = "mutations"))]
    fn after_look(&mut self, _: Answer) -> Effect {
        Effect::Done(Outcome::NotYet("the removal is one step"))
    }
}

impl Task for Removal {
    fn step(&mut self, input: Input, now: Timestamp) -> Effect {
        match (self.state, input) {
            (State::Fresh, _) if self.of.ask_first == AskFirst::Yes => {
                self.state = State::Asking;
                self.begun_at = now;
                Effect::Platform(Call::Ask(self.of.sandbox.clone()))
            }
            (State::Fresh, _) => {
                // Without asking, the ground itself says what the listing said.
                let paused = self.of.ground == Ground::Retention;
                self.seen = if paused { Seen::Paused } else { Seen::Running };
                self.begin(now)
            }
            (State::Asking, Input::Platform(Ok(Reply::State(seen)))) => {
                // Whoever slept since has an answer about another time.
                if now.since(self.begun_at) >= self.rules.settings().call_deadline {
                    return Effect::Done(Outcome::NotYet("its state was asked too long ago"));
                }
                self.seen = seen;
                self.begin(now)
            }
            (State::Asking, Input::Platform(Err(CallError::NotFound))) => {
                self.confirm(GoneEvidence::NotFound)
            }
            (State::Asking, _) => Effect::Done(Outcome::NotYet("its state is not known")),
            (State::Looking, Input::Store(Ok(answer))) => self.after_look(answer),
            (State::Beginning, Input::Store(Ok(answer))) => self.after_begin(answer, now),
            (State::Killing, Input::Platform(result)) => self.after_kill(result),
            (State::AskingTruth, Input::Platform(Err(CallError::NotFound))) => {
                self.confirm(GoneEvidence::NotFound)
            }
            (State::AskingTruth, _) => self.fail("the platform did not delete it"),
            (State::AskingToWake, Input::Store(Ok(Answer::Wake))) => {
                self.state = State::Waking;
                self.awake = true;
                Effect::Platform(Call::Wake(self.of.sandbox.clone(), self.of.generation))
            }
            (State::AskingToWake, _) => self.fail("too many are awake already"),
            (State::Waking, Input::Platform(Ok(_))) => self.kill(now),
            (State::Waking, Input::Platform(Err(CallError::NotFound))) => {
                self.confirm(GoneEvidence::NotFound)
            }
            // It may be awake: try, and let the platform say.
            (State::Waking, Input::Platform(Err(CallError::NoAnswer))) => self.kill(now),
            (State::Waking, _) => {
                self.awake = false;
                self.fail("it could not be woken")
            }
            (State::Confirming, Input::Store(Ok(Answer::Done | Answer::Unknown))) => {
                Effect::Done(Outcome::Gone)
            }
            (State::Confirming, _) => Effect::Done(Outcome::NotYet("it is gone, but not noted")),
            (State::Failing(why), _) => Effect::Done(Outcome::NotYet(why)),
            _ => Effect::Done(Outcome::NotYet("the store did not answer")),
        }
    }
}
