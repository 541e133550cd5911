//! How a change moves a sandbox's clock (R-L6, R-L11): pure rules.

use std::time::Duration;

use sandhold_platform::{AUTO_RESUME_MIN_MS, LifetimeChange, NewLifetime, Resume};
use sandhold_types::{Clocking, Lifetime, Timestamp};

/// The lifetime after `change` at `now`. The caller also notes activity at `now`, which is what
/// makes an idle window begin again.
pub(crate) fn after(lifetime: Lifetime, change: LifetimeChange, now: Timestamp) -> Lifetime {
    let end = |after_ms| from_now(now, after_ms);
    let clocking = match (change, lifetime.clocking) {
        (LifetimeChange::OnTimeout(on_timeout), _) => {
            return Lifetime {
                on_timeout,
                ..lifetime
            };
        }
        (LifetimeChange::Replace { after_ms }, Clocking::Deadline { .. }) => {
            Clocking::Deadline { end: end(after_ms) }
        }
        (LifetimeChange::Replace { after_ms }, Clocking::Idle { .. }) => Clocking::Idle {
            window_ms: after_ms,
        },
        (LifetimeChange::Extend { after_ms: None }, unchanged) => unchanged,
        (LifetimeChange::Extend { after_ms }, Clocking::Deadline { end: old }) => {
            Clocking::Deadline {
                end: old.max(end(after_ms)),
            }
        }
        (LifetimeChange::Extend { after_ms: Some(ms) }, Clocking::Idle { window_ms }) => {
            Clocking::Idle {
                window_ms: window_ms.map(|old| old.max(ms)),
            }
        }
    };
    Lifetime {
        clocking,
        ..lifetime
    }
}

/// The lifetime of a sandbox that wakes at `now` and was made for `life_ms`; `None` is never.
pub(crate) fn after_wake(
    lifetime: Lifetime,
    life_ms: Option<u64>,
    resume: &Resume,
    now: Timestamp,
) -> Lifetime {
    let clocking = match (lifetime.clocking, resume.lifetime) {
        (Clocking::Deadline { .. }, NewLifetime::After(ms)) => Clocking::Deadline {
            end: from_now(now, ms),
        },
        (Clocking::Deadline { .. }, NewLifetime::AsMade) => Clocking::Deadline {
            end: from_now(now, life_ms.map(|ms| ms.max(AUTO_RESUME_MIN_MS))),
        },
        (Clocking::Idle { .. }, NewLifetime::After(window_ms)) => Clocking::Idle { window_ms },
        (idle @ Clocking::Idle { .. }, NewLifetime::AsMade) => idle,
    };
    Lifetime {
        clocking,
        on_timeout: resume.on_timeout.unwrap_or(lifetime.on_timeout),
    }
}

fn from_now(now: Timestamp, after_ms: Option<u64>) -> Timestamp {
    after_ms.map_or(Timestamp::FAR_FUTURE, |ms| {
        now.plus(Duration::from_millis(ms))
    })
}

#[cfg(test)]
mod tests {
    use sandhold_types::OnTimeout;

    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_unix_ms(ms)
    }

    fn deadline(end_ms: u64) -> Lifetime {
        let clocking = Clocking::Deadline { end: at(end_ms) };
        Lifetime {
            clocking,
            on_timeout: OnTimeout::Kill,
        }
    }

    #[test]
    fn connect_never_shortens_a_life() {
        // R-L11, BC-069
        let extend = |ms| {
            after(
                deadline(1_800),
                LifetimeChange::Extend { after_ms: ms },
                at(0),
            )
        };
        assert_eq!(extend(Some(300)), deadline(1_800));
        assert_eq!(extend(None), deadline(1_800));
        assert_eq!(extend(Some(3_600)), deadline(3_600));
    }

    #[test]
    fn set_timeout_may_shorten_and_may_mean_now() {
        let replace = |ms| {
            after(
                deadline(1_800),
                LifetimeChange::Replace { after_ms: ms },
                at(10),
            )
        };
        assert_eq!(replace(Some(5)), deadline(15));
        assert!(replace(Some(0)).is_over(at(0), at(10)));
        assert_eq!(replace(None).end(at(0)), Timestamp::FAR_FUTURE);
    }

    #[test]
    fn never_stays_never_when_extended() {
        let clocking = Clocking::Idle { window_ms: None };
        let never = Lifetime {
            clocking,
            on_timeout: OnTimeout::Kill,
        };
        let extended = after(never, LifetimeChange::Extend { after_ms: Some(1) }, at(0));
        assert_eq!(extended.end(at(0)), Timestamp::FAR_FUTURE);
    }
}
