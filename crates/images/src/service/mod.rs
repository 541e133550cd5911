//! Builds that tenants ask for over the API, one after the other.
//!
//! ```text
//!   announce ─▶ (files) ─▶ begin ─▶ waiting ─▶ building ─▶ ready
//!                                      │           └─────▶ failed, with the part that did
//!                                 one at a time
//! ```
//!
//! Owns: the builds that were announced in this process and their logs, in memory, how those that
//! were begun stand, on disk, and the files that were sent for them. What comes of a build is the
//! catalogue's.
//!
//! Invariants:
//! - A tenant sees, begins and uses only its own: builds, files and cached steps.
//! - A build holds the catalogue's building lock while it works, so it never meets a builder of
//!   another process, and opens its kitchen only then.
//! - Whatever way a build ends, its state says so. One that was under way when the process ended is
//!   told to have been interrupted, unless it was published; its template is what it was before.

mod job;
mod journal;
mod kitchens;
mod uploads;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use sandhold_platform::{
    AnnouncedBuild, BuildBase, BuildPart, BuildPlan, BuildState, BuildStep, BuildView, Egress,
    FilesHash, LogPage, NewBuild, PlatformError, StartWith, TagView, TemplateBuilds,
    Upload as Body, is_full_disk,
};
use sandhold_types::{BuildId, Clock, Entropy, Namespace, TemplateId};
use tokio::sync::Semaphore;

pub use self::kitchens::{INSTANCES, Kitchen, Kitchens, clear_interrupted};
use self::{job::Job, journal::Journal, uploads::Uploads};
use crate::{
    Builds,
    builder::{self, BuildError, BuildRequest, Builder, Cache, Promised},
    catalogue::{Catalogue, is_tag},
    definition::{AgentSettings, Definition, Fallback, Source, Start, is_template_name},
    faults::Faults,
    image::{Credentials, ImageSource, Registries, with_causes},
    progress::{Progress, Silent},
    steps::{PlannedStep, Step, Upload},
};

/// How many builds of one tenant may be announced or under way.
const OPEN_PER_TENANT_MAX: usize = 32;
/// How much disk is free when a build begins, in MiB.
const FREE_MIB_MIN: u64 = 1024;
/// What a tenant is told whose build met a full disk.
const FULL_DISK: &str = "the machine's disk is full (capacity_exceeded); nothing of the build was \
                         kept but finished steps, build it again when there is room";
/// How many builds are remembered.
const JOBS_MAX: usize = 1_000;
/// How many steps a build may have.
const STEPS_MAX: usize = 500;
/// How many tags a build may have.
const TAGS_MAX: usize = 32;
/// How long the reason of a failure may be, in characters.
const MESSAGE_CHARACTERS_MAX: usize = 4_000;

/// What a build service is made of.
#[derive(Debug)]
pub struct BuildServiceParts {
    /// Where templates become known.
    pub catalogue: Arc<Catalogue>,
    /// The directory of the catalogue that is written to.
    pub directory: PathBuf,
    /// Where sandboxes of builds run.
    pub kitchens: Arc<dyn Kitchens>,
    /// The agent's binary.
    pub agent: PathBuf,
    /// What is known about registries.
    pub registries: Registries,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Randomness.
    pub entropy: Arc<dyn Entropy>,
    /// Where it dies on purpose.
    pub faults: Arc<Faults>,
}

/// Carries out builds.
#[derive(Debug)]
pub struct BuildService {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    parts: BuildServiceParts,
    uploads: Uploads,
    journal: Journal,
    jobs: Mutex<BTreeMap<BuildId, Arc<Job>>>,
    turn: Semaphore,
}

