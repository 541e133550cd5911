//! The routes of port 49999 (wire contract section 3).
//!
//! No access token is asked for here: the clients send one on one route only.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use axum::{
    Json, Router,
    body::Body,
    extract::{DefaultBodyLimit, Path, State},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    Shared,
    context::{Context, EXECUTIONS_WAITING_MAX, Execution, describe},
    contexts::ContextError,
    host::StartError,
    language::Language,
    outbox, variables,
};

/// Longer code is refused.
const BODY_BYTES_MAX: usize = 32 << 20;
/// Tells clients that the same request would fail again.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

pub(super) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/health", get(|| async { "OK" }))
        .route("/execute", post(execute))
        .route("/contexts", get(list_contexts).post(create_context))
        .route("/contexts/{id}", delete(remove_context))
        .route("/contexts/{id}/restart", post(restart_context))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(shared)
}

/// Why a request is refused.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("the body is not what this call takes: {0}")]
    Body(serde_json::Error),
    #[error("Only one of context_id or language can be provided")]
    ContextAndLanguage,
    #[error("{0}")]
    Variables(&'static str),
    #[error("'{0}' is not the name of a language")]
    LanguageName(String),
    #[error("the working directory '{0}' is not a directory")]
    Directory(String),
    #[error("Context {0} not found")]
    NoContext(String),
    #[error(transparent)]
    Context(#[from] ContextError),
    #[error("{EXECUTIONS_WAITING_MAX} executions wait in this context already")]
    QueueFull,
    #[error("the context has no kernel: {}", describe(.0))]
    Start(#[from] StartError),
}

impl Refusal {
    fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Body(_) | Self::ContextAndLanguage | Self::Variables(_) => {
                (StatusCode::BAD_REQUEST, "invalid_request")
            }
            Self::LanguageName(_) | Self::Context(ContextError::UnsupportedLanguage { .. }) => {
                (StatusCode::BAD_REQUEST, "unsupported_language")
            }
            Self::Directory(_) => (StatusCode::BAD_REQUEST, "invalid_directory"),
            Self::NoContext(_) => (StatusCode::NOT_FOUND, "context_not_found"),
            Self::Context(ContextError::TooMany) => {
                (StatusCode::TOO_MANY_REQUESTS, "context_limit")
            }
            Self::QueueFull => (StatusCode::TOO_MANY_REQUESTS, "queue_full"),
            Self::Start(_) => (StatusCode::INTERNAL_SERVER_ERROR, "kernel_not_started"),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, code) = self.status_and_code();
        let mut response = match self {
            // The client shows the body of this one as it is.
            Self::NoContext(_) => (status, self.to_string()).into_response(),
            _ => {
                let body = serde_json::json!({
                    "code": status.as_u16(),
                    "error_code": code,
                    "message": self.to_string(),
                });
                (status, Json(body)).into_response()
            }
        };
        // Only time empties a queue; nothing else here mends itself.
        let retry = if code == "queue_full" {
            "true"
        } else {
            "false"
        };
        response
            .headers_mut()
            .insert(SHOULD_RETRY, HeaderValue::from_static(retry));
        response
    }
}

/// Clients send JSON with and without a content type, and nothing at all for an empty object.
fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, Refusal> {
    let body: &[u8] = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(Refusal::Body)
}

fn language_of(name: Option<&str>) -> Result<Language, Refusal> {
    Language::parse(name).ok_or_else(|| {
        let shown: String = name.unwrap_or_default().chars().take(64).collect();
        Refusal::LanguageName(shown)
    })
}

#[derive(Deserialize)]
struct ExecuteRequest {
    code: String,
    #[serde(default)]
    context_id: Option<String>,
    #[serde(default)]
    language: Option<String>,
    #[serde(default)]
    env_vars: Option<BTreeMap<String, String>>,
}

async fn execute(State(shared): State<Arc<Shared>>, body: Bytes) -> Result<Response, Refusal> {
    let request: ExecuteRequest = parse(&body)?;
    let variables = request.env_vars.unwrap_or_default();
    variables::check(&variables).map_err(Refusal::Variables)?;
    let context = match (request.context_id, request.language) {
        (Some(_), Some(_)) => return Err(Refusal::ContextAndLanguage),
        (Some(id), None) if id != "default" => {
            shared.contexts.find(&id).ok_or(Refusal::NoContext(id))?
        }
        (_, language) => {
            let language = language_of(language.as_deref())?;
            shared.contexts.default_of(&shared.host, language, false)?
        }
    };
    let place = context.queue_up().ok_or(Refusal::QueueFull)?;
    let (outbox, answer) = outbox::outbox();
    let execution = Execution {
        code: request.code,
        variables,
    };
    let running = shared.count_execution();
    tokio::spawn(async move {
        context
            .run(&running.shared.host, execution, outbox, place)
            .await;
        drop(running);
    });
    let headers = [
        (header::CONTENT_TYPE, "application/x-ndjson"),
        (header::CACHE_CONTROL, "no-cache"),
        // Proxies that buffer would defeat the streaming.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(answer.into_stream())).into_response())
}

#[derive(Serialize)]
struct ContextView {
    id: String,
    language: String,
    cwd: String,
}

impl From<&Context> for ContextView {
    fn from(context: &Context) -> Self {
        Self {
            id: context.id.clone(),
            language: context.language.as_str().to_owned(),
            cwd: context.cwd.to_string_lossy().into_owned(),
        }
    }
}

async fn list_contexts(State(shared): State<Arc<Shared>>) -> Json<Vec<ContextView>> {
    let contexts = shared.contexts.all();
    Json(contexts.iter().map(|context| (&**context).into()).collect())
}

#[derive(Deserialize)]
struct CreateRequest {
    #[serde(default)]
    language: Option<String>,
    #[serde(default)]
    cwd: Option<String>,
}

async fn create_context(
    State(shared): State<Arc<Shared>>,
    body: Bytes,
) -> Result<Json<ContextView>, Refusal> {
    let request: CreateRequest = parse(&body)?;
    let language = language_of(request.language.as_deref())?;
    let cwd = match request.cwd {
        None => shared.host.default_directory(),
        Some(given) => {
            let path = shared.host.default_directory().join(&given);
            if given.contains('\0') || !path.is_dir() {
                return Err(Refusal::Directory(given.chars().take(256).collect()));
            }
            path
        }
    };
    let context = shared.contexts.create(&shared.host, language, cwd)?;
    // The client may hang up while the kernel starts; the context must not be left half made.
    let starting = Arc::clone(&shared);
    let task = tokio::spawn(async move {
        let started = context.start(&starting.host).await;
        if started.is_err() {
            starting.contexts.remove(&context.id);
            context.remove().await;
        }
        started.map(|()| Json(ContextView::from(&*context)))
    });
    match task.await {
        Ok(started) => Ok(started?),
        Err(error) => Err(StartError::Files {
            path: PathBuf::from("/"),
            source: std::io::Error::other(error),
        }
        .into()),
    }
}

async fn remove_context(
    State(shared): State<Arc<Shared>>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    let context = shared.contexts.remove(&id).ok_or(Refusal::NoContext(id))?;
    context.remove().await;
    Ok(StatusCode::NO_CONTENT)
}

async fn restart_context(
    State(shared): State<Arc<Shared>>,
    Path(id): Path<String>,
) -> Result<Json<ContextView>, Refusal> {
    let context = shared.contexts.find(&id).ok_or(Refusal::NoContext(id))?;
    context.restart(&shared.host).await?;
    Ok(Json(ContextView::from(&*context)))
}
