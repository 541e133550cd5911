//! `sandhold sandbox`: make, list, use and end sandboxes.

use std::{
    io::{IsTerminal as _, Write as _},
    process::ExitCode,
    str::FromStr as _,
};

use anyhow::{Context as _, bail};
use http::Method;
use sandhold_types::{Clock as _, SystemClock, Timestamp};
use serde_json::{Map, Value, json};

use super::{
    exec, failure, files,
    output::{Form, Output},
    run_code,
    server::{Options, Server, ServerError, segment, with_query},
    travel,
};

/// The template of a sandbox unless another is named.
const DEFAULT_TEMPLATE: &str = "code-interpreter-v1";
/// How many sandboxes are asked for at once.
const PAGE: u32 = 100;
/// More pages than any server has; a server that never ends its list is not believed.
const PAGES_MAX: usize = 10_000;

/// What `sandhold sandbox` can do.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// List sandboxes, newest first.
    #[command(visible_alias = "list")]
    Ls(ListArgs),
    /// Make a sandbox and print its ID.
    Create(CreateArgs),
    /// Run a program in a sandbox; its exit status becomes this command's.
    Exec(exec::Args),
    /// Run code in a sandbox's interpreter, which keeps its state between calls.
    Run(run_code::Args),
    /// Copy, list and delete files of a sandbox.
    #[command(subcommand)]
    Files(files::Command),
    /// Put a sandbox to sleep: it costs no memory and no processor, and comes back where it was.
    Pause(PauseArgs),
    /// Wake a sandbox that sleeps.
    Resume(ResumeArgs),
    /// Keep a sandbox as it is now, memory and files, and print the snapshot's ID.
    Snapshot(travel::SnapshotArgs),
    /// Copy a sandbox as it is now and print the copies' IDs.
    Clone(travel::CloneArgs),
    /// Take a sandbox back to a snapshot of its own.
    Rollback(travel::RollbackArgs),
    /// List the snapshots that a sandbox can go back to, and where it stands.
    Timeline(travel::TimelineArgs),
    /// End sandboxes for good; their processes and files are gone.
    Kill(KillArgs),
    /// Tell what happened to a sandbox, and why it ended.
    History(HistoryArgs),
}

/// Options of `sandhold sandbox ls`.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Only those in this state: running or paused.
    #[arg(long)]
    state: Option<String>,
    /// Only those with this pair of metadata; can be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// Print IDs only.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    options: Options,
}

/// Options of `sandhold sandbox create`.
#[derive(Debug, clap::Args)]
pub(crate) struct CreateArgs {
    /// The template: an ID, a name, or name:tag.
    #[arg(short, long, default_value = DEFAULT_TEMPLATE)]
    template: String,
    /// Seconds until the sandbox ends, or `never`; the server's default unless given.
    #[arg(long, value_name = "SECONDS", value_parser = timeout)]
    timeout: Option<i64>,
    /// Set a variable for everything that runs in it; can be repeated.
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    /// Keep a pair of your own beside it, to find it by; can be repeated.
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// Let it reach nothing outside.
    #[arg(long)]
    no_internet: bool,
    #[command(flatten)]
    options: Options,
}

/// Options of `sandhold sandbox pause`.
#[derive(Debug, clap::Args)]
pub(crate) struct PauseArgs {
    /// The sandbox.
    sandbox: String,
    /// Keep its files only; its processes start anew when it wakes.
    #[arg(long)]
    files_only: bool,
    #[command(flatten)]
    options: Options,
}

/// Options of `sandhold sandbox resume`.
#[derive(Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    /// The sandbox.
    sandbox: String,
    /// Seconds until it ends, or `never`; as it was made unless given.
    #[arg(long, value_name = "SECONDS", value_parser = timeout)]
    timeout: Option<i64>,
    /// Start its processes anew instead of bringing its memory back.
    #[arg(long)]
    cold: bool,
    #[command(flatten)]
    options: Options,
}

