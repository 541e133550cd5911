//! The commands against a server that is played here.

use std::{
    convert::Infallible,
    io::{self, Write},
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, Mutex},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::{Bytes, BytesMut};
use clap::Parser;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::mpsc};

use super::{
    Command,
    connect::enveloped,
    exec, files, governor, key,
    output::{Form, Output},
    run, run_code, sandbox, template,
};

const ID: &str = "abcdefghij0123456789";

/// A request as the server saw it.
#[derive(Debug, Clone)]
struct Seen {
    method: String,
    path: String,
    host: String,
    key: String,
    token: String,
    body: Bytes,
}

impl Seen {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The one message of a request in Connect's framing.
    fn message(&self) -> Value {
        serde_json::from_slice(&self.body[5..]).unwrap()
    }
}

type Handler = dyn Fn(&Seen) -> (u16, Vec<u8>) + Send + Sync;

struct Fake {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Fake {
    async fn start(handler: impl Fn(&Seen) -> (u16, Vec<u8>) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let handler: Arc<Handler> = Arc::new(handler);
        let log = Arc::clone(&seen);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (handler, log) = (Arc::clone(&handler), Arc::clone(&log));
                tokio::spawn(async move {
                    let service = service_fn(move |request: Request<Incoming>| {
                        answer(request, Arc::clone(&handler), Arc::clone(&log))
                    });
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self { address, seen }
    }

    fn seen(&self, path: &str) -> Vec<Seen> {
        let seen = self.seen.lock().unwrap();
        seen.iter()
            .filter(|seen| seen.path == path)
            .cloned()
            .collect()
    }

    fn command(&self, line: &[&str]) -> Command {
        let url = format!("http://{}", self.address);
        let mut all = vec!["sandhold", line[0], line[1]];
        // Before what may be the arguments of another program.
        if line[1] == "files" {
            all.push(line[2]);
        }
        let rest = all.len() - 1;
        all.extend(["--url", &url, "--api-key", "e2b_test"]);
        all.extend(&line[rest..]);
        parse(&all)
    }
}

async fn answer(
    request: Request<Incoming>,
    handler: Arc<Handler>,
    log: Arc<Mutex<Vec<Seen>>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let header = |name: &str| {
        let value = head.headers.get(name);
        value.map_or("", |value| value.to_str().unwrap()).to_owned()
    };
    let seen = Seen {
        method: head.method.to_string(),
        path: head.uri.to_string(),
        host: header("host"),
        key: header("x-api-key"),
        token: header("x-access-token"),
        body: body.collect().await.unwrap().to_bytes(),
    };
    let (status, body) = handler(&seen);
    log.lock().unwrap().push(seen);
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    Ok(response)
}

#[derive(Debug, Parser)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

fn parse(line: &[&str]) -> Command {
    Line::try_parse_from(line).unwrap().command
}

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Written {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

/// What a command printed and how it ended.
struct Ran {
    out: String,
    err: String,
    result: anyhow::Result<ExitCode>,
}

impl Ran {
    fn failure(&self) -> String {
        format!("{:#}", self.result.as_ref().unwrap_err())
    }
}

async fn ran(command: &Command, form: Form) -> Ran {
    ran_with_input(command, form, &[]).await
}

async fn ran_with_input(command: &Command, form: Form, input: &[&'static str]) -> Ran {
    let (out, err) = (Written::default(), Written::default());
    let mut output = Output::new(Box::new(out.clone()), Box::new(err.clone()), form);
    let chunks = input.to_vec();
    let input = move || {
        let (sender, receiver) = mpsc::channel(16);
        for chunk in chunks {
            sender
                .try_send(Bytes::from_static(chunk.as_bytes()))
                .unwrap();
        }
        receiver
    };
    let done = |result: anyhow::Result<()>| result.map(|()| ExitCode::SUCCESS);
    let result = match command {
        Command::Sandbox(sandbox::Command::Exec(args)) => exec::execute(args, &mut output, input)
            .await
            .map(ExitCode::from),
        Command::Sandbox(sandbox::Command::Run(args)) => run_code::execute(args, &mut output).await,
        Command::Sandbox(sandbox::Command::Files(command)) => {
            done(files::execute(command, &mut output).await)
        }
        Command::Sandbox(command) => sandbox::execute(command, &mut output).await,
        Command::Key(command) => done(key::execute(command, &mut output).await),
        Command::Run(args) => run::execute(args, &mut output).await.map(ExitCode::from),
        Command::Why(command) => done(governor::explain(command, &mut output).await),
        Command::Lease(command) => done(governor::execute_lease(command, &mut output).await),
        Command::Gc(command) => done(governor::execute_gc(command, &mut output).await),
        Command::Template(command) => done(template::execute(command, &mut output).await),
    };
    Ran {
        out: out.text(),
        err: err.text(),
        result,
    }
}

fn text(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn detail() -> (u16, Vec<u8>) {
    let detail = json!({
        "sandboxID": ID,
        "envdAccessToken": "opens-the-agent",
        "domain": "sandboxes.test",
        "network": { "allowPublicTraffic": true },
    });
    (200, text(&detail))
}

/// The stream of a process that writes to both outputs and ends with `code`.
fn process_stream(code: i64) -> Vec<u8> {
    let data =
        |stream: &str, bytes: &str| json!({"event": {"data": {stream: STANDARD.encode(bytes)}}});
    let mut stream = BytesMut::new();
    for message in [
        json!({"event": {"start": {"pid": 42}}}),
        data("stdout", "a  b\n"),
        json!({"event": {"keepalive": {}}}),
        data("stderr", "careful\n"),
        json!({"event": {"end": {"exitCode": code, "exited": true, "status": "exit status"}}}),
    ] {
        stream.extend_from_slice(&enveloped(&message));
    }
    stream.extend_from_slice(&[2, 0, 0, 0, 2, b'{', b'}']);
    stream.to_vec()
}

#[tokio::test]
async fn a_program_gets_its_arguments_as_they_are_and_its_status_comes_back() {
    // BC-020
    let fake = Fake::start(|seen| match seen.path.as_str() {
        "/process.Process/Start" => (200, process_stream(7)),
        _ => detail(),
    })
    .await;
    let argument = "print(\"a  b\")";
    let line = [
        "sandbox",
        "exec",
        "-e",
        "K=v w",
        ID,
        "--",
        "/opt/my tools/py",
        "-c",
        argument,
    ];
    let ran = ran(&fake.command(&line), Form::Plain).await;
    assert_eq!(ran.out, "a  b\n");
    assert_eq!(ran.err, "careful\n");
    assert_eq!(ran.result.unwrap(), ExitCode::from(7));
    let start = &fake.seen("/process.Process/Start")[0];
    let process = &start.message()["process"];
    assert_eq!(process["cmd"], "/opt/my tools/py");
    assert_eq!(process["args"], json!(["-c", argument]));
    assert_eq!(process["envs"], json!({"K": "v w"}));
    assert_eq!(start.token, "opens-the-agent");
    assert_eq!(start.key, "", "the key stays out of the sandbox");
    assert_eq!(start.host, format!("49983-{ID}.sandboxes.test"));
}

#[tokio::test]
async fn standard_input_is_forwarded_in_order_and_closed() {
    let closed = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&closed);
    // The process has ended already when its input arrives; that is sent all the same.
    let fake = Fake::start(move |seen| match seen.path.as_str() {
        "/process.Process/Start" => (200, process_stream(0)),
        "/process.Process/SendInput" | "/process.Process/CloseStdin" => {
            log.lock().unwrap().push(seen.json());
            (200, b"{}".to_vec())
        }
        _ => detail(),
    })
    .await;
    let command = fake.command(&["sandbox", "exec", ID, "--", "cat"]);
    ran_with_input(&command, Form::Plain, &["one", "two"]).await;
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(20);
    while closed.lock().unwrap().len() < 3 {
        assert!(
            tokio::time::Instant::now() < deadline,
            "the input never came"
        );
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let input =
        |text: &str| json!({"process": {"pid": 42}, "input": {"stdin": STANDARD.encode(text)}});
    let expected = [input("one"), input("two"), json!({"process": {"pid": 42}})];
    assert_eq!(*closed.lock().unwrap(), expected);
}

#[tokio::test]
async fn a_program_that_is_not_there_is_told_with_what_to_do() {
    let fake = Fake::start(|seen| match seen.path.as_str() {
        "/process.Process/Start" => {
            let error = br#"{"error":{"code":"not_found","message":"no such file: nosuch"}}"#;
            let mut stream = vec![2, 0, 0, 0, u8::try_from(error.len()).unwrap()];
            stream.extend(error);
            (200, stream)
        }
        _ => detail(),
    })
    .await;
    let command = fake.command(&["sandbox", "exec", ID, "--", "nosuch"]);
    let failure = ran(&command, Form::Plain).await.failure();
    assert!(
        failure.contains("nosuch") && failure.contains("installed"),
        "{failure}"
    );
}

#[tokio::test]
async fn code_runs_and_rich_results_are_told_and_kept() {
    let lines = [
        json!({"type": "stdout", "text": "hello\n", "timestamp": 1}),
        json!({"type": "result", "text": "42", "is_main_result": true,
            "png": STANDARD.encode("picture"), "chart": {"type": "bar"}}),
        json!({"type": "end_of_execution"}),
    ];
    let body: Vec<u8> = lines
        .iter()
        .flat_map(|line| format!("{line}\n").into_bytes())
        .collect();
    let fake = Fake::start(move |seen| match seen.path.as_str() {
        "/execute" => (200, body.clone()),
        _ => detail(),
    })
    .await;
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let command = fake.command(&["sandbox", "run", "--save", place, ID, "6 * 7"]);
    let ran = ran(&command, Form::Plain).await;
    assert_eq!(ran.out, "hello\n42\n");
    assert!(
        ran.err.contains("png") && ran.err.contains("bar chart"),
        "{}",
        ran.err
    );
    let saved = std::fs::read(directory.path().join("result-1.png")).unwrap();
    assert_eq!(saved, b"picture");
    let sent = &fake.seen("/execute")[0];
    assert_eq!(sent.json()["code"], "6 * 7");
    assert_eq!(sent.host, format!("49999-{ID}.sandboxes.test"));
}

#[tokio::test]
async fn code_that_raises_fails_with_its_traceback() {
    let error = json!({"type": "error", "name": "ValueError", "value": "no", "traceback": "Trace"});
    let fake = Fake::start(move |seen| match seen.path.as_str() {
        "/execute" => (200, text(&error)),
        _ => detail(),
    })
    .await;
    let ran = ran(&fake.command(&["sandbox", "run", ID, "x"]), Form::Plain).await;
    assert_eq!(ran.result.unwrap(), ExitCode::FAILURE);
    assert_eq!(ran.err, "Trace\n");
}

#[tokio::test]
async fn lists_are_tables_for_people_lines_for_pipes_and_json_for_programs() {
    let sandbox = json!({
        "sandboxID": ID, "templateID": "base", "state": "running", "cpuCount": 2,
        "memoryMB": 1024, "startedAt": "2020-01-01T00:00:00Z",
        "endAt": "9999-01-01T00:00:00Z", "metadata": {"owner": "me"},
    });
    let list = text(&json!([sandbox]));
    let fake = Fake::start(move |_| (200, list.clone())).await;
    let command = fake.command(&["sandbox", "ls"]);
    let table = ran(&command, Form::Terminal).await.out;
    assert!(
        table.contains("TEMPLATE") && table.contains(ID) && table.contains("never"),
        "{table}"
    );
    let line = ran(&command, Form::Plain).await.out;
    assert!(
        line.starts_with(&format!("{ID}\tbase\trunning\t")),
        "{line}"
    );
    let parsed: Value = serde_json::from_str(&ran(&command, Form::Json).await.out).unwrap();
    assert_eq!(parsed, json!([sandbox]));
    let all = fake.seen("/v2/sandboxes?limit=100");
    assert_eq!(all.len(), 3);
    let command = fake.command(&["sandbox", "ls", "--metadata", "k=v w&"]);
    ran(&command, Form::Plain).await.result.unwrap();
    // Decoded as often as SDKs encode it (wire contract 1.3).
    let filtered = "/v2/sandboxes?limit=100&metadata=k%3Dv%252520w%252526";
    assert_eq!(fake.seen(filtered).len(), 1);
}

#[tokio::test]
async fn kill_all_ends_everything_and_says_so() {
    let list = text(&json!([{"sandboxID": ID}, {"sandboxID": "gone"}]));
    let fake = Fake::start(
        move |seen| match (seen.method.as_str(), seen.path.as_str()) {
            ("GET", _) => (200, list.clone()),
            ("DELETE", path) if path.ends_with(ID) => (204, Vec::new()),
            _ => (
                404,
                text(&json!({"message": "no", "error_code": "sandbox_not_found"})),
            ),
        },
    )
    .await;
    let command = fake.command(&["sandbox", "kill", "--all", "--yes"]);
    let killed = ran(&command, Form::Plain).await;
    assert_eq!(killed.result.unwrap(), ExitCode::SUCCESS);
    assert_eq!(killed.out, format!("{ID} has ended; its files are gone\n"));
    let command = fake.command(&["sandbox", "kill", "gone"]);
    let missing = ran(&command, Form::Plain).await;
    assert_eq!(missing.result.unwrap(), ExitCode::FAILURE);
    assert!(missing.err.contains("sandbox ls"), "{}", missing.err);
}

#[tokio::test]
async fn directories_are_deleted_only_when_told_so() {
    let entry = json!({"entry": {"type": "FILE_TYPE_DIRECTORY", "path": "/home/user/d"}});
    let fake = Fake::start(move |seen| match seen.path.as_str() {
        "/filesystem.Filesystem/Stat" => (200, text(&entry)),
        "/filesystem.Filesystem/Remove" => (200, b"{}".to_vec()),
        _ => detail(),
    })
    .await;
    let command = fake.command(&["sandbox", "files", "rm", ID, "d"]);
    assert!(
        ran(&command, Form::Plain)
            .await
            .failure()
            .contains("--recursive")
    );
    assert!(fake.seen("/filesystem.Filesystem/Remove").is_empty());
    let command = fake.command(&["sandbox", "files", "rm", "-r", ID, "d"]);
    let told = ran(&command, Form::Plain).await.err;
    assert!(told.contains("/home/user/d and everything in it"), "{told}");
}

#[tokio::test]
async fn files_go_in_and_come_out_unchanged() {
    let content: Vec<u8> = (0..=255u8).cycle().take(300_000).collect();
    let served = content.clone();
    let fake = Fake::start(
        move |seen| match (seen.method.as_str(), seen.path.as_str()) {
            ("GET", "/files?path=%2Ftmp%2Fa+b") => (200, served.clone()),
            ("POST", _) => (200, text(&json!([{"path": "/tmp/a b"}]))),
            _ => detail(),
        },
    )
    .await;
    let directory = tempfile::tempdir().unwrap();
    let local = directory.path().join("copy");
    let local_text = local.to_str().unwrap();
    let command = fake.command(&["sandbox", "files", "get", ID, "/tmp/a b", local_text]);
    ran(&command, Form::Plain).await.result.unwrap();
    assert!(std::fs::read(&local).unwrap() == content);
    let command = fake.command(&["sandbox", "files", "put", ID, local_text, "/tmp/a b"]);
    ran(&command, Form::Plain).await.result.unwrap();
    assert!(fake.seen("/files?path=%2Ftmp%2Fa+b")[1].body == content);
}

#[tokio::test]
async fn errors_say_what_to_do() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let nobody = parse(&["sandhold", "key", "list", "--url", &url, "--api-key", "k"]);
    let failure = ran(&nobody, Form::Plain).await.failure();
    assert!(
        failure.contains("sandhold up") && failure.contains(&url),
        "{failure}"
    );

    let refusal = json!({"message": "no such key", "error_code": "unauthenticated"});
    let fake = Fake::start(move |_| (401, text(&refusal))).await;
    let failure = ran(&fake.command(&["key", "list"]), Form::Plain)
        .await
        .failure();
    assert!(
        failure.contains("no such key") && failure.contains("SANDHOLD_API_KEY"),
        "{failure}"
    );

    let tls = parse(&[
        "sandhold",
        "key",
        "list",
        "--url",
        "https://x",
        "--api-key",
        "k",
    ]);
    assert!(
        ran(&tls, Form::Plain)
            .await
            .failure()
            .contains("http://host:port")
    );
}

#[tokio::test]
async fn the_servers_own_key_is_found_in_its_data_directory() {
    let fake = Fake::start(|_| (200, text(&json!([])))).await;
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let url = format!("http://{}", fake.address);
    let line = [
        "sandhold",
        "template",
        "list",
        "--url",
        &url,
        "--data-dir",
        place,
    ];
    let command = parse(&line);
    let failure = ran(&command, Form::Plain).await.failure();
    assert!(failure.contains("default.key"), "{failure}");
    std::fs::write(directory.path().join("default.key"), "e2b_from_file\n").unwrap();
    ran(&command, Form::Plain).await.result.unwrap();
    assert_eq!(fake.seen("/templates")[0].key, "e2b_from_file");
}

#[tokio::test]
async fn a_new_key_is_printed_alone() {
    let made =
        json!({"id": "k2", "key": "e2b_new", "namespace": "a", "env": "dev", "role": "member"});
    let fake = Fake::start(move |_| (201, text(&made))).await;
    let made = ran(
        &fake.command(&["key", "create", "--name", "ci"]),
        Form::Plain,
    )
    .await;
    assert_eq!(made.out, "e2b_new\n");
    assert!(made.err.contains("not shown again"));
}

#[tokio::test]
async fn a_lease_is_asked_for_as_the_server_reads_it() {
    let lease = json!({
        "sandbox_id": ID, "lease_id": "l", "fence": 7, "reused": false, "expires_at": "later",
    });
    let fake = Fake::start(move |_| (201, text(&lease))).await;
    let command = [
        "lease", "take", "owner", "--lease", "l", "--ttl", "600", "--env", "prod",
    ];
    let taken = ran(&fake.command(&command), Form::Plain).await;
    assert_eq!(taken.out, format!("{ID}\n"), "only the result");
    assert!(taken.err.contains("fence 7"), "{}", taken.err);
    let seen = fake.seen("/v1/leases").remove(0).json();
    assert_eq!(seen["owner_id"], "owner");
    assert_eq!(
        (&seen["lease_id"], &seen["ttl_s"]),
        (&json!("l"), &json!(600))
    );
    assert_eq!(
        (&seen["env"], &seen["namespace"]),
        (&json!("prod"), &Value::Null)
    );
}

#[tokio::test]
async fn why_prints_what_the_server_says_and_a_plan_its_rows() {
    let fake = Fake::start(|seen| {
        let answer = if seen.path.ends_with("/verdict") {
            json!({ "colour": "black", "text": "it is black\n" })
        } else {
            json!({
                "work": [{ "action": "remove", "sandbox_id": ID, "because": "it is white" }],
                "alarms": [{ "kind": "settling", "message": "wait" }],
            })
        };
        (200, text(&answer))
    })
    .await;
    let why = ran(&fake.command(&["why", ID]), Form::Plain).await;
    assert_eq!(why.out, "it is black\n");
    let plan = ran(&fake.command(&["gc", "plan"]), Form::Plain).await;
    assert_eq!(plan.out, format!("remove\t{ID}\tit is white\n"));
    assert!(plan.err.contains("settling: wait"));
    let alarms = ran(&fake.command(&["gc", "alarms"]), Form::Plain).await;
    assert_eq!(alarms.out, "settling: wait\n");
}
