//! What a list is asked for (wire contract 1.3).

use percent_encoding::percent_decode_str;
use sandhold_platform::SandboxView;
use sandhold_types::Timestamp;

use super::sandbox::{WireState, visible_state};
use crate::{error::ApiError, page::Question, request::Query};

/// Pages of this many, unless the caller wants fewer.
const PAGE_DEFAULT: usize = 100;
const PAGE_MAX: usize = 100;

/// Conditions and values beyond this many bytes are no filter.
const METADATA_FILTER_BYTES_MAX: usize = 16 * 1024;

/// In which order a list is wanted, by start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    OldestFirst,
    NewestFirst,
}

/// Which sandboxes are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) states: Vec<WireState>,
    pub(crate) metadata: Vec<(String, String)>,
    pub(crate) template: Option<String>,
    pub(crate) started_after: Option<Timestamp>,
    pub(crate) order: Order,
}

impl Filter {
    /// `GET /v2/sandboxes`
    pub(crate) fn read(query: &Query) -> Result<Self, ApiError> {
        Ok(Self {
            states: states(query)?,
            metadata: metadata(query)?,
            template: query.first("template").map(str::to_owned),
            started_after: started_after(query)?,
            order: match query.first("order") {
                None | Some("desc") => Order::NewestFirst,
                Some("asc") => Order::OldestFirst,
                Some(_) => return Err(ApiError::invalid("order", "must be asc or desc")),
            },
        })
    }

    /// `GET /sandboxes`, which knows running ones only.
    pub(crate) fn read_first_generation(query: &Query) -> Result<Self, ApiError> {
        Ok(Self {
            states: vec![WireState::Running],
            metadata: metadata(query)?,
            template: None,
            started_after: None,
            order: Order::NewestFirst,
        })
    }

    /// What binds page tokens to this filter and this tenant.
    pub(crate) fn question(&self, namespace: &str, env: &str) -> Question {
        let mut parts = vec![
            namespace.to_owned(),
            env.to_owned(),
            format!("{:?}", self.order),
            self.template.clone().unwrap_or_default(),
            format!("{:?}", self.started_after),
        ];
        let mut states: Vec<_> = self.states.iter().map(|s| s.as_str().to_owned()).collect();
        states.sort();
        states.dedup();
        parts.push(states.join(","));
        let mut metadata = self.metadata.clone();
        metadata.sort();
        parts.extend(metadata.into_iter().flat_map(|(key, value)| [key, value]));
        Question::of(parts.iter().map(String::as_str))
    }

    /// Whether a sandbox is wanted, whatever its template, and the state it is told with.
    pub(crate) fn wants(&self, view: &SandboxView) -> Option<WireState> {
        let state = visible_state(view.state).filter(|state| self.states.contains(state))?;
        let has = |(key, value): &(String, String)| view.metadata.get(key) == Some(value);
        let late_enough = self
            .started_after
            .is_none_or(|after| view.started_at > after);
        (late_enough && self.metadata.iter().all(has)).then_some(state)
    }
}

/// How long a page is to be.
pub(crate) fn page_length(query: &Query) -> Result<usize, ApiError> {
    const RULE: &str = "must be between 1 and 100";
    let limit = query.parsed("limit", RULE)?.unwrap_or(PAGE_DEFAULT);
    if (1..=PAGE_MAX).contains(&limit) {
        Ok(limit)
    } else {
        Err(ApiError::invalid("limit", RULE))
    }
}

fn states(query: &Query) -> Result<Vec<WireState>, ApiError> {
    let names = query.all("state").flat_map(|list| list.split(','));
    let read = |name| {
        WireState::from_name(name)
            .ok_or_else(|| ApiError::invalid("state", "must be running, paused or both"))
    };
    let wanted: Vec<_> = names.map(read).collect::<Result<_, _>>()?;
    Ok(if wanted.is_empty() {
        vec![WireState::Running, WireState::Paused]
    } else {
        wanted
    })
}

fn started_after(query: &Query) -> Result<Option<Timestamp>, ApiError> {
    let Some(text) = query.first("startedAfter") else {
        return Ok(None);
    };
    let read: Result<jiff::Timestamp, _> = text.parse();
    let moment = read.map_err(|_| ApiError::invalid("startedAfter", "must be an RFC 3339 time"))?;
    let ms = u64::try_from(moment.as_millisecond()).unwrap_or(0);
    Ok(Some(Timestamp::from_unix_ms(ms)))
}

fn metadata(query: &Query) -> Result<Vec<(String, String)>, ApiError> {
    let mut conditions = Vec::new();
    for text in query.all("metadata") {
        let read = decode_metadata(text).ok_or_else(|| {
            ApiError::invalid(
                "metadata",
                "must be key=value pairs joined by &, escaped twice",
            )
        })?;
        conditions.extend(read);
    }
    Ok(conditions)
}

