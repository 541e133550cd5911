//! `sandhold up`: everything on one machine, wired together.
//!
//! ```text
//!  bind ─▶ data directory (locked) ─▶ store ─▶ catalogue ─▶ engine, network ─▶ node (recovers)
//!       ─▶ governor (books, reclaimer) ─▶ gateway + api on one listener ─▶ "ready http://…" ─▶ until SIGTERM or SIGINT ─▶ drain
//! ```
//!
//! The listener is bound first, so that a port that is taken is told before any work is done.

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context;
use sandhold_api::{ApiParts, ApiState, Settings};
use sandhold_engine::{
    Engine,
    gvisor::{GvisorConfig, GvisorEngine, RootWrites},
};
use sandhold_gateway::{Drained, Gateway, GatewayConfig};
use sandhold_images::{BuildService, BuildServiceParts, Catalogue, Retention, Snapshots};
use sandhold_network::{LinuxNetwork, Network};
use sandhold_node::{Dependencies, DozeCounts, Faults, HttpAgent, Layout, Node, NodeConfig};
use sandhold_platform::TemplateBuilds;
use sandhold_store::{FirstStart, SqliteStore, Store};
use sandhold_types::{Clock, Entropy, FaultPlan, SystemClock, SystemEntropy};
use tokio::{net::TcpListener, sync::Semaphore};

use crate::{
    governor,
    kitchen::{self, LinuxKitchens},
    settings,
};

/// How long the removal of all sandboxes at the stop may take.
const KILL_ALL_BUDGET: Duration = Duration::from_secs(60);
/// How often the bytes of deleted templates are looked for.
const COLLECT_INTERVAL: Duration = Duration::from_secs(60);

/// How long a sandbox of a build may take until it is ready, its ready command included.
const BUILD_READY_BUDGET: Duration = Duration::from_secs(120);

/// When a sandbox dozes off, unless told otherwise.
const DOZE_AFTER_MS: u64 = 2_000;
/// How long forgotten snapshots are kept, unless told otherwise.
const SNAPSHOT_DAYS: u64 = 30;

/// Options of `sandhold up`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where sandboxes, keys and templates are kept.
    #[arg(long, env = "SANDHOLD_DATA_DIR", default_value = settings::DATA_DIR)]
    data_dir: PathBuf,
    /// Where to listen; port 0 takes a free one.
    #[arg(long, env = "SANDHOLD_LISTEN", default_value = settings::LISTEN)]
    listen: SocketAddr,
    /// The domain under which sandboxes are reachable as <port>-<id>.<domain>. Default:
    /// `localhost` with the port of the listener.
    #[arg(long, env = "SANDHOLD_DOMAIN")]
    domain: Option<String>,
    /// What becomes of the sandboxes when the server stops in good order.
    #[arg(long, value_enum, default_value_t = OnExit::Keep)]
    on_exit: OnExit,
    /// How long a sandbox must be without use before its processes are frozen until the next use,
    /// in milliseconds; 0 for never.
    #[arg(long, env = "SANDHOLD_DOZE_AFTER_MS", default_value_t = DOZE_AFTER_MS)]
    doze_after_ms: u64,
    /// How many days a snapshot without a name is kept that no sandbox stands on; 0 for ever.
    #[arg(long, env = "SANDHOLD_SNAPSHOT_DAYS", default_value_t = SNAPSHOT_DAYS)]
    snapshot_days: u64,
    #[command(flatten)]
    governor: governor::GovernorArgs,
    /// The guest agent that templates are built with. Without it, `sandhold-agent` beside this
    /// program.
    #[arg(long, env = "SANDHOLD_AGENT", value_name = "PATH")]
    agent: Option<PathBuf>,
    #[command(flatten)]
    registries: settings::RegistryArgs,
    /// Where templates' images may come from: `host`, `host:port`, or `public` for every public
    /// address; those of --registries are always among them. Can be repeated.
    #[arg(
        long,
        env = "SANDHOLD_REGISTRY_ALLOW",
        value_name = "HOST[:PORT]",
        value_delimiter = ',',
        default_value = "public"
    )]
    registry_allow: Vec<String>,
    /// Log as JSON lines.
    #[arg(long)]
    log_json: bool,
    /// Die by SIGKILL at this journalled step (`step` or `step:count`); for recovery tests.
    #[arg(long, hide = true)]
    fault_at: Option<FaultPlan>,
}

