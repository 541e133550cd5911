//! How the books are written down: one line of text for each thing, parts between single spaces.
//!
//! Every name of the governor is printable ASCII without spaces, so a space always separates, and an
//! empty part means "none". Whoever looks into the file or the server can read it. The functions on the
//! server take the same lines apart; [`RECORD_PARTS`] and its like are the one list of places.
//!
//! Durations are whole milliseconds here; what is shorter is not kept.

use std::time::Duration;

use sandhold_governor::{
    books::{Act, Audit, BucketPolicy, GoneEvidence, Line, RunDefaults, Sealed, SealedHow},
    colour::Retention,
    ids::{Bucket, SlotId},
    record::{
        Condemned, Counted, Ground, Holding, Making, Managed, OperationLock, Record, RunRoot,
    },
};
use sandhold_types::{Generation, Timestamp};

/// The parts of a record, in order.
pub(crate) const RECORD_PARTS: [&str; 26] = [
    "BUCKET",
    "OWNER",
    "MANAGED",
    "GENERATION",
    "MAKER",
    "MAKING_SINCE",
    "SANDBOX",
    "LEASE",
    "TEMPLATE",
    "TTL",
    "LEASE_BEAT",
    "RUN",
    "RUN_REPLICA",
    "RUN_BEAT",
    "RUN_CANCELLED",
    "LOCK_BY",
    "LOCK_AT",
    "CONDEMNED_AT",
    "GROUND",
    "CONDEMNED_GENERATION",
    "FAILURES",
    "AWAKE",
    "ENDS_AT",
    "PAUSED_SINCE",
    "SEEN_AT",
    "COUNTED",
];

/// The parts of a bucket, in order. How many are used is kept where there is no other count of it; the
/// last part may be missing.
pub(crate) const BUCKET_PARTS: [&str; 4] = ["QUOTA", "RETENTION", "USED_HERE", "RUNS"];

/// A line that does not read as what it was written as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("unreadable {0}")]
pub(crate) struct Unreadable(pub(crate) &'static str);

/// The parts of a line, read one after the other.
pub(crate) struct Parts<'a> {
    rest: std::str::Split<'a, char>,
    what: &'static str,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(text: &'a str, what: &'static str) -> Self {
        Self {
            rest: text.split(' '),
            what,
        }
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, Unreadable> {
        self.rest.next().ok_or(Unreadable(self.what))
    }

    pub(crate) fn value<T: std::str::FromStr>(&mut self) -> Result<T, Unreadable> {
        self.text()?.parse().map_err(|_| Unreadable(self.what))
    }

    /// `None` for an empty part.
    pub(crate) fn optional<T: std::str::FromStr>(&mut self) -> Result<Option<T>, Unreadable> {
        match self.text()? {
            "" => Ok(None),
            text => text.parse().map(Some).map_err(|_| Unreadable(self.what)),
        }
    }

    pub(crate) fn time(&mut self) -> Result<Timestamp, Unreadable> {
        self.value().map(Timestamp::from_unix_ms)
    }

    pub(crate) fn optional_time(&mut self) -> Result<Option<Timestamp>, Unreadable> {
        Ok(self.optional()?.map(Timestamp::from_unix_ms))
    }

    pub(crate) fn generation(&mut self) -> Result<Generation, Unreadable> {
        self.value().map(Generation)
    }

    fn required<T>(&self, part: Option<T>) -> Result<T, Unreadable> {
        part.ok_or(Unreadable(self.what))
    }

    fn word<T: Copy>(&mut self, words: &[(T, &str)]) -> Result<T, Unreadable> {
        let text = self.text()?;
        of_word(words, text).ok_or(Unreadable(self.what))
    }
}

pub(crate) fn of_word<T: Copy>(words: &[(T, &str)], text: &str) -> Option<T> {
    words
        .iter()
        .find(|(_, w)| *w == text)
        .map(|(value, _)| *value)
}

