//! What a node leaves on its host: nothing. Needs root.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{fs, path::PathBuf, process::Command, time::Instant};

use sandhold_network::{LinuxNetwork, Network, NetworkError};
use sandhold_platform::{DialError, Egress};
use sandhold_types::{Deadline, Entropy, SandboxId, SystemEntropy};

fn tag() -> String {
    let mut random = [0; 6];
    SystemEntropy.fill(&mut random);
    random.iter().map(|b| char::from(b'a' + b % 26)).collect()
}

fn state(tag: &str) -> PathBuf {
    PathBuf::from("/run/sandhold").join(tag)
}

/// Tables, interfaces, mounts and notes of a node.
fn left(tag: &str) -> Vec<String> {
    let output = |program: &str, arguments: &[&str]| {
        let told = Command::new(program).args(arguments).output().unwrap();
        String::from_utf8(told.stdout).unwrap()
    };
    let everything = [
        output("nft", &["list", "tables"]),
        output("ip", &["-o", "link"]),
        fs::read_to_string("/proc/self/mountinfo").unwrap(),
    ];
    let lines = everything.iter().flat_map(|text| text.lines());
    let mut left: Vec<String> = lines
        .filter(|l| l.contains(tag))
        .map(str::to_owned)
        .collect();
    for note in fs::read_dir(state(tag)).into_iter().flatten().flatten() {
        left.push(note.path().display().to_string());
    }
    left
}

#[tokio::test]
async fn the_hosts_part_is_on_with_the_first_uplink_and_off_with_the_last() {
    let tag = tag();
    let network = LinuxNetwork::new(&tag).await.unwrap();
    let ids: Vec<SandboxId> = (0..3)
        .map(|_| SandboxId::generate(&SystemEntropy))
        .collect();
    network.attach(&ids[0], &Egress::Nothing).await.unwrap();
    assert!(
        !left(&tag).iter().any(|l| l.contains("table")),
        "{:?}",
        left(&tag)
    );
    network.attach(&ids[1], &Egress::Internet).await.unwrap();
    network
        .set_egress(&ids[0], &Egress::Internet)
        .await
        .unwrap();
    let forwarding = || fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap();
    assert_eq!(forwarding(), "1\n");
    assert!(left(&tag).iter().any(|l| l.contains("table")));
    network.set_egress(&ids[0], &Egress::Nothing).await.unwrap();
    assert!(left(&tag).iter().any(|l| l.contains("table")));
    // Again with the same identifier: what was there is replaced.
    network.attach(&ids[1], &Egress::Internet).await.unwrap();
    network.detach(&ids[1]).await.unwrap();
    assert!(
        !left(&tag).iter().any(|l| l.contains("table")),
        "{:?}",
        left(&tag)
    );
    network.detach(&ids[0]).await.unwrap();
    // Idempotent, and fine for one that never was.
    network.detach(&ids[0]).await.unwrap();
    network.detach(&ids[2]).await.unwrap();
    assert_eq!(left(&tag), Vec::<String>::new());
    fs::remove_dir(state(&tag)).unwrap();
}

#[tokio::test]
async fn a_later_process_puts_back_what_an_earlier_one_switched_on() {
    // R-L3
    let tag = tag();
    let id = SandboxId::generate(&SystemEntropy);
    let earlier = LinuxNetwork::new(&tag).await.unwrap();
    earlier.attach(&id, &Egress::Internet).await.unwrap();
    drop(earlier);
    let later = LinuxNetwork::new(&tag).await.unwrap();
    assert_eq!(later.list().await.unwrap(), vec![id.clone()]);
    later.detach(&id).await.unwrap();
    assert_eq!(left(&tag), Vec::<String>::new());
    fs::remove_dir(state(&tag)).unwrap();
}

#[tokio::test]
async fn dialling_is_bounded_in_time_and_says_what_is_wrong() {
    let tag = tag();
    let network = LinuxNetwork::new(&tag).await.unwrap();
    let id = SandboxId::generate(&SystemEntropy);
    let within = |ms| Deadline::after(Instant::now(), std::time::Duration::from_millis(ms));
    let gone = network.dial(&id, 80, within(1000)).await;
    assert!(matches!(gone, Err(DialError::Gone)), "{gone:?}");
    network.attach(&id, &Egress::Nothing).await.unwrap();
    // An interface that nobody reads from: the kernel itself answers in the inner namespace, that
    // nothing listens there.
    let closed = network.dial(&id, 80, within(1000)).await;
    assert!(
        matches!(closed, Err(DialError::PortClosed { port: 80 })),
        "{closed:?}"
    );
    network.detach(&id).await.unwrap();
    fs::remove_dir(state(&tag)).unwrap();
}

#[tokio::test]
async fn a_bad_tag_is_refused() {
    for bad in ["", "ABCDEF", "abc", "../../", "abcdefg"] {
        let refused = LinuxNetwork::new(bad).await;
        assert!(
            matches!(refused, Err(NetworkError::Unsupported { .. })),
            "{bad:?}"
        );
    }
}

#[tokio::test]
async fn many_sandboxes_share_a_host() {
    let tag = tag();
    let network = LinuxNetwork::new(&tag).await.unwrap();
    let ids: Vec<SandboxId> = (0..12)
        .map(|_| SandboxId::generate(&SystemEntropy))
        .collect();
    let attach = |id: &SandboxId| {
        let id = id.clone();
        let network = &network;
        async move { network.attach(&id, &Egress::Internet).await.map(drop) }
    };
    let made = futures::future::join_all(ids.iter().map(attach)).await;
    assert!(made.iter().all(Result::is_ok), "{made:?}");
    let mut listed = network.list().await.unwrap();
    let mut wanted = ids.clone();
    listed.sort();
    wanted.sort();
    assert_eq!(listed, wanted);
    let removed = futures::future::join_all(ids.iter().map(|id| network.detach(id))).await;
    assert!(removed.iter().all(Result::is_ok), "{removed:?}");
    assert_eq!(left(&tag), Vec::<String>::new());
    fs::remove_dir(state(&tag)).unwrap();
}
