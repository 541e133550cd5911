//! How a sandbox is made: one path, with a warm image or without.
//!
//! ```text
//!  record (creating) ─▶ network ─▶ launch ─▶ identity ─▶ [ready, if booted] ─▶ record (running)
//! ```
//!
//! Each arrow is a fault point. A failure anywhere leads to [`crate::remove`], which undoes
//! whatever was done.

use sandhold_engine::{LaunchSpec, Origin};
use sandhold_images::Build;
use sandhold_platform::PlatformError;
use sandhold_types::{Actor, Deadline, SandboxState, Token};

use crate::{
    agent::{AgentError, Identity},
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
    deadline: Deadline,
) -> Result<(), PlatformError> {
    dependencies.persist(record, Durability::Process).await?;
    dependencies.faults.reach("create.recorded");
    let network = dependencies
        .network
        .attach(&record.id, &record.egress)
        .await
        .map_err(|source| PlatformError::Node {
            step: "building its network",
            source: source.into(),
        })?;
    dependencies.faults.reach("create.network");
    let (origin, token, warm) = origin(dependencies, build);
    let spec = LaunchSpec {
        instance: dependencies.layout.instance(&record.id, record.incarnation),
        root_fs: build.root_fs.clone(),
        origin,
        network_namespace: network.namespace,
        resources: record.resources,
        hostname: record.id.to_string(),
    };
    dependencies
        .engine
        .launch(&spec, deadline)
        .await
        .map_err(|source| PlatformError::Engine {
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Warm {
    Yes,
    No,
}

/// Restores the warm image if this engine wrote it; boots otherwise (BC-092).
fn origin(dependencies: &Dependencies, build: &Build) -> (Origin, Token, Warm) {
    match &build.warm {
        Some(warm) if warm.engine == dependencies.engine.identity() => {
            let environment = boot_environment(build, &warm.control_token);
            let directory = warm.directory.clone();
            let origin = Origin::Image {
                directory,
                command: build.command.clone(),
                environment,
            };
            (origin, warm.control_token.clone(), Warm::Yes)
        }
        _ => {
            let token = Token::generate("", dependencies.entropy.as_ref());
            let environment = boot_environment(build, &token);
            (
                Origin::Boot {
                    command: build.command.clone(),
                    environment,
                },
                token,
                Warm::No,
            )
        }
    }
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
async fn introduce(
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

fn unresponsive(error: &AgentError) -> PlatformError {
    let mut detail = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        detail = format!("{detail}: {inner}");
        cause = inner.source();
    }
    PlatformError::GuestUnresponsive { detail }
}
