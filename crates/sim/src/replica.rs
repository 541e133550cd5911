//! A replica: it drives tasks, and dies, sleeps and forgets.

use std::collections::{BTreeMap, VecDeque};

use sandhold_governor::books::{Keep, Verb};
use sandhold_governor::{
    Call, CallError, CallKind, Reply,
    books::Answer,
    ids::{ReplicaId, SlotId},
    reclaimer::{Confirmed, Evidence, Reclaimer, Work},
    record::Record,
    rules::Rule,
    tasks::{
        Adoption, Cycle, Effect, Input, MakingSettlement, Outcome, Removal, RemovalOf, RunLoop,
        RunOf, Settlement, Task, Urge,
    },
    valve::{Entry, Exit, Left, Valve},
};
use sandhold_types::Timestamp;

use crate::{
    session::Phase,
    world::{Event, To, World},
};

/// For what a task runs.
#[derive(Debug, Clone)]
pub(crate) enum Job {
    Acquire(usize),
    Run(Option<usize>),
    Slot(SlotId),
    Removal(SlotId),
    Cycle,
    Urge,
    Quick,
}

/// One process of the governor.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) id: ReplicaId,
    pub(crate) alive: bool,
    pub(crate) rate: u64,
    life: u32,
    asleep_until: u64,
    tasks: BTreeMap<u64, (Box<dyn Task>, Job)>,
    reclaimer: Reclaimer,
    valve: Valve,
    /// Calls that wait for the budget, and since when by the local clock.
    held_back: VecDeque<(u64, Call, Timestamp)>,
    /// Removals that wait for their turn, and how many are under way: side by side, with a bound.
    queued: VecDeque<Work>,
    removing: usize,
    looking: bool,
    next_task: u64,
}

impl World {
    pub(crate) fn add_replica(&mut self, n: usize) {
        let (slow, fast) = self.faults.clock_range();
        let rate = self.rng.between(slow, fast);
        self.replicas.push(Replica {
            id: Self::replica_name(n, 0),
            alive: true,
            rate,
            life: 0,
            asleep_until: 0,
            tasks: BTreeMap::new(),
            reclaimer: Reclaimer::new(self.rules.clone()),
            valve: Valve::default(),
            held_back: VecDeque::new(),
            queued: VecDeque::new(),
            removing: 0,
            looking: false,
            next_task: 0,
        });
        let at = self.rng.between(1_000, 60_000);
        self.after(
            at,
            Event::CycleDue {
                replica: n,
                life: 0,
            },
        );
    }

    pub(crate) fn is_alive(&self, replica: usize, life: u32) -> bool {
        self.replicas[replica].alive && self.replicas[replica].life == life
    }

    fn local(&self, replica: usize) -> Timestamp {
        self.time(self.now * self.replicas[replica].rate / 1000)
    }

    fn crash(&mut self, replica: usize) {
        let id = self.replicas[replica].id.clone();
        self.note(&id, "crash of");
        let rules = self.rules.clone();
        let dead = &mut self.replicas[replica];
        dead.alive = false;
        dead.tasks.clear();
        dead.held_back.clear();
        dead.queued.clear();
        dead.removing = 0;
        dead.reclaimer = Reclaimer::new(rules);
        dead.valve = Valve::default();
        dead.looking = false;
        let later = self.rng.between(1_000, 60_000);
        self.after(later, Event::Restart(replica));
    }

    pub(crate) fn restart(&mut self, replica: usize) {
        let r = &mut self.replicas[replica];
        r.life += 1;
        r.alive = true;
        r.asleep_until = 0;
        let life = r.life;
        r.id = Self::replica_name(replica, life);
        let at = self.rng.between(1_000, 30_000);
        self.after(at, Event::CycleDue { replica, life });
    }

