//! The actor's side of pause, resume and doze: what is decided, in which order it is written down,
//! and what a failure leads to. The steps themselves are [`crate::sleep`].
//!
//! ```text
//!   running ──▶ pausing ──▶ paused ──▶ resuming ──▶ running
//!     ▲            │  capture refused     │  any step failed
//!     └────────────┘           paused ◀───┘
//!     │            │ processes gone without an image
//!     │            └──▶ killing
//!     └── proved by a restore, when nobody knows whether the capture was whole
//! ```
//!
//! Invariant: `pausing` and `resuming` last as long as the command that made them; what a command
//! leaves in them, because the truth could not be found out, the sweeper has settled ([`SandboxActor::settle`]).

use std::time::Duration;

use sandhold_engine::{AfterCapture, EngineError};
use sandhold_images::check_warm;
use sandhold_platform::{
    BusyWith, GuestHealth, LifetimeChange, NewLifetime, Pause, PlatformError, Resume, Sleep,
    Waking, Woken,
};
use sandhold_types::{Actor, Deadline, EndReason, Incarnation, Operation, SandboxState};

use crate::{
    actor::{Next, REMOVAL_BUDGET, SandboxActor, end_reason},
    agent::Activity,
    capacity,
    create::unresponsive,
    layout::Durability,
    lifetime,
    record::{Image, Proof, Record},
    remove,
    sleep::{self, Captured, Restored},
};

/// How long the wake-up may take that finds out whether an image is whole.
const PROOF_BUDGET: Duration = Duration::from_secs(60);

impl Activity {
    /// Whether it keeps a sandbox from being idle.
    pub(crate) fn keeps_awake(&self, busy_with: BusyWith) -> bool {
        match busy_with {
            BusyWith::AnyCommand => self.is_busy(),
            BusyWith::AttachedCommands => {
                let attached = self.processes.saturating_sub(self.background_processes);
                attached + self.executions + self.streams > 0
            }
        }
    }
}

impl SandboxActor {
    /// Puts a running sandbox to sleep.
    pub(crate) async fn pause(
        &mut self,
        pause: Pause,
        by: Actor,
    ) -> (Result<(), PlatformError>, Next) {
        match self.begin_pause(pause, &by).await {
            Ok(()) => {}
            Err(error) => return (Err(error), Next::Continue),
        }
        let captured = {
            // Not frozen from here on: a frozen one cannot be captured.
            let _awake = self.dependencies.hold(&self.entry).await;
            sleep::capture(&self.dependencies, &self.record, AfterCapture::Stop).await
        };
        self.conclude_pause(captured, pause, by).await
    }

    async fn begin_pause(&mut self, pause: Pause, by: &Actor) -> Result<(), PlatformError> {
        self.may(Operation::Pause)?;
        if pause.health == GuestHealth::MustAnswer {
            self.activity()
                .await
                .map_err(|error| unresponsive(&error))?;
        }
        self.check_disk_for_image().await?;
        let mut pausing = self.record.clone();
        let now = self.dependencies.clock.now();
        pausing.last_activity = self.entry.last_activity();
        pausing.note(
            SandboxState::Pausing,
            by.clone(),
            "it is being put to sleep".to_owned(),
            now,
        );
        self.commit_as(pausing, Durability::Process).await?;
        self.dependencies.faults.reach("pause.recorded");
        Ok(())
    }

    pub(crate) async fn conclude_pause(
        &mut self,
        captured: Captured,
        pause: Pause,
        by: Actor,
    ) -> (Result<(), PlatformError>, Next) {
        match captured {
            Captured::Asleep(Proof::Complete) => (
                self.fall_asleep(pause, by, Proof::Complete).await,
                Next::Continue,
            ),
            Captured::Asleep(Proof::Missing) => {
                if let Err(error) = self.fall_asleep(pause, by.clone(), Proof::Missing).await {
                    return (Err(error), Next::Continue);
                }
                let next = self.prove(by).await;
                (Err(capture_failed("its answer was lost")), next)
            }
            Captured::Beside => (Err(capture_failed("it runs on")), Next::Continue),
            Captured::Running(error) => {
                let failed = self.go_on_running(by, &error).await;
                (Err(failed.err().unwrap_or(error)), Next::Continue)
            }
            Captured::Lost(cause) => {
                let failed = capture_failed(&format!("it took the sandbox down: {cause:?}"));
                (Err(failed), self.end_lost(end_reason(cause)).await)
            }
            Captured::Unknown(error) => (Err(error), Next::Continue),
        }
    }

