//! The driver, over books in a file and a platform that is played here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use sandhold_books::{KeptBooks, SqliteBooks};
use sandhold_governor::{
    Call, CallError, Listed, Platform, Reply,
    books::{Answer, BucketPolicy},
    colour::{Retention, Seen},
    ids::{Bucket, LeaseId, OwnerId},
    reclaimer::{Confirmed, Work},
    rules::{Rules, Settings},
    tasks::{Outcome, Reused},
};
use sandhold_governor_driver::{Admitted, DirectSandbox, DirectSandboxes, Governor, GovernorParts};
use sandhold_types::{Clock, ManualClock, SandboxId, SeededEntropy, Timestamp};

/// What the platform holds and how it answers next.
#[derive(Debug, Default)]
struct State {
    sandboxes: BTreeMap<SandboxId, Listed>,
    direct: Vec<DirectSandbox>,
    /// Answers of the next creates; a sandbox is made by default.
    creates: VecDeque<Create>,
    probes_fail: u32,
    kills_under_way: usize,
    kills_at_once: usize,
    made: u64,
}

#[derive(Debug, Clone, Copy)]
enum Create {
    Refused,
    /// It is made, and nobody hears of it.
    MadeWithoutAnswer,
}

#[derive(Debug, Clone, Default)]
struct Played(Arc<Mutex<State>>);

impl Played {
    fn state(&self) -> MutexGuard<'_, State> {
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
        match state.sandboxes.remove(sandbox) {
            Some(_) => Ok(Reply::Done),
            None => Err(CallError::NotFound),
        }
    }
}

