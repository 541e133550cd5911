//! Why an engine did not do what was asked.

use std::path::PathBuf;

use crate::InstanceId;

/// A failed engine operation.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A text is not an instance name.
    #[error("'{text}' is not an instance name")]
    BadInstanceId {
        /// The text.
        text: String,
    },
    /// A program of the engine ended with an error.
    #[error("'{program}' failed while {step} {instance}: {stderr}")]
    Program {
        /// The program.
        program: &'static str,
        /// What was being done.
        step: &'static str,
        /// To what.
        instance: InstanceId,
        /// Its last words, cut to a bound.
        stderr: String,
    },
    /// A file of the engine could not be read or written.
    #[error("could not {step} {path}")]
    File {
        /// What was being done.
        step: &'static str,
        /// To which file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The deadline passed.
    #[error("the deadline passed while {step} {instance}")]
    Deadline {
        /// What was being done.
        step: &'static str,
        /// To what.
        instance: InstanceId,
    },
    /// The engine knows no such instance.
    #[error("there is no instance {instance}")]
    Unknown {
        /// Its name.
        instance: InstanceId,
    },
    /// Something is left after a removal.
    #[error("{instance} was removed but {what} is left")]
    Remains {
        /// Of what.
        instance: InstanceId,
        /// What is left.
        what: String,
    },
    /// The machine lacks something that the engine needs; the text says how to mend it.
    #[error("{what}")]
    Unsupported {
        /// What is missing and what to do.
        what: String,
    },
}

/// For work that was cut off before it could say on which file it failed.
impl From<std::io::Error> for EngineError {
    fn from(source: std::io::Error) -> Self {
        Self::File {
            step: "finish work on",
            path: PathBuf::new(),
            source,
        }
    }
}
