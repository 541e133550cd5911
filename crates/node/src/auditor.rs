//! Finds what is on the machine and belongs to no sandbox: the late effect of a call that was given
//! up, an engine that lied about a removal.
//!
//! It removes only what two listings in a row showed and no sandbox claims, so that nothing that is
//! just being made is taken for a left-over. A listing that fails says nothing, and the round is
//! skipped (R-G11).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use sandhold_engine::InstanceId;
use sandhold_types::{Deadline, SandboxId, SandboxState};

use crate::{
    actor::Command,
    blanks::Shelf,
    node::Dependencies,
    registry::{Entry, Registry},
    remove,
};

/// How often the machine is looked over.
const INTERVAL: Duration = Duration::from_secs(30);
/// How long the removal of one left-over may take.
const REMOVAL_BUDGET: Duration = Duration::from_secs(30);

/// What no sandbox claims, in one look or confirmed by two.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Unclaimed {
    instances: BTreeSet<InstanceId>,
    networks: BTreeSet<SandboxId>,
}

impl Unclaimed {
    fn confirmed_by(&self, later: &Self) -> Self {
        Self {
            instances: self
                .instances
                .intersection(&later.instances)
                .cloned()
                .collect(),
            networks: self
                .networks
                .intersection(&later.networks)
                .cloned()
                .collect(),
        }
    }
}

/// Looks once: what is listed and belongs to no living sandbox's present life.
pub(crate) async fn look(
    dependencies: &Dependencies,
    registry: &Registry,
    shelf: &Shelf,
) -> Option<Unclaimed> {
    let instances = dependencies.engine.list().await;
    let networks = dependencies.network.list().await;
    let (Ok(instances), Ok(networks)) = (instances, networks) else {
        tracing::warn!("the machine cannot be looked over; this round is skipped");
        return None;
    };
    // One that sleeps claims neither, but only its actor can tell whether it still sleeps.
    for id in instances.iter().map(|id| &id.sandbox).chain(&networks) {
        let asleep = |entry: &Arc<Entry>| entry.view().state == SandboxState::Paused;
        if let Some(entry) = registry.live(id).filter(asleep) {
            let _ = entry.mailbox.try_send(Command::LeftOvers);
        }
    }
    // Asked after the listings: whatever was registered meanwhile is claimed.
    let claims = |id: &InstanceId| {
        let entry = registry.live(&id.sandbox);
        entry.map_or_else(
            || shelf.claims(&id.sandbox),
            |entry| {
                let view = entry.view();
                // One that is rolled back has two lives, until the new one is proved.
                view.incarnation == id.incarnation || view.state == SandboxState::RollingBack
            },
        )
    };
    Some(Unclaimed {
        instances: instances.into_iter().filter(|id| !claims(id)).collect(),
        networks: networks
            .into_iter()
            .filter(|id| registry.live(id).is_none() && !shelf.claims(id))
            .collect(),
    })
}

/// Removes what both looks showed.
pub(crate) async fn remove_confirmed(
    dependencies: &Dependencies,
    before: &Unclaimed,
    now: &Unclaimed,
) {
    let confirmed = before.confirmed_by(now);
    let deadline = Deadline::after(tokio::time::Instant::now().into_std(), REMOVAL_BUDGET);
    for id in &confirmed.instances {
        tracing::warn!(instance = %id, "an instance that no sandbox claims is removed");
        let instance = dependencies.layout.instance(&id.sandbox, id.incarnation);
        if let Err(error) = dependencies.engine.remove(&instance, deadline).await {
            tracing::warn!(instance = %id, error = ?error, "it could not be removed");
        }
    }
    for id in &confirmed.networks {
        tracing::warn!(sandbox = %id, "a network that no sandbox claims is removed");
        if let Err(error) = dependencies.network.detach(id).await {
            tracing::warn!(sandbox = %id, error = ?error, "it could not be removed");
        }
        if let Err(error) = remove::remove_directory(dependencies, id).await {
            tracing::warn!(sandbox = %id, error = ?error, "its directory could not be removed");
        }
    }
}

/// Looks for ever.
pub(crate) async fn run(
    dependencies: Arc<Dependencies>,
    registry: Arc<Registry>,
    shelf: Arc<Shelf>,
) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut before = Unclaimed::default();
    loop {
        ticks.tick().await;
        let Some(now) = look(&dependencies, &registry, &shelf).await else {
            continue;
        };
        remove_confirmed(&dependencies, &before, &now).await;
        before = now;
    }
}
