//! How a sandbox is made: one path, from a snapshot, from a build's warm image, or by a boot.
//!
//! ```text
//!  record (creating) ─▶ network ─▶ launch ─▶ identity ─▶ [ready, if booted] ─▶ record (running)
//! ```
//!
//! Each arrow is a fault point. A failure anywhere leads to [`crate::remove`], which undoes
//! whatever was done.

use std::{path::PathBuf, sync::Arc};

use sandhold_engine::{EngineError, LaunchSpec, Origin};
use sandhold_images::{Build, Lease};
use sandhold_platform::{PauseKeeps, PlatformError, SnapshotKind, TemplateStamp};
use sandhold_types::{Actor, Deadline, Resources, SandboxState, TemplateId, Token};

use crate::{
    agent::{AgentError, Identity},
    blanks::Blank,
    layout::Durability,
    node::Dependencies,
    record::Record,
    snapshotting::line_from,
};

/// The environment variable in which a booted agent finds its first control token.
pub(crate) const CONTROL_TOKEN_VARIABLE: &str = "SANDHOLD_CONTROL_TOKEN";

/// What a sandbox is made from.
#[derive(Debug)]
pub(crate) struct Source {
    /// The build that its root file system is of.
    pub(crate) build: Arc<Build>,
    /// The captured moment that it begins with, if it is to be one of a sandbox.
    pub(crate) snapshot: Option<Lease>,
}

impl Source {
    /// Limits of a sandbox that is made from it.
    pub(crate) fn resources(&self) -> Resources {
        match &self.snapshot {
            Some(lease) => lease.snapshot().resources,
            None => self.build.resources,
        }
    }

    /// The memory that it takes as soon as it is made, in MiB. Of a build's image it is guessed.
    pub(crate) fn resident_mib(&self) -> u64 {
        let bytes_to_mib = |bytes: u64| bytes.div_ceil(1024 * 1024);
        match (&self.snapshot, &self.build.warm) {
            (Some(lease), _) => bytes_to_mib(lease.snapshot().size_bytes),
            (None, Some(_)) => u64::from(self.build.resources.memory_mib) / 8,
            (None, None) => 0,
        }
    }

    /// What a sandbox that is asked for as `reference` says that it was made from. A copy is a sandbox
    /// of its source's template, as if that had been made twice.
    pub(crate) fn stamp(&self, reference: &str) -> TemplateStamp {
        let by_name = |id: &TemplateId| (reference != id.as_str()).then(|| reference.to_owned());
        let (id, build) = match &self.snapshot {
            Some(lease) if lease.snapshot().kind == SnapshotKind::Temporary => {
                return lease.snapshot().template.clone();
            }
            Some(lease) => (
                (&lease.snapshot().id).into(),
                &lease.snapshot().template.build,
            ),
            None => (self.build.template.clone(), &self.build.id),
        };
        TemplateStamp {
            alias: by_name(&id),
            build: build.clone(),
            id,
        }
    }

    /// Whether engine processes that were made for the build's own image are the right ones: an
    /// engine compares limits, and the environment of the first process.
    pub(crate) fn fits_blank(&self) -> bool {
        let Some(lease) = &self.snapshot else {
            return true;
        };
        let snapshot = lease.snapshot();
        let warm = self.build.warm.as_ref();
        snapshot.resources == self.build.resources
            && warm.is_some_and(|warm| warm.control_token == snapshot.boot_token)
    }

    /// Gives the sandbox what it has from where it comes.
    pub(crate) fn hand_down(&self, record: &mut Record) {
        let Some(lease) = &self.snapshot else {
            return;
        };
        let snapshot = lease.snapshot();
        // What the caller names wins over what the processes had.
        let asked = std::mem::take(&mut record.env_vars);
        record.env_vars.clone_from(&snapshot.env_vars);
        record.env_vars.extend(asked);
        match snapshot.kind {
            SnapshotKind::Kept => record.line = line_from(&snapshot.id, &snapshot.ancestors),
            SnapshotKind::Temporary => {
                record.line.clone_from(&snapshot.ancestors);
                record.copy_of = Some(snapshot.id.clone());
            }
        }
    }
}

