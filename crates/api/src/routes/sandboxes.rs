//! Finding, listing and removing sandboxes, and what they may reach.

use std::{future::Future, sync::Arc, time::Instant};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sandhold_platform::{PlatformError, SandboxView};
use sandhold_types::{Deadline, SandboxId, SandboxState};

use super::governor::direct;
use crate::{
    ApiState,
    auth::Caller,
    error::ApiError,
    page::Position,
    request::{JsonBody, Meta, Query, Segment},
    wire::{
        filter::{Filter, Order, page_length},
        network::NetworkBody,
        sandbox::{ListedSandbox, SandboxDetail, WireState, visible_state},
    },
};

pub(crate) const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");
pub(crate) const TOTAL_RUNNING: HeaderName = HeaderName::from_static("x-total-running");

/// How long after its deadline an operation is cut off, should the platform not have kept to it.
pub(crate) const OVERRUN: std::time::Duration = std::time::Duration::from_secs(5);

/// A sandbox of the caller in whatever state, ended ones included.
pub(crate) fn find_any(
    state: &ApiState,
    caller: &Caller,
    text: &str,
) -> Result<Arc<SandboxView>, ApiError> {
    let not_found = || ApiError::SandboxNotFound {
        id: text.chars().take(64).collect(),
        ended: None,
    };
    // The oldest clients add `-` and their client identifier.
    let id = text.split('-').next().unwrap_or(text);
    let id: SandboxId = id.parse().map_err(|_| not_found())?;
    let view = state.platform.get(&id);
    view.filter(|view| caller.owns(view)).ok_or_else(not_found)
}

/// A sandbox of the caller that is there for clients, and the state it is told with.
pub(crate) fn find(
    state: &ApiState,
    caller: &Caller,
    text: &str,
) -> Result<(Arc<SandboxView>, WireState), ApiError> {
    let view = find_any(state, caller, text)?;
    match visible_state(view.state) {
        Some(told) if view.ended.is_none() => Ok((view, told)),
        _ => Err(gone(&view)),
    }
}

/// Not found, and why (R-L12).
fn gone(view: &SandboxView) -> ApiError {
    ApiError::SandboxNotFound {
        id: view.id.to_string(),
        ended: view.ended.as_ref().map(|ended| ended.reason.to_string()),
    }
}

/// Waits for the platform, but not for ever should it not keep to the deadline.
pub(crate) async fn within<T>(
    deadline: Deadline,
    step: &'static str,
    work: impl Future<Output = Result<T, PlatformError>>,
) -> Result<T, ApiError> {
    let cut_off = deadline.instant() + OVERRUN;
    match tokio::time::timeout_at(cut_off.into(), work).await {
        Ok(done) => done.map_err(ApiError::from),
        Err(_) => Err(ApiError::Deadline { step }),
    }
}

/// `GET /sandboxes/{id}`
pub(crate) async fn get(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
) -> Result<Json<SandboxDetail>, ApiError> {
    let (view, told) = find(&state, &caller, &id)?;
    let detail = SandboxDetail::of(&view, told, meta.dialect, &state.settings);
    Ok(Json(detail))
}

/// `GET /v2/sandboxes`
pub(crate) async fn list(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    query: Query,
) -> Result<Response, ApiError> {
    let filter = Filter::read(&query)?;
    let length = page_length(&query)?;
    let bucket = caller.bucket();
    let question = filter.question(bucket.namespace.as_str(), bucket.env.as_str());
    let after = state
        .page_key
        .open_parameter(question, query.first("nextToken"))?;
    let mut wanted = matching(&state, &caller, &filter);
    if let Some(after) = after {
        wanted.retain(|(view, _)| comes_after(&position(view), &after, filter.order));
    }
    let more = wanted.len() > length;
    wanted.truncate(length);
    let mut headers = HeaderMap::new();
    if let Some((last, _)) = wanted.last().filter(|_| more) {
        let token = state.page_key.seal(question, &position(last));
        if let Ok(token) = HeaderValue::from_str(&token) {
            headers.insert(NEXT_TOKEN, token);
        }
    }
    headers.insert(TOTAL_RUNNING, HeaderValue::from(running(&state, &caller)));
    Ok((headers, Json(bodies(&state, &meta, &wanted))).into_response())
}

