//! The two lifetime clocks of R-L6 as pure rules.

use std::time::Duration;

use crate::Timestamp;

/// What happens when a lifetime is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// The sandbox is removed.
    Kill,
    /// The sandbox is put to sleep.
    Pause,
}

/// Which clock a sandbox follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "clock", rename_all = "snake_case")]
pub enum Clocking {
    /// A fixed end; traffic does not move it (E2B).
    Deadline {
        /// The end.
        end: Timestamp,
    },
    /// A window that slides with activity (Cube). No window means: never.
    Idle {
        /// The window's length in milliseconds; `None` is never.
        window_ms: Option<u64>,
    },
}

/// A sandbox's lifetime: its clock and what happens at the end of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Lifetime {
    /// The clock it follows.
    pub clocking: Clocking,
    /// What happens when it is over.
    pub on_timeout: OnTimeout,
}

impl Lifetime {
    /// When the lifetime is over, given the newest activity (creation counts as one).
    #[must_use]
    pub fn end(&self, last_activity: Timestamp) -> Timestamp {
        match self.clocking {
            Clocking::Deadline { end } => end,
            Clocking::Idle { window_ms: None } => Timestamp::FAR_FUTURE,
            Clocking::Idle {
                window_ms: Some(ms),
            } => last_activity.plus(Duration::from_millis(ms)),
        }
    }

    /// The same lifetime, begun this much later: a fixed end moves, a window begins anyway.
    #[must_use]
    pub fn begun_later(mut self, by: Duration) -> Self {
        if let Clocking::Deadline { end } = &mut self.clocking
            && *end != Timestamp::FAR_FUTURE
        {
            *end = end.plus(by);
        }
        self
    }

    /// Whether it is over at `now`.
    #[must_use]
    pub fn is_over(&self, last_activity: Timestamp, now: Timestamp) -> bool {
        now >= self.end(last_activity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_unix_ms(ms)
    }

    #[test]
    fn what_begins_later_ends_later() {
        // R-L6
        let begun_later = |clocking| {
            let on_timeout = OnTimeout::Kill;
            let lifetime = Lifetime {
                clocking,
                on_timeout,
            };
            lifetime.begun_later(Duration::from_millis(7)).clocking
        };
        let fixed = |end| Clocking::Deadline { end };
        assert_eq!(begun_later(fixed(at(100))), fixed(at(107)));
        let never = fixed(Timestamp::FAR_FUTURE);
        assert_eq!(begun_later(never), never);
        let idle = Clocking::Idle {
            window_ms: Some(50),
        };
        assert_eq!(begun_later(idle), idle);
    }

    #[test]
    fn traffic_moves_the_idle_clock_and_not_the_deadline() {
        // R-L6
        let on_timeout = OnTimeout::Kill;
        let fixed = Lifetime {
            clocking: Clocking::Deadline { end: at(100) },
            on_timeout,
        };
        assert!(fixed.is_over(at(99), at(100)));
        let idle = Lifetime {
            clocking: Clocking::Idle {
                window_ms: Some(50),
            },
            on_timeout,
        };
        assert!(!idle.is_over(at(99), at(100)));
        assert!(idle.is_over(at(99), at(149)));
        let never = Lifetime {
            clocking: Clocking::Idle { window_ms: None },
            on_timeout,
        };
        assert!(!never.is_over(at(0), at(u64::from(u32::MAX))));
        let now = Lifetime {
            clocking: Clocking::Idle { window_ms: Some(0) },
            on_timeout,
        };
        assert!(now.is_over(at(7), at(7)));
    }
}
