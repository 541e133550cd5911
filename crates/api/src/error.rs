//! Why a request is refused, and the answer that says so (R-P10).
//!
//! Every answer has a JSON body `{code, message, error_code}` and says whether to try again:
//! `Should-Retry`, and `Retry-After` in whole seconds where there is a time.

use std::{fmt::Write as _, time::Duration};

use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use sandhold_governor::{
    books::Limit,
    ids::{Bucket, LeaseId},
};
use sandhold_platform::PlatformError;
use sandhold_store::StoreError;
use sandhold_types::{ErrorCode, Generation, Retry, SandboxState};
use serde::Serialize;

/// The longest message, in characters. What a caller sent may be quoted in it.
const MESSAGE_CHARS_MAX: usize = 512;

/// When to ask again for the result of a request with the same idempotency key.
const IN_PROGRESS_RETRY: Duration = Duration::from_secs(2);

static SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

/// A refused request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("{field}: {problem}")]
    Invalid { field: String, problem: String },
    #[error("{0}")]
    Unauthenticated(&'static str),
    #[error("{0}")]
    Forbidden(&'static str),
    #[error("sandbox {id} was not found{}", ended.as_ref().map(|e| format!(": {e}")).unwrap_or_default())]
    SandboxNotFound { id: String, ended: Option<String> },
    #[error("template '{0}' was not found")]
    TemplateNotFound(String),
    #[error("there is no build {build} of template '{template}'")]
    BuildNotFound { template: String, build: String },
    #[error("there is no API key {0}")]
    KeyNotFound(String),
    #[error("there is no such route")]
    RouteNotFound,
    #[error("this route does not have this method")]
    MethodNotAllowed,
    #[error("the body is larger than {bytes_max} bytes")]
    TooLarge { bytes_max: usize },
    #[error("the body did not arrive in time")]
    BodyTimeout,
    #[error("{0} is not supported yet")]
    NotSupported(String),
    #[error("sandbox {id} is {state}; try again in {} s", retry_after.as_secs())]
    Overlap {
        id: String,
        state: SandboxState,
        retry_after: Duration,
    },
    #[error("{0}")]
    Conflict(String),
    #[error("a request with this Idempotency-Key is still being carried out")]
    IdempotencyInProgress,
    #[error("this Idempotency-Key was used for another request")]
    IdempotencyMismatch,
    #[error("{0}")]
    TooMany(&'static str),
    #[error("another generation has the sandbox; this lease is sealed")]
    StaleLease { current: Option<Generation> },
    #[error("there is no lease {0}")]
    LeaseNotFound(LeaseId),
    #[error("there is no run {0}")]
    RunNotFound(String),
    #[error("bucket {0} was never set")]
    BucketNotFound(Bucket),
    #[error("no room for another sandbox: {}", match .0 {
        Limit::Bucket => "the quota of the namespace and env is used up",
        Limit::Global => "the limit over all tenants is reached",
    })]
    NoPlace(Limit),
    #[error("not now: {0}")]
    Unavailable(&'static str),
    #[error("not now: {0}")]
    Books(#[from] sandhold_governor::StoreError),
    #[error("the deadline passed while {step}")]
    Deadline { step: &'static str },
    #[error("the request failed inside the server")]
    Panicked,
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("the server's records are not available")]
    Store(#[from] StoreError),
}

/// The body of every answer that refuses.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct ErrorBody {
    /// The HTTP status.
    code: u16,
    /// What happened, for people.
    message: String,
    /// The stable name, for programs.
    error_code: &'static str,
    /// Only where a lease is stale: it can never act again.
    #[serde(skip_serializing_if = "Option::is_none")]
    sealed: Option<bool>,
    /// Only where a lease is stale: the fencing token of the current one, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    current_fence: Option<u64>,
}

impl ApiError {
    pub(crate) fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid {
            field: field.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid { .. } | Self::BodyTimeout => ErrorCode::InvalidRequest,
            Self::Unauthenticated(_) => ErrorCode::Unauthenticated,
            Self::Forbidden(_) => ErrorCode::Forbidden,
            Self::SandboxNotFound { .. } => ErrorCode::SandboxNotFound,
            Self::TemplateNotFound(_) => ErrorCode::TemplateNotFound,
            Self::BuildNotFound { .. } => ErrorCode::BuildNotFound,
            Self::KeyNotFound(_) => ErrorCode::KeyNotFound,
            Self::RouteNotFound => ErrorCode::RouteNotFound,
            Self::MethodNotAllowed => ErrorCode::MethodNotAllowed,
            Self::TooLarge { .. } => ErrorCode::TooLarge,
            Self::NotSupported(_) => ErrorCode::NotSupported,
            Self::Conflict(_) | Self::IdempotencyInProgress | Self::Overlap { .. } => {
                ErrorCode::Conflict
            }
            Self::IdempotencyMismatch => ErrorCode::IdempotencyMismatch,
            Self::TooMany(_) => ErrorCode::TooManyRequests,
            Self::StaleLease { .. } => ErrorCode::StaleLease,
            Self::LeaseNotFound(_) => ErrorCode::LeaseNotFound,
            Self::RunNotFound(_) => ErrorCode::RunNotFound,
            Self::BucketNotFound(_) => ErrorCode::BucketNotFound,
            Self::NoPlace(_) => ErrorCode::CapacityExceeded,
            Self::Unavailable(_) | Self::Books(_) => ErrorCode::Unavailable,
            Self::Deadline { .. } => ErrorCode::DeadlineExceeded,
            Self::Platform(error) => error.code(),
            Self::Store(StoreError::Overloaded { .. }) => ErrorCode::Busy,
            Self::Panicked | Self::Store(_) => ErrorCode::Internal,
        }
    }

    fn retry(&self) -> Retry {
        match self {
            Self::IdempotencyInProgress => Retry::After(IN_PROGRESS_RETRY),
            Self::Overlap { retry_after, .. } => Retry::After(*retry_after),
            Self::Platform(error) => error.retry(),
            other => other.code().default_retry(),
        }
    }

    /// Writes failures of the server, with all their causes, into its log: once, here at the edge.
    fn log(&self) {
        if self.code().http_status() < 500 {
            return;
        }
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            // Writing to a string does not fail.
            let _ = write!(text, ": {error}");
            cause = error.source();
        }
        tracing::warn!(error_code = self.code().as_str(), "{text}");
    }
}

