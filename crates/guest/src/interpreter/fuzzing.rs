//! What reads a kernel's bytes, for the fuzz targets. No part of the interpreter.

use super::{
    bash::{Part, Splitter},
    events::{Completion, KernelEvent, Stream},
    message,
    output::{self, Line},
    zmtp::{self, Reader, SocketKind, Writer},
};

/// Reads `bytes` as all that a kernel sends: the handshake and messages, and the output of the
/// shell. The first byte says in pieces of which size the latter arrives.
///
/// # Panics
/// When a rule of the interpreter does not hold; that is what fuzzing looks for.
pub fn kernels(bytes: &[u8]) {
    let Some((piece, bytes)) = bytes.split_first() else {
        return;
    };
    shell(usize::from(*piece) + 1, bytes);
    let handshake = [&zmtp::greeting()[..], &zmtp::ready(SocketKind::Dealer)].concat();
    for sent in [bytes.to_vec(), [&handshake, bytes].concat()] {
        // Reading from memory never waits.
        futures::executor::block_on(messages(sent));
    }
}

async fn messages(sent: Vec<u8>) {
    let peer = Reader(Box::new(std::io::Cursor::new(sent)));
    let nobody = Writer(Box::new(tokio::io::sink()));
    let Ok((mut reader, _)) = zmtp::shake_hands(peer, nobody, SocketKind::Dealer).await else {
        return;
    };
    let mut completion = Completion::default();
    while let Ok(frames) = reader.receive().await {
        let event = message::decode(frames).and_then(KernelEvent::from_message);
        if let Some(event) = event {
            completion.observe(&event);
            lines(event).iter().for_each(|line| is_one_line(line));
        }
    }
}

fn shell(piece: usize, bytes: &[u8]) {
    let mut splitter = Splitter::new("m");
    let mut parts = Vec::new();
    for chunk in bytes.chunks(piece) {
        parts.extend(splitter.push(chunk));
    }
    parts.extend(splitter.finish());
    for part in parts {
        if let Part::Text(text) = part {
            assert!(!text.is_empty());
            let lines = output::printed(Stream::Stdout, &text, "now");
            lines.iter().for_each(|line| is_one_line(line));
        }
    }
}

fn lines(event: KernelEvent) -> Vec<Line> {
    match event {
        KernelEvent::Printed { stream, text, date } => {
            output::printed(stream, &text, date.as_deref().unwrap_or_default())
        }
        KernelEvent::Showed { main, bundle } => vec![output::showed(main, bundle)],
        KernelEvent::Failed(failure) | KernelEvent::Replied(Some(failure)) => {
            vec![output::failed(&failure)]
        }
        KernelEvent::Began { count } => vec![output::began(count)],
        KernelEvent::TooLarge { .. } | KernelEvent::Idle | KernelEvent::Replied(None) => Vec::new(),
    }
}

/// Clients divide the answer at line ends, some at any that Unicode has.
fn is_one_line(line: &[u8]) {
    assert!(serde_json::from_slice::<serde_json::Value>(line).is_ok());
    let text = String::from_utf8_lossy(line);
    assert!(!text.contains(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']));
}
