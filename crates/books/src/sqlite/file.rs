//! The books' file: reading it at the start, writing what steps changed, finding that it is too old.
//!
//! Beside the file lies a *mark*: how many commits there had been, written after a commit and at most
//! once a second. A file with fewer commits than its mark was put back from a backup: what it forgot
//! may be out there.

use std::{
    fs::File,
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use sandhold_governor::{
    books::{Act, Audit, Changes, Kept, Stage},
    ids::SlotId,
};
use sandhold_types::{Generation, SandboxId, Timestamp};

use super::{
    SqliteBooksError,
    owned::{self, Synced},
};
use crate::text::{self, Unreadable};

/// The version of the schema that this program writes; kept in the file's `user_version`.
const VERSION: i64 = 1;

/// For how long the trail of a sandbox that is gone is kept.
const AUDIT_KEPT: Duration = Duration::from_secs(7 * 24 * 3_600);

/// For how long an owner's history is kept when it has no lease. A lease that asks after that under
/// a sealed name gets a new generation; the old one stays dead.
const LINE_KEPT: Duration = Duration::from_secs(30 * 24 * 3_600);

/// How often the mark is written at most.
const MARK_SPACING: Duration = Duration::from_secs(1);

/// Prepared statements that the connection keeps.
const STATEMENTS_KEPT_MAX: usize = 32;

/// The open file and its mark.
#[derive(Debug)]
pub(super) struct BooksFile {
    connection: Connection,
    mark: File,
    mark_path: PathBuf,
    marked_at: Timestamp,
    commits: u64,
}

/// What the file held at the start.
pub(super) struct Opened {
    pub(super) file: BooksFile,
    pub(super) kept: Kept,
    /// It is older than its mark: its last writes are lost.
    pub(super) lost_writes: bool,
}

type Result<T> = std::result::Result<T, SqliteBooksError>;

fn failed(step: &'static str) -> impl FnOnce(rusqlite::Error) -> SqliteBooksError {
    move |source| SqliteBooksError::Query { step, source }
}

impl From<Unreadable> for SqliteBooksError {
    fn from(unreadable: Unreadable) -> Self {
        Self::Corrupt { what: unreadable.0 }
    }
}

fn to_ms(at: Timestamp) -> i64 {
    i64::try_from(at.unix_ms()).unwrap_or(i64::MAX)
}

fn before(now: Timestamp, age: Duration) -> i64 {
    to_ms(now).saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX))
}

