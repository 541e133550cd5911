//! Sandboxes that are made directly, with an SDK: one set of books for all (R-G19).
//!
//! ```text
//!   create: slot in the bucket of its key ─▶ the node makes it ─┬─ made ──▶ bound, named
//!                                                               └─ not ───▶ the slot goes back
//!   delete: gone ─▶ the slot is free at once
//!   each round, and whenever somebody waits: gone by itself ─▶ free · lifetime moved ─▶ noted
//!                                            unknown in two rounds ─▶ counted
//! ```
//!
//! Their own lifetime is their root; the governor never sweeps them, but for the overdue fallback.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use sandhold_governor::{
    Platform, Store, StoreError,
    books::{Answer, BucketPolicy, Claim, GoneEvidence, Verb},
    colour::Retention,
    ids::{Bucket, SlotId},
    record::{Managed, Record},
};
use sandhold_types::{Generation, SandboxId, Timestamp};

use crate::{
    drive::Drive,
    governor::{Governor, Shared, fresh},
};

/// What a bucket may have as long as nobody sets it (R-G4: quotas differ by env).
const DEFAULT_QUOTAS: [(&str, u32); 3] = [("prod", 2_000), ("staging", 1_000), ("dev", 1_000)];
const DEFAULT_QUOTA: u32 = 1_000;

/// A sandbox that the governor did not make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectSandbox {
    /// Which.
    pub sandbox: SandboxId,
    /// The bucket of the key that made it.
    pub bucket: Bucket,
    /// When its life ends; the far future if that is a pause.
    pub ends_at: Timestamp,
}

/// A platform that also runs sandboxes that the governor did not make. It is of this process, so what
/// it says is so: what it does not show is gone.
pub trait DirectSandboxes: Send + Sync {
    /// All of them that are alive.
    fn living(&self) -> Vec<DirectSandbox>;
}

/// What became of a request for a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admitted {
    /// It is taken: make the sandbox, then bind it, or give it back.
    Slot {
        /// Its name.
        slot: SlotId,
        /// The generation.
        generation: Generation,
    },
    /// It is not.
    Refused(Answer),
}

/// What is remembered between two rounds.
#[derive(Debug, Default)]
pub(crate) struct Direct {
    /// Alive and without a record at the last round.
    unknown: Mutex<BTreeSet<SandboxId>>,
}

/// What a look may conclude.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// A round of the reclaimer: what is unknown in two of them is counted.
    Round,
    /// Somebody waits: only what is gone is of interest. One that was just made may be about to be
    /// bound.
    BetweenRounds,
}

/// The policy of a bucket that nobody has set.
fn default_policy(bucket: &Bucket) -> BucketPolicy {
    let known = DEFAULT_QUOTAS
        .iter()
        .find(|(env, _)| *env == bucket.env.as_str());
    let quota = known.map_or(DEFAULT_QUOTA, |(_, quota)| *quota);
    BucketPolicy::new(quota, Retention::Undeclared)
}

fn claim(
    slot: &SlotId,
    bucket: &Bucket,
    maker: &sandhold_governor::ids::ReplicaId,
) -> Option<Verb> {
    Some(Verb::Acquire {
        slot: slot.clone(),
        bucket: bucket.clone(),
        // Whose it is only its identifier can tell; binding it sets that.
        owner: bucket.owner_of_direct(slot.as_str()).ok()?,
        claim: Claim::Direct,
        maker: maker.clone(),
    })
}

impl<P: Platform> Drive<P> {
    async fn gone(&self, slot: SlotId, sandbox: SandboxId) -> Result<(), StoreError> {
        let verb = Verb::ConfirmGone {
            slot,
            sandbox,
            evidence: GoneEvidence::NotFound,
        };
        self.books.step(verb).await?;
        Ok(())
    }

    async fn bind(
        &self,
        slot: SlotId,
        generation: Generation,
        sandbox: SandboxId,
        ends_at: Timestamp,
    ) -> Result<Answer, StoreError> {
        let verb = Verb::Bind {
            slot,
            generation,
            sandbox,
            ends_at,
        };
        Ok(self.books.step(verb).await?.answer)
    }
}

