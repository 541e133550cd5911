//! The API over a platform in memory.

// Each test program uses its own part of this.
#![allow(dead_code, unreachable_pub, missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod platform;

use std::{sync::Arc, time::Duration};

use axum::{Router, body::Body};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt;
use platform::{MemoryPlatform, MemoryTemplates};
use sandhold_api::{ApiParts, ApiState, Settings, router};
use sandhold_governor_driver::{DeployedPlatform, Governor};
use sandhold_store::{Bucket, KeyDigest, MemoryStore, NewKey, Role, Store};
use sandhold_types::{Clock, Entropy, KeyId, ManualClock, SeededEntropy, Timestamp, Token};
use serde_json::Value;
use tower::ServiceExt;

/// 2026-01-01T00:00:00Z
pub const START: Timestamp = Timestamp::from_unix_ms(1_767_225_600_000);

/// A control plane with two tenants.
pub struct Api {
    pub router: Router,
    pub platform: Arc<MemoryPlatform>,
    pub store: Arc<dyn Store>,
    pub clock: Arc<ManualClock>,
    /// A member's key of bucket `a:dev`.
    pub key: String,
    /// A member's key of bucket `b:dev`.
    pub other_key: String,
    /// An administrator's key of bucket `a:dev`.
    pub admin_key: String,
}

/// An answer that has been read.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Value,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub fn text(&self, field: &str) -> &str {
        self.body[field]
            .as_str()
            .unwrap_or_else(|| panic!("no text {field} in {self:?}"))
    }

    /// Checks a refusal: its status and code, and that its body is whole.
    #[track_caller]
    pub fn is_refused(&self, status: u16, error_code: &str) {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        assert_eq!(self.text("error_code"), error_code, "{self:?}");
        assert_eq!(self.body["code"], status, "{self:?}");
        assert!(!self.text("message").is_empty(), "{self:?}");
        let should_retry = self.header("should-retry").unwrap();
        assert_eq!(
            should_retry == "true",
            self.header("retry-after").is_some(),
            "{self:?}"
        );
        assert!(self.header("x-request-id").is_some());
    }
}

pub async fn add_key(
    store: &dyn Store,
    entropy: &dyn Entropy,
    namespace: &str,
    role: Role,
) -> String {
    let key = Token::generate_api_key(entropy);
    let new_key = NewKey {
        id: KeyId::generate(entropy),
        digest: KeyDigest::of(&key),
        bucket: Bucket {
            namespace: namespace.parse().unwrap(),
            env: "dev".parse().unwrap(),
        },
        role,
        name: String::from("test"),
        hint: NewKey::hint_of(&key),
        created_at: START,
    };
    store.create_key(new_key).await.unwrap();
    key.expose().to_owned()
}

impl Api {
    pub async fn new() -> Self {
        Self::with(Settings::default()).await
    }

    pub async fn with(settings: Settings) -> Self {
        Self::on(settings, Arc::new(MemoryStore::new())).await
    }

    pub async fn on(settings: Settings, store: Arc<dyn Store>) -> Self {
        Self::built(settings, store, async |_, _| None).await
    }

    /// One with a governor over its platform and by its clock.
    pub async fn governed(
        governor: impl AsyncFnOnce(Arc<MemoryPlatform>, Arc<ManualClock>) -> Governor<DeployedPlatform>,
    ) -> Self {
        let store = Arc::new(MemoryStore::new());
        let build = async |platform, clock| Some(governor(platform, clock).await);
        Self::built(Settings::default(), store, build).await
    }

    async fn built(
        settings: Settings,
        store: Arc<dyn Store>,
        governor: impl AsyncFnOnce(
            Arc<MemoryPlatform>,
            Arc<ManualClock>,
        ) -> Option<Governor<DeployedPlatform>>,
    ) -> Self {
        let clock = Arc::new(ManualClock::new(START));
        let entropy: Arc<dyn Entropy> = Arc::new(SeededEntropy::new(1));
        let key = add_key(&*store, &*entropy, "a", Role::Member).await;
        let other_key = add_key(&*store, &*entropy, "b", Role::Member).await;
        let admin_key = add_key(&*store, &*entropy, "a", Role::Admin).await;
        let templates = Arc::new(MemoryTemplates::new());
        let platform = Arc::new(MemoryPlatform::new(
            clock.clone(),
            entropy.clone(),
            templates.clone(),
        ));
        let parts = ApiParts {
            platform: platform.clone(),
            travel: platform.clone(),
            templates,
            builds: None,
            store: store.clone(),
            clock: clock.clone(),
            entropy,
            governor: governor(platform.clone(), clock.clone()).await,
            settings,
        };
        let state = ApiState::open(parts).await.unwrap();
        Self {
            router: router(state),
            platform,
            store,
            clock,
            key,
            other_key,
            admin_key,
        }
    }

    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let body = match bytes.as_ref() {
            b"" => Value::Null,
            bytes => serde_json::from_slice(bytes)
                .unwrap_or_else(|_| panic!("not JSON: {:?}", String::from_utf8_lossy(bytes))),
        };
        Answer {
            status: parts.status,
            headers: parts.headers,
            body,
        }
    }

    /// A request of the member of `a:dev`, by an E2B client.
    pub fn request(&self, method: Method, path: &str, body: impl Into<Body>) -> Request<Body> {
        Request::builder()
            .method(method)
            .uri(path)
            .header("x-api-key", &self.key)
            .header("user-agent", "e2b-python-sdk/2.63.0")
            .body(body.into())
            .unwrap()
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path, "")).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(self.request(Method::DELETE, path, "")).await
    }

    pub async fn post(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.send(self.request(Method::POST, path, body)).await
    }

    pub async fn put(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.send(self.request(Method::PUT, path, body)).await
    }

    /// The same request with another key.
    pub async fn with_key(&self, key: &str, mut request: Request<Body>) -> Answer {
        let key = key.parse().unwrap();
        request.headers_mut().insert("x-api-key", key);
        self.send(request).await
    }

    /// Creates a sandbox of `base` and returns its identifier.
    pub async fn create(&self) -> String {
        self.create_with(r#"{"templateID":"base","timeout":600}"#)
            .await
    }

    pub async fn create_with(&self, body: &str) -> String {
        let made = self.post("/v2/sandboxes", body.to_owned()).await;
        assert_eq!(made.status, 201, "{made:?}");
        made.text("sandboxID").to_owned()
    }

    /// How many seconds from now a sandbox ends.
    pub async fn ends_in_s(&self, id: &str) -> u64 {
        let detail = self.get(&format!("/sandboxes/{id}")).await;
        assert_eq!(detail.status, 200, "{detail:?}");
        let end = parse_time(detail.text("endAt"));
        end.since(self.now()).as_secs()
    }
}

pub fn parse_time(text: &str) -> Timestamp {
    let time: jiff::Timestamp = text.parse().unwrap();
    Timestamp::from_unix_ms(u64::try_from(time.as_millisecond()).unwrap())
}

/// Waits until `condition` holds; fails after ten seconds.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let waited = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), waited)
        .await
        .unwrap_or_else(|_| panic!("it never came to be that {what}"));
}