/// The message as it is sent: not longer than [`MESSAGE_CHARS_MAX`], and without the word by which
/// a Cube client tells a missing template from a missing sandbox, unless that is what it is.
fn message_for_client(code: ErrorCode, message: &str) -> String {
    let short: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
    if code == ErrorCode::SandboxNotFound && short.to_ascii_lowercase().contains("template") {
        return String::from("the sandbox was not found");
    }
    short
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.log();
        let code = self.code();
        let status =
            StatusCode::from_u16(code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = ErrorBody {
            code: status.as_u16(),
            message: message_for_client(code, &self.to_string()),
            error_code: code.as_str(),
            sealed: matches!(self, Self::StaleLease { .. }).then_some(true),
            current_fence: match &self {
                Self::StaleLease { current } => current.map(|generation| generation.0),
                _ => None,
            },
        };
        let mut response = (status, axum::Json(body)).into_response();
        let headers = response.headers_mut();
        match self.retry() {
            Retry::Never => {
                headers.insert(SHOULD_RETRY.clone(), HeaderValue::from_static("false"));
            }
            Retry::After(wait) => {
                let seconds = wait.as_millis().div_ceil(1000).max(1);
                headers.insert(SHOULD_RETRY.clone(), HeaderValue::from_static("true"));
                if let Ok(seconds) = HeaderValue::from_str(&seconds.to_string()) {
                    headers.insert(header::RETRY_AFTER, seconds);
                }
            }
        }
        if code == ErrorCode::Unauthenticated {
            headers.insert(
                header::WWW_AUTHENTICATE,
                HeaderValue::from_static("Bearer realm=\"sandhold\""),
            );
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_404_never_says_template() {
        // Wire contract, "Status → exception (Cube)".
        let hostile = "sandbox x was not found: its creation failed: restoring the Template image";
        let sent = message_for_client(ErrorCode::SandboxNotFound, hostile);
        assert_eq!(sent, "the sandbox was not found");
        let sent = message_for_client(ErrorCode::TemplateNotFound, "template 'x' was not found");
        assert_eq!(sent, "template 'x' was not found");
    }

    #[test]
    fn a_message_is_never_longer_than_its_bound() {
        let sent = message_for_client(ErrorCode::InvalidRequest, &"ж".repeat(10_000));
        assert_eq!(sent.chars().count(), MESSAGE_CHARS_MAX);
    }
}
