//! Every bound of the gateway, by name.

use std::time::Duration;

/// Whether the forwarding headers of whoever connects are believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ForwardedTrust {
    /// They are replaced: clients connect directly and may write anything.
    #[default]
    Replace,
    /// They are kept and added to: a reverse proxy of the operator is in front.
    Extend,
}

/// Limits and times of the gateway. The defaults suit one machine with hundreds of sandboxes.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Further host names, lower-case and without port, on which the routing headers are trusted
    /// besides IP addresses, `localhost` and `sandbox.*` (wire contract 2.1).
    pub shared_hosts: Vec<String>,
    /// What to make of `X-Forwarded-*` that come in.
    pub forwarded_trust: ForwardedTrust,
    /// After this long without a byte in either direction, a request or stream is ended.
    pub idle_timeout: Duration,
    /// How long a connection to a port may take.
    pub dial_timeout: Duration,
    /// How long a request may wait for a sandbox that has to be woken first.
    pub wake_timeout: Duration,
    /// Requests, streams and upgraded connections of one sandbox at once; past it 429.
    pub requests_per_sandbox_max: usize,
    /// The same of all sandboxes; past it 503.
    pub requests_max: usize,
    /// Connections being opened to one sandbox at once; further ones wait.
    pub dials_per_sandbox_max: usize,
    /// Requests of one sandbox that may wait for a connection to be opened; past it 429.
    pub waiting_per_sandbox_max: usize,
    /// Unused connections kept to one sandbox.
    pub idle_connections_per_sandbox_max: usize,
    /// Unused connections kept to all sandboxes.
    pub idle_connections_max: usize,
    /// How long an unused connection is kept. Below the 5 s after which Node and uvicorn close
    /// theirs, so that a request rarely meets a connection that is just being closed.
    pub idle_connection_age_max: Duration,
    /// How many sandboxes' tokens a signed URL without a sandbox is tested against.
    pub signature_candidates_max: usize,
    /// Client connections at once; further ones wait in the kernel's queue.
    pub client_connections_max: usize,
    /// How long a client may take to send the head of a request, and how long its connection may
    /// stay unused.
    pub header_read_timeout: Duration,
    /// The largest head of a request, in bytes.
    pub header_bytes_max: u32,
    /// Streams that one HTTP/2 client connection may have open.
    pub http2_streams_max: u32,
    /// How long requests may go on after the server was told to stop.
    pub drain_timeout: Duration,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            shared_hosts: Vec::new(),
            forwarded_trust: ForwardedTrust::default(),
            idle_timeout: Duration::from_secs(640),
            dial_timeout: Duration::from_secs(10),
            wake_timeout: Duration::from_secs(30),
            requests_per_sandbox_max: 1024,
            requests_max: 8192,
            dials_per_sandbox_max: 64,
            waiting_per_sandbox_max: 512,
            idle_connections_per_sandbox_max: 64,
            idle_connections_max: 2048,
            idle_connection_age_max: Duration::from_secs(4),
            signature_candidates_max: 4096,
            client_connections_max: 8192,
            header_read_timeout: Duration::from_secs(60),
            header_bytes_max: 64 * 1024,
            http2_streams_max: 256,
            drain_timeout: Duration::from_secs(10),
        }
    }
}
