//! What is written down about builds and templates: two small JSON files, each with a version.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use sandhold_engine::EngineIdentity;
use sandhold_types::{BuildId, Namespace, Resources, TemplateId, Timestamp, Token};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{Build, WarmImage, durable};

/// The version that is written; others are refused, never guessed at.
const RECORD_VERSION: u32 = 1;
/// How long a record may be, in bytes. What is longer was not written by us.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// A record that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It cannot be read or written.
    #[error("could not {step} the record {path}")]
    File {
        /// What was being done.
        step: &'static str,
        /// Which file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It does not hold what a record holds.
    #[error("the record {path} cannot be understood")]
    Content {
        /// Which file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// It is of a version that this program does not know.
    #[error("the record {path} is of version {found}; this program knows version {RECORD_VERSION}")]
    Version {
        /// Which file.
        path: PathBuf,
        /// The version in it.
        found: u32,
    },
    /// It lies where a record of another build belongs, or names what cannot be.
    #[error("the record {path} does not belong where it lies")]
    OutOfPlace {
        /// Which file.
        path: PathBuf,
    },
    /// It is longer than a record can be.
    #[error("the record {path} is longer than {RECORD_BYTES_MAX} bytes")]
    TooLong {
        /// Which file.
        path: PathBuf,
    },
}

/// Content key of a layer or a build: what it was made from, as hexadecimal SHA-256.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ContentKey(pub(crate) String);

impl ContentKey {
    /// Whether it is 64 hexadecimal digits, so that it can be the name of a directory.
    pub(crate) fn is_well_formed(&self) -> bool {
        self.0.len() == 64 && self.0.bytes().all(|b| b.is_ascii_hexdigit())
    }
}

impl std::fmt::Display for ContentKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The record of a build: `builds/<id>/build.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BuildRecord {
    pub(crate) id: BuildId,
    pub(crate) template: TemplateId,
    pub(crate) names: Vec<String>,
    pub(crate) owner: Option<Namespace>,
    /// What it was made from. An unchanged definition has the same key and is not built again.
    pub(crate) key: ContentKey,
    /// Drawn anew when everything is to be made again; part of the keys. Builds of an unchanged
    /// definition take over that of the build before.
    #[serde(default)]
    pub(crate) salt: String,
    /// The layer that holds the root file system without the agent; kept as the cache.
    pub(crate) base_layer: ContentKey,
    /// Layers of the steps before it, kept with it.
    #[serde(default)]
    pub(crate) step_layers: Vec<ContentKey>,
    /// The layer that sandboxes run on.
    pub(crate) root_layer: ContentKey,
    pub(crate) command: Vec<String>,
    pub(crate) environment: Vec<String>,
    pub(crate) resources: Resources,
    pub(crate) warm: Option<WarmRecord>,
    pub(crate) built_at: Timestamp,
    pub(crate) size_bytes: u64,
}

/// The memory image of a build, beside its record in `image/`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WarmRecord {
    pub(crate) engine: EngineIdentity,
    pub(crate) control_token: String,
}

/// The record of a template: `templates/<id>.json`. Without it, its builds have no name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TemplateRecord {
    pub(crate) id: TemplateId,
    pub(crate) names: Vec<String>,
    pub(crate) owner: Option<Namespace>,
    pub(crate) description: String,
    pub(crate) current: BuildId,
    /// Further builds by tag.
    #[serde(default)]
    pub(crate) tags: BTreeMap<String, BuildId>,
}

impl BuildRecord {
    /// The build as the node sees it, in the catalogue directory `base`.
    pub(crate) fn to_build(&self, base: &Path, layers: &Path) -> Build {
        Build {
            id: self.id.clone(),
            template: self.template.clone(),
            names: self.names.clone(),
            owner: self.owner.clone(),
            root_fs: layers.join(&self.root_layer.0).join("root"),
            command: self.command.clone(),
            environment: self.environment.clone(),
            resources: self.resources,
            warm: self.warm.as_ref().map(|warm| WarmImage {
                directory: base.join("image"),
                engine: warm.engine.clone(),
                control_token: Token::new(warm.control_token.clone()),
            }),
            built_at: self.built_at,
            size_bytes: self.size_bytes,
        }
    }
}

#[derive(Serialize)]
struct VersionedRef<'a, T> {
    version: u32,
    #[serde(flatten)]
    record: &'a T,
}

#[derive(Deserialize)]
struct VersionOnly {
    version: u32,
}

/// Writes a record durably.
pub(crate) fn write<T: Serialize>(path: &Path, record: &T) -> Result<(), RecordError> {
    let versioned = VersionedRef {
        version: RECORD_VERSION,
        record,
    };
    let text = serde_json::to_vec_pretty(&versioned).map_err(|source| RecordError::Content {
        path: path.to_owned(),
        source,
    })?;
    durable::replace_file(path, &text).map_err(|source| RecordError::File {
        step: "write",
        path: path.to_owned(),
        source,
    })
}

/// Reads a record.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, RecordError> {
    let file_error = |source| RecordError::File {
        step: "read",
        path: path.to_owned(),
        source,
    };
    if std::fs::metadata(path).map_err(file_error)?.len() > RECORD_BYTES_MAX {
        return Err(RecordError::TooLong {
            path: path.to_owned(),
        });
    }
    let text = std::fs::read(path).map_err(file_error)?;
    let content_error = |source| RecordError::Content {
        path: path.to_owned(),
        source,
    };
    let VersionOnly { version } = serde_json::from_slice(&text).map_err(content_error)?;
    if version != RECORD_VERSION {
        return Err(RecordError::Version {
            path: path.to_owned(),
            found: version,
        });
    }
    serde_json::from_slice(&text).map_err(content_error)
}
