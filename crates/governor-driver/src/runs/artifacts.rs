//! Which files of a run are artifacts, and which of them are due to be told. Pure.
//!
//! ```text
//!   listed ─▶ matches a glob? ─▶ as it was told? ─▶ no: still as at the last look, or the process
//!                                                   has ended? ─▶ due, within the caps
//! ```
//!
//! A file that is being written is told when it has stood still for a look; one that changes later is
//! told again.

use std::collections::BTreeMap;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};

use super::agent::FileInfo;

/// The most globs of one run.
pub const GLOBS_MAX: usize = 64;
/// The longest glob, in bytes.
pub const GLOB_BYTES_MAX: usize = 1_024;
/// The largest artifact that is told with its content.
pub(super) const ARTIFACT_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// The most content of all artifacts of one run together.
pub(super) const ARTIFACTS_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// The most artifacts of one run; what comes after them is not told.
pub(super) const ARTIFACTS_MAX: usize = 1_000;
/// How deep a `**` looks.
const DEPTH_MAX: u32 = 16;
/// The most content that one look reads, so that a look does not take long.
pub(super) const LOOK_BYTES_MAX: u64 = ARTIFACT_BYTES_MAX;

/// Why a glob is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GlobError {
    /// There are too many.
    #[error("at most {GLOBS_MAX} globs")]
    TooMany,
    /// One is empty, too long, absolute or leads out of the workspace.
    #[error("a glob is a relative path of 1 to {GLOB_BYTES_MAX} bytes without '..'")]
    NotRelative,
    /// One cannot be read.
    #[error("{0}")]
    Unreadable(String),
}

/// The globs of a run, relative to its workspace.
#[derive(Debug, Clone)]
pub struct Globs {
    texts: Vec<String>,
    set: GlobSet,
}

impl Globs {
    /// Reads them.
    ///
    /// # Errors
    /// One is none.
    pub fn new(texts: Vec<String>) -> Result<Self, GlobError> {
        if texts.len() > GLOBS_MAX {
            return Err(GlobError::TooMany);
        }
        let mut set = GlobSetBuilder::new();
        for text in &texts {
            let is_relative = !text.starts_with(['/', '~']) && text.split('/').all(|p| p != "..");
            if text.is_empty() || text.len() > GLOB_BYTES_MAX || !is_relative {
                return Err(GlobError::NotRelative);
            }
            let pattern = text.strip_prefix("./").unwrap_or(text);
            let glob = GlobBuilder::new(pattern).literal_separator(true).build();
            set.add(glob.map_err(|error| GlobError::Unreadable(error.kind().to_string()))?);
        }
        let set = set.build();
        Ok(Self {
            texts,
            set: set.map_err(|error| GlobError::Unreadable(error.kind().to_string()))?,
        })
    }

    /// As they were written.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Whether a path in the workspace is an artifact's.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        self.set.is_match(path)
    }

    /// Which directories are to be listed and how deep, to see whatever can match.
    pub(super) fn looks(&self) -> BTreeMap<String, u32> {
        let mut looks = BTreeMap::new();
        for text in &self.texts {
            let parts: Vec<&str> = text
                .split('/')
                .filter(|p| !p.is_empty() && *p != ".")
                .collect();
            let is_literal = |part: &&&str| !part.contains(['*', '?', '[', '{', '\\']);
            // The last part is a file's name.
            let fixed = parts.iter().take_while(is_literal).count();
            let fixed = fixed.min(parts.len().saturating_sub(1));
            let below = u32::try_from(parts.len() - fixed).unwrap_or(DEPTH_MAX);
            let is_deep = parts[fixed..]
                .iter()
                .any(|p| p.contains("**") || p.contains('{'));
            let depth = if is_deep {
                DEPTH_MAX
            } else {
                below.min(DEPTH_MAX)
            };
            let depth_there = looks.entry(parts[..fixed].join("/")).or_insert(0);
            *depth_there = depth.max(*depth_there);
        }
        looks
    }
}

/// What a file looked like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    pub(super) size: u64,
    pub(super) modified_at: String,
}