pub(crate) fn word_of<T: Copy + PartialEq>(words: &[(T, &'static str)], value: T) -> &'static str {
    words
        .iter()
        .find(|(v, _)| *v == value)
        .map_or("", |(_, word)| word)
}

pub(crate) const GROUNDS: [(Ground, &str); 6] = [
    (Ground::Released, "released"),
    (Ground::NeverUsed, "never-used"),
    (Ground::Replaced, "replaced"),
    (Ground::White, "white"),
    (Ground::Retention, "retention"),
    (Ground::Overdue, "overdue"),
];

pub(crate) const EVIDENCE: [(GoneEvidence, &str); 3] = [
    (GoneEvidence::Killed, "killed"),
    (GoneEvidence::NotFound, "not-found"),
    (GoneEvidence::NeverMade, "never-made"),
];

const MANAGED: [(Managed, &str); 2] = [
    (Managed::ByGovernor, "governor"),
    (Managed::Directly, "direct"),
];

/// One letter, because it stands beside the lease in the owner's history.
const SEALED_HOW: [(SealedHow, &str); 4] = [
    (SealedHow::Released, "r"),
    (SealedHow::Superseded, "s"),
    (SealedHow::Mismatch, "m"),
    (SealedHow::SandboxEnded, "e"),
];

const FLAG: [(bool, &str); 2] = [(true, "1"), (false, "0")];

pub(crate) fn flag(value: bool) -> &'static str {
    word_of(&FLAG, value)
}

pub(crate) fn ms(duration: Duration) -> u64 {
    let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    // What lasts longer than time itself needs no more digits than the functions can count.
    ms.min(Timestamp::FAR_FUTURE.unix_ms())
}

fn or_empty<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(String::new, |v| v.to_string())
}

fn time_text(at: Option<Timestamp>) -> String {
    or_empty(at.map(Timestamp::unix_ms))
}

pub(crate) fn read_bucket(text: &str) -> Result<Bucket, Unreadable> {
    let unreadable = Unreadable("bucket");
    let (namespace, env) = text.split_once(':').ok_or(unreadable)?;
    Ok(Bucket {
        namespace: namespace.parse().map_err(|_| unreadable)?,
        env: env.parse().map_err(|_| unreadable)?,
    })
}

/// A record without its slot, which is its key.
pub(crate) fn write_record(record: &Record) -> String {
    let making = record.making.as_ref();
    let holding = record.holding.as_ref();
    let run = record.run.as_ref();
    let lock = record.lock.as_ref();
    let condemned = record.condemned.as_ref();
    let parts: [String; RECORD_PARTS.len()] = [
        record.bucket.to_string(),
        record.owner.to_string(),
        word_of(&MANAGED, record.managed).to_owned(),
        record.generation.to_string(),
        or_empty(making.map(|m| &m.maker)),
        time_text(making.map(|m| m.since)),
        or_empty(record.sandbox.as_ref()),
        or_empty(holding.map(|h| &h.lease)),
        or_empty(holding.map(|h| &h.template)),
        or_empty(holding.map(|h| ms(h.ttl))),
        time_text(holding.map(|h| h.heartbeat_at)),
        or_empty(run.map(|r| &r.run)),
        or_empty(run.map(|r| &r.replica)),
        time_text(run.map(|r| r.heartbeat_at)),
        or_empty(run.map(|r| flag(r.cancelled))),
        or_empty(lock.map(|l| &l.by)),
        time_text(lock.map(|l| l.taken_at)),
        time_text(condemned.map(|c| c.at)),
        or_empty(condemned.map(|c| word_of(&GROUNDS, c.ground))),
        or_empty(condemned.map(|c| c.generation)),
        or_empty(condemned.map(|c| c.failures)),
        or_empty(condemned.map(|c| flag(c.awake))),
        record.ends_at.unix_ms().to_string(),
        time_text(record.paused_since),
        time_text(record.seen_at),
        flag(record.is_counted()).to_owned(),
    ];
    parts.join(" ")
}

pub(crate) fn read_record(slot: SlotId, text: &str) -> Result<Record, Unreadable> {
    let mut parts = Parts::of(text, "record");
    let p = &mut parts;
    let bucket = read_bucket(p.text()?)?;
    let owner = p.value()?;
    let managed = p.word(&MANAGED)?;
    let generation = p.generation()?;
    let making = match (p.optional()?, p.optional_time()?) {
        (Some(maker), since) => Some(Making {
            maker,
            since: p.required(since)?,
        }),
        (None, _) => None,
    };
    let sandbox = p.optional()?;
    let holding = match (
        p.optional()?,
        p.optional()?,
        p.optional()?,
        p.optional_time()?,
    ) {
        (Some(lease), template, ttl_ms, heartbeat_at) => Some(Holding {
            lease,
            template: p.required(template)?,
            ttl: Duration::from_millis(p.required(ttl_ms)?),
            heartbeat_at: p.required(heartbeat_at)?,
        }),
        _ => None,
    };
    let run = match (p.optional()?, p.optional()?, p.optional_time()?, p.text()?) {
        (Some(run), replica, heartbeat_at, cancelled) => Some(RunRoot {
            run,
            replica: p.required(replica)?,
            heartbeat_at: p.required(heartbeat_at)?,
            cancelled: cancelled == "1",
        }),
        _ => None,
    };
    let lock = match (p.optional()?, p.optional_time()?) {
        (Some(by), taken_at) => Some(OperationLock {
            by,
            taken_at: p.required(taken_at)?,
        }),
        _ => None,
    };
    let condemned = match p.optional_time()? {
        Some(at) => Some(Condemned {
            at,
            ground: p.word(&GROUNDS)?,
            generation: p.generation()?,
            failures: p.value()?,
            awake: p.word(&FLAG)?,
        }),
        None => {
            for _ in 0..4 {
                p.text()?;
            }
            None
        }
    };
    Ok(Record {
        slot,
        bucket,
        owner,
        managed,
        generation,
        making,
        sandbox,
        holding,
        run,
        lock,
        condemned,
        ends_at: p.time()?,
        paused_since: p.optional_time()?,
        seen_at: p.optional_time()?,
        counted: if p.word(&FLAG)? {
            Counted::Yes
        } else {
            Counted::No
        },
    })
}

pub(crate) fn write_retention(retention: Retention) -> String {
    match retention {
        Retention::Undeclared => String::new(),
        Retention::After(after) => ms(after).to_string(),
    }
}

/// What the runs of a bucket get: four parts between slashes, or nothing. No template has one in its name.
pub(crate) fn write_run_defaults(runs: &RunDefaults) -> String {
    if *runs == RunDefaults::default() {
        return String::new();
    }
    let in_ms = |time: Option<Duration>| or_empty(time.map(ms));
    [
        or_empty(runs.main.as_ref()),
        or_empty(runs.light.as_ref()),
        in_ms(runs.timeout),
        in_ms(runs.timeout_max),
    ]
    .join("/")
}

fn read_run_defaults(text: &str) -> Result<RunDefaults, Unreadable> {
    let unreadable = Unreadable("defaults of runs");
    if text.is_empty() {
        return Ok(RunDefaults::default());
    }
    let parts: Vec<&str> = text.split('/').collect();
    let [main, light, timeout, timeout_max] = parts[..] else {
        return Err(unreadable);
    };
    let template = |text: &str| match text {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| unreadable),
    };
    let time = |text: &str| match text {
        "" => Ok(None),
        text => {
            let ms = text.parse().map_err(|_| unreadable)?;
            Ok(Some(Duration::from_millis(ms)))
        }
    };
    Ok(RunDefaults {
        main: template(main)?,
        light: template(light)?,
        timeout: time(timeout)?,
        timeout_max: time(timeout_max)?,
    })
}

