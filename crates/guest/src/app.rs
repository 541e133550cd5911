//! Builds the agent from its parts and runs it.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    net::SocketAddr,
    sync::Arc,
};

use axum::{Json, Router, extract::State, middleware, routing::get};
use http::StatusCode;
use sandhold_types::{Clock, SystemClock};
use tokio::net::TcpListener;

use crate::{
    activity::ActivityMeter,
    auth::{self, Gate},
    children::Children,
    config::{AgentConfig, ConfigError},
    control::{
        init::SystemIdentity,
        readiness::Readiness,
        routes::{self, Control},
    },
    drain,
    files::{self, routes::Files},
    filesystem::service::FilesystemService,
    http_error::HttpError,
    interpreter::{Interpreter, InterpreterConfig},
    memory_guard,
    metrics::Meter,
    process::{service::ProcessService, table::ProcessTable},
    rpc,
    server::{self, Connections},
    state::SandboxState,
    sudo,
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
    if let Err(error) = sudo::server::start(&config.sudo_directory(), &config.etc_dir, &children) {
        // Everything else works without it, and whoever calls it is told.
        tracing::warn!(%error, "sudo is not available");
    }
    let app = App::build(&config, &children);
    app.control.identity.take_hold();
    announce(&envd, &interpreter_listener);

    if config.system_identity {
        tokio::spawn(memory_guard::guard(
            app.control.table.clone(),
            app.control.interpreter.clone(),
        ));
    }
    let connections = app.control.connections.clone();
    let interpreter_router = app.control.interpreter.router();
    tokio::join!(
        server::serve(envd, app.envd_router(), connections.clone()),
        server::serve(interpreter_listener, interpreter_router, connections),
    );
    Ok(())
}

/// Tells a caller that chose no ports which ones they are.
fn announce(envd: &TcpListener, interpreter: &TcpListener) {
    if let (Ok(envd), Ok(interpreter)) = (envd.local_addr(), interpreter.local_addr()) {
        // Nobody may be reading; that is no reason not to serve.
        let _ = writeln!(
            io::stdout(),
            "listening envd={envd} interpreter={interpreter}"
        );
    }
}

/// The parts of the agent.
#[derive(Debug)]
struct App {
    control: Control,
}

impl App {
    fn build(config: &AgentConfig, children: &Children) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let state = Arc::new(SandboxState::new(config, Arc::clone(&clock)));
        let interpreter = Interpreter::start(InterpreterConfig {
            warm_languages: config.warm_languages.clone(),
            kernel_preload: config.kernel_preload.clone(),
            runtime_directory: config.runtime_directory.clone(),
            state: Arc::clone(&state),
            children: children.clone(),
        });
        let table = ProcessTable::new(children.clone());
        let readiness = Readiness::start(
            config,
            Arc::clone(&state),
            table.clone(),
            interpreter.clone(),
        );
        let control = Control {
            state,
            children: children.clone(),
            table,
            interpreter,
            connections: Connections::default(),
            activity: ActivityMeter::new(clock),
            readiness,
            identity: SystemIdentity::new(config),
        };
        Self { control }
    }

    /// The routes of the envd port, behind the check of who may call what.
    fn envd_router(&self) -> Router {
        let control = &self.control;
        let processes = ProcessService {
            state: Arc::clone(&control.state),
            table: control.table.clone(),
            activity: control.activity.clone(),
        };
        let filesystem =
            FilesystemService::new(Arc::clone(&control.state), control.activity.clone());
        let methods = filesystem.register(processes.register(connectrpc::Router::new()));
        let rpc = rpc::service(methods);
        let gate = Gate {
            state: Arc::clone(&control.state),
            activity: control.activity.clone(),
        };
        Router::new()
            .route("/health", get(|| async { StatusCode::NO_CONTENT }))
            .route("/envs", get(envs))
            .with_state(Arc::clone(&control.state))
            .merge(metrics_router(Arc::clone(&control.state)))
            .merge(files::routes::router(Files {
                state: Arc::clone(&control.state),
                activity: control.activity.clone(),
            }))
            .merge(routes::router(control.clone()))
            .fallback_service(rpc)
            .layer(middleware::from_fn_with_state(gate, auth::check))
            .layer(middleware::from_fn(drain::drain_refused))
    }
}

async fn envs(State(state): State<Arc<SandboxState>>) -> Json<BTreeMap<String, String>> {
    Json(state.variables())
}

fn metrics_router(state: Arc<SandboxState>) -> Router {
    let meter = Arc::new(Meter::default());
    let measure = move || {
        let (meter, state) = (Arc::clone(&meter), Arc::clone(&state));
        async move {
            tokio::task::spawn_blocking(move || meter.measure(state.clock.as_ref()))
                .await
                .map(Json)
                .map_err(|error| HttpError::internal(error.to_string()))
        }
    };
    Router::new().route("/metrics", get(measure))
}

async fn bind(address: SocketAddr) -> Result<TcpListener, AppError> {
    server::bind(address)
        .await
        .map_err(|source| AppError::Bind { address, source })
}
