//! What the gateway itself answers: exact texts that SDKs parse, and a code per cause.
//!
//! The body is `{sandboxId, message, code, error_code(, port)}`. `code` is the HTTP status as a
//! number, because the SDKs map a number to their exceptions and a text to something else;
//! `error_code` tells the causes apart (BC-078). "was not found" and "port is not open" are what
//! SDKs look for, so no other message may hold them.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use sandhold_types::{EndReason, ErrorCode, SandboxId, SandboxState};

use crate::{body::ReplyBody, target::Refusal};

/// Whom the answer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audience {
    /// A program: JSON.
    Program,
    /// A person with a browser: a small page.
    Person,
}

impl Audience {
    /// A browser that navigates says that it accepts HTML; SDKs and `fetch` do not.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let accepts_html = headers
            .get_all(header::ACCEPT)
            .iter()
            .any(|value| value.to_str().is_ok_and(|text| text.contains("text/html")));
        if accepts_html {
            Self::Person
        } else {
            Self::Program
        }
    }
}

/// Why the gateway answers instead of the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The request cannot be routed.
    Refused(Refusal),
    /// There is no such sandbox.
    Unknown(SandboxId),
    /// It has ended.
    Ended(SandboxId, EndReason),
    /// It exists and takes no requests.
    NotLive(SandboxId, SandboxState),
    /// It was put to sleep while it worked on the request.
    PutToSleep(SandboxId),
    /// It did not come to run in time.
    Late(SandboxId, SandboxState),
    /// It could not be woken, and sleeps on; why, and when to try again.
    WakeFailed(SandboxId, ErrorCode, Duration),
    /// Whoever may not use it may not wake it either.
    MayNotWake(SandboxId),
    /// Nobody listens.
    PortClosed(SandboxId, u16),
    /// A server took the connection and closed it without an answer.
    ConnectionClosed(SandboxId, u16),
    /// Nothing came back for this long.
    NoAnswer(SandboxId, u16, Duration),
    /// What came back is not HTTP.
    NotHttp(SandboxId, u16),
    /// The machine could not open a socket.
    NoSocket(SandboxId),
    /// The traffic token is not there.
    TokenMissing(SandboxId),
    /// The traffic token is another one.
    TokenWrong(SandboxId),
    /// No live sandbox's token made the signature.
    SignatureUnknown,
    /// The signature is older than it may be.
    SignatureExpired,
    /// The sandbox has as many requests at once as it may.
    TooManyRequests(SandboxId, usize),
    /// So many requests wait for a connection to it already.
    TooManyWaiting(SandboxId, usize),
    /// The gateway has as many requests at once as it may.
    GatewayFull,
    /// The head of the request is longer than this.
    HeadTooLarge(u32),
    /// The request asks to become something the gateway does not carry.
    NotCarried(SandboxId),
}

