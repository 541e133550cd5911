//! What is known about registries: credentials, mirrors, which may be spoken to without TLS.
//!
//! ```toml
//! [registry."docker.io"]
//! mirrors = ["mirror.example:5000"]
//! username = "me"
//! password_file = "/etc/sandhold/docker-password"
//!
//! [registry."mirror.example:5000"]
//! insecure = true
//! ```

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::guard::Allowed;

/// How long the settings may be, in bytes.
const SETTINGS_BYTES_MAX: u64 = 256 * 1024;
/// How long a password in a file may be, in bytes.
const PASSWORD_BYTES_MAX: u64 = 64 * 1024;
/// How many mirrors are asked before the registry itself.
const MIRRORS_MAX: usize = 8;

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegistriesError {
    /// A file cannot be read.
    #[error("could not read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file is longer than it can be.
    #[error("{path} is longer than {bytes_max} bytes")]
    TooLong {
        /// Which.
        path: PathBuf,
        /// The bound.
        bytes_max: u64,
    },
    /// The settings are not what they should be.
    #[error("{path}: {problem}")]
    Content {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// A name and a password.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Who.
    pub username: String,
    /// The password, or a token in its place.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

/// All that is known about registries.
#[derive(Debug, Clone, Default)]
pub struct Registries {
    by_host: BTreeMap<String, Registry>,
    insecure: Vec<String>,
    allowed: Option<Vec<String>>,
}

#[derive(Debug, Clone, Default)]
struct Registry {
    mirrors: Vec<String>,
    credentials: Option<Credentials>,
    insecure: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSettings {
    #[serde(default)]
    registry: BTreeMap<String, RawRegistry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRegistry {
    #[serde(default)]
    mirrors: Vec<String>,
    username: Option<String>,
    password_file: Option<PathBuf>,
    #[serde(default)]
    insecure: bool,
}

impl Registries {
    /// Reads the settings.
    ///
    /// # Errors
    /// What is wrong with them, or with a file that they name.
    pub fn load(path: &Path) -> Result<Self, RegistriesError> {
        let text = read_bounded(path, SETTINGS_BYTES_MAX)?;
        let wrong = |problem: String| RegistriesError::Content {
            path: path.to_owned(),
            problem,
        };
        let raw: RawSettings = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        let mut by_host = BTreeMap::new();
        for (host, registry) in raw.registry {
            if registry.mirrors.len() > MIRRORS_MAX {
                return Err(wrong(format!("{host} has more than {MIRRORS_MAX} mirrors")));
            }
            let credentials = match (registry.username, registry.password_file) {
                (None, None) => None,
                (Some(username), Some(file)) => Some(Credentials {
                    username,
                    password: read_bounded(&file, PASSWORD_BYTES_MAX)?
                        .trim_end_matches(['\n', '\r'])
                        .to_owned(),
                }),
                _ => {
                    let problem = "needs both username and password_file, or neither";
                    return Err(wrong(format!("{host} {problem}")));
                }
            };
            let registry = Registry {
                mirrors: registry.mirrors,
                credentials,
                insecure: registry.insecure,
            };
            by_host.insert(host, registry);
        }
        Ok(Self {
            by_host,
            insecure: Vec::new(),
            allowed: None,
        })
    }

    /// Lets a registry be spoken to without TLS: a host for all its ports, or `host:port`.
    pub fn allow_insecure(&mut self, registry: &str) {
        self.insecure.push(registry.to_owned());
    }

    /// From now on images come only from these: hosts, `host:port`, or `public` for whatever has a
    /// public address. Registries and mirrors of the settings are among them. Until this is called
    /// every place may be asked, which is for an operator's own builds.
    pub fn allow_only(&mut self, names: &[String]) {
        self.allowed = Some(names.to_vec());
    }

    /// Where images may come from; everywhere if none.
    pub(super) fn allowed(&self) -> Option<Allowed> {
        let mut allowed = Allowed::new(self.allowed.as_ref()?);
        for (host, registry) in &self.by_host {
            for name in registry.mirrors.iter().chain([host]) {
                allowed.add(name);
            }
        }
        Some(allowed)
    }

    /// Adds credentials for a registry.
    pub fn set_credentials(&mut self, registry: &str, credentials: Credentials) {
        let entry = self.by_host.entry(registry.to_owned()).or_default();
        entry.credentials = Some(credentials);
    }

    /// Adds a mirror of a registry, to be asked before it.
    pub fn add_mirror(&mut self, registry: &str, mirror: &str) {
        let entry = self.by_host.entry(registry.to_owned()).or_default();
        entry.mirrors.push(mirror.to_owned());
    }

    /// Who is asked for content of `registry`, in order: its mirrors, then itself.
    pub(super) fn order<'a>(&'a self, registry: &'a str) -> Vec<&'a str> {
        let mirrors = self.by_host.get(registry).map(|r| &r.mirrors[..]);
        let mirrors = mirrors.unwrap_or_default().iter().map(String::as_str);
        mirrors.chain([registry]).collect()
    }

    pub(super) fn credentials(&self, registry: &str) -> Option<&Credentials> {
        self.by_host.get(registry)?.credentials.as_ref()
    }

    pub(super) fn is_insecure(&self, registry: &str) -> bool {
        let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
        self.by_host.get(registry).is_some_and(|r| r.insecure)
            || self
                .insecure
                .iter()
                .any(|name| name == registry || name == host)
    }
}

fn read_bounded(path: &Path, bytes_max: u64) -> Result<String, RegistriesError> {
    let read_error = |source| RegistriesError::Read {
        path: path.to_owned(),
        source,
    };
    if fs::metadata(path).map_err(read_error)?.len() > bytes_max {
        return Err(RegistriesError::TooLong {
            path: path.to_owned(),
            bytes_max,
        });
    }
    fs::read_to_string(path).map_err(read_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Registries, RegistriesError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("password"), "secret\n").unwrap();
        let password = folder.path().join("password").display().to_string();
        let file = folder.path().join("registries.toml");
        fs::write(&file, text.replace("PASSWORD", &password)).unwrap();
        Registries::load(&file)
    }

    #[test]
    fn mirrors_come_first_and_credentials_are_each_ones_own() {
        // R-P5
        let registries = load(
            "[registry.\"docker.io\"]\nmirrors = [\"m:5000\"]\nusername = \"me\"\n\
             password_file = \"PASSWORD\"\n[registry.\"m:5000\"]\ninsecure = true\n",
        )
        .unwrap();
        assert_eq!(registries.order("docker.io"), ["m:5000", "docker.io"]);
        assert_eq!(registries.order("other"), ["other"]);
        assert_eq!(
            registries.credentials("docker.io").unwrap().password,
            "secret"
        );
        assert_eq!(registries.credentials("m:5000"), None);
        assert!(registries.is_insecure("m:5000") && !registries.is_insecure("docker.io"));
        let shown = format!("{registries:?}");
        assert!(!shown.contains("secret"), "{shown}");
    }

    #[test]
    fn plain_http_is_spoken_only_where_it_was_allowed() {
        let mut registries = Registries::default();
        assert!(!registries.is_insecure("localhost:5000"));
        registries.allow_insecure("127.0.0.1");
        registries.allow_insecure("lab:5000");
        assert!(registries.is_insecure("127.0.0.1:41"));
        assert!(registries.is_insecure("lab:5000"));
        assert!(!registries.is_insecure("lab:5001"));
        assert!(!registries.is_insecure("127.0.0.1.example.com"));
    }

    #[test]
    fn wrong_settings_are_told() {
        let many = format!("[registry.x]\nmirrors = [{}]", "\"m\",".repeat(9));
        for text in [
            "[registry.x]\nusername = \"a\"",
            "[registry.x]\nunknown = 1",
            "[registry.x]\nusername = \"a\"\npassword_file = \"/no/where\"",
            &many,
        ] {
            assert!(load(text).is_err(), "{text}");
        }
    }
}
