//! How a sandbox is put to disk and brought back (R-L4, R-L10): the steps; who decides is the actor.
//!
//! ```text
//!  pause   record (pausing) ─▶ quiesce ─▶ capture ─▶ record (paused) ─▶ processes ─▶ network
//!  resume  record (resuming) ─▶ network ─▶ restore ─▶ identity ─▶ record (running) ┄▶ image gone
//! ```
//!
//! Each arrow is a fault point. Invariants:
//! - The image is there, whole, before a record says `paused`; processes go only after that.
//! - The image goes only after a record that says `running` again has reached the disk; a wake-up that
//!   fails leaves it. Nobody waits for either: right after a capture the disk is busy with its bytes,
//!   and to remove them takes as long as they are many. A power cut before that ends the woken life as
//!   it ends every other, and the image is what is left.
//! - The record and the image of a pause are flushed too, if it lasts ([`sync_image`]).
//! - What the engine says of a capture is checked against what became of the processes.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandhold_engine::{AfterCapture, EngineError, ExitCause, InstanceStatus, LaunchSpec, Origin};
use sandhold_images::Build;
use sandhold_platform::{PauseKeeps, PlatformError, Waking};
use sandhold_types::{Deadline, Incarnation, SandboxId, Token};

use crate::{
    capacity,
    create::{self, boot_environment},
    layout::{self, IMAGE_PREFIX},
    node::{Dependencies, off_thread},
    record::{Proof, Record},
};

/// How long a capture may take. Nobody's deadline: one that is given up half-way costs the sandbox.
pub(crate) const CAPTURE_BUDGET: Duration = Duration::from_secs(300);
/// How long the processes may take to go after a capture that took them along.
pub(crate) const END_GRACE: Duration = Duration::from_secs(5);
/// How long a capture that was given up may go on.
const SETTLE_BUDGET: Duration = Duration::from_secs(60);
/// How long a sandbox sleeps until its image is brought to the disk; well before the kernel would.
const FLUSH_AFTER: Duration = Duration::from_secs(5);
/// How long the agent may take to close its connections before a capture.
const QUIESCE_BUDGET: Duration = Duration::from_secs(2);

/// With less than this, in MiB, a capture that failed has met a full disk.
const DISK_FULL_MIB: u64 = 16;

/// What became of a sandbox that was to be captured.
#[derive(Debug)]
pub(crate) enum Captured {
    /// It is on disk and its processes are gone.
    Asleep(Proof),
    /// It is on disk and goes on, as it was to.
    Beside,
    /// It runs on, and there is no image.
    Running(PlatformError),
    /// Its processes are gone and there is no image.
    Lost(ExitCause),
    /// It could not be found out.
    Unknown(PlatformError),
}

fn after(budget: Duration) -> Deadline {
    Deadline::after(tokio::time::Instant::now().into_std(), budget)
}

fn engine_error(step: &'static str, source: EngineError) -> PlatformError {
    PlatformError::Engine {
        step,
        source: source.into(),
    }
}

/// Captures a running sandbox and finds out what became of it.
pub(crate) async fn capture(
    dependencies: &Dependencies,
    record: &Record,
    after_it: AfterCapture,
) -> Captured {
    let points = match after_it {
        AfterCapture::Stop => ["pause.quiesced", "pause.captured"],
        AfterCapture::Continue => ["snapshot.quiesced", "snapshot.captured"],
    };
    let quiet =
        dependencies
            .agent
            .quiesce(&record.id, &record.tokens.control, after(QUIESCE_BUDGET));
    if let Err(error) = quiet.await {
        // A silent guest is captured as it is.
        tracing::debug!(sandbox = %record.id, %error, "captured with connections open");
    }
    dependencies.faults.reach(points[0]);
    let instance = dependencies.layout.instance(&record.id, record.incarnation);
    let image = dependencies.layout.image(&record.id, record.incarnation);
    let told = dependencies
        .engine
        .capture(&instance, &image, after_it, after(CAPTURE_BUDGET))
        .await;
    dependencies.faults.reach(points[1]);
    if told.is_ok() && after_it == AfterCapture::Stop {
        // The processes may take a moment to go.
        let _ = tokio::time::timeout(END_GRACE, dependencies.engine.wait(&instance)).await;
    }
    truth(dependencies, record, after_it, told.err()).await
}

