//! Keys and tenants in SQL.

use rusqlite::{Connection, OptionalExtension, Row, Transaction};
use sandhold_types::{KeyId, Timestamp};

use super::{failed, from_ms, parse, to_ms};
use crate::{
    Bucket, CreateKeyOutcome, KeyDigest, KeyRecord, KeyScope, NewKey, RevokeOutcome, Role,
    StoreError, Tenant,
};

const COLUMNS: &str = "id, namespace, env, role, name, hint, \
                       created_at_ms, last_used_at_ms, revoked_at_ms";

/// A row before its texts are checked.
struct RawKey {
    id: String,
    namespace: String,
    env: String,
    role: String,
    name: String,
    hint: String,
    created_at_ms: i64,
    last_used_at_ms: Option<i64>,
    revoked_at_ms: Option<i64>,
}

impl RawKey {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            id: row.get(0)?,
            namespace: row.get(1)?,
            env: row.get(2)?,
            role: row.get(3)?,
            name: row.get(4)?,
            hint: row.get(5)?,
            created_at_ms: row.get(6)?,
            last_used_at_ms: row.get(7)?,
            revoked_at_ms: row.get(8)?,
        })
    }

    fn check(self) -> Result<KeyRecord, StoreError> {
        Ok(KeyRecord {
            id: parse(&self.id, "key identifier")?,
            bucket: bucket(&self.namespace, &self.env)?,
            role: Role::from_name(&self.role).ok_or(StoreError::Corrupt { what: "role" })?,
            name: self.name,
            hint: self.hint,
            created_at: from_ms(self.created_at_ms),
            last_used_at: self.last_used_at_ms.map(from_ms),
            revoked_at: self.revoked_at_ms.map(from_ms),
        })
    }
}

fn bucket(namespace: &str, env: &str) -> Result<Bucket, StoreError> {
    Ok(Bucket {
        namespace: parse(namespace, "namespace")?,
        env: parse(env, "environment")?,
    })
}

pub(super) fn create(
    t: &Transaction<'_>,
    key: &NewKey,
    keys_max: usize,
) -> Result<CreateKeyOutcome, StoreError> {
    let step = "adding a key";
    let (namespace, env) = (key.bucket.namespace.as_str(), key.bucket.env.as_str());
    let twins: i64 = t
        .prepare_cached("SELECT count(*) FROM api_keys WHERE id = ?1 OR digest = ?2")
        .and_then(|mut s| s.query_row([key.id.as_str(), key.digest.as_str()], |r| r.get(0)))
        .map_err(failed(step))?;
    if twins > 0 {
        return Ok(CreateKeyOutcome::Exists);
    }
    let own: i64 = t
        .prepare_cached("SELECT count(*) FROM api_keys WHERE namespace = ?1 AND env = ?2")
        .and_then(|mut s| s.query_row([namespace, env], |r| r.get(0)))
        .map_err(failed(step))?;
    if usize::try_from(own).is_ok_and(|own| own >= keys_max) {
        return Ok(CreateKeyOutcome::Full);
    }
    t.execute(
        "INSERT INTO tenants VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING",
        (namespace, env, to_ms(key.created_at)),
    )
    .map_err(failed(step))?;
    t.execute(
        "INSERT INTO api_keys (id, digest, namespace, env, role, name, hint, created_at_ms) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        (
            key.id.as_str(),
            key.digest.as_str(),
            namespace,
            env,
            key.role.as_str(),
            &key.name,
            &key.hint,
            to_ms(key.created_at),
        ),
    )
    .map_err(failed(step))?;
    let stored = find(t, &key.digest)?;
    stored
        .map(CreateKeyOutcome::Created)
        .ok_or(StoreError::Corrupt { what: "new key" })
}

pub(super) fn create_first(
    t: &Transaction<'_>,
    key: &NewKey,
    keys_max: usize,
) -> Result<CreateKeyOutcome, StoreError> {
    let any: bool = t
        .query_row("SELECT EXISTS (SELECT 1 FROM api_keys)", [], |r| r.get(0))
        .map_err(failed("looking for keys"))?;
    if any {
        Ok(CreateKeyOutcome::Exists)
    } else {
        create(t, key, keys_max)
    }
}

