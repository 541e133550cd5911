//! How busy the sandbox is: what `/activity` tells the host, which freezes or ends idle ones.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use sandhold_types::Clock;

/// Counts open streams and remembers the last sign of life. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ActivityMeter {
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
}

#[derive(Debug, Default)]
struct Shared {
    streams: AtomicUsize,
    last_unix_ms: AtomicU64,
}

impl ActivityMeter {
    /// A meter that has just seen activity.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let meter = Self {
            shared: Arc::default(),
            clock,
        };
        meter.touch();
        meter
    }

    /// Somebody wants something now.
    pub fn touch(&self) {
        let now = self.clock.now().unix_ms();
        self.shared.last_unix_ms.store(now, Ordering::Relaxed);
    }

    /// A stream is open for as long as the guard lives.
    #[must_use]
    pub fn begin_stream(&self) -> StreamGuard {
        self.shared.streams.fetch_add(1, Ordering::Relaxed);
        self.touch();
        StreamGuard(self.clone())
    }

    /// How many streams are open.
    #[must_use]
    pub fn streams(&self) -> usize {
        self.shared.streams.load(Ordering::Relaxed)
    }

    /// When the last call began or the last stream ended.
    #[must_use]
    pub fn last_unix_ms(&self) -> u64 {
        self.shared.last_unix_ms.load(Ordering::Relaxed)
    }
}

/// Counts as an open stream until it is dropped.
#[derive(Debug)]
pub struct StreamGuard(ActivityMeter);

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.shared.streams.fetch_sub(1, Ordering::Relaxed);
        self.0.touch();
    }
}
