//! What a run does in its sandbox: the calls of its loop, carried out over the agent.
//!
//! ```text
//!   WriteFiles ─▶ workspace, files, context          /tmp/.sandhold-runs/<work>/
//!   Launch ─────▶ sh: command > stdout 2> stderr       stdout  stderr  context.json
//!                     exit code ─▶ exit.new, renamed ─▶ exit
//!   ReadArtifacts ▶ list, what is due is read, kept until it is told
//!   ReadExit ───▶ exit, or no such process and no exit: killed
//!   KillProcesses ▶ what has the run's mark in its environment, until nothing has
//! ```
//!
//! The process is under a shell of ours that writes its exit code into a file: so it can be read by
//! whoever goes on with the run, whenever. The file has its size before the process starts, so that a
//! disk that is full is told as that, and one that the process fills keeps no code from being written.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use sandhold_governor::{Call, CallError, Platform, Reply, ids::RunId, rules::Rules};
use sandhold_types::{Generation, SandboxId};
use serde_json::json;

use super::{
    agent::{Agent, FileInfo, Start, Trouble},
    artifacts::{ARTIFACT_BYTES_MAX, Due, Globs, Manifest, Writing},
    head::{RunHead, look_wait},
};
use crate::guest::Guests;

/// The end of each output that is told when a run ends.
const TAIL_BYTES: usize = 64 * 1024;
/// How long the process may outlive its deadline if no replica is there to end it.
const DEADLINE_GRACE: Duration = Duration::from_secs(600);
/// The environment variable by which the processes of a run are known.
const MARK: &str = "SANDHOLD_RUN";
/// The exit code of a process whose shell was killed with it.
const KILLED: i32 = 137;
/// The longest answer to a look for an exit code; that there is none yet is said in a few words too.
const EXIT_BYTES_MAX: usize = 16 * 1024;

/// As many bytes as an exit code will have.
const NO_EXIT_YET: &[u8] = b"...\n";

/// $0 is the run's directory, which has `exit.new`; the rest is the command.
const LAUNCH: &str = r#"umask 077
"$@" >"$0/stdout" 2>"$0/stderr"; code=$?
printf '%03d\n' "$code" 1<>"$0/exit.new" && mv "$0/exit.new" "$0/exit""#;

/// $1 is the mark, $2 the run's directory. Nothing is left to kill, or it fails.
const KILL: &str = r#"for round in 1 2 3 4 5 6 7 8 9 10; do
  found=$(grep -lsxz -- "$1" /proc/[0-9]*/environ)
  if [ -z "$found" ]; then rm -rf -- "$2"; exit 0; fi
  for file in $found; do pid=${file#/proc/}; kill -9 "${pid%/environ}"; done 2>/dev/null
  sleep 0.1
done
exit 1"#;

/// A sandbox whose agent breaks off may be gone; its platform knows, and maybe why (R-L10, R-L12).
async fn settled<P: Guests + Platform>(
    trouble: Trouble,
    platform: &P,
    sandbox: &SandboxId,
) -> Trouble {
    let is_gone = match trouble.error {
        CallError::NotFound => true,
        CallError::NoAnswer => {
            let asked = platform.call(Call::Ask(sandbox.clone())).await;
            asked == Err(CallError::NotFound)
        }
        _ => false,
    };
    if !is_gone {
        return trouble;
    }
    let words = platform.ending(sandbox).unwrap_or(trouble.words);
    Trouble::new(CallError::NotFound, words)
}

/// A file of the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFile {
    /// Where it goes: in the workspace, unless it is absolute.
    pub path: String,
    /// What it holds.
    pub content: Bytes,
}

/// What is to be run. Only the replica that was asked knows it.
#[derive(Debug, Clone, Default)]
pub(super) struct Task {
    pub(super) files: Vec<RunFile>,
    pub(super) context: Option<Bytes>,
    pub(super) command: Vec<String>,
    pub(super) env_vars: BTreeMap<String, String>,
}

/// An artifact that was read and not told yet.
#[derive(Debug)]
pub(super) struct Artifact {
    pub(super) due: Due,
    pub(super) content: Bytes,
}

/// The last of what a process wrote.
#[derive(Debug, Default, Clone)]
pub(super) struct Tails {
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// One run in one sandbox.
#[derive(Debug)]
pub(super) struct Workload {
    pub(super) head: RunHead,
    pub(super) manifest: Manifest,
    /// Read and not told yet.
    pub(super) fresh: Vec<Artifact>,
    pub(super) tails: Option<Tails>,
    /// What went wrong last, in words.
    pub(super) trouble: Option<String>,
    globs: Option<Globs>,
    task: Task,
    writing: Writing,
}

impl Workload {
    /// `task` is nothing for a run that is taken over.
    pub(super) fn new(head: RunHead, task: Task, manifest: Manifest) -> Self {
        Self {
            globs: Globs::new(head.artifacts.clone()).ok(),
            head,
            manifest,
            fresh: Vec::new(),
            tails: None,
            trouble: None,
            task,
            writing: Writing::MayGoOn,
        }
    }

