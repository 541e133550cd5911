//! Making a root file system from a definition: bootstrap or copy, wheels, overlay, set-up. Images
//! are laid down by [`crate::image`].
//!
//! ```text
//!   archive of the machine ─mmdebstrap─┐
//!   a directory ───────────────copy────┴▶ root ◀─ wheels (fetched outside, installed inside)
//!                                          ▲
//!                              overlay, then setup.sh by chroot without a network
//! ```
//!
//! Invariants: every program runs in a process namespace that dies with us; what runs inside the
//! root has no network and sees no process or mount of the machine; nothing is written through a
//! link of the root.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tokio::process::Command;

use crate::{
    apt::{AptError, Archive},
    definition::Definition,
    image::ImageError,
    program::{self, ProgramError, contained},
    progress::{Event, Progress, Stage},
    tree::{self, TreeError},
};

/// Runs in the namespaces and enters the root.
const ENTER_ROOT: &str = include_str!("enter-root.sh");
/// Where wheels and the script lie in the root while they are used.
const WORK_FOLDER: &str = ".sandhold-setup";
/// Documentation and translations: nothing that code in a sandbox reads, a tenth of the bytes.
const LEFT_OUT: [&str; 6] = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
];
/// The oldest C library that wheels are built for (manylinux_2_5).
const GLIBC_MINOR_MIN: u32 = 5;
/// Newer than any; a guard against a root that lies about its version.
const GLIBC_MINOR_MAX: u32 = 99;

