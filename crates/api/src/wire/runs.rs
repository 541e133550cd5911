//! Runs, as they are on the wire (R-G3).

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use sandhold_books::runs::Ending;
use sandhold_governor::{
    books::{Keep, RunDefaults},
    ids::Bucket,
};
use sandhold_governor_driver::{GlobError, Globs, RunAsk, RunFile, RunInfo};
use sandhold_types::TemplateId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    WholeSeconds,
    bucket::{TemplateKind, wanted_template},
    create::{check_environment, check_pairs},
    governor::{HolderBody, owner_in, parsed},
};
use crate::{error::ApiError, settings::Limits};

/// The most files of one run.
const FILES_MAX: usize = 1_000;
/// The longest path, in bytes.
const PATH_BYTES_MAX: usize = 4_095;
/// The most arguments of a command, its name included.
const ARGUMENTS_MAX: usize = 1_024;
/// The longest argument, in bytes; Linux takes none that is longer.
const ARGUMENT_BYTES_MAX: usize = 128 * 1024 - 1;
/// The longest time that a run may have.
pub(crate) const TIMEOUT_MAX: Duration = Duration::from_secs(86_400);

/// What a run leaves behind.
#[derive(Debug, Clone, Copy, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KeepBody {
    /// The sandbox, for its lease.
    Sandbox,
    /// Nothing.
    Nothing,
}

/// A file that is written into the workspace before the command starts.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct FileBody {
    /// Where it goes: relative to `cwd`, or absolute.
    path: Option<String>,
    /// What it holds, as text.
    content: Option<String>,
    /// What it holds, as base64.
    content_base64: Option<String>,
}

/// `POST /v1/sandbox-runs`
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct RunAskBody {
    /// Product or team; the key's own if left out.
    namespace: Option<String>,
    /// Its environment; the key's own if left out.
    env: Option<String>,
    /// The caller's project.
    project_id: Option<String>,
    /// The caller's name for the session.
    session_run_id: Option<String>,
    /// For whom the sandbox is; `namespace:env:project_id:session_run_id` if left out.
    owner_id: Option<String>,
    /// The lease that the caller has or takes. Without one, the run has one of its own.
    lease_id: Option<String>,
    /// The caller's name for this run. Asking again with it attaches to the run.
    run_id: Option<String>,
    /// `main` or `light`.
    template: Option<TemplateKind>,
    /// An ID or a name of a template.
    template_id: Option<String>,
    /// What is written into the workspace.
    #[serde(default)]
    files: Vec<FileBody>,
    /// Any JSON; the command finds it in the file that `SANDHOLD_CONTEXT` names.
    context: Option<Value>,
    /// The program and its arguments. No shell is between.
    #[serde(default)]
    command: Vec<String>,
    /// Environment of the command.
    #[serde(default)]
    env_vars: BTreeMap<String, String>,
    /// Where the command runs; made if it is not there.
    cwd: Option<String>,
    /// For how many seconds it may run; as the bucket says if left out.
    #[schema(value_type = Option<i64>)]
    timeout: Option<WholeSeconds>,
    /// Which files are told as they come to be: globs relative to `cwd`.
    #[serde(default)]
    artifacts: Vec<String>,
    /// What stays. `sandbox` if a `lease_id` is given, else `nothing`.
    keep: Option<KeepBody>,
}

fn invalid(field: impl Into<String>, problem: impl Into<String>) -> ApiError {
    ApiError::invalid(field, problem)
}

/// Text that can be a word of an owner: the parts stay apart.
fn name(field: &'static str, value: Option<String>) -> Result<String, ApiError> {
    let text = value.ok_or_else(|| invalid(field, "is missing"))?;
    let is_name =
        (1..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic() && b != b':');
    if is_name {
        Ok(text)
    } else {
        let rule = "must be 1 to 128 printable ASCII characters without spaces and colons";
        Err(invalid(field, rule))
    }
}

impl RunAskBody {
    /// Where it counts.
    pub(crate) fn bucket(&self, own: &Bucket) -> Result<Bucket, ApiError> {
        HolderBody::bucket_of(self.namespace.as_deref(), self.env.as_deref(), own)
    }

    /// What is asked. `defaults` are those of its bucket; `template_of` says what the name of a template
    /// means there.
    pub(crate) fn checked(
        self,
        bucket: Bucket,
        defaults: &RunDefaults,
        limits: &Limits,
        template_of: impl FnOnce(&Bucket, String) -> Result<TemplateId, ApiError>,
    ) -> Result<RunAsk, ApiError> {
        let project = name("project_id", self.project_id)?;
        let session_run = name("session_run_id", self.session_run_id)?;
        let keep = match (self.keep, &self.lease_id) {
            (Some(KeepBody::Sandbox), _) | (None, Some(_)) => Keep::Sandbox,
            (Some(KeepBody::Nothing), _) | (None, None) => Keep::Nothing,
        };
        let owner = match &self.owner_id {
            Some(owner) => owner_in(&bucket, owner)?,
            None => bucket
                .owner_of_run(&project, &session_run)
                .map_err(|refused| invalid("session_run_id", refused.to_string()))?,
        };
        let lease = self.lease_id.as_deref();
        let run = self.run_id.as_deref();
        check_pairs("env_vars", &self.env_vars, limits)?;
        check_environment(&self.env_vars)?;
        check_command(&self.command)?;
        let cwd = self.cwd.unwrap_or_default();
        check_path("cwd", &cwd)?;
        let template = wanted_template(self.template, self.template_id, defaults)?;
        let context = self.context.map(|context| Bytes::from(context.to_string()));
        Ok(RunAsk {
            run: run.map(|run| parsed("run_id", run)).transpose()?,
            owner,
            lease: lease.map(|lease| parsed("lease_id", lease)).transpose()?,
            project,
            session_run,
            files: files(self.files)?,
            context,
            command: self.command,
            env_vars: self.env_vars,
            cwd,
            timeout: timeout(self.timeout, defaults)?,
            artifacts: globs(self.artifacts)?,
            keep,
            template: template_of(&bucket, template)?,
            bucket,
        })
    }
}

