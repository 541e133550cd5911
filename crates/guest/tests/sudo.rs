//! `sudo` against the real agent, asked by its ordinary user.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail loudly")]

mod support;

use std::{
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::json;
use support::{Agent, USER, USER_ID};

/// An agent whose user may do everything by these rules.
async fn agent(rules: &str) -> (Agent, tempfile::TempDir) {
    let etc = tempfile::tempdir().unwrap();
    let passwd = format!(
        "root:x:0:0::/root:/bin/sh\n{USER}:x:{USER_ID}:{USER_ID}::/tmp:/bin/sh\n\
         third:x:61235:61235::/:/bin/sh\n"
    );
    std::fs::write(etc.path().join("passwd"), passwd).unwrap();
    std::fs::write(etc.path().join("group"), format!("{USER}:x:{USER_ID}:\n")).unwrap();
    std::fs::create_dir(etc.path().join("sudoers.d")).unwrap();
    std::fs::write(etc.path().join("sudoers.d/user"), rules).unwrap();
    let agent = Agent::start_without_life(json!({ "etcDir": etc.path() })).await;
    (agent, etc)
}

fn sudo(agent: &Agent, uid: u32, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandhold-agent"));
    command
        .arg0("sudo")
        .args(arguments)
        .env("SANDHOLD_SUDO_SOCKETS", agent.dir.path().join("run/sudo"))
        .env("KEPT_BY_E", "1")
        .uid(uid)
        .gid(uid)
        .current_dir("/");
    command
}

fn output(agent: &Agent, arguments: &[&str]) -> Output {
    sudo(agent, USER_ID, arguments).output().unwrap()
}

fn stdout(agent: &Agent, arguments: &[&str]) -> String {
    String::from_utf8(output(agent, arguments).stdout).unwrap()
}

#[tokio::test]
async fn a_command_runs_as_root_with_the_callers_streams_and_its_own_status() {
    let (agent, _etc) = agent(&format!("{USER} ALL=(ALL) NOPASSWD:ALL\n")).await;
    assert_eq!(stdout(&agent, &["id", "-u"]), "0\n");
    assert_eq!(stdout(&agent, &["-u", "third", "id", "-u"]), "61235\n");
    assert_eq!(
        stdout(&agent, &["printf", "%s|", "a  b", "$x", ""]),
        "a  b|$x||"
    );
    assert_eq!(
        output(&agent, &["sh", "-c", "exit 7"]).status.code(),
        Some(7)
    );
    let killed = output(&agent, &["sh", "-c", "kill -KILL $$"]);
    assert_eq!(killed.status.code(), Some(137));
    let seen = stdout(&agent, &["A=1", "env"]);
    for line in [
        "A=1",
        "HOME=/root",
        "USER=root",
        &format!("SUDO_USER={USER}"),
    ] {
        assert!(seen.lines().any(|l| l == line), "{line} in {seen}");
    }
    assert!(!seen.contains("KEPT_BY_E"));
    assert!(stdout(&agent, &["-E", "env"]).contains("KEPT_BY_E=1"));
    assert_eq!(stdout(&agent, &["-i", "pwd"]), "/root\n");
    let missing = output(&agent, &["no-such-program"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("command not found"));
    let mut child = sudo(&agent, USER_ID, &["cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"piped").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"piped");
}

#[tokio::test]
async fn only_whom_the_rules_allow_everything_is_served() {
    let (agent, _etc) = agent(&format!("{USER} ALL=(ALL) NOPASSWD: /bin/ls\n")).await;
    let refused = output(&agent, &["id", "-u"]);
    assert_eq!(
        (refused.status.code(), refused.stdout),
        (Some(1), Vec::new())
    );
    assert!(String::from_utf8_lossy(&refused.stderr).contains("sudoers"));
}

#[tokio::test]
async fn another_user_cannot_use_somebodys_socket() {
    let (agent, _etc) = agent(&format!("{USER} ALL=(ALL) NOPASSWD:ALL\n")).await;
    let socket = agent.dir.path().join(format!("run/sudo/{USER_ID}.sock"));
    let script = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])";
    let connect = |uid| {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", script]).arg(&socket).uid(uid).gid(uid);
        command.output().unwrap().status.success()
    };
    assert!(connect(USER_ID));
    assert!(!connect(61_235));
}

#[tokio::test]
async fn a_command_ends_with_the_sudo_that_asked_for_it() {
    let (agent, _etc) = agent(&format!("{USER} ALL=(ALL) NOPASSWD:ALL\n")).await;
    let script = "echo $$; exec sleep 300";
    let mut child = sudo(&agent, USER_ID, &["sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let out = child.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    let process = Path::new("/proc").join(line.trim());
    assert!(process.exists());
    child.kill().unwrap();
    child.wait().unwrap();
    let end = std::time::Instant::now() + support::PATIENCE;
    while process.exists() {
        assert!(std::time::Instant::now() < end, "it goes on");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn garbage_on_the_socket_hurts_nobody() {
    use std::{io::Write as _, os::unix::net::UnixStream};
    let (agent, _etc) = agent(&format!("{USER} ALL=(ALL) NOPASSWD:ALL\n")).await;
    let socket = agent.dir.path().join(format!("run/sudo/{USER_ID}.sock"));
    for bytes in [
        &b""[..],
        b"\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x02{}",
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        let mut stream = UnixStream::connect(&socket).unwrap();
        // It may have hung up already.
        let _ = stream.write_all(bytes);
    }
    assert_eq!(stdout(&agent, &["id", "-u"]), "0\n");
}
