//! What a definition is made of: where files come from, what the agent is told, what runs.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{catalogue::TemplateFiles, image::ImageSource};

/// Where a root file system comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Debian packages from the archive that the machine's apt is configured with.
    Bootstrap {
        /// Names of packages.
        packages: Vec<String>,
    },
    /// A directory that already holds a root file system.
    Directory {
        /// Where it is.
        path: PathBuf,
    },
    /// An image.
    Image(ImageSource),
    /// Another template.
    Template(TemplateFiles),
}

/// Who runs commands, and where, if neither the definition nor its image says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// The user.
    pub user: String,
    /// The directory; the user's home if absent.
    pub workdir: Option<String>,
}

impl Default for Fallback {
    fn default() -> Self {
        Self {
            user: default_user(),
            workdir: None,
        }
    }
}

/// What sandboxes have running.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Start {
    /// What the definition says, or the template that it begins with.
    #[default]
    AsDefined,
    /// What the image says that it is for.
    OfImage {
        /// In place of the image's entry point.
        entrypoint: Option<Vec<String>>,
        /// In place of the image's arguments.
        arguments: Option<Vec<String>>,
    },
}

/// What the agent in the template is told: becomes `/.sandhold/agent.json` as it stands. Fields
/// are those of the agent's configuration (control protocol).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AgentSettings {
    /// Languages whose kernels run already when the memory image is taken.
    #[serde(default)]
    pub warm_languages: Vec<String>,
    /// Run once at boot, before the image is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_command: Option<String>,
    /// Tried until it succeeds; only then is the template ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_command: Option<String>,
    /// Who runs commands when the caller names nobody.
    #[serde(default = "default_user")]
    pub default_user: String,
    /// Where commands run when the caller names no directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    /// Environment of every process.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Modules, by language, that a warm kernel has loaded before it is ready.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kernel_preload: BTreeMap<String, Vec<String>>,
}

impl Default for AgentSettings {
    fn default() -> Self {
        Self {
            warm_languages: Vec::new(),
            start_command: None,
            ready_command: None,
            default_user: default_user(),
            default_workdir: None,
            environment: BTreeMap::new(),
            kernel_preload: BTreeMap::new(),
        }
    }
}

fn default_user() -> String {
    String::from("user")
}
