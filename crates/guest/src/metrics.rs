//! `/metrics`: what the sandbox uses (wire contract 2.4).

use std::{
    fs,
    sync::{Mutex, PoisonError},
};

use sandhold_types::Clock;
use serde::Serialize;

/// The answer; the names are the contract's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Metrics {
    /// Seconds since the epoch.
    ts: u64,
    cpu_count: usize,
    /// Of all processors together, 0 to 100, since the call before.
    cpu_used_pct: f64,
    /// Bytes.
    mem_total: u64,
    /// Bytes, caches not counted.
    mem_used: u64,
    /// Bytes.
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    /// Bytes of the root filesystem.
    disk_used: u64,
    /// Bytes of the root filesystem.
    disk_total: u64,
}

/// Measures, and remembers the last measure of the processors.
#[derive(Debug, Default)]
pub struct Meter {
    last: Mutex<CpuTimes>,
}

impl Meter {
    /// Measures now. Reads files of the kernel, so it blocks for a moment.
    #[must_use]
    pub fn measure(&self, clock: &dyn Clock) -> Metrics {
        let memory = fs::read_to_string("/proc/meminfo")
            .map(|text| MemoryInfo::parse(&text))
            .unwrap_or_default();
        let now = fs::read_to_string("/proc/stat")
            .map(|text| CpuTimes::parse(&text))
            .unwrap_or_default();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let cpu_used_pct = now.busy_percent_since(*last);
        *last = now;
        drop(last);
        let (disk_total, disk_used) = disk("/");
        Metrics {
            ts: clock.now().unix_s(),
            cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_used_pct,
            mem_total: memory.total,
            mem_used: memory.used(),
            mem_cache: memory.cached,
            mem_total_mib: memory.total >> 20,
            mem_used_mib: memory.used() >> 20,
            disk_used,
            disk_total,
        }
    }
}

/// `/proc/meminfo`, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// All there is.
    pub total: u64,
    /// What a process could still get.
    pub available: u64,
    /// Caches of files.
    pub cached: u64,
}

impl MemoryInfo {
    /// Reads the text. What is missing is zero.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut info = Self::default();
        let mut free = 0;
        let mut has_available = false;
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let (Some(name), Some(kib)) = (words.next(), words.next()) else {
                continue;
            };
            let bytes = kib.parse::<u64>().unwrap_or(0).saturating_mul(1024);
            match name {
                "MemTotal:" => info.total = bytes,
                "MemFree:" => free = bytes,
                "MemAvailable:" => {
                    info.available = bytes;
                    has_available = true;
                }
                "Cached:" => info.cached = bytes,
                _ => {}
            }
        }
        if !has_available {
            info.available = free.saturating_add(info.cached);
        }
        info
    }

    /// What is in use, caches not counted.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.total.saturating_sub(self.available)
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct CpuTimes {
    busy: u64,
    total: u64,
}

impl CpuTimes {
    fn parse(text: &str) -> Self {
        let Some(line) = text.lines().find(|line| line.starts_with("cpu ")) else {
            return Self::default();
        };
        // user nice system idle iowait irq softirq steal; guest time is inside user.
        let times: Vec<u64> = line
            .split_whitespace()
            .skip(1)
            .take(8)
            .map(|word| word.parse().unwrap_or(0))
            .collect();
        let total = times.iter().sum();
        let idle: u64 = times.iter().skip(3).take(2).sum();
        Self {
            busy: total - idle,
            total,
        }
    }

    #[allow(clippy::cast_precision_loss)]
    fn busy_percent_since(self, last: Self) -> f64 {
        let total = self.total.saturating_sub(last.total);
        if total == 0 {
            return 0.0;
        }
        let busy = self.busy.saturating_sub(last.busy);
        (busy as f64 * 10_000.0 / total as f64).round() / 100.0
    }
}

/// Total and used bytes of the filesystem at this path.
fn disk(path: &str) -> (u64, u64) {
    match rustix::fs::statvfs(path) {
        Ok(info) => {
            let total = info.f_blocks.saturating_mul(info.f_frsize);
            let free = info.f_bfree.saturating_mul(info.f_frsize);
            (total, total.saturating_sub(free))
        }
        Err(_) => (0, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\nCached: 50 kB\nx\n";
        let info = MemoryInfo::parse(text);
        assert_eq!(info.total, 1000 << 10);
        assert_eq!(info.used(), 400 << 10);
        // A kernel that does not estimate what is available.
        let old = MemoryInfo::parse("MemTotal: 9 kB\nMemFree: 2 kB\nCached: 3 kB\n");
        assert_eq!(old.available, 5 << 10);
        assert_eq!(MemoryInfo::parse("\u{0}garbage"), MemoryInfo::default());
    }

    #[test]
    fn processor_use_is_between_two_calls() {
        let first = CpuTimes::parse("cpu  10 0 10 80 0 0 0 0 0 0\n");
        let second = CpuTimes::parse("cpu  60 0 10 130 0 0 0 0 0 0\n");
        assert!((second.busy_percent_since(first) - 50.0).abs() < 1e-9);
        assert!(first.busy_percent_since(second).abs() < 1e-9);
    }
}
