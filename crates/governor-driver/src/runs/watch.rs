//! Hears when a run's process ends, so that nobody waits for the loop's next look to be told.
//!
//! A hint and no more: how it ended is read from its file, by the loop. One that breaks off or never
//! hears anything costs a run nothing but that wait.

use sandhold_governor::Platform;
use tokio::task::JoinHandle;

use super::{Executed, agent::Agent, head::RunHead};
use crate::{direct::DirectSandboxes, governor::Governor, guest::Guests};

/// Ends when dropped.
#[derive(Debug)]
pub(super) struct Watch(JoinHandle<()>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<P: Platform + DirectSandboxes + Guests + 'static> Governor<P> {
    /// Wakes the loop of this run when its process ends.
    pub(super) fn watch(&self, executed: &Executed, head: &RunHead) -> Option<Watch> {
        let (_, sandbox, generation) = head.names()?;
        let (governor, here, tag) = (self.clone(), executed.here.clone(), head.work.clone());
        Some(Watch(tokio::spawn(async move {
            let agent = Agent {
                guests: &governor.shared.drive.platform,
                sandbox: &sandbox,
                generation,
            };
            agent.until_end(&tag).await;
            here.wake.notify_one();
        })))
    }
}
