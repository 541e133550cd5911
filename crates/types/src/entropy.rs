//! Randomness, injected: production draws from the kernel, simulations from a seed.

use std::sync::Mutex;

use sha2::{Digest, Sha256};

/// A source of unpredictable bytes.
pub trait Entropy: Send + Sync + std::fmt::Debug {
    /// Fills the whole buffer.
    fn fill(&self, bytes: &mut [u8]);
}

/// The kernel's generator.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemEntropy;

impl Entropy for SystemEntropy {
    fn fill(&self, bytes: &mut [u8]) {
        // Linux answers getrandom() for as long as the machine runs, and a process without
        // randomness must not go on handing out tokens.
        #[allow(clippy::expect_used)]
        getrandom::fill(bytes).expect("the kernel's random number generator answers");
    }
}

/// A reproducible source for tests and simulations: SHA-256 of a seed and a counter.
#[derive(Debug)]
pub struct SeededEntropy {
    seed: u64,
    counter: Mutex<u64>,
}

impl SeededEntropy {
    /// The same seed gives the same bytes in the same order.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            counter: Mutex::new(0),
        }
    }
}

impl Entropy for SeededEntropy {
    fn fill(&self, bytes: &mut [u8]) {
        let mut counter = self
            .counter
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        for chunk in bytes.chunks_mut(32) {
            *counter += 1;
            let mut hash = Sha256::new();
            hash.update(self.seed.to_le_bytes());
            hash.update(counter.to_le_bytes());
            chunk.copy_from_slice(&hash.finalize()[..chunk.len()]);
        }
    }
}
