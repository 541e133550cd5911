//! Runs on real sandboxes that are killed in every way: each leaves no process, no slot and no lease, and a
//! log that tells it (R-G1, R-G3, R-L12; issue 5).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that meets the unexpected is to fail"
)]

mod support;

use std::{fs, time::Duration};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::{
    Server, Site,
    governed::{GREY, begin, begin_with, events, fast, release, run_of, until, used},
};

/// How long a run may take to its end, however it is killed.
const END_BUDGET: Duration = Duration::from_secs(120);

/// It works for ever, and so does what it started; what it wrote is told. The mark of each is `4711`.
const WORKS: &str = "echo 1 >one.txt; setsid sleep 4711 & while :; do sleep 1; done";

fn sandbox_of(server: &Server, run: &str) -> String {
    let told = run_of(server, run);
    told["sandbox_id"].as_str().unwrap().to_owned()
}

/// The engine's processes of a sandbox.
fn processes(sandbox: &str) -> Vec<Pid> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let of_sandbox = entries.filter(|entry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.contains("runsc") && line.contains(sandbox)
    });
    let pid = |entry: fs::DirEntry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Pid::from_raw(number)
    };
    of_sandbox.filter_map(pid).collect()
}

fn signal_all(sandbox: &str, signal: Signal) {
    let found = processes(sandbox);
    assert!(!found.is_empty(), "{sandbox} has no process");
    for pid in found {
        // Some end with the first of them.
        let _ = kill_process(pid, signal);
    }
}

fn cancel(server: &Server, run: &str) {
    let told = run_of(server, run);
    let body = json!({ "owner_id": told["owner_id"], "lease_id": told["lease_id"] });
    let path = format!("/v1/sandbox-runs/{run}/cancel");
    let answer = server.request("POST", &path, Some(body)).unwrap();
    assert_eq!(answer.status, 202, "{answer:?}");
}

fn ended(server: &Server, run: &str) -> Value {
    until(&format!("{run} ended"), END_BUDGET, || {
        let told = run_of(server, run);
        (told["state"] != "running" && told["state"] != "waiting").then_some(told)
    })
}

/// The log has one start, its artifact once, and one end, which says this.
fn is_told(server: &Server, run: &str, code: &str) -> Value {
    let told = ended(server, run);
    assert_eq!(told["code"], code, "{run}: {told}");
    let kind = match code {
        "exited" => "event: completed",
        _ => "event: error",
    };
    let log = events(server, run);
    for line in ["event: started", kind] {
        assert_eq!(log.matches(line).count(), 1, "{run}: {line} in {log}");
    }
    assert!(log.contains(&format!("\"code\":\"{code}\"")), "{log}");
    told
}

/// Slots, leases, sandboxes and whatever a sandbox leaves on the machine, counted anew.
fn nothing_is_left(site: &Site, server: &Server) {
    until("all slots are free", GREY * 3, || {
        (used(server) == 0).then_some(())
    });
    let leases = server.request("GET", "/v1/leases", None).unwrap();
    assert_eq!(leases.body, json!({ "leases": [] }));
    assert_eq!(server.list().len(), 0);
    until("nothing is left on the machine", GREY, || {
        site.traces().all().is_empty().then_some(())
    });
}

