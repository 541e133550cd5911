//! Builds of templates, as those who serve callers see them (wire contract 1.6).

use std::{collections::BTreeMap, io, pin::Pin};

use async_trait::async_trait;
use bytes::Bytes;
use futures::Stream;
use sandhold_types::{BuildId, Namespace, Resources, TemplateId, Timestamp};

use crate::PlatformError;

/// A build that is announced: its template's name, and what its sandboxes may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewBuild {
    /// The template; made by the build if it is new.
    pub name: String,
    /// The tags that will mean the build.
    pub tags: Vec<String>,
    /// Limits of sandboxes made from it.
    pub resources: Resources,
}

/// What an announced build will be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnouncedBuild {
    /// Its template.
    pub template: TemplateId,
    /// The build.
    pub build: BuildId,
    /// Names of the template.
    pub names: Vec<String>,
    /// The tags that will mean the build.
    pub tags: Vec<String>,
}

/// A user of a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct RegistryLogin {
    /// Who.
    pub username: String,
    /// The password, or a token in its place.
    pub password: String,
}

impl std::fmt::Debug for RegistryLogin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegistryLogin")
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

/// What a build begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildBase {
    /// An image in a registry.
    Image {
        /// Its reference.
        reference: String,
        /// For its registry.
        login: Option<RegistryLogin>,
    },
    /// A template of this tenant or of the platform.
    Template(String),
}

/// The name of an archive of files, by what is in it: 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FilesHash(String);

impl FilesHash {
    /// Reads one.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        (text.len() == 64 && text.bytes().all(digit)).then(|| Self(text.to_owned()))
    }

    /// The digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// One step of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildStep {
    /// Files that were sent are copied.
    Copy {
        /// What is copied, as the client names it.
        source: String,
        /// Where to.
        destination: String,
        /// Whose they become.
        user: Option<String>,
        /// Their mode.
        mode: Option<u32>,
        /// What was sent.
        files: FilesHash,
    },
    /// A command is run.
    Run {
        /// The command.
        command: String,
        /// Who runs it.
        user: Option<String>,
    },
    /// Variables are set.
    Env(Vec<(String, String)>),
    /// The working directory is changed.
    Workdir(String),
    /// The user is changed.
    User(String),
}

/// What a template's sandboxes have running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartWith {
    /// What its base has, unless a command is given.
    Commands {
        /// Run once at boot.
        start: Option<String>,
        /// Tried until it succeeds; only then is the template ready.
        ready: Option<String>,
    },
    /// What the image says that it is for, unless one of its halves is given.
    Image {
        /// In place of the image's entry point.
        entrypoint: Option<Vec<String>>,
        /// In place of the image's arguments.
        arguments: Option<Vec<String>>,
        /// Tried until it succeeds.
        ready: Option<String>,
    },
}

/// How a build is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildPlan {
    /// What it begins with.
    pub base: BuildBase,
    /// Variables beneath those of the steps.
    pub environment: BTreeMap<String, String>,
    /// What is done, and whether it is done whatever was done before.
    pub steps: Vec<(BuildStep, bool)>,
    /// What its sandboxes have running.
    pub start: StartWith,
    /// All of it is done whatever was done before.
    pub force: bool,
}

/// A part of a build, as clients name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildPart {
    /// Getting what it begins with.
    Base,
    /// A step, counted from one.
    Step(usize),
    /// Warming it up and publishing it.
    Finish,
}

/// How far a build is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildState {
    /// Announced, or waiting for its turn.
    Waiting,
    /// Being done.
    Building,
    /// Done: sandboxes can be made from it.
    Ready,
    /// It failed; the template is what it was before.
    Failed {
        /// Where.
        part: BuildPart,
        /// Why, for the tenant.
        message: String,
    },
}

/// How much a line of a build's log matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildLogLevel {
    /// What happens, and what commands print.
    Info,
    /// What commands print as an error.
    Warning,
    /// Why the build failed.
    Error,
}

/// A line of a build's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildLogLine {
    /// When.
    pub at: Timestamp,
    /// How much it matters.
    pub level: BuildLogLevel,
    /// The line.
    pub message: String,
    /// Which part it is of.
    pub part: BuildPart,
}

/// A build and a page of its log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildView {
    /// How far it is.
    pub state: BuildState,
    /// Lines from the offset that was asked for.
    pub lines: Vec<BuildLogLine>,
    /// When it was announced.
    pub announced_at: Timestamp,
}

/// Which lines of a log are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogPage {
    /// How many come before.
    pub offset: usize,
    /// At most so many.
    pub limit: usize,
}

/// A tag and what it means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagView {
    /// The tag.
    pub tag: String,
    /// The build that it means.
    pub build: BuildId,
    /// When that was made.
    pub built_at: Timestamp,
}

/// Bytes that are sent.
pub type Upload = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// Building templates, and what their builds are called.
#[async_trait]
pub trait TemplateBuilds: Send + Sync + std::fmt::Debug {
    /// Announces a build.
    ///
    /// # Errors
    /// The name is none, or too many builds wait.
    fn announce(
        &self,
        namespace: &Namespace,
        new: NewBuild,
    ) -> Result<AnnouncedBuild, PlatformError>;

    /// Whether these files were sent by this tenant and are still there.
    fn has_files(&self, namespace: &Namespace, files: &FilesHash) -> bool;

    /// Takes files of exactly `size` bytes.
    ///
    /// # Errors
    /// They are more than may be sent, or fewer or more than was announced.
    async fn take_files(
        &self,
        namespace: &Namespace,
        files: &FilesHash,
        size: u64,
        body: Upload,
    ) -> Result<(), PlatformError>;

    /// Begins an announced build; it goes on by itself.
    ///
    /// # Errors
    /// It was not announced, was begun already, or names files that were not sent.
    fn begin(
        &self,
        namespace: &Namespace,
        template: &str,
        build: &BuildId,
        plan: BuildPlan,
    ) -> Result<(), PlatformError>;

    /// How far a build is.
    fn view(
        &self,
        namespace: &Namespace,
        template: &str,
        build: &BuildId,
        page: LogPage,
    ) -> Option<BuildView>;

    /// Lets tags mean the build that `target` (`name` or `name:tag`) means.
    ///
    /// # Errors
    /// Unknown, not this tenant's, or not a tag.
    fn assign_tags(
        &self,
        namespace: &Namespace,
        target: &str,
        tags: &[String],
    ) -> Result<BuildId, PlatformError>;

    /// The tags of a template.
    ///
    /// # Errors
    /// Unknown.
    fn tags(&self, namespace: &Namespace, template: &str) -> Result<Vec<TagView>, PlatformError>;

    /// Takes tags away.
    ///
    /// # Errors
    /// Unknown, not this tenant's, or one that cannot be taken away.
    fn remove_tags(
        &self,
        namespace: &Namespace,
        template: &str,
        tags: &[String],
    ) -> Result<(), PlatformError>;

    /// Gives a template a further name, by which it is called first.
    ///
    /// # Errors
    /// Unknown, not this tenant's, no name, or another template's.
    fn set_alias(
        &self,
        namespace: &Namespace,
        template: &str,
        alias: &str,
    ) -> Result<(), PlatformError>;
}
