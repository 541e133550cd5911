//! This process's own node as the governor's platform (R-G16).
//!
//! Namespace, env, owner and `managed_by` stand in each sandbox's metadata, so that any sandbox tells
//! whose it is without any internal state (R-G2).
//!
//! Invariants: only sandboxes with our `managed_by` are ever listed, so only those can be adopted;
//! a call below the highest generation seen here is refused (R-G8); an error that leaves in doubt
//! whether something was done is "no answer", never "refused".

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use sandhold_governor::{
    Call, CallError, Listed, Platform as GovernorPlatform, Reply,
    colour::Seen,
    ids::{Bucket, OwnerId, SlotId},
};
use sandhold_platform::{
    AutoResume, BusyWith, CreateSandbox, Egress, NewLifetime, Owner, PauseKeeps, Platform,
    PlatformError, PublicTraffic, Resume, RouteLookup, Routes, SandboxView, Waking,
};
use sandhold_types::{
    Actor, Clocking, Deadline, Entropy, Generation, KeyId, Lifetime, OnTimeout, RequestId,
    SandboxId, SandboxState, TemplateId, Timestamp,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    direct::{DirectSandbox, DirectSandboxes},
    fences::Fences,
    guest::{self, GuestAnswer, GuestRequest, Guests},
};

/// The value of `managed_by` of what the governor made.
pub const MANAGED_BY: &str = "sandhold-governor";

/// The agent's port in every sandbox.
const AGENT_PORT: u16 = 49983;

/// What opens the agent's door.
const ACCESS_TOKEN: http::HeaderName = http::HeaderName::from_static("x-access-token");

/// How long one try of the health gate waits.
const PROBE_WAIT: Duration = Duration::from_secs(5);

/// How long each create, delete or look may take; the driver gives up at the same time.
const CALL_BUDGET: Duration = Duration::from_secs(30);

/// The names of the metadata that the governor writes.
#[derive(Debug, Clone, Copy)]
pub struct Metadata;

impl Metadata {
    /// Product or team.
    pub const NAMESPACE: &'static str = "namespace";
    /// Its environment.
    pub const ENV: &'static str = "env";
    /// Whose it is.
    pub const OWNER: &'static str = "owner_id";
    /// Who answers for its end.
    pub const MANAGED_BY: &'static str = "managed_by";
    /// Its slot.
    pub const SLOT: &'static str = "sandhold_slot";
    /// The generation it was made for.
    pub const GENERATION: &'static str = "sandhold_generation";
}

/// The node of this process.
#[derive(Debug)]
pub struct LocalPlatform {
    platform: Arc<dyn Platform>,
    routes: Arc<dyn Routes>,
    entropy: Arc<dyn Entropy>,
    /// The key that stands for the governor in the sandboxes it makes.
    key: KeyId,
    fences: Fences,
}

struct Creation {
    slot: SlotId,
    bucket: Bucket,
    owner: OwnerId,
    generation: Generation,
    template: TemplateId,
}

impl LocalPlatform {
    /// Of this node, in the name of this key.
    #[must_use]
    pub fn new(
        platform: Arc<dyn Platform>,
        routes: Arc<dyn Routes>,
        entropy: Arc<dyn Entropy>,
        key: KeyId,
    ) -> Self {
        Self {
            platform,
            routes,
            entropy,
            key,
            fences: Fences::default(),
        }
    }

    fn actor(&self) -> Actor {
        Actor::Reclaimer
    }

    fn deadline() -> Deadline {
        Deadline::after(Instant::now(), CALL_BUDGET)
    }

    fn pass(&self, sandbox: &SandboxId, generation: Generation) -> Result<(), CallError> {
        let written = || generation_of(self.platform.get(sandbox)?.as_ref());
        self.fences.pass(sandbox, generation, written)
    }

    async fn create(&self, wanted: Creation) -> Result<Reply, CallError> {
        let mut metadata = BTreeMap::new();
        for (name, value) in [
            (Metadata::NAMESPACE, wanted.bucket.namespace.to_string()),
            (Metadata::ENV, wanted.bucket.env.to_string()),
            (Metadata::OWNER, wanted.owner.to_string()),
            (Metadata::MANAGED_BY, MANAGED_BY.to_owned()),
            (Metadata::SLOT, wanted.slot.to_string()),
            (Metadata::GENERATION, wanted.generation.to_string()),
        ] {
            metadata.insert(name.to_owned(), value);
        }
        let request = CreateSandbox {
            owner: Owner {
                namespace: wanted.bucket.namespace,
                env: wanted.bucket.env,
                key: self.key.clone(),
            },
            request: RequestId::generate(self.entropy.as_ref()),
            template: wanted.template.to_string(),
            // Its lease, not a clock of its own, says how long it lives.
            lifetime: Lifetime {
                clocking: Clocking::Idle { window_ms: None },
                on_timeout: OnTimeout::Kill,
            },
            auto_resume: AutoResume::Off,
            busy_with: BusyWith::default(),
            timeout_keeps: PauseKeeps::default(),
            metadata,
            env_vars: BTreeMap::new(),
            egress: Egress::default(),
            public_traffic: PublicTraffic::default(),
            mask_request_host: None,
            domain: None,
        };
        let made = self.platform.create(request, Self::deadline()).await;
        // A create of our own node that fails leaves nothing behind, unless it ran out of time.
        let view = made.map_err(|error| match error {
            PlatformError::Deadline { .. } | PlatformError::Node { .. } => CallError::NoAnswer,
            error => {
                tracing::warn!(%error, slot = %wanted.slot, "a sandbox was not made");
                CallError::Refused
            }
        })?;
        Ok(Reply::Created {
            sandbox: view.id.clone(),
            ends_at: ends_at(&view),
        })
    }

