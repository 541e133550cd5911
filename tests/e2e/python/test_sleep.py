"""Pause and wake with the E2B SDKs: what survives, and what every call answers (R-L4, R-L6, R-L8)."""

import datetime
import hashlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import wire
from conftest import eventually
from e2b import Sandbox, SandboxNotFoundException, SandboxQuery, SandboxState
from sleeping import Raw, events, state, times
from test_gateway import get, serve
from test_templates import define  # noqa: F401, a fixture

CYCLES = 20


def seconds_left(sandbox):
    return (sandbox.get_info().end_at - datetime.datetime.now(datetime.UTC)).total_seconds()


def printed(sandbox, code):
    execution = sandbox.run_code(code)
    assert execution.error is None, execution.error
    return "".join(execution.logs.stdout)


def test_what_ran_goes_on(interpreter):
    # R-L4: a variable, an open file, a background process and a listening server.
    printed(interpreter, "x = 41; f = open('/tmp/open', 'w+'); f.write('before'); f.flush()")
    count = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
    interpreter.commands.run(count, background=True, timeout=0)
    serve(interpreter)
    assert interpreter.pause() is True
    assert interpreter.pause() is False, "it sleeps already"
    info = interpreter.get_info()
    assert info.state == SandboxState.PAUSED
    assert interpreter.is_running() is False
    listed = Sandbox.list(SandboxQuery(state=[SandboxState.PAUSED])).next_items()
    assert interpreter.sandbox_id in {item.sandbox_id for item in listed}
    interpreter.connect(timeout=300)
    assert printed(interpreter, "print(x + 1)") == "42\n"
    assert printed(interpreter, "_ = f.write(' after'); f.seek(0); print(f.read())") == "before after\n"
    before = int(interpreter.files.read("/tmp/count") or 0)
    eventually(lambda: int(interpreter.files.read("/tmp/count") or 0) > before)
    assert get(interpreter, "/again").json()["path"] == "/again"
    assert interpreter.pause() is True, "and once more"
    interpreter.connect()
    assert printed(interpreter, "print(x + 1)") == "42\n"


def test_bc_071_many_cycles_lose_nothing(interpreter):
    printed(interpreter, "n = 0")
    ledger = {}
    for cycle in range(CYCLES):
        blob = os.urandom(5_000_000)
        ledger[f"/tmp/blob{cycle % 3}"] = hashlib.sha256(blob).hexdigest()
        interpreter.files.write(f"/tmp/blob{cycle % 3}", blob)
        edit = f"echo line {cycle} >> /tmp/lines; echo edit {cycle} > /tmp/edited"
        interpreter.commands.run(edit)
        printed(interpreter, "n += 1")
        assert interpreter.pause() is True
        interpreter.connect(timeout=300)
        lines = interpreter.files.read("/tmp/lines").split("\n")[:-1]
        assert lines == [f"line {i}" for i in range(cycle + 1)]
        assert interpreter.files.read("/tmp/edited") == f"edit {cycle}\n"
        assert printed(interpreter, "print(n)") == f"{cycle + 1}\n"
        sums = interpreter.commands.run("sha256sum /tmp/blob*").stdout.split("\n")[:-1]
        assert {path: digest for digest, path in (line.split() for line in sums)} == ledger
    assert times(interpreter.sandbox_id, "paused") == CYCLES


def test_bc_061_file_metadata_survives_a_pause(sandbox):
    sandbox.files.write("/tmp/m", "x", metadata={"author": "zoe"})
    sandbox.pause()
    sandbox.connect()
    assert sandbox.files.get_info("/tmp/m").metadata == {"author": "zoe"}


def test_bc_069_connect_never_silently_shortens(new):
    sandbox = new(timeout=1800)
    for asked, least in ((300, 1790), (None, 1790), (3600, 3590)):
        Sandbox.connect(sandbox.sandbox_id, timeout=asked)
        assert least < seconds_left(sandbox) <= max(least + 11, asked or 0)
    sandbox.pause()
    Sandbox.connect(sandbox.sandbox_id, timeout=60)
    assert 50 < seconds_left(sandbox) <= 60, "paused: the new value"
    sandbox.set_timeout(1800)
    sandbox.pause()
    woken = wire.api("POST", f"/v2/sandboxes/{sandbox.sandbox_id}/connect")
    assert woken.status_code == 201
    assert 1780 < seconds_left(sandbox) <= 1800, "never silently five minutes"