    fn directory(&self) -> String {
        format!("/tmp/.sandhold-runs/{}", self.head.work)
    }

    fn workspace(&self) -> &str {
        self.head.workspace.as_deref().unwrap_or("/")
    }

    /// Carries out one call of the loop.
    pub(super) async fn call<P: Guests + Platform>(
        &mut self,
        platform: &P,
        call: Call,
        rules: &Rules,
    ) -> Result<Reply, CallError> {
        let (sandbox, generation) = match &call {
            Call::WriteFiles(sandbox, generation, _)
            | Call::Launch(sandbox, generation, _)
            | Call::ReadArtifacts(sandbox, generation, ..)
            | Call::ReadExit(sandbox, generation, _)
            | Call::KillProcesses(sandbox, generation, _) => (sandbox.clone(), *generation),
            _ => return Err(CallError::Refused),
        };
        let patience = match &call {
            // Between two of these the loop must be able to beat.
            Call::ReadArtifacts(..) | Call::ReadExit(..) => look_wait(rules),
            _ => rules.settings().call_deadline,
        };
        let work = async {
            match self.carry_out(platform, call, &sandbox, generation).await {
                Err(trouble) => Err(settled(trouble, platform, &sandbox).await),
                done => done,
            }
        };
        match tokio::time::timeout(patience, work).await {
            Ok(Ok(reply)) => {
                self.trouble = None;
                Ok(reply)
            }
            Ok(Err(trouble)) => {
                let error = trouble.error;
                self.trouble = Some(trouble.words);
                Err(error)
            }
            Err(_) => {
                self.trouble = Some(format!("the sandbox did not answer within {patience:?}"));
                Err(CallError::NoAnswer)
            }
        }
    }

    async fn carry_out<P: Guests>(
        &mut self,
        guests: &P,
        call: Call,
        sandbox: &SandboxId,
        generation: Generation,
    ) -> Result<Reply, Trouble> {
        let agent = Agent {
            guests,
            sandbox,
            generation,
        };
        match call {
            Call::WriteFiles(..) => self.write_files(&agent).await?,
            Call::Launch(_, _, run) => self.launch(&agent, &run).await?,
            Call::ReadArtifacts(_, _, _, cursor) => {
                return self.read_artifacts(&agent, cursor).await;
            }
            Call::ReadExit(..) => return Ok(Reply::Exit(self.read_exit(&agent).await?)),
            _ => self.kill(&agent).await?,
        }
        Ok(Reply::Done)
    }

    async fn write_files<P: Guests>(&mut self, agent: &Agent<'_, P>) -> Result<(), Trouble> {
        let workspace = agent.directory(&self.head.cwd).await?;
        for file in std::mem::take(&mut self.task.files) {
            let path = match file.path.starts_with('/') {
                true => file.path,
                false => format!("{workspace}/{}", file.path),
            };
            agent.write(&path, file.content).await?;
        }
        self.head.workspace = Some(workspace);
        let exit = format!("{}/exit.new", self.directory());
        agent.write(&exit, Bytes::from_static(NO_EXIT_YET)).await?;
        if let Some(context) = &self.task.context {
            let path = format!("{}/context.json", self.directory());
            agent.write(&path, context.clone()).await?;
        }
        Ok(())
    }

    async fn launch<P: Guests>(
        &mut self,
        agent: &Agent<'_, P>,
        run: &RunId,
    ) -> Result<(), Trouble> {
        let directory = self.directory();
        let mut env_vars = std::mem::take(&mut self.task.env_vars);
        env_vars.insert(MARK.to_owned(), self.head.work.clone());
        env_vars.insert("SANDHOLD_RUN_ID".to_owned(), run.to_string());
        if self.task.context.is_some() {
            let path = format!("{directory}/context.json");
            env_vars.insert("SANDHOLD_CONTEXT".to_owned(), path);
        }
        let shell = ["/bin/sh", "-c", LAUNCH, &directory].map(ToOwned::to_owned);
        let command = [&shell[..], &self.task.command].concat();
        let start = Start {
            command: &command,
            cwd: self.workspace(),
            env_vars: json!(env_vars),
            tag: Some(&self.head.work),
            user: None,
            timeout: Duration::from_millis(self.head.timeout_ms) + DEADLINE_GRACE,
        };
        agent.start(&start).await
    }

