//! Starts one process: user, directory, environment, pipes or a terminal.

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    process::{Command, Stdio},
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::Winsize,
};

use crate::{
    account::Account,
    children::{Children, Spawned, run_as},
    process::output::Source,
};

/// The terminal type, unless the caller chooses one.
const TERM: &str = "xterm-256color";

/// What to start.
#[derive(Debug, Clone)]
pub struct LaunchPlan {
    /// The program.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Its complete environment.
    pub environment: BTreeMap<String, String>,
    /// Where it runs.
    pub directory: PathBuf,
    /// Who runs it.
    pub account: Account,
    /// How it talks.
    pub stdio: StdioPlan,
}

/// How a process talks to its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StdioPlan {
    /// Output in pipes; standard input is at its end from the start.
    NoInput,
    /// Output and input in pipes.
    Pipes,
    /// A terminal of this size.
    Terminal(TerminalSize),
}

/// Columns and rows, never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    columns: u16,
    rows: u16,
}

impl TerminalSize {
    /// What a terminal has whose client names no size.
    pub const DEFAULT: Self = Self {
        columns: 80,
        rows: 24,
    };

    /// A size, unless one side is zero: hidden windows report that, and programs crash on it
    /// (BC-027).
    #[must_use]
    pub fn new(columns: u32, rows: u32) -> Option<Self> {
        let side = |length: u32| u16::try_from(length.min(u32::from(u16::MAX))).ok();
        (columns > 0 && rows > 0).then_some(())?;
        Some(Self {
            columns: side(columns)?,
            rows: side(rows)?,
        })
    }

    fn winsize(self) -> Winsize {
        Winsize {
            ws_row: self.rows,
            ws_col: self.columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        }
    }
}

/// A process that has been started.
#[derive(Debug)]
pub struct Launched {
    /// The process.
    pub spawned: Spawned,
    /// Where its output comes from.
    pub outputs: Vec<(Source, OwnedFd)>,
    /// Where its input goes.
    pub input: Option<OwnedFd>,
    /// Its terminal, for resizing.
    pub terminal: Option<OwnedFd>,
}

/// Why a process did not start.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A variable cannot be in an environment.
    #[error("'{0}' cannot be the name of a variable")]
    Variable(String),
    /// The directory is missing, no directory, or closed to the user.
    #[error("cannot use the working directory '{directory}': {source}")]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is no terminal to be had.
    #[error("opening a terminal: {0}")]
    Terminal(io::Error),
    /// The program is missing, not executable, or the arguments are too long.
    #[error("cannot start '{program}': {source}")]
    Spawn {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
}

/// Starts the process. Blocks until its program is loaded.
///
/// # Errors
/// Something in the plan cannot be used; nothing runs then.
pub fn launch_blocking(plan: &LaunchPlan, children: &Children) -> Result<Launched, LaunchError> {
    check_variables(&plan.environment)?;
    check_directory(plan)?;
    let mut command = Command::new(&plan.program);
    command
        .args(&plan.arguments)
        .env_clear()
        .envs(&plan.environment);
    let spawn_error = |source| LaunchError::Spawn {
        program: plan.program.chars().take(200).collect(),
        source,
    };
    run_as(&mut command, &plan.account, &plan.directory).map_err(spawn_error)?;
    match plan.stdio {
        StdioPlan::Terminal(size) => {
            let master =
                attach_terminal(&mut command, plan, size).map_err(LaunchError::Terminal)?;
            let spawned = children.spawn_blocking(&mut command).map_err(spawn_error)?;
            // The command holds the slave; it must be closed here, or the end is never seen.
            drop(command);
            with_terminal(spawned, master).map_err(LaunchError::Terminal)
        }
        StdioPlan::NoInput | StdioPlan::Pipes => {
            let input = match plan.stdio {
                StdioPlan::Pipes => Stdio::piped(),
                _ => Stdio::null(),
            };
            command
                .stdin(input)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let spawned = children.spawn_blocking(&mut command).map_err(spawn_error)?;
            Ok(with_pipes(spawned))
        }
    }
}

fn check_variables(environment: &BTreeMap<String, String>) -> Result<(), LaunchError> {
    let wrong = environment.iter().find(|(name, value)| {
        name.is_empty() || name.contains(['=', '\0']) || value.contains('\0')
    });
    match wrong {
        Some((name, _)) => Err(LaunchError::Variable(name.chars().take(80).collect())),
        None => Ok(()),
    }
}

