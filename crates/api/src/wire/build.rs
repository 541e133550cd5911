//! Builds of templates as the E2B SDKs send and read them (wire contract 1.6). CubeSandbox's are in
//! [`super::image_build`].

use sandhold_platform::{
    AnnouncedBuild, BuildBase, BuildLogLevel, BuildLogLine, BuildPart, BuildPlan, BuildState,
    BuildStep, BuildView, FilesHash, NewBuild, RegistryLogin, StartWith, TagView,
};
use sandhold_types::Resources;
use serde::{Deserialize, Serialize};

use crate::error::ApiError;

/// The image that the SDKs begin with when their user names none. It is made for E2B's own
/// machines; here it is the template that has the same purpose.
const DEFAULT_IMAGE: &str = "e2bdev/base";
/// The template in its place.
const DEFAULT_TEMPLATE: &str = "base";
/// The user under which Google's registries take the key of a service account.
const GOOGLE_KEY_USER: &str = "_json_key";
/// What a template's sandboxes may be given.
const CPU_COUNT_MAX: u32 = 256;
const MEMORY_MIB_MIN: u32 = 128;
const MEMORY_MIB_MAX: u32 = 1 << 20;
const DISK_MIB_MAX: u32 = 1 << 22;
/// How long a command, a path or a value may be, in bytes.
const TEXT_BYTES_MAX: usize = 128 * 1024 - 1;

/// `POST /v3/templates`
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NewBuildBody {
    name: Option<String>,
    /// What older SDKs call it.
    alias: Option<String>,
    #[serde(default)]
    tags: Option<Vec<String>>,
    cpu_count: Option<u32>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u32>,
    min_free_disk_mb: Option<u32>,
}

impl NewBuildBody {
    pub(crate) fn into_build(self) -> Result<NewBuild, ApiError> {
        let name = self.name.or(self.alias);
        Ok(NewBuild {
            name: name.ok_or_else(|| ApiError::invalid("name", "is missing"))?,
            tags: self.tags.unwrap_or_default(),
            resources: resources(
                self.cpu_count.map(|count| count.saturating_mul(1000)),
                self.memory_mb,
                self.min_free_disk_mb,
            )?,
        })
    }
}

/// Limits of sandboxes, those that were not chosen as everywhere. A disk is never made smaller.
pub(crate) fn resources(
    cpu_milli: Option<u32>,
    memory_mib: Option<u32>,
    disk_mib: Option<u32>,
) -> Result<Resources, ApiError> {
    let default = Resources::default();
    let cpu_milli = cpu_milli.unwrap_or(default.cpu_milli);
    if !(100..=CPU_COUNT_MAX * 1000).contains(&cpu_milli) {
        return Err(ApiError::invalid(
            "cpuCount",
            "is more or less than a sandbox can have",
        ));
    }
    let memory_mib = memory_mib.unwrap_or(default.memory_mib);
    if !(MEMORY_MIB_MIN..=MEMORY_MIB_MAX).contains(&memory_mib) {
        return Err(ApiError::invalid(
            "memoryMB",
            "is more or less than a sandbox can have",
        ));
    }
    let disk_mib = disk_mib.unwrap_or(0).max(default.disk_mib);
    if disk_mib > DISK_MIB_MAX {
        return Err(ApiError::invalid(
            "minFreeDiskMb",
            "is more than a sandbox can have",
        ));
    }
    Ok(Resources {
        cpu_milli,
        memory_mib,
        disk_mib,
        ..default
    })
}

/// The answer to `POST /v3/templates`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AnnouncedBody {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    public: bool,
    names: Vec<String>,
    tags: Vec<String>,
    aliases: Vec<String>,
}

impl AnnouncedBody {
    pub(crate) fn of(announced: AnnouncedBuild) -> Self {
        Self {
            template_id: announced.template.to_string(),
            build_id: announced.build.to_string(),
            public: false,
            aliases: announced.names.clone(),
            names: announced.names,
            tags: match announced.tags.is_empty() {
                true => vec![String::from("default")],
                false => announced.tags,
            },
        }
    }
}

