//! Network namespaces as files, and threads that go into them.
//!
//! A namespace lives as long as something refers to it; ours are held by a file each, so that they
//! survive this process:
//!
//! ```text
//!  /run/sandhold/<tag>/net/<sandbox>.router
//!                          <sandbox>.inner
//! ```
//!
//! The directory is a shared mount of its own, so that removing a file's mount reaches every copy
//! that another mount namespace may have of it. Namespaces belong to threads: whoever enters one
//! does so on a thread that ends afterwards.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    thread,
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};
use sandhold_types::SandboxId;
use tokio::sync::oneshot;

const NOTHING: Option<&str> = None;

/// A step that failed and why.
#[derive(Debug, thiserror::Error)]
#[error("could not {step}")]
pub(super) struct StepError {
    pub(super) step: &'static str,
    #[source]
    pub(super) source: Box<dyn std::error::Error + Send + Sync>,
}

/// Names the step of an error.
pub(super) fn at<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    step: &'static str,
) -> impl FnOnce(E) -> StepError {
    move |source| StepError {
        step,
        source: source.into(),
    }
}

/// The directory of a node's namespace files.
#[derive(Debug, Clone)]
pub(super) struct NamespaceFiles {
    directory: PathBuf,
}

impl NamespaceFiles {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    pub(super) fn router(&self, id: &SandboxId) -> PathBuf {
        self.directory.join(format!("{id}.router"))
    }

    pub(super) fn inner(&self, id: &SandboxId) -> PathBuf {
        self.directory.join(format!("{id}.inner"))
    }

    /// Makes the directory and its mount, if they are not there.
    pub(super) fn prepare(&self) -> io::Result<()> {
        fs::create_dir_all(&self.directory)?;
        let directory = fs::canonicalize(&self.directory)?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let target = directory.to_string_lossy();
        // The mount point is the fifth field.
        if mounts
            .lines()
            .any(|line| line.split(' ').nth(4) == Some(&*target))
        {
            return Ok(());
        }
        mount(
            Some(&directory),
            &directory,
            NOTHING,
            MsFlags::MS_BIND,
            NOTHING,
        )?;
        mount(NOTHING, &directory, NOTHING, MsFlags::MS_SHARED, NOTHING)?;
        Ok(())
    }

    /// Removes the directory and its mount, unless something is in it.
    pub(super) fn remove_if_empty(&self) {
        if fs::read_dir(&self.directory).is_ok_and(|mut entries| entries.next().is_none()) {
            let _ = umount2(&self.directory, MntFlags::MNT_DETACH);
            let _ = fs::remove_dir(&self.directory);
        }
    }

    /// Sandboxes of which a namespace is left.
    pub(super) fn list(&self) -> io::Result<BTreeSet<SandboxId>> {
        let mut found = BTreeSet::new();
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(found),
            Err(e) => return Err(e),
        };
        for entry in entries {
            let name = entry?.file_name();
            let id = name
                .to_str()
                .and_then(|n| n.split_once('.'))
                .map(|(id, _)| id.parse());
            if let Some(Ok(id)) = id {
                found.insert(id);
            }
        }
        Ok(found)
    }

    /// Lets go of a sandbox's namespaces; they may be gone.
    pub(super) fn remove(&self, id: &SandboxId) -> io::Result<()> {
        for path in [self.inner(id), self.router(id)] {
            match umount2(&path, MntFlags::MNT_DETACH) {
                // Not mounted: made half-way.
                Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
                Err(e) => return Err(e.into()),
            }
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Puts the calling thread into a new namespace and pins that to a file.
pub(super) fn create(path: &Path) -> io::Result<File> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    File::create_new(path)?;
    mount(
        Some("/proc/thread-self/ns/net"),
        path,
        NOTHING,
        MsFlags::MS_BIND,
        NOTHING,
    )?;
    File::open(path)
}

/// Puts the calling thread into a namespace.
pub(super) fn enter(namespace: &File) -> io::Result<()> {
    Ok(setns(namespace, CloneFlags::CLONE_NEWNET)?)
}

/// Runs work on a thread of its own that has a small runtime, so that it can change its namespace
/// without anybody else noticing.
pub(super) async fn on_own_thread<T, F>(work: F) -> Result<T, StepError>
where
    T: Send + 'static,
    F: AsyncFnOnce() -> Result<T, StepError> + Send + 'static,
{
    let (answer, answered) = oneshot::channel();
    let run = move || -> Result<T, StepError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(at("start a thread's runtime"))?;
        runtime.block_on(work())
    };
    let started = thread::Builder::new()
        .name("network".to_owned())
        .spawn(move || {
            // Nobody may be waiting any more; the work is done or undone all the same.
            let _ = answer.send(run());
        });
    started.map_err(at("start a thread"))?;
    answered.await.map_err(at("wait for a thread"))?
}
