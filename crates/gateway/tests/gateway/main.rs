//! The gateway as clients meet it: real sockets on both sides, sandboxes played by servers here.

// The helpers here are only called by tests, which lints recognise inside #[test] alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod failures;
mod forwarding;
mod limits;
mod rules;
mod streams;
mod support;
mod upgrades;
mod view;
mod waking;
