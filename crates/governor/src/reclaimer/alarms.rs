//! What an operator must know, by the books alone (R-G13).

use super::Alarm;
use crate::{
    books::{Stage, View},
    colour::{self, Colour, Kept, Seen},
    record::Record,
    rules::{Rule, Rules},
};

/// Alarms that follow from the books alone.
pub(super) fn standing_alarms(view: &View, rules: &Rules) -> Vec<Alarm> {
    let mut alarms = Vec::new();
    if matches!(view.stage, Stage::Settling { .. }) {
        alarms.push(Alarm::Settling);
    }
    for (bucket, policy) in &view.buckets {
        let mine: Vec<&Record> = view
            .records
            .iter()
            .filter(|r| r.bucket == *bucket)
            .collect();
        let verdict = |record: &Record| {
            let seen = if record.paused_since.is_some() {
                Seen::Paused
            } else {
                Seen::Running
            };
            colour::verdict(record, seen, policy.retention, rules, view.now)
        };
        let zombies: Vec<&Record> = mine
            .iter()
            .copied()
            .filter(|r| verdict(r).kept == Some(Kept::NoRetentionDeclared))
            .collect();
        let paused_for = |r: &&Record| r.paused_since.map(|since| view.now.since(since));
        let oldest = zombies.iter().filter_map(paused_for).max();
        if let Some(oldest) = oldest.filter(|_| rules.keeps(Rule::ZombiesAreShown)) {
            let (bucket, count) = (bucket.clone(), zombies.len());
            alarms.push(Alarm::ZombiesKept {
                bucket,
                count,
                oldest,
            });
        }
        let unused = |r: &&&Record| r.paused_since.is_some() || verdict(r).colour != Colour::Black;
        let idle = mine
            .iter()
            .filter(|r| r.is_counted())
            .filter(unused)
            .count();
        let percent = rules.settings().idle_alarm_percent as usize;
        if policy.quota > 0 && idle * 100 >= policy.quota as usize * percent {
            let (bucket, quota) = (bucket.clone(), policy.quota);
            alarms.push(Alarm::QuotaIdle {
                bucket,
                idle,
                quota,
            });
        }
    }
    let failing: Vec<u32> = view
        .records
        .iter()
        .filter_map(|r| r.condemned.as_ref())
        .map(|c| c.failures)
        .filter(|failures| *failures >= rules.settings().kills_failing_alarm)
        .collect();
    if let Some(failures_max) = failing.iter().max().copied() {
        alarms.push(Alarm::KillsFailing {
            count: failing.len(),
            failures_max,
        });
    }
    let count = view.records.iter().filter(|r| !r.is_counted()).count();
    if count > 0 {
        alarms.push(Alarm::WrittenOff { count });
    }
    alarms
}
