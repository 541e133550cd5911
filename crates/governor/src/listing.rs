//! Listings are evidence, not truth (R-G11).
//!
//! ```text
//!   usable ─────────────────────────────▶ use it
//!   failed, or from some to none ───────▶ skip, skip, skip, then reconcile: ask for each by name
//! ```
//!
//! Whatever a listing does not show is asked for by name in any case; what this decides is whether
//! the round may count at all.

use crate::rules::{Rule, Rules};

/// What a round makes of its listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// It is evidence.
    Use,
    /// It is doubtful: nothing is concluded in this round, the `rounds`-th in a row.
    Skip {
        /// How many rounds in a row.
        rounds: u32,
    },
    /// It has been doubtful for too long: conclude without it, loudly.
    Reconcile,
}

/// Judges listings, one round after the other. Belongs to one replica.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListingJudge {
    last_count: Option<usize>,
    skips: u32,
}

impl ListingJudge {
    /// Judges a listing of `listed` sandboxes (`None`: it failed), where the books know `known`.
    pub fn judge(&mut self, listed: Option<usize>, known: usize, rules: &Rules) -> Judgement {
        let listed = match listed {
            None if !rules.keeps(Rule::FailedListingSkips) => Some(0),
            other => other,
        };
        let before = self.last_count.unwrap_or(known);
        let doubtful = match listed {
            None => true,
            Some(0) => before > 0 && rules.keeps(Rule::FailedListingSkips),
            Some(_) => false,
        };
        let skips_end = rules.keeps(Rule::SkipsAreBounded);
        if !doubtful {
            self.skips = 0;
            self.last_count = listed;
            return Judgement::Use;
        }
        if self.skips >= rules.settings().listing_skips_max && skips_end {
            self.skips = 0;
            // From now on, none is what it was before.
            self.last_count = listed.or(self.last_count);
            return Judgement::Reconcile;
        }
        self.skips += 1;
        Judgement::Skip { rounds: self.skips }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Judgement::{Reconcile, Skip, Use};

    fn judged(rounds: &[Option<usize>]) -> Vec<Judgement> {
        let (mut judge, rules) = (ListingJudge::default(), Rules::default());
        rounds
            .iter()
            .map(|listed| judge.judge(*listed, 1, &rules))
            .collect()
    }

    #[test]
    fn a_failed_listing_skips_at_most_three_rounds_in_a_row() {
        // R-G11
        let rounds = judged(&[Some(5), None, None, None, None, None]);
        let skip = |rounds| Skip { rounds };
        assert_eq!(rounds, [Use, skip(1), skip(2), skip(3), Reconcile, skip(1)]);
    }

    #[test]
    fn the_last_sandbox_pausing_does_not_lock_the_system() {
        // R-I4: from one to none, and it stays none.
        let rounds = judged(&[Some(1), Some(0), Some(0), Some(0), Some(0), Some(0)]);
        let skip = |rounds| Skip { rounds };
        assert_eq!(rounds, [Use, skip(1), skip(2), skip(3), Reconcile, Use]);
    }

    #[test]
    fn a_restarted_replica_takes_the_books_for_what_was_before() {
        // R-G11
        assert_eq!(judged(&[Some(0)]), [Skip { rounds: 1 }]);
        let (mut judge, rules) = (ListingJudge::default(), Rules::default());
        assert_eq!(
            judge.judge(Some(0), 0, &rules),
            Use,
            "nothing is known, nothing is shown"
        );
    }
}
