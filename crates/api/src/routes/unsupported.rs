//! Routes of the contract that cannot be carried out yet. They are known, so that a client is told
//! what is missing rather than that it called a wrong address.

use axum::{Router, routing::get};

use crate::{ApiState, auth::Caller, error::ApiError};

pub(super) fn routes() -> Router<ApiState> {
    let volumes = || get(volumes_and_secrets).post(volumes_and_secrets);
    let one_volume = || volumes().delete(volumes_and_secrets);
    Router::new()
        .route("/volumes", volumes())
        .route("/volumes/{id}", one_volume())
        .route("/secrets", volumes())
        .route("/secrets/{id}", one_volume())
}

fn not_supported(what: &str) -> ApiError {
    ApiError::NotSupported(String::from(what))
}

async fn volumes_and_secrets(_: Caller) -> ApiError {
    not_supported("storing volumes and secrets")
}
