//! The OCI configuration of an instance. Pure: from a launch specification to a document.

use std::{collections::HashSet, path::PathBuf};

use oci_spec::{
    OciSpecError,
    runtime::{
        Capability, LinuxBuilder, LinuxCapabilitiesBuilder, LinuxCpuBuilder, LinuxMemoryBuilder,
        LinuxNamespaceBuilder, LinuxNamespaceType, LinuxPidsBuilder, LinuxResources,
        LinuxResourcesBuilder, Mount, MountBuilder, PosixRlimit, PosixRlimitBuilder,
        PosixRlimitType, Process, ProcessBuilder, RootBuilder, Spec, SpecBuilder, UserBuilder,
    },
};
use sandhold_types::Resources;

use super::cgroup;
use crate::LaunchSpec;

/// Open files of a guest process: what it starts with, and how far it may raise that.
const OPEN_FILES_SOFT: u64 = 65_536;
const OPEN_FILES_HARD: u64 = 1_048_576;

/// What root in the guest may do. The boundary is the engine's own kernel, not these: a guest is
/// its own machine, in which `sudo`, mounts, tracing and raw sockets work. Left out is what has no
/// meaning there (modules, raw input and output, reboot, mandatory access control).
const CAPABILITIES: &[Capability] = &[
    Capability::AuditWrite,
    Capability::Chown,
    Capability::DacOverride,
    Capability::DacReadSearch,
    Capability::Fowner,
    Capability::Fsetid,
    Capability::IpcLock,
    Capability::IpcOwner,
    Capability::Kill,
    Capability::Lease,
    Capability::LinuxImmutable,
    Capability::Mknod,
    Capability::NetAdmin,
    Capability::NetBindService,
    Capability::NetBroadcast,
    Capability::NetRaw,
    Capability::Setfcap,
    Capability::Setgid,
    Capability::Setpcap,
    Capability::Setuid,
    Capability::SysAdmin,
    Capability::SysChroot,
    Capability::SysNice,
    Capability::SysPtrace,
    Capability::SysResource,
    Capability::SysTime,
    Capability::SysTtyConfig,
];

/// The configuration that `spec` asks for, in the given control group.
pub(super) fn configuration(spec: &LaunchSpec, cgroup_path: &str) -> Result<Spec, OciSpecError> {
    let (command, environment) = spec.origin.process();
    let root = RootBuilder::default()
        .path(&spec.root_fs)
        // Not read-only for the guest: the engine lays its writable layer over it and never
        // writes to what is below.
        .readonly(false)
        .build()?;
    let linux = LinuxBuilder::default()
        .cgroups_path(PathBuf::from(cgroup_path))
        .resources(resources(&spec.resources)?)
        .namespaces(namespaces(&spec.network_namespace)?)
        .build()?;
    SpecBuilder::default()
        .version("1.0.2")
        .root(root)
        .process(process(command, environment)?)
        .hostname(spec.hostname.clone())
        .mounts(mounts()?)
        .linux(linux)
        .build()
}

fn process(command: &[String], environment: &[String]) -> Result<Process, OciSpecError> {
    let all: HashSet<Capability> = CAPABILITIES.iter().copied().collect();
    let capabilities = LinuxCapabilitiesBuilder::default()
        .bounding(all.clone())
        .effective(all.clone())
        .permitted(all)
        .inheritable(HashSet::new())
        .ambient(HashSet::new())
        .build()?;
    ProcessBuilder::default()
        .terminal(false)
        .user(UserBuilder::default().uid(0u32).gid(0u32).build()?)
        .args(command.to_vec())
        .env(environment.to_vec())
        .cwd("/")
        .capabilities(capabilities)
        .rlimits(vec![open_files()?])
        // `sudo` must work.
        .no_new_privileges(false)
        .build()
}

fn open_files() -> Result<PosixRlimit, OciSpecError> {
    PosixRlimitBuilder::default()
        .typ(PosixRlimitType::RlimitNofile)
        .soft(OPEN_FILES_SOFT)
        .hard(OPEN_FILES_HARD)
        .build()
}

