//! A few engine processes made ahead of time (architecture, decision 7).
//!
//! Starting an engine's processes is most of what a create takes, and it does not depend on who
//! asks. So the node keeps a few *blanks* of the templates that were asked for last: a network and
//! engine processes without a guest. A create takes one and restores the image into it.
//!
//! ```text
//!   maker: mark directory ─▶ network ─▶ prepare ─▶ on the shelf ──take──▶ a sandbox being made
//! ```
//!
//! A blank is not an idle sandbox (R-G18): it holds no guest, belongs to nobody, and is bounded to
//! a few of each of a few templates. Its directory carries a mark and no record, so recovery sweeps up whatever blanks
//! an earlier process left. They go when the node stops.
//!
//! Only the maker puts blanks on the shelf; only a create takes them off.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandhold_engine::LaunchSpec;
use sandhold_images::Build;
use sandhold_platform::{Egress, PlatformError};
use sandhold_types::{BuildId, Deadline, Incarnation, SandboxId};
use tokio::sync::Notify;

use crate::{create, node::Dependencies, remove};

/// Of how many templates blanks are kept: the ones that were asked for last.
const BUILDS_MAX: usize = 3;
/// The most blanks of one template.
const PER_BUILD_MAX: usize = 4;
/// How long making or removing one may take.
const BUDGET: Duration = Duration::from_secs(20);
/// How long nothing is made after one could not be made.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(10);

/// How often it is looked whether anything is being started, and how often in a row it must not be.
const QUIET_INTERVAL: Duration = Duration::from_millis(20);
const QUIET_LOOKS: u32 = 3;

/// What blanks are given to reach before their sandbox says what it may: the usual.
const USUAL_EGRESS: Egress = Egress::Internet;

/// Engine processes without a guest.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Blank {
    /// The identifier that its sandbox will have.
    pub(crate) id: SandboxId,
    /// Its inner network namespace.
    pub(crate) namespace: PathBuf,
}

impl Blank {
    /// Lets the network know what the sandbox may reach, if that is not the usual.
    pub(crate) async fn set_egress(
        &self,
        dependencies: &Dependencies,
        egress: &Egress,
    ) -> Result<(), PlatformError> {
        if *egress == USUAL_EGRESS {
            return Ok(());
        }
        let set = dependencies.network.set_egress(&self.id, egress).await;
        set.map_err(|source| PlatformError::Node {
            step: "setting its network rules",
            source: source.into(),
        })
    }
}

/// The blanks that are there, and of which templates more are wanted.
#[derive(Debug)]
pub(crate) struct Shelf {
    per_build: usize,
    inner: Mutex<Inner>,
    taken: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    /// Newest first.
    wanted: VecDeque<Arc<Build>>,
    ready: BTreeMap<BuildId, VecDeque<Blank>>,
    making: BTreeSet<SandboxId>,
    closed: bool,
}

impl Shelf {
    /// A shelf that keeps `per_build` blanks of each template; none if that is zero.
    pub(crate) fn new(per_build: usize) -> Self {
        Self {
            per_build: per_build.min(PER_BUILD_MAX),
            inner: Mutex::default(),
            taken: Notify::new(),
        }
    }

    /// Takes a blank of `build`, if there is one, and has another made.
    pub(crate) fn take(&self, build: &Arc<Build>) -> Option<Blank> {
        let mut inner = self.lock();
        inner.wanted.retain(|wanted| wanted.id != build.id);
        inner.wanted.push_front(build.clone());
        inner.wanted.truncate(BUILDS_MAX);
        let blank = inner.ready.get_mut(&build.id).and_then(VecDeque::pop_front);
        drop(inner);
        self.taken.notify_one();
        blank
    }

    /// Whether `id` is a blank, or one being made.
    pub(crate) fn claims(&self, id: &SandboxId) -> bool {
        let inner = self.lock();
        let ready = inner.ready.values().flatten().any(|blank| blank.id == *id);
        ready || inner.making.contains(id)
    }