/// Why the content of an artifact is not told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Omitted {
    /// It alone has more than [`ARTIFACT_BYTES_MAX`].
    TooLarge,
    /// All of them have more than [`ARTIFACTS_BYTES_MAX`].
    TotalTooLarge,
}

impl Omitted {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::TooLarge => "too_large",
            Self::TotalTooLarge => "total_too_large",
        }
    }
}

/// One that is to be told now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Due {
    /// In the workspace.
    pub(super) path: String,
    pub(super) stamp: Stamp,
    pub(super) omitted: Option<Omitted>,
}

/// Whether the process may still write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writing {
    MayGoOn,
    IsOver,
}

/// What was seen and told so far.
#[derive(Debug, Default)]
pub(super) struct Manifest {
    told: BTreeMap<String, Stamp>,
    seen: BTreeMap<String, Stamp>,
    bytes: u64,
}

impl Manifest {
    /// Notes one that was told, by this replica or the one before it.
    pub(super) fn note(&mut self, path: String, stamp: Stamp, is_omitted: bool) {
        if !is_omitted {
            self.bytes = self.bytes.saturating_add(stamp.size);
        }
        self.told.insert(path, stamp);
    }

    /// How many different ones were told.
    pub(super) fn count(&self) -> usize {
        self.told.len()
    }

