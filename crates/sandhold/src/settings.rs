//! Defaults, and where things are looked for.

use std::{
    env,
    path::{Path, PathBuf},
};

use sandhold_images::{Registries, RegistriesError};

/// Where a server keeps its data unless told otherwise.
pub(crate) const DATA_DIR: &str = "/var/lib/sandhold/data";
/// Where set-up puts the default templates.
pub(crate) const SHARED_TEMPLATES: &str = "/var/lib/sandhold/templates";
/// Where engines keep what does not survive a restart of the machine.
pub(crate) const STATE_ROOT: &str = "/run/sandhold";
/// Where a server listens unless told otherwise.
pub(crate) const LISTEN: &str = "127.0.0.1:3000";

/// Options about registries of images.
#[derive(Debug, clap::Args)]
pub(crate) struct RegistryArgs {
    /// Credentials and mirrors of registries, a TOML file (docs/templates.md).
    #[arg(long, env = "SANDHOLD_REGISTRIES", value_name = "FILE")]
    registries: Option<PathBuf>,
    /// A registry that is spoken to without TLS, `host` for all its ports or `host:port`; can be
    /// repeated.
    #[arg(
        long = "insecure-registry",
        env = "SANDHOLD_INSECURE_REGISTRIES",
        value_name = "HOST[:PORT]",
        value_delimiter = ','
    )]
    insecure: Vec<String>,
}

impl RegistryArgs {
    /// All that is known about registries.
    ///
    /// # Errors
    /// The file cannot be used.
    pub(crate) fn load(&self) -> Result<Registries, RegistriesError> {
        let mut registries = match &self.registries {
            Some(file) => Registries::load(file)?,
            None => Registries::default(),
        };
        for registry in &self.insecure {
            registries.allow_insecure(registry);
        }
        Ok(registries)
    }
}

/// Where the engine of this node tag keeps it.
pub(crate) fn state_root(tag: &str) -> PathBuf {
    Path::new(STATE_ROOT).join(tag)
}

/// Takes away what an engine and a network leave empty. What still holds something of a sandbox
/// stays: the next start with this tag looks there.
pub(crate) fn remove_empty_state(tag: &str) {
    let root = state_root(tag);
    for directory in [&root.join("runsc"), &root] {
        if let Err(error) = std::fs::remove_dir(directory) {
            tracing::debug!(directory = %directory.display(), %error, "it stays");
        }
    }
}

/// The gVisor runtime: `SANDHOLD_RUNSC`, or the first `runsc` on the path.
pub(crate) fn find_runsc() -> Option<PathBuf> {
    if let Some(path) = env::var_os("SANDHOLD_RUNSC") {
        return Some(PathBuf::from(path));
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .map(|directory| directory.join("runsc"))
        .find(|file| file.is_file())
}

/// The catalogues that every server on this machine may read: `SANDHOLD_TEMPLATES` (a path list),
/// or where set-up puts them.
pub(crate) fn shared_templates() -> Vec<PathBuf> {
    match env::var_os("SANDHOLD_TEMPLATES") {
        Some(list) => env::split_paths(&list)
            .filter(|path| !path.as_os_str().is_empty())
            .collect(),
        None => vec![Path::new(SHARED_TEMPLATES).to_owned()],
    }
}

/// Logs to standard error; `SANDHOLD_LOG_FILTER` chooses what, in the form of tracing's filters.
pub(crate) fn start_logging(json: bool) {
    use tracing_subscriber::EnvFilter;
    let filter =
        EnvFilter::try_from_env("SANDHOLD_LOG_FILTER").unwrap_or_else(|_| EnvFilter::new("info"));
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let logger = tracing_subscriber::fmt()
        .with_ansi(ansi)
        .with_writer(std::io::stderr)
        // A log that cannot be written, on a full disk for one, must not end who writes it: what would
        // be said of it is said by `eprintln!`, which panics.
        .log_internal_errors(false)
        .with_env_filter(filter);
    if json {
        logger.json().init();
    } else {
        logger.init();
    }
}
