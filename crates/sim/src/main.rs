//! Runs simulated worlds: `sandhold-sim [--seeds N] [--from N] [--seed N] [--trace] [--without RULE]`.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout)]

use std::{
    process::ExitCode,
    sync::atomic::{AtomicU64, Ordering},
};

use sandhold_governor::rules::{Rule, Rules};
use sandhold_sim::world::World;

#[derive(Debug, Clone, Copy)]
struct Arguments {
    from: u64,
    seeds: u64,
    trace: bool,
    without: Option<Rule>,
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)) {
        Ok(arguments) => run(arguments),
        Err(why) => {
            println!("{why}");
            ExitCode::from(64)
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut arguments = Arguments {
        from: 1,
        seeds: 1000,
        trace: false,
        without: None,
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|e| format!("{text}: {e}"));
        match word.as_str() {
            "--seeds" => arguments.seeds = number(value()?)?,
            "--from" => arguments.from = number(value()?)?,
            "--seed" => {
                arguments.from = number(value()?)?;
                arguments.seeds = 1;
            }
            "--trace" => arguments.trace = true,
            "--without" => {
                let name = value()?;
                let rule = Rule::ALL.iter().find(|r| format!("{r:?}") == name);
                arguments.without = Some(*rule.ok_or_else(|| format!("there is no rule {name}"))?);
            }
            other => return Err(format!("unknown argument {other}")),
        }
    }
    Ok(arguments)
}

fn rules(arguments: Arguments) -> Rules {
    let rules = Rules::default();
    match arguments.without {
        Some(rule) => rules.without(rule),
        None => rules,
    }
}

fn run(arguments: Arguments) -> ExitCode {
    let (next, failed, events) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let (leased, kills) = (AtomicU64::new(0), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= arguments.seeds {
                        break;
                    }
                    let seed = arguments.from + n;
                    let mut world = World::from_seed(seed, rules(arguments));
                    if arguments.trace {
                        world.trace_everything();
                    }
                    let report = world.run();
                    events.fetch_add(report.events, Ordering::Relaxed);
                    leased.fetch_add(report.leased, Ordering::Relaxed);
                    kills.fetch_add(report.kills, Ordering::Relaxed);
                    if arguments.trace {
                        println!("{}", report.trace.join("\n"));
                    }
                    if let Some(violation) = report.violation {
                        failed.fetch_add(1, Ordering::Relaxed);
                        println!("seed {seed}: {violation}");
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    println!(
        "{} worlds, {} events, {} sandboxes leased, {} deleted, {failed} worlds failed",
        arguments.seeds,
        events.into_inner(),
        leased.into_inner(),
        kills.into_inner()
    );
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
