//! What is written down about a snapshot: `snapshot.json` in its directory. Readable by root only,
//! because it holds the control token that the agent in the image expects.

use std::{collections::BTreeMap, path::Path};

use sandhold_engine::EngineIdentity;
use sandhold_platform::{
    Owner, PauseKeeps, SnapshotKind, SnapshotName, SnapshotView, TemplateStamp,
};
use sandhold_types::{Resources, SandboxId, SnapshotId, Timestamp, Token, token_text};
use serde::{Deserialize, Serialize};

use crate::record::{self, RecordError};

/// A captured moment of a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its identifier.
    pub id: SnapshotId,
    /// Whose it is.
    pub owner: Owner,
    /// For how long it is there.
    pub kind: SnapshotKind,
    /// What it can be asked for by.
    pub names: Vec<SnapshotName>,
    /// The sandbox that it was taken of.
    pub source: SandboxId,
    /// What that one was made from; its build's root file system is the snapshot's too.
    pub template: TemplateStamp,
    /// The snapshots that its source stood on, the nearest first.
    pub ancestors: Vec<SnapshotId>,
    /// The limits that it was captured with.
    pub resources: Resources,
    /// The environment of its source's processes.
    pub env_vars: BTreeMap<String, String>,
    /// What sandboxes made from it find.
    pub keeps: PauseKeeps,
    /// When it was taken.
    pub taken_at: Timestamp,
    /// For how long its source stood still.
    pub source_paused_ms: u64,
    /// Who can restore it.
    pub engine: EngineIdentity,
    /// The control token that the agent in it expects.
    #[serde(with = "token_text")]
    pub control_token: Token,
    /// The control token that its first process was booted with; engines compare it.
    #[serde(with = "token_text")]
    pub boot_token: Token,
    /// Bytes of its image.
    pub size_bytes: u64,
}

impl Snapshot {
    /// What others may see of it.
    #[must_use]
    pub fn view(&self) -> SnapshotView {
        SnapshotView {
            id: self.id.clone(),
            owner: self.owner.clone(),
            names: self.names.clone(),
            source: self.source.clone(),
            template: self.template.clone(),
            ancestors: self.ancestors.clone(),
            resources: self.resources,
            taken_at: self.taken_at,
            source_paused_ms: self.source_paused_ms,
        }
    }

    pub(super) fn write(&self, path: &Path) -> Result<(), RecordError> {
        record::write(path, self)
    }

    /// Reads a record; one of another snapshot is an error.
    pub(super) fn read(path: &Path, id: &SnapshotId) -> Result<Self, RecordError> {
        let snapshot: Self = record::read(path)?;
        if snapshot.id != *id {
            return Err(RecordError::OutOfPlace {
                path: path.to_owned(),
            });
        }
        Ok(snapshot)
    }
}
