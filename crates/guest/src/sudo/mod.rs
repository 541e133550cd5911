//! `sudo` where the kernel knows no set-user-ID programs.
//!
//! gVisor takes "no new privileges" for granted, so the real `sudo` refuses to work there. The
//! agent is root anyway, so it runs the command for those whom `/etc/sudoers` lets do everything
//! without a password; the agent's binary, called by the name `sudo`, is who asks it.
//!
//! ```text
//!  user's shell ─▶ sudo (client) ── arguments, environment, descriptors 0 1 2 ──▶ agent (server)
//!                        ▲────────── signals ──▶  ◀── exit status ──────────────────┘ │
//!                                                                      command, as root
//! ```
//!
//! Invariants:
//! - Who may ask is decided by who can open the socket: one for each user, which only they can.
//!   (gVisor does not tell the other end of a socket truly.)
//! - A command does not outlive the `sudo` that asked for it, unless it detaches by itself.
//! - What a client sends is bounded and checked; it is never trusted to be our client.
//!
//! It knows nothing of passwords, of rules for single commands, or of logging.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub mod client;
mod options;
mod policy;
pub mod server;

/// Where the sockets are; tests use another place.
const SOCKETS_VARIABLE: &str = "SANDHOLD_SUDO_SOCKETS";
/// The largest request, in bytes; the kernel's own limit of arguments and environment is 2 MiB.
const REQUEST_BYTES_MAX: usize = 2 << 20;
/// Descriptors that go with a request: standard input, output, error.
const DESCRIPTORS: usize = 3;

/// What a client asks for. Preceded on the wire by its length in four bytes, the first of which
/// carries the descriptors.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    /// As whom: a name or `#` and a number.
    user: String,
    /// Program and arguments; empty for the user's shell.
    command: Vec<String>,
    /// Whether the user's shell runs it, and whether as a login.
    shell: ShellUse,
    /// Where; the user's home for a login.
    directory: String,
    /// Everything in the caller's environment that is to be there too.
    environment: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum ShellUse {
    None,
    Plain,
    Login,
}

/// What the server answers, as one JSON text until the end of the stream.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// The command ended with this status.
    Exited(i32),
    /// The command was ended by this signal.
    Signalled(i32),
    /// It was not started.
    Refused(String),
}

/// Reads `bytes` as a request, and `text` as the words of a command line and as rules, for the
/// fuzz targets.
pub(crate) fn read_all(bytes: &[u8], text: &str) {
    let _ = serde_json::from_slice::<Request>(bytes);
    if let Ok(options::Parsed::Run(wanted)) = options::parse(text.lines().map(str::to_owned)) {
        let (command, shell) = (wanted.command, wanted.shell.0);
        assert!(!command.is_empty() || shell != ShellUse::None);
    }
    policy::read_all(text);
}
