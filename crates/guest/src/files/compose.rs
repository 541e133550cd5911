//! `POST /files/compose`: several files, one after the other, into one. The sources stay.

use std::{
    collections::BTreeMap,
    io::{self, Seek as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;

use crate::{
    files::{
        target::{Owner, open_to_read, open_to_write},
        upload::WrittenFile,
    },
    http_error::HttpError,
    state::SandboxState,
};

/// Sources of one file; all are open at once.
const SOURCES_MAX: usize = 256;

/// What goes where.
#[derive(Debug, Clone, Deserialize)]
pub struct ComposeRequest {
    source_paths: Vec<String>,
    destination: String,
    #[serde(default)]
    username: Option<String>,
}

/// Composes a file.
///
/// # Errors
/// A source is missing or closed to the user, or the destination is one of them.
pub async fn compose(
    state: &SandboxState,
    request: ComposeRequest,
) -> Result<WrittenFile, HttpError> {
    if request.source_paths.is_empty() || request.source_paths.len() > SOURCES_MAX {
        return Err(HttpError::bad_request(format!(
            "'source_paths' must name 1 to {SOURCES_MAX} files"
        )));
    }
    if request.destination.is_empty() {
        return Err(HttpError::bad_request("'destination' is empty"));
    }
    let owner = Arc::new(Owner::find(state, request.username.as_deref())?);
    let sources = request
        .source_paths
        .iter()
        .map(|path| owner.resolve(path))
        .collect::<Result<Vec<_>, _>>()?;
    let destination = owner.resolve(&request.destination)?;
    owner
        .work(&destination, move |destination| {
            concatenate(&sources, destination)
        })
        .await?;
    Ok(WrittenFile::new(&destination, BTreeMap::new()))
}

fn concatenate(sources: &[PathBuf], destination: &Path) -> io::Result<()> {
    let mut opened = Vec::with_capacity(sources.len());
    for path in sources {
        let named = |error: io::Error| {
            // The kind decides the status; the text says which file.
            match error.raw_os_error() {
                Some(_) => error,
                None => io::Error::new(error.kind(), format!("{}: {error}", path.display())),
            }
        };
        opened.push(open_to_read(path).map_err(named)?);
    }
    let existing = std::fs::metadata(destination).ok();
    for source in &opened {
        let source = source.metadata()?;
        let same = existing
            .as_ref()
            .is_some_and(|target| target.ino() == source.ino() && target.dev() == source.dev());
        if same {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the destination is one of the sources",
            ));
        }
    }
    let mut target = open_to_write(destination)?.file;
    for mut source in opened {
        source.rewind()?;
        io::copy(&mut source, &mut target)?;
    }
    Ok(())
}
