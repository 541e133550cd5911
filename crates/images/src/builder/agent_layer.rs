//! The layer that sandboxes run on: the files of a template and the agent.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::fs::OFlags;
use tokio::process::Command;

use super::{BuildError, BuildRequest, Builder, COMMAND, file_error, tree_error};
use crate::{
    definition::AgentSettings,
    layers::Confined,
    program,
    progress::{Event, Progress, Stage},
    record::ContentKey,
    tree::{self, KeyMaker},
};

/// Where the agent lies in a root.
const AGENT_FOLDER: &str = ".sandhold";
/// The resolver of every sandbox is its router, which has the same address in all of them.
const RESOLVER: &str = "nameserver 169.254.0.22\n";
/// Read by login shells, which begin with a search path of their own.
const PROFILE: &str = "zz-sandhold.sh";

impl Builder {
    /// The files of the layer `files` and the agent, as a layer.
    pub(super) async fn agent_layer(
        &self,
        request: &BuildRequest<'_>,
        files: &ContentKey,
        settings: &AgentSettings,
        progress: &dyn Progress,
    ) -> Result<ContentKey, BuildError> {
        let text = settings_text(settings)?;
        let agent = tree::hash_file(request.agent).map_err(tree_error("read the agent"))?;
        let key = KeyMaker::new("root 2")
            .with(files.0.as_bytes())
            .with(&agent)
            .with(&text)
            .with(RESOLVER.as_bytes())
            .finish();
        if self.shelf.layer(&key).is_dir() {
            progress.report(Event::Cached {
                stage: Stage::Agent,
            });
            return Ok(key);
        }
        progress.report(Event::Begin {
            stage: Stage::Agent,
        });
        let staged = self.stage("root")?;
        let mut copy = Command::new("cp");
        copy.args(["--archive", "--link", "--"]);
        copy.arg(self.shelf.layer(files).join("root"))
            .arg(staged.join("root"));
        program::run("cp", &mut copy, |_| {})
            .await
            .map_err(|source| BuildError::Agent {
                name: request.definition.name.clone(),
                source,
            })?;
        install_agent(&staged.join("root"), request.agent, settings)?;
        self.place_layer(&staged, &key).await?;
        Ok(key)
    }
}

fn settings_text(settings: &AgentSettings) -> Result<Vec<u8>, BuildError> {
    serde_json::to_vec_pretty(settings).map_err(|source| BuildError::File {
        step: "write",
        path: PathBuf::from("agent.json"),
        source: source.into(),
    })
}

/// Puts the agent and its settings into a root, in place of those that are there.
pub(super) fn install_agent(
    root: &Path,
    agent: &Path,
    settings: &AgentSettings,
) -> Result<(), BuildError> {
    let text = settings_text(settings)?;
    let binary = fs::read(agent).map_err(file_error("read", agent))?;
    let install = || -> io::Result<()> {
        let confined = Confined::open(root)?;
        confined.remove(Path::new(AGENT_FOLDER))?;
        let folder = Path::new(AGENT_FOLDER);
        confined.replace_file(&folder.join("agent"), &binary, 0o755)?;
        confined.replace_file(&folder.join("agent.json"), &text, 0o644)?;
        install_sudo(&confined)?;
        install_profile(&confined, settings)?;
        confined.replace_file(Path::new("etc/resolv.conf"), RESOLVER.as_bytes(), 0o644)
    };
    install().map_err(file_error("add the agent to", root))
}

/// The real `sudo` cannot work where the kernel knows no set-user-ID programs, so the agent's stands
/// before it on the path. A root without `sudo` gets none.
fn install_sudo(root: &Confined) -> io::Result<()> {
    let exists = |path: &str| root.open_at(Path::new(path), OFlags::PATH).is_ok();
    if !exists("usr/bin/sudo") || !exists("usr/local/bin") {
        return Ok(());
    }
    root.replace_link(Path::new("usr/local/bin/sudo"), Path::new(COMMAND[0]))
}

/// A login shell forgets the search path that it was started with; the template's own is told to it
/// again (BC-120).
fn install_profile(root: &Confined, settings: &AgentSettings) -> io::Result<()> {
    let file = Path::new("etc/profile.d").join(PROFILE);
    match settings.environment.get("PATH") {
        Some(path) => {
            let text = format!("export PATH={}\n", quoted(path));
            root.replace_file(&file, text.as_bytes(), 0o644)
        }
        None => root.remove(&file),
    }
}

/// A word for a shell.
pub(super) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
