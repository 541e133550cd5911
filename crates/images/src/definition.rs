//! A template's definition: what `template.toml` says, checked.
//!
//! Owns the format and its rules; reads one file and looks whether the files that it names are
//! there. It makes nothing.
//!
//! ```text
//!   template.toml ──parse──▶ Definition { source, agent, resources }
//!   files/ setup.sh ─────────▲ (paths, resolved against the folder)
//! ```
//!
//! Invariants: every value that later becomes an argument of a program was matched against a
//! character set here, so that no name can be taken for an option or a path; a path named by a
//! definition stays inside its folder.

mod parts;

use std::{
    ops::Range,
    path::{Component, Path, PathBuf},
};

use sandhold_types::Resources;
use serde::Deserialize;
use toml::Spanned;

pub use parts::{AgentSettings, Fallback, Source, Start};

use crate::image::ImageSource;

/// How many packages, wheels and aliases a definition may name.
const LIST_LENGTH_MAX: usize = 512;
/// How long one of those may be, in bytes.
const ITEM_LENGTH_MAX: usize = 200;
/// How long a definition may be, in bytes.
const DEFINITION_BYTES_MAX: u64 = 256 * 1024;

/// Why a definition cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DefinitionError {
    /// It cannot be read.
    #[error("could not read the template definition {path}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It is longer than a definition can be.
    #[error("{path} is longer than {DEFINITION_BYTES_MAX} bytes")]
    TooLong {
        /// Which file.
        path: PathBuf,
    },
    /// It is not TOML, or a field is unknown, missing or of another type.
    #[error("{path}:{line}: {message}")]
    Syntax {
        /// Which file.
        path: PathBuf,
        /// The line, counted from one.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// A field's value cannot be had.
    #[error("{path}:{line}: {field} {rule}")]
    Field {
        /// Which file.
        path: PathBuf,
        /// The line, counted from one.
        line: usize,
        /// The field, such as `source.packages[2]`.
        field: String,
        /// The rule that it breaks, in words.
        rule: String,
    },
}

