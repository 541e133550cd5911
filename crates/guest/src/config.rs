//! What the agent is told at start: `/.sandhold/agent.json` and one variable.
//!
//! Every field is optional; a missing file means all defaults. The first control token comes from
//! the environment, so that it is in no layer of a template, and children never inherit it.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use sandhold_types::Token;
use serde::Deserialize;

/// The variable that carries the first control token. Children never see it.
pub const CONTROL_TOKEN_VARIABLE: &str = "SANDHOLD_CONTROL_TOKEN";
/// A larger configuration is refused.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The agent's configuration.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentConfig {
    /// Languages whose kernels are started before the first request.
    pub warm_languages: Vec<String>,
    /// Modules that warm kernels import before they are ready, by language.
    pub kernel_preload: BTreeMap<String, Vec<String>>,
    /// Run in the background at start, as the default user.
    pub start_command: Option<String>,
    /// Run again and again until it succeeds; only then is the sandbox ready.
    pub ready_command: Option<String>,
    /// Who runs commands when the caller names nobody.
    pub default_user: String,
    /// Where commands run when the caller names no directory; the user's home if absent.
    pub default_workdir: Option<PathBuf>,
    /// Variables of every process, beneath those of `/init`.
    pub environment: BTreeMap<String, String>,
    /// The port of the envd contract.
    pub envd_port: u16,
    /// The port of the code interpreter contract.
    pub interpreter_port: u16,
    /// The address both listen on.
    pub bind_address: IpAddr,
    /// Where the sockets of kernels and the agent's helper files are; made if it is absent.
    pub runtime_directory: PathBuf,
    /// Where `passwd`, `group`, `hostname`, `hosts` and `machine-id` are. Tests use another.
    pub etc_dir: PathBuf,
    /// Whether `/init` also sets the kernel's hostname and clock. Tests on a host must not.
    pub system_identity: bool,
    /// The first control token; see [`CONTROL_TOKEN_VARIABLE`].
    #[serde(skip)]
    pub control_token: Option<Token>,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            warm_languages: Vec::new(),
            kernel_preload: BTreeMap::new(),
            start_command: None,
            ready_command: None,
            default_user: String::from("user"),
            default_workdir: None,
            environment: BTreeMap::new(),
            envd_port: 49983,
            interpreter_port: 49999,
            bind_address: IpAddr::from([0, 0, 0, 0]),
            runtime_directory: PathBuf::from("/run/sandhold"),
            etc_dir: PathBuf::from("/etc"),
            system_identity: true,
            control_token: None,
        }
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is there and cannot be read.
    #[error("reading {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not JSON of the right shape.
    #[error("{path} is not a configuration")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The file is larger than any configuration.
    #[error("{path} is larger than {CONFIG_BYTES_MAX} bytes")]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
}

impl AgentConfig {
    /// Where the configuration is in a sandbox.
    pub const DEFAULT_PATH: &'static str = "/.sandhold/agent.json";

    /// Where the sockets are on which `sudo` asks the agent.
    #[must_use]
    pub fn sudo_directory(&self) -> PathBuf {
        self.runtime_directory.join("sudo")
    }

    /// Reads the file (absent means defaults) and the control token.
    ///
    /// # Errors
    /// The file exists and is unreadable, too large, or no configuration.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let mut config = match read_bounded(path) {
            Ok(Some(bytes)) => Self::parse(&bytes).map_err(|source| ConfigError::Parse {
                path: path.into(),
                source,
            })?,
            Ok(None) => return Err(ConfigError::TooLarge { path: path.into() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::default(),
            Err(source) => {
                return Err(ConfigError::Read {
                    path: path.into(),
                    source,
                });
            }
        };
        config.control_token = std::env::var(CONTROL_TOKEN_VARIABLE)
            .ok()
            .filter(|token| !token.is_empty())
            .map(Token::new);
        Ok(config)
    }

    /// Reads the text of a configuration.
    ///
    /// # Errors
    /// It is not JSON, or a field has another type.
    pub fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

fn read_bounded(path: &Path) -> io::Result<Option<Vec<u8>>> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?
        .take(CONFIG_BYTES_MAX + 1)
        .read_to_end(&mut bytes)?;
    let fits = u64::try_from(bytes.len()).is_ok_and(|length| length <= CONFIG_BYTES_MAX);
    Ok(fits.then_some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_optional() {
        let config = AgentConfig::parse(b"{}").unwrap();
        assert_eq!(config.envd_port, 49983);
        assert_eq!(config.default_user, "user");
    }

    #[test]
    fn fields_are_named_as_the_host_writes_them() {
        let config = AgentConfig::parse(
            br#"{"warmLanguages":["python"],"startCommand":"x","defaultWorkdir":"/srv","new":1}"#,
        )
        .unwrap();
        assert_eq!(config.warm_languages, ["python"]);
        assert_eq!(config.start_command.as_deref(), Some("x"));
        assert_eq!(config.default_workdir, Some(PathBuf::from("/srv")));
    }
}
