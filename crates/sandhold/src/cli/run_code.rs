//! `sandhold sandbox run`: code in the sandbox's interpreter, which keeps its state between calls.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::BytesMut;
use http::{Method, header};
use http_body_util::BodyExt as _;
use serde_json::{Map, Value, json};

use super::{
    output::{Form, Output, size},
    server::{INTERPRETER_PORT, Options, Server, whole},
};

/// The longest line that the interpreter may send, in bytes.
const LINE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Formats of a result, how each is saved, and whether it is base64.
const FORMATS: [(&str, &str, bool); 9] = [
    ("png", "png", true),
    ("jpeg", "jpg", true),
    ("pdf", "pdf", true),
    ("svg", "svg", false),
    ("html", "html", false),
    ("markdown", "md", false),
    ("latex", "tex", false),
    ("javascript", "js", false),
    ("json", "json", false),
];

/// Options of `sandhold sandbox run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The sandbox.
    sandbox: String,
    /// The code; `-` reads it from standard input.
    #[arg(
        required_unless_present = "file",
        conflicts_with = "file",
        allow_hyphen_values = true
    )]
    code: Option<String>,
    /// Read the code from this file.
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The language; Python unless given.
    #[arg(short, long)]
    language: Option<String>,
    /// Run in this context instead of the language's default one.
    #[arg(long, value_name = "ID", conflicts_with = "language")]
    context: Option<String>,
    /// Set a variable for this run; can be repeated.
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = super::sandbox::pair)]
    env: Vec<(String, String)>,
    /// Keep images, pages and documents among the results in this directory.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
}

/// Runs the code; fails if it raised an error.
pub(crate) async fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut output = Output::standard(args.options.json);
    execute(args, &mut output).await
}

pub(crate) async fn execute(args: &Args, output: &mut Output) -> anyhow::Result<ExitCode> {
    let server = Server::from_options(&args.options)?;
    let plane = server.data_plane(&args.sandbox, None).await?;
    let environment: Map<String, Value> = args
        .env
        .iter()
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect();
    let message = json!({
        "code": code(args)?,
        "context_id": args.context,
        "language": args.language,
        "env_vars": (!environment.is_empty()).then_some(environment),
    });
    let request = plane
        .request(INTERPRETER_PORT, Method::POST, "/execute")
        .header(header::CONTENT_TYPE, "application/json")
        .body(whole(message.to_string()))?;
    let mut body = plane.send(request).await?.into_body();
    let mut run = Run {
        output,
        save: args.save.as_deref(),
        saved: 0,
        failed: false,
    };
    let mut buffer = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the connection to the sandbox broke")?;
        buffer.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            run.line(&buffer.split_to(end + 1))?;
        }
        if buffer.len() > LINE_BYTES_MAX {
            bail!(
                "the sandbox sent a result of more than {}",
                size(LINE_BYTES_MAX as u64)
            );
        }
    }
    run.line(&buffer)?;
    Ok(if run.failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn code(args: &Args) -> anyhow::Result<String> {
    match (&args.file, args.code.as_deref()) {
        (Some(file), _) => std::fs::read_to_string(file)
            .with_context(|| format!("the code cannot be read from {}", file.display())),
        (None, Some("-")) => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .context("the code cannot be read from standard input")?;
            Ok(text)
        }
        (None, Some(code)) => Ok(code.to_owned()),
        (None, None) => bail!("there is no code to run"),
    }
}

/// What came so far of one run.
struct Run<'a> {
    output: &'a mut Output,
    save: Option<&'a Path>,
    saved: u32,
    failed: bool,
}

impl Run<'_> {
    fn line(&mut self, line: &[u8]) -> anyhow::Result<()> {
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let event: Value =
            serde_json::from_slice(line).context("the interpreter's answer is not understood")?;
        let kind = event["type"].as_str().unwrap_or_default();
        self.failed |= kind == "error";
        if self.output.form() == Form::Json {
            if kind != "keepalive" {
                self.output.json(&event)?;
            }
            if kind != "result" {
                return Ok(());
            }
        }
        let text = |field: &str| event[field].as_str().unwrap_or_default();
        match kind {
            "stdout" => self.output.raw(text("text").as_bytes())?,
            "stderr" => self.output.raw_error(text("text").as_bytes())?,
            "result" => self.result(&event)?,
            "error" => self.error(&event)?,
            _ => {}
        }
        Ok(())
    }

    /// The text of a result is printed; what cannot be is told, and kept if asked for.
    fn result(&mut self, event: &Value) -> anyhow::Result<()> {
        if let Some(text) = event["text"].as_str() {
            self.output.say(text)?;
        }
        for (format, extension, is_base64) in FORMATS {
            let content = &event[format];
            if content.is_null() {
                continue;
            }
            let bytes = match content.as_str() {
                Some(text) if is_base64 => STANDARD
                    .decode(text.replace(['\n', '\r'], ""))
                    .with_context(|| format!("the {format} in the result is not base64"))?,
                Some(text) => text.as_bytes().to_vec(),
                None => content.to_string().into_bytes(),
            };
            let length = size(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
            let Some(directory) = self.save else {
                self.tell(&format!("[{format}, {length}; --save DIR keeps it]"))?;
                continue;
            };
            self.saved += 1;
            let path = directory.join(format!("result-{}.{extension}", self.saved));
            std::fs::create_dir_all(directory)
                .and_then(|()| std::fs::write(&path, bytes))
                .with_context(|| format!("{} cannot be written", path.display()))?;
            self.tell(&format!(
                "[{format}, {length}, saved as {}]",
                path.display()
            ))?;
        }
        if let Some(chart) = event["chart"]["type"].as_str() {
            self.tell(&format!("[data of a {chart} chart; --json shows it]"))?;
        }
        Ok(())
    }

    fn tell(&mut self, text: &str) -> std::io::Result<()> {
        self.output.note(text)
    }

    fn error(&mut self, event: &Value) -> std::io::Result<()> {
        let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
        let traceback = match &event["traceback"] {
            Value::Array(lines) => lines
                .iter()
                .filter_map(Value::as_str)
                .collect::<Vec<_>>()
                .join("\n"),
            other => other.as_str().unwrap_or_default().to_owned(),
        };
        if traceback.trim().is_empty() {
            self.output
                .note(&format!("{}: {}", text("name"), text("value")))
        } else {
            self.output.note(traceback.trim_end())
        }
    }
}
