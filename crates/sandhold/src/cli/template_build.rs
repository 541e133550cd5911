//! `sandhold template build`: makes a template from its definition and bakes it.

use std::{
    io::{IsTerminal, Write},
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sandhold_images::{
    BuildError, BuildRequest, Builder, Built, Cache, Definition, Event, Kitchen as _, Progress,
    Stage, clear_left_overs,
};
use sandhold_platform::Egress;
use sandhold_types::{Namespace, SystemClock, SystemEntropy};

use super::dockerfile::DockerfileArgs;
use crate::{
    kitchen::{LinuxKitchen, find_agent},
    settings,
};

/// Options of `sandhold template build`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The definition: a folder that holds a `template.toml`, or such a file.
    #[arg(required_unless_present = "file")]
    definition: Option<PathBuf>,
    #[command(flatten)]
    dockerfile: DockerfileArgs,
    /// The catalogue to build into.
    #[arg(long, value_name = "DIR", conflicts_with = "data_dir")]
    into: Option<PathBuf>,
    /// The data directory of the server whose catalogue to build into.
    #[arg(long, env = "SANDHOLD_DATA_DIR", default_value = settings::DATA_DIR)]
    data_dir: PathBuf,
    /// The tenant that the template belongs to. Without it, it serves everybody.
    #[arg(long, value_name = "NAMESPACE")]
    owner: Option<Namespace>,
    /// The guest agent's binary. Without it, `sandhold-agent` beside this program.
    #[arg(long, env = "SANDHOLD_AGENT", value_name = "PATH")]
    agent: Option<PathBuf>,
    #[command(flatten)]
    registries: settings::RegistryArgs,
    /// Make everything again, such as for newer packages, instead of what is unchanged.
    #[arg(long)]
    no_cache: bool,
    /// Remove builds of this catalogue that have no name any more and that nobody uses.
    #[arg(long)]
    prune: bool,
    /// How long the sandbox may take to become ready, in seconds.
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    ready_seconds: u64,
    /// Print events and the result as lines of JSON.
    #[arg(long)]
    json: bool,
}

/// Builds.
///
/// # Errors
/// What is wrong with the definition or the machine, or the stage that failed.
pub(crate) async fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let recipe = args.dockerfile.read(args.definition.as_deref())?;
    let definition = match (&recipe, &args.definition) {
        (Some(recipe), _) => recipe.definition.clone(),
        (None, Some(path)) => Definition::load(path)?,
        (None, None) => bail!("name a definition, or a Dockerfile with --file"),
    };
    let registries = args.registries.load()?;
    let agent = find_agent(args.agent.as_deref())?;
    let directory = match &args.into {
        Some(directory) => directory.clone(),
        None => args.data_dir.join("templates"),
    };
    let display = display(args, &definition.name);
    for remark in recipe.iter().flat_map(|recipe| &recipe.remarks) {
        writeln!(std::io::stderr(), "{remark}")?;
    }
    let entropy = Arc::new(SystemEntropy);
    let builder = Builder::open(
        &directory,
        Arc::new(SystemClock),
        entropy.clone(),
        &*display,
    )
    .await
    .with_context(|| format!("could not open the catalogue {}", directory.display()))?;
    let ready_budget = Duration::from_secs(args.ready_seconds);
    let kitchen = LinuxKitchen::open(&directory, entropy, ready_budget).await?;
    let oven = kitchen.oven();
    let request = BuildRequest {
        definition: &definition,
        owner: args.owner.clone(),
        agent: &agent,
        cache: if args.no_cache {
            Cache::Ignore
        } else {
            Cache::Use
        },
        registries: &registries,
        steps: recipe.as_ref().map_or(&[][..], |recipe| &recipe.steps),
        egress: match &recipe {
            // What is started may fetch what it needs, as with templates built over the API.
            Some(_) => Egress::Internet,
            None => Egress::Nothing,
        },
        promised: None,
    };
    let started = Instant::now();
    let built = tokio::select! {
        built = builder.build(&request, &oven, &*display) => built,
        _ = tokio::signal::ctrl_c() => {
            // What was begun was dropped half-way; what it left on the machine goes now.
            clear_left_overs(&oven).await?;
            bail!("interrupted; the template is what it was before");
        }
    };
    display.end();
    let built = match (built, &recipe) {
        (Err(error @ BuildError::Step { number, .. }), Some(recipe)) => {
            return Err(anyhow::Error::new(error).context(recipe.place_of(number)));
        }
        (built, _) => built?,
    };
    let took = started.elapsed();
    let pruned = if args.prune {
        builder.prune()?.builds.len()
    } else {
        0
    };
    tell(args, &definition.name, &built, took, pruned)?;
    Ok(ExitCode::SUCCESS)
}

