//! When a snapshot that nobody deletes goes (R-T5): a pure rule.

use std::{collections::BTreeSet, time::Duration};

use sandhold_platform::SnapshotKind;
use sandhold_types::{SnapshotId, Timestamp};

use super::Snapshot;

/// How long a snapshot without a name is kept after nothing refers to it. SDKs that copy sandboxes
/// by themselves forget theirs (wire contract 1.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retention {
    /// Until somebody deletes it.
    ForEver,
    /// This long.
    For(Duration),
}

impl Default for Retention {
    fn default() -> Self {
        const DAYS: u64 = 30;
        Self::For(Duration::from_secs(DAYS * 24 * 3600))
    }
}

/// Whether nothing keeps a snapshot any more. `referred` are those that a living sandbox stands on.
pub(super) fn may_go(
    snapshot: &Snapshot,
    referred: &BTreeSet<SnapshotId>,
    retention: Retention,
    now: Timestamp,
) -> bool {
    let Retention::For(kept) = retention else {
        return false;
    };
    // Temporary ones end with the copies that they are for, however long those take.
    snapshot.kind == SnapshotKind::Kept
        && snapshot.names.is_empty()
        && !referred.contains(&snapshot.id)
        && now.since(snapshot.taken_at) >= kept
}
