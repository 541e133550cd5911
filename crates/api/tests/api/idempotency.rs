//! Creates with an `Idempotency-Key` (wire contract 1.0).

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use http::Request;
use sandhold_api::Settings;
use sandhold_platform::PlatformError;
use sandhold_store::{ClaimOutcome, ClaimRequest, IdempotencyScope, MemoryStore, SqliteStore};

use crate::common::{Answer, Api, eventually};

const BASE: &str = r#"{"templateID":"base","timeout":600}"#;

fn keyed(api: &Api, key: &str, path: &str, body: &str) -> Request<Body> {
    let mut request = api.request("POST".parse().unwrap(), path, body.to_owned());
    request
        .headers_mut()
        .insert("idempotency-key", key.parse().unwrap());
    request
}

async fn create(api: &Api, key: &str, body: &str) -> Answer {
    api.send(keyed(api, key, "/v2/sandboxes", body)).await
}

#[tokio::test]
async fn the_same_key_and_body_give_the_same_sandbox() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("state.db")).unwrap();
    let api = Api::on(Settings::default(), Arc::new(store)).await;
    let first = create(&api, "k-1", BASE).await;
    assert_eq!(first.status, 201);
    assert_eq!(first.header("idempotent-replayed"), None);
    // However the same body is spelled.
    let second = create(&api, "k-1", r#" {"timeout": 600, "templateID": "base"} "#).await;
    assert_eq!(second.status, 201);
    assert_eq!(second.header("idempotent-replayed"), Some("true"));
    assert_eq!(second.body, first.body);
    let other = create(&api, "k-2", BASE).await;
    assert_ne!(other.text("sandboxID"), first.text("sandboxID"));
    assert_eq!(api.platform.creates_seen(), 2);
}

