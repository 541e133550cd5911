//! The Jupyter messaging protocol: what goes into the frames and comes out of them.
//!
//! Outgoing messages are signed, as kernels demand. The signatures of incoming ones are not
//! checked: the key is known to the code that the kernel runs, so they prove nothing, and every
//! message is treated as hostile anyway.

use hmac::{Hmac, Mac as _};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::Sha256;

use super::zmtp::Frame;

const DELIMITER: &[u8] = b"<IDS|MSG>";
/// Ids longer than this are not ours.
const ID_BYTES_MAX: usize = 128;

/// Signs and numbers the messages to one kernel.
#[derive(Debug)]
pub(super) struct Session {
    key: String,
    id: String,
}

/// A message of the kernel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Incoming {
    /// Its kind, such as `stream`.
    pub(super) kind: String,
    /// The id of the request that it belongs to; empty if none.
    pub(super) parent: String,
    /// When it was sent, as the kernel says.
    pub(super) date: Option<String>,
    /// What it says.
    pub(super) content: Content,
}

/// The content of a message.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    /// As the kernel sent it.
    Held(Map<String, Value>),
    /// It was this large, and was not kept.
    TooLarge(u64),
}

#[derive(Deserialize)]
struct Header {
    msg_type: String,
    #[serde(default)]
    date: Option<String>,
}

#[derive(Deserialize, Default)]
struct ParentHeader {
    #[serde(default)]
    msg_id: Option<String>,
}

impl Session {
    /// A session with this signing key; `id` tells it from others of the same kernel.
    pub(super) fn new(key: String, id: String) -> Self {
        Self { key, id }
    }

    /// The frames of a request.
    pub(super) fn encode(&self, message_id: &str, kind: &str, content: &Value) -> Vec<Vec<u8>> {
        let header = json!({
            "msg_id": message_id,
            "msg_type": kind,
            "session": self.id,
            "username": "sandhold",
            "version": "5.3",
            "date": "",
        });
        let parts = [
            header.to_string().into_bytes(),
            b"{}".to_vec(),
            b"{}".to_vec(),
            content.to_string().into_bytes(),
        ];
        let mut frames = vec![DELIMITER.to_vec(), self.sign(&parts).into_bytes()];
        frames.extend(parts);
        frames
    }

    fn sign(&self, parts: &[Vec<u8>]) -> String {
        // A key of any length is a key; an empty one means that nothing is signed.
        if self.key.is_empty() {
            return String::new();
        }
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(self.key.as_bytes()) else {
            return String::new();
        };
        for part in parts {
            mac.update(part);
        }
        hex_of(&mac.finalize().into_bytes())
    }
}

/// Lower-case hexadecimal.
pub(super) fn hex_of(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Reads a message; `None` if it is none.
pub(super) fn decode(frames: Vec<Frame>) -> Option<Incoming> {
    let at = frames
        .iter()
        .position(|frame| matches!(frame, Frame::Held(bytes) if bytes == DELIMITER))?;
    let mut parts = frames.into_iter().skip(at + 2);
    let header: Header = serde_json::from_slice(&held(parts.next()?)?).ok()?;
    let parent: ParentHeader = serde_json::from_slice(&held(parts.next()?)?).unwrap_or_default();
    let _metadata = parts.next()?;
    let content = match parts.next()? {
        Frame::TooLarge(bytes) => Content::TooLarge(bytes),
        Frame::Held(bytes) => Content::Held(serde_json::from_slice(&bytes).ok()?),
    };
    Some(Incoming {
        kind: header.msg_type,
        parent: parent
            .msg_id
            .filter(|id| id.len() <= ID_BYTES_MAX)
            .unwrap_or_default(),
        date: header
            .date
            .filter(|date| !date.is_empty() && date.len() <= 64),
        content,
    })
}

fn held(frame: Frame) -> Option<Vec<u8>> {
    match frame {
        Frame::Held(bytes) => Some(bytes),
        Frame::TooLarge(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(parts: &[&str]) -> Vec<Frame> {
        parts
            .iter()
            .map(|part| Frame::Held(part.as_bytes().to_vec()))
            .collect()
    }

    #[test]
    fn a_request_is_signed_over_its_four_parts() {
        let session = Session::new(String::from("secret"), String::from("s"));
        let frames = session.encode("1", "execute_request", &json!({"code": "1"}));
        assert_eq!(frames[0], DELIMITER);
        assert_eq!(frames.len(), 6);
        let mut mac = Hmac::<Sha256>::new_from_slice(b"secret").unwrap();
        mac.update(&frames[2..].concat());
        assert_eq!(frames[1], hex_of(&mac.finalize().into_bytes()).into_bytes());
    }

    #[test]
    fn what_is_sent_can_be_read_back_after_any_identities() {
        let session = Session::new(String::new(), String::from("s"));
        let mut sent: Vec<Frame> = frames(&["identity", "kernel.stream"]);
        sent.extend(
            session
                .encode("1", "stream", &json!({"name": "stdout"}))
                .into_iter()
                .map(Frame::Held),
        );
        let message = decode(sent).unwrap();
        assert_eq!(message.kind, "stream");
        assert_eq!(message.parent, "");
        assert!(matches!(message.content, Content::Held(map) if map["name"] == "stdout"));
    }

    #[test]
    fn a_giant_content_keeps_its_header() {
        // BC-048
        let mut sent = frames(&[
            "<IDS|MSG>",
            "",
            r#"{"msg_type":"stream","date":"2026-01-01T00:00:00Z"}"#,
            r#"{"msg_id":"7"}"#,
            "{}",
        ]);
        sent.push(Frame::TooLarge(1 << 40));
        let message = decode(sent).unwrap();
        assert_eq!(message.parent, "7");
        assert_eq!(message.content, Content::TooLarge(1 << 40));
    }

    #[test]
    fn garbage_is_no_message() {
        for parts in [
            &[][..],
            &["<IDS|MSG>"],
            &["<IDS|MSG>", "", "{}", "{}", "{}", "{}"],
            &["<IDS|MSG>", "", r#"{"msg_type":"x"}"#, "{}", "{}"],
            &["<IDS|MSG>", "", r#"{"msg_type":"x"}"#, "{}", "{}", "[1]"],
            &["no delimiter", "", r#"{"msg_type":"x"}"#, "{}", "{}", "{}"],
        ] {
            assert_eq!(decode(frames(parts)), None, "{parts:?}");
        }
    }
}
