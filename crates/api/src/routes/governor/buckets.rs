//! Buckets: what a tenant's environment may have, keeps, and has (R-G4, R-G13).

use axum::{
    Json,
    extract::{Path, State},
};
use sandhold_governor::ids::Bucket;

use super::{check_bucket, governor, may_act_in};
use crate::{
    ApiState,
    auth::{Administrator, Caller},
    error::{ApiError, ErrorBody},
    request::JsonBody,
    wire::bucket::{BucketBody, BucketsBody, PolicyBody},
};

fn bucket_of((namespace, env): (String, String)) -> Result<Bucket, ApiError> {
    let refused = |field: &'static str| {
        move |error: sandhold_types::IdError| {
            ApiError::invalid(field, format!("must be {}", error.rule))
        }
    };
    Ok(Bucket {
        namespace: namespace.parse().map_err(refused("namespace"))?,
        env: env.parse().map_err(refused("env"))?,
    })
}

/// The buckets that the key may see.
#[utoipa::path(
    get,
    path = "/v1/buckets",
    responses((status = 200, description = "The buckets", body = BucketsBody)),
    security(("api_key" = []))
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    caller: Caller,
) -> Result<Json<BucketsBody>, ApiError> {
    let view = governor(&state)?.view().await?;
    let visible = view
        .buckets
        .keys()
        .filter(|bucket| may_act_in(&caller, bucket));
    let buckets = visible.filter_map(|bucket| BucketBody::of(bucket, &view));
    Ok(Json(BucketsBody {
        buckets: buckets.collect(),
    }))
}

/// One bucket and its usage.
#[utoipa::path(
    get,
    path = "/v1/buckets/{namespace}/{env}",
    params(("namespace" = String, Path), ("env" = String, Path)),
    responses(
        (status = 200, description = "The bucket", body = BucketBody),
        (status = 403, description = "Another tenant's", body = ErrorBody),
        (status = 404, description = "It was never set", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn get(
    State(state): State<ApiState>,
    caller: Caller,
    Path(path): Path<(String, String)>,
) -> Result<Json<BucketBody>, ApiError> {
    let bucket = bucket_of(path)?;
    check_bucket(&caller, &bucket)?;
    let view = governor(&state)?.view().await?;
    let body = BucketBody::of(&bucket, &view);
    body.map(Json).ok_or(ApiError::BucketNotFound(bucket))
}

/// Sets what a bucket may have and keeps. A quota below what it has ends nothing; nobody new is
/// admitted until enough are gone.
#[utoipa::path(
    put,
    path = "/v1/buckets/{namespace}/{env}",
    params(("namespace" = String, Path), ("env" = String, Path)),
    request_body = PolicyBody,
    responses(
        (status = 200, description = "The bucket", body = BucketBody),
        (status = 400, description = "A field is not what it should be", body = ErrorBody),
        (status = 403, description = "Not an administrator's key", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn set(
    State(state): State<ApiState>,
    _: Administrator,
    Path(path): Path<(String, String)>,
    JsonBody(body): JsonBody<PolicyBody>,
) -> Result<Json<BucketBody>, ApiError> {
    let bucket = bucket_of(path)?;
    let policy = body.policy()?;
    let governor = governor(&state)?;
    governor.set_bucket(bucket.clone(), policy).await?;
    let view = governor.view().await?;
    let body = BucketBody::of(&bucket, &view);
    body.map(Json).ok_or(ApiError::BucketNotFound(bucket))
}
