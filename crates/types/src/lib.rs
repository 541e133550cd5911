//! The words of the project: identifiers, states, clocks, deadlines, error codes.
//!
//! Everything here is a plain value. This crate knows nothing of tokio, of HTTP, of files or of
//! any wire format; it takes time and randomness only through the traits [`Clock`] and
//! [`Entropy`], so that every rule built on it can be run by a simulator.
//!
//! Identifiers serialise as their text and are checked when they are read back, because records
//! on disk and messages from guests are input like any other.

#![forbid(unsafe_code)]

mod deadline;
mod entropy;
mod error;
mod fault;
mod id;
mod lifetime;
mod reason;
mod resources;
mod secret;
mod state;
mod time;

pub use deadline::{Budget, Deadline};
pub use entropy::{Entropy, SeededEntropy, SystemEntropy};
pub use error::{ErrorCode, Retry};
pub use fault::{FaultPlan, FaultPoint};
pub use id::{
    BuildId, EnvName, Generation, IdError, Incarnation, KeyId, Namespace, RequestId, SandboxId,
    SnapshotId, TemplateId,
};
pub use lifetime::{Clocking, Lifetime, OnTimeout};
pub use reason::{Actor, EndReason};
pub use resources::Resources;
pub use secret::{Token, token_text};
/// For [`text_id`], which is used where `serde` may not be a dependency.
#[doc(hidden)]
pub use serde;
pub use state::{Operation, SandboxState, Transition, TransitionRefused};
pub use time::{Clock, ManualClock, SystemClock, Timestamp};