    /// The template of which a blank is missing, the one asked for last first.
    fn next_wanted(&self) -> Option<Arc<Build>> {
        let inner = self.lock();
        let missing = |build: &&Arc<Build>| {
            inner.ready.get(&build.id).map_or(0, VecDeque::len) < self.per_build
        };
        let wanted = inner.wanted.iter().find(missing).cloned();
        wanted.filter(|_| !inner.closed)
    }

    /// Takes off the shelf what belongs to templates that nobody asked for lately; everything, once
    /// it is closed.
    fn unwanted(&self) -> Vec<Blank> {
        let mut inner = self.lock();
        let keep: BTreeSet<BuildId> = match inner.closed {
            true => BTreeSet::new(),
            false => inner.wanted.iter().map(|build| build.id.clone()).collect(),
        };
        let ready = std::mem::take(&mut inner.ready);
        let (kept, unwanted): (BTreeMap<_, _>, BTreeMap<_, _>) = ready
            .into_iter()
            .partition(|(build, _)| keep.contains(build));
        inner.ready = kept;
        unwanted.into_values().flatten().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the shelf filled, one blank at a time, for ever.
pub(crate) async fn run(dependencies: Arc<Dependencies>, shelf: Arc<Shelf>) {
    loop {
        shelf.taken.notified().await;
        while let Some(build) = shelf.next_wanted() {
            if let Err(error) = make(&dependencies, &shelf, &build).await {
                tracing::warn!(error = ?error, "a blank could not be made");
                tokio::time::sleep(PAUSE_AFTER_FAILURE).await;
            }
        }
        discard(&dependencies, shelf.unwanted()).await;
    }
}

/// Removes every blank and makes no more. Called when the maker has ended.
pub(crate) async fn close(dependencies: &Dependencies, shelf: &Shelf) {
    shelf.lock().closed = true;
    discard(dependencies, shelf.unwanted()).await;
    let making = std::mem::take(&mut shelf.lock().making);
    for id in making {
        remove_blank(dependencies, &id).await;
    }
}

async fn discard(dependencies: &Dependencies, blanks: Vec<Blank>) {
    futures::future::join_all(
        blanks
            .iter()
            .map(|blank| remove_blank(dependencies, &blank.id)),
    )
    .await;
}

/// Returns when nothing was being started for a moment. A blank that is made beside a create makes
/// that one slower, and nobody waits for the blank.
async fn quiet(dependencies: &Dependencies) {
    let mut quiet_looks = 0;
    while quiet_looks < QUIET_LOOKS {
        tokio::time::sleep(QUIET_INTERVAL).await;
        let busy = dependencies.launches.available_permits() < dependencies.launches_max;
        quiet_looks = if busy { 0 } else { quiet_looks + 1 };
    }
}

/// Makes one blank of `build`, when nobody else starts anything.
async fn make(
    dependencies: &Dependencies,
    shelf: &Shelf,
    build: &Arc<Build>,
) -> Result<(), PlatformError> {
    quiet(dependencies).await;
    let _turn = dependencies.launches.acquire().await;
    let id = SandboxId::generate(dependencies.entropy.as_ref());
    shelf.lock().making.insert(id.clone());
    let made = prepare(dependencies, &id, build).await;
    match made {
        Ok(Some(namespace)) => {
            let mut inner = shelf.lock();
            inner.making.remove(&id);
            let ready = inner.ready.entry(build.id.clone()).or_default();
            ready.push_back(Blank { id, namespace });
            Ok(())
        }
        Ok(None) => {
            // A template that is booted gains nothing.
            let mut inner = shelf.lock();
            inner.making.remove(&id);
            inner.wanted.retain(|wanted| wanted.id != build.id);
            Ok(())
        }
        Err(error) => {
            remove_blank(dependencies, &id).await;
            shelf.lock().making.remove(&id);
            Err(error)
        }
    }
}

async fn prepare(
    dependencies: &Dependencies,
    id: &SandboxId,
    build: &Build,
) -> Result<Option<PathBuf>, PlatformError> {
    let Some(origin) = create::warm_origin(dependencies, build) else {
        return Ok(None);
    };
    let node = |step| {
        move |source: Box<dyn std::error::Error + Send + Sync>| PlatformError::Node { step, source }
    };
    dependencies.mark_blank(id).await?;
    let attached = dependencies.network.attach(id, &USUAL_EGRESS).await;
    let attached = attached.map_err(|error| node("building a blank's network")(error.into()))?;
    let spec = LaunchSpec {
        instance: dependencies.layout.instance(id, Incarnation::INITIAL),
        root_fs: build.root_fs.clone(),
        origin,
        network_namespace: attached.namespace.clone(),
        resources: build.resources,
        hostname: id.to_string(),
    };
    let deadline = Deadline::after(tokio::time::Instant::now().into_std(), BUDGET);
    let prepared = dependencies.engine.prepare(&spec, deadline).await;
    prepared.map_err(|error| node("preparing a blank")(error.into()))?;
    Ok(Some(attached.namespace))
}

async fn remove_blank(dependencies: &Dependencies, id: &SandboxId) {
    let deadline = Deadline::after(tokio::time::Instant::now().into_std(), BUDGET);
    let resources =
        remove::remove_resources(dependencies, id, Incarnation::INITIAL, deadline).await;
    let removed = match resources {
        Ok(()) => remove::remove_directory(dependencies, id).await,
        Err(error) => Err(error),
    };
    if let Err(error) = removed {
        tracing::warn!(blank = %id, error = ?error, "a blank could not be removed");
    }
}

#[cfg(test)]
mod tests {
    use sandhold_types::{Resources, Timestamp};

    use super::*;

    fn build(id: &str) -> Arc<Build> {
        Arc::new(Build {
            id: id.parse().unwrap(),
            template: "base".parse().unwrap(),
            names: Vec::new(),
            owner: None,
            root_fs: PathBuf::new(),
            command: Vec::new(),
            environment: Vec::new(),
            resources: Resources::default(),
            warm: None,
            built_at: Timestamp::from_unix_ms(0),
            size_bytes: 0,
        })
    }

    fn put(shelf: &Shelf, build: &Build, id: &str) {
        let blank = Blank {
            id: id.parse().unwrap(),
            namespace: PathBuf::new(),
        };
        let mut inner = shelf.lock();
        inner
            .ready
            .entry(build.id.clone())
            .or_default()
            .push_back(blank);
    }

    #[test]
    fn blanks_are_wanted_of_what_was_asked_for_last_and_bounded() {
        let shelf = Shelf::new(1);
        let (first, second) = (build("first"), build("second"));
        assert_eq!(shelf.take(&first), None);
        assert_eq!(shelf.take(&second), None);
        assert_eq!(shelf.next_wanted().unwrap().id, second.id);
        put(&shelf, &second, "aaaaaaaaaaaaaaaaaaaa");
        assert_eq!(shelf.next_wanted().unwrap().id, first.id);
        put(&shelf, &first, "bbbbbbbbbbbbbbbbbbbb");
        assert!(shelf.next_wanted().is_none());
        assert!(shelf.claims(&"bbbbbbbbbbbbbbbbbbbb".parse().unwrap()));
        assert!(shelf.take(&second).is_some());
        assert!(!shelf.claims(&"aaaaaaaaaaaaaaaaaaaa".parse().unwrap()));
        for other in ["third", "fourth", "fifth"] {
            shelf.take(&build(other));
        }
        assert_eq!(
            shelf.unwanted().len(),
            1,
            "nobody asks for the first any more"
        );
        assert_eq!(Shelf::new(1000).per_build, PER_BUILD_MAX);
    }
}
