//! Routes of the contract that cannot be carried out yet. They are known, so that a client is told
//! what is missing rather than that it called a wrong address.

use axum::{
    Json, Router,
    extract::State,
    routing::{get, post, put},
};

use super::sandboxes::find;
use crate::{ApiState, auth::Caller, error::ApiError, request::Segment};

pub(super) fn routes() -> Router<ApiState> {
    let volumes = || get(volumes_and_secrets).post(volumes_and_secrets);
    let one_volume = || volumes().delete(volumes_and_secrets);
    Router::new()
        .route("/sandboxes/{id}/fork", post(fork))
        .route("/sandboxes/{id}/snapshots", post(snapshot))
        .route("/sandboxes/{id}/rollback", post(rollback))
        .route("/snapshots", get(snapshots))
        .route("/volumes", volumes())
        .route("/volumes/{id}", one_volume())
        .route("/secrets", volumes())
        .route("/secrets/{id}", one_volume())
        .route("/v3/templates", post(builds))
        .route("/templates/{reference}/files/{hash}", get(builds))
        .route("/v2/templates/{reference}/builds/{build}", post(builds))
        .route("/templates/{reference}/builds/{build}/status", get(builds))
        .route("/templates/{reference}/builds/{build}/logs", get(builds))
        .route("/templates/{reference}/alias", put(builds))
        .route("/templates/{reference}/tags", get(builds))
        .route("/templates/tags", post(builds).delete(builds))
}

fn not_supported(what: &str) -> ApiError {
    ApiError::NotSupported(String::from(what))
}

/// A sandbox that is not there is told first.
fn refuse(state: &ApiState, caller: &Caller, id: &str, what: &str) -> ApiError {
    match find(state, caller, id) {
        Ok(_) => not_supported(what),
        Err(not_found) => not_found,
    }
}

async fn fork(State(state): State<ApiState>, caller: Caller, Segment(id): Segment) -> ApiError {
    refuse(&state, &caller, &id, "forking")
}

async fn snapshot(State(state): State<ApiState>, caller: Caller, Segment(id): Segment) -> ApiError {
    refuse(&state, &caller, &id, "taking snapshots")
}

async fn rollback(State(state): State<ApiState>, caller: Caller, Segment(id): Segment) -> ApiError {
    refuse(&state, &caller, &id, "rolling back")
}

/// There are none, since none can be taken.
async fn snapshots(_: Caller) -> Json<[(); 0]> {
    Json([])
}

async fn volumes_and_secrets(_: Caller) -> ApiError {
    not_supported("storing volumes and secrets")
}

async fn builds(_: Caller) -> ApiError {
    not_supported("building over this route")
}