/// Makes the sandbox that `record` describes from `source`. On success the record says `running`
/// and is on disk; on failure the caller removes what is left.
pub(crate) async fn make(
    dependencies: &Dependencies,
    record: &mut Record,
    source: &Source,
    blank: Option<Blank>,
    deadline: Deadline,
) -> Result<(), PlatformError> {
    dependencies.persist(record, Durability::Process).await?;
    dependencies.faults.reach("create.recorded");
    let from_blank = blank.is_some();
    let namespace = network(dependencies, record, blank).await?;
    dependencies.faults.reach("create.network");
    let start = start(dependencies, source);
    record.tokens.boot = start.boot_token;
    let spec = LaunchSpec {
        instance: dependencies.layout.instance(&record.id, record.incarnation),
        root_fs: source.build.root_fs.clone(),
        origin: start.origin,
        network_namespace: namespace,
        resources: record.resources,
        hostname: record.id.to_string(),
    };
    let launched = launch(dependencies, &spec, from_blank, deadline).await;
    launched.map_err(|source| PlatformError::Engine {
        step: "starting it",
        source: source.into(),
    })?;
    dependencies.faults.reach("create.launched");
    introduce(dependencies, record, &start.control_token, deadline).await?;
    dependencies.faults.reach("create.introduced");
    match start.processes {
        Processes::GoOn => {}
        Processes::Booted => wait_ready(dependencies, record, deadline).await?,
        Processes::StartAnew => start_anew(dependencies, record, deadline).await?,
    }
    let now = dependencies.clock.now();
    let actor = record
        .history
        .first()
        .map_or(Actor::Operator, |event| event.actor.clone());
    record.note(SandboxState::Running, actor, "it answers".to_owned(), now);
    record.last_activity = now;
    dependencies.persist(record, Durability::Synced).await?;
    dependencies.faults.reach("create.running");
    Ok(())
}

/// Starts it. A blank has waited for minutes, and its processes may have died meanwhile; then it
/// is cleared away and the sandbox started as if there had been none. That is one further try, and
/// only for what was prepared: a start from nothing that fails has failed.
async fn launch(
    dependencies: &Dependencies,
    spec: &LaunchSpec,
    from_blank: bool,
    deadline: Deadline,
) -> Result<(), EngineError> {
    let launched = dependencies.engine.launch(spec, deadline).await;
    match launched {
        Err(error) if from_blank && !matches!(error, EngineError::Deadline { .. }) => {
            tracing::warn!(instance = %spec.instance.id, error = ?error, "a blank was of no use");
            dependencies.engine.remove(&spec.instance, deadline).await?;
            dependencies.engine.launch(spec, deadline).await
        }
        other => other,
    }
}

/// The namespace of the sandbox's network: the one that its blank came with, or a new one.
async fn network(
    dependencies: &Dependencies,
    record: &Record,
    blank: Option<Blank>,
) -> Result<PathBuf, PlatformError> {
    if let Some(blank) = blank {
        blank.set_egress(dependencies, &record.egress).await?;
        dependencies.unmark_blank(&record.id).await?;
        return Ok(blank.namespace);
    }
    let attached = dependencies
        .network
        .attach(&record.id, &record.egress)
        .await;
    let attached = attached.map_err(|source| PlatformError::Node {
        step: "building its network",
        source: source.into(),
    })?;
    Ok(attached.namespace)
}

/// What becomes of the processes once a sandbox knows who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Processes {
    /// They were captured and go on.
    GoOn,
    /// They were captured, and only the files are wanted.
    StartAnew,
    /// They are just starting.
    Booted,
}

/// How a sandbox starts.
struct Start {
    origin: Origin,
    /// The control token that its agent expects at first.
    control_token: Token,
    /// The one that its first process was booted with.
    boot_token: Token,
    processes: Processes,
}

