//! Runs: begin, attach, look, cancel (R-G1, R-G3).
//!
//! ```text
//!   POST ─▶ begun, or refused with an error ─▶ the stream of its events, from the first
//!   GET …/events, Last-Event-ID ─────────────▶ the stream, from the next
//! ```
//!
//! A stream reads the run's log as fast as its client reads the stream. A client that goes away ends
//! its stream and nothing else.

use std::{convert::Infallible, time::Duration};

use axum::{
    Json,
    extract::State,
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures::{Stream, StreamExt as _, stream};
use http::{HeaderName, HeaderValue, StatusCode};
use sandhold_books::runs::Entry;
use sandhold_governor::ids::{Bucket, RunId};
use sandhold_governor_driver::{Cancelled, DeployedPlatform, Governor, RunInfo, RunRefused};
use tokio::sync::OwnedSemaphorePermit;

use super::{check_bucket, governor, may_act_in, own_bucket, policy_of, template_of};
use crate::{
    ApiState,
    auth::Caller,
    error::{ApiError, ErrorBody},
    request::{JsonBody, LargeJsonBody, Query, Segment, text_header},
    wire::{
        governor::{parsed, required},
        runs::{CancelBody, CancelledBody, RunAskBody, RunBody, is_over},
    },
};

/// How long a look at a log waits for something new.
const EVENTS_WAIT: Duration = Duration::from_secs(30);
/// How often a quiet stream says that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

static LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
static RUN_ID: HeaderName = HeaderName::from_static("x-run-id");

/// Begins a run and streams its events. With the `run_id` of a run that there is, attaches to it.
#[utoipa::path(
    post,
    path = "/v1/sandbox-runs",
    request_body = RunAskBody,
    responses(
        (status = 200, description = "Its events: started, progress, completed, error", content_type = "text/event-stream", body = String),
        (status = 400, description = "A field is not what it should be", body = ErrorBody),
        (status = 403, description = "Another tenant's, or another owner's lease", body = ErrorBody),
        (status = 404, description = "Unknown bucket or template", body = ErrorBody),
        (status = 409, description = "The lease is sealed, the sandbox has a run, the name is taken", body = ErrorBody),
        (status = 413, description = "Larger than a run may be", body = ErrorBody),
        (status = 503, description = "No room within the time to wait, or not now", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn begin(
    State(state): State<ApiState>,
    caller: Caller,
    LargeJsonBody(body): LargeJsonBody<RunAskBody>,
) -> Result<Response, ApiError> {
    let governor = governor(&state)?;
    let bucket = body.bucket(&own_bucket(&caller))?;
    check_bucket(&caller, &bucket)?;
    let defaults = policy_of(governor, &caller, &bucket).await?.runs;
    let template = |bucket: &Bucket, name: String| template_of(&state, governor, bucket, name);
    let ask = body.checked(bucket.clone(), &defaults, &state.settings.limits, template)?;
    let reader = reader(&state)?;
    let run = governor.start_run(ask).await;
    let run = run.map_err(|refused| match refused {
        RunRefused::UnknownBucket => ApiError::BucketNotFound(bucket),
        other => refusal(other),
    })?;
    Ok(events_of(governor.clone(), run, 0, reader))
}

fn refusal(refused: RunRefused) -> ApiError {
    match refused {
        RunRefused::Store(error) => ApiError::Books(error),
        RunRefused::TooMany => ApiError::TooMany("as many runs as may be are executed here"),
        RunRefused::LeaseOfAnother => ApiError::Forbidden("the lease is another owner's"),
        RunRefused::NameTaken => ApiError::Conflict("there is another run of that name".to_owned()),
        RunRefused::Busy => ApiError::Conflict("the owner's sandbox has a run already".to_owned()),
        RunRefused::NoPlace(limit) => ApiError::NoPlace(limit),
        RunRefused::Stale { current } => ApiError::StaleLease { current },
        RunRefused::Unavailable(why) => ApiError::Unavailable(why),
        RunRefused::UnknownBucket => ApiError::Unavailable("the bucket was never set"),
    }
}

/// A place among those who read events.
fn reader(state: &ApiState) -> Result<OwnedSemaphorePermit, ApiError> {
    let place = state.event_readers.clone().try_acquire_owned();
    place.map_err(|_| ApiError::TooMany("too many streams of events are open"))
}

/// The run, if the caller may know of it.
async fn visible(
    governor: &Governor<DeployedPlatform>,
    caller: &Caller,
    id: String,
) -> Result<RunInfo, ApiError> {
    let none = || ApiError::RunNotFound(id.clone());
    let run: RunId = id.parse().map_err(|_| none())?;
    let info = governor.run(&run).await?.ok_or_else(none)?;
    let bucket = info.head.bucket().ok_or_else(none)?;
    if may_act_in(caller, &bucket) {
        Ok(info)
    } else {
        Err(none())
    }
}

/// How a run is.
#[utoipa::path(
    get,
    path = "/v1/sandbox-runs/{id}",
    params(("id" = String, Path)),
    responses(
        (status = 200, description = "The run", body = RunBody),
        (status = 404, description = "No such run (any more)", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn get(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(id): Segment,
) -> Result<Json<RunBody>, ApiError> {
    let info = visible(governor(&state)?, &caller, id).await?;
    Ok(Json(RunBody::of(info)))
}

/// The events of a run, after the one that `Last-Event-ID` names; from the first without it.
#[utoipa::path(
    get,
    path = "/v1/sandbox-runs/{id}/events",
    params(
        ("id" = String, Path),
        ("Last-Event-ID" = Option<u64>, Header, description = "The last event that was read"),
        ("after" = Option<u64>, Query, description = "The same, where headers cannot be set"),
    ),
    responses(
        (status = 200, description = "Its events", content_type = "text/event-stream", body = String),
        (status = 400, description = "Not the number of an event", body = ErrorBody),
        (status = 404, description = "No such run (any more)", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn events(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(id): Segment,
    query: Query,
    headers: http::HeaderMap,
) -> Result<Response, ApiError> {
    let governor = governor(&state)?;
    let info = visible(governor, &caller, id).await?;
    let given = text_header(&headers, &LAST_EVENT_ID).or_else(|| query.first("after"));
    let after = match given {
        None | Some("") => 0,
        Some(text) => text
            .parse()
            .ok()
            .filter(|after| *after <= info.last)
            .ok_or_else(|| {
                ApiError::invalid("Last-Event-ID", "must be the number of an event of the run")
            })?,
    };
    let reader = reader(&state)?;
    Ok(events_of(governor.clone(), info.run, after, reader))
}

/// Asks for the end of a run. Its last event tells when it has ended.
#[utoipa::path(
    post,
    path = "/v1/sandbox-runs/{id}/cancel",
    params(("id" = String, Path)),
    request_body = CancelBody,
    responses(
        (status = 202, description = "It is asked to end", body = CancelledBody),
        (status = 200, description = "It has ended before", body = CancelledBody),
        (status = 400, description = "Owner or lease is missing", body = ErrorBody),
        (status = 404, description = "No such run of that owner", body = ErrorBody),
        (status = 409, description = "It is under another lease", body = ErrorBody),
        (status = 503, description = "Another server still gets it a sandbox", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn cancel(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(id): Segment,
    JsonBody(body): JsonBody<CancelBody>,
) -> Result<(StatusCode, Json<CancelledBody>), ApiError> {
    let governor = governor(&state)?;
    let owner = parsed("owner_id", &required("owner_id", body.owner_id)?)?;
    let lease = parsed("lease_id", &required("lease_id", body.lease_id)?)?;
    let info = visible(governor, &caller, id.clone()).await?;
    match governor.cancel_run(&info.run, &owner, &lease).await? {
        Cancelled::Asked => Ok((
            StatusCode::ACCEPTED,
            Json(CancelledBody { cancelled: true }),
        )),
        Cancelled::EndedBefore => Ok((StatusCode::OK, Json(CancelledBody { cancelled: false }))),
        Cancelled::TooEarly => Err(ApiError::Unavailable("its sandbox is being made elsewhere")),
        Cancelled::Unknown => Err(ApiError::RunNotFound(id)),
        Cancelled::Stale { current } => Err(ApiError::StaleLease { current }),
    }
}

fn events_of(
    governor: Governor<DeployedPlatform>,
    run: RunId,
    after: u64,
    reader: OwnedSemaphorePermit,
) -> Response {
    let name = HeaderValue::from_str(run.as_str());
    let events = stream_of(governor, run, after).map(move |event| {
        let _reader = &reader;
        Ok::<_, Infallible>(event)
    });
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    if let Ok(name) = name {
        response.headers_mut().insert(RUN_ID.clone(), name);
    }
    response
}

/// Ends after the last event, or when the log cannot be read; whoever reads attaches again then.
fn stream_of(
    governor: Governor<DeployedPlatform>,
    run: RunId,
    after: u64,
) -> impl Stream<Item = Event> {
    let batches = stream::unfold(Some(after), move |after| {
        let (governor, run) = (governor.clone(), run.clone());
        async move {
            let after = after?;
            match governor.run_events(&run, after, EVENTS_WAIT).await {
                Ok((_, ending)) if is_over(ending) => None,
                Ok((entries, _)) => {
                    let next = after + entries.len() as u64;
                    Some((numbered(after, entries), Some(next)))
                }
                Err(error) => {
                    tracing::warn!(%error, %run, "a stream of events ends early");
                    None
                }
            }
        }
    });
    batches.flat_map(stream::iter)
}

fn numbered(after: u64, entries: Vec<Entry>) -> Vec<Event> {
    let event = |(id, entry): (u64, Entry)| {
        let event = Event::default().id(id.to_string()).event(entry.kind);
        event.data(entry.data)
    };
    (after + 1..).zip(entries).map(event).collect()
}