/// Options of `sandhold sandbox kill`.
#[derive(Debug, clap::Args)]
pub(crate) struct KillArgs {
    /// The sandboxes.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    sandboxes: Vec<String>,
    /// End every sandbox that this key sees.
    #[arg(long)]
    all: bool,
    /// Do not ask.
    #[arg(short, long)]
    yes: bool,
    #[command(flatten)]
    options: Options,
}

/// Options of `sandhold sandbox history`.
#[derive(Debug, clap::Args)]
pub(crate) struct HistoryArgs {
    /// The sandbox; one that ended recently is known as well.
    sandbox: String,
    #[command(flatten)]
    options: Options,
}

pub(crate) async fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let options = match command {
        Command::Exec(args) => return exec::run(args).await,
        Command::Run(args) => return run_code::run(args).await,
        Command::Files(command) => return files::run(command).await,
        Command::Ls(args) => &args.options,
        Command::Create(args) => &args.options,
        Command::Pause(args) => &args.options,
        Command::Resume(args) => &args.options,
        Command::Snapshot(args) => args.options(),
        Command::Clone(args) => args.options(),
        Command::Rollback(args) => args.options(),
        Command::Timeline(args) => args.options(),
        Command::Kill(args) => &args.options,
        Command::History(args) => &args.options,
    };
    let mut output = Output::standard(options.json);
    execute(command, &mut output).await
}

/// The commands that only talk to the API.
pub(crate) async fn execute(command: &Command, output: &mut Output) -> anyhow::Result<ExitCode> {
    match command {
        Command::Ls(args) => list(args, output).await?,
        Command::Create(args) => create(args, output).await?,
        Command::Pause(args) => pause(args, output).await?,
        Command::Resume(args) => resume(args, output).await?,
        Command::Snapshot(args) => travel::snapshot(args, output).await?,
        Command::Clone(args) => travel::clone(args, output).await?,
        Command::Rollback(args) => travel::rollback(args, output).await?,
        Command::Timeline(args) => travel::timeline(args, output).await?,
        Command::Kill(args) => return kill(args, output).await,
        Command::History(args) => history(args, output).await?,
        Command::Exec(_) | Command::Run(_) | Command::Files(_) => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// `NAME=VALUE`
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("'{text}' is not NAME=VALUE")),
    }
}

pub(super) fn timeout(text: &str) -> Result<i64, String> {
    if text == "never" {
        return Ok(-1);
    }
    match text.parse() {
        Ok(seconds @ 0..) => Ok(seconds),
        _ => Err(format!(
            "'{text}' is neither a number of seconds nor 'never'"
        )),
    }
}

fn object(pairs: &[(String, String)]) -> Map<String, Value> {
    pairs
        .iter()
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect()
}

/// Every sandbox that the filter lets through, over all pages.
async fn all(server: &Server, args: &ListArgs) -> anyhow::Result<Vec<Value>> {
    let mut found = Vec::new();
    let mut token: Option<String> = None;
    for _ in 0..PAGES_MAX {
        let path = page(args, token.as_deref());
        let (headers, answer) = server.call_with_headers(Method::GET, &path, None).await?;
        let Value::Array(sandboxes) = answer else {
            bail!("the server's list is not understood");
        };
        found.extend(sandboxes);
        token = headers
            .get("x-next-token")
            .and_then(|value| value.to_str().ok())
            .filter(|token| !token.is_empty())
            .map(ToOwned::to_owned);
        if token.is_none() {
            return Ok(found);
        }
    }
    bail!("the server's list does not end");
}

fn page(args: &ListArgs, token: Option<&str>) -> String {
    let mut query = with_query("/v2/sandboxes");
    query.append_pair("limit", &PAGE.to_string());
    if let Some(state) = &args.state {
        query.append_pair("state", state);
    }
    if !args.metadata.is_empty() {
        // The server undoes the encoding twice more, since that is how SDKs send it.
        let encode = |text: &str| segment(&segment(text));
        let pairs: Vec<String> = args
            .metadata
            .iter()
            .map(|(name, value)| format!("{}={}", encode(name), encode(value)))
            .collect();
        query.append_pair("metadata", &pairs.join("&"));
    }
    if let Some(token) = token {
        query.append_pair("nextToken", token);
    }
    query.finish()
}

