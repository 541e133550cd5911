//! A platform that is played, and a governor over it with books in a file.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use sandhold_books::{
    KeptBooks, SqliteBooks,
    runs::{KeptRuns, SqliteRuns},
};
use sandhold_governor::{
    Call, CallError, Listed, Platform, Reply,
    books::BucketPolicy,
    colour::{Retention, Seen},
    ids::{Bucket, LeaseId, OwnerId},
    rules::{Rules, Settings},
    tasks::Outcome,
};
use sandhold_governor_driver::{
    DirectSandbox, DirectSandboxes, Governor, GovernorParts, GuestAnswer, GuestRequest, Guests,
};
use sandhold_types::{Clock, Generation, ManualClock, SandboxId, SeededEntropy, Timestamp};
use tokio::sync::watch;

use crate::guest::{Guest, Mood, Step, step_of};

/// What the platform holds and how it answers next.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) sandboxes: BTreeMap<SandboxId, Listed>,
    pub(crate) direct: Vec<DirectSandbox>,
    /// Answers of the next creates; a sandbox is made by default.
    pub(crate) creates: VecDeque<Create>,
    pub(crate) probes_fail: u32,
    pub(crate) kills_under_way: usize,
    pub(crate) kills_at_once: usize,
    pub(crate) made: u64,
    /// What is inside of the newest sandbox.
    pub(crate) guest: Guest,
    /// How the next sandbox is when it is made.
    pub(crate) born: Mood,
    pub(crate) gate: Gate,
}

impl State {
    /// Its sandboxes die, with all that is in them.
    pub(crate) fn all_die(&mut self) {
        self.sandboxes.clear();
        self.guest.process = None;
    }
}

/// Holds whoever comes to one step of a run, until it is opened.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate {
    pub(crate) at: Option<Step>,
    reached: watch::Sender<bool>,
    open: watch::Sender<bool>,
}

impl Gate {
    pub(crate) fn at(step: Step) -> Self {
        Self {
            at: Some(step),
            ..Self::default()
        }
    }

    async fn pass(&self, step: Option<Step>) {
        if step.is_none() || step != self.at {
            return;
        }
        self.reached.send_replace(true);
        let mut open = self.open.subscribe();
        open.wait_for(|open| *open).await.expect("it is kept");
    }

    /// Waits until somebody stands before it.
    pub(crate) async fn reached(&self) {
        let mut reached = self.reached.subscribe();
        let waited = reached.wait_for(|reached| *reached);
        let in_time = tokio::time::timeout(Duration::from_secs(30), waited).await;
        in_time.expect("the step is reached").expect("it is kept");
    }

