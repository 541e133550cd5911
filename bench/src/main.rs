//! `make bench`: figures about a running server, paired with a cold start in the same run.
//!
//! Run it by `scripts/with-server`; it prints a Markdown table and fails if a goal is missed.

mod client;
mod cold;
mod figures;
mod idle;
mod runs;
mod sleep;
mod travel;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use client::{Client, timed};
use figures::{Report, Samples};

/// Figures about a running server.
#[derive(Debug, Parser)]
struct Arguments {
    /// How many sandboxes are made for each figure.
    #[arg(long, default_value_t = 20)]
    samples: usize,
    /// How many cold interpreters are started; each takes many seconds.
    #[arg(long, default_value_t = 3)]
    cold_interpreters: usize,
    /// How many sandboxes live at once for the listing.
    #[arg(long, default_value_t = 100)]
    crowd: usize,
    /// How many sandboxes sleep at once for the listing.
    #[arg(long, default_value_t = 200)]
    sleepers: usize,
    /// Only the part whose name holds this.
    #[arg(long)]
    only: Option<String>,
    /// The table is also written here.
    #[arg(long)]
    into: Option<PathBuf>,
}

/// The lightweight template.
const BASE: &str = "base";
/// The template with the interpreter.
const INTERPRETER: &str = "code-interpreter-v1";

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    let client = Client::from_environment()?;
    let cold = cold::Cold::new()?;
    let mut report = Report::default();
    let wanted = |part: &str| {
        arguments
            .only
            .as_ref()
            .is_none_or(|only| part.contains(only))
    };
    if wanted("create") {
        creates(&arguments, &client, &cold, &mut report)?;
    }
    if wanted("first-result") {
        first_result(&arguments, &client, &cold, &mut report)?;
    }
    if wanted("at-once") {
        ten_at_once(&client, &mut report)?;
    }
    if wanted("idle") {
        idle_cost(&client, &mut report)?;
    }
    if wanted("crowd") {
        crowd(&arguments, &client, &mut report)?;
    }
    if wanted("sleep") {
        sleep::by_size(arguments.samples * 3 / 5, &client, &cold, &mut report)?;
    }
    if wanted("travel") {
        travel::by_size(arguments.samples / 4, &client, &cold, &mut report)?;
    }
    if wanted("clones") {
        travel::clones(arguments.samples / 4, &client, &cold, &mut report)?;
    }
    if wanted("doze") {
        sleep::doze(arguments.samples, &client, &mut report)?;
    }
    if wanted("sleepers") {
        sleep::sleepers(arguments.sleepers, &client, &mut report)?;
    }
    if wanted("runs") {
        runs::overhead(arguments.samples, &client, &mut report)?;
    }
    let table = report.to_markdown();
    if let Some(path) = &arguments.into {
        std::fs::write(path, &table)?;
    }
    for missed in report.missed() {
        eprintln!("missed: {missed}");
    }
    Ok(if report.missed().is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Between two samples the server does what it does when nobody asks for anything: it fetches
/// breath, and has the next blank made.
fn rest() {
    std::thread::sleep(Duration::from_millis(700));
}

/// Create until the data plane answers, in turn with a cold start of the same agent.
fn creates(
    arguments: &Arguments,
    client: &Client,
    cold: &cold::Cold,
    report: &mut Report,
) -> anyhow::Result<()> {
    for template in [BASE, INTERPRETER] {
        let (mut warm, mut boot, mut kill) =
            (Samples::default(), Samples::default(), Samples::default());
        for _ in 0..arguments.samples {
            rest();
            let (took, sandbox) = timed(|| client.create(template))?;
            warm.add(took);
            kill.add(timed(|| client.kill(&sandbox))?.0);
            boot.add(cold.until_agent_answers(template)?);
        }
        report.samples(
            &format!("create {template} until its data plane answers"),
            &warm,
        );
        report.samples(
            &format!("cold start of {template} until its agent answers"),
            &boot,
        );
        report.samples(&format!("kill {template}"), &kill);
        // The interpreter's cold agent answers long before what the template is for is up, so there
        // the first result is compared.
        if template == BASE {
            let ratio = warm.median() / boot.median();
            report.goal(&format!("create / cold start, {template}"), ratio, 0.5);
        }
    }
    Ok(())
}

/// Create until the first result of `run_code`, against a cold interpreter.
fn first_result(
    arguments: &Arguments,
    client: &Client,
    cold: &cold::Cold,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut warm = Samples::default();
    for _ in 0..arguments.samples {
        rest();
        let (took, sandbox) = timed(|| {
            let sandbox = client.create(INTERPRETER)?;
            let text = client.run_code(&sandbox, "6 * 7")?;
            anyhow::ensure!(text == "42", "6 * 7 gave {text}");
            Ok(sandbox)
        })?;
        warm.add(took);
        client.kill(&sandbox)?;
    }
    let mut boot = Samples::default();
    for _ in 0..arguments.cold_interpreters {
        boot.add(cold.until_first_result(INTERPRETER)?);
    }
    report.samples("create until the first run_code result", &warm);
    report.samples("cold start until the first run_code result", &boot);
    report.goal(
        "first result / cold first result",
        warm.median() / boot.median(),
        0.5,
    );
    Ok(())
}

/// Ten creates at the same moment.
fn ten_at_once(client: &Client, report: &mut Report) -> anyhow::Result<()> {
    const AT_ONCE: usize = 10;
    const ROUNDS: usize = 5;
    let mut all = Samples::default();
    for _ in 0..ROUNDS {
        let (took, sandboxes) = timed(|| create_many(client, AT_ONCE))?;
        all.add(took);
        for sandbox in sandboxes {
            client.kill(&sandbox)?;
        }
    }
    report.samples("ten creates of base at once, until all answer", &all);
    Ok(())
}

fn create_many(client: &Client, count: usize) -> anyhow::Result<Vec<client::Sandbox>> {
    let creating: Vec<_> = (0..count)
        .map(|_| {
            let client = client.clone();
            std::thread::spawn(move || client.create(BASE))
        })
        .collect();
    let join = |thread: std::thread::JoinHandle<_>| {
        thread
            .join()
            .map_err(|_| anyhow::anyhow!("a create panicked"))?
    };
    creating.into_iter().map(join).collect()
}

/// Memory and processor use of sandboxes that do nothing.
fn idle_cost(client: &Client, report: &mut Report) -> anyhow::Result<()> {
    const WINDOW: Duration = Duration::from_secs(10);
    for template in [BASE, INTERPRETER] {
        let sandbox = client.create(template)?;
        let cost = idle::measure(&sandbox.id, WINDOW)?;
        report.value(
            &format!("memory of an idle {template} (PSS)"),
            &format!("{:.1} MiB", cost.pss_mib),
        );
        report.value(
            &format!("processor use of an idle {template}"),
            &format!("{:.2} % of a core", cost.cpu_pct),
        );
        client.kill(&sandbox)?;
    }
    Ok(())
}

/// Many sandboxes at once, listed while ten more are made.
fn crowd(arguments: &Arguments, client: &Client, report: &mut Report) -> anyhow::Result<()> {
    const BATCH: usize = 10;
    const LIST_MS_MAX: f64 = 50.0;
    let mut sandboxes = Vec::new();
    while sandboxes.len() < arguments.crowd {
        sandboxes.extend(create_many(client, BATCH)?);
    }
    let creating = std::thread::spawn({
        let client = client.clone();
        move || create_many(&client, BATCH)
    });
    let mut lists = Samples::default();
    while !creating.is_finished() {
        let (took, listed) = timed(|| client.list())?;
        anyhow::ensure!(
            listed >= arguments.crowd.min(100),
            "only {listed} are listed"
        );
        lists.add(took);
    }
    let more = creating
        .join()
        .map_err(|_| anyhow::anyhow!("a create panicked"))??;
    sandboxes.extend(more);
    report.samples(
        &format!("list {} sandboxes while 10 are made", arguments.crowd),
        &lists,
    );
    let slowest = format!("{:.1} ms", lists.percentile(100));
    report.value("the slowest of those lists", &slowest);
    report.goal("the 95th of 100, in ms", lists.percentile(95), LIST_MS_MAX);
    for sandbox in sandboxes {
        client.kill(&sandbox)?;
    }
    Ok(())
}