    fn alive(&self, sandbox: &SandboxId) -> Result<Arc<SandboxView>, CallError> {
        let view = self.platform.get(sandbox).ok_or(CallError::NotFound)?;
        if view.ended.is_some() {
            return Err(CallError::NotFound);
        }
        Ok(view)
    }

    /// Whether it is, or was a moment ago, of this node.
    pub(crate) fn has(&self, sandbox: &SandboxId) -> bool {
        self.platform.get(sandbox).is_some()
    }

    fn listing(&self) -> Vec<Listed> {
        let views = self.platform.list();
        // Metadata can be written by anybody who makes a sandbox; whose key made it cannot.
        let ours = views.iter().filter(|view| view.owner.key == self.key);
        ours.filter_map(|view| listed(view)).collect()
    }

    async fn kill(&self, sandbox: &SandboxId, generation: Generation) -> Result<Reply, CallError> {
        self.alive(sandbox)?;
        self.pass(sandbox, generation)?;
        match self
            .platform
            .kill(sandbox, self.actor(), Self::deadline())
            .await
        {
            Ok(()) => {
                self.fences.forget(sandbox);
                Ok(Reply::Done)
            }
            Err(PlatformError::NotFound(_)) => {
                self.fences.forget(sandbox);
                Err(CallError::NotFound)
            }
            Err(PlatformError::Busy { .. } | PlatformError::Conflict { .. }) => {
                Err(CallError::Refused)
            }
            Err(error) => {
                tracing::warn!(%error, %sandbox, "a sandbox was not removed");
                Err(CallError::NoAnswer)
            }
        }
    }

    /// Wakes it if it sleeps; its lease says how long it lives then (R-G16).
    async fn wake(&self, sandbox: &SandboxId, generation: Generation) -> Result<Reply, CallError> {
        let view = self.alive(sandbox)?;
        self.pass(sandbox, generation)?;
        if seen(view.state) == Seen::Running {
            return Ok(Reply::Done);
        }
        let resume = Resume {
            waking: Waking::AsPaused,
            lifetime: NewLifetime::After(None),
            on_timeout: None,
        };
        let woken = self
            .platform
            .resume(sandbox, resume, self.actor(), Self::deadline())
            .await;
        match woken {
            Ok(_) => Ok(Reply::Done),
            Err(PlatformError::NotFound(_)) => Err(CallError::NotFound),
            Err(PlatformError::AlreadySo { state, .. }) if seen(state) == Seen::Running => {
                Ok(Reply::Done)
            }
            Err(
                PlatformError::AlreadySo { .. }
                | PlatformError::Busy { .. }
                | PlatformError::Conflict { .. }
                | PlatformError::Capacity { .. }
                | PlatformError::NotSupported(_),
            ) => Err(CallError::Refused),
            Err(error) => {
                tracing::warn!(%error, %sandbox, "a sandbox was not woken");
                Err(CallError::NoAnswer)
            }
        }
    }

    /// One try of the health gate: its agent says that it is well (R-G9).
    async fn probe(&self, sandbox: &SandboxId) -> Result<Reply, CallError> {
        self.alive(sandbox)?;
        let RouteLookup::Live(route) = self.routes.route(sandbox) else {
            return Err(CallError::Refused);
        };
        let deadline = Deadline::after(Instant::now(), PROBE_WAIT);
        let ask = async {
            // Its processes may be frozen for want of use.
            let _awake = self.routes.hold(&route).await.ok()?;
            let mut agent = self.routes.dial(&route, AGENT_PORT, deadline).await.ok()?;
            let request = b"GET /health HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n\r\n";
            agent.write_all(request).await.ok()?;
            let mut status = [0; 12];
            agent.read_exact(&mut status).await.ok()?;
            (&status[..10] == b"HTTP/1.1 2").then_some(())
        };
        match tokio::time::timeout(PROBE_WAIT, ask).await {
            Ok(Some(())) => Ok(Reply::Done),
            _ => Err(CallError::NoAnswer),
        }
    }
}

