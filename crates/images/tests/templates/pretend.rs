//! An engine and a network that keep books and do nothing, and an agent that answers HTTP and runs
//! commands of steps in their root, on this machine.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use base64::Engine as _;
use sandhold_engine::{
    AfterCapture, Engine, EngineError, EngineIdentity, ExitCause, InstanceId, InstanceRef,
    InstanceStatus, LaunchSpec, Origin, Usage,
};
use sandhold_images::{Event, Progress, Stage};
use sandhold_network::{Attachment, Network, NetworkError};
use sandhold_platform::{DialError, Egress};
use sandhold_types::{Deadline, Incarnation, SandboxId, SystemEntropy};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::Notify,
};

/// What the sandbox does that is baked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behaviour {
    Ready,
    NeverReady,
    Ends,
    RefusesQuiesce,
    SaysGarbage,
    FailsCapture,
}

#[derive(Debug)]
pub(crate) struct Pretend {
    behaviour: Behaviour,
    address: std::net::SocketAddr,
    books: Arc<Mutex<Books>>,
}

#[derive(Debug, Default)]
struct Books {
    instances: BTreeSet<InstanceId>,
    networks: BTreeSet<SandboxId>,
    token: String,
    /// Of the sandbox that was booted last.
    root: PathBuf,
    egress: Option<Egress>,
}

pub(crate) fn identity() -> EngineIdentity {
    EngineIdentity {
        name: String::from("pretend"),
        version: String::from("1"),
        cpu_features: String::from("avx sse2"),
    }
}

impl Pretend {
    pub(crate) async fn new(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let books = Arc::<Mutex<Books>>::default();
        let known = Arc::clone(&books);
        tokio::spawn(async move {
            let mut asked = 0;
            while let Ok((stream, _)) = listener.accept().await {
                asked += 1;
                // The first question comes while the kernel still starts.
                let behaviour = if asked == 1 && behaviour == Behaviour::Ready {
                    Behaviour::NeverReady
                } else {
                    behaviour
                };
                tokio::spawn(answer(stream, behaviour, Arc::clone(&known)));
            }
        });
        Self {
            behaviour,
            address,
            books,
        }
    }

    /// Instances and networks that are left.
    pub(crate) fn left(&self) -> (usize, usize) {
        let books = self.books.lock().unwrap();
        (books.instances.len(), books.networks.len())
    }

    /// How long it is worth waiting until it is ready.
    pub(crate) fn patience(&self) -> Duration {
        match self.behaviour {
            Behaviour::NeverReady => Duration::from_secs(2),
            _ => Duration::from_secs(30),
        }
    }

    pub(crate) fn token(&self) -> String {
        self.books.lock().unwrap().token.clone()
    }

    pub(crate) fn leave_something_behind(&self) {
        let sandbox = SandboxId::generate(&SystemEntropy);
        let mut books = self.books.lock().unwrap();
        books.networks.insert(sandbox.clone());
        books.instances.insert(InstanceId {
            sandbox,
            incarnation: Incarnation(1),
        });
    }

    /// Every path below `root`.
    pub(crate) fn listing(&self, root: &Path) -> BTreeSet<PathBuf> {
        let mut all = BTreeSet::new();
        let mut open = vec![root.to_owned()];
        while let Some(path) = open.pop() {
            if path.is_dir() {
                open.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            }
            all.insert(path);
        }
        all
    }
}

async fn answer(stream: TcpStream, behaviour: Behaviour, books: Arc<Mutex<Books>>) {
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.unwrap_or(0) == 0 {
            return;
        }
    }
    if head.contains("/process.Process/Start") {
        let root = books.lock().unwrap().root.clone();
        return run_command(stream, &head, &root).await;
    }
    assert!(head.to_ascii_lowercase().contains("x-sandhold-control: "));
    let answer = match (head.split(' ').nth(1), behaviour) {
        (Some("/ready"), Behaviour::NeverReady | Behaviour::Ends) => {
            let body = r#"{"waitingFor":["python"]}"#;
            format!("503 Busy\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        }
        (Some("/ready"), Behaviour::SaysGarbage) => {
            String::from("418 Teapot\r\ncontent-length: 3\r\n\r\n\x1b[2")
        }
        (Some("/quiesce"), Behaviour::RefusesQuiesce) => {
            String::from("500 No\r\ncontent-length: 0\r\n\r\n")
        }
        _ => String::from("204 Fine\r\n\r\n"),
    };
    let _ = stream
        .write_all(format!("HTTP/1.1 {answer}").as_bytes())
        .await;
}

/// Runs what a step asks for in the root directory, and answers as the process service does.
async fn run_command(mut stream: BufReader<TcpStream>, head: &str, root: &Path) {
    let head = head.to_ascii_lowercase();
    assert!(head.contains("x-access-token: ") && head.contains("authorization: basic "));
    let length = head.split("content-length: ").nth(1).unwrap();
    let length: usize = length.lines().next().unwrap().trim().parse().unwrap();
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    let message: serde_json::Value = serde_json::from_slice(&body[5..]).unwrap();
    let process = &message["process"];
    let environment = process["envs"].as_object().unwrap();
    let ran = tokio::process::Command::new("sh")
        .args(["-c", process["args"][2].as_str().unwrap()])
        .envs(environment.iter().map(|(k, v)| (k, v.as_str().unwrap())))
        .current_dir(root)
        .output()
        .await
        .unwrap();
    let encode = |bytes: &[u8]| base64::engine::general_purpose::STANDARD.encode(bytes);
    let mut frames = Vec::new();
    for event in [
        serde_json::json!({ "event": { "start": { "pid": 7 } } }),
        serde_json::json!({ "event": { "data": { "stdout": encode(&ran.stdout) } } }),
        serde_json::json!({ "event": { "data": { "stderr": encode(&ran.stderr) } } }),
        serde_json::json!({ "event": { "end": { "exited": true, "exitCode": ran.status.code() } } }),
    ] {
        let payload = event.to_string();
        frames.push(0);
        frames.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
        frames.extend(payload.as_bytes());
    }
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n",
        frames.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&frames).await.unwrap();
}

