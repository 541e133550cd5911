//! Languages and the kernels that a template holds for them.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;

/// A longer name is no language.
const NAME_BYTES_MAX: usize = 64;
/// A larger kernel specification is not read.
const SPEC_BYTES_MAX: u64 = 64 << 10;
/// No more specifications than this are looked at in one directory.
const SPECS_MAX: usize = 64;

/// A language as the client named it, in its usual spelling.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Language(String);

/// Languages that one kernel understands: TypeScript's also runs JavaScript.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Family {
    Python,
    JavaScript,
    Bash,
    R,
    Java,
    /// Named by its kernel.
    Other(String),
}

/// How a kernel is started: its `kernel.json`.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
pub(super) struct KernelSpec {
    /// The command; `{connection_file}` stands for the file's path.
    pub(super) argv: Vec<String>,
    /// The language, as the kernel's authors spell it.
    #[serde(default)]
    pub(super) language: String,
    /// More variables for it.
    #[serde(default)]
    pub(super) env: BTreeMap<String, String>,
    /// How it is interrupted.
    #[serde(default)]
    pub(super) interrupt_mode: InterruptMode,
    /// The name of its directory.
    #[serde(skip)]
    pub(super) name: String,
}

/// How a kernel is interrupted.
#[derive(Debug, Clone, Copy, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum InterruptMode {
    /// By SIGINT to its process group.
    #[default]
    Signal,
    /// By a message on its control channel.
    Message,
}

// === impl Language ===

impl Language {
    /// The language of this name, or Python if there is no name. `None` if it cannot be a name.
    pub(super) fn parse(name: Option<&str>) -> Option<Self> {
        let name = name.unwrap_or("python").trim().to_ascii_lowercase();
        let allowed = |c: char| c.is_ascii_alphanumeric() || "+#-_.".contains(c);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(allowed) {
            return None;
        }
        let usual = match name.as_str() {
            "py" | "python3" => "python",
            "js" | "node" => "javascript",
            "ts" => "typescript",
            "sh" | "shell" => "bash",
            other => other,
        };
        Some(Self(usual.to_owned()))
    }

    /// Its name.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// What kind of kernel runs it.
    pub(super) fn family(&self) -> Family {
        match self.0.as_str() {
            "python" => Family::Python,
            "javascript" | "typescript" => Family::JavaScript,
            "bash" => Family::Bash,
            "r" => Family::R,
            "java" => Family::Java,
            other => Family::Other(other.to_owned()),
        }
    }
}

// === impl Family ===

impl Family {
    fn is_run_by(&self, spec: &KernelSpec) -> bool {
        let language = spec.language.to_ascii_lowercase();
        match self {
            Self::Python => language == "python",
            Self::JavaScript => language == "typescript" || language == "javascript",
            Self::Bash => language == "bash",
            Self::R => language == "r",
            Self::Java => language == "java",
            Self::Other(name) => language == *name || spec.name.eq_ignore_ascii_case(name),
        }
    }

    /// The kernel for it among these: the first by name, but Deno before other JavaScripts
    /// because it runs TypeScript too.
    pub(super) fn choose<'a>(&self, specs: &'a [KernelSpec]) -> Option<&'a KernelSpec> {
        specs
            .iter()
            .filter(|spec| self.is_run_by(spec))
            .min_by_key(|spec| (spec.language == "javascript", &spec.name))
    }
}

/// The kernels in these directories of kernel specifications; of two with one name, the first.
pub(super) fn find_specs<'a>(directories: impl IntoIterator<Item = &'a Path>) -> Vec<KernelSpec> {
    let mut found: BTreeMap<String, KernelSpec> = BTreeMap::new();
    for directory in directories {
        let Ok(entries) = std::fs::read_dir(directory) else {
            continue;
        };
        for entry in entries.flatten().take(SPECS_MAX) {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(spec) = read_spec(&entry.path().join("kernel.json"), &name) {
                found.entry(name).or_insert(spec);
            }
        }
    }
    found.into_values().collect()
}

fn read_spec(path: &Path, name: &str) -> Option<KernelSpec> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .ok()?
        .take(SPEC_BYTES_MAX)
        .read_to_end(&mut bytes)
        .ok()?;
    let spec: KernelSpec = serde_json::from_slice(&bytes).ok()?;
    (!spec.argv.is_empty()).then(|| KernelSpec {
        name: name.to_owned(),
        ..spec
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, language: &str) -> KernelSpec {
        KernelSpec {
            argv: vec![String::from("x")],
            language: language.to_owned(),
            env: BTreeMap::new(),
            interrupt_mode: InterruptMode::Signal,
            name: name.to_owned(),
        }
    }

    #[test]
    fn names_have_a_usual_spelling_and_a_bound() {
        for (given, usual) in [
            (None, Some("python")),
            (Some("js"), Some("javascript")),
            (Some("TS"), Some("typescript")),
            (Some("R"), Some("r")),
            (Some("julia-1.10"), Some("julia-1.10")),
            (Some(""), None),
            (Some("../../bin/sh"), None),
            (Some("é"), None),
        ] {
            let language = Language::parse(given);
            assert_eq!(language.as_ref().map(Language::as_str), usual, "{given:?}");
        }
        assert_eq!(Language::parse(Some(&"a".repeat(10_000))), None);
    }

    #[test]
    fn typescript_and_javascript_share_a_kernel() {
        let family = |name| Language::parse(Some(name)).unwrap().family();
        assert_eq!(family("ts"), family("javascript"));
        let specs = [spec("a", "javascript"), spec("deno", "typescript")];
        assert_eq!(family("js").choose(&specs).unwrap().name, "deno");
        assert_eq!(family("js").choose(&specs[..1]).unwrap().name, "a");
    }

    #[test]
    fn a_template_without_a_kernel_has_no_such_language() {
        let specs = [spec("python3", "python"), spec("ir", "R")];
        assert_eq!(Family::Java.choose(&specs), None);
        assert_eq!(Family::R.choose(&specs).unwrap().name, "ir");
        let other = Family::Other(String::from("julia"));
        assert_eq!(other.choose(&[spec("Julia", "x")]).unwrap().name, "Julia");
    }

    #[test]
    fn specifications_are_read_from_their_directories() {
        let first = tempfile::tempdir().unwrap();
        let second = tempfile::tempdir().unwrap();
        let write = |root: &Path, name: &str, text: &str| {
            std::fs::create_dir(root.join(name)).unwrap();
            std::fs::write(root.join(name).join("kernel.json"), text).unwrap();
        };
        write(first.path(), "a", r#"{"argv":["one"],"language":"x"}"#);
        write(first.path(), "broken", "{");
        write(first.path(), "empty", r#"{"argv":[]}"#);
        write(second.path(), "a", r#"{"argv":["two"]}"#);
        write(
            second.path(),
            "b",
            r#"{"argv":["three"],"interrupt_mode":"message","metadata":{}}"#,
        );
        let absent = Path::new("/nonexistent");
        let specs = find_specs([absent, first.path(), second.path()]);
        assert_eq!(specs.len(), 2);
        assert_eq!(specs[0].argv, ["one"]);
        assert_eq!(specs[1].interrupt_mode, InterruptMode::Message);
    }
}
