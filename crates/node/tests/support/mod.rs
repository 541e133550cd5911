//! A node over scripted parts: the engine and the network keep what they are told in memory, the
//! agent answers as it is told.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use sandhold_engine::{Engine, InstanceId, sim::SimEngine};
use sandhold_images::{Build, Builds, Snapshots, WarmImage};
use sandhold_network::sim::SimNetwork;
use sandhold_node::{
    Activity, AgentControl, AgentError, Dependencies, DozeCounts, Faults, Identity, Layout, Node,
    NodeConfig, NodeError,
};
use sandhold_platform::{
    AutoResume, BusyWith, CreateSandbox, DialError, Egress, Owner, PauseKeeps, Platform,
    PlatformError, PublicTraffic, SandboxView,
};
use sandhold_types::{
    BuildId, Clocking, Deadline, Lifetime, ManualClock, Namespace, OnTimeout, Resources, SandboxId,
    SandboxState, SeededEntropy, Timestamp, Token,
};
use tokio::{net::TcpStream, sync::Semaphore};

/// The image that the only template was baked into.
const IMAGE: &str = "/images/base";

/// A template catalogue with one entry.
#[derive(Debug)]
struct OneBuild(Arc<Build>);

impl Builds for OneBuild {
    fn resolve(&self, _namespace: &Namespace, reference: &str) -> Option<Arc<Build>> {
        (reference == "base").then(|| self.0.clone())
    }

    fn build(&self, id: &BuildId) -> Option<Arc<Build>> {
        (*id == self.0.id).then(|| self.0.clone())
    }
}

/// An agent that answers as it is told.
#[derive(Debug, Default)]
pub(crate) struct ScriptedAgent {
    pub(crate) silent: AtomicBool,
    pub(crate) busy: AtomicU64,
    /// How many of the busy ones nobody reads from.
    pub(crate) background: AtomicU64,
    pub(crate) restarts: AtomicU64,
    /// The identities that were given out.
    pub(crate) told: Mutex<Vec<Identity>>,
}

#[async_trait]
impl AgentControl for ScriptedAgent {
    async fn init(
        &self,
        _: &Token,
        identity: &Identity,
        deadline: Deadline,
    ) -> Result<(), AgentError> {
        if self.silent.load(Ordering::Acquire) {
            tokio::time::sleep_until(deadline.instant().into()).await;
            return Err(AgentError::Timeout);
        }
        self.told.lock().unwrap().push(identity.clone());
        Ok(())
    }

    async fn wait_ready(&self, _: &SandboxId, _: &Token, _: Deadline) -> Result<(), AgentError> {
        Ok(())
    }

    async fn activity(
        &self,
        _: &SandboxId,
        _: &Token,
        _: Deadline,
    ) -> Result<Activity, AgentError> {
        if self.silent.load(Ordering::Acquire) {
            return Err(AgentError::Timeout);
        }
        Ok(Activity {
            processes: self.busy.load(Ordering::Acquire),
            background_processes: self.background.load(Ordering::Acquire),
            ..Activity::default()
        })
    }

    async fn quiesce(&self, _: &SandboxId, _: &Token, _: Deadline) -> Result<(), AgentError> {
        Ok(())
    }

