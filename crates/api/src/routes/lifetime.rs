//! Renewals. Each tells the new end, so that a caller that cannot renew can stop (R-L11).

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sandhold_platform::{LifetimeChange, SandboxView};
use sandhold_types::SandboxState;

use super::sandboxes::{find, within};
use crate::{
    ApiState,
    auth::Caller,
    error::ApiError,
    request::{JsonBody, Meta, Segment},
    wire::{
        lifetime::{ConnectBody, RefreshBody, RouteGeneration, TimeoutBody},
        sandbox::{SandboxBody, WireState},
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
    let (view, told) = find(&state, &caller, id)?;
    let wanted = body.change(
        generation,
        meta.dialect,
        state.settings.default_lifetimes,
        state.settings.limits.timeout_s_max,
    )?;
    if told == WireState::Paused {
        return Err(not_running(&view));
    }
    let view = change(&state, &caller, &meta, &view, wanted).await?;
    let body = Json(SandboxBody::of(&view, &state.settings));
    Ok((StatusCode::OK, new_end(&view), body).into_response())
}

/// A paused sandbox cannot be woken yet; one in transition soon is one or the other.
fn not_running(view: &SandboxView) -> ApiError {
    if view.state == SandboxState::Paused {
        return ApiError::NotSupported(String::from("waking a paused sandbox"));
    }
    ApiError::Platform(sandhold_platform::PlatformError::Busy {
        id: view.id.clone(),
        state: view.state,
        retry_after: std::time::Duration::from_secs(2),
    })
}

/// `POST /sandboxes/{id}/resume`
pub(crate) async fn resume(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(id): Segment,
    JsonBody(body): JsonBody<ConnectBody>,
) -> Result<Response, ApiError> {
    let (view, told) = find(&state, &caller, &id)?;
    if body.auto_pause == Some(true) {
        return Err(ApiError::NotSupported(String::from("autoPause")));
    }
    Err(match told {
        WireState::Running => ApiError::AlreadySo {
            id: view.id.to_string(),
            state: SandboxState::Running,
        },
        WireState::Paused => not_running(&view),
    })
}
