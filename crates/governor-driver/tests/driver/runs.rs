//! Runs, and what becomes of them when something ends at any of their steps (R-G1, R-G3).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sandhold_books::runs::{Ending, Entry};
use sandhold_governor::{
    books::{Keep, Limit},
    ids::RunId,
};
use sandhold_governor_driver::{Cancelled, Globs, RunAsk, RunFile, RunRefused};
use sandhold_types::{ManualClock, Timestamp};
use serde_json::Value;

use crate::{
    guest::Guest,
    played::{Played, World, bucket, short, world_in},
};

pub(crate) fn ask(owner: &str) -> RunAsk {
    RunAsk {
        run: None,
        bucket: bucket(),
        owner: owner.parse().unwrap(),
        lease: None,
        project: "p".to_owned(),
        session_run: "s".to_owned(),
        template: "main".parse().unwrap(),
        files: vec![RunFile {
            path: "in.txt".to_owned(),
            content: "input".into(),
        }],
        context: Some("{\"a\":1}".into()),
        command: vec!["work".to_owned(), "--hard".to_owned()],
        env_vars: BTreeMap::from([("NAME".to_owned(), "value".to_owned())]),
        cwd: String::new(),
        timeout: Duration::from_secs(600),
        artifacts: Globs::new(vec!["*.png".to_owned()]).unwrap(),
        keep: Keep::Nothing,
    }
}

/// A world in which nothing takes long.
async fn world(quota: u32) -> World {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_ms(1_700_000_000_000)));
    world_in(short(), dir, clock, Played::default(), quota).await
}

impl World {
    pub(crate) async fn start(&self, ask: RunAsk) -> RunId {
        self.governor.start_run(ask).await.unwrap()
    }

