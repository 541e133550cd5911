//! Timeouts of both kinds of clients, and the clock that follows from a create (wire contract 1.4).

use sandhold_platform::LifetimeChange;
use sandhold_types::{Clocking, Lifetime, OnTimeout, Timestamp};
use serde::Deserialize;

use super::WholeSeconds;
use crate::{DefaultLifetimes, Dialect, error::ApiError};

/// "Never", as clients write it.
const NEVER_S: i64 = -1;

/// What `refreshes` gives at least, and at most.
const REFRESH_S_MIN: i64 = 15;
const REFRESH_S_MAX: i64 = 3600;

/// Which generation of the routes was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouteGeneration {
    /// `/sandboxes`
    First,
    /// `/v2/sandboxes`
    Second,
}

/// A length of time that a client named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Span {
    Never,
    Seconds(u64),
}

impl Span {
    /// Milliseconds; `None` is never.
    pub(crate) fn to_ms(self) -> Option<u64> {
        match self {
            Self::Never => None,
            Self::Seconds(seconds) => Some(seconds.saturating_mul(1000)),
        }
    }
}

/// The shortest length of time that makes sense in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shortest {
    Zero,
    OneSecond,
}

/// Checks a length of time. -1 is never, everywhere.
pub(crate) fn span(
    field: &'static str,
    value: WholeSeconds,
    shortest: Shortest,
    seconds_max: u64,
) -> Result<Span, ApiError> {
    if value.0 == NEVER_S {
        return Ok(Span::Never);
    }
    let seconds_min = match shortest {
        Shortest::Zero => 0,
        Shortest::OneSecond => 1,
    };
    match u64::try_from(value.0) {
        Ok(seconds) if (seconds_min..=seconds_max).contains(&seconds) => Ok(Span::Seconds(seconds)),
        _ => Err(ApiError::invalid(
            field,
            format!("must be between {seconds_min} and {seconds_max} seconds, or -1 for never"),
        )),
    }
}

/// Which clock a new sandbox follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClockKind {
    Deadline,
    Idle,
}

/// What of a create decides its clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClockSigns {
    pub(crate) generation: RouteGeneration,
    pub(crate) dialect: Dialect,
    /// The body has `autoPause`, `autoPauseMemory` or `autoResume`.
    pub(crate) has_auto_fields: bool,
    /// The body has `lifecycle`.
    pub(crate) has_lifecycle: bool,
}

impl ClockSigns {
    /// The rule of wire contract 1.4.
    pub(crate) fn clock(self) -> ClockKind {
        if self.generation == RouteGeneration::Second || self.has_auto_fields {
            ClockKind::Deadline
        } else if self.has_lifecycle || self.dialect == Dialect::Cube {
            ClockKind::Idle
        } else {
            ClockKind::Deadline
        }
    }
}

/// The lifetime of a new sandbox.
pub(crate) fn new_lifetime(
    signs: ClockSigns,
    timeout: Option<WholeSeconds>,
    defaults: DefaultLifetimes,
    seconds_max: u64,
    now: Timestamp,
) -> Result<Lifetime, ApiError> {
    let clock = signs.clock();
    let shortest = match clock {
        ClockKind::Deadline => Shortest::OneSecond,
        ClockKind::Idle => Shortest::Zero,
    };
    let window = match (timeout, clock, signs.generation) {
        (Some(given), ..) => span("timeout", given, shortest, seconds_max)?,
        (None, ClockKind::Idle, _) => defaults.idle_window_s.map_or(Span::Never, Span::Seconds),
        (None, _, RouteGeneration::Second) => Span::Seconds(defaults.second_generation_s),
        (None, _, RouteGeneration::First) => Span::Seconds(defaults.first_generation_s),
    };
    let clocking = match clock {
        ClockKind::Idle => Clocking::Idle {
            window_ms: window.to_ms(),
        },
        ClockKind::Deadline => Clocking::Deadline {
            end: window.to_ms().map_or(Timestamp::FAR_FUTURE, |ms| {
                now.plus(std::time::Duration::from_millis(ms))
            }),
        },
    };
    Ok(Lifetime {
        clocking,
        on_timeout: OnTimeout::Kill,
    })
}

/// `POST /sandboxes/{id}/timeout`
#[derive(Debug, Deserialize)]
pub(crate) struct TimeoutBody {
    timeout: Option<WholeSeconds>,
}

