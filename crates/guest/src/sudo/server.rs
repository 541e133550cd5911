//! The agent's side of `sudo`.

use std::{
    collections::BTreeMap,
    fs, io,
    io::IoSliceMut,
    io::Read as _,
    mem::MaybeUninit,
    os::{
        fd::OwnedFd,
        unix::{
            fs::PermissionsExt as _, net::UnixStream as StdStream, process::ExitStatusExt as _,
        },
    },
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use rustix::{
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
    process::Signal,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
};

use super::{Answer, DESCRIPTORS, REQUEST_BYTES_MAX, Request, ShellUse, policy};
use crate::{
    account::{Account, Accounts},
    children::{Children, Spawned, run_as},
};

/// How many commands may run at once; more wait their turn.
const COMMANDS_MAX: usize = 256;
/// How long a client may take to say what it wants.
const REQUEST_PATIENCE: Duration = Duration::from_secs(10);
/// Where commands are looked for, as Debian's `sudo` does.
const SECURE_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Serves those whom the rules below `etc` allow everything. The sockets are in `directory`.
///
/// # Errors
/// A socket cannot be made.
pub fn start(directory: &Path, etc: &Path, children: &Children) -> io::Result<()> {
    let accounts = Accounts::in_dir(etc);
    let allowed = policy::allowed(etc, &accounts);
    if allowed.is_empty() {
        return Ok(());
    }
    fs::create_dir_all(directory)?;
    for part in directory.ancestors().take(2) {
        fs::set_permissions(part, fs::Permissions::from_mode(0o755))?;
    }
    let room = Arc::new(Semaphore::new(COMMANDS_MAX));
    for caller in allowed {
        let listener = listen(&directory.join(format!("{}.sock", caller.uid)), &caller)?;
        let server = Server {
            caller,
            accounts: accounts.clone(),
            children: children.clone(),
            room: Arc::clone(&room),
        };
        tokio::spawn(server.accept(listener));
    }
    Ok(())
}

/// A socket that only this user, and root, can open.
fn listen(path: &Path, caller: &Account) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    std::os::unix::fs::chown(path, Some(caller.uid), Some(caller.gid))?;
    Ok(listener)
}

#[derive(Debug, Clone)]
struct Server {
    caller: Account,
    accounts: Accounts,
    children: Children,
    room: Arc<Semaphore>,
}

impl Server {
    async fn accept(self, listener: UnixListener) {
        loop {
            let Ok(permit) = Arc::clone(&self.room).acquire_owned().await else {
                return;
            };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let server = self.clone();
                    tokio::spawn(async move {
                        server.serve(stream).await;
                        drop(permit);
                    });
                }
                // Out of descriptors; others will give some back.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    async fn serve(&self, stream: UnixStream) {
        let Ok(stream) = stream.into_std() else {
            return;
        };
        let server = self.clone();
        let started = tokio::task::spawn_blocking(move || {
            let (request, descriptors) = receive(&stream)?;
            Ok::<_, io::Error>((stream, server.start(&request, descriptors)))
        });
        let Ok(Ok((stream, started))) = started.await else {
            return;
        };
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        let Ok(mut stream) = UnixStream::from_std(stream) else {
            return;
        };
        let answer = match started {
            Ok(spawned) => match self.follow(spawned, &mut stream).await {
                Some(status) => ended(status),
                None => return,
            },
            Err(reason) => Answer::Refused(reason),
        };
        let text = serde_json::to_vec(&answer).unwrap_or_default();
        // A client that is gone needs no answer.
        let _ = stream.write_all(&text).await;
    }

    /// Waits for the end of the command and passes the caller's signals on to it. `None` when the
    /// caller went away, and the command with it.
    async fn follow(&self, spawned: Spawned, stream: &mut UnixStream) -> Option<ExitStatus> {
        let pid = spawned.pid;
        let mut exit = std::pin::pin!(spawned.exit.wait());
        let mut byte = [0u8; 1];
        loop {
            tokio::select! {
                status = &mut exit => return Some(status),
                read = stream.read(&mut byte) => match read {
                    Ok(1) => {
                        if let Some(signal) = Signal::from_named_raw(i32::from(byte[0])) {
                            let _ = self.children.signal_group(pid, signal);
                        }
                    }
                    _ => {
                        let _ = self.children.signal_group(pid, Signal::KILL);
                        exit.await;
                        return None;
                    }
                }
            }
        }
    }

