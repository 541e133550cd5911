//! Talking to the agent inside a sandbox on its control routes.
//!
//! Its answers are hostile input: heads and bodies are bounded, unknown statuses are errors, and
//! nothing it says is believed beyond "ready" and "busy".

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use base64::Engine as _;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use sandhold_network::Network;
use sandhold_platform::DialError;
use sandhold_types::{Deadline, SandboxId, Timestamp, Token};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// The agent's port (wire contract 2).
pub(crate) const AGENT_PORT: u16 = 49983;
/// The code interpreter's port (wire contract 3).
pub(crate) const INTERPRETER_PORT: u16 = 49999;

/// The largest body that is read from a control answer.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// The largest head of a tunnel's answer.
const TUNNEL_HEAD_BYTES_MAX: usize = 4096;
/// How long the first try of a call may go without an answer.
const FIRST_TRY_MAX: Duration = Duration::from_millis(500);
/// How long to wait between two tries while the agent is not up yet.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// What makes a sandbox itself and no other (R-T6).
#[derive(Debug, Clone)]
pub struct Identity {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Its template, as processes see it.
    pub template: String,
    /// Opens the data plane.
    pub access_token: Token,
    /// The control token from now on.
    pub control_token: Token,
    /// Environment of its processes.
    pub env_vars: BTreeMap<String, String>,
    /// The present moment.
    pub now: Timestamp,
    /// Fresh randomness to mix into every generator.
    pub entropy: [u8; 64],
}

/// What keeps a sandbox busy without traffic (R-L5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Activity {
    /// Commands that run.
    pub processes: u64,
    /// Those of them whose output nobody reads.
    pub background_processes: u64,
    /// Code that is being executed.
    pub executions: u64,
    /// Streams that somebody holds open.
    pub streams: u64,
}

impl Activity {
    /// Whether anything keeps it busy.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.processes + self.executions + self.streams > 0
    }
}

