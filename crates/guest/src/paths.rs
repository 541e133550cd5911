//! What a path of a client means.

use std::path::{Component, Path, PathBuf};

/// The kernel's own limit, terminator included.
pub const PATH_BYTES_MAX: usize = 4096;
/// The kernel's limit for one name.
pub const NAME_BYTES_MAX: usize = 255;

/// Why a path is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// It is longer than the kernel takes.
    #[error("the path has {0} bytes; at most {PATH_BYTES_MAX} are allowed")]
    TooLong(usize),
    /// One of its names is longer than the kernel takes.
    #[error("a name in the path has {0} bytes; at most {NAME_BYTES_MAX} are allowed")]
    NameTooLong(usize),
    /// It holds a byte that no path can.
    #[error("the path contains a NUL byte")]
    Nul,
    /// It names the home of another user.
    #[error("cannot expand the home directory in '{0}'")]
    OtherHome(String),
}

/// Makes a path absolute: `~` and relative paths start at the user's home, an empty path is the
/// directory that commands run in. `.` and `..` are resolved in the text, as clients expect.
///
/// # Errors
/// The text cannot be a path.
pub fn resolve(text: &str, home: &Path, workdir: &Path) -> Result<PathBuf, PathError> {
    if text.contains('\0') {
        return Err(PathError::Nul);
    }
    let joined = match text.strip_prefix('~') {
        _ if text.is_empty() => workdir.to_path_buf(),
        Some("") => home.to_path_buf(),
        Some(rest) if rest.starts_with('/') => home.join(rest.trim_start_matches('/')),
        Some(_) => return Err(PathError::OtherHome(text.chars().take(80).collect())),
        None => home.join(text),
    };
    let path = normalize(&joined);
    check_lengths(&path)?;
    Ok(path)
}

fn check_lengths(path: &Path) -> Result<(), PathError> {
    let length = path.as_os_str().len();
    let longest = path
        .components()
        .map(|component| component.as_os_str().len())
        .max()
        .unwrap_or(0);
    if longest > NAME_BYTES_MAX {
        return Err(PathError::NameTooLong(longest));
    }
    if length >= PATH_BYTES_MAX {
        return Err(PathError::TooLong(length));
    }
    Ok(())
}

/// The same path without `.`, `..` and double slashes, always absolute.
fn normalize(path: &Path) -> PathBuf {
    let mut normal = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => normal.push(name),
            Component::ParentDir => {
                normal.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    normal
}

/// The last name of a path; `/` for the root.
#[must_use]
pub fn base_name(path: &Path) -> String {
    path.file_name().map_or_else(
        || String::from("/"),
        |name| name.to_string_lossy().into_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(text: &str) -> Result<String, PathError> {
        resolve(text, Path::new("/home/user"), Path::new("/srv"))
            .map(|path| path.to_string_lossy().into_owned())
    }

    #[test]
    fn paths_are_read_as_clients_mean_them() {
        for (text, expected) in [
            ("", "/srv"),
            ("~", "/home/user"),
            ("~/a b", "/home/user/a b"),
            ("~//a", "/home/user/a"),
            ("a/../b/./c", "/home/user/b/c"),
            ("../../../../etc", "/etc"),
            ("/a//b/", "/a/b"),
            ("/", "/"),
            ("/..", "/"),
            ("日本", "/home/user/日本"),
        ] {
            assert_eq!(resolved(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn hostile_paths_are_refused() {
        assert_eq!(resolved("a\0b"), Err(PathError::Nul));
        assert_eq!(
            resolved("~root/x"),
            Err(PathError::OtherHome("~root/x".into()))
        );
        assert_eq!(
            resolved(&"x".repeat(10_000)),
            Err(PathError::NameTooLong(10_000))
        );
        assert!(matches!(
            resolved(&"ab/".repeat(3_000)),
            Err(PathError::TooLong(_))
        ));
    }
}
