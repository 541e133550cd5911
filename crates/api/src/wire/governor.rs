//! Leases, buckets, verdicts and the reclaimer, as they are on the wire.

use std::time::Duration;

use sandhold_governor::{
    CallKind,
    books::{Grant, View},
    colour::Root,
    explain::{Explanation, Shown},
    ids::{Bucket, LeaseId, OwnerId},
    reclaimer::{Alarm, Confirmed, Work},
    record::{Ground, Record},
    rules::Rules,
    tasks::Reused,
};
use sandhold_governor_driver::CycleReport;
use sandhold_types::{Generation, IdError};
use serde::{Deserialize, Serialize};

use super::{WholeSeconds, bucket::TemplateKind};
use crate::error::ApiError;

/// The longest time that one heartbeat may keep a sandbox.
const TTL_S_MAX: i64 = 86_400;

pub(crate) fn parsed<T: std::str::FromStr<Err = IdError>>(
    field: &'static str,
    text: &str,
) -> Result<T, ApiError> {
    let read = text.parse();
    read.map_err(|refused: IdError| ApiError::invalid(field, format!("must be {}", refused.rule)))
}

pub(crate) fn required(field: &'static str, value: Option<String>) -> Result<String, ApiError> {
    value.ok_or_else(|| ApiError::invalid(field, "is missing"))
}

/// The owner, who is in this bucket: one that is written as R-G2 says (`namespace:env:…:…`) tells where it
/// counts, and must not tell of another tenant.
pub(crate) fn owner_in(bucket: &Bucket, text: &str) -> Result<OwnerId, ApiError> {
    let owner = parsed("owner_id", text)?;
    let parts: Vec<&str> = text.split(':').collect();
    let is_elsewhere = matches!(parts[..], [namespace, env, _, _, ..]
        if namespace != bucket.namespace.as_str() || env != bucket.env.as_str());
    if is_elsewhere {
        return Err(ApiError::Forbidden(
            "the owner is in another namespace or env",
        ));
    }
    Ok(owner)
}

/// Whose lease it is; what is left out is as with the key that asks.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct HolderBody {
    /// Product or team.
    namespace: Option<String>,
    /// Its environment.
    env: Option<String>,
    /// For whom the sandbox is.
    owner_id: Option<String>,
    /// The caller's name for this generation of the lease.
    lease_id: Option<String>,
}

/// Whose lease it is, checked.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) bucket: Bucket,
    pub(crate) owner: OwnerId,
    pub(crate) lease: Option<LeaseId>,
}

impl HolderBody {
    /// The bucket that is meant; what is left out is as with the key.
    pub(crate) fn bucket_of(
        namespace: Option<&str>,
        env: Option<&str>,
        own: &Bucket,
    ) -> Result<Bucket, ApiError> {
        let namespace = namespace.map(|text| parsed("namespace", text));
        let env = env.map(|text| parsed("env", text));
        Ok(Bucket {
            namespace: namespace
                .transpose()?
                .unwrap_or_else(|| own.namespace.clone()),
            env: env.transpose()?.unwrap_or_else(|| own.env.clone()),
        })
    }

    pub(crate) fn checked(self, own: &Bucket) -> Result<Holder, ApiError> {
        let lease = self
            .lease_id
            .as_deref()
            .map(|text| parsed("lease_id", text));
        let bucket = Self::bucket_of(self.namespace.as_deref(), self.env.as_deref(), own)?;
        Ok(Holder {
            owner: owner_in(&bucket, &required("owner_id", self.owner_id)?)?,
            bucket,
            lease: lease.transpose()?,
        })
    }
}

impl Holder {
    /// The lease, where it must be named (R-G7).
    pub(crate) fn named_lease(&self) -> Result<LeaseId, ApiError> {
        let missing = || ApiError::invalid("lease_id", "is missing");
        self.lease.clone().ok_or_else(missing)
    }
}

