//! Templates on disk: definitions, root file systems, warm images and the catalogue of builds.
//!
//! ```text
//!  template.toml, or a plan of steps (service)
//!        │ builder: base (packages, folder, image, template) ─▶ steps ─▶ agent ─▶ bake ─▶ publish
//!        ▼
//!   catalogue: builds, names, tags
//! ```
//!
//! Invariants:
//! - A build is immutable: its directory is written under a temporary name, made durable and
//!   renamed into place; whatever is not in place is rubbish of an interrupted build.
//! - A build's bytes stay while a sandbox that came from it is there.
//! - Shared catalogue directories are only read.
//!
//! This crate knows nothing of a sandbox's life.

#![forbid(unsafe_code)]

mod apt;
mod bake;
mod builder;
mod catalogue;
mod compatibility;
mod definition;
mod dockerfile;
mod durable;
mod faults;
mod image;
mod layers;
mod oven;
mod program;
mod progress;
mod provision;
mod record;
mod root_fs;
mod service;
mod shelf;
mod snapshots;
mod steps;
mod tree;

use std::{path::PathBuf, sync::Arc};

use sandhold_engine::EngineIdentity;
use sandhold_types::{BuildId, Namespace, Resources, TemplateId, Timestamp, Token};

pub use apt::{AptError, Archive, Entry};
pub use builder::{BuildError, BuildRequest, Builder, Built, Cache, Promised};
pub use catalogue::{
    Catalogue, CatalogueError, Collected, SHARED_DIRECTORY, TemplateFiles, shared_directories,
};
pub use compatibility::{WarmMismatch, check_warm};
pub use definition::{
    AgentSettings, Definition, DefinitionError, Fallback, Source, Start, is_template_name,
};
pub use dockerfile::{
    Context, ContextError, DockerStep, Dockerfile, DockerfileError, parse as parse_dockerfile,
};
pub use durable::sync_image;
pub use faults::Faults;
pub use image::{Credentials, ImageError, ImageSource, Registries, RegistriesError};
pub use layers::fuzzing;
pub use oven::{BakeError, Oven, clear_left_overs};
pub use program::ProgramError;
pub use progress::{Event, Progress, Silent, Stage};
pub use record::{ContentKey, RecordError};
pub use root_fs::RootFsError;
pub use service::{
    BuildService, BuildServiceParts, INSTANCES, Kitchen, Kitchens, clear_interrupted,
};
pub use snapshots::{Lease, Retention, Snapshot, SnapshotError, Snapshots};
pub use steps::{Output, PlannedStep, Step, StepError, Upload};
pub use tree::TreeError;

/// One immutable build of a template, ready to make sandboxes from.
#[derive(Debug, Clone)]
pub struct Build {
    /// The build.
    pub id: BuildId,
    /// The template it is a build of.
    pub template: TemplateId,
    /// Names of the template, the main one first.
    pub names: Vec<String>,
    /// The tenant it belongs to; `None` serves everybody.
    pub owner: Option<Namespace>,
    /// The root file system, with the agent in it.
    pub root_fs: PathBuf,
    /// The command that boots it.
    pub command: Vec<String>,
    /// The environment it is booted with, `NAME=value`. Holds no secret.
    pub environment: Vec<String>,
    /// Limits of sandboxes made from it.
    pub resources: Resources,
    /// The memory image, if it was baked.
    pub warm: Option<WarmImage>,
    /// When it was finished.
    pub built_at: Timestamp,
    /// Bytes on disk.
    pub size_bytes: u64,
}

/// The memory image of a build.
#[derive(Debug, Clone)]
pub struct WarmImage {
    /// Where the engine wrote it.
    pub directory: PathBuf,
    /// Which engine wrote it; another may not be able to read it.
    pub engine: EngineIdentity,
    /// The control token that the agent in it expects.
    pub control_token: Token,
}

/// What the node needs of the catalogue.
pub trait Builds: Send + Sync + std::fmt::Debug {
    /// The current build that `reference` (an ID, a name, `name:tag`) means to this tenant.
    fn resolve(&self, namespace: &Namespace, reference: &str) -> Option<Arc<Build>>;

    /// A build by its identifier, current or not.
    fn build(&self, id: &BuildId) -> Option<Arc<Build>>;
}
