//! gVisor: a sandbox is a `runsc` process with a kernel of its own in user space (R-P2).
//!
//! Owns: the directory of each instance (see `files`), the engine's root, the control groups
//! `sandhold-<tag>/*`, and the processes in them.
//!
//! ```text
//!   launch ─▶ groups ─▶ bundle ─▶ runsc run | restore ─▶ note ─▶ watch
//!   remove ─▶ thaw ─▶ SIGKILL by pidfd ─▶ groups empty? ─▶ unlink all ─▶ look again
//! ```
//!
//! Invariants:
//! - Truth is what the machine shows: processes (by number and start time), groups, files. What is
//!   kept in memory are only watchers, which can be started again at any time, so that an instance
//!   that an earlier process started is no different (R-L3).
//! - An instance is removed by hand, not by `runsc delete`: that knows nothing of half-made ones,
//!   and waits for whoever reaps.
//! - Nothing is executed inside a sandbox by this engine: a live `exec` would make its images
//!   unusable.
//!
//! Called by the node. It never decides about a sandbox's life.

mod bundle;
mod cgroup;
mod command;
mod control;
mod files;
mod process;
mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use sandhold_types::{Deadline, Resources};

use self::{
    cgroup::{Groups, Layout},
    command::{Call, ProcSys, Runsc},
    files::{EngineRoot, InstanceFiles, Note, Prepared},
    process::ProcessIdentity,
    watch::{Subject, Watched},
};
use crate::{
    AfterCapture, Engine, EngineError, EngineIdentity, ExitCause, InstanceId, InstanceRef,
    InstanceStatus, LaunchSpec, Origin, Usage,
};

/// What the engine's own processes need besides the memory of the plan. The guest is told the plan;
/// the limit is this much higher, so that the guest can really use what it was told (BC-106).
pub const MEMORY_OVERHEAD_MIB: u32 = 64;

/// How long the freezer may take.
const FREEZE_MAX: Duration = Duration::from_secs(2);
/// How often something is looked at that nothing tells us about.
const POLL: Duration = Duration::from_millis(2);
/// How long `runsc` may take to tell its version.
const VERSION_MAX: Duration = Duration::from_secs(10);
const NODE_TAG_LENGTH: usize = 6;
const MIB: u64 = 1024 * 1024;
/// The verbs of `runsc` that we call; none of them outlives the process that called it.
const VERBS: [&str; 4] = ["run", "restore", "create", "start"];
/// The verb of a capture. An earlier process's is let go on: the guest may be half on disk already.
const CAPTURE_VERB: &str = "checkpoint";

/// How to run gVisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GvisorConfig {
    /// The `runsc` program, by absolute path.
    pub runsc: PathBuf,
    /// Six lower-case letters and digits that keep two nodes on one machine apart.
    pub node_tag: String,
    /// Where the engine keeps its own state; a short path, since sockets are made under it. Should
    /// not survive a restart of the machine: `/run/sandhold/<tag>`.
    pub state_root: PathBuf,
    /// Where what a guest writes to its root goes.
    pub root_writes: RootWrites,
}

/// Where what a guest writes to its root goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RootWrites {
    /// To a layer of the instance, bounded by its plan; the root stays as it is.
    #[default]
    Layer,
    /// To the root itself, which belongs to this instance alone. Such instances are not captured,
    /// and their plan does not bound their disk.
    Root,
}

/// The gVisor engine.
#[derive(Debug)]
pub struct GvisorEngine {
    runsc: Runsc,
    root: EngineRoot,
    groups: Groups,
    root_writes: RootWrites,
    identity: EngineIdentity,
    watched: Mutex<BTreeMap<InstanceId, Arc<Watched>>>,
}

