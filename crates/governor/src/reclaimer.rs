//! The reclaimer's judgement: two looks, then a plan (R-G10 to R-G13).
//!
//! ```text
//!   every 60 s:  what the books say ┐
//!                what is listed     ┴─▶ Reclaimer::plan ─▶ work: remove · settle · adopt · note
//!                                            │ marks         (each one task, side by side)
//!                                            └ alarms
//! ```
//!
//! Owns: the marks and the listing's history of one replica. Losing them costs two cycles, nothing
//! else; replicas do not share them, and any number may plan at once: the books let one condemn.
//!
//! Invariants: a skipped round marks nothing; a mark is about one generation; what a listing does
//! not show is asked for by name before anything is concluded; one cycle condemns at most a share
//! of all sandboxes. It never writes to the books itself.
//!
//! The driver runs the work side by side, removals at most `deletes_max` at a time; one that waits
//! for its turn has not begun, so it holds no lock and another replica may take it.

mod alarms;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use sandhold_types::{Generation, SandboxId, Timestamp};

use self::alarms::standing_alarms;

use crate::{
    books::{Stage, View},
    colour::{self, Colour, Retention, Seen, Verdict},
    ids::{Bucket, SlotId},
    listing::{Judgement, ListingJudge},
    ports::Listed,
    record::{Ground, Record},
    rules::{Rule, Rules},
};

/// One replica's reclaimer.
#[derive(Debug, Clone)]
pub struct Reclaimer {
    rules: Rules,
    marks: BTreeMap<SlotId, Mark>,
    judge: ListingJudge,
    /// What is still being worked on from rounds before.
    busy: BTreeSet<SlotId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Mark {
    generation: Generation,
    looks: u32,
    looked_at: Timestamp,
}

/// What a round has to go by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evidence {
    /// The store's clock before the listing was asked for.
    pub began_at: Timestamp,
    /// What the platform shows; `None` if the listing failed.
    pub listing: Option<Vec<Listed>>,
    /// The books, read *after* the listing: whatever is listed had its slot by then.
    pub view: View,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Condemn and delete it, or go on deleting it.
    Remove {
        /// Which.
        slot: SlotId,
        /// Its sandbox.
        sandbox: SandboxId,
        /// The generation the decision is about.
        generation: Generation,
        /// Why.
        ground: Ground,
        /// Whether the platform must first say whether it really is paused.
        ask_first: AskFirst,
    },
    /// Ask the platform for it by name: gone, paused or running.
    Settle {
        /// Which.
        slot: SlotId,
        /// Its sandbox.
        sandbox: SandboxId,
    },
    /// Ask the platform for the sandbox of a slot that nobody answers for.
    SettleMaking {
        /// Which.
        slot: SlotId,
    },
    /// Give a sandbox without a record one.
    Adopt(Box<Listed>),
    /// Note that it was seen in another state than before.
    Note {
        /// Which.
        slot: SlotId,
        /// What was seen.
        seen: Seen,
    },
    /// Lost writes are settled.
    FinishRecovery {
        /// The highest generation that any node has seen.
        highest: Generation,
        /// The store's clock before the evidence was gathered.
        settled_from: Timestamp,
    },
}

/// Whether to ask the platform before condemning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskFirst {
    /// The decision depends on whether it is paused.
    Yes,
    /// It does not.
    No,
}

impl Work {
    /// The slot it is about.
    #[must_use]
    pub fn slot(&self) -> Option<&SlotId> {
        match self {
            Self::Remove { slot, .. }
            | Self::Settle { slot, .. }
            | Self::SettleMaking { slot }
            | Self::Note { slot, .. } => Some(slot),
            Self::Adopt(listed) => Some(&listed.slot),
            Self::FinishRecovery { .. } => None,
        }
    }
}

