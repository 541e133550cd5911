//! The ZeroMQ wire protocol, ZMTP 3.0 with the NULL mechanism, as far as a client of a Jupyter
//! kernel needs it: a DEALER and a SUB socket, each with one peer, that connect and never bind.
//!
//! Written here rather than taken from a library for one reason: what a kernel sends is hostile,
//! and the general libraries hold a message of any size in memory before anybody can refuse it.
//! Here a frame beyond [`FRAME_BYTES_MAX`] is read past and reported as [`Frame::TooLarge`], so
//! that the connection lives on (BC-048).
//!
//! The specification is ZeroMQ RFC 23/ZMTP.

use std::{io, path::PathBuf};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// A longer frame is read past, not held.
pub(super) const FRAME_BYTES_MAX: u64 = 64 << 20;
/// A message of more frames is not from a kernel.
const FRAMES_MAX: usize = 64;
/// A handshake needs less than this.
const HANDSHAKE_BYTES_MAX: u64 = 4096;
const GREETING_BYTES: usize = 64;
const MORE: u8 = 0b001;
const LONG: u8 = 0b010;
const COMMAND: u8 = 0b100;

/// Where a kernel listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// A UNIX socket (ZeroMQ's `ipc`).
    Unix(PathBuf),
    /// A TCP port of the loopback interface.
    Loopback(u16),
}

/// What the socket is to its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SocketKind {
    /// Requests and replies, to a ROUTER.
    Dealer,
    /// Everything that is published, from a PUB.
    Subscriber,
}

/// One part of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    /// Its content.
    Held(Vec<u8>),
    /// It had this many bytes, which were not kept.
    TooLarge(u64),
}

/// Why a connection is of no use any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum ZmtpError {
    /// Nobody listens there, or not yet.
    #[error("connecting to {endpoint:?}")]
    Connect {
        endpoint: Endpoint,
        source: io::Error,
    },
    /// The peer is gone.
    #[error("the connection to the kernel")]
    Io(#[from] io::Error),
    /// What answers does not speak this protocol.
    #[error("the peer does not speak ZMTP 3: {0}")]
    Protocol(&'static str),
}

/// The receiving half.
pub(super) struct Reader(pub(super) Box<dyn AsyncRead + Send + Unpin>);
/// The sending half.
pub(super) struct Writer(pub(super) Box<dyn AsyncWrite + Send + Unpin>);

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("zmtp::Reader")
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("zmtp::Writer")
    }
}

/// Connects and shakes hands. A subscriber is subscribed to everything.
pub(super) async fn connect(
    endpoint: &Endpoint,
    kind: SocketKind,
) -> Result<(Reader, Writer), ZmtpError> {
    let failed = |source| ZmtpError::Connect {
        endpoint: endpoint.clone(),
        source,
    };
    let (reader, writer): (Reader, Writer) = match endpoint {
        Endpoint::Unix(path) => {
            let stream = tokio::net::UnixStream::connect(path)
                .await
                .map_err(failed)?;
            let (reader, writer) = stream.into_split();
            (Reader(Box::new(reader)), Writer(Box::new(writer)))
        }
        Endpoint::Loopback(port) => {
            let stream = tokio::net::TcpStream::connect(("127.0.0.1", *port))
                .await
                .map_err(failed)?;
            stream.set_nodelay(true)?;
            let (reader, writer) = stream.into_split();
            (Reader(Box::new(reader)), Writer(Box::new(writer)))
        }
    };
    shake_hands(reader, writer, kind).await
}

