//! A kernel of either kind, and what is done to it besides running code.

use tokio::sync::mpsc;

use super::{
    bash::BashKernel,
    events::KernelEvent,
    jupyter::{JupyterKernel, KernelError},
    language::Family,
    process::KernelProcess,
    seeds,
    variables::Changes,
};

/// A running kernel.
#[derive(Debug)]
pub(super) enum Kernel {
    Jupyter(JupyterKernel),
    Bash(BashKernel),
}

impl Kernel {
    /// Runs the code. The events end early if the kernel does.
    pub(super) async fn execute(
        &self,
        code: &str,
    ) -> Result<mpsc::Receiver<KernelEvent>, KernelError> {
        match self {
            Self::Jupyter(kernel) => kernel.execute(code, false).await,
            Self::Bash(kernel) => kernel.execute(code, false).await,
        }
    }

    /// Runs code of the agent's own and waits for its end. What it says is dropped.
    async fn execute_silently(&self, code: &str) -> Result<(), KernelError> {
        let mut events = match self {
            Self::Jupyter(kernel) => kernel.execute(code, true).await?,
            Self::Bash(kernel) => kernel.execute(code, true).await?,
        };
        while let Some(event) = events.recv().await {
            match event {
                KernelEvent::Failed(failure) | KernelEvent::Replied(Some(failure)) => {
                    tracing::warn!(
                        name = failure.name,
                        value = failure.value,
                        "a kernel refuses"
                    );
                }
                KernelEvent::Idle => return Ok(()),
                _ => {}
            }
        }
        Err(KernelError::EndedEarly(self.process().ended().await))
    }

    /// Interrupts what it is doing.
    pub(super) async fn interrupt(&self) {
        match self {
            Self::Jupyter(kernel) => kernel.interrupt().await,
            Self::Bash(kernel) => kernel.process().interrupt(),
        }
    }

    /// Its process.
    pub(super) fn process(&self) -> &KernelProcess {
        match self {
            Self::Jupyter(kernel) => kernel.process(),
            Self::Bash(kernel) => kernel.process(),
        }
    }

    /// Makes a new kernel what the contract and the copying of sandboxes need.
    pub(super) async fn prepare(&self, family: &Family, entropy: &[u8]) -> Result<(), KernelError> {
        match seeds::preparation(family, entropy) {
            Some(code) if !self.has_side_channel() => self.execute_silently(&code).await,
            _ => Ok(()),
        }
    }

    /// Whether it can be reseeded while it runs a cell.
    pub(super) fn has_side_channel(&self) -> bool {
        matches!(self, Self::Jupyter(kernel) if kernel.side_channel().is_some())
    }

    /// Gives new seeds to its generators (R-T6). Without a side channel it must be idle.
    pub(super) async fn reseed(&self, family: &Family, entropy: &[u8]) -> Result<(), KernelError> {
        if let Self::Jupyter(kernel) = self
            && let Some(channel) = kernel.side_channel()
        {
            return Ok(channel.reseed(entropy).await?);
        }
        match seeds::reseeding(family, entropy) {
            Some(code) => self.execute_silently(&code).await,
            None => Ok(()),
        }
    }

    /// Changes its variables. It must be idle.
    pub(super) async fn change_variables(
        &self,
        family: &Family,
        changes: &Changes,
    ) -> Result<(), KernelError> {
        if changes.is_empty() {
            return Ok(());
        }
        if let Self::Jupyter(kernel) = self
            && let Some(channel) = kernel.side_channel()
        {
            return Ok(channel.change_variables(changes).await?);
        }
        match changes.code(family) {
            Some(code) => self.execute_silently(&code).await,
            None => Ok(()),
        }
    }
}
