//! A scripted E2B-compatible service that has every bad habit of R-G16, over real sockets.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use sandhold_books::{
    KeptBooks, SqliteBooks,
    runs::{KeptRuns, SqliteRuns},
};
use sandhold_governor::{
    Call, CallError, Platform, Reply,
    books::BucketPolicy,
    colour::{Retention, Seen},
    rules::{Rules, Settings},
    tasks::{Outcome, Reused},
};
use sandhold_governor_driver::{
    DirectSandbox, DirectSandboxes, Governor, GovernorParts, GuestAnswer, GuestRequest, Guests,
    HttpPlatform, HttpPlatformSettings,
};
use sandhold_types::{Generation, ManualClock, SandboxId, SeededEntropy, Timestamp};
use serde_json::{Value, json};

use crate::played::bucket;

/// What the service does wrong.
#[derive(Debug, Clone, Copy, Default)]
struct Habits {
    keeps_paused: bool,
    hides_paused: bool,
    writes_hang: bool,
    /// A create is carried out, and its answer never comes.
    answers_of_creates_are_lost: bool,
}

#[derive(Debug, Default)]
struct State {
    habits: Habits,
    sandboxes: BTreeMap<String, (Value, &'static str)>,
    made: u64,
    awake_most: usize,
    requests: Vec<String>,
    /// Who was asked, as the client named it.
    hosts: Vec<String>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Service(Arc<Mutex<State>>);

impl Service {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(crate) fn hosts(&self) -> Vec<String> {
        self.state().hosts.clone()
    }

    pub(crate) async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let service = self.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let service = service.clone();
                tokio::spawn(async move {
                    let answer = service_fn(move |request| service.clone().answer(request));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), answer)
                        .await;
                });
            }
        });
        url
    }

    async fn answer(self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        if request.uri().path() != "/health" {
            assert_eq!(request.headers()["x-api-key"], "key");
        }
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let path = head.uri.path().to_owned();
        let habits = {
            let mut state = self.state();
            state.requests.push(format!("{} {path}", head.method));
            let host = head.headers["host"].to_str().unwrap();
            state.hosts.push(host.to_owned());
            state.habits
        };
        let is_write = head.method != Method::GET;
        if is_write && habits.writes_hang {
            std::future::pending::<()>().await;
        }
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (status, body) = match (head.method.as_str(), parts.as_slice()) {
            ("POST", ["v2", "sandboxes"]) => self.create(&body),
            ("GET", ["v2", "sandboxes"]) => self.list(head.uri.query().unwrap()),
            ("GET", ["sandboxes", id]) => self.get(id),
            ("DELETE", ["sandboxes", id]) => self.delete(id),
            ("POST", ["v2", "sandboxes", id, "connect"]) => self.wake(id),
            ("POST", ["sandboxes", _, "timeout"]) => (204, Value::Null),
            // Its agent, by the routing headers or by its host name; or the service itself.
            ("GET", ["health"]) => {
                let is_agent = head.headers.contains_key("e2b-sandbox-port")
                    || head.headers["host"].as_bytes().starts_with(b"49983-");
                let token = head.headers.get("x-access-token");
                let token = token.map(http::HeaderValue::as_bytes);
                assert_eq!(token, is_agent.then_some(&b"opens"[..]));
                (204, Value::Null)
            }
            other => panic!("{other:?}"),
        };
        if habits.answers_of_creates_are_lost && path == "/v2/sandboxes" && is_write {
            std::future::pending::<()>().await;
        }
        let body = match body {
            Value::Null => Bytes::new(),
            body => Bytes::from(body.to_string()),
        };
        let status = StatusCode::from_u16(status).unwrap();
        Ok(Response::builder()
            .status(status)
            .body(Full::new(body))
            .unwrap())
    }

    fn create(&self, body: &[u8]) -> (u16, Value) {
        let asked: Value = serde_json::from_slice(body).unwrap();
        let mut state = self.state();
        state.made += 1;
        // As long as E2B's are.
        let id = format!("i{:020}", state.made);
        let kept = (asked["metadata"].clone(), "running");
        state.sandboxes.insert(id.clone(), kept);
        (201, json!({ "sandboxID": id, "envdAccessToken": "opens" }))
    }

    fn shown(id: &str, (metadata, state): &(Value, &'static str)) -> Value {
        json!({
            "sandboxID": id, "state": state, "metadata": metadata,
            "endAt": "2100-01-01T00:00:00Z", "envdAccessToken": "opens",
        })
    }

    fn list(&self, query: &str) -> (u16, Value) {
        let state = self.state();
        let query: BTreeMap<String, String> = url::form_urlencoded::parse(query.as_bytes())
            .into_owned()
            .collect();
        let filter = url::form_urlencoded::parse(query["metadata"].as_bytes()).next();
        let (name, value) = filter.unwrap();
        let shown = state.sandboxes.iter().filter(|(_, (metadata, is))| {
            metadata[name.as_ref()] == value.as_ref()
                && !(state.habits.hides_paused && *is == "paused")
        });
        (200, shown.map(|(id, kept)| Self::shown(id, kept)).collect())
    }

    fn get(&self, id: &str) -> (u16, Value) {
        match self.state().sandboxes.get(id) {
            Some(kept) => (200, Self::shown(id, kept)),
            None => (404, json!({ "code": 404, "message": "no such sandbox" })),
        }
    }

    fn delete(&self, id: &str) -> (u16, Value) {
        let mut state = self.state();
        let keeps = state.habits.keeps_paused;
        match state.sandboxes.get(id) {
            None => (404, Value::Null),
            Some((_, "paused")) if keeps => (409, json!({ "message": "it is paused" })),
            Some(_) => {
                state.sandboxes.remove(id);
                (204, Value::Null)
            }
        }
    }

    fn wake(&self, id: &str) -> (u16, Value) {
        let mut state = self.state();
        let Some(kept) = state.sandboxes.get_mut(id) else {
            return (404, Value::Null);
        };
        kept.1 = "running";
        let shown = Self::shown(id, kept);
        let awake = state.sandboxes.values().filter(|(_, is)| *is == "running");
        let awake = awake.count();
        state.awake_most = state.awake_most.max(awake);
        (201, shown)
    }

    fn pause_all(&self) {
        for (_, state) in self.state().sandboxes.values_mut() {
            *state = "paused";
        }
    }

    fn count(&self) -> usize {
        self.state().sandboxes.len()
    }
}

