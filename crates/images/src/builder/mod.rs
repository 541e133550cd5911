//! Building templates into one catalogue directory.
//!
//! ```text
//!   definition ─▶ base layer ─▶ step layers ─▶ root layer ─▶ build ─▶ template record
//!                 (files)       (files)        (+ agent)     (image)   (names it)
//!       key:      source,       key before,    last key,     root key, engine, resources, names
//!                 overlay …     step …         agent
//!       in:       base          steps          agent_layer
//! ```
//!
//! Owns the building lock of the directory: one builder at a time, and whoever has the lock removes
//! what an interrupted one left, on disk and on the machine.
//!
//! Invariants:
//! - A stage whose key is there already is not made again, so an unchanged definition costs the
//!   computing of keys.
//! - Layers share files by hard links; nobody writes to a layer after it is in place.
//! - A name means the new build only when all of it is durable.

mod agent_layer;
mod base;
mod steps;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandhold_platform::Egress;
use sandhold_types::{BuildId, Clock, Entropy, Namespace, TemplateId};

use crate::{
    Build, bake,
    catalogue::{self, CatalogueError, Collected},
    definition::Definition,
    durable::{self, FileLock, Wait},
    image::Registries,
    oven::{self, BakeError, Boot, Oven},
    program::ProgramError,
    progress::{Event, Progress, Stage},
    record::{self, BuildRecord, ContentKey, RecordError, TemplateRecord, WarmRecord},
    root_fs::RootFsError,
    shelf::Shelf,
    steps::{PlannedStep, StepError},
    tree::{self, KeyMaker, TreeError},
};

/// What boots a template.
const COMMAND: [&str; 1] = ["/.sandhold/agent"];
/// The agent's environment before anybody sets one.
const ENVIRONMENT: [&str; 2] = [
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG=C.UTF-8",
];

/// Why a template was not built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A file or directory of the catalogue.
    #[error("could not {step} {path}")]
    File {
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file of the definition, the agent or a layer.
    #[error("could not {step}")]
    Tree {
        /// What was being done.
        step: &'static str,
        /// The cause.
        #[source]
        source: TreeError,
    },
    /// The root file system.
    #[error("could not make the root file system of '{name}'")]
    RootFs {
        /// Of which template.
        name: String,
        /// The cause.
        #[source]
        source: RootFsError,
    },
    /// The layer with the agent.
    #[error("could not add the agent to '{name}'")]
    Agent {
        /// To which template.
        name: String,
        /// The cause.
        #[source]
        source: ProgramError,
    },
    /// A step.
    #[error("step {number} failed")]
    Step {
        /// Which, counted from one.
        number: usize,
        /// The cause.
        #[source]
        source: StepError,
    },
    /// Warming or capturing.
    #[error("could not bake '{name}'")]
    Bake {
        /// Which template.
        name: String,
        /// The cause.
        #[source]
        source: BakeError,
    },
    /// What an earlier builder left on the machine.
    #[error("could not remove what an interrupted build left")]
    LeftOvers(#[source] BakeError),
    /// A record.
    #[error("could not record '{name}'")]
    Record {
        /// Which template.
        name: String,
        /// The cause.
        #[source]
        source: RecordError,
    },
}

fn file_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BuildError {
    let path = path.to_owned();
    move |source| BuildError::File { step, path, source }
}

fn tree_error(step: &'static str) -> impl FnOnce(TreeError) -> BuildError {
    move |source| BuildError::Tree { step, source }
}

/// Whether what is there already may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// Stages whose key is there are not made again.
    Use,
    /// Everything is made again, such as for newer packages of the archive.
    Ignore,
}

/// What is to be built.
#[derive(Debug, Clone)]
pub struct BuildRequest<'a> {
    /// The definition.
    pub definition: &'a Definition,
    /// Whose it becomes; `None` serves everybody.
    pub owner: Option<Namespace>,
    /// The agent's binary.
    pub agent: &'a Path,
    /// Whether to use what is there.
    pub cache: Cache,
    /// What is known about registries, for images.
    pub registries: &'a Registries,
    /// What is done to the files before they become a template.
    pub steps: &'a [PlannedStep],
    /// What the template's start command may reach while it is baked.
    pub egress: Egress,
    /// What a caller was told before the build began.
    pub promised: Option<Promised<'a>>,
}

