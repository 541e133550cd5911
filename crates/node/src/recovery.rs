//! What a node does with what it finds after a restart (R-L3).
//!
//! ```text
//!  directories ∪ engine's listing ∪ network's listing
//!        │
//!        ▼ plan(record, engine's truth)
//!  adopt │ leave asleep │ undo or prove a capture │ undo a rollback │ finish the removal │
//!  undo a create, or copies that were not all made │ sweep up
//! ```
//!
//! Invariants: a sandbox whose record says `running` and whose processes live is kept; one whose
//! record says `paused` or `resuming` has no processes when this is done, and its image is kept; one
//! whose create was not acknowledged is undone; whatever has no record is swept up. A listing that
//! failed stops the start rather than being taken for an empty one (R-G11).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    sync::Arc,
    time::Duration,
};

use sandhold_engine::{InstanceRef, InstanceStatus};
use sandhold_platform::{PauseKeeps, Sleep};
use sandhold_types::{
    Actor, Deadline, EndReason, Incarnation, SandboxId, SandboxState, SnapshotId,
};

use tokio::sync::oneshot;

use crate::{
    actor::{Beginning, end_reason},
    layout::Durability,
    node::{Dependencies, Node, NodeError, off_thread},
    record::{Image, Proof, Record},
    registry::{ENDED_MAX, Entry, Full},
    remove,
    sleep::{self, CAPTURE_BUDGET, END_GRACE},
    snapshots,
};

/// How long the removal of one piece of rubbish may take.
const SWEEP_BUDGET: Duration = Duration::from_secs(30);

/// What recovery did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecoveryReport {
    /// Sandboxes that were found alive and kept.
    pub adopted: usize,
    /// Sandboxes whose end was finished or found out.
    pub ended: usize,
    /// Half-made or unknown things that were swept up.
    pub swept: usize,
}

/// What is to be done with a sandbox that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Plan {
    /// It runs; it is kept.
    Adopt,
    /// Its capture was cut short: it runs, and is kept.
    UndoCapture,
    /// Its rollback did not come about: it runs as before, and is kept.
    UndoRollback,
    /// It sleeps, or a wake-up was cut short: nothing of its processes may be left.
    Asleep,
    /// Its capture was cut short after its processes had gone.
    Doubtful,
    /// It has ended.
    End(EndReason),
}

/// The rule: what the record says against what the engine found.
fn plan(
    record: &Record,
    status: &InstanceStatus,
    unfinished_copies: &BTreeSet<SnapshotId>,
) -> Plan {
    let copy_of = record.copy_of.as_ref();
    if copy_of.is_some_and(|snapshot| unfinished_copies.contains(snapshot)) {
        return Plan::End(EndReason::CreateFailed {
            step: "the node was restarted before all copies were made".to_owned(),
        });
    }
    let noted = record.ended.clone().map(|ended| ended.reason);
    match (record.state, status) {
        (SandboxState::Killing | SandboxState::Killed, _) => {
            Plan::End(noted.unwrap_or(EndReason::TimedOut))
        }
        (SandboxState::Running, InstanceStatus::Running) => Plan::Adopt,
        (SandboxState::Running, InstanceStatus::Ended(cause)) => {
            Plan::End(end_reason(cause.clone()))
        }
        (SandboxState::Running, InstanceStatus::Unknown) => Plan::End(EndReason::EngineFailed {
            detail: "its processes were gone after a restart".to_owned(),
        }),
        (SandboxState::Paused | SandboxState::Resuming, _) => Plan::Asleep,
        (SandboxState::Pausing | SandboxState::Snapshotting, InstanceStatus::Running) => {
            Plan::UndoCapture
        }
        (SandboxState::Pausing | SandboxState::Snapshotting, _) => Plan::Doubtful,
        (SandboxState::RollingBack, _) if record.image.is_some() => Plan::Asleep,
        (SandboxState::RollingBack, InstanceStatus::Running) => Plan::UndoRollback,
        (SandboxState::RollingBack, _) => Plan::End(EndReason::EngineFailed {
            detail: "its processes were gone after a restart".to_owned(),
        }),
        (state, _) => Plan::End(EndReason::CreateFailed {
            step: format!("the node was restarted while it was {state}"),
        }),
    }
}

