//! Requests to sandboxes that sleep or doze, and what becomes of connections when one falls asleep
//! (R-L7, architecture decision 6).

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use sandhold_gateway::GatewayConfig;
use sandhold_platform::{AutoResume, PublicTraffic, SandboxView, WakeError};
use sandhold_types::{ErrorCode, Retry, SandboxState, Token};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    support::*,
    upgrades::{upgrading_echo, websocket},
};

fn told(answer: &Answer) -> (u16, String) {
    let body = answer.json();
    assert_eq!(body["code"], answer.status);
    (
        answer.status,
        body["error_code"].as_str().unwrap().to_owned(),
    )
}

fn woken() -> Result<SandboxView, WakeError> {
    let auto_resume = AutoResume::On;
    Ok(SandboxView {
        auto_resume,
        ..view(ID, 2)
    })
}

#[tokio::test]
async fn a_request_wakes_and_is_then_forwarded_exactly_once() {
    // R-L7
    let world = World::new().await;
    let requests = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&requests);
    let count = move |request: Request<Incoming>| {
        counter.fetch_add(1, Ordering::SeqCst);
        echo(request)
    };
    world.serve(3000, count).await;
    world.routes.asleep_until_woken(woken());
    let mut client = world.client().await;
    let answer = client.fetch(post(3000, "/once", "a body")).await;
    assert_eq!(answer.status, 200);
    assert!(answer.text.ends_with("\n\na body"), "{}", answer.text);
    assert_eq!(requests.load(Ordering::SeqCst), 1);
    assert_eq!(world.routes.wakes.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn many_requests_at_once_are_all_answered() {
    let world = World::new().await;
    world.serve(3000, echo).await;
    world.routes.hold_wakes();
    world.routes.asleep_until_woken(woken());
    let requests: Vec<_> = (0..50)
        .map(|_| {
            let address = world.address;
            tokio::spawn(async move { Client::connect(address).await.get(3000, "/").await.status })
        })
        .collect();
    eventually("all wait", || {
        world.routes.wakes.load(Ordering::SeqCst) == 50
    })
    .await;
    world.routes.wake_turns.add_permits(50);
    for request in requests {
        assert_eq!(request.await.unwrap(), 200);
    }
}

#[tokio::test]
async fn a_websocket_and_a_signed_url_wake_too() {
    let world = World::new().await;
    world.serve(3000, upgrading_echo).await;
    world.routes.asleep_until_woken(woken());
    let response = world.client().await.send(websocket(3000)).await;
    assert_eq!(response.status(), 101);

    world.serve(49983, echo).await;
    world.routes.asleep_until_woken(woken());
    let digest = Sha256::digest(format!("/tmp/a:read:user:{ACCESS_TOKEN}"));
    let signature = format!("v1_{}", STANDARD_NO_PAD.encode(digest)).replace('+', "%2B");
    let uri = format!("/files?path=%2Ftmp%2Fa&username=user&signature={signature}");
    let request = Request::get(uri).header("host", world.address.to_string());
    let mut client = world.client().await;
    let answer = client.fetch(request.body(nothing()).unwrap()).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

#[tokio::test]
async fn without_auto_resume_a_sleeping_sandbox_is_not_there() {
    // Wire contract, "Proxy answers SDKs parse"
    let world = World::new().await;
    world.routes.put_not_live(SandboxState::Paused);
    let answer = world.client().await.get(3000, "/").await;
    assert_eq!(told(&answer), (502, "sandbox_not_running".into()));
    assert!(answer.text.contains("was not found"), "{}", answer.text);
    assert_eq!(world.routes.wakes.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_wake_up_that_fails_is_told_with_when_to_come_back() {
    // R-L7
    let failed = |code, retry| WakeError::Failed {
        code,
        message: "/secret/path".into(),
        retry,
    };
    let after = Retry::After(Duration::from_secs(7));
    let cases = [
        (
            failed(ErrorCode::CapacityExceeded, after),
            503,
            "capacity_exceeded",
            "7",
        ),
        (
            failed(ErrorCode::EngineFailed, Retry::Never),
            500,
            "engine_failed",
            "5",
        ),
        (
            WakeError::Full { waiting_max: 9 },
            429,
            "too_many_requests",
            "1",
        ),
        (
            WakeError::Late {
                state: SandboxState::Resuming,
            },
            503,
            "busy",
            "2",
        ),
    ];
    let world = World::new().await;
    world.serve(3000, echo).await;
    let mut client = world.client().await;
    for (error, status, code, retry_after) in cases {
        world.routes.asleep_until_woken(Err(error));
        let answer = client.get(3000, "/").await;
        assert_eq!(told(&answer), (status, code.into()));
        assert_eq!(answer.headers["retry-after"], retry_after, "{code}");
        assert!(!answer.text.contains("secret"), "{}", answer.text);
        assert!(!answer.text.contains("was not found"), "{}", answer.text);
    }
    assert_eq!(world.routes.dials(), 0, "nothing was sent");
}

#[tokio::test]
async fn nobody_waits_longer_than_the_wait_for_a_wake_up() {
    let config = GatewayConfig {
        wake_timeout: Duration::from_millis(50),
        ..GatewayConfig::default()
    };
    let world = World::with(config).await;
    world.routes.hold_wakes();
    world.routes.asleep_until_woken(woken());
    let answer = world.client().await.get(3000, "/").await;
    assert_eq!(told(&answer), (503, "busy".into()));
}

#[tokio::test]
async fn whoever_may_not_use_a_sandbox_may_not_wake_it() {
    let world = World::new().await;
    world.serve(3000, echo).await;
    world.serve(49983, echo).await;
    let private = SandboxView {
        public_traffic: PublicTraffic::TokenRequired,
        traffic_token: Some(Token::new("traffic".into())),
        auto_resume: AutoResume::On,
        ..view(ID, 1)
    };
    let mut client = world.client().await;
    let mut ask = async |port, path: &str, headers: &[(&str, &str)]| {
        world.routes.asleep_until_woken(woken());
        world
            .routes
            .put_in_state(private.clone(), SandboxState::Paused);
        let mut request = request(port, "GET", path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let before = world.routes.wakes.load(Ordering::SeqCst);
        let answer = client.fetch(request.body(nothing()).unwrap()).await;
        (
            answer.status,
            world.routes.wakes.load(Ordering::SeqCst) - before,
        )
    };
    assert_eq!(ask(3000, "/", &[]).await, (403, 0));
    assert_eq!(
        ask(3000, "/", &[("e2b-traffic-access-token", "guess")]).await,
        (403, 0)
    );
    assert_eq!(
        ask(3000, "/", &[("e2b-traffic-access-token", "traffic")]).await,
        (200, 1)
    );
    assert_eq!(ask(49983, "/files?path=/a", &[]).await, (401, 0));
    assert_eq!(
        ask(49983, "/envs", &[("x-access-token", "guess")]).await,
        (401, 0)
    );
    assert_eq!(
        ask(49983, "/envs", &[("x-access-token", ACCESS_TOKEN)]).await,
        (200, 1)
    );
    assert_eq!(
        ask(49983, "/health", &[]).await,
        (200, 1),
        "everybody may ask that"
    );
}

#[tokio::test]
async fn a_sandbox_is_held_until_its_answer_has_ended() {
    let world = World::new().await;
    let (go_on, gate) = tokio::sync::watch::channel(false);
    let slow = move |_: Request<Incoming>| {
        let mut gate = gate.clone();
        async move {
            let rest = futures::stream::once(async move {
                gate.wait_for(|open| *open).await.unwrap();
                Ok(http_body::Frame::data(bytes::Bytes::from_static(b"end")))
            });
            Response::new(http_body_util::StreamBody::new(rest).boxed())
        }
    };
    world.serve(3000, slow).await;
    world.routes.frozen.store(true, Ordering::SeqCst);
    let mut client = world.client().await;
    let response = client.send(get(3000, "/")).await;
    assert_eq!(
        world.routes.thaws.load(Ordering::SeqCst),
        1,
        "thawed before it was asked"
    );
    assert_eq!(world.routes.holds.count(), 1);
    go_on.send(true).unwrap();
    assert_eq!(Answer::of(response).await.text, "end");
    eventually("it may doze again", || world.routes.holds.count() == 0).await;
}

#[tokio::test]
async fn kept_connections_are_closed_as_soon_as_a_sandbox_leaves_running() {
    // BC-094
    let world = World::new().await;
    let served = world.serve(3000, echo).await;
    let mut client = world.client().await;
    for (state, incarnation) in [(SandboxState::Pausing, 1), (SandboxState::Resuming, 2)] {
        client.get(3000, "/").await;
        eventually("it is kept", || world.gateway.counts().1 == 1).await;
        world.routes.tell(state, incarnation);
        eventually("it is closed", || world.gateway.counts().1 == 0).await;
        world.routes.put(view(ID, 2));
    }
    assert_eq!(served.connections(), 2);
}

#[tokio::test]
async fn news_of_an_earlier_life_leaves_the_present_one_alone() {
    let world = World::new().await;
    world.routes.put(view(ID, 3));
    let served = world.serve(3000, echo).await;
    let mut client = world.client().await;
    client.get(3000, "/").await;
    for (state, incarnation) in [
        (SandboxState::Paused, 2),
        (SandboxState::Resuming, 3),
        (SandboxState::Running, 3),
    ] {
        world.routes.tell(state, incarnation);
        assert_eq!(client.get(3000, "/").await.status, 200);
    }
    assert!(
        served.connections() <= 2,
        "a connection that is used is not cut"
    );
}

#[tokio::test]
async fn a_request_under_way_ends_when_its_sandbox_falls_asleep() {
    // Nothing inside says goodbye, so without the news it would wait for the idle timeout.
    let world = World::new().await;
    let address = raw_server(|mut stream| async move {
        read_head(&mut stream).await;
        std::future::pending::<()>().await;
    })
    .await;
    world.routes.open_port(3000, address);
    let mut client = world.client().await;
    let put_to_sleep = async {
        eventually("it is under way", || world.routes.dials() == 1).await;
        world.routes.asleep_until_woken(woken());
        world.routes.tell(SandboxState::Paused, 1);
    };
    let (answer, ()) = tokio::join!(client.fetch(post(3000, "/", "x")), put_to_sleep);
    assert_eq!(told(&answer), (409, "conflict".into()));
    assert_eq!(answer.headers["retry-after"], "1");
    assert_eq!(world.routes.dials(), 1, "it was not sent again");
}

#[tokio::test]
async fn an_answer_and_a_tunnel_under_way_end_when_their_sandbox_falls_asleep() {
    let world = World::new().await;
    let endless = raw_server(|mut stream| async move {
        read_head(&mut stream).await;
        write(
            &mut stream,
            b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
        )
        .await;
        std::future::pending::<()>().await;
    })
    .await;
    world.routes.open_port(3000, endless);
    world.serve(3001, upgrading_echo).await;
    let (mut streaming, mut tunnelling) = (world.client().await, world.client().await);
    let answer = streaming.send(get(3000, "/")).await;
    let mut switched = tunnelling.send(websocket(3001)).await;
    let upgraded = hyper::upgrade::on(&mut switched).await.unwrap();
    let mut tunnel = TokioIo::new(upgraded);
    tunnel.write_all(b"x\n").await.unwrap();
    world.routes.tell(SandboxState::Paused, 1);
    assert!(
        answer.into_body().collect().await.is_err(),
        "it was cut, not ended"
    );
    let mut rest = Vec::new();
    let end = tokio::time::timeout(Duration::from_secs(20), tunnel.read_to_end(&mut rest)).await;
    assert!(end.is_ok());
    eventually("all is given back", || world.gateway.counts() == (0, 0)).await;
}
