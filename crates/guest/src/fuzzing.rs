//! What reads bytes that others chose, with what must hold of it, for the fuzz targets and their
//! corpus. No part of the agent.
//!
//! Nothing here touches a file, a process or the network.

use std::path::{Component, Path};

use axum::{
    body::Body,
    extract::{FromRequest as _, Multipart, Request},
};
use buffa::Message;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use sandhold_agent_proto::{
    filesystem,
    frame::{FrameReader, HEADER_BYTES},
    process,
};
use sandhold_types::Token;
use serde::de::DeserializeOwned;

pub use crate::interpreter::fuzzing::kernels;
use crate::{
    account,
    files::{
        headers::{self, RangeAnswer},
        metadata,
        signature::{self, FileOperation, FileQuery, SignatureError},
        upload,
    },
    paths, rpc, sudo,
};

/// A frame of the tests may be this long.
const FRAME_BYTES_MAX: usize = 1 << 16;
const HOME: &str = "/home/user";
const NOW_S: u64 = 1_800_000_000;

/// Reads `bytes` as a path of the files and filesystem routes.
///
/// # Panics
/// When a rule of the agent does not hold; that is what fuzzing looks for. So do the others.
pub fn paths(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        path(text);
    }
}

fn path(text: &str) {
    let Ok(path) = paths::resolve(text, Path::new(HOME), Path::new("/srv")) else {
        return;
    };
    assert!(path.as_os_str().len() < paths::PATH_BYTES_MAX);
    let mut components = path.components();
    assert_eq!(components.next(), Some(Component::RootDir), "{path:?}");
    assert!(components.all(|part| matches!(part, Component::Normal(_))));
    let shown = path.to_string_lossy();
    assert!(!shown.contains('\0'));
    let again = paths::resolve(&shown, Path::new(HOME), Path::new("/"));
    assert_eq!(again.as_deref(), Ok(path.as_path()), "reading it again");
    assert!(!paths::base_name(&path).is_empty());
}

/// Reads `bytes` as the query of `/files`. Without the token nobody makes a signature that opens,
/// and one that opens does so for one path, operation, user and time.
pub fn signatures(bytes: &[u8]) {
    let Ok(Ok(mut query)) = std::str::from_utf8(bytes).map(FileQuery::parse) else {
        return;
    };
    let (token, other) = (secret("the agent's own"), secret("another's"));
    for operation in [FileOperation::Read, FileOperation::Write] {
        assert!(signature::check(&query, operation, &token, NOW_S).is_err());
    }
    let expiration = match query.expiration.as_deref() {
        None | Some("") => None,
        Some(text) => match text.parse::<u64>() {
            Ok(seconds) => Some(seconds),
            Err(_) => return,
        },
    };
    let path = query.path.clone().unwrap_or_default();
    let user = query.username.clone().unwrap_or_default();
    let made = signature::sign(&path, FileOperation::Read, &user, &token, expiration);
    query.signature = Some(made);
    let check = |operation, token| signature::check(&query, operation, token, NOW_S);
    let expected = match expiration {
        Some(end) if end < NOW_S => Err(SignatureError::Expired),
        _ => Ok(()),
    };
    assert_eq!(check(FileOperation::Read, &token), expected);
    for (operation, token) in [
        (FileOperation::Write, &token),
        (FileOperation::Read, &other),
    ] {
        assert_eq!(check(operation, token), Err(SignatureError::Wrong));
    }
}

fn secret(text: &str) -> Token {
    Token::new(String::from(text))
}