impl BooksFile {
    pub(super) fn open(path: &Path, now: Timestamp) -> Result<Opened> {
        let connection = connect(path)?;
        let mark_path = path.with_extension("mark");
        let cannot_mark = |source| SqliteBooksError::Mark {
            path: mark_path.clone(),
            source,
        };
        let marked = read_mark(&mark_path).map_err(cannot_mark)?;
        let mark = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&mark_path)
            .map_err(cannot_mark)?;
        let mut file = Self {
            connection,
            mark,
            mark_path,
            marked_at: now,
            commits: 0,
        };
        let kept = file.read(now)?;
        let lost_writes = match marked {
            Some(marked) => file.commits < marked,
            // Whoever put the file here left its mark behind.
            None => file.commits > 0,
        };
        file.commits = file.commits.max(marked.unwrap_or(0));
        Ok(Opened {
            file,
            kept,
            lost_writes,
        })
    }

    /// All that is kept. Forgets what has been kept for long enough.
    pub(super) fn read(&mut self, now: Timestamp) -> Result<Kept> {
        let t = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(failed("beginning to read the books"))?;
        forget(&t, now)?;
        let kept = Kept {
            buckets: rows(
                &t,
                "SELECT bucket, policy, '' FROM buckets",
                |[name, text, _]| {
                    let policy = text::read_policy(&text)?.ok_or(Unreadable("bucket"))?;
                    Ok((text::read_bucket(&name)?, policy))
                },
            )?,
            records: rows(
                &t,
                "SELECT slot, record, '' FROM records",
                |[slot, text, _]| {
                    let slot: SlotId = slot.parse().map_err(|_| Unreadable("slot"))?;
                    Ok((slot.clone(), text::read_record(slot, &text)?))
                },
            )?,
            lines: rows(
                &t,
                "SELECT bucket, owner, line FROM lines",
                |[bucket, owner, line]| {
                    let owner = owner.parse().map_err(|_| Unreadable("owner"))?;
                    Ok((
                        (text::read_bucket(&bucket)?, owner),
                        text::read_line(&line)?,
                    ))
                },
            )?,
            newest: Generation(common(&t, "newest")?.unwrap_or(0)),
            stage: match common(&t, "settling_since")? {
                Some(ms) => Stage::Settling {
                    since: Timestamp::from_unix_ms(ms),
                },
                None => Stage::Settled,
            },
        };
        let commits = common(&t, "commits")?.unwrap_or(0);
        t.commit().map_err(failed("reading the books"))?;
        self.commits = commits;
        Ok(kept)
    }

    /// Writes down what some steps changed and noted, all or nothing, and returns when it is on the
    /// disk.
    pub(super) fn write(
        &mut self,
        changes: Option<&Changes<'_>>,
        audit: &[Audit],
        now: Timestamp,
    ) -> Result<()> {
        let t = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(failed("beginning to write the books"))?;
        if let Some(changes) = changes {
            write_changes(&t, changes, now)?;
        }
        write_audit(&t, audit)?;
        set_common(&t, "commits", Some(self.commits + 1))?;
        t.commit().map_err(failed("writing the books"))?;
        self.commits += 1;
        if now.since(self.marked_at) >= MARK_SPACING || self.commits == 1 {
            self.write_mark(now)?;
        }
        Ok(())
    }

    /// Not synced: it only has to be right after a restore, not after a power cut, which leaves an
    /// older mark that proves nothing.
    fn write_mark(&mut self, now: Timestamp) -> Result<()> {
        let text = format!("{:020}\n", self.commits);
        self.mark
            .write_all_at(text.as_bytes(), 0)
            .and_then(|()| self.mark.flush())
            .map_err(|source| SqliteBooksError::Mark {
                path: self.mark_path.clone(),
                source,
            })?;
        self.marked_at = now;
        Ok(())
    }

    /// What was done to a sandbox, oldest first: by the slot it is in, or by the entries that name it.
    pub(super) fn trail(&self, sandbox: &SandboxId, slot: Option<&SlotId>) -> Result<Vec<Audit>> {
        let step = "reading an audit trail";
        let mut statement = self
            .connection
            .prepare_cached(
                "SELECT entry FROM audit WHERE slot = ?2 \
                 OR slot IN (SELECT slot FROM audit WHERE sandbox = ?1) ORDER BY id",
            )
            .map_err(failed(step))?;
        let entries = statement
            .query_map(params![sandbox.as_str(), slot.map(SlotId::as_str)], |row| {
                row.get::<_, String>(0)
            })
            .and_then(Iterator::collect::<rusqlite::Result<Vec<_>>>)
            .map_err(failed(step))?;
        entries
            .iter()
            .map(|entry| Ok(text::read_audit(entry)?))
            .collect()
    }
}

impl Drop for BooksFile {
    fn drop(&mut self) {
        let now = self.marked_at;
        if let Err(error) = self.write_mark(now) {
            tracing::warn!(%error, "the mark of the books could not be written");
        }
    }
}

