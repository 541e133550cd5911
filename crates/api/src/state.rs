//! What every route is given.

use std::sync::Arc;

use sandhold_governor_driver::{DeployedPlatform, Governor};
use sandhold_platform::{Platform, TemplateBuilds, Templates, TimeTravel};
use sandhold_store::{SecretBytes, Store, StoreError};
use sandhold_types::{Clock, Entropy};
use tokio::sync::Semaphore;

use crate::{Settings, gate::CreateGate, links::LinkKey, page::PageKey};

/// What the API is built from.
#[derive(Debug)]
pub struct ApiParts {
    /// Sandboxes.
    pub platform: Arc<dyn Platform>,
    /// Snapshots of them.
    pub travel: Arc<dyn TimeTravel>,
    /// Templates.
    pub templates: Arc<dyn Templates>,
    /// Building templates; without it they are built by other means.
    pub builds: Option<Arc<dyn TemplateBuilds>>,
    /// Keys and idempotency records.
    pub store: Arc<dyn Store>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Randomness.
    pub entropy: Arc<dyn Entropy>,
    /// Who may have how many sandboxes; none admits everybody.
    pub governor: Option<Governor<DeployedPlatform>>,
    /// Settings.
    pub settings: Settings,
}

/// What every route is given. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ApiState {
    pub(crate) platform: Arc<dyn Platform>,
    pub(crate) travel: Arc<dyn TimeTravel>,
    pub(crate) templates: Arc<dyn Templates>,
    pub(crate) builds: Option<Arc<dyn TemplateBuilds>>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) governor: Option<Governor<DeployedPlatform>>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) gate: Arc<CreateGate>,
    pub(crate) page_key: PageKey,
    pub(crate) link_key: LinkKey,
    /// Places for those who read the events of runs.
    pub(crate) event_readers: Arc<Semaphore>,
}

impl ApiState {
    /// Takes the parts and gets what the store keeps for the API: the key that page tokens and
    /// links are signed with, which is the same in every process on the store.
    ///
    /// # Errors
    /// The store failed.
    pub async fn open(parts: ApiParts) -> Result<Self, StoreError> {
        let mut candidate = [0; 32];
        parts.entropy.fill(&mut candidate);
        let key = parts
            .store
            .secret("page-tokens", SecretBytes(candidate))
            .await?;
        let limits = &parts.settings.limits;
        let gate = CreateGate::new(
            limits.creates_running_per_tenant_max,
            limits.creates_waiting_per_tenant_max,
        );
        let event_readers = Arc::new(Semaphore::new(limits.event_readers_max));
        Ok(Self {
            event_readers,
            platform: parts.platform,
            travel: parts.travel,
            templates: parts.templates,
            builds: parts.builds,
            store: parts.store,
            clock: parts.clock,
            entropy: parts.entropy,
            governor: parts.governor,
            settings: Arc::new(parts.settings),
            gate: Arc::new(gate),
            page_key: PageKey::new(key.0),
            link_key: LinkKey::derived_from(key.0),
        })
    }
}
