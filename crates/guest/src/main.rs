//! `sandhold-agent`: PID 1 of a sandbox.

use std::process::ExitCode;

use sandhold_guest::{app, clone_filter, config::AgentConfig, sudo};

/// Threads that run asynchronous work. A sandbox often has one core; a second thread keeps the
/// agent answering while the first is in a long system call.
const WORKER_THREADS: usize = 2;
/// Threads for blocking file work. More requests than this wait their turn.
const BLOCKING_THREADS_MAX: usize = 64;

fn main() -> ExitCode {
    if sudo::client::is_called() {
        return sudo::client::main(&AgentConfig::default().sudo_directory());
    }
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("SANDHOLD_AGENT_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .init();
    // Before the first thread, which would not have it. A kernel that knows no filters is none
    // that hangs without this one.
    if let Err(error) = clone_filter::install() {
        tracing::warn!(%error, "processes that share signal handlers are not refused");
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "the agent cannot run");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), app::AppError> {
    let config = AgentConfig::load(&config_path())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKER_THREADS)
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .enable_all()
        .build()
        .map_err(app::AppError::Runtime)?;
    runtime.block_on(app::run(config))
}

fn config_path() -> std::path::PathBuf {
    std::env::args_os()
        .nth(1)
        .map_or_else(|| AgentConfig::DEFAULT_PATH.into(), Into::into)
}
