//! What goes wrong in a world, drawn from its seed.
//!
//! Each world has a few kinds of faults, not all of them at a time: a world in which everything fails
//! never gets far enough to break anything interesting.

use crate::rng::Rng;

/// The faults of one world; all chances in per mille.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// A replica dies at an effect (before or after it).
    pub crash: u64,
    /// A replica or a session sleeps at an input, for up to ten minutes.
    pub sleep: u64,
    /// The clocks of replicas and sessions run at half to double speed.
    pub clock_rates: bool,
    /// The store's reply is lost after the step.
    pub store_reply_lost: u64,
    /// The store cannot be reached.
    pub store_unreachable: u64,
    /// A write to the platform gets no answer and is never carried out.
    pub write_lost: u64,
    /// A write to the platform gets no answer and is carried out at once.
    pub write_unanswered: u64,
    /// A write to the platform gets no answer and is carried out later.
    pub write_late: u64,
    /// How much later at most, in ms.
    pub late_ms_max: u64,
    /// A write is refused.
    pub write_refused: u64,
    /// A read of one sandbox gets no answer.
    pub ask_lost: u64,
    /// A listing fails.
    pub listing_fails: u64,
    /// A listing is empty.
    pub listing_empty: u64,
    /// A listing leaves some out.
    pub listing_partial: u64,
    /// A listing is up to this old, in ms.
    pub listing_stale_ms: u64,
    /// The platform refuses to delete a paused sandbox.
    pub refuses_paused: bool,
    /// The platform leaves paused sandboxes out of its listings.
    pub hides_paused: bool,
    /// A wake-up fails.
    pub wake_fails: u64,
    /// Sandboxes that nobody uses fall asleep, and traffic wakes them, behind the governor's back.
    pub naps: bool,
    /// A new sandbox is not fit for use.
    pub unfit: u64,
    /// A sandbox dies by itself at a write.
    pub dies: u64,
    /// The platform checks no generations.
    pub unfenced: bool,
    /// The store fails over and loses its last writes, so many ms of them.
    pub failover_ms: u64,
    /// The store's clock steps forward by so many ms, once.
    pub clock_step_ms: u64,
}

impl Faults {
    /// Draws the faults of a world.
    pub fn draw(rng: &mut Rng) -> Self {
        let mut faults = Self::default();
        let on = |rng: &mut Rng| rng.chance(300);
        let level = |rng: &mut Rng, high: u64| rng.between(1, high);
        if on(rng) {
            faults.crash = level(rng, 15);
        }
        if on(rng) {
            faults.sleep = level(rng, 10);
        }
        faults.clock_rates = on(rng);
        if on(rng) {
            faults.store_reply_lost = level(rng, 100);
        }
        if on(rng) {
            faults.store_unreachable = level(rng, 100);
        }
        if on(rng) {
            faults.write_lost = level(rng, 300);
        }
        if on(rng) {
            faults.write_unanswered = level(rng, 300);
        }
        if on(rng) {
            faults.write_late = level(rng, 300);
        }
        if on(rng) {
            faults.write_refused = level(rng, 200);
        }
        if on(rng) {
            faults.ask_lost = level(rng, 300);
        }
        faults.refuses_paused = on(rng);
        faults.hides_paused = on(rng);
        if on(rng) {
            faults.wake_fails = level(rng, 600);
        }
        faults.naps = on(rng);
        if on(rng) {
            faults.unfit = level(rng, 200);
        }
        if on(rng) {
            faults.dies = level(rng, 10);
        }
        faults.unfenced = on(rng);
        if rng.chance(200) {
            faults.failover_ms = rng.between(200, 20_000);
        } else if rng.chance(200) {
            faults.clock_step_ms = rng.between(100_000, 400_000);
        }
        faults.draw_listing(rng);
        faults.late_ms_max = 60_000;
        faults
    }

    /// A sandbox whose record is lost can only be found in a listing, so a store that loses writes
    /// goes with a platform whose listings are whole (they may still fail and be stale).
    fn draw_listing(&mut self, rng: &mut Rng) {
        if rng.chance(300) {
            self.listing_fails = rng.between(1, 500);
        }
        if rng.chance(200) {
            self.listing_stale_ms = rng.between(1_000, 60_000);
            if self.failover_ms == 0 {
                self.listing_stale_ms *= 2;
            }
        }
        if self.failover_ms > 0 {
            self.hides_paused = false;
            return;
        }
        if rng.chance(200) {
            self.listing_empty = rng.between(1, 500);
        }
        if rng.chance(200) {
            self.listing_partial = rng.between(1, 500);
        }
    }

    /// The fastest and slowest clock, in per mille. A store whose clock steps forward ages all roots
    /// at once; a holder must then be heard between two looks, three quarters of a cycle apart.
    #[must_use]
    pub fn clock_range(&self) -> (u64, u64) {
        match (self.clock_rates, self.clock_step_ms > 0) {
            (false, _) => (1000, 1001),
            (true, false) => (500, 2001),
            (true, true) => (850, 1200),
        }
    }

    /// What stays when the faults are over: the platform's nature, and clocks.
    pub fn heal(&mut self) {
        *self = Self {
            clock_rates: self.clock_rates,
            refuses_paused: self.refuses_paused,
            hides_paused: self.hides_paused,
            unfenced: self.unfenced,
            ..Self::default()
        };
    }
}
