//! What a registry, and whoever it refers to, may be reached at: nothing that only this machine, or
//! the network that it is in, can reach (R-P2).
//!
//! ```text
//!   client of the registry ─▶ guard (a proxy on loopback) ─▶ resolve ─▶ may it? ─▶ the address checked
//! ```
//!
//! A registry's answer can send a client on (to another place for a layer, to one that signs in), and
//! a name can mean another address the next time it is asked for. So the rule is applied where
//! connections are made, once for each, to the very address that is then connected to.
//!
//! Owns its listener and its connections; both end with it. It reaches no more than any program on
//! this machine does, so it asks nobody who they are. Never: reads what passes through, beyond the
//! head of a request.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sandhold_network::is_out_of_reach;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::{JoinHandle, JoinSet},
};

/// How long the head of a request may be, in bytes.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// How long a client may take to send it.
const HEAD_MAX: Duration = Duration::from_secs(10);
/// How long one address may take to accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How many addresses of one name are tried.
const ADDRESSES_MAX: usize = 4;
/// Connections at once through one guard.
const CONNECTIONS_MAX: usize = 32;

/// The word of the list that stands for every public address.
const PUBLIC: &str = "public";

/// Which hosts registries may be at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Allowed {
    names: Vec<String>,
}

impl Allowed {
    pub(super) fn new(names: &[String]) -> Self {
        let names = names.iter().map(|name| name.trim().to_lowercase());
        Self {
            names: names.collect(),
        }
    }

    pub(super) fn add(&mut self, name: &str) {
        self.names.push(name.to_lowercase());
    }

    /// Whether the operator named this host, and so whatever address it has.
    fn is_named(&self, host: &str, port: u16) -> bool {
        let host = host.to_lowercase();
        let with_port = format!("{host}:{port}");
        let mut names = self.names.iter();
        names.any(|name| *name == host || *name == with_port)
    }

    fn is_public_enough(&self) -> bool {
        self.names.iter().any(|name| name == PUBLIC)
    }

    /// Which of a host's addresses may be connected to.
    fn of(&self, host: &str, port: u16, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, String> {
        if self.is_named(host, port) {
            return Ok(found);
        }
        let add = format!("`sandhold up --registry-allow {host}:{port}` adds it");
        if !self.is_public_enough() {
            return Err(format!(
                "{host}:{port} is not on this server's list of registries; {add}"
            ));
        }
        let (public, other): (Vec<_>, Vec<_>) = found.into_iter().partition(|a| is_public(a.ip()));
        // A name with one address inside and one outside is not to be had by luck.
        if other.is_empty() {
            Ok(public)
        } else {
            Err(format!(
                "{host}:{port} is at no public address, and this server fetches from no other; {add}"
            ))
        }
    }
}

/// Whether an address is one of the internet rather than of a machine or of the network it is in.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !is_out_of_reach(address),
        IpAddr::V6(address) => {
            let parts = address.segments();
            let low = |high: u16, low: u16| {
                let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
                Ipv4Addr::new(a, b, c, d)
            };
            match parts {
                // Addresses of the older protocol in another dress: mapped, translated, tunnelled.
                [0, 0, 0, 0, 0, 0xffff, a, b] | [0x64, 0xff9b, 0, 0, 0, 0, a, b] => {
                    !is_out_of_reach(low(a, b))
                }
                [0x2002, a, b, ..] => !is_out_of_reach(low(a, b)),
                [0x2001, 0xdb8, ..] | [0x2001, 0, ..] => false,
                // What is given out to the internet; the rest is local, reserved or for many.
                [first, ..] => first & 0xe000 == 0x2000,
            }
        }
    }
}

/// A proxy that connects only where it may.
#[derive(Debug)]
pub(super) struct Guard {
    address: SocketAddr,
    refusal: Arc<Mutex<Option<String>>>,
    task: JoinHandle<()>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Guard {
    pub(super) async fn open(allowed: Allowed) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let refusal = Arc::default();
        let task = tokio::spawn(accept(listener, allowed, Arc::clone(&refusal)));
        Ok(Self {
            address,
            refusal,
            task,
        })
    }

