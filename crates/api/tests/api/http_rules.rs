//! What holds for every route: request identifiers, methods, unknown paths, browsers.

use axum::body::Body;
use http::Request;
use serde_json::json;

use crate::common::Api;

#[tokio::test]
async fn unknown_paths_and_wrong_methods_answer_json() {
    // BC-074
    let api = Api::new().await;
    for path in ["/", "/nothing", "/sandboxes/a/b/c", "/v9/sandboxes", "/%00"] {
        api.get(path).await.is_refused(404, "route_not_found");
    }
    for (method, path, allowed) in [
        ("PATCH", "/v2/sandboxes", "GET,HEAD,POST"),
        ("PUT", "/sandboxes/x", "GET,HEAD,DELETE"),
        ("GET", "/sandboxes/x/timeout", "POST"),
        ("POST", "/health", "GET,HEAD"),
        ("GET", "/sandboxes/x/network", "PUT"),
    ] {
        let refused = api
            .send(api.request(method.parse().unwrap(), path, ""))
            .await;
        refused.is_refused(405, "method_not_allowed");
        assert_eq!(refused.header("allow"), Some(allowed), "{method} {path}");
    }
}

#[tokio::test]
async fn health_needs_no_key() {
    let api = Api::new().await;
    api.create().await;
    let health = api
        .send(Request::get("/health").body(Body::empty()).unwrap())
        .await;
    assert_eq!(health.status, 200);
    assert_eq!(health.body, json!({"status": "ok", "sandboxes": 1}));
}

#[tokio::test]
async fn every_request_has_an_identifier() {
    let api = Api::new().await;
    let id = api.create().await;
    let mut request = api.request("DELETE".parse().unwrap(), &format!("/sandboxes/{id}"), "");
    request
        .headers_mut()
        .insert("x-request-id", "run-7.step_2".parse().unwrap());
    let answer = api.send(request).await;
    assert_eq!(answer.header("x-request-id"), Some("run-7.step_2"));
    let events = api.get(&format!("/sandboxes/{id}/events")).await;
    assert!(events.text_of_end().contains("run-7.step_2"), "{events:?}");
    for odd in ["", "a b", "../x", &"x".repeat(129)] {
        let mut request = api.request("GET".parse().unwrap(), "/sandboxes", "");
        request
            .headers_mut()
            .insert("x-request-id", odd.parse().unwrap());
        let answer = api.send(request).await;
        let id = answer.header("x-request-id").unwrap();
        assert_ne!(id, odd);
        assert_eq!(id.len(), 20);
    }
}

impl crate::common::Answer {
    fn text_of_end(&self) -> &str {
        self.body["ended"]["reason"].as_str().unwrap()
    }
}

#[tokio::test]
async fn browsers_may_call_and_see_what_they_need() {
    let api = Api::new().await;
    let preflight = Request::options("/v2/sandboxes")
        .header("origin", "https://console.test")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "x-api-key,authorization")
        .body(Body::empty())
        .unwrap();
    let preflight = api.send(preflight).await;
    assert_eq!(preflight.status, 200);
    let allowed = preflight.header("access-control-allow-headers").unwrap();
    assert!(allowed.contains("x-api-key") && allowed.contains("authorization"));
    let mut request = api.request("GET".parse().unwrap(), "/v2/sandboxes", "");
    request
        .headers_mut()
        .insert("origin", "https://console.test".parse().unwrap());
    let list = api.send(request).await;
    let exposed = list.header("access-control-expose-headers").unwrap();
    assert!(exposed.contains("x-next-token") && exposed.contains("x-total-running"));
}

#[tokio::test]
async fn our_own_routes_are_described() {
    let api = Api::new().await;
    let request = Request::get("/v1/openapi.json")
        .body(Body::empty())
        .unwrap();
    let document = api.send(request).await;
    assert_eq!(document.status, 200);
    for (path, method) in [
        ("/v1/keys", "get"),
        ("/v1/keys", "post"),
        ("/v1/keys/{id}", "delete"),
        ("/sandboxes/{id}/events", "get"),
    ] {
        assert!(
            document.body["paths"][path][method].is_object(),
            "{method} {path}"
        );
    }
}