/// Reads a metadata filter. It was decoded once as a parameter of the query; it is unescaped as a
/// whole, split, and each half is unescaped again, since that is how clients write it. `None` for
/// anything else, because a filter that is not understood must not match everything (BC-084).
pub(crate) fn decode_metadata(text: &str) -> Option<Vec<(String, String)>> {
    if text.len() > METADATA_FILTER_BYTES_MAX {
        return None;
    }
    let whole = unescape(text)?;
    let condition = |pair: &str| {
        let (key, value) = pair.split_once('=')?;
        Some((unescape(key)?, unescape(value)?))
    };
    whole.split('&').map(condition).collect()
}

/// Undoes one round of query escaping.
fn unescape(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        let hex = |byte: Option<u8>| byte.is_some_and(|b| b.is_ascii_hexdigit());
        if byte == b'%' && !(hex(bytes.next()) && hex(bytes.next())) {
            return None;
        }
    }
    let spaced = text.replace('+', " ");
    let decoded = percent_decode_str(&spaced).decode_utf8().ok()?;
    Some(decoded.into_owned())
}

#[cfg(test)]
mod tests {
    use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
    use proptest::prelude::*;

    use super::*;

    fn escape(text: &str) -> String {
        utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
    }

    #[test]
    fn the_filter_that_the_sdk_sends() {
        // Wire contract 1.3: `{"k":"v w&"}` as it was seen on the wire.
        let query = Query::parse("metadata=k%3Dv%252520w%252526");
        let filter = Filter::read(&query).unwrap();
        assert_eq!(filter.metadata, [("k".into(), "v w&".into())]);
    }

    #[test]
    fn a_filter_that_is_not_understood_is_refused() {
        // BC-084
        for metadata in [
            "",
            "k",
            "=%",
            "k=%zz",
            "k=%f",
            "a=1&b",
            "k=%25ff%25fe",
            "&",
            "k=v&",
        ] {
            let query = Query::parse(&format!("metadata={}", escape(metadata)));
            let refused = Filter::read(&query).unwrap_err().to_string();
            assert!(refused.starts_with("metadata: "), "{metadata:?}");
        }
        let long = format!("k={}", "x".repeat(METADATA_FILTER_BYTES_MAX));
        assert_eq!(decode_metadata(&long), None);
    }

    proptest! {
        #[test]
        fn a_filter_escaped_as_the_sdk_does_is_read_back(
            pairs in proptest::collection::btree_map(".{0,12}", ".{0,12}", 1..4)
        ) {
            // Quote each half, join them as a form, and escape that as a parameter of the query.
            let form: Vec<_> = pairs
                .iter()
                .map(|(k, v)| format!("{}={}", escape(&escape(k)), escape(&escape(v))))
                .collect();
            let query = Query::parse(&format!("metadata={}", escape(&form.join("&"))));
            let read = Filter::read(&query).unwrap().metadata;
            prop_assert_eq!(read, pairs.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn no_query_is_too_odd(query: String) {
            // A refusal is fine; a panic is not.
            let _ = Filter::read(&Query::parse(&query));
        }
    }

    #[test]
    fn the_other_parameters() {
        let read = |query: &str| Filter::read(&Query::parse(query)).map_err(|e| e.to_string());
        let filter = read("state=running,paused&order=asc&template=base").unwrap();
        assert_eq!(filter.states, [WireState::Running, WireState::Paused]);
        assert_eq!(filter.order, Order::OldestFirst);
        assert_eq!(filter.template.as_deref(), Some("base"));
        let filter = read("startedAfter=2026-01-01T00%3A00%3A00%2B01%3A00").unwrap();
        let expected = Timestamp::from_unix_ms(1_767_222_000_000);
        assert_eq!(filter.started_after, Some(expected));
        for (query, field) in [
            ("state=gone", "state"),
            ("state=", "state"),
            ("order=up", "order"),
            ("startedAfter=yesterday", "startedAfter"),
        ] {
            assert!(read(query).unwrap_err().starts_with(field), "{query}");
        }
        for (limit, expected) in [
            ("1", Some(1)),
            ("100", Some(100)),
            ("0", None),
            ("101", None),
            ("-1", None),
            ("x", None),
        ] {
            let query = Query::parse(&format!("limit={limit}"));
            assert_eq!(page_length(&query).ok(), expected, "{limit}");
        }
    }

    #[test]
    fn a_question_is_its_content() {
        // BC-082
        let question = |query: &str, env: &str| {
            Filter::read(&Query::parse(query))
                .unwrap()
                .question("a", env)
        };
        let base = question("state=running,paused&limit=5", "dev");
        assert_eq!(base, question("state=paused,running&limit=7", "dev"));
        assert_eq!(base, question("", "dev"));
        for (query, env) in [
            ("", "prod"),
            ("state=running", "dev"),
            ("order=asc", "dev"),
            ("template=base", "dev"),
            ("metadata=a%3Db", "dev"),
            ("startedAfter=2026-01-01T00:00:00Z", "dev"),
        ] {
            assert_ne!(base, question(query, env), "{query}");
        }
    }
}