/// What became of a sandbox whose capture was begun: by what is there, whatever was told (R-L10).
pub(crate) async fn truth(
    dependencies: &Dependencies,
    record: &Record,
    after_it: AfterCapture,
    told: Option<EngineError>,
) -> Captured {
    const STEP: &str = "capturing it";
    let instance = dependencies.layout.instance(&record.id, record.incarnation);
    // A capture that said that it is done is not under way any more.
    if told.is_some() {
        let settled = dependencies.engine.settle(&instance, after(SETTLE_BUDGET));
        if let Err(error) = settled.await {
            return Captured::Unknown(engine_error(STEP, error));
        }
    }
    let status = match dependencies.inspect(&instance).await {
        Ok(status) => status,
        Err(error) => return Captured::Unknown(engine_error(STEP, error)),
    };
    let image = has_image(dependencies, record).await;
    let cause = match status {
        InstanceStatus::Running
            if image && told.is_none() && after_it == AfterCapture::Continue =>
        {
            return Captured::Beside;
        }
        InstanceStatus::Running => {
            let error = told.map_or_else(
                || PlatformError::Engine {
                    step: STEP,
                    source: "it said that it was done, and the processes run on".into(),
                },
                |error| capture_error(dependencies, STEP, error),
            );
            return Captured::Running(error);
        }
        InstanceStatus::Ended(cause) => cause,
        InstanceStatus::Unknown => ExitCause::Crashed("its processes are gone".to_owned()),
    };
    match (image, told) {
        (true, None) => Captured::Asleep(Proof::Complete),
        (true, Some(_)) => Captured::Asleep(Proof::Missing),
        (false, _) => Captured::Lost(cause),
    }
}

/// Why a capture failed. What an engine says about a full disk is not to be relied on.
fn capture_error(
    dependencies: &Dependencies,
    step: &'static str,
    error: EngineError,
) -> PlatformError {
    let room = capacity::measure(dependencies.layout.root(), 0, 0);
    if room.disk_available_mib >= DISK_FULL_MIB {
        return engine_error(step, error);
    }
    tracing::warn!(error = ?error, "a capture met a full disk");
    PlatformError::Capacity {
        what: String::from("the disk became full while it was captured; it runs on"),
    }
}

/// Whether there is anything of an image of the sandbox's present life.
pub(crate) async fn has_image(dependencies: &Dependencies, record: &Record) -> bool {
    let image = dependencies.layout.image(&record.id, record.incarnation);
    let look = move || fs::read_dir(image).is_ok_and(|mut entries| entries.next().is_some());
    tokio::task::spawn_blocking(look).await.unwrap_or(false)
}

/// What a life is restored from.
#[derive(Debug, Clone)]
pub(crate) struct Restored {
    /// The engine's image.
    pub(crate) image: PathBuf,
    /// The control token that the agent in it expects.
    pub(crate) control_token: Token,
    /// The control token that its first process was booted with.
    pub(crate) boot_token: Token,
    /// Whether its processes go on, or start anew.
    pub(crate) keeps: PauseKeeps,
    /// The network that it comes into.
    pub(crate) network: Joins,
}

/// The network that a restored life comes into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Joins {
    /// A new one.
    FreshNetwork,
    /// The one that the life before it has.
    SameNetwork,
}

impl Restored {
    /// The image that a sleeping sandbox would be woken from.
    pub(crate) fn own(
        dependencies: &Dependencies,
        record: &Record,
        waking: Waking,
    ) -> Result<Self, PlatformError> {
        let image = record.image.as_ref().ok_or_else(|| PlatformError::Node {
            step: "finding its image",
            source: "the record names none".into(),
        })?;
        let keeps = match waking {
            Waking::ColdBoot => PauseKeeps::Files,
            Waking::AsPaused => record
                .sleep
                .map_or(PauseKeeps::Everything, |sleep| sleep.keeps),
        };
        Ok(Self {
            image: dependencies.layout.image(&record.id, image.of),
            control_token: record.tokens.control.clone(),
            boot_token: record.tokens.boot.clone(),
            keeps,
            network: Joins::FreshNetwork,
        })
    }
}

