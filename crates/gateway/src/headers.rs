//! What passes from a client to a sandbox and back, header by header. Pure.
//!
//! Never forwarded into a guest: our API keys, traffic tokens, the agent's access token (except to
//! the agent), anything of `X-Sandhold-*`, and what belongs to one connection only (RFC 9110 7.6.1).

use http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{self, Entry},
};
use sandhold_types::Token;

use crate::{
    config::ForwardedTrust,
    target::{AGENT_PORT, INTERPRETER_PORT},
};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const X_ACCESS_TOKEN: HeaderName = HeaderName::from_static("x-access-token");
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// The names under which SDKs send the traffic token.
const TRAFFIC_TOKENS: [HeaderName; 2] = [
    HeaderName::from_static("e2b-traffic-access-token"),
    HeaderName::from_static("cube-traffic-access-token"),
];

/// Credentials that are for the control plane.
const CONTROL_PLANE_CREDENTIALS: [HeaderName; 5] = [
    X_API_KEY,
    HeaderName::from_static("x-admin-token"),
    HeaderName::from_static("x-team-id"),
    HeaderName::from_static("x-supabase-token"),
    header::PROXY_AUTHORIZATION,
];

/// What concerns one connection only. `Trailer` is not here: a message keeps its trailers.
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HTTP2_SETTINGS,
];

/// Headers with this prefix are ours alone.
const OWN_PREFIX: &str = "x-sandhold-";
/// What every API key of ours begins with.
const API_KEY_PREFIX: &str = "e2b_";

/// Where a request came from and goes to.
#[derive(Debug)]
pub(crate) struct Passage<'a> {
    pub(crate) port: u16,
    /// Who connected to us.
    pub(crate) client: Option<HeaderValue>,
    /// The host as the client wrote it.
    pub(crate) original_host: Option<HeaderValue>,
    /// Replaces it, if the sandbox was made so.
    pub(crate) mask: Option<&'a str>,
    pub(crate) access_token: &'a Token,
    pub(crate) trust: ForwardedTrust,
    /// The protocol that the request is to switch to.
    pub(crate) upgrade: Option<&'a HeaderValue>,
}

/// Turns a client's headers into what the sandbox is sent.
pub(crate) fn to_sandbox(headers: &mut HeaderMap, passage: &Passage<'_>) {
    let carries_trailers = accepts_trailers(headers);
    remove_hop_by_hop(headers);
    headers.remove(header::TE);
    headers.remove(header::EXPECT);
    if carries_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    remove_credentials(headers, passage);
    set_forwarded(headers, passage);
    set_host(headers, passage);
    if let Some(protocol) = passage.upgrade {
        headers.insert(header::UPGRADE, protocol.clone());
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    } else if carries_trailers {
        headers.insert(header::CONNECTION, HeaderValue::from_static("te"));
    }
}

/// Turns a sandbox's headers into what the client is sent.
pub(crate) fn to_client(headers: &mut HeaderMap, port: u16) {
    remove_hop_by_hop(headers);
    remove_own(headers);
    if is_agent(port) {
        allow_origins(headers);
    }
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        for name in nominated(headers) {
            headers.remove(name);
        }
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// The headers that `Connection` names as its own. `Host` and the framing of the body are not
/// for it to take away.
fn nominated(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse::<HeaderName>().ok())
        .filter(|name| *name != header::HOST && *name != header::CONTENT_LENGTH)
        .collect()
}

fn accepts_trailers(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::TE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
}

fn remove_own(headers: &mut HeaderMap) {
    let own: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with(OWN_PREFIX))
        .cloned()
        .collect();
    for name in own {
        headers.remove(name);
    }
}

