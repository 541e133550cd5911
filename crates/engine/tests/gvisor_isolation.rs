//! What a sandbox can reach and what it can do to others (R-P2). Needs root and `runsc`.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

mod support;

use std::{net::Ipv4Addr, process::Command, time::Duration};

use sandhold_engine::{Engine, ExitCause};
use sandhold_network::Network;
use sandhold_platform::{Egress, IpBlock};
use sandhold_types::Resources;
use support::{PLAN, World};
use tokio::io::AsyncWriteExt;

/// The addresses of this machine, the loopback's included.
fn host_addresses() -> Vec<Ipv4Addr> {
    let told = Command::new("ip")
        .args(["-4", "-o", "addr"])
        .output()
        .unwrap();
    let text = String::from_utf8(told.stdout).unwrap();
    let address = |line: &str| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "inet");
        words.nth(1)?.split('/').next()?.parse().ok()
    };
    text.lines().filter_map(address).collect()
}

/// A server on every address of this machine, as the control interface would be.
async fn host_server() -> u16 {
    let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let datagrams = tokio::net::UdpSocket::bind(("0.0.0.0", port))
        .await
        .unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"the host").await;
        }
    });
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        while let Ok((_, from)) = datagrams.recv_from(&mut buffer).await {
            let _ = datagrams.send_to(b"the host", from).await;
        }
    });
    port
}

#[tokio::test]
async fn nothing_private_is_in_reach_by_any_protocol_even_with_the_internet_allowed() {
    let world = World::new().await;
    let port = host_server().await;
    let neighbour = world.boot(PLAN, &Egress::Internet).await;
    let made = world.boot(PLAN, &Egress::Internet).await;
    let mut targets = host_addresses();
    assert!(
        targets.len() > 1,
        "the test is about more than the loopback: {targets:?}"
    );
    // The guest's own loopback is its own.
    targets.retain(|address| !address.is_loopback());
    targets.extend([
        // Our own parts: the router, the uplinks' gateway and the neighbour's uplink.
        Ipv4Addr::new(169, 254, 0, 22),
        Ipv4Addr::new(198, 18, 0, 1),
        uplink_of(&world, &neighbour),
        // Metadata, private ranges, carrier-grade NAT, multicast, broadcast.
        Ipv4Addr::new(169, 254, 169, 254),
        Ipv4Addr::new(10, 0, 0, 1),
        Ipv4Addr::new(10, 255, 255, 53),
        Ipv4Addr::new(172, 17, 0, 1),
        Ipv4Addr::new(192, 168, 1, 1),
        Ipv4Addr::new(100, 64, 0, 1),
        Ipv4Addr::new(224, 0, 0, 1),
        Ipv4Addr::BROADCAST,
    ]);
    let mut probes = Vec::new();
    for target in &targets {
        probes.push(format!("tcp {target}:{port}"));
        probes.push(format!("udp {target}:{port}"));
        probes.push(format!("icmp {target}"));
    }
    probes.push(format!("tcp {}:49983", Ipv4Addr::new(198, 18, 0, 1)));
    probes.push("tcp 10.255.255.53:53".to_owned());
    probes.push(format!("tcp [::ffff:{}]:{port}", targets[0]));
    let asked = probes.iter().map(|probe| world.ask(&made, probe));
    let answers = futures_all(asked).await;
    for (probe, answer) in probes.iter().zip(answers) {
        assert!(!answer.contains("reached"), "{probe}: {answer}");
    }
    // The same probe does find the server where nothing is in between.
    let own = tokio::net::TcpStream::connect((targets[0], port)).await;
    assert!(own.is_ok());
    world.remove(&made).await;
    world.remove(&neighbour).await;
    world.end().await;
}

/// Runs them one after another, four at a time.
async fn futures_all<F: Future<Output = String>>(asked: impl Iterator<Item = F>) -> Vec<String> {
    let mut answers = Vec::new();
    let mut pending: Vec<F> = asked.collect();
    pending.reverse();
    while let Some(first) = pending.pop() {
        let more = (pending.pop(), pending.pop(), pending.pop());
        let wait = |probe: Option<F>| async {
            match probe {
                Some(probe) => Some(probe.await),
                None => None,
            }
        };
        let (a, b, c, d) = tokio::join!(first, wait(more.0), wait(more.1), wait(more.2));
        answers.push(a);
        answers.extend([b, c, d].into_iter().flatten());
    }
    answers
}

