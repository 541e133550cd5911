//! Creating, reading and removing, as clients see it.

use sandhold_api::Settings;
use sandhold_platform::{Egress, PlatformError, PublicTraffic};
use sandhold_types::{EndReason, SandboxState, Timestamp};
use serde_json::{Value, json};

use crate::common::{Api, parse_time};

/// The fields that clients of either generation cannot do without (wire contract 1.2, 1.3).
const CREATED: [&str; 4] = ["templateID", "sandboxID", "clientID", "envdVersion"];
const DETAIL: [&str; 10] = [
    "templateID",
    "sandboxID",
    "clientID",
    "startedAt",
    "endAt",
    "envdVersion",
    "cpuCount",
    "memoryMB",
    "diskSizeMB",
    "state",
];

#[track_caller]
fn has_all(body: &Value, fields: &[&str]) {
    for field in fields {
        assert!(!body[field].is_null(), "no {field} in {body}");
    }
}

#[tokio::test]
async fn both_generations_create() {
    // R-P3
    let api = Api::new().await;
    for path in ["/sandboxes", "/v2/sandboxes"] {
        let made = api.post(path, r#"{"templateID":"base"}"#).await;
        assert_eq!(made.status, 201, "{path}");
        has_all(&made.body, &CREATED);
        assert_eq!(made.body["alias"], "base");
        assert_eq!(made.body["templateID"], "tpl1");
        assert!(made.text("envdAccessToken").len() >= 32, "always secured");
        assert_eq!(made.body["trafficAccessToken"], Value::Null);
        assert_eq!(made.body["domain"], Value::Null);
    }
}

#[tokio::test]
async fn a_sandbox_is_read_as_it_was_made() {
    let settings = Settings {
        public_domain: Some(String::from("sandbox.test:3000")),
        ..Settings::default()
    };
    let api = Api::with(settings).await;
    let body = r#"{"templateID":"tpl1","metadata":{"k":"v w&"},"envVars":{"A":"1"},
        "network":{"allowPublicTraffic":false,"denyOut":["8.8.8.8"],"maskRequestHost":"h:${PORT}"}}"#;
    let made = api.post("/v2/sandboxes", body).await;
    assert_eq!(made.text("domain"), "sandbox.test:3000");
    assert!(!made.text("trafficAccessToken").is_empty());
    let detail = api
        .get(&format!("/sandboxes/{}", made.text("sandboxID")))
        .await;
    has_all(&detail.body, &DETAIL);
    assert_eq!(detail.body["state"], "running");
    assert_eq!(detail.body["metadata"], json!({"k": "v w&"}));
    assert_eq!(detail.body["envdAccessToken"], made.body["envdAccessToken"]);
    assert_eq!(
        detail.body["trafficAccessToken"],
        Value::Null,
        "told at creation only"
    );
    assert_eq!(
        detail.body["alias"],
        Value::Null,
        "asked for by its identifier"
    );
    assert_eq!(
        detail.body["lifecycle"],
        json!({"onTimeout": "kill", "autoResume": false, "backgroundCommandsCount": true})
    );
    let network = json!({"allowOut": [], "denyOut": ["8.8.8.8/32"], "allowPublicTraffic": false,
        "maskRequestHost": "h:${PORT}"});
    assert_eq!(detail.body["network"], network);
    let asked = api.platform.last_create();
    assert_eq!(asked.env_vars["A"], "1");
    assert_eq!(asked.public_traffic, PublicTraffic::TokenRequired);
    assert_eq!(asked.owner.namespace.as_str(), "a");
}

