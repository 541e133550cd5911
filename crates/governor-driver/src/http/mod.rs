//! Any E2B-compatible service as the governor's platform (R-G16).
//!
//! ```text
//!   Create  POST /v2/sandboxes          Kill   DELETE /sandboxes/{id}
//!   List    GET  /v2/sandboxes, paged   Wake   POST   /v2/sandboxes/{id}/connect
//!   Ask     GET  /sandboxes/{id}        agent  by host name, or by the two routing headers
//! ```
//!
//! Such a service knows nothing of leases: a sandbox's life there is a clock, which is moved whenever its
//! holder is heard. It may refuse to delete what is paused, leave some out of its listings, and not
//! answer: each is told as what it is, and the rules know what to do.
//!
//! Invariants: only what carries our `managed_by` is ever listed; a lower generation than this process
//! has seen is refused (R-G8; the service itself cannot); an answer that leaves in doubt what was done
//! is "no answer".

mod answers;
mod transport;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use hyper::body::Incoming;
use sandhold_governor::{Call, CallError, Platform, Reply, colour::Seen};
use sandhold_types::{Generation, SandboxId, Timestamp};
use serde_json::{Value, json};

pub use self::transport::TrustError;
use self::{
    answers::{SandboxAnswer, metadata_filter, refusal},
    transport::{Scheme, Transport, transport, untrusted},
};
use crate::{
    fences::Fences,
    guest::{self, GuestAnswer, GuestRequest, Guests, Reading},
    local::{MANAGED_BY, Metadata},
};

/// The largest answer of the service.
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The most pages of one listing, of a hundred sandboxes each. A longer one is no evidence.
const PAGES_MAX: usize = 1_000;
/// How many sandboxes are asked for in one page.
const PAGE_SIZE: usize = 100;
/// How long it is waited at the start to see whether its certificate is trusted.
const CHECK_WAIT: Duration = Duration::from_secs(10);
/// The agent's port in every sandbox.
const AGENT_PORT: u16 = 49983;

static NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");
static API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Where the service is.
#[derive(Debug, Clone)]
pub struct HttpPlatformSettings {
    /// `http://host:port` or `https://host:port`. Its sandboxes are reached in the same way.
    pub url: String,
    /// The file with the authorities that its certificate is checked by; this machine's without one.
    pub authority: Option<PathBuf>,
    /// Its key.
    pub api_key: String,
    /// The domain under which its sandboxes are reachable as `<port>-<id>.<domain>`. Without one they
    /// are reached at the URL itself, by the two routing headers.
    pub domain: Option<String>,
    /// How long a sandbox lives there after its holder was last heard.
    pub life: Duration,
}

/// Why the service cannot be used at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpPlatformError {
    /// The address means nothing.
    #[error("'{0}' is not http://host:port or https://host:port")]
    Address(String),
    /// The key holds characters that no header can.
    #[error("the key of the platform holds characters that no key has")]
    Key,
    /// Its certificates cannot be checked.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// Its certificate is not trusted.
    #[error("the certificate of the platform is not trusted: {0}")]
    Certificate(String),
}

/// An E2B-compatible service.
#[derive(Debug)]
pub struct HttpPlatform {
    client: Transport,
    scheme: Scheme,
    base: String,
    key: HeaderValue,
    domain: Option<String>,
    life: Duration,
    fences: Fences,
    /// What opens the agents' doors.
    tokens: Mutex<HashMap<SandboxId, String>>,
}

/// An answer of the service.
struct Answer {
    status: StatusCode,
    next: Option<String>,
    body: Value,
}

impl Answer {
    fn sandbox(&self) -> Result<SandboxAnswer, CallError> {
        serde_json::from_value(self.body.clone()).map_err(|_| CallError::NoAnswer)
    }
}