def bodies():
    yield None, {}
    yield b"{}", {}
    yield b"", {"Content-Type": "application/json"}
    yield iter([b"{", b"}"]), {"Content-Type": "application/json"}
    yield b"null", {"Content-Type": "application/json"}
    yield b'{"unknown": [1]}', {"Content-Type": "application/json"}


@pytest.mark.parametrize("call", ["/sandboxes/{}/resume", "/sandboxes/{}/connect", "/v2/sandboxes/{}/connect"])
def test_bc_075_bodies_that_say_nothing(sandbox, call):
    # Two of a kind: a stream is used up by the first call.
    for (content, headers), (again, _) in zip(bodies(), bodies(), strict=True):
        pause = f"/sandboxes/{sandbox.sandbox_id}/pause"
        paused = wire.api("POST", pause, content=content, headers=headers)
        assert paused.status_code == 204, paused.text
        woken = wire.api("POST", call.format(sandbox.sandbox_id), content=again, headers=headers)
        assert woken.status_code == 201, woken.text
    large = b'{"x": "' + b"y" * 2_000_000 + b'"}'
    assert wire.api("POST", call.format(sandbox.sandbox_id), content=large).status_code == 413


OPEN_BUT_GONE = r"""
import mmap, os, time
log = open('/tmp/gone.log', 'w+b'); os.unlink('/tmp/gone.log')
log.write(b'first '); log.flush()
backing = open('/tmp/gone.map', 'w+b'); backing.truncate(4096); os.unlink('/tmp/gone.map')
area = mmap.mmap(backing.fileno(), 4096); area[:6] = b'mapped'
os.mkdir('/tmp/gone.d'); directory = os.open('/tmp/gone.d', os.O_RDONLY); os.rmdir('/tmp/gone.d')
open('/tmp/opened', 'w').close()
while not os.path.exists('/tmp/go'): time.sleep(0.02)
log.write(b'second'); log.flush(); log.seek(0)
with open('/tmp/said', 'w') as said:
    print(log.read(), bytes(area[:6]), os.fstat(directory).st_mode & 0o170000 == 0o040000, file=said)
"""


def test_bc_090_what_is_deleted_but_open_is_still_there(sandbox):
    sandbox.files.write("/tmp/open.py", OPEN_BUT_GONE)
    sandbox.commands.run("python3 /tmp/open.py", background=True, timeout=0)
    eventually(lambda: sandbox.files.exists("/tmp/opened"))
    assert sandbox.pause() is True
    sandbox.connect()
    sandbox.files.write("/tmp/go", "")
    said = eventually(lambda: sandbox.files.exists("/tmp/said") and sandbox.files.read("/tmp/said"))
    assert said == "b'first second' b'mapped' True\n"


def test_bc_097_the_clock_is_right_at_once(interpreter):
    printed(interpreter, "import time")
    interpreter.pause()
    time.sleep(8)
    interpreter.connect()
    asked = time.time()
    guest = float(printed(interpreter, "print(time.time())"))
    assert asked - 0.5 < guest < time.time() + 0.5
    asked = time.time()
    guest = float(interpreter.commands.run("date +%s.%N").stdout)
    assert asked - 0.5 < guest < time.time() + 0.5


WRITER = r"""
import os, sqlite3, sys, time
db = sqlite3.connect('/home/user/wal.db', timeout=60, isolation_level=None)
n = 0
while not os.path.exists('/tmp/stop'):
    db.execute('insert into t values (?, ?)', (sys.argv[1], n))
    n += 1
    time.sleep(0.01)
print(n)
"""


