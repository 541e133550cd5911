//! The layers of a template's steps.

use std::path::PathBuf;

use super::{BuildError, BuildRequest, Builder, COMMAND, ENVIRONMENT, agent_layer, file_error};
use crate::{
    definition::AgentSettings,
    oven::{self, Oven},
    progress::{Event, Progress},
    record::ContentKey,
    steps::{self, Context, Output, PlannedStep, Step, StepError, Workshop},
};

/// What steps made of a base.
#[derive(Debug)]
pub(super) struct Stepped {
    /// The layer with the files.
    pub(super) files: ContentKey,
    /// What the agent is told after them.
    pub(super) settings: AgentSettings,
    /// Every layer on the way, which the build keeps for the next one.
    pub(super) layers: Vec<ContentKey>,
}

/// A step with all that it depends on.
struct Prepared<'a> {
    number: usize,
    step: &'a Step,
    /// What it begins with.
    context: Context,
    key: ContentKey,
}

impl Builder {
    /// Does the steps whose layers are not there.
    pub(super) async fn make_step_layers(
        &self,
        request: &BuildRequest<'_>,
        oven: &Oven<'_>,
        base: ContentKey,
        settings: AgentSettings,
        progress: &dyn Progress,
    ) -> Result<Stepped, BuildError> {
        let (steps, context) = self.prepare_steps(request, &base, &settings);
        let changing = |prepared: &&Prepared<'_>| prepared.step.changes_files();
        let made = |prepared: &Prepared<'_>| self.shelf.layer(&prepared.key).is_dir();
        let last_made = steps.iter().filter(changing).rev().find(|p| made(p));
        let done = last_made.map_or(0, |prepared| prepared.number);
        let mut files = last_made.map_or_else(|| base.clone(), |prepared| prepared.key.clone());
        let mut workshop = None;
        for prepared in &steps {
            progress.report(Event::Instruction {
                number: prepared.number,
                total: steps.len(),
                label: prepared.step.label(),
                cached: prepared.number <= done,
            });
            if prepared.number <= done || !prepared.step.changes_files() {
                continue;
            }
            let failed = |source| BuildError::Step {
                number: prepared.number,
                source,
            };
            let open = match workshop.take() {
                Some(open) => open,
                None => {
                    // Nothing that an interrupted build left may be at work in it.
                    let cleared = oven::clear_left_overs(oven).await;
                    cleared.map_err(BuildError::LeftOvers)?;
                    self.open_workshop(&files).await.map_err(failed)?
                }
            };
            self.carry_out(request, oven, prepared, &open, progress)
                .await
                .map_err(failed)?;
            let staged = self.folder(&self.stage("step")?.join("root"))?;
            let place = self.shelf.layer(&prepared.key);
            let committed = open.commit(&staged, &place.join("root")).await;
            workshop = Some(committed.map_err(failed)?);
            let staged = self.shelf.tmp().join("step");
            self.shelf
                .mark_cached(&staged)
                .map_err(file_error("mark", &staged))?;
            self.place_layer(&staged, &prepared.key).await?;
            files = prepared.key.clone();
        }
        let made = steps.iter().filter(changing).map(|p| p.key.clone());
        let mut layers = vec![base];
        layers.extend(made);
        Ok(Stepped {
            files,
            layers,
            settings: AgentSettings {
                environment: context.environment,
                default_user: context.user,
                default_workdir: context.workdir,
                ..settings
            },
        })
    }

