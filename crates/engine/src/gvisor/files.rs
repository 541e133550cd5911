//! The files of an instance: in its own directory, and under the engine's root.
//!
//! ```text
//!  <instance directory>/bundle/config.json   what it was started with
//!                       disk/                the writable layer (its file is already unlinked)
//!                       console.log[.old]    what its first process wrote, bounded
//!                       runsc.log panic.log  what the engine wrote
//!                       prepared.json        what it was prepared for, if it was
//!                       engine.json          which process it is and its limits
//!                       ended.json           how it ended, once that is known
//!  <engine root>/<name>_sandbox:<name>.{state,lock}, runsc-<name>.sock
//! ```

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use sandhold_types::Resources;

use super::process::ProcessIdentity;
use crate::{EngineError, ExitCause, InstanceId, LaunchSpec};

/// What the engine notes about an instance that it has started.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Note {
    pub(super) sandbox: ProcessIdentity,
    pub(super) resources: Resources,
}

/// What an instance was prepared for. A launch that asks for anything else cannot use it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Prepared {
    root_fs: PathBuf,
    network_namespace: PathBuf,
    resources: Resources,
    command: Vec<String>,
    environment: Vec<String>,
}

impl Prepared {
    pub(super) fn of(spec: &LaunchSpec) -> Self {
        let (command, environment) = spec.origin.process();
        Self {
            root_fs: spec.root_fs.clone(),
            network_namespace: spec.network_namespace.clone(),
            resources: spec.resources,
            command: command.to_vec(),
            environment: environment.to_vec(),
        }
    }
}

/// Paths in an instance's directory.
#[derive(Debug, Clone)]
pub(super) struct InstanceFiles {
    directory: PathBuf,
}

impl InstanceFiles {
    pub(super) fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    pub(super) fn bundle(&self) -> PathBuf {
        self.directory.join("bundle")
    }

    pub(super) fn configuration(&self) -> PathBuf {
        self.bundle().join("config.json")
    }

    pub(super) fn disk(&self) -> PathBuf {
        self.directory.join("disk")
    }

    pub(super) fn console(&self) -> PathBuf {
        self.directory.join("console.log")
    }

    pub(super) fn old_console(&self) -> PathBuf {
        self.directory.join("console.log.old")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.directory.join("runsc.log")
    }

    pub(super) fn panic_log(&self) -> PathBuf {
        self.directory.join("panic.log")
    }

    pub(super) fn pid(&self) -> PathBuf {
        self.directory.join("sandbox.pid")
    }

    fn note_path(&self) -> PathBuf {
        self.directory.join("engine.json")
    }

    fn ended_path(&self) -> PathBuf {
        self.directory.join("ended.json")
    }

    pub(super) fn note(&self) -> Option<Note> {
        read_json(&self.note_path())
    }

    pub(super) fn write_note(&self, note: &Note) -> Result<(), EngineError> {
        write_json(&self.note_path(), note)
    }

    fn prepared_path(&self) -> PathBuf {
        self.directory.join("prepared.json")
    }

    pub(super) fn prepared(&self) -> Option<Prepared> {
        read_json(&self.prepared_path())
    }

    pub(super) fn write_prepared(&self, prepared: &Prepared) -> Result<(), EngineError> {
        write_json(&self.prepared_path(), prepared)
    }

    pub(super) fn ended(&self) -> Option<ExitCause> {
        read_json(&self.ended_path())
    }

    pub(super) fn write_ended(&self, cause: &ExitCause) -> Result<(), EngineError> {
        write_json(&self.ended_path(), cause)
    }

    /// Empties the directory; it may be gone already.
    pub(super) fn clear(&self) -> Result<(), EngineError> {
        let failed = |path: &Path, source| EngineError::File {
            step: "remove",
            path: path.to_owned(),
            source,
        };
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(failed(&self.directory, e)),
        };
        for entry in entries {
            let entry = entry.map_err(|e| failed(&self.directory, e))?;
            let path = entry.path();
            let is_directory = entry.file_type().is_ok_and(|t| t.is_dir());
            let removed = if is_directory {
                fs::remove_dir_all(&path)
            } else {
                fs::remove_file(&path)
            };
            removed.map_err(|e| failed(&path, e))?;
        }
        Ok(())
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Written beside and renamed, so that a reader sees all of it or nothing. Not synced: after a
/// power cut there are no processes that it could be about.
fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), EngineError> {
    let write = || {
        let draft = path.with_extension("new");
        fs::write(&draft, serde_json::to_vec(value)?)?;
        fs::rename(&draft, path)
    };
    write().map_err(|source| EngineError::File {
        step: "write",
        path: path.to_owned(),
        source,
    })
}

/// The engine's own files about instances.
#[derive(Debug, Clone)]
pub(super) struct EngineRoot(pub(super) PathBuf);

impl EngineRoot {
    pub(super) fn socket(&self, id: &InstanceId) -> PathBuf {
        self.0.join(format!("runsc-{id}.sock"))
    }

    fn of_instance(&self, id: &InstanceId) -> [PathBuf; 3] {
        let state = |extension: &str| self.0.join(format!("{id}_sandbox:{id}.{extension}"));
        [state("state"), state("lock"), self.socket(id)]
    }

    /// Removes what is there of an instance.
    pub(super) fn clear(&self, id: &InstanceId) -> Result<(), EngineError> {
        for path in self.of_instance(id) {
            match fs::remove_file(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                removed => removed.map_err(|source| EngineError::File {
                    step: "remove",
                    path,
                    source,
                })?,
            }
        }
        Ok(())
    }

    pub(super) fn knows(&self, id: &InstanceId) -> bool {
        self.of_instance(id).iter().any(|path| path.exists())
    }

    /// Names of the instances of which any file is left.
    pub(super) fn list(&self) -> io::Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(&self.0)? {
            let name = entry?.file_name();
            if let Some(instance) = name.to_str().and_then(instance_of_file) {
                names.insert(instance.to_owned());
            }
        }
        Ok(names)
    }
}

/// Whose file this is.
fn instance_of_file(name: &str) -> Option<&str> {
    if let Some(socket) = name.strip_prefix("runsc-") {
        return socket.strip_suffix(".sock");
    }
    name.split_once("_sandbox:").map(|(instance, _)| instance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_engine_tell_their_instance() {
        assert_eq!(instance_of_file("runsc-x-1.sock"), Some("x-1"));
        assert_eq!(instance_of_file("x-1_sandbox:x-1.state"), Some("x-1"));
        assert_eq!(instance_of_file("x-1_sandbox:x-1.lock"), Some("x-1"));
        assert_eq!(instance_of_file("other"), None);
    }
}
