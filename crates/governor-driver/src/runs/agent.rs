//! What a run does in its sandbox, in the words of the agent's API (wire contract 2).

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{HeaderName, Method, StatusCode, header};
use sandhold_governor::CallError;
use sandhold_types::{Generation, SandboxId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::guest::{GuestAnswer, GuestRequest, Guests, Reading, enveloped, messages};

/// The largest answer to a unary call, a listing above all.
const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The largest output of a script of ours.
const SCRIPT_OUTPUT_BYTES_MAX: usize = 256 * 1024;
/// Of what a guest says, this much is told on.
const WORDS_CHARS_MAX: usize = 300;

const CONNECT_VERSION: HeaderName = HeaderName::from_static("connect-protocol-version");
const CONNECT_TIMEOUT: HeaderName = HeaderName::from_static("connect-timeout-ms");

/// Why something was not done in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{words}")]
pub(super) struct Trouble {
    pub(super) error: CallError,
    /// For people.
    pub(super) words: String,
}

impl Trouble {
    pub(super) fn new(error: CallError, words: impl Into<String>) -> Self {
        let words: String = words.into();
        Self {
            error,
            words: words.chars().take(WORDS_CHARS_MAX).collect(),
        }
    }
}

impl From<CallError> for Trouble {
    fn from(error: CallError) -> Self {
        Self::new(error, error.to_string())
    }
}

/// One sandbox, for one generation.
#[derive(Debug)]
pub(super) struct Agent<'a, P> {
    pub(super) guests: &'a P,
    pub(super) sandbox: &'a SandboxId,
    pub(super) generation: Generation,
}

/// What is started.
#[derive(Debug)]
pub(super) struct Start<'a> {
    pub(super) command: &'a [String],
    pub(super) cwd: &'a str,
    pub(super) env_vars: Value,
    pub(super) tag: Option<&'a str>,
    /// `None` is the sandbox's default user.
    pub(super) user: Option<&'a str>,
    pub(super) timeout: Duration,
}

/// A file as the agent lists it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FileInfo {
    pub(super) path: String,
    #[serde(rename = "type", default)]
    pub(super) kind: String,
    /// A number, as text.
    #[serde(default)]
    pub(super) size: String,
    #[serde(default)]
    pub(super) modified_time: String,
    #[serde(default)]
    pub(super) is_symlink: bool,
}

