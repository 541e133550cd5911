//! Baking: a root file system is booted once, warmed, and its memory captured (architecture,
//! decision 4).
//!
//! ```text
//!   start ─▶ /ready until 204 ─▶ /quiesce ─▶ capture(stop) ─▶ clean up
//!      └──────────┴──────────────────┴── any failure ────────────┘
//! ```
//!
//! Invariant: whatever way a bake ends, its instance and its network are removed.

use std::path::Path;

use sandhold_agent_proto::control::PATH_QUIESCE;
use sandhold_engine::AfterCapture;
use sandhold_types::Token;

use crate::{
    oven::{BakeError, Boot, Oven, RootUse, Running, engine_failed},
    progress::{Event, Progress, Stage},
};

/// Bakes into `image`, made by the engine, and returns the control token that the agent in it
/// expects.
///
/// # Errors
/// The step that failed. Nothing of the sandbox is left.
pub(crate) async fn bake(
    oven: &Oven<'_>,
    boot: &Boot<'_>,
    image: &Path,
    progress: &dyn Progress,
) -> Result<Token, BakeError> {
    let running = Running::prepare(oven, RootUse::Kept)?;
    let baked = warm_and_capture(&running, boot, image, progress).await;
    let cleaned = running.clean_up().await;
    // The first failure is the reason; a failed clean-up is told when nothing else went wrong.
    baked.and(cleaned).map(|()| running.token)
}

async fn warm_and_capture(
    running: &Running<'_>,
    boot: &Boot<'_>,
    image: &Path,
    progress: &dyn Progress,
) -> Result<(), BakeError> {
    progress.report(Event::Begin { stage: Stage::Warm });
    running.start(boot, progress).await?;
    progress.report(Event::Begin {
        stage: Stage::Capture,
    });
    let deadline = running.deadline();
    running.ask(PATH_QUIESCE, Vec::new(), deadline).await?;
    let captured = running
        .engine
        .capture(&running.instance, image, AfterCapture::Stop, deadline)
        .await;
    captured.map_err(engine_failed("capture the warm sandbox"))
}