fn tell(
    args: &Args,
    name: &str,
    built: &Built,
    took: Duration,
    pruned: usize,
) -> anyhow::Result<()> {
    let build = &built.build;
    let mut out = std::io::stdout().lock();
    if args.json {
        let result = serde_json::json!({
            "event": "built",
            "template": build.template,
            "build": build.id,
            "names": build.names,
            "reused": built.reused,
            "sizeBytes": build.size_bytes,
            "pruned": pruned,
            "tookMs": took.as_millis(),
        });
        return Ok(writeln!(out, "{result}")?);
    }
    let mebibytes = build.size_bytes / (1024 * 1024);
    let what = if built.reused { "unchanged" } else { "built" };
    writeln!(
        out,
        "{name}: {what}, {mebibytes} MiB, {:.1} s (template {}, build {})",
        took.as_secs_f64(),
        build.template,
        build.id
    )?;
    if pruned > 0 {
        writeln!(out, "{name}: removed {pruned} superseded builds")?;
    }
    Ok(())
}

/// Shows progress.
trait Display: Progress {
    /// Takes the display away, so that what is printed next stands alone.
    fn end(&self) {}
}

fn display(args: &Args, name: &str) -> Box<dyn Display> {
    if args.json {
        Box::new(JsonLines)
    } else if std::io::stderr().is_terminal() {
        Box::new(Bar::new(name))
    } else {
        Box::new(PlainLines::new(name))
    }
}

/// A line of JSON for each event.
struct JsonLines;

impl Progress for JsonLines {
    fn report(&self, event: Event) {
        if let Ok(line) = serde_json::to_string(&event) {
            let _ = writeln!(std::io::stdout(), "{line}");
        }
    }
}

impl Display for JsonLines {}

/// A line for each stage, and one now and then within it.
struct PlainLines {
    name: String,
    tenth: Mutex<u64>,
}

impl PlainLines {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            tenth: Mutex::new(0),
        }
    }

    fn say(&self, text: &str) {
        let _ = writeln!(std::io::stderr(), "{}: {text}", self.name);
    }
}

impl Progress for PlainLines {
    fn report(&self, event: Event) {
        let mut tenth = self.tenth.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Begin { stage } => {
                *tenth = 0;
                self.say(stage.label());
            }
            Event::Cached { stage } => self.say(&format!("{} unchanged", stage.label())),
            Event::Step { done, total } => {
                let now = (done * 10).checked_div(total).unwrap_or(0);
                if now > *tenth {
                    *tenth = now;
                    self.say(&format!("{} %", now * 10));
                }
            }
            Event::Instruction {
                number,
                total,
                label,
                cached,
            } => {
                let unchanged = if cached { ", unchanged" } else { "" };
                self.say(&format!("step {number} of {total}: {label}{unchanged}"));
            }
            Event::Output { text, .. } => self.say(&format!("  {text}")),
            Event::Note { .. } => {}
        }
    }
}

impl Display for PlainLines {}

/// A bar that shows the stage, how far it is, and the newest remark.
struct Bar {
    name: String,
    bar: ProgressBar,
    stage: Mutex<Option<Stage>>,
}

impl Bar {
    /// How much of a remark is shown.
    const NOTE_CHARACTERS_MAX: usize = 60;

    fn new(name: &str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        bar.enable_steady_tick(Duration::from_millis(120));
        let bar = Self {
            name: name.to_owned(),
            bar,
            stage: Mutex::new(None),
        };
        bar.show_spinner();
        bar
    }

    fn show_spinner(&self) {
        if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix} {elapsed} {msg}") {
            self.bar.set_style(style);
        }
    }

    fn show_bar(&self) {
        let template = "{spinner} {prefix} [{wide_bar}] {percent}% {elapsed}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style.progress_chars("=> "));
        }
    }
}

impl Progress for Bar {
    fn report(&self, event: Event) {
        match event {
            Event::Begin { stage } => {
                let mut current = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(done) = current.replace(stage) {
                    self.bar
                        .println(format!("  {}: {} done", self.name, done.label()));
                }
                self.bar
                    .set_prefix(format!("{}: {}", self.name, stage.label()));
                self.bar.set_message("");
                self.show_spinner();
            }
            Event::Cached { stage } => {
                self.bar
                    .println(format!("  {}: {} unchanged", self.name, stage.label()));
            }
            Event::Step { done, total } => {
                self.show_bar();
                self.bar.set_length(total);
                self.bar.set_position(done);
            }
            Event::Instruction {
                number,
                total,
                label,
                cached,
            } => {
                let step = format!("{}: step {number} of {total}", self.name);
                let label: String = label.chars().take(Self::NOTE_CHARACTERS_MAX).collect();
                if cached {
                    self.bar.println(format!("  {step}: {label} (unchanged)"));
                    return;
                }
                self.bar.println(format!("  {step}: {label}"));
                self.bar.set_prefix(step);
                self.bar.set_message("");
                self.show_spinner();
            }
            Event::Output { text, .. } => self.bar.println(format!("    {text}")),
            Event::Note { text } => {
                let text: String = text.chars().take(Self::NOTE_CHARACTERS_MAX).collect();
                self.bar.set_message(text);
            }
        }
    }
}

impl Display for Bar {
    fn end(&self) {
        self.bar.finish_and_clear();
    }
}
