//! How a sandbox is made: one path, with a warm image or without.
//!
//! ```text
//!  record (creating) ─▶ network ─▶ launch ─▶ identity ─▶ [ready, if booted] ─▶ record (running)
//! ```
//!
//! Each arrow is a fault point. A failure anywhere leads to [`crate::remove`], which undoes
//! whatever was done.

use std::path::PathBuf;

use sandhold_engine::{EngineError, LaunchSpec, Origin};
use sandhold_images::Build;
use sandhold_platform::PlatformError;
use sandhold_types::{Actor, Deadline, SandboxState, Token};

use crate::{
    agent::{AgentError, Identity},
    blanks::Blank,
    layout::Durability,
    node::Dependencies,
    record::Record,
};

/// The environment variable in which a booted agent finds its first control token.
pub(crate) const CONTROL_TOKEN_VARIABLE: &str = "SANDHOLD_CONTROL_TOKEN";

/// Makes the sandbox that `record` describes from `build`. On success the record says `running`
/// and is on disk; on failure the caller removes what is left.
pub(crate) async fn make(
    dependencies: &Dependencies,
    record: &mut Record,
    build: &Build,
    blank: Option<Blank>,
    deadline: Deadline,
) -> Result<(), PlatformError> {
    dependencies.persist(record, Durability::Process).await?;
    dependencies.faults.reach("create.recorded");
    let from_blank = blank.is_some();
    let namespace = network(dependencies, record, blank).await?;
    dependencies.faults.reach("create.network");
    let (origin, token, warm) = origin(dependencies, build);
    record.tokens.boot = token.clone();
    let spec = LaunchSpec {
        instance: dependencies.layout.instance(&record.id, record.incarnation),
        root_fs: build.root_fs.clone(),
        origin,
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
    introduce(dependencies, record, &token, deadline).await?;
    dependencies.faults.reach("create.introduced");
    if warm == Warm::No {
        let ready = dependencies
            .agent
            .wait_ready(&record.id, &record.tokens.control, deadline)
            .await;
        ready.map_err(|error| unresponsive(&error))?;
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Warm {
    Yes,
    No,
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

/// Restores the warm image if there is one that fits; boots otherwise.
fn origin(dependencies: &Dependencies, build: &Build) -> (Origin, Token, Warm) {
    if let (Some(origin), Some(warm)) = (warm_origin(dependencies, build), &build.warm) {
        return (origin, warm.control_token.clone(), Warm::Yes);
    }
    let token = Token::generate("", dependencies.entropy.as_ref());
    let origin = Origin::Boot {
        command: build.command.clone(),
        environment: boot_environment(build, &token),
    };
    (origin, token, Warm::No)
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
