//! Who may call what (wire contract 2.2).
//!
//! ```text
//!   GET /health                   anybody
//!   /init /ready /quiesce …       the control token
//!   GET|POST /files               the access token, or a signature made with it
//!   everything else               the access token
//! ```
//!
//! Until the first `/init` there is no access token, and nothing but `/health` and the control
//! calls is answered. A token in the header must be right even where a signature would do.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, Method, StatusCode, header::CONTENT_TYPE};
use sandhold_agent_proto::control;
use sandhold_types::Token;

use crate::{
    activity::ActivityMeter,
    files::signature::{self, FileOperation, FileQuery},
    http_error::HttpError,
    state::{Life, SandboxState},
};

/// The header with the access token.
const ACCESS_TOKEN_HEADER: &str = "x-access-token";

/// What a route asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Anybody,
    Control,
    TokenOrSignature(FileOperation),
    Token,
}

fn access_of(method: &Method, path: &str) -> Access {
    if control::PRIVATE_PATHS.contains(&path) {
        return Access::Control;
    }
    match (path, method) {
        ("/health", _) => Access::Anybody,
        ("/files", &Method::GET | &Method::HEAD) => Access::TokenOrSignature(FileOperation::Read),
        ("/files", &Method::POST) => Access::TokenOrSignature(FileOperation::Write),
        _ => Access::Token,
    }
}

/// What the check needs.
#[derive(Debug, Clone)]
pub struct Gate {
    /// The tokens and the clock.
    pub state: Arc<SandboxState>,
    /// Told of every data-plane call.
    pub activity: ActivityMeter,
}

/// Lets a request through, or answers it with 401.
pub async fn check(State(gate): State<Gate>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let access = access_of(request.method(), path);
    let is_rpc = path.starts_with("/process.") || path.starts_with("/filesystem.");
    let life = gate.state.life();
    let decision = match access {
        Access::Anybody => Ok(()),
        Access::Control => check_control(&life, request.headers()),
        Access::Token => check_token(&life, request.headers()),
        Access::TokenOrSignature(operation) => {
            let now_s = gate.state.clock.now().unix_s();
            check_file_access(&life, &request, operation, now_s)
        }
    };
    match decision {
        Ok(()) => {
            if matches!(access, Access::Token | Access::TokenOrSignature(_)) {
                gate.activity.touch();
            }
            next.run(request).await
        }
        Err(message) if is_rpc => rpc_unauthenticated(message),
        Err(message) => HttpError::unauthorized(message).into_response(),
    }
}

fn check_control(life: &Life, headers: &HeaderMap) -> Result<(), &'static str> {
    let presented = header(headers, control::CONTROL_HEADER);
    match (&life.control_token, presented) {
        (Some(token), Some(presented)) if token.matches(presented) => Ok(()),
        _ => Err("this call belongs to the host"),
    }
}

fn check_token(life: &Life, headers: &HeaderMap) -> Result<(), &'static str> {
    let token = access_token(life)?;
    match header(headers, ACCESS_TOKEN_HEADER) {
        Some(presented) if token.matches(presented) => Ok(()),
        Some(_) => Err("the access token is wrong"),
        None => Err("the access token is missing"),
    }
}

fn check_file_access(
    life: &Life,
    request: &Request,
    operation: FileOperation,
    now_s: u64,
) -> Result<(), &'static str> {
    if request.headers().contains_key(ACCESS_TOKEN_HEADER) {
        return check_token(life, request.headers());
    }
    let token = access_token(life)?;
    let query = FileQuery::parse(request.uri().query().unwrap_or_default())
        .map_err(|_| "the query cannot be read")?;
    signature::check(&query, operation, token, now_s).map_err(signature::SignatureError::text)
}

fn access_token(life: &Life) -> Result<&Token, &'static str> {
    life.access_token
        .as_ref()
        .ok_or("the sandbox has no access token yet")
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// A refusal in the form of a Connect error, which streams' clients read too.
fn rpc_unauthenticated(message: &str) -> Response {
    let body = serde_json::json!({ "code": "unauthenticated", "message": message });
    (
        StatusCode::UNAUTHORIZED,
        [(CONTENT_TYPE, "application/json")],
        body.to_string(),
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_but_four_needs_the_token() {
        use Access::{Anybody, Control, Token, TokenOrSignature};
        for (method, path, expected) in [
            (Method::GET, "/health", Anybody),
            (Method::GET, "/files", TokenOrSignature(FileOperation::Read)),
            (
                Method::POST,
                "/files",
                TokenOrSignature(FileOperation::Write),
            ),
            (Method::POST, "/files/compose", Token),
            (Method::DELETE, "/files", Token),
            (Method::GET, "/envs", Token),
            (Method::GET, "/metrics", Token),
            (Method::POST, "/process.Process/Start", Token),
            (Method::POST, "/init", Control),
            (Method::GET, "/tunnel", Control),
            (Method::POST, "/freeze", Control),
            (Method::GET, "/", Token),
        ] {
            assert_eq!(access_of(&method, path), expected, "{method} {path}");
        }
    }
}
