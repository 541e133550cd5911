//! Leases, buckets, verdicts and the reclaimer over HTTP, with books in a file.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use axum::body::Body;
use http::{Method, Request};
use sandhold_books::{
    KeptBooks, SqliteBooks,
    runs::{KeptRuns, SqliteRuns},
};
use sandhold_governor::rules::Rules;
use sandhold_governor_driver::{DeployedPlatform, Governor, GovernorParts, LocalPlatform};
use sandhold_platform::{
    ActivityKind, DialError, Hold, Holds, Platform, PlatformError, Route, RouteLookup, Routes,
    SandboxView, StateChange, WakeError,
};
use sandhold_types::{Deadline, SandboxId, SeededEntropy};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::broadcast,
};

use crate::common::{Answer, Api, platform::MemoryPlatform};

/// Routes to agents that are always well.
#[derive(Debug)]
struct WellAgents {
    platform: Arc<MemoryPlatform>,
    address: std::net::SocketAddr,
    holds: Arc<Holds>,
    changes: broadcast::Sender<StateChange>,
}

impl WellAgents {
    async fn start(platform: Arc<MemoryPlatform>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let mut asked = [0; 1_024];
                    let _ = stream.read(&mut asked).await;
                    let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
                });
            }
        });
        Self {
            platform,
            address,
            holds: Arc::default(),
            changes: broadcast::Sender::new(1),
        }
    }
}

#[async_trait]
impl Routes for WellAgents {
    fn route(&self, id: &SandboxId) -> RouteLookup {
        match self.platform.get(id) {
            Some(sandbox) => RouteLookup::Live(Route { sandbox }),
            None => RouteLookup::Unknown,
        }
    }

    fn reachable(&self) -> Vec<Arc<SandboxView>> {
        Vec::new()
    }

    async fn wake(&self, _: &SandboxId, _: Deadline) -> Result<Route, WakeError> {
        Err(WakeError::NotAllowed)
    }

    fn try_hold(&self, _: &Route) -> Option<Hold> {
        Some(self.holds.hold())
    }

    async fn hold(&self, _: &Route) -> Result<Hold, DialError> {
        Ok(self.holds.hold())
    }

    fn changes(&self) -> broadcast::Receiver<StateChange> {
        self.changes.subscribe()
    }

    async fn dial(&self, _: &Route, _: u16, _: Deadline) -> Result<TcpStream, DialError> {
        TcpStream::connect(self.address)
            .await
            .map_err(DialError::Socket)
    }

    fn touch(&self, _: &SandboxId, _: ActivityKind) {}
}

/// A control plane with a governor. Its reclaimer goes only by hand, or when something is released.
pub(crate) struct Governed {
    pub(crate) api: Api,
    _dir: tempfile::TempDir,
    _reclaimer: AbortOnDrop,
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Governed {
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("books.db");
        let mut reclaimer = None;
        let api = Api::governed(async |platform, clock| {
            let rules = Rules::default();
            let runs = SqliteRuns::open_file(&dir.path().join("runs.db"), clock.clone()).unwrap();
            let books = SqliteBooks::open(&path, rules.clone(), None, clock).unwrap();
            let routes = Arc::new(WellAgents::start(platform.clone()).await);
            let entropy = Arc::new(SeededEntropy::new(7));
            let key = "governor".parse().unwrap();
            let platform = LocalPlatform::new(platform, routes, entropy.clone(), key);
            let parts = GovernorParts {
                books: KeptBooks::Sqlite(books),
                runs: KeptRuns::Sqlite(runs),
                platform: DeployedPlatform::here(platform),
                rules,
                entropy,
            };
            let governor = Governor::new(parts).unwrap();
            reclaimer = Some(governor.start());
            governor
        })
        .await;
        Self {
            api,
            _dir: dir,
            _reclaimer: AbortOnDrop(reclaimer.unwrap()),
        }
    }

    pub(crate) async fn admin(&self, method: Method, path: &str, body: Value) -> Answer {
        let request = self.request(method, path, body);
        self.api.with_key(&self.api.admin_key, request).await
    }

    fn request(&self, method: Method, path: &str, body: Value) -> Request<Body> {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        self.api.request(method, path, body)
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.api.post(path, body.to_string()).await
    }

