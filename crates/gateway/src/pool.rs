//! Admission and kept connections, per sandbox.
//!
//! ```text
//!   admit ──▶ Permit ──checkout──▶ Lease ──give_back──▶ idle (newest first) ──sweep──▶ closed
//!                 └──── dial turn ──▶ Lease ──drop──▶ closed at once
//! ```
//!
//! Owns: counters of requests under way, and connections that no request uses.
//!
//! Invariants:
//! - An idle connection is of the slot's incarnation; when a request comes with another one, all
//!   are closed first. So a connection of an earlier life is never used (BC-094).
//! - A slot is in the map while a permit of it lives; permits are counted under the map's lock.
//! - A lease that is dropped closes its connection, so a request whose client went away is over
//!   in the sandbox too.
//! - Locks are held for a few instructions and never across an await.
//!
//! Called by `forward` only; it never opens a connection itself.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use sandhold_types::{Incarnation, SandboxId};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::AbortHandle,
    time::Instant,
};

use crate::{body::UploadBody, config::GatewayConfig};

/// How long a connection from the pool may take to become ready. Its last answer has been read
/// to the end, so this is a task switch.
const READY_WAIT_MAX: Duration = Duration::from_millis(20);

/// Which version of HTTP the server in the sandbox is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wire {
    /// HTTP/1.1, one request at a time.
    Http1,
    /// HTTP/2 with prior knowledge, for gRPC, which knows nothing else.
    Http2,
}

/// An open connection to one port of one incarnation of a sandbox.
#[derive(Debug)]
pub(crate) struct Connection {
    sender: Sender,
    /// The task that drives it.
    task: AbortHandle,
    incarnation: Incarnation,
    port: u16,
    wire: Wire,
}

#[derive(Debug)]
pub(crate) enum Sender {
    Http1(http1::SendRequest<UploadBody>),
    Http2(http2::SendRequest<UploadBody>),
}

impl Connection {
    pub(crate) fn new(
        sender: Sender,
        task: AbortHandle,
        incarnation: Incarnation,
        port: u16,
    ) -> Self {
        let wire = match &sender {
            Sender::Http1(_) => Wire::Http1,
            Sender::Http2(_) => Wire::Http2,
        };
        Self {
            sender,
            task,
            incarnation,
            port,
            wire,
        }
    }