def test_bc_100_a_database_that_is_written_to_stays_whole(sandbox):
    sandbox.files.write("/tmp/writer.py", WRITER)
    begin = "import sqlite3; db = sqlite3.connect('/home/user/wal.db')\n" \
        "assert db.execute('pragma journal_mode=wal').fetchone() == ('wal',)\n" \
        "db.execute('create table t (who text, n integer)')"
    sandbox.files.write("/tmp/begin.py", begin)
    sandbox.commands.run("python3 /tmp/begin.py")
    writers = [
        sandbox.commands.run(f"python3 /tmp/writer.py w{i} > /tmp/w{i}.n", background=True, timeout=0)
        for i in range(3)
    ]
    eventually(lambda: sandbox.files.exists("/home/user/wal.db-wal"))
    for _ in range(10):
        sandbox.pause()
        sandbox.connect(timeout=300)
    sandbox.files.write("/tmp/stop", "")
    counts = [
        int(eventually(lambda: sandbox.files.read(f"/tmp/w{i}.n").strip())) for i in range(len(writers))
    ]
    look = "import sqlite3; db = sqlite3.connect('/home/user/wal.db')\n" \
        "print(*db.execute('pragma integrity_check').fetchone())\n" \
        "print(*[n for n, in db.execute('select count(*) from t group by who order by who')])"
    sandbox.files.write("/tmp/look.py", look)
    assert sandbox.commands.run("python3 /tmp/look.py").stdout == f"ok\n{' '.join(map(str, counts))}\n"


def test_bc_120_the_images_defaults_hold_after_a_disk_only_resume(define, new):  # noqa: F811
    name, _ = define(
        "[agent]\nstartCommand = \"echo up >> /tmp/starts; exec sleep infinity\"\n"
        "readyCommand = \"test -s /tmp/starts\"\ndefaultUser = \"root\"\ndefaultWorkdir = \"/srv\"\n"
        "[agent.environment]\nP = \"a b\"\n"
    )
    sandbox = new(name, envs={"MINE": "1"})
    sandbox.commands.run("mkdir -p /srv/app; echo kept > /srv/app/file")
    asked = 'pwd; id -un; echo "$P" $MINE; cat /tmp/starts'
    first = sandbox.commands.run(asked).stdout
    assert sandbox.pause(mode="filesystem") is True
    detail = wire.api("GET", f"/sandboxes/{sandbox.sandbox_id}").json()
    assert (detail["state"], detail["pauseMode"]) == ("paused", "filesystem")
    sandbox.connect()
    assert sandbox.commands.run(asked).stdout == first + "up\n", "started anew"
    assert sandbox.files.read("/srv/app/file") == "kept\n"
    assert sandbox.commands.run("pgrep -c -x sleep").stdout == "1\n"


def test_a_reboot_brings_files_back_and_processes_anew(interpreter):
    # Wire contract 1.4: `memory: false`
    printed(interpreter, "x = 41")
    interpreter.commands.run("echo kept > /home/user/kept; sync")
    background = interpreter.commands.run("sleep 7777", background=True, timeout=0)
    interpreter.pause()
    woken = wire.api("POST", f"/v2/sandboxes/{interpreter.sandbox_id}/connect", json={"memory": False})
    assert woken.status_code == 201, woken.text
    assert background.pid not in {p.pid for p in interpreter.commands.list()}
    assert interpreter.files.read("/home/user/kept") == "kept\n"
    assert interpreter.run_code("x").error.name == "NameError"
    assert printed(interpreter, "print(6 * 7)") == "42\n"


def test_deleting_a_sleeping_one_removes_its_files_and_never_wakes_it(new):
    # R-L8
    sandbox = new()
    sandbox.files.write("/tmp/large", os.urandom(1_000_000))
    sandbox.pause()
    directory = Path(os.environ["SANDHOLD_DATA_DIR"]) / "sandboxes" / sandbox.sandbox_id
    assert directory.is_dir()
    assert sandbox.kill() is True
    assert not directory.exists()
    assert times(sandbox.sandbox_id, "resuming") == 0
    assert sandbox.kill() is False
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def delete_until_gone(sandbox_id):
    """Deletes as a patient client does; every refusal says when to come back."""
    end = time.monotonic() + 60
    while True:
        answer = wire.api("DELETE", f"/sandboxes/{sandbox_id}")
        if answer.status_code in (204, 404):
            return answer.status_code
        assert answer.status_code == 503 and answer.headers["retry-after"] in ("2", "5"), answer.text
        assert time.monotonic() < end
        time.sleep(int(answer.headers["retry-after"]))


