//! A run: one strictly serial loop, and a clean-up on every way out of it (R-G3).
//!
//! ```text
//!   BeginRun ─▶ write files ─▶ launch ─▶ ┌▶ artifacts ─▶ exit? ─▶ cancel? deadline? ─▶ beat if due ─▶ sleep ─┐
//!   (or ClaimRun: taken over) ──────────▶ └───────────────────────────────────────────────────────────────┘
//!        │ any failure, exit, cancel, deadline, lost lease, no confirmed beat for 60 s
//!        ▼
//!   last artifacts ─▶ kill what it started (3 tries) ─▶ EndRun ─▶ completed or error
//! ```
//!
//! Invariants: nothing happens twice at once; after the local deadline without a confirmed beat
//! nothing more is done in the sandbox but the clean-up; every way out says its reason; a sandbox in
//! which the run may go on, because the clean-up did not succeed, is not kept (R-G9).

use std::time::Duration;

use sandhold_types::{Generation, SandboxId, Timestamp};

use super::{Effect, Input, Outcome, Task};
use crate::{
    books::{Answer, Keep, Verb},
    ids::{ReplicaId, RunId, SlotId},
    ports::{Call, CallError, Reply, StoreError},
    rules::Rules,
};

/// What the caller of a run is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunEvent {
    /// The entry process was launched.
    Started,
    /// There are new artifacts.
    Progress {
        /// How many.
        artifacts: u32,
    },
    /// The entry process ended by itself.
    Completed {
        /// Its code.
        exit_code: i32,
    },
    /// The run ended otherwise.
    Error(WayOut),
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WayOut {
    /// Its process ended with this code.
    Exited(i32),
    /// Somebody asked for its end.
    Cancelled,
    /// Its time was over.
    DeadlineExceeded,
    /// Its lease or its run passed to another.
    LeaseLost,
    /// Its lease could not be confirmed for too long: better no run than two.
    Unconfirmed,
    /// Its sandbox is gone.
    SandboxGone,
    /// Its files could not be written, or its process not be launched.
    NotStarted,
    /// Nothing in its sandbox answered for too long.
    Unresponsive,
    /// Its replica was lost before it had started, and what it was to do with it.
    ReplicaLost,
}

impl WayOut {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exited(_) => "exited",
            Self::Cancelled => "cancelled",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::LeaseLost => "lease_lost",
            Self::Unconfirmed => "lease_unconfirmed",
            Self::SandboxGone => "sandbox_gone",
            Self::NotStarted => "not_started",
            Self::Unresponsive => "sandbox_unresponsive",
            Self::ReplicaLost => "replica_lost",
        }
    }
}

/// What is to be run.
#[derive(Debug, Clone)]
pub struct RunOf {
    /// In which slot.
    pub slot: SlotId,
    /// In which sandbox.
    pub sandbox: SandboxId,
    /// Under which generation.
    pub generation: Generation,
    /// Which run.
    pub run: RunId,
    /// Who executes it.
    pub replica: ReplicaId,
    /// For how long at most.
    pub timeout: Duration,
    /// What stays.
    pub keep: Keep,
}

/// The loop of one run.
#[derive(Debug)]
pub struct RunLoop {
    of: RunOf,
    rules: Rules,
    entry: Entry,
    state: State,
    ends_at: Option<Timestamp>,
    /// When the last beat that was confirmed was *sent*.
    confirmed_at: Timestamp,
    beat_sent_at: Timestamp,
    cursor: u64,
    exit: Option<i32>,
    way_out: Option<WayOut>,
    cleanups: u32,
    is_clean: bool,
    /// Since when the sandbox has not answered.
    silent_since: Option<Timestamp>,
    cancelled: bool,
    remove: Option<SlotId>,
}

#[cfg(test)]
mod tests;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    Fresh,
    TakenOver,
    /// Taken over only to be ended.
    Abandoned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Fresh,
    Beginning,
    Writing,
    Launching,
    Started,
    Artifacts,
    ToldProgress,
    Exit,
    Beating,
    Sleeping,
    CleaningUp,
    Ending,
    Telling,
}

impl RunLoop {
    /// A run that has not begun.
    #[must_use]
    pub fn new(of: RunOf, rules: Rules) -> Self {
        let epoch = Timestamp::from_unix_ms(0);
        Self {
            of,
            rules,
            entry: Entry::Fresh,
            state: State::Fresh,
            ends_at: None,
            confirmed_at: epoch,
            beat_sent_at: epoch,
            cursor: 0,
            exit: None,
            way_out: None,
            cleanups: 0,
            is_clean: false,
            silent_since: None,
            cancelled: false,
            remove: None,
        }
    }

    /// A run of a replica that has not been heard: it goes on from the loop, for `of.timeout` more.
    #[must_use]
    pub fn taken_over(of: RunOf, rules: Rules) -> Self {
        Self {
            entry: Entry::TakenOver,
            ..Self::new(of, rules)
        }
    }