    /// Begins a task on a replica.
    pub(crate) fn start(&mut self, replica: usize, task: Box<dyn Task>, job: Job) {
        let r = &mut self.replicas[replica];
        let number = r.next_task;
        r.next_task += 1;
        r.tasks.insert(number, (task, job));
        let life = r.life;
        let input = Box::new(Input::Go);
        self.after(
            0,
            Event::Input {
                replica,
                life,
                task: number,
                input,
            },
        );
    }

    pub(crate) fn deliver(&mut self, replica: usize, life: u32, task: u64, input: Input) {
        if !self.is_alive(replica, life) {
            return;
        }
        if self.now < self.replicas[replica].asleep_until {
            let later = self.replicas[replica].asleep_until - self.now;
            let input = Box::new(input);
            self.after(
                later,
                Event::Input {
                    replica,
                    life,
                    task,
                    input,
                },
            );
            return;
        }
        if self.rng.chance(self.faults.sleep) {
            self.replicas[replica].asleep_until = self.now + self.rng.between(10_000, 600_000);
        }
        let now = self.local(replica);
        let Some((machine, _)) = self.replicas[replica].tasks.get_mut(&task) else {
            return;
        };
        let effect = machine.step(input, now);
        if self.rng.chance(self.faults.crash) {
            // Before the effect.
            self.crash(replica);
            return;
        }
        // Where nodes check generations, a replica may also sleep between deciding and sending.
        if !self.faults.unfenced && self.rng.chance(self.faults.sleep) {
            let later = self.rng.between(10_000, 600_000);
            let effect = Box::new(effect);
            self.after(
                later,
                Event::Dispatch {
                    replica,
                    life,
                    task,
                    effect,
                },
            );
            return;
        }
        self.dispatch(replica, task, effect);
        if self.replicas[replica].alive && self.rng.chance(self.faults.crash) {
            // After it; nobody is left to hear the answer.
            self.crash(replica);
        }
    }

    pub(crate) fn dispatch(&mut self, replica: usize, task: u64, effect: Effect) {
        let life = self.replicas[replica].life;
        match effect {
            Effect::Store(verb) => self.send_to_store(
                verb,
                To::Task {
                    replica,
                    life,
                    task,
                },
            ),
            Effect::Platform(call) => {
                let since = self.local(replica);
                self.send_call(replica, task, call, since);
            }
            Effect::Sleep(duration) => {
                let ms = u64::try_from(duration.as_millis()).unwrap_or(0);
                let true_ms = ms * 1000 / self.replicas[replica].rate;
                let input = Box::new(Input::Go);
                self.after(
                    true_ms,
                    Event::Input {
                        replica,
                        life,
                        task,
                        input,
                    },
                );
            }
            Effect::Emit(event) => {
                self.note(&event, "run tells");
                let input = Box::new(Input::Go);
                self.after(
                    0,
                    Event::Input {
                        replica,
                        life,
                        task,
                        input,
                    },
                );
            }
            Effect::Done(outcome) => {
                if let Some((_, job)) = self.replicas[replica].tasks.remove(&task) {
                    self.done(replica, job, outcome);
                }
            }
        }
    }

    /// `since` is when the task asked for it: a create that waited for as long as one may take is not
    /// sent any more, its slot may be settled by then.
    fn send_call(&mut self, replica: usize, task: u64, call: Call, since: Timestamp) {
        let (now, kind, rules) = (self.local(replica), call.kind(), self.rules.clone());
        let r = &mut self.replicas[replica];
        let life = r.life;
        let too_late =
            kind == CallKind::Create && now.since(since) >= rules.settings().create_deadline;
        let entry = if too_late {
            Entry::Open
        } else {
            r.valve.enter(kind, &rules, now)
        };
        match entry {
            Entry::Full => r.held_back.push_back((task, call, since)),
            Entry::Open => {
                let input = Box::new(Input::Platform(Err(CallError::BreakerOpen)));
                self.after(
                    1,
                    Event::Input {
                        replica,
                        life,
                        task,
                        input,
                    },
                );
            }
            Entry::Go => {
                let latency = self.rng.between(2, 60);
                let to = (replica, life, task);
                self.after(
                    latency,
                    Event::CallArrives {
                        call: Box::new(call),
                        to,
                    },
                );
            }
        }
    }

