//! Snapshots, copies and rollbacks over a scripted engine: whatever the engine does, the source goes
//! on, a failed rollback changes nothing, and on the disk is exactly what something refers to.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that meets the unexpected is to fail"
)]

mod support;

use std::{collections::BTreeSet, sync::Arc, sync::atomic::Ordering, time::Duration};

use sandhold_engine::{
    InstanceId,
    sim::{Fault, Operation},
};
use sandhold_images::Retention;
use sandhold_node::Node;
use sandhold_platform::{
    NewLifetime, Pause, PauseKeeps, Platform, PlatformError, Resume, SandboxView, SnapshotKind,
    SnapshotName, SnapshotView, TakeSnapshot, TimeTravel, Waking,
};
use sandhold_types::{
    Actor, EndReason, Entropy, SandboxId, SandboxState, SeededEntropy, SnapshotId,
};
use support::{FOR_EVER, Machine, create, eventually, request, within};

async fn take(node: &Node, id: &SandboxId) -> Result<Arc<SnapshotView>, PlatformError> {
    take_as(node, id, TakeSnapshot::default()).await
}

async fn take_as(
    node: &Node,
    id: &SandboxId,
    wanted: TakeSnapshot,
) -> Result<Arc<SnapshotView>, PlatformError> {
    node.take_snapshot(id, wanted, Actor::Operator, within(400))
        .await
}

async fn roll(
    node: &Node,
    id: &SandboxId,
    to: &SnapshotId,
) -> Result<Arc<SandboxView>, PlatformError> {
    node.roll_back(id, to, Actor::Operator, within(60)).await
}

async fn create_from(node: &Node, reference: &str) -> Result<Arc<SandboxView>, PlatformError> {
    let mut wanted = request(FOR_EVER);
    wanted.template = reference.to_owned();
    node.create(wanted, within(10)).await
}

async fn pause(node: &Node, id: &SandboxId) {
    let pause = Pause::default();
    node.pause(id, pause, Actor::Operator, within(60))
        .await
        .unwrap();
}

fn state(node: &Node, id: &SandboxId) -> SandboxState {
    node.get(id).unwrap().state
}

fn instance(view: &SandboxView) -> InstanceId {
    InstanceId {
        sandbox: view.id.clone(),
        incarnation: view.incarnation,
    }
}

fn temporary() -> TakeSnapshot {
    TakeSnapshot {
        kind: SnapshotKind::Temporary,
        ..TakeSnapshot::default()
    }
}

