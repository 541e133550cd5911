//! One suite for the model, SQLite and Redis: the same histories, the same answers (R-G15).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{collections::BTreeMap, sync::Arc};

use redis::Commands;
use sandhold_books::{KeptBooks, RedisBooks, ServerClock, SqliteBooks, Timed};
use sandhold_governor::{
    books::{Act, Answer, Audit, Books, Verb, View},
    ids::SlotId,
    rules::{Rules, Settings},
};
use sandhold_types::{SandboxId, Timestamp};
use support::{
    RedisServer, ToldClock,
    histories::{Event, History},
};

/// What a history is told with.
const GLOBAL_CAP: u32 = 7;
const STEPS: usize = 3_000;
const SEEDS: std::ops::Range<u64> = 0..6;

fn rules() -> Rules {
    let settings = Settings {
        // Small enough to be reached.
        sealed_max: 5,
        awake_for_removal_max: 2,
        ..Settings::default()
    };
    Rules::new(settings).unwrap()
}

/// A store under test, whose clock is told.
enum Subject {
    Sqlite {
        books: Option<KeptBooks>,
        clock: Arc<ToldClock>,
        dir: tempfile::TempDir,
        restores: u64,
    },
    Redis {
        books: KeptBooks,
        _server: RedisServer,
        raw: redis::Connection,
        _dir: tempfile::TempDir,
    },
}

impl Subject {
    fn sqlite(now: Timestamp) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(ToldClock::new(now));
        let books = Some(open_sqlite(&dir, &clock));
        Self::Sqlite {
            books,
            clock,
            dir,
            restores: 0,
        }
    }

    async fn redis(now: Timestamp) -> Self {
        let _dir = tempfile::tempdir().unwrap();
        let server = RedisServer::start(_dir.path());
        let mut raw = server.connect();
        let () = raw.set("{sandhold}:v1:clock", now.unix_ms()).unwrap();
        let mut settings = server.settings(ServerClock::Key);
        settings.global_cap = Some(GLOBAL_CAP);
        let books = RedisBooks::open(settings, &rules()).await.unwrap();
        let books = KeptBooks::Redis(Box::new(books));
        Self::Redis {
            books,
            _server: server,
            raw,
            _dir,
        }
    }

    fn books(&self) -> &KeptBooks {
        match self {
            Self::Sqlite { books, .. } => books.as_ref().unwrap(),
            Self::Redis { books, .. } => books,
        }
    }

    async fn step(&mut self, verb: Verb, now: Timestamp) -> Timed {
        match self {
            Self::Sqlite { clock, .. } => clock.tell(now),
            Self::Redis { raw, .. } => {
                let () = raw.set("{sandhold}:v1:clock", now.unix_ms()).unwrap();
            }
        }
        self.books().step_timed(verb).await.unwrap()
    }

    /// The store is not the one that it was.
    async fn lose_writes(&mut self, now: Timestamp) {
        match self {
            Self::Sqlite {
                books,
                clock,
                dir,
                restores,
            } => {
                *restores += 1;
                clock.tell(now);
                *books = None;
                let mark = dir.path().join("books.mark");
                std::fs::write(&mark, format!("{:020}\n", *restores * 1_000_000_000)).unwrap();
                *books = Some(open_sqlite(dir, clock));
            }
            Self::Redis { raw, .. } => {
                let common: String = raw.hget("{sandhold}:v1", "g").unwrap();
                let mut parts: Vec<&str> = common.split(' ').collect();
                parts[6] = "another-server";
                let () = raw.hset("{sandhold}:v1", "g", parts.join(" ")).unwrap();
            }
        }
        self.step(Verb::Read, now).await;
    }

    /// Counts that are kept beside the records equal their recount.
    fn check_counts(&mut self, view: &View, waiting: usize) {
        let Self::Redis { raw, .. } = self else {
            return;
        };
        let fields: BTreeMap<String, String> = raw.hgetall("{sandhold}:v1").unwrap();
        let number = |text: &str, part: usize| -> usize {
            text.split(' ').nth(part).unwrap().parse().unwrap()
        };
        let counted = |r: &&sandhold_governor::record::Record| r.is_counted();
        let common = &fields["g"];
        assert_eq!(
            number(common, 1),
            view.records.iter().filter(counted).count()
        );
        assert_eq!(number(common, 2), waiting);
        let awake =
            |r: &&sandhold_governor::record::Record| r.condemned.as_ref().is_some_and(|c| c.awake);
        assert_eq!(number(common, 3), view.records.iter().filter(awake).count());
        for (field, text) in fields.iter().filter(|(field, _)| field.starts_with('b')) {
            let here = view.records.iter().filter(counted);
            let here = here.filter(|r| r.bucket.to_string() == field[1..]).count();
            assert_eq!(number(text, 2), here, "{field}");
        }
        for (key, waits) in [(":w", "HLEN"), (":h", "ZCARD")] {
            let key = format!("{{sandhold}}:v1{key}");
            let length: usize = redis::cmd(waits).arg(key).query(raw).unwrap();
            assert_eq!(length, waiting);
        }
    }
}

