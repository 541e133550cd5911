//! Metrics, logs and events.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use sandhold_platform::{LogLine, SandboxView, TimeRange};

use super::sandboxes::{find, find_any, within};
use crate::{
    ApiState,
    auth::Caller,
    error::{ApiError, ErrorBody},
    request::{Meta, Query, Segment},
    wire::observe::{
        EventsBody, LogQuery, LogsBody, ManyMetricsBody, MetricBody, SecondLogsBody, sandbox_ids,
        time_range,
    },
};

/// Log lines that are looked through for one answer.
const LINES_READ_MAX: usize = 10_000;

/// `GET /sandboxes/{id}/metrics`
pub(crate) async fn metrics(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    query: Query,
) -> Result<Json<Vec<MetricBody>>, ApiError> {
    let (view, _) = find(&state, &caller, &id)?;
    let range = time_range(&query)?;
    let deadline = meta.deadline(state.settings.budgets.other);
    let reading = state.platform.metrics(&view.id, range);
    let samples = within(deadline, "reading metrics", reading).await?;
    Ok(Json(samples.iter().map(MetricBody::of).collect()))
}

/// `GET /sandboxes/metrics`: the newest sample of each; those that are not the caller's are left out.
pub(crate) async fn metrics_of_many(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    query: Query,
) -> Result<Json<ManyMetricsBody>, ApiError> {
    let deadline = meta.deadline(state.settings.budgets.other);
    let mut sandboxes = BTreeMap::new();
    for id in sandbox_ids(&query)? {
        let Ok((view, _)) = find(&state, &caller, id) else {
            continue;
        };
        let reading = state.platform.metrics(&view.id, TimeRange::default());
        // A sandbox that ended just now has none.
        if let Ok(samples) = within(deadline, "reading metrics", reading).await
            && let Some(newest) = samples.last()
        {
            sandboxes.insert(id.to_owned(), MetricBody::of(newest));
        }
    }
    Ok(Json(ManyMetricsBody { sandboxes }))
}

async fn lines(
    state: &ApiState,
    meta: &Meta,
    view: &SandboxView,
) -> Result<Vec<LogLine>, ApiError> {
    let deadline = meta.deadline(state.settings.budgets.other);
    let reading = state.platform.logs(&view.id, LINES_READ_MAX);
    within(deadline, "reading logs", reading).await
}

/// `GET /sandboxes/{id}/logs`
pub(crate) async fn logs_first(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    query: Query,
) -> Result<Json<LogsBody>, ApiError> {
    let view = find_any(&state, &caller, &id)?;
    let wanted = LogQuery::read_first_generation(&query)?;
    let lines = lines(&state, &meta, &view).await?;
    Ok(Json(wanted.first_generation_body(&lines)))
}

/// `GET /v2/sandboxes/{id}/logs`
pub(crate) async fn logs_second(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    query: Query,
) -> Result<Json<SecondLogsBody>, ApiError> {
    let view = find_any(&state, &caller, &id)?;
    let wanted = LogQuery::read(&query)?;
    let lines = lines(&state, &meta, &view).await?;
    Ok(Json(wanted.body(&lines)))
}

/// `GET /sandboxes/{id}/events`: also of a sandbox that has ended.
#[utoipa::path(
    get,
    path = "/sandboxes/{id}/events",
    params(("id" = String, Path, description = "The sandbox")),
    responses(
        (status = 200, description = "What happened to the sandbox", body = EventsBody),
        (status = 404, description = "No such sandbox of this key", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn events(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
) -> Result<Json<EventsBody>, ApiError> {
    let view = find_any(&state, &caller, &id)?;
    let deadline = meta.deadline(state.settings.budgets.other);
    let reading = state.platform.history(&view.id);
    let history = within(deadline, "reading events", reading).await?;
    Ok(Json(EventsBody::of(&view, &history)))
}
