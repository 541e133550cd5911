//! Steps: what is done to a root file system before it becomes a template (R-P5).
//!
//! ```text
//!   layer n-1 ──copy──▶ workshop ──step──▶ workshop ──commit──▶ layer n ──▶ …
//!      key n = hash(key n-1, step, uploaded files, variables, user, directory)
//! ```
//!
//! A step that changes files makes a layer: a whole tree that shares the files that it did not
//! change with the layer before by hard links, so that a deletion is simply a name that is not
//! there. A step whose layer is there already is not done again. Commands run in a sandbox that
//! writes into the workshop, which is a copy and belongs to that sandbox alone.
//!
//! Invariants:
//! - Keys begin with whose build it is: no tenant's layer is found by another.
//! - A layer is complete when it is in place, and nobody writes to its files after that.
//! - Paths of the workshop are resolved inside it ([`crate::layers::Confined`]).

mod accounts;
mod command;
mod copy;
mod variables;
mod workshop;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use sandhold_types::Namespace;
use serde_json::json;

pub use command::Output;
pub(crate) use command::{Place, RunOrder, run};
pub(crate) use copy::{Order, copy, make_workdir};
use variables::expand;
pub(crate) use workshop::Workshop;

use crate::{
    definition::AgentSettings, layers::Confined, oven::BakeError, record::ContentKey,
    tree::KeyMaker,
};

/// The search path where nobody has set one.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Where the default user begins.
const HOME: &str = "/home/user";

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Files are copied into the root.
    Copy {
        /// What is copied, as the client names it in the archive; may hold `*`.
        source: String,
        /// Where to; a relative one is in the working directory.
        destination: String,
        /// Whose they become; the user of the build unless given.
        user: Option<String>,
        /// Their mode; what it was unless given.
        mode: Option<u32>,
        /// The archive that holds them.
        archive: Upload,
    },
    /// A command is run by a shell.
    Run {
        /// The command.
        command: String,
        /// Who runs it; the user of the build unless given.
        user: Option<String>,
        /// Variables that this command alone sees, over those of the build.
        arguments: BTreeMap<String, String>,
    },
    /// Variables are set.
    Env(Vec<(String, String)>),
    /// The working directory is changed, and made if it is missing.
    Workdir(String),
    /// The user is changed, and made if it is unknown.
    User(String),
}

/// An archive of files that a step copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    /// What names its content.
    pub hash: String,
    /// Where it lies.
    pub path: PathBuf,
}

/// A step and whether it is done whatever was done before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedStep {
    /// What is done.
    pub step: Step,
    /// It and all after it are done again.
    pub force: bool,
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The command ended with an error.
    #[error("the command ended with exit status {status}{}", last_words(last))]
    Status {
        /// Its exit status.
        status: i64,
        /// What it wrote last.
        last: String,
    },
    /// The command took too long.
    #[error("the command did not end within {} s", limit.as_secs())]
    Late {
        /// How long it may take.
        limit: std::time::Duration,
    },
    /// The command could not be started, or its sandbox failed.
    #[error("{0}")]
    Command(String),
    /// The sandbox of the command.
    #[error("the sandbox of the command failed")]
    Sandbox(#[source] BakeError),
    /// The files could not be copied.
    #[error("{0}")]
    Copy(String),
    /// There is no such user.
    #[error("there is no user or group '{0}'")]
    Account(String),
    /// A file of the root.
    #[error("could not {what}")]
    File {
        /// What was being done.
        what: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The root has grown beyond what it may be.
    #[error("the files are more than {bytes_max} bytes or {entries_max} in number")]
    TooLarge {
        /// How many bytes there may be.
        bytes_max: u64,
        /// How many files.
        entries_max: u64,
    },
}

fn last_words(last: &str) -> String {
    if last.is_empty() {
        return String::new();
    }
    format!("; it wrote last:\n{last}")
}

pub(crate) fn file_error(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> StepError {
    let what = what.into();
    move |source| StepError::File { what, source }
}

/// Runs what blocks where it may.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StepError> + Send + 'static,
) -> Result<T, StepError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(file_error("work on the files")(io::Error::other(error))))
}

/// Makes the account `name` in `root` if it is neither known nor a number.
pub(crate) fn require_account_in(root: &Path, name: &str) -> Result<(), StepError> {
    let root = Confined::open(root).map_err(file_error("open the root"))?;
    accounts::require_account(&root, name)
}

/// What steps hand on to those after them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Context {
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) user: String,
    pub(crate) workdir: Option<String>,
}

impl Context {
    /// Where a build begins: with what its base says.
    pub(crate) fn of(settings: &AgentSettings) -> Self {
        Self {
            environment: settings.environment.clone(),
            user: settings.default_user.clone(),
            workdir: settings.default_workdir.clone(),
        }
    }

    /// Where a relative path begins.
    pub(crate) fn workdir(&self) -> &str {
        match (&self.workdir, self.user.as_str()) {
            (Some(workdir), _) => workdir,
            (None, "root") => "/root",
            (None, _) => HOME,
        }
    }

    /// An absolute path, whatever `path` is.
    pub(crate) fn absolute(&self, path: &str) -> String {
        match path.starts_with('/') {
            true => path.to_owned(),
            false => format!("{}/{path}", self.workdir().trim_end_matches('/')),
        }
    }

    /// Puts the values of variables into a word.
    pub(crate) fn expand(&self, text: &str) -> String {
        expand(text, &self.environment, self.search_path())
    }

