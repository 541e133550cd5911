//! `/v1`: runs, leases, buckets, verdicts, alarms, the reclaimer (R-G1 to R-G19).
//!
//! A key acts in its own bucket; an administrator's key in every bucket (R-G19). A deployment without
//! a governor has none of these routes' answers and admits every create.

pub(crate) mod buckets;
pub(super) mod direct;
pub(crate) mod leases;
pub(crate) mod reclaimer;
pub(crate) mod runs;

use axum::{
    Router,
    routing::{get, post},
};
use sandhold_governor::{books::BucketPolicy, ids::Bucket};
use sandhold_governor_driver::{DeployedPlatform, Governor, TemplatesOf};
use sandhold_store::Role;
use sandhold_types::TemplateId;

use crate::{ApiState, auth::Caller, error::ApiError};

pub(super) fn routes() -> Router<ApiState> {
    Router::new()
        .route("/v1/leases", get(leases::list).post(leases::take))
        .route("/v1/lease-heartbeats", post(leases::beat))
        .route("/v1/lease-releases", post(leases::release))
        .route("/v1/sandbox-runs", post(runs::begin))
        .route("/v1/sandbox-runs/{id}", get(runs::get))
        .route("/v1/sandbox-runs/{id}/events", get(runs::events))
        .route("/v1/sandbox-runs/{id}/cancel", post(runs::cancel))
        .route("/v1/buckets", get(buckets::list))
        .route(
            "/v1/buckets/{namespace}/{env}",
            get(buckets::get).put(buckets::set),
        )
        .route("/v1/sandboxes/{id}/verdict", get(reclaimer::verdict))
        .route("/v1/alarms", get(reclaimer::alarms))
        .route("/v1/reclaimer/plan", get(reclaimer::plan))
        .route("/v1/reclaimer/rounds", post(reclaimer::round))
}

fn governor(state: &ApiState) -> Result<&Governor<DeployedPlatform>, ApiError> {
    let none = || ApiError::NotSupported(String::from("this route without a governor"));
    state.governor.as_ref().ok_or_else(none)
}

/// The template that is meant by an ID or a name in a bucket.
fn template_of(
    state: &ApiState,
    governor: &Governor<DeployedPlatform>,
    bucket: &Bucket,
    reference: String,
) -> Result<TemplateId, ApiError> {
    let found = match governor.templates() {
        TemplatesOf::Here => {
            let found = state.templates.resolve(&bucket.namespace, &reference);
            found.map(|template| template.id.clone())
        }
        // Whether there is such a one, only the service that makes the sandbox can tell.
        TemplatesOf::Elsewhere => reference.parse().ok(),
    };
    found.ok_or(ApiError::TemplateNotFound(reference))
}

fn own_bucket(caller: &Caller) -> Bucket {
    let bucket = caller.bucket();
    Bucket {
        namespace: bucket.namespace.clone(),
        env: bucket.env.clone(),
    }
}

/// What a bucket may have and its runs get. The first use of a key sets its own bucket to the default of
/// its env.
async fn policy_of(
    governor: &Governor<DeployedPlatform>,
    caller: &Caller,
    bucket: &Bucket,
) -> Result<BucketPolicy, ApiError> {
    if *bucket == own_bucket(caller) {
        return Ok(governor.ensure_bucket(bucket).await?);
    }
    let policy = governor.policy(bucket).await?;
    policy.ok_or_else(|| ApiError::BucketNotFound(bucket.clone()))
}

fn may_act_in(caller: &Caller, bucket: &Bucket) -> bool {
    caller.key.role == Role::Admin || own_bucket(caller) == *bucket
}

/// Refuses another tenant's bucket. Whether it exists is not told.
fn check_bucket(caller: &Caller, bucket: &Bucket) -> Result<(), ApiError> {
    if may_act_in(caller, bucket) {
        Ok(())
    } else {
        Err(ApiError::Forbidden(
            "a key acts in its own namespace and env only",
        ))
    }
}