    /// Sends a request; if nothing of it was sent, the error gives it back.
    pub(crate) async fn send(
        &mut self,
        request: Request<UploadBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<UploadBody>>> {
        match &mut self.sender {
            Sender::Http1(sender) => sender.try_send_request(request).await,
            Sender::Http2(sender) => sender.try_send_request(request).await,
        }
    }

    /// Whether it can take a request; waits briefly for the end of the one before.
    pub(crate) async fn is_usable(&mut self) -> bool {
        if self.is_closed() {
            return false;
        }
        match &mut self.sender {
            Sender::Http1(sender) => {
                sender.is_ready()
                    || matches!(
                        tokio::time::timeout(READY_WAIT_MAX, sender.ready()).await,
                        Ok(Ok(()))
                    )
            }
            Sender::Http2(sender) => sender.is_ready(),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    fn is_closed(&self) -> bool {
        match &self.sender {
            Sender::Http1(sender) => sender.is_closed(),
            Sender::Http2(sender) => sender.is_closed(),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Debug)]
struct IdleConnection {
    connection: Connection,
    since: Instant,
}

/// The idle connections of a sandbox, all of one incarnation.
#[derive(Debug)]
struct IdleSet {
    incarnation: Option<Incarnation>,
    by_port: HashMap<(u16, Wire), Vec<IdleConnection>>,
    count: usize,
}

#[derive(Debug)]
struct Slot {
    under_way: AtomicUsize,
    waiting: AtomicUsize,
    dials: Semaphore,
    idle: Mutex<IdleSet>,
}

/// Counters over all sandboxes.
#[derive(Debug, Default)]
struct Totals {
    under_way: AtomicUsize,
    idle: AtomicUsize,
}

/// Limits, from the configuration.
#[derive(Debug, Clone, Copy)]
struct Limits {
    requests_per_sandbox: usize,
    requests: usize,
    dials_per_sandbox: usize,
    waiting_per_sandbox: usize,
    idle_per_sandbox: usize,
    idle: usize,
    idle_age: Duration,
}

/// Why a request is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// The sandbox has this many under way.
    Sandbox(usize),
    /// This many wait for a connection to the sandbox.
    Waiting(usize),
    /// The whole gateway is full.
    Gateway,
}

#[derive(Debug)]
pub(crate) struct Pool {
    slots: Mutex<HashMap<SandboxId, Arc<Slot>>>,
    totals: Arc<Totals>,
    limits: Limits,
}

/// The right to have one request under way.
#[derive(Debug)]
pub(crate) struct Permit {
    slot: Arc<Slot>,
    totals: Arc<Totals>,
    limits: Limits,
}

/// A connection in use by the holder of a permit.
#[derive(Debug)]
pub(crate) struct Lease {
    connection: Connection,
    permit: Permit,
}

/// The right to open one connection.
#[derive(Debug)]
pub(crate) struct DialTurn<'a> {
    _turn: SemaphorePermit<'a>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub(crate) fn new(config: &GatewayConfig) -> Self {
        Self {
            slots: Mutex::default(),
            totals: Arc::default(),
            limits: Limits {
                requests_per_sandbox: config.requests_per_sandbox_max,
                requests: config.requests_max,
                dials_per_sandbox: config.dials_per_sandbox_max,
                waiting_per_sandbox: config.waiting_per_sandbox_max,
                idle_per_sandbox: config.idle_connections_per_sandbox_max,
                idle: config.idle_connections_max,
                idle_age: config.idle_connection_age_max,
            },
        }
    }

    /// Lets a request of `sandbox` in, or says what is full.
    pub(crate) fn admit(&self, sandbox: &SandboxId) -> Result<Permit, Full> {
        let mut slots = locked(&self.slots);
        if self.totals.under_way.load(Ordering::Relaxed) >= self.limits.requests {
            return Err(Full::Gateway);
        }
        let slot = match slots.get(sandbox) {
            Some(slot) => Arc::clone(slot),
            None => {
                let slot = Arc::new(Slot::new(&self.limits));
                slots.insert(sandbox.clone(), Arc::clone(&slot));
                slot
            }
        };
        let limit = self.limits.requests_per_sandbox;
        if slot.under_way.load(Ordering::Relaxed) >= limit {
            return Err(Full::Sandbox(limit));
        }
        slot.under_way.fetch_add(1, Ordering::Relaxed);
        self.totals.under_way.fetch_add(1, Ordering::Relaxed);
        Ok(Permit {
            slot,
            totals: Arc::clone(&self.totals),
            limits: self.limits,
        })
    }

    /// Closes idle connections that are too old, closed from the other side, or of another life
    /// than `incarnation_of` says; forgets sandboxes without any.
    pub(crate) fn sweep(&self, incarnation_of: impl Fn(&SandboxId) -> Option<Incarnation>) {
        let now = Instant::now();
        let mut dropped = Vec::new();
        locked(&self.slots).retain(|sandbox, slot| {
            let mut idle = locked(&slot.idle);
            if idle.count > 0 {
                let current = incarnation_of(sandbox);
                let is_current = current.is_some() && idle.incarnation == current;
                dropped.extend(idle.remove_where(|kept| {
                    !is_current
                        || kept.connection.is_closed()
                        || now.duration_since(kept.since) > self.limits.idle_age
                }));
            }
            idle.count > 0 || slot.under_way.load(Ordering::Relaxed) > 0
        });
        self.totals.idle.fetch_sub(dropped.len(), Ordering::Relaxed);
    }

    /// Requests under way and idle connections, over all sandboxes.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (
            self.totals.under_way.load(Ordering::Relaxed),
            self.totals.idle.load(Ordering::Relaxed),
        )
    }
}

