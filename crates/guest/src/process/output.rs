//! The bounded log between a process and those who read its output.
//!
//! ```text
//!   pump ── push ──>  [ chunk | chunk | chunk ]  <── cursor of reader A
//!            waits          first … next         <── cursor of reader B
//! ```
//!
//! Rules:
//! - With readers, a chunk is kept until all of them have taken it. If that would be more than
//!   [`WINDOW_BYTES`], the pump waits, and with it the process, as on a full pipe.
//! - Without readers nothing waits: the newest [`BACKLOG_BYTES`] are kept, older ones are lost.
//! - If a reader has taken nothing for [`STALL_MAX`] while the pump waits for it and another
//!   reader has taken everything, the first one is cut off.
//! - A reader of a running process sees what comes from now on; a reader of an ended process
//!   sees what nobody has taken, then the end.
//!
//! Only this module touches the cursors.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::Notify;

use super::exit::Ending;

/// Output that is waiting for a reader, per process.
pub const WINDOW_BYTES: usize = 256 << 10;
/// Output that is kept while nobody reads.
pub const BACKLOG_BYTES: usize = 64 << 10;
/// How long one reader may hold up another.
pub const STALL_MAX: Duration = Duration::from_secs(10);

/// Where output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// A terminal, where both are one.
    Pty,
}

/// What a reader gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Update {
    /// Some output.
    Data(Source, Bytes),
    /// The process has ended; nothing follows.
    End(Ending),
    /// The reader held up others for too long; nothing follows.
    CutOff,
}

/// The log of one process.
#[derive(Debug, Default)]
pub struct OutputLog {
    inner: Mutex<Inner>,
    /// Something was added, or a reader was cut off.
    added: Notify,
    /// Something was taken, or a reader went away.
    taken: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    chunks: VecDeque<(Source, Bytes)>,
    /// The number of the first chunk that is kept.
    first: u64,
    bytes: usize,
    /// The number of the next chunk of each reader.
    cursors: BTreeMap<u64, u64>,
    next_reader: u64,
    ending: Option<Ending>,
}

impl OutputLog {
    /// Adds output, waiting for readers where the window is full.
    pub async fn push(&self, source: Source, bytes: Bytes) {
        loop {
            let taken = self.taken.notified();
            if self.lock().try_push(source, &bytes) {
                break;
            }
            if tokio::time::timeout(STALL_MAX, taken).await.is_err() && self.lock().cut_laggards() {
                self.added.notify_waiters();
            }
        }
        self.added.notify_waiters();
    }

    /// Ends the log. Whatever is pushed later is ignored.
    pub fn end(&self, ending: Ending) {
        self.lock().ending.get_or_insert(ending);
        self.added.notify_waiters();
    }

    /// The ending, once there is one.
    pub fn ending(&self) -> Option<Ending> {
        self.lock().ending.clone()
    }

    /// Whether anybody reads.
    pub fn has_readers(&self) -> bool {
        !self.lock().cursors.is_empty()
    }

