//! Finding the sandbox of a request, and having it run by the time that the request is sent.
//!
//! ```text
//!            ┌─ runs ───────────────────────────────┐
//!   find ────┼─ asleep, in transition ─▶ wake ──────┴─▶ hold ─▶ route and hold
//!            └─ gone, or traffic does not wake it ─▶ Failure
//! ```
//!
//! Invariants:
//! - A sandbox is woken only by a request that it would not refuse for a token (R-L7).
//! - Nothing is decided here about waking but who may ask for it; [`Routes`] decides, and wakes once
//!   however many ask.
//!
//! Called by `forward`; it never opens a connection.

use std::{sync::Arc, time::Duration};

use http::Request;
use hyper::body::Incoming;
use sandhold_platform::{
    AutoResume, DialError, Hold, PublicTraffic, Route, RouteLookup, Routes, SandboxView, WakeError,
};
use sandhold_types::{Clock, Deadline, ErrorCode, Retry, SandboxId, SandboxState};
use tokio::time::Instant;

use crate::{
    answers::Failure,
    headers::{self, Presented},
    signature::SignedFile,
    target::AGENT_PORT,
};

/// How often a route is looked up because the sandbox moved on under the request.
pub(crate) const ROUTE_ATTEMPTS_MAX: usize = 3;
/// What a client is told to wait after a wake-up that failed for a reason that does not say more
/// (R-L8).
const WAKE_FAILED_RETRY: Duration = Duration::from_secs(5);
/// The agent's route that everybody may ask.
const HEALTH_PATH: &str = "/health";

/// Where a sandbox is found that a request can reach.
pub(crate) enum Found {
    /// It runs.
    Running(Route),
    /// It sleeps and traffic wakes it, or it is on its way to running or sleep.
    Asleep(Arc<SandboxView>),
}

impl Found {
    pub(crate) fn sandbox(&self) -> &SandboxView {
        match self {
            Self::Running(route) => &route.sandbox,
            Self::Asleep(sandbox) => sandbox,
        }
    }
}

/// Finds sandboxes and has them run.
#[derive(Debug)]
pub(crate) struct Finder {
    pub(crate) routes: Arc<dyn Routes>,
    pub(crate) clock: Arc<dyn Clock>,
    /// How long a request may wait for a sandbox to be woken.
    pub(crate) wake_timeout: Duration,
    /// How many sandboxes' tokens a signed URL is tested against.
    pub(crate) signature_candidates_max: usize,
}

impl Finder {
    /// The sandbox whose token made the signature.
    pub(crate) fn owner_of(&self, file: &SignedFile) -> Result<SandboxId, Failure> {
        if !file.is_well_formed() {
            return Err(Failure::SignatureUnknown);
        }
        if file.is_expired(self.clock.now()) {
            return Err(Failure::SignatureExpired);
        }
        self.routes
            .reachable()
            .into_iter()
            .take(self.signature_candidates_max)
            .find(|sandbox| file.is_signed_by(&sandbox.access_token))
            .map(|sandbox| sandbox.id.clone())
            .ok_or(Failure::SignatureUnknown)
    }

    /// Where a sandbox is.
    pub(crate) fn find(&self, sandbox: &SandboxId) -> Result<Found, Failure> {
        let view = match self.routes.route(sandbox) {
            RouteLookup::Live(route) => return Ok(Found::Running(route)),
            RouteLookup::NotLive(view) => view,
            RouteLookup::Ended(reason) => return Err(Failure::Ended(sandbox.clone(), reason)),
            RouteLookup::Unknown => return Err(Failure::Unknown(sandbox.clone())),
        };
        let comes_to_run = match view.state {
            SandboxState::Paused => view.auto_resume == AutoResume::On,
            // As good as gone: no state leads back from there.
            SandboxState::Killing | SandboxState::Killed | SandboxState::Failed => false,
            SandboxState::Creating
            | SandboxState::Running
            | SandboxState::Pausing
            | SandboxState::Resuming
            | SandboxState::Snapshotting
            | SandboxState::RollingBack => true,
        };
        if comes_to_run {
            Ok(Found::Asleep(view))
        } else {
            Err(Failure::NotLive(sandbox.clone(), view.state))
        }
    }

