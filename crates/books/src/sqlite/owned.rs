//! A database file that one process has to itself.

use std::path::Path;

use rusqlite::Connection;

use super::SqliteBooksError;

/// When what was committed is on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Synced {
    /// Before the commit returns.
    AtCommit,
    /// When the system finds the time.
    Later,
}

/// Opens the file, or makes it with `schema`. Nobody else can have it open then, so what is in
/// memory stays the truth. Blocks.
///
/// # Errors
/// It cannot be opened, another process has it, or it is not of `version` but newer.
pub(crate) fn open(
    path: &Path,
    synced: Synced,
    schema: &str,
    version: i64,
) -> Result<Connection, SqliteBooksError> {
    let cannot_open = |source| SqliteBooksError::Open {
        path: path.to_owned(),
        source,
    };
    let synchronous = match synced {
        Synced::AtCommit => "FULL",
        Synced::Later => "NORMAL",
    };
    let connection = Connection::open(path).map_err(cannot_open)?;
    connection
        .execute_batch(&format!(
            "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; \
             PRAGMA synchronous = {synchronous}; BEGIN IMMEDIATE; COMMIT;",
        ))
        .map_err(cannot_open)?;
    let found: i64 = connection
        .query_row("PRAGMA user_version", [], |row| row.get(0))
        .map_err(cannot_open)?;
    if found == 0 {
        connection
            .execute_batch(&format!(
                "BEGIN; {schema} PRAGMA user_version = {version}; COMMIT;"
            ))
            .map_err(cannot_open)?;
    } else if found != version {
        return Err(SqliteBooksError::Newer {
            found,
            known: version,
        });
    }
    Ok(connection)
}
