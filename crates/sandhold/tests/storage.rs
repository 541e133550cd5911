//! R-P11, R-L3: a file system that is full, or becomes so half-way, costs nobody anything that was
//! there, and a power cut nothing that was acknowledged. The data directory is on a small file system
//! of its own, made and taken away by the test.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that meets the unexpected is to fail"
)]

mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::json;
use support::{Server, Site};

const MIB: u64 = 1 << 20;
/// How large the file system is.
const VOLUME_MIB: u64 = 3 * 1024;
/// What is left free where an image, beside the reserve, no longer fits: less than the node's reserve.
const NEARLY_FULL_MIB: u64 = 300;

/// A file system on a loop device.
struct Volume {
    directory: tempfile::TempDir,
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {output:?}");
}

impl Volume {
    fn new() -> Self {
        let directory = tempfile::Builder::new()
            .prefix("sandhold-volume-")
            .tempdir()
            .unwrap();
        let volume = Self { directory };
        let image = fs::File::create(volume.image()).unwrap();
        image.set_len(VOLUME_MIB * MIB).unwrap();
        // Nothing is kept for root: full is full.
        run(
            "mkfs.ext4",
            &["-q", "-m", "0", volume.image().to_str().unwrap()],
        );
        fs::create_dir(volume.path()).unwrap();
        volume.mount();
        volume
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }

    fn mount(&self) {
        let (image, path) = (self.image(), self.path());
        run(
            "mount",
            &[
                "-o",
                "loop",
                image.to_str().unwrap(),
                path.to_str().unwrap(),
            ],
        );
    }

    fn unmount(&self) {
        // A process that is on its way out holds its files a moment longer than its command line.
        within_budget("unmounting", || {
            let unmounted = Command::new("umount").arg(self.path()).output().unwrap();
            unmounted.status.success()
        });
    }

    /// Ends what works on this file system, as the power that goes does.
    fn end_processes(&self) {
        let place = self.path().display().to_string();
        loop {
            let processes = fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
                let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
                String::from_utf8_lossy(&line).contains(&place)
            });
            let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
            let ids: Vec<i32> = ids.collect();
            if ids.is_empty() {
                return;
            }
            for id in ids.into_iter().filter_map(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
            }
            std::thread::yield_now();
        }
    }

    fn free_bytes(&self) -> u64 {
        let free = rustix::fs::statvfs(self.path()).unwrap();
        free.f_bavail * free.f_frsize
    }

    /// Takes all room but `left_mib`.
    fn fill(&self, left_mib: u64) {
        fill(&self.path(), &self.filler(), left_mib);
        assert!(
            self.free_bytes() <= (left_mib + 1) * MIB,
            "{}",
            self.free_bytes()
        );
    }

    fn give_back(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let path = self.path();
        let _ = Command::new("umount").arg("-l").arg(path).output();
    }
}

/// Takes room in large parts and then smaller ones, until no more than `left_mib` is there.
fn fill(volume: &Path, filler: &Path, left_mib: u64) {
    let file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(filler)
        .unwrap();
    let mut part = 256 * MIB;
    while part >= 4096 {
        let length = file.metadata().unwrap().len();
        let free = rustix::fs::statvfs(volume).unwrap();
        let spare = (free.f_bavail * free.f_frsize).saturating_sub(left_mib * MIB);
        let flags = rustix::fs::FallocateFlags::empty();
        if spare < part || rustix::fs::fallocate(&file, flags, length, part).is_err() {
            part /= 2;
        }
    }
}

/// Status and stable code of an answer to a request.
fn asked(server: &Server, method: &str, path: &str, body: serde_json::Value) -> (u16, String) {
    let answer = server
        .request(method, path, Some(body))
        .expect("the server lives");
    let code = answer.body["error_code"].as_str().unwrap_or_default();
    (answer.status, code.to_owned())
}

