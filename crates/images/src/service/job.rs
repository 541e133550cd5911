//! One announced build: how far it is, and its log.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandhold_platform::{
    BuildLogLevel, BuildLogLine, BuildPart, BuildState, BuildView, LogPage, NewBuild,
};
use sandhold_types::{BuildId, Clock, Namespace, Resources, TemplateId, Timestamp};

use super::journal::Written;
use crate::{
    faults::Faults,
    progress::{Event, Progress, Stage},
    steps::Output,
};

/// How many bytes of log are kept of one build; then one line says that there is more.
const LOG_BYTES_MAX: usize = 2 << 20;
/// What a line costs besides its text.
const LINE_OVERHEAD_BYTES: usize = 64;

/// An announced build.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) namespace: Namespace,
    pub(super) template: TemplateId,
    pub(super) build: BuildId,
    pub(super) new: NewBuild,
    pub(super) announced_at: Timestamp,
    clock: Arc<dyn Clock>,
    faults: Arc<Faults>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    state: BuildState,
    begun: bool,
    part: BuildPart,
    lines: Vec<BuildLogLine>,
    bytes: usize,
}

impl Job {
    pub(super) fn new(
        namespace: Namespace,
        template: TemplateId,
        build: BuildId,
        new: NewBuild,
        clock: Arc<dyn Clock>,
        faults: Arc<Faults>,
    ) -> Self {
        Self {
            namespace,
            template,
            build,
            new,
            announced_at: clock.now(),
            clock,
            faults,
            inner: Mutex::new(Inner {
                state: BuildState::Waiting,
                begun: false,
                part: BuildPart::Base,
                lines: Vec::new(),
                bytes: 0,
            }),
        }
    }

    /// One of an earlier process, and how it ended.
    pub(super) fn recalled(
        written: Written,
        state: BuildState,
        clock: Arc<dyn Clock>,
        faults: Arc<Faults>,
    ) -> Self {
        let new = NewBuild {
            name: written.name,
            tags: Vec::new(),
            resources: Resources::default(),
        };
        let announced_at = written.announced_at;
        let (template, build) = (written.template, written.build);
        let job = Self {
            announced_at,
            ..Self::new(written.namespace, template, build, new, clock, faults)
        };
        job.take_beginning();
        match state {
            BuildState::Failed { part, message } => job.fail(part, message),
            state => job.set_state(state),
        }
        job
    }

