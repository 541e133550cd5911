//! Control groups of instances, on version 1, hybrid and version 2 hosts.
//!
//! Owns: `<hierarchy>/sandhold-<tag>/<instance>` in every hierarchy, and nothing else there.
//!
//! ```text
//!  /sys/fs/cgroup/memory/sandhold-ab12cd/<instance>      version 1 and hybrid: one per hierarchy
//!  /sys/fs/cgroup/sandhold-ab12cd/<instance>             version 2: one
//! ```
//!
//! Invariants:
//! - Groups are made before the engine's processes, with their limits, so that no process of an
//!   instance ever runs without them, and whatever it leaves is found through `cgroup.procs`.
//! - [`Groups::remove`] is idempotent, and [`Groups::list`] shows what any hierarchy still holds.
//!
//! Called by the gVisor engine only. It starts and signals no process.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use sandhold_types::Resources;

/// The scheduling period over which a processor quota holds.
const CPU_PERIOD_USEC: u64 = 100_000;
/// The kernel refuses quotas under a millisecond.
const CPU_QUOTA_MIN_USEC: u64 = 1_000;
const MIB: u64 = 1024 * 1024;

/// How this machine mounts its control groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Layout {
    /// Version 1 controllers, each with its mount; perhaps a version 2 tree without controllers
    /// beside them (hybrid).
    Split {
        /// Controller to mount point; a mount can hold several controllers.
        controllers: BTreeMap<String, PathBuf>,
        /// Every hierarchy, named ones and the version 2 tree included.
        hierarchies: BTreeSet<PathBuf>,
    },
    /// Version 2 only.
    Unified {
        /// Its mount point.
        root: PathBuf,
    },
}

/// Controllers without which limits would not hold.
const REQUIRED: [&str; 4] = ["cpu", "memory", "pids", "freezer"];

impl Layout {
    /// Reads the layout out of a mount table in the form of `/proc/self/mounts`.
    ///
    /// # Errors
    /// What is missing, in words.
    pub(super) fn from_mounts(mounts: &str) -> Result<Self, String> {
        let mut controllers = BTreeMap::new();
        let mut hierarchies = BTreeSet::new();
        let mut unified = None;
        for line in mounts.lines() {
            let mut fields = line.split(' ').skip(1);
            let (Some(target), Some(kind), Some(options)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            match kind {
                "cgroup2" => unified = unified.or_else(|| Some(PathBuf::from(target))),
                "cgroup" => {
                    hierarchies.insert(PathBuf::from(target));
                    for option in options.split(',') {
                        controllers.insert(option.to_owned(), PathBuf::from(target));
                    }
                }
                _ => {}
            }
        }
        if controllers.contains_key("memory") {
            if let Some(missing) = REQUIRED.iter().find(|c| !controllers.contains_key(**c)) {
                return Err(format!(
                    "the '{missing}' control group controller is not mounted"
                ));
            }
            return Ok(Self::Split {
                controllers,
                hierarchies,
            });
        }
        unified
            .map(|root| Self::Unified { root })
            .ok_or_else(|| "no control groups are mounted under /sys/fs/cgroup".to_owned())
    }

    fn hierarchies(&self) -> Vec<&Path> {
        match self {
            Self::Split { hierarchies, .. } => hierarchies.iter().map(PathBuf::as_path).collect(),
            Self::Unified { root } => vec![root.as_path()],
        }
    }

    /// Where the files of `controller` are.
    fn controller(&self, controller: &str) -> Option<&Path> {
        match self {
            Self::Split { controllers, .. } => controllers.get(controller).map(PathBuf::as_path),
            Self::Unified { root } => Some(root),
        }
    }

    fn is_unified(&self) -> bool {
        matches!(self, Self::Unified { .. })
    }
}

/// A value to be written to a file of a controller.
type Setting = (&'static str, &'static str, String);

/// The settings of one instance, as (controller, file, value).
fn settings(unified: bool, resources: &Resources) -> Vec<Setting> {
    let memory = memory_bytes(resources).to_string();
    let quota = cpu_quota_usec(resources);
    let pids = resources.pids_max.to_string();
    if unified {
        vec![
            ("memory", "memory.max", memory),
            ("memory", "memory.swap.max", "0".to_owned()),
            ("memory", "memory.oom.group", "1".to_owned()),
            ("cpu", "cpu.max", format!("{quota} {CPU_PERIOD_USEC}")),
            ("pids", "pids.max", pids),
        ]
    } else {
        vec![
            ("memory", "memory.limit_in_bytes", memory),
            ("cpu", "cpu.cfs_period_us", CPU_PERIOD_USEC.to_string()),
            ("cpu", "cpu.cfs_quota_us", quota.to_string()),
            ("pids", "pids.max", pids),
        ]
    }
}

/// Settings that older or smaller kernels do not have.
fn is_optional(file: &str) -> bool {
    matches!(file, "memory.swap.max" | "memory.oom.group")
}

/// The plan's memory in bytes.
pub(super) fn memory_bytes(resources: &Resources) -> u64 {
    u64::from(resources.memory_mib) * MIB
}

/// The plan's processor time per [`CPU_PERIOD_USEC`].
pub(super) fn cpu_quota_usec(resources: &Resources) -> u64 {
    (u64::from(resources.cpu_milli) * CPU_PERIOD_USEC / 1000).max(CPU_QUOTA_MIN_USEC)
}

/// The scheduling period, for the engine's own configuration.
pub(super) const fn cpu_period_usec() -> u64 {
    CPU_PERIOD_USEC
}

/// What the accounting of a group says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Accounting {
    /// Processor time in microseconds.
    pub(super) cpu_usec: u64,
    /// Memory charged, in bytes.
    pub(super) memory_bytes: u64,
    /// File cache in it, in bytes; memory of the guest, which is a shared mapping, is not in it.
    pub(super) cache_bytes: u64,
}

