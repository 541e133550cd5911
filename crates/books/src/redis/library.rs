//! The library of functions that the server carries steps out with, put together from its parts.
//!
//! ```text
//!   clock ─ core ─ lease ─ queue ─ verdict ─ a function for each verb ─ steps ─ open
//! ```
//!
//! It is loaded once into a server ([`Library::load`]), so that a call pays for what it does and not for
//! making every function anew, as a script would. Names in capitals stand for numbers and are put in
//! here: the places of the parts of a packed line, and the rules. So the numbers have one home, and cost
//! nothing when it runs.
//!
//! A library is named by what is in it. Replicas of several versions, or with several rules, share a
//! server without replacing each other's.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use redis::{Cmd, RedisError, aio::MultiplexedConnection};
use sandhold_governor::rules::Rules;
use sandhold_types::Timestamp;

use super::{COMMON_PARTS, ServerClock};
use crate::text::{BUCKET_PARTS, RECORD_PARTS, ms};

/// For how long the trail of a sandbox that is gone is kept.
const AUDIT_KEPT_MS: u64 = 7 * 24 * 3_600 * 1_000;

/// For how long an owner's history is kept when it has no lease. A lease that asks after that under
/// a sealed name gets a new generation; the old one stays dead.
const LINE_KEPT_MS: u64 = 30 * 24 * 3_600 * 1_000;

macro_rules! parts {
    ($($name:literal),* $(,)?) => { [$(include_str!(concat!("lua/", $name, ".lua"))),*] };
}

/// Everything, in the order in which it is needed.
const PARTS: [&str; 23] = parts!(
    "core",
    "lease",
    "queue",
    "verdict",
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
    "finish_recovery",
    "steps",
    "open",
);

/// The functions, and what they are made from.
#[derive(Debug)]
pub(super) struct Library {
    code: String,
    steps: String,
    open: String,
}

impl Library {
    pub(super) fn new(clock: ServerClock, rules: &Rules) -> Self {
        let clock = clock.script();
        let clock = format!("local function clock(KEYS)\n{clock}\nreturn now\nend\n");
        let body = with_numbers(&(clock + &PARTS.concat()), &numbers(rules));
        let mut hasher = DefaultHasher::new();
        body.hash(&mut hasher);
        let name = format!("sandhold_{:016x}", hasher.finish());
        let (steps, open) = (format!("{name}_steps"), format!("{name}_open"));
        let code = format!(
            "#!lua name={name}\n{body}\nredis.register_function('{steps}', \
             steps)\nredis.register_function('{open}', open)\n"
        );
        Self { code, steps, open }
    }

    /// Gives it to the server, which has it already or not.
    pub(super) async fn load(
        &self,
        connection: &mut MultiplexedConnection,
    ) -> Result<(), RedisError> {
        redis::cmd("FUNCTION")
            .arg("LOAD")
            .arg("REPLACE")
            .arg(&self.code)
            .exec_async(connection)
            .await
    }

    /// Begins a call that carries steps out.
    pub(super) fn steps(&self, key: &str) -> Cmd {
        call(&self.steps, key)
    }

    /// Begins a call that meets the books.
    pub(super) fn open(&self, key: &str) -> Cmd {
        call(&self.open, key)
    }
}

fn call(function: &str, key: &str) -> Cmd {
    let mut call = redis::cmd("FCALL");
    call.arg(function).arg(1).arg(key);
    call
}

fn pattern(parts: usize) -> String {
    format!("'^{}$'", vec!["(%S*)"; parts].join(" "))
}

/// Buckets that were written before there was the last part read without it.
fn bucket_pattern() -> String {
    let older = pattern(BUCKET_PARTS.len() - 1);
    format!("{} ?(%S*)$'", older.trim_end_matches("$'"))
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
        ("BUCKET_PATTERN", bucket_pattern()),
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