    /// The ones that are due, in the order of their paths; at most a look's worth of content.
    pub(super) fn due(
        &mut self,
        globs: &Globs,
        workspace: &str,
        listed: &[FileInfo],
        writing: Writing,
    ) -> Vec<Due> {
        let inside = format!("{}/", workspace.trim_end_matches('/'));
        let mut here = BTreeMap::new();
        for file in listed {
            // What a link leads to is outside, or listed itself.
            if file.kind != "FILE_TYPE_FILE" || file.is_symlink {
                continue;
            }
            if let (Some(path), Ok(size)) = (file.path.strip_prefix(&inside), file.size.parse())
                && globs.matches(path)
            {
                let modified_at = file.modified_time.clone();
                here.insert(path.to_owned(), Stamp { size, modified_at });
            }
        }
        let mut due = Vec::new();
        let (mut look, mut total, mut count) = (0, self.bytes, self.told.len());
        for (path, stamp) in &here {
            let is_still = writing == Writing::IsOver || self.seen.get(path) == Some(stamp);
            if !is_still || self.told.get(path) == Some(stamp) {
                continue;
            }
            if !self.told.contains_key(path) {
                if count >= ARTIFACTS_MAX {
                    continue;
                }
                count += 1;
            }
            let omitted = if stamp.size > ARTIFACT_BYTES_MAX {
                Some(Omitted::TooLarge)
            } else if total + stamp.size > ARTIFACTS_BYTES_MAX {
                Some(Omitted::TotalTooLarge)
            } else {
                None
            };
            if omitted.is_none() {
                if look + stamp.size > LOOK_BYTES_MAX {
                    break;
                }
                look += stamp.size;
                total += stamp.size;
            }
            due.push(Due {
                path: path.clone(),
                stamp: stamp.clone(),
                omitted,
            });
        }
        self.seen = here;
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn globs(texts: &[&str]) -> Globs {
        Globs::new(texts.iter().map(ToString::to_string).collect()).unwrap()
    }

    fn file(path: &str, size: u64, modified: &str) -> FileInfo {
        FileInfo {
            path: format!("/work/{path}"),
            kind: "FILE_TYPE_FILE".to_owned(),
            size: size.to_string(),
            modified_time: modified.to_owned(),
            is_symlink: false,
        }
    }

    fn paths(due: &[Due]) -> Vec<&str> {
        due.iter().map(|due| due.path.as_str()).collect()
    }

    #[test]
    fn a_glob_stays_in_its_directory_unless_it_says_otherwise() {
        let globs = globs(&["out/*.png", "**/*.csv", "report.txt"]);
        for (path, matches) in [
            ("out/a.png", true),
            ("out/deep/a.png", false),
            ("a.csv", true),
            ("x/y/a.csv", true),
            ("report.txt", true),
            ("x/report.txt", false),
        ] {
            assert_eq!(globs.matches(path), matches, "{path}");
        }
    }

    #[test]
    fn only_what_can_match_is_listed() {
        let looks = globs(&["out/*.png", "out/a/b/c.txt", "**/*.csv", "a.txt"]).looks();
        let expected = [("", 16), ("out", 1), ("out/a/b", 1)];
        let expected = expected.map(|(dir, depth)| (dir.to_owned(), depth));
        assert_eq!(looks, BTreeMap::from(expected));
        assert_eq!(
            globs(&["*/*/x"]).looks(),
            BTreeMap::from([(String::new(), 3)])
        );
    }

    #[test]
    fn globs_that_lead_out_are_refused() {
        for text in [
            "",
            "/etc/*",
            "../x",
            "a/../../b",
            "~/x",
            "a[",
            &"x".repeat(2_000),
        ] {
            assert!(Globs::new(vec![text.to_owned()]).is_err(), "{text}");
        }
        assert!(Globs::new(vec!["x".to_owned(); GLOBS_MAX + 1]).is_err());
    }

    #[test]
    fn a_file_is_told_when_it_stands_still_and_again_when_it_changed() {
        let globs = globs(&["*.txt"]);
        let mut manifest = Manifest::default();
        let look = |manifest: &mut Manifest, size, at| {
            manifest.due(
                &globs,
                "/work",
                &[file("a.txt", size, at)],
                Writing::MayGoOn,
            )
        };
        assert!(look(&mut manifest, 1, "t1").is_empty(), "it may be growing");
        assert!(look(&mut manifest, 2, "t2").is_empty(), "it grows");
        let due = look(&mut manifest, 2, "t2");
        assert_eq!(paths(&due), ["a.txt"]);
        manifest.note(due[0].path.clone(), due[0].stamp.clone(), false);
        assert!(look(&mut manifest, 2, "t2").is_empty(), "it was told");
        let over = manifest.due(&globs, "/work", &[file("a.txt", 3, "t3")], Writing::IsOver);
        assert_eq!(paths(&over), ["a.txt"], "nobody writes it any more");
    }

    #[test]
    fn caps_are_kept() {
        let globs = globs(&["**"]);
        let mut manifest = Manifest::default();
        let big = file("big", ARTIFACT_BYTES_MAX + 1, "t");
        let due = manifest.due(&globs, "/work", &[big], Writing::IsOver);
        assert_eq!(due[0].omitted, Some(Omitted::TooLarge));
        let mut told = 0;
        loop {
            let all: Vec<_> = (0..9)
                .map(|n| file(&format!("f{n}"), ARTIFACT_BYTES_MAX / 2, "t"))
                .collect();
            let due = manifest.due(&globs, "/work", &all, Writing::IsOver);
            if due.is_empty() {
                break;
            }
            let content: u64 = due
                .iter()
                .filter(|d| d.omitted.is_none())
                .map(|d| d.stamp.size)
                .sum();
            assert!(content <= LOOK_BYTES_MAX);
            told += content;
            for due in due {
                manifest.note(due.path, due.stamp, due.omitted.is_some());
            }
        }
        assert_eq!(told, ARTIFACTS_BYTES_MAX);
        assert_eq!(manifest.count(), 9);

        let mut manifest = Manifest::default();
        let many: Vec<_> = (0..2_000).map(|n| file(&format!("{n}"), 1, "t")).collect();
        let due = manifest.due(&globs, "/work", &many, Writing::IsOver);
        assert_eq!(due.len(), ARTIFACTS_MAX);
    }

    #[test]
    fn what_a_hostile_guest_lists_is_not_believed() {
        let globs = globs(&["**"]);
        let mut link = file("a", 1, "t");
        link.is_symlink = true;
        let mut outside = file("b", 1, "t");
        outside.path = "/workshop/passwd".to_owned();
        let mut size = file("c", 1, "t");
        size.size = "-1".to_owned();
        let due = Manifest::default().due(&globs, "/work", &[link, outside, size], Writing::IsOver);
        assert!(due.is_empty());
    }
}