/// A checked definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition {
    /// The name that callers use.
    pub name: String,
    /// Further names.
    pub aliases: Vec<String>,
    /// One sentence for people.
    pub description: String,
    /// Where the root file system comes from.
    pub source: Source,
    /// Python wheels to install, as `name==version`.
    pub wheels: Vec<String>,
    /// A folder that is copied over the root.
    pub overlay: Option<PathBuf>,
    /// A script that is run inside the root at the end.
    pub setup: Option<PathBuf>,
    /// What the agent is told.
    pub agent: AgentSettings,
    /// What sandboxes have running.
    pub start: Start,
    /// What counts where an image names nothing.
    pub fallback: Fallback,
    /// Limits of sandboxes made from it.
    pub resources: Resources,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDefinition {
    name: Spanned<String>,
    #[serde(default)]
    aliases: Vec<Spanned<String>>,
    #[serde(default)]
    description: String,
    source: Spanned<RawSource>,
    #[serde(default)]
    agent: AgentSettings,
    #[serde(default)]
    resources: RawResources,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSource {
    kind: Spanned<String>,
    path: Option<Spanned<String>>,
    reference: Option<Spanned<String>>,
    #[serde(default)]
    packages: Vec<Spanned<String>>,
    #[serde(default)]
    wheels: Vec<Spanned<String>>,
    overlay: Option<Spanned<String>>,
    setup: Option<Spanned<String>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct RawResources {
    cpu_milli: Option<Spanned<u32>>,
    memory_mib: Option<Spanned<u32>>,
    disk_mib: Option<Spanned<u32>>,
    pids_max: Option<Spanned<u32>>,
}

impl Definition {
    /// Reads a definition from `path`: the file, or the folder that holds a `template.toml`.
    ///
    /// # Errors
    /// The file and line of the first thing that is wrong.
    pub fn load(path: &Path) -> Result<Self, DefinitionError> {
        let file = if path.is_dir() {
            path.join("template.toml")
        } else {
            path.to_owned()
        };
        let read_error = |source| DefinitionError::Read {
            path: file.clone(),
            source,
        };
        let size = std::fs::metadata(&file).map_err(read_error)?.len();
        if size > DEFINITION_BYTES_MAX {
            return Err(DefinitionError::TooLong { path: file });
        }
        let text = std::fs::read_to_string(&file).map_err(read_error)?;
        Self::parse(&file, &text)
    }

    /// Reads a definition that stands in `text` and came from `file`.
    ///
    /// # Errors
    /// The line of the first thing that is wrong.
    pub fn parse(file: &Path, text: &str) -> Result<Self, DefinitionError> {
        let raw: RawDefinition = toml::from_str(text).map_err(|error| DefinitionError::Syntax {
            path: file.to_owned(),
            line: line_of(text, error.span().unwrap_or(0..0).start),
            message: error.message().to_owned(),
        })?;
        let folder = file.parent().unwrap_or_else(|| Path::new("."));
        Checker { file, text, folder }.definition(raw)
    }

    /// The names that callers may use, the main one first.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let mut names = vec![self.name.clone()];
        names.extend(self.aliases.iter().cloned());
        names
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().iter().take(offset);
    before.filter(|b| **b == b'\n').count() + 1
}

struct Checker<'a> {
    file: &'a Path,
    text: &'a str,
    folder: &'a Path,
}

type Checked<T> = Result<T, DefinitionError>;

impl Checker<'_> {
    fn wrong(&self, span: &Range<usize>, field: &str, rule: impl Into<String>) -> DefinitionError {
        DefinitionError::Field {
            path: self.file.to_owned(),
            line: line_of(self.text, span.start),
            field: field.to_owned(),
            rule: rule.into(),
        }
    }

    fn definition(&self, raw: RawDefinition) -> Checked<Definition> {
        let name = self.item("name", &raw.name, is_template_name, TEMPLATE_NAME_RULE)?;
        let aliases = self.list(
            "aliases",
            &raw.aliases,
            is_template_name,
            TEMPLATE_NAME_RULE,
        )?;
        let source_span = raw.source.span();
        let raw_source = raw.source.into_inner();
        let wheels = self.list(
            "source.wheels",
            &raw_source.wheels,
            is_requirement,
            "must be a requirement such as `name==1.0`",
        )?;
        let overlay = self.optional_path("source.overlay", raw_source.overlay.as_ref())?;
        if let (Some(path), Some(raw)) = (&overlay, &raw_source.overlay)
            && !path.is_dir()
        {
            return Err(self.wrong(&raw.span(), "source.overlay", "is not a folder"));
        }
        let setup = self.optional_path("source.setup", raw_source.setup.as_ref())?;
        if let (Some(path), Some(raw)) = (&setup, &raw_source.setup)
            && !path.is_file()
        {
            return Err(self.wrong(&raw.span(), "source.setup", "is not a file"));
        }
        Ok(Definition {
            name,
            aliases,
            description: raw.description,
            source: self.source(&source_span, &raw_source)?,
            wheels,
            overlay,
            setup,
            agent: raw.agent,
            start: Start::AsDefined,
            fallback: Fallback::default(),
            resources: self.resources(&raw.resources)?,
        })
    }

    fn source(&self, span: &Range<usize>, raw: &RawSource) -> Checked<Source> {
        let kind = raw.kind.get_ref().as_str();
        self.check_fields(kind, raw)?;
        match kind {
            "bootstrap" => {
                let packages = self.list(
                    "source.packages",
                    &raw.packages,
                    is_package,
                    "must be the name of a Debian package",
                )?;
                Ok(Source::Bootstrap { packages })
            }
            "dir" => {
                let path = self.place(span, raw, "is not a folder", Path::is_dir)?;
                Ok(Source::Directory { path })
            }
            "image" => {
                let Some(reference) = &raw.reference else {
                    return Err(self.wrong(span, "source.reference", "is missing"));
                };
                Ok(Source::Image(ImageSource::Registry {
                    reference: reference.get_ref().clone(),
                    credentials: None,
                }))
            }
            "oci-layout" => {
                let path = self.place(span, raw, "is not a folder", Path::is_dir)?;
                let name = raw.reference.as_ref().map(|name| name.get_ref().clone());
                Ok(Source::Image(ImageSource::Layout { path, name }))
            }
            "docker-archive" => {
                let path = self.place(span, raw, "is not a file", Path::is_file)?;
                Ok(Source::Image(ImageSource::Archive { path }))
            }
            other => Err(self.wrong(
                &raw.kind.span(),
                "source.kind",
                format!(
                    "'{other}' is not known; it is \"bootstrap\", \"dir\", \"image\", \
                     \"oci-layout\" or \"docker-archive\""
                ),
            )),
        }
    }

    /// Fields that a kind of source does not have.
    fn check_fields(&self, kind: &str, raw: &RawSource) -> Checked<()> {
        let packages = raw.packages.first().map(Spanned::span);
        let path = raw.path.as_ref().map(Spanned::span);
        let reference = raw.reference.as_ref().map(Spanned::span);
        let surplus = match kind {
            "bootstrap" => [("path", path), ("reference", reference)],
            "image" => [("path", path), ("packages", packages)],
            "oci-layout" => [("packages", packages), ("packages", None)],
            _ => [("packages", packages), ("reference", reference)],
        };
        let found = surplus.into_iter().find_map(|(n, span)| Some((n, span?)));
        match found {
            None => Ok(()),
            Some((name, span)) => {
                let rule = format!("does not go with kind = \"{kind}\"");
                Err(self.wrong(&span, &format!("source.{name}"), rule))
            }
        }
    }

    /// Where a source is: it may lie anywhere on the machine of whoever builds it.
    fn place(
        &self,
        span: &Range<usize>,
        raw: &RawSource,
        rule: &str,
        accept: fn(&Path) -> bool,
    ) -> Checked<PathBuf> {
        let Some(path) = &raw.path else {
            return Err(self.wrong(span, "source.path", "is missing"));
        };
        let full = self.folder.join(path.get_ref());
        match accept(&full) {
            true => Ok(full),
            false => Err(self.wrong(&path.span(), "source.path", rule)),
        }
    }

    fn item(
        &self,
        field: &str,
        value: &Spanned<String>,
        accept: fn(&str) -> bool,
        rule: &str,
    ) -> Checked<String> {
        let text = value.get_ref();
        if text.len() <= ITEM_LENGTH_MAX && accept(text) {
            Ok(text.clone())
        } else {
            Err(self.wrong(&value.span(), field, rule))
        }
    }

    fn list(
        &self,
        field: &str,
        values: &[Spanned<String>],
        accept: fn(&str) -> bool,
        rule: &str,
    ) -> Checked<Vec<String>> {
        if let Some(extra) = values.get(LIST_LENGTH_MAX) {
            let rule = format!("holds more than {LIST_LENGTH_MAX} entries");
            return Err(self.wrong(&extra.span(), field, rule));
        }
        let numbered = values.iter().enumerate();
        numbered
            .map(|(index, value)| self.item(&format!("{field}[{index}]"), value, accept, rule))
            .collect()
    }

    fn optional_path(
        &self,
        field: &str,
        value: Option<&Spanned<String>>,
    ) -> Checked<Option<PathBuf>> {
        let Some(value) = value else { return Ok(None) };
        let path = Path::new(value.get_ref());
        let stays = path.components().all(|c| matches!(c, Component::Normal(_)));
        if path.as_os_str().is_empty() || !stays {
            let rule = "must be a path inside the template's folder";
            return Err(self.wrong(&value.span(), field, rule));
        }
        Ok(Some(self.folder.join(path)))
    }

    fn resources(&self, raw: &RawResources) -> Checked<Resources> {
        let default = Resources::default();
        let within =
            |field: &str, value: &Option<Spanned<u32>>, default: u32, min: u32, max: u32| {
                let Some(value) = value else {
                    return Ok(default);
                };
                let number = *value.get_ref();
                if (min..=max).contains(&number) {
                    Ok(number)
                } else {
                    let rule = format!("must be between {min} and {max}");
                    Err(self.wrong(&value.span(), field, rule))
                }
            };
        Ok(Resources {
            cpu_milli: within(
                "resources.cpu_milli",
                &raw.cpu_milli,
                default.cpu_milli,
                100,
                256_000,
            )?,
            memory_mib: within(
                "resources.memory_mib",
                &raw.memory_mib,
                default.memory_mib,
                128,
                1 << 20,
            )?,
            disk_mib: within(
                "resources.disk_mib",
                &raw.disk_mib,
                default.disk_mib,
                64,
                1 << 22,
            )?,
            pids_max: within(
                "resources.pids_max",
                &raw.pids_max,
                default.pids_max,
                64,
                1 << 20,
            )?,
        })
    }
}

