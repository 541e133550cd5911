//! A boot from the sandbox's files, without booting: what a wake-up without memory comes to.
//!
//! ```text
//!   template's commands given up ─▶ contexts forgotten ─▶ every process ended ─▶ all started anew
//! ```
//!
//! The agent itself stays, and with it the sandbox's identity. Invariant: when the call returns, no
//! process is left that was there before; those of the template may not be up yet, `/ready` tells.

use std::time::Duration;

use super::routes::Control;

/// Processes that were sent SIGKILL are gone within this time, or nothing can be done about it.
const END_WAIT: Duration = Duration::from_secs(10);

/// Why the sandbox was not started anew.
#[derive(Debug, thiserror::Error)]
pub enum RestartError {
    /// Some process does not end.
    #[error("processes are left {} s after they were killed", END_WAIT.as_secs())]
    ProcessesLeft,
}

impl Control {
    /// Ends every process but the agent and brings up what the template wants running.
    ///
    /// # Errors
    /// A process does not end; then nothing is started.
    pub async fn restart(&self) -> Result<(), RestartError> {
        self.readiness.give_up();
        self.interpreter.forget_contexts().await;
        let ended = tokio::time::timeout(END_WAIT, self.children.end_all());
        ended.await.map_err(|_| RestartError::ProcessesLeft)?;
        self.interpreter.warm_up();
        self.readiness.begin();
        Ok(())
    }
}
