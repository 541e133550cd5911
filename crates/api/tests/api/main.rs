//! The control plane, in process, over a platform in memory.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod buckets;
mod common;
mod corpus;
mod governor;
mod hostile;
mod http_rules;
mod idempotency;
mod keys;
mod lifetimes;
mod listing;
mod refusals;
mod sandboxes;
mod sleep;
mod templates;
mod travel;
