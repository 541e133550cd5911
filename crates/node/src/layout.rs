//! Where a node keeps its files.
//!
//! ```text
//! <data>/lock                      held while a process owns the directory
//! <data>/node.json                 the node's tag, made once
//! <data>/sandboxes/<id>/record.json
//! <data>/sandboxes/<id>/life-<n>/  the directory of its life n, the engine's own
//! <data>/sandboxes/<id>/image-<n>/ memory and files of its life n, while it sleeps
//! <data>/snapshots/<id>/           captured moments, see `sandhold_images::Snapshots`
//! <data>/ended/<id>.json           what is remembered of one that is gone
//! ```

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use sandhold_engine::{InstanceId, InstanceRef};
use sandhold_types::{Entropy, Incarnation, SandboxId};

/// Why the node's directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// A file or directory could not be handled.
    #[error("could not {step} {path}")]
    File {
        /// What was being done.
        step: &'static str,
        /// To which file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another process owns the directory.
    #[error("{path} is in use by another sandhold; stop it or choose another --data-dir")]
    Locked {
        /// The data directory.
        path: PathBuf,
    },
    /// The node's own note cannot be understood.
    #[error("{path} is not a node description of this version")]
    BadNode {
        /// The file.
        path: PathBuf,
    },
}

#[derive(serde::Serialize, serde::Deserialize)]
struct NodeFile {
    version: u32,
    tag: String,
}

/// The node's directory, locked for as long as this value lives.
#[derive(Debug)]
pub struct Layout {
    root: PathBuf,
    tag: String,
    _lock: File,
}

/// How the directory of a life is called, before the life's number.
const LIFE_PREFIX: &str = "life-";
/// How the directory of a captured life is called, before the life's number.
pub(crate) const IMAGE_PREFIX: &str = "image-";
/// How many characters keep two nodes on one machine apart.
const TAG_LENGTH: usize = 6;

impl Layout {
    /// Opens or makes a node's directory and locks it.
    ///
    /// # Errors
    /// It is in use, or cannot be written.
    pub fn open(root: &Path, entropy: &dyn Entropy) -> Result<Self, LayoutError> {
        let at = |step, path: &Path| {
            let path = path.to_owned();
            move |source| LayoutError::File { step, path, source }
        };
        for directory in [root.to_owned(), root.join("sandboxes"), root.join("ended")] {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true).mode(0o700);
            builder.create(&directory).map_err(at("make", &directory))?;
        }
        let root = root.canonicalize().map_err(at("resolve", root))?;
        let lock_path = root.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&lock_path)
            .map_err(at("open", &lock_path))?;
        let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(&lock, exclusive)
            .map_err(|_| LayoutError::Locked { path: root.clone() })?;
        let tag = read_or_make_tag(&root.join("node.json"), entropy)?;
        Ok(Self {
            root,
            tag,
            _lock: lock,
        })
    }

    /// The node's tag: six lower-case characters in the names of all it makes on the machine.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The data directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the catalogue of snapshots lies: on the file system of the sandboxes, because they share
    /// files.
    #[must_use]
    pub fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    pub(crate) fn sandboxes(&self) -> PathBuf {
        self.root.join("sandboxes")
    }

    pub(crate) fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.as_str())
    }

    /// Marks a directory without a record as a blank's: engine processes without a guest.
    pub(crate) fn blank_mark(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join("blank")
    }

    pub(crate) fn record(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join("record.json")
    }

    /// Where life `incarnation` of the sandbox is captured to.
    pub(crate) fn image(&self, id: &SandboxId, incarnation: Incarnation) -> PathBuf {
        self.sandbox(id)
            .join(format!("{IMAGE_PREFIX}{incarnation}"))
    }

    pub(crate) fn instance(&self, id: &SandboxId, incarnation: Incarnation) -> InstanceRef {
        InstanceRef {
            id: InstanceId {
                sandbox: id.clone(),
                incarnation,
            },
            directory: self.sandbox(id).join(format!("{LIFE_PREFIX}{incarnation}")),
        }
    }

    /// The lives of a sandbox of which a directory is there.
    pub(crate) fn lives(&self, id: &SandboxId) -> io::Result<BTreeSet<Incarnation>> {
        let mut lives = BTreeSet::new();
        for entry in fs::read_dir(self.sandbox(id))? {
            let name = entry?.file_name();
            let number = name
                .to_str()
                .and_then(|name| name.strip_prefix(LIFE_PREFIX));
            lives.extend(
                number
                    .and_then(|number| number.parse().ok())
                    .map(Incarnation),
            );
        }
        Ok(lives)
    }

    pub(crate) fn ended(&self) -> PathBuf {
        self.root.join("ended")
    }
}

