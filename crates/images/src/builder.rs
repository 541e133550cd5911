//! Building templates into one catalogue directory.
//!
//! ```text
//!   definition ─▶ base layer ─▶ root layer ─▶ build ─▶ template record
//!                 (files)       (+ agent)     (image)   (names it)
//!       key:      source,       base key,     root key, engine, resources, names
//!                 overlay …     agent
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

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandhold_types::{BuildId, Clock, Entropy, Namespace, TemplateId};
use tokio::process::Command;

use crate::{
    Build,
    apt::{AptError, Archive},
    bake::{self, BakeError, Dough, Oven},
    catalogue::{self, CatalogueError, Collected},
    definition::{Definition, Source},
    durable::{self, FileLock, Wait},
    program::{self, ProgramError},
    progress::{Event, Progress, Stage},
    record::{self, BuildRecord, ContentKey, RecordError, TemplateRecord, WarmRecord},
    root_fs::{self, RootFsError},
    shelf::Shelf,
    tree::{self, Depends, KeyMaker, TreeError},
};

/// Where the agent lies in a root.
const AGENT_FOLDER: &str = ".sandhold";
/// What boots a template.
const COMMAND: [&str; 1] = ["/.sandhold/agent"];
/// The agent's environment before anybody sets one.
const ENVIRONMENT: [&str; 2] = [
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG=C.UTF-8",
];

