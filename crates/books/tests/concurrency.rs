//! Many callers at once: never over quota, first come first served, nothing lost (R-G4, R-G5).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use sandhold_books::{KeptBooks, RedisBooks, ServerClock, SqliteBooks};
use sandhold_governor::{
    Store,
    books::{Answer, Verb, View},
    rules::Rules,
};
use sandhold_types::SystemClock;
use support::{RedisServer, acquire, give_back, set_bucket};

const CALLERS: usize = 64;
const QUOTA: u32 = 5;
const ROUNDS: usize = 20;

/// A store, what it stands on, and more replicas of it where there can be.
struct Subject {
    replicas: Vec<Arc<KeptBooks>>,
    _server: Option<RedisServer>,
    _dir: tempfile::TempDir,
}

fn sqlite() -> Subject {
    let _dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(SystemClock);
    let books =
        SqliteBooks::open(&_dir.path().join("books.db"), Rules::default(), None, clock).unwrap();
    Subject {
        replicas: vec![Arc::new(KeptBooks::Sqlite(books))],
        _server: None,
        _dir,
    }
}

async fn redis() -> Subject {
    let _dir = tempfile::tempdir().unwrap();
    let server = RedisServer::start(_dir.path());
    let mut replicas = Vec::new();
    for _ in 0..4 {
        let settings = server.settings(ServerClock::Own);
        let books = RedisBooks::open(settings, &Rules::default()).await.unwrap();
        replicas.push(Arc::new(KeptBooks::Redis(Box::new(books))));
    }
    Subject {
        replicas,
        _server: Some(server),
        _dir,
    }
}

async fn answer(books: &KeptBooks, verb: Verb) -> Answer {
    books.step(verb).await.unwrap().answer
}

async fn view(books: &KeptBooks) -> View {
    match answer(books, Verb::Read).await {
        Answer::Books(view) => *view,
        other => panic!("{other:?}"),
    }
}

/// Who has a slot, as those who have one say it. It is told after a slot is taken and before it is
/// given back, so it never shows more than there are.
#[derive(Default)]
struct Observer {
    held: AtomicI64,
    held_max: AtomicI64,
    taken: AtomicU64,
}

impl Observer {
    fn took(&self) {
        let held = self.held.fetch_add(1, Ordering::SeqCst) + 1;
        self.held_max.fetch_max(held, Ordering::SeqCst);
        self.taken.fetch_add(1, Ordering::SeqCst);
    }

    fn gives(&self) {
        self.held.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn many_callers_on_a_small_quota(subject: Subject) {
    answer(&subject.replicas[0], set_bucket("a", QUOTA)).await;
    let observer = Arc::new(Observer::default());
    let callers = (0..CALLERS).map(|caller| {
        let books = subject.replicas[caller % subject.replicas.len()].clone();
        let observer = observer.clone();
        tokio::spawn(async move {
            for round in 0..ROUNDS {
                let slot = format!("s{caller}-{round}");
                let owner = format!("owner:{caller}");
                let lease = format!("l{round}");
                while !matches!(
                    answer(&books, acquire("a", &slot, &owner, &lease)).await,
                    Answer::MakeSandbox { .. }
                ) {
                    tokio::task::yield_now().await;
                }
                observer.took();
                tokio::task::yield_now().await;
                observer.gives();
                assert_eq!(answer(&books, give_back(&slot)).await, Answer::Done);
            }
        })
    });
    let callers: Vec<_> = callers.collect();
    for caller in callers {
        caller.await.unwrap();
    }
    assert_eq!(
        observer.taken.load(Ordering::SeqCst),
        (CALLERS * ROUNDS) as u64
    );
    let held_max = observer.held_max.load(Ordering::SeqCst);
    assert!(held_max <= i64::from(QUOTA), "{held_max} at once");
    assert!(held_max > 1, "nothing ran side by side: {held_max}");
    assert_eq!(
        view(&subject.replicas[0]).await.records,
        [],
        "no slot is lost"
    );
}

/// Whoever asked first is served first, in whichever order they ask again.
async fn first_come_first_served(subject: Subject) {
    let books = &subject.replicas[0];
    answer(books, set_bucket("a", 1)).await;
    let ask = |n: usize| acquire("a", &format!("s{n}"), &format!("owner:{n}"), "l");
    let replica = |n: usize| &subject.replicas[n % subject.replicas.len()];
    assert!(matches!(
        answer(books, ask(0)).await,
        Answer::MakeSandbox { .. }
    ));
    for n in 1..10 {
        assert_eq!(
            answer(replica(n), ask(n)).await,
            Answer::Waiting { ahead: n - 1 }
        );
    }
    let mut served = vec![0];
    while served.len() < 10 {
        let last = served.last().unwrap();
        answer(books, give_back(&format!("s{last}"))).await;
        // The last of the line asks first.
        for n in (1..10)
            .rev()
            .filter(|n| !served.contains(n))
            .collect::<Vec<_>>()
        {
            if matches!(answer(replica(n), ask(n)).await, Answer::MakeSandbox { .. }) {
                served.push(n);
            }
        }
    }
    assert_eq!(served, (0..10).collect::<Vec<_>>());
}

/// The same request sent twice at once takes one slot (its answer may have been lost).
async fn twins_take_one_slot(subject: Subject) {
    let books = &subject.replicas[0];
    answer(books, set_bucket("a", 10)).await;
    let twins = (0..8).map(|n| {
        let books = subject.replicas[n % subject.replicas.len()].clone();
        tokio::spawn(async move { answer(&books, acquire("a", "s", "owner:1", "l")).await })
    });
    let twins: Vec<_> = twins.collect();
    let mut answers = Vec::new();
    for twin in twins {
        answers.push(twin.await.unwrap());
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "one generation: {answers:?}");
    assert_eq!(view(books).await.records.len(), 1);
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    let patience = Duration::from_secs(60);
    tokio::time::timeout(patience, work)
        .await
        .expect("it never ended")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_never_oversells() {
    within(many_callers_on_a_small_quota(sqlite())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_never_oversells_to_four_replicas() {
    within(many_callers_on_a_small_quota(redis().await)).await;
}

#[tokio::test]
async fn sqlite_serves_first_come_first() {
    within(first_come_first_served(sqlite())).await;
}

#[tokio::test]
async fn redis_serves_first_come_first() {
    within(first_come_first_served(redis().await)).await;
}

#[tokio::test]
async fn sqlite_takes_a_request_once() {
    within(twins_take_one_slot(sqlite())).await;
}

#[tokio::test]
async fn redis_takes_a_request_once() {
    within(twins_take_one_slot(redis().await)).await;
}