    /// A new reader, from the present moment on.
    pub fn subscribe(self: &Arc<Self>) -> Reader {
        let mut inner = self.lock();
        let id = inner.next_reader;
        inner.next_reader += 1;
        let cursor = if inner.ending.is_some() {
            inner.first
        } else {
            inner.end()
        };
        inner.cursors.insert(id, cursor);
        inner.trim();
        Reader {
            log: Arc::clone(self),
            id,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One reader's place in the log.
#[derive(Debug)]
pub struct Reader {
    log: Arc<OutputLog>,
    id: u64,
}

impl Reader {
    /// The next update. After [`Update::End`] and [`Update::CutOff`] there is none.
    pub async fn next(&mut self) -> Update {
        loop {
            let added = self.log.added.notified();
            tokio::pin!(added);
            added.as_mut().enable();
            let update = self.log.lock().take(self.id);
            if let Some(update) = update {
                self.log.taken.notify_waiters();
                return update;
            }
            added.await;
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut inner = self.log.lock();
        inner.cursors.remove(&self.id);
        inner.trim();
        drop(inner);
        self.log.taken.notify_waiters();
    }
}

// === impl Inner ===

impl Inner {
    fn end(&self) -> u64 {
        self.first + self.chunks.len() as u64
    }

    fn try_push(&mut self, source: Source, bytes: &Bytes) -> bool {
        if self.ending.is_some() {
            return true;
        }
        let full = self.bytes > 0 && self.bytes + bytes.len() > WINDOW_BYTES;
        if full && !self.cursors.is_empty() {
            return false;
        }
        self.bytes += bytes.len();
        self.chunks.push_back((source, bytes.clone()));
        self.trim();
        true
    }

    fn take(&mut self, id: u64) -> Option<Update> {
        let Some(cursor) = self.cursors.get_mut(&id) else {
            return Some(Update::CutOff);
        };
        let index = usize::try_from(cursor.saturating_sub(self.first)).unwrap_or(usize::MAX);
        if let Some((source, bytes)) = self.chunks.get(index) {
            let update = Update::Data(*source, bytes.clone());
            *cursor += 1;
            self.trim();
            return Some(update);
        }
        self.ending.clone().map(Update::End)
    }

    /// Drops what nobody needs: what every reader has taken or, without readers, what is beyond
    /// the backlog.
    fn trim(&mut self) {
        let keep_from = self.cursors.values().min().copied();
        while let Some((_, bytes)) = self.chunks.front() {
            let droppable = match keep_from {
                Some(cursor) => self.first < cursor,
                None => self.bytes > BACKLOG_BYTES,
            };
            if !droppable {
                break;
            }
            self.bytes -= bytes.len();
            self.first += 1;
            self.chunks.pop_front();
        }
    }

    /// Cuts off the readers that stand still, if another one has taken everything. Says whether
    /// anybody was.
    fn cut_laggards(&mut self) -> bool {
        let (first, end) = (self.first, self.end());
        if !self.cursors.values().any(|cursor| *cursor == end) {
            return false;
        }
        let before = self.cursors.len();
        self.cursors.retain(|_, cursor| *cursor > first);
        self.trim();
        self.cursors.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::process::ExitStatusExt as _, process::ExitStatus};

    fn ending() -> Ending {
        Ending::of(ExitStatus::from_raw(0), false)
    }

    fn chunk(length: usize) -> Bytes {
        Bytes::from(vec![b'x'; length])
    }

    #[tokio::test]
    async fn the_end_comes_after_all_output() {
        let log = Arc::new(OutputLog::default());
        let mut reader = log.subscribe();
        log.push(Source::Stdout, chunk(3)).await;
        log.push(Source::Stderr, chunk(2)).await;
        log.end(ending());
        assert_eq!(reader.next().await, Update::Data(Source::Stdout, chunk(3)));
        assert_eq!(reader.next().await, Update::Data(Source::Stderr, chunk(2)));
        assert_eq!(reader.next().await, Update::End(ending()));
    }

    #[tokio::test]
    async fn a_late_reader_of_an_ended_process_gets_what_nobody_took() {
        // BC-009
        let log = Arc::new(OutputLog::default());
        let mut first = log.subscribe();
        log.push(Source::Stdout, chunk(1)).await;
        first.next().await;
        drop(first);
        log.push(Source::Stdout, chunk(2)).await;
        log.end(ending());
        let mut late = log.subscribe();
        assert_eq!(late.next().await, Update::Data(Source::Stdout, chunk(2)));
        assert_eq!(late.next().await, Update::End(ending()));
    }

    #[tokio::test]
    async fn without_readers_the_backlog_is_bounded_and_nobody_waits() {
        let log = Arc::new(OutputLog::default());
        for _ in 0..100 {
            log.push(Source::Stdout, chunk(WINDOW_BYTES / 8)).await;
        }
        assert!(log.lock().bytes <= BACKLOG_BYTES);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stands_still_blocks_the_process() {
        // BC-013: memory is bounded, and a lone reader is never cut off.
        let log = Arc::new(OutputLog::default());
        let mut reader = log.subscribe();
        log.push(Source::Stdout, chunk(WINDOW_BYTES)).await;
        let blocked = tokio::time::timeout(STALL_MAX * 5, log.push(Source::Stdout, chunk(1))).await;
        assert!(blocked.is_err());
        assert!(matches!(reader.next().await, Update::Data(..)));
        log.push(Source::Stdout, chunk(1)).await;
        assert!(log.lock().bytes <= WINDOW_BYTES);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stands_still_does_not_block_another_for_ever() {
        let log = Arc::new(OutputLog::default());
        let mut stuck = log.subscribe();
        let mut live = log.subscribe();
        log.push(Source::Stdout, chunk(WINDOW_BYTES)).await;
        assert!(matches!(live.next().await, Update::Data(..)));
        log.push(Source::Stdout, chunk(5)).await;
        assert_eq!(live.next().await, Update::Data(Source::Stdout, chunk(5)));
        assert_eq!(stuck.next().await, Update::CutOff);
    }
}