/// The build's memory image, if this engine wrote it (BC-092).
pub(crate) fn warm_origin(dependencies: &Dependencies, build: &Build) -> Option<Origin> {
    let warm = build.warm.as_ref()?;
    (warm.engine == dependencies.engine.identity()).then(|| Origin::Image {
        directory: warm.directory.clone(),
        command: build.command.clone(),
        environment: boot_environment(build, &warm.control_token),
    })
}

/// Restores the snapshot, or the build's warm image if there is one that fits; boots otherwise.
fn start(dependencies: &Dependencies, source: &Source) -> Start {
    let build = &source.build;
    if let Some(lease) = &source.snapshot {
        let snapshot = lease.snapshot();
        return Start {
            origin: Origin::Image {
                directory: lease.image(),
                command: build.command.clone(),
                environment: boot_environment(build, &snapshot.boot_token),
            },
            control_token: snapshot.control_token.clone(),
            boot_token: snapshot.boot_token.clone(),
            processes: match snapshot.keeps {
                PauseKeeps::Everything => Processes::GoOn,
                PauseKeeps::Files => Processes::StartAnew,
            },
        };
    }
    if let (Some(origin), Some(warm)) = (warm_origin(dependencies, build), &build.warm) {
        return Start {
            origin,
            control_token: warm.control_token.clone(),
            boot_token: warm.control_token.clone(),
            processes: Processes::GoOn,
        };
    }
    let token = Token::generate("", dependencies.entropy.as_ref());
    Start {
        origin: Origin::Boot {
            command: build.command.clone(),
            environment: boot_environment(build, &token),
        },
        control_token: token.clone(),
        boot_token: token,
        processes: Processes::Booted,
    }
}

async fn wait_ready(
    dependencies: &Dependencies,
    record: &Record,
    deadline: Deadline,
) -> Result<(), PlatformError> {
    let (id, token) = (&record.id, &record.tokens.control);
    let ready = dependencies.agent.wait_ready(id, token, deadline).await;
    ready.map_err(|error| unresponsive(&error))
}

/// Ends every process of a restored sandbox but its agent, and brings the template's up anew.
pub(crate) async fn start_anew(
    dependencies: &Dependencies,
    record: &Record,
    deadline: Deadline,
) -> Result<(), PlatformError> {
    let (id, token) = (&record.id, &record.tokens.control);
    let restarted = dependencies.agent.restart(id, token, deadline).await;
    restarted.map_err(|error| unresponsive(&error))?;
    wait_ready(dependencies, record, deadline).await
}

/// The environment of the first process of a sandbox made from `build`.
pub(crate) fn boot_environment(build: &Build, control_token: &Token) -> Vec<String> {
    let mut environment = build.environment.clone();
    environment.push(format!(
        "{CONTROL_TOKEN_VARIABLE}={}",
        control_token.expose()
    ));
    environment
}

/// Gives the sandbox its own identity (R-T6, architecture decision 5).
pub(crate) async fn introduce(
    dependencies: &Dependencies,
    record: &Record,
    current: &Token,
    deadline: Deadline,
) -> Result<(), PlatformError> {
    let mut entropy = [0u8; 64];
    dependencies.entropy.fill(&mut entropy);
    let identity = Identity {
        sandbox: record.id.clone(),
        template: record.template.id.to_string(),
        access_token: record.tokens.access.clone(),
        control_token: record.tokens.control.clone(),
        env_vars: record.env_vars.clone(),
        now: dependencies.clock.now(),
        entropy,
    };
    let introduced = dependencies.agent.init(current, &identity, deadline).await;
    introduced.map_err(|error| unresponsive(&error))
}

pub(crate) fn unresponsive(error: &AgentError) -> PlatformError {
    let mut detail = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        detail = format!("{detail}: {inner}");
        cause = inner.source();
    }
    PlatformError::GuestUnresponsive { detail }
}
