//! Images: where they come from, and laying them down as a root file system (R-P5).
//!
//! ```text
//!   registry ──(mirrors, credentials)──┐
//!   OCI layout ────────────────────────┼─▶ Image { configuration, layers } ─▶ root
//!   docker archive ──(unpacked aside)──┘        every byte checked by its digest
//! ```
//!
//! Invariants:
//! - What is laid down has the digests that the manifest names, and the manifest the digest under
//!   which the image is kept; a wrong one fails the whole.
//! - Documents, layers and what is in them are bounded.
//! - Credentials are sent only to the registry that they are for, and are in no record, key or log.
//!
//! It knows nothing of templates; what a sandbox needs besides (a user, the agent) is added by the
//! builder.

mod document;
mod guard;
mod layout;
mod registry;
mod settings;

use std::{
    fmt, io,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
};

pub(crate) use document::ImageConfig;
use document::{Blob, DOCUMENT_BYTES_MAX, Document, DocumentError};
pub use settings::{Credentials, Registries, RegistriesError};

use crate::{
    layers::{
        Budget, Checked, Confined, Digest, Owners, UnpackError, Whiteouts, decompressed, unpack,
    },
    progress::{Event, Progress},
};

/// How many files, folders and links all layers of an image may hold together.
const ENTRIES_MAX: u64 = 1_000_000;
/// How many bytes of files all layers of an image may hold together, unpacked.
const UNPACKED_BYTES_MAX: u64 = 64 << 30;
/// How many documents may lead to a manifest.
const HOPS_MAX: usize = 4;

/// Where an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageSource {
    /// In a registry, by a reference such as `python:3.13` or `host:5000/name@sha256:…`.
    Registry {
        /// The reference.
        reference: String,
        /// For the registry; those of the settings if absent.
        credentials: Option<Credentials>,
    },
    /// A folder with an OCI layout.
    Layout {
        /// The folder.
        path: PathBuf,
        /// Which of its images, by name; the only one if absent.
        name: Option<String>,
    },
    /// A file as `docker save` writes it.
    Archive {
        /// The file.
        path: PathBuf,
    },
}

impl fmt::Display for ImageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry { reference, .. } => f.write_str(reference),
            Self::Layout { path, .. } | Self::Archive { path } => write!(f, "{}", path.display()),
        }
    }
}

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The reference is none.
    #[error("'{reference}' is no image reference: {problem}")]
    Reference {
        /// What was given.
        reference: String,
        /// What is wrong with it.
        problem: String,
    },
    /// It is, or leads to, where this server does not fetch from.
    #[error("image '{reference}' is not fetched: {why}")]
    NotAllowed {
        /// The reference.
        reference: String,
        /// What was refused, and what to do about it.
        why: String,
    },
    /// No registry gave it.
    #[error("image '{reference}' could not be fetched: {problem}")]
    Registry {
        /// The reference.
        reference: String,
        /// What each registry that was asked said.
        problem: String,
    },
    /// A file of a layout or an archive.
    #[error("could not read {what}")]
    File {
        /// Which.
        what: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A document of the image.
    #[error("the {what} cannot be used: {problem}")]
    Document {
        /// Which document.
        what: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A layer.
    #[error("layer {number} ({digest}) was refused: {problem}")]
    Layer {
        /// Which, counted from one.
        number: usize,
        /// Its digest.
        digest: String,
        /// What is wrong with it, with its causes.
        problem: String,
    },
    /// A docker archive could not be unpacked.
    #[error("the archive was refused: {0}")]
    Archive(String),
}

fn bad_document(what: &'static str) -> impl FnOnce(DocumentError) -> ImageError {
    move |error| ImageError::Document {
        what,
        problem: error.to_string(),
    }
}

/// An error and its causes in one line.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// Where the content of an image is read.
trait Store: Send + Sync + fmt::Debug {
    /// The bytes of a piece of content, unchecked. Blocks, and so does reading them.
    fn open(&self, blob: &Blob) -> Result<Box<dyn Read + Send>, ImageError>;
}

/// The document that an image was asked by.
#[derive(Debug)]
struct First {
    bytes: Vec<u8>,
    /// Which of its images is meant.
    name: Option<String>,
}

/// What a layer's digest is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DigestOf {
    /// The bytes as they are kept.
    Kept,
    /// What they are without compression.
    Archive,
}

/// An image that is there, with its documents read and checked.
#[derive(Debug)]
pub(crate) struct Image {
    /// Its name by content.
    pub(crate) digest: Digest,
    pub(crate) config: ImageConfig,
    layers: Vec<Blob>,
    digests: DigestOf,
    store: Arc<dyn Store>,
}