/// What a caller was told of a build before it began. Such a build is made though an equal one may
/// be there, and further names of its template stay.
#[derive(Debug, Clone, Copy)]
pub struct Promised<'a> {
    /// What it will be called.
    pub build: &'a BuildId,
    /// The tags that will mean it. With none, or with `default` or `latest` among them, it becomes
    /// the current build.
    pub tags: &'a [String],
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Built {
    /// The current build.
    pub build: Arc<Build>,
    /// Whether it was there already.
    pub reused: bool,
}

/// What the stages of one build were made from.
#[derive(Debug)]
struct Keys {
    key: ContentKey,
    base: ContentKey,
    steps: Vec<ContentKey>,
    root: ContentKey,
    salt: String,
}

/// A builder: has the lock of one catalogue directory.
#[derive(Debug)]
pub struct Builder {
    shelf: Shelf,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    _lock: FileLock,
}

impl Builder {
    /// Takes the lock of `directory`, waiting while another builder has it, and removes what an
    /// interrupted one left in it.
    ///
    /// # Errors
    /// The directory cannot be made, locked or cleared.
    pub async fn open(
        directory: &Path,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
        progress: &dyn Progress,
    ) -> Result<Self, BuildError> {
        let shelf = Shelf::new(directory);
        shelf.prepare().map_err(file_error("make", directory))?;
        let lock_error = |source| BuildError::File {
            step: "lock",
            path: directory.to_owned(),
            source,
        };
        let lock = match shelf.lock_building(Wait::Never).map_err(lock_error)? {
            Some(lock) => lock,
            None => {
                progress.report(Event::Begin { stage: Stage::Wait });
                wait_for_lock(&shelf).await.map_err(lock_error)?
            }
        };
        shelf
            .clear_rubbish()
            .map_err(file_error("clear", &shelf.tmp()))?;
        Ok(Self {
            shelf,
            clock,
            entropy,
            _lock: lock,
        })
    }

    /// Builds and names a template, or finds that it is built already.
    ///
    /// # Errors
    /// The stage that failed. The template's names mean what they meant before.
    pub async fn build(
        &self,
        request: &BuildRequest<'_>,
        oven: &Oven<'_>,
        progress: &dyn Progress,
    ) -> Result<Built, BuildError> {
        let base = self.find_base(request).await?;
        let salt = match request.cache {
            Cache::Ignore => BuildId::generate(&*self.entropy).as_str().to_owned(),
            Cache::Use => self.salt_of_current(request),
        };
        let settings = base::agent_settings(request.definition, &base);
        let files = base::base_key(request.definition, &base, &salt)?;
        self.make_base_layer(request.definition, &base, (&files, &salt), progress)
            .await?;
        let stepped = self
            .make_step_layers(request, oven, files, settings, progress)
            .await?;
        let root = self
            .agent_layer(request, &stepped.files, &stepped.settings, progress)
            .await?;
        let key = build_key(request, &root, oven);
        if request.promised.is_none()
            && let Some(build) = self.finished(&key, request)
        {
            progress.report(Event::Cached {
                stage: Stage::Capture,
            });
            return Ok(Built {
                build,
                reused: true,
            });
        }
        oven::clear_left_overs(oven)
            .await
            .map_err(BuildError::LeftOvers)?;
        let keys = Keys {
            key,
            base: stepped.files,
            steps: stepped.layers,
            root,
            salt,
        };
        let build = self.bake(request, oven, keys, progress).await?;
        Ok(Built {
            build,
            reused: false,
        })
    }

    /// Removes builds of this directory that no name means and no process uses, and layers that
    /// no build needs.
    ///
    /// # Errors
    /// A record cannot be read, or bytes cannot be removed.
    pub fn prune(&self) -> Result<Collected, CatalogueError> {
        catalogue::collect(&self.shelf, |_| true)
    }

