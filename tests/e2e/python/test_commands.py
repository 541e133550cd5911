"""Commands through the SDK, and the field cases about streams and processes (A)."""

import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import wire
from conftest import eventually
from e2b import CommandExitException, NotFoundException, TimeoutException

MEBIBYTE = 1024 * 1024


def test_output_exit_code_and_error(shared):
    result = shared.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failed:
        shared.commands.run("echo no >&2; exit 7")
    assert failed.value.exit_code == 7 and failed.value.stderr == "no\n"


def test_output_streams_as_it_comes(shared):
    seen = []
    shared.commands.run(
        "for i in 1 2 3; do echo $i; sleep 0.2; done",
        on_stdout=lambda text: seen.append((text, time.monotonic())),
    )
    assert "".join(text for text, _ in seen) == "1\n2\n3\n"
    assert seen[-1][1] - seen[0][1] > 0.2


def test_user_and_directory(shared):
    assert shared.commands.run("id -un; pwd").stdout == "user\n/home/user\n"
    assert shared.commands.run("id -un; echo ~", user="root").stdout == "root\n/root\n"
    assert shared.commands.run("pwd", cwd="/usr/bin").stdout == "/usr/bin\n"
    with pytest.raises(Exception) as refused:
        shared.commands.run("true", cwd="/no/such/place")
    assert "no/such/place" in str(refused.value)
    with pytest.raises(Exception):
        shared.commands.run("true", user="nobody-at-all")


def test_sudo(shared):
    run = lambda command, **options: shared.commands.run(command, timeout=30, **options)
    assert run("sudo id -un; sudo -u user id -un; sudo -u '#0' id -u").stdout == "root\nuser\n0\n"
    assert run("echo secret | sudo tee /root/note; sudo cat /root/note").stdout == "secret\n" * 2
    assert run("sudo sh -c 'exit 7'; echo $?").stdout == "7\n"
    assert run("sudo sh -c 'kill -TERM $$'; echo $?").stdout == "143\n"
    assert run("cd /usr && sudo pwd; sudo -i pwd").stdout == "/usr\n/root\n"
    seen = run("sudo A=1 env | sort", envs={"B": "2", "LANG": "C.UTF-8"}).stdout.split("\n")
    assert {"A=1", "HOME=/root", "USER=root", "SUDO_USER=user", "LANG=C.UTF-8"} <= set(seen)
    assert "B=2" not in seen
    assert "B=2" in run("sudo -E env", envs={"B": "2"}).stdout
    assert run("sudo -n true && sudo -v && sudo -s echo 'a  b'").stdout == "a  b\n"
    told = run("sudo no-such-program; echo $?")
    assert told.stdout == "1\n" and "no-such-program: command not found" in told.stderr
    # One that has no rule in /etc/sudoers gets nothing.
    shared.commands.run("useradd -m plain", user="root")
    refused = run("sudo id; echo $?", user="plain")
    assert refused.stdout == "1\n" and "sudoers" in refused.stderr


def test_what_sudo_runs_ends_with_it(shared):
    handle = shared.commands.run("sudo sleep 297", background=True)
    find = lambda: shared.commands.run("pgrep -u root -x sleep || true").stdout
    assert eventually(find)
    handle.kill()
    eventually(lambda: not find())
    interrupted = shared.commands.run("timeout -s INT 1 sudo sleep 296; echo $?", timeout=30)
    assert interrupted.stdout == "124\n"
    eventually(lambda: not find())


def test_background_list_kill(shared):
    handle = shared.commands.run("sleep 300", background=True)
    listed = {process.pid: process for process in shared.commands.list()}
    assert listed[handle.pid].args[-1] == "sleep 300"
    assert handle.kill() is True
    with pytest.raises(CommandExitException):
        handle.wait()
    eventually(lambda: handle.pid not in {p.pid for p in shared.commands.list()})
    assert shared.commands.kill(handle.pid) is False


def test_stdin_goes_in_and_ends(shared):
    handle = shared.commands.run("cat; echo over", background=True, stdin=True)
    shared.commands.send_stdin(handle.pid, "one\n")
    shared.commands.send_stdin(handle.pid, "zwei ü\n")
    shared.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\nzwei ü\nover\n"


