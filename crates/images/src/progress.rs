//! What a build tells while it works.

use crate::steps::Output;

/// A part of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Waiting for another build to end.
    Wait,
    /// Fetching and unpacking the root file system.
    RootFs,
    /// Fetching and installing wheels.
    Wheels,
    /// Copying the overlay and running the set-up script.
    SetUp,
    /// Adding the agent.
    Agent,
    /// Booting it and waiting until it is ready.
    Warm,
    /// Writing its memory to disk.
    Capture,
    /// Making it the current build.
    Publish,
}

impl Stage {
    /// In words, for people.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Wait => "waiting for another build",
            Self::RootFs => "root file system",
            Self::Wheels => "Python wheels",
            Self::SetUp => "set-up",
            Self::Agent => "agent",
            Self::Warm => "warming up",
            Self::Capture => "memory image",
            Self::Publish => "publishing",
        }
    }
}

/// One thing that is told.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A stage begins.
    Begin {
        /// Which.
        stage: Stage,
    },
    /// A stage's result was there already.
    Cached {
        /// Which.
        stage: Stage,
    },
    /// How far the stage is.
    Step {
        /// Steps done.
        done: u64,
        /// Steps in all, as far as known.
        total: u64,
    },
    /// A step of the template begins, or its result was there already.
    Instruction {
        /// Which, counted from one.
        number: usize,
        /// How many there are.
        total: usize,
        /// The step in words.
        label: String,
        /// Whether its result was there.
        cached: bool,
    },
    /// A line that the command of a step printed.
    Output {
        /// Which step.
        number: usize,
        /// Where it was printed to.
        output: Output,
        /// The line, cut to a bound.
        text: String,
    },
    /// A line that a program printed, or a remark.
    Note {
        /// The text, cut to a bound.
        text: String,
    },
}

/// Who is told.
pub trait Progress: Send + Sync {
    /// Takes note of it. Must not block.
    fn report(&self, event: Event);
}

/// Nobody is told.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn report(&self, _: Event) {}
}
