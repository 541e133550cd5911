use super::*;

const HYBRID: &str = "\
sysfs /sys sysfs rw 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
cgroup /sys/fs/cgroup/pids cgroup rw,relatime,pids 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,relatime,freezer 0 0
cgroup /sys/fs/cgroup/systemd cgroup rw,relatime,name=systemd 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
";

#[test]
fn a_hybrid_host_is_used_through_its_version_1_controllers() {
    let layout = Layout::from_mounts(HYBRID).unwrap();
    assert_eq!(
        layout.controller("cpuacct"),
        Some(Path::new("/sys/fs/cgroup/cpu,cpuacct"))
    );
    assert_eq!(layout.hierarchies().len(), 5, "{layout:?}");
}

#[test]
fn a_version_2_host_has_one_tree() {
    let mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
    let layout = Layout::from_mounts(mounts).unwrap();
    assert_eq!(
        layout,
        Layout::Unified {
            root: PathBuf::from("/sys/fs/cgroup")
        }
    );
}

#[test]
fn what_is_missing_is_named() {
    let without_pids = HYBRID.replace("rw,relatime,pids", "rw,relatime");
    let told = Layout::from_mounts(&without_pids).unwrap_err();
    assert!(told.contains("'pids'"), "{told}");
    assert!(Layout::from_mounts("proc /proc proc rw 0 0").is_err());
}

/// A made-up tree whose directories are plain ones: writes land in files that can be read back.
fn fake(unified: bool) -> (tempfile::TempDir, Groups) {
    let root = tempfile::tempdir().unwrap();
    let layout = if unified {
        fs::write(
            root.path().join("cgroup.subtree_control"),
            "cpu memory pids",
        )
        .unwrap();
        let parent = root.path().join("sandhold-tagtag");
        fs::create_dir(&parent).unwrap();
        fs::write(parent.join("cgroup.subtree_control"), "cpu memory pids").unwrap();
        Layout::Unified {
            root: root.path().to_owned(),
        }
    } else {
        let names = ["cpu", "cpuacct", "cpuset", "memory", "pids", "freezer"];
        let mount = |name: &str| root.path().join(name);
        for name in names {
            fs::create_dir(mount(name)).unwrap();
        }
        Layout::Split {
            controllers: names.iter().map(|n| ((*n).to_owned(), mount(n))).collect(),
            hierarchies: names.iter().map(|n| mount(n)).collect(),
        }
    };
    (root, Groups::new(layout, "tagtag"))
}

const PLAN: Resources = Resources {
    cpu_milli: 1500,
    memory_mib: 512,
    disk_mib: 1,
    pids_max: 77,
};

#[test]
fn version_2_limits_are_written() {
    let (root, groups) = fake(true);
    groups.create("x", &PLAN).unwrap();
    let read =
        |file: &str| fs::read_to_string(root.path().join("sandhold-tagtag/x").join(file)).unwrap();
    assert_eq!(read("memory.max"), "536870912");
    assert_eq!(read("memory.swap.max"), "0");
    assert_eq!(read("cpu.max"), "150000 100000");
    assert_eq!(read("pids.max"), "77");
    groups.set_frozen("x", true).unwrap();
    assert_eq!(read("cgroup.freeze"), "1");
    groups.set_memory_limit("x", 4096).unwrap();
    assert_eq!(read("memory.max"), "4096");
}

#[test]
fn version_1_limits_are_written() {
    let (root, groups) = fake(false);
    groups.create("x", &PLAN).unwrap();
    let read = |controller: &str, file: &str| {
        let group = root.path().join(controller).join("sandhold-tagtag/x");
        fs::read_to_string(group.join(file)).unwrap()
    };
    assert_eq!(read("memory", "memory.limit_in_bytes"), "536870912");
    assert_eq!(read("cpu", "cpu.cfs_quota_us"), "150000");
    assert_eq!(read("pids", "pids.max"), "77");
    groups.set_frozen("x", true).unwrap();
    assert!(groups.is_frozen("x").unwrap());
    groups.set_frozen("x", false).unwrap();
    assert!(!groups.is_frozen("x").unwrap());
}

#[test]
fn version_2_accounting_is_read() {
    let (root, groups) = fake(true);
    groups.create("x", &PLAN).unwrap();
    let group = root.path().join("sandhold-tagtag/x");
    let write = |file: &str, text: &str| fs::write(group.join(file), text).unwrap();
    write("cpu.stat", "usage_usec 1234\nuser_usec 1000\n");
    write("memory.current", "900\n");
    write(
        "memory.stat",
        "anon 1\nfile 500\nshmem 200\nfile_mapped 7\n",
    );
    write("memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\n");
    write("pids.events", "max 5\n");
    write("cgroup.events", "populated 1\nfrozen 1\n");
    write("cgroup.procs", "12\n13\n0\n");
    assert_eq!(
        groups.accounting("x").unwrap(),
        Accounting {
            cpu_usec: 1234,
            memory_bytes: 900,
            cache_bytes: 300
        }
    );
    assert_eq!(
        groups.verdicts("x"),
        Verdicts {
            memory_kills: 2,
            forks_refused: 5
        }
    );
    assert!(groups.is_frozen("x").unwrap());
    assert_eq!(groups.processes("x"), BTreeSet::from([12, 13]));
    assert_eq!(groups.list().unwrap(), BTreeSet::from(["x".to_owned()]));
}

#[test]
fn version_1_accounting_is_read() {
    let (root, groups) = fake(false);
    groups.create("x", &PLAN).unwrap();
    let write = |controller: &str, file: &str, text: &str| {
        let group = root.path().join(controller).join("sandhold-tagtag/x");
        fs::write(group.join(file), text).unwrap();
    };
    write("cpuacct", "cpuacct.usage", "5000000\n");
    write("memory", "memory.usage_in_bytes", "4096\n");
    write("memory", "memory.stat", "cache 100\nrss 5\nshmem 40\n");
    write(
        "memory",
        "memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    );
    let used = groups.accounting("x").unwrap();
    assert_eq!(
        (used.cpu_usec, used.memory_bytes, used.cache_bytes),
        (5000, 4096, 60)
    );
    assert_eq!(groups.verdicts("x").memory_kills, 1);
}

#[test]
fn groups_go_with_their_parent_and_removing_twice_is_fine() {
    // Real groups are emptied by the kernel with their directory; here there are no files in them.
    let (root, groups) = fake(false);
    for hierarchy in groups.layout.hierarchies() {
        fs::create_dir_all(hierarchy.join("sandhold-tagtag/x/made-inside")).unwrap();
    }
    groups.remove("x").unwrap();
    groups.remove("x").unwrap();
    assert_eq!(groups.list().unwrap(), BTreeSet::new());
    assert!(!root.path().join("memory/sandhold-tagtag").exists());
}
