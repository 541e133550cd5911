//! Finds sandboxes whose lifetime is over, that nobody uses, or with which something was not finished.
//!
//! It only looks and tells; the actor decides, from state read under its own lock (R-L2). An actor
//! whose mailbox is full is told at the next tick.

use std::{sync::Arc, time::Duration};

use sandhold_types::{SandboxState, Timestamp};

use crate::{
    actor::Command,
    node::Dependencies,
    registry::{Entry, Registry},
};

/// How late an end may be noticed.
const TICK: Duration = Duration::from_millis(250);
/// How often it is looked after something that was not finished, in ticks.
const RETRY_TICKS: u64 = 40;

/// Looks once, at `now`.
pub(crate) fn sweep(registry: &Registry, now: Timestamp, tick: u64, doze_after: Option<Duration>) {
    for entry in registry.entries() {
        let command = match entry.view().state {
            // Whoever owns it may be at work on it right now; if so, it finds nothing left to do.
            state if state.is_transient() && state != SandboxState::Creating => {
                tick.is_multiple_of(RETRY_TICKS).then_some(Command::Sweep)
            }
            SandboxState::Running if entry.is_over(now) || tick.is_multiple_of(RETRY_TICKS) => {
                Some(Command::Sweep)
            }
            SandboxState::Running => may_doze(&entry, now, doze_after).then_some(Command::Doze),
            SandboxState::Paused => tick.is_multiple_of(RETRY_TICKS).then_some(Command::Sweep),
            _ => None,
        };
        if let Some(command) = command {
            let _ = entry.mailbox.try_send(command);
        }
    }
}

fn may_doze(entry: &Entry, now: Timestamp, doze_after: Option<Duration>) -> bool {
    doze_after.is_some_and(|after| now >= entry.last_activity().plus(after))
        && entry.doze.is_due(now)
}

/// Looks for ever.
pub(crate) async fn run(
    dependencies: Arc<Dependencies>,
    registry: Arc<Registry>,
    doze_after: Option<Duration>,
) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for tick in 1u64.. {
        ticks.tick().await;
        sweep(&registry, dependencies.clock.now(), tick, doze_after);
    }
}