/// Why a root file system could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RootFsError {
    /// There is no archive.
    #[error("there is nothing to bootstrap from")]
    Archive(#[from] AptError),
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A program failed.
    #[error("could not {step}")]
    Program {
        /// What was being done.
        step: &'static str,
        /// The cause.
        #[source]
        source: ProgramError,
    },
    /// A file of the root or of the definition.
    #[error("could not {step}")]
    Tree {
        /// What was being done.
        step: &'static str,
        /// The cause.
        #[source]
        source: TreeError,
    },
    /// A file of the root.
    #[error("could not write {path}")]
    File {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Wheels were asked for and the root's Python is not understood.
    #[error("the root has no Python that wheels could be for: it said '{answer}'")]
    NoPython {
        /// What it answered.
        answer: String,
    },
}

fn failed(step: &'static str) -> impl FnOnce(ProgramError) -> RootFsError {
    move |source| RootFsError::Program { step, source }
}

fn bent(step: &'static str) -> impl FnOnce(TreeError) -> RootFsError {
    move |source| RootFsError::Tree { step, source }
}

/// Fetches and unpacks `packages` into the empty directory `root`; `scratch` is an empty directory
/// beside it.
///
/// # Errors
/// The step that failed, with the last lines of the program that did.
pub(crate) async fn bootstrap(
    packages: &[String],
    archive: &Archive,
    root: &Path,
    scratch: &Path,
    progress: &dyn Progress,
) -> Result<(), RootFsError> {
    progress.report(Event::Begin {
        stage: Stage::RootFs,
    });
    run_bootstrap(packages, archive, root, scratch, progress).await
}

/// Does what else `definition` asks for in the root file system `root`; `scratch` is an empty
/// directory for downloads.
///
/// # Errors
/// The step that failed, with the last lines of the program that did.
pub(crate) async fn furnish(
    definition: &Definition,
    root: &Path,
    scratch: &Path,
    progress: &dyn Progress,
) -> Result<(), RootFsError> {
    if !definition.wheels.is_empty() {
        progress.report(Event::Begin {
            stage: Stage::Wheels,
        });
        install_wheels(&definition.wheels, root, scratch, progress).await?;
    }
    progress.report(Event::Begin {
        stage: Stage::SetUp,
    });
    if let Some(overlay) = &definition.overlay {
        tree::copy_over(overlay, root).map_err(bent("copy the overlay"))?;
    }
    if let Some(setup) = &definition.setup {
        run_setup(setup, root, progress).await?;
    }
    Ok(())
}

async fn run_bootstrap(
    packages: &[String],
    archive: &Archive,
    root: &Path,
    scratch: &Path,
    progress: &dyn Progress,
) -> Result<(), RootFsError> {
    let sources = scratch.join("machine.sources");
    write(&sources, &archive.to_stanzas())?;
    let mut command = contained(&["--mount", "--mount-proc"]);
    command
        .args([
            "mmdebstrap",
            "--mode=root",
            "--variant=minbase",
            "--format=directory",
        ])
        .args(["--verbose", "--aptopt=APT::Install-Recommends \"false\";"]);
    for option in fetch_options().await? {
        command.arg(format!("--aptopt={option}"));
    }
    for option in LEFT_OUT {
        command.arg(format!("--dpkgopt={option}"));
    }
    if !packages.is_empty() {
        command.arg(format!("--include={}", packages.join(",")));
    }
    command.arg(&archive.release).arg(root).arg(&sources);
    let mut meter = InstallMeter::default();
    program::run("mmdebstrap", &mut command, |line| {
        for event in meter.read(line) {
            progress.report(event);
        }
    })
    .await
    .map_err(failed("bootstrap the root file system"))?;
    neutralise(root, archive)
}

/// How the machine's apt reaches its archive: proxies, certificates, retries.
async fn fetch_options() -> Result<Vec<String>, RootFsError> {
    let mut command = Command::new("apt-config");
    command.args(["dump", "Acquire"]);
    let dump = program::output("apt-config", &mut command)
        .await
        .map_err(failed("ask apt for its configuration"))?;
    let kept = |line: &&str| {
        let name = line
            .split(' ')
            .next()
            .unwrap_or_default()
            .to_ascii_lowercase();
        let fetching = ["acquire::http::", "acquire::https::", "acquire::retries"];
        fetching.iter().any(|prefix| name.starts_with(prefix)) && !line.ends_with("\"\";")
    };
    Ok(dump.lines().filter(kept).map(str::to_owned).collect())
}

/// Takes out of a fresh root what the machine left in it.
fn neutralise(root: &Path, archive: &Archive) -> Result<(), RootFsError> {
    // Proxies and certificates of the machine are of no use inside, and none of its business.
    let _ = fs::remove_file(root.join("etc/apt/apt.conf.d/99mmdebstrap"));
    let parts = root.join("etc/apt/sources.list.d");
    for entry in parts.read_dir().into_iter().flatten().flatten() {
        let _ = fs::remove_file(entry.path());
    }
    let sources = archive.without_credentials().to_stanzas();
    write(&parts.join("debian.sources"), &sources)?;
    write(&root.join("etc/hostname"), "sandbox\n")?;
    write(
        &root.join("etc/hosts"),
        "127.0.0.1 localhost\n::1 localhost\n",
    )?;
    // The network gives each sandbox its resolver.
    write(&root.join("etc/resolv.conf"), "")?;
    write(&root.join("etc/machine-id"), "")
}

/// Copies the root file system `from` into the empty directory `root`.
///
/// # Errors
/// A file cannot be read, or the disk is full.
pub(crate) async fn copy_directory(from: &Path, root: &Path) -> Result<(), RootFsError> {
    let mut command = Command::new("cp");
    command.args(["--archive", "--one-file-system", "--reflink=auto", "--"]);
    command.arg(from.join(".")).arg(root);
    program::run("cp", &mut command, |_| {})
        .await
        .map_err(failed("copy the root file system"))
}

async fn install_wheels(
    wheels: &[String],
    root: &Path,
    scratch: &Path,
    progress: &dyn Progress,
) -> Result<(), RootFsError> {
    let mut question = inside(root, &[])?;
    question.args(["python3", "-c", PYTHON_QUESTION]);
    let answer = program::output("python3", &mut question)
        .await
        .map_err(failed("ask the root's Python for its version"))?;
    let tags = WheelTags::parse(&answer).ok_or_else(|| RootFsError::NoPython {
        answer: answer.trim().to_owned(),
    })?;
    let folder = tree::require_folder(root, WORK_FOLDER).map_err(bent("make room for wheels"))?;
    let mut fetch = contained(&["--mount"]);
    fetch.args([
        "python3",
        "-m",
        "pip",
        "download",
        "--no-input",
        "--progress-bar=off",
    ]);
    fetch.arg("--dest").arg(scratch.join("wheels"));
    fetch.args(tags.arguments());
    fetch.arg("pip").args(wheels);
    let note = |line: &str| {
        progress.report(Event::Note {
            text: line.to_owned(),
        })
    };
    program::run("pip", &mut fetch, note)
        .await
        .map_err(failed("fetch wheels"))?;
    tree::copy_over(&scratch.join("wheels"), &folder).map_err(bent("copy wheels"))?;
    // A wheel of pip is itself a program, so that the root needs none.
    let script = format!(
        "for pip in /{WORK_FOLDER}/pip-*.whl; do exec python3 \"$pip/pip\" install --no-index \
         --no-input --no-cache-dir --progress-bar=off --break-system-packages \
         --root-user-action=ignore --find-links /{WORK_FOLDER} \"$@\"; done"
    );
    let mut install = inside(root, &["--net"])?;
    install.args(["sh", "-c", &script, "sh"]).args(wheels);
    program::run("pip", &mut install, note)
        .await
        .map_err(failed("install wheels"))?;
    remove_work_folder(root)
}

async fn run_setup(setup: &Path, root: &Path, progress: &dyn Progress) -> Result<(), RootFsError> {
    let folder = tree::require_folder(root, WORK_FOLDER).map_err(bent("make room for set-up"))?;
    let script = folder.join("setup.sh");
    fs::copy(setup, &script).map_err(|source| RootFsError::File {
        path: script.clone(),
        source,
    })?;
    let mut command = inside(root, &["--net"])?;
    command.args(["sh", "-e", &format!("/{WORK_FOLDER}/setup.sh")]);
    program::run("setup.sh", &mut command, |line| {
        progress.report(Event::Note {
            text: line.to_owned(),
        });
    })
    .await
    .map_err(failed("run the set-up script"))?;
    remove_work_folder(root)
}

/// A command inside the root, in namespaces of its own.
fn inside(root: &Path, further: &[&str]) -> Result<Command, RootFsError> {
    for name in ["proc", "dev"] {
        tree::require_folder(root, name).map_err(bent("enter the root"))?;
    }
    let mut namespaces = vec!["--mount", "--uts", "--ipc"];
    namespaces.extend(further);
    let mut command = contained(&namespaces);
    command.args(["sh", "-euc", ENTER_ROOT, "sh"]).arg(root);
    Ok(command)
}

fn remove_work_folder(root: &Path) -> Result<(), RootFsError> {
    let path = root.join(WORK_FOLDER);
    fs::remove_dir_all(&path).map_err(|source| RootFsError::File { path, source })
}

fn write(path: &Path, text: &str) -> Result<(), RootFsError> {
    fs::write(path, text).map_err(|source| RootFsError::File {
        path: path.to_owned(),
        source,
    })
}

/// Asked of the root's Python: its version, its C library, its machine.
const PYTHON_QUESTION: &str = "import os, sys; print(*sys.version_info[:2], \
    os.confstr('CS_GNU_LIBC_VERSION').split()[1], os.uname().machine)";

/// Which wheels fit the root.
#[derive(Debug, PartialEq, Eq)]
struct WheelTags {
    python: (u32, u32),
    glibc_minor: u32,
    machine: String,
}

impl WheelTags {
    /// Reads the answer, such as `3 11 2.36 x86_64`.
    fn parse(answer: &str) -> Option<Self> {
        let mut words = answer.split_whitespace();
        let python = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let glibc = words.next()?.strip_prefix("2.")?;
        let machine = words.next()?;
        let known = machine
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'_');
        let glibc_minor = glibc.parse().ok()?;
        let plausible = (GLIBC_MINOR_MIN..=GLIBC_MINOR_MAX).contains(&glibc_minor);
        (known && plausible && words.next().is_none()).then(|| Self {
            python,
            glibc_minor,
            machine: machine.to_owned(),
        })
    }

    /// As arguments of `pip download`, the best platform first.
    fn arguments(&self) -> Vec<String> {
        let (major, minor) = self.python;
        let machine = &self.machine;
        let mut arguments = vec![
            String::from("--only-binary=:all:"),
            String::from("--implementation=cp"),
            format!("--python-version={major}.{minor}"),
            format!("--abi=cp{major}{minor}"),
            String::from("--abi=abi3"),
            String::from("--abi=none"),
        ];
        for minor in (GLIBC_MINOR_MIN..=self.glibc_minor).rev() {
            arguments.push(format!("--platform=manylinux_2_{minor}_{machine}"));
        }
        for old in ["manylinux2014", "manylinux2010", "manylinux1", "linux"] {
            arguments.push(format!("--platform={old}_{machine}"));
        }
        arguments
    }
}

