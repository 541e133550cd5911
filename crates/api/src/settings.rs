//! What the operator sets, and the bounds of what callers may send.

use std::time::Duration;

/// Settings of the API.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The domain that answers give for sandboxes, with a port if it needs one. Clients build
    /// `<port>-<id>.<domain>` from it; without one they use their own.
    pub public_domain: Option<String>,
    /// What answers give as `clientID`. Clients want one and do nothing with it.
    pub client_id: String,
    /// Bounds of what callers may send.
    pub limits: Limits,
    /// How long requests may take.
    pub budgets: Budgets,
    /// Lifetimes of sandboxes whose create names none.
    pub default_lifetimes: DefaultLifetimes,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            public_domain: None,
            client_id: String::from("sandhold"),
            limits: Limits::default(),
            budgets: Budgets::default(),
            default_lifetimes: DefaultLifetimes::default(),
        }
    }
}

/// Bounds of what callers may send, and of how much of it at once.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body_bytes_max: usize,
    /// Bytes of a request for a run, which carries its files.
    pub run_bytes_max: usize,
    /// Streams of events of runs that are open at once.
    pub event_readers_max: usize,
    /// Seconds of a lifetime; "never" is written -1 and is not bounded by this.
    pub timeout_s_max: u64,
    /// Bytes of a template's name.
    pub template_name_bytes_max: usize,
    /// Pairs of metadata, and of environment variables.
    pub pairs_max: usize,
    /// Bytes of one key of metadata, and of one name of an environment variable.
    pub pair_key_bytes_max: usize,
    /// Bytes of one value of metadata, and of one environment variable. Linux bounds the latter to
    /// 128 KiB.
    pub pair_value_bytes_max: usize,
    /// Address ranges in `allowOut`, and in `denyOut`.
    pub network_ranges_max: usize,
    /// Creates of one tenant that are carried out at once, so that a burst of one does not starve
    /// the others (R-P9).
    pub creates_running_per_tenant_max: usize,
    /// Copies that one call may make of a sandbox.
    pub copies_max: usize,
    /// Creates of one tenant that wait for their turn; past it the caller is told to come back.
    pub creates_waiting_per_tenant_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes_max: 1024 * 1024,
            run_bytes_max: 16 * 1024 * 1024,
            event_readers_max: 1_024,
            timeout_s_max: 30 * 24 * 3600,
            template_name_bytes_max: 256,
            pairs_max: 256,
            pair_key_bytes_max: 1024,
            pair_value_bytes_max: 128 * 1024 - 1,
            network_ranges_max: 256,
            creates_running_per_tenant_max: 8,
            copies_max: 100,
            creates_waiting_per_tenant_max: 256,
        }
    }
}

/// How long requests may take, counted from their arrival.
#[derive(Debug, Clone, Copy)]
pub struct Budgets {
    /// A create.
    pub create: Duration,
    /// Putting a sandbox to sleep, and waking it.
    pub sleep: Duration,
    /// Taking a snapshot, going back to one, and making copies.
    pub travel: Duration,
    /// Everything else.
    pub other: Duration,
    /// How long an idempotency key is remembered.
    pub idempotency_kept: Duration,
}

impl Default for Budgets {
    fn default() -> Self {
        Self {
            create: Duration::from_secs(60),
            sleep: Duration::from_secs(60),
            travel: Duration::from_secs(120),
            other: Duration::from_secs(30),
            idempotency_kept: Duration::from_secs(24 * 3600),
        }
    }
}

/// Lifetimes of sandboxes whose create names none (wire contract 1.2, 5).
#[derive(Debug, Clone, Copy)]
pub struct DefaultLifetimes {
    /// `POST /v2/sandboxes`, and `connect` of that generation.
    pub second_generation_s: u64,
    /// `POST /sandboxes` by an E2B client.
    pub first_generation_s: u64,
    /// `POST /sandboxes` by any other client, whose clock is an idle window. `None` is never, as
    /// CubeSandbox ships.
    pub idle_window_s: Option<u64>,
}

impl Default for DefaultLifetimes {
    fn default() -> Self {
        Self {
            second_generation_s: 300,
            first_generation_s: 15,
            idle_window_s: None,
        }
    }
}