/// `GET /sandboxes`: all running ones, in one answer.
pub(crate) async fn list_first(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    query: Query,
) -> Result<Json<Vec<ListedSandbox>>, ApiError> {
    let filter = Filter::read_first_generation(&query)?;
    let wanted = matching(&state, &caller, &filter);
    Ok(Json(bodies(&state, &meta, &wanted)))
}

fn bodies(
    state: &ApiState,
    meta: &Meta,
    wanted: &[(Arc<SandboxView>, WireState)],
) -> Vec<ListedSandbox> {
    let body = |(view, told): &(Arc<SandboxView>, WireState)| {
        ListedSandbox::of(view, *told, meta.dialect, &state.settings)
    };
    wanted.iter().map(body).collect()
}

fn running(state: &ApiState, caller: &Caller) -> usize {
    let own = |view: &&Arc<SandboxView>| view.state == SandboxState::Running && caller.owns(view);
    state.platform.list().iter().filter(own).count()
}

/// The caller's sandboxes that the filter wants, in its order.
fn matching(
    state: &ApiState,
    caller: &Caller,
    filter: &Filter,
) -> Vec<(Arc<SandboxView>, WireState)> {
    let template = filter.template.as_deref().map(|reference| {
        let found = state
            .templates
            .resolve(&caller.bucket().namespace, reference);
        (reference, found.map(|view| view.id.clone()))
    });
    let from_template = |view: &SandboxView| match &template {
        None => true,
        Some((reference, id)) => {
            view.template.id.as_str() == *reference
                || view.template.alias.as_deref() == Some(*reference)
                || id.as_ref() == Some(&view.template.id)
        }
    };
    let mut wanted: Vec<_> = state
        .platform
        .list()
        .into_iter()
        .filter(|view| caller.owns(view) && from_template(view))
        .filter_map(|view| filter.wants(&view).map(|told| (view, told)))
        .collect();
    wanted.sort_by_cached_key(|(view, _)| position(view));
    if filter.order == Order::NewestFirst {
        wanted.reverse();
    }
    wanted
}

fn position(view: &SandboxView) -> Position<SandboxId> {
    Position {
        started_at: view.started_at,
        id: view.id.clone(),
    }
}

fn comes_after(position: &Position<SandboxId>, other: &Position<SandboxId>, order: Order) -> bool {
    match order {
        Order::OldestFirst => position > other,
        Order::NewestFirst => position < other,
    }
}

/// `DELETE /sandboxes/{id}`
pub(crate) async fn kill(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
) -> Result<StatusCode, ApiError> {
    let view = find_any(&state, &caller, &id)?;
    if view.state == SandboxState::Killed {
        return Err(gone(&view));
    }
    let deadline = meta.deadline(state.settings.budgets.other);
    let killing = state.platform.kill(&view.id, caller.actor(&meta), deadline);
    within(deadline, "removing the sandbox", killing).await?;
    direct::gone(&state, &view.id).await;
    Ok(StatusCode::NO_CONTENT)
}

/// `PUT /sandboxes/{id}/network`: replaces all of it.
pub(crate) async fn change_network(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<NetworkBody>,
) -> Result<StatusCode, ApiError> {
    let (view, _) = find(&state, &caller, &id)?;
    let network = body.network(None, state.settings.limits.network_ranges_max)?;
    let traffic = network.public_traffic.unwrap_or(view.public_traffic);
    if traffic != view.public_traffic {
        let what = String::from("changing allowPublicTraffic of a living sandbox");
        return Err(ApiError::NotSupported(what));
    }
    if network.mask_request_host.is_some() && network.mask_request_host != view.mask_request_host {
        let what = String::from("changing maskRequestHost of a living sandbox");
        return Err(ApiError::NotSupported(what));
    }
    let deadline = meta.deadline(state.settings.budgets.other);
    let actor = caller.actor(&meta);
    let changing = state
        .platform
        .change_egress(&view.id, network.egress, actor, deadline);
    within(deadline, "changing what the sandbox may reach", changing).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Half of what is left: a create may wait this long for its turn and still be carried out.
pub(crate) fn half_way(deadline: Deadline) -> Instant {
    let now = Instant::now();
    now + deadline.remaining(now) / 2
}
