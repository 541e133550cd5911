//! The incidents that must stay impossible, R-I1 to R-I8, each replayed.
//!
//! Each passes with all rules, and fails when the rule that answers it is taken away
//! (`tests/incidents.rs`).

use std::{collections::BTreeMap, time::Duration};

use sandhold_governor::{
    Call, Reply,
    books::{Answer, BucketPolicy, Claim, Verb},
    colour::Retention,
    ids::SlotId,
    rules::Rules,
};
use sandhold_types::SandboxId;

use crate::{
    faults::Faults,
    rng::Rng,
    session::{Phase, name},
    world::{Profile, Report, World},
};

/// The incidents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Incident {
    /// R-I1: writes time out, nothing is removed, creates pile up.
    Spiral,
    /// R-I2: zombies long past their end hold the whole quota.
    FrozenSweeper,
    /// R-I3: leases that expired long ago count for ever.
    ImmortalLeases,
    /// R-I4: the last sandbox pauses, the listing is empty, and nothing is concluded any more.
    SelfLock,
    /// R-I5: a release of an old generation arrives after the session was taken over.
    LateCleanUp,
    /// R-I6: a paused sandbox that cannot be woken can never be deleted.
    Undeletable,
    /// R-I7: waking all that is paused in order to delete it.
    WakeStorm,
    /// R-I8: paused sandboxes fill the quota, and nobody is told.
    InvisibleZombies,
    /// R-G14: creates take all that the platform may be sent, and clean-up waits for them.
    StarvedCleanUp,
}

impl Incident {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Spiral,
        Self::FrozenSweeper,
        Self::ImmortalLeases,
        Self::SelfLock,
        Self::LateCleanUp,
        Self::Undeletable,
        Self::WakeStorm,
        Self::InvisibleZombies,
        Self::StarvedCleanUp,
    ];

    /// Replays it under these rules.
    #[must_use]
    pub fn replay(self, rules: Rules) -> Report {
        match self {
            Self::Spiral => spiral(rules),
            Self::FrozenSweeper => frozen_sweeper(rules),
            Self::ImmortalLeases => immortal_leases(rules),
            Self::SelfLock => self_lock(rules),
            Self::LateCleanUp => late_clean_up(rules),
            Self::Undeletable => undeletable(rules),
            Self::WakeStorm => wake_storm(rules),
            Self::InvisibleZombies => invisible_zombies(rules),
            Self::StarvedCleanUp => starved_clean_up(rules),
        }
    }
}

const SECOND: u64 = 1_000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;

/// How a planted sandbox is.
#[derive(Debug, Clone, Copy)]
struct Plant {
    /// How long a heartbeat keeps it; nobody ever sends one.
    ttl: Duration,
    /// Its end, in ms from now.
    life_ms: u64,
    paused: Paused,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Paused {
    Yes,
    No,
}

const SILENT: Plant = Plant {
    ttl: Duration::ZERO,
    life_ms: 30 * 24 * HOUR,
    paused: Paused::No,
};

fn quiet(rules: Rules, replicas: usize, buckets: Vec<(u32, Retention)>, faults: Faults) -> World {
    let profile = Profile {
        replicas,
        buckets,
        global_cap: None,
        owners: 2,
        owner_pause_ms: HOUR,
        session_ms: HOUR,
        life_ms: 24 * HOUR,
        overlap: 0,
        runs: 0,
        forgets_to_extend: 0,
        fault_ms: HOUR,
        heal_ms: HOUR,
        congestion: None,
        service_ms: 300,
        create_ms: None,
    };
    World::new(Rng::new(7), rules, profile, faults)
}

impl World {
    /// Puts `count` sandboxes into the first bucket that were leased once and never renewed.
    fn plant(&mut self, first: usize, count: usize, plant: Plant) {
        for n in first..first + count {
            let slot: SlotId = name(&format!("planted-{n}"));
            let bucket = self.owners[0].bucket.clone();
            let owner = name(&format!("{bucket}:old:{n}"));
            let (lease, template) = (name(&format!("old-{n}")), name("main"));
            let claim = Claim::Lease {
                lease,
                template,
                ttl: Some(plant.ttl),
            };
            let maker = Self::replica_name(9, 9);
            let taken = Verb::Acquire {
                slot: slot.clone(),
                bucket: bucket.clone(),
                owner,
                claim,
                maker,
            };
            let Ok(Answer::MakeSandbox { generation, .. }) = self.store_direct(taken, false) else {
                continue;
            };
            let owner = name(&format!("{bucket}:old:{n}"));
            let (create, slot_name) = (slot.clone(), slot);
            let template = name("main");
            let call = Call::Create {
                slot: create,
                bucket,
                owner,
                generation,
                template,
            };
            let Ok(Reply::Created { sandbox, .. }) = self.carry_out(&call) else {
                continue;
            };
            let ends_at = self.time(self.now_ms() + plant.life_ms);
            let now = self.now_ms();
            if let Some(here) = self.platform.here.get_mut(&sandbox) {
                here.ends_at = ends_at;
                here.paused_since = (plant.paused == Paused::Yes).then_some(now);
            }
            let bind = Verb::Bind {
                slot: slot_name,
                generation,
                sandbox,
                ends_at,
            };
            let _granted = self.store_direct(bind, false);
        }
    }