    async fn read_artifacts<P: Guests>(
        &mut self,
        agent: &Agent<'_, P>,
        cursor: u64,
    ) -> Result<Reply, Trouble> {
        // What was read and could not be told is still to be told.
        if self.fresh.is_empty() {
            for due in self.due(agent).await? {
                let content = match due.omitted {
                    Some(_) => Bytes::new(),
                    None => match self.read_artifact(agent, &due).await? {
                        Some(content) => content,
                        // It is gone, or grew just now: the next look sees what it is.
                        None => continue,
                    },
                };
                self.fresh.push(Artifact { due, content });
            }
        }
        let count = u32::try_from(self.fresh.len()).unwrap_or(u32::MAX);
        Ok(Reply::Artifacts {
            count,
            cursor: cursor + u64::from(count),
        })
    }

    async fn due<P: Guests>(&mut self, agent: &Agent<'_, P>) -> Result<Vec<Due>, Trouble> {
        let Some(globs) = &self.globs else {
            return Ok(Vec::new());
        };
        let workspace = self.workspace();
        let mut listed: Vec<FileInfo> = Vec::new();
        for (directory, depth) in globs.looks() {
            let path = format!("{}/{directory}", workspace.trim_end_matches('/'));
            listed.extend(agent.list(&path, depth).await?);
        }
        let workspace = workspace.to_owned();
        Ok(self.manifest.due(globs, &workspace, &listed, self.writing))
    }

    async fn read_artifact<P: Guests>(
        &self,
        agent: &Agent<'_, P>,
        due: &Due,
    ) -> Result<Option<Bytes>, Trouble> {
        let path = format!("{}/{}", self.workspace().trim_end_matches('/'), due.path);
        let bytes_max = usize::try_from(ARTIFACT_BYTES_MAX).unwrap_or(usize::MAX);
        let content = match agent.read(&path, None, bytes_max).await {
            Err(trouble) if trouble.error == CallError::Refused => return Ok(None),
            read => read?,
        };
        Ok(content.filter(|content| content.len() as u64 == due.stamp.size))
    }

    async fn read_exit<P: Guests>(&mut self, agent: &Agent<'_, P>) -> Result<Option<i32>, Trouble> {
        let mut code = self.exit_code(agent).await?;
        if code.is_none() {
            if agent.is_running(&self.head.work).await? {
                return Ok(None);
            }
            // It may have ended between the two looks.
            code = self.exit_code(agent).await?;
        }
        if self.tails.is_none() {
            self.tails = Some(self.read_tails(agent).await?);
        }
        self.writing = Writing::IsOver;
        Ok(Some(code.unwrap_or(KILLED)))
    }

    async fn exit_code<P: Guests>(&self, agent: &Agent<'_, P>) -> Result<Option<i32>, Trouble> {
        let path = format!("{}/exit", self.directory());
        let text = agent.read(&path, None, EXIT_BYTES_MAX).await?;
        let text = text.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
        // What a guest wrote there instead of a number is its own doing.
        Ok(text.map(|text| text.parse().unwrap_or(KILLED)))
    }

    async fn read_tails<P: Guests>(&self, agent: &Agent<'_, P>) -> Result<Tails, Trouble> {
        let tail = async |name: &str| {
            let path = format!("{}/{name}", self.directory());
            let range = format!("bytes=-{TAIL_BYTES}");
            let bytes = agent.read(&path, Some(range), TAIL_BYTES).await?;
            let bytes = bytes.unwrap_or_default();
            Ok::<_, Trouble>(String::from_utf8_lossy(&bytes).into_owned())
        };
        Ok(Tails {
            stdout: tail("stdout").await?,
            stderr: tail("stderr").await?,
        })
    }

    async fn kill<P: Guests>(&mut self, agent: &Agent<'_, P>) -> Result<(), Trouble> {
        if self.tails.is_none() {
            // A run that was cut off tells what it said, if it can.
            self.tails = self.read_tails(agent).await.ok();
        }
        let mark = format!("{MARK}={}", self.head.work);
        let directory = self.directory();
        let command = ["/bin/sh", "-c", KILL, "sh", &mark, &directory].map(ToOwned::to_owned);
        let start = Start {
            command: &command,
            cwd: "/",
            env_vars: json!({}),
            tag: None,
            user: Some("root"),
            timeout: Duration::from_secs(60),
        };
        match agent.run_to_end(&start).await? {
            0 => Ok(()),
            _ => Err(Trouble::new(
                CallError::Refused,
                "what the run started could not be killed",
            )),
        }
    }
}
