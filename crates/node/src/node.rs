//! The node: its parts, its start and its stop.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sandhold_engine::{Engine, EngineError, InstanceRef, InstanceStatus, Usage};
use sandhold_images::{Builds, Faults, Retention, Snapshots};
use sandhold_network::{Network, NetworkError};
use sandhold_platform::{Hold, Platform, PlatformError};
use sandhold_types::{
    Actor, BuildId, Clock, Deadline, Entropy, Incarnation, SandboxId, SandboxState,
};
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
};

use crate::{
    actor::{Beginning, Guard, MAILBOX_MAX, SandboxActor},
    agent::AgentControl,
    auditor,
    blanks::{self, Shelf},
    capacity::CapacityPolicy,
    doze::DozeCounts,
    layout::{Durability, Layout},
    meter,
    record::Record,
    recovery::{self, RecoveryReport},
    registry::{Entry, Full, Registry},
    snapshots, sweeper,
};

/// How long the engine may take to look at something.
const LOOK_MAX: Duration = Duration::from_secs(5);

fn no_answer(step: &'static str, instance: &InstanceRef) -> EngineError {
    EngineError::Deadline {
        step,
        instance: instance.id.clone(),
    }
}

/// Settings of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeConfig {
    /// What it may use of the machine.
    pub capacity: CapacityPolicy,
    /// Engine processes that are made ahead of time, of each template that was asked for lately;
    /// zero for none.
    pub blanks_per_template: usize,
    /// Sandboxes that are started at the same time; others wait their turn. A start waits for the
    /// kernel now and then, so a few more than there are cores keep these busy; many more make all of
    /// them slower and none faster.
    pub launches_max: usize,
    /// How long a sandbox must be without use before its processes are frozen until the next use;
    /// none for never.
    pub doze_after: Option<Duration>,
    /// How long snapshots without a name are kept that nothing refers to.
    pub snapshot_retention: Retention,
}

impl Default for NodeConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        Self {
            capacity: CapacityPolicy::default(),
            blanks_per_template: 2,
            launches_max: cores * 2,
            doze_after: Some(Duration::from_secs(2)),
            snapshot_retention: Retention::default(),
        }
    }
}

/// What a node is made of. All of it comes from outside, so that tests bring their own.
#[derive(Debug)]
pub struct Dependencies {
    /// Runs the sandboxes.
    pub engine: Arc<dyn Engine>,
    /// Connects them.
    pub network: Arc<dyn Network>,
    /// What they are made from.
    pub builds: Arc<dyn Builds>,
    /// The moments of them that were captured.
    pub snapshots: Arc<Snapshots>,
    /// Talks to what is inside them.
    pub agent: Arc<dyn AgentControl>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Randomness.
    pub entropy: Arc<dyn Entropy>,
    /// Where files are.
    pub layout: Arc<Layout>,
    /// Crashes on purpose.
    pub faults: Faults,
    /// Turns for starting sandboxes.
    pub launches: Semaphore,
    /// How many turns there are.
    pub launches_max: usize,
    /// How often sandboxes doze off.
    pub dozes: DozeCounts,
}

impl Dependencies {
    /// Keeps a sandbox's processes running until the answer is dropped; thaws them if need be.
    pub(crate) async fn hold(&self, entry: &Entry) -> Result<Hold, EngineError> {
        let instance = || {
            let view = entry.view();
            self.layout.instance(&view.id, view.incarnation)
        };
        entry
            .doze
            .hold(self.engine.as_ref(), instance, &self.dozes)
            .await
    }

    /// Asks the engine for the truth about an instance. A look that takes no deadline of its own and
    /// does not come back is an error.
    pub(crate) async fn inspect(
        &self,
        instance: &InstanceRef,
    ) -> Result<InstanceStatus, EngineError> {
        let looked = tokio::time::timeout(LOOK_MAX, self.engine.inspect(instance)).await;
        looked.unwrap_or_else(|_| Err(no_answer("inspecting", instance)))
    }

    /// Asks the engine what an instance uses, with the same bound.
    pub(crate) async fn usage(&self, instance: &InstanceRef) -> Result<Usage, EngineError> {
        let looked = tokio::time::timeout(LOOK_MAX, self.engine.usage(instance)).await;
        looked.unwrap_or_else(|_| Err(no_answer("accounting for", instance)))
    }

