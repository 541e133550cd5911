//! One listener for the API and the gateway (architecture, decision 10).
//!
//! ```text
//!  accept ─▶ connection task ─▶ HTTP/1.1 or h2c ─▶ claims()? ─┬─ yes ─▶ gateway
//!     ▲           │                                           └─ no ──▶ API router
//!  shutdown ──────┴─▶ no new requests ─▶ drain ─▶ cut
//! ```
//!
//! Owns: the listener, one task per client connection, the once-a-second sweep, and the ear for
//! state changes of sandboxes.
//!
//! Invariants: at most `client_connections_max` connections at once, further ones wait in the
//! kernel's queue; a client that sends no complete head in time, or takes and gives no byte for
//! the idle timeout, is cut off; a panic in one connection ends that one only. After shutdown no
//! connection outlives `drain_timeout`.

use std::{
    convert::Infallible,
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::extract::ConnectInfo;
use http::{Request, Response, request::Parts};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::Service;

use crate::{
    answers::{Audience, Failure, answer},
    body::{BodyError, ReplyBody},
    config::GatewayConfig,
    forward::{ClientAddress, Gateway},
    gate::Rarely,
    metered::{Meter, Metered},
};

/// How long to wait after a failed accept; the usual cause is a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often kept connections are looked over.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// How long a connection that is being ended may take to say so.
const GOODBYE: Duration = Duration::from_secs(2);
/// The read and write buffer of an HTTP/1 client connection, in bytes.
const CLIENT_BUFFER_BYTES: usize = 256 * 1024;
/// What one HTTP/2 stream may have on its way to us, in bytes; a connection four times that.
const HTTP2_WINDOW_BYTES: u32 = 512 * 1024;
/// How often a silent HTTP/2 client is asked whether it is still there.
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(30);

/// How the server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// Every request was answered.
    Completely,
    /// This many connections were cut after the drain time.
    Cut {
        /// How many.
        connections: usize,
    },
}

/// Serves API and gateway on one listener until `shutdown`, then lets requests end.
pub async fn serve(
    listener: TcpListener,
    api: axum::Router,
    gateway: Gateway,
    shutdown: impl Future<Output = ()> + Send,
) -> Drained {
    let server = Server {
        api,
        gateway,
        places: Arc::new(Semaphore::new(0)),
        stopping: CancellationToken::new(),
        cutting: CancellationToken::new(),
        connections: TaskTracker::new(),
    };
    let config = server.gateway.config().clone();
    server.places.add_permits(config.client_connections_max);
    let mut shutdown = pin!(shutdown);
    let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
    let mut changes = server.gateway.changes();
    loop {
        tokio::select! {
            () = &mut shutdown => break,
            _ = sweep.tick() => server.gateway.sweep(),
            change = changes.next() => server.gateway.note(change),
            () = server.accept(&listener) => {}
        }
    }
    drop(listener);
    server.drain(&config).await
}

struct Server {
    api: axum::Router,
    gateway: Gateway,
    places: Arc<Semaphore>,
    stopping: CancellationToken,
    cutting: CancellationToken,
    connections: TaskTracker,
}

impl Server {
    /// Takes one connection, when there is a place for it.
    async fn accept(&self, listener: &TcpListener) {
        let Ok(place) = Arc::clone(&self.places).acquire_owned().await else {
            return;
        };
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                return;
            }
        };
        let connection = Arc::new(ClientConnection {
            api: self.api.clone(),
            gateway: self.gateway.clone(),
            address: ClientAddress::new(address),
            pulse: Arc::new(Pulse::new()),
        });
        let (stopping, cutting) = (self.stopping.clone(), self.cutting.clone());
        self.connections.spawn(async move {
            tokio::select! {
                biased;
                () = connection.run(stream, stopping) => {}
                () = Rarely::new(cutting.cancelled()) => {}
            }
            drop(place);
        });
    }

    async fn drain(&self, config: &GatewayConfig) -> Drained {
        self.stopping.cancel();
        self.connections.close();
        let drained = tokio::time::timeout(config.drain_timeout, self.connections.wait()).await;
        let connections = self.connections.len();
        self.cutting.cancel();
        self.gateway.close_tunnels().await;
        self.connections.wait().await;
        match drained {
            Ok(()) => Drained::Completely,
            Err(_) => Drained::Cut { connections },
        }
    }
}

struct ClientConnection {
    api: axum::Router,
    gateway: Gateway,
    address: ClientAddress,
    pulse: Arc<Pulse>,
}

