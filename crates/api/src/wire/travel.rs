//! Snapshots, copies and rollbacks as clients write and read them (wire contract 1.5).

use std::sync::Arc;

use sandhold_platform::{
    Lineage, PauseKeeps, SandboxView, SnapshotKind, SnapshotName, SnapshotView, TakeSnapshot,
};
use sandhold_types::{Clocking, Lifetime, SnapshotId, Timestamp};
use serde::{Deserialize, Serialize};

use super::{WholeSeconds, sandbox::SandboxBody};
use crate::{Limits, error::ApiError, page::Question, request::Query};

/// `POST /sandboxes/{id}/snapshots`
#[derive(Debug, Deserialize)]
pub(crate) struct SnapshotRequest {
    name: Option<String>,
    memory: Option<bool>,
}

impl SnapshotRequest {
    /// What the platform is asked for, in the name of this tenant.
    pub(crate) fn wanted(self, namespace: &str, limits: &Limits) -> Result<TakeSnapshot, ApiError> {
        let name = self.name.filter(|name| !name.is_empty());
        let name = name.map(|text| read_name(&text, namespace, limits));
        Ok(TakeSnapshot {
            name: name.transpose()?,
            kind: SnapshotKind::Kept,
            keeps: match self.memory {
                Some(false) => PauseKeeps::Files,
                _ => PauseKeeps::Everything,
            },
        })
    }
}

/// Reads `[namespace/]name[:tag]`.
fn read_name(text: &str, namespace: &str, limits: &Limits) -> Result<SnapshotName, ApiError> {
    const RULE: &str = "must be name or name:tag, of lower-case letters, digits, '-', '_' and '.'";
    if text.len() > limits.template_name_bytes_max {
        return Err(ApiError::invalid("name", "is too long"));
    }
    let own = text
        .strip_prefix(namespace)
        .and_then(|rest| rest.strip_prefix('/'));
    let (name, tag) = SnapshotName::split(own.unwrap_or(text));
    if ![name, tag].into_iter().all(is_name) {
        return Err(ApiError::invalid("name", RULE));
    }
    Ok(SnapshotName {
        name: name.to_owned(),
        tag: tag.to_owned(),
    })
}

fn is_name(text: &str) -> bool {
    let inner =
        |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_' | b'.');
    text.bytes().all(inner)
        && text
            .bytes()
            .next()
            .is_some_and(|b| b.is_ascii_alphanumeric())
}

/// A snapshot.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotBody {
    /// Usable as `templateID`.
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    /// What it can be asked for by, with the tenant before it and the tag behind it.
    names: Vec<String>,
    /// The sandbox that it was taken of.
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    /// The snapshot before it in the history of its source.
    #[serde(rename = "parentID")]
    parent_id: Option<String>,
    /// When it was taken.
    created_at: String,
    /// For how long its source stood still, in milliseconds.
    paused_ms: u64,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
}

impl SnapshotBody {
    pub(crate) fn of(view: &SnapshotView) -> Self {
        let full = |name: &SnapshotName| format!("{}/{name}", view.owner.namespace);
        Self {
            snapshot_id: view.id.to_string(),
            names: view.names.iter().map(full).collect(),
            sandbox_id: view.source.to_string(),
            parent_id: view.ancestors.first().map(SnapshotId::to_string),
            created_at: view.taken_at.to_rfc3339(),
            paused_ms: view.source_paused_ms,
            cpu_count: view.resources.cpu_count(),
            memory_mb: view.resources.memory_mib,
        }
    }
}

/// `GET /snapshots`: which are wanted.
#[derive(Debug, Default)]
pub(crate) struct SnapshotFilter {
    sandbox: Option<String>,
    name: Option<String>,
}

impl SnapshotFilter {
    pub(crate) fn read(query: &Query) -> Self {
        let given = |key: &str| query.first(key).filter(|text| !text.is_empty());
        Self {
            sandbox: given("sandboxID").map(str::to_owned),
            name: given("name").map(str::to_owned),
        }
    }

    pub(crate) fn question(&self, namespace: &str, env: &str) -> Question {
        let of = |part: &Option<String>| part.clone().unwrap_or_default();
        let (sandbox, name) = (of(&self.sandbox), of(&self.name));
        Question::of(["snapshots", namespace, env, &sandbox, &name])
    }

    /// Whether a snapshot of the caller's bucket is wanted.
    pub(crate) fn wants(&self, view: &SnapshotView) -> bool {
        let of_sandbox = |wanted: &String| {
            // The oldest clients add `-` and their client identifier.
            wanted.split('-').next() == Some(view.source.as_str())
        };
        let is_called = |wanted: &String| {
            let namespace = view.owner.namespace.as_str();
            let own = wanted
                .strip_prefix(namespace)
                .and_then(|rest| rest.strip_prefix('/'));
            let wanted = own.unwrap_or(wanted);
            let named = |name: &SnapshotName| name.name == wanted || name.to_string() == wanted;
            let (id, tag) = SnapshotName::split(wanted);
            let by_id = id == view.id.as_str() && tag == SnapshotName::DEFAULT_TAG;
            by_id || view.names.iter().any(named)
        };
        self.sandbox.as_ref().is_none_or(of_sandbox) && self.name.as_ref().is_none_or(is_called)
    }
}

