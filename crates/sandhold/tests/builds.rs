//! R-L3, R-P5: the server is killed at every step of a template's build; afterwards nothing of the
//! build is left, its state is told truly, and the same build succeeds.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that meets the unexpected is to fail"
)]

mod support;

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use support::{Server, Site};

/// The steps of a build, in their order: what it begins with, each step, what a step prints, the
/// agent, warming up, the memory image, publishing.
const BUILD_STEPS: [&str; 8] = [
    "build.base",
    "build.step:2",
    "build.output",
    "build.agent",
    "build.warm",
    "build.capture",
    "build.publish",
    "build.published",
];
/// How long a build may take.
const BUILD_BUDGET: Duration = Duration::from_secs(120);
/// Between two questions about it.
const POLL: Duration = Duration::from_millis(100);

/// A build that was announced.
struct Announced {
    template: String,
    build: String,
}

impl Announced {
    fn path(&self, what: &str) -> String {
        format!("/templates/{}/builds/{}{what}", self.template, self.build)
    }
}

/// Announces and begins a build of a template whose steps nobody has done before.
fn begin(server: &Server, mark: &str) -> Announced {
    let body = json!({"name": "crashed"});
    let answer = server.request("POST", "/v3/templates", Some(body)).unwrap();
    assert_eq!(answer.status, 202, "{answer:?}");
    let text = |field: &str| answer.body[field].as_str().unwrap().to_owned();
    let announced = Announced {
        template: text("templateID"),
        build: text("buildID"),
    };
    let steps = json!([
        {"type": "ENV", "args": ["MARK", mark]},
        {"type": "RUN", "args": [format!("echo {mark} > /home/user/first"), "user"]},
        {"type": "RUN", "args": [format!("echo seen; echo {mark} > /home/user/second"), "user"]},
    ]);
    let plan = json!({"fromTemplate": "base", "steps": steps});
    let path = format!("/v2{}", announced.path(""));
    let begun = server.request("POST", &path, Some(plan)).unwrap();
    assert_eq!(begun.status, 202, "{begun:?}");
    announced
}

fn status(server: &Server, announced: &Announced) -> Value {
    let path = announced.path("/status?logsOffset=0");
    let answer = server.request("GET", &path, None).unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.body
}

/// Waits until a build is over and returns its status.
fn wait_for_end(server: &Server, announced: &Announced) -> Value {
    let begun = Instant::now();
    while begun.elapsed() < BUILD_BUDGET {
        let status = status(server, announced);
        if ["ready", "error"].contains(&status["status"].as_str().unwrap()) {
            return status;
        }
        std::thread::sleep(POLL);
    }
    panic!("the build did not end");
}

/// Makes a sandbox; books whose writer was killed may be settled first.
fn create_when_open(server: &Server, body: &Value) -> support::Answer {
    let begun = Instant::now();
    loop {
        let path = "/v2/sandboxes";
        let made = server.request("POST", path, Some(body.clone())).unwrap();
        if made.body["error_code"] != "unavailable" || begun.elapsed() > BUILD_BUDGET {
            assert_eq!(made.status, 201, "{made:?}");
            return made;
        }
        std::thread::sleep(POLL);
    }
}

fn entries(directory: &Path) -> Vec<String> {
    let listing = fs::read_dir(directory).into_iter().flatten().flatten();
    listing
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// The processes of engines that work for this catalogue.
fn engines_of(catalogue: &Path) -> Vec<String> {
    let place = catalogue.display().to_string();
    let listing = fs::read_dir("/proc").unwrap().flatten();
    let lines = listing.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines
        .filter(|line| line.contains("runsc") && line.contains(&place))
        .collect()
}

#[test]
fn a_crash_at_any_step_of_a_build_leaves_nothing_and_is_told() {
    let site = Site::new();
    let catalogue = site.path().join("templates");
    site.start(&[]).stop();
    for step in BUILD_STEPS {
        let mark = step.replace(['.', ':'], "-");
        let server = site.start(&["--fault-at", step]);
        let cut = begin(&server, &mark);
        server.wait_for_death();
        let server = site.start(&[]);
        // The truth, though the process that knew it is gone.
        let told = status(&server, &cut);
        if step == "build.published" {
            assert_eq!(told["status"], "ready", "{step}: {told}");
        } else {
            assert_eq!(told["status"], "error", "{step}: {told}");
            let reason = told["reason"]["message"].as_str().unwrap();
            assert!(reason.starts_with("interrupted"), "{step}: {told}");
            let builds = entries(&catalogue.join("builds"));
            assert!(!builds.contains(&cut.build), "{step}: {builds:?}");
        }
        // Nothing half-made is left. What the collector takes away lies in `tmp` for a moment.
        let begun = Instant::now();
        for part in ["tmp", "baking"] {
            while !entries(&catalogue.join(part)).is_empty() {
                let left = entries(&catalogue.join(part));
                assert!(
                    begun.elapsed() < BUILD_BUDGET,
                    "{step}: {part} holds {left:?}"
                );
                std::thread::sleep(POLL);
            }
        }
        assert_eq!(engines_of(&catalogue), Vec::<String>::new(), "{step}");
        // The same again: it succeeds, and does not do again what was done.
        let again = begin(&server, &mark);
        let ended = wait_for_end(&server, &again);
        assert_eq!(ended["status"], "ready", "{step}: {ended}");
        let log = ended["logEntries"].to_string();
        let is_cached = log.contains("CACHED [2/3]");
        let was_done = !["build.base", "build.step:2"].contains(&step);
        assert_eq!(is_cached, was_done, "{step}: {log}");
        server.stop();
    }
    let server = site.start(&[]);
    let body = json!({"templateID": "crashed", "timeout": 300});
    let made = create_when_open(&server, &body);
    let id = made.body["sandboxID"].as_str().unwrap();
    assert!(server.answers(id));
    assert_eq!(server.delete(id), Some(204));
    server.stop();
}
