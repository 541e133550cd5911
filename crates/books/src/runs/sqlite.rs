//! The logs of one process, in a SQLite file of their own.
//!
//! Synced when the system finds the time, not at each entry: what a power cut takes is the end of a
//! log whose process it took too.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use sandhold_governor::{
    StoreError,
    ids::{ReplicaId, RunId},
};
use sandhold_types::{Clock, Timestamp};

use super::{
    Append, ENDED_KEPT, ENTRIES_MAX, Ending, Entry, LOG_BYTES_MAX, Opened, Place, READ_ENTRIES_MAX,
    RunState, Written, place,
};
use crate::sqlite::{
    SqliteBooksError,
    owned::{self, Synced},
};

/// The version of the schema that this program writes.
const VERSION: i64 = 1;

/// The logs of one process.
#[derive(Debug)]
pub struct SqliteRuns {
    connection: Arc<Mutex<Connection>>,
    clock: Arc<dyn Clock>,
}

type Sql<T> = rusqlite::Result<T>;

fn to_i64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn to_u64(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

impl SqliteRuns {
    /// Opens the file, or makes it. Blocks.
    ///
    /// # Errors
    /// It cannot be opened, another process has it, or it is of a newer version.
    pub fn open_file(path: &Path, clock: Arc<dyn Clock>) -> Result<Self, SqliteBooksError> {
        let connection = owned::open(path, Synced::Later, include_str!("schema.sql"), VERSION)?;
        Ok(Self {
            connection: Arc::new(Mutex::new(connection)),
            clock,
        })
    }

    /// One transaction, off the serving threads.
    async fn step<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>, Timestamp) -> Sql<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (connection, now) = (self.connection.clone(), self.clock.now());
        let done = tokio::task::spawn_blocking(move || {
            let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
            let t = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let value = work(&t, now)?;
            t.commit()?;
            Sql::Ok(value)
        });
        match done.await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the logs of runs failed");
                Err(StoreError::NoAnswer)
            }
            Err(_) => Err(StoreError::NoAnswer),
        }
    }

    pub(super) async fn open(
        &self,
        run: &RunId,
        head: &str,
        writer: &ReplicaId,
    ) -> Result<Opened, StoreError> {
        let (run, head, writer) = (run.to_string(), head.to_owned(), writer.to_string());
        self.step(move |t, now| {
            forget_ended(t, now)?;
            let added = t.execute(
                "INSERT OR IGNORE INTO runs VALUES (?1, ?2, ?3, ?4, NULL, 0, 0)",
                params![run, head, writer, to_i64(now.unix_ms())],
            )?;
            Ok(if added == 1 {
                Opened::New
            } else {
                Opened::Exists
            })
        })
        .await
    }

    pub(super) async fn append(
        &self,
        run: &RunId,
        writer: &ReplicaId,
        append: Append<'_>,
    ) -> Result<Written, StoreError> {
        let (run, writer) = (run.to_string(), writer.to_string());
        let (after, ending) = (append.after, append.ending);
        let head = append.head.map(ToOwned::to_owned);
        let entries = append.entries.to_vec();
        self.step(move |t, now| {
            let Some(log) = log_of(t, &run)? else {
                return Ok(Written::Lost);
            };
            if log.writer != writer {
                return Ok(Written::NotWriter);
            }
            let new = entries.len() as u64;
            match place(log.last, after, new) {
                Err(written) => return Ok(written),
                Ok(Place::ThereAlready) => return Ok(Written::Done),
                Ok(Place::Next) if log.ended => return Ok(Written::NotWriter),
                Ok(Place::Next) => {}
            }
            let bytes = entries.iter().map(|e| e.data.len() as u64).sum::<u64>() + log.bytes;
            let is_full = after + new > ENTRIES_MAX || bytes > LOG_BYTES_MAX;
            if is_full && ending == Ending::Open && new > 0 {
                return Ok(Written::Full);
            }
            let mut insert = t.prepare_cached("INSERT INTO entries VALUES (?1, ?2, ?3, ?4)")?;
            for (id, entry) in (after + 1..).zip(&entries) {
                insert.execute(params![run, to_i64(id), entry.kind, entry.data])?;
            }
            let now_ms = to_i64(now.unix_ms());
            let ended_at_ms = (ending == Ending::Closed).then_some(now_ms);
            t.prepare_cached(
                "UPDATE runs SET head = coalesce(?2, head), heard_at_ms = ?3, ended_at_ms = ?4, \
                 last = ?5, bytes = ?6 WHERE run = ?1",
            )?
            .execute(params![
                run,
                head,
                now_ms,
                ended_at_ms,
                to_i64(after + new),
                to_i64(bytes)
            ])?;
            Ok(Written::Done)
        })
        .await
    }

    pub(super) async fn claim(
        &self,
        run: &RunId,
        writer: &ReplicaId,
        silent_for: Duration,
    ) -> Result<Written, StoreError> {
        let (run, writer) = (run.to_string(), writer.to_string());
        self.step(move |t, now| {
            let Some(log) = log_of(t, &run)? else {
                return Ok(Written::Lost);
            };
            let is_heard = now.since(log.heard_at) < silent_for;
            if log.ended || log.writer != writer && is_heard {
                return Ok(Written::NotWriter);
            }
            t.execute(
                "UPDATE runs SET writer = ?2, heard_at_ms = ?3 WHERE run = ?1",
                params![run, writer, to_i64(now.unix_ms())],
            )?;
            Ok(Written::Done)
        })
        .await
    }

    pub(super) async fn forget(&self, run: &RunId, writer: &ReplicaId) -> Result<(), StoreError> {
        let (run, writer) = (run.to_string(), writer.to_string());
        self.step(move |t, _| {
            let gone = t.execute(
                "DELETE FROM runs WHERE run = ?1 AND writer = ?2",
                params![run, writer],
            )?;
            if gone == 1 {
                t.execute("DELETE FROM entries WHERE run = ?1", [run])?;
            }
            Ok(())
        })
        .await
    }

    pub(super) async fn state(&self, run: &RunId) -> Result<Option<RunState>, StoreError> {
        let run = run.to_string();
        let found = self.step(move |t, now| {
            let row = t.query_row("SELECT * FROM runs WHERE run = ?1", [run], |row| {
                state_of(row, now)
            });
            row.optional()
        });
        Ok(found.await?.flatten())
    }

    pub(super) async fn read(&self, run: &RunId, after: u64) -> Result<Vec<Entry>, StoreError> {
        let run = run.to_string();
        self.step(move |t, _| {
            let mut statement = t.prepare_cached(
                "SELECT kind, data FROM entries WHERE run = ?1 AND id > ?2 ORDER BY id LIMIT ?3",
            )?;
            let entries = statement.query_map(
                params![run, to_i64(after), to_i64(READ_ENTRIES_MAX)],
                |row| {
                    Ok(Entry {
                        kind: row.get(0)?,
                        data: row.get(1)?,
                    })
                },
            )?;
            entries.collect()
        })
        .await
    }

    pub(super) async fn unfinished(&self) -> Result<Vec<RunState>, StoreError> {
        self.step(move |t, now| {
            let mut statement = t.prepare_cached("SELECT * FROM runs WHERE ended_at_ms IS NULL")?;
            let states = statement.query_map([], |row| state_of(row, now))?;
            let states: Vec<Option<RunState>> = states.collect::<Sql<_>>()?;
            Ok(states.into_iter().flatten().collect())
        })
        .await
    }
}

