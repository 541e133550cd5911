//! A gateway with sandboxes that are servers in this process.

use std::{
    collections::HashMap,
    convert::Infallible,
    future::Future,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response, header};
use http_body_util::{BodyExt, Empty, Full, combinators::BoxBody};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use sandhold_gateway::{Drained, Gateway, GatewayConfig, serve};
use sandhold_platform::{
    ActivityKind, AutoResume, DialError, Hold, Holds, Route, RouteLookup, Routes, SandboxView,
    StateChange, WakeError,
};
use sandhold_types::{Deadline, EndReason, SandboxId, SandboxState, SystemClock};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, broadcast, oneshot},
    task::JoinHandle,
};

pub(crate) use crate::view::{ACCESS_TOKEN, ID, view};

pub(crate) const OTHER_ID: &str = "zzzzzzzzzz0123456789";

pub(crate) type AnyBody = BoxBody<Bytes, Infallible>;

pub(crate) fn id() -> SandboxId {
    ID.parse().unwrap()
}

#[derive(Debug, Clone)]
enum Whereabouts {
    Live(Arc<SandboxView>),
    NotLive(Arc<SandboxView>),
    Ended(EndReason),
}

/// Sandboxes whose ports are sockets of this machine.
#[derive(Debug)]
pub(crate) struct FakeRoutes {
    sandboxes: Mutex<HashMap<SandboxId, Whereabouts>>,
    ports: Mutex<HashMap<u16, SocketAddr>>,
    pub(crate) dials: AtomicUsize,
    /// The next dial finds the sandbox in its next life.
    pub(crate) moves_on: AtomicBool,
    pub(crate) request_touches: AtomicUsize,
    pub(crate) stream_touches: AtomicUsize,
    /// Who needs the sandbox awake.
    pub(crate) holds: Arc<Holds>,
    /// Its processes are frozen until somebody holds it.
    pub(crate) frozen: AtomicBool,
    pub(crate) thaws: AtomicUsize,
    /// Requests that asked for it to be woken.
    pub(crate) wakes: AtomicUsize,
    /// What waking it comes to.
    waking: Mutex<Option<Result<SandboxView, WakeError>>>,
    /// Each wake-up takes one.
    pub(crate) wake_turns: Semaphore,
    changes: broadcast::Sender<StateChange>,
}

/// State changes that a listener may be behind.
const CHANGES_MAX: usize = 4;

impl FakeRoutes {
    fn new() -> Self {
        Self {
            sandboxes: Mutex::default(),
            ports: Mutex::default(),
            dials: AtomicUsize::default(),
            moves_on: AtomicBool::default(),
            request_touches: AtomicUsize::default(),
            stream_touches: AtomicUsize::default(),
            holds: Arc::default(),
            frozen: AtomicBool::default(),
            thaws: AtomicUsize::default(),
            wakes: AtomicUsize::default(),
            waking: Mutex::default(),
            wake_turns: Semaphore::new(Semaphore::MAX_PERMITS >> 1),
            changes: broadcast::Sender::new(CHANGES_MAX),
        }
    }

    /// It sleeps, and waking it comes to `outcome`.
    pub(crate) fn asleep_until_woken(&self, outcome: Result<SandboxView, WakeError>) {
        let asleep = SandboxView {
            auto_resume: AutoResume::On,
            ..view(ID, 1)
        };
        self.put_in_state(asleep, SandboxState::Paused);
        *self.waking.lock().unwrap() = Some(outcome);
    }

    /// From now on wake-ups wait for [`Self::wake_turns`].
    pub(crate) fn hold_wakes(&self) {
        self.wake_turns.forget_permits(Semaphore::MAX_PERMITS);
    }

    /// Pushes a state change.
    pub(crate) fn tell(&self, state: SandboxState, incarnation: u64) {
        let _ = self.changes.send(StateChange {
            sandbox: id(),
            state,
            incarnation: sandhold_types::Incarnation(incarnation),
        });
    }

    pub(crate) fn put(&self, view: SandboxView) {
        let id = view.id.clone();
        let mut sandboxes = self.sandboxes.lock().unwrap();
        sandboxes.insert(id, Whereabouts::Live(Arc::new(view)));
    }

    pub(crate) fn put_not_live(&self, state: SandboxState) {
        self.put_in_state(view(ID, 1), state);
    }

    /// It is in a state in which it takes no requests.
    pub(crate) fn put_in_state(&self, mut view: SandboxView, state: SandboxState) {
        view.state = state;
        let mut sandboxes = self.sandboxes.lock().unwrap();
        sandboxes.insert(view.id.clone(), Whereabouts::NotLive(Arc::new(view)));
    }

    pub(crate) fn end(&self, reason: EndReason) {
        let mut sandboxes = self.sandboxes.lock().unwrap();
        sandboxes.insert(id(), Whereabouts::Ended(reason));
    }

    pub(crate) fn open_port(&self, port: u16, address: SocketAddr) {
        self.ports.lock().unwrap().insert(port, address);
    }

