//! Starts the real agent on free ports, in a directory of its own, and speaks to it as clients
//! do: raw HTTP and raw Connect. Tests run as root, as the agent does.

#![allow(dead_code, unreachable_pub, missing_debug_implementations)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use sandhold_agent_proto::frame::{FLAG_END_STREAM, FrameReader, encode};
use serde_json::{Value, json};
use tempfile::TempDir;

pub const ACCESS_TOKEN: &str = "access-token-of-the-test";
pub const CONTROL_TOKEN: &str = "control-token-of-the-test";
/// The sandbox's ordinary user in tests.
pub const USER: &str = "sbuser";
pub const USER_ID: u32 = 61_234;
/// No wait in a test is longer.
pub const PATIENCE: Duration = Duration::from_secs(20);

type TestBody = BoxBody<Bytes, std::io::Error>;

pub struct Agent {
    process: Child,
    pub port: u16,
    pub interpreter_port: u16,
    pub dir: TempDir,
    client: Client<HttpConnector, TestBody>,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("not JSON: {:?}", String::from_utf8_lossy(&self.body)))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

impl Agent {
    /// An agent whose first life has begun.
    pub async fn start() -> Self {
        let agent = Self::start_without_life(json!({})).await;
        let answer = agent.init(json!({ "accessToken": ACCESS_TOKEN })).await;
        assert_eq!(answer.status, 204, "{:?}", answer.body);
        agent
    }

    /// An agent before its first `/init`.
    pub async fn start_without_life(more: Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let etc = dir.path().join("etc");
        let home = dir.path().join("home");
        std::fs::create_dir_all(&etc).unwrap();
        std::fs::create_dir_all(&home).unwrap();
        std::os::unix::fs::chown(&home, Some(USER_ID), Some(USER_ID)).unwrap();
        let home_text = home.display();
        std::fs::write(
            etc.join("passwd"),
            format!(
                "root:x:0:0::/root:/bin/bash\n{USER}:x:{USER_ID}:{USER_ID}::{home_text}:/bin/bash\n"
            ),
        )
        .unwrap();
        let group = format!("root:x:0:\n{USER}:x:{USER_ID}:\nextra:x:61300:{USER}\n");
        std::fs::write(etc.join("group"), group).unwrap();

        let mut config = json!({
            "bindAddress": "127.0.0.1", "envdPort": 0, "interpreterPort": 0,
            "etcDir": etc, "systemIdentity": false, "defaultUser": USER,
            "runtimeDirectory": dir.path().join("run"),
        });
        for (name, value) in more.as_object().unwrap() {
            config[name] = value.clone();
        }
        let config_path = dir.path().join("agent.json");
        std::fs::write(&config_path, config.to_string()).unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_sandhold-agent"))
            .arg(&config_path)
            .env("SANDHOLD_CONTROL_TOKEN", CONTROL_TOKEN)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let ports: Vec<u16> = line
            .split_whitespace()
            .filter_map(|word| word.rsplit_once(':')?.1.parse().ok())
            .collect();
        Self {
            process,
            port: ports[0],
            interpreter_port: ports[1],
            dir,
            client: Client::builder(TokioExecutor::new()).build_http(),
        }
    }

    pub fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub async fn init(&self, body: Value) -> Answer {
        let headers = [("x-sandhold-control", CONTROL_TOKEN)];
        self.send(Method::POST, "/init", &headers, body.to_string())
            .await
    }

