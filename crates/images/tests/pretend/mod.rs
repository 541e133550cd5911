//! An engine and a network that keep books and do nothing, and an agent that answers HTTP.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use sandhold_engine::{
    AfterCapture, Engine, EngineError, EngineIdentity, ExitCause, InstanceId, InstanceRef,
    InstanceStatus, LaunchSpec, Origin, Usage,
};
use sandhold_images::{Event, Progress, Stage};
use sandhold_network::{Attachment, Network, NetworkError};
use sandhold_platform::{DialError, Egress};
use sandhold_types::{Deadline, Incarnation, SandboxId, SystemEntropy};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
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
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    instances: BTreeSet<InstanceId>,
    networks: BTreeSet<SandboxId>,
    token: String,
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
                tokio::spawn(answer(stream, behaviour));
            }
        });
        Self {
            behaviour,
            address,
            books: Mutex::default(),
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

async fn answer(stream: TcpStream, behaviour: Behaviour) {
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.unwrap_or(0) == 0 {
            return;
        }
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
        // A sandbox that is baked reaches nothing.
        assert_eq!(*egress, Egress::Nothing);
        self.books.lock().unwrap().networks.insert(id.clone());
        Ok(Attachment {
            namespace: PathBuf::from("/nowhere"),
        })
    }

    async fn readdress(&self, _: &SandboxId) -> Result<Attachment, NetworkError> {
        Ok(Attachment {
            namespace: PathBuf::from("/nowhere"),
        })
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