fn remove_credentials(headers: &mut HeaderMap, passage: &Passage<'_>) {
    for name in CONTROL_PLANE_CREDENTIALS.iter().chain(&TRAFFIC_TOKENS) {
        headers.remove(name);
    }
    remove_own(headers);
    remove_where(headers, &header::AUTHORIZATION, is_our_bearer);
    if !is_agent(passage.port) {
        // A server that a user runs must not learn what opens the agent.
        remove_where(headers, &X_ACCESS_TOKEN, |value| {
            value
                .to_str()
                .is_ok_and(|text| passage.access_token.matches(text.trim()))
        });
    }
}

/// A bearer that is one of our API keys. Any other belongs to the program in the sandbox.
fn is_our_bearer(value: &HeaderValue) -> bool {
    let Ok(text) = value.to_str() else {
        return false;
    };
    let Some((scheme, credentials)) = text.trim().split_once(' ') else {
        return false;
    };
    scheme.eq_ignore_ascii_case("bearer") && credentials.trim().starts_with(API_KEY_PREFIX)
}

/// Removes a header if any of its values is such.
fn remove_where(headers: &mut HeaderMap, name: &HeaderName, is: impl Fn(&HeaderValue) -> bool) {
    if headers.get_all(name).iter().any(is) {
        headers.remove(name);
    }
}

fn set_forwarded(headers: &mut HeaderMap, passage: &Passage<'_>) {
    let (client, host) = (passage.client.clone(), passage.original_host.clone());
    let proto = HeaderValue::from_static("http");
    match passage.trust {
        ForwardedTrust::Replace => {
            for name in [header::FORWARDED, X_FORWARDED_PORT, X_REAL_IP] {
                headers.remove(name);
            }
            headers.insert(X_FORWARDED_PROTO, proto);
            replace(headers, X_FORWARDED_HOST, host);
            replace(headers, X_FORWARDED_FOR, client);
        }
        ForwardedTrust::Extend => {
            insert_missing(headers, X_FORWARDED_PROTO, Some(proto));
            insert_missing(headers, X_FORWARDED_HOST, host);
            if let Some(client) = client {
                headers.append(X_FORWARDED_FOR, client);
            }
        }
    }
}

fn replace(headers: &mut HeaderMap, name: HeaderName, value: Option<HeaderValue>) {
    match value {
        Some(value) => {
            headers.insert(name, value);
        }
        None => {
            headers.remove(name);
        }
    }
}

fn insert_missing(headers: &mut HeaderMap, name: HeaderName, value: Option<HeaderValue>) {
    if let (Entry::Vacant(vacant), Some(value)) = (headers.entry(name), value) {
        vacant.insert(value);
    }
}

/// The same `Host` for plain requests and upgrades (BC-109): what the client wrote, or the mask.
fn set_host(headers: &mut HeaderMap, passage: &Passage<'_>) {
    let host = match passage.mask {
        Some(mask) => {
            HeaderValue::try_from(mask.replace("${PORT}", &passage.port.to_string())).ok()
        }
        None => passage.original_host.clone(),
    };
    let host = host.unwrap_or(HeaderValue::from_static("localhost"));
    headers.insert(header::HOST, host);
}

/// The traffic token that a request presents.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Presented {
    Nothing,
    Right,
    Wrong,
}

/// Compares what the request presents with `token`. A sandbox that needs a token and has none
/// lets nobody in.
pub(crate) fn presented_token(headers: &HeaderMap, token: Option<&Token>) -> Presented {
    let Some(value) = TRAFFIC_TOKENS.iter().find_map(|name| headers.get(name)) else {
        return Presented::Nothing;
    };
    let is_right = token.is_some_and(|token| value.to_str().is_ok_and(|text| token.matches(text)));
    if is_right {
        Presented::Right
    } else {
        Presented::Wrong
    }
}

/// Whether the request presents what opens the agent.
pub(crate) fn presents_access_token(headers: &HeaderMap, token: &Token) -> bool {
    let value = headers.get(&X_ACCESS_TOKEN);
    value.is_some_and(|value| value.to_str().is_ok_and(|text| token.matches(text.trim())))
}

