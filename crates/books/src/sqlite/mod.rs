//! The books of one process, in a SQLite file of its own.
//!
//! ```text
//!   callers ──▶ bounded queue ──▶ one thread:  take all that wait
//!                                              step, step, step …   (the pure `Books` in memory)
//!                                              one transaction with all they changed, synced
//!                                              answer them all
//! ```
//!
//! The pure [`Books`] are the working state and decide everything; the file is where they are when
//! the process starts again. Many callers share one commit, so a disk that syncs slowly makes answers
//! late but not few.
//!
//! Invariants:
//! - Nobody is answered before what the answer rests on is on the disk, the steps before it included.
//! - A commit that fails answers nobody; the memory is then read from the file again, so that it
//!   never knows more than the file.
//! - One process has the file, by SQLite's own exclusive lock.

mod file;
pub(crate) mod owned;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
};

use sandhold_governor::{
    Store, StoreError,
    books::{Audit, Books, Step, Verb},
    rules::Rules,
};
use sandhold_types::{Clock, SandboxId};
use tokio::sync::{mpsc, oneshot};

use self::file::{BooksFile, Opened};
use crate::Timed;

/// How many steps may wait for the thread.
const WAITING_MAX: usize = 4_096;

/// How many steps share a commit at most; it bounds how long the first of them waits.
const COMMIT_STEPS_MAX: usize = 512;

/// Why the books' file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SqliteBooksError {
    /// It could not be opened, or another process has it.
    #[error("the books at {} cannot be opened", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: rusqlite::Error,
    },
    /// It was written by a later version of this program.
    #[error("the books have version {found}; this program knows versions up to {known}")]
    Newer {
        /// The version in the file.
        found: i64,
        /// The newest version this program knows.
        known: i64,
    },
    /// A statement failed.
    #[error("the books failed while {step}")]
    Query {
        /// What was being done.
        step: &'static str,
        /// The cause.
        #[source]
        source: rusqlite::Error,
    },
    /// A stored line does not read as what it was written as.
    #[error("the books hold an unreadable {what}")]
    Corrupt {
        /// Which.
        what: &'static str,
    },
    /// The mark beside the file could not be read or written.
    #[error("the mark of the books at {} cannot be used", path.display())]
    Mark {
        /// The mark.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The thread could not be started.
    #[error("no thread for the books")]
    Thread(#[source] std::io::Error),
}

enum Job {
    Step(Box<Verb>, oneshot::Sender<Result<Timed, StoreError>>),
    Trail(SandboxId, oneshot::Sender<Result<Vec<Audit>, StoreError>>),
}

/// The books of one process.
#[derive(Debug)]
pub struct SqliteBooks {
    /// `None` only while it is dropped.
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl SqliteBooks {
    /// Opens the books at `path`, or begins them. Blocks while it does; meant for the start of the
    /// program. Books that were put back from a backup settle first.
    ///
    /// # Errors
    /// The file cannot be used, or another process has it.
    pub fn open(
        path: &Path,
        rules: Rules,
        global_cap: Option<u32>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, SqliteBooksError> {
        let now = clock.now();
        let Opened {
            file,
            kept,
            lost_writes,
        } = BooksFile::open(path, now)?;
        let mut books = Books::restore(rules.clone(), global_cap, kept);
        if lost_writes {
            tracing::warn!(path = %path.display(), "the books are older than their mark; settling");
            books.begin_recovery(now);
        }
        let mut keeper = Keeper {
            rules,
            global_cap,
            clock,
            file,
            books: Some(books),
        };
        keeper.begin()?;
        let (jobs, queue) = mpsc::channel(WAITING_MAX);
        let thread = std::thread::Builder::new()
            .name("books".into())
            .spawn(move || keeper.run(queue))
            .map_err(SqliteBooksError::Thread)?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }

    /// Carries out one verb and says when that was.
    ///
    /// # Errors
    /// As [`Store::step`].
    pub async fn step_timed(&self, verb: Verb) -> Result<Timed, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.send(Job::Step(Box::new(verb), answer))?;
        answered.await.map_err(|_| StoreError::NoAnswer)?
    }

    /// What was done to a sandbox, oldest first (R-G17).
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn trail(&self, sandbox: &SandboxId) -> Result<Vec<Audit>, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.send(Job::Trail(sandbox.clone(), answer))?;
        answered.await.map_err(|_| StoreError::NoAnswer)?
    }

    /// A full queue refuses at once: certainly not carried out.
    fn send(&self, job: Job) -> Result<(), StoreError> {
        let jobs = self.jobs.as_ref().ok_or(StoreError::Unavailable)?;
        jobs.try_send(job).map_err(|_| StoreError::Unavailable)
    }
}

impl Drop for SqliteBooks {
    /// Waits until the file is closed: whoever opens it next finds it whole and free.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the books panicked");
        }
    }
}

