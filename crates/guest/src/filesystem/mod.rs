//! The filesystem service: what there is, making, moving, removing, watching.
//!
//! ```text
//!   service ── blocking thread with the user's rights ([`crate::rights`]) ── operations, entry
//!      └── watch: one inotify instance and one task per watcher
//!            task ── bounded channel ──> WatchDir stream, or GetWatcherEvents
//! ```
//!
//! Invariants:
//! - Every look at a file is done with the caller's rights.
//! - A watcher's memory is bounded by its channel and the kernel's queue. When the kernel's queue
//!   overflows, the watcher says "look again": a write event named `.`.

pub mod entry;
pub mod error;
pub mod operations;
pub mod service;
pub mod watch;
pub mod watch_events;
