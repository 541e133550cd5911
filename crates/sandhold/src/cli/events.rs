//! Streams of server-sent events. Pure.

use bytes::{Buf as _, BytesMut};

/// The longest line that is read, in bytes.
const LINE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Event {
    /// Its number, if it has one.
    pub(crate) id: Option<String>,
    /// What kind it is.
    pub(crate) kind: String,
    /// What it says.
    pub(crate) data: String,
}

/// A line that is longer than any is.
#[derive(Debug, thiserror::Error)]
#[error("the server sent a line of more than {LINE_BYTES_MAX} bytes")]
pub(crate) struct LineTooLong;

/// Cuts a stream of bytes into events.
#[derive(Debug, Default)]
pub(crate) struct Events {
    buffer: BytesMut,
    next: Event,
    has_data: bool,
}

impl Events {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole event; `None` until more bytes have come.
    pub(crate) fn next(&mut self) -> Result<Option<Event>, LineTooLong> {
        while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
            let line = self.buffer.split_to(end);
            self.buffer.advance(1);
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end_matches('\r');
            if line.is_empty() {
                let event = std::mem::take(&mut self.next);
                if std::mem::take(&mut self.has_data) {
                    return Ok(Some(event));
                }
                continue;
            }
            self.field(line);
        }
        if self.buffer.len() > LINE_BYTES_MAX {
            return Err(LineTooLong);
        }
        Ok(None)
    }

    fn field(&mut self, line: &str) {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "id" => self.next.id = Some(value.to_owned()),
            "event" => value.clone_into(&mut self.next.kind),
            "data" => {
                if self.has_data {
                    self.next.data.push('\n');
                }
                self.next.data.push_str(value);
                self.has_data = true;
            }
            // A comment, or what nobody knows.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_out_however_the_bytes_are_cut() {
        let stream = b": alive\n\nid: 1\r\nevent: started\ndata: {\"a\":\ndata: 1}\n\nid: 2\nevent: completed\ndata: {}\n\nid: 3\n";
        let expected = [("1", "started", "{\"a\":\n1}"), ("2", "completed", "{}")];
        for cut in 1..stream.len() {
            let mut events = Events::default();
            let mut seen = Vec::new();
            for part in stream.chunks(cut) {
                events.push(part);
                while let Some(event) = events.next().unwrap() {
                    seen.push((event.id.unwrap(), event.kind, event.data));
                }
            }
            let seen: Vec<_> = (seen.iter())
                .map(|(id, kind, data)| (id.as_str(), kind.as_str(), data.as_str()))
                .collect();
            assert_eq!(seen, expected);
        }
    }
}