pub(super) fn find(c: &Connection, digest: &KeyDigest) -> Result<Option<KeyRecord>, StoreError> {
    let query = format!("SELECT {COLUMNS} FROM api_keys WHERE digest = ?1");
    let raw = c
        .prepare_cached(&query)
        .and_then(|mut s| s.query_row([digest.as_str()], RawKey::read).optional())
        .map_err(failed("finding a key"))?;
    raw.map(RawKey::check).transpose()
}

pub(super) fn list(c: &Connection, scope: &KeyScope) -> Result<Vec<KeyRecord>, StoreError> {
    let (namespace, env) = match scope {
        KeyScope::All => (None, None),
        KeyScope::Bucket(own) => (Some(own.namespace.as_str()), Some(own.env.as_str())),
    };
    let query = format!(
        "SELECT {COLUMNS} FROM api_keys WHERE ?1 IS NULL OR (namespace = ?1 AND env = ?2) \
         ORDER BY created_at_ms, id"
    );
    let raw: Vec<RawKey> = c
        .prepare_cached(&query)
        .and_then(|mut s| {
            s.query_map((namespace, env), RawKey::read)
                .and_then(Iterator::collect)
        })
        .map_err(failed("listing keys"))?;
    raw.into_iter().map(RawKey::check).collect()
}

pub(super) fn revoke(
    t: &Transaction<'_>,
    scope: &KeyScope,
    id: &KeyId,
    at: Timestamp,
) -> Result<RevokeOutcome, StoreError> {
    let step = "revoking a key";
    let query = format!("SELECT {COLUMNS} FROM api_keys WHERE id = ?1");
    let raw = t
        .query_row(&query, [id.as_str()], RawKey::read)
        .optional()
        .map_err(failed(step))?;
    let found = raw.map(RawKey::check).transpose()?;
    let Some(key) = found.filter(|key| scope.holds(&key.bucket)) else {
        return Ok(RevokeOutcome::Unknown);
    };
    if key.revoked_at.is_some() {
        return Ok(RevokeOutcome::AlreadyRevoked);
    }
    let other_admins: i64 = t
        .query_row(
            "SELECT count(*) FROM api_keys \
             WHERE role = 'admin' AND revoked_at_ms IS NULL AND id <> ?1",
            [id.as_str()],
            |r| r.get(0),
        )
        .map_err(failed(step))?;
    if key.role == Role::Admin && other_admins == 0 {
        return Ok(RevokeOutcome::LastAdmin);
    }
    t.execute(
        "UPDATE api_keys SET revoked_at_ms = ?2 WHERE id = ?1",
        (id.as_str(), to_ms(at)),
    )
    .map_err(failed(step))?;
    Ok(RevokeOutcome::Revoked)
}

pub(super) fn note_used(t: &Transaction<'_>, id: &KeyId, at: Timestamp) -> Result<(), StoreError> {
    t.execute(
        "UPDATE api_keys SET last_used_at_ms = max(coalesce(last_used_at_ms, 0), ?2) WHERE id = ?1",
        (id.as_str(), to_ms(at)),
    )
    .map(|_| ())
    .map_err(failed("noting the use of a key"))
}

pub(super) fn tenants(c: &Connection) -> Result<Vec<Tenant>, StoreError> {
    let raw: Vec<(String, String, i64)> = c
        .prepare_cached("SELECT namespace, env, created_at_ms FROM tenants ORDER BY namespace, env")
        .and_then(|mut s| {
            s.query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))
                .and_then(Iterator::collect)
        })
        .map_err(failed("listing tenants"))?;
    raw.into_iter()
        .map(|(namespace, env, created_at_ms)| {
            Ok(Tenant {
                bucket: bucket(&namespace, &env)?,
                created_at: from_ms(created_at_ms),
            })
        })
        .collect()
}
