//! Every number of the governor, in one place.
//!
//! [`Settings`] are what an operator may choose; [`Rules`] are settings whose inequalities hold. A
//! number that follows from others is a method of [`Rules`], never a setting of its own. Nothing
//! else in this crate contains a duration or a count.
//!
//! ```text
//!   0          120 s          180 s        240 s ...                     end + 1800 s
//!   ├─ black ────┼── grey ───────┼─ white ──────┼─ white again: sweep        │ overdue: whoever
//!   heartbeat    4 × heartbeat   3 × cycle      one cycle later              ▼ holds it
//! ```

use std::time::Duration;

/// What an operator may choose. The defaults are the requirement's numbers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Settings {
    /// How often a holder says that it is alive (R-G3).
    pub heartbeat: Duration,
    /// After how many silent heartbeats a root is no longer black (R-G10: 4).
    pub black_heartbeats: u32,
    /// How often the reclaimer looks (R-G10).
    pub cycle: Duration,
    /// After how many silent cycles a root is no longer grey (R-G10: 3).
    pub grey_cycles: u32,
    /// In how many consecutive confirmed cycles a sandbox must be white (R-G10: 2).
    pub white_cycles: u32,
    /// How long a request waits for a slot (R-G4).
    pub wait_max: Duration,
    /// How often a waiting request asks again.
    pub wait_poll: Duration,
    /// A waiting request that does not ask for so long has lost its place in the queue.
    pub wait_silence_max: Duration,
    /// How far past its end a sandbox is removed whoever holds it (R-G12).
    pub overdue_grace: Duration,
    /// How many rounds in a row a doubtful listing may skip (R-G11).
    pub listing_skips_max: u32,
    /// How much faster or slower than the store's clock a holder's clock may run.
    pub clock_rate_max: u32,
    /// How long a create may take, by the clock of who asks.
    pub create_deadline: Duration,
    /// How long a delete, a wake-up or an ask may take, by the clock of who asks.
    pub call_deadline: Duration,
    /// Creates under way at once, for each replica (R-G14).
    pub creates_max: u32,
    /// Deletes under way at once, for each replica (R-G14).
    pub deletes_max: u32,
    /// Sandboxes awake only to be deleted, over all replicas (R-G16, R-I7).
    pub awake_for_removal_max: u32,
    /// Failures in a row after which the breaker opens (R-G14).
    pub breaker_failures: u32,
    /// How long an open breaker stays open before one probe is let through.
    pub breaker_open: Duration,
    /// The largest share of the known sandboxes that one cycle may condemn, in percent.
    pub blast_percent: u32,
    /// What one cycle may condemn even if it is more than that share.
    pub blast_floor: u32,
    /// Rounds of the health gate (R-G9).
    pub probe_rounds: u32,
    /// Tries in each round of the health gate (R-G9).
    pub probe_tries: u32,
    /// How often an unhealthy sandbox is replaced before the caller is told.
    pub rebuilds_max: u32,
    /// How often a run looks for new artifacts and its exit.
    pub run_poll: Duration,
    /// How many ended generations of an owner are remembered as sealed.
    pub sealed_max: usize,
    /// How full of sandboxes that nobody uses a bucket may be before it is alarmed, in percent.
    pub idle_alarm_percent: u32,
    /// After how many failed deletes of one sandbox it is alarmed.
    pub kills_failing_alarm: u32,
}

impl Default for Settings {
    fn default() -> Self {
        let s = Duration::from_secs;
        Self {
            heartbeat: s(30),
            black_heartbeats: 4,
            cycle: s(60),
            grey_cycles: 3,
            white_cycles: 2,
            wait_max: s(30),
            wait_poll: s(1),
            wait_silence_max: s(5),
            overdue_grace: s(1800),
            listing_skips_max: 3,
            clock_rate_max: 2,
            create_deadline: s(30),
            call_deadline: s(30),
            creates_max: 16,
            deletes_max: 16,
            awake_for_removal_max: 4,
            breaker_failures: 5,
            breaker_open: s(15),
            blast_percent: 50,
            blast_floor: 10,
            probe_rounds: 3,
            probe_tries: 3,
            rebuilds_max: 2,
            run_poll: s(1),
            sealed_max: 256,
            idle_alarm_percent: 80,
            kills_failing_alarm: 3,
        }
    }
}

/// Which inequality between two numbers does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the governor's numbers do not fit together: {0}")]
pub struct RulesError(pub &'static str);

/// Settings whose inequalities hold.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Rules {
    settings: Settings,
    #[cfg(feature = "mutations")]
    without: Option<Rule>,
}

impl Rules {
    /// Checks the inequalities on which the safety of everything else rests.
    ///
    /// # Errors
    /// The first inequality that does not hold, in words.
    pub fn new(settings: Settings) -> Result<Self, RulesError> {
        let rules = Self {
            settings,
            #[cfg(feature = "mutations")]
            without: None,
        };
        for (holds, why) in rules.inequalities() {
            if !holds {
                return Err(RulesError(why));
            }
        }
        Ok(rules)
    }

