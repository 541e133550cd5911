//! Requests reach the right port of the right life of the right sandbox.

use std::sync::atomic::Ordering;

use http::{Request, Response, header};
use http_body_util::BodyExt;
use sandhold_platform::{RouteLookup, Routes};
use sandhold_types::Incarnation;

use crate::support::*;

#[tokio::test]
async fn requests_are_routed_by_host_and_by_headers_and_others_are_the_apis() {
    // R-P7, wire contract 2.1
    let world = World::new().await;
    world.serve(3000, echo).await;
    let mut client = world.client().await;
    let answer = client.get(3000, "/a/b?c=d%20e").await;
    assert_eq!(answer.status, 200);
    assert!(
        answer.text.starts_with("GET /a/b?c=d%20e\n"),
        "{}",
        answer.text
    );

    let by_headers = Request::builder()
        .uri("/x")
        .header(header::HOST, world.address.to_string())
        .header("E2b-Sandbox-Id", ID)
        .header("E2b-Sandbox-Port", "3000")
        .body(nothing())
        .unwrap();
    assert!(client.fetch(by_headers).await.text.starts_with("GET /x\n"));

    let to_api = Request::builder()
        .uri("/sandboxes")
        .header(header::HOST, world.address.to_string())
        .body(nothing())
        .unwrap();
    assert_eq!(client.fetch(to_api).await.text, "the API");
}

