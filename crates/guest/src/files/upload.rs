//! `POST /files`.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_compression::tokio::bufread::GzipDecoder;
use axum::{
    body::Body,
    extract::{FromRequest as _, Multipart, Request, multipart::Field},
};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use http::{
    HeaderMap, StatusCode,
    header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderName},
};
use serde::Serialize;
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio_util::io::{ReaderStream, StreamReader};

use crate::{
    files::{
        metadata,
        signature::FileQuery,
        target::{Owner, WriteTarget, open_to_write},
    },
    filesystem::error::http_error,
    http_error::HttpError,
    paths::base_name,
    state::SandboxState,
};

/// The part that holds a file.
const FILE_FIELD: &str = "file";
/// Files in one upload.
const FILES_MAX: usize = 10_000;
/// How much is decompressed and written at once.
const CHUNK_BYTES: usize = 64 << 10;

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WrittenFile {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    path: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl WrittenFile {
    /// A file at this path.
    #[must_use]
    pub fn new(path: &Path, metadata: BTreeMap<String, String>) -> Self {
        Self {
            name: base_name(path),
            kind: "file",
            path: path.to_string_lossy().into_owned(),
            metadata,
        }
    }
}

/// Takes an upload.
///
/// # Errors
/// Wrong headers or form, no such user, no access, no space.
pub async fn upload(
    state: &SandboxState,
    query: &FileQuery,
    request: Request,
) -> Result<Vec<WrittenFile>, HttpError> {
    let uploader = Uploader {
        owner: Arc::new(Owner::find(state, query.username.as_deref())?),
        metadata: metadata::from_headers(request.headers())?,
        announced: announced_bytes(request.headers()),
    };
    let request = decompressed(request)?;
    match content_type(request.headers()).as_deref() {
        Some("multipart/form-data") => uploader.take_form(query, request).await,
        Some("application/octet-stream") => uploader.take_raw(query, request).await,
        _ => Err(HttpError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "send multipart/form-data or application/octet-stream",
        )),
    }
}

fn content_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let essence = value.split(';').next().unwrap_or_default();
    Some(essence.trim().to_ascii_lowercase())
}

fn announced_bytes(headers: &HeaderMap) -> u64 {
    header_text(headers, CONTENT_LENGTH)
        .and_then(|text| text.parse().ok())
        .unwrap_or(0)
}

fn header_text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// The request with its body as it was before compression.
fn decompressed(mut request: Request) -> Result<Request, HttpError> {
    let encoding = header_text(request.headers(), CONTENT_ENCODING)
        .unwrap_or("identity")
        .trim()
        .to_ascii_lowercase();
    match encoding.as_str() {
        "" | "identity" => Ok(request),
        "gzip" | "x-gzip" => {
            request.headers_mut().remove(CONTENT_ENCODING);
            request.headers_mut().remove(CONTENT_LENGTH);
            Ok(request.map(|body| {
                let compressed = body.into_data_stream().map_err(io::Error::other);
                let reader = BufReader::with_capacity(CHUNK_BYTES, StreamReader::new(compressed));
                let mut decoder = GzipDecoder::new(reader);
                decoder.multiple_members(true);
                Body::from_stream(ReaderStream::with_capacity(decoder, CHUNK_BYTES))
            }))
        }
        _ => Err(HttpError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "the only content encoding that is taken is gzip",
        )),
    }
}

/// What all files of one upload have in common.
struct Uploader {
    owner: Arc<Owner>,
    metadata: BTreeMap<String, String>,
    /// The length of the body, or zero if it is not known.
    announced: u64,
}

impl Uploader {
    async fn take_raw(
        &self,
        query: &FileQuery,
        request: Request,
    ) -> Result<Vec<WrittenFile>, HttpError> {
        let path = named_path(query)
            .ok_or_else(|| HttpError::bad_request("the parameter 'path' is missing"))?;
        let path = self.owner.resolve(path)?;
        let contents = request.into_body().into_data_stream();
        Ok(vec![self.write(path, contents.map_err(body_error)).await?])
    }

