//! Sleeping and waking over a scripted engine: whatever the engine does, there is one outcome,
//! nothing is stuck and nothing is left.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that meets the unexpected is to fail"
)]

mod support;

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use sandhold_engine::{
    ExitCause, InstanceId,
    sim::{Fault, Operation},
};
use sandhold_node::Node;
use sandhold_platform::{
    AUTO_RESUME_MIN_MS, AutoResume, BusyWith, GuestHealth, LifetimeChange, NewLifetime, Pause,
    PauseKeeps, Platform, PlatformError, Resume, RouteLookup, Routes, SandboxView, TakeSnapshot,
    TimeTravel, WakeError, Waking, Woken,
};
use sandhold_types::{
    Actor, Clock, Clocking, EndReason, ErrorCode, OnTimeout, SandboxId, SandboxState,
};
use support::{FOR_EVER, Machine, create, eventually, request, within};

const AS_MADE: Resume = Resume {
    waking: Waking::AsPaused,
    lifetime: NewLifetime::AsMade,
    on_timeout: None,
};

async fn pause(node: &Node, id: &SandboxId) -> Result<Arc<SandboxView>, PlatformError> {
    node.pause(id, Pause::default(), Actor::Operator, within(400))
        .await
}

async fn resume(node: &Node, id: &SandboxId) -> Result<Arc<SandboxView>, PlatformError> {
    node.resume(id, AS_MADE, Actor::Operator, within(10)).await
}

/// Lets go of a node as a process that ends does.
async fn stop(node: Arc<Node>) {
    node.abandon().await;
}

fn state(node: &Node, id: &SandboxId) -> SandboxState {
    node.get(id).unwrap().state
}