/// `POST /v1/leases`
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct LeaseAskBody {
    /// Product or team; the key's own if left out.
    namespace: Option<String>,
    /// Its environment; the key's own if left out.
    env: Option<String>,
    /// For whom the sandbox is.
    owner_id: Option<String>,
    /// The caller's name for this generation of the lease.
    lease_id: Option<String>,
    /// `main` or `light` of the bucket; `light` if left out.
    pub(crate) template: Option<TemplateKind>,
    /// An ID or a name of a template.
    pub(crate) template_id: Option<String>,
    /// For how long a heartbeat keeps the sandbox; at least 120.
    #[schema(value_type = Option<i64>)]
    ttl_s: Option<WholeSeconds>,
}

impl LeaseAskBody {
    /// Whose lease it is about. Not flattened: then a field that is wrong could not be named.
    pub(crate) fn holder(&self) -> HolderBody {
        HolderBody {
            namespace: self.namespace.clone(),
            env: self.env.clone(),
            owner_id: self.owner_id.clone(),
            lease_id: self.lease_id.clone(),
        }
    }

    pub(crate) fn ttl(&self) -> Result<Option<Duration>, ApiError> {
        let Some(WholeSeconds(seconds)) = self.ttl_s else {
            return Ok(None);
        };
        match u64::try_from(seconds) {
            Ok(seconds @ 1..) if seconds <= TTL_S_MAX.unsigned_abs() => {
                Ok(Some(Duration::from_secs(seconds)))
            }
            _ => Err(ApiError::invalid(
                "ttl_s",
                format!("must be 1 to {TTL_S_MAX}"),
            )),
        }
    }
}

/// `POST /v1/lease-heartbeats`
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct HeartbeatBody {
    /// Product or team; the key's own if left out.
    namespace: Option<String>,
    /// Its environment; the key's own if left out.
    env: Option<String>,
    /// For whom the sandbox is.
    owner_id: Option<String>,
    /// The caller's name for this generation of the lease.
    lease_id: Option<String>,
    /// The fencing token of the grant.
    fence: Option<u64>,
}

impl HeartbeatBody {
    /// Whose lease it is about.
    pub(crate) fn holder(&self) -> HolderBody {
        HolderBody {
            namespace: self.namespace.clone(),
            env: self.env.clone(),
            owner_id: self.owner_id.clone(),
            lease_id: self.lease_id.clone(),
        }
    }

    pub(crate) fn generation(&self) -> Result<Generation, ApiError> {
        let missing = || ApiError::invalid("fence", "is missing");
        self.fence.map(Generation).ok_or_else(missing)
    }
}

/// A granted lease.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct LeaseBody {
    /// The sandbox.
    sandbox_id: String,
    /// The name of this generation.
    lease_id: String,
    /// The fencing token: it only grows.
    fence: u64,
    /// Whether the owner had the sandbox before.
    reused: bool,
    /// When the lease ends unless it is renewed (RFC 3339).
    expires_at: String,
}

impl LeaseBody {
    pub(crate) fn of(grant: &Grant, lease: &LeaseId, reused: Reused) -> Self {
        Self {
            sandbox_id: grant.sandbox.to_string(),
            lease_id: lease.to_string(),
            fence: grant.generation.0,
            reused: reused == Reused::Yes,
            expires_at: grant.expires_at.to_rfc3339(),
        }
    }
}

/// `POST /v1/lease-releases`
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct ReleasedBody {
    /// It is; the sandbox is removed now.
    pub(crate) released: bool,
}

/// A lease in force, as it is listed.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct HeldLeaseBody {
    namespace: String,
    env: String,
    owner_id: String,
    lease_id: String,
    fence: u64,
    /// `None` while it is being made.
    sandbox_id: Option<String>,
    template_id: String,
    expires_at: String,
}

/// All leases of a bucket.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct LeasesBody {
    leases: Vec<HeldLeaseBody>,
}

