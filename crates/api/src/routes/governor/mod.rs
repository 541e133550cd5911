//! `/v1`: leases, buckets, verdicts, alarms, the reclaimer (R-G1 to R-G19).
//!
//! A key acts in its own bucket; an administrator's key in every bucket (R-G19). A deployment without
//! a governor has none of these routes' answers and admits every create.

pub(crate) mod buckets;
pub(super) mod direct;
pub(crate) mod leases;
pub(crate) mod reclaimer;

use axum::{
    Router,
    routing::{get, post},
};
use sandhold_governor::ids::Bucket;
use sandhold_governor_driver::{Governor, LocalPlatform};
use sandhold_store::Role;

use crate::{ApiState, auth::Caller, error::ApiError};

pub(super) fn routes() -> Router<ApiState> {
    Router::new()
        .route("/v1/leases", get(leases::list).post(leases::take))
        .route("/v1/lease-heartbeats", post(leases::beat))
        .route("/v1/lease-releases", post(leases::release))
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

fn governor(state: &ApiState) -> Result<&Governor<LocalPlatform>, ApiError> {
    let none = || ApiError::NotSupported(String::from("this route without a governor"));
    state.governor.as_ref().ok_or_else(none)
}

fn own_bucket(caller: &Caller) -> Bucket {
    let bucket = caller.bucket();
    Bucket {
        namespace: bucket.namespace.clone(),
        env: bucket.env.clone(),
    }
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
