//! A world: replicas, a store, a platform, owners, and one clock that only the world can see.
//!
//! ```text
//!   heap of (true ms, order, event) ─▶ World::handle ─▶ more events
//!      replica: task.step(input, its own clock) ─▶ effect ─▶ arrives later, or never, or twice as late
//!      store:   Books::step, one at a time, by the store's clock
//!      platform: Scripted, by true time
//!   after each event: the checkers
//! ```
//!
//! Determinism: one generator, ordered maps, no threads, no clock. The same seed gives the same trace.

mod calls;
mod profile;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
    fmt::Write as _,
};

use sandhold_governor::{
    Call, CallError, CallKind, Reply,
    books::{Answer, Books, BucketPolicy, Grant, Stage, Verb},
    colour::Retention,
    ids::{Bucket, ReplicaId},
    reclaimer::Alarm,
    rules::{Rule, Rules},
    tasks::{Effect, Input},
};
use sandhold_types::Timestamp;

use crate::{
    check::{Checker, Remembered, Scene},
    faults::Faults,
    platform::Scripted,
    replica::Replica,
    rng::Rng,
    session::{Owner, Phase, Session, name},
};

pub use self::profile::Profile;
pub(crate) use crate::replica::Job;

/// To whom an answer goes.
#[derive(Debug, Clone)]
pub(crate) enum To {
    Task {
        replica: usize,
        life: u32,
        task: u64,
    },
    Session {
        session: usize,
        sent_ms: u64,
    },
}

/// What happens.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    Input {
        replica: usize,
        life: u32,
        task: u64,
        input: Box<Input>,
    },
    Dispatch {
        replica: usize,
        life: u32,
        task: u64,
        effect: Box<Effect>,
    },
    StoreStep {
        verb: Box<Verb>,
        to: To,
        lost: bool,
    },
    CallArrives {
        call: Box<Call>,
        to: (usize, u32, u64),
    },
    CallLate {
        call: Box<Call>,
        congested: bool,
    },
    CallReply {
        to: (usize, u32, u64),
        kind: CallKind,
        result: Box<Result<Reply, CallError>>,
    },
    Uncongest,
    CycleDue {
        replica: usize,
        life: u32,
    },
    Restart(usize),
    OwnerWakes(usize),
    SessionTick(usize),
    SessionAnswer {
        session: usize,
        sent_ms: u64,
        answer: Option<Box<Answer>>,
    },
    Write {
        session: usize,
        grant: Box<Grant>,
    },
    Release(usize),
    Snapshot,
    Failover,
    ClockStep,
    Remember,
    Nap,
    Heal,
}

/// How a world ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The first thing that must not be.
    pub violation: Option<String>,
    /// A hash of the whole trace.
    pub trace_hash: u64,
    /// The end of the trace, or all of it.
    pub trace: Vec<String>,
    /// How many events happened.
    pub events: u64,
    /// How many requests for a sandbox were granted.
    pub leased: u64,
    /// How many deletes reached the platform.
    pub kills: u64,
    /// Every alarm that was raised, by name.
    pub alarms: BTreeMap<&'static str, u64>,
}

/// A world.
#[derive(Debug)]
pub struct World {
    pub(crate) rng: Rng,
    pub(crate) now: u64,
    pub(crate) rules: Rules,
    /// What goes wrong now.
    pub faults: Faults,
    pub(crate) profile: Profile,
    /// The books.
    pub books: Books,
    /// The platform.
    pub platform: Scripted,
    pub(crate) replicas: Vec<Replica>,
    pub(crate) owners: Vec<Owner>,
    pub(crate) sessions: Vec<Session>,
    pub(crate) checker: Checker,
    pub(crate) healed: bool,
    pub(crate) leased: u64,
    policies: BTreeMap<Bucket, (u32, Retention)>,
    store_ahead_ms: u64,
    snapshot: Option<(Books, Remembered)>,
    /// The writes the platform is busy with.
    writes: u32,
    /// How many writes were sent while the platform was out.
    pub unanswered: u64,
    /// Until when all writes are left without an answer.
    pub outage_until: u64,
    heap: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    order: u64,
    handled: u64,
    kills: u64,
    alarms: BTreeMap<&'static str, u64>,
    trace: VecDeque<String>,
    trace_all: bool,
    hash: u64,
}

