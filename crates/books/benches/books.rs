//! What a step on the books costs, next to the cheapest script that the same Redis can run, and what
//! a round of the reclaimer costs over 100,000 sandboxes.
//!
//! Goals: steps on Redis reach at least 70 % of `redis-benchmark` with `EVALSHA` of `return 1`, with
//! the same number of callers, in turns within one run; a round takes under 1 s and under 200 MB.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss
)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    process::{Command, ExitCode},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use sandhold_books::{KeptBooks, RedisBooks, ServerClock, SqliteBooks};
use sandhold_governor::{
    Listed, Store,
    books::{Answer, Verb, View},
    colour::Seen,
    reclaimer::{Evidence, Reclaimer},
    rules::Rules,
};
use sandhold_types::{Generation, SystemClock, Timestamp};
use support::{RedisServer, acquire, bucket, give_back, sandbox, set_bucket, slot};

const CALLERS: [usize; 2] = [1, 64];
const TURNS: usize = 5;
const TURN: Duration = Duration::from_secs(2);
const SANDBOXES: usize = 100_000;

const REDIS_SHARE_MIN: f64 = 0.70;
const ROUND_MAX: Duration = Duration::from_secs(1);
const ROUND_BYTES_MAX: u64 = 200_000_000;

fn main() -> ExitCode {
    // `cargo test --benches` runs this too; it measures nothing there.
    if !std::env::args().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let met = [runtime.block_on(steps()), runtime.block_on(rounds())];
    if met.iter().all(|met| *met) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Steps per second of this many callers, each taking a slot and giving it back.
async fn steps_per_s(books: &Arc<KeptBooks>, callers: usize, turn: usize) -> f64 {
    let (stop, steps) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let began = Instant::now();
    let callers: Vec<_> = (0..callers)
        .map(|caller| {
            let (books, stop, steps) = (books.clone(), stop.clone(), steps.clone());
            tokio::spawn(async move {
                let owner = format!("owner:{caller}");
                let mut n = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    let name = format!("s{turn}-{caller}-{n}");
                    let taken = books.step(acquire("a", &name, &owner, "l")).await.unwrap();
                    assert!(
                        matches!(taken.answer, Answer::MakeSandbox { .. }),
                        "{taken:?}"
                    );
                    let given = books.step(give_back(&name)).await.unwrap();
                    assert_eq!(given.answer, Answer::Done);
                    n += 1;
                    steps.fetch_add(2, Ordering::Relaxed);
                }
            })
        })
        .collect();
    tokio::time::sleep(TURN).await;
    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    steps.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64()
}

/// `EVALSHA` of `return 1` per second, as redis-benchmark counts.
fn bare_per_s(server: &RedisServer, sha: &str, callers: usize, requests: u64) -> f64 {
    let out = Command::new("redis-benchmark")
        .args([
            "-q",
            "--csv",
            "-c",
            &callers.to_string(),
            "-n",
            &requests.to_string(),
            "-s",
        ])
        .arg(server.socket())
        .args(["EVALSHA", sha, "0"])
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let row = text.lines().last().unwrap();
    row.split(',')
        .nth(1)
        .unwrap()
        .trim_matches('"')
        .parse()
        .unwrap()
}

/// The same script per second by our own client: what is left of the share is what steps do.
async fn by_our_client_per_s(server: &RedisServer, sha: &str, callers: usize) -> f64 {
    let client = redis::Client::open(server.settings(ServerClock::Own).url).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let began = Instant::now();
    let callers: Vec<_> = (0..callers)
        .map(|_| {
            let (mut connection, stop) = (connection.clone(), stop.clone());
            let sha = sha.to_owned();
            tokio::spawn(async move {
                let mut calls = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    let mut call = redis::cmd("EVALSHA");
                    call.arg(&sha).arg(0);
                    let () = call.exec_async(&mut connection).await.unwrap();
                    calls += 1;
                }
                calls
            })
        })
        .collect();
    tokio::time::sleep(TURN).await;
    stop.store(true, Ordering::Relaxed);
    let mut calls = 0;
    for caller in callers {
        calls += caller.await.unwrap();
    }
    calls as f64 / began.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn steps() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let server = RedisServer::start(dir.path());
    let settings = server.settings(ServerClock::Own);
    let redis = RedisBooks::open(settings, &Rules::default()).await.unwrap();
    let redis = Arc::new(KeptBooks::Redis(Box::new(redis)));
    let path = dir.path().join("books.db");
    let sqlite = SqliteBooks::open(&path, Rules::default(), None, Arc::new(SystemClock)).unwrap();
    let sqlite = Arc::new(KeptBooks::Sqlite(sqlite));
    for books in [&redis, &sqlite] {
        books.step(set_bucket("a", 1_000)).await.unwrap();
    }
    let mut raw = server.connect();
    let sha: String = redis::cmd("SCRIPT")
        .arg("LOAD")
        .arg("return 1")
        .query(&mut raw)
        .unwrap();

    println!(
        "steps per second, taking a slot and giving it back (medians of {TURNS} turns of {TURN:?})"
    );
    println!("callers  redis-benchmark EVALSHA  by our client  on Redis  share  on SQLite");
    let mut met = true;
    for callers in CALLERS {
        let (mut bare, mut ours) = (Vec::new(), Vec::new());
        let (mut on_redis, mut on_sqlite) = (Vec::new(), Vec::new());
        let mut requests = 20_000;
        for turn in 0..TURNS {
            let rate = bare_per_s(&server, &sha, callers, requests);
            // About as long a turn as the others have.
            requests = (rate * TURN.as_secs_f64()) as u64;
            bare.push(rate);
            ours.push(by_our_client_per_s(&server, &sha, callers).await);
            on_redis.push(steps_per_s(&redis, callers, turn).await);
            on_sqlite.push(steps_per_s(&sqlite, callers, turn).await);
        }
        let (bare, ours) = (median(bare), median(ours));
        let (on_redis, on_sqlite) = (median(on_redis), median(on_sqlite));
        let share = on_redis / bare;
        met &= share >= REDIS_SHARE_MIN;
        let percent = share * 100.0;
        println!(
            "{callers:7}  {bare:23.0}  {ours:13.0}  {on_redis:8.0}  {percent:3.0} %  {on_sqlite:9.0}"
        );
    }
    let stats: String = redis::cmd("INFO")
        .arg("commandstats")
        .query(&mut raw)
        .unwrap();
    for line in stats
        .lines()
        .filter(|line| line.starts_with("cmdstat_evalsha:") || line.starts_with("cmdstat_fcall:"))
    {
        println!("on the server: {line}");
    }
    met
}

