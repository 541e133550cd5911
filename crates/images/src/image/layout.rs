//! Images on disk: a folder with an OCI layout, and the archive that `docker save` writes. Newer
//! archives hold a layout, older ones a list of files in `manifest.json`.
//!
//! Both are opened as a root that no path leads out of, whoever made them.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::OFlags;
use serde::Deserialize;

use super::{
    Blob, DigestOf, First, Image, ImageError, Store, bad_document, document,
    document::DOCUMENT_BYTES_MAX, refused_archive,
};
use crate::layers::{
    Budget, Confined, Digest, Owners, Whiteouts, decompressed, path_in_root, unpack,
};

/// What a layout is known by.
const LAYOUT_MARK: &str = "oci-layout";
/// How many files a docker archive may hold.
const ARCHIVE_ENTRIES_MAX: u64 = 10_000;
/// How many bytes the files of a docker archive may hold together.
const ARCHIVE_BYTES_MAX: u64 = 64 << 30;

#[derive(Debug)]
struct Layout {
    root: Confined,
}

impl Store for Layout {
    fn open(&self, blob: &Blob) -> Result<Box<dyn Read + Send>, ImageError> {
        let path = Path::new("blobs/sha256").join(blob.digest.hex());
        Ok(Box::new(open_file(&self.root, &path)?))
    }
}

/// Reads the image in a layout.
pub(super) fn read_layout(path: &Path, name: Option<String>) -> Result<Image, ImageError> {
    let root = open_root(path)?;
    open_file(&root, Path::new(LAYOUT_MARK))?;
    let bytes = read_document(&root, Path::new("index.json"))?;
    Image::read(Arc::new(Layout { root }), First { bytes, name })
}

/// Unpacks a docker archive into the empty folder `scratch` and reads the image in it.
pub(super) fn read_archive(path: &Path, scratch: &Path) -> Result<Image, ImageError> {
    let file_error = |source| ImageError::File {
        what: path.display().to_string(),
        source,
    };
    let file = File::open(path).map_err(file_error)?;
    let archive = decompressed(file).map_err(file_error)?;
    let root = open_root(scratch)?;
    let mut budget = Budget::new(ARCHIVE_ENTRIES_MAX, ARCHIVE_BYTES_MAX);
    unpack(archive, &root, &mut budget, Owners::Root, Whiteouts::Plain)
        .map_err(|error| refused_archive(&error))?;
    if root.folder(Path::new("blobs")).is_ok() && open_file(&root, Path::new(LAYOUT_MARK)).is_ok() {
        return read_layout(scratch, None);
    }
    read_listed(root)
}

/// A docker archive whose layers are files by the names that its list gives.
#[derive(Debug)]
struct Listed {
    root: Confined,
    layers: BTreeMap<Digest, PathBuf>,
}

impl Store for Listed {
    fn open(&self, blob: &Blob) -> Result<Box<dyn Read + Send>, ImageError> {
        let path = self.layers.get(&blob.digest).map(PathBuf::as_path);
        let path = path.unwrap_or_else(|| Path::new(""));
        Ok(Box::new(open_file(&self.root, path)?))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListedImage {
    config: String,
    layers: Vec<String>,
}

fn read_listed(root: Confined) -> Result<Image, ImageError> {
    let wrong = |problem: &str| ImageError::Archive(problem.to_owned());
    let bytes = read_document(&root, Path::new("manifest.json"))?;
    let images: Vec<ListedImage> = serde_json::from_slice(&bytes)
        .map_err(|error| bad_document("manifest.json")(error.into()))?;
    let [image] = &images[..] else {
        return Err(wrong("it does not hold exactly one image"));
    };
    let place = |name: &str| path_in_root(name.as_bytes()).map_err(|rule| wrong(&rule.to_string()));
    let bytes = read_document(&root, &place(&image.config)?)?;
    let config = document::read_config(&bytes).map_err(bad_document("configuration"))?;
    if config.layers.len() != image.layers.len() {
        return Err(wrong(
            "its list and its configuration differ in their layers",
        ));
    }
    let mut layers = BTreeMap::new();
    for (digest, name) in config.layers.iter().zip(&image.layers) {
        layers.insert(*digest, place(name)?);
    }
    let blob = |digest: &Digest| Blob {
        digest: *digest,
        // Nothing announces it; the digest is what counts.
        size: 0,
    };
    Ok(Image {
        // The configuration names the layers, so its digest is one of all of it.
        digest: Digest::of(&bytes),
        layers: config.layers.iter().map(blob).collect(),
        config,
        digests: DigestOf::Archive,
        store: Arc::new(Listed { root, layers }),
    })
}

fn open_root(path: &Path) -> Result<Confined, ImageError> {
    Confined::open(path).map_err(|source| ImageError::File {
        what: path.display().to_string(),
        source,
    })
}

fn open_file(root: &Confined, path: &Path) -> Result<File, ImageError> {
    let open = || -> io::Result<File> {
        // A pipe in the place of a file must not keep us waiting for a writer.
        let file = File::from(root.open_at(path, OFlags::RDONLY | OFlags::NONBLOCK)?);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("it is no file")),
        }
    };
    open().map_err(|source| ImageError::File {
        what: path.display().to_string(),
        source,
    })
}

fn read_document(root: &Confined, path: &Path) -> Result<Vec<u8>, ImageError> {
    let file_error = |source| ImageError::File {
        what: path.display().to_string(),
        source,
    };
    let read = root
        .read_file(path, DOCUMENT_BYTES_MAX)
        .map_err(file_error)?;
    read.ok_or_else(|| file_error(io::ErrorKind::NotFound.into()))
}
