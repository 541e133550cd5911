//! The governor of a server: its books, its platform, its numbers.
//!
//! The books are a file in the data directory, or on a Redis. They are about the sandboxes of one
//! node, so on a Redis they stand under the name of this node's tag: two servers with data directories
//! of their own never read each other's sandboxes as gone.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use sandhold_books::{
    KeptBooks, RedisBooks, RedisSettings, SqliteBooks,
    runs::{KeptRuns, RedisRuns, SqliteRuns},
};
use sandhold_governor::rules::{Rules, Settings};
use sandhold_governor_driver::{
    DeployedPlatform, Governor, GovernorParts, HttpPlatform, HttpPlatformSettings, LocalPlatform,
};
use sandhold_node::Node;
use sandhold_types::{Clock, Entropy};
use tokio::task::JoinHandle;

/// The key in whose name the governor makes sandboxes. Generated keys are longer.
const KEY_NAME: &str = "governor";

/// How long a sandbox of a service elsewhere lives after its holder was last heard, unless told
/// otherwise: the longest that E2B gives to everybody.
const PLATFORM_LIFE_S: u64 = 3_600;

/// Options of the governor.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Governor")]
pub(crate) struct GovernorArgs {
    /// Keep the governor's books on this Redis (redis://host:port/db) instead of in the data
    /// directory.
    #[arg(long, env = "SANDHOLD_REDIS")]
    redis: Option<String>,
    /// The most sandboxes over all namespaces and envs together. Default: only the buckets' quotas.
    #[arg(long, env = "SANDHOLD_GLOBAL_CAP")]
    global_cap: Option<u32>,
    /// Make the governor's sandboxes on this E2B-compatible service (http://host:port or
    /// https://host:port) instead of on this machine.
    #[arg(long, env = "SANDHOLD_PLATFORM_URL", requires = "platform_key")]
    platform_url: Option<String>,
    /// The key of that service.
    #[arg(long, env = "SANDHOLD_PLATFORM_KEY", hide_env_values = true)]
    platform_key: Option<String>,
    /// The domain under which that service's sandboxes are reachable as <port>-<id>.<domain>. Default:
    /// at its URL, by the two routing headers.
    #[arg(long, env = "SANDHOLD_PLATFORM_DOMAIN")]
    platform_domain: Option<String>,
    /// The file (PEM) with the authorities that the certificate of that service is checked by. Default:
    /// this machine's.
    #[arg(long, env = "SANDHOLD_PLATFORM_CA", requires = "platform_url")]
    platform_ca: Option<PathBuf>,
    /// For how many seconds a sandbox of that service lives after its holder was last heard.
    #[arg(long, env = "SANDHOLD_PLATFORM_LIFE_S", default_value_t = PLATFORM_LIFE_S, value_parser = clap::value_parser!(u64).range(300..))]
    platform_life_s: u64,
    /// All of the governor's times divided by this, for tests against real sandboxes.
    #[arg(long, hide = true, default_value_t = 1)]
    governor_speed: u32,
}

/// Every time divided by `speed`; one that is a second or less stays, callers cannot be faster.
fn sped_up(speed: u32) -> Settings {
    let s = Settings::default();
    let divided = |time: Duration| time / speed.max(1);
    Settings {
        heartbeat: divided(s.heartbeat),
        cycle: divided(s.cycle),
        overdue_grace: divided(s.overdue_grace),
        create_deadline: divided(s.create_deadline),
        call_deadline: divided(s.call_deadline),
        breaker_open: divided(s.breaker_open),
        ..s
    }
}

async fn open_books(
    args: &GovernorArgs,
    rules: &Rules,
    root: &Path,
    tag: &str,
    clock: Arc<dyn Clock>,
) -> anyhow::Result<(KeptBooks, KeptRuns)> {
    if let Some(url) = &args.redis {
        let mut settings = RedisSettings::at(url);
        settings.name = format!("sandhold-{tag}");
        settings.global_cap = args.global_cap;
        // The address may hold a password.
        let cannot = "the Redis of --redis cannot hold the governor's books";
        let runs = RedisRuns::new(&settings).context(cannot)?;
        let books = RedisBooks::open(settings, rules).await.context(cannot)?;
        return Ok((
            KeptBooks::Redis(Box::new(books)),
            KeptRuns::Redis(Box::new(runs)),
        ));
    }
    let (path, rules, cap) = (root.join("books.db"), rules.clone(), args.global_cap);
    let runs_path = root.join("runs.db");
    let opened = tokio::task::spawn_blocking(move || {
        let books = SqliteBooks::open(&path, rules, cap, clock.clone())?;
        let runs = SqliteRuns::open_file(&runs_path, clock)?;
        anyhow::Ok((KeptBooks::Sqlite(books), KeptRuns::Sqlite(runs)))
    });
    opened.await?
}

/// The service elsewhere, if the governor's sandboxes are made there.
fn service(args: &GovernorArgs) -> Option<HttpPlatformSettings> {
    Some(HttpPlatformSettings {
        url: args.platform_url.clone()?,
        api_key: args.platform_key.clone()?,
        authority: args.platform_ca.clone(),
        domain: args.platform_domain.clone(),
        life: Duration::from_secs(args.platform_life_s),
    })
}

/// Opens the books and begins to look after the node's sandboxes.
///
/// # Errors
/// The books cannot be opened, or the numbers do not fit together.
pub(crate) async fn start(
    args: &GovernorArgs,
    root: &Path,
    tag: &str,
    node: Arc<Node>,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
) -> anyhow::Result<(Governor<DeployedPlatform>, JoinHandle<()>)> {
    let rules = Rules::new(sped_up(args.governor_speed))?;
    let (books, runs) = open_books(args, &rules, root, tag, clock).await?;
    let here = LocalPlatform::new(node.clone(), node, entropy.clone(), KEY_NAME.parse()?);
    let platform = match service(args) {
        None => DeployedPlatform::here(here),
        Some(settings) => {
            let elsewhere = HttpPlatform::new(settings)?;
            elsewhere.check().await?;
            DeployedPlatform::elsewhere(here, elsewhere)
        }
    };
    let parts = GovernorParts {
        books,
        runs,
        platform,
        rules,
        entropy,
    };
    let governor = Governor::new(parts).context("the governor has no name")?;
    let reclaimer = governor.start();
    Ok((governor, reclaimer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_times_faster_fits_together() {
        assert!(Rules::new(sped_up(1)).is_ok());
        assert!(Rules::new(sped_up(10)).is_ok());
    }
}
