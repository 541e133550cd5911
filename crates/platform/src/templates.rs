//! Templates, as those who serve callers see them.

use std::sync::Arc;

use async_trait::async_trait;
use sandhold_types::{BuildId, Namespace, Resources, TemplateId, Timestamp};

use crate::PlatformError;

/// A template that sandboxes can be made from.
#[derive(Debug, Clone)]
pub struct TemplateView {
    /// Its identifier.
    pub id: TemplateId,
    /// Its current build.
    pub build: BuildId,
    /// Names it can be asked for by, the main one first.
    pub names: Vec<String>,
    /// The tenant it belongs to; `None` for those that ship with the platform and serve everybody.
    pub owner: Option<Namespace>,
    /// Limits of sandboxes made from it.
    pub resources: Resources,
    /// When the current build was finished.
    pub built_at: Timestamp,
    /// Bytes on disk: root file system and warm image.
    pub size_bytes: u64,
    /// Whether a warm memory image is there, so that a sandbox is born ready.
    pub warm: Warmth,
}

/// Whether a template holds a memory image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warmth {
    /// Sandboxes are restored from it.
    Warm,
    /// Sandboxes are booted.
    Cold,
}

/// The template catalogue.
#[async_trait]
pub trait Templates: Send + Sync + std::fmt::Debug {
    /// The template that `reference` (an ID, a name or `name:tag`) means to this tenant.
    fn resolve(&self, namespace: &Namespace, reference: &str) -> Option<Arc<TemplateView>>;

    /// All that this tenant can use, by name.
    fn list(&self, namespace: &Namespace) -> Vec<Arc<TemplateView>>;

    /// Removes a template of this tenant. Sandboxes made from it live on; its bytes go when the
    /// last of them is gone.
    ///
    /// # Errors
    /// Unknown, or not this tenant's to delete.
    async fn delete(&self, namespace: &Namespace, reference: &str) -> Result<(), PlatformError>;
}
