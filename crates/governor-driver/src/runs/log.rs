//! The writer of one run's log: what happens becomes entries.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use sandhold_books::runs::{Append, Ending, Entry, KeptRuns, Written};
use sandhold_governor::{
    ids::{ReplicaId, RunId},
    tasks::{RunEvent, WayOut},
};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    artifacts::{Manifest, Stamp},
    head::{RunEnd, RunHead},
    workload::{Artifact, Workload},
};

/// The largest part of an artifact in one entry.
const CHUNK_BYTES: usize = 256 * 1024;
/// How many parts are written in one step, so that no step is long for others.
const CHUNKS_AT_ONCE: usize = 4;
/// How much longer the end of a run is tried to be told than the rest.
const ENDING_PATIENCE: u32 = 12;
/// How long to wait before an append is tried again.
const RETRY: Duration = Duration::from_millis(250);

pub(crate) const STARTED: &str = "started";
pub(crate) const PROGRESS: &str = "progress";
pub(crate) const COMPLETED: &str = "completed";
pub(crate) const ERROR: &str = "error";

/// Whether a loop still has its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pen {
    /// It writes.
    Held,
    /// Another replica has the run now.
    Passed,
    /// The log is lost; the run goes on without.
    Lost,
}

/// Writes one run's log.
#[derive(Debug)]
pub(super) struct Writer<'a> {
    pub(super) runs: &'a KeptRuns,
    pub(super) run: &'a RunId,
    pub(super) replica: &'a ReplicaId,
    /// How many entries are there.
    pub(super) last: u64,
    pub(super) pen: Pen,
    /// For how long an append is tried.
    pub(super) patience: Duration,
}

impl Writer<'_> {
    /// Says only that the writer is alive.
    pub(super) async fn beat(&mut self) {
        self.append(None, &[], Ending::Open).await;
    }

    /// Tries until it is written, the log is another's or lost, or the patience is over. Whether it
    /// was written.
    pub(super) async fn append(
        &mut self,
        head: Option<&RunHead>,
        entries: &[Entry],
        ending: Ending,
    ) -> bool {
        if self.pen != Pen::Held {
            return false;
        }
        let head = head.map(RunHead::text);
        let append = Append {
            after: self.last,
            head: head.as_deref(),
            entries,
            ending,
        };
        let patience = match ending {
            Ending::Open => self.patience,
            // Its loop is over: there is time.
            Ending::Closed => self.patience * ENDING_PATIENCE,
        };
        let until = Instant::now() + patience;
        loop {
            match self.runs.append(self.run, self.replica, append).await {
                Ok(Written::Done) => {
                    self.last += entries.len() as u64;
                    return true;
                }
                Ok(Written::NotWriter) => self.pen = Pen::Passed,
                Ok(Written::Lost) => self.pen = Pen::Lost,
                Ok(Written::Full) => return true,
                Err(_) if Instant::now() < until => {
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
                Err(error) => tracing::warn!(%error, run = %self.run, "a run could not tell"),
            }
            return false;
        }
    }

    /// Tells what happened.
    pub(super) async fn tell(&mut self, event: &RunEvent, workload: &mut Workload) {
        match event {
            RunEvent::Started => {
                workload.head.is_started = true;
                let entries = [entry(STARTED, &started(self.run, &workload.head))];
                self.append(Some(&workload.head), &entries, Ending::Open)
                    .await;
            }
            RunEvent::Progress { .. } => {
                while let Some(artifact) = workload.fresh.first() {
                    for part in progress(self.run, artifact).chunks(CHUNKS_AT_ONCE) {
                        let written = self.append(None, part, Ending::Open).await;
                        if !written && self.pen == Pen::Held {
                            // It is told again, from its beginning, at the next turn.
                            return;
                        }
                    }
                    let Artifact { due, .. } = workload.fresh.remove(0);
                    let is_omitted = due.omitted.is_some();
                    workload.manifest.note(due.path, due.stamp, is_omitted);
                }
            }
            RunEvent::Completed { exit_code } => {
                let way_out = WayOut::Exited(*exit_code);
                self.end(way_out, workload).await;
            }
            RunEvent::Error(way_out) => self.end(*way_out, workload).await,
        }
    }

    async fn end(&mut self, way_out: WayOut, workload: &mut Workload) {
        let message = message(way_out, workload.trouble.as_deref());
        let end = RunEnd {
            code: way_out.as_str().to_owned(),
            exit_code: match way_out {
                WayOut::Exited(code) => Some(code),
                _ => None,
            },
            message,
        };
        let kind = match way_out {
            WayOut::Exited(_) => COMPLETED,
            _ => ERROR,
        };
        let tails = workload.tails.clone().unwrap_or_default();
        let data = json!({
            "run_id": self.run.as_str(),
            "sandbox_id": workload.head.place.as_ref().map(|place| &place.sandbox),
            "code": end.code,
            "exit_code": end.exit_code,
            "message": end.message,
            "artifacts": workload.manifest.count(),
            "stdout": tails.stdout,
            "stderr": tails.stderr,
        });
        workload.head.end = Some(end);
        self.append(Some(&workload.head), &[entry(kind, &data)], Ending::Closed)
            .await;
    }
}