    /// A run of a replica that was lost before it had started it: it cannot go on, because what it was
    /// to do is not known here. What there is of it is cleaned up.
    #[must_use]
    pub fn abandoned(of: RunOf, rules: Rules) -> Self {
        Self {
            entry: Entry::Abandoned,
            ..Self::new(of, rules)
        }
    }

    /// Somebody asks for its end; the loop sees it at its next turn.
    pub fn cancel(&mut self) {
        self.cancelled = true;
    }

    fn begin(&mut self, now: Timestamp) -> Effect {
        self.ends_at = Some(now.plus(self.of.timeout));
        self.beat_sent_at = now;
        self.state = State::Beginning;
        let (slot, run) = (self.of.slot.clone(), self.of.run.clone());
        let replica = self.of.replica.clone();
        let generation = self.of.generation;
        Effect::Store(match self.entry {
            Entry::Fresh => Verb::BeginRun {
                slot,
                generation,
                run,
                replica,
            },
            Entry::TakenOver | Entry::Abandoned => Verb::ClaimRun { slot, run, replica },
        })
    }

    fn names(&self) -> (SandboxId, Generation, RunId) {
        (
            self.of.sandbox.clone(),
            self.of.generation,
            self.of.run.clone(),
        )
    }

    /// The next part of the loop, unless a way out is open.
    fn turn(&mut self, now: Timestamp) -> Effect {
        if let Some(way_out) = self.way_out_now(now) {
            return self.leave(way_out);
        }
        self.state = State::Artifacts;
        let (sandbox, generation, run) = self.names();
        Effect::Platform(Call::ReadArtifacts(sandbox, generation, run, self.cursor))
    }

    fn way_out_now(&self, now: Timestamp) -> Option<WayOut> {
        if now.since(self.confirmed_at) >= self.rules.holder_deadline() {
            return Some(WayOut::Unconfirmed);
        }
        if self.cancelled {
            return Some(WayOut::Cancelled);
        }
        let is_silent = |since| now.since(since) >= self.rules.holder_deadline();
        if self.silent_since.is_some_and(is_silent) {
            return Some(WayOut::Unresponsive);
        }
        let over = self.ends_at.is_some_and(|end| now >= end);
        over.then_some(WayOut::DeadlineExceeded)
    }

    fn leave(&mut self, way_out: WayOut) -> Effect {
        self.way_out.get_or_insert(way_out);
        if self.way_out == Some(WayOut::SandboxGone) {
            return self.end();
        }
        self.state = State::CleaningUp;
        let (sandbox, generation, run) = self.names();
        Effect::Platform(Call::KillProcesses(sandbox, generation, run))
    }

    fn after_clean_up(&mut self, result: Result<Reply, CallError>) -> Effect {
        self.cleanups += 1;
        self.is_clean = matches!(
            result,
            Ok(_) | Err(CallError::NotFound | CallError::StaleGeneration)
        );
        if self.is_clean || self.cleanups >= self.rules.settings().probe_tries {
            return self.end();
        }
        let way_out = self.way_out.unwrap_or(WayOut::Unconfirmed);
        self.leave(way_out)
    }

    fn end(&mut self) -> Effect {
        self.state = State::Ending;
        let (slot, run) = (self.of.slot.clone(), self.of.run.clone());
        let replica = self.of.replica.clone();
        let keep = if self.is_clean {
            self.of.keep
        } else {
            Keep::Nothing
        };
        Effect::Store(Verb::EndRun {
            slot,
            run,
            replica,
            keep,
        })
    }

    fn tell(&mut self) -> Effect {
        self.state = State::Telling;
        Effect::Emit(match self.way_out {
            Some(WayOut::Exited(exit_code)) => RunEvent::Completed { exit_code },
            Some(other) => RunEvent::Error(other),
            None => RunEvent::Error(WayOut::Unconfirmed),
        })
    }

    fn after_begin(&mut self, answer: Result<Answer, StoreError>, now: Timestamp) -> Effect {
        match answer {
            Ok(Answer::RunGoesOn { cancelled }) => {
                self.cancelled |= cancelled;
                self.confirmed_at = self.beat_sent_at;
                match self.entry {
                    Entry::Fresh => self.write_files(),
                    Entry::TakenOver => self.turn(now),
                    Entry::Abandoned => self.leave(WayOut::ReplicaLost),
                }
            }
            _ => {
                self.way_out = Some(WayOut::LeaseLost);
                self.tell()
            }
        }
    }

    fn write_files(&mut self) -> Effect {
        self.state = State::Writing;
        let (sandbox, generation, run) = self.names();
        Effect::Platform(Call::WriteFiles(sandbox, generation, run))
    }

    /// Nothing is started whose end is due already.
    fn launch(&mut self, now: Timestamp) -> Effect {
        if let Some(way_out) = self.way_out_now(now) {
            return self.leave(way_out);
        }
        self.state = State::Launching;
        let (sandbox, generation, run) = self.names();
        Effect::Platform(Call::Launch(sandbox, generation, run))
    }

