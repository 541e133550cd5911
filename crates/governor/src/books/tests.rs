//! The verbs, told as the requirements tell them.

use std::time::Duration;

use proptest::prelude::*;
use sandhold_types::{Generation, SandboxId, Timestamp};

use super::*;
use crate::{
    colour::{Colour, Retention, Seen},
    ids::{ReplicaId, RunId},
    record::Ground,
};

fn at(s: u64) -> Timestamp {
    Timestamp::from_unix_ms(1_000_000_000 + s * 1000)
}

fn bucket(name: &str) -> Bucket {
    Bucket {
        namespace: name.parse().unwrap(),
        env: "prod".parse().unwrap(),
    }
}

fn sandbox(n: u64) -> SandboxId {
    format!("{n:020}").parse().unwrap()
}

fn replica(name: &str) -> ReplicaId {
    name.parse().unwrap()
}

/// Books with buckets `a` and `b`, and short ways to use them.
struct World {
    books: Books,
    audit: Vec<Audit>,
}

impl World {
    fn new(quota: u32, retention: Retention, global_cap: Option<u32>) -> Self {
        let mut books = Books::new(Rules::default(), global_cap);
        for name in ["a", "b"] {
            let policy = BucketPolicy::new(quota, retention);
            books.step(
                Verb::SetBucket {
                    bucket: bucket(name),
                    policy,
                },
                at(0),
            );
        }
        Self {
            books,
            audit: Vec::new(),
        }
    }

    fn step(&mut self, verb: Verb, s: u64) -> Answer {
        let step = self.books.step(verb, at(s));
        self.audit.extend(step.audit);
        step.answer
    }

    fn acquire_in(&mut self, name: &str, slot: &str, owner: &str, lease: &str, s: u64) -> Answer {
        let claim = Claim::Lease {
            lease: lease.parse().unwrap(),
            template: "main".parse().unwrap(),
            ttl: None,
        };
        let verb = Verb::Acquire {
            slot: slot.parse().unwrap(),
            bucket: bucket(name),
            owner: owner.parse().unwrap(),
            claim,
            maker: replica("r1"),
        };
        self.step(verb, s)
    }

    fn acquire(&mut self, slot: &str, owner: &str, lease: &str, s: u64) -> Answer {
        self.acquire_in("a", slot, owner, lease, s)
    }

    /// Acquires and binds sandbox `n`.
    fn make(&mut self, n: u64, owner: &str, lease: &str, s: u64) -> Grant {
        let slot = format!("s{n}");
        let answer = self.acquire(&slot, owner, lease, s);
        assert!(matches!(answer, Answer::MakeSandbox { .. }), "{answer:?}");
        self.bind(&slot, n, s)
    }

    fn generation_of(&self, slot: &SlotId) -> Generation {
        self.books
            .records
            .get(slot)
            .map_or(Generation(0), |r| r.generation)
    }

