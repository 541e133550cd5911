//! The shape of a world: how many of everything, and how long each thing takes.

use sandhold_governor::colour::Retention;

use crate::rng::Rng;

/// The shape of a world.
#[derive(Debug, Clone)]
pub struct Profile {
    /// How many replicas.
    pub replicas: usize,
    /// Quota and retention of each bucket.
    pub buckets: Vec<(u32, Retention)>,
    /// The global cap.
    pub global_cap: Option<u32>,
    /// How many owners in each bucket.
    pub owners: usize,
    /// The longest pause between two sessions of an owner, in ms.
    pub owner_pause_ms: u64,
    /// The longest session, in ms.
    pub session_ms: u64,
    /// How long a sandbox lives unless extended, in ms.
    pub life_ms: u64,
    /// How often an owner begins a session while another is open, per mille.
    pub overlap: u64,
    /// How often a session is a run, per mille.
    pub runs: u64,
    /// How often a heartbeat does not extend the life, per mille.
    pub forgets_to_extend: u64,
    /// How long faults last, in true ms.
    pub fault_ms: u64,
    /// How long the world has to recover after that, in true ms.
    pub heal_ms: u64,
    /// The platform fails every write beyond so many at once.
    pub congestion: Option<u32>,
    /// How long a create or delete takes, in ms.
    pub service_ms: u64,
    /// How long a create takes, if that is another time, in ms.
    pub create_ms: Option<u64>,
}

impl Profile {
    /// A world drawn from a seed.
    pub fn draw(rng: &mut Rng) -> Self {
        let retention = |rng: &mut Rng| match rng.between(0, 3) {
            0 => Retention::Undeclared,
            _ => Retention::After(std::time::Duration::from_secs(rng.between(60, 600))),
        };
        let quota = |rng: &mut Rng| u32::try_from(rng.between(1, 5)).unwrap_or(1);
        let buckets = vec![(quota(rng), retention(rng)), (quota(rng), retention(rng))];
        Self {
            replicas: usize::try_from(rng.between(1, 5)).unwrap_or(1),
            global_cap: rng.chance(300).then(|| quota(rng)),
            buckets,
            owners: 3,
            owner_pause_ms: rng.between(60_000, 400_000),
            session_ms: rng.between(60_000, 900_000),
            life_ms: 600_000,
            overlap: 300,
            runs: 300,
            forgets_to_extend: 20,
            fault_ms: rng.between(1_200_000, 3_000_000),
            heal_ms: 2_400_000,
            congestion: None,
            service_ms: 300,
            create_ms: None,
        }
    }
}
