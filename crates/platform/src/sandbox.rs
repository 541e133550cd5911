//! The values that describe a sandbox to those who serve callers.

use std::{collections::BTreeMap, net::IpAddr};

use sandhold_types::{
    Actor, BuildId, EndReason, EnvName, Incarnation, KeyId, Lifetime, Namespace, OnTimeout,
    RequestId, Resources, SandboxId, SandboxState, SnapshotId, TemplateId, Timestamp, Token,
};

/// Whose sandbox it is (R-G2, R-G19).
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Owner {
    /// The tenant.
    pub namespace: Namespace,
    /// The tenant's environment.
    pub env: EnvName,
    /// The key that made it.
    pub key: KeyId,
}

/// An address range, such as `10.0.0.0/8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IpBlock {
    /// Its first address.
    pub address: IpAddr,
    /// How many leading bits are fixed.
    pub prefix_length: u8,
}

/// What a sandbox may reach. The host, private ranges, link-local addresses and other sandboxes
/// are out of reach whatever stands here (R-P2).
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub enum Egress {
    /// The public internet, less `denied`, plus `allowed` (which wins).
    #[default]
    Internet,
    /// Nothing at all.
    Nothing,
    /// The public internet, less these ranges; the ones in `allowed` win over the ones in `denied`.
    Filtered {
        /// Reachable even if denied below.
        allowed: Vec<IpBlock>,
        /// Out of reach.
        denied: Vec<IpBlock>,
    },
}

/// Who may reach its ports through the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub enum PublicTraffic {
    /// Anybody who knows the host name.
    #[default]
    Allowed,
    /// Only who presents the traffic token (wire contract 2.2).
    TokenRequired,
}

/// Whether a request to a sleeping sandbox wakes it (R-L6, R-L7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AutoResume {
    /// Only an explicit call wakes it.
    #[default]
    Off,
    /// Any request to it does.
    On,
}

/// Which of its commands keep a sandbox from being idle (R-L5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BusyWith {
    /// Every command that runs.
    #[default]
    AnyCommand,
    /// Only commands whose output somebody reads; one in the background does not count.
    AttachedCommands,
}

/// What a pause keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseKeeps {
    /// Memory and files: processes go on where they were.
    #[default]
    Everything,
    /// Files: the next resume starts its processes anew.
    Files,
}

/// A request to make a sandbox. Already authenticated and checked; limits are the node's.
#[derive(Debug, Clone)]
pub struct CreateSandbox {
    /// For whom.
    pub owner: Owner,
    /// The request that asks.
    pub request: RequestId,
    /// The template or snapshot as the caller named it: an ID, a name, or `name:tag`.
    pub template: String,
    /// How it ends. For a deadline clock the end is counted from when the request came in.
    pub lifetime: Lifetime,
    /// Whether traffic wakes it when it sleeps.
    pub auto_resume: AutoResume,
    /// What keeps its idle window open.
    pub busy_with: BusyWith,
    /// What a pause at the end of its lifetime keeps.
    pub timeout_keeps: PauseKeeps,
    /// Free text pairs of the caller.
    pub metadata: BTreeMap<String, String>,
    /// Environment of its processes.
    pub env_vars: BTreeMap<String, String>,
    /// What it may reach.
    pub egress: Egress,
    /// Who may reach it.
    pub public_traffic: PublicTraffic,
    /// Replaces the `Host` that servers in the sandbox see; `${PORT}` stands for the port.
    pub mask_request_host: Option<String>,
    /// The domain under which the answer says it is reachable.
    pub domain: Option<String>,
}

/// From which template a sandbox came.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TemplateStamp {
    /// The template.
    pub id: TemplateId,
    /// The exact build.
    pub build: BuildId,
    /// The name it was asked for by, if by name.
    pub alias: Option<String>,
}

/// An end: when and why.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Ended {
    /// When.
    pub at: Timestamp,
    /// Why.
    pub reason: EndReason,
}

/// A pause that lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Sleep {
    /// Since when.
    pub since: Timestamp,
    /// What was kept.
    pub keeps: PauseKeeps,
}

/// A sandbox as it was last published by its owner.
#[derive(Debug, Clone)]
pub struct SandboxView {
    /// Its identifier.
    pub id: SandboxId,
    /// Whose it is.
    pub owner: Owner,
    /// What it was made from.
    pub template: TemplateStamp,
    /// Where it is in its life.
    pub state: SandboxState,
    /// Which life of its processes this is.
    pub incarnation: Incarnation,
    /// When it was made.
    pub started_at: Timestamp,
    /// Its clock.
    pub lifetime: Lifetime,
    /// Whether traffic wakes it when it sleeps.
    pub auto_resume: AutoResume,
    /// What keeps its idle window open.
    pub busy_with: BusyWith,
    /// What a pause at the end of its lifetime keeps.
    pub timeout_keeps: PauseKeeps,
    /// Since when it sleeps and what was kept, if it does.
    pub sleep: Option<Sleep>,
    /// The newest activity (R-L5).
    pub last_activity: Timestamp,
    /// Its limits.
    pub resources: Resources,
    /// Free text pairs of the caller.
    pub metadata: BTreeMap<String, String>,
    /// What it may reach.
    pub egress: Egress,
    /// Who may reach it.
    pub public_traffic: PublicTraffic,
    /// What servers in it see as `Host`.
    pub mask_request_host: Option<String>,
    /// The domain under which it is reachable, if one was chosen.
    pub domain: Option<String>,
    /// The agent's contract version.
    pub envd_version: String,
    /// Opens the agent's routes.
    pub access_token: Token,
    /// Opens its ports where a token is required.
    pub traffic_token: Option<Token>,
    /// The snapshots that it stands on, the nearest first (R-T5).
    pub line: Vec<SnapshotId>,
    /// Its end, if it has ended.
    pub ended: Option<Ended>,
}