def test_stdin_streams_in(shared):
    handle = shared.commands.run("cat", background=True, stdin=True)
    shared.commands.stream_input(handle.pid, iter(["a", "b", "c"]))
    shared.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "abc"


def test_a_timeout_ends_the_command(shared):
    with pytest.raises(TimeoutException):
        shared.commands.run("sleep 300; echo never", timeout=1)
    eventually(lambda: not [p for p in shared.commands.list() if "sleep 300; echo never" in p.args])


def test_a_process_that_just_ended_can_still_be_asked(shared):
    handle = shared.commands.run("sleep 0.2; echo done; exit 3", background=True)
    handle.disconnect()
    eventually(lambda: handle.pid not in {p.pid for p in shared.commands.list()})
    with pytest.raises(CommandExitException) as ended:
        shared.commands.connect(handle.pid).wait()
    assert ended.value.exit_code == 3


def test_an_unknown_process_is_not_found(shared):
    with pytest.raises(NotFoundException):
        shared.commands.connect(999_999)
    with pytest.raises(NotFoundException):
        shared.commands.send_stdin(999_999, "x")


def test_bc_002_bytes_that_are_not_text(shared):
    for command, length in ((r"printf 'a\000b\376\377'", 5), ("head -c 70000 /dev/urandom", 70_000)):
        finished = wire.run(shared, command)
        assert finished.stdout_length == length
        assert finished.error is None
        assert shared.commands.run(command).exit_code == 0
    assert bytes(wire.run(shared, r"printf 'a\000b\376\377'").stdout) == b"a\0b\xfe\xff"


def test_bc_004_the_last_line_needs_no_end(shared):
    for _ in range(100):
        assert shared.commands.run("printf tail-without-newline").stdout == "tail-without-newline"
    for _ in range(5):
        result = shared.commands.run("seq 10000; printf tail-without-newline")
        assert result.stdout.endswith("10000\ntail-without-newline")


@pytest.mark.parametrize("command", ["cat", "grep x", "sort", "python3 -"])
def test_bc_007_a_command_without_input_ends(shared, command):
    started = time.monotonic()
    try:
        shared.commands.run(command, timeout=60)
    except CommandExitException as ended:
        assert ended.exit_code == 1
    assert time.monotonic() - started < 15


@pytest.mark.long
@pytest.mark.timeout(320)
def test_bc_009_a_dropped_command_goes_on_and_is_found_again(new):
    """As long as the case is: it idles beside other tests, and starts before them."""
    sandbox = new(timeout=600)
    script = "for i in $(seq 200); do echo $i; echo $i > /tmp/at; sleep 1; done"
    handle = sandbox.commands.run(script, background=True, timeout=0)
    handle.disconnect()

    def at():
        assert handle.pid in {process.pid for process in sandbox.commands.list()}
        return int(sandbox.commands.run("cat /tmp/at 2>/dev/null || echo 0").stdout)

    eventually(lambda: at() >= 150, within=200, every=2)
    result = sandbox.commands.connect(handle.pid, timeout=0).wait()
    assert result.exit_code == 0
    numbers = [int(line) for line in result.stdout.split()]
    assert numbers[0] >= 150
    assert numbers == list(range(numbers[0], 201))


class Peak:
    """The most that memory grew by while the block ran."""

    def __init__(self, *resident):
        self.resident = resident

    def __enter__(self):
        self.before = [resident() for resident in self.resident]
        self.most = list(self.before)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.over.wait(0.5):
            self.most = [max(most, now()) for most, now in zip(self.most, self.resident)]

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.grown = [most - before for most, before in zip(self.most, self.before)]


