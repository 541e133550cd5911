//! R-I1 to R-I8: each incident is replayed and stays impossible, and comes back when the rule that
//! answers it is taken away.

use sandhold_governor::rules::{Rule, Rules};
use sandhold_sim::scenario::Incident;

fn stays_impossible(incident: Incident) {
    let report = incident.replay(Rules::default());
    assert_eq!(report.violation, None, "{incident:?}");
}

fn comes_back_without(incident: Incident, rules: &[Rule]) {
    for rule in rules {
        let report = incident.replay(Rules::default().without(*rule));
        assert!(
            report.violation.is_some(),
            "{incident:?} does not need {rule:?}"
        );
    }
}

macro_rules! incidents {
    ($($name:ident = $incident:ident, $($rule:ident),*;)*) => {$(
        #[test]
        fn $name() {
            stays_impossible(Incident::$incident);
            comes_back_without(Incident::$incident, &[$(Rule::$rule),*]);
        }
    )*};
}

incidents! {
    r_i1_the_spiral = Spiral, Breaker, KillsSideBySide;
    r_i2_the_frozen_sweeper = FrozenSweeper, OverdueGoes, BlastRadius;
    r_i3_immortal_leases = ImmortalLeases, LeaseExpires, RetentionEnds;
    r_i4_the_self_lock = SelfLock, SkipsAreBounded;
    r_i5_the_late_clean_up = LateCleanUp, ReleaseMatches;
    r_i6_the_undeletable = Undeletable, OverdueGoes;
    r_i7_the_wake_storm = WakeStorm, WakeBudget;
    r_g14_the_starved_clean_up = StarvedCleanUp, SeparateBudgets;
    r_i8_the_invisible_zombies = InvisibleZombies, ZombiesAreShown, PolicyKeeps;
}
