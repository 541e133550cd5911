//! A kernel that speaks the Jupyter protocol, and the way of starting one.
//!
//! ```text
//!  execute --shell--> kernel            one execution at a time: its owner sees to that
//!                       |
//!  events  <--iopub-----+
//!          <--shell-----+   both routed by the id of the request; others are dropped
//! ```
//!
//! Owns the process, its sockets and its directory. Invariants: messages of earlier executions
//! (a thread that still prints, BC-037) go nowhere; when the process ends, the events end.
//! It never opens the stdin channel: a kernel is told that there is none, and code that asks for
//! input fails at once (BC-041).

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

use super::{
    events::{Completion, KernelEvent},
    language::{InterruptMode, KernelSpec},
    message::{self, Session},
    process::KernelProcess,
    side_channel::SideChannel,
    zmtp::{self, Endpoint, SocketKind, Writer, ZmtpError},
};
use crate::{
    account::Account,
    children::{self, Children},
};

/// A kernel that has not answered by then never will.
const START_WAIT: Duration = Duration::from_secs(90);
const CONNECT_INTERVAL: Duration = Duration::from_millis(15);
/// How long one probe of a starting kernel may take; then another one is sent.
const PROBE_WAIT: Duration = Duration::from_millis(500);
/// After the end of the process its last messages arrive within this time.
const LAST_WORDS_WAIT: Duration = Duration::from_millis(500);
/// Events between a kernel and its execution.
const EVENTS_WAITING_MAX: usize = 1024;

/// A running kernel.
#[derive(Debug)]
pub(super) struct JupyterKernel {
    process: Arc<KernelProcess>,
    session: Session,
    request_number: AtomicU64,
    shell: tokio::sync::Mutex<Writer>,
    control: tokio::sync::Mutex<Writer>,
    route: Route,
    interrupt_mode: InterruptMode,
    side_channel: Option<SideChannel>,
    directory: PathBuf,
    readers: Vec<JoinHandle<()>>,
}

/// Which execution the messages are for.
#[derive(Debug, Clone, Default)]
struct Route(Arc<Mutex<Option<Listener>>>);

/// The id of a request, and who waits for what is said about it.
type Listener = (String, mpsc::Sender<KernelEvent>);

/// What a kernel is started with.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    /// Its kind.
    pub(super) spec: &'a KernelSpec,
    /// Who runs it.
    pub(super) account: &'a Account,
    /// Where.
    pub(super) cwd: &'a Path,
    /// All of its variables.
    pub(super) environment: &'a BTreeMap<String, String>,
    /// A directory of its own, made already, that belongs to the account.
    pub(super) directory: PathBuf,
    /// The directory of the agent's own Python files.
    pub(super) python_files: &'a Path,
    /// Python modules to import before it is ready.
    pub(super) preload: &'a [String],
    /// The signing key.
    pub(super) key: String,
}