fn read_or_make_tag(path: &Path, entropy: &dyn Entropy) -> Result<String, LayoutError> {
    let bad = || LayoutError::BadNode {
        path: path.to_owned(),
    };
    match fs::read(path) {
        Ok(bytes) => {
            let node: NodeFile = serde_json::from_slice(&bytes).map_err(|_| bad())?;
            let fits = node.version == 1
                && node.tag.len() == TAG_LENGTH
                && node
                    .tag
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
            if fits { Ok(node.tag) } else { Err(bad()) }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let tag = SandboxId::generate(entropy).as_str()[..TAG_LENGTH].to_owned();
            let bytes = serde_json::to_vec(&NodeFile {
                version: 1,
                tag: tag.clone(),
            })
            .unwrap_or_default();
            write_durably(path, &bytes, Durability::Synced).map_err(|source| {
                LayoutError::File {
                    step: "write",
                    path: path.to_owned(),
                    source,
                }
            })?;
            Ok(tag)
        }
        Err(source) => Err(LayoutError::File {
            step: "read",
            path: path.to_owned(),
            source,
        }),
    }
}

/// Whether a write must survive a power cut, or only the death of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    /// Flushed to the disk before it counts.
    Synced,
    /// In the kernel's hands. Enough for a note about processes, which a power cut ends anyway.
    Process,
}

/// Writes a new file and renames it into place, so that a reader sees the old bytes or the new.
pub(crate) fn write_durably(path: &Path, bytes: &[u8], durability: Durability) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut options = OpenOptions::new();
    options.create(true).truncate(true).write(true).mode(0o600);
    let mut file = options.open(&temporary)?;
    file.write_all(bytes)?;
    if durability == Durability::Synced {
        file.sync_data()?;
    }
    fs::rename(&temporary, path)?;
    match durability {
        Durability::Synced => sync_name(path),
        Durability::Process => Ok(()),
    }
}

/// Flushes to the disk what was written with [`Durability::Process`].
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_data()?;
    sync_name(path)
}

/// Flushes the name of a file, which its directory holds.
fn sync_name(path: &Path) -> io::Result<()> {
    path.parent()
        .map_or(Ok(()), |parent| File::open(parent)?.sync_all())
}

#[cfg(test)]
mod tests {
    use sandhold_types::SystemEntropy;

    use super::*;

    #[test]
    fn one_process_owns_a_directory_and_its_tag_stays() {
        let directory = tempfile::tempdir().unwrap();
        let first = Layout::open(directory.path(), &SystemEntropy).unwrap();
        let tag = first.tag().to_owned();
        let second = Layout::open(directory.path(), &SystemEntropy);
        assert!(matches!(second, Err(LayoutError::Locked { .. })));
        drop(first);
        assert_eq!(
            Layout::open(directory.path(), &SystemEntropy)
                .unwrap()
                .tag(),
            tag
        );
    }

    #[test]
    fn a_foreign_node_file_is_refused_rather_than_guessed_at() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(
            directory.path().join("node.json"),
            br#"{"version":9,"tag":"abcdef"}"#,
        )
        .unwrap();
        let opened = Layout::open(directory.path(), &SystemEntropy);
        assert!(matches!(opened, Err(LayoutError::BadNode { .. })));
    }
}