fn open_sqlite(dir: &tempfile::TempDir, clock: &Arc<ToldClock>) -> KeptBooks {
    let path = dir.path().join("books.db");
    KeptBooks::Sqlite(SqliteBooks::open(&path, rules(), Some(GLOBAL_CAP), clock.clone()).unwrap())
}

fn view_of(answer: Answer) -> View {
    match answer {
        Answer::Books(view) => *view,
        other => panic!("{other:?}"),
    }
}

/// Tells one history to the model and to the subject, and compares all they say.
async fn same_history(mut subject: Subject, mut history: History, seed: u64) -> Coverage {
    let mut model = Books::new(rules(), Some(GLOBAL_CAP));
    let mut trails: BTreeMap<SlotId, Vec<Audit>> = BTreeMap::new();
    let mut coverage = Coverage::default();
    for n in 0..STEPS {
        let event = history.next(&model);
        let now = history.now();
        match event {
            Event::Step(verb) => {
                let expected = model.step(verb.clone(), now);
                let told = subject.step(verb.clone(), now).await;
                assert_eq!(told.at, now, "the step says when it was");
                assert_eq!(told.step, expected, "seed {seed}, step {n}: {verb:?}");
                coverage.note(&verb, &expected.answer);
                for entry in expected.audit {
                    if entry.sandbox.is_none() && matches!(entry.what, Act::SlotFreed { .. }) {
                        trails.remove(&entry.slot);
                        continue;
                    }
                    trails.entry(entry.slot.clone()).or_default().push(entry);
                }
            }
            Event::LoseWrites => {
                model.begin_recovery(now);
                subject.lose_writes(now).await;
            }
        }
        if n % 50 == 0 {
            let expected = view_of(model.step(Verb::Read, now).answer);
            let told = view_of(subject.step(Verb::Read, now).await.step.answer);
            assert_eq!(told, expected, "seed {seed}, after step {n}");
            subject.check_counts(&told, model.waiting().len());
        }
    }
    for record in model.records() {
        let Some(sandbox) = &record.sandbox else {
            continue;
        };
        let told = subject.books().trail(sandbox).await.unwrap();
        let expected = trails.remove(&record.slot).unwrap_or_default();
        assert_eq!(told, expected, "the trail of {sandbox}");
    }
    let nobody: SandboxId = "zzzzzzzzzzzzzzzzzzzz".parse().unwrap();
    assert_eq!(subject.books().trail(&nobody).await.unwrap(), []);
    coverage
}

/// Which verbs got which kinds of answers: a history that never gets somewhere proves nothing there.
#[derive(Default)]
struct Coverage(std::collections::BTreeSet<(String, String)>);

fn first_word(debug: String) -> String {
    let end = debug
        .find(|c: char| !c.is_alphanumeric())
        .unwrap_or(debug.len());
    debug[..end].to_owned()
}

impl Coverage {
    fn note(&mut self, verb: &Verb, answer: &Answer) {
        let (verb, mut answer) = (first_word(format!("{verb:?}")), format!("{answer:?}"));
        if !answer.starts_with("Refused") {
            answer = first_word(answer);
        }
        self.0.insert((verb, answer));
    }

    fn expect(&self, expected: &[(&str, &[&str])]) {
        for (verb, answers) in expected {
            for answer in *answers {
                let met = self
                    .0
                    .iter()
                    .any(|(v, a)| v == verb && a.starts_with(answer));
                assert!(met, "no history has {verb} answered by {answer}");
            }
        }
    }
}

