//! One listener for the API and the gateway (architecture, decision 10).
//!
//! ```text
//!  accept ─▶ connection task ─▶ HTTP/1.1 or h2c ─▶ claims()? ─┬─ yes ─▶ gateway
//!     ▲           │                                           └─ no ──▶ API router
//!  shutdown ──────┴─▶ no new requests ─▶ drain ─▶ cut
//! ```
//!
//! Owns: the listener, one task per client connection, and the once-a-second sweep.
//!
//! Invariants: at most `client_connections_max` connections at once, further ones wait in the
//! kernel's queue; a client that sends no complete head in time, or takes and gives no byte for
//! the idle timeout, is cut off; a panic in one connection ends that one only. After shutdown no
//! connection outlives `drain_timeout`.

use std::{
    convert::Infallible,
    future::Future,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::extract::ConnectInfo;
use http::{Request, Response};
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
    body::ReplyBody,
    config::GatewayConfig,
    forward::{ClientAddress, Gateway},
    metered::{Meter, Metered},
};

/// How long to wait after a failed accept; the usual cause is a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often kept connections are looked over.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
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
    loop {
        tokio::select! {
            () = &mut shutdown => break,
            _ = sweep.tick() => server.gateway.sweep(),
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
        let connection = ClientConnection {
            api: self.api.clone(),
            gateway: self.gateway.clone(),
            address,
            stopping: self.stopping.clone(),
        };
        let cutting = self.cutting.clone();
        self.connections.spawn(async move {
            tokio::select! {
                () = connection.run(stream) => {}
                () = cutting.cancelled() => {}
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

#[derive(Clone)]
struct ClientConnection {
    api: axum::Router,
    gateway: Gateway,
    address: SocketAddr,
    stopping: CancellationToken,
}

impl ClientConnection {
    async fn run(self, stream: TcpStream) {
        let config = self.gateway.config().clone();
        let _ = stream.set_nodelay(true);
        let pulse = Arc::new(Pulse::new());
        let io = TokioIo::new(Metered::new(stream, Arc::clone(&pulse)));
        let stopping = self.stopping.clone();
        let service = {
            let pulse = Arc::clone(&pulse);
            service_fn(move |request| {
                pulse.has_request.store(true, Ordering::Relaxed);
                self.clone().dispatch(request)
            })
        };
        let builder = http_builder(&config);
        let connection = builder.serve_connection_with_upgrades(io, service);
        let mut connection = pin!(connection);
        let mut stop = pin!(stopping.cancelled());
        let mut is_stopping = false;
        loop {
            tokio::select! {
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::trace!(%error, "client connection ended");
                    }
                    return;
                }
                () = pulse.missed(&config) => return,
                () = &mut stop, if !is_stopping => {
                    is_stopping = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }

    async fn dispatch(
        mut self,
        request: Request<Incoming>,
    ) -> Result<Response<ReplyBody>, Infallible> {
        let (mut head, body) = request.into_parts();
        let target = self.gateway.claims(&head);
        if let Some(target) = target {
            head.extensions.insert(ClientAddress(self.address));
            let request = Request::from_parts(head, body);
            return Ok(self.gateway.handle(target, request).await);
        }
        head.extensions.insert(ConnectInfo(self.address));
        let request = Request::from_parts(head, axum::body::Body::new(body));
        let response = self.api.call(request).await?;
        Ok(response.map(ReplyBody::api))
    }
}

fn http_builder(config: &GatewayConfig) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(config.header_read_timeout)
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
struct Pulse {
    started: Instant,
    has_request: AtomicBool,
    /// Milliseconds after `started`.
    last_ms: AtomicU64,
}

impl Pulse {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            has_request: AtomicBool::new(false),
            last_ms: AtomicU64::new(0),
        }
    }

    /// Returns when there was no first request in time, or no byte for the idle timeout.
    async fn missed(&self, config: &GatewayConfig) {
        loop {
            let due = self.due(config);
            if Instant::now() >= due {
                return;
            }
            tokio::time::sleep_until(due).await;
        }
    }

    /// When the connection is to be cut, if nothing happens until then.
    fn due(&self, config: &GatewayConfig) -> Instant {
        let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        let idle = self.started + last + config.idle_timeout;
        if self.has_request.load(Ordering::Relaxed) {
            idle
        } else {
            idle.min(self.started + config.header_read_timeout)
        }
    }
}

impl Meter for Pulse {
    fn moved(&self) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(now, Ordering::Relaxed);
    }
}
