//! The catalogue: which builds there are, what they are called, and when their bytes may go.
//!
//! ```text
//!   own directory  (read and written)  ─┐
//!   shared directories (only read)     ─┴─▶ index in memory ──▶ resolve, list, build
//!                                              ▲
//!                        read again when a directory has changed
//! ```
//!
//! Owns: the index, and a shared lock on each build that it handed out, so that a builder in
//! another process does not remove what this one uses.
//!
//! Invariants:
//! - A name is taken away at once; bytes go later, when nobody refers to them.
//! - While any record of a directory cannot be read, nothing in it is collected.
//! - A memory image that the engine at hand cannot restore is never handed out
//!   ([`crate::check_warm`]).
//!
//! Called by the node and the API; never waits for a build.

mod naming;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use sandhold_engine::EngineIdentity;
use sandhold_platform::{PlatformError, TemplateView, Templates, Warmth};
use sandhold_types::{BuildId, Clock, Namespace, TemplateId, Timestamp};

use crate::{
    Build, Builds, WarmMismatch, check_warm,
    durable::{self, FileLock, Wait},
    record::{ContentKey, TemplateRecord},
    shelf::{Contents, Shelf, Shelved, remove_tree},
};

pub use naming::TemplateFiles;
pub(crate) use naming::is_tag;

/// Where templates that serve every data directory of a machine lie.
pub const SHARED_DIRECTORY: &str = "/var/lib/sandhold/templates";

/// Two changes within one tick of the file system's clock look like one, so a directory that has
/// changed as recently as this is read again.
const SETTLING_MS: u64 = 1_000;

/// How long the layer of a step is kept that no build needs, such as of a build that failed later.
const CACHE_KEPT: Duration = Duration::from_secs(24 * 3600);

/// Tags that mean the current build.
const CURRENT_TAGS: [&str; 2] = ["default", "latest"];

/// A failed operation of the catalogue.
#[derive(Debug, thiserror::Error)]
pub enum CatalogueError {
    /// A file or directory of it.
    #[error("could not {step} {path}")]
    File {
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A record cannot be read, so that nothing can be concluded about what is in use.
    #[error("nothing was collected in {directory}, because {count} records cannot be read")]
    Unreadable {
        /// The catalogue directory.
        directory: PathBuf,
        /// How many.
        count: usize,
        /// The first of them.
        #[source]
        first: crate::RecordError,
    },
    /// No such template.
    #[error("there is no template '{reference}' in {directory}")]
    Unknown {
        /// What was asked for.
        reference: String,
        /// Where.
        directory: PathBuf,
    },
}

fn file_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CatalogueError {
    let path = path.to_owned();
    move |source| CatalogueError::File { step, path, source }
}

/// What a collection removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Builds.
    pub builds: Vec<BuildId>,
    /// How many layers.
    pub layers: usize,
}

/// The catalogue of one node.
#[derive(Debug)]
pub struct Catalogue {
    own: Shelf,
    shelves: Vec<Shelf>,
    engine: EngineIdentity,
    clock: Arc<dyn Clock>,
    index: RwLock<Arc<Index>>,
    held: Mutex<BTreeMap<BuildId, FileLock>>,
}

/// What was read from every directory, the own one first.
#[derive(Debug)]
struct Index {
    read: Vec<ReadShelf>,
    /// Builds as they are handed out: without an image that cannot be restored here.
    usable: BTreeMap<BuildId, Arc<Build>>,
    mismatches: BTreeMap<BuildId, WarmMismatch>,
}

#[derive(Debug)]
struct ReadShelf {
    shelf: Shelf,
    contents: Contents,
    changed_at: Option<SystemTime>,
    settled: bool,
}

/// The directories of `SANDHOLD_TEMPLATES` (separated by colons) or, without it, the shared one of
/// the machine. Those that are not there are left out.
#[must_use]
pub fn shared_directories(configured: Option<&str>) -> Vec<PathBuf> {
    let text = configured.unwrap_or(SHARED_DIRECTORY);
    let named = text.split(':').filter(|part| !part.is_empty());
    named
        .map(PathBuf::from)
        .filter(|path| path.is_dir())
        .collect()
}

