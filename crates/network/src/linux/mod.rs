//! Sandbox networks on Linux.
//!
//! Owns: `/run/sandhold/<tag>/net`, the namespaces in it, interfaces `sh<tag>*`, the packet filter
//! table `sandhold_<tag>`, and, while any sandbox has a way out, the machine's forwarding switch.
//!
//! ```text
//!  inner namespace          router namespace                      host
//!  eth0 169.254.0.21/30 ─── inner 169.254.0.22/30
//!                           table `sandbox`, masquerade
//!                           uplink 198.18.x.y/32 ──────────────── sh<tag>…  (no address)
//!                           sockets of dialler and resolver       table, masquerade
//! ```
//!
//! Invariants:
//! - What is needed to remove a sandbox's network is found on the machine: files and interface
//!   names. Memory holds only handles, which [`LinuxNetwork::new`] opens again (R-L3).
//! - The rules of a router are in force before its interface towards the sandbox can carry a
//!   packet of a guest: an attachment is given out only when it is complete.
//! - What was switched on at the host for the first uplink is switched off with the last.
//!
//! Called by the node, one call at a time for one sandbox. It knows nothing of engines but that
//! they take the address off the inner interface.

mod address;
mod dialler;
mod filter;
mod host;
mod links;
mod namespace;
mod policy;
mod resolver;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use async_trait::async_trait;
use sandhold_platform::{DialError, Egress};
use sandhold_types::{Deadline, SandboxId};
use tokio::net::{TcpSocket, TcpStream};

pub use self::policy::is_out_of_reach;
use self::{
    dialler::Dialler,
    host::Host,
    links::{End, Links},
    namespace::{NamespaceFiles, StepError, at, create, enter, on_own_thread},
    resolver::Relay,
};
use crate::{Attachment, Network, NetworkError};

/// The resolver that every sandbox has: what `/etc/resolv.conf` of a template must name.
pub const RESOLVER_ADDRESS: Ipv4Addr = address::ROUTER;
/// The address that every sandbox has on its own interface.
pub const SANDBOX_ADDRESS: Ipv4Addr = address::INNER;

/// Settings of a fresh namespace, as paths and values; they concern the calling thread's own.
const ROUTER_SETTINGS: [(&str, &str); 3] = [
    ("/proc/sys/net/ipv4/ip_forward", "1"),
    ("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"),
    ("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1"),
];
/// The loopback keeps version 6, for servers in the sandbox that listen there.
const INNER_SETTINGS: [(&str, &str); 1] = [("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")];

/// Where a node keeps the namespaces of its sandboxes.
fn directory(node_tag: &str) -> PathBuf {
    PathBuf::from(format!("/run/sandhold/{node_tag}/net"))
}

/// What is open for a sandbox.
#[derive(Debug)]
struct Attached {
    router: Arc<File>,
    /// Kept for its tasks, which end when it is dropped.
    _relay: Option<Relay>,
}

/// The networks of one node's sandboxes.
#[derive(Debug)]
pub struct LinuxNetwork {
    node_tag: String,
    files: NamespaceFiles,
    dialler: Dialler,
    host: Host,
    attached: Mutex<BTreeMap<SandboxId, Attached>>,
}

impl LinuxNetwork {
    /// Opens the networks of the node with this tag (six lower-case letters and digits), those of
    /// earlier processes included.
    ///
    /// # Errors
    /// What the machine lacks, and how to mend it.
    pub async fn new(node_tag: &str) -> Result<Self, NetworkError> {
        let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        if node_tag.len() != 6 || !node_tag.bytes().all(fits) {
            return Err(NetworkError::Unsupported {
                what: format!("the node tag '{node_tag}' must be 6 lower-case letters and digits"),
            });
        }
        let unsupported = |what: &str, e: &dyn std::fmt::Display| NetworkError::Unsupported {
            what: format!("{what} ({e}); run as root, with the package 'nftables' installed"),
        };
        filter::check()
            .await
            .map_err(|e| unsupported("nft does not work", &e))?;
        let files = NamespaceFiles::new(directory(node_tag));
        let dialler = Dialler::start().map_err(|e| unsupported("threads cannot be started", &e))?;
        let host = Host::new(node_tag).await;
        let host = host.map_err(|e| unsupported("the machine's network cannot be read", &e))?;
        let network = Self {
            node_tag: node_tag.to_owned(),
            files,
            dialler,
            host,
            attached: Mutex::default(),
        };
        for id in network.files.list().map_err(NetworkError::List)? {
            // One that is only half there is not opened; the node finds it by listing.
            let Ok(router) = File::open(network.files.router(&id)) else {
                continue;
            };
            let router = Arc::new(router);
            let relay = network.open_relay(&router).await;
            if let Err(error) = &relay {
                tracing::warn!(sandbox = %id, %error, "it cannot resolve names");
            }
            network.keep(&id, router, relay.ok());
        }
        let settled = network.host.settle().await;
        settled.map_err(|e| unsupported("the machine's network cannot be set", &e))?;
        Ok(network)
    }

