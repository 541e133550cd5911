//! What the host itself must do for uplinks: forward, translate, and keep them apart.
//!
//! On with the first uplink of a node, off with the last. Several nodes may share a machine, so
//! what they know of each other is in files, under a lock:
//!
//! ```text
//!  /run/sandhold/lock                        held while any of these change
//!               <tag>/uplinks-in-use         this node needs the host's part
//!               <tag>/forwarding-was-off     forwarding was off before; this node puts it back,
//!                                            or hands the note to another that still needs it
//! ```

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    path::PathBuf,
};

use sandhold_types::SandboxId;
use tokio::sync::Mutex;

use super::{
    address, filter,
    links::Links,
    namespace::{StepError, at, on_own_thread},
    policy,
};

const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";
/// Where the nodes of this machine note things.
const NODES: &str = "/run/sandhold";
/// The note that a node needs the host's part.
const IN_USE: &str = "uplinks-in-use";
/// The note that forwarding was off until a node turned it on.
const WAS_OFF: &str = "forwarding-was-off";
/// Held while notes and the switch change.
const LOCK: &str = "lock";
/// What Ethernet carries; used on a machine that has no way out itself.
const DEFAULT_MTU: u32 = 1500;

/// Which uplinks the host serves now.
#[derive(Debug)]
struct Served {
    /// Beginnings of identifiers, as they are found in interface names.
    uplinks: BTreeSet<String>,
    /// Whether this process has put the rules in force.
    on: bool,
}

/// The host's part for one node.
#[derive(Debug)]
pub(super) struct Host {
    node_tag: String,
    mtu: u32,
    served: Mutex<Served>,
}

impl Host {
    /// Looks at the machine as it is.
    pub(super) async fn new(node_tag: &str) -> Result<Self, StepError> {
        let prefix = address::uplink_prefix(node_tag);
        let (names, mtu) = on_own_thread(async move || {
            let links = Links::here()?;
            let names = links.names().await.map_err(at("list interfaces"))?;
            let mtu = links.way_out_mtu().await.map_err(at("list routes"))?;
            Ok((names, mtu))
        })
        .await?;
        let uplinks = names
            .into_iter()
            .filter(|name| name.starts_with(&prefix))
            .collect();
        Ok(Self {
            node_tag: node_tag.to_owned(),
            mtu: mtu.unwrap_or(DEFAULT_MTU),
            served: Mutex::new(Served { uplinks, on: false }),
        })
    }

    /// What the machine's own way out carries at most, and so what a sandbox may send.
    pub(super) fn mtu(&self) -> u32 {
        self.mtu
    }

    fn table(&self) -> String {
        format!("sandhold_{}", self.node_tag)
    }

    fn note(&self, name: &str) -> PathBuf {
        PathBuf::from(NODES).join(&self.node_tag).join(name)
    }

    /// Makes the host serve the uplink that `id` is about to get.
    pub(super) async fn switch_on(&self, id: &SandboxId) -> Result<(), StepError> {
        let mut served = self.served.lock().await;
        served
            .uplinks
            .insert(address::uplink_name(&self.node_tag, id));
        if served.on {
            return Ok(());
        }
        self.forward().map_err(at("turn on forwarding"))?;
        let rules = policy::host_rules(&self.table(), &address::uplink_prefix(&self.node_tag));
        filter::apply(&rules).await?;
        served.on = true;
        Ok(())
    }

    /// Notes that the uplink of `id` is gone.
    pub(super) async fn switch_off(&self, id: &SandboxId) -> Result<(), StepError> {
        let mut served = self.served.lock().await;
        served
            .uplinks
            .remove(&address::uplink_name(&self.node_tag, id));
        self.switch_off_unused(&mut served).await
    }

    /// Switches off what an earlier process of this node switched on and nobody needs any more.
    pub(super) async fn settle(&self) -> Result<(), StepError> {
        let mut served = self.served.lock().await;
        self.switch_off_unused(&mut served).await
    }

    async fn switch_off_unused(&self, served: &mut Served) -> Result<(), StepError> {
        if !served.uplinks.is_empty() || !self.note(IN_USE).exists() {
            return Ok(());
        }
        filter::apply(&policy::host_removal(&self.table())).await?;
        served.on = false;
        self.stop_forwarding().map_err(at("turn off forwarding"))
    }

    fn forward(&self) -> io::Result<()> {
        fs::create_dir_all(PathBuf::from(NODES).join(&self.node_tag))?;
        let _held = lock()?;
        fs::write(self.note(IN_USE), "")?;
        if fs::read_to_string(FORWARDING)?.trim() == "0" {
            fs::write(self.note(WAS_OFF), "")?;
            fs::write(FORWARDING, "1")?;
        }
        Ok(())
    }

    /// Puts forwarding back as it was, unless another node still needs it.
    fn stop_forwarding(&self) -> io::Result<()> {
        let _held = lock()?;
        fs::remove_file(self.note(IN_USE))?;
        let note = self.note(WAS_OFF);
        if !note.exists() {
            return Ok(());
        }
        let heir = fs::read_dir(NODES)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.join(IN_USE).exists());
        match heir {
            Some(heir) => fs::rename(&note, heir.join(WAS_OFF)),
            None => {
                fs::write(FORWARDING, "0")?;
                fs::remove_file(&note)
            }
        }
    }
}

/// Keeps other nodes of this machine out until it is dropped. Held for a few file accesses only.
fn lock() -> io::Result<File> {
    let file = File::create(PathBuf::from(NODES).join(LOCK))?;
    file.lock()?;
    Ok(file)
}
