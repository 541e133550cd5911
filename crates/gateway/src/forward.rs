//! One request, from its head to its answer.
//!
//! ```text
//!  target ─▶ find ─▶ token ─▶ permit ─┬─ runs ──────▶ hold ─▶ kept connection ──┬──▶ answer ─▶ relay / splice
//!              │                       └─ asleep: wake ─┘          │ none, dead   │
//!              ▼                             │                     ▼              │
//!           Failure ◀────────────────────────┘                   dial ────────────┘
//! ```
//!
//! Owns nothing but its configuration and the pool. Invariants:
//! - A request is sent a second time only if no byte of it was sent, or if it is idempotent and has
//!   no body (RFC 9110 9.2.2); and then on a fresh connection.
//! - A connection is of the incarnation that the route was looked up for; if the sandbox has moved
//!   on, the route is looked up again, and the sandbox woken if need be, before anything is sent.
//! - The sandbox is held from before a connection is used until the answer has ended, so that it
//!   does not doze off meanwhile.
//! - When the sandbox fails to answer, the route is looked up again before blaming the server in
//!   it: a sandbox that ended meanwhile is told as ended (R-L12).
//!
//! It never starts, stops or wakes a sandbox; `finding` asks for that.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::AtomicU64},
};

use http::{
    HeaderValue, Method, Request, Response, StatusCode, Uri, Version, request::Parts,
    uri::PathAndQuery,
};
use hyper::body::Incoming;
use sandhold_platform::{Route, RouteLookup, Routes};
use sandhold_types::{Clock, Deadline, SandboxId};
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    activity::Usage,
    answers::{Audience, Failure, answer},
    body::{ReplyBody, UploadBody},
    changes::{Change, Changes},
    config::GatewayConfig,
    connection::{Connection, Endpoint, SendError, Wire},
    finding::{Finder, Found, ROUTE_ATTEMPTS_MAX, check_traffic_token, dial_failure},
    headers::{self, Passage},
    pool::{Full, Permit, Pool},
    target::{self, AGENT_PORT, Target},
    upgrade::{self, Switch},
};

/// How many kept connections are tried before a fresh one is opened.
const KEPT_ATTEMPTS_MAX: usize = 2;
/// Who connected; put into a request's extensions by whoever accepted the connection.
#[derive(Debug, Clone)]
pub struct ClientAddress {
    socket: SocketAddr,
    /// The address as a header's value; rendered once for all requests of a connection.
    text: HeaderValue,
}

impl ClientAddress {
    /// The other end of a connection.
    #[must_use]
    pub fn new(socket: SocketAddr) -> Self {
        let text = HeaderValue::try_from(socket.ip().to_canonical().to_string());
        Self {
            socket,
            text: text.unwrap_or(HeaderValue::from_static("unknown")),
        }
    }

    /// Address and port.
    #[must_use]
    pub fn socket(&self) -> SocketAddr {
        self.socket
    }
}

/// Forwards requests to ports of sandboxes. Cheap to clone; clones share everything.
#[derive(Debug, Clone)]
pub struct Gateway {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    finder: Finder,
    config: GatewayConfig,
    pool: Pool,
    /// Upgraded connections, which outlive their requests.
    tunnels: TaskTracker,
    /// Ends the tunnels.
    closing: CancellationToken,
    /// Upgrades asked for, to make their keys differ.
    upgrades: AtomicU64,
}

/// What a request turned into on its way.
struct Prepared {
    request: Request<UploadBody>,
    usage: Arc<Usage>,
    switch: Option<Switch>,
    wire: Wire,
}

/// A sandbox's answer and the connection it came on.
struct Answered {
    response: Response<Incoming>,
    connection: Connection,
}

impl Gateway {
    /// A gateway over `routes`.
    #[must_use]
    pub fn new(routes: Arc<dyn Routes>, clock: Arc<dyn Clock>, config: GatewayConfig) -> Self {
        Self {
            inner: Arc::new(Inner {
                finder: Finder {
                    routes,
                    clock,
                    wake_timeout: config.wake_timeout,
                    signature_candidates_max: config.signature_candidates_max,
                },
                pool: Pool::new(&config),
                config,
                tunnels: TaskTracker::new(),
                closing: CancellationToken::new(),
                upgrades: AtomicU64::new(0),
            }),
        }
    }

    /// Whether a request is the gateway's, and what for. Pure.
    #[must_use]
    pub fn claims(&self, head: &Parts) -> Option<Target> {
        target::decide(head, &self.inner.config.shared_hosts)
    }

