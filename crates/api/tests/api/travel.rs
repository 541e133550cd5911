//! Snapshots, copies and rollbacks, as clients ask for them (wire contract 1.5).

use std::collections::BTreeSet;

use sandhold_platform::PlatformError;
use serde_json::json;

use crate::common::Api;

impl Api {
    async fn snapshot(&self, sandbox: &str, body: &str) -> String {
        let taken = self
            .post(&format!("/sandboxes/{sandbox}/snapshots"), body.to_owned())
            .await;
        assert_eq!(taken.status, 201, "{taken:?}");
        taken.text("snapshotID").to_owned()
    }

    async fn as_other(&self, method: &str, path: &str, body: &str) -> crate::common::Answer {
        let request = self.request(method.parse().unwrap(), path, body.to_owned());
        self.with_key(&self.other_key, request).await
    }
}

#[tokio::test]
async fn a_snapshot_is_taken_listed_used_as_a_template_and_deleted() {
    // R-T1
    let api = Api::new().await;
    let id = api.create().await;
    let plain = api.snapshot(&id, "").await;
    let named = api
        .post(
            &format!("/sandboxes/{id}/snapshots"),
            r#"{"name":"env:v2"}"#,
        )
        .await;
    assert_eq!(named.body["names"], json!(["a/env:v2"]));
    assert_eq!(named.text("parentID"), plain);
    let listed = api.get("/snapshots").await;
    let ids: Vec<_> = listed
        .body
        .as_array()
        .unwrap()
        .iter()
        .map(|s| &s["snapshotID"])
        .collect();
    assert_eq!(ids.len(), 2);
    for reference in [&plain, "a/env:v2"] {
        let made = api
            .post(
                "/v2/sandboxes",
                format!(r#"{{"templateID":"{reference}"}}"#),
            )
            .await;
        assert_eq!(made.status, 201, "{reference}: {made:?}");
    }
    let gone = api.delete("/templates/a%2Fenv%3Av2").await;
    assert_eq!(gone.status, 204);
    assert_eq!(api.delete(&format!("/templates/{plain}")).await.status, 204);
    assert_eq!(api.get("/snapshots").await.body, json!([]));
    api.delete(&format!("/templates/{plain}"))
        .await
        .is_refused(404, "template_not_found");
}

#[tokio::test]
async fn snapshots_are_filtered_and_paged() {
    let api = Api::new().await;
    let (one, two) = (api.create().await, api.create().await);
    let mut taken = BTreeSet::new();
    for number in 0..5 {
        taken.insert(
            api.snapshot(&one, &format!(r#"{{"name":"n{number}"}}"#))
                .await,
        );
        api.snapshot(&two, "").await;
    }
    let of_one = api.get(&format!("/snapshots?sandboxID={one}")).await;
    let ids = |body: &serde_json::Value| -> Vec<String> {
        let all = body.as_array().unwrap().iter();
        all.map(|s| s["snapshotID"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(
        ids(&of_one.body).into_iter().collect::<BTreeSet<_>>(),
        taken
    );
    for name in ["n3", "n3:default", "a%2Fn3%3Adefault"] {
        assert_eq!(
            ids(&api.get(&format!("/snapshots?name={name}")).await.body).len(),
            1,
            "{name}"
        );
    }
    let mut seen = Vec::new();
    let mut next = String::new();
    loop {
        let page = api
            .get(&format!(
                "/snapshots?sandboxID={one}&limit=2&nextToken={next}"
            ))
            .await;
        seen.extend(ids(&page.body));
        match page.header("x-next-token") {
            Some(token) => next = token.to_owned(),
            None => break,
        }
    }
    assert_eq!(seen.len(), 5);
    assert_eq!(seen.into_iter().collect::<BTreeSet<_>>(), taken);
    // A token is for one question.
    let page = api.get("/snapshots?limit=2").await;
    let token = page.header("x-next-token").unwrap();
    let other = api
        .get(&format!("/snapshots?sandboxID={one}&nextToken={token}"))
        .await;
    other.is_refused(400, "invalid_request");
}

#[tokio::test]
async fn another_tenants_snapshot_is_not_there() {
    // R-P8
    let api = Api::new().await;
    let id = api.create().await;
    let snapshot = api.snapshot(&id, r#"{"name":"env"}"#).await;
    assert_eq!(api.as_other("GET", "/snapshots", "").await.body, json!([]));
    for reference in [snapshot.as_str(), "a%2Fenv%3Adefault"] {
        let lineage = api
            .as_other("GET", &format!("/snapshots/{reference}/lineage"), "")
            .await;
        lineage.is_refused(404, "snapshot_not_found");
        let deleted = api
            .as_other("DELETE", &format!("/templates/{reference}"), "")
            .await;
        deleted.is_refused(404, "template_not_found");
    }
    let create = format!(r#"{{"templateID":"{snapshot}"}}"#);
    let made = api.as_other("POST", "/v2/sandboxes", &create).await;
    made.is_refused(404, "template_not_found");
    let made = api
        .as_other("POST", "/v2/sandboxes", r#"{"templateID":"base"}"#)
        .await;
    let foreign = made.text("sandboxID");
    let body = format!(r#"{{"snapshotID":"{snapshot}"}}"#);
    let rolled = api
        .as_other("POST", &format!("/sandboxes/{foreign}/rollback"), &body)
        .await;
    rolled.is_refused(404, "snapshot_not_found");
    assert!(
        !rolled.text("message").contains("template"),
        "Cube's clients go by that word"
    );
}

#[tokio::test]
async fn a_sandbox_goes_back_along_its_own_line_and_tells_where_it_stands() {
    // R-T3, R-T5
    let api = Api::new().await;
    let id = api.create().await;
    let first = api.snapshot(&id, "").await;
    let second = api.snapshot(&id, "").await;
    let roll = async |sandbox: &str, to: &str| {
        let body = format!(r#"{{"snapshotID":"{to}"}}"#);
        api.post(&format!("/sandboxes/{sandbox}/rollback"), body)
            .await
    };
    let answer = roll(&id, &first).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.text("sandboxID"), id);
    assert_eq!(answer.text("snapshotID"), first);
    assert_eq!(answer.text("status"), "success");
    let timeline = api.get(&format!("/sandboxes/{id}/timeline")).await;
    assert_eq!(timeline.text("currentSnapshotID"), first);
    assert_eq!(timeline.body["snapshots"].as_array().unwrap().len(), 2);
    assert_eq!(roll(&id, &second).await.status, 200, "and forward again");
    let stranger = api.create().await;
    roll(&stranger, &first)
        .await
        .is_refused(404, "snapshot_not_found");
    roll(&id, "").await.is_refused(400, "invalid_request");
    let lineage = api.get(&format!("/snapshots/{second}/lineage")).await;
    assert_eq!(lineage.body["ancestors"][0]["snapshotID"], first.as_str());
    assert_eq!(lineage.body["sandboxIDs"], json!([id]));
}

#[tokio::test]
async fn a_fork_tells_what_became_of_each() {
    // R-T2, wire contract 1.5
    let api = Api::new().await;
    let id = api.create().await;
    *api.platform.failing_create.lock().unwrap() = Some(1);
    let forked = api
        .post(&format!("/sandboxes/{id}/fork"), r#"{"count":3}"#)
        .await;
    assert_eq!(forked.status, 201);
    let slots = forked.body.as_array().unwrap();
    let made: Vec<_> = slots
        .iter()
        .filter(|s| s["sandbox"]["sandboxID"].is_string())
        .collect();
    let failed: Vec<_> = slots.iter().filter(|s| s["error"]["code"] == 500).collect();
    assert_eq!((made.len(), failed.len()), (2, 1), "{slots:?}");
    assert!(
        api.platform.snapshots.lock().unwrap().is_empty(),
        "nothing of it is left"
    );
    let one = api.post(&format!("/sandboxes/{id}/fork"), "").await;
    assert_eq!(one.body.as_array().unwrap().len(), 1);
    let copy = one.body[0]["sandbox"]["sandboxID"].as_str().unwrap();
    let details = api.get(&format!("/sandboxes/{copy}")).await;
    assert_eq!(
        details.text("templateID"),
        "tpl1",
        "it is one of its source's template"
    );
    for body in [r#"{"count":0}"#, r#"{"count":101}"#, r#"{"timeout":-1}"#] {
        let refused = api.post(&format!("/sandboxes/{id}/fork"), body).await;
        refused.is_refused(400, "invalid_request");
    }
}

#[tokio::test]
async fn one_clone_that_fails_takes_the_others_with_it_unless_told_otherwise() {
    // R-T2
    let api = Api::new().await;
    let id = api.create().await;
    let clones = format!("/sandboxes/{id}/clones");
    *api.platform.failing_create.lock().unwrap() = Some(6);
    let refused = api.post(&clones, r#"{"count":10,"concurrency":4}"#).await;
    refused.is_refused(500, "engine_failed");
    let left = api.get("/v2/sandboxes").await;
    assert_eq!(left.body.as_array().unwrap().len(), 1, "only the source");
    assert!(api.platform.snapshots.lock().unwrap().is_empty());
    assert!(
        api.platform.creates_seen() <= 1 + 6 + 4,
        "no more are begun"
    );
    *api.platform.failing_create.lock().unwrap() = Some(6);
    let some = api
        .post(&clones, r#"{"count":10,"allOrNothing":false}"#)
        .await;
    assert_eq!(some.status, 201);
    assert_eq!(
        api.get("/v2/sandboxes")
            .await
            .body
            .as_array()
            .unwrap()
            .len(),
        10
    );
    *api.platform.sleep_failure.lock().unwrap() = Some(|| PlatformError::Engine {
        step: "capturing it",
        source: "it was told to fail".into(),
    });
    api.post(&clones, "").await.is_refused(500, "engine_failed");
}
