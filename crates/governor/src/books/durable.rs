//! What must be kept of the books, and what a step changed of it.
//!
//! ```text
//!   start:  Kept ──▶ Books::restore
//!   step:   Books::step ──▶ Books::changes ──▶ written down ──▶ Books::written ──▶ answered
//! ```
//!
//! The queue is not kept: whoever waits asks again every second, and whoever asked the process that
//! died has nobody left to be answered by.

use std::collections::BTreeMap;

use sandhold_types::Generation;

use super::{Books, BucketPolicy, Line, Places, Stage, table::Table};
use crate::{
    ids::{Bucket, OwnerId, SlotId},
    record::Record,
    rules::Rules,
};

/// All that must survive a restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// What each bucket may have and keeps.
    pub buckets: BTreeMap<Bucket, BucketPolicy>,
    /// Every slot.
    pub records: BTreeMap<SlotId, Record>,
    /// Every owner's history of leases.
    pub lines: BTreeMap<(Bucket, OwnerId), Line>,
    /// The newest generation ever granted.
    pub newest: Generation,
    /// Whether lost writes are being settled.
    pub stage: Stage,
}

impl Default for Kept {
    fn default() -> Self {
        Self {
            buckets: BTreeMap::new(),
            records: BTreeMap::new(),
            lines: BTreeMap::new(),
            newest: Generation(0),
            stage: Stage::Settled,
        }
    }
}

/// What changed since it was last written down. Everything here is as it is now.
#[derive(Debug)]
pub struct Changes<'a> {
    /// Buckets that were set.
    pub buckets: Vec<(&'a Bucket, &'a BucketPolicy)>,
    /// Slots; `None` is free again.
    pub records: Vec<(&'a SlotId, Option<&'a Record>)>,
    /// Histories of leases.
    pub lines: Vec<(&'a (Bucket, OwnerId), &'a Line)>,
    /// The newest generation ever granted.
    pub newest: Generation,
    /// Whether lost writes are being settled.
    pub stage: Stage,
}

impl Books {
    /// The books as they were kept. The global cap is not among it: it is a setting of whoever runs
    /// them.
    #[must_use]
    pub fn restore(rules: Rules, global_cap: Option<u32>, kept: Kept) -> Self {
        Self {
            rules,
            global_cap,
            buckets: Table::of(kept.buckets),
            waiting: Vec::new(),
            places: Places::recount(kept.records.values()),
            records: Table::of(kept.records),
            lines: Table::of(kept.lines),
            newest: kept.newest,
            stage: kept.stage,
            written: (kept.newest, kept.stage),
        }
    }

    /// What is to be written down before anybody is answered; `None` if there is nothing.
    #[must_use]
    pub fn changes(&self) -> Option<Changes<'_>> {
        let changes = Changes {
            buckets: (self.buckets.touched())
                .filter_map(|(bucket, policy)| Some((bucket, policy?)))
                .collect(),
            records: self.records.touched().collect(),
            lines: (self.lines.touched())
                .filter_map(|(key, line)| Some((key, line?)))
                .collect(),
            newest: self.newest,
            stage: self.stage,
        };
        let nothing = changes.buckets.is_empty()
            && changes.records.is_empty()
            && changes.lines.is_empty()
            && self.written == (self.newest, self.stage);
        (!nothing).then_some(changes)
    }

    /// All of [`Self::changes`] is written down.
    pub fn written(&mut self) {
        self.buckets.forget_touches();
        self.records.forget_touches();
        self.lines.forget_touches();
        self.written = (self.newest, self.stage);
    }
}
