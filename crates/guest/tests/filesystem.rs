//! The filesystem service over the wire (wire contract 2.3; field cases BC-056, BC-058, BC-064).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use serde_json::{Value, json};
use support::{Agent, USER, USER_ID, owner_of};

const STAT: &str = "/filesystem.Filesystem/Stat";
const LIST: &str = "/filesystem.Filesystem/ListDir";
const MAKE: &str = "/filesystem.Filesystem/MakeDir";
const MOVE: &str = "/filesystem.Filesystem/Move";
const REMOVE: &str = "/filesystem.Filesystem/Remove";
const WATCH: &str = "/filesystem.Filesystem/WatchDir";

#[tokio::test]
async fn an_entry_is_described_completely() {
    let agent = Agent::start().await;
    agent.put("d/f.txt", "12345").await;
    let entry = agent.unary(STAT, json!({ "path": "d/f.txt" })).await.json()["entry"].clone();
    assert_eq!(entry["name"], "f.txt");
    assert_eq!(entry["type"], "FILE_TYPE_FILE");
    assert_eq!(
        entry["path"],
        agent.home().join("d/f.txt").display().to_string()
    );
    // Proto-JSON writes 64-bit integers as text.
    assert_eq!(entry["size"], "5");
    assert_eq!(entry["mode"], 0o644);
    assert_eq!(entry["permissions"], "-rw-r--r--");
    assert_eq!(
        (&entry["owner"], &entry["group"]),
        (&json!(USER), &json!(USER))
    );
    assert!(entry["modifiedTime"].as_str().unwrap().starts_with("20"));
    assert!(entry.get("symlinkTarget").is_none() && entry.get("isSymlink").is_none());
    let missing = agent.unary(STAT, json!({ "path": "nope" })).await;
    assert_eq!(
        (missing.status.as_u16(), missing.json()["code"].clone()),
        (404, json!("not_found"))
    );
}

#[tokio::test]
async fn links_are_listed_whatever_they_lead_to() {
    // BC-056
    let agent = Agent::start().await;
    let home = agent.home();
    fs::create_dir(home.join("dir")).unwrap();
    fs::write(home.join("dir/inside"), "").unwrap();
    symlink(home.join("dir"), home.join("a-dir")).unwrap();
    symlink(home.join("dir/inside"), home.join("b-file")).unwrap();
    symlink("nowhere", home.join("c-dangling")).unwrap();
    symlink("d-loop", home.join("d-loop")).unwrap();
    let entries = agent
        .unary(LIST, json!({ "path": "~", "depth": 1 }))
        .await
        .json();
    let links: Vec<(String, String)> = entries["entries"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|entry| entry["isSymlink"] == true)
        .map(|entry| {
            let text = |name: &str| entry[name].as_str().unwrap().to_owned();
            (text("type"), text("symlinkTarget"))
        })
        .collect();
    let at = |name: &str| home.join(name).display().to_string();
    let expected = [
        ("FILE_TYPE_DIRECTORY", at("dir")),
        ("FILE_TYPE_FILE", at("dir/inside")),
        ("FILE_TYPE_SYMLINK", "nowhere".into()),
        ("FILE_TYPE_SYMLINK", "d-loop".into()),
    ];
    assert_eq!(
        links,
        expected.map(|(kind, target)| (kind.to_owned(), target))
    );
    let through = agent.unary(LIST, json!({ "path": "a-dir" })).await.json();
    assert_eq!(through["entries"][0]["name"], "inside");
}

