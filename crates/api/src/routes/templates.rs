//! Templates: reading and removing. Building them is in `builds`.

use std::sync::Arc;

use axum::{Json, extract::State};
use http::StatusCode;
use sandhold_platform::TemplateView;

use super::travel::find_snapshot;
use crate::{
    ApiState,
    auth::Caller,
    error::ApiError,
    request::Segment,
    wire::template::{AliasBody, TemplateBody, TemplateDetail},
};

pub(super) fn find(
    state: &ApiState,
    caller: &Caller,
    reference: String,
) -> Result<Arc<TemplateView>, ApiError> {
    let found = state
        .templates
        .resolve(&caller.bucket().namespace, &reference);
    found.ok_or(ApiError::TemplateNotFound(reference))
}

/// `GET /templates`
pub(crate) async fn list(State(state): State<ApiState>, caller: Caller) -> Json<Vec<TemplateBody>> {
    let templates = state.templates.list(&caller.bucket().namespace);
    Json(
        templates
            .iter()
            .map(|view| TemplateBody::of(view))
            .collect(),
    )
}

/// `GET /templates/{id or name}`
pub(crate) async fn get(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(reference): Segment,
) -> Result<Json<TemplateDetail>, ApiError> {
    let view = find(&state, &caller, reference)?;
    Ok(Json(TemplateDetail::of(&view)))
}

/// `GET /templates/aliases/{name}`
pub(crate) async fn alias(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(name): Segment,
) -> Result<Json<AliasBody>, ApiError> {
    let view = find(&state, &caller, name)?;
    Ok(Json(AliasBody::of(&view)))
}

/// `DELETE /templates/{id or name:tag}`: a template, or else a snapshot, which clients take for one.
pub(crate) async fn remove(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(reference): Segment,
) -> Result<StatusCode, ApiError> {
    let namespace = &caller.bucket().namespace;
    if state.templates.resolve(namespace, &reference).is_none()
        && let Some(snapshot) = find_snapshot(&state, &caller, &reference)
    {
        state.travel.delete_snapshot(&snapshot.id).await?;
        return Ok(StatusCode::NO_CONTENT);
    }
    state.templates.delete(namespace, &reference).await?;
    Ok(StatusCode::NO_CONTENT)
}