impl<P: Guests> Agent<'_, P> {
    async fn exchange(&self, request: GuestRequest) -> Result<GuestAnswer, Trouble> {
        let exchange = self.guests.exchange(self.sandbox, self.generation, request);
        Ok(exchange.await?)
    }

    /// One call of its services.
    async fn call(&self, procedure: &str, message: &Value) -> Result<Value, Trouble> {
        let request = GuestRequest {
            method: Method::POST,
            path: procedure.to_owned(),
            headers: vec![
                (header::CONTENT_TYPE, "application/json".to_owned()),
                (CONNECT_VERSION, "1".to_owned()),
            ],
            body: Bytes::from(message.to_string()),
            reading: Reading::Whole {
                bytes_max: MESSAGE_BYTES_MAX,
            },
        };
        let answer = self.exchange(request).await?;
        if answer.status != StatusCode::OK {
            return Err(refused(procedure, &answer));
        }
        serde_json::from_slice(&answer.body).map_err(|_| not_understood(procedure))
    }

    /// Writes a file of the default user; directories on its way are made.
    pub(super) async fn write(&self, path: &str, content: Bytes) -> Result<(), Trouble> {
        let request = GuestRequest {
            method: Method::POST,
            path: files_path(path),
            headers: vec![(header::CONTENT_TYPE, "application/octet-stream".to_owned())],
            body: content,
            reading: Reading::Whole {
                bytes_max: MESSAGE_BYTES_MAX,
            },
        };
        let answer = self.exchange(request).await?;
        if answer.status.is_success() {
            return Ok(());
        }
        Err(refused(path, &answer))
    }

    /// Reads a file, or the last bytes of it; `None` if there is none.
    pub(super) async fn read(
        &self,
        path: &str,
        range: Option<String>,
        bytes_max: usize,
    ) -> Result<Option<Bytes>, Trouble> {
        let request = GuestRequest {
            method: Method::GET,
            path: files_path(path),
            headers: range
                .map(|range| (header::RANGE, range))
                .into_iter()
                .collect(),
            body: Bytes::new(),
            reading: Reading::Whole { bytes_max },
        };
        let answer = self.exchange(request).await?;
        match answer.status {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => Ok(Some(answer.body)),
            StatusCode::NOT_FOUND => Ok(None),
            // Nothing of an empty file can be in a range.
            StatusCode::RANGE_NOT_SATISFIABLE => Ok(Some(Bytes::new())),
            _ => Err(refused(path, &answer)),
        }
    }

    /// Makes a directory, if there is none, and says where it is.
    pub(super) async fn directory(&self, path: &str) -> Result<String, Trouble> {
        let message = json!({ "path": path });
        if !path.is_empty() {
            // If it could not be made, looking at it tells why.
            let made = self.call("/filesystem.Filesystem/MakeDir", &message).await;
            if let Err(trouble) = made
                && trouble.error != CallError::Refused
            {
                return Err(trouble);
            }
        }
        let found = self.call("/filesystem.Filesystem/Stat", &message).await?;
        let entry: FileInfo =
            serde_json::from_value(found["entry"].clone()).map_err(|_| not_understood("Stat"))?;
        if entry.kind != "FILE_TYPE_DIRECTORY" {
            let words = format!("{path} is not a directory");
            return Err(Trouble::new(CallError::Refused, words));
        }
        Ok(entry.path)
    }

    /// The files in a directory, so many levels deep; none if there is no such directory.
    pub(super) async fn list(&self, path: &str, depth: u32) -> Result<Vec<FileInfo>, Trouble> {
        let message = json!({ "path": path, "depth": depth });
        let listed = self.call("/filesystem.Filesystem/ListDir", &message).await;
        let listed = match listed {
            Ok(listed) => listed,
            Err(trouble) if trouble.error == CallError::Refused => return Ok(Vec::new()),
            Err(trouble) => return Err(trouble),
        };
        if listed["entries"].is_null() {
            return Ok(Vec::new());
        }
        serde_json::from_value(listed["entries"].clone()).map_err(|_| not_understood("ListDir"))
    }

    /// Whether a process of this tag runs.
    pub(super) async fn is_running(&self, tag: &str) -> Result<bool, Trouble> {
        let listed = self.call("/process.Process/List", &json!({})).await?;
        let processes = listed["processes"].as_array();
        Ok(processes.is_some_and(|all| all.iter().any(|process| process["tag"] == tag)))
    }

    /// Starts a program that goes on when this returns.
    pub(super) async fn start(&self, start: &Start<'_>) -> Result<(), Trouble> {
        let first = self.run(start, Reading::FirstMessage).await?;
        let event = first.first().unwrap_or(&Value::Null);
        if event["event"]["start"]["pid"].as_u64().is_some() {
            return Ok(());
        }
        let words = event["error"]["message"].as_str();
        let words = words.unwrap_or("the sandbox did not say that it was started");
        Err(Trouble::new(CallError::Refused, words))
    }

    /// Runs a program to its end and says how it ended.
    pub(super) async fn run_to_end(&self, start: &Start<'_>) -> Result<i64, Trouble> {
        let reading = Reading::Whole {
            bytes_max: SCRIPT_OUTPUT_BYTES_MAX,
        };
        let events = self.run(start, reading).await?;
        let end = events
            .iter()
            .map(|event| &event["event"]["end"])
            .find(|end| !end.is_null())
            .ok_or_else(|| Trouble::new(CallError::NoAnswer, "a program did not end"))?;
        // What is zero is left out of the message.
        Ok(end["exitCode"].as_i64().unwrap_or(0))
    }

    /// Waits until a process ends, or until nothing is heard of it any more.
    pub(super) async fn until_end(&self, tag: &str) {
        let request = GuestRequest {
            method: Method::POST,
            path: "/process.Process/Connect".to_owned(),
            headers: stream_headers(),
            body: enveloped(&json!({ "process": { "tag": tag } })),
            reading: Reading::Whole {
                bytes_max: SCRIPT_OUTPUT_BYTES_MAX,
            },
        };
        // Whatever came is the end of what can be heard.
        let _ = self.exchange(request).await;
    }

    async fn run(&self, start: &Start<'_>, reading: Reading) -> Result<Vec<Value>, Trouble> {
        let message = json!({
            "process": {
                "cmd": start.command.first(),
                "args": start.command.get(1..).unwrap_or_default(),
                "envs": start.env_vars,
                "cwd": start.cwd,
            },
            "tag": start.tag,
            "stdin": false,
        });
        let mut headers = stream_headers();
        headers.push((CONNECT_TIMEOUT, start.timeout.as_millis().to_string()));
        if let Some(user) = start.user {
            let credentials = STANDARD.encode(format!("{user}:"));
            headers.push((header::AUTHORIZATION, format!("Basic {credentials}")));
        }
        let request = GuestRequest {
            method: Method::POST,
            path: "/process.Process/Start".to_owned(),
            headers,
            body: enveloped(&message),
            reading,
        };
        let answer = self.exchange(request).await?;
        if answer.status != StatusCode::OK {
            return Err(refused("starting a program", &answer));
        }
        let read = |message| serde_json::from_slice(message);
        let events: Result<_, _> = messages(&answer.body).map(read).collect();
        events.map_err(|_| not_understood("starting a program"))
    }
}

fn stream_headers() -> Vec<(HeaderName, String)> {
    vec![
        (header::CONTENT_TYPE, "application/connect+json".to_owned()),
        (CONNECT_VERSION, "1".to_owned()),
    ]
}

fn files_path(path: &str) -> String {
    let path: String = url::form_urlencoded::byte_serialize(path.as_bytes()).collect();
    format!("/files?path={path}")
}

/// The agent said no. While it is not up, or when it is out of something, it may say yes later.
fn refused(what: &str, answer: &GuestAnswer) -> Trouble {
    let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let said = body["message"].as_str().unwrap_or("no reason");
    let error = match answer.status {
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
            CallError::NoAnswer
        }
        _ => CallError::Refused,
    };
    Trouble::new(error, format!("{what}: {} {said}", answer.status.as_u16()))
}

fn not_understood(what: &str) -> Trouble {
    Trouble::new(
        CallError::NoAnswer,
        format!("{what}: an answer that is none"),
    )
}
