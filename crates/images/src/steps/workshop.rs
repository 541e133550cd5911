//! The tree that steps work on, and making a layer of what became of it.
//!
//! ```text
//!   layer ──copy──▶ workshop            commit: a file that is as it was ──link──▶ its layer
//!                      │ step                   one that is not ─────────copy──▶ the new layer
//!                      ▼                        a name that is gone ─────────────▶ not there
//!                   workshop
//! ```
//!
//! Owns: the copy, and for each of its files from which file of a layer it came. A file is as it was
//! if it is still the same one (by its number) and nothing of it was changed since the copy was made
//! (by its change time, which no guest can set).

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, lchown, symlink},
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::process::Command;

use super::{StepError, blocking, file_error};
use crate::program;

/// How much the files of a template may hold, in bytes on disk.
const BYTES_MAX: u64 = 64 << 30;
/// How many files, folders and links there may be.
const ENTRIES_MAX: u64 = 1_000_000;
/// How deep folders may be nested.
const DEPTH_MAX: usize = 256;
/// How many bytes of names are given to one `cp`.
const BATCH_BYTES: usize = 64 << 10;
/// Longer than the clock of any file system stands still.
const TICK: Duration = Duration::from_millis(20);
/// What belongs to the agent and the sandbox, and to no layer.
const LEFT_OUT: [&str; 3] = [".sandhold", "run/sandhold", PLACEHOLDER];
/// What lies in these is covered in every sandbox, whatever a root has there.
const COVERED: [&str; 3] = ["dev", "proc", "sys"];
/// Keeps `/tmp` from being empty: the engine would cover an empty one with memory, and what a step
/// writes there would be gone with it.
const PLACEHOLDER: &str = "tmp/.sandhold-step";

/// A tree that steps work on.
#[derive(Debug)]
pub(crate) struct Workshop {
    root: PathBuf,
    origins: HashMap<u64, PathBuf>,
    /// Files changed before this are as they were.
    since: (i64, i64),
}

impl Workshop {
    /// Copies the tree `layer` to the empty place `root`.
    ///
    /// # Errors
    /// Something cannot be read, or the disk is full.
    pub(crate) async fn open(layer: &Path, root: &Path) -> Result<Self, StepError> {
        crate::root_fs::copy_directory(layer, root)
            .await
            .map_err(|error| StepError::Copy(crate::image::with_causes(&error)))?;
        let (layer, root) = (layer.to_owned(), root.to_owned());
        blocking(move || {
            let mut workshop = Self {
                root,
                origins: HashMap::new(),
                since: (0, 0),
            };
            workshop.note_origins(&layer)?;
            workshop.mark()?;
            Ok(workshop)
        })
        .await
    }

    /// The tree.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Makes the tree fit for a sandbox that runs in it.
    pub(crate) fn prepare_sandbox(&self) -> Result<(), StepError> {
        let root = crate::layers::Confined::open(&self.root);
        root.and_then(|root| root.replace_file(Path::new(PLACEHOLDER), b"", 0o600))
            .map_err(file_error("prepare the root for a command"))
    }

    /// Makes a layer of the tree in the empty folder `into`, which will be at `place`. Everything
    /// that ran in the tree is gone.
    ///
    /// # Errors
    /// There is more than a template may hold, or the disk failed.
    pub(crate) async fn commit(mut self, into: &Path, place: &Path) -> Result<Self, StepError> {
        let (staged, final_place) = (into.to_owned(), place.to_owned());
        let (workshop, plan) = blocking(move || {
            let mut plan = Plan::default();
            plan.visit(&self, Path::new(""), &staged, 0)?;
            Ok((self, plan))
        })
        .await?;
        self = workshop;
        for batch in batches(&plan.copied) {
            let mut command = Command::new("cp");
            command
                .args([
                    "--archive",
                    "--reflink=auto",
                    "--parents",
                    "--target-directory",
                ])
                .arg(into)
                .arg("--")
                .args(batch)
                .current_dir(&self.root);
            program::run("cp", &mut command, |_| {})
                .await
                .map_err(|error| StepError::Copy(error.to_string()))?;
        }
        let staged = into.to_owned();
        blocking(move || {
            plan.finish(&self.root, &staged)?;
            for (inode, name) in plan.first_names {
                self.origins.insert(inode, final_place.join(name));
            }
            self.mark()?;
            Ok(self)
        })
        .await
    }

