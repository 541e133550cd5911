//! What callers ask of the governor.

use std::sync::Arc;

use sandhold_books::{KeptBooks, runs::KeptRuns};
use sandhold_governor::{
    CallKind, Platform, Store, StoreError,
    books::{Answer, Audit, BucketPolicy, Verb, View},
    colour::Seen,
    explain::{Explanation, explain_gone, explain_living},
    ids::{Bucket, LeaseId, OwnerId, ReplicaId},
    record::Record,
    rules::Rules,
    tasks::{Acquire, Outcome, Request},
};
use sandhold_types::{Entropy, Generation, SandboxId, TemplateId, Timestamp};

use crate::{
    deployed::{DeployedPlatform, TemplatesOf},
    direct::{Direct, DirectSandboxes},
    drive::Drive,
    guest::Guests,
    reclaim::{Clockwork, CycleReport},
    runs::{Runs, look_wait},
};

/// What the governor is made of.
#[derive(Debug)]
pub struct GovernorParts<P> {
    /// Where the books are kept.
    pub books: KeptBooks,
    /// Where the logs of runs are kept.
    pub runs: KeptRuns,
    /// What runs the sandboxes.
    pub platform: P,
    /// The numbers.
    pub rules: Rules,
    /// Where names come from.
    pub entropy: Arc<dyn Entropy>,
}

#[derive(Debug)]
pub(crate) struct Shared<P> {
    pub(crate) drive: Drive<P>,
    pub(crate) clockwork: Clockwork,
    pub(crate) replica: ReplicaId,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) direct: Direct,
    pub(crate) logs: KeptRuns,
    pub(crate) runs: Arc<Runs>,
}

/// The governor of this process. Cheap to clone.
#[derive(Debug)]
pub struct Governor<P> {
    pub(crate) shared: Arc<Shared<P>>,
}

impl<P> Clone for Governor<P> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
        }
    }
}

/// A name that no other process and no other request has.
pub(crate) fn fresh<T: std::str::FromStr>(kind: &str, entropy: &dyn Entropy) -> Option<T> {
    format!("{kind}-{}", SandboxId::generate(entropy))
        .parse()
        .ok()
}

impl<P: Platform + DirectSandboxes + Guests + 'static> Governor<P> {
    /// Looks every cycle, at sandboxes and at runs, until the returned handle is aborted.
    #[must_use]
    pub fn start(&self) -> tokio::task::JoinHandle<()> {
        let governor = self.clone();
        tokio::spawn(async move {
            let reclaiming = governor.shared.clone().keep_reclaiming();
            tokio::join!(reclaiming, governor.keep_adopting_runs());
        })
    }

    /// The holder is alive.
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn heartbeat(
        &self,
        bucket: Bucket,
        owner: OwnerId,
        lease: LeaseId,
        generation: Generation,
    ) -> Result<Answer, StoreError> {
        let beat = |ends_at| Verb::Heartbeat {
            bucket: bucket.clone(),
            owner: owner.clone(),
            lease: lease.clone(),
            generation,
            ends_at,
        };
        let answer = self.step(beat(None)).await?;
        let Answer::Granted(grant) = &answer else {
            return Ok(answer);
        };
        let extended = self.extended(&grant.sandbox, generation).await;
        match extended {
            Some(ends_at) => self.step(beat(Some(ends_at))).await,
            None => Ok(answer),
        }
    }

    /// Where the life of a sandbox ends now that its holder was heard, if its platform has it end.
    pub(crate) async fn extended(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
    ) -> Option<Timestamp> {
        let patience = look_wait(self.rules());
        let extend = self.shared.drive.platform.extend(sandbox, generation);
        match tokio::time::timeout(patience, extend).await {
            Ok(Ok(ends_at)) => ends_at,
            // The next beat tries again.
            Ok(Err(error)) => {
                tracing::warn!(%error, %sandbox, "the life of a sandbox was not extended");
                None
            }
            Err(_) => None,
        }
    }
}

impl Governor<DeployedPlatform> {
    /// Who knows the templates that sandboxes are made from.
    #[must_use]
    pub fn templates(&self) -> TemplatesOf {
        self.shared.drive.platform.templates()
    }
}

