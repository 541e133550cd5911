//! Why a sandbox's network is not as it should be.

use sandhold_types::SandboxId;

/// A failed network operation.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// A step of building, changing or removing a sandbox's network failed.
    #[error("could not {step} for sandbox {sandbox}")]
    Step {
        /// What was being done.
        step: &'static str,
        /// For which sandbox.
        sandbox: SandboxId,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The machine's networks cannot be listed.
    #[error("could not list the networks of this node")]
    List(#[source] std::io::Error),
    /// The machine lacks something; the text says how to mend it.
    #[error("{what}")]
    Unsupported {
        /// What is missing and what to do.
        what: String,
    },
}
