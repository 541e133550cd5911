//! The process service: what clients start, watch, feed, signal and reconnect to.
//!
//! ```text
//!  Start ── launch ──> Process ── table (running) ── exit ──> table (ended, kept a minute)
//!                        │  stdin writer / terminal
//!                        │
//!     pump: stdout ──┐   │
//!     pump: stderr ──┼─> OutputLog ── cursor ──> Start stream
//!     pump: terminal ┘   (bounded)  └ cursor ──> Connect stream …
//! ```
//!
//! Invariants:
//! - A process lives on when its client goes away. It ends by itself, by a signal, or at the
//!   deadline that its Start call carried.
//! - The end event comes after all output that the process wrote before it exited.
//! - Memory per process is bounded by [`output::WINDOW_BYTES`]; a reader that does not read
//!   blocks the process it reads from, and nothing else. Where several read one process, one
//!   that stands still for [`output::STALL_MAX`] while another keeps up is cut off.
//! - A signal reaches the whole process group, and only while its leader is not reaped, so it
//!   can never hit a process that reused the number.
//!
//! Output of processes that a command leaves behind is read for [`pump::AFTER_EXIT_MAX`] more,
//! then thrown away; they never lose their standard output, so they do not die of SIGPIPE.

pub mod exit;
pub mod launch;
pub mod output;
pub mod pump;
pub mod service;
pub mod table;