fn resources(plan: &Resources) -> Result<LinuxResources, OciSpecError> {
    let memory = i64::try_from(cgroup::memory_bytes(plan)).unwrap_or(i64::MAX);
    let quota = i64::try_from(cgroup::cpu_quota_usec(plan)).unwrap_or(i64::MAX);
    LinuxResourcesBuilder::default()
        .memory(LinuxMemoryBuilder::default().limit(memory).build()?)
        .cpu(
            LinuxCpuBuilder::default()
                .quota(quota)
                .period(cgroup::cpu_period_usec())
                .build()?,
        )
        .pids(
            LinuxPidsBuilder::default()
                .limit(i64::from(plan.pids_max))
                .build()?,
        )
        .build()
}

fn namespaces(
    network: &std::path::Path,
) -> Result<Vec<oci_spec::runtime::LinuxNamespace>, OciSpecError> {
    let private = [
        LinuxNamespaceType::Pid,
        LinuxNamespaceType::Ipc,
        LinuxNamespaceType::Uts,
        LinuxNamespaceType::Mount,
    ];
    let mut namespaces = Vec::with_capacity(private.len() + 1);
    for kind in private {
        namespaces.push(LinuxNamespaceBuilder::default().typ(kind).build()?);
    }
    namespaces.push(
        LinuxNamespaceBuilder::default()
            .typ(LinuxNamespaceType::Network)
            .path(network)
            .build()?,
    );
    Ok(namespaces)
}

fn mounts() -> Result<Vec<Mount>, OciSpecError> {
    let mount = |destination: &str, kind: &str, options: &[&str]| {
        MountBuilder::default()
            .destination(destination)
            .typ(kind)
            .source(kind)
            .options(options.iter().map(|o| (*o).to_owned()).collect::<Vec<_>>())
            .build()
    };
    Ok(vec![
        mount("/proc", "proc", &["nosuid", "noexec", "nodev"])?,
        mount("/dev", "tmpfs", &["nosuid", "mode=755"])?,
        mount("/dev/pts", "devpts", &["nosuid", "noexec"])?,
        mount("/dev/shm", "tmpfs", &["nosuid", "nodev", "mode=1777"])?,
        mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"])?,
    ])
}

#[cfg(test)]
mod tests {
    use sandhold_types::{Incarnation, SandboxId, SeededEntropy};

    use super::*;
    use crate::{InstanceId, InstanceRef, Origin};

    #[test]
    fn a_configuration_says_what_was_asked() {
        let spec = LaunchSpec {
            instance: InstanceRef {
                id: InstanceId {
                    sandbox: SandboxId::generate(&SeededEntropy::new(1)),
                    incarnation: Incarnation::INITIAL,
                },
                directory: "/instance".into(),
            },
            root_fs: "/templates/base".into(),
            origin: Origin::Boot {
                command: vec!["/agent".into(), "--x".into()],
                environment: vec!["A=b c".into()],
            },
            network_namespace: "/run/net/inner".into(),
            resources: Resources {
                cpu_milli: 500,
                memory_mib: 256,
                disk_mib: 1,
                pids_max: 99,
            },
            hostname: "sandbox".into(),
        };
        let document =
            serde_json::to_value(configuration(&spec, "/sandhold-x/i").unwrap()).unwrap();
        let at = |pointer: &str| document.pointer(pointer).unwrap().clone();
        assert_eq!(at("/process/args"), serde_json::json!(["/agent", "--x"]));
        assert_eq!(at("/process/env"), serde_json::json!(["A=b c"]));
        assert_eq!(at("/process/noNewPrivileges"), false);
        assert_eq!(at("/root/path"), "/templates/base");
        assert_eq!(at("/linux/cgroupsPath"), "/sandhold-x/i");
        assert_eq!(at("/linux/resources/memory/limit"), 256 * 1024 * 1024);
        assert_eq!(at("/linux/resources/cpu/quota"), 50_000);
        assert_eq!(at("/linux/resources/pids/limit"), 99);
        assert_eq!(at("/linux/namespaces/4/path"), "/run/net/inner");
        let bounding = at("/process/capabilities/bounding");
        let bounding: Vec<&str> = bounding
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|c| c.as_str())
            .collect();
        assert!(bounding.contains(&"CAP_SETUID"));
        assert!(!bounding.contains(&"CAP_SYS_MODULE"));
    }
}