/// The most memory that this process had since the mark was set back.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1_024
}

fn set_peak_back() {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
}

/// Books with many leased sandboxes.
async fn fill(books: &Arc<KeptBooks>) {
    books.step(set_bucket("a", 1_000_000)).await.unwrap();
    let mut work = tokio::task::JoinSet::new();
    for n in 0..SANDBOXES {
        let books = books.clone();
        work.spawn(async move {
            let name = format!("s{n}");
            let verb = acquire("a", &name, &format!("owner:{n}"), "l");
            let Answer::MakeSandbox { generation, .. } = books.step(verb).await.unwrap().answer
            else {
                panic!("no slot");
            };
            let bound = Verb::Bind {
                slot: slot(&name),
                generation,
                sandbox: sandbox(n as u64),
                ends_at: Timestamp::FAR_FUTURE,
            };
            books.step(bound).await.unwrap();
        });
        if work.len() >= 512 {
            work.join_next().await.unwrap().unwrap();
        }
    }
    while let Some(done) = work.join_next().await {
        done.unwrap();
    }
}

async fn view(books: &KeptBooks) -> View {
    match books.step(Verb::Read).await.unwrap().answer {
        Answer::Books(view) => *view,
        other => panic!("{other:?}"),
    }
}

fn listing() -> Vec<Listed> {
    let of = |n: usize| Listed {
        sandbox: sandbox(n as u64),
        slot: slot(&format!("s{n}")),
        bucket: bucket("a"),
        owner: format!("owner:{n}").parse().unwrap(),
        seen: Seen::Running,
        ends_at: Timestamp::FAR_FUTURE,
        generation: Generation(1),
    };
    (0..SANDBOXES).map(of).collect()
}

/// A round that finds everything in order: reading the books, the plan, and the memory of both.
async fn round(name: &str, books: &Arc<KeptBooks>) -> bool {
    fill(books).await;
    let mut reclaimer = Reclaimer::new(Rules::default());
    set_peak_back();
    let before = peak_bytes();
    let began = Instant::now();
    let listing = Some(listing());
    let view = view(books).await;
    let read = began.elapsed();
    assert_eq!(view.records.len(), SANDBOXES);
    let evidence = Evidence {
        began_at: view.now,
        listing,
        view,
    };
    let plan = reclaimer.plan(&evidence);
    let took = began.elapsed();
    assert_eq!(plan.work, [], "every one of them is held");
    let bytes = peak_bytes() - before;
    let (read_ms, took_ms) = (read.as_millis(), took.as_millis());
    println!(
        "a round over {SANDBOXES} sandboxes, books {name}: {took_ms} ms, of it {read_ms} ms for \
         the listing and the books; {} MB",
        bytes / 1_000_000
    );
    took <= ROUND_MAX && bytes <= ROUND_BYTES_MAX
}

async fn rounds() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let rules = Rules::default();
    let path = dir.path().join("books.db");
    let sqlite = SqliteBooks::open(&path, rules.clone(), None, Arc::new(SystemClock)).unwrap();
    let in_file = round("in SQLite", &Arc::new(KeptBooks::Sqlite(sqlite))).await;
    let server = RedisServer::start(dir.path());
    let settings = server.settings(ServerClock::Own);
    let redis = RedisBooks::open(settings, &rules).await.unwrap();
    let on_redis = round("on Redis", &Arc::new(KeptBooks::Redis(Box::new(redis)))).await;
    in_file && on_redis
}
