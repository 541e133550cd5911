//! The operations, blocking, with whatever rights the thread has.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use sandhold_agent_proto::filesystem::EntryInfo;

use crate::{account::OwnerNames, filesystem::entry::describe};

/// Entries that one listing returns at most. More would not fit a message.
pub const ENTRIES_MAX: usize = 20_000;

/// Why an operation failed, beyond what the kernel says.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// The kernel's word.
    #[error(transparent)]
    Kernel(#[from] io::Error),
    /// A directory was expected.
    #[error("the path is not a directory")]
    NotADirectory,
    /// It is there already, and something else.
    #[error("the path exists already and is not a directory")]
    ExistsOtherwise,
    /// It is there already.
    #[error("the directory exists already")]
    Exists,
    /// The root is not removed or moved.
    #[error("the root directory stays where it is")]
    Root,
    /// Too much to list at once.
    #[error("more than {ENTRIES_MAX} entries; list a smaller part")]
    TooMany,
}

/// Makes a directory and its parents.
///
/// # Errors
/// It exists, or cannot be made.
pub fn make_dir(path: &Path, names: &OwnerNames) -> Result<EntryInfo, OperationError> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Err(OperationError::Exists),
        Ok(_) => return Err(OperationError::ExistsOtherwise),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    fs::create_dir_all(path)?;
    Ok(describe(path, names)?)
}

/// Renames; parents of the destination are made. Across filesystems a file is copied.
///
/// # Errors
/// The source is missing, or the kernel refuses.
pub fn rename(
    source: &Path,
    destination: &Path,
    names: &OwnerNames,
) -> Result<EntryInfo, OperationError> {
    if source.parent().is_none() {
        return Err(OperationError::Root);
    }
    let metadata = fs::symlink_metadata(source)?;
    if let Some(parent) = destination.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::rename(source, destination) {
        Err(error) if error.raw_os_error() == Some(libc::EXDEV) && metadata.is_file() => {
            fs::copy(source, destination)?;
            fs::remove_file(source)?;
        }
        other => other?,
    }
    Ok(describe(destination, names)?)
}

/// Removes a file, or a directory with everything in it. Nothing there is no failure.
///
/// # Errors
/// The kernel refuses.
pub fn remove(path: &Path) -> Result<(), OperationError> {
    if path.parent().is_none() {
        return Err(OperationError::Root);
    }
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => Ok(other?),
    }
}

/// Lists a directory, or the one a link leads to, this many levels deep (zero means one). Links
/// inside are not followed. What vanishes meanwhile is left out, and so is what is inside a
/// directory below that the caller may not read.
///
/// # Errors
/// The directory itself cannot be read, or holds too much.
pub fn list(path: &Path, depth: u32, names: &OwnerNames) -> Result<Vec<EntryInfo>, OperationError> {
    if !fs::metadata(path)?.is_dir() {
        return Err(OperationError::NotADirectory);
    }
    let mut entries = Vec::new();
    // Directories that are still to be read, the next one last, each with its depth.
    let mut pending = vec![(path.to_path_buf(), 1)];
    while let Some((directory, level)) = pending.pop() {
        let children = match sorted_children(&directory) {
            Ok(children) => children,
            Err(error) if level == 1 => return Err(error.into()),
            Err(_) => continue,
        };
        let mut below = Vec::new();
        for child in children {
            let Ok(entry) = describe(&child, names) else {
                continue;
            };
            if entries.len() >= ENTRIES_MAX {
                return Err(OperationError::TooMany);
            }
            let is_directory = !entry.is_symlink
                && entry.r#type == sandhold_agent_proto::filesystem::FileType::FILE_TYPE_DIRECTORY;
            entries.push(entry);
            if is_directory && level < depth {
                below.push((child, level + 1));
            }
        }
        pending.extend(below.into_iter().rev());
    }
    Ok(entries)
}

fn sorted_children(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut children: Vec<PathBuf> = fs::read_dir(directory)?
        .take(ENTRIES_MAX + 1)
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    children.sort();
    Ok(children)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_limits_what_is_listed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b/c")).unwrap();
        fs::write(dir.path().join("z"), "").unwrap();
        std::os::unix::fs::symlink("..", dir.path().join("a/up")).unwrap();
        let listed = |depth| -> Vec<String> {
            list(dir.path(), depth, &OwnerNames::default())
                .unwrap()
                .into_iter()
                .map(|entry| entry.name)
                .collect()
        };
        assert_eq!(listed(0), ["a", "z"]);
        assert_eq!(listed(1), ["a", "z"]);
        assert_eq!(listed(2), ["a", "z", "b", "up"]);
        assert_eq!(listed(100), ["a", "z", "b", "up", "c"]);
    }

    #[test]
    fn making_and_removing_say_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let names = OwnerNames::default();
        let path = dir.path().join("a/b");
        assert_eq!(make_dir(&path, &names).unwrap().name, "b");
        assert!(matches!(
            make_dir(&path, &names),
            Err(OperationError::Exists)
        ));
        fs::write(dir.path().join("f"), "").unwrap();
        assert!(matches!(
            make_dir(&dir.path().join("f"), &names),
            Err(OperationError::ExistsOtherwise)
        ));
        remove(&dir.path().join("a")).unwrap();
        remove(&dir.path().join("a")).unwrap();
        assert!(matches!(remove(Path::new("/")), Err(OperationError::Root)));
    }
}