#[tokio::test]
async fn an_end_is_always_told() {
    // Clients crash on a sandbox without an end (wire contract 1.3).
    let api = Api::new().await;
    let id = api
        .create_with(r#"{"templateID":"base","timeout":-1}"#)
        .await;
    let detail = api.get(&format!("/sandboxes/{id}")).await;
    assert_eq!(parse_time(detail.text("endAt")), Timestamp::FAR_FUTURE);
}

#[tokio::test]
async fn a_removed_sandbox_is_gone() {
    let api = Api::new().await;
    let path = format!("/sandboxes/{}", api.create().await);
    assert_eq!(api.delete(&path).await.status, 204);
    api.delete(&path).await.is_refused(404, "sandbox_not_found");
    let gone = api.get(&path).await;
    gone.is_refused(404, "sandbox_not_found");
    assert!(gone.text("message").contains("killed by key"), "{gone:?}");
    assert_eq!(api.get("/v2/sandboxes").await.body, json!([]));
}

#[tokio::test]
async fn the_reason_of_an_end_is_told() {
    // R-L12
    let api = Api::new().await;
    let hostile = String::from("reading the template's image");
    for (reason, told) in [
        (EndReason::OutOfMemory, "it ran out of memory"),
        (EndReason::TimedOut, "its timeout passed"),
        // By that word Cube clients tell a missing template from a missing sandbox.
        (
            EndReason::EngineFailed { detail: hostile },
            "the sandbox was not found",
        ),
    ] {
        let id = api.create().await;
        let end = reason.to_string();
        api.platform.end(&id, reason);
        let gone = api.get(&format!("/sandboxes/{id}")).await;
        gone.is_refused(404, "sandbox_not_found");
        assert!(gone.text("message").ends_with(told), "{gone:?}");
        let events = api.get(&format!("/sandboxes/{id}/events")).await;
        assert_eq!(events.status, 200);
        assert_eq!(events.body["ended"]["reason"], end);
        assert_eq!(events.body["events"][0]["state"], "creating");
    }
}

#[tokio::test]
async fn another_tenants_sandbox_is_not_there() {
    // R-P8
    let api = Api::new().await;
    let id = api.create().await;
    let calls: &[(&str, &str, &str)] = &[
        ("GET", "/sandboxes/{id}", ""),
        ("DELETE", "/sandboxes/{id}", ""),
        ("POST", "/sandboxes/{id}/timeout", r#"{"timeout":0}"#),
        ("POST", "/sandboxes/{id}/refreshes", ""),
        ("POST", "/sandboxes/{id}/connect", ""),
        ("POST", "/v2/sandboxes/{id}/connect", ""),
        ("POST", "/sandboxes/{id}/resume", ""),
        ("POST", "/sandboxes/{id}/pause", ""),
        ("POST", "/sandboxes/{id}/fork", ""),
        ("POST", "/sandboxes/{id}/snapshots", ""),
        ("POST", "/sandboxes/{id}/clones", ""),
        ("POST", "/sandboxes/{id}/rollback", ""),
        ("GET", "/sandboxes/{id}/timeline", ""),
        ("PUT", "/sandboxes/{id}/network", ""),
        ("GET", "/sandboxes/{id}/metrics", ""),
        ("GET", "/sandboxes/{id}/logs", ""),
        ("GET", "/v2/sandboxes/{id}/logs", ""),
        ("GET", "/sandboxes/{id}/events", ""),
    ];
    for (method, path, body) in calls {
        let path = path.replace("{id}", &id);
        let request = api.request(method.parse().unwrap(), &path, *body);
        let answer = api.with_key(&api.other_key, request).await;
        answer.is_refused(404, "sandbox_not_found");
        // Not a word more than for one that never was.
        assert_eq!(
            answer.text("message"),
            format!("sandbox {id} was not found"),
            "{path}"
        );
    }
    let list = api.request("GET".parse().unwrap(), "/v2/sandboxes", "");
    let list = api.with_key(&api.other_key, list).await;
    assert_eq!(list.body, json!([]));
    assert_eq!(list.header("x-total-running"), Some("0"));
    let path = format!("/sandboxes/metrics?sandbox_ids={id}");
    let metrics = api.request("GET".parse().unwrap(), &path, "");
    let metrics = api.with_key(&api.other_key, metrics).await;
    assert_eq!(metrics.body, json!({"sandboxes": {}}));
    assert_eq!(
        api.get(&format!("/sandboxes/{id}")).await.status,
        200,
        "unharmed"
    );
}

#[tokio::test]
async fn a_state_in_transition_is_never_told_as_running() {
    // R-L1
    let api = Api::new().await;
    let id = api.create().await;
    let path = format!("/sandboxes/{id}");
    for state in SandboxState::ALL {
        api.platform.set_state(&id, state);
        let detail = api.get(&path).await;
        let told = detail.body["state"].as_str();
        assert_eq!(
            told == Some("running"),
            state == SandboxState::Running,
            "{state}"
        );
    }
    api.platform.set_state(&id, SandboxState::Resuming);
    let connect = api.post(&format!("{path}/connect"), "").await;
    connect.is_refused(503, "busy");
    assert_eq!(connect.header("retry-after"), Some("2"));
}

#[tokio::test]
async fn what_it_may_reach_is_replaced() {
    let api = Api::new().await;
    let path = format!("/sandboxes/{}", api.create().await);
    let network = format!("{path}/network");
    // The two spellings of the two kinds of clients (wire contract 1.7).
    for body in [
        r#"{"allow_internet_access":false}"#,
        r#"{"allowInternetAccess":false}"#,
    ] {
        assert_eq!(api.put(&network, body).await.status, 204);
        assert_eq!(api.get(&path).await.body["allowInternetAccess"], false);
        assert_eq!(api.put(&network, "{}").await.status, 204);
        assert_eq!(api.get(&path).await.body["allowInternetAccess"], true);
    }
    let refused = api.put(&network, r#"{"allowPublicTraffic":false}"#).await;
    refused.is_refused(400, "not_supported");
    let same = api
        .put(
            &network,
            r#"{"allowPublicTraffic":true,"denyOut":["1.1.1.1"]}"#,
        )
        .await;
    assert_eq!(same.status, 204);
    let detail = api.get(&path).await;
    assert_eq!(detail.body["network"]["denyOut"], json!(["1.1.1.1/32"]));
    let no = api
        .post(
            "/sandboxes",
            r#"{"templateID":"base","allow_internet_access":false}"#,
        )
        .await;
    assert_eq!(no.status, 201);
    assert_eq!(api.platform.last_create().egress, Egress::Nothing);
}

#[tokio::test]
async fn metrics_and_logs_have_every_field() {
    let api = Api::new().await;
    let id = api.create().await;
    let metrics = api.get(&format!("/sandboxes/{id}/metrics")).await;
    assert_eq!(metrics.body.as_array().unwrap().len(), 3);
    has_all(
        &metrics.body[0],
        &[
            "timestamp",
            "timestampUnix",
            "cpuCount",
            "cpuUsedPct",
            "memUsed",
            "memTotal",
            "memCache",
            "diskUsed",
            "diskTotal",
        ],
    );
    let start = metrics.body[1]["timestampUnix"].as_u64().unwrap();
    let later = api
        .get(&format!(
            "/sandboxes/{id}/metrics?start={start}&end={start}"
        ))
        .await;
    assert_eq!(later.body, json!([metrics.body[1]]));
    let many = api
        .get(&format!("/sandboxes/metrics?sandbox_ids={id},unknown"))
        .await;
    assert_eq!(
        many.body,
        json!({"sandboxes": {id.clone(): metrics.body[2]}})
    );
    let first = api.get(&format!("/sandboxes/{id}/logs?limit=1")).await;
    assert_eq!(first.body["logs"][0]["line"], "created");
    has_all(
        &first.body["logEntries"][0],
        &["timestamp", "message", "level", "fields"],
    );
    let second = api
        .get(&format!("/v2/sandboxes/{id}/logs?direction=backward"))
        .await;
    assert_eq!(second.body["logs"][0]["message"], "ready");
}

#[tokio::test]
async fn a_failed_removal_says_when_to_come_back() {
    // R-L8
    let api = Api::new().await;
    let id = api.create().await;
    *api.platform.kill_failure.lock().unwrap() = Some(|| PlatformError::Busy {
        id: "aaaaaaaaaaaaaaaaaaaa".parse().unwrap(),
        state: SandboxState::Pausing,
        retry_after: std::time::Duration::from_secs(2),
    });
    let busy = api.delete(&format!("/sandboxes/{id}")).await;
    busy.is_refused(503, "busy");
    assert_eq!(busy.header("retry-after"), Some("2"));
    assert_eq!(api.delete(&format!("/sandboxes/{id}")).await.status, 204);
}
