//! The listeners and the connections that are open on them.
//!
//! ```text
//!   accept ──> connection (token) ──> router, with [`ConnectionHandle`] in the extensions
//!                    ^ close: at /init and at /quiesce, every connection but the caller's
//! ```
//!
//! Invariants:
//! - After an `/init` nobody talks over a connection that was opened before it, except the host
//!   that made the call. A copy of a sandbox must not answer the clients of the original.
//! - After a `/quiesce` no connection but the host's own is open. One that is open while memory is
//!   captured is reset by the engine in the middle of writing the image; the event that this makes
//!   can tear the list of ready descriptors that is being written, and what was waited for beside
//!   it is never reported again after a restore (gVisor issue 13920).

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Notify,
};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// Connections at once, on both ports together. More are closed as they come.
pub const CONNECTIONS_MAX: usize = 1024;
/// How long a client may take to send the head of a request.
const HEADER_READ_MAX: Duration = Duration::from_secs(60);
/// Headers of one request: metadata of a file comes in them.
const HEADERS_MAX: usize = 512;
/// The pause after a failed accept, which is nearly always a lack of descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// All open connections. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Connections {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    next_id: AtomicU64,
    /// What closes each of them.
    open: Mutex<HashMap<u64, CancellationToken>>,
    /// Told of each connection that is gone.
    gone: Notify,
}

/// Which connection a request came over; every request has it in its extensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionHandle(u64);

/// Keeps a connection in the list while it lives.
#[derive(Debug)]
pub struct OpenConnection {
    connections: Connections,
    handle: ConnectionHandle,
    close: CancellationToken,
}

impl OpenConnection {
    /// Resolves when the connection must be closed at once.
    pub async fn closed(&self) {
        self.close.cancelled().await;
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.connections.lock().remove(&self.handle.0);
        self.connections.shared.gone.notify_waiters();
    }
}

impl Connections {
    /// Adds a connection, unless there are too many.
    #[must_use]
    pub fn open(&self) -> Option<OpenConnection> {
        let mut open = self.lock();
        if open.len() >= CONNECTIONS_MAX {
            return None;
        }
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let close = CancellationToken::new();
        open.insert(id, close.clone());
        Some(OpenConnection {
            connections: self.clone(),
            handle: ConnectionHandle(id),
            close,
        })
    }

    /// Closes every other connection at once.
    pub fn close_others(&self, but: Option<ConnectionHandle>) {
        for (id, close) in &*self.lock() {
            if !is(*id, but) {
                close.cancel();
            }
        }
    }

    /// Resolves when no other connection is open any more.
    pub async fn others_gone(&self, but: Option<ConnectionHandle>) {
        loop {
            let gone = self.shared.gone.notified();
            tokio::pin!(gone);
            // From here on it hears of each, so that none can go unnoticed between look and wait.
            gone.as_mut().enable();
            if self.lock().keys().all(|id| is(*id, but)) {
                return;
            }
            gone.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, CancellationToken>> {
        self.shared
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn is(id: u64, handle: Option<ConnectionHandle>) -> bool {
    handle == Some(ConnectionHandle(id))
}

/// Listens on the address.
///
/// # Errors
/// The address is taken or not ours.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Answers on this listener for ever, HTTP/1.1 and HTTP/2 without TLS.
pub async fn serve(listener: TcpListener, router: Router, connections: Connections) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Small answers must not wait for more to send. A connection without it works.
                let _ = stream.set_nodelay(true);
                if let Some(open) = connections.open() {
                    tokio::spawn(serve_connection(stream, router.clone(), open));
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, router: Router, open: OpenConnection) {
    let handle = open.handle;
    let service = hyper::service::service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(handle);
        let router = router.clone();
        async move {
            let answer: Result<_, Infallible> = router.oneshot(request.map(Body::new)).await;
            answer
        }
    });
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_MAX)
        .max_headers(HEADERS_MAX);
    builder.http2().timer(TokioTimer::new());
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::select! {
        // Failures of a connection are its client's affair.
        _ = connection => {}
        () = open.close.cancelled() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_life_closes_all_connections_but_the_callers() {
        let connections = Connections::default();
        let caller = connections.open().unwrap();
        let other = connections.open().unwrap();
        connections.close_others(Some(caller.handle));
        assert!(other.close.is_cancelled());
        assert!(!caller.close.is_cancelled());
        drop(other);
        assert_eq!(connections.lock().len(), 1);
    }

    #[test]
    fn connections_are_limited() {
        let connections = Connections::default();
        let open: Vec<_> = std::iter::from_fn(|| connections.open()).collect();
        assert_eq!(open.len(), CONNECTIONS_MAX);
    }
}
