//! The callers: owners that lease, work, take over, forget to release, and release too late.

use sandhold_governor::{
    books::{Answer, Grant, Keep, Verb},
    ids::{Bucket, LeaseId, OwnerId},
    tasks::{Acquire, Outcome, Request, Reused, RunLoop, RunOf},
};
use sandhold_types::Timestamp;

use crate::world::{Event, Job, To, World};

/// An owner: it begins one session after the other, and sometimes one before the other is over.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
    /// Its name.
    pub id: OwnerId,
    /// Where it counts.
    pub bucket: Bucket,
    /// How many sessions it began.
    pub begun: u64,
}

/// How a session means to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It releases.
    Release,
    /// It is never heard again.
    Vanish,
    /// It is never heard again, but for a release after so many ms.
    LateRelease(u64),
    /// It pauses its sandbox and is not heard again.
    Pause,
}

/// Where a session is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It asked for a sandbox, at this true time.
    Asking(u64),
    /// It has one.
    Holding(Grant),
    /// Its sandbox is used by a run.
    Running,
    /// It is over.
    Ended,
}

/// A caller with a lease.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    /// Whose.
    pub owner: usize,
    /// Its lease.
    pub lease: LeaseId,
    /// Where it is.
    pub phase: Phase,
    /// How it means to end, and when (true ms).
    pub exit: (Exit, u64),
    /// The speed of its clock, in per mille.
    rate: u64,
    asleep_until: u64,
    /// By its own clock: when the last confirmed beat was sent, and the last one.
    confirmed_ms: u64,
    sent_ms: u64,
    releases: u32,
}

const TICK_MS: u64 = 5_000;
const PATIENCE_MS: u64 = 150_000;

impl World {
    /// An owner begins a session, and plans its next one.
    pub(crate) fn owner_wakes(&mut self, owner: usize) {
        if self.healed {
            return;
        }
        let next = self.rng.between(5_000, self.profile.owner_pause_ms);
        self.after(next, Event::OwnerWakes(owner));
        let busy = self
            .sessions
            .iter()
            .any(|s| s.owner == owner && s.phase != Phase::Ended);
        if busy && !self.rng.chance(self.profile.overlap) {
            return;
        }
        self.begin_session(owner);
    }

    /// Begins a session of an owner and returns its number.
    pub(crate) fn begin_session(&mut self, owner: usize) -> usize {
        let number = self.owners[owner].begun;
        self.owners[owner].begun += 1;
        let lease = name(&format!("{}-{number}", self.owners[owner].id));
        let (slow, fast) = self.faults.clock_range();
        let exit = match self.rng.between(0, 10) {
            0..4 => Exit::Release,
            4..6 => Exit::Vanish,
            6..8 => Exit::LateRelease(self.rng.between(1_000, 900_000)),
            _ => Exit::Pause,
        };
        let until = self.now + self.rng.between(10_000, self.profile.session_ms);
        let session = Session {
            owner,
            lease,
            phase: Phase::Asking(self.now),
            exit: (exit, until),
            rate: self.rng.between(slow, fast),
            asleep_until: 0,
            confirmed_ms: 0,
            sent_ms: 0,
            releases: 0,
        };
        self.sessions.push(session);
        let id = self.sessions.len() - 1;
        self.ask_for_sandbox(id);
        self.after(TICK_MS, Event::SessionTick(id));
        id
    }

    fn ask_for_sandbox(&mut self, id: usize) {
        let session = self.sessions[id].clone();
        let owner = self.owners[session.owner].clone();
        let slots = (0..3).map(|n| name(&format!("slot-{id}-{n}"))).collect();
        let request = Request {
            slots,
            bucket: owner.bucket,
            owner: owner.id,
            lease: session.lease,
            template: name("main"),
            ttl: None,
        };
        let Some(replica) = self.any_replica() else {
            return;
        };
        let by = self.replicas[replica].id.clone();
        let task = Acquire::new(request, by, self.rules.clone());
        self.start(replica, Box::new(task), Job::Acquire(id));
    }

    fn local_ms(&self, id: usize) -> u64 {
        self.now * self.sessions[id].rate / 1000
    }

    /// The answer to a session's request for a sandbox.
    pub(crate) fn session_has(&mut self, id: usize, outcome: Outcome, replica: usize) {
        if !matches!(self.sessions[id].phase, Phase::Asking(_)) {
            return;
        }
        let Outcome::Leased { grant, reused } = outcome else {
            self.sessions[id].phase = Phase::Ended;
            return;
        };
        self.leased += 1;
        let local = self.local_ms(id);
        self.sessions[id].confirmed_ms = local;
        self.sessions[id].sent_ms = local;
        if reused == Reused::No && self.rng.chance(self.profile.runs) && !self.healed {
            self.sessions[id].phase = Phase::Running;
            let keep = if self.rng.chance(500) {
                Keep::Nothing
            } else {
                Keep::Sandbox
            };
            let timeout = std::time::Duration::from_secs(self.rng.between(30, 900));
            let of = RunOf {
                slot: grant.slot,
                sandbox: grant.sandbox,
                generation: grant.generation,
                run: name(&format!("run-{id}")),
                replica: self.replicas[replica].id.clone(),
                timeout,
                keep,
            };
            let task = RunLoop::new(of, self.rules.clone());
            self.start(replica, Box::new(task), Job::Run(Some(id)));
        } else {
            self.sessions[id].phase = Phase::Holding(grant);
        }
    }

