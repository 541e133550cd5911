//! The ways to the store and to the platform, and what may happen on them: lost, late, refused, twice.

use sandhold_governor::{
    Call, CallError, CallKind, Reply, StoreError,
    books::{Answer, Books, Verb},
    tasks::Input,
};

use super::{Event, To, World};
use crate::{check::Checker, platform::Birth};

impl World {
    /// Sends a verb to the store, with whatever may happen on the way.
    pub(crate) fn send_to_store(&mut self, verb: Verb, to: To) {
        let latency = self.rng.between(1, 20);
        if self.rng.chance(self.faults.store_unreachable) {
            self.answer_from_store(to, Err(StoreError::Unavailable), latency);
            return;
        }
        let lost = self.rng.chance(self.faults.store_reply_lost);
        self.after(
            latency,
            Event::StoreStep {
                verb: Box::new(verb),
                to,
                lost,
            },
        );
    }

    pub(super) fn store_step(&mut self, verb: Verb, to: To, lost: bool) {
        let answer = self.store_direct(verb, lost);
        let latency = if lost { 2_000 } else { self.rng.between(1, 20) };
        self.answer_from_store(to, answer, latency);
    }

    /// One step on the books, and the observer looks.
    pub(crate) fn store_direct(&mut self, verb: Verb, lost: bool) -> Result<Answer, StoreError> {
        let now = self.store_now();
        let looked_at = match &verb {
            Verb::NoteSeen { slot, .. } => Some(slot.clone()),
            _ => None,
        };
        let beats = |books: &Books| {
            let slot = looked_at.as_ref()?;
            Some(Checker::beats(books.records().find(|r| r.slot == *slot)))
        };
        let before = beats(&self.books);
        let step = self.books.step(verb.clone(), now);
        if let (Some(before), Some(after)) = (before, beats(&self.books)) {
            self.checker.look(before, after);
        }
        if !matches!(verb, Verb::Read) {
            self.note(&(&verb, &step.answer), "store");
        }
        let mut checker = std::mem::replace(&mut self.checker, Checker::new(self.rules.clone()));
        checker.step(&verb, &step, self.scene());
        self.checker = checker;
        if lost {
            Err(StoreError::NoAnswer)
        } else {
            Ok(step.answer)
        }
    }

    fn answer_from_store(&mut self, to: To, answer: Result<Answer, StoreError>, latency: u64) {
        let event = match to {
            To::Task {
                replica,
                life,
                task,
            } => {
                let input = Box::new(Input::Store(answer));
                Event::Input {
                    replica,
                    life,
                    task,
                    input,
                }
            }
            To::Session { session, sent_ms } => {
                let answer = answer.ok().map(Box::new);
                Event::SessionAnswer {
                    session,
                    sent_ms,
                    answer,
                }
            }
        };
        self.after(latency, event);
    }

    /// A call reaches the platform: what becomes of it?
    pub(super) fn call_arrives(&mut self, call: Call, to: (usize, u32, u64)) {
        let kind = call.kind();
        let is_write = !matches!(
            call,
            Call::List | Call::Ask(_) | Call::FindBySlot(_) | Call::Probe(_) | Call::ReadExit(..)
        );
        // Whoever waits gives up by its own clock after 30 s.
        let deadline = 30_000 * 1000 / self.replicas[to.0].rate;
        let no_answer = |world: &mut Self| {
            let result = Box::new(Err(CallError::NoAnswer));
            world.after(deadline, Event::CallReply { to, kind, result });
        };
        if kind != CallKind::Other
            && let Some(most) = self.profile.congestion
        {
            self.writes += 1;
            if self.writes > most {
                self.after(30_000, Event::Uncongest);
                return no_answer(self);
            }
            self.after(self.profile.service_ms, Event::Uncongest);
        }
        if is_write && self.now < self.outage_until {
            self.unanswered += 1;
            return no_answer(self);
        }
        let listing = matches!(call, Call::List);
        let faults = self.faults.clone();
        if is_write && self.rng.chance(faults.write_lost) {
            return no_answer(self);
        }
        if is_write && self.rng.chance(faults.write_unanswered) {
            let _unheard = self.carry_out(&call);
            return no_answer(self);
        }
        if is_write && self.rng.chance(faults.write_late) {
            // What is condemned may be deleted very late; all else is over when it is settled.
            let condemned = matches!(call, Call::Kill(..)) && faults.failover_ms == 0;
            let most = if condemned {
                faults.late_ms_max * 10
            } else {
                faults.late_ms_max
            };
            let later = self.rng.between(1_000, most);
            let call = Box::new(call);
            self.after(
                later,
                Event::CallLate {
                    call,
                    congested: false,
                },
            );
            return no_answer(self);
        }
        if !is_write && !listing && self.rng.chance(faults.ask_lost) {
            return no_answer(self);
        }
        let refused = is_write && self.rng.chance(faults.write_refused);
        let asleep = matches!(call, Call::Wake(..)) && self.rng.chance(faults.wake_fails);
        let result = if refused || asleep {
            Err(CallError::Refused)
        } else if listing {
            self.listing()
        } else {
            self.carry_out(&call)
        };
        let service = if kind == CallKind::Other {
            300
        } else {
            self.profile.service_ms
        };
        let latency = match self.profile.create_ms {
            Some(ms) if kind == CallKind::Create => ms,
            _ => self.rng.between(20, service),
        };
        self.after(
            latency,
            Event::CallReply {
                to,
                kind,
                result: Box::new(result),
            },
        );
    }