/// `POST /v2/templates/{template}/builds/{build}`
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StartBuildBody {
    from_image: Option<String>,
    from_template: Option<String>,
    from_image_registry: Option<RegistryBody>,
    #[serde(default)]
    steps: Option<Vec<StepBody>>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
    force: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RegistryBody {
    r#type: String,
    username: Option<String>,
    password: Option<String>,
    service_account_json: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StepBody {
    r#type: String,
    #[serde(default)]
    args: Option<Vec<String>>,
    files_hash: Option<String>,
    force: Option<bool>,
}

impl StartBuildBody {
    pub(crate) fn into_plan(self) -> Result<BuildPlan, ApiError> {
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let login = self.from_image_registry.map(RegistryBody::into_login);
        let base = match (given(self.from_image), given(self.from_template)) {
            (Some(image), None) => image_base(image, login.transpose()?),
            (None, Some(template)) => BuildBase::Template(template),
            (Some(_), Some(_)) => {
                return Err(ApiError::invalid(
                    "fromTemplate",
                    "does not go with fromImage",
                ));
            }
            (None, None) => {
                return Err(ApiError::invalid("fromImage", "or fromTemplate is missing"));
            }
        };
        let steps = self.steps.unwrap_or_default();
        let steps = steps.into_iter().enumerate();
        Ok(BuildPlan {
            base,
            environment: std::collections::BTreeMap::new(),
            steps: steps
                .map(|(index, step)| step.into_step(index))
                .collect::<Result<_, _>>()?,
            start: StartWith::Commands {
                start: given(self.start_cmd),
                ready: given(self.ready_cmd),
            },
            force: self.force.unwrap_or(false),
        })
    }
}

fn image_base(image: String, login: Option<RegistryLogin>) -> BuildBase {
    let plain = image.strip_suffix(":latest").unwrap_or(&image);
    if plain == DEFAULT_IMAGE {
        return BuildBase::Template(String::from(DEFAULT_TEMPLATE));
    }
    BuildBase::Image {
        reference: image,
        login,
    }
}

impl RegistryBody {
    fn into_login(self) -> Result<RegistryLogin, ApiError> {
        let missing =
            |field: &str| ApiError::invalid(format!("fromImageRegistry.{field}"), "is missing");
        match self.r#type.as_str() {
            "registry" => Ok(RegistryLogin {
                username: self.username.ok_or_else(|| missing("username"))?,
                password: self.password.ok_or_else(|| missing("password"))?,
            }),
            "gcp" => Ok(RegistryLogin {
                username: String::from(GOOGLE_KEY_USER),
                password: self
                    .service_account_json
                    .ok_or_else(|| missing("serviceAccountJson"))?,
            }),
            "aws" => Err(ApiError::NotSupported(String::from(
                "signing in to a registry by an AWS key (use the password of `aws ecr get-login-password` with the user AWS)",
            ))),
            _ => Err(ApiError::invalid("fromImageRegistry.type", "is not known")),
        }
    }
}

impl StepBody {
    fn into_step(self, index: usize) -> Result<(BuildStep, bool), ApiError> {
        let field = |name: &str| format!("steps[{index}].{name}");
        let args = self.args.unwrap_or_default();
        let has = |text: &String| text.len() > TEXT_BYTES_MAX || text.contains('\0');
        if args.iter().any(has) {
            return Err(ApiError::invalid(
                field("args"),
                "is too long or holds a NUL",
            ));
        }
        let optional = |at: usize| args.get(at).filter(|text| !text.is_empty()).cloned();
        let required = |at: usize| {
            optional(at).ok_or_else(|| ApiError::invalid(field("args"), "is too short"))
        };
        let step = match self.r#type.as_str() {
            "RUN" => BuildStep::Run {
                command: required(0)?,
                user: optional(1),
            },
            "WORKDIR" => BuildStep::Workdir(required(0)?),
            "USER" => BuildStep::User(required(0)?),
            "ENV" => BuildStep::Env(
                pairs(&args).ok_or_else(|| ApiError::invalid(field("args"), "are no pairs"))?,
            ),
            "COPY" => BuildStep::Copy {
                source: required(0)?,
                destination: required(1)?,
                user: optional(2),
                mode: optional(3)
                    .map(|text| mode(&text))
                    .transpose()
                    .map_err(|rule| ApiError::invalid(field("args[3]"), rule))?,
                files: self
                    .files_hash
                    .as_deref()
                    .and_then(FilesHash::read)
                    .ok_or_else(|| {
                        ApiError::invalid(field("filesHash"), "must be 64 hexadecimal digits")
                    })?,
            },
            _ => {
                return Err(ApiError::invalid(
                    field("type"),
                    "must be COPY, ENV, RUN, WORKDIR or USER",
                ));
            }
        };
        Ok((step, self.force.unwrap_or(false)))
    }
}

