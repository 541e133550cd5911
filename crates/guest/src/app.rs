//! Builds the agent from its parts and runs it.

use std::{io, net::SocketAddr, sync::Arc};

use axum::{Router, routing::get};
use http::StatusCode;
use sandhold_types::SystemClock;

use crate::{
    children::Children,
    config::{AgentConfig, ConfigError},
    interpreter::{Interpreter, InterpreterConfig},
    server,
    state::SandboxState,
};

/// Why the agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The configuration is unusable.
    #[error("configuration")]
    Config(#[from] ConfigError),
    /// No threads for the runtime.
    #[error("starting the runtime")]
    Runtime(#[source] io::Error),
    /// The kernel refuses the role of a reaper.
    #[error("becoming the reaper of the sandbox")]
    Children(#[source] io::Error),
    /// A port is taken.
    #[error("listening on {address}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// A listener failed.
    #[error("serving")]
    Serve(#[source] io::Error),
}

/// Runs the agent until a listener fails.
///
/// # Errors
/// It cannot start, or a listener fails.
pub async fn run(config: AgentConfig) -> Result<(), AppError> {
    let envd_address = SocketAddr::new(config.bind_address, config.envd_port);
    let interpreter_address = SocketAddr::new(config.bind_address, config.interpreter_port);
    let envd = bind(envd_address).await?;
    let interpreter_listener = bind(interpreter_address).await?;

    let children = Children::start().map_err(AppError::Children)?;
    let state = Arc::new(SandboxState::new(&config, Arc::new(SystemClock)));
    let interpreter = Interpreter::start(InterpreterConfig {
        warm_languages: config.warm_languages.clone(),
        state: Arc::clone(&state),
        children: children.clone(),
    });

    let envd_router = Router::new().route("/health", get(|| async { StatusCode::NO_CONTENT }));
    tokio::try_join!(
        server::serve(envd, envd_router),
        server::serve(interpreter_listener, interpreter.router()),
    )
    .map_err(AppError::Serve)?;
    Ok(())
}

async fn bind(address: SocketAddr) -> Result<tokio::net::TcpListener, AppError> {
    server::bind(address)
        .await
        .map_err(|source| AppError::Bind { address, source })
}
