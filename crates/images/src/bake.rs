//! Baking: a root file system is booted once, warmed, and its memory captured (architecture,
//! decision 4).
//!
//! ```text
//!   attach network ─▶ launch ─▶ /ready until 204 ─▶ /quiesce ─▶ capture(stop) ─▶ remove, detach
//!        └───────────────┴────────────┴─── any failure, or the end of the instance ──┘
//! ```
//!
//! Invariants: whatever way a bake ends, its instance and its network are removed; a sandbox that
//! is baked reaches nothing outside; what the agent answers is bounded and only ever shown.
//!
//! It knows an engine, a network and the control protocol, and nothing of a sandbox's later life.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use sandhold_engine::{
    AfterCapture, Engine, EngineError, ExitCause, InstanceId, InstanceRef, LaunchSpec, Origin,
};
use sandhold_network::{Network, NetworkError};
use sandhold_platform::{DialError, Egress};
use sandhold_types::{Deadline, Entropy, Incarnation, Resources, SandboxId, Token};

use crate::progress::{Event, Progress, Stage};

/// The port that the agent's control calls are on.
const AGENT_PORT: u16 = 49_983;
/// Carries the control token (control protocol).
const CONTROL_HEADER: &str = "x-sandhold-control";
/// The environment variable in which a booted agent finds its first control token.
const CONTROL_TOKEN_VARIABLE: &str = "SANDHOLD_CONTROL_TOKEN";
/// Between two questions whether the agent is ready.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How much of an answer is read, in bytes.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// How much of the console is shown when a bake fails, in bytes.
const CONSOLE_TAIL_BYTES: usize = 4 * 1024;
/// What is kept for clean-up, whatever the bake has used.
const CLEAN_UP_BUDGET: Duration = Duration::from_secs(30);

/// Why a root file system was not baked.
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

fn engine_failed(step: &'static str) -> impl FnOnce(EngineError) -> BakeError {
    move |source| BakeError::Engine { step, source }
}

fn network_failed(step: &'static str) -> impl FnOnce(NetworkError) -> BakeError {
    move |source| BakeError::Network { step, source }
}

/// Where templates are baked.
#[derive(Debug, Clone, Copy)]
pub struct Oven<'a> {
    /// Runs the sandbox. Used by one builder at a time and by nobody else: whatever instance it
    /// lists is a left-over.
    pub engine: &'a dyn Engine,
    /// Connects it. Used by one builder at a time and by nobody else.
    pub network: &'a dyn Network,
    /// Draws identifiers and tokens.
    pub entropy: &'a dyn Entropy,
    /// Where instances have their directories.
    pub instances: &'a Path,
    /// How long a sandbox may take until it is ready.
    pub ready_budget: Duration,
}

/// What is baked.
#[derive(Debug, Clone)]
pub(crate) struct Dough<'a> {
    pub(crate) root_fs: &'a Path,
    pub(crate) command: &'a [String],
    pub(crate) environment: &'a [String],
    pub(crate) resources: Resources,
    /// Where the image is written to; made by the engine.
    pub(crate) image: &'a Path,
}

/// Removes whatever an interrupted bake left on the machine.
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

/// Bakes and returns the control token that the agent in the image expects.
///
/// # Errors
/// The step that failed. Nothing of the sandbox is left.
pub(crate) async fn bake(
    oven: &Oven<'_>,
    dough: &Dough<'_>,
    progress: &dyn Progress,
) -> Result<Token, BakeError> {
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
    let token = Token::generate("", oven.entropy);
    let baked = run(oven, dough, &instance, &token, progress).await;
    let cleaned = clean_up(oven, &instance).await;
    // The first failure is the reason; a failed clean-up is told when nothing else went wrong.
    baked.and(cleaned).map(|()| token)
}

fn instance_ref(oven: &Oven<'_>, id: InstanceId) -> InstanceRef {
    let directory = oven.instances.join(id.to_string());
    InstanceRef { id, directory }
}

fn clean_up_deadline() -> Deadline {
    Deadline::after(Instant::now(), CLEAN_UP_BUDGET)
}

