//! `sandhold why`, `sandhold lease` and `sandhold gc`: who has which sandbox, why it lives, and what
//! the reclaimer does.

use std::process::ExitCode;

use http::Method;
use serde_json::{Value, json};

use super::{
    output::{Form, Output},
    server::{Options, Server, segment},
};

/// `sandhold why`
#[derive(Debug, clap::Args)]
pub(crate) struct Why {
    /// The sandbox, living or dead.
    id: String,
    #[command(flatten)]
    options: Options,
}

/// Whose lease it is.
#[derive(Debug, clap::Args)]
pub(crate) struct Holder {
    /// For whom the sandbox is.
    owner: String,
    /// The tenant. The key's own unless given.
    #[arg(long)]
    namespace: Option<String>,
    /// The tenant's environment. The key's own unless given.
    #[arg(long)]
    env: Option<String>,
}

impl Holder {
    fn body(&self, rest: &Value) -> Value {
        let mut body = json!({
            "owner_id": self.owner,
            "namespace": self.namespace,
            "env": self.env,
        });
        if let (Some(body), Some(rest)) = (body.as_object_mut(), rest.as_object()) {
            body.extend(rest.clone());
        }
        body
    }
}

/// What `sandhold lease` can do.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Lease {
    /// Get an owner's sandbox: its own, if it has one, or a new one.
    Take {
        #[command(flatten)]
        holder: Holder,
        /// The name of this generation. The same again renews; another takes the sandbox over.
        #[arg(long)]
        lease: Option<String>,
        /// What a new sandbox is made from.
        #[arg(long)]
        template: Option<String>,
        /// For how many seconds a heartbeat keeps it.
        #[arg(long)]
        ttl: Option<u32>,
        #[command(flatten)]
        options: Options,
    },
    /// Say that the holder is alive.
    Beat {
        #[command(flatten)]
        holder: Holder,
        /// The lease.
        #[arg(long)]
        lease: String,
        /// Its fencing token.
        #[arg(long)]
        fence: u64,
        #[command(flatten)]
        options: Options,
    },
    /// End an owner's sandbox. Only the current lease can.
    Release {
        #[command(flatten)]
        holder: Holder,
        /// The lease.
        #[arg(long)]
        lease: String,
        #[command(flatten)]
        options: Options,
    },
    /// List the leases in force.
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        options: Options,
    },
}

/// What `sandhold gc` can do. All of it needs an administrator's key.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Gc {
    /// Show what a reclaimer round would do now. Nothing is done.
    Plan {
        #[command(flatten)]
        options: Options,
    },
    /// Do a round now. Something is only removed when two rounds, some time apart, found it unused.
    Run {
        #[command(flatten)]
        options: Options,
    },
    /// Show what needs somebody's attention.
    Alarms {
        #[command(flatten)]
        options: Options,
    },
}

impl Lease {
    fn options(&self) -> &Options {
        let (Self::Take { options, .. }
        | Self::Beat { options, .. }
        | Self::Release { options, .. }
        | Self::List { options }) = self;
        options
    }
}

impl Gc {
    fn options(&self) -> &Options {
        let (Self::Plan { options } | Self::Run { options } | Self::Alarms { options }) = self;
        options
    }
}

