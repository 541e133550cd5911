//! The governor on real sandboxes: runs whose server dies, incidents with the numbers scaled, another
//! server as the platform (R-G3, R-G16, R-I1, R-I4, R-I6).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that meets the unexpected is to fail"
)]

#[path = "../../governor-driver/tests/driver/front.rs"]
mod front;
mod support;

use std::{sync::atomic::Ordering, time::Duration};

use serde_json::json;
use support::{
    Server, Site,
    governed::{CYCLE, GREY, begin, events, fast, release, run_of, set_bucket, taken, until, used},
    proxy::Proxy,
};

#[test]
fn a_run_goes_on_when_its_server_was_killed() {
    // R-G3
    let site = Site::new();
    let server = site.start(&fast(&[]));
    let script = "echo 1 >one.txt; while [ ! -e go ]; do sleep 0.1; done; echo 2 >two.txt; exit 5";
    begin(&server, "mine", script);
    let sandbox = run_of(&server, "mine")["sandbox_id"]
        .as_str()
        .unwrap()
        .to_owned();
    server.crash();
    let server = site.start(&fast(&[]));
    assert_eq!(run_of(&server, "mine")["state"], "running");
    server.write(&sandbox, "go", "now");
    let ended = until("the run ended", GREY * 3, || {
        let run = run_of(&server, "mine");
        (run["state"] != "running").then_some(run)
    });
    assert_eq!(
        (&ended["state"], &ended["exit_code"]),
        (&json!("completed"), &json!(5))
    );
    let events = events(&server, "mine");
    for told in ["event: started", "one.txt", "two.txt", "event: completed"] {
        assert_eq!(events.matches(told).count(), 1, "{told} in {events}");
    }
    until("nothing is left", GREY, || {
        (used(&server) == 0).then_some(())
    });
    assert!(!server.list().contains(&sandbox));
}

#[test]
fn self_lock_the_last_sandbox_pauses_and_its_quota_comes_back() {
    // R-I4: its listing would be empty on a platform that hides what is paused; its lease is over.
    let site = Site::new();
    let server = site.start(&fast(&[]));
    set_bucket(&server, 1, Some(1));
    let sandbox = taken(&server, "o", "l");
    assert_eq!(server.pause(&sandbox), Some(204));
    until("its place is free", GREY + CYCLE * 6, || {
        (used(&server) == 0).then_some(())
    });
    assert!(!server.list().contains(&sandbox));
    taken(&server, "other", "l");
}

#[test]
fn undeletable_a_sleeper_that_cannot_wake_is_deleted_all_the_same() {
    // R-I6
    let site = Site::new();
    let server = site.start(&fast(&[]));
    set_bucket(&server, 1, None);
    let sandbox = taken(&server, "o", "l");
    assert_eq!(server.pause(&sandbox), Some(204));
    let directory = site.path().join("sandboxes").join(&sandbox);
    for entry in std::fs::read_dir(&directory).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("image") {
            for file in std::fs::read_dir(entry.path()).unwrap().flatten() {
                std::fs::write(file.path(), "no image").unwrap();
            }
        }
    }
    let woken = server.connect(&sandbox);
    assert!(woken.is_none_or(|status| status >= 400), "{woken:?}");
    assert_eq!(release(&server, "o", "l"), 202);
    until("its place is free", GREY + CYCLE * 4, || {
        (used(&server) == 0).then_some(())
    });
    assert!(!server.list().contains(&sandbox));
}

/// A server whose governor makes its sandboxes on another.
struct Pair {
    governor: Server,
    platform: Server,
    proxy: Proxy,
    sites: (Site, Site),
}

impl Pair {
    fn start() -> Self {
        let sites = (Site::new(), Site::new());
        let platform = sites.1.start(&[]);
        let proxy = Proxy::before(&platform.url);
        let governor = Self::governor(&sites.0, &proxy, &platform);
        Self {
            governor,
            platform,
            proxy,
            sites,
        }
    }

    fn governor(site: &Site, proxy: &Proxy, platform: &Server) -> Server {
        site.start(&fast(&[
            "--platform-url",
            &proxy.url,
            "--platform-key",
            &platform.key,
        ]))
    }

    /// The governor's process dies and is started anew.
    fn restart(self) -> Self {
        self.governor.crash();
        let governor = Self::governor(&self.sites.0, &self.proxy, &self.platform);
        Self { governor, ..self }
    }
}

