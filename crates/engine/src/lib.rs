//! Engines: what gives a sandbox its own kernel surface (R-P2).
//!
//! ```text
//!  node ──▶ Engine ──┬─ gvisor   runsc processes
//!                    ├─ sim      scripted, with faults
//!                    └─ microvm  (later)
//! ```
//!
//! An *instance* is one life of a sandbox's processes, named by sandbox and incarnation. Its
//! directory belongs to the engine: the bundle, the writable layer, the console and the
//! engine's own note of which processes it started.
//!
//! Invariants:
//! - [`Engine::remove`] is idempotent and returns only when nothing of the instance is left: no
//!   process, cgroup, mount, socket or state file.
//! - [`Engine::list`] shows every instance of which any trace is left, whether or not this process
//!   started it, so that a recount can be trusted.
//! - An error says which operation failed on what; the truth is asked for with
//!   [`Engine::inspect`] (R-L10).
//!
//! An engine knows nothing of tenants, quotas, lifetimes or HTTP.

use std::{fmt, path::PathBuf, str::FromStr};

use async_trait::async_trait;
use sandhold_types::{Deadline, Incarnation, Resources, SandboxId};

mod error;
pub mod gvisor;
pub mod sim;

pub use error::EngineError;

/// One life of a sandbox's processes. Written `<sandbox>-<incarnation>`.
#[derive(
    Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct InstanceId {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Which life.
    pub incarnation: Incarnation,
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.sandbox, self.incarnation)
    }
}

impl FromStr for InstanceId {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        let parse = || {
            let (sandbox, incarnation) = text.split_once('-')?;
            Some(Self {
                sandbox: sandbox.parse().ok()?,
                incarnation: Incarnation(incarnation.parse().ok()?),
            })
        };
        parse().ok_or_else(|| EngineError::BadInstanceId {
            text: text.to_owned(),
        })
    }
}

/// An instance and the directory that the engine keeps for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceRef {
    /// Its name.
    pub id: InstanceId,
    /// Its directory; made by the caller, filled and emptied by the engine.
    pub directory: PathBuf,
}

/// From what an instance starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Boot this command in the root file system.
    Boot {
        /// Program and arguments.
        command: Vec<String>,
        /// `NAME=value`.
        environment: Vec<String>,
    },
    /// Restore this memory image. The command is the one that it was captured with.
    Image {
        /// The directory that [`Engine::capture`] wrote.
        directory: PathBuf,
        /// The command it was booted with: engines compare it.
        command: Vec<String>,
        /// The environment it was booted with.
        environment: Vec<String>,
    },
}

impl Origin {
    /// The command and the environment of the first process.
    #[must_use]
    pub fn process(&self) -> (&[String], &[String]) {
        match self {
            Self::Boot {
                command,
                environment,
            }
            | Self::Image {
                command,
                environment,
                ..
            } => (command, environment),
        }
    }
}

/// All that an instance needs to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchSpec {
    /// Which, and where its files are.
    pub instance: InstanceRef,
    /// The root file system; never written to, shared by all instances of a template.
    pub root_fs: PathBuf,
    /// Boot or restore.
    pub origin: Origin,
    /// The network namespace it lives in.
    pub network_namespace: PathBuf,
    /// Its limits.
    pub resources: Resources,
    /// Its host name at boot. A restored one is renamed by the agent.
    pub hostname: String,
}

/// Whether an instance lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceStatus {
    /// Its processes run (or are frozen).
    Running,
    /// Its processes are gone; traces may be left.
    Ended(ExitCause),
    /// The engine knows nothing of it.
    Unknown,
}

/// Why an instance's processes ended, as far as the engine can prove it (R-L12).
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum ExitCause {
    /// The kernel killed it for its memory use.
    OutOfMemory,
    /// It wrote more to its disk than it may.
    DiskFull,
    /// Its first process ended with this status.
    Exited(i32),
    /// Ended by a signal or a fault.
    Crashed(String),
}

/// What an instance uses now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Processor time since its start, in microseconds.
    pub cpu_usec: u64,
    /// Memory charged to it, in bytes, file cache included.
    pub memory_bytes: u64,
    /// File cache in that, in bytes.
    pub memory_cache_bytes: u64,
    /// What it wrote to its disk, in bytes allocated.
    pub disk_bytes: u64,
}

/// What becomes of an instance after it was captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterCapture {
    /// It goes on.
    Continue,
    /// It ends.
    Stop,
}

