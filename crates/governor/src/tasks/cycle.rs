//! One round of the reclaimer: gathering evidence, and settling what it does not show.
//!
//! ```text
//!   Cycle:   read the clock ─▶ list ─▶ read the books ─▶ Evidence       (any error: no round)
//!   settle:  ask by name ─┬─ not found ─▶ ConfirmGone
//!                         └─ there ─▶ NoteSeen
//!   making:  find by slot ─┬─ not found ─▶ ExpireMaking
//!                          └─ there ─▶ AdoptStray
//! ```
//!
//! The listing comes before the books: whatever it shows had its slot in the books by then, so a
//! sandbox that is just being made is never taken for a stray.

use sandhold_types::{SandboxId, Timestamp};

use super::{Effect, Input, Outcome, Task};
use crate::{
    books::{Answer, GoneEvidence, Verb},
    ids::SlotId,
    ports::{Call, CallError, Listed, Reply},
    reclaimer::Evidence,
    rules::{Rule, Rules},
};

/// Gathers one round's evidence.
#[derive(Debug, Default)]
pub struct Cycle {
    began_at: Option<Timestamp>,
    listing: Option<Vec<Listed>>,
    listed: bool,
}

impl Task for Cycle {
    fn step(&mut self, input: Input, _: Timestamp) -> Effect {
        match input {
            Input::Go => Effect::Store(Verb::Read),
            Input::Store(Ok(Answer::Books(view))) => match self.began_at {
                None => {
                    self.began_at = Some(view.now);
                    Effect::Platform(Call::List)
                }
                Some(began_at) => {
                    let listing = self.listing.take();
                    let evidence = Evidence {
                        began_at,
                        listing,
                        view: *view,
                    };
                    Effect::Done(Outcome::Evidence(Box::new(evidence)))
                }
            },
            Input::Platform(result) if !self.listed => {
                self.listed = true;
                self.listing = match result {
                    Ok(Reply::Listing(listing)) => Some(listing),
                    _ => None,
                };
                Effect::Store(Verb::Read)
            }
            _ => Effect::Done(Outcome::NotYet("the store did not answer")),
        }
    }
}

/// Reads the books between two rounds, to go on with what was just condemned.
#[derive(Debug, Default)]
pub struct Urge;

impl Task for Urge {
    fn step(&mut self, input: Input, _: Timestamp) -> Effect {
        match input {
            Input::Go => Effect::Store(Verb::Read),
            Input::Store(Ok(Answer::Books(view))) => Effect::Done(Outcome::Urgent(view)),
            _ => Effect::Done(Outcome::NotYet("the store did not answer")),
        }
    }
}

/// Asks for one sandbox by name.
#[derive(Debug)]
pub struct Settlement {
    slot: SlotId,
    sandbox: SandboxId,
    rules: Rules,
    asked: bool,
}

impl Settlement {
    /// Of this sandbox.
    #[must_use]
    pub fn new(slot: SlotId, sandbox: SandboxId, rules: Rules) -> Self {
        Self {
            slot,
            sandbox,
            rules,
            asked: false,
        }
    }

    fn gone(&self) -> Effect {
        let (slot, sandbox) = (self.slot.clone(), self.sandbox.clone());
        Effect::Store(Verb::ConfirmGone {
            slot,
            sandbox,
            evidence: GoneEvidence::NotFound,
        })
    }
}

impl Task for Settlement {
    fn step(&mut self, input: Input, _: Timestamp) -> Effect {
        match input {
            Input::Go if !self.asked && self.rules.keeps(Rule::ListingIsEvidence) => {
                self.asked = true;
                Effect::Platform(Call::Ask(self.sandbox.clone()))
            }
            Input::Go | Input::Platform(Err(CallError::NotFound)) => self.gone(),
            Input::Platform(Ok(Reply::State(seen))) => Effect::Store(Verb::NoteSeen {
                slot: self.slot.clone(),
                seen,
            }),
            Input::Platform(_) => Effect::Done(Outcome::NotYet("the platform did not answer")),
            Input::Store(_) => Effect::Done(Outcome::Settled),
        }
    }
}