    /// Answers a request that [`Self::claims`] claimed.
    pub async fn handle(&self, target: Target, request: Request<Incoming>) -> Response<ReplyBody> {
        let (port, audience) = match &target {
            Target::Port { port, .. } if !headers::is_agent(*port) => {
                (*port, Audience::of(request.headers()))
            }
            Target::Port { port, .. } => (*port, Audience::Program),
            Target::SignedFile(_) => (AGENT_PORT, Audience::Program),
            Target::Refused(_) => (AGENT_PORT, Audience::of(request.headers())),
        };
        if headers::is_agent(port) && headers::is_preflight(request.method(), request.headers()) {
            return preflight(&request);
        }
        let result = match target {
            Target::Port { sandbox, port } => self.inner.forward(sandbox, port, request).await,
            Target::SignedFile(file) => match self.inner.finder.owner_of(&file) {
                Ok(sandbox) => self.inner.forward(sandbox, AGENT_PORT, request).await,
                Err(failure) => Err(failure),
            },
            Target::Refused(refusal) => Err(Failure::Refused(refusal)),
        };
        result.unwrap_or_else(|failure| {
            tracing::debug!(?failure, "answered instead of a sandbox");
            let mut response = answer(&failure, audience);
            if headers::is_agent(port) {
                headers::allow_origins(response.headers_mut());
            }
            response
        })
    }

    /// Closes kept connections that are too old or of an earlier life; to be called about once a
    /// second. [`crate::serve`] does.
    pub fn sweep(&self) {
        let routes = &self.inner.finder.routes;
        self.inner
            .pool
            .sweep(|sandbox| match routes.route(sandbox) {
                RouteLookup::Live(route) => Some(route.incarnation()),
                _ => None,
            });
    }

    /// State changes from now on.
    pub(crate) fn changes(&self) -> Changes {
        Changes::of(self.inner.finder.routes.as_ref())
    }

    /// Closes the connections of a life that is over. After missed changes all are looked over.
    pub(crate) fn note(&self, change: Change) {
        match change {
            Change::Of(change) => self.inner.pool.note(&change),
            Change::Many => self.sweep(),
        }
    }

    /// Requests under way, and kept connections that none of them uses.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        self.inner.pool.counts()
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &GatewayConfig {
        &self.inner.config
    }

    /// Ends every upgraded connection and returns when the last is gone.
    pub async fn close_tunnels(&self) {
        self.inner.closing.cancel();
        self.inner.tunnels.close();
        self.inner.tunnels.wait().await;
    }
}