    pub(crate) fn call_reply(
        &mut self,
        to: (usize, u32, u64),
        kind: CallKind,
        result: Result<Reply, CallError>,
    ) {
        let (replica, life, task) = to;
        if !self.is_alive(replica, life) {
            return;
        }
        let (now, rules) = (self.local(replica), self.rules.clone());
        let exit = match result {
            Err(CallError::NoAnswer) => Exit::NoAnswer,
            _ => Exit::Answered,
        };
        let left = self.replicas[replica].valve.leave(kind, exit, &rules, now);
        if left == Left::Reopening {
            self.start(replica, Box::new(Urge), Job::Urge);
        }
        let held: Vec<_> = self.replicas[replica].held_back.drain(..).collect();
        for (task, call, since) in held {
            self.send_call(replica, task, call, since);
        }
        self.deliver(replica, life, task, Input::Platform(result));
    }

    pub(crate) fn cycle_due(&mut self, replica: usize, life: u32) {
        if !self.is_alive(replica, life) {
            return;
        }
        let cycle = u64::try_from(self.rules.settings().cycle.as_millis()).unwrap_or(60_000);
        let true_ms = cycle * 1000 / self.replicas[replica].rate;
        self.after(true_ms, Event::CycleDue { replica, life });
        if self.now < self.replicas[replica].asleep_until || self.replicas[replica].looking {
            return;
        }
        self.replicas[replica].looking = true;
        self.start(replica, Box::new(Cycle::default()), Job::Cycle);
    }

    /// Something was condemned: somebody need not wait for the next round.
    pub(crate) fn urge_someone(&mut self) {
        if let Some(replica) = self.any_replica() {
            self.start(replica, Box::new(Urge), Job::Urge);
        }
    }

    fn done(&mut self, replica: usize, job: Job, outcome: Outcome) {
        match (job, outcome) {
            (Job::Acquire(session), outcome) => self.session_has(session, outcome, replica),
            (Job::Run(session), Outcome::RunEnded { way_out, remove }) => {
                self.note(&way_out, "run ended");
                if let Some(session) = session {
                    self.sessions[session].phase = Phase::Ended;
                }
                if remove.is_some() {
                    self.urge_someone();
                }
            }
            (Job::Slot(slot), _) => self.replicas[replica].reclaimer.finished(&slot),
            (Job::Removal(slot), _) => {
                self.replicas[replica].reclaimer.finished(&slot);
                self.replicas[replica].removing -= 1;
                self.begin_removals(replica);
            }
            (Job::Cycle, outcome) => {
                self.replicas[replica].looking = false;
                if let Outcome::Evidence(evidence) = outcome {
                    self.conclude(replica, &evidence);
                }
            }
            (Job::Urge, Outcome::Urgent(view)) => {
                let work = self.replicas[replica].reclaimer.urge(&view);
                self.begin_all(replica, work);
            }
            _ => {}
        }
    }

    fn conclude(&mut self, replica: usize, evidence: &Evidence) {
        let plan = self.replicas[replica].reclaimer.plan(evidence);
        let id = self.replicas[replica].id.clone();
        let listed = evidence.listing.as_ref().map(Vec::len);
        self.checker.judged(id.as_str(), listed, plan.confirmed);
        if plan.confirmed == Confirmed::Yes {
            self.checker.round(id.as_str(), &evidence.view);
        }
        for alarm in &plan.alarms {
            self.alarm(alarm);
        }
        let fresh = |slot: &SlotId| {
            evidence
                .view
                .records
                .iter()
                .any(|r| r.slot == *slot && r.condemned.is_none())
        };
        let condemned = plan
            .work
            .iter()
            .filter(|w| matches!(w, Work::Remove { slot, .. } if fresh(slot)))
            .count();
        self.checker.blast(condemned, evidence.view.records.len());
        self.note(&(&id, plan.confirmed, plan.work.len()), "round");
        self.take_over_runs(replica, &evidence.view.records, evidence.view.now);
        self.begin_all(replica, plan.work);
    }

