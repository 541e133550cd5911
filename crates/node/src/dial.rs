//! Sockets into sandboxes, for the gateway.

use async_trait::async_trait;
use sandhold_platform::{ActivityKind, DialError, Route, RouteLookup, Routes};
use sandhold_types::{Deadline, EndReason, SandboxId, SandboxState};
use tokio::net::TcpStream;

use crate::{
    agent::{AGENT_PORT, INTERPRETER_PORT},
    node::Node,
};

#[async_trait]
impl Routes for Node {
    fn route(&self, id: &SandboxId) -> RouteLookup {
        if let Some(entry) = self.registry().live(id) {
            let sandbox = entry.view();
            return match sandbox.state {
                SandboxState::Running => RouteLookup::Live(Route { sandbox }),
                state => RouteLookup::NotLive(state),
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

    fn live(&self) -> Vec<Route> {
        let views = self
            .registry()
            .entries()
            .into_iter()
            .map(|entry| entry.view());
        let running = views.filter(|view| view.state == SandboxState::Running);
        running.map(|sandbox| Route { sandbox }).collect()
    }

    async fn dial(
        &self,
        route: &Route,
        port: u16,
        deadline: Deadline,
    ) -> Result<TcpStream, DialError> {
        let id = &route.sandbox.id;
        let entry = self.registry().live(id).ok_or(DialError::Gone)?;
        let view = entry.view();
        if view.incarnation != route.incarnation() || view.state != SandboxState::Running {
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