impl Image {
    /// Finds an image and reads what it says about itself. `scratch` is an empty folder, kept as
    /// long as the image is used.
    ///
    /// # Errors
    /// It is not there, or its documents cannot be used.
    pub(crate) async fn find(
        source: &ImageSource,
        registries: &Registries,
        scratch: &Path,
    ) -> Result<Self, ImageError> {
        match source {
            ImageSource::Registry {
                reference,
                credentials,
            } => {
                let found = registry::find(reference, credentials.as_ref(), registries).await?;
                blocking(move || Self::read(Arc::new(found.store), found.first)).await
            }
            ImageSource::Layout { path, name } => {
                let (path, name) = (path.clone(), name.clone());
                blocking(move || layout::read_layout(&path, name)).await
            }
            ImageSource::Archive { path } => {
                let (path, scratch) = (path.clone(), scratch.to_owned());
                blocking(move || layout::read_archive(&path, &scratch)).await
            }
        }
    }

    fn read(store: Arc<dyn Store>, first: First) -> Result<Self, ImageError> {
        let mut bytes = first.bytes;
        let mut digest = Digest::of(&bytes);
        let mut name = first.name.as_deref();
        for _ in 0..HOPS_MAX {
            let document = document::read_document(&bytes, name);
            match document.map_err(bad_document("manifest"))? {
                Document::Elsewhere(blob) => {
                    bytes = read_blob(&*store, &blob, "manifest")?;
                    digest = blob.digest;
                    name = None;
                }
                Document::Manifest(manifest) => {
                    let config = read_blob(&*store, &manifest.config, "configuration")?;
                    let config = document::read_config(&config);
                    return Ok(Self {
                        digest,
                        config: config.map_err(bad_document("configuration"))?,
                        layers: manifest.layers,
                        digests: DigestOf::Kept,
                        store,
                    });
                }
            }
        }
        Err(ImageError::Document {
            what: "index",
            problem: format!("more than {HOPS_MAX} documents lead to a manifest"),
        })
    }

    /// Lays all layers into the empty directory `root`.
    ///
    /// # Errors
    /// A layer is refused or did not come whole. What was laid down is rubbish.
    pub(crate) async fn lay_down(
        self: Arc<Self>,
        root: &Path,
        progress: &dyn Progress,
    ) -> Result<(), ImageError> {
        let total = self.layers.len() as u64;
        let mut budget = Budget::new(ENTRIES_MAX, UNPACKED_BYTES_MAX);
        for number in 0..self.layers.len() {
            progress.report(Event::Step {
                done: number as u64,
                total,
            });
            let (image, root) = (Arc::clone(&self), root.to_owned());
            budget = blocking(move || {
                image.lay_layer(number, &root, &mut budget)?;
                Ok(budget)
            })
            .await?;
        }
        progress.report(Event::Step { done: total, total });
        Ok(())
    }

    fn lay_layer(&self, number: usize, root: &Path, budget: &mut Budget) -> Result<(), ImageError> {
        let Some(blob) = self.layers.get(number) else {
            return Ok(());
        };
        let refused = |problem: String| ImageError::Layer {
            number: number + 1,
            digest: blob.digest.to_string(),
            problem,
        };
        let read = |error: io::Error| refused(error.to_string());
        let bytes = self.store.open(blob)?;
        let archive: Box<dyn Read> = match self.digests {
            DigestOf::Kept => {
                let checked = Checked::new(bytes, blob.digest, Some(blob.size));
                decompressed(checked).map_err(read)?
            }
            DigestOf::Archive => {
                let archive = decompressed(bytes).map_err(read)?;
                Box::new(Checked::new(archive, blob.digest, None))
            }
        };
        let root = Confined::open(root).map_err(|source| ImageError::File {
            what: root.display().to_string(),
            source,
        })?;
        unpack(archive, &root, budget, Owners::Kept, Whiteouts::Applied)
            .map_err(|error| refused(with_causes(&error)))
    }
}

fn read_blob(store: &dyn Store, blob: &Blob, what: &'static str) -> Result<Vec<u8>, ImageError> {
    if blob.size > DOCUMENT_BYTES_MAX {
        return Err(bad_document(what)(DocumentError::TooLarge));
    }
    let mut bytes = Vec::new();
    Checked::new(store.open(blob)?, blob.digest, Some(blob.size))
        .read_to_end(&mut bytes)
        .map_err(|source| ImageError::File {
            what: format!("the {what} {}", blob.digest),
            source,
        })?;
    Ok(bytes)
}

/// Runs what blocks where it may.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImageError> + Send + 'static,
) -> Result<T, ImageError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| {
        Err(ImageError::File {
            what: String::from("the image"),
            source: io::Error::other(error),
        })
    })
}

fn refused_archive(error: &UnpackError) -> ImageError {
    ImageError::Archive(with_causes(error))
}