impl Failure {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Refused(Refusal::NoSuchSandbox { .. }) | Self::Unknown(_) => {
                ErrorCode::SandboxUnknown
            }
            Self::Refused(Refusal::ControlPath) => ErrorCode::RouteNotFound,
            Self::Refused(_) => ErrorCode::InvalidRequest,
            Self::Ended(..) => ErrorCode::SandboxEnded,
            Self::PutToSleep(_) => ErrorCode::Conflict,
            Self::NotLive(..) => ErrorCode::SandboxNotRunning,
            Self::Late(..) => ErrorCode::Busy,
            Self::WakeFailed(_, code, _) => *code,
            Self::PortClosed(..) => ErrorCode::PortClosed,
            Self::ConnectionClosed(..) | Self::NotHttp(..) => ErrorCode::PortConnectionClosed,
            Self::NoAnswer(..) => ErrorCode::PortNoAnswer,
            Self::NoSocket(_) | Self::GatewayFull => ErrorCode::CapacityExceeded,
            Self::TokenMissing(_) | Self::TokenWrong(_) => ErrorCode::TrafficTokenRequired,
            Self::SignatureUnknown | Self::SignatureExpired | Self::MayNotWake(_) => {
                ErrorCode::Unauthenticated
            }
            Self::TooManyRequests(..) | Self::TooManyWaiting(..) => ErrorCode::TooManyRequests,
            Self::HeadTooLarge(_) => ErrorCode::HeadTooLarge,
            Self::NotCarried(_) => ErrorCode::NotSupported,
        }
    }

    fn sandbox(&self) -> Option<&str> {
        match self {
            Self::Refused(Refusal::NoSuchSandbox { shown }) => Some(shown),
            Self::Refused(_)
            | Self::SignatureUnknown
            | Self::SignatureExpired
            | Self::HeadTooLarge(_)
            | Self::GatewayFull => None,
            Self::Unknown(id)
            | Self::Ended(id, _)
            | Self::NotLive(id, _)
            | Self::PutToSleep(id)
            | Self::Late(id, _)
            | Self::WakeFailed(id, ..)
            | Self::MayNotWake(id)
            | Self::PortClosed(id, _)
            | Self::ConnectionClosed(id, _)
            | Self::NoAnswer(id, ..)
            | Self::NotHttp(id, _)
            | Self::NoSocket(id)
            | Self::TokenMissing(id)
            | Self::TokenWrong(id)
            | Self::TooManyRequests(id, _)
            | Self::TooManyWaiting(id, _)
            | Self::NotCarried(id) => Some(id.as_str()),
        }
    }

    fn port(&self) -> Option<u16> {
        match self {
            Self::PortClosed(_, port)
            | Self::ConnectionClosed(_, port)
            | Self::NoAnswer(_, port, _)
            | Self::NotHttp(_, port) => Some(*port),
            _ => None,
        }
    }

    fn message(&self) -> String {
        match self {
            Self::Refused(refusal) => refusal_message(refusal).to_owned(),
            Self::Unknown(_) => NOT_FOUND.to_owned(),
            Self::Ended(_, reason) => {
                format!("{NOT_FOUND}: it has ended because {}", told(reason))
            }
            Self::PutToSleep(_) => {
                "The sandbox was put to sleep before it had answered; try again".to_owned()
            }
            Self::Late(_, state) => format!("The sandbox is still {state}; try again shortly"),
            Self::WakeFailed(_, code, _) => {
                format!(
                    "The sandbox could not be woken ({}); it sleeps on",
                    code.as_str()
                )
            }
            Self::MayNotWake(_) => "The sandbox sleeps, and is woken only by a request with its \
                access token"
                .to_owned(),
            Self::NotLive(_, state) => format!("{NOT_FOUND}: it is {state}"),
            Self::PortClosed(..) => "The sandbox is running but port is not open".to_owned(),
            Self::ConnectionClosed(_, port) => format!(
                "The server on port {port} of the sandbox closed the connection without an answer"
            ),
            Self::NoAnswer(_, port, waited) => format!(
                "Port {port} of the sandbox did not answer within {} s",
                waited.as_secs()
            ),
            Self::NotHttp(_, port) => {
                format!("The server on port {port} of the sandbox does not answer in HTTP")
            }
            Self::NoSocket(_) => "No connection to the sandbox could be opened".to_owned(),
            Self::TokenMissing(_) => "Sandbox is secured with traffic access token. Token header \
                'e2b-traffic-access-token' is missing"
                .to_owned(),
            Self::TokenWrong(_) => "Sandbox is secured with traffic access token. Provided \
                traffic access token is invalid"
                .to_owned(),
            Self::SignatureUnknown => "invalid signature".to_owned(),
            Self::SignatureExpired => "signature is already expired".to_owned(),
            Self::TooManyRequests(_, limit) => {
                format!("The sandbox has {limit} requests and connections open, its limit")
            }
            Self::TooManyWaiting(_, limit) => {
                format!("{limit} requests already wait for the sandbox")
            }
            Self::GatewayFull => "The gateway has as many requests open as it may".to_owned(),
            Self::HeadTooLarge(limit) => {
                format!("The head of the request is larger than {limit} bytes")
            }
            Self::NotCarried(_) => "The gateway does not carry this protocol".to_owned(),
        }
    }

    /// What `Should-Retry` says, where the SDKs' own rule (502 is tried again) is wrong.
    fn forbids_retry(&self) -> bool {
        matches!(
            self.code(),
            ErrorCode::SandboxUnknown | ErrorCode::SandboxEnded | ErrorCode::SandboxNotRunning
        )
    }

    fn retry_after_s(&self) -> Option<u32> {
        if let Self::WakeFailed(_, _, retry_after) = self {
            let seconds = retry_after.as_millis().div_ceil(1000).max(1);
            return u32::try_from(seconds).ok();
        }
        match self.code() {
            ErrorCode::Conflict | ErrorCode::CapacityExceeded | ErrorCode::TooManyRequests => {
                Some(1)
            }
            ErrorCode::Busy => Some(2),
            _ => None,
        }
    }
}

