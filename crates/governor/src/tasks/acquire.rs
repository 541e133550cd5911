//! From a request to a sandbox that is fit for use (R-G4, R-G6, R-G9).
//!
//! ```text
//!   Acquire ─┬─ granted (owner has one) ─▶ wake ─▶ probe ─▶ leased, reused
//!            ├─ make it ─▶ create ─┬─ made ──▶ Bind ─▶ probe ─▶ leased
//!            │                     ├─ certainly not ─▶ ReturnSlot ─▶ unavailable
//!            │                     └─ no answer ─▶ find by slot ─┬─ found ─▶ Bind …
//!            │                                                   └─ not ─▶ slot stays in doubt
//!            ├─ waiting, being made ─▶ sleep 1 s ─▶ again
//!            └─ stale, no capacity ─▶ told
//!   probe fails 3 × 3 ─▶ Discard ─▶ Acquire again with a new slot, at most twice
//! ```

use sandhold_types::{Generation, SandboxId, TemplateId, Timestamp};

use super::{Effect, Input, Outcome, Reused, Task};
use crate::{
    books::{Answer, Claim, Grant, Verb},
    ids::{Bucket, LeaseId, OwnerId, ReplicaId, SlotId},
    ports::{Call, CallError, Reply, StoreError},
    rules::{Rule, Rules},
};

/// A caller's request for a sandbox.
#[derive(Debug, Clone)]
pub struct Request {
    /// The names of the slots, should they be needed: one, and one for each rebuild.
    pub slots: Vec<SlotId>,
    /// Where it counts.
    pub bucket: Bucket,
    /// For whom.
    pub owner: OwnerId,
    /// Under which lease.
    pub lease: LeaseId,
    /// From what.
    pub template: TemplateId,
    /// How long a heartbeat keeps it.
    pub ttl: Option<std::time::Duration>,
}

/// The way from a request to a sandbox.
#[derive(Debug)]
pub struct Acquire {
    request: Request,
    replica: ReplicaId,
    rules: Rules,
    state: State,
    asking_since: Option<Timestamp>,
    rebuilds: usize,
    probe: HealthGate,
    grant: Option<(Grant, Reused)>,
    /// When the books were last asked, by the local clock.
    asked_at: Timestamp,
    generation: Generation,
    bind_tries: u32,
    made: Option<(SandboxId, Timestamp)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// About to ask the books.
    Idle,
    Asking,
    /// Only in simulations without the one-step rule.
    Looking,
    Creating,
    Finding,
    Returning,
    Binding,
    Waking,
    Probing,
    BetweenRounds,
    Discarding,
    DroppingUnbound,
    Leaving(&'static str),
}

/// Three rounds of three tries (R-G9).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct HealthGate {
    round: u32,
    tries: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    TryAgain,
    NextRound,
    Unfit,
}

impl HealthGate {
    fn failed(&mut self, rules: &Rules) -> Gate {
        self.tries += 1;
        if self.tries < rules.settings().probe_tries {
            return Gate::TryAgain;
        }
        self.tries = 0;
        self.round += 1;
        if self.round < rules.settings().probe_rounds {
            Gate::NextRound
        } else {
            Gate::Unfit
        }
    }
}

impl Acquire {
    /// A request that was not asked yet.
    #[must_use]
    pub fn new(request: Request, replica: ReplicaId, rules: Rules) -> Self {
        Self {
            request,
            replica,
            rules,
            state: State::Idle,
            asking_since: None,
            rebuilds: 0,
            probe: HealthGate::default(),
            grant: None,
            asked_at: Timestamp::from_unix_ms(0),
            generation: Generation(0),
            bind_tries: 0,
            made: None,
        }
    }

    fn slot(&self) -> Option<SlotId> {
        self.request.slots.get(self.rebuilds).cloned()
    }

    fn verb(&self) -> Option<Verb> {
        let request = &self.request;
        let (lease, template) = (request.lease.clone(), request.template.clone());
        Some(Verb::Acquire {
            slot: self.slot()?,
            bucket: request.bucket.clone(),
            owner: request.owner.clone(),
            claim: Claim::Lease {
                lease,
                template,
                ttl: request.ttl,
            },
            maker: self.replica.clone(),
        })
    }

    fn ask(&mut self, now: Timestamp) -> Effect {
        self.asked_at = now;
        let since = *self.asking_since.get_or_insert(now);
        let patience = self.rules.settings().wait_max + self.rules.settings().wait_silence_max;
        if now.since(since) >= patience {
            return self.leave("nobody answered in time");
        }
        if !self.rules.keeps(Rule::AtomicAdmission) && self.state != State::Looking {
            self.state = State::Looking;
            return Effect::Store(Verb::Read);
        }
        self.state = State::Asking;
        match self.verb() {
            Some(verb) => Effect::Store(verb),
            None => Effect::Done(Outcome::Unavailable("no sandbox was fit for use")),
        }
    }

