//! The parsers that read what clients send, for the fuzz targets and their corpus. No part of the
//! API.

use sandhold_platform::Owner;
use sandhold_types::{Clocking, Timestamp};

use crate::{
    DefaultLifetimes, Dialect, Limits,
    page::{PageKey, Question},
    request::{Query, parse_body},
    wire::{
        create::{CreateBody, CreateContext},
        filter::{self, Filter},
        keys::NewKeyBody,
        lifetime::{
            ConnectBody, ConnectRules, PauseBody, RefreshBody, RouteGeneration, TimeoutBody,
        },
        network::NetworkBody,
        observe,
    },
};

/// Reads `bytes` as every body there is, as both kinds of clients and both generations.
pub fn bodies(bytes: &[u8]) {
    let limits = Limits::default();
    let defaults = DefaultLifetimes::default();
    for generation in [RouteGeneration::First, RouteGeneration::Second] {
        for dialect in [Dialect::E2b, Dialect::Cube] {
            create(bytes, generation, dialect, &limits);
            if let Ok(body) = parse_body::<ConnectBody>(bytes) {
                let rules = ConnectRules {
                    generation,
                    dialect,
                    defaults,
                    seconds_max: limits.timeout_s_max,
                };
                let clocking = Clocking::Idle { window_ms: Some(1) };
                let _ = body.connect(clocking, rules);
            }
        }
    }
    if let Ok(body) = parse_body::<PauseBody>(bytes) {
        let _ = body.pause();
    }
    if let Ok(body) = parse_body::<TimeoutBody>(bytes) {
        let _ = body.change(limits.timeout_s_max);
    }
    if let Ok(body) = parse_body::<RefreshBody>(bytes) {
        let _ = body.change();
    }
    if let Ok(body) = parse_body::<NetworkBody>(bytes) {
        let _ = body.network(None, limits.network_ranges_max);
    }
    let _ = parse_body::<NewKeyBody>(bytes);
    let _ = crate::idempotency::fingerprint("/sandboxes", bytes);
}

fn create(bytes: &[u8], generation: RouteGeneration, dialect: Dialect, limits: &Limits) {
    let (Ok(namespace), Ok(env), Ok(key), Ok(request)) =
        ("a".parse(), "dev".parse(), "k".parse(), "r".parse())
    else {
        return;
    };
    let Ok(body) = parse_body::<CreateBody>(bytes) else {
        return;
    };
    let read = body.into_request(CreateContext {
        generation,
        dialect,
        owner: Owner {
            namespace,
            env,
            key,
        },
        request,
        now: Timestamp::from_unix_ms(0),
        limits,
        defaults: DefaultLifetimes::default(),
        domain: None,
    });
    if let Ok(request) = read {
        // What was let through keeps the bounds.
        assert!(!request.template.is_empty());
        assert!(request.template.len() <= limits.template_name_bytes_max);
        assert!(request.metadata.len() <= limits.pairs_max);
        assert!(request.env_vars.len() <= limits.pairs_max);
        assert!(!request.env_vars.contains_key(""));
    }
}

/// Reads `bytes` as a query of every route that has one.
pub fn queries(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let query = Query::parse(text);
    let _ = Filter::read(&query);
    let _ = Filter::read_first_generation(&query);
    if let Ok(length) = filter::page_length(&query) {
        assert!((1..=100).contains(&length));
    }
    let _ = filter::decode_metadata(text);
    let _ = observe::time_range(&query);
    let _ = observe::sandbox_ids(&query);
    let _ = observe::LogQuery::read(&query);
    let _ = observe::LogQuery::read_first_generation(&query);
}

/// Reads `bytes` as a page token. Without the key nobody makes one that opens.
pub fn page_tokens(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let opened =
        PageKey::new([7; 32]).open::<sandhold_types::SandboxId>(Question::of(["fuzz"]), text);
    assert!(opened.is_none());
}