impl SandboxView {
    /// When its lifetime is over, by its clock and its newest activity. No clock runs while it
    /// sleeps (R-L6).
    #[must_use]
    pub fn end_at(&self) -> Timestamp {
        if self.state == SandboxState::Paused {
            return Timestamp::FAR_FUTURE;
        }
        self.lifetime.end(self.last_activity)
    }
}

/// A change of when a sandbox's life ends. The variants are what the callers' calls mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LifetimeChange {
    /// `timeout`: the end is `after_ms` from now, sooner or later than before; on an idle clock the
    /// window is replaced. `None` is never.
    Replace {
        /// Milliseconds from now.
        after_ms: Option<u64>,
    },
    /// `connect`, `refreshes`: at least `after_ms` from now, never sooner than before (R-L11).
    /// `None` only counts as activity.
    Extend {
        /// Milliseconds from now.
        after_ms: Option<u64>,
    },
    /// What happens at the end of it.
    OnTimeout(OnTimeout),
}

/// The invisible sleep of sandboxes that nobody uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dozes {
    /// Sandboxes that doze now.
    pub now: usize,
    /// How often one dozed off since the start.
    pub dozed_total: u64,
    /// How often one was thawed because somebody needed it.
    pub thawed_total: u64,
}

/// Whether the guest has to answer before it is put to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GuestHealth {
    /// A silent guest is put to sleep as it is.
    #[default]
    Any,
    /// A silent guest is an error, and goes on as it is.
    MustAnswer,
}

/// A request to put a sandbox to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pause {
    /// What to keep.
    pub keeps: PauseKeeps,
    /// Whether the guest has to answer first.
    pub health: GuestHealth,
}

/// How a sleeping sandbox comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Waking {
    /// As it was paused.
    #[default]
    AsPaused,
    /// Its files only; processes start anew.
    ColdBoot,
}

/// The lifetime of a sandbox that was woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewLifetime {
    /// This many milliseconds from now; `None` is never.
    After(Option<u64>),
    /// As long as it was made for, and at least [`AUTO_RESUME_MIN_MS`] on a deadline clock; an idle
    /// window begins anew.
    AsMade,
}

/// The least life on a deadline clock that an automatic wake-up gives (wire contract 1.4).
pub const AUTO_RESUME_MIN_MS: u64 = 300_000;

/// A request to wake a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// How it comes back.
    pub waking: Waking,
    /// Its lifetime from then on.
    pub lifetime: NewLifetime,
    /// What happens at the end of that, if it is to change.
    pub on_timeout: Option<OnTimeout>,
}

/// Whether a call woke the sandbox or found it awake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Woken {
    /// It slept.
    Yes,
    /// It ran.
    No,
}

/// A span of time; an open end is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TimeRange {
    /// Not before this.
    pub from: Option<Timestamp>,
    /// Not after this.
    pub to: Option<Timestamp>,
}

impl TimeRange {
    /// Whether `at` lies within it, ends included.
    #[must_use]
    pub fn contains(&self, at: Timestamp) -> bool {
        self.from.is_none_or(|from| from <= at) && self.to.is_none_or(|to| at <= to)
    }
}

/// What a sandbox used at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MetricSample {
    /// When.
    pub at: Timestamp,
    /// Whole cores it may use.
    pub cpu_count: u32,
    /// Processor use since the sample before, in percent of one core.
    pub cpu_used_pct: f64,
    /// Memory in use, in bytes.
    pub memory_used: u64,
    /// Memory it may use, in bytes.
    pub memory_total: u64,
    /// File cache, in bytes.
    pub memory_cache: u64,
    /// What it wrote to its disk, in bytes.
    pub disk_used: u64,
    /// What it may write, in bytes.
    pub disk_total: u64,
}

/// One line of a sandbox's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// When.
    pub at: Timestamp,
    /// `info`, `warn` or `error`.
    pub level: &'static str,
    /// The text.
    pub message: String,
}

/// One thing that happened to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HistoryEvent {
    /// When.
    pub at: Timestamp,
    /// The state it went to.
    pub state: SandboxState,
    /// Which life of its processes.
    pub incarnation: Incarnation,
    /// Who caused it.
    pub actor: Actor,
    /// Why, in words.
    pub reason: String,
}