impl TimeoutBody {
    pub(crate) fn change(&self, seconds_max: u64) -> Result<LifetimeChange, ApiError> {
        let given = self
            .timeout
            .ok_or_else(|| ApiError::invalid("timeout", "is required"))?;
        let after_ms = span("timeout", given, Shortest::Zero, seconds_max)?.to_ms();
        Ok(LifetimeChange::Replace { after_ms })
    }
}

/// `POST /sandboxes/{id}/refreshes`
#[derive(Debug, Deserialize)]
pub(crate) struct RefreshBody {
    duration: Option<WholeSeconds>,
}

impl RefreshBody {
    pub(crate) fn change(&self) -> Result<LifetimeChange, ApiError> {
        let seconds = self.duration.map_or(REFRESH_S_MIN, |given| given.0);
        if !(0..=REFRESH_S_MAX).contains(&seconds) {
            let rule = format!("must be between 0 and {REFRESH_S_MAX} seconds");
            return Err(ApiError::invalid("duration", rule));
        }
        let seconds = u64::try_from(seconds.max(REFRESH_S_MIN)).unwrap_or(0);
        Ok(LifetimeChange::Extend {
            after_ms: Span::Seconds(seconds).to_ms(),
        })
    }
}

/// `POST /sandboxes/{id}/connect`, both generations, and `/resume`.
#[derive(Debug, Deserialize)]
pub(crate) struct ConnectBody {
    timeout: Option<WholeSeconds>,
    #[serde(rename = "autoPause")]
    pub(crate) auto_pause: Option<bool>,
    // Whether to bring memory back matters to paused sandboxes only.
    #[serde(rename = "memory")]
    _memory: Option<bool>,
}