    async fn end_lost(&mut self, reason: EndReason) -> Next {
        let deadline = self.deadline(REMOVAL_BUDGET);
        let ended = self.end(reason, Actor::Sandbox, deadline).await;
        ended.unwrap_or(Next::Continue)
    }

    /// Its image is there and its processes are gone: it sleeps.
    pub(crate) async fn fall_asleep(
        &mut self,
        pause: Pause,
        by: Actor,
        proof: Proof,
    ) -> Result<(), PlatformError> {
        let mut asleep = self.record.clone();
        let now = self.dependencies.clock.now();
        asleep.sleep = Some(Sleep {
            since: now,
            keeps: pause.keeps,
        });
        asleep.image = Some(Image {
            of: asleep.incarnation,
            proof,
            engine: Some(self.dependencies.engine.identity()),
        });
        asleep.note(SandboxState::Paused, by, "it sleeps".to_owned(), now);
        self.commit_as(asleep, Durability::Process).await?;
        self.dependencies.faults.reach("pause.asleep");
        sleep::sync_image(&self.dependencies, &self.record);
        self.clear(self.record.incarnation).await;
        self.dependencies.faults.reach("pause.cleared");
        Ok(())
    }

    async fn go_on_running(
        &mut self,
        by: Actor,
        error: &PlatformError,
    ) -> Result<(), PlatformError> {
        let mut running = self.record.clone();
        let now = self.dependencies.clock.now();
        let reason = format!("it goes on, because {error}");
        running.note(SandboxState::Running, by, reason, now);
        // First, because what fills the disk may be the image that was begun.
        self.remove_images().await;
        self.commit_as(running, Durability::Process).await
    }

    /// Brings a sleeping sandbox back.
    pub(crate) async fn resume(
        &mut self,
        resume: Resume,
        by: Actor,
        deadline: Deadline,
    ) -> Result<(), PlatformError> {
        self.may(Operation::Resume)?;
        self.check_image()?;
        self.clear_left_overs().await;
        let mut resuming = self.record.clone();
        resuming.incarnation = resuming.incarnation.next();
        let now = self.dependencies.clock.now();
        resuming.note(
            SandboxState::Resuming,
            by.clone(),
            "it is being woken".to_owned(),
            now,
        );
        self.commit_as(resuming, Durability::Process).await?;
        self.dependencies.faults.reach("resume.recorded");
        // Counted as awake from the line above on, so that of two that do not fit together at most
        // one is woken.
        let woken = match self.check_room() {
            Ok(()) => self.wake(resume.waking, deadline).await,
            refused => refused,
        };
        match woken {
            Ok(()) => self.wake_up(&resume, by).await,
            Err(error) => {
                self.sleep_on(by, &error).await;
                Err(error)
            }
        }
    }

    /// Wakes the life that the record names.
    async fn wake(&self, waking: Waking, deadline: Deadline) -> Result<(), PlatformError> {
        let from = Restored::own(&self.dependencies, &self.record, waking)?;
        self.restore_as(&self.record, &from, deadline).await
    }

    /// Whether this engine can restore the image that it sleeps in (BC-092).
    fn check_image(&self) -> Result<(), PlatformError> {
        let image = self.record.image.as_ref();
        let Some(recorded) = image.and_then(|image| image.engine.as_ref()) else {
            return Ok(());
        };
        let fits = check_warm(recorded, &self.dependencies.engine.identity());
        fits.map_err(|mismatch| PlatformError::ImageIncompatible {
            id: self.record.id.clone(),
            why: mismatch.to_string(),
        })
    }

    async fn wake_up(&mut self, resume: &Resume, by: Actor) -> Result<(), PlatformError> {
        let mut awake = self.record.clone();
        let now = self.dependencies.clock.now();
        awake.lifetime =
            lifetime::after_wake(self.record.lifetime, self.record.life_ms, resume, now);
        if let NewLifetime::After(ms) = resume.lifetime {
            awake.life_ms = ms;
        }
        awake.last_activity = now;
        awake.sleep = None;
        awake.image = None;
        awake.note(
            SandboxState::Running,
            by.clone(),
            "it woke up".to_owned(),
            now,
        );
        self.entry.doze.forget();
        if let Err(error) = self.commit_as(awake, Durability::Process).await {
            self.sleep_on(by, &error).await;
            return Err(error);
        }
        self.dependencies.faults.reach("resume.running");
        self.discard_images().await;
        self.dependencies.faults.reach("resume.cleared");
        Ok(())
    }

