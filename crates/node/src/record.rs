//! What is written down about a sandbox: the node's truth (architecture, decision 1).

use std::{collections::BTreeMap, fs, io, path::Path};

use sandhold_engine::EngineIdentity;
use sandhold_platform::{
    AutoResume, BusyWith, CreateSandbox, Egress, Ended, HistoryEvent, Owner, PauseKeeps,
    PublicTraffic, SandboxView, Sleep, TemplateStamp,
};
use sandhold_types::{
    Actor, Clocking, EndReason, Incarnation, Lifetime, Resources, SandboxId, SandboxState,
    SnapshotId, Timestamp, Token, token_text,
};

use crate::{
    ENVD_VERSION,
    layout::{Durability, write_durably},
};

/// The newest events that are kept of a sandbox; a very long life forgets its oldest.
const HISTORY_MAX: usize = 256;

/// The version of the record's form. Another one is refused, never reinterpreted.
const VERSION: u32 = 1;

/// The record of a sandbox. Readable by root only: it holds the sandbox's own tokens.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Record {
    version: u32,
    pub(crate) id: SandboxId,
    pub(crate) owner: Owner,
    pub(crate) template: TemplateStamp,
    pub(crate) state: SandboxState,
    pub(crate) incarnation: Incarnation,
    pub(crate) started_at: Timestamp,
    pub(crate) last_activity: Timestamp,
    pub(crate) lifetime: Lifetime,
    /// How long it was to live when that was last said, for wake-ups that say nothing.
    #[serde(default)]
    pub(crate) life_ms: Option<u64>,
    #[serde(default)]
    pub(crate) auto_resume: AutoResume,
    #[serde(default)]
    pub(crate) busy_with: BusyWith,
    #[serde(default)]
    pub(crate) timeout_keeps: PauseKeeps,
    #[serde(default)]
    pub(crate) sleep: Option<Sleep>,
    /// The capture that it would be woken from.
    #[serde(default)]
    pub(crate) image: Option<Image>,
    pub(crate) resources: Resources,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) env_vars: BTreeMap<String, String>,
    pub(crate) egress: Egress,
    pub(crate) public_traffic: PublicTraffic,
    pub(crate) mask_request_host: Option<String>,
    pub(crate) domain: Option<String>,
    pub(crate) tokens: Tokens,
    /// The snapshots that it stands on, the nearest first.
    #[serde(default)]
    pub(crate) line: Vec<SnapshotId>,
    /// The temporary snapshot that it was copied from. While that is there, nobody was told of it.
    #[serde(default)]
    pub(crate) copy_of: Option<SnapshotId>,
    pub(crate) history: Vec<HistoryEvent>,
    pub(crate) ended: Option<Ended>,
}

/// A captured life of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Image {
    /// Which life.
    pub(crate) of: Incarnation,
    /// Whether all of it is known to be there.
    pub(crate) proof: Proof,
    /// Which engine wrote it (BC-092); unknown of those that were written down before this was.
    #[serde(default)]
    pub(crate) engine: Option<EngineIdentity>,
}

/// What is known of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Proof {
    /// The engine said that all of it is there, and the guest's processes are gone as they should.
    Complete,
    /// The capture was cut short, or nobody heard its answer. Only waking it can tell.
    Missing,
}

/// The secrets of one sandbox.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Tokens {
    #[serde(with = "token_text")]
    pub(crate) access: Token,
    #[serde(with = "token_text")]
    pub(crate) traffic: Token,
    #[serde(with = "token_text")]
    pub(crate) control: Token,
    /// The control token in the environment that its first process was booted with, which engines
    /// compare when they restore. Opens nothing any more.
    #[serde(with = "token_text", default = "no_token")]
    pub(crate) boot: Token,
}

fn no_token() -> Token {
    Token::new(String::new())
}

