//! Handing rules to the kernel's packet filter, through `nft`.

use std::{process::Stdio, time::Duration};

use serde_json::Value;
use tokio::{io::AsyncWriteExt, process::Command};

use super::namespace::{StepError, at};

/// `nft` answers in milliseconds; this only keeps a broken machine from holding us for ever.
const NFT_MAX: Duration = Duration::from_secs(10);
/// How much of what it says goes into an error.
const MESSAGE_BYTES_MAX: usize = 1024;

/// Whether `nft` is there and can read the packet filter, so that this is told at the start.
pub(super) async fn check() -> Result<(), StepError> {
    apply(&serde_json::json!({"nftables": []})).await
}

/// Applies commands in one transaction, in the calling thread's namespace.
pub(super) async fn apply(rules: &Value) -> Result<(), StepError> {
    let step = "apply packet filter rules";
    let mut child = Command::new("nft")
        .args(["-j", "-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(at("start nft (package nftables)"))?;
    let work = async {
        if let Some(mut input) = child.stdin.take() {
            input.write_all(rules.to_string().as_bytes()).await?;
        }
        child.wait_with_output().await
    };
    let output = tokio::time::timeout(NFT_MAX, work)
        .await
        .map_err(at(step))?;
    let output = output.map_err(at(step))?;
    if output.status.success() {
        return Ok(());
    }
    let mut message = output.stderr;
    message.truncate(MESSAGE_BYTES_MAX);
    Err(at(step)(String::from_utf8_lossy(&message).into_owned()))
}
