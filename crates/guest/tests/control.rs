//! The host's calls, and who may make which call (wire contract 2.2).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{fs, time::Duration};

use http::Method;
use sandhold_agent_proto::frame::encode;
use serde_json::json;
use support::{ACCESS_TOKEN, Agent, CONTROL_TOKEN, eventually, files};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

const CONTROL: [(&str, &str); 1] = [("x-sandhold-control", CONTROL_TOKEN)];

#[tokio::test]
async fn before_the_first_life_nothing_is_answered() {
    let agent = Agent::start_without_life(json!({})).await;
    assert_eq!(
        agent.send(Method::GET, "/health", &[], "").await.status,
        204
    );
    for token in ["", ACCESS_TOKEN] {
        let headers = [("x-access-token", token)];
        for path in ["/envs", "/metrics", "/files?path=/etc/passwd", "/nothing"] {
            let answer = agent.send(Method::GET, path, &headers, "").await;
            assert_eq!(answer.status, 401, "{path}");
        }
        let list = agent
            .send(Method::POST, "/process.Process/List", &headers, "{}")
            .await;
        assert_eq!(list.status, 401);
        assert_eq!(list.json()["code"], "unauthenticated");
    }
}

#[tokio::test]
async fn the_hosts_calls_need_the_hosts_token() {
    let agent = Agent::start().await;
    for (method, path) in [
        (Method::POST, "/init"),
        (Method::GET, "/ready"),
        (Method::POST, "/quiesce"),
        (Method::POST, "/restart"),
        (Method::GET, "/activity"),
        (Method::GET, "/tunnel?port=1"),
        (Method::POST, "/freeze"),
    ] {
        for headers in [
            vec![],
            vec![("x-access-token", ACCESS_TOKEN)],
            vec![("x-sandhold-control", ACCESS_TOKEN)],
        ] {
            let answer = agent.send(method.clone(), path, &headers, "").await;
            assert_eq!(answer.status, 401, "{path}");
        }
    }
}

#[tokio::test]
async fn a_life_has_its_own_token_variables_name_and_identity() {
    let agent = Agent::start().await;
    let first_id = fs::read_to_string(agent.dir.path().join("etc/machine-id")).unwrap();
    let init = json!({
        "accessToken": "second", "controlToken": "control-2", "envVars": { "A": "1" },
        "hostname": "sb-two", "sandboxId": "sb2", "templateId": "t",
        "timestamp": "2026-01-01T00:00:00Z", "entropy": "AAECAwQFBgc=",
        "defaultUser": "root", "defaultWorkdir": "/usr", "unknownField": [1],
    });
    assert_eq!(agent.init(init).await.status, 204);
    let etc = |name: &str| fs::read_to_string(agent.dir.path().join("etc").join(name)).unwrap();
    assert_eq!(etc("hostname"), "sb-two\n");
    assert!(etc("hosts").ends_with("127.0.1.1\tsb-two\n"));
    assert_ne!(etc("machine-id"), first_id);

    assert_eq!(agent.get("/envs", &[]).await.status, 401);
    assert_eq!(agent.init(json!({})).await.status, 401);
    let second = [("x-access-token", "second")];
    let envs = agent.send(Method::GET, "/envs", &second, "").await.json();
    let expected = json!({
        "A": "1", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "sb2", "E2B_TEMPLATE_ID": "t",
    });
    assert_eq!(envs, expected);
    // Variables are replaced, not merged.
    let control = [("x-sandhold-control", "control-2")];
    let body = json!({ "envVars": { "B": "2" } }).to_string();
    agent.send(Method::POST, "/init", &control, body).await;
    let envs = agent.send(Method::GET, "/envs", &second, "").await.json();
    assert_eq!((envs.get("A"), &envs["B"]), (None, &json!("2")));
    // The new default user and directory count.
    let relative = agent.send(Method::GET, &files(""), &second, "").await;
    assert!(
        relative.json()["message"]
            .as_str()
            .unwrap()
            .starts_with("/usr")
    );
}

