//! A platform in memory that behaves as the real one does towards the API: lifetimes move and end,
//! ended sandboxes are remembered with their reason, creates can be held up or made to fail.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use sandhold_platform::*;
use sandhold_types::*;
use tokio::sync::Semaphore;

/// Templates `base` (id `tpl1`) and `code-interpreter-v1` (`tpl2`) for everybody, and `team/own:v1`
/// (`tpl3`) of tenant `a`.
#[derive(Debug)]
pub struct MemoryTemplates(Mutex<Vec<Arc<TemplateView>>>);

impl MemoryTemplates {
    pub fn new() -> Self {
        let template = |id: &str, name: &str, owner: Option<&str>| {
            Arc::new(TemplateView {
                id: id.parse().unwrap(),
                build: format!("{id}-build").parse().unwrap(),
                names: vec![name.to_owned()],
                owner: owner.map(|o| o.parse().unwrap()),
                resources: Resources::default(),
                built_at: Timestamp::from_unix_ms(1_000),
                size_bytes: 1,
                warm: Warmth::Warm,
            })
        };
        Self(Mutex::new(vec![
            template("tpl1", "base", None),
            template("tpl2", "code-interpreter-v1", None),
            template("tpl3", "team/own:v1", Some("a")),
        ]))
    }

    fn all(&self) -> MutexGuard<'_, Vec<Arc<TemplateView>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn serves(template: &TemplateView, namespace: &Namespace) -> bool {
    template
        .owner
        .as_ref()
        .is_none_or(|owner| owner == namespace)
}

#[async_trait]
impl Templates for MemoryTemplates {
    fn resolve(&self, namespace: &Namespace, reference: &str) -> Option<Arc<TemplateView>> {
        let meant = |t: &&Arc<TemplateView>| {
            serves(t, namespace)
                && (t.id.as_str() == reference || t.names.iter().any(|name| name == reference))
        };
        self.all().iter().find(meant).cloned()
    }

    fn list(&self, namespace: &Namespace) -> Vec<Arc<TemplateView>> {
        let all = self.all();
        all.iter()
            .filter(|t| serves(t, namespace))
            .cloned()
            .collect()
    }

    async fn delete(&self, namespace: &Namespace, reference: &str) -> Result<(), PlatformError> {
        let Some(found) = self.resolve(namespace, reference) else {
            return Err(PlatformError::TemplateNotFound(reference.to_owned()));
        };
        if found.owner.is_none() {
            let text = format!("template '{reference}' belongs to the platform");
            return Err(PlatformError::Forbidden(text));
        }
        self.all().retain(|template| template.id != found.id);
        Ok(())
    }
}

/// Why the next create fails.
pub type Failure = fn() -> PlatformError;

#[derive(Debug)]
struct Record {
    view: SandboxView,
    history: Vec<HistoryEvent>,
}

#[derive(Debug)]
pub struct MemoryPlatform {
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    templates: Arc<MemoryTemplates>,
    sandboxes: Mutex<BTreeMap<SandboxId, Record>>,
    /// Each create takes one; without any, creates wait.
    pub turns: Semaphore,
    /// Creates that have come in.
    pub creates: Mutex<Vec<CreateSandbox>>,
    /// What the next create answers.
    pub failure: Mutex<Option<Failure>>,
    /// What the next kill answers.
    pub kill_failure: Mutex<Option<Failure>>,
    /// What the next pause, resume or connect answers.
    pub sleep_failure: Mutex<Option<Failure>>,
    /// Pauses that have come in.
    pub pauses: Mutex<Vec<Pause>>,
    /// Resumes that have woken a sandbox.
    pub resumes: Mutex<Vec<Resume>>,
    /// Snapshots that are there.
    pub snapshots: Mutex<Vec<(SnapshotKind, Arc<SnapshotView>)>>,
    /// Of the creates to come, this one fails.
    pub failing_create: Mutex<Option<usize>>,
}

impl MemoryPlatform {
    pub fn new(
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
        templates: Arc<MemoryTemplates>,
    ) -> Self {
        Self {
            clock,
            entropy,
            templates,
            sandboxes: Mutex::default(),
            turns: Semaphore::new(Semaphore::MAX_PERMITS >> 1),
            creates: Mutex::default(),
            failure: Mutex::default(),
            kill_failure: Mutex::default(),
            sleep_failure: Mutex::default(),
            pauses: Mutex::default(),
            resumes: Mutex::default(),
            snapshots: Mutex::default(),
            failing_create: Mutex::default(),
        }
    }

