//! `/init`: a new life begins.
//!
//! Order: everything is checked first, then the tokens and variables change, then what the
//! system shows (host name, machine id, clock), then the randomness of warm processes, then the
//! connections of the earlier life are closed. The answer comes after all of it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use sandhold_agent_proto::control::InitRequest;
use sandhold_types::{Entropy as _, SystemEntropy, Timestamp, Token};

use crate::{
    config::AgentConfig,
    interpreter::Interpreter,
    state::{Life, SandboxState},
};

/// A clock that is off by less is left alone.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(50);
/// The kernel's limit for a host name.
const HOSTNAME_BYTES_MAX: usize = 64;
/// More entropy than this is nonsense.
const ENTROPY_BYTES_MAX: usize = 1024;
/// `hosts` files beyond this are not rewritten.
const HOSTS_BYTES_MAX: u64 = 1 << 20;
/// The files that name the system, in its `/etc`.
const HOSTNAME: &str = "hostname";
const HOSTS: &str = "hosts";
const MACHINE_ID: &str = "machine-id";
/// The address under which a Debian host knows itself.
const OWN_ADDRESS: &str = "127.0.1.1";

/// Where the identity of the system is kept.
#[derive(Debug, Clone)]
pub struct SystemIdentity {
    etc: PathBuf,
    kernel: bool,
}

impl SystemIdentity {
    /// As the configuration says.
    #[must_use]
    pub fn new(config: &AgentConfig) -> Self {
        Self {
            etc: config.etc_dir.clone(),
            kernel: config.system_identity,
        }
    }

    /// Opens for writing what every life writes. A layered file system copies a file the first time
    /// that this happens; so the copies are in the image, and no life waits for them.
    pub fn take_hold(&self) {
        for name in [HOSTNAME, HOSTS, MACHINE_ID] {
            // What cannot be opened now is reported when it is written.
            let _ = fs::OpenOptions::new()
                .append(true)
                .open(self.etc.join(name));
        }
    }
}

/// Why a life did not begin.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// A field is not what it should be. Nothing was changed.
    #[error("'{field}' {problem}")]
    Field {
        /// Which.
        field: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A file of the system could not be written.
    #[error("writing {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel refused the host name.
    #[error("setting the host name: {0}")]
    Hostname(io::Error),
}

/// A request whose fields have all been read.
#[derive(Debug)]
struct Checked {
    hostname: Option<String>,
    timestamp: Option<jiff::Timestamp>,
    entropy: Option<Vec<u8>>,
}

/// Begins a life.
///
/// # Errors
/// A field is wrong, and then nothing has changed; or the system refused something.
pub async fn begin_life(
    request: InitRequest,
    state: &SandboxState,
    identity: &SystemIdentity,
    interpreter: &Interpreter,
) -> Result<(), InitError> {
    let checked = check(&request)?;
    state.begin_life(next_life(&state.life(), request));

    // On this thread, since a create waits for it: three small files, and there is nobody yet whom
    // it could hold up.
    apply(identity, &checked, state.clock.now())?;
    if let Some(entropy) = &checked.entropy {
        interpreter.reseed(entropy).await;
    }
    Ok(())
}

fn check(request: &InitRequest) -> Result<Checked, InitError> {
    let field = |field, problem| InitError::Field { field, problem };
    if let Some(hostname) = &request.hostname
        && !is_hostname(hostname)
    {
        return Err(field("hostname", "is no host name"));
    }
    let timestamp = match &request.timestamp {
        Some(text) => Some(
            text.parse()
                .map_err(|_| field("timestamp", "is not RFC 3339"))?,
        ),
        None => None,
    };
    let entropy = match &request.entropy {
        Some(text) => Some(
            STANDARD
                .decode(text)
                .ok()
                .filter(|bytes| !bytes.is_empty() && bytes.len() <= ENTROPY_BYTES_MAX)
                .ok_or_else(|| field("entropy", "is not base64 of 1 to 1024 bytes"))?,
        ),
        None => None,
    };
    for (name, value) in [
        ("accessToken", &request.access_token),
        ("controlToken", &request.control_token),
        ("defaultUser", &request.default_user),
    ] {
        if value.as_deref() == Some("") {
            return Err(field(name, "is empty"));
        }
    }
    if let Some(workdir) = &request.default_workdir
        && !workdir.starts_with('/')
    {
        return Err(field("defaultWorkdir", "is not absolute"));
    }
    Ok(Checked {
        hostname: request.hostname.clone(),
        timestamp,
        entropy,
    })
}

fn is_hostname(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= HOSTNAME_BYTES_MAX
        && !text.starts_with('-')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.')
}

