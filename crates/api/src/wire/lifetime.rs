//! Timeouts of both kinds of clients, and the clock that follows from a create (wire contract 1.4).

use sandhold_platform::{
    GuestHealth, LifetimeChange, NewLifetime, Pause, PauseKeeps, Resume, Waking,
};
use sandhold_types::{Clocking, Lifetime, OnTimeout, Timestamp};
use serde::Deserialize;

use super::{WholeSeconds, lifecycle::on_timeout};
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
    on_timeout: OnTimeout,
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
        on_timeout,
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
    auto_pause: Option<bool>,
    /// `false` starts the sandbox's processes anew instead of bringing its memory back.
    memory: Option<bool>,
}

/// What a connect asks for, in either case; which one it is, the platform decides under the
/// sandbox's lock (R-L2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Connect {
    /// If it runs.
    pub(crate) running: LifetimeChange,
    /// If it sleeps.
    pub(crate) asleep: Resume,
}

/// By which rules a connect is read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectRules {
    pub(crate) generation: RouteGeneration,
    pub(crate) dialect: Dialect,
    pub(crate) defaults: DefaultLifetimes,
    pub(crate) seconds_max: u64,
}

impl ConnectRules {
    /// Whether CubeSandbox's meaning of a timeout is meant.
    fn is_cubes(&self) -> bool {
        (self.generation, self.dialect) == (RouteGeneration::First, Dialect::Cube)
    }

    fn read(&self, timeout: Option<WholeSeconds>) -> Result<Option<Span>, ApiError> {
        let shortest = if self.is_cubes() {
            Shortest::OneSecond
        } else {
            Shortest::Zero
        };
        timeout
            .map(|given| span("timeout", given, shortest, self.seconds_max))
            .transpose()
    }
}

impl ConnectBody {
    /// What is asked of a sandbox that follows `clocking`.
    pub(crate) fn connect(
        &self,
        clocking: Clocking,
        rules: ConnectRules,
    ) -> Result<Connect, ApiError> {
        let given = rules.read(self.timeout)?;
        Ok(Connect {
            running: running(given, rules),
            asleep: self.resume(asleep(given, clocking, rules)),
        })
    }

    /// What a plain resume asks for.
    pub(crate) fn resume_only(
        &self,
        clocking: Clocking,
        rules: ConnectRules,
    ) -> Result<Resume, ApiError> {
        let given = rules.read(self.timeout)?;
        Ok(self.resume(asleep(given, clocking, rules)))
    }

    fn resume(&self, lifetime: NewLifetime) -> Resume {
        Resume {
            waking: match self.memory {
                Some(false) => Waking::ColdBoot,
                _ => Waking::AsPaused,
            },
            lifetime,
            on_timeout: self.auto_pause.map(on_timeout),
        }
    }
}

/// Connecting never shortens a running sandbox's life (R-L11, BC-069).
fn running(given: Option<Span>, rules: ConnectRules) -> LifetimeChange {
    let given = match (given, rules.generation) {
        (Some(given), _) => given,
        (None, RouteGeneration::Second) => Span::Seconds(rules.defaults.second_generation_s),
        // Only counts as activity.
        (None, RouteGeneration::First) => return LifetimeChange::Extend { after_ms: None },
    };
    match given {
        // Nothing is later than never, so this does not shorten either.
        Span::Never => LifetimeChange::Replace { after_ms: None },
        Span::Seconds(_) => LifetimeChange::Extend {
            after_ms: given.to_ms(),
        },
    }
}

/// A sandbox that wakes gets what is asked for; with nothing asked for what it was made with, and
/// never silently a default that is shorter (BC-069). CubeSandbox's clients are promised that a
/// window is never shortened.
fn asleep(given: Option<Span>, clocking: Clocking, rules: ConnectRules) -> NewLifetime {
    let Some(given) = given else {
        return NewLifetime::AsMade;
    };
    match (clocking, given.to_ms()) {
        (Clocking::Idle { window_ms }, Some(ms)) if rules.is_cubes() => {
            NewLifetime::After(window_ms.map(|window_ms| window_ms.max(ms)))
        }
        (_, ms) => NewLifetime::After(ms),
    }
}