impl GvisorEngine {
    /// Checks what the machine offers and ends what calls an earlier process of this node left
    /// half-way. Instances are left alone.
    ///
    /// # Errors
    /// What the machine lacks, and how to mend it.
    pub async fn new(config: GvisorConfig) -> Result<Self, EngineError> {
        check_tag(&config.node_tag)?;
        let root = config.state_root.join("runsc");
        fs::create_dir_all(&root).map_err(|source| EngineError::File {
            step: "make",
            path: root.clone(),
            source,
        })?;
        let mounts = read_file(Path::new("/proc/self/mounts"))?;
        let layout = Layout::from_mounts(&mounts).map_err(|what| EngineError::Unsupported {
            what: format!("{what}; mount it, or boot with control groups version 2"),
        })?;
        let proc_sys = ProcSys::probe().map_err(|e| EngineError::Unsupported {
            what: format!("network namespaces cannot be made ({e}); run as root"),
        })?;
        let identity = EngineIdentity {
            name: "gvisor".to_owned(),
            version: version(&config.runsc).await?,
            cpu_features: cpu_features(&read_file(Path::new("/proc/cpuinfo"))?),
        };
        let engine = Self {
            groups: Groups::new(layout, &config.node_tag),
            runsc: Runsc {
                program: config.runsc,
                root: root.clone(),
                proc_sys,
            },
            root: EngineRoot(root),
            root_writes: config.root_writes,
            identity,
            watched: Mutex::new(BTreeMap::new()),
        };
        engine.end_stray_calls()?;
        Ok(engine)
    }

    /// Ends `runsc` calls of an earlier process; whoever waited for them is gone.
    fn end_stray_calls(&self) -> Result<(), EngineError> {
        let root = self.root_argument();
        let stray = process::find(|line| {
            line.contains(&root) && VERBS.iter().any(|verb| line.iter().any(|a| a == verb))
        });
        let stray = stray.map_err(|source| EngineError::File {
            step: "list",
            path: "/proc".into(),
            source,
        })?;
        process::kill(&stray);
        Ok(())
    }

    fn root_argument(&self) -> String {
        format!("--root={}", self.root.0.display())
    }

    fn watched(&self) -> MutexGuard<'_, BTreeMap<InstanceId, Arc<Watched>>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The watcher of an instance, started now if this process has none yet.
    fn watch(&self, instance: &InstanceRef) -> Result<Arc<Watched>, EngineError> {
        let mut watched = self.watched();
        if let Some(known) = watched.get(&instance.id) {
            return Ok(Arc::clone(known));
        }
        let files = InstanceFiles::new(&instance.directory);
        let note = files.note().ok_or_else(|| EngineError::Unknown {
            instance: instance.id.clone(),
        })?;
        // An earlier process may have died with a higher limit set.
        self.limit_memory(&instance.id, &note.resources, 0);
        let subject = Subject {
            id: instance.id.clone(),
            files,
            socket: self.root.socket(&instance.id),
            groups: self.groups.clone(),
            note,
        };
        let started = Arc::new(Watched::start(subject));
        watched.insert(instance.id.clone(), Arc::clone(&started));
        Ok(started)
    }

    /// Flags that must be the same for every call about an instance.
    fn flags(&self, files: &InstanceFiles) -> Vec<String> {
        let writes = match self.root_writes {
            RootWrites::Layer => format!("root:dir={}", files.disk().display()),
            RootWrites::Root => "none".to_owned(),
        };
        vec![
            "--platform=systrap".to_owned(),
            "--network=sandbox".to_owned(),
            format!("--overlay2={writes}"),
            format!("--panic-log={}", files.panic_log().display()),
            "--net-disconnect-ok".to_owned(),
            "--net-raw".to_owned(),
            "--cpu-num-from-quota".to_owned(),
        ]
    }