impl BuildService {
    /// A service that knows how the builds of an earlier process ended.
    ///
    /// # Errors
    /// What is written down of them cannot be listed.
    pub fn open(parts: BuildServiceParts) -> std::io::Result<Self> {
        let journal = Journal::new(&parts.directory);
        let is_there = |build: &BuildId| parts.catalogue.build(build).is_some();
        let recalled = journal.recall(is_there)?;
        let jobs = recalled.into_iter().map(|(written, state)| {
            let (clock, faults) = (Arc::clone(&parts.clock), Arc::clone(&parts.faults));
            let job = Job::recalled(written, state, clock, faults);
            (job.build.clone(), Arc::new(job))
        });
        let shared = Shared {
            uploads: Uploads::new(&parts.directory),
            jobs: Mutex::new(jobs.collect()),
            journal,
            turn: Semaphore::new(1),
            parts,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    fn job(&self, namespace: &Namespace, template: &str, build: &BuildId) -> Option<Arc<Job>> {
        let job = self.shared.jobs().get(build).cloned()?;
        let is_of = job.template.as_str() == template || job.new.name == template;
        (job.namespace == *namespace && is_of).then_some(job)
    }
}

#[async_trait]
impl TemplateBuilds for BuildService {
    fn announce(
        &self,
        namespace: &Namespace,
        new: NewBuild,
    ) -> Result<AnnouncedBuild, PlatformError> {
        let new = checked(namespace, new)?;
        let catalogue = &self.shared.parts.catalogue;
        let known = catalogue.own_template(namespace, &new.name);
        let template = match &known {
            Some(record) => record.id.clone(),
            None => builder::new_template_id(Some(namespace), &new.name)
                .unwrap_or_else(|| TemplateId::generate(&*self.shared.parts.entropy)),
        };
        let build = builder::new_build_id(&*self.shared.parts.entropy);
        let job = Job::new(
            namespace.clone(),
            template.clone(),
            build.clone(),
            new.clone(),
            Arc::clone(&self.shared.parts.clock),
            Arc::clone(&self.shared.parts.faults),
        );
        self.shared.admit(job)?;
        Ok(AnnouncedBuild {
            template,
            build,
            names: known.map_or_else(|| vec![new.name.clone()], |record| record.names.clone()),
            tags: new.tags,
        })
    }

    fn has_files(&self, namespace: &Namespace, files: &FilesHash) -> bool {
        self.shared.uploads.has(namespace, files)
    }

    async fn take_files(
        &self,
        namespace: &Namespace,
        files: &FilesHash,
        size: u64,
        body: Body,
    ) -> Result<(), PlatformError> {
        let entropy = &*self.shared.parts.entropy;
        let uploads = &self.shared.uploads;
        uploads.receive(namespace, files, size, body, entropy).await
    }

    fn begin(
        &self,
        namespace: &Namespace,
        template: &str,
        build: &BuildId,
        plan: BuildPlan,
    ) -> Result<(), PlatformError> {
        let job = self.job(namespace, template, build);
        let job = job.ok_or_else(|| PlatformError::BuildNotFound {
            template: template.to_owned(),
            build: build.clone(),
        })?;
        self.shared.check_disk()?;
        let (definition, steps) = self.shared.plan(&job, &plan)?;
        if !job.take_beginning() {
            let text = format!("build {build} was begun already");
            return Err(PlatformError::Invalid(text));
        }
        // From here on it is answered for, whatever becomes of this process.
        if let Err(error) = self.shared.journal.write(&job.written()) {
            job.fail(
                BuildPart::Base,
                String::from("it could not be written down"),
            );
            return Err(PlatformError::Node {
                step: "writing the build down",
                source: error.into(),
            });
        }
        let cache = if plan.force {
            Cache::Ignore
        } else {
            Cache::Use
        };
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            let ending = Ending(Arc::clone(&job));
            shared.carry_out(&job, &definition, &steps, cache).await;
            drop(ending);
            shared.note(&job);
        });
        Ok(())
    }