/// The present life with what the request names.
fn next_life(present: &Arc<Life>, request: InitRequest) -> Life {
    let mut life = Life::clone(present);
    if let Some(token) = request.access_token {
        life.access_token = Some(Token::new(token));
    }
    if let Some(token) = request.control_token {
        life.control_token = Some(Token::new(token));
    }
    if let Some(variables) = request.env_vars {
        life.variables = variables;
    }
    if let Some(user) = request.default_user {
        life.default_user = user;
    }
    if let Some(workdir) = request.default_workdir {
        life.default_workdir = Some(PathBuf::from(workdir));
    }
    life.sandbox_id = request.sandbox_id.or(life.sandbox_id);
    life.template_id = request.template_id.or(life.template_id);
    life
}

fn apply(identity: &SystemIdentity, checked: &Checked, now: Timestamp) -> Result<(), InitError> {
    if let Some(timestamp) = checked.timestamp
        && identity.kernel
    {
        step_clock(timestamp, now);
    }
    if let Some(hostname) = &checked.hostname {
        if identity.kernel {
            rustix::system::sethostname(hostname.as_bytes())
                .map_err(|error| InitError::Hostname(error.into()))?;
        }
        write(&identity.etc, HOSTNAME, format!("{hostname}\n"))?;
        let hosts = read_hosts(&identity.etc);
        write(&identity.etc, HOSTS, hosts_with(&hosts, hostname))?;
    }
    write(&identity.etc, MACHINE_ID, machine_id())?;
    if let Some(entropy) = &checked.entropy
        && identity.kernel
    {
        // The kernel's own generator is fresh in every sandbox; this only adds to it.
        let _ = fs::write("/dev/urandom", entropy);
    }
    Ok(())
}

/// Sets the clock if it is off. A kernel that does not let it be set takes its time from the
/// host, and then it is right.
fn step_clock(target: jiff::Timestamp, now: Timestamp) {
    let target_ms = u64::try_from(target.as_millisecond()).unwrap_or(0);
    let off_ms = target_ms.abs_diff(now.unix_ms());
    if u128::from(off_ms) < CLOCK_TOLERANCE.as_millis() {
        return;
    }
    let time = rustix::time::Timespec {
        tv_sec: target.as_second(),
        tv_nsec: target.subsec_nanosecond().max(0).into(),
    };
    if let Err(error) = rustix::time::clock_settime(rustix::time::ClockId::Realtime, time) {
        tracing::debug!(%error, off_ms, "the clock cannot be set here");
    }
}

/// 128 random bits from the kernel: two copies of one sandbox must not share them (BC-096).
fn machine_id() -> String {
    let mut bytes = [0u8; 16];
    SystemEntropy.fill(&mut bytes);
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    digits + "\n"
}

fn read_hosts(etc: &Path) -> String {
    use std::io::Read as _;
    let mut text = String::new();
    let read = fs::File::open(etc.join(HOSTS))
        .and_then(|file| file.take(HOSTS_BYTES_MAX).read_to_string(&mut text));
    match read {
        Ok(_) => text,
        Err(_) => String::from("127.0.0.1\tlocalhost\n::1\tlocalhost\n"),
    }
}

/// The same hosts, with this one under its own address.
fn hosts_with(hosts: &str, hostname: &str) -> String {
    let mut lines: Vec<&str> = hosts
        .lines()
        .filter(|line| !line.starts_with(OWN_ADDRESS))
        .collect();
    let own = format!("{OWN_ADDRESS}\t{hostname}");
    lines.push(&own);
    lines.join("\n") + "\n"
}

/// Writes in place: these files may be mounted one by one, and then cannot be replaced.
fn write(etc: &Path, name: &str, text: impl AsRef<[u8]>) -> Result<(), InitError> {
    let path = etc.join(name);
    fs::write(&path, text).map_err(|source| InitError::Write { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sandbox_knows_itself_under_its_new_name_only() {
        let hosts = hosts_with("127.0.0.1\tlocalhost\n127.0.1.1\told\n", "new");
        assert_eq!(hosts, "127.0.0.1\tlocalhost\n127.0.1.1\tnew\n");
    }

    #[test]
    fn machine_ids_differ() {
        // BC-096
        assert_ne!(machine_id(), machine_id());
        assert_eq!(machine_id().trim_end().len(), 32);
    }

    #[test]
    fn wrong_fields_are_named() {
        for (json, expected) in [
            (r#"{"hostname":"a b"}"#, "hostname"),
            (r#"{"hostname":""}"#, "hostname"),
            (r#"{"timestamp":"yesterday"}"#, "timestamp"),
            (r#"{"entropy":"***"}"#, "entropy"),
            (r#"{"entropy":""}"#, "entropy"),
            (r#"{"accessToken":""}"#, "accessToken"),
            (r#"{"defaultWorkdir":"x"}"#, "defaultWorkdir"),
        ] {
            let request = serde_json::from_str(json).unwrap();
            match check(&request) {
                Err(InitError::Field { field, .. }) => assert_eq!(field, expected),
                other => panic!("{json}: {other:?}"),
            }
        }
        let right = r#"{"timestamp":"2026-11-30T20:00:00.123456789Z","entropy":"AAECAw=="}"#;
        assert!(check(&serde_json::from_str(right).unwrap()).is_ok());
    }
}
