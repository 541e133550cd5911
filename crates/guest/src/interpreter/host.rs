//! What kernels need of the sandbox, and the one way of starting them.
//!
//! Owns the directory of kernels and the agent's Python files. Knows no contexts.

use std::{
    collections::BTreeMap,
    io,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use sandhold_types::Entropy;
use tokio::sync::Semaphore;

use super::{
    InterpreterConfig,
    bash::{BashKernel, BashLaunch},
    jupyter::{self, JupyterKernel, KernelError, Launch},
    kernel::Kernel,
    language::{self, Family, KernelSpec},
    message::hex_of,
};
use crate::account::{Account, AccountError};

/// Where templates keep kernel specifications, in order of preference.
const SPEC_DIRECTORIES: [&str; 3] = [
    "/usr/local/share/jupyter/kernels",
    "/usr/share/jupyter/kernels",
    "/opt/conda/share/jupyter/kernels",
];
/// More kernels at once only make each of them later.
const STARTS_AT_ONCE_MAX: usize = 2;
/// Written to the runtime directory, so that they are of the same version as the agent.
const PYTHON_FILES: [(&str, &str); 4] = [
    (
        "sandhold_kernel.py",
        include_str!("python/sandhold_kernel.py"),
    ),
    (
        "sandhold_reseed.py",
        include_str!("python/sandhold_reseed.py"),
    ),
    (
        "sandhold_display.py",
        include_str!("python/sandhold_display.py"),
    ),
    (
        "sandhold_charts.py",
        include_str!("python/sandhold_charts.py"),
    ),
];

/// Starts kernels.
#[derive(Debug)]
pub(super) struct KernelHost {
    config: InterpreterConfig,
    entropy: Box<dyn Entropy>,
    kernel_number: AtomicU64,
    starts: Semaphore,
    /// What the last reseeding brought, and how many there were.
    reseeded: Mutex<(u64, Vec<u8>)>,
}

/// Why a kernel did not start.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    /// The template holds no kernel for the language.
    #[error("no kernel for the language: {0}")]
    NoKernel(String),
    /// The default user does not exist.
    #[error("the user of the kernel")]
    Account(#[from] AccountError),
    /// A file of the agent cannot be written.
    #[error("writing {path}")]
    Files { path: PathBuf, source: io::Error },
    /// The kernel itself.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// What a kernel is started for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) family: &'a Family,
    pub(super) cwd: &'a Path,
    /// Whether the template's modules are imported first: worth it for a kernel that will be in
    /// a warm image, and too much for one that somebody is waiting for.
    pub(super) preloaded: bool,
}

impl KernelHost {
    pub(super) fn new(config: InterpreterConfig, entropy: Box<dyn Entropy>) -> Self {
        Self {
            config,
            entropy,
            kernel_number: AtomicU64::new(0),
            starts: Semaphore::new(STARTS_AT_ONCE_MAX),
            reseeded: Mutex::new((0, Vec::new())),
        }
    }

    /// The names of the languages that the template holds a kernel for.
    pub(super) fn languages(&self) -> Vec<String> {
        let mut languages: Vec<String> = self
            .specs()
            .into_iter()
            .map(|spec| spec.language.to_ascii_lowercase())
            .collect();
        if has_bash() {
            languages.push(String::from("bash"));
        }
        languages.sort();
        languages.dedup();
        languages
    }

    /// Whether there is a kernel for it.
    pub(super) fn can_run(&self, family: &Family) -> bool {
        (*family == Family::Bash && has_bash()) || family.choose(&self.specs()).is_some()
    }

    fn specs(&self) -> Vec<KernelSpec> {
        let users = self
            .account()
            .map(|account| account.home.join(".local/share/jupyter/kernels"));
        let directories = users
            .iter()
            .map(PathBuf::as_path)
            .chain(SPEC_DIRECTORIES.iter().map(Path::new));
        language::find_specs(directories)
    }

    /// Who runs kernels: the default user.
    pub(super) fn account(&self) -> Result<Account, AccountError> {
        self.config.state.account(None)
    }

    /// Where contexts run that name no directory.
    pub(super) fn default_directory(&self) -> PathBuf {
        self.config
            .state
            .life()
            .default_workdir
            .clone()
            .or_else(|| self.account().ok().map(|account| account.home))
            .unwrap_or_else(|| PathBuf::from("/"))
    }

    /// All variables of a kernel at present.
    pub(super) fn environment(&self) -> Result<BTreeMap<String, String>, AccountError> {
        Ok(self.config.state.process_environment(&self.account()?))
    }

    /// Now, as clients read it.
    pub(super) fn timestamp(&self) -> String {
        self.config.state.clock.now().to_rfc3339()
    }

    /// Starts a kernel; with what variables it was started.
    pub(super) async fn start(
        &self,
        wanted: Wanted<'_>,
    ) -> Result<(Kernel, BTreeMap<String, String>), StartError> {
        // Never closed.
        let _permit = self.starts.acquire().await.ok();
        let before = self.reseedings();
        let environment = self.environment()?;
        let account = self.account()?;
        let kernel = match wanted.family.choose(&self.specs()) {
            // The agent's own shell is leaner and tells the two streams apart.
            _ if *wanted.family == Family::Bash && has_bash() => {
                self.start_bash(&account, wanted.cwd, &environment).await?
            }
            Some(spec) => {
                self.start_jupyter(spec, wanted, &account, &environment)
                    .await?
            }
            None => return Err(StartError::NoKernel(self.languages().join(", "))),
        };
        kernel
            .prepare(wanted.family, &self.fresh_bytes::<64>())
            .await?;
        if self.reseedings() != before {
            // It may have drawn its seeds before the sandbox was copied.
            kernel
                .reseed(wanted.family, &self.fresh_bytes::<64>())
                .await?;
        }
        Ok((kernel, environment))
    }

    async fn start_bash(
        &self,
        account: &Account,
        cwd: &Path,
        environment: &BTreeMap<String, String>,
    ) -> Result<Kernel, StartError> {
        let launch = BashLaunch {
            account,
            cwd,
            environment,
            marker: format!("sandhold-{}", self.fresh_name()),
        };
        let kernel = BashKernel::start(&self.config.children, launch).await?;
        Ok(Kernel::Bash(kernel))
    }

    async fn start_jupyter(
        &self,
        spec: &KernelSpec,
        wanted: Wanted<'_>,
        account: &Account,
        environment: &BTreeMap<String, String>,
    ) -> Result<Kernel, StartError> {
        let python_files = self.write_python_files()?;
        let preload = match (wanted.preloaded, wanted.family) {
            (true, Family::Python) => self.config.kernel_preload.get("python"),
            _ => None,
        };
        let launch = Launch {
            spec,
            account,
            cwd: wanted.cwd,
            environment,
            directory: self.make_directory(account)?,
            python_files: &python_files,
            preload: preload.map_or(&[], Vec::as_slice),
            key: self.fresh_name(),
        };
        let kernel = JupyterKernel::start(&self.config.children, launch).await?;
        Ok(Kernel::Jupyter(kernel))
    }

    fn make_directory(&self, account: &Account) -> Result<PathBuf, StartError> {
        let number = self.kernel_number.fetch_add(1, Ordering::Relaxed);
        let path = self
            .config
            .runtime_directory
            .join(format!("kernel-{number}"));
        let make = || {
            // One of an earlier agent may be there.
            let _ = std::fs::remove_dir_all(&path);
            std::fs::DirBuilder::new().mode(0o700).create(&path)?;
            jupyter::give_to(&path, account)
        };
        make().map_err(|source| StartError::Files {
            path: path.clone(),
            source,
        })?;
        Ok(path)
    }

    fn write_python_files(&self) -> Result<PathBuf, StartError> {
        let directory = self.config.runtime_directory.join("python");
        let write = || {
            std::fs::create_dir_all(&directory)?;
            let readable = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(&self.config.runtime_directory, readable.clone())?;
            std::fs::set_permissions(&directory, readable)?;
            for (name, text) in PYTHON_FILES {
                let path = directory.join(name);
                if std::fs::read(&path).is_ok_and(|held| held == text.as_bytes()) {
                    continue;
                }
                std::fs::write(&path, text)?;
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644))?;
            }
            Ok(())
        };
        write().map_err(|source| StartError::Files {
            path: directory.clone(),
            source,
        })?;
        Ok(directory)
    }

    /// Notes that the sandbox has become another one.
    pub(super) fn note_reseeding(&self, entropy: &[u8]) {
        let mut reseeded = self.reseeded.lock().unwrap_or_else(PoisonError::into_inner);
        reseeded.0 += 1;
        reseeded.1 = entropy.to_vec();
    }

    fn reseedings(&self) -> u64 {
        self.reseeded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Bytes that no copy of the sandbox shares: from the kernel, and from the last reseeding.
    pub(super) fn fresh_bytes<const LENGTH: usize>(&self) -> [u8; LENGTH] {
        use sha2::{Digest as _, Sha512};
        let mut bytes = [0; LENGTH];
        self.entropy.fill(&mut bytes);
        let reseeded = self.reseeded.lock().unwrap_or_else(PoisonError::into_inner);
        let hash = Sha512::new()
            .chain_update(&reseeded.1)
            .chain_update(bytes)
            .finalize();
        for (byte, other) in bytes.iter_mut().zip(hash.iter().cycle()) {
            *byte ^= other;
        }
        bytes
    }

    /// A name that nobody can guess.
    pub(super) fn fresh_name(&self) -> String {
        hex_of(&self.fresh_bytes::<16>())
    }
}

fn has_bash() -> bool {
    Path::new("/bin/bash").exists() || Path::new("/usr/bin/bash").exists()
}
