//! Lives of real sandboxes, from launch to removal. Needs root and `runsc`.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

mod support;

use std::collections::BTreeSet;

use sandhold_engine::{AfterCapture, Engine, EngineError, ExitCause, InstanceStatus};
use sandhold_network::Network;
use sandhold_platform::{DialError, Egress};
use support::{PLAN, World, soon};

#[tokio::test]
async fn a_sandbox_boots_answers_and_leaves_nothing() {
    let world = World::new().await;
    let made = world.boot(PLAN, &Egress::Nothing).await;
    assert_eq!(
        world.engine.list().await.unwrap(),
        vec![made.instance.id.clone()]
    );
    assert_eq!(
        world.engine.inspect(&made.instance).await.unwrap(),
        InstanceStatus::Running
    );
    // BC-106
    let machine = world.ask(&made, "machine").await;
    assert_eq!(machine, "memory_kib=262144 cores=2 hostname=test-guest");
    let used = world.engine.usage(&made.instance).await.unwrap();
    assert!(used.memory_bytes > 0 && used.cpu_usec > 0, "{used:?}");
    let closed = world.network.dial(&made.id, 1, soon()).await.unwrap_err();
    assert!(
        matches!(closed, DialError::PortClosed { port: 1 }),
        "{closed:?}"
    );
    world.remove(&made).await;
    let gone = world.network.dial(&made.id, 1, soon()).await.unwrap_err();
    assert!(matches!(gone, DialError::Gone), "{gone:?}");
    assert_eq!(
        world.engine.inspect(&made.instance).await.unwrap(),
        InstanceStatus::Unknown
    );
    // Idempotent.
    world.remove(&made).await;
    world.end().await;
}

#[tokio::test]
async fn copies_of_one_image_go_on_where_it_was_taken_and_are_independent() {
    let world = World::new().await;
    let source = world.boot(PLAN, &Egress::Nothing).await;
    assert_eq!(world.ask(&source, "count").await, "1");
    assert_eq!(world.ask(&source, "put /root/note kept").await, "ok");
    let image = world.directory.path().join("image");
    world
        .engine
        .capture(&source.instance, &image, AfterCapture::Continue, soon())
        .await
        .unwrap();
    assert_eq!(world.ask(&source, "count").await, "2");
    world.remove(&source).await;
    let (a, b, c) = tokio::join!(
        world.restore(&image),
        world.restore(&image),
        world.restore(&image)
    );
    for copy in [&a, &b, &c] {
        assert_eq!(world.ask(copy, "count").await, "2");
        assert_eq!(world.ask(copy, "read /root/note").await, "kept");
        let name = copy.id.to_string();
        assert_eq!(
            world.ask(copy, &format!("put /root/note {name}")).await,
            "ok"
        );
    }
    for copy in [&a, &b, &c] {
        assert_eq!(
            world.ask(copy, "read /root/note").await,
            copy.id.to_string()
        );
        world.remove(copy).await;
    }
    world.end().await;
}

#[tokio::test]
async fn a_captured_and_stopped_sandbox_comes_back_in_the_same_namespace() {
    let world = World::new().await;
    let first = world.boot(PLAN, &Egress::Nothing).await;
    assert_eq!(world.ask(&first, "count").await, "1");
    let image = world.directory.path().join("image");
    world
        .engine
        .capture(&first.instance, &image, AfterCapture::Stop, soon())
        .await
        .unwrap();
    world.engine.wait(&first.instance).await.unwrap();
    world.engine.remove(&first.instance, soon()).await.unwrap();
    let attachment = world.network.readdress(&first.id).await.unwrap();
    let second = world.box_of(first.id.clone(), attachment.namespace, 2);
    let spec = world.spec(&second, Some(&image));
    world.engine.launch(&spec, soon()).await.unwrap();
    assert_eq!(world.ask(&second, "count").await, "2");
    world.remove(&second).await;
    world.end().await;
}

#[tokio::test]
async fn a_frozen_sandbox_uses_no_processor_time_and_goes_on_when_thawed() {
    let world = World::new().await;
    let made = world.boot(PLAN, &Egress::Nothing).await;
    assert_eq!(world.ask(&made, "spin").await, "ok");
    world.engine.freeze(&made.instance).await.unwrap();
    let before = world.engine.usage(&made.instance).await.unwrap().cpu_usec;
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    let after = world.engine.usage(&made.instance).await.unwrap().cpu_usec;
    assert_eq!(before, after);
    world.engine.thaw(&made.instance).await.unwrap();
    world.engine.thaw(&made.instance).await.unwrap();
    assert_eq!(world.ask(&made, "ping").await, "pong");
    world.remove(&made).await;
    world.end().await;
}