    fn prepare_steps<'a>(
        &self,
        request: &BuildRequest<'a>,
        base: &ContentKey,
        settings: &AgentSettings,
    ) -> (Vec<Prepared<'a>>, Context) {
        let steps: &'a [PlannedStep] = request.steps;
        let mut key = steps::first_key(base, request.owner.as_ref());
        let mut context = Context::of(settings);
        let mut salt = String::new();
        let mut prepared = Vec::with_capacity(steps.len());
        for (index, planned) in steps.iter().enumerate() {
            if planned.force && salt.is_empty() {
                salt = sandhold_types::BuildId::generate(&*self.entropy).to_string();
            }
            key = steps::next_key(&key, &context, &planned.step, &salt);
            let next = context.after(&planned.step);
            prepared.push(Prepared {
                number: index + 1,
                step: &planned.step,
                context: std::mem::replace(&mut context, next),
                key: key.clone(),
            });
        }
        (prepared, context)
    }

    async fn open_workshop(&self, layer: &ContentKey) -> Result<Workshop, StepError> {
        let failed = |error: BuildError| StepError::Copy(crate::image::with_causes(&error));
        let root: PathBuf = self
            .folder(&self.shelf.tmp().join("work"))
            .map_err(failed)?;
        Workshop::open(&self.shelf.layer(layer).join("root"), &root).await
    }

    async fn carry_out(
        &self,
        request: &BuildRequest<'_>,
        oven: &Oven<'_>,
        prepared: &Prepared<'_>,
        workshop: &Workshop,
        progress: &dyn Progress,
    ) -> Result<(), StepError> {
        let context = &prepared.context;
        let next = context.after(prepared.step);
        match prepared.step {
            Step::Env(_) => Ok(()),
            Step::Workdir(_) => {
                let (root, workdir) = (workshop.root().to_owned(), next.workdir().to_owned());
                let owner = context.user.clone();
                steps::blocking(move || steps::make_workdir(&root, &workdir, &owner)).await
            }
            Step::User(name) => {
                let (root, name) = (workshop.root().to_owned(), name.clone());
                steps::blocking(move || steps::require_account_in(&root, &name)).await
            }
            Step::Copy {
                source,
                destination,
                user,
                mode,
                archive,
            } => {
                let scratch = self.folder(&self.shelf.tmp().join("copy"));
                let scratch =
                    scratch.map_err(|error| StepError::Copy(crate::image::with_causes(&error)))?;
                let (root, archive, source) = (
                    workshop.root().to_owned(),
                    archive.path.clone(),
                    source.clone(),
                );
                let destination = context.absolute(&context.expand(destination));
                let owner = user.clone().unwrap_or_else(|| context.user.clone());
                let mode = *mode;
                steps::blocking(move || {
                    let order = steps::Order {
                        archive: &archive,
                        source: &source,
                        destination: &destination,
                        owner: &owner,
                        mode,
                    };
                    steps::copy(&root, &scratch, &order)
                })
                .await
            }
            Step::Run {
                command,
                user,
                arguments,
            } => {
                let number = prepared.number;
                self.enter(request, context, workshop)?;
                let place = steps::Place {
                    root: workshop.root(),
                    boot_command: &COMMAND.map(String::from),
                    boot_environment: &ENVIRONMENT.map(String::from),
                    resources: request.definition.resources,
                };
                let mut on_line = |output: Output, text: &str| {
                    progress.report(Event::Output {
                        number,
                        output,
                        text: text.to_owned(),
                    });
                };
                let order = steps::RunOrder {
                    command,
                    user: user.as_deref().unwrap_or(&context.user),
                    workdir: context.workdir(),
                    environment: context.environment_with(arguments),
                };
                steps::run(oven, &place, &order, &mut on_line).await
            }
        }
    }

    /// Makes the workshop a root that a sandbox can be booted in.
    fn enter(
        &self,
        request: &BuildRequest<'_>,
        context: &Context,
        workshop: &Workshop,
    ) -> Result<(), StepError> {
        let settings = AgentSettings {
            environment: context.environment.clone(),
            default_user: String::from("root"),
            ..AgentSettings::default()
        };
        agent_layer::install_agent(workshop.root(), request.agent, &settings)
            .map_err(|error| StepError::Copy(crate::image::with_causes(&error)))?;
        workshop.prepare_sandbox()
    }
}