impl LeasesBody {
    pub(crate) fn of(view: &View, visible: impl Fn(&Bucket) -> bool) -> Self {
        let records = view.records.iter().filter(|r| visible(&r.bucket));
        let held = |record: &Record| {
            let holding = record.holding.as_ref()?;
            Some(HeldLeaseBody {
                namespace: record.bucket.namespace.to_string(),
                env: record.bucket.env.to_string(),
                owner_id: record.owner.to_string(),
                lease_id: holding.lease.to_string(),
                fence: record.generation.0,
                sandbox_id: record.sandbox.as_ref().map(ToString::to_string),
                template_id: holding.template.to_string(),
                expires_at: holding.heartbeat_at.plus(holding.ttl).to_rfc3339(),
            })
        };
        Self {
            leases: records.filter_map(held).collect(),
        }
    }
}

/// One thing that holds, or held, a sandbox.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct RootBody {
    /// `making`, `lease`, `run`, `lock` or `lifetime`.
    kind: &'static str,
    /// Which.
    id: String,
    /// How long ago it last said that it is alive.
    age_s: u64,
    /// Up to which age it is black.
    ttl_s: u64,
}

impl RootBody {
    fn of(root: &Root) -> Self {
        Self {
            kind: root.kind.as_str(),
            id: root.id.clone(),
            age_s: root.age.as_secs(),
            ttl_s: root.ttl.as_secs(),
        }
    }
}

/// Why a sandbox lives, or who ended it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct VerdictBody {
    sandbox_id: String,
    /// `black`, `grey`, `white` or `gone`.
    colour: &'static str,
    /// What holds it.
    roots: Vec<RootBody>,
    /// What would have to change for it to be deleted, and when.
    deletable_when: String,
    /// What was done to it, oldest first.
    last_actions: Vec<String>,
    /// All of it for people.
    text: String,
}

impl VerdictBody {
    pub(crate) fn of(explanation: &Explanation) -> Self {
        Self {
            sandbox_id: explanation.sandbox.to_string(),
            colour: explanation.colour.as_str(),
            roots: match explanation.colour {
                Shown::Alive(_) => explanation.roots.iter().map(RootBody::of).collect(),
                Shown::Gone => Vec::new(),
            },
            deletable_when: explanation.deletable_when.clone(),
            last_actions: explanation.last_actions.clone(),
            text: explanation.to_string(),
        }
    }
}

/// What an operator must know.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct AlarmBody {
    /// The stable name.
    kind: &'static str,
    /// The bucket it is about, if it is about one: `namespace:env`.
    bucket: Option<String>,
    /// How many sandboxes or rounds it is about.
    count: usize,
    /// In words.
    message: String,
}

impl AlarmBody {
    pub(crate) fn of(alarm: &Alarm) -> Self {
        let (kind, bucket, count, message) = match alarm {
            Alarm::ZombiesKept {
                bucket,
                count,
                oldest,
            } => (
                "zombies_kept",
                Some(bucket),
                *count,
                format!(
                    "paused sandboxes that nobody renews are kept because {bucket} declares no \
                     retention; the oldest for {} s",
                    oldest.as_secs()
                ),
            ),
            Alarm::QuotaIdle {
                bucket,
                idle,
                quota,
            } => (
                "quota_idle",
                Some(bucket),
                *idle,
                format!("{idle} of the {quota} places of {bucket} are filled by what nobody uses"),
            ),
            Alarm::RoundSkipped { rounds } => (
                "round_skipped",
                None,
                *rounds as usize,
                String::from("the platform's listing was doubtful; nothing was concluded"),
            ),
            Alarm::Reconciling => (
                "reconciling",
                None,
                1,
                String::from("listings were doubtful too long; each sandbox is asked for by name"),
            ),
            Alarm::Strays { count } => (
                "strays",
                None,
                *count,
                String::from("sandboxes of ours without a record were found"),
            ),
            Alarm::KillsFailing {
                count,
                failures_max,
            } => (
                "kills_failing",
                None,
                *count,
                format!("deletes keep failing, one of them {failures_max} times"),
            ),
            Alarm::WrittenOff { count } => (
                "written_off",
                None,
                *count,
                String::from("accounts were released although the sandbox is not gone"),
            ),
            Alarm::BlastRadius { held_back } => (
                "blast_radius",
                None,
                *held_back,
                String::from("a cycle would remove too many at once; the rest waits"),
            ),
            Alarm::Settling => (
                "settling",
                None,
                1,
                String::from("the books' last writes may be lost; nobody new is admitted"),
            ),
        };
        Self {
            kind,
            bucket: bucket.map(ToString::to_string),
            count,
            message,
        }
    }

