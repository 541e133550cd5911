//! The store as a model: maps behind a lock. What the others are compared with, and what tests of
//! other crates use.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use sandhold_types::{Generation, KeyId, RequestId, SandboxId, Timestamp};

use crate::{
    Bucket, Claim, ClaimOutcome, ClaimRequest, CompleteOutcome, CreateKeyOutcome, Fingerprint,
    IdempotencyScope, KeyDigest, KeyRecord, KeyScope, NewKey, RevokeOutcome, Role, SecretBytes,
    Store, StoreError, StoreLimits, Tenant,
};

/// A store that forgets when it is dropped.
#[derive(Debug, Default)]
pub struct MemoryStore(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    limits: StoreLimits,
    tenants: BTreeMap<Bucket, Timestamp>,
    keys: BTreeMap<KeyId, (KeyDigest, KeyRecord)>,
    idempotency: BTreeMap<IdempotencyScope, Idempotency>,
    secrets: BTreeMap<&'static str, SecretBytes>,
    /// The newest generation given out; none is given twice, whatever became of its record.
    generation: u64,
}

#[derive(Debug)]
struct Idempotency {
    fingerprint: Fingerprint,
    generation: Generation,
    request: RequestId,
    claimed_at: Timestamp,
    claimed_until: Timestamp,
    expires_at: Timestamp,
    sandbox: Option<SandboxId>,
}

impl State {
    fn create_key(&mut self, key: NewKey) -> CreateKeyOutcome {
        let known = |(digest, _): &(KeyDigest, KeyRecord)| *digest == key.digest;
        if self.keys.contains_key(&key.id) || self.keys.values().any(known) {
            return CreateKeyOutcome::Exists;
        }
        let own = |(_, record): &&(KeyDigest, KeyRecord)| record.bucket == key.bucket;
        if self.keys.values().filter(own).count() >= self.limits.keys_per_bucket_max {
            return CreateKeyOutcome::Full;
        }
        self.tenants
            .entry(key.bucket.clone())
            .or_insert(key.created_at);
        let record = KeyRecord {
            id: key.id.clone(),
            bucket: key.bucket,
            role: key.role,
            name: key.name,
            hint: key.hint,
            created_at: key.created_at,
            last_used_at: None,
            revoked_at: None,
        };
        self.keys.insert(key.id, (key.digest, record.clone()));
        CreateKeyOutcome::Created(record)
    }

    fn other_admin_works(&self, id: &KeyId) -> bool {
        self.keys
            .values()
            .any(|(_, key)| key.id != *id && key.role == Role::Admin && key.revoked_at.is_none())
    }

    fn revoke_key(&mut self, scope: &KeyScope, id: &KeyId, at: Timestamp) -> RevokeOutcome {
        let other_admin_works = self.other_admin_works(id);
        let Some((_, key)) = self.keys.get_mut(id) else {
            return RevokeOutcome::Unknown;
        };
        if !scope.holds(&key.bucket) {
            return RevokeOutcome::Unknown;
        }
        if key.revoked_at.is_some() {
            return RevokeOutcome::AlreadyRevoked;
        }
        if key.role == Role::Admin && !other_admin_works {
            return RevokeOutcome::LastAdmin;
        }
        key.revoked_at = Some(at);
        RevokeOutcome::Revoked
    }

