//! Building templates, and what their builds are called (wire contract 1.6).

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Path, Request, State},
    routing::{get, patch, post, put},
};
use futures::TryStreamExt;
use http::{HeaderMap, HeaderName, StatusCode, header};
use sandhold_platform::{BuildView, FilesHash, LogPage, TemplateBuilds};
use sandhold_types::{BuildId, TemplateId};
use serde::Deserialize;
use serde_json::{Value, json};

use super::templates::find;
use crate::{
    ApiState,
    auth::Caller,
    error::ApiError,
    request::{JsonBody, Query, Segment, text_header},
    wire::{
        build::{
            AnnouncedBody, AssignTagsBody, AssignedTagsBody, LogEntryBody, NewBuildBody,
            RemoveTagsBody, StartBuildBody, StatusBody, TagBody,
        },
        image_build::{ImageBuildAnswer, ImageBuildBody},
        template::TemplateDetail,
    },
};

/// How many lines of a log one answer holds.
const LINES_MAX: usize = 100;
static FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

pub(super) fn routes() -> Router<ApiState> {
    Router::new()
        .route("/v3/templates", post(announce))
        .route("/templates/{reference}/files/{hash}", get(link).put(send))
        .route("/v2/templates/{reference}/builds/{build}", post(begin))
        .route("/templates/{reference}/builds/{build}/status", get(status))
        .route("/templates/{reference}/builds/{build}/logs", get(logs))
        .route("/templates/{reference}/alias", put(set_alias))
        .route("/templates/{reference}/tags", get(tags))
        .route("/templates/tags", post(assign_tags).delete(remove_tags))
        .route("/v2/templates/{reference}", patch(publish))
}

fn builds(state: &ApiState) -> Result<&dyn TemplateBuilds, ApiError> {
    let builds = state.builds.as_deref();
    builds.ok_or_else(|| ApiError::NotSupported(String::from("building over this route")))
}

/// `POST /v3/templates`
async fn announce(
    State(state): State<ApiState>,
    caller: Caller,
    JsonBody(body): JsonBody<NewBuildBody>,
) -> Result<(StatusCode, Json<AnnouncedBody>), ApiError> {
    let namespace = &caller.bucket().namespace;
    let announced = builds(&state)?.announce(namespace, body.into_build()?)?;
    Ok((StatusCode::ACCEPTED, Json(AnnouncedBody::of(announced))))
}

/// `GET /templates/{template}/files/{hash}`: whether files are there, and where to send them.
async fn link(
    State(state): State<ApiState>,
    caller: Caller,
    headers: HeaderMap,
    Path((template, hash)): Path<(String, String)>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let files = files_hash(&hash)?;
    let namespace = &caller.bucket().namespace;
    let present = builds(&state)?.has_files(namespace, &files);
    let query = state.link_key.query(namespace, &files, state.clock.now());
    let template: TemplateId = template
        .parse()
        .map_err(|_| ApiError::TemplateNotFound(template))?;
    let origin = origin(&headers)?;
    let url = format!("{origin}/templates/{template}/files/{hash}?{query}");
    Ok((
        StatusCode::CREATED,
        Json(json!({ "present": present, "url": url })),
    ))
}

/// Where the client found us: what it is told to come back to.
fn origin(headers: &HeaderMap) -> Result<String, ApiError> {
    let host = text_header(headers, &header::HOST);
    let host = host.ok_or_else(|| ApiError::invalid("Host", "is missing"))?;
    let scheme = match text_header(headers, &FORWARDED_PROTO) {
        Some("https") => "https",
        _ => "http",
    };
    Ok(format!("{scheme}://{host}"))
}

fn files_hash(text: &str) -> Result<FilesHash, ApiError> {
    let rule = "must be 64 lower-case hexadecimal digits";
    FilesHash::read(text).ok_or_else(|| ApiError::invalid("hash", rule))
}

/// `PUT` of the link: the link says who sends, so there is no key.
async fn send(
    State(state): State<ApiState>,
    Path((_, hash)): Path<(String, String)>,
    query: Query,
    request: Request,
) -> Result<StatusCode, ApiError> {
    let files = files_hash(&hash)?;
    let opened = state.link_key.open(&query, &files, state.clock.now());
    let namespace = opened.ok_or(ApiError::Forbidden("this link is wrong or too old"))?;
    let size = text_header(request.headers(), &header::CONTENT_LENGTH);
    let size = size.and_then(|text| text.parse().ok());
    let size: u64 = size.ok_or_else(|| ApiError::invalid("Content-Length", "is missing"))?;
    let body = request.into_body().into_data_stream();
    let body = Box::pin(body.map_err(std::io::Error::other));
    builds(&state)?
        .take_files(&namespace, &files, size, body)
        .await?;
    Ok(StatusCode::OK)
}

/// `POST /v2/templates/{template}/builds/{build}`
async fn begin(
    State(state): State<ApiState>,
    caller: Caller,
    Path((template, build)): Path<(String, String)>,
    JsonBody(body): JsonBody<StartBuildBody>,
) -> Result<StatusCode, ApiError> {
    let id = build_id(&template, &build)?;
    let namespace = &caller.bucket().namespace;
    builds(&state)?.begin(namespace, &template, &id, body.into_plan()?)?;
    Ok(StatusCode::ACCEPTED)
}

fn build_id(template: &str, build: &str) -> Result<BuildId, ApiError> {
    let not_found = |_| ApiError::BuildNotFound {
        template: template.to_owned(),
        build: build.to_owned(),
    };
    build.parse().map_err(not_found)
}

