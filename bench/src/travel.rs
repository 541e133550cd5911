//! What going through time costs a caller, next to the plain steps of the engine and to a full copy of
//! the files (R-T1 to R-T4).

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    time::{Duration, Instant},
};

use crate::{
    BASE,
    client::{Client, Sandbox, timed},
    cold::Cold,
    figures::{Report, Samples},
    sleep::filler,
};

/// How much more than an empty sandbox each holds in memory, in MB.
const SIZES_MB: [usize; 3] = [10, 100, 500];
/// The size of the sandbox whose copies have a goal, in MB.
const GOAL_MB: usize = 50;
/// How many copies the goal is about.
const GOAL_COPIES: usize = 10;
/// Ten copies may take this share of ten plain restores one after the other.
const CLONES_MAX: f64 = 0.6;

fn of(what: &str, megabytes: usize) -> String {
    format!("{what}, {megabytes} MB resident")
}

/// Snapshot, create from it, and rollback by resident size.
pub(crate) fn by_size(
    samples: usize,
    client: &Client,
    cold: &Cold,
    report: &mut Report,
) -> anyhow::Result<()> {
    for megabytes in SIZES_MB {
        let content = filler(megabytes);
        let sandbox = client.create(BASE)?;
        client.fill_memory(&sandbox, content.clone())?;
        let (mut total, mut still, mut create, mut roll) = (
            Samples::default(),
            Samples::default(),
            Samples::default(),
            Samples::default(),
        );
        let mut copy = Samples::default();
        let mut plain = crate::cold::Plain::default();
        let mut bytes = 0;
        // In turns, so that a slow moment of the machine falls on all.
        for _ in 0..samples {
            let (took, snapshot) = timed(|| client.snapshot(&sandbox))?;
            total.add(took);
            still.add(Duration::from_millis(snapshot.paused_ms));
            let (took, made) = timed(|| client.create(&snapshot.id))?;
            create.add(took);
            bytes = bytes_of(&client.data.join("sandboxes").join(&made.id))?;
            client.kill(&made)?;
            roll.add(
                timed(|| {
                    client.roll_back(&sandbox, &snapshot.id)?;
                    client.ask_agent(&sandbox)
                })?
                .0,
            );
            copy.add(timed(|| copy_files(&client.data.join("snapshots").join(&snapshot.id)))?.0);
            client.delete_snapshot(&snapshot.id)?;
            let once = cold.capture_and_restore(BASE, &content, 1)?;
            plain.capture.extend(&once.capture);
            plain.restore.extend(&once.restore);
        }
        client.kill(&sandbox)?;
        report.samples(&of("snapshot, seen by a client", megabytes), &total);
        report.samples(&of("snapshot, its source stands still", megabytes), &still);
        report.samples(
            &of("plain checkpoint and removal", megabytes),
            &plain.capture,
        );
        report.samples(
            &of("create from a snapshot until it answers", megabytes),
            &create,
        );
        report.samples(&of("rollback until it answers", megabytes), &roll);
        report.samples(
            &of("plain restore until the first answer", megabytes),
            &plain.restore,
        );
        report.samples(&of("a full copy of the snapshot's files", megabytes), &copy);
        let text = format!("{:.1} MB", bytes as f64 / 1e6);
        report.value(&of("bytes on disk per copy", megabytes), &text);
    }
    Ok(())
}

/// Copies 1 to N in one call, by resident size.
pub(crate) fn clones(
    samples: usize,
    client: &Client,
    cold: &Cold,
    report: &mut Report,
) -> anyhow::Result<()> {
    let content = filler(GOAL_MB);
    let sandbox = client.create(BASE)?;
    client.fill_memory(&sandbox, content.clone())?;
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    for _ in 0..samples {
        crate::rest();
        let (took, copies) = timed(|| client.clones(&sandbox, GOAL_COPIES, GOAL_COPIES))?;
        ours.add(took);
        remove(client, &copies)?;
        let plain = cold.capture_and_restore(BASE, &content, GOAL_COPIES)?;
        theirs.add(plain.restore.total());
    }
    client.kill(&sandbox)?;
    let ten = format!("{GOAL_COPIES} copies in one call");
    report.samples(&of(&ten, GOAL_MB), &ours);
    let plain = format!("{GOAL_COPIES} plain restores, one after the other");
    report.samples(&of(&plain, GOAL_MB), &theirs);
    report.goal("their ratio", ours.median() / theirs.median(), CLONES_MAX);
    for (count, megabytes) in [(10, 10), (10, 100), (10, 500), (50, 10), (50, 100)] {
        let sandbox = client.create(BASE)?;
        client.fill_memory(&sandbox, filler(megabytes))?;
        let begun = Instant::now();
        let copies = client.clones(&sandbox, count, 8)?;
        let took = begun.elapsed().as_secs_f64() * 1000.0;
        remove(client, &copies)?;
        client.kill(&sandbox)?;
        let text = format!("{took:.0} ms, {:.1} ms each", took / count as f64);
        report.value(
            &of(&format!("{count} copies in one call"), megabytes),
            &text,
        );
    }
    Ok(())
}

fn remove(client: &Client, copies: &[Sandbox]) -> anyhow::Result<()> {
    for copy in copies {
        client.kill(copy)?;
    }
    Ok(())
}

/// Bytes that are allocated below a directory.
fn bytes_of(directory: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += metadata.blocks() * 512;
        if metadata.is_dir() {
            bytes += bytes_of(&entry.path())?;
        }
    }
    Ok(bytes)
}

/// What a platform does that shares nothing.
fn copy_files(snapshot: &Path) -> anyhow::Result<()> {
    let target = snapshot.join("copy");
    fs::create_dir(&target)?;
    for entry in fs::read_dir(snapshot.join("image"))? {
        let entry = entry?;
        fs::copy(entry.path(), target.join(entry.file_name()))?;
    }
    fs::remove_dir_all(&target)?;
    Ok(())
}
