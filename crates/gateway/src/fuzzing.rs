//! What reads clients' heads, with what must hold of it, for the fuzz targets and their corpus. No
//! part of the API.

use http::{HeaderName, HeaderValue, Request, request::Parts};
use percent_encoding::percent_decode;
use sandhold_types::Token;

use crate::{
    config::ForwardedTrust,
    headers::{self, Passage},
    paths,
    target::{self, AGENT_PORT, Target},
};

/// What must never come to a sandbox's server, whatever a client sends.
const NEVER_FORWARDED: [&str; 5] = [
    "x-api-key",
    "e2b-traffic-access-token",
    "x-sandhold-control",
    "proxy-authorization",
    "transfer-encoding",
];

/// Reads `bytes` as a method, a URI, and headers, one to a line, and checks what becomes of them.
///
/// # Panics
/// When a rule of the gateway does not hold; that is what fuzzing looks for.
pub fn heads(bytes: &[u8]) {
    let Some(head) = head(bytes) else { return };
    let shared = [String::from("shared.test")];
    let target = target::decide(&head, &shared);
    match &target {
        Some(Target::Port { port, .. }) => {
            assert_ne!(*port, 0);
            let reaches_control = *port == AGENT_PORT && paths::is_control(head.uri.path());
            assert!(!reaches_control, "a control path is let through");
        }
        Some(Target::SignedFile(file)) => {
            assert_eq!(head.uri.path(), "/files");
            assert!(!file.is_signed_by(&Token::new(String::from("nobody's"))));
        }
        Some(Target::Refused(_)) | None => {}
    }
    assert_eq!(target, target::decide(&head, &shared));
    forwarded(head);
}

fn forwarded(head: Parts) {
    let token = Token::new(String::from("agents-own"));
    for port in [AGENT_PORT, 3000] {
        let mut sent = head.headers.clone();
        headers::to_sandbox(
            &mut sent,
            &Passage {
                port,
                client: None,
                original_host: head.headers.get(http::header::HOST).cloned(),
                mask: None,
                access_token: &token,
                trust: ForwardedTrust::Replace,
                upgrade: None,
            },
        );
        for name in NEVER_FORWARDED {
            assert!(!sent.contains_key(name), "{name} is forwarded");
        }
        assert_eq!(sent.get_all(http::header::HOST).iter().count(), 1);
    }
    let mut answered = head.headers;
    headers::to_client(&mut answered, AGENT_PORT);
    assert!(!answered.contains_key(http::header::TRANSFER_ENCODING));
}

/// Reads `bytes` as a path and checks that no spelling of a control path is let through.
///
/// # Panics
/// When one is; that is what fuzzing looks for.
pub fn paths(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else {
        return;
    };
    if paths::is_control(path) {
        return;
    }
    // What a server would make of it that decodes once, and one that does not.
    let decoded = percent_decode(bytes).decode_utf8_lossy().into_owned();
    for seen in [path, &decoded] {
        let plain = seen.trim_start_matches('/');
        let segment = plain.split(['/', '?', ';']).next().unwrap_or_default();
        assert!(
            !["init", "tunnel", "quiesce"].contains(&segment),
            "{path:?}"
        );
    }
}

fn head(bytes: &[u8]) -> Option<Parts> {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let request = Request::builder()
        .method(lines.next()?)
        .uri(lines.next()?)
        .body(())
        .ok()?;
    let mut head = request.into_parts().0;
    for line in lines {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?;
        head.headers.try_append(name, value).ok()?;
    }
    Some(head)
}
