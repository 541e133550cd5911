//! Bad input to `/v1` (issue 5): typed errors, and nothing taken, by a recount.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::body::Body;
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::Method;
use sandhold_platform::Platform as _;
use serde_json::{Value, json};

use crate::{
    common::Answer,
    governor::{Governed, run},
};

/// Texts that are no identifier of anything.
fn no_ids() -> Vec<String> {
    let mut texts: Vec<String> = [
        "",
        " ",
        "a b",
        "a\0b",
        "a\r\nx-admin: 1",
        "\u{202e}a",
        "ä",
        "💥",
        "\u{7f}",
        "a\tb",
        "\u{feff}",
    ]
    .map(str::to_owned)
    .to_vec();
    texts.push("x".repeat(1_000));
    texts.push("x".repeat(1_000_000));
    texts
}

/// Names that are allowed and that something underneath might read as more than a name.
const STRANGE: [&str; 12] = [
    "';DROP_TABLE_records;--",
    "%s%n%25",
    "*",
    "{books}:v1",
    "../../etc/passwd",
    "$(reboot)",
    "[^_]*",
    "\\",
    "\"",
    "-",
    "..",
    "null",
];

impl Governed {
    /// Refused with a code of ours, for a reason that is the caller's.
    fn is_typed(answer: &Answer, what: &str) {
        assert!(answer.status.is_client_error(), "{what}: {answer:?}");
        assert!(!answer.text("error_code").is_empty(), "{what}: {answer:?}");
        assert!(!answer.text("message").is_empty(), "{what}: {answer:?}");
        let told = answer.body.to_string().len();
        assert!(told < 4_096, "{what}: {told} bytes are told back");
    }

    /// No slot, lease, run or sandbox of anybody.
    async fn has_taken_nothing(&self) {
        assert_eq!(self.api.platform.list().len(), 0);
        assert_eq!(self.api.platform.creates.lock().unwrap().len(), 0);
        let leases = self.admin(Method::GET, "/v1/leases", Value::Null).await;
        assert_eq!(leases.body, json!({ "leases": [] }));
        let buckets = self.admin(Method::GET, "/v1/buckets", Value::Null).await;
        for bucket in buckets.body["buckets"].as_array().unwrap() {
            assert_eq!(
                (&bucket["used"], &bucket["uncounted"]),
                (&json!(0), &json!(0))
            );
        }
    }
}

/// A body of each route that takes one, well but for one field.
fn bodies(field: &str, value: &Value) -> Vec<(&'static str, Value)> {
    let lease = json!({ "owner_id": "o", "lease_id": "l", "fence": 1 });
    let with = |mut body: Value| {
        body[field] = value.clone();
        body
    };
    match field {
        "project_id" | "session_run_id" | "run_id" => {
            vec![("/v1/sandbox-runs", with(run(&json!({}))))]
        }
        "template_id" => vec![
            ("/v1/sandbox-runs", with(run(&json!({})))),
            ("/v1/leases", with(lease)),
        ],
        _ => vec![
            ("/v1/sandbox-runs", with(run(&json!({})))),
            ("/v1/leases", with(lease.clone())),
            ("/v1/lease-heartbeats", with(lease.clone())),
            ("/v1/lease-releases", with(lease)),
        ],
    }
}

const FIELDS: [&str; 8] = [
    "owner_id",
    "lease_id",
    "namespace",
    "env",
    "project_id",
    "session_run_id",
    "run_id",
    "template_id",
];

#[tokio::test]
async fn what_is_no_identifier_is_refused_everywhere_and_takes_nothing() {
    let world = Governed::new().await;
    for field in FIELDS {
        let not_text = [json!(7), json!({}), json!([]), json!(true)];
        let texts = no_ids().into_iter().map(Value::from);
        for value in texts.chain(not_text) {
            for (path, body) in bodies(field, &value) {
                let shown: String = value.to_string().chars().take(40).collect();
                let what = format!("{path} with {field} = {shown}");
                Governed::is_typed(&world.post(path, body).await, &what);
            }
        }
    }
    for text in no_ids() {
        if text.len() > 10_000 {
            continue;
        }
        let text: String = text.bytes().map(|byte| format!("%{byte:02X}")).collect();
        for (method, path) in [
            (Method::GET, format!("/v1/sandbox-runs/{text}")),
            (Method::GET, format!("/v1/sandbox-runs/{text}/events")),
            (Method::POST, format!("/v1/sandbox-runs/{text}/cancel")),
            (Method::GET, format!("/v1/sandboxes/{text}/verdict")),
            (Method::PUT, format!("/v1/buckets/{text}/dev")),
            (Method::PUT, format!("/v1/buckets/a/{text}")),
        ] {
            let body = match method {
                Method::GET => Value::Null,
                _ => json!({ "owner_id": "o", "lease_id": "l", "quota": 1 }),
            };
            let answer = world.admin(method, &path, body).await;
            assert!(answer.status.is_client_error(), "{path}: {answer:?}");
        }
    }
    world.has_taken_nothing().await;
}

#[tokio::test]
async fn a_body_that_is_none_is_refused_and_takes_nothing() {
    let world = Governed::new().await;
    let deep = format!(
        "{{\"context\":{}1{}}}",
        "[".repeat(5_000),
        "]".repeat(5_000)
    );
    for body in ["", "{", "null", "[]", "7", "\u{0}", "{\"owner_id\":", &deep] {
        for path in [
            "/v1/sandbox-runs",
            "/v1/leases",
            "/v1/lease-heartbeats",
            "/v1/lease-releases",
        ] {
            let answer = world.api.post(path, body.to_owned()).await;
            let shown: String = body.chars().take(40).collect();
            Governed::is_typed(&answer, &format!("{path} with {shown}"));
        }
    }
    world.has_taken_nothing().await;
}