/// What a group's limits have done to its processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Verdicts {
    /// Processes that the kernel killed for memory.
    pub(super) memory_kills: u64,
    /// Forks refused by the limit of processes.
    pub(super) forks_refused: u64,
}

/// The groups of one node.
#[derive(Debug, Clone)]
pub(super) struct Groups {
    layout: Layout,
    parent: String,
}

impl Groups {
    /// The groups of the node with this tag.
    #[must_use]
    pub(super) fn new(layout: Layout, node_tag: &str) -> Self {
        Self {
            layout,
            parent: format!("sandhold-{node_tag}"),
        }
    }

    /// The group's path as an OCI configuration names it.
    #[must_use]
    pub(super) fn oci_path(&self, instance: &str) -> String {
        format!("/{}/{instance}", self.parent)
    }

    /// Makes the groups of an instance, with limits.
    ///
    /// # Errors
    /// The file and why.
    pub(super) fn create(
        &self,
        instance: &str,
        resources: &Resources,
    ) -> Result<(), (PathBuf, io::Error)> {
        for hierarchy in self.layout.hierarchies() {
            let parent = hierarchy.join(&self.parent);
            if self.layout.is_unified() {
                delegate(hierarchy)?;
                make_group(&parent)?;
                delegate(&parent)?;
            }
            let group = parent.join(instance);
            make_group(&parent)?;
            if fs::create_dir(&group).is_err() {
                // The parent may have been removed with the last instance just now.
                make_group(&parent)?;
                make_group(&group)?;
            }
            inherit_cpuset(hierarchy, &parent)?;
            inherit_cpuset(&parent, &group)?;
        }
        for (controller, file, value) in settings(self.layout.is_unified(), resources) {
            let Some(path) = self.file(controller, instance, file) else {
                continue;
            };
            match fs::write(&path, value) {
                Err(_) if is_optional(file) => {}
                written => written.map_err(|e| (path, e))?,
            }
        }
        Ok(())
    }

    /// Sets the memory limit of an instance.
    ///
    /// # Errors
    /// The group is gone or refuses.
    pub(super) fn set_memory_limit(&self, instance: &str, bytes: u64) -> io::Result<()> {
        let file = if self.layout.is_unified() {
            "memory.max"
        } else {
            "memory.limit_in_bytes"
        };
        let path = self.file("memory", instance, file);
        path.map_or(Ok(()), |path| fs::write(path, bytes.to_string()))
    }

    /// The processes in any of the instance's groups.
    #[must_use]
    pub(super) fn processes(&self, instance: &str) -> BTreeSet<u32> {
        let read = |hierarchy: &Path| {
            fs::read_to_string(self.group(hierarchy, instance).join("cgroup.procs"))
                .unwrap_or_default()
        };
        self.layout
            .hierarchies()
            .into_iter()
            .map(read)
            .flat_map(|text| {
                text.lines()
                    .filter_map(|line| line.trim().parse().ok())
                    .collect::<Vec<u32>>()
            })
            .filter(|pid| *pid != 0)
            .collect()
    }

    /// Asks the kernel to stop or continue the instance's processes.
    ///
    /// # Errors
    /// The group is gone or refuses.
    pub(super) fn set_frozen(&self, instance: &str, frozen: bool) -> io::Result<()> {
        let (file, value) = match (self.layout.is_unified(), frozen) {
            (true, true) => ("cgroup.freeze", "1"),
            (true, false) => ("cgroup.freeze", "0"),
            (false, true) => ("freezer.state", "FROZEN"),
            (false, false) => ("freezer.state", "THAWED"),
        };
        let path = self.file("freezer", instance, file);
        path.map_or(Ok(()), |path| fs::write(path, value))
    }

    /// Whether every process of the instance has stopped.
    ///
    /// # Errors
    /// The group is gone.
    pub(super) fn is_frozen(&self, instance: &str) -> io::Result<bool> {
        if self.layout.is_unified() {
            let path = self.file("freezer", instance, "cgroup.events");
            let text = path.map_or_else(|| Ok(String::new()), fs::read_to_string)?;
            return Ok(flat_keyed(&text, "frozen") == 1);
        }
        let path = self.file("freezer", instance, "freezer.state");
        let text = path.map_or_else(|| Ok(String::new()), fs::read_to_string)?;
        Ok(text.trim() == "FROZEN")
    }

