//! A root directory in which the kernel resolves every path: links are followed as the root's own
//! processes would follow them, and none leads out (`openat2`, `RESOLVE_IN_ROOT`).
//!
//! Whoever works in a root works through this: a path is given once, relative to the root, and
//! what comes back is a descriptor of the folder and the last name, which is never followed.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// How deep folders may be nested, links followed.
const DEPTH_MAX: usize = 256;
/// How often a resolution is tried again that something else on the machine disturbed.
const DISTURBED_MAX: usize = 64;

/// A root directory.
#[derive(Debug)]
pub(crate) struct Confined {
    root: OwnedFd,
    depth: usize,
}

impl Confined {
    /// The root at `path`, which is the machine's own and trusted.
    ///
    /// # Errors
    /// It is not a folder that can be opened.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        let depth = depth_of(root.as_fd())?;
        Ok(Self { root, depth })
    }

    /// Opens what is at `path`, links followed inside the root.
    ///
    /// # Errors
    /// It is not there, or links loop.
    pub(crate) fn open_at(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        let flags = flags | OFlags::CLOEXEC;
        for _ in 0..DISTURBED_MAX {
            match rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                opened => return Ok(opened?),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Opens the folder at `path`.
    ///
    /// # Errors
    /// It is not there, is no folder, or links loop.
    pub(crate) fn folder(&self, path: &Path) -> io::Result<OwnedFd> {
        self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY)
    }

    /// Opens the folder at `path` and makes what is missing of it; says which were made, as folder
    /// and name.
    ///
    /// # Errors
    /// Something on the way is no folder, links loop, or it would be too deep.
    pub(crate) fn make_folder(
        &self,
        path: &Path,
        mut made: impl FnMut(&OwnedFd, &OsStr),
    ) -> io::Result<OwnedFd> {
        match self.folder(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            opened => return opened,
        }
        let mut folder = self.folder(Path::new(""))?;
        let mut walked = PathBuf::new();
        for component in path.components() {
            let Component::Normal(name) = component else {
                continue;
            };
            walked.push(name);
            folder = match self.folder(&walked) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.make_in(&folder, name)?;
                    made(&folder, name);
                    self.folder(&walked)?
                }
                opened => opened?,
            };
        }
        Ok(folder)
    }

    /// The folder that `path` is in, made if it is missing, and its last name.
    ///
    /// # Errors
    /// As [`Self::make_folder`]; or the path has no last name.
    fn place<'p>(&self, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
        let parent = path.parent().unwrap_or_else(|| Path::new(""));
        Ok((self.make_folder(parent, |_, _| {})?, name))
    }

    /// Puts a file of root's in the place of whatever is there; nothing that may be shared with
    /// another root is written to.
    ///
    /// # Errors
    /// It cannot be made there.
    pub(crate) fn replace_file(&self, path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
        use std::io::Write;
        let (folder, name) = self.place(path)?;
        remove(&folder, name)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&folder, name, flags, Mode::from_raw_mode(0o600))?;
        let mut file = std::fs::File::from(file);
        file.write_all(bytes)?;
        Ok(rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?)
    }

    /// Puts a link in the place of whatever is there.
    ///
    /// # Errors
    /// It cannot be made there.
    pub(crate) fn replace_link(&self, path: &Path, target: &Path) -> io::Result<()> {
        let (folder, name) = self.place(path)?;
        remove(&folder, name)?;
        Ok(rustix::fs::symlinkat(target, &folder, name)?)
    }

    /// Removes what is at `path`; nothing there is no error.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(crate) fn remove(&self, path: &Path) -> io::Result<()> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
        match self.folder(path.parent().unwrap_or_else(|| Path::new(""))) {
            Err(error) if is_absent(&error) => Ok(()),
            folder => remove(&folder?, name),
        }
    }

    /// Reads a file of at most `bytes_max` bytes, links followed; none if there is none.
    ///
    /// # Errors
    /// It cannot be read, is no file or is longer.
    pub(crate) fn read_file(&self, path: &Path, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
        use std::io::Read;
        // A pipe in the place of a file must not keep us waiting for a writer.
        let opened = match self.open_at(path, OFlags::RDONLY | OFlags::NONBLOCK) {
            Err(error) if is_absent(&error) => return Ok(None),
            opened => std::fs::File::from(opened?),
        };
        if !opened.metadata()?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut bytes = Vec::new();
        opened.take(bytes_max + 1).read_to_end(&mut bytes)?;
        match bytes.len() as u64 > bytes_max {
            true => Err(io::ErrorKind::FileTooLarge.into()),
            false => Ok(Some(bytes)),
        }
    }

    /// Makes a folder in another.
    ///
    /// # Errors
    /// Something is there, or it would be too deep.
    pub(crate) fn make_in(&self, folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
        if depth_of(folder.as_fd())? >= self.depth + DEPTH_MAX {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        let mode = Mode::from_raw_mode(0o755);
        Ok(rustix::fs::mkdirat(folder, name, mode)?)
    }
}

/// Whether nothing is there.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

/// How many folders lead to this one, by its real place.
fn depth_of(folder: BorrowedFd<'_>) -> io::Result<usize> {
    use std::os::fd::AsRawFd;
    let link = format!("/proc/self/fd/{}", folder.as_raw_fd());
    Ok(std::fs::read_link(link)?.components().count())
}

/// What a name in a folder is; none if nothing is there.
pub(crate) fn file_type(folder: &OwnedFd, name: &OsStr) -> io::Result<Option<FileType>> {
    match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Opens a folder in a folder, which must not be a link.
pub(crate) fn enter(folder: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(folder, name, flags, Mode::empty())?)
}

/// Names in a folder.
pub(crate) fn names(folder: &OwnedFd) -> io::Result<Vec<std::ffi::OsString>> {
    use std::os::unix::ffi::OsStrExt;
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    Ok(names)
}

/// Removes a name and all below it; nothing there is no error. Links are removed, not followed.
pub(crate) fn remove(folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
    remove_unless(folder, name, &mut |_, _| Ok(false)).map(|_| ())
}

/// Which names stay.
pub(crate) type Keeps<'a> = dyn FnMut(&OwnedFd, &OsStr) -> io::Result<bool> + 'a;

/// Removes a name and all below it but what `keeps` says, and the folders that lead to it. Says
/// whether all went.
pub(crate) fn remove_unless(
    folder: &OwnedFd,
    name: &OsStr,
    keeps: &mut Keeps<'_>,
) -> io::Result<bool> {
    let kept = keeps(folder, name)?;
    match file_type(folder, name)? {
        None => Ok(true),
        Some(FileType::Directory) => {
            let inner = enter(folder, name)?;
            let mut all = !kept;
            for child in names(&inner)? {
                all &= remove_unless(&inner, &child, keeps)?;
            }
            if all {
                rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)?;
            }
            Ok(all)
        }
        Some(_) if kept => Ok(false),
        Some(_) => {
            rustix::fs::unlinkat(folder, name, AtFlags::empty())?;
            Ok(true)
        }
    }
}