fn seen(state: SandboxState) -> Seen {
    match state {
        SandboxState::Running => Seen::Running,
        SandboxState::Paused => Seen::Paused,
        _ => Seen::Unknown,
    }
}

fn generation_of(view: &SandboxView) -> Option<Generation> {
    let text = view.metadata.get(Metadata::GENERATION)?;
    text.parse().ok().map(Generation)
}

fn bucket_of(view: &SandboxView) -> Bucket {
    Bucket {
        namespace: view.owner.namespace.clone(),
        env: view.owner.env.clone(),
    }
}

/// When its life ends; a lifetime that ends in a pause ends no life.
#[must_use]
pub fn ends_at(view: &SandboxView) -> Timestamp {
    match view.lifetime.on_timeout {
        OnTimeout::Kill => view.end_at(),
        OnTimeout::Pause => Timestamp::FAR_FUTURE,
    }
}

/// The sandbox as the governor knows it; `None` if it is not the governor's.
fn listed(view: &SandboxView) -> Option<Listed> {
    let of = |name: &str| view.metadata.get(name);
    if of(Metadata::MANAGED_BY).map(String::as_str) != Some(MANAGED_BY) {
        return None;
    }
    Some(Listed {
        sandbox: view.id.clone(),
        slot: of(Metadata::SLOT)?.parse().ok()?,
        // Not from the metadata: this is what its node was told when it was made.
        bucket: bucket_of(view),
        owner: of(Metadata::OWNER)?.parse().ok()?,
        seen: seen(view.state),
        ends_at: ends_at(view),
        generation: generation_of(view).unwrap_or(Generation(0)),
    })
}

impl Guests for LocalPlatform {
    async fn exchange(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
        mut request: GuestRequest,
    ) -> Result<GuestAnswer, CallError> {
        self.alive(sandbox)?;
        self.pass(sandbox, generation)?;
        let route = match self.routes.route(sandbox) {
            RouteLookup::Live(route) => route,
            _ => {
                self.wake(sandbox, generation).await?;
                let RouteLookup::Live(route) = self.routes.route(sandbox) else {
                    return Err(CallError::Refused);
                };
                route
            }
        };
        // Its processes may be frozen for want of use.
        let _awake = self
            .routes
            .hold(&route)
            .await
            .map_err(|_| CallError::NoAnswer)?;
        let stream = self
            .routes
            .dial(&route, AGENT_PORT, Self::deadline())
            .await
            .map_err(|_| CallError::NoAnswer)?;
        let token = route.sandbox.access_token.expose().to_owned();
        request.headers.push((ACCESS_TOKEN, token));
        guest::send(stream, "sandbox", request).await
    }

    fn ending(&self, sandbox: &SandboxId) -> Option<String> {
        let ended = self.platform.get(sandbox)?.ended.clone()?;
        Some(ended.reason.to_string())
    }
}

impl DirectSandboxes for LocalPlatform {
    fn living(&self) -> Vec<DirectSandbox> {
        let views = self.platform.list();
        let direct = views.iter().filter(|view| view.owner.key != self.key);
        direct
            // One that is being made has not been answered; whoever makes it binds it.
            .filter(|view| view.state != SandboxState::Creating)
            .map(|view| DirectSandbox {
                sandbox: view.id.clone(),
                bucket: bucket_of(view),
                ends_at: ends_at(view),
            })
            .collect()
    }
}

impl GovernorPlatform for LocalPlatform {
    async fn call(&self, call: Call) -> Result<Reply, CallError> {
        match call {
            Call::Create {
                slot,
                bucket,
                owner,
                generation,
                template,
            } => {
                let wanted = Creation {
                    slot,
                    bucket,
                    owner,
                    generation,
                    template,
                };
                self.create(wanted).await
            }
            Call::FindBySlot(slot) => {
                let found = self
                    .listing()
                    .into_iter()
                    .find(|listed| listed.slot == slot);
                Ok(Reply::Found(found))
            }
            Call::List => Ok(Reply::Listing(self.listing())),
            Call::Ask(sandbox) => Ok(Reply::State(seen(self.alive(&sandbox)?.state))),
            Call::Kill(sandbox, generation) => self.kill(&sandbox, generation).await,
            Call::Wake(sandbox, generation) => self.wake(&sandbox, generation).await,
            Call::Probe(sandbox) => self.probe(&sandbox).await,
            Call::WriteFiles(..)
            | Call::Launch(..)
            | Call::ReadArtifacts(..)
            | Call::ReadExit(..)
            | Call::KillProcesses(..) => Err(CallError::Refused),
        }
    }
}
