//! What sleeping and waking costs a caller, next to a plain capture and restore by the engine; and
//! that what dozes or sleeps costs nothing.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::ensure;

use crate::{
    BASE,
    client::{Client, Sandbox, timed},
    cold::Cold,
    figures::{Report, Samples},
    idle,
};

/// How much more than an empty sandbox each holds in memory, in MB.
const SIZES_MB: [usize; 3] = [10, 100, 500];
/// Pause and resume may take this many times what the plain steps take (issue: R-L4).
const OVERHEAD_MAX: f64 = 1.15;
/// A request to a dozing sandbox, in ms at the client.
const THAW_MS_MAX: f64 = 5.0;
/// How long a sandbox may take to doze off.
const DOZE_MAX: Duration = Duration::from_secs(30);

/// Pause, resume and delete by resident size.
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
        let (mut pause, mut resume, mut auto) =
            (Samples::default(), Samples::default(), Samples::default());
        let mut plain = crate::cold::Plain::default();
        // In turns, so that a slow moment of the machine falls on both.
        for _ in 0..samples {
            pause.add(timed(|| client.pause(&sandbox))?.0);
            resume.add(timed(|| client.resume(&sandbox))?.0);
            client.pause(&sandbox)?;
            auto.add(timed(|| client.ask_agent(&sandbox))?.0);
            let once = cold.capture_and_restore(BASE, &content, 1)?;
            plain.capture.extend(&once.capture);
            plain.restore.extend(&once.restore);
        }
        let delete_running = timed(|| client.kill(&sandbox))?.0;
        let asleep = client.create(BASE)?;
        client.fill_memory(&asleep, content)?;
        client.pause(&asleep)?;
        let delete_paused = timed(|| client.kill(&asleep))?.0;
        let of = |what: &str| format!("{what}, {megabytes} MB resident");
        report.samples(&of("pause"), &pause);
        report.samples(&of("plain checkpoint and removal"), &plain.capture);
        report.samples(&of("resume until the first answer"), &resume);
        report.samples(&of("plain restore until the first answer"), &plain.restore);
        report.samples(&of("automatic wake-up, seen by a client"), &auto);
        report.value(&of("delete, running"), &milliseconds(delete_running));
        report.value(&of("delete, paused"), &milliseconds(delete_paused));
        let ours = pause.median() + resume.median();
        let theirs = plain.capture.median() + plain.restore.median();
        let what = of("pause and resume / plain steps");
        report.goal(&what, ours / theirs, OVERHEAD_MAX);
    }
    Ok(())
}

/// Doze and thaw of a sandbox that nobody uses.
pub(crate) fn doze(samples: usize, client: &Client, report: &mut Report) -> anyhow::Result<()> {
    const WINDOW: Duration = Duration::from_secs(10);
    let sandbox = client.create(BASE)?;
    let (mut thaw, mut awake, mut dozing) =
        (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..samples {
        let begun = Instant::now();
        wait_until_frozen(&sandbox)?;
        dozing.add(begun.elapsed());
        thaw.add(timed(|| client.ask_agent(&sandbox))?.0);
        awake.add(timed(|| client.ask_agent(&sandbox))?.0);
    }
    wait_until_frozen(&sandbox)?;
    let cost = idle::measure(&sandbox.id, WINDOW)?;
    client.kill(&sandbox)?;
    report.samples("from the last request until it dozes", &dozing);
    report.samples("a request to a sandbox that is awake", &awake);
    report.samples("a request to a dozing sandbox", &thaw);
    report.goal("its median, in ms", thaw.median(), THAW_MS_MAX);
    report.goal(
        "processor use of a dozing sandbox, in % of a core",
        cost.cpu_pct,
        0.0,
    );
    Ok(())
}

/// Many sleeping sandboxes: no process, and a quick listing.
pub(crate) fn sleepers(count: usize, client: &Client, report: &mut Report) -> anyhow::Result<()> {
    const LIST_MS_MAX: f64 = 50.0;
    const LISTS: usize = 20;
    let mut asleep = Vec::new();
    for _ in 0..count {
        let sandbox = client.create(BASE)?;
        client.pause(&sandbox)?;
        asleep.push(sandbox);
    }
    let awake = asleep
        .iter()
        .filter(|sandbox| idle::has_processes(&sandbox.id))
        .count();
    ensure!(awake == 0, "{awake} sleeping sandboxes have processes");
    let mut lists = Samples::default();
    for _ in 0..LISTS {
        let (took, listed) = timed(|| client.list())?;
        ensure!(listed >= count.min(100), "only {listed} are listed");
        lists.add(took);
    }
    for sandbox in &asleep {
        client.kill(sandbox)?;
    }
    report.samples(&format!("list {count} sleeping sandboxes"), &lists);
    let slowest = lists.percentile(100);
    report.goal("the slowest of those lists, in ms", slowest, LIST_MS_MAX);
    Ok(())
}

/// Text that does not repeat within a page, so that nothing can share or drop it.
pub(crate) fn filler(megabytes: usize) -> String {
    let mut text = String::with_capacity(megabytes * 1_000_000 + 32);
    let mut number = 0u64;
    while text.len() < megabytes * 1_000_000 {
        number = number
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        text.push_str(&format!("{number:020}"));
    }
    text
}

fn milliseconds(took: Duration) -> String {
    format!("{:.1} ms", took.as_secs_f64() * 1000.0)
}

fn wait_until_frozen(sandbox: &Sandbox) -> anyhow::Result<()> {
    const LOOK_INTERVAL: Duration = Duration::from_millis(50);
    let begun = Instant::now();
    while !is_frozen(&sandbox.id)? {
        ensure!(begun.elapsed() < DOZE_MAX, "{} does not doze", sandbox.id);
        std::thread::sleep(LOOK_INTERVAL);
    }
    Ok(())
}

/// Whether the kernel has frozen its processes, by what the kernel itself says.
fn is_frozen(id: &str) -> anyhow::Result<bool> {
    let Some(process) = idle::processes_of(id)?.into_iter().next() else {
        return Ok(false);
    };
    let groups = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
    let within = |controller: &str| {
        let mut fields = groups.lines().map(|line| line.splitn(3, ':').skip(1));
        fields.find_map(|mut field| (field.next()? == controller).then(|| field.next())?)
    };
    let told = |path: String| fs::read_to_string(path).unwrap_or_default();
    Ok(match (within("freezer"), within("")) {
        (Some(group), _) => {
            told(format!("/sys/fs/cgroup/freezer{group}/freezer.state")).trim() == "FROZEN"
        }
        (None, Some(group)) => {
            told(format!("/sys/fs/cgroup{group}/cgroup.events")).contains("frozen 1")
        }
        (None, None) => false,
    })
}
