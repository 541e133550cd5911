//! The control socket of a sandbox: asking how its first process ended.
//!
//! The protocol is one JSON object per call. Whoever answers is the engine's process, but it is fed
//! by a guest: answers are bounded and parsed as any other input.

use std::{io, path::Path};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

/// An answer is a few words; anything longer is not one.
const ANSWER_BYTES_MAX: u64 = 64 * 1024;

#[derive(serde::Deserialize)]
struct Answer {
    success: bool,
    #[serde(default)]
    result: Option<u32>,
}

/// How the first process of a sandbox ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExitStatus {
    /// With this status.
    Exited(i32),
    /// By this signal.
    Signalled(u32),
}

/// Decodes a wait status as the kernel interface defines it.
fn decode(status: u32) -> ExitStatus {
    let signal = status & 0x7f;
    if signal == 0 {
        ExitStatus::Exited(i32::try_from((status >> 8) & 0xff).unwrap_or(0))
    } else {
        ExitStatus::Signalled(signal)
    }
}

/// Waits for the end of the first process of `name`. An error if the sandbox dies without telling.
pub(super) async fn wait(socket: &Path, name: &str) -> io::Result<ExitStatus> {
    let mut stream = UnixStream::connect(socket).await?;
    let call = serde_json::json!({ "method": "containerManager.Wait", "arg": name });
    stream.write_all(format!("{call}\n").as_bytes()).await?;
    let mut answer = Vec::new();
    let mut bounded = stream.take(ANSWER_BYTES_MAX);
    loop {
        if bounded.read_buf(&mut answer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // The socket stays open after an answer, so the end of the object is the end of it.
        match serde_json::from_slice::<Answer>(&answer) {
            Ok(Answer {
                success: true,
                result: Some(status),
            }) => return Ok(decode(status)),
            Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
            Err(e) if e.is_eof() => {}
            Err(_) => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_statuses_are_decoded() {
        assert_eq!(decode(0), ExitStatus::Exited(0));
        assert_eq!(decode(3 << 8), ExitStatus::Exited(3));
        assert_eq!(decode(9), ExitStatus::Signalled(9));
        assert_eq!(decode(11 | 0x80), ExitStatus::Signalled(11));
    }
}
