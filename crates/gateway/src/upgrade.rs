//! Connections that stop being HTTP: WebSocket and any other `Upgrade`.
//!
//! ```text
//!  client ── GET, Upgrade: x ──────────▶                    ┌──────────────▶ server
//!  client ── CONNECT, :protocol (h2) ──▶ GET, Upgrade: x ──▶│  101
//!  client ◀───────────────── 101, or 200 on HTTP/2 ◀────────┘
//!  client ◀════════════════ bytes both ways, unread ════════▶ server
//! ```
//!
//! Invariants: the permit and the connection are held until both directions have ended, nothing
//! moved for the idle timeout, the life of the sandbox is over, or the gateway closes. Nothing is upgraded on the agent's port, and
//! nothing to cleartext HTTP/2, because what runs inside an upgraded connection is not looked at
//! any more and would pass every rule of `target` and `headers`.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::{body::Incoming, ext::Protocol, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use sandhold_types::Timestamp;
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;

use crate::{activity::Usage, body::ReplyBody, metered::Metered, pool::Lease, target::AGENT_PORT};

/// The buffer of each direction, in bytes.
const COPY_BUFFER_BYTES: usize = 16 * 1024;

/// The request asks for a tunnel that is none of ours to give.
#[derive(Debug)]
pub(crate) struct NotCarried;

/// A request that may switch protocols.
pub(crate) struct Switch {
    protocol: HeaderValue,
    client: OnUpgrade,
    kind: Kind,
}

enum Kind {
    /// The client asked as HTTP/1.1 does, with its own key.
    Http1,
    /// The client asked by an extended CONNECT (RFC 8441), which has no key; the server needs one.
    Http2 { key: HeaderValue },
}

/// Finds out whether a request asks to switch protocols.
pub(crate) fn asked_for(
    request: &mut Request<Incoming>,
    port: u16,
    counter: &AtomicU64,
    now: Timestamp,
) -> Result<Option<Switch>, NotCarried> {
    if request.method() == Method::CONNECT {
        let protocol = request.extensions().get::<Protocol>().ok_or(NotCarried)?;
        if port == AGENT_PORT || !protocol.as_str().eq_ignore_ascii_case("websocket") {
            return Err(NotCarried);
        }
        let key = websocket_key(counter.fetch_add(1, Ordering::Relaxed), now);
        return Ok(Some(Switch {
            protocol: HeaderValue::from_static("websocket"),
            client: hyper::upgrade::on(request),
            kind: Kind::Http2 { key },
        }));
    }
    if port == AGENT_PORT {
        return Ok(None);
    }
    let Some(protocol) = protocol_of(request.headers()) else {
        return Ok(None);
    };
    Ok(Some(Switch {
        protocol,
        client: hyper::upgrade::on(request),
        kind: Kind::Http1,
    }))
}

/// The protocol that the headers ask for, if the gateway carries it.
fn protocol_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|option| option.trim().eq_ignore_ascii_case("upgrade"));
    let protocol = headers.get(header::UPGRADE).filter(|_| asks)?;
    let text = protocol.to_str().ok()?.to_ascii_lowercase();
    // "h2c" would be a second HTTP inside, past every check; "HTTP/2.0" means the same.
    let is_http = text
        .split(',')
        .map(str::trim)
        .any(|name| name.starts_with("h2") || name.starts_with("http/"));
    (!is_http).then(|| protocol.clone())
}

/// RFC 6455 wants a key that differs; it protects caches, not secrets.
fn websocket_key(counter: u64, now: Timestamp) -> HeaderValue {
    let digest = Sha256::new()
        .chain_update(counter.to_le_bytes())
        .chain_update(now.unix_ms().to_le_bytes())
        .finalize();
    let key = STANDARD.encode(&digest[..16]);
    HeaderValue::try_from(key).unwrap_or(HeaderValue::from_static("c2FuZGhvbGQtZ2F0ZXdheQ=="))
}

impl Switch {
    pub(crate) fn protocol(&self) -> &HeaderValue {
        &self.protocol
    }

