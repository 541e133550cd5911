//! One task after the other effect, until it is done.
//!
//! The clock of a task is this process's own and only ever grows: it counts from when the process
//! began. Nothing compares it with the store's.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandhold_books::KeptBooks;
use sandhold_governor::{
    Call, CallError, CallKind, Platform, Reply, Store,
    rules::Rules,
    tasks::{Effect, Input, Outcome, Task},
    valve::{Entry, Exit, Left, Valve},
};
use sandhold_types::Timestamp;
use tokio::{sync::Notify, time::Instant};

/// What every task is carried out with.
#[derive(Debug)]
pub(crate) struct Drive<P> {
    pub(crate) books: KeptBooks,
    pub(crate) rules: Rules,
    pub(crate) platform: P,
    began: Instant,
    valve: Mutex<Valve>,
    /// A call is over: there may be room in its budget.
    room: Notify,
    /// The platform answers again, or something was condemned: removals need not wait for a round.
    pub(crate) urge: Notify,
}

impl<P: Platform> Drive<P> {
    pub(crate) fn new(books: KeptBooks, platform: P, rules: Rules) -> Self {
        Self {
            books,
            rules,
            platform,
            began: Instant::now(),
            valve: Mutex::new(Valve::default()),
            room: Notify::new(),
            urge: Notify::new(),
        }
    }

    /// The local clock. It begins at 1, so that "never" is before everything.
    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::from_unix_ms(1).plus(self.began.elapsed())
    }

    fn valve(&self) -> MutexGuard<'_, Valve> {
        self.valve.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which kinds of writes the breaker holds back.
    pub(crate) fn held_back(&self) -> Vec<CallKind> {
        self.valve().open()
    }

    /// Carries a task out to its end.
    pub(crate) async fn carry_out(&self, mut task: impl Task + Send) -> Outcome {
        let mut input = Input::Go;
        loop {
            input = match task.step(input, self.now()) {
                Effect::Store(verb) => {
                    Input::Store(self.books.step(verb).await.map(|step| step.answer))
                }
                Effect::Platform(call) => Input::Platform(self.call(call).await),
                Effect::Sleep(duration) => {
                    tokio::time::sleep(duration).await;
                    Input::Go
                }
                Effect::Emit(_) => Input::Go,
                Effect::Done(outcome) => return outcome,
            };
        }
    }

    /// One call, when its budget has room and within the deadline of its kind (R-G14). A create that
    /// waited for as long as one may take is not sent any more: its slot may be settled by then.
    async fn call(&self, call: Call) -> Result<Reply, CallError> {
        let kind = call.kind();
        let until = (kind == CallKind::Create).then(|| Instant::now() + self.deadline(kind));
        loop {
            // Before looking: room that is made in between is not missed.
            let room = self.room.notified();
            match self.valve().enter(kind, &self.rules, self.now()) {
                Entry::Go => break,
                Entry::Open => return Err(CallError::BreakerOpen),
                Entry::Full => {}
            }
            match until {
                None => room.await,
                Some(until) => {
                    let in_time = tokio::time::timeout_at(until, room).await;
                    in_time.map_err(|_| CallError::BreakerOpen)?;
                }
            }
        }
        let result = tokio::time::timeout(self.deadline(kind), self.platform.call(call)).await;
        let result = result.unwrap_or(Err(CallError::NoAnswer));
        let exit = match result {
            Err(CallError::NoAnswer) => Exit::NoAnswer,
            _ => Exit::Answered,
        };
        let left = self.valve().leave(kind, exit, &self.rules, self.now());
        self.room.notify_waiters();
        if left == Left::Reopening {
            self.urge.notify_one();
        }
        result
    }

    fn deadline(&self, kind: CallKind) -> Duration {
        match kind {
            CallKind::Create => self.rules.settings().create_deadline,
            CallKind::Delete | CallKind::Other => self.rules.settings().call_deadline,
        }
    }
}