    /// Stops the processes of an instance, or lets them go on, with the same bound.
    pub(crate) async fn set_frozen(
        &self,
        instance: &InstanceRef,
        frozen: bool,
    ) -> Result<(), EngineError> {
        let set = if frozen {
            self.engine.freeze(instance)
        } else {
            self.engine.thaw(instance)
        };
        let set = tokio::time::timeout(LOOK_MAX, set).await;
        set.unwrap_or_else(|_| Err(no_answer("stopping or thawing", instance)))
    }

    /// Makes a directory for a blank.
    pub(crate) async fn mark_blank(&self, id: &SandboxId) -> Result<(), PlatformError> {
        let directory = self.layout.instance(id, Incarnation::INITIAL).directory;
        let mark = self.layout.blank_mark(id);
        blocking("marking a blank", move || {
            std::fs::create_dir_all(directory)?;
            std::fs::write(mark, b"")
        })
        .await
    }

    /// Takes the mark off a blank that has become a sandbox.
    pub(crate) async fn unmark_blank(&self, id: &SandboxId) -> Result<(), PlatformError> {
        let mark = self.layout.blank_mark(id);
        blocking("taking a blank", move || std::fs::remove_file(mark)).await
    }

    /// Writes the record to its place.
    pub(crate) async fn persist(
        &self,
        record: &Record,
        durability: Durability,
    ) -> Result<(), PlatformError> {
        let path = self.layout.record(&record.id);
        let record = record.clone();
        let life = self.layout.instance(&record.id, record.incarnation);
        blocking("writing its record", move || {
            // One that sleeps has no life, and one that leaves its sleep for a snapshot not yet.
            let has_life = match record.state {
                SandboxState::Paused => false,
                SandboxState::RollingBack => record.image.is_none(),
                _ => true,
            };
            if has_life {
                std::fs::create_dir_all(life.directory)?;
            }
            record.write(&path, durability)
        })
        .await
    }
}

