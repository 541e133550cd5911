//! A way to names for guests: a relay on the router's address that passes questions on to the
//! machine's own resolvers.
//!
//! ```text
//!   guest ─▶ 169.254.0.22:53 (router namespace) ─▶ relay ─▶ `nameserver` of the machine (its own
//!                                                           namespace, loopback included)
//! ```
//!
//! The guest's `/etc/resolv.conf` names the router, in every sandbox the same, so it is part of the
//! template and right after every restore (BC-107). The relay understands nothing of what it
//! passes on; what it bounds is how much.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
    task::JoinSet,
};

use super::address;

/// The port of the domain name system.
const PORT: u16 = 53;
/// Where the relay listens.
pub(super) const AT: SocketAddrV4 = SocketAddrV4::new(address::ROUTER, PORT);
/// How many questions of one sandbox may be open; more are dropped, and asked again by the guest.
const QUESTIONS_MAX: usize = 256;
/// How many connections of one sandbox may be open.
const CONNECTIONS_MAX: usize = 32;
/// How long one resolver may take to answer a question before the next is asked.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// How long a connection may last.
const CONNECTION_MAX: Duration = Duration::from_secs(30);
/// The largest datagram.
const DATAGRAM_BYTES_MAX: usize = 4096;
/// How many resolvers are asked; more are not used by the C library either.
const RESOLVERS_MAX: usize = 3;
const CONFIGURATION: &str = "/etc/resolv.conf";

/// The relay of one sandbox; dropping it ends it.
#[derive(Debug)]
pub(super) struct Relay {
    _tasks: JoinSet<()>,
}

impl Relay {
    /// Serves on sockets that are open in the sandbox's router namespace.
    pub(super) fn start(datagrams: UdpSocket, connections: TcpListener) -> Self {
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_datagrams(Arc::new(datagrams)));
        tasks.spawn(serve_connections(connections));
        Self { _tasks: tasks }
    }
}

async fn serve_datagrams(socket: Arc<UdpSocket>) {
    let places = Arc::new(Semaphore::new(QUESTIONS_MAX));
    let mut questions = JoinSet::new();
    let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
            // An answer that could not be delivered; the socket itself is still good.
            tokio::task::yield_now().await;
            continue;
        };
        while questions.try_join_next().is_some() {}
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            continue;
        };
        let question = buffer[..length].to_vec();
        let socket = Arc::clone(&socket);
        questions.spawn(async move {
            if let Some(answer) = ask(&question).await {
                let _ = socket.send_to(&answer, from).await;
            }
            std::mem::drop(place);
        });
    }
}

/// Passes a question on until a resolver answers.
async fn ask(question: &[u8]) -> Option<Vec<u8>> {
    for resolver in resolvers() {
        let asked = tokio::time::timeout(ANSWER_MAX, ask_one(question, resolver)).await;
        if let Ok(Ok(answer)) = asked {
            return Some(answer);
        }
    }
    None
}

async fn ask_one(question: &[u8], resolver: SocketAddr) -> io::Result<Vec<u8>> {
    let any: IpAddr = match resolver {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(resolver).await?;
    socket.send(question).await?;
    let mut answer = vec![0; DATAGRAM_BYTES_MAX];
    let length = socket.recv(&mut answer).await?;
    answer.truncate(length);
    Ok(answer)
}

async fn serve_connections(listener: TcpListener) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        let Ok((guest, _)) = listener.accept().await else {
            tokio::task::yield_now().await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        connections.spawn(async move {
            let _ = tokio::time::timeout(CONNECTION_MAX, pass_on(guest)).await;
            std::mem::drop(place);
        });
    }
}

async fn pass_on(mut guest: TcpStream) -> io::Result<()> {
    for resolver in resolvers() {
        if let Ok(Ok(mut stream)) =
            tokio::time::timeout(ANSWER_MAX, TcpStream::connect(resolver)).await
        {
            tokio::io::copy_bidirectional(&mut guest, &mut stream).await?;
            return Ok(());
        }
    }
    Ok(())
}

/// The machine's resolvers, as they are now: they change when it moves to another network.
fn resolvers() -> Vec<SocketAddr> {
    parse_resolvers(&fs::read_to_string(CONFIGURATION).unwrap_or_default())
}

fn parse_resolvers(text: &str) -> Vec<SocketAddr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        let address = (words.next() == Some("nameserver")).then(|| words.next())??;
        address.parse::<IpAddr>().ok()
    };
    text.lines()
        .filter_map(address)
        .map(|address| SocketAddr::new(address, PORT))
        .take(RESOLVERS_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolvers_are_read_as_the_c_library_reads_them() {
        // BC-107
        let text = "# comment\nsearch a\nnameserver 127.0.0.53\nnameserver ::1\nnameserver x\n\
                    nameserver 1.1.1.1\nnameserver 9.9.9.9\n";
        let told: Vec<String> = parse_resolvers(text)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(told, ["127.0.0.53:53", "[::1]:53", "1.1.1.1:53"]);
    }
}
