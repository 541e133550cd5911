//! The node's promises over a scripted engine: whatever the engine does, there is one outcome,
//! nothing is stuck and nothing is left.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that meets the unexpected is to fail"
)]

mod support;

use std::{sync::atomic::Ordering, time::Duration};

use sandhold_engine::{
    ExitCause, InstanceId,
    sim::{Fault, Operation},
};
use sandhold_platform::{LifetimeChange, Platform, PlatformError, RouteLookup, Routes};
use sandhold_types::{Actor, Clocking, EndReason, SandboxState};
use support::{FOR_EVER, Machine, create, eventually, request, within};

#[tokio::test(start_paused = true)]
async fn a_created_sandbox_runs_and_a_killed_one_is_gone_and_remembered() {
    // R-P6, R-L8, R-L12
    let machine = Machine::new();
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    assert_eq!(made.state, SandboxState::Running);
    assert!(matches!(node.route(&made.id), RouteLookup::Live(_)));
    node.kill(&made.id, Actor::Operator, within(10))
        .await
        .unwrap();
    assert!(machine.is_clean().await);
    let killed = EndReason::Killed {
        by: Actor::Operator,
    };
    let ended = node.get(&made.id).unwrap().ended.clone().unwrap();
    assert_eq!(ended.reason, killed);
    assert!(matches!(node.route(&made.id), RouteLookup::Ended(reason) if reason == killed));
    let again = node.kill(&made.id, Actor::Operator, within(10)).await;
    assert!(matches!(again, Err(PlatformError::NotFound(_))));
}