    /// Makes groups, directories and the bundle.
    async fn lay_out(&self, spec: &LaunchSpec) -> Result<File, EngineError> {
        let files = InstanceFiles::new(&spec.instance.directory);
        let name = spec.instance.id.to_string();
        let groups = self.groups.clone();
        let resources = spec.resources;
        let configuration = bundle::configuration(spec, &groups.oci_path(&name));
        let configuration = configuration.map_err(|e| EngineError::Unsupported {
            what: format!("{name} cannot be described to the engine: {e}"),
        })?;
        blocking(move || {
            let group = groups.create(&name, &resources);
            group.map_err(|(path, source)| file_error("write", &path)(source))?;
            for directory in [files.bundle(), files.disk()] {
                fs::create_dir_all(&directory).map_err(file_error("make", &directory))?;
            }
            let path = files.configuration();
            let write = || fs::write(&path, serde_json::to_vec(&configuration)?);
            write().map_err(file_error("write", &path))?;
            open_console(&files)
        })
        .await
    }

    /// Raises the memory limit above the plan as soon as the engine has read the plan from it,
    /// which is before the process that carries the guest exists.
    async fn lift_memory_limit(&self, spec: &LaunchSpec) {
        let name = spec.instance.id.to_string();
        let boots = |pid: &u32| {
            process::command_line(*pid).is_some_and(|line| line.iter().any(|a| a == "boot"))
        };
        while !self.groups.processes(&name).iter().any(boots) {
            tokio::time::sleep(POLL).await;
        }
        self.limit_memory(&spec.instance.id, &spec.resources, 0);
    }

    /// Gives an instance the memory of its plan, what the engine itself needs, and `more_bytes`.
    fn limit_memory(&self, id: &InstanceId, plan: &Resources, more_bytes: u64) {
        let name = id.to_string();
        let memory_mib = u64::from(plan.memory_mib) + u64::from(MEMORY_OVERHEAD_MIB);
        let limit_bytes = memory_mib * MIB + more_bytes;
        if let Err(error) = self.groups.set_memory_limit(&name, limit_bytes) {
            tracing::warn!(instance = %name, %error, "its memory limit could not be set");
        }
    }

    /// Gives an instance that is on its way out as much memory again as it uses, and tells the plan
    /// that it had. The bytes of an image are charged to who writes them, so a guest that fills its
    /// plan would wait for the disk to take them all.
    fn make_room_for_image(&self, id: &InstanceId, files: &InstanceFiles) -> Option<Resources> {
        let note = files.note()?;
        let used = self.groups.accounting(&id.to_string()).ok()?;
        self.limit_memory(id, &note.resources, used.memory_bytes);
        Some(note.resources)
    }

