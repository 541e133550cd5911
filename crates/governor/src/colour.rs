//! From evidence to a verdict: the one place where the colour of a sandbox is decided (R-G10).
//!
//! The reclaimer sweeps by this function, the books check with it once more when they condemn, and
//! `explain` prints what it says: what an operator reads is what is done.
//!
//! ```text
//!   condemned ─────────────────────────────▶ white, ground: as decided
//!   end + grace passed ────────────────────▶ ground: overdue, whatever its colour  (R-G12)
//!   any root younger than its time ────────▶ black
//!   any root younger than that + 60 s ─────▶ grey
//!   no root, leased and really paused ─────▶ white, kept or not as the bucket declares (R-G13)
//!   no root ───────────────────────────────▶ white, ground: white
//! ```

use std::time::Duration;

use sandhold_types::Timestamp;

use crate::{
    record::{Ground, Managed, Record},
    rules::{Rule, Rules},
};

/// What a bucket declares about leased sandboxes that are paused (R-G13).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Retention {
    /// Nothing: they are kept, shown and alarmed.
    #[default]
    Undeclared,
    /// They go when they have been paused for longer than this.
    After(Duration),
}

/// What is known of a sandbox's activity on its platform.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Seen {
    /// It runs.
    Running,
    /// It is really paused.
    Paused,
    /// The platform could not be asked, or it is in transition.
    Unknown,
}

/// The three colours of R-G10.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Colour {
    /// Something alive holds it.
    Black,
    /// What held it was alive a moment ago.
    Grey,
    /// Nothing holds it.
    White,
}

impl Colour {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Black => "black",
            Self::Grey => "grey",
            Self::White => "white",
        }
    }
}

/// What can hold a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RootKind {
    /// It is being made.
    Making,
    /// A lease.
    Lease,
    /// A run.
    Run,
    /// An operation under way.
    Lock,
    /// Its own lifetime, of a sandbox made directly (R-G19).
    Lifetime,
}

impl RootKind {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Making => "making",
            Self::Lease => "lease",
            Self::Run => "run",
            Self::Lock => "lock",
            Self::Lifetime => "lifetime",
        }
    }
}

/// One thing that holds, or held, a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// What.
    pub kind: RootKind,
    /// Which.
    pub id: String,
    /// How long ago it last said that it is alive.
    pub age: Duration,
    /// Up to which age it is black.
    pub ttl: Duration,
    /// Up to which age it is at least grey.
    pub grey: Duration,
}

impl Root {
    fn colour(&self) -> Colour {
        if self.age < self.ttl {
            Colour::Black
        } else if self.age < self.grey {
            Colour::Grey
        } else {
            Colour::White
        }
    }
}

/// Why a white sandbox is not deleted (R-G13).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Its bucket declares no retention: a zombie that must be shown and alarmed.
    NoRetentionDeclared,
    /// For so long it is still retained.
    Retained(Duration),
    /// It is leased, and whether it is paused is not known.
    StateUnknown,
    /// It was made directly; the reclaimer does not sweep it (R-G19).
    NotOurs,
}

/// What is decided of a sandbox, and from what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Its colour.
    pub colour: Colour,
    /// All its roots, alive or not.
    pub roots: Vec<Root>,
    /// On what ground it may be deleted now, after the marks that ground needs.
    pub ground: Option<Ground>,
    /// Why it is kept although it is white.
    pub kept: Option<Kept>,
    /// When the last of its roots turns white if none is heard again; `None` if it never does.
    pub white_at: Option<Timestamp>,
}

