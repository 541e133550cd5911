//! State changes of sandboxes, as the gateway hears of them.

use sandhold_platform::{Routes, StateChange};
use tokio::sync::broadcast;

/// State changes from some moment on.
#[derive(Debug)]
pub(crate) struct Changes(Option<broadcast::Receiver<StateChange>>);

/// What has come in of state changes.
#[derive(Debug)]
pub(crate) enum Change {
    /// This one.
    Of(StateChange),
    /// So many that some were missed.
    Many,
}

impl Changes {
    /// Those that `routes` pushes from now on.
    pub(crate) fn of(routes: &dyn Routes) -> Self {
        Self(Some(routes.changes()))
    }

    /// The next one; never, once nobody can push any more.
    pub(crate) async fn next(&mut self) -> Change {
        if let Some(changes) = &mut self.0 {
            match changes.recv().await {
                Ok(change) => return Change::Of(change),
                Err(broadcast::error::RecvError::Lagged(_)) => return Change::Many,
                Err(broadcast::error::RecvError::Closed) => self.0 = None,
            }
        }
        std::future::pending().await
    }
}