/// The resolver of every sandbox is its router, which has the same address in all of them.
const RESOLVER: &str = "nameserver 169.254.0.22\n";

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
        let archive = archive_of(request.definition)?;
        let salt = match request.cache {
            Cache::Ignore => BuildId::generate(&*self.entropy).as_str().to_owned(),
            Cache::Use => self.salt_of_current(request),
        };
        let base = base_key(request.definition, archive.as_ref(), &salt)?;
        let archive = archive.as_ref();
        self.make_base_layer(request, archive, (&base, &salt), progress)
            .await?;
        let root = self.root_layer(request, &base, progress).await?;
        let key = build_key(request, &root, oven);
        if let Some(build) = self.finished(&key, request) {
            progress.report(Event::Cached {
                stage: Stage::Capture,
            });
            return Ok(Built {
                build,
                reused: true,
            });
        }
        bake::clear_left_overs(oven)
            .await
            .map_err(BuildError::LeftOvers)?;
        let keys = Keys {
            key,
            base,
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

    /// The files without the agent.
    async fn make_base_layer(
        &self,
        request: &BuildRequest<'_>,
        archive: Option<&Archive>,
        (key, salt): (&ContentKey, &str),
        progress: &dyn Progress,
    ) -> Result<(), BuildError> {
        let definition = request.definition;
        if self.shelf.layer(key).is_dir() {
            progress.report(Event::Cached {
                stage: Stage::RootFs,
            });
            return Ok(());
        }
        let root_fs_error = |source| BuildError::RootFs {
            name: definition.name.clone(),
            source,
        };
        let from = match (&definition.source, archive) {
            (Source::Bootstrap { packages }, Some(archive)) => {
                let name = &definition.name;
                self.bootstrap(name, packages, archive, salt, progress)
                    .await?
            }
            (Source::Bootstrap { .. }, None) => {
                return Err(root_fs_error(AptError::NoRelease.into()));
            }
            (Source::Directory { path }, _) => {
                progress.report(Event::Begin {
                    stage: Stage::RootFs,
                });
                path.clone()
            }
        };
        let staged = self.stage("base")?;
        let root = self.folder(&staged.join("root"))?;
        let scratch = self.folder(&self.shelf.tmp().join("scratch"))?;
        root_fs::complete(definition, &from, &root, &scratch, progress)
            .await
            .map_err(root_fs_error)?;
        self.place_layer(&staged, key).await
    }

    /// The packages alone, and where they are. Fetching them takes minutes, so they are kept until
    /// layers are collected: a failing wheel or set-up script then costs seconds to try again.
    async fn bootstrap(
        &self,
        name: &str,
        packages: &[String],
        archive: &Archive,
        salt: &str,
        progress: &dyn Progress,
    ) -> Result<PathBuf, BuildError> {
        let key = KeyMaker::new("bootstrap 1")
            .with(salt.as_bytes())
            .with(archive.to_stanzas().as_bytes())
            .with(packages.join("\n").as_bytes())
            .finish();
        let place = self.shelf.layer(&key).join("root");
        if place.is_dir() {
            progress.report(Event::Cached {
                stage: Stage::RootFs,
            });
            return Ok(place);
        }
        let staged = self.stage("bootstrap")?;
        let root = self.folder(&staged.join("root"))?;
        let scratch = self.folder(&self.shelf.tmp().join("scratch"))?;
        root_fs::bootstrap(packages, archive, &root, &scratch, progress)
            .await
            .map_err(|source| BuildError::RootFs {
                name: name.to_owned(),
                source,
            })?;
        self.place_layer(&staged, &key).await?;
        Ok(place)
    }

    /// The same files and the agent.
    async fn root_layer(
        &self,
        request: &BuildRequest<'_>,
        base: &ContentKey,
        progress: &dyn Progress,
    ) -> Result<ContentKey, BuildError> {
        let settings = agent_settings(request)?;
        let agent = tree::hash_file(request.agent).map_err(tree_error("read the agent"))?;
        let key = KeyMaker::new("root 2")
            .with(base.0.as_bytes())
            .with(&agent)
            .with(&settings)
            .with(RESOLVER.as_bytes())
            .finish();
        if self.shelf.layer(&key).is_dir() {
            progress.report(Event::Cached {
                stage: Stage::Agent,
            });
            return Ok(key);
        }
        progress.report(Event::Begin {
            stage: Stage::Agent,
        });
        let staged = self.stage("root")?;
        let mut copy = Command::new("cp");
        copy.args(["--archive", "--link", "--"]);
        copy.arg(self.shelf.layer(base).join("root"))
            .arg(staged.join("root"));
        program::run("cp", &mut copy, |_| {})
            .await
            .map_err(|source| BuildError::Agent {
                name: request.definition.name.clone(),
                source,
            })?;
        install_agent(&staged.join("root"), request.agent, &settings)?;
        self.place_layer(&staged, &key).await?;
        Ok(key)
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
        let dough = Dough {
            root_fs: &root_fs,
            command: &command,
            environment: &environment,
            resources: definition.resources,
            image: &image,
        };
        let token =
            bake::bake(oven, &dough, progress)
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
            id: BuildId::generate(&*self.entropy),
            template: self.template_id(request),
            names: definition.names(),
            owner: request.owner.clone(),
            key: keys.key,
            salt: keys.salt,
            base_layer: keys.base,
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
        self.publish(&staged, &build, &definition.description)
    }

    /// Moves a finished build into place and lets its names mean it.
    fn publish(
        &self,
        staged: &Path,
        build: &BuildRecord,
        description: &str,
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
        let template = TemplateRecord {
            id: build.template.clone(),
            names: build.names.clone(),
            owner: build.owner.clone(),
            description: description.to_owned(),
            current: build.id.clone(),
            tags: before.map(|record| record.tags).unwrap_or_default(),
        };
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
            .find(|record| record.owner == request.owner && record.names.first() == Some(name));
        if let Some(record) = known {
            return record.id.clone();
        }
        let owner = request.owner.as_ref().map_or("", Namespace::as_str);
        let key = KeyMaker::new("template 1")
            .with(owner.as_bytes())
            .with(name.as_bytes())
            .finish();
        // 20 hexadecimal digits are lower-case letters and digits, as an identifier is.
        let parsed = key.0.get(..20).unwrap_or_default().parse();
        parsed.unwrap_or_else(|_| TemplateId::generate(&*self.entropy))
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

async fn wait_for_lock(shelf: &Shelf) -> io::Result<FileLock> {
    let shelf = shelf.clone();
    let taken = tokio::task::spawn_blocking(move || shelf.lock_building(Wait::ForIt)).await;
    let lock = taken.map_err(io::Error::other)??;
    lock.ok_or_else(|| io::ErrorKind::WouldBlock.into())
}

fn archive_of(definition: &Definition) -> Result<Option<Archive>, BuildError> {
    match definition.source {
        Source::Directory { .. } => Ok(None),
        Source::Bootstrap { .. } => match Archive::of_machine(Path::new("/")) {
            Ok(archive) => Ok(Some(archive)),
            Err(error) => Err(BuildError::RootFs {
                name: definition.name.clone(),
                source: error.into(),
            }),
        },
    }
}

/// What the files depend on. Newer packages in the archive do not change it: a template is built
/// again for them on purpose ([`Cache::Ignore`]).
fn base_key(
    definition: &Definition,
    archive: Option<&Archive>,
    salt: &str,
) -> Result<ContentKey, BuildError> {
    let source = serde_json::to_vec(&definition.source).unwrap_or_default();
    let wheels = definition.wheels.join("\n");
    let mut key = KeyMaker::new("base 1")
        .with(salt.as_bytes())
        .with(&source)
        .with(
            archive
                .map(Archive::to_stanzas)
                .unwrap_or_default()
                .as_bytes(),
        )
        .with(wheels.as_bytes());
    if let Source::Directory { path } = &definition.source {
        let tree = tree::key_of_tree(path, Depends::OnMetadata);
        key = key.with(tree.map_err(tree_error("read the source"))?.0.as_bytes());
    }
    if let Some(overlay) = &definition.overlay {
        let tree = tree::key_of_tree(overlay, Depends::OnContent);
        key = key.with(tree.map_err(tree_error("read the overlay"))?.0.as_bytes());
    }
    if let Some(setup) = &definition.setup {
        key = key.with(&tree::hash_file(setup).map_err(tree_error("read the set-up script"))?);
    }
    Ok(key.finish())
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

fn agent_settings(request: &BuildRequest<'_>) -> Result<Vec<u8>, BuildError> {
    let agent = &request.definition.agent;
    serde_json::to_vec_pretty(agent).map_err(|source| BuildError::File {
        step: "write",
        path: PathBuf::from("agent.json"),
        source: source.into(),
    })
}

fn install_agent(root: &Path, agent: &Path, settings: &[u8]) -> Result<(), BuildError> {
    let old = root.join(AGENT_FOLDER);
    crate::shelf::remove_tree(&old).map_err(file_error("remove", &old))?;
    let folder = tree::require_folder(root, AGENT_FOLDER).map_err(tree_error("add the agent"))?;
    let binary = folder.join("agent");
    fs::copy(agent, &binary).map_err(file_error("write", &binary))?;
    tree::set_mode(&binary, 0o755).map_err(tree_error("add the agent"))?;
    let file = folder.join("agent.json");
    fs::write(&file, settings).map_err(file_error("write", &file))?;
    tree::set_mode(&file, 0o644).map_err(tree_error("add the agent"))?;
    install_sudo(root)?;
    let etc = tree::require_folder(root, "etc").map_err(tree_error("name the resolver"))?;
    let resolver = etc.join("resolv.conf");
    // Never written through: the file is shared with the layer below.
    crate::shelf::remove_tree(&resolver).map_err(file_error("remove", &resolver))?;
    fs::write(&resolver, RESOLVER).map_err(file_error("write", &resolver))?;
    tree::set_mode(&resolver, 0o644).map_err(tree_error("name the resolver"))
}

/// The real `sudo` cannot work where the kernel knows no set-user-ID programs, so the agent's stands
/// before it on the path. A root without `sudo` gets none.
fn install_sudo(root: &Path) -> Result<(), BuildError> {
    if !root.join("usr/bin/sudo").is_file() {
        return Ok(());
    }
    let folder = root.join("usr/local/bin");
    if !fs::symlink_metadata(&folder).is_ok_and(|metadata| metadata.is_dir()) {
        return Ok(());
    }
    let link = folder.join("sudo");
    crate::shelf::remove_tree(&link).map_err(file_error("remove", &link))?;
    std::os::unix::fs::symlink(COMMAND[0], &link).map_err(file_error("link", &link))
}

/// A build holds memory and a token: nobody but root reads it.
fn set_private(path: &Path) -> Result<(), BuildError> {
    tree::set_mode(path, 0o700).map_err(tree_error("protect the build"))
}
