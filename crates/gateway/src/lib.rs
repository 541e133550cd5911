//! The way from outside to a port of a sandbox (R-P7).
//!
//! ```text
//!   serve ──▶ target (whose is it?) ──▶ forward ──┬─▶ pool ──▶ Routes::dial ──▶ sandbox
//!                                        │        ├─▶ body      frames both ways
//!                      answers ◀─ Failure┘        └─▶ upgrade   bytes both ways
//! ```
//!
//! What it promises: requests go to exactly the sandbox and incarnation that they name; no
//! credential of the platform enters a guest; control routes of the agent cannot be reached from
//! outside; nothing is collected in memory; whatever cannot be forwarded gets an honest answer.
//!
//! It knows sandboxes by [`sandhold_platform::Routes`] only: it starts, stops and wakes none.

#![forbid(unsafe_code)]

mod activity;
mod answers;
mod body;
mod changes;
mod config;
mod connection;
mod finding;
mod forward;
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod headers;
mod metered;
mod paths;
mod pool;
mod serve;
mod signature;
mod target;
mod upgrade;

pub use body::{BodyError, ReplyBody};
pub use config::{ForwardedTrust, GatewayConfig};
pub use forward::{ClientAddress, Gateway};
pub use paths::is_control;
pub use serve::{Drained, serve};
pub use signature::SignedFile;
pub use target::{AGENT_PORT, INTERPRETER_PORT, Refusal, Target, decide};