    /// A wake-up failed: what is there of it goes, and the sandbox is asleep as before.
    async fn sleep_on(&mut self, by: Actor, error: &PlatformError) {
        self.clear(self.record.incarnation).await;
        let now = self.dependencies.clock.now();
        let reason = format!("it could not be woken: {error}");
        self.record.note(SandboxState::Paused, by, reason, now);
        // Not written down, it is `resuming` to recovery, which leads to the same.
        let noted = self
            .dependencies
            .persist(&self.record, Durability::Process)
            .await;
        if let Err(error) = noted {
            tracing::warn!(sandbox = %self.record.id, error = ?error, "not written down");
        }
        self.entry.publish(&self.record);
    }

    /// Wakes it if it sleeps, else moves its clock.
    pub(crate) async fn connect(
        &mut self,
        running: LifetimeChange,
        resume: Resume,
        by: Actor,
        deadline: Deadline,
    ) -> Result<Woken, PlatformError> {
        match self.may(Operation::Resume) {
            Err(PlatformError::AlreadySo { .. }) => {
                self.change_lifetime(running, &by).await?;
                Ok(Woken::No)
            }
            _ => self.resume(resume, by, deadline).await.map(|()| Woken::Yes),
        }
    }

    /// Finds out, by waking it, whether a sandbox can be woken whose capture nobody vouches for. If
    /// the engine says that it cannot, it has ended.
    pub(crate) async fn prove(&mut self, by: Actor) -> Next {
        let deadline = self.deadline(PROOF_BUDGET);
        let resume = Resume {
            waking: Waking::AsPaused,
            lifetime: NewLifetime::AsMade,
            on_timeout: None,
        };
        let Err(error) = self.resume(resume, by, deadline).await else {
            return Next::Continue;
        };
        tracing::warn!(sandbox = %self.record.id, error = ?error, "its image is in doubt");
        if !refutes_image(&error) {
            return Next::Continue;
        }
        let detail = format!("its capture was cut short, and {error}");
        self.end_lost(EndReason::EngineFailed { detail }).await
    }

    /// Ends a transition that was left open because the truth could not be found out (R-L10).
    pub(crate) async fn settle(&mut self) -> Next {
        let left = |step| PlatformError::Node {
            step,
            source: "it was left half-way".into(),
        };
        match self.record.state {
            SandboxState::Resuming => {
                self.sleep_on(Actor::Sweeper, &left("waking it")).await;
                return Next::Continue;
            }
            SandboxState::RollingBack => {
                self.stay(Actor::Sweeper, &left("rolling it back")).await;
                return Next::Continue;
            }
            _ => {}
        }
        let (told, stop) = (Some(left_half_way()), AfterCapture::Stop);
        let captured = sleep::truth(&self.dependencies, &self.record, stop, told).await;
        let (settled, next) = self
            .conclude_pause(captured, Pause::default(), Actor::Sweeper)
            .await;
        if let Err(error) = settled {
            tracing::warn!(sandbox = %self.record.id, error = ?error, "a pause was settled");
        }
        next
    }

    /// Removes what is there of a life that is over or did not come about, and the network unless
    /// another life has it; what is left is tried again later.
    pub(crate) async fn clear(&mut self, life: Incarnation) {
        let deadline = self.deadline(REMOVAL_BUDGET);
        let (dependencies, id) = (&self.dependencies, &self.record.id);
        let sleeps = self.record.image.is_some();
        let cleared = if sleeps {
            remove::remove_resources(dependencies, id, life, deadline).await
        } else {
            remove::remove_life(dependencies, id, life, deadline).await
        };
        if let Err(error) = cleared {
            tracing::warn!(sandbox = %id, %life, error = ?error, "something is left of a life");
            self.guard.left_overs.insert(life);
        } else {
            self.guard.left_overs.remove(&life);
        }
    }

    pub(crate) async fn clear_left_overs(&mut self) {
        for life in self.guard.left_overs.clone() {
            self.clear(life).await;
        }
    }

    /// Has the images of earlier lives removed, beside what comes next: the present life's own, which
    /// a capture may write meanwhile, is none of them.
    pub(crate) async fn discard_images(&mut self) {
        self.discard_all_but(Some(self.record.incarnation)).await;
    }

    /// Removes every image of the sandbox.
    pub(crate) async fn remove_images(&mut self) {
        self.discard_all_but(None).await;
        self.images_discarded().await;
    }

    async fn discard_all_but(&mut self, kept: Option<Incarnation>) {
        // One removal at a time.
        self.images_discarded().await;
        let discard = sleep::discard_images(&self.dependencies, &self.record.id, kept);
        self.guard.discards.spawn_blocking(discard);
    }

    /// Waits until no image is being removed any more.
    pub(crate) async fn images_discarded(&mut self) {
        while self.guard.discards.join_next().await.is_some() {}
    }