    /// The call that begins an instance, or a part of beginning it.
    fn start_call<'a>(
        &self,
        spec: &'a LaunchSpec,
        files: &InstanceFiles,
        verb: Verb,
        console: File,
    ) -> Call<'a> {
        let mut arguments = vec![verb.word().to_owned()];
        if let (Origin::Image { directory, .. }, Verb::Restore | Verb::RestoreInto) =
            (&spec.origin, verb)
        {
            arguments.push(format!("--image-path={}", directory.display()));
        }
        if matches!(verb, Verb::Run | Verb::Restore | Verb::RestoreInto) {
            arguments.push("--detach".to_owned());
        }
        if verb != Verb::Start {
            arguments.push(format!("--bundle={}", files.bundle().display()));
            arguments.push(format!("--pid-file={}", files.pid().display()));
        }
        arguments.push(spec.instance.id.to_string());
        Call {
            step: verb.step(),
            instance: &spec.instance.id,
            flags: self.flags(files),
            arguments,
            console: Some(console),
            log: files.log(),
        }
    }

    /// Carries out a call that makes the engine's processes, and raises their memory limit when
    /// they are there.
    async fn call_with_lift(
        &self,
        spec: &LaunchSpec,
        call: Call<'_>,
        deadline: Deadline,
    ) -> Result<(), EngineError> {
        let mut ran = std::pin::pin!(self.runsc.run(call, deadline));
        let lift = self.lift_memory_limit(spec);
        tokio::select! {
            ran = &mut ran => {
                // It was over so quickly that its processes were not seen, or it failed.
                self.limit_memory(&spec.instance.id, &spec.resources, 0);
                ran
            }
            () = lift => ran.await,
        }
    }

    /// Processes of an instance. In its groups are all but those of a call that was cut off.
    fn processes(&self, instance: &InstanceRef) -> io::Result<BTreeSet<u32>> {
        let mut found = self.groups.processes(&instance.id.to_string());
        if InstanceFiles::new(&instance.directory).note().is_none() {
            let (root, name) = (self.root_argument(), instance.id.to_string());
            found.extend(process::find(|line| {
                line.contains(&root) && line.iter().any(|a| mentions(a, &name))
            })?);
        }
        Ok(found)
    }

    /// Kills until nothing is left to kill. Processes that have ended are listed until the kernel has
    /// let go of their memory, which takes as long as they are big.
    async fn end_processes(
        &self,
        instance: &InstanceRef,
        deadline: Deadline,
    ) -> Result<(), EngineError> {
        loop {
            let found = self.processes(instance);
            let found = found.map_err(file_error("list", Path::new("/proc")))?;
            if found.is_empty() {
                return Ok(());
            }
            // A frozen process dies only once it is thawed.
            let _ = self.groups.set_frozen(&instance.id.to_string(), false);
            for handle in process::kill(&found) {
                let ended =
                    tokio::time::timeout_at(deadline.instant().into(), process::ended(handle));
                let Ok(waited) = ended.await else {
                    return Err(EngineError::Deadline {
                        step: "ending the processes of",
                        instance: instance.id.clone(),
                    });
                };
                waited.map_err(file_error("watch", Path::new("/proc")))?;
            }
            if deadline.remaining(Instant::now()).is_zero() {
                return Err(EngineError::Remains {
                    instance: instance.id.clone(),
                    what: "a process".to_owned(),
                });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Removes the groups; the kernel lets go of them a moment after their last process.
    async fn remove_groups(&self, id: &InstanceId, deadline: Deadline) -> Result<(), EngineError> {
        loop {
            let (groups, name) = (self.groups.clone(), id.to_string());
            let removed = blocking(move || groups.remove(&name)).await;
            match removed {
                Ok(()) => return Ok(()),
                Err(e) if e.raw_os_error() == Some(nix::libc::EBUSY) => {}
                Err(source) => {
                    return Err(file_error(
                        "remove",
                        Path::new(&self.groups.oci_path(&id.to_string())),
                    )(source));
                }
            }
            if deadline.remaining(Instant::now()).is_zero() {
                return Err(EngineError::Remains {
                    instance: id.clone(),
                    what: "a control group".to_owned(),
                });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// An instance of which we have no note: whatever there is of it, it was never acknowledged.
    fn inspect_unnoted(&self, instance: &InstanceRef) -> Result<InstanceStatus, EngineError> {
        let found = self.processes(instance);
        let found = found.map_err(file_error("list", Path::new("/proc")))?;
        let listed = self.groups.list();
        let groups = listed.map_err(file_error("list", Path::new("/sys/fs/cgroup")))?;
        if found.is_empty()
            && !self.root.knows(&instance.id)
            && !groups.contains(&instance.id.to_string())
        {
            return Ok(InstanceStatus::Unknown);
        }
        let cause = ExitCause::Crashed("it was never completely started".to_owned());
        Ok(InstanceStatus::Ended(cause))
    }

    async fn set_frozen(&self, instance: &InstanceRef, frozen: bool) -> Result<(), EngineError> {
        let name = instance.id.to_string();
        let path = PathBuf::from(self.groups.oci_path(&name));
        let unknown_or = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => EngineError::Unknown {
                instance: instance.id.clone(),
            },
            _ => file_error("freeze or thaw", &path)(source),
        };
        let begun = Instant::now();
        self.groups.set_frozen(&name, frozen).map_err(unknown_or)?;
        while frozen && !self.groups.is_frozen(&name).map_err(unknown_or)? {
            if begun.elapsed() > FREEZE_MAX {
                let _ = self.groups.set_frozen(&name, false);
                return Err(EngineError::Deadline {
                    step: "freezing",
                    instance: instance.id.clone(),
                });
            }
            tokio::time::sleep(POLL).await;
            self.groups.set_frozen(&name, frozen).map_err(unknown_or)?;
        }
        Ok(())
    }
}

#[async_trait]
impl Engine for GvisorEngine {
    fn identity(&self) -> EngineIdentity {
        self.identity.clone()
    }

    async fn prepare(&self, spec: &LaunchSpec, deadline: Deadline) -> Result<(), EngineError> {
        let files = InstanceFiles::new(&spec.instance.directory);
        let console = self.lay_out(spec).await?;
        let call = self.start_call(spec, &files, Verb::Create, console);
        self.call_with_lift(spec, call, deadline).await?;
        files.write_prepared(&Prepared::of(spec))
    }

    async fn launch(&self, spec: &LaunchSpec, deadline: Deadline) -> Result<(), EngineError> {
        let files = InstanceFiles::new(&spec.instance.directory);
        let prepared = files.prepared();
        let ready = prepared == Some(Prepared::of(spec));
        if prepared.is_some() && !ready {
            // For something else than is asked for now.
            self.remove(&spec.instance, deadline).await?;
        }
        let verb = match (&spec.origin, ready) {
            (Origin::Boot { .. }, true) => Verb::Start,
            (Origin::Boot { .. }, false) => Verb::Run,
            (Origin::Image { .. }, true) => Verb::RestoreInto,
            (Origin::Image { .. }, false) => Verb::Restore,
        };
        if ready {
            let console = open_console(&files)?;
            let call = self.start_call(spec, &files, verb, console);
            self.runsc.run(call, deadline).await?;
        } else {
            let console = self.lay_out(spec).await?;
            let call = self.start_call(spec, &files, verb, console);
            self.call_with_lift(spec, call, deadline).await?;
        }
        let pid = read_file(&files.pid())?;
        let sandbox = pid.trim().parse().ok().and_then(ProcessIdentity::of);
        let sandbox = sandbox.ok_or_else(|| EngineError::Program {
            program: "runsc",
            step: verb.step(),
            instance: spec.instance.id.clone(),
            stderr: "the sandbox ended as soon as it was started".to_owned(),
        })?;
        files.write_note(&Note {
            sandbox,
            resources: spec.resources,
        })?;
        self.watched().remove(&spec.instance.id);
        self.watch(&spec.instance)?;
        Ok(())
    }

    async fn remove(&self, instance: &InstanceRef, deadline: Deadline) -> Result<(), EngineError> {
        self.watched().remove(&instance.id);
        self.end_processes(instance, deadline).await?;
        self.remove_groups(&instance.id, deadline).await?;
        self.root.clear(&instance.id)?;
        let files = InstanceFiles::new(&instance.directory);
        blocking(move || files.clear()).await?;
        // The note is gone now, so this looks at every process of the machine.
        match self.inspect_unnoted(instance)? {
            InstanceStatus::Unknown => Ok(()),
            _ => Err(EngineError::Remains {
                instance: instance.id.clone(),
                what: "a process, group or file".to_owned(),
            }),
        }
    }

    async fn inspect(&self, instance: &InstanceRef) -> Result<InstanceStatus, EngineError> {
        let files = InstanceFiles::new(&instance.directory);
        match files.note() {
            Some(note) if note.sandbox.is_alive() => Ok(InstanceStatus::Running),
            Some(_) => match files.ended() {
                Some(cause) => Ok(InstanceStatus::Ended(cause)),
                None => Ok(InstanceStatus::Ended(self.wait(instance).await?)),
            },
            None => self.inspect_unnoted(instance),
        }
    }

    async fn list(&self) -> Result<Vec<InstanceId>, EngineError> {
        let groups = self.groups.list();
        let mut names = groups.map_err(file_error("list", Path::new("/sys/fs/cgroup")))?;
        let files = self.root.list();
        names.extend(files.map_err(file_error("list", &self.root.0))?);
        let root = self.root_argument();
        let mut found = BTreeSet::new();
        let instances = process::find(|line| line.contains(&root));
        let instances = instances.map_err(file_error("list", Path::new("/proc")))?;
        for line in instances.into_iter().filter_map(process::command_line) {
            // The name is the last argument of every call, and of the sandbox itself.
            names.extend(line.last().cloned());
        }
        found.extend(names.iter().filter_map(|name| name.parse().ok()));
        Ok(found.into_iter().collect())
    }

    async fn wait(&self, instance: &InstanceRef) -> Result<ExitCause, EngineError> {
        if let Some(cause) = InstanceFiles::new(&instance.directory).ended() {
            return Ok(cause);
        }
        let mut cause = self.watch(instance)?.cause();
        let unknown = || EngineError::Unknown {
            instance: instance.id.clone(),
        };
        let told = cause
            .wait_for(Option::is_some)
            .await
            .map_err(|_| unknown())?;
        told.clone().ok_or_else(unknown)
    }

    async fn usage(&self, instance: &InstanceRef) -> Result<Usage, EngineError> {
        let disk_bytes = self.watch(instance)?.disk_bytes();
        let name = instance.id.to_string();
        let accounting = self.groups.accounting(&name).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => EngineError::Unknown {
                instance: instance.id.clone(),
            },
            _ => file_error("read", Path::new(&self.groups.oci_path(&name)))(e),
        })?;
        Ok(Usage {
            cpu_usec: accounting.cpu_usec,
            memory_bytes: accounting.memory_bytes,
            memory_cache_bytes: accounting.cache_bytes,
            disk_bytes,
        })
    }

    async fn capture(
        &self,
        instance: &InstanceRef,
        image_directory: &Path,
        after: AfterCapture,
        deadline: Deadline,
    ) -> Result<(), EngineError> {
        // A frozen sandbox would not answer.
        self.thaw(instance).await?;
        fs::create_dir_all(image_directory).map_err(file_error("make", image_directory))?;
        let files = InstanceFiles::new(&instance.directory);
        let mut arguments = vec![CAPTURE_VERB.to_owned(), "--compression=none".to_owned()];
        if after == AfterCapture::Continue {
            arguments.push("--leave-running".to_owned());
        }
        arguments.push(format!("--image-path={}", image_directory.display()));
        arguments.push(instance.id.to_string());
        let call = Call {
            step: "capturing",
            instance: &instance.id,
            flags: self.flags(&files),
            arguments,
            console: None,
            log: files.log(),
        };
        let had = match after {
            AfterCapture::Stop => self.make_room_for_image(&instance.id, &files),
            AfterCapture::Continue => None,
        };
        let captured = self.runsc.run(call, deadline).await;
        if let (Err(_), Some(plan)) = (&captured, had) {
            // Perhaps it goes on.
            self.limit_memory(&instance.id, &plan, 0);
        }
        captured
    }

    async fn settle(&self, instance: &InstanceRef, deadline: Deadline) -> Result<(), EngineError> {
        let (root, name) = (self.root_argument(), instance.id.to_string());
        loop {
            let captures = process::find(|line| {
                line.contains(&root)
                    && line.iter().any(|a| a == CAPTURE_VERB)
                    && line.iter().any(|a| mentions(a, &name))
            });
            let captures = captures.map_err(file_error("list", Path::new("/proc")))?;
            if captures.is_empty() {
                return Ok(());
            }
            if deadline.remaining(Instant::now()).is_zero() {
                return Err(EngineError::Deadline {
                    step: "waiting for the capture of",
                    instance: instance.id.clone(),
                });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn freeze(&self, instance: &InstanceRef) -> Result<(), EngineError> {
        self.set_frozen(instance, true).await
    }

    async fn thaw(&self, instance: &InstanceRef) -> Result<(), EngineError> {
        self.set_frozen(instance, false).await
    }
}

/// What is asked of `runsc` to begin an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    /// All of a boot.
    Run,
    /// All of a restore.
    Restore,
    /// Its processes, without a guest.
    Create,
    /// The guest, booted.
    Start,
    /// The guest, restored.
    RestoreInto,
}

impl Verb {
    fn word(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Restore | Self::RestoreInto => "restore",
            Self::Create => "create",
            Self::Start => "start",
        }
    }

    fn step(self) -> &'static str {
        match self {
            Self::Run | Self::Start => "booting",
            Self::Restore | Self::RestoreInto => "restoring",
            Self::Create => "preparing",
        }
    }
}

fn open_console(files: &InstanceFiles) -> Result<File, EngineError> {
    let path = files.console();
    let opened = File::options().create(true).append(true).open(&path);
    opened.map_err(file_error("open", &path))
}

/// Whether an argument names the instance, alone or as a component of a path in it.
fn mentions(argument: &str, name: &str) -> bool {
    argument == name || argument.split(['/', '=']).any(|part| part == name)
}

fn check_tag(tag: &str) -> Result<(), EngineError> {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    if tag.len() == NODE_TAG_LENGTH && tag.bytes().all(fits) {
        return Ok(());
    }
    Err(EngineError::Unsupported {
        what: format!(
            "the node tag '{tag}' must be {NODE_TAG_LENGTH} lower-case letters and digits"
        ),
    })
}

fn file_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> EngineError {
    let path = path.to_owned();
    move |source| EngineError::File { step, path, source }
}

fn read_file(path: &Path) -> Result<String, EngineError> {
    fs::read_to_string(path).map_err(file_error("read", path))
}

/// Runs file work that may take milliseconds away from the asynchronous workers.
async fn blocking<T: Send + 'static, E: Send + 'static + From<io::Error>>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => Err(io::Error::other(e).into()),
    }
}

