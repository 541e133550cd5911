//! What a sandbox costs the machine while it does nothing: read from `/proc`, not from ourselves.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context, ensure};

/// What the processes of one sandbox use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    /// Proportional set size, in MiB.
    pub(crate) pss_mib: f64,
    /// Share of one core over the window, in percent.
    pub(crate) cpu_pct: f64,
}

/// The kernel's clock ticks per second in `/proc/<pid>/stat`; 100 on every Linux for x86-64.
const TICKS_PER_SECOND: f64 = 100.0;

/// Measures the processes whose command line names the sandbox, over `window`.
pub(crate) fn measure(sandbox: &str, window: Duration) -> anyhow::Result<Cost> {
    let processes = processes_of(sandbox)?;
    ensure!(!processes.is_empty(), "no process names sandbox {sandbox}");
    let before = cpu_ticks(&processes);
    std::thread::sleep(window);
    let ticks = cpu_ticks(&processes).saturating_sub(before);
    let pss_kib: u64 = processes.iter().map(|path| pss_kib(path)).sum();
    Ok(Cost {
        pss_mib: to_f64(pss_kib) / 1024.0,
        cpu_pct: to_f64(ticks) / TICKS_PER_SECOND / window.as_secs_f64() * 100.0,
    })
}

fn to_f64(value: u64) -> f64 {
    // Figures here are far below 2^32.
    f64::from(u32::try_from(value).unwrap_or(u32::MAX))
}

/// Whether any process names the sandbox.
pub(crate) fn has_processes(sandbox: &str) -> bool {
    processes_of(sandbox).is_ok_and(|processes| !processes.is_empty())
}

/// The processes whose command line names the sandbox.
pub(crate) fn processes_of(sandbox: &str) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir("/proc").context("reading /proc")?;
    let paths = entries.flatten().map(|entry| entry.path());
    Ok(paths
        .filter(|path| {
            let bytes = fs::read(path.join("cmdline")).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes);
            text.contains(sandbox) && text.contains("runsc")
        })
        .collect())
}

fn cpu_ticks(processes: &[PathBuf]) -> u64 {
    let ticks = |path: &PathBuf| {
        let stat = fs::read_to_string(path.join("stat")).unwrap_or_default();
        // The name may hold anything; fields are counted from the last parenthesis.
        let rest = stat
            .rsplit_once(')')
            .map(|(_, rest)| rest.to_owned())
            .unwrap_or_default();
        let fields: Vec<u64> = rest
            .split_whitespace()
            .skip(11)
            .take(2)
            .flat_map(str::parse)
            .collect();
        fields.iter().sum::<u64>()
    };
    processes.iter().map(ticks).sum()
}

fn pss_kib(path: &std::path::Path) -> u64 {
    let rollup = fs::read_to_string(path.join("smaps_rollup")).unwrap_or_default();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}
