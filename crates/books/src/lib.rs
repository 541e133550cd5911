//! The governor's books, kept: every verb is one atomic step that is durable before it is answered.
//!
//! ```text
//!   governor ──▶ KeptBooks ─┬─ SqliteBooks   one process: the pure `Books` in memory, each step
//!   (Store)                 │                written through, many callers' steps in one commit
//!                           └─ RedisBooks    many processes: each verb is one Lua function there
//! ```
//!
//! Beside them stand the logs of runs ([`runs`]): what each told its caller, for whoever attaches later.
//!
//! What the verbs mean is [`sandhold_governor::books`]; nothing of it is decided here. One suite runs
//! the same histories against the model and against both, and compares every answer.
//!
//! Invariants:
//! - An answer that was given is durable; a step without an answer may or may not have happened, and
//!   the same request again gets the same answer.
//! - Time is the store's own. No caller's clock is compared with it.
//! - When the last writes may be lost (another server, a backup), the books settle first: nobody new
//!   is admitted and nothing is condemned until every record was seen again.
//!
//! Who calls: the governor's drivers and the routes. Never here: HTTP, platforms, rules.

#![forbid(unsafe_code)]

mod redis;
pub mod runs;
mod sqlite;
mod text;

use sandhold_governor::{
    Store, StoreError,
    books::{Audit, Step, Verb},
};
use sandhold_types::{SandboxId, Timestamp};

pub use crate::{
    redis::{RedisBooks, RedisBooksError, RedisSettings, ServerClock},
    sqlite::{SqliteBooks, SqliteBooksError},
};

/// A step and when it happened, by the store's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timed {
    /// What was answered and noted.
    pub step: Step,
    /// When.
    pub at: Timestamp,
}

/// The books, wherever this deployment keeps them.
#[derive(Debug)]
pub enum KeptBooks {
    /// In a file of this process.
    Sqlite(SqliteBooks),
    /// On a server that all replicas share.
    Redis(Box<RedisBooks>),
}

impl KeptBooks {
    /// Carries out one verb and says when that was.
    ///
    /// # Errors
    /// As [`Store::step`].
    pub async fn step_timed(&self, verb: Verb) -> Result<Timed, StoreError> {
        match self {
            Self::Sqlite(books) => books.step_timed(verb).await,
            Self::Redis(books) => books.step_timed(verb).await,
        }
    }

    /// What was done to a sandbox, oldest first; empty if nothing is known (any more) (R-G17).
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn trail(&self, sandbox: &SandboxId) -> Result<Vec<Audit>, StoreError> {
        match self {
            Self::Sqlite(books) => books.trail(sandbox).await,
            Self::Redis(books) => books.trail(sandbox).await,
        }
    }
}

impl Store for KeptBooks {
    async fn step(&self, verb: Verb) -> Result<Step, StoreError> {
        Ok(self.step_timed(verb).await?.step)
    }
}
