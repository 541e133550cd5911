//! The governor of a server: its books, its platform, its numbers.
//!
//! The books are a file in the data directory, or on a Redis. They are about the sandboxes of one
//! node, so on a Redis they stand under the name of this node's tag: two servers with data directories
//! of their own never read each other's sandboxes as gone.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use sandhold_books::{KeptBooks, RedisBooks, RedisSettings, SqliteBooks};
use sandhold_governor::rules::{Rules, Settings};
use sandhold_governor_driver::{Governor, GovernorParts, LocalPlatform};
use sandhold_node::Node;
use sandhold_types::{Clock, Entropy};
use tokio::task::JoinHandle;

/// The key in whose name the governor makes sandboxes. Generated keys are longer.
const KEY_NAME: &str = "governor";

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
) -> anyhow::Result<KeptBooks> {
    if let Some(url) = &args.redis {
        let mut settings = RedisSettings::at(url);
        settings.name = format!("sandhold-{tag}");
        settings.global_cap = args.global_cap;
        let books = RedisBooks::open(settings, rules).await;
        // The address may hold a password.
        let books = books.context("the Redis of --redis cannot hold the governor's books")?;
        return Ok(KeptBooks::Redis(Box::new(books)));
    }
    let (path, rules, cap) = (root.join("books.db"), rules.clone(), args.global_cap);
    let books =
        tokio::task::spawn_blocking(move || SqliteBooks::open(&path, rules, cap, clock)).await??;
    Ok(KeptBooks::Sqlite(books))
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
) -> anyhow::Result<(Governor<LocalPlatform>, JoinHandle<()>)> {
    let rules = Rules::new(sped_up(args.governor_speed))?;
    let books = open_books(args, &rules, root, tag, clock).await?;
    let platform = LocalPlatform::new(node.clone(), node, entropy.clone(), KEY_NAME.parse()?);
    let parts = GovernorParts {
        books,
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