impl ClientConnection {
    async fn run(self: Arc<Self>, stream: TcpStream, stopping: CancellationToken) {
        let config = self.gateway.config();
        // Small frames must not wait for each other; without the option it still works.
        let _ = stream.set_nodelay(true);
        let io = TokioIo::new(Metered::new(stream, Arc::clone(&self.pulse)));
        let connection = Arc::clone(&self);
        let service = service_fn(move |request| {
            let under_way = UnderWay::begin(&connection.pulse);
            Arc::clone(&connection).dispatch(request, under_way)
        });
        let builder = http_builder(config);
        let connection = builder.serve_connection_with_upgrades(io, service);
        let mut connection = pin!(connection);
        let told = Rarely::new(async {
            tokio::select! {
                () = self.pulse.missed(config) => GOODBYE,
                // The server's own drain time bounds it.
                () = stopping.cancelled() => Duration::MAX,
            }
        });
        let goodbye = tokio::select! {
            biased;
            ended = connection.as_mut() => return note_end(ended),
            goodbye = told => goodbye,
        };
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            ended = connection.as_mut() => note_end(ended),
            () = tokio::time::sleep(goodbye) => {}
            () = self.pulse.missed(config), if goodbye > GOODBYE => {}
        }
    }

    async fn dispatch(
        self: Arc<Self>,
        request: Request<Incoming>,
        under_way: UnderWay,
    ) -> Result<Response<ReplyBody>, Infallible> {
        let (mut head, body) = request.into_parts();
        let head_bytes_max = self.gateway.config().header_bytes_max;
        if head_bytes(&head) > u64::from(head_bytes_max) {
            let refused = Failure::HeadTooLarge(head_bytes_max);
            let response = answer(&refused, Audience::of(&head.headers));
            return Ok(response.map(|body| body.until_dropped(under_way)));
        }
        let response = match self.gateway.claims(&head) {
            Some(target) => {
                head.extensions.insert(self.address.clone());
                let request = Request::from_parts(head, body);
                self.gateway.handle(target, request).await
            }
            None => {
                head.extensions.insert(ConnectInfo(self.address.socket()));
                let request = Request::from_parts(head, axum::body::Body::new(body));
                self.api.clone().call(request).await?.map(ReplyBody::api)
            }
        };
        Ok(response.map(|body| body.until_dropped(under_way)))
    }
}

fn note_end(ended: Result<(), BodyError>) {
    if let Err(error) = ended {
        tracing::trace!(%error, "client connection ended");
    }
}

/// The target and the headers, as they are written in HTTP/1. Its reader takes what fits its
/// buffer, which is as large as it is for the sake of bodies.
fn head_bytes(head: &Parts) -> u64 {
    let target = head.uri.path_and_query().map_or(0, |p| p.as_str().len())
        + head.uri.authority().map_or(0, |a| a.as_str().len());
    let headers = head.headers.iter();
    let fields = headers.map(|(name, value)| name.as_str().len() + value.len() + FIELD_MARKS);
    (target + fields.sum::<usize>()) as u64
}

/// A colon, a space and the end of the line.
const FIELD_MARKS: usize = 4;

fn http_builder(config: &GatewayConfig) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // The pulse watches this, with one timer for a connection instead of one for a request.
        .header_read_timeout(None)
        .max_buf_size(CLIENT_BUFFER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .enable_connect_protocol()
        .max_concurrent_streams(config.http2_streams_max)
        .max_header_list_size(config.header_bytes_max)
        .initial_stream_window_size(HTTP2_WINDOW_BYTES)
        .initial_connection_window_size(4 * HTTP2_WINDOW_BYTES)
        .keep_alive_interval(HTTP2_PING_INTERVAL)
        .keep_alive_timeout(HTTP2_PING_INTERVAL);
    builder
}

/// Signs of life of a client connection.
#[derive(Debug)]
pub(crate) struct Pulse {
    started: Instant,
    under_way: AtomicUsize,
    /// When the last request ended, in milliseconds after `started`.
    rests_since_ms: AtomicU64,
    /// When the last byte moved, in milliseconds after `started`.
    last_ms: AtomicU64,
}

/// A request whose answer has not been sent to its end.
#[derive(Debug)]
pub(crate) struct UnderWay(Arc<Pulse>);

impl UnderWay {
    fn begin(pulse: &Arc<Pulse>) -> Self {
        pulse.under_way.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(pulse))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0
            .rests_since_ms
            .store(self.0.now_ms(), Ordering::Relaxed);
        self.0.under_way.fetch_sub(1, Ordering::Release);
    }
}

impl Pulse {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            under_way: AtomicUsize::new(0),
            rests_since_ms: AtomicU64::new(0),
            last_ms: AtomicU64::new(0),
        }
    }

    /// Returns when no request came in time, or no byte for the idle timeout.
    async fn missed(&self, config: &GatewayConfig) {
        loop {
            let due = self.due(config);
            if Instant::now() >= due {
                return;
            }
            tokio::time::sleep_until(due).await;
        }
    }

    /// When the connection is to be ended, if nothing happens until then.
    fn due(&self, config: &GatewayConfig) -> Instant {
        let after =
            |ms: &AtomicU64| self.started + Duration::from_millis(ms.load(Ordering::Relaxed));
        let idle = after(&self.last_ms) + config.idle_timeout;
        if self.under_way.load(Ordering::Acquire) > 0 {
            return idle;
        }
        idle.min(after(&self.rests_since_ms) + config.header_read_timeout)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Meter for Pulse {
    fn moved(&self) {
        self.last_ms.store(self.now_ms(), Ordering::Relaxed);
    }
}