    fn listing(&mut self) -> Result<Reply, CallError> {
        let faults = self.faults.clone();
        if self.rng.chance(faults.listing_fails) {
            return Err(CallError::NoAnswer);
        }
        if self.rng.chance(faults.listing_empty) {
            return Ok(Reply::Listing(Vec::new()));
        }
        if faults.listing_stale_ms > 0 && self.rng.chance(500) {
            let oldest = self
                .now
                .saturating_sub(self.rng.between(0, faults.listing_stale_ms));
            let past = self.platform.past.iter().find(|(at, _)| *at >= oldest);
            if let Some((_, listing)) = past {
                return Ok(Reply::Listing(listing.clone()));
            }
        }
        let mut reply = self.carry_out(&Call::List);
        if let Ok(Reply::Listing(listing)) = &mut reply
            && self.rng.chance(faults.listing_partial)
        {
            let rng = &mut self.rng;
            listing.retain(|_| !rng.chance(400));
        }
        reply
    }

    /// The platform carries out a call, and the observer looks.
    pub(crate) fn carry_out(&mut self, call: &Call) -> Result<Reply, CallError> {
        let birth = Birth {
            fit: !self.rng.chance(self.faults.unfit),
            ends_at: self.time(self.now + self.profile.life_ms),
            process_ms: self.rng.between(10_000, 600_000),
        };
        let fence = self.fence();
        let result = self
            .platform
            .carry_out(call, birth, &self.faults, fence, self.now);
        if !matches!(
            call,
            Call::List | Call::Ask(_) | Call::ReadExit(..) | Call::ReadArtifacts(..)
        ) {
            self.note(&(call, &result), "platform");
        }
        let mut checker = std::mem::replace(&mut self.checker, Checker::new(self.rules.clone()));
        match (call, &result) {
            (Call::Create { slot, bucket, .. }, Ok(_)) => {
                checker.born(slot, bucket, self.scene());
            }
            (Call::Kill(sandbox, _), Ok(_)) => {
                self.kills += 1;
                checker.killed(sandbox, self.now);
            }
            (Call::Wake(sandbox, _), Ok(_)) => self.note_awake(sandbox, &mut checker),
            _ => {}
        }
        self.checker = checker;
        result
    }

    /// Counts what is awake only to be deleted.
    fn note_awake(&mut self, sandbox: &sandhold_types::SandboxId, checker: &mut Checker) {
        let condemned = |id: &sandhold_types::SandboxId| {
            let mut records = self.books.records();
            records.any(|r| r.sandbox.as_ref() == Some(id) && r.condemned.is_some())
        };
        if !condemned(sandbox) {
            return;
        }
        if let Some(here) = self.platform.here.get_mut(sandbox) {
            here.woken = true;
        }
        let woken = self
            .platform
            .here
            .values()
            .filter(|h| h.woken && h.paused_since.is_none());
        checker.awake(woken.count());
    }
}
