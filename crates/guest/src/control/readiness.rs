//! When the sandbox is ready: the start command runs, the ready command succeeds, the warm
//! languages are up.
//!
//! The start command runs before the first `/init`, so it sees the template's variables and
//! those of no sandbox (BC-087).

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

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

#[derive(Debug, Default)]
struct Shared {
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
                started: AtomicBool::new(config.start_command.is_none()),
                ready: AtomicBool::new(config.ready_command.is_none()),
            }),
            interpreter,
        };
        let runner = Runner { state, table };
        tokio::spawn(bring_up(
            runner,
            config.start_command.clone(),
            config.ready_command.clone(),
            Arc::clone(&readiness.shared),
        ));
        readiness
    }

    /// What the sandbox still waits for.
    pub async fn waiting_for(&self) -> Vec<String> {
        let mut waiting = self.interpreter.ready().await;
        if !self.shared.ready.load(Ordering::Acquire) {
            waiting.push(String::from("readyCommand"));
        }
        if !self.shared.started.load(Ordering::Acquire) {
            waiting.push(String::from("startCommand"));
        }
        waiting
    }
}

async fn bring_up(
    runner: Runner,
    start_command: Option<String>,
    ready_command: Option<String>,
    shared: Arc<Shared>,
) {
    if let Some(command) = start_command {
        match runner.run(&command, None).await {
            Some(started) => {
                shared.started.store(true, Ordering::Release);
                // A reader that throws away: the command must not wait for one.
                tokio::spawn(watch_start_command(started.reader));
            }
            None => return,
        }
    }
    if let Some(command) = ready_command {
        while !runner.succeeds(&command).await {
            tokio::time::sleep(READY_INTERVAL).await;
        }
        shared.ready.store(true, Ordering::Release);
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
            environment: self.state.process_environment(&account),
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
