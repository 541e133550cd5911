//! Which archive the machine's apt is configured with.
//!
//! Templates are bootstrapped from the same archive as the machine, mirror, keyring and proxy
//! included, so that a machine which can install packages can build templates. Only the entries of
//! the machine's own release are taken: other vendors' archives have no place in a template.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Why there is no archive to bootstrap from.
#[derive(Debug, thiserror::Error)]
pub enum AptError {
    /// A file of the machine's configuration.
    #[error("could not read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The machine does not say which release it is.
    #[error(
        "/etc/os-release has no VERSION_CODENAME; templates can be bootstrapped on Debian only"
    )]
    NoRelease,
    /// No entry is for the machine's release.
    #[error("no entry of /etc/apt/sources.list or /etc/apt/sources.list.d is for '{release}'")]
    NoSource {
        /// The code name of the release.
        release: String,
    },
}

/// The archive of the machine's release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    /// The code name, such as `bookworm`.
    pub release: String,
    /// Where it is, an entry for each address.
    pub entries: Vec<Entry>,
}

/// One entry of apt's sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The address of the mirror.
    pub uri: String,
    /// Suites, such as `bookworm-updates`.
    pub suites: Vec<String>,
    /// Components, such as `main`.
    pub components: Vec<String>,
    /// Further fields as they stand, such as the keyring.
    pub fields: BTreeMap<String, String>,
}

impl Archive {
    /// Reads the configuration below `root` (`/` but in tests).
    ///
    /// # Errors
    /// It cannot be read, or has no entry for this release.
    pub fn of_machine(root: &Path) -> Result<Self, AptError> {
        let read = |path: PathBuf| {
            let text = std::fs::read_to_string(&path);
            text.map_err(|source| AptError::Read { path, source })
        };
        let os_release = read(root.join("etc/os-release"))?;
        let release = code_name(&os_release).ok_or(AptError::NoRelease)?;
        let mut entries = Vec::new();
        let mut paths = vec![root.join("etc/apt/sources.list")];
        let parts = root.join("etc/apt/sources.list.d");
        let listing = parts.read_dir().into_iter().flatten();
        paths.extend(listing.filter_map(|entry| Some(entry.ok()?.path())));
        paths.sort();
        for path in paths.into_iter().filter(|path| path.is_file()) {
            let kind = path.extension().map(|e| e.to_string_lossy().into_owned());
            match kind.as_deref() {
                Some("sources") => entries.extend(parse_stanzas(&read(path)?)),
                Some("list") => entries.extend(parse_lines(&read(path)?)),
                _ => {}
            }
        }
        let entries = of_release(&release, entries);
        if entries.is_empty() {
            return Err(AptError::NoSource { release });
        }
        Ok(Self { release, entries })
    }

    /// As apt reads it.
    #[must_use]
    pub fn to_stanzas(&self) -> String {
        let mut text = String::new();
        for entry in &self.entries {
            text.push_str("Types: deb\n");
            text.push_str(&format!("URIs: {}\n", entry.uri));
            text.push_str(&format!("Suites: {}\n", entry.suites.join(" ")));
            text.push_str(&format!("Components: {}\n", entry.components.join(" ")));
            for (name, value) in &entry.fields {
                text.push_str(&format!("{name}: {value}\n"));
            }
            text.push('\n');
        }
        text
    }

    /// The same without credentials in addresses, for files that sandboxes can read.
    #[must_use]
    pub fn without_credentials(&self) -> Self {
        let mut archive = self.clone();
        for entry in &mut archive.entries {
            if let Some((scheme, rest)) = entry.uri.split_once("://")
                && let Some((authority, path)) = rest.split_once('/')
                && let Some((_, host)) = authority.rsplit_once('@')
            {
                entry.uri = format!("{scheme}://{host}/{path}");
            }
        }
        archive
    }
}

fn code_name(os_release: &str) -> Option<String> {
    let mut lines = os_release.lines();
    let value = lines.find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
    let name = value.trim_matches('"');
    let known = !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase());
    known.then(|| name.to_owned())
}

