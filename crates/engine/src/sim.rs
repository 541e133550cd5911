//! A scripted engine: instances are entries in a table, and faults happen when a script says so.
//!
//! ```text
//!   test ─▶ SimEngine::faulty(operation, nth, fault)      node ─▶ Engine trait ─▶ table
//!        ◀─ calls(), running(), crashed()                        (faults on the way)
//! ```
//!
//! Deterministic: no clock of its own and no randomness. Of a capture it writes a mark into the
//! image's directory, so that whoever moves or removes the image is believed. A clone is another
//! handle to the same machine, so that a test can throw a node away, as a crash does, and start another
//! on what is left.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use sandhold_types::Deadline;
use tokio::sync::watch;

use crate::{
    AfterCapture, Engine, EngineError, EngineIdentity, ExitCause, InstanceId, InstanceRef,
    InstanceStatus, LaunchSpec, Origin, RemovalRule, Usage,
};

/// Stands for a captured image in its directory.
const IMAGE_FILE: &str = "sim-image";

/// What can be asked of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// [`Engine::launch`].
    Launch,
    /// [`Engine::remove`].
    Remove,
    /// [`Engine::inspect`].
    Inspect,
    /// [`Engine::list`].
    List,
    /// [`Engine::usage`].
    Usage,
    /// [`Engine::capture`].
    Capture,
    /// [`Engine::freeze`].
    Freeze,
    /// [`Engine::thaw`].
    Thaw,
}

/// What goes wrong with one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An error, and nothing was done.
    Error,
    /// An error, though it was done: the reply was lost.
    LostReply,
    /// Nothing is done and nothing answered until the deadline; for ever if there is none.
    Hang,
    /// Nothing is answered until the deadline, then an error; but it is done, after that.
    LateSuccess,
    /// Success is told, and nothing was done.
    Lie,
    /// It is done, and the calling process dies at this instant: nothing is ever answered, and
    /// [`SimEngine::crashed`] becomes true. The test drops the node.
    Crash,
    /// The instance dies of it, and an error is told: a capture gone wrong.
    KillsInstance,
}

/// One call that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// What was asked.
    pub operation: Operation,
    /// For which instance; none for a listing.
    pub instance: Option<InstanceId>,
}

#[derive(Debug)]
struct Instance {
    ended: watch::Sender<Option<ExitCause>>,
    frozen: bool,
    usage: Usage,
    restored_from: Option<PathBuf>,
}

#[derive(Debug, Default)]
struct Machine {
    instances: BTreeMap<InstanceId, Instance>,
    images: BTreeSet<PathBuf>,
    faults: Vec<(Operation, u32, Fault)>,
    calls: Vec<Call>,
    crashed: bool,
    removes_awake_only: bool,
    captures_stop_it: bool,
    version: Option<String>,
}

/// An engine for tests of what is above it.
#[derive(Debug, Clone, Default)]
pub struct SimEngine {
    machine: Arc<Mutex<Machine>>,
}

impl SimEngine {
    /// A machine with nothing on it and no faults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a fault to the `nth` call of an operation from now on; the first is 1.
    #[must_use]
    pub fn faulty(self, operation: Operation, nth: u32, fault: Fault) -> Self {
        self.plan(operation, nth, fault);
        self
    }

    /// Adds an image that can be restored, as if it had been captured earlier.
    #[must_use]
    pub fn with_image(self, directory: impl Into<PathBuf>) -> Self {
        self.machine().images.insert(directory.into());
        self
    }

    /// Makes it an engine that removes no sleeping sandbox.
    #[must_use]
    pub fn removing_awake_only(self) -> Self {
        self.machine().removes_awake_only = true;
        self
    }

    /// From now on a capture ends what it captures, whatever was asked for.
    pub fn captures_stop_it(&self) {
        self.machine().captures_stop_it = true;
    }

    /// From now on it says that it is of this version.
    pub fn becomes(&self, version: &str) {
        self.machine().version = Some(version.to_owned());
    }

    /// Adds a fault, as [`Self::faulty`] does, to a machine that is in use.
    pub fn plan(&self, operation: Operation, nth: u32, fault: Fault) {
        self.machine().faults.push((operation, nth.max(1), fault));
    }

    /// Forgets the faults that no call has met yet.
    pub fn heal(&self) {
        self.machine().faults.clear();
    }