/// Restores an image into a new life, which `record` already names, and returns when the guest
/// answers. On an error the caller removes what is left of that life.
pub(crate) async fn restore(
    dependencies: &Dependencies,
    record: &Record,
    from: &Restored,
    deadline: Deadline,
) -> Result<(), PlatformError> {
    let attached = match from.network {
        Joins::FreshNetwork => {
            let network = &dependencies.network;
            network.attach(&record.id, &record.egress).await
        }
        Joins::SameNetwork => dependencies.network.readdress(&record.id).await,
    };
    let attached = attached.map_err(|source| PlatformError::Node {
        step: "building its network",
        source: source.into(),
    })?;
    dependencies.faults.reach("resume.network");
    let build = build(dependencies, record)?;
    let spec = LaunchSpec {
        instance: dependencies.layout.instance(&record.id, record.incarnation),
        root_fs: build.root_fs.clone(),
        origin: Origin::Image {
            directory: from.image.clone(),
            command: build.command.clone(),
            environment: boot_environment(&build, &from.boot_token),
        },
        network_namespace: attached.namespace,
        resources: record.resources,
        hostname: record.id.to_string(),
    };
    let launched = dependencies.engine.launch(&spec, deadline).await;
    launched.map_err(|source| engine_error("waking it", source))?;
    dependencies.faults.reach("resume.launched");
    create::introduce(dependencies, record, &from.control_token, deadline).await?;
    dependencies.faults.reach("resume.introduced");
    if from.keeps == PauseKeeps::Files {
        create::start_anew(dependencies, record, deadline).await?;
    }
    Ok(())
}

pub(crate) fn build(
    dependencies: &Dependencies,
    record: &Record,
) -> Result<Arc<Build>, PlatformError> {
    let build = dependencies.builds.build(&record.template.build);
    build.ok_or_else(|| PlatformError::Node {
        step: "finding what it was made from",
        source: format!("build {} is not there", record.template.build).into(),
    })
}

/// Brings the image of the sandbox's present life and its record to the disk, if it sleeps for a
/// while. Nobody waits for it: only a power cut could tell, which the processes would not have
/// outlived either. Not at once, because one that is woken or deleted soon would wait for the disk:
/// bytes that are on their way there cannot be dropped.
pub(crate) fn sync_image(dependencies: &Dependencies, record: &Record) {
    let id = record.id.clone();
    let image = dependencies.layout.image(&id, record.incarnation);
    let written = dependencies.layout.record(&id);
    let sync = move || {
        sandhold_images::sync_image(&image)?;
        layout::sync(&written)
    };
    tokio::spawn(async move {
        tokio::time::sleep(FLUSH_AFTER).await;
        match off_thread(sync).await {
            // Woken or deleted meanwhile: there is no image any more.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(sandbox = %id, %error, "its image may not outlive a power cut");
            }
            _ => {}
        }
    });
}

/// What removes every captured life of the sandbox except `kept`, once the record, which needs them no
/// more, has reached the disk. Which ones is settled now, so that a later capture is none of them. What
/// cannot be removed goes with the sandbox's directory.
pub(crate) fn discard_images(
    dependencies: &Dependencies,
    id: &SandboxId,
    kept: Option<Incarnation>,
) -> impl FnOnce() + Send + 'static {
    let kept = kept.map(|incarnation| dependencies.layout.image(id, incarnation));
    let images = images_in(&dependencies.layout.sandbox(id));
    let record = dependencies.layout.record(id);
    let id = id.clone();
    move || {
        let discarded = images.and_then(|mut images| {
            images.retain(|image| Some(image) != kept.as_ref());
            if images.is_empty() {
                return Ok(());
            }
            layout::sync(&record)?;
            images.iter().try_for_each(fs::remove_dir_all)
        });
        match discarded {
            // The sandbox was removed meanwhile, and they with it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(sandbox = %id, %error, "an image is left"),
            Ok(()) => {}
        }
    }
}

fn images_in(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut images = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name
            .to_str()
            .is_some_and(|name| name.starts_with(IMAGE_PREFIX))
        {
            images.push(entry.path());
        }
    }
    Ok(images)
}