    /// The sandbox running, woken if need be.
    pub(crate) async fn awake(&self, sandbox: &SandboxId) -> Result<Route, Failure> {
        match self.find(sandbox)? {
            Found::Running(route) => Ok(route),
            Found::Asleep(_) => self.wake(sandbox).await,
        }
    }

    /// Waits until a sandbox that does not run does.
    pub(crate) async fn wake(&self, sandbox: &SandboxId) -> Result<Route, Failure> {
        let now = Instant::now().into_std();
        let deadline = Deadline::after(now, self.wake_timeout);
        let woken = self.routes.wake(sandbox, deadline).await;
        woken.map_err(|error| self.wake_failure(sandbox, error))
    }

    fn wake_failure(&self, sandbox: &SandboxId, error: WakeError) -> Failure {
        let id = sandbox.clone();
        match error {
            WakeError::NotAllowed => Failure::NotLive(id, SandboxState::Paused),
            WakeError::Gone => self.find(sandbox).err().unwrap_or(Failure::Unknown(id)),
            WakeError::Full { waiting_max } => Failure::TooManyWaiting(id, waiting_max),
            WakeError::Late { state } => Failure::Late(id, state),
            WakeError::Failed {
                code,
                message,
                retry,
            } => {
                tracing::debug!(sandbox = %id, message, "not woken");
                let retry_after = match retry {
                    Retry::After(wait) => wait,
                    Retry::Never => WAKE_FAILED_RETRY,
                };
                Failure::WakeFailed(id, code, retry_after)
            }
        }
    }

    /// Keeps the sandbox from dozing off. One that has moved on since the route was looked up is
    /// looked up again.
    pub(crate) async fn hold(&self, mut route: Route) -> Result<(Route, Hold), Failure> {
        if let Some(hold) = self.routes.try_hold(&route) {
            return Ok((route, hold));
        }
        let sandbox = route.sandbox.id.clone();
        for _ in 0..ROUTE_ATTEMPTS_MAX {
            match self.routes.hold(&route).await {
                Ok(hold) => return Ok((route, hold)),
                Err(DialError::Gone) => route = self.awake(&sandbox).await?,
                Err(error) => return Err(dial_failure(&sandbox, error)),
            }
        }
        let code = ErrorCode::EngineFailed;
        Err(Failure::WakeFailed(sandbox, code, WAKE_FAILED_RETRY))
    }

    /// The agent's tokens are the agent's to check; but a sandbox must not be woken by whoever it
    /// would then refuse.
    pub(crate) fn check_may_wake(
        &self,
        sandbox: &SandboxView,
        port: u16,
        request: Request<Incoming>,
    ) -> Result<Request<Incoming>, Failure> {
        let token = &sandbox.access_token;
        let is_free = port != AGENT_PORT || request.uri().path() == HEALTH_PATH;
        if is_free || headers::presents_access_token(request.headers(), token) {
            return Ok(request);
        }
        let (head, body) = request.into_parts();
        let now = self.clock.now();
        let signed = SignedFile::from_request(&head);
        if signed.is_some_and(|file| file.is_signed_by(token) && !file.is_expired(now)) {
            Ok(Request::from_parts(head, body))
        } else {
            Err(Failure::MayNotWake(sandbox.id.clone()))
        }
    }
}

pub(crate) fn check_traffic_token(
    sandbox: &SandboxView,
    port: u16,
    request: &Request<Incoming>,
) -> Result<(), Failure> {
    // The agent has its own token on its own port.
    if sandbox.public_traffic == PublicTraffic::Allowed || port == AGENT_PORT {
        return Ok(());
    }
    match headers::presented_token(request.headers(), sandbox.traffic_token.as_ref()) {
        Presented::Right => Ok(()),
        Presented::Nothing => Err(Failure::TokenMissing(sandbox.id.clone())),
        Presented::Wrong => Err(Failure::TokenWrong(sandbox.id.clone())),
    }
}

pub(crate) fn dial_failure(sandbox: &SandboxId, error: DialError) -> Failure {
    let sandbox = sandbox.clone();
    match error {
        DialError::PortClosed { port } => Failure::PortClosed(sandbox, port),
        DialError::Gone => Failure::Unknown(sandbox),
        DialError::Timeout { port, waited } => Failure::NoAnswer(sandbox, port, waited),
        DialError::Socket(error) => {
            tracing::warn!(%sandbox, %error, "could not open a socket");
            Failure::NoSocket(sandbox)
        }
    }
}
