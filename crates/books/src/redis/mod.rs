//! The books on a Redis that all replicas share: each verb is one function there.
//!
//! ```text
//!   {name}:v1           hash: g = what is common · b<bucket> = policy and count · r<slot> = a record
//!   {name}:v1:l:…       an owner's history of leases         :a:<slot>  its audit trail
//!   {name}:v1:w h n q:… the queue                            :s:<sandbox> = its slot
//! ```
//!
//! All keys share one hash tag: a bucket and the global gate are one step, so they are on one server.
//! Many callers' steps go in one call ([`batch`]) of a function that was loaded into the server
//! ([`library`]): what they need is read once for all of them, as packed text lines, and what they changed
//! is written in a few commands.
//!
//! ```text
//!   no link ── connect, ask who it is ─▶ open.lua ─┬─ same server ──▶ linked
//!     ▲                                            ├─ no books yet ─▶ they begin
//!     │                                            └─ another one ──▶ settling: its last writes
//!     └── broken, or the books belong elsewhere                       may be lost
//! ```
//!
//! Invariants:
//! - Steps are carried out one after the other, each wholly; a batch is one atomic step of many.
//! - A call changes books only on the server that the books belong to (its `run_id` stands in them). Another
//!   one, after a failover, a restart or a restore, settles first.
//! - Time is the server's (`TIME`); no machine's clock is compared with it.
//! - What got no answer is not sent again here: only the caller knows whether it still wants it.

mod batch;
mod library;
mod verb;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, ErrorKind, RedisError, ServerErrorKind,
    aio::MultiplexedConnection,
};
use sandhold_governor::{
    Store, StoreError,
    books::{Answer, Audit, Stage, Step, Verb, View},
    rules::Rules,
};
use sandhold_types::{SandboxId, Timestamp};
use tokio::sync::Mutex;

use self::{
    batch::{Arguments, Batches},
    library::Library,
};
use crate::{
    Timed,
    text::{self, Parts, Unreadable},
};

/// The parts of what all books have in common, in order.
const COMMON_PARTS: [&str; 8] = [
    "NEWEST",
    "USED",
    "WAITING",
    "AWAKE_ALL",
    "CAP",
    "SETTLING",
    "SERVER",
    "SEQUENCE",
];

/// How often a verb meets its server anew before the caller is told that it cannot be reached.
const MEETINGS_MAX: u32 = 2;

/// From where a step takes the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerClock {
    /// The server's own clock.
    Own,
    /// The key `{name}:v1:clock`, in milliseconds. Only tests have it.
    Key,
}

impl ServerClock {
    pub(crate) fn script(self) -> &'static str {
        match self {
            Self::Own => include_str!("lua/clock.lua"),
            Self::Key => include_str!("lua/clock_of_tests.lua"),
        }
    }
}

/// How to reach the books.
#[derive(Debug, Clone)]
pub struct RedisSettings {
    /// `redis://host:port/db` or `redis+unix:///path`.
    pub url: String,
    /// The name before every key: one server may hold the books of several deployments.
    pub name: String,
    /// The most sandboxes over all buckets, if the global gate is on.
    pub global_cap: Option<u32>,
    /// How long to wait for an answer.
    pub answer_within: Duration,
    /// From where a step takes the time.
    pub clock: ServerClock,
}

impl RedisSettings {
    /// The usual ones for this address.
    #[must_use]
    pub fn at(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            name: "sandhold".to_owned(),
            global_cap: None,
            answer_within: Duration::from_secs(5),
            clock: ServerClock::Own,
        }
    }

    /// The key under which the books stand, and the beginning of every other one. The braces put all
    /// of them on one server.
    pub(crate) fn books_key(&self) -> String {
        format!("{{{}}}:v1", self.name)
    }
}

/// Why the books on a Redis cannot be used at all.
#[derive(Debug, thiserror::Error)]
pub enum RedisBooksError {
    /// The address means nothing.
    #[error("not a Redis address")]
    Address(#[source] RedisError),
    /// Nobody is there, or it is not the one to write to.
    #[error("the Redis of the books cannot be reached")]
    Unreachable,
}

/// A connection, and whose.
#[derive(Debug, Clone)]
struct Link {
    connection: MultiplexedConnection,
    server: String,
    number: u64,
}

/// The books on a shared Redis.
#[derive(Debug)]
pub struct RedisBooks {
    shared: Arc<Shared>,
}

/// What the batches that are under way need too.
#[derive(Debug)]
struct Shared {
    batches: Batches,
    client: Client,
    settings: RedisSettings,
    key: String,
    rules: Rules,
    library: Library,
    link: RwLock<Option<Link>>,
    meeting: Mutex<()>,
    links: AtomicU64,
    /// Whether this process has met the books before: then none means that they were lost.
    known: AtomicBool,
}

impl RedisBooks {
    /// Meets the server.
    ///
    /// # Errors
    /// The address is none, or nobody is there.
    pub async fn open(settings: RedisSettings, rules: &Rules) -> Result<Self, RedisBooksError> {
        let client = Client::open(settings.url.as_str()).map_err(RedisBooksError::Address)?;
        let books = Shared {
            batches: Batches::default(),
            client,
            key: settings.books_key(),
            library: Library::new(settings.clock, rules),
            rules: rules.clone(),
            settings,
            link: RwLock::new(None),
            meeting: Mutex::new(()),
            links: AtomicU64::new(0),
            known: AtomicBool::new(false),
        };
        match books.link().await {
            Ok(_) => Ok(Self {
                shared: Arc::new(books),
            }),
            Err(_) => Err(RedisBooksError::Unreachable),
        }
    }

