//! Lifetimes and their renewal (R-L6, R-L11, BC-069).

use std::time::Duration;

use sandhold_types::{Clocking, Timestamp};

use crate::common::{Api, parse_time};

#[tokio::test]
async fn connect_never_shortens() {
    // BC-069: 1 800 s, then connect with 300, with nothing, with 3 600.
    for prefix in ["", "/v2"] {
        let api = Api::new().await;
        let id = api
            .create_with(r#"{"templateID":"base","timeout":1800}"#)
            .await;
        for (body, expected) in [
            (r#"{"timeout":300}"#, 1800),
            ("", 1800),
            (r#"{"timeout":3600}"#, 3600),
            (r#"{"timeout":60}"#, 3600),
        ] {
            let path = format!("{prefix}/sandboxes/{id}/connect");
            let connected = api.post(&path, body).await;
            assert_eq!(connected.status, 200, "{path} {body}");
            assert_eq!(connected.text("sandboxID"), id);
            assert_eq!(api.ends_in_s(&id).await, expected, "{path} {body}");
        }
    }
}

#[tokio::test]
async fn a_timeout_may_shorten_and_tells_the_new_end() {
    // R-L11
    let api = Api::new().await;
    let id = api
        .create_with(r#"{"templateID":"base","timeout":1800}"#)
        .await;
    let path = format!("/sandboxes/{id}/timeout");
    for (body, expected) in [
        (r#"{"timeout":60}"#, 60),
        (r#"{"timeout":900}"#, 900),
        (r#"{"timeout":10.0}"#, 10),
    ] {
        let set = api.post(&path, body).await;
        assert_eq!(set.status, 204);
        let end = parse_time(set.header("x-sandbox-end-at").unwrap());
        assert_eq!(end, api.now().plus(Duration::from_secs(expected)));
        assert_eq!(api.ends_in_s(&id).await, expected);
    }
    let never = api.post(&path, r#"{"timeout":-1}"#).await;
    let end = parse_time(never.header("x-sandbox-end-at").unwrap());
    assert_eq!(end, Timestamp::FAR_FUTURE);
    assert_eq!(api.post(&path, r#"{"timeout":0}"#).await.status, 204);
    let gone = api.get(&format!("/sandboxes/{id}")).await;
    gone.is_refused(404, "sandbox_not_found");
    assert!(
        gone.text("message").ends_with("its timeout passed"),
        "{gone:?}"
    );
}

#[tokio::test]
async fn a_refresh_extends_by_at_least_its_floor() {
    let api = Api::new().await;
    let id = api
        .create_with(r#"{"templateID":"base","timeout":5}"#)
        .await;
    let path = format!("/sandboxes/{id}/refreshes");
    for (body, expected) in [
        ("", 15),
        (r#"{"duration":3}"#, 15),
        (r#"{"duration":120}"#, 120),
        ("{}", 120),
    ] {
        assert_eq!(api.post(&path, body).await.status, 204);
        assert_eq!(api.ends_in_s(&id).await, expected, "{body}");
    }
}

#[tokio::test]
async fn the_clock_follows_from_route_body_and_client() {
    // R-L6, wire contract 1.4
    let api = Api::new().await;
    let cube = "python-requests/2.34.2";
    let e2b = "e2b-js-sdk/2.51.0";
    let idle = |ms| Clocking::Idle { window_ms: ms };
    let end = |s| Clocking::Deadline {
        end: api.now().plus(Duration::from_secs(s)),
    };
    for (path, client, fields, expected) in [
        ("/v2/sandboxes", e2b, "", end(300)),
        ("/v2/sandboxes", cube, r#","timeout":7"#, end(7)),
        ("/sandboxes", e2b, "", end(15)),
        ("/sandboxes", cube, "", idle(None)),
        ("/sandboxes", cube, r#","timeout":7"#, idle(Some(7_000))),
        ("/sandboxes", cube, r#","timeout":0"#, idle(Some(0))),
        (
            "/sandboxes",
            cube,
            r#","timeout":7,"autoPause":false"#,
            end(7),
        ),
        (
            "/sandboxes",
            e2b,
            r#","timeout":7,"lifecycle":{"onTimeout":"kill"}"#,
            idle(Some(7_000)),
        ),
    ] {
        let body = format!(r#"{{"templateID":"base"{fields}}}"#);
        let mut request = api.request("POST".parse().unwrap(), path, body);
        request
            .headers_mut()
            .insert("user-agent", client.parse().unwrap());
        let made = api.send(request).await;
        assert_eq!(made.status, 201, "{made:?}");
        let asked = api.platform.last_create().lifetime.clocking;
        assert_eq!(asked, expected, "{path} {client} {fields}");
    }
}

#[tokio::test]
async fn running_is_already_resumed() {
    let api = Api::new().await;
    let id = api.create().await;
    let resumed = api.post(&format!("/sandboxes/{id}/resume"), "").await;
    resumed.is_refused(409, "already_so");
}
