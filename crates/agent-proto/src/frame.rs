//! The envelope of Connect streams: one byte of flags, four of length, the payload.
//!
//! Pure functions. The reader never allocates for a length it has not received, so a frame that
//! lies about its size costs nothing but an error.

/// Set on the last frame of a stream; its payload is `{}` or `{"error":{…}}`.
pub const FLAG_END_STREAM: u8 = 0x02;
/// Set on a compressed frame. Nobody here sends or accepts one.
pub const FLAG_COMPRESSED: u8 = 0x01;
/// Flags and length.
pub const HEADER_BYTES: usize = 5;

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The flags, [`FLAG_END_STREAM`] among them.
    pub flags: u8,
    /// The message, or the end-of-stream JSON.
    pub payload: Vec<u8>,
}

/// Why bytes are no frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The header announces more than the limit.
    #[error("a frame of {announced} bytes is larger than the limit of {limit}")]
    TooLarge {
        /// What the header says.
        announced: usize,
        /// What is allowed.
        limit: usize,
    },
    /// The frame is compressed.
    #[error("compressed frames are not accepted")]
    Compressed,
    /// The payload is longer than four bytes can say.
    #[error("a payload of {0} bytes does not fit a frame")]
    Unencodable(usize),
}

/// Puts a payload into an envelope.
///
/// # Errors
/// The payload is 4 GiB or larger.
pub fn encode(flags: u8, payload: &[u8]) -> Result<Vec<u8>, FrameError> {
    let length =
        u32::try_from(payload.len()).map_err(|_| FrameError::Unencodable(payload.len()))?;
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    bytes.push(flags);
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

/// Takes frames out of a stream of bytes that comes in any pieces.
#[derive(Debug)]
pub struct FrameReader {
    buffer: Vec<u8>,
    payload_bytes_max: usize,
}

impl FrameReader {
    /// A reader that refuses frames with a larger payload.
    #[must_use]
    pub fn new(payload_bytes_max: usize) -> Self {
        Self {
            buffer: Vec::new(),
            payload_bytes_max,
        }
    }

    /// Adds what arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame, if there is one.
    ///
    /// # Errors
    /// The next frame is compressed or too large; the stream cannot be read further.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let [flags, a, b, c, d, ..] = self.buffer[..] else {
            return Ok(None);
        };
        if flags & FLAG_COMPRESSED != 0 {
            return Err(FrameError::Compressed);
        }
        let announced = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        if announced > self.payload_bytes_max {
            return Err(FrameError::TooLarge {
                announced,
                limit: self.payload_bytes_max,
            });
        }
        if self.buffer.len() < HEADER_BYTES + announced {
            return Ok(None);
        }
        let payload = self.buffer[HEADER_BYTES..HEADER_BYTES + announced].to_vec();
        self.buffer.drain(..HEADER_BYTES + announced);
        Ok(Some(Frame { flags, payload }))
    }

    /// Whether bytes of an unfinished frame are left; at the end of a stream that is an error of
    /// the sender.
    #[must_use]
    pub fn has_partial_frame(&self) -> bool {
        !self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_survive_any_fragmentation(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
            piece in 1usize..17,
        ) {
            let mut bytes = Vec::new();
            for payload in &payloads {
                bytes.extend(encode(0, payload).unwrap());
            }
            let mut reader = FrameReader::new(200);
            let mut read = Vec::new();
            for chunk in bytes.chunks(piece) {
                reader.push(chunk);
                while let Some(frame) = reader.next_frame().unwrap() {
                    read.push(frame.payload);
                }
            }
            prop_assert_eq!(read, payloads);
            prop_assert!(!reader.has_partial_frame());
        }

        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut reader = FrameReader::new(64);
            reader.push(&bytes);
            while let Ok(Some(frame)) = reader.next_frame() {
                prop_assert!(frame.payload.len() <= 64);
            }
        }
    }

    #[test]
    fn a_lie_about_the_size_is_an_error_at_once() {
        let mut reader = FrameReader::new(1 << 20);
        reader.push(&[0, 0xff, 0xff, 0xff, 0xff]);
        assert!(matches!(
            reader.next_frame(),
            Err(FrameError::TooLarge { .. })
        ));
    }
}