async fn list(args: &ListArgs, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&args.options)?;
    let sandboxes = all(&server, args).await?;
    let id = |sandbox: &Value| sandbox["sandboxID"].as_str().unwrap_or_default().to_owned();
    if args.quiet && output.form() != Form::Json {
        for sandbox in &sandboxes {
            output.say(&id(sandbox))?;
        }
        return Ok(());
    }
    let rows: Vec<Vec<String>> = sandboxes
        .iter()
        .map(|sandbox| {
            let text = |field: &str| sandbox[field].as_str().unwrap_or_default();
            let template = sandbox["alias"]
                .as_str()
                .unwrap_or_else(|| text("templateID"));
            vec![
                id(sandbox),
                template.to_owned(),
                text("state").to_owned(),
                ago(text("startedAt")),
                ahead(text("endAt")),
                format!("{} / {} MiB", sandbox["cpuCount"], sandbox["memoryMB"]),
                pairs(&sandbox["metadata"]),
            ]
        })
        .collect();
    if rows.is_empty() && output.form() == Form::Terminal {
        output.note("no sandboxes; 'sandhold sandbox create' makes one")?;
        return Ok(());
    }
    let headings = [
        "ID",
        "TEMPLATE",
        "STATE",
        "STARTED",
        "ENDS",
        "CPU / MEMORY",
        "METADATA",
    ];
    output.rows(&headings, &rows, &json!(sandboxes))?;
    Ok(())
}

fn pairs(metadata: &Value) -> String {
    let Value::Object(fields) = metadata else {
        return String::new();
    };
    let texts: Vec<String> = fields
        .iter()
        .map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default()))
        .collect();
    texts.join(" ")
}

async fn create(args: &CreateArgs, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&args.options)?;
    let mut body = json!({
        "templateID": args.template,
        "metadata": object(&args.metadata),
        "envVars": object(&args.env),
        "allow_internet_access": !args.no_internet,
        "secure": true,
    });
    if let Some(seconds) = args.timeout {
        body["timeout"] = json!(seconds);
    }
    let made = server
        .call(Method::POST, "/v2/sandboxes", Some(&body))
        .await?;
    let id = made["sandboxID"]
        .as_str()
        .context("the server's answer holds no sandbox")?;
    if output.form() == Form::Json {
        output.json(&made)?;
    } else {
        output.say(id)?;
    }
    if output.form() == Form::Terminal {
        output.note(&format!("try: sandhold sandbox exec {id} -- uname -a"))?;
    }
    Ok(())
}

async fn pause(args: &PauseArgs, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&args.options)?;
    let path = format!("/sandboxes/{}/pause", segment(&args.sandbox));
    let body = json!({ "memory": !args.files_only });
    server.call(Method::POST, &path, Some(&body)).await?;
    if output.form() == Form::Json {
        return Ok(output.json(&json!({ "sandboxID": args.sandbox, "state": "paused" }))?);
    }
    output.say(&format!("{} sleeps", args.sandbox))?;
    Ok(())
}

async fn resume(args: &ResumeArgs, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&args.options)?;
    let path = format!("/sandboxes/{}/resume", segment(&args.sandbox));
    let mut body = json!({ "memory": !args.cold });
    if let Some(seconds) = args.timeout {
        body["timeout"] = json!(seconds);
    }
    let woken = server.call(Method::POST, &path, Some(&body)).await?;
    if output.form() == Form::Json {
        return Ok(output.json(&woken)?);
    }
    output.say(&format!("{} runs", args.sandbox))?;
    Ok(())
}