fn uplink_of(world: &World, of: &support::Box) -> Ipv4Addr {
    let told = Command::new("ip")
        .args(["-4", "-o", "route"])
        .output()
        .unwrap();
    let text = String::from_utf8(told.stdout).unwrap();
    let link = format!("sh{}{}", world.tag, &of.id.as_str()[..7]);
    let line = text.lines().find(|line| line.contains(&link)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn names_are_resolved_through_the_router_if_there_is_a_way_out_and_only_then() {
    // BC-107
    let world = World::new().await;
    let out = world.boot(PLAN, &Egress::Internet).await;
    let closed = world.boot(PLAN, &Egress::Nothing).await;
    let resolver = format!("udp {}:53", sandhold_network::linux::RESOLVER_ADDRESS);
    let answer = world.ask(&closed, &resolver).await;
    assert!(!answer.contains("reached"), "{answer}");
    // Opened live, and closed again.
    world
        .network
        .set_egress(&closed.id, &Egress::Internet)
        .await
        .unwrap();
    world
        .network
        .set_egress(&out.id, &Egress::Nothing)
        .await
        .unwrap();
    let answer = world.ask(&out, &resolver).await;
    assert!(!answer.contains("reached"), "{answer}");
    if machine_resolves().await {
        let answer = world.ask(&closed, &resolver).await;
        assert!(answer.contains("reached"), "{answer}");
    }
    world.remove(&out).await;
    world.remove(&closed).await;
    world.end().await;
}

/// Whether this machine's own resolver answers anything at all.
async fn machine_resolves() -> bool {
    let lookup = tokio::net::lookup_host("test.example:1");
    // An answer that there is no such name is an answer.
    let begun = std::time::Instant::now();
    let _ = tokio::time::timeout(Duration::from_secs(2), lookup).await;
    begun.elapsed() < Duration::from_secs(1)
}

#[tokio::test]
async fn a_way_out_reaches_exactly_what_its_policy_says() {
    let world = World::new().await;
    // The internet of this test: an address that is nobody's private one, on a namespace of the
    // test's own behind the host.
    let internet = Internet::build(&world.tag);
    let policy = |allowed: &[&str], denied: &[&str]| Egress::Filtered {
        allowed: allowed.iter().map(|a| block(a)).collect(),
        denied: denied.iter().map(|a| block(a)).collect(),
    };
    let made = world.boot(PLAN, &Egress::Internet).await;
    let probe = format!("tcp {}:7", Internet::ADDRESS);
    assert_eq!(world.ask(&made, &probe).await, "reached the internet");
    let cases = [
        (policy(&[], &["0.0.0.0"]), false),
        (policy(&[Internet::ADDRESS], &["0.0.0.0"]), true),
        (policy(&[], &[Internet::ADDRESS]), false),
        (Egress::Nothing, false),
        (Egress::Internet, true),
    ];
    for (egress, reached) in cases {
        world.network.set_egress(&made.id, &egress).await.unwrap();
        let answer = world.ask(&made, &probe).await;
        assert_eq!(answer.contains("reached"), reached, "{egress:?}: {answer}");
    }
    // The outside cannot begin a connection.
    let uplink = uplink_of(&world, &made);
    assert!(!internet.reaches(&world.tag, uplink));
    world.remove(&made).await;
    drop(internet);
    world.end().await;
}

fn block(address: &str) -> IpBlock {
    IpBlock {
        address: address.parse().unwrap(),
        prefix_length: if address == "0.0.0.0" { 0 } else { 32 },
    }
}

/// A namespace that plays a server on the internet.
struct Internet {
    namespace: String,
    server: std::process::Child,
}

impl Internet {
    /// An address in a public range that belongs to no real service; routed here only.
    const ADDRESS: &str = "11.22.33.44";

    fn build(tag: &str) -> Self {
        let namespace = format!("net-{tag}");
        let link = format!("in{tag}");
        let run = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            assert!(
                Command::new("ip").args(words).status().unwrap().success(),
                "ip {line}"
            );
        };
        run(&format!("netns add {namespace}"));
        run(&format!(
            "link add {link} type veth peer name eth0 netns {namespace}"
        ));
        run(&format!("addr add 11.22.33.1/24 dev {link}"));
        run(&format!("link set {link} up"));
        run(&format!(
            "-n {namespace} addr add {}/24 dev eth0",
            Self::ADDRESS
        ));
        run(&format!("-n {namespace} link set eth0 up"));
        run(&format!("-n {namespace} route add default via 11.22.33.1"));
        let script = "import socket\ns=socket.create_server(('0.0.0.0',7))\nprint('up',flush=True)\n\
                      while True:\n c,_=s.accept(); c.sendall(b'the internet'); c.close()";
        let mut server = Command::new("ip")
            .args(["netns", "exec", &namespace, "python3", "-c", script])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut up = String::new();
        let output = server.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut up).unwrap();
        assert_eq!(up, "up\n");
        Self { namespace, server }
    }

    /// Whether the outside can connect to an uplink.
    fn reaches(&self, _tag: &str, uplink: Ipv4Addr) -> bool {
        let script =
            format!("import socket; socket.create_connection(('{uplink}', 49983), timeout=1)");
        Command::new("ip")
            .args(["netns", "exec", &self.namespace, "python3", "-c", &script])
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap()
            .success()
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = Command::new("ip")
            .args(["netns", "del", &self.namespace])
            .status();
    }
}

