//! A cold start of the same root file system with the same agent: what a create would cost without
//! a memory image. `runsc run` by the same engine code, in a network of its own.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::figures::Samples;
use anyhow::{Context, ensure};
use sandhold_engine::{
    AfterCapture, Engine, InstanceId, InstanceRef, LaunchSpec, Origin,
    gvisor::{GvisorConfig, GvisorEngine, RootWrites},
};
use sandhold_images::{Build, Builds, Catalogue};
use sandhold_network::{LinuxNetwork, Network};
use sandhold_node::{AgentControl, HttpAgent, Identity};
use sandhold_platform::Egress;
use sandhold_types::{
    Clock, Deadline, Entropy, Incarnation, SandboxId, SystemClock, SystemEntropy, Token,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    runtime::Runtime,
};

/// Longer than the slowest cold start of an interpreter.
const BUDGET: Duration = Duration::from_secs(120);
/// How often a port that is not open yet is tried.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The names of our instances on the machine.
const TAG: &str = "bench0";
/// Opens the data plane of our instances, which nobody else can reach.
const ACCESS_TOKEN: &str = "bench";
const AGENT_PORT: u16 = 49983;
const INTERPRETER_PORT: u16 = 49999;

/// What cold starts are made with.
pub(crate) struct Cold {
    runtime: Runtime,
    engine: GvisorEngine,
    network: Arc<LinuxNetwork>,
    agent: HttpAgent,
    catalogue: Catalogue,
    scratch: std::path::PathBuf,
}