    /// The events after a number, up to the one of this kind.
    pub(crate) async fn until(&self, run: &RunId, after: u64, kind: &str) -> Vec<Told> {
        let mut told = Vec::new();
        let reading = async {
            loop {
                let next = after + told.len() as u64;
                let wait = Duration::from_secs(30);
                let (entries, ending) = self.governor.run_events(run, next, wait).await.unwrap();
                assert_eq!(ending, Ending::Open, "it ended without {kind}: {told:?}");
                told.extend(entries.iter().map(Told::of));
                if told.iter().any(|event| event.kind == kind) {
                    return;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(30), reading)
            .await
            .expect("the event comes");
        told
    }

    pub(crate) fn guest<T>(&self, with: impl FnOnce(&mut Guest) -> T) -> T {
        with(&mut self.platform.state().guest)
    }

    /// Waits until the process of a run was launched; its loop goes on meanwhile.
    async fn until_launched(&self, run: &RunId) {
        self.until(run, 0, "started").await;
    }

    /// Nothing of a run is left: no process, no slot, no sandbox.
    async fn is_clean(&self) {
        self.until_records(0).await;
        let state = self.platform.state();
        assert!(state.sandboxes.is_empty(), "a sandbox is left");
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) kind: String,
    pub(crate) data: Value,
}

impl Told {
    pub(crate) fn of(entry: &Entry) -> Self {
        Self {
            kind: entry.kind.clone(),
            data: serde_json::from_str(&entry.data).unwrap(),
        }
    }
}

fn kinds(told: &[Told]) -> Vec<&str> {
    told.iter().map(|event| event.kind.as_str()).collect()
}

#[tokio::test]
async fn a_run_writes_its_files_tells_its_artifacts_and_leaves_nothing() {
    let world = world(1).await;
    let reclaimer = world.governor.start();
    let run = world.start(ask("o")).await;
    world.until_launched(&run).await;
    let process = world.guest(|guest| {
        assert_eq!(guest.files["/home/user/in.txt"], "input");
        let process = guest.process.clone().unwrap();
        let context = process.env_vars["SANDHOLD_CONTEXT"]
            .as_str()
            .unwrap()
            .to_owned();
        assert_eq!(guest.files[&context], "{\"a\":1}");
        guest.writes("plot.png", "pixels");
        guest.writes("notes.txt", "not asked for");
        process
    });
    assert_eq!(process.command, ["work", "--hard"]);
    assert_eq!(process.env_vars["NAME"], "value");
    world.until(&run, 1, "progress").await;
    world.guest(|guest| {
        guest.writes("last.png", "more");
        guest.exits(3, "said");
    });
    let told = world.until(&run, 0, "completed").await;
    assert_eq!(
        kinds(&told),
        ["started", "progress", "progress", "completed"]
    );
    let artifact = &told[1].data["artifact"];
    assert_eq!(
        (&artifact["path"], &artifact["content_base64"]),
        (&"plot.png".into(), &"cGl4ZWxz".into())
    );
    assert_eq!(
        told[2].data["artifact"]["path"], "last.png",
        "what was written last is told"
    );
    let end = &told[3].data;
    assert_eq!(
        (&end["exit_code"], &end["stdout"]),
        (&3.into(), &"said".into())
    );
    world.is_clean().await;
    let (after, ending) = world
        .governor
        .run_events(&run, 4, Duration::ZERO)
        .await
        .unwrap();
    assert!(after.is_empty() && ending == Ending::Closed);
    reclaimer.abort();
}

#[tokio::test]
async fn a_process_that_was_killed_with_its_shell_has_ended_too() {
    let world = world(1).await;
    let run = world.start(ask("o")).await;
    world.until_launched(&run).await;
    world.guest(Guest::is_killed);
    let told = world.until(&run, 0, "completed").await;
    assert_eq!(told.last().unwrap().data["exit_code"], 137);
}

#[tokio::test]
async fn whoever_attaches_later_misses_nothing() {
    let world = world(1).await;
    let run = world.start(ask("o")).await;
    world.until_launched(&run).await;
    world.guest(|guest| guest.exits(0, ""));
    let all = world.until(&run, 0, "completed").await;
    let rest = world.until(&run, 1, "completed").await;
    assert_eq!(
        (kinds(&all), kinds(&rest)),
        (vec!["started", "completed"], vec!["completed"])
    );
}

#[tokio::test]
async fn the_same_name_is_the_same_run_and_no_other_owners() {
    let world = world(3).await;
    let named = |owner: &str| RunAsk {
        run: Some("mine".parse().unwrap()),
        ..ask(owner)
    };
    let run = world.start(named("o")).await;
    assert_eq!(world.start(named("o")).await, run);
    world.until_launched(&run).await;
    assert_eq!(world.guest(|guest| guest.launched), 1);
    let other = world.governor.start_run(named("other")).await;
    assert_eq!(other, Err(RunRefused::NameTaken));
    assert_eq!(world.records().await, 1);
}

#[tokio::test]
async fn a_refused_run_has_taken_nothing() {
    // R-G4, R-G7
    let world = world(1).await;
    world.take("holder", "held").await;
    let time_passes = async {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            world.clock.advance(Duration::from_millis(20));
        }
    };
    let refused = tokio::select! {
        refused = world.governor.start_run(ask("o")) => refused,
        () = time_passes => unreachable!(),
    };
    assert_eq!(refused, Err(RunRefused::NoPlace(Limit::Bucket)));
    let with_lease = RunAsk {
        lease: Some("held".parse().unwrap()),
        ..ask("o")
    };
    let refused = world.governor.start_run(with_lease).await;
    assert_eq!(refused, Err(RunRefused::LeaseOfAnother));
    let elsewhere = RunAsk {
        bucket: sandhold_governor::ids::Bucket {
            namespace: "nobody".parse().unwrap(),
            env: "prod".parse().unwrap(),
        },
        ..ask("o")
    };
    let refused = world.governor.start_run(elsewhere).await;
    assert_eq!(refused, Err(RunRefused::UnknownBucket));
    assert_eq!(world.records().await, 1, "only the holder's");
}

#[tokio::test]
async fn one_sandbox_has_one_run_at_a_time_and_stays_for_its_lease() {
    let world = world(1).await;
    let kept = || RunAsk {
        lease: Some("l".parse().unwrap()),
        keep: Keep::Sandbox,
        ..ask("o")
    };
    let first = world.start(kept()).await;
    world.until_launched(&first).await;
    assert_eq!(
        world.governor.start_run(kept()).await,
        Err(RunRefused::Busy)
    );
    world.guest(|guest| guest.exits(0, ""));
    world.until(&first, 0, "completed").await;
    assert_eq!(world.records().await, 1, "the sandbox stays");
    let second = world.start(kept()).await;
    let told = world.until(&second, 0, "started").await;
    assert_eq!(told[0].data["reused"], true);
}

#[tokio::test]
async fn a_cancel_needs_owner_and_lease() {
    let world = world(1).await;
    let reclaimer = world.governor.start();
    let run = world.start(ask("o")).await;
    world.until_launched(&run).await;
    let lease = world.governor.run(&run).await.unwrap().unwrap().head.lease;
    let cancel = async |owner: &str, lease: &str| {
        let (owner, lease) = (owner.parse().unwrap(), lease.parse().unwrap());
        world
            .governor
            .cancel_run(&run, &owner, &lease)
            .await
            .unwrap()
    };
    assert_eq!(cancel("other", &lease).await, Cancelled::Unknown);
    assert!(matches!(cancel("o", "old").await, Cancelled::Stale { .. }));
    assert_eq!(cancel("o", &lease).await, Cancelled::Asked);
    let told = world.until(&run, 0, "error").await;
    assert_eq!(told.last().unwrap().data["code"], "cancelled");
    assert!(
        world.guest(|guest| guest.process.is_none()),
        "it was killed"
    );
    assert_eq!(cancel("o", &lease).await, Cancelled::EndedBefore);
    world.is_clean().await;
    reclaimer.abort();
}

/// A replica's life, which ends as by SIGKILL.
pub(crate) fn life<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let value = runtime.block_on(work);
    runtime.shutdown_timeout(Duration::from_secs(10));
    value
}