    fn note_origins(&mut self, layer: &Path) -> Result<(), StepError> {
        let mut open = vec![PathBuf::new()];
        while let Some(folder) = open.pop() {
            for name in names_in(&self.root.join(&folder))? {
                let path = folder.join(name);
                let metadata = look(&self.root.join(&path))?;
                if metadata.is_dir() {
                    open.push(path);
                } else if metadata.is_file() {
                    self.origins.insert(metadata.ino(), layer.join(&path));
                }
            }
        }
        Ok(())
    }

    /// From now on a change is a change.
    fn mark(&mut self) -> Result<(), StepError> {
        // The clock of the file system must have moved on since the last write of ours.
        std::thread::sleep(TICK);
        let mark = self.root.with_extension("mark");
        let marked = || {
            let file = File::create(&mark)?;
            file.set_len(1)?;
            file.metadata()
        };
        let metadata = marked().map_err(file_error("look at the clock of the file system"))?;
        self.since = (metadata.ctime(), metadata.ctime_nsec());
        Ok(())
    }

    /// The file of a layer that this one is still the same as.
    fn origin(&self, metadata: &fs::Metadata) -> Option<&Path> {
        let unchanged = (metadata.ctime(), metadata.ctime_nsec()) < self.since;
        let origin = self.origins.get(&metadata.ino()).filter(|_| unchanged)?;
        Some(origin)
    }
}

/// What a layer is made of.
#[derive(Debug, Default)]
struct Plan {
    entries: u64,
    bytes: u64,
    /// Folders, outermost first.
    folders: Vec<PathBuf>,
    /// What is copied, by its first name.
    copied: Vec<PathBuf>,
    /// Further names: the name, and the one that it is a name of.
    links: Vec<(PathBuf, PathBuf)>,
    /// The name of each file by its number in the workshop.
    first_names: HashMap<u64, PathBuf>,
    seen: HashSet<u64>,
}

impl Plan {
    /// Makes folders, links what is as it was, and notes the rest.
    fn visit(
        &mut self,
        workshop: &Workshop,
        folder: &Path,
        into: &Path,
        depth: usize,
    ) -> Result<(), StepError> {
        let too_large = || StepError::TooLarge {
            bytes_max: BYTES_MAX,
            entries_max: ENTRIES_MAX,
        };
        if depth > DEPTH_MAX {
            return Err(too_large());
        }
        for name in names_in(&workshop.root.join(folder))? {
            let path = folder.join(name);
            let is_covered = COVERED.iter().any(|covered| Path::new(covered) == folder);
            if is_covered || LEFT_OUT.iter().any(|left_out| Path::new(left_out) == path) {
                continue;
            }
            let metadata = look(&workshop.root.join(&path))?;
            self.entries += 1;
            if metadata.is_dir() || self.seen.insert(metadata.ino()) {
                self.bytes += metadata.blocks() * 512;
            }
            if self.entries > ENTRIES_MAX || self.bytes > BYTES_MAX {
                return Err(too_large());
            }
            self.visit_one(workshop, path, &metadata, into, depth)?;
        }
        Ok(())
    }

