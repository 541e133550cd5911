//! One watcher: an inotify instance, the directories it covers, and the task that reads it.
//!
//! ```text
//!   kernel queue ── read ──> task ── translate, follow new directories ──> channel ──> client
//! ```
//!
//! If the client does not take events, the channel fills, the task stops reading, the kernel's
//! queue overflows, and the client is then told to look again ([`RESYNC_NAME`]). So memory is
//! bounded without losing the fact that something changed.
//!
//! In a recursive watch a new directory is watched as soon as it is seen; what was made in it
//! before is found by reading it, and told once.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    fs, io,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use sandhold_agent_proto::filesystem::{EventType, FilesystemEvent};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::mpsc,
};

use crate::{
    account::Account,
    filesystem::{
        entry::describe,
        watch_events::{Meaning, is_network_filesystem, meaning},
    },
    rights::with_rights,
    state::SandboxState,
};

/// Directories that one watcher covers at most.
pub const DIRECTORIES_MAX: usize = 8192;
/// Events that wait for a client.
pub const EVENTS_MAX: usize = 4096;
/// The event by this name means: events were lost, look again.
pub const RESYNC_NAME: &str = ".";
/// How much is read from the kernel at once.
const READ_BYTES: usize = 16 << 10;
/// Entries of a new directory that are told without the kernel's help.
const FOUND_MAX: usize = 4096;

/// What to watch.
#[derive(Debug, Clone)]
pub struct WatchPlan {
    /// The directory.
    pub path: PathBuf,
    /// Also everything below.
    pub recursive: bool,
    /// Describe the file with each event.
    pub include_entry: bool,
    /// Even where events are unreliable.
    pub allow_network_mounts: bool,
    /// With whose rights.
    pub account: Account,
}

/// Why there is no watcher.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The kernel's word.
    #[error(transparent)]
    Kernel(#[from] io::Error),
    /// Only directories are watched.
    #[error("the path is not a directory")]
    NotADirectory,
    /// Events would be unreliable.
    #[error("the path is on a network filesystem, where events are unreliable")]
    NetworkMount,
    /// Too many below it.
    #[error("more than {DIRECTORIES_MAX} directories to watch")]
    TooManyDirectories,
    /// The agent is stopping.
    #[error("the agent is stopping")]
    Stopping,
}

/// Starts a watcher. It lives until the receiver is dropped, or the directory is gone.
///
/// # Errors
/// The directory cannot be watched.
pub async fn start(
    plan: WatchPlan,
    state: Arc<SandboxState>,
) -> Result<mpsc::Receiver<FilesystemEvent>, WatchError> {
    let account = plan.account.clone();
    let covered = tokio::task::spawn_blocking(move || {
        with_rights(&account, || Covered::begin(plan)).map_err(WatchError::Kernel)?
    })
    .await
    .map_err(|_| WatchError::Stopping)??;
    let (sender, receiver) = mpsc::channel(EVENTS_MAX);
    tokio::spawn(run(covered, state, sender));
    Ok(receiver)
}

/// One event of the kernel, taken out of its buffer.
#[derive(Debug, Clone)]
struct KernelEvent {
    watch: i32,
    flags: ReadFlags,
    name: Vec<u8>,
}

async fn run(covered: Covered, state: Arc<SandboxState>, sender: mpsc::Sender<FilesystemEvent>) {
    let inotify = match covered.inotify.try_clone().and_then(|fd| {
        // SAFETY: an `OwnedFd` is valid while it lives, and always answers the same descriptor.
        Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE)? })
    }) {
        Ok(inotify) => inotify,
        Err(error) => {
            tracing::warn!(%error, "a watcher cannot be read");
            return;
        }
    };
    let mut covered = Some(covered);
    loop {
        if let Some(covered) = &mut covered {
            covered.settle();
        }
        let events = tokio::select! {
            () = sender.closed() => return,
            events = inotify.async_io(Interest::READABLE, read_events) => events,
        };
        let (Ok(events), Some(mut present)) = (events, covered.take()) else {
            return;
        };
        let state = Arc::clone(&state);
        let translated = tokio::task::spawn_blocking(move || {
            let account = present.plan.account.clone();
            let names = state.accounts.names();
            let told = with_rights(&account, || present.translate(&events, &names));
            (present, told)
        });
        let Ok((present, Ok(told))) = translated.await else {
            return;
        };
        let root_gone = present.root_gone;
        covered = Some(present);
        for event in told {
            if sender.send(event).await.is_err() {
                return;
            }
        }
        if root_gone {
            return;
        }
    }
}

