//! Buckets, as they are on the wire: what they may have, keep and give to their runs (R-G4, R-G13).

use std::time::Duration;

use sandhold_governor::{
    books::{BucketPolicy, RunDefaults, View},
    colour::Retention,
    ids::Bucket,
    record::{Managed, Record},
};
use sandhold_types::TemplateId;
use serde::{Deserialize, Serialize};

use super::{governor::parsed, runs::TIMEOUT_MAX};
use crate::error::ApiError;

/// The most sandboxes that a bucket may be given.
const QUOTA_MAX: u32 = 1_000_000;
/// What a deployment's `main` and `light` are where a bucket says nothing.
const MAIN_TEMPLATE: &str = "code-interpreter-v1";
const LIGHT_TEMPLATE: &str = "base";
/// The longest time that paused sandboxes may be kept: ten years.
const RETENTION_S_MAX: u64 = 315_360_000;

/// Which of a bucket's two templates (R-G13).
#[derive(Debug, Clone, Copy, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TemplateKind {
    /// The one with a code interpreter.
    Main,
    /// The small one.
    Light,
}

fn own_or(own: Option<&TemplateId>, usual: &str) -> String {
    own.map_or(usual, TemplateId::as_str).to_owned()
}

/// What is to be resolved: what is named, or what the bucket means by `main` or `light`.
pub(crate) fn wanted_template(
    kind: Option<TemplateKind>,
    named: Option<String>,
    defaults: &RunDefaults,
) -> Result<String, ApiError> {
    let (main, light) = (defaults.main.as_ref(), defaults.light.as_ref());
    match (named, kind) {
        (Some(_), Some(_)) => {
            let rule = "cannot be given beside template_id";
            Err(ApiError::invalid("template", rule))
        }
        (Some(reference), None) => Ok(reference),
        (None, Some(TemplateKind::Main)) => Ok(own_or(main, MAIN_TEMPLATE)),
        (None, Some(TemplateKind::Light) | None) => Ok(own_or(light, LIGHT_TEMPLATE)),
    }
}

/// `PUT /v1/buckets/{namespace}/{env}`
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct PolicyBody {
    /// How many sandboxes it may have at once.
    quota: Option<u32>,
    /// For how many seconds leased but paused sandboxes are kept; `null` declares nothing: they are
    /// kept, shown and alarmed.
    retention_s: Option<u64>,
    /// What `main` means for its runs and leases; `null` is what it means to the deployment.
    main_template: Option<String>,
    /// What `light` means for its runs and leases; `null` is what it means to the deployment.
    light_template: Option<String>,
    /// For how many seconds a run may run that does not say; `null`: each must say.
    run_timeout_s: Option<u64>,
    /// For how many seconds a run may ask at most; `null`: as long as any.
    run_timeout_max_s: Option<u64>,
}

impl PolicyBody {
    fn runs(&self) -> Result<RunDefaults, ApiError> {
        let template = |field, given: &Option<String>| {
            given.as_deref().map(|text| parsed(field, text)).transpose()
        };
        let time = |field, given: Option<u64>| match given.map(Duration::from_secs) {
            Some(time) if time.is_zero() || time > TIMEOUT_MAX => {
                let rule = format!("must be 1 to {}", TIMEOUT_MAX.as_secs());
                Err(ApiError::invalid(field, rule))
            }
            time => Ok(time),
        };
        let runs = RunDefaults {
            main: template("main_template", &self.main_template)?,
            light: template("light_template", &self.light_template)?,
            timeout: time("run_timeout_s", self.run_timeout_s)?,
            timeout_max: time("run_timeout_max_s", self.run_timeout_max_s)?,
        };
        if runs.timeout > runs.timeout_max.or(Some(TIMEOUT_MAX)) {
            let rule = "must not be more than run_timeout_max_s";
            return Err(ApiError::invalid("run_timeout_s", rule));
        }
        Ok(runs)
    }

    pub(crate) fn policy(&self) -> Result<BucketPolicy, ApiError> {
        let quota = self
            .quota
            .ok_or_else(|| ApiError::invalid("quota", "is missing"))?;
        if quota > QUOTA_MAX {
            return Err(ApiError::invalid(
                "quota",
                format!("must be at most {QUOTA_MAX}"),
            ));
        }
        let retention = match self.retention_s {
            None => Retention::Undeclared,
            Some(seconds) if seconds <= RETENTION_S_MAX => {
                Retention::After(Duration::from_secs(seconds))
            }
            Some(_) => {
                let rule = format!("must be at most {RETENTION_S_MAX}");
                return Err(ApiError::invalid("retention_s", rule));
            }
        };
        Ok(BucketPolicy {
            runs: self.runs()?,
            ..BucketPolicy::new(quota, retention)
        })
    }
}

/// A bucket: what it may have, and what it has.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct BucketBody {
    namespace: String,
    env: String,
    /// How many sandboxes it may have at once.
    quota: u32,
    /// For how many seconds leased but paused sandboxes are kept; `null`: nothing is declared.
    retention_s: Option<u64>,
    /// What `main` means for its runs and leases.
    main_template: String,
    /// What `light` means for its runs and leases.
    light_template: String,
    /// For how many seconds a run may run that does not say; `null`: each must say.
    run_timeout_s: Option<u64>,
    /// For how many seconds a run may ask at most.
    run_timeout_max_s: u64,
    /// How many places are filled, by the books.
    used: usize,
    /// Of these: how many sandboxes were made directly, with an SDK.
    direct: usize,
    /// Of these: how many are paused.
    paused: usize,
    /// Sandboxes that do not count (any more) but are not gone either.
    uncounted: usize,
}

impl BucketBody {
    pub(crate) fn of(bucket: &Bucket, view: &View) -> Option<Self> {
        let policy = view.buckets.get(bucket)?;
        let mine: Vec<&Record> = view
            .records
            .iter()
            .filter(|r| r.bucket == *bucket)
            .collect();
        let count = |is: fn(&&Record) -> bool| mine.iter().copied().filter(is).count();
        Some(Self {
            namespace: bucket.namespace.to_string(),
            env: bucket.env.to_string(),
            quota: policy.quota,
            retention_s: match policy.retention {
                Retention::Undeclared => None,
                Retention::After(after) => Some(after.as_secs()),
            },
            main_template: own_or(policy.runs.main.as_ref(), MAIN_TEMPLATE),
            light_template: own_or(policy.runs.light.as_ref(), LIGHT_TEMPLATE),
            run_timeout_s: policy.runs.timeout.map(|time| time.as_secs()),
            run_timeout_max_s: policy.runs.timeout_max.unwrap_or(TIMEOUT_MAX).as_secs(),
            used: count(|r| r.is_counted()),
            direct: count(|r| r.is_counted() && r.managed == Managed::Directly),
            paused: count(|r| r.is_counted() && r.paused_since.is_some()),
            uncounted: count(|r| !r.is_counted()),
        })
    }
}

/// All buckets.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct BucketsBody {
    pub(crate) buckets: Vec<BucketBody>,
}