/// `POST /sandboxes/{id}/pause`
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PauseBody {
    /// `false` keeps files only.
    memory: Option<bool>,
    /// `true` refuses to pause a sandbox whose agent does not answer.
    require_healthy_guest: Option<bool>,
}

impl PauseBody {
    /// What is asked for. Without its memory only a sandbox is paused whose agent has brought its
    /// files in order, as E2B has it (wire contract 1.4).
    pub(crate) fn pause(&self) -> Pause {
        let keeps = match self.memory {
            Some(false) => PauseKeeps::Files,
            _ => PauseKeeps::Everything,
        };
        let is_strict = self.require_healthy_guest == Some(true) || keeps == PauseKeeps::Files;
        Pause {
            keeps,
            health: if is_strict {
                GuestHealth::MustAnswer
            } else {
                GuestHealth::Any
            },
        }
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
            new_lifetime(signs, None, OnTimeout::Kill, defaults, MAX_S, now)
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
            let defaults = DefaultLifetimes::default();
            new_lifetime(signs, given, OnTimeout::Kill, defaults, MAX_S, now)
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

    fn rules(generation: RouteGeneration, dialect: Dialect) -> ConnectRules {
        ConnectRules {
            generation,
            dialect,
            defaults: DefaultLifetimes::default(),
            seconds_max: MAX_S,
        }
    }

    fn given(
        timeout: Option<i64>,
        generation: RouteGeneration,
        dialect: Dialect,
    ) -> Result<Option<Span>, String> {
        let read = rules(generation, dialect).read(timeout.map(WholeSeconds));
        read.map_err(|refused| refused.to_string())
    }

    #[test]
    fn connect_only_extends_what_runs() {
        // BC-069, R-L11
        use LifetimeChange as L;
        let change = |timeout, generation, dialect| {
            given(timeout, generation, dialect)
                .map(|given| running(given, rules(generation, dialect)))
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
    fn what_wakes_gets_what_is_asked_for_and_never_silently_less() {
        // BC-069: paused, then connect with 60, and with nothing.
        use NewLifetime as N;
        let lifetime = |timeout, clocking, generation, dialect| {
            given(timeout, generation, dialect)
                .map(|given| asleep(given, clocking, rules(generation, dialect)))
        };
        let (first, second) = (RouteGeneration::First, RouteGeneration::Second);
        let end = Timestamp::from_unix_ms(5);
        let fixed = Clocking::Deadline { end };
        let window = |window_ms| Clocking::Idle { window_ms };
        let after = |ms| Ok(N::After(ms));
        assert_eq!(
            lifetime(Some(60), fixed, second, Dialect::E2b),
            after(Some(60_000))
        );
        for generation in [first, second] {
            assert_eq!(
                lifetime(None, fixed, generation, Dialect::E2b),
                Ok(N::AsMade)
            );
        }
        assert_eq!(lifetime(Some(-1), fixed, second, Dialect::E2b), after(None));
        // CubeSandbox's clients are promised that a window is never shortened.
        let cube = |timeout, window_ms| lifetime(timeout, window(window_ms), first, Dialect::Cube);
        assert_eq!(cube(Some(60), Some(90_000)), after(Some(90_000)));
        assert_eq!(cube(Some(60), Some(30_000)), after(Some(60_000)));
        assert_eq!(cube(Some(60), None), after(None));
        assert_eq!(cube(Some(-1), Some(30_000)), after(None));
        assert_eq!(cube(None, Some(30_000)), Ok(N::AsMade));
    }

    #[test]
    fn a_pause_without_memory_wants_an_agent_that_answers() {
        let pause = |text: &str| serde_json::from_str::<PauseBody>(text).unwrap().pause();
        assert_eq!(pause("{}"), Pause::default());
        assert_eq!(pause(r#"{"memory":true}"#), Pause::default());
        let strict = pause(r#"{"requireHealthyGuest":true}"#);
        assert_eq!(strict.keeps, PauseKeeps::Everything);
        assert_eq!(strict.health, GuestHealth::MustAnswer);
        let files = pause(r#"{"memory":false}"#);
        assert_eq!(files.keeps, PauseKeeps::Files);
        assert_eq!(files.health, GuestHealth::MustAnswer);
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
