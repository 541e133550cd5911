//! Launches and captures that are cut off half-way: by a deadline, by a caller that goes away, by
//! SIGKILL of the engine's own processes. Needs root and `runsc`.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

mod support;

use std::{
    collections::BTreeSet,
    fs,
    process::Command,
    time::{Duration, Instant},
};

use sandhold_engine::{AfterCapture, Engine, EngineError, InstanceStatus};
use sandhold_network::Network;
use sandhold_platform::Egress;
use sandhold_types::Deadline;
use support::{PLAN, World, soon};

/// Processes of the world's engine whose command line has this word.
fn processes(tag: &str, word: &str) -> Vec<String> {
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        if line.contains(&format!("/run/sandhold/{tag}")) && line.split('\0').any(|a| a == word) {
            found.push(process.file_name().to_string_lossy().into_owned());
        }
    }
    found
}

fn kill(pids: &[String]) {
    for pid in pids {
        let _ = Command::new("kill").args(["-9", pid]).status();
    }
}

#[tokio::test]
async fn a_launch_that_is_cut_off_at_any_moment_is_removed_completely() {
    // R-L3, trap 6 of the engine: a killed `runsc` leaves lock, socket, group, sometimes a sandbox.
    let world = World::new().await;
    for cut_after_ms in (5..180).step_by(25) {
        let made = world.attach(&Egress::Nothing).await;
        let spec = world.spec(&made, None);
        let deadline = Deadline::after(Instant::now(), Duration::from_millis(cut_after_ms));
        match world.engine.launch(&spec, deadline).await {
            Ok(()) => {}
            Err(EngineError::Deadline { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
        world.remove(&made).await;
        assert_eq!(
            world.recount().await,
            BTreeSet::new(),
            "cut after {cut_after_ms} ms"
        );
    }
    world.end().await;
}

#[tokio::test]
async fn a_launch_whose_caller_goes_away_is_ended_and_can_be_removed() {
    let world = World::new().await;
    for gone_after_ms in [20, 60, 100] {
        let made = world.attach(&Egress::Nothing).await;
        let spec = world.spec(&made, None);
        let launch = world.engine.launch(&spec, soon());
        let _ = tokio::time::timeout(Duration::from_millis(gone_after_ms), launch).await;
        world.remove(&made).await;
        assert_eq!(
            world.recount().await,
            BTreeSet::new(),
            "gone after {gone_after_ms} ms"
        );
    }
    world.end().await;
}

#[tokio::test]
async fn calls_that_an_earlier_process_left_are_ended_and_what_they_made_is_found() {
    // The control process dies while `runsc run` is under way: the call goes on without it.
    let world = World::new().await;
    let made = world.attach(&Egress::Nothing).await;
    let spec = world.spec(&made, None);
    let launch = tokio::spawn({
        let engine = world.another_engine().await;
        async move { engine.launch(&spec, soon()).await }
    });
    let end = Instant::now() + Duration::from_secs(10);
    while processes(&world.tag, "gofer").is_empty() {
        assert!(Instant::now() < end);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    kill(&processes(&world.tag, "run"));
    let _ = launch.await.unwrap();
    let later = world.another_engine().await;
    let found = later.list().await.unwrap();
    assert_eq!(found, vec![made.instance.id.clone()]);
    // It was never acknowledged, so whatever there is of it, it does not run.
    let status = later.inspect(&made.instance).await.unwrap();
    assert!(matches!(status, InstanceStatus::Ended(_)), "{status:?}");
    world.remove(&made).await;
    world.end().await;
}

#[tokio::test]
async fn the_end_of_either_half_of_the_engine_is_the_end_of_the_sandbox() {
    // Trap 7.
    let world = World::new().await;
    for half in ["gofer", "boot"] {
        let made = world.boot(PLAN, &Egress::Nothing).await;
        kill(&processes(&world.tag, half));
        let ended =
            tokio::time::timeout(Duration::from_secs(10), world.engine.wait(&made.instance));
        ended.await.unwrap().unwrap();
        world.remove(&made).await;
    }
    world.end().await;
}

#[tokio::test]
async fn a_capture_that_fails_says_so_and_the_truth_can_be_asked_for() {
    // R-L10, trap 3.
    let world = World::new().await;
    let made = world.boot(PLAN, &Egress::Nothing).await;
    let image = world.directory.path().join("image");
    let deadline = Deadline::after(Instant::now(), Duration::from_millis(10));
    let captured = world
        .engine
        .capture(&made.instance, &image, AfterCapture::Continue, deadline)
        .await;
    assert!(
        matches!(captured, Err(EngineError::Deadline { .. })),
        "{captured:?}"
    );
    match world.engine.inspect(&made.instance).await.unwrap() {
        InstanceStatus::Running => assert_eq!(world.ask(&made, "ping").await, "pong"),
        InstanceStatus::Ended(_) => {}
        InstanceStatus::Unknown => panic!("it is known"),
    }
    world.remove(&made).await;
    world.end().await;
}

#[tokio::test]
async fn a_network_of_an_earlier_process_is_used_on_and_removed() {
    // R-L3
    let world = World::new().await;
    let made = world.boot(PLAN, &Egress::Internet).await;
    let later = sandhold_network::LinuxNetwork::new(&world.tag).await;
    // While the earlier one lives it holds the resolver's address; all else works.
    let later = later.unwrap();
    assert!(later.dial(&made.id, support::PORT, soon()).await.is_ok());
    assert_eq!(later.list().await.unwrap(), vec![made.id.clone()]);
    world.engine.remove(&made.instance, soon()).await.unwrap();
    later.detach(&made.id).await.unwrap();
    world.network.detach(&made.id).await.unwrap();
    assert_eq!(world.recount().await, BTreeSet::new());
    world.end().await;
}