fn read_mark(path: &Path) -> std::io::Result<Option<u64>> {
    match std::fs::read_to_string(path) {
        // What cannot be read must not make lost writes look like none.
        Ok(text) => Ok(Some(text.trim().parse().unwrap_or(u64::MAX / 2))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn connect(path: &Path) -> Result<Connection> {
    let connection = owned::open(path, Synced::AtCommit, include_str!("schema.sql"), VERSION)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_KEPT_MAX);
    Ok(connection)
}

fn forget(t: &Transaction<'_>, now: Timestamp) -> Result<()> {
    let step = "forgetting what was kept for long enough";
    t.execute(
        "DELETE FROM audit WHERE at_ms < ?1 AND slot NOT IN (SELECT slot FROM records)",
        [before(now, AUDIT_KEPT)],
    )
    .map_err(failed(step))?;
    t.execute(
        "DELETE FROM lines WHERE touched_at_ms < ?1 AND (line = '' OR substr(line, 1, 1) = char(9))",
        [before(now, LINE_KEPT)],
    )
    .map_err(failed(step))?;
    Ok(())
}

fn rows<K: Ord, V>(
    t: &Transaction<'_>,
    query: &str,
    read: impl Fn([String; 3]) -> std::result::Result<(K, V), Unreadable>,
) -> Result<std::collections::BTreeMap<K, V>> {
    let step = "reading the books";
    let mut statement = t.prepare(query).map_err(failed(step))?;
    let mut found = statement.query([]).map_err(failed(step))?;
    let mut all = std::collections::BTreeMap::new();
    while let Some(row) = found.next().map_err(failed(step))? {
        let texts = [row.get(0), row.get(1), row.get(2)];
        let [a, b, c] = texts;
        let texts = [
            a.map_err(failed(step))?,
            b.map_err(failed(step))?,
            c.map_err(failed(step))?,
        ];
        let (key, value) = read(texts)?;
        all.insert(key, value);
    }
    Ok(all)
}

fn common(t: &Transaction<'_>, name: &str) -> Result<Option<u64>> {
    let value: Option<Option<i64>> = t
        .query_row("SELECT value FROM common WHERE name = ?1", [name], |row| {
            row.get(0)
        })
        .optional()
        .map_err(failed("reading the books"))?;
    Ok(value.flatten().and_then(|value| u64::try_from(value).ok()))
}

fn set_common(t: &Transaction<'_>, name: &str, value: Option<u64>) -> Result<()> {
    let value = value.map(|value| i64::try_from(value).unwrap_or(i64::MAX));
    t.prepare_cached("INSERT OR REPLACE INTO common VALUES (?1, ?2)")
        .and_then(|mut s| s.execute(params![name, value]))
        .map(|_| ())
        .map_err(failed("writing the books"))
}

fn write_changes(t: &Transaction<'_>, changes: &Changes<'_>, now: Timestamp) -> Result<()> {
    let step = "writing the books";
    set_common(t, "newest", Some(changes.newest.0))?;
    let settling_since = match changes.stage {
        Stage::Settled => None,
        Stage::Settling { since } => Some(since.unix_ms()),
    };
    set_common(t, "settling_since", settling_since)?;
    for (bucket, policy) in &changes.buckets {
        let text = text::write_policy(policy);
        t.prepare_cached("INSERT OR REPLACE INTO buckets VALUES (?1, ?2)")
            .and_then(|mut s| s.execute(params![bucket.to_string(), text]))
            .map_err(failed(step))?;
    }
    for (slot, record) in &changes.records {
        match record {
            Some(record) => t
                .prepare_cached("INSERT OR REPLACE INTO records VALUES (?1, ?2)")
                .and_then(|mut s| s.execute(params![slot.as_str(), text::write_record(record)])),
            None => t
                .prepare_cached("DELETE FROM records WHERE slot = ?1")
                .and_then(|mut s| s.execute([slot.as_str()])),
        }
        .map_err(failed(step))?;
    }
    for ((bucket, owner), line) in &changes.lines {
        t.prepare_cached("INSERT OR REPLACE INTO lines VALUES (?1, ?2, ?3, ?4)")
            .and_then(|mut s| {
                let text = text::write_line(line);
                s.execute(params![
                    bucket.to_string(),
                    owner.as_str(),
                    text,
                    to_ms(now)
                ])
            })
            .map_err(failed(step))?;
    }
    Ok(())
}

/// The trail of a slot in which nothing was ever made is nobody's to ask for.
fn write_audit(t: &Transaction<'_>, audit: &[Audit]) -> Result<()> {
    let mut forget = t
        .prepare_cached("DELETE FROM audit WHERE slot = ?1")
        .map_err(failed("writing the audit trail"))?;
    let mut statement = t
        .prepare_cached("INSERT INTO audit (slot, sandbox, at_ms, entry) VALUES (?1, ?2, ?3, ?4)")
        .map_err(failed("writing the audit trail"))?;
    for entry in audit {
        let sandbox = entry.sandbox.as_ref().map(SandboxId::as_str);
        if sandbox.is_none() && matches!(entry.what, Act::SlotFreed { .. }) {
            forget
                .execute([entry.slot.as_str()])
                .map_err(failed("writing the audit trail"))?;
            continue;
        }
        statement
            .execute(params![
                entry.slot.as_str(),
                sandbox,
                to_ms(entry.at),
                text::write_audit(entry)
            ])
            .map_err(failed("writing the audit trail"))?;
    }
    Ok(())
}
