//! The process service over the wire (wire contract 2.3; field cases BC-002 to BC-029).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt as _;
use http::Method;
use http_body_util::{BodyExt, StreamBody};
use sandhold_agent_proto::frame::encode;
use serde_json::{Value, json};
use support::{Agent, base64, basic, descendants, eventually, zombies_of};

fn cat() -> Value {
    json!({ "process": { "cmd": "cat" } })
}

#[tokio::test]
async fn output_is_binary_safe_and_complete() {
    // BC-002
    let agent = Agent::start().await;
    let random = agent.shell("head -c 70000 /dev/urandom").await;
    assert_eq!((random.stdout.len(), random.exit_code), (70_000, Some(0)));
    let bytes = agent.shell(r"printf 'a\000b\376\377'").await;
    assert_eq!(bytes.stdout, b"a\0b\xfe\xff");
}

#[tokio::test]
async fn the_last_line_needs_no_newline() {
    // BC-004
    let agent = Agent::start().await;
    for _ in 0..20 {
        let short = agent.shell("printf tail-without-newline").await;
        assert_eq!(short.out(), "tail-without-newline");
    }
    let long = agent.shell("seq 10000; printf tail-without-newline").await;
    assert!(long.out().ends_with("10000\ntail-without-newline"));
}

#[tokio::test]
async fn without_input_a_reader_is_at_the_end_at_once() {
    // BC-007
    let agent = Agent::start().await;
    for command in ["cat", "grep x", "sort", "python3 -"] {
        let start = Instant::now();
        let finished = agent.shell(command).await;
        assert!(finished.exit_code.is_some(), "{command}");
        assert!(start.elapsed() < Duration::from_secs(5), "{command}");
    }
}

#[tokio::test]
async fn input_is_open_unless_refused_and_ends_when_closed() {
    let agent = Agent::start().await;
    let mut events = agent.start_process(cat(), &[]).await;
    let pid = events.pid().await;
    let process = json!({ "pid": pid });
    let input = json!({ "process": process, "input": { "stdin": base64(b"over\n") } });
    assert_eq!(
        agent
            .unary("/process.Process/SendInput", input)
            .await
            .status,
        200
    );
    let seen = events.read_until(|seen| seen.stdout == b"over\n").await;
    assert_eq!(seen.exit_code, None);

    let wrong = json!({ "process": process, "input": { "pty": base64(b"x") } });
    let wrong = agent.unary("/process.Process/SendInput", wrong).await;
    assert_eq!(wrong.json()["code"], "failed_precondition");

    let close = json!({ "process": process });
    assert_eq!(
        agent
            .unary("/process.Process/CloseStdin", close.clone())
            .await
            .status,
        200
    );
    assert_eq!(events.finish().await.exit_code, Some(0));
    let gone = agent.unary("/process.Process/CloseStdin", close).await;
    assert_eq!(gone.json()["code"], "not_found");
}

