//! What a run costs beyond a plain create and its command: from the request to `started`, and from the
//! command's exit to `completed` (R-G3), next to the same steps through the sandbox API.

use std::time::{Duration, Instant};

use anyhow::Context;
use sandhold_types::{Clock as _, SystemClock};
use serde_json::{Value, json};

use crate::{
    BASE,
    client::{Client, timed},
    figures::{Report, Samples},
    rest,
};

/// The last thing that the command does is to tell the time, so that its exit is known from outside.
const COMMAND: [&str; 3] = ["/bin/sh", "-c", "date +%s%N"];

/// One run, as its caller saw it.
struct Ran {
    /// From the request to `started`.
    started: Duration,
    /// From the command's exit to `completed`.
    told: Duration,
}

/// Runs and the plain steps, in turns.
pub(crate) fn overhead(samples: usize, client: &Client, report: &mut Report) -> anyhow::Result<()> {
    let (mut create, mut start) = (Samples::default(), Samples::default());
    let (mut started, mut beyond, mut told) =
        (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..samples {
        rest();
        let (making, sandbox) = timed(|| client.create(BASE))?;
        let (starting, _) = timed(|| client.start(&sandbox, &COMMAND))?;
        client.kill(&sandbox)?;
        create.add(making);
        start.add(starting);
        rest();
        let ran = run(client)?;
        started.add(ran.started);
        beyond.add(ran.started.saturating_sub(making + starting));
        told.add(ran.told);
    }
    report.samples("create base, in turns with the runs", &create);
    report.samples("start a command in it through its agent", &start);
    report.samples("run: from the request to `started`", &started);
    report.samples("run: of that, beyond create and start", &beyond);
    report.samples("run: from the command's exit to `completed`", &told);
    Ok(())
}

fn run(client: &Client) -> anyhow::Result<Ran> {
    let ask = json!({
        "project_id": "bench", "session_run_id": "bench", "template_id": BASE,
        "command": COMMAND, "timeout": 60,
    });
    let mut started = None;
    let begun = Instant::now();
    let end = client.run(&ask, |event| {
        if event == "started" {
            started = Some(begun.elapsed());
        }
    })?;
    let now = Duration::from_millis(SystemClock.now().unix_ms());
    Ok(Ran {
        started: started.context("a run ended that never started")?,
        told: now.saturating_sub(exit_at(&end)?),
    })
}

/// When the command ended, by the clock that it and this process share.
fn exit_at(end: &Value) -> anyhow::Result<Duration> {
    let stdout = end["stdout"].as_str().context("stdout")?;
    let nanoseconds = stdout.trim().parse();
    Ok(Duration::from_nanos(
        nanoseconds.with_context(|| format!("{stdout:?} is no time"))?,
    ))
}
