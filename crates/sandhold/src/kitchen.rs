//! The engines and the network that the builds of one catalogue run on.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use async_trait::async_trait;
use sandhold_engine::gvisor::{GvisorConfig, GvisorEngine, RootWrites};
use sandhold_images::{INSTANCES, Kitchen, Kitchens, Oven};
use sandhold_network::LinuxNetwork;
use sandhold_types::Entropy;

use crate::settings;

/// An open kitchen. What it leaves empty goes with it.
#[derive(Debug)]
pub(crate) struct LinuxKitchen {
    engine: GvisorEngine,
    step_engine: GvisorEngine,
    network: LinuxNetwork,
    instances: PathBuf,
    tag: String,
    entropy: Arc<dyn Entropy>,
    ready_budget: Duration,
}

impl Drop for LinuxKitchen {
    fn drop(&mut self) {
        settings::remove_empty_state(&self.tag);
    }
}

impl LinuxKitchen {
    /// Opens it under a tag that is made from the catalogue's place, so that the next builder finds
    /// what this one may leave, and nobody else touches it. The caller has the building lock.
    ///
    /// # Errors
    /// What the machine lacks.
    pub(crate) async fn open(
        catalogue: &Path,
        entropy: Arc<dyn Entropy>,
        ready_budget: Duration,
    ) -> anyhow::Result<Self> {
        let tag = kitchen_tag(catalogue)?;
        let runsc = settings::find_runsc().context(
            "there is no 'runsc' on the path; run `scripts/setup` or set SANDHOLD_RUNSC",
        )?;
        let config = |root_writes| GvisorConfig {
            runsc: runsc.clone(),
            node_tag: tag.clone(),
            state_root: settings::state_root(&tag),
            root_writes,
        };
        Ok(Self {
            engine: GvisorEngine::new(config(RootWrites::Layer)).await?,
            step_engine: GvisorEngine::new(config(RootWrites::Root)).await?,
            network: LinuxNetwork::new(&tag).await?,
            instances: catalogue.join(INSTANCES),
            tag,
            entropy,
            ready_budget,
        })
    }
}

impl Kitchen for LinuxKitchen {
    fn oven(&self) -> Oven<'_> {
        Oven {
            engine: &self.engine,
            step_engine: &self.step_engine,
            network: &self.network,
            entropy: &*self.entropy,
            instances: &self.instances,
            ready_budget: self.ready_budget,
        }
    }
}

/// Opens kitchens for a server.
#[derive(Debug)]
pub(crate) struct LinuxKitchens {
    /// Draws identifiers and tokens.
    pub(crate) entropy: Arc<dyn Entropy>,
    /// How long a sandbox may take until it is ready.
    pub(crate) ready_budget: Duration,
}

#[async_trait]
impl Kitchens for LinuxKitchens {
    async fn open(
        &self,
        catalogue: &Path,
    ) -> Result<Box<dyn Kitchen>, Box<dyn std::error::Error + Send + Sync>> {
        let entropy = Arc::clone(&self.entropy);
        let opened = LinuxKitchen::open(catalogue, entropy, self.ready_budget).await;
        Ok(Box::new(opened?))
    }
}

/// `b` and five hexadecimal digits.
fn kitchen_tag(catalogue: &Path) -> anyhow::Result<String> {
    let place = catalogue
        .canonicalize()
        .with_context(|| format!("could not find {}", catalogue.display()))?;
    // The same in every run: this hasher has no random state.
    let mut hasher = DefaultHasher::new();
    place.hash(&mut hasher);
    Ok(format!("b{:05x}", hasher.finish() & 0xf_ffff))
}

/// The guest agent that templates are built with: `given`, or the one beside this program.
///
/// # Errors
/// It is not there.
pub(crate) fn find_agent(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => std::env::current_exe()
            .context("could not find out where this program lies")?
            .with_file_name("sandhold-agent"),
    };
    if !path.is_file() {
        bail!(
            "there is no guest agent at {}; build it with `scripts/build-agent`, or name it with --agent",
            path.display()
        );
    }
    Ok(path)
}

/// The agent for builds over the API; none, with a warning, if none was named and none is there.
///
/// # Errors
/// The one that was named is not there.
pub(crate) fn find_agent_for_builds(given: Option<&Path>) -> anyhow::Result<Option<PathBuf>> {
    match (find_agent(given), given) {
        (Ok(agent), _) => Ok(Some(agent)),
        (Err(error), Some(_)) => Err(error),
        (Err(error), None) => {
            tracing::warn!(%error, "templates cannot be built over the API");
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_catalogue_has_the_same_kitchen_in_every_run() {
        let folder = tempfile::tempdir().unwrap();
        let tag = kitchen_tag(folder.path()).unwrap();
        assert_eq!(kitchen_tag(&folder.path().join(".")).unwrap(), tag);
        assert_eq!(tag.len(), 6);
        let other = tempfile::tempdir().unwrap();
        assert_ne!(kitchen_tag(other.path()).unwrap(), tag);
        assert!(kitchen_tag(&folder.path().join("nowhere")).is_err());
    }

    #[test]
    fn a_missing_agent_is_told_with_the_way_to_mend_it() {
        let error = find_agent(Some(Path::new("/no/agent")))
            .unwrap_err()
            .to_string();
        assert!(error.contains("scripts/build-agent"), "{error}");
    }
}