/// Asks for the sandbox of a slot that nobody answers for.
#[derive(Debug)]
pub struct MakingSettlement {
    slot: SlotId,
}

impl MakingSettlement {
    /// Of this slot.
    #[must_use]
    pub fn new(slot: SlotId) -> Self {
        Self { slot }
    }
}

impl Task for MakingSettlement {
    fn step(&mut self, input: Input, _: Timestamp) -> Effect {
        match input {
            Input::Go => Effect::Platform(Call::FindBySlot(self.slot.clone())),
            Input::Platform(Ok(Reply::Found(None))) => Effect::Store(Verb::ExpireMaking {
                slot: self.slot.clone(),
            }),
            Input::Platform(Ok(Reply::Found(Some(found)))) => Effect::Store(adopt(found)),
            Input::Platform(_) => Effect::Done(Outcome::NotYet("the platform did not answer")),
            Input::Store(_) => Effect::Done(Outcome::Settled),
        }
    }
}

/// Gives a sandbox without a record one, if it is still there.
///
/// The listing was taken before the books were read: what was removed in between, by whomever, is listed
/// and has no record. Asked for after that, it says that it is gone.
#[derive(Debug)]
pub struct Adoption {
    listed: Option<Listed>,
    asked: bool,
}

impl Adoption {
    /// Of this sandbox.
    #[must_use]
    pub fn new(listed: Listed) -> Self {
        Self {
            listed: Some(listed),
            asked: false,
        }
    }
}

impl Task for Adoption {
    fn step(&mut self, input: Input, _: Timestamp) -> Effect {
        let Some(listed) = &self.listed else {
            return Effect::Done(Outcome::Settled);
        };
        if !self.asked {
            self.asked = true;
            return Effect::Platform(Call::Ask(listed.sandbox.clone()));
        }
        match (input, self.listed.take()) {
            (Input::Platform(Ok(_)), Some(listed)) => Effect::Store(adopt(listed)),
            (Input::Platform(Err(CallError::NotFound)), _) => Effect::Done(Outcome::Settled),
            _ => Effect::Done(Outcome::NotYet("nobody says whether it is there")),
        }
    }
}

fn adopt(listed: Listed) -> Verb {
    Verb::AdoptStray {
        slot: listed.slot,
        sandbox: listed.sandbox,
        bucket: listed.bucket,
        owner: listed.owner,
        ends_at: listed.ends_at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{colour::Seen, ids::Bucket};

    fn stray() -> Listed {
        Listed {
            sandbox: "sandboxsandboxsandbo".parse().unwrap(),
            slot: "slot".parse().unwrap(),
            bucket: Bucket {
                namespace: "writer".parse().unwrap(),
                env: "prod".parse().unwrap(),
            },
            owner: "o".parse().unwrap(),
            seen: Seen::Running,
            ends_at: Timestamp::FAR_FUTURE,
            generation: sandhold_types::Generation(1),
        }
    }

    #[test]
    fn what_was_removed_since_the_listing_gets_no_record() {
        // R-G11: a listing is evidence, not truth.
        let now = Timestamp::from_unix_ms(1);
        for (answer, is_adopted) in [
            (Ok(Reply::State(Seen::Running)), true),
            (Err(CallError::NotFound), false),
            (Err(CallError::NoAnswer), false),
        ] {
            let mut task = Adoption::new(stray());
            let ask = task.step(Input::Go, now);
            assert!(matches!(ask, Effect::Platform(Call::Ask(_))));
            let next = task.step(Input::Platform(answer), now);
            let adopts = matches!(next, Effect::Store(Verb::AdoptStray { .. }));
            assert_eq!(adopts, is_adopted, "{next:?}");
        }
    }
}
