//! The store in one SQLite file.
//!
//! ```text
//!   async callers ──▶ bounded queue ──▶ writer thread   (one connection, IMMEDIATE transactions)
//!                └──▶ bounded queues ─▶ reader threads  (query-only connections, WAL snapshots)
//! ```
//!
//! Owns: the database file, the threads that touch it, and the keys that were asked for last
//! ([`known`]).
//!
//! Invariants:
//! - No statement runs on an async worker, and reads never wait for writes (R-P9): they have their
//!   own threads and the write-ahead log gives them a snapshot.
//! - One verb is one transaction; what was answered is on the disk (`synchronous=FULL`).
//! - Every queue is bounded; past it the caller gets [`StoreError::Overloaded`].
//!
//! Never: interprets what it stores, or keeps time.

mod idempotency;
mod keys;
mod known;
mod schema;
mod worker;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use rusqlite::OptionalExtension;
use sandhold_types::{Generation, KeyId, SandboxId, Timestamp};

use self::{
    known::KnownKeys,
    worker::{Access, Worker},
};
use crate::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, CreateKeyOutcome, IdempotencyScope, KeyDigest,
    KeyRecord, KeyScope, NewKey, RevokeOutcome, SecretBytes, Store, StoreError, StoreLimits,
    Tenant,
};

/// Threads that read. Two keep a slow listing from holding up a key look-up.
const READERS: usize = 2;

/// The store in one SQLite file.
#[derive(Debug)]
pub struct SqliteStore {
    limits: StoreLimits,
    writer: Worker,
    readers: [Worker; READERS],
    next_reader: AtomicUsize,
    known: Arc<KnownKeys>,
}

impl SqliteStore {
    /// Opens the database at `path`, makes it if there is none, and brings its schema up to date.
    /// Blocks while it does; meant for the start of the program.
    ///
    /// # Errors
    /// The file cannot be opened, belongs to a newer version, or cannot be migrated.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with(path, StoreLimits::default())
    }

    /// The same with other limits.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(path: &Path, limits: StoreLimits) -> Result<Self, StoreError> {
        let writer = Worker::start(path, Access::Write)?;
        let readers = [
            Worker::start(path, Access::Read)?,
            Worker::start(path, Access::Read)?,
        ];
        Ok(Self {
            limits,
            writer,
            readers,
            next_reader: AtomicUsize::new(0),
            known: Arc::default(),
        })
    }

    fn reader(&self) -> &Worker {
        let turn = self.next_reader.fetch_add(1, Ordering::Relaxed);
        &self.readers[turn % READERS]
    }
}

/// Milliseconds as SQLite stores them. Timestamps end in the year 9999, so they fit.
fn to_ms(at: Timestamp) -> i64 {
    i64::try_from(at.unix_ms()).unwrap_or(i64::MAX)
}

fn from_ms(ms: i64) -> Timestamp {
    Timestamp::from_unix_ms(u64::try_from(ms).unwrap_or(0))
}

fn parse<T: std::str::FromStr>(text: &str, what: &'static str) -> Result<T, StoreError> {
    text.parse().map_err(|_| StoreError::Corrupt { what })
}

fn failed(step: &'static str) -> impl FnOnce(rusqlite::Error) -> StoreError {
    move |source| StoreError::Query { step, source }
}

#[async_trait]
impl Store for SqliteStore {
    async fn create_key(&self, key: NewKey) -> Result<CreateKeyOutcome, StoreError> {
        let keys_max = self.limits.keys_per_bucket_max;
        self.writer
            .write(move |t| keys::create(t, &key, keys_max))
            .await
    }

    async fn create_first_key(&self, key: NewKey) -> Result<CreateKeyOutcome, StoreError> {
        let keys_max = self.limits.keys_per_bucket_max;
        self.writer
            .write(move |t| keys::create_first(t, &key, keys_max))
            .await
    }

    async fn find_key(&self, digest: &KeyDigest) -> Result<Option<KeyRecord>, StoreError> {
        let seen = match self.known.find(digest) {
            Ok(key) => return Ok(Some(key)),
            Err(seen) => seen,
        };
        let digest = digest.clone();
        let (found, digest) = self
            .reader()
            .read(move |c| Ok((keys::find(c, &digest)?, digest)))
            .await?;
        if let Some(key) = &found {
            self.known.learn(digest, key.clone(), seen);
        }
        Ok(found)
    }

    async fn list_keys(&self, scope: &KeyScope) -> Result<Vec<KeyRecord>, StoreError> {
        let scope = scope.clone();
        self.reader().read(move |c| keys::list(c, &scope)).await
    }

    async fn revoke_key(
        &self,
        scope: &KeyScope,
        id: &KeyId,
        at: Timestamp,
    ) -> Result<RevokeOutcome, StoreError> {
        let (scope, id) = (scope.clone(), id.clone());
        let (known, revoked) = (Arc::clone(&self.known), id.clone());
        // Where the caller cannot give up in between: a key that is revoked must not stay known.
        let forget = move || known.forget(&revoked);
        self.writer
            .write_then(move |t| keys::revoke(t, &scope, &id, at), forget)
            .await
    }

    async fn note_key_used(&self, id: &KeyId, at: Timestamp) -> Result<(), StoreError> {
        self.known.used(id, at);
        let id = id.clone();
        self.writer
            .write(move |t| keys::note_used(t, &id, at))
            .await
    }

    async fn list_tenants(&self) -> Result<Vec<Tenant>, StoreError> {
        self.reader().read(keys::tenants).await
    }

    async fn claim_idempotency(
        &self,
        scope: &IdempotencyScope,
        request: ClaimRequest,
    ) -> Result<ClaimOutcome, StoreError> {
        let scope = scope.clone();
        let records_max = self.limits.idempotency_records_per_bucket_max;
        self.writer
            .write(move |t| idempotency::claim(t, &scope, &request, records_max))
            .await
    }

    async fn complete_idempotency(
        &self,
        scope: &IdempotencyScope,
        generation: Generation,
        sandbox: &SandboxId,
    ) -> Result<CompleteOutcome, StoreError> {
        let (scope, sandbox) = (scope.clone(), sandbox.clone());
        self.writer
            .write(move |t| idempotency::complete(t, &scope, generation, &sandbox))
            .await
    }

    async fn abandon_idempotency(
        &self,
        scope: &IdempotencyScope,
        generation: Generation,
    ) -> Result<(), StoreError> {
        let scope = scope.clone();
        self.writer
            .write(move |t| idempotency::abandon(t, &scope, generation))
            .await
    }

    async fn secret(
        &self,
        name: &'static str,
        candidate: SecretBytes,
    ) -> Result<SecretBytes, StoreError> {
        self.writer
            .write(move |t| {
                let step = "reading a secret";
                t.execute(
                    "INSERT INTO secrets (name, value) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
                    (name, candidate.0),
                )
                .map_err(failed(step))?;
                let stored: Option<Vec<u8>> = t
                    .query_row("SELECT value FROM secrets WHERE name = ?1", [name], |row| {
                        row.get(0)
                    })
                    .optional()
                    .map_err(failed(step))?;
                let bytes = stored.and_then(|bytes| bytes.try_into().ok());
                bytes
                    .map(SecretBytes)
                    .ok_or(StoreError::Corrupt { what: "secret" })
            })
            .await
    }
}
