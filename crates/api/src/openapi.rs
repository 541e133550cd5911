//! The description of our own routes. Those of E2B and CubeSandbox are described by their makers.

use axum::Json;
use utoipa::{
    Modify, OpenApi,
    openapi::security::{ApiKey, ApiKeyValue, SecurityScheme},
};

use crate::routes;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Sandhold",
        description = "Routes that Sandhold has beside those of the E2B and CubeSandbox APIs."
    ),
    paths(
        routes::keys::list,
        routes::keys::create,
        routes::keys::revoke,
        routes::observe::events,
        routes::travel::timeline,
        routes::travel::lineage,
        routes::copies::clones,
        routes::governor::leases::take,
        routes::governor::leases::beat,
        routes::governor::leases::release,
        routes::governor::leases::list,
        routes::governor::runs::begin,
        routes::governor::runs::get,
        routes::governor::runs::events,
        routes::governor::runs::cancel,
        routes::governor::buckets::list,
        routes::governor::buckets::get,
        routes::governor::buckets::set,
        routes::governor::reclaimer::verdict,
        routes::governor::reclaimer::alarms,
        routes::governor::reclaimer::plan,
        routes::governor::reclaimer::round
    ),
    modifiers(&Authentication)
)]
struct Description;

struct Authentication;

impl Modify for Authentication {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_with(Default::default);
        let header = ApiKey::Header(ApiKeyValue::new("X-API-KEY"));
        components.add_security_scheme("api_key", SecurityScheme::ApiKey(header));
    }
}

/// `GET /v1/openapi.json`
pub(crate) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(Description::openapi())
}