    /// Ends an instance from outside, as a crash of its processes does.
    pub fn end(&self, id: &InstanceId, cause: ExitCause) {
        if let Some(instance) = self.machine().instances.get(id) {
            instance.ended.send_replace(Some(cause));
        }
    }

    /// Sets what an instance is said to use.
    pub fn set_usage(&self, id: &InstanceId, usage: Usage) {
        if let Some(instance) = self.machine().instances.get_mut(id) {
            instance.usage = usage;
        }
    }

    /// The instances that run, frozen ones included.
    #[must_use]
    pub fn running(&self) -> Vec<InstanceId> {
        let machine = self.machine();
        let runs = |instance: &Instance| instance.ended.borrow().is_none();
        let running = machine
            .instances
            .iter()
            .filter(|(_, instance)| runs(instance));
        running.map(|(id, _)| id.clone()).collect()
    }

    /// Whether an instance is frozen.
    #[must_use]
    pub fn is_frozen(&self, id: &InstanceId) -> bool {
        self.machine().instances.get(id).is_some_and(|i| i.frozen)
    }

    /// The image that an instance was restored from, if it was.
    #[must_use]
    pub fn restored_from(&self, id: &InstanceId) -> Option<PathBuf> {
        self.machine().instances.get(id)?.restored_from.clone()
    }

    /// All calls so far, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.machine().calls.clone()
    }

    /// Whether a planned crash has happened.
    #[must_use]
    pub fn crashed(&self) -> bool {
        self.machine().crashed
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a call and finds out whether it goes wrong.
    fn begin(&self, operation: Operation, instance: Option<&InstanceId>) -> Option<Fault> {
        let mut machine = self.machine();
        machine.calls.push(Call {
            operation,
            instance: instance.cloned(),
        });
        for fault in machine.faults.iter_mut().filter(|f| f.0 == operation) {
            fault.1 = fault.1.saturating_sub(1);
        }
        let due = machine
            .faults
            .iter()
            .position(|f| f.0 == operation && f.1 == 0)?;
        Some(machine.faults.remove(due).2)
    }

    /// Carries out `effect` with whatever goes wrong with it.
    async fn call<T>(
        &self,
        operation: Operation,
        id: &InstanceId,
        deadline: Option<Deadline>,
        nothing: impl FnOnce() -> T,
        effect: impl FnOnce(&mut Machine) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let Some(fault) = self.begin(operation, Some(id)) else {
            return effect(&mut self.machine());
        };
        match fault {
            Fault::Error => Err(broken(id)),
            Fault::Lie => Ok(nothing()),
            Fault::LostReply => {
                effect(&mut self.machine())?;
                Err(broken(id))
            }
            Fault::Hang => Err(wait_until(deadline, id).await),
            Fault::LateSuccess => {
                let error = wait_until(deadline, id).await;
                effect(&mut self.machine())?;
                Err(error)
            }
            Fault::Crash => {
                {
                    let mut machine = self.machine();
                    machine.crashed = true;
                    effect(&mut machine)?;
                }
                std::future::pending().await
            }
            Fault::KillsInstance => {
                self.end(id, ExitCause::Crashed("as the script says".to_owned()));
                Err(broken(id))
            }
        }
    }

    async fn set_frozen(
        &self,
        operation: Operation,
        id: &InstanceId,
        frozen: bool,
    ) -> Result<(), EngineError> {
        self.call(
            operation,
            id,
            None,
            || (),
            |machine| {
                machine.living(id)?.frozen = frozen;
                Ok(())
            },
        )
        .await
    }
}

impl Machine {
    fn living(&mut self, id: &InstanceId) -> Result<&mut Instance, EngineError> {
        self.instances
            .get_mut(id)
            .filter(|instance| instance.ended.borrow().is_none())
            .ok_or_else(|| EngineError::Unknown {
                instance: id.clone(),
            })
    }

    fn launch(&mut self, spec: &LaunchSpec) -> Result<(), EngineError> {
        let id = &spec.instance.id;
        if self.instances.contains_key(id) {
            return Err(broken(id));
        }
        let restored_from = match &spec.origin {
            Origin::Boot { .. } => None,
            Origin::Image { directory, .. }
                if self.images.contains(directory) || directory.join(IMAGE_FILE).exists() =>
            {
                Some(directory.clone())
            }
            Origin::Image { .. } => return Err(broken(id)),
        };
        let instance = Instance {
            ended: watch::Sender::new(None),
            frozen: false,
            usage: Usage::default(),
            restored_from,
        };
        self.instances.insert(id.clone(), instance);
        Ok(())
    }
}

