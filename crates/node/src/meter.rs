//! Samples of what each sandbox uses, taken from the engine without waking the guest.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sandhold_engine::Usage;
use sandhold_platform::MetricSample;
use sandhold_types::{Resources, SandboxState, Timestamp};

use crate::{node::Dependencies, registry::Registry};

/// How often each sandbox is sampled (wire contract 5).
pub(crate) const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);
/// One hour of samples is kept.
const SAMPLES_MAX: usize = 720;
const MIB: u64 = 1024 * 1024;

/// The newest samples of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    inner: Mutex<RingInner>,
}

#[derive(Debug, Default)]
struct RingInner {
    samples: VecDeque<MetricSample>,
    last: Option<(Timestamp, u64)>,
}

impl Ring {
    /// Adds a sample taken at `at`.
    pub(crate) fn add(&self, at: Timestamp, usage: &Usage, resources: &Resources) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let cpu_used_pct = cpu_percent(inner.last, (at, usage.cpu_usec));
        inner.last = Some((at, usage.cpu_usec));
        if inner.samples.len() == SAMPLES_MAX {
            inner.samples.pop_front();
        }
        inner.samples.push_back(MetricSample {
            at,
            cpu_count: resources.cpu_count(),
            cpu_used_pct,
            memory_used: usage.memory_bytes.saturating_sub(usage.memory_cache_bytes),
            memory_total: u64::from(resources.memory_mib) * MIB,
            memory_cache: usage.memory_cache_bytes,
            disk_used: usage.disk_bytes,
            disk_total: u64::from(resources.disk_mib) * MIB,
        });
    }

    pub(crate) fn samples(&self) -> Vec<MetricSample> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.samples.iter().copied().collect()
    }
}

/// Processor use between two readings, in percent of one core, to a hundredth.
fn cpu_percent(before: Option<(Timestamp, u64)>, now: (Timestamp, u64)) -> f64 {
    let Some((then, used)) = before else {
        return 0.0;
    };
    let elapsed_usec = now.0.since(then).as_micros();
    let hundredths = u128::from(now.1.saturating_sub(used)) * 10_000;
    let hundredths = hundredths.checked_div(elapsed_usec).unwrap_or(0);
    f64::from(u32::try_from(hundredths).unwrap_or(u32::MAX)) / 100.0
}

/// Samples one sandbox now.
pub(crate) async fn sample(dependencies: &Dependencies, entry: &crate::registry::Entry) {
    let view = entry.view();
    if view.state != SandboxState::Running {
        return;
    }
    let instance = dependencies.layout.instance(&view.id, view.incarnation);
    match dependencies.usage(&instance).await {
        Ok(usage) => entry
            .meter
            .add(dependencies.clock.now(), &usage, &view.resources),
        Err(error) => tracing::debug!(sandbox = %view.id, %error, "no sample"),
    }
}

/// Samples every sandbox, for ever.
pub(crate) async fn run(dependencies: Arc<Dependencies>, registry: Arc<Registry>) {
    let mut ticks = tokio::time::interval(SAMPLE_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        for entry in registry.entries() {
            sample(&dependencies, &entry).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_use_is_in_percent_of_one_core() {
        let at = Timestamp::from_unix_ms;
        assert!((cpu_percent(Some((at(0), 0)), (at(1000), 500_000)) - 50.0).abs() < 0.01);
        assert!((cpu_percent(Some((at(0), 0)), (at(1000), 2_000_000)) - 200.0).abs() < 0.01);
        assert!(cpu_percent(None, (at(1000), 7)).abs() < 0.01);
        assert!(cpu_percent(Some((at(5), 9)), (at(5), 9)).abs() < 0.01);
    }

    #[test]
    fn samples_are_bounded() {
        let ring = Ring::default();
        for second in 0..2000 {
            let at = Timestamp::from_unix_ms(second * 1000);
            ring.add(at, &Usage::default(), &Resources::default());
        }
        let samples = ring.samples();
        assert_eq!(samples.len(), SAMPLES_MAX);
        assert_eq!(samples.last().unwrap().at.unix_s(), 1999);
    }
}
