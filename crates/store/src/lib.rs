//! What must survive a restart of those who serve callers: tenants, keys, idempotency records.
//!
//! ```text
//!   api, governor ──▶ Store (verbs) ──┬─ SqliteStore   one file, one writer thread
//!                                     └─ MemoryStore   the model that the tests compare with
//! ```
//!
//! Invariants:
//! - Each verb of [`Store`] is one atomic step: two callers, on one machine or on two, see it done
//!   or not done. No caller reads first and then writes what it concluded.
//! - No verb needs more than a key-value store with scripts can do, so that a shared one can follow.
//! - A key itself never comes here; only its digest does (R-P8).
//! - Expiry says who may try; the [`Generation`](sandhold_types::Generation) says who wins.
//!
//! The truth about sandboxes is not here but beside the sandboxes themselves.

#![forbid(unsafe_code)]

mod error;
mod first_start;
mod memory;
mod records;
mod sqlite;

use async_trait::async_trait;
pub use error::StoreError;
pub use first_start::{
    DEFAULT_ENV, DEFAULT_KEY_FILE, DEFAULT_NAMESPACE, FirstStart, FirstStartError, first_start,
};
pub use memory::MemoryStore;
pub use records::{
    Bucket, Claim, ClaimOutcome, ClaimRequest, CompleteOutcome, CreateKeyOutcome, Fingerprint,
    IdempotencyScope, KeyDigest, KeyRecord, KeyScope, NewKey, RevokeOutcome, Role, SecretBytes,
    Tenant,
};
use sandhold_types::{Generation, KeyId, SandboxId, Timestamp};
pub use sqlite::SqliteStore;

/// How much one bucket may keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// The most keys, revoked ones included.
    pub keys_per_bucket_max: usize,
    /// The most idempotency records at once.
    pub idempotency_records_per_bucket_max: usize,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self {
            keys_per_bucket_max: 1_000,
            idempotency_records_per_bucket_max: 10_000,
        }
    }
}

/// Durable state of those who serve callers.
#[async_trait]
pub trait Store: Send + Sync + std::fmt::Debug {
    /// Adds a key, and its tenant if that is new.
    ///
    /// # Errors
    /// The store failed.
    async fn create_key(&self, key: NewKey) -> Result<CreateKeyOutcome, StoreError>;

    /// Adds a key, and its tenant, only if there is no key at all yet: the first start.
    ///
    /// # Errors
    /// The store failed.
    async fn create_first_key(&self, key: NewKey) -> Result<CreateKeyOutcome, StoreError>;

    /// The key with this digest, revoked or not.
    ///
    /// # Errors
    /// The store failed.
    async fn find_key(&self, digest: &KeyDigest) -> Result<Option<KeyRecord>, StoreError>;

    /// The keys within `scope`, oldest first, revoked ones included.
    ///
    /// # Errors
    /// The store failed.
    async fn list_keys(&self, scope: &KeyScope) -> Result<Vec<KeyRecord>, StoreError>;

    /// Ends a key for good. The last administrator's key that still works cannot be revoked, since
    /// nobody could make another.
    ///
    /// # Errors
    /// The store failed.
    async fn revoke_key(
        &self,
        scope: &KeyScope,
        id: &KeyId,
        at: Timestamp,
    ) -> Result<RevokeOutcome, StoreError>;

    /// Notes that a key was used; an earlier moment than the one noted changes nothing.
    ///
    /// # Errors
    /// The store failed.
    async fn note_key_used(&self, id: &KeyId, at: Timestamp) -> Result<(), StoreError>;

    /// Every tenant, by name.
    ///
    /// # Errors
    /// The store failed.
    async fn list_tenants(&self) -> Result<Vec<Tenant>, StoreError>;

    /// Takes an idempotency key for a request, or tells who has it. A record past its expiry is as
    /// good as gone; a claim past its end, whose holder must have died, goes to whoever asks.
    ///
    /// # Errors
    /// The store failed.
    async fn claim_idempotency(
        &self,
        scope: &IdempotencyScope,
        request: ClaimRequest,
    ) -> Result<ClaimOutcome, StoreError>;

    /// Records what the request of this claim made, unless the claim went to somebody else.
    ///
    /// # Errors
    /// The store failed.
    async fn complete_idempotency(
        &self,
        scope: &IdempotencyScope,
        generation: Generation,
        sandbox: &SandboxId,
    ) -> Result<CompleteOutcome, StoreError>;

    /// Gives the idempotency key back, because the request of this claim made nothing. Does nothing
    /// when the claim went to somebody else or is complete.
    ///
    /// # Errors
    /// The store failed.
    async fn abandon_idempotency(
        &self,
        scope: &IdempotencyScope,
        generation: Generation,
    ) -> Result<(), StoreError>;

    /// The secret of this name: the one stored, or `candidate`, which is stored now. Every process
    /// on the store gets the same.
    ///
    /// # Errors
    /// The store failed.
    async fn secret(
        &self,
        name: &'static str,
        candidate: SecretBytes,
    ) -> Result<SecretBytes, StoreError>;
}