    /// A session does what is due.
    pub(crate) fn session_tick(&mut self, id: usize) {
        let session = self.sessions[id].clone();
        if session.phase == Phase::Ended {
            return;
        }
        let tick = TICK_MS * 1000 / session.rate.max(1);
        if self.now < session.asleep_until {
            self.after(session.asleep_until - self.now + 1, Event::SessionTick(id));
            return;
        }
        if self.rng.chance(self.faults.sleep) {
            self.sessions[id].asleep_until = self.now + self.rng.between(10_000, 600_000);
        }
        self.after(tick, Event::SessionTick(id));
        match session.phase {
            Phase::Asking(since) if self.now - since > PATIENCE_MS => {
                self.sessions[id].phase = Phase::Ended;
            }
            Phase::Holding(grant) => self.session_works(id, &grant),
            _ => {}
        }
    }

    fn session_works(&mut self, id: usize, grant: &Grant) {
        let local = self.local_ms(id);
        let deadline = u64::try_from(self.rules.holder_deadline().as_millis()).unwrap_or(0);
        if local - self.sessions[id].confirmed_ms >= deadline {
            // Better no holder than two.
            self.sessions[id].phase = Phase::Ended;
            return;
        }
        let (exit, until) = self.sessions[id].exit;
        if self.now >= until {
            self.session_ends(id, exit, grant);
            return;
        }
        if self.rng.chance(400) {
            let at = self.rng.between(5, 2_000);
            self.after(
                at,
                Event::Write {
                    session: id,
                    grant: Box::new(grant.clone()),
                },
            );
        }
        if local - self.sessions[id].sent_ms < 30_000 {
            return;
        }
        self.sessions[id].sent_ms = local;
        let owner = self.owners[self.sessions[id].owner].clone();
        let ends_at = self.extended_life(grant);
        let verb = Verb::Heartbeat {
            bucket: owner.bucket,
            owner: owner.id,
            lease: self.sessions[id].lease.clone(),
            generation: grant.generation,
            ends_at,
        };
        self.send_to_store(
            verb,
            To::Session {
                session: id,
                sent_ms: local,
            },
        );
    }

    /// A heartbeat extends the life of the sandbox on its platform, most of the time.
    fn extended_life(&mut self, grant: &Grant) -> Option<Timestamp> {
        if self.rng.chance(self.profile.forgets_to_extend) {
            return None;
        }
        let ends_at = self.time(self.now + self.profile.life_ms);
        let here = self.platform.here.get_mut(&grant.sandbox)?;
        here.ends_at = here.ends_at.max(ends_at);
        Some(here.ends_at)
    }

    fn session_ends(&mut self, id: usize, exit: Exit, grant: &Grant) {
        self.sessions[id].phase = Phase::Ended;
        match exit {
            Exit::Release => self.release(id),
            Exit::Vanish => {}
            Exit::LateRelease(later) => self.after(later, Event::Release(id)),
            Exit::Pause => {
                let now = self.now;
                if let Some(here) = self.platform.here.get_mut(&grant.sandbox)
                    && here.generation == grant.generation
                {
                    here.paused_since = here.paused_since.or(Some(now));
                    // Who wakes and sleeps again between two looks is not seen to have woken.
                    here.asleep_first = here.asleep_first.or(here.paused_since);
                }
            }
        }
    }

    /// Sends a release; again, a few times, if nobody answers.
    pub(crate) fn release(&mut self, id: usize) {
        self.sessions[id].releases += 1;
        let owner = self.owners[self.sessions[id].owner].clone();
        let lease = self.sessions[id].lease.clone();
        let verb = Verb::Release {
            bucket: owner.bucket,
            owner: owner.id,
            lease,
        };
        self.send_to_store(
            verb,
            To::Session {
                session: id,
                sent_ms: 0,
            },
        );
    }

    /// The store's answer to a beat or a release.
    pub(crate) fn session_hears(&mut self, id: usize, sent_ms: u64, answer: Option<Answer>) {
        match answer {
            Some(Answer::Granted(grant)) => {
                self.sessions[id].confirmed_ms = self.sessions[id].confirmed_ms.max(sent_ms);
                if let Phase::Holding(held) = &mut self.sessions[id].phase {
                    *held = grant;
                }
            }
            Some(Answer::Released { slot: Some(_) }) => self.urge_someone(),
            Some(Answer::Released { slot: None }) => {}
            Some(Answer::Stale { .. } | Answer::Unknown) => self.sessions[id].phase = Phase::Ended,
            None if sent_ms == 0 && self.sessions[id].releases < 3 => {
                self.after(1_000, Event::Release(id));
            }
            _ => {}
        }
    }

    /// A write inside the sandbox arrives.
    pub(crate) fn session_writes(&mut self, session: usize, grant: &Grant) {
        let fence = self.fence();
        let dies = self.rng.chance(self.faults.dies);
        if dies && self.platform.here.remove(&grant.sandbox).is_some() {
            self.checker.died(&grant.sandbox);
            return;
        }
        let accepted = self.platform.write(&grant.sandbox, grant.generation, fence);
        if accepted && !self.faults.unfenced {
            self.checker
                .wrote(&grant.sandbox, grant.generation, session);
        }
    }
}

/// A name that is valid by construction.
pub(crate) fn name<T: std::str::FromStr>(text: &str) -> T
where
    T::Err: std::fmt::Debug,
{
    // All names in the simulator are built from short ASCII words and numbers.
    #[allow(clippy::expect_used)]
    text.parse().expect("names of the simulator are valid")
}