fn refused() -> (u16, String) {
    (503, String::from("capacity_exceeded"))
}

/// How long it may take until what was left half-way is put in order.
const SETTLED_BUDGET: Duration = Duration::from_secs(120);
/// Between two looks at it.
const POLL: Duration = Duration::from_millis(200);

fn within_budget(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < SETTLED_BUDGET, "{what}: never came true");
        std::thread::sleep(POLL);
    }
}

/// Everything that needs room and is asked of a sandbox, or beside it.
fn demands(id: &str) -> Vec<(&'static str, String, serde_json::Value)> {
    let of = |what: &str| format!("/sandboxes/{id}/{what}");
    let create = json!({"templateID": "base", "timeout": 300});
    vec![
        ("POST", of("snapshots"), json!({})),
        ("POST", of("pause"), json!({})),
        ("POST", of("clones"), json!({"count": 2})),
        ("POST", String::from("/v2/sandboxes"), create),
    ]
}

fn assert_whole(site: &Site, server: &Server, ids: &BTreeSet<String>, what: &str) {
    assert_eq!(server.list(), *ids, "{what}");
    // A blank for which there was no room is unmarked until the auditor has seen it twice.
    within_budget(what, || site.traces().all() == *ids);
    assert_eq!(site.snapshots_on_disk(), server.snapshots(), "{what}");
    for id in ids {
        let images = images_of(site, id);
        let asleep = usize::from(server.state(id) == "paused");
        assert_eq!(images.len(), asleep, "{what}: {images:?}");
    }
}

fn images_of(site: &Site, id: &str) -> Vec<String> {
    let directory = site.path().join("sandboxes").join(id);
    let names = fs::read_dir(directory).unwrap().flatten();
    let names = names.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("image-")).collect()
}

#[test]
fn what_does_not_fit_on_the_disk_is_refused_and_costs_nothing() {
    let volume = Volume::new();
    let site = Site::within(&volume.path());
    let server = site.start(&[]);
    let (awake, asleep) = (server.create().unwrap(), server.create().unwrap());
    let snapshot = server.snapshot(&awake).unwrap();
    assert_eq!(server.pause(&asleep), Some(204));
    let ids = BTreeSet::from([awake.clone(), asleep.clone()]);
    // Before it is full where room can be foreseen, and when nothing is left at all.
    for left_mib in [NEARLY_FULL_MIB, 0] {
        volume.fill(left_mib);
        let what = format!("{left_mib} MiB left");
        for (method, path, body) in demands(&awake) {
            let (status, code) = asked(&server, method, &path, body);
            // The books of who has what cannot be written any more then.
            let no_books = left_mib == 0 && path == "/v2/sandboxes" && code == "unavailable";
            assert!(
                no_books || code == "capacity_exceeded",
                "{what}: {path}: {code}"
            );
            assert_eq!(status, 503, "{what}: {path}");
            assert!(server.answers(&awake), "{what}: {path}");
        }
        let build = server.request("POST", "/v3/templates", Some(json!({"name": "full"})));
        let build = build.unwrap().body;
        let (template, build) = (build["templateID"].as_str(), build["buildID"].as_str());
        let path = format!(
            "/v2/templates/{}/builds/{}",
            template.unwrap(),
            build.unwrap()
        );
        let plan = json!({"fromTemplate": "base", "steps": []});
        assert_eq!(
            asked(&server, "POST", &path, plan),
            refused(),
            "{what}: a build"
        );
        // A rollback needs no room but for its record.
        let rolled = server.roll_back(&awake, &snapshot);
        assert!(matches!(rolled, Some(200 | 503)), "{what}: {rolled:?}");
        assert!(server.answers(&awake), "{what}");
        assert_whole(&site, &server, &ids, &what);
        volume.give_back();
    }
    // With room again everything goes on, from what was kept before.
    assert_eq!(server.connect(&asleep), Some(201));
    assert!(server.answers(&asleep));
    assert_eq!(server.roll_back(&awake, &snapshot), Some(200));
    server.snapshot(&awake).unwrap();
    // And what is there can always be taken away (R-L8).
    volume.fill(0);
    assert_eq!(server.delete(&asleep), Some(204));
    volume.give_back();
    assert_eq!(server.delete(&awake), Some(204));
    assert!(site.traces().all().is_empty());
    server.stop();
}

