//! What the books say about one sandbox: whose it is, what keeps it alive, how it is ending.
//!
//! One record is one slot. There is no counter beside the records, so a count cannot differ from
//! its recount; what can differ is the platform, and that is what the reclaimer settles.
//!
//! ```text
//!              bind                    condemn                    confirmed gone
//!   making ───────────▶ alive ───────────────────▶ condemned ───────────────────▶ (no record)
//!     │  roots: making, lease, run, lock             one way; never handed out again
//!     └── create failed: the record goes at once
//! ```

use std::time::Duration;

use sandhold_types::{Generation, SandboxId, TemplateId, Timestamp};

use crate::ids::{Bucket, LeaseId, OwnerId, ReplicaId, RunId, SlotId};

/// Who answers for the end of a sandbox (R-G19).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Managed {
    /// The governor made it and sweeps it.
    ByGovernor,
    /// Made with an SDK; its own lifetime is its root. Only the fallback and the recount end it.
    Directly,
}

/// A lease in force (R-G6).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Holding {
    /// The caller's name for this generation.
    pub lease: LeaseId,
    /// What the sandbox was made from.
    pub template: TemplateId,
    /// How long one heartbeat keeps it black.
    pub ttl: Duration,
    /// The last heartbeat, by the store's clock.
    pub heartbeat_at: Timestamp,
}

/// A run that uses the sandbox (R-G3).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RunRoot {
    /// Which.
    pub run: RunId,
    /// The replica that executes it.
    pub replica: ReplicaId,
    /// The last heartbeat, by the store's clock.
    pub heartbeat_at: Timestamp,
    /// Somebody asked for its end.
    pub cancelled: bool,
}

/// Somebody is doing something with the sandbox that must not be cut short.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OperationLock {
    /// The replica that does it.
    pub by: ReplicaId,
    /// Since when, by the store's clock.
    pub taken_at: Timestamp,
}

/// Why a sandbox is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ground {
    /// Its owner released it, by the matching lease (R-G7), or its run is over.
    Released,
    /// It was made and never used: create, health gate or binding failed (R-G9).
    NeverUsed,
    /// Its owner asked for another template (R-G6).
    Replaced,
    /// White in two confirmed cycles (R-G10).
    White,
    /// Leased but paused for longer than its bucket retains (R-G13).
    Retention,
    /// Past its end by more than the grace (R-G12).
    Overdue,
}

impl Ground {
    /// In words, as the object of "because".
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Released => "its owner released it",
            Self::NeverUsed => "it was never put to use",
            Self::Replaced => "its owner asked for another template",
            Self::White => "nothing has kept it alive in two confirmed cycles",
            Self::Retention => "it was paused for longer than its bucket retains",
            Self::Overdue => "it is long past its end",
        }
    }
}

/// The decision that a sandbox goes. It is never taken back: a delete without an answer may still
/// be carried out much later, and must find nobody inside.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Condemned {
    /// Since when, by the store's clock.
    pub at: Timestamp,
    /// Why.
    pub ground: Ground,
    /// The generation that was condemned.
    pub generation: Generation,
    /// Deletes that did not succeed.
    pub failures: u32,
    /// It was woken in order to be deleted (R-G16).
    pub awake: bool,
}

/// Who is making the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Making {
    /// The replica.
    pub maker: ReplicaId,
    /// Since when, by the store's clock.
    pub since: Timestamp,
}

/// Whether a record fills a place in its bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Counted {
    /// It does.
    Yes,
    /// Its account was released although it could not be deleted (R-G12), or it was found when
    /// its bucket was full. It is removed all the same.
    No,
}

/// One slot and the sandbox in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Record {
    /// Its name; also in the sandbox's metadata.
    pub slot: SlotId,
    /// Where it counts.
    pub bucket: Bucket,
    /// Whose it is.
    pub owner: OwnerId,
    /// Who answers for its end.
    pub managed: Managed,
    /// The newest generation that was granted on it.
    pub generation: Generation,
    /// Who makes it, until it is bound.
    pub making: Option<Making>,
    /// The sandbox, once it is bound.
    pub sandbox: Option<SandboxId>,
    /// The lease in force.
    pub holding: Option<Holding>,
    /// The run in it.
    pub run: Option<RunRoot>,
    /// The operation under way.
    pub lock: Option<OperationLock>,
    /// Its end is decided.
    pub condemned: Option<Condemned>,
    /// When its life is over; the far future if it has no end of its own.
    pub ends_at: Timestamp,
    /// Since when it has been seen paused, by the store's clock. Whether that still says anything:
    /// [`Record::paused_unheard_since`].
    pub paused_since: Option<Timestamp>,
    /// When the platform last confirmed that it is there, by the store's clock.
    pub seen_at: Option<Timestamp>,
    /// Whether it fills a place.
    pub counted: Counted,
}

impl Record {
    /// Since when its end is overdue: its own end, or the decision to remove it.
    #[must_use]
    pub fn due_at(&self) -> Timestamp {
        match &self.condemned {
            Some(condemned) => self.ends_at.min(condemned.at),
            None => self.ends_at,
        }
    }

    /// Since when it has been seen paused and its holder has not been heard (R-G13). A holder that was
    /// heard may have woken it, so a pause that was seen before proves nothing about afterwards, until
    /// it is seen again.
    #[must_use]
    pub fn paused_unheard_since(&self) -> Option<Timestamp> {
        let heard = self.holding.as_ref().map(|h| h.heartbeat_at);
        let seen = self.paused_since?;
        heard.is_none_or(|heard| seen > heard).then_some(seen)
    }

    /// Whether it fills a place in its bucket.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.counted == Counted::Yes
    }
}