/// Why there is no kernel, or none any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum KernelError {
    /// Its files cannot be made.
    #[error("preparing {path}")]
    Prepare { path: PathBuf, source: io::Error },
    /// The program cannot be run.
    #[error("starting {program}")]
    Spawn { program: String, source: io::Error },
    /// It ended before it answered.
    #[error("the kernel ended while it was starting: {0}")]
    EndedEarly(String),
    /// It runs and does not answer.
    #[error("the kernel did not answer within {} s", START_WAIT.as_secs())]
    Silent,
    /// It cannot be reached any more.
    #[error("talking to the kernel")]
    Connection(#[from] ZmtpError),
    /// It cannot be reached any more.
    #[error("talking to the shell")]
    Pipe(#[from] io::Error),
}

impl JupyterKernel {
    /// Starts a kernel and waits until it answers.
    pub(super) async fn start(
        children: &Children,
        launch: Launch<'_>,
    ) -> Result<Self, KernelError> {
        let plan = Plan::new(&launch)?;
        let spawned = children
            .spawn(plan.command(&launch)?)
            .await
            .map_err(|source| KernelError::Spawn {
                program: launch.spec.argv[0].clone(),
                source,
            })?;
        let process = Arc::new(KernelProcess::watch(spawned.pid, spawned.exit));
        let started = tokio::select! {
            end = process.ended() => Err(KernelError::EndedEarly(end)),
            started = timeout(START_WAIT, Self::connect(launch, &plan, &process)) => {
                started.unwrap_or(Err(KernelError::Silent))
            }
        };
        if started.is_err() {
            process.kill().await;
        }
        started
    }

    async fn connect(
        launch: Launch<'_>,
        plan: &Plan,
        process: &Arc<KernelProcess>,
    ) -> Result<Self, KernelError> {
        let (published, subscription) =
            connect_when_up(&plan.endpoint(Channel::IoPub), SocketKind::Subscriber).await;
        let (replies, shell) =
            connect_when_up(&plan.endpoint(Channel::Shell), SocketKind::Dealer).await;
        let (control_replies, control) =
            connect_when_up(&plan.endpoint(Channel::Control), SocketKind::Dealer).await;
        let route = Route::default();
        let readers = vec![
            tokio::spawn(route.clone().read(published, Some(subscription))),
            tokio::spawn(route.clone().read(replies, None)),
            // Nobody waits for these, but the kernel must be able to send them.
            tokio::spawn(Route::default().read(control_replies, None)),
        ];
        tokio::spawn(route.clone().close_after(Arc::clone(process)));
        let kernel = Self {
            process: Arc::clone(process),
            session: Session::new(launch.key, String::from("sandhold")),
            request_number: AtomicU64::new(0),
            shell: tokio::sync::Mutex::new(shell),
            control: tokio::sync::Mutex::new(control),
            route,
            interrupt_mode: launch.spec.interrupt_mode,
            side_channel: plan.side_channel.clone().map(SideChannel::new),
            directory: launch.directory,
            readers,
        };
        kernel.wait_until_it_answers().await?;
        Ok(kernel)
    }

    /// A subscription takes effect some time after it was made, so a kernel is up only when both
    /// channels have answered.
    async fn wait_until_it_answers(&self) -> Result<(), KernelError> {
        loop {
            let mut events = self.request("kernel_info_request", &json!({})).await?;
            let mut completion = Completion::default();
            let answered = timeout(PROBE_WAIT, async {
                while let Some(event) = events.recv().await {
                    completion.observe(&event);
                    if completion.is_complete() {
                        return true;
                    }
                }
                false
            });
            if answered.await.unwrap_or(false) {
                return Ok(());
            }
            tokio::time::sleep(CONNECT_INTERVAL).await;
        }
    }

    /// Runs the code. A silent execution is not counted and not remembered.
    pub(super) async fn execute(
        &self,
        code: &str,
        silent: bool,
    ) -> Result<mpsc::Receiver<KernelEvent>, KernelError> {
        let content = json!({
            "code": code,
            "silent": silent,
            "store_history": !silent,
            "user_expressions": {},
            "allow_stdin": false,
            "stop_on_error": false,
        });
        self.request("execute_request", &content).await
    }

    async fn request(
        &self,
        kind: &str,
        content: &Value,
    ) -> Result<mpsc::Receiver<KernelEvent>, KernelError> {
        let id = self.next_id();
        let events = self.route.begin(id.clone());
        let frames = self.session.encode(&id, kind, content);
        self.shell.lock().await.send(&frames).await?;
        Ok(events)
    }

    fn next_id(&self) -> String {
        let number = self.request_number.fetch_add(1, Ordering::Relaxed);
        format!("sandhold-{number}")
    }

    /// Interrupts what it is doing.
    pub(super) async fn interrupt(&self) {
        match self.interrupt_mode {
            InterruptMode::Signal => self.process.interrupt(),
            InterruptMode::Message => {
                let frames = self
                    .session
                    .encode(&self.next_id(), "interrupt_request", &json!({}));
                if let Err(error) = self.control.lock().await.send(&frames).await {
                    tracing::debug!(%error, "interrupting a kernel");
                }
            }
        }
    }

    /// Its process.
    pub(super) fn process(&self) -> &KernelProcess {
        &self.process
    }

    /// The channel beside the protocol, if this kernel has one.
    pub(super) fn side_channel(&self) -> Option<&SideChannel> {
        self.side_channel.as_ref()
    }
}

impl Drop for JupyterKernel {
    fn drop(&mut self) {
        for reader in &self.readers {
            reader.abort();
        }
        // A few sockets and a file; what cannot be removed now goes with the sandbox.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

// === impl Route ===

impl Route {
    fn begin(&self, id: String) -> mpsc::Receiver<KernelEvent> {
        let (sender, receiver) = mpsc::channel(EVENTS_WAITING_MAX);
        *self.lock() = Some((id, sender));
        receiver
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Listener>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: &str) -> Option<mpsc::Sender<KernelEvent>> {
        match &*self.lock() {
            Some((current, sender)) if current == id => Some(sender.clone()),
            _ => None,
        }
    }

    /// Passes on what arrives until the connection ends. `_held` keeps the sending half open.
    async fn read(self, mut reader: zmtp::Reader, _held: Option<Writer>) {
        while let Ok(frames) = reader.receive().await {
            let Some(message) = message::decode(frames) else {
                continue;
            };
            let Some(sender) = self.find(&message.parent) else {
                continue;
            };
            if let Some(event) = KernelEvent::from_message(message) {
                // The execution may have stopped listening.
                let _ = sender.send(event).await;
            }
        }
    }

    /// Ends the events of the running execution some time after the process has ended.
    async fn close_after(self, process: Arc<KernelProcess>) {
        process.ended().await;
        tokio::time::sleep(LAST_WORDS_WAIT).await;
        *self.lock() = None;
    }
}

async fn connect_when_up(endpoint: &Endpoint, kind: SocketKind) -> (zmtp::Reader, Writer) {
    // Bounded by the caller, who stops waiting when the process ends or time is up.
    loop {
        match zmtp::connect(endpoint, kind).await {
            Ok(connection) => return connection,
            Err(_) => tokio::time::sleep(CONNECT_INTERVAL).await,
        }
    }
}

/// The five channels, in the order of their ports.
#[derive(Debug, Clone, Copy)]
enum Channel {
    Shell = 0,
    IoPub = 1,
    Stdin = 2,
    Control = 3,
    Heartbeat = 4,
}

/// The files and addresses of a kernel that is about to start.
#[derive(Debug)]
struct Plan {
    connection_file: PathBuf,
    transport: Transport,
    /// Where the agent's launcher listens, if it starts this kernel.
    side_channel: Option<PathBuf>,
}

/// Python kernels listen on UNIX sockets, which nobody outside can reach; others know TCP only.
#[derive(Debug)]
enum Transport {
    Unix { prefix: PathBuf },
    Tcp { ports: [u16; 5] },
}

impl Plan {
    fn new(launch: &Launch<'_>) -> Result<Self, KernelError> {
        let is_ipykernel = ipykernel_argument(&launch.spec.argv).is_some();
        let transport = if is_ipykernel {
            Transport::Unix {
                prefix: launch.directory.join("socket"),
            }
        } else {
            Transport::Tcp {
                ports: free_ports().map_err(|source| KernelError::Prepare {
                    path: launch.directory.clone(),
                    source,
                })?,
            }
        };
        let plan = Self {
            connection_file: launch.directory.join("connection.json"),
            transport,
            side_channel: is_ipykernel.then(|| launch.directory.join("side-channel")),
        };
        plan.write_connection_file(launch)
            .map_err(|source| KernelError::Prepare {
                path: plan.connection_file.clone(),
                source,
            })?;
        Ok(plan)
    }

    fn write_connection_file(&self, launch: &Launch<'_>) -> io::Result<()> {
        let (transport, ip) = match &self.transport {
            Transport::Unix { prefix } => ("ipc", prefix.to_string_lossy().into_owned()),
            Transport::Tcp { .. } => ("tcp", String::from("127.0.0.1")),
        };
        let connection = json!({
            "transport": transport,
            "ip": ip,
            "shell_port": self.port(Channel::Shell),
            "iopub_port": self.port(Channel::IoPub),
            "stdin_port": self.port(Channel::Stdin),
            "control_port": self.port(Channel::Control),
            "hb_port": self.port(Channel::Heartbeat),
            "key": launch.key,
            "signature_scheme": "hmac-sha256",
            "kernel_name": launch.spec.name,
        });
        std::fs::write(&self.connection_file, connection.to_string())?;
        give_to(&self.connection_file, launch.account)
    }

    fn port(&self, channel: Channel) -> u16 {
        let number = channel as usize;
        match &self.transport {
            Transport::Unix { .. } => u16::try_from(number + 1).unwrap_or(u16::MAX),
            Transport::Tcp { ports } => ports[number],
        }
    }

    fn endpoint(&self, channel: Channel) -> Endpoint {
        let port = self.port(channel);
        match &self.transport {
            Transport::Unix { prefix } => {
                Endpoint::Unix(format!("{}-{port}", prefix.display()).into())
            }
            Transport::Tcp { .. } => Endpoint::Loopback(port),
        }
    }

    fn command(&self, launch: &Launch<'_>) -> Result<Command, KernelError> {
        let argv = arguments(launch, &self.connection_file);
        let mut command = Command::new(&argv[0]);
        command
            .args(&argv[1..])
            .env_clear()
            .envs(launch.environment)
            .envs(&launch.spec.env)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit());
        if let Some(path) = &self.side_channel {
            command
                .env("SANDHOLD_KERNEL_SIDE_CHANNEL", path)
                .env("SANDHOLD_KERNEL_PRELOAD", launch.preload.join(","));
        }
        children::run_as(&mut command, launch.account, launch.cwd).map_err(|source| {
            KernelError::Spawn {
                program: argv[0].clone(),
                source,
            }
        })?;
        Ok(command)
    }
}

/// Where `-m ipykernel_launcher` is in the command, if it is.
fn ipykernel_argument(argv: &[String]) -> Option<usize> {
    argv.windows(2).position(|pair| {
        pair[0] == "-m" && (pair[1] == "ipykernel_launcher" || pair[1] == "ipykernel")
    })
}

/// The command of the specification, with the agent's launcher in place of ipykernel's.
fn arguments(launch: &Launch<'_>, connection_file: &Path) -> Vec<String> {
    let mut argv = launch.spec.argv.clone();
    if let Some(at) = ipykernel_argument(&argv) {
        let launcher = launch.python_files.join("sandhold_kernel.py");
        argv.splice(at..at + 2, [launcher.to_string_lossy().into_owned()]);
    }
    let connection_file = connection_file.to_string_lossy();
    for argument in &mut argv {
        *argument = argument.replace("{connection_file}", &connection_file);
    }
    argv
}

/// Hands a file over, if the agent runs as root; else it is the user's already.
pub(super) fn give_to(path: &Path, account: &Account) -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(path, Some(account.uid), Some(account.gid))?;
    }
    Ok(())
}