const TRACE_TAIL: usize = 400;
const EPOCH_MS: u64 = 1_760_000_000_000;

impl World {
    /// A world whose shape and faults are drawn from its seed.
    #[must_use]
    pub fn from_seed(seed: u64, rules: Rules) -> Self {
        let mut rng = Rng::new(seed);
        let profile = Profile::draw(&mut rng);
        let faults = Faults::draw(&mut rng);
        let mut world = Self::new(rng, rules, profile, faults);
        world.begin();
        world
    }

    /// A world of this shape in which nothing has happened.
    #[must_use]
    pub fn new(rng: Rng, rules: Rules, profile: Profile, faults: Faults) -> Self {
        let mut books = Books::new(rules.clone(), profile.global_cap);
        let mut policies = BTreeMap::new();
        let mut owners = Vec::new();
        for (n, (quota, retention)) in profile.buckets.iter().copied().enumerate() {
            let bucket = Bucket {
                namespace: name(&format!("b{n}")),
                env: name("prod"),
            };
            let policy = BucketPolicy::new(quota, retention);
            books.step(
                Verb::SetBucket {
                    bucket: bucket.clone(),
                    policy,
                },
                Timestamp::from_unix_ms(EPOCH_MS),
            );
            policies.insert(bucket.clone(), (quota, retention));
            for k in 0..profile.owners {
                let id = name(&format!("{bucket}:p:{k}"));
                owners.push(Owner {
                    id,
                    bucket: bucket.clone(),
                    begun: 0,
                });
            }
        }
        let mut world = Self {
            rng,
            now: 0,
            checker: Checker::new(rules.clone()),
            rules,
            faults,
            books,
            platform: Scripted::default(),
            replicas: Vec::new(),
            owners,
            sessions: Vec::new(),
            healed: false,
            leased: 0,
            policies,
            store_ahead_ms: 0,
            snapshot: None,
            writes: 0,
            outage_until: 0,
            unanswered: 0,
            heap: BinaryHeap::new(),
            events: BTreeMap::new(),
            order: 0,
            handled: 0,
            kills: 0,
            alarms: BTreeMap::new(),
            trace: VecDeque::new(),
            trace_all: false,
            hash: 0xcbf2_9ce4_8422_2325,
            profile,
        };
        if world.faults.clock_step_ms > 0 {
            world.checker.clock_may_step();
        }
        for n in 0..world.profile.replicas {
            world.add_replica(n);
        }
        world
    }

    /// Keeps the whole trace.
    pub fn trace_everything(&mut self) {
        self.trace_all = true;
    }

    /// Sets owners, faults and the end of faults going.
    pub fn begin(&mut self) {
        for owner in 0..self.owners.len() {
            let at = self.rng.between(0, 60_000);
            self.after(at, Event::OwnerWakes(owner));
        }
        let fault_ms = self.profile.fault_ms;
        if self.faults.failover_ms > 0 {
            let at = self.rng.between(fault_ms / 4, fault_ms * 3 / 4);
            self.after(at, Event::Snapshot);
            self.after(at + self.faults.failover_ms, Event::Failover);
        }
        if self.faults.clock_step_ms > 0 {
            let at = self.rng.between(fault_ms / 4, fault_ms);
            self.after(at, Event::ClockStep);
        }
        if self.faults.listing_stale_ms > 0 {
            self.after(1_000, Event::Remember);
        }
        if self.faults.naps {
            self.after(20_000, Event::Nap);
        }
        self.after(fault_ms, Event::Heal);
    }

    pub(crate) fn after(&mut self, ms: u64, event: Event) {
        self.order += 1;
        self.heap.push(Reverse((self.now + ms, self.order)));
        self.events.insert(self.order, event);
    }

    /// A moment as everybody with a right clock writes it.
    pub(crate) fn time(&self, true_ms: u64) -> Timestamp {
        Timestamp::from_unix_ms(EPOCH_MS + true_ms)
    }

    /// The store's clock.
    #[must_use]
    pub fn store_now(&self) -> Timestamp {
        self.time(self.now + self.store_ahead_ms)
    }

