//! Stable error codes: what a client, an operator and the documentation call a failure (R-P10).

use std::time::Duration;

/// Whether the same request may succeed later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The same request will fail again.
    Never,
    /// Worth trying again after this long; sent as `Retry-After` in whole seconds.
    After(Duration),
}

macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $status:literal;)*) => {
        /// A stable name for a kind of failure. Each has a page under `docs/errors`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum ErrorCode {
            $($(#[$doc])* $name,)*
        }

        impl ErrorCode {
            /// Every code, for documentation and its test.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The text that clients match on; it never changes.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $code,)* }
            }

            /// The HTTP status that goes with it.
            #[must_use]
            pub const fn http_status(self) -> u16 {
                match self { $(Self::$name => $status,)* }
            }
        }
    };
}

error_codes! {
    /// A field, parameter, path or body is not what the contract says.
    InvalidRequest = "invalid_request", 400;
    /// No key, or one that is unknown or revoked.
    Unauthenticated = "unauthenticated", 401;
    /// The key is known and may not do this.
    Forbidden = "forbidden", 403;
    /// No such sandbox for this tenant (another tenant's is the same to it).
    SandboxNotFound = "sandbox_not_found", 404;
    /// No such template for this tenant.
    TemplateNotFound = "template_not_found", 404;
    /// No such snapshot for this tenant, or none of this sandbox's own line.
    SnapshotNotFound = "snapshot_not_found", 404;
    /// The snapshot was taken by another engine, or on a processor with other features.
    SnapshotIncompatible = "snapshot_incompatible", 409;
    /// The name belongs to a template.
    NameTaken = "name_taken", 409;
    /// No such build of a template for this tenant.
    BuildNotFound = "build_not_found", 404;
    /// No such API key.
    KeyNotFound = "key_not_found", 404;
    /// No such route.
    RouteNotFound = "route_not_found", 404;
    /// The route exists; this method does not.
    MethodNotAllowed = "method_not_allowed", 405;
    /// The sandbox is already in the state that was asked for.
    AlreadySo = "already_so", 409;
    /// The lease is sealed: it is not the current generation and never will be (R-G7).
    StaleLease = "STALE_LEASE", 409;
    /// There is no such lease.
    LeaseNotFound = "lease_not_found", 404;
    /// There is no such run (any more).
    RunNotFound = "run_not_found", 404;
    /// The namespace and env were never set up.
    BucketNotFound = "bucket_not_found", 404;
    /// What is needed for this does not answer, or is not ready yet.
    Unavailable = "unavailable", 503;
    /// The state of the sandbox does not allow it.
    Conflict = "conflict", 409;
    /// An idempotency key came back with another request.
    IdempotencyMismatch = "idempotency_mismatch", 422;
    /// The body is larger than the limit.
    TooLarge = "too_large", 413;
    /// The head of a request, its target and headers, is larger than the limit.
    HeadTooLarge = "head_too_large", 431;
    /// What was asked for is not built yet; it is refused rather than ignored.
    NotSupported = "not_supported", 400;
    /// The tenant's own limit is reached.
    QuotaExceeded = "quota_exceeded", 429;
    /// Too many requests or connections at once.
    TooManyRequests = "too_many_requests", 429;
    /// Another operation holds the sandbox.
    Busy = "busy", 503;
    /// The node has no room (R-P11).
    CapacityExceeded = "capacity_exceeded", 503;
    /// The deadline of the request passed before the work was done.
    DeadlineExceeded = "deadline_exceeded", 504;
    /// The data plane inside the sandbox did not become ready or stopped answering.
    GuestUnresponsive = "sandbox_snapshot_guest_agent_unresponsive", 503;
    /// The engine failed. The message says at which step.
    EngineFailed = "engine_failed", 500;
    /// The node's disk, store or another part of the machine failed.
    Internal = "internal", 500;
    /// The gateway knows no such sandbox (wire contract, "Proxy answers SDKs parse").
    SandboxUnknown = "sandbox_unknown", 502;
    /// The gateway was asked for a sandbox that has ended; the message says why (R-L12).
    SandboxEnded = "sandbox_ended", 502;
    /// The gateway was asked for a sandbox that exists and does not run.
    SandboxNotRunning = "sandbox_not_running", 502;
    /// The sandbox runs and nobody listens on the port.
    PortClosed = "port_closed", 502;
    /// A server in the sandbox took the connection and closed it without an answer.
    PortConnectionClosed = "port_connection_closed", 502;
    /// A port of the sandbox neither took nor refused the connection, or went silent.
    PortNoAnswer = "port_no_answer", 502;
    /// The ports of the sandbox need its traffic token, which is missing or wrong.
    TrafficTokenRequired = "traffic_token_required", 403;
    /// The server is stopping and takes no new work.
    ShuttingDown = "shutting_down", 503;
}

impl ErrorCode {
    /// Whether and when to try again, unless the failure itself knows better.
    #[must_use]
    pub const fn default_retry(self) -> Retry {
        match self {
            Self::Busy | Self::ShuttingDown | Self::Unavailable => {
                Retry::After(Duration::from_secs(2))
            }
            Self::QuotaExceeded
            | Self::TooManyRequests
            | Self::CapacityExceeded
            | Self::GuestUnresponsive => Retry::After(Duration::from_secs(5)),
            _ => Retry::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_page_that_names_its_status() {
        let pages = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
        for code in ErrorCode::ALL {
            let page = pages.join(format!("{}.md", code.as_str()));
            let text = std::fs::read_to_string(&page).unwrap_or_default();
            let status = format!("HTTP status {}.", code.http_status());
            assert!(
                text.contains(&status),
                "{} does not say '{status}'",
                page.display()
            );
        }
    }

    #[test]
    fn codes_are_unique_and_capacity_is_never_500() {
        // R-P10
        let mut seen = std::collections::BTreeSet::new();
        for code in ErrorCode::ALL {
            assert!(seen.insert(code.as_str()), "{} twice", code.as_str());
        }
        assert_eq!(ErrorCode::CapacityExceeded.http_status(), 503);
        assert_ne!(ErrorCode::CapacityExceeded.default_retry(), Retry::Never);
    }
}
