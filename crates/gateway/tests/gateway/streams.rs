//! Long and large bodies: one by one, at constant memory, and over when a side leaves.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
};

use crate::support::*;

const MIB: u64 = 1024 * 1024;
const CHUNK: usize = 64 * 1024;

/// `left` bytes in chunks; counts what was taken.
struct Generated {
    left: u64,
    taken: Arc<AtomicU64>,
    chunk: Bytes,
}

impl Generated {
    fn body(left: u64, taken: &Arc<AtomicU64>) -> AnyBody {
        Self {
            left,
            taken: Arc::clone(taken),
            chunk: Bytes::from(vec![b'y'; CHUNK]),
        }
        .boxed()
    }
}

impl Body for Generated {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let length = self.left.min(CHUNK as u64);
        self.left -= length;
        self.taken.fetch_add(length, Ordering::SeqCst);
        let chunk = self.chunk.slice(..usize::try_from(length).unwrap());
        Poll::Ready(Some(Ok(Frame::data(chunk))))
    }
}

/// The most memory that this process has used, in bytes, since the last reset.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM"))
        .unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

fn reset_peak_memory() -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    peak_memory()
}

async fn length_of(mut body: Incoming) -> u64 {
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        length += frame.unwrap().data_ref().map_or(0, Bytes::len) as u64;
    }
    length
}

async fn count_upload(request: Request<Incoming>) -> Response<AnyBody> {
    let length = length_of(request.into_body()).await;
    Response::new(whole(length.to_string()))
}

#[tokio::test]
async fn uploads_of_any_size_pass_at_constant_memory() {
    // BC-059. Client, gateway and server are all in this process.
    let world = World::new().await;
    world.serve(49983, count_upload).await;
    let mut client = world.client().await;
    let before = reset_peak_memory();
    let kib = 1024;
    for size in [
        96 * kib,
        127 * kib,
        128 * kib,
        129 * kib,
        MIB,
        64 * MIB,
        300 * MIB,
    ] {
        let taken = Arc::default();
        let request = request(49983, "POST", "/files").body(Generated::body(size, &taken));
        let answer = client.fetch(request.unwrap()).await;
        assert_eq!(answer.text, size.to_string(), "without a length");
    }
    let taken = Arc::default();
    let request = request(49983, "POST", "/files")
        .header("content-length", 8 * MIB)
        .body(Generated::body(8 * MIB, &taken));
    let answer = client.fetch(request.unwrap()).await;
    assert_eq!(answer.text, (8 * MIB).to_string(), "with a length");
    let grown = peak_memory() - before;
    assert!(grown < 32 * MIB, "memory grew by {} MiB", grown / MIB);
}

#[tokio::test]
async fn downloads_pass_at_constant_memory_four_at_once() {
    // BC-011
    let world = World::new().await;
    let taken: Arc<AtomicU64> = Arc::default();
    world
        .serve(3000, move |_| {
            let body = Generated::body(200 * MIB, &taken);
            async { Response::new(body) }
        })
        .await;
    let before = reset_peak_memory();
    let mut downloads = tokio::task::JoinSet::new();
    for n in 0..4 {
        let address = world.address;
        downloads.spawn(async move {
            if n % 2 == 0 {
                let mut client = Client::connect(address).await;
                length_of(client.send(get(3000, "/")).await.into_body()).await
            } else {
                let uri = format!("http://{}/", host(3000));
                let request = Request::get(uri).body(nothing()).unwrap();
                let mut client = http2_client(address).await;
                length_of(client.send_request(request).await.unwrap().into_body()).await
            }
        });
    }
    while let Some(length) = downloads.join_next().await {
        assert_eq!(length.unwrap(), 200 * MIB);
    }
    let grown = peak_memory() - before;
    assert!(grown < 64 * MIB, "memory grew by {} MiB", grown / MIB);
}

#[tokio::test]
async fn a_reader_that_never_reads_holds_up_only_itself() {
    // BC-013
    let world = World::new().await;
    let taken: Arc<AtomicU64> = Arc::default();
    let counter = Arc::clone(&taken);
    world
        .serve(3000, move |_| {
            let body = Generated::body(u64::MAX, &counter);
            async { Response::new(body) }
        })
        .await;
    world.serve(3001, echo).await;
    let before = reset_peak_memory();
    let mut lazy = world.client().await;
    let unread = lazy.send(get(3000, "/")).await;
    let mut other = world.client().await;
    for _ in 0..500 {
        assert_eq!(other.get(3001, "/").await.status, 200);
    }
    let buffered = taken.load(Ordering::SeqCst);
    assert!(buffered < 48 * MIB, "{} MiB were taken", buffered / MIB);
    let grown = peak_memory() - before;
    assert!(grown < 32 * MIB, "memory grew by {} MiB", grown / MIB);
    drop(unread);
}