    fn attached(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Attached>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the resolver's sockets in a router namespace.
    async fn open_relay(&self, router: &Arc<File>) -> Result<Relay, StepError> {
        let step = "open the resolver's sockets";
        let datagrams = self.dialler.datagrams(router, resolver::AT).await;
        let datagrams = datagrams.map_err(at(step))?;
        let connections = self.dialler.listener(router, resolver::AT).await;
        let connections = connections.map_err(at(step))?;
        Ok(Relay::start(
            tokio::net::UdpSocket::from_std(datagrams).map_err(at(step))?,
            tokio::net::TcpListener::from_std(connections).map_err(at(step))?,
        ))
    }

    fn keep(&self, id: &SandboxId, router: Arc<File>, relay: Option<Relay>) {
        let attached = Attached {
            router,
            _relay: relay,
        };
        self.attached().insert(id.clone(), attached);
    }

    async fn build(&self, id: &SandboxId, egress: &Egress) -> Result<(), StepError> {
        self.files
            .prepare()
            .map_err(at("make the directory of namespaces"))?;
        let uplink = policy::needs_uplink(egress).then(|| self.uplink(id));
        if uplink.is_some() {
            self.host.switch_on(id).await?;
        }
        let plan = Plan {
            router_path: self.files.router(id),
            inner_path: self.files.inner(id),
            mtu: self.host.mtu(),
            rules: policy::router_rules(egress),
            uplink,
        };
        let router = Arc::new(on_own_thread(async move || plan.build().await).await?);
        let relay = self.open_relay(&router).await?;
        self.keep(id, router, Some(relay));
        Ok(())
    }

    fn uplink(&self, id: &SandboxId) -> Uplink {
        Uplink {
            id: id.clone(),
            name: address::uplink_name(&self.node_tag, id),
            mtu: self.host.mtu(),
        }
    }

    async fn take_down(&self, id: &SandboxId) -> Result<(), StepError> {
        self.attached().remove(id);
        let name = address::uplink_name(&self.node_tag, id);
        // Removed by name rather than with its namespace, which the kernel does some time later:
        // the name and the address must be free when this returns.
        on_own_thread(async move || {
            Links::here()?
                .remove(&name)
                .await
                .map_err(at("remove the uplink"))
        })
        .await?;
        self.files.remove(id).map_err(at("remove the namespaces"))?;
        self.files.remove_if_empty();
        self.host.switch_off(id).await
    }

    async fn change(&self, id: &SandboxId, egress: &Egress) -> Result<(), StepError> {
        let router = File::open(self.files.router(id)).map_err(at("open the router namespace"))?;
        let uplink = policy::needs_uplink(egress).then(|| self.uplink(id));
        if uplink.is_some() {
            self.host.switch_on(id).await?;
        }
        let rules = policy::router_rules(egress);
        let has_uplink = uplink.is_some();
        on_own_thread(async move || {
            let host = Links::here()?;
            enter(&router).map_err(at("enter the router namespace"))?;
            let links = Links::here()?;
            let present = links.index_of(address::ROUTER_UPLINK).await;
            let present = present.map_err(at("look for the uplink"))?;
            // Rules first: they hold before there is a way out, and when there is none any more.
            filter::apply(&rules).await?;
            match (uplink, present) {
                (Some(uplink), None) => uplink.build(&host, &links).await,
                (None, Some(_)) => {
                    let removed = links.remove(address::ROUTER_UPLINK).await;
                    removed.map(drop).map_err(at("remove the uplink"))
                }
                _ => Ok(()),
            }
        })
        .await?;
        if !has_uplink {
            self.host.switch_off(id).await?;
        }
        Ok(())
    }
}

/// All that the thread which builds a network has to know.
#[derive(Debug)]
struct Plan {
    router_path: PathBuf,
    inner_path: PathBuf,
    mtu: u32,
    rules: serde_json::Value,
    uplink: Option<Uplink>,
}

impl Plan {
    /// Builds both namespaces; the calling thread ends up in one of them.
    async fn build(self) -> Result<File, StepError> {
        let host = Links::here()?;
        let host_namespace =
            File::open("/proc/thread-self/ns/net").map_err(at("open the host's namespace"))?;
        let router = create(&self.router_path).map_err(at("make the router namespace"))?;
        settle(&ROUTER_SETTINGS).map_err(at("set up the router namespace"))?;
        let router_links = Links::here()?;
        // Before any interface: a router never forwards without its rules.
        filter::apply(&self.rules).await?;
        let inner = create(&self.inner_path).map_err(at("make the inner namespace"))?;
        settle(&INNER_SETTINGS).map_err(at("set up the inner namespace"))?;
        let inner_links = Links::here()?;
        self.join(&inner_links, &router_links, &router).await?;
        drop(inner);
        if let Some(uplink) = &self.uplink {
            enter(&host_namespace).map_err(at("go back to the host's namespace"))?;
            uplink.build(&host, &router_links).await?;
        }
        Ok(router)
    }

