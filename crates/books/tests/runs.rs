//! The logs of runs, the same on both stores (R-G3).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{sync::Arc, time::Duration};

use sandhold_books::{
    ServerClock,
    runs::{
        Append, ENDED_KEPT, ENTRIES_MAX, Ending, Entry, KeptRuns, Opened, READ_ENTRIES_MAX,
        RedisRuns, SqliteRuns, Written,
    },
};
use sandhold_governor::ids::{ReplicaId, RunId};
use sandhold_types::{ManualClock, Timestamp};
use support::{RedisServer, replica};

const START: Timestamp = Timestamp::from_unix_ms(1_700_000_000_000);

struct Both {
    _dir: tempfile::TempDir,
    server: RedisServer,
    clock: Arc<ManualClock>,
    kept: Vec<(&'static str, KeptRuns)>,
}

impl Both {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = RedisServer::start(dir.path());
        let clock = Arc::new(ManualClock::new(START));
        let sqlite = SqliteRuns::open_file(&dir.path().join("runs.db"), clock.clone()).unwrap();
        let redis = RedisRuns::new(&server.settings(ServerClock::Key)).unwrap();
        let both = Self {
            _dir: dir,
            server,
            clock,
            kept: vec![
                ("SQLite", KeptRuns::Sqlite(sqlite)),
                ("Redis", KeptRuns::Redis(Box::new(redis))),
            ],
        };
        both.advance(Duration::ZERO);
        both
    }

    fn advance(&self, time: Duration) {
        use sandhold_types::Clock as _;
        self.clock.advance(time);
        let now_ms = self.clock.now().unix_ms();
        redis::cmd("SET")
            .arg("{sandhold}:v1:clock")
            .arg(now_ms)
            .exec(&mut self.server.connect())
            .unwrap();
    }
}

fn run(name: &str) -> RunId {
    name.parse().unwrap()
}

fn entry(n: u64) -> Entry {
    Entry {
        kind: "progress".to_owned(),
        data: format!("{{\"n\":{n},\"text\":\"a\\nb\"}}"),
    }
}

async fn append(
    runs: &KeptRuns,
    name: &str,
    writer: &ReplicaId,
    after: u64,
    entries: &[Entry],
    ending: Ending,
) -> Written {
    let append = Append {
        after,
        head: None,
        entries,
        ending,
    };
    runs.append(&run(name), writer, append).await.unwrap()
}

#[tokio::test]
async fn a_log_is_written_by_one_and_read_by_any() {
    let both = Both::new();
    let (a, b) = (replica("a"), replica("b"));
    for (store, runs) in &both.kept {
        let name = run("r");
        assert_eq!(
            runs.open(&name, "head", &a).await.unwrap(),
            Opened::New,
            "{store}"
        );
        assert_eq!(
            runs.open(&name, "other", &b).await.unwrap(),
            Opened::Exists,
            "{store}"
        );
        let two = [entry(1), entry(2)];
        let write = async |writer: &ReplicaId, after| {
            append(runs, "r", writer, after, &two, Ending::Open).await
        };
        assert_eq!(write(&a, 0).await, Written::Done, "{store}");
        assert_eq!(
            write(&a, 0).await,
            Written::Done,
            "{store}: its answer was lost"
        );
        assert_eq!(write(&b, 2).await, Written::NotWriter, "{store}");
        assert_eq!(
            write(&a, 3).await,
            Written::Lost,
            "{store}: there is no third"
        );
        assert_eq!(
            write(&a, 1).await,
            Written::NotWriter,
            "{store}: another wrote since"
        );
        assert_eq!(runs.read(&name, 0).await.unwrap(), two, "{store}");
        assert_eq!(runs.read(&name, 1).await.unwrap(), [entry(2)], "{store}");
        assert!(runs.read(&name, 2).await.unwrap().is_empty(), "{store}");
        let state = runs.state(&name).await.unwrap().unwrap();
        assert_eq!((state.head.as_str(), state.last), ("head", 2), "{store}");
        assert_eq!(
            (state.heard_at, state.now, state.writer),
            (START, START, a.clone()),
            "{store}"
        );
    }
}