/// A body that says what the test sends to it.
struct Told(mpsc::Receiver<Bytes>);

impl Body for Told {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0
            .poll_recv(cx)
            .map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

/// Serves one event stream on port 3000 and returns its pen.
async fn event_stream(world: &World) -> (mpsc::Sender<Bytes>, Served) {
    let (pen, paper) = mpsc::channel(1);
    let paper = Arc::new(std::sync::Mutex::new(Some(paper)));
    let served = world
        .serve(3000, move |request: Request<Incoming>| {
            let paper = paper.lock().unwrap().take().unwrap();
            assert_eq!(request.headers()["accept-encoding"], "gzip");
            async {
                Response::builder()
                    .header("content-type", "text/event-stream")
                    .body(Told(paper).boxed())
                    .unwrap()
            }
        })
        .await;
    (pen, served)
}

fn events() -> Request<AnyBody> {
    request(3000, "GET", "/events")
        .header("accept-encoding", "gzip")
        .body(nothing())
        .unwrap()
}

#[tokio::test]
async fn events_arrive_one_by_one_and_uncompressed() {
    // BC-111: the next event is sent only when the one before has arrived.
    let world = World::new().await;
    let (pen, _) = event_stream(&world).await;
    let mut client = world.client().await;
    let response = client.send(events()).await;
    assert!(!response.headers().contains_key("content-encoding"));
    let mut body = response.into_body();
    for n in 0..30 {
        let event = Bytes::from(format!("data: {n}\n\n"));
        pen.send(event.clone()).await.unwrap();
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), event);
    }
    drop(pen);
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn moving_bytes_count_as_use() {
    // R-L5
    let world = World::new().await;
    let (pen, _) = event_stream(&world).await;
    let mut client = world.client().await;
    let mut body = client.send(events()).await.into_body();
    let touches = || world.routes.stream_touches.load(Ordering::SeqCst);
    let started = tokio::time::Instant::now();
    while touches() == 0 {
        assert!(started.elapsed().as_secs() < 20, "never noted");
        pen.send(Bytes::from_static(b"data: x\n\n")).await.unwrap();
        body.frame().await.unwrap().unwrap();
    }
    assert!(touches() <= 2, "and not for every chunk");
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_request_in_the_sandbox() {
    // The interpreter interrupts a cell when its client goes (wire contract 3).
    let world = World::new().await;
    let (pen, served) = event_stream(&world).await;
    let mut client = world.client().await;
    let response = client.send(events()).await;
    drop((response, client));
    eventually("closed inside", || served.closed() == 1).await;
    assert!(pen.is_closed());

    // The same before an answer has begun.
    let silent = world.serve(3001, |_| std::future::pending()).await;
    let mut client = world.client().await;
    let pending = tokio::spawn(async move { client.get(3001, "/").await.status });
    eventually("under way", || silent.connections() == 1).await;
    pending.abort();
    eventually("closed inside", || silent.closed() == 1).await;
    eventually("nothing is under way", || world.gateway.counts().0 == 0).await;
}

#[tokio::test]
async fn an_upload_that_is_awaited_is_asked_for_and_a_refused_one_is_not() {
    // 100-continue
    let world = World::new().await;
    world.serve(3000, count_upload).await;
    let head = |port: u16| {
        format!(
            "POST / HTTP/1.1\r\nhost: {}\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n",
            host(port)
        )
    };
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(head(3000).as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 100"));
    stream.write_all(b"data").await.unwrap();
    assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
    assert_eq!(stream.read_u8().await.unwrap(), b'4');

    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(head(3999).as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 502"));
}

#[tokio::test]
async fn an_answer_before_the_end_of_the_upload_arrives() {
    let world = World::new().await;
    world
        .serve(3000, |_| async {
            Response::builder()
                .status(413)
                .body(whole("too much"))
                .unwrap()
        })
        .await;
    let (pen, paper) = mpsc::channel(1);
    let request = request(3000, "POST", "/")
        .body(Told(paper).boxed())
        .unwrap();
    let mut client = world.client().await;
    pen.send(Bytes::from_static(b"begin")).await.unwrap();
    let answer = client.fetch(request).await;
    assert_eq!((answer.status, answer.text.as_str()), (413, "too much"));
    drop(pen);
    // That connection was not kept for others.
    assert_eq!(world.gateway.counts(), (0, 0));
}