impl Inner {
    async fn forward(
        &self,
        sandbox: SandboxId,
        port: u16,
        mut request: Request<Incoming>,
    ) -> Result<Response<ReplyBody>, Failure> {
        let found = self.finder.find(&sandbox)?;
        check_traffic_token(found.sandbox(), port, &request)?;
        let permit = self
            .pool
            .admit(&sandbox)
            .map_err(|full| refused(&sandbox, full))?;
        let route = match found {
            Found::Running(route) => route,
            Found::Asleep(view) => {
                request = self.finder.check_may_wake(&view, port, request)?;
                self.finder.wake(&sandbox).await?
            }
        };
        let (route, hold) = self.finder.hold(route).await?;
        let routes = Arc::clone(&self.finder.routes);
        let usage = Usage::begin(routes, sandbox, hold, self.config.idle_timeout);
        let prepared = self.prepare(&route, port, request, usage)?;
        let Prepared {
            request,
            usage,
            switch,
            wire,
        } = prepared;
        let exchange = self.exchange(&permit, route, port, wire, request);
        let Answered {
            response,
            connection,
        } = tokio::select! {
            biased;
            answered = exchange => answered?,
            () = usage.idle() => return Err(Failure::NoAnswer(
                usage.sandbox().clone(), port, self.config.idle_timeout,
            )),
        };
        usage.answered();
        let lease = permit.lease(connection);
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let Some(switch) = switch else {
                // A server may not switch unasked.
                return Err(Failure::NotHttp(usage.sandbox().clone(), port));
            };
            let (response, tunnel) = upgrade::switch(switch, response, lease, usage);
            self.tunnels.spawn(tunnel.run(self.closing.clone()));
            return Ok(response);
        }
        let (mut head, incoming) = response.into_parts();
        headers::to_client(&mut head.headers, port);
        head.version = Version::default();
        Ok(Response::from_parts(
            head,
            ReplyBody::relayed(incoming, usage, lease),
        ))
    }

    /// Makes of the client's request the one that the sandbox is sent.
    fn prepare(
        &self,
        route: &Route,
        port: u16,
        mut request: Request<Incoming>,
        usage: Arc<Usage>,
    ) -> Result<Prepared, Failure> {
        let switch =
            upgrade::asked_for(&mut request, port, &self.upgrades, self.finder.clock.now())
                .map_err(|upgrade::NotCarried| Failure::NotCarried(route.sandbox.id.clone()))?;
        let wire = wire_for(&request);
        let (mut head, incoming) = request.into_parts();
        let original_host = original_host(&head);
        let client = head.extensions.remove::<ClientAddress>();
        headers::to_sandbox(
            &mut head.headers,
            &Passage {
                port,
                client: client.map(|client| client.text),
                original_host,
                mask: route.sandbox.mask_request_host.as_deref(),
                access_token: &route.sandbox.access_token,
                trust: self.config.forwarded_trust,
                upgrade: switch.as_ref().map(Switch::protocol),
            },
        );
        let body = match &switch {
            Some(_) => UploadBody::empty(Arc::clone(&usage)),
            None => UploadBody::new(incoming, Arc::clone(&usage)),
        };
        let mut outgoing = Request::new(body);
        *outgoing.method_mut() = head.method;
        if let Some(switch) = &switch {
            switch.complete(outgoing.method_mut(), &mut head.headers);
        }
        *outgoing.uri_mut() = origin_form(&head.uri, wire, &head.headers);
        *outgoing.headers_mut() = head.headers;
        if wire == Wire::Http2 {
            *outgoing.version_mut() = Version::HTTP_2;
            outgoing.headers_mut().remove(http::header::HOST);
            outgoing.headers_mut().remove(http::header::CONNECTION);
        }
        Ok(Prepared {
            request: outgoing,
            usage,
            switch,
            wire,
        })
    }

    /// Sends the request on a kept connection or a fresh one and waits for the answer's head.
    async fn exchange(
        &self,
        permit: &Permit,
        mut route: Route,
        port: u16,
        wire: Wire,
        mut request: Request<UploadBody>,
    ) -> Result<Answered, Failure> {
        for _ in 0..KEPT_ATTEMPTS_MAX {
            let endpoint = Endpoint {
                incarnation: route.incarnation(),
                port,
                wire,
            };
            let Some(mut connection) = permit.checkout(endpoint) else {
                break;
            };
            if !connection.is_usable().await {
                continue;
            }
            let replay = replay(&request);
            match connection.send(request).await {
                Ok(response) => {
                    return Ok(Answered {
                        response,
                        connection,
                    });
                }
                Err(SendError::Unsent(unsent)) => request = *unsent,
                Err(error) => match replay {
                    Some(again) => request = again,
                    None => return Err(self.blame(&route, port, &error)),
                },
            }
        }
        let sandbox = route.sandbox.id.clone();
        for _ in 1..ROUTE_ATTEMPTS_MAX {
            match self.open(permit, &route, port, wire).await {
                Err(Failure::Unknown(_)) => route = self.finder.awake(&sandbox).await?,
                Err(other) => return Err(other),
                Ok(connection) => return self.send_fresh(&route, connection, request).await,
            }
        }
        let connection = self.open(permit, &route, port, wire).await?;
        self.send_fresh(&route, connection, request).await
    }

    async fn send_fresh(
        &self,
        route: &Route,
        mut connection: Connection,
        request: Request<UploadBody>,
    ) -> Result<Answered, Failure> {
        match connection.send(request).await {
            Ok(response) => Ok(Answered {
                response,
                connection,
            }),
            Err(error) => Err(self.blame(route, connection.endpoint().port, &error)),
        }
    }

    /// Opens a connection. A sandbox that is no longer the route's is [`Failure::Unknown`].
    async fn open(
        &self,
        permit: &Permit,
        route: &Route,
        port: u16,
        wire: Wire,
    ) -> Result<Connection, Failure> {
        let sandbox = &route.sandbox.id;
        let waited = self.config.dial_timeout;
        let until = Instant::now() + waited;
        let attempt = async {
            let _turn = permit
                .dial_turn()
                .await
                .map_err(|full| refused(sandbox, full))?;
            let deadline = Deadline::after(Instant::now().into_std(), until - Instant::now());
            let life = permit.life(route.incarnation());
            let stream = self
                .finder
                .routes
                .dial(route, port, deadline)
                .await
                .map_err(|error| dial_failure(sandbox, error))?;
            // Small frames must not wait for each other; a socket without the option still works.
            let _ = stream.set_nodelay(true);
            let endpoint = Endpoint {
                incarnation: route.incarnation(),
                port,
                wire,
            };
            Connection::open(stream, endpoint, life)
                .await
                .map_err(|error| {
                    tracing::debug!(%error, "handshake with a server in a sandbox failed");
                    Failure::ConnectionClosed(sandbox.clone(), port)
                })
        };
        tokio::time::timeout_at(until, attempt)
            .await
            .map_err(|_| Failure::NoAnswer(sandbox.clone(), port, waited))?
    }

    /// Why the sandbox did not answer: it ended, it was put to sleep, or the server in it gave up.
    fn blame(&self, route: &Route, port: u16, error: &SendError) -> Failure {
        let sandbox = &route.sandbox.id;
        tracing::debug!(%sandbox, port, ?error, "no answer");
        match (self.finder.find(sandbox), error) {
            (Err(failure), _) => failure,
            (Ok(Found::Running(now)), _) if now.incarnation() != route.incarnation() => {
                Failure::PutToSleep(sandbox.clone())
            }
            (Ok(Found::Asleep(_)), _) => Failure::PutToSleep(sandbox.clone()),
            (Ok(_), SendError::Failed(error)) if error.is_parse() => {
                Failure::NotHttp(sandbox.clone(), port)
            }
            (Ok(_), _) => Failure::ConnectionClosed(sandbox.clone(), port),
        }
    }
}

