//! Seeded histories: every verb, mostly with what fits the books at that moment, sometimes not.

use std::time::Duration;

use sandhold_governor::{
    books::{Books, BucketPolicy, Claim, GoneEvidence, Keep, RunDefaults, Stage, Verb},
    colour::{self, Retention, Seen},
    ids::{Bucket, LeaseId, OwnerId, ReplicaId, RunId, SlotId},
    record::{Ground, Record},
    rules::Rules,
};
use sandhold_types::{Generation, SandboxId, TemplateId, Timestamp};

use super::{bucket, sandbox};

fn template(name: &str) -> TemplateId {
    name.parse().unwrap()
}

/// A small generator of numbers: the same seed, the same history.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z ^ (z >> 31)) % bound as u64).unwrap()
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }
}

/// One event of a history.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    Step(Verb),
    /// The store is another one now, and may have lost its last writes.
    LoseWrites,
}

pub(crate) struct History {
    numbers: Numbers,
    rules: Rules,
    now: Timestamp,
    made: u64,
}

impl History {
    pub(crate) fn new(seed: u64, rules: Rules) -> Self {
        Self {
            numbers: Numbers::new(seed),
            rules,
            now: Timestamp::from_unix_ms(1_700_000_000_000),
            made: 0,
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.now
    }

    fn name<T: std::str::FromStr>(&mut self, kind: &str, of: usize) -> T
    where
        T::Err: std::fmt::Debug,
    {
        format!("{kind}{}", self.numbers.below(of)).parse().unwrap()
    }

    fn bucket(&mut self) -> Bucket {
        bucket(self.numbers.pick(&["a", "a", "a", "b", "b", "never-set"]))
    }

    fn replica(&mut self) -> ReplicaId {
        self.name("r", 3)
    }

    fn record(&mut self, books: &Books) -> Option<Record> {
        let records: Vec<&Record> = books.records().collect();
        (!records.is_empty()).then(|| self.numbers.pick(&records).clone())
    }

    fn slot(&mut self, books: &Books) -> SlotId {
        match self.record(books) {
            Some(record) if !self.numbers.one_in(8) => record.slot,
            _ => self.name("s", 14),
        }
    }

    fn generation(&mut self, right: Generation) -> Generation {
        match self.numbers.below(8) {
            0 => Generation(right.0.saturating_sub(1)),
            _ => right,
        }
    }

    fn sandbox_of(&mut self, record: &Record) -> SandboxId {
        match &record.sandbox {
            Some(known) if !self.numbers.one_in(10) => known.clone(),
            _ => self.new_sandbox(),
        }
    }

    fn new_sandbox(&mut self) -> SandboxId {
        self.made += 1;
        sandbox(self.made)
    }

    fn ends_at(&mut self) -> Timestamp {
        match self.numbers.below(3) {
            0 => Timestamp::FAR_FUTURE,
            1 => self.now.plus(Duration::from_secs(60)),
            _ => self.now.plus(Duration::from_secs(3_600)),
        }
    }

    fn seen(&mut self) -> Seen {
        self.numbers
            .pick(&[Seen::Running, Seen::Paused, Seen::Paused, Seen::Unknown])
    }

    /// What happens next, and lets time pass first.
    pub(crate) fn next(&mut self, books: &Books) -> Event {
        let seconds = self
            .numbers
            .pick(&[0, 0, 0, 0, 0, 1, 1, 1, 4, 6, 20, 31, 61, 119, 121, 185]);
        self.now = self.now.plus(Duration::from_secs(seconds));
        if self.numbers.one_in(150) {
            self.now = self.now.plus(Duration::from_secs(2_000));
        }
        if self.numbers.one_in(400) && books.stage() == Stage::Settled {
            return Event::LoseWrites;
        }
        Event::Step(self.verb(books))
    }

    fn acquire(&mut self, books: &Books) -> Verb {
        let waiting = books.waiting();
        let slot = match waiting.len() {
            0 => self.name("s", 14),
            n if self.numbers.one_in(2) => waiting[self.numbers.below(n)].slot.clone(),
            _ => self.name("s", 14),
        };
        let bucket = match waiting.iter().find(|w| w.slot == slot) {
            Some(waiter) if !self.numbers.one_in(12) => waiter.bucket.clone(),
            _ => self.bucket(),
        };
        let owner: OwnerId = self.name("owner:", 7);
        let claim = match self.numbers.below(5) {
            0 => Claim::Direct,
            _ => Claim::Lease {
                lease: self.name("l", 9),
                template: self
                    .numbers
                    .pick(&["main", "main", "main", "light"])
                    .parse()
                    .unwrap(),
                ttl: self
                    .numbers
                    .pick(&[None, None, Some(Duration::from_secs(600))]),
            },
        };
        let maker = self.replica();
        Verb::Acquire {
            slot,
            bucket,
            owner,
            claim,
            maker,
        }
    }

    fn removal(&mut self, record: &Record, books: &Books) -> Verb {
        let seen = self.seen();
        let policy = self.policy_of(books, &record.bucket);
        let right = colour::verdict(record, seen, policy, &self.rules, self.now).ground;
        let ground = match right {
            Some(ground) if !self.numbers.one_in(6) => ground,
            _ => self
                .numbers
                .pick(&[Ground::White, Ground::Retention, Ground::Overdue]),
        };
        Verb::BeginRemoval {
            slot: record.slot.clone(),
            generation: self.generation(record.generation),
            by: self.replica(),
            ground,
            seen,
        }
    }

    fn policy_of(&self, books: &Books, bucket: &Bucket) -> Retention {
        let step = books.clone().step(Verb::Read, self.now);
        match step.answer {
            sandhold_governor::books::Answer::Books(view) => view
                .buckets
                .get(bucket)
                .map(|p| p.retention)
                .unwrap_or_default(),
            other => panic!("{other:?}"),
        }
    }

    fn verb(&mut self, books: &Books) -> Verb {
        let Some(record) = self.record(books) else {
            return self.when_empty(books);
        };
        let slot = self.slot(books);
        match self.numbers.below(36) {
            0..9 => self.acquire(books),
            9..13 => {
                // Whoever made it knows the generation from before it was condemned.
                let of = record.condemned.as_ref().map(|c| c.generation);
                let known = of.filter(|_| self.numbers.one_in(2));
                let generation = self.generation(known.unwrap_or(record.generation));
                let sandbox = self.sandbox_of(&record);
                let ends_at = self.ends_at();
                let slot = record.slot;
                Verb::Bind {
                    slot,
                    generation,
                    sandbox,
                    ends_at,
                }
            }
            13..16 => Verb::Heartbeat {
                generation: self.generation(record.generation),
                lease: self.lease_of(&record),
                ends_at: self.numbers.one_in(3).then(|| self.ends_at()),
                bucket: record.bucket,
                owner: record.owner,
            },
            16 => Verb::Release {
                lease: self.lease_of(&record),
                bucket: record.bucket,
                owner: record.owner,
            },
            17 => Verb::Discard {
                generation: self.generation(record.generation),
                slot: record.slot,
            },
            18..22 => {
                let in_use = |r: &&Record| r.sandbox.is_some() && r.holding.is_some();
                let fit: Vec<Record> = books.records().filter(in_use).cloned().collect();
                let of = if fit.is_empty() || self.numbers.one_in(6) {
                    record
                } else {
                    self.numbers.pick(&fit)
                };
                self.of_a_run(&of)
            }
            22 => Verb::Lock {
                slot,
                by: self.replica(),
            },
            23 => Verb::Unlock {
                slot,
                by: self.replica(),
            },
            24..27 => self.removal(&record, books),
            27 => Verb::BeginWake { slot },
            28 => Verb::ConfirmGone {
                sandbox: self.sandbox_of(&record),
                slot: record.slot,
                evidence: self.numbers.pick(&[
                    GoneEvidence::Killed,
                    GoneEvidence::Killed,
                    GoneEvidence::NotFound,
                ]),
            },
            29 => Verb::RemovalFailed {
                by: self.replica(),
                awake: self.numbers.one_in(2),
                slot,
            },
            30 => Verb::ExpireMaking { slot },
            31..33 => Verb::NoteSeen {
                slot,
                seen: self.seen(),
            },
            33 => self.stray(),
            34 => Verb::ReturnSlot {
                maker: match &record.making {
                    Some(making) => making.maker.clone(),
                    None => self.replica(),
                },
                slot: record.slot,
            },
            _ => self.when_empty(books),
        }
    }

    fn policy(&mut self) -> BucketPolicy {
        let quota = self.numbers.pick(&[1, 2, 4, 6]);
        let retention = self.numbers.pick(&[
            Retention::Undeclared,
            Retention::After(Duration::from_secs(300)),
        ]);
        BucketPolicy {
            runs: RunDefaults {
                main: (quota > 1).then(|| template("heavy")),
                light: (quota == 4).then(|| template("small")),
                timeout: (quota > 2).then_some(Duration::from_secs(60)),
                timeout_max: (quota == 6).then_some(Duration::from_secs(90)),
            },
            ..BucketPolicy::new(quota, retention)
        }
    }

    fn when_empty(&mut self, books: &Books) -> Verb {
        match self.numbers.below(8) {
            0 => Verb::SetBucket {
                bucket: bucket(self.numbers.pick(&["a", "b"])),
                policy: self.policy(),
            },
            1 => Verb::LeaveQueue {
                slot: self.name("s", 14),
            },
            2 => Verb::FinishRecovery {
                highest: Generation(self.now.unix_ms() + 5),
                settled_from: self.now,
            },
            3 => Verb::Read,
            4 => self.stray(),
            _ => self.acquire(books),
        }
    }

    fn stray(&mut self) -> Verb {
        Verb::AdoptStray {
            slot: self.name("s", 14),
            sandbox: self.new_sandbox(),
            bucket: self.bucket(),
            owner: self.name("owner:", 7),
            ends_at: self.ends_at(),
        }
    }

    fn lease_of(&mut self, record: &Record) -> LeaseId {
        match &record.holding {
            Some(holding) if !self.numbers.one_in(6) => holding.lease.clone(),
            _ => self.name("l", 9),
        }
    }

    fn of_a_run(&mut self, record: &Record) -> Verb {
        let slot = record.slot.clone();
        let generation = self.generation(record.generation);
        let (run, replica): (RunId, _) = match &record.run {
            Some(root) if !self.numbers.one_in(4) => (root.run.clone(), root.replica.clone()),
            _ => (self.name("run", 3), self.replica()),
        };
        match self.numbers.below(6) {
            0 | 1 => Verb::BeginRun {
                slot,
                generation,
                run,
                replica,
            },
            2 => Verb::RunHeartbeat {
                slot,
                generation,
                run,
                replica,
            },
            3 => Verb::ClaimRun {
                slot,
                run,
                replica: self.replica(),
            },
            4 => Verb::CancelRun { slot, run },
            _ => Verb::EndRun {
                slot,
                run,
                replica,
                keep: self
                    .numbers
                    .pick(&[Keep::Sandbox, Keep::Sandbox, Keep::Nothing]),
            },
        }
    }
}
