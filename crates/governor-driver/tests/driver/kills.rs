//! A run that is killed at each of its steps leaves no process, no slot and no lease too many, and a log
//! that tells it (R-G1, R-G3, R-G5; issue 5).
//!
//! Each row is one way to be killed, each column a step: the run stands still at it while it is struck.
//! Afterwards everything is counted anew.

use std::{sync::Arc, time::Duration};

use sandhold_books::runs::Ending;
use sandhold_governor::{ids::RunId, rules::Settings};
use sandhold_governor_driver::{Cancelled, RunAsk, RunRefused};
use sandhold_types::{ManualClock, Timestamp};

use crate::{
    guest::{Conduct, Mood, Step},
    played::{Create, Gate, Played, World, short, world_in},
    runs::{Told, ask, life},
};

const STEPS: [Step; 8] = [
    Step::Admitted,
    Step::Created,
    Step::Writing,
    Step::Launching,
    Step::Running,
    Step::Artifacts,
    Step::Completed,
    Step::CleanUp,
];

/// How a run is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blow {
    ClientGone,
    ReplicaKilled,
    SandboxKilled,
    AgentHung,
    DiskFull,
    Deadline,
    Cancel,
}

/// What its log tells of its end, and whether that it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tells {
    /// It was started, and ended so.
    Started(&'static str),
    /// It never was, and ended so.
    Never(&'static str),
}

use Tells::{Never, Started};

const EXITED: Tells = Started("exited");

/// The time of a run whose time is what kills it, and how long it stands still then.
const SHORT_TIME: Duration = Duration::from_secs(1);

/// Times in which a busy machine can do what is to be done.
fn patient() -> Settings {
    let ms = Duration::from_millis;
    Settings {
        heartbeat: ms(1_000),
        cycle: ms(2_000),
        overdue_grace: ms(60_000),
        create_deadline: ms(1_900),
        call_deadline: ms(1_900),
        ..short()
    }
}

/// One cell of the table.
#[derive(Clone)]
struct Cell {
    blow: Blow,
    step: Step,
    dir: Arc<tempfile::TempDir>,
    clock: Arc<ManualClock>,
    platform: Played,
    gate: Gate,
}

fn name() -> RunId {
    "mine".parse().unwrap()
}

async fn cancel(world: &World) -> Cancelled {
    let (owner, lease) = ("o".parse().unwrap(), "l".parse().unwrap());
    let cancelled = world.governor.cancel_run(&name(), &owner, &lease).await;
    cancelled.unwrap()
}

impl Cell {
    fn new(blow: Blow, step: Step) -> Self {
        let gate = Gate::at(step);
        let platform = Played::default();
        platform.state().gate = gate.clone();
        platform.state().guest.conduct = match step {
            Step::Artifacts => Conduct::Writes,
            Step::Completed | Step::CleanUp => Conduct::WritesAndEnds,
            _ => Conduct::Works,
        };
        Self {
            blow,
            step,
            dir: Arc::new(tempfile::tempdir().unwrap()),
            clock: Arc::new(ManualClock::new(Timestamp::from_unix_ms(1_700_000_000_000))),
            platform,
            gate,
        }
    }

    /// One more replica. There is room for a sandbox that replaces one that is not fit for use.
    async fn world(&self) -> World {
        let (dir, clock, platform) = (&self.dir, &self.clock, &self.platform);
        world_in(patient(), dir.clone(), clock.clone(), platform.clone(), 2).await
    }

    fn ask(&self) -> RunAsk {
        let asked = ask("o");
        RunAsk {
            run: Some(name()),
            lease: Some("l".parse().unwrap()),
            timeout: match self.blow {
                Blow::Deadline => SHORT_TIME,
                _ => asked.timeout,
            },
            ..asked
        }
    }

    /// The run of this cell, struck and told to its end.
    fn plays(&self, tells: Tells) {
        if self.blow == Blow::ReplicaKilled {
            life(async {
                let world = self.world().await;
                let asked = world.governor.clone();
                let ask = self.ask();
                tokio::spawn(async move { asked.start_run(ask).await });
                self.gate.reached().await;
            });
            self.gate.opens();
        }
        life(async {
            let world = self.world().await;
            let reclaimer = world.governor.start();
            match self.blow {
                Blow::ReplicaKilled => {
                    if matches!(self.step, Step::Admitted | Step::Created) {
                        // Whoever gets it a sandbox may be alive, and nobody can tell it.
                        assert_eq!(cancel(&world).await, Cancelled::TooEarly);
                    }
                    self.clock.advance(world.governor.rules().black());
                    world.governor.adopt_silent_runs().await.unwrap();
                }
                _ => self.strikes(&world).await,
            }
            self.is_told(&world, tells).await;
            self.recount(&world).await;
            reclaimer.abort();
        });
    }

    async fn strikes(&self, world: &World) {
        let governor = world.governor.clone();
        let ask = self.ask();
        let asking = tokio::spawn(async move { governor.start_run(ask).await });
        self.gate.reached().await;
        match self.blow {
            Blow::ClientGone => {
                let governor = world.governor.clone();
                let reading =
                    tokio::spawn(async move { governor.run_events(&name(), 0, SHORT_TIME).await });
                tokio::task::yield_now().await;
                reading.abort();
                asking.abort();
            }
            Blow::SandboxKilled if self.step == Step::Admitted => {
                self.platform.state().creates.push_back(Create::MadeAndDies);
            }
            Blow::SandboxKilled => self.platform.state().all_die(),
            Blow::AgentHung => self.ails(Mood::Hung),
            Blow::DiskFull => self.ails(Mood::DiskFull),
            // It is the time itself that is waited for.
            Blow::Deadline => tokio::time::sleep(SHORT_TIME).await,
            Blow::Cancel => assert_eq!(cancel(world).await, Cancelled::Asked),
            Blow::ReplicaKilled => unreachable!("it is killed from outside"),
        }
        self.gate.opens();
    }

    fn ails(&self, mood: Mood) {
        let mut state = self.platform.state();
        match self.step {
            // It is made afterwards.
            Step::Admitted => state.born = mood,
            _ => state.guest.mood = mood,
        }
    }

    /// Its log has its start, if it had one, then artifacts, then its end, and nothing after it.
    async fn is_told(&self, world: &World, tells: Tells) {
        let ends_by_itself = matches!(self.step, Step::Completed | Step::CleanUp);
        if tells == EXITED && !ends_by_itself {
            world.until(&name(), 0, "started").await;
            world.guest(|guest| guest.exits(0, ""));
        }
        let kind = match tells {
            EXITED => "completed",
            _ => "error",
        };
        let mut told = world.until(&name(), 0, kind).await;
        let end = told.pop().unwrap();
        let (starts, code) = match tells {
            Started(code) => (1, code),
            Never(code) => (0, code),
        };
        assert_eq!(end.data["code"], code, "{self:?}: {told:?} {end:?}");
        assert_ne!(end.data["message"], "");
        let count = |kind: &str| told.iter().filter(|event| event.kind == kind).count();
        assert_eq!(count("started"), starts, "{self:?}: {told:?}");
        let first = told.first().map(|event: &Told| event.kind.as_str());
        assert_eq!(first, (starts == 1).then_some("started"), "{self:?}");
        let progress = count("progress");
        assert_eq!(progress + starts, told.len(), "nothing else: {told:?}");
        if ends_by_itself && tells == EXITED {
            assert_eq!(progress, 1, "once, and not lost: {self:?}");
        }
        let last = told.len() as u64 + 1;
        let run = name();
        let rest = world.governor.run_events(&run, last, Duration::ZERO);
        assert_eq!(rest.await.unwrap(), (Vec::new(), Ending::Closed));
        let info = world.governor.run(&run).await.unwrap().unwrap();
        assert_eq!(info.end_of().unwrap().code, code, "{self:?}");
    }

    /// Slots, leases, runs, sandboxes and processes, counted anew.
    async fn recount(&self, world: &World) {
        // What a dead replica left goes when nobody has held it in two looks.
        for _ in 0..8 {
            if world.records().await == 0 {
                break;
            }
            world.round().await;
        }
        world.until_records(0).await;
        {
            let state = self.platform.state();
            assert!(state.sandboxes.is_empty(), "{self:?}: a sandbox is left");
            assert!(state.guest.process.is_none(), "{self:?}: a process is left");
        }
        if (self.blow, self.step) == (Blow::ReplicaKilled, Step::Admitted) {
            // Its lease was never granted, and nobody else has it.
            return;
        }
        // Its lease is used up, and whoever asks with it takes nothing.
        let again = RunAsk {
            run: Some("again".parse().unwrap()),
            ..self.ask()
        };
        let refused = world.governor.start_run(again).await;
        assert!(
            matches!(refused, Err(RunRefused::Stale { .. })),
            "{self:?}: {refused:?}"
        );
        assert_eq!(world.records().await, 0, "{self:?}");
    }
}

impl std::fmt::Debug for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} at {:?}", self.blow, self.step)
    }
}

