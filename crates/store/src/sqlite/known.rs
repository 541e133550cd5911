//! The keys that were asked for last, so that no request waits for the disk to be let in (R-P9).
//!
//! Even a read of the database can wait for one: the index of its write-ahead log is mapped from a
//! file, and noting a reader there waits while the file system commits what others wrote.
//!
//! Owns copies of rows, and how often rows have changed.
//!
//! ```text
//!   find ── known ──▶ answer
//!      └─ unknown, at change n ──▶ query ──▶ learn, if it is still change n
//!   revoke ──▶ commit ──▶ forget: change n + 1
//! ```
//!
//! Invariant: once a revocation was answered nobody is told the key as it was before. The process
//! that has this open is the only one that writes to the file: it holds the data directory's lock.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandhold_types::{KeyId, Timestamp};

use crate::{KeyDigest, KeyRecord};

/// How many keys are known at once. With more in use, all are asked for anew.
const KNOWN_MAX: usize = 4_096;

/// The keys that are known.
#[derive(Debug, Default)]
pub(super) struct KnownKeys(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    keys: HashMap<KeyDigest, KeyRecord>,
    changes: Change,
}

/// How often keys had been changed at some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Change(u64);

impl KnownKeys {
    /// A key, or at which change it was not known.
    pub(super) fn find(&self, digest: &KeyDigest) -> Result<KeyRecord, Change> {
        let known = self.known();
        known.keys.get(digest).cloned().ok_or(known.changes)
    }

    /// Remembers what was read after `seen`.
    pub(super) fn learn(&self, digest: KeyDigest, key: KeyRecord, seen: Change) {
        let mut known = self.known();
        if known.changes != seen {
            return;
        }
        if known.keys.len() >= KNOWN_MAX {
            known.keys.clear();
        }
        known.keys.insert(digest, key);
    }

    /// A key was used.
    pub(super) fn used(&self, id: &KeyId, at: Timestamp) {
        for key in self.known().keys.values_mut().filter(|key| key.id == *id) {
            key.last_used_at = key.last_used_at.max(Some(at));
        }
    }

    /// A key has changed; what is being read of it right now is old.
    pub(super) fn forget(&self, id: &KeyId) {
        let mut known = self.known();
        known.changes.0 += 1;
        known.keys.retain(|_, key| key.id != *id);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use sandhold_types::Token;

    use super::*;
    use crate::{Bucket, Role};

    fn key(id: &str) -> (KeyDigest, KeyRecord) {
        let record = KeyRecord {
            id: id.parse().unwrap(),
            bucket: Bucket {
                namespace: "a".parse().unwrap(),
                env: "dev".parse().unwrap(),
            },
            role: Role::Member,
            name: String::new(),
            hint: String::new(),
            created_at: Timestamp::from_unix_ms(1),
            last_used_at: None,
            revoked_at: None,
        };
        (KeyDigest::of(&Token::new(id.to_owned())), record)
    }

    #[test]
    fn what_was_read_before_a_revocation_is_not_learnt_after_it() {
        // R-P8
        let known = KnownKeys::default();
        let (digest, record) = key("aaaaaaaaaaaaaaaaaaaa");
        let seen = known.find(&digest).unwrap_err();
        known.forget(&record.id);
        known.learn(digest.clone(), record.clone(), seen);
        let seen = known.find(&digest).unwrap_err();
        known.learn(digest.clone(), record.clone(), seen);
        assert_eq!(known.find(&digest).unwrap().id, record.id);
        known.forget(&record.id);
        assert!(known.find(&digest).is_err());
    }

    #[test]
    fn more_keys_than_fit_are_asked_for_anew() {
        let known = KnownKeys::default();
        let (_, record) = key("aaaaaaaaaaaaaaaaaaaa");
        for number in 0..=KNOWN_MAX {
            let digest = KeyDigest::of(&Token::new(number.to_string()));
            known.learn(digest, record.clone(), Change::default());
        }
        assert_eq!(known.known().keys.len(), 1);
    }
}