/// Ports that nobody listens on now. Another process may take one before the kernel does; then
/// the kernel ends at once and the start fails, which is reported and can be tried again.
fn free_ports() -> io::Result<[u16; 5]> {
    let mut ports = [0; 5];
    let mut listeners = Vec::new();
    for port in &mut ports {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0))?;
        *port = listener.local_addr()?.port();
        listeners.push(listener);
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipykernel_is_started_by_the_agents_launcher() {
        let spec: KernelSpec = serde_json::from_value(json!({
            "argv": ["/usr/bin/python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        }))
        .unwrap();
        let account = Account {
            name: String::from("user"),
            uid: 1000,
            gid: 1000,
            groups: vec![],
            home: PathBuf::from("/home/user"),
            shell: PathBuf::from("/bin/bash"),
        };
        let launch = Launch {
            spec: &spec,
            account: &account,
            cwd: Path::new("/"),
            environment: &BTreeMap::new(),
            directory: PathBuf::from("/k"),
            python_files: Path::new("/p"),
            preload: &[],
            key: String::new(),
        };
        assert_eq!(
            arguments(&launch, Path::new("/k/c.json")),
            [
                "/usr/bin/python3",
                "/p/sandhold_kernel.py",
                "-f",
                "/k/c.json"
            ]
        );
    }

    #[tokio::test]
    async fn messages_of_an_earlier_execution_go_nowhere() {
        // BC-037
        let route = Route::default();
        let _first = route.begin(String::from("1"));
        let _second = route.begin(String::from("2"));
        assert!(route.find("1").is_none());
        assert!(route.find("2").is_some());
        assert!(route.find("").is_none());
    }

    #[test]
    fn five_ports_are_five_ports() {
        let ports = free_ports().unwrap();
        let different: std::collections::BTreeSet<_> = ports.iter().collect();
        assert_eq!(different.len(), 5);
        assert!(!different.contains(&0));
    }
}