fn view(
    state: &ApiState,
    caller: &Caller,
    (template, build): (&str, &str),
    query: &Query,
) -> Result<BuildView, ApiError> {
    let rule = "must be a number";
    let offset = query.parsed("logsOffset", rule)?.unwrap_or(0);
    let limit: usize = query.parsed("limit", rule)?.unwrap_or(LINES_MAX);
    let page = LogPage {
        offset,
        limit: limit.min(LINES_MAX),
    };
    let id = build_id(template, build)?;
    let namespace = &caller.bucket().namespace;
    let found = builds(state)?.view(namespace, template, &id, page);
    found.ok_or_else(|| ApiError::BuildNotFound {
        template: template.to_owned(),
        build: build.to_owned(),
    })
}

/// `GET /templates/{template}/builds/{build}/status`
async fn status(
    State(state): State<ApiState>,
    caller: Caller,
    Path((template, build)): Path<(String, String)>,
    query: Query,
) -> Result<Json<StatusBody>, ApiError> {
    let view = view(&state, &caller, (&template, &build), &query)?;
    Ok(Json(StatusBody::of(template, build, &view)))
}

/// `GET /templates/{template}/builds/{build}/logs`
async fn logs(
    State(state): State<ApiState>,
    caller: Caller,
    Path((template, build)): Path<(String, String)>,
    query: Query,
) -> Result<Json<Value>, ApiError> {
    let view = view(&state, &caller, (&template, &build), &query)?;
    let lines: Vec<LogEntryBody> = view.lines.iter().map(LogEntryBody::of).collect();
    Ok(Json(json!({ "logs": lines })))
}

/// `POST /templates`, as CubeSandbox's clients send it.
pub(super) async fn build_image(
    State(state): State<ApiState>,
    caller: Caller,
    JsonBody(body): JsonBody<ImageBuildBody>,
) -> Result<(StatusCode, Json<ImageBuildAnswer>), ApiError> {
    let namespace = &caller.bucket().namespace;
    let name = format!("tpl{}", TemplateId::generate(&*state.entropy));
    let (new, plan) = body.into_build(name)?;
    let builds = builds(&state)?;
    let announced = builds.announce(namespace, new)?;
    builds.begin(
        namespace,
        announced.template.as_str(),
        &announced.build,
        plan,
    )?;
    let answer = ImageBuildAnswer::of(&announced);
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

/// `POST /templates/{template}`: how a template was made is not kept, because that may hold
/// credentials of its registry.
pub(super) async fn rebuild(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(template): Segment,
) -> Result<(), ApiError> {
    find(&state, &caller, template)?;
    let what = "building a template again without saying how (build it by its name)";
    Err(ApiError::NotSupported(String::from(what)))
}

#[derive(Debug, Deserialize)]
struct AliasBody {
    #[serde(default)]
    alias: Option<String>,
}

/// `PUT /templates/{template}/alias`
async fn set_alias(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(template): Segment,
    JsonBody(body): JsonBody<AliasBody>,
) -> Result<Json<TemplateDetail>, ApiError> {
    let namespace = &caller.bucket().namespace;
    let alias = body.alias.unwrap_or_default();
    let rule = "must be lower-case letters, digits and '-', and not begin with tpl- or snap-";
    if alias.starts_with("tpl-") || alias.starts_with("snap-") || alias.contains('_') {
        return Err(ApiError::invalid("alias", rule));
    }
    builds(&state)?.set_alias(namespace, &template, &alias)?;
    let view = find(&state, &caller, template)?;
    Ok(Json(TemplateDetail::of(&view)))
}

/// `GET /templates/{template}/tags`
async fn tags(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(template): Segment,
) -> Result<Json<Vec<TagBody>>, ApiError> {
    let tags = builds(&state)?.tags(&caller.bucket().namespace, &template)?;
    Ok(Json(tags.iter().map(TagBody::of).collect()))
}

/// `POST /templates/tags`
async fn assign_tags(
    State(state): State<ApiState>,
    caller: Caller,
    JsonBody(body): JsonBody<AssignTagsBody>,
) -> Result<(StatusCode, Json<AssignedTagsBody>), ApiError> {
    let namespace = &caller.bucket().namespace;
    let build = builds(&state)?.assign_tags(namespace, &body.target, &body.tags)?;
    let answer = AssignedTagsBody {
        build_id: build.to_string(),
        tags: body.tags,
    };
    Ok((StatusCode::CREATED, Json(answer)))
}

/// `DELETE /templates/tags`, with a body.
async fn remove_tags(
    State(state): State<ApiState>,
    caller: Caller,
    JsonBody(body): JsonBody<RemoveTagsBody>,
) -> Result<StatusCode, ApiError> {
    let namespace = &caller.bucket().namespace;
    builds(&state)?.remove_tags(namespace, &body.name, &body.tags)?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
struct PublishBody {
    public: Option<bool>,
}

/// `PATCH /v2/templates/{template}`: a tenant's template is its own, and stays that.
async fn publish(
    State(state): State<ApiState>,
    caller: Caller,
    Segment(template): Segment,
    JsonBody(body): JsonBody<PublishBody>,
) -> Result<Json<Value>, ApiError> {
    let view: Arc<_> = find(&state, &caller, template)?;
    let is_public = view.owner.is_none();
    match body.public {
        Some(wanted) if wanted != is_public => Err(ApiError::NotSupported(String::from(
            "making a template public (an operator builds it with `sandhold template build`)",
        ))),
        _ => Ok(Json(json!({ "names": view.names }))),
    }
}
