//! A scripted platform: it makes, hides, refuses, forgets to answer, and does things later.
//!
//! It knows nothing of leases. What it holds is the truth of the world: a sandbox is here, or it is
//! not, whatever the books say.

use std::collections::BTreeMap;

use sandhold_governor::{
    Call, CallError, Listed, Reply,
    colour::Seen,
    ids::{Bucket, OwnerId, RunId, SlotId},
};
use sandhold_types::{Generation, SandboxId, Timestamp};

use crate::faults::Faults;

/// A process of a run.
#[derive(Debug, Clone)]
pub struct Process {
    /// Of which run.
    pub run: RunId,
    /// Since when, in true ms.
    pub since: u64,
    /// When it ends by itself, in true ms.
    pub ends: u64,
}

/// A sandbox that is here.
#[derive(Debug, Clone)]
pub struct Here {
    /// Its slot, by its metadata.
    pub slot: SlotId,
    /// Its bucket.
    pub bucket: Bucket,
    /// Its owner.
    pub owner: OwnerId,
    /// The highest generation seen.
    pub generation: Generation,
    /// Since when it is paused, in true ms.
    pub paused_since: Option<u64>,
    /// When it first fell asleep since its holder last woke it. Traffic may have woken it for a
    /// moment since; nobody can see that between two looks.
    pub asleep_first: Option<u64>,
    /// When it was made, in true ms.
    pub born: u64,
    /// Its end.
    pub ends_at: Timestamp,
    /// Whether its data plane answers.
    pub fit: bool,
    /// It was woken to be deleted.
    pub woken: bool,
    /// What a run started.
    pub process: Option<Process>,
}

/// The platform's state.
#[derive(Debug, Default)]
pub struct Scripted {
    /// Every sandbox that is here.
    pub here: BTreeMap<SandboxId, Here>,
    /// Listings as they were, newest last, for stale ones.
    pub past: Vec<(u64, Vec<Listed>)>,
    made: u64,
}

/// What a new sandbox is like.
#[derive(Debug, Clone, Copy)]
pub struct Birth {
    /// Whether it is fit for use.
    pub fit: bool,
    /// Its end.
    pub ends_at: Timestamp,
    /// How long a process in it runs, in ms.
    pub process_ms: u64,
}

impl Scripted {
    /// Carries out a call at true time `now`.
    ///
    /// # Errors
    /// As the platform would answer.
    pub fn carry_out(
        &mut self,
        call: &Call,
        birth: Birth,
        faults: &Faults,
        fence: bool,
        now: u64,
    ) -> Result<Reply, CallError> {
        match call {
            Call::Create {
                slot,
                bucket,
                owner,
                generation,
                ..
            } => {
                self.made += 1;
                let text = format!("sbx{:017}", self.made);
                let Ok(sandbox) = text.parse::<SandboxId>() else {
                    return Err(CallError::Refused);
                };
                let here = Here {
                    slot: slot.clone(),
                    bucket: bucket.clone(),
                    owner: owner.clone(),
                    generation: *generation,
                    paused_since: None,
                    asleep_first: None,
                    born: now,
                    ends_at: birth.ends_at,
                    fit: birth.fit,
                    woken: false,
                    process: None,
                };
                self.here.insert(sandbox.clone(), here);
                Ok(Reply::Created {
                    sandbox,
                    ends_at: birth.ends_at,
                })
            }
            Call::FindBySlot(slot) => {
                let found = self.here.iter().find(|(_, h)| h.slot == *slot);
                Ok(Reply::Found(found.map(|(id, h)| shown(id, h))))
            }
            Call::List => Ok(Reply::Listing(self.listing(faults))),
            Call::Ask(id) => {
                let here = self.here.get(id).ok_or(CallError::NotFound)?;
                Ok(Reply::State(seen(here)))
            }
            Call::Kill(id, generation) => self.kill(id, *generation, faults, fence),
            Call::Wake(id, generation) => {
                let here = self.here.get_mut(id).ok_or(CallError::NotFound)?;
                admit(here, *generation, fence)?;
                here.paused_since = None;
                here.asleep_first = None;
                Ok(Reply::Done)
            }
            Call::Probe(id) => {
                let here = self.here.get(id).ok_or(CallError::NotFound)?;
                if here.fit && here.paused_since.is_none() {
                    Ok(Reply::Done)
                } else {
                    Err(CallError::Refused)
                }
            }
            Call::WriteFiles(id, generation, _) => {
                admit(self.awake(id)?, *generation, fence)?;
                Ok(Reply::Done)
            }
            Call::Launch(id, generation, run) => {
                let here = self.awake(id)?;
                admit(here, *generation, fence)?;
                let ends = now + birth.process_ms;
                here.process = Some(Process {
                    run: run.clone(),
                    since: now,
                    ends,
                });
                Ok(Reply::Done)
            }
            Call::ReadArtifacts(id, generation, run, cursor) => {
                let here = self.awake(id)?;
                admit(here, *generation, fence)?;
                let mine = here.process.as_ref().filter(|p| p.run == *run);
                let there = mine.map_or(0, |p| (now.min(p.ends) - p.since) / 20_000);
                let count = u32::try_from(there.saturating_sub(*cursor)).unwrap_or(u32::MAX);
                Ok(Reply::Artifacts {
                    count,
                    cursor: there.max(*cursor),
                })
            }
            Call::ReadExit(id, generation, run) => {
                let here = self.awake(id)?;
                admit(here, *generation, fence)?;
                let over = here
                    .process
                    .as_ref()
                    .is_none_or(|p| p.run != *run || now >= p.ends);
                Ok(Reply::Exit(over.then_some(0)))
            }
            Call::KillProcesses(id, generation, run) => {
                let here = self.here.get_mut(id).ok_or(CallError::NotFound)?;
                admit(here, *generation, fence)?;
                if here.process.as_ref().is_some_and(|p| p.run == *run) {
                    here.process = None;
                }
                Ok(Reply::Done)
            }
        }
    }

