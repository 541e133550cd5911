//! A server whose governor is fast, and what is asked of it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Answer, Server};

/// All of the governor's times are divided by this.
pub(crate) const SPEED: u32 = 10;
/// How often the reclaimer looks then.
pub(crate) const CYCLE: Duration = Duration::from_secs(60 / SPEED as u64);
/// How long a lease that nobody renews is grey or black then.
pub(crate) const GREY: Duration = Duration::from_secs(180 / SPEED as u64);

pub(crate) fn fast<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["--governor-speed", "10"], more].concat()
}

/// Looks until something is so.
pub(crate) fn until<T>(what: &str, patience: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + patience;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "not within {patience:?}: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub(crate) fn take(server: &Server, owner: &str, lease: &str) -> Answer {
    let body = json!({ "owner_id": owner, "lease_id": lease, "template_id": "base" });
    server.request("POST", "/v1/leases", Some(body)).unwrap()
}

pub(crate) fn taken(server: &Server, owner: &str, lease: &str) -> String {
    let answer = take(server, owner, lease);
    assert!(matches!(answer.status, 200 | 201), "{answer:?}");
    answer.body["sandbox_id"].as_str().unwrap().to_owned()
}

pub(crate) fn release(server: &Server, owner: &str, lease: &str) -> u16 {
    let body = json!({ "owner_id": owner, "lease_id": lease });
    let answer = server.request("POST", "/v1/lease-releases", Some(body));
    answer.unwrap().status
}

pub(crate) fn set_bucket(server: &Server, quota: u32, retention_s: Option<u32>) {
    let body = json!({ "quota": quota, "retention_s": retention_s });
    let answer = server.request("PUT", "/v1/buckets/default/dev", Some(body));
    assert_eq!(answer.unwrap().status, 200);
}

pub(crate) fn used(server: &Server) -> u64 {
    let answer = server.request("GET", "/v1/buckets/default/dev", None);
    answer.unwrap().body["used"].as_u64().unwrap()
}

pub(crate) fn run_of(server: &Server, run: &str) -> Value {
    let answer = server.request("GET", &format!("/v1/sandbox-runs/{run}"), None);
    answer.unwrap().body
}

/// The events of a run that is over.
pub(crate) fn events(server: &Server, run: &str) -> String {
    let answer = server.request("GET", &format!("/v1/sandbox-runs/{run}/events"), None);
    match answer.unwrap().body {
        Value::String(text) => text,
        other => panic!("{other}"),
    }
}

pub(crate) fn ask(run: &str, script: &str) -> Value {
    json!({
        "project_id": "p", "session_run_id": run, "run_id": run, "timeout": 300,
        "command": ["/bin/sh", "-c", script], "artifacts": ["*.txt"],
    })
}

/// Asks for a run with these fields besides, and lets go of it at once.
pub(crate) fn ask_for(server: &Server, run: &str, script: &str, with: Value) {
    let (url, key) = (server.url.clone(), server.key.clone());
    let mut body = ask(run, script);
    let Value::Object(fields) = with else {
        panic!("{with} has no fields");
    };
    body.as_object_mut().unwrap().extend(fields);
    let body = body.to_string();
    std::thread::spawn(move || {
        let request = ureq::http::Request::post(format!("{url}/v1/sandbox-runs"))
            .header("x-api-key", key)
            .body(body)
            .unwrap();
        // The answer is a stream, which nobody reads.
        let _ = ureq::agent().run(request);
    });
}

/// Begins a run with these fields besides; nobody listens to it when it runs.
pub(crate) fn begin_with(server: &Server, run: &str, script: &str, with: Value) {
    ask_for(server, run, script, with);
    until("the run was started", Duration::from_secs(60), || {
        (run_of(server, run)["last_event_id"].as_u64() > Some(0)).then_some(())
    });
}

/// Begins a run and lets go of it when it runs.
pub(crate) fn begin(server: &Server, run: &str, script: &str) {
    begin_with(server, run, script, json!({}));
}
