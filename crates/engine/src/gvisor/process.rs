//! Processes on the host: who they are, whether they live, ending them.
//!
//! A process is identified by its number *and* its start time, and is signalled only through a
//! pidfd that was opened and checked against both, so that a number that was given to another
//! process in the meantime is never hit.

use std::{collections::BTreeSet, fs, io, os::fd::OwnedFd, path::Path};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::{Interest, unix::AsyncFd};

/// A process that cannot be mistaken for a later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct ProcessIdentity {
    pub(super) pid: u32,
    /// In clock ticks since the machine started.
    pub(super) start_time: u64,
}

/// The part of `/proc/<pid>/stat` that matters here.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    state: char,
    start_time: u64,
}

/// Parses `/proc/<pid>/stat`. The name in parentheses may hold anything, so fields are counted from
/// the last parenthesis.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    // State is field 3 and the start time field 22.
    let start_time = fields.nth(18)?.parse().ok()?;
    Some(Stat { state, start_time })
}

fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

impl ProcessIdentity {
    /// Who `pid` is now, if it lives.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let stat = stat(pid)?;
        (!matches!(stat.state, 'Z' | 'X')).then_some(Self {
            pid,
            start_time: stat.start_time,
        })
    }

    /// Whether exactly this process lives.
    pub(super) fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// A handle to exactly this process, if it lives.
    pub(super) fn open(self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Checked after opening: from here on the handle means this process for good.
        self.is_alive().then_some(handle)
    }
}

/// Completes when the process behind `handle` has ended.
pub(super) async fn ended(handle: OwnedFd) -> io::Result<()> {
    // SAFETY: the handle moves into what registers it, and so stays open and the same until it is
    // taken out of the reactor again.
    let watched = unsafe { AsyncFd::register_with_interest(handle, Interest::READABLE) }?;
    let _ready = watched.readable().await?;
    Ok(())
}

/// Sends SIGKILL to those of `pids` that live; gives back their handles to wait on.
pub(super) fn kill(pids: &BTreeSet<u32>) -> Vec<OwnedFd> {
    pids.iter()
        .filter_map(|pid| ProcessIdentity::of(*pid)?.open())
        .inspect(|handle| {
            // Fails only if it has just ended, which is what is wanted.
            let _ = pidfd_send_signal(handle, Signal::KILL);
        })
        .collect()
}

/// The command line of a process, if it is there.
pub(super) fn command_line(pid: u32) -> Option<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let arguments = bytes.split(|b| *b == 0).filter(|a| !a.is_empty());
    Some(
        arguments
            .map(|a| String::from_utf8_lossy(a).into_owned())
            .collect(),
    )
}

/// Every process whose command line satisfies `wanted`.
pub(super) fn find(wanted: impl Fn(&[String]) -> bool) -> io::Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        if command_line(pid).is_some_and(|line| wanted(&line)) && ProcessIdentity::of(pid).is_some()
        {
            found.insert(pid);
        }
    }
    Ok(found)
}

/// Opens the file that process `pid` holds under `directory` and whose name is already unlinked.
pub(super) fn open_unlinked(pid: u32, directory: &Path) -> Option<fs::File> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let held = descriptors.flatten().find(|entry| {
        fs::read_link(entry.path()).is_ok_and(|target| target.starts_with(directory))
    })?;
    fs::File::open(held.path()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_process_name_does_not_shift_the_fields() {
        let text = "42 (a) R 1 (b)) S 1 42 42 0 -1 4194560 1 0 0 0 1 2 0 0 20 0 1 0 777 1 1";
        assert_eq!(
            parse_stat(text),
            Some(Stat {
                state: 'S',
                start_time: 777
            })
        );
        assert_eq!(parse_stat("garbage"), None);
    }

    #[test]
    fn the_same_number_at_another_time_is_another_process() {
        let own = ProcessIdentity::of(std::process::id()).unwrap();
        assert!(own.is_alive());
        assert!(own.open().is_some());
        let earlier = ProcessIdentity {
            start_time: own.start_time + 1,
            ..own
        };
        assert!(!earlier.is_alive());
        assert!(earlier.open().is_none());
    }
}
