//! Why the platform did not do what was asked.

use std::{error::Error, io, time::Duration};

use sandhold_types::{BuildId, ErrorCode, Retry, SandboxId, SandboxState, SnapshotId};

/// A failed request to the platform.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// No such sandbox.
    #[error("sandbox {0} was not found")]
    NotFound(SandboxId),
    /// The create names a template that is not there.
    #[error("template '{0}' was not found")]
    TemplateNotFound(String),
    /// No such snapshot, or the sandbox does not come from it.
    #[error("snapshot {0} was not found")]
    SnapshotNotFound(String),
    /// What this engine or processor cannot restore (BC-092).
    #[error("snapshot {id} cannot be restored here: {why}")]
    SnapshotIncompatible {
        /// The snapshot.
        id: SnapshotId,
        /// What differs.
        why: String,
    },
    /// A sleeping sandbox whose image this engine or processor cannot restore (BC-092).
    #[error(
        "sandbox {id} cannot be woken here: {why}; it sleeps on, and wakes where it was put to sleep"
    )]
    ImageIncompatible {
        /// The sandbox.
        id: SandboxId,
        /// What differs.
        why: String,
    },
    /// The name that a snapshot was to have belongs to a template.
    #[error("the name '{0}' belongs to a template")]
    NameTaken(String),
    /// No such build of a template.
    #[error("there is no build {build} of template '{template}'")]
    BuildNotFound {
        /// The template.
        template: String,
        /// The build.
        build: BuildId,
    },
    /// Too much of something that is bounded for each tenant.
    #[error("{0}")]
    TooMany(String),
    /// What was sent is larger than may be sent.
    #[error("{0}")]
    TooLarge(String),
    /// The caller may see it and may not do this to it.
    #[error("{0}")]
    Forbidden(String),
    /// A value that was asked for cannot be had.
    #[error("{0}")]
    Invalid(String),
    /// Something this build cannot do yet.
    #[error("{0} is not supported")]
    NotSupported(String),
    /// It is already in the state that was asked for.
    #[error("sandbox {id} is already {state}")]
    AlreadySo {
        /// The sandbox.
        id: SandboxId,
        /// Its state.
        state: SandboxState,
    },
    /// Another operation holds it.
    #[error("sandbox {id} is {state}; try again in {} s", retry_after.as_secs())]
    Busy {
        /// The sandbox.
        id: SandboxId,
        /// What is being done to it.
        state: SandboxState,
        /// When to try again.
        retry_after: Duration,
    },
    /// Its state does not allow this.
    #[error("sandbox {id} is {state}, which does not allow this")]
    Conflict {
        /// The sandbox.
        id: SandboxId,
        /// Its state.
        state: SandboxState,
    },
    /// The node has no room for this (R-P11).
    #[error("no capacity: {what}")]
    Capacity {
        /// Which resource is short, needed and left.
        what: String,
    },
    /// The deadline passed at this step.
    #[error("the deadline passed while {step}")]
    Deadline {
        /// What was being done.
        step: &'static str,
    },
    /// The data plane did not become ready, or stopped answering.
    #[error("the sandbox does not answer: {detail}")]
    GuestUnresponsive {
        /// What was tried and what came back.
        detail: String,
    },
    /// The engine failed at this step.
    #[error("the engine failed while {step}{}", full_disk_note(source.as_ref()))]
    Engine {
        /// What was being done.
        step: &'static str,
        /// The engine's own error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The machine failed at this step: disk, network set-up, store.
    #[error("the node failed while {step}{}", full_disk_note(source.as_ref()))]
    Node {
        /// What was being done.
        step: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The node is stopping.
    #[error("the server is shutting down")]
    ShuttingDown,
}

impl PlatformError {
    /// The stable code.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::NotFound(_) => ErrorCode::SandboxNotFound,
            Self::TemplateNotFound(_) => ErrorCode::TemplateNotFound,
            Self::SnapshotNotFound(_) => ErrorCode::SnapshotNotFound,
            Self::SnapshotIncompatible { .. } | Self::ImageIncompatible { .. } => {
                ErrorCode::SnapshotIncompatible
            }
            Self::NameTaken(_) => ErrorCode::NameTaken,
            Self::BuildNotFound { .. } => ErrorCode::BuildNotFound,
            Self::TooMany(_) => ErrorCode::TooManyRequests,
            Self::TooLarge(_) => ErrorCode::TooLarge,
            Self::Forbidden(_) => ErrorCode::Forbidden,
            Self::Invalid(_) => ErrorCode::InvalidRequest,
            Self::NotSupported(_) => ErrorCode::NotSupported,
            Self::AlreadySo { .. } => ErrorCode::AlreadySo,
            Self::Busy { .. } => ErrorCode::Busy,
            Self::Conflict { .. } => ErrorCode::Conflict,
            Self::Capacity { .. } => ErrorCode::CapacityExceeded,
            Self::Deadline { .. } => ErrorCode::DeadlineExceeded,
            Self::GuestUnresponsive { .. } => ErrorCode::GuestUnresponsive,
            Self::Engine { source, .. } | Self::Node { source, .. }
                if is_full_disk(source.as_ref()) =>
            {
                ErrorCode::CapacityExceeded
            }
            Self::Engine { .. } => ErrorCode::EngineFailed,
            Self::Node { .. } => ErrorCode::Internal,
            Self::ShuttingDown => ErrorCode::ShuttingDown,
        }
    }

    /// Whether and when to try again.
    #[must_use]
    pub fn retry(&self) -> Retry {
        match self {
            Self::Busy { retry_after, .. } => Retry::After(*retry_after),
            other => other.code().default_retry(),
        }
    }
}

/// What programs say when the kernel told them that there is no room.
const FULL_DISK_WORDS: &str = "no space left on device";

/// Whether a failure is that of a full disk, which is a matter of capacity and goes by (R-P11).
#[must_use]
pub fn is_full_disk(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let of_system = error.downcast_ref::<io::Error>();
        let is_full = matches!(
            of_system.map(io::Error::kind),
            Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        );
        // Engines are programs and hand on words.
        if is_full || error.to_string().to_lowercase().contains(FULL_DISK_WORDS) {
            return true;
        }
        // The source of a wrapped error is that of what it wraps, which is itself passed over.
        let wrapped = of_system.and_then(io::Error::get_ref);
        next = match wrapped {
            Some(wrapped) => Some(wrapped),
            None => error.source(),
        };
    }
    false
}

fn full_disk_note(error: &(dyn Error + 'static)) -> &'static str {
    if is_full_disk(error) {
        ": the disk is full"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_a_matter_of_capacity_however_deep_it_is_told() {
        // R-P10, R-P11
        let node = |source: Box<dyn Error + Send + Sync>| PlatformError::Node {
            step: "writing its record",
            source,
        };
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let wrapped = io::Error::other(full());
        for error in [
            node(full().into()),
            node(wrapped.into()),
            node("runsc: write: No space left on device".into()),
        ] {
            assert_eq!(error.code(), ErrorCode::CapacityExceeded, "{error:?}");
            assert!(error.to_string().ends_with("the disk is full"), "{error}");
        }
        let other = node(io::Error::from(io::ErrorKind::NotFound).into());
        assert_eq!(other.code(), ErrorCode::Internal);
    }
}
