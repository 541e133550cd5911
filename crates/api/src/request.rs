//! What every request has: an identifier, a client, a body of JSON, query parameters.

use std::{
    str::FromStr,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, Path, Request, State},
    middleware::Next,
    response::Response,
};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, header, request::Parts};
use http_body_util::BodyExt;
use sandhold_types::{Deadline, RequestId};
use serde::de::DeserializeOwned;
use tracing::Instrument;

use crate::{ApiState, error::ApiError};

/// Of a body that is too large, this much is still read and thrown away, so that the caller gets to
/// read the answer rather than a reset connection.
const DISCARDED_BYTES_MAX: usize = 16 * 1024 * 1024;

/// How long a body may take to arrive.
const BODY_WAIT: Duration = Duration::from_secs(30);

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Which kind of client asks. It decides only where the two kinds mean different things by the same
/// request (wire contract 1.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// An E2B SDK.
    E2b,
    /// CubeSandbox, or anything else.
    Cube,
}

impl Dialect {
    /// Told by the `User-Agent`.
    #[must_use]
    pub fn of_user_agent(user_agent: &str) -> Self {
        if user_agent.starts_with("e2b-") {
            Self::E2b
        } else {
            Self::Cube
        }
    }
}

/// What is known of a request before anything of it is read.
#[derive(Debug, Clone)]
pub(crate) struct Meta {
    pub(crate) id: RequestId,
    pub(crate) arrived: Instant,
    pub(crate) dialect: Dialect,
}

impl Meta {
    pub(crate) fn deadline(&self, budget: Duration) -> Deadline {
        Deadline::after(self.arrived, budget)
    }
}

/// Gives every request an identifier: the caller's own, if it is one, or a fresh one. It is in the
/// answer, in the log and in the sandbox's history.
pub(crate) async fn identify(
    State(state): State<ApiState>,
    mut request: Request,
    next: Next,
) -> Response {
    let given = text_header(request.headers(), &REQUEST_ID).and_then(|id| id.parse().ok());
    let id: RequestId = given.unwrap_or_else(|| RequestId::generate(&*state.entropy));
    let user_agent = text_header(request.headers(), &header::USER_AGENT).unwrap_or_default();
    let meta = Meta {
        id: id.clone(),
        arrived: Instant::now(),
        dialect: Dialect::of_user_agent(user_agent),
    };
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let span = tracing::info_span!("request", %id, %method, path);
    request.extensions_mut().insert(Arc::new(meta));
    let mut response = next.run(request).instrument(span.clone()).await;
    span.in_scope(|| tracing::debug!(status = response.status().as_u16(), "answered"));
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(REQUEST_ID.clone(), value);
    }
    response
}

/// A header's text, if it is there and is text.
pub(crate) fn text_header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

impl FromRequestParts<ApiState> for Meta {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &ApiState) -> Result<Self, ApiError> {
        // The layer puts it there before any route is reached.
        let meta = parts.extensions.get::<Arc<Meta>>();
        meta.map(|meta| Meta::clone(meta)).ok_or(ApiError::Panicked)
    }
}

/// One segment of the path, decoded. It may hold `/` and `:` (wire contract 1.0).
#[derive(Debug)]
pub(crate) struct Segment(pub(crate) String);

impl FromRequestParts<ApiState> for Segment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid("path", "is not UTF-8"))?;
        Ok(Self(text))
    }
}

/// The parameters of the query, decoded once, in the order in which they came.
#[derive(Debug, Clone, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    /// Reads the part of a URL behind the `?`.
    #[must_use]
    pub(crate) fn parse(query: &str) -> Self {
        let pairs = url::form_urlencoded::parse(query.as_bytes());
        Self(pairs.into_owned().collect())
    }

    /// Every value of a parameter.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let named = self.0.iter().filter(move |(key, _)| key == name);
        named.map(|(_, value)| value.as_str())
    }

    /// The first value of a parameter.
    #[must_use]
    pub(crate) fn first(&self, name: &str) -> Option<&str> {
        let mut named = self.0.iter().filter(|(key, _)| key == name);
        named.next().map(|(_, value)| value.as_str())
    }

    pub(crate) fn parsed<T: FromStr>(
        &self,
        name: &'static str,
        rule: &'static str,
    ) -> Result<Option<T>, ApiError> {
        let read = |text: &str| text.parse().map_err(|_| ApiError::invalid(name, rule));
        self.first(name).map(read).transpose()
    }
}

