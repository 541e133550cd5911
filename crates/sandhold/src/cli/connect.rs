//! Streams of Connect messages in JSON: each has five bytes before it (wire contract 2.3). Pure.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use serde_json::Value;

/// The largest message that is read, in bytes.
const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;
const PREFIX_BYTES: usize = 5;
const END_OF_STREAM: u8 = 0x02;
const COMPRESSED: u8 = 0x01;

/// Why a stream cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("the sandbox sent a message of {0} bytes, which is more than any is")]
    TooLarge(usize),
    #[error("the sandbox sent a compressed message, which was not asked for")]
    Compressed,
    #[error("the sandbox sent a message that is not JSON")]
    NotJson(#[from] serde_json::Error),
    #[error("{message}")]
    Failed {
        /// Connect's name of the cause.
        code: String,
        /// What the agent said.
        message: String,
    },
}

/// One thing out of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A message.
    Message(Value),
    /// The stream ended as it should.
    End,
}

/// Cuts a stream of bytes into frames.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    buffer: BytesMut,
}

impl Frames {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame; `None` until more bytes have come.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some((flags, length)) = self.prefix() else {
            return Ok(None);
        };
        if length > MESSAGE_BYTES_MAX {
            return Err(FrameError::TooLarge(length));
        }
        if flags & COMPRESSED != 0 {
            return Err(FrameError::Compressed);
        }
        if self.buffer.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX_BYTES);
        let message: Value = serde_json::from_slice(&self.buffer.split_to(length))?;
        if flags & END_OF_STREAM == 0 {
            return Ok(Some(Frame::Message(message)));
        }
        let error = &message["error"];
        if error.is_null() {
            return Ok(Some(Frame::End));
        }
        let text = |field: &str| error[field].as_str().unwrap_or_default().to_owned();
        Err(FrameError::Failed {
            code: text("code"),
            message: text("message"),
        })
    }

    fn prefix(&self) -> Option<(u8, usize)> {
        let prefix = self.buffer.get(..PREFIX_BYTES)?;
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
        Some((prefix[0], usize::try_from(length).unwrap_or(usize::MAX)))
    }
}

/// A request's only message, with its prefix.
pub(crate) fn enveloped(message: &Value) -> Bytes {
    let text = message.to_string();
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
    let mut frame = BytesMut::with_capacity(PREFIX_BYTES + text.len());
    frame.put_u8(0);
    frame.put_u32(length);
    frame.put_slice(text.as_bytes());
    frame.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn frames_come_out_however_the_bytes_are_cut() {
        let message = json!({"event": {"start": {"pid": 7}}});
        let mut stream = enveloped(&message).to_vec();
        stream.extend([END_OF_STREAM, 0, 0, 0, 2, b'{', b'}']);
        for cut in 1..stream.len() {
            let mut frames = Frames::default();
            let mut seen = Vec::new();
            for part in stream.chunks(cut) {
                frames.push(part);
                while let Some(frame) = frames.next().unwrap() {
                    seen.push(frame);
                }
            }
            assert_eq!(seen, [Frame::Message(message.clone()), Frame::End]);
        }
    }

    #[test]
    fn hostile_streams_are_refused() {
        let read = |bytes: &[u8]| {
            let mut frames = Frames::default();
            frames.push(bytes);
            frames.next()
        };
        assert!(matches!(
            read(&[0, 255, 255, 255, 255]),
            Err(FrameError::TooLarge(_))
        ));
        assert!(matches!(
            read(&[1, 0, 0, 0, 0]),
            Err(FrameError::Compressed)
        ));
        assert!(matches!(
            read(&[0, 0, 0, 0, 1, b'x']),
            Err(FrameError::NotJson(_))
        ));
        let failed = br#"{"error":{"code":"not_found","message":"no such program"}}"#;
        let mut bytes = vec![END_OF_STREAM, 0, 0, 0, u8::try_from(failed.len()).unwrap()];
        bytes.extend(failed);
        assert!(
            matches!(read(&bytes), Err(FrameError::Failed { code, .. }) if code == "not_found")
        );
    }
}
