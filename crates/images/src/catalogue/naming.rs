//! What builds are called: tags and names of a tenant's own templates, and what a build that begins
//! with a template needs of it.

use std::{path::PathBuf, sync::Arc};

use sandhold_platform::{PlatformError, TagView};
use sandhold_types::{BuildId, Namespace, TemplateId};

use super::{Catalogue, build_of, is_called, is_current_tag, split_reference};
use crate::{
    definition::{AgentSettings, is_template_name},
    record::{self, ContentKey, TemplateRecord},
};

/// How many tags a template may have.
const TAGS_MAX: usize = 1_000;
/// How many names a template may have.
const NAMES_MAX: usize = 16;
/// How long a tag may be.
const TAG_LENGTH_MAX: usize = 128;
/// Where the agent's settings are in a root.
const SETTINGS: &str = ".sandhold/agent.json";

/// The files of a template and what its agent is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateFiles {
    /// Names the files by what they were made from.
    pub(crate) key: ContentKey,
    /// Where they are.
    pub(crate) path: PathBuf,
    /// What the agent is told.
    pub(crate) settings: AgentSettings,
}

/// Whether a build can be called by this tag.
pub(crate) fn is_tag(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    (1..=TAG_LENGTH_MAX).contains(&text.len())
        && text.bytes().all(inner)
        && text.as_bytes()[0].is_ascii_alphanumeric()
}

fn invalid(text: String) -> PlatformError {
    PlatformError::Invalid(text)
}

impl Catalogue {
    /// This tenant's own template of that name or identifier.
    pub(crate) fn own_template(
        &self,
        namespace: &Namespace,
        name: &str,
    ) -> Option<Arc<TemplateRecord>> {
        let index = self.index();
        let own = index.read.first()?;
        let mut records = own.contents.templates.values();
        let found = records
            .find(|record| record.owner.as_ref() == Some(namespace) && is_called(record, name));
        found.cloned()
    }

    /// The files of what `reference` means to this tenant.
    pub(crate) fn files_of(
        &self,
        namespace: &Namespace,
        reference: &str,
    ) -> Result<TemplateFiles, PlatformError> {
        let index = self.index();
        let found = index.find(namespace, reference).and_then(|(_, id)| {
            let mut read = index.read.iter();
            let read = read.find(|read| read.contents.builds.contains_key(&id))?;
            Some((read.shelf.clone(), read.contents.builds.get(&id)?.clone()))
        });
        let (shelf, shelved) =
            found.ok_or_else(|| PlatformError::TemplateNotFound(reference.to_owned()))?;
        let settings = std::fs::read(shelved.build.root_fs.join(SETTINGS));
        let settings = settings.ok().and_then(|b| serde_json::from_slice(&b).ok());
        Ok(TemplateFiles {
            key: shelved.record.base_layer.clone(),
            path: shelf.layer(&shelved.record.base_layer).join("root"),
            settings: settings.unwrap_or_default(),
        })
    }

    /// Lets tags mean the build that `target` means.
    pub(crate) fn assign_tags(
        &self,
        namespace: &Namespace,
        target: &str,
        tags: &[String],
    ) -> Result<BuildId, PlatformError> {
        if let Some(tag) = tags.iter().find(|tag| !is_tag(tag)) {
            return Err(invalid(format!("'{tag}' cannot be a tag")));
        }
        let (name, tag) = split_reference(namespace, target);
        let unknown = || PlatformError::TemplateNotFound(target.to_owned());
        let id = self.require_own(namespace, name)?.id.clone();
        self.change(&id, |record| {
            let build = build_of(record, tag).ok_or_else(unknown)?;
            for tag in tags {
                match is_current_tag(tag) {
                    true => record.current = build.clone(),
                    false => {
                        record.tags.insert(tag.clone(), build.clone());
                    }
                }
            }
            match record.tags.len() > TAGS_MAX {
                true => Err(invalid(format!("a template has at most {TAGS_MAX} tags"))),
                false => Ok(build),
            }
        })
    }

    /// The tags of a template, the one of the current build first.
    pub(crate) fn tags_of(
        &self,
        namespace: &Namespace,
        template: &str,
    ) -> Result<Vec<TagView>, PlatformError> {
        let index = self.index();
        let (record, _) = index
            .find(namespace, template)
            .ok_or_else(|| PlatformError::TemplateNotFound(template.to_owned()))?;
        let current = std::iter::once(("default", &record.current));
        let tags = record.tags.iter().map(|(tag, build)| (tag.as_str(), build));
        let views = current.chain(tags).filter_map(|(tag, id)| {
            let build = index.usable.get(id)?;
            Some(TagView {
                tag: tag.to_owned(),
                build: id.clone(),
                built_at: build.built_at,
            })
        });
        Ok(views.collect())
    }

    /// Takes tags away. Their builds go when nothing else means them.
    pub(crate) fn remove_tags(
        &self,
        namespace: &Namespace,
        template: &str,
        tags: &[String],
    ) -> Result<(), PlatformError> {
        let (name, _) = split_reference(namespace, template);
        let id = self.require_own(namespace, name)?.id.clone();
        if let Some(tag) = tags.iter().find(|tag| is_current_tag(tag)) {
            let text = format!(
                "'{tag}' is what the template means without a tag; give it to another build"
            );
            return Err(invalid(text));
        }
        self.change(&id, |record| {
            record.tags.retain(|tag, _| !tags.contains(tag));
            Ok(())
        })
    }

    /// Gives a template a name by which it is called first.
    pub(crate) fn set_alias(
        &self,
        namespace: &Namespace,
        template: &str,
        alias: &str,
    ) -> Result<(), PlatformError> {
        if !is_template_name(alias) {
            return Err(invalid(format!(
                "'{alias}' cannot be the name of a template"
            )));
        }
        let (name, _) = split_reference(namespace, template);
        let id = self.require_own(namespace, name)?.id.clone();
        let other = self.own_template(namespace, alias);
        if other.is_some_and(|other| other.id != id) {
            return Err(invalid(format!(
                "'{alias}' is the name of another template"
            )));
        }
        self.change(&id, |record| {
            record.names.retain(|name| name != alias);
            record.names.insert(0, alias.to_owned());
            match record.names.len() > NAMES_MAX {
                true => Err(invalid(format!("a template has at most {NAMES_MAX} names"))),
                false => Ok(()),
            }
        })
    }

    fn require_own(
        &self,
        namespace: &Namespace,
        name: &str,
    ) -> Result<Arc<TemplateRecord>, PlatformError> {
        if let Some(own) = self.own_template(namespace, name) {
            return Ok(own);
        }
        match self.index().find(namespace, name) {
            Some(_) => Err(PlatformError::Forbidden(format!(
                "template '{name}' belongs to the platform"
            ))),
            None => Err(PlatformError::TemplateNotFound(name.to_owned())),
        }
    }

    /// Changes a record as it is now, which a build may have changed a moment ago.
    fn change<T>(
        &self,
        id: &TemplateId,
        change: impl FnOnce(&mut TemplateRecord) -> Result<T, PlatformError>,
    ) -> Result<T, PlatformError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| PlatformError::Node {
            step: "changing the names of the template",
            source,
        };
        let path = self.own.template_record(id);
        let _lock = self.own.lock_names().map_err(|e| failed(Box::new(e)))?;
        let mut record: TemplateRecord = record::read(&path).map_err(|e| failed(Box::new(e)))?;
        let changed = change(&mut record)?;
        record::write(&path, &record).map_err(|e| failed(Box::new(e)))?;
        self.reread();
        Ok(changed)
    }
}
