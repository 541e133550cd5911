//! Each rule is needed: taken away, some checker fails within so many worlds.
//!
//! Rules that answer an incident of a certain shape are taken away in `incidents.rs`; together the
//! lists must name every rule there is.

use std::collections::BTreeSet;

use sandhold_governor::rules::{Rule, Rules};
use sandhold_sim::world::World;

/// Rules that the incidents prove.
const BY_INCIDENT: &[Rule] = &[
    Rule::Breaker,
    Rule::KillsSideBySide,
    Rule::OverdueGoes,
    Rule::BlastRadius,
    Rule::RetentionEnds,
    Rule::WakeBudget,
    Rule::ZombiesAreShown,
    Rule::SeparateBudgets,
];

/// Rules that random worlds prove, and by which checkers.
const BY_SEEDS: &[(Rule, &[&str])] = &[
    (Rule::AtomicAdmission, &["quota", "queue", "release"]),
    (Rule::FirstCome, &["queue"]),
    (Rule::SlotUntilGone, &["freed"]),
    (Rule::DoubtKeepsSlot, &["freed", "quota"]),
    (Rule::ReleaseMatches, &["release"]),
    (Rule::SealedStaysSealed, &["release"]),
    (Rule::FenceNeverRepeats, &["writer"]),
    (Rule::FenceAtNode, &["writer", "live"]),
    (Rule::LeaseExpires, &["liveness"]),
    (Rule::TwoCycles, &["looks", "live"]),
    (Rule::GenerationUnchanged, &["looks"]),
    (Rule::AtomicRemoval, &["live"]),
    (Rule::RootsAgain, &["live", "policy"]),
    (Rule::CondemnedForGood, &["live"]),
    (Rule::ScanRenewsNothing, &["scan"]),
    (Rule::ListingIsEvidence, &["freed"]),
    (Rule::FailedListingSkips, &["listing"]),
    (Rule::SkipsAreBounded, &["listing", "liveness"]),
    (Rule::PolicyKeeps, &["policy"]),
    (Rule::ReallyPaused, &["policy"]),
    (Rule::OnlyGoneIsGone, &["freed"]),
    (Rule::RecoverySettles, &["quota", "live", "writer"]),
];

const SEEDS_MAX: u64 = 6_000;

/// The first world that needs the rule, and what went wrong in it.
fn caught(rule: Rule) -> Option<(u64, String)> {
    (1..=SEEDS_MAX).find_map(|seed| {
        let report = World::from_seed(seed, Rules::default().without(rule)).run();
        report.violation.map(|violation| (seed, violation))
    })
}

#[test]
fn every_rule_is_needed() {
    for (rule, checkers) in BY_SEEDS {
        let found = caught(*rule);
        let Some((seed, violation)) = found else {
            panic!("{rule:?} was taken away and nothing went wrong in {SEEDS_MAX} worlds");
        };
        let checker = violation.split(':').next().unwrap_or_default();
        assert!(
            checkers.contains(&checker),
            "{rule:?}, seed {seed}: {violation}"
        );
    }
}

#[test]
fn every_rule_is_on_a_list() {
    let listed: BTreeSet<Rule> = BY_SEEDS
        .iter()
        .map(|(rule, _)| *rule)
        .chain(BY_INCIDENT.iter().copied())
        .collect();
    let all: BTreeSet<Rule> = Rule::ALL.iter().copied().collect();
    assert_eq!(listed, all);
}
