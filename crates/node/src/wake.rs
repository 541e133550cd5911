//! Waiting for a sandbox that does not run, and waking it if it sleeps (R-L7).
//!
//! ```text
//!   requests ─▶ place (at most WAITING_MAX) ─▶ running? ── yes ──▶ route
//!                                               │ in transition: wait for the next state
//!                                               │ asleep: join the one wake-up, begin it if there is none
//!                                               ▼
//!                                            its outcome, to all who joined
//! ```
//!
//! Invariants:
//! - At most one wake-up is under way for a sandbox, however many ask; it belongs to nobody, and goes
//!   on when its callers give up.
//! - Everybody waits within their own deadline.
//!
//! Called by the gateway through [`Routes`](sandhold_platform::Routes). The actor decides whether
//! the sandbox is woken; this only asks it.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture, future::Shared};
use sandhold_platform::{AutoResume, NewLifetime, PlatformError, Resume, Route, WakeError, Waking};
use sandhold_types::{Actor, Deadline, SandboxState};

use crate::{actor::Command, registry::Entry};

/// Requests that may wait for one sandbox to run.
const WAITING_MAX: usize = 512;
/// How long a wake-up may take.
const WAKE_BUDGET: Duration = Duration::from_secs(30);

type Flight = Shared<BoxFuture<'static, Result<(), WakeError>>>;

/// Who waits for one sandbox.
#[derive(Default)]
pub(crate) struct Waiters {
    count: AtomicUsize,
    flight: Mutex<Option<Flight>>,
}

impl std::fmt::Debug for Waiters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiters")
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

/// A place among those who wait.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Waiters {
    fn enter(&self) -> Result<Place<'_>, WakeError> {
        let place = Place(&self.count);
        if self.count.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
            return Err(WakeError::Full {
                waiting_max: WAITING_MAX,
            });
        }
        Ok(place)
    }

    /// The wake-up that is under way, or a new one.
    fn join(&self, entry: &Arc<Entry>) -> Flight {
        let mut flight = self.flight.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(under_way) = flight.as_ref().filter(|flight| flight.peek().is_none()) {
            return under_way.clone();
        }
        let fresh = fly(Arc::clone(entry)).boxed().shared();
        // Nobody's: it is driven though all who wait for it go away.
        tokio::spawn(fresh.clone());
        *flight = Some(fresh.clone());
        fresh
    }
}

/// Wakes a sandbox once.
async fn fly(entry: Arc<Entry>) -> Result<(), WakeError> {
    let deadline = Deadline::after(tokio::time::Instant::now().into_std(), WAKE_BUDGET);
    let resume = Resume {
        waking: Waking::AsPaused,
        lifetime: NewLifetime::AsMade,
        on_timeout: None,
    };
    let asked = entry.ask(deadline, |reply| Command::Resume {
        resume,
        by: Actor::Gateway,
        deadline,
        reply,
    });
    match asked.await {
        Ok(_) | Err(PlatformError::AlreadySo { .. }) => Ok(()),
        Err(PlatformError::NotFound(_)) => Err(WakeError::Gone),
        Err(error) => Err(WakeError::Failed {
            code: error.code(),
            message: error.to_string(),
            retry: error.retry(),
        }),
    }
}

/// Waits until the sandbox runs, waking it if traffic may.
pub(crate) async fn wake(entry: &Arc<Entry>, deadline: Deadline) -> Result<Route, WakeError> {
    let _place = entry.waiters.enter()?;
    let mut states = entry.states();
    let at = tokio::time::Instant::from_std(deadline.instant());
    loop {
        let state = *states.borrow_and_update();
        let late = WakeError::Late { state };
        match state {
            SandboxState::Running => {
                return Ok(Route {
                    sandbox: entry.view(),
                });
            }
            SandboxState::Killing | SandboxState::Killed | SandboxState::Failed => {
                return Err(WakeError::Gone);
            }
            SandboxState::Paused => {
                if entry.view().auto_resume == AutoResume::Off {
                    return Err(WakeError::NotAllowed);
                }
                let flight = entry.waiters.join(entry);
                let outcome = tokio::time::timeout_at(at, flight).await;
                outcome.map_err(|_| late)??;
            }
            _ => {
                let changed = tokio::time::timeout_at(at, states.changed()).await;
                changed.map_err(|_| late)?.map_err(|_| WakeError::Gone)?;
            }
        }
    }
}
