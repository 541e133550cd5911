//! Renewals, sleep and waking. Each renewal tells the new end, so that a caller that cannot renew
//! can stop (R-L11). Nothing is decided here from a state that was read: the platform decides under
//! the sandbox's lock (R-L2).

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sandhold_platform::{LifetimeChange, PlatformError, SandboxView, Woken};

use super::sandboxes::{find, within};
use crate::{
    ApiState, Dialect,
    auth::Caller,
    error::ApiError,
    request::{JsonBody, Meta, Segment},
    wire::{
        lifetime::{
            ConnectBody, ConnectRules, PauseBody, RefreshBody, RouteGeneration, TimeoutBody,
        },
        sandbox::SandboxBody,
    },
};

/// Carries the new end (RFC 3339) where an answer has no body.
pub(crate) const END_AT: HeaderName = HeaderName::from_static("x-sandbox-end-at");

async fn change(
    state: &ApiState,
    caller: &Caller,
    meta: &Meta,
    view: &SandboxView,
    change: LifetimeChange,
) -> Result<Arc<SandboxView>, ApiError> {
    let deadline = meta.deadline(state.settings.budgets.other);
    let actor = caller.actor(meta);
    let changing = state
        .platform
        .change_lifetime(&view.id, change, actor, deadline);
    within(deadline, "changing the sandbox's lifetime", changing).await
}

fn new_end(view: &SandboxView) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Ok(end) = HeaderValue::from_str(&view.end_at().to_rfc3339()) {
        headers.insert(END_AT, end);
    }
    headers
}

/// `POST /sandboxes/{id}/timeout`
pub(crate) async fn set_timeout(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<TimeoutBody>,
) -> Result<Response, ApiError> {
    let (view, _) = find(&state, &caller, &id)?;
    let wanted = body.change(state.settings.limits.timeout_s_max)?;
    let view = change(&state, &caller, &meta, &view, wanted).await?;
    Ok((StatusCode::NO_CONTENT, new_end(&view)).into_response())
}

/// `POST /sandboxes/{id}/refreshes`
pub(crate) async fn refresh(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<RefreshBody>,
) -> Result<Response, ApiError> {
    let (view, _) = find(&state, &caller, &id)?;
    let view = change(&state, &caller, &meta, &view, body.change()?).await?;
    Ok((StatusCode::NO_CONTENT, new_end(&view)).into_response())
}

/// `POST /sandboxes/{id}/connect`
pub(crate) async fn connect_first(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<ConnectBody>,
) -> Result<Response, ApiError> {
    connect(state, caller, meta, &id, &body, RouteGeneration::First).await
}

/// `POST /v2/sandboxes/{id}/connect`
pub(crate) async fn connect_second(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<ConnectBody>,
) -> Result<Response, ApiError> {
    connect(state, caller, meta, &id, &body, RouteGeneration::Second).await
}

async fn connect(
    state: ApiState,
    caller: Caller,
    meta: Meta,
    id: &str,
    body: &ConnectBody,
    generation: RouteGeneration,
) -> Result<Response, ApiError> {
    let (view, _) = find(&state, &caller, id)?;
    let wanted = body.connect(view.lifetime.clocking, rules(&state, &meta, generation))?;
    let deadline = meta.deadline(state.settings.budgets.sleep);
    let actor = caller.actor(&meta);
    let connecting =
        state
            .platform
            .connect(&view.id, wanted.running, wanted.asleep, actor, deadline);
    let connected = within(deadline, "waking the sandbox", connecting).await;
    let (view, woken) = connected.map_err(|error| overlap(error, &meta, generation))?;
    let status = match woken {
        Woken::Yes => StatusCode::CREATED,
        Woken::No => StatusCode::OK,
    };
    Ok(awake(&state, status, &view))
}

fn rules(state: &ApiState, meta: &Meta, generation: RouteGeneration) -> ConnectRules {
    ConnectRules {
        generation,
        dialect: meta.dialect,
        defaults: state.settings.default_lifetimes,
        seconds_max: state.settings.limits.timeout_s_max,
    }
}

/// CubeSandbox's clients are told of an operation that holds the sandbox by another status (wire
/// contract 1.4).
fn overlap(error: ApiError, meta: &Meta, generation: RouteGeneration) -> ApiError {
    match error {
        ApiError::Platform(PlatformError::Busy {
            id,
            state,
            retry_after,
        }) if (generation, meta.dialect) == (RouteGeneration::First, Dialect::Cube) => {
            ApiError::Overlap {
                id: id.to_string(),
                state,
                retry_after,
            }
        }
        other => other,
    }
}

fn awake(state: &ApiState, status: StatusCode, view: &SandboxView) -> Response {
    let body = Json(SandboxBody::of(view, &state.settings));
    (status, new_end(view), body).into_response()
}

/// `POST /sandboxes/{id}/resume`
pub(crate) async fn resume(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<ConnectBody>,
) -> Result<Response, ApiError> {
    let (view, _) = find(&state, &caller, &id)?;
    let rules = rules(&state, &meta, RouteGeneration::First);
    let wanted = body.resume_only(view.lifetime.clocking, rules)?;
    let deadline = meta.deadline(state.settings.budgets.sleep);
    let actor = caller.actor(&meta);
    let resuming = state.platform.resume(&view.id, wanted, actor, deadline);
    let view = within(deadline, "waking the sandbox", resuming).await?;
    Ok(awake(&state, StatusCode::CREATED, &view))
}

/// `POST /sandboxes/{id}/pause`
pub(crate) async fn pause(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<PauseBody>,
) -> Result<StatusCode, ApiError> {
    let (view, _) = find(&state, &caller, &id)?;
    let deadline = meta.deadline(state.settings.budgets.sleep);
    let actor = caller.actor(&meta);
    let pausing = state
        .platform
        .pause(&view.id, body.pause(), actor, deadline);
    within(deadline, "putting the sandbox to sleep", pausing).await?;
    Ok(StatusCode::NO_CONTENT)
}