/// `GET /snapshots/{id}/lineage`
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LineageBody {
    snapshot: SnapshotBody,
    /// Bytes that go when it is deleted.
    exclusive_bytes: u64,
    /// Bytes that something else holds too.
    shared_bytes: u64,
    /// What it came from, the nearest first.
    ancestors: Vec<AncestorBody>,
    /// Snapshots that came from it, oldest first.
    descendants: Vec<SnapshotBody>,
    /// Sandboxes that stand on it.
    #[serde(rename = "sandboxIDs")]
    sandbox_ids: Vec<String>,
}

/// A snapshot that another one came from.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AncestorBody {
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    /// Whether it was deleted since.
    deleted: bool,
    names: Vec<String>,
}

impl LineageBody {
    pub(crate) fn of(lineage: &Lineage) -> Self {
        let ancestors = lineage.ancestors.iter().map(|descent| AncestorBody {
            snapshot_id: descent.id.to_string(),
            deleted: descent.snapshot.is_none(),
            names: descent
                .snapshot
                .as_ref()
                .map(|view| SnapshotBody::of(view).names)
                .unwrap_or_default(),
        });
        let descendants = lineage.descendants.iter();
        Self {
            snapshot: SnapshotBody::of(&lineage.snapshot),
            exclusive_bytes: lineage.sizes.exclusive_bytes,
            shared_bytes: lineage.sizes.shared_bytes,
            ancestors: ancestors.collect(),
            descendants: descendants.map(|view| SnapshotBody::of(view)).collect(),
            sandbox_ids: lineage.sandboxes.iter().map(|v| v.id.to_string()).collect(),
        }
    }
}

/// `GET /sandboxes/{id}/timeline`
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TimelineBody {
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    /// The snapshot that it stands on; what it did since is in no snapshot.
    #[serde(rename = "currentSnapshotID")]
    current_snapshot_id: Option<String>,
    /// The snapshots that it can go back to, oldest first.
    snapshots: Vec<SnapshotBody>,
}

impl TimelineBody {
    /// Of a sandbox, from all snapshots of its bucket.
    pub(crate) fn of(view: &SandboxView, snapshots: &[Arc<SnapshotView>]) -> Self {
        let of_line = |snapshot: &&Arc<SnapshotView>| {
            snapshot.source == view.id || view.line.contains(&snapshot.id)
        };
        let own = snapshots.iter().filter(of_line);
        Self {
            sandbox_id: view.id.to_string(),
            current_snapshot_id: view.line.first().map(SnapshotId::to_string),
            snapshots: own.map(|snapshot| SnapshotBody::of(snapshot)).collect(),
        }
    }
}

/// `POST /sandboxes/{id}/rollback`
#[derive(Debug, Deserialize)]
pub(crate) struct RollbackRequest {
    #[serde(rename = "snapshotID")]
    snapshot_id: Option<String>,
}

impl RollbackRequest {
    pub(crate) fn snapshot(self) -> Result<String, ApiError> {
        let given = self.snapshot_id.filter(|id| !id.is_empty());
        given.ok_or_else(|| ApiError::invalid("snapshotID", "is required"))
    }
}

/// The answer to a rollback.
#[derive(Debug, Serialize)]
pub(crate) struct RollbackBody {
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    status: &'static str,
}

impl RollbackBody {
    pub(crate) fn of(sandbox: &SandboxView, snapshot: &SnapshotId) -> Self {
        Self {
            sandbox_id: sandbox.id.to_string(),
            snapshot_id: snapshot.to_string(),
            status: "success",
        }
    }
}

/// What becomes of the other copies when one cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnFailure {
    /// They are removed too.
    RemoveAll,
    /// They are handed out, and the failure in its place.
    Tell,
}

/// Copies that are wanted of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Copies {
    pub(crate) count: usize,
    pub(crate) concurrency: usize,
    pub(crate) lifetime: Lifetime,
    pub(crate) on_failure: OnFailure,
}

/// `POST /sandboxes/{id}/fork`
#[derive(Debug, Deserialize)]
pub(crate) struct ForkRequest {
    timeout: Option<WholeSeconds>,
    count: Option<usize>,
}

/// `POST /sandboxes/{id}/clones`
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClonesRequest {
    /// How many; one by default.
    count: Option<usize>,
    /// How many are made at the same time.
    concurrency: Option<usize>,
    /// Whether one that cannot be made takes the others with it; yes by default.
    all_or_nothing: Option<bool>,
    /// Seconds that they live; by default as long as the source does.
    #[schema(value_type = Option<i64>)]
    timeout: Option<WholeSeconds>,
}