    async fn restart(&self, _: &SandboxId, _: &Token, _: Deadline) -> Result<(), AgentError> {
        self.restarts.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    async fn tunnel(
        &self,
        _: &SandboxId,
        _: &Token,
        port: u16,
        _: Deadline,
    ) -> Result<TcpStream, DialError> {
        Err(DialError::PortClosed { port })
    }
}

/// A machine: what stays when a node on it dies.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) engine: SimEngine,
    pub(crate) network: SimNetwork,
    pub(crate) agent: Arc<ScriptedAgent>,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) config: NodeConfig,
    seed: AtomicU64,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
            engine: SimEngine::new().with_image(IMAGE),
            network: SimNetwork::new(),
            agent: Arc::default(),
            clock: Arc::new(ManualClock::new(Timestamp::from_unix_ms(1_000_000))),
            config: NodeConfig {
                blanks_per_template: 0,
                doze_after: None,
                ..NodeConfig::default()
            },
            seed: AtomicU64::new(1),
        }
    }

    /// Starts a node on this machine.
    pub(crate) async fn start(&self) -> Arc<Node> {
        self.try_start().await.unwrap()
    }

    /// The same, when it may be refused.
    pub(crate) async fn try_start(&self) -> Result<Arc<Node>, NodeError> {
        let entropy = Arc::new(SeededEntropy::new(self.seed.fetch_add(1, Ordering::AcqRel)));
        let layout = Layout::open(self.directory.path(), entropy.as_ref()).unwrap();
        let build = Build {
            id: "build1".parse().unwrap(),
            template: "base".parse().unwrap(),
            names: vec!["base".to_owned()],
            owner: None,
            root_fs: "/roots/base".into(),
            command: vec!["/.sandhold/agent".to_owned()],
            environment: Vec::new(),
            resources: Resources {
                memory_mib: 64,
                ..Resources::default()
            },
            warm: Some(WarmImage {
                directory: IMAGE.into(),
                engine: self.engine.identity(),
                control_token: Token::new("baked".to_owned()),
            }),
            built_at: Timestamp::from_unix_ms(0),
            size_bytes: 0,
        };
        let dependencies = Dependencies {
            engine: Arc::new(self.engine.clone()),
            network: Arc::new(self.network.clone()),
            builds: Arc::new(OneBuild(Arc::new(build))),
            snapshots: Arc::new(Snapshots::open(&layout.snapshots()).unwrap()),
            agent: self.agent.clone(),
            clock: self.clock.clone(),
            entropy,
            layout: Arc::new(layout),
            faults: Faults::default(),
            launches: Semaphore::new(4),
            launches_max: 4,
            dozes: DozeCounts::default(),
        };
        let started = Node::start(dependencies, self.config).await;
        started.map(|(node, _)| node)
    }

    /// How often the engine was asked for `operation`.
    #[allow(dead_code, reason = "not every test file counts calls")]
    pub(crate) fn calls(&self, operation: sandhold_engine::sim::Operation) -> usize {
        let calls = self.engine.calls();
        calls
            .iter()
            .filter(|call| call.operation == operation)
            .count()
    }

    /// What is on the machine is exactly what is listed: processes and a network for what runs, an
    /// image and nothing else for what sleeps, nothing at all for the rest.
    #[allow(dead_code, reason = "not every test file recounts")]
    pub(crate) async fn assert_in_order(&self, node: &Node) {
        use sandhold_network::Network;
        use std::collections::BTreeSet;
        let views = node.list();
        let awake: BTreeSet<_> = views
            .iter()
            .filter(|view| view.state == SandboxState::Running)
            .map(|view| InstanceId {
                sandbox: view.id.clone(),
                incarnation: view.incarnation,
            })
            .collect();
        for view in &views {
            assert!(
                !view.state.is_transient(),
                "{} is stuck {}",
                view.id,
                view.state
            );
        }
        let running: BTreeSet<_> = self.engine.running().into_iter().collect();
        assert_eq!(running, awake, "processes");
        let traces: BTreeSet<_> = self.engine.list().await.unwrap().into_iter().collect();
        assert_eq!(traces, awake, "traces of processes");
        let networks: BTreeSet<_> = self.network.list().await.unwrap().into_iter().collect();
        let expected: BTreeSet<_> = awake.iter().map(|id| id.sandbox.clone()).collect();
        assert_eq!(networks, expected, "networks");
        let root = self.directory.path().join("sandboxes");
        let listed: BTreeSet<_> = views.iter().map(|view| view.id.to_string()).collect();
        assert_eq!(names(&root), listed, "directories");
        for view in &views {
            let directory = root.join(view.id.as_str());
            let count = |prefix: &str| {
                let files = names(&directory);
                files.iter().filter(|name| name.starts_with(prefix)).count()
            };
            let asleep = usize::from(view.state == SandboxState::Paused);
            assert_eq!(count("life-"), 1 - asleep, "{}", view.state);
            // Nobody waits for the bytes of an image that is not needed any more.
            eventually("its images are its own", async || count("image-") <= asleep).await;
            assert_eq!(count("image-"), asleep, "{}", view.state);
        }
    }

    /// The directories of snapshots that are there.
    #[allow(dead_code, reason = "not every test file takes snapshots")]
    pub(crate) fn snapshot_names(&self) -> std::collections::BTreeSet<String> {
        names(&self.directory.path().join("snapshots"))
    }

    /// Whether nothing of any sandbox is left.
    pub(crate) async fn is_clean(&self) -> bool {
        use sandhold_network::Network;
        let directories = std::fs::read_dir(self.directory.path().join("sandboxes"));
        self.engine.list().await.unwrap().is_empty()
            && self.network.list().await.unwrap().is_empty()
            && directories.unwrap().next().is_none()
    }
}

fn names(directory: &std::path::Path) -> std::collections::BTreeSet<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// A deadline `seconds` from now.
pub(crate) fn within(seconds: u64) -> Deadline {
    let now = tokio::time::Instant::now().into_std();
    Deadline::after(now, Duration::from_secs(seconds))
}

/// A request for a sandbox with this clock.
pub(crate) fn request(clocking: Clocking) -> CreateSandbox {
    CreateSandbox {
        owner: Owner {
            namespace: "team".parse().unwrap(),
            env: "dev".parse().unwrap(),
            key: "key1".parse().unwrap(),
        },
        request: "request1".parse().unwrap(),
        template: "base".to_owned(),
        lifetime: Lifetime {
            clocking,
            on_timeout: OnTimeout::Kill,
        },
        auto_resume: AutoResume::On,
        busy_with: BusyWith::AnyCommand,
        timeout_keeps: PauseKeeps::Everything,
        metadata: BTreeMap::new(),
        env_vars: BTreeMap::new(),
        egress: Egress::Nothing,
        public_traffic: PublicTraffic::Allowed,
        mask_request_host: None,
        domain: None,
    }
}

/// Never ends by itself.
pub(crate) const FOR_EVER: Clocking = Clocking::Idle { window_ms: None };

/// Makes a sandbox that never ends by itself.
pub(crate) async fn create(node: &Node) -> Result<Arc<SandboxView>, PlatformError> {
    node.create(request(FOR_EVER), within(10)).await
}

/// Waits, on the test's clock, until `condition` holds.
pub(crate) async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    const STEPS_MAX: u32 = 2000;
    for _ in 0..STEPS_MAX {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("never came true: {what}");
}
