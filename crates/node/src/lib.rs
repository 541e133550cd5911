//! Sandboxes on one machine.
//!
//! Owns every sandbox of the node: its record, its processes (through an [`Engine`]), its network
//! (through a [`Network`]) and the sockets into it.
//!
//! ```text
//!   Platform, Routes (calls)            sweeper (every tick)
//!        │                                   │
//!        ▼                                   ▼
//!   Registry ── mailbox ──▶ actor of sandbox A ──▶ create / remove steps ──▶ Engine, Network
//!   (views, no waiting)     actor of sandbox B          │
//!        ▲                       │                      ▼
//!        └──── publishes ────────┘               record.json (before each effect)
//! ```
//!
//! Invariants:
//! - An actor is the lock of its sandbox (R-L2): what to do is decided inside it, from its own
//!   state, never from a read before.
//! - A transition is written to the record before its effect (R-L3); [`recovery`] can finish or
//!   undo whatever it finds.
//! - Reads look at published views and wait for nobody (R-P9).
//! - A sandbox's directory goes last, so whatever is left of a sandbox is found again.
//!
//! It knows nothing of tenants' quotas and nothing of HTTP routes; it never deletes what carries
//! another node's tag.
//!
//! [`Engine`]: sandhold_engine::Engine
//! [`Network`]: sandhold_network::Network

#![forbid(unsafe_code)]

mod actor;
mod agent;
mod auditor;
mod blanks;
mod capacity;
mod create;
mod dial;
mod doze;
mod ending;
mod layout;
mod lifetime;
mod meter;
mod node;
mod platform;
mod record;
mod recovery;
mod registry;
mod remove;
mod rolling_back;
mod sleep;
mod sleeping;
mod snapshots;
mod snapshotting;
mod sweeper;
mod wake;

pub use agent::{Activity, AgentControl, AgentError, HttpAgent, Identity};
pub use capacity::{CapacityPolicy, Room, Shortage};
pub use doze::DozeCounts;
pub use layout::{Layout, LayoutError};
pub use node::{Dependencies, Node, NodeConfig, NodeError};
pub use recovery::RecoveryReport;
pub use sandhold_images::Faults;

/// The contract version that the guest agent keeps (wire contract 2.5).
pub const ENVD_VERSION: &str = "0.6.13";