const TEMPLATE_NAME_RULE: &str =
    "must be 1 to 64 lower-case letters, digits, '-' or '_', beginning with a letter or digit";

/// Whether callers can ask for a template by this name.
#[must_use]
pub fn is_template_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_');
    (1..=64).contains(&text.len())
        && text.bytes().all(inner)
        && text.as_bytes()[0].is_ascii_alphanumeric()
}

/// A Debian package name (policy 5.6.1), perhaps with an architecture or an exact version.
fn is_package(text: &str) -> bool {
    let (name, version) = match text.split_once('=') {
        Some((name, version)) => (name, Some(version)),
        None => (text, None),
    };
    let inner = |b: u8| {
        b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'+' | b'-' | b'.' | b':')
    };
    let version_inner = |b: u8| b.is_ascii_alphanumeric() || b".+-:~".contains(&b);
    name.len() >= 2
        && name.as_bytes()[0].is_ascii_alphanumeric()
        && name.bytes().all(inner)
        && version.is_none_or(|v| !v.is_empty() && v.bytes().all(version_inner))
}

/// A Python requirement: a name, perhaps extras, perhaps a version comparison. Nothing that pip
/// could take for an option, a path or an address.
fn is_requirement(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || b"._-[],=<>~!*+".contains(&b);
    text.bytes().all(inner)
        && text
            .bytes()
            .next()
            .is_some_and(|b| b.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "name = \"tiny\"\n[source]\nkind = \"bootstrap\"\npackages = [\"bash\"]\n";

    fn parse(text: &str) -> Result<Definition, DefinitionError> {
        Definition::parse(Path::new("/nowhere/template.toml"), text)
    }

    fn message(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn a_small_definition_gets_the_defaults() {
        let definition = parse(SMALL).unwrap();
        assert_eq!(definition.names(), ["tiny"]);
        assert_eq!(definition.resources, Resources::default());
        assert_eq!(definition.agent.default_user, "user");
    }

    #[test]
    fn an_error_names_line_and_field() {
        // R-P5
        assert_eq!(
            message(&SMALL.replace("\"bash\"", "\"bash\",\n  \"-o\"")),
            "/nowhere/template.toml:5: source.packages[1] must be the name of a Debian package"
        );
        assert!(message(&format!("{SMALL}colour = 1\n")).contains(":5: unknown field `colour`"));
        assert!(
            message("name = \"x\"\n[source]\nkind = \"oci\"").contains(":3: source.kind 'oci'")
        );
        assert!(message("name = \"x\"\n\nsource = 3").contains(":3: "));
        assert!(message("name = ").contains(":1: "));
    }

    #[test]
    fn limits_have_limits() {
        let text = format!("{SMALL}[resources]\nmemory_mib = 1\n");
        assert!(message(&text).contains(":6: resources.memory_mib must be between"));
        let text = format!("{SMALL}[resources]\nmemory_mib = -4\n");
        assert!(message(&text).contains(":6: "));
    }

    #[test]
    fn paths_stay_inside_the_folder() {
        for path in ["../x", "/etc", "a/../../b", ""] {
            let text = format!("{SMALL}setup = \"{path}\"\n");
            assert!(message(&text).contains("must be a path inside"), "{path}");
        }
        let text = format!("{SMALL}overlay = \"files\"\n");
        assert!(message(&text).contains("is not a folder"));
    }

    #[test]
    fn no_name_can_be_taken_for_an_option_or_an_address() {
        for wheel in [
            "-r evil.txt",
            "--index-url=x",
            "git+https://x/y",
            "x @ file:///x",
            "",
        ] {
            assert!(!is_requirement(wheel), "{wheel}");
        }
        for wheel in [
            "deno==2.5.6",
            "uvicorn[standard]>=0.30,<1",
            "bash_kernel==0.10.0",
        ] {
            assert!(is_requirement(wheel), "{wheel}");
        }
        for package in ["-y", "Bash", "a b", "x", "bash=", "bash;id"] {
            assert!(!is_package(package), "{package}");
        }
        for package in [
            "libstdc++6",
            "python3.11",
            "bash=5.2.15-2+b13",
            "libc6:amd64",
        ] {
            assert!(is_package(package), "{package}");
        }
        assert!(!is_template_name(&"x".repeat(10_000)));
    }

    proptest::proptest! {
        #[test]
        fn any_text_gets_an_answer(text in "\\PC{0,200}") {
            let _ = parse(&text);
        }
    }
}