    /// Adds to the server's request what the client's did not have.
    pub(crate) fn complete(&self, method: &mut Method, headers: &mut HeaderMap) {
        if let Kind::Http2 { key } = &self.kind {
            *method = Method::GET;
            headers.insert(header::SEC_WEBSOCKET_KEY, key.clone());
            let version = HeaderValue::from_static("13");
            headers.insert(header::SEC_WEBSOCKET_VERSION, version);
        }
    }
}

/// The server has agreed: the client's answer, and what is to run afterwards.
pub(crate) fn switch(
    switch: Switch,
    mut response: Response<Incoming>,
    mut lease: Lease,
    usage: Arc<Usage>,
) -> (Response<ReplyBody>, Tunnel) {
    let server = hyper::upgrade::on(&mut response);
    let (mut head, _) = response.into_parts();
    let protocol = head.headers.get(header::UPGRADE).cloned();
    crate::headers::to_client(&mut head.headers, lease.port());
    match switch.kind {
        Kind::Http1 => {
            let protocol = protocol.unwrap_or(switch.protocol);
            head.headers.insert(header::UPGRADE, protocol);
            head.headers
                .insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        }
        Kind::Http2 { .. } => {
            head.status = StatusCode::OK;
            head.headers.remove(header::SEC_WEBSOCKET_ACCEPT);
            head.headers.remove(header::CONTENT_LENGTH);
        }
    }
    head.version = http::Version::default();
    lease.connection().detach();
    let tunnel = Tunnel {
        client: switch.client,
        server,
        lease,
        usage,
    };
    (Response::from_parts(head, ReplyBody::empty()), tunnel)
}

/// Bytes both ways between a client and a server in a sandbox.
pub(crate) struct Tunnel {
    client: OnUpgrade,
    server: OnUpgrade,
    lease: Lease,
    usage: Arc<Usage>,
}

impl Tunnel {
    /// Runs until both directions have ended, nothing moves any more, the sandbox's life is over, or
    /// `closing`.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let Self {
            client,
            server,
            mut lease,
            usage,
        } = self;
        let life = lease.connection().life().clone();
        let copy = async {
            let (client, server) = tokio::try_join!(client, server)?;
            let mut client = Metered::new(TokioIo::new(client), Arc::clone(&usage));
            let mut server = TokioIo::new(server);
            tokio::io::copy_bidirectional_with_sizes(
                &mut client,
                &mut server,
                COPY_BUFFER_BYTES,
                COPY_BUFFER_BYTES,
            )
            .await
            .map_err(crate::body::BodyError::from)
        };
        tokio::select! {
            ended = copy => match ended {
                Ok((up, down)) => tracing::trace!(up, down, "tunnel ended"),
                Err(error) => tracing::debug!(%error, "tunnel broke"),
            },
            () = usage.idle() => tracing::debug!("tunnel went idle"),
            () = life.cancelled() => tracing::debug!("the sandbox of a tunnel is gone"),
            () = closing.cancelled() => {}
        }
        drop(lease);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(connection: &str, upgrade: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, connection.parse().unwrap());
        headers.insert(header::UPGRADE, upgrade.parse().unwrap());
        headers
    }

    #[test]
    fn upgrades_are_recognised_and_http_within_http_is_not_carried() {
        let asked = |connection, upgrade| protocol_of(&headers(connection, upgrade));
        assert!(asked("keep-alive, Upgrade", "websocket").is_some());
        assert!(asked("upgrade", "tcp").is_some());
        assert!(asked("keep-alive", "websocket").is_none());
        for smuggled in ["h2c", "H2C", "websocket, h2c", "HTTP/2.0", "h2"] {
            assert!(asked("upgrade", smuggled).is_none(), "{smuggled}");
        }
    }

    #[test]
    fn keys_differ_and_are_well_formed() {
        let now = Timestamp::from_unix_ms(1);
        let key = websocket_key(0, now);
        assert_eq!(key.len(), 24);
        assert_ne!(key, websocket_key(1, now));
    }
}
