//! Runs: from a request to its last event, whichever replica is there (R-G1, R-G3).
//!
//! ```text
//!   ask ─▶ log begun ─▶ slot, lease, sandbox (Acquire) ─▶ BeginRun ─▶ answered with the run's name
//!                                                           │
//!            RunLoop ⇄ books, agent (Workload) ─▶ log (Writer) ─▶ readers, each with a cursor
//!                                                           │
//!   every cycle: logs whose writer is silent ─▶ taken over, or ended with a reason
//! ```
//!
//! Owns: the runs that this process executes, by name. What they are to do is in memory; what they
//! were and told is in the log and the books, so that another replica can go on or say how they ended.
//!
//! Invariants: one replica executes a run (books), and one writes its log (log); nobody who reads is
//! waited for; a run that was answered has a log that ends; a request that was refused has taken
//! nothing that is not given back.

mod agent;
mod artifacts;
mod head;
mod log;
mod takeover;
mod watch;
mod workload;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use sandhold_books::runs::{Ending, Entry, KeptRuns, Opened, RunState};
use sandhold_governor::{
    Platform, Store, StoreError,
    books::{Answer, Keep, Limit, Verb},
    ids::{Bucket, LeaseId, OwnerId, RunId},
    tasks::{Effect, Input, Outcome, Reused, RunEvent, RunLoop, Task as _},
};
use sandhold_types::{Generation, TemplateId};
use tokio::sync::Notify;

pub(crate) use self::head::look_wait;
use self::{
    artifacts::Manifest,
    log::{Pen, Writer},
    workload::{Task, Workload},
};
pub use self::{
    artifacts::{GLOB_BYTES_MAX, GLOBS_MAX, GlobError, Globs},
    head::{RunEnd, RunHead, RunPlace},
    workload::RunFile,
};
use crate::{
    direct::DirectSandboxes,
    governor::{Governor, fresh},
    guest::Guests,
};

/// The most runs that one process executes at once.
pub const RUNS_MAX: usize = 1_024;
/// How often a log is looked at whose writer is another process.
const LOG_POLL: Duration = Duration::from_millis(500);

/// What is to be run.
#[derive(Debug, Clone)]
pub struct RunAsk {
    /// The caller's name for it; asking again with it is the same run.
    pub run: Option<RunId>,
    /// Where it counts.
    pub bucket: Bucket,
    /// Whose it is.
    pub owner: OwnerId,
    /// Under which lease, if the caller has one.
    pub lease: Option<LeaseId>,
    /// The caller's project.
    pub project: String,
    /// The caller's name for the session.
    pub session_run: String,
    /// What a new sandbox is made from.
    pub template: TemplateId,
    /// What is written into the workspace.
    pub files: Vec<RunFile>,
    /// What the process may read beside it.
    pub context: Option<Bytes>,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Its environment.
    pub env_vars: BTreeMap<String, String>,
    /// Where it runs; nothing is the directory that commands run in.
    pub cwd: String,
    /// For how long at most.
    pub timeout: Duration,
    /// Which files are artifacts.
    pub artifacts: Globs,
    /// What stays.
    pub keep: Keep,
}

/// Why there is no run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunRefused {
    /// The books or the logs did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// This process executes as many as it may.
    #[error("{RUNS_MAX} runs are executed here already")]
    TooMany,
    /// There is a run of that name, of another owner.
    #[error("there is another run of that name")]
    NameTaken,
    /// The lease is in force, for another owner.
    #[error("the lease is another owner's")]
    LeaseOfAnother,
    /// The owner's sandbox has a run.
    #[error("the owner's sandbox has a run already")]
    Busy,
    /// The bucket was never set.
    #[error("the bucket was never set")]
    UnknownBucket,
    /// No room within the time to wait.
    #[error("no room for another sandbox")]
    NoPlace(Limit),
    /// The lease is sealed.
    #[error("the lease is sealed")]
    Stale {
        /// The current generation.
        current: Option<Generation>,
    },
    /// Not now.
    #[error("{0}")]
    Unavailable(&'static str),
}

/// What became of a request to cancel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cancelled {
    /// It is asked to end.
    Asked,
    /// It has ended.
    EndedBefore,
    /// Another replica still gets it a sandbox: nobody can tell it yet.
    TooEarly,
    /// There is no such run of that owner.
    Unknown,
    /// It is under another lease.
    Stale {
        /// The generation it is under.
        current: Option<Generation>,
    },
}

/// What a run is, and what is known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunInfo {
    /// Its name.
    pub run: RunId,
    /// What it is.
    pub head: RunHead,
    /// The number of its last event.
    pub last: u64,
    /// Whether it has ended.
    pub ending: Ending,
}

