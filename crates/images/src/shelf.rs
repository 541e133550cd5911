//! One catalogue directory: where things lie in it, and reading them.
//!
//! ```text
//!   <directory>/
//!     build.lock            held by the one who builds or collects
//!     names.lock            held while a template record is changed
//!     layers/<key>/root     root file systems, by what they were made from
//!     layers/<key>/cached   marks one that is kept for a while though no build needs it
//!     builds/<id>/          build.json and image/ of one build
//!     templates/<id>.json   names, and which build is the current one
//!     tmp/                  whatever is being made; rubbish once nobody holds build.lock
//! ```
//!
//! Invariants: what is in `layers`, `builds` and `templates` is complete, because it was moved
//! there whole; a template record is removed before the bytes that it names.

use std::{
    collections::BTreeMap,
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use sandhold_types::{BuildId, TemplateId};

use crate::{
    Build,
    durable::{self, FileLock, Wait},
    record::{self, BuildRecord, ContentKey, RecordError, TemplateRecord},
};

/// How many templates or builds one directory may hold. More is not looked at.
const ENTRIES_MAX: usize = 10_000;

/// Marks a layer that is kept for a while.
const CACHED_MARK: &str = "cached";

/// One catalogue directory.
#[derive(Debug, Clone)]
pub(crate) struct Shelf {
    directory: PathBuf,
}

/// What was read from a directory at one moment.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) templates: BTreeMap<TemplateId, Arc<TemplateRecord>>,
    pub(crate) builds: BTreeMap<BuildId, Arc<Shelved>>,
    /// Records that could not be read. While there are any, nothing may be collected.
    pub(crate) unreadable: Vec<RecordError>,
}

/// A build and its record.
#[derive(Debug)]
pub(crate) struct Shelved {
    pub(crate) record: BuildRecord,
    pub(crate) build: Arc<Build>,
}

impl Shelf {
    pub(crate) fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    /// Makes the directories of a shelf that is written to.
    pub(crate) fn prepare(&self) -> io::Result<()> {
        for part in [self.layers(), self.builds(), self.templates(), self.tmp()] {
            durable::make_directory(&part)?;
        }
        // Tenants' files keep their set-user-ID bits, which mean something to whoever can reach
        // them on this machine: nobody but root can.
        for private in [self.layers(), self.tmp()] {
            std::fs::set_permissions(private, Permissions::from_mode(0o700))?;
        }
        Ok(())
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn layers(&self) -> PathBuf {
        self.directory.join("layers")
    }

    pub(crate) fn builds(&self) -> PathBuf {
        self.directory.join("builds")
    }

    pub(crate) fn templates(&self) -> PathBuf {
        self.directory.join("templates")
    }

    pub(crate) fn tmp(&self) -> PathBuf {
        self.directory.join("tmp")
    }

    pub(crate) fn build_directory(&self, id: &BuildId) -> PathBuf {
        self.builds().join(id.as_str())
    }

    pub(crate) fn build_record(&self, id: &BuildId) -> PathBuf {
        self.build_directory(id).join("build.json")
    }

    pub(crate) fn template_record(&self, id: &TemplateId) -> PathBuf {
        self.templates().join(format!("{id}.json"))
    }

    pub(crate) fn layer(&self, key: &ContentKey) -> PathBuf {
        self.layers().join(&key.0)
    }

    /// Marks a layer that is being made as one that is kept for a while after its last use.
    pub(crate) fn mark_cached(&self, layer: &Path) -> io::Result<()> {
        std::fs::write(layer.join(CACHED_MARK), "")
    }

    /// When a layer that is kept for a while was made or last used; none for others.
    pub(crate) fn cached_at(&self, layer: &Path) -> Option<SystemTime> {
        let metadata = std::fs::metadata(layer.join(CACHED_MARK)).ok()?;
        metadata.modified().ok()
    }

    /// The lock of those who build or collect.
    pub(crate) fn lock_building(&self, wait: Wait) -> io::Result<Option<FileLock>> {
        FileLock::take(&self.directory.join("build.lock"), wait)
    }

    /// The lock of those who change a template record. Held for a few writes only.
    pub(crate) fn lock_names(&self) -> io::Result<Option<FileLock>> {
        FileLock::take(&self.directory.join("names.lock"), Wait::ForIt)
    }

    /// Removes what interrupted builds left. The caller holds the building lock.
    pub(crate) fn clear_rubbish(&self) -> io::Result<()> {
        for entry in self.tmp().read_dir()? {
            remove_tree(&entry?.path())?;
        }
        Ok(())
    }

    /// When names last changed here: a directory's time moves when a record is replaced.
    pub(crate) fn changed_at(&self) -> Option<SystemTime> {
        let metadata = std::fs::metadata(self.templates()).ok()?;
        metadata.modified().ok()
    }

    /// Reads everything that is complete.
    pub(crate) fn read(&self) -> Contents {
        let mut contents = Contents::default();
        for path in entries_of(&self.builds(), &mut contents.unreadable) {
            match self.read_build(&path) {
                Ok(shelved) => {
                    let id = shelved.record.id.clone();
                    contents.builds.insert(id, Arc::new(shelved));
                }
                // Removed by another process while this one was reading.
                Err(_) if !path.exists() => {}
                Err(error) => contents.unreadable.push(error),
            }
        }
        for path in entries_of(&self.templates(), &mut contents.unreadable) {
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            match record::read::<TemplateRecord>(&path) {
                Ok(template) => {
                    let id = template.id.clone();
                    contents.templates.insert(id, Arc::new(template));
                }
                Err(_) if !path.exists() => {}
                Err(error) => contents.unreadable.push(error),
            }
        }
        contents
    }

    fn read_build(&self, directory: &Path) -> Result<Shelved, RecordError> {
        let path = directory.join("build.json");
        let record: BuildRecord = record::read(&path)?;
        let keys = [&record.key, &record.base_layer, &record.root_layer];
        let in_place = directory
            .file_name()
            .is_some_and(|n| n == record.id.as_str());
        if !in_place || !keys.iter().all(|key| key.is_well_formed()) {
            return Err(RecordError::OutOfPlace { path });
        }
        let build = Arc::new(record.to_build(directory, &self.layers()));
        Ok(Shelved { record, build })
    }
}

/// What lies in a directory, sorted. A directory that is not there is empty; one that cannot be
/// read, or not to its end, is noted, because its emptiness would prove nothing.
fn entries_of(directory: &Path, unreadable: &mut Vec<RecordError>) -> Vec<PathBuf> {
    let file_error = |source| RecordError::File {
        step: "list",
        path: directory.to_owned(),
        source,
    };
    let listing = match directory.read_dir() {
        Ok(listing) => listing,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            unreadable.push(file_error(error));
            return Vec::new();
        }
    };
    let mut paths = Vec::new();
    for entry in listing {
        match entry {
            Ok(_) if paths.len() == ENTRIES_MAX => {
                unreadable.push(file_error(io::ErrorKind::FileTooLarge.into()));
                break;
            }
            Ok(entry) => paths.push(entry.path()),
            Err(error) => unreadable.push(file_error(error)),
        }
    }
    paths.sort();
    paths
}

/// Removes a file or a whole tree; symbolic links are removed, never followed.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}
