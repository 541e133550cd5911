//! What an E2B-compatible service says of its sandboxes, read. Pure.

use std::collections::BTreeMap;

use http::StatusCode;
use sandhold_governor::{CallError, Listed, colour::Seen, ids::Bucket};
use sandhold_types::{Generation, SandboxId, Timestamp};
use serde::Deserialize;

use crate::local::{MANAGED_BY, Metadata};

/// A sandbox, in a listing or alone. Fields that nobody needs are left out.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SandboxAnswer {
    #[serde(rename = "sandboxID")]
    pub(super) sandbox_id: String,
    pub(super) state: Option<String>,
    pub(super) end_at: Option<jiff::Timestamp>,
    #[serde(default)]
    pub(super) metadata: Option<BTreeMap<String, String>>,
    pub(super) envd_access_token: Option<String>,
}

impl SandboxAnswer {
    pub(super) fn id(&self) -> Option<SandboxId> {
        self.sandbox_id.parse().ok()
    }

    pub(super) fn seen(&self) -> Seen {
        match self.state.as_deref() {
            Some("running") => Seen::Running,
            Some("paused") => Seen::Paused,
            _ => Seen::Unknown,
        }
    }

    /// When its life ends; one that is paused has no end.
    pub(super) fn ends_at(&self) -> Timestamp {
        let is_paused = self.seen() == Seen::Paused;
        let end_ms = self.end_at.map(jiff::Timestamp::as_millisecond);
        match end_ms.and_then(|ms| u64::try_from(ms).ok()) {
            Some(ms) if !is_paused => Timestamp::from_unix_ms(ms),
            _ => Timestamp::FAR_FUTURE,
        }
    }

    fn of(&self, name: &str) -> Option<&str> {
        self.metadata.as_ref()?.get(name).map(String::as_str)
    }

    pub(super) fn generation(&self) -> Option<Generation> {
        self.of(Metadata::GENERATION)?.parse().ok().map(Generation)
    }

    /// As the governor knows it; `None` if it is not the governor's.
    pub(super) fn listed(&self) -> Option<Listed> {
        if self.of(Metadata::MANAGED_BY) != Some(MANAGED_BY) {
            return None;
        }
        Some(Listed {
            sandbox: self.id()?,
            slot: self.of(Metadata::SLOT)?.parse().ok()?,
            bucket: Bucket {
                namespace: self.of(Metadata::NAMESPACE)?.parse().ok()?,
                env: self.of(Metadata::ENV)?.parse().ok()?,
            },
            owner: self.of(Metadata::OWNER)?.parse().ok()?,
            seen: self.seen(),
            ends_at: self.ends_at(),
            generation: self.generation().unwrap_or(Generation(0)),
        })
    }
}

/// What a status that is no success means for what was asked. A timeout or a broken gateway leaves in
/// doubt what was done.
pub(super) fn refusal(status: StatusCode) -> CallError {
    match status {
        StatusCode::NOT_FOUND => CallError::NotFound,
        StatusCode::REQUEST_TIMEOUT => CallError::NoAnswer,
        status if status.is_server_error() => CallError::NoAnswer,
        _ => CallError::Refused,
    }
}

/// The filter of a listing: one pair. The value is decoded twice more after the query is (wire contract
/// 1.3).
pub(super) fn metadata_filter(name: &str, value: &str) -> String {
    let encode =
        |text: &str| -> String { url::form_urlencoded::byte_serialize(text.as_bytes()).collect() };
    encode(&format!("{}={}", encode(name), encode(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> SandboxAnswer {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn only_what_the_governor_made_is_listed() {
        // R-G2, R-G16
        let foreign =
            answer(r#"{"sandboxID":"sandboxsandboxsandbo","state":"running","extra":{}}"#);
        assert_eq!(foreign.listed(), None);
        let ours = answer(
            r#"{"sandboxID":"sandboxsandboxsandbo","state":"paused","endAt":"2026-01-01T00:00:00Z",
            "metadata":{"managed_by":"sandhold-governor","namespace":"a","env":"dev","owner_id":"o",
            "sandhold_slot":"slot-1","sandhold_generation":"7"}}"#,
        );
        let listed = ours.listed().unwrap();
        assert_eq!(
            (listed.slot.as_str(), listed.generation),
            ("slot-1", Generation(7))
        );
        assert_eq!(
            listed.ends_at,
            Timestamp::FAR_FUTURE,
            "a paused one does not end"
        );
    }

    #[test]
    fn a_timeout_is_no_refusal() {
        // R-I1: 408 may have been carried out.
        for (status, error) in [
            (404, CallError::NotFound),
            (408, CallError::NoAnswer),
            (500, CallError::NoAnswer),
            (504, CallError::NoAnswer),
            (400, CallError::Refused),
            (409, CallError::Refused),
            (429, CallError::Refused),
        ] {
            assert_eq!(
                refusal(StatusCode::from_u16(status).unwrap()),
                error,
                "{status}"
            );
        }
    }

    #[test]
    fn a_filter_is_encoded_as_often_as_it_is_decoded() {
        assert_eq!(metadata_filter("k", "v w"), "k%3Dv%2Bw");
    }
}
