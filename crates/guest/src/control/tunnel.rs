//! `/tunnel`: a connection from the host to a port that only listens on loopback (BC-078).

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use axum::{
    Json,
    body::Body,
    extract::{Query, Request, State},
    response::{IntoResponse as _, Response},
};
use http::{
    HeaderValue, StatusCode,
    header::{CONNECTION, UPGRADE},
};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;

use crate::{
    activity::StreamGuard, control::routes::Control, http_error::HttpError, server::OpenConnection,
};

/// How long a port may take to accept.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// What the `Upgrade` header says.
const PROTOCOL: &str = "tcp";

/// The parameters.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct TunnelQuery {
    port: u16,
}

/// Connects and hands the connection over.
pub async fn tunnel(
    State(control): State<Control>,
    Query(query): Query<TunnelQuery>,
    request: Request,
) -> Response {
    let wants_tcp = request
        .headers()
        .get(UPGRADE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|protocol| protocol.eq_ignore_ascii_case(PROTOCOL));
    if !wants_tcp {
        return HttpError::new(
            StatusCode::UPGRADE_REQUIRED,
            "a tunnel needs 'Upgrade: tcp'",
        )
        .into_response();
    }
    let Ok(guest) = connect_loopback(query.port).await else {
        let body = serde_json::json!({
            "code": "port_closed",
            "message": format!("nothing listens on port {}", query.port),
        });
        return (StatusCode::BAD_GATEWAY, Json(body)).into_response();
    };
    let Some(open) = control.connections.open() else {
        return HttpError::new(StatusCode::SERVICE_UNAVAILABLE, "too many connections")
            .into_response();
    };
    let guard = control.activity.begin_stream();
    tokio::spawn(splice(hyper::upgrade::on(request), guest, open, guard));
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
    response
}

async fn connect_loopback(port: u16) -> io::Result<TcpStream> {
    let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
    let connect = async {
        match TcpStream::connect(v4).await {
            Ok(stream) => Ok(stream),
            Err(_) => TcpStream::connect(v6).await,
        }
    };
    let stream = tokio::time::timeout(CONNECT_MAX, connect).await??;
    // Without it small answers wait; the tunnel still works.
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

async fn splice(
    upgrade: hyper::upgrade::OnUpgrade,
    mut guest: TcpStream,
    open: OpenConnection,
    _guard: StreamGuard,
) {
    let Ok(upgraded) = upgrade.await else {
        return;
    };
    let mut host = TokioIo::new(upgraded);
    tokio::select! {
        // Either side may break off; there is nobody left to tell.
        _ = tokio::io::copy_bidirectional(&mut host, &mut guest) => {}
        () = open.closed() => {}
    }
}