    /// From now on creates wait for [`Self::turns`].
    pub fn hold_creates(&self) {
        self.turns.forget_permits(Semaphore::MAX_PERMITS);
    }

    /// How many creates have come in.
    pub fn creates_seen(&self) -> usize {
        self.creates.lock().unwrap().len()
    }

    /// The newest create that has come in.
    pub fn last_create(&self) -> CreateSandbox {
        self.creates.lock().unwrap().last().unwrap().clone()
    }

    /// Puts a sandbox into a state, as the node would.
    pub fn set_state(&self, id: &str, state: SandboxState) {
        let mut all = self.all();
        let record = all.get_mut(&id.parse().unwrap()).unwrap();
        record.view.state = state;
    }

    /// Ends a sandbox, as the node would.
    pub fn end(&self, id: &str, reason: EndReason) {
        let now = self.clock.now();
        let mut all = self.all();
        end(all.get_mut(&id.parse().unwrap()).unwrap(), reason, now);
    }

    /// Forgets a sandbox that ended long ago.
    pub fn forget(&self, id: &str) {
        self.all().remove(&id.parse().unwrap());
    }

    /// The records, after what is overdue has ended.
    fn all(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Record>> {
        let now = self.clock.now();
        let mut all = self
            .sandboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for record in all.values_mut() {
            let view = &record.view;
            let clock_runs = view.ended.is_none() && view.state != SandboxState::Paused;
            if clock_runs && view.lifetime.is_over(view.last_activity, now) {
                end(record, EndReason::TimedOut, now);
            }
        }
        all
    }

    fn change<T>(
        &self,
        id: &SandboxId,
        work: impl FnOnce(&mut Record) -> T,
    ) -> Result<T, PlatformError> {
        let mut all = self.all();
        match all.get_mut(id) {
            Some(record) if record.view.ended.is_none() => Ok(work(record)),
            _ => Err(PlatformError::NotFound(id.clone())),
        }
    }

    fn fail_if_told(&self) -> Result<(), PlatformError> {
        let failure = self.sleep_failure.lock().unwrap().take();
        failure.map_or(Ok(()), |failure| Err(failure()))
    }

    fn fail_if_its_turn(&self) -> Result<(), PlatformError> {
        let mut failing = self.failing_create.lock().unwrap();
        match failing.take() {
            Some(0) => Err(PlatformError::Engine {
                step: "starting it",
                source: "it was told to fail".into(),
            }),
            Some(later) => {
                *failing = Some(later - 1);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// The newest resume that woke a sandbox.
    pub fn last_resume(&self) -> Resume {
        *self.resumes.lock().unwrap().last().unwrap()
    }

    /// The newest pause that put one to sleep.
    pub fn last_pause(&self) -> Pause {
        *self.pauses.lock().unwrap().last().unwrap()
    }

    fn make(&self, request: CreateSandbox, template: &TemplateView) -> Record {
        let (entropy, now) = (&*self.entropy, self.clock.now());
        let named = request.template != template.id.as_str();
        let private = request.public_traffic == PublicTraffic::TokenRequired;
        let maker = Actor::Client {
            key: request.owner.key.clone(),
            request: request.request.clone(),
        };
        let view = SandboxView {
            id: SandboxId::generate(entropy),
            owner: request.owner,
            template: TemplateStamp {
                id: template.id.clone(),
                build: template.build.clone(),
                alias: named.then_some(request.template),
            },
            state: SandboxState::Running,
            incarnation: Incarnation::INITIAL,
            started_at: now,
            lifetime: request.lifetime,
            auto_resume: request.auto_resume,
            busy_with: request.busy_with,
            timeout_keeps: request.timeout_keeps,
            sleep: None,
            last_activity: now,
            resources: template.resources,
            metadata: request.metadata,
            egress: request.egress,
            public_traffic: request.public_traffic,
            mask_request_host: request.mask_request_host,
            domain: request.domain,
            envd_version: String::from("0.6.13"),
            access_token: Token::generate("", entropy),
            traffic_token: private.then(|| Token::generate("", entropy)),
            line: Vec::new(),
            ended: None,
        };
        let event = |state, reason: &str| HistoryEvent {
            at: now,
            state,
            incarnation: Incarnation::INITIAL,
            actor: maker.clone(),
            reason: reason.to_owned(),
        };
        let history = vec![
            event(SandboxState::Creating, "create"),
            event(SandboxState::Running, "ready"),
        ];
        Record { view, history }
    }
}

fn may(view: &SandboxView, operation: Operation) -> Result<(), PlatformError> {
    let id = view.id.clone();
    match view.state.begin(operation) {
        Ok(_) => Ok(()),
        Err(TransitionRefused::AlreadySo(state)) => Err(PlatformError::AlreadySo { id, state }),
        Err(TransitionRefused::Busy(state)) => Err(PlatformError::Busy {
            id,
            state,
            retry_after: Duration::from_secs(2),
        }),
        Err(TransitionRefused::NotAllowed(state)) => Err(PlatformError::Conflict { id, state }),
        Err(TransitionRefused::Gone) => Err(PlatformError::NotFound(id)),
    }
}

fn note(record: &mut Record, state: SandboxState, actor: Actor, at: Timestamp) {
    record.view.state = state;
    record.history.push(HistoryEvent {
        at,
        state,
        incarnation: record.view.incarnation,
        actor,
        reason: format!("it is {state}"),
    });
}

/// Wakes as the node does: a deadline is as long as asked for, or at least the automatic minimum.
fn wake(record: &mut Record, resume: Resume, by: Actor, now: Timestamp) {
    let view = &mut record.view;
    let from_now = |ms: u64| now.plus(Duration::from_millis(ms));
    match (&mut view.lifetime.clocking, resume.lifetime) {
        (Clocking::Deadline { end }, NewLifetime::After(ms)) => {
            *end = ms.map_or(Timestamp::FAR_FUTURE, from_now);
        }
        (Clocking::Deadline { end }, NewLifetime::AsMade) => {
            *end = (*end).max(from_now(AUTO_RESUME_MIN_MS));
        }
        (Clocking::Idle { window_ms }, NewLifetime::After(ms)) => *window_ms = ms,
        (Clocking::Idle { .. }, NewLifetime::AsMade) => {}
    }
    if let Some(on_timeout) = resume.on_timeout {
        view.lifetime.on_timeout = on_timeout;
    }
    view.sleep = None;
    view.last_activity = now;
    view.incarnation = view.incarnation.next();
    note(record, SandboxState::Running, by, now);
}

fn end(record: &mut Record, reason: EndReason, now: Timestamp) {
    record.history.push(HistoryEvent {
        at: now,
        state: SandboxState::Killed,
        incarnation: record.view.incarnation,
        actor: Actor::Sweeper,
        reason: reason.to_string(),
    });
    record.view.state = SandboxState::Killed;
    record.view.ended = Some(Ended { at: now, reason });
}

fn apply(view: &mut SandboxView, change: LifetimeChange, now: Timestamp) {
    let from_now = |ms: Option<u64>| {
        ms.map_or(Timestamp::FAR_FUTURE, |ms| {
            now.plus(Duration::from_millis(ms))
        })
    };
    match (change, &mut view.lifetime.clocking) {
        (LifetimeChange::Replace { after_ms }, Clocking::Deadline { end }) => {
            *end = from_now(after_ms)
        }
        (LifetimeChange::Replace { after_ms }, Clocking::Idle { window_ms }) => {
            *window_ms = after_ms
        }
        (LifetimeChange::Extend { after_ms: Some(ms) }, Clocking::Deadline { end }) => {
            *end = (*end).max(from_now(Some(ms)));
        }
        (LifetimeChange::Extend { after_ms: Some(ms) }, Clocking::Idle { window_ms }) => {
            *window_ms = window_ms.map(|old| old.max(ms));
        }
        (LifetimeChange::Extend { after_ms: None }, _) => {}
        (LifetimeChange::OnTimeout(what), _) => view.lifetime.on_timeout = what,
    }
    view.last_activity = now;
}

#[async_trait]
impl Platform for MemoryPlatform {
    async fn create(
        &self,
        request: CreateSandbox,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        self.creates.lock().unwrap().push(request.clone());
        let turn = tokio::time::timeout_at(deadline.instant().into(), self.turns.acquire()).await;
        turn.map_err(|_| PlatformError::Deadline { step: "starting" })?
            .unwrap()
            .forget();
        if let Some(failure) = self.failure.lock().unwrap().take() {
            return Err(failure());
        }
        self.fail_if_its_turn()?;
        let owner = &request.owner;
        let snapshots = self.snapshots.lock().unwrap().clone();
        let from = snapshots
            .iter()
            .map(|(_, snapshot)| snapshot)
            .find(|snapshot| {
                let full =
                    |name: &SnapshotName| format!("{}/{name}", owner.namespace) == request.template;
                snapshot.id.as_str() == request.template || snapshot.names.iter().any(full)
            });
        let meant = from.map_or(request.template.as_str(), |snapshot| {
            assert_eq!(snapshot.owner.env, owner.env);
            snapshot.template.id.as_str()
        });
        let found = self.templates.resolve(&owner.namespace, meant);
        let template =
            found.ok_or_else(|| PlatformError::TemplateNotFound(request.template.clone()))?;
        let record = self.make(request, &template);
        let view = Arc::new(record.view.clone());
        self.all().insert(view.id.clone(), record);
        Ok(view)
    }

    fn list(&self) -> Vec<Arc<SandboxView>> {
        let all = self.all();
        let alive = all.values().filter(|record| record.view.ended.is_none());
        let mut views: Vec<_> = alive.map(|record| Arc::new(record.view.clone())).collect();
        views.sort_by_key(|view| view.started_at);
        views
    }

    fn get(&self, id: &SandboxId) -> Option<Arc<SandboxView>> {
        self.all()
            .get(id)
            .map(|record| Arc::new(record.view.clone()))
    }

    async fn kill(&self, id: &SandboxId, by: Actor, _: Deadline) -> Result<(), PlatformError> {
        if let Some(failure) = self.kill_failure.lock().unwrap().take() {
            return Err(failure());
        }
        let now = self.clock.now();
        self.change(id, |record| end(record, EndReason::Killed { by }, now))
    }

    async fn pause(
        &self,
        id: &SandboxId,
        pause: Pause,
        by: Actor,
        _: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        self.fail_if_told()?;
        let now = self.clock.now();
        self.change(id, |record| {
            may(&record.view, Operation::Pause)?;
            self.pauses.lock().unwrap().push(pause);
            record.view.sleep = Some(Sleep {
                since: now,
                keeps: pause.keeps,
            });
            note(record, SandboxState::Paused, by, now);
            Ok(Arc::new(record.view.clone()))
        })?
    }

    async fn resume(
        &self,
        id: &SandboxId,
        resume: Resume,
        by: Actor,
        _: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        self.fail_if_told()?;
        let now = self.clock.now();
        self.change(id, |record| {
            may(&record.view, Operation::Resume)?;
            self.resumes.lock().unwrap().push(resume);
            wake(record, resume, by, now);
            Ok(Arc::new(record.view.clone()))
        })?
    }

    async fn connect(
        &self,
        id: &SandboxId,
        running: LifetimeChange,
        resume: Resume,
        by: Actor,
        deadline: Deadline,
    ) -> Result<(Arc<SandboxView>, Woken), PlatformError> {
        match self.resume(id, resume, by.clone(), deadline).await {
            Err(PlatformError::AlreadySo { .. }) => {
                let changed = self.change_lifetime(id, running, by, deadline).await?;
                Ok((changed, Woken::No))
            }
            resumed => Ok((resumed?, Woken::Yes)),
        }
    }

    async fn change_lifetime(
        &self,
        id: &SandboxId,
        change: LifetimeChange,
        _: Actor,
        _: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        let now = self.clock.now();
        self.change(id, |record| {
            apply(&mut record.view, change, now);
            Arc::new(record.view.clone())
        })
    }

    async fn change_egress(
        &self,
        id: &SandboxId,
        egress: Egress,
        _: Actor,
        _: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        self.change(id, |record| {
            record.view.egress = egress;
            Arc::new(record.view.clone())
        })
    }

    async fn metrics(
        &self,
        id: &SandboxId,
        range: TimeRange,
    ) -> Result<Vec<MetricSample>, PlatformError> {
        let view = self
            .get(id)
            .ok_or_else(|| PlatformError::NotFound(id.clone()))?;
        let sample = |n: u64| MetricSample {
            at: view.started_at.plus(Duration::from_secs(n * 5)),
            cpu_count: view.resources.cpu_count(),
            cpu_used_pct: 12.5,
            memory_used: 100 + n,
            memory_total: 1 << 30,
            memory_cache: 7,
            disk_used: 9,
            disk_total: 1 << 32,
        };
        let samples = (0..3).map(sample);
        Ok(samples.filter(|sample| range.contains(sample.at)).collect())
    }

    async fn logs(&self, id: &SandboxId, limit: usize) -> Result<Vec<LogLine>, PlatformError> {
        let view = self
            .get(id)
            .ok_or_else(|| PlatformError::NotFound(id.clone()))?;
        let line = |(n, message): (u64, &str)| LogLine {
            at: view.started_at.plus(Duration::from_secs(n)),
            level: "info",
            message: message.to_owned(),
        };
        let mut lines: Vec<_> = (0..).zip(["created", "ready"]).map(line).collect();
        lines.drain(..lines.len().saturating_sub(limit));
        Ok(lines)
    }

    async fn history(&self, id: &SandboxId) -> Result<Vec<HistoryEvent>, PlatformError> {
        let all = self.all();
        let record = all
            .get(id)
            .ok_or_else(|| PlatformError::NotFound(id.clone()))?;
        Ok(record.history.clone())
    }
}

#[async_trait]
impl TimeTravel for MemoryPlatform {
    async fn take_snapshot(
        &self,
        sandbox: &SandboxId,
        wanted: TakeSnapshot,
        _: Actor,
        _: Deadline,
    ) -> Result<Arc<SnapshotView>, PlatformError> {
        self.fail_if_told()?;
        let now = self.clock.now();
        let id = SnapshotId::generate(&*self.entropy);
        let taken = self.change(sandbox, |record| {
            may(&record.view, Operation::Snapshot)?;
            let ancestors = record.view.line.clone();
            if wanted.kind == SnapshotKind::Kept {
                record.view.line.insert(0, id.clone());
            }
            Ok(Arc::new(SnapshotView {
                id,
                owner: record.view.owner.clone(),
                names: wanted.name.into_iter().collect(),
                source: sandbox.clone(),
                template: record.view.template.clone(),
                ancestors,
                resources: record.view.resources,
                taken_at: now,
                source_paused_ms: 1,
            }))
        })??;
        let mut all = self.snapshots.lock().unwrap();
        all.push((wanted.kind, taken.clone()));
        Ok(taken)
    }

    fn snapshots(&self) -> Vec<Arc<SnapshotView>> {
        let all = self.snapshots.lock().unwrap();
        let kept = all.iter().filter(|(kind, _)| *kind == SnapshotKind::Kept);
        kept.map(|(_, snapshot)| snapshot.clone()).collect()
    }

    fn find_snapshot(
        &self,
        namespace: &Namespace,
        env: &EnvName,
        reference: &str,
    ) -> Option<Arc<SnapshotView>> {
        let meant = |snapshot: &Arc<SnapshotView>| {
            let full = |name: &SnapshotName| format!("{namespace}/{name}") == reference;
            let named = snapshot.names.iter().any(full);
            let own = snapshot.owner.namespace == *namespace && snapshot.owner.env == *env;
            own && (named || snapshot.id.as_str() == reference)
        };
        TimeTravel::snapshots(self).into_iter().find(meant)
    }

    fn storage(&self) -> Storage {
        Storage {
            snapshots: self.snapshots.lock().unwrap().len(),
            ..Storage::default()
        }
    }

    fn lineage(&self, id: &SnapshotId) -> Option<Lineage> {
        let all = TimeTravel::snapshots(self);
        let snapshot = all.iter().find(|snapshot| snapshot.id == *id)?.clone();
        let ancestors = snapshot.ancestors.iter().map(|id| Descent {
            id: id.clone(),
            snapshot: all.iter().find(|snapshot| snapshot.id == *id).cloned(),
        });
        Some(Lineage {
            sizes: SnapshotSizes::default(),
            ancestors: ancestors.collect(),
            descendants: all
                .iter()
                .filter(|snapshot| snapshot.ancestors.contains(id))
                .cloned()
                .collect(),
            sandboxes: self
                .list()
                .into_iter()
                .filter(|view| view.line.contains(id))
                .collect(),
            snapshot,
        })
    }

    async fn delete_snapshot(&self, id: &SnapshotId) -> Result<(), PlatformError> {
        let mut all = self.snapshots.lock().unwrap();
        let before = all.len();
        all.retain(|(_, snapshot)| snapshot.id != *id);
        if all.len() == before {
            return Err(PlatformError::SnapshotNotFound(id.to_string()));
        }
        Ok(())
    }

    async fn roll_back(
        &self,
        sandbox: &SandboxId,
        to: &SnapshotId,
        by: Actor,
        _: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        self.fail_if_told()?;
        let now = self.clock.now();
        let all = TimeTravel::snapshots(self);
        let unknown = || PlatformError::SnapshotNotFound(to.to_string());
        let snapshot = all.iter().find(|s| s.id == *to).ok_or_else(unknown)?;
        self.change(sandbox, |record| {
            may(&record.view, Operation::RollBack)?;
            if snapshot.source != *sandbox && !record.view.line.contains(to) {
                return Err(unknown());
            }
            record.view.line = snapshot.ancestors.clone();
            record.view.line.insert(0, to.clone());
            record.view.incarnation = record.view.incarnation.next();
            note(record, SandboxState::Running, by, now);
            Ok(Arc::new(record.view.clone()))
        })?
    }
}
