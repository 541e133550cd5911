//! The checkers: what must be true after every event, whatever went wrong.
//!
//! They see what the world's omniscient observer sees: true time, every step on the books, and every
//! sandbox on the platform. They share no code with the rules they check, except the numbers.
//!
//! - *live*: no sandbox with a live lease or run is condemned or killed by anyone but its owner;
//! - *writer*: one accepted writer per generation, and generations accepted in order;
//! - *quota*: used ≤ quota in the books, and on the platform;
//! - *freed*: a slot is freed only when its sandbox is gone;
//! - *release*: a stale release has no effect; a sealed lease never comes back;
//! - *scan*: a look renews nothing;
//! - *looks*: whoever is swept was white in two confirmed looks, under the same generation;
//! - *policy*: a paused sandbox is swept only as its bucket declares; *queue*: first come, first served;
//! - *blast*, *awake*: no more at a time than allowed.

use std::collections::{BTreeMap, BTreeSet};

use sandhold_governor::{
    books::{Act, Answer, Audit, Books, Step, Verb, View},
    colour::Retention,
    ids::{Bucket, LeaseId, OwnerId, SlotId},
    reclaimer::Confirmed,
    record::{Ground, Record},
    rules::Rules,
};
use sandhold_types::{Generation, SandboxId, Timestamp};

use crate::platform::Scripted;

#[derive(Debug, Clone, Default)]
struct Live {
    generation: u64,
    lease_until: u64,
    run_until: u64,
}

/// What a failover takes back: knowledge that exists only in the books.
#[derive(Debug, Clone, Default)]
pub struct Remembered {
    sealed: BTreeSet<(OwnerId, LeaseId)>,
    current: BTreeMap<OwnerId, LeaseId>,
}

/// The omniscient observer.
#[derive(Debug)]
pub struct Checker {
    rules: Rules,
    violation: Option<String>,
    remembered: Remembered,
    live: BTreeMap<SandboxId, Live>,
    granted: BTreeMap<Generation, (OwnerId, LeaseId)>,
    writers: BTreeMap<(SandboxId, Generation), usize>,
    highest_written: BTreeMap<SandboxId, Generation>,
    looks: BTreeMap<(String, SlotId), Vec<(Generation, Timestamp)>>,
    queue: Vec<(Bucket, SlotId, Timestamp)>,
    written_off: BTreeSet<SlotId>,
    black_ms: u64,
    clock_steps: bool,
    /// How many rounds each replica has skipped in a row.
    skipped: BTreeMap<String, u32>,
    /// Whether the step at hand ends a lease.
    leased: bool,
}

fn ms(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The world at the moment of a step.
#[derive(Debug, Clone, Copy)]
pub struct Scene<'a> {
    /// The books after the step.
    pub books: &'a Books,
    /// The platform.
    pub platform: &'a Scripted,
    /// What each bucket may have and keeps.
    pub policies: &'a BTreeMap<Bucket, (u32, Retention)>,
    /// True ms.
    pub now: u64,
    /// The store's clock.
    pub store_now: Timestamp,
}

