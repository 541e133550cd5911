//! A sandbox's network: two namespaces and all that is in them (architecture, decision 3).
//!
//! ```text
//!   host namespace            router namespace            inner namespace
//!   uplink (only where   ◀──▶ nftables, NAT        veth   the sandbox's interface,
//!   policy lets out)          the dialler's sockets ◀──▶  nothing else; owned by the engine
//! ```
//!
//! Invariants:
//! - Every sandbox has the same inner address, so a copy restored elsewhere just works.
//! - Removing the two namespaces removes everything; nothing can leak piece by piece.
//! - No sandbox reaches the host, private ranges, link-local addresses or a neighbour (R-P2).
//!
//! This crate knows nothing of HTTP.

use std::path::PathBuf;

use async_trait::async_trait;
use sandhold_platform::{DialError, Egress};
use sandhold_types::{Deadline, SandboxId};
use tokio::net::TcpStream;

mod error;
pub mod linux;
pub mod sim;

pub use error::NetworkError;
pub use linux::{LinuxNetwork, is_out_of_reach};

/// What an engine needs to put a sandbox on its network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The inner namespace.
    pub namespace: PathBuf,
}

/// Networks of the sandboxes of one node. Names on the machine carry the node's tag, so that two
/// nodes on one machine never touch each other's.
#[async_trait]
pub trait Network: Send + Sync + std::fmt::Debug {
    /// Builds a sandbox's network. If one is left from before, it is removed first.
    ///
    /// # Errors
    /// The step that failed; nothing is left of the attempt.
    async fn attach(&self, id: &SandboxId, egress: &Egress) -> Result<Attachment, NetworkError>;

    /// Gives the inner interface its address and routes again: an engine takes them off it, so
    /// this comes before each further launch into the same namespace.
    ///
    /// # Errors
    /// The step that failed.
    async fn readdress(&self, id: &SandboxId) -> Result<Attachment, NetworkError>;

    /// Takes address and routes off the inner interface again, as an engine does, for a launch that
    /// did not come about. With them the machine itself would answer for the sandbox, and refuse its
    /// connections.
    ///
    /// # Errors
    /// The step that failed; it can be called again.
    async fn unaddress(&self, id: &SandboxId) -> Result<(), NetworkError>;

    /// Removes a sandbox's network; idempotent.
    ///
    /// # Errors
    /// The step that failed; it can be called again.
    async fn detach(&self, id: &SandboxId) -> Result<(), NetworkError>;

    /// Replaces what it may reach, in one step.
    ///
    /// # Errors
    /// The rules were refused; the old ones stay.
    async fn set_egress(&self, id: &SandboxId, egress: &Egress) -> Result<(), NetworkError>;

    /// Every sandbox of which a namespace or interface is left.
    ///
    /// # Errors
    /// The listing is incomplete.
    async fn list(&self) -> Result<Vec<SandboxId>, NetworkError>;

    /// Opens a connection to a port of a sandbox's own address.
    ///
    /// # Errors
    /// Refused, gone, too late, or no socket to be had.
    async fn dial(
        &self,
        id: &SandboxId,
        port: u16,
        deadline: Deadline,
    ) -> Result<TcpStream, DialError>;
}
