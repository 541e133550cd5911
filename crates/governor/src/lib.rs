//! The right to delete: admission, leases, runs, the reclaimer, and why (R-G1 to R-G19).
//!
//! ```text
//!   callers ──▶ tasks: Acquire · Release · RunLoop          every 60 s: Cycle ─▶ Reclaimer ─▶ Removal, Settle
//!                 │ one effect at a time                                             │
//!                 ├──────────────── Verb ────────────▶ Store: Books::step, one atomic step each
//!                 └──────────────── Call ──▶ Valve ──▶ Platform: ours, or any E2B-compatible one
//! ```
//!
//! Everything here is a state machine without I/O, clock or randomness: `step(input, now)` and the
//! effect it wants next. Drivers carry the effects out; the simulator carries them out too, with
//! faults between any two. Correctness rests on the store's atomic verbs alone: a replica that dies,
//! sleeps through its leases or acts twice costs time, never somebody's sandbox.
//!
//! Where to read: [`rules`] the numbers · [`colour`] who is alive · [`books`] the atomic verbs ·
//! [`reclaimer`] two looks and a plan · [`tasks`] the order of effects · [`explain`] the words.
//!
//! What this crate never does: I/O, reading a clock, guessing from the absence of a thing.

#![forbid(unsafe_code)]

pub mod books;
pub mod colour;
pub mod explain;
pub mod ids;
pub mod listing;
mod ports;
pub mod reclaimer;
pub mod record;
pub mod rules;
pub mod tasks;
pub mod valve;

pub use ports::{Call, CallError, CallKind, Listed, Platform, Reply, Store, StoreError};
