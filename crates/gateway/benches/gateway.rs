//! What the gateway costs: added latency against a direct connection, throughput against nginx.
//!
//! ```text
//!   this process ──┬────────────────────────▶ upstream   (own process, one thread)
//!    (the load)    ├──▶ gateway (own process) ─▶ upstream
//!                  └──▶ nginx (own processes) ─▶ upstream
//! ```
//!
//! All three ways are measured in turns within one run, over loopback, with the same requests and
//! kept connections. `cargo bench -p sandhold-gateway`; it prints what it measured.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    missing_docs
)]

use std::{
    convert::Infallible,
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use hyper::{body::Incoming, client::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use sandhold_gateway::{Gateway, GatewayConfig, serve};
use sandhold_platform::{
    ActivityKind, DialError, Hold, Holds, Route, RouteLookup, Routes, SandboxView, StateChange,
    WakeError,
};
use sandhold_types::{Deadline, SandboxId, SystemClock};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::broadcast,
};

#[path = "../tests/gateway/view.rs"]
mod view;

const WARM_UP: usize = 500;
const LATENCY_ROUNDS: usize = 20;
const REQUESTS_PER_ROUND: usize = 500;
const CONNECTIONS: usize = 64;
const LARGE_CONNECTIONS: usize = 8;
const THROUGHPUT_ROUNDS: usize = 3;
const THROUGHPUT_TIME: Duration = Duration::from_secs(4);
const SMALL: usize = 1024;
const LARGE: usize = 1024 * 1024;

fn main() {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("upstream") => single_threaded(upstream()),
        Some("gateway") => multi_threaded(gateway(arguments.next().unwrap().parse().unwrap())),
        _ => multi_threaded(measure()),
    }
}

fn single_threaded(work: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap().block_on(work);
}

fn multi_threaded(work: impl Future<Output = ()>) {
    tokio::runtime::Runtime::new().unwrap().block_on(work);
}

// ---- the other processes -------------------------------------------------------------------

async fn bound() -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    std::io::stdout().flush().unwrap();
    listener
}