    fn visit_one(
        &mut self,
        workshop: &Workshop,
        path: PathBuf,
        metadata: &fs::Metadata,
        into: &Path,
        depth: usize,
    ) -> Result<(), StepError> {
        let kind = metadata.file_type();
        let target = into.join(&path);
        if kind.is_dir() {
            fs::create_dir(&target).map_err(file_error(format!("make {}", path.display())))?;
            self.folders.push(path.clone());
            return self.visit(workshop, &path, into, depth + 1);
        }
        if kind.is_symlink() {
            let copied = || {
                symlink(fs::read_link(workshop.root.join(&path))?, &target)?;
                lchown(&target, Some(metadata.uid()), Some(metadata.gid()))
            };
            return copied().map_err(file_error(format!("copy the link {}", path.display())));
        }
        if kind.is_socket() || kind.is_fifo() {
            // They mean something to a process that is gone.
            return Ok(());
        }
        if !kind.is_file() {
            let text = format!("{} is a device, which no template can hold", path.display());
            return Err(StepError::Copy(text));
        }
        if let Some(origin) = workshop.origin(metadata) {
            match fs::hard_link(origin, &target) {
                // A file can have so many names only; then it is copied.
                Err(error) if error.kind() == io::ErrorKind::TooManyLinks => {}
                linked => return linked.map_err(file_error(format!("link {}", path.display()))),
            }
        }
        match self.first_names.get(&metadata.ino()) {
            Some(first) => self.links.push((path, first.clone())),
            None => {
                self.first_names.insert(metadata.ino(), path.clone());
                self.copied.push(path);
            }
        }
        Ok(())
    }

    /// What can be done only when all files are there.
    fn finish(&self, root: &Path, into: &Path) -> Result<(), StepError> {
        for (name, first) in &self.links {
            fs::hard_link(into.join(first), into.join(name))
                .map_err(file_error(format!("link {}", name.display())))?;
        }
        let root_itself = std::iter::once(Path::new(""));
        let folders = self.folders.iter().rev().map(PathBuf::as_path);
        for path in folders.chain(root_itself) {
            let finish = || {
                let metadata = fs::symlink_metadata(root.join(path))?;
                let target = into.join(path);
                lchown(&target, Some(metadata.uid()), Some(metadata.gid()))?;
                let mode = metadata.permissions().mode() & 0o7777;
                fs::set_permissions(&target, fs::Permissions::from_mode(mode))?;
                let times = fs::FileTimes::new()
                    .set_accessed(metadata.accessed()?)
                    .set_modified(metadata.modified()?);
                File::open(&target)?.set_times(times)
            };
            finish().map_err(file_error(format!("finish the folder /{}", path.display())))?;
        }
        Ok(())
    }
}

