//! Dying on purpose at a named step, so that recovery from each is a test (R-L3).

use std::sync::Mutex;

use sandhold_types::{FaultPlan, FaultPoint};

/// Carries out a [`FaultPlan`]. Without one it does nothing.
#[derive(Debug, Default)]
pub struct Faults {
    plan: Mutex<Option<FaultPlan>>,
}

impl Faults {
    /// Dies according to `plan`, if there is one.
    #[must_use]
    pub fn new(plan: Option<FaultPlan>) -> Self {
        Self {
            plan: Mutex::new(plan),
        }
    }

    /// Notes that `step` was reached; does not return if the process is to die there. It dies by
    /// SIGKILL, so that nothing is cleaned up on the way.
    pub fn reach(&self, step: &'static str) {
        let mut plan = self
            .plan
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if plan
            .as_mut()
            .is_some_and(|plan| plan.reached(FaultPoint(step)))
        {
            let me = rustix::process::getpid();
            let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
            std::process::abort();
        }
    }
}
