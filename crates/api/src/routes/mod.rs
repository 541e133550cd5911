//! The routes. A handler reads what the wire holds, asks the platform, and writes the answer; rules
//! are in `wire`.

mod builds;
pub(crate) mod copies;
mod create;
pub(crate) mod governor;
pub(crate) mod keys;
mod lifetime;
pub(crate) mod observe;
mod sandboxes;
mod statistics;
mod templates;
pub(crate) mod travel;
mod unsupported;

use axum::{
    Json, Router,
    http::{HeaderName, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{delete, get, post, put},
};
use serde_json::{Value, json};
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowHeaders, Any, CorsLayer},
};

use crate::{ApiState, error::ApiError, openapi, request};

/// The router of the whole control plane. Paths that it does not know answer 404 as JSON.
pub fn router(state: ApiState) -> Router {
    Router::new()
        .merge(sandbox_routes())
        .merge(travel_routes())
        .merge(template_routes())
        .merge(builds::routes())
        .merge(key_routes())
        .merge(governor::routes())
        .merge(unsupported::routes())
        .route("/health", get(health))
        .route("/metrics", get(statistics::metrics))
        .route("/v1/openapi.json", get(openapi::document))
        .fallback(async || ApiError::RouteNotFound)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .layer(CatchPanicLayer::custom(answer_panic))
        .layer(cors())
        .layer(middleware::from_fn_with_state(
            state.clone(),
            request::identify,
        ))
        .with_state(state)
}

fn sandbox_routes() -> Router<ApiState> {
    Router::new()
        .route(
            "/sandboxes",
            get(sandboxes::list_first).post(create::create_first),
        )
        .route(
            "/v2/sandboxes",
            get(sandboxes::list).post(create::create_second),
        )
        .route("/sandboxes/metrics", get(observe::metrics_of_many))
        .route(
            "/sandboxes/{id}",
            get(sandboxes::get).delete(sandboxes::kill),
        )
        .route("/sandboxes/{id}/timeout", post(lifetime::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(lifetime::refresh))
        .route("/sandboxes/{id}/connect", post(lifetime::connect_first))
        .route("/v2/sandboxes/{id}/connect", post(lifetime::connect_second))
        .route("/sandboxes/{id}/resume", post(lifetime::resume))
        .route("/sandboxes/{id}/pause", post(lifetime::pause))
        .route("/sandboxes/{id}/network", put(sandboxes::change_network))
        .route("/sandboxes/{id}/metrics", get(observe::metrics))
        .route("/sandboxes/{id}/logs", get(observe::logs_first))
        .route("/v2/sandboxes/{id}/logs", get(observe::logs_second))
        .route("/sandboxes/{id}/events", get(observe::events))
}

fn travel_routes() -> Router<ApiState> {
    Router::new()
        .route("/sandboxes/{id}/snapshots", post(travel::take))
        .route("/sandboxes/{id}/rollback", post(travel::roll_back))
        .route("/sandboxes/{id}/timeline", get(travel::timeline))
        .route("/sandboxes/{id}/fork", post(copies::fork))
        .route("/sandboxes/{id}/clones", post(copies::clones))
        .route("/snapshots", get(travel::list))
        .route("/snapshots/{reference}/lineage", get(travel::lineage))
}

fn template_routes() -> Router<ApiState> {
    Router::new()
        .route("/templates", get(templates::list).post(builds::build_image))
        .route("/v2/templates", get(templates::list))
        .route(
            "/templates/{reference}",
            get(templates::get)
                .delete(templates::remove)
                .post(builds::rebuild),
        )
        .route("/templates/aliases/{name}", get(templates::alias))
}

fn key_routes() -> Router<ApiState> {
    Router::new()
        .route("/v1/keys", get(keys::list).post(keys::create))
        .route("/v1/keys/{id}", delete(keys::revoke))
        .route("/teams", get(keys::teams))
        .route(
            "/api-keys",
            get(keys::list_of_team).post(keys::create_for_team),
        )
        .route("/api-keys/{id}", delete(keys::revoke_of_team))
}

/// `GET /health`: whoever can reach the server may know that it is up (wire contract 1.1).
async fn health(state: axum::extract::State<ApiState>) -> Json<Value> {
    Json(json!({ "status": "ok", "sandboxes": state.platform.list().len() }))
}

/// Browsers may call from anywhere: what opens the API is a header that no browser adds by itself.
/// The headers are named one by one, because `*` would not include `Authorization`.
fn cors() -> CorsLayer {
    CorsLayer::new()
        .allow_origin(Any)
        .allow_methods(Any)
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([
            sandboxes::NEXT_TOKEN,
            sandboxes::TOTAL_RUNNING,
            lifetime::END_AT,
            HeaderName::from_static("x-request-id"),
            header::RETRY_AFTER,
            HeaderName::from_static("should-retry"),
        ])
}

/// One request's panic is one request's answer.
fn answer_panic(panic: Box<dyn std::any::Any + Send>) -> Response {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    tracing::error!(panic = text.unwrap_or_default(), "a request panicked");
    ApiError::Panicked.into_response()
}