/// Puts everything in order and starts an actor for each sandbox that is kept or still ending.
pub(crate) async fn recover(node: &Node) -> Result<RecoveryReport, NodeError> {
    let dependencies = node.dependencies();
    let mut report = RecoveryReport::default();
    let mut ending = Vec::new();
    let mut doubtful = Vec::new();
    remember_ended(node).await?;
    let found = Found::collect(dependencies).await?;
    for id in &found.all {
        match found.records.get(id) {
            Some(record) => match recover_one(node, record.clone(), &found).await? {
                Recovered::Adopted => report.adopted += 1,
                Recovered::Doubtful(proved) => {
                    report.adopted += 1;
                    doubtful.push(proved);
                }
                Recovered::Ending(entry) => ending.push(entry),
            },
            None => {
                sweep_up(dependencies, id, &found).await?;
                report.swept += 1;
            }
        }
    }
    report.ended = ending.len();
    wait_for_ends(&ending).await;
    // After the copies: without it they would be taken for finished.
    snapshots::remove_temporary(dependencies).await?;
    let proofs = futures::future::join_all(doubtful);
    if tokio::time::timeout(CAPTURE_BUDGET, proofs).await.is_err() {
        tracing::warn!("it is not known yet of every cut short pause whether it can be woken");
    }
    Ok(report)
}

/// What became of a sandbox that had a record.
enum Recovered {
    Adopted,
    Doubtful(oneshot::Receiver<()>),
    Ending(Arc<Entry>),
}

/// Waits, within bounds, until the removals that recovery began are done, so that a node that says
/// it is ready shows no half-dead sandboxes. The sweeper goes on with those that are not.
async fn wait_for_ends(ending: &[Arc<Entry>]) {
    let all = futures::future::join_all(ending.iter().map(|entry| entry.mailbox.closed()));
    if tokio::time::timeout(SWEEP_BUDGET, all).await.is_err() {
        tracing::warn!("some removals are not finished yet; the sweeper goes on with them");
    }
}

/// Everything of which there is any trace.
struct Found {
    all: BTreeSet<SandboxId>,
    records: BTreeMap<SandboxId, Record>,
    incarnations: BTreeMap<SandboxId, BTreeSet<Incarnation>>,
    networks: BTreeSet<SandboxId>,
}

impl Found {
    async fn collect(dependencies: &Arc<Dependencies>) -> Result<Self, NodeError> {
        let mut incarnations: BTreeMap<SandboxId, BTreeSet<Incarnation>> = BTreeMap::new();
        for instance in dependencies.engine.list().await? {
            incarnations
                .entry(instance.sandbox)
                .or_default()
                .insert(instance.incarnation);
        }
        let mut all: BTreeSet<SandboxId> = incarnations.keys().cloned().collect();
        let networks: BTreeSet<SandboxId> =
            dependencies.network.list().await?.into_iter().collect();
        all.extend(networks.iter().cloned());
        let layout = Arc::clone(&dependencies.layout);
        let read = tokio::task::spawn_blocking(move || {
            let mut records = BTreeMap::new();
            let mut directories = Vec::new();
            for entry in fs::read_dir(layout.sandboxes()).map_err(NodeError::ReadSandboxes)? {
                let name = entry.map_err(NodeError::ReadSandboxes)?.file_name();
                let Some(Ok(id)) = name.to_str().map(str::parse::<SandboxId>) else {
                    continue;
                };
                match Record::read(&layout.record(&id), &id) {
                    Ok(record) => drop(records.insert(id.clone(), record)),
                    // Never acknowledged to anybody, or a blank.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(source) => {
                        let path = layout.record(&id);
                        return Err(NodeError::BadRecord { path, source });
                    }
                }
                directories.push(id);
            }
            Ok((directories, records))
        });
        let joined = read.await.map_err(io::Error::other);
        let (directories, records) = joined.map_err(NodeError::ReadSandboxes)??;
        all.extend(directories);
        Ok(Self {
            all,
            records,
            incarnations,
            networks,
        })
    }
}