#[tokio::test]
async fn an_owner_of_another_tenant_is_refused_everywhere() {
    // R-G2, R-G19: in the field that says where, and in the name that tells it.
    let world = Governed::new().await;
    for path in [
        "/v1/sandbox-runs",
        "/v1/leases",
        "/v1/lease-heartbeats",
        "/v1/lease-releases",
    ] {
        for with in [
            json!({ "namespace": "b" }),
            json!({ "env": "prod" }),
            json!({ "owner_id": "b:dev:p:s" }),
            json!({ "owner_id": "a:prod:p:s" }),
            json!({ "owner_id": "b:dev:p:s:more" }),
            json!({ "owner_id": ":::" }),
        ] {
            let mut body = run(&json!({ "owner_id": "o", "lease_id": "l", "fence": 1 }));
            let fields = with.as_object().unwrap().clone();
            body.as_object_mut().unwrap().extend(fields);
            let refused = world.post(path, body).await;
            refused.is_refused(403, "forbidden");
        }
    }
    world.has_taken_nothing().await;
    // An administrator acts in every bucket, and names its owners rightly too.
    let set = world
        .admin(Method::PUT, "/v1/buckets/b/dev", json!({ "quota": 1 }))
        .await;
    assert_eq!(set.status, 200, "{set:?}");
    let wrong = json!({ "namespace": "b", "owner_id": "a:dev:p:s" });
    let refused = world.admin(Method::POST, "/v1/leases", wrong).await;
    refused.is_refused(403, "forbidden");
    let right = json!({ "namespace": "b", "owner_id": "b:dev:p:s" });
    let taken = world.admin(Method::POST, "/v1/leases", right).await;
    assert_eq!(taken.status, 201, "{taken:?}");
}

#[tokio::test]
async fn a_lease_of_another_owner_gives_nothing_and_takes_nothing() {
    // R-G7
    let world = Governed::new().await;
    let held = world.post("/v1/leases", json!({ "owner_id": "o", "lease_id": "held" }));
    let held = held.await;
    assert_eq!(held.status, 201, "{held:?}");
    let foreign = json!({ "owner_id": "thief", "lease_id": "held", "fence": held.body["fence"] });
    for path in ["/v1/lease-heartbeats", "/v1/lease-releases"] {
        let refused = world.post(path, foreign.clone()).await;
        Governed::is_typed(&refused, path);
    }
    let as_run = run(&json!({ "owner_id": "thief", "lease_id": "held" }));
    let refused = world.post("/v1/sandbox-runs", as_run).await;
    refused.is_refused(403, "forbidden");
    let leases = world.api.get("/v1/leases").await;
    let leases = leases.body["leases"].as_array().unwrap().clone();
    assert_eq!(leases.len(), 1, "{leases:?}");
    assert_eq!(leases[0]["owner_id"], "o");
    assert_eq!(
        leases[0]["fence"], held.body["fence"],
        "it was not taken over"
    );
    assert_eq!(world.api.platform.list().len(), 1);
}

#[tokio::test]
async fn a_strange_name_is_a_name_and_nothing_else() {
    let world = Governed::new().await;
    for name in STRANGE {
        let asked = json!({ "owner_id": name, "lease_id": name });
        let taken = world.post("/v1/leases", asked.clone()).await;
        assert_eq!(taken.status, 201, "{name}: {taken:?}");
        assert_eq!(taken.text("lease_id"), name);
    }
    let leases = world.api.get("/v1/leases").await;
    let mut owners: Vec<&str> = leases.body["leases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|lease| lease["owner_id"].as_str().unwrap())
        .collect();
    owners.sort_unstable();
    let mut expected = STRANGE;
    expected.sort_unstable();
    assert_eq!(owners, expected, "each is one owner of its own");
    for (n, name) in STRANGE.into_iter().enumerate() {
        let asked = json!({ "owner_id": name, "lease_id": name });
        let released = world.post("/v1/lease-releases", asked).await;
        assert_eq!(released.status, 202, "{name}: {released:?}");
        let leases = world.api.get("/v1/leases").await;
        let left = leases.body["leases"].as_array().unwrap().len();
        assert_eq!(left, STRANGE.len() - n - 1, "no other went with {name}");
    }
}

#[tokio::test]
async fn a_context_of_a_gigabyte_is_refused_before_it_is_read() {
    const MIB: usize = 1024 * 1024;
    // More than a run may have, and little enough to be held.
    const READ_MIB_MAX: usize = 32;
    let world = Governed::new().await;
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = sent.clone();
    let begin = Bytes::from_static(b"{\"context\":\"");
    let rest = Bytes::from(vec![b'x'; MIB]);
    let parts = stream::iter(0..=1_024).map(move |n| {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok::<_, Infallible>(if n == 0 { begin.clone() } else { rest.clone() })
    });
    let body = Body::from_stream(parts);
    let asked = world.api.request(Method::POST, "/v1/sandbox-runs", body);
    let refused = world.api.send(asked).await;
    refused.is_refused(413, "too_large");
    let sent = sent.load(Ordering::SeqCst);
    assert!(sent <= READ_MIB_MAX, "{sent} MiB were read");
    world.has_taken_nothing().await;
}