    fn awake(&mut self, id: &SandboxId) -> Result<&mut Here, CallError> {
        let here = self.here.get_mut(id).ok_or(CallError::NotFound)?;
        if here.paused_since.is_some() {
            Err(CallError::Refused)
        } else {
            Ok(here)
        }
    }

    fn kill(
        &mut self,
        id: &SandboxId,
        generation: Generation,
        faults: &Faults,
        fence: bool,
    ) -> Result<Reply, CallError> {
        let here = self.here.get_mut(id).ok_or(CallError::NotFound)?;
        if faults.refuses_paused && here.paused_since.is_some() {
            return Err(CallError::RefusedPaused);
        }
        admit(here, generation, fence)?;
        self.here.remove(id);
        Ok(Reply::Done)
    }

    /// Someone inside the sandbox writes, under a generation. True if it was let through.
    pub fn write(&mut self, id: &SandboxId, generation: Generation, fence: bool) -> bool {
        self.awake(id)
            .is_ok_and(|here| admit(here, generation, fence).is_ok())
    }

    fn listing(&self, faults: &Faults) -> Vec<Listed> {
        let shows = |h: &&Here| !(faults.hides_paused && h.paused_since.is_some());
        self.here
            .iter()
            .filter(|(_, h)| shows(h))
            .map(|(id, h)| shown(id, h))
            .collect()
    }

    /// Keeps what a listing shows now, for stale ones.
    pub fn remember(&mut self, faults: &Faults, now: u64) {
        let listing = self.listing(faults);
        self.past.push((now, listing));
        self.past.retain(|(at, _)| now - at <= 90_000);
    }
}

/// R-G8: the node remembers the highest generation it saw and refuses lower ones.
fn admit(here: &mut Here, generation: Generation, fence: bool) -> Result<(), CallError> {
    if !fence {
        return Ok(());
    }
    if generation < here.generation {
        return Err(CallError::StaleGeneration);
    }
    here.generation = generation;
    Ok(())
}

fn seen(here: &Here) -> Seen {
    if here.paused_since.is_some() {
        Seen::Paused
    } else {
        Seen::Running
    }
}

fn shown(id: &SandboxId, here: &Here) -> Listed {
    Listed {
        sandbox: id.clone(),
        slot: here.slot.clone(),
        bucket: here.bucket.clone(),
        owner: here.owner.clone(),
        seen: seen(here),
        ends_at: here.ends_at,
        generation: here.generation,
    }
}