impl RunInfo {
    /// How it ended; `None` while it goes on.
    #[must_use]
    pub fn end_of(&self) -> Option<RunEnd> {
        self.head
            .end
            .clone()
            .filter(|_| self.ending == Ending::Closed)
    }
}

/// A run that is executed here.
#[derive(Debug, Default)]
struct Here {
    /// Somebody asked for its end, however early.
    is_cancelled: AtomicBool,
    /// Its loop is not to sleep on: somebody asks for its end, or its process has ended.
    wake: Notify,
    /// It told something.
    told: Notify,
}

impl Here {
    fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        self.wake.notify_one();
    }
}

/// The runs that this process executes.
#[derive(Debug, Default)]
pub(crate) struct Runs(Mutex<HashMap<RunId, Arc<Here>>>);

impl Runs {
    fn here(&self) -> MutexGuard<'_, HashMap<RunId, Arc<Here>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, run: &RunId) -> Option<Arc<Here>> {
        self.here().get(run).cloned()
    }
}

/// A run's place among those that are executed here; gone when dropped.
#[derive(Debug)]
struct Executed {
    runs: Arc<Runs>,
    run: RunId,
    here: Arc<Here>,
}

impl Executed {
    /// `None` if as many as may be are executed here, or this one is.
    fn begin(runs: &Arc<Runs>, run: &RunId) -> Option<Self> {
        let mut all = runs.here();
        if all.len() >= RUNS_MAX || all.contains_key(run) {
            return None;
        }
        let here = Arc::<Here>::default();
        all.insert(run.clone(), here.clone());
        Some(Self {
            runs: runs.clone(),
            run: run.clone(),
            here,
        })
    }
}

impl Drop for Executed {
    fn drop(&mut self) {
        self.runs.here().remove(&self.run);
        // Who waits looks again and finds the end.
        self.here.told.notify_waiters();
    }
}

fn info(state: RunState) -> Option<RunInfo> {
    Some(RunInfo {
        head: RunHead::read(&state.head)?,
        run: state.run,
        last: state.last,
        ending: state.ending,
    })
}

