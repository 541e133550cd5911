//! Many callers' steps in one call.
//!
//! ```text
//!   fewer than two calls under way ─▶ a step goes at once, alone
//!   two are ───────────────────────▶ it waits; what waits goes together as soon as one of them is back
//! ```
//!
//! Two, so that the server works on one while those who were answered by the other ask again.
//! So one caller waits for nobody, and many share what a call costs: being made, reading the common
//! part, writing down. Whoever hangs up while its step is under way or waits changes nothing for
//! the others.
//!
//! Owns: the steps that wait. Invariant: while any wait, as many calls are under way as there may be,
//! and whichever is back first takes them.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandhold_governor::{StoreError, books::Verb};
use tokio::sync::oneshot;

use super::{Shared, verb};

/// The most calls under way.
const UNDER_WAY_MAX: u32 = 2;
/// The most steps in one call: as long as it runs, the server does nothing else.
const BATCH_MAX: usize = 64;
/// The most steps that wait; past it callers are told that the store cannot be reached.
const WAITING_MAX: usize = 100_000;

/// A verb's name and arguments, as the function takes them.
pub(super) type Arguments = (&'static str, Vec<String>);

type Said = Result<String, StoreError>;

#[derive(Debug)]
struct Waiting {
    step: Arguments,
    tell: oneshot::Sender<Said>,
}

/// The steps that wait.
#[derive(Debug, Default)]
pub(super) struct Batches(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    under_way: u32,
    waiting: VecDeque<Waiting>,
}

impl Batches {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call is back: what goes next in its stead. One fewer is under way if nothing waits.
    fn next(&self) -> Vec<Waiting> {
        let mut state = self.state();
        let length = state.waiting.len().min(BATCH_MAX);
        if length == 0 {
            state.under_way -= 1;
        }
        state.waiting.drain(..length).collect()
    }
}

/// How a step goes.
enum Way {
    /// At once, by its caller.
    Alone(Arguments),
    /// With others.
    Together(oneshot::Receiver<Said>),
}

/// A step that goes alone. When it is over, whichever way, those that wait go.
struct Turn<'a>(&'a Arc<Shared>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let waiting = self.0.batches.next();
        if !waiting.is_empty() {
            let shared = self.0.clone();
            tokio::spawn(async move { shared.go_together(waiting).await });
        }
    }
}

impl Shared {
    /// Carries out one verb; what it says.
    pub(super) async fn step(self: &Arc<Self>, verb: &Verb) -> Said {
        let step = verb::step_of(verb, &self.rules);
        match self.way_of(step)? {
            Way::Alone(step) => {
                let _turn = Turn(self);
                let mut said = self.carry_out(std::slice::from_ref(&step)).await?;
                said.pop().ok_or(StoreError::NoAnswer)
            }
            Way::Together(said) => said.await.unwrap_or(Err(StoreError::NoAnswer)),
        }
    }

    fn way_of(&self, step: Arguments) -> Result<Way, StoreError> {
        let mut state = self.batches.state();
        if state.under_way < UNDER_WAY_MAX {
            state.under_way += 1;
            return Ok(Way::Alone(step));
        }
        if state.waiting.len() >= WAITING_MAX {
            return Err(StoreError::Unavailable);
        }
        let (tell, said) = oneshot::channel();
        state.waiting.push_back(Waiting { step, tell });
        Ok(Way::Together(said))
    }

    /// Batch after batch, until nothing waits.
    async fn go_together(&self, mut waiting: Vec<Waiting>) {
        while !waiting.is_empty() {
            let (steps, tells): (Vec<_>, Vec<_>) =
                waiting.into_iter().map(|w| (w.step, w.tell)).unzip();
            // Whoever hung up is told nothing.
            match self.carry_out(&steps).await {
                Ok(said) => {
                    for (tell, said) in tells.into_iter().zip(said) {
                        let _ = tell.send(Ok(said));
                    }
                }
                Err(error) => {
                    for tell in tells {
                        let _ = tell.send(Err(error));
                    }
                }
            }
            waiting = self.batches.next();
        }
    }
}
