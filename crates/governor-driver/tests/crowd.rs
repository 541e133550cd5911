//! Many callers and several replicas that die and come back, over a small quota (R-G4, R-G5, R-G15).
//!
//! The platform stands apart and counts what is alive itself: it is the observer, and it outlives every
//! replica. A replica is a runtime of its own; it dies by being torn down wherever its tasks are.
//!
//! The whole of it (500 callers, 60 s) is `make sim`; `make test` has a tenth of it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

#[path = "../../books/tests/support/mod.rs"]
mod support;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use sandhold_books::{
    KeptBooks, RedisBooks, RedisSettings, ServerClock, SqliteBooks,
    runs::{KeptRuns, RedisRuns, SqliteRuns},
};
use sandhold_governor::{
    Call, CallError, Listed, Platform, Reply,
    books::BucketPolicy,
    colour::{Retention, Seen},
    rules::{Rules, Settings},
    tasks::Outcome,
};
use sandhold_governor_driver::{
    DirectSandbox, DirectSandboxes, Governor, GovernorParts, GuestAnswer, GuestRequest, Guests,
};
use sandhold_types::{
    Entropy as _, Generation, SandboxId, SeededEntropy, SystemClock, SystemEntropy, Timestamp,
};
use support::{RedisServer, bucket};
use tokio::runtime::{Handle, Runtime};

/// All times of the governor are divided by this.
const SPEED: u32 = 20;

fn rules() -> Rules {
    let s = Settings::default();
    let settings = Settings {
        heartbeat: s.heartbeat / SPEED,
        cycle: s.cycle / SPEED,
        overdue_grace: s.overdue_grace / SPEED,
        create_deadline: s.create_deadline / SPEED,
        call_deadline: s.call_deadline / SPEED,
        breaker_open: s.breaker_open / SPEED,
        wait_poll: Duration::from_millis(200),
        ..s
    };
    Rules::new(settings).unwrap()
}

/// What is alive, and the most that ever was at once.
#[derive(Debug, Default)]
struct Alive {
    sandboxes: BTreeMap<SandboxId, Listed>,
    most: usize,
    made: u64,
}

#[derive(Debug, Clone)]
struct Observed(Arc<Mutex<Alive>>);

impl Observed {
    fn alive(&self) -> MutexGuard<'_, Alive> {
        self.0.lock().unwrap()
    }
}

/// As long as real ones take, scaled: deaths fall into it.
async fn a_while() {
    let mut byte = [0];
    SystemEntropy.fill(&mut byte);
    tokio::time::sleep(Duration::from_millis(u64::from(byte[0] % 10))).await;
}

impl Platform for Observed {
    async fn call(&self, call: Call) -> Result<Reply, CallError> {
        match call {
            Call::Create {
                slot,
                bucket,
                owner,
                generation,
                ..
            } => {
                a_while().await;
                let reply = {
                    let mut alive = self.alive();
                    alive.made += 1;
                    let sandbox: SandboxId = format!("{:020}", alive.made).parse().unwrap();
                    let listed = Listed {
                        sandbox: sandbox.clone(),
                        slot,
                        bucket,
                        owner,
                        seen: Seen::Running,
                        ends_at: Timestamp::FAR_FUTURE,
                        generation,
                    };
                    alive.sandboxes.insert(sandbox.clone(), listed);
                    alive.most = alive.most.max(alive.sandboxes.len());
                    Reply::Created {
                        sandbox,
                        ends_at: Timestamp::FAR_FUTURE,
                    }
                };
                // Made, and nobody knows yet.
                a_while().await;
                Ok(reply)
            }
            Call::FindBySlot(slot) => {
                let alive = self.alive();
                let found = alive.sandboxes.values().find(|listed| listed.slot == slot);
                Ok(Reply::Found(found.cloned()))
            }
            Call::List => Ok(Reply::Listing(
                self.alive().sandboxes.values().cloned().collect(),
            )),
            Call::Ask(sandbox) => match self.alive().sandboxes.contains_key(&sandbox) {
                true => Ok(Reply::State(Seen::Running)),
                false => Err(CallError::NotFound),
            },
            Call::Kill(sandbox, _) => {
                a_while().await;
                let gone = self.alive().sandboxes.remove(&sandbox);
                a_while().await;
                gone.map(|_| Reply::Done).ok_or(CallError::NotFound)
            }
            _ => Ok(Reply::Done),
        }
    }
}