impl Catalogue {
    /// Opens the catalogue that writes to `own` and reads `shared` too. What interrupted builds
    /// left in `own` is removed, unless a builder is at work.
    ///
    /// # Errors
    /// `own` cannot be made or cleared.
    pub fn open(
        own: &Path,
        shared: &[PathBuf],
        engine: EngineIdentity,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, CatalogueError> {
        let own_shelf = Shelf::new(own);
        own_shelf.prepare().map_err(file_error("make", own))?;
        let lock = own_shelf
            .lock_building(Wait::Never)
            .map_err(file_error("lock", own))?;
        if lock.is_some() {
            own_shelf
                .clear_rubbish()
                .map_err(file_error("clear", &own_shelf.tmp()))?;
        }
        let others = shared.iter().filter(|path| path.as_path() != own);
        let mut shelves = vec![own_shelf.clone()];
        shelves.extend(others.map(|path| Shelf::new(path)));
        let index = Index::read(&shelves, &engine, clock.now());
        Ok(Self {
            own: own_shelf,
            shelves,
            engine,
            clock,
            index: RwLock::new(Arc::new(index)),
            held: Mutex::default(),
        })
    }

    /// Why a build is used without its memory image, if so.
    #[must_use]
    pub fn warm_mismatch(&self, id: &BuildId) -> Option<WarmMismatch> {
        self.index().mismatches.get(id).cloned()
    }

    /// Every template whoever it belongs to, for the operator. Nothing is hidden.
    #[must_use]
    pub fn list_all(&self) -> Vec<Arc<TemplateView>> {
        let index = self.index();
        let templates = index.read.iter().flat_map(|read| {
            let records = read.contents.templates.values();
            records.map(Arc::clone)
        });
        let views = templates.filter_map(|record| index.view(&record, &record.current));
        views.map(Arc::new).collect()
    }

    /// Takes a template's names away, whoever it belongs to. Its bytes go when they are collected.
    ///
    /// # Errors
    /// There is none in the own directory, or its record cannot be removed.
    pub fn remove(&self, reference: &str) -> Result<TemplateId, CatalogueError> {
        let index = self.index();
        let unknown = || CatalogueError::Unknown {
            reference: reference.to_owned(),
            directory: self.own.directory().to_owned(),
        };
        let own = index.read.first().ok_or_else(unknown)?;
        let mut records = own.contents.templates.values();
        let record = records
            .find(|record| is_called(record, reference))
            .ok_or_else(unknown)?;
        self.unname(&record.id)?;
        Ok(record.id.clone())
    }

    /// Removes the bytes of builds of the own directory that have no name and are not `in_use`,
    /// and of layers that no build refers to. Skipped while a builder is at work.
    ///
    /// # Errors
    /// A record cannot be read (then nothing is removed), or bytes cannot be removed.
    pub fn collect(&self, in_use: &BTreeSet<BuildId>) -> Result<Collected, CatalogueError> {
        let directory = self.own.directory();
        let lock = self.own.lock_building(Wait::Never);
        let Some(_lock) = lock.map_err(file_error("lock", directory))? else {
            return Ok(Collected::default());
        };
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let collected = collect(&self.own, |id| {
            if in_use.contains(id) {
                return false;
            }
            // Our own share of the lock would keep us from having it alone.
            held.remove(id);
            true
        })?;
        drop(held);
        self.reread();
        Ok(collected)
    }

    fn unname(&self, id: &TemplateId) -> Result<(), CatalogueError> {
        let path = self.own.template_record(id);
        let _lock = self.own.lock_names().map_err(file_error("lock", &path))?;
        durable::remove_file(&path).map_err(file_error("remove", &path))?;
        self.reread();
        Ok(())
    }

    /// The index, read again if a directory has changed.
    fn index(&self) -> Arc<Index> {
        let index = Arc::clone(&self.index.read().unwrap_or_else(PoisonError::into_inner));
        if index.is_fresh() {
            index
        } else {
            self.reread()
        }
    }

    fn reread(&self) -> Arc<Index> {
        let index = Arc::new(Index::read(&self.shelves, &self.engine, self.clock.now()));
        *self.index.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&index);
        index
    }

    /// Hands a build out, with a share of the lock that keeps its bytes. `None` if they are being
    /// removed at this moment.
    fn hold(&self, build: &Arc<Build>) -> Option<Arc<Build>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.contains_key(&build.id) {
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            let record = index.record_path(&build.id)?;
            let lock = FileLock::share(&record).ok().flatten()?;
            held.insert(build.id.clone(), lock);
        }
        Some(Arc::clone(build))
    }
}

impl Builds for Catalogue {
    fn resolve(&self, namespace: &Namespace, reference: &str) -> Option<Arc<Build>> {
        let index = self.index();
        let (_, build) = index.find(namespace, reference)?;
        self.hold(index.usable.get(&build)?)
    }

    fn build(&self, id: &BuildId) -> Option<Arc<Build>> {
        self.hold(self.index().usable.get(id)?)
    }
}

