//! A small world for tests of the engine: a node's network and engine with a tag of their own, a
//! root file system with nothing but the test guest, and a recount of all that could be left.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use sandhold_engine::{
    Engine, InstanceId, InstanceRef, LaunchSpec, Origin,
    gvisor::{GvisorConfig, GvisorEngine, RootWrites},
};
use sandhold_network::{LinuxNetwork, Network};
use sandhold_platform::Egress;
use sandhold_types::{Deadline, Entropy, Incarnation, Resources, SandboxId, SystemEntropy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub(crate) const PORT: u16 = 49983;
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn soon() -> Deadline {
    Deadline::after(Instant::now(), PATIENCE)
}

pub(crate) const PLAN: Resources = Resources {
    cpu_milli: 2000,
    memory_mib: 256,
    disk_mib: 64,
    pids_max: 256,
};

pub(crate) struct World {
    pub(crate) tag: String,
    pub(crate) directory: tempfile::TempDir,
    pub(crate) network: LinuxNetwork,
    pub(crate) engine: GvisorEngine,
}

/// A sandbox of the tests.
pub(crate) struct Box {
    pub(crate) id: SandboxId,
    pub(crate) instance: InstanceRef,
    pub(crate) namespace: PathBuf,
}

impl World {
    pub(crate) async fn new() -> Self {
        let mut random = [0; 6];
        SystemEntropy.fill(&mut random);
        let tag: String = random.iter().map(|b| char::from(b'a' + b % 26)).collect();
        let directory = tempfile::tempdir().unwrap();
        make_root(&directory.path().join("root"));
        Self {
            network: LinuxNetwork::new(&tag).await.unwrap(),
            engine: engine(&tag).await,
            tag,
            directory,
        }
    }

    /// An engine as another process of the same node would have it.
    pub(crate) async fn another_engine(&self) -> GvisorEngine {
        engine(&self.tag).await
    }

    pub(crate) async fn attach(&self, egress: &Egress) -> Box {
        let id = SandboxId::generate(&SystemEntropy);
        let namespace = self.network.attach(&id, egress).await.unwrap().namespace;
        self.box_of(id, namespace, 1)
    }

    pub(crate) fn box_of(&self, id: SandboxId, namespace: PathBuf, incarnation: u64) -> Box {
        let instance = InstanceId {
            sandbox: id.clone(),
            incarnation: Incarnation(incarnation),
        };
        let directory = self.directory.path().join(instance.to_string());
        fs::create_dir_all(&directory).unwrap();
        Box {
            id,
            instance: InstanceRef {
                id: instance,
                directory,
            },
            namespace,
        }
    }

    pub(crate) fn spec(&self, of: &Box, image: Option<&Path>) -> LaunchSpec {
        let command = vec!["/bin/guest".to_owned()];
        let environment = vec!["PATH=/bin".to_owned()];
        LaunchSpec {
            instance: of.instance.clone(),
            root_fs: self.directory.path().join("root"),
            origin: match image {
                None => Origin::Boot {
                    command,
                    environment,
                },
                Some(directory) => Origin::Image {
                    directory: directory.to_owned(),
                    command,
                    environment,
                },
            },
            network_namespace: of.namespace.clone(),
            resources: PLAN,
            hostname: "test-guest".to_owned(),
        }
    }

    /// Attaches, boots and waits until it answers.
    pub(crate) async fn boot(&self, resources: Resources, egress: &Egress) -> Box {
        let made = self.attach(egress).await;
        let mut spec = self.spec(&made, None);
        spec.resources = resources;
        self.engine.launch(&spec, soon()).await.unwrap();
        self.answers(&made).await;
        made
    }

    pub(crate) async fn restore(&self, image: &Path) -> Box {
        let made = self.attach(&Egress::Nothing).await;
        let spec = self.spec(&made, Some(image));
        self.engine.launch(&spec, soon()).await.unwrap();
        self.answers(&made).await;
        made
    }

    pub(crate) async fn try_ask(&self, of: &Box, line: &str) -> Result<String, String> {
        let dialled = self.network.dial(&of.id, PORT, soon()).await;
        let mut stream = dialled.map_err(|e| e.to_string())?;
        let talk = async {
            stream.write_all(format!("{line}\n").as_bytes()).await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            Ok::<_, std::io::Error>(answer)
        };
        let talked = tokio::time::timeout(PATIENCE, talk).await;
        talked
            .map_err(|e| e.to_string())?
            .map_err(|e| e.to_string())
    }

    pub(crate) async fn ask(&self, of: &Box, line: &str) -> String {
        self.try_ask(of, line).await.unwrap()
    }

    /// Waits until the guest answers.
    pub(crate) async fn answers(&self, of: &Box) {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.try_ask(of, "ping").await {
                Ok(answer) if answer == "pong" => return,
                other => assert!(Instant::now() < end, "no answer: {other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) async fn remove(&self, of: &Box) {
        self.engine.remove(&of.instance, soon()).await.unwrap();
        self.network.detach(&of.id).await.unwrap();
        assert_eq!(fs::read_dir(&of.instance.directory).unwrap().count(), 0);
    }

    /// Everything on the machine that carries this world's tag.
    pub(crate) async fn recount(&self) -> BTreeSet<String> {
        recount(&self.tag)
    }

    /// Ends the world: nothing of it may be left on the machine.
    pub(crate) async fn end(self) {
        assert_eq!(self.engine.list().await.unwrap(), []);
        assert_eq!(self.network.list().await.unwrap(), []);
        let state = PathBuf::from(format!("/run/sandhold/{}", self.tag));
        assert_eq!(self.recount().await, BTreeSet::new());
        drop(self.engine);
        fs::remove_dir_all(&state).unwrap();
        let _ = fs::remove_dir("/run/sandhold");
    }
}

async fn engine(tag: &str) -> GvisorEngine {
    let config = GvisorConfig {
        runsc: "/usr/bin/runsc".into(),
        node_tag: tag.to_owned(),
        state_root: format!("/run/sandhold/{tag}").into(),
        root_writes: RootWrites::Layer,
    };
    GvisorEngine::new(config).await.unwrap()
}

/// Processes, groups, mounts, namespaces, interfaces, rules and state files of a node.
pub(crate) fn recount(tag: &str) -> BTreeSet<String> {
    let mut left = BTreeSet::new();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains(&format!("/run/sandhold/{tag}")) {
            left.insert(format!("process {line}"));
        }
    }
    for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        let group = hierarchy.path().join(format!("sandhold-{tag}"));
        if group.exists() {
            left.insert(format!("group {}", group.display()));
        }
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    left.extend(
        mounts
            .lines()
            .filter(|l| l.contains(tag))
            .map(|l| format!("mount {l}")),
    );
    for link in fs::read_dir("/sys/class/net").unwrap().flatten() {
        if link
            .file_name()
            .to_string_lossy()
            .starts_with(&format!("sh{tag}"))
        {
            left.insert(format!("interface {:?}", link.file_name()));
        }
    }
    let rules = Command::new("nft")
        .args(["list", "tables"])
        .output()
        .unwrap();
    let rules = String::from_utf8_lossy(&rules.stdout).into_owned();
    left.extend(
        rules
            .lines()
            .filter(|l| l.contains(tag))
            .map(|l| format!("table {l}")),
    );
    let state = Path::new("/run/sandhold").join(tag);
    for directory in [state.join("runsc"), state.join("net")] {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            left.insert(format!("file {}", entry.path().display()));
        }
    }
    left
}

fn make_root(root: &Path) {
    for directory in ["bin", "dev", "etc", "proc", "sys", "tmp", "root"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    // Not empty, so that the engine leaves it on the disk.
    fs::write(root.join("tmp/.keep"), "").unwrap();
    fs::copy(guest_program(), root.join("bin/guest")).unwrap();
}

/// Compiles the guest, once per build directory.
fn guest_program() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guest/agent.rs");
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("sandhold-test-guest");
    let lock = fs::File::create(program.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let newer = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    if newer(&program) > newer(&source) {
        return program;
    }
    let draft = program.with_extension("new");
    let compiled = Command::new("rustc")
        .args(["--edition=2024", "-Copt-level=1", "-Cstrip=symbols"])
        .args(["-Ctarget-feature=+crt-static", "--crate-name=guest"])
        .arg(format!(
            "--target={}-unknown-linux-gnu",
            std::env::consts::ARCH
        ))
        .arg("-o")
        .arg(&draft)
        .arg(&source)
        .status()
        .unwrap();
    assert!(compiled.success());
    fs::rename(&draft, &program).unwrap();
    program
}