    async fn bake(
        &self,
        request: &BuildRequest<'_>,
        oven: &Oven<'_>,
        keys: Keys,
        progress: &dyn Progress,
    ) -> Result<Arc<Build>, BuildError> {
        let definition = request.definition;
        let staged = self.stage("build")?;
        set_private(&staged)?;
        let image = staged.join("image");
        let root_fs = self.shelf.layer(&keys.root).join("root");
        let command = COMMAND.map(String::from);
        let environment = ENVIRONMENT.map(String::from);
        let boot = Boot {
            root_fs: &root_fs,
            command: &command,
            environment: &environment,
            resources: definition.resources,
            egress: request.egress.clone(),
        };
        let token = bake::bake(oven, &boot, &image, progress)
            .await
            .map_err(|source| BuildError::Bake {
                name: definition.name.clone(),
                source,
            })?;
        progress.report(Event::Begin {
            stage: Stage::Publish,
        });
        let size = |path: &Path| tree::size_of_tree(path).map_err(tree_error("measure the build"));
        let build = BuildRecord {
            id: match request.promised {
                Some(promised) => promised.build.clone(),
                None => new_build_id(&*self.entropy),
            },
            template: self.template_id(request),
            names: definition.names(),
            owner: request.owner.clone(),
            key: keys.key,
            salt: keys.salt,
            base_layer: keys.base,
            step_layers: keys.steps,
            root_layer: keys.root,
            command: command.to_vec(),
            environment: environment.to_vec(),
            resources: definition.resources,
            warm: Some(WarmRecord {
                engine: oven.engine.identity(),
                control_token: token.expose().to_owned(),
            }),
            built_at: self.clock.now(),
            size_bytes: size(&root_fs)? + size(&image)?,
        };
        self.publish(&staged, &build, request)
    }

    /// Moves a finished build into place and lets its names mean it.
    fn publish(
        &self,
        staged: &Path,
        build: &BuildRecord,
        request: &BuildRequest<'_>,
    ) -> Result<Arc<Build>, BuildError> {
        let record_error = |source| BuildError::Record {
            name: build.names.first().cloned().unwrap_or_default(),
            source,
        };
        record::write(&staged.join("build.json"), build).map_err(record_error)?;
        let place = self.shelf.build_directory(&build.id);
        durable::publish_directory(staged, &place).map_err(file_error("publish", &place))?;
        let path = self.shelf.template_record(&build.template);
        let _names = self.shelf.lock_names().map_err(file_error("lock", &path))?;
        let before: Option<TemplateRecord> = record::read(&path).ok();
        let template = template_after(before, build, request);
        record::write(&path, &template).map_err(record_error)?;
        Ok(Arc::new(build.to_build(&place, &self.shelf.layers())))
    }

    /// The template's current build, if it was made from the same things.
    fn finished(&self, key: &ContentKey, request: &BuildRequest<'_>) -> Option<Arc<Build>> {
        let contents = self.shelf.read();
        let template = contents.templates.get(&self.template_id(request))?;
        let shelved = contents.builds.get(&template.current)?;
        let complete = shelved
            .build
            .warm
            .as_ref()
            .is_none_or(|warm| warm.directory.is_dir());
        (shelved.record.key == *key && complete).then(|| Arc::clone(&shelved.build))
    }

    /// The identifier of the template: the one that the name has had, or one made from the name,
    /// so that it is the same on every machine.
    fn template_id(&self, request: &BuildRequest<'_>) -> TemplateId {
        let name = &request.definition.name;
        let contents = self.shelf.read();
        let known = contents
            .templates
            .values()
            .find(|record| record.owner == request.owner && record.names.contains(name));
        if let Some(record) = known {
            return record.id.clone();
        }
        new_template_id(request.owner.as_ref(), name)
            .unwrap_or_else(|| TemplateId::generate(&*self.entropy))
    }

    /// The salt of the template's current build; none if there is no build.
    fn salt_of_current(&self, request: &BuildRequest<'_>) -> String {
        let contents = self.shelf.read();
        let current = contents
            .templates
            .get(&self.template_id(request))
            .and_then(|template| contents.builds.get(&template.current));
        current.map_or_else(String::new, |shelved| shelved.record.salt.clone())
    }

