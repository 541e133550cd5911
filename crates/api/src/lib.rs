//! The control plane over HTTP: E2B's routes of both generations, CubeSandbox's, and our own `/v1`.
//!
//! ```text
//!   client ─▶ identify ─▶ CORS ─▶ route ─▶ who asks ─▶ wire::* (JSON → values, pure)
//!                                             │                │
//!                              Store     Platform, Templates, TemplateBuilds ─▶ wire::* (values → JSON)
//! ```
//!
//! Owns: routes, wire types, authentication, paging, idempotency, fairness between tenants' creates.
//!
//! Invariants:
//! - A key sees and touches only its own bucket; another's sandbox is not found (R-P8).
//! - Every refusal is JSON with a stable code and says whether to try again (R-P10).
//! - What is asked for and cannot be had is refused, never ignored.
//! - Wire types stay in [`wire`]; nothing of the domain is serialised by itself.
//! - Reads go to what the platform last published and wait for nobody (R-P9).
//!
//! Never: knows engines, keeps state of sandboxes, or retries by itself.

#![forbid(unsafe_code)]

mod auth;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod idempotency;
mod links;
mod openapi;
mod page;
mod request;
mod routes;
mod settings;
mod state;
mod wire;

pub use request::Dialect;
pub use routes::router;
pub use settings::{Budgets, DefaultLifetimes, Limits, Settings};
pub use state::{ApiParts, ApiState};
