//! What cannot be forwarded gets an honest, distinct answer (BC-078, R-L12).

use std::time::Duration;

use http::Request;
use sandhold_gateway::GatewayConfig;
use sandhold_types::{EndReason, SandboxState};

use crate::support::*;

fn told(answer: &Answer) -> (u16, String, String) {
    let body = answer.json();
    assert_eq!(body["code"], answer.status, "the code is the status");
    (
        answer.status,
        body["error_code"].as_str().unwrap().to_owned(),
        body["message"].as_str().unwrap().to_owned(),
    )
}

#[tokio::test]
async fn each_502_says_which_it_is() {
    // BC-078
    let world = World::new().await;
    let mut client = world.client().await;

    let answer = client.get(3000, "/").await;
    assert_eq!(answer.json()["port"], 3000);
    let (status, code, message) = told(&answer);
    assert_eq!((status, code.as_str()), (502, "port_closed"));
    assert!(message.contains("port is not open"), "{message}");

    let closing = raw_server(|stream| async move { drop(stream) }).await;
    world.routes.open_port(3001, closing);
    let (status, code, message) = told(&client.get(3001, "/").await);
    assert_eq!((status, code.as_str()), (502, "port_connection_closed"));
    assert!(!message.contains("was not found"), "{message}");

    let garbage = raw_server(|mut stream| async move {
        read_head(&mut stream).await;
        write(&mut stream, b"\x00\xffSSH-2.0-garbage\r\n\r\n").await;
    })
    .await;
    world.routes.open_port(3002, garbage);
    let (status, code, _) = told(&client.get(3002, "/").await);
    assert_eq!((status, code.as_str()), (502, "port_connection_closed"));

    let unknown = Request::get("/")
        .header("host", format!("3000-{OTHER_ID}.sandbox-domain.test"))
        .body(nothing())
        .unwrap();
    let (status, code, message) = told(&client.fetch(unknown).await);
    assert_eq!((status, code.as_str()), (502, "sandbox_unknown"));
    assert_eq!(message, "The sandbox was not found");

    world.routes.end(EndReason::OutOfMemory);
    let answer = client.get(3000, "/").await;
    assert_eq!(answer.headers["should-retry"], "false");
    let (status, code, message) = told(&answer);
    assert_eq!((status, code.as_str()), (502, "sandbox_ended"));
    assert!(message.contains("was not found"), "{message}");
    assert!(message.contains("ran out of memory"), "{message}");

    world.routes.put_not_live(SandboxState::Paused);
    let (status, code, message) = told(&client.get(3000, "/").await);
    assert_eq!((status, code.as_str()), (502, "sandbox_not_running"));
    assert!(message.contains("was not found"), "{message}");

    world.routes.put_not_live(SandboxState::Killing);
    let (status, code, _) = told(&client.get(3000, "/").await);
    assert_eq!((status, code.as_str()), (502, "sandbox_not_running"));
}

#[tokio::test]
async fn a_server_that_comes_back_is_reached_at_once() {
    // BC-078: restarted by a watcher
    let world = World::new().await;
    let mut client = world.client().await;
    assert_eq!(client.get(3000, "/").await.status, 502);
    world.serve(3000, echo).await;
    assert_eq!(client.get(3000, "/").await.status, 200);
}

#[tokio::test]
async fn a_sandbox_that_ends_under_a_request_is_told_as_ended() {
    // R-L12
    let world = World::new().await;
    let (end, ended) = tokio::sync::watch::channel(false);
    let address = raw_server(move |mut stream| {
        let mut ended = ended.clone();
        async move {
            read_head(&mut stream).await;
            ended.wait_for(|is| *is).await.unwrap();
        }
    })
    .await;
    world.routes.open_port(3000, address);
    let mut client = world.client().await;
    let pending = tokio::spawn(async move { client.get(3000, "/").await });
    eventually("dialled", || world.routes.dials() == 1).await;
    world.routes.end(EndReason::TimedOut);
    end.send(true).unwrap();
    let (status, code, message) = told(&pending.await.unwrap());
    assert_eq!((status, code.as_str()), (502, "sandbox_ended"));
    assert!(message.contains("timeout passed"), "{message}");
}

#[tokio::test]
async fn silence_is_answered_after_the_idle_timeout() {
    let world = World::with(GatewayConfig {
        idle_timeout: Duration::from_millis(300),
        ..GatewayConfig::default()
    })
    .await;
    let silent = raw_server(|mut stream| async move {
        read_head(&mut stream).await;
        // Until the gateway closes.
        read_head(&mut stream).await;
    })
    .await;
    world.routes.open_port(3000, silent);
    let client = http2_client(world.address).await;
    let uri = format!("http://{}/", host(3000));
    let request = Request::get(uri).body(nothing()).unwrap();
    let response = client.clone().send_request(request).await.unwrap();
    let (status, code, _) = told(&Answer::of(response).await);
    assert_eq!((status, code.as_str()), (502, "port_no_answer"));
}

#[tokio::test]
async fn browsers_get_a_page_and_programs_json() {
    let world = World::new().await;
    let mut client = world.client().await;
    let navigation = |port| {
        request(port, "GET", "/")
            .header("accept", "text/html,application/xhtml+xml")
            .body(nothing())
            .unwrap()
    };
    let page = client.fetch(navigation(3000)).await;
    assert!(page.text.starts_with("<!doctype html>"));
    assert_eq!(page.status, 502);
    let agent = client.fetch(navigation(49983)).await;
    assert_eq!(agent.json()["error_code"], "port_closed");
}

#[tokio::test]
async fn malformed_targets_get_the_documented_error() {
    let world = World::new().await;
    let mut client = world.client().await;
    let cases = [
        (format!("0-{ID}.d.test"), 400, "invalid_request"),
        (format!("70000-{ID}.d.test"), 400, "invalid_request"),
        ("80-no_such.d.test".to_owned(), 502, "sandbox_unknown"),
    ];
    for (host, status, code) in cases {
        let request = Request::get("/").header("host", &host);
        let answer = client.fetch(request.body(nothing()).unwrap()).await;
        assert_eq!(
            (answer.status, told(&answer).1.as_str()),
            (status, code),
            "{host}"
        );
    }
}