impl Checker {
    /// An observer that has seen nothing.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self {
            black_ms: ms(rules.black()),
            rules,
            violation: None,
            remembered: Remembered::default(),
            live: BTreeMap::new(),
            granted: BTreeMap::new(),
            writers: BTreeMap::new(),
            highest_written: BTreeMap::new(),
            looks: BTreeMap::new(),
            queue: Vec::new(),
            written_off: BTreeSet::new(),
            clock_steps: false,
            skipped: BTreeMap::new(),
            leased: false,
        }
    }

    /// In a world whose store's clock steps forward, all roots age at once. What is promised then is
    /// that nobody is removed who was heard between the two looks.
    pub fn clock_may_step(&mut self) {
        self.black_ms = ms(self.rules.look_spacing());
        self.clock_steps = true;
    }

    /// The first thing that must not be.
    #[must_use]
    pub fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Notes a violation, unless there is one already.
    pub fn fail(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    /// What a failover would take back.
    #[must_use]
    pub fn remembered(&self) -> Remembered {
        self.remembered.clone()
    }

    /// The store lost what came after.
    pub fn forget(&mut self, back_to: Remembered) {
        self.remembered = back_to;
        self.queue.clear();
    }

    /// Heartbeats of a record, to compare before and after a look.
    #[must_use]
    pub fn beats(record: Option<&Record>) -> [Option<Timestamp>; 2] {
        let lease = record
            .and_then(|r| r.holding.as_ref())
            .map(|h| h.heartbeat_at);
        [
            lease,
            record.and_then(|r| r.run.as_ref()).map(|r| r.heartbeat_at),
        ]
    }

    /// A look renews nothing.
    pub fn look(&mut self, before: [Option<Timestamp>; 2], after: [Option<Timestamp>; 2]) {
        if before != after {
            self.fail("scan: a look renewed a root".to_owned());
        }
    }

    /// A step on the books was carried out.
    pub fn step(&mut self, verb: &Verb, step: &Step, scene: Scene<'_>) {
        if let Verb::Release { owner, lease, .. } = verb {
            self.check_release(owner, lease, step);
        }
        self.check_queue(verb, step, scene);
        self.leased = step
            .audit
            .iter()
            .any(|a| matches!(a.what, Act::SealedLease { .. }));
        for audit in &step.audit {
            self.audit(audit, scene);
        }
        self.note_life(verb, &step.answer, scene);
        if let Verb::Acquire { bucket, .. } = verb
            && let Answer::MakeSandbox { .. } = step.answer
        {
            let quota = scene.policies.get(bucket).map_or(0, |p| p.0 as usize);
            if scene.books.used(bucket) > quota {
                self.fail(format!(
                    "quota: {bucket} uses {} of {quota}",
                    scene.books.used(bucket)
                ));
            }
        }
    }

    fn check_release(&mut self, owner: &OwnerId, lease: &LeaseId, step: &Step) {
        let condemned = step
            .audit
            .iter()
            .any(|a| matches!(a.what, Act::Condemned { .. }));
        let current = self.remembered.current.get(owner) == Some(lease);
        if condemned && !current {
            self.fail(format!(
                "release: stale lease {lease} of {owner} condemned a sandbox"
            ));
        }
    }

    fn check_queue(&mut self, verb: &Verb, step: &Step, scene: Scene<'_>) {
        let verb = match verb {
            Verb::Unchecked(inner) => inner,
            other => other,
        };
        let Verb::Acquire { slot, bucket, .. } = verb else {
            if let Verb::LeaveQueue { slot } = verb {
                self.queue.retain(|(_, s, _)| s != slot);
            }
            return;
        };
        let now = scene.store_now;
        let took = step.audit.iter().any(|a| a.what == Act::SlotTaken);
        let queued = matches!(
            step.answer,
            Answer::Waiting { .. } | Answer::CapacityExceeded(_)
        );
        if took || queued {
            // After so long a silence a place is lost to whoever comes; if nobody came, it is kept.
            self.queue
                .retain(|(_, s, at)| s == slot || now.since(*at).as_secs() < 5);
        }
        match step.answer {
            Answer::Waiting { .. } => match self.queue.iter_mut().find(|(_, s, _)| s == slot) {
                Some(place) => place.2 = now,
                None => self.queue.push((bucket.clone(), slot.clone(), now)),
            },
            // It keeps its place for as long as a silence may be.
            Answer::BeingMade => {}
            _ => {
                let place = self.queue.iter().position(|(_, s, _)| s == slot);
                let before = &self.queue[..place.unwrap_or(self.queue.len())];
                let heard = |at: &Timestamp| now.since(*at).as_millis() < 4_000;
                let passed: Vec<_> = before
                    .iter()
                    .filter(|(b, s, at)| b == bucket && s != slot && heard(at))
                    .collect();
                // Whoever was there before may still come, if there is room for all of them.
                let quota = scene.policies.get(bucket).map_or(0, |p| p.0 as usize);
                let no_room = scene.books.used(bucket) + passed.len() > quota;
                if let (true, true, Some((_, first, _))) = (took, no_room, passed.first()) {
                    let first = first.clone();
                    self.fail(format!("queue: {slot} was served before {first}"));
                }
                self.queue.retain(|(_, s, _)| s != slot);
            }
        }
    }

    fn audit(&mut self, audit: &Audit, scene: Scene<'_>) {
        match &audit.what {
            Act::Granted { lease } => self.check_grant(audit, lease),
            Act::SealedLease { lease, .. } => {
                let owner = audit.owner.clone();
                if self.remembered.current.get(&owner) == Some(lease) {
                    self.remembered.current.remove(&owner);
                }
                self.remembered.sealed.insert((owner, lease.clone()));
            }
            Act::Condemned { by, ground } => {
                self.check_condemned(audit, by.as_ref().map(|r| r.as_str()), *ground, scene);
            }
            Act::SlotFreed { .. } => {
                let here = match &audit.sandbox {
                    Some(sandbox) => scene.platform.here.contains_key(sandbox),
                    None => scene.platform.here.values().any(|h| h.slot == audit.slot),
                };
                if here {
                    self.fail(format!("freed: {} while its sandbox is here", audit.slot));
                }
            }
            Act::WrittenOff => {
                self.written_off.insert(audit.slot.clone());
            }
            Act::SlotTaken | Act::Adopted => {}
        }
    }

    fn check_grant(&mut self, audit: &Audit, lease: &LeaseId) {
        let who = (audit.owner.clone(), lease.clone());
        if self.remembered.sealed.contains(&who) {
            self.fail(format!(
                "release: sealed lease {lease} of {} came back",
                audit.owner
            ));
        }
        if let Some(other) = self.granted.get(&audit.generation)
            && *other != who
        {
            self.fail(format!(
                "writer: generation {} was granted twice",
                audit.generation
            ));
        }
        self.granted.insert(audit.generation, who);
        self.remembered
            .current
            .insert(audit.owner.clone(), lease.clone());
    }

    fn check_condemned(
        &mut self,
        audit: &Audit,
        by: Option<&str>,
        ground: Ground,
        scene: Scene<'_>,
    ) {
        let Some(sandbox) = &audit.sandbox else {
            return;
        };
        let Some(replica) = by else {
            // By its owner: whatever it held is over.
            self.live.remove(sandbox);
            return;
        };
        let record = scene.books.records().find(|r| r.slot == audit.slot);
        if ground == Ground::Overdue {
            let ends_at = record.map_or(Timestamp::FAR_FUTURE, |r| r.ends_at);
            if scene.store_now.since(ends_at) <= self.rules.settings().overdue_grace {
                self.fail(format!("live: {} is not overdue", audit.slot));
            }
            self.live.remove(sandbox);
            return;
        }
        self.check_alive(sandbox, "condemned", scene.now);
        let looks = self.looks.get(&(replica.to_owned(), audit.slot.clone()));
        let enough = looks.is_some_and(|looks| {
            let same: Vec<_> = looks
                .iter()
                .filter(|(g, _)| *g == audit.generation)
                .collect();
            match (same.first(), same.last()) {
                (Some(first), Some(last)) => {
                    looks.iter().all(|(g, _)| *g == audit.generation)
                        && last.1.since(first.1) >= self.rules.look_spacing()
                }
                _ => false,
            }
        });
        if !enough {
            self.fail(format!(
                "looks: {} was not white twice as {}",
                audit.slot, audit.generation
            ));
        }
        self.check_policy(audit, ground, sandbox, scene);
    }

    fn check_policy(
        &mut self,
        audit: &Audit,
        ground: Ground,
        sandbox: &SandboxId,
        scene: Scene<'_>,
    ) {
        let Some(here) = scene.platform.here.get(sandbox) else {
            return;
        };
        // A pause after it was asked is nobody's fault; one a minute before is.
        let Some(since) = here.paused_since.filter(|since| scene.now - since > 60_000) else {
            if ground == Ground::Retention && here.paused_since.is_none() {
                self.fail(format!(
                    "policy: {} runs and was swept as paused",
                    audit.slot
                ));
            }
            return;
        };
        let retention = scene.policies.get(&audit.bucket).map(|p| p.1);
        let kept = match retention {
            // By the store's clock, which may have stepped.
            Some(Retention::After(_)) if self.clock_steps => false,
            Some(Retention::After(retained)) => {
                scene.now - here.asleep_first.unwrap_or(since) <= ms(retained)
            }
            _ => true,
        };
        if self.leased && kept {
            self.fail(format!(
                "policy: {} is paused and kept, but was swept",
                audit.slot
            ));
        }
    }

    /// Keeps what holds a sandbox, by the answers its holders were given.
    fn note_life(&mut self, verb: &Verb, answer: &Answer, scene: Scene<'_>) {
        match answer {
            Answer::Granted(grant) => {
                let until = scene.now + self.black_ms;
                let live = self.live.entry(grant.sandbox.clone()).or_default();
                if grant.generation.0 > live.generation {
                    *live = Live {
                        generation: grant.generation.0,
                        ..Live::default()
                    };
                }
                live.lease_until = until;
            }
            Answer::RunGoesOn { .. } => {
                let slot = match verb {
                    Verb::BeginRun { slot, .. }
                    | Verb::RunHeartbeat { slot, .. }
                    | Verb::ClaimRun { slot, .. } => slot,
                    _ => return,
                };
                let record = scene.books.records().find(|r| r.slot == *slot);
                if let Some(sandbox) = record.and_then(|r| r.sandbox.clone()) {
                    let live = self.live.entry(sandbox).or_default();
                    live.run_until = scene.now + self.black_ms;
                }
            }
            _ => {}
        }
        if let (Verb::EndRun { slot, .. }, Answer::Done) = (verb, answer) {
            let record = scene.books.records().find(|r| r.slot == *slot);
            if let Some(live) = record
                .and_then(|r| r.sandbox.as_ref())
                .and_then(|id| self.live.get_mut(id))
            {
                live.run_until = 0;
            }
        }
    }

    fn check_alive(&mut self, sandbox: &SandboxId, what: &str, now: u64) {
        let Some(live) = self.live.get(sandbox) else {
            return;
        };
        let until = live.lease_until.max(live.run_until);
        if until > now {
            let left = (until - now) / 1000;
            self.fail(format!(
                "live: {sandbox} was {what} with {left} s of its holder left"
            ));
        }
    }

    /// The platform removed a sandbox because somebody asked for it.
    pub fn killed(&mut self, sandbox: &SandboxId, now: u64) {
        self.check_alive(sandbox, "killed", now);
        self.live.remove(sandbox);
    }

    /// A sandbox died by itself.
    pub fn died(&mut self, sandbox: &SandboxId) {
        self.live.remove(sandbox);
    }

    /// A sandbox came to be: how many of its bucket are here now?
    pub fn born(&mut self, slot: &SlotId, bucket: &Bucket, scene: Scene<'_>) {
        let counts =
            |h: &&crate::platform::Here| h.bucket == *bucket && !self.written_off.contains(&h.slot);
        let here = scene.platform.here.values().filter(counts).count();
        let quota = scene.policies.get(bucket).map_or(0, |p| p.0 as usize);
        if here > quota {
            self.fail(format!(
                "quota: {here} of {bucket} are here, {quota} are allowed ({slot})"
            ));
        }
    }

    /// A write inside a sandbox was let through.
    pub fn wrote(&mut self, sandbox: &SandboxId, generation: Generation, session: usize) {
        let first = *self
            .writers
            .entry((sandbox.clone(), generation))
            .or_insert(session);
        if first != session {
            self.fail(format!(
                "writer: two writers of generation {generation} in {sandbox}"
            ));
        }
        let key = sandbox.clone();
        let highest = *self.highest_written.entry(key).or_insert(generation);
        if generation < highest {
            self.fail(format!(
                "writer: generation {generation} wrote after {highest} in {sandbox}"
            ));
        }
        self.highest_written
            .insert(sandbox.clone(), generation.max(highest));
    }

    /// A failed listing proves nothing, at most three times in a row.
    pub fn judged(&mut self, replica: &str, listed: Option<usize>, confirmed: Confirmed) {
        let skipped = self.skipped.entry(replica.to_owned()).or_default();
        let before = *skipped;
        *skipped = if confirmed == Confirmed::Yes {
            0
        } else {
            before + 1
        };
        let most = self.rules.settings().listing_skips_max;
        if listed.is_none() && confirmed == Confirmed::Yes && before < most {
            self.fail("listing: a failed listing was taken for evidence".to_owned());
        }
        if before >= most && confirmed == Confirmed::No {
            self.fail(format!("listing: {before} rounds were skipped already"));
        }
    }

    /// A replica concluded from a confirmed round; what it saw white is noted.
    pub fn round(&mut self, replica: &str, view: &View) {
        let grey = self.rules.grey();
        for record in &view.records {
            let key = (replica.to_owned(), record.slot.clone());
            let making = record.making.as_ref().map(|m| m.since);
            let lease = record.holding.as_ref().map(|h| h.heartbeat_at);
            let run = record.run.as_ref().map(|r| r.heartbeat_at);
            let heard = [making, lease, run].into_iter().flatten().max();
            if heard.is_none_or(|at| view.now.since(at) >= grey) {
                self.looks
                    .entry(key)
                    .or_default()
                    .push((record.generation, view.now));
                // Only an unbroken row of looks at one generation counts.
                if let Some(looks) = self
                    .looks
                    .get_mut(&(replica.to_owned(), record.slot.clone()))
                {
                    looks.retain(|(generation, _)| *generation == record.generation);
                }
            } else {
                self.looks.remove(&key);
            }
        }
    }

    /// How many a round wants to condemn, of how many known.
    pub fn blast(&mut self, condemned: usize, known: usize) {
        let most = self.rules.blast_radius(known);
        if condemned > most {
            self.fail(format!(
                "blast: {condemned} of {known} in one cycle, {most} are allowed"
            ));
        }
    }

    /// How many sandboxes are awake only to be deleted.
    pub fn awake(&mut self, count: usize) {
        let most = self.rules.settings().awake_for_removal_max as usize;
        if count > most {
            self.fail(format!(
                "awake: {count} were woken to be deleted, {most} are allowed"
            ));
        }
    }
}
