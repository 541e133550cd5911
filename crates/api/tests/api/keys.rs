//! Keys over the wire (R-P8, R-G19).

use std::{sync::Arc, time::Duration};

use sandhold_api::Settings;
use sandhold_store::{KeyScope, SqliteStore};
use sandhold_types::Timestamp;
use serde_json::json;

use crate::common::{Answer, Api};

async fn admin(api: &Api, method: &str, path: &str, body: &str) -> Answer {
    let request = api.request(method.parse().unwrap(), path, body.to_owned());
    api.with_key(&api.admin_key, request).await
}

#[tokio::test]
async fn a_key_is_made_used_and_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("state.db")).unwrap();
    let api = Api::on(Settings::default(), Arc::new(store)).await;
    let made = admin(
        &api,
        "POST",
        "/v1/keys",
        r#"{"name":"ci","namespace":"c","env":"prod"}"#,
    )
    .await;
    assert_eq!(made.status, 201);
    let key = made.text("key");
    assert_eq!(key.len(), 44, "as older SDKs insist");
    assert_eq!(made.text("role"), "member");
    let list = || api.request("GET".parse().unwrap(), "/v2/sandboxes", "");
    assert_eq!(api.with_key(key, list()).await.status, 200);
    let keys = admin(&api, "GET", "/v1/keys", "").await;
    let all = keys.body["keys"].as_array().unwrap();
    assert_eq!(all.len(), 4);
    assert!(!keys.body.to_string().contains(key), "a key is told once");
    let path = format!("/v1/keys/{}", made.text("id"));
    assert_eq!(admin(&api, "DELETE", &path, "").await.status, 204);
    let refused = api.with_key(key, list()).await;
    refused.is_refused(401, "unauthenticated");
    assert!(refused.text("message").contains("revoked"));
    admin(&api, "DELETE", &path, "")
        .await
        .is_refused(409, "conflict");
}

#[tokio::test]
async fn keys_are_the_administrators_business() {
    let api = Api::new().await;
    for (method, path) in [
        ("GET", "/v1/keys"),
        ("POST", "/v1/keys"),
        ("DELETE", "/v1/keys/x"),
        ("GET", "/api-keys"),
        ("POST", "/api-keys"),
        ("DELETE", "/api-keys/x"),
    ] {
        let request = api.request(method.parse().unwrap(), path, "");
        api.send(request).await.is_refused(403, "forbidden");
    }
    for id in ["nope", "%2e%2e", &api.key.clone()] {
        let refused = admin(&api, "DELETE", &format!("/v1/keys/{id}"), "").await;
        refused.is_refused(404, "key_not_found");
        assert!(
            !refused.body.to_string().contains(&api.key),
            "no key in an answer"
        );
    }
    let bad = admin(&api, "POST", "/v1/keys", r#"{"namespace":"a/b"}"#).await;
    bad.is_refused(400, "invalid_request");
    assert!(bad.text("message").starts_with("namespace"));
}

#[tokio::test]
async fn nobody_locks_everybody_out() {
    let api = Api::new().await;
    let keys = admin(&api, "GET", "/v1/keys", "").await;
    let keys = keys.body["keys"].as_array().unwrap();
    let own = keys.iter().find(|key| key["role"] == "admin").unwrap();
    let path = format!("/v1/keys/{}", own["id"].as_str().unwrap());
    admin(&api, "DELETE", &path, "")
        .await
        .is_refused(409, "conflict");
}

#[tokio::test]
async fn an_admin_key_acts_in_its_own_bucket() {
    // R-G19
    let api = Api::new().await;
    let request = api.request(
        "POST".parse().unwrap(),
        "/v2/sandboxes",
        r#"{"templateID":"base"}"#,
    );
    let others = api.with_key(&api.other_key, request).await;
    let path = format!("/sandboxes/{}", others.text("sandboxID"));
    admin(&api, "GET", &path, "")
        .await
        .is_refused(404, "sandbox_not_found");
    // Two keys of one bucket see the same.
    let own = api.create().await;
    let seen = admin(&api, "GET", &format!("/sandboxes/{own}"), "").await;
    assert_eq!(seen.status, 200);
}

#[tokio::test]
async fn the_form_that_e2bs_tools_know() {
    let api = Api::new().await;
    let made = admin(&api, "POST", "/api-keys", r#"{"name":"laptop"}"#).await;
    assert_eq!(made.status, 201);
    assert!(made.text("key").starts_with("e2b_"));
    let listed = admin(&api, "GET", "/api-keys", "").await;
    let names: Vec<_> = listed
        .body
        .as_array()
        .unwrap()
        .iter()
        .map(|k| &k["name"])
        .collect();
    assert_eq!(names, ["test", "test", "laptop"], "own bucket only");
    assert!(listed.body[2]["key"].is_null());
    let mask = &listed.body[2]["mask"];
    assert_eq!(mask["prefix"], "e2b_");
    assert!(
        made.text("key")
            .ends_with(mask["maskedValueSuffix"].as_str().unwrap())
    );
    let path = format!("/api-keys/{}", made.text("id"));
    assert_eq!(admin(&api, "DELETE", &path, "").await.status, 204);
    let teams = api.get("/teams").await;
    assert_eq!(
        teams.body,
        json!([{"teamID": "a:dev", "name": "a:dev", "apiKey": "", "isDefault": true}])
    );
}

/// When keys were last used, once that is as expected; fails after ten seconds.
async fn used_at(api: &Api, expected: Timestamp) {
    let noted = async {
        loop {
            let keys = api.store.list_keys(&KeyScope::All).await.unwrap();
            let used: Vec<_> = keys.iter().filter_map(|key| key.last_used_at).collect();
            if used == [expected] {
                break;
            }
            tokio::task::yield_now().await;
        }
    };
    let noted = tokio::time::timeout(Duration::from_secs(10), noted).await;
    noted.expect("the use is noted");
}

#[tokio::test]
async fn the_use_of_a_key_is_noted_once_a_minute() {
    let api = Api::new().await;
    let first = api.now();
    api.get("/v2/sandboxes").await;
    used_at(&api, first).await;
    api.clock.advance(Duration::from_secs(59));
    api.get("/v2/sandboxes").await;
    used_at(&api, first).await;
    api.clock.advance(Duration::from_secs(1));
    api.get("/v2/sandboxes").await;
    used_at(&api, api.now()).await;
}