#[tokio::test]
async fn no_file_or_process_of_the_host_is_visible() {
    let world = World::new().await;
    let made = world.boot(PLAN, &Egress::Nothing).await;
    assert_eq!(
        world.ask(&made, "read /etc/machine-id").await,
        "error NotFound"
    );
    let top = world.ask(&made, "list /").await;
    let mut names: Vec<&str> = top.split(' ').collect();
    names.sort_unstable();
    assert_eq!(names, ["bin", "dev", "etc", "proc", "root", "sys", "tmp"]);
    let processes = world.ask(&made, "list /proc").await;
    let numbers = processes
        .split(' ')
        .filter(|name| name.parse::<u32>().is_ok())
        .count();
    assert_eq!(numbers, 1, "{processes}");
    world.remove(&made).await;
    world.end().await;
}

/// The neighbour that must not notice.
async fn with_a_neighbour(plan: Resources) -> (World, support::Box, support::Box) {
    let world = World::new().await;
    let neighbour = world.boot(PLAN, &Egress::Nothing).await;
    let hog = world.boot(plan, &Egress::Nothing).await;
    (world, neighbour, hog)
}

async fn end(world: World, neighbour: support::Box, hog: support::Box) {
    assert_eq!(world.ask(&neighbour, "ping").await, "pong");
    world.remove(&hog).await;
    world.remove(&neighbour).await;
    world.end().await;
}

/// The guest's answer, or the end of the sandbox if that comes first.
async fn answer_or_end(world: &World, of: &support::Box, line: &str) -> Result<String, ExitCause> {
    tokio::select! {
        answer = world.try_ask(of, line) => match answer {
            Ok(answer) => Ok(answer),
            Err(_) => Err(world.engine.wait(&of.instance).await.unwrap()),
        },
        cause = world.engine.wait(&of.instance) => Err(cause.unwrap()),
    }
}

#[tokio::test]
async fn a_memory_hog_ends_only_its_own_sandbox_and_the_reason_is_told() {
    // R-L12, BC-106
    let (world, neighbour, hog) = with_a_neighbour(PLAN).await;
    assert_eq!(world.ask(&hog, "alloc 128").await, "ok");
    let answer = answer_or_end(&world, &hog, "alloc 600").await;
    assert_eq!(answer, Err(ExitCause::OutOfMemory));
    end(world, neighbour, hog).await;
}

#[tokio::test]
async fn a_disk_filler_is_stopped_at_its_limit_and_the_reason_is_told() {
    let (world, neighbour, hog) = with_a_neighbour(PLAN).await;
    assert_eq!(world.ask(&hog, "write /root/a 20").await, "ok");
    let used = world.engine.usage(&hog.instance).await.unwrap().disk_bytes;
    assert!((20 << 20..40 << 20).contains(&used), "{used}");
    let answer = answer_or_end(&world, &hog, "write /root/b 4000").await;
    assert_eq!(answer, Err(ExitCause::DiskFull));
    end(world, neighbour, hog).await;
}

#[tokio::test]
async fn a_fork_bomb_hurts_only_its_own_sandbox() {
    let (world, neighbour, hog) = with_a_neighbour(PLAN).await;
    // Either the guest is refused or its engine gives up; then the reason is told.
    match answer_or_end(&world, &hog, "fork 5000").await {
        Ok(answer) => assert!(answer.contains("then"), "{answer}"),
        Err(ExitCause::OutOfMemory) => {}
        Err(ExitCause::Crashed(why)) => assert!(why.contains("processes and threads"), "{why}"),
        Err(other) => panic!("{other:?}"),
    }
    end(world, neighbour, hog).await;
}

#[tokio::test]
async fn a_file_descriptor_hog_is_refused_at_its_limit() {
    let (world, neighbour, hog) = with_a_neighbour(PLAN).await;
    let answer = world.ask(&hog, "files 2000000").await;
    // EMFILE
    assert!(answer.ends_with("then Some(24)"), "{answer}");
    assert_eq!(world.ask(&hog, "ping").await, "pong");
    end(world, neighbour, hog).await;
}

#[tokio::test]
async fn a_console_flood_is_bounded() {
    let (world, neighbour, hog) = with_a_neighbour(PLAN).await;
    assert_eq!(world.ask(&hog, "flood 30").await, "ok");
    let console = hog.instance.directory.join("console.log");
    let end_at = std::time::Instant::now() + Duration::from_secs(10);
    loop {
        let length = std::fs::metadata(&console).unwrap().len();
        if length <= 1024 * 1024 {
            break;
        }
        assert!(std::time::Instant::now() < end_at, "{length}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    end(world, neighbour, hog).await;
}
