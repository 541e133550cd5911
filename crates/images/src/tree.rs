//! Trees of files: what they hold as one key, how much they take, and copying them.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read},
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::record::ContentKey;

/// How deep a tree may be. Deeper ones are refused: they were made to break whoever walks them.
const DEPTH_MAX: usize = 256;

/// A failed walk or copy.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// One file of it.
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
    /// A socket, a pipe or a device, which a template's files cannot hold.
    #[error("{path} is neither a file nor a folder nor a link")]
    Special {
        /// Which.
        path: PathBuf,
    },
    /// The place in the root is reached through a link, which may lead anywhere.
    #[error("{path} is a link in the root; name the place it leads to")]
    ThroughLink {
        /// Which.
        path: PathBuf,
    },
    /// It is nested without end.
    #[error("{path} is nested deeper than {DEPTH_MAX} folders")]
    TooDeep {
        /// Where.
        path: PathBuf,
    },
}

fn file_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TreeError {
    let path = path.to_owned();
    move |source| TreeError::File { step, path, source }
}

/// Makes a content key from parts; each is preceded by its length, so that no two lists of parts
/// look the same.
#[derive(Debug)]
pub(crate) struct KeyMaker(Sha256);

impl KeyMaker {
    /// For keys of one kind; `kind` holds the version of how they are made.
    pub(crate) fn new(kind: &str) -> Self {
        Self(Sha256::new()).with(kind.as_bytes())
    }

    pub(crate) fn with(mut self, part: &[u8]) -> Self {
        self.add(part);
        self
    }

    fn add(&mut self, part: &[u8]) {
        self.0.update((part.len() as u64).to_le_bytes());
        self.0.update(part);
    }

    pub(crate) fn finish(self) -> ContentKey {
        ContentKey(hex::encode(self.0.finalize()))
    }
}

/// SHA-256 of a file.
pub(crate) fn hash_file(path: &Path) -> Result<[u8; 32], TreeError> {
    let mut file = fs::File::open(path).map_err(file_error("open", path))?;
    let mut hash = Sha256::new();
    let mut block = vec![0; 1 << 16];
    loop {
        match file.read(&mut block).map_err(file_error("read", path))? {
            0 => return Ok(hash.finalize().into()),
            count => hash.update(&block[..count]),
        }
    }
}

/// What a tree's key depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depends {
    /// Names, kinds, links, whether executable, and content: for files that are copied with
    /// fixed owner and mode.
    OnContent,
    /// All that `stat` shows, change time included, and no content: for whole root file systems.
    OnMetadata,
}

/// A key of everything below `root`.
pub(crate) fn key_of_tree(root: &Path, depends: Depends) -> Result<ContentKey, TreeError> {
    let mut key = KeyMaker::new("tree 1");
    walk(root, 0, &mut |path, metadata| {
        let name = path.strip_prefix(root).unwrap_or(path);
        key.add(name.as_os_str().as_encoded_bytes());
        key.add(&(metadata.mode() & 0o170_000).to_le_bytes());
        if metadata.is_symlink() {
            let target = fs::read_link(path).map_err(file_error("read the link", path))?;
            key.add(target.as_os_str().as_encoded_bytes());
        }
        match depends {
            Depends::OnContent if metadata.is_file() => {
                key.add(&(metadata.mode() & 0o111).to_le_bytes());
                key.add(&hash_file(path)?);
            }
            Depends::OnContent => {}
            Depends::OnMetadata => {
                let numbers = [metadata.size(), metadata.ino(), metadata.rdev()];
                let times = [metadata.mtime(), metadata.ctime(), metadata.ctime_nsec()];
                let owner = [metadata.mode(), metadata.uid(), metadata.gid()];
                numbers.iter().for_each(|n| key.add(&n.to_le_bytes()));
                times.iter().for_each(|n| key.add(&n.to_le_bytes()));
                owner.iter().for_each(|n| key.add(&n.to_le_bytes()));
            }
        }
        Ok(())
    })?;
    Ok(key.finish())
}

/// Bytes that a tree takes on disk; a file with several names counts once.
pub(crate) fn size_of_tree(root: &Path) -> Result<u64, TreeError> {
    let mut seen = BTreeSet::new();
    let mut bytes = 0;
    walk(root, 0, &mut |_, metadata| {
        if metadata.nlink() < 2 || metadata.is_dir() || seen.insert(metadata.ino()) {
            bytes += metadata.blocks() * 512;
        }
        Ok(())
    })?;
    Ok(bytes)
}