/// Answers every request with as many bytes as its path says.
async fn upstream() {
    let listener = bound().await;
    let (small, large) = (
        Bytes::from(vec![b'x'; SMALL]),
        Bytes::from(vec![b'x'; LARGE]),
    );
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (small, large) = (small.clone(), large.clone());
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let body = match request.uri().path() {
                    "/large" => large.clone(),
                    _ => small.clone(),
                };
                async { Ok::<_, Infallible>(Response::new(Full::new(body))) }
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

#[derive(Debug)]
struct OneSandbox {
    upstream: SocketAddr,
    route: Route,
    touches: AtomicU64,
    holds: Arc<Holds>,
    changes: broadcast::Sender<StateChange>,
}

#[async_trait]
impl Routes for OneSandbox {
    fn route(&self, _: &SandboxId) -> RouteLookup {
        RouteLookup::Live(self.route.clone())
    }

    fn reachable(&self) -> Vec<Arc<SandboxView>> {
        vec![Arc::clone(&self.route.sandbox)]
    }

    async fn wake(&self, id: &SandboxId, _: Deadline) -> Result<Route, WakeError> {
        match self.route(id) {
            RouteLookup::Live(route) => Ok(route),
            _ => Err(WakeError::NotAllowed),
        }
    }

    fn try_hold(&self, _: &Route) -> Option<Hold> {
        Some(self.holds.hold())
    }

    async fn hold(&self, _: &Route) -> Result<Hold, DialError> {
        Ok(self.holds.hold())
    }

    fn changes(&self) -> broadcast::Receiver<StateChange> {
        self.changes.subscribe()
    }

    async fn dial(&self, _: &Route, _: u16, _: Deadline) -> Result<TcpStream, DialError> {
        TcpStream::connect(self.upstream)
            .await
            .map_err(DialError::Socket)
    }

    fn touch(&self, _: &SandboxId, _: ActivityKind) {
        self.touches.fetch_add(1, Ordering::Relaxed);
    }
}

async fn gateway(upstream: SocketAddr) {
    let routes = OneSandbox {
        upstream,
        route: Route {
            sandbox: Arc::new(view::view(view::ID, 1)),
        },
        touches: AtomicU64::new(0),
        holds: Arc::default(),
        changes: broadcast::Sender::new(1),
    };
    let gateway = Gateway::new(
        Arc::new(routes),
        Arc::new(SystemClock),
        GatewayConfig::default(),
    );
    let listener = bound().await;
    serve(
        listener,
        axum::Router::new(),
        gateway,
        std::future::pending(),
    )
    .await;
}

/// A child process that ends with this one.
struct Helper {
    child: Child,
    /// Ends it in good order; otherwise it is killed.
    stop: Option<Command>,
}

impl Drop for Helper {
    fn drop(&mut self) {
        let stopped = self.stop.as_mut().map(Command::status);
        if !stopped.is_some_and(|status| status.is_ok_and(|status| status.success())) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

fn start(arguments: &[&str]) -> (Helper, SocketAddr) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    (Helper { child, stop: None }, line.trim().parse().unwrap())
}

fn start_nginx(directory: &Path, upstream: SocketAddr) -> (Helper, SocketAddr) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let home = directory.display();
    let config = format!(
        "daemon off; worker_processes auto; pid {home}/pid; error_log {home}/error.log;
         events {{ worker_connections 4096; }}
         http {{
           access_log off; client_body_temp_path {home}/b; proxy_temp_path {home}/p;
           fastcgi_temp_path {home}/f; uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
           keepalive_requests 100000000;
           upstream sandbox {{ server {upstream}; keepalive 128; keepalive_requests 100000000; }}
           server {{
             listen {address};
             location / {{
               proxy_pass http://sandbox; proxy_http_version 1.1;
               proxy_set_header Connection \"\"; proxy_set_header Host $host;
               proxy_set_header X-Forwarded-For $remote_addr; proxy_buffering off;
             }}
           }}
         }}"
    );
    let path = directory.join("nginx.conf");
    std::fs::write(&path, config).unwrap();
    let child = Command::new("nginx").arg("-c").arg(&path).spawn().unwrap();
    // Killed, it would leave its workers behind.
    let mut stop = Command::new("nginx");
    stop.arg("-c").arg(&path).args(["-s", "stop"]);
    let helper = Helper {
        child,
        stop: Some(stop),
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    while std::net::TcpStream::connect(address).is_err() {
        assert!(Instant::now() < deadline, "nginx does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    (helper, address)
}

// ---- the load ------------------------------------------------------------------------------

struct Load {
    sender: http1::SendRequest<Empty<Bytes>>,
}

impl Load {
    async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self { sender }
    }

    async fn get(&mut self, path: &str) -> usize {
        let request = Request::get(path)
            .header("host", format!("3000-{}.bench.test", view::ID))
            .body(Empty::new())
            .unwrap();
        self.sender.ready().await.unwrap();
        let response = self.sender.send_request(request).await.unwrap();
        assert_eq!(response.status(), 200);
        let mut body = response.into_body();
        let mut length = 0;
        while let Some(frame) = body.frame().await {
            length += frame.unwrap().data_ref().map_or(0, Bytes::len);
        }
        length
    }
}

/// Microseconds of each request on one connection, one after another.
async fn latencies(load: &mut Load, requests: usize) -> Vec<f64> {
    let mut samples = Vec::with_capacity(requests);
    for _ in 0..requests {
        let begun = Instant::now();
        load.get("/small").await;
        samples.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    samples
}

/// Requests per second over many connections.
async fn throughput(address: SocketAddr, path: &'static str, connections: usize) -> f64 {
    let until = Instant::now() + THROUGHPUT_TIME;
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..connections {
        workers.spawn(async move {
            let mut load = Load::connect(address).await;
            let mut done = 0u32;
            while Instant::now() < until {
                load.get(path).await;
                done += 1;
            }
            done
        });
    }
    let mut done = 0;
    while let Some(count) = workers.join_next().await {
        done += count.unwrap();
    }
    f64::from(done) / THROUGHPUT_TIME.as_secs_f64()
}

/// Processor time, in microseconds, that a process and its children have used so far.
fn processor_us(parent: u32) -> f64 {
    /// Of `/proc/*/stat`; every Linux that runs this counts in hundredths of a second.
    const TICK_US: f64 = 10_000.0;
    let mut ticks = 0.0;
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        let Some((before, after)) = stat.rsplit_once(')') else {
            continue;
        };
        let fields: Vec<&str> = after.split_whitespace().collect();
        let is_it = before.split_whitespace().next() == Some(&parent.to_string());
        if is_it || fields[1] == parent.to_string() {
            ticks += fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
        }
    }
    ticks * TICK_US
}

fn percentile(samples: &mut [f64], percent: usize) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[(samples.len() - 1) * percent / 100]
}

async fn measure() {
    let directory = tempfile::tempdir().unwrap();
    let (_upstream, direct) = start(&["upstream"]);
    let (gateway_process, gateway) = start(&["gateway", &direct.to_string()]);
    let (nginx_process, nginx) = start_nginx(directory.path(), direct);
    let processes = [
        None,
        Some(gateway_process.child.id()),
        Some(nginx_process.child.id()),
    ];
    let ways = [("direct", direct), ("gateway", gateway), ("nginx", nginx)];

    println!(
        "latency, one connection, {SMALL} bytes, {} requests each way",
        LATENCY_ROUNDS * REQUESTS_PER_ROUND
    );
    let mut samples: [Vec<f64>; 3] = Default::default();
    let mut loads = Vec::new();
    for (_, address) in ways {
        let mut load = Load::connect(address).await;
        latencies(&mut load, WARM_UP).await;
        loads.push(load);
    }
    for _ in 0..LATENCY_ROUNDS {
        for (load, samples) in loads.iter_mut().zip(&mut samples) {
            samples.extend(latencies(load, REQUESTS_PER_ROUND).await);
        }
    }
    let medians = samples.each_mut().map(|samples| percentile(samples, 50));
    for ((name, _), samples) in ways.iter().zip(&mut samples) {
        let (median, p95) = (percentile(samples, 50), percentile(samples, 95));
        println!("  {name:8} median {median:7.1} us   p95 {p95:7.1} us");
    }
    println!(
        "  added by the gateway: {:.1} us (median; bound: 150)",
        medians[1] - medians[0]
    );

    for (path, bytes, connections) in [
        ("/small", SMALL, CONNECTIONS),
        ("/large", LARGE, LARGE_CONNECTIONS),
    ] {
        println!("throughput, {connections} connections, {bytes} bytes");
        let mut rates: [Vec<f64>; 3] = Default::default();
        let mut used = [0.0; 3];
        for _ in 0..THROUGHPUT_ROUNDS {
            for (way, (_, address)) in ways.iter().enumerate() {
                let before = processes[way].map_or(0.0, processor_us);
                rates[way].push(throughput(*address, path, connections).await);
                used[way] += processes[way].map_or(0.0, processor_us) - before;
            }
        }
        let totals = rates.each_ref().map(|rates| rates.iter().sum::<f64>());
        let medians = rates.each_mut().map(|rates| percentile(rates, 50));
        for (way, (name, _)) in ways.iter().enumerate() {
            let each = used[way] / (totals[way] * THROUGHPUT_TIME.as_secs_f64());
            println!(
                "  {name:8} {:9.0} requests/s   processor {each:6.1} us each",
                medians[way]
            );
        }
        println!(
            "  gateway to nginx: {:.0} % (bound: 80)",
            100.0 * medians[1] / medians[2]
        );
    }
}