/// Reads apt's and dpkg's lines as steps: each package is fetched, unpacked and set up.
#[derive(Debug, Default)]
struct InstallMeter {
    packages: u64,
    done: u64,
}

impl InstallMeter {
    const STEPS_PER_PACKAGE: u64 = 3;

    fn read(&mut self, line: &str) -> Vec<Event> {
        if let Some((_, rest)) = line.split_once(" upgraded, ")
            && let Some((count, _)) = rest.split_once(" newly installed")
        {
            self.packages += count.parse::<u64>().unwrap_or(0);
            return vec![self.step()];
        }
        if let Some(text) = line.strip_prefix("I: ") {
            return vec![Event::Note {
                text: text.to_owned(),
            }];
        }
        let counted = ["Get:", "Unpacking ", "Setting up "];
        // Before anything is to be installed, `Get:` lines are the archive's lists.
        if self.packages > 0 && counted.iter().any(|prefix| line.starts_with(prefix)) {
            self.done += 1;
            return vec![self.step()];
        }
        Vec::new()
    }

    fn step(&self) -> Event {
        let total = self.packages * Self::STEPS_PER_PACKAGE;
        Event::Step {
            done: self.done.min(total),
            total,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_asked_for_by_what_the_root_says() {
        let tags = WheelTags::parse("3 11 2.36 x86_64\n").unwrap();
        let arguments = tags.arguments();
        assert!(arguments.contains(&String::from("--python-version=3.11")));
        let first = arguments.iter().find(|a| a.starts_with("--platform"));
        assert_eq!(first.unwrap(), "--platform=manylinux_2_36_x86_64");
        for bad in [
            "",
            "3 11",
            "3 11 2.36",
            "3 11 2.36 x;id",
            "3 11 2.4000000 x86",
            "a b 2.1 c",
        ] {
            assert_eq!(WheelTags::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn progress_counts_three_steps_for_a_package() {
        let mut meter = InstallMeter::default();
        let step = |done, total| vec![Event::Step { done, total }];
        assert_eq!(meter.read("Get:1 http://x InRelease [1 kB]"), []);
        let line = "0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.";
        assert_eq!(meter.read(line), step(0, 6));
        assert_eq!(meter.read("Get:1 http://x bash 5 [1 kB]"), step(1, 6));
        assert_eq!(meter.read("Unpacking bash (5) ..."), step(2, 6));
        assert_eq!(meter.read("Setting up bash (5) ..."), step(3, 6));
        assert_eq!(meter.read("anything else"), []);
        for _ in 0..20 {
            meter.read("Setting up again (5) ...");
        }
        assert_eq!(meter.read("Setting up again (5) ..."), step(6, 6));
    }

    #[tokio::test]
    async fn set_up_sees_no_network_and_no_other_process() {
        // The machine's own /usr is enough of a root for a shell.
        let root = tempfile::tempdir().unwrap();
        let mut copy = Command::new("sh");
        let script = "mkdir -p $0/bin $0/usr/bin $0/lib64 && cd $0 && \
            for p in /bin/sh /usr/bin/env /bin/ls /bin/cat; do cp -L $p .$p; cp -L $p usr/bin/; \
            for l in $(ldd $p | grep -o '/[^ ]*'); do mkdir -p .$(dirname $l); cp -L $l .$l; done; \
            done";
        copy.args(["-c", script]).arg(root.path());
        program::output("sh", &mut copy).await.unwrap();
        let setup = tempfile::tempdir().unwrap();
        let script = setup.path().join("setup.sh");
        let text = "cat /proc/net/route > /out\nls -d /proc/[0-9]* >> /out\necho pid $$ >> /out\n";
        fs::write(&script, text).unwrap();
        run_setup(&script, root.path(), &crate::Silent)
            .await
            .unwrap();
        let out = fs::read_to_string(root.path().join("out")).unwrap();
        assert!(!out.contains("eth") && !out.contains("lo"), "{out}");
        assert!(out.contains("pid 1\n"), "{out}");
        assert!(out.matches("/proc/").count() <= 2, "{out}");
        assert!(!root.path().join(WORK_FOLDER).exists());
        // Its mounts ended with it.
        assert!(
            fs::read_dir(root.path().join("proc"))
                .unwrap()
                .next()
                .is_none()
        );
        // A failing script fails the build and shows what it said.
        fs::write(&script, "echo reason\nfalse\n").unwrap();
        let error = run_setup(&script, root.path(), &crate::Silent)
            .await
            .unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("reason"), "{source}");
    }
}
