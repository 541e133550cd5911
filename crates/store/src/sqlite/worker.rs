//! A thread with a connection, and the bounded queue in front of it.

use std::{path::Path, time::Duration};

use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::sync::{mpsc, oneshot};

use super::{failed, schema};
use crate::StoreError;

/// How many requests may wait for one thread.
const WAITING_MAX: usize = 1_024;

/// How long a statement waits for another process that holds the database.
const BUSY_WAIT: Duration = Duration::from_secs(5);

/// Prepared statements that one connection keeps.
const STATEMENTS_KEPT_MAX: usize = 64;

type Job = Box<dyn FnOnce(&mut Connection) + Send>;

/// What a worker's connection may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Everything; brings the schema up to date first.
    Write,
    /// Queries only.
    Read,
}

/// A thread that owns a connection. It ends when this is dropped and its queue is empty.
#[derive(Debug)]
pub(super) struct Worker {
    jobs: mpsc::Sender<Job>,
}

impl Worker {
    pub(super) fn start(path: &Path, access: Access) -> Result<Self, StoreError> {
        let mut connection = open(path, access)?;
        let (jobs, mut queue) = mpsc::channel::<Job>(WAITING_MAX);
        let name = match access {
            Access::Write => "store-write",
            Access::Read => "store-read",
        };
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                while let Some(job) = queue.blocking_recv() {
                    job(&mut connection);
                }
            })
            .map_err(StoreError::Thread)?;
        Ok(Self { jobs })
    }

    /// Runs `verb` in a transaction of its own and commits it when it succeeds.
    pub(super) async fn write<T: Send + 'static>(
        &self,
        verb: impl FnOnce(&Transaction<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.write_then(verb, || ()).await
    }

    /// The same, and does `then` when it is over, before the caller is told, whether there still
    /// is one or not.
    pub(super) async fn write_then<T: Send + 'static>(
        &self,
        verb: impl FnOnce(&Transaction<'_>) -> Result<T, StoreError> + Send + 'static,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<T, StoreError> {
        self.run(move |connection| {
            let transaction = connection
                .transaction_with_behavior(TransactionBehavior::Immediate)
                .map_err(failed("beginning a transaction"))?;
            let value = verb(&transaction)?;
            let committed = transaction.commit();
            then();
            committed.map_err(failed("committing a transaction"))?;
            Ok(value)
        })
        .await
    }

    /// Runs `query` on a snapshot.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.run(move |connection| query(connection)).await
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |connection| {
            // A caller that went away no longer wants to know.
            let _ = answer.send(work(connection));
        });
        self.jobs.try_send(job).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => StoreError::Overloaded {
                waiting_max: WAITING_MAX,
            },
            mpsc::error::TrySendError::Closed(_) => StoreError::Closed,
        })?;
        answered.await.map_err(|_| StoreError::Closed)?
    }
}

fn open(path: &Path, access: Access) -> Result<Connection, StoreError> {
    let cannot_open = |source| StoreError::Open {
        path: path.to_owned(),
        source,
    };
    let mut connection = Connection::open(path).map_err(cannot_open)?;
    connection.busy_timeout(BUSY_WAIT).map_err(cannot_open)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_KEPT_MAX);
    connection
        .execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;",
        )
        .map_err(cannot_open)?;
    match access {
        Access::Write => schema::migrate(&mut connection)?,
        Access::Read => connection
            .pragma_update(None, "query_only", true)
            .map_err(cannot_open)?,
    }
    Ok(connection)
}
