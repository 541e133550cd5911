//! All contexts of the sandbox.
//!
//! ```text
//!   id        -> context      what is listed
//!   "default" -> the default context of Python
//!   family    -> its default context, made when it is first needed
//! ```
//!
//! Invariant: no more than [`CONTEXTS_MAX`], since each has a process (BC-044).

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    context::Context,
    host::KernelHost,
    language::{Family, Language},
};

/// Contexts at one time.
pub(super) const CONTEXTS_MAX: usize = 16;
/// Another name of Python's default context; not listed.
const DEFAULT_ALIAS: &str = "default";

/// The contexts.
#[derive(Debug, Default)]
pub(super) struct Contexts(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    by_id: BTreeMap<String, Arc<Context>>,
    defaults: HashMap<Family, String>,
}

/// Why a context was not made.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ContextError {
    /// There is no kernel for it.
    #[error("language '{language}' is not in this template; it holds: {}", available.join(", "))]
    UnsupportedLanguage {
        language: String,
        available: Vec<String>,
    },
    /// There are too many.
    #[error("there are {CONTEXTS_MAX} contexts already; remove one first")]
    TooMany,
}

impl Contexts {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<Arc<Context>> {
        self.lock().by_id.values().cloned().collect()
    }

    /// The one with this id or alias.
    pub(super) fn find(&self, id: &str) -> Option<Arc<Context>> {
        let table = self.lock();
        match id {
            DEFAULT_ALIAS => table
                .by_id
                .get(table.defaults.get(&Family::Python)?)
                .cloned(),
            id => table.by_id.get(id).cloned(),
        }
    }

    /// Makes one. It has no kernel yet.
    pub(super) fn create(
        &self,
        host: &KernelHost,
        language: Language,
        cwd: PathBuf,
    ) -> Result<Arc<Context>, ContextError> {
        check_language(host, &language)?;
        self.insert(host, language, cwd, false, &mut self.lock())
    }

    /// The default context of the language, made if need be.
    pub(super) fn default_of(
        &self,
        host: &KernelHost,
        language: Language,
        preload: bool,
    ) -> Result<Arc<Context>, ContextError> {
        if let Some(context) = self.existing_default(&language) {
            return Ok(context);
        }
        check_language(host, &language)?;
        let mut table = self.lock();
        // Somebody else may have made it meanwhile.
        if let Some(context) = table.default(&language.family()) {
            return Ok(context);
        }
        let family = language.family();
        let context = self.insert(
            host,
            language,
            host.default_directory(),
            preload,
            &mut table,
        )?;
        table.defaults.insert(family, context.id.clone());
        Ok(context)
    }

    fn existing_default(&self, language: &Language) -> Option<Arc<Context>> {
        self.lock().default(&language.family())
    }

    fn insert(
        &self,
        host: &KernelHost,
        language: Language,
        cwd: PathBuf,
        preload: bool,
        table: &mut Table,
    ) -> Result<Arc<Context>, ContextError> {
        if table.by_id.len() >= CONTEXTS_MAX {
            return Err(ContextError::TooMany);
        }
        let id = uuid_of(host.fresh_bytes());
        let context = Arc::new(Context::new(id.clone(), language, cwd, preload));
        table.by_id.insert(id, Arc::clone(&context));
        Ok(context)
    }

    /// Takes all out of the table; their kernels are the caller's to end.
    pub(super) fn take_all(&self) -> Vec<Arc<Context>> {
        let table = std::mem::take(&mut *self.lock());
        table.by_id.into_values().collect()
    }

    /// Takes one out of the table; its kernel is the caller's to end.
    pub(super) fn remove(&self, id: &str) -> Option<Arc<Context>> {
        let context = self.find(id)?;
        let mut table = self.lock();
        table.defaults.retain(|_, default| *default != context.id);
        table.by_id.remove(&context.id)
    }
}

impl Table {
    fn default(&self, family: &Family) -> Option<Arc<Context>> {
        self.by_id.get(self.defaults.get(family)?).cloned()
    }
}

fn check_language(host: &KernelHost, language: &Language) -> Result<(), ContextError> {
    if host.can_run(&language.family()) {
        return Ok(());
    }
    Err(ContextError::UnsupportedLanguage {
        language: language.as_str().to_owned(),
        available: host.languages(),
    })
}

/// A version 4 UUID of these bytes.
fn uuid_of(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = super::message::hex_of(&bytes);
    [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ]
    .join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_uuids_of_version_4() {
        assert_eq!(uuid_of([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }
}
