//! When the sandbox is ready: the start command runs, the ready command succeeds, the warm
//! languages are up.
//!
//! Its commands see the template's variables and those of no sandbox (BC-087): at first because
//! there is none yet, after a restart because they are not given them.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio_util::task::AbortOnDropHandle;

use crate::{
    config::AgentConfig,
    interpreter::Interpreter,
    process::{
        exit::Ending,
        launch::{LaunchPlan, StdioPlan},
        output::{Reader, Update},
        table::{Label, ProcessTable, Started},
    },
    state::SandboxState,
};

/// The pause between two runs of the ready command.
const READY_INTERVAL: Duration = Duration::from_millis(200);
/// A ready command that takes longer counts as failed and is run again.
const READY_COMMAND_MAX: Duration = Duration::from_secs(30);
/// What runs both commands.
const SHELL: &str = "/bin/bash";

/// What is up and what is not. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Readiness {
    shared: Arc<Shared>,
    interpreter: Interpreter,
}

#[derive(Debug)]
struct Shared {
    runner: Runner,
    start_command: Option<String>,
    ready_command: Option<String>,
    /// The bringing up that is under way or was last.
    attempt: Mutex<Attempt>,
}

/// One bringing up of what the template wants running.
#[derive(Debug, Default)]
struct Attempt {
    progress: Arc<Progress>,
    /// Ends with the attempt.
    _task: Option<AbortOnDropHandle<()>>,
}

#[derive(Debug, Default)]
struct Progress {
    started: AtomicBool,
    ready: AtomicBool,
}

impl Readiness {
    /// Starts what the template wants running.
    #[must_use]
    pub fn start(
        config: &AgentConfig,
        state: Arc<SandboxState>,
        table: ProcessTable,
        interpreter: Interpreter,
    ) -> Self {
        let readiness = Self {
            shared: Arc::new(Shared {
                runner: Runner { state, table },
                start_command: config.start_command.clone(),
                ready_command: config.ready_command.clone(),
                attempt: Mutex::default(),
            }),
            interpreter,
        };
        readiness.begin();
        readiness
    }

    /// Starts what the template wants running, whatever was started before.
    pub fn begin(&self) {
        let shared = &self.shared;
        let progress = Arc::new(Progress {
            started: AtomicBool::new(shared.start_command.is_none()),
            ready: AtomicBool::new(shared.ready_command.is_none()),
        });
        let task = tokio::spawn(Arc::clone(shared).bring_up(Arc::clone(&progress)));
        *shared.attempt() = Attempt {
            progress,
            _task: Some(AbortOnDropHandle::new(task)),
        };
    }

    /// Starts nothing more; nothing is ready from now on.
    pub fn give_up(&self) {
        *self.shared.attempt() = Attempt::default();
    }

    /// What the sandbox still waits for.
    pub async fn waiting_for(&self) -> Vec<String> {
        let mut waiting = self.interpreter.ready().await;
        let progress = Arc::clone(&self.shared.attempt().progress);
        if !progress.ready.load(Ordering::Acquire) {
            waiting.push(String::from("readyCommand"));
        }
        if !progress.started.load(Ordering::Acquire) {
            waiting.push(String::from("startCommand"));
        }
        waiting
    }
}

impl Shared {
    fn attempt(&self) -> MutexGuard<'_, Attempt> {
        self.attempt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn bring_up(self: Arc<Self>, progress: Arc<Progress>) {
        if let Some(command) = &self.start_command {
            match self.runner.run(command, None).await {
                Some(started) => {
                    progress.started.store(true, Ordering::Release);
                    // A reader that throws away: the command must not wait for one.
                    tokio::spawn(watch_start_command(started.reader));
                }
                None => return,
            }
        }
        if let Some(command) = &self.ready_command {
            while !self.runner.succeeds(command).await {
                tokio::time::sleep(READY_INTERVAL).await;
            }
            progress.ready.store(true, Ordering::Release);
        }
    }
}

async fn watch_start_command(reader: Reader) {
    let ending = end_of(reader).await;
    if ending.is_some_and(|ending| ending.exit_code != 0) {
        tracing::warn!("the start command has failed");
    }
}

async fn end_of(mut reader: Reader) -> Option<Ending> {
    loop {
        match reader.next().await {
            Update::Data(..) => {}
            Update::End(ending) => return Some(ending),
            Update::CutOff => return None,
        }
    }
}

#[derive(Debug)]
struct Runner {
    state: Arc<SandboxState>,
    table: ProcessTable,
}

impl Runner {
    async fn run(&self, command: &str, timeout: Option<Duration>) -> Option<Started> {
        let account = match self.state.account(None) {
            Ok(account) => account,
            Err(error) => {
                tracing::error!(%error, "nobody can run the template's commands");
                return None;
            }
        };
        let arguments = vec![String::from("-l"), String::from("-c"), command.to_owned()];
        let label = Label {
            command: String::from(SHELL),
            arguments: arguments.clone(),
            of_template: true,
            ..Label::default()
        };
        let plan = LaunchPlan {
            program: String::from(SHELL),
            arguments,
            environment: self.state.template_environment(&account),
            directory: self.state.workdir(&account),
            account,
            stdio: StdioPlan::NoInput,
        };
        let deadline = timeout.map(|timeout| tokio::time::Instant::now() + timeout);
        match self.table.start(plan, label, deadline).await {
            Ok(started) => Some(started),
            Err(error) => {
                tracing::error!(%error, "a command of the template does not start");
                None
            }
        }
    }

    async fn succeeds(&self, command: &str) -> bool {
        match self.run(command, Some(READY_COMMAND_MAX)).await {
            Some(started) => end_of(started.reader)
                .await
                .is_some_and(|ending| ending.exit_code == 0),
            None => false,
        }
    }
}