async fn run(
    oven: &Oven<'_>,
    dough: &Dough<'_>,
    instance: &InstanceRef,
    token: &Token,
    progress: &dyn Progress,
) -> Result<(), BakeError> {
    progress.report(Event::Begin { stage: Stage::Warm });
    let deadline = Deadline::after(Instant::now(), oven.ready_budget);
    let sandbox = &instance.id.sandbox;
    let attached = oven.network.attach(sandbox, &Egress::Nothing).await;
    let attachment = attached.map_err(network_failed("build"))?;
    let mut environment = dough.environment.to_vec();
    environment.push(format!("{CONTROL_TOKEN_VARIABLE}={}", token.expose()));
    let spec = LaunchSpec {
        instance: instance.clone(),
        root_fs: dough.root_fs.to_owned(),
        origin: Origin::Boot {
            command: dough.command.to_vec(),
            environment,
        },
        network_namespace: attachment.namespace,
        resources: dough.resources,
        hostname: String::from("sandbox"),
    };
    let launched = oven.engine.launch(&spec, deadline).await;
    launched.map_err(engine_failed("boot the root file system"))?;
    tokio::select! {
        ready = wait_until_ready(oven, instance, token, deadline, progress) => ready?,
        ended = oven.engine.wait(instance) => {
            let cause = ended.map_err(engine_failed("watch the sandbox"))?;
            return Err(BakeError::Ended { cause, console: console_tail(instance) });
        }
    }
    progress.report(Event::Begin {
        stage: Stage::Capture,
    });
    let deadline = Deadline::after(Instant::now(), oven.ready_budget);
    quiesce(oven, instance, token, deadline).await?;
    let captured = oven
        .engine
        .capture(instance, dough.image, AfterCapture::Stop, deadline)
        .await;
    captured.map_err(engine_failed("capture the warm sandbox"))
}

async fn clean_up(oven: &Oven<'_>, instance: &InstanceRef) -> Result<(), BakeError> {
    let removed = oven.engine.remove(instance, clean_up_deadline()).await;
    let detached = oven.network.detach(&instance.id.sandbox).await;
    let cleared = match fs::remove_dir_all(&instance.directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    removed.map_err(engine_failed("remove the sandbox"))?;
    detached.map_err(network_failed("remove"))?;
    cleared.map_err(|source| BakeError::Directory {
        step: "remove",
        path: instance.directory.clone(),
        source,
    })
}

async fn wait_until_ready(
    oven: &Oven<'_>,
    instance: &InstanceRef,
    token: &Token,
    deadline: Deadline,
    progress: &dyn Progress,
) -> Result<(), BakeError> {
    let mut told = String::new();
    // What the agent last said itself tells more than that its last answer came too late.
    let mut answered = None;
    loop {
        let waiting_for = match call(oven, instance, Method::GET, "/ready", token, deadline).await {
            Ok((StatusCode::NO_CONTENT, _)) => return Ok(()),
            Ok((StatusCode::SERVICE_UNAVAILABLE, body)) => {
                let text = waiting_for(&body);
                answered = Some(text.clone());
                text
            }
            Ok((status, body)) => {
                return Err(BakeError::Refused {
                    path: "/ready",
                    status,
                    body: printable(&body),
                });
            }
            Err(error) => error.to_string(),
        };
        if deadline.remaining(Instant::now()).is_zero() {
            return Err(BakeError::NotReady {
                waited: oven.ready_budget,
                waiting_for: answered.unwrap_or(waiting_for),
                console: console_tail(instance),
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

async fn quiesce(
    oven: &Oven<'_>,
    instance: &InstanceRef,
    token: &Token,
    deadline: Deadline,
) -> Result<(), BakeError> {
    let path = "/quiesce";
    let answer = call(oven, instance, Method::POST, path, token, deadline).await;
    match answer {
        Ok((StatusCode::NO_CONTENT, _)) => Ok(()),
        Ok((status, body)) => Err(BakeError::Refused {
            path,
            status,
            body: printable(&body),
        }),
        Err(error) => Err(BakeError::NoAnswer {
            path,
            detail: error.to_string(),
        }),
    }
}

#[derive(Debug, thiserror::Error)]
enum CallError {
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

/// One call on a connection of its own, so that none is open when the memory is captured.
async fn call(
    oven: &Oven<'_>,
    instance: &InstanceRef,
    method: Method,
    path: &'static str,
    token: &Token,
    deadline: Deadline,
) -> Result<(StatusCode, Bytes), CallError> {
    let exchange = async {
        let stream = oven
            .network
            .dial(&instance.id.sandbox, AGENT_PORT, deadline)
            .await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "sandbox")
            .header("connection", "close")
            .header(CONTROL_HEADER, token.expose())
            .body(Empty::<Bytes>::new())?;
        let answer = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
                .collect()
                .await;
            let body = body.map_err(|_| CallError::Body)?.to_bytes();
            drop(sender);
            Ok::<_, CallError>((status, body))
        };
        let (answer, _) = tokio::join!(answer, connection);
        answer
    };
    let within = deadline.remaining(Instant::now());
    tokio::time::timeout(within, exchange)
        .await
        .unwrap_or(Err(CallError::Late))
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
fn printable(bytes: &[u8]) -> String {
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