fn broken(id: &InstanceId) -> EngineError {
    EngineError::Program {
        program: "sim",
        step: "following the script for",
        instance: id.clone(),
        stderr: "the script says so".to_owned(),
    }
}

async fn wait_until(deadline: Option<Deadline>, id: &InstanceId) -> EngineError {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.instant().into()).await,
        None => std::future::pending().await,
    }
    EngineError::Deadline {
        step: "waiting for",
        instance: id.clone(),
    }
}

#[async_trait]
impl Engine for SimEngine {
    fn identity(&self) -> EngineIdentity {
        EngineIdentity {
            name: "sim".to_owned(),
            version: self
                .machine()
                .version
                .clone()
                .unwrap_or_else(|| "1".to_owned()),
            cpu_features: String::new(),
        }
    }

    async fn launch(&self, spec: &LaunchSpec, deadline: Deadline) -> Result<(), EngineError> {
        let id = &spec.instance.id;
        let effect = |machine: &mut Machine| machine.launch(spec);
        self.call(Operation::Launch, id, Some(deadline), || (), effect)
            .await
    }

    async fn remove(&self, instance: &InstanceRef, deadline: Deadline) -> Result<(), EngineError> {
        let id = &instance.id;
        let effect = |machine: &mut Machine| {
            if let Some(removed) = machine.instances.remove(id) {
                let killed = ExitCause::Crashed("removed".to_owned());
                removed.ended.send_if_modified(|cause| {
                    let first = cause.is_none();
                    cause.get_or_insert(killed);
                    first
                });
            }
            Ok(())
        };
        self.call(Operation::Remove, id, Some(deadline), || (), effect)
            .await
    }

    async fn inspect(&self, instance: &InstanceRef) -> Result<InstanceStatus, EngineError> {
        let id = &instance.id;
        let effect = |machine: &mut Machine| {
            let known = machine.instances.get(id);
            Ok(known.map_or(InstanceStatus::Unknown, |instance| {
                let ended = instance.ended.borrow().clone();
                ended.map_or(InstanceStatus::Running, InstanceStatus::Ended)
            }))
        };
        self.call(
            Operation::Inspect,
            id,
            None,
            || InstanceStatus::Unknown,
            effect,
        )
        .await
    }

    async fn list(&self) -> Result<Vec<InstanceId>, EngineError> {
        match self.begin(Operation::List, None) {
            None => Ok(self.machine().instances.keys().cloned().collect()),
            // An empty listing that is not true.
            Some(Fault::Lie) => Ok(Vec::new()),
            Some(Fault::Hang | Fault::LateSuccess) => std::future::pending().await,
            Some(Fault::Crash) => {
                self.machine().crashed = true;
                std::future::pending().await
            }
            Some(Fault::Error | Fault::LostReply | Fault::KillsInstance) => {
                Err(std::io::Error::other("the script says so").into())
            }
        }
    }

    async fn wait(&self, instance: &InstanceRef) -> Result<ExitCause, EngineError> {
        let unknown = || EngineError::Unknown {
            instance: instance.id.clone(),
        };
        let known = self
            .machine()
            .instances
            .get(&instance.id)
            .map(|i| i.ended.subscribe());
        let mut ended = known.ok_or_else(unknown)?;
        let cause = ended
            .wait_for(Option::is_some)
            .await
            .map_err(|_| unknown())?;
        cause.clone().ok_or_else(unknown)
    }

    async fn usage(&self, instance: &InstanceRef) -> Result<Usage, EngineError> {
        let id = &instance.id;
        let effect = |machine: &mut Machine| Ok(machine.living(id)?.usage);
        self.call(Operation::Usage, id, None, Usage::default, effect)
            .await
    }

    async fn capture(
        &self,
        instance: &InstanceRef,
        image_directory: &Path,
        after: AfterCapture,
        deadline: Deadline,
    ) -> Result<(), EngineError> {
        let id = &instance.id;
        let effect = |machine: &mut Machine| {
            let stops = after == AfterCapture::Stop || machine.captures_stop_it;
            let living = machine.living(id)?;
            if stops {
                living.ended.send_replace(Some(ExitCause::Exited(0)));
            }
            fs::create_dir_all(image_directory)?;
            fs::write(image_directory.join(IMAGE_FILE), id.to_string())?;
            Ok(())
        };
        self.call(Operation::Capture, id, Some(deadline), || (), effect)
            .await
    }