    /// The pair between sandbox and router.
    async fn join(
        &self,
        inner: &Links,
        router: &Links,
        router_namespace: &File,
    ) -> Result<(), StepError> {
        inner
            .loopback_up()
            .await
            .map_err(at("turn on the loopback"))?;
        let sandbox_end = End {
            name: address::INNER_LINK,
            index: Some(address::INNER_INDEX),
            mac: address::INNER_MAC,
        };
        let router_end = End {
            name: address::ROUTER_INNER_LINK,
            index: Some(address::ROUTER_INNER_INDEX),
            mac: address::ROUTER_INNER_MAC,
        };
        let joined = inner.add_pair(&sandbox_end, &router_end, router_namespace, self.mtu);
        joined.await.map_err(at("join the namespaces"))?;
        address_inner(inner).await?;
        let index = address::ROUTER_INNER_INDEX;
        let step = "address the router";
        router.up(index).await.map_err(at(step))?;
        router
            .set_address(index, address::ROUTER, address::INNER_PREFIX)
            .await
            .map_err(at(step))?;
        router
            .set_neighbour(index, address::INNER, address::INNER_MAC)
            .await
            .map_err(at(step))
    }
}

/// Gives the sandbox's interface its address and route, there or not.
async fn address_inner(links: &Links) -> Result<(), StepError> {
    let index = address::INNER_INDEX;
    let step = "address the sandbox's interface";
    links.up(index).await.map_err(at(step))?;
    links
        .set_address(index, address::INNER, address::INNER_PREFIX)
        .await
        .map_err(at(step))?;
    links
        .set_default_route(index, address::ROUTER)
        .await
        .map_err(at(step))
}

/// A sandbox's way out.
#[derive(Debug)]
struct Uplink {
    id: SandboxId,
    name: String,
    mtu: u32,
}

impl Uplink {
    /// Builds it. `host` and `router` are sockets in these namespaces.
    async fn build(&self, host: &Links, router: &Links) -> Result<(), StepError> {
        let step = "build the uplink";
        let router_end = End {
            name: address::ROUTER_UPLINK,
            index: Some(address::ROUTER_UPLINK_INDEX),
            mac: address::ROUTER_UPLINK_MAC,
        };
        let host_end = End {
            name: &self.name,
            index: None,
            mac: address::HOST_UPLINK_MAC,
        };
        let host_namespace = File::open("/proc/self/ns/net").map_err(at(step))?;
        router
            .add_pair(&router_end, &host_end, &host_namespace, self.mtu)
            .await
            .map_err(at(step))?;
        let index = host.index_of(&self.name).await.map_err(at(step))?;
        let index = index.ok_or_else(|| at(step)("its host end is not there"))?;
        host.up(index).await.map_err(at(step))?;
        let claimed = self.claim(host, index).await?;
        host.set_neighbour(index, claimed, address::ROUTER_UPLINK_MAC)
            .await
            .map_err(at(step))?;
        let uplink = address::ROUTER_UPLINK_INDEX;
        router
            .set_address(uplink, claimed, 32)
            .await
            .map_err(at(step))?;
        router
            .set_neighbour(uplink, address::UPLINK_GATEWAY, address::HOST_UPLINK_MAC)
            .await
            .map_err(at(step))?;
        router
            .set_default_route(uplink, address::UPLINK_GATEWAY)
            .await
            .map_err(at(step))
    }