#[tokio::test]
async fn input_streams_half_duplex() {
    let agent = Agent::start().await;
    let mut events = agent.start_process(cat(), &[]).await;
    let pid = events.pid().await;
    let (sender, receiver) = futures::channel::mpsc::unbounded::<Value>();
    let frames = receiver.map(|message| {
        let frame = encode(0, message.to_string().as_bytes()).unwrap();
        Ok::<_, std::io::Error>(hyper::body::Frame::data(Bytes::from(frame)))
    });
    let body = BodyExt::boxed(StreamBody::new(frames));
    let headers = [
        ("x-access-token", support::ACCESS_TOKEN),
        ("content-type", "application/connect+json"),
    ];
    let call = agent.send_body(Method::POST, "/process.Process/StreamInput", &headers, body);
    let feed = async {
        let data =
            |text: &str| json!({ "data": { "input": { "stdin": base64(text.as_bytes()) } } });
        sender
            .unbounded_send(json!({ "start": { "process": { "pid": pid } } }))
            .unwrap();
        sender.unbounded_send(data("one\n")).unwrap();
        // The first line comes back while the call is still open.
        events.read_until(|seen| seen.stdout == b"one\n").await;
        sender.unbounded_send(json!({ "keepalive": {} })).unwrap();
        sender.unbounded_send(data("two\n")).unwrap();
        events.read_until(|seen| seen.stdout == b"two\n").await;
        drop(sender);
    };
    let (answer, ()) = tokio::join!(call, feed);
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn a_dropped_connection_does_not_end_a_process() {
    // BC-009
    let agent = Agent::start().await;
    let mut events = agent
        .shell_events(
            "trap 'echo over; exit 7' USR1; echo $$; while :; do sleep .02; done",
            &[],
        )
        .await;
    let pid = events.pid().await;
    events.read_until(|seen| !seen.stdout.is_empty()).await;
    drop(events);
    let list = agent.unary("/process.Process/List", json!({})).await.json();
    assert_eq!(list["processes"][0]["pid"], pid);

    let selector = json!({ "process": { "pid": pid } });
    let mut again = agent
        .stream("/process.Process/Connect", selector.clone(), &[])
        .await;
    assert_eq!(again.pid().await, pid);
    assert!(agent.shell(&format!("kill -USR1 {pid}")).await.exit_code == Some(0));
    let finished = again.finish().await;
    assert_eq!(
        (finished.out().as_str(), finished.exit_code),
        ("over\n", Some(7))
    );

    // Just ended, it can still be asked how it went, and is listed no more.
    let late = agent
        .stream("/process.Process/Connect", selector, &[])
        .await
        .finish()
        .await;
    assert_eq!((late.pid, late.exit_code), (pid, Some(7)));
    let list = agent.unary("/process.Process/List", json!({})).await.json();
    assert_eq!(list, json!({}));
}

#[tokio::test]
async fn processes_are_found_by_tag() {
    let agent = Agent::start().await;
    let start = json!({ "process": { "cmd": "sleep", "args": ["60"] }, "tag": "t" });
    let mut events = agent.start_process(start, &[]).await;
    let pid = events.pid().await;
    let kill = json!({ "process": { "tag": "t" }, "signal": "SIGNAL_SIGTERM" });
    assert_eq!(
        agent
            .unary("/process.Process/SendSignal", kill.clone())
            .await
            .status,
        200
    );
    let finished = events.finish().await;
    assert_eq!(finished.exit_code, Some(143));
    assert_eq!(finished.end["status"], "signal: terminated");
    let gone = agent.unary("/process.Process/SendSignal", kill).await;
    assert_eq!(
        (gone.status.as_u16(), gone.json()["code"].clone()),
        (404, json!("not_found"))
    );
    assert_ne!(pid, 0);
}

#[tokio::test]
async fn a_kill_reaches_everything_the_command_started() {
    let agent = Agent::start().await;
    let mut events = agent.shell_events("sleep 600 & sleep 600; true", &[]).await;
    let pid = events.pid().await;
    eventually("both sleep", || descendants(pid).len() == 2).await;
    let kill = json!({ "process": { "pid": pid }, "signal": "SIGNAL_SIGKILL" });
    assert_eq!(
        agent
            .unary("/process.Process/SendSignal", kill)
            .await
            .status,
        200
    );
    assert_eq!(events.finish().await.exit_code, Some(137));
    eventually("all are gone", || descendants(agent.pid()).is_empty()).await;
}

#[tokio::test]
async fn the_timeout_of_a_start_kills_the_process_even_in_the_background() {
    let agent = Agent::start().await;
    let start = Instant::now();
    let mut events = agent
        .shell_events("sleep 600; true", &[("connect-timeout-ms", "400")])
        .await;
    let pid = events.pid().await;
    // The client goes away; the deadline stays.
    let watcher = agent
        .stream(
            "/process.Process/Connect",
            json!({ "process": { "pid": pid } }),
            &[],
        )
        .await;
    let trailer = events.finish().await.trailer;
    assert_eq!(trailer["error"]["code"], "deadline_exceeded");
    assert!(start.elapsed() >= Duration::from_millis(400));
    assert_eq!(watcher.finish().await.end["status"], "signal: killed");
    eventually("nothing is left", || descendants(agent.pid()).is_empty()).await;
}

#[tokio::test]
async fn the_timeout_of_a_connect_ends_only_the_stream() {
    let agent = Agent::start().await;
    let mut events = agent.shell_events("sleep 600", &[]).await;
    let pid = events.pid().await;
    let selector = json!({ "process": { "pid": pid } });
    let timeout = [("connect-timeout-ms", "100")];
    let watcher = agent
        .stream("/process.Process/Connect", selector, &timeout)
        .await;
    assert_eq!(
        watcher.finish().await.trailer["error"]["code"],
        "deadline_exceeded"
    );
    assert_eq!(descendants(agent.pid()), [pid]);
}

#[tokio::test]
async fn an_idle_stream_says_that_it_is_alive() {
    let agent = Agent::start().await;
    let mut events = agent
        .shell_events("sleep 600", &[("keepalive-ping-interval", "1")])
        .await;
    events.pid().await;
    let event = events.next().await.unwrap();
    assert_eq!(event["event"], json!({ "keepalive": {} }));
}

#[tokio::test]
async fn a_reader_that_does_not_read_blocks_only_its_own_process() {
    // BC-011, BC-013
    let agent = Agent::start().await;
    agent.shell("true").await;
    let before = agent.resident_bytes();
    let mut stuck = agent.shell_events("yes", &[]).await;
    let pid = stuck.pid().await;
    let one_gone = agent.shell_events("yes", &[]).await;
    drop(one_gone);
    for _ in 0..20 {
        let start = Instant::now();
        assert_eq!(agent.shell("echo ok").await.out(), "ok\n");
        assert!(start.elapsed() < Duration::from_secs(2));
    }
    let flood = agent.shell("head -c 20000000 /dev/zero | tr '\\0' y").await;
    assert_eq!(flood.stdout.len(), 20_000_000);
    assert!(agent.resident_bytes() < before + (64 << 20));
    let kill = json!({ "process": { "pid": pid }, "signal": "SIGNAL_SIGKILL" });
    assert_eq!(
        agent
            .unary("/process.Process/SendSignal", kill)
            .await
            .status,
        200
    );
    assert_eq!(stuck.finish().await.exit_code, Some(137));
}

#[tokio::test]
async fn streams_of_clients_that_left_are_freed() {
    // BC-014
    let agent = Agent::start().await;
    agent.shell("true").await;
    let before = agent.open_descriptors();
    let mut streams = Vec::new();
    for _ in 0..50 {
        let mut events = agent.shell_events("exec sleep 900", &[]).await;
        events.pid().await;
        streams.push(events);
    }
    drop(streams);
    eventually("the processes live on", || {
        descendants(agent.pid()).len() == 50
    })
    .await;
    // Two pipes each stay; the fifty connections go.
    eventually("the connections are gone", || {
        agent.open_descriptors() < before + 50 * 2 + 10
    })
    .await;
}

#[tokio::test]
async fn variables_arrive_byte_for_byte() {
    // BC-017
    let agent = Agent::start().await;
    let variables = json!({
        "A": "two words", "B": "x\"y$HOME`id`", "C": "l1\nl2", "D": "=a=b", "E": "日本", "F": "",
    });
    let process = json!({ "cmd": "/usr/bin/env", "args": ["-0"], "envs": variables });
    let finished = agent
        .start_process(json!({ "process": process }), &[])
        .await
        .finish()
        .await;
    let out = finished.out();
    let seen: Vec<(&str, &str)> = out
        .split_terminator('\0')
        .map(|pair| pair.split_once('=').unwrap())
        .collect();
    for (name, value) in variables.as_object().unwrap() {
        assert!(
            seen.contains(&(name.as_str(), value.as_str().unwrap())),
            "{name}"
        );
    }
    assert!(seen.contains(&("E2B_SANDBOX", "true")));
    assert!(!out.contains("SANDHOLD_CONTROL_TOKEN"));
}

#[tokio::test]
async fn arguments_keep_their_boundaries() {
    // BC-020
    let agent = Agent::start().await;
    let process = json!({ "cmd": "python3", "args": ["-c", "print(\"a  b\")"] });
    let finished = agent
        .start_process(json!({ "process": process }), &[])
        .await
        .finish()
        .await;
    assert_eq!(finished.out(), "a  b\n");
}

#[tokio::test]
async fn commands_end_as_their_shell_sees_it() {
    // BC-021, BC-022
    let agent = Agent::start().await;
    assert_eq!(agent.shell("cat <<'Z'\n$x\nZ").await.out(), "$x\n");
    assert_eq!(agent.shell("echo ok # note").await.out(), "ok\n");
    for unfinished in ["cat <<E", "echo \"abc", "( echo a"] {
        assert!(
            agent.shell(unfinished).await.exit_code.is_some(),
            "{unfinished}"
        );
    }
}

#[tokio::test]
async fn a_background_process_does_not_hold_up_the_end() {
    let agent = Agent::start().await;
    let start = Instant::now();
    let finished = agent
        .shell("(while sleep .01; do echo noise; done) & echo started")
        .await;
    assert_eq!(finished.exit_code, Some(0));
    assert!(finished.out().starts_with("started\n") || finished.out().contains("started"));
    assert!(start.elapsed() < Duration::from_secs(5));
    // And it is still there: nobody closed its output.
    assert!(!descendants(agent.pid()).is_empty());
}

#[tokio::test]
async fn orphans_are_reaped() {
    // BC-024
    let agent = Agent::start().await;
    let one = "for i in $(seq 250); do sh -c '(sleep 0.05 &)'; done";
    futures::future::join_all((0..8).map(|_| agent.shell(one))).await;
    let nothing_is_left = || descendants(agent.pid()).is_empty() && zombies_of(agent.pid()) == 0;
    eventually("no zombie is left", nothing_is_left).await;
    let forks = "i=0; while [ $i -lt 2000 ]; do (:) || exit 1; i=$((i + 1)); done; echo $i";
    for _ in 0..10 {
        assert_eq!(agent.shell(forks).await.out(), "2000\n");
    }
    eventually("no zombie is left", nothing_is_left).await;
}

fn pty_contains(text: &'static str) -> impl Fn(&support::Finished) -> bool {
    move |seen| String::from_utf8_lossy(&seen.pty).contains(text)
}

fn typed(pid: u32, text: &str) -> Value {
    json!({ "process": { "pid": pid }, "input": { "pty": base64(text.as_bytes()) } })
}

#[tokio::test]
async fn a_terminal_has_the_size_it_is_given() {
    // BC-027
    let agent = Agent::start().await;
    let script = "trap 'stty size' WINCH; echo $TERM; stty size; while :; do sleep .02; done";
    // One shell for each size: bash forgets a signal that comes while its trap runs.
    for (rows, columns, shown) in [(50, 140, "50 140\r\n"), (1, 1, "1 1\r\n")] {
        let start = json!({
            "process": { "cmd": "/bin/bash", "args": ["-c", script] },
            "pty": { "size": { "cols": 111, "rows": 37 } },
        });
        let mut events = agent.start_process(start, &[]).await;
        let pid = events.pid().await;
        let seen = events.read_until(pty_contains("37 111\r\n")).await;
        assert!(pty_contains("xterm-256color")(&seen));
        // Sizes of zero are ignored.
        for (rows, columns) in [(0, 0), (50, 0), (rows, columns)] {
            let update = json!({
                "process": { "pid": pid }, "pty": { "size": { "cols": columns, "rows": rows } },
            });
            let answer = agent.unary("/process.Process/Update", update).await;
            assert_eq!(answer.status, 200);
        }
        events.read_until(pty_contains(shown)).await;
    }
}

#[tokio::test]
async fn a_terminal_answers_its_keys() {
    // BC-022
    let agent = Agent::start().await;
    let start = json!({
        "process": { "cmd": "/bin/bash", "args": ["--norc", "-i"] },
        "pty": { "size": { "cols": 80, "rows": 24 } },
    });
    let mut events = agent.start_process(start, &[]).await;
    let pid = events.pid().await;
    let send = "/process.Process/SendInput";
    events.read_until(pty_contains("$ ")).await;
    agent.unary(send, typed(pid, "( echo a\n")).await;
    events.read_until(pty_contains("> ")).await;
    // The Enter after it: a signal that comes just before bash begins to read is seen by it with the
    // next key only. Without the Ctrl-C, Enter would bring another "> ".
    agent.unary(send, typed(pid, "\u{3}\n")).await;
    events.read_until(pty_contains("$ ")).await;
    agent.unary(send, typed(pid, "echo ba''ck\n")).await;
    events.read_until(pty_contains("back\r\n")).await;
    let selector = json!({ "process": { "pid": pid } });
    let close = agent.unary("/process.Process/CloseStdin", selector).await;
    assert_eq!(close.json()["code"], "failed_precondition");
    agent.unary(send, typed(pid, "exit 5\n")).await;
    assert_eq!(events.finish().await.exit_code, Some(5));
}

#[tokio::test]
async fn a_command_runs_as_the_user_it_names() {
    let agent = Agent::start().await;
    let finished = agent
        .shell("id -u; id -G; echo $HOME $USER $LOGNAME $SHELL; pwd")
        .await;
    let home = agent.home();
    let home = home.display();
    let expected = format!("61234\n61234 61300\n{home} sbuser sbuser /bin/bash\n{home}\n");
    assert_eq!(finished.out(), expected);
    let root = basic("root");
    let as_root = agent
        .shell_events("id -u", &[("authorization", &root)])
        .await;
    assert_eq!(as_root.finish().await.out(), "0\n");
    let nobody = basic("no-such-user");
    let refused = agent
        .shell_events("id", &[("authorization", &nobody)])
        .await;
    assert_eq!(
        refused.finish().await.trailer["error"]["code"],
        "unauthenticated"
    );
}

#[tokio::test]
async fn a_command_gets_the_usual_limit_of_descriptors() {
    let agent = Agent::start().await;
    let own = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let expected = own.map_or_else(|| String::from("unlimited"), |limit| limit.to_string());
    assert_eq!(agent.shell("ulimit -n").await.out().trim(), expected);
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let agent = Agent::start().await;
    for (process, part) in [
        (json!({ "cmd": "/no/such/program" }), "No such file"),
        (
            json!({ "cmd": "true", "cwd": "/no/such/directory" }),
            "No such file",
        ),
        (
            json!({ "cmd": "true", "cwd": "/etc/passwd" }),
            "Not a directory",
        ),
        (
            json!({ "cmd": "true", "cwd": "/root" }),
            "Permission denied",
        ),
        (json!({ "cmd": "" }), "empty"),
        (json!({ "cmd": "true", "envs": { "A=B": "x" } }), "variable"),
        (json!({ "cmd": "true", "args": ["a\u{0}b"] }), "nul byte"),
        (json!({ "cmd": "true", "cwd": "x".repeat(10_000) }), "bytes"),
    ] {
        let finished = agent
            .start_process(json!({ "process": process }), &[])
            .await
            .finish()
            .await;
        let error = &finished.trailer["error"];
        assert_eq!(error["code"], "invalid_argument", "{process}");
        assert!(error["message"].as_str().unwrap().contains(part), "{error}");
    }
    let nothing = agent.start_process(json!({}), &[]).await.finish().await;
    assert_eq!(nothing.trailer["error"]["code"], "invalid_argument");
    assert!(descendants(agent.pid()).is_empty());
}

#[tokio::test]
async fn binary_clients_are_served_too() {
    let agent = Agent::start().await;
    let headers = [
        ("x-access-token", support::ACCESS_TOKEN),
        ("content-type", "application/proto"),
    ];
    let list = agent
        .send(Method::POST, "/process.Process/List", &headers, "")
        .await;
    assert_eq!(list.status, 200);
    assert_eq!(list.header("content-type"), Some("application/proto"));
    assert!(list.body.is_empty());
    // StartRequest { process: { cmd: "true" }, stdin: false }
    let start = b"\x0a\x06\x0a\x04true\x20\x00";
    let headers = [
        ("x-access-token", support::ACCESS_TOKEN),
        ("content-type", "application/connect+proto"),
        ("accept-encoding", "gzip, br, zstd"),
        ("connect-accept-encoding", "gzip"),
    ];
    let answer = agent
        .send(
            Method::POST,
            "/process.Process/Start",
            &headers,
            encode(0, start).unwrap(),
        )
        .await;
    assert_eq!(answer.status, 200);
    // Never compressed: streams must not wait in a compressor.
    assert_eq!(answer.header("content-encoding"), None);
    assert_eq!(answer.header("connect-content-encoding"), None);
    // The end event in binary: field 3, `exited`, "exit status 0".
    let text = String::from_utf8_lossy(&answer.body);
    assert!(text.contains("exit status 0"), "{text:?}");
    assert!(text.ends_with("{}"), "{text:?}");
}