#[async_trait]
impl Engine for Pretend {
    fn identity(&self) -> EngineIdentity {
        identity()
    }

    async fn launch(&self, spec: &LaunchSpec, _: Deadline) -> Result<(), EngineError> {
        let Origin::Boot {
            command,
            environment,
        } = &spec.origin
        else {
            panic!("a bake boots");
        };
        assert!(
            spec.root_fs
                .join(command[0].trim_start_matches('/'))
                .is_file()
        );
        let console = spec.instance.directory.join("console.log");
        fs::write(console, "last words on the console\n").unwrap();
        let token = environment
            .iter()
            .find_map(|e| e.strip_prefix("SANDHOLD_CONTROL_TOKEN="));
        let mut books = self.books.lock().unwrap();
        // A sandbox that is baked reaches nothing; one that does a step is in the workshop.
        let works = spec.root_fs.ends_with("tmp/work");
        let expected = if works {
            Egress::Internet
        } else {
            Egress::Nothing
        };
        assert_eq!(books.egress, Some(expected));
        books.root.clone_from(&spec.root_fs);
        books.token = token.unwrap().to_owned();
        books.instances.insert(spec.instance.id.clone());
        Ok(())
    }

    async fn remove(&self, instance: &InstanceRef, _: Deadline) -> Result<(), EngineError> {
        self.books.lock().unwrap().instances.remove(&instance.id);
        Ok(())
    }

    async fn inspect(&self, _: &InstanceRef) -> Result<InstanceStatus, EngineError> {
        Ok(InstanceStatus::Running)
    }

    async fn list(&self) -> Result<Vec<InstanceId>, EngineError> {
        Ok(self
            .books
            .lock()
            .unwrap()
            .instances
            .iter()
            .cloned()
            .collect())
    }

    async fn wait(&self, _: &InstanceRef) -> Result<ExitCause, EngineError> {
        if self.behaviour == Behaviour::Ends {
            return Ok(ExitCause::Exited(1));
        }
        std::future::pending().await
    }

    async fn usage(&self, _: &InstanceRef) -> Result<Usage, EngineError> {
        Ok(Usage::default())
    }

    async fn capture(
        &self,
        instance: &InstanceRef,
        image: &Path,
        after: AfterCapture,
        _: Deadline,
    ) -> Result<(), EngineError> {
        assert_eq!(after, AfterCapture::Stop);
        if self.behaviour == Behaviour::FailsCapture {
            return Err(EngineError::Unknown {
                instance: instance.id.clone(),
            });
        }
        fs::create_dir(image).unwrap();
        fs::write(image.join("memory"), "pages").unwrap();
        Ok(())
    }

    async fn freeze(&self, _: &InstanceRef) -> Result<(), EngineError> {
        Ok(())
    }

    async fn thaw(&self, _: &InstanceRef) -> Result<(), EngineError> {
        Ok(())
    }
}

#[async_trait]
impl Network for Pretend {
    async fn attach(&self, id: &SandboxId, egress: &Egress) -> Result<Attachment, NetworkError> {
        let mut books = self.books.lock().unwrap();
        books.egress = Some(egress.clone());
        books.networks.insert(id.clone());
        drop(books);
        Ok(Attachment {
            namespace: PathBuf::from("/nowhere"),
        })
    }

    async fn readdress(&self, _: &SandboxId) -> Result<Attachment, NetworkError> {
        Ok(Attachment {
            namespace: PathBuf::from("/nowhere"),
        })
    }

    async fn unaddress(&self, _: &SandboxId) -> Result<(), NetworkError> {
        Ok(())
    }

    async fn detach(&self, id: &SandboxId) -> Result<(), NetworkError> {
        self.books.lock().unwrap().networks.remove(id);
        Ok(())
    }

    async fn set_egress(&self, _: &SandboxId, _: &Egress) -> Result<(), NetworkError> {
        Ok(())
    }

    async fn list(&self) -> Result<Vec<SandboxId>, NetworkError> {
        Ok(self
            .books
            .lock()
            .unwrap()
            .networks
            .iter()
            .cloned()
            .collect())
    }

    async fn dial(&self, _: &SandboxId, port: u16, _: Deadline) -> Result<TcpStream, DialError> {
        assert_eq!(port, 49_983);
        TcpStream::connect(self.address)
            .await
            .map_err(DialError::Socket)
    }
}

/// Remembers what it is told.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    events: Mutex<Vec<Event>>,
    more: Arc<Notify>,
}

impl Heard {
    pub(crate) fn all(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    pub(crate) fn began(&self, stage: Stage) -> bool {
        self.all().contains(&Event::Begin { stage })
    }

    /// Waits until something was told.
    pub(crate) async fn until(&self, wanted: impl Fn(&Event) -> bool) {
        loop {
            let more = self.more.notified();
            if self.all().iter().any(&wanted) {
                return;
            }
            more.await;
        }
    }
}

impl Progress for Heard {
    fn report(&self, event: Event) {
        self.events.lock().unwrap().push(event);
        self.more.notify_one();
    }
}