#[test]
fn a_disk_that_becomes_full_during_a_snapshot_costs_the_snapshot_and_nothing_else() {
    const TRIES: usize = 8;
    let volume = Volume::new();
    let site = Site::within(&volume.path());
    let server = site.start(&[]);
    let id = server.create().unwrap();
    let kept = server.snapshot(&id).unwrap();
    let ids = BTreeSet::from([id.clone()]);
    let mut failed = 0;
    let path = format!("/sandboxes/{id}/snapshots");
    for _ in 0..TRIES {
        let over = Arc::new(AtomicBool::new(false));
        let filler = std::thread::spawn({
            let (over, sandbox) = (over.clone(), site.path().join("sandboxes").join(&id));
            let (root, file) = (volume.path(), volume.filler());
            move || {
                // From the moment on at which there is a file of an image.
                let begun = || {
                    let entries = fs::read_dir(&sandbox).into_iter().flatten().flatten();
                    let mut images = entries
                        .map(|entry| entry.path())
                        .filter(|path| path.display().to_string().contains("/image-"));
                    images.any(|image| fs::read_dir(image).is_ok_and(|mut e| e.next().is_some()))
                };
                while !begun() && !over.load(Ordering::Acquire) {}
                fill(&root, &file, 0);
            }
        });
        let answer = server.request("POST", &path, Some(json!({}))).unwrap();
        over.store(true, Ordering::Release);
        filler.join().unwrap();
        volume.give_back();
        if answer.status >= 300 {
            failed += 1;
            assert_eq!(answer.status, 503, "{answer:?}");
            assert_eq!(answer.body["error_code"], "capacity_exceeded", "{answer:?}");
        }
        // What could not be written down is settled by whoever looks after it.
        within_budget(&path, || matches!(server.connect(&id), Some(200 | 201)));
        assert!(server.answers(&id), "{path}");
        assert_whole(&site, &server, &ids, &path);
        assert!(server.snapshots().contains(&kept));
    }
    assert!(failed > 0, "the disk was never full in time");
    assert_eq!(server.roll_back(&id, &kept), Some(200));
    assert_eq!(server.delete(&id), Some(204));
    server.stop();
}

#[test]
fn a_snapshot_that_was_acknowledged_outlives_a_power_cut() {
    let volume = Volume::new();
    let site = Site::within(&volume.path());
    let server = site.start(&[]);
    let id = server.create().unwrap();
    let snapshot = server.snapshot(&id).unwrap();
    let image = site.path().join("snapshots").join(&snapshot).join("image");
    let before = contents(&image);
    // What the kernel has not written by now never will be (`EXT4_IOC_SHUTDOWN`, without the log).
    let cut = "import fcntl, os, struct, sys\n\
               fd = os.open(sys.argv[1], os.O_RDONLY)\n\
               fcntl.ioctl(fd, 0x8004587d, struct.pack('I', 2))\n";
    run("python3", &["-c", cut, volume.path().to_str().unwrap()]);
    server.crash();
    volume.end_processes();
    volume.unmount();
    volume.mount();
    let server = site.start(&[]);
    assert!(server.snapshots().contains(&snapshot));
    assert!(contents(&image) == before, "the image is another one");
    assert_eq!(site.snapshots_on_disk(), server.snapshots());
    server.stop();
}

/// The files of an image and their bytes.
fn contents(image: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(image).unwrap();
    let entries = entries.map(|entry| entry.unwrap());
    entries
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect()
}
