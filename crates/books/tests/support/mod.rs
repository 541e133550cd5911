//! What the tests of the books share: a Redis of their own, a clock that is told, short names.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub(crate) mod histories;

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
};

use sandhold_books::{RedisSettings, ServerClock};
use sandhold_governor::{
    books::{BucketPolicy, Claim, Verb},
    colour::Retention,
    ids::{Bucket, ReplicaId, SlotId},
};
use sandhold_types::{Clock, SandboxId, Timestamp};

/// A Redis of one test, on a socket in a directory of its own.
pub(crate) struct RedisServer {
    child: Child,
    dir: PathBuf,
}

impl RedisServer {
    pub(crate) fn start(dir: &Path) -> Self {
        let socket = dir.join("redis.sock");
        let mut child = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--dir"])
            .arg(dir)
            .arg("--unixsocket")
            .arg(&socket)
            .stdout(Stdio::piped())
            .spawn()
            .expect("redis-server, from the Debian package of that name");
        let log = BufReader::new(child.stdout.take().unwrap());
        let mut lines = log.lines();
        let said_ready = lines.any(|line| line.unwrap().contains("ready to accept connections"));
        assert!(said_ready, "redis-server ended before it was ready");
        // What it says later must not stop it.
        std::thread::spawn(move || lines.for_each(drop));
        let dir = dir.to_owned();
        Self { child, dir }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("redis.sock")
    }

    pub(crate) fn settings(&self, clock: ServerClock) -> RedisSettings {
        let mut settings = RedisSettings::at(&format!("redis+unix://{}", self.socket().display()));
        settings.clock = clock;
        settings
    }

    pub(crate) fn connect(&self) -> redis::Connection {
        let settings = self.settings(ServerClock::Own);
        redis::Client::open(settings.url)
            .unwrap()
            .get_connection()
            .unwrap()
    }

    /// Dies as by a power cut; what it did not save is lost.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A clock that shows what it was told.
#[derive(Debug)]
pub(crate) struct ToldClock(AtomicU64);

impl ToldClock {
    pub(crate) fn new(at: Timestamp) -> Self {
        Self(AtomicU64::new(at.unix_ms()))
    }

    pub(crate) fn tell(&self, at: Timestamp) {
        self.0.store(at.unix_ms(), Ordering::Relaxed);
    }
}

impl Clock for ToldClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_unix_ms(self.0.load(Ordering::Relaxed))
    }
}

pub(crate) fn bucket(name: &str) -> Bucket {
    Bucket {
        namespace: name.parse().unwrap(),
        env: "prod".parse().unwrap(),
    }
}

pub(crate) fn slot(name: &str) -> SlotId {
    name.parse().unwrap()
}

pub(crate) fn replica(name: &str) -> ReplicaId {
    name.parse().unwrap()
}

pub(crate) fn sandbox(n: u64) -> SandboxId {
    format!("{n:020}").parse().unwrap()
}

pub(crate) fn set_bucket(name: &str, quota: u32) -> Verb {
    Verb::SetBucket {
        bucket: bucket(name),
        policy: BucketPolicy::new(quota, Retention::Undeclared),
    }
}

pub(crate) fn acquire(bucket_name: &str, slot_name: &str, owner: &str, lease: &str) -> Verb {
    Verb::Acquire {
        slot: slot(slot_name),
        bucket: bucket(bucket_name),
        owner: owner.parse().unwrap(),
        claim: Claim::Lease {
            lease: lease.parse().unwrap(),
            template: "main".parse().unwrap(),
            ttl: None,
        },
        maker: replica("r1"),
    }
}

pub(crate) fn give_back(slot_name: &str) -> Verb {
    Verb::ReturnSlot {
        slot: slot(slot_name),
        maker: replica("r1"),
    }
}
