//! Sockets in other network namespaces.
//!
//! ```text
//!   dial ─▶ bounded queue ─▶ thread: setns, socket ─▶ back to the caller, who connects
//! ```
//!
//! A socket keeps the namespace it was made in, so only its making needs a thread that is there;
//! connecting is done by whoever asked, without holding anybody up. The threads never do anything
//! but this, so it does not matter in which namespace they are left.

use std::{
    fs::File,
    io,
    net::{SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, bind, listen, setsockopt, socket,
    sockopt,
};
use tokio::sync::oneshot;

use super::namespace::enter;

/// Threads that make sockets. Each needs some ten microseconds for one.
const THREADS: usize = 2;
/// How many may wait for a socket.
const QUEUE_MAX: usize = 1024;
/// How many connections may wait to be taken by a listener of ours.
const BACKLOG: i32 = 64;

type Answer = oneshot::Sender<io::Result<OwnedFd>>;

/// What kind of socket.
#[derive(Debug, Clone, Copy)]
enum Wanted {
    /// One that can be connected to a sandbox.
    Stream,
    /// One that listens here.
    Listener(SocketAddrV4),
    /// One that takes datagrams here.
    Datagrams(SocketAddrV4),
}

struct Request {
    namespace: Arc<File>,
    wanted: Wanted,
    answer: Answer,
}

/// The threads' queue.
#[derive(Debug, Clone)]
pub(super) struct Dialler {
    queue: SyncSender<Request>,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request")
            .field("wanted", &self.wanted)
            .finish_non_exhaustive()
    }
}

impl Dialler {
    /// Starts the threads; they end when the last handle is dropped.
    pub(super) fn start() -> io::Result<Self> {
        let (queue, requests) = sync_channel(QUEUE_MAX);
        let requests = Arc::new(Mutex::new(requests));
        for _ in 0..THREADS {
            let requests = Arc::clone(&requests);
            let thread = thread::Builder::new().name("dialler".to_owned());
            thread.spawn(move || serve(&requests))?;
        }
        Ok(Self { queue })
    }

    /// An unconnected stream socket in `namespace`.
    pub(super) async fn stream(&self, namespace: &Arc<File>) -> io::Result<TcpStream> {
        Ok(self.request(namespace, Wanted::Stream).await?.into())
    }

    /// A listening socket in `namespace`.
    pub(super) async fn listener(
        &self,
        namespace: &Arc<File>,
        at: SocketAddrV4,
    ) -> io::Result<TcpListener> {
        Ok(self.request(namespace, Wanted::Listener(at)).await?.into())
    }

    /// A datagram socket in `namespace`.
    pub(super) async fn datagrams(
        &self,
        namespace: &Arc<File>,
        at: SocketAddrV4,
    ) -> io::Result<UdpSocket> {
        Ok(self.request(namespace, Wanted::Datagrams(at)).await?.into())
    }

    async fn request(&self, namespace: &Arc<File>, wanted: Wanted) -> io::Result<OwnedFd> {
        let (answer, answered) = oneshot::channel();
        let request = Request {
            namespace: Arc::clone(namespace),
            wanted,
            answer,
        };
        self.queue.try_send(request).map_err(|e| match e {
            TrySendError::Full(_) => io::Error::from(io::ErrorKind::WouldBlock),
            TrySendError::Disconnected(_) => io::Error::other("the dialler has ended"),
        })?;
        answered
            .await
            .map_err(|_| io::Error::other("the dialler has ended"))?
    }
}

fn serve(requests: &Mutex<Receiver<Request>>) {
    loop {
        let next = requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .recv();
        let Ok(request) = next else { return };
        let made = enter(&request.namespace).and_then(|()| make(request.wanted));
        // The caller may have run out of time.
        let _ = request.answer.send(made);
    }
}

fn make(wanted: Wanted) -> io::Result<OwnedFd> {
    let kind = match wanted {
        Wanted::Stream | Wanted::Listener(_) => SockType::Stream,
        Wanted::Datagrams(_) => SockType::Datagram,
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let made = socket(AddressFamily::Inet, kind, flags, None)?;
    let raw = std::os::fd::AsRawFd::as_raw_fd(&made);
    match wanted {
        Wanted::Stream => {}
        Wanted::Listener(at) => {
            setsockopt(&made, sockopt::ReuseAddr, &true)?;
            bind(raw, &SockaddrIn::from(at))?;
            listen(&made, Backlog::new(BACKLOG)?)?;
        }
        Wanted::Datagrams(at) => bind(raw, &SockaddrIn::from(at))?,
    }
    Ok(made)
}