/// The release itself, its updates and its security fixes; no backports, no other vendor.
fn of_release(release: &str, entries: Vec<Entry>) -> Vec<Entry> {
    let wanted = [
        release.to_owned(),
        format!("{release}-updates"),
        format!("{release}-security"),
        format!("{release}/updates"),
    ];
    let mut chosen: Vec<Entry> = Vec::new();
    for mut entry in entries {
        entry.suites.retain(|suite| wanted.contains(suite));
        if !entry.suites.is_empty() && !chosen.contains(&entry) {
            chosen.push(entry);
        }
    }
    // The first suite is the one that the essential packages come from.
    chosen.sort_by_key(|entry| !entry.suites.iter().any(|suite| suite == release));
    chosen
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// The one-line form: `deb [option=value …] uri suite component…`.
fn parse_lines(text: &str) -> Vec<Entry> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Entry> {
    let line = line.split('#').next()?.trim();
    let rest = line.strip_prefix("deb")?;
    if !rest.starts_with(char::is_whitespace) {
        return None;
    }
    let (options, rest) = match rest.trim_start().strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let mut parts = words(rest).into_iter();
    let uri = parts.next()?;
    let suite = parts.next()?;
    let fields = options.split_whitespace().filter_map(|option| {
        let (name, value) = option.split_once('=')?;
        let field = match name {
            "signed-by" => "Signed-By",
            "trusted" => "Trusted",
            "arch" => "Architectures",
            _ => return None,
        };
        Some((field.to_owned(), value.replace(',', " ")))
    });
    Some(Entry {
        uri,
        suites: vec![suite],
        components: parts.collect(),
        fields: fields.collect(),
    })
}

/// The form of several lines: stanzas of `Field: value`, a value going on in indented lines.
fn parse_stanzas(text: &str) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut fields: BTreeMap<String, String> = BTreeMap::new();
    let mut field = String::new();
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            entries.extend(stanza(std::mem::take(&mut fields)));
        } else if line.starts_with([' ', '\t']) {
            if let Some(value) = fields.get_mut(&field) {
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((name, value)) = line.split_once(':') {
            field = name.trim().to_ascii_lowercase();
            fields.insert(field.clone(), value.trim().to_owned());
        }
    }
    entries
}

fn stanza(mut fields: BTreeMap<String, String>) -> Vec<Entry> {
    let mut take = |name: &str| words(&fields.remove(name).unwrap_or_default());
    let types = take("types");
    let uris = take("uris");
    let suites = take("suites");
    let components = take("components");
    let enabled = take("enabled").first().is_none_or(|v| v != "no");
    if !enabled || !types.iter().any(|kind| kind == "deb") {
        return Vec::new();
    }
    let kept = [
        ("signed-by", "Signed-By"),
        ("trusted", "Trusted"),
        ("architectures", "Architectures"),
    ];
    let further: BTreeMap<String, String> = kept
        .into_iter()
        .filter_map(|(name, proper)| Some((proper.to_owned(), fields.remove(name)?)))
        .collect();
    uris.into_iter()
        .map(|uri| Entry {
            uri,
            suites: suites.clone(),
            components: components.clone(),
            fields: further.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANZAS: &str = "\
Types: deb deb-src
# a remark
URIs: http://mirror.example/debian
Suites: trixie trixie-updates
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Types: deb
URIs: http://mirror.example/security
Suites: trixie-security
Components: main
Enabled: no

Types: deb
URIs: http://vendor.example/node
Suites: nodistro
Components: main
";

    fn machine(os_release: &str, files: &[(&str, &str)]) -> Result<Archive, AptError> {
        let root = tempfile::tempdir().unwrap();
        let parts = root.path().join("etc/apt/sources.list.d");
        std::fs::create_dir_all(&parts).unwrap();
        std::fs::write(root.path().join("etc/os-release"), os_release).unwrap();
        for (name, text) in files {
            std::fs::write(root.path().join("etc/apt").join(name), text).unwrap();
        }
        Archive::of_machine(root.path())
    }

    #[test]
    fn only_the_own_release_is_taken() {
        let release = "NAME=x\nVERSION_CODENAME=trixie\n";
        let files = [("sources.list.d/debian.sources", STANZAS)];
        let archive = machine(release, &files).unwrap();
        assert_eq!(archive.entries.len(), 1);
        let entry = &archive.entries[0];
        assert_eq!(entry.suites, ["trixie", "trixie-updates"]);
        assert!(entry.fields["Signed-By"].ends_with(" .\n abc"));
        assert!(parse_stanzas(&archive.to_stanzas()) == archive.entries);
    }

    #[test]
    fn the_one_line_form_is_understood() {
        let lines = "\
# deb http://no.example x main
deb-src http://mirror.example/debian bookworm main
deb http://mirror.example/debian-security bookworm-security main
deb [arch=amd64 signed-by=/usr/share/keyrings/k.gpg] http://u:p@mirror.example/debian bookworm main # x
deb http://mirror.example/debian bookworm-backports main
";
        let files = [("sources.list", lines)];
        let archive = machine("VERSION_CODENAME=\"bookworm\"\n", &files).unwrap();
        assert_eq!(archive.entries.len(), 2);
        assert_eq!(archive.entries[0].suites, ["bookworm"]);
        assert_eq!(
            archive.entries[0].fields["Signed-By"],
            "/usr/share/keyrings/k.gpg"
        );
        let public = archive.without_credentials();
        assert_eq!(public.entries[0].uri, "http://mirror.example/debian");
    }

    #[test]
    fn a_machine_without_an_archive_is_told_so() {
        assert!(matches!(machine("NAME=x\n", &[]), Err(AptError::NoRelease)));
        let empty = machine("VERSION_CODENAME=trixie\n", &[]);
        assert!(empty.unwrap_err().to_string().contains("'trixie'"));
    }

    proptest::proptest! {
        #[test]
        fn any_text_gets_an_answer(text in "\\PC{0,300}") {
            parse_lines(&text);
            parse_stanzas(&text);
        }
    }
}
