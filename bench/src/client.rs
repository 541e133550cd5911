//! A client of the server's public API: what an SDK would send, with as little of its own time in
//! between as possible.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

/// Longer than anything that is measured.
const REQUEST_BUDGET: Duration = Duration::from_secs(120);

/// A server and the key for it.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    url: String,
    key: String,
    agent: ureq::Agent,
    /// Where the server keeps its files.
    pub(crate) data: PathBuf,
}

/// A sandbox of this client.
#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    token: String,
}

impl Sandbox {
    fn read(answer: &Value) -> anyhow::Result<Self> {
        let text = |field: &'static str| answer[field].as_str().context(field);
        Ok(Self {
            id: text("sandboxID")?.to_owned(),
            token: text("envdAccessToken")?.to_owned(),
        })
    }

    fn agent_headers(&self) -> [(&str, &str); 2] {
        [
            ("e2b-sandbox-id", self.id.as_str()),
            ("e2b-sandbox-port", "49983"),
        ]
    }
}

/// A snapshot as the server tells of it.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) id: String,
    /// For how long its source stood still.
    pub(crate) paused_ms: u64,
}

impl Taken {
    fn read(answer: &Value) -> anyhow::Result<Self> {
        let id = answer["snapshotID"].as_str();
        Ok(Self {
            id: id.context("snapshotID")?.to_owned(),
            paused_ms: answer["pausedMs"].as_u64().context("pausedMs")?,
        })
    }
}

/// Where memory is filled: a file system in the sandbox's memory.
pub(crate) const MEMORY_FILE: &str = "/files?path=/dev/shm/filler&username=root";

