//! The node as a [`Platform`].

use std::{fs, sync::Arc};

use async_trait::async_trait;
use sandhold_platform::{
    CreateSandbox, Dozes, Egress, HistoryEvent, LifetimeChange, LogLine, MetricSample, Pause,
    Platform, PlatformError, Resume, SandboxView, TimeRange, Woken,
};
use sandhold_types::{Actor, Deadline, Incarnation, SandboxId, Token};
use tokio::sync::oneshot;

use crate::{
    actor::{Beginning, Command, Reply},
    capacity,
    create::Source,
    meter,
    node::Node,
    record::{Record, Tokens},
    rolling_back::check_engine,
};

/// The most of a console log that is read for one answer.
const LOG_BYTES_MAX: u64 = 1024 * 1024;

#[async_trait]
impl Platform for Node {
    async fn create(
        &self,
        request: CreateSandbox,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        let dependencies = self.dependencies();
        let source = self.source(&request)?;
        let resources = source.resources();
        self.check_room(&resources, source.resident_mib())?;
        let entropy = dependencies.entropy.as_ref();
        let tokens = Tokens {
            access: Token::generate("ea_", entropy),
            traffic: Token::generate("ta_", entropy),
            control: Token::generate("", entropy),
            boot: Token::new(String::new()),
        };
        let template = source.stamp(&request.template);
        let blank = source
            .fits_blank()
            .then(|| self.shelf().take(&source.build))
            .flatten();
        let id = match &blank {
            Some(blank) => blank.id.clone(),
            None => SandboxId::generate(entropy),
        };
        let now = dependencies.clock.now();
        let mut record = Record::new(id, request, template, resources, tokens, now);
        source.hand_down(&mut record);
        let (reply, answer) = oneshot::channel();
        let beginning = Beginning::Create {
            blank,
            source,
            deadline,
            reply,
        };
        self.start_actor(record, beginning)
            .map_err(|full| PlatformError::Capacity {
                what: format!("{} sandboxes is the most on this node", full.sandboxes_max),
            })?;
        answer.await.unwrap_or(Err(PlatformError::ShuttingDown))
    }

    fn list(&self) -> Vec<Arc<SandboxView>> {
        let mut views: Vec<_> = self
            .registry()
            .entries()
            .iter()
            .map(|entry| entry.view())
            .collect();
        views.sort_by(|a, b| (a.started_at, &a.id).cmp(&(b.started_at, &b.id)));
        views
    }

    fn dozes(&self) -> Dozes {
        let entries = self.registry().entries();
        let counts = &self.dependencies().dozes;
        Dozes {
            now: entries
                .iter()
                .filter(|entry| entry.doze.is_frozen())
                .count(),
            dozed_total: counts.dozed(),
            thawed_total: counts.thawed(),
        }
    }

    fn get(&self, id: &SandboxId) -> Option<Arc<SandboxView>> {
        let live = self.registry().live(id).map(|entry| entry.view());
        live.or_else(|| {
            self.registry()
                .ended(id)
                .map(|record| Arc::new(record.view()))
        })
    }

    async fn kill(
        &self,
        id: &SandboxId,
        by: Actor,
        deadline: Deadline,
    ) -> Result<(), PlatformError> {
        self.ask(id, deadline, |reply| Command::Kill {
            by,
            deadline,
            reply,
        })
        .await
    }

    async fn pause(
        &self,
        id: &SandboxId,
        pause: Pause,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        self.ask(id, deadline, |reply| Command::Pause { pause, by, reply })
            .await
    }

    async fn resume(
        &self,
        id: &SandboxId,
        resume: Resume,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        if self.is_stopping() {
            return Err(PlatformError::ShuttingDown);
        }
        self.ask(id, deadline, |reply| Command::Resume {
            resume,
            by,
            deadline,
            reply,
        })
        .await
    }

    async fn connect(
        &self,
        id: &SandboxId,
        running: LifetimeChange,
        resume: Resume,
        by: Actor,
        deadline: Deadline,
    ) -> Result<(Arc<SandboxView>, Woken), PlatformError> {
        self.ask(id, deadline, |reply| Command::Connect {
            running,
            resume,
            by,
            deadline,
            reply,
        })
        .await
    }

    async fn change_lifetime(
        &self,
        id: &SandboxId,
        change: LifetimeChange,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        self.ask(id, deadline, |reply| Command::ChangeLifetime {
            change,
            by,
            reply,
        })
        .await
    }

