//! `GET /files`.

use std::{
    io::{self, SeekFrom},
    os::unix::fs::MetadataExt as _,
    sync::Arc,
};

use async_compression::{Level, tokio::bufread::GzipEncoder};
use axum::{body::Body, response::Response};
use futures::TryStreamExt as _;
use http::{
    HeaderMap, HeaderValue, StatusCode,
    header::{
        ACCEPT_ENCODING, ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH,
        CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderName, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE,
        LAST_MODIFIED, RANGE, VARY,
    },
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncSeekExt as _, BufReader};
use tokio_util::io::ReaderStream;

use crate::{
    activity::{ActivityMeter, StreamGuard},
    files::{
        headers::{
            Encoding, RangeAnswer, choose_encoding, content_disposition, entity_tag, names_tag,
            read_range,
        },
        signature::FileQuery,
        target::{Owner, open_to_read},
    },
    filesystem::error::http_error,
    http_error::HttpError,
    paths::base_name,
    state::SandboxState,
};

/// How much is read and sent at once.
const CHUNK_BYTES: usize = 64 << 10;

/// A file that is about to be sent.
struct Source {
    file: tokio::fs::File,
    size: u64,
    tag: String,
    modified: Option<String>,
    modified_s: i64,
}

/// Answers a download.
///
/// # Errors
/// No such file or user, no access, a directory, or an encoding we do not have.
pub async fn download(
    state: &SandboxState,
    activity: &ActivityMeter,
    query: &FileQuery,
    headers: &HeaderMap,
) -> Result<Response, HttpError> {
    let owner = Arc::new(Owner::find(state, query.username.as_deref())?);
    let path = owner.resolve(query.path.as_deref().unwrap_or(""))?;
    let file = owner.work(&path, open_to_read).await?;
    let mut source =
        Source::new(file).map_err(|error| http_error(&path.to_string_lossy(), &error))?;

    let mut response = Response::new(Body::empty());
    describe(&mut response, &source, &base_name(&path));
    if is_unchanged(headers, &source) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        return Ok(response);
    }
    let range = wanted_range(headers, &source);
    let encoding = choose_encoding(text(headers, ACCEPT_ENCODING)).ok_or_else(|| {
        HttpError::new(
            StatusCode::NOT_ACCEPTABLE,
            "only identity and gzip can be sent",
        )
    })?;
    let guard = activity.begin_stream();
    match range {
        RangeAnswer::Unsatisfiable => {
            *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
            set(
                &mut response,
                CONTENT_RANGE,
                &format!("bytes */{}", source.size),
            );
            Ok(response)
        }
        RangeAnswer::Part(part) => {
            source
                .file
                .seek(SeekFrom::Start(part.start))
                .await
                .map_err(|error| HttpError::internal(error.to_string()))?;
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            let last = part.start + part.length - 1;
            let range = format!("bytes {}-{last}/{}", part.start, source.size);
            set(&mut response, CONTENT_RANGE, &range);
            set(&mut response, CONTENT_LENGTH, &part.length.to_string());
            *response.body_mut() = stream(source.file.take(part.length), guard);
            Ok(response)
        }
        // Conditional requests and parts compare and count bytes of the file itself.
        RangeAnswer::Whole if encoding == Encoding::Gzip && !is_conditional(headers) => {
            send_compressed(&mut response, source, guard).await;
            Ok(response)
        }
        RangeAnswer::Whole => {
            send_identity(&mut response, source, guard).await;
            Ok(response)
        }
    }
}

impl Source {
    fn new(file: std::fs::File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let modified_s = metadata.mtime();
        let modified = u64::try_from(modified_s).ok().map(|seconds| {
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            httpdate::fmt_http_date(time)
        });
        Ok(Self {
            size: metadata.size(),
            tag: entity_tag(
                metadata.size(),
                modified_s,
                metadata.mtime_nsec(),
                metadata.ino(),
            ),
            modified,
            modified_s,
            file: tokio::fs::File::from_std(file),
        })
    }
}

fn describe(response: &mut Response, source: &Source, name: &str) {
    let kind = mime_guess::from_path(name).first_or_octet_stream();
    set(response, CONTENT_TYPE, kind.essence_str());
    set(response, CONTENT_DISPOSITION, &content_disposition(name));
    set(response, ACCEPT_RANGES, "bytes");
    set(response, VARY, "Accept-Encoding");
    set(response, ETAG, &source.tag);
    if let Some(modified) = &source.modified {
        set(response, LAST_MODIFIED, modified);
    }
}

fn is_conditional(headers: &HeaderMap) -> bool {
    [IF_NONE_MATCH, IF_MODIFIED_SINCE, RANGE]
        .iter()
        .any(|name| headers.contains_key(name))
}

fn is_unchanged(headers: &HeaderMap, source: &Source) -> bool {
    if let Some(tags) = text(headers, IF_NONE_MATCH) {
        return names_tag(tags, &source.tag);
    }
    text(headers, IF_MODIFIED_SINCE)
        .and_then(unix_seconds)
        .is_some_and(|since| source.modified_s <= since)
}

fn wanted_range(headers: &HeaderMap, source: &Source) -> RangeAnswer {
    let still_same = match text(headers, IF_RANGE) {
        None => true,
        Some(validator) if validator.contains('"') => validator.trim() == source.tag,
        Some(date) => unix_seconds(date) == Some(source.modified_s),
    };
    if still_same {
        read_range(text(headers, RANGE), source.size)
    } else {
        RangeAnswer::Whole
    }
}

fn unix_seconds(date: &str) -> Option<i64> {
    let time = httpdate::parse_http_date(date).ok()?;
    let since = time.duration_since(std::time::UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}

async fn send_identity(response: &mut Response, source: Source, guard: StreamGuard) {
    if source.size > 0 {
        set(response, CONTENT_LENGTH, &source.size.to_string());
        *response.body_mut() = stream(source.file.take(source.size), guard);
        return;
    }
    // Files of the kernel say that they are empty and are not.
    match first_bytes(source.file).await {
        Some(contents) => *response.body_mut() = stream(contents, guard),
        None => set(response, CONTENT_LENGTH, "0"),
    }
}

async fn send_compressed(response: &mut Response, source: Source, guard: StreamGuard) {
    let reader: Box<dyn AsyncRead + Send + Unpin> = if source.size > 0 {
        Box::new(source.file)
    } else {
        match first_bytes(source.file).await {
            Some(contents) => Box::new(contents),
            // BC-050: nothing has length 0 and no encoding.
            None => return set(response, CONTENT_LENGTH, "0"),
        }
    };
    let buffered = BufReader::with_capacity(CHUNK_BYTES, reader);
    let encoder = GzipEncoder::with_quality(buffered, Level::Fastest);
    set(response, CONTENT_ENCODING, "gzip");
    *response.body_mut() = stream(encoder, guard);
}

/// The contents of a file that claims to have none; `None` if that is true.
async fn first_bytes(mut file: tokio::fs::File) -> Option<impl AsyncRead + Send + Unpin> {
    let mut start = vec![0u8; CHUNK_BYTES];
    let length = file.read(&mut start).await.unwrap_or(0);
    start.truncate(length);
    (length > 0).then(|| io::Cursor::new(start).chain(file))
}

fn stream(reader: impl AsyncRead + Send + 'static, guard: StreamGuard) -> Body {
    let chunks = ReaderStream::with_capacity(reader, CHUNK_BYTES);
    Body::from_stream(chunks.inspect_ok(move |_| {
        let _ = &guard;
    }))
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Sets a header whose value we made. One that cannot be a value is left out.
fn set(response: &mut Response, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}