/// Reads `bytes` as headers, one to a line, and the first line as the name of a file too.
pub fn headers(bytes: &[u8]) {
    let first = bytes.split(|byte| *byte == b'\n').next();
    let name = String::from_utf8_lossy(first.unwrap_or_default());
    let shown = headers::content_disposition(&name);
    assert!(shown.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
    let Some(map) = header_map(bytes) else { return };
    if let Ok(kept) = metadata::from_headers(&map) {
        for (key, value) in kept {
            assert!(!key.is_empty() && key.to_ascii_lowercase() == key);
            assert!(value.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
        }
    }
    let _ = rpc::basic_user(map.get(header::AUTHORIZATION).map_or(b"", |v| v.as_bytes()));
    let interval = rpc::keepalive_interval(&map);
    assert!((rpc::KEEPALIVE_MIN..=rpc::KEEPALIVE_DEFAULT).contains(&interval));
    let text = |name| map.get(name).and_then(|value| value.to_str().ok());
    let _ = headers::choose_encoding(text(header::ACCEPT_ENCODING));
    if let Some(tags) = text(header::IF_NONE_MATCH) {
        let _ = headers::names_tag(tags, "\"1-2-3-4\"");
    }
    for size in [0, 1, 10, 1 << 40, u64::MAX] {
        if let RangeAnswer::Part(range) = headers::read_range(text(header::RANGE), size) {
            assert!(range.length > 0 && range.start < size);
            assert!(range.length <= size - range.start, "{range:?} of {size}");
        }
    }
}

fn header_map(bytes: &[u8]) -> Option<HeaderMap> {
    let mut map = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?;
        map.try_append(name, value).ok()?;
    }
    Some(map)
}

/// Reads `bytes` as the frames of a stream, and each as every message that a client can send, in
/// both encodings. The first byte says in pieces of which size they arrive.
pub fn messages(bytes: &[u8]) {
    let Some((piece, bytes)) = bytes.split_first() else {
        return;
    };
    let mut reader = FrameReader::new(FRAME_BYTES_MAX);
    let mut held = 0;
    for chunk in bytes.chunks(usize::from(*piece) + 1) {
        reader.push(chunk);
        held += chunk.len();
        while let Ok(Some(frame)) = reader.next_frame() {
            assert!(frame.payload.len() <= FRAME_BYTES_MAX);
            held -= frame.payload.len() + HEADER_BYTES;
            message(&frame.payload);
        }
    }
    assert_eq!(held > 0, reader.has_partial_frame());
    message(bytes);
}

fn message(payload: &[u8]) {
    read_as::<process::StartRequest>(payload);
    read_as::<process::ConnectRequest>(payload);
    read_as::<process::UpdateRequest>(payload);
    read_as::<process::SendInputRequest>(payload);
    read_as::<process::StreamInputRequest>(payload);
    read_as::<process::SendSignalRequest>(payload);
    read_as::<process::CloseStdinRequest>(payload);
    read_as::<filesystem::MoveRequest>(payload);
    read_as::<filesystem::ListDirRequest>(payload);
    read_as::<filesystem::WatchDirRequest>(payload);
    read_as::<filesystem::CreateWatcherRequest>(payload);
    read_as::<filesystem::GetWatcherEventsRequest>(payload);
}

fn read_as<T: Message + DeserializeOwned>(payload: &[u8]) {
    let _ = T::decode_from_slice(payload);
    let _ = serde_json::from_slice::<T>(payload);
}

/// Reads `bytes` as the form of an upload with the boundary `b`. The first byte says in pieces of
/// which size it arrives.
pub fn uploads(bytes: &[u8]) {
    let Some((piece, bytes)) = bytes.split_first() else {
        return;
    };
    let pieces: Vec<_> = bytes
        .chunks(usize::from(*piece) + 1)
        .map(|chunk| Ok::<_, std::io::Error>(Bytes::copy_from_slice(chunk)))
        .collect();
    let request = Request::builder()
        .header(header::CONTENT_TYPE, "multipart/form-data; boundary=b")
        .body(Body::from_stream(futures::stream::iter(pieces)));
    if let Ok(request) = request {
        futures::executor::block_on(form(request, bytes.len()));
    }
}

async fn form(request: Request, sent: usize) {
    let Ok(mut form) = Multipart::from_request(request, &()).await else {
        return;
    };
    let mut received = 0;
    while let Ok(Some(mut field)) = form.next_field().await {
        if let Ok(name) = upload::field_path(&FileQuery::default(), &field) {
            path(&name);
        }
        while let Ok(Some(chunk)) = field.chunk().await {
            received += chunk.len();
        }
    }
    assert!(received <= sent, "more than was sent");
}

/// Reads `bytes` as the databases of users and groups, which root in the sandbox may have
/// written, and as what a caller of `sudo` asks.
pub fn accounts(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let first = text.lines().next().unwrap_or_default();
    for name in ["root", "0", first] {
        if let Some(account) = account::find_account(&text, &text, name) {
            assert!(account.groups.contains(&account.gid));
            assert!(!account.shell.as_os_str().is_empty());
        }
    }
    sudo::read_all(bytes, &text);
}