/// A wrong directory fails the start anyway; this says so in words. Access with the user's rights
/// is decided in the child.
fn check_directory(plan: &LaunchPlan) -> Result<(), LaunchError> {
    let error = match std::fs::metadata(&plan.directory) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => io::Error::from_raw_os_error(libc::ENOTDIR),
        Err(error) => error,
    };
    Err(LaunchError::Directory {
        directory: plan.directory.clone(),
        source: error,
    })
}

fn with_pipes(mut spawned: Spawned) -> Launched {
    let stdout = spawned.stdout.take().map(|fd| (Source::Stdout, fd));
    let stderr = spawned.stderr.take().map(|fd| (Source::Stderr, fd));
    Launched {
        input: spawned.stdin.take(),
        outputs: stdout.into_iter().chain(stderr).collect(),
        terminal: None,
        spawned,
    }
}

fn with_terminal(spawned: Spawned, master: OwnedFd) -> io::Result<Launched> {
    Ok(Launched {
        outputs: vec![(Source::Pty, master.try_clone()?)],
        input: Some(master.try_clone()?),
        terminal: Some(master),
        spawned,
    })
}

/// Gives the command a new terminal and returns the master.
fn attach_terminal(
    command: &mut Command,
    plan: &LaunchPlan,
    size: TerminalSize,
) -> io::Result<OwnedFd> {
    use std::os::unix::process::CommandExt as _;

    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let slave_path = ptsname(&master, Vec::new())?;
    let slave = rustix::fs::open(
        slave_path.as_c_str(),
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    rustix::termios::tcsetwinsize(&master, size.winsize())?;
    // So that programs can open the terminal by its name, as `screen` does. Not every kernel
    // lets go of it, and most programs do not need it.
    let owner = rustix::fs::Uid::from_raw(plan.account.uid);
    let _ = rustix::fs::fchown(&slave, Some(owner), None);
    if !plan.environment.contains_key("TERM") {
        command.env("TERM", TERM);
    }
    command
        .stdin(slave.try_clone()?)
        .stdout(slave.try_clone()?)
        .stderr(slave);
    // SAFETY: one system call on descriptor 0, which is the slave by then; no allocation. The
    // session was made by `run_as`, whose closure runs first.
    unsafe {
        command.pre_exec(|| {
            if libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    Ok(master)
}

/// Sets the size of the terminal of the session that process `leader` leads, and tells its
/// processes by SIGWINCH.
///
/// A kernel tells the foreground processes by itself; gVisor's does not (BC-027), nor does it say
/// which ones these are. So all of the session are told: whoever does not wait for the signal
/// ignores it, and hearing it twice does no harm.
///
/// # Errors
/// It is no terminal.
pub fn resize(master: &OwnedFd, leader: u32, size: TerminalSize) -> io::Result<()> {
    rustix::termios::tcsetwinsize(master, size.winsize())?;
    let processes = std::fs::read_dir("/proc")?.filter_map(|entry| {
        let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        (session_of(&stat)? == leader).then(|| rustix::process::Pid::from_raw(pid))?
    });
    for process in processes.take(SESSION_PROCESSES_MAX) {
        // One that has just ended needs to be told nothing.
        let _ = rustix::process::kill_process(process, rustix::process::Signal::WINCH);
    }
    Ok(())
}

/// How many processes of a session are told that its terminal has another size.
const SESSION_PROCESSES_MAX: usize = 1024;

/// The session in `/proc/<pid>/stat`. The name before it may hold spaces and brackets.
fn session_of(stat: &str) -> Option<u32> {
    let (_, fields) = stat.rsplit_once(')')?;
    // State, parent, group, session.
    fields.split_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_has_no_side_of_zero() {
        // BC-027
        assert_eq!(TerminalSize::new(0, 0), None);
        assert_eq!(TerminalSize::new(80, 0), None);
        assert!(TerminalSize::new(1, 1).is_some());
        assert_eq!(TerminalSize::new(1 << 20, 2).unwrap().columns, u16::MAX);
    }

    #[test]
    fn a_session_is_found_behind_any_name() {
        assert_eq!(session_of("7 (sh) S 1 7 6 0 0"), Some(6));
        assert_eq!(session_of("7 (a) b (c) S 1 7 6 0 0"), Some(6));
        for broken in ["", "7 (sh)", "7 (sh) S 1 7", "7 (sh) S 1 7 x"] {
            assert_eq!(session_of(broken), None, "{broken}");
        }
    }

    #[test]
    fn names_of_variables_are_checked() {
        let environment = |name: &str| BTreeMap::from([(name.to_owned(), String::new())]);
        assert!(check_variables(&environment("A")).is_ok());
        for name in ["", "A=B", "A\0"] {
            assert!(check_variables(&environment(name)).is_err(), "{name:?}");
        }
    }
}