/// Why a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The engine's listing or inspection failed, so nothing may be concluded.
    #[error("could not ask the engine what is there")]
    Engine(#[from] EngineError),
    /// The network's listing failed, so nothing may be concluded.
    #[error("could not ask which networks are there")]
    Network(#[from] NetworkError),
    /// The snapshots cannot be put in order.
    #[error("could not put the snapshots in order")]
    Snapshots(#[from] sandhold_images::SnapshotError),
    /// The sandbox directories cannot be read.
    #[error("could not read the sandboxes in the data directory")]
    ReadSandboxes(#[source] std::io::Error),
    /// A sandbox's record is there and cannot be read. It may belong to a sandbox that somebody
    /// counts on, so nothing is guessed.
    #[error(
        "the record {path} cannot be read; repair it, or remove its directory to give the sandbox up"
    )]
    BadRecord {
        /// The record.
        path: std::path::PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Something half-made could not be swept up.
    #[error("could not sweep up what is left of sandbox {sandbox}")]
    Sweep {
        /// Of which sandbox.
        sandbox: SandboxId,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// More sandboxes were found than the node may have.
    #[error("there are more sandboxes than the configured {sandboxes_max}")]
    TooMany {
        /// The most.
        sandboxes_max: usize,
    },
}

/// The sandboxes of one machine.
#[derive(Debug)]
pub struct Node {
    dependencies: Arc<Dependencies>,
    registry: Arc<Registry>,
    shelf: Arc<Shelf>,
    config: NodeConfig,
    stopping: AtomicBool,
    background: Mutex<JoinSet<()>>,
    actors: Mutex<JoinSet<()>>,
}

impl Node {
    /// Puts in order what an earlier process left, then starts the sweeper and the meter.
    ///
    /// # Errors
    /// What is there cannot be found out or put in order; nothing is guessed.
    pub async fn start(
        dependencies: Dependencies,
        config: NodeConfig,
    ) -> Result<(Arc<Self>, RecoveryReport), NodeError> {
        let node = Arc::new(Self {
            dependencies: Arc::new(dependencies),
            registry: Arc::new(Registry::default()),
            shelf: Arc::new(Shelf::new(config.blanks_per_template)),
            config,
            stopping: AtomicBool::new(false),
            background: Mutex::new(JoinSet::new()),
            actors: Mutex::new(JoinSet::new()),
        });
        let report = recovery::recover(&node).await?;
        {
            let mut background = lock(&node.background);
            background.spawn(sweeper::run(
                node.dependencies.clone(),
                node.registry.clone(),
                node.config.doze_after,
            ));
            background.spawn(blanks::run(node.dependencies.clone(), node.shelf.clone()));
            background.spawn(auditor::run(
                node.dependencies.clone(),
                node.registry.clone(),
                node.shelf.clone(),
            ));
            background.spawn(meter::run(node.dependencies.clone(), node.registry.clone()));
            background.spawn(snapshots::collect(
                node.dependencies.clone(),
                node.registry.clone(),
                node.config.snapshot_retention,
            ));
        }
        Ok((node, report))
    }

    /// Takes no new work from now on and removes what was made ahead of time; sandboxes go on
    /// running.
    pub async fn stop(&self) {
        self.end_background().await;
        blanks::close(&self.dependencies, &self.shelf).await;
    }

    async fn end_background(&self) {
        self.stopping.store(true, Ordering::Release);
        let mut background = std::mem::take(&mut *lock(&self.background));
        background.shutdown().await;
    }

    /// Ends all work where it is and leaves the sandboxes as they are, as a crash would; another
    /// node can then take over the data directory.
    pub async fn abandon(&self) {
        self.end_background().await;
        let mut actors = std::mem::take(&mut *lock(&self.actors));
        actors.shutdown().await;
    }

    /// Removes every sandbox, side by side, within `budget`. For a scratch data directory.
    pub async fn kill_all(self: &Arc<Self>, budget: Duration) {
        let deadline = Deadline::after(tokio::time::Instant::now().into_std(), budget);
        let mut kills = JoinSet::new();
        for view in self.list() {
            let node = Arc::clone(self);
            kills.spawn(async move {
                let killed = node.kill(&view.id, Actor::Operator, deadline).await;
                if let Err(error) = killed
                    && !matches!(error, PlatformError::NotFound(_))
                {
                    tracing::warn!(sandbox = %view.id, error = ?error, "not removed at the stop");
                }
            });
        }
        while kills.join_next().await.is_some() {}
    }

    /// The builds that living sandboxes and snapshots came from; their bytes must stay.
    #[must_use]
    pub fn builds_in_use(&self) -> std::collections::BTreeSet<BuildId> {
        // Snapshots first: a sandbox that is made from one meanwhile is registered by then.
        let snapshots = self.dependencies.snapshots.list();
        let of_snapshots = snapshots.iter().map(|s| s.template.build.clone());
        let of_sandboxes = self.registry.entries();
        let of_sandboxes = of_sandboxes.iter().map(|e| e.view().template.build.clone());
        of_snapshots.chain(of_sandboxes).collect()
    }

    pub(crate) fn dependencies(&self) -> &Arc<Dependencies> {
        &self.dependencies
    }

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    pub(crate) fn shelf(&self) -> &Shelf {
        &self.shelf
    }

    pub(crate) fn config(&self) -> &NodeConfig {
        &self.config
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Registers a sandbox and starts its actor.
    pub(crate) fn start_actor(
        &self,
        record: Record,
        beginning: Beginning,
    ) -> Result<Arc<Entry>, Full> {
        let (sender, mailbox) = mpsc::channel(MAILBOX_MAX);
        let changes = self.registry.changes().clone();
        let entry = Arc::new(Entry::new(&record, sender, changes));
        self.registry
            .insert(entry.clone(), self.config.capacity.sandboxes_max)?;
        let actor = SandboxActor {
            dependencies: self.dependencies.clone(),
            registry: self.registry.clone(),
            entry: entry.clone(),
            record,
            mailbox,
            policy: self.config.capacity,
            guard: Guard::new(self.dependencies.clock.now()),
        };
        let mut actors = lock(&self.actors);
        while actors.try_join_next().is_some() {}
        actors.spawn(actor.run(beginning));
        Ok(entry)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// File work, away from the threads that serve.
pub(crate) async fn blocking(
    step: &'static str,
    work: impl FnOnce() -> std::io::Result<()> + Send + 'static,
) -> Result<(), PlatformError> {
    let done = off_thread(work).await;
    done.map_err(|source| PlatformError::Node {
        step,
        source: source.into(),
    })
}

/// The same with the bare error.
pub(crate) async fn off_thread(
    work: impl FnOnce() -> std::io::Result<()> + Send + 'static,
) -> std::io::Result<()> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(std::io::Error::other)?
}