@pytest.mark.long
@pytest.mark.timeout(320)
def test_bc_011_much_output_in_little_memory(new):
    sandbox = new("code-interpreter-v1")
    command = "python3 -c \"[print('y'*4000) for _ in range(50_000)]\""
    with Peak(lambda: wire.agent_memory(sandbox), wire.server_memory) as peak:
        with ThreadPoolExecutor(4) as pool:
            read = lambda _: wire.run(sandbox, command, keep=False, timeout=300).stdout_length
            assert list(pool.map(read, range(4))) == 4 * [4001 * 50_000]
    assert max(peak.grown) < 64 * MEBIBYTE, peak.grown


def test_bc_013_a_reader_that_never_reads_blocks_only_its_own(sandbox):
    before = wire.agent_memory(sandbox)
    with httpx.Client(timeout=60) as client:
        with wire.open_start(client, sandbox, "exec yes") as response:
            flags, message = next(wire.frames(response.iter_raw()))
            pid = message["event"]["start"]["pid"]
            for _ in range(20):
                assert sandbox.commands.run("echo ok", timeout=10).stdout == "ok\n"
            assert wire.agent_memory(sandbox) - before < 64 * MEBIBYTE
            assert sandbox.commands.kill(pid) is True
            eventually(lambda: pid not in {p.pid for p in sandbox.commands.list()})


ABANDON = """
import os, sys
from e2b import Sandbox
sandbox = Sandbox.connect(sys.argv[1])
handles = [sandbox.commands.run("sleep 900", background=True, timeout=0) for _ in range(150)]
print(len(handles), flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_bc_014_abandoned_streams_are_given_back(sandbox):
    def agent_files(kind=""):
        command = f"ls -l /proc/1/fd | grep -c '{kind}'"
        return int(sandbox.commands.run(command, user="root").stdout)

    count = 150
    base, sockets, served = agent_files(), agent_files("socket:"), wire.server_files()
    client = subprocess.Popen(
        [sys.executable, "-c", ABANDON, sandbox.sandbox_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout.readline() == f"{count}\n"
    assert agent_files("socket:") >= sockets + count
    assert wire.server_files() >= served + count
    client.communicate()
    assert client.returncode == 0
    # The streams go at once; of a process the agent keeps the two pipes of its output.
    eventually(lambda: agent_files("socket:") <= sockets + 5)
    assert agent_files() <= base + 2 * count + 10
    # Others use the server meanwhile, but not so many connections.
    eventually(lambda: wire.server_files() < served + count)
    assert int(sandbox.commands.run("pgrep -c -x sleep").stdout) == count
    sandbox.commands.run("pkill -x sleep")
    eventually(lambda: agent_files() <= base + 10)


def test_bc_017_environment_is_exact(shared):
    values = {
        "A": "two words",
        "B": 'x"y$HOME`id`',
        "C": "l1\nl2",
        "D": "=a=b",
        "E": "日本",
        "F": "",
    }
    output = shared.commands.run("env -0", envs=values).stdout
    seen = dict(item.split("=", 1) for item in output.split("\0") if item)
    assert {name: seen[name] for name in values} == values


def test_bc_020_argument_limits_survive_the_command_line(sandbox):
    sandbox.files.write("/tmp/with space/script.py", "print('from a  space')")
    run = ["sandbox", "exec", sandbox.sandbox_id, "--"]
    result = wire.cli(*run, "python3", "-c", 'print("a  b")')
    assert result.stdout == "a  b\n"
    result = wire.cli(*run, "python3", "/tmp/with space/script.py")
    assert result.stdout == "from a  space\n"


def test_bc_021_heredocs_and_remarks_at_the_very_end(shared):
    assert shared.commands.run("cat <<'Z'\n$x\nZ", timeout=15).stdout == "$x\n"
    assert shared.commands.run("echo ok # note", timeout=15).stdout == "ok\n"


@pytest.mark.parametrize("command", ["cat <<E", 'echo "abc', "( echo a"])
def test_bc_022_unfinished_syntax_ends_by_itself(shared, command):
    try:
        result = shared.commands.run(command, timeout=15)
        assert "warning" in result.stderr
    except CommandExitException as ended:
        assert ended.exit_code != 0 and ended.stderr


def test_bc_023_no_pager_without_a_terminal(sandbox):
    sandbox.commands.run(
        "git init -q r && cd r && for i in $(seq 400); do printf "
        "'commit refs/heads/main\\ncommitter a <a@b> %d +0000\\ndata 2\\nc\\n\\n' $i; done"
        " | git fast-import --quiet",
        timeout=60,
    )
    result = sandbox.commands.run("cd r && git log main", timeout=30)
    assert result.stdout.count("commit ") == 400
    processes = sandbox.commands.run("ps -eo comm").stdout.split()
    assert "less" not in processes


def test_bc_024_orphans_are_collected(sandbox):
    """The agent's own tests do this with 2,000 orphans and 20,000 forks; here a fork costs
    milliseconds, and it is enough to pass the limit of processes."""
    script = "for i in $(seq 60); do sh -c '(sleep 0.05 &)'; done"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: sandbox.commands.run(script, timeout=120), range(8)))

    def zombies():
        return sandbox.commands.run("ps -eo stat= | grep -c ^Z || true").stdout.strip()

    eventually(lambda: zombies() == "0", within=2)
    forks = "i=0; while [ $i -lt 2000 ]; do (:) || exit 1; i=$((i + 1)); done; echo $i"
    assert sandbox.commands.run(f"sh -c '{forks}'", timeout=120).stdout == "2000\n"
    assert zombies() == "0"


SETSID = """
import ctypes, errno, os, signal
libc = ctypes.CDLL(None, use_errno=True)
CLONE_VM, CLONE_SIGHAND = 0x100, 0x800
STACK = ctypes.create_string_buffer(65536)
ENTRY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
top = ctypes.c_void_p(ctypes.addressof(STACK) + 65536 - 64)
refused = 0
for _ in range(200):
    ends, end = os.pipe()
    if os.fork() == 0:
        child = libc.clone(pause, top, CLONE_VM | CLONE_SIGHAND | signal.SIGCHLD, None)
        if child > 0:
            try:
                os.setpgid(child, child)
            except OSError:
                pass
        else:
            os.write(end, bytes([ctypes.get_errno()]))
        os.setsid()
        if child > 0:
            os.kill(child, signal.SIGKILL)
        os._exit(0)
    os.wait()
    os.close(end)
    refused += os.read(ends, 1) == bytes([errno.EINVAL])
    os.close(ends)
