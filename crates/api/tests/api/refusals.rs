//! What is refused, and how: status, code, whether to try again (R-P10).

use sandhold_api::{Limits, Settings};
use sandhold_platform::PlatformError;

use crate::common::Api;

const BASE: &str = r#"{"templateID":"base"}"#;

#[tokio::test]
async fn failures_of_the_platform_become_typed_answers() {
    type Failure = fn() -> PlatformError;
    let cases: &[(Failure, u16, &str, Option<&str>)] = &[
        (
            || PlatformError::TemplateNotFound("x".into()),
            404,
            "template_not_found",
            None,
        ),
        (
            || PlatformError::Invalid("no".into()),
            400,
            "invalid_request",
            None,
        ),
        (
            || PlatformError::NotSupported("it".into()),
            400,
            "not_supported",
            None,
        ),
        (
            || PlatformError::Capacity {
                what: "memory".into(),
            },
            503,
            "capacity_exceeded",
            Some("5"),
        ),
        (
            || PlatformError::Deadline { step: "starting" },
            504,
            "deadline_exceeded",
            None,
        ),
        (
            || PlatformError::GuestUnresponsive {
                detail: "refused".into(),
            },
            503,
            "sandbox_snapshot_guest_agent_unresponsive",
            Some("5"),
        ),
        (
            || PlatformError::Engine {
                step: "restoring",
                source: "boom".into(),
            },
            500,
            "engine_failed",
            None,
        ),
        (
            || PlatformError::Node {
                step: "mounting",
                source: "secret path".into(),
            },
            500,
            "internal",
            None,
        ),
        (
            || PlatformError::ShuttingDown,
            503,
            "shutting_down",
            Some("2"),
        ),
    ];
    let api = Api::new().await;
    for (failure, status, code, retry_after) in cases {
        *api.platform.failure.lock().unwrap() = Some(*failure);
        let refused = api.post("/v2/sandboxes", BASE).await;
        refused.is_refused(*status, code);
        assert_eq!(refused.header("retry-after"), *retry_after, "{code}");
        let text = refused.text("message");
        assert!(
            !text.contains("secret path"),
            "causes stay in the log: {text}"
        );
    }
}

#[tokio::test]
async fn keys_that_do_not_work() {
    // R-P8
    let api = Api::new().await;
    for key in [
        "",
        "nope",
        "e2b_0000000000000000000000000000000000000000",
        &"x".repeat(10_000),
    ] {
        let request = api.request("GET".parse().unwrap(), "/sandboxes", "");
        let refused = api.with_key(key, request).await;
        refused.is_refused(401, "unauthenticated");
        assert!(refused.header("www-authenticate").is_some());
    }
    let mut request = api.request("GET".parse().unwrap(), "/sandboxes", "");
    request.headers_mut().remove("x-api-key");
    api.send(request).await.is_refused(401, "unauthenticated");
    let mut bearer = api.request("GET".parse().unwrap(), "/sandboxes", "");
    bearer.headers_mut().remove("x-api-key");
    let value = format!("Bearer {}", api.key).parse().unwrap();
    bearer.headers_mut().insert("authorization", value);
    assert_eq!(api.send(bearer).await.status, 200);
}