struct Log {
    writer: String,
    heard_at: Timestamp,
    ended: bool,
    last: u64,
    bytes: u64,
}

fn log_of(t: &Transaction<'_>, run: &str) -> Sql<Option<Log>> {
    let mut statement = t.prepare_cached(
        "SELECT writer, heard_at_ms, ended_at_ms, last, bytes FROM runs WHERE run = ?1",
    )?;
    let log = statement.query_row([run], |row| {
        Ok(Log {
            writer: row.get(0)?,
            heard_at: Timestamp::from_unix_ms(to_u64(row.get(1)?)),
            ended: row.get::<_, Option<i64>>(2)?.is_some(),
            last: to_u64(row.get(3)?),
            bytes: to_u64(row.get(4)?),
        })
    });
    log.optional()
}

/// `None` for a name that no run can have.
fn state_of(row: &Row<'_>, now: Timestamp) -> Sql<Option<RunState>> {
    let (run, writer): (String, String) = (row.get("run")?, row.get("writer")?);
    let (Ok(run), Ok(writer)) = (run.parse(), writer.parse()) else {
        return Ok(None);
    };
    let ended_at_ms: Option<i64> = row.get("ended_at_ms")?;
    Ok(Some(RunState {
        run,
        head: row.get("head")?,
        writer,
        heard_at: Timestamp::from_unix_ms(to_u64(row.get("heard_at_ms")?)),
        ending: match ended_at_ms {
            Some(_) => Ending::Closed,
            None => Ending::Open,
        },
        last: to_u64(row.get("last")?),
        now,
    }))
}

fn forget_ended(t: &Transaction<'_>, now: Timestamp) -> Sql<()> {
    let kept_ms = u64::try_from(ENDED_KEPT.as_millis()).unwrap_or(u64::MAX);
    let before = to_i64(now.unix_ms().saturating_sub(kept_ms));
    t.prepare_cached(
        "DELETE FROM entries WHERE run IN (SELECT run FROM runs WHERE ended_at_ms < ?1)",
    )?
    .execute([before])?;
    t.prepare_cached("DELETE FROM runs WHERE ended_at_ms < ?1")?
        .execute([before])?;
    Ok(())
}
