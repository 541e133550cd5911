//! Sockets into sandboxes, for the gateway.

use std::sync::Arc;

use async_trait::async_trait;
use sandhold_platform::{
    ActivityKind, DialError, Hold, Route, RouteLookup, Routes, SandboxView, StateChange, WakeError,
};
use sandhold_types::{Deadline, EndReason, SandboxId, SandboxState};
use tokio::{net::TcpStream, sync::broadcast};

use crate::{
    agent::{AGENT_PORT, INTERPRETER_PORT},
    node::Node,
    wake,
};

/// Whether a sandbox still is in the life that the route is for.
fn runs_as(view: &SandboxView, route: &Route) -> bool {
    view.incarnation == route.incarnation() && view.state == SandboxState::Running
}

#[async_trait]
impl Routes for Node {
    fn route(&self, id: &SandboxId) -> RouteLookup {
        if let Some(entry) = self.registry().live(id) {
            let sandbox = entry.view();
            return match sandbox.state {
                SandboxState::Running => RouteLookup::Live(Route { sandbox }),
                _ => RouteLookup::NotLive(sandbox),
            };
        }
        let ended = self.registry().ended(id);
        let reason = ended.map(|record| {
            record
                .ended
                .as_ref()
                .map_or(EndReason::TimedOut, |ended| ended.reason.clone())
        });
        reason.map_or(RouteLookup::Unknown, RouteLookup::Ended)
    }

    fn reachable(&self) -> Vec<Arc<SandboxView>> {
        let views = self
            .registry()
            .entries()
            .into_iter()
            .map(|entry| entry.view());
        let can_run = |view: &Arc<SandboxView>| {
            !matches!(
                view.state,
                SandboxState::Killing | SandboxState::Killed | SandboxState::Failed
            )
        };
        views.filter(can_run).collect()
    }

    async fn wake(&self, id: &SandboxId, deadline: Deadline) -> Result<Route, WakeError> {
        let entry = self.registry().live(id).ok_or(WakeError::Gone)?;
        wake::wake(&entry, deadline).await
    }

    fn try_hold(&self, route: &Route) -> Option<Hold> {
        let entry = self.registry().live(&route.sandbox.id)?;
        let hold = entry.doze.try_hold();
        hold.filter(|_| runs_as(&entry.view(), route))
    }

    async fn hold(&self, route: &Route) -> Result<Hold, DialError> {
        let id = &route.sandbox.id;
        let entry = self.registry().live(id).ok_or(DialError::Gone)?;
        let hold = self.dependencies().hold(&entry).await.map_err(|error| {
            tracing::debug!(sandbox = %id, %error, "it could not be thawed");
            DialError::Gone
        })?;
        if runs_as(&entry.view(), route) {
            Ok(hold)
        } else {
            Err(DialError::Gone)
        }
    }

    fn changes(&self) -> broadcast::Receiver<StateChange> {
        self.registry().changes().subscribe()
    }

    async fn dial(
        &self,
        route: &Route,
        port: u16,
        deadline: Deadline,
    ) -> Result<TcpStream, DialError> {
        let id = &route.sandbox.id;
        let entry = self.registry().live(id).ok_or(DialError::Gone)?;
        if !runs_as(&entry.view(), route) {
            return Err(DialError::Gone);
        }
        let dependencies = self.dependencies();
        match dependencies.network.dial(id, port, deadline).await {
            // A server that is bound to the loopback only is reached through the agent (BC-078).
            Err(DialError::PortClosed { .. }) if !matches!(port, AGENT_PORT | INTERPRETER_PORT) => {
                dependencies
                    .agent
                    .tunnel(id, &entry.control_token(), port, deadline)
                    .await
            }
            other => other,
        }
    }

    fn touch(&self, id: &SandboxId, _kind: ActivityKind) {
        if let Some(entry) = self.registry().live(id) {
            entry.touch(self.dependencies().clock.now());
        }
    }
}
