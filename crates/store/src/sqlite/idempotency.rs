//! Idempotency records in SQL.

use rusqlite::{OptionalExtension, Transaction};
use sandhold_types::{Generation, SandboxId, Timestamp};

use super::{failed, from_ms, parse, to_ms};
use crate::{Claim, ClaimOutcome, ClaimRequest, CompleteOutcome, IdempotencyScope, StoreError};

/// The record that has the key now.
struct Held {
    fingerprint: Vec<u8>,
    request: String,
    claimed_at_ms: i64,
    claimed_until_ms: i64,
    sandbox: Option<String>,
}

fn names(scope: &IdempotencyScope) -> (&str, &str, &str) {
    (
        scope.bucket.namespace.as_str(),
        scope.bucket.env.as_str(),
        &scope.key,
    )
}

fn held(t: &Transaction<'_>, scope: &IdempotencyScope) -> Result<Option<Held>, StoreError> {
    t.query_row(
        "SELECT fingerprint, request, claimed_at_ms, claimed_until_ms, sandbox FROM idempotency \
         WHERE namespace = ?1 AND env = ?2 AND key = ?3",
        names(scope),
        |row| {
            Ok(Held {
                fingerprint: row.get(0)?,
                request: row.get(1)?,
                claimed_at_ms: row.get(2)?,
                claimed_until_ms: row.get(3)?,
                sandbox: row.get(4)?,
            })
        },
    )
    .optional()
    .map_err(failed("reading an idempotency record"))
}

fn is_full(
    t: &Transaction<'_>,
    scope: &IdempotencyScope,
    records_max: usize,
) -> Result<bool, StoreError> {
    let (namespace, env, _) = names(scope);
    let own: i64 = t
        .query_row(
            "SELECT count(*) FROM idempotency WHERE namespace = ?1 AND env = ?2",
            [namespace, env],
            |row| row.get(0),
        )
        .map_err(failed("counting idempotency records"))?;
    Ok(usize::try_from(own).is_ok_and(|own| own >= records_max))
}

fn next_generation(t: &Transaction<'_>) -> Result<i64, StoreError> {
    t.query_row(
        "INSERT INTO counters (name, value) VALUES ('generation', 1) \
         ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value",
        [],
        |row| row.get(0),
    )
    .map_err(failed("taking a generation"))
}

/// Which of the outcomes without a claim applies, or the orphan that is taken over.
fn settle(
    held: Option<Held>,
    request: &ClaimRequest,
) -> Result<Result<Option<Held>, ClaimOutcome>, StoreError> {
    let Some(held) = held else {
        return Ok(Ok(None));
    };
    if held.fingerprint != request.fingerprint.0 {
        return Ok(Err(ClaimOutcome::Mismatch));
    }
    if let Some(made) = &held.sandbox {
        return Ok(Err(ClaimOutcome::Done(parse(made, "sandbox identifier")?)));
    }
    if from_ms(held.claimed_until_ms) > request.now {
        return Ok(Err(ClaimOutcome::InProgress));
    }
    Ok(Ok(Some(held)))
}

pub(super) fn claim(
    t: &Transaction<'_>,
    scope: &IdempotencyScope,
    request: &ClaimRequest,
    records_max: usize,
) -> Result<ClaimOutcome, StoreError> {
    t.execute(
        "DELETE FROM idempotency WHERE expires_at_ms <= ?1",
        [to_ms(request.now)],
    )
    .map_err(failed("forgetting expired idempotency records"))?;
    let orphan = match settle(held(t, scope)?, request)? {
        Ok(orphan) => orphan,
        Err(outcome) => return Ok(outcome),
    };
    if orphan.is_none() && is_full(t, scope, records_max)? {
        return Ok(ClaimOutcome::Full);
    }
    let generation = next_generation(t)?;
    insert(t, scope, request, generation)?;
    let read_orphan = |held: Held| -> Result<_, StoreError> {
        let earlier = parse(&held.request, "request identifier")?;
        let since: Timestamp = from_ms(held.claimed_at_ms);
        Ok((earlier, since))
    };
    Ok(ClaimOutcome::Claimed(Claim {
        generation: Generation(u64::try_from(generation).unwrap_or(0)),
        orphan: orphan.map(read_orphan).transpose()?,
    }))
}

fn insert(
    t: &Transaction<'_>,
    scope: &IdempotencyScope,
    request: &ClaimRequest,
    generation: i64,
) -> Result<(), StoreError> {
    let (namespace, env, key) = names(scope);
    t.execute(
        "INSERT OR REPLACE INTO idempotency (namespace, env, key, fingerprint, generation, \
         request, claimed_at_ms, claimed_until_ms, expires_at_ms) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        (
            namespace,
            env,
            key,
            request.fingerprint.0,
            generation,
            request.request.as_str(),
            to_ms(request.now),
            to_ms(request.claimed_until),
            to_ms(request.expires_at),
        ),
    )
    .map(|_| ())
    .map_err(failed("claiming an idempotency key"))
}

pub(super) fn complete(
    t: &Transaction<'_>,
    scope: &IdempotencyScope,
    generation: Generation,
    sandbox: &SandboxId,
) -> Result<CompleteOutcome, StoreError> {
    let (namespace, env, key) = names(scope);
    let generation = i64::try_from(generation.0).unwrap_or(i64::MAX);
    let changed = t
        .execute(
            "UPDATE idempotency SET sandbox = ?5 WHERE namespace = ?1 AND env = ?2 AND key = ?3 \
             AND generation = ?4 AND sandbox IS NULL",
            (namespace, env, key, generation, sandbox.as_str()),
        )
        .map_err(failed("completing an idempotency record"))?;
    Ok(if changed == 1 {
        CompleteOutcome::Completed
    } else {
        CompleteOutcome::Superseded
    })
}

pub(super) fn abandon(
    t: &Transaction<'_>,
    scope: &IdempotencyScope,
    generation: Generation,
) -> Result<(), StoreError> {
    let (namespace, env, key) = names(scope);
    let generation = i64::try_from(generation.0).unwrap_or(i64::MAX);
    t.execute(
        "DELETE FROM idempotency WHERE namespace = ?1 AND env = ?2 AND key = ?3 \
         AND generation = ?4 AND sandbox IS NULL",
        (namespace, env, key, generation),
    )
    .map(|_| ())
    .map_err(failed("abandoning an idempotency record"))
}