#[tokio::test]
async fn a_wrong_init_changes_nothing() {
    let agent = Agent::start().await;
    for body in [
        "nonsense",
        "[]",
        r#"{"accessToken":""}"#,
        r#"{"accessToken":"new","hostname":"no good"}"#,
        r#"{"accessToken":"new","timestamp":"yesterday"}"#,
        r#"{"accessToken":"new","entropy":"?"}"#,
        r#"{"accessToken":5}"#,
    ] {
        let answer = agent.send(Method::POST, "/init", &CONTROL, body).await;
        assert_eq!(answer.status, 400, "{body}");
    }
    let large = format!("{{\"x\":\"{}\"}}", "x".repeat(2 << 20));
    assert_eq!(
        agent
            .send(Method::POST, "/init", &CONTROL, large)
            .await
            .status,
        413
    );
    assert_eq!(agent.get("/envs", &[]).await.status, 200);
    assert_eq!(
        agent.send(Method::POST, "/init", &CONTROL, "").await.status,
        204
    );
}

#[tokio::test]
async fn connections_of_an_earlier_life_are_closed() {
    // BC-094
    let agent = Agent::start().await;
    let mut earlier = TcpStream::connect(("127.0.0.1", agent.port)).await.unwrap();
    earlier
        .write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let mut answer = [0u8; 12];
    earlier.read_exact(&mut answer).await.unwrap();
    assert_eq!(agent.init(json!({})).await.status, 204);
    let mut rest = Vec::new();
    let end = tokio::time::timeout(support::PATIENCE, earlier.read_to_end(&mut rest)).await;
    assert!(end.is_ok(), "the connection is still open");
}

#[tokio::test]
async fn quiescing_ends_every_connection_and_no_process() {
    // R-L4: a connection that is open while memory is captured can cost the copy its wake-up.
    let agent = Agent::start().await;
    let mut idle = TcpStream::connect(("127.0.0.1", agent.port)).await.unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let mut answer = [0u8; 12];
    idle.read_exact(&mut answer).await.unwrap();
    let waiting = "while [ ! -e go ]; do sleep .01; done; echo went on > done";
    let mut events = agent.shell_events(waiting, &[]).await;
    events.pid().await;
    assert_eq!(
        agent
            .send(Method::POST, "/quiesce", &CONTROL, "")
            .await
            .status,
        204
    );
    // Both were closed before the answer came, so nothing has to be waited for.
    let mut rest = Vec::new();
    let end = tokio::time::timeout(support::PATIENCE, idle.read_to_end(&mut rest)).await;
    assert!(end.is_ok());
    assert!(
        events.breaks_off().await,
        "the stream of a command is closed"
    );
    fs::write(agent.home().join("go"), "").unwrap();
    eventually("the command goes on", || agent.home().join("done").exists()).await;
}