impl FromRequestParts<ApiState> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &ApiState) -> Result<Self, ApiError> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default()))
    }
}

/// The bytes of the body, bounded.
#[derive(Debug)]
pub(crate) struct RawBody(pub(crate) Bytes);

impl FromRequest<ApiState> for RawBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &ApiState) -> Result<Self, ApiError> {
        read_in_time(request, state.settings.limits.body_bytes_max)
            .await
            .map(Self)
    }
}

async fn read_in_time(request: Request, bytes_max: usize) -> Result<Bytes, ApiError> {
    let read = read_body(request.into_body(), bytes_max);
    let read = tokio::time::timeout(BODY_WAIT, read).await;
    read.map_err(|_| ApiError::BodyTimeout)?
}

async fn read_body(mut body: Body, bytes_max: usize) -> Result<Bytes, ApiError> {
    let mut kept = BytesMut::new();
    let mut total = 0_usize;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::invalid("body", "was cut off"))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        total = total.saturating_add(data.len());
        if total > DISCARDED_BYTES_MAX.max(bytes_max) {
            break;
        }
        if total <= bytes_max {
            kept.extend_from_slice(&data);
        }
    }
    if total > bytes_max {
        return Err(ApiError::TooLarge { bytes_max });
    }
    Ok(kept.freeze())
}

/// A body of JSON. An empty one and `null` are `{}` (wire contract 1.0, BC-075).
#[derive(Debug)]
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<ApiState> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &ApiState) -> Result<Self, ApiError> {
        let RawBody(bytes) = RawBody::from_request(request, state).await?;
        parse_body(&bytes).map(Self)
    }
}

/// A body of JSON that carries files.
#[derive(Debug)]
pub(crate) struct LargeJsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<ApiState> for LargeJsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &ApiState) -> Result<Self, ApiError> {
        let bytes = read_in_time(request, state.settings.limits.run_bytes_max).await?;
        parse_body(&bytes).map(Self)
    }
}

/// Reads an object of JSON, and names the field that is not what it should be. Fields that nobody
/// asked for are ignored.
pub(crate) fn parse_body<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let text = match bytes.trim_ascii() {
        b"" | b"null" => b"{}",
        text => text,
    };
    if !text.starts_with(b"{") {
        return Err(ApiError::invalid("body", "must be a JSON object"));
    }
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let field = match path.as_str() {
            // The whole, or something that broke off before it had a name.
            "." | "?" => String::from("body"),
            _ => path,
        };
        ApiError::invalid(field, error.into_inner().to_string())
    })?;
    reader
        .end()
        .map_err(|_| ApiError::invalid("body", "must be one JSON object"))?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Sample {
        number: Option<i64>,
    }

    #[test]
    fn nothing_null_and_an_empty_object_are_the_same() {
        // BC-075
        for body in ["", "  ", "null", " null\n", "{}", r#"{"unknown":[1,{}]}"#] {
            let read: Sample = parse_body(body.as_bytes()).unwrap();
            assert_eq!(read.number, None, "{body:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let deep = format!("{{\"number\":{}", "[".repeat(100_000));
        for (body, field) in [
            ("[1]", "body"),
            ("\"text\"", "body"),
            ("{\"number\":1} {}", "body"),
            ("{\"number\":", "number"),
            ("{\"number\":1,", "body"),
            ("{\"number\":\"1\"}", "number"),
            ("{\"number\":1e999}", "number"),
            ("{\"number\":1.5}", "number"),
            (&deep, "number"),
            ("{\"number\":1,\"number\":2}", "number"),
            ("\u{feff}{}", "body"),
        ] {
            let refused = parse_body::<Sample>(body.as_bytes())
                .unwrap_err()
                .to_string();
            assert!(
                refused.contains(field),
                "{}: {refused}",
                &body[..body.len().min(40)]
            );
        }
        assert!(parse_body::<Sample>(b"{\"number\":1,\"\xff\":2}").is_err());
    }
}
