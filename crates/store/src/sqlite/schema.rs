//! The schema and how an older one becomes it.

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};

use super::failed;
use crate::StoreError;

/// What brings the schema from version n to n + 1, in order. Entries are never changed once they
/// have shipped; a test keeps databases of every version.
const MIGRATIONS: &[&str] = &[include_str!("migrations/001_tenants_keys_idempotency.sql")];

/// Brings the schema up to date in one transaction, or leaves it as it was.
pub(super) fn migrate(connection: &mut Connection) -> Result<(), StoreError> {
    let transaction = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(failed("beginning the migration"))?;
    let found = version(&transaction)?;
    let known = i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX);
    if found > known {
        return Err(StoreError::Newer { found, known });
    }
    for (to, statements) in (1..).zip(MIGRATIONS) {
        if to > found {
            transaction
                .execute_batch(statements)
                .map_err(|source| StoreError::Migrate { to, source })?;
        }
    }
    transaction
        .execute_batch("DELETE FROM schema_version")
        .and_then(|()| transaction.execute("INSERT INTO schema_version VALUES (?1)", [known]))
        .and_then(|_| transaction.commit())
        .map_err(|source| StoreError::Migrate { to: known, source })
}

/// The version in the file; a new file has version 0.
fn version(transaction: &Transaction<'_>) -> Result<i64, StoreError> {
    let step = "reading the schema version";
    transaction
        .execute_batch(
            "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL) STRICT",
        )
        .map_err(failed(step))?;
    transaction
        .query_row("SELECT version FROM schema_version", [], |row| row.get(0))
        .optional()
        .map(|found| found.unwrap_or(0))
        .map_err(failed(step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_database_is_refused_and_left_alone() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection).unwrap();
        connection
            .execute("UPDATE schema_version SET version = 99", [])
            .unwrap();
        let refused = migrate(&mut connection).unwrap_err();
        assert!(matches!(refused, StoreError::Newer { found: 99, .. }));
        let kept: i64 = connection
            .query_row("SELECT version FROM schema_version", [], |row| row.get(0))
            .unwrap();
        assert_eq!(kept, 99);
    }

    #[test]
    fn migrating_twice_changes_nothing() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection).unwrap();
        connection
            .execute("INSERT INTO tenants VALUES ('a', 'dev', 1)", [])
            .unwrap();
        migrate(&mut connection).unwrap();
        let tenants: i64 = connection
            .query_row("SELECT count(*) FROM tenants", [], |row| row.get(0))
            .unwrap();
        assert_eq!(tenants, 1);
    }
}