#[tokio::test(start_paused = true)]
async fn a_paused_sandbox_has_no_process_and_comes_back_as_another_life_of_itself() {
    // R-L4
    let machine = Machine::new();
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    let paused = pause(&node, &made.id).await.unwrap();
    assert_eq!(paused.state, SandboxState::Paused);
    assert!(paused.sleep.is_some());
    machine.assert_in_order(&node).await;
    assert!(machine.engine.running().is_empty());
    let RouteLookup::NotLive(asleep) = node.route(&made.id) else {
        panic!("it exists and does not run")
    };
    assert_eq!(asleep.state, SandboxState::Paused);
    let awake = resume(&node, &made.id).await.unwrap();
    assert_eq!(awake.state, SandboxState::Running);
    assert!(awake.incarnation > made.incarnation);
    assert_eq!(awake.access_token, made.access_token);
    assert!(awake.sleep.is_none());
    machine.assert_in_order(&node).await;
    for _ in 0..20 {
        pause(&node, &made.id).await.unwrap();
        resume(&node, &made.id).await.unwrap();
    }
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn already_so_busy_and_gone_are_told_apart() {
    // R-P10
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    let running = resume(&node, &id).await;
    assert!(matches!(running, Err(PlatformError::AlreadySo { .. })));
    pause(&node, &id).await.unwrap();
    let paused = pause(&node, &id).await;
    assert!(matches!(paused, Err(PlatformError::AlreadySo { .. })));
    let change = LifetimeChange::Replace { after_ms: Some(1) };
    let asleep = node
        .change_lifetime(&id, change, Actor::Operator, within(5))
        .await;
    assert!(matches!(asleep, Err(PlatformError::Conflict { .. })));
    node.kill(&id, Actor::Operator, within(5)).await.unwrap();
    let gone = pause(&node, &id).await;
    assert!(matches!(gone, Err(PlatformError::NotFound(_))));
}

#[tokio::test(start_paused = true)]
async fn deleting_an_asleep_sandbox_removes_its_files_and_never_wakes_it() {
    // R-L8
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    pause(&node, &id).await.unwrap();
    let launches = machine.calls(Operation::Launch);
    node.kill(&id, Actor::Operator, within(5)).await.unwrap();
    assert_eq!(machine.calls(Operation::Launch), launches);
    assert!(machine.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_whose_wake_up_can_never_succeed_is_deleted_at_once() {
    // R-I6
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    pause(&node, &id).await.unwrap();
    for _ in 0..3 {
        machine
            .network
            .refuse_next(sandhold_network::sim::Operation::Attach);
        resume(&node, &id).await.unwrap_err();
        assert_eq!(state(&node, &id), SandboxState::Paused);
    }
    node.kill(&id, Actor::Operator, within(5)).await.unwrap();
    assert!(machine.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn what_the_engine_says_of_a_capture_is_settled_by_the_truth() {
    // R-L10: told, then true; and what state that has to lead to.
    let cases = [
        (Fault::Error, SandboxState::Running),
        (Fault::Hang, SandboxState::Running),
        (Fault::Lie, SandboxState::Running),
        // Nobody vouches for the image, so it is proved by waking it.
        (Fault::LostReply, SandboxState::Running),
        (Fault::LateSuccess, SandboxState::Running),
    ];
    for (fault, leads_to) in cases {
        let machine = Machine::new();
        let node = machine.start().await;
        let id = create(&node).await.unwrap().id.clone();
        machine.engine.plan(Operation::Capture, 1, fault);
        let told = pause(&node, &id).await;
        assert!(told.is_err(), "{fault:?}");
        assert_eq!(state(&node, &id), leads_to, "{fault:?}");
        machine.assert_in_order(&node).await;
        pause(&node, &id).await.unwrap();
        resume(&node, &id).await.unwrap();
        machine.assert_in_order(&node).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_capture_that_takes_the_sandbox_down_ends_it_with_its_reason() {
    // R-L12
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    machine
        .engine
        .plan(Operation::Capture, 1, Fault::KillsInstance);
    pause(&node, &id).await.unwrap_err();
    let ended = node.get(&id).unwrap().ended.clone().unwrap();
    assert!(matches!(ended.reason, EndReason::EngineFailed { .. }));
    assert!(machine.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn a_wake_up_that_fails_leaves_it_asleep_and_the_next_one_succeeds() {
    // R-L10
    for fault in [
        Fault::Error,
        Fault::Hang,
        Fault::LostReply,
        Fault::LateSuccess,
    ] {
        let machine = Machine::new();
        let node = machine.start().await;
        let id = create(&node).await.unwrap().id.clone();
        pause(&node, &id).await.unwrap();
        machine.engine.plan(Operation::Launch, 1, fault);
        resume(&node, &id).await.unwrap_err();
        eventually("it sleeps on", async || {
            state(&node, &id) == SandboxState::Paused
        })
        .await;
        machine.assert_in_order(&node).await;
        assert_eq!(
            resume(&node, &id).await.unwrap().state,
            SandboxState::Running
        );
        machine.assert_in_order(&node).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_image_of_another_release_of_the_engine_is_not_tried_and_wakes_where_it_was_written() {
    // BC-092
    let machine = Machine::new();
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    pause(&node, &made.id).await.unwrap();
    stop(node).await;
    machine.engine.becomes("2");
    let node = machine.start().await;
    let launches = machine.calls(Operation::Launch);
    let refused = resume(&node, &made.id).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::SnapshotIncompatible, "{refused}");
    assert!(
        refused.to_string().contains("this node runs 2"),
        "{refused}"
    );
    assert_eq!(machine.calls(Operation::Launch), launches);
    // A snapshot of the sleeping one is of the release that wrote it, not of the present one.
    let taken = node.take_snapshot(
        &made.id,
        TakeSnapshot::default(),
        Actor::Operator,
        within(10),
    );
    let taken = taken.await.unwrap();
    let rolled = node.roll_back(&made.id, &taken.id, Actor::Operator, within(10));
    let refused = rolled.await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::SnapshotIncompatible, "{refused}");
    machine.assert_in_order(&node).await;
    stop(node).await;
    machine.engine.becomes("1");
    let node = machine.start().await;
    resume(&node, &made.id).await.unwrap();
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_is_silent_after_the_wake_up_is_not_handed_out() {
    // R-P6
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    pause(&node, &id).await.unwrap();
    machine.agent.silent.store(true, Ordering::Release);
    resume(&node, &id).await.unwrap_err();
    eventually("it sleeps on", async || {
        state(&node, &id) == SandboxState::Paused
    })
    .await;
    machine.agent.silent.store(false, Ordering::Release);
    resume(&node, &id).await.unwrap();
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn a_silent_guest_is_paused_as_it_is_unless_its_health_is_asked_for() {
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    machine.agent.silent.store(true, Ordering::Release);
    let strict = Pause {
        health: GuestHealth::MustAnswer,
        ..Pause::default()
    };
    let refused = node.pause(&id, strict, Actor::Operator, within(10)).await;
    assert!(matches!(
        refused,
        Err(PlatformError::GuestUnresponsive { .. })
    ));
    assert_eq!(state(&node, &id), SandboxState::Running);
    pause(&node, &id).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_pause_that_keeps_files_only_starts_processes_anew() {
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    pause(&node, &id).await.unwrap();
    resume(&node, &id).await.unwrap();
    assert_eq!(machine.agent.restarts.load(Ordering::Acquire), 0);
    let files = Pause {
        keeps: PauseKeeps::Files,
        ..Pause::default()
    };
    node.pause(&id, files, Actor::Operator, within(10))
        .await
        .unwrap();
    resume(&node, &id).await.unwrap();
    assert_eq!(machine.agent.restarts.load(Ordering::Acquire), 1);
    pause(&node, &id).await.unwrap();
    let cold = Resume {
        waking: Waking::ColdBoot,
        ..AS_MADE
    };
    node.resume(&id, cold, Actor::Operator, within(10))
        .await
        .unwrap();
    assert_eq!(machine.agent.restarts.load(Ordering::Acquire), 2);
}

#[tokio::test(start_paused = true)]
async fn connect_extends_what_runs_and_gives_what_sleeps_a_new_life() {
    // BC-069, R-L11
    let machine = Machine::new();
    let node = machine.start().await;
    let clocking = Clocking::Deadline {
        end: machine.clock.now().plus(Duration::from_secs(1_800)),
    };
    let made = node.create(request(clocking), within(10)).await.unwrap();
    let connect = async |seconds: u64| {
        let ms = Some(seconds * 1000);
        let running = LifetimeChange::Extend { after_ms: ms };
        let resume = Resume {
            lifetime: NewLifetime::After(ms),
            ..AS_MADE
        };
        let connected = node
            .connect(&made.id, running, resume, Actor::Operator, within(10))
            .await
            .unwrap();
        let left = connected.0.end_at().since(machine.clock.now());
        (left.as_secs(), connected.1)
    };
    assert_eq!(connect(300).await, (1_800, Woken::No));
    assert_eq!(connect(3_600).await, (3_600, Woken::No));
    pause(&node, &made.id).await.unwrap();
    assert_eq!(connect(60).await, (60, Woken::Yes));
}

#[tokio::test(start_paused = true)]
async fn an_automatic_wake_up_gives_the_life_it_was_made_for_and_a_least_one() {
    let machine = Machine::new();
    let node = machine.start().await;
    for (made_for_s, woken_for_s) in [(60, AUTO_RESUME_MIN_MS / 1000), (900, 900)] {
        let end = machine.clock.now().plus(Duration::from_secs(made_for_s));
        let made = node
            .create(request(Clocking::Deadline { end }), within(10))
            .await
            .unwrap();
        pause(&node, &made.id).await.unwrap();
        let route = node.wake(&made.id, within(10)).await.unwrap();
        let left = route.sandbox.end_at().since(machine.clock.now());
        assert_eq!(left.as_secs(), woken_for_s);
    }
}

#[tokio::test(start_paused = true)]
async fn the_clock_puts_it_to_sleep_and_never_touches_it_while_it_sleeps() {
    // R-L5, R-L6
    let machine = Machine::new();
    let node = machine.start().await;
    let mut wanted = request(Clocking::Idle {
        window_ms: Some(1_000),
    });
    wanted.lifetime.on_timeout = OnTimeout::Pause;
    let by_clock = node.create(wanted, within(10)).await.unwrap();
    let by_hand = node
        .create(
            request(Clocking::Idle {
                window_ms: Some(5_000),
            }),
            within(10),
        )
        .await
        .unwrap();
    pause(&node, &by_hand.id).await.unwrap();
    machine.clock.advance(Duration::from_secs(2));
    eventually("it sleeps", async || {
        state(&node, &by_clock.id) == SandboxState::Paused
    })
    .await;
    machine.clock.advance(Duration::from_secs(1_000_000));
    tokio::time::sleep(Duration::from_secs(60)).await;
    for id in [&by_clock.id, &by_hand.id] {
        assert_eq!(state(&node, id), SandboxState::Paused);
    }
    let history = node.history(&by_clock.id).await.unwrap();
    assert!(
        history
            .iter()
            .any(|event| event.state == SandboxState::Paused && event.actor == Actor::Sweeper)
    );
}

#[tokio::test(start_paused = true)]
async fn a_running_command_keeps_it_awake_and_one_in_the_background_if_the_policy_says_so() {
    // R-L5
    let machine = Machine::new();
    let node = machine.start().await;
    machine.agent.busy.store(1, Ordering::Release);
    machine.agent.background.store(1, Ordering::Release);
    let mut wanted = request(Clocking::Idle {
        window_ms: Some(1_000),
    });
    wanted.lifetime.on_timeout = OnTimeout::Pause;
    let counts = node.create(wanted.clone(), within(10)).await.unwrap();
    wanted.busy_with = BusyWith::AttachedCommands;
    let does_not = node.create(wanted, within(10)).await.unwrap();
    for _ in 0..5 {
        machine.clock.advance(Duration::from_secs(2));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(state(&node, &counts.id), SandboxState::Running);
    assert_eq!(state(&node, &does_not.id), SandboxState::Paused);
}

#[tokio::test(start_paused = true)]
async fn a_command_that_ends_between_two_looks_is_followed_by_a_whole_window() {
    // R-L5
    let machine = Machine::new();
    let node = machine.start().await;
    machine.agent.busy.store(1, Ordering::Release);
    let mut wanted = request(Clocking::Idle {
        window_ms: Some(1_000),
    });
    wanted.lifetime.on_timeout = OnTimeout::Pause;
    let made = node.create(wanted, within(10)).await.unwrap();
    let a_window_passes = async || {
        machine.clock.advance(Duration::from_secs(1));
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    a_window_passes().await;
    machine.agent.busy.store(0, Ordering::Release);
    a_window_passes().await;
    assert_eq!(state(&node, &made.id), SandboxState::Running);
    a_window_passes().await;
    assert_eq!(state(&node, &made.id), SandboxState::Paused);
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_nothing_is_paused_until_its_activity_was_read_once() {
    // R-L5
    let machine = Machine::new();
    let node = machine.start().await;
    let end = machine.clock.now().plus(Duration::from_secs(60));
    let mut wanted = request(Clocking::Deadline { end });
    wanted.lifetime.on_timeout = OnTimeout::Pause;
    let made = node.create(wanted, within(10)).await.unwrap();
    stop(node).await;
    machine.clock.advance(Duration::from_secs(120));
    machine.agent.silent.store(true, Ordering::Release);
    let node = machine.start().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(state(&node, &made.id), SandboxState::Running);
    machine.agent.silent.store(false, Ordering::Release);
    eventually("it sleeps", async || {
        state(&node, &made.id) == SandboxState::Paused
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn fifty_requests_at_once_wake_it_once() {
    // R-L7
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    pause(&node, &id).await.unwrap();
    let launches = machine.calls(Operation::Launch);
    let wakes = (0..50).map(|_| node.wake(&id, within(10)));
    let routes = futures::future::join_all(wakes).await;
    let incarnations: std::collections::BTreeSet<_> = routes
        .iter()
        .map(|route| route.as_ref().unwrap().incarnation())
        .collect();
    assert_eq!(incarnations.len(), 1);
    assert_eq!(machine.calls(Operation::Launch), launches + 1);
    let woken = node.history(&id).await.unwrap();
    assert!(woken.iter().any(|event| event.actor == Actor::Gateway));
}

#[tokio::test(start_paused = true)]
async fn requests_wait_within_their_own_deadline_and_the_wake_up_goes_on() {
    // R-L7
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    pause(&node, &id).await.unwrap();
    machine.engine.plan(Operation::Launch, 1, Fault::Hang);
    let (short, long) = futures::join!(node.wake(&id, within(2)), node.wake(&id, within(60)));
    assert!(matches!(short, Err(WakeError::Late { .. })), "{short:?}");
    assert!(matches!(long, Err(WakeError::Failed { .. })), "{long:?}");
    node.wake(&id, within(10)).await.unwrap();
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn traffic_wakes_only_what_its_owner_lets_be_woken() {
    let machine = Machine::new();
    let node = machine.start().await;
    let mut wanted = request(FOR_EVER);
    wanted.auto_resume = AutoResume::Off;
    let made = node.create(wanted, within(10)).await.unwrap();
    pause(&node, &made.id).await.unwrap();
    let refused = node.wake(&made.id, within(10)).await;
    assert_eq!(refused.unwrap_err(), WakeError::NotAllowed);
    assert_eq!(state(&node, &made.id), SandboxState::Paused);
}

#[tokio::test(start_paused = true)]
async fn a_wake_up_that_does_not_fit_is_refused_and_it_sleeps_on() {
    // R-P11, R-L7: the same admission as a create's.
    let mut machine = Machine::new();
    machine.config.capacity.memory_overcommit = 1;
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    pause(&node, &id).await.unwrap();
    stop(node).await;
    machine.config.capacity.memory_overcommit = 0;
    let node = machine.start().await;
    let refused = resume(&node, &id).await;
    assert!(matches!(refused, Err(PlatformError::Capacity { .. })));
    assert_eq!(state(&node, &id), SandboxState::Paused);
    machine.assert_in_order(&node).await;
    node.kill(&id, Actor::Operator, within(5)).await.unwrap();
    assert!(machine.is_clean().await, "a delete never needs room");
}

#[tokio::test(start_paused = true)]
async fn transitions_are_pushed() {
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    let mut changes = node.changes();
    pause(&node, &id).await.unwrap();
    resume(&node, &id).await.unwrap();
    node.kill(&id, Actor::Operator, within(5)).await.unwrap();
    use SandboxState as S;
    for expected in [
        S::Pausing,
        S::Paused,
        S::Resuming,
        S::Running,
        S::Killing,
        S::Killed,
    ] {
        let change = changes.try_recv().unwrap();
        assert_eq!((change.sandbox, change.state), (id.clone(), expected));
    }
}

#[tokio::test(start_paused = true)]
async fn a_restarted_node_finds_what_sleeps_and_finishes_or_undoes_what_was_under_way() {
    // R-L3: the process dies with each engine call of a pause and of a wake-up.
    for (operation, leads_to) in [
        (Operation::Capture, SandboxState::Running),
        (Operation::Launch, SandboxState::Paused),
        (Operation::Remove, SandboxState::Paused),
    ] {
        let machine = Machine::new();
        let node = machine.start().await;
        let id = create(&node).await.unwrap().id.clone();
        if operation == Operation::Launch {
            pause(&node, &id).await.unwrap();
        }
        machine.engine.plan(operation, 1, Fault::Crash);
        let asked = tokio::spawn({
            let (node, id) = (node.clone(), id.clone());
            async move {
                match operation {
                    Operation::Launch => resume(&node, &id).await,
                    _ => pause(&node, &id).await,
                }
            }
        });
        eventually("it crashed", async || machine.engine.crashed()).await;
        asked.abort();
        let _ = asked.await;
        stop(node).await;
        let node = machine.start().await;
        assert_eq!(state(&node, &id), leads_to, "{operation:?}");
        machine.assert_in_order(&node).await;
        node.wake(&id, within(10)).await.unwrap();
        machine.assert_in_order(&node).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_removes_only_what_is_awake_gets_its_wake_up_within_the_budget() {
    // R-L8, R-L9: 204, 409, 503 with 5, 503 with 2; nobody sees a resume.
    let mut machine = Machine::new();
    machine.engine = machine.engine.clone().removing_awake_only();
    let node = machine.start().await;
    let asleep = async || {
        let id = create(&node).await.unwrap().id.clone();
        pause(&node, &id).await.unwrap();
        id
    };
    let id = asleep().await;
    let launches = machine.calls(Operation::Launch);
    node.kill(&id, Actor::Operator, within(30)).await.unwrap();
    assert_eq!(
        machine.calls(Operation::Launch),
        launches + 1,
        "it was woken"
    );
    let history = node.history(&id).await.unwrap();
    assert!(
        history
            .iter()
            .all(|event| event.state != SandboxState::Resuming)
    );
    assert!(machine.is_clean().await);

    let id = asleep().await;
    machine.engine.plan(Operation::Launch, 1, Fault::Hang);
    let started = tokio::time::Instant::now();
    let refused = node.kill(&id, Actor::Operator, within(30)).await;
    assert_retry(&refused, 5);
    assert_eq!(
        started.elapsed().as_secs(),
        5,
        "its share of thirty seconds"
    );
    assert_eq!(state(&node, &id), SandboxState::Paused);
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(
        state(&node, &id),
        SandboxState::Paused,
        "nothing is tried again behind the caller's back"
    );
    machine.assert_in_order(&node).await;

    machine.engine.plan(Operation::Remove, 1, Fault::Error);
    assert_retry(&node.kill(&id, Actor::Operator, within(30)).await, 2);
    node.kill(&id, Actor::Operator, within(30)).await.unwrap();
    assert!(machine.is_clean().await);
}

fn assert_retry(refused: &Result<(), PlatformError>, seconds: u64) {
    match refused {
        Err(PlatformError::Busy { retry_after, .. }) => {
            assert_eq!(retry_after.as_secs(), seconds);
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_nobody_uses_dozes_and_the_next_use_thaws_it() {
    // Architecture, decision 6.
    let mut machine = Machine::new();
    machine.config.doze_after = Some(Duration::from_secs(1));
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    let instance = InstanceId {
        sandbox: made.id.clone(),
        incarnation: made.incarnation,
    };
    let frozen = || machine.engine.is_frozen(&instance);
    let pass = async || {
        for _ in 0..20 {
            machine.clock.advance(Duration::from_millis(500));
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    machine.agent.busy.store(1, Ordering::Release);
    pass().await;
    assert!(!frozen(), "a command runs");
    machine.agent.busy.store(0, Ordering::Release);
    pass().await;
    assert!(frozen());
    assert_eq!(state(&node, &made.id), SandboxState::Running);
    let RouteLookup::Live(route) = node.route(&made.id) else {
        panic!("a dozing sandbox runs, to everybody")
    };
    let hold = node.hold(&route).await.unwrap();
    assert!(!frozen());
    pass().await;
    assert!(!frozen(), "somebody uses it");
    drop(hold);
    pass().await;
    assert!(frozen());
    pause(&node, &made.id).await.unwrap();
    let awake = resume(&node, &made.id).await.unwrap();
    assert_eq!(awake.state, SandboxState::Running);
    node.kill(&made.id, Actor::Operator, within(5))
        .await
        .unwrap();
    assert!(machine.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_computes_is_not_frozen_though_nobody_sees_on_what() {
    let mut machine = Machine::new();
    machine.config.doze_after = Some(Duration::from_secs(1));
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    let instance = InstanceId {
        sandbox: made.id.clone(),
        incarnation: made.incarnation,
    };
    for step in 1..40u64 {
        let usage = sandhold_engine::Usage {
            cpu_usec: step * 250_000,
            ..sandhold_engine::Usage::default()
        };
        machine.engine.set_usage(&instance, usage);
        machine.clock.advance(Duration::from_millis(500));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(!machine.engine.is_frozen(&instance));
    }
}

#[tokio::test(start_paused = true)]
async fn processes_that_end_while_it_runs_end_it_and_while_it_sleeps_there_are_none() {
    let machine = Machine::new();
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    pause(&node, &made.id).await.unwrap();
    let awake = resume(&node, &made.id).await.unwrap();
    machine.engine.end(
        &InstanceId {
            sandbox: made.id.clone(),
            incarnation: awake.incarnation,
        },
        ExitCause::OutOfMemory,
    );
    eventually("it ended", async || {
        node.get(&made.id).unwrap().ended.is_some()
    })
    .await;
    assert!(machine.is_clean().await);
}
