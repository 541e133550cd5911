//! The program that is called `sudo`: asks the agent and behaves as the command does.

use std::{
    collections::BTreeMap,
    env,
    io::{self, IoSlice, Write as _},
    mem::MaybeUninit,
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::ExitCode,
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    signal::unix::{SignalKind, signal},
};

use super::{
    Answer, DESCRIPTORS, Request, SOCKETS_VARIABLE,
    options::{Keep, Parsed, Wanted, parse},
};

/// The name that makes the agent's binary this program.
pub const NAME: &str = "sudo";
/// What of the caller's environment the command gets by itself.
const KEPT: [&str; 12] = [
    "TERM",
    "COLORTERM",
    "LANG",
    "LANGUAGE",
    "LS_COLORS",
    "DISPLAY",
    "TZ",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "DEBIAN_FRONTEND",
    "E2B_SANDBOX",
];
/// What is never taken over: they are the command's own, or would lead it astray.
const DROPPED: [&str; 6] = [
    "PATH",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "USER",
    "LOGNAME",
    "SHELL",
];
/// The status of a `sudo` that could not do what was asked.
const FAILURE: u8 = 1;
/// How much of an answer is read, in bytes.
const ANSWER_BYTES_MAX: u64 = 64 * 1024;

/// Whether the binary was called by this program's name.
#[must_use]
pub fn is_called() -> bool {
    let name = env::args_os().next().map(PathBuf::from);
    name.is_some_and(|path| path.file_name().is_some_and(|n| n == NAME))
}

/// Runs as `sudo`.
#[must_use]
pub fn main(socket_directory: &Path) -> ExitCode {
    match ask(socket_directory) {
        Ok(code) => code,
        Err(message) => {
            let _ = writeln!(io::stderr(), "sudo: {message}");
            ExitCode::from(FAILURE)
        }
    }
}

fn ask(socket_directory: &Path) -> Result<ExitCode, String> {
    let arguments: Option<Vec<String>> = env::args_os()
        .skip(1)
        .map(|a| a.into_string().ok())
        .collect();
    let arguments = arguments.ok_or("arguments must be UTF-8 in this sandbox")?;
    let wanted = match parse(arguments)? {
        Parsed::Run(wanted) => wanted,
        Parsed::Nothing => return Ok(ExitCode::SUCCESS),
        Parsed::Print(text) => {
            let _ = io::stdout().write_all(text.as_bytes());
            return Ok(ExitCode::SUCCESS);
        }
    };
    let stream = connect(socket_directory)?;
    send(&stream, &request(wanted)?).map_err(|e| format!("could not ask the agent: {e}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    let answer = runtime.block_on(follow(stream));
    match answer.map_err(|e| format!("the agent gave no answer: {e}"))? {
        Answer::Exited(status) => Ok(ExitCode::from(
            u8::try_from(status & 0xff).unwrap_or(FAILURE),
        )),
        // As shells tell it.
        Answer::Signalled(signal) => Ok(ExitCode::from(
            u8::try_from(128 + signal).unwrap_or(FAILURE),
        )),
        Answer::Refused(reason) => Err(reason),
    }
}

fn connect(socket_directory: &Path) -> Result<UnixStream, String> {
    let user = rustix::process::getuid().as_raw();
    let directory =
        env::var_os(SOCKETS_VARIABLE).map_or_else(|| socket_directory.to_owned(), PathBuf::from);
    UnixStream::connect(directory.join(format!("{user}.sock"))).map_err(|error| {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                String::from("/etc/sudoers does not let this user do everything without a password")
            }
            _ => format!("could not reach the agent: {error}"),
        }
    })
}

fn request(wanted: Wanted) -> Result<Request, String> {
    let mut environment: BTreeMap<String, String> = env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| is_kept(name, &wanted.keep))
        .collect();
    environment.extend(wanted.assignments);
    let directory = match wanted.directory {
        Some(directory) => directory,
        None => match env::current_dir() {
            Ok(directory) => directory.to_string_lossy().into_owned(),
            Err(_) => String::from("/"),
        },
    };
    Ok(Request {
        user: wanted.user.unwrap_or_else(|| String::from("root")),
        command: wanted.command,
        shell: wanted.shell.0,
        directory,
        environment,
    })
}

fn is_kept(name: &str, keep: &Keep) -> bool {
    let usual = KEPT.contains(&name) || name.starts_with("LC_");
    match keep {
        Keep::Usual => usual,
        Keep::All => !DROPPED.contains(&name),
        Keep::Also(names) => usual || names.iter().any(|n| n == name),
    }
}

fn send(stream: &UnixStream, request: &Request) -> io::Result<()> {
    let body = serde_json::to_vec(request)?;
    let length = u32::try_from(body.len())
        .map_err(io::Error::other)?
        .to_be_bytes();
    let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
    let descriptors = [input.as_fd(), output.as_fd(), error.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let sent = sendmsg(
        stream,
        &[IoSlice::new(&length)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    let mut stream = stream;
    stream.write_all(&length[sent..])?;
    stream.write_all(&body)
}

/// Passes signals on and waits for the end of the command.
async fn follow(stream: UnixStream) -> io::Result<Answer> {
    stream.set_nonblocking(true)?;
    let stream = tokio::net::UnixStream::from_std(stream)?;
    let (reader, mut writer) = stream.into_split();
    let kinds = [
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::hangup(),
        SignalKind::quit(),
        SignalKind::window_change(),
        SignalKind::user_defined1(),
        SignalKind::user_defined2(),
    ];
    let (sender, mut signals) = tokio::sync::mpsc::channel(16);
    for kind in kinds {
        let mut came = signal(kind)?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while came.recv().await.is_some() {
                let _ = sender.send(kind.as_raw_value()).await;
            }
        });
    }
    let pass_on = async {
        while let Some(number) = signals.recv().await {
            let number = u8::try_from(number).unwrap_or_default();
            if writer.write_all(&[number]).await.is_err() {
                break;
            }
        }
        std::future::pending::<()>().await;
    };
    let mut text = Vec::new();
    let mut bounded = reader.take(ANSWER_BYTES_MAX);
    tokio::select! {
        read = bounded.read_to_end(&mut text) => drop(read?),
        () = pass_on => {}
    }
    Ok(serde_json::from_slice(&text)?)
}