fn row(blow: Blow, tells: [Tells; 8]) {
    std::thread::scope(|scope| {
        for (step, tells) in STEPS.into_iter().zip(tells) {
            scope.spawn(move || Cell::new(blow, step).plays(tells));
        }
    });
}

#[test]
fn a_client_that_goes_ends_nothing() {
    row(Blow::ClientGone, [EXITED; 8]);
}

#[test]
fn a_run_whose_replica_is_killed_is_ended_before_its_start_and_goes_on_after_it() {
    let lost = Never("replica_lost");
    let goes_on = EXITED;
    row(
        Blow::ReplicaKilled,
        [lost, lost, lost, lost, goes_on, goes_on, goes_on, goes_on],
    );
}

#[test]
fn a_sandbox_that_is_killed_is_replaced_before_its_use_and_ends_the_run_after_it() {
    let gone = Started("sandbox_gone");
    row(
        Blow::SandboxKilled,
        [
            // It dies before it is there.
            EXITED,
            EXITED,
            Never("sandbox_gone"),
            Never("sandbox_gone"),
            gone,
            gone,
            gone,
            // Its exit was read.
            EXITED,
        ],
    );
}

#[test]
fn an_agent_that_hangs_is_replaced_before_its_use_and_ends_the_run_after_it() {
    let silent = Started("sandbox_unresponsive");
    row(
        Blow::AgentHung,
        [
            EXITED,
            EXITED,
            Never("not_started"),
            Never("not_started"),
            silent,
            silent,
            silent,
            EXITED,
        ],
    );
}

#[test]
fn a_full_disk_keeps_a_run_from_its_start_and_no_exit_from_being_told() {
    let full = Never("not_started");
    row(
        Blow::DiskFull,
        [full, full, full, EXITED, EXITED, EXITED, EXITED, EXITED],
    );
}

#[test]
fn a_run_whose_time_is_over_ends_wherever_it_is() {
    let over = Started("deadline_exceeded");
    row(
        Blow::Deadline,
        [
            // Its time begins when it has its sandbox.
            over,
            over,
            Never("deadline_exceeded"),
            over,
            over,
            over,
            over,
            EXITED,
        ],
    );
}

#[test]
fn a_run_that_is_cancelled_ends_wherever_it_is() {
    let never = Never("cancelled");
    let ended = Started("cancelled");
    row(
        Blow::Cancel,
        [never, never, never, ended, ended, ended, ended, EXITED],
    );
}