    /// As clients are told of it.
    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What was refused last, and what to do about it.
    pub(super) fn refusal(&self) -> Option<String> {
        let refusal = self.refusal.lock();
        refusal.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn accept(listener: TcpListener, allowed: Allowed, refusal: Arc<Mutex<Option<String>>>) {
    let allowed = Arc::new(allowed);
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    // They end with this task.
    let mut connections = JoinSet::new();
    // Never closed.
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let Ok((client, _)) = listener.accept().await else {
            return;
        };
        while connections.try_join_next().is_some() {}
        let (allowed, refusal) = (Arc::clone(&allowed), Arc::clone(&refusal));
        connections.spawn(async move {
            let _place = place;
            if let Err(error) = serve(client, &allowed, &refusal).await {
                tracing::debug!(%error, "a connection to a registry");
            }
        });
    }
}

async fn serve(
    mut client: TcpStream,
    allowed: &Allowed,
    refusal: &Mutex<Option<String>>,
) -> io::Result<()> {
    let head = tokio::time::timeout(HEAD_MAX, read_head(&mut client)).await??;
    let asked = Asked::read(&head).ok_or_else(|| io::Error::other("no request of a proxy"))?;
    let mut server = match connect(&asked.host, asked.port, allowed).await? {
        Ok(server) => server,
        Err(why) => {
            *refusal.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
            let answer = "HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            return client.write_all(answer.as_bytes()).await;
        }
    };
    match asked.on {
        None => {
            let answer = "HTTP/1.1 200 Connection established\r\n\r\n";
            client.write_all(answer.as_bytes()).await?;
        }
        Some(request) => server.write_all(&request).await?,
    }
    tokio::io::copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}

async fn read_head(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if head.len() >= HEAD_BYTES_MAX || client.read_buf(&mut head).await? == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    Ok(head)
}

/// Connects to a host where that may be; the reason if it may not.
async fn connect(
    host: &str,
    port: u16,
    allowed: &Allowed,
) -> io::Result<Result<TcpStream, String>> {
    let found = tokio::net::lookup_host((host, port)).await?;
    let places = match allowed.of(host, port, found.take(ADDRESSES_MAX).collect()) {
        Ok(places) => places,
        Err(why) => return Ok(Err(why)),
    };
    let mut last = io::ErrorKind::HostUnreachable.into();
    for place in places {
        match tokio::time::timeout(CONNECT_MAX, TcpStream::connect(place)).await {
            Ok(Ok(stream)) => {
                // A public address may be this machine's own.
                let is_own = stream.local_addr()?.ip() == stream.peer_addr()?.ip();
                if is_own && !allowed.is_named(host, port) {
                    let why = format!("{host}:{port} is this machine itself");
                    return Ok(Err(why));
                }
                return Ok(Ok(stream));
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

/// What a client asks a proxy for.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    host: String,
    port: u16,
    /// What is sent on, for a request that is not to be tunnelled.
    on: Option<Vec<u8>>,
}

impl Asked {
    fn read(head: &[u8]) -> Option<Self> {
        let end = head.windows(4).position(|end| end == b"\r\n\r\n")?;
        let text = std::str::from_utf8(head.get(..end)?).ok()?;
        let (first, fields) = text.split_once("\r\n").unwrap_or((text, ""));
        let mut words = first.split(' ');
        let (method, target, version) = (words.next()?, words.next()?, words.next()?);
        if method == "CONNECT" {
            let (host, port) = split_port(target, None)?;
            return Some(Self {
                host,
                port,
                on: None,
            });
        }
        let rest = target.strip_prefix("http://")?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = split_port(authority, Some(80))?;
        let path = if path.is_empty() { "/" } else { path };
        let mut on = format!("{method} {path} {version}\r\n");
        let is_for_us = |field: &&str| {
            let name = field.split(':').next().unwrap_or_default();
            let name = name.trim().to_lowercase();
            name == "connection" || name.starts_with("proxy-")
        };
        for field in fields.split("\r\n").filter(|field| !is_for_us(field)) {
            on.push_str(field);
            on.push_str("\r\n");
        }
        // One request on each connection, so that nothing else can follow unseen.
        on.push_str("connection: close\r\n\r\n");
        let mut on = on.into_bytes();
        on.extend_from_slice(head.get(end + 4..)?);
        Some(Self {
            host,
            port,
            on: Some(on),
        })
    }
}

fn split_port(authority: &str, default: Option<u16>) -> Option<(String, u16)> {
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
        _ => (authority, default?),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> SocketAddr {
        SocketAddr::new(address.parse().unwrap(), 443)
    }

    #[test]
    fn only_addresses_of_the_internet_are_public() {
        // R-P2
        for inside in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "fd00::1",
            "ff02::1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001:db8::1",
        ] {
            assert!(!is_public(inside.parse().unwrap()), "{inside}");
        }
        for outside in ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1"] {
            assert!(is_public(outside.parse().unwrap()), "{outside}");
        }
    }

    #[test]
    fn a_host_is_reached_if_it_is_public_or_named() {
        let list = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            Allowed::new(&names)
        };
        let outside = || vec![at("1.1.1.1")];
        let both = || vec![at("1.1.1.1"), at("10.0.0.1")];
        assert!(list(&["public"]).of("r.example", 443, outside()).is_ok());
        let refused = list(&["public"]).of("r.example", 443, both()).unwrap_err();
        assert!(
            refused.contains("--registry-allow r.example:443"),
            "{refused}"
        );
        assert!(!refused.contains("10.0.0.1"), "{refused}");
        assert!(list(&["r.example"]).of("R.example", 443, both()).is_ok());
        assert!(
            list(&["r.example:443"])
                .of("r.example", 443, both())
                .is_ok()
        );
        assert!(
            list(&["r.example:444"])
                .of("r.example", 443, both())
                .is_err()
        );
        // A list without the word is all there is.
        assert!(list(&["r.example"]).of("other", 443, outside()).is_err());
    }

    #[test]
    fn a_request_of_a_proxy_is_read_and_sent_on_without_what_was_for_the_proxy() {
        let tunnel = Asked::read(b"CONNECT [::1]:443 HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        assert_eq!(
            (tunnel.host.as_str(), tunnel.port, tunnel.on),
            ("::1", 443, None)
        );
        let head = b"GET http://h:5000/v2/?a=b HTTP/1.1\r\nhost: h:5000\r\nProxy-Connection: x\r\n\r\nbody";
        let plain = Asked::read(head).unwrap();
        assert_eq!((plain.host.as_str(), plain.port), ("h", 5000));
        let on = String::from_utf8(plain.on.unwrap()).unwrap();
        assert_eq!(
            on,
            "GET /v2/?a=b HTTP/1.1\r\nhost: h:5000\r\nconnection: close\r\n\r\nbody"
        );
        for wrong in [
            "GET / HTTP/1.1\r\n\r\n",
            "CONNECT h HTTP/1.1\r\n\r\n",
            "\r\n\r\n",
        ] {
            assert_eq!(Asked::read(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
