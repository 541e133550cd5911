//! A network for tests: sandboxes are entries in a table, and dialling one leads to an address of
//! this machine.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use async_trait::async_trait;
use sandhold_platform::{DialError, Egress};
use sandhold_types::{Deadline, SandboxId};
use tokio::net::TcpStream;

use crate::{Attachment, Network, NetworkError};

/// What can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// [`Network::attach`].
    Attach,
    /// [`Network::readdress`].
    Readdress,
    /// [`Network::unaddress`].
    Unaddress,
    /// [`Network::detach`].
    Detach,
    /// [`Network::set_egress`].
    SetEgress,
    /// [`Network::list`].
    List,
}

#[derive(Debug, Default)]
struct Table {
    attached: BTreeMap<SandboxId, Egress>,
    /// Where ports of a sandbox lead; without an entry, everywhere.
    served: BTreeMap<SandboxId, SocketAddr>,
    everywhere: Option<SocketAddr>,
    refusals: Vec<Operation>,
}

/// A network for tests. A clone is another handle to the same one.
#[derive(Debug, Clone, Default)]
pub struct SimNetwork {
    table: Arc<Mutex<Table>>,
}

impl SimNetwork {
    /// A network without sandboxes, in which every port is closed.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Every port of every sandbox leads here, unless it is served otherwise.
    #[must_use]
    pub fn serving(self, address: SocketAddr) -> Self {
        self.table().everywhere = Some(address);
        self
    }

    /// Every port of this sandbox leads to `address`.
    pub fn serve(&self, id: &SandboxId, address: SocketAddr) {
        self.table().served.insert(id.clone(), address);
    }

    /// Makes the next call of an operation fail, with nothing done.
    pub fn refuse_next(&self, operation: Operation) {
        self.table().refusals.push(operation);
    }

    /// What a sandbox may reach; none if it is not attached.
    #[must_use]
    pub fn egress(&self, id: &SandboxId) -> Option<Egress> {
        self.table().attached.get(id).cloned()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, operation: Operation) -> bool {
        let mut table = self.table();
        let due = table.refusals.iter().position(|o| *o == operation);
        due.map(|index| table.refusals.remove(index)).is_some()
    }

    fn check(&self, operation: Operation, id: &SandboxId) -> Result<(), NetworkError> {
        if self.refused(operation) {
            return Err(NetworkError::Step {
                step: "follow the script",
                sandbox: id.clone(),
                source: "the script says so".into(),
            });
        }
        Ok(())
    }

    fn attachment(id: &SandboxId) -> Attachment {
        Attachment {
            namespace: PathBuf::from(format!("/sim/{id}.inner")),
        }
    }
}

#[async_trait]
impl Network for SimNetwork {
    async fn attach(&self, id: &SandboxId, egress: &Egress) -> Result<Attachment, NetworkError> {
        self.check(Operation::Attach, id)?;
        self.table().attached.insert(id.clone(), egress.clone());
        Ok(Self::attachment(id))
    }

    async fn readdress(&self, id: &SandboxId) -> Result<Attachment, NetworkError> {
        self.check(Operation::Readdress, id)?;
        if !self.table().attached.contains_key(id) {
            return Err(NetworkError::Step {
                step: "open the inner namespace",
                sandbox: id.clone(),
                source: "there is none".into(),
            });
        }
        Ok(Self::attachment(id))
    }

    async fn unaddress(&self, id: &SandboxId) -> Result<(), NetworkError> {
        self.check(Operation::Unaddress, id)
    }

    async fn detach(&self, id: &SandboxId) -> Result<(), NetworkError> {
        self.check(Operation::Detach, id)?;
        self.table().attached.remove(id);
        Ok(())
    }

    async fn set_egress(&self, id: &SandboxId, egress: &Egress) -> Result<(), NetworkError> {
        self.check(Operation::SetEgress, id)?;
        self.table().attached.insert(id.clone(), egress.clone());
        Ok(())
    }

    async fn list(&self) -> Result<Vec<SandboxId>, NetworkError> {
        if self.refused(Operation::List) {
            return Err(NetworkError::List(std::io::Error::other(
                "the script says so",
            )));
        }
        Ok(self.table().attached.keys().cloned().collect())
    }

    async fn dial(
        &self,
        id: &SandboxId,
        port: u16,
        deadline: Deadline,
    ) -> Result<TcpStream, DialError> {
        let target = {
            let table = self.table();
            if !table.attached.contains_key(id) {
                return Err(DialError::Gone);
            }
            table.served.get(id).copied().or(table.everywhere)
        };
        let target = target.ok_or(DialError::PortClosed { port })?;
        let begun = Instant::now();
        let connect = TcpStream::connect(target);
        match tokio::time::timeout_at(deadline.instant().into(), connect).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(e)) if e.kind() == std::io::ErrorKind::ConnectionRefused => {
                Err(DialError::PortClosed { port })
            }
            Ok(Err(e)) => Err(DialError::Socket(e)),
            Err(_) => Err(DialError::Timeout {
                port,
                waited: begun.elapsed(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sandhold_types::SeededEntropy;

    use super::*;

    #[tokio::test]
    async fn a_sandbox_is_reached_while_it_is_attached() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let network = SimNetwork::new();
        let id = SandboxId::generate(&SeededEntropy::new(1));
        let soon = || Deadline::after(Instant::now(), Duration::from_secs(5));
        let dialled = network.dial(&id, 1, soon()).await;
        assert!(matches!(dialled, Err(DialError::Gone)));
        network.attach(&id, &Egress::Nothing).await.unwrap();
        let dialled = network.dial(&id, 1, soon()).await;
        assert!(matches!(dialled, Err(DialError::PortClosed { port: 1 })));
        network.serve(&id, listener.local_addr().unwrap());
        assert!(network.dial(&id, 1, soon()).await.is_ok());
        network.refuse_next(Operation::Detach);
        assert!(network.detach(&id).await.is_err());
        network.detach(&id).await.unwrap();
        assert_eq!(network.list().await.unwrap(), vec![]);
    }
}
