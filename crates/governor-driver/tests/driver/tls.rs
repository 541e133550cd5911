//! A service behind TLS: its certificate is checked, for its API and for its sandboxes (R-G16).

use std::{path::PathBuf, time::Duration};

use sandhold_governor::{Call, CallError, Platform as _, Reply};
use sandhold_governor_driver::{HttpPlatform, HttpPlatformError, HttpPlatformSettings, TrustError};
use sandhold_types::{Generation, SandboxId};

use crate::{front, http::Service, played::bucket};

async fn front(service: &Service) -> u16 {
    front::before(service.start().await).await
}

fn fixture(name: &str) -> PathBuf {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/driver/tls");
    tests.join(name)
}

fn settings(url: String, authority: Option<PathBuf>) -> HttpPlatformSettings {
    HttpPlatformSettings {
        url,
        authority,
        api_key: "key".to_owned(),
        domain: None,
        life: Duration::from_secs(3_600),
    }
}

fn create() -> Call {
    Call::Create {
        slot: "slot".parse().unwrap(),
        bucket: bucket(),
        owner: "o".parse().unwrap(),
        generation: Generation(1),
        template: "base".parse().unwrap(),
    }
}

async fn made(platform: &HttpPlatform) -> SandboxId {
    match platform.call(create()).await {
        Ok(Reply::Created { sandbox, .. }) => sandbox,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn api_and_sandboxes_are_reached_over_tls() {
    let service = Service::default();
    let port = front(&service).await;
    let platform = HttpPlatform::new(HttpPlatformSettings {
        domain: Some(format!("sandboxes.localhost:{port}")),
        ..settings(
            format!("https://platform.localhost:{port}"),
            Some(fixture("authority.pem")),
        )
    })
    .unwrap();
    platform.check().await.unwrap();
    let sandbox = made(&platform).await;
    let probe = platform.call(Call::Probe(sandbox.clone())).await;
    assert_eq!(probe, Ok(Reply::Done), "at its own host name");
    let hosts = service.hosts();
    let own = format!("49983-{sandbox}.sandboxes.localhost:{port}");
    assert!(hosts.contains(&own), "{hosts:?}");
    let killed = platform.call(Call::Kill(sandbox, Generation(1))).await;
    assert_eq!(killed, Ok(Reply::Done));
}

#[tokio::test]
async fn a_certificate_that_is_not_trusted_is_told_and_nothing_is_sent() {
    let service = Service::default();
    let port = front(&service).await;
    let named = format!("https://platform.localhost:{port}");
    // Another's name; another's authority; those of this machine.
    for (url, authority) in [
        (
            format!("https://127.0.0.1:{port}"),
            Some(fixture("authority.pem")),
        ),
        (named.clone(), Some(fixture("other-authority.pem"))),
        (named, None),
    ] {
        let platform = HttpPlatform::new(settings(url.clone(), authority)).unwrap();
        let refused = platform.check().await;
        assert!(
            matches!(refused, Err(HttpPlatformError::Certificate(_))),
            "{url}: {refused:?}"
        );
        let made = platform.call(create()).await;
        assert_eq!(made, Err(CallError::Refused), "certainly nothing was made");
    }
    assert_eq!(service.hosts(), Vec::<String>::new());
    // A service that only speaks TLS says nothing to who does not.
    let plain = settings(format!("http://platform.localhost:{port}"), None);
    let platform = HttpPlatform::new(plain).unwrap();
    assert_eq!(platform.call(create()).await, Err(CallError::NoAnswer));
}

#[tokio::test]
async fn only_the_sandboxes_of_a_trusted_name_are_talked_to() {
    let service = Service::default();
    let port = front(&service).await;
    let platform = HttpPlatform::new(HttpPlatformSettings {
        domain: Some(format!("elsewhere.localhost:{port}")),
        ..settings(
            format!("https://platform.localhost:{port}"),
            Some(fixture("authority.pem")),
        )
    })
    .unwrap();
    let sandbox = made(&platform).await;
    let probe = platform.call(Call::Probe(sandbox)).await;
    assert_eq!(probe, Err(CallError::Refused));
    let hosts = service.hosts();
    assert!(
        !hosts.iter().any(|host| host.starts_with("49983-")),
        "{hosts:?}"
    );
}

#[test]
fn what_cannot_be_trusted_is_told_before_anything_is_sent() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for path in [
        dir.path().join("none"),
        file("empty", ""),
        file("text", "no certificate"),
        file("broken", broken),
        fixture("server.key"),
    ] {
        let made = HttpPlatform::new(settings("https://x".to_owned(), Some(path.clone())));
        let refused = made.map(|_| ()).unwrap_err();
        assert!(
            matches!(&refused, HttpPlatformError::Trust(TrustError::Authority { path: of, .. }) if *of == path),
            "{refused}"
        );
    }
    for url in ["ftp://x", "x", "https://", "https://x/path", ""] {
        let made = HttpPlatform::new(settings(url.to_owned(), None));
        assert!(matches!(made, Err(HttpPlatformError::Address(_))), "{url}");
    }
}
