//! A platform that can be made to fall ill: it passes requests on to a real server, or not.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// What is wrong with the platform.
#[derive(Debug, Default)]
pub(crate) struct Illness {
    /// Creates and deletes answer 408; reads answer (R-I1).
    pub(crate) writes_time_out: AtomicBool,
    /// How many writes it let time out.
    pub(crate) timed_out: AtomicU64,
}

/// The platform's address and what is wrong with it.
pub(crate) struct Proxy {
    pub(crate) url: String,
    pub(crate) illness: Arc<Illness>,
}

impl Proxy {
    /// In front of the server at this URL.
    pub(crate) fn before(url: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = format!("http://{}", listener.local_addr().unwrap());
        let upstream = url.strip_prefix("http://").unwrap().to_owned();
        let illness = Arc::<Illness>::default();
        let shared = illness.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (upstream, illness) = (upstream.clone(), shared.clone());
                // Whoever hangs up in the middle is its own affair.
                std::thread::spawn(move || pass_on(client, &upstream, &illness));
            }
        });
        Self { url: own, illness }
    }
}

/// One request for each connection.
fn pass_on(mut client: TcpStream, upstream: &str, illness: &Illness) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if client.read(&mut byte)? == 0 {
            return Ok(());
        }
        head.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&head).into_owned();
    let is_write = ["POST /v2/sandboxes ", "DELETE /sandboxes/"]
        .iter()
        .any(|line| text.starts_with(line));
    if is_write && illness.writes_time_out.load(Ordering::SeqCst) {
        illness.timed_out.fetch_add(1, Ordering::SeqCst);
        return client.write_all(
            b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        );
    }
    let mut server = TcpStream::connect(upstream)?;
    server.write_all(text.trim_end_matches("\r\n").as_bytes())?;
    server.write_all(b"\r\nconnection: close\r\n\r\n")?;
    let mut sending = (client.try_clone()?, server.try_clone()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut sending.0, &mut sending.1);
    });
    std::io::copy(&mut server, &mut client)?;
    let _ = server.shutdown(Shutdown::Both);
    client.shutdown(Shutdown::Both)
}
