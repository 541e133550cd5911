//! Noting that a sandbox is used, and noticing that a request no longer moves.
//!
//! One [`Usage`] accompanies a request from its head to the last byte of its answer. It tells
//! [`Routes`] about moving bytes at most once per [`TOUCH_INTERVAL`] (R-L5), and says when neither
//! side has sent anything for the idle timeout. It holds no timer unless somebody waits on it. As
//! long as it lives, the sandbox does not doze off.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use sandhold_platform::{ActivityKind, Hold, Routes};
use sandhold_types::SandboxId;
use tokio::time::Instant;

use crate::metered::Meter;

/// How often moving bytes are noted. Far below every idle window that a sandbox can have, which
/// is counted in whole seconds.
const TOUCH_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Usage {
    routes: Arc<dyn Routes>,
    sandbox: SandboxId,
    started: Instant,
    idle_timeout: Duration,
    /// Milliseconds after `started`.
    progress_ms: AtomicU64,
    touched_ms: AtomicU64,
    upload_complete: AtomicBool,
    /// Keeps the sandbox from dozing off meanwhile.
    _hold: Hold,
}

impl Usage {
    /// Begins with the head of a request, which counts as use.
    pub(crate) fn begin(
        routes: Arc<dyn Routes>,
        sandbox: SandboxId,
        hold: Hold,
        idle_timeout: Duration,
    ) -> Arc<Self> {
        routes.touch(&sandbox, ActivityKind::Request);
        Arc::new(Self {
            routes,
            sandbox,
            started: Instant::now(),
            idle_timeout,
            progress_ms: AtomicU64::new(0),
            touched_ms: AtomicU64::new(0),
            upload_complete: AtomicBool::new(false),
            _hold: hold,
        })
    }

    pub(crate) fn sandbox(&self) -> &SandboxId {
        &self.sandbox
    }

    /// The head of the answer has come.
    pub(crate) fn answered(&self) {
        self.progress_ms.store(self.elapsed_ms(), Ordering::Relaxed);
        self.routes.touch(&self.sandbox, ActivityKind::Request);
    }

    /// The last byte of the request has been passed on.
    pub(crate) fn upload_completed(&self) {
        self.upload_complete.store(true, Ordering::Release);
    }

    pub(crate) fn is_upload_complete(&self) -> bool {
        self.upload_complete.load(Ordering::Acquire)
    }

    /// When the request counts as idle, if nothing moves until then.
    pub(crate) fn idle_at(&self) -> Instant {
        let progress = Duration::from_millis(self.progress_ms.load(Ordering::Relaxed));
        self.started + progress + self.idle_timeout
    }

    /// Returns once nothing has moved for the idle timeout.
    pub(crate) async fn idle(&self) {
        while Instant::now() < self.idle_at() {
            tokio::time::sleep_until(self.idle_at()).await;
        }
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Meter for Usage {
    /// Bytes moved, either way.
    fn moved(&self) {
        let now = self.elapsed_ms();
        self.progress_ms.store(now, Ordering::Relaxed);
        let touched = self.touched_ms.load(Ordering::Relaxed);
        let interval = u64::try_from(TOUCH_INTERVAL.as_millis()).unwrap_or(u64::MAX);
        if now.saturating_sub(touched) >= interval {
            self.touched_ms.store(now, Ordering::Relaxed);
            self.routes.touch(&self.sandbox, ActivityKind::Stream);
        }
    }
}
