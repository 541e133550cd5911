//! A request's deadline, from the edge to the engine (R-L9).

use std::time::{Duration, Instant};

/// The moment by which the caller wants its answer. Every layer spends from it; none has a timeout
/// constant of its own that could outlive it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    at: Instant,
}

/// The parts of a deadline of an operation that may have to wake, clean up and answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// For waking what must be awake first.
    pub wake: Duration,
    /// For removing it.
    pub clean_up: Duration,
    /// For telling the caller.
    pub answer: Duration,
}

impl Deadline {
    /// A deadline `budget` from `now`.
    #[must_use]
    pub fn after(now: Instant, budget: Duration) -> Self {
        Self { at: now + budget }
    }

    /// The deadline's instant, for timers.
    #[must_use]
    pub fn instant(self) -> Instant {
        self.at
    }

    /// What is left at `now`; zero when it has passed.
    #[must_use]
    pub fn remaining(self, now: Instant) -> Duration {
        self.at.saturating_duration_since(now)
    }

    /// Divides what is left at `now` as 5 : 20 : 5 of 30 s, so that a shorter deadline shrinks the
    /// parts rather than failing always (R-L9).
    #[must_use]
    pub fn split(self, now: Instant) -> Budget {
        let sixth = self.remaining(now) / 6;
        Budget {
            wake: sixth,
            clean_up: sixth * 4,
            answer: sixth,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_shrink_in_proportion() {
        // R-L9
        let now = Instant::now();
        let half_minute = Deadline::after(now, Duration::from_secs(30)).split(now);
        assert_eq!(half_minute.wake, Duration::from_secs(5));
        assert_eq!(half_minute.clean_up, Duration::from_secs(20));
        assert_eq!(half_minute.answer, Duration::from_secs(5));
        let short = Deadline::after(now, Duration::from_secs(6)).split(now);
        assert_eq!(short.clean_up, Duration::from_secs(4));
        let past = Deadline::after(now, Duration::ZERO);
        assert_eq!(past.remaining(now + Duration::from_secs(1)), Duration::ZERO);
    }
}