    async fn change_egress(
        &self,
        id: &SandboxId,
        egress: Egress,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Arc<SandboxView>, PlatformError> {
        self.ask(id, deadline, |reply| Command::ChangeEgress {
            egress,
            by,
            reply,
        })
        .await
    }

    async fn metrics(
        &self,
        id: &SandboxId,
        range: TimeRange,
    ) -> Result<Vec<MetricSample>, PlatformError> {
        let entry = self
            .registry()
            .live(id)
            .ok_or_else(|| PlatformError::NotFound(id.clone()))?;
        if entry.samples().is_empty() {
            // A client that asks right after the create gets a figure, not an empty list.
            meter::sample(self.dependencies(), &entry).await;
        }
        let samples = entry.samples().into_iter();
        Ok(samples.filter(|sample| range.contains(sample.at)).collect())
    }

    async fn logs(&self, id: &SandboxId, limit: usize) -> Result<Vec<LogLine>, PlatformError> {
        let mut lines: Vec<LogLine> = self.history(id).await?.iter().map(log_line).collect();
        let incarnation = self
            .get(id)
            .map_or(Incarnation::INITIAL, |view| view.incarnation);
        let life = self.dependencies().layout.instance(id, incarnation);
        let console = life.directory.join("console.log");
        let read = move || read_tail(&console);
        let text = tokio::task::spawn_blocking(read)
            .await
            .ok()
            .and_then(Result::ok);
        if let Some(view) = self.get(id) {
            let console = text.as_deref().unwrap_or_default().lines();
            let at = view.started_at;
            let line = |line: &str| LogLine {
                at,
                level: "info",
                message: line.to_owned(),
            };
            lines.extend(console.map(line));
        }
        lines.sort_by_key(|line| line.at);
        let surplus = lines.len().saturating_sub(limit);
        Ok(lines.split_off(surplus))
    }

    async fn history(&self, id: &SandboxId) -> Result<Vec<HistoryEvent>, PlatformError> {
        if let Some(record) = self.registry().ended(id) {
            return Ok(record.history.clone());
        }
        let path = self.dependencies().layout.record(id);
        let read_id = id.clone();
        let read = tokio::task::spawn_blocking(move || Record::read(&path, &read_id)).await;
        match read {
            Ok(Ok(record)) => Ok(record.history),
            _ => Err(PlatformError::NotFound(id.clone())),
        }
    }
}

impl Node {
    /// What a create begins from: a template, or else a snapshot of the caller's bucket.
    fn source(&self, request: &CreateSandbox) -> Result<Source, PlatformError> {
        let dependencies = self.dependencies();
        let unknown = || PlatformError::TemplateNotFound(request.template.clone());
        let (owner, reference) = (&request.owner, request.template.as_str());
        if let Some(build) = dependencies.builds.resolve(&owner.namespace, reference) {
            return Ok(Source {
                build,
                snapshot: None,
            });
        }
        let catalogue = &dependencies.snapshots;
        let found = catalogue.resolve(&owner.namespace, &owner.env, reference);
        let lease = found.and_then(|found| catalogue.lease(&found.id));
        let lease = lease.ok_or_else(unknown)?;
        check_engine(lease.snapshot(), dependencies.engine.as_ref())?;
        let build = dependencies.builds.build(&lease.snapshot().template.build);
        let build = build.ok_or_else(unknown)?;
        Ok(Source {
            build,
            snapshot: Some(lease),
        })
    }

    fn check_room(
        &self,
        wanted: &sandhold_types::Resources,
        image_mib: u64,
    ) -> Result<(), PlatformError> {
        if self.is_stopping() {
            return Err(PlatformError::ShuttingDown);
        }
        let (promised_mib, sandboxes) = self.registry().promised();
        let room = capacity::measure(self.dependencies().layout.root(), promised_mib, sandboxes);
        let policy = &self.config().capacity;
        Ok(capacity::check(&room, policy, wanted, image_mib)?)
    }

    /// Tells the sandbox's actor something and waits for its answer, within the deadline.
    async fn ask<T>(
        &self,
        id: &SandboxId,
        deadline: Deadline,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, PlatformError> {
        let entry = self.registry().live(id);
        let entry = entry.ok_or_else(|| PlatformError::NotFound(id.clone()))?;
        entry.ask(deadline, command).await
    }
}

fn log_line(event: &HistoryEvent) -> LogLine {
    let message = format!("{}: {} ({})", event.state, event.reason, event.actor);
    LogLine {
        at: event.at,
        level: "info",
        message,
    }
}

/// The end of a console log, cut at a line. Guests write it, so bytes that are not text are
/// replaced.
fn read_tail(path: &std::path::Path) -> std::io::Result<String> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = fs::File::open(path)?;
    let length = file.metadata()?.len();
    let skipped = length.saturating_sub(LOG_BYTES_MAX);
    file.seek(SeekFrom::Start(skipped))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES_MAX).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if skipped == 0 {
        return Ok(text);
    }
    Ok(text
        .split_once('\n')
        .map(|(_, rest)| rest.to_owned())
        .unwrap_or_default())
}
