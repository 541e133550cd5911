//! What was answered is there: after SIGKILL, and what was lost is settled: after a failover or a
//! restore (R-G6, R-G15).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use redis::Commands;
use sandhold_books::{KeptBooks, RedisBooks, ServerClock, SqliteBooks};
use sandhold_governor::{
    Store, StoreError,
    books::{Answer, Stage, Verb, View},
    rules::Rules,
};
use sandhold_types::{Generation, SystemClock, Timestamp};
use support::{RedisServer, ToldClock, acquire, bucket, sandbox, set_bucket, slot};

/// Names the directory in which the child of [`what_was_answered_survives_sigkill`] steps.
const CHILD_DIR: &str = "SANDHOLD_BOOKS_CHILD_DIR";
const ANSWERED_BEFORE_THE_KILL: usize = 500;

fn open_sqlite(dir: &Path) -> SqliteBooks {
    let path = dir.join("books.db");
    SqliteBooks::open(&path, Rules::default(), None, Arc::new(SystemClock)).unwrap()
}

async fn answer(books: &impl Store, verb: Verb) -> Answer {
    books.step(verb).await.unwrap().answer
}

async fn view(books: &impl Store) -> View {
    match answer(books, Verb::Read).await {
        Answer::Books(view) => *view,
        other => panic!("{other:?}"),
    }
}