    fn inequalities(&self) -> [(bool, &'static str); 14] {
        let s = &self.settings;
        [
            (
                !s.heartbeat.is_zero(),
                "the heartbeat must be longer than nothing",
            ),
            (s.clock_rate_max >= 1, "a clock rate below 1 means nothing"),
            (
                s.heartbeat * 2 <= self.holder_deadline(),
                "a holder must be able to lose one heartbeat: 2 × heartbeat ≤ holder deadline",
            ),
            (
                self.black() < self.grey(),
                "black must end before grey does",
            ),
            (
                self.grey() >= self.black() + s.cycle,
                "a run of a dead replica must be on offer for one cycle: black + cycle ≤ grey",
            ),
            (
                s.white_cycles >= 2,
                "one look proves nothing: two white cycles at least",
            ),
            (
                s.cycle >= s.heartbeat * s.clock_rate_max,
                "every holder must be heard between two looks: heartbeat × rate ≤ cycle",
            ),
            (
                self.look_spacing() > s.heartbeat,
                "every holder must be heard between two looks: heartbeat < 3/4 cycle",
            ),
            (
                s.create_deadline * s.clock_rate_max < self.black(),
                "a create must end while its slot is black: create deadline × rate < black",
            ),
            (
                s.call_deadline * s.clock_rate_max < self.black(),
                "a delete must end while its lock is black: call deadline × rate < black",
            ),
            (
                s.wait_poll * s.clock_rate_max < s.wait_silence_max
                    && s.wait_silence_max < s.wait_max,
                "a waiting request must be heard: poll × rate < silence < wait",
            ),
            (
                s.overdue_grace > self.grey() + s.cycle * s.white_cycles,
                "the fallback must be slower than the ordinary way: grey + white cycles < overdue",
            ),
            (
                (1..=100).contains(&s.blast_percent) && s.blast_floor >= 1,
                "one cycle must be able to condemn something: share 1 to 100 %, floor at least 1",
            ),
            (
                s.creates_max >= 1 && s.deletes_max >= 1 && s.awake_for_removal_max >= 1,
                "creates, deletes and wake-ups each need a budget of at least 1",
            ),
        ]
    }

    /// The chosen numbers.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// How young a heartbeat makes its root black: 4 × 30 s = 120 s (R-G10).
    #[must_use]
    pub fn black(&self) -> Duration {
        self.settings.heartbeat * self.settings.black_heartbeats
    }

    /// How young a heartbeat makes its root at least grey: 3 × 60 s = 180 s (R-G10).
    #[must_use]
    pub fn grey(&self) -> Duration {
        self.settings.cycle * self.settings.grey_cycles
    }

    /// After how long without a confirmed heartbeat a holder stops by itself, *by its own clock and
    /// from when it sent the last one*: early enough that even a clock at the slowest tolerated rate
    /// stops before the root turns grey.
    #[must_use]
    pub fn holder_deadline(&self) -> Duration {
        self.black() / self.settings.clock_rate_max
    }

    /// How long the platform may take to carry out a call that nobody waits for any more. Until it
    /// has passed, a create without an answer may still make a sandbox, and a store that lost writes
    /// admits nobody new.
    #[must_use]
    pub fn settle(&self) -> Duration {
        self.grey()
    }

    /// How far apart, by the store's clock, two looks must be to count as two cycles: a cycle that was
    /// asked for by hand right after another proves nothing new.
    #[must_use]
    pub fn look_spacing(&self) -> Duration {
        self.settings.cycle * 3 / 4
    }

    /// How many of `known` sandboxes one cycle may condemn.
    #[must_use]
    pub fn blast_radius(&self, known: usize) -> usize {
        let share = known * self.settings.blast_percent as usize / 100;
        share.max(self.settings.blast_floor as usize)
    }

    /// Whether a rule is in force. Always true but in the simulator's mutation tests.
    #[must_use]
    #[cfg_attr(not(feature = "mutations"), expect(clippy::unused_self))]
    pub(crate) fn keeps(&self, rule: Rule) -> bool {
        #[cfg(feature = "mutations")]
        return self.without != Some(rule);
        #[cfg(not(feature = "mutations"))]
        {
            let _ = rule;
            true
        }
    }

    /// The same numbers with one rule taken away, to show that some checker then fails.
    #[cfg(feature = "mutations")]
    #[must_use]
    pub fn without(mut self, rule: Rule) -> Self {
        self.without = Some(rule);
        self
    }

    /// Which rule was taken away.
    #[cfg(feature = "mutations")]
    #[must_use]
    pub fn missing(&self) -> Option<Rule> {
        self.without
    }
}

macro_rules! rules_list {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The rules that can be taken away in a simulation, one at a time.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Rule { $($(#[$doc])* $name,)* }

        impl Rule {
            /// Every rule.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];
        }
    };
}

rules_list! {
    /// A slot is checked and taken in one step (R-G4). Without: looked at, then taken.
    AtomicAdmission,
    /// First come, first served (R-G4). Without: whoever asks when there is room.
    FirstCome,
    /// A slot goes back only when the sandbox is gone (R-G5). Without: when it is condemned.
    SlotUntilGone,
    /// A create without an answer keeps its slot until it is settled (R-G5). Without: it goes back.
    DoubtKeepsSlot,
    /// Only the current lease releases (R-G7). Without: any lease of the owner does.
    ReleaseMatches,
    /// A sealed generation never acts again (R-G7). Without: it may ask again.
    SealedStaysSealed,
    /// Generations never repeat, even if the store lost writes (R-G6). Without: a plain counter.
    FenceNeverRepeats,
    /// The sandbox's node refuses generations below the highest it saw (R-G8).
    FenceAtNode,
    /// A lease is a root only while it is renewed (R-I3). Without: for ever.
    LeaseExpires,
    /// White in two cycles (R-G10). Without: in one.
    TwoCycles,
    /// The generation must not have changed since the marks (R-G10).
    GenerationUnchanged,
    /// Roots are checked and the sandbox condemned in one step (R-G10). Without: in two.
    AtomicRemoval,
    /// Roots are looked at again when the sandbox is condemned (R-G10). Without: not again.
    RootsAgain,
    /// A condemned sandbox is never handed out again. Without: after a failed delete it may be.
    CondemnedForGood,
    /// A scan renews nothing (R-G10). Without: a sandbox in the listing is renewed.
    ScanRenewsNothing,
    /// A sandbox that a listing does not show is asked for by name (R-G11). Without: it is gone.
    ListingIsEvidence,
    /// A listing that failed is not an empty one (R-G11).
    FailedListingSkips,
    /// At most three skipped rounds (R-G11). Without: for ever.
    SkipsAreBounded,
    /// Long past its end it goes, whoever holds it (R-G12).
    OverdueGoes,
    /// A paused sandbox of a held lease is kept as its bucket declares (R-G13). Without: swept.
    PolicyKeeps,
    /// What is kept for want of a declaration is shown and alarmed (R-G13, R-I8).
    ZombiesAreShown,
    /// Retention that was declared ends (R-G13). Without: kept for ever.
    RetentionEnds,
    /// Whether it is paused is asked, not read from a listing (R-G13).
    ReallyPaused,
    /// Deletes run side by side (R-G14). Without: one after the other.
    KillsSideBySide,
    /// Creates and deletes have separate budgets (R-G14). Without: one for both.
    SeparateBudgets,
    /// Writes go through a circuit breaker (R-G14).
    Breaker,
    /// Only so many sandboxes are awake in order to be deleted (R-I7).
    WakeBudget,
    /// A delete that got no answer proves nothing (R-G10). Without: it counts as done.
    OnlyGoneIsGone,
    /// One cycle condemns at most a share of all sandboxes.
    BlastRadius,
    /// After lost writes nobody new is admitted until all is settled.
    RecoverySettles,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requirements_numbers_fit_together() {
        // R-G10, R-G12
        let rules = Rules::new(Settings::default()).unwrap();
        assert_eq!(rules, Rules::default());
        assert_eq!(rules.black(), Duration::from_secs(120));
        assert_eq!(rules.grey(), Duration::from_secs(180));
        assert_eq!(rules.holder_deadline(), Duration::from_secs(60));
        assert_eq!(rules.blast_radius(704), 352);
        assert_eq!(rules.blast_radius(4), 10);
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused_with_the_reason() {
        let refused = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            Rules::new(settings).unwrap_err().0
        };
        let s = Duration::from_secs;
        assert!(refused(|n| n.white_cycles = 1).contains("two white cycles"));
        assert!(refused(|n| n.clock_rate_max = 3).contains("lose one heartbeat"));
        assert!(refused(|n| n.grey_cycles = 2).contains("black must end before grey"));
        assert!(refused(|n| n.create_deadline = Duration::from_secs(60)).contains("create"));
        assert!(refused(|n| n.overdue_grace = Duration::from_secs(300)).contains("fallback"));
        assert!(refused(|n| n.wait_silence_max = Duration::from_secs(2)).contains("heard"));
        assert!(refused(|n| n.blast_percent = 0).contains("condemn something"));
        assert!(refused(|n| n.heartbeat = Duration::ZERO).contains("longer than nothing"));
        let scaled = Settings {
            heartbeat: s(3),
            cycle: s(6),
            create_deadline: s(3),
            call_deadline: s(3),
            ..Settings::default()
        };
        assert!(
            Rules::new(scaled).is_ok(),
            "a scaled set for tests against real sandboxes"
        );
    }
}
