//! The host's own calls to the agent. Never reachable from outside: the gateway answers 404 for
//! these paths.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The header that carries the control token.
pub const CONTROL_HEADER: &str = "x-sandhold-control";
/// Gives the sandbox its identity; POST [`InitRequest`], 204.
pub const PATH_INIT: &str = "/init";
/// Whether everything is up; GET, 204, or 503 with [`Waiting`].
pub const PATH_READY: &str = "/ready";
/// The sandbox is about to be captured; POST, 204.
pub const PATH_QUIESCE: &str = "/quiesce";
/// Every process but the agent is to end, and what the template wants running to start anew, as
/// after a boot; POST, 204 when the old ones are gone. [`PATH_READY`] tells when the new ones are up.
pub const PATH_RESTART: &str = "/restart";
/// What is going on; GET [`Activity`].
pub const PATH_ACTIVITY: &str = "/activity";
/// A connection to a loopback port of the guest; GET with `Upgrade: tcp`, 101.
pub const PATH_TUNNEL: &str = "/tunnel";
/// Every path that must never be reached from outside, also those that only envd has.
pub const PRIVATE_PATHS: &[&str] = &[
    PATH_INIT,
    PATH_READY,
    PATH_QUIESCE,
    PATH_RESTART,
    PATH_ACTIVITY,
    PATH_TUNNEL,
    "/freeze",
    "/unfreeze",
    "/collapse",
    "/fsfreeze",
    "/fsthaw",
    "/upgrade",
];

/// A new life for the sandbox. What is absent stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InitRequest {
    /// What data-plane calls must present from now on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// Replaces all variables of the call before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// The present time, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<String>,
    /// Who runs what names nobody.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Where commands run that name no directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    /// The sandbox's host name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Becomes `E2B_SANDBOX_ID`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Becomes `E2B_TEMPLATE_ID`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_id: Option<String>,
    /// The next control token; the present one stops working.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_token: Option<String>,
    /// 64 fresh random bytes, base64: mixed into every warmed process and the machine id (R-T6).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy: Option<String>,
}

/// What the sandbox still waits for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// `startCommand`, `readyCommand`, or the name of a language.
    pub waiting_for: Vec<String>,
}

/// What is going on in the sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Activity {
    /// Running processes of the process service.
    pub processes: usize,
    /// Those of them whose output nobody reads.
    pub background_processes: usize,
    /// Running executions of the interpreter.
    pub executions: usize,
    /// Open streams: outputs, watches, uploads, downloads, tunnels.
    pub streams: usize,
    /// When the last call began or the last stream ended.
    pub last_activity_unix_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_body_changes_nothing() {
        assert_eq!(
            serde_json::from_str::<InitRequest>("{}").unwrap(),
            InitRequest::default()
        );
    }
}