#[test]
fn another_server_is_a_platform_as_good_as_our_own() {
    // R-G16
    let pair = Pair::start();
    let sandbox = taken(&pair.governor, "o", "l");
    assert!(pair.platform.list().contains(&sandbox), "it is made there");
    assert!(!pair.governor.list().contains(&sandbox), "and not here");
    let detail = pair
        .platform
        .request("GET", &format!("/sandboxes/{sandbox}"), None);
    let metadata = detail.unwrap().body["metadata"].clone();
    assert_eq!(
        metadata["owner_id"], "o",
        "R-G2: it tells whose it is: {metadata}"
    );
    assert_eq!(taken(&pair.governor, "o", "l"), sandbox);
    assert_eq!(release(&pair.governor, "o", "l"), 202);
    until("it is gone", GREY, || {
        (!pair.platform.list().contains(&sandbox)).then_some(())
    });

    begin(&pair.governor, "mine", "echo 1 >one.txt; exit 3");
    let ended = until("the run ended", Duration::from_secs(60), || {
        let run = run_of(&pair.governor, "mine");
        (run["state"] != "running").then_some(run)
    });
    assert_eq!(
        (&ended["state"], &ended["exit_code"]),
        (&json!("completed"), &json!(3))
    );
    assert!(events(&pair.governor, "mine").contains("one.txt"));
    until("nothing is left", GREY, || {
        pair.platform.list().is_empty().then_some(())
    });

    // What a process left behind that died is found and swept.
    taken(&pair.governor, "left", "l");
    let pair = pair.restart();
    until("it is swept", GREY + CYCLE * 6, || {
        pair.platform.list().is_empty().then_some(())
    });
    until("its slot is free", CYCLE, || {
        (used(&pair.governor) == 0).then_some(())
    });
}

#[test]
fn a_platform_behind_tls_is_trusted_by_its_authority_or_not_used() {
    // R-G16: its API and its sandboxes.
    let sites = (Site::new(), Site::new());
    let platform = sites.1.start(&["--domain", "sandboxes.localhost"]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let port = runtime.block_on(front::before(platform.url.clone()));
    let tls = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../governor-driver/tests/driver/tls"
    );
    let (url, domain) = (
        format!("https://platform.localhost:{port}"),
        format!("sandboxes.localhost:{port}"),
    );
    let with = |authority: &str| {
        let authority = format!("{tls}/{authority}");
        let more = [
            "--platform-url",
            &url,
            "--platform-key",
            &platform.key,
            "--platform-domain",
            &domain,
            "--platform-ca",
            &authority,
        ];
        fast(&more)
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let wrong = with("other-authority.pem");
    let told = sites
        .0
        .refuses(&wrong.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(
        told.contains("the certificate of the platform is not trusted"),
        "{told}"
    );
    let right = with("authority.pem");
    let governor = sites
        .0
        .start(&right.iter().map(String::as_str).collect::<Vec<_>>());
    begin(&governor, "mine", "echo 1 >one.txt; exit 3");
    let ended = until("the run ended", Duration::from_secs(60), || {
        let run = run_of(&governor, "mine");
        (run["state"] != "running").then_some(run)
    });
    assert_eq!(
        (&ended["state"], &ended["exit_code"]),
        (&json!("completed"), &json!(3))
    );
    assert!(events(&governor, "mine").contains("one.txt"));
    until("nothing is left", GREY, || {
        platform.list().is_empty().then_some(())
    });
}

#[test]
fn the_spiral_ends_when_writes_answer_again() {
    // R-I1: reads answer, every create and delete times out; nobody renews what dead replicas left.
    const LEFT: u32 = 12;
    // As many as open the circuit breaker.
    const TRIED: u64 = 5;
    let pair = Pair::start();
    set_bucket(&pair.governor, LEFT, None);
    for n in 0..LEFT {
        taken(&pair.governor, &format!("left-{n}"), "l");
    }
    let pair = pair.restart();
    let illness = &pair.proxy.illness;
    illness.writes_time_out.store(true, Ordering::SeqCst);
    until("deletes were tried and timed out", GREY + CYCLE * 6, || {
        (illness.timed_out.load(Ordering::SeqCst) >= TRIED).then_some(())
    });
    assert_eq!(pair.platform.list().len(), LEFT as usize);
    assert_eq!(
        used(&pair.governor),
        u64::from(LEFT),
        "no slot is freed before it is gone"
    );
    illness.writes_time_out.store(false, Ordering::SeqCst);
    // A create gets through while the clean-up goes on, as soon as there is one place.
    let made = std::thread::scope(|scope| {
        let create = scope.spawn(|| taken(&pair.governor, "new", "l"));
        until(
            "all that was left is gone",
            CYCLE * 2 + Duration::from_secs(10),
            || {
                let listed = pair.platform.list();
                (listed.len() <= 1).then_some(())
            },
        );
        create.join().unwrap()
    });
    assert!(pair.platform.list().contains(&made));
    // What is gone from its platform is confirmed a moment later.
    until("only its slot is taken", CYCLE, || {
        (used(&pair.governor) == 1).then_some(())
    });
    assert_eq!(release(&pair.governor, "new", "l"), 202);
    until("nothing is left", GREY, || {
        pair.platform.list().is_empty().then_some(())
    });
}