fn read_events(fd: &OwnedFd) -> io::Result<Vec<KernelEvent>> {
    let mut buffer = [MaybeUninit::uninit(); READ_BYTES];
    let mut reader = inotify::Reader::new(fd, &mut buffer);
    let mut events = Vec::new();
    loop {
        match reader.next() {
            Ok(event) => events.push(KernelEvent {
                watch: event.wd(),
                flags: event.events(),
                name: event
                    .file_name()
                    .map(|name| name.to_bytes().to_vec())
                    .unwrap_or_default(),
            }),
            Err(rustix::io::Errno::WOULDBLOCK) if !events.is_empty() => return Ok(events),
            Err(error) => return Err(error.into()),
        }
        if reader.is_buffer_empty() {
            return Ok(events);
        }
    }
}

/// The directories of a watcher.
#[derive(Debug)]
struct Covered {
    plan: WatchPlan,
    inotify: OwnedFd,
    /// The directory of each kernel watch.
    directories: HashMap<i32, PathBuf>,
    root: i32,
    root_gone: bool,
    /// Files that were found by reading a new directory, and whose creation the kernel may yet
    /// report.
    already_told: HashSet<PathBuf>,
}

impl Covered {
    fn begin(plan: WatchPlan) -> Result<Self, WatchError> {
        if !fs::metadata(&plan.path)?.is_dir() {
            return Err(WatchError::NotADirectory);
        }
        let filesystem = rustix::fs::statfs(&plan.path).map_err(io::Error::from)?;
        if !plan.allow_network_mounts && is_network_filesystem(filesystem.f_type) {
            return Err(WatchError::NetworkMount);
        }
        let inotify =
            inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(io::Error::from)?;
        let mut covered = Self {
            inotify,
            directories: HashMap::new(),
            root: -1,
            root_gone: false,
            already_told: HashSet::new(),
            plan,
        };
        let path = covered.plan.path.clone();
        covered.root = covered.add(&path)?;
        if covered.plan.recursive {
            for directory in directories_below(&path) {
                covered.add_if_there(&directory)?;
            }
        }
        Ok(covered)
    }

    fn add(&mut self, directory: &Path) -> Result<i32, WatchError> {
        if self.directories.len() >= DIRECTORIES_MAX {
            return Err(WatchError::TooManyDirectories);
        }
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        let watch = inotify::add_watch(&self.inotify, directory, flags).map_err(io::Error::from)?;
        self.directories.insert(watch, directory.to_path_buf());
        Ok(watch)
    }

