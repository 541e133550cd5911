//! Carries out what the governor's tasks want: one effect after the other, against kept books and a
//! real platform.
//!
//! ```text
//!   routes ─▶ Governor ─▶ drive: task ⇄ books (KeptBooks)
//!                │              task ⇄ valve ⇄ platform (this process's node, or a service elsewhere)
//!                ├─▶ runs: RunLoop ⇄ books, the agent in the sandbox ─▶ log ─▶ readers
//!                └─▶ reclaim: every cycle, and when urged: look, plan, work side by side
//! ```
//!
//! Owns: the order in which effects are awaited, the valve of this replica, the reclaimer's clockwork.
//! Decides nothing: rules, verbs and tasks are in [`sandhold_governor`]. A task that began goes on
//! when its caller hangs up, so that no answer of the platform is lost without need.
//!
//! Never: HTTP, tenants' keys, a lock held across an await.

#![forbid(unsafe_code)]

mod deployed;
mod direct;
mod drive;
mod fences;
mod governor;
mod guest;
mod http;
mod local;
mod reclaim;
mod runs;

pub use crate::{
    deployed::{DeployedPlatform, TemplatesOf},
    direct::{Admitted, DirectSandbox, DirectSandboxes},
    governor::{Governor, GovernorParts},
    guest::{GuestAnswer, GuestRequest, Guests, Reading},
    http::{HttpPlatform, HttpPlatformError, HttpPlatformSettings, TrustError},
    local::{LocalPlatform, MANAGED_BY, Metadata, ends_at},
    reclaim::CycleReport,
    runs::{
        Cancelled, GLOB_BYTES_MAX, GLOBS_MAX, GlobError, Globs, RUNS_MAX, RunAsk, RunEnd, RunFile,
        RunHead, RunInfo, RunPlace, RunRefused,
    },
};