/// What both sides of a new connection say first.
pub(super) async fn shake_hands(
    mut reader: Reader,
    mut writer: Writer,
    kind: SocketKind,
) -> Result<(Reader, Writer), ZmtpError> {
    writer.0.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING_BYTES];
    reader.0.read_exact(&mut theirs).await?;
    check_greeting(&theirs)?;
    writer.0.write_all(&ready(kind)).await?;
    let (flags, length) = reader.header().await?;
    if flags & COMMAND == 0 || length > HANDSHAKE_BYTES_MAX {
        return Err(ZmtpError::Protocol("no READY"));
    }
    let command = reader.body(length).await?;
    if !command.starts_with(b"\x05READY") {
        return Err(ZmtpError::Protocol("refused"));
    }
    if kind == SocketKind::Subscriber {
        // In version 3.0 a subscription is a message: one, and the prefix of the topic.
        writer.send(&[b"\x01"]).await?;
    }
    Ok((reader, writer))
}

/// Version 3.0, mechanism NULL, as a client.
pub(super) fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn check_greeting(greeting: &[u8; GREETING_BYTES]) -> Result<(), ZmtpError> {
    if greeting[0] != 0xff || greeting[9] & 1 == 0 {
        return Err(ZmtpError::Protocol("no signature"));
    }
    if greeting[10] < 3 {
        return Err(ZmtpError::Protocol("an older version"));
    }
    if !greeting[12..].starts_with(b"NULL\0") {
        return Err(ZmtpError::Protocol("another mechanism"));
    }
    Ok(())
}

pub(super) fn ready(kind: SocketKind) -> Vec<u8> {
    let name: &[u8] = match kind {
        SocketKind::Dealer => b"DEALER",
        SocketKind::Subscriber => b"SUB",
    };
    let mut body = b"\x05READY".to_vec();
    for (property, value) in [(&b"Socket-Type"[..], name), (b"Identity", b"")] {
        body.push(u8::try_from(property.len()).unwrap_or(u8::MAX));
        body.extend_from_slice(property);
        body.extend_from_slice(&u32::try_from(value.len()).unwrap_or(0).to_be_bytes());
        body.extend_from_slice(value);
    }
    let mut frame = Vec::with_capacity(body.len() + 2);
    push_frame(&mut frame, COMMAND, &body);
    frame
}

