//! The values that pass through the store.

use std::fmt;

use sandhold_types::{
    EnvName, Generation, KeyId, Namespace, RequestId, SandboxId, Timestamp, Token,
};

/// A tenant's environment: the unit that sees only its own, and that quotas count (R-G2).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bucket {
    /// The tenant: product or team.
    pub namespace: Namespace,
    /// Its environment.
    pub env: EnvName,
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.namespace, self.env)
    }
}

/// A bucket that is known to the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// Which.
    pub bucket: Bucket,
    /// Since when.
    pub created_at: Timestamp,
}

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Work with the sandboxes of its own bucket.
    Member,
    /// That, and manage keys, tenants and quotas of all buckets.
    Admin,
}

impl Role {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Member => "member",
            Self::Admin => "admin",
        }
    }

    /// The role of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "member" => Some(Self::Member),
            "admin" => Some(Self::Admin),
            _ => None,
        }
    }
}

/// SHA-256 of a key, in hexadecimal.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyDigest(Box<str>);

impl KeyDigest {
    /// The digest of `key`.
    #[must_use]
    pub fn of(key: &Token) -> Self {
        Self(key.digest_hex().into())
    }

    /// The hexadecimal text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[digest]")
    }
}

/// A key to add.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewKey {
    /// Its public name.
    pub id: KeyId,
    /// What is stored of it.
    pub digest: KeyDigest,
    /// For whom.
    pub bucket: Bucket,
    /// What it may do.
    pub role: Role,
    /// What people call it.
    pub name: String,
    /// A few of its first and last characters, by which its owner knows it again.
    pub hint: String,
    /// When it is made.
    pub created_at: Timestamp,
}

/// A key as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRecord {
    /// Its public name.
    pub id: KeyId,
    /// For whom.
    pub bucket: Bucket,
    /// What it may do.
    pub role: Role,
    /// What people call it.
    pub name: String,
    /// A few of its characters.
    pub hint: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last used, to about a minute.
    pub last_used_at: Option<Timestamp>,
    /// When it was revoked.
    pub revoked_at: Option<Timestamp>,
}

/// Which keys are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyScope {
    /// Those of every bucket.
    All,
    /// Those of one bucket.
    Bucket(Bucket),
}

impl KeyScope {
    /// Whether a key of `bucket` is meant.
    #[must_use]
    pub fn holds(&self, bucket: &Bucket) -> bool {
        match self {
            Self::All => true,
            Self::Bucket(own) => own == bucket,
        }
    }
}

/// What became of a request to add a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CreateKeyOutcome {
    /// It is stored.
    Created(KeyRecord),
    /// A key with this identifier or digest is there already.
    Exists,
    /// The bucket has [`crate::StoreLimits::keys_per_bucket_max`] keys.
    Full,
}

/// What became of a request to revoke a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RevokeOutcome {
    /// It is revoked now.
    Revoked,
    /// It was revoked before.
    AlreadyRevoked,
    /// There is no such key in the scope.
    Unknown,
    /// It is the last administrator's key that works.
    LastAdmin,
}

/// An idempotency key, within its bucket.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct IdempotencyScope {
    /// Whose.
    pub bucket: Bucket,
    /// The caller's text; at most 255 bytes by the wire contract (1.0).
    pub key: String,
}

/// SHA-256 of what a request asks, so that another request under the same key is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(pub [u8; 32]);

/// A request to take an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// What is asked.
    pub fingerprint: Fingerprint,
    /// The request that asks.
    pub request: RequestId,
    /// Now.
    pub now: Timestamp,
    /// When this request must have ended, one way or the other.
    pub claimed_until: Timestamp,
    /// When the record may be forgotten.
    pub expires_at: Timestamp,
}

/// A claim on an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Proves that the claim is the current one.
    pub generation: Generation,
    /// The earlier request whose holder ended without a word, and since when it had the claim. What
    /// it may have made is to be looked for before anything is made again.
    pub orphan: Option<(RequestId, Timestamp)>,
}

/// What became of a request to take an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// It is the caller's.
    Claimed(Claim),
    /// Another request with the same content has it and is not done.
    InProgress,
    /// It was used, for the same content, and made this.
    Done(SandboxId),
    /// It was used for other content.
    Mismatch,
    /// The bucket has [`crate::StoreLimits::idempotency_records_per_bucket_max`] live records.
    Full,
}

/// What became of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompleteOutcome {
    /// It is recorded.
    Completed,
    /// The claim is somebody else's now, or its record is gone.
    Superseded,
}

/// A secret of 32 bytes, which is not printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SecretBytes(pub [u8; 32]);

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}
