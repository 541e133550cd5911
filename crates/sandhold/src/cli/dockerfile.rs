//! A Dockerfile as a template's definition and steps.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use sandhold_images::{
    AgentSettings, Context, Definition, DockerStep, Fallback, ImageSource, PlannedStep, Source,
    Step, is_template_name, parse_dockerfile,
};
use sandhold_types::Resources;

/// How long a Dockerfile may be, in bytes.
const DOCKERFILE_BYTES_MAX: u64 = 1 << 20;
/// Who runs commands and owns files until the file says otherwise, and where, as every builder of
/// images has it.
const USER: &str = "root";
const WORKDIR: &str = "/";

/// Options that go with a Dockerfile.
#[derive(Debug, clap::Args)]
pub(super) struct DockerfileArgs {
    /// Build from this Dockerfile; the argument is then the folder that COPY takes files from.
    #[arg(short, long, value_name = "FILE", requires = "name")]
    file: Option<PathBuf>,
    /// The template's name, with --file.
    #[arg(long, requires = "file")]
    name: Option<String>,
    /// The value of an ARG of the Dockerfile; can be repeated.
    #[arg(long = "build-arg", value_name = "NAME=VALUE", value_parser = super::sandbox::pair, requires = "file")]
    arguments: Vec<(String, String)>,
    /// Tried until it succeeds; only then is a sandbox ready, with --file.
    #[arg(long, value_name = "COMMAND", requires = "file")]
    ready_command: Option<String>,
}

/// A Dockerfile read.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) definition: Definition,
    pub(super) steps: Vec<PlannedStep>,
    /// The line that each step came from.
    pub(super) lines: Vec<usize>,
    /// What the author should know.
    pub(super) remarks: Vec<String>,
    file: PathBuf,
    /// Holds the archives until the steps are done.
    _archives: tempfile::TempDir,
}

impl Recipe {
    /// Where step `number`, counted from one, stands.
    pub(super) fn place_of(&self, number: usize) -> String {
        let line = self.lines.get(number.saturating_sub(1)).copied();
        format!("{}:{}", self.file.display(), line.unwrap_or(1))
    }
}

impl DockerfileArgs {
    /// Reads the Dockerfile, if one is given; `folder` is the folder of its files.
    ///
    /// # Errors
    /// The line that is wrong, or files that are not there.
    pub(super) fn read(&self, folder: Option<&Path>) -> anyhow::Result<Option<Recipe>> {
        let (Some(file), Some(name)) = (&self.file, &self.name) else {
            return Ok(None);
        };
        if !is_template_name(name) {
            bail!(
                "'{name}' cannot be the name of a template: lower-case letters, digits, '-', '_'"
            );
        }
        let size = fs::metadata(file).with_context(|| format!("could not read {}", file.display()));
        if size?.len() > DOCKERFILE_BYTES_MAX {
            bail!(
                "{} is longer than {DOCKERFILE_BYTES_MAX} bytes",
                file.display()
            );
        }
        let text = fs::read_to_string(file)
            .with_context(|| format!("could not read {}", file.display()))?;
        let arguments: BTreeMap<String, String> = self.arguments.iter().cloned().collect();
        let read = parse_dockerfile(&text, &arguments)
            .with_context(|| format!("{} cannot be built", file.display()))?;
        let context = Context::open(folder.unwrap_or_else(|| Path::new(".")))?;
        let archives = tempfile::tempdir()?;
        let mut steps = Vec::with_capacity(read.instructions.len());
        let mut lines = Vec::with_capacity(read.instructions.len());
        for (line, instruction) in read.instructions {
            let step = step(instruction, &context, archives.path());
            let step = step.with_context(|| format!("{}:{line}", file.display()))?;
            steps.push(PlannedStep { step, force: false });
            lines.push(line);
        }
        let remarks = read.remarks.iter();
        let remarks = remarks.map(|(line, text)| format!("{}:{line}: {text}", file.display()));
        Ok(Some(Recipe {
            definition: Definition {
                name: name.clone(),
                aliases: Vec::new(),
                description: String::new(),
                source: Source::Image(ImageSource::Registry {
                    reference: read.image,
                    credentials: None,
                }),
                wheels: Vec::new(),
                overlay: None,
                setup: None,
                agent: AgentSettings {
                    ready_command: self.ready_command.clone(),
                    ..AgentSettings::default()
                },
                start: read.start,
                fallback: Fallback {
                    user: String::from(USER),
                    workdir: Some(String::from(WORKDIR)),
                },
                resources: Resources::default(),
            },
            steps,
            lines,
            remarks: remarks.collect(),
            file: file.clone(),
            _archives: archives,
        }))
    }
}

fn step(instruction: DockerStep, context: &Context, archives: &Path) -> anyhow::Result<Step> {
    Ok(match instruction {
        DockerStep::Copy {
            sources,
            destination,
            owner,
            mode,
        } => Step::Copy {
            archive: context.archive(&sources, archives)?,
            // The archive holds nothing else.
            source: String::from("."),
            destination,
            user: Some(owner.unwrap_or_else(|| String::from(USER))),
            mode,
        },
        DockerStep::Run { command, arguments } => Step::Run {
            command,
            user: None,
            arguments,
        },
        DockerStep::Env(variables) => Step::Env(variables),
        DockerStep::Workdir(path) => Step::Workdir(path),
        DockerStep::User(user) => Step::User(user),
    })
}