impl<P: Platform + DirectSandboxes + 'static> Shared<P> {
    async fn direct_records(&self) -> Result<Vec<Record>, StoreError> {
        let Answer::Books(view) = self.drive.books.step(Verb::Read).await?.answer else {
            return Err(StoreError::NoAnswer);
        };
        let direct = |r: &Record| r.managed == Managed::Directly;
        Ok(view.records.into_iter().filter(direct).collect())
    }

    /// Makes the books say what this process's node says of direct sandboxes.
    pub(crate) async fn follow_direct(&self, look: Look) {
        if let Err(error) = self.try_follow_direct(look).await {
            tracing::warn!(%error, "direct sandboxes could not be noted");
        }
    }

    async fn try_follow_direct(&self, look: Look) -> Result<(), StoreError> {
        // The books first: whatever they know was alive then, or is gone.
        let records = self.direct_records().await?;
        let living: BTreeMap<_, _> = {
            let living = self.drive.platform.living();
            living.into_iter().map(|d| (d.sandbox.clone(), d)).collect()
        };
        let mut unknown: BTreeSet<SandboxId> = living.keys().cloned().collect();
        for record in records {
            let Some(sandbox) = record.sandbox else {
                continue;
            };
            unknown.remove(&sandbox);
            match living.get(&sandbox) {
                None => self.drive.gone(record.slot, sandbox).await?,
                Some(direct) if direct.ends_at != record.ends_at => {
                    let (slot, generation) = (record.slot, record.generation);
                    self.drive
                        .bind(slot, generation, sandbox, direct.ends_at)
                        .await?;
                }
                Some(_) => {}
            }
        }
        if look == Look::BetweenRounds {
            return Ok(());
        }
        let twice: Vec<SandboxId> = {
            let seen = &self.direct.unknown;
            let mut before = seen.lock().unwrap_or_else(PoisonError::into_inner);
            let twice = before.intersection(&unknown).cloned().collect();
            *before = unknown;
            twice
        };
        for sandbox in twice {
            if let Some(direct) = living.get(&sandbox) {
                self.count(direct).await?;
            }
        }
        Ok(())
    }

    /// One that has no record: it was made before there were books, or they forgot it.
    async fn count(&self, direct: &DirectSandbox) -> Result<(), StoreError> {
        let slot: Option<SlotId> = fresh("direct", self.entropy.as_ref());
        let Some(slot) = slot else {
            return Ok(());
        };
        match self.admit_once(&slot, &direct.bucket).await? {
            Answer::MakeSandbox { slot, generation } => {
                let (sandbox, ends_at) = (direct.sandbox.clone(), direct.ends_at);
                self.drive.bind(slot, generation, sandbox, ends_at).await?;
            }
            other => {
                tracing::warn!(sandbox = %direct.sandbox, answer = ?other, "a sandbox is not counted");
                self.drive.books.step(Verb::LeaveQueue { slot }).await?;
            }
        }
        Ok(())
    }

    /// Asks once. A bucket that nobody has set gets the default of its env.
    async fn admit_once(&self, slot: &SlotId, bucket: &Bucket) -> Result<Answer, StoreError> {
        let Some(verb) = claim(slot, bucket, &self.replica) else {
            return Ok(Answer::Unknown);
        };
        let answer = self.drive.books.step(verb.clone()).await?.answer;
        if answer != Answer::UnknownBucket {
            return Ok(answer);
        }
        self.set_default(bucket).await?;
        Ok(self.drive.books.step(verb).await?.answer)
    }

    async fn set_default(&self, bucket: &Bucket) -> Result<(), StoreError> {
        let policy = default_policy(bucket);
        let bucket = bucket.clone();
        self.drive
            .books
            .step(Verb::SetBucket { bucket, policy })
            .await?;
        Ok(())
    }
}

impl<P: Platform + DirectSandboxes + 'static> Governor<P> {
    /// Sets a bucket to the default of its env, if it was never set.
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn ensure_bucket(&self, bucket: &Bucket) -> Result<BucketPolicy, StoreError> {
        if let Some(policy) = self.policy(bucket).await? {
            return Ok(policy);
        }
        self.shared.set_default(bucket).await?;
        Ok(default_policy(bucket))
    }

    /// What a bucket may have and its runs get; `None` if it was never set.
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn policy(&self, bucket: &Bucket) -> Result<Option<BucketPolicy>, StoreError> {
        Ok(self.view().await?.buckets.remove(bucket))
    }

    /// Takes a slot for a sandbox that is made directly: asks until there is room, the time to wait
    /// is over, or `patience` is (R-G4, R-G19).
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn admit_direct(
        &self,
        bucket: &Bucket,
        patience: Duration,
    ) -> Result<Admitted, StoreError> {
        let Some(slot): Option<SlotId> = fresh("direct", self.shared.entropy.as_ref()) else {
            return Ok(Admitted::Refused(Answer::Unknown));
        };
        let mut place = Place {
            governor: self.clone(),
            slot: Some(slot.clone()),
        };
        let until = tokio::time::Instant::now() + patience;
        loop {
            match self.shared.admit_once(&slot, bucket).await? {
                Answer::MakeSandbox { slot, generation } => {
                    place.slot = None;
                    return Ok(Admitted::Slot { slot, generation });
                }
                waiting @ Answer::Waiting { .. } => {
                    if tokio::time::Instant::now() >= until {
                        return Ok(Admitted::Refused(waiting));
                    }
                    // Some may have ended by themselves since the last round.
                    self.shared.follow_direct(Look::BetweenRounds).await;
                    tokio::time::sleep(self.rules().settings().wait_poll).await;
                }
                other => return Ok(Admitted::Refused(other)),
            }
        }
    }

    /// The sandbox of a slot is made.
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn bind_direct(
        &self,
        slot: SlotId,
        generation: Generation,
        sandbox: SandboxId,
        ends_at: Timestamp,
    ) -> Result<Answer, StoreError> {
        self.shared
            .drive
            .bind(slot, generation, sandbox, ends_at)
            .await
    }

    /// Nothing was made: the slot goes back at once (R-G5).
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn give_back(&self, slot: SlotId) -> Result<(), StoreError> {
        let maker = self.shared.replica.clone();
        self.step(Verb::ReturnSlot { slot, maker }).await?;
        Ok(())
    }

    /// This process's node says that a sandbox is gone: its slot is free at once (R-G5).
    ///
    /// # Errors
    /// The books did not answer.
    pub async fn gone(&self, sandbox: &SandboxId) -> Result<(), StoreError> {
        let view = self.view().await?;
        let of = |r: &&Record| r.sandbox.as_ref() == Some(sandbox);
        match view.records.iter().find(of) {
            Some(record) => {
                self.shared
                    .drive
                    .gone(record.slot.clone(), sandbox.clone())
                    .await
            }
            None => Ok(()),
        }
    }
}

/// A place in the queue. Whoever goes away gives it up.
struct Place<P: Platform + DirectSandboxes + 'static> {
    governor: Governor<P>,
    slot: Option<SlotId>,
}

impl<P: Platform + DirectSandboxes + 'static> Drop for Place<P> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            let governor = self.governor.clone();
            // Should this not be carried out, the place is lost after some seconds of silence.
            tokio::spawn(async move { governor.step(Verb::LeaveQueue { slot }).await });
        }
    }
}