#[async_trait]
impl Templates for Catalogue {
    fn resolve(&self, namespace: &Namespace, reference: &str) -> Option<Arc<TemplateView>> {
        let index = self.index();
        let (record, build) = index.find(namespace, reference)?;
        index.view(&record, &build).map(Arc::new)
    }

    fn list(&self, namespace: &Namespace) -> Vec<Arc<TemplateView>> {
        let index = self.index();
        let mut by_name = BTreeMap::new();
        for record in index.visible(namespace) {
            let name = record.names.first().cloned().unwrap_or_default();
            let Some(view) = index.view(record, &record.current) else {
                continue;
            };
            // The first one found is the one that the name means.
            by_name.entry(name).or_insert_with(|| Arc::new(view));
        }
        by_name.into_values().collect()
    }

    async fn delete(&self, namespace: &Namespace, reference: &str) -> Result<(), PlatformError> {
        let index = self.index();
        let (record, _) = index
            .find(namespace, reference)
            .ok_or_else(|| PlatformError::TemplateNotFound(reference.to_owned()))?;
        if record.owner.as_ref() != Some(namespace) {
            return Err(PlatformError::Forbidden(format!(
                "template '{reference}' belongs to the platform"
            )));
        }
        self.unname(&record.id)
            .map_err(|error| PlatformError::Node {
                step: "deleting the template",
                source: Box::new(error),
            })
    }
}

impl Index {
    fn read(shelves: &[Shelf], engine: &EngineIdentity, now: Timestamp) -> Self {
        let read: Vec<ReadShelf> = shelves.iter().map(|s| ReadShelf::read(s, now)).collect();
        let mut index = Self {
            read,
            usable: BTreeMap::new(),
            mismatches: BTreeMap::new(),
        };
        let builds: Vec<Arc<Build>> = index
            .read
            .iter()
            .flat_map(|read| read.contents.builds.values().map(|s| Arc::clone(&s.build)))
            .collect();
        for build in builds {
            index.add(build, engine);
        }
        index
    }

    fn add(&mut self, build: Arc<Build>, engine: &EngineIdentity) {
        let mismatch = build
            .warm
            .as_ref()
            .and_then(|warm| check_warm(&warm.engine, engine).err());
        let id = build.id.clone();
        let usable = match mismatch {
            None => build,
            Some(mismatch) => {
                self.mismatches.insert(id.clone(), mismatch);
                Arc::new(Build {
                    warm: None,
                    ..(*build).clone()
                })
            }
        };
        self.usable.entry(id).or_insert(usable);
    }

    fn is_fresh(&self) -> bool {
        let mut read = self.read.iter();
        read.all(|read| read.settled && read.changed_at == read.shelf.changed_at())
    }

    fn record_path(&self, id: &BuildId) -> Option<PathBuf> {
        let mut read = self.read.iter();
        let read = read.find(|read| read.contents.builds.contains_key(id))?;
        Some(read.shelf.build_record(id))
    }

    /// What a tenant may use: its own, then everybody's; the own directory before shared ones.
    fn visible<'a>(
        &'a self,
        namespace: &'a Namespace,
    ) -> impl Iterator<Item = &'a Arc<TemplateRecord>> {
        let records = || self.read.iter().flat_map(|r| r.contents.templates.values());
        let own = records().filter(move |record| record.owner.as_ref() == Some(namespace));
        own.chain(records().filter(|record| record.owner.is_none()))
    }

    fn find(
        &self,
        namespace: &Namespace,
        reference: &str,
    ) -> Option<(Arc<TemplateRecord>, BuildId)> {
        let (name, tag) = split_reference(namespace, reference);
        self.visible(namespace)
            .filter(|record| is_called(record, name))
            .find_map(|record| Some((Arc::clone(record), build_of(record, tag)?)))
    }

    fn view(&self, record: &TemplateRecord, build: &BuildId) -> Option<TemplateView> {
        let build = self.usable.get(build)?;
        Some(TemplateView {
            id: record.id.clone(),
            build: build.id.clone(),
            names: record.names.clone(),
            owner: record.owner.clone(),
            resources: build.resources,
            built_at: build.built_at,
            size_bytes: build.size_bytes,
            warm: if build.warm.is_some() {
                Warmth::Warm
            } else {
                Warmth::Cold
            },
        })
    }
}

impl ReadShelf {
    fn read(shelf: &Shelf, now: Timestamp) -> Self {
        // The time is taken before the contents: a change in between is then seen next time.
        let changed_at = shelf.changed_at();
        let contents = shelf.read();
        for error in &contents.unreadable {
            tracing::warn!(
                error = error as &dyn std::error::Error,
                "a template is left out"
            );
        }
        let settled = changed_at.is_none_or(|at| {
            let since_epoch = at
                .duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or(Duration::ZERO);
            let at_ms = u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX);
            at_ms.saturating_add(SETTLING_MS) < now.unix_ms()
        });
        Self {
            shelf: shelf.clone(),
            contents,
            changed_at,
            settled,
        }
    }
}