    async fn take_form(
        &self,
        query: &FileQuery,
        request: Request,
    ) -> Result<Vec<WrittenFile>, HttpError> {
        let mut form = Multipart::from_request(request, &())
            .await
            .map_err(|error| HttpError::bad_request(error.body_text()))?;
        let mut written = Vec::new();
        let mut seen = BTreeSet::new();
        while let Some(field) = form.next_field().await.map_err(form_error)? {
            if field.name() != Some(FILE_FIELD) {
                continue;
            }
            if written.len() >= FILES_MAX {
                return Err(HttpError::bad_request(format!(
                    "more than {FILES_MAX} files"
                )));
            }
            let path = self.owner.resolve(&field_path(query, &field)?)?;
            if !seen.insert(path.clone()) {
                return Err(HttpError::bad_request(format!(
                    "two files for {}",
                    path.to_string_lossy()
                )));
            }
            written.push(self.write(path, field.map_err(form_error)).await?);
        }
        if written.is_empty() {
            return Err(HttpError::bad_request("the form has no part 'file'"));
        }
        Ok(written)
    }

    async fn write(
        &self,
        path: PathBuf,
        contents: impl Stream<Item = Result<Bytes, HttpError>>,
    ) -> Result<WrittenFile, HttpError> {
        let announced = self.announced;
        let target = self
            .owner
            .work(&path, move |path| {
                let target = open_to_write(path)?;
                if let Err(error) = require_space(&target, announced) {
                    if target.is_new {
                        std::fs::remove_file(path)?;
                    }
                    return Err(error);
                }
                Ok(target)
            })
            .await?;
        let is_new = target.is_new;
        let result = self.fill(target, &path, contents).await;
        if result.is_err() && is_new {
            // Half of a new file is worse than none. If it cannot go, the error says enough.
            let _ = self
                .owner
                .work(&path, |path| std::fs::remove_file(path))
                .await;
        }
        result.map(|()| WrittenFile::new(&path, self.metadata.clone()))
    }

    async fn fill(
        &self,
        target: WriteTarget,
        path: &Path,
        contents: impl Stream<Item = Result<Bytes, HttpError>>,
    ) -> Result<(), HttpError> {
        let failed = |error: io::Error| http_error(&path.to_string_lossy(), &error);
        let mut file = tokio::fs::File::from_std(target.file);
        file.set_max_buf_size(CHUNK_BYTES);
        let mut contents = std::pin::pin!(contents);
        while let Some(bytes) = contents.next().await {
            file.write_all(&bytes?).await.map_err(failed)?;
        }
        file.flush().await.map_err(failed)?;
        let file = file.into_std().await;
        let metadata = self.metadata.clone();
        tokio::task::spawn_blocking(move || metadata::replace(&file, &metadata))
            .await
            .map_err(|error| HttpError::internal(error.to_string()))?
            .map_err(failed)
    }
}

/// Refuses what cannot fit before anything is written.
fn require_space(target: &WriteTarget, announced: u64) -> io::Result<()> {
    let space = rustix::fs::fstatvfs(&target.file)?;
    let available = space.f_bavail.saturating_mul(space.f_frsize);
    if announced > available {
        return Err(io::Error::from_raw_os_error(libc::ENOSPC));
    }
    Ok(())
}

fn named_path(query: &FileQuery) -> Option<&str> {
    query.path.as_deref().filter(|path| !path.is_empty())
}

/// Where a part goes: the path of the query for the only file, the name of the part for several.
pub(crate) fn field_path(query: &FileQuery, field: &Field<'_>) -> Result<String, HttpError> {
    match (named_path(query), field.file_name()) {
        (Some(path), _) => Ok(path.to_owned()),
        (None, Some(name)) if !name.is_empty() => Ok(name.to_owned()),
        _ => Err(HttpError::bad_request("a file has neither path nor name")),
    }
}

fn form_error(error: axum::extract::multipart::MultipartError) -> HttpError {
    HttpError::new(error.status(), error.body_text())
}

fn body_error(error: axum::Error) -> HttpError {
    HttpError::bad_request(format!("the body ends early or is damaged: {error}"))
}