impl Args {
    fn snapshot_retention(&self) -> Retention {
        match self.snapshot_days {
            0 => Retention::ForEver,
            days => Retention::For(Duration::from_secs(days.saturating_mul(24 * 3600))),
        }
    }

    fn doze_after(&self) -> Option<Duration> {
        (self.doze_after_ms > 0).then(|| Duration::from_millis(self.doze_after_ms))
    }
}

/// What becomes of the sandboxes when the server stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OnExit {
    /// They go on running and are found again at the next start.
    Keep,
    /// They are removed.
    Kill,
}

/// Runs a server until it is told to stop.
///
/// # Errors
/// It cannot start; the message says what is missing.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    settings::start_logging(args.log_json);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(serve(args))
}

async fn serve(args: Args) -> anyhow::Result<ExitCode> {
    let listener = TcpListener::bind(args.listen).await.with_context(|| {
        format!(
            "could not listen on {}; choose another --listen",
            args.listen
        )
    })?;
    let address = listener.local_addr()?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let entropy: Arc<dyn Entropy> = Arc::new(SystemEntropy);
    let layout = Arc::new(Layout::open(&args.data_dir, entropy.as_ref())?);
    let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&layout.root().join("store.db"))?);
    let first = sandhold_store::first_start(
        store.as_ref(),
        layout.root(),
        clock.as_ref(),
        entropy.as_ref(),
    );
    let first = first.await.context("could not make the first API key")?;
    if let FirstStart::Mended { key_file } = first {
        tracing::warn!(key_file = %key_file.display(), "it was empty and holds a new key now");
    }
    raise_descriptor_limit();
    let tag = layout.tag().to_owned();
    let engine = build_engine(&tag).await?;
    let kitchens = Arc::new(LinuxKitchens {
        entropy: entropy.clone(),
        ready_budget: BUILD_READY_BUDGET,
    });
    let templates = layout.root().join("templates");
    let cleared = sandhold_images::clear_interrupted(&templates, kitchens.as_ref()).await;
    cleared
        .map_err(|error| anyhow::anyhow!(error).context("could not clear interrupted builds"))?;
    let catalogue = open_catalogue(&layout, engine.as_ref(), clock.clone()).await?;
    let network: Arc<dyn Network> = Arc::new(LinuxNetwork::new(&tag).await?);
    let config = NodeConfig {
        doze_after: args.doze_after(),
        snapshot_retention: args.snapshot_retention(),
        ..NodeConfig::default()
    };
    let root = layout.root().to_owned();
    let snapshots = layout.snapshots();
    let snapshots = tokio::task::spawn_blocking(move || Snapshots::open(&snapshots)).await??;
    let dependencies = Dependencies {
        engine,
        builds: catalogue.clone(),
        snapshots: Arc::new(snapshots),
        agent: Arc::new(HttpAgent::new(network.clone())),
        network,
        clock: clock.clone(),
        entropy: entropy.clone(),
        layout,
        faults: Faults::new(args.fault_at.clone()),
        launches: Semaphore::new(config.launches_max),
        launches_max: config.launches_max,
        dozes: DozeCounts::default(),
    };
    let (node, report) = Node::start(dependencies, config).await?;
    tracing::info!(?report, "recovered");
    let collector = tokio::spawn(collect_templates(node.clone(), catalogue.clone()));
    let agent = args.agent.as_deref();
    let mut registries = args.registries.load()?;
    registries.allow_only(&args.registry_allow);
    let builds = match kitchen::find_agent_for_builds(agent)? {
        None => None,
        Some(agent) => {
            let parts = BuildServiceParts {
                catalogue: catalogue.clone(),
                directory: root.join("templates"),
                kitchens,
                agent,
                registries,
                clock: clock.clone(),
                entropy: entropy.clone(),
                faults: Arc::new(Faults::new(args.fault_at)),
            };
            let opened = BuildService::open(parts).context("could not read earlier builds")?;
            Some(Arc::new(opened) as Arc<dyn TemplateBuilds>)
        }
    };
    let domain = args
        .domain
        .unwrap_or_else(|| format!("localhost:{}", address.port()));
    let governor = governor::start(
        &args.governor,
        &root,
        &tag,
        node.clone(),
        clock.clone(),
        entropy.clone(),
    );
    let (governor, reclaimer) = governor.await?;
    let api = ApiState::open(ApiParts {
        platform: node.clone(),
        travel: node.clone(),
        templates: catalogue,
        builds,
        store,
        clock: clock.clone(),
        entropy,
        governor: Some(governor),
        settings: Settings {
            public_domain: Some(domain),
            ..Settings::default()
        },
    });
    let api = sandhold_api::router(api.await?);
    let gateway = Gateway::new(node.clone(), clock, GatewayConfig::default());
    // Before anybody can know that we are here: whoever reads "ready" may stop us at once.
    let stop = stop_signal()?;
    say_ready(address)?;
    let drained = sandhold_gateway::serve(listener, api, gateway, stop).await;
    if let Drained::Cut { connections } = drained {
        tracing::warn!(connections, "connections were cut after the drain time");
    }
    collector.abort();
    reclaimer.abort();
    node.stop().await;
    if args.on_exit == OnExit::Kill {
        node.kill_all(KILL_ALL_BUDGET).await;
    }
    settings::remove_empty_state(&tag);
    Ok(ExitCode::SUCCESS)
}

