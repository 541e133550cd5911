//! Every state against every operation, every pair of operations at once, and random histories, over
//! a scripted engine that errs, hangs, lies, answers late or dies (R-L1, R-L2, R-L8, R-L10).
//!
//! What must hold whatever happens: a typed answer that the state allows; one winner; no stuck state;
//! and on the machine exactly what is listed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that meets the unexpected is to fail"
)]

mod support;

use std::{sync::Arc, time::Duration};

use sandhold_engine::sim::{Fault, Operation as Engine};
use sandhold_node::Node;
use sandhold_platform::{
    Egress, LifetimeChange, NewLifetime, Pause, Platform, PlatformError, Resume, Routes,
    TakeSnapshot, TimeTravel, WakeError, Waking,
};
use sandhold_types::{Actor, Entropy, SandboxId, SandboxState, SeededEntropy};
use support::{FOR_EVER, Machine, create, eventually, request, within};
use tokio::task::JoinHandle;

/// Where the sandbox is when it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    Creating,
    Running,
    Pausing,
    Paused,
    Resuming,
    Snapshotting,
    RollingBack,
    Killing,
    Killed,
}

const STARTS: [Start; 9] = [
    Start::Creating,
    Start::Running,
    Start::Pausing,
    Start::Paused,
    Start::Resuming,
    Start::Snapshotting,
    Start::RollingBack,
    Start::Killing,
    Start::Killed,
];

/// What it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ask {
    Pause,
    Resume,
    Connect,
    Kill,
    Lifetime,
    Egress,
    Wake,
    Snapshot,
    /// To the snapshot that every sandbox here has from the start.
    RollBack,
}

const ASKS: [Ask; 9] = [
    Ask::Pause,
    Ask::Resume,
    Ask::Connect,
    Ask::Kill,
    Ask::Lifetime,
    Ask::Egress,
    Ask::Wake,
    Ask::Snapshot,
    Ask::RollBack,
];

/// The kinds of answers that callers are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Done,
    AlreadySo,
    /// With a time to come back.
    Busy,
    Conflict,
    NotFound,
    /// The engine or the guest failed.
    Failed,
    Deadline,
}

fn told<T>(result: Result<T, PlatformError>) -> Told {
    match result {
        Ok(_) => Told::Done,
        Err(PlatformError::AlreadySo { .. }) => Told::AlreadySo,
        Err(PlatformError::Busy { retry_after, .. }) => {
            assert!(retry_after > Duration::ZERO);
            Told::Busy
        }
        Err(PlatformError::Conflict { .. }) => Told::Conflict,
        // A sandbox that is not there has no snapshots.
        Err(PlatformError::NotFound(_) | PlatformError::SnapshotNotFound(_)) => Told::NotFound,
        Err(PlatformError::Engine { .. } | PlatformError::GuestUnresponsive { .. }) => Told::Failed,
        Err(PlatformError::Deadline { .. }) => Told::Deadline,
        Err(other) => panic!("no such answer is documented: {other:?}"),
    }
}

async fn ask(node: &Node, id: &SandboxId, ask: Ask, seconds: u64) -> Told {
    let deadline = within(seconds);
    let resume = Resume {
        waking: Waking::AsPaused,
        lifetime: NewLifetime::AsMade,
        on_timeout: None,
    };
    let extend = LifetimeChange::Extend { after_ms: None };
    let by = Actor::Operator;
    match ask {
        Ask::Pause => told(node.pause(id, Pause::default(), by, deadline).await),
        Ask::Resume => told(node.resume(id, resume, by, deadline).await),
        Ask::Connect => told(node.connect(id, extend, resume, by, deadline).await),
        Ask::Kill => told(node.kill(id, by, deadline).await),
        Ask::Lifetime => told(node.change_lifetime(id, extend, by, deadline).await),
        Ask::Egress => told(node.change_egress(id, Egress::Nothing, by, deadline).await),
        Ask::Snapshot => {
            let wanted = TakeSnapshot::default();
            told(node.take_snapshot(id, wanted, by, deadline).await)
        }
        Ask::RollBack => {
            let all = node.snapshots();
            let first = all.iter().find(|snapshot| snapshot.source == *id);
            let Some(to) = first else {
                return Told::NotFound;
            };
            told(node.roll_back(id, &to.id, by, deadline).await)
        }
        Ask::Wake => match node.wake(id, deadline).await {
            Ok(_) => Told::Done,
            Err(WakeError::Gone) => Told::NotFound,
            Err(WakeError::Late { .. }) => Told::Busy,
            Err(WakeError::Failed { .. }) => Told::Failed,
            Err(other) => panic!("{other:?}"),
        },
    }
}

