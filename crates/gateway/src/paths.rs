//! Which paths of the agent are closed to the outside, however they are spelled.
//!
//! The agent itself checks a control token on them; this is the second lock. A path is compared
//! after undoing every spelling that some server might undo: percent-encoding (repeated), letter
//! case, backslashes, doubled slashes, dots, and path parameters.

use percent_encoding::percent_decode_str;

/// First segments that only the platform may use (wire contract 2.4 and the control protocol).
const CONTROL_SEGMENTS: [&str; 11] = [
    "init", "ready", "quiesce", "activity", "tunnel", "freeze", "unfreeze", "collapse", "fsfreeze",
    "fsthaw", "upgrade",
];

/// How often percent-encoding is undone. A path that is still encoded then is refused: nothing
/// honest encodes four times.
const DECODINGS_MAX: usize = 3;

/// Whether `path` (without query) leads to a control route of the agent.
#[must_use]
pub fn is_control(path: &str) -> bool {
    match decoded(path) {
        None => true,
        Some(plain) => {
            let segments = segments(&plain);
            is_control_segment(first_as_written(&segments))
                || is_control_segment(first_resolved(&segments))
        }
    }
}

fn is_control_segment(segment: Option<&str>) -> bool {
    segment.is_some_and(|segment| CONTROL_SEGMENTS.contains(&segment))
}

/// The path with percent-encoding undone until nothing changes; `None` if it never settles.
fn decoded(path: &str) -> Option<String> {
    let mut current = path.to_owned();
    for _ in 0..DECODINGS_MAX {
        if !current.contains('%') {
            return Some(current);
        }
        let next = percent_decode_str(&current)
            .decode_utf8_lossy()
            .into_owned();
        if next == current {
            return Some(current);
        }
        current = next;
    }
    (!current.contains('%')).then_some(current)
}

/// The segments, lower-case, without parameters and blanks.
fn segments(path: &str) -> Vec<String> {
    let clean = |raw: &str| {
        let segment = raw.split([';', '?', '#']).next().unwrap_or_default();
        let blank = |c: char| c.is_whitespace() || c.is_control();
        segment.trim_matches(blank).to_lowercase()
    };
    path.split(['/', '\\']).map(clean).collect()
}

/// What a server sees first that takes dots as they are.
fn first_as_written(segments: &[String]) -> Option<&str> {
    let named = segments
        .iter()
        .find(|s| !matches!(s.as_str(), "" | "." | ".."));
    named.map(String::as_str)
}

/// What a server sees first that resolves dots.
fn first_resolved(segments: &[String]) -> Option<&str> {
    let mut resolved: Vec<&str> = Vec::new();
    for segment in segments {
        match segment.as_str() {
            "" | "." => {}
            ".." => {
                resolved.pop();
            }
            other => resolved.push(other),
        }
    }
    resolved.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_control_path_is_caught() {
        for path in [
            "/init",
            "/init/",
            "//init",
            "/./init",
            "/x/../init",
            "/%69nit",
            "/%2569nit",
            "/%2F%2Finit",
            "/INIT",
            "/Init",
            "\\init",
            "/init;a=b",
            "/init%00",
            "/init%20",
            "/health/..%2finit",
            "/health/%2e%2e/init",
            "/init/more",
            "/init/..",
            "/tunnel",
            "/fsthaw",
            "/upgrade",
            "/%25252569nit",
            "/init%3Fx",
        ] {
            assert!(is_control(path), "{path}");
        }
    }

    #[test]
    fn the_agents_open_paths_stay_open() {
        for path in [
            "/",
            "/health",
            "/files",
            "/files/compose",
            "/envs",
            "/metrics",
            "/process.Process/Start",
            "/filesystem.Filesystem/Stat",
            "/initial",
            "/files/init",
            "/100%",
        ] {
            assert!(!is_control(path), "{path}");
        }
    }
}
