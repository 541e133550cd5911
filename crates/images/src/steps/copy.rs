//! COPY and WORKDIR: files of an archive that a client sent, into the root. No sandbox is needed:
//! nothing of the root is run, and every path is resolved inside it.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Seek},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, FileType, Gid, Mode, Uid};

use super::{StepError, accounts::owner_of, file_error};
use crate::layers::{
    Budget, Confined, Owners, Whiteouts, confined, decompressed, path_in_root, unpack,
};

/// How many files an archive may hold.
const ENTRIES_MAX: u64 = 200_000;
/// How many bytes they may hold together.
const BYTES_MAX: u64 = 16 << 30;

/// What is copied where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order<'a> {
    pub(crate) archive: &'a Path,
    pub(crate) source: &'a str,
    /// Absolute; a `/` at the end says that it is a folder.
    pub(crate) destination: &'a str,
    pub(crate) owner: &'a str,
    pub(crate) mode: Option<u32>,
}

/// Unpacks an archive into the empty folder `scratch` and moves what `source` names of it into the
/// root. A folder's content is copied into the destination; a file becomes the destination, or goes
/// into it if that is a folder; several go into it. Blocks.
///
/// # Errors
/// The archive is refused or does not hold it, or something cannot be put there.
pub(crate) fn copy(root: &Path, scratch: &Path, order: &Order<'_>) -> Result<(), StepError> {
    let opened = |path: &Path| Confined::open(path).map_err(file_error("open the root"));
    let (root, staged) = (opened(root)?, opened(scratch)?);
    unpack_archive(order.archive, &staged)?;
    let owner = owner_of(&root, order.owner)?;
    let items = items(&staged, order.source)?;
    let mut mover = Mover {
        root: &root,
        owner,
        mode: order.mode,
    };
    let moved = mover.put_all(&items, order.destination);
    moved.map_err(file_error(format!("copy '{}'", order.source)))
}

/// Makes a working directory, if it is missing, for `owner`.
///
/// # Errors
/// It cannot be made.
pub(crate) fn make_workdir(root: &Path, path: &str, owner: &str) -> Result<(), StepError> {
    let root = Confined::open(root).map_err(file_error("open the root"))?;
    let owner = owner_of(&root, owner)?;
    let mover = Mover {
        root: &root,
        owner,
        mode: None,
    };
    let path = in_root(path)?;
    let made = mover.make_folder(&path);
    made.map(|_| ())
        .map_err(file_error(format!("make the folder /{}", path.display())))
}

fn in_root(path: &str) -> Result<PathBuf, StepError> {
    // `..` is resolved as text, as a shell's `cd` does it.
    let mut plain = PathBuf::new();
    for part in path.split('/') {
        match part {
            ".." => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    let bytes = plain.as_os_str().as_bytes();
    path_in_root(bytes).map_err(|rule| StepError::Copy(format!("the path '{path}' {rule}")))
}

fn unpack_archive(archive: &Path, staged: &Confined) -> Result<(), StepError> {
    let refused =
        |text: String| StepError::Copy(format!("the uploaded files were refused: {text}"));
    let mut file = File::open(archive).map_err(file_error("open the uploaded files"))?;
    // An archive of nothing is sent by clients whose pattern matched nothing.
    let length = file
        .seek(io::SeekFrom::End(0))
        .and_then(|n| file.rewind().map(|()| n));
    if length.map_err(file_error("read the uploaded files"))? == 0 {
        return Ok(());
    }
    let bytes: Box<dyn Read> = decompressed(file).map_err(|e| refused(e.to_string()))?;
    let mut budget = Budget::new(ENTRIES_MAX, BYTES_MAX);
    unpack(bytes, staged, &mut budget, Owners::Root, Whiteouts::Plain)
        .map_err(|error| refused(crate::image::with_causes(&error)))
}

/// Something of the archive: the folder that it is in, and its name.
struct Item {
    folder: OwnedFd,
    name: OsString,
}

/// What `source` names: one thing, or all that a pattern matches.
fn items(staged: &Confined, source: &str) -> Result<Vec<Item>, StepError> {
    let missing = || StepError::Copy(format!("the uploaded files hold no '{source}'"));
    let path = in_root(source)?;
    let literal: PathBuf = path
        .components()
        .take_while(|part| !is_pattern(part.as_os_str()))
        .collect();
    let read = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => missing(),
        _ => file_error("read the uploaded files")(error),
    };
    if literal != path || path.as_os_str().is_empty() {
        // The client has matched the pattern already: the archive holds nothing else.
        let folder = staged.folder(&literal).map_err(read)?;
        let names = confined::names(&folder).map_err(read)?;
        let items: Result<Vec<Item>, io::Error> = names
            .into_iter()
            .map(|name| {
                Ok(Item {
                    folder: staged.folder(&literal)?,
                    name,
                })
            })
            .collect();
        return items
            .map_err(read)
            .and_then(|items| match items.is_empty() {
                true => Err(missing()),
                false => Ok(items),
            });
    }
    let name = path.file_name().ok_or_else(missing)?;
    let folder = staged.folder(path.parent().unwrap_or_else(|| Path::new("")));
    let folder = folder.map_err(read)?;
    match confined::file_type(&folder, name).map_err(read)? {
        None => Err(missing()),
        Some(_) => Ok(vec![Item {
            folder,
            name: name.to_owned(),
        }]),
    }
}

fn is_pattern(name: &OsStr) -> bool {
    name.as_bytes()
        .iter()
        .any(|b| matches!(b, b'*' | b'?' | b'['))
}

struct Mover<'a> {
    root: &'a Confined,
    owner: (Uid, Gid),
    mode: Option<u32>,
}