fn push_frame(buffer: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(short) => buffer.extend_from_slice(&[flags, short]),
        Err(_) => {
            buffer.push(flags | LONG);
            buffer.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    buffer.extend_from_slice(body);
}

// === impl Writer ===

impl Writer {
    /// Sends the frames as one message.
    pub(super) async fn send(&mut self, frames: &[impl AsRef<[u8]>]) -> Result<(), ZmtpError> {
        let mut buffer = Vec::new();
        for (number, frame) in frames.iter().enumerate() {
            let flags = if number + 1 < frames.len() { MORE } else { 0 };
            push_frame(&mut buffer, flags, frame.as_ref());
        }
        self.0.write_all(&buffer).await?;
        self.0.flush().await?;
        Ok(())
    }
}

// === impl Reader ===

impl Reader {
    /// The next message. Not safe to cancel: half a message may have been taken.
    pub(super) async fn receive(&mut self) -> Result<Vec<Frame>, ZmtpError> {
        let mut frames = Vec::new();
        loop {
            let (flags, length) = self.header().await?;
            let frame = self.frame(length).await?;
            if flags & COMMAND != 0 {
                continue;
            }
            if frames.len() == FRAMES_MAX {
                return Err(ZmtpError::Protocol("a message of too many frames"));
            }
            frames.push(frame);
            if flags & MORE == 0 {
                return Ok(frames);
            }
        }
    }

    async fn header(&mut self) -> Result<(u8, u64), ZmtpError> {
        let flags = self.0.read_u8().await?;
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(ZmtpError::Protocol("an unknown flag"));
        }
        let length = if flags & LONG == 0 {
            u64::from(self.0.read_u8().await?)
        } else {
            self.0.read_u64().await?
        };
        Ok((flags, length))
    }

    async fn frame(&mut self, length: u64) -> Result<Frame, ZmtpError> {
        if length <= FRAME_BYTES_MAX {
            return Ok(Frame::Held(self.body(length).await?));
        }
        let mut rest = (&mut self.0).take(length);
        let skipped = tokio::io::copy(&mut rest, &mut tokio::io::sink()).await?;
        if skipped < length {
            return Err(ZmtpError::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(Frame::TooLarge(length))
    }

    /// Reads what was announced; memory is taken as it arrives, not as it is promised.
    async fn body(&mut self, length: u64) -> Result<Vec<u8>, ZmtpError> {
        let mut body = Vec::new();
        let read = (&mut self.0).take(length).read_to_end(&mut body).await?;
        if u64::try_from(read).is_ok_and(|read| read == length) {
            Ok(body)
        } else {
            Err(ZmtpError::Io(io::ErrorKind::UnexpectedEof.into()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The greeting and READY of libzmq 4.3, as seen on the wire.
    fn peer_handshake() -> Vec<u8> {
        let mut bytes = greeting().to_vec();
        bytes[11] = 1;
        bytes[32] = 0;
        let body = b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0";
        push_frame(&mut bytes, COMMAND, body);
        bytes
    }

    async fn connected(sent_by_peer: &[u8]) -> Result<(Reader, Writer), ZmtpError> {
        let bytes = [peer_handshake(), sent_by_peer.to_vec()].concat();
        let reader = Reader(Box::new(io::Cursor::new(bytes)));
        shake_hands(
            reader,
            Writer(Box::new(tokio::io::sink())),
            SocketKind::Dealer,
        )
        .await
    }

    #[tokio::test]
    async fn a_message_is_its_frames() {
        let long = vec![7; 300];
        let mut sent = b"\x01\x02hi".to_vec();
        push_frame(&mut sent, 0, &long);
        let (mut reader, _) = connected(&sent).await.unwrap();
        let frames = reader.receive().await.unwrap();
        assert_eq!(frames, [Frame::Held(b"hi".to_vec()), Frame::Held(long)]);
    }

    #[tokio::test]
    async fn commands_between_messages_are_passed_over() {
        let (mut reader, _) = connected(b"\x04\x05\x04PING\x00\x01a").await.unwrap();
        assert_eq!(
            reader.receive().await.unwrap(),
            [Frame::Held(b"a".to_vec())]
        );
    }

    #[tokio::test]
    async fn an_oversized_frame_is_read_past_and_the_next_message_arrives() {
        // BC-048
        let size = FRAME_BYTES_MAX + 1;
        let mut sent = vec![LONG];
        sent.extend_from_slice(&size.to_be_bytes());
        sent.resize(sent.len() + usize::try_from(size).unwrap(), b'z');
        sent.extend_from_slice(b"\x00\x04next");
        let (mut reader, _) = connected(&sent).await.unwrap();
        assert_eq!(reader.receive().await.unwrap(), [Frame::TooLarge(size)]);
        assert_eq!(
            reader.receive().await.unwrap(),
            [Frame::Held(b"next".to_vec())]
        );
    }

    #[tokio::test]
    async fn a_frame_that_lies_about_its_size_ends_the_connection() {
        let mut sent = vec![LONG];
        sent.extend_from_slice(&FRAME_BYTES_MAX.to_be_bytes());
        sent.extend_from_slice(b"short");
        let (mut reader, _) = connected(&sent).await.unwrap();
        assert!(matches!(reader.receive().await, Err(ZmtpError::Io(_))));
    }

    #[tokio::test]
    async fn an_endless_message_is_refused() {
        let sent = [1, 0].repeat(FRAMES_MAX + 1);
        let (mut reader, _) = connected(&sent).await.unwrap();
        assert!(matches!(
            reader.receive().await,
            Err(ZmtpError::Protocol(_))
        ));
    }

    #[tokio::test]
    async fn another_protocol_is_refused() {
        let http = Reader(Box::new(io::Cursor::new(vec![b'H'; 200])));
        let writer = Writer(Box::new(tokio::io::sink()));
        let refused = shake_hands(http, writer, SocketKind::Subscriber).await;
        assert!(matches!(refused, Err(ZmtpError::Protocol("no signature"))));
    }
}
