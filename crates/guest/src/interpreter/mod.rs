//! The code interpreter on its own port (wire contract section 3).
//!
//! ```text
//!  routes --> contexts --> context --turn--> kernel: jupyter (zmtp, message) or bash
//!    ^           |            |                         |
//!    |           |            +--- variables, seeds ----+
//!    +-- outbox <-- output <------------- events -------+      host starts kernels
//! ```
//!
//! Owns every kernel process of the sandbox. Invariants:
//! - One execution at a time in a context; a client that hangs up interrupts its own.
//! - Whatever a kernel says or does, an answer ends with `end_of_execution`, every buffer has a
//!   bound, and the next execution can run.
//! - After [`Interpreter::reseed`] no generator of a warmed kernel has the state that it had in
//!   the image (R-T6); kernels that are busy and have no side channel follow when their
//!   execution ends.
//!
//! Called by the app only. It never checks access tokens, never runs anything as root on a
//! client's behalf, and never trusts what a kernel sends.

mod bash;
mod context;
mod contexts;
mod events;
pub(crate) mod fuzzing;
mod host;
mod jupyter;
mod kernel;
mod language;
mod message;
mod outbox;
mod output;
mod process;
mod routes;
mod seeds;
mod side_channel;
mod variables;
mod zmtp;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::Router;
use sandhold_types::SystemEntropy;

use self::{contexts::Contexts, host::KernelHost, language::Language};
use crate::{children::Children, state::SandboxState};

/// What the interpreter is given.
#[derive(Debug, Clone)]
pub struct InterpreterConfig {
    /// Languages whose kernels are started before the first request.
    pub warm_languages: Vec<String>,
    /// Modules that those kernels import before they are ready, by language.
    pub kernel_preload: BTreeMap<String, Vec<String>>,
    /// Where the sockets of kernels are; made if it is absent.
    pub runtime_directory: PathBuf,
    /// Variables, users, defaults and the clock.
    pub state: Arc<SandboxState>,
    /// The only way to run a kernel.
    pub children: Children,
}

/// The running interpreter. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Interpreter {
    shared: Arc<Shared>,
}

/// What routes and executions share.
#[derive(Debug)]
struct Shared {
    warm_languages: Vec<String>,
    host: KernelHost,
    contexts: Contexts,
    /// Languages that are being warmed, with what went wrong.
    warming: Mutex<BTreeMap<String, Option<String>>>,
    running_executions: AtomicUsize,
}

/// Counts one execution for as long as it lives.
#[derive(Debug)]
struct RunningExecution {
    shared: Arc<Shared>,
}

impl Interpreter {
    /// Starts it, and its warm kernels in the background.
    #[must_use]
    pub fn start(config: InterpreterConfig) -> Self {
        let shared = Arc::new(Shared {
            warm_languages: config.warm_languages.clone(),
            host: KernelHost::new(config, Box::new(SystemEntropy)),
            contexts: Contexts::default(),
            warming: Mutex::default(),
            running_executions: AtomicUsize::new(0),
        });
        let interpreter = Self { shared };
        interpreter.warm_up();
        interpreter
    }

    /// Starts the warm kernels in the background.
    pub fn warm_up(&self) {
        let languages = &self.shared.warm_languages;
        let due = languages.iter().map(|language| (language.clone(), None));
        *self.shared.lock_warming() = due.collect();
        for language in languages {
            tokio::spawn(Arc::clone(&self.shared).warm(language.clone()));
        }
    }

    /// Ends every execution and kernel and forgets all contexts.
    pub async fn forget_contexts(&self) {
        let contexts = self.shared.contexts.take_all();
        let removals = contexts.iter().map(|context| context.remove());
        futures::future::join_all(removals).await;
    }

    /// The routes of the interpreter's port.
    pub fn router(&self) -> Router {
        routes::router(Arc::clone(&self.shared))
    }

    /// What it still waits for before the sandbox is ready, and why it waits in vain if it does;
    /// empty once it is.
    pub async fn ready(&self) -> Vec<String> {
        self.shared
            .lock_warming()
            .iter()
            .map(|(language, error)| match error {
                None => format!("kernel of {language}"),
                Some(error) => format!("kernel of {language}: {error}"),
            })
            .collect()
    }

    /// Gives new seeds to every warmed kernel (R-T6). When it returns, those that can take them
    /// have them; see the invariants of this module for the others.
    pub async fn reseed(&self, entropy: &[u8]) {
        self.shared.host.note_reseeding(entropy);
        let contexts = self.shared.contexts.all();
        let reseedings = contexts.iter().map(|context| {
            let entropy = self.shared.host.fresh_bytes::<64>();
            async move { context.reseed(&entropy).await }
        });
        futures::future::join_all(reseedings).await;
    }

    /// How many executions run or wait at present.
    #[must_use]
    pub fn running_executions(&self) -> usize {
        self.shared.running_executions.load(Ordering::Relaxed)
    }
}

impl Shared {
    fn lock_warming(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Option<String>>> {
        self.warming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn warm(self: Arc<Self>, name: String) {
        let result = match Language::parse(Some(&name)) {
            None => Err(String::from("not the name of a language")),
            Some(language) => match self.contexts.default_of(&self.host, language, true) {
                Ok(context) => context
                    .start(&self.host)
                    .await
                    .map_err(|error| context::describe(&error)),
                Err(error) => Err(error.to_string()),
            },
        };
        let mut warming = self.lock_warming();
        match result {
            Ok(()) => {
                warming.remove(&name);
            }
            Err(error) => {
                tracing::error!(language = name, error, "a kernel cannot be warmed");
                warming.insert(name, Some(error));
            }
        }
    }

    fn count_execution(self: &Arc<Self>) -> RunningExecution {
        self.running_executions.fetch_add(1, Ordering::Relaxed);
        RunningExecution {
            shared: Arc::clone(self),
        }
    }
}

impl Drop for RunningExecution {
    fn drop(&mut self) {
        self.shared
            .running_executions
            .fetch_sub(1, Ordering::Relaxed);
    }
}
