//! Carries output from a pipe or terminal into the log.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use tokio::sync::watch;

use crate::{
    async_fd::AsyncPipe,
    process::output::{OutputLog, Source},
};

/// How much is read at once.
const CHUNK_BYTES: usize = 32 << 10;
/// How long after the exit of a process its pipe is still read, if something else holds it open:
/// enough for a `tee` at the end of a script, and no hang for a server left in the background.
pub const AFTER_EXIT_MAX: Duration = Duration::from_millis(250);
/// How much is still read then. What the process itself wrote fits: it is in the pipe.
const AFTER_EXIT_BYTES_MAX: usize = 1 << 20;

/// Reads until the end of the pipe, or until nothing of the process can be in it any more.
/// `exited` becomes true when the process has ended.
pub async fn pump(
    pipe: AsyncPipe,
    source: Source,
    log: Arc<OutputLog>,
    mut exited: watch::Receiver<bool>,
) {
    let mut buffer = BytesMut::new();
    loop {
        tokio::select! {
            biased;
            result = read(&pipe, &mut buffer) => match result {
                Some(bytes) => log.push(source, bytes).await,
                None => return,
            },
            () = wait_for_exit(&mut exited) => break,
        }
    }
    if !read_remainder(&pipe, source, &log, &mut buffer).await {
        tokio::spawn(discard(pipe));
    }
}

/// Returns when the process has ended.
pub async fn wait_for_exit(exited: &mut watch::Receiver<bool>) {
    // An error says that the supervisor is gone, which comes to the same.
    let _ = exited.wait_for(|exited| *exited).await;
}

/// Whether the end of the pipe was reached. Only waiting for more output is limited in time; a
/// slow reader of the log costs no output.
async fn read_remainder(
    pipe: &AsyncPipe,
    source: Source,
    log: &OutputLog,
    buffer: &mut BytesMut,
) -> bool {
    let deadline = tokio::time::Instant::now() + AFTER_EXIT_MAX;
    let mut remaining = AFTER_EXIT_BYTES_MAX;
    while remaining > 0 {
        match tokio::time::timeout_at(deadline, read(pipe, buffer)).await {
            Ok(Some(bytes)) => {
                remaining = remaining.saturating_sub(bytes.len());
                log.push(source, bytes).await;
            }
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
    false
}

async fn read(pipe: &AsyncPipe, buffer: &mut BytesMut) -> Option<Bytes> {
    buffer.resize(CHUNK_BYTES, 0);
    match pipe.read(buffer).await {
        Ok(0) | Err(_) => None,
        Ok(length) => {
            // A copy of the exact length: a chunk in the log must not hold 32 KiB for one line.
            Some(Bytes::copy_from_slice(&buffer[..length]))
        }
    }
}

/// Keeps the reading end open for what the process left behind.
async fn discard(pipe: AsyncPipe) {
    let mut buffer = BytesMut::zeroed(CHUNK_BYTES);
    while matches!(pipe.read(&mut buffer).await, Ok(length) if length > 0) {}
}
