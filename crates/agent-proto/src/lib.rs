//! The messages between a sandbox's agent and everybody who talks to it.
//!
//! - [`process`] and [`filesystem`]: the envd services (wire contract 2.3), generated from
//!   `proto/` by the crate in `generate/` and committed. Proto-JSON and binary.
//! - [`frame`]: the five-byte envelope of Connect streams, for clients on the host and for tests.
//! - [`control`]: the JSON bodies of the host's own calls, and the names of their routes.
//!
//! This crate does no I/O. It knows neither HTTP nor tokio.

#![forbid(unsafe_code)]

pub mod control;
pub mod frame;

/// The process service.
pub mod process {
    #[allow(
        missing_docs,
        non_camel_case_types,
        dead_code,
        unused_imports,
        unused_qualifications,
        unreachable_pub,
        clippy::all,
        clippy::large_futures
    )]
    mod generated {
        include!("generated/process.rs");
    }
    pub use generated::{__buffa::oneof, *};

    /// The name that its routes begin with.
    pub const SERVICE: &str = "process.Process";
}

/// The filesystem service.
pub mod filesystem {
    #[allow(
        missing_docs,
        non_camel_case_types,
        dead_code,
        unused_imports,
        unused_qualifications,
        unreachable_pub,
        clippy::all,
        clippy::large_futures
    )]
    mod generated {
        include!("generated/filesystem.rs");
    }
    pub use generated::{__buffa::oneof, *};

    /// The name that its routes begin with.
    pub const SERVICE: &str = "filesystem.Filesystem";
}

/// The version of the envd contract that the agent keeps (wire contract 2.5).
pub const ENVD_VERSION: &str = "0.6.13";
/// The port of the envd contract.
pub const ENVD_PORT: u16 = 49983;
/// The port of the code interpreter contract.
pub const INTERPRETER_PORT: u16 = 49999;
