//! The protocol of grant, takeover, late release, sweep and crash, over *every* order of events of a
//! small world: one owner with two leases, two slots, a quota of one, one reclaimer, one node.
//!
//! A crash needs no event of its own: whoever never acts again has died there. What the random worlds
//! find with luck, this finds or excludes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{collections::BTreeMap, time::Duration};

use sandhold_governor::{
    books::{Answer, Books, BucketPolicy, Claim, GoneEvidence, Verb},
    colour::{self, Retention, Seen},
    ids::{Bucket, LeaseId, SlotId},
    record::Ground,
    rules::{Rule, Rules},
};
use sandhold_types::{Generation, SandboxId, Timestamp};
use stateright::{Checker, Model, Property};

/// One tick of the clock: a cycle, two heartbeats. Black ends after two of them, grey after three.
const TICK: Duration = Duration::from_secs(60);
const TICKS_MAX: u8 = 5;
const QUOTA: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Holder {
    /// It has not asked.
    Fresh,
    /// It has a slot and no sandbox.
    Making(SlotId, Generation, u8),
    /// Its sandbox is made and not bound.
    Made(SlotId, Generation, SandboxId),
    /// Its lease is granted; the node does not know its generation yet.
    Granted(SandboxId, Generation, u8),
    /// It works in the sandbox; last heard at this tick.
    Holds(SandboxId, Generation, u8),
    /// It released, was refused, or gave up.
    Done,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Sweeper {
    Idle,
    Marked(SlotId, Generation, u8),
    Removing(SlotId, SandboxId, Generation),
    Killed(SlotId, SandboxId),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    books: Books,
    tick: u8,
    /// What is there, and the highest generation that the node has seen of it.
    node: BTreeMap<SandboxId, (SlotId, Generation)>,
    holders: [Holder; 2],
    released: [bool; 2],
    sweeper: Sweeper,
    /// What must never happen and did.
    broken: Option<&'static str>,
    /// What should happen in some order.
    taken_over: bool,
    swept: bool,
    late_release_refused: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Event {
    Tick,
    Ask(usize, usize),
    /// A holder that has a sandbox asks once more, by the same lease.
    AskAgain(usize),
    Create(usize),
    Bind(usize),
    Use(usize),
    Beat(usize),
    Release(usize),
    Look(usize),
    Condemn,
    Kill,
    Confirm,
    Expire(usize),
}

struct Protocol {
    rules: Rules,
}

fn bucket() -> Bucket {
    Bucket {
        namespace: "a".parse().unwrap(),
        env: "prod".parse().unwrap(),
    }
}

fn lease(holder: usize) -> LeaseId {
    format!("l{holder}").parse().unwrap()
}

fn slot(n: usize) -> SlotId {
    format!("s{n}").parse().unwrap()
}

fn time(tick: u8) -> Timestamp {
    Timestamp::from_unix_ms(1_000_000).plus(TICK * u32::from(tick))
}

impl State {
    fn step(&mut self, verb: Verb) -> Answer {
        self.books.step(verb, time(self.tick)).answer
    }

    fn acquire(&mut self, holder: usize, number: usize) -> Answer {
        self.step(Verb::Acquire {
            slot: slot(number),
            bucket: bucket(),
            owner: "o".parse().unwrap(),
            claim: Claim::Lease {
                lease: lease(holder),
                template: "main".parse().unwrap(),
                ttl: None,
            },
            maker: format!("r{holder}").parse().unwrap(),
        })
    }

    fn ask(&mut self, holder: usize, number: usize) {
        let generation_before = self.books.records().map(|r| r.generation).max();
        let answer = self.acquire(holder, number);
        match answer {
            Answer::MakeSandbox { slot, generation } => {
                self.holders[holder] = Holder::Making(slot, generation, self.tick);
            }
            Answer::Granted(grant) => {
                if generation_before.is_some_and(|before| grant.generation <= before) {
                    self.broken = Some("a generation came again");
                }
                self.taken_over = true;
                self.holders[holder] = Holder::Granted(grant.sandbox, grant.generation, self.tick);
            }
            Answer::Stale { .. } => self.holders[holder] = Holder::Done,
            _ => {}
        }
    }

    fn ask_again(&mut self, holder: usize) {
        let Holder::Holds(sandbox, generation, _) = self.holders[holder].clone() else {
            return;
        };
        match self.acquire(holder, holder) {
            Answer::Granted(grant) if grant.generation == generation => {
                self.holders[holder] = Holder::Holds(sandbox, generation, self.tick);
            }
            Answer::Granted(_) | Answer::MakeSandbox { .. } => {
                self.broken = Some("a lease whose generation ended got another");
            }
            Answer::Stale { .. } => self.holders[holder] = Holder::Done,
            _ => {}
        }
    }

    fn bind(&mut self, holder: usize) {
        let Holder::Made(slot, generation, sandbox) = self.holders[holder].clone() else {
            return;
        };
        let made = sandbox.clone();
        let answer = self.step(Verb::Bind {
            slot,
            generation,
            sandbox: sandbox.clone(),
            ends_at: Timestamp::FAR_FUTURE,
        });
        self.holders[holder] = match answer {
            Answer::Granted(grant) => Holder::Holds(sandbox, grant.generation, self.tick),
            Answer::Unknown => {
                // Nobody was ever given it.
                self.node.remove(&made);
                Holder::Done
            }
            _ => Holder::Done,
        };
    }

    /// The node learns the generation, and refuses one below what it has seen (R-G8).
    fn use_it(&mut self, holder: usize) {
        let Holder::Granted(sandbox, generation, heard) = self.holders[holder].clone() else {
            return;
        };
        self.holders[holder] = match self.node.get_mut(&sandbox) {
            Some((_, highest)) if generation >= *highest => {
                *highest = generation;
                Holder::Holds(sandbox, generation, heard)
            }
            _ => Holder::Done,
        };
    }

    fn beat(&mut self, holder: usize) {
        let Holder::Holds(sandbox, generation, _) = self.holders[holder].clone() else {
            return;
        };
        let answer = self.step(Verb::Heartbeat {
            bucket: bucket(),
            owner: "o".parse().unwrap(),
            lease: lease(holder),
            generation,
            ends_at: None,
        });
        self.holders[holder] = match answer {
            Answer::Granted(_) => {
                let other = &self.holders[1 - holder];
                let newer =
                    matches!(other, Holder::Holds(s, g, _) if *s == sandbox && *g > generation);
                if newer {
                    self.broken = Some("a lease was renewed after another took over");
                }
                Holder::Holds(sandbox, generation, self.tick)
            }
            _ => Holder::Done,
        };
    }

    fn release(&mut self, holder: usize) {
        let current = match &self.holders[1 - holder] {
            Holder::Holds(_, generation, _) | Holder::Granted(_, generation, _) => {
                Some(*generation)
            }
            _ => None,
        };
        let mine = match &self.holders[holder] {
            Holder::Holds(_, generation, _)
            | Holder::Granted(_, generation, _)
            | Holder::Making(_, generation, _)
            | Holder::Made(_, generation, _) => Some(*generation),
            Holder::Fresh | Holder::Done => None,
        };
        let answer = self.step(Verb::Release {
            bucket: bucket(),
            owner: "o".parse().unwrap(),
            lease: lease(holder),
        });
        if let (Answer::Stale { current: told }, Some(current)) = (&answer, current)
            && *told == Some(current)
        {
            self.late_release_refused = true;
        }
        let ended = matches!(answer, Answer::Released { slot: Some(_) });
        if ended && current.is_some_and(|current| mine.is_none_or(|mine| current > mine)) {
            self.broken = Some("a late release ended the session of another");
        }
        self.released[holder] = true;
        self.holders[holder] = Holder::Done;
    }

    fn look(&mut self, number: usize, rules: &Rules) {
        let found = self
            .books
            .records()
            .find(|r| r.slot == slot(number))
            .cloned();
        let Some(record) = found else {
            return;
        };
        let now = time(self.tick);
        let verdict = colour::verdict(&record, Seen::Running, Retention::Undeclared, rules, now);
        if verdict.ground == Some(Ground::White) && record.sandbox.is_some() {
            self.sweeper = Sweeper::Marked(record.slot, record.generation, self.tick);
        } else if let (Some(_), Some(sandbox)) = (&record.condemned, &record.sandbox) {
            self.sweeper = Sweeper::Removing(record.slot, sandbox.clone(), record.generation);
        }
    }

    fn condemn(&mut self) {
        let Sweeper::Marked(slot, generation, _) = self.sweeper.clone() else {
            return;
        };
        let answer = self.step(Verb::BeginRemoval {
            slot: slot.clone(),
            generation,
            by: "r9".parse().unwrap(),
            ground: Ground::White,
            seen: Seen::Running,
        });
        let record = self.books.records().find(|r| r.slot == slot);
        let sandbox = record.and_then(|r| r.sandbox.clone());
        self.sweeper = match (answer, sandbox) {
            (Answer::Remove { generation }, Some(sandbox)) => {
                Sweeper::Removing(slot, sandbox, generation)
            }
            _ => Sweeper::Idle,
        };
    }

    fn kill(&mut self) {
        let Sweeper::Removing(slot, sandbox, generation) = self.sweeper.clone() else {
            return;
        };
        let fenced = (self.node.get(&sandbox)).is_some_and(|(_, highest)| generation < *highest);
        if fenced {
            self.sweeper = Sweeper::Idle;
            return;
        }
        for (holder, released) in self.holders.iter().zip(self.released) {
            let Holder::Holds(held, _, heard) = holder else {
                continue;
            };
            // Heard within 120 s: black. Its owner may end it by its other lease.
            if *held == sandbox
                && self.tick - heard < 2
                && !released
                && !self.released.contains(&true)
            {
                self.broken = Some("a live session was killed");
            }
        }
        self.swept |= self.node.remove(&sandbox).is_some();
        self.sweeper = Sweeper::Killed(slot, sandbox);
    }

    fn confirm(&mut self) {
        let Sweeper::Killed(slot, sandbox) = self.sweeper.clone() else {
            return;
        };
        self.step(Verb::ConfirmGone {
            slot,
            sandbox,
            evidence: GoneEvidence::Killed,
        });
        self.sweeper = Sweeper::Idle;
    }

    fn check(&mut self) {
        if self.books.used(&bucket()) > QUOTA as usize {
            self.broken = Some("more slots than the quota");
        }
        for (sandbox, (of, _)) in &self.node {
            let has_slot = self.books.records().any(|r| r.slot == *of);
            if !has_slot {
                self.broken = Some("a slot is free and its sandbox is there");
            }
            let two = self.node.keys().filter(|other| *other != sandbox).count() > 0;
            if two {
                self.broken = Some("more sandboxes than the quota");
            }
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Event;

    fn init_states(&self) -> Vec<State> {
        let mut books = Books::new(self.rules.clone(), None);
        let policy = BucketPolicy::new(QUOTA, Retention::Undeclared);
        let bucket = bucket();
        books.step(Verb::SetBucket { bucket, policy }, time(0));
        vec![State {
            books,
            tick: 0,
            node: BTreeMap::new(),
            holders: [Holder::Fresh, Holder::Fresh],
            released: [false; 2],
            sweeper: Sweeper::Idle,
            broken: None,
            taken_over: false,
            swept: false,
            late_release_refused: false,
        }]
    }

    fn actions(&self, state: &State, events: &mut Vec<Event>) {
        if state.broken.is_some() {
            return;
        }
        if state.tick < TICKS_MAX {
            events.push(Event::Tick);
        }
        for holder in 0..2 {
            match &state.holders[holder] {
                Holder::Fresh => events.extend([Event::Ask(holder, 0), Event::Ask(holder, 1)]),
                // A create is sent within its deadline, or not at all.
                Holder::Making(_, _, asked) if state.tick == *asked => {
                    events.push(Event::Create(holder));
                }
                Holder::Making(..) | Holder::Done => {}
                Holder::Made(..) => events.push(Event::Bind(holder)),
                Holder::Granted(..) => events.push(Event::Use(holder)),
                Holder::Holds(..) => {
                    events.extend([Event::Beat(holder), Event::AskAgain(holder)]);
                }
            }
            let begun = state.holders[holder] != Holder::Fresh;
            if begun && !state.released[holder] {
                events.push(Event::Release(holder));
            }
        }
        match &state.sweeper {
            Sweeper::Idle => events.extend([
                Event::Look(0),
                Event::Look(1),
                Event::Expire(0),
                Event::Expire(1),
            ]),
            Sweeper::Marked(_, _, at) if state.tick > *at => events.push(Event::Condemn),
            Sweeper::Marked(..) => {}
            Sweeper::Removing(..) => events.push(Event::Kill),
            Sweeper::Killed(..) => events.push(Event::Confirm),
        }
    }

    fn next_state(&self, last: &State, event: Event) -> Option<State> {
        let mut state = last.clone();
        match event {
            Event::Tick => state.tick += 1,
            Event::Ask(holder, number) => state.ask(holder, number),
            Event::AskAgain(holder) => state.ask_again(holder),
            Event::Create(holder) => {
                if let Holder::Making(slot, generation, _) = state.holders[holder].clone() {
                    let sandbox: SandboxId = format!("{:020}", generation.0).parse().unwrap();
                    state
                        .node
                        .insert(sandbox.clone(), (slot.clone(), generation));
                    state.holders[holder] = Holder::Made(slot, generation, sandbox);
                }
            }
            Event::Bind(holder) => state.bind(holder),
            Event::Use(holder) => state.use_it(holder),
            Event::Beat(holder) => state.beat(holder),
            Event::Release(holder) => state.release(holder),
            Event::Look(number) => state.look(number, &self.rules),
            Event::Condemn => state.condemn(),
            Event::Kill => state.kill(),
            Event::Confirm => state.confirm(),
            Event::Expire(number) => {
                let slot = slot(number);
                // Asked by its name: what is there is bound instead.
                let here = state.node.iter().find(|(_, (of, _))| *of == slot);
                let verb = match here {
                    None => Verb::ExpireMaking { slot },
                    Some((sandbox, _)) => Verb::AdoptStray {
                        slot,
                        sandbox: sandbox.clone(),
                        bucket: bucket(),
                        owner: "o".parse().unwrap(),
                        ends_at: Timestamp::FAR_FUTURE,
                    },
                };
                state.step(verb);
            }
        }
        state.books.written();
        state.check();
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing that must not happen", |_, state: &State| {
                state.broken.is_none()
            }),
            Property::sometimes("a session is taken over", |_, state: &State| {
                state.taken_over
            }),
            Property::sometimes("what nobody holds is swept", |_, state: &State| state.swept),
            Property::sometimes("a late release is refused", |_, state: &State| {
                state.late_release_refused
            }),
        ]
    }
}

fn explored(rules: Rules) -> impl Checker<Protocol> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Protocol { rules }
        .checker()
        .threads(threads)
        .spawn_bfs()
        .join()
}

#[test]
fn no_order_of_events_breaks_the_protocol() {
    let checker = explored(Rules::default());
    println!(
        "{} states, {} of them distinct, up to {TICKS_MAX} minutes",
        checker.state_count(),
        checker.unique_state_count(),
    );
    assert!(checker.is_done());
    checker.assert_properties();
}

#[test]
fn some_order_breaks_it_without_its_rules() {
    for rule in [
        Rule::ReleaseMatches,
        Rule::SealedStaysSealed,
        Rule::RootsAgain,
        Rule::SlotUntilGone,
    ] {
        let checker = explored(Rules::default().without(rule));
        let found = checker.discovery("nothing that must not happen");
        assert!(found.is_some(), "{rule:?} is not needed in this world");
    }
}
