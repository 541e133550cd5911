//! The simulated world of the governor (issue: who may delete a sandbox).
//!
//! The governor's own state machines run in a world with a virtual clock, an unreliable store, a
//! scripted platform and replicas that die; checkers look after every event. A seed is a world; the
//! same seed is the same world, byte for byte.
//!
//! `cargo run --release -p sandhold-sim -- --seeds 10000` runs many; `--seed N --trace` shows one.

#![forbid(unsafe_code)]

pub mod check;
pub mod faults;
pub mod platform;
mod replica;
pub mod rng;
pub mod scenario;
mod session;
pub mod world;
