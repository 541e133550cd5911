//! The routes of file contents.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Request, State},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};

use crate::{
    activity::ActivityMeter,
    files::{
        compose::{ComposeRequest, compose},
        download::download,
        signature::FileQuery,
        upload::upload,
    },
    http_error::HttpError,
    state::SandboxState,
};

/// The largest list of files to compose.
const COMPOSE_BYTES_MAX: usize = 2 << 20;

/// What the routes work with. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Files {
    /// Users, defaults.
    pub state: Arc<SandboxState>,
    /// Who counts open streams.
    pub activity: ActivityMeter,
}

/// The routes.
pub fn router(files: Files) -> Router {
    Router::new()
        .route(
            "/files",
            get(get_file)
                .post(post_files)
                // Files are written piece by piece; the disk is their limit.
                .layer(DefaultBodyLimit::disable()),
        )
        .route(
            "/files/compose",
            post(compose_file).layer(DefaultBodyLimit::max(COMPOSE_BYTES_MAX)),
        )
        .with_state(files)
}

fn query_of(request: &Request) -> Result<FileQuery, HttpError> {
    FileQuery::parse(request.uri().query().unwrap_or_default())
        .map_err(|error| HttpError::bad_request(error.to_string()))
}

async fn get_file(State(files): State<Files>, request: Request) -> Response {
    let query = match query_of(&request) {
        Ok(query) => query,
        Err(error) => return error.into_response(),
    };
    download(&files.state, &files.activity, &query, request.headers())
        .await
        .unwrap_or_else(HttpError::into_response)
}

async fn post_files(State(files): State<Files>, request: Request) -> Response {
    let query = match query_of(&request) {
        Ok(query) => query,
        Err(error) => return error.into_response(),
    };
    let _guard = files.activity.begin_stream();
    match upload(&files.state, &query, request).await {
        Ok(written) => Json(written).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn compose_file(
    State(files): State<Files>,
    body: Result<Json<ComposeRequest>, axum::extract::rejection::JsonRejection>,
) -> Response {
    let request = match body {
        Ok(Json(request)) => request,
        Err(error) => return HttpError::new(error.status(), error.body_text()).into_response(),
    };
    match compose(&files.state, request).await {
        Ok(written) => Json(written).into_response(),
        Err(error) => error.into_response(),
    }
}