#[test]
fn a_run_whose_replica_died_goes_on_with_another() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_ms(1_700_000_000_000)));
    let platform = Played::default();
    let run = life(async {
        let world = world_in(short(), dir.clone(), clock.clone(), platform.clone(), 1).await;
        let run = world.start(ask("o")).await;
        world.until_launched(&run).await;
        world.guest(|guest| guest.writes("one.png", "1"));
        world.until(&run, 1, "progress").await;
        run
    });
    life(async {
        let world = world_in(short(), dir.clone(), clock.clone(), platform.clone(), 1).await;
        world.governor.adopt_silent_runs().await.unwrap();
        let (told, _) = world
            .governor
            .run_events(&run, 2, Duration::ZERO)
            .await
            .unwrap();
        assert!(told.is_empty(), "its replica may be alive");
        clock.advance(world.governor.rules().black());
        world.governor.adopt_silent_runs().await.unwrap();
        world.guest(|guest| {
            guest.writes("two.png", "2");
            guest.exits(0, "");
        });
        let told = world.until(&run, 2, "completed").await;
        assert_eq!(kinds(&told), ["progress", "completed"]);
        assert_eq!(
            told[0].data["artifact"]["path"], "two.png",
            "what was told is not told again"
        );
        assert_eq!(told[1].data["artifacts"], 2);
        assert_eq!(world.guest(|guest| guest.launched), 1);
    });
}

#[test]
fn a_run_whose_sandbox_was_swept_meanwhile_ends_with_a_reason() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_ms(1_700_000_000_000)));
    let platform = Played::default();
    let run = life(async {
        let world = world_in(short(), dir.clone(), clock.clone(), platform.clone(), 1).await;
        let run = world.start(ask("o")).await;
        world.until_launched(&run).await;
        run
    });
    life(async {
        let world = world_in(short(), dir.clone(), clock.clone(), platform.clone(), 1).await;
        clock.advance(world.governor.rules().grey());
        world.round().await;
        world.round().await;
        world.is_clean().await;
        world.governor.adopt_silent_runs().await.unwrap();
        let told = world.until(&run, 1, "error").await;
        assert_eq!(told[0].data["code"], "lease_lost");
    });
}