/// The places that are used are counted elsewhere.
pub(crate) fn write_policy(policy: &BucketPolicy) -> String {
    let (quota, retention) = (policy.quota, write_retention(policy.retention));
    format!("{quota} {retention}  {}", write_run_defaults(&policy.runs))
}

/// `None` if the bucket was never set and only counts what was found in it.
pub(crate) fn read_policy(text: &str) -> Result<Option<BucketPolicy>, Unreadable> {
    let mut parts = Parts::of(text, "bucket");
    let (quota, retention) = (parts.optional()?, parts.optional()?);
    // What older ones end with is only a count, or nothing.
    let runs = read_run_defaults(parts.rest.nth(1).unwrap_or_default())?;
    Ok(quota.map(|quota| BucketPolicy {
        quota,
        retention: retention.map_or(Retention::Undeclared, |ms| {
            Retention::After(Duration::from_millis(ms))
        }),
        runs,
    }))
}

/// The slot in force, then each sealed lease with how it ended. Neither a tab nor a line break can be
/// in a name, so a lease can be looked for as it is.
pub(crate) fn write_line(line: &Line) -> String {
    let mut text = or_empty(line.current.as_ref());
    for sealed in &line.sealed {
        text.push('\t');
        text.push_str(sealed.lease.as_str());
        text.push('\n');
        text.push_str(word_of(&SEALED_HOW, sealed.how));
    }
    text
}

