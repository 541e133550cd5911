//! Creating a sandbox.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sandhold_platform::{CreateSandbox, SandboxView};
use sandhold_store::{Bucket, Fingerprint, IdempotencyScope};
use sandhold_types::{Deadline, Timestamp};
use tracing::Instrument;

use super::{
    governor::direct,
    sandboxes::{half_way, within},
    travel::find_snapshot,
};
use crate::{
    ApiState,
    auth::Caller,
    error::ApiError,
    gate::Turn,
    idempotency::{self, Claimed},
    request::{Meta, RawBody, parse_body},
    wire::{
        create::{CreateBody, CreateContext},
        lifetime::RouteGeneration,
        sandbox::SandboxBody,
    },
};

static REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Whether a create made its sandbox or an earlier one with the same key did.
enum Made {
    Now(Arc<SandboxView>),
    Before(Arc<SandboxView>),
}

/// `POST /sandboxes`
pub(crate) async fn create_first(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    headers: HeaderMap,
    RawBody(body): RawBody,
) -> Result<Response, ApiError> {
    create(state, caller, meta, headers, &body, RouteGeneration::First).await
}

/// `POST /v2/sandboxes`
pub(crate) async fn create_second(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    headers: HeaderMap,
    RawBody(body): RawBody,
) -> Result<Response, ApiError> {
    create(state, caller, meta, headers, &body, RouteGeneration::Second).await
}

async fn create(
    state: ApiState,
    caller: Caller,
    meta: Meta,
    headers: HeaderMap,
    body: &[u8],
    generation: RouteGeneration,
) -> Result<Response, ApiError> {
    let deadline = meta.deadline(state.settings.budgets.create);
    let wanted: CreateBody = parse_body(body)?;
    let asked = state.clock.now();
    let request = wanted.into_request(CreateContext {
        generation,
        dialect: meta.dialect,
        owner: caller.owner(),
        request: meta.id.clone(),
        now: asked,
        limits: &state.settings.limits,
        defaults: state.settings.default_lifetimes,
        domain: state.settings.public_domain.as_deref(),
    })?;
    let idempotency_key = idempotency::key_of(&headers)?;
    let bucket = caller.bucket().clone();
    // Known before a place is taken: an unknown name must not wait behind a burst.
    let template = state
        .templates
        .resolve(&bucket.namespace, &request.template);
    if template.is_none() && find_snapshot(&state, &caller, &request.template).is_none() {
        return Err(ApiError::TemplateNotFound(request.template));
    }
    let made = match idempotency_key {
        None => {
            let turn = state.gate.enter(&bucket, half_way(deadline)).await?;
            let work = carry_out(state.clone(), request, asked, deadline, turn);
            to_its_end(async { work.await.map(Made::Now) }).await?
        }
        Some(key) => {
            let fingerprint = idempotency::fingerprint(route(generation), body);
            let scope = IdempotencyScope { bucket, key };
            let work = create_once(state.clone(), request, asked, deadline, scope, fingerprint);
            to_its_end(work).await?
        }
    };
    Ok(answer(&state, &made))
}

fn route(generation: RouteGeneration) -> &'static str {
    match generation {
        RouteGeneration::First => "/sandboxes",
        RouteGeneration::Second => "/v2/sandboxes",
    }
}

fn answer(state: &ApiState, made: &Made) -> Response {
    let (Made::Now(view) | Made::Before(view)) = made;
    let body = Json(SandboxBody::of(view, &state.settings));
    let mut response = (StatusCode::CREATED, body).into_response();
    if matches!(made, Made::Before(_)) {
        let yes = HeaderValue::from_static("true");
        response.headers_mut().insert(REPLAYED.clone(), yes);
    }
    response
}

/// Goes on when the caller hangs up, so that a create is never left half recorded.
pub(super) async fn to_its_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    let task = tokio::spawn(work.in_current_span());
    task.await.unwrap_or(Err(ApiError::Panicked))
}

/// Takes a slot and makes the sandbox, in the turn that the caller has.
///
/// Its lifetime was counted from when it was `asked` for; what it waited for its turn and its slot
/// does not shorten it.
pub(super) async fn carry_out(
    state: ApiState,
    mut request: CreateSandbox,
    asked: Timestamp,
    deadline: Deadline,
    _turn: Turn,
) -> Result<Arc<SandboxView>, ApiError> {
    let slot = direct::admit(&state, &request.owner, half_way(deadline)).await?;
    let waited = state.clock.now().since(asked);
    request.lifetime = request.lifetime.begun_later(waited);
    let creating = state.platform.create(request, deadline);
    let made = within(deadline, "creating the sandbox", creating).await;
    direct::settle(&state, slot, made.as_deref()).await;
    made
}

async fn create_once(
    state: ApiState,
    request: CreateSandbox,
    asked: Timestamp,
    deadline: Deadline,
    scope: IdempotencyScope,
    fingerprint: Fingerprint,
) -> Result<Made, ApiError> {
    let claimed = idempotency::claim(&state, &scope, fingerprint, &request.request, deadline);
    let generation = match claimed.await? {
        Claimed::Made(view) => return Ok(Made::Before(view)),
        Claimed::Fresh(generation) => generation,
    };
    match enter_and_carry_out(&state, request, asked, deadline, &scope.bucket).await {
        Ok(view) => {
            idempotency::complete(&state, &scope, generation, &view.id).await?;
            Ok(Made::Now(view))
        }
        Err(failed) => {
            // The failure is the answer; a claim that cannot be given back ends by itself.
            let given_back = state.store.abandon_idempotency(&scope, generation).await;
            if let Err(error) = given_back {
                tracing::warn!(%error, "an Idempotency-Key was not given back");
            }
            Err(failed)
        }
    }
}

async fn enter_and_carry_out(
    state: &ApiState,
    request: CreateSandbox,
    asked: Timestamp,
    deadline: Deadline,
    bucket: &Bucket,
) -> Result<Arc<SandboxView>, ApiError> {
    let turn = state.gate.enter(bucket, half_way(deadline)).await?;
    carry_out(state.clone(), request, asked, deadline, turn).await
}
