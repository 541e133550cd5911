//! A sandbox as clients read it (wire contract 1.2, 1.3).

use std::collections::BTreeMap;

use sandhold_platform::{Egress, SandboxView};
use sandhold_types::SandboxState;
use serde::{Deserialize, Serialize};

use super::{
    lifecycle::{LifecycleDetail, PauseMode},
    network::NetworkDetail,
};
use crate::{Dialect, Settings};

/// The states that clients know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WireState {
    Running,
    Paused,
}

impl WireState {
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            "running" => Some(Self::Running),
            "paused" => Some(Self::Paused),
            _ => None,
        }
    }

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
        }
    }
}

/// What a client is told of a state; `None` when the sandbox is not there for it: not yet, or no
/// longer. A state in transition is never told as running (R-L1).
pub(crate) fn visible_state(state: SandboxState) -> Option<WireState> {
    match state {
        SandboxState::Running => Some(WireState::Running),
        SandboxState::Pausing
        | SandboxState::Paused
        | SandboxState::Resuming
        | SandboxState::Snapshotting
        | SandboxState::RollingBack => Some(WireState::Paused),
        SandboxState::Creating
        | SandboxState::Killing
        | SandboxState::Killed
        | SandboxState::Failed => None,
    }
}

/// The name that a client is told. Only CubeSandbox's know states in transition; E2B's fail on a
/// name that they do not know.
fn state_name(state: SandboxState, told: WireState, dialect: Dialect) -> &'static str {
    match (dialect, state) {
        (Dialect::Cube, SandboxState::Pausing | SandboxState::Resuming) => state.as_str(),
        _ => told.as_str(),
    }
}

/// The answer to a create and a connect.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxBody {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: String,
    envd_version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
    envd_access_token: String,
    traffic_access_token: Option<String>,
    domain: Option<String>,
}

impl SandboxBody {
    pub(crate) fn of(view: &SandboxView, settings: &Settings) -> Self {
        Self {
            template_id: view.template.id.to_string(),
            sandbox_id: view.id.to_string(),
            client_id: settings.client_id.clone(),
            envd_version: view.envd_version.clone(),
            alias: view.template.alias.clone(),
            envd_access_token: view.access_token.expose().to_owned(),
            traffic_access_token: view.traffic_token.as_ref().map(|t| t.expose().to_owned()),
            domain: domain(view, settings),
        }
    }
}

fn domain(view: &SandboxView, settings: &Settings) -> Option<String> {
    view.domain
        .clone()
        .or_else(|| settings.public_domain.clone())
}

/// One entry of a list, and what details have in common with it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListedSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
    started_at: String,
    // Clients crash without it; a sandbox that never ends has one far in the future.
    end_at: String,
    envd_version: String,
    cpu_count: u32,
    cpu_milli: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u32,
    state: &'static str,
    lifecycle: LifecycleDetail,
    // Of a sleeping one only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_mode: Option<PauseMode>,
    metadata: BTreeMap<String, String>,
    volume_mounts: [(); 0],
}

impl ListedSandbox {
    pub(crate) fn of(
        view: &SandboxView,
        told: WireState,
        dialect: Dialect,
        settings: &Settings,
    ) -> Self {
        Self {
            template_id: view.template.id.to_string(),
            sandbox_id: view.id.to_string(),
            client_id: settings.client_id.clone(),
            alias: view.template.alias.clone(),
            started_at: view.started_at.to_rfc3339(),
            end_at: view.end_at().to_rfc3339(),
            envd_version: view.envd_version.clone(),
            cpu_count: view.resources.cpu_count(),
            cpu_milli: view.resources.cpu_milli,
            memory_mb: view.resources.memory_mib,
            disk_size_mb: view.resources.disk_mib,
            state: state_name(view.state, told, dialect),
            lifecycle: LifecycleDetail::of(view),
            pause_mode: view.sleep.map(|sleep| sleep.keeps.into()),
            metadata: view.metadata.clone(),
            volume_mounts: [],
        }
    }
}

/// The answer to a get.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxDetail {
    #[serde(flatten)]
    listed: ListedSandbox,
    envd_access_token: String,
    domain: Option<String>,
    allow_internet_access: bool,
    network: NetworkDetail,
}

impl SandboxDetail {
    pub(crate) fn of(
        view: &SandboxView,
        told: WireState,
        dialect: Dialect,
        settings: &Settings,
    ) -> Self {
        Self {
            listed: ListedSandbox::of(view, told, dialect, settings),
            envd_access_token: view.access_token.expose().to_owned(),
            domain: domain(view, settings),
            allow_internet_access: view.egress != Egress::Nothing,
            network: NetworkDetail::of(
                &view.egress,
                view.public_traffic,
                view.mask_request_host.as_deref(),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_running_is_told_as_running() {
        // R-L1
        for state in SandboxState::ALL {
            let told = visible_state(state) == Some(WireState::Running);
            assert_eq!(told, state == SandboxState::Running, "{state}");
        }
    }

    #[test]
    fn states_in_transition_are_named_to_cubes_clients_only() {
        // Wire contract 1.3
        for state in SandboxState::ALL {
            let Some(told) = visible_state(state) else {
                continue;
            };
            assert_eq!(state_name(state, told, Dialect::E2b), told.as_str());
            let is_named = matches!(state, SandboxState::Pausing | SandboxState::Resuming);
            let name = state_name(state, told, Dialect::Cube);
            let expected = if is_named {
                state.as_str()
            } else {
                told.as_str()
            };
            assert_eq!(name, expected);
        }
    }
}
