//! The first layer of a template: its files, before steps and the agent.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::json;

use super::{BuildError, BuildRequest, Builder, agent_layer::quoted, tree_error};
use crate::{
    apt::Archive,
    catalogue::TemplateFiles,
    definition::{AgentSettings, Definition, Source, Start},
    image::{Image, ImageConfig},
    progress::{Event, Progress, Stage},
    provision,
    record::ContentKey,
    root_fs::{self, RootFsError},
    tree::{self, Depends, KeyMaker},
};

/// Where the files come from, found and not fetched yet.
#[derive(Debug)]
pub(super) enum Base {
    /// Packages of an archive.
    Packages(Vec<String>, Archive),
    /// A folder of the machine.
    Directory(PathBuf),
    /// An image.
    Image(Arc<Image>),
    /// Another template.
    Template(TemplateFiles),
}

impl Builder {
    /// Finds what the definition's source names.
    pub(super) async fn find_base(&self, request: &BuildRequest<'_>) -> Result<Base, BuildError> {
        let root_fs_error = |source| BuildError::RootFs {
            name: request.definition.name.clone(),
            source,
        };
        match &request.definition.source {
            Source::Directory { path } => Ok(Base::Directory(path.clone())),
            Source::Bootstrap { packages } => {
                let archive = Archive::of_machine(Path::new("/"))
                    .map_err(|error| root_fs_error(error.into()))?;
                Ok(Base::Packages(packages.clone(), archive))
            }
            Source::Template(files) => Ok(Base::Template(files.clone())),
            Source::Image(source) => {
                let scratch = self.folder(&self.shelf.tmp().join("image"))?;
                let image = Image::find(source, request.registries, &scratch).await;
                let image = image.map_err(|error| root_fs_error(error.into()))?;
                Ok(Base::Image(Arc::new(image)))
            }
        }
    }

    /// Makes the layer `key` unless it is there.
    pub(super) async fn make_base_layer(
        &self,
        definition: &Definition,
        base: &Base,
        (key, salt): (&ContentKey, &str),
        progress: &dyn Progress,
    ) -> Result<(), BuildError> {
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
        let from = match base {
            Base::Packages(packages, archive) => {
                let name = &definition.name;
                let place = self.bootstrap(name, packages, archive, salt, progress);
                Some(place.await?)
            }
            Base::Directory(path) => Some(path.clone()),
            Base::Template(files) => Some(files.path.clone()),
            Base::Image(_) => None,
        };
        let staged = self.stage("base")?;
        let root = self.folder(&staged.join("root"))?;
        let scratch = self.folder(&self.shelf.tmp().join("scratch"))?;
        if !matches!(base, Base::Packages(..)) {
            progress.report(Event::Begin {
                stage: Stage::RootFs,
            });
        }
        if let Some(from) = &from {
            let copied = root_fs::copy_directory(from, &root).await;
            copied.map_err(root_fs_error)?;
        }
        if let Base::Image(image) = base {
            let laid = lay_image(Arc::clone(image), &root, progress).await;
            laid.map_err(root_fs_error)?;
        }
        root_fs::furnish(definition, &root, &scratch, progress)
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
}

async fn lay_image(
    image: Arc<Image>,
    root: &Path,
    progress: &dyn Progress,
) -> Result<(), RootFsError> {
    image.lay_down(root, progress).await?;
    let place = root.to_owned();
    let added = tokio::task::spawn_blocking(move || provision::provision(&place)).await;
    let added = added.unwrap_or_else(|error| Err(io::Error::other(error)));
    added.map_err(|source| RootFsError::File {
        path: root.to_owned(),
        source,
    })
}

/// What the files depend on. Newer packages in the archive do not change it: a template is built
/// again for them on purpose ([`super::Cache::Ignore`]).
pub(super) fn base_key(
    definition: &Definition,
    base: &Base,
    salt: &str,
) -> Result<ContentKey, BuildError> {
    let mut key = KeyMaker::new("base 1").with(salt.as_bytes());
    key = match base {
        Base::Packages(packages, archive) => key
            .with(
                json!({ "kind": "bootstrap", "packages": packages })
                    .to_string()
                    .as_bytes(),
            )
            .with(archive.to_stanzas().as_bytes()),
        Base::Directory(path) => key
            .with(
                json!({ "kind": "directory", "path": path })
                    .to_string()
                    .as_bytes(),
            )
            .with(b""),
        // By content: what it is called and who gave it does not matter.
        Base::Image(image) => key
            .with(image.digest.to_string().as_bytes())
            .with(provision::VERSION.as_bytes()),
        Base::Template(files) => key.with(files.key.0.as_bytes()).with(b"template"),
    };
    key = key.with(definition.wheels.join("\n").as_bytes());
    if let Base::Directory(path) = base {
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

/// What the agent is told: what the definition says, and beneath it what the image or the template
/// says that it begins with (BC-120).
pub(super) fn agent_settings(definition: &Definition, base: &Base) -> AgentSettings {
    match base {
        Base::Packages(..) | Base::Directory(_) => definition.agent.clone(),
        Base::Image(image) => over_image(definition, &image.config),
        Base::Template(files) => over_template(&definition.agent, &files.settings),
    }
}

fn over_image(definition: &Definition, config: &ImageConfig) -> AgentSettings {
    let mut settings = definition.agent.clone();
    for variable in &config.environment {
        if let Some((name, value)) = variable.split_once('=') {
            let entry = settings.environment.entry(name.to_owned());
            entry.or_insert_with(|| value.to_owned());
        }
    }
    if settings.default_user == AgentSettings::default().default_user {
        let user = config.user.as_ref().unwrap_or(&definition.fallback.user);
        // A group may stand behind the user; the account says which it is.
        let user = user.split(':').next().unwrap_or_default();
        settings.default_user = user.to_owned();
    }
    let workdir = config.workdir.as_ref();
    let workdir = workdir.or(definition.fallback.workdir.as_ref());
    settings.default_workdir = settings.default_workdir.or_else(|| workdir.cloned());
    if let Start::OfImage {
        entrypoint,
        arguments,
    } = &definition.start
    {
        // As with every runner of images: another entry point comes without the image's arguments.
        let own = entrypoint.as_ref().unwrap_or(&config.entrypoint);
        let further = match (arguments, entrypoint) {
            (Some(arguments), _) => &arguments[..],
            (None, Some(_)) => &[],
            (None, None) => &config.command[..],
        };
        let words: Vec<String> = own.iter().chain(further).map(|w| quoted(w)).collect();
        settings.start_command = (!words.is_empty()).then(|| words.join(" "));
    }
    settings
}

fn over_template(own: &AgentSettings, template: &AgentSettings) -> AgentSettings {
    let mut settings = template.clone();
    settings.environment.extend(own.environment.clone());
    // A new start command comes without the template's ready command: it waits for the old one.
    if own.start_command.is_some() || own.ready_command.is_some() {
        settings.start_command.clone_from(&own.start_command);
        settings.ready_command.clone_from(&own.ready_command);
    }
    settings
}