    /// True ms since the world began.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.now
    }

    pub(crate) fn fence(&self) -> bool {
        !self.faults.unfenced && self.rules.missing() != Some(Rule::FenceAtNode)
    }

    /// Runs until `until` (true ms) or the first violation.
    pub fn run_until(&mut self, until: u64) {
        while self.checker.violation().is_none() {
            let Some(Reverse((at, order))) = self.heap.peek().copied() else {
                break;
            };
            if at > until {
                break;
            }
            self.heap.pop();
            let Some(event) = self.events.remove(&order) else {
                continue;
            };
            self.now = at;
            self.handled += 1;
            self.handle(event);
        }
        self.now = self.now.max(until);
    }

    /// Runs to the end: faults, healing, and what must be true afterwards.
    pub fn run(mut self) -> Report {
        self.run_until(self.profile.fault_ms + self.profile.heal_ms);
        self.check_fixpoint();
        self.report()
    }

    /// What happened so far.
    #[must_use]
    pub fn report(self) -> Report {
        Report {
            violation: self.checker.violation().map(str::to_owned),
            trace_hash: self.hash,
            trace: self.trace.into(),
            events: self.handled,
            leased: self.leased,
            kills: self.kills,
            alarms: self.alarms,
        }
    }

    pub(crate) fn note(&mut self, line: &dyn std::fmt::Debug, what: &str) {
        let mut text = String::with_capacity(120);
        let _ = write!(text, "{:>9} {what} {line:?}", self.now);
        for byte in text.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if !self.trace_all && self.trace.len() >= TRACE_TAIL {
            self.trace.pop_front();
        }
        self.trace.push_back(text);
    }

    pub(crate) fn alarm(&mut self, alarm: &Alarm) {
        let name = match alarm {
            Alarm::ZombiesKept { .. } => "zombies-kept",
            Alarm::QuotaIdle { .. } => "quota-idle",
            Alarm::RoundSkipped { .. } => "round-skipped",
            Alarm::Reconciling => "reconciling",
            Alarm::Strays { .. } => "strays",
            Alarm::KillsFailing { .. } => "kills-failing",
            Alarm::WrittenOff { .. } => "written-off",
            Alarm::BlastRadius { .. } => "blast-radius",
            Alarm::Settling => "settling",
        };
        *self.alarms.entry(name).or_default() += 1;
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Input {
                replica,
                life,
                task,
                input,
            } => {
                self.deliver(replica, life, task, *input);
            }
            Event::Dispatch {
                replica,
                life,
                task,
                effect,
            } => {
                if !self.is_alive(replica, life) {
                } else if matches!(*effect, Effect::Platform(Call::Create { .. })) {
                    // The deadline of a call travels with it; a node refuses what comes after it.
                    let input = Input::Platform(Err(CallError::Refused));
                    self.deliver(replica, life, task, input);
                } else {
                    self.dispatch(replica, task, *effect);
                }
            }
            Event::StoreStep { verb, to, lost } => self.store_step(*verb, to, lost),
            Event::CallArrives { call, to } => self.call_arrives(*call, to),
            Event::CallLate { call, congested } => {
                if congested {
                    self.writes = self.writes.saturating_sub(1);
                }
                let _unheard = self.carry_out(&call);
            }
            Event::CallReply { to, kind, result } => self.call_reply(to, kind, *result),
            Event::Uncongest => self.writes = self.writes.saturating_sub(1),
            Event::CycleDue { replica, life } => self.cycle_due(replica, life),
            Event::Restart(replica) => self.restart(replica),
            Event::OwnerWakes(owner) => self.owner_wakes(owner),
            Event::SessionTick(session) => self.session_tick(session),
            Event::SessionAnswer {
                session,
                sent_ms,
                answer,
            } => {
                self.session_hears(session, sent_ms, answer.map(|a| *a));
            }
            Event::Write { session, grant } => self.session_writes(session, &grant),
            Event::Release(session) => self.release(session),
            Event::Snapshot => {
                self.snapshot = Some((self.books.clone(), self.checker.remembered()));
            }
            Event::Failover => self.failover(),
            Event::ClockStep => {
                self.store_ahead_ms += self.faults.clock_step_ms;
                self.note(&self.faults.clock_step_ms.clone(), "store clock steps by");
            }
            Event::Remember => {
                let faults = self.faults.clone();
                self.platform.remember(&faults, self.now);
                self.after(5_000, Event::Remember);
            }
            Event::Nap => self.nap(),
            Event::Heal => self.heal(),
        }
    }

    fn failover(&mut self) {
        let Some((books, remembered)) = self.snapshot.take() else {
            return;
        };
        self.books = books;
        self.checker.forget(remembered);
        // The new primary's clock is up to two seconds ahead; the old one's steps stay.
        self.store_ahead_ms += self.rng.between(0, 2_000);
        let now = self.store_now();
        self.books.begin_recovery(now);
        self.note(&self.faults.failover_ms.clone(), "store lost its last ms:");
    }

    /// Faults end. Whoever holds a sandbox is never heard again; all that is left must go.
    pub fn heal(&mut self) {
        self.note(&(), "healed");
        self.faults.heal();
        self.healed = true;
        self.outage_until = 0;
        for session in &mut self.sessions {
            session.phase = Phase::Ended;
        }
    }

    /// One sandbox falls asleep for want of use, or is woken by traffic that asks nobody.
    fn nap(&mut self) {
        if self.healed {
            return;
        }
        self.after(20_000, Event::Nap);
        let ids: Vec<_> = self.platform.here.keys().collect();
        let Some(id) = self.rng.pick(&ids).cloned() else {
            return;
        };
        let used = self.sessions.iter().any(|s| match &s.phase {
            Phase::Holding(grant) => grant.sandbox == id,
            Phase::Running => true,
            _ => false,
        });
        let now = self.now;
        if let Some(here) = self.platform.here.get_mut(&id)
            && !here.woken
        {
            here.paused_since = match here.paused_since {
                Some(_) => None,
                None if used || here.process.is_some() => None,
                None => Some(now),
            };
            here.asleep_first = here.asleep_first.or(here.paused_since);
        }
    }

    fn scene(&self) -> Scene<'_> {
        Scene {
            books: &self.books,
            platform: &self.platform,
            policies: &self.policies,
            now: self.now,
            store_now: self.store_now(),
        }
    }

    /// After the faults: every orphan is gone, every count equals its recount, and the world works.
    pub fn check_fixpoint(&mut self) {
        if self.checker.violation().is_some() {
            return;
        }
        if self.books.stage() != Stage::Settled {
            self.checker
                .fail("liveness: the store was never settled".to_owned());
        }
        let mut wrong = Vec::new();
        for (id, here) in &self.platform.here {
            let record = self
                .books
                .records()
                .find(|r| r.sandbox.as_ref() == Some(id));
            let undeclared =
                self.policies.get(&here.bucket).map(|p| p.1) == Some(Retention::Undeclared);
            let kept = here.paused_since.is_some()
                && undeclared
                && record.is_some_and(|r| r.holding.is_some());
            if record.is_none() {
                wrong.push(format!("liveness: {id} is here and has no record"));
            } else if !kept {
                wrong.push(format!(
                    "liveness: orphan {id} of {} is still here",
                    here.slot
                ));
            }
        }
        for record in self.books.records() {
            let here = record
                .sandbox
                .as_ref()
                .is_some_and(|id| self.platform.here.contains_key(id));
            if !here {
                wrong.push(format!(
                    "liveness: {} has a record and no sandbox",
                    record.slot
                ));
            }
        }
        if let Some(first) = wrong.into_iter().next() {
            self.checker.fail(first);
        }
    }

    /// The alarms so far, by name.
    pub(crate) fn alarms(&self) -> &BTreeMap<&'static str, u64> {
        &self.alarms
    }

    /// What a bucket has and keeps from now on, for the observer.
    pub(crate) fn declare(&mut self, bucket: Bucket, policy: (u32, Retention)) {
        self.policies.insert(bucket, policy);
    }

    pub(crate) fn any_replica(&mut self) -> Option<usize> {
        let alive: Vec<usize> = (0..self.replicas.len())
            .filter(|n| self.replicas[*n].alive)
            .collect();
        self.rng.pick(&alive)
    }

    pub(crate) fn replica_name(n: usize, life: u32) -> ReplicaId {
        name(&format!("r{n}-{life}"))
    }
}
