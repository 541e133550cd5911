//! What must be known of a run to go on with it, by whoever: the head of its log.

use std::time::Duration;

use sandhold_governor::{
    books::{Grant, Keep},
    ids::{Bucket, LeaseId, OwnerId, ReplicaId, RunId, SlotId},
    rules::Rules,
    tasks::{Reused, RunOf},
};
use sandhold_types::{Generation, SandboxId, Timestamp};
use serde::{Deserialize, Serialize};

use super::RunAsk;

/// Which sandbox a run has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunPlace {
    /// Its slot.
    pub slot: String,
    /// The sandbox.
    pub sandbox: String,
    /// The fencing token of its lease.
    pub fence: u64,
    /// Whether the owner had the sandbox before.
    pub is_reused: bool,
    /// When its time is over, by the store's clock, in milliseconds.
    pub deadline_ms: u64,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEnd {
    /// The stable name of the way: `exited`, `cancelled`, …
    pub code: String,
    /// The exit code of its process, if that ended by itself.
    pub exit_code: Option<i32>,
    /// In words.
    pub message: String,
}

/// What is known of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunHead {
    /// Product or team.
    pub namespace: String,
    /// Its environment.
    pub env: String,
    /// Whose it is.
    pub owner: String,
    /// Under which lease.
    pub lease: String,
    /// The caller's project.
    pub project: String,
    /// The caller's name for the session.
    pub session_run: String,
    /// What a new sandbox is made from.
    pub template: String,
    /// A name that nobody else has, for its directory and its processes.
    pub(crate) work: String,
    /// Where it runs, as the caller named it.
    pub(crate) cwd: String,
    /// Where that is.
    pub(crate) workspace: Option<String>,
    /// Its globs.
    pub(crate) artifacts: Vec<String>,
    /// Whether the sandbox stays for its lease.
    pub keeps_sandbox: bool,
    /// For how long it may run, in milliseconds.
    pub timeout_ms: u64,
    /// Its sandbox, once it has one.
    pub place: Option<RunPlace>,
    /// Whether its process was started.
    pub is_started: bool,
    /// How it ended.
    pub end: Option<RunEnd>,
}

impl RunHead {
    /// Of what is asked, before there is a sandbox for it.
    pub(super) fn of(ask: &RunAsk, lease: &LeaseId, work: &RunId) -> Self {
        Self {
            namespace: ask.bucket.namespace.to_string(),
            env: ask.bucket.env.to_string(),
            owner: ask.owner.to_string(),
            lease: lease.to_string(),
            project: ask.project.clone(),
            session_run: ask.session_run.clone(),
            template: ask.template.to_string(),
            work: work.to_string(),
            cwd: ask.cwd.clone(),
            workspace: None,
            artifacts: ask.artifacts.texts().to_vec(),
            keeps_sandbox: ask.keep == Keep::Sandbox,
            timeout_ms: u64::try_from(ask.timeout.as_millis()).unwrap_or(u64::MAX),
            place: None,
            is_started: false,
            end: None,
        }
    }

    /// Where it counts; `None` never happens for one that was written here.
    #[must_use]
    pub fn bucket(&self) -> Option<Bucket> {
        Some(Bucket {
            namespace: self.namespace.parse().ok()?,
            env: self.env.parse().ok()?,
        })
    }

    /// Whose, and under which lease.
    pub(crate) fn holder(&self) -> Option<(Bucket, OwnerId, LeaseId)> {
        Some((
            self.bucket()?,
            self.owner.parse().ok()?,
            self.lease.parse().ok()?,
        ))
    }

    /// It has a sandbox, and its time runs from now.
    pub(crate) fn settle(&mut self, grant: &Grant, reused: Reused, now: Timestamp) {
        self.place = Some(RunPlace {
            slot: grant.slot.to_string(),
            sandbox: grant.sandbox.to_string(),
            fence: grant.generation.0,
            is_reused: reused == Reused::Yes,
            deadline_ms: now.plus(Duration::from_millis(self.timeout_ms)).unix_ms(),
        });
    }

    /// The slot, sandbox and generation.
    pub(crate) fn names(&self) -> Option<(SlotId, SandboxId, Generation)> {
        let place = self.place.as_ref()?;
        Some((
            place.slot.parse().ok()?,
            place.sandbox.parse().ok()?,
            Generation(place.fence),
        ))
    }

    /// The loop's part of it; `None` if it has no sandbox yet.
    pub(crate) fn run_of(&self, run: &RunId, replica: &ReplicaId, now: Timestamp) -> Option<RunOf> {
        let (slot, sandbox, generation) = self.names()?;
        let deadline = Timestamp::from_unix_ms(self.place.as_ref()?.deadline_ms);
        Some(RunOf {
            slot,
            sandbox,
            generation,
            run: run.clone(),
            replica: replica.clone(),
            timeout: deadline.since(now),
            keep: self.keep(),
        })
    }

    /// When its time began to run, by the store's clock.
    pub(crate) fn begun_at(&self) -> Timestamp {
        let deadline_ms = self.place.as_ref().map_or(0, |place| place.deadline_ms);
        Timestamp::from_unix_ms(deadline_ms.saturating_sub(self.timeout_ms))
    }

    fn keep(&self) -> Keep {
        if self.keeps_sandbox {
            Keep::Sandbox
        } else {
            Keep::Nothing
        }
    }

    pub(crate) fn text(&self) -> String {
        // A structure of texts and numbers is always written.
        serde_json::to_string(self).unwrap_or_default()
    }

    pub(crate) fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

/// How long one look into a sandbox may take: a run must be able to beat between two of them.
pub(crate) fn look_wait(rules: &Rules) -> Duration {
    rules.settings().heartbeat / 3
}
