//! The way of lines from an execution to its client.
//!
//! ```text
//!  execution --push--> [ at most PENDING_BYTES_MAX ] --> Answer (the body of the response)
//!      ^                                                   |
//!      +------------ cancelled: the client is gone --------+ dropped
//! ```
//!
//! Invariants: pushing never waits, because a kernel that is not listened to loses messages; what
//! a slow client cannot take in is dropped, and the client is told. The end is never dropped.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::Stream;
use tokio::{
    sync::mpsc,
    time::{Instant, Interval, MissedTickBehavior},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    events,
    output::{self, Line},
};

/// What waits for a slow client.
const PENDING_BYTES_MAX: usize = 64 << 20;
/// How often a client hears of an execution that says nothing (wire contract section 3).
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// The sending side.
#[derive(Debug)]
pub(super) struct Outbox {
    sender: mpsc::UnboundedSender<Line>,
    pending_bytes: Arc<AtomicUsize>,
    dropped_lines: AtomicU64,
    cancelled: CancellationToken,
}

/// The receiving side. When it is dropped, the execution is cancelled.
#[derive(Debug)]
pub(super) struct Answer {
    receiver: mpsc::UnboundedReceiver<Line>,
    pending_bytes: Arc<AtomicUsize>,
    keepalive: Interval,
    _cancel: DropGuard,
}

/// Both sides.
pub(super) fn outbox() -> (Outbox, Answer) {
    // Bounded by the bytes in it.
    let (sender, receiver) = mpsc::unbounded_channel();
    let pending_bytes = Arc::new(AtomicUsize::new(0));
    let cancelled = CancellationToken::new();
    let mut keepalive =
        tokio::time::interval_at(Instant::now() + KEEPALIVE_INTERVAL, KEEPALIVE_INTERVAL);
    keepalive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let answer = Answer {
        receiver,
        pending_bytes: Arc::clone(&pending_bytes),
        keepalive,
        _cancel: cancelled.clone().drop_guard(),
    };
    let outbox = Outbox {
        sender,
        pending_bytes,
        dropped_lines: AtomicU64::new(0),
        cancelled,
    };
    (outbox, answer)
}

// === impl Outbox ===

impl Outbox {
    /// Resolves when the client is gone.
    pub(super) async fn cancelled(&self) {
        self.cancelled.cancelled().await;
    }

    /// Sends a line, or drops it if too much is waiting.
    pub(super) fn push(&self, line: Line) {
        let waiting = self.pending_bytes.load(Ordering::Relaxed);
        if waiting > 0 && waiting.saturating_add(line.len()) > PENDING_BYTES_MAX {
            self.dropped_lines.fetch_add(1, Ordering::Relaxed);
        } else {
            self.send(line);
        }
    }

    /// Ends the answer.
    pub(super) fn end(self, timestamp: &str) {
        let dropped = self.dropped_lines.load(Ordering::Relaxed);
        if dropped > 0 {
            let text = format!("[cut: {dropped} lines that the client was too slow to take]\n");
            for line in output::printed(events::Stream::Stderr, &text, timestamp) {
                self.send(line);
            }
        }
        self.send(output::ended());
    }

    fn send(&self, mut line: Line) {
        line.push(b'\n');
        self.pending_bytes.fetch_add(line.len(), Ordering::Relaxed);
        // The client may be gone; then nobody misses it.
        let _ = self.sender.send(line);
    }
}

// === impl Answer ===

impl Answer {
    /// The lines, with signs of life between them.
    pub(super) fn into_stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
        futures::stream::unfold(self, |mut answer| async move {
            let line = tokio::select! {
                biased;
                line = answer.receiver.recv() => line?,
                _ = answer.keepalive.tick() => {
                    let mut line = output::keepalive();
                    line.push(b'\n');
                    return Some((Ok(Bytes::from(line)), answer));
                }
            };
            answer
                .pending_bytes
                .fetch_sub(line.len(), Ordering::Relaxed);
            Some((Ok(Bytes::from(line)), answer))
        })
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;

    use super::*;

    async fn collect(answer: Answer) -> Vec<String> {
        answer
            .into_stream()
            .map(|line| String::from_utf8(line.unwrap().to_vec()).unwrap())
            .collect()
            .await
    }

    #[tokio::test]
    async fn lines_arrive_in_order_and_the_end_is_last() {
        let (outbox, answer) = outbox();
        outbox.push(output::began(1));
        outbox.end("t");
        assert_eq!(
            collect(answer).await,
            [
                "{\"execution_count\":1,\"type\":\"number_of_executions\"}\n",
                "{\"type\":\"end_of_execution\"}\n"
            ]
        );
    }

    #[tokio::test]
    async fn a_slow_client_loses_lines_and_is_told() {
        // BC-048
        let (outbox, answer) = outbox();
        for _ in 0..3 {
            outbox.push(vec![b' '; PENDING_BYTES_MAX / 2]);
        }
        outbox.end("t");
        let lines = collect(answer).await;
        assert_eq!(lines.len(), 3);
        assert!(lines[1].contains("[cut: 2 lines"), "{}", lines[1]);
        assert!(lines[2].contains("end_of_execution"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_execution_gives_signs_of_life() {
        let (outbox, answer) = outbox();
        let mut lines = Box::pin(answer.into_stream());
        let before = Instant::now();
        let line = lines.next().await.unwrap().unwrap();
        assert_eq!(line, "{\"type\":\"keepalive\"}\n");
        assert_eq!(before.elapsed(), KEEPALIVE_INTERVAL);
        drop(outbox);
        assert!(lines.next().await.is_none());
    }

    #[tokio::test]
    async fn a_client_that_hangs_up_cancels() {
        let (outbox, answer) = outbox();
        drop(answer.into_stream());
        outbox.cancelled().await;
    }
}