#[tokio::test]
async fn removal_works_from_every_state() {
    let world = World::new().await;
    // Frozen.
    let frozen = world.boot(PLAN, &Egress::Nothing).await;
    world.engine.freeze(&frozen.instance).await.unwrap();
    world.remove(&frozen).await;
    // Ended by itself.
    let ended = world.boot(PLAN, &Egress::Nothing).await;
    let _ = world.try_ask(&ended, "exit 7").await;
    assert_eq!(
        world.engine.wait(&ended.instance).await.unwrap(),
        ExitCause::Exited(7)
    );
    assert_eq!(
        world.engine.inspect(&ended.instance).await.unwrap(),
        InstanceStatus::Ended(ExitCause::Exited(7))
    );
    world.remove(&ended).await;
    // Never started.
    let never = world.attach(&Egress::Nothing).await;
    world.remove(&never).await;
    // Refused by the engine.
    let refused = world.attach(&Egress::Nothing).await;
    let spec = world.spec(&refused, Some(&world.directory.path().join("no-image")));
    let error = world.engine.launch(&spec, soon()).await.unwrap_err();
    assert!(
        matches!(
            error,
            EngineError::Program {
                step: "restoring",
                ..
            }
        ),
        "{error:?}"
    );
    world.remove(&refused).await;
    world.end().await;
}

#[tokio::test]
async fn another_process_of_the_node_finds_and_owns_what_was_started() {
    // R-L3
    let world = World::new().await;
    let made = world.boot(PLAN, &Egress::Nothing).await;
    let later = world.another_engine().await;
    assert_eq!(later.list().await.unwrap(), vec![made.instance.id.clone()]);
    assert_eq!(
        later.inspect(&made.instance).await.unwrap(),
        InstanceStatus::Running
    );
    assert!(later.usage(&made.instance).await.unwrap().memory_bytes > 0);
    let _ = world.try_ask(&made, "exit 3").await;
    assert_eq!(
        later.wait(&made.instance).await.unwrap(),
        ExitCause::Exited(3)
    );
    later.remove(&made.instance, soon()).await.unwrap();
    world.network.detach(&made.id).await.unwrap();
    assert_eq!(world.recount().await, BTreeSet::new());
    world.end().await;
}

#[tokio::test]
async fn a_prepared_sandbox_is_not_running_is_launched_and_is_removed_like_any_other() {
    let world = World::new().await;
    let source = world.boot(PLAN, &Egress::Nothing).await;
    assert_eq!(world.ask(&source, "count").await, "1");
    let image = world.directory.path().join("image");
    let captured = world
        .engine
        .capture(&source.instance, &image, AfterCapture::Stop, soon());
    captured.await.unwrap();
    world.remove(&source).await;
    // Used as it was meant, by a later process of the node.
    let used = world.attach(&Egress::Nothing).await;
    let spec = world.spec(&used, Some(&image));
    world.engine.prepare(&spec, soon()).await.unwrap();
    let status = world.engine.inspect(&used.instance).await.unwrap();
    assert!(matches!(status, InstanceStatus::Ended(_)), "{status:?}");
    assert_eq!(
        world.engine.list().await.unwrap(),
        vec![used.instance.id.clone()]
    );
    let later = world.another_engine().await;
    later.launch(&spec, soon()).await.unwrap();
    world.answers(&used).await;
    assert_eq!(world.ask(&used, "count").await, "2");
    // Prepared for something else than it is launched with.
    let other = world.attach(&Egress::Nothing).await;
    let mut spec = world.spec(&other, Some(&image));
    world.engine.prepare(&spec, soon()).await.unwrap();
    spec.resources.memory_mib *= 2;
    world.engine.launch(&spec, soon()).await.unwrap();
    world.answers(&other).await;
    assert!(
        world
            .ask(&other, "machine")
            .await
            .contains("memory_kib=524288")
    );
    // Booted, and never used.
    let booted = world.attach(&Egress::Nothing).await;
    let spec = world.spec(&booted, None);
    world.engine.prepare(&spec, soon()).await.unwrap();
    world.engine.launch(&spec, soon()).await.unwrap();
    world.answers(&booted).await;
    let unused = world.attach(&Egress::Nothing).await;
    world
        .engine
        .prepare(&world.spec(&unused, None), soon())
        .await
        .unwrap();
    for made in [&used, &other, &booted, &unused] {
        world.remove(made).await;
    }
    world.end().await;
}