fn timeout(given: Option<WholeSeconds>, defaults: &RunDefaults) -> Result<Duration, ApiError> {
    let longest = defaults.timeout_max.unwrap_or(TIMEOUT_MAX);
    let Some(WholeSeconds(seconds)) = given else {
        let usual = defaults.timeout.map(|usual| usual.min(longest));
        return usual.ok_or_else(|| invalid("timeout", "is missing"));
    };
    match u64::try_from(seconds).map(Duration::from_secs) {
        Ok(wanted) if !wanted.is_zero() && wanted <= longest => Ok(wanted),
        _ => {
            let rule = format!("must be 1 to {}", longest.as_secs());
            Err(invalid("timeout", rule))
        }
    }
}

fn globs(texts: Vec<String>) -> Result<Globs, ApiError> {
    Globs::new(texts).map_err(|refused: GlobError| invalid("artifacts", refused.to_string()))
}

fn check_command(command: &[String]) -> Result<(), ApiError> {
    if command.first().is_none_or(String::is_empty) {
        return Err(invalid("command", "must name a program"));
    }
    if command.len() > ARGUMENTS_MAX {
        return Err(invalid(
            "command",
            format!("has more than {ARGUMENTS_MAX} arguments"),
        ));
    }
    let is_argument = |text: &String| text.len() <= ARGUMENT_BYTES_MAX && !text.contains('\0');
    if !command.iter().all(is_argument) {
        let rule = format!("has an argument with more than {ARGUMENT_BYTES_MAX} bytes or a NUL");
        return Err(invalid("command", rule));
    }
    Ok(())
}

fn check_path(field: &str, path: &str) -> Result<(), ApiError> {
    if path.len() > PATH_BYTES_MAX || path.contains('\0') {
        let rule = format!("must be a path of at most {PATH_BYTES_MAX} bytes");
        return Err(invalid(field, rule));
    }
    Ok(())
}

fn files(given: Vec<FileBody>) -> Result<Vec<RunFile>, ApiError> {
    if given.len() > FILES_MAX {
        return Err(invalid("files", format!("are more than {FILES_MAX}")));
    }
    let read = |(n, file): (usize, FileBody)| {
        let field = format!("files[{n}]");
        let path = file.path.unwrap_or_default();
        if path.is_empty() {
            return Err(invalid(field, "has no path"));
        }
        check_path(&field, &path)?;
        let content = match (file.content, file.content_base64) {
            (Some(text), None) => Bytes::from(text),
            (None, Some(text)) => match STANDARD.decode(text) {
                Ok(bytes) => Bytes::from(bytes),
                Err(_) => return Err(invalid(field, "has content that is not base64")),
            },
            _ => {
                let rule = "must have one of content and content_base64";
                return Err(invalid(field, rule));
            }
        };
        Ok(RunFile { path, content })
    };
    given.into_iter().enumerate().map(read).collect()
}

/// `GET /v1/sandbox-runs/{id}`
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct RunBody {
    run_id: String,
    /// `waiting`, `running`, `completed` or `error`.
    state: &'static str,
    namespace: String,
    env: String,
    owner_id: String,
    lease_id: String,
    project_id: String,
    session_run_id: String,
    template_id: String,
    /// `null` while it waits for one.
    sandbox_id: Option<String>,
    /// The fencing token of its lease.
    fence: Option<u64>,
    /// `exited`, or why it ended otherwise; `null` while it goes on.
    code: Option<String>,
    /// Of its process, if that ended by itself.
    exit_code: Option<i32>,
    /// How it ended, in words.
    message: Option<String>,
    /// The number of its last event.
    last_event_id: u64,
}

impl RunBody {
    pub(crate) fn of(info: RunInfo) -> Self {
        let end = info.end_of();
        let head = info.head;
        let state = match (&end, head.is_started) {
            (Some(end), _) if end.exit_code.is_some() => "completed",
            (Some(_), _) => "error",
            (None, true) => "running",
            (None, false) => "waiting",
        };
        let place = head.place;
        Self {
            run_id: info.run.to_string(),
            state,
            namespace: head.namespace,
            env: head.env,
            owner_id: head.owner,
            lease_id: head.lease,
            project_id: head.project,
            session_run_id: head.session_run,
            template_id: head.template,
            fence: place.as_ref().map(|place| place.fence),
            sandbox_id: place.map(|place| place.sandbox),
            code: end.as_ref().map(|end| end.code.clone()),
            exit_code: end.as_ref().and_then(|end| end.exit_code),
            message: end.map(|end| end.message),
            last_event_id: info.last,
        }
    }
}

/// `POST /v1/sandbox-runs/{id}/cancel`
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct CancelBody {
    /// Whose run it is.
    pub(crate) owner_id: Option<String>,
    /// The lease it is under.
    pub(crate) lease_id: Option<String>,
}

/// What became of it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct CancelledBody {
    /// It is asked to end.
    pub(crate) cancelled: bool,
}

/// Whether nothing follows.
pub(crate) fn is_over(ending: Ending) -> bool {
    ending == Ending::Closed
}