/// What there is of an instance. A capture for a pause that is done takes the processes along, which
/// may take a moment; one that is seen in that moment must not be taken for one that runs on.
async fn settled_status(
    dependencies: &Dependencies,
    record: &Record,
    instance: &InstanceRef,
) -> Result<InstanceStatus, NodeError> {
    let status = dependencies.inspect(instance).await?;
    let is_going = record.state == SandboxState::Pausing
        && status == InstanceStatus::Running
        && sleep::has_image(dependencies, record).await;
    if !is_going {
        return Ok(status);
    }
    let _ = tokio::time::timeout(END_GRACE, dependencies.engine.wait(instance)).await;
    Ok(dependencies.inspect(instance).await?)
}

async fn recover_one(node: &Node, record: Record, found: &Found) -> Result<Recovered, NodeError> {
    let dependencies = node.dependencies();
    let instance = dependencies.layout.instance(&record.id, record.incarnation);
    if matches!(
        record.state,
        SandboxState::Pausing | SandboxState::Snapshotting
    ) {
        // A capture that the earlier process began may still be at work.
        let now = tokio::time::Instant::now().into_std();
        let deadline = Deadline::after(now, CAPTURE_BUDGET);
        dependencies.engine.settle(&instance, deadline).await?;
    }
    let status = settled_status(dependencies, &record, &instance).await?;
    let plan = plan(&record, &status, &dependencies.snapshots.temporary());
    let mut record = record;
    let now = dependencies.clock.now();
    let mut doubtful = None;
    let beginning = match plan {
        Plan::Adopt | Plan::UndoCapture | Plan::UndoRollback => {
            // Before it goes on: of two lives on one network only one may be awake.
            remove_other_lives(dependencies, &record, found).await?;
            if plan == Plan::UndoRollback {
                dependencies.network.unaddress(&record.id).await?;
            }
            dependencies.engine.thaw(&instance).await?;
            // An idle window begins anew: what happened meanwhile was not seen (R-L5).
            record.last_activity = now;
            let undone = match plan {
                Plan::UndoCapture => Some("its capture was cut short by a restart"),
                Plan::UndoRollback => Some("its rollback was cut short by a restart"),
                _ => None,
            };
            if let Some(reason) = undone {
                let reason = reason.to_owned();
                record.note(SandboxState::Running, Actor::Recovery, reason, now);
                write(dependencies, &record).await?;
            }
            remove_images(dependencies, &record.id, None).await;
            Beginning::Adopted
        }
        Plan::Asleep => {
            put_to_rest(dependencies, &record, found).await?;
            if record.state != SandboxState::Paused {
                let reason = "its wake-up was cut short by a restart".to_owned();
                record.note(SandboxState::Paused, Actor::Recovery, reason, now);
                write(dependencies, &record).await?;
            }
            let kept = record.image.as_ref().map(|image| image.of);
            remove_images(dependencies, &record.id, kept).await;
            Beginning::Adopted
        }
        Plan::Doubtful => {
            put_to_rest(dependencies, &record, found).await?;
            record.sleep = Some(Sleep {
                since: now,
                keeps: PauseKeeps::Everything,
            });
            record.image = Some(Image {
                of: record.incarnation,
                proof: Proof::Missing,
                // Begun by a process that may have run another release.
                engine: None,
            });
            let reason = "its capture was cut short by a restart".to_owned();
            record.note(SandboxState::Paused, Actor::Recovery, reason, now);
            write(dependencies, &record).await?;
            let (done, proved) = oneshot::channel();
            doubtful = Some(proved);
            Beginning::Doubtful(done)
        }
        Plan::End(reason) => {
            return node
                .start_actor(record, Beginning::Ending(reason))
                .map(Recovered::Ending)
                .map_err(too_many);
        }
    };
    node.start_actor(record, beginning).map_err(too_many)?;
    Ok(doubtful.map_or(Recovered::Adopted, Recovered::Doubtful))
}

fn too_many(full: Full) -> NodeError {
    NodeError::TooMany {
        sandboxes_max: full.sandboxes_max,
    }
}

async fn write(dependencies: &Dependencies, record: &Record) -> Result<(), NodeError> {
    let written = dependencies.persist(record, Durability::Process).await;
    written.map_err(|source| NodeError::Sweep {
        sandbox: record.id.clone(),
        source: source.into(),
    })
}

