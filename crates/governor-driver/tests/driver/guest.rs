//! The inside of a sandbox, played: an agent with files and one process.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::{Method, StatusCode};
use sandhold_governor_driver::{GuestAnswer, GuestRequest};
use serde_json::{Value, json};

/// Where a process runs.
const HOME: &str = "/home/user";

/// How the agent answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mood {
    #[default]
    Well,
    /// It never answers.
    Hung,
    /// Nothing more fits on the disk.
    DiskFull,
}

/// Where a run is, by what it asks for (R-G3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// It has a slot, and its sandbox is being made.
    Admitted,
    /// Its sandbox is made, and is asked whether it is well.
    Created,
    /// Its files are being written.
    Writing,
    /// Its process was started; nobody has heard of it yet.
    Launching,
    /// Its process runs, and is looked for.
    Running,
    /// An artifact is being read.
    Artifacts,
    /// Its process has ended; its exit code is being read.
    Completed,
    /// What it started is being killed.
    CleanUp,
}

/// What a process does by itself as soon as it is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Conduct {
    #[default]
    Works,
    /// It writes an artifact.
    Writes,
    /// It writes one and ends well.
    WritesAndEnds,
}

/// A process that the agent started.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub(crate) tag: String,
    pub(crate) directory: String,
    pub(crate) command: Vec<String>,
    pub(crate) env_vars: Value,
}

#[derive(Debug, Default)]
pub(crate) struct Guest {
    pub(crate) mood: Mood,
    pub(crate) conduct: Conduct,
    pub(crate) files: BTreeMap<String, Bytes>,
    pub(crate) process: Option<Process>,
    pub(crate) launched: u32,
}

fn ok(body: impl Into<Bytes>) -> GuestAnswer {
    said(StatusCode::OK, body)
}

fn said(status: StatusCode, body: impl Into<Bytes>) -> GuestAnswer {
    GuestAnswer {
        status,
        body: body.into(),
    }
}

fn envelope(message: &Value) -> Vec<u8> {
    let text = message.to_string();
    let length = u32::try_from(text.len()).unwrap().to_be_bytes();
    [&[0][..], &length, text.as_bytes()].concat()
}

/// Which step of a run a request belongs to.
pub(crate) fn step_of(request: &GuestRequest, guest: &Guest) -> Option<Step> {
    let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
    match path {
        "/files" if request.method == Method::POST => Some(Step::Writing),
        "/files" if query.ends_with(".png") => Some(Step::Artifacts),
        "/files" if query.ends_with("exit") && guest.process.is_none() => Some(Step::Completed),
        "/process.Process/List" => Some(Step::Running),
        "/process.Process/Start" => {
            let message: Value = serde_json::from_slice(&request.body[5..]).unwrap();
            match message["tag"].is_string() {
                true => Some(Step::Launching),
                false => Some(Step::CleanUp),
            }
        }
        _ => None,
    }
}

impl Guest {
    /// `None` is never.
    pub(crate) fn answer(&mut self, request: &GuestRequest) -> Option<GuestAnswer> {
        if self.mood == Mood::Hung {
            return None;
        }
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        if path == "/files" {
            let query = query.strip_prefix("path=").unwrap();
            let file = percent_encoding::percent_decode_str(query)
                .decode_utf8()
                .unwrap();
            return Some(self.file(request, &file));
        }
        let body = match path {
            "/process.Process/Start" => &request.body[5..],
            _ => &request.body[..],
        };
        if path == "/process.Process/Connect" {
            // It says nothing before its end, and then everybody looks anyway.
            return None;
        }
        let message: Value = serde_json::from_slice(body).unwrap();
        Some(ok(match path {
            "/process.Process/Start" => self.start(&message),
            "/process.Process/List" => {
                let tags = self.process.iter().map(|p| json!({ "tag": p.tag }));
                json!({ "processes": tags.collect::<Vec<_>>() })
                    .to_string()
                    .into_bytes()
            }
            "/filesystem.Filesystem/MakeDir" => b"{}".to_vec(),
            "/filesystem.Filesystem/Stat" => {
                let path = message["path"].as_str().unwrap();
                let path = format!("{HOME}/{path}").trim_end_matches('/').to_owned();
                let entry = json!({ "path": path, "type": "FILE_TYPE_DIRECTORY" });
                json!({ "entry": entry }).to_string().into_bytes()
            }
            "/filesystem.Filesystem/ListDir" => self.list(message["path"].as_str().unwrap()),
            _ => panic!("{path}"),
        }))
    }

