//! An open connection to a port of a sandbox, and who drives it.
//!
//! ```text
//!   open ──▶ Inline ───────────── used, kept, used again ──▶ Ended
//!              └─ detach ──▶ Task  (upload still under way, tunnel)
//! ```
//!
//! hyper splits a connection into a handle for requests and a future that does the reading and
//! writing. The usual task for that future costs two switches between tasks, often between
//! processors, for each message; that is more than everything else the gateway does. So the future
//! is polled by whoever waits for its result: [`Connection::send`], then the body of the answer.
//!
//! Invariants: as long as a connection is `Inline`, whoever holds it polls it while waiting for it;
//! when bytes may have to flow with nobody waiting (an upload that goes on under an answer, an
//! upgraded connection), it is detached first. Dropping a connection closes its socket. When the
//! life of the sandbox that it leads to is over, waiting on it ends: its other end is gone without
//! having said so.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
};

use http::{Request, Response};
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use sandhold_types::Incarnation;
use tokio::net::TcpStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{body::UploadBody, gate::Gate};

/// The read and write buffer, in bytes.
const BUFFER_BYTES: usize = 256 * 1024;

/// Which version of HTTP the server in the sandbox is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wire {
    /// HTTP/1.1, one request at a time.
    Http1,
    /// HTTP/2 with prior knowledge, for gRPC, which knows nothing else.
    Http2,
}

/// What a connection is to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) incarnation: Incarnation,
    pub(crate) port: u16,
    pub(crate) wire: Wire,
}

/// An open connection to one port of one incarnation of a sandbox.
#[derive(Debug)]
pub(crate) struct Connection {
    sender: Sender,
    driver: Driver,
    gate: Gate,
    endpoint: Endpoint,
    life: CancellationToken,
}

/// Why there is no answer to a request.
#[derive(Debug)]
pub(crate) enum SendError {
    /// Nothing of it was sent; here it is again.
    Unsent(Box<Request<UploadBody>>),
    /// The connection failed.
    Failed(hyper::Error),
    /// The life of the sandbox ended meanwhile.
    Cut,
}

impl From<TrySendError<Request<UploadBody>>> for SendError {
    fn from(mut error: TrySendError<Request<UploadBody>>) -> Self {
        match error.take_message() {
            Some(request) => Self::Unsent(Box::new(request)),
            None => Self::Failed(error.into_error()),
        }
    }
}

#[derive(Debug)]
enum Sender {
    Http1(http1::SendRequest<UploadBody>),
    Http2(http2::SendRequest<UploadBody>),
}

type Http1Future = Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>;

enum Driver {
    Inline(Http1Future),
    Task(#[expect(dead_code, reason = "ends the task when dropped")] AbortOnDropHandle<()>),
    Ended,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Inline(_) => "Inline",
            Self::Task(_) => "Task",
            Self::Ended => "Ended",
        })
    }
}

impl Driver {
    /// Reads and writes what can be without waiting.
    fn poll(&mut self, cx: &mut Context<'_>) {
        if let Self::Inline(future) = self
            && let Poll::Ready(result) = future.as_mut().poll(cx)
        {
            if let Err(error) = result {
                tracing::trace!(%error, "connection to a sandbox ended");
            }
            *self = Self::Ended;
        }
    }
}

impl Connection {
    /// Takes over a fresh socket, until `life` ends.
    pub(crate) async fn open(
        stream: TcpStream,
        endpoint: Endpoint,
        life: CancellationToken,
    ) -> hyper::Result<Self> {
        let io = TokioIo::new(stream);
        let (sender, driver) = match endpoint.wire {
            Wire::Http1 => {
                let (sender, connection) = http1::Builder::new()
                    .max_buf_size(BUFFER_BYTES)
                    // Simple servers compare names letter by letter, and know them like this.
                    .title_case_headers(true)
                    .handshake(io)
                    .await?;
                let driver = Driver::Inline(Box::pin(connection.with_upgrades()));
                (Sender::Http1(sender), driver)
            }
            Wire::Http2 => {
                let (sender, connection) = http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .handshake(io)
                    .await?;
                let task = tokio::spawn(async move {
                    if let Err(error) = connection.await {
                        tracing::trace!(%error, "connection to a sandbox ended");
                    }
                });
                (
                    Sender::Http2(sender),
                    Driver::Task(AbortOnDropHandle::new(task)),
                )
            }
        };
        Ok(Self {
            sender,
            driver,
            gate: Gate::new(),
            endpoint,
            life,
        })
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// What ends with the sandbox's present life.
    pub(crate) fn life(&self) -> &CancellationToken {
        &self.life
    }

    /// Sends a request; if nothing of it was sent, the error gives it back.
    pub(crate) async fn send(
        &mut self,
        request: Request<UploadBody>,
    ) -> Result<Response<Incoming>, SendError> {
        let Self {
            sender,
            driver,
            gate,
            life,
            ..
        } = self;
        let exchange = async {
            match sender {
                Sender::Http1(sender) => {
                    let mut answer = pin!(sender.try_send_request(request));
                    poll_fn(|cx| {
                        gate.poll(cx, |cx| {
                            driver.poll(cx);
                            answer.as_mut().poll(cx)
                        })
                    })
                    .await
                }
                Sender::Http2(sender) => sender.try_send_request(request).await,
            }
        };
        tokio::select! {
            biased;
            answered = exchange => answered.map_err(SendError::from),
            () = life.cancelled() => Err(SendError::Cut),
        }
    }

    /// Polls for something that comes over this connection.
    pub(crate) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let driver = &mut self.driver;
        match driver {
            Driver::Inline(_) => self.gate.poll(cx, |cx| {
                driver.poll(cx);
                poll(cx)
            }),
            Driver::Task(_) | Driver::Ended => poll(cx),
        }
    }

    /// From now on a task drives it, until the connection is dropped.
    pub(crate) fn detach(&mut self) {
        match std::mem::replace(&mut self.driver, Driver::Ended) {
            Driver::Inline(future) => {
                let task = tokio::spawn(async move {
                    if let Err(error) = future.await {
                        tracing::trace!(%error, "connection to a sandbox ended");
                    }
                });
                self.driver = Driver::Task(AbortOnDropHandle::new(task));
            }
            other => self.driver = other,
        }
    }

    /// Whether it can take a request now. Its last answer has been read to the end, so it can
    /// unless its server closed it.
    pub(crate) async fn is_usable(&mut self) -> bool {
        if self.life.is_cancelled() {
            return false;
        }
        let driver = &mut self.driver;
        match &mut self.sender {
            Sender::Http1(sender) => {
                poll_fn(|cx| {
                    driver.poll(cx);
                    Poll::Ready(matches!(sender.poll_ready(cx), Poll::Ready(Ok(()))))
                })
                .await
            }
            Sender::Http2(sender) => sender.is_ready(),
        }
    }

    /// Whether its server has closed it.
    pub(crate) fn is_closed(&mut self) -> bool {
        self.driver.poll(&mut Context::from_waker(Waker::noop()));
        match &self.sender {
            Sender::Http1(sender) => sender.is_closed(),
            Sender::Http2(sender) => sender.is_closed(),
        }
    }
}
