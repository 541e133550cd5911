//! `sandhold doctor`: is this machine fit to run sandboxes, and if not, how to mend it (R-O1).
//!
//! Each check is a function of what it read, so that the rules can be tested without the machine.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use crate::settings::find_runsc;

/// Options of `sandhold doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The data directory that would be used.
    #[arg(long, env = "SANDHOLD_DATA_DIR", default_value = crate::settings::DATA_DIR)]
    data_dir: PathBuf,
    /// Mend what can be mended without a choice, such as loading a kernel setting.
    #[arg(long)]
    mend: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What a check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Good,
    Warning,
    Bad,
}

/// One line of the answer.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

impl Finding {
    fn good(check: &'static str, found: impl Into<String>) -> Self {
        Self {
            check,
            verdict: Verdict::Good,
            found: found.into(),
            mend: None,
        }
    }

    fn bad(check: &'static str, found: impl Into<String>, mend: &str) -> Self {
        Self {
            check,
            verdict: Verdict::Bad,
            found: found.into(),
            mend: Some(mend.to_owned()),
        }
    }

    fn warning(check: &'static str, found: impl Into<String>, mend: &str) -> Self {
        Self {
            verdict: Verdict::Warning,
            ..Self::bad(check, found, mend)
        }
    }
}

/// Runs every check and prints what was found. The exit status is 1 if anything is bad.
///
/// # Errors
/// The answer could not be printed.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.mend {
        mend();
    }
    let findings = findings(&args.data_dir);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &findings)?;
        writeln!(out)?;
    } else {
        for finding in &findings {
            let mark = match finding.verdict {
                Verdict::Good => "ok     ",
                Verdict::Warning => "warning",
                Verdict::Bad => "BAD    ",
            };
            writeln!(out, "{mark} {:<12} {}", finding.check, finding.found)?;
            if let Some(mend) = &finding.mend {
                writeln!(out, "        {:<12} mend: {mend}", "")?;
            }
        }
    }
    let bad = findings
        .iter()
        .any(|finding| finding.verdict == Verdict::Bad);
    Ok(if bad {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn findings(data_dir: &Path) -> Vec<Finding> {
    vec![
        user(rustix::process::geteuid().is_root()),
        kernel(&read("/proc/sys/kernel/osrelease")),
        cgroups(&read("/proc/mounts")),
        program("nft", &["--version"], "apt-get install nftables"),
        program("mmdebstrap", &["--version"], "apt-get install mmdebstrap"),
        runsc(),
        memory(&read("/proc/meminfo")),
        disk(data_dir),
        templates(&crate::settings::shared_templates()),
    ]
}

fn read(path: &str) -> String {
    fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// The one thing that can be mended without a choice: forwarding, which sandboxes with internet
/// access need.
fn mend() {
    let _ = fs::write("/proc/sys/net/ipv4/ip_forward", "1");
}

fn user(is_root: bool) -> Finding {
    if is_root {
        Finding::good("user", "root")
    } else {
        Finding::bad(
            "user",
            "not root",
            "run it as root: namespaces and cgroups need it",
        )
    }
}

fn kernel(release: &str) -> Finding {
    let mut numbers = release
        .split(['.', '-'])
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (5, 10) {
        Finding::good("kernel", release)
    } else {
        Finding::bad("kernel", release, "use Linux 5.10 or newer")
    }
}

fn cgroups(mounts: &str) -> Finding {
    let has = |kind: &str, option: &str| {
        mounts.lines().any(|line| {
            let mut fields = line.split(' ').skip(2);
            fields.next() == Some(kind)
                && fields
                    .next()
                    .is_some_and(|all| all.split(',').any(|one| one == option))
        })
    };
    let v1 = ["memory", "cpu", "pids", "freezer"]
        .iter()
        .all(|name| has("cgroup", name));
    let v2 = mounts
        .lines()
        .any(|line| line.contains(" /sys/fs/cgroup cgroup2 "));
    match (v2, v1) {
        (true, _) => Finding::good("cgroups", "version 2"),
        (false, true) => Finding::good("cgroups", "version 1, all controllers that are needed"),
        (false, false) => Finding::bad(
            "cgroups",
            "memory, cpu, pids or freezer is not mounted",
            "mount cgroup2 on /sys/fs/cgroup, or the version 1 controllers below it",
        ),
    }
}

fn program(name: &'static str, arguments: &[&str], mend: &str) -> Finding {
    match Command::new(name).args(arguments).output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            Finding::good(name, text.lines().next().unwrap_or_default())
        }
        _ => Finding::bad(name, "not there or not working", mend),
    }
}

fn runsc() -> Finding {
    const MEND: &str = "apt-get install runsc (bookworm: from backports), or set SANDHOLD_RUNSC";
    let Some(path) = find_runsc() else {
        return Finding::bad("runsc", "not found", MEND);
    };
    match Command::new(&path).arg("--version").output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let version = text.lines().next().unwrap_or_default();
            Finding::good("runsc", format!("{version} at {}", path.display()))
        }
        _ => Finding::bad("runsc", format!("{} does not run", path.display()), MEND),
    }
}

fn memory(meminfo: &str) -> Finding {
    let available_mib = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .unwrap_or(0)
        / 1024;
    let found = format!("{available_mib} MiB free");
    if available_mib >= 1024 {
        Finding::good("memory", found)
    } else {
        Finding::warning(
            "memory",
            found,
            "free at least 1 GiB: creates are refused without it",
        )
    }
}

fn disk(data_dir: &Path) -> Finding {
    let existing = data_dir
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or_else(|| Path::new("/"));
    let free = rustix::fs::statvfs(existing).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize));
    let found = format!(
        "{} MiB free at {}",
        free / (1024 * 1024),
        existing.display()
    );
    if free >= 5 * 1024 * 1024 * 1024 {
        Finding::good("disk", found)
    } else {
        Finding::warning(
            "disk",
            found,
            "free at least 5 GiB, or choose another --data-dir",
        )
    }
}

fn templates(directories: &[PathBuf]) -> Finding {
    let found = directories
        .iter()
        .filter(|directory| directory.is_dir())
        .count();
    if found > 0 {
        Finding::good("templates", format!("{} shared catalogue(s)", found))
    } else {
        Finding::warning(
            "templates",
            "no shared catalogue",
            "scripts/templates, or make demo",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_tells_good_from_bad() {
        // R-O1
        assert_eq!(user(false).verdict, Verdict::Bad);
        assert_eq!(kernel("6.18.44-x").verdict, Verdict::Good);
        assert_eq!(kernel("4.19.0").verdict, Verdict::Bad);
        assert_eq!(memory("MemAvailable:  2097152 kB").verdict, Verdict::Good);
        assert_eq!(memory("").verdict, Verdict::Warning);
        let hybrid = "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n\
                      cgroup /sys/fs/cgroup/freezer cgroup rw,freezer 0 0";
        assert_eq!(cgroups(hybrid).verdict, Verdict::Good);
        assert_eq!(
            cgroups("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0").verdict,
            Verdict::Good
        );
        assert_eq!(cgroups("").verdict, Verdict::Bad);
    }

    #[test]
    fn whatever_is_bad_says_how_to_mend_it() {
        for finding in [user(false), kernel("2.6"), cgroups("")] {
            assert!(finding.mend.is_some(), "{}", finding.check);
        }
    }
}