pub(crate) async fn why(command: &Why) -> anyhow::Result<ExitCode> {
    explain(command, &mut Output::standard(command.options.json)).await?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn lease(command: &Lease) -> anyhow::Result<ExitCode> {
    execute_lease(command, &mut Output::standard(command.options().json)).await?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn gc(command: &Gc) -> anyhow::Result<ExitCode> {
    execute_gc(command, &mut Output::standard(command.options().json)).await?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn explain(command: &Why, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(&command.options)?;
    let path = format!("/v1/sandboxes/{}/verdict", segment(&command.id));
    let verdict = server.call(Method::GET, &path, None).await?;
    if output.form() == Form::Json {
        output.json(&verdict)?;
    }
    output.say(verdict["text"].as_str().unwrap_or_default().trim_end())?;
    Ok(())
}

pub(crate) async fn execute_lease(command: &Lease, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(command.options())?;
    let post = async |path, body: Value| server.call(Method::POST, path, Some(&body)).await;
    match command {
        Lease::Take {
            holder,
            lease,
            template,
            ttl,
            ..
        } => {
            let rest = json!({ "lease_id": lease, "template_id": template, "ttl_s": ttl });
            granted(&post("/v1/leases", holder.body(&rest)).await?, output)
        }
        Lease::Beat {
            holder,
            lease,
            fence,
            ..
        } => {
            let rest = json!({ "lease_id": lease, "fence": fence });
            granted(
                &post("/v1/lease-heartbeats", holder.body(&rest)).await?,
                output,
            )
        }
        Lease::Release { holder, lease, .. } => {
            let body = holder.body(&json!({ "lease_id": lease }));
            let released = post("/v1/lease-releases", body).await?;
            if output.form() == Form::Json {
                output.json(&released)?;
            }
            output.say(&format!(
                "lease {lease} is released; its sandbox is removed now"
            ))?;
            Ok(())
        }
        Lease::List { .. } => {
            let answer = server.call(Method::GET, "/v1/leases", None).await?;
            let headings = ["OWNER", "LEASE", "FENCE", "SANDBOX", "FOR", "EXPIRES"];
            let leases = answer["leases"].as_array().cloned().unwrap_or_default();
            let rows: Vec<Vec<String>> = leases.iter().map(row).collect();
            output.rows(&headings, &rows, &answer["leases"])?;
            Ok(())
        }
    }
}

fn text(value: &Value, field: &str) -> String {
    match &value[field] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn row(lease: &Value) -> Vec<String> {
    vec![
        text(lease, "owner_id"),
        text(lease, "lease_id"),
        text(lease, "fence"),
        text(lease, "sandbox_id"),
        format!("{}/{}", text(lease, "namespace"), text(lease, "env")),
        text(lease, "expires_at"),
    ]
}

fn granted(lease: &Value, output: &mut Output) -> anyhow::Result<()> {
    if output.form() == Form::Json {
        output.json(lease)?;
        return Ok(());
    }
    output.say(&text(lease, "sandbox_id"))?;
    let how = if lease["reused"] == true {
        "had already"
    } else {
        "was made"
    };
    output.note(&format!(
        "lease {} with fence {} until {}; the sandbox {how}",
        text(lease, "lease_id"),
        text(lease, "fence"),
        text(lease, "expires_at"),
    ))?;
    Ok(())
}

pub(crate) async fn execute_gc(command: &Gc, output: &mut Output) -> anyhow::Result<()> {
    let server = Server::from_options(command.options())?;
    let (method, path) = match command {
        Gc::Plan { .. } => (Method::GET, "/v1/reclaimer/plan"),
        Gc::Run { .. } => (Method::POST, "/v1/reclaimer/rounds"),
        Gc::Alarms { .. } => (Method::GET, "/v1/alarms"),
    };
    let answer = server.call(method, path, None).await?;
    let of = |field: &str| answer[field].as_array().cloned().unwrap_or_default();
    if output.form() == Form::Json {
        output.json(&answer)?;
        return Ok(());
    }
    for alarm in of("alarms") {
        let line = format!("{}: {}", text(&alarm, "kind"), text(&alarm, "message"));
        if matches!(command, Gc::Alarms { .. }) {
            output.say(&line)?;
        } else {
            output.note(&line)?;
        }
    }
    let rows: Vec<Vec<String>> = of("work")
        .iter()
        .map(|work| {
            ["action", "sandbox_id", "because"]
                .map(|field| text(work, field))
                .to_vec()
        })
        .collect();
    if !matches!(command, Gc::Alarms { .. }) {
        output.rows(&["ACTION", "SANDBOX", "BECAUSE"], &rows, &answer)?;
    }
    Ok(())
}
