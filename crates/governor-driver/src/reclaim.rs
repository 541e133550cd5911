//! The reclaimer's clockwork: look, plan, and work side by side (R-G10, R-G14).
//!
//! ```text
//!   every cycle, or by hand ─▶ evidence ─▶ plan ─┬─ removals ─▶ at most `deletes_max` at once
//!   urged ──────────────────▶ the books ─▶ urge ─┘
//!                                                └─ settle, adopt, note ─▶ at once
//! ```
//!
//! Every replica does all of it; the books let one condemn and one delete at a time. A removal that
//! waits for its turn has not begun, so it holds no lock and another replica may take it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandhold_governor::{
    CallKind, Platform, Store,
    books::Verb,
    reclaimer::{Alarm, Confirmed, Evidence, Plan, Reclaimer, Work},
    tasks::{Adoption, Cycle, MakingSettlement, Outcome, Removal, RemovalOf, Settlement, Urge},
};
use tokio::sync::Semaphore;

use crate::{
    direct::{DirectSandboxes, Look},
    governor::Shared,
};

/// What one round found and does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CycleReport {
    /// Whether its evidence was good enough to conclude anything.
    pub confirmed: Confirmed,
    /// How many sandboxes the platform showed; `None` if it could not be asked.
    pub listed: Option<usize>,
    /// How many slots the books have.
    pub records: usize,
    /// What it does, most urgent first.
    pub work: Vec<Work>,
    /// What an operator must know.
    pub alarms: Vec<Alarm>,
}

/// The reclaimer of this replica.
#[derive(Debug)]
pub(crate) struct Clockwork {
    reclaimer: Mutex<Reclaimer>,
    /// One look at a time: two side by side would count as two cycles.
    looking: tokio::sync::Mutex<()>,
    removals: Arc<Semaphore>,
    last: Mutex<Option<CycleReport>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clockwork {
    pub(crate) fn new(rules: &sandhold_governor::rules::Rules) -> Self {
        Self {
            reclaimer: Mutex::new(Reclaimer::new(rules.clone())),
            looking: tokio::sync::Mutex::new(()),
            removals: Arc::new(Semaphore::new(rules.settings().deletes_max as usize)),
            last: Mutex::new(None),
        }
    }

    /// What the last round said.
    pub(crate) fn last(&self) -> Option<CycleReport> {
        locked(&self.last).clone()
    }
}

fn report(evidence: &Evidence, plan: &Plan) -> CycleReport {
    CycleReport {
        confirmed: plan.confirmed,
        listed: evidence.listing.as_ref().map(Vec::len),
        records: evidence.view.records.len(),
        work: plan.work.clone(),
        alarms: plan.alarms.clone(),
    }
}

impl<P: Platform + DirectSandboxes + 'static> Shared<P> {
    /// Looks every cycle, and goes on with removals when urged; never ends by itself.
    pub(crate) async fn keep_reclaiming(self: Arc<Self>) {
        let mut cycles = tokio::time::interval(self.drive.rules.settings().cycle);
        cycles.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = cycles.tick() => {
                    if let Some(report) = self.round().await {
                        tell(&report, &self.drive.held_back());
                    }
                }
                () = self.drive.urge.notified() => self.go_on().await,
            }
        }
    }

    async fn evidence(&self) -> Option<Evidence> {
        match self.drive.carry_out(Cycle::default()).await {
            Outcome::Evidence(evidence) => Some(*evidence),
            other => {
                tracing::warn!(?other, "a reclaimer round found no evidence");
                None
            }
        }
    }

    /// What a round would do now; marks and does nothing.
    pub(crate) async fn dry_run(&self) -> Option<CycleReport> {
        let evidence = self.evidence().await?;
        let plan = locked(&self.clockwork.reclaimer).dry_run(&evidence);
        Some(report(&evidence, &plan))
    }

    /// One round. Its work goes on after this returns.
    pub(crate) async fn round(self: &Arc<Self>) -> Option<CycleReport> {
        let _one_at_a_time = self.clockwork.looking.lock().await;
        // Their own lifetimes are their roots: as they are now, before anything is concluded.
        self.follow_direct(Look::Round).await;
        let evidence = self.evidence().await?;
        let plan = locked(&self.clockwork.reclaimer).plan(&evidence);
        let report = report(&evidence, &plan);
        *locked(&self.clockwork.last) = Some(report.clone());
        self.begin_all(plan.work);
        Some(report)
    }

    /// Goes on with what is condemned, without a look.
    async fn go_on(self: &Arc<Self>) {
        if let Outcome::Urgent(view) = self.drive.carry_out(Urge).await {
            let work = locked(&self.clockwork.reclaimer).urge(&view);
            self.begin_all(work);
        }
    }

    fn begin_all(self: &Arc<Self>, work: Vec<Work>) {
        for work in work {
            let shared = self.clone();
            tokio::spawn(async move {
                let slot = work.slot().cloned();
                shared.do_one(work).await;
                if let Some(slot) = slot {
                    locked(&shared.clockwork.reclaimer).finished(&slot);
                }
            });
        }
    }

    async fn do_one(&self, work: Work) {
        let rules = self.drive.rules.clone();
        let outcome = match work {
            Work::Remove {
                slot,
                sandbox,
                generation,
                ground,
                ask_first,
            } => {
                // The semaphore is never closed.
                let Ok(_turn) = self.clockwork.removals.acquire().await else {
                    return;
                };
                let of = RemovalOf {
                    slot,
                    sandbox,
                    generation,
                    ground,
                    ask_first,
                };
                let removal = Removal::new(of, self.replica.clone(), rules);
                self.drive.carry_out(removal).await
            }
            Work::Settle { slot, sandbox } => {
                self.drive
                    .carry_out(Settlement::new(slot, sandbox, rules))
                    .await
            }
            Work::SettleMaking { slot } => self.drive.carry_out(MakingSettlement::new(slot)).await,
            Work::Adopt(listed) => self.drive.carry_out(Adoption::new(*listed)).await,
            Work::Note { slot, seen } => return self.note(Verb::NoteSeen { slot, seen }).await,
            Work::FinishRecovery {
                highest,
                settled_from,
            } => {
                let verb = Verb::FinishRecovery {
                    highest,
                    settled_from,
                };
                return self.note(verb).await;
            }
        };
        tracing::debug!(?outcome, "reclaimer");
    }

    /// A verb whose loss costs a round and nothing else.
    async fn note(&self, verb: Verb) {
        if let Err(error) = self.drive.books.step(verb).await {
            tracing::warn!(%error, "the reclaimer could not note");
        }
    }
}

fn tell(report: &CycleReport, held_back: &[CallKind]) {
    for alarm in &report.alarms {
        tracing::warn!(?alarm, "governor alarm");
    }
    if !held_back.is_empty() {
        tracing::warn!(?held_back, "the circuit breaker is open");
    }
    tracing::debug!(
        confirmed = ?report.confirmed,
        listed = report.listed,
        records = report.records,
        work = report.work.len(),
        "reclaimer round"
    );
}
