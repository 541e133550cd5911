//! The catalogue of snapshots: which there are, what they are called, what came from what, and when
//! their bytes may go.
//!
//! ```text
//!   <data>/snapshots/<id>/image/          the engine's files, shared by hard links
//!                        /snapshot.json   written last, removed first
//!
//!   a captured life ──publish──▶ linked ─▶ record ─▶ in the index ──lease──▶ a restore reads it
//!                                            ▲                                  │
//!              remove: record ─▶ index ──────┘        bytes, when no lease is left ◀┘
//! ```
//!
//! Owns: the directory `snapshots`, the index of it in memory, and the leases of those who restore.
//!
//! Invariants:
//! - What has a record is whole; what has none is rubbish of an interrupted publication or removal,
//!   and goes at the next start.
//! - An image's files never change. A file that a snapshot and a sandbox share is one file with two
//!   names; the file system counts them, so removing either never takes from the other.
//! - A name stands for at most one snapshot of a bucket.
//! - A record that cannot be read is left alone, and while there is one nothing is collected.
//!
//! Called by the node; knows nothing of a sandbox's life. File work is done by the calling thread.

mod record;
mod retention;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandhold_platform::{SnapshotKind, SnapshotName, SnapshotSizes};
use sandhold_types::{EnvName, Namespace, SnapshotId, Timestamp};

pub use self::{record::Snapshot, retention::Retention};
use crate::{durable, record::RecordError};

const RECORD_FILE: &str = "snapshot.json";
const IMAGE_DIRECTORY: &str = "image";
/// Files of an image; engines write a handful.
const IMAGE_FILES_MAX: usize = 64;
/// What a file system counts blocks in, whatever its own blocks are (`stat(2)`).
const BLOCK_BYTES: u64 = 512;

