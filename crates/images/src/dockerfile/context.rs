//! The folder that a Dockerfile's `COPY` takes files from, and the archive of each `COPY`.
//!
//! Nothing outside the folder is read: sources that climb are refused, links are copied as links.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::FileTypeExt,
    path::{Component, Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::steps::Upload;

/// How deep folders may be nested.
const DEPTH_MAX: usize = 256;
/// How long `.dockerignore` may be, in bytes.
const IGNORE_BYTES_MAX: u64 = 1 << 20;

/// Why files of the context cannot be copied.
#[derive(Debug, thiserror::Error)]
pub enum ContextError {
    /// A file.
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
    /// A source leads out of the context.
    #[error("'{0}' is not in the folder that is built from")]
    Outside(String),
    /// A source matches nothing.
    #[error("'{0}' matches no file in the folder that is built from")]
    Missing(String),
}

fn file_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ContextError {
    let path = path.to_owned();
    move |source| ContextError::File { step, path, source }
}

/// A folder that is built from.
#[derive(Debug)]
pub struct Context {
    folder: PathBuf,
    ignored: Vec<Rule>,
}

/// A line of `.dockerignore`.
#[derive(Debug)]
struct Rule {
    pattern: Vec<String>,
    keeps: bool,
}

impl Context {
    /// Opens a folder and reads its `.dockerignore`.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn open(folder: &Path) -> Result<Self, ContextError> {
        let file = folder.join(".dockerignore");
        let text = match fs::metadata(&file) {
            Ok(metadata) if metadata.len() > IGNORE_BYTES_MAX => {
                let error = io::Error::from(io::ErrorKind::FileTooLarge);
                return Err(file_error("read", &file)(error));
            }
            Ok(_) => fs::read_to_string(&file).map_err(file_error("read", &file))?,
            Err(_) => String::new(),
        };
        Ok(Self {
            folder: folder.to_owned(),
            ignored: text.lines().filter_map(rule).collect(),
        })
    }

    /// Writes an archive of what `sources` match to `into`, named by its content. In it, a single
    /// folder's content, or all that was matched, is at the top.
    ///
    /// # Errors
    /// A source matches nothing, leads outside, or cannot be read.
    pub fn archive(&self, sources: &[String], into: &Path) -> Result<Upload, ContextError> {
        let mut matched = Vec::new();
        for source in sources {
            matched.extend(self.find(source)?);
        }
        let draft = into.join("archive.new");
        let file = fs::File::create(&draft).map_err(file_error("write", &draft))?;
        let hashed = Hashed {
            file,
            hash: Sha256::new(),
        };
        let mut builder = tar::Builder::new(hashed);
        builder.follow_symlinks(false);
        builder.mode(tar::HeaderMode::Deterministic);
        let is_single = matched.len() == 1;
        for path in &matched {
            let full = self.folder.join(path);
            let name = path.file_name().unwrap_or_default();
            // As with every builder, a folder stands for what is in it.
            let top = match full.is_dir() && !full.is_symlink() {
                true => PathBuf::new(),
                false => PathBuf::from(name),
            };
            let top = match is_single && top.as_os_str().is_empty() {
                true => PathBuf::from("content"),
                false => top,
            };
            self.append(&mut builder, path, &top, 0)?;
        }
        let hashed = builder.into_inner().map_err(file_error("write", &draft))?;
        let hash = hex::encode(hashed.hash.finalize());
        let path = into.join(&hash);
        fs::rename(&draft, &path).map_err(file_error("write", &path))?;
        Ok(Upload { hash, path })
    }

    /// What a source names, relative to the folder.
    fn find(&self, source: &str) -> Result<Vec<PathBuf>, ContextError> {
        let mut parts: Vec<String> = Vec::new();
        for component in Path::new(source).components() {
            match component {
                Component::Normal(part) => parts.push(part.to_string_lossy().into_owned()),
                Component::ParentDir => {
                    if parts.pop().is_none() {
                        return Err(ContextError::Outside(source.to_owned()));
                    }
                }
                Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
            }
        }
        let mut found = vec![PathBuf::new()];
        for part in &parts {
            let mut next = Vec::new();
            for folder in &found {
                next.extend(self.children(folder, part)?);
            }
            found = next;
        }
        found.retain(|path| !self.is_ignored(path));
        match found.is_empty() {
            true => Err(ContextError::Missing(source.to_owned())),
            false => Ok(found),
        }
    }

    fn children(&self, folder: &Path, pattern: &str) -> Result<Vec<PathBuf>, ContextError> {
        let full = self.folder.join(folder);
        // A link could lead out of the folder.
        if !fs::symlink_metadata(&full).is_ok_and(|metadata| metadata.is_dir()) {
            return Ok(Vec::new());
        }
        let names = names(&full)?;
        let matching = names.into_iter().filter(|name| matches(pattern, name));
        Ok(matching.map(|name| folder.join(name)).collect())
    }

    fn append(
        &self,
        builder: &mut tar::Builder<Hashed>,
        path: &Path,
        name: &Path,
        depth: usize,
    ) -> Result<(), ContextError> {
        let full = self.folder.join(path);
        let failed = |step| file_error(step, &full);
        let metadata = fs::symlink_metadata(&full).map_err(failed("read"))?;
        if depth > DEPTH_MAX {
            let error = io::Error::from(io::ErrorKind::InvalidFilename);
            return Err(failed("go as deep as")(error));
        }
        if metadata.file_type().is_socket() || metadata.file_type().is_fifo() {
            return Ok(());
        }
        if !name.as_os_str().is_empty() {
            let appended = match metadata.is_dir() {
                true => builder.append_dir(name, &full),
                false => builder.append_path_with_name(&full, name),
            };
            appended.map_err(failed("archive"))?;
        }
        if !metadata.is_dir() {
            return Ok(());
        }
        for child in names(&full)? {
            let path = path.join(&child);
            if !self.is_ignored(&path) || self.may_keep_below() {
                let is_file = !self.folder.join(&path).is_dir();
                if is_file && self.is_ignored(&path) {
                    continue;
                }
                self.append(builder, &path, &name.join(&child), depth + 1)?;
            }
        }
        Ok(())
    }

    /// Whether a file in an ignored folder may be kept.
    fn may_keep_below(&self) -> bool {
        self.ignored.iter().any(|rule| rule.keeps)
    }

    fn is_ignored(&self, path: &Path) -> bool {
        let parts: Vec<String> = path
            .components()
            .map(|part| part.as_os_str().to_string_lossy().into_owned())
            .collect();
        let applies = |rule: &&Rule| {
            (1..=parts.len()).any(|length| matches_path(&rule.pattern, &parts[..length]))
        };
        let last = self.ignored.iter().rev().find(applies);
        last.is_some_and(|rule| !rule.keeps)
    }
}

