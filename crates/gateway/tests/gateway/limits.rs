//! Bounds on requests, heads, time, and an orderly end.

use std::time::Duration;

use http::Response;
use sandhold_gateway::{Drained, GatewayConfig};
use tokio::{io::AsyncReadExt, net::TcpStream, sync::watch};

use crate::support::*;

/// Opens port 3000 with a server that answers when the returned sender says so.
async fn held(world: &World) -> (watch::Sender<bool>, Served) {
    let (release, held) = watch::channel(false);
    let served = world
        .serve(3000, move |_| {
            let mut held = held.clone();
            async move {
                held.wait_for(|is| *is).await.unwrap();
                Response::new(whole("released"))
            }
        })
        .await;
    (release, served)
}

#[tokio::test]
async fn one_sandbox_cannot_take_every_place() {
    // R-P9: past the bound a typed, retryable error.
    let world = World::with(GatewayConfig {
        requests_per_sandbox_max: 3,
        ..GatewayConfig::default()
    })
    .await;
    let (release, served) = held(&world).await;
    let mut pending = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let mut client = world.client().await;
        pending.spawn(async move { client.get(3000, "/").await.text });
    }
    eventually("three are under way", || served.connections() == 3).await;
    let mut client = world.client().await;
    let answer = client.get(3000, "/").await;
    assert_eq!(answer.status, 429);
    assert_eq!(answer.json()["error_code"], "too_many_requests");
    assert_eq!(answer.headers["retry-after"], "1");
    world.routes.put(view(OTHER_ID, 1));
    let other = http::Request::get("/")
        .header("host", format!("3000-{OTHER_ID}.d.test"))
        .body(nothing())
        .unwrap();
    let mut other_client = world.client().await;
    let other = tokio::spawn(async move { other_client.fetch(other).await.status });
    release.send(true).unwrap();
    while let Some(text) = pending.join_next().await {
        assert_eq!(text.unwrap(), "released");
    }
    assert_eq!(other.await.unwrap(), 200, "another sandbox is not affected");
    assert_eq!(
        client.get(3000, "/").await.status,
        200,
        "places are free again"
    );
}

#[tokio::test]
async fn the_whole_gateway_has_a_bound_too() {
    let world = World::with(GatewayConfig {
        requests_max: 1,
        ..GatewayConfig::default()
    })
    .await;
    let (release, served) = held(&world).await;
    let mut first = world.client().await;
    let pending = tokio::spawn(async move { first.get(3000, "/").await.status });
    eventually("one is under way", || served.connections() == 1).await;
    let mut client = world.client().await;
    let answer = client.get(3000, "/").await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["error_code"], "capacity_exceeded");
    release.send(true).unwrap();
    assert_eq!(pending.await.unwrap(), 200);
}

#[tokio::test]
async fn clients_that_dawdle_over_the_head_are_cut_off() {
    let world = World::with(GatewayConfig {
        header_read_timeout: Duration::from_millis(200),
        ..GatewayConfig::default()
    })
    .await;
    for opening in ["", "PRI * HT", "GET / HTTP/1.1\r\nhost: x"] {
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        write(&mut stream, opening.as_bytes()).await;
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut answer));
        let _ = ended
            .await
            .unwrap_or_else(|_| panic!("still open after {opening:?}"));
    }
}

#[tokio::test]
async fn connections_without_a_byte_are_ended() {
    let world = World::with(GatewayConfig {
        idle_timeout: Duration::from_millis(200),
        ..GatewayConfig::default()
    })
    .await;
    world.serve(3000, echo).await;
    let mut client = world.client().await;
    assert_eq!(client.get(3000, "/").await.status, 200);
    eventually("the client connection is closed", || {
        client.connection.is_finished()
    })
    .await;
}

#[tokio::test]
async fn requests_under_way_are_finished_before_the_server_stops() {
    let mut world = World::new().await;
    let (release, served) = held(&world).await;
    let mut client = world.client().await;
    let pending = tokio::spawn(async move { client.get(3000, "/").await.text });
    eventually("under way", || served.connections() == 1).await;
    world.stop();
    let address = world.address;
    let mut refused = false;
    for _ in 0..1000 {
        if TcpStream::connect(address).await.is_err() {
            refused = true;
            break;
        }
        tokio::task::yield_now().await;
    }
    assert!(refused, "no new connections");
    release.send(true).unwrap();
    assert_eq!(pending.await.unwrap(), "released");
    assert_eq!(world.drained().await, Drained::Completely);
}

#[tokio::test]
async fn what_does_not_finish_is_cut_after_the_drain_time() {
    let mut world = World::with(GatewayConfig {
        drain_timeout: Duration::from_millis(200),
        ..GatewayConfig::default()
    })
    .await;
    let (_release, served) = held(&world).await;
    let mut client = world.client().await;
    let pending = tokio::spawn(async move { client.sender.send_request(get(3000, "/")).await });
    eventually("under way", || served.connections() == 1).await;
    world.stop();
    assert_eq!(world.drained().await, Drained::Cut { connections: 1 });
    assert!(pending.await.unwrap().is_err());
    eventually("the server in the sandbox is let go", || {
        served.closed() == 1
    })
    .await;
}

#[tokio::test]
async fn a_head_beyond_the_bound_is_refused_whoever_it_is_for() {
    let world = World::new().await;
    let _served = world.serve(3000, echo).await;
    let bound = GatewayConfig::default().header_bytes_max as usize;
    for (length, expected) in [(bound - 1024, 200), (bound + 1, 431), (3 * bound, 431)] {
        let filled = |request: http::request::Builder| {
            request
                .header("x-filler", "x".repeat(length))
                .body(nothing())
        };
        let mut client = world.client().await;
        let answer = client
            .fetch(filled(request(3000, "GET", "/")).unwrap())
            .await;
        assert_eq!(answer.status, expected, "{length} bytes over HTTP/1");
        if expected == 431 {
            assert_eq!(answer.json()["error_code"], "head_too_large");
        }
        let target = format!("/?{}", "x".repeat(length.min(60_000)));
        let mut api = world.client().await;
        let no_sandbox = filled(http::Request::get(target).header("host", "api.test"));
        let answer = api.fetch(no_sandbox.unwrap()).await;
        assert_eq!(answer.status, 431, "{length} bytes beside a long target");
        let mut client = http2_client(world.address).await;
        let answer = client
            .send_request(filled(http::Request::get(format!("http://{}/", host(3000)))).unwrap());
        match answer.await {
            Ok(answer) => assert_eq!(answer.status(), expected, "{length} bytes over HTTP/2"),
            // One that is absurdly long ends its connection.
            Err(error) => assert!(expected == 431, "{length} bytes over HTTP/2: {error}"),
        }
    }
}