#[tokio::test]
async fn readiness_waits_for_the_templates_commands() {
    // BC-087
    let agent = Agent::start_without_life(json!({
        "environment": { "T": "template" },
        "startCommand": "echo $T$K > started; exec sleep 900",
        "readyCommand": "test -f go",
    }))
    .await;
    eventually("the start command runs", || {
        agent.home().join("started").exists()
    })
    .await;
    let ready = agent.send(Method::GET, "/ready", &CONTROL, "").await;
    assert_eq!(ready.status, 503);
    assert_eq!(ready.json(), json!({ "waitingFor": ["readyCommand"] }));
    fs::write(agent.home().join("go"), "").unwrap();
    let mut status = 503;
    while status == 503 {
        status = agent
            .send(Method::GET, "/ready", &CONTROL, "")
            .await
            .status
            .as_u16();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(status, 204);
    agent
        .init(json!({ "accessToken": ACCESS_TOKEN, "envVars": { "K": "1" } }))
        .await;
    assert_eq!(
        fs::read_to_string(agent.home().join("started")).unwrap(),
        "template\n"
    );
    assert_eq!(agent.shell("echo $T$K").await.out(), "template1\n");
    // What belongs to the template is not work of a client.
    let activity = agent
        .send(Method::GET, "/activity", &CONTROL, "")
        .await
        .json();
    assert_eq!(activity["processes"], 0);
}

/// Waits until the template's commands are up.
async fn ready(agent: &Agent) {
    while agent.send(Method::GET, "/ready", &CONTROL, "").await.status != 204 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_restart_ends_every_process_and_brings_up_the_template_as_a_boot_does() {
    // Wire contract 1.4, `memory: false`; BC-087
    let agent = Agent::start_without_life(json!({
        "environment": { "T": "template" },
        "startCommand": "echo $T$K >> started; exec sleep 901",
        "readyCommand": "test -s started",
    }))
    .await;
    ready(&agent).await;
    let init = json!({ "accessToken": ACCESS_TOKEN, "envVars": { "K": "1" } });
    assert_eq!(agent.init(init).await.status, 204);
    agent.put("kept", "kept").await;
    let mut events = agent.shell_events("exec sleep 900", &[]).await;
    let pid = events.pid().await;
    let restarted = agent.send(Method::POST, "/restart", &CONTROL, "").await;
    assert_eq!(restarted.status, 204);
    assert!(
        !std::path::Path::new(&format!("/proc/{pid}")).exists(),
        "it is gone when told"
    );
    ready(&agent).await;
    let started = fs::read_to_string(agent.home().join("started")).unwrap();
    assert_eq!(
        started, "template\ntemplate\n",
        "twice, and without a sandbox's variables"
    );
    assert_eq!(
        agent.shell("cat kept; echo $T$K").await.out(),
        "kepttemplate1\n"
    );
    let activity = agent
        .send(Method::GET, "/activity", &CONTROL, "")
        .await
        .json();
    assert_eq!(activity["processes"], 0);
}

#[tokio::test]
async fn activity_counts_what_runs() {
    let agent = Agent::start().await;
    let activity = async || {
        agent
            .send(Method::GET, "/activity", &CONTROL, "")
            .await
            .json()
    };
    let before = activity().await;
    assert_eq!(
        (&before["processes"], &before["streams"]),
        (&json!(0), &json!(0))
    );
    let mut events = agent.shell_events("exec sleep 900", &[]).await;
    events.pid().await;
    let during = activity().await;
    assert_eq!(
        (&during["processes"], &during["streams"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(
        during["backgroundProcesses"], 0,
        "somebody reads its output"
    );
    assert!(during["lastActivityUnixMs"].as_u64() >= before["lastActivityUnixMs"].as_u64());
    drop(events);
    while activity().await["streams"] != 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let background = activity().await;
    assert_eq!(
        (&background["processes"], &background["backgroundProcesses"]),
        (&json!(1), &json!(1))
    );
    // Asking is no activity.
    assert_eq!(activity().await, activity().await);
}

#[tokio::test]
async fn a_loopback_port_is_reached_through_a_tunnel() {
    // BC-078
    let agent = Agent::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let request = format!(
        "GET /tunnel?port={port} HTTP/1.1\r\nHost: x\r\nX-Sandhold-Control: {CONTROL_TOKEN}\r\n\
         Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
    );
    let mut host = TcpStream::connect(("127.0.0.1", agent.port)).await.unwrap();
    host.write_all(request.as_bytes()).await.unwrap();
    let (mut guest, _) = listener.accept().await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(host.read_u8().await.unwrap());
    }
    assert!(
        head.starts_with(b"HTTP/1.1 101 "),
        "{:?}",
        String::from_utf8_lossy(&head)
    );
    host.write_all(b"\x00ping").await.unwrap();
    let mut bytes = [0u8; 5];
    guest.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"\x00ping");
    guest.write_all(b"pong").await.unwrap();
    drop(guest);
    let mut rest = Vec::new();
    host.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, b"pong");
    drop(listener);

    let upgrade = [CONTROL[0], ("connection", "upgrade"), ("upgrade", "tcp")];
    let closed = agent
        .send(Method::GET, &format!("/tunnel?port={port}"), &upgrade, "")
        .await;
    assert_eq!(
        (closed.status.as_u16(), closed.json()["code"].clone()),
        (502, json!("port_closed"))
    );
    let plain = agent
        .send(Method::GET, "/tunnel?port=1", &CONTROL, "")
        .await;
    assert_eq!(plain.status, 426);
    assert_eq!(
        agent
            .send(Method::GET, "/tunnel?port=99999", &upgrade, "")
            .await
            .status,
        400
    );
}

#[tokio::test]
async fn metrics_are_numbers_of_this_machine() {
    let agent = Agent::start().await;
    let metrics = agent.get("/metrics", &[]).await.json();
    for name in [
        "ts",
        "cpu_count",
        "mem_total",
        "mem_used",
        "disk_total",
        "disk_used",
    ] {
        assert!(metrics[name].as_u64().unwrap() > 0, "{name}");
    }
    assert!((0.0..=100.0).contains(&metrics["cpu_used_pct"].as_f64().unwrap()));
}

#[tokio::test]
async fn hostile_messages_get_typed_errors_and_the_agent_stays() {
    let agent = Agent::start().await;
    let streaming = [
        ("x-access-token", ACCESS_TOKEN),
        ("content-type", "application/connect+json"),
    ];
    let start = "/process.Process/Start";
    let good = br#"{"process":{"cmd":"true"}}"#;
    let mut oversize = vec![0, 0xff, 0xff, 0xff, 0xff];
    oversize.extend_from_slice(good);
    let mut lie = vec![0, 0, 0, 0xff, 0xff];
    lie.extend_from_slice(good);
    let mut compressed = encode(1, good).unwrap();
    compressed[0] = 1;
    for (what, body) in [
        ("nothing", Vec::new()),
        ("half a header", vec![0, 0]),
        ("a size beyond the limit", oversize),
        ("a size beyond the body", lie),
        ("compressed without a method", compressed),
        ("no JSON", encode(0, b"\xff\xfe{").unwrap()),
        (
            "deep JSON",
            encode(0, "[".repeat(100_000).as_bytes()).unwrap(),
        ),
        (
            "wrong types",
            encode(0, br#"{"process":{"cmd":5}}"#).unwrap(),
        ),
        ("bad base64", encode(0, br#"{"process":7}"#).unwrap()),
    ] {
        let answer = agent.send(Method::POST, start, &streaming, body).await;
        let text = String::from_utf8_lossy(&answer.body);
        assert!(
            text.contains("\"code\":\""),
            "{what}: {} {text}",
            answer.status
        );
    }
    let unary = [
        ("x-access-token", ACCESS_TOKEN),
        ("content-type", "application/json"),
    ];
    for (path, body, status) in [
        ("/process.Process/List", "{", 400),
        ("/process.Process/Nothing", "{}", 404),
        ("/no.Such/Service", "{}", 404),
        (
            "/process.Process/SendInput",
            r#"{"process":{"pid":1},"input":{"stdin":"***"}}"#,
            400,
        ),
        (
            "/process.Process/SendInput",
            r#"{"process":{"pid":-1}}"#,
            400,
        ),
        ("/process.Process/SendInput", "{}", 400),
        (
            "/process.Process/SendSignal",
            r#"{"process":{"pid":4000000},"signal":"SIGNAL_X"}"#,
            400,
        ),
    ] {
        let answer = agent.send(Method::POST, path, &unary, body).await;
        assert_eq!(answer.status, status, "{path} {body}");
    }
    // Leniency that clients rely on: unknown fields, numbers as text, enums by number.
    let lenient = r#"{"process":{"pid":"4000000","new":1},"signal":9,"newer":{"a":[]}}"#;
    let answer = agent
        .send(Method::POST, "/process.Process/SendSignal", &unary, lenient)
        .await;
    assert_eq!(answer.json()["code"], "not_found");
    // One byte beyond the limit: the agent must have read all of it to know.
    let envelope = r#"{"x":""}"#.len();
    let large = format!(r#"{{"x":"{}"}}"#, "x".repeat((16 << 20) + 1 - envelope));
    let answer = agent
        .send(Method::POST, "/process.Process/List", &unary, large)
        .await;
    assert_eq!(answer.json()["code"], "resource_exhausted");
    assert_eq!(agent.shell("echo alive").await.out(), "alive\n");
}