#[tokio::test]
async fn bodies_and_headers_pass_and_credentials_do_not() {
    let world = World::new().await;
    world.serve(3000, echo).await;
    let mut client = world.client().await;
    let request = request(3000, "POST", "/")
        .header("x-api-key", "e2b_00")
        .header("authorization", "Bearer e2b_00")
        .header("e2b-traffic-access-token", "t")
        .header("x-sandhold-control", "guess")
        .header("x-mine", "kept")
        .header("accept-encoding", "gzip")
        .body(whole("the body"))
        .unwrap();
    let answer = client.fetch(request).await;
    assert!(answer.text.ends_with("\n\nthe body"), "{}", answer.text);
    assert_eq!(answer.saw("x-mine"), Some("kept"));
    assert_eq!(answer.saw("accept-encoding"), Some("gzip"));
    assert_eq!(answer.saw("content-length"), Some("8"));
    for secret in [
        "x-api-key",
        "authorization",
        "e2b-traffic-access-token",
        "x-sandhold-control",
    ] {
        assert_eq!(answer.saw(secret), None, "{secret}");
    }
    assert_eq!(answer.saw("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(answer.saw("x-forwarded-host"), Some(host(3000).as_str()));
    assert_eq!(answer.saw("x-forwarded-proto"), Some("http"));
}

#[tokio::test]
async fn simple_servers_find_headers_by_their_usual_spelling() {
    let world = World::new().await;
    let (told, mut seen) = tokio::sync::mpsc::channel(1);
    let address = raw_server(move |mut stream| {
        let told = told.clone();
        async move {
            told.send(read_head(&mut stream).await).await.unwrap();
            write(&mut stream, b"HTTP/1.1 204 No Content\r\n\r\n").await;
        }
    })
    .await;
    world.routes.open_port(3000, address);
    world.client().await.get(3000, "/").await;
    let head = seen.recv().await.unwrap();
    for name in ["\r\nHost: ", "\r\nX-Forwarded-For: "] {
        assert!(head.contains(name), "{head}");
    }
}

#[tokio::test]
async fn one_connection_serves_many_requests() {
    let world = World::new().await;
    let served = world.serve(3000, echo).await;
    let mut client = world.client().await;
    for _ in 0..50 {
        assert_eq!(client.fetch(post(3000, "/", "x")).await.status, 200);
    }
    assert_eq!(served.connections(), 1);
    // Head and answer of each count as use (R-L5).
    assert_eq!(world.routes.request_touches.load(Ordering::SeqCst), 100);
}

#[tokio::test]
async fn a_connection_of_an_earlier_life_is_never_used() {
    // BC-094
    let world = World::new().await;
    let earlier = world.serve(3000, echo).await;
    let mut client = world.client().await;
    assert_eq!(client.get(3000, "/").await.status, 200);
    assert_eq!(world.gateway.counts(), (0, 1));

    let later = world
        .serve(3000, |_| async { Response::new(whole("second life")) })
        .await;
    world.routes.put(view(ID, 2));
    assert_eq!(client.get(3000, "/").await.text, "second life");
    assert_eq!((earlier.connections(), later.connections()), (1, 1));
    eventually("the earlier connection is closed", || earlier.closed() == 1).await;
}

#[tokio::test]
async fn connections_of_a_sandbox_that_is_gone_are_closed_without_a_request() {
    let world = World::new().await;
    let served = world.serve(3000, echo).await;
    world.client().await.get(3000, "/").await;
    world.routes.end(sandhold_types::EndReason::TimedOut);
    eventually("closed by the sweep", || served.closed() == 1).await;
    assert_eq!(world.gateway.counts(), (0, 0));
}

#[tokio::test]
async fn a_sandbox_that_moves_on_during_the_dial_is_looked_up_again() {
    let world = World::new().await;
    world.serve(3000, echo).await;
    world.routes.moves_on.store(true, Ordering::SeqCst);
    assert_eq!(world.client().await.get(3000, "/").await.status, 200);
    let RouteLookup::Live(route) = world.routes.route(&id()) else {
        panic!("it lives on");
    };
    assert_eq!(route.incarnation(), Incarnation(2));
}

#[tokio::test]
async fn http2_clients_are_served_alike() {
    let world = World::new().await;
    world.serve(3000, echo).await;
    let client = http2_client(world.address).await;
    let mut answers = tokio::task::JoinSet::new();
    for n in 0..20 {
        let mut client = client.clone();
        answers.spawn(async move {
            let uri = format!("http://{}/n{n}", host(3000));
            let request = Request::post(uri).body(whole("over h2")).unwrap();
            Answer::of(client.send_request(request).await.unwrap()).await
        });
    }
    while let Some(answer) = answers.join_next().await {
        let answer = answer.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(answer.saw("host"), Some(host(3000).as_str()));
        assert!(answer.text.ends_with("over h2"));
    }
}

#[tokio::test]
async fn grpc_reaches_its_server_over_http2_with_trailers() {
    let world = World::new().await;
    world
        .serve(
            50051,
            |request: Request<hyper::body::Incoming>| async move {
                assert_eq!(request.version(), http::Version::HTTP_2);
                assert_eq!(request.headers()["te"], "trailers");
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let mut trailers = http::HeaderMap::new();
                trailers.insert("grpc-status", "0".parse().unwrap());
                let body =
                    http_body_util::Full::new(body).with_trailers(async { Some(Ok(trailers)) });
                Response::new(body.boxed())
            },
        )
        .await;
    let mut client = http2_client(world.address).await;
    let request = Request::post(format!("http://{}/pkg.Service/Call", host(50051)))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(whole("message"))
        .unwrap();
    let response = client.send_request(request).await.unwrap();
    let collected = response.into_body().collect().await.unwrap();
    assert_eq!(collected.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(collected.to_bytes(), "message");
}

#[tokio::test]
async fn trailers_pass_both_ways_over_http1() {
    let world = World::new().await;
    world
        .serve(3000, |request: Request<hyper::body::Incoming>| async move {
            let collected = request.into_body().collect().await.unwrap();
            let sum = collected.trailers().unwrap()["x-sum"].clone();
            let mut trailers = http::HeaderMap::new();
            trailers.insert("x-seen", sum);
            let body = unsized_body("ok").with_trailers(async { Some(Ok(trailers)) });
            Response::builder()
                .header("trailer", "x-seen")
                .body(body.boxed())
                .unwrap()
        })
        .await;
    let mut trailers = http::HeaderMap::new();
    trailers.insert("x-sum", "42".parse().unwrap());
    let body = unsized_body("data").with_trailers(async { Some(Ok(trailers)) });
    let request = request(3000, "POST", "/")
        .header("te", "trailers")
        .header("trailer", "x-sum")
        .body(body.boxed())
        .unwrap();
    let mut client = world.client().await;
    let response = client.send(request).await;
    let collected = response.into_body().collect().await.unwrap();
    assert_eq!(collected.trailers().unwrap()["x-seen"], "42");
}

#[tokio::test]
async fn a_kept_connection_that_its_server_closed_costs_no_request() {
    // The server ends each connection after one answer without saying so.
    let world = World::new().await;
    let address = raw_server(|mut stream| async move {
        read_head(&mut stream).await;
        write(
            &mut stream,
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        )
        .await;
    })
    .await;
    world.routes.open_port(3000, address);
    let mut client = world.client().await;
    for _ in 0..30 {
        assert_eq!(client.get(3000, "/").await.status, 200);
    }
    assert_eq!(world.routes.dials(), 30);
}