/// Removes every captured life of the sandbox except `kept`.
async fn remove_images(dependencies: &Dependencies, id: &SandboxId, kept: Option<Incarnation>) {
    let discard = sleep::discard_images(dependencies, id, kept);
    let done = off_thread(move || {
        discard();
        Ok(())
    });
    if let Err(error) = done.await {
        tracing::warn!(sandbox = %id, %error, "an image is left");
    }
}

/// Removes whatever processes and network there are of a sandbox that sleeps.
async fn put_to_rest(
    dependencies: &Dependencies,
    record: &Record,
    found: &Found,
) -> Result<(), NodeError> {
    let mut lives = found
        .incarnations
        .get(&record.id)
        .cloned()
        .unwrap_or_default();
    let life = dependencies.layout.instance(&record.id, record.incarnation);
    if found.networks.contains(&record.id) || life.directory.exists() {
        lives.insert(record.incarnation);
    }
    clear(dependencies, &record.id, &lives).await
}

/// Removes whatever processes there are of lives that the record does not name. The network is the
/// named one's too.
async fn remove_other_lives(
    dependencies: &Dependencies,
    record: &Record,
    found: &Found,
) -> Result<(), NodeError> {
    let now = tokio::time::Instant::now().into_std();
    let deadline = Deadline::after(now, SWEEP_BUDGET);
    let lives = dependencies.layout.lives(&record.id);
    let mut lives = lives.map_err(NodeError::ReadSandboxes)?;
    lives.extend(found.incarnations.get(&record.id).into_iter().flatten());
    lives.remove(&record.incarnation);
    for life in lives {
        let removed = remove::remove_life(dependencies, &record.id, life, deadline).await;
        removed.map_err(|source| NodeError::Sweep {
            sandbox: record.id.clone(),
            source: source.into(),
        })?;
    }
    Ok(())
}

async fn clear(
    dependencies: &Dependencies,
    id: &SandboxId,
    lives: &BTreeSet<Incarnation>,
) -> Result<(), NodeError> {
    let now = tokio::time::Instant::now().into_std();
    let deadline = Deadline::after(now, SWEEP_BUDGET);
    for life in lives {
        let removed = remove::remove_resources(dependencies, id, *life, deadline).await;
        removed.map_err(|source| NodeError::Sweep {
            sandbox: id.clone(),
            source: source.into(),
        })?;
    }
    Ok(())
}

/// Removes what has no record: it was never acknowledged to anybody.
async fn sweep_up(
    dependencies: &Dependencies,
    id: &SandboxId,
    found: &Found,
) -> Result<(), NodeError> {
    let first = BTreeSet::from([Incarnation::INITIAL]);
    clear(
        dependencies,
        id,
        found.incarnations.get(id).unwrap_or(&first),
    )
    .await?;
    let removed = remove::remove_directory(dependencies, id).await;
    removed.map_err(|source| NodeError::Sweep {
        sandbox: id.clone(),
        source: source.into(),
    })
}

/// Reads the tombstones, so that a client is still told why its sandbox ended.
async fn remember_ended(node: &Node) -> Result<(), NodeError> {
    let layout = Arc::clone(&node.dependencies().layout);
    let read = tokio::task::spawn_blocking(move || {
        let mut records = Vec::new();
        for entry in fs::read_dir(layout.ended())? {
            let path = entry?.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            let Some(Ok(id)) = stem.map(str::parse::<SandboxId>) else {
                continue;
            };
            match Record::read(&path, &id) {
                Ok(record) if record.state == SandboxState::Killed => records.push(record),
                _ => drop(fs::remove_file(&path)),
            }
        }
        records.sort_by_key(|record| record.ended.as_ref().map(|ended| ended.at));
        let surplus = records.len().saturating_sub(ENDED_MAX);
        for forgotten in records.drain(..surplus) {
            drop(fs::remove_file(
                layout.ended().join(format!("{}.json", forgotten.id)),
            ));
        }
        Ok(records)
    });
    let read = read
        .await
        .map_err(std::io::Error::other)
        .and_then(|result| result);
    for record in read.map_err(NodeError::ReadSandboxes)? {
        node.registry().retire(record);
    }
    Ok(())
}