    fn breaker(kind: CallKind) -> Self {
        let what = match kind {
            CallKind::Create => "creates",
            CallKind::Delete => "deletes",
            CallKind::Other => "calls",
        };
        Self {
            kind: "breaker_open",
            bucket: None,
            count: 1,
            message: format!("the platform does not answer {what}; they are held back"),
        }
    }
}

/// `GET /v1/alarms`
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct AlarmsBody {
    alarms: Vec<AlarmBody>,
    /// Whether the last round of the reclaimer counted; `null` before the first.
    last_round_confirmed: Option<bool>,
}

impl AlarmsBody {
    pub(crate) fn of(report: Option<&CycleReport>, held_back: &[CallKind]) -> Self {
        let told = report.map(|r| r.alarms.as_slice()).unwrap_or_default();
        let breakers = held_back.iter().map(|kind| AlarmBody::breaker(*kind));
        Self {
            alarms: told.iter().map(AlarmBody::of).chain(breakers).collect(),
            last_round_confirmed: report.map(|r| r.confirmed == Confirmed::Yes),
        }
    }
}

/// One thing that a round does, or would do.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct WorkBody {
    /// `remove`, `settle`, `adopt` or `note`.
    action: &'static str,
    sandbox_id: Option<String>,
    /// For removals: why.
    because: Option<&'static str>,
}

impl WorkBody {
    fn of(work: &Work) -> Option<Self> {
        let (action, sandbox, because) = match work {
            Work::Remove {
                sandbox, ground, ..
            } => ("remove", Some(sandbox), Some(Ground::words(*ground))),
            Work::Settle { sandbox, .. } => ("settle", Some(sandbox), None),
            Work::SettleMaking { .. } => ("settle", None, None),
            Work::Adopt(listed) => ("adopt", Some(&listed.sandbox), None),
            Work::Note { .. } => ("note", None, None),
            Work::FinishRecovery { .. } => return None,
        };
        Some(Self {
            action,
            sandbox_id: sandbox.map(ToString::to_string),
            because,
        })
    }
}

/// A round of the reclaimer.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct RoundBody {
    /// Whether its evidence was good enough to conclude anything.
    confirmed: bool,
    /// How many sandboxes the platform showed; `null` if it could not be asked.
    listed: Option<usize>,
    /// How many slots the books have.
    records: usize,
    /// What it does, or would do.
    work: Vec<WorkBody>,
    alarms: Vec<AlarmBody>,
    /// In how many rounds, at least so many seconds apart, a sandbox must be white.
    white_rounds: u32,
    round_spacing_s: u64,
}

impl RoundBody {
    pub(crate) fn of(report: &CycleReport, rules: &Rules) -> Self {
        Self {
            confirmed: report.confirmed == Confirmed::Yes,
            listed: report.listed,
            records: report.records,
            work: report.work.iter().filter_map(WorkBody::of).collect(),
            alarms: report.alarms.iter().map(AlarmBody::of).collect(),
            white_rounds: rules.settings().white_cycles,
            round_spacing_s: rules.look_spacing().as_secs(),
        }
    }
}