    /// A request with exactly these headers.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let body = Full::new(body.into())
            .map_err(|never| match never {})
            .boxed();
        self.send_body(method, path, headers, body).await
    }

    pub async fn send_body(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: TestBody,
    ) -> Answer {
        let response = self.open(method, path, headers, body).await;
        let (parts, body) = response.into_parts();
        let body = tokio::time::timeout(PATIENCE, body.collect())
            .await
            .expect("the body ends")
            .expect("the body is whole")
            .to_bytes();
        Answer {
            status: parts.status,
            headers: parts.headers,
            body,
        }
    }

    pub async fn open(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: TestBody,
    ) -> http::Response<Incoming> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://127.0.0.1:{}{path}", self.port));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = self.client.request(request.body(body).unwrap());
        tokio::time::timeout(PATIENCE, answer)
            .await
            .expect("an answer comes")
            .expect("the connection holds")
    }

    /// A request with the access token.
    pub async fn call(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Answer {
        self.send(method, path, &[("x-access-token", ACCESS_TOKEN)], body)
            .await
    }

    pub async fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        let mut all = vec![("x-access-token", ACCESS_TOKEN)];
        all.extend_from_slice(headers);
        self.send(Method::GET, path, &all, "").await
    }

    pub async fn put(&self, path: &str, contents: impl Into<Bytes>) -> Answer {
        let headers = [
            ("x-access-token", ACCESS_TOKEN),
            ("content-type", "application/octet-stream"),
        ];
        self.send(Method::POST, &files(path), &headers, contents)
            .await
    }

    /// A unary call in JSON.
    pub async fn unary(&self, method: &str, body: Value) -> Answer {
        self.unary_as(method, body, None).await
    }

    pub async fn unary_as(&self, method: &str, body: Value, user: Option<&str>) -> Answer {
        let basic = user.map(basic);
        let mut headers = vec![
            ("x-access-token", ACCESS_TOKEN),
            ("content-type", "application/json"),
        ];
        if let Some(basic) = &basic {
            headers.push(("authorization", basic));
        }
        self.send(Method::POST, method, &headers, body.to_string())
            .await
    }

    /// A server stream in JSON.
    pub async fn stream(&self, method: &str, body: Value, headers: &[(&str, &str)]) -> Events {
        let mut all = vec![
            ("x-access-token", ACCESS_TOKEN),
            ("content-type", "application/connect+json"),
        ];
        all.extend_from_slice(headers);
        let body = Bytes::from(encode(0, body.to_string().as_bytes()).unwrap());
        let body = Full::new(body).map_err(|never| match never {}).boxed();
        let response = self.open(Method::POST, method, &all, body).await;
        assert_eq!(response.status(), 200);
        Events {
            body: response.into_body(),
            frames: FrameReader::new(64 << 20),
            ended: false,
        }
    }

    pub async fn start_process(&self, process: Value, headers: &[(&str, &str)]) -> Events {
        self.stream("/process.Process/Start", process, headers)
            .await
    }

    /// A shell command without input, as the SDKs run it.
    pub async fn shell(&self, command: &str) -> Finished {
        self.shell_events(command, &[]).await.finish().await
    }

    pub async fn shell_events(&self, command: &str, headers: &[(&str, &str)]) -> Events {
        let process = json!({ "cmd": "/bin/bash", "args": ["-c", command] });
        self.start_process(json!({ "process": process, "stdin": false }), headers)
            .await
    }

    pub fn resident_bytes(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.pid())).unwrap();
        let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
        pages * 4096
    }

    pub fn open_descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .count()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The agent stays until all its descendants are gone, so that it reaps them.
        for pid in descendants(self.process.id()) {
            kill(pid);
        }
        kill(self.process.id());
        let _ = self.process.wait();
    }
}

fn kill(pid: u32) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid.cast_signed()) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Pid, parent and state of every process.
fn processes() -> Vec<(u32, u32, char)> {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(|pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
            let state = fields.next()?.chars().next()?;
            Some((pid, fields.next()?.parse().ok()?, state))
        })
        .collect()
}

pub fn descendants(root: u32) -> Vec<u32> {
    let all = processes();
    let mut found = vec![root];
    let mut index = 0;
    while index < found.len() {
        let parent = found[index];
        found.extend(all.iter().filter(|one| one.1 == parent).map(|one| one.0));
        index += 1;
    }
    found.split_off(1)
}