/// A failed operation of the catalogue.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A file or directory of it.
    #[error("could not {step} {path}")]
    File {
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A record cannot be written.
    #[error("could not write down a snapshot")]
    Record(#[from] RecordError),
    /// What was to be published is not what engines write.
    #[error("{path} is not an image: {problem}")]
    NoImage {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// There is none of this identifier.
    #[error("there is no snapshot {0}")]
    Unknown(SnapshotId),
    /// Records cannot be read, so that nothing can be concluded about what is in use.
    #[error("nothing was collected, because {count} snapshot records cannot be read")]
    Unreadable {
        /// How many.
        count: usize,
    },
}

fn file_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SnapshotError {
    let path = path.to_owned();
    move |source| SnapshotError::File { step, path, source }
}

/// The snapshots of one node.
#[derive(Debug)]
pub struct Snapshots {
    root: PathBuf,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    all: BTreeMap<SnapshotId, Arc<Snapshot>>,
    /// How many restore from each now.
    leases: BTreeMap<SnapshotId, usize>,
    /// Without a record and not yet without bytes.
    condemned: BTreeSet<SnapshotId>,
    unreadable: usize,
}

/// A snapshot whose bytes stay until this is dropped.
#[derive(Debug)]
pub struct Lease {
    snapshot: Arc<Snapshot>,
    catalogue: Arc<Snapshots>,
}

impl Lease {
    /// The snapshot.
    #[must_use]
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Where its image lies.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        self.catalogue.image(&self.snapshot.id)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut inner = self.catalogue.lock();
        if let Some(count) = inner.leases.get_mut(&self.snapshot.id) {
            *count -= 1;
            if *count == 0 {
                inner.leases.remove(&self.snapshot.id);
            }
        }
    }
}

impl Snapshots {
    /// Opens the catalogue in `root` and removes what has no record.
    ///
    /// # Errors
    /// `root` cannot be made, listed or cleared.
    pub fn open(root: &Path) -> Result<Self, SnapshotError> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(root).map_err(file_error("make", root))?;
        let mut inner = Inner::default();
        for entry in root.read_dir().map_err(file_error("list", root))? {
            let path = entry.map_err(file_error("list", root))?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let Some(Ok(id)) = name.map(str::parse::<SnapshotId>) else {
                continue;
            };
            let record = path.join(RECORD_FILE);
            if !record
                .try_exists()
                .map_err(file_error("look for", &record))?
            {
                fs::remove_dir_all(&path).map_err(file_error("remove", &path))?;
                continue;
            }
            match Snapshot::read(&record, &id) {
                Ok(snapshot) => drop(inner.all.insert(id, Arc::new(snapshot))),
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(error, "a snapshot is left out");
                    inner.unreadable += 1;
                }
            }
        }
        Ok(Self {
            root: root.to_owned(),
            inner: Mutex::new(inner),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory(&self, id: &SnapshotId) -> PathBuf {
        self.root.join(id.as_str())
    }

    fn image(&self, id: &SnapshotId) -> PathBuf {
        self.directory(id).join(IMAGE_DIRECTORY)
    }

    fn record(&self, id: &SnapshotId) -> PathBuf {
        self.directory(id).join(RECORD_FILE)
    }

    /// Makes a snapshot of the image that lies in `image`, on the same file system, and stays there
    /// too. Its names are taken from whichever snapshot of its bucket had them.
    ///
    /// # Errors
    /// It is no image, or cannot be linked or written down; then nothing of it is left.
    pub fn publish(
        &self,
        mut snapshot: Snapshot,
        image: &Path,
    ) -> Result<Arc<Snapshot>, SnapshotError> {
        let directory = self.directory(&snapshot.id);
        let record = self.record(&snapshot.id);
        let written = self.link(&snapshot.id, image).and_then(|size_bytes| {
            snapshot.size_bytes = size_bytes;
            self.bring_to_disk(&snapshot)?;
            Ok(snapshot.write(&record)?)
        });
        let published = written.and_then(|()| {
            let published = Arc::new(snapshot);
            let mut inner = self.lock();
            self.take_names(&mut inner, &published)?;
            let id = published.id.clone();
            inner.all.insert(id, Arc::clone(&published));
            Ok(published)
        });
        published.inspect_err(|_| {
            // Should either fail too: what has no record goes at the next start.
            let _ = durable::remove_file(&record);
            let _ = fs::remove_dir_all(&directory);
        })
    }

    /// A snapshot that somebody will be told of outlives a power cut. A temporary one is gone with
    /// the process that made it.
    fn bring_to_disk(&self, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        if snapshot.kind == SnapshotKind::Temporary {
            return Ok(());
        }
        let image = self.image(&snapshot.id);
        durable::sync_image(&image).map_err(file_error("bring to the disk", &image))?;
        let directory = self.directory(&snapshot.id);
        durable::sync_parent(&directory).map_err(file_error("bring to the disk", &directory))
    }

    /// Gives the image's files a second name in the snapshot's directory. Returns their bytes.
    fn link(&self, id: &SnapshotId, image: &Path) -> Result<u64, SnapshotError> {
        let no_image = |problem| SnapshotError::NoImage {
            path: image.to_owned(),
            problem,
        };
        let target = self.image(id);
        fs::create_dir_all(&target).map_err(file_error("make", &target))?;
        let mut size_bytes = 0;
        let mut files = 0;
        for entry in image.read_dir().map_err(file_error("list", image))? {
            let entry = entry.map_err(file_error("list", image))?;
            let path = entry.path();
            let metadata = entry.metadata().map_err(file_error("look at", &path))?;
            files += 1;
            if !metadata.is_file() || files > IMAGE_FILES_MAX {
                return Err(no_image("it holds what no engine writes"));
            }
            size_bytes += metadata.blocks() * BLOCK_BYTES;
            let link = target.join(entry.file_name());
            fs::hard_link(&path, &link).map_err(file_error("link", &path))?;
        }
        if files == 0 {
            return Err(no_image("it is empty"));
        }
        Ok(size_bytes)
    }

    /// Takes the names of a new snapshot away from those that had them.
    fn take_names(&self, inner: &mut Inner, new: &Snapshot) -> Result<(), SnapshotError> {
        let of_bucket = |other: &Snapshot| {
            (&other.owner.namespace, &other.owner.env) == (&new.owner.namespace, &new.owner.env)
        };
        let holds = |other: &Snapshot| other.names.iter().any(|name| new.names.contains(name));
        let losers = inner
            .all
            .values()
            .filter(|other| other.id != new.id && of_bucket(other) && holds(other));
        let losers: Vec<Arc<Snapshot>> = losers.cloned().collect();
        for loser in losers {
            let mut changed = Snapshot::clone(&loser);
            changed.names.retain(|name| !new.names.contains(name));
            changed.write(&self.record(&changed.id))?;
            inner.all.insert(changed.id.clone(), Arc::new(changed));
        }
        Ok(())
    }

    /// A snapshot by its identifier, whatever kind it is of.
    #[must_use]
    pub fn get(&self, id: &SnapshotId) -> Option<Arc<Snapshot>> {
        self.lock().all.get(id).cloned()
    }

    /// All of them, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Snapshot>> {
        let mut all: Vec<_> = self.lock().all.values().cloned().collect();
        all.sort_by(|a, b| (a.taken_at, &a.id).cmp(&(b.taken_at, &b.id)));
        all
    }

    /// The one that `reference` (an ID, `name`, `name:tag`, or either behind `namespace/`) means in
    /// this bucket.
    #[must_use]
    pub fn resolve(
        &self,
        namespace: &Namespace,
        env: &EnvName,
        reference: &str,
    ) -> Option<Arc<Snapshot>> {
        let own_name = reference
            .strip_prefix(namespace.as_str())
            .and_then(|rest| rest.strip_prefix('/'));
        let (name, tag) = SnapshotName::split(own_name.unwrap_or(reference));
        let is_called = |snapshot: &Snapshot| {
            let named = |own: &SnapshotName| own.name == name && own.tag == tag;
            // `<id>:default` is how clients write an identifier with a tag.
            let by_id = snapshot.id.as_str() == name && tag == SnapshotName::DEFAULT_TAG;
            by_id || snapshot.names.iter().any(named)
        };
        let inner = self.lock();
        let mut own = inner.all.values().filter(|snapshot| {
            snapshot.owner.namespace == *namespace && snapshot.owner.env == *env
        });
        own.find(|snapshot| is_called(snapshot)).cloned()
    }

    /// Keeps a snapshot's bytes until the answer is dropped.
    #[must_use]
    pub fn lease(self: &Arc<Self>, id: &SnapshotId) -> Option<Lease> {
        let mut inner = self.lock();
        let snapshot = inner.all.get(id).cloned()?;
        *inner.leases.entry(id.clone()).or_default() += 1;
        drop(inner);
        Some(Lease {
            snapshot,
            catalogue: Arc::clone(self),
        })
    }

    /// What a snapshot occupies.
    ///
    /// # Errors
    /// Its files cannot be looked at.
    pub fn sizes(&self, id: &SnapshotId) -> Result<SnapshotSizes, SnapshotError> {
        let image = self.image(id);
        let mut sizes = SnapshotSizes::default();
        for entry in image.read_dir().map_err(file_error("list", &image))? {
            let metadata = entry.and_then(|entry| entry.metadata());
            let metadata = metadata.map_err(file_error("look at", &image))?;
            let bytes = metadata.blocks() * BLOCK_BYTES;
            if metadata.nlink() > 1 {
                sizes.shared_bytes += bytes;
            } else {
                sizes.exclusive_bytes += bytes;
            }
        }
        Ok(sizes)
    }

    /// Removes a snapshot: it cannot be found any more when this returns. Its bytes go with it, or
    /// once nobody restores from them.
    ///
    /// # Errors
    /// There is none, or its record cannot be removed.
    pub fn remove(&self, id: &SnapshotId) -> Result<(), SnapshotError> {
        let record = self.record(id);
        {
            let mut inner = self.lock();
            if !inner.all.contains_key(id) {
                return Err(SnapshotError::Unknown(id.clone()));
            }
            durable::remove_file(&record).map_err(file_error("remove", &record))?;
            inner.all.remove(id);
            inner.condemned.insert(id.clone());
        }
        if let Err(error) = self.remove_condemned() {
            tracing::warn!(error = ?error, "bytes of a snapshot are left for the collector");
        }
        Ok(())
    }

    /// Removes the bytes of what has no record and no lease.
    fn remove_condemned(&self) -> Result<(), SnapshotError> {
        let due: Vec<SnapshotId> = {
            let inner = self.lock();
            let free = |id: &&SnapshotId| !inner.leases.contains_key(*id);
            inner.condemned.iter().filter(free).cloned().collect()
        };
        for id in due {
            let directory = self.directory(&id);
            match fs::remove_dir_all(&directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(file_error("remove", &directory)(error));
                }
                _ => drop(self.lock().condemned.remove(&id)),
            }
        }
        Ok(())
    }

    /// Removes what nothing refers to and whose retention is over, and bytes that were left.
    /// `referred` are the snapshots that living sandboxes stand on.
    ///
    /// # Errors
    /// A record cannot be read (then no snapshot is removed), or bytes cannot be removed.
    pub fn collect(
        &self,
        referred: &BTreeSet<SnapshotId>,
        retention: Retention,
        now: Timestamp,
    ) -> Result<Vec<SnapshotId>, SnapshotError> {
        self.remove_condemned()?;
        let count = self.lock().unreadable;
        if count > 0 {
            return Err(SnapshotError::Unreadable { count });
        }
        let due = |snapshot: &Arc<Snapshot>| retention::may_go(snapshot, referred, retention, now);
        let due: Vec<_> = self.list().into_iter().filter(due).collect();
        for snapshot in &due {
            self.remove(&snapshot.id)?;
        }
        Ok(due.iter().map(|snapshot| snapshot.id.clone()).collect())
    }

    /// Those that an earlier process took for copies it was making.
    #[must_use]
    pub fn temporary(&self) -> BTreeSet<SnapshotId> {
        let inner = self.lock();
        let temporary = |snapshot: &&Arc<Snapshot>| snapshot.kind == SnapshotKind::Temporary;
        let ids = inner.all.values().filter(temporary);
        ids.map(|snapshot| snapshot.id.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
