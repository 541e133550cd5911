//! The platform of a deployment: this process's own node, or a service elsewhere and beside it the node
//! for what SDKs make here (R-G16, R-G19).

use sandhold_governor::{Call, CallError, Platform, Reply};
use sandhold_types::{Generation, SandboxId, Timestamp};

use crate::{
    direct::{DirectSandbox, DirectSandboxes},
    guest::{GuestAnswer, GuestRequest, Guests},
    http::HttpPlatform,
    local::LocalPlatform,
};

/// Where the governor makes its sandboxes.
#[derive(Debug)]
pub struct DeployedPlatform {
    here: LocalPlatform,
    elsewhere: Option<HttpPlatform>,
}

/// Who knows the templates that the governor makes sandboxes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TemplatesOf {
    /// This process's catalogue.
    Here,
    /// The service that makes the sandboxes.
    Elsewhere,
}

impl DeployedPlatform {
    /// This node alone.
    #[must_use]
    pub fn here(here: LocalPlatform) -> Self {
        Self {
            here,
            elsewhere: None,
        }
    }

    /// A service elsewhere; `here` only has what SDKs make, and what was made before.
    #[must_use]
    pub fn elsewhere(here: LocalPlatform, elsewhere: HttpPlatform) -> Self {
        Self {
            here,
            elsewhere: Some(elsewhere),
        }
    }

    /// Who knows the templates.
    #[must_use]
    pub fn templates(&self) -> TemplatesOf {
        match self.elsewhere {
            None => TemplatesOf::Here,
            Some(_) => TemplatesOf::Elsewhere,
        }
    }

    /// Who has a sandbox, if not this node.
    fn remote_of(&self, sandbox: &SandboxId) -> Option<&HttpPlatform> {
        let elsewhere = self.elsewhere.as_ref()?;
        (!self.here.has(sandbox)).then_some(elsewhere)
    }

    /// Both have some: each is asked, and one that does not answer makes it no listing at all.
    async fn list(&self, elsewhere: &HttpPlatform) -> Result<Reply, CallError> {
        match (
            elsewhere.call(Call::List).await?,
            self.here.call(Call::List).await?,
        ) {
            (Reply::Listing(mut all), Reply::Listing(here)) => {
                all.extend(here);
                Ok(Reply::Listing(all))
            }
            _ => Err(CallError::NoAnswer),
        }
    }
}

impl Platform for DeployedPlatform {
    async fn call(&self, call: Call) -> Result<Reply, CallError> {
        let Some(elsewhere) = &self.elsewhere else {
            return self.here.call(call).await;
        };
        match &call {
            Call::Create { .. } => elsewhere.call(call).await,
            Call::List => self.list(elsewhere).await,
            Call::FindBySlot(_) => match elsewhere.call(call.clone()).await? {
                Reply::Found(None) => self.here.call(call).await,
                found => Ok(found),
            },
            Call::Ask(sandbox)
            | Call::Kill(sandbox, _)
            | Call::Wake(sandbox, _)
            | Call::Probe(sandbox)
            | Call::WriteFiles(sandbox, ..)
            | Call::Launch(sandbox, ..)
            | Call::ReadArtifacts(sandbox, ..)
            | Call::ReadExit(sandbox, ..)
            | Call::KillProcesses(sandbox, ..) => match self.remote_of(sandbox) {
                Some(elsewhere) => elsewhere.call(call).await,
                None => self.here.call(call).await,
            },
        }
    }
}

impl Guests for DeployedPlatform {
    async fn exchange(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
        request: GuestRequest,
    ) -> Result<GuestAnswer, CallError> {
        match self.remote_of(sandbox) {
            Some(elsewhere) => elsewhere.exchange(sandbox, generation, request).await,
            None => self.here.exchange(sandbox, generation, request).await,
        }
    }

    fn ending(&self, sandbox: &SandboxId) -> Option<String> {
        self.here.ending(sandbox)
    }

    async fn extend(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
    ) -> Result<Option<Timestamp>, CallError> {
        match self.remote_of(sandbox) {
            Some(elsewhere) => elsewhere.extend(sandbox, generation).await,
            None => self.here.extend(sandbox, generation).await,
        }
    }
}

impl DirectSandboxes for DeployedPlatform {
    fn living(&self) -> Vec<DirectSandbox> {
        self.here.living()
    }
}
