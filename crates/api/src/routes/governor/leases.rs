//! Leases: take, renew, take over, release (R-G6, R-G7).

use axum::{Json, extract::State};
use http::StatusCode;
use sandhold_governor::{
    books::{Answer, Grant, RunDefaults},
    ids::LeaseId,
    tasks::{Outcome, Reused},
};

use super::{check_bucket, governor, may_act_in, own_bucket, policy_of, template_of};
use crate::{
    ApiState,
    auth::Caller,
    error::{ApiError, ErrorBody},
    request::JsonBody,
    wire::{
        bucket::wanted_template,
        governor::{HeartbeatBody, HolderBody, LeaseAskBody, LeaseBody, LeasesBody, ReleasedBody},
    },
};

/// A sandbox for an owner: its own, if it has a live lease with the same template, or a new one. The
/// same `lease_id` again is a renewal; another one takes the sandbox over, and the old one is sealed.
#[utoipa::path(
    post,
    path = "/v1/leases",
    request_body = LeaseAskBody,
    responses(
        (status = 200, description = "The owner's sandbox", body = LeaseBody),
        (status = 201, description = "A new sandbox", body = LeaseBody),
        (status = 400, description = "A field is not what it should be", body = ErrorBody),
        (status = 403, description = "Another tenant's namespace or env", body = ErrorBody),
        (status = 404, description = "Unknown bucket or template", body = ErrorBody),
        (status = 409, description = "The lease is sealed", body = ErrorBody),
        (status = 503, description = "No room within the time to wait, or not now", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn take(
    State(state): State<ApiState>,
    caller: Caller,
    JsonBody(body): JsonBody<LeaseAskBody>,
) -> Result<(StatusCode, Json<LeaseBody>), ApiError> {
    let governor = governor(&state)?;
    let ttl = body.ttl()?;
    let holder = body.holder().checked(&own_bucket(&caller))?;
    check_bucket(&caller, &holder.bucket)?;
    // Only what is not named by an ID needs to be looked up.
    let defaults = match body.template_id {
        Some(_) => RunDefaults::default(),
        None => policy_of(governor, &caller, &holder.bucket).await?.runs,
    };
    let reference = wanted_template(body.template, body.template_id, &defaults)?;
    let template = template_of(&state, governor, &holder.bucket, reference)?;
    let lease = match holder.lease {
        Some(lease) => lease,
        None => governor.new_lease().ok_or(ApiError::Panicked)?,
    };
    let ask = || {
        governor.acquire(
            holder.bucket.clone(),
            holder.owner.clone(),
            lease.clone(),
            template.clone(),
            ttl,
        )
    };
    let mut outcome = ask().await;
    let is_own = holder.bucket == own_bucket(&caller);
    if is_own && outcome == Outcome::Unavailable("unknown bucket") {
        // The first use of a key sets its bucket to the default of its env.
        governor.ensure_bucket(&holder.bucket).await?;
        outcome = ask().await;
    }
    match outcome {
        Outcome::Leased { grant, reused } => {
            let status = match reused {
                Reused::Yes => StatusCode::OK,
                Reused::No => StatusCode::CREATED,
            };
            Ok((status, Json(LeaseBody::of(&grant, &lease, reused))))
        }
        Outcome::Stale { current } => Err(ApiError::StaleLease { current }),
        Outcome::CapacityExceeded(limit) => Err(ApiError::NoPlace(limit)),
        Outcome::Unavailable("unknown bucket") => Err(ApiError::BucketNotFound(holder.bucket)),
        Outcome::Unavailable(why) => Err(ApiError::Unavailable(why)),
        _ => Err(ApiError::Panicked),
    }
}

/// The holder is alive: its lease is renewed.
#[utoipa::path(
    post,
    path = "/v1/lease-heartbeats",
    request_body = HeartbeatBody,
    responses(
        (status = 200, description = "Renewed", body = LeaseBody),
        (status = 400, description = "A field is not what it should be", body = ErrorBody),
        (status = 403, description = "Another tenant's namespace or env", body = ErrorBody),
        (status = 404, description = "No such lease", body = ErrorBody),
        (status = 409, description = "Another generation has the sandbox", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn beat(
    State(state): State<ApiState>,
    caller: Caller,
    JsonBody(body): JsonBody<HeartbeatBody>,
) -> Result<Json<LeaseBody>, ApiError> {
    let governor = governor(&state)?;
    let generation = body.generation()?;
    let holder = body.holder().checked(&own_bucket(&caller))?;
    check_bucket(&caller, &holder.bucket)?;
    let lease = holder.named_lease()?;
    let answer = governor
        .heartbeat(holder.bucket, holder.owner, lease.clone(), generation)
        .await?;
    let grant = granted(answer, &lease)?;
    Ok(Json(LeaseBody::of(&grant, &lease, Reused::Yes)))
}

fn granted(answer: Answer, lease: &LeaseId) -> Result<Grant, ApiError> {
    match answer {
        Answer::Granted(grant) => Ok(grant),
        Answer::Stale { current } => Err(ApiError::StaleLease { current }),
        Answer::BeingMade => Err(ApiError::Unavailable("the sandbox is still being made")),
        Answer::Recovering => Err(ApiError::Unavailable("the books are being settled")),
        _ => Err(ApiError::LeaseNotFound(lease.clone())),
    }
}

/// The holder is done. Only an exact match with the current generation ends the sandbox; any other
/// seals that one lease and nothing else (R-G7).
#[utoipa::path(
    post,
    path = "/v1/lease-releases",
    request_body = HolderBody,
    responses(
        (status = 202, description = "Released; the sandbox is removed now", body = ReleasedBody),
        (status = 400, description = "A field is not what it should be", body = ErrorBody),
        (status = 403, description = "Another tenant's namespace or env", body = ErrorBody),
        (status = 404, description = "The owner never had a lease", body = ErrorBody),
        (status = 409, description = "Not the current generation: sealed", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn release(
    State(state): State<ApiState>,
    caller: Caller,
    JsonBody(body): JsonBody<HolderBody>,
) -> Result<(StatusCode, Json<ReleasedBody>), ApiError> {
    let governor = governor(&state)?;
    let holder = body.checked(&own_bucket(&caller))?;
    check_bucket(&caller, &holder.bucket)?;
    let lease = holder.named_lease()?;
    match governor
        .release(holder.bucket, holder.owner, lease.clone())
        .await?
    {
        Answer::Released { .. } => {
            Ok((StatusCode::ACCEPTED, Json(ReleasedBody { released: true })))
        }
        Answer::Stale { current } => Err(ApiError::StaleLease { current }),
        _ => Err(ApiError::LeaseNotFound(lease)),
    }
}

/// The leases in force of the key's bucket; an administrator sees all.
#[utoipa::path(
    get,
    path = "/v1/leases",
    responses((status = 200, description = "The leases", body = LeasesBody)),
    security(("api_key" = []))
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    caller: Caller,
) -> Result<Json<LeasesBody>, ApiError> {
    let view = governor(&state)?.view().await?;
    Ok(Json(LeasesBody::of(&view, |bucket| {
        may_act_in(&caller, bucket)
    })))
}