#[tokio::test]
async fn another_request_under_the_same_key_is_refused() {
    let api = Api::new().await;
    create(&api, "k", BASE).await;
    let other = create(&api, "k", r#"{"templateID":"base","timeout":601}"#).await;
    other.is_refused(422, "idempotency_mismatch");
    let route = api.send(keyed(&api, "k", "/sandboxes", BASE)).await;
    route.is_refused(422, "idempotency_mismatch");
    // Another tenant's key of the same text is another key.
    let request = keyed(&api, "k", "/v2/sandboxes", BASE);
    let others = api.with_key(&api.other_key, request).await;
    assert_eq!(others.status, 201);
    assert_eq!(api.platform.creates_seen(), 2);
}

#[tokio::test]
async fn twins_at_once_make_one() {
    let api = Arc::new(Api::new().await);
    api.platform.hold_creates();
    let twins: Vec<_> = (0..4)
        .map(|_| {
            let api = api.clone();
            tokio::spawn(async move { create(&api, "k", BASE).await })
        })
        .collect();
    eventually("one is under way", || api.platform.creates_seen() == 1).await;
    api.platform.turns.add_permits(10);
    let mut made = Vec::new();
    for twin in twins {
        let answer = twin.await.unwrap();
        assert_eq!(answer.status, 201, "{answer:?}");
        made.push(answer.text("sandboxID").to_owned());
    }
    made.dedup();
    assert_eq!((made.len(), api.platform.creates_seen()), (1, 1));
}

#[tokio::test]
async fn a_twin_whose_time_is_up_is_told_to_come_back() {
    let mut settings = Settings::default();
    settings.budgets.create = Duration::from_millis(300);
    let api = Api::with(settings).await;
    // Somebody else, perhaps in another process, has it.
    claim_as_another(&api, "k", api.now().plus(Duration::from_secs(60))).await;
    let refused = create(&api, "k", BASE).await;
    refused.is_refused(409, "conflict");
    assert_eq!(refused.header("should-retry"), Some("true"));
    assert_eq!(api.platform.creates_seen(), 0);
}

#[tokio::test]
async fn a_failure_is_not_remembered() {
    let api = Api::new().await;
    *api.platform.failure.lock().unwrap() = Some(|| PlatformError::Capacity {
        what: String::from("memory"),
    });
    create(&api, "k", BASE)
        .await
        .is_refused(503, "capacity_exceeded");
    assert_eq!(create(&api, "k", BASE).await.status, 201);
}

#[tokio::test]
async fn a_caller_that_hangs_up_finds_its_sandbox_later() {
    let api = Api::new().await;
    api.platform.hold_creates();
    let hung_up = tokio::time::timeout(Duration::from_millis(50), create(&api, "k", BASE)).await;
    assert!(hung_up.is_err());
    eventually("the create came in", || api.platform.creates_seen() == 1).await;
    api.platform.turns.add_permits(10);
    let later = create(&api, "k", BASE).await;
    assert_eq!(later.status, 201);
    assert_eq!(api.platform.creates_seen(), 1, "nothing was made twice");
}

#[tokio::test]
async fn a_sandbox_that_is_forgotten_is_told_so() {
    let api = Api::new().await;
    let made = create(&api, "k", BASE).await;
    let id = made.text("sandboxID");
    api.delete(&format!("/sandboxes/{id}")).await;
    let ended = create(&api, "k", BASE).await;
    assert_eq!(ended.body, made.body, "the same answer, also after its end");
    api.platform.forget(id);
    create(&api, "k", BASE).await.is_refused(409, "conflict");
    api.clock.advance(Duration::from_secs(24 * 3600 + 1));
    let fresh = create(&api, "k", BASE).await;
    assert_eq!(fresh.status, 201);
    assert_ne!(fresh.text("sandboxID"), id);
}

/// Claims a key for the request that `create` makes, as a process that then says no more.
async fn claim_as_another(api: &Api, key: &str, until: sandhold_types::Timestamp) {
    let scope = IdempotencyScope {
        bucket: sandhold_store::Bucket {
            namespace: "a".parse().unwrap(),
            env: "dev".parse().unwrap(),
        },
        key: key.to_owned(),
    };
    let mut digest = <sha2::Sha256 as sha2::Digest>::new();
    let canonical = serde_json::from_str::<serde_json::Value>(BASE)
        .unwrap()
        .to_string();
    sha2::Digest::update(&mut digest, "/v2/sandboxes\0");
    sha2::Digest::update(&mut digest, canonical);
    let request = ClaimRequest {
        fingerprint: sandhold_store::Fingerprint(sha2::Digest::finalize(digest).into()),
        request: "the-dead-one".parse().unwrap(),
        now: api.now(),
        claimed_until: until,
        expires_at: api.now().plus(Duration::from_secs(3600)),
    };
    let claimed = api.store.claim_idempotency(&scope, request).await.unwrap();
    assert!(matches!(claimed, ClaimOutcome::Claimed(_)));
}

#[tokio::test]
async fn what_a_dead_process_made_is_found_and_not_made_again() {
    // R-L3: it died between the create and its record.
    let api = Api::on(Settings::default(), Arc::new(MemoryStore::new())).await;
    claim_as_another(&api, "k", api.now().plus(Duration::from_secs(5))).await;
    let mut request = api.request("POST".parse().unwrap(), "/v2/sandboxes", BASE);
    request
        .headers_mut()
        .insert("x-request-id", "the-dead-one".parse().unwrap());
    let made = api.send(request).await;
    api.clock.advance(Duration::from_secs(6));
    let heir = create(&api, "k", BASE).await;
    assert_eq!(heir.text("sandboxID"), made.text("sandboxID"));
    assert_eq!(api.platform.creates_seen(), 1);
    assert_eq!(
        create(&api, "k", BASE).await.text("sandboxID"),
        made.text("sandboxID")
    );
}

#[tokio::test]
async fn what_a_dead_process_did_not_make_is_made() {
    let api = Api::new().await;
    claim_as_another(&api, "k", api.now().plus(Duration::from_secs(5))).await;
    let bystander = api.create().await;
    api.clock.advance(Duration::from_secs(6));
    let heir = create(&api, "k", BASE).await;
    assert_eq!(heir.status, 201);
    assert_ne!(heir.text("sandboxID"), bystander);
}

#[tokio::test]
async fn a_key_that_is_none_is_refused() {
    let api = Api::new().await;
    for key in ["", "A", "a b", &"a".repeat(256)] {
        let refused = create(&api, key, BASE).await;
        refused.is_refused(400, "invalid_request");
        assert!(refused.text("message").starts_with("Idempotency-Key"));
    }
}
