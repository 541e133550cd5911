//! The procedures: in which order the effects happen, and what every answer leads to.
//!
//! A task is a state machine that wants exactly one effect at a time. Between any two effects its
//! replica may die; what is left is what the books and the platform say, and the reclaimer finishes
//! it. So no task ever needs to be resumed, and none may conclude anything from the lack of an answer.
//!
//! ```text
//!   driver:  effect = task.step(Begin)
//!            loop { input = carry out effect; effect = task.step(input) }  until Done
//! ```

mod acquire;
mod cycle;
mod removal;
mod run;

use std::time::Duration;

pub use acquire::{Acquire, Request};
pub use cycle::{Adoption, Cycle, MakingSettlement, Settlement, Urge};
pub use removal::{Removal, RemovalOf};
pub use run::{RunEvent, RunLoop, RunOf, WayOut};
use sandhold_types::{Generation, Timestamp};

use crate::{
    books::{Answer, Grant, Limit, RemovalRefused, Verb, View},
    ids::SlotId,
    ports::{Call, CallError, Reply, StoreError},
    reclaimer::Evidence,
};

/// What a task wants next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// One step on the books.
    Store(Verb),
    /// One call to the platform, through the valve.
    Platform(Call),
    /// Time to pass.
    Sleep(Duration),
    /// Something to tell the caller of a run; goes on at once.
    Emit(RunEvent),
    /// It is over.
    Done(Outcome),
}

/// What a task is told.
#[derive(Debug, Clone)]
pub enum Input {
    /// Begin; or the time has passed; or the event was told.
    Go,
    /// The store's answer.
    Store(Result<Answer, StoreError>),
    /// The platform's answer.
    Platform(Result<Reply, CallError>),
}

/// How a task ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The caller has a sandbox.
    Leased {
        /// Its lease.
        grant: Grant,
        /// Whether it had it before.
        reused: Reused,
    },
    /// No room within the time to wait (R-G4). Retryable.
    CapacityExceeded(Limit),
    /// The lease is sealed (R-G7).
    Stale {
        /// The current generation of the owner.
        current: Option<Generation>,
    },
    /// It could not be made, or nobody answered; retryable, and nothing was handed out.
    Unavailable(&'static str),
    /// The sandbox is gone and its slot free.
    Gone,
    /// It is not gone yet; the next round goes on.
    NotYet(&'static str),
    /// It must not be removed.
    Refused(RemovalRefused),
    /// The round's evidence.
    Evidence(Box<Evidence>),
    /// The books between two rounds, for [`crate::reclaimer::Reclaimer::urge`].
    Urgent(Box<View>),
    /// It is as it is; noted.
    Settled,
    /// The run is over.
    RunEnded {
        /// How.
        way_out: WayOut,
        /// The slot whose sandbox is to be removed now, if the run kept nothing.
        remove: Option<SlotId>,
    },
}

/// Whether the caller's owner had the sandbox before (R-G6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reused {
    /// It did.
    Yes,
    /// It was made for this request.
    No,
}

/// A state machine that wants one effect at a time.
pub trait Task: std::fmt::Debug {
    /// Takes the answer to the last effect and says what comes next. `now` is the local clock.
    fn step(&mut self, input: Input, now: Timestamp) -> Effect;
}
