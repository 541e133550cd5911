//! What is written down about builds, so that a question after a restart has a true answer.
//!
//! ```text
//!   <catalogue>/jobs/<build>.json     written when it begins and when it is over
//!
//!   begun ─▶ (the process ends) ─▶ read at the next start: in the catalogue? ready : interrupted
//! ```
//!
//! Owns the directory. Logs are in memory and go with the process. Called by the service alone.

use std::{
    io,
    path::{Path, PathBuf},
};

use sandhold_platform::{BuildPart, BuildState};
use sandhold_types::{BuildId, Namespace, TemplateId, Timestamp};
use serde::{Deserialize, Serialize};

use super::JOBS_MAX;
use crate::{
    durable,
    record::{self, RecordError},
};

/// What a build is told that was under way when the process ended.
const INTERRUPTED: &str = "interrupted: the server ended while it was under way; build it again, \
                           steps that were done are not done again";

/// A build as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) namespace: Namespace,
    pub(super) template: TemplateId,
    pub(super) build: BuildId,
    pub(super) name: String,
    pub(super) announced_at: Timestamp,
    state: State,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum State {
    UnderWay,
    Ready,
    Failed { part: Part, message: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Part {
    Base,
    Step(usize),
    Finish,
}

/// The builds of one catalogue that are written down.
#[derive(Debug)]
pub(super) struct Journal {
    directory: PathBuf,
}

impl Journal {
    pub(super) fn new(catalogue: &Path) -> Self {
        Self {
            directory: catalogue.join("jobs"),
        }
    }

    fn path(&self, build: &BuildId) -> PathBuf {
        self.directory.join(format!("{build}.json"))
    }

    pub(super) fn write(&self, written: &Written) -> Result<(), RecordError> {
        let path = self.path(&written.build);
        let made = durable::make_directory(&self.directory);
        made.map_err(|source| RecordError::File {
            step: "make",
            path: self.directory.clone(),
            source,
        })?;
        record::write(&path, written)
    }

    pub(super) fn forget(&self, build: &BuildId) {
        if let Err(error) = durable::remove_file(&self.path(build)) {
            tracing::warn!(%build, %error, "an old build stays written down");
        }
    }

    /// The newest of an earlier process, each with how it ended; those past the bound go. `is_there`
    /// tells whether the catalogue has a build.
    pub(super) fn recall(
        &self,
        is_there: impl Fn(&BuildId) -> bool,
    ) -> io::Result<Vec<(Written, BuildState)>> {
        let listing = match self.directory.read_dir() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listing => listing?,
        };
        let mut all = Vec::new();
        for entry in listing {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match record::read::<Written>(&path) {
                Ok(written) if self.path(&written.build) == path => all.push(written),
                Ok(_) => {}
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(error, "a build is left out");
                }
            }
        }
        all.sort_by_key(|written| std::cmp::Reverse(written.announced_at));
        for old in all.drain(JOBS_MAX.min(all.len())..) {
            self.forget(&old.build);
        }
        let ended = all.into_iter().map(|written| {
            let state = written.state_after(is_there(&written.build));
            (written, state)
        });
        Ok(ended.collect())
    }
}

impl Written {
    pub(super) fn new(
        (namespace, template, build): (&Namespace, &TemplateId, &BuildId),
        name: &str,
        announced_at: Timestamp,
        state: &BuildState,
    ) -> Self {
        Self {
            namespace: namespace.clone(),
            template: template.clone(),
            build: build.clone(),
            name: name.to_owned(),
            announced_at,
            state: match state {
                BuildState::Waiting | BuildState::Building => State::UnderWay,
                BuildState::Ready => State::Ready,
                BuildState::Failed { part, message } => State::Failed {
                    part: match part {
                        BuildPart::Base => Part::Base,
                        BuildPart::Step(number) => Part::Step(*number),
                        BuildPart::Finish => Part::Finish,
                    },
                    message: message.clone(),
                },
            },
        }
    }

    /// How it stands after a restart: what was under way is either published or was interrupted.
    fn state_after(&self, is_there: bool) -> BuildState {
        match &self.state {
            State::Ready => BuildState::Ready,
            State::UnderWay if is_there => BuildState::Ready,
            State::UnderWay => BuildState::Failed {
                part: BuildPart::Finish,
                message: INTERRUPTED.to_owned(),
            },
            State::Failed { part, message } => BuildState::Failed {
                part: match part {
                    Part::Base => BuildPart::Base,
                    Part::Step(number) => BuildPart::Step(*number),
                    Part::Finish => BuildPart::Finish,
                },
                message: message.clone(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(build: &str, state: &BuildState, at: u64) -> Written {
        let names = (
            "team".parse().unwrap(),
            "t".parse().unwrap(),
            build.parse().unwrap(),
        );
        let at = Timestamp::from_unix_ms(at);
        Written::new((&names.0, &names.1, &names.2), "x", at, state)
    }

    #[test]
    fn what_was_under_way_is_published_or_was_interrupted() {
        // R-L3
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::new(folder.path());
        assert!(journal.recall(|_| true).unwrap().is_empty());
        let failed = BuildState::Failed {
            part: BuildPart::Step(3),
            message: String::from("no such file"),
        };
        let states = [
            ("a", BuildState::Building),
            ("b", BuildState::Waiting),
            ("c", failed.clone()),
            ("d", BuildState::Ready),
        ];
        for (at, (build, state)) in (0..).zip(&states) {
            journal.write(&written(build, state, at)).unwrap();
        }
        let recalled = journal.recall(|build| build.as_str() == "a").unwrap();
        let told: Vec<_> = recalled.into_iter().map(|(_, state)| state).collect();
        assert_eq!(told[0], BuildState::Ready);
        assert_eq!(told[1], failed);
        assert!(
            matches!(&told[2], BuildState::Failed { message, .. } if message.starts_with("interrupted"))
        );
        assert_eq!(told[3], BuildState::Ready, "it was published");
    }

    #[test]
    fn the_oldest_are_forgotten_and_one_that_cannot_be_read_hides_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::new(folder.path());
        for number in 0..JOBS_MAX + 2 {
            let build = format!("b{number}");
            let written = written(&build, &BuildState::Ready, number as u64);
            record_without_sync(&journal, &written);
        }
        std::fs::write(folder.path().join("jobs/broken.json"), "{").unwrap();
        let recalled = journal.recall(|_| true).unwrap();
        assert_eq!(recalled.len(), JOBS_MAX);
        assert_eq!(recalled.last().unwrap().0.build.as_str(), "b2");
        assert!(!folder.path().join("jobs/b1.json").exists());
    }

    /// A thousand syncs take long on some disks.
    fn record_without_sync(journal: &Journal, written: &Written) {
        let mut value = serde_json::to_value(written).unwrap();
        value["version"] = 1.into();
        std::fs::create_dir_all(&journal.directory).unwrap();
        std::fs::write(journal.path(&written.build), value.to_string()).unwrap();
    }
}