    /// Carries out one verb and says when that was.
    ///
    /// # Errors
    /// As [`Store::step`].
    pub async fn step_timed(&self, verb: Verb) -> Result<Timed, StoreError> {
        if verb == Verb::Read {
            return self.shared.read().await;
        }
        let said = self.shared.step(&verb).await?;
        verb::read_reply(&said).map_err(|e| unreadable(&e))
    }

    /// What was done to a sandbox, oldest first (R-G17).
    ///
    /// # Errors
    /// The store did not answer.
    pub async fn trail(&self, sandbox: &SandboxId) -> Result<Vec<Audit>, StoreError> {
        self.shared.trail(sandbox).await
    }
}

impl Shared {
    fn current_link(&self) -> Option<Link> {
        let link = self.link.read();
        link.unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone()
    }

    fn set_link(&self, link: Option<Link>) {
        let mut slot = self
            .link
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        *slot = link;
    }

    fn drop_link(&self, number: u64) {
        if self
            .current_link()
            .is_some_and(|link| link.number == number)
        {
            self.set_link(None);
        }
    }

    /// The link, made if there is none. One caller connects; the others wait for it.
    async fn link(&self) -> Result<Link, StoreError> {
        if let Some(link) = self.current_link() {
            return Ok(link);
        }
        let _one_at_a_time = self.meeting.lock().await;
        if let Some(link) = self.current_link() {
            return Ok(link);
        }
        let link = self.meet().await.map_err(|error| {
            tracing::warn!(%error, "the Redis of the books cannot be reached");
            StoreError::Unavailable
        })?;
        self.set_link(Some(link.clone()));
        Ok(link)
    }

