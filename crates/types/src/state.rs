//! The states of a sandbox and *the* transition table (R-L1).
//!
//! ```text
//!             ┌───────────────────────────── any step fails ─────────────┐
//!             │                                                          ▼
//!  (create) creating ──▶ running ──▶ pausing ──▶ paused ──▶ resuming   failed
//!                          │ ▲ ▲ ◀──── refused ──┘  ▲           │        │
//!                          │ │ └────────────────────┼───────────┘        │
//!                          │ ├── snapshotting ──────┘ (back where        │
//!                          │ └── rolling-back          it came from)     │
//!                          ▼                                             ▼
//!                       killing ◀──────── from every state ──────────────┘
//!                          ▼
//!                        killed
//! ```
//!
//! Invariants: `killed` is the only state without a successor; every other state can begin
//! `killing`, because a delete works from everywhere (R-L8); a state in transition is never
//! reported to a client as running (R-L1).

use std::fmt;

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SandboxState {
    /// Being made; not yet answered to anybody.
    Creating,
    /// Answers on its data plane.
    Running,
    /// Being put to disk.
    Pausing,
    /// On disk; uses no memory and no processor.
    Paused,
    /// Being brought back from disk.
    Resuming,
    /// Being captured while it goes on.
    Snapshotting,
    /// Being taken back to a snapshot.
    RollingBack,
    /// Being removed.
    Killing,
    /// Removed; nothing of it is left but its history.
    Killed,
    /// Ended by itself or by a fault; what is left of it waits for removal.
    Failed,
}

/// What is done to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Finish creating.
    Start,
    /// Put to disk.
    Pause,
    /// Bring back.
    Resume,
    /// Capture.
    Snapshot,
    /// Take back to a snapshot.
    RollBack,
    /// Remove.
    Kill,
    /// Note that its processes ended.
    Fail,
}

/// A step of the table: where an operation leads while it is under way, and when it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transition {
    /// The state while the operation is under way.
    pub during: SandboxState,
    /// The state after it succeeded.
    pub after: SandboxState,
}

/// Why an operation cannot begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TransitionRefused {
    /// It is already in the state that was asked for.
    #[error("the sandbox is already {0}")]
    AlreadySo(SandboxState),
    /// Another operation is under way; it ends by itself.
    #[error("the sandbox is {0}")]
    Busy(SandboxState),
    /// The state does not allow it.
    #[error("a sandbox that is {0} cannot do that")]
    NotAllowed(SandboxState),
    /// It is gone.
    #[error("the sandbox is gone")]
    Gone,
}

impl SandboxState {
    /// Every state.
    pub const ALL: [Self; 10] = [
        Self::Creating,
        Self::Running,
        Self::Pausing,
        Self::Paused,
        Self::Resuming,
        Self::Snapshotting,
        Self::RollingBack,
        Self::Killing,
        Self::Killed,
        Self::Failed,
    ];

    /// Whether an operation is under way.
    #[must_use]
    pub const fn is_transient(self) -> bool {
        matches!(
            self,
            Self::Creating
                | Self::Pausing
                | Self::Resuming
                | Self::Snapshotting
                | Self::RollingBack
                | Self::Killing
        )
    }

    /// The transition table: what `operation` does to a sandbox in this state.
    ///
    /// # Errors
    /// The typed refusal that the caller is told.
    pub fn begin(self, operation: Operation) -> Result<Transition, TransitionRefused> {
        use SandboxState as S;
        use TransitionRefused as Refused;
        let to = |during, after| Ok(Transition { during, after });
        match (operation, self) {
            (_, S::Killed) => Err(Refused::Gone),
            (Operation::Kill, _) => to(S::Killing, S::Killed),
            (_, S::Killing) => Err(Refused::Gone),
            (Operation::Fail, S::Failed) => Err(Refused::AlreadySo(S::Failed)),
            (Operation::Fail, _) => to(S::Failed, S::Failed),
            (Operation::Start, S::Creating) => to(S::Creating, S::Running),
            (Operation::Pause, S::Running) => to(S::Pausing, S::Paused),
            (Operation::Pause, S::Paused) => Err(Refused::AlreadySo(S::Paused)),
            (Operation::Resume, S::Paused) => to(S::Resuming, S::Running),
            (Operation::Resume, S::Running) => Err(Refused::AlreadySo(S::Running)),
            (Operation::Snapshot, S::Running) => to(S::Snapshotting, S::Running),
            (Operation::Snapshot, S::Paused) => to(S::Snapshotting, S::Paused),
            (Operation::RollBack, S::Running | S::Paused) => to(S::RollingBack, S::Running),
            (_, busy) if busy.is_transient() => Err(Refused::Busy(busy)),
            (_, other) => Err(Refused::NotAllowed(other)),
        }
    }

    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::Snapshotting => "snapshotting",
            Self::RollingBack => "rolling-back",
            Self::Killing => "killing",
            Self::Killed => "killed",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for SandboxState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_but_the_dead_can_be_killed() {
        // R-L8
        for state in SandboxState::ALL {
            let begun = state.begin(Operation::Kill);
            if state == SandboxState::Killed {
                assert_eq!(begun, Err(TransitionRefused::Gone));
            } else {
                assert_eq!(begun.unwrap().after, SandboxState::Killed, "{state}");
            }
        }
    }

    #[test]
    fn busy_and_already_so_are_told_apart() {
        // R-P10
        use SandboxState as S;
        let pause = |state: SandboxState| state.begin(Operation::Pause);
        assert_eq!(
            pause(S::Paused),
            Err(TransitionRefused::AlreadySo(S::Paused))
        );
        assert_eq!(
            pause(S::Resuming),
            Err(TransitionRefused::Busy(S::Resuming))
        );
        assert_eq!(
            pause(S::Failed),
            Err(TransitionRefused::NotAllowed(S::Failed))
        );
        assert_eq!(pause(S::Killing), Err(TransitionRefused::Gone));
    }
}
