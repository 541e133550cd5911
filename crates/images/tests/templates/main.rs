//! Templates from their sources to the catalogue, with an engine and a network that only pretend.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may fail loudly"
)]

mod building;
mod images;
mod pretend;
mod steps;
mod support;