impl DirectSandboxes for Observed {
    fn living(&self) -> Vec<DirectSandbox> {
        Vec::new()
    }
}

impl Guests for Observed {
    async fn exchange(
        &self,
        _: &SandboxId,
        _: Generation,
        _: GuestRequest,
    ) -> Result<GuestAnswer, CallError> {
        Err(CallError::Refused)
    }
}

/// Where the books of all replicas are.
#[derive(Debug, Clone)]
enum Kept {
    InFiles(PathBuf),
    OnRedis(RedisSettings),
}

/// One life of a replica.
struct Replica {
    runtime: Runtime,
    governor: Governor<Observed>,
}

impl Replica {
    fn start(kept: &Kept, platform: &Observed) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let governor = runtime.block_on(async {
            let (books, runs) = match kept {
                Kept::InFiles(dir) => {
                    let clock = Arc::new(SystemClock);
                    let path = dir.join("books.db");
                    let books = SqliteBooks::open(&path, rules(), None, clock.clone()).unwrap();
                    let runs = SqliteRuns::open_file(&dir.join("runs.db"), clock).unwrap();
                    (KeptBooks::Sqlite(books), KeptRuns::Sqlite(runs))
                }
                Kept::OnRedis(settings) => {
                    let books = RedisBooks::open(settings.clone(), &rules()).await.unwrap();
                    let runs = RedisRuns::new(settings).unwrap();
                    (
                        KeptBooks::Redis(Box::new(books)),
                        KeptRuns::Redis(Box::new(runs)),
                    )
                }
            };
            let parts = GovernorParts {
                books,
                runs,
                platform: platform.clone(),
                rules: rules(),
                entropy: Arc::new(SystemEntropy),
            };
            let governor = Governor::new(parts).unwrap();
            drop(governor.start());
            governor
        });
        Self { runtime, governor }
    }

    /// Dies wherever its tasks are. Returns when nothing of it runs any more.
    fn die(self) {
        drop(self.governor);
        self.runtime.shutdown_timeout(Duration::from_secs(30));
    }
}

struct Crowd {
    replicas: usize,
    callers: usize,
    quota: u32,
    lasts: Duration,
    /// A replica dies this often.
    death_every: Duration,
}

/// The replicas as callers find them; a place is empty while its replica is dead.
type Places = Arc<Vec<RwLock<Option<(Handle, Governor<Observed>)>>>>;

impl Crowd {
    fn goes_through(&self, kept: &Kept) {
        let platform = Observed(Arc::default());
        let start = || Replica::start(kept, &platform);
        let mut replicas: Vec<Replica> = (0..self.replicas).map(|_| start()).collect();
        let policy = BucketPolicy::new(self.quota, Retention::Undeclared);
        let first = &replicas[0];
        let set = first.governor.set_bucket(bucket("a"), policy);
        first.runtime.block_on(set).unwrap();
        let place =
            |r: &Replica| RwLock::new(Some((r.runtime.handle().clone(), r.governor.clone())));
        let places: Places = Arc::new(replicas.iter().map(place).collect());
        let served = Arc::new(AtomicU64::new(0));
        let until = Instant::now() + self.lasts;
        let callers = Runtime::new().unwrap();
        for n in 0..self.callers {
            callers.spawn(caller(n, places.clone(), served.clone(), until));
        }
        let chance = SeededEntropy::new(5);
        let mut deaths = 0;
        while Instant::now() + self.death_every < until {
            std::thread::sleep(self.death_every);
            let mut byte = [0];
            chance.fill(&mut byte);
            let n = usize::from(byte[0]) % replicas.len();
            *places[n].write().unwrap() = None;
            replicas.remove(n).die();
            replicas.insert(n, start());
            let r = &replicas[n];
            *places[n].write().unwrap() = Some((r.runtime.handle().clone(), r.governor.clone()));
            deaths += 1;
        }
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        callers.shutdown_timeout(Duration::from_secs(60));
        self.ends_with_nothing_left(&replicas[0], &platform);
        let (served, most) = (served.load(Ordering::SeqCst), platform.alive().most);
        println!("{served} served, at most {most} at once, {deaths} deaths");
        assert!(most <= self.quota as usize, "{most} were alive at once");
        assert!(
            most > self.quota as usize / 2,
            "the quota was never used: {most}"
        );
        assert!(
            served > u64::from(self.quota),
            "hardly anybody was served: {served}"
        );
        places
            .iter()
            .for_each(|place| *place.write().unwrap() = None);
        replicas.into_iter().for_each(Replica::die);
    }