    /// The variables, and further ones over them.
    pub(crate) fn environment_with(
        &self,
        further: &BTreeMap<String, String>,
    ) -> BTreeMap<String, String> {
        let mut all = self.environment.clone();
        all.extend(further.clone());
        all
    }

    /// The search path.
    fn search_path(&self) -> &str {
        let set = self.environment.get("PATH");
        set.map_or(DEFAULT_PATH, String::as_str)
    }

    /// What is the same after this step whatever files it changes.
    pub(crate) fn after(&self, step: &Step) -> Self {
        let mut next = self.clone();
        match step {
            Step::Env(variables) => {
                for (name, value) in variables {
                    let value = next.expand(value);
                    next.environment.insert(name.clone(), value);
                }
            }
            Step::Workdir(path) => {
                next.workdir = Some(self.absolute(&self.expand(path)));
            }
            // A group may stand behind the user; the account says which it is.
            Step::User(user) => {
                let user = user.split(':').next().unwrap_or_default();
                user.clone_into(&mut next.user);
            }
            Step::Copy { .. } | Step::Run { .. } => {}
        }
        next
    }
}

impl Step {
    /// Whether it can change files.
    pub(crate) fn changes_files(&self) -> bool {
        !matches!(self, Self::Env(_))
    }

    /// In words, for logs.
    #[must_use]
    pub fn label(&self) -> String {
        match self {
            Self::Copy {
                source,
                destination,
                ..
            } => format!("COPY {source} {destination}"),
            Self::Run { command, .. } => {
                let mut lines = command.lines();
                let first = lines.next().unwrap_or_default();
                let more = if lines.next().is_some() { " …" } else { "" };
                format!("RUN {first}{more}")
            }
            Self::Env(variables) => {
                let names: Vec<&str> = variables.iter().map(|(name, _)| name.as_str()).collect();
                format!("ENV {}", names.join(" "))
            }
            Self::Workdir(path) => format!("WORKDIR {path}"),
            Self::User(user) => format!("USER {user}"),
        }
    }
}

/// The key before the first step.
pub(crate) fn first_key(base: &ContentKey, owner: Option<&Namespace>) -> ContentKey {
    KeyMaker::new("steps 1")
        .with(base.0.as_bytes())
        .with(owner.map_or("", Namespace::as_str).as_bytes())
        .finish()
}

/// The key after a step: what comes of it depends on nothing else. `salt` is drawn when it is done
/// whatever was done before.
pub(crate) fn next_key(
    before: &ContentKey,
    context: &Context,
    step: &Step,
    salt: &str,
) -> ContentKey {
    let described = match step {
        Step::Copy {
            source,
            destination,
            user,
            mode,
            archive,
        } => json!(["COPY", source, destination, user, mode, archive.hash]),
        Step::Run {
            command,
            user,
            arguments,
        } => json!(["RUN", command, user, arguments]),
        Step::Env(variables) => json!(["ENV", variables]),
        Step::Workdir(path) => json!(["WORKDIR", path]),
        Step::User(user) => json!(["USER", user]),
    };
    let context = json!([context.environment, context.user, context.workdir]);
    KeyMaker::new("step 1")
        .with(before.0.as_bytes())
        .with(described.to_string().as_bytes())
        .with(context.to_string().as_bytes())
        .with(salt.as_bytes())
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(command: &str) -> Step {
        Step::Run {
            command: command.to_owned(),
            user: None,
            arguments: BTreeMap::new(),
        }
    }

    fn start() -> (ContentKey, Context) {
        let base = KeyMaker::new("test").finish();
        let owner: Namespace = "tenant".parse().unwrap();
        let context = Context::of(&AgentSettings::default());
        (first_key(&base, Some(&owner)), context)
    }

    #[test]
    fn a_key_depends_on_all_that_the_result_depends_on() {
        // R-P5
        let (key, context) = start();
        let same = next_key(&key, &context, &run("x"), "");
        assert_eq!(next_key(&key, &context, &run("x"), ""), same);
        let mut other = context.clone();
        other.environment.insert("A".into(), "b".into());
        let others = [
            next_key(&key, &context, &run("y"), ""),
            next_key(&key, &context, &run("x"), "salt"),
            next_key(&key, &other, &run("x"), ""),
            next_key(&same, &context, &run("x"), ""),
        ];
        assert!(others.iter().all(|other| *other != same));
    }

    #[test]
    fn tenants_share_no_keys() {
        // R-P5
        let base = KeyMaker::new("test").finish();
        let key = |name: &str| first_key(&base, Some(&name.parse().unwrap()));
        assert_ne!(key("a"), key("b"));
        assert_ne!(key("a"), first_key(&base, None));
    }

    #[test]
    fn variables_directory_and_user_reach_later_steps() {
        // BC-120
        let (_, context) = start();
        let env = |name: &str, value: &str| Step::Env(vec![(name.into(), value.into())]);
        let context = context
            .after(&env("P", "a b"))
            .after(&env("PATH", "/opt/bin:$PATH"))
            .after(&env("Q", "${P}-$P-\\$P"))
            .after(&Step::Workdir(String::from("/srv")))
            .after(&Step::Workdir(String::from("app/$P")))
            .after(&Step::User(String::from("1234")));
        assert_eq!(
            context.environment["PATH"],
            format!("/opt/bin:{DEFAULT_PATH}")
        );
        assert_eq!(context.environment["Q"], "a b-a b-$P");
        assert_eq!(context.workdir(), "/srv/app/a b");
        assert_eq!(context.user, "1234");
        assert_eq!(context.absolute("x"), "/srv/app/a b/x");
        assert_eq!(context.absolute("/x"), "/x");
    }
}