impl Cold {
    /// With the catalogue that `SANDHOLD_TEMPLATES` names.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let runtime = Runtime::new()?;
        let runsc =
            std::env::var_os("SANDHOLD_RUNSC").map_or_else(|| "/usr/bin/runsc".into(), Into::into);
        let config = GvisorConfig {
            runsc,
            node_tag: TAG.to_owned(),
            state_root: Path::new("/run/sandhold").join(TAG),
            root_writes: RootWrites::Layer,
        };
        let engine = runtime.block_on(GvisorEngine::new(config))?;
        let network = Arc::new(runtime.block_on(LinuxNetwork::new(TAG))?);
        let shared = std::env::var("SANDHOLD_TEMPLATES").ok();
        let shared = sandhold_images::shared_directories(shared.as_deref());
        let scratch = std::env::temp_dir().join(format!("sandhold-bench-{}", std::process::id()));
        std::fs::create_dir_all(&scratch)?;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let own = scratch.join("templates");
        let catalogue = Catalogue::open(&own, &shared, engine.identity(), clock)?;
        let agent = HttpAgent::new(network.clone());
        Ok(Self {
            runtime,
            engine,
            network,
            agent,
            catalogue,
            scratch,
        })
    }

    /// From the start until the agent answers a request.
    pub(crate) fn until_agent_answers(&self, template: &str) -> anyhow::Result<Duration> {
        self.runtime.block_on(self.start(template, Until::Agent))
    }

    /// From the start until the interpreter gives its first result.
    pub(crate) fn until_first_result(&self, template: &str) -> anyhow::Result<Duration> {
        self.runtime
            .block_on(self.start(template, Until::FirstResult))
    }

    /// Plain captures and restores of a sandbox of `template` that holds `content` more in its
    /// memory: each sample is every step that stands between a running sandbox and the same one
    /// answering again.
    pub(crate) fn capture_and_restore(
        &self,
        template: &str,
        content: &str,
        samples: usize,
    ) -> anyhow::Result<Plain> {
        self.runtime
            .block_on(self.capture_and_restore_inner(template, content, samples))
    }

    async fn capture_and_restore_inner(
        &self,
        template: &str,
        content: &str,
        samples: usize,
    ) -> anyhow::Result<Plain> {
        let build = self
            .catalogue
            .resolve(&"default".parse()?, template)
            .with_context(|| format!("no template {template}"))?;
        let id = SandboxId::generate(&SystemEntropy);
        let directory = self.scratch.join(id.as_str());
        let deadline = Deadline::after(Instant::now(), 10 * BUDGET);
        let token = Token::generate("", &SystemEntropy);
        let mut environment = build.environment.clone();
        environment.push(format!("SANDHOLD_CONTROL_TOKEN={}", token.expose()));
        let instance = |life: u64| InstanceRef {
            id: InstanceId {
                sandbox: id.clone(),
                incarnation: Incarnation(life),
            },
            directory: directory.join(format!("life-{life}")),
        };
        let spec = |life: u64, origin, network_namespace| LaunchSpec {
            instance: instance(life),
            root_fs: build.root_fs.clone(),
            origin,
            network_namespace,
            resources: build.resources,
            hostname: id.to_string(),
        };
        let mut plain = Plain::default();
        std::fs::create_dir_all(instance(0).directory)?;
        let attached = self.network.attach(&id, &Egress::Nothing).await?;
        let boot = Origin::Boot {
            command: build.command.clone(),
            environment: environment.clone(),
        };
        self.engine
            .launch(&spec(0, boot, attached.namespace), deadline)
            .await?;
        self.introduce(&id, &token, deadline).await?;
        let answer = self
            .ask(
                &id,
                AGENT_PORT,
                &format!(
                    "POST {} HTTP/1.1\r\nx-access-token: {ACCESS_TOKEN}\r\n\
                     content-type: application/octet-stream\r\n",
                    crate::client::MEMORY_FILE
                ),
                content,
                deadline,
            )
            .await?;
        ensure!(answer.contains(" 200 "), "the upload was answered {answer}");
        for life in 0..u64::try_from(samples)? {
            let image = directory.join(format!("image-{life}"));
            let begun = Instant::now();
            self.engine
                .capture(&instance(life), &image, AfterCapture::Stop, deadline)
                .await?;
            self.engine.remove(&instance(life), deadline).await?;
            self.network.detach(&id).await?;
            plain.capture.add(begun.elapsed());
            std::fs::create_dir_all(instance(life + 1).directory)?;
            let begun = Instant::now();
            let attached = self.network.attach(&id, &Egress::Nothing).await?;
            let origin = Origin::Image {
                directory: image.clone(),
                command: build.command.clone(),
                environment: environment.clone(),
            };
            self.engine
                .launch(&spec(life + 1, origin, attached.namespace), deadline)
                .await?;
            self.ask(&id, AGENT_PORT, "GET /health HTTP/1.1\r\n", "", deadline)
                .await?;
            plain.restore.add(begun.elapsed());
            std::fs::remove_dir_all(&image)?;
        }
        let last = instance(u64::try_from(samples)?);
        self.engine.remove(&last, deadline).await?;
        self.network.detach(&id).await?;
        std::fs::remove_dir_all(&directory)?;
        Ok(plain)
    }

    async fn start(&self, template: &str, until: Until) -> anyhow::Result<Duration> {
        let namespace = "default".parse()?;
        let build = self
            .catalogue
            .resolve(&namespace, template)
            .with_context(|| format!("no template {template}"))?;
        let id = SandboxId::generate(&SystemEntropy);
        let directory = self.scratch.join(id.as_str());
        std::fs::create_dir_all(&directory)?;
        let instance = InstanceRef {
            id: InstanceId {
                sandbox: id.clone(),
                incarnation: Incarnation::INITIAL,
            },
            directory: directory.clone(),
        };
        let deadline = Deadline::after(Instant::now(), BUDGET);
        let measured = self.measure(&build, &instance, until, deadline).await;
        self.engine.remove(&instance, deadline).await?;
        self.network.detach(&id).await?;
        std::fs::remove_dir_all(&directory)?;
        measured
    }

    async fn measure(
        &self,
        build: &Build,
        instance: &InstanceRef,
        until: Until,
        deadline: Deadline,
    ) -> anyhow::Result<Duration> {
        let id = &instance.id.sandbox;
        let token = Token::generate("", &SystemEntropy);
        let mut environment = build.environment.clone();
        environment.push(format!("SANDHOLD_CONTROL_TOKEN={}", token.expose()));
        let begun = Instant::now();
        let attached = self.network.attach(id, &Egress::Nothing).await?;
        let spec = LaunchSpec {
            instance: instance.clone(),
            root_fs: build.root_fs.clone(),
            origin: Origin::Boot {
                command: build.command.clone(),
                environment,
            },
            network_namespace: attached.namespace,
            resources: build.resources,
            hostname: id.to_string(),
        };
        self.engine.launch(&spec, deadline).await?;
        match until {
            Until::Agent => {
                self.ask(id, AGENT_PORT, "GET /health HTTP/1.1\r\n", "", deadline)
                    .await?;
            }
            Until::FirstResult => {
                self.introduce(id, &token, deadline).await?;
                self.agent.wait_ready(id, &token, deadline).await?;
                let body: Value = json!({"code": "6 * 7"});
                let answer = self
                    .ask(
                        id,
                        INTERPRETER_PORT,
                        "POST /execute HTTP/1.1\r\ncontent-type: application/json\r\n",
                        &body.to_string(),
                        deadline,
                    )
                    .await?;
                ensure!(answer.contains("\"42\""), "6 * 7 gave {answer}");
            }
        }
        Ok(begun.elapsed())
    }

    async fn introduce(
        &self,
        id: &SandboxId,
        token: &Token,
        deadline: Deadline,
    ) -> anyhow::Result<()> {
        let mut entropy = [0; 64];
        SystemEntropy.fill(&mut entropy);
        let identity = Identity {
            sandbox: id.clone(),
            template: String::from("bench"),
            access_token: Token::new(ACCESS_TOKEN.to_owned()),
            control_token: token.clone(),
            env_vars: std::collections::BTreeMap::new(),
            now: SystemClock.now(),
            entropy,
        };
        self.agent.init(token, &identity, deadline).await?;
        Ok(())
    }

    /// Sends a request as soon as the port is open and returns all that comes back.
    async fn ask(
        &self,
        id: &SandboxId,
        port: u16,
        request_line: &str,
        body: &str,
        deadline: Deadline,
    ) -> anyhow::Result<String> {
        let request = format!(
            "{request_line}host: bench\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        loop {
            if let Ok(mut stream) = self.network.dial(id, port, deadline).await {
                stream.write_all(request.as_bytes()).await?;
                let mut answer = Vec::new();
                stream.read_to_end(&mut answer).await?;
                return Ok(String::from_utf8_lossy(&answer).into_owned());
            }
            ensure!(
                !deadline.remaining(Instant::now()).is_zero(),
                "no answer in time"
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

impl Drop for Cold {
    fn drop(&mut self) {
        // A figure that failed leaves its sandbox behind.
        self.runtime.block_on(async {
            let deadline = Deadline::after(Instant::now(), BUDGET);
            for id in self.engine.list().await.unwrap_or_default() {
                let directory = self.scratch.join(id.sandbox.as_str());
                let instance = InstanceRef { id, directory };
                let _ = self.engine.remove(&instance, deadline).await;
                let _ = self.network.detach(&instance.id.sandbox).await;
            }
        });
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}

/// Plain captures and restores.
#[derive(Debug, Default)]
pub(crate) struct Plain {
    /// `runsc checkpoint`, then what is left of the sandbox goes.
    pub(crate) capture: Samples,
    /// A network, `runsc restore`, the first answer.
    pub(crate) restore: Samples,
}

/// What a cold start is measured until.
#[derive(Debug, Clone, Copy)]
enum Until {
    Agent,
    FirstResult,
}