impl Client {
    /// From the environment that `scripts/with-server` exports.
    pub(crate) fn from_environment() -> anyhow::Result<Self> {
        let variable = |name: &str| {
            std::env::var(name)
                .with_context(|| format!("{name} is not set: use scripts/with-server"))
        };
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(REQUEST_BUDGET))
            .build();
        Ok(Self {
            url: variable("SANDHOLD_URL")?,
            key: variable("SANDHOLD_API_KEY")?,
            agent: config.into(),
            data: variable("SANDHOLD_DATA_DIR")?.into(),
        })
    }

    fn send(
        &self,
        (method, path): (&str, &str),
        headers: &[(&str, &str)],
        body: String,
    ) -> anyhow::Result<(u16, String)> {
        let mut request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url))
            .header("x-api-key", &self.key);
        if !headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut response = self.agent.run(request.body(body)?)?;
        let status = response.status().as_u16();
        Ok((
            status,
            response
                .body_mut()
                .with_config()
                .limit(64 << 20)
                .read_to_string()?,
        ))
    }

    /// Creates a sandbox and waits until its data plane answers a request.
    pub(crate) fn create(&self, template: &str) -> anyhow::Result<Sandbox> {
        // It is woken by traffic when it sleeps.
        let body = json!({
            "templateID": template, "timeout": 3600,
            "autoPause": true, "autoResume": {"enabled": true},
        });
        let (status, text) = self.send(("POST", "/v2/sandboxes"), &[], body.to_string())?;
        ensure!(status == 201, "create answered {status}: {text}");
        let sandbox = Sandbox::read(&serde_json::from_str(&text)?)?;
        self.ask_agent(&sandbox)?;
        Ok(sandbox)
    }

    /// Takes a snapshot.
    pub(crate) fn snapshot(&self, sandbox: &Sandbox) -> anyhow::Result<Taken> {
        let path = format!("/sandboxes/{}/snapshots", sandbox.id);
        let (status, text) = self.send(("POST", &path), &[], String::new())?;
        ensure!(status == 201, "snapshot answered {status}: {text}");
        Taken::read(&serde_json::from_str(&text)?)
    }

    /// Removes a snapshot.
    pub(crate) fn delete_snapshot(&self, id: &str) -> anyhow::Result<()> {
        let path = format!("/templates/{id}");
        let (status, text) = self.send(("DELETE", &path), &[], String::new())?;
        ensure!(
            status == 204,
            "deleting a snapshot answered {status}: {text}"
        );
        Ok(())
    }

    /// Takes a sandbox back to a snapshot.
    pub(crate) fn roll_back(&self, sandbox: &Sandbox, snapshot: &str) -> anyhow::Result<()> {
        let path = format!("/sandboxes/{}/rollback", sandbox.id);
        let body = json!({"snapshotID": snapshot}).to_string();
        let (status, text) = self.send(("POST", &path), &[], body)?;
        ensure!(status == 200, "rollback answered {status}: {text}");
        Ok(())
    }

    /// Copies a sandbox in one call and waits until each copy's data plane answers a request.
    pub(crate) fn clones(
        &self,
        sandbox: &Sandbox,
        count: usize,
        concurrency: usize,
    ) -> anyhow::Result<Vec<Sandbox>> {
        let path = format!("/sandboxes/{}/clones", sandbox.id);
        let body = json!({"count": count, "concurrency": concurrency}).to_string();
        let (status, text) = self.send(("POST", &path), &[], body)?;
        ensure!(status == 201, "clones answered {status}: {text}");
        let answer: Vec<Value> = serde_json::from_str(&text)?;
        let copies = answer.iter().map(|copy| Sandbox::read(&copy["sandbox"]));
        let copies: Vec<Sandbox> = copies.collect::<anyhow::Result<_>>()?;
        for copy in &copies {
            self.ask_agent(copy)?;
        }
        Ok(copies)
    }

    /// One request to the sandbox's agent.
    pub(crate) fn ask_agent(&self, sandbox: &Sandbox) -> anyhow::Result<()> {
        let headers = sandbox.agent_headers();
        let (status, text) = self.send(("GET", "/health"), &headers, String::new())?;
        ensure!(status == 204, "the data plane answered {status}: {text}");
        Ok(())
    }

    /// Has the sandbox hold this much more memory, as a file in its memory.
    pub(crate) fn fill_memory(&self, sandbox: &Sandbox, content: String) -> anyhow::Result<()> {
        let mut headers = sandbox.agent_headers().to_vec();
        headers.push(("x-access-token", sandbox.token.as_str()));
        headers.push(("content-type", "application/octet-stream"));
        let (status, text) = self.send(("POST", MEMORY_FILE), &headers, content)?;
        ensure!(status == 200, "the upload was answered {status}: {text}");
        Ok(())
    }

    /// Puts a sandbox to sleep.
    pub(crate) fn pause(&self, sandbox: &Sandbox) -> anyhow::Result<()> {
        let path = format!("/sandboxes/{}/pause", sandbox.id);
        let (status, text) = self.send(("POST", &path), &[], String::new())?;
        ensure!(status == 204, "pause answered {status}: {text}");
        Ok(())
    }

    /// Wakes a sandbox and waits until its data plane answers a request.
    pub(crate) fn resume(&self, sandbox: &Sandbox) -> anyhow::Result<()> {
        let path = format!("/v2/sandboxes/{}/connect", sandbox.id);
        let body = json!({"timeout": 3600}).to_string();
        let (status, text) = self.send(("POST", &path), &[], body)?;
        ensure!(status == 201, "connect answered {status}: {text}");
        self.ask_agent(sandbox)
    }

    /// Runs code in the interpreter and returns the text of its main result.
    pub(crate) fn run_code(&self, sandbox: &Sandbox, code: &str) -> anyhow::Result<String> {
        let body = json!({"code": code, "context_id": null, "language": null, "env_vars": null});
        let headers = [
            ("e2b-sandbox-id", sandbox.id.as_str()),
            ("e2b-sandbox-port", "49999"),
        ];
        let (status, text) = self.send(("POST", "/execute"), &headers, body.to_string())?;
        ensure!(status == 200, "the interpreter answered {status}: {text}");
        for line in text.lines() {
            let event: Value = serde_json::from_str(line)?;
            if event["type"] == "result" {
                return Ok(event["text"].as_str().unwrap_or_default().to_owned());
            }
        }
        bail!("no result in {text}")
    }

    /// Starts a command in the sandbox and waits until its agent says that it was started.
    pub(crate) fn start(&self, sandbox: &Sandbox, command: &[&str]) -> anyhow::Result<()> {
        let (program, arguments) = command.split_first().context("no command")?;
        let message = json!({"process": {"cmd": program, "args": arguments}, "stdin": false});
        let message = message.to_string();
        let length = u32::try_from(message.len())?.to_be_bytes();
        let body = [&[0][..], &length, message.as_bytes()].concat();
        let [id, port] = sandbox.agent_headers();
        let request = ureq::http::Request::post(format!("{}/process.Process/Start", self.url))
            .header("x-access-token", &sandbox.token)
            .header("content-type", "application/connect+json")
            .header("connect-protocol-version", "1")
            .header(id.0, id.1)
            .header(port.0, port.1);
        let mut response = self.agent.run(request.body(body)?)?;
        let mut prefix = [0; 5];
        let mut stream = response.body_mut().as_reader();
        stream.read_exact(&mut prefix)?;
        let [_, length @ ..] = prefix;
        let mut event = vec![0; usize::try_from(u32::from_be_bytes(length))?];
        stream.read_exact(&mut event)?;
        let event: Value = serde_json::from_slice(&event)?;
        let pid = event["event"]["start"]["pid"].as_u64();
        ensure!(pid.is_some(), "the agent said {event}");
        Ok(())
    }

    /// Runs what is asked; `hear` is told the kind of each event as it comes. The data of `completed`.
    pub(crate) fn run(&self, ask: &Value, mut hear: impl FnMut(&str)) -> anyhow::Result<Value> {
        let request = ureq::http::Request::post(format!("{}/v1/sandbox-runs", self.url))
            .header("x-api-key", &self.key)
            .header("content-type", "application/json");
        let mut response = self.agent.run(request.body(ask.to_string())?)?;
        let mut kind = String::new();
        for line in BufReader::new(response.body_mut().as_reader()).lines() {
            let line = line?;
            if let Some(event) = line.strip_prefix("event: ") {
                event.clone_into(&mut kind);
                hear(&kind);
            }
            match line.strip_prefix("data: ") {
                Some(data) if kind == "completed" => return Ok(serde_json::from_str(data)?),
                Some(data) if kind == "error" => bail!("a run ended: {data}"),
                _ => {}
            }
        }
        bail!("a run did not tell its end")
    }

    /// Removes a sandbox.
    pub(crate) fn kill(&self, sandbox: &Sandbox) -> anyhow::Result<()> {
        let path = format!("/sandboxes/{}", sandbox.id);
        let (status, text) = self.send(("DELETE", &path), &[], String::new())?;
        ensure!(status == 204, "kill answered {status}: {text}");
        Ok(())
    }

    /// How many sandboxes the first page of the listing shows.
    pub(crate) fn list(&self) -> anyhow::Result<usize> {
        let (status, text) = self.send(("GET", "/v2/sandboxes?limit=100"), &[], String::new())?;
        ensure!(status == 200, "list answered {status}: {text}");
        let items: Vec<Value> = serde_json::from_str(&text)?;
        Ok(items.len())
    }
}

/// How long `work` takes.
pub(crate) fn timed<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(Duration, T)> {
    let begun = Instant::now();
    let value = work()?;
    Ok((begun.elapsed(), value))
}