    pub(crate) fn opens(&self) {
        self.open.send_replace(true);
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Create {
    Refused,
    /// It is made, and nobody hears of it.
    MadeWithoutAnswer,
    /// It is made, and dead before it is used.
    MadeAndDies,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Played(Arc<Mutex<State>>);

impl Played {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn make(&self, call: Call) -> Reply {
        let Call::Create {
            slot,
            bucket,
            owner,
            generation,
            ..
        } = call
        else {
            panic!("no create");
        };
        let mut state = self.state();
        state.made += 1;
        let (born, conduct) = (std::mem::take(&mut state.born), state.guest.conduct);
        state.guest = Guest {
            mood: born,
            conduct,
            ..Guest::default()
        };
        let sandbox: SandboxId = format!("{:020}", state.made).parse().unwrap();
        let ends_at = Timestamp::FAR_FUTURE;
        let listed = Listed {
            sandbox: sandbox.clone(),
            slot,
            bucket,
            owner,
            seen: Seen::Running,
            ends_at,
            generation,
        };
        state.sandboxes.insert(sandbox.clone(), listed);
        Reply::Created { sandbox, ends_at }
    }

    async fn kill(&self, sandbox: &SandboxId) -> Result<Reply, CallError> {
        {
            let mut state = self.state();
            state.kills_under_way += 1;
            state.kills_at_once = state.kills_at_once.max(state.kills_under_way);
        }
        // Long enough for the others to begin.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let mut state = self.state();
        state.kills_under_way -= 1;
        if state.sandboxes.remove(sandbox).is_none() {
            return Err(CallError::NotFound);
        }
        if state.sandboxes.is_empty() {
            state.guest.process = None;
        }
        Ok(Reply::Done)
    }
}

impl Platform for Played {
    async fn call(&self, call: Call) -> Result<Reply, CallError> {
        match call {
            Call::Create { .. } => {
                let gate = self.state().gate.clone();
                gate.pass(Some(Step::Admitted)).await;
                let next = self.state().creates.pop_front();
                match next {
                    None => Ok(self.make(call)),
                    Some(Create::Refused) => Err(CallError::Refused),
                    Some(Create::MadeWithoutAnswer) => {
                        self.make(call);
                        Err(CallError::NoAnswer)
                    }
                    Some(Create::MadeAndDies) => {
                        let made = self.make(call);
                        self.state().all_die();
                        Ok(made)
                    }
                }
            }
            Call::FindBySlot(slot) => {
                let state = self.state();
                let found = state.sandboxes.values().find(|listed| listed.slot == slot);
                Ok(Reply::Found(found.cloned()))
            }
            Call::List => Ok(Reply::Listing(
                self.state().sandboxes.values().cloned().collect(),
            )),
            Call::Ask(sandbox) => {
                let state = self.state();
                let of_ours = state.sandboxes.get(&sandbox).map(|listed| listed.seen);
                let direct = state.direct.iter().any(|direct| direct.sandbox == sandbox);
                let seen = of_ours.or_else(|| direct.then_some(Seen::Running));
                seen.map(Reply::State).ok_or(CallError::NotFound)
            }
            Call::Kill(sandbox, _) => self.kill(&sandbox).await,
            Call::Probe(sandbox) => {
                let gate = self.state().gate.clone();
                gate.pass(Some(Step::Created)).await;
                let mut state = self.state();
                if !state.sandboxes.contains_key(&sandbox) {
                    return Err(CallError::NotFound);
                }
                if state.guest.mood == Mood::Hung {
                    return Err(CallError::NoAnswer);
                }
                if state.probes_fail > 0 {
                    state.probes_fail -= 1;
                    return Err(CallError::Refused);
                }
                Ok(Reply::Done)
            }
            _ => Ok(Reply::Done),
        }
    }
}

impl Guests for Played {
    async fn exchange(
        &self,
        sandbox: &SandboxId,
        _: Generation,
        request: GuestRequest,
    ) -> Result<GuestAnswer, CallError> {
        let (answer, step, gate) = {
            let mut state = self.state();
            if !state.sandboxes.contains_key(sandbox) {
                return Err(CallError::NotFound);
            }
            let step = step_of(&request, &state.guest);
            // What is held at the launch was launched; whatever else is held was not done yet.
            let early = (step == Some(Step::Launching)).then(|| state.guest.answer(&request));
            (early, step, state.gate.clone())
        };
        gate.pass(step).await;
        let answer = {
            let mut state = self.state();
            if !state.sandboxes.contains_key(sandbox) {
                // Its connection breaks.
                return Err(CallError::NoAnswer);
            }
            match (answer, state.guest.mood) {
                (Some(early), mood) if mood != Mood::Hung => early,
                _ => state.guest.answer(&request),
            }
        };
        match answer {
            Some(answer) => Ok(answer),
            None => std::future::pending().await,
        }
    }
}

impl DirectSandboxes for Played {
    fn living(&self) -> Vec<DirectSandbox> {
        self.state().direct.clone()
    }
}

pub(crate) struct World {
    pub(crate) governor: Governor<Played>,
    pub(crate) platform: Played,
    pub(crate) clock: Arc<ManualClock>,
    _dir: Arc<tempfile::TempDir>,
}

pub(crate) fn bucket() -> Bucket {
    Bucket {
        namespace: "writer".parse().unwrap(),
        env: "prod".parse().unwrap(),
    }
}

pub(crate) async fn world(quota: u32) -> World {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_ms(1_700_000_000_000)));
    let settings = Settings {
        wait_poll: Duration::from_millis(10),
        ..Settings::default()
    };
    world_in(settings, dir, clock, Played::default(), quota).await
}

/// All times so short that they can be waited for.
pub(crate) fn short() -> Settings {
    let ms = Duration::from_millis;
    Settings {
        heartbeat: ms(600),
        cycle: ms(1_200),
        overdue_grace: ms(36_000),
        create_deadline: ms(600),
        call_deadline: ms(600),
        wait_max: ms(600),
        wait_poll: ms(10),
        wait_silence_max: ms(100),
        run_poll: ms(20),
        ..Settings::default()
    }
}

/// One more life of a replica: the same files and platform.
pub(crate) async fn world_in(
    settings: Settings,
    dir: Arc<tempfile::TempDir>,
    clock: Arc<ManualClock>,
    platform: Played,
    quota: u32,
) -> World {
    let rules = Rules::new(settings).unwrap();
    let path = dir.path().join("books.db");
    let books = SqliteBooks::open(&path, rules.clone(), None, clock.clone()).unwrap();
    let runs = SqliteRuns::open_file(&dir.path().join("runs.db"), clock.clone()).unwrap();
    let entropy = Arc::new(SeededEntropy::new(clock.now().unix_ms()));
    let parts = GovernorParts {
        books: KeptBooks::Sqlite(books),
        runs: KeptRuns::Sqlite(runs),
        platform: platform.clone(),
        rules,
        entropy,
    };
    let governor = Governor::new(parts).unwrap();
    let policy = BucketPolicy::new(quota, Retention::Undeclared);
    governor.set_bucket(bucket(), policy).await.unwrap();
    World {
        governor,
        platform,
        clock,
        _dir: dir,
    }
}

impl World {
    pub(crate) async fn take(&self, owner: &str, lease: &str) -> Outcome {
        let (owner, lease): (OwnerId, LeaseId) = (owner.parse().unwrap(), lease.parse().unwrap());
        let template = "main".parse().unwrap();
        self.governor
            .acquire(bucket(), owner, lease, template, None)
            .await
    }

    pub(crate) async fn records(&self) -> usize {
        self.governor.view().await.unwrap().records.len()
    }

    /// A round, after enough time for it to count.
    pub(crate) async fn round(&self) -> sandhold_governor_driver::CycleReport {
        self.clock.advance(self.governor.rules().settings().cycle);
        self.governor.cycle().await.unwrap()
    }

    /// Waits until the books have so many records; fails after ten seconds.
    pub(crate) async fn until_records(&self, expected: usize) {
        let waited = async {
            while self.records().await != expected {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(10), waited).await;
        assert!(in_time.is_ok(), "{} records", self.records().await);
    }
}
