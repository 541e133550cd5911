//! The scripts, put together from their parts.
//!
//! One carries steps out, all verbs of them: a clock, the common parts, a function for each verb, and the
//! loop over what was asked. Names in capitals stand
//! for numbers and are put in here: the places of the parts of a packed line, and the rules. So the
//! numbers have one home, and cost a script nothing when it runs.

use std::collections::BTreeMap;

use redis::Script;
use sandhold_governor::rules::Rules;
use sandhold_types::Timestamp;

use super::{COMMON_PARTS, ServerClock};
use crate::text::{BUCKET_PARTS, RECORD_PARTS, ms};

/// For how long the trail of a sandbox that is gone is kept.
const AUDIT_KEPT_MS: u64 = 7 * 24 * 3_600 * 1_000;

/// For how long an owner's history is kept when it has no lease. A lease that asks after that under
/// a sealed name gets a new generation; the old one stays dead.
const LINE_KEPT_MS: u64 = 30 * 24 * 3_600 * 1_000;

/// What all verbs share, in the order in which it is needed.
const SHARED: [&str; 4] = [
    include_str!("lua/core.lua"),
    include_str!("lua/lease.lua"),
    include_str!("lua/queue.lua"),
    include_str!("lua/verdict.lua"),
];

macro_rules! verbs {
    ($($name:literal),*) => {
        /// The verbs, each with its part of the script.
        const VERBS: &[(&str, &str)] = &[$(($name, include_str!(concat!("lua/", $name, ".lua")))),*];
    };
}

verbs!(
    "set_bucket",
    "acquire",
    "leave_queue",
    "return_slot",
    "bind",
    "heartbeat",
    "release",
    "discard",
    "run",
    "begin_removal",
    "begin_wake",
    "confirm_gone",
    "removal_failed",
    "expire_making",
    "adopt_stray",
    "note_seen",
    "finish_recovery"
);

/// Every script.
#[derive(Debug)]
pub(super) struct Scripts {
    /// Meets a server.
    pub(super) open: Script,
    /// Carries steps out.
    pub(super) steps: Script,
}

impl Scripts {
    pub(super) fn new(clock: ServerClock, rules: &Rules) -> Self {
        let numbers = numbers(rules);
        let script = |parts: &[&str]| {
            let text = [&[clock.script()], parts].concat().join("\n");
            Script::new(&with_numbers(&text, &numbers))
        };
        let verb =
            |(name, body): &(&str, &str)| format!("verbs.{name} = function(ARGV)\n{body}\nend\n");
        let verbs: String = VERBS.iter().map(verb).collect();
        let verbs = format!("local verbs = {{}}\n{verbs}");
        let steps = [&SHARED[..], &[&verbs, include_str!("lua/steps.lua")]].concat();
        Self {
            open: script(&[include_str!("lua/open.lua")]),
            steps: script(&steps),
        }
    }
}

fn pattern(parts: usize) -> String {
    format!("'^{}$'", vec!["([^ ]*)"; parts].join(" "))
}

fn numbers(rules: &Rules) -> BTreeMap<&'static str, String> {
    let s = rules.settings();
    let far_future = Timestamp::FAR_FUTURE.unix_ms();
    let places = [&RECORD_PARTS[..], &BUCKET_PARTS, &COMMON_PARTS]
        .into_iter()
        .flat_map(|parts| {
            (1..)
                .zip(parts)
                .map(|(place, name)| (*name, format!("{place}")))
        });
    let rules = [
        ("RECORD_PATTERN", pattern(RECORD_PARTS.len())),
        ("BUCKET_PATTERN", pattern(BUCKET_PARTS.len())),
        ("COMMON_PATTERN", pattern(COMMON_PARTS.len())),
        ("FAR_FUTURE", far_future.to_string()),
        ("FAR_FUTURE_TEXT", format!("'{far_future}'")),
        ("BLACK", ms(rules.black()).to_string()),
        ("GREY", ms(rules.grey()).to_string()),
        ("SETTLE", ms(rules.settle()).to_string()),
        ("SILENCE", ms(s.wait_silence_max).to_string()),
        ("WAIT_MAX", ms(s.wait_max).to_string()),
        ("OVERDUE_GRACE", ms(s.overdue_grace).to_string()),
        ("AWAKE_MAX", s.awake_for_removal_max.to_string()),
        ("SEALED_MAX", s.sealed_max.to_string()),
        ("AUDIT_KEPT", AUDIT_KEPT_MS.to_string()),
        ("LINE_KEPT", LINE_KEPT_MS.to_string()),
    ];
    places.chain(rules).collect()
}

/// Puts the numbers in for their names. A name is a whole word; what is no name stays as it is.
fn with_numbers(text: &str, numbers: &BTreeMap<&'static str, String>) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(begin) = rest.find(is_word) {
        let length = rest[begin..]
            .find(|c| !is_word(c))
            .unwrap_or(rest.len() - begin);
        let word = &rest[begin..begin + length];
        out.push_str(&rest[..begin]);
        out.push_str(numbers.get(word).map_or(word, String::as_str));
        rest = &rest[begin + length..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_for_whole_names_only() {
        let numbers = BTreeMap::from([("TTL", "10".to_owned())]);
        assert_eq!(
            with_numbers("r[TTL] = TTL_X .. 'TTLS' + TTL", &numbers),
            "r[10] = TTL_X .. 'TTLS' + 10"
        );
    }

    #[test]
    fn no_two_numbers_share_a_name() {
        let all = [&RECORD_PARTS[..], &BUCKET_PARTS, &COMMON_PARTS].concat();
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
