//! Carries out what the governor's tasks want: one effect after the other, against kept books and a
//! real platform.
//!
//! ```text
//!   routes ─▶ Governor ─▶ drive: task ⇄ books (KeptBooks)
//!                │              task ⇄ valve ⇄ platform (LocalPlatform: this process's node)
//!                └─▶ reclaim: every cycle, and when urged: look, plan, work side by side
//! ```
//!
//! Owns: the order in which effects are awaited, the valve of this replica, the reclaimer's clockwork.
//! Decides nothing: rules, verbs and tasks are in [`sandhold_governor`]. A task that began goes on
//! when its caller hangs up, so that no answer of the platform is lost without need.
//!
//! Never: HTTP, tenants' keys, a lock held across an await.

#![forbid(unsafe_code)]

mod direct;
mod drive;
mod governor;
mod local;
mod reclaim;

pub use crate::{
    direct::{Admitted, DirectSandbox, DirectSandboxes},
    governor::{Governor, GovernorParts},
    local::{LocalPlatform, MANAGED_BY, Metadata, ends_at},
    reclaim::CycleReport,
};