    pub(crate) fn dials(&self) -> usize {
        self.dials.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Routes for FakeRoutes {
    fn route(&self, id: &SandboxId) -> RouteLookup {
        match self.sandboxes.lock().unwrap().get(id) {
            None => RouteLookup::Unknown,
            Some(Whereabouts::Live(sandbox)) => RouteLookup::Live(Route {
                sandbox: Arc::clone(sandbox),
            }),
            Some(Whereabouts::NotLive(sandbox)) => RouteLookup::NotLive(Arc::clone(sandbox)),
            Some(Whereabouts::Ended(reason)) => RouteLookup::Ended(reason.clone()),
        }
    }

    fn reachable(&self) -> Vec<Arc<SandboxView>> {
        let sandboxes = self.sandboxes.lock().unwrap();
        let reachable = sandboxes
            .values()
            .filter_map(|whereabouts| match whereabouts {
                Whereabouts::Live(sandbox) | Whereabouts::NotLive(sandbox) => {
                    Some(Arc::clone(sandbox))
                }
                Whereabouts::Ended(_) => None,
            });
        reachable.collect()
    }

    async fn wake(&self, id: &SandboxId, deadline: Deadline) -> Result<Route, WakeError> {
        self.wakes.fetch_add(1, Ordering::SeqCst);
        let until = deadline.instant().into();
        let turn = tokio::time::timeout_at(until, self.wake_turns.acquire()).await;
        let late = WakeError::Late {
            state: SandboxState::Resuming,
        };
        turn.map_err(|_| late)?.unwrap().forget();
        if let RouteLookup::Live(route) = self.route(id) {
            return Ok(route);
        }
        let outcome = self.waking.lock().unwrap().clone();
        let sandbox = outcome.unwrap_or(Err(WakeError::NotAllowed))?;
        self.put(sandbox.clone());
        Ok(Route {
            sandbox: Arc::new(sandbox),
        })
    }

    fn try_hold(&self, _: &Route) -> Option<Hold> {
        let hold = self.holds.hold();
        (!self.frozen.load(Ordering::SeqCst)).then_some(hold)
    }

    async fn hold(&self, _: &Route) -> Result<Hold, DialError> {
        let hold = self.holds.hold();
        if self.frozen.swap(false, Ordering::SeqCst) {
            self.thaws.fetch_add(1, Ordering::SeqCst);
        }
        Ok(hold)
    }

    fn changes(&self) -> broadcast::Receiver<StateChange> {
        self.changes.subscribe()
    }

    async fn dial(
        &self,
        route: &Route,
        port: u16,
        _deadline: Deadline,
    ) -> Result<TcpStream, DialError> {
        if self.moves_on.swap(false, Ordering::SeqCst) {
            self.put(view(ID, route.incarnation().0 + 1));
        }
        match self.route(&route.sandbox.id) {
            RouteLookup::Live(now) if now.incarnation() == route.incarnation() => {}
            _ => return Err(DialError::Gone),
        }
        let address = self.ports.lock().unwrap().get(&port).copied();
        let address = address.ok_or(DialError::PortClosed { port })?;
        let stream = TcpStream::connect(address)
            .await
            .map_err(|_| DialError::PortClosed { port })?;
        self.dials.fetch_add(1, Ordering::SeqCst);
        Ok(stream)
    }

    fn touch(&self, _id: &SandboxId, kind: ActivityKind) {
        let counter = match kind {
            ActivityKind::Request => &self.request_touches,
            ActivityKind::Stream => &self.stream_touches,
        };
        counter.fetch_add(1, Ordering::SeqCst);
    }
}

/// A gateway that serves, with one sandbox.
pub(crate) struct World {
    pub(crate) routes: Arc<FakeRoutes>,
    pub(crate) gateway: Gateway,
    pub(crate) address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    server: JoinHandle<Drained>,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(GatewayConfig::default()).await
    }

    pub(crate) async fn with(config: GatewayConfig) -> Self {
        let routes = Arc::new(FakeRoutes::new());
        routes.put(view(ID, 1));
        let shared: Arc<dyn Routes> = Arc::clone(&routes) as _;
        let gateway = Gateway::new(shared, Arc::new(SystemClock), config);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let api = axum::Router::new().fallback(|| async { "the API" });
        let (stop, stopped) = oneshot::channel();
        let server = tokio::spawn(serve(listener, api, gateway.clone(), async {
            let _ = stopped.await;
        }));
        Self {
            routes,
            gateway,
            address,
            stop: Some(stop),
            server,
        }
    }

    /// Opens `port` of the sandbox with a server that answers each request by `answer`.
    pub(crate) async fn serve<F, Fut>(&self, port: u16, answer: F) -> Served
    where
        F: Fn(Request<Incoming>) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = Response<AnyBody>> + Send + 'static,
    {
        let (address, served) = http_server(answer).await;
        self.routes.open_port(port, address);
        served
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.address).await
    }

