//! Sandboxes that are made with an SDK, in the same books (R-G19).

use std::time::Instant;

use sandhold_governor::{books::Answer, ids::SlotId};
use sandhold_governor_driver::{Admitted, ends_at};
use sandhold_platform::{Owner, SandboxView};
use sandhold_types::{Generation, SandboxId};

use crate::{ApiState, error::ApiError};

/// A slot that is taken for a sandbox that is being made; nothing where there is no governor.
#[derive(Debug)]
pub(in crate::routes) struct Slot(Option<(SlotId, Generation)>);

/// Takes a slot in the bucket of the key, before anything is made (R-G4).
pub(in crate::routes) async fn admit(
    state: &ApiState,
    owner: &Owner,
    until: Instant,
) -> Result<Slot, ApiError> {
    let Some(governor) = &state.governor else {
        return Ok(Slot(None));
    };
    let bucket = sandhold_governor::ids::Bucket {
        namespace: owner.namespace.clone(),
        env: owner.env.clone(),
    };
    let patience = until.saturating_duration_since(Instant::now());
    match governor.admit_direct(&bucket, patience).await? {
        Admitted::Slot { slot, generation } => Ok(Slot(Some((slot, generation)))),
        Admitted::Refused(Answer::CapacityExceeded(limit)) => Err(ApiError::NoPlace(limit)),
        Admitted::Refused(Answer::Waiting { .. }) => {
            Err(ApiError::NoPlace(sandhold_governor::books::Limit::Bucket))
        }
        Admitted::Refused(Answer::Recovering) => {
            Err(ApiError::Unavailable("the books are being settled"))
        }
        Admitted::Refused(_) => Err(ApiError::Unavailable("no slot was given")),
    }
}

/// Binds the slot to what was made, or gives it back if that is certainly nothing. Should the books
/// not answer, the reclaimer's rounds put it right.
pub(in crate::routes) async fn settle(
    state: &ApiState,
    slot: Slot,
    made: Result<&SandboxView, &ApiError>,
) {
    let (Some(governor), Some((slot, generation))) = (&state.governor, slot.0) else {
        return;
    };
    let noted = match made {
        Ok(view) => {
            let bound = governor.bind_direct(slot, generation, view.id.clone(), ends_at(view));
            bound.await.map(|_| ())
        }
        // The platform was cut off in the middle; it may still come to be.
        Err(ApiError::Deadline { .. }) => Ok(()),
        Err(_) => governor.give_back(slot).await,
    };
    if let Err(error) = noted {
        tracing::warn!(%error, "a create was not noted in the books");
    }
}

/// A sandbox was removed: its slot is free at once (R-G5).
pub(in crate::routes) async fn gone(state: &ApiState, sandbox: &SandboxId) {
    if let Some(governor) = &state.governor
        && let Err(error) = governor.gone(sandbox).await
    {
        tracing::warn!(%error, %sandbox, "a removal was not noted in the books");
    }
}
