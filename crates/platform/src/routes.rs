//! What the gateway may ask: where a request goes, a socket to it, and noting that it was used.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use sandhold_types::{Deadline, EndReason, ErrorCode, Incarnation, Retry, SandboxId, SandboxState};
use tokio::{net::TcpStream, sync::broadcast};

use crate::SandboxView;

/// A sandbox that a request can go to. Valid for one incarnation only.
#[derive(Debug, Clone)]
pub struct Route {
    /// The sandbox as it was when the route was looked up.
    pub sandbox: Arc<SandboxView>,
}

impl Route {
    /// The life of its processes that this route is for.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.sandbox.incarnation
    }
}

/// The answer to "where is this sandbox?".
#[derive(Debug, Clone)]
pub enum RouteLookup {
    /// It runs.
    Live(Route),
    /// It exists and cannot take a request in its state.
    NotLive(Arc<SandboxView>),
    /// It has ended.
    Ended(EndReason),
    /// There is none.
    Unknown,
}

/// Why there is no connection to a port of a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nobody listens on the port, neither on the sandbox's address nor on its loopback.
    #[error("port {port} is not open")]
    PortClosed {
        /// The port.
        port: u16,
    },
    /// The sandbox is no longer the one the route was for.
    #[error("the sandbox is gone")]
    Gone,
    /// No answer in time.
    #[error("no answer from port {port} within {waited:?}")]
    Timeout {
        /// The port.
        port: u16,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The machine could not open a socket.
    #[error("could not open a socket towards the sandbox")]
    Socket(#[source] std::io::Error),
}

/// Why a request does not reach a sandbox that does not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WakeError {
    /// It sleeps, and traffic does not wake it.
    #[error("the sandbox is paused")]
    NotAllowed,
    /// It has ended, or is about to.
    #[error("the sandbox is gone")]
    Gone,
    /// So many requests wait for it already.
    #[error("{waiting_max} requests already wait for the sandbox")]
    Full {
        /// The most.
        waiting_max: usize,
    },
    /// It did not come to run before the caller's deadline.
    #[error("the sandbox is still {state}")]
    Late {
        /// Its state then.
        state: SandboxState,
    },
    /// It was to be woken and could not be; it sleeps on.
    #[error("the sandbox could not be woken: {message}")]
    Failed {
        /// Which kind of failure.
        code: ErrorCode,
        /// What happened.
        message: String,
        /// Whether and when to try again.
        retry: Retry,
    },
}

/// How many requests need a sandbox to be awake now.
#[derive(Debug, Default)]
pub struct Holds(AtomicUsize);

impl Holds {
    /// Adds one, until the answer is dropped.
    #[must_use]
    pub fn hold(self: &Arc<Self>) -> Hold {
        self.0.fetch_add(1, Ordering::SeqCst);
        Hold(Arc::clone(self))
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// Keeps a sandbox from dozing off for as long as it lives.
#[derive(Debug)]
pub struct Hold(Arc<Holds>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A sandbox went to another state, or its processes began another life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateChange {
    /// Which.
    pub sandbox: SandboxId,
    /// Its state now.
    pub state: SandboxState,
    /// The life of its processes.
    pub incarnation: Incarnation,
}

/// What kind of use is noted (R-L5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivityKind {
    /// A request came in or an answer went out.
    Request,
    /// Bytes moved on a long stream.
    Stream,
}

/// Routing for the gateway.
#[async_trait]
pub trait Routes: Send + Sync + std::fmt::Debug {
    /// Where `id` is. Never waits.
    fn route(&self, id: &SandboxId) -> RouteLookup;

    /// Every sandbox that runs or can come to run; for signed URLs, which name no sandbox (wire
    /// contract 2.1).
    fn reachable(&self) -> Vec<Arc<SandboxView>>;

    /// Waits until a sandbox that does not run runs again, waking it if it sleeps and traffic may
    /// do that: once, however many ask (R-L7). A wake-up goes on though its callers give up.
    ///
    /// # Errors
    /// It will not run, or not before the deadline.
    async fn wake(&self, id: &SandboxId, deadline: Deadline) -> Result<Route, WakeError>;

    /// [`Self::hold`], if that needs no waiting: the processes are not frozen. Never waits.
    fn try_hold(&self, route: &Route) -> Option<Hold>;

    /// Makes sure that the processes of exactly this incarnation run, and keeps them from being
    /// frozen for idleness until the answer is dropped (architecture, decision 6). To be held from
    /// before a request is sent until its answer has ended.
    ///
    /// # Errors
    /// The sandbox is no longer the one the route was for, or could not be thawed.
    async fn hold(&self, route: &Route) -> Result<Hold, DialError>;

    /// State changes from now on. Whoever falls behind is told so and looks at [`Self::route`]; a
    /// lost event costs nothing else.
    fn changes(&self) -> broadcast::Receiver<StateChange>;

    /// A fresh connection to `port` of exactly the incarnation that `route` is for.
    ///
    /// # Errors
    /// Port closed, sandbox gone, no answer in time, or the machine is out of sockets.
    async fn dial(
        &self,
        route: &Route,
        port: u16,
        deadline: Deadline,
    ) -> Result<TcpStream, DialError>;

    /// Notes use of a sandbox. Cheap; may be called for every chunk.
    fn touch(&self, id: &SandboxId, kind: ActivityKind);
}