    /// Takes an address that no other uplink of this machine has.
    async fn claim(&self, host: &Links, index: u32) -> Result<Ipv4Addr, StepError> {
        let step = "claim an address for the uplink";
        for attempt in 0..address::UPLINK_TRIES_MAX {
            let candidate = address::uplink_candidate(&self.id, attempt);
            if host.claim_route(index, candidate).await.map_err(at(step))? {
                return Ok(candidate);
            }
        }
        Err(at(step)("every address that was tried is taken"))
    }
}

/// Writes settings of the calling thread's namespace. Machines without version 6 lack some.
fn settle(settings: &[(&str, &str)]) -> io::Result<()> {
    for (path, value) in settings {
        match fs::write(path, value) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

#[async_trait]
impl Network for LinuxNetwork {
    async fn attach(&self, id: &SandboxId, egress: &Egress) -> Result<Attachment, NetworkError> {
        if self.files.router(id).exists() || self.files.inner(id).exists() {
            self.detach(id).await?;
        }
        if let Err(error) = self.build(id, egress).await {
            if let Err(left) = self.take_down(id).await {
                tracing::warn!(sandbox = %id, error = %left, "a half-built network is left");
            }
            return Err(in_step(id)(error));
        }
        Ok(Attachment {
            namespace: self.files.inner(id),
        })
    }

    async fn readdress(&self, id: &SandboxId) -> Result<Attachment, NetworkError> {
        let path = self.files.inner(id);
        let namespace = path.clone();
        let work = on_own_thread(async move || {
            let inner = File::open(&path).map_err(at("open the inner namespace"))?;
            enter(&inner).map_err(at("enter the inner namespace"))?;
            let links = Links::here()?;
            links
                .loopback_up()
                .await
                .map_err(at("turn on the loopback"))?;
            address_inner(&links).await
        });
        work.await.map_err(in_step(id))?;
        Ok(Attachment { namespace })
    }

    async fn unaddress(&self, id: &SandboxId) -> Result<(), NetworkError> {
        let path = self.files.inner(id);
        let work = on_own_thread(async move || {
            let inner = File::open(&path).map_err(at("open the inner namespace"))?;
            enter(&inner).map_err(at("enter the inner namespace"))?;
            let removed = Links::here()?.remove_addresses(address::INNER_INDEX).await;
            removed.map_err(at("take the address off the sandbox's interface"))
        });
        work.await.map_err(in_step(id))
    }

    async fn detach(&self, id: &SandboxId) -> Result<(), NetworkError> {
        self.take_down(id).await.map_err(in_step(id))
    }

    async fn set_egress(&self, id: &SandboxId, egress: &Egress) -> Result<(), NetworkError> {
        self.change(id, egress).await.map_err(in_step(id))
    }

    async fn list(&self) -> Result<Vec<SandboxId>, NetworkError> {
        let found = self.files.list().map_err(NetworkError::List)?;
        Ok(found.into_iter().collect())
    }

    async fn dial(
        &self,
        id: &SandboxId,
        port: u16,
        deadline: Deadline,
    ) -> Result<TcpStream, DialError> {
        let router = self
            .attached()
            .get(id)
            .map(|attached| Arc::clone(&attached.router));
        let router = router.ok_or(DialError::Gone)?;
        let begun = Instant::now();
        let connect = async {
            let socket = self.dialler.stream(&router).await?;
            let socket = TcpSocket::from_std_stream(socket);
            socket.set_nodelay(true)?;
            socket
                .connect(SocketAddr::from((address::INNER, port)))
                .await
        };
        match tokio::time::timeout_at(deadline.instant().into(), connect).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(e)) => Err(dial_error(e, port)),
            Err(_) => Err(DialError::Timeout {
                port,
                waited: begun.elapsed(),
            }),
        }
    }
}

fn dial_error(error: io::Error, port: u16) -> DialError {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => DialError::PortClosed { port },
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => DialError::Gone,
        _ => DialError::Socket(error),
    }
}

fn in_step(id: &SandboxId) -> impl FnOnce(StepError) -> NetworkError {
    let sandbox = id.clone();
    move |error| NetworkError::Step {
        step: error.step,
        sandbox,
        source: error.source,
    }
}