fn scheme_of(base: &str) -> Option<Scheme> {
    let uri: Uri = base.parse().ok()?;
    let is_bare = uri.host().is_some() && uri.path() == "/";
    match uri.scheme_str() {
        Some("http") if is_bare => Some(Scheme::Plain),
        Some("https") if is_bare => Some(Scheme::Tls),
        _ => None,
    }
}

impl HttpPlatform {
    /// The service of these settings. Nothing is sent yet.
    ///
    /// # Errors
    /// They mean nothing.
    pub fn new(settings: HttpPlatformSettings) -> Result<Self, HttpPlatformError> {
        let base = settings.url.trim_end_matches('/').to_owned();
        let Some(scheme) = scheme_of(&base) else {
            return Err(HttpPlatformError::Address(base));
        };
        let mut key =
            HeaderValue::from_str(&settings.api_key).map_err(|_| HttpPlatformError::Key)?;
        key.set_sensitive(true);
        Ok(Self {
            client: transport(scheme, settings.authority.as_deref())?,
            scheme,
            base,
            key,
            domain: settings.domain,
            life: settings.life,
            fences: Fences::default(),
            tokens: Mutex::default(),
        })
    }

    fn tokens(&self) -> MutexGuard<'_, HashMap<SandboxId, String>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn life_s(&self) -> u64 {
        self.life.as_secs().max(1)
    }

    /// One request. What comes back after it was sent and is no answer leaves in doubt what was done.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer, CallError> {
        let body = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(&API_KEY, self.key.clone())
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|_| CallError::Refused)?;
        let response = self.send(request).await?;
        let (head, body) = response.into_parts();
        let reading = Reading::Whole {
            bytes_max: ANSWER_BYTES_MAX,
        };
        let bytes = guest::read(body, reading).await?;
        let next = head.headers.get(&NEXT_TOKEN);
        let next = next.and_then(|token| token.to_str().ok());
        Ok(Answer {
            status: head.status,
            next: next
                .filter(|token| !token.is_empty())
                .map(ToOwned::to_owned),
            body: serde_json::from_slice(&bytes).unwrap_or(Value::Null),
        })
    }

    /// Nothing is sent to whoever is not trusted.
    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, CallError> {
        let path = request.uri().path().to_owned();
        self.client.request(request).await.map_err(|error| {
            if let Some(why) = untrusted(&error) {
                tracing::error!(why, "the certificate of the platform is not trusted");
                return CallError::Refused;
            }
            tracing::debug!(%error, path, "the platform does not answer");
            CallError::NoAnswer
        })
    }

    /// Whether the service's certificate is trusted. One that does not answer may do so later.
    ///
    /// # Errors
    /// It is not.
    pub async fn check(&self) -> Result<(), HttpPlatformError> {
        let request = Request::builder()
            .uri(format!("{}/health", self.base))
            .body(Full::default())
            .map_err(|_| HttpPlatformError::Address(self.base.clone()))?;
        let asked = self.client.request(request);
        match tokio::time::timeout(CHECK_WAIT, asked).await {
            Ok(Err(error)) => {
                if let Some(why) = untrusted(&error) {
                    return Err(HttpPlatformError::Certificate(why));
                }
                tracing::warn!(%error, "the platform does not answer");
            }
            Ok(Ok(_)) => {}
            Err(_) => tracing::warn!("the platform does not answer"),
        }
        Ok(())
    }

    /// The same, where anything but a success is an error.
    async fn done(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer, CallError> {
        let answer = self.ask(method, path, body).await?;
        if answer.status.is_success() {
            return Ok(answer);
        }
        tracing::debug!(status = %answer.status, body = %answer.body, path, "the platform refused");
        Err(refusal(answer.status))
    }

    async fn look(&self, sandbox: &SandboxId) -> Result<SandboxAnswer, CallError> {
        let path = format!("/sandboxes/{sandbox}");
        self.done(Method::GET, &path, None).await?.sandbox()
    }

    async fn create(&self, call: Call) -> Result<Reply, CallError> {
        let Call::Create {
            slot,
            bucket,
            owner,
            generation,
            template,
        } = call
        else {
            return Err(CallError::Refused);
        };
        let body = json!({
            "templateID": template.as_str(),
            "timeout": self.life_s(),
            "metadata": {
                Metadata::NAMESPACE: bucket.namespace.as_str(),
                Metadata::ENV: bucket.env.as_str(),
                Metadata::OWNER: owner.as_str(),
                Metadata::MANAGED_BY: MANAGED_BY,
                Metadata::SLOT: slot.as_str(),
                Metadata::GENERATION: generation.to_string(),
            },
        });
        let made = self
            .done(Method::POST, "/v2/sandboxes", Some(&body))
            .await?
            .sandbox()?;
        // One that cannot be named here cannot be given back either: it is found by its slot, or not.
        let sandbox = made.id().ok_or(CallError::NoAnswer)?;
        if let Some(token) = made.envd_access_token.clone() {
            self.tokens().insert(sandbox.clone(), token);
        }
        self.fences.pass(&sandbox, generation, || None)?;
        // Its end is known by the service only.
        let ends_at = match made.end_at {
            Some(_) => made.ends_at(),
            None => self
                .look(&sandbox)
                .await
                .map_or(Timestamp::FAR_FUTURE, |s| s.ends_at()),
        };
        Ok(Reply::Created { sandbox, ends_at })
    }

    /// All that match a pair of metadata. A listing that breaks off is none.
    async fn list(&self, name: &str, value: &str) -> Result<Vec<SandboxAnswer>, CallError> {
        let filter = metadata_filter(name, value);
        let first =
            format!("/v2/sandboxes?state=running,paused&limit={PAGE_SIZE}&metadata={filter}");
        let mut path = first.clone();
        let mut all = Vec::new();
        for _ in 0..PAGES_MAX {
            let answer = self.done(Method::GET, &path, None).await?;
            let page: Vec<SandboxAnswer> =
                serde_json::from_value(answer.body).map_err(|_| CallError::NoAnswer)?;
            all.extend(page);
            match answer.next {
                None => return Ok(all),
                Some(token) => {
                    let token: String =
                        url::form_urlencoded::byte_serialize(token.as_bytes()).collect();
                    path = format!("{first}&nextToken={token}");
                }
            }
        }
        Err(CallError::NoAnswer)
    }

    async fn kill(&self, sandbox: &SandboxId, generation: Generation) -> Result<Reply, CallError> {
        self.fences.pass(sandbox, generation, || None)?;
        let path = format!("/sandboxes/{sandbox}");
        let error = match self.done(Method::DELETE, &path, None).await {
            Ok(_) => {
                self.forget(sandbox);
                return Ok(Reply::Done);
            }
            Err(error) => error,
        };
        match error {
            CallError::NotFound => {
                self.forget(sandbox);
                Err(CallError::NotFound)
            }
            // Some delete nothing that is paused, and each says so in its own words.
            CallError::Refused if self.look(sandbox).await?.seen() == Seen::Paused => {
                Err(CallError::RefusedPaused)
            }
            error => Err(error),
        }
    }

    fn forget(&self, sandbox: &SandboxId) {
        self.fences.forget(sandbox);
        self.tokens().remove(sandbox);
    }

    /// Wakes it if it sleeps; if it runs, its life is only ever made longer.
    async fn wake(&self, sandbox: &SandboxId, generation: Generation) -> Result<Reply, CallError> {
        self.fences.pass(sandbox, generation, || None)?;
        let path = format!("/v2/sandboxes/{sandbox}/connect");
        let body = json!({ "timeout": self.life_s() });
        self.done(Method::POST, &path, Some(&body)).await?;
        Ok(Reply::Done)
    }

    async fn probe(&self, sandbox: &SandboxId) -> Result<Reply, CallError> {
        let request = GuestRequest {
            method: Method::GET,
            path: "/health".to_owned(),
            headers: Vec::new(),
            body: Bytes::new(),
            reading: Reading::Whole {
                bytes_max: ANSWER_BYTES_MAX,
            },
        };
        let answer = self.talk(sandbox, request).await?;
        match answer.status.is_success() {
            true => Ok(Reply::Done),
            false => Err(CallError::NoAnswer),
        }
    }

    async fn token(&self, sandbox: &SandboxId) -> Result<String, CallError> {
        if let Some(token) = self.tokens().get(sandbox) {
            return Ok(token.clone());
        }
        let token = self.look(sandbox).await?.envd_access_token;
        let token = token.ok_or(CallError::Refused)?;
        self.tokens().insert(sandbox.clone(), token.clone());
        Ok(token)
    }

    /// One request to the agent.
    async fn talk(
        &self,
        sandbox: &SandboxId,
        asked: GuestRequest,
    ) -> Result<GuestAnswer, CallError> {
        let token = self.token(sandbox).await?;
        let at = match &self.domain {
            Some(domain) => {
                let scheme = self.scheme.as_str();
                format!("{scheme}://{AGENT_PORT}-{sandbox}.{domain}")
            }
            None => self.base.clone(),
        };
        let mut request = Request::builder()
            .method(asked.method)
            .uri(format!("{at}{}", asked.path))
            .header("x-access-token", token);
        if self.domain.is_none() {
            request = request
                .header("e2b-sandbox-id", sandbox.as_str())
                .header("e2b-sandbox-port", AGENT_PORT);
        }
        for (name, value) in asked.headers {
            request = request.header(name, value);
        }
        let request = request
            .body(Full::new(asked.body))
            .map_err(|_| CallError::Refused)?;
        let (head, body) = self.send(request).await?.into_parts();
        Ok(GuestAnswer {
            status: head.status,
            body: guest::read(body, asked.reading).await?,
        })
    }
}