/// Whether an instance whose memory is on disk can be removed as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovalRule {
    /// It can: what is left of it is files.
    Asleep,
    /// Only a running one can be removed; it has to be woken first (R-L8).
    AwakeOnly,
}

/// Which engine this is, for records and for deciding whether an image can be restored by it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct EngineIdentity {
    /// Such as `gvisor`.
    pub name: String,
    /// Such as `0.0~20240729.0`.
    pub version: String,
    /// The processor features that an image taken here may rely on, as one comparable text.
    pub cpu_features: String,
}

/// A way to run sandboxes.
#[async_trait]
pub trait Engine: Send + Sync + fmt::Debug {
    /// Which engine this is.
    fn identity(&self) -> EngineIdentity;

    /// Does ahead of time what a later [`Engine::launch`] of the same instance needs and what does
    /// not depend on its image: afterwards that launch is quicker. Root, namespace, limits, command
    /// and environment must be those of the launch. What was prepared holds no guest, uses memory
    /// for the engine's own processes only, is listed, is not [`InstanceStatus::Running`], and has
    /// to be removed like any other instance. An engine that gains nothing by it does nothing.
    ///
    /// # Errors
    /// The step that failed; the caller must still [`Engine::remove`] it.
    async fn prepare(&self, spec: &LaunchSpec, deadline: Deadline) -> Result<(), EngineError> {
        let _ = (spec, deadline);
        Ok(())
    }

    /// Starts an instance. On an error the caller must still [`Engine::remove`] it.
    ///
    /// # Errors
    /// The step that failed.
    async fn launch(&self, spec: &LaunchSpec, deadline: Deadline) -> Result<(), EngineError>;

    /// Ends an instance and removes every trace of it, the contents of its directory included.
    /// Needs no free capacity, works on frozen, half-made and already ended ones.
    ///
    /// # Errors
    /// The step that failed; it can be called again.
    async fn remove(&self, instance: &InstanceRef, deadline: Deadline) -> Result<(), EngineError>;

    /// Asks for the truth about one instance.
    ///
    /// # Errors
    /// The truth could not be found out.
    async fn inspect(&self, instance: &InstanceRef) -> Result<InstanceStatus, EngineError>;

    /// Every instance of which anything is left on this machine.
    ///
    /// # Errors
    /// The listing is incomplete; nothing may be concluded from it.
    async fn list(&self) -> Result<Vec<InstanceId>, EngineError>;

    /// Waits until the instance's processes have ended, however they were started. Dropping the
    /// future has no effect on the instance.
    ///
    /// # Errors
    /// It cannot be watched.
    async fn wait(&self, instance: &InstanceRef) -> Result<ExitCause, EngineError>;

    /// What it uses now.
    ///
    /// # Errors
    /// It is gone, or its accounting cannot be read.
    async fn usage(&self, instance: &InstanceRef) -> Result<Usage, EngineError>;

    /// Captures memory and files into a new directory. A failure may have ended the instance: the
    /// caller must ask ([`Engine::inspect`]).
    ///
    /// # Errors
    /// The step that failed.
    async fn capture(
        &self,
        instance: &InstanceRef,
        image_directory: &std::path::Path,
        after: AfterCapture,
        deadline: Deadline,
    ) -> Result<(), EngineError>;

    /// Waits until nothing that an earlier call began about this instance is still at work: a
    /// capture that was given up, or one that a process before this one asked for. Afterwards
    /// [`Engine::inspect`] tells how it ended.
    ///
    /// # Errors
    /// Something is still at work at the deadline, or that cannot be found out.
    async fn settle(&self, instance: &InstanceRef, deadline: Deadline) -> Result<(), EngineError> {
        let _ = (instance, deadline);
        Ok(())
    }

    /// Whether a sleeping sandbox can be removed without being woken.
    fn removal_rule(&self) -> RemovalRule {
        RemovalRule::Asleep
    }

    /// Stops all its processes where they are; they use no processor time until thawed.
    ///
    /// # Errors
    /// It is gone, or the freezer refused.
    async fn freeze(&self, instance: &InstanceRef) -> Result<(), EngineError>;

    /// Lets frozen processes go on. No effect on one that is not frozen.
    ///
    /// # Errors
    /// It is gone, or the freezer refused.
    async fn thaw(&self, instance: &InstanceRef) -> Result<(), EngineError>;
}
