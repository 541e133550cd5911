//! Where the sandboxes of builds run, and clearing away those of a process that is gone.

use std::{io, path::Path};

use async_trait::async_trait;

use crate::{
    durable::Wait,
    oven::{self, Oven},
    shelf::Shelf,
};

/// Where, in a catalogue's directory, the sandboxes of its builds have theirs.
pub const INSTANCES: &str = "baking";

/// Where the sandboxes of builds run. Opened by whoever has the building lock.
#[async_trait]
pub trait Kitchens: Send + Sync + std::fmt::Debug {
    /// Opens the kitchen of a catalogue.
    ///
    /// # Errors
    /// What the machine lacks.
    async fn open(
        &self,
        catalogue: &Path,
    ) -> Result<Box<dyn Kitchen>, Box<dyn std::error::Error + Send + Sync>>;
}

/// An open kitchen.
pub trait Kitchen: Send + Sync {
    /// Its oven.
    fn oven(&self) -> Oven<'_>;
}

/// Removes what builds of an earlier process left running. Before the catalogue in `directory` is
/// opened, because what they run may still write to what is cleared then.
///
/// # Errors
/// The directory cannot be looked at, the kitchen not opened, or something not removed.
pub async fn clear_interrupted(
    directory: &Path,
    kitchens: &dyn Kitchens,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    if !directory.is_dir() {
        return Ok(());
    }
    // Another builder is at work, and what is there is its own.
    let Some(_lock) = Shelf::new(directory).lock_building(Wait::Never)? else {
        return Ok(());
    };
    let left = match directory.join(INSTANCES).read_dir() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        listing => listing?.next().is_some(),
    };
    if left {
        let kitchen = kitchens.open(directory).await?;
        oven::clear_left_overs(&kitchen.oven()).await?;
    }
    Ok(())
}