impl Slot {
    fn new(limits: &Limits) -> Self {
        Self {
            under_way: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            dials: Semaphore::new(limits.dials_per_sandbox),
            idle: Mutex::new(IdleSet {
                incarnation: None,
                by_port: HashMap::new(),
                count: 0,
            }),
        }
    }
}

impl IdleSet {
    fn remove_where(&mut self, is: impl Fn(&IdleConnection) -> bool) -> Vec<IdleConnection> {
        let mut removed = Vec::new();
        for connections in self.by_port.values_mut() {
            removed.extend(connections.extract_if(.., |kept| is(kept)));
        }
        self.by_port
            .retain(|_, connections| !connections.is_empty());
        self.count -= removed.len();
        removed
    }
}

impl Permit {
    /// An idle connection to `port` of exactly `incarnation`, the one used last.
    pub(crate) fn checkout(
        &self,
        incarnation: Incarnation,
        port: u16,
        wire: Wire,
    ) -> Option<Connection> {
        // Closed after the lock is given up.
        let _stale;
        let (found, removed) = {
            let mut idle = locked(&self.slot.idle);
            let before = idle.count;
            if idle.incarnation != Some(incarnation) {
                _stale = idle.remove_where(|_| true);
                idle.incarnation = Some(incarnation);
            }
            let found = idle.by_port.get_mut(&(port, wire)).and_then(Vec::pop);
            idle.count -= usize::from(found.is_some());
            (found, before - idle.count)
        };
        self.totals.idle.fetch_sub(removed, Ordering::Relaxed);
        found
            .filter(|kept| kept.since.elapsed() <= self.limits.idle_age)
            .map(|kept| kept.connection)
    }

    /// Waits for the turn to open a connection; drop it when the connection stands.
    pub(crate) async fn dial_turn(&self) -> Result<DialTurn<'_>, Full> {
        if let Ok(turn) = self.slot.dials.try_acquire() {
            return Ok(DialTurn { _turn: turn });
        }
        let limit = self.limits.waiting_per_sandbox;
        let _waiting = Waiting::enter(&self.slot.waiting, limit).ok_or(Full::Waiting(limit))?;
        match self.slot.dials.acquire().await {
            Ok(turn) => Ok(DialTurn { _turn: turn }),
            // The semaphore is never closed.
            Err(_) => Err(Full::Gateway),
        }
    }

    pub(crate) fn lease(self, connection: Connection) -> Lease {
        Lease {
            connection,
            permit: self,
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.slot.under_way.fetch_sub(1, Ordering::Relaxed);
        self.totals.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Lease {
    pub(crate) fn port(&self) -> u16 {
        self.connection.port
    }

    /// The exchange is over and the connection can serve another one.
    pub(crate) fn give_back(self) {
        let Self { connection, permit } = self;
        if connection.is_closed() {
            return;
        }
        let mut idle = locked(&permit.slot.idle);
        let has_room = idle.count < permit.limits.idle_per_sandbox
            && permit.totals.idle.load(Ordering::Relaxed) < permit.limits.idle;
        // A request of a later life may have come in between.
        if has_room && idle.incarnation == Some(connection.incarnation) {
            permit.totals.idle.fetch_add(1, Ordering::Relaxed);
            idle.count += 1;
            let key = (connection.port, connection.wire);
            idle.by_port.entry(key).or_default().push(IdleConnection {
                connection,
                since: Instant::now(),
            });
        }
        drop(idle);
    }
}

/// A place among those who wait.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn enter(count: &'a AtomicUsize, limit: usize) -> Option<Self> {
        if count.fetch_add(1, Ordering::Relaxed) >= limit {
            count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Self(count))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
