//! Which requests are for a sandbox, and for which port of which one (wire contract 2.1).
//!
//! ```text
//!   host ─┬─ IP, localhost, sandbox.*, configured ──▶ routing headers ──▶ port of a sandbox
//!         │                                     └──▶ /files?signature= ─▶ signed file
//!         ├─ <port>-<id>[-…].<domain> ──────────────▶ port of a sandbox
//!         └─ anything else ─────────────────────────▶ not ours (the API's)
//! ```
//!
//! Pure functions of a request's head. On a sandbox's own host name the routing headers mean
//! nothing, so that a page served by one sandbox cannot reach another by sending them.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, header, request::Parts};
use sandhold_types::SandboxId;

use crate::{paths, signature::SignedFile};

/// The guest agent's port.
pub const AGENT_PORT: u16 = 49983;
/// The code interpreter's port.
pub const INTERPRETER_PORT: u16 = 49999;

/// Names the sandbox on a shared host.
pub(crate) const SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
/// Names the port on a shared host.
pub(crate) const SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

/// How many characters of a name that is no identifier an error answer repeats.
const SHOWN_ID_LENGTH_MAX: usize = 64;

/// What a request that the gateway claims is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A port of a sandbox.
    Port {
        /// The sandbox.
        sandbox: SandboxId,
        /// The port, never 0.
        port: u16,
    },
    /// A file of whichever sandbox's token made the signature.
    SignedFile(SignedFile),
    /// It is the gateway's to answer, and the answer is no.
    Refused(Refusal),
}

/// Why a request cannot be routed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The port is not a number from 1 to 65535.
    InvalidPort,
    /// There is a sandbox header and no port header.
    PortMissing,
    /// The name is not a sandbox's; so there is no such sandbox.
    NoSuchSandbox {
        /// The name, without what could do harm in an answer.
        shown: String,
    },
    /// More than one `Host`.
    AmbiguousHost,
    /// A path of the agent that only the platform may use.
    ControlPath,
}

/// Decides whose a request is; `None` means the API's.
#[must_use]
pub fn decide(head: &Parts, shared_hosts: &[String]) -> Option<Target> {
    let Ok(host) = effective_host(head) else {
        return Some(Target::Refused(Refusal::AmbiguousHost));
    };
    let target = match classify(&host, shared_hosts) {
        HostKind::Shared => by_headers(head)?,
        HostKind::Sandbox { port, id } => port_target(port, id),
        HostKind::Other => return None,
    };
    Some(guard_control_paths(target, head.uri.path()))
}

/// The host that a request is for, lower-case, without port: the URI's authority (HTTP/2, absolute
/// form) before the `Host` header, as RFC 9112 has it.
fn effective_host(head: &Parts) -> Result<String, Refusal> {
    let raw = original_host(head)?.unwrap_or_default();
    Ok(without_port(raw).trim_end_matches('.').to_ascii_lowercase())
}

/// The host as the client wrote it, port included.
pub(crate) fn original_host(head: &Parts) -> Result<Option<&str>, Refusal> {
    if let Some(authority) = head.uri.authority() {
        let text = authority.as_str();
        return Ok(Some(text.rsplit_once('@').map_or(text, |(_, host)| host)));
    }
    let mut hosts = head.headers.get_all(header::HOST).iter();
    let first = hosts.next();
    if hosts.next().is_some() {
        return Err(Refusal::AmbiguousHost);
    }
    Ok(first.and_then(|value| value.to_str().ok()))
}

fn without_port(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split_once(']').map_or(host, |(address, _)| address);
    }
    match host.rsplit_once(':') {
        // More than one colon is a bare IPv6 address, which has no port.
        Some((name, _)) if !name.contains(':') => name,
        _ => host,
    }
}

#[derive(Debug, PartialEq, Eq)]
enum HostKind<'a> {
    Shared,
    Sandbox { port: &'a str, id: &'a str },
    Other,
}

fn classify<'a>(host: &'a str, shared_hosts: &[String]) -> HostKind<'a> {
    let is_shared = host == "localhost"
        || host.starts_with("sandbox.")
        || host.parse::<IpAddr>().is_ok()
        || shared_hosts.iter().any(|shared| shared == host);
    if is_shared {
        return HostKind::Shared;
    }
    // A sandbox's name always stands under a domain.
    let Some((label, _domain)) = host.split_once('.') else {
        return HostKind::Other;
    };
    // Anything behind the second dash is the client ID of older SDKs.
    let mut parts = label.split('-');
    match (parts.next(), parts.next()) {
        (Some(port), Some(id)) if is_digits(port) => HostKind::Sandbox { port, id },
        _ => HostKind::Other,
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn by_headers(head: &Parts) -> Option<Target> {
    let Some(id) = single(&head.headers, &SANDBOX_ID) else {
        return SignedFile::from_request(head).map(Target::SignedFile);
    };
    Some(match single(&head.headers, &SANDBOX_PORT) {
        Some(port) => port_target(port, &id.to_ascii_lowercase()),
        None => Target::Refused(Refusal::PortMissing),
    })
}

/// The value of a header that is there; an unreadable or repeated one reads as empty, which is no
/// valid value of any header that this is used for.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    match values.next() {
        Some(_) => Some(""),
        None => Some(first.to_str().unwrap_or_default().trim()),
    }
}