/// Why a control call failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// No connection.
    #[error("could not connect to the agent")]
    Connect(#[from] DialError),
    /// The connection broke, or what came back is not HTTP.
    #[error("the agent's answer broke off")]
    Exchange(#[source] hyper::Error),
    /// A status that the call does not have.
    #[error("the agent answered {status}: {body}")]
    Status {
        /// The status.
        status: StatusCode,
        /// The beginning of the body.
        body: String,
    },
    /// A body that does not belong to the call.
    #[error("the agent's answer cannot be read")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// No answer in time.
    #[error("the agent did not answer in time")]
    Timeout,
}

/// The control side of the agent.
#[async_trait]
pub trait AgentControl: Send + Sync + std::fmt::Debug {
    /// Gives a sandbox its identity; `current` is the control token that its agent expects now.
    /// Returns when all of it took effect. Waits for the agent to come up, within the deadline.
    ///
    /// # Errors
    /// No answer in time, or a refusal.
    async fn init(
        &self,
        current: &Token,
        identity: &Identity,
        deadline: Deadline,
    ) -> Result<(), AgentError>;

    /// Waits until the template's start command and warm languages are up.
    ///
    /// # Errors
    /// Not ready in time.
    async fn wait_ready(
        &self,
        id: &SandboxId,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(), AgentError>;

    /// Has it close every connection to it, because it is about to be captured, and returns when
    /// the one of this call is closed too.
    ///
    /// # Errors
    /// No answer in time, or a refusal. What is captured all the same may not wake up.
    async fn quiesce(
        &self,
        id: &SandboxId,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(), AgentError>;

    /// Ends every process but the agent, and brings up what the template wants running, as a boot
    /// from its files does.
    ///
    /// # Errors
    /// No answer in time, or a refusal.
    async fn restart(
        &self,
        id: &SandboxId,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(), AgentError>;

    /// What keeps it busy.
    ///
    /// # Errors
    /// No answer in time, or one that cannot be read.
    async fn activity(
        &self,
        id: &SandboxId,
        token: &Token,
        deadline: Deadline,
    ) -> Result<Activity, AgentError>;

    /// A connection to a port that is bound to the sandbox's loopback only.
    ///
    /// # Errors
    /// Nobody listens, or the agent does not answer.
    async fn tunnel(
        &self,
        id: &SandboxId,
        token: &Token,
        port: u16,
        deadline: Deadline,
    ) -> Result<TcpStream, DialError>;
}

/// The agent over HTTP, through the sandbox's own network.
#[derive(Debug, Clone)]
pub struct HttpAgent {
    network: Arc<dyn Network>,
}

impl HttpAgent {
    /// Reaches agents through `network`.
    #[must_use]
    pub fn new(network: Arc<dyn Network>) -> Self {
        Self { network }
    }

    async fn call(
        &self,
        id: &SandboxId,
        token: &Token,
        request: (Method, &str, Bytes),
        deadline: Deadline,
    ) -> Result<(StatusCode, Bytes), AgentError> {
        self.exchange(id, token, request, Until::Answered, deadline)
            .await
    }

    /// One call on a connection of its own.
    async fn exchange(
        &self,
        id: &SandboxId,
        token: &Token,
        request: (Method, &str, Bytes),
        until: Until,
        deadline: Deadline,
    ) -> Result<(StatusCode, Bytes), AgentError> {
        let (method, path, body) = request;
        let exchange = async {
            let stream = self.network.dial(id, AGENT_PORT, deadline).await?;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream))
                    .await
                    .map_err(AgentError::Exchange)?;
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header("host", "agent")
                .header("connection", "close")
                .header("content-type", "application/json")
                .header("x-sandhold-control", token.expose())
                .body(Full::new(body))
                .map_err(|error| AgentError::Body(error.into()))?;
            let answer = async {
                let response = sender
                    .send_request(request)
                    .await
                    .map_err(AgentError::Exchange)?;
                let (head, body) = response.into_parts();
                let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
                Ok((head.status, body.map_err(AgentError::Body)?.to_bytes()))
            };
            // The connection is driven beside the exchange and ends with it.
            tokio::pin!(answer, connection);
            tokio::select! {
                answer = &mut answer => {
                    if until == Until::Closed {
                        connection.as_mut().await.map_err(AgentError::Exchange)?;
                    }
                    answer
                }
                ended = &mut connection => {
                    ended.map_err(AgentError::Exchange)?;
                    answer.await
                }
            }
        };
        let at = tokio::time::Instant::from_std(deadline.instant());
        tokio::time::timeout_at(at, exchange)
            .await
            .map_err(|_| AgentError::Timeout)?
    }

    /// Makes a call once that has neither a body nor an answer.
    async fn tell(
        &self,
        id: &SandboxId,
        token: &Token,
        path: &str,
        deadline: Deadline,
    ) -> Result<(), AgentError> {
        let request = (Method::POST, path, Bytes::new());
        done(self.call(id, token, request, deadline).await?)
    }

    /// Repeats a call while the agent is not up yet: refused, reset, or answering 503. A try that
    /// gets no answer is given up for another on a fresh connection, after longer each time: a
    /// restored guest can miss that something came in, until something else does.
    async fn call_until(
        &self,
        id: &SandboxId,
        tokens: [&Token; 2],
        request: (Method, &str, Bytes),
        deadline: Deadline,
    ) -> Result<(), AgentError> {
        let [mut token, mut other] = tokens;
        let mut patience = FIRST_TRY_MAX;
        loop {
            let now = tokio::time::Instant::now().into_std();
            let this_try = Deadline::after(now, patience.min(deadline.remaining(now)));
            let answer = self.call(id, token, request.clone(), this_try).await;
            let not_yet = match answer {
                Ok((status, _)) if status.is_success() => return Ok(()),
                Ok((StatusCode::SERVICE_UNAVAILABLE, body)) => {
                    status_error(StatusCode::SERVICE_UNAVAILABLE, &body)
                }
                // An earlier try took effect after all: the agent knows the other token now.
                Ok((StatusCode::UNAUTHORIZED, _)) if patience > FIRST_TRY_MAX && token != other => {
                    std::mem::swap(&mut token, &mut other);
                    AgentError::Timeout
                }
                Ok((status, body)) => return Err(status_error(status, &body)),
                Err(error @ AgentError::Body(_)) => return Err(error),
                Err(error) => {
                    if matches!(error, AgentError::Timeout) {
                        patience *= 2;
                    }
                    error
                }
            };
            let now = tokio::time::Instant::now().into_std();
            if deadline.remaining(now) <= POLL_INTERVAL {
                return Err(not_yet);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// When a call is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// When all of the answer is there.
    Answered,
    /// When the agent has closed the connection too.
    Closed,
}

/// The answer of a call that has none but its status.
fn done((status, body): (StatusCode, Bytes)) -> Result<(), AgentError> {
    if status.is_success() {
        Ok(())
    } else {
        Err(status_error(status, &body))
    }
}

fn status_error(status: StatusCode, body: &[u8]) -> AgentError {
    const SHOWN_MAX: usize = 300;
    let shown = &body[..body.len().min(SHOWN_MAX)];
    AgentError::Status {
        status,
        body: String::from_utf8_lossy(shown).into_owned(),
    }
}

#[derive(serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct InitBody<'a> {
    access_token: &'a str,
    env_vars: &'a BTreeMap<String, String>,
    timestamp: String,
    hostname: &'a str,
    sandbox_id: &'a str,
    template_id: &'a str,
    control_token: &'a str,
    entropy: String,
}

#[async_trait]
impl AgentControl for HttpAgent {
    async fn init(
        &self,
        current: &Token,
        identity: &Identity,
        deadline: Deadline,
    ) -> Result<(), AgentError> {
        let body = InitBody {
            access_token: identity.access_token.expose(),
            env_vars: &identity.env_vars,
            timestamp: identity.now.to_rfc3339(),
            hostname: identity.sandbox.as_str(),
            sandbox_id: identity.sandbox.as_str(),
            template_id: &identity.template,
            control_token: identity.control_token.expose(),
            entropy: base64::engine::general_purpose::STANDARD.encode(identity.entropy),
        };
        let body = serde_json::to_vec(&body).map_err(|error| AgentError::Body(error.into()))?;
        let request = (Method::POST, "/init", Bytes::from(body));
        let tokens = [current, &identity.control_token];
        self.call_until(&identity.sandbox, tokens, request, deadline)
            .await
    }

    async fn wait_ready(
        &self,
        id: &SandboxId,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(), AgentError> {
        let request = (Method::GET, "/ready", Bytes::new());
        self.call_until(id, [token, token], request, deadline).await
    }

    async fn quiesce(
        &self,
        id: &SandboxId,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(), AgentError> {
        let request = (Method::POST, "/quiesce", Bytes::new());
        // Its own connection must not be open either while memory is captured.
        let answer = self.exchange(id, token, request, Until::Closed, deadline);
        done(answer.await?)
    }

    async fn restart(
        &self,
        id: &SandboxId,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(), AgentError> {
        self.tell(id, token, "/restart", deadline).await
    }

    async fn activity(
        &self,
        id: &SandboxId,
        token: &Token,
        deadline: Deadline,
    ) -> Result<Activity, AgentError> {
        let request = (Method::GET, "/activity", Bytes::new());
        match self.call(id, token, request, deadline).await? {
            (StatusCode::OK, body) => {
                serde_json::from_slice(&body).map_err(|error| AgentError::Body(error.into()))
            }
            (status, body) => Err(status_error(status, &body)),
        }
    }

    async fn tunnel(
        &self,
        id: &SandboxId,
        token: &Token,
        port: u16,
        deadline: Deadline,
    ) -> Result<TcpStream, DialError> {
        let open = async {
            let mut stream = self.network.dial(id, AGENT_PORT, deadline).await?;
            let request = format!(
                "GET /tunnel?port={port} HTTP/1.1\r\nhost: agent\r\nconnection: upgrade\r\n\
                 upgrade: tcp\r\nx-sandhold-control: {}\r\n\r\n",
                token.expose()
            );
            stream
                .write_all(request.as_bytes())
                .await
                .map_err(DialError::Socket)?;
            match read_tunnel_head(&mut stream)
                .await
                .map_err(DialError::Socket)?
            {
                TunnelAnswer::Open => Ok(stream),
                TunnelAnswer::Closed => Err(DialError::PortClosed { port }),
            }
        };
        let started = tokio::time::Instant::now();
        let at = tokio::time::Instant::from_std(deadline.instant());
        let too_late = |_| DialError::Timeout {
            port,
            waited: started.elapsed(),
        };
        tokio::time::timeout_at(at, open).await.map_err(too_late)?
    }
}

#[derive(Debug, PartialEq, Eq)]
enum TunnelAnswer {
    Open,
    Closed,
}

/// Reads exactly the head of the answer, so that what the server behind the tunnel says first
/// stays in the socket.
async fn read_tunnel_head(stream: &mut TcpStream) -> std::io::Result<TunnelAnswer> {
    let mut head = Vec::with_capacity(256);
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= TUNNEL_HEAD_BYTES_MAX {
            return Err(std::io::Error::other(
                "the agent's tunnel answer has no end",
            ));
        }
        head.push(stream.read_u8().await?);
    }
    if head.starts_with(b"HTTP/1.1 101 ") {
        Ok(TunnelAnswer::Open)
    } else {
        Ok(TunnelAnswer::Closed)
    }
}
