//! The server that commands talk to: its API, and the data plane of its sandboxes.

use std::{io, path::PathBuf, time::Duration};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, Uri, header, request};
use http_body_util::{BodyExt as _, Full, Limited, combinators::BoxBody};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::Deserialize;
use serde_json::Value;

use crate::settings;

/// The guest agent's port.
pub(crate) const AGENT_PORT: u16 = 49983;
/// The code interpreter's port.
pub(crate) const INTERPRETER_PORT: u16 = 49999;
/// The file in a server's data directory that holds the key of its first start.
const DEFAULT_KEY_FILE: &str = "default.key";
/// The largest answer that is read as a whole, in bytes.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How long a connection to the server may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Which server, as whom, and how to print.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct Options {
    /// The server.
    #[arg(long, env = "SANDHOLD_URL", default_value_t = format!("http://{}", settings::LISTEN))]
    pub(crate) url: String,
    /// The key. Without it, the one that the server's first start made is read from its data
    /// directory.
    #[arg(long, env = "SANDHOLD_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// The server's data directory, if it is on this machine.
    #[arg(long, env = "SANDHOLD_DATA_DIR", default_value = settings::DATA_DIR)]
    pub(crate) data_dir: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What is sent as a body.
pub(crate) type Sent = BoxBody<Bytes, io::Error>;

/// Why the server did not do it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServerError {
    /// Nobody answers.
    #[error(
        "no server answers at {url}\n  start one with 'sandhold up', or name another with --url \
         or SANDHOLD_URL"
    )]
    Unreachable {
        /// The server.
        url: String,
        /// The cause.
        #[source]
        source: hyper_util::client::legacy::Error,
    },
    /// It said no.
    #[error("{message}{}", advice(code).map(|a| format!("\n  {a}")).unwrap_or_default())]
    Refused {
        /// The status.
        status: u16,
        /// The stable name of the cause.
        code: String,
        /// What the server said.
        message: String,
    },
}

impl ServerError {
    /// The stable name of the cause, if the server gave one.
    pub(crate) fn code_of(error: &anyhow::Error) -> Option<&str> {
        match error.downcast_ref::<Self>()? {
            Self::Refused { code, .. } => Some(code),
            Self::Unreachable { .. } => None,
        }
    }
}

/// What to do about an error, where the server's own words do not tell.
fn advice(code: &str) -> Option<&'static str> {
    Some(match code {
        "unauthenticated" => {
            "give a key that works by --api-key or SANDHOLD_API_KEY, or the server's --data-dir"
        }
        "forbidden" => "this needs an administrator's key, such as <data-dir>/default.key",
        "sandbox_not_found" | "sandbox_unknown" => {
            "'sandhold sandbox ls' lists what is there; 'sandhold sandbox history ID' tells why \
             a recent one ended"
        }
        "sandbox_ended" => "'sandhold sandbox history ID' tells what happened to it",
        "template_not_found" => "'sandhold template list' shows what there is",
        "key_not_found" => "'sandhold key list' shows the IDs of the keys",
        "capacity_exceeded" => "end a sandbox that is not needed, or try again later",
        "quota_exceeded" => "end a sandbox that is not needed; the tenant's limit is reached",
        "STALE_LEASE" => "another lease has the sandbox; take one under a new name",
        "run_not_found" => "a run is known for a day after it has ended",
        "lease_not_found" => "'sandhold lease ls' lists the leases in force",
        "port_closed" => "the sandbox's template has no such server, or it has not started yet",
        _ => return None,
    })
}

/// A server and a key for it.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    base: String,
    key: HeaderValue,
    client: Client<HttpConnector, Sent>,
}

/// What opens a sandbox's data plane.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Access {
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    envd_access_token: String,
    traffic_access_token: Option<String>,
    domain: Option<String>,
}

/// The data plane of one sandbox, through the gateway.
#[derive(Debug)]
pub(crate) struct DataPlane {
    server: Server,
    access: Access,
    user: Option<String>,
}

/// The events of a run.
#[derive(Debug)]
pub(crate) struct EventStream {
    /// Which run.
    pub(crate) run_id: Option<String>,
    /// The events, as bytes.
    pub(crate) body: Incoming,
}

impl Server {
    /// The server that the options name. Nothing is sent yet.
    pub(crate) fn from_options(options: &Options) -> anyhow::Result<Self> {
        let base = options.url.trim_end_matches('/').to_owned();
        let uri: Uri = base
            .parse()
            .with_context(|| format!("'{base}' is no URL; expected http://host:port"))?;
        if uri.scheme_str() != Some("http") || uri.host().is_none() {
            bail!("'{base}' cannot be used: this command speaks http://host:port only");
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        Ok(Self {
            base,
            key: key(options)?,
            client: Client::builder(TokioExecutor::new()).build(connector),
        })
    }

    /// Calls the API; `Null` for an answer without a body.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        Ok(self.call_with_headers(method, path, body).await?.1)
    }

    /// The same, with the answer's headers.
    pub(crate) async fn call_with_headers(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(http::HeaderMap, Value)> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header("x-api-key", self.key.clone())
            .header(header::CONTENT_TYPE, "application/json");
        let sent = body.map_or_else(empty, |body| whole(body.to_string()));
        let response = self.send(request.body(sent)?).await?;
        let (head, body) = response.into_parts();
        Ok((head.headers, read_json(body).await?))
    }

