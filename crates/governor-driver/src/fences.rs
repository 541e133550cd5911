//! The highest generation that was seen for each sandbox (R-G8).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandhold_governor::CallError;
use sandhold_types::{Generation, SandboxId};

/// What a platform remembers of generations since this process began; before that, the one in a
/// sandbox's metadata counts.
#[derive(Debug, Default)]
pub(crate) struct Fences(Mutex<HashMap<SandboxId, Generation>>);

impl Fences {
    fn highest(&self) -> MutexGuard<'_, HashMap<SandboxId, Generation>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses what is below the highest generation seen, and remembers a higher one.
    pub(crate) fn pass(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
        written: impl FnOnce() -> Option<Generation>,
    ) -> Result<(), CallError> {
        let mut all = self.highest();
        let highest = all
            .entry(sandbox.clone())
            .or_insert_with(|| written().unwrap_or(Generation(0)));
        if generation < *highest {
            return Err(CallError::StaleGeneration);
        }
        *highest = generation;
        Ok(())
    }

    /// It is gone.
    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        self.highest().remove(sandbox);
    }

    /// The highest that was seen, if any was.
    pub(crate) fn seen(&self, sandbox: &SandboxId) -> Option<Generation> {
        self.highest().get(sandbox).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_generation_never_passes_again() {
        // R-G8
        let fences = Fences::default();
        let id: SandboxId = "sandboxsandboxsandbo".parse().unwrap();
        let pass = |n| fences.pass(&id, Generation(n), || Some(Generation(5)));
        assert_eq!(
            pass(4),
            Err(CallError::StaleGeneration),
            "its metadata says 5"
        );
        assert_eq!(pass(7), Ok(()));
        assert_eq!(pass(6), Err(CallError::StaleGeneration));
        fences.forget(&id);
        assert_eq!(pass(6), Ok(()));
    }
}
