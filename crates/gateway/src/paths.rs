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
        Some(plain) => first_segment(&plain)
            .is_some_and(|segment| CONTROL_SEGMENTS.contains(&segment.as_str())),
    }
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

/// The first segment once dots are resolved, lower-case, without parameters and blanks.
fn first_segment(path: &str) -> Option<String> {
    let mut segments: Vec<&str> = Vec::new();
    for raw in path.split(['/', '\\']) {
        let segment = raw.split([';', '?', '#']).next().unwrap_or_default();
        let segment = segment.trim_matches(|c: char| c.is_whitespace() || c.is_control());
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            other => segments.push(other),
        }
    }
    segments.first().map(|segment| segment.to_lowercase())
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