/// The text that SDKs look for.
const NOT_FOUND: &str = "The sandbox was not found";

fn refusal_message(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::InvalidPort => "Invalid sandbox port: it is a number from 1 to 65535",
        Refusal::PortMissing => "The header E2b-Sandbox-Id needs E2b-Sandbox-Port beside it",
        Refusal::NoSuchSandbox { .. } => NOT_FOUND,
        Refusal::AmbiguousHost => "The request names more than one host",
        Refusal::ControlPath => "No such route",
    }
}

/// The reason of an end, without what only its owner may know: whoever has the host name may ask.
fn told(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::Killed { .. } => "it was killed",
        EndReason::TimedOut => "its timeout passed",
        EndReason::OutOfMemory => "it ran out of memory",
        EndReason::DiskFull => "it filled its disk",
        EndReason::CreateFailed { .. } => "its creation failed",
        EndReason::EngineFailed { .. } => "its engine failed",
    }
}

/// The whole answer.
pub(crate) fn answer(failure: &Failure, audience: Audience) -> Response<ReplyBody> {
    let code = failure.code();
    let status = StatusCode::from_u16(code.http_status()).unwrap_or(StatusCode::BAD_GATEWAY);
    let message = failure.message();
    let (content_type, body) = match audience {
        Audience::Program => ("application/json", json(failure, status, &message)),
        Audience::Person => ("text/html; charset=utf-8", page(status, &message)),
    };
    let mut response = Response::new(ReplyBody::full(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if failure.forbids_retry() {
        headers.insert("should-retry", HeaderValue::from_static("false"));
    }
    if let Some(seconds) = failure.retry_after_s() {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

fn json(failure: &Failure, status: StatusCode, message: &str) -> String {
    let mut body = serde_json::json!({
        "sandboxId": failure.sandbox().unwrap_or_default(),
        "message": message,
        "code": status.as_u16(),
        "error_code": failure.code().as_str(),
    });
    if let (Some(port), Some(fields)) = (failure.port(), body.as_object_mut()) {
        fields.insert("port".to_owned(), port.into());
    }
    body.to_string()
}

fn page(status: StatusCode, message: &str) -> String {
    let message = escaped(message);
    let title = status.canonical_reason().unwrap_or("Error");
    let number = status.as_u16();
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{number} {title}</title>\
         <style>body{{font:16px system-ui;margin:15vh auto;max-width:36rem;padding:0 1rem}}\
         p{{color:#555}}</style><h1>{message}</h1><p>{number} {title}</p></html>"
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandhold_types::{Actor, KeyId};

    fn id() -> SandboxId {
        "abcdefghij0123456789".parse().unwrap()
    }

    fn every_failure() -> Vec<Failure> {
        let key: KeyId = "secretkey".parse().unwrap();
        let request = "r1".parse().unwrap();
        let by = Actor::Client { key, request };
        vec![
            Failure::Unknown(id()),
            Failure::Ended(id(), EndReason::Killed { by }),
            Failure::NotLive(id(), SandboxState::Paused),
            Failure::NotLive(id(), SandboxState::Killing),
            Failure::PutToSleep(id()),
            Failure::Late(id(), SandboxState::Resuming),
            Failure::WakeFailed(id(), ErrorCode::CapacityExceeded, Duration::from_secs(5)),
            Failure::WakeFailed(id(), ErrorCode::EngineFailed, Duration::from_millis(100)),
            Failure::MayNotWake(id()),
            Failure::PortClosed(id(), 80),
            Failure::ConnectionClosed(id(), 80),
            Failure::NoAnswer(id(), 80, Duration::from_secs(3)),
            Failure::NotHttp(id(), 80),
            Failure::NoSocket(id()),
            Failure::TokenMissing(id()),
            Failure::TokenWrong(id()),
            Failure::SignatureUnknown,
            Failure::SignatureExpired,
            Failure::TooManyRequests(id(), 5),
            Failure::HeadTooLarge(5),
            Failure::TooManyWaiting(id(), 5),
            Failure::GatewayFull,
            Failure::NotCarried(id()),
            Failure::Refused(Refusal::InvalidPort),
            Failure::Refused(Refusal::ControlPath),
        ]
    }

    #[test]
    fn only_the_right_failures_say_what_sdks_look_for() {
        // BC-078: a port error never says 'sandbox not found'.
        for failure in every_failure() {
            let gone = matches!(
                failure.code(),
                ErrorCode::SandboxUnknown | ErrorCode::SandboxEnded | ErrorCode::SandboxNotRunning
            );
            let message = failure.message();
            assert_eq!(message.contains("was not found"), gone, "{failure:?}");
            let closed = matches!(failure, Failure::PortClosed(..));
            assert_eq!(message.contains("port is not open"), closed, "{failure:?}");
        }
    }

    #[test]
    fn answers_are_json_with_a_numeric_code() {
        for failure in every_failure() {
            let status = StatusCode::from_u16(failure.code().http_status()).unwrap();
            let text = json(&failure, status, &failure.message());
            let body: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(body["code"], failure.code().http_status());
            assert!(body["message"].is_string() && body["sandboxId"].is_string());
        }
        let closed = json(&Failure::PortClosed(id(), 80), StatusCode::BAD_GATEWAY, "");
        assert!(closed.contains("\"port\":80"));
    }

    #[test]
    fn the_reason_of_an_end_is_told_without_its_owners_secrets() {
        // R-L12
        let ended = |reason| Failure::Ended(id(), reason).message();
        assert!(ended(EndReason::OutOfMemory).contains("ran out of memory"));
        let detail = "/var/lib/secret".to_owned();
        assert!(!ended(EndReason::EngineFailed { detail }).contains("secret"));
        assert!(!every_failure()[1].message().contains("secretkey"));
    }

    #[test]
    fn who_waited_in_vain_is_told_when_to_come_back() {
        // R-L7
        let seconds = |failure: &Failure| failure.retry_after_s();
        for failure in every_failure() {
            let waited = matches!(
                failure,
                Failure::Late(..) | Failure::WakeFailed(..) | Failure::TooManyWaiting(..)
            );
            assert!(!waited || seconds(&failure) >= Some(1), "{failure:?}");
        }
        let refused =
            Failure::WakeFailed(id(), ErrorCode::CapacityExceeded, Duration::from_secs(5));
        assert_eq!(seconds(&refused), Some(5));
    }

    #[test]
    fn hostile_text_is_harmless_in_a_page() {
        assert!(!page(StatusCode::BAD_GATEWAY, "<script>").contains("<script>"));
    }
}