/// What may be told when nothing goes wrong with the asked operation itself. Whoever meets a
/// transition waits for its end, so its outcome is what the state after it says, or busy.
fn allowed(start: Start, asked: Ask) -> &'static [Told] {
    use Told as T;
    match (start, asked) {
        // A rollback of what is gone asks for what is gone.
        (Start::Killed, _) => &[T::NotFound],
        // The create fails in the end, and with it the sandbox.
        (Start::Creating, _) => &[T::Busy, T::NotFound],
        // The removal fails once and then succeeds.
        (Start::Killing, Ask::Kill) => &[T::Done, T::Busy, T::NotFound],
        (Start::Killing, _) => &[T::Busy, T::NotFound],
        (_, Ask::Kill) => &[T::Done, T::Busy],
        (Start::Running, Ask::Resume) => &[T::AlreadySo],
        (Start::Running, _) => &[T::Done],
        (Start::Paused, Ask::Pause) => &[T::AlreadySo],
        (Start::Paused, Ask::Lifetime | Ask::Egress) => &[T::Conflict],
        (Start::Paused, _) => &[T::Done],
        // A pause that hangs is given up after minutes; it runs then.
        (Start::Pausing, Ask::Resume) => &[T::Busy, T::AlreadySo],
        (Start::Pausing, _) => &[T::Busy, T::Done],
        // A wake-up that hangs fails at its caller's deadline; it sleeps then.
        (Start::Resuming, Ask::Pause) => &[T::Busy, T::AlreadySo],
        (Start::Resuming, Ask::Lifetime | Ask::Egress) => &[T::Busy, T::Conflict],
        // A capture that hangs is given up after minutes, a rollback at its caller's deadline; it
        // runs in both cases.
        (Start::Snapshotting | Start::RollingBack, Ask::Resume) => &[T::Busy, T::AlreadySo],
        (Start::Snapshotting | Start::RollingBack, _) => &[T::Busy, T::Done],
        (Start::Resuming, Ask::Wake) => &[T::Busy, T::Done, T::Failed],
        (Start::Resuming, _) => &[T::Busy, T::Done],
    }
}