    fn file(&mut self, request: &GuestRequest, path: &str) -> GuestAnswer {
        if request.method == Method::POST {
            if self.mood == Mood::DiskFull {
                let words = json!({ "message": "No space left on device" }).to_string();
                return said(StatusCode::INSUFFICIENT_STORAGE, words);
            }
            self.put(path, request.body.clone());
            return ok("[]");
        }
        match self.files.get(path) {
            Some(content) => ok(content.clone()),
            None => {
                // As many words as the real one uses.
                let words = format!("{path}: No such file or directory (os error 2)");
                said(
                    StatusCode::NOT_FOUND,
                    json!({ "message": words }).to_string(),
                )
            }
        }
    }

    fn list(&self, directory: &str) -> Vec<u8> {
        let inside = self
            .files
            .iter()
            .filter(|(path, _)| path.starts_with(directory));
        let entries: Vec<Value> = inside
            .map(|(path, content)| {
                json!({
                    "path": path, "type": "FILE_TYPE_FILE", "size": content.len().to_string(),
                    "modifiedTime": "2026-01-01T00:00:00Z",
                })
            })
            .collect();
        json!({ "entries": entries }).to_string().into_bytes()
    }

    fn start(&mut self, message: &Value) -> Vec<u8> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let args: Vec<String> = message["process"]["args"]
            .as_array()
            .unwrap()
            .iter()
            .map(text)
            .collect();
        let Some(tag) = message["tag"].as_str() else {
            // The clean-up.
            let mark = args[3].strip_prefix("SANDHOLD_RUN=").unwrap();
            self.process.take_if(|process| process.tag == mark);
            let end = json!({ "event": { "end": { "exited": true, "status": "exit status 0" } } });
            return [
                envelope(&json!({ "event": { "start": { "pid": 8 } } })),
                envelope(&end),
            ]
            .concat();
        };
        self.launched += 1;
        let directory = args[2].clone();
        let place = self.files.remove(&format!("{directory}/exit.new"));
        assert!(place.is_some(), "there is place for its exit code");
        self.process = Some(Process {
            tag: tag.to_owned(),
            directory,
            command: args[3..].to_vec(),
            env_vars: message["process"]["envs"].clone(),
        });
        if self.conduct != Conduct::Works {
            self.writes("plot.png", "pixels");
        }
        if self.conduct == Conduct::WritesAndEnds {
            self.exits(0, "");
        }
        envelope(&json!({ "event": { "start": { "pid": 7 } } }))
    }

    pub(crate) fn put(&mut self, path: &str, content: impl Into<Bytes>) {
        self.files.insert(path.to_owned(), content.into());
    }

    /// The process writes into its workspace.
    pub(crate) fn writes(&mut self, name: &str, content: &str) {
        self.put(&format!("{HOME}/{name}"), content.to_owned());
    }

    /// The process and whoever waits for it are killed: nobody writes its exit code.
    pub(crate) fn is_killed(&mut self) {
        self.process.take().expect("a process");
    }

    /// The process ends.
    pub(crate) fn exits(&mut self, code: i32, stdout: &str) {
        let process = self.process.take().expect("a process");
        self.put(&format!("{}/stdout", process.directory), stdout.to_owned());
        self.put(
            &format!("{}/exit", process.directory),
            format!("{code:03}\n"),
        );
    }
}
