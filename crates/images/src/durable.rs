//! Writing files so that a crash leaves either the old one or the new one, never a part.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use rustix::fs::{FlockOperation, flock};

/// Records may hold the control token of a memory image.
const RECORD_MODE: u32 = 0o600;

/// Replaces the file `path` by `bytes`.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(RECORD_MODE)
        .open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    sync_parent(path)
}

/// Removes a file; one that is not there is no error.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => sync_parent(path),
    }
}

/// Makes everything that was written below `directory` durable and moves it to `place`.
pub(crate) fn publish_directory(directory: &Path, place: &Path) -> io::Result<()> {
    // One call for tens of thousands of files, which would take minutes one by one.
    rustix::fs::syncfs(File::open(directory)?)?;
    fs::rename(directory, place)?;
    sync_parent(place)
}

/// Makes a directory of files durable, and its name, file by file: a sync of the whole file system
/// would wait for what others write.
///
/// # Errors
/// A file cannot be read or written back.
pub fn sync_image(directory: &Path) -> io::Result<()> {
    for entry in directory.read_dir()? {
        File::open(entry?.path())?.sync_data()?;
    }
    File::open(directory)?.sync_all()?;
    sync_parent(directory)
}

/// Makes the name `path` durable.
pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

/// Makes a directory and what leads to it.
pub(crate) fn make_directory(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)
}

/// A lock that ends with the process that holds it, however that ends.
#[derive(Debug)]
pub(crate) struct FileLock {
    /// Kept open, because closing it gives the lock back.
    _file: File,
}

/// Whether to wait for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Until it is free.
    ForIt,
    /// Not at all.
    Never,
}

impl FileLock {
    /// Takes the lock `path` for this process alone; `None` if it is held and not waited for.
    pub(crate) fn take(path: &Path, wait: Wait) -> io::Result<Option<Self>> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let operation = match wait {
            Wait::ForIt => FlockOperation::LockExclusive,
            Wait::Never => FlockOperation::NonBlockingLockExclusive,
        };
        lock(file, operation)
    }

    /// Takes part in the lock on an existing file that may lie where nothing can be written.
    /// `None` if somebody has it alone.
    pub(crate) fn share(path: &Path) -> io::Result<Option<Self>> {
        lock(File::open(path)?, FlockOperation::NonBlockingLockShared)
    }

    /// Takes the lock on an existing file alone; `None` if anybody has it.
    pub(crate) fn take_existing(path: &Path) -> io::Result<Option<Self>> {
        lock(File::open(path)?, FlockOperation::NonBlockingLockExclusive)
    }
}

fn lock(file: File, operation: FlockOperation) -> io::Result<Option<FileLock>> {
    loop {
        match flock(&file, operation) {
            Ok(()) => return Ok(Some(FileLock { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
