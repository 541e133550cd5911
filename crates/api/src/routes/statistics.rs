//! `GET /metrics`: counts of this server for Prometheus (R-O5). For administrators: how many
//! sandboxes others have is nobody else's business.

use std::{collections::BTreeMap, fmt::Write};

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use http::header;
use sandhold_platform::{Dozes, Storage};
use sandhold_types::SandboxState;

use crate::{ApiState, auth::Administrator};

/// The text format's own media type.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// `GET /metrics`
pub(crate) async fn metrics(State(state): State<ApiState>, _: Administrator) -> Response {
    let mut by_state: BTreeMap<&str, usize> = SandboxState::ALL
        .iter()
        .map(|state| (state.as_str(), 0))
        .collect();
    for view in state.platform.list() {
        *by_state.entry(view.state.as_str()).or_default() += 1;
    }
    let mut text = exposition(&by_state, state.platform.dozes());
    text.push_str(&fullness(state.travel.storage()));
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}

fn exposition(by_state: &BTreeMap<&str, usize>, dozes: Dozes) -> String {
    let mut text = String::from(
        "# HELP sandhold_sandboxes Sandboxes that are there, by state.\n\
         # TYPE sandhold_sandboxes gauge\n",
    );
    for (state, count) in by_state {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "sandhold_sandboxes{{state=\"{state}\"}} {count}");
    }
    let _ = write!(
        text,
        "# HELP sandhold_sandboxes_dozing Running sandboxes whose processes are frozen for idleness.\n\
         # TYPE sandhold_sandboxes_dozing gauge\n\
         sandhold_sandboxes_dozing {}\n\
         # HELP sandhold_dozes_total How often a sandbox dozed off.\n\
         # TYPE sandhold_dozes_total counter\n\
         sandhold_dozes_total {}\n\
         # HELP sandhold_thaws_total How often one was thawed because somebody needed it.\n\
         # TYPE sandhold_thaws_total counter\n\
         sandhold_thaws_total {}\n",
        dozes.now, dozes.dozed_total, dozes.thawed_total
    );
    text
}

/// How full the data directory is.
fn fullness(storage: Storage) -> String {
    let mut text = String::new();
    let gauges = [
        (
            "storage_bytes",
            "Size of the file system of the data directory.",
            storage.total_bytes,
        ),
        (
            "storage_available_bytes",
            "What can still be written to it.",
            storage.available_bytes,
        ),
        (
            "snapshots",
            "Snapshots that are there.",
            u64::try_from(storage.snapshots).unwrap_or(u64::MAX),
        ),
        (
            "snapshot_bytes",
            "Bytes of their images; shared ones count for each.",
            storage.snapshot_bytes,
        ),
    ];
    for (name, help, value) in gauges {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "# HELP sandhold_{name} {help}\n# TYPE sandhold_{name} gauge\nsandhold_{name} {value}\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_its_help_and_type() {
        // R-O5
        let by_state = BTreeMap::from([("paused", 2), ("running", 3)]);
        let dozes = Dozes {
            now: 1,
            dozed_total: 5,
            thawed_total: 4,
        };
        let text = exposition(&by_state, dozes);
        assert!(text.contains("sandhold_sandboxes{state=\"paused\"} 2\n"));
        assert!(text.contains("\nsandhold_sandboxes_dozing 1\n"));
        assert!(text.contains("\nsandhold_dozes_total 5\n"));
        assert!(text.ends_with("sandhold_thaws_total 4\n"));
        let storage = Storage {
            available_bytes: 7,
            ..Storage::default()
        };
        let text = text + &fullness(storage);
        assert!(text.contains("\nsandhold_storage_available_bytes 7\n"));
        for family in [
            "sandhold_sandboxes",
            "sandhold_dozes_total",
            "sandhold_snapshots",
        ] {
            assert!(text.contains(&format!("# TYPE {family} ")));
        }
    }
}
