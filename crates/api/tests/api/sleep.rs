//! Pause, resume and connect, as clients see them (R-L4, R-L6, wire contract 1.4).

use sandhold_platform::{
    AutoResume, BusyWith, GuestHealth, NewLifetime, Pause, PauseKeeps, PlatformError, Resume,
    Waking,
};
use sandhold_types::{OnTimeout, SandboxState, Timestamp};
use serde_json::json;

use crate::common::{Answer, Api, parse_time};

const CUBE: &str = "python-requests/2.34.2";

/// A call as CubeSandbox's client makes it.
async fn by_cube(api: &Api, method: &str, path: &str, body: &str) -> Answer {
    let mut request = api.request(method.parse().unwrap(), path, body.to_owned());
    let headers = request.headers_mut();
    headers.insert("user-agent", CUBE.parse().unwrap());
    api.send(request).await
}

async fn paused(api: &Api, body: &str) -> String {
    let id = api.create_with(body).await;
    let paused = api.post(&format!("/sandboxes/{id}/pause"), "").await;
    assert_eq!(paused.status, 204, "{paused:?}");
    id
}

#[tokio::test]
async fn a_pause_is_told_and_a_second_one_refused() {
    // R-L4, wire contract 1.4
    let api = Api::new().await;
    let id = paused(&api, r#"{"templateID":"base","timeout":60}"#).await;
    assert_eq!(api.platform.last_pause(), Pause::default());
    let path = format!("/sandboxes/{id}");
    let detail = api.get(&path).await;
    assert_eq!(detail.body["state"], "paused");
    assert_eq!(detail.body["pauseMode"], "full");
    assert_eq!(parse_time(detail.text("endAt")), Timestamp::FAR_FUTURE);
    let again = api.post(&format!("{path}/pause"), "").await;
    again.is_refused(409, "already_so");
    for (query, found) in [("paused", 1), ("running", 0), ("running,paused", 1)] {
        let list = api.get(&format!("/v2/sandboxes?state={query}")).await;
        assert_eq!(list.body.as_array().unwrap().len(), found, "{query}");
    }
    assert_eq!(api.delete(&path).await.status, 204, "R-L8");
}

#[tokio::test]
async fn no_clock_runs_while_a_sandbox_sleeps() {
    // R-L6; CubeSandbox #1780
    let api = Api::new().await;
    let id = paused(&api, r#"{"templateID":"base","timeout":60}"#).await;
    api.clock.advance(std::time::Duration::from_secs(7200));
    let detail = api.get(&format!("/sandboxes/{id}")).await;
    assert_eq!(detail.body["state"], "paused");
}

#[tokio::test]
async fn what_a_pause_is_asked_to_keep_reaches_the_platform() {
    let api = Api::new().await;
    let strict = GuestHealth::MustAnswer;
    for (body, keeps, health, mode) in [
        ("{}", PauseKeeps::Everything, GuestHealth::Any, "full"),
        (
            r#"{"memory":true}"#,
            PauseKeeps::Everything,
            GuestHealth::Any,
            "full",
        ),
        (
            r#"{"memory":false}"#,
            PauseKeeps::Files,
            strict,
            "filesystem",
        ),
        (
            r#"{"requireHealthyGuest":true}"#,
            PauseKeeps::Everything,
            strict,
            "full",
        ),
    ] {
        let id = api.create().await;
        let path = format!("/sandboxes/{id}");
        assert_eq!(api.post(&format!("{path}/pause"), body).await.status, 204);
        assert_eq!(api.platform.last_pause(), Pause { keeps, health }, "{body}");
        assert_eq!(api.get(&path).await.body["pauseMode"], mode);
        api.post(&format!("{path}/resume"), "").await;
        assert!(
            api.get(&path).await.body["pauseMode"].is_null(),
            "of a sleeping one only"
        );
    }
    *api.platform.sleep_failure.lock().unwrap() = Some(|| PlatformError::GuestUnresponsive {
        detail: String::from("silent"),
    });
    let id = api.create().await;
    let path = format!("/sandboxes/{id}/pause");
    let silent = api.post(&path, r#"{"requireHealthyGuest":true}"#).await;
    silent.is_refused(503, "sandbox_snapshot_guest_agent_unresponsive");
}

#[tokio::test]
async fn connect_wakes_what_sleeps_and_extends_what_runs() {
    // BC-069
    let api = Api::new().await;
    for prefix in ["", "/v2"] {
        let id = paused(&api, r#"{"templateID":"base","timeout":1800}"#).await;
        let path = format!("{prefix}/sandboxes/{id}/connect");
        let woken = api.post(&path, r#"{"timeout":60}"#).await;
        assert_eq!(woken.status, 201, "{woken:?}");
        assert_eq!(woken.text("sandboxID"), id);
        assert_eq!(api.ends_in_s(&id).await, 60, "paused: the new value");
        let extended = api.post(&path, r#"{"timeout":30}"#).await;
        assert_eq!(extended.status, 200);
        assert_eq!(api.ends_in_s(&id).await, 60, "running: only longer");
    }
    let id = paused(&api, r#"{"templateID":"base","timeout":1800}"#).await;
    let woken = api.post(&format!("/v2/sandboxes/{id}/connect"), "").await;
    assert_eq!(woken.status, 201);
    assert_eq!(
        api.ends_in_s(&id).await,
        1800,
        "never silently five minutes"
    );
}

#[tokio::test]
async fn a_cold_boot_is_asked_for_by_either_call() {
    let api = Api::new().await;
    for path in [
        "/v2/sandboxes/{id}/connect",
        "/sandboxes/{id}/connect",
        "/sandboxes/{id}/resume",
    ] {
        let id = paused(&api, r#"{"templateID":"base"}"#).await;
        let body = r#"{"timeout":9,"memory":false,"autoPause":true}"#;
        let woken = api.post(&path.replace("{id}", &id), body).await;
        assert_eq!(woken.status, 201, "{path}");
        let expected = Resume {
            waking: Waking::ColdBoot,
            lifetime: NewLifetime::After(Some(9_000)),
            on_timeout: Some(OnTimeout::Pause),
        };
        assert_eq!(api.platform.last_resume(), expected);
        let detail = api.get(&format!("/sandboxes/{id}")).await;
        assert_eq!(detail.body["lifecycle"]["onTimeout"], "pause");
    }
}

#[tokio::test]
async fn cubes_windows_are_never_shortened() {
    // Wire contract 1.4
    let api = Api::new().await;
    let made = by_cube(
        &api,
        "POST",
        "/sandboxes",
        r#"{"templateID":"base","timeout":600}"#,
    );
    let id = made.await.text("sandboxID").to_owned();
    let path = format!("/sandboxes/{id}");
    for (body, status) in [
        ("{}", 201),
        (r#"{"timeout":60}"#, 201),
        (r#"{"timeout":0}"#, 400),
    ] {
        let paused = by_cube(&api, "POST", &format!("{path}/pause"), "").await;
        assert_eq!(paused.status, 204);
        let connected = by_cube(&api, "POST", &format!("{path}/connect"), body).await;
        assert_eq!(connected.status, status, "{body}");
        if status == 201 {
            assert_eq!(api.ends_in_s(&id).await, 600, "{body}");
        }
    }
}

#[tokio::test]
async fn an_operation_that_overlaps_is_told_as_each_client_knows_it() {
    let api = Api::new().await;
    let id = api.create().await;
    let path = format!("/sandboxes/{id}");
    for state in [SandboxState::Pausing, SandboxState::Resuming] {
        api.platform.set_state(&id, state);
        let cubes = by_cube(&api, "POST", &format!("{path}/connect"), "").await;
        cubes.is_refused(409, "conflict");
        assert_eq!(cubes.header("retry-after"), Some("2"));
        for call in ["connect", "pause", "resume"] {
            let busy = api.post(&format!("{path}/{call}"), "").await;
            busy.is_refused(503, "busy");
            assert_eq!(busy.header("retry-after"), Some("2"), "{call}");
        }
        let name = by_cube(&api, "GET", &path, "").await;
        assert_eq!(
            name.body["state"],
            state.as_str(),
            "Cube's clients know the name"
        );
        assert_eq!(api.get(&path).await.body["state"], "paused", "E2B's do not");
    }
}

#[tokio::test]
async fn a_create_says_what_happens_at_the_end_and_when_traffic_comes() {
    // R-L6, wire contract 1.2
    let api = Api::new().await;
    let e2b = r#"{"templateID":"base","autoPause":true,"autoResume":{"enabled":true}}"#;
    let cube = r#"{"templateID":"base","lifecycle":{"onTimeout":"pause","autoResume":true}}"#;
    for (path, body) in [
        ("/v2/sandboxes", e2b),
        ("/sandboxes", e2b),
        ("/sandboxes", cube),
    ] {
        let made = api.post(path, body).await;
        assert_eq!(made.status, 201, "{made:?}");
        let asked = api.platform.last_create();
        assert_eq!(asked.lifetime.on_timeout, OnTimeout::Pause);
        assert_eq!(asked.auto_resume, AutoResume::On);
        assert_eq!(asked.busy_with, BusyWith::AnyCommand);
        let detail = api
            .get(&format!("/sandboxes/{}", made.text("sandboxID")))
            .await;
        let told = json!({"onTimeout":"pause","autoResume":true,"backgroundCommandsCount":true});
        assert_eq!(detail.body["lifecycle"], told);
        let list = api.get("/v2/sandboxes").await;
        assert_eq!(list.body[0]["lifecycle"], told);
    }
    let own = r#"{"templateID":"base","lifecycle":{"backgroundCommandsCount":false}}"#;
    api.post("/sandboxes", own).await;
    assert_eq!(
        api.platform.last_create().busy_with,
        BusyWith::AttachedCommands
    );
    let files = r#"{"templateID":"base","autoPause":true,"autoPauseMemory":false}"#;
    api.post("/v2/sandboxes", files).await;
    assert_eq!(api.platform.last_create().timeout_keeps, PauseKeeps::Files);
}

#[tokio::test]
async fn events_tell_who_asked_and_with_which_request() {
    // R-L12
    let api = Api::new().await;
    let id = api.create().await;
    let path = format!("/sandboxes/{id}");
    let mut pause = api.request("POST".parse().unwrap(), &format!("{path}/pause"), "");
    let headers = pause.headers_mut();
    headers.insert("x-request-id", "night-shift-1".parse().unwrap());
    assert_eq!(api.send(pause).await.status, 204);
    let events = api.get(&format!("{path}/events")).await;
    let newest = events.body["events"].as_array().unwrap().last().unwrap();
    assert_eq!(newest["state"], "paused");
    assert_eq!(newest["actorKind"], "client");
    assert_eq!(newest["requestID"], "night-shift-1");
    assert!(newest["key"].is_string() && newest["reason"].is_string());
}