    /// A run that is begun, and all of its stream.
    pub(crate) async fn streamed(&self, ask: &Value) -> (http::HeaderMap, String) {
        let path = "/v1/sandbox-runs";
        let asked = self.api.request(Method::POST, path, ask.to_string());
        let answered = tower::ServiceExt::oneshot(self.api.router.clone(), asked);
        let (head, body) = answered.await.unwrap().into_parts();
        let bytes = http_body_util::BodyExt::collect(body).await.unwrap();
        let text = String::from_utf8(bytes.to_bytes().to_vec()).unwrap();
        assert_eq!(head.status, 200, "{text}");
        (head.headers, text)
    }

    async fn take(&self, owner: &str, lease: &str) -> Answer {
        let body = json!({ "owner_id": owner, "lease_id": lease, "template_id": "base" });
        self.post("/v1/leases", body).await
    }

    async fn release(&self, owner: &str, lease: &str) -> Answer {
        let body = json!({ "owner_id": owner, "lease_id": lease });
        self.post("/v1/lease-releases", body).await
    }

    pub(crate) async fn until_gone(&self, sandbox: &str) {
        let path = format!("/v1/sandboxes/{sandbox}/verdict");
        let waited = async {
            while self.api.get(&path).await.text("colour") != "gone" {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(10), waited).await;
        assert!(in_time.is_ok(), "{sandbox} is still there");
    }
}

#[tokio::test]
async fn a_lease_is_taken_renewed_taken_over_and_released() {
    // R-G6, R-G7
    let world = Governed::new().await;
    let first = world.take("a:dev:book:7", "l1").await;
    assert_eq!(first.status, 201, "{first:?}");
    assert_eq!(first.body["reused"], false);
    let sandbox = first.text("sandbox_id").to_owned();
    let view = world.api.platform.get(&sandbox.parse().unwrap()).unwrap();
    for (name, value) in [
        ("namespace", "a"),
        ("env", "dev"),
        ("owner_id", "a:dev:book:7"),
        ("managed_by", "sandhold-governor"),
    ] {
        assert_eq!(view.metadata[name], value, "R-G2: it tells whose it is");
    }
    let again = world.take("a:dev:book:7", "l1").await;
    assert_eq!(again.status, 200, "{again:?}");
    assert_eq!(
        (&again.body["reused"], &again.body["fence"]),
        (&json!(true), &first.body["fence"])
    );

    let beat = json!({
        "owner_id": "a:dev:book:7", "lease_id": "l1", "fence": first.body["fence"],
    });
    assert_eq!(
        world
            .post("/v1/lease-heartbeats", beat.clone())
            .await
            .status,
        200
    );
    let second = world.take("a:dev:book:7", "l2").await;
    assert_eq!(second.text("sandbox_id"), sandbox, "the same sandbox");
    let fence = second.body["fence"].as_u64().unwrap();
    assert!(fence > first.body["fence"].as_u64().unwrap());

    let stale = world.release("a:dev:book:7", "l1").await;
    stale.is_refused(409, "STALE_LEASE");
    assert_eq!(stale.body["sealed"], true);
    assert_eq!(stale.body["current_fence"], fence);
    world
        .post("/v1/lease-heartbeats", beat)
        .await
        .is_refused(409, "STALE_LEASE");
    world
        .take("a:dev:book:7", "l1")
        .await
        .is_refused(409, "STALE_LEASE");

    let released = world.release("a:dev:book:7", "l2").await;
    assert_eq!(released.status, 202, "{released:?}");
    assert_eq!(released.body, json!({ "released": true }));
    world.until_gone(&sandbox).await;
    assert!(world.api.platform.list().is_empty());
    let repeated = world.release("a:dev:book:7", "l2").await;
    assert_eq!(
        repeated.status, 202,
        "the same request again has the same answer"
    );
}

#[tokio::test]
async fn a_key_acts_in_its_own_bucket_and_an_admin_in_all() {
    // R-G19, R-P8
    let world = Governed::new().await;
    let lease = world.take("o", "l").await;
    let sandbox = lease.text("sandbox_id").to_owned();
    let foreign = json!({ "namespace": "b", "env": "dev", "owner_id": "o", "lease_id": "l" });
    for path in ["/v1/leases", "/v1/lease-releases"] {
        world
            .post(path, foreign.clone())
            .await
            .is_refused(403, "forbidden");
    }
    let verdict = format!("/v1/sandboxes/{sandbox}/verdict");
    let other = world.request(Method::GET, &verdict, Value::Null);
    let other = world.api.with_key(&world.api.other_key, other).await;
    other.is_refused(404, "sandbox_not_found");
    let leases = world.request(Method::GET, "/v1/leases", Value::Null);
    let theirs = world.api.with_key(&world.api.other_key, leases).await;
    assert_eq!(theirs.body, json!({ "leases": [] }));
    let all = world.admin(Method::GET, "/v1/leases", Value::Null).await;
    assert_eq!(all.body["leases"][0]["sandbox_id"], sandbox);
    for (method, path) in [
        (Method::PUT, "/v1/buckets/a/dev"),
        (Method::GET, "/v1/alarms"),
        (Method::GET, "/v1/reclaimer/plan"),
        (Method::POST, "/v1/reclaimer/rounds"),
    ] {
        let refused = world
            .api
            .send(world.request(method, path, json!({ "quota": 1 })))
            .await;
        refused.is_refused(403, "forbidden");
    }
    let unknown = json!({ "namespace": "nobody", "env": "dev", "owner_id": "o" });
    let unknown = world.admin(Method::POST, "/v1/leases", unknown).await;
    unknown.is_refused(404, "bucket_not_found");
}

#[tokio::test]
async fn a_quota_counts_leases_and_sandboxes_of_sdks_alike() {
    // R-G4, R-G19
    let world = Governed::new().await;
    let set = world
        .admin(Method::PUT, "/v1/buckets/a/dev", json!({ "quota": 2 }))
        .await;
    assert_eq!(set.status, 200, "{set:?}");
    assert_eq!(set.body["retention_s"], Value::Null);
    assert_eq!(world.take("o", "l").await.status, 201);
    let direct = world.api.create().await;
    let bucket = world.api.get("/v1/buckets/a/dev").await;
    assert_eq!(
        (&bucket.body["used"], &bucket.body["direct"]),
        (&json!(2), &json!(1))
    );
    let verdict = world
        .api
        .get(&format!("/v1/sandboxes/{direct}/verdict"))
        .await;
    assert_eq!(verdict.text("colour"), "black");
    assert_eq!(verdict.body["roots"][0]["kind"], "lifetime");

    assert_eq!(
        world
            .api
            .delete(&format!("/sandboxes/{direct}"))
            .await
            .status,
        204
    );
    let bucket = world.api.get("/v1/buckets/a/dev").await;
    assert_eq!(bucket.body["used"], 1, "gone means free, at once");
    let gone = world
        .api
        .get(&format!("/v1/sandboxes/{direct}/verdict"))
        .await;
    assert_eq!(gone.text("colour"), "gone");
}

#[tokio::test]
async fn a_failed_create_leaves_no_slot() {
    // R-G5
    let world = Governed::new().await;
    let no_room = || PlatformError::Capacity {
        what: String::from("memory"),
    };
    *world.api.platform.failure.lock().unwrap() = Some(no_room);
    let failed = world
        .api
        .post("/v2/sandboxes", r#"{"templateID":"base"}"#)
        .await;
    assert!(failed.status.is_server_error(), "{failed:?}");
    let bucket = world.api.get("/v1/buckets/a/dev").await;
    assert_eq!(bucket.body["used"], 0, "{bucket:?}");
}

#[tokio::test]
async fn the_reclaimer_can_be_asked_and_told() {
    // R-G10, R-G17
    let world = Governed::new().await;
    let lease = world.take("o", "l").await;
    let sandbox = lease.text("sandbox_id").to_owned();
    let plan = async || {
        world
            .admin(Method::GET, "/v1/reclaimer/plan", Value::Null)
            .await
    };
    let round = async || {
        world
            .admin(Method::POST, "/v1/reclaimer/rounds", Value::Null)
            .await
    };
    assert_eq!(plan().await.body["work"], json!([]));
    world.api.clock.advance(Duration::from_secs(200));
    let verdict = world
        .api
        .get(&format!("/v1/sandboxes/{sandbox}/verdict"))
        .await;
    assert_eq!(verdict.text("colour"), "white");
    assert!(
        verdict
            .text("deletable_when")
            .contains("2 confirmed cycles"),
        "{verdict:?}"
    );
    assert_eq!(
        round().await.body["work"],
        json!([]),
        "one look proves nothing"
    );
    world.api.clock.advance(Duration::from_secs(60));
    let would = plan().await;
    assert_eq!(would.body["work"][0]["action"], "remove");
    assert_eq!(would.body["work"][0]["sandbox_id"], sandbox);
    assert_eq!(world.api.platform.list().len(), 1, "a plan does nothing");
    assert_eq!(round().await.body["work"][0]["action"], "remove");
    world.until_gone(&sandbox).await;
    let told = world
        .api
        .get(&format!("/v1/sandboxes/{sandbox}/verdict"))
        .await;
    let actions = told.body["last_actions"].to_string();
    assert!(
        actions.contains("condemned") && actions.contains("deleted it"),
        "{actions}"
    );
    let alarms = world.admin(Method::GET, "/v1/alarms", Value::Null).await;
    assert_eq!(alarms.body["last_round_confirmed"], true, "{alarms:?}");
}

#[tokio::test]
async fn bad_input_is_refused_and_takes_nothing() {
    let world = Governed::new().await;
    let long = "x".repeat(301);
    for (body, field) in [
        (json!({}), "owner_id"),
        (json!({ "owner_id": "" }), "owner_id"),
        (json!({ "owner_id": "a b" }), "owner_id"),
        (json!({ "owner_id": "a\u{0}b" }), "owner_id"),
        (json!({ "owner_id": long }), "owner_id"),
        (json!({ "owner_id": 7 }), "owner_id"),
        (json!({ "owner_id": "o", "lease_id": "" }), "lease_id"),
        (json!({ "owner_id": "o", "namespace": "../x" }), "namespace"),
        (json!({ "owner_id": "o", "ttl_s": 0 }), "ttl_s"),
        (json!({ "owner_id": "o", "ttl_s": 1e30 }), "ttl_s"),
    ] {
        let refused = world.post("/v1/leases", body.clone()).await;
        refused.is_refused(400, "invalid_request");
        assert!(
            refused.text("message").contains(field),
            "{body}: {refused:?}"
        );
    }
    let template = json!({ "owner_id": "o", "template_id": "none" });
    world
        .post("/v1/leases", template)
        .await
        .is_refused(404, "template_not_found");
    world
        .post("/v1/lease-releases", json!({ "owner_id": "o" }))
        .await
        .is_refused(400, "invalid_request");
    world
        .release("o", "l")
        .await
        .is_refused(404, "lease_not_found");
    for body in [
        json!({}),
        json!({ "quota": 2_000_000 }),
        json!({ "quota": 1, "retention_s": u64::MAX }),
    ] {
        let refused = world.admin(Method::PUT, "/v1/buckets/a/dev", body).await;
        refused.is_refused(400, "invalid_request");
    }
    assert_eq!(world.api.platform.list().len(), 0);
    let leases = world.api.get("/v1/leases").await;
    assert_eq!(leases.body, json!({ "leases": [] }));
}

#[tokio::test]
async fn a_sandbox_that_only_says_it_is_managed_is_not() {
    // Metadata is anybody's to write; whose key made it is not.
    let world = Governed::new().await;
    let claims = r#"{"templateID":"base","timeout":600,"metadata":{
        "managed_by":"sandhold-governor","sandhold_slot":"s","owner_id":"victim"}}"#;
    let sandbox = world.api.create_with(claims).await;
    world.api.clock.advance(Duration::from_secs(300));
    for _ in 0..3 {
        let round = world
            .admin(Method::POST, "/v1/reclaimer/rounds", Value::Null)
            .await;
        assert_eq!(round.body["listed"], 0, "{round:?}");
        world.api.clock.advance(Duration::from_secs(60));
    }
    assert!(world.api.platform.get(&sandbox.parse().unwrap()).is_some());
}