const EXPECTED: &[(&str, &[&str])] = &[
    (
        "Acquire",
        &[
            "Granted",
            "MakeSandbox",
            "Waiting",
            "BeingMade",
            "CapacityExceeded",
            "UnknownBucket",
            "Recovering",
            "Stale",
            "Busy",
        ],
    ),
    ("ReturnSlot", &["Done", "Unknown"]),
    (
        "Bind",
        &["Granted", "Done", "Refused(Condemned)", "Stale", "Unknown"],
    ),
    (
        "Heartbeat",
        &["Granted", "Stale", "BeingMade", "Recovering"],
    ),
    ("Release", &["Released", "Stale"]),
    ("Discard", &["Done", "Stale"]),
    ("BeginRun", &["RunGoesOn", "Stale", "Busy", "Unknown"]),
    ("RunHeartbeat", &["RunGoesOn", "Stale", "Busy", "Unknown"]),
    ("ClaimRun", &["RunGoesOn", "Busy", "Unknown"]),
    ("CancelRun", &["Done", "Unknown"]),
    ("EndRun", &["Done", "Released", "Unknown"]),
    ("Lock", &["Done", "Busy", "Unknown"]),
    ("Unlock", &["Done", "Unknown"]),
    (
        "BeginRemoval",
        &[
            "Remove",
            "Refused(Held(Black))",
            "Refused(Held(Grey))",
            "Refused(GenerationChanged)",
            "Refused(NoGround)",
            "Refused(Locked)",
            "Refused(Recovering)",
        ],
    ),
    ("BeginWake", &["Wake", "NoWakeBudget", "Unknown"]),
    ("ConfirmGone", &["Done", "Refused(NoGround)", "Unknown"]),
    ("RemovalFailed", &["Done", "Unknown"]),
    ("ExpireMaking", &["Done", "Refused", "Unknown"]),
    ("AdoptStray", &["Done", "Busy"]),
    ("NoteSeen", &["Done", "Unknown"]),
    ("FinishRecovery", &["Done", "Recovering"]),
    ("LeaveQueue", &["Done"]),
];

#[tokio::test]
async fn sqlite_answers_as_the_model_does() {
    // R-G15
    let mut all = Coverage::default();
    for seed in SEEDS {
        let history = History::new(seed, rules());
        let subject = Subject::sqlite(history.now());
        all.0.extend(same_history(subject, history, seed).await.0);
    }
    all.expect(EXPECTED);
}

#[tokio::test]
async fn redis_answers_as_the_model_does() {
    // R-G15
    let mut all = Coverage::default();
    for seed in SEEDS {
        let history = History::new(seed, rules());
        let subject = Subject::redis(history.now()).await;
        all.0.extend(same_history(subject, history, seed).await.0);
    }
    all.expect(EXPECTED);
}

/// Steps that are asked for at once: the first two go alone, the others behind them in one call.
#[tokio::test]
async fn redis_answers_many_at_once_as_the_model_does_one_by_one() {
    for seed in SEEDS {
        let mut history = History::new(seed, rules());
        let mut subject = Subject::redis(history.now()).await;
        let mut model = Books::new(rules(), Some(GLOBAL_CAP));
        for group in 0..STEPS / 20 {
            let now = history.now();
            let (mut verbs, mut expected) = (Vec::new(), Vec::new());
            // Up to so many, `join_all` begins them in their order.
            while verbs.len() < group % 29 + 1 {
                if let Event::Step(verb) = history.next(&model)
                    && verb != Verb::Read
                {
                    expected.push(model.step(verb.clone(), now));
                    verbs.push(verb);
                }
            }
            // The clock is told with the first.
            let expected_view = view_of(model.step(Verb::Read, now).answer);
            subject.step(Verb::Read, now).await;
            let steps = verbs
                .iter()
                .map(|verb| subject.books().step_timed(verb.clone()));
            let told = futures::future::join_all(steps).await;
            for ((verb, expected), told) in verbs.iter().zip(expected).zip(told) {
                assert_eq!(
                    told.unwrap().step,
                    expected,
                    "seed {seed}, group {group}: {verb:?}"
                );
            }
            let told = view_of(subject.step(Verb::Read, now).await.step.answer);
            assert_eq!(told, expected_view, "seed {seed}, after group {group}");
            subject.check_counts(&told, model.waiting().len());
        }
    }
}