    fn start(
        &self,
        request: &Request,
        descriptors: [OwnedFd; DESCRIPTORS],
    ) -> Result<Spawned, String> {
        let name = request.user.strip_prefix('#').unwrap_or(&request.user);
        let target = self
            .accounts
            .find(name)
            .map_err(|error| error.to_string())?;
        let line = command_line(request, &target);
        let [program, arguments @ ..] = line.as_slice() else {
            return Err(String::from("there is no command"));
        };
        let directory = match request.shell {
            ShellUse::Login => target.home.clone(),
            _ => PathBuf::from(&request.directory),
        };
        let [input, output, error] = descriptors;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .envs(self.environment(request, &target, &line))
            .stdin(Stdio::from(input))
            .stdout(Stdio::from(output))
            .stderr(Stdio::from(error));
        let told = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => format!("{program}: command not found"),
            _ => format!("{program}: {source}"),
        };
        run_as(&mut command, &target, &directory).map_err(told)?;
        self.children.spawn_blocking(&mut command).map_err(told)
    }

    fn environment(
        &self,
        request: &Request,
        target: &Account,
        line: &[String],
    ) -> BTreeMap<String, String> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut environment = BTreeMap::from([
            (String::from("PATH"), String::from(SECURE_PATH)),
            (String::from("HOME"), text(&target.home)),
        ]);
        let usable = |(name, value): &(&String, &String)| {
            !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0')
        };
        let asked = request.environment.iter().filter(usable);
        environment.extend(asked.map(|(name, value)| (name.clone(), value.clone())));
        environment.extend([
            (String::from("SHELL"), text(&target.shell)),
            (String::from("USER"), target.name.clone()),
            (String::from("LOGNAME"), target.name.clone()),
            (String::from("SUDO_USER"), self.caller.name.clone()),
            (String::from("SUDO_UID"), self.caller.uid.to_string()),
            (String::from("SUDO_GID"), self.caller.gid.to_string()),
            (
                String::from("SUDO_COMMAND"),
                line.join(" ").replace('\0', ""),
            ),
        ]);
        environment
    }
}

/// Program and arguments, through the shell if that was asked for.
fn command_line(request: &Request, target: &Account) -> Vec<String> {
    let shell = target.shell.to_string_lossy().into_owned();
    let mut line = match request.shell {
        ShellUse::None => return request.command.clone(),
        ShellUse::Plain => vec![shell],
        ShellUse::Login => vec![shell, String::from("-l")],
    };
    if !request.command.is_empty() {
        line.push(String::from("-c"));
        line.push(
            request
                .command
                .iter()
                .map(|word| quoted(word))
                .collect::<Vec<_>>()
                .join(" "),
        );
    }
    line
}

/// A word as the shell reads it back, byte for byte.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn ended(status: ExitStatus) -> Answer {
    match status.signal() {
        Some(signal) => Answer::Signalled(signal),
        None => Answer::Exited(status.code().unwrap_or(1)),
    }
}

/// Reads a request and its descriptors. Blocking, with a bound.
fn receive(stream: &StdStream) -> io::Result<(Request, [OwnedFd; DESCRIPTORS])> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(REQUEST_PATIENCE))?;
    let mut length = [0u8; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut length)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let descriptors: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        })
        .flatten()
        .collect();
    let descriptors = descriptors
        .try_into()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let mut reader = stream;
    reader.read_exact(&mut length[received.bytes..])?;
    let length = usize::try_from(u32::from_be_bytes(length)).map_err(io::Error::other)?;
    if length > REQUEST_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok((serde_json::from_slice(&body)?, descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_gets_every_word_as_it_was() {
        assert_eq!(quoted("a'b c$d"), r"'a'\''b c$d'");
    }
}
