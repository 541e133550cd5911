//! What the node shows of its sandboxes.
//!
//! Owns the published view of every sandbox, the mailbox of its actor, its newest activity, and
//! what is remembered of the recently ended. Reading never waits for an actor (R-P9): locks here
//! are held for a map operation, never across an await.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sandhold_platform::{MetricSample, SandboxView};
use sandhold_types::{SandboxId, SandboxState, Timestamp, Token};
use tokio::sync::mpsc;

use crate::{actor::Command, meter::Ring, record::Record};

/// How many ended sandboxes are remembered; the oldest are forgotten first.
pub(crate) const ENDED_MAX: usize = 4096;

/// How much older than the newest activity a published view may be. Publishing copies the view, so
/// it is not done for every request.
const VIEW_AGE_MAX: Duration = Duration::from_millis(500);

/// One sandbox that is there.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) id: SandboxId,
    view: RwLock<Published>,
    last_activity_ms: AtomicU64,
    pub(crate) mailbox: mpsc::Sender<Command>,
    pub(crate) meter: Ring,
}

#[derive(Debug, Clone)]
struct Published {
    view: Arc<SandboxView>,
    control_token: Token,
}

impl Entry {
    pub(crate) fn new(record: &Record, mailbox: mpsc::Sender<Command>) -> Self {
        Self {
            id: record.id.clone(),
            view: RwLock::new(Published::of(record)),
            last_activity_ms: AtomicU64::new(record.last_activity.unix_ms()),
            mailbox,
            meter: Ring::default(),
        }
    }

    /// The view as last published.
    pub(crate) fn view(&self) -> Arc<SandboxView> {
        self.read().view
    }

    /// The token that its agent expects on control calls.
    pub(crate) fn control_token(&self) -> Token {
        self.read().control_token
    }

    fn read(&self) -> Published {
        self.view
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Publishes what the record says now.
    pub(crate) fn publish(&self, record: &Record) {
        let mut published = Published::of(record);
        let newest = record.last_activity.max(self.last_activity());
        if newest > record.last_activity {
            Arc::make_mut(&mut published.view).last_activity = newest;
        }
        self.last_activity_ms
            .fetch_max(newest.unix_ms(), Ordering::AcqRel);
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = published;
    }

    /// The newest activity.
    pub(crate) fn last_activity(&self) -> Timestamp {
        Timestamp::from_unix_ms(self.last_activity_ms.load(Ordering::Acquire))
    }

    /// Notes activity at `now`.
    pub(crate) fn touch(&self, now: Timestamp) {
        self.last_activity_ms
            .fetch_max(now.unix_ms(), Ordering::AcqRel);
        if now.since(self.view().last_activity) >= VIEW_AGE_MAX {
            let mut published = self.view.write().unwrap_or_else(PoisonError::into_inner);
            Arc::make_mut(&mut published.view).last_activity = self.last_activity();
        }
    }

    /// Whether its lifetime is over.
    pub(crate) fn is_over(&self, now: Timestamp) -> bool {
        self.view().lifetime.is_over(self.last_activity(), now)
    }

    /// The newest samples of what it uses.
    pub(crate) fn samples(&self) -> Vec<MetricSample> {
        self.meter.samples()
    }
}

impl Published {
    fn of(record: &Record) -> Self {
        Self {
            view: Arc::new(record.view()),
            control_token: record.tokens.control.clone(),
        }
    }
}

/// Why there is no room for another sandbox in the registry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full {
    pub(crate) sandboxes_max: usize,
}

/// All sandboxes of the node.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    live: BTreeMap<SandboxId, Arc<Entry>>,
    ended: BTreeMap<SandboxId, Arc<Record>>,
    ended_order: VecDeque<SandboxId>,
}

impl Registry {
    /// Adds a sandbox unless there are too many; counted and added in one step.
    pub(crate) fn insert(&self, entry: Arc<Entry>, sandboxes_max: usize) -> Result<(), Full> {
        let mut inner = self.write();
        if inner.live.len() >= sandboxes_max {
            return Err(Full { sandboxes_max });
        }
        inner.live.insert(entry.id.clone(), entry);
        Ok(())
    }

    pub(crate) fn live(&self, id: &SandboxId) -> Option<Arc<Entry>> {
        self.read().live.get(id).cloned()
    }

    pub(crate) fn ended(&self, id: &SandboxId) -> Option<Arc<Record>> {
        self.read().ended.get(id).cloned()
    }

    /// Everything that is there, in no promised order.
    pub(crate) fn entries(&self) -> Vec<Arc<Entry>> {
        self.read().live.values().cloned().collect()
    }

    /// The sum of memory limits of all that is there, in MiB, and how many there are.
    pub(crate) fn promised(&self) -> (u64, usize) {
        let inner = self.read();
        let mib = |entry: &Arc<Entry>| u64::from(entry.view().resources.memory_mib);
        (inner.live.values().map(mib).sum(), inner.live.len())
    }

    /// Moves a sandbox from the living to the remembered. Returns the one that had to be forgotten.
    pub(crate) fn retire(&self, record: Record) -> Option<SandboxId> {
        debug_assert_eq!(record.state, SandboxState::Killed);
        let mut inner = self.write();
        inner.live.remove(&record.id);
        inner.ended_order.push_back(record.id.clone());
        inner.ended.insert(record.id.clone(), Arc::new(record));
        if inner.ended_order.len() <= ENDED_MAX {
            return None;
        }
        let oldest = inner.ended_order.pop_front()?;
        inner.ended.remove(&oldest);
        Some(oldest)
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}
