//! Keys: our own `/v1/keys`, and as much of E2B's form as its tools need.

use axum::{Json, extract::State};
use http::StatusCode;
use sandhold_store::{
    Bucket, CreateKeyOutcome, KeyDigest, KeyRecord, KeyScope, NewKey, RevokeOutcome,
};
use sandhold_types::{KeyId, Token};

use crate::{
    ApiState,
    auth::{Administrator, Caller},
    error::{ApiError, ErrorBody},
    request::{JsonBody, Segment},
    wire::keys::{CreatedKeyBody, KeyBody, KeysBody, NewKeyBody, TeamBody, TeamKeyBody},
};

/// Lists the keys of all tenants.
#[utoipa::path(
    get,
    path = "/v1/keys",
    responses(
        (status = 200, description = "All keys", body = KeysBody),
        (status = 401, description = "No key, or one that does not work", body = ErrorBody),
        (status = 403, description = "Not an administrator's key", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    _: Administrator,
) -> Result<Json<KeysBody>, ApiError> {
    let keys = state.store.list_keys(&KeyScope::All).await?;
    Ok(Json(KeysBody {
        keys: keys.iter().map(KeyBody::of).collect(),
    }))
}

/// Makes a key, and its tenant if that is new. The key itself is in this answer only.
#[utoipa::path(
    post,
    path = "/v1/keys",
    request_body = NewKeyBody,
    responses(
        (status = 201, description = "The key", body = CreatedKeyBody),
        (status = 400, description = "A field is not what it should be", body = ErrorBody),
        (status = 401, description = "No key, or one that does not work", body = ErrorBody),
        (status = 403, description = "Not an administrator's key", body = ErrorBody),
        (status = 429, description = "The tenant has too many keys", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn create(
    State(state): State<ApiState>,
    admin: Administrator,
    JsonBody(body): JsonBody<NewKeyBody>,
) -> Result<(StatusCode, Json<CreatedKeyBody>), ApiError> {
    let (record, key) = make(&state, &admin.key.bucket, body).await?;
    let body = CreatedKeyBody::of(&record, &key);
    Ok((StatusCode::CREATED, Json(body)))
}

/// Revokes a key for good.
#[utoipa::path(
    delete,
    path = "/v1/keys/{id}",
    params(("id" = String, Path, description = "The key's `id`, not the key itself")),
    responses(
        (status = 204, description = "Revoked"),
        (status = 401, description = "No key, or one that does not work", body = ErrorBody),
        (status = 403, description = "Not an administrator's key", body = ErrorBody),
        (status = 404, description = "No such key", body = ErrorBody),
        (status = 409, description = "Already revoked, or the last administrator's key", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn revoke(
    State(state): State<ApiState>,
    _: Administrator,
    Segment(id): Segment,
) -> Result<StatusCode, ApiError> {
    revoke_in(&state, &KeyScope::All, id).await
}

async fn make(
    state: &ApiState,
    asking: &Bucket,
    body: NewKeyBody,
) -> Result<(KeyRecord, Token), ApiError> {
    let wanted = body.wanted(asking)?;
    let key = Token::generate_api_key(&*state.entropy);
    let new_key = NewKey {
        id: KeyId::generate(&*state.entropy),
        digest: KeyDigest::of(&key),
        bucket: wanted.bucket,
        role: wanted.role,
        name: wanted.name,
        hint: NewKey::hint_of(&key),
        created_at: state.clock.now(),
    };
    match state.store.create_key(new_key).await? {
        CreateKeyOutcome::Created(record) => Ok((record, key)),
        CreateKeyOutcome::Full => Err(ApiError::TooMany("the tenant has too many keys")),
        CreateKeyOutcome::Exists => Err(ApiError::Conflict(String::from("the key exists"))),
    }
}

async fn revoke_in(state: &ApiState, scope: &KeyScope, id: String) -> Result<StatusCode, ApiError> {
    let Ok(key): Result<KeyId, _> = id.parse() else {
        // A text that is no identifier may be a key, which belongs into no answer and no log.
        return Err(ApiError::KeyNotFound(String::from("of this identifier")));
    };
    let conflict = |text: &str| Err(ApiError::Conflict(String::from(text)));
    match state
        .store
        .revoke_key(scope, &key, state.clock.now())
        .await?
    {
        RevokeOutcome::Revoked => Ok(StatusCode::NO_CONTENT),
        RevokeOutcome::AlreadyRevoked => conflict("the key is revoked already"),
        RevokeOutcome::LastAdmin => conflict("the last administrator's key cannot be revoked"),
        RevokeOutcome::Unknown => Err(ApiError::KeyNotFound(id)),
    }
}

/// `GET /teams`
pub(crate) async fn teams(caller: Caller) -> Json<[TeamBody; 1]> {
    Json([TeamBody::of(caller.bucket())])
}

/// `GET /api-keys`: those of the administrator's own bucket that work.
pub(crate) async fn list_of_team(
    State(state): State<ApiState>,
    admin: Administrator,
) -> Result<Json<Vec<TeamKeyBody>>, ApiError> {
    let scope = KeyScope::Bucket(admin.key.bucket);
    let keys = state.store.list_keys(&scope).await?;
    let working = keys.iter().filter(|key| key.revoked_at.is_none());
    Ok(Json(
        working.map(|key| TeamKeyBody::of(key, None)).collect(),
    ))
}

/// `POST /api-keys`
pub(crate) async fn create_for_team(
    State(state): State<ApiState>,
    admin: Administrator,
    JsonBody(body): JsonBody<NewKeyBody>,
) -> Result<(StatusCode, Json<TeamKeyBody>), ApiError> {
    let (record, key) = make(&state, &admin.key.bucket, body).await?;
    let body = TeamKeyBody::of(&record, Some(&key));
    Ok((StatusCode::CREATED, Json(body)))
}

/// `DELETE /api-keys/{id}`
pub(crate) async fn revoke_of_team(
    State(state): State<ApiState>,
    admin: Administrator,
    Segment(id): Segment,
) -> Result<StatusCode, ApiError> {
    revoke_in(&state, &KeyScope::Bucket(admin.key.bucket), id).await
}