fn named(name: &str) -> TakeSnapshot {
    TakeSnapshot {
        name: Some(SnapshotName {
            name: name.to_owned(),
            tag: "v1".to_owned(),
        }),
        ..TakeSnapshot::default()
    }
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_leaves_its_source_running_and_works_as_a_template() {
    // R-T1
    let machine = Machine::new();
    let node = machine.start().await;
    let source = create(&node).await.unwrap();
    let taken = take_as(&node, &source.id, named("env")).await.unwrap();
    let after = node.get(&source.id).unwrap();
    assert_eq!(after.state, SandboxState::Running);
    assert_eq!(after.incarnation, source.incarnation);
    assert_eq!(after.line, vec![taken.id.clone()]);
    machine.assert_in_order(&node).await;
    node.kill(&source.id, Actor::Operator, within(5))
        .await
        .unwrap();
    for reference in [taken.id.as_str(), "env:v1", "team/env:v1"] {
        let copy = create_from(&node, reference).await.unwrap();
        assert_eq!(copy.template.id.as_str(), taken.id.as_str());
        assert_ne!(copy.access_token, source.access_token, "R-T6");
        let image = machine.engine.restored_from(&instance(&copy)).unwrap();
        assert!(image.starts_with(machine.directory.path().join("snapshots")));
    }
    let unknown = create_from(&node, "env:v2").await;
    assert!(matches!(unknown, Err(PlatformError::TemplateNotFound(_))));
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn a_copy_has_its_sources_environment_and_what_its_caller_names_wins() {
    let machine = Machine::new();
    let node = machine.start().await;
    let mut wanted = request(FOR_EVER);
    wanted.env_vars = [("A", "1"), ("B", "1")]
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .into();
    let source = node.create(wanted, within(10)).await.unwrap();
    let taken = take(&node, &source.id).await.unwrap();
    let mut wanted = request(FOR_EVER);
    wanted.template = taken.id.to_string();
    wanted.env_vars = [("B".to_owned(), "2".to_owned())].into();
    node.create(wanted, within(10)).await.unwrap();
    let told = machine.agent.told.lock().unwrap().last().unwrap().clone();
    let expected = [("A", "1"), ("B", "2")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    assert_eq!(told.env_vars, expected.into());
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_of_a_sleeping_sandbox_shares_its_image_and_does_not_wake_it() {
    // R-T4
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    pause(&node, &id).await;
    let (captures, launches) = (
        machine.calls(Operation::Capture),
        machine.calls(Operation::Launch),
    );
    let taken = take(&node, &id).await.unwrap();
    assert_eq!(machine.calls(Operation::Capture), captures);
    assert_eq!(machine.calls(Operation::Launch), launches);
    assert_eq!(state(&node, &id), SandboxState::Paused);
    let sizes = node.lineage(&taken.id).unwrap().sizes;
    assert_eq!(sizes.exclusive_bytes, 0);
    node.kill(&id, Actor::Operator, within(5)).await.unwrap();
    assert!(node.lineage(&taken.id).unwrap().sizes.exclusive_bytes > 0);
    create_from(&node, taken.id.as_str()).await.unwrap();
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn whatever_becomes_of_a_capture_the_source_goes_on() {
    // R-L10, issue: a failed capture never costs the source its life.
    for fault in [
        Fault::Error,
        Fault::Hang,
        Fault::Lie,
        Fault::LostReply,
        Fault::LateSuccess,
    ] {
        let machine = Machine::new();
        let node = machine.start().await;
        let id = create(&node).await.unwrap().id.clone();
        machine.engine.plan(Operation::Capture, 1, fault);
        take(&node, &id).await.unwrap_err();
        assert_eq!(state(&node, &id), SandboxState::Running, "{fault:?}");
        assert!(node.snapshots().is_empty(), "{fault:?}");
        machine.assert_in_order(&node).await;
        take(&node, &id).await.unwrap();
        machine.assert_in_order(&node).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_went_with_its_capture_is_woken_from_it() {
    let machine = Machine::new();
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    machine.engine.captures_stop_it();
    let taken = take(&node, &made.id).await.unwrap();
    let after = node.get(&made.id).unwrap();
    assert_eq!(after.state, SandboxState::Running);
    assert!(after.incarnation > made.incarnation);
    assert_eq!(after.line, vec![taken.id.clone()]);
    create_from(&node, taken.id.as_str()).await.unwrap();
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn only_a_capture_that_leaves_nothing_at_all_ends_the_source() {
    // R-L12
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    machine
        .engine
        .plan(Operation::Capture, 1, Fault::KillsInstance);
    take(&node, &id).await.unwrap_err();
    let ended = node.get(&id).unwrap().ended.clone().unwrap();
    assert!(matches!(ended.reason, EndReason::EngineFailed { .. }));
    assert!(machine.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_goes_back_and_forward_along_its_line_and_stays_who_it_is() {
    // R-T3
    let machine = Machine::new();
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    let first = take(&node, &made.id).await.unwrap();
    let second = take(&node, &made.id).await.unwrap();
    assert_eq!(second.ancestors, vec![first.id.clone()]);
    for _ in 0..10 {
        for to in [&first, &second] {
            let back = roll(&node, &made.id, &to.id).await.unwrap();
            assert_eq!(back.id, made.id);
            assert_eq!(back.access_token, made.access_token);
            assert_eq!(back.lifetime, made.lifetime);
            assert_eq!(back.line.first(), Some(&to.id));
            machine.assert_in_order(&node).await;
        }
    }
    let third = take(&node, &made.id).await.unwrap();
    assert_eq!(third.ancestors, vec![second.id.clone(), first.id.clone()]);
    roll(&node, &made.id, &first.id).await.unwrap();
    let branch = take(&node, &made.id).await.unwrap();
    assert_eq!(
        branch.ancestors,
        vec![first.id.clone()],
        "another line from there"
    );
    roll(&node, &made.id, &third.id).await.unwrap();
    let stranger = create(&node).await.unwrap();
    let refused = roll(&node, &stranger.id, &first.id).await;
    assert!(matches!(refused, Err(PlatformError::SnapshotNotFound(_))));
    let copy = create_from(&node, second.id.as_str()).await.unwrap();
    roll(&node, &copy.id, &first.id).await.unwrap();
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn a_rollback_that_fails_anywhere_leaves_the_sandbox_as_it_was() {
    // R-T3
    let faults = [
        Fault::Error,
        Fault::Hang,
        Fault::LostReply,
        Fault::LateSuccess,
    ];
    for asleep in [false, true] {
        for call in [Operation::Freeze, Operation::Launch] {
            for fault in faults {
                if call == Operation::Freeze
                    && (asleep || fault == Fault::Hang || fault == Fault::LateSuccess)
                {
                    // A freeze has a bound of its own, which the scripted one lacks.
                    continue;
                }
                let what = format!("{call:?} with {fault:?}, asleep: {asleep}");
                let machine = Machine::new();
                let node = machine.start().await;
                let made = create(&node).await.unwrap();
                let to = take(&node, &made.id).await.unwrap();
                if asleep {
                    pause(&node, &made.id).await;
                }
                machine.engine.plan(call, 1, fault);
                let refused = node
                    .roll_back(&made.id, &to.id, Actor::Operator, within(5))
                    .await;
                assert!(refused.is_err(), "{what}");
                eventually("it is as it was", async || {
                    !state(&node, &made.id).is_transient()
                })
                .await;
                let after = node.get(&made.id).unwrap();
                assert_eq!(after.incarnation, made.incarnation, "{what}");
                let stays = if asleep {
                    SandboxState::Paused
                } else {
                    SandboxState::Running
                };
                assert_eq!(after.state, stays, "{what}");
                assert!(!machine.engine.is_frozen(&instance(&made)), "{what}");
                machine.assert_in_order(&node).await;
                roll(&node, &made.id, &to.id).await.unwrap();
                machine.assert_in_order(&node).await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_whose_guest_stands_still_does_not_replace_one_that_answers() {
    // R-T3
    let machine = Machine::new();
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    let to = take(&node, &made.id).await.unwrap();
    machine.agent.silent.store(true, Ordering::Release);
    roll(&node, &made.id, &to.id).await.unwrap_err();
    eventually("it is as it was", async || {
        state(&node, &made.id) == SandboxState::Running
    })
    .await;
    machine.agent.silent.store(false, Ordering::Release);
    assert_eq!(node.get(&made.id).unwrap().incarnation, made.incarnation);
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn an_image_of_another_engine_is_refused_before_anything_is_touched() {
    // BC-092
    let machine = Machine::new();
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    let to = take(&node, &made.id).await.unwrap();
    node.abandon().await;
    drop(node);
    machine.engine.becomes("2");
    let node = machine.start().await;
    let launches = machine.calls(Operation::Launch);
    for refused in [
        roll(&node, &made.id, &to.id).await,
        create_from(&node, to.id.as_str()).await,
    ] {
        assert!(matches!(
            refused,
            Err(PlatformError::SnapshotIncompatible { .. })
        ));
    }
    assert_eq!(machine.calls(Operation::Launch), launches);
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn deleting_any_of_a_chain_breaks_nothing_that_lives_on() {
    // R-T5
    let machine = Machine::new();
    let node = machine.start().await;
    let source = create(&node).await.unwrap();
    let mut chain = Vec::new();
    for _ in 0..3 {
        chain.push(take(&node, &source.id).await.unwrap());
    }
    let copy = create_from(&node, chain[1].id.as_str()).await.unwrap();
    node.delete_snapshot(&chain[1].id).await.unwrap();
    let lineage = node.lineage(&chain[2].id).unwrap();
    let ancestors: Vec<_> = lineage
        .ancestors
        .iter()
        .map(|a| (a.id.clone(), a.snapshot.is_some()))
        .collect();
    assert_eq!(
        ancestors,
        vec![(chain[1].id.clone(), false), (chain[0].id.clone(), true)]
    );
    assert_eq!(node.lineage(&chain[0].id).unwrap().descendants.len(), 1);
    node.kill(&source.id, Actor::Operator, within(5))
        .await
        .unwrap();
    for living in [&chain[0], &chain[2]] {
        create_from(&node, living.id.as_str()).await.unwrap();
    }
    roll(&node, &copy.id, &chain[0].id).await.unwrap();
    let gone = create_from(&node, chain[1].id.as_str()).await;
    assert!(matches!(gone, Err(PlatformError::TemplateNotFound(_))));
    machine.assert_in_order(&node).await;
}

#[tokio::test(start_paused = true)]
async fn copies_that_were_not_all_made_go_with_the_restart() {
    // R-T2, R-L3
    let machine = Machine::new();
    let node = machine.start().await;
    let source = create(&node).await.unwrap();
    let told = take_as(&node, &source.id, temporary()).await.unwrap();
    let finished = create_from(&node, told.id.as_str()).await.unwrap();
    node.delete_snapshot(&told.id).await.unwrap();
    let untold = take_as(&node, &source.id, temporary()).await.unwrap();
    let unfinished = create_from(&node, untold.id.as_str()).await.unwrap();
    assert_eq!(unfinished.template, source.template);
    assert!(node.snapshots().is_empty(), "it is shown to nobody");
    assert!(
        node.find_snapshot(
            &source.owner.namespace,
            &source.owner.env,
            untold.id.as_str()
        )
        .is_none()
    );
    node.abandon().await;
    drop(node);
    let node = machine.start().await;
    let left: BTreeSet<_> = node.list().iter().map(|view| view.id.clone()).collect();
    assert_eq!(
        left,
        BTreeSet::from([source.id.clone(), finished.id.clone()])
    );
    machine.assert_in_order(&node).await;
    assert!(machine.snapshot_names().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_name_that_a_template_has_is_refused() {
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    let refused = take_as(&node, &id, named("base")).await;
    assert!(matches!(refused, Err(PlatformError::NameTaken(_))));
    assert_eq!(machine.calls(Operation::Capture), 0);
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_is_refused_before_anything_is_touched() {
    // R-P11
    let mut machine = Machine::new();
    let node = machine.start().await;
    let made = create(&node).await.unwrap();
    let to = take(&node, &made.id).await.unwrap();
    node.abandon().await;
    drop(node);
    machine.config.capacity.disk_reserve_mib = u64::MAX / 4;
    machine.config.capacity.memory_reserve_mib = u64::MAX / 4;
    let node = machine.start().await;
    let (captures, freezes) = (
        machine.calls(Operation::Capture),
        machine.calls(Operation::Freeze),
    );
    let taken = take(&node, &made.id).await;
    assert!(matches!(taken, Err(PlatformError::Capacity { .. })));
    let rolled = roll(&node, &made.id, &to.id).await;
    assert!(matches!(rolled, Err(PlatformError::Capacity { .. })));
    assert_eq!(machine.calls(Operation::Capture), captures);
    assert_eq!(machine.calls(Operation::Freeze), freezes);
    assert_eq!(state(&node, &made.id), SandboxState::Running);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_of_files_gives_sandboxes_whose_processes_start_anew() {
    let machine = Machine::new();
    let node = machine.start().await;
    let id = create(&node).await.unwrap().id.clone();
    let files = TakeSnapshot {
        keeps: PauseKeeps::Files,
        ..TakeSnapshot::default()
    };
    let taken = take_as(&node, &id, files).await.unwrap();
    assert_eq!(machine.agent.restarts.load(Ordering::Acquire), 0);
    create_from(&node, taken.id.as_str()).await.unwrap();
    assert_eq!(machine.agent.restarts.load(Ordering::Acquire), 1);
}

#[tokio::test(start_paused = true)]
async fn forgotten_snapshots_are_collected_when_nothing_stands_on_them() {
    // R-T5, wire contract 1.5
    let mut machine = Machine::new();
    machine.config.snapshot_retention = Retention::For(Duration::from_secs(3_600));
    let node = machine.start().await;
    let source = create(&node).await.unwrap();
    let forgotten = take(&node, &source.id).await.unwrap();
    let kept = take_as(&node, &source.id, named("env")).await.unwrap();
    machine.clock.advance(Duration::from_secs(7_200));
    tokio::time::sleep(Duration::from_secs(130)).await;
    assert_eq!(node.snapshots().len(), 2, "its source stands on it");
    node.kill(&source.id, Actor::Operator, within(5))
        .await
        .unwrap();
    eventually("it is collected", async || node.snapshots().len() == 1).await;
    assert_eq!(node.snapshots()[0].id, kept.id);
    assert!(node.lineage(&forgotten.id).is_none());
}

/// What a client may know: which sandboxes and snapshots there are.
#[derive(Default)]
struct Model {
    sandboxes: BTreeSet<SandboxId>,
    snapshots: BTreeSet<SnapshotId>,
}

#[tokio::test(start_paused = true)]
async fn random_histories_leave_on_disk_what_something_refers_to() {
    // Issue: the files are exactly those that something refers to.
    for seed in 0..60 {
        history(seed).await;
    }
}

async fn history(seed: u64) {
    const STEPS: usize = 40;
    let entropy = SeededEntropy::new(seed);
    let pick = |below: usize| {
        let mut bytes = [0u8; 8];
        entropy.fill(&mut bytes);
        usize::try_from(u64::from_le_bytes(bytes) % u64::try_from(below.max(1)).unwrap()).unwrap()
    };
    let machine = Machine::new();
    let mut node = machine.start().await;
    let mut model = Model::default();
    for step in 0..STEPS {
        if pick(5) == 0 {
            let call = [Operation::Capture, Operation::Launch][pick(2)];
            let fault = [Fault::Error, Fault::LostReply, Fault::Lie][pick(3)];
            machine.engine.plan(call, 1, fault);
        }
        let sandbox = model
            .sandboxes
            .iter()
            .nth(pick(model.sandboxes.len()))
            .cloned();
        let snapshot = model
            .snapshots
            .iter()
            .nth(pick(model.snapshots.len()))
            .cloned();
        match (pick(8), sandbox, snapshot) {
            (0, _, _) | (_, None, _) => {
                let made = create(&node).await;
                model
                    .sandboxes
                    .extend(made.ok().map(|view| view.id.clone()));
            }
            (1 | 2, Some(id), _) => {
                let taken = take(&node, &id).await;
                model
                    .snapshots
                    .extend(taken.ok().map(|taken| taken.id.clone()));
            }
            (3, _, Some(from)) => {
                let made = create_from(&node, from.as_str()).await;
                model
                    .sandboxes
                    .extend(made.ok().map(|view| view.id.clone()));
            }
            (4, Some(id), Some(to)) => drop(roll(&node, &id, &to).await),
            (5, Some(id), _) => {
                let toggled = match state(&node, &id) {
                    SandboxState::Paused => {
                        let resume = Resume {
                            waking: Waking::AsPaused,
                            lifetime: NewLifetime::AsMade,
                            on_timeout: None,
                        };
                        node.resume(&id, resume, Actor::Operator, within(10)).await
                    }
                    _ => {
                        node.pause(&id, Pause::default(), Actor::Operator, within(10))
                            .await
                    }
                };
                drop(toggled);
            }
            (6, Some(id), _) if pick(3) == 0 => {
                node.kill(&id, Actor::Operator, within(30)).await.unwrap();
                model.sandboxes.remove(&id);
            }
            (_, _, Some(snapshot)) if pick(3) == 0 => {
                node.delete_snapshot(&snapshot).await.unwrap();
                model.snapshots.remove(&snapshot);
            }
            _ => {}
        }
        machine.engine.heal();
        // A failed capture may end a sandbox; then it says so.
        model
            .sandboxes
            .retain(|id| node.get(id).is_some_and(|view| view.ended.is_none()));
        if step % 13 == 12 {
            node.abandon().await;
            drop(node);
            node = machine.start().await;
        }
        // Whatever a lost answer left is found by the auditor's two looks.
        tokio::time::sleep(Duration::from_secs(70)).await;
        let what = format!("seed {seed}, step {step}");
        let listed: BTreeSet<_> = node.list().iter().map(|view| view.id.clone()).collect();
        assert_eq!(listed, model.sandboxes, "{what}");
        machine.assert_in_order(&node).await;
        let expected: BTreeSet<_> = model.snapshots.iter().map(SnapshotId::to_string).collect();
        assert_eq!(machine.snapshot_names(), expected, "{what}");
    }
}