/// What an operator must know (R-G13, issue: alarms).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Alarm {
    /// Paused sandboxes that nobody renews are kept because their bucket declares nothing (R-I8).
    ZombiesKept {
        /// Which bucket.
        bucket: Bucket,
        /// How many.
        count: usize,
        /// For how long the oldest has been paused.
        oldest: Duration,
    },
    /// A bucket is nearly full of sandboxes that nobody uses.
    QuotaIdle {
        /// Which bucket.
        bucket: Bucket,
        /// How many.
        idle: usize,
        /// Of how many.
        quota: u32,
    },
    /// The listing was doubtful and the round was skipped.
    RoundSkipped {
        /// How many rounds in a row.
        rounds: u32,
    },
    /// The listing was doubtful for too long; each sandbox is asked for by name.
    Reconciling,
    /// Sandboxes of ours without a record were found.
    Strays {
        /// How many.
        count: usize,
    },
    /// Deletes keep failing.
    KillsFailing {
        /// How many sandboxes.
        count: usize,
        /// The most failures of one of them.
        failures_max: u32,
    },
    /// Accounts were released although the sandbox could not be deleted (R-G12).
    WrittenOff {
        /// How many sandboxes.
        count: usize,
    },
    /// One cycle would condemn too many; the rest waits.
    BlastRadius {
        /// How many were held back.
        held_back: usize,
    },
    /// Lost writes are being settled; nobody new is admitted.
    Settling,
}

/// Whether a round counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confirmed {
    /// Its evidence was good.
    Yes,
    /// It concluded nothing.
    No,
}

/// What a round decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Whether it counted.
    pub confirmed: Confirmed,
    /// What to do, most urgent first.
    pub work: Vec<Work>,
    /// What to tell.
    pub alarms: Vec<Alarm>,
}