def pause_and_delete(turn):
    with Raw() as sandbox:
        pausing = threading.Thread(target=wire.api, args=("POST", f"/sandboxes/{sandbox.sandbox_id}/pause"))
        pausing.start()
        time.sleep(turn * 0.01)
        status = delete_until_gone(sandbox.sandbox_id)
        pausing.join()
        gone = wire.api("GET", f"/sandboxes/{sandbox.sandbox_id}")
        directory = Path(os.environ["SANDHOLD_DATA_DIR"]) / "sandboxes" / sandbox.sandbox_id
        return status, gone.status_code, directory.exists()


def test_bc_068_a_delete_during_a_pause_always_gets_there():
    # Fifty times, at moments spread over what a pause takes.
    with ThreadPoolExecutor(3) as pool:
        for outcome in pool.map(pause_and_delete, range(50)):
            assert outcome == (204, 404, False)


def test_bc_068_two_deletes_at_once(sandbox):
    sandbox.pause()
    with ThreadPoolExecutor(2) as pool:
        deletes = [pool.submit(wire.api, "DELETE", f"/sandboxes/{sandbox.sandbox_id}") for _ in range(2)]
    assert sorted(d.result().status_code for d in deletes) in ([204, 204], [204, 404])


def test_events_tell_who_asked_and_with_which_request(sandbox):
    # R-L12
    path = f"/sandboxes/{sandbox.sandbox_id}"
    for call, request in (("pause", "night-1"), ("resume", "morning-1")):
        answer = wire.api("POST", f"{path}/{call}", headers={"X-Request-Id": request})
        assert answer.status_code in (201, 204)
    told = [(e["state"], e["actorKind"], e.get("requestID")) for e in events(sandbox.sandbox_id)]
    assert told[-4:] == [
        ("pausing", "client", "night-1"),
        ("paused", "client", "night-1"),
        ("resuming", "client", "morning-1"),
        ("running", "client", "morning-1"),
    ]
    assert all(e["reason"] and e["timestamp"] for e in events(sandbox.sandbox_id))


def test_by_the_command_line(sandbox):
    assert "sleeps" in wire.cli("sandbox", "pause", sandbox.sandbox_id).stdout
    assert state(sandbox.sandbox_id) == "paused"
    again = wire.cli("sandbox", "pause", sandbox.sandbox_id, check=False)
    assert again.returncode != 0 and "already" in again.stderr
    woken = wire.cli("sandbox", "resume", sandbox.sandbox_id, "--timeout", "100", "--json")
    assert json.loads(woken.stdout)["sandboxID"] == sandbox.sandbox_id
    assert 90 < seconds_left(sandbox) <= 100
    history = json.loads(wire.cli("sandbox", "history", sandbox.sandbox_id, "--json").stdout)
    assert history["events"][-1]["state"] == "running"
    plain = wire.cli("sandbox", "history", sandbox.sandbox_id).stdout
    assert "paused" in plain and history["events"][-1]["requestID"] in plain


def test_a_port_of_a_sleeping_sandbox_is_not_there(sandbox):
    # Wire contract, "Proxy answers SDKs parse": without auto-resume traffic wakes nobody.
    serve(sandbox)
    sandbox.pause()
    answer = get(sandbox, "/")
    assert (answer.status_code, answer.json()["error_code"]) == (502, "sandbox_not_running")
    assert "was not found" in answer.json()["message"]
    assert answer.headers["should-retry"] == "false"
    with pytest.raises(Exception, match="(?i)not found|not running|paused"):
        sandbox.commands.run("true")
    assert state(sandbox.sandbox_id) == "paused"