/// Writes on and hashes.
struct Hashed {
    file: fs::File,
    hash: Sha256,
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn names(folder: &Path) -> Result<Vec<String>, ContextError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(file_error("list", folder))? {
        let entry = entry.map_err(file_error("list", folder))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn rule(line: &str) -> Option<Rule> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let (keeps, pattern) = match line.strip_prefix('!') {
        Some(pattern) => (true, pattern.trim()),
        None => (false, line),
    };
    let parts = pattern
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".");
    let pattern: Vec<String> = parts.map(str::to_owned).collect();
    (!pattern.is_empty()).then_some(Rule { pattern, keeps })
}

/// Whether names match patterns one by one; `**` stands for any number of names.
fn matches_path(pattern: &[String], names: &[String]) -> bool {
    match (pattern.split_first(), names.split_first()) {
        (None, None) => true,
        (None, Some(_)) => false,
        (Some((first, rest)), _) if first == "**" => {
            (0..=names.len()).any(|skipped| matches_path(rest, &names[skipped..]))
        }
        (Some(_), None) => false,
        (Some((first, rest)), Some((name, others))) => {
            matches(first, name) && matches_path(rest, others)
        }
    }
}

/// Whether a name matches a pattern of `*` and `?`.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if p < pattern.len() && pattern[p] == '*' {
            star = Some((p, n));
            p += 1;
        } else if p < pattern.len() && (pattern[p] == '?' || pattern[p] == name[n]) {
            p += 1;
            n += 1;
        } else if let Some((at, taken)) = star {
            // The last star takes one more.
            p = at + 1;
            n = taken + 1;
            star = Some((at, taken + 1));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, os::unix::fs::symlink};

    use super::*;

    struct World {
        folder: tempfile::TempDir,
        into: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            for name in [
                "a.txt",
                "b.txt",
                "app/main",
                "app/log/x",
                "app/log/keep",
                "name with space",
            ] {
                let path = folder.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, name).unwrap();
            }
            symlink("/etc", folder.path().join("app/link")).unwrap();
            let into = tempfile::tempdir().unwrap();
            Self { folder, into }
        }

        fn archive(&self, sources: &[&str]) -> Result<(String, BTreeSet<String>), ContextError> {
            let context = Context::open(self.folder.path())?;
            let sources: Vec<String> = sources.iter().map(|s| (*s).to_owned()).collect();
            let upload = context.archive(&sources, self.into.path())?;
            let mut archive = tar::Archive::new(fs::File::open(&upload.path).unwrap());
            let names = archive.entries().unwrap().map(|entry| {
                let entry = entry.unwrap();
                entry
                    .path()
                    .unwrap()
                    .to_string_lossy()
                    .trim_end_matches('/')
                    .to_owned()
            });
            Ok((upload.hash, names.collect()))
        }
    }

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn an_archive_holds_what_was_named() {
        // BC-118
        let world = World::new();
        assert_eq!(world.archive(&["a.txt"]).unwrap().1, set(&["a.txt"]));
        assert_eq!(
            world.archive(&["*.txt"]).unwrap().1,
            set(&["a.txt", "b.txt"])
        );
        assert_eq!(
            world.archive(&["name with space", "a.txt"]).unwrap().1,
            set(&["name with space", "a.txt"])
        );
        let app = set(&[
            "content",
            "content/main",
            "content/link",
            "content/log",
            "content/log/x",
            "content/log/keep",
        ]);
        assert_eq!(world.archive(&["app/"]).unwrap().1, app);
        assert_eq!(world.archive(&["./x/../app"]).unwrap().1, app);
        for outside in ["../x", "app/../../x", "/../x"] {
            assert!(matches!(
                world.archive(&[outside]),
                Err(ContextError::Outside(_))
            ));
        }
        for missing in ["none", "app/link/passwd", "*.none"] {
            assert!(matches!(
                world.archive(&[missing]),
                Err(ContextError::Missing(_))
            ));
        }
    }

    #[test]
    fn the_name_of_an_archive_follows_content() {
        // R-P5: a second build finds what the first one made.
        let world = World::new();
        let first = world.archive(&["app"]).unwrap().0;
        assert_eq!(world.archive(&["app"]).unwrap().0, first);
        fs::write(world.folder.path().join("app/main"), "changed").unwrap();
        assert_ne!(world.archive(&["app"]).unwrap().0, first);
    }

    #[test]
    fn ignored_files_are_not_copied() {
        let world = World::new();
        let rules = "# comment\n*.txt\n!b.txt\n**/log\n!**/keep\n";
        fs::write(world.folder.path().join(".dockerignore"), rules).unwrap();
        let names = world.archive(&["."]).unwrap().1;
        assert!(names.contains("content/b.txt") && names.contains("content/app/log/keep"));
        assert!(!names.contains("content/a.txt") && !names.contains("content/app/log/x"));
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, matched) in [
            ("*", "x", true),
            ("a*c", "abbc", true),
            ("a*c", "abcd", false),
            ("?", "ж", true),
            ("", "x", false),
            ("**a**b", "xaxb", true),
            (&"*a".repeat(20), &"a".repeat(19), false),
        ] {
            assert_eq!(matches(pattern, name), matched, "{pattern} {name}");
        }
    }
}
