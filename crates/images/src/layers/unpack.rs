//! Laying one archive into a root.

use std::{
    collections::{BTreeMap, HashSet},
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags},
    io::Errno,
};

use super::{
    archive::{Archive, ArchiveError, Head, Kind},
    confined::{self, Confined, is_absent},
    entry::{self, EntryError, Meaning},
};

/// What is read and written at once, in bytes.
const CHUNK_BYTES: usize = 1 << 16;
/// How many attributes a file may have.
const ATTRIBUTES_MAX: usize = 64;
/// How much of a name an error shows, in characters.
const SHOWN_NAME_CHARACTERS_MAX: usize = 200;

/// Why an archive was not laid down.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnpackError {
    #[error("the archive cannot be read")]
    Archive(#[from] ArchiveError),
    #[error("the name '{name}' {rule}")]
    Name { name: String, rule: EntryError },
    #[error("'{name}' is a device, a pipe or something unknown, which no template can hold")]
    Special { name: String },
    #[error("'{name}' belongs to nobody that a system can have")]
    Owner { name: String },
    #[error("'{name}' has more than {ATTRIBUTES_MAX} attributes")]
    Attributes { name: String },
    #[error("it holds more than {entries_max} entries")]
    TooMany { entries_max: u64 },
    #[error("'{name}' is {size} bytes, and {left} of {bytes_max} are left for the whole")]
    TooLarge {
        name: String,
        size: u64,
        left: u64,
        bytes_max: u64,
    },
    #[error("'{name}' could not be laid down")]
    File {
        name: String,
        #[source]
        source: io::Error,
    },
}

/// How much may be laid down, over all layers of one root.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    entries_max: u64,
    entries: u64,
    bytes_max: u64,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(entries_max: u64, bytes_max: u64) -> Self {
        Self {
            entries_max,
            entries: 0,
            bytes_max,
            bytes: 0,
        }
    }

    /// Takes what an entry announces, before anything of it is read.
    fn take(&mut self, head: &Head) -> Result<(), UnpackError> {
        self.entries += 1;
        if self.entries > self.entries_max {
            return Err(UnpackError::TooMany {
                entries_max: self.entries_max,
            });
        }
        let left = self.bytes_max - self.bytes;
        if head.size > left {
            return Err(UnpackError::TooLarge {
                name: shown(&head.name),
                size: head.size,
                left,
                bytes_max: self.bytes_max,
            });
        }
        self.bytes += head.size;
        Ok(())
    }
}

/// Whose the files become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owners {
    /// Who the archive says.
    Kept,
    /// Root.
    Root,
}

/// What names that mark removals mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whiteouts {
    /// A layer of an image: they remove.
    Applied,
    /// A plain archive: they are names like others.
    Plain,
}

/// Lays an archive into a root, to the end of the source.
///
/// # Errors
/// The archive is broken, breaks a rule or the budget, or the disk failed. What was laid down is
/// not taken back.
pub(crate) fn unpack(
    source: impl Read,
    root: &Confined,
    budget: &mut Budget,
    owners: Owners,
    whiteouts: Whiteouts,
) -> Result<(), UnpackError> {
    let mut archive = Archive::new(source);
    let mut layer = Layer {
        root,
        owners,
        laid: HashSet::new(),
    };
    while let Some(head) = archive.next()? {
        budget.take(&head)?;
        let meaning = match whiteouts {
            Whiteouts::Applied => entry::meaning(&head.name),
            Whiteouts::Plain => entry::path_in_root(&head.name).map(Meaning::Put),
        };
        let meaning = meaning.map_err(|rule| UnpackError::Name {
            name: shown(&head.name),
            rule,
        })?;
        layer.apply(&meaning, &head, &mut archive.content())?;
    }
    Ok(archive.finish()?)
}

/// A name as an error shows it: bounded, without control characters.
fn shown(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    let visible = text.chars().map(|c| if c.is_control() { '?' } else { c });
    visible.take(SHOWN_NAME_CHARACTERS_MAX).collect()
}

/// One layer on its way into the root.
struct Layer<'a> {
    root: &'a Confined,
    owners: Owners,
    /// What this layer put where: a removal means what layers below have, whatever the order.
    laid: HashSet<(u64, OsString)>,
}

