//! The agent inside every sandbox: processes, files, watchers, the code interpreter, and the
//! control calls of the host.
//!
//! ```text
//!            host (gateway, node)
//!              |            |
//!         49983 envd    49999 interpreter        one listener each, [`server`]
//!              |            |
//!   auth -> process   filesystem   files   control        interpreter
//!              |         |           |        |                |
//!              +-- account, identity (user's rights) ---- state (token, env, ids)
//!              |
//!           children (the only place that forks, and the only one that waits)
//! ```
//!
//! Invariants:
//! - [`children::Children`] is the only code that creates or reaps a process. As PID 1 it takes
//!   every exit status in the sandbox, so anybody else who waits would wait for ever.
//! - No data-plane call is answered before the first `/init` has set an access token.
//! - Everything a client asks for on a file is done with the rights of the user it names.
//!
//! It never resolves a host name, never loads an NSS module (it is linked statically), and never
//! trusts a client or another process of the sandbox with its memory: every buffer is bounded.

pub mod account;
pub mod activity;
pub mod app;
pub mod async_fd;
pub mod auth;
pub mod children;
pub mod clone_filter;
pub mod config;
pub mod control;
pub mod drain;
pub mod files;
pub mod filesystem;
pub mod fuzzing;
pub mod http_error;
pub mod interpreter;
pub mod memory_guard;
pub mod metrics;
pub mod paths;
pub mod process;
pub mod rights;
pub mod rpc;
pub mod server;
pub mod state;
pub mod sudo;
