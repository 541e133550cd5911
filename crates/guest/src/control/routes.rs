//! The routes of the host's calls.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Extension, State},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use http::StatusCode;
use sandhold_agent_proto::control::{
    Activity, InitRequest, PATH_ACTIVITY, PATH_INIT, PATH_QUIESCE, PATH_READY, PATH_RESTART,
    PATH_TUNNEL, Waiting,
};

use crate::{
    activity::ActivityMeter,
    children::Children,
    control::{
        init::{InitError, SystemIdentity, begin_life},
        readiness::Readiness,
        tunnel::tunnel,
    },
    http_error::HttpError,
    interpreter::Interpreter,
    process::table::ProcessTable,
    server::{ConnectionHandle, Connections},
    state::SandboxState,
};

/// The largest `/init`.
const INIT_BYTES_MAX: usize = 1 << 20;
/// How long connections may take to close. They are dropped, not asked, so this is never reached.
const CLOSE_MAX: Duration = Duration::from_millis(400);

/// What the host's calls work with. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Control {
    /// The sandbox.
    pub state: Arc<SandboxState>,
    /// Every process there is.
    pub children: Children,
    /// Those that clients started.
    pub table: ProcessTable,
    /// Its interpreter.
    pub interpreter: Interpreter,
    /// Its connections.
    pub connections: Connections,
    /// How busy it is.
    pub activity: ActivityMeter,
    /// What it still waits for.
    pub readiness: Readiness,
    /// Its name and clock.
    pub identity: SystemIdentity,
}

/// The routes.
pub fn router(control: Control) -> Router {
    Router::new()
        .route(
            PATH_INIT,
            post(init).layer(DefaultBodyLimit::max(INIT_BYTES_MAX)),
        )
        .route(PATH_READY, get(ready))
        .route(PATH_QUIESCE, post(quiesce))
        .route(PATH_RESTART, post(restart))
        .route(PATH_ACTIVITY, get(activity))
        .route(PATH_TUNNEL, get(tunnel))
        .with_state(control)
}

async fn init(
    State(control): State<Control>,
    Extension(connection): Extension<ConnectionHandle>,
    body: Bytes,
) -> Response {
    let request = match read_init(&body) {
        Ok(request) => request,
        Err(error) => return HttpError::bad_request(error.to_string()).into_response(),
    };
    let begun = begin_life(
        request,
        &control.state,
        &control.identity,
        &control.interpreter,
    )
    .await;
    match begun {
        Ok(()) => {
            control.connections.close_others(Some(connection));
            StatusCode::NO_CONTENT.into_response()
        }
        Err(error @ InitError::Field { .. }) => {
            HttpError::bad_request(error.to_string()).into_response()
        }
        Err(error) => HttpError::internal(error.to_string()).into_response(),
    }
}

/// An empty body is an empty object; a list is none, whatever the derived reader may think.
fn read_init(body: &[u8]) -> Result<InitRequest, serde_json::Error> {
    if body.is_empty() {
        return Ok(InitRequest::default());
    }
    let object: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(body)?;
    serde_json::from_value(object.into())
}

async fn ready(State(control): State<Control>) -> Response {
    let waiting_for = control.readiness.waiting_for().await;
    if waiting_for.is_empty() {
        return StatusCode::NO_CONTENT.into_response();
    }
    (
        StatusCode::SERVICE_UNAVAILABLE,
        Json(Waiting { waiting_for }),
    )
        .into_response()
}

/// Leaves no connection open but the caller's, because memory is about to be captured. What is in
/// files needs no care: the engine captures its caches along with them.
async fn quiesce(
    State(control): State<Control>,
    Extension(connection): Extension<ConnectionHandle>,
) -> Response {
    control.connections.close_others(Some(connection));
    let others_gone = control.connections.others_gone(Some(connection));
    match tokio::time::timeout(CLOSE_MAX, others_gone).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(_) => HttpError::internal("a connection does not close").into_response(),
    }
}

async fn restart(
    State(control): State<Control>,
    Extension(connection): Extension<ConnectionHandle>,
) -> Response {
    control.connections.close_others(Some(connection));
    match control.restart().await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => HttpError::internal(error.to_string()).into_response(),
    }
}

async fn activity(State(control): State<Control>) -> Json<Activity> {
    let processes = control.table.client_processes();
    Json(Activity {
        processes: processes.all,
        background_processes: processes.unread,
        executions: control.interpreter.running_executions(),
        streams: control.activity.streams(),
        last_activity_unix_ms: control.activity.last_unix_ms(),
    })
}
