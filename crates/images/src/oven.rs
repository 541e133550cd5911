//! Sandboxes that a build runs for itself: to warm a template up, and to run a step.
//!
//! ```text
//!   prepare ─▶ start (network, launch) ─▶ ready ─▶ calls ─▶ clean up
//!                  └────────── any failure, or the end of the instance ──┘
//! ```
//!
//! Owns: the instance and its network, from `prepare` to `clean_up`. Whoever prepares one cleans it
//! up, whatever way it went; what a build leaves that is cut short is found by
//! [`clear_left_overs`].
//!
//! Invariants: what the agent answers is bounded and only ever shown. It knows an engine, a network
//! and the agent's protocol, and nothing of a sandbox's later life.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, request};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use sandhold_agent_proto::control::{CONTROL_HEADER, PATH_READY};
use sandhold_engine::{
    Engine, EngineError, ExitCause, InstanceId, InstanceRef, LaunchSpec, Origin,
};
use sandhold_network::{Network, NetworkError};
use sandhold_platform::{DialError, Egress};
use sandhold_types::{Deadline, Entropy, Incarnation, Resources, SandboxId, Token};

use crate::progress::{Event, Progress};

/// The port that the agent's calls are on.
const AGENT_PORT: u16 = 49_983;
/// The environment variable in which a booted agent finds its first control token.
const CONTROL_TOKEN_VARIABLE: &str = "SANDHOLD_CONTROL_TOKEN";
/// Between two questions whether the agent is ready.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How much of an answer is read, in bytes.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// How much of the console is shown when a sandbox fails, in bytes.
const CONSOLE_TAIL_BYTES: usize = 4 * 1024;
/// What is kept for clean-up, whatever the build has used.
const CLEAN_UP_BUDGET: Duration = Duration::from_secs(30);

/// Why a sandbox of a build did not do what it was for.
#[derive(Debug, thiserror::Error)]
pub enum BakeError {
    /// The instance's directory could not be made or removed.
    #[error("could not {step} {path}")]
    Directory {
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The network could not be built or removed.
    #[error("could not {step} the network")]
    Network {
        /// What was being done.
        step: &'static str,
        /// The cause.
        #[source]
        source: NetworkError,
    },
    /// The engine failed.
    #[error("could not {step}")]
    Engine {
        /// What was being done.
        step: &'static str,
        /// The cause.
        #[source]
        source: EngineError,
    },
    /// The agent, or what it started, ended before it was ready.
    #[error("the sandbox ended before it was ready ({cause:?}); its console says last:\n{console}")]
    Ended {
        /// How.
        cause: ExitCause,
        /// The last lines of its console.
        console: String,
    },
    /// The time was over before it was ready.
    #[error(
        "the sandbox was not ready within {} s ({waiting_for}); its console says last:\n{console}",
        waited.as_secs()
    )]
    NotReady {
        /// How long it was waited for.
        waited: Duration,
        /// What the agent said it waits for, or why it could not be asked.
        waiting_for: String,
        /// The last lines of the console.
        console: String,
    },
    /// The agent refused a call that it must not refuse.
    #[error("the agent answered {status} to {path}: {body}")]
    Refused {
        /// Which call.
        path: &'static str,
        /// The status.
        status: StatusCode,
        /// The text, cut to a bound.
        body: String,
    },
    /// A call to the agent got no answer.
    #[error("the agent gave no answer to {path}: {detail}")]
    NoAnswer {
        /// Which call.
        path: &'static str,
        /// What happened.
        detail: String,
    },
}

pub(crate) fn engine_failed(step: &'static str) -> impl FnOnce(EngineError) -> BakeError {
    move |source| BakeError::Engine { step, source }
}

pub(crate) fn network_failed(step: &'static str) -> impl FnOnce(NetworkError) -> BakeError {
    move |source| BakeError::Network { step, source }
}

/// Where the sandboxes of builds run.
#[derive(Debug, Clone, Copy)]
pub struct Oven<'a> {
    /// Runs sandboxes whose root is never written to. Used by one builder at a time and by nobody
    /// else: whatever instance it lists is a left-over.
    pub engine: &'a dyn Engine,
    /// The same, for sandboxes that write into their root: the steps of a build.
    pub step_engine: &'a dyn Engine,
    /// Connects them. Used by one builder at a time and by nobody else.
    pub network: &'a dyn Network,
    /// Draws identifiers and tokens.
    pub entropy: &'a dyn Entropy,
    /// Where instances have their directories.
    pub instances: &'a Path,
    /// How long a sandbox may take until it is ready.
    pub ready_budget: Duration,
}

/// Whether a sandbox writes into its root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RootUse {
    /// It writes to a layer of its own that goes with it.
    Kept,
    /// What it writes stays.
    Changed,
}

/// What is booted.
#[derive(Debug, Clone)]
pub(crate) struct Boot<'a> {
    pub(crate) root_fs: &'a Path,
    pub(crate) command: &'a [String],
    pub(crate) environment: &'a [String],
    pub(crate) resources: Resources,
    pub(crate) egress: Egress,
}