/// Brings a sandbox to where it starts from; the task is what it is in the middle of.
async fn arrive(
    machine: &Machine,
    node: &Arc<Node>,
    start: Start,
) -> (SandboxId, Option<JoinHandle<Told>>) {
    if start == Start::Creating {
        machine.engine.plan(Engine::Launch, 1, Fault::Hang);
        let making = tokio::spawn({
            let node = node.clone();
            async move { told(node.create(request(FOR_EVER), within(10)).await) }
        });
        eventually("it is being made", async || !node.list().is_empty()).await;
        return (node.list()[0].id.clone(), Some(making));
    }
    let id = create(node).await.unwrap().id.clone();
    assert_eq!(ask(node, &id, Ask::Snapshot, 10).await, Told::Done);
    let begin = |what: Ask| {
        let (node, id) = (node.clone(), id.clone());
        tokio::spawn(async move { ask(&node, &id, what, 10).await })
    };
    let under_way = match start {
        Start::Running => None,
        Start::Pausing => {
            machine.engine.plan(Engine::Capture, 1, Fault::Hang);
            Some(begin(Ask::Pause))
        }
        Start::Paused | Start::Resuming => {
            assert_eq!(ask(node, &id, Ask::Pause, 10).await, Told::Done);
            (start == Start::Resuming).then(|| {
                machine.engine.plan(Engine::Launch, 1, Fault::Hang);
                begin(Ask::Resume)
            })
        }
        Start::Snapshotting => {
            machine.engine.plan(Engine::Capture, 1, Fault::Hang);
            Some(begin(Ask::Snapshot))
        }
        Start::RollingBack => {
            machine.engine.plan(Engine::Launch, 1, Fault::Hang);
            Some(begin(Ask::RollBack))
        }
        Start::Killing => {
            machine.engine.plan(Engine::Remove, 1, Fault::Hang);
            Some(begin(Ask::Kill))
        }
        Start::Killed => {
            assert_eq!(ask(node, &id, Ask::Kill, 10).await, Told::Done);
            None
        }
        Start::Creating => unreachable!("handled above"),
    };
    if under_way.is_some() {
        eventually("it is in transition", async || {
            node.get(&id).is_some_and(|view| view.state.is_transient())
        })
        .await;
    }
    (id, under_way)
}

/// After a while nothing is in transition any more, what is on the machine is what is listed, and
/// everything can be deleted.
async fn settles(machine: &Machine, node: &Node, what: &str) {
    machine.engine.heal();
    // Longer than every budget: of a capture, its settling, a removal, and the auditor's two looks.
    tokio::time::sleep(Duration::from_secs(900)).await;
    for view in node.list() {
        assert!(
            matches!(view.state, SandboxState::Running | SandboxState::Paused),
            "{what}: stuck {}",
            view.state
        );
    }
    machine.assert_in_order(node).await;
    for view in node.list() {
        assert_eq!(
            ask(node, &view.id, Ask::Kill, 30).await,
            Told::Done,
            "{what}"
        );
    }
    assert!(machine.is_clean().await, "{what}");
}

#[tokio::test(start_paused = true)]
async fn every_state_against_every_operation() {
    for start in STARTS {
        for asked in ASKS {
            let what = format!("{asked:?} while {start:?}");
            let machine = Machine::new();
            let node = machine.start().await;
            let (id, under_way) = arrive(&machine, &node, start).await;
            for patience_s in [5, 600] {
                let answer = ask(&node, &id, asked, patience_s).await;
                let again = patience_s == 600;
                let fits = allowed(start, asked).contains(&answer)
                    // The second time it is where the first time led to.
                    || (again && answer != Told::Busy && answer != Told::Deadline);
                assert!(fits, "{what}, {patience_s} s: {answer:?}");
            }
            if let Some(under_way) = under_way {
                let _ = under_way.await.unwrap();
            }
            settles(&machine, &node, &what).await;
        }
    }
}

/// What can go wrong with an engine call, short of the end of the process.
const FAULTS: [Fault; 6] = [
    Fault::Error,
    Fault::Hang,
    Fault::LateSuccess,
    Fault::LostReply,
    Fault::Lie,
    Fault::KillsInstance,
];

const CALLS: [Engine; 7] = [
    Engine::Freeze,
    Engine::Thaw,
    Engine::Capture,
    Engine::Launch,
    Engine::Remove,
    Engine::Inspect,
    Engine::Usage,
];

