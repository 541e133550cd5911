//! Who asks. A key belongs to a bucket, and sees and touches only that (R-P8).

use std::time::Duration;

use axum::extract::FromRequestParts;
use http::{HeaderMap, HeaderName, header, request::Parts};
use sandhold_platform::{Owner, SandboxView};
use sandhold_store::{Bucket, KeyDigest, KeyRecord, Role};
use sandhold_types::{Actor, Timestamp, Token};

use crate::{
    ApiState,
    error::ApiError,
    request::{Meta, text_header},
};

/// A longer text is no key.
const KEY_BYTES_MAX: usize = 512;

/// How old the noted use of a key may be before it is noted again.
const USE_NOTED_EVERY: Duration = Duration::from_secs(60);

static API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The authenticated caller.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) key: KeyRecord,
}

/// A caller with an administrator's key.
#[derive(Debug, Clone)]
pub(crate) struct Administrator {
    pub(crate) key: KeyRecord,
}

impl Caller {
    pub(crate) fn bucket(&self) -> &Bucket {
        &self.key.bucket
    }

    pub(crate) fn owner(&self) -> Owner {
        Owner {
            namespace: self.key.bucket.namespace.clone(),
            env: self.key.bucket.env.clone(),
            key: self.key.id.clone(),
        }
    }

    pub(crate) fn actor(&self, meta: &Meta) -> Actor {
        Actor::Client {
            key: self.key.id.clone(),
            request: meta.id.clone(),
        }
    }

    pub(crate) fn owns(&self, sandbox: &SandboxView) -> bool {
        let bucket = self.bucket();
        sandbox.owner.namespace == bucket.namespace && sandbox.owner.env == bucket.env
    }
}

/// The key in a request: `X-API-KEY`, or else `Authorization: Bearer` (wire contract 1.0).
pub(crate) fn presented_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = || {
        let text = text_header(headers, &header::AUTHORIZATION)?;
        let (scheme, key) = text.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    };
    let key = text_header(headers, &API_KEY).or_else(bearer)?;
    (!key.is_empty() && key.len() <= KEY_BYTES_MAX).then_some(key)
}

fn use_is_worth_noting(key: &KeyRecord, now: Timestamp) -> bool {
    key.last_used_at
        .is_none_or(|noted| now.since(noted) >= USE_NOTED_EVERY)
}

async fn authenticate(parts: &Parts, state: &ApiState) -> Result<KeyRecord, ApiError> {
    let Some(text) = presented_key(&parts.headers) else {
        return Err(ApiError::Unauthenticated(
            "no API key: send it as X-API-Key",
        ));
    };
    let digest = KeyDigest::of(&Token::new(text.to_owned()));
    let Some(key) = state.store.find_key(&digest).await? else {
        return Err(ApiError::Unauthenticated("the API key is unknown"));
    };
    if key.revoked_at.is_some() {
        return Err(ApiError::Unauthenticated("the API key is revoked"));
    }
    let now = state.clock.now();
    if use_is_worth_noting(&key, now) {
        let (store, id) = (state.store.clone(), key.id.clone());
        // Nobody waits for a note, and a lost one is made up for by the next request.
        tokio::spawn(async move { store.note_key_used(&id, now).await });
    }
    Ok(key)
}

impl FromRequestParts<ApiState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<Self, ApiError> {
        let key = authenticate(parts, state).await?;
        Ok(Self { key })
    }
}

impl FromRequestParts<ApiState> for Administrator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<Self, ApiError> {
        let key = authenticate(parts, state).await?;
        match key.role {
            Role::Admin => Ok(Self { key }),
            Role::Member => Err(ApiError::Forbidden("this needs an administrator's key")),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_key_is_found_where_clients_put_it() {
        let cases: &[(&str, &str, Option<&str>)] = &[
            ("x-api-key", "k", Some("k")),
            ("authorization", "Bearer k", Some("k")),
            ("authorization", "bearer  k ", Some("k")),
            ("authorization", "Basic k", None),
            ("authorization", "k", None),
            ("x-api-key", "", None),
            ("cookie", "k", None),
        ];
        for (name, value, expected) in cases {
            let mut headers = HeaderMap::new();
            headers.insert(*name, HeaderValue::from_static(value));
            assert_eq!(presented_key(&headers), *expected, "{name}: {value}");
        }
        let mut headers = HeaderMap::new();
        let long = "x".repeat(KEY_BYTES_MAX + 1);
        headers.insert("x-api-key", HeaderValue::from_str(&long).unwrap());
        assert_eq!(presented_key(&headers), None);
        headers.insert("x-api-key", HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(presented_key(&headers), None);
    }
}