    fn begin_all(&mut self, replica: usize, work: Vec<Work>) {
        for work in work {
            if matches!(work, Work::Remove { .. }) {
                self.replicas[replica].queued.push_back(work);
            } else {
                self.begin_work(replica, work);
            }
        }
        self.begin_removals(replica);
    }

    /// A removal that has to wait does so before it takes the sandbox's lock, so that another
    /// replica may go on with it.
    fn begin_removals(&mut self, replica: usize) {
        let most = if self.rules.missing() == Some(Rule::KillsSideBySide) {
            1
        } else {
            self.rules.settings().deletes_max as usize
        };
        while self.replicas[replica].removing < most {
            let Some(work) = self.replicas[replica].queued.pop_front() else {
                break;
            };
            self.replicas[replica].removing += 1;
            self.begin_work(replica, work);
        }
    }

    fn begin_work(&mut self, replica: usize, work: Work) {
        let (by, rules) = (self.replicas[replica].id.clone(), self.rules.clone());
        match work {
            Work::Remove {
                slot,
                sandbox,
                generation,
                ground,
                ask_first,
            } => {
                let of = RemovalOf {
                    slot: slot.clone(),
                    sandbox,
                    generation,
                    ground,
                    ask_first,
                };
                self.start(
                    replica,
                    Box::new(Removal::new(of, by, rules)),
                    Job::Removal(slot),
                );
            }
            Work::Settle { slot, sandbox } => {
                let task = Settlement::new(slot.clone(), sandbox, rules);
                self.start(replica, Box::new(task), Job::Slot(slot));
            }
            Work::SettleMaking { slot } => {
                let task = MakingSettlement::new(slot.clone());
                self.start(replica, Box::new(task), Job::Slot(slot));
            }
            Work::Adopt(listed) => {
                let slot = listed.slot.clone();
                self.start(replica, Box::new(Adoption::new(*listed)), Job::Slot(slot));
            }
            Work::Note { slot, seen } => {
                self.start(
                    replica,
                    Box::new(Once(Some(Verb::NoteSeen { slot, seen }))),
                    Job::Quick,
                );
            }
            Work::FinishRecovery {
                highest,
                settled_from,
            } => {
                let verb = Verb::FinishRecovery {
                    highest,
                    settled_from,
                };
                self.start(replica, Box::new(Once(Some(verb))), Job::Quick);
            }
        }
    }

    /// A run whose replica has not been heard goes on here (R-G3).
    fn take_over_runs(&mut self, replica: usize, records: &[Record], store_now: Timestamp) {
        if self.healed {
            return;
        }
        for record in records {
            let (Some(run), Some(sandbox)) = (&record.run, &record.sandbox) else {
                continue;
            };
            if store_now.since(run.heartbeat_at) < self.rules.black() {
                continue;
            }
            let of = RunOf {
                slot: record.slot.clone(),
                sandbox: sandbox.clone(),
                generation: record.generation,
                run: run.run.clone(),
                replica: self.replicas[replica].id.clone(),
                timeout: std::time::Duration::from_secs(60),
                keep: Keep::Nothing,
            };
            let task = RunLoop::taken_over(of, self.rules.clone());
            self.start(replica, Box::new(task), Job::Run(None));
        }
    }
}

/// One verb and no more.
#[derive(Debug)]
struct Once(Option<Verb>);

impl Task for Once {
    fn step(&mut self, input: Input, _: Timestamp) -> Effect {
        match self.0.take() {
            Some(verb) => Effect::Store(verb),
            None => match input {
                Input::Store(Ok(Answer::Done)) => Effect::Done(Outcome::Settled),
                _ => Effect::Done(Outcome::NotYet("the store did not take it")),
            },
        }
    }
}