pub fn zombies_of(parent: u32) -> usize {
    let is_zombie = |one: &&(u32, u32, char)| one.1 == parent && one.2 == 'Z';
    processes().iter().filter(is_zombie).count()
}

/// The events of a stream.
pub struct Events {
    body: Incoming,
    frames: FrameReader,
    ended: bool,
}

/// How a process went.
#[derive(Debug, Default)]
pub struct Finished {
    pub pid: u32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub pty: Vec<u8>,
    /// Absent if the stream ended without an end event.
    pub exit_code: Option<i64>,
    pub end: Value,
    /// The last frame: `{}` or an error.
    pub trailer: Value,
}

impl Finished {
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl Events {
    /// The next message; after the last one `Err` with the end-of-stream frame.
    pub async fn next(&mut self) -> Result<Value, Value> {
        assert!(!self.ended, "the stream is over");
        loop {
            if let Some(frame) = self.frames.next_frame().unwrap() {
                let value: Value = serde_json::from_slice(&frame.payload).unwrap();
                if frame.flags & FLAG_END_STREAM != 0 {
                    self.ended = true;
                    return Err(value);
                }
                return Ok(value);
            }
            let frame = tokio::time::timeout(PATIENCE, self.body.frame())
                .await
                .expect("something comes")
                .expect("the stream ends with its last frame")
                .expect("the connection holds");
            if let Ok(data) = frame.into_data() {
                self.frames.push(&data);
            }
        }
    }

    /// Waits for the end of the connection; whether it broke off before the last frame.
    pub async fn breaks_off(mut self) -> bool {
        loop {
            let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await;
            match frame.expect("something comes") {
                Some(Ok(_)) => {}
                ended => return ended.is_some(),
            }
        }
    }

    pub async fn pid(&mut self) -> u32 {
        let event = self.next().await.expect("a start event");
        let pid = &event["event"]["start"]["pid"];
        u32::try_from(pid.as_u64().expect("the first event is start")).unwrap()
    }

    /// Reads on until the output so far satisfies the condition.
    pub async fn read_until(&mut self, condition: impl Fn(&Finished) -> bool) -> Finished {
        let mut seen = Finished::default();
        while !condition(&seen) {
            // A little less patience than `next` has, to say what there was.
            let event = tokio::time::timeout(PATIENCE / 2, self.next()).await;
            let event = event.unwrap_or_else(|_| panic!("nothing more after {seen:?}"));
            seen.add(&event.expect("more output")["event"]);
        }
        seen
    }

    pub async fn finish(mut self) -> Finished {
        let mut seen = Finished::default();
        loop {
            match self.next().await {
                Ok(event) => seen.add(&event["event"]),
                Err(trailer) => {
                    seen.trailer = trailer;
                    return seen;
                }
            }
        }
    }
}

impl Finished {
    fn add(&mut self, event: &Value) {
        if let Some(pid) = event["start"]["pid"].as_u64() {
            self.pid = u32::try_from(pid).unwrap();
        }
        let data = &event["data"];
        for (name, buffer) in [
            ("stdout", &mut self.stdout),
            ("stderr", &mut self.stderr),
            ("pty", &mut self.pty),
        ] {
            if let Some(text) = data[name].as_str() {
                buffer.extend(STANDARD.decode(text).unwrap());
            }
        }
        if event["end"].is_object() {
            self.end = event["end"].clone();
            self.exit_code = Some(event["end"]["exitCode"].as_i64().unwrap_or(0));
        }
    }
}

pub fn basic(user: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:")))
}

/// The route of a file.
pub fn files(path: &str) -> String {
    let query = form_urlencoded::Serializer::new(String::new())
        .append_pair("path", path)
        .finish();
    format!("/files?{query}")
}

pub fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Waits until the condition holds.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub fn owner_of(path: &Path) -> u32 {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::symlink_metadata(path).unwrap().uid()
}

pub fn mode_of(path: &Path) -> u32 {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(path).unwrap().mode() & 0o7777
}