/// Copies files over a root: owned by root, readable by all, executable where they were. Nothing
/// is written through a link of the root, which could lead out of it.
pub(crate) fn copy_over(files: &Path, root: &Path) -> Result<(), TreeError> {
    walk(files, 0, &mut |path, metadata| {
        let name = path.strip_prefix(files).unwrap_or(path);
        if name.as_os_str().is_empty() {
            return Ok(());
        }
        let place = root.join(name);
        let there = fs::symlink_metadata(&place).ok();
        if metadata.is_dir() {
            return match there {
                Some(there) if there.is_dir() => Ok(()),
                Some(_) => Err(TreeError::ThroughLink { path: place }),
                None => {
                    fs::create_dir(&place).map_err(file_error("make", &place))?;
                    set_mode(&place, 0o755)
                }
            };
        }
        if there.is_some() {
            fs::remove_file(&place).map_err(file_error("replace", &place))?;
        }
        if metadata.is_symlink() {
            let target = fs::read_link(path).map_err(file_error("read the link", path))?;
            return symlink(target, &place).map_err(file_error("link", &place));
        }
        if !metadata.is_file() {
            return Err(TreeError::Special {
                path: path.to_owned(),
            });
        }
        fs::copy(path, &place).map_err(file_error("copy to", &place))?;
        let executable = metadata.mode() & 0o111 != 0;
        set_mode(&place, if executable { 0o755 } else { 0o644 })
    })
}

/// Makes `root/name` a real folder, or says that it is something else.
pub(crate) fn require_folder(root: &Path, name: &str) -> Result<PathBuf, TreeError> {
    let path = root.join(name);
    match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_dir() => Ok(path),
        Ok(_) => Err(TreeError::ThroughLink { path }),
        Err(_) => {
            fs::create_dir(&path).map_err(file_error("make", &path))?;
            set_mode(&path, 0o755)?;
            Ok(path)
        }
    }
}

/// Sets the permissions of a file.
pub(crate) fn set_mode(path: &Path, mode: u32) -> Result<(), TreeError> {
    let permissions = fs::Permissions::from_mode(mode);
    fs::set_permissions(path, permissions).map_err(file_error("set the mode of", path))
}

type Visit<'a> = dyn FnMut(&Path, &fs::Metadata) -> Result<(), TreeError> + 'a;

/// Visits a tree in the order of names, folders before what is in them. Links are not followed.
fn walk(path: &Path, depth: usize, visit: &mut Visit<'_>) -> Result<(), TreeError> {
    if depth > DEPTH_MAX {
        return Err(TreeError::TooDeep {
            path: path.to_owned(),
        });
    }
    let metadata = fs::symlink_metadata(path).map_err(file_error("look at", path))?;
    visit(path, &metadata)?;
    if !metadata.is_dir() {
        return Ok(());
    }
    let mut children = Vec::new();
    for entry in fs::read_dir(path).map_err(file_error("list", path))? {
        children.push(entry.map_err(file_error("list", path))?.path());
    }
    children.sort();
    for child in children {
        walk(&child, depth + 1, visit)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_key_follows_content_and_not_time() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a/b");
        write(&file, "1");
        let key = || key_of_tree(folder.path(), Depends::OnContent).unwrap();
        let first = key();
        write(&file, "1");
        assert_eq!(key(), first);
        write(&file, "2");
        assert_ne!(key(), first);
        write(&file, "1");
        set_mode(&file, 0o755).unwrap();
        assert_ne!(key(), first);
    }

    #[test]
    fn an_overlay_is_copied_with_fixed_owner_and_mode() {
        let files = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        write(&files.path().join("etc/x"), "new");
        write(&files.path().join("bin/run"), "#!");
        set_mode(&files.path().join("etc/x"), 0o600).unwrap();
        set_mode(&files.path().join("bin/run"), 0o700).unwrap();
        symlink("/no/where", files.path().join("link")).unwrap();
        write(&root.path().join("etc/x"), "old");
        copy_over(files.path(), root.path()).unwrap();
        let mode = |name: &str| fs::metadata(root.path().join(name)).unwrap().mode() & 0o777;
        assert_eq!((mode("etc/x"), mode("bin/run")), (0o644, 0o755));
        assert_eq!(
            fs::read_to_string(root.path().join("etc/x")).unwrap(),
            "new"
        );
        assert_eq!(
            fs::read_link(root.path().join("link")).unwrap(),
            Path::new("/no/where")
        );
    }

    #[test]
    fn nothing_is_written_through_a_link() {
        let outside = tempfile::tempdir().unwrap();
        let files = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        write(&files.path().join("etc/x"), "new");
        symlink(outside.path(), root.path().join("etc")).unwrap();
        let refused = copy_over(files.path(), root.path());
        assert!(matches!(refused, Err(TreeError::ThroughLink { .. })));
        // A file that is a link is replaced, not followed.
        write(&outside.path().join("y"), "kept");
        write(&files.path().join("top"), "new");
        fs::remove_dir_all(files.path().join("etc")).unwrap();
        symlink(outside.path().join("y"), root.path().join("top")).unwrap();
        copy_over(files.path(), root.path()).unwrap();
        assert_eq!(
            fs::read_to_string(outside.path().join("y")).unwrap(),
            "kept"
        );
        assert!(require_folder(root.path(), "etc").is_err());
    }

    #[test]
    fn hard_links_count_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        write(&file, &"x".repeat(100_000));
        let before = size_of_tree(folder.path()).unwrap();
        fs::hard_link(&file, folder.path().join("b")).unwrap();
        assert_eq!(size_of_tree(folder.path()).unwrap(), before);
    }
}