#[tokio::test(start_paused = true)]
async fn whatever_goes_wrong_with_a_create_nothing_is_left() {
    // R-L3, R-L10: each fault at each step that a create takes.
    let faults = [
        Fault::Error,
        Fault::LostReply,
        Fault::Hang,
        Fault::LateSuccess,
    ];
    for fault in faults {
        let machine = Machine::new();
        machine.engine.plan(Operation::Launch, 1, fault);
        let node = machine.start().await;
        let refused = create(&node).await;
        assert!(refused.is_err(), "{fault:?}");
        eventually("nothing is left", async || machine.is_clean().await).await;
        assert!(node.list().is_empty(), "{fault:?}");
        assert!(
            create(&node).await.is_ok(),
            "{fault:?}: the next one is not harmed"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_network_that_cannot_be_built_fails_the_create_only() {
    let machine = Machine::new();
    machine
        .network
        .refuse_next(sandhold_network::sim::Operation::Attach);
    let node = machine.start().await;
    assert!(matches!(
        create(&node).await,
        Err(PlatformError::Node { .. })
    ));
    eventually("nothing is left", async || machine.is_clean().await).await;
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_never_answers_is_not_handed_out() {
    // R-P6
    let machine = Machine::new();
    machine.agent.silent.store(true, Ordering::Release);
    let node = machine.start().await;
    let refused = create(&node).await.unwrap_err();
    let late = matches!(
        refused,
        PlatformError::GuestUnresponsive { .. } | PlatformError::Deadline { .. }
    );
    assert!(late, "{refused:?}");
    eventually("nothing is left", async || machine.is_clean().await).await;
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_fails_says_when_to_come_back_and_is_finished() {
    // R-L8: 503 with a time to come back; never stuck; success means gone.
    for fault in [Fault::Error, Fault::Hang, Fault::LostReply, Fault::Lie] {
        let machine = Machine::new();
        machine.engine.plan(Operation::Remove, 1, fault);
        let node = machine.start().await;
        let made = create(&node).await.unwrap();
        let refused = node.kill(&made.id, Actor::Operator, within(5)).await;
        let busy = matches!(refused, Err(PlatformError::Busy { retry_after, .. })
            if retry_after == Duration::from_secs(2));
        assert!(busy, "{fault:?}: {refused:?}");
        assert_eq!(node.get(&made.id).unwrap().state, SandboxState::Killing);
        node.kill(&made.id, Actor::Operator, within(5))
            .await
            .unwrap();
        assert!(machine.is_clean().await, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_unfinished_removal_is_finished_though_nobody_asks_again() {
    let machine = Machine::new();
    machine.engine.plan(Operation::Remove, 1, Fault::Error);
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    node.kill(&made.id, Actor::Operator, within(5))
        .await
        .unwrap_err();
    eventually("it is gone", async || machine.is_clean().await).await;
    let ended = node.get(&made.id).unwrap().ended.clone().unwrap();
    assert_eq!(
        ended.reason,
        EndReason::Killed {
            by: Actor::Operator
        }
    );
}

#[tokio::test(start_paused = true)]
async fn of_many_deletes_at_once_one_wins_and_the_others_are_told_it_is_gone() {
    // BC-068
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    let kills = (0..8).map(|_| node.kill(&id, Actor::Operator, within(10)));
    let outcomes = futures::future::join_all(kills).await;
    let won = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    assert_eq!(won, 1);
    let gone = |outcome: &Result<(), _>| matches!(outcome, Err(PlatformError::NotFound(_)));
    assert_eq!(outcomes.iter().filter(|outcome| gone(outcome)).count(), 7);
}

#[tokio::test(start_paused = true)]
async fn reads_do_not_wait_for_an_engine_that_hangs() {
    // R-P9
    let machine = Machine::new();
    let node = machine.start().await;
    let first = create(&node).await.unwrap();
    machine.engine.plan(Operation::Launch, 1, Fault::Hang);
    let hanging = tokio::spawn({
        let node = node.clone();
        async move { create(&node).await }
    });
    eventually("the second is being made", async || node.list().len() == 2).await;
    assert_eq!(node.get(&first.id).unwrap().state, SandboxState::Running);
    node.kill(&first.id, Actor::Operator, within(5))
        .await
        .unwrap();
    assert!(hanging.await.unwrap().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_a_sandbox_and_an_idle_window_slides_with_use() {
    // R-L5, R-L6
    let machine = Machine::new();
    let node = machine.start().await;
    let idle = Clocking::Idle {
        window_ms: Some(10_000),
    };
    let used = node.create(request(idle), within(10)).await.unwrap();
    let end = machine_time(&machine, 10_000);
    let fixed = node
        .create(request(Clocking::Deadline { end }), within(10))
        .await
        .unwrap();
    for _ in 0..5 {
        use sandhold_platform::ActivityKind;
        machine.clock.advance(Duration::from_secs(4));
        node.touch(&used.id, ActivityKind::Request);
        node.touch(&fixed.id, ActivityKind::Request);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    eventually("the deadline is kept", async || {
        node.get(&fixed.id).unwrap().ended.is_some()
    })
    .await;
    assert_eq!(
        node.get(&fixed.id).unwrap().ended.clone().unwrap().reason,
        EndReason::TimedOut
    );
    assert!(
        node.get(&used.id).unwrap().ended.is_none(),
        "it was used all the time"
    );
    machine.clock.advance(Duration::from_secs(11));
    eventually("the window ran out", async || {
        node.get(&used.id).unwrap().ended.is_some()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_command_that_runs_keeps_an_idle_sandbox_alive() {
    // R-L5
    let machine = Machine::new();
    let node = machine.start().await;
    let idle = Clocking::Idle {
        window_ms: Some(1_000),
    };
    let made = node.create(request(idle), within(10)).await.unwrap();
    machine.agent.busy.store(1, Ordering::Release);
    for _ in 0..5 {
        machine.clock.advance(Duration::from_secs(2));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(node.get(&made.id).unwrap().ended.is_none());
    }
    machine.agent.busy.store(0, Ordering::Release);
    // A whole window after the command, whenever its end is noticed.
    eventually("it ended", async || {
        machine.clock.advance(Duration::from_secs(2));
        node.get(&made.id).unwrap().ended.is_some()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_timeout_of_zero_means_now() {
    let machine = Machine::new();
    let node = machine.start().await;
    let end = machine_time(&machine, 60_000);
    let made = node
        .create(request(Clocking::Deadline { end }), within(10))
        .await
        .unwrap();
    let change = LifetimeChange::Replace { after_ms: Some(0) };
    node.change_lifetime(&made.id, change, Actor::Operator, within(5))
        .await
        .unwrap();
    eventually("it ended", async || {
        node.get(&made.id).unwrap().ended.is_some()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_true_reason_of_an_end_is_told() {
    // R-L12
    let machine = Machine::new();
    let node = machine.start().await;
    let causes = [
        (ExitCause::OutOfMemory, EndReason::OutOfMemory),
        (ExitCause::DiskFull, EndReason::DiskFull),
    ];
    for (cause, reason) in causes {
        let made = create(&node).await.unwrap();
        let (sandbox, incarnation) = (made.id.clone(), made.incarnation);
        machine.engine.end(
            &InstanceId {
                sandbox,
                incarnation,
            },
            cause,
        );
        eventually("it ended", async || {
            node.get(&made.id).unwrap().ended.is_some()
        })
        .await;
        assert_eq!(
            node.get(&made.id).unwrap().ended.clone().unwrap().reason,
            reason
        );
    }
    assert!(machine.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_node_finds_its_sandboxes_and_their_ends() {
    // R-L3
    let machine = Machine::new();
    let node = machine.start().await;
    let kept = create(&node).await.unwrap();
    let lost = create(&node).await.unwrap();
    let killed = create(&node).await.unwrap();
    node.kill(&killed.id, Actor::Operator, within(5))
        .await
        .unwrap();
    stop(node).await;
    let (sandbox, incarnation) = (lost.id.clone(), lost.incarnation);
    machine.engine.end(
        &InstanceId {
            sandbox,
            incarnation,
        },
        ExitCause::OutOfMemory,
    );
    let node = machine.start().await;
    let ids: Vec<_> = node.list().iter().map(|view| view.id.clone()).collect();
    assert_eq!(ids, std::slice::from_ref(&kept.id));
    assert_eq!(node.get(&kept.id).unwrap().access_token, kept.access_token);
    let reason = |id| node.get(id).unwrap().ended.clone().unwrap().reason;
    assert_eq!(reason(&lost.id), EndReason::OutOfMemory);
    assert_eq!(
        reason(&killed.id),
        EndReason::Killed {
            by: Actor::Operator
        }
    );
}

#[tokio::test(start_paused = true)]
async fn a_listing_that_fails_stops_the_start_and_deletes_nothing() {
    // R-G11
    let machine = Machine::new();
    let node = machine.start().await;
    let kept = create(&node).await.unwrap();
    stop(node).await;
    machine.engine.plan(Operation::List, 1, Fault::Error);
    assert!(machine.try_start().await.is_err());
    let node = machine.start().await;
    assert_eq!(node.get(&kept.id).unwrap().state, SandboxState::Running);
}

#[tokio::test(start_paused = true)]
async fn a_create_that_nobody_waits_for_any_more_is_undone() {
    let machine = Machine::new();
    let node = machine.start().await;
    let abandoned = node.create(request(FOR_EVER), within(10));
    drop(futures::poll!(Box::pin(abandoned)));
    eventually("nothing is left", async || {
        machine.is_clean().await && node.list().is_empty()
    })
    .await;
}

fn machine_time(machine: &Machine, ms: u64) -> sandhold_types::Timestamp {
    use sandhold_types::Clock;
    machine.clock.now().plus(Duration::from_millis(ms))
}

/// Lets go of a node as a process that ends does: its actors go with it.
async fn stop(node: std::sync::Arc<sandhold_node::Node>) {
    node.abandon().await;
}

#[tokio::test(start_paused = true)]
async fn blanks_are_made_after_a_create_used_by_the_next_and_gone_after_the_stop() {
    // R-G18: what is made ahead of time is bounded and belongs to nobody.
    use sandhold_network::Network;
    const BLANKS: usize = 2;
    let mut machine = Machine::new();
    machine.config.blanks_per_template = BLANKS;
    let node = machine.start().await;
    let networks = async || machine.network.list().await.unwrap();
    let first = create(&node).await.unwrap();
    eventually("blanks are there", async || {
        networks().await.len() == 1 + BLANKS
    })
    .await;
    let before = networks().await;
    let second = create(&node).await.unwrap();
    assert!(
        before.contains(&second.id),
        "the second was made from a blank"
    );
    assert_eq!(node.list().len(), 2, "blanks are nobody's");
    for id in [&first.id, &second.id] {
        node.kill(id, Actor::Operator, within(5)).await.unwrap();
    }
    node.stop().await;
    assert!(machine.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn a_blank_whose_processes_died_costs_its_create_nothing_but_time() {
    use sandhold_network::Network;
    for (blanks, works) in [(1, true), (0, false)] {
        let mut machine = Machine::new();
        machine.config.blanks_per_template = blanks;
        let node = machine.start().await;
        create(&node).await.unwrap();
        eventually("a blank is there", async || {
            machine.network.list().await.unwrap().len() == 1 + blanks
        })
        .await;
        machine.engine.plan(Operation::Launch, 1, Fault::Error);
        assert_eq!(create(&node).await.is_ok(), works, "{blanks} blanks");
        // What is tried again is tried once.
        eventually("another blank is there", async || {
            let made = node.list().len();
            machine.network.list().await.unwrap().len() == made + blanks
        })
        .await;
        machine.engine.plan(Operation::Launch, 1, Fault::Error);
        machine.engine.plan(Operation::Launch, 2, Fault::Error);
        assert!(create(&node).await.is_err(), "{blanks} blanks");
        stop(node).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_answered_kill_has_freed_the_place() {
    // BC-081: as many workers as places, so one that is given back late refuses somebody.
    const PLACES: usize = 15;
    let mut machine = Machine::new();
    machine.config.capacity.sandboxes_max = PLACES;
    let node = machine.start().await;
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..PLACES {
        let node = node.clone();
        workers.spawn(async move {
            for _ in 0..40 {
                let made = create(&node).await.unwrap();
                let killed = node.kill(&made.id, Actor::Operator, within(10)).await;
                killed.unwrap();
            }
        });
    }
    while let Some(ended) = workers.join_next().await {
        ended.unwrap();
    }
    assert!(machine.is_clean().await);
    // The limit is there.
    for _ in 0..PLACES {
        create(&node).await.unwrap();
    }
    let refused = create(&node).await.unwrap_err();
    assert!(
        matches!(refused, PlatformError::Capacity { .. }),
        "{refused}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_record_that_cannot_be_read_stops_the_start_and_deletes_nothing() {
    // R-L3: what was acknowledged is never lost, whatever happened to the note of it.
    let machine = Machine::new();
    let node = machine.start().await;
    let kept = create(&node).await.unwrap();
    stop(node).await;
    let record = machine
        .directory
        .path()
        .join(format!("sandboxes/{}/record.json", kept.id));
    let written = std::fs::read(&record).unwrap();
    for garbage in [&b""[..], b"{", b"\xff\xfe", br#"{"version":99}"#] {
        std::fs::write(&record, garbage).unwrap();
        let refused = machine.try_start().await.unwrap_err();
        assert!(refused.to_string().contains("record.json"), "{refused}");
        assert_eq!(machine.engine.running().len(), 1, "it runs on");
    }
    std::fs::write(&record, written).unwrap();
    let node = machine.start().await;
    assert_eq!(node.get(&kept.id).unwrap().state, SandboxState::Running);
}