    /// Notes whether the sandbox answers.
    fn heard(&mut self, result: &Result<Reply, CallError>, now: Timestamp) {
        match result {
            Ok(_) => self.silent_since = None,
            Err(_) => {
                self.silent_since.get_or_insert(now);
            }
        }
    }

    fn after_artifacts(&mut self, result: Result<Reply, CallError>, now: Timestamp) -> Effect {
        self.heard(&result, now);
        match result {
            Ok(Reply::Artifacts { count, cursor }) => {
                self.cursor = cursor;
                if count == 0 {
                    return self.read_exit();
                }
                self.state = State::ToldProgress;
                Effect::Emit(RunEvent::Progress { artifacts: count })
            }
            Err(CallError::NotFound) => self.leave(WayOut::SandboxGone),
            Err(CallError::StaleGeneration) => self.leave(WayOut::LeaseLost),
            _ => self.read_exit(),
        }
    }

    fn read_exit(&mut self) -> Effect {
        if let Some(code) = self.exit {
            return self.leave(WayOut::Exited(code));
        }
        self.state = State::Exit;
        let (sandbox, generation, run) = self.names();
        Effect::Platform(Call::ReadExit(sandbox, generation, run))
    }

    fn after_exit(&mut self, result: Result<Reply, CallError>, now: Timestamp) -> Effect {
        self.heard(&result, now);
        match result {
            Ok(Reply::Exit(Some(code))) => {
                self.exit = Some(code);
                self.turn(now)
            }
            Err(CallError::NotFound) => self.leave(WayOut::SandboxGone),
            Err(CallError::StaleGeneration) => self.leave(WayOut::LeaseLost),
            _ => self.beat_or_sleep(now),
        }
    }

    fn beat_or_sleep(&mut self, now: Timestamp) -> Effect {
        if let Some(way_out) = self.way_out_now(now) {
            return self.leave(way_out);
        }
        if now.since(self.beat_sent_at) < self.rules.settings().heartbeat {
            self.state = State::Sleeping;
            return Effect::Sleep(self.rules.settings().run_poll);
        }
        self.beat_sent_at = now;
        self.state = State::Beating;
        Effect::Store(Verb::RunHeartbeat {
            slot: self.of.slot.clone(),
            generation: self.of.generation,
            run: self.of.run.clone(),
            replica: self.of.replica.clone(),
        })
    }

    fn after_beat(&mut self, answer: Result<Answer, StoreError>, now: Timestamp) -> Effect {
        match answer {
            Ok(Answer::RunGoesOn { cancelled }) => {
                self.confirmed_at = self.beat_sent_at;
                self.cancelled |= cancelled;
                self.turn(now)
            }
            Ok(Answer::Recovering) | Err(_) => {
                // Neither confirmed nor lost: try again soon, and stop at the local deadline.
                let heartbeat = self.rules.settings().heartbeat;
                let due = self.confirmed_at.plus(heartbeat);
                self.beat_sent_at = due.min(self.beat_sent_at);
                self.state = State::Sleeping;
                Effect::Sleep(self.rules.settings().run_poll)
            }
            Ok(_) => self.leave(WayOut::LeaseLost),
        }
    }

    fn after_end(&mut self, answer: Result<Answer, StoreError>) -> Effect {
        if let Ok(Answer::Released { slot }) = answer {
            self.remove = slot;
        }
        self.tell()
    }
}

impl Task for RunLoop {
    fn step(&mut self, input: Input, now: Timestamp) -> Effect {
        match (self.state, input) {
            (State::Fresh, _) => self.begin(now),
            (State::Beginning, Input::Store(answer)) => self.after_begin(answer, now),
            (State::Writing, Input::Platform(Ok(_))) => self.launch(now),
            (State::Launching, Input::Platform(Ok(_))) => {
                self.state = State::Started;
                Effect::Emit(RunEvent::Started)
            }
            (State::Writing | State::Launching, Input::Platform(Err(CallError::NotFound))) => {
                self.leave(WayOut::SandboxGone)
            }
            (State::Writing | State::Launching, _) => self.leave(WayOut::NotStarted),
            (State::Started | State::Sleeping, _) => self.turn(now),
            (State::Artifacts, Input::Platform(result)) => self.after_artifacts(result, now),
            // What it wrote before it ended is told in full: until a look finds nothing new.
            (State::ToldProgress, _) if self.exit.is_some() => self.turn(now),
            (State::ToldProgress, _) => self.read_exit(),
            (State::Exit, Input::Platform(result)) => self.after_exit(result, now),
            (State::Beating, Input::Store(answer)) => self.after_beat(answer, now),
            (State::CleaningUp, Input::Platform(result)) => self.after_clean_up(result),
            (State::Ending, Input::Store(answer)) => self.after_end(answer),
            (State::Telling, _) => {
                let way_out = self.way_out.unwrap_or(WayOut::Unconfirmed);
                let remove = self.remove.take();
                Effect::Done(Outcome::RunEnded { way_out, remove })
            }
            _ => self.leave(WayOut::Unconfirmed),
        }
    }
}