    fn leave(&mut self, why: &'static str) -> Effect {
        self.state = State::Leaving(why);
        match self.slot() {
            Some(slot) => Effect::Store(Verb::LeaveQueue { slot }),
            None => Effect::Done(Outcome::Unavailable(why)),
        }
    }

    fn again(&mut self) -> Effect {
        self.state = State::Idle;
        Effect::Sleep(self.rules.settings().wait_poll)
    }

    fn after_ask(&mut self, answer: Result<Answer, StoreError>, now: Timestamp) -> Effect {
        match answer {
            Ok(Answer::Granted(grant)) => {
                let (sandbox, generation) = (grant.sandbox.clone(), grant.generation);
                self.grant = Some((grant, Reused::Yes));
                // Its owner is back: whatever slept wakes before it is used, and its node learns the
                // new generation before the caller does.
                self.state = State::Waking;
                Effect::Platform(Call::Wake(sandbox, generation))
            }
            Ok(Answer::MakeSandbox { slot, generation }) => {
                // Whoever slept since may find its slot settled and given to another: nothing was
                // sent yet, so nothing is in doubt.
                if now.since(self.asked_at) >= self.rules.settings().create_deadline {
                    self.state = State::Returning;
                    let maker = self.replica.clone();
                    return Effect::Store(Verb::ReturnSlot { slot, maker });
                }
                self.create(slot, generation)
            }
            Ok(Answer::CapacityExceeded(limit)) => Effect::Done(Outcome::CapacityExceeded(limit)),
            Ok(Answer::Stale { current }) => Effect::Done(Outcome::Stale { current }),
            Ok(Answer::UnknownBucket) => Effect::Done(Outcome::Unavailable("unknown bucket")),
            // Waiting, being made, settling, or no answer: asking again is the same request.
            _ => self.again(),
        }
    }

    fn create(&mut self, slot: SlotId, generation: Generation) -> Effect {
        self.generation = generation;
        self.state = State::Creating;
        Effect::Platform(Call::Create {
            slot,
            bucket: self.request.bucket.clone(),
            owner: self.request.owner.clone(),
            generation,
            template: self.request.template.clone(),
        })
    }

    fn after_create(&mut self, result: Result<Reply, CallError>) -> Effect {
        let Some(slot) = self.slot() else {
            return Effect::Done(Outcome::Unavailable("no slot"));
        };
        match result {
            Ok(Reply::Created { sandbox, ends_at }) => self.bind(sandbox, ends_at),
            // Without an answer it may still come to be; only its name can tell.
            Err(CallError::NoAnswer) if self.rules.keeps(Rule::DoubtKeepsSlot) => {
                self.state = State::Finding;
                Effect::Platform(Call::FindBySlot(slot))
            }
            _ => {
                self.state = State::Returning;
                Effect::Store(Verb::ReturnSlot {
                    slot,
                    maker: self.replica.clone(),
                })
            }
        }
    }

    fn bind(&mut self, sandbox: SandboxId, ends_at: Timestamp) -> Effect {
        let Some(slot) = self.slot() else {
            return Effect::Done(Outcome::Unavailable("no slot"));
        };
        self.made = Some((sandbox.clone(), ends_at));
        self.state = State::Binding;
        let generation = self.generation;
        Effect::Store(Verb::Bind {
            slot,
            generation,
            sandbox,
            ends_at,
        })
    }

    fn after_bind(&mut self, answer: Result<Answer, StoreError>) -> Effect {
        match answer {
            Ok(Answer::Granted(grant)) => {
                self.grant = Some((grant, Reused::No));
                self.probe_now()
            }
            // The books do not know this slot any more: nobody was ever given the sandbox.
            Ok(Answer::Unknown) => match &self.made {
                Some((sandbox, _)) => {
                    self.state = State::DroppingUnbound;
                    Effect::Platform(Call::Kill(sandbox.clone(), self.generation))
                }
                None => Effect::Done(Outcome::Unavailable("the slot is gone")),
            },
            Ok(Answer::Stale { current }) => Effect::Done(Outcome::Stale { current }),
            Ok(_) => Effect::Done(Outcome::Unavailable("released while it was made")),
            Err(_) if self.bind_tries < self.rules.settings().probe_tries => {
                self.bind_tries += 1;
                match self.made.clone() {
                    Some((sandbox, ends_at)) => self.bind(sandbox, ends_at),
                    None => Effect::Done(Outcome::Unavailable("the store did not answer")),
                }
            }
            Err(_) => Effect::Done(Outcome::Unavailable("the store did not answer")),
        }
    }