impl ConnectBody {
    /// Connecting never shortens a life (R-L11, BC-069).
    pub(crate) fn change(
        &self,
        generation: RouteGeneration,
        dialect: Dialect,
        defaults: DefaultLifetimes,
        seconds_max: u64,
    ) -> Result<LifetimeChange, ApiError> {
        let shortest = match (generation, dialect) {
            (RouteGeneration::First, Dialect::Cube) => Shortest::OneSecond,
            _ => Shortest::Zero,
        };
        let given = match (self.timeout, generation) {
            (Some(given), _) => span("timeout", given, shortest, seconds_max)?,
            (None, RouteGeneration::Second) => Span::Seconds(defaults.second_generation_s),
            // Only counts as activity.
            (None, RouteGeneration::First) => {
                return Ok(LifetimeChange::Extend { after_ms: None });
            }
        };
        Ok(match given {
            // Nothing is later than never, so this does not shorten either.
            Span::Never => LifetimeChange::Replace { after_ms: None },
            Span::Seconds(_) => LifetimeChange::Extend {
                after_ms: given.to_ms(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_S: u64 = 1000;

    fn signs(generation: RouteGeneration, dialect: Dialect) -> ClockSigns {
        ClockSigns {
            generation,
            dialect,
            has_auto_fields: false,
            has_lifecycle: false,
        }
    }

    #[test]
    fn the_clock_follows_from_route_body_and_client() {
        // R-L6, wire contract 1.4
        use ClockKind as C;
        use Dialect as D;
        use RouteGeneration as G;
        let cases = [
            (G::Second, D::E2b, false, false, C::Deadline),
            (G::Second, D::Cube, false, true, C::Deadline),
            (G::First, D::E2b, false, false, C::Deadline),
            (G::First, D::E2b, false, true, C::Idle),
            (G::First, D::Cube, false, false, C::Idle),
            (G::First, D::Cube, true, false, C::Deadline),
            (G::First, D::Cube, true, true, C::Deadline),
        ];
        for (generation, dialect, has_auto_fields, has_lifecycle, expected) in cases {
            let signs = ClockSigns {
                generation,
                dialect,
                has_auto_fields,
                has_lifecycle,
            };
            assert_eq!(signs.clock(), expected, "{signs:?}");
        }
    }

    #[test]
    fn a_create_without_a_timeout_gets_its_generations_default() {
        let (defaults, now) = (DefaultLifetimes::default(), Timestamp::from_unix_ms(0));
        let lifetime = |generation, dialect| {
            let signs = signs(generation, dialect);
            new_lifetime(signs, None, defaults, MAX_S, now)
                .unwrap()
                .clocking
        };
        let end = |ms| Clocking::Deadline {
            end: Timestamp::from_unix_ms(ms),
        };
        assert_eq!(
            lifetime(RouteGeneration::Second, Dialect::E2b),
            end(300_000)
        );
        assert_eq!(lifetime(RouteGeneration::First, Dialect::E2b), end(15_000));
        let never = Clocking::Idle { window_ms: None };
        assert_eq!(lifetime(RouteGeneration::First, Dialect::Cube), never);
    }

    #[test]
    fn the_values_of_a_creates_timeout() {
        let now = Timestamp::from_unix_ms(0);
        let lifetime = |generation, dialect, seconds| {
            let signs = signs(generation, dialect);
            let given = Some(WholeSeconds(seconds));
            new_lifetime(signs, given, DefaultLifetimes::default(), MAX_S, now)
                .map(|lifetime| lifetime.clocking)
                .map_err(|refused| refused.to_string())
        };
        let second = |seconds| lifetime(RouteGeneration::Second, Dialect::E2b, seconds);
        let end = |end| Ok(Clocking::Deadline { end });
        assert_eq!(second(1), end(Timestamp::from_unix_ms(1000)));
        assert_eq!(second(-1), end(Timestamp::FAR_FUTURE));
        for bad in [0, -2, 1001, i64::MIN, i64::MAX] {
            assert!(second(bad).unwrap_err().starts_with("timeout: "), "{bad}");
        }
        let idle = |seconds| lifetime(RouteGeneration::First, Dialect::Cube, seconds);
        let window = |window_ms| Ok(Clocking::Idle { window_ms });
        assert_eq!(idle(-1), window(None));
        assert_eq!(idle(0), window(Some(0)));
        assert_eq!(idle(9), window(Some(9000)));
        assert!(idle(-2).is_err());
    }

    fn connect(timeout: Option<i64>) -> ConnectBody {
        ConnectBody {
            timeout: timeout.map(WholeSeconds),
            auto_pause: None,
            _memory: None,
        }
    }

    #[test]
    fn connect_only_extends() {
        // BC-069, R-L11
        use LifetimeChange as L;
        let change = |timeout, generation, dialect| {
            connect(timeout)
                .change(generation, dialect, DefaultLifetimes::default(), MAX_S)
                .map_err(|refused| refused.to_string())
        };
        let (first, second) = (RouteGeneration::First, RouteGeneration::Second);
        let extend = |after_ms| Ok(L::Extend { after_ms });
        assert_eq!(change(None, second, Dialect::E2b), extend(Some(300_000)));
        assert_eq!(change(None, first, Dialect::Cube), extend(None));
        assert_eq!(change(Some(60), first, Dialect::Cube), extend(Some(60_000)));
        assert_eq!(change(Some(0), first, Dialect::E2b), extend(Some(0)));
        let never = Ok(L::Replace { after_ms: None });
        assert_eq!(change(Some(-1), first, Dialect::Cube), never);
        for bad in [0, -2] {
            assert!(change(Some(bad), first, Dialect::Cube).is_err(), "{bad}");
        }
    }

    #[test]
    fn timeout_replaces_and_refresh_extends() {
        let replace = |seconds| {
            let body = TimeoutBody {
                timeout: Some(WholeSeconds(seconds)),
            };
            body.change(MAX_S).map_err(|refused| refused.to_string())
        };
        assert_eq!(
            replace(0),
            Ok(LifetimeChange::Replace { after_ms: Some(0) })
        );
        assert_eq!(replace(-1), Ok(LifetimeChange::Replace { after_ms: None }));
        assert!(replace(-2).is_err());
        assert!(TimeoutBody { timeout: None }.change(MAX_S).is_err());
        let refresh = |seconds: Option<i64>| {
            let body = RefreshBody {
                duration: seconds.map(WholeSeconds),
            };
            body.change().map_err(|refused| refused.to_string())
        };
        let extend = |after_ms| {
            Ok(LifetimeChange::Extend {
                after_ms: Some(after_ms),
            })
        };
        assert_eq!(refresh(None), extend(15_000));
        assert_eq!(refresh(Some(0)), extend(15_000));
        assert_eq!(refresh(Some(3600)), extend(3_600_000));
        assert!(refresh(Some(3601)).is_err());
        assert!(refresh(Some(-1)).is_err());
    }
}