/// Decides. `seen` is what the platform says, `now` the store's clock.
#[must_use]
pub fn verdict(
    record: &Record,
    seen: Seen,
    retention: Retention,
    rules: &Rules,
    now: Timestamp,
) -> Verdict {
    let roots = roots(record, rules, now);
    let colour = roots
        .iter()
        .map(Root::colour)
        .min()
        .unwrap_or(Colour::White);
    let white_at = roots
        .iter()
        .map(|r| now.plus(r.grey.saturating_sub(r.age)))
        .max();
    let (ground, kept) = if let Some(condemned) = &record.condemned {
        (Some(condemned.ground), None)
    } else if is_overdue(record, rules, now) {
        (Some(Ground::Overdue), None)
    } else if colour != Colour::White {
        (None, None)
    } else if record.managed == Managed::Directly {
        (None, Some(Kept::NotOurs))
    } else if record.holding.is_some() && record.sandbox.is_some() && rules.keeps(Rule::PolicyKeeps)
    {
        held_and_white(record, seen, retention, rules, now)
    } else {
        (Some(Ground::White), None)
    };
    let colour = if record.condemned.is_some() {
        Colour::White
    } else {
        colour
    };
    Verdict {
        colour,
        roots,
        ground,
        kept,
        white_at,
    }
}

/// Whether it is so long past its end that it goes whoever holds it (R-G12).
#[must_use]
pub fn is_overdue(record: &Record, rules: &Rules, now: Timestamp) -> bool {
    now > record.due_at().plus(rules.settings().overdue_grace) && rules.keeps(Rule::OverdueGoes)
}

/// R-G13: a lease that nobody renews any more does not keep a running sandbox, but a paused one is
/// somebody's saved work, and how long that is worth keeping is the bucket's to say.
fn held_and_white(
    record: &Record,
    seen: Seen,
    retention: Retention,
    rules: &Rules,
    now: Timestamp,
) -> (Option<Ground>, Option<Kept>) {
    match (seen, retention) {
        (Seen::Running, _) => (Some(Ground::White), None),
        (Seen::Unknown, _) => (None, Some(Kept::StateUnknown)),
        (Seen::Paused, Retention::Undeclared) => (None, Some(Kept::NoRetentionDeclared)),
        (Seen::Paused, Retention::After(retained)) => {
            let paused = paused_for(record, now);
            if paused > retained && rules.keeps(Rule::RetentionEnds) {
                (Some(Ground::Retention), None)
            } else {
                (None, Some(Kept::Retained(retained.saturating_sub(paused))))
            }
        }
    }
}

/// For how long it has been paused, as far as looks can tell. Traffic that woke it for less than a
/// cycle, without its holder, is not seen.
fn paused_for(record: &Record, now: Timestamp) -> Duration {
    let since = record.paused_unheard_since();
    since.map_or(Duration::ZERO, |since| now.since(since))
}

fn roots(record: &Record, rules: &Rules, now: Timestamp) -> Vec<Root> {
    let (black, grey) = (rules.black(), rules.grey());
    let root = |kind, id: &str, since: Timestamp, ttl: Duration| Root {
        kind,
        id: id.to_owned(),
        age: now.since(since),
        ttl,
        grey: ttl + (grey - black),
    };
    let mut roots = Vec::new();
    if let Some(making) = &record.making {
        roots.push(root(
            RootKind::Making,
            making.maker.as_str(),
            making.since,
            black,
        ));
    }
    if let Some(lease) = &record.holding {
        let ttl = if rules.keeps(Rule::LeaseExpires) {
            lease.ttl
        } else {
            Duration::MAX / 4
        };
        roots.push(root(
            RootKind::Lease,
            lease.lease.as_str(),
            lease.heartbeat_at,
            ttl,
        ));
    }
    if let Some(run) = &record.run {
        roots.push(root(
            RootKind::Run,
            run.run.as_str(),
            run.heartbeat_at,
            black,
        ));
    }
    if let Some(lock) = &record.lock {
        roots.push(root(RootKind::Lock, lock.by.as_str(), lock.taken_at, black));
    }
    if record.managed == Managed::Directly && record.sandbox.is_some() && now < record.ends_at {
        let left = record.ends_at.since(now);
        let id = record.slot.as_str().to_owned();
        let age = Duration::ZERO;
        roots.push(Root {
            kind: RootKind::Lifetime,
            id,
            age,
            ttl: left,
            grey: left,
        });
    }
    roots
}
