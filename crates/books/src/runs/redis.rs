//! The logs on a Redis that all replicas share.
//!
//! ```text
//!   {name}:v1:run:<run>      hash: head, writer, heard, ended, last, bytes
//!   {name}:v1:run:<run>:e    list of entries, each "kind\ndata"
//!   {name}:v1:runs           set of those that have not ended
//! ```
//!
//! A server that lost its last writes may have forgotten entries or whole logs; whoever writes is told
//! so, and goes on without.

use std::time::Duration;

use redis::{
    AsyncConnectionConfig, Client, FromRedisValue, RedisError, Script, ScriptInvocation,
    aio::MultiplexedConnection,
};
use sandhold_governor::{
    StoreError,
    ids::{ReplicaId, RunId},
};
use sandhold_types::Timestamp;
use tokio::sync::Mutex;

use super::{
    Append, ENDED_KEPT, ENTRIES_MAX, Ending, Entry, LOG_BYTES_MAX, Opened, READ_ENTRIES_MAX,
    RunState, Written,
};
use crate::{
    redis::{RedisBooksError, RedisSettings, ServerClock},
    text::ms,
};

/// The logs on a shared Redis.
#[derive(Debug)]
pub struct RedisRuns {
    client: Client,
    books: String,
    clock: ServerClock,
    answer_within: Duration,
    script: Script,
    connection: Mutex<Option<MultiplexedConnection>>,
}

type Fields = Vec<Option<String>>;

impl RedisRuns {
    /// The logs beside the books of these settings. Nothing is sent yet.
    ///
    /// # Errors
    /// The address means nothing.
    pub fn new(settings: &RedisSettings) -> Result<Self, RedisBooksError> {
        let client = Client::open(settings.url.as_str()).map_err(RedisBooksError::Address)?;
        let body = include_str!("../redis/lua/run_log.lua")
            .replace("LOG_BYTES_MAX", &LOG_BYTES_MAX.to_string())
            .replace("ENTRIES_MAX", &ENTRIES_MAX.to_string())
            .replace("ENDED_KEPT", &ms(ENDED_KEPT).to_string());
        let script = [settings.clock.script(), &body].concat();
        Ok(Self {
            client,
            books: settings.books_key(),
            clock: settings.clock,
            answer_within: settings.answer_within,
            script: Script::new(&script),
            connection: Mutex::new(None),
        })
    }

    async fn connection(&self) -> Result<MultiplexedConnection, StoreError> {
        let mut kept = self.connection.lock().await;
        if let Some(connection) = &*kept {
            return Ok(connection.clone());
        }
        let within = Some(self.answer_within);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(within)
            .set_response_timeout(within);
        let connection = (self.client)
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .map_err(|error| {
                tracing::warn!(%error, "the Redis of the runs cannot be reached");
                StoreError::Unavailable
            })?;
        *kept = Some(connection.clone());
        Ok(connection)
    }

    /// What broke is made anew by the next who asks.
    async fn failed(&self, error: &RedisError) -> StoreError {
        tracing::warn!(%error, "the Redis of the runs did not answer");
        *self.connection.lock().await = None;
        StoreError::NoAnswer
    }

    fn log(&self, run: &RunId) -> String {
        format!("{}:run:{run}", self.books)
    }

    fn entries(&self, run: &RunId) -> String {
        format!("{}:e", self.log(run))
    }

    fn unfinished_key(&self) -> String {
        format!("{}:runs", self.books)
    }

