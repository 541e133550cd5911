//! The private way to a Python kernel, beside the Jupyter protocol: it works while a cell runs,
//! leaves no trace in the history, and is answered only after what was asked has taken effect.
//!
//! The other end is `python/sandhold_kernel.py`. One request per connection, one byte back.

use std::{collections::BTreeMap, io, path::PathBuf, time::Duration};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    time::timeout,
};

use super::{message::hex_of, variables::Changes};

/// A kernel in the middle of a long call into native code cannot answer before it returns. The
/// request stays with it and is the first thing it does then.
const ANSWER_WAIT: Duration = Duration::from_secs(2);

/// The way to one kernel.
#[derive(Debug, Clone)]
pub(super) struct SideChannel {
    path: PathBuf,
}

impl SideChannel {
    /// To the kernel that listens there.
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Mixes entropy into every generator of the kernel.
    pub(super) async fn reseed(&self, entropy: &[u8]) -> io::Result<()> {
        self.ask(&json!({"entropy": hex_of(entropy)})).await
    }

    /// Changes the kernel's variables.
    pub(super) async fn change_variables(&self, changes: &Changes) -> io::Result<()> {
        let set: BTreeMap<_, _> = changes
            .set
            .iter()
            .map(|(name, value)| (name, value))
            .collect();
        self.ask(&json!({"set": set, "unset": changes.unset})).await
    }

    async fn ask(&self, request: &serde_json::Value) -> io::Result<()> {
        let body = request.to_string();
        let length = u32::try_from(body.len()).map_err(io::Error::other)?;
        let mut stream = UnixStream::connect(&self.path).await?;
        stream.write_all(&length.to_le_bytes()).await?;
        stream.write_all(body.as_bytes()).await?;
        let answer = timeout(ANSWER_WAIT, stream.read_u8()).await;
        match answer {
            Ok(Ok(1)) => Ok(()),
            Ok(Ok(_)) => Err(io::Error::other("an answer of another kind")),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}
