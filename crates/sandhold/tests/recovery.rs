//! R-L3: the server is killed at every step, and what it finds afterwards is put in order.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that meets the unexpected is to fail"
)]

mod support;

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sandhold_types::{Entropy, SeededEntropy};
use support::{Server, Site};

/// The journalled steps of a create, in their order.
const CREATE_STEPS: [&str; 5] = [
    "create.recorded",
    "create.network",
    "create.launched",
    "create.introduced",
    "create.running",
];

/// The journalled steps of a removal, in their order.
const REMOVE_STEPS: [&str; 5] = [
    "remove.recorded",
    "remove.engine",
    "remove.network",
    "remove.tombstone",
    "remove.directory",
];

/// The journalled steps of a pause, in their order.
const PAUSE_STEPS: [&str; 7] = [
    "pause.recorded",
    "pause.quiesced",
    "pause.captured",
    "pause.asleep",
    "remove.engine",
    "remove.network",
    "pause.cleared",
];

/// The journalled steps of a wake-up, in their order.
const RESUME_STEPS: [&str; 6] = [
    "resume.recorded",
    "resume.network",
    "resume.launched",
    "resume.introduced",
    "resume.running",
    "resume.cleared",
];

/// What is on the machine is exactly what is listed, and all of it answers.
fn assert_in_order(site: &Site, server: &Server) -> BTreeSet<String> {
    let listed = server.list();
    for id in &listed {
        assert!(server.answers(id), "{id} is listed and does not answer");
    }
    let traces = site.traces();
    assert_eq!(
        traces.all(),
        listed,
        "traces that are not listed: {traces:?}"
    );
    listed
}

#[test]
fn a_crash_at_any_step_of_a_create_loses_nothing_and_leaves_nothing() {
    let site = Site::new();
    let server = site.start(&[]);
    let kept = server.create().unwrap();
    server.stop();
    for step in CREATE_STEPS {
        let server = site.start(&["--fault-at", step]);
        assert_eq!(
            server.create(),
            None,
            "{step}: the server was to die before its answer"
        );
        server.wait_for_death();
        let server = site.start(&[]);
        let listed = assert_in_order(&site, &server);
        assert!(
            listed.contains(&kept),
            "{step}: an acknowledged sandbox was lost"
        );
        // Only one whose last step was written down may be there besides.
        let most = if step == "create.running" { 2 } else { 1 };
        assert!(listed.len() <= most, "{step}: {listed:?}");
        for id in listed.iter().filter(|id| **id != kept) {
            assert_eq!(server.delete(id), Some(204), "{step}");
        }
        server.stop();
    }
}

#[test]
fn a_crash_at_any_step_of_a_removal_is_finished_after_the_restart() {
    let site = Site::new();
    let server = site.start(&[]);
    let kept = server.create().unwrap();
    server.stop();
    for step in REMOVE_STEPS {
        let server = site.start(&["--fault-at", step]);
        let victim = server.create().unwrap();
        assert_eq!(
            server.delete(&victim),
            None,
            "{step}: the server was to die first"
        );
        server.wait_for_death();
        let server = site.start(&[]);
        let listed = assert_in_order(&site, &server);
        assert_eq!(listed, BTreeSet::from([kept.clone()]), "{step}");
        assert_eq!(server.delete(&victim), Some(404), "{step}: it is gone");
        server.stop();
    }
}

/// The sandbox runs or sleeps; in either case what is on the machine fits, and it can be woken,
/// answers, and can be put to sleep again.
fn assert_sound(site: &Site, server: &Server, id: &str, step: &str) {
    let asleep = match server.state(id).as_str() {
        "paused" => true,
        "running" => false,
        other => panic!("{step}: it is stuck {other}"),
    };
    assert_eq!(server.list(), BTreeSet::from([id.to_owned()]), "{step}");
    let traces = site.traces();
    assert_eq!(traces.all(), server.list(), "{step}: {traces:?}");
    assert_eq!(traces.awake().contains(id), !asleep, "{step}: {traces:?}");
    let woken = server.connect(id);
    assert_eq!(woken, Some(if asleep { 201 } else { 200 }), "{step}");
    assert!(server.answers(id), "{step}");
    assert_eq!(server.pause(id), Some(204), "{step}");
    assert!(site.traces().awake().is_empty(), "{step}: it sleeps");
}