/// Seconds that a fork lives whose request names none (wire contract 1.5).
const FORK_TIMEOUT_S: i64 = 15;

impl ForkRequest {
    pub(crate) fn copies(
        &self,
        source: &SandboxView,
        limits: &Limits,
        now: Timestamp,
    ) -> Result<Copies, ApiError> {
        let timeout = self.timeout.unwrap_or(WholeSeconds(FORK_TIMEOUT_S));
        Ok(Copies {
            count: bounded("count", self.count, 1, limits.copies_max)?,
            concurrency: limits.creates_running_per_tenant_max,
            lifetime: Lifetime {
                clocking: Clocking::Deadline {
                    end: now.plus(seconds(timeout, limits)?),
                },
                on_timeout: source.lifetime.on_timeout,
            },
            on_failure: OnFailure::Tell,
        })
    }
}

impl ClonesRequest {
    pub(crate) fn copies(
        &self,
        source: &SandboxView,
        limits: &Limits,
        now: Timestamp,
    ) -> Result<Copies, ApiError> {
        let at_once = limits.creates_running_per_tenant_max;
        Ok(Copies {
            count: bounded("count", self.count, 1, limits.copies_max)?,
            concurrency: bounded("concurrency", self.concurrency, at_once, limits.copies_max)?,
            lifetime: Lifetime {
                clocking: self.clocking(source.lifetime.clocking, limits, now)?,
                on_timeout: source.lifetime.on_timeout,
            },
            on_failure: match self.all_or_nothing {
                Some(false) => OnFailure::Tell,
                _ => OnFailure::RemoveAll,
            },
        })
    }

    /// A copy has a clock of the kind that its source has.
    fn clocking(
        &self,
        source: Clocking,
        limits: &Limits,
        now: Timestamp,
    ) -> Result<Clocking, ApiError> {
        let Some(timeout) = self.timeout else {
            return Ok(source);
        };
        let lives = seconds(timeout, limits)?;
        Ok(match source {
            Clocking::Deadline { .. } => Clocking::Deadline {
                end: now.plus(lives),
            },
            Clocking::Idle { .. } => Clocking::Idle {
                window_ms: u64::try_from(lives.as_millis()).ok(),
            },
        })
    }
}

fn seconds(timeout: WholeSeconds, limits: &Limits) -> Result<std::time::Duration, ApiError> {
    let given = u64::try_from(timeout.0).ok();
    let fits = given.filter(|seconds| *seconds <= limits.timeout_s_max);
    let fits = fits.map(std::time::Duration::from_secs);
    fits.ok_or_else(|| {
        let rule = format!("must be between 0 and {} seconds", limits.timeout_s_max);
        ApiError::invalid("timeout", rule)
    })
}

fn bounded(
    field: &'static str,
    given: Option<usize>,
    default: usize,
    most: usize,
) -> Result<usize, ApiError> {
    let value = given.unwrap_or(default);
    if (1..=most).contains(&value) {
        Ok(value)
    } else {
        Err(ApiError::invalid(
            field,
            format!("must be between 1 and {most}"),
        ))
    }
}

/// One copy: it, or why it is not there.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CopyBody {
    Sandbox(SandboxBody),
    Error(CopyError),
}

/// Why a copy is not there.
#[derive(Debug, Serialize)]
pub(crate) struct CopyError {
    code: u16,
    message: String,
    error_code: &'static str,
}

impl From<&ApiError> for CopyError {
    fn from(error: &ApiError) -> Self {
        let code = error.code();
        Self {
            code: code.http_status(),
            message: error.to_string(),
            error_code: code.as_str(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_with_tenant_and_tag_or_refused() {
        let limits = Limits::default();
        let read = |text: &str| read_name(text, "team", &limits).map(|name| name.to_string());
        for (text, name) in [
            ("env", "env:default"),
            ("env:v2", "env:v2"),
            ("team/env:v2", "env:v2"),
        ] {
            assert_eq!(read(text).unwrap(), name);
        }
        for text in [
            "other/env",
            "",
            ":",
            "env:",
            ":v2",
            "Env",
            "a b",
            "../x",
            "a:b:c",
            "é",
        ] {
            assert!(read(text).is_err(), "{text:?}");
        }
        assert!(read(&"a".repeat(1_000)).is_err());
    }

    #[test]
    fn copies_are_bounded() {
        let limits = Limits::default();
        assert!(bounded("count", Some(0), 1, limits.copies_max).is_err());
        assert!(bounded("count", Some(limits.copies_max + 1), 1, limits.copies_max).is_err());
        assert_eq!(bounded("count", None, 1, limits.copies_max).unwrap(), 1);
    }
}
