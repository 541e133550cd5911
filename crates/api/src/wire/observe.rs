//! Metrics, logs and events as clients read them.

use std::collections::BTreeMap;

use sandhold_platform::{HistoryEvent, LogLine, MetricSample, SandboxView, TimeRange};
use sandhold_types::{Actor, Timestamp};
use serde::Serialize;

use crate::{error::ApiError, request::Query};

/// Lines of one answer, unless the caller wants fewer.
const LINES_MAX: usize = 1000;

/// Sandboxes whose metrics one call may ask for.
const SANDBOXES_MAX: usize = 100;

/// A sample. All fields are required by clients (wire contract 1.7).
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MetricBody {
    timestamp: String,
    timestamp_unix: u64,
    cpu_count: u32,
    cpu_used_pct: f64,
    mem_used: u64,
    mem_total: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

impl MetricBody {
    pub(crate) fn of(sample: &MetricSample) -> Self {
        Self {
            timestamp: sample.at.to_rfc3339(),
            timestamp_unix: sample.at.unix_s(),
            cpu_count: sample.cpu_count,
            // JSON has no other numbers.
            cpu_used_pct: if sample.cpu_used_pct.is_finite() {
                sample.cpu_used_pct
            } else {
                0.0
            },
            mem_used: sample.memory_used,
            mem_total: sample.memory_total,
            mem_cache: sample.memory_cache,
            disk_used: sample.disk_used,
            disk_total: sample.disk_total,
        }
    }
}

/// The newest sample of each of several sandboxes.
#[derive(Debug, Serialize)]
pub(crate) struct ManyMetricsBody {
    pub(crate) sandboxes: BTreeMap<String, MetricBody>,
}

/// `start` and `end`, in seconds since the epoch, ends included.
pub(crate) fn time_range(query: &Query) -> Result<TimeRange, ApiError> {
    let moment = |name, ms_within_second: u64| -> Result<Option<Timestamp>, ApiError> {
        let seconds: Option<u64> = query.parsed(name, "must be seconds since 1970")?;
        let to_ms = |s: u64| s.saturating_mul(1000).saturating_add(ms_within_second);
        Ok(seconds.map(|s| Timestamp::from_unix_ms(to_ms(s))))
    };
    let range = TimeRange {
        from: moment("start", 0)?,
        to: moment("end", 999)?,
    };
    match (range.from, range.to) {
        (Some(from), Some(to)) if from > to => Err(ApiError::invalid("start", "is after end")),
        _ => Ok(range),
    }
}

/// `sandbox_ids`, comma-separated.
pub(crate) fn sandbox_ids(query: &Query) -> Result<Vec<&str>, ApiError> {
    let lists = query.all("sandbox_ids");
    let ids: Vec<_> = lists
        .flat_map(|list| list.split(','))
        .filter(|id| !id.is_empty())
        .collect();
    if ids.is_empty() || ids.len() > SANDBOXES_MAX {
        let rule = format!("must name between 1 and {SANDBOXES_MAX} sandboxes");
        return Err(ApiError::invalid("sandbox_ids", rule));
    }
    Ok(ids)
}

/// A line, as the first generation has it.
#[derive(Debug, Serialize)]
struct PlainLine {
    timestamp: String,
    line: String,
}

/// A line with its level.
#[derive(Debug, Serialize)]
struct StructuredLine {
    timestamp: String,
    message: String,
    level: &'static str,
    fields: BTreeMap<String, String>,
}

impl StructuredLine {
    fn of(line: &LogLine) -> Self {
        Self {
            timestamp: line.at.to_rfc3339(),
            message: line.message.clone(),
            level: line.level,
            fields: BTreeMap::new(),
        }
    }
}

/// `GET /sandboxes/{id}/logs`
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LogsBody {
    logs: Vec<PlainLine>,
    log_entries: Vec<StructuredLine>,
}

/// `GET /v2/sandboxes/{id}/logs`
#[derive(Debug, Serialize)]
pub(crate) struct SecondLogsBody {
    logs: Vec<StructuredLine>,
}

/// Which lines are wanted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LogQuery {
    from: Option<Timestamp>,
    limit: usize,
    level: Option<&'static str>,
    search: Option<String>,
    newest_first: bool,
}

const LEVELS: [&str; 4] = ["debug", "info", "warn", "error"];

fn line_limit(query: &Query) -> Result<usize, ApiError> {
    const RULE: &str = "must be between 0 and 1000";
    let limit = query.parsed("limit", RULE)?.unwrap_or(LINES_MAX);
    if limit > LINES_MAX {
        return Err(ApiError::invalid("limit", RULE));
    }
    Ok(limit)
}

fn moment_ms(query: &Query, name: &'static str) -> Result<Option<Timestamp>, ApiError> {
    let ms = query.parsed(name, "must be milliseconds since 1970")?;
    Ok(ms.map(Timestamp::from_unix_ms))
}

impl LogQuery {
    /// `start` (milliseconds since the epoch) and `limit`.
    pub(crate) fn read_first_generation(query: &Query) -> Result<Self, ApiError> {
        Ok(Self {
            from: moment_ms(query, "start")?,
            limit: line_limit(query)?,
            level: None,
            search: None,
            newest_first: false,
        })
    }

    /// `cursor` (milliseconds since the epoch), `limit`, `direction`, `level` and `search`.
    pub(crate) fn read(query: &Query) -> Result<Self, ApiError> {
        let level = |name: &str| {
            let known = LEVELS.into_iter().find(|level| *level == name);
            known.ok_or_else(|| ApiError::invalid("level", "must be debug, info, warn or error"))
        };
        Ok(Self {
            from: moment_ms(query, "cursor")?,
            limit: line_limit(query)?,
            level: query.first("level").map(level).transpose()?,
            search: query.first("search").map(str::to_owned),
            newest_first: match query.first("direction") {
                None | Some("forward") => false,
                Some("backward") => true,
                Some(_) => {
                    let rule = "must be forward or backward";
                    return Err(ApiError::invalid("direction", rule));
                }
            },
        })
    }