impl<P: Platform + DirectSandboxes + Guests + 'static> Governor<P> {
    pub(crate) fn logs(&self) -> &KeptRuns {
        &self.shared.logs
    }

    /// Takes a slot and a sandbox and begins a run in it, or finds the run of that name. The run goes
    /// on when the caller hangs up.
    ///
    /// # Errors
    /// Why there is none; then nothing is kept for it.
    pub async fn start_run(&self, ask: RunAsk) -> Result<RunId, RunRefused> {
        let governor = self.clone();
        let work = tokio::spawn(async move { governor.begin_run(ask).await });
        work.await.unwrap_or(Err(RunRefused::Unavailable(
            "the request failed inside the server",
        )))
    }

    async fn begin_run(self, ask: RunAsk) -> Result<RunId, RunRefused> {
        let entropy = self.shared.entropy.as_ref();
        let names = (fresh("run", entropy), fresh("run", entropy));
        let (Some(own_name), Some(work)) = names else {
            return Err(RunRefused::Unavailable("no name could be made"));
        };
        let run: RunId = ask.run.clone().unwrap_or(own_name);
        let Some(lease) = ask.lease.clone().or_else(|| self.new_lease()) else {
            return Err(RunRefused::Unavailable("no name could be made"));
        };
        if let Some(lease) = &ask.lease {
            self.check_lease(&ask, lease).await?;
        }
        let mut head = RunHead::of(&ask, &lease, &work);
        let replica = &self.shared.replica;
        if self.logs().open(&run, &head.text(), replica).await? == Opened::Exists {
            return self.attach(&run, &ask).await;
        }
        let Some(executed) = Executed::begin(&self.shared.runs, &run) else {
            self.logs().forget(&run, replica).await?;
            return Err(RunRefused::TooMany);
        };
        if let Err(refused) = self.place(&ask, &lease, &run, &mut head).await {
            self.logs().forget(&run, replica).await?;
            return Err(refused);
        }
        // Should this replica be lost now, others find the sandbox.
        let mut writer = self.writer(&run, 0);
        writer.append(Some(&head), &[], Ending::Open).await;
        let task = Task {
            files: ask.files,
            context: ask.context,
            command: ask.command,
            env_vars: ask.env_vars,
        };
        let workload = Workload::new(head, task, Manifest::default());
        self.spawn_loop(executed, workload, Begin::Fresh, 0);
        Ok(run)
    }

    /// A lease that is in force for another owner is not this one's to name.
    async fn check_lease(&self, ask: &RunAsk, lease: &LeaseId) -> Result<(), RunRefused> {
        let view = self.view().await?;
        let others = view.records.iter().any(|record| {
            record.bucket == ask.bucket
                && record.owner != ask.owner
                && record.holding.as_ref().is_some_and(|h| h.lease == *lease)
        });
        if others {
            return Err(RunRefused::LeaseOfAnother);
        }
        Ok(())
    }

    async fn attach(&self, run: &RunId, ask: &RunAsk) -> Result<RunId, RunRefused> {
        let found = self.run(run).await?.ok_or(RunRefused::NameTaken)?;
        let is_own = found.head.owner == ask.owner.as_str()
            && found.head.bucket().as_ref() == Some(&ask.bucket);
        if is_own {
            Ok(run.clone())
        } else {
            Err(RunRefused::NameTaken)
        }
    }

    /// Gets a sandbox and begins the run in the books.
    async fn place(
        &self,
        ask: &RunAsk,
        lease: &LeaseId,
        run: &RunId,
        head: &mut RunHead,
    ) -> Result<(), RunRefused> {
        let (bucket, owner) = (ask.bucket.clone(), ask.owner.clone());
        let acquired = self.acquire(bucket, owner, lease.clone(), ask.template.clone(), None);
        let (grant, reused) = match self.heard_while(run, acquired).await {
            Outcome::Leased { grant, reused } => (grant, reused),
            Outcome::CapacityExceeded(limit) => return Err(RunRefused::NoPlace(limit)),
            Outcome::Stale { current } => return Err(RunRefused::Stale { current }),
            Outcome::Unavailable("unknown bucket") => return Err(RunRefused::UnknownBucket),
            Outcome::Unavailable(why) => return Err(RunRefused::Unavailable(why)),
            _ => return Err(RunRefused::Unavailable("no sandbox was given")),
        };
        let begin = Verb::BeginRun {
            slot: grant.slot.clone(),
            generation: grant.generation,
            run: run.clone(),
            replica: self.shared.replica.clone(),
        };
        let refused = match self.shared.drive.books.step_timed(begin).await {
            Ok(timed) => match timed.step.answer {
                Answer::RunGoesOn { .. } => {
                    head.settle(&grant, reused, timed.at);
                    return Ok(());
                }
                Answer::Busy => RunRefused::Busy,
                Answer::Stale { current } => RunRefused::Stale { current },
                _ => RunRefused::Unavailable("the sandbox is going"),
            },
            Err(error) => RunRefused::Store(error),
        };
        if reused == Reused::No {
            // Nobody else knows of it. Should this not be carried out, its lease ends by itself.
            let (bucket, owner) = (ask.bucket.clone(), ask.owner.clone());
            self.release(bucket, owner, lease.clone()).await?;
        }
        Err(refused)
    }

    /// Waits for `work` and says meanwhile that somebody is there.
    async fn heard_while<T>(&self, run: &RunId, work: impl Future<Output = T>) -> T {
        let mut writer = self.writer(run, 0);
        tokio::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep(self.rules().settings().heartbeat) => writer.beat().await,
            }
        }
    }

    fn writer<'a>(&'a self, run: &'a RunId, last: u64) -> Writer<'a> {
        Writer {
            runs: self.logs(),
            run,
            replica: &self.shared.replica,
            last,
            pen: Pen::Held,
            // Its root must stay black meanwhile.
            patience: look_wait(self.rules()),
        }
    }

    fn spawn_loop(&self, executed: Executed, workload: Workload, begin: Begin, last: u64) {
        let governor = self.clone();
        tokio::spawn(async move { governor.execute(&executed, workload, begin, last).await });
    }

    /// The loop of one run, to its end.
    async fn execute(&self, executed: &Executed, mut workload: Workload, begin: Begin, last: u64) {
        let run = &executed.run;
        let now = match self.logs().state(run).await {
            Ok(Some(state)) => state.now,
            // Nobody knows how late it is: it has all its time.
            _ => workload.head.begun_at(),
        };
        let Some(of) = workload.head.run_of(run, &self.shared.replica, now) else {
            return;
        };
        let rules = self.rules().clone();
        let mut task = match begin {
            Begin::Fresh => RunLoop::new(of, rules),
            Begin::TakenOver => RunLoop::taken_over(of, rules),
            Begin::Abandoned => RunLoop::abandoned(of, rules),
        };
        let mut watch = match begin {
            Begin::TakenOver => self.watch(executed, &workload.head),
            Begin::Fresh | Begin::Abandoned => None,
        };
        let mut writer = self.writer(run, last);
        let drive = &self.shared.drive;
        let mut input = Input::Go;
        loop {
            if writer.pen == Pen::Passed {
                tracing::warn!(%run, "another replica has the run");
                return;
            }
            if executed.here.is_cancelled.load(Ordering::Acquire) {
                task.cancel();
            }
            input = match task.step(input, drive.now()) {
                Effect::Store(verb) => {
                    if matches!(verb, Verb::RunHeartbeat { .. }) {
                        writer.beat().await;
                        self.extend(&workload.head).await;
                    }
                    Input::Store(drive.books.step(verb).await.map(|step| step.answer))
                }
                Effect::Platform(call) => {
                    let called = workload.call(&drive.platform, call, self.rules());
                    Input::Platform(called.await)
                }
                Effect::Sleep(time) => {
                    tokio::select! {
                        () = tokio::time::sleep(time) => {}
                        () = executed.here.wake.notified() => {}
                    }
                    Input::Go
                }
                Effect::Emit(event) => {
                    if event == RunEvent::Started {
                        watch = self.watch(executed, &workload.head);
                    }
                    writer.tell(&event, &mut workload).await;
                    executed.here.told.notify_waiters();
                    Input::Go
                }
                Effect::Done(outcome) => {
                    tracing::info!(%run, ?outcome, "a run ended");
                    drop(watch);
                    // What it leaves is removed now.
                    drive.urge.notify_one();
                    return;
                }
            };
        }
    }

    /// Where a sandbox's life is a clock, it is moved along with the run.
    async fn extend(&self, head: &RunHead) {
        let (Some((_, sandbox, generation)), Some(holder)) = (head.names(), head.holder()) else {
            return;
        };
        let Some(ends_at) = self.extended(&sandbox, generation).await else {
            return;
        };
        let (bucket, owner, lease) = holder;
        let beat = Verb::Heartbeat {
            bucket,
            owner,
            lease,
            generation,
            ends_at: Some(ends_at),
        };
        if let Err(error) = self.step(beat).await {
            tracing::warn!(%error, "the end of a sandbox was not noted");
        }
    }

    /// What is known of a run; `None` if nothing is (any more).
    ///
    /// # Errors
    /// The logs did not answer.
    pub async fn run(&self, run: &RunId) -> Result<Option<RunInfo>, StoreError> {
        Ok(self.logs().state(run).await?.and_then(info))
    }

    /// The events after a number: at least one, unless the run has ended or `patience` is over.
    ///
    /// # Errors
    /// The logs did not answer.
    pub async fn run_events(
        &self,
        run: &RunId,
        after: u64,
        patience: Duration,
    ) -> Result<(Vec<Entry>, Ending), StoreError> {
        let until = tokio::time::Instant::now() + patience;
        loop {
            let here = self.shared.runs.find(run).unwrap_or_default();
            let told = here.told.notified();
            tokio::pin!(told);
            // Before looking: what is told in between is not missed.
            told.as_mut().enable();
            let entries = self.logs().read(run, after).await?;
            if !entries.is_empty() {
                return Ok((entries, Ending::Open));
            }
            let ended = match self.logs().state(run).await? {
                Some(state) => state.ending == Ending::Closed && state.last <= after,
                None => true,
            };
            if ended {
                return Ok((Vec::new(), Ending::Closed));
            }
            if tokio::time::Instant::now() >= until {
                return Ok((Vec::new(), Ending::Open));
            }
            // One that another process executes tells nobody here.
            let _ = tokio::time::timeout(LOG_POLL, told).await;
        }
    }

    /// Asks for the end of a run, by its owner and its lease (R-G3).
    ///
    /// # Errors
    /// The logs or the books did not answer.
    pub async fn cancel_run(
        &self,
        run: &RunId,
        owner: &OwnerId,
        lease: &LeaseId,
    ) -> Result<Cancelled, StoreError> {
        let Some(info) = self.run(run).await? else {
            return Ok(Cancelled::Unknown);
        };
        if info.head.owner != owner.as_str() {
            return Ok(Cancelled::Unknown);
        }
        if info.head.lease != lease.as_str() {
            let place = info.head.place.as_ref();
            let current = place.map(|place| Generation(place.fence));
            return Ok(Cancelled::Stale { current });
        }
        if info.ending == Ending::Closed {
            return Ok(Cancelled::EndedBefore);
        }
        let here = self.shared.runs.find(run);
        match (info.head.names(), &here) {
            (Some((slot, ..)), _) => {
                let run = run.clone();
                self.step(Verb::CancelRun { slot, run }).await?;
            }
            (None, Some(_)) => {}
            (None, None) => return Ok(Cancelled::TooEarly),
        }
        if let Some(here) = here {
            here.cancel();
        }
        Ok(Cancelled::Asked)
    }
}

/// How a loop begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begin {
    Fresh,
    TakenOver,
    Abandoned,
}
