//! Wall-clock time, injected.

use std::{fmt, sync::Mutex, time::Duration};

/// A moment, in milliseconds since the Unix epoch.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct Timestamp(u64);

impl Timestamp {
    /// Far enough to mean "never" and near enough for every client's date parser: 9999-01-01.
    /// Clients crash without an end, so one is always sent (wire contract 1.3).
    pub const FAR_FUTURE: Self = Self(253_370_764_800_000);

    /// From milliseconds since the epoch. Later than [`Self::FAR_FUTURE`] becomes it.
    #[must_use]
    pub const fn from_unix_ms(ms: u64) -> Self {
        if ms > Self::FAR_FUTURE.0 {
            Self::FAR_FUTURE
        } else {
            Self(ms)
        }
    }

    /// Milliseconds since the epoch.
    #[must_use]
    pub const fn unix_ms(self) -> u64 {
        self.0
    }

    /// Whole seconds since the epoch.
    #[must_use]
    pub const fn unix_s(self) -> u64 {
        self.0 / 1000
    }

    /// This moment and `later`, saturating at [`Self::FAR_FUTURE`].
    #[must_use]
    pub fn plus(self, later: Duration) -> Self {
        let ms = u64::try_from(later.as_millis()).unwrap_or(u64::MAX);
        Self::from_unix_ms(self.0.saturating_add(ms))
    }

    /// How long after `earlier` this is; zero if it is not after it.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// RFC 3339 in UTC with milliseconds, as clients read it.
    #[must_use]
    pub fn to_rfc3339(self) -> String {
        let ms = i64::try_from(self.0).unwrap_or(i64::MAX);
        jiff::Timestamp::from_millisecond(ms).map_or_else(
            |_| String::from("9999-01-01T00:00:00.000Z"),
            |t| format!("{t:.3}"),
        )
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_rfc3339())
    }
}

/// Where the time comes from.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The present moment. It may jump: expiry by it only says who may try.
    fn now(&self) -> Timestamp;
}

/// The machine's own clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let ms = jiff::Timestamp::now().as_millisecond();
        Timestamp::from_unix_ms(u64::try_from(ms).unwrap_or(0))
    }
}

/// A clock that moves only when told to.
#[derive(Debug)]
pub struct ManualClock(Mutex<Timestamp>);

impl ManualClock {
    /// A clock that shows `start`.
    #[must_use]
    pub fn new(start: Timestamp) -> Self {
        Self(Mutex::new(start))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        let mut now = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        *now = now.plus(by);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        *self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_as_clients_expect() {
        assert_eq!(
            Timestamp::from_unix_ms(1_500).to_rfc3339(),
            "1970-01-01T00:00:01.500Z"
        );
        assert_eq!(
            Timestamp::FAR_FUTURE.to_rfc3339(),
            "9999-01-01T00:00:00.000Z"
        );
    }

    #[test]
    fn an_absurd_lifetime_saturates() {
        let now = Timestamp::from_unix_ms(1);
        assert_eq!(now.plus(Duration::MAX), Timestamp::FAR_FUTURE);
        assert_eq!(now.since(Timestamp::FAR_FUTURE), Duration::ZERO);
    }
}