    /// How it stands, to be written down.
    pub(super) fn written(&self) -> Written {
        let ids = (&self.namespace, &self.template, &self.build);
        let state = self.inner().state.clone();
        Written::new(ids, &self.new.name, self.announced_at, &state)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the right to begin it; false if that was taken already.
    pub(super) fn take_beginning(&self) -> bool {
        !std::mem::replace(&mut self.inner().begun, true)
    }

    /// Whether it has come to its end.
    pub(super) fn is_over(&self) -> bool {
        matches!(
            self.inner().state,
            BuildState::Ready | BuildState::Failed { .. }
        )
    }

    /// Whether it was begun and is not over.
    pub(super) fn is_under_way(&self) -> bool {
        let begun = self.inner().begun;
        begun && !self.is_over()
    }

    pub(super) fn set_state(&self, state: BuildState) {
        self.inner().state = state;
    }

    /// Ends it, and says why in its log.
    pub(super) fn fail(&self, part: BuildPart, message: String) {
        self.log(BuildLogLevel::Error, part, &message);
        self.set_state(BuildState::Failed { part, message });
    }

    pub(super) fn view(&self, page: LogPage) -> BuildView {
        let inner = self.inner();
        let lines = inner.lines.iter().skip(page.offset).take(page.limit);
        BuildView {
            state: inner.state.clone(),
            lines: lines.cloned().collect(),
            announced_at: self.announced_at,
        }
    }

    fn log(&self, level: BuildLogLevel, part: BuildPart, message: &str) {
        let at = self.clock.now();
        let mut inner = self.inner();
        let cost = message.len() + LINE_OVERHEAD_BYTES;
        // The reason of a failure is always told.
        if inner.bytes > LOG_BYTES_MAX && level != BuildLogLevel::Error {
            return;
        }
        inner.bytes += cost;
        let message = match inner.bytes > LOG_BYTES_MAX && level != BuildLogLevel::Error {
            true => "the log is longer than is kept; what follows is left out",
            false => message,
        };
        inner.lines.push(BuildLogLine {
            at,
            level,
            message: message.to_owned(),
            part,
        });
    }
}

impl Progress for Job {
    fn report(&self, event: Event) {
        if let Some(step) = fault_point(&event) {
            self.faults.reach(step);
        }
        match event {
            Event::Begin { stage } => {
                let part = part_of(stage);
                self.inner().part = part;
                self.log(BuildLogLevel::Info, part, stage.label());
            }
            Event::Cached { stage } => {
                let text = format!("CACHED {}", stage.label());
                self.log(BuildLogLevel::Info, part_of(stage), &text);
            }
            Event::Instruction {
                number,
                total,
                label,
                cached,
            } => {
                let mark = if cached { "CACHED " } else { "" };
                let text = format!("{mark}[{number}/{total}] {label}");
                self.log(BuildLogLevel::Info, BuildPart::Step(number), &text);
            }
            Event::Output {
                number,
                output,
                text,
            } => {
                let level = match output {
                    Output::Standard => BuildLogLevel::Info,
                    Output::Error => BuildLogLevel::Warning,
                };
                self.log(level, BuildPart::Step(number), &text);
            }
            Event::Note { text } => {
                let part = self.inner().part;
                self.log(BuildLogLevel::Info, part, &text);
            }
            Event::Step { .. } => {}
        }
    }
}

/// Which journalled step an event begins, so that a death at each is a test (R-L3).
fn fault_point(event: &Event) -> Option<&'static str> {
    Some(match event {
        Event::Begin { stage } => match stage {
            Stage::RootFs => "build.base",
            Stage::Agent => "build.agent",
            Stage::Warm => "build.warm",
            Stage::Capture => "build.capture",
            Stage::Publish => "build.publish",
            Stage::Wait | Stage::Wheels | Stage::SetUp => return None,
        },
        Event::Step { .. } => "build.unpack",
        Event::Instruction { cached: false, .. } => "build.step",
        Event::Output { .. } => "build.output",
        _ => return None,
    })
}

fn part_of(stage: Stage) -> BuildPart {
    match stage {
        Stage::Wait | Stage::RootFs | Stage::Wheels | Stage::SetUp => BuildPart::Base,
        Stage::Agent | Stage::Warm | Stage::Capture | Stage::Publish => BuildPart::Finish,
    }
}

#[cfg(test)]
mod tests {
    use sandhold_types::{SystemClock, SystemEntropy};

    use super::*;

    fn job() -> Job {
        let new = NewBuild {
            name: String::from("x"),
            tags: Vec::new(),
            resources: Resources::default(),
        };
        Job::new(
            "t".parse().unwrap(),
            TemplateId::generate(&SystemEntropy),
            BuildId::generate(&SystemEntropy),
            new,
            Arc::new(SystemClock),
            Arc::default(),
        )
    }

    #[test]
    fn pages_of_a_log_come_to_an_end() {
        // Wire contract 1.6: a client reads on until a page is empty.
        let job = job();
        for number in 0..250 {
            let text = number.to_string();
            job.report(Event::Note { text });
        }
        let mut read = Vec::new();
        loop {
            let page = LogPage {
                offset: read.len(),
                limit: 100,
            };
            let lines = job.view(page).lines;
            assert!(lines.len() <= 100);
            if lines.is_empty() {
                break;
            }
            read.extend(lines.into_iter().map(|line| line.message));
        }
        assert_eq!(read.len(), 250);
        assert_eq!(read[249], "249");
    }

    #[test]
    fn a_log_is_bounded_and_the_reason_is_still_told() {
        let job = job();
        let text = "x".repeat(2_000);
        for _ in 0..10_000 {
            job.report(Event::Note { text: text.clone() });
        }
        job.fail(BuildPart::Step(3), String::from("reason"));
        let page = LogPage {
            offset: 0,
            limit: usize::MAX,
        };
        let view = job.view(page);
        assert!(view.lines.len() < 2_000);
        assert_eq!(view.lines.last().unwrap().message, "reason");
        assert!(
            view.lines[view.lines.len() - 2]
                .message
                .contains("left out")
        );
    }
}