impl Reclaimer {
    /// A reclaimer that has seen nothing yet.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            marks: BTreeMap::new(),
            judge: ListingJudge::default(),
            busy: BTreeSet::new(),
        }
    }

    /// Work on this slot is over, however it ended.
    pub fn finished(&mut self, slot: &SlotId) {
        self.busy.remove(slot);
    }

    /// What a round would do, without marking anything (R-G17: dry run).
    #[must_use]
    pub fn dry_run(&self, evidence: &Evidence) -> Plan {
        self.clone().plan(evidence)
    }

    /// Between two rounds: goes on with what is condemned and has a sandbox. Marks nothing.
    pub fn urge(&mut self, view: &View) -> Vec<Work> {
        let mut work: Vec<Work> = view.records.iter().filter_map(continue_removal).collect();
        self.claim(&mut work);
        work
    }

    /// One round.
    pub fn plan(&mut self, evidence: &Evidence) -> Plan {
        let view = &evidence.view;
        let known = view.records.iter().filter(|r| r.sandbox.is_some()).count();
        let listed = evidence.listing.as_ref().map(Vec::len);
        let judgement = self.judge.judge(listed, known, &self.rules);
        let mut alarms = standing_alarms(view, &self.rules);
        let mut work = Vec::new();
        // What is condemned needs no evidence any more.
        work.extend(view.records.iter().filter_map(continue_removal));
        let confirmed = match judgement {
            Judgement::Skip { rounds } => {
                alarms.push(Alarm::RoundSkipped { rounds });
                Confirmed::No
            }
            Judgement::Use | Judgement::Reconcile => {
                if judgement == Judgement::Reconcile {
                    alarms.push(Alarm::Reconciling);
                }
                let listing = evidence.listing.as_deref().unwrap_or(&[]);
                self.look(evidence, listing, &mut work, &mut alarms);
                Confirmed::Yes
            }
        };
        self.claim(&mut work);
        Plan {
            confirmed,
            work,
            alarms,
        }
    }

    /// A slot gets one task at a time; a note is a write and no task.
    fn claim(&mut self, work: &mut Vec<Work>) {
        work.retain(|w| w.slot().is_none_or(|slot| !self.busy.contains(slot)));
        let tasks = work.iter().filter(|w| !matches!(w, Work::Note { .. }));
        self.busy.extend(tasks.filter_map(Work::slot).cloned());
    }

    fn look(
        &mut self,
        evidence: &Evidence,
        listing: &[Listed],
        work: &mut Vec<Work>,
        alarms: &mut Vec<Alarm>,
    ) {
        let view = &evidence.view;
        let shown: BTreeMap<&SandboxId, &Listed> =
            listing.iter().map(|l| (&l.sandbox, l)).collect();
        let mut condemn = Vec::new();
        for record in view.records.iter().filter(|r| r.condemned.is_some()) {
            work.extend(self.settle_condemned(record, view.now));
        }
        for record in view.records.iter().filter(|r| r.condemned.is_none()) {
            let listed = record
                .sandbox
                .as_ref()
                .and_then(|id| shown.get(id).copied());
            let seen = self.seen(record, listed, view.now);
            let verdict = self.verdict(record, seen, view);
            let looks = self.mark(record, &verdict, view.now);
            work.extend(self.settle(record, listed, (&verdict, looks), view));
            // While lost writes are settled the books condemn nobody; what matters is to settle.
            if view.stage == Stage::Settled {
                condemn.extend(self.sweep(record, &verdict, looks));
            }
        }
        self.marks
            .retain(|slot, _| view.records.iter().any(|r| r.slot == *slot));
        self.adopt_strays(view, listing, work, alarms);
        self.limit(condemn, view.records.len(), work, alarms);
        self.finish_recovery(evidence, listing, work);
    }

    /// What is known of its state: the listing, or what it answered when it was asked for lately.
    fn seen(&self, record: &Record, listed: Option<&Listed>, now: Timestamp) -> Seen {
        if let Some(listed) = listed {
            return listed.seen;
        }
        let lately = self.rules.settings().cycle * 2;
        match (record.seen_at, record.paused_since) {
            (Some(at), paused) if now.since(at) <= lately => {
                if paused.is_some() {
                    Seen::Paused
                } else {
                    Seen::Running
                }
            }
            _ => Seen::Unknown,
        }
    }

    fn verdict(&self, record: &Record, seen: Seen, view: &View) -> Verdict {
        colour::verdict(
            record,
            seen,
            retention(view, &record.bucket),
            &self.rules,
            view.now,
        )
    }

    /// Counts the looks at which this generation had no root.
    fn mark(&mut self, record: &Record, verdict: &Verdict, now: Timestamp) -> u32 {
        let sweepable = matches!(verdict.ground, Some(Ground::White | Ground::Retention));
        if !sweepable {
            self.marks.remove(&record.slot);
            return 0;
        }
        let spacing = self.rules.look_spacing();
        let fresh = Mark {
            generation: record.generation,
            looks: 1,
            looked_at: now,
        };
        let mark = self
            .marks
            .entry(record.slot.clone())
            .or_insert_with(|| fresh.clone());
        let changed = mark.generation != record.generation;
        if changed && self.rules.keeps(Rule::GenerationUnchanged) {
            *mark = fresh;
        } else if now.since(mark.looked_at) >= spacing {
            mark.looks += 1;
            mark.looked_at = now;
        }
        mark.looks
    }

    /// What is not shown, or not answered for, is asked for by name.
    fn settle(
        &self,
        record: &Record,
        listed: Option<&Listed>,
        (verdict, looks): (&Verdict, u32),
        view: &View,
    ) -> Option<Work> {
        let slot = record.slot.clone();
        let Some(sandbox) = record.sandbox.clone() else {
            let needed = self.looks_needed();
            return (looks >= needed).then_some(Work::SettleMaking { slot });
        };
        let settling = matches!(view.stage, Stage::Settling { .. });
        match listed {
            Some(listed) => {
                let was_paused = record.paused_since.is_some();
                // How long a pause lasts counts from when its holder was heard no more.
                let unheard = verdict.colour != Colour::Black;
                let news = match listed.seen {
                    Seen::Running => was_paused,
                    Seen::Paused => {
                        !was_paused || unheard && record.paused_unheard_since().is_none()
                    }
                    Seen::Unknown => false,
                };
                let seen = listed.seen;
                let noted = news || !self.rules.keeps(Rule::ScanRenewsNothing);
                (noted && !settling)
                    .then_some(Work::Note { slot, seen })
                    .or_else(|| {
                        settling.then(|| Work::Settle {
                            slot: record.slot.clone(),
                            sandbox,
                        })
                    })
            }
            None => Some(Work::Settle { slot, sandbox }),
        }
    }

    /// A slot that was condemned before its sandbox was bound: if its maker is heard no more, nobody
    /// else says whether there is one, and the slot would be taken for ever (R-G5).
    fn settle_condemned(&self, record: &Record, now: Timestamp) -> Option<Work> {
        let made_by = record.making.as_ref();
        let given_up = made_by.is_none_or(|m| now.since(m.since) >= self.rules.settle());
        (record.sandbox.is_none() && given_up).then(|| Work::SettleMaking {
            slot: record.slot.clone(),
        })
    }

    fn looks_needed(&self) -> u32 {
        if self.rules.keeps(Rule::TwoCycles) {
            self.rules.settings().white_cycles
        } else {
            1
        }
    }

    fn sweep(&self, record: &Record, verdict: &Verdict, looks: u32) -> Option<Work> {
        let ground = verdict.ground?;
        let ripe = match ground {
            // The fallback waits for nothing (R-G12).
            Ground::Overdue => true,
            _ => looks >= self.looks_needed(),
        };
        let sandbox = record.sandbox.clone().filter(|_| ripe)?;
        let held = record.holding.is_some() && ground != Ground::Overdue;
        let ask_first = if held && self.rules.keeps(Rule::ReallyPaused) {
            AskFirst::Yes
        } else {
            AskFirst::No
        };
        let (slot, generation) = (record.slot.clone(), record.generation);
        Some(Work::Remove {
            slot,
            sandbox,
            generation,
            ground,
            ask_first,
        })
    }

    fn adopt_strays(
        &self,
        view: &View,
        listing: &[Listed],
        work: &mut Vec<Work>,
        alarms: &mut Vec<Alarm>,
    ) {
        let known: BTreeSet<&SandboxId> = view
            .records
            .iter()
            .filter_map(|r| r.sandbox.as_ref())
            .collect();
        let black = self.rules.black();
        let being_made: BTreeSet<&SlotId> = view
            .records
            .iter()
            .filter(|r| {
                r.making
                    .as_ref()
                    .is_some_and(|m| view.now.since(m.since) < black)
            })
            .map(|r| &r.slot)
            .collect();
        let strays: Vec<&Listed> = listing
            .iter()
            .filter(|l| !known.contains(&l.sandbox) && !being_made.contains(&l.slot))
            .collect();
        if !strays.is_empty() {
            alarms.push(Alarm::Strays {
                count: strays.len(),
            });
        }
        work.extend(strays.into_iter().map(|l| Work::Adopt(Box::new(l.clone()))));
    }

    /// The blast radius: what one cycle may condemn at most, oldest decisions first.
    fn limit(
        &mut self,
        mut condemn: Vec<Work>,
        known: usize,
        work: &mut Vec<Work>,
        alarms: &mut Vec<Alarm>,
    ) {
        let most = self.rules.blast_radius(known);
        if condemn.len() > most && self.rules.keeps(Rule::BlastRadius) {
            alarms.push(Alarm::BlastRadius {
                held_back: condemn.len() - most,
            });
            condemn.truncate(most);
        }
        // What is about to be removed need not be settled as well.
        let doomed: BTreeSet<SlotId> = condemn.iter().filter_map(Work::slot).cloned().collect();
        work.retain(|w| match w {
            Work::Settle { slot, .. } => !doomed.contains(slot),
            _ => true,
        });
        work.extend(condemn);
    }

    /// Whoever sees that all is settled says so; the books check it again.
    fn finish_recovery(&self, evidence: &Evidence, listing: &[Listed], work: &mut Vec<Work>) {
        let Stage::Settling { since } = evidence.view.stage else {
            return;
        };
        if evidence.listing.is_none() || evidence.began_at < since.plus(self.rules.settle()) {
            return;
        }
        let highest = listing
            .iter()
            .map(|l| l.generation)
            .max()
            .unwrap_or(Generation(0));
        // Strays of this very listing must be in the books first.
        if !work.iter().any(|w| matches!(w, Work::Adopt(_))) {
            let settled_from = evidence.began_at;
            work.push(Work::FinishRecovery {
                highest,
                settled_from,
            });
        }
    }
}

fn retention(view: &View, bucket: &Bucket) -> Retention {
    view.buckets
        .get(bucket)
        .map(|p| p.retention)
        .unwrap_or_default()
}

fn continue_removal(record: &Record) -> Option<Work> {
    let condemned = record.condemned.as_ref()?;
    Some(Work::Remove {
        slot: record.slot.clone(),
        sandbox: record.sandbox.clone()?,
        generation: record.generation,
        ground: condemned.ground,
        ask_first: AskFirst::No,
    })
}
