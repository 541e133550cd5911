//! Creates with an `Idempotency-Key`: the same key and body give the same sandbox.
//!
//! ```text
//!   claim ──▶ claimed ──▶ create ──┬─ done ──▶ complete
//!     │          └─ orphan? look for what it made
//!     │                            └─ failed ─▶ abandon (the next one may try)
//!     ├─▶ in progress ──▶ ask again until the deadline ──▶ 409, try again
//!     ├─▶ done ─────────▶ the same sandbox
//!     └─▶ mismatch ─────▶ 422
//! ```
//!
//! Invariants: of requests with one key at most one creates at a time; one that died between the
//! create and its record is found by its request's identifier in the sandboxes' histories, so that
//! nothing is made twice; a late completion of a claim that was taken over changes nothing.

use std::{sync::Arc, time::Duration};

use http::HeaderMap;
use sandhold_platform::SandboxView;
use sandhold_store::{
    Bucket, Claim, ClaimOutcome, ClaimRequest, CompleteOutcome, Fingerprint, IdempotencyScope,
};
use sandhold_types::{Actor, Deadline, Generation, RequestId, SandboxId, Timestamp};
use sha2::{Digest, Sha256};

use crate::{ApiState, error::ApiError};

/// The longest key.
const KEY_BYTES_MAX: usize = 255;

/// How often a request whose twin is being carried out looks whether that is done.
const POLL_EVERY: Duration = Duration::from_millis(100);

/// How long after its deadline a request has ended for sure.
const CLAIM_MARGIN: Duration = Duration::from_secs(15);

/// How far the clocks of two processes may be apart.
const CLOCK_SKEW: Duration = Duration::from_secs(5);

/// What a claim led to.
#[derive(Debug)]
pub(crate) enum Claimed {
    /// This request is to create.
    Fresh(Generation),
    /// An earlier request made this.
    Made(Arc<SandboxView>),
}

/// The key in a request (wire contract 1.0).
pub(crate) fn key_of(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get("idempotency-key") else {
        return Ok(None);
    };
    let bytes = value.as_bytes();
    let fits = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-';
    if bytes.is_empty() || bytes.len() > KEY_BYTES_MAX || !bytes.iter().all(fits) {
        return Err(ApiError::invalid(
            "Idempotency-Key",
            "must be 1 to 255 lower-case letters, digits and '-'",
        ));
    }
    Ok(Some(bytes.iter().map(|b| char::from(*b)).collect()))
}

/// What a request asks: its route and its body, however that is spelled.
pub(crate) fn fingerprint(route: &str, body: &[u8]) -> Fingerprint {
    // Parsing sorts the fields and drops the white space. What does not parse never comes here.
    let canonical = serde_json::from_slice::<serde_json::Value>(body)
        .map_or_else(|_| body.to_vec(), |value| value.to_string().into_bytes());
    let mut digest = Sha256::new();
    digest.update(route.as_bytes());
    digest.update([0]);
    digest.update(canonical);
    Fingerprint(digest.finalize().into())
}

/// Takes the key for this request, or finds what an earlier one made.
pub(crate) async fn claim(
    state: &ApiState,
    scope: &IdempotencyScope,
    fingerprint: Fingerprint,
    request: &RequestId,
    deadline: Deadline,
) -> Result<Claimed, ApiError> {
    loop {
        let now = state.clock.now();
        let left = deadline.remaining(std::time::Instant::now());
        let asked = ClaimRequest {
            fingerprint,
            request: request.clone(),
            now,
            claimed_until: now.plus(left + CLAIM_MARGIN),
            expires_at: now.plus(state.settings.budgets.idempotency_kept),
        };
        match state.store.claim_idempotency(scope, asked).await? {
            ClaimOutcome::Claimed(claim) => return settle(state, scope, claim).await,
            ClaimOutcome::Done(made) => return replay(state, &made).map(Claimed::Made),
            ClaimOutcome::Mismatch => return Err(ApiError::IdempotencyMismatch),
            ClaimOutcome::Full => {
                return Err(ApiError::TooMany(
                    "too many Idempotency-Keys of this tenant",
                ));
            }
            ClaimOutcome::InProgress if left <= POLL_EVERY => {
                return Err(ApiError::IdempotencyInProgress);
            }
            ClaimOutcome::InProgress => tokio::time::sleep(POLL_EVERY).await,
        }
    }
}

/// A claim that was taken over from a request that died: what it made is taken over, too.
async fn settle(
    state: &ApiState,
    scope: &IdempotencyScope,
    claim: Claim,
) -> Result<Claimed, ApiError> {
    let Some((request, since)) = claim.orphan else {
        return Ok(Claimed::Fresh(claim.generation));
    };
    match find_made(state, &scope.bucket, &request, since).await {
        Some(view) => {
            complete(state, scope, claim.generation, &view.id).await?;
            Ok(Claimed::Made(view))
        }
        None => Ok(Claimed::Fresh(claim.generation)),
    }
}

/// The sandbox that `request` made, if it made one.
async fn find_made(
    state: &ApiState,
    bucket: &Bucket,
    request: &RequestId,
    since: Timestamp,
) -> Option<Arc<SandboxView>> {
    for view in state.platform.list() {
        let own = view.owner.namespace == bucket.namespace && view.owner.env == bucket.env;
        if !own || view.started_at.plus(CLOCK_SKEW) < since {
            continue;
        }
        let history = state.platform.history(&view.id).await.unwrap_or_default();
        let maker = history.first().map(|event| &event.actor);
        if matches!(maker, Some(Actor::Client { request: by, .. }) if by == request) {
            return Some(view);
        }
    }
    None
}

fn replay(state: &ApiState, made: &SandboxId) -> Result<Arc<SandboxView>, ApiError> {
    let view = state.platform.get(made);
    view.ok_or_else(|| {
        let text = format!("sandbox {made}, made with this Idempotency-Key, is gone");
        ApiError::Conflict(text)
    })
}

/// Records what was made.
pub(crate) async fn complete(
    state: &ApiState,
    scope: &IdempotencyScope,
    generation: Generation,
    made: &SandboxId,
) -> Result<(), ApiError> {
    let outcome = state
        .store
        .complete_idempotency(scope, generation, made)
        .await?;
    if outcome == CompleteOutcome::Superseded {
        tracing::warn!(%made, "a create outlived its claim on its Idempotency-Key");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn a_key_is_plain_and_bounded() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("idempotency-key", HeaderValue::from_str(text).unwrap());
            key_of(&headers)
        };
        assert_eq!(key_of(&HeaderMap::new()).unwrap(), None);
        let longest = "a".repeat(255);
        for key in ["a", "0-9-z", &longest] {
            assert_eq!(read(key).unwrap().as_deref(), Some(key));
        }
        let too_long = "a".repeat(256);
        for key in ["", "A", "a b", "a_b", "a/b", &too_long] {
            assert!(read(key).is_err(), "{key}");
        }
    }

    #[test]
    fn the_same_request_has_the_same_fingerprint() {
        let base = fingerprint("/sandboxes", br#"{"a":1,"b":[2]}"#);
        assert_eq!(
            base,
            fingerprint("/sandboxes", b" { \"b\": [2],\n\"a\":1 }")
        );
        assert_ne!(base, fingerprint("/v2/sandboxes", br#"{"a":1,"b":[2]}"#));
        assert_ne!(base, fingerprint("/sandboxes", br#"{"a":1,"b":[3]}"#));
    }
}
