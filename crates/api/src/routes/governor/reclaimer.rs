//! Why a sandbox lives, what an operator must know, and the reclaimer by hand (R-G13, R-G17).

use axum::{Json, extract::State};
use sandhold_types::SandboxId;

use super::{governor, may_act_in};
use crate::{
    ApiState,
    auth::{Administrator, Caller},
    error::{ApiError, ErrorBody},
    request::Segment,
    wire::governor::{AlarmsBody, RoundBody, VerdictBody},
};

/// Why a sandbox lives, living or dead: its colour, what holds it, and what was done to it.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/verdict",
    params(("id" = String, Path)),
    responses(
        (status = 200, description = "The verdict", body = VerdictBody),
        (status = 404, description = "No such sandbox for this key", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn verdict(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(text): Segment,
) -> Result<Json<VerdictBody>, ApiError> {
    let not_found = || ApiError::SandboxNotFound {
        id: text.chars().take(64).collect(),
        ended: None,
    };
    let id: SandboxId = text.parse().map_err(|_| not_found())?;
    let told = governor(&state)?.explain(&id).await?;
    match told.filter(|(bucket, _)| may_act_in(&caller, bucket)) {
        Some((_, explanation)) => Ok(Json(VerdictBody::of(&explanation))),
        None => Err(not_found()),
    }
}

/// What an operator must know: zombies that policy keeps, quotas full of what nobody uses, doubtful
/// listings, deletes that fail, a breaker that is open.
#[utoipa::path(
    get,
    path = "/v1/alarms",
    responses(
        (status = 200, description = "The alarms", body = AlarmsBody),
        (status = 403, description = "Not an administrator's key", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn alarms(
    State(state): State<ApiState>,
    _: Administrator,
) -> Result<Json<AlarmsBody>, ApiError> {
    let governor = governor(&state)?;
    let last = governor.last_cycle();
    Ok(Json(AlarmsBody::of(last.as_ref(), &governor.held_back())))
}

/// What a reclaimer round would do now. It marks and does nothing.
#[utoipa::path(
    get,
    path = "/v1/reclaimer/plan",
    responses(
        (status = 200, description = "What it would do", body = RoundBody),
        (status = 403, description = "Not an administrator's key", body = ErrorBody),
        (status = 503, description = "There is no evidence to go by", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn plan(
    State(state): State<ApiState>,
    _: Administrator,
) -> Result<Json<RoundBody>, ApiError> {
    let governor = governor(&state)?;
    let report = governor.dry_run().await;
    let report = report.ok_or(ApiError::Unavailable("the books cannot be read"))?;
    Ok(Json(RoundBody::of(&report, governor.rules())))
}

/// A reclaimer round by hand. Its work goes on after this is answered.
#[utoipa::path(
    post,
    path = "/v1/reclaimer/rounds",
    responses(
        (status = 200, description = "What it does", body = RoundBody),
        (status = 403, description = "Not an administrator's key", body = ErrorBody),
        (status = 503, description = "There is no evidence to go by", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn round(
    State(state): State<ApiState>,
    _: Administrator,
) -> Result<Json<RoundBody>, ApiError> {
    let governor = governor(&state)?;
    let report = governor.cycle().await;
    let report = report.ok_or(ApiError::Unavailable("the books cannot be read"))?;
    Ok(Json(RoundBody::of(&report, governor.rules())))
}