#[test]
fn a_crash_at_any_step_of_a_pause_or_a_wake_up_loses_nothing_and_leaves_nothing() {
    let site = Site::new();
    let server = site.start(&[]);
    let id = server.create().unwrap();
    server.stop();
    for step in PAUSE_STEPS {
        let server = site.start(&["--fault-at", step]);
        server.connect(&id).unwrap();
        assert_eq!(server.pause(&id), None, "{step}: it was to die first");
        server.wait_for_death();
        let server = site.start(&[]);
        assert_sound(&site, &server, &id, step);
        server.stop();
    }
    for step in RESUME_STEPS {
        let server = site.start(&["--fault-at", step]);
        assert_eq!(server.connect(&id), None, "{step}: it was to die first");
        server.wait_for_death();
        let server = site.start(&[]);
        assert_sound(&site, &server, &id, step);
        server.stop();
    }
    let server = site.start(&[]);
    assert_eq!(server.delete(&id), Some(204));
    assert!(site.traces().all().is_empty());
    server.stop();
}

/// The journalled steps of a snapshot, in their order.
const SNAPSHOT_STEPS: [&str; 6] = [
    "snapshot.recorded",
    "snapshot.quiesced",
    "snapshot.captured",
    "snapshot.published",
    "snapshot.running",
    "snapshot.cleared",
];

/// The journalled steps of a rollback, in their order.
const ROLLBACK_STEPS: [&str; 9] = [
    "rollback.recorded",
    "rollback.stopped",
    "resume.network",
    "resume.launched",
    "resume.introduced",
    "rollback.restored",
    "rollback.running",
    "remove.engine",
    "rollback.cleared",
];

/// It runs, answers, has one life, and on the disk are the snapshots that are listed.
fn assert_running(site: &Site, server: &Server, id: &str, step: &str) {
    assert_eq!(server.state(id), "running", "{step}");
    assert_eq!(
        assert_in_order(site, server),
        BTreeSet::from([id.to_owned()]),
        "{step}"
    );
    let directory = site.path().join("sandboxes").join(id);
    let names = std::fs::read_dir(directory).unwrap().flatten();
    let names: Vec<_> = names
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    let lives = names
        .iter()
        .filter(|name| name.starts_with("life-"))
        .count();
    let images = names
        .iter()
        .filter(|name| name.starts_with("image-"))
        .count();
    assert_eq!((lives, images), (1, 0), "{step}: {names:?}");
    assert_eq!(site.snapshots_on_disk(), server.snapshots(), "{step}");
}

#[test]
fn a_crash_at_any_step_of_a_snapshot_or_a_rollback_loses_nothing_and_leaves_nothing() {
    let site = Site::new();
    let server = site.start(&[]);
    let id = server.create().unwrap();
    let kept = server.snapshot(&id).unwrap();
    server.stop();
    for step in SNAPSHOT_STEPS {
        let server = site.start(&["--fault-at", step]);
        assert_eq!(server.snapshot(&id), None, "{step}: it was to die first");
        server.wait_for_death();
        let server = site.start(&[]);
        assert_running(&site, &server, &id, step);
        assert!(server.snapshots().contains(&kept), "{step}");
        let again = server.snapshot(&id).unwrap();
        assert_eq!(server.roll_back(&id, &again), Some(200), "{step}");
        assert!(server.answers(&id), "{step}");
        server.stop();
    }
    for step in ROLLBACK_STEPS {
        let server = site.start(&["--fault-at", step]);
        let rolled = server.roll_back(&id, &kept);
        assert_eq!(rolled, None, "{step}: it was to die first");
        server.wait_for_death();
        let server = site.start(&[]);
        assert_running(&site, &server, &id, step);
        assert_eq!(server.roll_back(&id, &kept), Some(200), "{step}");
        assert!(server.answers(&id), "{step}");
        server.stop();
    }
    let server = site.start(&[]);
    assert_eq!(server.delete(&id), Some(204));
    assert!(site.traces().all().is_empty());
    server.stop();
}