    /// Opens a stream of events, after the one that is named.
    pub(crate) async fn events(
        &self,
        path: &str,
        method: Method,
        body: Option<&Value>,
        last_event_id: Option<&str>,
    ) -> anyhow::Result<EventStream> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header("x-api-key", self.key.clone())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "text/event-stream");
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        let sent = body.map_or_else(empty, |body| whole(body.to_string()));
        let response = self.send(request.body(sent)?).await?;
        let run_id = response.headers().get("x-run-id");
        let run_id = run_id
            .and_then(|id| id.to_str().ok())
            .map(ToOwned::to_owned);
        Ok(EventStream {
            run_id,
            body: response.into_body(),
        })
    }

    /// Opens the data plane of a running sandbox, acting as `user` in it.
    pub(crate) async fn data_plane(
        &self,
        sandbox: &str,
        user: Option<&str>,
    ) -> anyhow::Result<DataPlane> {
        let sandbox = segment(sandbox);
        let found = self
            .call(Method::GET, &format!("/sandboxes/{sandbox}"), None)
            .await?;
        // Only `connect` tells the traffic token; with no time asked for it changes nothing else.
        let is_guarded = found["network"]["allowPublicTraffic"] == false;
        let found = if is_guarded {
            let path = format!("/v2/sandboxes/{sandbox}/connect");
            let body = serde_json::json!({ "timeout": 0 });
            self.call(Method::POST, &path, Some(&body)).await?
        } else {
            found
        };
        Ok(DataPlane {
            server: self.clone(),
            access: serde_json::from_value(found)
                .context("the server's answer is not understood")?,
            user: user.map(ToOwned::to_owned),
        })
    }

    async fn send(&self, request: Request<Sent>) -> anyhow::Result<Response<Incoming>> {
        let response =
            self.client
                .request(request)
                .await
                .map_err(|source| ServerError::Unreachable {
                    url: self.base.clone(),
                    source,
                })?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(refusal(response).await.into())
    }
}

impl DataPlane {
    /// A request for `path` on `port`; to be completed and sent by [`Self::send`].
    pub(crate) fn request(&self, port: u16, method: Method, path: &str) -> request::Builder {
        // By host, not by headers: those are trusted only where the server's name is an address.
        let domain = self.access.domain.as_deref().unwrap_or("localhost");
        let host = format!("{port}-{}.{domain}", self.access.sandbox_id);
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.server.base))
            .header(header::HOST, host)
            .header("x-access-token", &self.access.envd_access_token);
        if let Some(token) = &self.access.traffic_access_token {
            request = request.header("e2b-traffic-access-token", token);
        }
        if let Some(user) = &self.user {
            use base64::{Engine as _, engine::general_purpose::STANDARD};
            let credentials = STANDARD.encode(format!("{user}:"));
            request = request.header(header::AUTHORIZATION, format!("Basic {credentials}"));
        }
        request
    }

    pub(crate) async fn send(&self, request: Request<Sent>) -> anyhow::Result<Response<Incoming>> {
        self.server.send(request).await
    }

    /// A unary call of one of the agent's services.
    pub(crate) async fn call(&self, procedure: &str, message: &Value) -> anyhow::Result<Value> {
        let request = self
            .request(AGENT_PORT, Method::POST, procedure)
            .header(header::CONTENT_TYPE, "application/json")
            .header("connect-protocol-version", "1")
            .body(whole(message.to_string()))?;
        read_json(self.send(request).await?.into_body()).await
    }
}

/// A path with a query to be completed.
pub(crate) fn with_query(path: &str) -> url::form_urlencoded::Serializer<'static, String> {
    let start = format!("{path}?");
    let length = start.len();
    url::form_urlencoded::Serializer::for_suffix(start, length)
}

/// A path segment, percent-encoded.
pub(crate) fn segment(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

pub(crate) fn whole(bytes: impl Into<Bytes>) -> Sent {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed()
}

pub(crate) fn empty() -> Sent {
    whole(Bytes::new())
}

fn key(options: &Options) -> anyhow::Result<HeaderValue> {
    let text = match &options.api_key {
        Some(key) => key.clone(),
        None => {
            let path = options.data_dir.join(DEFAULT_KEY_FILE);
            std::fs::read_to_string(&path).with_context(|| {
                format!(
                    "there is no API key: {} cannot be read\n  give one by --api-key or \
                     SANDHOLD_API_KEY, or the server's data directory by --data-dir",
                    path.display()
                )
            })?
        }
    };
    let mut value = HeaderValue::from_str(text.trim())
        .context("the API key holds characters that no key has")?;
    value.set_sensitive(true);
    Ok(value)
}

async fn read_all(body: Incoming) -> anyhow::Result<Bytes> {
    let read = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
    match read {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) => bail!("the answer broke off: {error}"),
    }
}

async fn read_json(body: Incoming) -> anyhow::Result<Value> {
    let bytes = read_all(body).await?;
    if bytes.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&bytes).context("the server's answer is not understood")
}

/// Reads why the server said no; its API, the gateway and the agent all say it a little otherwise.
async fn refusal(response: Response<Incoming>) -> ServerError {
    let status = response.status();
    let bytes = read_all(response.into_body()).await.unwrap_or_default();
    let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let text = |field: &str| body[field].as_str().map(ToOwned::to_owned);
    let plain = String::from_utf8_lossy(&bytes).trim().to_owned();
    let message = text("message")
        .or_else(|| (!plain.is_empty() && body.is_null()).then_some(plain))
        .unwrap_or_else(|| format!("the server answered {status}"));
    ServerError::Refused {
        status: status.as_u16(),
        code: text("error_code")
            .or_else(|| text("code"))
            .unwrap_or_default(),
        message,
    }
}
