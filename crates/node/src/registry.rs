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

use sandhold_platform::{MetricSample, PlatformError, SandboxView, StateChange};
use sandhold_types::{Deadline, SandboxId, SandboxState, Timestamp, Token};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::{
    actor::{BUSY_RETRY, Command, Reply},
    doze::Doze,
    meter::Ring,
    record::Record,
    wake::Waiters,
};

/// How many ended sandboxes are remembered; the oldest are forgotten first.
pub(crate) const ENDED_MAX: usize = 4096;

/// State changes that a slow listener may be behind; then it is told that it missed some.
const CHANGES_MAX: usize = 1024;

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
    pub(crate) doze: Doze,
    pub(crate) waiters: Waiters,
    state: watch::Sender<SandboxState>,
    changes: broadcast::Sender<StateChange>,
}

#[derive(Debug, Clone)]
struct Published {
    view: Arc<SandboxView>,
    control_token: Token,
}

impl Entry {
    pub(crate) fn new(
        record: &Record,
        mailbox: mpsc::Sender<Command>,
        changes: broadcast::Sender<StateChange>,
    ) -> Self {
        Self {
            doze: Doze::default(),
            waiters: Waiters::default(),
            state: watch::Sender::new(record.state),
            changes,
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
        let before = {
            let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *view, published).view
        };
        if (before.state, before.incarnation) != (record.state, record.incarnation) {
            self.tell(record);
        }
    }

    /// Pushes a transition to whoever listens.
    fn tell(&self, record: &Record) {
        self.state.send_replace(record.state);
        // Without listeners there is nobody to tell.
        let _ = self.changes.send(StateChange {
            sandbox: record.id.clone(),
            state: record.state,
            incarnation: record.incarnation,
        });
    }

    /// The sandbox's states from now on.
    pub(crate) fn states(&self) -> watch::Receiver<SandboxState> {
        self.state.subscribe()
    }

    /// Tells the sandbox's actor something and waits for its answer, within the deadline.
    pub(crate) async fn ask<T>(
        &self,
        deadline: Deadline,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, PlatformError> {
        let not_found = || PlatformError::NotFound(self.id.clone());
        let busy = |state: SandboxState| PlatformError::Busy {
            id: self.id.clone(),
            state,
            retry_after: BUSY_RETRY,
        };
        let (reply, answer) = oneshot::channel();
        match self.mailbox.try_send(command(reply)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(not_found()),
            Err(mpsc::error::TrySendError::Full(_)) => return Err(busy(self.view().state)),
        }
        let at = tokio::time::Instant::from_std(deadline.instant());
        match tokio::time::timeout_at(at, answer).await {
            Ok(Ok(answer)) => answer,
            // The actor ended with the command in its mailbox: the sandbox is gone.
            Ok(Err(_)) => Err(not_found()),
            Err(_) => Err(busy(self.view().state)),
        }
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
#[derive(Debug)]
pub(crate) struct Registry {
    inner: RwLock<Inner>,
    changes: broadcast::Sender<StateChange>,
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            inner: RwLock::default(),
            changes: broadcast::Sender::new(CHANGES_MAX),
        }
    }
}

#[derive(Debug, Default)]
struct Inner {
    live: BTreeMap<SandboxId, Arc<Entry>>,
    ended: BTreeMap<SandboxId, Arc<Record>>,
    ended_order: VecDeque<SandboxId>,
}

impl Registry {
    /// Where state changes are pushed.
    pub(crate) fn changes(&self) -> &broadcast::Sender<StateChange> {
        &self.changes
    }

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

    /// The sum of memory limits of all that is awake, in MiB, and how many sandboxes there are. One
    /// that sleeps uses no memory; waking it is checked like a create.
    pub(crate) fn promised(&self) -> (u64, usize) {
        let inner = self.read();
        let awake = |entry: &Arc<Entry>| {
            let view = entry.view();
            (view.state != SandboxState::Paused).then_some(u64::from(view.resources.memory_mib))
        };
        (
            inner.live.values().filter_map(awake).sum(),
            inner.live.len(),
        )
    }

    /// Moves a sandbox from the living to the remembered. Returns the one that had to be forgotten.
    pub(crate) fn retire(&self, record: Record) -> Option<SandboxId> {
        debug_assert_eq!(record.state, SandboxState::Killed);
        let mut inner = self.write();
        if let Some(entry) = inner.live.remove(&record.id) {
            entry.tell(&record);
        }
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