    fn view(
        &self,
        namespace: &Namespace,
        template: &str,
        build: &BuildId,
        page: LogPage,
    ) -> Option<BuildView> {
        let job = self.job(namespace, template, build)?;
        Some(job.view(page))
    }

    fn assign_tags(
        &self,
        namespace: &Namespace,
        target: &str,
        tags: &[String],
    ) -> Result<BuildId, PlatformError> {
        let catalogue = &self.shared.parts.catalogue;
        catalogue.assign_tags(namespace, target, tags)
    }

    fn tags(&self, namespace: &Namespace, template: &str) -> Result<Vec<TagView>, PlatformError> {
        self.shared.parts.catalogue.tags_of(namespace, template)
    }

    fn remove_tags(
        &self,
        namespace: &Namespace,
        template: &str,
        tags: &[String],
    ) -> Result<(), PlatformError> {
        let catalogue = &self.shared.parts.catalogue;
        catalogue.remove_tags(namespace, template, tags)
    }

    fn set_alias(
        &self,
        namespace: &Namespace,
        template: &str,
        alias: &str,
    ) -> Result<(), PlatformError> {
        let catalogue = &self.shared.parts.catalogue;
        catalogue.set_alias(namespace, template, alias)
    }
}

/// However a build's task ends, the build is over.
struct Ending(Arc<Job>);

impl Drop for Ending {
    fn drop(&mut self) {
        if !self.0.is_over() {
            let text = String::from("the build was cut short");
            self.0.fail(BuildPart::Finish, text);
        }
    }
}

/// The name and the tags of a build, as they were given together or apart.
fn checked(namespace: &Namespace, new: NewBuild) -> Result<NewBuild, PlatformError> {
    let invalid = |text: String| Err(PlatformError::Invalid(text));
    let (name, tag) = match new.name.split_once(':') {
        Some((name, tag)) => (name, Some(tag.to_owned())),
        None => (new.name.as_str(), None),
    };
    let own = name
        .strip_prefix(namespace.as_str())
        .and_then(|rest| rest.strip_prefix('/'));
    let name = own.unwrap_or(name).to_owned();
    if !is_template_name(&name) {
        return invalid(format!(
            "name: '{name}' must be 1 to 64 lower-case letters, digits, '-' or '_', beginning \
             with a letter or digit"
        ));
    }
    let tags: Vec<String> = tag.into_iter().chain(new.tags).collect();
    if tags.len() > TAGS_MAX {
        return invalid(format!("tags: there are more than {TAGS_MAX}"));
    }
    match tags.iter().find(|tag| !is_tag(tag)) {
        Some(tag) => invalid(format!("tags: '{tag}' cannot be a tag")),
        None => Ok(NewBuild { name, tags, ..new }),
    }
}

impl Shared {
    fn jobs(&self) -> MutexGuard<'_, BTreeMap<BuildId, Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a new build in, if its tenant has not too many; forgets the oldest that are not under
    /// way.
    fn admit(&self, job: Job) -> Result<(), PlatformError> {
        let mut jobs = self.jobs();
        let open = jobs
            .values()
            .filter(|other| other.namespace == job.namespace && other.is_under_way());
        if open.count() >= OPEN_PER_TENANT_MAX {
            let text = format!("{OPEN_PER_TENANT_MAX} builds are under way; wait for one of them");
            return Err(PlatformError::TooMany(text));
        }
        while jobs.len() >= JOBS_MAX {
            let idle = jobs.values().filter(|job| !job.is_under_way());
            let oldest = idle.min_by_key(|job| job.announced_at);
            let Some(oldest) = oldest.map(|job| job.build.clone()) else {
                break;
            };
            jobs.remove(&oldest);
            self.journal.forget(&oldest);
        }
        jobs.insert(job.build.clone(), Arc::new(job));
        Ok(())
    }