/// The service and nothing made here.
#[derive(Debug)]
struct Remote(HttpPlatform);

impl Platform for Remote {
    async fn call(&self, call: Call) -> Result<Reply, CallError> {
        self.0.call(call).await
    }
}

impl Guests for Remote {
    async fn exchange(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
        request: GuestRequest,
    ) -> Result<GuestAnswer, CallError> {
        self.0.exchange(sandbox, generation, request).await
    }

    async fn extend(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
    ) -> Result<Option<Timestamp>, CallError> {
        self.0.extend(sandbox, generation).await
    }
}

impl DirectSandboxes for Remote {
    fn living(&self) -> Vec<DirectSandbox> {
        Vec::new()
    }
}

struct Elsewhere {
    service: Service,
    governor: Governor<Remote>,
    clock: Arc<ManualClock>,
    _dir: tempfile::TempDir,
}

impl Elsewhere {
    async fn new(quota: u32) -> Self {
        let service = Service::default();
        let settings = HttpPlatformSettings {
            url: service.start().await,
            authority: None,
            api_key: "key".to_owned(),
            domain: None,
            life: Duration::from_secs(3_600),
        };
        let rules = Rules::new(Settings {
            create_deadline: Duration::from_secs(1),
            call_deadline: Duration::from_secs(1),
            breaker_open: Duration::from_millis(200),
            wait_poll: Duration::from_millis(10),
            ..Settings::default()
        })
        .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_ms(1_800_000_000_000)));
        let path = dir.path().join("books.db");
        let books = SqliteBooks::open(&path, rules.clone(), None, clock.clone()).unwrap();
        let runs = SqliteRuns::open_file(&dir.path().join("runs.db"), clock.clone()).unwrap();
        let governor = Governor::new(GovernorParts {
            books: KeptBooks::Sqlite(books),
            runs: KeptRuns::Sqlite(runs),
            platform: Remote(HttpPlatform::new(settings).unwrap()),
            rules,
            entropy: Arc::new(SeededEntropy::new(1)),
        })
        .unwrap();
        let policy = BucketPolicy::new(quota, Retention::After(Duration::from_secs(60)));
        governor.set_bucket(bucket(), policy).await.unwrap();
        Self {
            service,
            governor,
            clock,
            _dir: dir,
        }
    }

    async fn take(&self, owner: &str) -> Outcome {
        let (owner, lease) = (owner.parse().unwrap(), "l".parse().unwrap());
        let template = "code-interpreter-v1".parse().unwrap();
        self.governor
            .acquire(bucket(), owner, lease, template, None)
            .await
    }

    async fn round(&self) {
        self.clock.advance(self.governor.rules().settings().cycle);
        self.governor.cycle().await.unwrap();
    }

    async fn until_gone(&self) {
        let waited = async {
            while self.service.count() > 0
                || !self.governor.view().await.unwrap().records.is_empty()
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(20), waited).await;
        assert!(in_time.is_ok(), "{:?}", self.service.state().requests);
    }

    fn asked(&self, line: &str) -> usize {
        let state = self.service.state();
        state
            .requests
            .iter()
            .filter(|asked| asked.starts_with(line))
            .count()
    }
}