async fn kill(args: &KillArgs, output: &mut Output) -> anyhow::Result<ExitCode> {
    let server = Server::from_options(&args.options)?;
    let sandboxes = if args.all {
        let everything = ListArgs {
            state: None,
            metadata: Vec::new(),
            quiet: false,
            options: args.options.clone(),
        };
        all(&server, &everything)
            .await?
            .iter()
            .filter_map(|sandbox| sandbox["sandboxID"].as_str().map(ToOwned::to_owned))
            .collect()
    } else {
        args.sandboxes.clone()
    };
    if args.all && !args.yes && !sandboxes.is_empty() {
        let question = format!(
            "End {} sandboxes for good, with all their processes and files?",
            sandboxes.len()
        );
        if !confirmed(&question)? {
            bail!("nothing was ended");
        }
    }
    let mut failed = false;
    for sandbox in &sandboxes {
        let path = format!("/sandboxes/{}", segment(sandbox));
        match server.call(Method::DELETE, &path, None).await {
            Ok(_) if output.form() == Form::Json => {
                output.json(&json!({ "sandboxID": sandbox, "killed": true }))?;
            }
            Ok(_) => output.say(&format!("{sandbox} has ended; its files are gone"))?,
            // With --all, somebody else may have been faster.
            Err(error) if args.all && ServerError::code_of(&error) == Some("sandbox_not_found") => {
            }
            Err(error) => {
                failed = true;
                let error = error.context(sandbox.clone());
                let as_json = output.form() == Form::Json;
                output.note(&failure::told(&error, as_json))?;
            }
        }
    }
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Asks a person; where none is to be asked, the command itself was the decision.
pub(crate) fn confirmed(question: &str) -> anyhow::Result<bool> {
    let (input, mut error) = (std::io::stdin(), std::io::stderr());
    if !input.is_terminal() || !error.is_terminal() {
        return Ok(true);
    }
    write!(error, "{question} [y/N] ")?;
    error.flush()?;
    let mut answer = String::new();
    input.read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

async fn history(args: &HistoryArgs, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&args.options)?;
    let path = format!("/sandboxes/{}/events", segment(&args.sandbox));
    let answer = server.call(Method::GET, &path, None).await?;
    let events = answer["events"].as_array().cloned().unwrap_or_default();
    let rows: Vec<Vec<String>> = events
        .iter()
        .map(|event| {
            let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
            let by = match event["key"].as_str() {
                Some(key) => format!("key {key}"),
                None => text("actor"),
            };
            let mut request = text("requestID");
            if request.is_empty() {
                request.push('-');
            }
            let (when, state, why) = (text("timestamp"), text("state"), text("reason"));
            vec![when, state, by, request, why]
        })
        .collect();
    let headings = ["WHEN", "STATE", "BY", "REQUEST", "WHY"];
    output.rows(&headings, &rows, &answer)?;
    if let (Some(reason), Form::Terminal) = (answer["ended"]["reason"].as_str(), output.form()) {
        output.note(&format!("ended: {reason}"))?;
    }
    Ok(())
}

/// How long ago a moment was, in one unit.
pub(crate) fn ago(rfc3339: &str) -> String {
    match moment(rfc3339) {
        Some(then) => format!("{} ago", span(SystemClock.now().since(then).as_secs())),
        None => String::from("-"),
    }
}

/// How far off a moment is, in one unit.
fn ahead(rfc3339: &str) -> String {
    match moment(rfc3339) {
        Some(then) if then >= Timestamp::FAR_FUTURE => String::from("never"),
        Some(then) => format!("in {}", span(then.since(SystemClock.now()).as_secs())),
        None => String::from("-"),
    }
}

fn moment(rfc3339: &str) -> Option<Timestamp> {
    let ms = jiff::Timestamp::from_str(rfc3339).ok()?.as_millisecond();
    u64::try_from(ms).ok().map(Timestamp::from_unix_ms)
}

fn span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_one_unit() {
        assert_eq!(span(119), "119 s");
        assert_eq!(span(120), "2 min");
        assert_eq!(span(7_200), "2 h");
        assert_eq!(span(172_800), "2 d");
        assert_eq!(ahead("9999-01-01T00:00:00.000Z"), "never");
        assert_eq!(ago("rubbish"), "-");
    }

    #[test]
    fn arguments_are_checked() {
        assert_eq!(pair("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert!(pair("=x").is_err() && pair("x").is_err());
        assert_eq!(timeout("never"), Ok(-1));
        assert_eq!(timeout("60"), Ok(60));
        assert!(timeout("-5").is_err() && timeout("soon").is_err());
    }
}
