//! Who did it, and why a sandbox ended (R-L12).

use std::fmt;

use crate::{KeyId, RequestId};

/// Who asked for an operation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Actor {
    /// A caller with an API key.
    Client {
        /// The key it used.
        key: KeyId,
        /// The request that asked.
        request: RequestId,
    },
    /// A request that came through the gateway.
    Gateway,
    /// The node's sweeper, by a lifetime clock.
    Sweeper,
    /// Recovery after a restart.
    Recovery,
    /// The governor's reclaimer.
    Reclaimer,
    /// The sandbox itself: what runs in it, or a fault of the engine that carries it.
    Sandbox,
    /// The operator, by shutting down or by the command line.
    Operator,
}

impl Actor {
    /// Which kind of actor it is, by its stable name.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Client { .. } => "client",
            Self::Gateway => "gateway",
            Self::Sweeper => "sweeper",
            Self::Recovery => "recovery",
            Self::Reclaimer => "reclaimer",
            Self::Sandbox => "sandbox",
            Self::Operator => "operator",
        }
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client { key, request } => write!(f, "key {key} (request {request})"),
            Self::Gateway => f.write_str("the gateway"),
            Self::Sweeper => f.write_str("the lifetime sweeper"),
            Self::Recovery => f.write_str("recovery after a restart"),
            Self::Reclaimer => f.write_str("the reclaimer"),
            Self::Sandbox => f.write_str("the sandbox itself"),
            Self::Operator => f.write_str("the operator"),
        }
    }
}

/// The true reason of a sandbox's end.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EndReason {
    /// Somebody asked for it.
    Killed {
        /// Who.
        by: Actor,
    },
    /// Its lifetime passed.
    TimedOut,
    /// It used more memory than it may.
    OutOfMemory,
    /// It wrote more to its disk than it may.
    DiskFull,
    /// It was never finished: the create failed at this step.
    CreateFailed {
        /// The step and its error.
        step: String,
    },
    /// Its processes ended by themselves or by a fault of the engine.
    EngineFailed {
        /// What the engine said.
        detail: String,
    },
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed { by } => write!(f, "killed by {by}"),
            Self::TimedOut => f.write_str("its timeout passed"),
            Self::OutOfMemory => f.write_str("it ran out of memory"),
            Self::DiskFull => f.write_str("it filled its disk"),
            Self::CreateFailed { step } => write!(f, "its creation failed: {step}"),
            Self::EngineFailed { detail } => write!(f, "its engine failed: {detail}"),
        }
    }
}