    /// An empty directory for something that is being made.
    fn stage(&self, name: &str) -> Result<PathBuf, BuildError> {
        let path = self.shelf.tmp().join(name);
        crate::shelf::remove_tree(&path).map_err(file_error("remove", &path))?;
        self.folder(&path)
    }

    fn folder(&self, path: &Path) -> Result<PathBuf, BuildError> {
        crate::shelf::remove_tree(path).map_err(file_error("remove", path))?;
        fs::create_dir_all(path).map_err(file_error("make", path))?;
        Ok(path.to_owned())
    }

    async fn place_layer(&self, staged: &Path, key: &ContentKey) -> Result<(), BuildError> {
        let place = self.shelf.layer(key);
        let staged = staged.to_owned();
        let target = place.clone();
        let moved =
            tokio::task::spawn_blocking(move || durable::publish_directory(&staged, &target));
        let moved = moved
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)));
        moved.map_err(file_error("publish", &place))
    }
}

/// The identifier of a template that has none yet, made from whose it is and what it is called.
pub(crate) fn new_template_id(owner: Option<&Namespace>, name: &str) -> Option<TemplateId> {
    let owner = owner.map_or("", Namespace::as_str);
    let key = KeyMaker::new("template 1")
        .with(owner.as_bytes())
        .with(name.as_bytes())
        .finish();
    // 20 hexadecimal digits are lower-case letters and digits, as an identifier is.
    key.0.get(..20)?.parse().ok()
}

/// A fresh identifier of a build: a UUID, which is what clients read (wire contract 1.6).
pub(crate) fn new_build_id(entropy: &dyn Entropy) -> BuildId {
    let mut bytes = [0; 16];
    entropy.fill(&mut bytes);
    let id = uuid::Builder::from_random_bytes(bytes).into_uuid();
    // Its letters, digits and dashes are those of an identifier.
    let parsed = id.to_string().parse();
    parsed.unwrap_or_else(|_| BuildId::generate(entropy))
}

async fn wait_for_lock(shelf: &Shelf) -> io::Result<FileLock> {
    let shelf = shelf.clone();
    let taken = tokio::task::spawn_blocking(move || shelf.lock_building(Wait::ForIt)).await;
    let lock = taken.map_err(io::Error::other)??;
    lock.ok_or_else(|| io::ErrorKind::WouldBlock.into())
}

/// The record of a template after a build of it.
fn template_after(
    before: Option<TemplateRecord>,
    build: &BuildRecord,
    request: &BuildRequest<'_>,
) -> TemplateRecord {
    let mut template = TemplateRecord {
        id: build.template.clone(),
        names: build.names.clone(),
        owner: build.owner.clone(),
        description: request.definition.description.clone(),
        current: build.id.clone(),
        tags: before.as_ref().map(|b| b.tags.clone()).unwrap_or_default(),
    };
    let Some(promised) = &request.promised else {
        return template;
    };
    let plain = |tag: &&String| !catalogue::is_current_tag(tag);
    let becomes_current = promised.tags.is_empty() || promised.tags.iter().any(|t| !plain(&t));
    if let Some(before) = before {
        template.names = before.names;
        if !becomes_current {
            template.current = before.current;
        }
    }
    for tag in promised.tags.iter().filter(plain) {
        template.tags.insert(tag.clone(), build.id.clone());
    }
    template
}

fn build_key(request: &BuildRequest<'_>, root: &ContentKey, oven: &Oven<'_>) -> ContentKey {
    let definition = request.definition;
    let further = serde_json::json!({
        "engine": oven.engine.identity(),
        "resources": definition.resources,
        "names": definition.names(),
        "owner": request.owner,
        "command": COMMAND,
        "environment": ENVIRONMENT,
    });
    KeyMaker::new("build 1")
        .with(root.0.as_bytes())
        .with(further.to_string().as_bytes())
        .finish()
}

/// A build holds memory and a token: nobody but root reads it.
fn set_private(path: &Path) -> Result<(), BuildError> {
    tree::set_mode(path, 0o700).map_err(tree_error("protect the build"))
}