    fn probe_now(&mut self) -> Effect {
        match &self.grant {
            Some((grant, _)) => {
                self.state = State::Probing;
                Effect::Platform(Call::Probe(grant.sandbox.clone()))
            }
            None => Effect::Done(Outcome::Unavailable("there is nothing to probe")),
        }
    }

    fn after_probe(&mut self, result: Result<Reply, CallError>) -> Effect {
        if result.is_ok() {
            return match self.grant.take() {
                Some((grant, reused)) => Effect::Done(Outcome::Leased { grant, reused }),
                None => Effect::Done(Outcome::Unavailable("there is nothing to use")),
            };
        }
        if result == Err(CallError::NotFound) {
            return self.discard();
        }
        match self.probe.failed(&self.rules) {
            Gate::TryAgain => self.probe_now(),
            Gate::NextRound => {
                self.state = State::BetweenRounds;
                Effect::Sleep(self.rules.settings().wait_poll)
            }
            Gate::Unfit => self.discard(),
        }
    }

    /// Never run on a sandbox whose use is uncertain (R-G9).
    fn discard(&mut self) -> Effect {
        match &self.grant {
            Some((grant, _)) => {
                self.state = State::Discarding;
                let (slot, generation) = (grant.slot.clone(), grant.generation);
                Effect::Store(Verb::Discard { slot, generation })
            }
            None => Effect::Done(Outcome::Unavailable("there is nothing to discard")),
        }
    }

    fn rebuild(&mut self, now: Timestamp) -> Effect {
        if self.rebuilds >= self.rules.settings().rebuilds_max as usize {
            return Effect::Done(Outcome::Unavailable("no sandbox was fit for use"));
        }
        self.rebuilds += 1;
        self.grant = None;
        self.made = None;
        self.probe = HealthGate::default();
        self.asking_since = None;
        self.state = State::Idle;
        self.ask(now)
    }

    /// What admission looks like when it is not one step.
    #[cfg(feature = "mutations")]
    fn after_look(&mut self, answer: Result<Answer, StoreError>, now: Timestamp) -> Effect {
        let Ok(Answer::Books(view)) = answer else {
            return self.again();
        };
        let mine = |r: &&crate::record::Record| r.bucket == self.request.bucket;
        let has_one = view
            .records
            .iter()
            .filter(mine)
            .any(|r| r.owner == self.request.owner);
        let used = view
            .records
            .iter()
            .filter(mine)
            .filter(|r| r.is_counted())
            .count();
        let quota = view
            .buckets
            .get(&self.request.bucket)
            .map_or(0, |p| p.quota as usize);
        self.state = State::Looking;
        if has_one || used >= quota {
            return self.ask(now);
        }
        self.state = State::Asking;
        match self.verb() {
            Some(verb) => Effect::Store(Verb::Unchecked(Box::new(verb))),
            None => Effect::Done(Outcome::Unavailable("no slot")),
        }
    }

    #[cfg(not(feature = "mutations"))]
    fn after_look(&mut self, _: Result<Answer, StoreError>, _: Timestamp) -> Effect {
        self.again()
    }
}

impl Task for Acquire {
    fn step(&mut self, input: Input, now: Timestamp) -> Effect {
        match (self.state, input) {
            (State::Idle, _) => self.ask(now),
            (State::Looking, Input::Store(answer)) => self.after_look(answer, now),
            (State::Asking, Input::Store(answer)) => self.after_ask(answer, now),
            (State::Creating, Input::Platform(result)) => self.after_create(result),
            (State::Finding, Input::Platform(Ok(Reply::Found(Some(found))))) => {
                self.bind(found.sandbox, found.ends_at)
            }
            // The slot stays taken until the reclaimer has settled it.
            (State::Finding, _) => Effect::Done(Outcome::Unavailable("the create is in doubt")),
            (State::Returning, _) => Effect::Done(Outcome::Unavailable("it could not be made")),
            (State::Binding, Input::Store(answer)) => self.after_bind(answer),
            (State::DroppingUnbound, _) => Effect::Done(Outcome::Unavailable("the slot is gone")),
            (State::Waking, Input::Platform(Err(CallError::NotFound))) => self.discard(),
            (State::Waking, _) | (State::BetweenRounds, _) => self.probe_now(),
            (State::Probing, Input::Platform(result)) => self.after_probe(result),
            (State::Discarding, Input::Store(Ok(Answer::Done | Answer::Unknown))) => {
                self.rebuild(now)
            }
            (State::Discarding, Input::Store(Ok(Answer::Stale { current }))) => {
                Effect::Done(Outcome::Stale { current })
            }
            (State::Leaving(why), _) => Effect::Done(Outcome::Unavailable(why)),
            _ => Effect::Done(Outcome::Unavailable("the store did not answer")),
        }
    }
}