    /// What the instance has used.
    ///
    /// # Errors
    /// The group is gone.
    pub(super) fn accounting(&self, instance: &str) -> io::Result<Accounting> {
        let read = |controller: &str, file: &str| {
            let path = self.file(controller, instance, file);
            path.map_or_else(|| Ok(String::new()), fs::read_to_string)
        };
        if self.layout.is_unified() {
            let stat = read("memory", "memory.stat")?;
            return Ok(Accounting {
                cpu_usec: flat_keyed(&read("cpu", "cpu.stat")?, "usage_usec"),
                memory_bytes: number(&read("memory", "memory.current")?),
                cache_bytes: flat_keyed(&stat, "file").saturating_sub(flat_keyed(&stat, "shmem")),
            });
        }
        let stat = read("memory", "memory.stat")?;
        Ok(Accounting {
            cpu_usec: number(&read("cpuacct", "cpuacct.usage")?) / 1000,
            memory_bytes: number(&read("memory", "memory.usage_in_bytes")?),
            cache_bytes: flat_keyed(&stat, "cache").saturating_sub(flat_keyed(&stat, "shmem")),
        })
    }

    /// What its limits did; zeros once the group is gone.
    #[must_use]
    pub(super) fn verdicts(&self, instance: &str) -> Verdicts {
        let memory_file = if self.layout.is_unified() {
            "memory.events"
        } else {
            "memory.oom_control"
        };
        let read = |controller: &str, file: &str| {
            let path = self.file(controller, instance, file);
            path.and_then(|path| fs::read_to_string(path).ok())
                .unwrap_or_default()
        };
        Verdicts {
            memory_kills: flat_keyed(&read("memory", memory_file), "oom_kill"),
            forks_refused: flat_keyed(&read("pids", "pids.events"), "max"),
        }
    }

    /// Removes the groups of an instance, and the node's own once it is the last.
    ///
    /// # Errors
    /// A group that still holds processes.
    pub(super) fn remove(&self, instance: &str) -> io::Result<()> {
        for hierarchy in self.layout.hierarchies() {
            remove_group(&self.group(hierarchy, instance))?;
            // Refused while other instances are there, which is as it should be.
            let _ = fs::remove_dir(hierarchy.join(&self.parent));
        }
        Ok(())
    }

    /// Names of the instances that have a group in any hierarchy.
    ///
    /// # Errors
    /// A hierarchy that cannot be read.
    pub(super) fn list(&self) -> io::Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for hierarchy in self.layout.hierarchies() {
            let entries = match fs::read_dir(hierarchy.join(&self.parent)) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(e),
            };
            for entry in entries {
                let entry = entry?;
                if entry.path().is_dir() {
                    names.extend(entry.file_name().into_string());
                }
            }
        }
        Ok(names)
    }

    fn group(&self, hierarchy: &Path, instance: &str) -> PathBuf {
        hierarchy.join(&self.parent).join(instance)
    }

    fn file(&self, controller: &str, instance: &str, file: &str) -> Option<PathBuf> {
        let hierarchy = self.layout.controller(controller)?;
        Some(self.group(hierarchy, instance).join(file))
    }
}

fn make_group(path: &Path) -> Result<(), (PathBuf, io::Error)> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err((path.to_owned(), e)),
        _ => Ok(()),
    }
}

/// A version 1 cpuset starts empty and takes no process until it is filled.
fn inherit_cpuset(parent: &Path, group: &Path) -> Result<(), (PathBuf, io::Error)> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let path = group.join(file);
        let Ok(own) = fs::read_to_string(&path) else {
            continue;
        };
        if own.trim().is_empty()
            && let Ok(inherited) = fs::read_to_string(parent.join(file))
            && !inherited.trim().is_empty()
        {
            fs::write(&path, inherited.trim()).map_err(|e| (path, e))?;
        }
    }
    Ok(())
}

/// Turns the controllers on for the children of a version 2 group.
fn delegate(group: &Path) -> Result<(), (PathBuf, io::Error)> {
    let path = group.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&path).unwrap_or_default();
    let enabled: BTreeSet<&str> = enabled.split_whitespace().collect();
    for controller in ["cpu", "memory", "pids"] {
        if !enabled.contains(controller) {
            fs::write(&path, format!("+{controller}")).map_err(|e| (path.clone(), e))?;
        }
    }
    Ok(())
}

/// Removes a group and what its processes may have made under it.
fn remove_group(path: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    for entry in entries.flatten() {
        if entry.path().is_dir() {
            remove_group(&entry.path())?;
        }
    }
    match fs::remove_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or(0)
}

/// The value of `key` in lines of `key value`.
fn flat_keyed(text: &str, key: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' ').map(number))
        .unwrap_or(0)
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