    pub(crate) fn stop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
    }

    pub(crate) async fn drained(self) -> Drained {
        self.server.await.unwrap()
    }
}

/// How often a server was connected to.
#[derive(Clone, Default)]
pub(crate) struct Served {
    pub(crate) connections: Arc<AtomicUsize>,
    pub(crate) closed: Arc<AtomicUsize>,
}

impl Served {
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    pub(crate) fn closed(&self) -> usize {
        self.closed.load(Ordering::SeqCst)
    }
}

pub(crate) async fn http_server<F, Fut>(answer: F) -> (SocketAddr, Served)
where
    F: Fn(Request<Incoming>) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = Response<AnyBody>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let served = Served::default();
    let counters = served.clone();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            counters.connections.fetch_add(1, Ordering::SeqCst);
            let closed = Arc::clone(&counters.closed);
            let answer = answer.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let answered = answer(request);
                    async move { Ok::<_, Infallible>(answered.await) }
                });
                let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let _ = builder
                    .serve_connection_with_upgrades(TokioIo::new(stream), service)
                    .await;
                closed.fetch_add(1, Ordering::SeqCst);
            });
        }
    });
    (address, served)
}

/// Answers with what arrived: the request line, the headers, then the body.
pub(crate) async fn echo(request: Request<Incoming>) -> Response<AnyBody> {
    let (head, body) = request.into_parts();
    let mut text = format!("{} {}\n", head.method, head.uri);
    for (name, value) in &head.headers {
        text += &format!("{name}: {}\n", value.to_str().unwrap());
    }
    let body = body.collect().await.unwrap().to_bytes();
    text += "\n";
    text += std::str::from_utf8(&body).unwrap();
    Response::new(whole(text))
}

pub(crate) fn whole(bytes: impl Into<Bytes>) -> AnyBody {
    Full::new(bytes.into()).boxed()
}

/// A body whose length is not told beforehand, so that it can have trailers on HTTP/1.1.
pub(crate) fn unsized_body(text: &'static str) -> AnyBody {
    let frame = Ok(http_body::Frame::data(Bytes::from_static(text.as_bytes())));
    http_body_util::StreamBody::new(tokio_stream::iter([frame])).boxed()
}

pub(crate) fn nothing() -> AnyBody {
    Empty::new().boxed()
}

/// One HTTP/1.1 connection to the gateway.
pub(crate) struct Client {
    pub(crate) sender: http1::SendRequest<AnyBody>,
    /// Dropping it closes the socket.
    pub(crate) connection: JoinHandle<()>,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(async move {
            let _ = connection.with_upgrades().await;
        });
        Self { sender, connection }
    }

    pub(crate) async fn send(&mut self, request: Request<AnyBody>) -> Response<Incoming> {
        self.sender.ready().await.unwrap();
        self.sender.send_request(request).await.unwrap()
    }

    pub(crate) async fn fetch(&mut self, request: Request<AnyBody>) -> Answer {
        Answer::of(self.send(request).await).await
    }

    pub(crate) async fn get(&mut self, port: u16, path: &str) -> Answer {
        self.fetch(get(port, path)).await
    }
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: http::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) async fn of(response: Response<Incoming>) -> Self {
        let (head, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        Self {
            status: head.status.as_u16(),
            headers: head.headers,
            text: String::from_utf8_lossy(&bytes).into_owned(),
        }
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("not JSON: {}", self.text))
    }

    /// The header as an echoing server saw it.
    pub(crate) fn saw(&self, name: &str) -> Option<&str> {
        let prefix = format!("{name}: ");
        self.text
            .lines()
            .find_map(|line| line.strip_prefix(&prefix))
    }
}

pub(crate) fn host(port: u16) -> String {
    format!("{port}-{ID}.sandbox-domain.test")
}

pub(crate) fn request(port: u16, method: &str, path: &str) -> http::request::Builder {
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, host(port))
}

pub(crate) fn get(port: u16, path: &str) -> Request<AnyBody> {
    request(port, "GET", path).body(nothing()).unwrap()
}

pub(crate) fn post(port: u16, path: &str, body: impl Into<Bytes>) -> Request<AnyBody> {
    request(port, "POST", path).body(whole(body)).unwrap()
}

pub(crate) async fn http2_client(address: SocketAddr) -> http2::SendRequest<AnyBody> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(async move {
        let _ = connection.await;
    });
    sender
}

/// Waits until `is` holds; a condition that never does fails the test.
pub(crate) async fn eventually(what: &str, is: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(tokio::time::Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A server that does with each connection what it likes; it closes when `serve` returns.
pub(crate) async fn raw_server<F, Fut>(serve: F) -> SocketAddr
where
    F: Fn(TcpStream) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve(stream));
        }
    });
    address
}

/// Reads up to the end of a head and returns it.
pub(crate) async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

pub(crate) async fn write(stream: &mut TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes).await;
}