#[tokio::test]
async fn directories_are_made_moved_and_removed() {
    let agent = Agent::start().await;
    let path = json!({ "path": "x/y" });
    assert_eq!(
        agent.unary(MAKE, path.clone()).await.json()["entry"]["name"],
        "y"
    );
    assert_eq!(owner_of(&agent.home().join("x")), USER_ID);
    assert_eq!(
        agent.unary(MAKE, path).await.json()["code"],
        "already_exists"
    );
    agent.put("f", "x").await;
    assert_eq!(
        agent.unary(MAKE, json!({ "path": "f" })).await.json()["code"],
        "invalid_argument"
    );
    assert_eq!(
        agent.unary(LIST, json!({ "path": "f" })).await.json()["code"],
        "invalid_argument"
    );
    assert_eq!(
        agent.unary(LIST, json!({ "path": "nope" })).await.json()["code"],
        "not_found"
    );

    let moved = agent
        .unary(
            MOVE,
            json!({ "source": "x", "destination": "new/parent/z" }),
        )
        .await;
    assert_eq!(moved.json()["entry"]["name"], "z");
    let missing = agent
        .unary(MOVE, json!({ "source": "x", "destination": "w" }))
        .await;
    assert_eq!(missing.json()["code"], "not_found");
    assert_eq!(
        agent.unary(REMOVE, json!({ "path": "new" })).await.status,
        200
    );
    assert!(!agent.home().join("new").exists());
    assert_eq!(
        agent.unary(REMOVE, json!({ "path": "new" })).await.status,
        200
    );
    for root in ["/", "/..", "//"] {
        let refused = agent
            .unary_as(REMOVE, json!({ "path": root }), Some("root"))
            .await;
        assert_eq!(refused.json()["code"], "invalid_argument");
    }
}

#[tokio::test]
async fn the_users_rights_decide() {
    // BC-058
    let agent = Agent::start().await;
    let closed = agent.dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::write(closed.join("f"), "").unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let at = |name: &str| closed.join(name).display().to_string();
    for (method, body) in [
        (STAT, json!({ "path": at("f") })),
        (LIST, json!({ "path": at("") })),
        (MAKE, json!({ "path": at("new") })),
        (REMOVE, json!({ "path": at("f") })),
        (MOVE, json!({ "source": at("f"), "destination": "mine" })),
        (
            "/filesystem.Filesystem/CreateWatcher",
            json!({ "path": at("") }),
        ),
    ] {
        let as_user = agent.unary(method, body.clone()).await;
        assert_eq!(as_user.json()["code"], "permission_denied", "{method}");
        assert_eq!(as_user.status, 403);
    }
    let as_root = agent
        .unary_as(STAT, json!({ "path": at("f") }), Some("root"))
        .await;
    assert_eq!(as_root.status, 200);
    let unknown = agent
        .unary_as(STAT, json!({ "path": "/" }), Some("nobody-here"))
        .await;
    assert_eq!(
        (unknown.status.as_u16(), unknown.json()["code"].clone()),
        (401, json!("unauthenticated"))
    );
}

async fn next_event(events: &mut support::Events) -> (String, String) {
    let event = events.next().await.unwrap()["filesystem"].clone();
    let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
    (text("name"), text("type"))
}

#[tokio::test]
async fn a_watch_tells_what_happens_below() {
    // BC-064: writes through the files API are seen like all others.
    let agent = Agent::start().await;
    fs::create_dir_all(agent.home().join("w/sub")).unwrap();
    for path in ["w", "w/sub"] {
        std::os::unix::fs::chown(agent.home().join(path), Some(USER_ID), None).unwrap();
    }
    let watch = json!({ "path": "w", "recursive": true, "includeEntry": true });
    let mut events = agent.stream(WATCH, watch, &[]).await;
    assert_eq!(events.next().await.unwrap(), json!({ "start": {} }));

    agent.put("w/sub/f", "x").await;
    let created = events.next().await.unwrap()["filesystem"].clone();
    assert_eq!(
        (&created["name"], &created["type"]),
        (&json!("sub/f"), &json!("EVENT_TYPE_CREATE"))
    );
    assert_eq!(created["entry"]["owner"], USER);
    let seen = |name: &str, kind: &str| (name.to_owned(), format!("EVENT_TYPE_{kind}"));
    assert_eq!(next_event(&mut events).await, seen("sub/f", "WRITE"));
    agent.shell("cd w; mv sub/f g; chmod 600 g; rm g").await;
    assert_eq!(next_event(&mut events).await, seen("sub/f", "RENAME"));
    assert_eq!(next_event(&mut events).await, seen("g", "CREATE"));
    assert_eq!(next_event(&mut events).await, seen("g", "CHMOD"));
    assert_eq!(next_event(&mut events).await, seen("g", "REMOVE"));

    // What is made in a new directory before it can be watched is told as well, once.
    agent
        .shell("cd w; mkdir -p n/m; echo > n/m/deep; mv n elsewhere; echo > elsewhere/m/late")
        .await;
    let mut names = Vec::new();
    while names.last() != Some(&seen("elsewhere/m/late", "CREATE")) {
        names.push(next_event(&mut events).await);
    }
    for name in ["n", "elsewhere"] {
        let times = names
            .iter()
            .filter(|one| **one == seen(name, "CREATE"))
            .count();
        assert_eq!(times, 1, "{name} in {names:?}");
    }

    fs::remove_dir_all(agent.home().join("w")).unwrap();
    while next_event(&mut events).await != seen(".", "REMOVE") {}
    assert_eq!(events.next().await, Err(json!({})));
}