impl Platform for Played {
    async fn call(&self, call: Call) -> Result<Reply, CallError> {
        match call {
            Call::Create { .. } => {
                let next = self.state().creates.pop_front();
                match next {
                    None => Ok(self.make(call)),
                    Some(Create::Refused) => Err(CallError::Refused),
                    Some(Create::MadeWithoutAnswer) => {
                        self.make(call);
                        Err(CallError::NoAnswer)
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
            Call::Probe(_) => {
                let mut state = self.state();
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

impl DirectSandboxes for Played {
    fn living(&self) -> Vec<DirectSandbox> {
        self.state().direct.clone()
    }
}

struct World {
    governor: Governor<Played>,
    platform: Played,
    clock: Arc<ManualClock>,
    _dir: tempfile::TempDir,
}

fn bucket() -> Bucket {
    Bucket {
        namespace: "writer".parse().unwrap(),
        env: "prod".parse().unwrap(),
    }
}

async fn world(quota: u32) -> World {
    let settings = Settings {
        wait_poll: Duration::from_millis(10),
        ..Settings::default()
    };
    let rules = Rules::new(settings).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_ms(1_700_000_000_000)));
    let path = dir.path().join("books.db");
    let books = SqliteBooks::open(&path, rules.clone(), None, clock.clone()).unwrap();
    let platform = Played::default();
    let parts = GovernorParts {
        books: KeptBooks::Sqlite(books),
        platform: platform.clone(),
        rules,
        entropy: Arc::new(SeededEntropy::new(1)),
    };
    let governor = Governor::new(parts).unwrap();
    let policy = BucketPolicy {
        quota,
        retention: Retention::Undeclared,
    };
    governor.set_bucket(bucket(), policy).await.unwrap();
    World {
        governor,
        platform,
        clock,
        _dir: dir,
    }
}

impl World {
    async fn take(&self, owner: &str, lease: &str) -> Outcome {
        let (owner, lease): (OwnerId, LeaseId) = (owner.parse().unwrap(), lease.parse().unwrap());
        let template = "main".parse().unwrap();
        self.governor
            .acquire(bucket(), owner, lease, template, None)
            .await
    }

    async fn records(&self) -> usize {
        self.governor.view().await.unwrap().records.len()
    }

    /// A round, after enough time for it to count.
    async fn round(&self) -> sandhold_governor_driver::CycleReport {
        self.clock.advance(self.governor.rules().settings().cycle);
        self.governor.cycle().await.unwrap()
    }

    /// Waits until the books have so many records; fails after ten seconds.
    async fn until_records(&self, expected: usize) {
        let waited = async {
            while self.records().await != expected {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(10), waited).await;
        assert!(in_time.is_ok(), "{} records", self.records().await);
    }
}

#[tokio::test]
async fn one_owner_one_sandbox_and_a_fence_that_grows() {
    // R-G6, R-G7
    let world = world(3).await;
    let reclaimer = world.governor.start();
    let Outcome::Leased {
        grant: first,
        reused,
    } = world.take("o", "l1").await
    else {
        panic!("no lease");
    };
    assert_eq!(reused, Reused::No);
    let Outcome::Leased {
        grant: again,
        reused,
    } = world.take("o", "l1").await
    else {
        panic!("no renewal");
    };
    assert_eq!((reused, again.generation), (Reused::Yes, first.generation));
    let Outcome::Leased { grant: second, .. } = world.take("o", "l2").await else {
        panic!("no takeover");
    };
    assert_eq!(second.sandbox, first.sandbox);
    assert!(second.generation > first.generation);

    let release = |lease: &str| {
        let (owner, lease) = ("o".parse().unwrap(), lease.parse().unwrap());
        world.governor.release(bucket(), owner, lease)
    };
    let late = release("l1").await.unwrap();
    let current = Some(second.generation);
    assert_eq!(late, Answer::Stale { current }, "R-I5: the new one lives");
    assert_eq!(world.platform.state().sandboxes.len(), 1);
    assert!(matches!(
        release("l2").await.unwrap(),
        Answer::Released { .. }
    ));
    world.until_records(0).await;
    assert!(
        world.platform.state().sandboxes.is_empty(),
        "freed means gone"
    );
    reclaimer.abort();
}

#[tokio::test]
async fn a_create_that_failed_gives_its_slot_back_and_one_in_doubt_is_found() {
    // R-G5
    let world = world(1).await;
    world.platform.state().creates.push_back(Create::Refused);
    assert!(matches!(
        world.take("o", "l").await,
        Outcome::Unavailable(_)
    ));
    assert_eq!(world.records().await, 0);
    world
        .platform
        .state()
        .creates
        .push_back(Create::MadeWithoutAnswer);
    let Outcome::Leased { grant, .. } = world.take("o", "l").await else {
        panic!("it was made and not found");
    };
    assert!(
        world
            .platform
            .state()
            .sandboxes
            .contains_key(&grant.sandbox)
    );
}

#[tokio::test]
async fn what_is_not_fit_for_use_is_replaced() {
    // R-G9: three rounds of three tries.
    let world = world(5).await;
    let reclaimer = world.governor.start();
    world.platform.state().probes_fail = 9;
    let Outcome::Leased { grant, .. } = world.take("o", "l").await else {
        panic!("no lease");
    };
    assert_eq!(world.platform.state().made, 2);
    world.until_records(1).await;
    let living: Vec<_> = world.platform.state().sandboxes.keys().cloned().collect();
    assert_eq!(living, [grant.sandbox]);
    reclaimer.abort();
}

#[tokio::test]
async fn a_forgotten_sandbox_goes_in_two_rounds_and_not_in_one() {
    // R-G10
    let world = world(3).await;
    let Outcome::Leased { grant, .. } = world.take("o", "l").await else {
        panic!("no lease");
    };
    let removes = |work: &[Work]| work.iter().any(|w| matches!(w, Work::Remove { .. }));
    world.clock.advance(world.governor.rules().grey());
    assert!(
        !removes(&world.round().await.work),
        "one look proves nothing"
    );
    let hasty = world.governor.cycle().await.unwrap();
    assert!(
        !removes(&hasty.work),
        "a second look right after the first proves nothing new"
    );
    let dry = world.governor.dry_run().await.unwrap();
    assert_eq!(dry.confirmed, Confirmed::Yes);
    assert_eq!(world.records().await, 1, "a dry run does nothing");
    assert!(removes(&world.round().await.work));
    world.until_records(0).await;
    assert!(world.platform.state().sandboxes.is_empty());
    let (of, told) = world
        .governor
        .explain(&grant.sandbox)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(of, bucket());
    assert_eq!(told.colour.as_str(), "gone");
    let actions = told.last_actions.join("\n");
    assert!(actions.contains("condemned"), "R-G17: {actions}");
    assert!(
        actions.contains("its platform deleted it"),
        "R-G17: {actions}"
    );
}

#[tokio::test]
async fn a_holder_that_is_heard_is_left_alone() {
    // R-G10
    let world = world(3).await;
    let Outcome::Leased { grant, .. } = world.take("o", "l").await else {
        panic!("no lease");
    };
    for _ in 0..6 {
        let (owner, lease) = ("o".parse().unwrap(), "l".parse().unwrap());
        let beat = world
            .governor
            .heartbeat(bucket(), owner, lease, grant.generation)
            .await;
        assert!(matches!(beat.unwrap(), Answer::Granted(_)));
        assert_eq!(world.round().await.work, []);
    }
}

#[tokio::test]
async fn removals_run_side_by_side_within_their_budget() {
    // R-G14
    let world = world(100).await;
    for n in 0..40 {
        assert!(matches!(
            world.take(&format!("o{n}"), "l").await,
            Outcome::Leased { .. }
        ));
    }
    world.clock.advance(world.governor.rules().grey());
    world.round().await;
    world.round().await;
    // The blast radius holds the other half back for a round.
    world.until_records(20).await;
    world.round().await;
    world.until_records(10).await;
    let at_once = world.platform.state().kills_at_once;
    let most = world.governor.rules().settings().deletes_max as usize;
    assert!((2..=most).contains(&at_once), "{at_once} at once");
}

#[tokio::test]
async fn sandboxes_of_sdks_are_in_the_same_books() {
    // R-G19
    let world = world(1).await;
    let (short, second) = (Duration::from_millis(50), Duration::from_secs(5));
    let admitted = world.governor.admit_direct(&bucket(), short).await.unwrap();
    let Admitted::Slot { slot, generation } = admitted else {
        panic!("{admitted:?}");
    };
    let sandbox: SandboxId = "abcdefghij0123456789".parse().unwrap();
    let ends_at = world.clock.now().plus(Duration::from_secs(60));
    let direct = DirectSandbox {
        sandbox: sandbox.clone(),
        bucket: bucket(),
        ends_at,
    };
    world.platform.state().direct.push(direct);
    let bound = world
        .governor
        .bind_direct(slot, generation, sandbox.clone(), ends_at)
        .await;
    assert_eq!(bound.unwrap(), Answer::Done);
    let record = world.governor.view().await.unwrap().records.remove(0);
    assert_eq!(
        record.owner.as_str(),
        format!("writer:prod:direct:{sandbox}")
    );
    let full = world.governor.admit_direct(&bucket(), short).await.unwrap();
    assert!(
        matches!(full, Admitted::Refused(Answer::Waiting { .. })),
        "{full:?}"
    );

    // Its owner extends it; the fallback must not end it by what it was once.
    let later = world.clock.now().plus(Duration::from_secs(7_200));
    world.platform.state().direct[0].ends_at = later;
    world.round().await;
    world.clock.advance(Duration::from_secs(3_600));
    let work = world.round().await.work;
    let removes = work.iter().any(|w| matches!(w, Work::Remove { .. }));
    assert!(
        !removes,
        "it is asked for by name, and left alone: {work:?}"
    );
    assert_eq!(
        world.governor.view().await.unwrap().records[0].ends_at,
        later
    );

    // It ends by itself while somebody waits.
    let waiting = {
        let governor = world.governor.clone();
        tokio::spawn(async move { governor.admit_direct(&bucket(), second).await })
    };
    world.platform.state().direct.clear();
    let admitted = waiting.await.unwrap().unwrap();
    assert!(matches!(admitted, Admitted::Slot { .. }), "{admitted:?}");
}

#[tokio::test]
async fn a_direct_sandbox_that_the_books_do_not_know_is_counted() {
    // R-G19
    let world = world(5).await;
    world.platform.state().direct.push(DirectSandbox {
        sandbox: "abcdefghij0123456789".parse().unwrap(),
        bucket: bucket(),
        ends_at: Timestamp::FAR_FUTURE,
    });
    world.round().await;
    assert_eq!(world.records().await, 0, "it may be about to be bound");
    world.round().await;
    assert_eq!(world.records().await, 1);
    world.round().await;
    assert_eq!(world.records().await, 1, "once");
}
