//! How a sandbox is removed, from every state (R-L8).
//!
//! ```text
//!  record (killing) ─▶ processes ─▶ network ─▶ tombstone ─▶ directory
//! ```
//!
//! Every step is idempotent, so a removal that was cut short anywhere is simply done again. The
//! directory goes last: while anything is left, it is there to be found.

use std::{fs, io};

use sandhold_engine::{EngineError, InstanceStatus};
use sandhold_network::NetworkError;
use sandhold_types::{Deadline, Incarnation, SandboxId};

use crate::{
    layout::Durability,
    node::{Dependencies, off_thread},
    record::Record,
};

/// Which step of a removal failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RemoveError {
    /// Its processes could not be removed.
    #[error("could not remove its processes")]
    Engine(#[from] EngineError),
    /// The engine said that it was removed, and its processes run.
    #[error("its processes still run after their removal")]
    StillThere,
    /// Its network could not be removed.
    #[error("could not remove its network")]
    Network(#[from] NetworkError),
    /// Its files could not be removed, or its end not be written down.
    #[error("could not {step}")]
    Files {
        /// What was being done.
        step: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Removes everything of the sandbox and leaves a tombstone. `record` says how it ended.
pub(crate) async fn remove(
    dependencies: &Dependencies,
    record: &Record,
    deadline: Deadline,
) -> Result<(), RemoveError> {
    remove_resources(dependencies, &record.id, record.incarnation, deadline).await?;
    let tombstone = dependencies
        .layout
        .ended()
        .join(format!("{}.json", record.id));
    let buried = record.clone();
    let write = move || buried.write(&tombstone, Durability::Process);
    files("write down its end", write).await?;
    dependencies.faults.reach("remove.tombstone");
    remove_directory(dependencies, &record.id).await?;
    dependencies.faults.reach("remove.directory");
    Ok(())
}

/// Removes processes and network of a sandbox of which perhaps nothing else is known.
pub(crate) async fn remove_resources(
    dependencies: &Dependencies,
    id: &SandboxId,
    incarnation: Incarnation,
    deadline: Deadline,
) -> Result<(), RemoveError> {
    remove_life(dependencies, id, incarnation, deadline).await?;
    dependencies.network.detach(id).await?;
    dependencies.faults.reach("remove.network");
    Ok(())
}

/// Removes the processes of one life; the sandbox's network stays, another life may have it.
pub(crate) async fn remove_life(
    dependencies: &Dependencies,
    id: &SandboxId,
    incarnation: Incarnation,
    deadline: Deadline,
) -> Result<(), RemoveError> {
    let instance = dependencies.layout.instance(id, incarnation);
    dependencies.engine.remove(&instance, deadline).await?;
    // An engine's word is not proof (R-L8: success means gone).
    if dependencies.inspect(&instance).await? == InstanceStatus::Running {
        return Err(RemoveError::StillThere);
    }
    let directory = instance.directory;
    files("remove its life's directory", move || {
        gone(fs::remove_dir_all(directory))
    })
    .await?;
    dependencies.faults.reach("remove.engine");
    Ok(())
}

/// What is not there any more need not be removed.
fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes a sandbox's directory; idempotent.
pub(crate) async fn remove_directory(
    dependencies: &Dependencies,
    id: &SandboxId,
) -> Result<(), RemoveError> {
    let directory = dependencies.layout.sandbox(id);
    files("remove its directory", move || {
        gone(fs::remove_dir_all(directory))
    })
    .await
}

async fn files(
    step: &'static str,
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> Result<(), RemoveError> {
    let done = off_thread(work).await;
    done.map_err(|source| RemoveError::Files { step, source })
}
