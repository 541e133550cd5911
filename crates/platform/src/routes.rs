//! What the gateway may ask: where a request goes, a socket to it, and noting that it was used.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use sandhold_types::{Deadline, EndReason, Incarnation, SandboxId, SandboxState};
use tokio::net::TcpStream;

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
    /// It exists and cannot take a request in this state.
    NotLive(SandboxState),
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

    /// Every live route; for signed URLs, which name no sandbox (wire contract 2.1).
    fn live(&self) -> Vec<Route>;

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