/// Many callers step without end and say what they were answered. Not a test: it is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the child of what_was_answered_survives_sigkill"]
async fn child_steps_until_it_is_killed() {
    let dir = std::env::var(CHILD_DIR).expect("started by its parent only");
    let books = Arc::new(open_sqlite(Path::new(&dir)));
    answer(&*books, set_bucket("a", 1_000_000)).await;
    let callers = (0..16).map(|caller| {
        let books = books.clone();
        tokio::spawn(async move {
            for n in 0.. {
                let name = format!("s{caller}-{n}");
                let verb = acquire("a", &name, &format!("owner:{name}"), "l");
                let Answer::MakeSandbox { slot, generation } = answer(&*books, verb).await else {
                    panic!("no slot");
                };
                let said = format!("\nanswered {slot} {generation}\n");
                std::io::stdout().lock().write_all(said.as_bytes()).unwrap();
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
}

#[tokio::test]
async fn what_was_answered_survives_sigkill() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "child_steps_until_it_is_killed",
            "--ignored",
            "--nocapture",
        ])
        .env(CHILD_DIR, dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stdout.take().unwrap());
    let mut answered = BTreeMap::new();
    let mut killed = false;
    for line in said.lines().map(Result::unwrap) {
        let mut words = line.split(' ');
        if words.next() != Some("answered") {
            continue;
        }
        // The kill may have cut the last line short.
        if let (Some(name), Some(generation)) = (words.next(), words.next()) {
            answered.insert(name.to_owned(), generation.to_owned());
        }
        if answered.len() >= ANSWERED_BEFORE_THE_KILL && !killed {
            child.kill().unwrap();
            killed = true;
        }
    }
    child.wait().unwrap();
    assert!(killed, "the child ended by itself");

    let books = open_sqlite(dir.path());
    let view = view(&books).await;
    assert_eq!(view.stage, Stage::Settled, "a crash loses nothing");
    let there: BTreeMap<String, String> = view
        .records
        .iter()
        .map(|r| (r.slot.to_string(), r.generation.to_string()))
        .collect();
    for (name, generation) in &answered {
        let kept = there.get(name);
        assert!(
            kept.is_some_and(|kept| kept.starts_with(generation.as_str())),
            "{name} was answered with {generation}, kept is {kept:?}"
        );
    }
    let highest = view.records.iter().map(|r| r.generation).max().unwrap();
    let Answer::MakeSandbox { generation, .. } =
        answer(&books, acquire("a", "after", "owner:after", "l")).await
    else {
        panic!("no slot after the restart");
    };
    assert!(generation > highest, "a generation came again");
}

#[tokio::test]
async fn one_process_has_the_books() {
    let dir = tempfile::tempdir().unwrap();
    let first = open_sqlite(dir.path());
    let path = dir.path().join("books.db");
    let clock = Arc::new(SystemClock);
    let second = SqliteBooks::open(&path, Rules::default(), None, clock.clone());
    assert!(second.is_err(), "two memories of one file");
    drop(first);
    SqliteBooks::open(&path, Rules::default(), None, clock).unwrap();
}

#[tokio::test]
async fn books_put_back_from_a_backup_settle_first() {
    // R-G6: fencing tokens never repeat, not even after a restore.
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ToldClock::new(at(0)));
    let path = dir.path().join("books.db");
    let open = || SqliteBooks::open(&path, Rules::default(), None, clock.clone()).unwrap();
    let books = open();
    answer(&books, set_bucket("a", 3)).await;
    make(&books, 1).await;
    drop(books);
    let backup = std::fs::read(&path).unwrap();
    let books = open();
    clock.tell(at(5));
    let lost = make(&books, 2).await;
    drop(books);

    std::fs::write(&path, backup).unwrap();
    // Even a clock that is behind what was granted makes no generation come again.
    clock.tell(at(1));
    let books = open();
    settles_and_goes_on(&books, |s| clock.tell(at(s)), lost).await;
}

#[tokio::test]
async fn a_redis_that_lost_its_last_writes_settles_first() {
    // R-G6, safety B9: a failover is allowed to lose what was acknowledged.
    let dir = tempfile::tempdir().unwrap();
    let server = RedisServer::start(dir.path());
    let tell = |server: &RedisServer, s: u64| {
        let mut raw = server.connect();
        let () = raw.set("{sandhold}:v1:clock", at(s).unix_ms()).unwrap();
    };
    tell(&server, 0);
    let settings = server.settings(ServerClock::Key);
    let books = RedisBooks::open(settings, &Rules::default()).await.unwrap();
    let books = KeptBooks::Redis(Box::new(books));
    answer(&books, set_bucket("a", 3)).await;
    make(&books, 1).await;
    let () = redis::cmd("SAVE").query(&mut server.connect()).unwrap();
    tell(&server, 5);
    let lost = make(&books, 2).await;
    server.kill();
    let gone = books.step(Verb::Read).await;
    assert!(
        matches!(gone, Err(StoreError::NoAnswer | StoreError::Unavailable)),
        "{gone:?}"
    );

    let server = RedisServer::start(dir.path());
    tell(&server, 1);
    settles_and_goes_on(&books, |s| tell(&server, s), lost).await;
}

#[tokio::test]
async fn a_bucket_that_an_older_server_wrote_goes_on() {
    // R-G13: it had no defaults for its runs.
    let dir = tempfile::tempdir().unwrap();
    let server = RedisServer::start(dir.path());
    let settings = server.settings(ServerClock::Own);
    let books = RedisBooks::open(settings, &Rules::default()).await.unwrap();
    let books = KeptBooks::Redis(Box::new(books));
    answer(&books, set_bucket("a", 3)).await;
    let (key, field) = ("{sandhold}:v1", format!("b{}", bucket("a")));
    let mut raw = server.connect();
    let new: String = raw.hget(key, &field).unwrap();
    let old = new.strip_suffix(' ').expect("it ends with what is new");
    let () = raw.hset(key, &field, old).unwrap();
    assert_eq!(view(&books).await.buckets[&bucket("a")].quota, 3);
    make(&books, 1).await;
    let counted: String = raw.hget(key, &field).unwrap();
    assert_eq!(counted, "3  1 ", "it is counted, and written as it is now");
}

#[tokio::test]
async fn a_redis_that_lost_everything_settles_first() {
    let dir = tempfile::tempdir().unwrap();
    let server = RedisServer::start(dir.path());
    let settings = server.settings(ServerClock::Own);
    let books = RedisBooks::open(settings.clone(), &Rules::default())
        .await
        .unwrap();
    assert_eq!(
        view(&books).await.stage,
        Stage::Settled,
        "books that begin have lost nothing"
    );
    let () = redis::cmd("FLUSHALL").query(&mut server.connect()).unwrap();
    assert!(matches!(view(&books).await.stage, Stage::Settling { .. }));
    let other = RedisBooks::open(settings, &Rules::default()).await.unwrap();
    assert!(
        matches!(view(&other).await.stage, Stage::Settling { .. }),
        "for everybody"
    );
}

/// R-G15: functions are no part of the books; who removes them takes nothing from anybody.
#[tokio::test]
async fn a_redis_that_forgot_its_functions_learns_them_again() {
    let dir = tempfile::tempdir().unwrap();
    let server = RedisServer::start(dir.path());
    let settings = server.settings(ServerClock::Own);
    let books = RedisBooks::open(settings, &Rules::default()).await.unwrap();
    answer(&books, set_bucket("a", 1)).await;
    let () = redis::cmd("FUNCTION")
        .arg("FLUSH")
        .query(&mut server.connect())
        .unwrap();
    let taken = answer(&books, acquire("a", "s1", "owner:1", "l")).await;
    assert!(matches!(taken, Answer::MakeSandbox { .. }), "{taken:?}");
}

fn at(s: u64) -> Timestamp {
    Timestamp::from_unix_ms(1_700_000_000_000 + s * 1_000)
}

/// Makes the n-th sandbox and says under which generation.
async fn make(books: &impl Store, n: u64) -> Generation {
    let name = format!("s{n}");
    let verb = acquire("a", &name, &format!("owner:{n}"), "l");
    let Answer::MakeSandbox { generation, .. } = answer(books, verb).await else {
        panic!("no slot for {n}");
    };
    let bound = Verb::Bind {
        slot: slot(&name),
        generation,
        sandbox: sandbox(n),
        ends_at: Timestamp::FAR_FUTURE,
    };
    assert!(matches!(answer(books, bound).await, Answer::Granted(_)));
    generation
}

/// The books know sandbox 1, and forgot sandbox 2, which runs under generation `lost`.
async fn settles_and_goes_on(books: &impl Store, tell: impl Fn(u64), lost: Generation) {
    let before = view(books).await;
    let Stage::Settling { since } = before.stage else {
        panic!("nobody noticed");
    };
    assert_eq!(since, at(1));
    assert_eq!(before.records.len(), 1);
    let new = acquire("a", "s3", "owner:3", "l");
    assert_eq!(answer(books, new.clone()).await, Answer::Recovering);
    let renewal = Verb::Heartbeat {
        bucket: bucket("a"),
        owner: "owner:1".parse().unwrap(),
        lease: "l".parse().unwrap(),
        generation: before.records[0].generation,
        ends_at: None,
    };
    assert!(
        matches!(answer(books, renewal).await, Answer::Granted(_)),
        "who is known goes on"
    );

    let settled = 1 + Rules::default().settle().as_secs();
    tell(settled);
    let stray = Verb::AdoptStray {
        slot: slot("s2"),
        sandbox: sandbox(2),
        bucket: bucket("a"),
        owner: "owner:2".parse().unwrap(),
        ends_at: Timestamp::FAR_FUTURE,
    };
    assert_eq!(answer(books, stray).await, Answer::Done);
    let finish = Verb::FinishRecovery {
        highest: lost,
        settled_from: at(settled),
    };
    assert_eq!(
        answer(books, finish.clone()).await,
        Answer::Recovering,
        "one was not seen yet"
    );
    let seen = Verb::NoteSeen {
        slot: slot("s1"),
        seen: sandhold_governor::colour::Seen::Running,
    };
    assert_eq!(answer(books, seen).await, Answer::Done);
    assert_eq!(answer(books, finish).await, Answer::Done);
    let Answer::MakeSandbox { generation, .. } = answer(books, new).await else {
        panic!("nobody is admitted any more");
    };
    assert!(
        generation > lost,
        "{generation} after {lost}: it came again"
    );
    let full = acquire("a", "s4", "owner:4", "l");
    let waiting = answer(books, full).await;
    assert_eq!(
        waiting,
        Answer::Waiting { ahead: 0 },
        "the forgotten one counts"
    );
}

#[tokio::test]
async fn nobody_there_is_told_in_time() {
    let mut settings = sandhold_books::RedisSettings::at("redis+unix:///nowhere/redis.sock");
    settings.answer_within = Duration::from_secs(1);
    assert!(RedisBooks::open(settings, &Rules::default()).await.is_err());
}