    /// The wanted lines of all that there are, which come oldest first.
    fn choose<'a>(&self, lines: &'a [LogLine]) -> Vec<&'a LogLine> {
        let rank = |level: &str| LEVELS.iter().position(|known| *known == level).unwrap_or(1);
        let wanted = |line: &&LogLine| {
            let in_time = self.from.is_none_or(|from| match self.newest_first {
                false => line.at >= from,
                true => line.at <= from,
            });
            let loud_enough = self
                .level
                .is_none_or(|level| rank(line.level) >= rank(level));
            let found = |text: &String| line.message.contains(text.as_str());
            in_time && loud_enough && self.search.as_ref().is_none_or(found)
        };
        let mut lines: Vec<_> = lines.iter().filter(wanted).collect();
        if self.newest_first {
            lines.reverse();
        }
        lines.truncate(self.limit);
        lines
    }

    pub(crate) fn first_generation_body(&self, lines: &[LogLine]) -> LogsBody {
        let lines = self.choose(lines);
        let plain = |line: &&LogLine| PlainLine {
            timestamp: line.at.to_rfc3339(),
            line: line.message.clone(),
        };
        LogsBody {
            logs: lines.iter().map(plain).collect(),
            log_entries: lines.iter().map(|line| StructuredLine::of(line)).collect(),
        }
    }

    pub(crate) fn body(&self, lines: &[LogLine]) -> SecondLogsBody {
        let lines = self.choose(lines);
        SecondLogsBody {
            logs: lines.into_iter().map(StructuredLine::of).collect(),
        }
    }
}

/// What happened to a sandbox, and why it ended (R-L12).
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct EventsBody {
    /// Oldest first.
    events: Vec<EventBody>,
    /// Its end, once it has ended.
    ended: Option<EndBody>,
}

/// One thing that happened.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
struct EventBody {
    /// When (RFC 3339).
    timestamp: String,
    /// The state it went to.
    state: &'static str,
    /// Which life of its processes; grows with every create, resume and rollback.
    incarnation: u64,
    /// Who caused it, in words.
    actor: String,
    /// Who caused it: `client`, `gateway`, `sweeper`, `recovery`, `reclaimer`, `sandbox` or
    /// `operator`.
    actor_kind: &'static str,
    /// The key of a client that caused it.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// The request of a client that caused it.
    #[serde(rename = "requestID", skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
    /// Why.
    reason: String,
}

/// An end.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct EndBody {
    /// When (RFC 3339).
    timestamp: String,
    /// Why.
    reason: String,
}

impl EventBody {
    fn of(event: &HistoryEvent) -> Self {
        let (key, request_id) = match &event.actor {
            Actor::Client { key, request } => (Some(key.to_string()), Some(request.to_string())),
            _ => (None, None),
        };
        Self {
            timestamp: event.at.to_rfc3339(),
            state: event.state.as_str(),
            incarnation: event.incarnation.0,
            actor: event.actor.to_string(),
            actor_kind: event.actor.kind(),
            key,
            request_id,
            reason: event.reason.clone(),
        }
    }
}

impl EventsBody {
    pub(crate) fn of(view: &SandboxView, history: &[HistoryEvent]) -> Self {
        Self {
            events: history.iter().map(EventBody::of).collect(),
            ended: view.ended.as_ref().map(|ended| EndBody {
                timestamp: ended.at.to_rfc3339(),
                reason: ended.reason.to_string(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(ms: u64, level: &'static str, message: &str) -> LogLine {
        LogLine {
            at: Timestamp::from_unix_ms(ms),
            level,
            message: message.to_owned(),
        }
    }

    #[test]
    fn lines_are_chosen_by_time_level_and_text() {
        let lines = [
            line(1, "info", "one"),
            line(2, "warn", "two"),
            line(3, "error", "twenty"),
        ];
        let chosen = |query: &str| {
            let query = LogQuery::read(&Query::parse(query)).unwrap();
            let lines = query.choose(&lines);
            lines
                .iter()
                .map(|line| line.at.unix_ms())
                .collect::<Vec<_>>()
        };
        assert_eq!(chosen(""), [1, 2, 3]);
        assert_eq!(chosen("direction=backward&limit=2"), [3, 2]);
        assert_eq!(chosen("cursor=2"), [2, 3]);
        assert_eq!(chosen("cursor=2&direction=backward"), [2, 1]);
        assert_eq!(chosen("level=warn"), [2, 3]);
        assert_eq!(chosen("search=tw"), [2, 3]);
        assert!(chosen("limit=0").is_empty());
        for query in [
            "limit=1001",
            "limit=-1",
            "level=loud",
            "direction=up",
            "cursor=now",
        ] {
            assert!(LogQuery::read(&Query::parse(query)).is_err(), "{query}");
        }
    }

    #[test]
    fn ranges_are_in_whole_seconds_and_include_their_ends() {
        let read = |query: &str| time_range(&Query::parse(query));
        let range = read("start=1&end=2").unwrap();
        for (ms, inside) in [(999, false), (1000, true), (2999, true), (3000, false)] {
            assert_eq!(range.contains(Timestamp::from_unix_ms(ms)), inside, "{ms}");
        }
        assert!(read("start=18446744073709551615").is_ok());
        for query in ["start=2&end=1", "start=-1", "end=soon", "start=1.5"] {
            assert!(read(query).is_err(), "{query}");
        }
    }
}
