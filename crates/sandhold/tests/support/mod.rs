//! A real server for tests: started, asked, killed and counted from outside.

#![allow(dead_code, reason = "each test file uses its own part of it")]

pub(crate) mod governed;
pub(crate) mod proxy;

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

/// How long a server may take until it says that it is ready.
const READY_BUDGET: Duration = Duration::from_secs(60);
/// How long a single request may take.
const REQUEST_BUDGET: Duration = Duration::from_secs(60);

/// A data directory that outlives the servers that run on it, and is emptied of sandboxes at the
/// end of the test.
pub(crate) struct Site {
    directory: tempfile::TempDir,
}

/// A running server.
pub(crate) struct Server {
    process: Child,
    pub(crate) url: String,
    pub(crate) key: String,
    agent: ureq::Agent,
}

/// The most engine processes that a node may make ahead of time.
const BLANKS_MAX: usize = 12;

/// An HTTP answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

impl Site {
    pub(crate) fn new() -> Self {
        Self {
            directory: tempfile::Builder::new()
                .prefix("sandhold-test-")
                .tempdir()
                .unwrap(),
        }
    }

    /// A site on the file system of `parent`.
    pub(crate) fn within(parent: &Path) -> Self {
        Self {
            directory: tempfile::tempdir_in(parent).unwrap(),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Starts a server on this site and waits until it is ready.
    pub(crate) fn start(&self, arguments: &[&str]) -> Server {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path().join("server.log"))
            .unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_sandhold"))
            .args(["up", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(self.path())
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let url = wait_for_ready(&mut process, self.path());
        let key = fs::read_to_string(self.path().join("default.key"))
            .unwrap()
            .trim()
            .to_owned();
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(REQUEST_BUDGET))
            .build();
        Server {
            process,
            url,
            key,
            agent: config.into(),
        }
    }

    /// A server that does not start with these arguments, and what it says.
    pub(crate) fn refuses(&self, arguments: &[&str]) -> String {
        let ended = Command::new(env!("CARGO_BIN_EXE_sandhold"))
            .args(["up", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(self.path())
            .args(arguments)
            .output()
            .unwrap();
        assert!(!ended.status.success(), "it started and ended");
        String::from_utf8_lossy(&ended.stderr).into_owned()
    }

    /// The node's tag: part of the name of everything that it makes on the machine.
    pub(crate) fn tag(&self) -> String {
        let text = fs::read_to_string(self.path().join("node.json")).unwrap();
        let node: Value = serde_json::from_str(&text).unwrap();
        node["tag"].as_str().unwrap().to_owned()
    }

    /// The snapshots of which any file is there.
    pub(crate) fn snapshots_on_disk(&self) -> BTreeSet<String> {
        names(&self.path().join("snapshots"))
    }

    /// The sandboxes of which any trace is on the machine: directories, processes, cgroups,
    /// namespaces, mounts and interfaces.
    pub(crate) fn traces(&self) -> Traces {
        Traces::of(&self.tag(), &self.path().join("sandboxes"))
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(self.path().join("server.log")).unwrap_or_default();
            let from = log.len().saturating_sub(6000);
            eprintln!(
                "the end of the server's log:\n{}",
                log.get(from..).unwrap_or(&log)
            );
        }
        // A server that removes everything when it stops leaves the machine as it was.
        if self.path().join("default.key").exists() {
            self.start(&["--on-exit", "kill"]).stop();
        }
    }
}

fn wait_for_ready(process: &mut Child, directory: &Path) -> String {
    let stdout = process.stdout.take().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let begun = Instant::now();
    while begun.elapsed() < READY_BUDGET {
        match receiver.recv_timeout(READY_BUDGET - begun.elapsed()) {
            Ok(line) => {
                if let Some(url) = line.strip_prefix("ready ") {
                    return url.to_owned();
                }
            }
            Err(_) => break,
        }
    }
    let _ = process.kill();
    let log = fs::read_to_string(directory.join("server.log")).unwrap_or_default();
    panic!("the server did not become ready; its log:\n{log}");
}

impl Server {
    pub(crate) fn request(&self, method: &str, path: &str, body: Option<Value>) -> Option<Answer> {
        self.request_with(method, path, body, &[])
    }

    /// Sends a request; `None` when the server died before it answered.
    pub(crate) fn request_with(
        &self,
        method: &str,
        path: &str,
        body: Option<Value>,
        headers: &[(&str, &str)],
    ) -> Option<Answer> {
        let mut request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url))
            .header("x-api-key", &self.key)
            .header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let text = body.map(|body| body.to_string()).unwrap_or_default();
        let mut response = self.agent.run(request.body(text).unwrap()).ok()?;
        let status = response.status().as_u16();
        let text = response.body_mut().read_to_string().ok()?;
        Some(Answer {
            status,
            body: serde_json::from_str(&text).unwrap_or(Value::String(text)),
        })
    }

    /// Creates a sandbox of `base`; `None` when the server died first.
    pub(crate) fn create(&self) -> Option<String> {
        let body = serde_json::json!({"templateID": "base", "timeout": 3600});
        let answer = self.request("POST", "/v2/sandboxes", Some(body))?;
        assert_eq!(answer.status, 201, "{answer:?}");
        Some(answer.body["sandboxID"].as_str().unwrap().to_owned())
    }

    /// Deletes a sandbox; the status, or `None` when the server died first.
    pub(crate) fn delete(&self, id: &str) -> Option<u16> {
        self.request("DELETE", &format!("/sandboxes/{id}"), None)
            .map(|answer| answer.status)
    }

    /// Puts a sandbox to sleep; the status, or `None` when the server died first.
    pub(crate) fn pause(&self, id: &str) -> Option<u16> {
        self.request("POST", &format!("/sandboxes/{id}/pause"), None)
            .map(|answer| answer.status)
    }

    /// Wakes a sandbox if it sleeps; the status, or `None` when the server died first.
    pub(crate) fn connect(&self, id: &str) -> Option<u16> {
        let body = serde_json::json!({"timeout": 3600});
        self.request("POST", &format!("/v2/sandboxes/{id}/connect"), Some(body))
            .map(|answer| answer.status)
    }

    /// Takes a snapshot and returns its identifier; `None` when the server died first.
    pub(crate) fn snapshot(&self, id: &str) -> Option<String> {
        let answer = self.request("POST", &format!("/sandboxes/{id}/snapshots"), None)?;
        assert_eq!(answer.status, 201, "{answer:?}");
        Some(answer.body["snapshotID"].as_str().unwrap().to_owned())
    }

    /// Takes a sandbox back; the status, or `None` when the server died first.
    pub(crate) fn roll_back(&self, id: &str, snapshot: &str) -> Option<u16> {
        let body = serde_json::json!({"snapshotID": snapshot});
        self.request("POST", &format!("/sandboxes/{id}/rollback"), Some(body))
            .map(|answer| answer.status)
    }

    /// Copies a sandbox; the status, or `None` when the server died first.
    pub(crate) fn clones(&self, id: &str, count: usize) -> Option<u16> {
        let body = serde_json::json!({"count": count, "concurrency": 2});
        self.request("POST", &format!("/sandboxes/{id}/clones"), Some(body))
            .map(|answer| answer.status)
    }

    /// The identifiers of the snapshots that the server lists.
    pub(crate) fn snapshots(&self) -> BTreeSet<String> {
        let answer = self.request("GET", "/snapshots?limit=100", None).unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
        let items = answer.body.as_array().unwrap().clone();
        items
            .iter()
            .map(|item| item["snapshotID"].as_str().unwrap().to_owned())
            .collect()
    }

    /// What a client is told of the sandbox's state.
    pub(crate) fn state(&self, id: &str) -> String {
        let answer = self
            .request("GET", &format!("/sandboxes/{id}"), None)
            .unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.body["state"].as_str().unwrap().to_owned()
    }

    /// The identifiers that the server lists.
    pub(crate) fn list(&self) -> BTreeSet<String> {
        let answer = self
            .request("GET", "/v2/sandboxes?limit=100", None)
            .unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
        let items = answer.body.as_array().unwrap().clone();
        items
            .iter()
            .map(|item| item["sandboxID"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Whether the sandbox's own agent answers through the gateway.
    pub(crate) fn answers(&self, id: &str) -> bool {
        let headers = [("e2b-sandbox-id", id), ("e2b-sandbox-port", "49983")];
        let answer = self.request_with("GET", "/health", None, &headers);
        answer.is_some_and(|answer| answer.status == 204)
    }

    /// Writes a file in a sandbox.
    pub(crate) fn write(&self, id: &str, path: &str, content: &str) {
        let detail = self.request("GET", &format!("/sandboxes/{id}"), None);
        let detail = detail.unwrap().body;
        let token = detail["envdAccessToken"].as_str().unwrap();
        let request = ureq::http::Request::post(format!("{}/files?path={path}", self.url))
            .header("e2b-sandbox-id", id)
            .header("e2b-sandbox-port", "49983")
            .header("x-access-token", token)
            .header("content-type", "application/octet-stream")
            .body(content)
            .unwrap();
        assert_eq!(self.agent.run(request).unwrap().status(), 200);
    }

    /// Kills the server as a crash would.
    pub(crate) fn crash(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Sends the server SIGKILL while others still talk to it.
    pub(crate) fn kill_now(&self) {
        rustix::process::kill_process(self.pid(), rustix::process::Signal::KILL).unwrap();
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        let id = i32::try_from(self.process.id()).unwrap();
        rustix::process::Pid::from_raw(id).unwrap()
    }

    /// Waits until the server has died by itself.
    pub(crate) fn wait_for_death(mut self) {
        let begun = Instant::now();
        while begun.elapsed() < REQUEST_BUDGET {
            if self.process.try_wait().unwrap().is_some() {
                return;
            }
            std::thread::yield_now();
        }
        panic!("the server did not die at its fault point");
    }

    /// Stops the server in good order.
    pub(crate) fn stop(mut self) {
        rustix::process::kill_process(self.pid(), rustix::process::Signal::TERM).unwrap();
        let status = self.process.wait().unwrap();
        assert!(status.success(), "the server ended with {status}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Where on the machine a node's sandboxes have left traces, by sandbox.
#[derive(Debug, PartialEq, Eq, Default)]
pub(crate) struct Traces {
    pub(crate) directories: BTreeSet<String>,
    pub(crate) processes: BTreeSet<String>,
    pub(crate) cgroups: BTreeSet<String>,
    pub(crate) namespaces: BTreeSet<String>,
    pub(crate) mounts: BTreeSet<String>,
    /// Engine processes without a guest, which the node makes ahead of time and marks.
    pub(crate) blanks: BTreeSet<String>,
}

impl Traces {
    fn of(tag: &str, sandboxes: &Path) -> Self {
        let mut traces = Self {
            directories: names(sandboxes),
            blanks: marked(sandboxes),
            ..Self::default()
        };
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let bytes = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes).into_owned();
            if text.contains(tag) && text.contains("runsc") {
                traces.processes.extend(sandbox_ids(&text));
            }
        }
        for directory in walk(Path::new("/sys/fs/cgroup"), 4) {
            let text = directory.display().to_string();
            if text.contains(tag) {
                traces.cgroups.extend(sandbox_ids(&text));
            }
        }
        for root in ["/run/netns", "/run/sandhold"] {
            for path in walk(Path::new(root), 4) {
                let text = path.display().to_string();
                if text.contains(tag) {
                    traces.namespaces.extend(sandbox_ids(&text));
                }
            }
        }
        for line in fs::read_to_string("/proc/mounts").unwrap().lines() {
            if line.contains(tag) {
                traces.mounts.extend(sandbox_ids(line));
            }
        }
        // Some may have been begun while we looked.
        traces.blanks.extend(marked(sandboxes));
        traces
    }

    /// Every sandbox of which there is more than files, blanks left out.
    pub(crate) fn awake(&self) -> BTreeSet<String> {
        let parts = [
            &self.processes,
            &self.cgroups,
            &self.namespaces,
            &self.mounts,
        ];
        let awake: BTreeSet<String> = parts.into_iter().flatten().cloned().collect();
        awake.difference(&self.blanks).cloned().collect()
    }

    /// Every sandbox of which anything is there, blanks left out.
    pub(crate) fn all(&self) -> BTreeSet<String> {
        let parts = [
            &self.directories,
            &self.processes,
            &self.cgroups,
            &self.namespaces,
            &self.mounts,
        ];
        let all: BTreeSet<String> = parts.into_iter().flatten().cloned().collect();
        assert!(self.blanks.len() <= BLANKS_MAX, "{:?}", self.blanks);
        all.difference(&self.blanks).cloned().collect()
    }
}

fn marked(sandboxes: &Path) -> BTreeSet<String> {
    let is_blank = |id: &String| sandboxes.join(id).join("blank").exists();
    names(sandboxes).into_iter().filter(is_blank).collect()
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

fn walk(root: &Path, depth: usize) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let path = entry.path();
        if depth > 1 && path.is_dir() && !path.is_symlink() {
            found.extend(walk(&path, depth - 1));
        }
        found.push(path);
    }
    found
}

/// The 20-character runs that are sandbox identifiers.
fn sandbox_ids(text: &str) -> BTreeSet<String> {
    let runs = text.split(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit());
    runs.filter(|run| run.len() == 20)
        .map(str::to_owned)
        .collect()
}