    fn planted(&self) -> usize {
        self.platform
            .here
            .values()
            .filter(|h| h.slot.as_str().starts_with("planted"))
            .count()
    }

    fn expect(&mut self, holds: bool, what: &str) {
        if !holds {
            self.checker.fail(format!("incident: {what}"));
        }
    }

    /// Runs on for `ms`.
    fn pass(&mut self, ms: u64) {
        let until = self.now_ms() + ms;
        self.run_until(until);
    }

    /// A new caller asks, and is expected to be given a sandbox within a minute.
    fn expect_a_sandbox(&mut self, what: &str) {
        let before = self.leased;
        let session = self.begin_session(0);
        self.pass(MINUTE);
        let got = self.leased > before && self.sessions[session].phase != Phase::Ended;
        self.expect(got, what);
    }
}

/// 704 sandboxes; 216 of them nobody holds. For twenty minutes every write times out while callers
/// go on asking. When writes answer again, the 216 must be gone within two cycles, with creates
/// succeeding meanwhile.
fn spiral(rules: Rules) -> Report {
    let buckets = vec![(704, Retention::Undeclared), (2000, Retention::Undeclared)];
    let mut world = quiet(rules, 3, buckets, Faults::default());
    // The budgets of three replicas, creates and deletes, fit into this.
    world.profile.congestion = Some(100);
    world.profile.service_ms = 4_000;
    let held = Plant {
        ttl: Duration::from_secs(48 * 3600),
        ..SILENT
    };
    world.plant(0, 488, held);
    world.plant(1000, 216, SILENT);
    let outage = 20 * MINUTE;
    world.outage_until = outage;
    // Callers of another bucket ask and ask.
    let bucket = world.owners[2].bucket.clone();
    for n in 0..400 {
        let id = name(&format!("{bucket}:storm:{n}"));
        let owner = crate::session::Owner {
            id,
            bucket: bucket.clone(),
            begun: 0,
        };
        world.owners.push(owner);
        let number = world.owners.len() - 1;
        world.after(n * 100, crate::world::Event::OwnerWakes(number));
    }
    world.profile.owner_pause_ms = 20 * SECOND;
    world.profile.session_ms = 2 * HOUR;
    world.run_until(outage);
    let left = world.planted();
    world.expect(left == 704, "no delete got through while writes timed out");
    let wasted = world.unanswered;
    world.expect(
        wasted < 500,
        &format!("{wasted} writes were wasted on a platform that was out"),
    );
    let leased_before = world.leased;
    let mut leased_meanwhile = 0;
    for _ in 0..120 {
        world.pass(SECOND);
        if world.planted() > 488 {
            leased_meanwhile = world.leased - leased_before;
        }
    }
    let left = world.planted();
    world.expect(
        left == 488,
        &format!("{} of 216 are left after two cycles", left.abs_diff(488)),
    );
    world.expect(
        leased_meanwhile > 0,
        "no create succeeded while the clean-up was going on",
    );
    world.report()
}

/// Callers ask and ask, and every create takes half a minute. Twenty sandboxes that nobody holds must
/// go as fast as if nobody asked: within seconds of being condemned.
fn starved_clean_up(rules: Rules) -> Report {
    let buckets = vec![(100, Retention::Undeclared), (5000, Retention::Undeclared)];
    let mut world = quiet(rules, 1, buckets, Faults::default());
    world.profile.create_ms = Some(29 * SECOND);
    let held = Plant {
        ttl: Duration::from_secs(48 * 3600),
        ..SILENT
    };
    world.plant(0, 60, held);
    world.plant(1000, 20, SILENT);
    let bucket = world.owners[2].bucket.clone();
    for n in 0..600 {
        let id = name(&format!("{bucket}:storm:{n}"));
        let owner = crate::session::Owner {
            id,
            bucket: bucket.clone(),
            begun: 0,
        };
        world.owners.push(owner);
        let number = world.owners.len() - 1;
        world.after(n * 50, crate::world::Event::OwnerWakes(number));
    }
    world.profile.owner_pause_ms = 10 * SECOND;
    world.profile.session_ms = 20 * SECOND;
    let condemned = |world: &World| {
        let mut records = world.books.records();
        records.any(|r| r.condemned.is_some() && r.slot.as_str().starts_with("planted"))
    };
    let patience = world.now_ms() + 10 * MINUTE;
    while world.planted() == 80 && !condemned(&world) && world.now_ms() < patience {
        world.pass(SECOND);
    }
    world.pass(10 * SECOND);
    let left = world.planted().abs_diff(60);
    world.expect(
        left == 0,
        &format!("{left} of 20 wait for creates to end before they may be removed"),
    );
    world.report()
}

/// 100 zombies (93 paused), a day past their end, with leases that never expire, hold the whole
/// quota of 100.
fn frozen_sweeper(rules: Rules) -> Report {
    let faults = Faults {
        refuses_paused: true,
        hides_paused: true,
        ..Faults::default()
    };
    let buckets = vec![(100, Retention::Undeclared), (1, Retention::Undeclared)];
    let mut world = quiet(rules, 2, buckets, faults);
    let overdue = Plant {
        ttl: Duration::from_secs(365 * 24 * 3600),
        life_ms: MINUTE,
        paused: Paused::Yes,
    };
    world.plant(0, 93, overdue);
    world.plant(
        93,
        7,
        Plant {
            paused: Paused::No,
            ..overdue
        },
    );
    // 30 minutes past their end, and one cycle for each halving by the blast radius.
    world.pass(MINUTE + 30 * MINUTE + 12 * MINUTE);
    let left = world.planted();
    world.expect(left == 0, &format!("{left} zombies hold the quota"));
    world.expect_a_sandbox("the quota is not free");
    world.report()
}

/// 173 paused sandboxes whose leases expired long ago, in a bucket that retains ten minutes.
fn immortal_leases(rules: Rules) -> Report {
    let faults = Faults {
        hides_paused: true,
        ..Faults::default()
    };
    let retention = Retention::After(Duration::from_secs(600));
    let mut world = quiet(rules, 2, vec![(173, retention), (1, retention)], faults);
    world.plant(
        0,
        173,
        Plant {
            paused: Paused::Yes,
            ..SILENT
        },
    );
    world.pass(9 * MINUTE);
    let left = world.planted();
    world.expect(left == 173, "what is retained was not kept");
    world.pass(20 * MINUTE);
    let left = world.planted();
    world.expect(
        left == 0,
        &format!("{left} leases of the dead count for ever"),
    );
    world.expect_a_sandbox("the quota is not free");
    world.report()
}

/// The last sandbox pauses; the listing goes from one to none; then the sandbox dies. Its slot must
/// come back although the listing stays empty.
fn self_lock(rules: Rules) -> Report {
    let faults = Faults {
        hides_paused: true,
        ..Faults::default()
    };
    let buckets = vec![(1, Retention::Undeclared), (1, Retention::Undeclared)];
    let mut world = quiet(rules, 1, buckets, faults);
    world.plant(0, 1, SILENT);
    world.pass(2 * MINUTE);
    let now = world.now_ms();
    for here in world.platform.here.values_mut() {
        here.paused_since = Some(now);
    }
    world.pass(MINUTE);
    let ids: Vec<SandboxId> = world.platform.here.keys().cloned().collect();
    for id in ids {
        world.platform.here.remove(&id);
        world.checker.died(&id);
    }
    world.pass(7 * MINUTE);
    world.expect_a_sandbox("the quota is still full of a sandbox that is gone");
    world.report()
}

/// The session is taken over; then the clean-up of the old one arrives.
fn late_clean_up(rules: Rules) -> Report {
    let buckets = vec![(2, Retention::Undeclared), (1, Retention::Undeclared)];
    let mut world = quiet(rules, 2, buckets, Faults::default());
    let old = world.begin_session(0);
    world.pass(MINUTE);
    let new = world.begin_session(0);
    world.pass(MINUTE);
    let held = match &world.sessions[new].phase {
        Phase::Holding(grant) => Some(grant.clone()),
        _ => None,
    };
    world.expect(held.is_some(), "the session was not taken over");
    world.sessions[new].exit = (crate::session::Exit::Vanish, HOUR);
    world.release(old);
    world.pass(5 * MINUTE);
    let lives = held.is_some_and(|grant| world.platform.here.contains_key(&grant.sandbox));
    world.expect(
        lives,
        "the new session was killed by the clean-up of the old one",
    );
    let holds = matches!(world.sessions[new].phase, Phase::Holding(_));
    world.expect(holds, "the new session lost its lease");
    world.report()
}

/// A platform that deletes no paused sandbox, and cannot wake them either: 435 of 500 network
/// devices are leaked. The account is released when they are overdue, and when they can be woken
/// they go.
fn undeletable(rules: Rules) -> Report {
    let faults = Faults {
        refuses_paused: true,
        wake_fails: 1000,
        ..Faults::default()
    };
    let retention = Retention::After(Duration::from_secs(60));
    let mut world = quiet(rules, 2, vec![(20, retention), (1, retention)], faults);
    world.plant(
        0,
        20,
        Plant {
            paused: Paused::Yes,
            ..SILENT
        },
    );
    world.pass(50 * MINUTE);
    let left = world.planted();
    world.expect(left == 20, "what cannot be deleted was deleted");
    world.expect_a_sandbox("the quota is held for ever by what cannot be deleted");
    world.faults.wake_fails = 0;
    world.pass(15 * MINUTE);
    let left = world.planted();
    world.expect(
        left == 0,
        &format!("{left} are not deleted although they can be woken"),
    );
    world.report()
}

/// 106 paused sandboxes that must be woken to be deleted: never more than four awake at a time.
fn wake_storm(rules: Rules) -> Report {
    let faults = Faults {
        refuses_paused: true,
        hides_paused: true,
        ..Faults::default()
    };
    let retention = Retention::After(Duration::from_secs(60));
    let mut world = quiet(rules, 3, vec![(106, retention), (1, retention)], faults);
    world.plant(
        0,
        106,
        Plant {
            paused: Paused::Yes,
            ..SILENT
        },
    );
    world.pass(90 * MINUTE);
    let left = world.planted();
    world.expect(left == 0, &format!("{left} are left"));
    world.report()
}

/// 106 paused sandboxes in a bucket that declares no retention: kept, and alarmed. When the bucket
/// declares one, they go.
fn invisible_zombies(rules: Rules) -> Report {
    let faults = Faults {
        hides_paused: true,
        ..Faults::default()
    };
    let buckets = vec![(106, Retention::Undeclared), (1, Retention::Undeclared)];
    let mut world = quiet(rules, 2, buckets, faults);
    world.plant(
        0,
        106,
        Plant {
            paused: Paused::Yes,
            ..SILENT
        },
    );
    world.pass(30 * MINUTE);
    let left = world.planted();
    world.expect(
        left == 106,
        "they were deleted although nobody declared that they may be",
    );
    let told: BTreeMap<_, _> = world.alarms().clone();
    world.expect(
        told.contains_key("zombies-kept"),
        "nobody was told of the zombies",
    );
    world.expect(
        told.contains_key("quota-idle"),
        "nobody was told of the full quota",
    );
    let bucket = world.owners[0].bucket.clone();
    let retention = Retention::After(Duration::from_secs(600));
    let policy = BucketPolicy::new(106, retention);
    let declared = Verb::SetBucket {
        bucket: bucket.clone(),
        policy,
    };
    let _done = world.store_direct(declared, false);
    world.declare(bucket, (106, retention));
    world.pass(20 * MINUTE);
    let left = world.planted();
    world.expect(
        left == 0,
        &format!("{left} are left although a retention is declared"),
    );
    world.report()
}