fn port_target(port: &str, id: &str) -> Target {
    let number = if is_digits(port) {
        port.parse().ok()
    } else {
        None
    };
    let Some(port) = number.filter(|port: &u16| *port != 0) else {
        return Target::Refused(Refusal::InvalidPort);
    };
    match id.parse() {
        Ok(sandbox) => Target::Port { sandbox, port },
        Err(_) => Target::Refused(Refusal::NoSuchSandbox {
            shown: id
                .chars()
                .filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'))
                .take(SHOWN_ID_LENGTH_MAX)
                .collect(),
        }),
    }
}

fn guard_control_paths(target: Target, path: &str) -> Target {
    match target {
        Target::Port {
            port: AGENT_PORT, ..
        } if paths::is_control(path) => Target::Refused(Refusal::ControlPath),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    const ID: &str = "abcdefghij0123456789";

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut builder = Request::builder().uri(uri);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(()).unwrap().into_parts().0
    }

    fn by_host(host: &str) -> Option<Target> {
        decide(&parts("/", &[("host", host)]), &[])
    }

    fn port(port: u16) -> Option<Target> {
        Some(Target::Port {
            sandbox: ID.parse().unwrap(),
            port,
        })
    }

    #[test]
    fn a_host_names_port_and_sandbox() {
        // R-P7, wire contract 2.1
        assert_eq!(by_host(&format!("3000-{ID}.example.com")), port(3000));
        assert_eq!(by_host(&format!("3000-{ID}.example.com:8443")), port(3000));
        assert_eq!(by_host(&format!("3000-{ID}-6532622b.e2b.dev")), port(3000));
        assert_eq!(
            by_host(&format!("49983-{}.CUBE.app.", ID.to_uppercase())),
            port(49983)
        );
    }

    #[test]
    fn other_hosts_are_the_apis() {
        for host in [
            "api.example.com",
            "localhost:3000",
            "127.0.0.1:3000",
            "[::1]:3000",
            "my-host.lan",
            "console.example.com",
            "",
            "3000-nodomain",
        ] {
            assert_eq!(by_host(host), None, "{host}");
        }
    }

    #[test]
    fn bad_ports_and_ids_are_refused() {
        for bad in ["0", "65536", "99999999999999999999"] {
            let target = by_host(&format!("{bad}-{ID}.example.com"));
            assert_eq!(target, Some(Target::Refused(Refusal::InvalidPort)), "{bad}");
        }
        let target = by_host("80-nosuch.example.com");
        let shown = "nosuch".to_owned();
        assert_eq!(
            target,
            Some(Target::Refused(Refusal::NoSuchSandbox { shown }))
        );
    }

    #[test]
    fn headers_route_only_on_a_shared_host() {
        // A page on one sandbox's host must not reach another sandbox by headers.
        let other = "zzzzzzzzzzzzzzzzzzzz";
        let spoofed = [("e2b-sandbox-id", ID), ("e2b-sandbox-port", "49983")];
        for host in ["127.0.0.1:3001", "localhost", "[::1]:80", "sandbox.e2b.app"] {
            let mut headers = vec![("host", host)];
            headers.extend(spoofed);
            assert_eq!(decide(&parts("/", &headers), &[]), port(49983), "{host}");
        }
        let host = format!("8080-{other}.example.com");
        let mut headers = vec![("host", host.as_str())];
        headers.extend(spoofed);
        let expected = Target::Port {
            sandbox: other.parse().unwrap(),
            port: 8080,
        };
        assert_eq!(decide(&parts("/", &headers), &[]), Some(expected));
        headers[0].1 = "api.example.com";
        assert_eq!(decide(&parts("/", &headers), &[]), None);
        let shared = ["api.example.com".to_owned()];
        assert_eq!(decide(&parts("/", &headers), &shared), port(49983));
    }

    #[test]
    fn header_mistakes_are_told() {
        let refused = |headers: &[(&str, &str)]| match decide(&parts("/", headers), &[]) {
            Some(Target::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        };
        let host = ("host", "localhost");
        let id = ("e2b-sandbox-id", ID);
        assert_eq!(refused(&[host, id]), Refusal::PortMissing);
        for bad in ["", "0", "-1", "70000", "8 0", "+80", "0x50", "８０"] {
            assert_eq!(
                refused(&[host, id, ("e2b-sandbox-port", bad)]),
                Refusal::InvalidPort,
                "{bad}"
            );
        }
        let twice = [host, id, id, ("e2b-sandbox-port", "80")];
        assert!(matches!(refused(&twice), Refusal::NoSuchSandbox { .. }));
        let hosts = [host, ("host", "example.com")];
        assert_eq!(refused(&hosts), Refusal::AmbiguousHost);
    }

    #[test]
    fn the_authority_wins_over_the_host_header() {
        let uri = format!("http://3000-{ID}.example.com/x");
        let head = parts(&uri, &[("host", "localhost")]);
        assert_eq!(decide(&head, &[]), port(3000));
        let uri = format!("http://user@3000-{ID}.example.com/x");
        assert_eq!(decide(&parts(&uri, &[]), &[]), port(3000));
    }

    #[test]
    fn control_paths_are_refused_on_the_agents_port_only() {
        let on = |port: u16, path: &str| {
            let host = format!("{port}-{ID}.example.com");
            decide(&parts(path, &[("host", &host)]), &[])
        };
        assert_eq!(
            on(AGENT_PORT, "/init"),
            Some(Target::Refused(Refusal::ControlPath))
        );
        assert_eq!(on(3000, "/init"), port(3000));
        assert_eq!(on(AGENT_PORT, "/files?path=/init"), port(AGENT_PORT));
    }
}