impl Guests for HttpPlatform {
    async fn exchange(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
        request: GuestRequest,
    ) -> Result<GuestAnswer, CallError> {
        self.fences.pass(sandbox, generation, || None)?;
        let answer = self.talk(sandbox, request).await?;
        // A gateway that finds no sandbox, and an agent that finds no file, say the same; the service
        // knows which it is.
        let is_doubtful = matches!(
            answer.status,
            StatusCode::NOT_FOUND | StatusCode::BAD_GATEWAY | StatusCode::CONFLICT
        );
        if is_doubtful && self.look(sandbox).await?.seen() == Seen::Paused {
            self.wake(sandbox, generation).await?;
            return Err(CallError::NoAnswer);
        }
        Ok(answer)
    }

    async fn extend(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
    ) -> Result<Option<Timestamp>, CallError> {
        self.fences.pass(sandbox, generation, || None)?;
        let path = format!("/sandboxes/{sandbox}/timeout");
        let body = json!({ "timeout": self.life_s() });
        self.done(Method::POST, &path, Some(&body)).await?;
        Ok(Some(self.look(sandbox).await?.ends_at()))
    }
}

impl Platform for HttpPlatform {
    async fn call(&self, call: Call) -> Result<Reply, CallError> {
        match call {
            Call::Create { .. } => self.create(call).await,
            Call::FindBySlot(slot) => {
                let found = self.list(Metadata::SLOT, slot.as_str()).await?;
                let mut listed = found.iter().filter_map(SandboxAnswer::listed);
                Ok(Reply::Found(listed.find(|listed| listed.slot == slot)))
            }
            Call::List => {
                let all = self.list(Metadata::MANAGED_BY, MANAGED_BY).await?;
                let listed = all
                    .iter()
                    .filter_map(SandboxAnswer::listed)
                    .map(|mut listed| {
                        let seen = self.fences.seen(&listed.sandbox);
                        listed.generation =
                            seen.map_or(listed.generation, |g| g.max(listed.generation));
                        listed
                    });
                Ok(Reply::Listing(listed.collect()))
            }
            Call::Ask(sandbox) => Ok(Reply::State(self.look(&sandbox).await?.seen())),
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