#[test]
fn a_crash_while_copies_are_made_leaves_none_of_them() {
    // R-T2
    let site = Site::new();
    let server = site.start(&[]);
    let id = server.create().unwrap();
    server.stop();
    for step in ["create.recorded:3", "create.launched:2", "create.running:4"] {
        let server = site.start(&["--fault-at", step]);
        assert_eq!(server.clones(&id, 4), None, "{step}: it was to die first");
        server.wait_for_death();
        let server = site.start(&[]);
        assert_running(&site, &server, &id, step);
        assert!(site.snapshots_on_disk().is_empty(), "{step}");
        server.stop();
    }
    let server = site.start(&[]);
    assert_eq!(server.clones(&id, 4), Some(201));
    assert_eq!(server.list().len(), 5);
    assert!(site.snapshots_on_disk().is_empty());
    server.stop();
}

/// Creates and deletes until told to stop or the server dies, keeping the books of a client.
#[derive(Default)]
struct Client {
    acknowledged: BTreeSet<String>,
    in_doubt: BTreeSet<String>,
}

fn churn(server: &Server, books: &Mutex<Client>, stop: &AtomicBool) {
    const KEPT: usize = 2;
    while !stop.load(Ordering::Acquire) {
        let victim = {
            let mut client = books.lock().unwrap();
            let is_many = client.acknowledged.len() > KEPT;
            let victim = is_many.then(|| client.acknowledged.pop_first()).flatten();
            // Until the answer comes, a client cannot know whether it is there.
            client.in_doubt.extend(victim.clone());
            victim
        };
        if let Some(victim) = victim {
            let Some(status) = server.delete(&victim) else {
                return;
            };
            assert_eq!(status, 204);
            books.lock().unwrap().in_doubt.remove(&victim);
            continue;
        }
        let Some(id) = server.create() else { return };
        books.lock().unwrap().acknowledged.insert(id.clone());
        // Every one sleeps once in its life, so that deaths fall into that too.
        match server.pause(&id) {
            Some(status) => assert_eq!(status, 204),
            None => return,
        }
    }
}

#[test]
fn two_hundred_crashes_at_random_lose_nothing_that_was_acknowledged() {
    const CRASHES: usize = 200;
    const LIFE_MS_MAX: u16 = 700;
    let site = Site::new();
    let books = Arc::new(Mutex::new(Client::default()));
    let entropy = SeededEntropy::new(0x5a4d);
    for crash in 0..CRASHES {
        let server = Arc::new(site.start(&[]));
        {
            let mut client = books.lock().unwrap();
            let listed = server.list();
            let lost: Vec<_> = client.acknowledged.difference(&listed).collect();
            assert!(
                lost.is_empty(),
                "crash {crash}: {lost:?} were acknowledged and are lost"
            );
            for id in &client.acknowledged {
                let woken = server.connect(id);
                assert!(
                    matches!(woken, Some(200 | 201)),
                    "crash {crash}: {id}: {woken:?}"
                );
                assert!(server.answers(id), "crash {crash}: {id} does not answer");
            }
            // Adopt what was made but not told, so that it is deleted in its turn.
            client.acknowledged = listed;
            client.in_doubt.clear();
        }
        let stop = Arc::new(AtomicBool::new(false));
        let client = std::thread::spawn({
            let (server, books, stop) = (server.clone(), books.clone(), stop.clone());
            move || churn(&server, &books, &stop)
        });
        let mut random = [0u8; 2];
        entropy.fill(&mut random);
        let life_ms = u16::from_le_bytes(random) % LIFE_MS_MAX;
        std::thread::sleep(Duration::from_millis(u64::from(life_ms)));
        server.kill_now();
        stop.store(true, Ordering::Release);
        client.join().unwrap();
    }
    let server = site.start(&[]);
    for id in server.list() {
        assert!(matches!(server.connect(&id), Some(200 | 201)));
    }
    let listed = assert_in_order(&site, &server);
    assert!(books.lock().unwrap().acknowledged.is_subset(&listed));
    server.stop();
}

#[test]
fn a_stop_in_good_order_leaves_nothing_of_the_node() {
    let site = Site::new();
    let server = site.start(&["--on-exit", "kill"]);
    let limits =
        std::fs::read_to_string(format!("/proc/{}/limits", server.pid().as_raw_nonzero())).unwrap();
    let descriptors = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let bounds: Vec<&str> = descriptors.unwrap().split_whitespace().skip(3).collect();
    assert_eq!(
        bounds[0], bounds[1],
        "the soft limit is raised to the hard one"
    );
    server.create().unwrap();
    let state = std::path::PathBuf::from("/run/sandhold").join(site.tag());
    assert!(state.exists());
    server.stop();
    assert!(!state.exists(), "{} stays", state.display());
}