impl Mover<'_> {
    fn put_all(&mut self, items: &[Item], destination: &str) -> io::Result<()> {
        let invalid = |error: StepError| io::Error::other(error.to_string());
        let path = in_root(destination).map_err(invalid)?;
        let is_folder = destination.ends_with('/')
            || items.len() > 1
            || path.as_os_str().is_empty()
            || self.root.folder(&path).is_ok();
        for item in items {
            let kind = confined::file_type(&item.folder, &item.name)?;
            if kind == Some(FileType::Directory) && items.len() == 1 {
                let inner = confined::enter(&item.folder, &item.name)?;
                let target = self.make_folder(&path)?;
                for name in confined::names(&inner)? {
                    self.put(&inner, &name, &target, &name)?;
                }
            } else if is_folder {
                let target = self.make_folder(&path)?;
                self.put(&item.folder, &item.name, &target, &item.name)?;
            } else {
                let parent = path.parent().unwrap_or_else(|| Path::new(""));
                let target = self.make_folder(parent)?;
                let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
                self.put(&item.folder, &item.name, &target, name)?;
            }
        }
        Ok(())
    }

    /// A folder of the root; what is missing of it is made for the owner.
    fn make_folder(&self, path: &Path) -> io::Result<OwnedFd> {
        let (uid, gid) = self.owner;
        let mut failed = None;
        let folder = self.root.make_folder(path, |folder, name| {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            if let Err(error) = rustix::fs::chownat(folder, name, Some(uid), Some(gid), flags) {
                failed = Some(error);
            }
        })?;
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(folder),
        }
    }

    /// Moves a thing; a folder is merged into one that is there.
    fn put(
        &mut self,
        from: &OwnedFd,
        name: &OsStr,
        to: &OwnedFd,
        new_name: &OsStr,
    ) -> io::Result<()> {
        let (uid, gid) = self.owner;
        let kind = confined::file_type(from, name)?;
        let there = confined::file_type(to, new_name)?;
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::chownat(from, name, Some(uid), Some(gid), flags)?;
        self.set_mode(from, name, kind)?;
        if kind != Some(FileType::Directory) {
            if there.is_some() {
                confined::remove(to, new_name)?;
            }
            return Ok(rustix::fs::renameat(from, name, to, new_name)?);
        }
        match there {
            Some(FileType::Directory) => {}
            Some(_) => {
                confined::remove(to, new_name)?;
                self.root.make_in(to, new_name)?;
            }
            None => self.root.make_in(to, new_name)?,
        }
        let (inner, target) = (confined::enter(from, name)?, confined::enter(to, new_name)?);
        if there != Some(FileType::Directory) {
            let mode = rustix::fs::fstat(&inner)?.st_mode;
            rustix::fs::fchown(&target, Some(uid), Some(gid))?;
            rustix::fs::fchmod(&target, Mode::from_raw_mode(mode & 0o7777))?;
        }
        for child in confined::names(&inner)? {
            self.put(&inner, &child, &target, &child)?;
        }
        Ok(())
    }

    fn set_mode(&self, folder: &OwnedFd, name: &OsStr, kind: Option<FileType>) -> io::Result<()> {
        let Some(mode) = self.mode else {
            return Ok(());
        };
        let mode = match kind {
            Some(FileType::Symlink) | None => return Ok(()),
            // Who may read a folder may enter it.
            Some(FileType::Directory) => mode | ((mode & 0o444) >> 2),
            Some(_) => mode,
        };
        let mode = Mode::from_raw_mode(mode & 0o7777);
        Ok(rustix::fs::chmodat(folder, name, mode, AtFlags::empty())?)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
    };

    use super::*;

    struct World {
        folder: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join("root/etc")).unwrap();
            fs::write(folder.path().join("root/etc/passwd"), "me:x:7:8::/:\n").unwrap();
            Self { folder }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join("root").join(name)
        }

        fn copy(
            &self,
            source: &str,
            destination: &str,
            mode: Option<u32>,
        ) -> Result<(), StepError> {
            let tree = self.folder.path().join("tree");
            fs::create_dir_all(tree.join("app/sub")).unwrap();
            fs::write(tree.join("app/main"), "main").unwrap();
            fs::write(tree.join("app/sub/deep file"), "deep").unwrap();
            fs::write(tree.join("one.txt"), "one").unwrap();
            let _ = symlink("/", tree.join("app/link"));
            let archive = self.folder.path().join("archive");
            let mut builder = tar::Builder::new(fs::File::create(&archive).unwrap());
            builder.follow_symlinks(false);
            builder.append_dir_all("", &tree).unwrap();
            builder.finish().unwrap();
            let scratch = tempfile::tempdir_in(self.folder.path()).unwrap();
            let order = Order {
                archive: &archive,
                source,
                destination,
                owner: "me",
                mode,
            };
            copy(&self.path(""), scratch.path(), &order)
        }

        fn text(&self, name: &str) -> String {
            fs::read_to_string(self.path(name)).unwrap()
        }
    }

    #[test]
    fn a_folder_is_merged_and_a_file_takes_its_new_name() {
        // R-P5, BC-118
        let world = World::new();
        fs::create_dir_all(world.path("srv/sub")).unwrap();
        fs::write(world.path("srv/sub/kept"), "kept").unwrap();
        world.copy("app", "/srv", None).unwrap();
        assert_eq!(world.text("srv/main"), "main");
        assert_eq!(world.text("srv/sub/deep file"), "deep");
        assert_eq!(world.text("srv/sub/kept"), "kept");
        assert_eq!(
            fs::read_link(world.path("srv/link")).unwrap(),
            Path::new("/")
        );
        world.copy("one.txt", "/new/name", Some(0o640)).unwrap();
        let metadata = fs::metadata(world.path("new/name")).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (7, 8));
        assert_eq!(metadata.mode() & 0o7777, 0o640);
        assert_eq!(fs::metadata(world.path("new")).unwrap().uid(), 7);
        world.copy("one.txt", "/srv/", None).unwrap();
        world.copy("one.txt", "/srv/sub", None).unwrap();
        assert_eq!(
            world.text("srv/one.txt") + &world.text("srv/sub/one.txt"),
            "oneone"
        );
        world.copy("app/*", "/all", None).unwrap();
        assert_eq!(world.text("all/sub/deep file"), "deep");
        world.copy(".", "/whole", Some(0o644)).unwrap();
        assert_eq!(world.text("whole/app/main"), "main");
        assert_eq!(
            fs::metadata(world.path("whole/app")).unwrap().mode() & 0o777,
            0o755
        );
    }

    #[test]
    fn what_is_not_there_is_told() {
        let world = World::new();
        for source in ["none", "none/*", "one.txt/x"] {
            let text = world.copy(source, "/x", None).unwrap_err().to_string();
            assert!(text.contains(source), "{text}");
        }
    }

    #[test]
    fn links_of_the_root_are_followed_inside_it() {
        // R-P5
        let world = World::new();
        let outside = tempfile::tempdir().unwrap();
        symlink(outside.path(), world.path("out")).unwrap();
        symlink("etc", world.path("in")).unwrap();
        let _ = world.copy("one.txt", "/out/file", None);
        let _ = world.copy("app", "/out", None);
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        world.copy("one.txt", "/in/file", None).unwrap();
        world.copy("one.txt", "/../../etc/climbed", None).unwrap();
        assert_eq!(
            world.text("etc/file") + &world.text("etc/climbed"),
            "oneone"
        );
    }

    #[test]
    fn a_working_directory_is_made_for_its_user() {
        let world = World::new();
        make_workdir(&world.path(""), "/srv/a/../b", "me").unwrap();
        assert_eq!(fs::metadata(world.path("srv/b")).unwrap().uid(), 7);
        make_workdir(&world.path(""), "/srv/b", "0").unwrap();
        assert_eq!(fs::metadata(world.path("srv/b")).unwrap().uid(), 7);
    }
}