#[tokio::test]
async fn without_recursion_only_the_directory_itself_counts() {
    let agent = Agent::start().await;
    agent.put("w/sub/x", "").await;
    let mut events = agent.stream(WATCH, json!({ "path": "w" }), &[]).await;
    events.next().await.unwrap();
    agent.put("w/sub/y", "").await;
    agent.put("w/z", "").await;
    assert_eq!(next_event(&mut events).await.0, "z");
}

#[tokio::test]
async fn watchers_are_polled_and_removed() {
    let agent = Agent::start().await;
    agent.put("w/a", "").await;
    let create = agent
        .unary(
            "/filesystem.Filesystem/CreateWatcher",
            json!({ "path": "w" }),
        )
        .await;
    let watcher = json!({ "watcherId": create.json()["watcherId"] });
    agent.put("w/b", "").await;
    let mut seen: Vec<Value> = Vec::new();
    while seen.is_empty() {
        let events = agent
            .unary("/filesystem.Filesystem/GetWatcherEvents", watcher.clone())
            .await;
        seen.extend(
            events.json()["events"]
                .as_array()
                .cloned()
                .unwrap_or_default(),
        );
    }
    assert_eq!(seen[0], json!({ "name": "b", "type": "EVENT_TYPE_CREATE" }));
    let remove = "/filesystem.Filesystem/RemoveWatcher";
    assert_eq!(agent.unary(remove, watcher.clone()).await.status, 200);
    assert_eq!(
        agent.unary(remove, watcher).await.json()["code"],
        "not_found"
    );
    for (path, code) in [("nope", "not_found"), ("w/a", "invalid_argument")] {
        let refused = agent
            .unary(
                "/filesystem.Filesystem/CreateWatcher",
                json!({ "path": path }),
            )
            .await;
        assert_eq!(refused.json()["code"], code);
    }
}

#[tokio::test]
async fn a_client_that_does_not_poll_is_told_to_look_again() {
    let agent = Agent::start().await;
    agent.put("w/a", "").await;
    let create = agent
        .unary(
            "/filesystem.Filesystem/CreateWatcher",
            json!({ "path": "w" }),
        )
        .await;
    let watcher = json!({ "watcherId": create.json()["watcherId"] });
    let before = agent.resident_bytes();
    // Far more than the kernel and the agent keep together.
    agent
        .shell("cd w; for i in $(seq 1 15000); do echo > $i; done")
        .await;
    let mut told = false;
    while !told {
        let events = agent
            .unary("/filesystem.Filesystem/GetWatcherEvents", watcher.clone())
            .await
            .json();
        let empty = Vec::new();
        let events = events["events"].as_array().unwrap_or(&empty);
        assert!(events.len() <= 4096);
        told = events.iter().any(|event| event["name"] == ".");
    }
    assert!(agent.resident_bytes() < before + (64 << 20));
}