#[tokio::test]
async fn a_lease_is_a_sandbox_of_the_service_that_tells_whose_it_is() {
    // R-G2, R-G16
    let there = Elsewhere::new(2).await;
    let Outcome::Leased { grant, reused } = there.take("o").await else {
        panic!("no lease");
    };
    assert_eq!(reused, Reused::No);
    let metadata = there.service.state().sandboxes[grant.sandbox.as_str()]
        .0
        .clone();
    assert_eq!(metadata["owner_id"], "o");
    assert_eq!(metadata["managed_by"], "sandhold-governor");
    let beat = there.governor.heartbeat(
        bucket(),
        "o".parse().unwrap(),
        "l".parse().unwrap(),
        grant.generation,
    );
    beat.await.unwrap();
    assert_eq!(
        there.asked("POST /sandboxes/"),
        1,
        "its life there is moved along"
    );
    let reclaimer = there.governor.start();
    let release = there
        .governor
        .release(bucket(), "o".parse().unwrap(), "l".parse().unwrap());
    release.await.unwrap();
    there.until_gone().await;
    reclaimer.abort();
}

#[tokio::test]
async fn what_is_paused_is_woken_to_be_deleted_a_few_at_a_time() {
    // R-G13, R-G16, R-I2, R-I7
    let there = Elsewhere::new(10).await;
    for n in 0..10 {
        assert!(matches!(
            there.take(&format!("o{n}")).await,
            Outcome::Leased { .. }
        ));
    }
    there.service.state().habits.keeps_paused = true;
    there.service.pause_all();
    there.clock.advance(there.governor.rules().grey());
    let reclaimer = there.governor.start();
    for _ in 0..8 {
        there.round().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    there.until_gone().await;
    assert!(there.asked("POST /v2/sandboxes/i") >= 10, "each was woken");
    let most = there.service.state().awake_most;
    let budget = there.governor.rules().settings().awake_for_removal_max as usize;
    assert!(most <= budget, "{most} were awake at once");
    reclaimer.abort();
}

#[tokio::test]
async fn what_the_listing_leaves_out_is_asked_for_and_not_forgotten() {
    // R-G11, R-I4: the last sandbox pauses, and the listing is empty for ever.
    let there = Elsewhere::new(1).await;
    there.take("o").await;
    there.round().await;
    there.service.state().habits = Habits {
        hides_paused: true,
        keeps_paused: true,
        ..Habits::default()
    };
    there.service.pause_all();
    there.clock.advance(there.governor.rules().grey());
    let reclaimer = there.governor.start();
    for _ in 0..12 {
        there.round().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    there.until_gone().await;
    reclaimer.abort();
}

#[tokio::test]
async fn a_create_without_an_answer_keeps_its_slot_until_it_is_found() {
    // R-G5, R-I1
    let there = Elsewhere::new(1).await;
    there.service.state().habits.answers_of_creates_are_lost = true;
    let outcome = there.take("o").await;
    assert!(
        matches!(outcome, Outcome::Leased { .. }),
        "found by its slot: {outcome:?}"
    );

    let there = Elsewhere::new(1).await;
    there.service.state().habits.writes_hang = true;
    let outcome = there.take("o").await;
    assert!(matches!(outcome, Outcome::Unavailable(_)), "{outcome:?}");
    let records = there.governor.view().await.unwrap().records;
    assert_eq!(records.len(), 1, "it may still come to be");
    there.service.state().habits.writes_hang = false;
    there.clock.advance(there.governor.rules().grey());
    for _ in 0..4 {
        there.round().await;
    }
    there.until_gone().await;
    assert!(matches!(there.take("o2").await, Outcome::Leased { .. }));
}

#[tokio::test]
async fn deletes_that_hang_free_nothing_and_get_through_later() {
    // R-I1
    let there = Elsewhere::new(2).await;
    there.take("a").await;
    there.take("b").await;
    there.service.state().habits.writes_hang = true;
    let reclaimer = there.governor.start();
    for owner in ["a", "b"] {
        let release =
            there
                .governor
                .release(bucket(), owner.parse().unwrap(), "l".parse().unwrap());
        release.await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(there.governor.view().await.unwrap().records.len(), 2);
    there.service.state().habits.writes_hang = false;
    for _ in 0..4 {
        there.round().await;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    there.until_gone().await;
    reclaimer.abort();
}

#[tokio::test]
async fn asked_by_name_it_says_what_the_service_says() {
    let there = Elsewhere::new(1).await;
    let Outcome::Leased { grant, .. } = there.take("o").await else {
        panic!("no lease");
    };
    let settings = HttpPlatformSettings {
        url: there.service.start().await,
        authority: None,
        api_key: "key".to_owned(),
        domain: None,
        life: Duration::from_secs(3_600),
    };
    let platform = HttpPlatform::new(settings).unwrap();
    let ask = async || platform.call(Call::Ask(grant.sandbox.clone())).await;
    assert_eq!(ask().await, Ok(Reply::State(Seen::Running)));
    there.service.pause_all();
    assert_eq!(ask().await, Ok(Reply::State(Seen::Paused)));
    there.service.state().sandboxes.clear();
    assert_eq!(ask().await, Err(CallError::NotFound));
}