#[tokio::test]
async fn nothing_follows_the_end() {
    let both = Both::new();
    let a = replica("a");
    for (store, runs) in &both.kept {
        let name = run("r");
        runs.open(&name, "head", &a).await.unwrap();
        assert_eq!(runs.unfinished().await.unwrap().len(), 1, "{store}");
        let end = [entry(1)];
        let closing = async || append(runs, "r", &a, 0, &end, Ending::Closed).await;
        assert_eq!(closing().await, Written::Done, "{store}");
        assert_eq!(
            closing().await,
            Written::Done,
            "{store}: its answer was lost"
        );
        let more = append(runs, "r", &a, 1, &end, Ending::Open).await;
        assert_eq!(more, Written::NotWriter, "{store}");
        assert!(runs.unfinished().await.unwrap().is_empty(), "{store}");
        let claimed = runs
            .claim(&name, &replica("b"), Duration::ZERO)
            .await
            .unwrap();
        assert_eq!(claimed, Written::NotWriter, "{store}");
        let state = runs.state(&name).await.unwrap().unwrap();
        assert_eq!(state.ending, Ending::Closed, "{store}");
    }
}

#[tokio::test]
async fn only_a_silent_writer_is_replaced() {
    let both = Both::new();
    let (a, b) = (replica("a"), replica("b"));
    let silence = Duration::from_secs(120);
    for (_, runs) in &both.kept {
        runs.open(&run("r"), "head", &a).await.unwrap();
    }
    both.advance(silence / 2);
    for (_, runs) in &both.kept {
        append(runs, "r", &a, 0, &[], Ending::Open).await;
    }
    both.advance(silence - Duration::from_millis(1));
    for (store, runs) in &both.kept {
        let claimed = runs.claim(&run("r"), &b, silence).await.unwrap();
        assert_eq!(
            claimed,
            Written::NotWriter,
            "{store}: it said that it is alive"
        );
    }
    both.advance(Duration::from_millis(1));
    for (store, runs) in &both.kept {
        let claimed = runs.claim(&run("r"), &b, silence).await.unwrap();
        assert_eq!(claimed, Written::Done, "{store}");
        let late = append(runs, "r", &a, 0, &[entry(1)], Ending::Open).await;
        assert_eq!(late, Written::NotWriter, "{store}: the first comes back");
        let now = append(runs, "r", &b, 0, &[entry(1)], Ending::Open).await;
        assert_eq!(now, Written::Done, "{store}");
    }
}

#[tokio::test]
async fn a_log_is_bounded_and_its_end_always_fits() {
    let both = Both::new();
    let a = replica("a");
    for (store, runs) in &both.kept {
        runs.open(&run("r"), "head", &a).await.unwrap();
        let many: Vec<Entry> = (0..ENTRIES_MAX).map(entry).collect();
        let full = append(runs, "r", &a, 0, &many, Ending::Open).await;
        assert_eq!(full, Written::Done, "{store}");
        let last = [entry(0)];
        let more = append(runs, "r", &a, ENTRIES_MAX, &last, Ending::Open).await;
        assert_eq!(more, Written::Full, "{store}");
        let beat = append(runs, "r", &a, ENTRIES_MAX, &[], Ending::Open).await;
        assert_eq!(beat, Written::Done, "{store}");
        let end = append(runs, "r", &a, ENTRIES_MAX, &last, Ending::Closed).await;
        assert_eq!(end, Written::Done, "{store}");
        let read = runs.read(&run("r"), 5).await.unwrap();
        assert_eq!(read.len() as u64, READ_ENTRIES_MAX, "{store}");
        assert_eq!(read[0], entry(5), "{store}");
    }
}

#[tokio::test]
async fn what_never_came_to_be_is_forgotten_by_who_began_it() {
    let both = Both::new();
    let (a, b) = (replica("a"), replica("b"));
    for (store, runs) in &both.kept {
        let name = run("r");
        runs.open(&name, "head", &a).await.unwrap();
        runs.forget(&name, &b).await.unwrap();
        assert!(runs.state(&name).await.unwrap().is_some(), "{store}");
        runs.forget(&name, &a).await.unwrap();
        assert!(runs.state(&name).await.unwrap().is_none(), "{store}");
        let gone = append(runs, "r", &a, 0, &[entry(1)], Ending::Open).await;
        assert_eq!(gone, Written::Lost, "{store}");
        assert!(runs.unfinished().await.unwrap().is_empty(), "{store}");
    }
}

#[tokio::test]
async fn an_ended_log_is_kept_for_a_day() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(START));
    let runs = SqliteRuns::open_file(&dir.path().join("runs.db"), clock.clone()).unwrap();
    let runs = KeptRuns::Sqlite(runs);
    let a = replica("a");
    runs.open(&run("old"), "head", &a).await.unwrap();
    append(&runs, "old", &a, 0, &[entry(1)], Ending::Closed).await;
    clock.advance(ENDED_KEPT + Duration::from_secs(1));
    runs.open(&run("new"), "head", &a).await.unwrap();
    assert!(runs.state(&run("old")).await.unwrap().is_none());
    assert!(runs.read(&run("old"), 0).await.unwrap().is_empty());
}