    /// Whether there is room to begin a build in; how much one takes nobody knows before.
    fn check_disk(&self) -> Result<(), PlatformError> {
        // Without a figure it is tried.
        let disk = rustix::fs::statvfs(&self.parts.directory);
        let free_mib = disk.map_or(u64::MAX, |s| s.f_bavail.saturating_mul(s.f_frsize) >> 20);
        if free_mib < FREE_MIB_MIN {
            return Err(PlatformError::Capacity {
                what: format!(
                    "{free_mib} MiB of disk are free, a build begins with {FREE_MIB_MIN} MiB"
                ),
            });
        }
        Ok(())
    }

    /// Writes down how a build ended. If that fails, the next start finds it out by the catalogue.
    fn note(&self, job: &Job) {
        if let Err(error) = self.journal.write(&job.written()) {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(build = %job.build, error, "the end of a build is not written down");
        }
    }

    /// What a plan means here.
    fn plan(
        &self,
        job: &Job,
        plan: &BuildPlan,
    ) -> Result<(Definition, Vec<PlannedStep>), PlatformError> {
        if plan.steps.len() > STEPS_MAX {
            let text = format!("steps: there are more than {STEPS_MAX}");
            return Err(PlatformError::Invalid(text));
        }
        let source = match &plan.base {
            BuildBase::Image { reference, login } => Source::Image(ImageSource::Registry {
                reference: reference.clone(),
                credentials: login.as_ref().map(|login| Credentials {
                    username: login.username.clone(),
                    password: login.password.clone(),
                }),
            }),
            BuildBase::Template(reference) => {
                let catalogue = &self.parts.catalogue;
                Source::Template(catalogue.files_of(&job.namespace, reference)?)
            }
        };
        let (start, ready, of_image) = match plan.start.clone() {
            StartWith::Commands { start, ready } => (start, ready, Start::AsDefined),
            StartWith::Image {
                entrypoint,
                arguments,
                ready,
            } => {
                let of_image = Start::OfImage {
                    entrypoint,
                    arguments,
                };
                (None, ready, of_image)
            }
        };
        let definition = Definition {
            name: job.new.name.clone(),
            aliases: Vec::new(),
            description: String::new(),
            source,
            wheels: Vec::new(),
            overlay: None,
            setup: None,
            agent: AgentSettings {
                start_command: start,
                ready_command: ready,
                environment: plan.environment.clone(),
                ..AgentSettings::default()
            },
            start: of_image,
            fallback: Fallback::default(),
            resources: job.new.resources,
        };
        let steps = plan.steps.iter().map(|(step, force)| {
            Ok(PlannedStep {
                step: self.step(&job.namespace, step)?,
                force: *force,
            })
        });
        Ok((definition, steps.collect::<Result<_, PlatformError>>()?))
    }

    fn step(&self, namespace: &Namespace, step: &BuildStep) -> Result<Step, PlatformError> {
        Ok(match step.clone() {
            BuildStep::Copy {
                source,
                destination,
                user,
                mode,
                files,
            } => {
                if !self.uploads.has(namespace, &files) {
                    let text = format!("the files of COPY {source} were not sent");
                    return Err(PlatformError::Invalid(text));
                }
                Step::Copy {
                    source,
                    destination,
                    user,
                    mode,
                    archive: Upload {
                        hash: files.as_str().to_owned(),
                        path: self.uploads.path(namespace, &files),
                    },
                }
            }
            BuildStep::Run { command, user } => Step::Run {
                command,
                user,
                arguments: BTreeMap::new(),
            },
            BuildStep::Env(variables) => Step::Env(variables),
            BuildStep::Workdir(path) => Step::Workdir(path),
            BuildStep::User(user) => Step::User(user),
        })
    }