/// Removes whatever an interrupted build left on the machine.
///
/// # Errors
/// Something cannot be listed or removed.
pub async fn clear_left_overs(oven: &Oven<'_>) -> Result<(), BakeError> {
    let listed = oven.engine.list().await;
    for id in listed.map_err(engine_failed("list left-over sandboxes"))? {
        let instance = instance_ref(oven, id);
        let removed = oven.engine.remove(&instance, clean_up_deadline()).await;
        removed.map_err(engine_failed("remove a left-over sandbox"))?;
    }
    let networks = oven.network.list().await;
    for id in networks.map_err(network_failed("list"))? {
        let removed = oven.network.detach(&id).await;
        removed.map_err(network_failed("remove"))?;
    }
    match fs::remove_dir_all(oven.instances) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(BakeError::Directory {
            step: "remove",
            path: oven.instances.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

fn instance_ref(oven: &Oven<'_>, id: InstanceId) -> InstanceRef {
    let directory = oven.instances.join(id.to_string());
    InstanceRef { id, directory }
}

fn clean_up_deadline() -> Deadline {
    Deadline::after(Instant::now(), CLEAN_UP_BUDGET)
}

/// A sandbox of a build.
#[derive(Debug)]
pub(crate) struct Running<'a> {
    oven: &'a Oven<'a>,
    pub(crate) engine: &'a dyn Engine,
    pub(crate) instance: InstanceRef,
    /// The control token that its agent expects.
    pub(crate) token: Token,
}

impl<'a> Running<'a> {
    /// Makes room for one. The caller cleans up, whatever comes next.
    pub(crate) fn prepare(oven: &'a Oven<'a>, root_use: RootUse) -> Result<Self, BakeError> {
        let id = InstanceId {
            sandbox: SandboxId::generate(oven.entropy),
            incarnation: Incarnation(1),
        };
        let instance = instance_ref(oven, id);
        fs::create_dir_all(&instance.directory).map_err(|source| BakeError::Directory {
            step: "make",
            path: instance.directory.clone(),
            source,
        })?;
        Ok(Self {
            oven,
            engine: match root_use {
                RootUse::Kept => oven.engine,
                RootUse::Changed => oven.step_engine,
            },
            instance,
            token: Token::generate("", oven.entropy),
        })
    }

    /// A fresh token.
    pub(crate) fn new_token(&self) -> Token {
        Token::generate("", self.oven.entropy)
    }

    /// A deadline from now.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(Instant::now(), self.oven.ready_budget)
    }

    /// Boots it and waits until it is ready.
    pub(crate) async fn start(
        &self,
        boot: &Boot<'_>,
        progress: &dyn Progress,
    ) -> Result<(), BakeError> {
        let deadline = self.deadline();
        let sandbox = &self.instance.id.sandbox;
        let attached = self.oven.network.attach(sandbox, &boot.egress).await;
        let attachment = attached.map_err(network_failed("build"))?;
        let mut environment = boot.environment.to_vec();
        environment.push(format!("{CONTROL_TOKEN_VARIABLE}={}", self.token.expose()));
        let spec = LaunchSpec {
            instance: self.instance.clone(),
            root_fs: boot.root_fs.to_owned(),
            origin: Origin::Boot {
                command: boot.command.to_vec(),
                environment,
            },
            network_namespace: attachment.namespace,
            resources: boot.resources,
            hostname: String::from("sandbox"),
        };
        let launched = self.engine.launch(&spec, deadline).await;
        launched.map_err(engine_failed("boot the root file system"))?;
        tokio::select! {
            ready = self.wait_until_ready(deadline, progress) => ready,
            ended = self.engine.wait(&self.instance) => Err(self.ended(ended)),
        }
    }

    /// What its end means before anybody asked for it.
    pub(crate) fn ended(&self, ended: Result<ExitCause, EngineError>) -> BakeError {
        match ended {
            Ok(cause) => BakeError::Ended {
                cause,
                console: console_tail(&self.instance),
            },
            Err(source) => engine_failed("watch the sandbox")(source),
        }
    }

    /// Removes it and all that belongs to it.
    pub(crate) async fn clean_up(&self) -> Result<(), BakeError> {
        let removed = self
            .engine
            .remove(&self.instance, clean_up_deadline())
            .await;
        let detached = self.oven.network.detach(&self.instance.id.sandbox).await;
        let cleared = match fs::remove_dir_all(&self.instance.directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        removed.map_err(engine_failed("remove the sandbox"))?;
        detached.map_err(network_failed("remove"))?;
        cleared.map_err(|source| BakeError::Directory {
            step: "remove",
            path: self.instance.directory.clone(),
            source,
        })
    }

    /// A call that the agent answers by 204.
    pub(crate) async fn ask(
        &self,
        path: &'static str,
        body: Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), BakeError> {
        match self.call(Method::POST, path, body, deadline).await {
            Ok((StatusCode::NO_CONTENT, _)) => Ok(()),
            Ok((status, body)) => Err(BakeError::Refused {
                path,
                status,
                body: printable(&body),
            }),
            Err(error) => Err(no_answer(path, &error)),
        }
    }

    async fn wait_until_ready(
        &self,
        deadline: Deadline,
        progress: &dyn Progress,
    ) -> Result<(), BakeError> {
        let mut told = String::new();
        // What the agent last said itself tells more than that its last answer came too late.
        let mut answered = None;
        loop {
            let answer = self.call(Method::GET, PATH_READY, Vec::new(), deadline);
            let waiting_for = match answer.await {
                Ok((StatusCode::NO_CONTENT, _)) => return Ok(()),
                Ok((StatusCode::SERVICE_UNAVAILABLE, body)) => {
                    let text = waiting_for(&body);
                    answered = Some(text.clone());
                    text
                }
                Ok((status, body)) => {
                    return Err(BakeError::Refused {
                        path: PATH_READY,
                        status,
                        body: printable(&body),
                    });
                }
                Err(error) => error.to_string(),
            };
            if deadline.remaining(Instant::now()).is_zero() {
                return Err(BakeError::NotReady {
                    waited: self.oven.ready_budget,
                    waiting_for: answered.unwrap_or(waiting_for),
                    console: console_tail(&self.instance),
                });
            }
            if waiting_for != told {
                progress.report(Event::Note {
                    text: waiting_for.clone(),
                });
                told = waiting_for;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn call(
        &self,
        method: Method,
        path: &'static str,
        body: Vec<u8>,
        deadline: Deadline,
    ) -> Result<(StatusCode, Bytes), CallError> {
        let exchange = async {
            let token = HeaderValue::from_str(self.token.expose()).map_err(http::Error::from)?;
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header(CONTROL_HEADER, token);
            let (status, body) = self.send(request, body, deadline).await?;
            let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|_| CallError::Body)?.to_bytes();
            Ok((status, body))
        };
        let within = deadline.remaining(Instant::now());
        tokio::time::timeout(within, exchange)
            .await
            .unwrap_or(Err(CallError::Late))
    }

    /// Sends a request on a connection of its own, so that none is open when the memory is
    /// captured. The connection ends with the body.
    pub(crate) async fn send(
        &self,
        request: request::Builder,
        body: Vec<u8>,
        deadline: Deadline,
    ) -> Result<(StatusCode, Incoming), CallError> {
        let network = self.oven.network;
        let stream = network
            .dial(&self.instance.id.sandbox, AGENT_PORT, deadline)
            .await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let request = request
            .header("host", "sandbox")
            .header("connection", "close")
            .body(Full::new(Bytes::from(body)))?;
        let (head, body) = sender.send_request(request).await?.into_parts();
        Ok((head.status, body))
    }
}

pub(crate) fn no_answer(path: &'static str, error: &CallError) -> BakeError {
    BakeError::NoAnswer {
        path,
        detail: error.to_string(),
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("the agent does not listen yet")]
    Dial(#[from] DialError),
    #[error("the connection to the agent broke: {0}")]
    Connection(#[from] hyper::Error),
    #[error("the agent's answer broke off or is longer than {ANSWER_BYTES_MAX} bytes")]
    Body,
    #[error("the request could not be formed: {0}")]
    Request(#[from] http::Error),
    #[error("no answer in time")]
    Late,
}

fn waiting_for(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct NotReady {
        waiting_for: Vec<String>,
    }
    match serde_json::from_slice::<NotReady>(body) {
        Ok(not_ready) => {
            printable(format!("waiting for {}", not_ready.waiting_for.join(", ")).as_bytes())
        }
        Err(_) => String::from("waiting"),
    }
}

/// A guest's text, fit for a terminal: bounded, without control characters.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let tail = &bytes[bytes.len().saturating_sub(CONSOLE_TAIL_BYTES)..];
    let text = String::from_utf8_lossy(tail);
    text.chars()
        .filter(|c| !c.is_control() || *c == '\n')
        .collect()
}

/// The last lines of whatever logs the engine left in the instance's directory.
fn console_tail(instance: &InstanceRef) -> String {
    let mut text = Vec::new();
    let files = fs::read_dir(&instance.directory)
        .into_iter()
        .flatten()
        .flatten();
    for entry in files {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains("console") || name.ends_with(".log") {
            text.extend(fs::read(entry.path()).unwrap_or_default());
        }
    }
    printable(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_says_is_cut_and_cannot_drive_a_terminal() {
        let long = "x".repeat(100_000);
        assert_eq!(printable(long.as_bytes()).len(), CONSOLE_TAIL_BYTES);
        assert_eq!(printable(b"a\x1b[2Jb\n\xff"), "a[2Jb\n\u{fffd}");
        assert_eq!(
            waiting_for(b"{\"waitingFor\":[\"python\"]}"),
            "waiting for python"
        );
        assert_eq!(waiting_for(b"garbage"), "waiting");
    }
}