print("survived", refused)
"""


def test_bc_029_setsid_beside_shared_signal_handlers_hangs_nobody(sandbox):
    """The kernel of the sandbox would hang as a whole, so such a child is refused
    (google/gvisor#14275)."""
    sandbox.files.write("/tmp/setsid.py", SETSID)
    loop = sandbox.commands.run("python3 /tmp/setsid.py", background=True, timeout=60)
    waits = []
    while any(process.pid == loop.pid for process in sandbox.commands.list()) or not waits:
        started = time.monotonic()
        assert sandbox.commands.run("echo alive", timeout=10).stdout == "alive\n"
        waits.append(time.monotonic() - started)
    assert loop.wait().stdout == "survived 200\n"
    # A hang has no end. Single commands take longer than a second when the tests beside this one
    # have the processors, which says nothing about the sandbox.
    assert len(waits) >= 3 and statistics.median(waits) < 1 and max(waits) < 5, waits


NEW_PROCESSES = """
import multiprocessing, os, subprocess, threading
def say(what): print(what, flush=True)
def main():
    thread = threading.Thread(target=say, args=["thread"]); thread.start(); thread.join()
    os.waitpid(os.posix_spawn("/bin/echo", ["echo", "spawned"], os.environ), 0)
    subprocess.run(["echo", "vforked"], close_fds=False)
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        worker = context.Process(target=say, args=[method]); worker.start(); worker.join()
if __name__ == "__main__":
    main()
"""


def test_bc_029_every_other_way_to_make_a_process_works(sandbox):
    sandbox.files.write("/tmp/new.py", NEW_PROCESSES)
    result = sandbox.commands.run("python3 /tmp/new.py && sudo python3 /tmp/new.py", timeout=60)
    assert result.stdout.split() == 2 * "thread spawned vforked fork spawn forkserver".split()