    /// Leases whose holders are gone end; then every slot is free and every sandbox gone.
    fn ends_with_nothing_left(&self, replica: &Replica, platform: &Observed) {
        let rules = rules();
        // Grey, two white cycles, and what the cap on one cycle leaves for later ones.
        let patience = rules.grey() + rules.settings().cycle * 20;
        let until = Instant::now() + patience;
        loop {
            let view = replica.runtime.block_on(replica.governor.view()).unwrap();
            let (records, alive) = (view.records.len(), platform.alive().sandboxes.len());
            if (records, alive) == (0, 0) {
                return;
            }
            assert!(
                Instant::now() < until,
                "{records} slots and {alive} sandboxes are left: {:#?}",
                view.records.first()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Takes a sandbox, uses it for a moment, gives it back, and again; at whichever replica is up.
async fn caller(n: usize, places: Places, served: Arc<AtomicU64>, until: Instant) {
    let mut turn = 0;
    while Instant::now() < until {
        turn += 1;
        let place = (n + turn) % places.len();
        let found = places[place].read().unwrap().clone();
        let Some((handle, governor)) = found else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let (owner, lease) = (format!("owner:{n}"), format!("l{turn}"));
        let work = handle.spawn(async move {
            let (owner, lease) = (owner.parse().unwrap(), lease.parse().unwrap());
            let template = "main".parse().unwrap();
            let clone = governor.clone();
            let taken = clone
                .acquire(bucket("a"), owner, lease, template, None)
                .await;
            let Outcome::Leased { .. } = taken else {
                return false;
            };
            a_while().await;
            let (owner, lease) = (format!("owner:{n}"), format!("l{turn}"));
            let (owner, lease) = (owner.parse().unwrap(), lease.parse().unwrap());
            governor.release(bucket("a"), owner, lease).await.is_ok()
        });
        // Its replica may die under it.
        if work.await.unwrap_or(false) {
            served.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn whole(replicas: usize) -> Crowd {
    Crowd {
        replicas,
        callers: 500,
        quota: 50,
        lasts: Duration::from_secs(60),
        death_every: Duration::from_secs(5),
    }
}

fn tenth(replicas: usize) -> Crowd {
    Crowd {
        replicas,
        callers: 50,
        quota: 5,
        lasts: Duration::from_secs(6),
        death_every: Duration::from_secs(2),
    }
}

fn on_redis(crowd: &Crowd) {
    let dir = tempfile::tempdir().unwrap();
    let server = RedisServer::start(dir.path());
    crowd.goes_through(&Kept::OnRedis(server.settings(ServerClock::Own)));
}

fn in_files(crowd: &Crowd) {
    let dir = tempfile::tempdir().unwrap();
    crowd.goes_through(&Kept::InFiles(dir.path().to_owned()));
}

#[test]
fn four_replicas_on_one_redis_never_oversell() {
    on_redis(&tenth(4));
}

#[test]
fn one_replica_with_its_own_file_never_oversells() {
    in_files(&tenth(1));
}

#[test]
#[ignore = "a minute of two processors: make sim"]
fn four_replicas_on_one_redis_never_oversell_to_500_callers() {
    on_redis(&whole(4));
}

#[test]
#[ignore = "a minute of two processors: make sim"]
fn one_replica_with_its_own_file_never_oversells_to_500_callers() {
    in_files(&whole(1));
}
