//! What the two RPC services share: who calls, how long, how often to say "still here".

use std::time::Duration;

use axum::extract::Request;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use connectrpc::{
    CompressionPolicy, CompressionRegistry, ConnectError, ConnectRpcService, GzipProvider, Limits,
    Router,
};
use http::{HeaderMap, header::AUTHORIZATION};
use tower::util::MapRequest;

use crate::{
    account::{Account, AccountError},
    state::SandboxState,
};

/// The largest message, in either encoding. Larger input is sent in pieces.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// How often an idle stream says that it is alive, unless the client asks for another period.
pub const KEEPALIVE_DEFAULT: Duration = Duration::from_secs(90);
/// A client that asks for more keep-alives than this gets this many.
pub const KEEPALIVE_MIN: Duration = Duration::from_secs(1);
/// The header in which a client asks for a period, in seconds.
const KEEPALIVE_HEADER: &str = "keepalive-ping-interval";

/// Serves the methods over Connect, JSON and binary. Responses are never compressed: streams
/// must not wait in a compressor, whatever a transport says that it takes. Requests may be.
#[must_use]
pub fn service(router: Router) -> MapRequest<ConnectRpcService, fn(Request) -> Request> {
    let service = ConnectRpcService::new(router)
        .with_limits(
            Limits::default()
                .with_max_request_body_size(MESSAGE_BYTES_MAX)
                .with_max_message_size(MESSAGE_BYTES_MAX),
        )
        .with_compression(CompressionRegistry::new().register(GzipProvider::default()))
        .with_compression_policy(CompressionPolicy::disabled());
    MapRequest::new(service, without_compression)
}

/// The request as if the client took only what is not compressed.
fn without_compression(mut request: Request) -> Request {
    for name in [
        "accept-encoding",
        "connect-accept-encoding",
        "grpc-accept-encoding",
    ] {
        request.headers_mut().remove(name);
    }
    request
}

/// The user a call acts for: the one of `Authorization: Basic`, or the sandbox's default.
///
/// # Errors
/// The header is malformed or nobody has that name.
pub fn caller(headers: &HeaderMap, state: &SandboxState) -> Result<Account, ConnectError> {
    let name = match headers.get(AUTHORIZATION) {
        Some(value) => basic_user(value.as_bytes()).ok_or_else(|| {
            ConnectError::unauthenticated("the Authorization header is malformed")
        })?,
        None => None,
    };
    state.account(name.as_deref()).map_err(account_error)
}

/// A failed look-up of a user, as Connect says it.
#[must_use]
pub fn account_error(error: AccountError) -> ConnectError {
    match error {
        AccountError::Unknown(_) => ConnectError::unauthenticated(error.to_string()),
        AccountError::Read { .. } => ConnectError::internal(error.to_string()),
    }
}

/// The user in a Basic header. `Some(None)` if the header names nobody or is of another scheme,
/// `None` if it is malformed.
#[allow(clippy::option_option)]
pub(crate) fn basic_user(value: &[u8]) -> Option<Option<String>> {
    let text = std::str::from_utf8(value).ok()?;
    let Some((scheme, encoded)) = text.split_once(' ') else {
        return Some(None);
    };
    if !scheme.eq_ignore_ascii_case("basic") {
        return Some(None);
    }
    let decoded = STANDARD.decode(encoded.trim()).ok()?;
    let decoded = String::from_utf8(decoded).ok()?;
    let user = decoded.split(':').next().unwrap_or_default();
    Some((!user.is_empty()).then(|| user.to_owned()))
}

/// How often an idle stream of this call says that it is alive.
#[must_use]
pub fn keepalive_interval(headers: &HeaderMap) -> Duration {
    headers
        .get(KEEPALIVE_HEADER)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.trim().parse::<u64>().ok())
        .filter(|seconds| *seconds > 0)
        .map_or(KEEPALIVE_DEFAULT, Duration::from_secs)
        .clamp(KEEPALIVE_MIN, KEEPALIVE_DEFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_is_in_the_basic_header() {
        let cases: &[(&str, Option<Option<&str>>)] = &[
            ("Basic cm9vdDo=", Some(Some("root"))),
            ("basic dXNlcjpwYXNz", Some(Some("user"))),
            ("Basic Og==", Some(None)),
            ("Bearer abc", Some(None)),
            ("Basic", Some(None)),
            ("Basic ***", None),
            ("Basic /w==", None),
        ];
        for (header, expected) in cases {
            let found = basic_user(header.as_bytes());
            let found = found.as_ref().map(Option::as_deref);
            assert_eq!(found, *expected, "{header}");
        }
    }

    #[test]
    fn clients_choose_the_keepalive_period_within_bounds() {
        let mut headers = HeaderMap::new();
        assert_eq!(keepalive_interval(&headers), KEEPALIVE_DEFAULT);
        for (text, seconds) in [("50", 50), ("0", 90), ("x", 90), ("-1", 90), ("99999", 90)] {
            headers.insert(KEEPALIVE_HEADER, text.parse().unwrap());
            assert_eq!(keepalive_interval(&headers).as_secs(), seconds, "{text}");
        }
    }
}