pub(super) fn entry(kind: &str, data: &Value) -> Entry {
    Entry {
        kind: kind.to_owned(),
        data: data.to_string(),
    }
}

fn started(run: &RunId, head: &RunHead) -> Value {
    let place = head.place.as_ref();
    json!({
        "run_id": run.as_str(),
        "sandbox_id": place.map(|place| &place.sandbox),
        "owner_id": head.owner,
        "lease_id": head.lease,
        "fence": place.map(|place| place.fence),
        "reused": place.map(|place| place.is_reused),
        "template_id": head.template,
        "workspace": head.workspace,
    })
}

/// An artifact in as many entries as its size needs.
fn progress(run: &RunId, artifact: &Artifact) -> Vec<Entry> {
    let Artifact { due, content } = artifact;
    let told = |offset: usize, chunk: &[u8], is_last: bool| {
        let mut told = json!({
            "path": due.path,
            "size": due.stamp.size,
            "modified_at": due.stamp.modified_at,
            "offset": offset,
            "last": is_last,
        });
        match due.omitted {
            Some(why) => told["omitted"] = json!(why.as_str()),
            None => told["content_base64"] = json!(STANDARD.encode(chunk)),
        }
        entry(
            PROGRESS,
            &json!({ "run_id": run.as_str(), "artifact": told }),
        )
    };
    if content.is_empty() {
        return vec![told(0, &[], true)];
    }
    let chunks = content.chunks(CHUNK_BYTES).enumerate();
    chunks
        .map(|(n, chunk)| {
            let offset = n * CHUNK_BYTES;
            told(offset, chunk, offset + chunk.len() == content.len())
        })
        .collect()
}

/// What a log says was told: an artifact whose last part is missing was not.
pub(super) fn note_told(manifest: &mut Manifest, entry: &Entry) {
    if entry.kind != PROGRESS {
        return;
    }
    let Ok(data) = serde_json::from_str::<Value>(&entry.data) else {
        return;
    };
    let artifact = &data["artifact"];
    let stamp: Option<Stamp> = serde_json::from_value(artifact.clone()).ok();
    if let (Some(stamp), Some(path), true) =
        (stamp, artifact["path"].as_str(), artifact["last"] == true)
    {
        manifest.note(path.to_owned(), stamp, !artifact["omitted"].is_null());
    }
}

fn message(way_out: WayOut, trouble: Option<&str>) -> String {
    let what = match way_out {
        WayOut::Exited(code) => return format!("its process ended with exit code {code}"),
        WayOut::Cancelled => "it was cancelled",
        WayOut::DeadlineExceeded => "its time was over",
        WayOut::LeaseLost => "its lease passed to another, was released, or its sandbox is going",
        WayOut::Unconfirmed => "its lease could not be confirmed for too long",
        WayOut::SandboxGone => "its sandbox is gone",
        WayOut::NotStarted => "it could not be started",
        WayOut::Unresponsive => "its sandbox did not answer for too long",
        WayOut::ReplicaLost => "the server that was to start it was lost",
    };
    match trouble {
        Some(trouble) => format!("{what}: {trouble}"),
        None => what.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::runs::artifacts::Due;

    #[test]
    fn an_artifact_is_told_in_parts_and_counts_when_all_are_there() {
        let artifact = Artifact {
            due: Due {
                path: "a".to_owned(),
                stamp: Stamp {
                    size: CHUNK_BYTES as u64 + 1,
                    modified_at: "t".to_owned(),
                },
                omitted: None,
            },
            content: Bytes::from(vec![7; CHUNK_BYTES + 1]),
        };
        let entries = progress(&"run".parse().unwrap(), &artifact);
        assert_eq!(entries.len(), 2);
        let mut manifest = Manifest::default();
        note_told(&mut manifest, &entries[0]);
        assert_eq!(manifest.count(), 0, "its end is missing");
        note_told(&mut manifest, &entries[1]);
        assert_eq!(manifest.count(), 1);
    }
}
