//! Standard input, read by a thread of its own.
//!
//! A read of a terminal cannot be taken back, so it must not hold up the end of the program: the
//! thread is left behind.

use std::io::Read as _;

use bytes::Bytes;
use tokio::sync::mpsc;

/// What is read at once, in bytes.
const CHUNK_BYTES: usize = 32 * 1024;
/// Chunks that may wait to be sent.
const CHUNKS_MAX: usize = 4;

/// The chunks of standard input; the end of the channel is the end of the input.
pub(crate) fn chunks() -> mpsc::Receiver<Bytes> {
    let (sender, receiver) = mpsc::channel(CHUNKS_MAX);
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            match input.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => {
                    let chunk = Bytes::copy_from_slice(&buffer[..length]);
                    if sender.blocking_send(chunk).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
    receiver
}
