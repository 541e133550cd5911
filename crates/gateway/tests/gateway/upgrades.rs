//! WebSocket and other protocols over a connection that was HTTP.

use http::{Method, Request, Response, StatusCode, header};
use hyper::{body::Incoming, ext::Protocol};
use hyper_util::rt::TokioIo;
use sandhold_platform::SandboxView;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::support::*;

/// Switches to whatever is asked for, sends back the `Host` that it saw and then every byte.
pub(crate) async fn upgrading_echo(mut request: Request<Incoming>) -> Response<AnyBody> {
    let host = request.headers()[header::HOST].to_str().unwrap().to_owned();
    let Some(protocol) = request.headers().get(header::UPGRADE).cloned() else {
        return Response::new(whole(host));
    };
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let mut stream = TokioIo::new(upgrade.await.unwrap());
        stream
            .write_all(format!("{host}\n").as_bytes())
            .await
            .unwrap();
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = stream.read(&mut buffer).await {
            stream.write_all(&buffer[..length]).await.unwrap();
        }
    });
    let mut response = Response::new(nothing());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::UPGRADE, protocol);
    headers.insert(header::CONNECTION, "upgrade".parse().unwrap());
    if let Some(key) = request.headers().get(header::SEC_WEBSOCKET_KEY) {
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, key.clone());
    }
    response
}

pub(crate) fn websocket(port: u16) -> Request<AnyBody> {
    request(port, "GET", "/socket")
        .header("connection", "keep-alive, Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
        .header("sec-websocket-version", "13")
        .body(nothing())
        .unwrap()
}

async fn line(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut text = Vec::new();
    loop {
        match stream.read_u8().await.unwrap() {
            b'\n' => return String::from_utf8(text).unwrap(),
            byte => text.push(byte),
        }
    }
}

async fn echoes(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    for n in 0..20 {
        stream
            .write_all(format!("frame {n}\n").as_bytes())
            .await
            .unwrap();
        assert_eq!(line(stream).await, format!("frame {n}"));
    }
}

#[tokio::test]
async fn a_websocket_carries_bytes_both_ways() {
    let world = World::new().await;
    let served = world.serve(3000, upgrading_echo).await;
    let mut client = world.client().await;
    let mut response = client.send(websocket(3000)).await;
    assert_eq!(response.status(), 101);
    assert_eq!(response.headers()["upgrade"], "websocket");
    assert_eq!(response.headers()["connection"], "upgrade");
    assert!(response.headers().contains_key("sec-websocket-accept"));
    let upgraded = hyper::upgrade::on(&mut response).await.unwrap();
    let mut stream = TokioIo::new(upgraded);
    assert_eq!(line(&mut stream).await, host(3000));
    echoes(&mut stream).await;
    assert_eq!(world.gateway.counts().0, 1, "it counts against the limit");
    drop(stream);
    eventually("ended on both sides", || {
        served.closed() == 1 && world.gateway.counts().0 == 0
    })
    .await;
}

#[tokio::test]
async fn plain_requests_and_upgrades_see_the_same_host() {
    // BC-109
    let world = World::new().await;
    world.serve(5173, upgrading_echo).await;
    for mask in [None, Some("localhost:${PORT}".to_owned())] {
        world.routes.put(SandboxView {
            mask_request_host: mask.clone(),
            ..view(ID, 1)
        });
        let mut client = world.client().await;
        let plain = client.get(5173, "/").await.text;
        let mut response = client.send(websocket(5173)).await;
        let upgraded = hyper::upgrade::on(&mut response).await.unwrap();
        assert_eq!(line(&mut TokioIo::new(upgraded)).await, plain);
        let expected = mask.map_or_else(|| host(5173), |_| "localhost:5173".to_owned());
        assert_eq!(plain, expected);
    }
}

#[tokio::test]
async fn a_websocket_over_http2_reaches_an_http1_server() {
    // RFC 8441
    let world = World::new().await;
    world.serve(3000, upgrading_echo).await;
    let mut client = http2_client(world.address).await;
    // The server's settings must have arrived before CONNECT with a protocol is allowed.
    let uri = format!("http://{}/", host(3000));
    let plain = Request::get(&uri).body(nothing()).unwrap();
    assert_eq!(client.send_request(plain).await.unwrap().status(), 200);
    let mut request = Request::builder()
        .method(Method::CONNECT)
        .uri(&uri)
        .body(nothing())
        .unwrap();
    request
        .extensions_mut()
        .insert(Protocol::from_static("websocket"));
    let mut response = client.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    let upgraded = hyper::upgrade::on(&mut response).await.unwrap();
    let mut stream = TokioIo::new(upgraded);
    assert_eq!(line(&mut stream).await, host(3000));
    echoes(&mut stream).await;
}

#[tokio::test]
async fn a_refused_upgrade_is_an_ordinary_answer() {
    let world = World::new().await;
    world.serve(3000, echo).await;
    let mut client = world.client().await;
    let answer = client.fetch(websocket(3000)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.saw("upgrade"), Some("websocket"));
    assert_eq!(client.get(3000, "/").await.status, 200);
}

#[tokio::test]
async fn http_within_http_and_upgrades_of_the_agent_are_not_carried() {
    let world = World::new().await;
    world.serve(3000, upgrading_echo).await;
    world.serve(49983, upgrading_echo).await;
    let mut client = world.client().await;
    let smuggled = request(3000, "GET", "/")
        .header("connection", "Upgrade, HTTP2-Settings")
        .header("upgrade", "h2c")
        .header("http2-settings", "AAMAAABkAAQAoAAAAAIAAAAA")
        .body(nothing())
        .unwrap();
    assert_eq!(client.fetch(smuggled).await.status, 200);
    assert_eq!(client.fetch(websocket(49983)).await.status, 200);
}

#[tokio::test]
async fn tunnels_end_when_the_gateway_does() {
    let mut world = World::new().await;
    let served = world.serve(3000, upgrading_echo).await;
    let mut client = world.client().await;
    let mut response = client.send(websocket(3000)).await;
    let upgraded = hyper::upgrade::on(&mut response).await.unwrap();
    let mut stream = TokioIo::new(upgraded);
    line(&mut stream).await;
    world.stop();
    world.drained().await;
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    eventually("ended inside", || served.closed() == 1).await;
}
