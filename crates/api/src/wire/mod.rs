//! What goes over the wire, apart from the values inside: types that mirror JSON, and pure
//! functions that check it and turn it into what the platform is asked, or the other way round.

pub(crate) mod bucket;
pub(crate) mod build;
pub(crate) mod create;
pub(crate) mod filter;
pub(crate) mod governor;
pub(crate) mod image_build;
pub(crate) mod keys;
pub(crate) mod lifecycle;
pub(crate) mod lifetime;
pub(crate) mod network;
pub(crate) mod observe;
pub(crate) mod runs;
pub(crate) mod sandbox;
pub(crate) mod template;
pub(crate) mod travel;

use serde::{Deserialize, Deserializer, de};
use serde_json::Value;

use crate::error::ApiError;

/// Seconds as clients send them: a whole number, also one that is written with a point. Numbers
/// beyond what fits are kept as the nearest that does, for the range check to refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WholeSeconds(pub(crate) i64);

struct WholeSecondsVisitor;

impl de::Visitor<'_> for WholeSecondsVisitor {
    type Value = WholeSeconds;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a whole number of seconds")
    }

    fn visit_i64<E: de::Error>(self, seconds: i64) -> Result<WholeSeconds, E> {
        Ok(WholeSeconds(seconds))
    }

    fn visit_u64<E: de::Error>(self, seconds: u64) -> Result<WholeSeconds, E> {
        Ok(WholeSeconds(i64::try_from(seconds).unwrap_or(i64::MAX)))
    }

    fn visit_f64<E: de::Error>(self, seconds: f64) -> Result<WholeSeconds, E> {
        if seconds.fract() != 0.0 {
            return Err(E::invalid_value(de::Unexpected::Float(seconds), &self));
        }
        // Saturates, which is what is wanted here.
        #[allow(clippy::cast_possible_truncation)]
        let whole = seconds as i64;
        Ok(WholeSeconds(whole))
    }
}

impl<'de> Deserialize<'de> for WholeSeconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WholeSecondsVisitor)
    }
}

/// Whether a value says nothing: absent, `null`, `false`, or empty.
pub(crate) fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

/// Refuses what cannot be had yet, rather than ignoring it.
pub(crate) fn refuse(field: &str, value: Option<&Value>) -> Result<(), ApiError> {
    if value.is_none_or(says_nothing) {
        Ok(())
    } else {
        Err(ApiError::NotSupported(String::from(field)))
    }
}
