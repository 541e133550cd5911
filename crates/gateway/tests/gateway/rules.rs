//! Who may reach what: control routes, traffic tokens, signatures, browsers.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use http::Request;
use sandhold_platform::{PublicTraffic, SandboxView};
use sandhold_types::Token;
use sha2::{Digest, Sha256};

use crate::support::*;

#[tokio::test]
async fn control_routes_of_the_agent_do_not_exist_outside() {
    let world = World::new().await;
    let served = world.serve(49983, echo).await;
    let mut client = world.client().await;
    for path in [
        "/init",
        "//init",
        "/%69nit",
        "/x/..%2Finit",
        "/tunnel?port=22",
        "/upgrade",
    ] {
        let request = request(49983, "POST", path)
            .header("x-sandhold-control", "guess")
            .body(nothing())
            .unwrap();
        let answer = client.fetch(request).await;
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(answer.json()["error_code"], "route_not_found");
    }
    assert_eq!(served.connections(), 0);
    let health = client.get(49983, "/health").await;
    assert_eq!(health.status, 200);
}

fn guarded() -> SandboxView {
    SandboxView {
        public_traffic: PublicTraffic::TokenRequired,
        traffic_token: Some(Token::new("right".to_owned())),
        ..view(ID, 1)
    }
}

#[tokio::test]
async fn guarded_ports_need_the_traffic_token() {
    // Wire contract 2.2: every port but the agent's, which has a token of its own.
    let world = World::new().await;
    world.routes.put(guarded());
    for port in [3000, 49983, 49999] {
        world.serve(port, echo).await;
    }
    let mut client = world.client().await;
    for port in [3000, 49999] {
        let answer = client.get(port, "/").await;
        assert_eq!(answer.status, 403);
        assert_eq!(answer.json()["error_code"], "traffic_token_required");
        for (name, value, status) in [
            ("e2b-traffic-access-token", "wrong", 403),
            ("e2b-traffic-access-token", "right", 200),
            ("cube-traffic-access-token", "right", 200),
        ] {
            let request = request(port, "GET", "/").header(name, value);
            let answer = client.fetch(request.body(nothing()).unwrap()).await;
            assert_eq!(answer.status, status, "{port} {name} {value}");
        }
    }
    assert_eq!(client.get(49983, "/health").await.status, 200);
}

#[tokio::test]
async fn a_signed_url_finds_its_sandbox() {
    // Wire contract 2.1 (c)
    let world = World::new().await;
    let mut other = view(OTHER_ID, 1);
    other.access_token = Token::new("another".to_owned());
    world.routes.put(other);
    world.serve(49983, echo).await;
    let mut client = world.client().await;
    let mut fetch = async |token: &str, path: &str| {
        let digest = Sha256::digest(format!("/tmp/a:read:user:{token}"));
        let signature: String = url::form_urlencoded::byte_serialize(
            format!("v1_{}", STANDARD_NO_PAD.encode(digest)).as_bytes(),
        )
        .collect();
        let uri = format!("{path}?path=%2Ftmp%2Fa&username=user&signature={signature}");
        let request = Request::get(uri).header("host", world.address.to_string());
        client.fetch(request.body(nothing()).unwrap()).await
    };
    assert_eq!(fetch(ACCESS_TOKEN, "/files").await.status, 200);
    assert_eq!(fetch("another", "/files").await.status, 200);
    let answer = fetch("of nobody", "/files").await;
    assert_eq!(answer.status, 401);
    assert_eq!(answer.json()["code"], 401);
    assert_eq!(fetch(ACCESS_TOKEN, "/other").await.text, "the API");
}

#[tokio::test]
async fn pages_of_any_origin_may_use_the_agent() {
    let world = World::new().await;
    let served = world.serve(49983, echo).await;
    let mut client = world.client().await;
    let preflight = |port| {
        request(port, "OPTIONS", "/files")
            .header("origin", "https://app.example")
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization")
            .body(nothing())
            .unwrap()
    };
    let answer = client.fetch(preflight(49983)).await;
    assert_eq!(answer.status, 204);
    assert_eq!(answer.headers["access-control-allow-origin"], "*");
    assert_eq!(
        answer.headers["access-control-allow-headers"],
        "authorization"
    );
    assert_eq!(served.connections(), 0);
    let answer = client.get(49983, "/health").await;
    assert_eq!(answer.headers["access-control-allow-origin"], "*");
    // An error must be readable by the page as well.
    let answer = client.get(49999, "/health").await;
    assert_eq!(answer.headers["access-control-allow-origin"], "*");
    // A user's server decides for itself.
    world.serve(3000, echo).await;
    let answer = client.fetch(preflight(3000)).await;
    assert!(answer.text.starts_with("OPTIONS /files"));
    assert!(!answer.headers.contains_key("access-control-allow-origin"));
}