impl Layer<'_> {
    fn apply(
        &mut self,
        meaning: &Meaning,
        head: &Head,
        content: &mut dyn Read,
    ) -> Result<(), UnpackError> {
        let failed = |source| UnpackError::File {
            name: shown(&head.name),
            source,
        };
        match meaning {
            Meaning::Ignore => Ok(()),
            Meaning::Remove(path) => self.remove(path).map_err(failed),
            Meaning::Hide(path) => self.hide(path).map_err(failed),
            Meaning::Root => self.put_root(head).map_err(failed),
            Meaning::Put(path) if path.as_os_str().is_empty() => {
                self.put_root(head).map_err(failed)
            }
            Meaning::Put(path) => self.put(path, head, content),
        }
    }

    fn put(&mut self, path: &Path, head: &Head, content: &mut dyn Read) -> Result<(), UnpackError> {
        let name = || shown(&head.name);
        let failed = |source| UnpackError::File {
            name: name(),
            source,
        };
        if head.kind == Kind::Special {
            return Err(UnpackError::Special { name: name() });
        }
        if head.attributes.len() > ATTRIBUTES_MAX {
            return Err(UnpackError::Attributes { name: name() });
        }
        let owner = self.owner(head)?;
        let target = match head.kind {
            Kind::HardLink => Some(link_target(head)?),
            _ => None,
        };
        let place = self.place(path).map_err(failed)?;
        let laid = match (head.kind, &target) {
            (Kind::Folder, _) => self.put_folder(&place, head),
            (Kind::File, _) => put_file(&place, head, owner, content),
            (Kind::SymbolicLink, _) => put_link(&place, head),
            (_, Some(target)) => self.put_hard_link(&place, target),
            (_, None) => Err(io::ErrorKind::InvalidInput.into()),
        };
        laid.map_err(failed)?;
        match head.kind {
            // The file that it is a name of has these already.
            Kind::HardLink => {}
            _ => finish(&place, head, owner).map_err(failed)?,
        }
        self.note(&place.folder, place.name).map_err(failed)
    }

    /// The folder that a path is in, made if it is missing, and its last name.
    fn place<'p>(&mut self, path: &'p Path) -> io::Result<Place<'p>> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
        let parent = path.parent().unwrap_or_else(|| Path::new(""));
        let mut made = Vec::new();
        let folder = self.root.make_folder(parent, |folder, name| {
            made.push((inode(folder), name.to_owned()));
        })?;
        for (inode, name) in made {
            self.laid.insert((inode?, name));
        }
        Ok(Place { folder, name })
    }

    fn note(&mut self, folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
        self.laid.insert((inode(folder)?, name.to_owned()));
        Ok(())
    }

    fn owner(&self, head: &Head) -> Result<(Uid, Gid), UnpackError> {
        if self.owners == Owners::Root {
            return Ok((Uid::ROOT, Gid::ROOT));
        }
        // The highest number means "nobody is named" to the kernel.
        let id = |number: u64| u32::try_from(number).ok().filter(|id| *id != u32::MAX);
        match (id(head.uid), id(head.gid)) {
            (Some(uid), Some(gid)) => Ok((Uid::from_raw(uid), Gid::from_raw(gid))),
            _ => Err(UnpackError::Owner {
                name: shown(&head.name),
            }),
        }
    }

    /// The root has the mode that it needs, whatever an archive says; anything but a folder in its
    /// place is refused.
    fn put_root(&self, head: &Head) -> io::Result<()> {
        match head.kind {
            Kind::Folder => Ok(()),
            _ => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    /// A folder that is there keeps what is in it.
    fn put_folder(&self, place: &Place<'_>, _: &Head) -> io::Result<()> {
        match confined::file_type(&place.folder, place.name)? {
            Some(FileType::Directory) => return Ok(()),
            Some(_) => confined::remove(&place.folder, place.name)?,
            None => {}
        }
        self.root.make_in(&place.folder, place.name)
    }

    fn put_hard_link(&self, place: &Place<'_>, target: &Path) -> io::Result<()> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let parent = target.parent().unwrap_or_else(|| Path::new(""));
        let folder = self.root.folder(parent)?;
        // A name of itself stays what it is.
        let same = inode(&folder)? == inode(&place.folder)? && name == place.name;
        match confined::file_type(&folder, name)? {
            None => return Err(io::ErrorKind::NotFound.into()),
            Some(FileType::Directory) => return Err(io::ErrorKind::IsADirectory.into()),
            Some(_) if same => return Ok(()),
            Some(_) => {}
        }
        confined::remove(&place.folder, place.name)?;
        let to = (&place.folder, place.name);
        Ok(rustix::fs::linkat(
            &folder,
            name,
            to.0,
            to.1,
            AtFlags::empty(),
        )?)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let Some(name) = path.file_name() else {
            return Ok(());
        };
        let parent = path.parent().unwrap_or_else(|| Path::new(""));
        match self.root.folder(parent) {
            Ok(folder) => self.remove_from_below(&folder, name),
            // The removal of nothing removes nothing.
            Err(error) if is_absent(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn hide(&self, path: &Path) -> io::Result<()> {
        let folder = match self.root.folder(path) {
            Ok(folder) => folder,
            Err(error) if is_absent(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let names = confined::names(&folder)?;
        names
            .iter()
            .try_for_each(|name| self.remove_from_below(&folder, name))
    }

    fn remove_from_below(&self, folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
        let mut keeps =
            |folder: &OwnedFd, name: &OsStr| Ok(self.laid.contains(&(inode(folder)?, name.into())));
        confined::remove_unless(folder, name, &mut keeps).map(|_| ())
    }
}

/// Where something is put.
struct Place<'a> {
    folder: OwnedFd,
    name: &'a OsStr,
}

fn inode(folder: &OwnedFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(folder)?.st_ino)
}

fn link_target(head: &Head) -> Result<PathBuf, UnpackError> {
    entry::path_in_root(&head.target).map_err(|rule| UnpackError::Name {
        name: shown(&head.target),
        rule,
    })
}

fn put_link(place: &Place<'_>, head: &Head) -> io::Result<()> {
    confined::remove(&place.folder, place.name)?;
    let target = OsStr::from_bytes(&head.target);
    Ok(rustix::fs::symlinkat(target, &place.folder, place.name)?)
}

fn put_file(
    place: &Place<'_>,
    head: &Head,
    (uid, gid): (Uid, Gid),
    content: &mut dyn Read,
) -> io::Result<()> {
    confined::remove(&place.folder, place.name)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o600);
    let file = rustix::fs::openat(&place.folder, place.name, flags, mode)?;
    let mut file = File::from(file);
    copy_sparsely(content, &mut file, head.size)?;
    // Whose it is comes first: a change of owner takes set-user-ID and capabilities away.
    rustix::fs::fchown(&file, Some(uid), Some(gid))?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(head.mode))?;
    set_attributes(&file, &head.attributes)
}

/// Copies all of an entry; long runs of zeros become holes.
fn copy_sparsely(content: &mut dyn Read, file: &mut File, size: u64) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut left = size;
    while left > 0 {
        let want = usize::try_from(left)
            .unwrap_or(CHUNK_BYTES)
            .min(CHUNK_BYTES);
        content.read_exact(&mut chunk[..want])?;
        if chunk[..want].iter().all(|byte| *byte == 0) {
            file.seek(SeekFrom::Current(i64::try_from(want).unwrap_or(0)))?;
        } else {
            file.write_all(&chunk[..want])?;
        }
        left -= want as u64;
    }
    file.set_len(size)
}

/// Attributes that mean something in a sandbox: capabilities of programs, and users' own.
fn set_attributes(file: &File, attributes: &BTreeMap<String, Vec<u8>>) -> io::Result<()> {
    for (name, value) in attributes {
        if name != "security.capability" && !name.starts_with("user.") {
            continue;
        }
        match rustix::fs::fsetxattr(file, name.as_str(), value, XattrFlags::empty()) {
            // Not every file system has users' own; none of ours reads them.
            Err(Errno::OPNOTSUPP) if name.starts_with("user.") => {}
            set => set?,
        }
    }
    Ok(())
}

/// What a file has beside its content. A file's owner and mode are set while it is open.
fn finish(place: &Place<'_>, head: &Head, (uid, gid): (Uid, Gid)) -> io::Result<()> {
    let (folder, name) = (&place.folder, place.name);
    if head.kind != Kind::File {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::chownat(folder, name, Some(uid), Some(gid), flags)?;
    }
    if head.kind == Kind::Folder {
        let mode = Mode::from_raw_mode(head.mode);
        rustix::fs::chmodat(folder, name, mode, AtFlags::empty())?;
    }
    let time = Timespec {
        tv_sec: head.modified_s,
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    Ok(rustix::fs::utimensat(
        folder,
        name,
        &times,
        AtFlags::SYMLINK_NOFOLLOW,
    )?)
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;
