//! The invisible freeze of a sandbox that nobody uses (architecture, decision 6).
//!
//! Owns, of one sandbox: who needs it awake, whether its processes are frozen, and what was last
//! seen of its use of the processor.
//!
//! ```text
//!            hold ──────────────▶ (frozen?) ── yes ──▶ thaw ──▶ awake
//!   awake ── no hold, agent idle, processor idle ──▶ freeze ──▶ dozing ── hold ──▶ awake
//! ```
//!
//! Invariants:
//! - Whoever has a [`Hold`] finds running processes: a hold is counted before it is looked whether
//!   they are frozen, and frozen is noted before holds are counted. Both are sequentially
//!   consistent, so one of the two sides sees the other.
//! - The state of the sandbox stays `running`; nothing of this is written down. A restarted node
//!   thaws what it adopts.
//!
//! Holds are taken by the gateway's requests and by the actor around its calls to the agent. Only
//! the actor lets a sandbox doze off. What ends it (capture, removal) thaws by itself.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use sandhold_engine::{Engine, EngineError, InstanceRef};
use sandhold_platform::{Hold, Holds};
use sandhold_types::Timestamp;

/// When to look again after a sandbox was found busy.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// How long the processor is watched before a sandbox counts as idle.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// A sandbox that uses more of one core than this works, though nobody sees on what: an idle one
/// takes about three percent in its engine.
const IDLE_CPU_PERCENT_MAX: u64 = 20;

/// How often sandboxes doze off and wake, over all of a node.
#[derive(Debug, Default)]
pub struct DozeCounts {
    dozed: AtomicU64,
    thawed: AtomicU64,
}

impl DozeCounts {
    /// How often a sandbox was frozen.
    #[must_use]
    pub fn dozed(&self) -> u64 {
        self.dozed.load(Ordering::Relaxed)
    }

    /// How often one was thawed because somebody needed it.
    #[must_use]
    pub fn thawed(&self) -> u64 {
        self.thawed.load(Ordering::Relaxed)
    }
}

/// The doze of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Doze {
    holds: Arc<Holds>,
    frozen: AtomicBool,
    /// Held while processes are being frozen or thawed.
    turning: tokio::sync::Mutex<()>,
    not_before_ms: AtomicU64,
    processor: Mutex<Option<Look>>,
}

/// What was seen of the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Look {
    at: Timestamp,
    used_usec: u64,
}

impl Doze {
    /// Keeps the processes running until the answer is dropped, and thaws them if they are frozen.
    pub(crate) async fn hold(
        &self,
        engine: &dyn Engine,
        instance: impl FnOnce() -> InstanceRef,
        counts: &DozeCounts,
    ) -> Result<Hold, EngineError> {
        if let Some(hold) = self.try_hold() {
            return Ok(hold);
        }
        let hold = self.holds.hold();
        let _turn = self.turning.lock().await;
        if self.frozen.load(Ordering::SeqCst) {
            engine.thaw(&instance()).await?;
            self.frozen.store(false, Ordering::SeqCst);
            counts.thawed.fetch_add(1, Ordering::Relaxed);
        }
        Ok(hold)
    }

    /// Keeps the processes running until the answer is dropped, unless they are frozen.
    pub(crate) fn try_hold(&self) -> Option<Hold> {
        let hold = self.holds.hold();
        (!self.frozen.load(Ordering::SeqCst)).then_some(hold)
    }

    /// Freezes the processes unless somebody holds them.
    pub(crate) async fn doze_off(
        &self,
        engine: &dyn Engine,
        instance: &InstanceRef,
        counts: &DozeCounts,
    ) -> Result<(), EngineError> {
        let _turn = self.turning.lock().await;
        self.frozen.store(true, Ordering::SeqCst);
        if self.holds.count() > 0 {
            self.frozen.store(false, Ordering::SeqCst);
            return Ok(());
        }
        if let Err(error) = engine.freeze(instance).await {
            // It may have happened all the same; thawing what is not frozen does no harm.
            if engine.thaw(instance).await.is_ok() {
                self.frozen.store(false, Ordering::SeqCst);
            }
            return Err(error);
        }
        counts.dozed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The processes are other ones now, and not frozen.
    pub(crate) fn forget(&self) {
        self.frozen.store(false, Ordering::SeqCst);
        *self.processor() = None;
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::SeqCst)
    }

    /// Whether it is worth looking, at `now`, if it could doze off.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        !self.is_frozen()
            && self.holds.count() == 0
            && now.unix_ms() >= self.not_before_ms.load(Ordering::Relaxed)
    }

    /// It was found busy at `now`.
    pub(crate) fn was_busy(&self, now: Timestamp) {
        self.put_off(now, RETRY_INTERVAL);
    }

    /// Whether it left the processor alone since the last look. The first look only begins to watch.
    pub(crate) fn left_processor_alone(&self, now: Timestamp, used_usec: u64) -> bool {
        let look = Look { at: now, used_usec };
        let mut last = self.processor();
        let idle = last.is_some_and(|before| is_idle(before, look));
        let stale = last.is_none_or(|before| now.since(before.at) > 2 * RETRY_INTERVAL);
        *last = Some(look);
        if !idle || stale {
            self.put_off(now, WATCH_INTERVAL);
        }
        idle && !stale
    }

    fn put_off(&self, now: Timestamp, by: Duration) {
        self.not_before_ms
            .store(now.plus(by).unix_ms(), Ordering::Relaxed);
    }

    fn processor(&self) -> std::sync::MutexGuard<'_, Option<Look>> {
        self.processor
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_idle(before: Look, now: Look) -> bool {
    let elapsed_usec = u64::try_from(now.at.since(before.at).as_micros()).unwrap_or(u64::MAX);
    let used_usec = now.used_usec.saturating_sub(before.used_usec);
    elapsed_usec > 0
        && used_usec.saturating_mul(100) <= elapsed_usec.saturating_mul(IDLE_CPU_PERCENT_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(at_ms: u64, used_usec: u64) -> Look {
        Look {
            at: Timestamp::from_unix_ms(at_ms),
            used_usec,
        }
    }

    #[test]
    fn an_engine_that_idles_is_idle_and_one_that_computes_is_not() {
        assert!(is_idle(look(0, 0), look(1000, 30_000)));
        assert!(!is_idle(look(0, 0), look(1000, 400_000)));
        assert!(!is_idle(look(5, 0), look(5, 0)), "no time has passed");
    }

    #[test]
    fn the_first_look_and_one_after_a_long_pause_only_begin_to_watch() {
        let doze = Doze::default();
        let at = Timestamp::from_unix_ms;
        assert!(!doze.left_processor_alone(at(0), 0));
        assert!(doze.left_processor_alone(at(500), 0));
        assert!(!doze.left_processor_alone(at(60_000), 0));
    }

    #[test]
    fn what_is_held_is_not_due() {
        let doze = Doze::default();
        let now = Timestamp::from_unix_ms(10);
        assert!(doze.is_due(now));
        let hold = doze.holds.hold();
        assert!(!doze.is_due(now));
        drop(hold);
        doze.was_busy(now);
        assert!(!doze.is_due(now));
        assert!(doze.is_due(now.plus(RETRY_INTERVAL)));
    }
}