    /// Directories vanish, and some may not be read; that is no failure of the whole watch.
    fn add_if_there(&mut self, directory: &Path) -> Result<(), WatchError> {
        match self.add(directory) {
            Err(WatchError::Kernel(error)) if error.raw_os_error() != Some(libc::ENOSPC) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Once the kernel's queue is empty, no event is left from before a directory was read.
    fn settle(&mut self) {
        if rustix::io::ioctl_fionread(&self.inotify).is_ok_and(|bytes| bytes == 0) {
            self.already_told.clear();
        }
    }

    fn translate(
        &mut self,
        events: &[KernelEvent],
        names: &crate::account::OwnerNames,
    ) -> Vec<FilesystemEvent> {
        let mut told = Told {
            plan: self.plan.clone(),
            names: names.clone(),
            events: Vec::new(),
        };
        for event in events {
            match meaning(event.flags) {
                Meaning::Ignore => {}
                Meaning::Forget => {
                    self.directories.remove(&event.watch);
                }
                Meaning::RootGone if event.watch == self.root => {
                    self.root_gone = true;
                    told.push_named(RESYNC_NAME, EventType::EVENT_TYPE_REMOVE);
                }
                // The parent of a directory below tells its end.
                Meaning::RootGone => {}
                Meaning::Overflow => self.resync(&mut told),
                Meaning::Tell(kind) => self.tell(event, kind, &mut told),
            }
        }
        told.events
    }

    fn tell(&mut self, event: &KernelEvent, kind: EventType, told: &mut Told) {
        let Some(directory) = self.directories.get(&event.watch) else {
            return;
        };
        if event.name.is_empty() {
            // The attributes of a watched directory: its parent tells, or nobody asked.
            return;
        }
        let path = directory.join(OsStr::from_bytes(&event.name));
        let is_directory = event.flags.contains(ReadFlags::ISDIR);
        let created = event.flags.contains(ReadFlags::CREATE);
        let told_before = self.already_told.remove(&path);
        if created && told_before {
            return;
        }
        told.push(&path, kind);
        if !(self.plan.recursive && is_directory) {
            return;
        }
        match kind {
            EventType::EVENT_TYPE_CREATE => self.follow(&path, told),
            EventType::EVENT_TYPE_RENAME => self.forget_tree(&path),
            _ => {}
        }
    }

    /// Watches a directory that is new here and tells what is in it already.
    fn follow(&mut self, directory: &Path, told: &mut Told) {
        self.cover_tree(directory, told);
        let mut pending = vec![directory.to_path_buf()];
        while let Some(directory) = pending.pop() {
            let Ok(children) = fs::read_dir(&directory) else {
                continue;
            };
            for child in children.filter_map(Result::ok) {
                if self.already_told.len() >= FOUND_MAX {
                    told.push_named(RESYNC_NAME, EventType::EVENT_TYPE_WRITE);
                    return;
                }
                let path = child.path();
                if self.already_told.insert(path.clone()) {
                    told.push(&path, EventType::EVENT_TYPE_CREATE);
                }
                if child.file_type().is_ok_and(|kind| kind.is_dir()) {
                    pending.push(path);
                }
            }
        }
    }

    /// Watches a directory and all below it.
    fn cover_tree(&mut self, directory: &Path, told: &mut Told) {
        let mut all = vec![directory.to_path_buf()];
        all.extend(directories_below(directory));
        for directory in all {
            if self.add_if_there(&directory).is_err() {
                told.push_named(RESYNC_NAME, EventType::EVENT_TYPE_WRITE);
                return;
            }
        }
    }

    /// A directory has left: its watches would go on under a wrong name.
    fn forget_tree(&mut self, directory: &Path) {
        let inotify = &self.inotify;
        self.directories.retain(|watch, path| {
            let gone = path.starts_with(directory);
            if gone {
                // It may be gone already.
                let _ = inotify::remove_watch(inotify, *watch);
            }
            !gone
        });
    }

    /// Events were lost: cover what is new and tell the client to look again.
    fn resync(&mut self, told: &mut Told) {
        self.already_told.clear();
        let root = self.plan.path.clone();
        if self.plan.recursive {
            self.cover_tree(&root, told);
        }
        told.push_named(RESYNC_NAME, EventType::EVENT_TYPE_WRITE);
    }
}

/// What goes to the client.
struct Told {
    plan: WatchPlan,
    names: crate::account::OwnerNames,
    events: Vec<FilesystemEvent>,
}

impl Told {
    fn push(&mut self, path: &Path, kind: EventType) {
        let name = path.strip_prefix(&self.plan.path).unwrap_or(path);
        let gone = matches!(
            kind,
            EventType::EVENT_TYPE_REMOVE | EventType::EVENT_TYPE_RENAME
        );
        let entry = if self.plan.include_entry && !gone {
            describe(path, &self.names).ok()
        } else {
            None
        };
        self.events.push(FilesystemEvent {
            name: name.to_string_lossy().into_owned(),
            r#type: kind.into(),
            entry: entry.into(),
        });
    }

    fn push_named(&mut self, name: &str, kind: EventType) {
        self.events.push(FilesystemEvent {
            name: name.to_owned(),
            r#type: kind.into(),
            entry: None.into(),
        });
    }
}

/// All directories below this one, itself not included, links not followed. One more than may be
/// watched is enough.
fn directories_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![directory.to_path_buf()];
    while let Some(directory) = pending.pop() {
        let Ok(children) = fs::read_dir(&directory) else {
            continue;
        };
        for child in children.filter_map(Result::ok) {
            if found.len() > DIRECTORIES_MAX {
                return found;
            }
            if child.file_type().is_ok_and(|kind| kind.is_dir()) {
                found.push(child.path());
                pending.push(child.path());
            }
        }
    }
    found
}