    /// Whether it fits if it is woken; it is counted already.
    pub(crate) fn check_room(&self) -> Result<(), PlatformError> {
        let (promised_mib, sandboxes) = self.registry.promised();
        let root = self.dependencies.layout.root();
        let room = capacity::measure(root, promised_mib, sandboxes);
        Ok(capacity::check_awake(&room, &self.policy)?)
    }

    /// Whether an image of what it uses now would fit. A capture that fills the disk may cost the
    /// sandbox its life, so it is not begun.
    pub(crate) async fn check_disk_for_image(&mut self) -> Result<(), PlatformError> {
        let layout = &self.dependencies.layout;
        let instance = layout.instance(&self.record.id, self.record.incarnation);
        // Without a figure it is tried; a full disk then fails the capture.
        let used = self.dependencies.usage(&instance).await;
        let image_bytes = used.map_or(0, |usage| usage.memory_bytes + usage.disk_bytes);
        match self.check_disk(image_bytes) {
            Err(_) if !self.guard.discards.is_empty() => {
                self.images_discarded().await;
                self.check_disk(image_bytes)
            }
            checked => checked,
        }
    }

    fn check_disk(&self, image_bytes: u64) -> Result<(), PlatformError> {
        let room = capacity::measure(self.dependencies.layout.root(), 0, 0);
        Ok(capacity::check_image(&room, &self.policy, image_bytes)?)
    }

    /// Makes a changed record the sandbox's own once it is written.
    pub(crate) async fn commit_as(
        &mut self,
        changed: Record,
        durability: Durability,
    ) -> Result<(), PlatformError> {
        self.dependencies.persist(&changed, durability).await?;
        self.record = changed;
        self.entry.publish(&self.record);
        Ok(())
    }

    /// Freezes the sandbox if it does nothing and nobody needs it.
    pub(crate) async fn doze(&mut self) {
        let now = self.dependencies.clock.now();
        if self.record.state != SandboxState::Running || !self.entry.doze.is_due(now) {
            return;
        }
        let activity = self.activity().await;
        // One that does not answer is left alone, as one that works is.
        if !activity.is_ok_and(|activity| !activity.is_busy()) {
            self.entry.doze.was_busy(now);
            return;
        }
        let instance = self
            .dependencies
            .layout
            .instance(&self.record.id, self.record.incarnation);
        let engine = self.dependencies.engine.as_ref();
        let Ok(usage) = self.dependencies.usage(&instance).await else {
            self.entry.doze.was_busy(now);
            return;
        };
        if !self.entry.doze.left_processor_alone(now, usage.cpu_usec) {
            return;
        }
        let counts = &self.dependencies.dozes;
        if let Err(error) = self.entry.doze.doze_off(engine, &instance, counts).await {
            tracing::debug!(sandbox = %self.record.id, %error, "it could not be frozen");
            self.entry.doze.was_busy(now);
        }
    }
}

fn capture_failed(detail: &str) -> PlatformError {
    PlatformError::Engine {
        step: "capturing it",
        source: detail.to_owned().into(),
    }
}

fn left_half_way() -> EngineError {
    std::io::Error::other("the capture was left half-way").into()
}

/// Whether a failed wake-up shows that the image cannot be restored, rather than that it could not
/// be tried now.
fn refutes_image(error: &PlatformError) -> bool {
    let PlatformError::Engine { source, .. } = error else {
        return false;
    };
    matches!(
        source.downcast_ref::<EngineError>(),
        Some(EngineError::Program { .. })
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_background_command_counts_unless_the_policy_says_otherwise() {
        // R-L5
        let background = Activity {
            processes: 1,
            background_processes: 1,
            ..Activity::default()
        };
        assert!(background.keeps_awake(BusyWith::AnyCommand));
        assert!(!background.keeps_awake(BusyWith::AttachedCommands));
        let attached = Activity {
            processes: 2,
            ..background
        };
        assert!(attached.keeps_awake(BusyWith::AttachedCommands));
    }

    #[test]
    fn only_an_engine_that_tried_and_failed_refutes_an_image() {
        let engine = |source: EngineError| PlatformError::Engine {
            step: "waking it",
            source: source.into(),
        };
        let instance: sandhold_engine::InstanceId = "abcdefghijklmnopqrst-2".parse().unwrap();
        let failed = EngineError::Program {
            program: "runsc",
            step: "restoring",
            instance: instance.clone(),
            stderr: String::new(),
        };
        let late = EngineError::Deadline {
            step: "restoring",
            instance,
        };
        assert!(refutes_image(&engine(failed)));
        assert!(!refutes_image(&engine(late)));
        assert!(!refutes_image(&PlatformError::ShuttingDown));
    }
}
