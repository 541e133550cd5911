//! Fairness between tenants: how many creates each has under way, and how many wait.
//!
//! ```text
//!   create ──▶ [ waiting: first come, bounded ] ──▶ [ running: bounded ] ──▶ platform
//!                     one such lane per tenant
//! ```
//!
//! Invariants: a tenant never has more than `running_max` creates at the platform and never more
//! than `waiting_max` behind them; lanes without creates do not exist; a caller that goes away
//! gives its place back.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use sandhold_store::Bucket;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// The lanes of all tenants.
#[derive(Debug)]
pub(crate) struct CreateGate {
    running_max: usize,
    waiting_max: usize,
    lanes: Arc<Lanes>,
}

#[derive(Debug, Default)]
struct Lanes(Mutex<BTreeMap<Bucket, Lane>>);

#[derive(Debug)]
struct Lane {
    turns: Arc<Semaphore>,
    inside: usize,
}

/// A create's place at the platform. Dropping it lets the next one in.
#[derive(Debug)]
pub(crate) struct Turn {
    _permit: OwnedSemaphorePermit,
    _place: Place,
}

/// A place in a lane, waiting or running.
#[derive(Debug)]
struct Place {
    lanes: Arc<Lanes>,
    bucket: Bucket,
}

impl Lanes {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Bucket, Lane>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut lanes = self.lanes.lock();
        if let Some(lane) = lanes.get_mut(&self.bucket) {
            lane.inside -= 1;
            if lane.inside == 0 {
                lanes.remove(&self.bucket);
            }
        }
    }
}

impl CreateGate {
    pub(crate) fn new(running_max: usize, waiting_max: usize) -> Self {
        Self {
            running_max,
            waiting_max,
            lanes: Arc::default(),
        }
    }

    /// Waits for a turn until `give_up`.
    pub(crate) async fn enter(&self, bucket: &Bucket, give_up: Instant) -> Result<Turn, ApiError> {
        let (place, turns) = self.take_place(bucket)?;
        let turn = tokio::time::timeout_at(give_up.into(), turns.acquire_owned()).await;
        let permit = turn
            .map_err(|_| ApiError::TooMany("too many creates of this tenant wait for their turn"))?
            .map_err(|_| ApiError::Panicked)?;
        Ok(Turn {
            _permit: permit,
            _place: place,
        })
    }

    fn take_place(&self, bucket: &Bucket) -> Result<(Place, Arc<Semaphore>), ApiError> {
        let mut lanes = self.lanes.lock();
        let lane = lanes.entry(bucket.clone()).or_insert_with(|| Lane {
            turns: Arc::new(Semaphore::new(self.running_max)),
            inside: 0,
        });
        if lane.inside >= self.running_max + self.waiting_max {
            return Err(ApiError::TooMany("too many creates of this tenant at once"));
        }
        lane.inside += 1;
        let place = Place {
            lanes: self.lanes.clone(),
            bucket: bucket.clone(),
        };
        Ok((place, lane.turns.clone()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn bucket(namespace: &str) -> Bucket {
        Bucket {
            namespace: namespace.parse().unwrap(),
            env: "dev".parse().unwrap(),
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    #[tokio::test]
    async fn one_tenants_burst_does_not_hold_up_another() {
        // R-P9
        let gate = CreateGate::new(2, 1);
        let held = [
            gate.enter(&bucket("a"), soon()).await.unwrap(),
            gate.enter(&bucket("a"), soon()).await.unwrap(),
        ];
        assert!(gate.enter(&bucket("a"), soon()).await.is_err());
        gate.enter(&bucket("b"), soon()).await.unwrap();
        drop(held);
        gate.enter(&bucket("a"), soon()).await.unwrap();
    }

    #[tokio::test]
    async fn the_queue_is_bounded_and_places_come_back() {
        let gate = Arc::new(CreateGate::new(1, 1));
        let far = Instant::now() + Duration::from_secs(60);
        let running = gate.enter(&bucket("a"), far).await.unwrap();
        let mut waiting = Box::pin(async { gate.enter(&bucket("a"), far).await });
        assert!(futures_poll_once(&mut waiting).await.is_none());
        let refused = gate.enter(&bucket("a"), far).await.unwrap_err();
        assert_eq!(refused.code(), sandhold_types::ErrorCode::TooManyRequests);
        // The one that waits goes away: its place is free at once.
        drop(waiting);
        let mut next = Box::pin(async { gate.enter(&bucket("a"), far).await });
        assert!(futures_poll_once(&mut next).await.is_none());
        drop(running);
        drop(next.await.unwrap());
        assert!(gate.lanes.lock().is_empty(), "an idle tenant has no lane");
    }

    async fn futures_poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        std::future::poll_fn(|context| {
            std::task::Poll::Ready(match std::pin::Pin::new(&mut *future).poll(context) {
                std::task::Poll::Ready(value) => Some(value),
                std::task::Poll::Pending => None,
            })
        })
        .await
    }
}