pub(crate) fn read_line(text: &str) -> Result<Line, Unreadable> {
    let unreadable = Unreadable("history of leases");
    let mut parts = text.split('\t');
    let current = match parts.next() {
        None | Some("") => None,
        Some(slot) => Some(slot.parse().map_err(|_| unreadable)?),
    };
    let sealed = parts
        .map(|part| {
            let (lease, how) = part.split_once('\n').ok_or(unreadable)?;
            Ok(Sealed {
                lease: lease.parse().map_err(|_| unreadable)?,
                how: of_word(&SEALED_HOW, how).ok_or(unreadable)?,
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(Line { current, sealed })
}

/// An entry of the audit trail, with its slot.
pub(crate) fn write_audit(audit: &Audit) -> String {
    let (what, one, two) = match &audit.what {
        Act::SlotTaken => ("taken", String::new(), ""),
        Act::Granted { lease } => ("lease", lease.to_string(), ""),
        Act::SealedLease { lease, how } => {
            ("sealed", lease.to_string(), word_of(&SEALED_HOW, *how))
        }
        Act::Condemned { by, ground } => (
            "condemned",
            or_empty(by.as_ref()),
            word_of(&GROUNDS, *ground),
        ),
        Act::SlotFreed { evidence } => ("freed", word_of(&EVIDENCE, *evidence).to_owned(), ""),
        Act::WrittenOff => ("written-off", String::new(), ""),
        Act::Adopted => ("adopted", String::new(), ""),
    };
    format!(
        "{} {} {} {} {} {} {what} {one} {two}",
        audit.slot,
        audit.at.unix_ms(),
        audit.bucket,
        audit.owner,
        or_empty(audit.sandbox.as_ref()),
        audit.generation,
    )
}

pub(crate) fn read_audit(text: &str) -> Result<Audit, Unreadable> {
    let mut parts = Parts::of(text, "audit entry");
    let p = &mut parts;
    Ok(Audit {
        slot: p.value()?,
        at: p.time()?,
        bucket: read_bucket(p.text()?)?,
        owner: p.value()?,
        sandbox: p.optional()?,
        generation: p.generation()?,
        what: match p.text()? {
            "taken" => Act::SlotTaken,
            "lease" => Act::Granted { lease: p.value()? },
            "sealed" => Act::SealedLease {
                lease: p.value()?,
                how: p.word(&SEALED_HOW)?,
            },
            "condemned" => Act::Condemned {
                by: p.optional()?,
                ground: p.word(&GROUNDS)?,
            },
            "freed" => Act::SlotFreed {
                evidence: p.word(&EVIDENCE)?,
            },
            "written-off" => Act::WrittenOff,
            "adopted" => Act::Adopted,
            _ => return Err(Unreadable("audit entry")),
        },
    })
}

/// The entries of a trail, one on each line; the breaks may be before them or behind.
pub(crate) fn read_audits(text: &str) -> Result<Vec<Audit>, Unreadable> {
    let entries = text.lines().filter(|line| !line.is_empty());
    entries.map(read_audit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_reads_as_it_was_written_and_an_older_one_without_what_it_had_not() {
        // R-G13
        let policy = BucketPolicy {
            runs: RunDefaults {
                main: Some("heavy".parse().unwrap()),
                light: None,
                timeout: Some(Duration::from_secs(60)),
                timeout_max: None,
            },
            ..BucketPolicy::new(5, Retention::After(Duration::from_secs(1)))
        };
        assert_eq!(
            read_policy(&write_policy(&policy)),
            Ok(Some(policy.clone()))
        );
        let plain = BucketPolicy {
            runs: RunDefaults::default(),
            ..policy
        };
        for text in ["5 1000", "5 1000 3", "5 1000 3 "] {
            assert_eq!(read_policy(text), Ok(Some(plain.clone())), "{text:?}");
        }
        assert_eq!(read_policy("  3"), Ok(None), "only counted");
        for text in [
            "5 1000 3 a",
            "5 1000 3 a/b/c",
            "5 1000 3 a/b/c/d",
            "5 1000 3 a/b/1/2/",
        ] {
            assert!(read_policy(text).is_err(), "{text:?}");
        }
    }
}