/// A run that is as it should be, with some of its fields replaced.
pub(crate) fn run(with: &Value) -> Value {
    let mut body = json!({
        "project_id": "p", "session_run_id": "s", "command": ["true"], "timeout": 60,
    });
    let fields = with.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    body
}

#[tokio::test]
async fn a_run_that_is_not_as_it_should_be_takes_nothing() {
    // R-G1; issue 5, "bad input"
    let world = Governed::new().await;
    let files = |count: usize, content: &str| {
        let file = json!({ "path": "a", "content": content });
        json!({ "files": vec![file; count] })
    };
    for (with, field) in [
        (json!({ "project_id": null }), "project_id"),
        (json!({ "project_id": "a:b" }), "project_id"),
        (json!({ "project_id": "" }), "project_id"),
        (
            json!({ "session_run_id": "x".repeat(129) }),
            "session_run_id",
        ),
        (json!({ "session_run_id": "a b" }), "session_run_id"),
        (json!({ "owner_id": "a\nb" }), "owner_id"),
        (json!({ "owner_id": "x".repeat(301) }), "owner_id"),
        (json!({ "lease_id": "" }), "lease_id"),
        (json!({ "run_id": "x".repeat(65) }), "run_id"),
        (json!({ "namespace": "../x" }), "namespace"),
        (json!({ "command": [] }), "command"),
        (json!({ "command": "ls" }), "command"),
        (json!({ "command": ["a\0"] }), "command"),
        (json!({ "timeout": null }), "timeout"),
        (json!({ "timeout": 0 }), "timeout"),
        (json!({ "timeout": 1e12 }), "timeout"),
        (json!({ "artifacts": ["../x"] }), "artifacts"),
        (json!({ "artifacts": ["/etc/*"] }), "artifacts"),
        (json!({ "keep": "all" }), "keep"),
        (json!({ "template": "other" }), "template"),
        (
            json!({ "template": "main", "template_id": "base" }),
            "template",
        ),
        (json!({ "env_vars": { "A=B": "c" } }), "envVars"),
        (json!({ "files": [{ "content": "x" }] }), "files[0]"),
        (
            json!({ "files": [{ "path": "a", "content_base64": "?" }] }),
            "files[0]",
        ),
        (files(10_000, "x"), "files"),
    ] {
        let refused = world.post("/v1/sandbox-runs", run(&with)).await;
        refused.is_refused(400, "invalid_request");
        assert!(refused.text("message").starts_with(field), "{refused:?}");
    }
    let large = json!({ "context": "x".repeat(17 * 1024 * 1024) });
    let refused = world.post("/v1/sandbox-runs", run(&large)).await;
    refused.is_refused(413, "too_large");
    let elsewhere = json!({ "namespace": "b", "owner_id": "b:dev:p:s" });
    let refused = world.post("/v1/sandbox-runs", run(&elsewhere)).await;
    refused.is_refused(403, "forbidden");
    let unknown = json!({ "template_id": "nothing" });
    let refused = world.post("/v1/sandbox-runs", run(&unknown)).await;
    refused.is_refused(404, "template_not_found");
    let body = run(&json!({ "namespace": "nobody" }));
    let refused = world.admin(Method::POST, "/v1/sandbox-runs", body).await;
    refused.is_refused(404, "bucket_not_found");
    world.take("other", "held").await;
    let body = run(&json!({ "lease_id": "held" }));
    let refused = world.post("/v1/sandbox-runs", body).await;
    refused.is_refused(403, "forbidden");
    let leases = world.api.get("/v1/leases").await;
    let leases = leases.body["leases"].as_array().unwrap().clone();
    assert_eq!(leases.len(), 1, "only the other owner's: {leases:?}");
    assert_eq!(world.api.platform.creates.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_run_is_seen_by_its_tenant_only() {
    let world = Governed::new().await;
    for id in ["nothing", "a%2Fb", "%00", &"x".repeat(300)] {
        let path = format!("/v1/sandbox-runs/{id}");
        world.api.get(&path).await.is_refused(404, "run_not_found");
        let events = world.api.get(&format!("{path}/events")).await;
        events.is_refused(404, "run_not_found");
        let body = json!({ "owner_id": "o", "lease_id": "l" });
        let cancelled = world.post(&format!("{path}/cancel"), body).await;
        cancelled.is_refused(404, "run_not_found");
    }
    // Its agent says nothing that is understood, so it ends at once; its log tells that.
    let (head, text) = world.streamed(&run(&json!({ "run_id": "mine" }))).await;
    assert_eq!(head["content-type"], "text/event-stream");
    assert_eq!(head["x-run-id"], "mine");
    assert!(text.starts_with("id: 1\nevent: error\ndata: {"), "{text}");
    let seen = world.api.get("/v1/sandbox-runs/mine").await;
    assert_eq!(
        (seen.text("state"), seen.text("code")),
        ("error", "not_started")
    );
    assert_eq!(seen.text("owner_id"), "a:dev:p:s");
    let path = "/v1/sandbox-runs/mine/events?after=2";
    world.api.get(path).await.is_refused(400, "invalid_request");
    let request = world.request(Method::GET, "/v1/sandbox-runs/mine", Value::Null);
    let other = world.api.with_key(&world.api.other_key, request).await;
    other.is_refused(404, "run_not_found");
    world.until_gone(seen.text("sandbox_id")).await;
}