/// Asks `runsc` for its version, which also tells whether it can be run at all.
async fn version(runsc: &Path) -> Result<String, EngineError> {
    let unusable = |why: String| EngineError::Unsupported {
        what: format!(
            "{} cannot be used ({why}); install the package 'runsc' or set SANDHOLD_RUNSC",
            runsc.display()
        ),
    };
    let mut command = tokio::process::Command::new(runsc);
    command.arg("--version").env_clear().kill_on_drop(true);
    let output = tokio::time::timeout(VERSION_MAX, command.output()).await;
    let output = output.map_err(|_| unusable("it does not answer".to_owned()))?;
    let output = output.map_err(|e| unusable(e.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let first = text.lines().next().unwrap_or_default();
    let version = first.strip_prefix("runsc version ");
    version
        .map(str::to_owned)
        .ok_or_else(|| unusable(format!("it says '{first}'")))
}

/// The processor's features as one text that is equal exactly if the features are (BC-092).
fn cpu_features(cpuinfo: &str) -> String {
    let flags = cpuinfo.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        matches!(key.trim(), "flags" | "Features").then_some(value)
    });
    let sorted: BTreeSet<&str> = flags.unwrap_or_default().split_whitespace().collect();
    sorted.into_iter().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_features_compare_whatever_their_order() {
        // BC-092
        let one = cpu_features("processor : 0\nflags\t: sse avx2 avx512f\n");
        assert_eq!(one, cpu_features("flags : avx512f sse avx2\n"));
        assert_ne!(one, cpu_features("flags : sse avx2\n"));
    }

    #[test]
    fn a_process_is_matched_by_its_whole_name() {
        assert!(mentions("x-1", "x-1"));
        assert!(mentions("--bundle=/data/x-1/bundle", "x-1"));
        assert!(!mentions("--bundle=/data/x-10/bundle", "x-1"));
    }

    #[test]
    fn tags_are_checked() {
        assert!(check_tag("ab12cd").is_ok());
        for bad in ["", "abc", "ABCDEF", "../../", "abcdefg"] {
            assert!(check_tag(bad).is_err(), "{bad:?}");
        }
    }
}