#[tokio::test(start_paused = true)]
async fn every_operation_with_every_fault_of_every_engine_call() {
    for start in [Start::Running, Start::Paused] {
        for asked in ASKS {
            for call in CALLS {
                for fault in FAULTS {
                    let what = format!("{asked:?} while {start:?}, {call:?} with {fault:?}");
                    let machine = Machine::new();
                    let node = machine.start().await;
                    let (id, _) = arrive(&machine, &node, start).await;
                    machine.engine.plan(call, 1, fault);
                    ask(&node, &id, asked, 30).await;
                    settles(&machine, &node, &what).await;
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_process_in_every_engine_call_of_every_operation() {
    for start in [Start::Running, Start::Paused] {
        for asked in ASKS {
            for call in [Engine::Capture, Engine::Launch, Engine::Remove] {
                let what = format!("{asked:?} while {start:?}, the end in {call:?}");
                let machine = Machine::new();
                let node = machine.start().await;
                let (id, _) = arrive(&machine, &node, start).await;
                machine.engine.plan(call, 1, Fault::Crash);
                let asking = tokio::spawn({
                    let (node, id) = (node.clone(), id.clone());
                    async move { ask(&node, &id, asked, 5).await }
                });
                tokio::time::sleep(Duration::from_secs(10)).await;
                asking.abort();
                let _ = asking.await;
                node.abandon().await;
                drop(node);
                machine.engine.heal();
                let node = machine.start().await;
                if asked != Ask::Kill {
                    let view = node.get(&id).unwrap();
                    assert!(view.ended.is_none(), "{what}: {:?}", view.ended);
                }
                settles(&machine, &node, &what).await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn every_pair_of_operations_at_once_has_one_outcome() {
    for start in [Start::Running, Start::Paused] {
        for first in ASKS {
            for second in ASKS {
                let what = format!("{first:?} and {second:?} while {start:?}");
                let machine = Machine::new();
                let node = machine.start().await;
                let (id, _) = arrive(&machine, &node, start).await;
                let (one, two) =
                    futures::join!(ask(&node, &id, first, 30), ask(&node, &id, second, 30));
                if first == Ask::Kill && second == Ask::Kill {
                    assert_eq!((one, two), (Told::Done, Told::NotFound), "{what}");
                }
                if first == Ask::Kill || second == Ask::Kill {
                    assert!(node.list().is_empty(), "{what}: a delete always works");
                }
                settles(&machine, &node, &what).await;
            }
        }
    }
}

/// Seeds that once failed, or that show something; they are always run.
const KEPT_SEEDS: [u64; 1] = [1];
const SEEDS: u64 = 150;

#[tokio::test(start_paused = true)]
async fn random_histories_end_in_order() {
    for seed in KEPT_SEEDS.into_iter().chain(1_000..1_000 + SEEDS) {
        history(seed).await;
    }
}

/// Several callers, each asking at random, while the engine errs at random; one process death in
/// the middle.
async fn history(seed: u64) {
    const STEPS: usize = 25;
    let entropy = SeededEntropy::new(seed);
    let pick = |below: usize| {
        let mut bytes = [0u8; 8];
        entropy.fill(&mut bytes);
        usize::try_from(u64::from_le_bytes(bytes) % u64::try_from(below).unwrap()).unwrap()
    };
    let machine = Machine::new();
    let mut node = machine.start().await;
    let mut ids = Vec::new();
    for _ in 0..2 {
        let id = create(&node).await.unwrap().id.clone();
        assert_eq!(ask(&node, &id, Ask::Snapshot, 10).await, Told::Done);
        ids.push(id);
    }
    let mut asking = tokio::task::JoinSet::new();
    for step in 0..STEPS {
        if pick(4) == 0 {
            let call = CALLS[pick(3)];
            machine.engine.plan(call, 1, FAULTS[pick(FAULTS.len() - 1)]);
        }
        let (id, asked) = (ids[pick(ids.len())].clone(), ASKS[pick(ASKS.len())]);
        let patience_s = [1, 5, 30][pick(3)];
        let to = node.clone();
        asking.spawn(async move { ask(&to, &id, asked, patience_s).await });
        if pick(2) == 0 {
            tokio::time::sleep(Duration::from_millis(u64::try_from(pick(3_000)).unwrap())).await;
        }
        if step == STEPS / 2 {
            asking.shutdown().await;
            node.abandon().await;
            drop(node);
            machine.engine.heal();
            node = machine.start().await;
        }
    }
    while asking.join_next().await.is_some() {}
    settles(&machine, &node, &format!("seed {seed}")).await;
}