fn refused(sandbox: &SandboxId, full: Full) -> Failure {
    match full {
        Full::Sandbox(limit) => Failure::TooManyRequests(sandbox.clone(), limit),
        Full::Waiting(limit) => Failure::TooManyWaiting(sandbox.clone(), limit),
        Full::Gateway => Failure::GatewayFull,
    }
}

/// gRPC runs on HTTP/2 only; everything else is spoken to in HTTP/1.1, which every server knows.
fn wire_for(request: &Request<Incoming>) -> Wire {
    let is_grpc = request
        .headers()
        .get(http::header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
        && !request
            .headers()
            .get(http::header::CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc-web"));
    if is_grpc && request.version() == Version::HTTP_2 {
        Wire::Http2
    } else {
        Wire::Http1
    }
}

/// The path and query alone, as servers expect them; HTTP/2 needs scheme and authority as well.
fn origin_form(uri: &Uri, wire: Wire, headers: &http::HeaderMap) -> Uri {
    let path = uri
        .path_and_query()
        .cloned()
        .unwrap_or_else(|| PathAndQuery::from_static("/"));
    let mut parts = http::uri::Parts::default();
    if wire == Wire::Http2 {
        let host = headers.get(http::header::HOST);
        let authority = host.and_then(|host| host.as_bytes().try_into().ok());
        parts.scheme = Some(http::uri::Scheme::HTTP);
        parts.authority =
            authority.or_else(|| Some(http::uri::Authority::from_static("localhost")));
    }
    parts.path_and_query = Some(path);
    Uri::from_parts(parts).unwrap_or_else(|_| Uri::from_static("/"))
}

/// The host as the client wrote it; the header's own value where that is it.
fn original_host(head: &Parts) -> Option<HeaderValue> {
    if head.uri.authority().is_none() {
        return head.headers.get(http::header::HOST).cloned();
    }
    let text = target::original_host(head).ok().flatten()?;
    HeaderValue::try_from(text).ok()
}

/// The same request again, if sending it twice cannot do harm and it has no body.
fn replay(request: &Request<UploadBody>) -> Option<Request<UploadBody>> {
    let is_idempotent = matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE
    );
    if !is_idempotent {
        return None;
    }
    let mut again = Request::new(request.body().replay()?);
    *again.method_mut() = request.method().clone();
    *again.uri_mut() = request.uri().clone();
    *again.version_mut() = request.version();
    *again.headers_mut() = request.headers().clone();
    Some(again)
}

fn preflight(request: &Request<Incoming>) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    *response.headers_mut() = headers::preflight(request.headers());
    response.headers_mut().insert(
        http::header::CACHE_CONTROL,
        HeaderValue::from_static("no-store"),
    );
    response
}