    async fn meet(&self) -> Result<Link, RedisError> {
        let within = Some(self.settings.answer_within);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(within)
            .set_response_timeout(within);
        let client = &self.client;
        let mut connection = client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        let info: String = redis::cmd("INFO").query_async(&mut connection).await?;
        let of = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
        let (Some(server), Some("master")) = (of("run_id:"), of("role:")) else {
            return Err((ErrorKind::Client, "it is not the one to write to").into());
        };
        let server = server.to_owned();
        self.library.load(&mut connection).await?;
        let cap = self.settings.global_cap;
        let settling: String = (self.library.open(&self.key))
            .arg(&server)
            .arg(cap.map_or_else(String::new, |cap| cap.to_string()))
            .arg(text::flag(self.known.load(Ordering::Relaxed)))
            .query_async(&mut connection)
            .await?;
        self.known.store(true, Ordering::Relaxed);
        if !settling.is_empty() {
            tracing::warn!(
                server,
                since_ms = settling,
                "the books' last writes may be lost; settling"
            );
        }
        Ok(Link {
            connection,
            server,
            number: self.links.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Carries out steps in one call; what each says, in their order.
    async fn carry_out(&self, steps: &[Arguments]) -> Result<Vec<String>, StoreError> {
        for _ in 0..MEETINGS_MAX {
            let mut link = self.link().await?;
            let mut call = self.library.steps(&self.key);
            call.arg(&link.server);
            for (name, arguments) in steps {
                call.arg(arguments.len()).arg(*name).arg(arguments);
            }
            let said: Result<Vec<String>, _> = call.query_async(&mut link.connection).await;
            match said {
                // The books belong elsewhere.
                Ok(said) if said.len() != steps.len() => self.drop_link(link.number),
                Ok(said) => return Ok(said),
                Err(error) if is_function_lost(&error) => self.drop_link(link.number),
                Err(error) => return Err(self.failed(&link, &error)),
            }
        }
        Err(StoreError::Unavailable)
    }

    /// Everything, in one step: a transaction, because a function would have to copy it twice.
    async fn read(&self) -> Result<Timed, StoreError> {
        for _ in 0..MEETINGS_MAX {
            let mut link = self.link().await?;
            let mut all = redis::pipe();
            match self.settings.clock {
                ServerClock::Own => all.atomic().cmd("TIME"),
                ServerClock::Key => all.atomic().cmd("MGET").arg(format!("{}:clock", self.key)),
            };
            all.cmd("HGETALL").arg(&self.key);
            type Everything = (Vec<u64>, Vec<(String, String)>);
            let answer: Result<Everything, _> = all.query_async(&mut link.connection).await;
            match answer {
                Ok((time, fields)) => {
                    let view = view_of(&time, fields, &link.server);
                    match view.map_err(|e| unreadable(&e))? {
                        Some(view) => return Ok(timed(view)),
                        None => self.drop_link(link.number),
                    }
                }
                Err(error) => return Err(self.failed(&link, &error)),
            }
        }
        Err(StoreError::Unavailable)
    }

    async fn trail(&self, sandbox: &SandboxId) -> Result<Vec<Audit>, StoreError> {
        let mut link = self.link().await?;
        let get = async |key: String, link: &mut Link| {
            let text: Result<Option<String>, _> = redis::cmd("GET")
                .arg(key)
                .query_async(&mut link.connection)
                .await;
            text.map_err(|error| self.failed(link, &error))
        };
        let Some(slot) = get(format!("{}:s:{sandbox}", self.key), &mut link).await? else {
            return Ok(Vec::new());
        };
        let trail = get(format!("{}:a:{slot}", self.key), &mut link).await?;
        text::read_audits(&trail.unwrap_or_default()).map_err(|e| unreadable(&e))
    }

    fn failed(&self, link: &Link, error: &RedisError) -> StoreError {
        let certainly_not = matches!(
            error.kind(),
            ErrorKind::Server(
                ServerErrorKind::ReadOnly
                    | ServerErrorKind::BusyLoading
                    | ServerErrorKind::MasterDown
            )
        );
        if certainly_not
            || error.is_io_error() && !error.is_timeout()
            || error.is_connection_dropped()
        {
            self.drop_link(link.number);
        }
        tracing::warn!(%error, "a step on the books has no answer");
        if certainly_not {
            StoreError::Unavailable
        } else {
            StoreError::NoAnswer
        }
    }
}

impl Store for RedisBooks {
    async fn step(&self, verb: Verb) -> Result<Step, StoreError> {
        Ok(self.step_timed(verb).await?.step)
    }
}

/// The server has forgotten its functions, so nothing was done.
fn is_function_lost(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError)
        && error.detail() == Some("Function not found")
}

fn unreadable(error: &Unreadable) -> StoreError {
    tracing::error!(%error, "the books hold what cannot be read");
    StoreError::NoAnswer
}

fn timed(view: View) -> Timed {
    let at = view.now;
    let answer = Answer::Books(Box::new(view));
    let audit = Vec::new();
    Timed {
        step: Step { answer, audit },
        at,
    }
}

/// Seconds and microseconds, as the server tells the time; or milliseconds, as tests do.
fn time_of(parts: &[u64]) -> Option<Timestamp> {
    match parts {
        [s, us] => Some(Timestamp::from_unix_ms(s * 1_000 + us / 1_000)),
        [ms] => Some(Timestamp::from_unix_ms(*ms)),
        _ => None,
    }
}

/// The view, unless the books belong to another server.
fn view_of(
    time: &[u64],
    fields: Vec<(String, String)>,
    server: &str,
) -> Result<Option<View>, Unreadable> {
    let mut view = View {
        now: time_of(time).ok_or(Unreadable("time"))?,
        stage: Stage::Settled,
        records: Vec::new(),
        buckets: BTreeMap::new(),
        global_cap: None,
    };
    let mut at_home = false;
    for (field, value) in fields {
        let unreadable = Unreadable("field of the books");
        let (kind, name) = field.split_at_checked(1).ok_or(unreadable)?;
        match kind {
            "g" => {
                let mut parts = Parts::of(&value, "common part");
                for _ in 0..4 {
                    parts.text()?;
                }
                view.global_cap = parts.optional()?;
                if let Some(since) = parts.optional_time()? {
                    view.stage = Stage::Settling { since };
                }
                at_home = parts.text()? == server;
            }
            "b" => {
                if let Some(policy) = text::read_policy(&value)? {
                    view.buckets.insert(text::read_bucket(name)?, policy);
                }
            }
            _ => {
                let slot = name.parse().map_err(|_| unreadable)?;
                view.records.push(text::read_record(slot, &value)?);
            }
        }
    }
    view.records.sort_by(|a, b| a.slot.cmp(&b.slot));
    Ok(at_home.then_some(view))
}