    fn call(&self, act: &str, run: &RunId, writer: &ReplicaId) -> ScriptInvocation<'_> {
        let mut call = self.script.key(&self.books);
        call.key(self.log(run))
            .key(self.entries(run))
            .key(self.unfinished_key())
            .arg(act)
            .arg(run.as_str())
            .arg(writer.as_str());
        call
    }

    async fn invoke(&self, call: ScriptInvocation<'_>) -> Result<String, StoreError> {
        let mut connection = self.connection().await?;
        match call.invoke_async(&mut connection).await {
            Ok(said) => Ok(said),
            Err(error) => Err(self.failed(&error).await),
        }
    }

    async fn query<T: FromRedisValue>(&self, pipe: &redis::Pipeline) -> Result<T, StoreError> {
        let mut connection = self.connection().await?;
        match pipe.query_async(&mut connection).await {
            Ok(value) => Ok(value),
            Err(error) => Err(self.failed(&error).await),
        }
    }

    pub(super) async fn open(
        &self,
        run: &RunId,
        head: &str,
        writer: &ReplicaId,
    ) -> Result<Opened, StoreError> {
        let mut call = self.call("open", run, writer);
        call.arg(head);
        Ok(match self.invoke(call).await?.as_str() {
            "new" => Opened::New,
            _ => Opened::Exists,
        })
    }

    pub(super) async fn append(
        &self,
        run: &RunId,
        writer: &ReplicaId,
        append: Append<'_>,
    ) -> Result<Written, StoreError> {
        let mut call = self.call("append", run, writer);
        call.arg(append.after)
            .arg(if append.ending == Ending::Closed {
                "1"
            } else {
                "0"
            })
            .arg(append.head.unwrap_or_default());
        for entry in append.entries {
            call.arg(format!("{}\n{}", entry.kind, entry.data));
        }
        Ok(written(&self.invoke(call).await?))
    }

    pub(super) async fn claim(
        &self,
        run: &RunId,
        writer: &ReplicaId,
        silent_for: Duration,
    ) -> Result<Written, StoreError> {
        let mut call = self.call("claim", run, writer);
        call.arg(ms(silent_for));
        Ok(written(&self.invoke(call).await?))
    }

    pub(super) async fn forget(&self, run: &RunId, writer: &ReplicaId) -> Result<(), StoreError> {
        self.invoke(self.call("forget", run, writer)).await?;
        Ok(())
    }

    pub(super) async fn state(&self, run: &RunId) -> Result<Option<RunState>, StoreError> {
        Ok(self.states(std::slice::from_ref(run)).await?.pop())
    }

    async fn states(&self, runs: &[RunId]) -> Result<Vec<RunState>, StoreError> {
        let mut pipe = redis::pipe();
        pipe.atomic();
        match self.clock {
            ServerClock::Own => pipe.cmd("TIME"),
            ServerClock::Key => pipe.cmd("MGET").arg(format!("{}:clock", self.books)),
        };
        for run in runs {
            pipe.cmd("HMGET")
                .arg(self.log(run))
                .arg(&["head", "writer", "heard", "ended", "last"]);
        }
        let answers: Vec<Fields> = self.query(&pipe).await?;
        let Some((time, logs)) = answers.split_first() else {
            return Ok(Vec::new());
        };
        let now = time_of(time);
        let states = runs.iter().zip(logs);
        Ok(states
            .filter_map(|(run, fields)| state_of(run, fields, now))
            .collect())
    }

    pub(super) async fn read(&self, run: &RunId, after: u64) -> Result<Vec<Entry>, StoreError> {
        let mut pipe = redis::pipe();
        pipe.cmd("LRANGE")
            .arg(self.entries(run))
            .arg(after)
            .arg(after + READ_ENTRIES_MAX - 1);
        let (lines,): (Vec<String>,) = self.query(&pipe).await?;
        let entry = |line: &String| {
            let (kind, data) = line.split_once('\n')?;
            Some(Entry {
                kind: kind.to_owned(),
                data: data.to_owned(),
            })
        };
        Ok(lines.iter().filter_map(entry).collect())
    }

    pub(super) async fn unfinished(&self) -> Result<Vec<RunState>, StoreError> {
        let mut pipe = redis::pipe();
        pipe.cmd("SMEMBERS").arg(self.unfinished_key());
        let (names,): (Vec<String>,) = self.query(&pipe).await?;
        let runs: Vec<RunId> = names.iter().filter_map(|name| name.parse().ok()).collect();
        self.states(&runs).await
    }
}

fn written(said: &str) -> Written {
    match said {
        "done" => Written::Done,
        "full" => Written::Full,
        "not-writer" => Written::NotWriter,
        _ => Written::Lost,
    }
}

/// Seconds and microseconds, or milliseconds alone.
fn time_of(parts: &[Option<String>]) -> Timestamp {
    let number = |part: &Option<String>| part.as_ref()?.parse::<u64>().ok();
    match (
        parts.first().and_then(number),
        parts.get(1).and_then(number),
    ) {
        (Some(seconds), Some(micros)) => Timestamp::from_unix_ms(seconds * 1_000 + micros / 1_000),
        (Some(ms), None) => Timestamp::from_unix_ms(ms),
        _ => Timestamp::from_unix_ms(0),
    }
}

fn state_of(run: &RunId, fields: &[Option<String>], now: Timestamp) -> Option<RunState> {
    let [
        Some(head),
        Some(writer),
        Some(heard),
        Some(ended),
        Some(last),
    ] = fields
    else {
        return None;
    };
    Some(RunState {
        run: run.clone(),
        head: head.clone(),
        writer: writer.parse().ok()?,
        heard_at: Timestamp::from_unix_ms(heard.parse().ok()?),
        ending: if ended.is_empty() {
            Ending::Open
        } else {
            Ending::Closed
        },
        last: last.parse().ok()?,
        now,
    })
}
