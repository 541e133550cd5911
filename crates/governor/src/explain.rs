//! Why a sandbox lives, or does not: the verdict in words (R-G17).
//!
//! A pure function from the same evidence by which the reclaimer decides. It never asks anybody.

use std::{fmt, time::Duration};

use sandhold_types::{Generation, SandboxId, Timestamp};

use crate::{
    books::{Act, Audit, GoneEvidence},
    colour::{self, Colour, Kept, Retention, Root, Seen},
    record::{Ground, Record},
    rules::Rules,
};

/// The colour as it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// It is alive.
    Alive(Colour),
    /// It is gone.
    Gone,
}

impl Shown {
    /// The stable name, as on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Alive(colour) => colour.as_str(),
            Self::Gone => "gone",
        }
    }
}

/// What is told of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Which.
    pub sandbox: SandboxId,
    /// Its newest generation.
    pub generation: Generation,
    /// Its colour.
    pub colour: Shown,
    /// What holds it, or held it.
    pub roots: Vec<Root>,
    /// What would have to change for it to be deleted, and when.
    pub deletable_when: String,
    /// What was done to it, oldest first.
    pub last_actions: Vec<String>,
}

/// Explains a sandbox that has a record.
#[must_use]
pub fn explain_living(
    record: &Record,
    sandbox: SandboxId,
    seen: Seen,
    retention: Retention,
    audit: &[Audit],
    rules: &Rules,
    now: Timestamp,
) -> Explanation {
    let verdict = colour::verdict(record, seen, retention, rules, now);
    let deletable_when = match (verdict.ground, verdict.kept) {
        (Some(ground), _) if record.condemned.is_some() => {
            let failures = record.condemned.as_ref().map_or(0, |c| c.failures);
            format!("now: {}; {failures} deletes failed so far", ground.words())
        }
        (Some(Ground::Overdue), _) => format!("in the next cycle: {}", Ground::Overdue.words()),
        (Some(ground), _) => format!(
            "after {} confirmed cycles without a change: {}",
            rules.settings().white_cycles,
            ground.words()
        ),
        (None, Some(Kept::NoRetentionDeclared)) => format!(
            "when its bucket {} declares a retention, when it is released, or {}",
            record.bucket,
            overdue_words(record, rules)
        ),
        (None, Some(Kept::Retained(left))) => {
            format!("if it stays paused for another {}", in_words(left))
        }
        (None, Some(Kept::StateUnknown)) => {
            "when its platform says whether it runs or is paused".to_owned()
        }
        (None, Some(Kept::NotOurs)) => {
            format!("by its own lifetime, or {}", overdue_words(record, rules))
        }
        (None, None) => match verdict.white_at {
            Some(at) => format!(
                "if nothing is heard of it until {at}, in two confirmed cycles after that, or {}",
                overdue_words(record, rules)
            ),
            None => overdue_words(record, rules),
        },
    };
    Explanation {
        sandbox,
        generation: record.generation,
        colour: Shown::Alive(verdict.colour),
        roots: verdict.roots,
        deletable_when,
        last_actions: audit.iter().map(told).collect(),
    }
}

/// Explains a sandbox that is gone, from its audit trail; `None` if there is none.
#[must_use]
pub fn explain_gone(sandbox: SandboxId, audit: &[Audit]) -> Option<Explanation> {
    let last = audit.last()?;
    Some(Explanation {
        sandbox,
        generation: last.generation,
        colour: Shown::Gone,
        roots: Vec::new(),
        deletable_when: "it is gone".to_owned(),
        last_actions: audit.iter().map(told).collect(),
    })
}

fn overdue_words(record: &Record, rules: &Rules) -> String {
    let due = record.due_at();
    if due == Timestamp::FAR_FUTURE {
        return "never by its age: it has no end of its own".to_owned();
    }
    format!(
        "at {} whoever holds it",
        due.plus(rules.settings().overdue_grace)
    )
}

/// One entry of the audit trail as a sentence.
#[must_use]
pub fn told(audit: &Audit) -> String {
    let what = match &audit.what {
        Act::SlotTaken => format!("a slot of {} was taken for {}", audit.bucket, audit.owner),
        Act::Granted { lease } => {
            format!("lease {lease} was granted, generation {}", audit.generation)
        }
        Act::SealedLease { lease, how } => format!("lease {lease} was sealed ({how:?})"),
        Act::Condemned {
            by: Some(by),
            ground,
        } => {
            format!(
                "replica {by} condemned generation {}: {}",
                audit.generation,
                ground.words()
            )
        }
        Act::Condemned { by: None, ground } => format!("condemned: {}", ground.words()),
        Act::SlotFreed { evidence } => format!("gone, slot freed: {}", evidence_words(*evidence)),
        Act::WrittenOff => "its account was released although it could not be deleted".to_owned(),
        Act::Adopted => "found without a record".to_owned(),
    };
    format!("{} {what}", audit.at)
}

fn evidence_words(evidence: GoneEvidence) -> &'static str {
    match evidence {
        GoneEvidence::Killed => "its platform deleted it",
        GoneEvidence::NotFound => "its platform, asked for it by name, has none",
        GoneEvidence::NeverMade => "it was never made",
    }
}

fn in_words(duration: Duration) -> String {
    let s = duration.as_secs();
    match s {
        0..120 => format!("{s} s"),
        120..7200 => format!("{} min", s / 60),
        _ => format!("{} h", s / 3600),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sandbox, colour) = (&self.sandbox, self.colour.as_str());
        writeln!(f, "{sandbox} is {colour} (generation {})", self.generation)?;
        for root in &self.roots {
            let (age, ttl) = (in_words(root.age), in_words(root.ttl));
            writeln!(
                f,
                "  {} {}: heard {age} ago, counts for {ttl}",
                root.kind.as_str(),
                root.id
            )?;
        }
        writeln!(f, "  deleted {}", self.deletable_when)?;
        for action in &self.last_actions {
            writeln!(f, "  {action}")?;
        }
        Ok(())
    }
}
