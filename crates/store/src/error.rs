//! Why the store did not do what was asked.

use std::path::PathBuf;

/// A failed request to the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database file could not be opened.
    #[error("the store at {} cannot be opened", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: rusqlite::Error,
    },
    /// The database was written by a later version of this program.
    #[error("the store has schema version {found}; this program knows versions up to {known}")]
    Newer {
        /// The version in the file.
        found: i64,
        /// The newest version this program knows.
        known: i64,
    },
    /// A migration failed; the database is as it was before it.
    #[error("the store cannot be brought to schema version {to}")]
    Migrate {
        /// The version that was not reached.
        to: i64,
        /// The cause.
        #[source]
        source: rusqlite::Error,
    },
    /// A statement failed.
    #[error("the store failed while {step}")]
    Query {
        /// What was being done.
        step: &'static str,
        /// The cause.
        #[source]
        source: rusqlite::Error,
    },
    /// A stored value does not read as what it was written as.
    #[error("the store holds an unreadable {what}")]
    Corrupt {
        /// Which column.
        what: &'static str,
    },
    /// Too many requests wait for the store already; try again.
    #[error("the store is overloaded: {waiting_max} requests wait already")]
    Overloaded {
        /// The bound that was reached.
        waiting_max: usize,
    },
    /// The store's thread has ended.
    #[error("the store is closed")]
    Closed,
    /// The store's thread could not be started.
    #[error("no thread for the store")]
    Thread(#[source] std::io::Error),
}
