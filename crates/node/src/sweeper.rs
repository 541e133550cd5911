//! Finds sandboxes whose lifetime is over, and removals that were not finished.
//!
//! It only looks and tells; the actor decides, from state read under its own lock (R-L2). An actor
//! whose mailbox is full is told at the next tick.

use std::{sync::Arc, time::Duration};

use sandhold_types::{SandboxState, Timestamp};

use crate::{actor::Command, node::Dependencies, registry::Registry};

/// How late an end may be noticed.
const TICK: Duration = Duration::from_millis(250);
/// How often an unfinished removal is tried again, in ticks.
const REMOVAL_RETRY_TICKS: u64 = 40;

/// Looks once, at `now`.
pub(crate) fn sweep(registry: &Registry, now: Timestamp, tick: u64) {
    for entry in registry.entries() {
        let due = match entry.view().state {
            SandboxState::Killing => tick.is_multiple_of(REMOVAL_RETRY_TICKS),
            // In transition: skipped (R-L5).
            state if state.is_transient() => false,
            _ => entry.is_over(now),
        };
        if due {
            let _ = entry.mailbox.try_send(Command::Sweep);
        }
    }
}

/// Looks for ever.
pub(crate) async fn run(dependencies: Arc<Dependencies>, registry: Arc<Registry>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for tick in 1u64.. {
        ticks.tick().await;
        sweep(&registry, dependencies.clock.now(), tick);
    }
}