/// Names and values that alternate.
fn pairs(args: &[String]) -> Option<Vec<(String, String)>> {
    let (pairs, rest) = args.as_chunks::<2>();
    let named = |[name, _]: &&[String; 2]| !name.is_empty() && !name.contains('=');
    (rest.is_empty() && !pairs.is_empty() && pairs.iter().all(|pair| named(&pair))).then(|| {
        pairs
            .iter()
            .cloned()
            .map(<(String, String)>::from)
            .collect()
    })
}

fn mode(text: &str) -> Result<u32, &'static str> {
    let mode = u32::from_str_radix(text.trim_start_matches("0o"), 8);
    mode.ok()
        .filter(|mode| *mode <= 0o7777)
        .ok_or("must be an octal mode")
}

/// `GET /templates/{template}/builds/{build}/status`
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StatusBody {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    status: &'static str,
    logs: Vec<String>,
    log_entries: Vec<LogEntryBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<ReasonBody>,
    // What CubeSandbox's clients read.
    phase: &'static str,
    progress: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    error_message: Option<String>,
    created_at: String,
}

/// A line of a log.
#[derive(Debug, Serialize)]
pub(crate) struct LogEntryBody {
    timestamp: String,
    level: &'static str,
    message: String,
    step: String,
}

#[derive(Debug, Serialize)]
struct ReasonBody {
    message: String,
    step: String,
}

impl LogEntryBody {
    pub(crate) fn of(line: &BuildLogLine) -> Self {
        Self {
            timestamp: line.at.to_rfc3339(),
            level: match line.level {
                BuildLogLevel::Info => "info",
                BuildLogLevel::Warning => "warn",
                BuildLogLevel::Error => "error",
            },
            message: line.message.clone(),
            step: part_name(line.part),
        }
    }
}

/// How clients find the line of their program that a part came from.
fn part_name(part: BuildPart) -> String {
    match part {
        BuildPart::Base => String::from("base"),
        BuildPart::Step(number) => number.to_string(),
        BuildPart::Finish => String::from("finalize"),
    }
}

impl StatusBody {
    pub(crate) fn of(template: String, build: String, view: &BuildView) -> Self {
        let (status, progress) = match &view.state {
            BuildState::Waiting => ("waiting", 0),
            BuildState::Building => ("building", 50),
            BuildState::Ready => ("ready", 100),
            BuildState::Failed { .. } => ("error", 100),
        };
        let reason = match &view.state {
            BuildState::Failed { part, message } => Some(ReasonBody {
                message: message.clone(),
                step: part_name(*part),
            }),
            _ => None,
        };
        let lines = view.lines.iter();
        Self {
            template_id: template,
            build_id: build,
            status,
            phase: status,
            progress,
            logs: lines.clone().map(|line| line.message.clone()).collect(),
            log_entries: lines.map(LogEntryBody::of).collect(),
            error_message: reason.as_ref().map(|reason| reason.message.clone()),
            reason,
            created_at: view.announced_at.to_rfc3339(),
        }
    }
}

/// `POST /templates/tags`
#[derive(Debug, Deserialize)]
pub(crate) struct AssignTagsBody {
    pub(crate) target: String,
    pub(crate) tags: Vec<String>,
}

/// `DELETE /templates/tags`
#[derive(Debug, Deserialize)]
pub(crate) struct RemoveTagsBody {
    pub(crate) name: String,
    pub(crate) tags: Vec<String>,
}

/// The answer to `POST /templates/tags`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AssignedTagsBody {
    #[serde(rename = "buildID")]
    pub(crate) build_id: String,
    pub(crate) tags: Vec<String>,
}

/// An entry of `GET /templates/{template}/tags`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TagBody {
    tag: String,
    #[serde(rename = "buildID")]
    build_id: String,
    created_at: String,
}

