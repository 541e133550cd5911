"""From inside, with root's rights: what must be out of reach, and whom a glutton hurts (R-P2)."""

import contextlib
import socket
import subprocess
import threading
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import wire
from conftest import eventually
from e2b import Sandbox

PROBE = """
import socket, sys
kind, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
try:
    if kind == 'tcp':
        s = socket.create_connection((host, port), timeout=2)
        s.sendall(b'from-inside')
        print('REACHED')
    else:
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for _ in range(3):
            s.sendto(b'from-inside', (host, port))
        print('sent')
except OSError as error:
    print('refused', error)
"""


def host_addresses():
    text = subprocess.run(
        ["ip", "-4", "-o", "address", "show"], capture_output=True, text=True, check=True
    ).stdout
    return sorted({line.split()[3].split("/")[0] for line in text.splitlines()})


@pytest.fixture(scope="module")
def inside():
    sandbox = Sandbox.create("base", timeout=900)
    sandbox.files.write("/tmp/probe.py", PROBE)
    yield sandbox
    sandbox.kill()


def probe(sandbox, kind, host, port):
    return sandbox.commands.run(f"python3 /tmp/probe.py {kind} {host} {port}", user="root").stdout


@contextlib.contextmanager
def listening(kind):
    """A listener on every address of the host, and what it got."""
    family = socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM
    got = []
    with socket.socket(socket.AF_INET, family) as listener:
        listener.bind(("0.0.0.0", 0))
        if kind == "tcp":
            listener.listen()
        listener.settimeout(0.2)
        stop = threading.Event()

        def watch():
            while not stop.is_set():
                try:
                    got.append(listener.accept()[1] if kind == "tcp" else listener.recvfrom(99))
                except TimeoutError:
                    pass

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield listener.getsockname()[1], got
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_the_host_is_out_of_reach(inside, kind):
    gateway = inside.commands.run("ip route 2>/dev/null | awk '/default/{print $3}'").stdout.strip()
    with listening(kind) as (port, got):
        for address in [*host_addresses(), gateway or "169.254.0.22"]:
            answer = probe(inside, kind, address, port)
            if address == "127.0.0.1":
                continue
            assert "REACHED" not in answer, address
        assert got == []


def test_the_api_port_is_out_of_reach(inside):
    port = urlsplit(wire.URL).port
    for address in [*host_addresses(), "169.254.0.22"]:
        assert "REACHED" not in probe(inside, "tcp", address, port), address


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "10.255.255.53", "172.16.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254"],
)
def test_private_ranges_and_the_metadata_address_are_out_of_reach(inside, address):
    for port in (80, 53):
        assert "REACHED" not in probe(inside, "tcp", address, port)


def test_no_echo_from_the_host_or_private_ranges(inside):
    for address in [a for a in host_addresses() if not a.startswith("127.")] + ["10.0.0.1"]:
        result = inside.commands.run(f"ping -c 1 -W 1 {address} >/dev/null 2>&1; echo $?", user="root")
        assert result.stdout.strip() != "0", address


def test_a_neighbour_is_out_of_reach(inside, new):
    neighbour = new()
    neighbour.commands.run("python3 -m http.server 8765", background=True, timeout=0)
    from test_gateway import get

    eventually(lambda: get(neighbour, "/", port=8765).status_code == 200)
    own = inside.commands.run("hostname -I").stdout.split()
    others = neighbour.commands.run("hostname -I").stdout.split()
    candidates = {*own, *others, "169.254.0.21", "169.254.0.22", "198.18.0.1", "198.18.0.2"}
    for address in candidates:
        assert "REACHED" not in probe(inside, "tcp", address, 8765), address


def test_no_file_process_or_environment_of_the_host_is_visible(inside):
    mark = uuid.uuid4().hex
    path = Path("/tmp") / f"mark-{mark}"
    path.write_text(mark)
    child = subprocess.Popen(["sleep", "3600"], env={"MARK": mark})
    try:
        run = lambda command: inside.commands.run(command, user="root").stdout
        assert run(f"ls /tmp/mark-{mark} 2>/dev/null || echo none") == "none\n"
        assert mark not in run("cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n' || true")
        assert "sleep\n3600" not in run("cat /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n' || true")
        assert run("cat /proc/1/cmdline | tr -d '\\0'").startswith("/.sandhold/agent")
        assert run("hostname").strip() != socket.gethostname()
        assert "E2B_API_KEY" not in run("cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n' || true")
        assert "SANDHOLD_CONTROL_TOKEN" not in run("env")
    finally:
        child.kill()
        child.wait()
        path.unlink()


def test_kernel_is_not_the_hosts(inside):
    release = inside.commands.run("uname -r").stdout.strip()
    assert release != subprocess.run(["uname", "-r"], capture_output=True, text=True).stdout.strip()


def test_without_internet_there_is_no_way_out(new):
    closed = new(allow_internet_access=False)
    closed.files.write("/tmp/probe.py", PROBE)
    for address in ("1.1.1.1", "8.8.8.8", "93.184.216.34"):
        assert "REACHED" not in probe(closed, "tcp", address, 443)


HOGS = {
    "fork bomb": "python3 -c \"\nimport os\nwhile True:\n  try: os.fork()\n  except OSError: pass\"",
    "memory": "python3 -c \"a = []\nwhile True: a.append(b'x' * (64 << 20))\"",
    "disk": "dd if=/dev/zero of=/home/user/full bs=1M count=20000",
    "files": "python3 -c \"\nimport os\nf = []\nwhile True:\n  try: f.append(os.open('/etc/passwd', 0))\n  except OSError: pass\"",
}


@pytest.mark.parametrize("kind", HOGS)
def test_a_glutton_hurts_only_itself(new, kind):
    neighbour, glutton = new(), new()
    hog = glutton.commands.run(HOGS[kind], background=True, timeout=0)

    def fed():
        """The glutton's process or its sandbox has ended, or it goes on within its limits."""
        try:
            return hog.pid not in {p.pid for p in glutton.commands.list(request_timeout=5)}
        except Exception:
            return True

    for _ in range(30):
        assert neighbour.commands.run("echo well", timeout=20).stdout == "well\n"
        if fed():
            break
    assert neighbour.is_running()
    # Whatever state the glutton is in, it can be removed, and its end is told.
    if not glutton.is_running():
        from test_gateway import get

        answer = wire.api("GET", f"/sandboxes/{glutton.sandbox_id}")
        assert answer.status_code == 404
        told = answer.json()["message"] + get(glutton, "/").json()["message"]
        assert "memory" in told or "disk" in told or "ended" in told, told
    glutton.kill()
    assert glutton.is_running() is False


def test_too_much_memory_ends_the_process_or_is_told(new):
    # R-L12, BC-106
    sandbox = new()
    script = "python3 -c \"b'x' * (2 << 30)\"; echo status $?"
    try:
        result = sandbox.commands.run(script, timeout=60)
    except Exception:
        eventually(lambda: wire.api("GET", f"/sandboxes/{sandbox.sandbox_id}").status_code == 404)
        told = wire.api("GET", f"/sandboxes/{sandbox.sandbox_id}").json()["message"]
        assert "memory" in told, told
    else:
        assert result.stdout.strip() in ("status 137", "status 1"), result
        assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_bc_106_numbers_match_the_plan(inside):
    info = inside.get_info()
    total = int(inside.commands.run("awk '/MemTotal/{print $2}' /proc/meminfo").stdout) // 1024
    assert abs(total - info.memory_mb) <= info.memory_mb * 0.05
    assert int(inside.commands.run("nproc").stdout) == info.cpu_count