impl<P: Platform + DirectSandboxes + 'static> Governor<P> {
    /// A governor that does nothing by itself yet. `None` never happens: its name is well-formed.
    #[must_use]
    pub fn new(parts: GovernorParts<P>) -> Option<Self> {
        let shared = Shared {
            clockwork: Clockwork::new(&parts.rules),
            drive: Drive::new(parts.books, parts.platform, parts.rules),
            replica: fresh("replica", parts.entropy.as_ref())?,
            entropy: parts.entropy,
            direct: Direct::default(),
            logs: parts.runs,
            runs: Arc::default(),
        };
        Some(Self {
            shared: Arc::new(shared),
        })
    }

    /// The numbers.
    #[must_use]
    pub fn rules(&self) -> &Rules {
        &self.shared.drive.rules
    }

    pub(crate) async fn step(&self, verb: Verb) -> Result<Answer, StoreError> {
        Ok(self.shared.drive.books.step(verb).await?.answer)
    }

    /// A sandbox for a lease: the owner's own, or a new one (R-G6). Goes on when the caller hangs up.
    pub async fn acquire(
        &self,
        bucket: Bucket,
        owner: OwnerId,
        lease: LeaseId,
        template: TemplateId,
        ttl: Option<std::time::Duration>,
    ) -> Outcome {
        let rebuilds = self.rules().settings().rebuilds_max as usize;
        let entropy = self.shared.entropy.as_ref();
        let slots = (0..=rebuilds)
            .filter_map(|_| fresh("slot", entropy))
            .collect();
        let request = Request {
            slots,
            bucket,
            owner,
            lease,
            template,
            ttl,
        };
        let shared = self.shared.clone();
        let task = Acquire::new(request, shared.replica.clone(), shared.drive.rules.clone());
        let work = tokio::spawn(async move {
            let outcome = shared.drive.carry_out(task).await;
            // A sandbox that was not fit for use is condemned by now.
            shared.drive.urge.notify_one();
            outcome
        });
        work.await
            .unwrap_or(Outcome::Unavailable("the request failed inside the server"))
    }

    /// A name for a lease whose caller has none.
    #[must_use]
    pub fn new_lease(&self) -> Option<LeaseId> {
        fresh("lease", self.shared.entropy.as_ref())
    }

    /// The holder is done (R-G7). The sandbox is removed after this returns.
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn release(
        &self,
        bucket: Bucket,
        owner: OwnerId,
        lease: LeaseId,
    ) -> Result<Answer, StoreError> {
        let answer = self
            .step(Verb::Release {
                bucket,
                owner,
                lease,
            })
            .await?;
        self.shared.drive.urge.notify_one();
        Ok(answer)
    }

    /// Sets what a bucket may have and keeps (R-G4, R-G13).
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn set_bucket(&self, bucket: Bucket, policy: BucketPolicy) -> Result<(), StoreError> {
        self.step(Verb::SetBucket { bucket, policy }).await?;
        Ok(())
    }

    /// Everything.
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn view(&self) -> Result<View, StoreError> {
        match self.step(Verb::Read).await? {
            Answer::Books(view) => Ok(*view),
            _ => Err(StoreError::NoAnswer),
        }
    }

    /// Why a sandbox lives, or who ended it (R-G17), and where it counts; `None` if nothing is known.
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn explain(
        &self,
        sandbox: &SandboxId,
    ) -> Result<Option<(Bucket, Explanation)>, StoreError> {
        let view = self.view().await?;
        let trail = self.shared.drive.books.trail(sandbox).await?;
        let record = view
            .records
            .iter()
            .find(|r| r.sandbox.as_ref() == Some(sandbox));
        let Some(record) = record else {
            let bucket = trail.last().map(|entry| entry.bucket.clone());
            let told = explain_gone(sandbox.clone(), &trail);
            return Ok(bucket.zip(told));
        };
        Ok(Some((
            record.bucket.clone(),
            self.explain_record(record, sandbox, &view, &trail),
        )))
    }

    fn explain_record(
        &self,
        record: &Record,
        sandbox: &SandboxId,
        view: &View,
        trail: &[Audit],
    ) -> Explanation {
        let seen = match (record.paused_since, record.seen_at) {
            (Some(_), _) => Seen::Paused,
            (None, Some(_)) => Seen::Running,
            (None, None) => Seen::Unknown,
        };
        let retention = view.buckets.get(&record.bucket).map(|p| p.retention);
        let (sandbox, retention) = (sandbox.clone(), retention.unwrap_or_default());
        explain_living(
            record,
            sandbox,
            seen,
            retention,
            trail,
            self.rules(),
            view.now,
        )
    }

    /// What a reclaimer round would do now. It marks and does nothing; `None` if there is no evidence.
    pub async fn dry_run(&self) -> Option<CycleReport> {
        self.shared.dry_run().await
    }

    /// A reclaimer round by hand. It counts as a cycle only if the last is long enough ago.
    pub async fn cycle(&self) -> Option<CycleReport> {
        let shared = self.shared.clone();
        tokio::spawn(async move { shared.round().await })
            .await
            .ok()
            .flatten()
    }

    /// What the last round said.
    #[must_use]
    pub fn last_cycle(&self) -> Option<CycleReport> {
        self.shared.clockwork.last()
    }

    /// Which kinds of writes the circuit breaker holds back.
    #[must_use]
    pub fn held_back(&self) -> Vec<CallKind> {
        self.shared.drive.held_back()
    }
}