/// Divides `namespace/name:tag`. The namespace may be left out; another tenant's stays in the name
/// and so finds nothing.
fn split_reference<'a>(namespace: &Namespace, reference: &'a str) -> (&'a str, Option<&'a str>) {
    let (name, tag) = match reference.split_once(':') {
        Some((name, tag)) => (name, Some(tag)),
        None => (reference, None),
    };
    let own_name = name
        .strip_prefix(namespace.as_str())
        .and_then(|rest| rest.strip_prefix('/'));
    (own_name.unwrap_or(name), tag)
}

fn is_called(record: &TemplateRecord, name: &str) -> bool {
    record.id.as_str() == name || record.names.iter().any(|own| own == name)
}

/// Whether a tag means the current build unless it was given to another.
pub(crate) fn is_current_tag(tag: &str) -> bool {
    CURRENT_TAGS.contains(&tag)
}

fn build_of(record: &TemplateRecord, tag: Option<&str>) -> Option<BuildId> {
    let Some(tag) = tag else {
        return Some(record.current.clone());
    };
    let tagged = record.tags.get(tag).cloned();
    tagged.or_else(|| is_current_tag(tag).then(|| record.current.clone()))
}

/// Removes builds of a shelf that have no name and that `may_go`, then layers without a build.
/// The caller holds the building lock.
pub(crate) fn collect(
    shelf: &Shelf,
    mut may_go: impl FnMut(&BuildId) -> bool,
) -> Result<Collected, CatalogueError> {
    let mut contents = shelf.read();
    let count = contents.unreadable.len();
    if let Some(first) = contents.unreadable.pop() {
        return Err(CatalogueError::Unreadable {
            directory: shelf.directory().to_owned(),
            count,
            first,
        });
    }
    let named: BTreeSet<&BuildId> = contents
        .templates
        .values()
        .flat_map(|record| std::iter::once(&record.current).chain(record.tags.values()))
        .collect();
    let mut collected = Collected::default();
    let mut kept: Vec<&Arc<Shelved>> = Vec::new();
    for (id, shelved) in &contents.builds {
        if !named.contains(id) && may_go(id) && remove_build(shelf, id)? {
            collected.builds.push(id.clone());
        } else {
            kept.push(shelved);
        }
    }
    let layers: BTreeSet<&ContentKey> = kept
        .iter()
        .flat_map(|shelved| {
            let record = &shelved.record;
            let own = [&record.base_layer, &record.root_layer];
            own.into_iter().chain(&record.step_layers)
        })
        .collect();
    collected.layers = remove_layers(shelf, &layers)?;
    Ok(collected)
}

/// Removes a build's bytes unless another process uses it; says whether it did.
fn remove_build(shelf: &Shelf, id: &BuildId) -> Result<bool, CatalogueError> {
    let record = shelf.build_record(id);
    let lock = FileLock::take_existing(&record).map_err(file_error("lock", &record))?;
    let Some(_lock) = lock else {
        return Ok(false);
    };
    discard(shelf, &shelf.build_directory(id))?;
    Ok(true)
}

fn remove_layers(shelf: &Shelf, kept: &BTreeSet<&ContentKey>) -> Result<usize, CatalogueError> {
    let mut removed = 0;
    let layers = shelf.layers();
    for entry in layers.read_dir().map_err(file_error("list", &layers))? {
        let entry = entry.map_err(file_error("list", &layers))?;
        let name = entry.file_name();
        if kept.iter().any(|key| name == key.0.as_str()) {
            continue;
        }
        let cached_at = shelf.cached_at(&entry.path());
        let age = cached_at.and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age < CACHE_KEPT) {
            continue;
        }
        discard(shelf, &entry.path())?;
        removed += 1;
    }
    Ok(removed)
}

/// Moves a tree out of its place first, so that an interrupted removal leaves rubbish and never
/// a part of something.
fn discard(shelf: &Shelf, path: &Path) -> Result<(), CatalogueError> {
    let name = path.file_name().unwrap_or(path.as_os_str());
    let aside = shelf.tmp().join(name);
    remove_tree(&aside).map_err(file_error("remove", &aside))?;
    std::fs::rename(path, &aside).map_err(file_error("move aside", path))?;
    remove_tree(&aside).map_err(file_error("remove", &aside))
}