/// Whether our own servers listen on the port, which SDKs in browsers use from any page.
pub(crate) fn is_agent(port: u16) -> bool {
    port == AGENT_PORT || port == INTERPRETER_PORT
}

/// Whether a browser asks beforehand what it may send.
pub(crate) fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS
        && headers.contains_key(header::ORIGIN)
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// The answer's headers to such a question: anything that a page sends, since tokens and not
/// origins decide.
pub(crate) fn preflight(request: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"),
    );
    // `*` would leave out Authorization, which selects the user.
    let asked = request.get(header::ACCESS_CONTROL_REQUEST_HEADERS);
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_HEADERS,
        asked.cloned().unwrap_or(HeaderValue::from_static("*")),
    );
    headers.insert(
        header::ACCESS_CONTROL_MAX_AGE,
        HeaderValue::from_static("7200"),
    );
    headers.insert(
        header::VARY,
        HeaderValue::from_static("Access-Control-Request-Headers"),
    );
    allow_origins(&mut headers);
    headers
}

/// Lets pages of any origin read an answer, unless the server has its own rule.
pub(crate) fn allow_origins(headers: &mut HeaderMap) {
    let any = || Some(HeaderValue::from_static("*"));
    insert_missing(headers, header::ACCESS_CONTROL_ALLOW_ORIGIN, any());
    insert_missing(headers, header::ACCESS_CONTROL_EXPOSE_HEADERS, any());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        headers
    }

    fn passage(token: &Token, port: u16) -> Passage<'_> {
        Passage {
            port,
            client: Some(HeaderValue::from_static("192.0.2.7")),
            original_host: Some(HeaderValue::from_static("3000-x.example.com")),
            mask: None,
            access_token: token,
            trust: ForwardedTrust::Replace,
            upgrade: None,
        }
    }

    #[test]
    fn keys_and_tokens_stay_outside() {
        // R-P7; wire contract 2.2
        let token = Token::new("agent-token".into());
        let sent = [
            ("x-api-key", "e2b_1"),
            ("authorization", "bearer  e2b_00ff"),
            ("e2b-traffic-access-token", "t"),
            ("cube-traffic-access-token", "t"),
            ("x-access-token", "agent-token"),
            ("x-sandhold-control", "guess"),
            ("x-sandhold-anything", "1"),
            ("x-admin-token", "a"),
            ("proxy-authorization", "p"),
        ];
        let mut headers = map(&sent);
        to_sandbox(&mut headers, &passage(&token, 3000));
        for (name, _) in sent {
            assert!(!headers.contains_key(name), "{name}");
        }
        let mut headers = map(&sent);
        to_sandbox(&mut headers, &passage(&token, AGENT_PORT));
        assert_eq!(
            headers["x-access-token"], "agent-token",
            "the agent checks it"
        );
        assert!(!headers.contains_key("x-api-key"));
    }

    #[test]
    fn the_programs_own_credentials_pass() {
        let token = Token::new("agent-token".into());
        let mut headers = map(&[
            ("authorization", "Bearer my-own"),
            ("cookie", "a=b"),
            ("x-access-token", "my-own"),
        ]);
        to_sandbox(&mut headers, &passage(&token, 3000));
        assert_eq!(headers["authorization"], "Bearer my-own");
        assert_eq!(headers["x-access-token"], "my-own");
        let mut headers = map(&[("authorization", "Basic cm9vdDo=")]);
        to_sandbox(&mut headers, &passage(&token, AGENT_PORT));
        assert_eq!(headers["authorization"], "Basic cm9vdDo=");
    }

    #[test]
    fn what_belongs_to_a_connection_stays_on_it() {
        let token = Token::new("t".into());
        let mut headers = map(&[
            ("connection", "keep-alive, x-mine, host"),
            ("x-mine", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("http2-settings", "AAMAAABk"),
            ("expect", "100-continue"),
            ("te", "trailers, deflate"),
            ("host", "3000-x.example.com"),
        ]);
        to_sandbox(&mut headers, &passage(&token, 3000));
        for gone in [
            "x-mine",
            "keep-alive",
            "upgrade",
            "http2-settings",
            "expect",
        ] {
            assert!(!headers.contains_key(gone), "{gone}");
        }
        assert_eq!(headers["te"], "trailers");
        assert_eq!(headers["host"], "3000-x.example.com");
    }

    #[test]
    fn host_is_the_clients_or_the_mask_with_and_without_upgrade() {
        // BC-109
        let token = Token::new("t".into());
        let websocket = HeaderValue::from_static("websocket");
        for mask in [None, Some("localhost:${PORT}")] {
            let mut plain = HeaderMap::new();
            let mut upgraded = HeaderMap::new();
            let mut passage = passage(&token, 5173);
            passage.mask = mask;
            to_sandbox(&mut plain, &passage);
            passage.upgrade = Some(&websocket);
            to_sandbox(&mut upgraded, &passage);
            let expected = mask.map_or("3000-x.example.com", |_| "localhost:5173");
            assert_eq!(plain["host"], expected);
            for name in [
                "host",
                "x-forwarded-host",
                "x-forwarded-proto",
                "x-forwarded-for",
            ] {
                assert_eq!(plain[name], upgraded[name], "{name}");
            }
            assert_eq!(plain["x-forwarded-host"], "3000-x.example.com");
            assert_eq!(upgraded["upgrade"], "websocket");
            assert_eq!(upgraded["connection"], "upgrade");
        }
    }

    #[test]
    fn forwarding_headers_are_believed_only_from_the_operators_proxy() {
        let token = Token::new("t".into());
        let spoofed = [
            ("x-forwarded-for", "1.2.3.4"),
            ("x-forwarded-proto", "https"),
        ];
        let mut headers = map(&spoofed);
        to_sandbox(&mut headers, &passage(&token, 80));
        assert_eq!(headers["x-forwarded-for"], "192.0.2.7");
        assert_eq!(headers["x-forwarded-proto"], "http");
        let mut headers = map(&spoofed);
        let mut passage = passage(&token, 80);
        passage.trust = ForwardedTrust::Extend;
        to_sandbox(&mut headers, &passage);
        assert_eq!(headers["x-forwarded-proto"], "https");
        let chain: Vec<_> = headers.get_all("x-forwarded-for").iter().collect();
        assert_eq!(chain, ["1.2.3.4", "192.0.2.7"]);
    }

    #[test]
    fn traffic_tokens_are_compared() {
        let token = Token::new("right".into());
        for name in ["e2b-traffic-access-token", "Cube-Traffic-Access-Token"] {
            let presented = |value| presented_token(&map(&[(name, value)]), Some(&token));
            assert_eq!(presented("right"), Presented::Right);
            assert_eq!(presented("wrong"), Presented::Wrong);
            assert_eq!(
                presented_token(&map(&[(name, "")]), None),
                Presented::Wrong,
                "no token lets nobody in"
            );
        }
        assert_eq!(
            presented_token(&HeaderMap::new(), Some(&token)),
            Presented::Nothing
        );
    }

    #[test]
    fn browsers_may_use_the_agent_and_servers_keep_their_own_rule() {
        let asked = map(&[(
            "access-control-request-headers",
            "authorization,x-access-token",
        )]);
        let answer = preflight(&asked);
        assert_eq!(
            answer["access-control-allow-headers"],
            "authorization,x-access-token"
        );
        let mut own = map(&[("access-control-allow-origin", "https://a.example")]);
        to_client(&mut own, AGENT_PORT);
        assert_eq!(own["access-control-allow-origin"], "https://a.example");
        let mut users = HeaderMap::new();
        to_client(&mut users, 3000);
        assert!(users.is_empty(), "a user's server decides for itself");
    }
}
