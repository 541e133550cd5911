//! Admission and kept connections, per sandbox.
//!
//! ```text
//!   admit ──▶ Permit ──checkout──▶ Lease ──give_back──▶ idle (newest first) ──sweep──▶ closed
//!                 └──── dial turn ──▶ Lease ──drop──▶ closed at once
//!   state change ──▶ note ──▶ idle ones closed, those in use cut
//! ```
//!
//! Owns: counters of requests under way, connections that no request uses, and of each sandbox the
//! newest incarnation that is known, with what ends when that life does.
//!
//! Invariants:
//! - An idle connection is of the slot's incarnation; when a request comes with a later one, all
//!   are closed first. So a connection of an earlier life is never used (BC-094).
//! - The life of a connection is taken before it is opened, so whoever ends the life ends the
//!   connection too, however late the news comes.
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

use sandhold_platform::StateChange;
use sandhold_types::{Incarnation, SandboxId, SandboxState};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    config::GatewayConfig,
    connection::{Connection, Endpoint, Wire},
};

#[derive(Debug)]
struct IdleConnection {
    connection: Connection,
    since: Instant,
}

/// The idle connections of a sandbox, all of one incarnation.
#[derive(Debug)]
struct IdleSet {
    incarnation: Option<Incarnation>,
    /// Ends with the incarnation.
    life: CancellationToken,
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

    /// Closes the connections of a life that is over; idle ones as soon as the sandbox leaves
    /// `running`.
    pub(crate) fn note(&self, change: &StateChange) {
        let slot = locked(&self.slots).get(&change.sandbox).cloned();
        let Some(slot) = slot else { return };
        let dropped = {
            let mut idle = locked(&slot.idle);
            if change.state == SandboxState::Running {
                idle.turn_to(change.incarnation)
            } else if idle.incarnation <= Some(change.incarnation) {
                let closed = idle.remove_where(|_| true);
                idle.turn_to(first_alive(change));
                closed
            } else {
                Vec::new()
            }
        };
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
                life: CancellationToken::new(),
                by_port: HashMap::new(),
                count: 0,
            }),
        }
    }
}

/// The earliest incarnation that is not over once a state change has happened.
fn first_alive(change: &StateChange) -> Incarnation {
    match change.state {
        SandboxState::Paused
        | SandboxState::Killing
        | SandboxState::Killed
        | SandboxState::Failed => change.incarnation.next(),
        SandboxState::Creating
        | SandboxState::Running
        | SandboxState::Pausing
        | SandboxState::Resuming
        | SandboxState::Snapshotting
        | SandboxState::RollingBack => change.incarnation,
    }
}

impl IdleSet {
    /// Ends every life before `incarnation`. Returns the idle connections of what was, to be closed
    /// after the lock is given up.
    fn turn_to(&mut self, incarnation: Incarnation) -> Vec<IdleConnection> {
        if self.incarnation >= Some(incarnation) {
            return Vec::new();
        }
        self.incarnation = Some(incarnation);
        std::mem::replace(&mut self.life, CancellationToken::new()).cancel();
        self.remove_where(|_| true)
    }

    fn remove_where(&mut self, is: impl Fn(&mut IdleConnection) -> bool) -> Vec<IdleConnection> {
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
    /// An idle connection to exactly this endpoint, the one used last.
    pub(crate) fn checkout(&self, endpoint: Endpoint) -> Option<Connection> {
        // Closed after the lock is given up.
        let _stale;
        let (found, removed) = {
            let mut idle = locked(&self.slot.idle);
            let before = idle.count;
            _stale = idle.turn_to(endpoint.incarnation);
            let found = if idle.incarnation == Some(endpoint.incarnation) {
                let kept = idle.by_port.get_mut(&(endpoint.port, endpoint.wire));
                kept.and_then(Vec::pop)
            } else {
                None
            };
            idle.count -= usize::from(found.is_some());
            (found, before - idle.count)
        };
        self.totals.idle.fetch_sub(removed, Ordering::Relaxed);
        found
            .filter(|kept| kept.since.elapsed() <= self.limits.idle_age)
            .map(|kept| kept.connection)
    }

    /// What ends when `incarnation` does; ended already, if a later one is known.
    pub(crate) fn life(&self, incarnation: Incarnation) -> CancellationToken {
        let mut idle = locked(&self.slot.idle);
        let stale = idle.turn_to(incarnation);
        let life = if idle.incarnation == Some(incarnation) {
            idle.life.clone()
        } else {
            let over = CancellationToken::new();
            over.cancel();
            over
        };
        drop(idle);
        self.totals.idle.fetch_sub(stale.len(), Ordering::Relaxed);
        life
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
    pub(crate) fn connection(&mut self) -> &mut Connection {
        &mut self.connection
    }

    pub(crate) fn port(&self) -> u16 {
        self.connection.endpoint().port
    }

    /// The exchange is over and the connection can serve another one.
    pub(crate) fn give_back(self) {
        let Self { connection, permit } = self;
        let endpoint = connection.endpoint();
        let mut idle = locked(&permit.slot.idle);
        let has_room = idle.count < permit.limits.idle_per_sandbox
            && permit.totals.idle.load(Ordering::Relaxed) < permit.limits.idle;
        // A request of a later life may have come in between.
        if has_room && idle.incarnation == Some(endpoint.incarnation) {
            permit.totals.idle.fetch_add(1, Ordering::Relaxed);
            idle.count += 1;
            let key = (endpoint.port, endpoint.wire);
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
