//! Snapshots, and going back to them (R-T1, R-T3, R-T5).

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderValue, StatusCode};
use sandhold_platform::{PlatformError, SnapshotView};
use sandhold_types::SnapshotId;

use super::sandboxes::{NEXT_TOKEN, find, within};
use crate::{
    ApiState,
    auth::Caller,
    error::{ApiError, ErrorBody},
    page::Position,
    request::{JsonBody, Meta, Query, Segment},
    wire::{
        filter::page_length,
        travel::{
            LineageBody, RollbackBody, RollbackRequest, SnapshotBody, SnapshotFilter,
            SnapshotRequest, TimelineBody,
        },
    },
};

/// The snapshot of the caller's bucket that `reference` means.
pub(super) fn find_snapshot(
    state: &ApiState,
    caller: &Caller,
    reference: &str,
) -> Option<Arc<SnapshotView>> {
    let bucket = caller.bucket();
    let travel = &state.travel;
    travel.find_snapshot(&bucket.namespace, &bucket.env, reference)
}

fn not_found(reference: &str) -> ApiError {
    let short = reference.chars().take(64).collect();
    ApiError::Platform(PlatformError::SnapshotNotFound(short))
}

/// The caller's snapshots.
fn own(state: &ApiState, caller: &Caller) -> Vec<Arc<SnapshotView>> {
    let bucket = caller.bucket();
    let mut all = state.travel.snapshots();
    all.retain(|view| view.owner.namespace == bucket.namespace && view.owner.env == bucket.env);
    all
}

/// `POST /sandboxes/{id}/snapshots`
pub(crate) async fn take(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<SnapshotRequest>,
) -> Result<Response, ApiError> {
    let (view, _) = find(&state, &caller, &id)?;
    let namespace = caller.bucket().namespace.as_str();
    let wanted = body.wanted(namespace, &state.settings.limits)?;
    let deadline = meta.deadline(state.settings.budgets.travel);
    let actor = caller.actor(&meta);
    let taking = state
        .travel
        .take_snapshot(&view.id, wanted, actor, deadline);
    let taken = within(deadline, "taking the snapshot", taking).await?;
    Ok((StatusCode::CREATED, Json(SnapshotBody::of(&taken))).into_response())
}

/// `GET /snapshots`, newest first.
pub(crate) async fn list(
    State(state): State<ApiState>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let filter = SnapshotFilter::read(&query);
    let length = page_length(&query)?;
    let bucket = caller.bucket();
    let question = filter.question(bucket.namespace.as_str(), bucket.env.as_str());
    let after: Option<Position<SnapshotId>> = state
        .page_key
        .open_parameter(question, query.first("nextToken"))?;
    let mut wanted = own(&state, &caller);
    wanted.retain(|view| filter.wants(view));
    wanted.sort_by_cached_key(|view| std::cmp::Reverse(position(view)));
    if let Some(after) = after {
        wanted.retain(|view| position(view) < after);
    }
    let more = wanted.len() > length;
    wanted.truncate(length);
    let mut headers = HeaderMap::new();
    if let Some(last) = wanted.last().filter(|_| more) {
        let token = state.page_key.seal(question, &position(last));
        if let Ok(token) = HeaderValue::from_str(&token) {
            headers.insert(NEXT_TOKEN, token);
        }
    }
    let bodies: Vec<_> = wanted.iter().map(|view| SnapshotBody::of(view)).collect();
    Ok((headers, Json(bodies)).into_response())
}

fn position(view: &SnapshotView) -> Position<SnapshotId> {
    Position {
        started_at: view.taken_at,
        id: view.id.clone(),
    }
}

/// `GET /snapshots/{id or name:tag}/lineage`: what came from what.
#[utoipa::path(
    get,
    path = "/snapshots/{id}/lineage",
    params(("id" = String, Path, description = "The snapshot, by its ID or a name")),
    responses(
        (status = 200, description = "What it came from and what came from it", body = LineageBody),
        (status = 404, description = "No such snapshot of this key", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn lineage(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(reference): Segment,
) -> Result<Json<LineageBody>, ApiError> {
    let missing = || not_found(&reference);
    let view = find_snapshot(&state, &caller, &reference).ok_or_else(missing)?;
    let mut lineage = state.travel.lineage(&view.id).ok_or_else(missing)?;
    // Whatever it is related to belongs to the same bucket; should that ever not be so, it is not told.
    lineage.sandboxes.retain(|sandbox| caller.owns(sandbox));
    Ok(Json(LineageBody::of(&lineage)))
}

/// `GET /sandboxes/{id}/timeline`: the snapshots that a sandbox can go back to.
#[utoipa::path(
    get,
    path = "/sandboxes/{id}/timeline",
    params(("id" = String, Path, description = "The sandbox")),
    responses(
        (status = 200, description = "Where it stands and what it can go back to", body = TimelineBody),
        (status = 404, description = "No such sandbox of this key", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn timeline(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(id): Segment,
) -> Result<Json<TimelineBody>, ApiError> {
    let (view, _) = find(&state, &caller, &id)?;
    Ok(Json(TimelineBody::of(&view, &own(&state, &caller))))
}

/// `POST /sandboxes/{id}/rollback`
pub(crate) async fn roll_back(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<RollbackRequest>,
) -> Result<Json<RollbackBody>, ApiError> {
    let (view, _) = find(&state, &caller, &id)?;
    let reference = body.snapshot()?;
    let to = find_snapshot(&state, &caller, &reference).ok_or_else(|| not_found(&reference))?;
    let deadline = meta.deadline(state.settings.budgets.travel);
    let actor = caller.actor(&meta);
    let rolling = state.travel.roll_back(&view.id, &to.id, actor, deadline);
    let view = within(deadline, "rolling the sandbox back", rolling).await?;
    Ok(Json(RollbackBody::of(&view, &to.id)))
}
