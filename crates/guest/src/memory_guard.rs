//! Kills the fattest process before the sandbox's memory is gone (BC-106).
//!
//! Where the kernel of a sandbox is a process on the host, running out of memory would end the
//! whole sandbox. The guard looks at what is available, the more often the less it is, and kills
//! one process when it falls under a reserve. Only descendants of the agent are ever killed; in a
//! sandbox that is everybody else.
//!
//! While nothing runs it looks once a second, which costs nothing that can be measured.

use std::{collections::HashMap, fs, time::Duration};

use rustix::process::{Pid, Signal};

use crate::{interpreter::Interpreter, metrics::MemoryInfo, process::table::ProcessTable};

/// The share of all memory that stays free, in percent.
const RESERVE_PERCENT: u64 = 5;
/// At least this much stays free.
const RESERVE_BYTES_MIN: u64 = 16 << 20;
/// More than this need not stay free.
const RESERVE_BYTES_MAX: u64 = 128 << 20;
/// How fast a process can fill memory: the guard looks again before the reserve can be reached.
const FILL_BYTES_PER_MS: u64 = 2 << 20;
/// The shortest pause between two looks.
const INTERVAL_MIN: Duration = Duration::from_millis(5);
/// The longest pause while something runs.
const INTERVAL_MAX: Duration = Duration::from_millis(200);
/// The pause while nothing runs.
const INTERVAL_IDLE: Duration = Duration::from_secs(1);
/// The time a killed process has to give its memory back before another is killed.
const AFTER_KILL: Duration = Duration::from_millis(100);
/// How far up a process's parents are followed.
const ANCESTORS_MAX: usize = 64;
/// Processes that are looked at when one must go.
const PROCESSES_MAX: usize = 65_536;

/// Protects the agent from the kernel's own killer, then guards for ever.
pub async fn guard(table: ProcessTable, interpreter: Interpreter) {
    // Needs a capability that not every sandbox has.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    loop {
        let look = tokio::task::spawn_blocking(look_and_act).await;
        let pause = match look {
            Ok(Some(pause)) => pause,
            Ok(None) | Err(_) => INTERVAL_IDLE,
        };
        let idle = table.is_empty() && interpreter.running_executions() == 0;
        let pause = if idle && pause >= INTERVAL_MAX {
            INTERVAL_IDLE
        } else {
            pause
        };
        tokio::time::sleep(pause).await;
    }
}

/// Looks once, kills if it must, and says when to look again.
fn look_and_act() -> Option<Duration> {
    let memory = MemoryInfo::parse(&fs::read_to_string("/proc/meminfo").ok()?);
    match decide(memory) {
        Decision::LookAgainIn(pause) => Some(pause),
        Decision::Kill => {
            if let Some(fattest) = fattest_process() {
                tracing::warn!(
                    pid = fattest.pid,
                    resident_bytes = fattest.resident_bytes,
                    "memory is nearly gone; killing the process that uses most"
                );
                // It may have ended by itself meanwhile.
                if let Some(pid) = Pid::from_raw(fattest.pid) {
                    let _ = rustix::process::kill_process(pid, Signal::KILL);
                }
            }
            Some(AFTER_KILL)
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    LookAgainIn(Duration),
    Kill,
}

fn decide(memory: MemoryInfo) -> Decision {
    let reserve =
        (memory.total / 100 * RESERVE_PERCENT).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX);
    if memory.total > 0 && memory.available < reserve {
        return Decision::Kill;
    }
    let room_ms = (memory.available - reserve.min(memory.available)) / FILL_BYTES_PER_MS;
    Decision::LookAgainIn(Duration::from_millis(room_ms).clamp(INTERVAL_MIN, INTERVAL_MAX))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Resident {
    pid: i32,
    resident_bytes: u64,
}

/// The descendant that uses most memory.
fn fattest_process() -> Option<Resident> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let page_bytes = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    let parents: HashMap<i32, i32> = fs::read_dir("/proc")
        .ok()?
        .take(PROCESSES_MAX)
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            Some((pid, parent(&stat)?))
        })
        .collect();
    parents
        .keys()
        .filter(|pid| descends_from(**pid, own, &parents))
        .filter_map(|pid| {
            let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
            Some(Resident {
                pid: *pid,
                resident_bytes: resident_pages(&statm)?.saturating_mul(page_bytes),
            })
        })
        .max_by_key(|process| process.resident_bytes)
}

fn descends_from(pid: i32, ancestor: i32, parents: &HashMap<i32, i32>) -> bool {
    let mut current = pid;
    for _ in 0..ANCESTORS_MAX {
        match parents.get(&current) {
            Some(parent) if *parent == ancestor => return true,
            Some(parent) => current = *parent,
            None => return false,
        }
    }
    false
}

/// The parent in `/proc/<pid>/stat`. The name before it may hold spaces and brackets.
fn parent(stat: &str) -> Option<i32> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(1)?.parse().ok()
}

fn resident_pages(statm: &str) -> Option<u64> {
    statm.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn memory(total_mib: u64, available_mib: u64) -> MemoryInfo {
        MemoryInfo {
            total: total_mib * MIB,
            available: available_mib * MIB,
            cached: 0,
        }
    }

    #[test]
    fn it_kills_only_below_the_reserve() {
        assert_eq!(decide(memory(512, 20)), Decision::Kill);
        assert!(matches!(decide(memory(512, 40)), Decision::LookAgainIn(_)));
        assert!(matches!(
            decide(memory(65_536, 200)),
            Decision::LookAgainIn(_)
        ));
        // A kernel that tells nothing is no reason to kill.
        assert!(matches!(decide(memory(0, 0)), Decision::LookAgainIn(_)));
    }

    #[test]
    fn it_looks_more_often_when_less_is_left() {
        let pause = |available| match decide(memory(512, available)) {
            Decision::LookAgainIn(pause) => pause,
            Decision::Kill => Duration::ZERO,
        };
        assert_eq!(pause(480), INTERVAL_MAX);
        assert_eq!(pause(27), INTERVAL_MIN);
        assert!(pause(200) < INTERVAL_MAX);
    }

    #[test]
    fn only_descendants_can_be_chosen() {
        let parents = HashMap::from([(2, 1), (3, 2), (4, 3), (9, 0), (7, 8), (8, 7)]);
        assert!(descends_from(4, 2, &parents));
        for stranger in [1, 2, 9, 7, 77] {
            assert!(!descends_from(stranger, 2, &parents), "{stranger}");
        }
        assert_eq!(parent("5 (a) b) S 3 5 5"), Some(3));
        assert_eq!(parent("garbage"), None);
    }

    #[test]
    fn statm_is_read_leniently() {
        assert_eq!(resident_pages("10 7 3 0 0 0 0\n"), Some(7));
        assert_eq!(resident_pages(""), None);
    }
}