    fn removal_rule(&self) -> RemovalRule {
        if self.machine().removes_awake_only {
            RemovalRule::AwakeOnly
        } else {
            RemovalRule::Asleep
        }
    }

    async fn freeze(&self, instance: &InstanceRef) -> Result<(), EngineError> {
        self.set_frozen(Operation::Freeze, &instance.id, true).await
    }

    async fn thaw(&self, instance: &InstanceRef) -> Result<(), EngineError> {
        self.set_frozen(Operation::Thaw, &instance.id, false).await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sandhold_types::{Incarnation, Resources, SandboxId, SeededEntropy};

    use super::*;

    fn spec() -> LaunchSpec {
        LaunchSpec {
            instance: InstanceRef {
                id: InstanceId {
                    sandbox: SandboxId::generate(&SeededEntropy::new(1)),
                    incarnation: Incarnation::INITIAL,
                },
                directory: "/nowhere".into(),
            },
            root_fs: "/root".into(),
            origin: Origin::Boot {
                command: vec!["/agent".into()],
                environment: Vec::new(),
            },
            network_namespace: "/ns".into(),
            resources: Resources::default(),
            hostname: "x".into(),
        }
    }

    fn soon() -> Deadline {
        Deadline::after(
            tokio::time::Instant::now().into_std(),
            Duration::from_secs(5),
        )
    }

    async fn status(engine: &SimEngine) -> InstanceStatus {
        engine.inspect(&spec().instance).await.unwrap()
    }

    #[tokio::test]
    async fn without_faults_it_does_what_it_says() {
        let engine = SimEngine::new();
        engine.launch(&spec(), soon()).await.unwrap();
        assert_eq!(status(&engine).await, InstanceStatus::Running);
        engine.freeze(&spec().instance).await.unwrap();
        assert!(engine.is_frozen(&spec().instance.id));
        engine.end(&spec().instance.id, ExitCause::OutOfMemory);
        assert_eq!(
            engine.wait(&spec().instance).await.unwrap(),
            ExitCause::OutOfMemory
        );
        engine.remove(&spec().instance, soon()).await.unwrap();
        engine.remove(&spec().instance, soon()).await.unwrap();
        assert_eq!(status(&engine).await, InstanceStatus::Unknown);
    }

    #[tokio::test(start_paused = true)]
    async fn each_fault_leaves_what_it_says() {
        // R-L10: what was told and what is true differ, and the truth can be asked for.
        let cases = [
            (Fault::Error, false, InstanceStatus::Unknown),
            (Fault::LostReply, false, InstanceStatus::Running),
            (Fault::Hang, false, InstanceStatus::Unknown),
            (Fault::LateSuccess, false, InstanceStatus::Running),
            (Fault::Lie, true, InstanceStatus::Unknown),
        ];
        for (fault, told_success, truth) in cases {
            let engine = SimEngine::new().faulty(Operation::Launch, 1, fault);
            let told = engine.launch(&spec(), soon()).await;
            assert_eq!(told.is_ok(), told_success, "{fault:?}");
            assert_eq!(status(&engine).await, truth, "{fault:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_crash_never_answers_and_the_machine_outlives_it() {
        let engine = SimEngine::new().faulty(Operation::Launch, 1, Fault::Crash);
        let spec = spec();
        let launch = engine.launch(&spec, soon());
        let waited = tokio::time::timeout(Duration::from_secs(3600), launch).await;
        assert!(waited.is_err());
        assert!(engine.crashed());
        assert_eq!(engine.clone().running(), vec![spec.instance.id]);
    }

    #[tokio::test]
    async fn only_the_chosen_call_fails() {
        let engine = SimEngine::new().faulty(Operation::Inspect, 2, Fault::Error);
        assert!(engine.inspect(&spec().instance).await.is_ok());
        assert!(engine.inspect(&spec().instance).await.is_err());
        assert!(engine.inspect(&spec().instance).await.is_ok());
        assert_eq!(engine.calls().len(), 3);
    }
}