/// Lists of names that fit on a command line.
fn batches(paths: &[PathBuf]) -> Vec<&[PathBuf]> {
    let mut batches = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (index, path) in paths.iter().enumerate() {
        let length = path.as_os_str().len() + 1;
        if bytes + length > BATCH_BYTES && index > start {
            batches.push(&paths[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes += length;
    }
    if start < paths.len() {
        batches.push(&paths[start..]);
    }
    batches
}

fn names_in(folder: &Path) -> Result<Vec<OsString>, StepError> {
    let list = || {
        let entries = fs::read_dir(folder)?;
        let names = entries.map(|entry| Ok(entry?.file_name()));
        let mut names: Vec<OsString> = names.collect::<io::Result<_>>()?;
        names.sort();
        Ok(names)
    };
    list().map_err(file_error(format!("list {}", folder.display())))
}

fn look(path: &Path) -> Result<fs::Metadata, StepError> {
    fs::symlink_metadata(path).map_err(file_error(format!("look at {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct World {
        folder: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let world = Self { folder };
            world.write("one/a", "a");
            world.write("one/dir/b", "b");
            world.write("one/dir/c", "c");
            fs::hard_link(world.path("one/a"), world.path("one/twin")).unwrap();
            symlink("/a", world.path("one/link")).unwrap();
            world
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        async fn open(&self) -> Workshop {
            fs::create_dir(self.path("work")).unwrap();
            Workshop::open(&self.path("one"), &self.path("work"))
                .await
                .unwrap()
        }

        async fn commit(&self, workshop: Workshop, name: &str) -> Workshop {
            fs::create_dir(self.path(name)).unwrap();
            workshop
                .commit(&self.path(name), &self.path(name))
                .await
                .unwrap()
        }

        fn inode(&self, name: &str) -> u64 {
            fs::symlink_metadata(self.path(name)).unwrap().ino()
        }
    }

    #[tokio::test]
    async fn what_is_as_it_was_is_shared_and_what_is_gone_is_not_there() {
        // R-P5
        let world = World::new();
        let workshop = world.open().await;
        world.write("work/dir/b", "B");
        world.write("work/new", "n");
        fs::remove_file(world.path("work/dir/c")).unwrap();
        let workshop = world.commit(workshop, "two").await;
        assert_eq!(fs::read_to_string(world.path("two/dir/b")).unwrap(), "B");
        assert_eq!(fs::read_to_string(world.path("one/dir/b")).unwrap(), "b");
        assert!(!world.path("two/dir/c").exists());
        assert_eq!(world.inode("two/a"), world.inode("one/a"));
        assert_eq!(world.inode("two/twin"), world.inode("one/a"));
        assert_eq!(
            fs::read_link(world.path("two/link")).unwrap(),
            Path::new("/a")
        );
        // The next layer shares what the last one made, and none shares with the workshop.
        world.write("work/third", "3");
        world.commit(workshop, "three").await;
        assert_eq!(world.inode("three/new"), world.inode("two/new"));
        assert_eq!(world.inode("three/dir/b"), world.inode("two/dir/b"));
        assert_ne!(world.inode("three/new"), world.inode("work/new"));
    }

    #[tokio::test]
    async fn a_change_is_seen_however_it_is_hidden() {
        // R-P5
        let world = World::new();
        let workshop = world.open().await;
        let file = File::options()
            .write(true)
            .open(world.path("work/dir/b"))
            .unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        io::Write::write_all(&mut &file, b"X").unwrap();
        file.set_modified(modified).unwrap();
        // Folders that changed places, and a mode.
        fs::rename(world.path("work/dir"), world.path("work/other")).unwrap();
        fs::create_dir(world.path("work/dir")).unwrap();
        fs::rename(world.path("work/a"), world.path("work/dir/b")).unwrap();
        let twin = world.path("work/twin");
        fs::set_permissions(&twin, fs::Permissions::from_mode(0o600)).unwrap();
        world.commit(workshop, "two").await;
        let text = |name: &str| fs::read_to_string(world.path(name)).unwrap();
        assert_eq!(
            (text("two/other/b"), text("two/other/c")),
            ("X".into(), "c".into())
        );
        assert_eq!(text("two/dir/b"), "a");
        // Still one file with two names.
        assert_eq!(world.inode("two/dir/b"), world.inode("two/twin"));
        assert_ne!(world.inode("two/twin"), world.inode("one/twin"));
        let mode = |name: &str| fs::metadata(world.path(name)).unwrap().mode() & 0o777;
        assert_eq!((mode("two/twin"), mode("one/twin")), (0o600, 0o644));
    }

    #[tokio::test]
    async fn what_belongs_to_the_sandbox_is_in_no_layer() {
        let world = World::new();
        let workshop = world.open().await;
        workshop.prepare_sandbox().unwrap();
        world.write("work/.sandhold/agent", "x");
        world.write("work/run/sandhold/socket", "x");
        world.write("work/tmp/kept", "x");
        world.write("work/dev/console", "x");
        let _socket = std::os::unix::net::UnixListener::bind(world.path("work/socket")).unwrap();
        world.commit(workshop, "two").await;
        assert!(world.path("two/tmp/kept").exists());
        for name in [
            "two/dev/console",
            "two/.sandhold",
            "two/run/sandhold",
            "two/tmp/.sandhold-step",
            "two/socket",
        ] {
            assert!(!world.path(name).exists(), "{name}");
        }
    }

    #[test]
    fn long_lists_are_cut_into_batches() {
        let paths: Vec<PathBuf> = (0..3000).map(|n| format!("{n:0100}").into()).collect();
        let cut = batches(&paths);
        assert!(cut.len() > 1);
        assert_eq!(cut.iter().map(|batch| batch.len()).sum::<usize>(), 3000);
        assert!(batches(&[]).is_empty());
    }
}