/// How long a lifetime that begins at `now` is; `None` is without end.
pub(crate) fn life_ms(lifetime: &Lifetime, now: Timestamp) -> Option<u64> {
    match lifetime.clocking {
        Clocking::Deadline { end } if end == Timestamp::FAR_FUTURE => None,
        Clocking::Deadline { end } => u64::try_from(end.since(now).as_millis()).ok(),
        Clocking::Idle { window_ms } => window_ms,
    }
}

impl Record {
    /// The record of a sandbox that is about to be made.
    pub(crate) fn new(
        id: SandboxId,
        request: CreateSandbox,
        template: TemplateStamp,
        resources: Resources,
        tokens: Tokens,
        now: Timestamp,
    ) -> Self {
        let actor = Actor::Client {
            key: request.owner.key.clone(),
            request: request.request,
        };
        let mut record = Self {
            version: VERSION,
            id,
            owner: request.owner,
            template,
            state: SandboxState::Creating,
            incarnation: Incarnation::INITIAL,
            started_at: now,
            last_activity: now,
            life_ms: life_ms(&request.lifetime, now),
            lifetime: request.lifetime,
            auto_resume: request.auto_resume,
            busy_with: request.busy_with,
            timeout_keeps: request.timeout_keeps,
            sleep: None,
            image: None,
            resources,
            metadata: request.metadata,
            env_vars: request.env_vars,
            egress: request.egress,
            public_traffic: request.public_traffic,
            mask_request_host: request.mask_request_host,
            domain: request.domain,
            tokens,
            line: Vec::new(),
            copy_of: None,
            history: Vec::new(),
            ended: None,
        };
        record.note(
            SandboxState::Creating,
            actor,
            "create was asked for".to_owned(),
            now,
        );
        record
    }

    /// Goes to `state` and remembers who caused it and why (R-L12).
    pub(crate) fn note(
        &mut self,
        state: SandboxState,
        actor: Actor,
        reason: String,
        at: Timestamp,
    ) {
        self.state = state;
        if self.history.len() == HISTORY_MAX {
            self.history.remove(0);
        }
        let incarnation = self.incarnation;
        self.history.push(HistoryEvent {
            at,
            state,
            incarnation,
            actor,
            reason,
        });
    }

    /// Notes the end.
    pub(crate) fn end(&mut self, reason: EndReason, actor: Actor, at: Timestamp) {
        self.note(SandboxState::Killed, actor, reason.to_string(), at);
        self.ended = Some(Ended { at, reason });
    }

    /// What others may see of it.
    pub(crate) fn view(&self) -> SandboxView {
        let traffic_token = match self.public_traffic {
            PublicTraffic::Allowed => None,
            PublicTraffic::TokenRequired => Some(self.tokens.traffic.clone()),
        };
        SandboxView {
            id: self.id.clone(),
            owner: self.owner.clone(),
            template: self.template.clone(),
            state: self.state,
            incarnation: self.incarnation,
            started_at: self.started_at,
            lifetime: self.lifetime,
            auto_resume: self.auto_resume,
            busy_with: self.busy_with,
            timeout_keeps: self.timeout_keeps,
            sleep: self.sleep,
            last_activity: self.last_activity,
            resources: self.resources,
            metadata: self.metadata.clone(),
            egress: self.egress.clone(),
            public_traffic: self.public_traffic,
            mask_request_host: self.mask_request_host.clone(),
            domain: self.domain.clone(),
            envd_version: ENVD_VERSION.to_owned(),
            access_token: self.tokens.access.clone(),
            traffic_token,
            line: self.line.clone(),
            ended: self.ended.clone(),
        }
    }

    /// Writes the record to `path` in one step.
    pub(crate) fn write(&self, path: &Path, durability: Durability) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        write_durably(path, &bytes, durability)
    }

    /// Reads a record; one of another version or another sandbox is an error.
    pub(crate) fn read(path: &Path, id: &SandboxId) -> io::Result<Self> {
        let record: Self = serde_json::from_slice(&fs::read(path)?).map_err(io::Error::other)?;
        if record.version != VERSION || record.id != *id {
            return Err(io::Error::other(
                "the record is of another version or another sandbox",
            ));
        }
        Ok(record)
    }
}