    fn bind(&mut self, slot: &str, n: u64, s: u64) -> Grant {
        let slot = slot.parse().unwrap();
        let generation = self.generation_of(&slot);
        let verb = Verb::Bind {
            slot,
            generation,
            sandbox: sandbox(n),
            ends_at: at(100_000),
        };
        match self.step(verb, s) {
            Answer::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    fn beat(&mut self, owner: &str, lease: &str, generation: Generation, s: u64) -> Answer {
        let (owner, lease) = (owner.parse().unwrap(), lease.parse().unwrap());
        self.step(
            Verb::Heartbeat {
                bucket: bucket("a"),
                owner,
                lease,
                generation,
                ends_at: None,
            },
            s,
        )
    }

    fn release(&mut self, owner: &str, lease: &str, s: u64) -> Answer {
        let (owner, lease) = (owner.parse().unwrap(), lease.parse().unwrap());
        self.step(
            Verb::Release {
                bucket: bucket("a"),
                owner,
                lease,
            },
            s,
        )
    }

    fn remove(
        &mut self,
        n: u64,
        generation: Generation,
        ground: Ground,
        seen: Seen,
        s: u64,
    ) -> Answer {
        let slot = format!("s{n}").parse().unwrap();
        self.step(
            Verb::BeginRemoval {
                slot,
                generation,
                by: replica("r1"),
                ground,
                seen,
            },
            s,
        )
    }

    fn gone(&mut self, n: u64, evidence: GoneEvidence, s: u64) -> Answer {
        let slot = format!("s{n}").parse().unwrap();
        self.step(
            Verb::ConfirmGone {
                slot,
                sandbox: sandbox(n),
                evidence,
            },
            s,
        )
    }
}

fn strict(quota: u32) -> World {
    World::new(quota, Retention::Undeclared, None)
}

// --- Admission -----------------------------------------------------------------------------

#[test]
fn a_full_bucket_waits_thirty_seconds_and_is_told() {
    // R-G4
    let mut world = strict(1);
    world.make(1, "o1", "l1", 0);
    for s in 0..30 {
        assert_eq!(
            world.acquire("s2", "o2", "l2", s),
            Answer::Waiting { ahead: 0 }
        );
    }
    let told = world.acquire("s2", "o2", "l2", 30);
    assert_eq!(told, Answer::CapacityExceeded(Limit::Bucket));
    assert!(
        world.books.waiting().is_empty(),
        "refused means: nothing is left of it"
    );
}

#[test]
fn first_come_first_served_within_a_bucket() {
    // R-G4
    let mut world = strict(1);
    let first = world.make(1, "o1", "l1", 0);
    assert_eq!(
        world.acquire("s2", "o2", "l2", 1),
        Answer::Waiting { ahead: 0 }
    );
    assert_eq!(
        world.acquire("s3", "o3", "l3", 2),
        Answer::Waiting { ahead: 1 }
    );
    world.release("o1", "l1", 3);
    assert_eq!(
        world.acquire("s2", "o2", "l2", 3),
        Answer::Waiting { ahead: 0 },
        "not gone yet"
    );
    assert_eq!(world.gone(1, GoneEvidence::Killed, 4), Answer::Done);
    assert_eq!(first.slot.as_str(), "s1");
    assert_eq!(
        world.acquire("s3", "o3", "l3", 4),
        Answer::Waiting { ahead: 1 }
    );
    let taken = world.acquire("s2", "o2", "l2", 4);
    assert!(matches!(taken, Answer::MakeSandbox { .. }), "{taken:?}");
}

#[test]
fn a_waiter_that_is_not_heard_holds_nobody_up() {
    // R-G4, R-G15
    let mut world = strict(1);
    world.make(1, "o1", "l1", 0);
    world.acquire("dead", "o2", "l2", 1);
    world.acquire("s3", "o3", "l3", 2);
    world.release("o1", "l1", 3);
    world.gone(1, GoneEvidence::Killed, 3);
    assert_eq!(
        world.acquire("s3", "o3", "l3", 4),
        Answer::Waiting { ahead: 1 }
    );
    let taken = world.acquire("s3", "o3", "l3", 6);
    assert!(matches!(taken, Answer::MakeSandbox { .. }), "{taken:?}");
}

#[test]
fn a_silence_that_nobody_used_costs_no_place() {
    // R-G4
    let mut world = strict(1);
    world.make(1, "o1", "l1", 0);
    world.acquire("s2", "o2", "l2", 1);
    world.acquire("s3", "o3", "l3", 4);
    assert_eq!(
        world.acquire("s2", "o2", "l2", 7),
        Answer::Waiting { ahead: 0 },
        "silent for six seconds, and nobody came meanwhile"
    );
    assert_eq!(
        world.acquire("s3", "o3", "l3", 8),
        Answer::Waiting { ahead: 1 }
    );
    world.acquire("s3", "o3", "l3", 12);
    assert_eq!(
        world.acquire("s2", "o2", "l2", 13),
        Answer::Waiting { ahead: 1 },
        "s3 came when s2 was silent for five"
    );
}

#[test]
fn the_global_gate_serves_buckets_in_one_order_and_full_ones_block_nobody() {
    // R-G4
    let mut world = World::new(2, Retention::Undeclared, Some(3));
    world.make(1, "o1", "l1", 0);
    world.make(2, "o2", "l2", 0);
    // Bucket a is full: its waiter does not stand in the way of bucket b.
    assert_eq!(
        world.acquire("s3", "o3", "l3", 1),
        Answer::Waiting { ahead: 0 }
    );
    let taken = world.acquire_in("b", "t1", "p1", "m1", 1);
    assert!(matches!(taken, Answer::MakeSandbox { .. }), "{taken:?}");
    // The cap is reached: now the oldest that its own bucket would admit comes first.
    assert_eq!(
        world.acquire_in("b", "t2", "p2", "m2", 2),
        Answer::Waiting { ahead: 0 }
    );
    world.release("o1", "l1", 3);
    world.gone(1, GoneEvidence::Killed, 3);
    assert_eq!(
        world.acquire_in("b", "t2", "p2", "m2", 3),
        Answer::Waiting { ahead: 0 }
    );
    let taken = world.acquire("s3", "o3", "l3", 3);
    assert!(matches!(taken, Answer::MakeSandbox { .. }), "{taken:?}");
}

#[test]
fn the_same_request_again_is_the_same_slot() {
    // safety.md B8: the reply was lost.
    let mut world = strict(1);
    let first = world.acquire("s1", "o1", "l1", 0);
    assert_eq!(world.acquire("s1", "o1", "l1", 1), first);
    assert_eq!(world.books.used(&bucket("a")), 1);
}

#[test]
fn an_unknown_bucket_takes_nothing() {
    // R-G4
    let mut world = strict(1);
    assert_eq!(
        world.acquire_in("nobody", "s1", "o1", "l1", 0),
        Answer::UnknownBucket
    );
    assert_eq!(world.books.records().count(), 0);
}

#[test]
fn a_failed_create_gives_its_slot_back_at_once_and_only_its_maker_can() {
    // R-G5
    let mut world = strict(1);
    world.acquire("s1", "o1", "l1", 0);
    let give_back = |maker: &str| Verb::ReturnSlot {
        slot: "s1".parse().unwrap(),
        maker: replica(maker),
    };
    assert_eq!(world.step(give_back("r2"), 1), Answer::Unknown);
    assert_eq!(world.step(give_back("r1"), 1), Answer::Done);
    assert_eq!(world.books.used(&bucket("a")), 0);
    let again = world.acquire("s2", "o1", "l1", 2);
    assert!(
        matches!(again, Answer::MakeSandbox { .. }),
        "the lease may ask again: {again:?}"
    );
}

#[test]
fn a_paused_sandbox_keeps_its_slot_and_a_condemned_one_too() {
    // R-G5
    let mut world = strict(1);
    let grant = world.make(1, "o1", "l1", 0);
    let slot = grant.slot;
    world.step(
        Verb::NoteSeen {
            slot,
            seen: Seen::Paused,
        },
        1,
    );
    assert_eq!(world.books.used(&bucket("a")), 1);
    world.release("o1", "l1", 2);
    assert_eq!(world.books.used(&bucket("a")), 1);
    world.gone(1, GoneEvidence::Killed, 3);
    assert_eq!(world.books.used(&bucket("a")), 0);
}

// --- Leases --------------------------------------------------------------------------------

#[test]
fn the_same_lease_renews_and_a_new_one_takes_over() {
    // R-G6
    let mut world = strict(2);
    let first = world.make(1, "o1", "l1", 0);
    let Answer::Granted(renewed) = world.acquire("x", "o1", "l1", 10) else {
        panic!()
    };
    assert_eq!(
        (renewed.generation, &renewed.sandbox),
        (first.generation, &sandbox(1))
    );
    assert_eq!(renewed.expires_at, at(10).plus(Duration::from_secs(120)));
    let Answer::Granted(second) = world.acquire("y", "o1", "l2", 20) else {
        panic!()
    };
    assert_eq!(second.sandbox, sandbox(1), "the same sandbox");
    assert!(second.generation > first.generation, "the token only grows");
    let current = Some(second.generation);
    assert_eq!(
        world.beat("o1", "l1", first.generation, 21),
        Answer::Stale { current }
    );
    assert_eq!(
        world.acquire("z", "o1", "l1", 22),
        Answer::Stale { current },
        "sealed for ever"
    );
}

#[test]
fn the_late_clean_up_of_an_old_generation_has_no_effect() {
    // R-I5, R-G7
    let mut world = strict(1);
    world.make(1, "o1", "old", 0);
    let Answer::Granted(new) = world.acquire("x", "o1", "new", 10) else {
        panic!()
    };
    let current = Some(new.generation);
    assert_eq!(world.release("o1", "old", 11), Answer::Stale { current });
    assert!(matches!(
        world.beat("o1", "new", new.generation, 12),
        Answer::Granted(_)
    ));
    assert!(world.books.records().all(|r| r.condemned.is_none()));
}

#[test]
fn a_release_that_names_no_generation_seals_that_name_only() {
    // R-G7: it never falls back to the current one.
    let mut world = strict(1);
    let grant = world.make(1, "o1", "l1", 0);
    let current = Some(grant.generation);
    assert_eq!(world.release("o1", "never", 1), Answer::Stale { current });
    assert_eq!(
        world.acquire("x", "o1", "never", 2),
        Answer::Stale { current }
    );
    assert!(matches!(
        world.release("o1", "l1", 3),
        Answer::Released { slot: Some(_) }
    ));
    assert_eq!(
        world.release("o1", "l1", 4),
        Answer::Released { slot: None },
        "said again"
    );
}

#[test]
fn generations_never_repeat_even_if_the_record_is_gone_or_the_store_lost_it() {
    // R-G6, safety.md B1, B9
    let mut world = strict(1);
    let first = world.make(1, "o1", "l1", 0);
    let backup = World {
        books: world.books.clone(),
        audit: Vec::new(),
    };
    world.release("o1", "l1", 1);
    world.gone(1, GoneEvidence::Killed, 1);
    let second = world.make(2, "o1", "l2", 2);
    assert!(second.generation > first.generation);
    // The store is restored from a backup; its clock has moved on.
    let mut restored = backup;
    restored.books.begin_recovery(at(10));
    assert_eq!(restored.acquire("s3", "o1", "l3", 11), Answer::Recovering);
    let note = Verb::NoteSeen {
        slot: "s1".parse().unwrap(),
        seen: Seen::Running,
    };
    restored.step(note, 200);
    // A node has seen a generation from a clock far ahead.
    let highest = Generation(at(5_000).unix_ms());
    let finish = Verb::FinishRecovery {
        highest,
        settled_from: at(200),
    };
    assert_eq!(restored.step(finish, 201), Answer::Done);
    let Answer::Granted(third) = restored.acquire("x", "o1", "l3", 202) else {
        panic!()
    };
    assert!(third.generation > highest && third.generation > second.generation);
}

#[test]
fn lost_writes_are_settled_before_anybody_new_is_admitted() {
    // Issue 5: a failover that lost writes.
    let mut world = strict(2);
    let grant = world.make(1, "o1", "l1", 0);
    world.books.begin_recovery(at(10));
    let finish = |from: u64| Verb::FinishRecovery {
        highest: Generation(0),
        settled_from: at(from),
    };
    assert_eq!(world.acquire("s2", "o2", "l2", 11), Answer::Recovering);
    assert_eq!(
        world.acquire("x", "o1", "l9", 11),
        Answer::Recovering,
        "no takeover either"
    );
    assert!(matches!(
        world.beat("o1", "l1", grant.generation, 12),
        Answer::Granted(_)
    ));
    assert_eq!(world.step(finish(100), 100), Answer::Recovering, "too soon");
    assert_eq!(
        world.step(finish(195), 195),
        Answer::Recovering,
        "not every sandbox is settled"
    );
    let note = Verb::NoteSeen {
        slot: grant.slot,
        seen: Seen::Running,
    };
    world.step(note, 196);
    assert_eq!(world.step(finish(195), 197), Answer::Done);
    assert!(matches!(
        world.acquire("s2", "o2", "l2", 198),
        Answer::MakeSandbox { .. }
    ));
}

#[test]
fn a_binding_said_again_is_not_given_the_grant_of_who_took_over() {
    // safety.md B8; found by the simulator.
    let mut world = strict(1);
    let first = world.make(1, "o1", "l1", 0);
    let Answer::Granted(second) = world.acquire("x", "o1", "l2", 1) else {
        panic!()
    };
    let again = Verb::Bind {
        slot: first.slot,
        generation: first.generation,
        sandbox: sandbox(1),
        ends_at: at(100_000),
    };
    let current = Some(second.generation);
    assert_eq!(world.step(again, 2), Answer::Stale { current });
}

#[test]
fn another_template_replaces_the_sandbox() {
    // R-G6: a compatible template is a condition of reuse.
    let mut world = strict(2);
    world.make(1, "o1", "l1", 0);
    let claim = Claim::Lease {
        lease: "l2".parse().unwrap(),
        template: "light".parse().unwrap(),
        ttl: None,
    };
    let verb = Verb::Acquire {
        slot: "s2".parse().unwrap(),
        bucket: bucket("a"),
        owner: "o1".parse().unwrap(),
        claim,
        maker: replica("r1"),
    };
    assert!(matches!(world.step(verb, 1), Answer::MakeSandbox { .. }));
    let old = world
        .books
        .records()
        .find(|r| r.slot.as_str() == "s1")
        .unwrap();
    assert_eq!(old.condemned.as_ref().unwrap().ground, Ground::Replaced);
    assert_eq!(
        world.books.used(&bucket("a")),
        2,
        "the old one counts until it is gone"
    );
}

#[test]
fn an_unfit_sandbox_is_discarded_and_its_lease_asks_again() {
    // R-G9
    let mut world = strict(2);
    let grant = world.make(1, "o1", "l1", 0);
    let discard = Verb::Discard {
        slot: grant.slot,
        generation: grant.generation,
    };
    assert_eq!(world.step(discard, 1), Answer::Done);
    assert!(matches!(
        world.acquire("s2", "o1", "l1", 2),
        Answer::MakeSandbox { .. }
    ));
}

// --- Roots and removal ---------------------------------------------------------------------

#[test]
fn nothing_held_is_condemned_and_the_check_is_one_step_with_the_act() {
    // R-G10: 120 s black, 180 s grey.
    let ages = [
        (0, Some(Colour::Black)),
        (119, Some(Colour::Black)),
        (120, Some(Colour::Grey)),
    ];
    for (age, colour) in ages
        .into_iter()
        .chain([(179, Some(Colour::Grey)), (180, None)])
    {
        let mut world = strict(1);
        let grant = world.make(1, "o1", "l1", 0);
        let answer = world.remove(1, grant.generation, Ground::White, Seen::Running, age);
        match colour {
            Some(held) => assert_eq!(answer, Answer::Refused(RemovalRefused::Held(held)), "{age}"),
            None => assert!(matches!(answer, Answer::Remove { .. }), "{age}: {answer:?}"),
        }
    }
}

#[test]
fn a_decision_about_one_generation_is_not_carried_out_on_the_next() {
    // R-G10
    let mut world = strict(1);
    let old = world.make(1, "o1", "l1", 0);
    world.acquire("x", "o1", "l2", 10);
    let answer = world.remove(1, old.generation, Ground::White, Seen::Running, 1_000);
    assert_eq!(answer, Answer::Refused(RemovalRefused::GenerationChanged));
}

#[test]
fn runs_and_locks_are_roots_like_leases() {
    // R-G10
    let mut world = strict(1);
    let grant = world.make(1, "o1", "l1", 0);
    let slot = grant.slot.clone();
    let lock = Verb::Lock {
        slot: slot.clone(),
        by: replica("r2"),
    };
    assert_eq!(world.step(lock.clone(), 100), Answer::Done);
    assert_eq!(
        world.remove(1, grant.generation, Ground::White, Seen::Running, 200),
        Answer::Refused(RemovalRefused::Held(Colour::Black))
    );
    let other = Verb::Lock {
        slot: slot.clone(),
        by: replica("r3"),
    };
    assert_eq!(world.step(other, 100), Answer::Busy);
    let (run, generation) = ("run".parse().unwrap(), grant.generation);
    let begin = Verb::BeginRun {
        slot,
        generation,
        run,
        replica: replica("r2"),
    };
    assert_eq!(
        world.step(begin, 290),
        Answer::RunGoesOn { cancelled: false }
    );
    assert_eq!(
        world.remove(1, generation, Ground::White, Seen::Running, 400),
        Answer::Refused(RemovalRefused::Held(Colour::Black))
    );
}

#[test]
fn condemned_is_for_good() {
    // A delete without an answer may land much later; it must find nobody.
    let mut world = strict(2);
    let grant = world.make(1, "o1", "l1", 0);
    world.remove(1, grant.generation, Ground::White, Seen::Running, 200);
    let failed = Verb::RemovalFailed {
        slot: grant.slot.clone(),
        by: replica("r1"),
        awake: false,
    };
    world.step(failed, 210);
    assert!(matches!(
        world.beat("o1", "l1", grant.generation, 211),
        Answer::Stale { .. }
    ));
    assert!(matches!(
        world.acquire("x", "o1", "l1", 212),
        Answer::Stale { .. }
    ));
    let fresh = world.acquire("s2", "o1", "l2", 213);
    assert!(
        matches!(fresh, Answer::MakeSandbox { .. }),
        "never the condemned one: {fresh:?}"
    );
    let lock = Verb::Lock {
        slot: grant.slot,
        by: replica("r2"),
    };
    assert_eq!(world.step(lock, 214), Answer::Unknown);
}

#[test]
fn a_slot_is_freed_only_by_proof() {
    // R-G5, R-G10
    let mut world = strict(1);
    let grant = world.make(1, "o1", "l1", 0);
    let refused = Answer::Refused(RemovalRefused::NoGround);
    assert_eq!(
        world.gone(1, GoneEvidence::Killed, 1),
        refused,
        "nobody decided that"
    );
    let other = Verb::ConfirmGone {
        slot: grant.slot,
        sandbox: sandbox(2),
        evidence: GoneEvidence::NotFound,
    };
    assert_eq!(
        world.step(other, 1),
        Answer::Unknown,
        "another sandbox proves nothing"
    );
    assert_eq!(
        world.gone(1, GoneEvidence::NotFound, 2),
        Answer::Done,
        "it died by itself"
    );
    assert!(matches!(
        world.beat("o1", "l1", grant.generation, 3),
        Answer::Stale { .. }
    ));
}

#[test]
fn a_paused_sandbox_of_a_silent_lease_is_kept_as_its_bucket_declares() {
    // R-G13, R-I3, R-I8
    let hour = Retention::After(Duration::from_secs(3600));
    for (retention, s, removed) in [
        (Retention::Undeclared, 90_000, false),
        (hour, 3_000, false),
        (hour, 3_700, true),
    ] {
        let mut world = World::new(1, retention, None);
        let grant = world.make(1, "o1", "l1", 0);
        world.step(
            Verb::NoteSeen {
                slot: grant.slot,
                seen: Seen::Paused,
            },
            60,
        );
        let answer = world.remove(1, grant.generation, Ground::Retention, Seen::Paused, s);
        assert_eq!(
            matches!(answer, Answer::Remove { .. }),
            removed,
            "{retention:?} {s}"
        );
        let white = world.remove(1, grant.generation, Ground::White, Seen::Paused, s);
        assert_eq!(
            matches!(white, Answer::Remove { .. }),
            removed,
            "never by being white"
        );
    }
}

#[test]
fn a_pause_that_was_seen_before_its_holder_was_heard_proves_nothing() {
    // R-G13: whoever held it may have woken it since, and nobody looked.
    let hour = Retention::After(Duration::from_secs(3600));
    let mut world = World::new(1, hour, None);
    let grant = world.make(1, "o1", "l1", 0);
    let paused = Verb::NoteSeen {
        slot: grant.slot.clone(),
        seen: Seen::Paused,
    };
    world.step(paused.clone(), 60);
    world.beat("o1", "l1", grant.generation, 90);
    let remove = |world: &mut World, s| {
        world.remove(1, grant.generation, Ground::Retention, Seen::Paused, s)
    };
    let kept = Answer::Refused(RemovalRefused::NoGround);
    assert_eq!(remove(&mut world, 5_000), kept, "not seen paused since");
    world.step(paused.clone(), 5_000);
    world.step(paused, 7_000);
    assert_eq!(remove(&mut world, 8_600), kept);
    let removed = remove(&mut world, 8_601);
    assert!(matches!(removed, Answer::Remove { .. }), "{removed:?}");
}

#[test]
fn long_past_its_end_it_goes_whoever_holds_it_and_its_account_is_released() {
    // R-G12, R-I2
    let mut world = strict(1);
    let grant = world.make(1, "o1", "l1", 0);
    world.beat("o1", "l1", grant.generation, 101_799);
    let held = world.remove(1, grant.generation, Ground::Overdue, Seen::Unknown, 101_800);
    assert!(matches!(held, Answer::Refused(_)), "{held:?}");
    let due = world.remove(1, grant.generation, Ground::Overdue, Seen::Unknown, 101_801);
    assert!(matches!(due, Answer::Remove { .. }), "{due:?}");
    assert_eq!(
        world.books.used(&bucket("a")),
        1,
        "the best effort comes first"
    );
    let failed = Verb::RemovalFailed {
        slot: grant.slot,
        by: replica("r1"),
        awake: false,
    };
    world.step(failed, 101_830);
    assert_eq!(world.books.used(&bucket("a")), 0);
    assert_eq!(
        world.books.records().count(),
        1,
        "it is still known, and still removed"
    );
}

#[test]
fn only_so_many_are_awake_to_be_deleted() {
    // R-I7
    let mut world = strict(10);
    for n in 1..=6 {
        world.make(n, &format!("o{n}"), "l", 0);
        world.release(&format!("o{n}"), "l", 1);
    }
    let mut wake = |n: u64| {
        world.step(
            Verb::BeginWake {
                slot: format!("s{n}").parse().unwrap(),
            },
            2,
        )
    };
    let answers: Vec<Answer> = (1..=6).map(&mut wake).collect();
    assert_eq!(answers.iter().filter(|a| **a == Answer::Wake).count(), 4);
    assert_eq!(wake(1), Answer::Wake, "the same one again is not another");
    assert_eq!(wake(6), Answer::NoWakeBudget);
}

#[test]
fn a_create_in_doubt_keeps_its_slot_until_it_is_settled() {
    // R-G5
    let mut world = strict(1);
    world.acquire("s1", "o1", "l1", 0);
    let expire = Verb::ExpireMaking {
        slot: "s1".parse().unwrap(),
    };
    let held = Answer::Refused(RemovalRefused::Held(Colour::Grey));
    assert_eq!(world.step(expire.clone(), 179), held);
    assert_eq!(world.step(expire, 180), Answer::Done);
    assert_eq!(world.books.used(&bucket("a")), 0);
}

#[test]
fn a_stray_gets_a_record_and_no_root() {
    // R-G5, R-G11
    let mut world = strict(1);
    let adopt = Verb::AdoptStray {
        slot: "lost".parse().unwrap(),
        sandbox: sandbox(9),
        bucket: bucket("a"),
        owner: "o9".parse().unwrap(),
        ends_at: at(1000),
    };
    assert_eq!(world.step(adopt, 0), Answer::Done);
    let record = world.books.records().next().unwrap();
    let verdict = crate::colour::verdict(
        record,
        Seen::Running,
        Retention::Undeclared,
        &Rules::default(),
        at(1),
    );
    assert_eq!(
        (verdict.colour, verdict.ground),
        (Colour::White, Some(Ground::White))
    );
    assert!(record.is_counted());
}

#[test]
fn a_direct_sandbox_is_counted_and_left_to_its_own_lifetime() {
    // R-G19
    let mut world = strict(1);
    let slot: SlotId = "s1".parse().unwrap();
    let verb = Verb::Acquire {
        slot: slot.clone(),
        bucket: bucket("a"),
        owner: bucket("a").owner_of_direct("x").unwrap(),
        claim: Claim::Direct,
        maker: replica("r1"),
    };
    assert!(matches!(world.step(verb, 0), Answer::MakeSandbox { .. }));
    let generation = world.generation_of(&slot);
    let bind = Verb::Bind {
        slot,
        generation,
        sandbox: sandbox(1),
        ends_at: at(1000),
    };
    assert_eq!(world.step(bind, 1), Answer::Done);
    assert_eq!(world.books.used(&bucket("a")), 1);
    let generation = world.books.records().next().unwrap().generation;
    for s in [500, 2_000] {
        let swept = world.remove(1, generation, Ground::White, Seen::Running, s);
        assert!(matches!(swept, Answer::Refused(_)), "{s}: {swept:?}");
    }
    let overdue = world.remove(1, generation, Ground::Overdue, Seen::Running, 2_801);
    assert!(matches!(overdue, Answer::Remove { .. }), "{overdue:?}");
}

#[test]
fn a_run_of_a_silent_replica_is_taken_over_and_the_first_is_told() {
    // R-G3, R-G15
    let mut world = strict(1);
    let grant = world.make(1, "o1", "l1", 0);
    let (slot, generation) = (grant.slot, grant.generation);
    let run: RunId = "run".parse().unwrap();
    let begin = |r: &str| Verb::BeginRun {
        slot: slot.clone(),
        generation,
        run: run.clone(),
        replica: replica(r),
    };
    let claim = || Verb::ClaimRun {
        slot: slot.clone(),
        run: run.clone(),
        replica: replica("r2"),
    };
    let beat = |r: &str| Verb::RunHeartbeat {
        slot: slot.clone(),
        generation,
        run: run.clone(),
        replica: replica(r),
    };
    let goes_on = Answer::RunGoesOn { cancelled: false };
    assert_eq!(world.step(begin("r1"), 0), goes_on);
    assert_eq!(world.step(begin("r1"), 0), goes_on, "said again");
    assert_eq!(world.step(claim(), 119), Answer::Busy);
    assert_eq!(world.step(claim(), 120), goes_on);
    assert_eq!(world.step(beat("r1"), 121), Answer::Busy, "it stops");
    assert_eq!(world.step(beat("r2"), 121), goes_on);
    let cancel = Verb::CancelRun {
        slot: slot.clone(),
        run: run.clone(),
    };
    world.step(cancel, 122);
    assert_eq!(
        world.step(beat("r2"), 123),
        Answer::RunGoesOn { cancelled: true }
    );
    let end = |r: &str, keep| Verb::EndRun {
        slot: slot.clone(),
        run: run.clone(),
        replica: replica(r),
        keep,
    };
    assert_eq!(world.step(end("r1", Keep::Nothing), 124), Answer::Unknown);
    let ended = world.step(end("r2", Keep::Nothing), 125);
    assert!(
        matches!(ended, Answer::Released { slot: Some(_) }),
        "{ended:?}"
    );
}

#[test]
fn reading_and_seeing_renew_nothing() {
    // R-G10: zero renewals by a scan.
    let mut world = strict(1);
    let grant = world.make(1, "o1", "l1", 0);
    let beats = |world: &World| -> Vec<Timestamp> {
        world
            .books
            .records()
            .filter_map(|r| r.holding.as_ref())
            .map(|h| h.heartbeat_at)
            .collect()
    };
    let before = beats(&world);
    world.step(Verb::Read, 50);
    for seen in [Seen::Running, Seen::Paused, Seen::Unknown] {
        world.step(
            Verb::NoteSeen {
                slot: grant.slot.clone(),
                seen,
            },
            60,
        );
    }
    assert_eq!(beats(&world), before);
}

// --- Any history -----------------------------------------------------------------------------

#[derive(Debug, Clone)]
enum Move {
    Acquire(u8, u8, u8),
    Bind(u8),
    Beat(u8, u8),
    Release(u8, u8),
    Remove(u8, bool),
    Gone(u8, bool),
    Fail(u8),
    Return(u8),
    Expire(u8),
    Recover,
}

fn any_move() -> impl Strategy<Value = (Move, u64)> {
    let pick = prop_oneof![
        (0..6u8, 0..3u8, 0..4u8).prop_map(|(s, o, l)| Move::Acquire(s, o, l)),
        (0..6u8).prop_map(Move::Bind),
        (0..3u8, 0..4u8).prop_map(|(o, l)| Move::Beat(o, l)),
        (0..3u8, 0..4u8).prop_map(|(o, l)| Move::Release(o, l)),
        (0..6u8, any::<bool>()).prop_map(|(s, p)| Move::Remove(s, p)),
        (0..6u8, any::<bool>()).prop_map(|(s, k)| Move::Gone(s, k)),
        (0..6u8).prop_map(Move::Fail),
        (0..6u8).prop_map(Move::Return),
        (0..6u8).prop_map(Move::Expire),
        Just(Move::Recover),
    ];
    (pick, prop_oneof![0..5u64, 30..90u64, 100..200u64])
}

impl World {
    fn play(&mut self, mv: &Move, s: u64) {
        let slot = |n: u8| -> SlotId { format!("s{n}").parse().unwrap() };
        match *mv {
            Move::Acquire(n, o, l) => {
                self.acquire(slot(n).as_str(), &format!("o{o}"), &format!("l{l}"), s);
            }
            Move::Bind(n) => {
                let sandbox = sandbox(u64::from(n) + 1000 * s);
                let generation = self.generation_of(&slot(n));
                self.step(
                    Verb::Bind {
                        slot: slot(n),
                        generation,
                        sandbox,
                        ends_at: at(s + 500),
                    },
                    s,
                );
            }
            Move::Beat(o, l) => {
                let key = (bucket("a"), format!("o{o}").parse().unwrap());
                let line = self
                    .books
                    .lines
                    .get(&key)
                    .and_then(|line| line.current.clone());
                let record = line.and_then(|slot| self.books.records.get(&slot));
                let generation = record.map_or(Generation(0), |r| r.generation);
                self.beat(&format!("o{o}"), &format!("l{l}"), generation, s);
            }
            Move::Release(o, l) => {
                self.release(&format!("o{o}"), &format!("l{l}"), s);
            }
            Move::Remove(n, paused) => {
                let seen = if paused { Seen::Paused } else { Seen::Running };
                let generation = self
                    .books
                    .records
                    .get(&slot(n))
                    .map_or(Generation(0), |r| r.generation);
                self.remove(u64::from(n), generation, Ground::White, seen, s);
            }
            Move::Gone(n, killed) => {
                let bound = self
                    .books
                    .records
                    .get(&slot(n))
                    .and_then(|r| r.sandbox.clone());
                let evidence = if killed {
                    GoneEvidence::Killed
                } else {
                    GoneEvidence::NotFound
                };
                if let Some(sandbox) = bound {
                    self.step(
                        Verb::ConfirmGone {
                            slot: slot(n),
                            sandbox,
                            evidence,
                        },
                        s,
                    );
                }
            }
            Move::Fail(n) => {
                let (slot, by) = (slot(n), replica("r1"));
                self.step(
                    Verb::RemovalFailed {
                        slot,
                        by,
                        awake: false,
                    },
                    s,
                );
            }
            Move::Return(n) => {
                self.step(
                    Verb::ReturnSlot {
                        slot: slot(n),
                        maker: replica("r1"),
                    },
                    s,
                );
            }
            Move::Expire(n) => {
                self.step(Verb::ExpireMaking { slot: slot(n) }, s);
            }
            Move::Recover => self.books.begin_recovery(at(s)),
        }
    }
}

proptest! {
    /// A1, L2, L4 and G4 of the safety notes, over any history.
    #[test]
    fn the_invariants_of_the_books_hold_in_any_history(
        moves in proptest::collection::vec(any_move(), 1..80),
    ) {
        let mut world = strict(2);
        let mut s = 0;
        for (mv, later) in &moves {
            s += later;
            let granted_before = granted(&world.audit);
            world.play(mv, s);
            prop_assert!(world.books.used(&bucket("a")) <= 2, "never oversold");
            for (line_key, line) in world.books.lines.entries() {
                let current = line.current.as_ref().and_then(|slot| world.books.records.get(slot));
                if let Some(record) = current {
                    prop_assert!(record.condemned.is_none(), "condemned is for good");
                    prop_assert_eq!(&record.owner, &line_key.1);
                    let lease = &record.holding.as_ref().unwrap().lease;
                    prop_assert!(!line.sealed.iter().any(|x| x.lease == *lease), "sealed acts");
                }
            }
            let granted_now = granted(&world.audit);
            let newest = granted_before.iter().max().copied().unwrap_or(Generation(0));
            for generation in &granted_now[granted_before.len()..] {
                prop_assert!(*generation > newest, "generations only grow");
            }
        }
    }
}

fn granted(audit: &[Audit]) -> Vec<Generation> {
    let grants = audit
        .iter()
        .filter(|a| matches!(a.what, Act::Granted { .. }));
    grants.map(|a| a.generation).collect()
}

#[test]
fn a_direct_sandbox_is_named_and_its_lifetime_follows_its_owner() {
    // R-G19
    let mut world = World::new(1, Retention::Undeclared, None);
    let ask = Verb::Acquire {
        slot: "s1".parse().unwrap(),
        bucket: bucket("a"),
        owner: bucket("a").owner_of_direct("s1").unwrap(),
        claim: Claim::Direct,
        maker: replica("r1"),
    };
    let Answer::MakeSandbox { generation, .. } = world.step(ask, 0) else {
        panic!("no slot");
    };
    let bind = |ends_at| Verb::Bind {
        slot: "s1".parse().unwrap(),
        generation,
        sandbox: sandbox(7),
        ends_at,
    };
    assert_eq!(world.step(bind(at(60)), 1), Answer::Done);
    assert_eq!(
        world.step(bind(at(9_000)), 50),
        Answer::Done,
        "its owner extended it"
    );
    let record = world.books.records().next().unwrap();
    assert_eq!(record.owner.as_str(), "a:prod:direct:00000000000000000007");
    assert_eq!(record.ends_at, at(9_000));
}

#[test]
fn a_late_maker_binds_nothing_to_another_slot_of_the_same_name() {
    // Found by the exhaustive check: the slot was settled and swept while its maker slept.
    let mut world = World::new(1, Retention::Undeclared, None);
    let Answer::MakeSandbox { generation, .. } = world.acquire("s1", "o1", "l1", 0) else {
        panic!("no slot");
    };
    let given_back = Verb::ReturnSlot {
        slot: "s1".parse().unwrap(),
        maker: replica("r1"),
    };
    assert_eq!(world.step(given_back, 1), Answer::Done);
    let Answer::MakeSandbox { .. } = world.acquire("s1", "o2", "l2", 2) else {
        panic!("no slot");
    };
    let late = Verb::Bind {
        slot: "s1".parse().unwrap(),
        generation,
        sandbox: sandbox(1),
        ends_at: at(900),
    };
    assert_eq!(world.step(late, 3), Answer::Unknown);
    let record = world.books.records().next().unwrap();
    assert_eq!(record.sandbox, None, "the sandbox of o1 is not o2's");
}