impl TagBody {
    pub(crate) fn of(view: &TagView) -> Self {
        Self {
            tag: view.tag.clone(),
            build_id: view.build.to_string(),
            created_at: view.built_at.to_rfc3339(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<BuildPlan, ApiError> {
        let body: StartBuildBody = crate::request::parse_body(text.as_bytes())?;
        body.into_plan()
    }

    #[test]
    fn every_kind_of_step_is_read() {
        // Wire contract 1.6
        let hash = "0123456789abcdef".repeat(4);
        let text = format!(
            r#"{{"fromImage":"debian:12","force":false,"startCmd":"run","readyCmd":"",
            "fromImageRegistry":{{"type":"registry","username":"u","password":"p"}},
            "steps":[
              {{"type":"COPY","args":["a","/b","","0644"],"filesHash":"{hash}","force":false}},
              {{"type":"ENV","args":["A","1","B","2"],"force":true}},
              {{"type":"RUN","args":["make"]}},
              {{"type":"RUN","args":["make","root"]}},
              {{"type":"WORKDIR","args":["/w"]}},
              {{"type":"USER","args":["me"]}}]}}"#
        );
        let plan = plan(&text).unwrap();
        let BuildBase::Image { login, .. } = &plan.base else {
            panic!("{plan:?}");
        };
        assert_eq!(login.as_ref().unwrap().username, "u");
        let BuildStep::Copy { mode, user, .. } = &plan.steps[0].0 else {
            panic!("{plan:?}");
        };
        assert_eq!((*mode, user.as_ref()), (Some(0o644), None));
        assert!(plan.steps[1].1);
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(
            plan.steps[1].0,
            BuildStep::Env(vec![pair("A", "1"), pair("B", "2")])
        );
        let start = StartWith::Commands {
            start: Some(String::from("run")),
            ready: None,
        };
        assert_eq!(plan.start, start);
    }

    #[test]
    fn the_default_image_is_the_default_template() {
        let plan = plan(r#"{"fromImage":"e2bdev/base","steps":[]}"#).unwrap();
        assert_eq!(plan.base, BuildBase::Template(String::from("base")));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, field) in [
            ("{}", "fromImage"),
            (r#"{"fromImage":"a","fromTemplate":"b"}"#, "fromTemplate"),
            (
                r#"{"fromImage":"a","steps":[{"type":"ADD","args":[]}]}"#,
                "steps[0].type",
            ),
            (
                r#"{"fromImage":"a","steps":[{"type":"RUN","args":[]}]}"#,
                "steps[0].args",
            ),
            (
                r#"{"fromImage":"a","steps":[{"type":"ENV","args":["A"]}]}"#,
                "steps[0].args",
            ),
            (
                r#"{"fromImage":"a","steps":[{"type":"ENV","args":["A=","b"]}]}"#,
                "steps[0].args",
            ),
            (
                r#"{"fromImage":"a","steps":[{"type":"COPY","args":["a","b"],"filesHash":"../x"}]}"#,
                "filesHash",
            ),
            (
                r#"{"fromImage":"a","fromImageRegistry":{"type":"aws"}}"#,
                "AWS",
            ),
        ] {
            let refused = plan(text).unwrap_err().to_string();
            assert!(refused.contains(field), "{text}: {refused}");
        }
        assert!(mode("0o755").is_ok() && mode("99").is_err() && mode("77777").is_err());
    }

    #[test]
    fn limits_are_those_that_a_sandbox_can_have() {
        let read = |text: &str| {
            let body: NewBuildBody = crate::request::parse_body(text.as_bytes())?;
            body.into_build().map(|new| new.resources)
        };
        let read_all = read(r#"{"name":"x","cpuCount":3,"memoryMB":512,"minFreeDiskMb":10000}"#);
        let resources = read_all.unwrap();
        assert_eq!((resources.cpu_milli, resources.memory_mib), (3000, 512));
        assert_eq!(resources.disk_mib, 10_000);
        for text in [
            "{}",
            r#"{"name":"x","cpuCount":0}"#,
            r#"{"name":"x","cpuCount":4294967295}"#,
            r#"{"name":"x","memoryMB":1}"#,
            r#"{"name":"x","minFreeDiskMb":4294967295}"#,
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
