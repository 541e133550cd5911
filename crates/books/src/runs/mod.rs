//! What every run told its caller, kept: a bounded log for each, written by one replica at a time (R-G3).
//!
//! ```text
//!   the replica that executes it ── append ──▶ 1 started · 2 progress · … · n completed
//!                                                   ▲ cursor      ▲ cursor
//!   readers, each as fast as it is ── read after ───┘─────────────┘
//! ```
//!
//! A reader holds nothing but a number, so one that is slow, gone or comes back later costs a run
//! nothing. What an entry says is the writer's business; here it is a kind and a text.
//!
//! Invariants:
//! - entries are numbered from 1 without gaps, and never change;
//! - only the writer appends, and nothing follows the entry that ends a log;
//! - the same append again, because its answer was lost, adds nothing;
//! - a log never has more than [`ENTRIES_MAX`] entries or [`LOG_BYTES_MAX`] bytes.
//!
//! Apart from the books, in a file and over a connection of its own: a megabyte of artifacts must not
//! stand before a slot that somebody waits for.

mod redis;
mod sqlite;

use std::time::Duration;

use sandhold_governor::{
    StoreError,
    ids::{ReplicaId, RunId},
};
use sandhold_types::Timestamp;

pub use self::{redis::RedisRuns, sqlite::SqliteRuns};

/// The most entries of one log.
pub const ENTRIES_MAX: u64 = 20_000;
/// The most bytes of one log.
pub const LOG_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// The most entries of one read.
pub const READ_ENTRIES_MAX: u64 = 16;
/// For how long the log of a run that has ended is kept.
pub const ENDED_KEPT: Duration = Duration::from_secs(24 * 3_600);

/// One thing that a run told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What kind of thing, as one word.
    pub kind: String,
    /// The rest.
    pub data: String,
}

/// Whether the log ends with an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It goes on.
    Open,
    /// Nothing follows.
    Closed,
}

/// A log without its entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunState {
    /// Of which run.
    pub run: RunId,
    /// What its writer needs to know of it.
    pub head: String,
    /// Who writes.
    pub writer: ReplicaId,
    /// When the writer was last heard, by the store's clock.
    pub heard_at: Timestamp,
    /// Whether it has ended.
    pub ending: Ending,
    /// How many entries it has.
    pub last: u64,
    /// The store's clock.
    pub now: Timestamp,
}

/// What became of a request to begin a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opened {
    /// It is new.
    New,
    /// There is one of that name.
    Exists,
}

/// What became of a request to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It is so.
    Done,
    /// Another replica writes now, or nobody does any more.
    NotWriter,
    /// The log, or what was written to it, is lost.
    Lost,
    /// It has as many entries or bytes as a log may have; only its end fits.
    Full,
}

/// What is appended, and after what.
#[derive(Debug, Clone, Copy)]
pub struct Append<'a> {
    /// How many entries the writer knows to be there.
    pub after: u64,
    /// The new head, if it changes.
    pub head: Option<&'a str>,
    /// The entries; none says only that the writer is alive.
    pub entries: &'a [Entry],
    /// Whether the log ends with them.
    pub ending: Ending,
}

/// The logs of all runs, wherever this deployment keeps its books.
#[derive(Debug)]
pub enum KeptRuns {
    /// In a file of this process.
    Sqlite(SqliteRuns),
    /// On a server that all replicas share.
    Redis(Box<RedisRuns>),
}

macro_rules! either {
    ($self:ident, $runs:ident => $call:expr) => {
        match $self {
            KeptRuns::Sqlite($runs) => $call.await,
            KeptRuns::Redis($runs) => $call.await,
        }
    };
}

impl KeptRuns {
    /// Begins a log, unless there is one of that name.
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn open(
        &self,
        run: &RunId,
        head: &str,
        writer: &ReplicaId,
    ) -> Result<Opened, StoreError> {
        either!(self, runs => runs.open(run, head, writer))
    }

    /// Writes to a log.
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn append(
        &self,
        run: &RunId,
        writer: &ReplicaId,
        append: Append<'_>,
    ) -> Result<Written, StoreError> {
        either!(self, runs => runs.append(run, writer, append))
    }

    /// Becomes the writer of a log whose writer has not been heard for so long.
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn claim(
        &self,
        run: &RunId,
        writer: &ReplicaId,
        silent_for: Duration,
    ) -> Result<Written, StoreError> {
        either!(self, runs => runs.claim(run, writer, silent_for))
    }

    /// Forgets a run that never came to be.
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn forget(&self, run: &RunId, writer: &ReplicaId) -> Result<(), StoreError> {
        either!(self, runs => runs.forget(run, writer))
    }

    /// A log without its entries; `None` if there is none (any more).
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn state(&self, run: &RunId) -> Result<Option<RunState>, StoreError> {
        either!(self, runs => runs.state(run))
    }

    /// The entries after a number, at most [`READ_ENTRIES_MAX`].
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn read(&self, run: &RunId, after: u64) -> Result<Vec<Entry>, StoreError> {
        either!(self, runs => runs.read(run, after))
    }

    /// The logs that have not ended.
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn unfinished(&self) -> Result<Vec<RunState>, StoreError> {
        either!(self, runs => runs.unfinished())
    }
}

/// What an append to a log of this length means, by both stores.
///
/// ```text
///   entries there:   after            the writer's last append is what it knows
///                    after + new      this append came before, its answer was lost
///                    fewer than after what it knows is lost
/// ```
fn place(last: u64, after: u64, new: u64) -> Result<Place, Written> {
    if last == after {
        Ok(Place::Next)
    } else if last == after + new && new > 0 {
        Ok(Place::ThereAlready)
    } else if last < after {
        Err(Written::Lost)
    } else {
        Err(Written::NotWriter)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Next,
    ThereAlready,
}