/// A connection takes a descriptor or two and a sandbox a few, so the usual 1024 are soon gone.
/// What the server starts inherits the limit; `runsc` sets its own.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, ?limit, "the limit of open descriptors was not raised");
    }
}

/// The gVisor engine, with its state where socket paths stay short.
pub(crate) async fn build_engine(tag: &str) -> anyhow::Result<Arc<dyn Engine>> {
    let runsc = settings::find_runsc()
        .context("runsc was not found: run `sandhold doctor`, it says how to mend that")?;
    let config = GvisorConfig {
        runsc,
        node_tag: tag.to_owned(),
        state_root: settings::state_root(tag),
        root_writes: RootWrites::Layer,
    };
    Ok(Arc::new(GvisorEngine::new(config).await?))
}

async fn open_catalogue(
    layout: &Layout,
    engine: &dyn Engine,
    clock: Arc<dyn Clock>,
) -> anyhow::Result<Arc<Catalogue>> {
    let own = layout.root().join("templates");
    let identity = engine.identity();
    let opened = tokio::task::spawn_blocking(move || {
        Catalogue::open(&own, &settings::shared_templates(), identity, clock)
    });
    Ok(Arc::new(opened.await??))
}

/// Removes the bytes of deleted templates once no sandbox is there that came from them.
async fn collect_templates(node: Arc<Node>, catalogue: Arc<Catalogue>) {
    let mut ticks = tokio::time::interval(COLLECT_INTERVAL);
    loop {
        ticks.tick().await;
        let in_use = node.builds_in_use();
        let catalogue = catalogue.clone();
        let collected = tokio::task::spawn_blocking(move || catalogue.collect(&in_use)).await;
        match collected {
            Ok(Ok(collected)) => tracing::debug!(?collected, "templates collected"),
            Ok(Err(error)) => tracing::warn!(error = ?error, "templates not collected"),
            Err(error) => tracing::error!(%error, "the template collector failed"),
        }
    }
}

/// The one line on standard output: whoever started the server waits for it.
fn say_ready(address: SocketAddr) -> anyhow::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready http://{address}")?;
    out.flush()?;
    Ok(())
}

fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