impl Store for SqliteBooks {
    async fn step(&self, verb: Verb) -> Result<Step, StoreError> {
        Ok(self.step_timed(verb).await?.step)
    }
}

type Answered = Vec<(oneshot::Sender<Result<Timed, StoreError>>, Timed)>;

/// The thread that has the books.
#[derive(Debug)]
struct Keeper {
    rules: Rules,
    global_cap: Option<u32>,
    clock: Arc<dyn Clock>,
    file: BooksFile,
    /// `None` after a commit that failed, until the file could be read again.
    books: Option<Books>,
}

impl Keeper {
    /// Writes down a recovery that begins, before anybody is answered.
    fn begin(&mut self) -> Result<(), SqliteBooksError> {
        self.commit(&[])
    }

    fn run(mut self, mut queue: mpsc::Receiver<Job>) {
        let mut jobs = Vec::with_capacity(COMMIT_STEPS_MAX);
        loop {
            if queue.blocking_recv_many(&mut jobs, COMMIT_STEPS_MAX) == 0 {
                return;
            }
            self.serve(jobs.drain(..));
        }
    }

    fn serve(&mut self, jobs: impl Iterator<Item = Job>) {
        let mut answered: Answered = Vec::new();
        let mut audit = Vec::new();
        if self.books.is_none() {
            self.read_again();
        }
        for job in jobs {
            match job {
                Job::Trail(sandbox, answer) => {
                    let trail = self.trail(&sandbox).map_err(|error| {
                        tracing::error!(%error, "an audit trail could not be read");
                        StoreError::NoAnswer
                    });
                    // A caller that went away no longer wants to know; so below.
                    let _ = answer.send(trail);
                }
                Job::Step(verb, answer) => match &mut self.books {
                    Some(books) => {
                        let at = self.clock.now();
                        let step = books.step(*verb, at);
                        audit.extend(step.audit.iter().cloned());
                        answered.push((answer, Timed { step, at }));
                    }
                    None => {
                        let _ = answer.send(Err(StoreError::Unavailable));
                    }
                },
            }
        }
        let committed = self.commit(&audit);
        if let Err(error) = &committed {
            tracing::error!(%error, "a commit of the books failed; reading them again");
            self.read_again();
        }
        for (answer, timed) in answered {
            let _ = answer.send(match committed {
                Ok(()) => Ok(timed),
                Err(_) => Err(StoreError::NoAnswer),
            });
        }
    }

    fn trail(&self, sandbox: &SandboxId) -> Result<Vec<Audit>, SqliteBooksError> {
        let mut records = self.books.iter().flat_map(Books::records);
        let living = records.find(|record| record.sandbox.as_ref() == Some(sandbox));
        self.file.trail(sandbox, living.map(|record| &record.slot))
    }

    fn commit(&mut self, audit: &[Audit]) -> Result<(), SqliteBooksError> {
        let Some(books) = &mut self.books else {
            return Ok(());
        };
        let now = self.clock.now();
        let changes = books.changes();
        if changes.is_some() || !audit.is_empty() {
            self.file.write(changes.as_ref(), audit, now)?;
            books.written();
        }
        Ok(())
    }

    /// The memory must never know more than the file.
    fn read_again(&mut self) {
        self.books = match self.file.read(self.clock.now()) {
            Ok(kept) => Some(Books::restore(self.rules.clone(), self.global_cap, kept)),
            Err(error) => {
                tracing::error!(%error, "the books cannot be read");
                None
            }
        };
    }
}