#[test]
fn however_a_run_is_killed_nothing_is_left_and_its_log_tells_it() {
    let site = Site::new();
    let server = site.start(&fast(&[]));
    for run in ["killed", "deleted", "hung", "cancelled", "left"] {
        begin(&server, run, WORKS);
    }
    begin_with(&server, "late", WORKS, json!({ "timeout": 5 }));
    until("each has told its artifact", END_BUDGET, || {
        let runs = ["killed", "deleted", "hung", "cancelled", "left", "late"];
        let told = runs.iter().all(|run| {
            let last = run_of(&server, run)["last_event_id"].as_u64();
            last.is_some_and(|last| last >= 2)
        });
        told.then_some(())
    });
    // Its client went when it had begun; its process ends by itself.
    let quits = "echo 1 >one.txt; exit 7";
    begin_with(&server, "quits", quits, json!({}));

    signal_all(&sandbox_of(&server, "killed"), Signal::KILL);
    signal_all(&sandbox_of(&server, "hung"), Signal::STOP);
    let deleted = server.delete(&sandbox_of(&server, "deleted"));
    assert_eq!(deleted, Some(204));
    cancel(&server, "cancelled");
    cancel(&server, "left");

    is_told(&server, "killed", "sandbox_gone");
    let told = is_told(&server, "deleted", "sandbox_gone");
    let words = told["message"].as_str().unwrap();
    assert!(words.len() > "its sandbox is gone: ".len(), "why: {words}");
    is_told(&server, "hung", "sandbox_unresponsive");
    is_told(&server, "late", "deadline_exceeded");
    is_told(&server, "cancelled", "cancelled");
    is_told(&server, "left", "cancelled");
    assert_eq!(is_told(&server, "quits", "exited")["exit_code"], 7);
    nothing_is_left(&site, &server);
}

#[test]
fn a_run_that_fills_its_disk_ends_and_says_so() {
    let site = Site::new();
    let server = site.start(&fast(&[]));
    begin(&server, "full", "exec dd if=/dev/zero of=filler bs=1M");
    let told = is_told(&server, "full", "sandbox_gone");
    assert_eq!(told["message"], "its sandbox is gone: it filled its disk");
    nothing_is_left(&site, &server);
}

#[test]
fn a_sandbox_that_is_kept_has_no_process_of_a_run_that_was_cut_off() {
    let site = Site::new();
    let server = site.start(&fast(&[]));
    let kept = json!({ "owner_id": "o", "lease_id": "l", "keep": "sandbox" });
    begin_with(&server, "cut", WORKS, kept.clone());
    let sandbox = sandbox_of(&server, "cut");
    cancel(&server, "cut");
    is_told(&server, "cut", "cancelled");
    let looks = "grep -lsa 'sleep.471[1]' /proc/[0-9]*/cmdline";
    begin_with(&server, "looks", looks, kept);
    let told = is_told(&server, "looks", "exited");
    assert_eq!(told["sandbox_id"], sandbox, "it was kept for its lease");
    assert_eq!(
        told["exit_code"],
        1,
        "nothing is found: {}",
        events(&server, "looks")
    );
    assert_eq!(used(&server), 1);
    assert_eq!(release(&server, "o", "l"), 202);
    nothing_is_left(&site, &server);
}

#[test]
fn what_a_killed_server_was_at_is_finished_by_the_next() {
    let site = Site::new();
    let server = site.start(&fast(&[]));
    begin(&server, "works", WORKS);
    begin(
        &server,
        "ends",
        "echo 1 >one.txt; while [ ! -e /tmp/go ]; do sleep 0.1; done; exit 4",
    );
    begin_with(&server, "late", WORKS, json!({ "timeout": 10 }));
    // These are anywhere before their start when the server dies.
    for n in 0..4 {
        support::governed::ask_for(&server, &format!("early-{n}"), WORKS, json!({}));
    }
    until("they are known", END_BUDGET, || {
        let known = (0..4).all(|n| run_of(&server, &format!("early-{n}"))["state"].is_string());
        known.then_some(())
    });
    server.crash();
    let server = site.start(&fast(&[]));
    server.write(&sandbox_of(&server, "ends"), "/tmp/go", "now");
    assert_eq!(is_told(&server, "ends", "exited")["exit_code"], 4);
    is_told(&server, "late", "deadline_exceeded");
    cancel(&server, "works");
    is_told(&server, "works", "cancelled");
    for n in 0..4 {
        let run = format!("early-{n}");
        let told = until("its fate is known", END_BUDGET, || {
            let told = run_of(&server, &run);
            let goes_on = told["state"] == "running" && told["last_event_id"] != 0;
            (told["state"] == "error" || goes_on).then_some(told)
        });
        if told["state"] == "running" {
            cancel(&server, &run);
            is_told(&server, &run, "cancelled");
        } else {
            let code = told["code"].as_str().unwrap();
            assert!(matches!(code, "replica_lost" | "lease_lost"), "{told}");
        }
    }
    nothing_is_left(&site, &server);
}
