//! What runs in the sandboxes of these tests: one static program that answers one line per
//! connection. Compiled by the tests themselves; it has no dependencies.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::{Child, Command},
    sync::Mutex,
    time::Duration,
};

const PORT: u16 = 49983;
const PATIENCE: Duration = Duration::from_millis(700);

static COUNT: Mutex<u64> = Mutex::new(0);
static KEPT: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
static OPEN: Mutex<Vec<File>> = Mutex::new(Vec::new());
static CHILDREN: Mutex<Vec<Child>> = Mutex::new(Vec::new());

unsafe extern "C" {
    fn socket(domain: i32, kind: i32, protocol: i32) -> i32;
    fn sendto(fd: i32, data: *const u8, n: usize, flags: i32, to: *const u8, n_to: u32) -> isize;
    fn recv(fd: i32, data: *mut u8, n: usize, flags: i32) -> isize;
    fn setsockopt(fd: i32, level: i32, name: i32, value: *const u8, n: u32) -> i32;
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("sleep") {
        loop {
            std::thread::sleep(Duration::from_secs(3600));
        }
    }
    eprintln!("the guest is up");
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap();
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || serve(stream));
    }
}

fn serve(mut stream: TcpStream) {
    let mut line = String::new();
    if BufReader::new(&stream).read_line(&mut line).is_err() {
        return;
    }
    let answer = answer(line.trim());
    let _ = stream.write_all(answer.replace('\n', "|").as_bytes());
}

fn answer(line: &str) -> String {
    let mut words = line.split(' ');
    let verb = words.next().unwrap_or("");
    let first = words.next().unwrap_or("");
    let number: u64 = first.parse().unwrap_or(0);
    match verb {
        "ping" => "pong".into(),
        "count" => {
            let mut count = COUNT.lock().unwrap();
            *count += 1;
            count.to_string()
        }
        "write" => told(write(first, words.next().unwrap_or("1").parse().unwrap())),
        "read" => fs::read_to_string(first).unwrap_or_else(|e| format!("error {:?}", e.kind())),
        "put" => told(fs::write(first, words.next().unwrap_or("")).map(|()| "ok".into())),
        "remove" => told(fs::remove_file(first).map(|()| "ok".into())),
        "alloc" => {
            let mut block = vec![0u8; usize::try_from(number).unwrap() << 20];
            block.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
            KEPT.lock().unwrap().push(block);
            "ok".into()
        }
        "fork" => fork(number),
        "files" => files(number),
        "spin" => {
            std::thread::spawn(|| loop {
                std::hint::spin_loop();
            });
            "ok".into()
        }
        "flood" => {
            let text = "x".repeat(1023);
            (0..number << 10).for_each(|_| eprintln!("{text}"));
            eprintln!("the end of the flood");
            "ok".into()
        }
        "tcp" => told(tcp(first)),
        "udp" => told(udp(first)),
        "icmp" => icmp(first.parse().unwrap()).into(),
        "machine" => machine(),
        "list" => told(fs::read_dir(first).map(|entries| {
            let names = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
            names.collect::<Vec<_>>().join(" ")
        })),
        "exit" => std::process::exit(i32::try_from(number).unwrap()),
        _ => "what?".into(),
    }
}

fn told(result: std::io::Result<String>) -> String {
    result.unwrap_or_else(|e| format!("error {:?}", e.kind()))
}

fn write(path: &str, mib: u64) -> std::io::Result<String> {
    let mut file = File::create(path)?;
    let block = vec![7u8; 1 << 20];
    for _ in 0..mib {
        file.write_all(&block)?;
    }
    file.flush()?;
    Ok("ok".into())
}

fn fork(wanted: u64) -> String {
    let mut children = CHILDREN.lock().unwrap();
    for done in 0..wanted {
        match Command::new("/bin/guest").arg("sleep").spawn() {
            Ok(child) => children.push(child),
            Err(e) => return format!("{done} then {:?}", e.kind()),
        }
    }
    format!("{wanted}")
}

fn files(wanted: u64) -> String {
    let mut open = OPEN.lock().unwrap();
    for done in 0..wanted {
        match File::open("/bin/guest") {
            Ok(file) => open.push(file),
            Err(e) => {
                open.clear();
                return format!("{done} then {:?}", e.raw_os_error());
            }
        }
    }
    open.clear();
    format!("{wanted}")
}

fn tcp(target: &str) -> std::io::Result<String> {
    let target: SocketAddr = target.parse().unwrap();
    let mut stream = TcpStream::connect_timeout(&target, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = [0; 64];
    let length = stream.read(&mut answer)?;
    Ok(format!("reached {}", String::from_utf8_lossy(&answer[..length])))
}

fn udp(target: &str) -> std::io::Result<String> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect(target.parse::<SocketAddr>().unwrap())?;
    socket.send(b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04test\x07example\x00\x00\x01\x00\x01")?;
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer)?;
    Ok(format!("reached {length}"))
}

/// An echo request from a socket of the kind that `ping` uses.
fn icmp(target: Ipv4Addr) -> &'static str {
    let mut to = [0u8; 16];
    to[..2].copy_from_slice(&2u16.to_ne_bytes());
    to[4..8].copy_from_slice(&target.octets());
    let echo = [8u8, 0, 0xf7, 0xfe, 0, 1, 0, 0];
    let patience = [0i64, 700_000];
    let mut answer = [0u8; 64];
    // SAFETY: every pointer is to a local array of the length given beside it.
    unsafe {
        let fd = socket(2, 2, 1);
        if fd < 0 {
            return "no socket";
        }
        setsockopt(fd, 1, 20, patience.as_ptr().cast(), 16);
        if sendto(fd, echo.as_ptr(), echo.len(), 0, to.as_ptr(), 16) < 0 {
            return "not sent";
        }
        if recv(fd, answer.as_mut_ptr(), answer.len(), 0) > 0 && answer[0] == 0 {
            "reached"
        } else {
            "silence"
        }
    }
}

fn machine() -> String {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = memory.lines().next().unwrap_or("").split_whitespace().nth(1).unwrap_or("").to_owned();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("memory_kib={total} cores={cores} hostname={}", name.trim())
}