    fn claim(&mut self, scope: &IdempotencyScope, request: ClaimRequest) -> ClaimOutcome {
        self.idempotency
            .retain(|_, record| record.expires_at > request.now);
        let held = self.idempotency.get(scope);
        let orphan = match held {
            Some(record) if record.fingerprint != request.fingerprint => {
                return ClaimOutcome::Mismatch;
            }
            Some(Idempotency {
                sandbox: Some(made),
                ..
            }) => return ClaimOutcome::Done(made.clone()),
            Some(record) if record.claimed_until > request.now => return ClaimOutcome::InProgress,
            Some(record) => Some((record.request.clone(), record.claimed_at)),
            None => None,
        };
        let own = self.idempotency.keys().filter(|s| s.bucket == scope.bucket);
        if held.is_none() && own.count() >= self.limits.idempotency_records_per_bucket_max {
            return ClaimOutcome::Full;
        }
        self.generation += 1;
        let generation = Generation(self.generation);
        let record = Idempotency {
            fingerprint: request.fingerprint,
            generation,
            request: request.request,
            claimed_at: request.now,
            claimed_until: request.claimed_until,
            expires_at: request.expires_at,
            sandbox: None,
        };
        self.idempotency.insert(scope.clone(), record);
        ClaimOutcome::Claimed(Claim { generation, orphan })
    }
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty store with other limits.
    #[must_use]
    pub fn with_limits(limits: StoreLimits) -> Self {
        Self(Mutex::new(State {
            limits,
            ..State::default()
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn create_key(&self, key: NewKey) -> Result<CreateKeyOutcome, StoreError> {
        Ok(self.state().create_key(key))
    }

    async fn create_first_key(&self, key: NewKey) -> Result<CreateKeyOutcome, StoreError> {
        let mut state = self.state();
        if !state.keys.is_empty() {
            return Ok(CreateKeyOutcome::Exists);
        }
        Ok(state.create_key(key))
    }

    async fn find_key(&self, digest: &KeyDigest) -> Result<Option<KeyRecord>, StoreError> {
        let state = self.state();
        let found = state.keys.values().find(|(known, _)| known == digest);
        Ok(found.map(|(_, record)| record.clone()))
    }

    async fn list_keys(&self, scope: &KeyScope) -> Result<Vec<KeyRecord>, StoreError> {
        let state = self.state();
        let records = state.keys.values().map(|(_, record)| record.clone());
        let mut own: Vec<_> = records.filter(|key| scope.holds(&key.bucket)).collect();
        own.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        Ok(own)
    }

    async fn revoke_key(
        &self,
        scope: &KeyScope,
        id: &KeyId,
        at: Timestamp,
    ) -> Result<RevokeOutcome, StoreError> {
        Ok(self.state().revoke_key(scope, id, at))
    }

    async fn note_key_used(&self, id: &KeyId, at: Timestamp) -> Result<(), StoreError> {
        if let Some((_, key)) = self.state().keys.get_mut(id) {
            key.last_used_at = key.last_used_at.max(Some(at));
        }
        Ok(())
    }

    async fn list_tenants(&self) -> Result<Vec<Tenant>, StoreError> {
        let state = self.state();
        let tenant = |(bucket, created_at): (&Bucket, &Timestamp)| Tenant {
            bucket: bucket.clone(),
            created_at: *created_at,
        };
        Ok(state.tenants.iter().map(tenant).collect())
    }

    async fn claim_idempotency(
        &self,
        scope: &IdempotencyScope,
        request: ClaimRequest,
    ) -> Result<ClaimOutcome, StoreError> {
        Ok(self.state().claim(scope, request))
    }

    async fn complete_idempotency(
        &self,
        scope: &IdempotencyScope,
        generation: Generation,
        sandbox: &SandboxId,
    ) -> Result<CompleteOutcome, StoreError> {
        let mut state = self.state();
        let current =
            |record: &&mut Idempotency| record.generation == generation && record.sandbox.is_none();
        match state.idempotency.get_mut(scope).filter(current) {
            Some(record) => {
                record.sandbox = Some(sandbox.clone());
                Ok(CompleteOutcome::Completed)
            }
            None => Ok(CompleteOutcome::Superseded),
        }
    }

    async fn abandon_idempotency(
        &self,
        scope: &IdempotencyScope,
        generation: Generation,
    ) -> Result<(), StoreError> {
        let mut state = self.state();
        let open =
            |record: &&Idempotency| record.generation == generation && record.sandbox.is_none();
        if state.idempotency.get(scope).filter(open).is_some() {
            state.idempotency.remove(scope);
        }
        Ok(())
    }

    async fn secret(
        &self,
        name: &'static str,
        candidate: SecretBytes,
    ) -> Result<SecretBytes, StoreError> {
        Ok(*self.state().secrets.entry(name).or_insert(candidate))
    }
}
