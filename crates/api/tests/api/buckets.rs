//! What a bucket gives to its runs and leases (R-G13).

use http::Method;
use sandhold_platform::Platform as _;
use serde_json::{Value, json};

use crate::governor::{Governed, run};

const OWN: &str = "/v1/buckets/a/dev";

impl Governed {
    async fn set(&self, policy: Value) {
        let set = self.admin(Method::PUT, OWN, policy).await;
        assert_eq!(set.status, 200, "{set:?}");
    }

    /// What the sandbox of a run or a lease with these fields is made from.
    async fn made_from(&self, run_id: &str, with: Value) -> String {
        let mut ask = run(&with);
        ask["run_id"] = json!(run_id);
        ask["session_run_id"] = json!(run_id);
        // Its agent says nothing that is understood, so it ends at once.
        self.streamed(&ask).await;
        let told = self.api.get(&format!("/v1/sandbox-runs/{run_id}")).await;
        let of_run = told.text("template_id").to_owned();
        let mut ask = json!({ "owner_id": format!("of-{run_id}") });
        let fields = with.as_object().unwrap().clone();
        ask.as_object_mut().unwrap().extend(fields);
        let lease = self.post("/v1/leases", ask).await;
        assert_eq!(lease.status, 201, "{lease:?}");
        let sandbox = lease.text("sandbox_id").parse().unwrap();
        let of_lease = self
            .api
            .platform
            .get(&sandbox)
            .unwrap()
            .template
            .id
            .to_string();
        assert_eq!(of_lease, of_run, "a lease gets what a run gets");
        of_run
    }
}

#[tokio::test]
async fn main_and_light_are_what_the_bucket_says() {
    let world = Governed::new().await;
    let (base, interpreter) = ("tpl1", "tpl2");
    let (main, light) = (
        json!({ "template": "main" }),
        json!({ "template": "light" }),
    );
    assert_eq!(world.made_from("r1", main.clone()).await, interpreter);
    assert_eq!(world.made_from("r2", light.clone()).await, base);
    assert_eq!(world.made_from("r3", json!({})).await, base);
    let shown = world.api.get(OWN).await;
    assert_eq!(shown.text("main_template"), "code-interpreter-v1");
    assert_eq!(shown.text("light_template"), "base");

    world
        .set(json!({ "quota": 50, "main_template": "base", "light_template": "tpl2" }))
        .await;
    assert_eq!(world.made_from("r4", main.clone()).await, base);
    assert_eq!(world.made_from("r5", light).await, interpreter);
    assert_eq!(world.made_from("r6", json!({})).await, interpreter);
    assert_eq!(
        world
            .made_from("r7", json!({ "template_id": "base" }))
            .await,
        base,
        "who names one gets that"
    );
    let shown = world.api.get(OWN).await;
    assert_eq!(shown.text("main_template"), "base");

    // One that is not there (any more) takes nothing.
    world
        .set(json!({ "quota": 50, "main_template": "gone" }))
        .await;
    let made = world.api.platform.list().len();
    let refused = world.post("/v1/sandbox-runs", run(&main)).await;
    refused.is_refused(404, "template_not_found");
    let lease = json!({ "owner_id": "o", "template": "main" });
    let refused = world.post("/v1/leases", lease).await;
    refused.is_refused(404, "template_not_found");
    assert!(world.api.platform.list().len() <= made, "nothing is made");
}

#[tokio::test]
async fn the_time_of_a_run_is_within_what_the_bucket_says() {
    let world = Governed::new().await;
    let silent = run(&json!({ "timeout": null }));
    let refused = world.post("/v1/sandbox-runs", silent.clone()).await;
    refused.is_refused(400, "invalid_request");
    world
        .set(json!({ "quota": 50, "run_timeout_s": 60, "run_timeout_max_s": 100 }))
        .await;
    let shown = world.api.get(OWN).await;
    assert_eq!(shown.body["run_timeout_s"], 60);
    assert_eq!(shown.body["run_timeout_max_s"], 100);
    world.streamed(&silent).await;
    let longer = run(&json!({ "timeout": 101 }));
    let refused = world.post("/v1/sandbox-runs", longer).await;
    refused.is_refused(400, "invalid_request");
    assert!(refused.text("message").contains("1 to 100"), "{refused:?}");
}

#[tokio::test]
async fn a_policy_that_makes_no_sense_sets_nothing() {
    let world = Governed::new().await;
    world.set(json!({ "quota": 7 })).await;
    for (with, field) in [
        (json!({ "main_template": "a/b" }), "main_template"),
        (json!({ "light_template": "" }), "light_template"),
        (
            json!({ "light_template": "x".repeat(65) }),
            "light_template",
        ),
        (json!({ "run_timeout_s": 0 }), "run_timeout_s"),
        (json!({ "run_timeout_s": 86_401 }), "run_timeout_s"),
        (
            json!({ "run_timeout_max_s": u64::MAX }),
            "run_timeout_max_s",
        ),
        (
            json!({ "run_timeout_s": 61, "run_timeout_max_s": 60 }),
            "run_timeout_s",
        ),
    ] {
        let mut policy = json!({ "quota": 1 });
        let fields = with.as_object().unwrap().clone();
        policy.as_object_mut().unwrap().extend(fields);
        let refused = world.admin(Method::PUT, OWN, policy).await;
        refused.is_refused(400, "invalid_request");
        assert!(refused.text("message").starts_with(field), "{refused:?}");
    }
    assert_eq!(world.api.get(OWN).await.body["quota"], 7);
    let both = json!({ "owner_id": "o", "template": "main", "template_id": "base" });
    let refused = world.post("/v1/leases", both).await;
    refused.is_refused(400, "invalid_request");
}