#[tokio::test]
async fn bodies_that_say_nothing_and_bodies_that_say_too_much() {
    // BC-075: 7 bodies × 3 calls.
    let api = Api::new().await;
    let large = format!(r#"{{"x":"{}"}}"#, "y".repeat(2 * 1024 * 1024));
    let bodies = [
        "",
        "{}",
        "null",
        "  ",
        r#"{"unknown":{"a":[1]}}"#,
        "[]",
        &large,
    ];
    for (call, expected) in [
        ("pause", [204, 204, 204, 204, 204, 400, 413]),
        ("resume", [201, 201, 201, 201, 201, 400, 413]),
        ("connect", [201, 201, 201, 201, 201, 400, 413]),
    ] {
        for (body, expected) in bodies.iter().zip(expected) {
            let id = api.create().await;
            if call != "pause" {
                let paused = api.post(&format!("/sandboxes/{id}/pause"), "").await;
                assert_eq!(paused.status, 204);
            }
            let path = format!("/sandboxes/{id}/{call}");
            let mut request = api.request("POST".parse().unwrap(), &path, (*body).to_owned());
            request
                .headers_mut()
                .insert("content-type", "application/json".parse().unwrap());
            let answer = api.send(request).await;
            let shown = &body[..body.len().min(30)];
            assert_eq!(
                answer.status.as_u16(),
                expected,
                "{call} {shown}: {answer:?}"
            );
        }
    }
    let id = api.create().await;
    let chunks = [Ok::<_, std::io::Error>("{\"time"), Ok("out\":"), Ok("60}")];
    let chunked = axum::body::Body::from_stream(tokio_stream::iter(chunks));
    let connected = api.post(&format!("/sandboxes/{id}/connect"), chunked).await;
    assert_eq!(connected.status, 200);
    let cut = [Ok("{\"timeout\":6"), Err(std::io::Error::other("gone"))];
    let cut = axum::body::Body::from_stream(tokio_stream::iter(cut));
    let refused = api.post(&format!("/sandboxes/{id}/connect"), cut).await;
    refused.is_refused(400, "invalid_request");
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let api = Api::new().await;
    let id = api.create().await;
    let long = "x".repeat(10_000);
    let cases = [
        ("/v2/sandboxes", String::from("{}"), "templateID"),
        (
            "/v2/sandboxes",
            format!(r#"{{"templateID":"{long}"}}"#),
            "templateID",
        ),
        (
            "/v2/sandboxes",
            String::from("{\"templateID\":\"base\","),
            "body",
        ),
        (
            "/v2/sandboxes",
            String::from(r#"{"templateID":"base","timeout":-5}"#),
            "timeout",
        ),
        (
            "/sandboxes",
            String::from(r#"{"templateID":"base","timeout":1e18}"#),
            "timeout",
        ),
        (
            "/sandboxes",
            String::from(r#"{"templateID":"base","metadata":{"a":null}}"#),
            "metadata.a",
        ),
        ("/sandboxes/{id}/timeout", String::new(), "timeout"),
        (
            "/sandboxes/{id}/timeout",
            String::from(r#"{"timeout":-2}"#),
            "timeout",
        ),
        (
            "/sandboxes/{id}/timeout",
            String::from(r#"{"timeout":"soon"}"#),
            "timeout",
        ),
        (
            "/sandboxes/{id}/timeout",
            String::from(r#"{"timeout":99999999999}"#),
            "timeout",
        ),
        (
            "/sandboxes/{id}/refreshes",
            String::from(r#"{"duration":3601}"#),
            "duration",
        ),
        (
            "/sandboxes/{id}/connect",
            String::from(r#"{"timeout":-2}"#),
            "timeout",
        ),
    ];
    for (path, body, field) in cases {
        let refused = api.post(&path.replace("{id}", &id), body.clone()).await;
        refused.is_refused(400, "invalid_request");
        let text = refused.text("message");
        assert!(text.starts_with(field), "{path} {text}");
        assert!(text.chars().count() <= 512);
    }
}

#[tokio::test]
async fn what_cannot_be_had_is_refused_and_not_ignored() {
    let api = Api::new().await;
    for body in [
        r#"{"templateID":"base","network":{"allowOut":["example.com"],"denyOut":["0.0.0.0/0"]}}"#,
        r#"{"templateID":"base","volumeMounts":[{"name":"v","path":"/v"}]}"#,
        r#"{"templateID":"base","mcp":{"duckduckgo":{}}}"#,
    ] {
        for path in ["/sandboxes", "/v2/sandboxes"] {
            api.post(path, body).await.is_refused(400, "not_supported");
        }
    }
    for path in ["/volumes", "/secrets", "/templates/base/tags"] {
        api.get(path).await.is_refused(400, "not_supported");
    }
    assert_eq!(
        api.platform.creates_seen(),
        0,
        "nothing of it reached the platform"
    );
}

#[tokio::test]
async fn an_unknown_template_is_told_before_anything_waits() {
    let api = Api::new().await;
    for path in ["/sandboxes", "/v2/sandboxes"] {
        let refused = api.post(path, r#"{"templateID":"nope"}"#).await;
        refused.is_refused(404, "template_not_found");
        // By this word Cube clients know (wire contract, "Status → exception (Cube)").
        assert!(refused.text("message").contains("template"));
    }
    let own = r#"{"templateID":"team/own:v1"}"#;
    assert_eq!(api.post("/v2/sandboxes", own).await.status, 201);
    let request = api.request("POST".parse().unwrap(), "/v2/sandboxes", own);
    api.with_key(&api.other_key, request)
        .await
        .is_refused(404, "template_not_found");
    assert_eq!(api.platform.creates_seen(), 1);
}

#[tokio::test]
async fn identifiers_that_are_none_are_not_found() {
    let api = Api::new().await;
    let long = "a".repeat(10_000);
    for id in [
        "x",
        "%2e%2e%2fetc",
        "aaaaaaaaaaaaaaaaaaaa",
        "%00",
        "AAAAAAAAAAAAAAAAAAAA",
        &long,
        "-",
    ] {
        let refused = api.get(&format!("/sandboxes/{id}")).await;
        refused.is_refused(404, "sandbox_not_found");
        assert!(refused.text("message").len() < 200);
    }
    api.get("/sandboxes/%ff")
        .await
        .is_refused(400, "invalid_request");
    let id = api.create().await;
    let legacy = api.get(&format!("/sandboxes/{id}-clientid")).await;
    assert_eq!(
        legacy.status, 200,
        "the oldest clients add their client identifier"
    );
}

#[tokio::test]
async fn one_tenants_burst_is_bounded_and_does_not_starve_another() {
    // R-P9
    let settings = Settings {
        limits: Limits {
            creates_running_per_tenant_max: 2,
            creates_waiting_per_tenant_max: 1,
            ..Limits::default()
        },
        ..Settings::default()
    };
    let api = std::sync::Arc::new(Api::with(settings).await);
    api.platform.hold_creates();
    let burst: Vec<_> = (0..3)
        .map(|_| {
            let api = api.clone();
            tokio::spawn(async move { api.post("/v2/sandboxes", BASE).await })
        })
        .collect();
    crate::common::eventually("two are under way", || api.platform.creates_seen() == 2).await;
    // The third waits for its turn, so a fourth is one too many.
    let refused = loop {
        let answer = tokio::time::timeout(
            std::time::Duration::from_millis(20),
            api.post("/v2/sandboxes", BASE),
        )
        .await;
        // Until the third has its place in the queue, this one waits there and gives it back.
        if let Ok(answer) = answer {
            break answer;
        }
    };
    refused.is_refused(429, "too_many_requests");
    assert!(refused.header("retry-after").is_some());
    let request = api.request("POST".parse().unwrap(), "/v2/sandboxes", BASE);
    let other = api.with_key(&api.other_key, request);
    let release = async {
        crate::common::eventually("the other tenant's is under way", || {
            api.platform.creates_seen() == 3
        })
        .await;
        api.platform.turns.add_permits(10);
    };
    let (other, ()) = tokio::join!(other, release);
    assert_eq!(other.status, 201);
    for create in burst {
        assert_eq!(create.await.unwrap().status, 201);
    }
}

#[tokio::test]
async fn the_deadline_of_a_create_holds() {
    let mut settings = Settings::default();
    settings.budgets.create = std::time::Duration::from_millis(50);
    let api = Api::with(settings).await;
    api.platform.hold_creates();
    let refused = api.post("/v2/sandboxes", BASE).await;
    refused.is_refused(504, "deadline_exceeded");
}
