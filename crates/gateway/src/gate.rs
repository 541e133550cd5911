//! Polling several futures that wake each other, without going round through the scheduler.
//!
//! ```text
//!   outside wake ──▶ Resting ──▶ the task is scheduled
//!   inside  wake ──▶ Polling ──▶ Notified ──▶ polled once more, at once
//! ```
//!
//! The halves of a connection (its driver, the answer, the body) run in one task here. Each time
//! one hands something to another it wakes "the other's task", which is this one; the scheduler
//! would run the whole task again for that. A [`Gate`] catches wakes that come while it polls and
//! polls again itself.
//!
//! Invariant: no wake is lost. One word holds the state; a wake either moves Polling to Notified,
//! which the end of polling sees, or finds Resting and wakes the task.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use futures::task::AtomicWaker;

const RESTING: u8 = 0;
const POLLING: u8 = 1;
const NOTIFIED: u8 = 2;

/// After so many rounds the scheduler gets its turn; the budget of the runtime may be used up.
const ROUNDS_MAX: usize = 8;

#[derive(Debug)]
struct State {
    word: AtomicU8,
    task: AtomicWaker,
}

impl Wake for State {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let moved =
            self.word
                .compare_exchange(POLLING, NOTIFIED, Ordering::AcqRel, Ordering::Acquire);
        if moved == Err(RESTING) {
            self.task.wake();
        }
    }
}

/// Catches wakes among futures that are polled together.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Arc<State>,
    waker: Waker,
}

impl Gate {
    pub(crate) fn new() -> Self {
        let state = Arc::new(State {
            word: AtomicU8::new(RESTING),
            task: AtomicWaker::new(),
        });
        Self {
            waker: Waker::from(Arc::clone(&state)),
            state,
        }
    }

    /// Polls until the result is there or nothing moves any more.
    pub(crate) fn poll<T>(
        &self,
        cx: &mut Context<'_>,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let word = &self.state.word;
        self.state.task.register(cx.waker());
        let mut inner = Context::from_waker(&self.waker);
        for _ in 0..ROUNDS_MAX {
            word.store(POLLING, Ordering::Release);
            let result = poll(&mut inner);
            if result.is_ready() {
                // Whoever takes the result polls what is left.
                word.store(RESTING, Ordering::Release);
                return result;
            }
            let rested =
                word.compare_exchange(POLLING, RESTING, Ordering::AcqRel, Ordering::Acquire);
            if rested.is_ok() {
                return Poll::Pending;
            }
        }
        word.store(RESTING, Ordering::Release);
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[derive(Debug)]
struct Flag {
    is_woken: AtomicBool,
    task: AtomicWaker,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.task.wake();
    }
}

/// A future that is polled only when it was woken itself, beside one that is woken all the time.
#[derive(Debug)]
pub(crate) struct Rarely<F> {
    future: Pin<Box<F>>,
    flag: Arc<Flag>,
    waker: Waker,
}

impl<F: Future> Rarely<F> {
    pub(crate) fn new(future: F) -> Self {
        let flag = Arc::new(Flag {
            is_woken: AtomicBool::new(true),
            task: AtomicWaker::new(),
        });
        Self {
            future: Box::pin(future),
            waker: Waker::from(Arc::clone(&flag)),
            flag,
        }
    }
}

impl<F: Future> Future for Rarely<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.flag.task.register(cx.waker());
        if !self.flag.is_woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        let Self { future, waker, .. } = &mut *self;
        future.as_mut().poll(&mut Context::from_waker(waker))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn inside_wakes_poll_again_and_outside_wakes_reach_the_task() {
        let count = Arc::new(Count::default());
        let outer = Waker::from(Arc::clone(&count));
        let mut cx = Context::from_waker(&outer);
        let gate = Gate::new();
        let mut rounds = 0;
        let mut kept = None;
        let result = gate.poll(&mut cx, |cx| {
            rounds += 1;
            kept = Some(cx.waker().clone());
            if rounds < 3 {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::<()>::Pending
        });
        assert!(result.is_pending());
        assert_eq!((rounds, count.0.load(Ordering::SeqCst)), (3, 0));
        kept.unwrap().wake();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_rare_future_is_polled_when_it_was_woken_and_not_otherwise() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let polls = AtomicUsize::new(0);
        let mut receiver = std::pin::pin!(receiver);
        let rare = Rarely::new(std::future::poll_fn(|cx| {
            polls.fetch_add(1, Ordering::SeqCst);
            receiver.as_mut().poll(cx)
        }));
        let mut sender = Some(sender);
        let mut rounds = 0;
        let busy = std::future::poll_fn(|cx| {
            rounds += 1;
            if rounds == 50 {
                let _ = sender.take().map(|sender| sender.send(7));
            }
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        tokio::select! {
            biased;
            () = busy => {}
            value = rare => assert_eq!(value, Ok(7)),
        }
        assert_eq!(polls.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn what_never_rests_gives_the_scheduler_its_turn() {
        let count = Arc::new(Count::default());
        let outer = Waker::from(Arc::clone(&count));
        let gate = Gate::new();
        let result = gate.poll(&mut Context::from_waker(&outer), |cx| {
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        assert!(result.is_pending());
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn no_wake_from_another_thread_is_lost() {
        let count = Arc::new(Count::default());
        let outer = Waker::from(Arc::clone(&count));
        for _ in 0..2_000 {
            let gate = Gate::new();
            let before = count.0.load(Ordering::SeqCst);
            let mut rounds = 0;
            let mut thread = None;
            let result = gate.poll(&mut Context::from_waker(&outer), |cx| {
                rounds += 1;
                let waker = cx.waker().clone();
                thread.get_or_insert_with(|| std::thread::spawn(move || waker.wake()));
                Poll::<()>::Pending
            });
            assert!(result.is_pending());
            thread.unwrap().join().unwrap();
            let woken = count.0.load(Ordering::SeqCst) - before;
            assert!(rounds > 1 || woken == 1, "{rounds} rounds, {woken} wakes");
        }
    }
}
