//! The code interpreter over its real port, with the kernel that every Linux machine has: bash.
//! What needs a Python or JavaScript kernel is tested in real sandboxes (tests/e2e).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::{Duration, Instant};

use http_body_util::BodyExt as _;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::{Value, json};
use support::{Agent, PATIENCE};

type Body = http_body_util::Full<bytes::Bytes>;

/// A client of the interpreter's port.
struct Interpreter<'a> {
    agent: &'a Agent,
    client: Client<hyper_util::client::legacy::connect::HttpConnector, Body>,
}

impl<'a> Interpreter<'a> {
    fn of(agent: &'a Agent) -> Self {
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { agent, client }
    }

    async fn open(
        &self,
        method: &str,
        path: &str,
        body: &Value,
    ) -> http::Response<hyper::body::Incoming> {
        let port = self.agent.interpreter_port;
        let request = http::Request::builder()
            .method(method)
            .uri(format!("http://127.0.0.1:{port}{path}"))
            .body(Body::from(body.to_string()))
            .unwrap();
        tokio::time::timeout(PATIENCE, self.client.request(request))
            .await
            .expect("an answer comes")
            .unwrap()
    }

    async fn call(&self, method: &str, path: &str, body: Value) -> (u16, String) {
        let response = self.open(method, path, &body).await;
        let status = response.status().as_u16();
        let body = tokio::time::timeout(PATIENCE, response.into_body().collect())
            .await
            .expect("the answer ends")
            .unwrap()
            .to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    /// Runs code; every line of the answer.
    async fn run(&self, request: Value) -> Vec<Value> {
        let (status, body) = self.call("POST", "/execute", request).await;
        assert_eq!(status, 200, "{body}");
        let lines: Vec<Value> = body
            .lines()
            .map(|line| serde_json::from_str(line).expect("every line is JSON"))
            .collect();
        assert!(lines.iter().all(|line| line["type"].is_string()));
        assert_eq!(lines.last().unwrap()["type"], "end_of_execution");
        lines
    }

    async fn bash(&self, code: &str) -> Vec<Value> {
        self.run(json!({"code": code, "language": "bash"})).await
    }

    async fn context(&self) -> String {
        let (status, body) = self
            .call("POST", "/contexts", json!({"language": "bash"}))
            .await;
        assert_eq!(status, 200, "{body}");
        let context: Value = serde_json::from_str(&body).unwrap();
        context["id"].as_str().unwrap().to_owned()
    }
}

fn text(lines: &[Value], kind: &str) -> String {
    lines
        .iter()
        .filter(|line| line["type"] == kind)
        .map(|line| line["text"].as_str().unwrap())
        .collect()
}

fn error(lines: &[Value]) -> Option<(&str, &str)> {
    let error = lines.iter().find(|line| line["type"] == "error")?;
    assert!(error["traceback"].is_string());
    Some((error["name"].as_str()?, error["value"].as_str()?))
}

/// What arrives until the text has.
async fn read_until(response: &mut http::Response<hyper::body::Incoming>, text: &str) -> String {
    let mut read = String::new();
    while !read.contains(text) {
        let frame = tokio::time::timeout(PATIENCE, response.body_mut().frame()).await;
        let frame = frame.expect("more comes").expect("more comes").unwrap();
        read += std::str::from_utf8(&frame.into_data().unwrap()).unwrap();
    }
    read
}

#[tokio::test]
async fn state_is_kept_and_the_streams_are_told_apart() {
    // R-P4
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    let first = interpreter.bash("x=5; cd /; echo out; echo err >&2").await;
    assert_eq!(first[0]["type"], "number_of_executions");
    assert_eq!(first[0]["execution_count"], 1);
    assert_eq!(text(&first, "stdout"), "out\n");
    assert_eq!(text(&first, "stderr"), "err\n");
    assert_eq!(error(&first), None);
    let printed = first.iter().find(|line| line["type"] == "stdout").unwrap();
    assert!(printed["timestamp"].as_str().unwrap().contains('T'));
    let second = interpreter.bash("echo $x $PWD; id -u").await;
    let user = support::USER_ID;
    assert_eq!(text(&second, "stdout"), format!("5 /\n{user}\n"));
    assert_eq!(second[0]["execution_count"], 2);
}

#[tokio::test]
async fn a_failure_is_told_and_the_next_execution_works() {
    // BC-033
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    for (code, value) in [
        ("false", "exit status 1"),
        ("if then", "exit status 2"),
        ("(exit 7)", "exit status 7"),
        ("exit 3", "exit status 3"),
        ("kill -9 $$", "KernelDied"),
    ] {
        let lines = interpreter.bash(code).await;
        let (name, told) = error(&lines).expect(code);
        assert!(name == value || told == value, "{code}: {name}: {told}");
        assert_eq!(text(&interpreter.bash("echo ok").await, "stdout"), "ok\n");
    }
}

#[tokio::test]
async fn a_call_that_reads_its_input_finds_it_empty() {
    // BC-041
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    let started = Instant::now();
    let lines = interpreter.bash("cat; read -r a; echo \"[$a]\"").await;
    assert_eq!(text(&lines, "stdout"), "[]\n");
    assert!(started.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn variables_of_a_call_are_gone_after_it() {
    let agent = Agent::start_without_life(json!({})).await;
    let begin = json!({"accessToken": "a", "envVars": {"KEPT": "k", "CHANGED": "sandbox"}});
    assert_eq!(agent.init(begin).await.status, 204);
    let interpreter = Interpreter::of(&agent);
    let value = "it's \"$(id)\"\nnew line";
    let show = "printf '%s|%s|%s' \"$KEPT\" \"$CHANGED\" \"$ONLY\"";
    let during = interpreter
        .run(json!({
            "code": show, "language": "bash", "context_id": null,
            "env_vars": {"CHANGED": "call", "ONLY": value},
        }))
        .await;
    assert_eq!(text(&during, "stdout"), format!("k|call|{value}"));
    let after = interpreter.bash(show).await;
    assert_eq!(text(&after, "stdout"), "k|sandbox|");
    // A new life brings new variables to a kernel that runs already.
    let begin = json!({"accessToken": "a", "envVars": {"CHANGED": "next"}});
    assert_eq!(agent.init(begin).await.status, 204);
    // It also ends the connections of the earlier one.
    let interpreter = Interpreter::of(&agent);
    assert_eq!(text(&interpreter.bash(show).await, "stdout"), "|next|");
}

#[tokio::test]
async fn two_executions_of_one_context_take_turns() {
    // BC-045
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    let a = interpreter.bash("for i in {1..20}; do echo A; sleep 0.01; done");
    let b = interpreter.bash("for i in {1..20}; do echo B; sleep 0.01; done");
    let (a, b) = tokio::join!(a, b);
    assert_eq!(text(&a, "stdout"), "A\n".repeat(20));
    assert_eq!(text(&b, "stdout"), "B\n".repeat(20));
    let count = |lines: &[Value]| lines[0]["execution_count"].as_u64().unwrap();
    assert_eq!(count(&a).abs_diff(count(&b)), 1);
}

#[tokio::test]
async fn contexts_are_made_listed_and_removed() {
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    let (status, body) = interpreter
        .call(
            "POST",
            "/contexts",
            json!({"language": "bash", "cwd": "/usr"}),
        )
        .await;
    assert_eq!(status, 200);
    let context: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(context["language"], "bash");
    assert_eq!(context["cwd"], "/usr");
    let id = context["id"].as_str().unwrap();
    let lines = interpreter
        .run(json!({"code": "pwd", "context_id": id}))
        .await;
    assert_eq!(text(&lines, "stdout"), "/usr\n");
    let (_, listed) = interpreter.call("GET", "/contexts", json!({})).await;
    assert_eq!(
        serde_json::from_str::<Value>(&listed).unwrap(),
        json!([context])
    );
    let path = format!("/contexts/{id}");
    assert_eq!(interpreter.call("DELETE", &path, json!({})).await.0, 204);
    let (status, body) = interpreter
        .call("POST", "/execute", json!({"code": "1", "context_id": id}))
        .await;
    assert_eq!((status, body), (404, format!("Context {id} not found")));
    assert_eq!(interpreter.call("DELETE", &path, json!({})).await.0, 404);
}

#[tokio::test]
async fn requests_that_cannot_be_met_are_refused_with_a_code() {
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    for (path, body, code) in [
        ("/execute", json!({}), "invalid_request"),
        (
            "/execute",
            json!({"code": "", "language": "bash", "context_id": "x"}),
            "invalid_request",
        ),
        (
            "/execute",
            json!({"code": "", "language": "bash", "env_vars": {"A=B": "c"}}),
            "invalid_request",
        ),
        (
            "/execute",
            json!({"code": "", "language": "cobol"}),
            "unsupported_language",
        ),
        (
            "/execute",
            json!({"code": "", "language": "x".repeat(10_000)}),
            "unsupported_language",
        ),
        (
            "/contexts",
            json!({"language": "bash", "cwd": "/nonexistent"}),
            "invalid_directory",
        ),
    ] {
        let (status, answer) = interpreter.call("POST", path, body).await;
        assert_eq!(status, 400, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["error_code"], code);
        assert!(answer["message"].as_str().unwrap().len() < 500);
    }
}

#[tokio::test]
async fn contexts_have_a_limit_and_give_everything_back() {
    // BC-044
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    let mut ids = Vec::new();
    for _ in 0..16 {
        ids.push(interpreter.context().await);
    }
    let (status, answer) = interpreter
        .call("POST", "/contexts", json!({"language": "bash"}))
        .await;
    assert_eq!(status, 429);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["error_code"], "context_limit");
    let started = Instant::now();
    assert_eq!(interpreter.call("GET", "/health", json!({})).await.1, "OK");
    assert!(started.elapsed() < Duration::from_secs(1));
    for id in ids {
        let path = format!("/contexts/{id}");
        assert_eq!(interpreter.call("DELETE", &path, json!({})).await.0, 204);
    }
    let children = format!("/proc/{0}/task/{0}/children", agent.pid());
    assert_eq!(std::fs::read_to_string(children).unwrap(), "");
}

#[tokio::test]
async fn a_restart_ends_the_execution_and_clears_the_state() {
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    let id = interpreter.context().await;
    let request = json!({"code": "x=1; echo on; sleep 60", "context_id": id});
    let mut response = interpreter.open("POST", "/execute", &request).await;
    let mut answer = read_until(&mut response, "\"on\\n\"").await;
    let path = format!("/contexts/{id}/restart");
    assert_eq!(interpreter.call("POST", &path, json!({})).await.0, 200);
    answer += &read_until(&mut response, "end_of_execution").await;
    let lines: Vec<Value> = answer
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        error(&lines),
        Some(("ContextRestarting", "Context was restarted"))
    );
    let lines = interpreter
        .run(json!({"code": "echo \"[$x]\"", "context_id": id}))
        .await;
    assert_eq!(text(&lines, "stdout"), "[]\n");
    assert_eq!(text(&lines, "stderr"), "");
}

#[tokio::test]
async fn a_client_that_hangs_up_interrupts_its_execution_only() {
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    interpreter.bash("kept=1").await;
    let request = json!({"code": "echo on; while :; do :; done", "language": "bash"});
    let mut response = interpreter.open("POST", "/execute", &request).await;
    read_until(&mut response, "\"on\\n\"").await;
    drop(response);
    // A client of its own, so that the connection of the first is closed.
    let next = Interpreter::of(&agent);
    let started = Instant::now();
    let lines = next.bash("echo $kept").await;
    assert_eq!(text(&lines, "stdout"), "1\n");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn giant_output_neither_breaks_a_line_nor_the_next_execution() {
    // BC-048
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    let lines = interpreter
        .bash("head -c 20000000 /dev/zero | tr '\\0' z")
        .await;
    assert_eq!(text(&lines, "stdout").len(), 20_000_000);
    assert_eq!(text(&interpreter.bash("echo ok").await, "stdout"), "ok\n");
}

#[tokio::test]
async fn copies_do_not_share_the_shells_random_numbers() {
    // R-T6
    let agent = Agent::start().await;
    let interpreter = Interpreter::of(&agent);
    interpreter.bash("RANDOM=42").await;
    let expected = text(&interpreter.bash("echo $RANDOM $RANDOM").await, "stdout");
    interpreter.bash("RANDOM=42").await;
    let begin = json!({"accessToken": support::ACCESS_TOKEN, "entropy": "bmV3"});
    assert_eq!(agent.init(begin).await.status, 204);
    // A new life ends the connections of the earlier one.
    let interpreter = Interpreter::of(&agent);
    let drawn = text(&interpreter.bash("echo $RANDOM $RANDOM").await, "stdout");
    assert_ne!(drawn, expected);
}