    async fn carry_out(
        &self,
        job: &Job,
        definition: &Definition,
        steps: &[PlannedStep],
        cache: Cache,
    ) {
        // Never closed.
        let _turn = self.turn.acquire().await;
        job.set_state(BuildState::Building);
        match self.build(job, definition, steps, cache).await {
            Ok(()) => {
                self.parts.faults.reach("build.published");
                job.set_state(BuildState::Ready);
            }
            Err(failure) => {
                tracing::info!(
                    build = %job.build,
                    template = %job.template,
                    tenant = %job.namespace,
                    reason = failure.in_full,
                    "a build failed"
                );
                job.fail(failure.part, failure.message);
            }
        }
    }

    async fn build(
        &self,
        job: &Job,
        definition: &Definition,
        steps: &[PlannedStep],
        cache: Cache,
    ) -> Result<(), Failure> {
        let parts = &self.parts;
        let (clock, entropy) = (Arc::clone(&parts.clock), Arc::clone(&parts.entropy));
        let waiting: &dyn Progress = &Silent;
        let builder = Builder::open(&parts.directory, clock, entropy, waiting);
        let builder = builder.await.map_err(|error| Failure::of(&error))?;
        let kitchen = parts.kitchens.open(&parts.directory).await;
        let kitchen = kitchen.map_err(|error| Failure::of_machine(&*error))?;
        let request = BuildRequest {
            definition,
            owner: Some(job.namespace.clone()),
            agent: &parts.agent,
            cache,
            registries: &parts.registries,
            steps,
            egress: Egress::Internet,
            promised: Some(Promised {
                build: &job.build,
                tags: &job.new.tags,
            }),
        };
        let built = builder.build(&request, &kitchen.oven(), job).await;
        built.map(|_| ()).map_err(|error| Failure::of(&error))
    }
}

/// Why a build failed.
#[derive(Debug)]
struct Failure {
    part: BuildPart,
    /// What the tenant is told.
    message: String,
    /// What the operator is told.
    in_full: String,
}

impl Failure {
    fn of(error: &BuildError) -> Self {
        let in_full = with_causes(error);
        let is_full_disk = is_full_disk(error);
        let (part, cause) = match error {
            BuildError::Step { number, .. } if is_full_disk => {
                (BuildPart::Step(*number), FULL_DISK.to_owned())
            }
            BuildError::RootFs { .. } if is_full_disk => (BuildPart::Base, FULL_DISK.to_owned()),
            _ if is_full_disk => (BuildPart::Finish, FULL_DISK.to_owned()),
            BuildError::Step { number, source } => (BuildPart::Step(*number), with_causes(source)),
            BuildError::RootFs { source, .. } => (BuildPart::Base, with_causes(source)),
            BuildError::Bake { source, .. } => (BuildPart::Finish, with_causes(source)),
            _ => return Self::of_machine(error),
        };
        Self {
            part,
            message: cause.chars().take(MESSAGE_CHARACTERS_MAX).collect(),
            in_full,
        }
    }

    /// What is wrong with the machine is the operator's business.
    fn of_machine(error: &(dyn std::error::Error + 'static)) -> Self {
        Self {
            part: BuildPart::Finish,
            message: String::from("the machine failed; its operator finds the reason in the log"),
            in_full: with_causes(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use sandhold_types::Resources;

    use super::*;

    #[test]
    fn a_name_may_carry_a_tag_and_the_tenant() {
        // Wire contract 1.6
        let tenant = "team".parse().unwrap();
        let check = |name: &str, tags: &[&str]| {
            let new = NewBuild {
                name: name.to_owned(),
                tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
                resources: Resources::default(),
            };
            checked(&tenant, new).map(|new| (new.name, new.tags.join(" ")))
        };
        assert_eq!(check("x", &[]).unwrap(), ("x".into(), "".into()));
        assert_eq!(
            check("team/x:v1", &["v2"]).unwrap(),
            ("x".into(), "v1 v2".into())
        );
        for name in ["", ":v1", "x:", "X", "other/x", "../x", "x:a:b", "x:../y"] {
            assert!(check(name, &[]).is_err(), "{name}");
        }
        assert!(check("x", &["a b"]).is_err());
    }
}
