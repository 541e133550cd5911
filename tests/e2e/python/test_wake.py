"""Sleep by the clock and waking by traffic (R-L5, R-L6, R-L7)."""

import asyncio
import datetime
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import wire
from conftest import eventually
from cubesandbox import Sandbox as Cube
from e2b import AsyncSandbox
from e2b_code_interpreter import AsyncSandbox as AsyncInterpreter
from e2b_code_interpreter import Sandbox as Interpreter
from sleeping import SLEEPS, Raw, events, falls_asleep, state, times
from test_gateway import get, serve, websocket


def woken_once_by_traffic(sandbox_id):
    assert state(sandbox_id) == "running"
    assert times(sandbox_id, "resuming") == 1
    [resuming] = [e for e in events(sandbox_id) if e["state"] == "resuming"]
    assert resuming["actorKind"] == "gateway"


def test_a_short_timeout_puts_to_sleep_and_code_wakes(new):
    sandbox = new("code-interpreter-v1", cls=Interpreter, timeout=3, lifecycle=SLEEPS)
    info = sandbox.get_info()
    assert info.lifecycle == {"on_timeout": "pause", "auto_resume": True}
    sandbox.run_code("x = 6")
    falls_asleep(sandbox.sandbox_id)
    assert [e["actorKind"] for e in events(sandbox.sandbox_id)][-2:] == ["sweeper", "sweeper"]
    assert sandbox.run_code("x * 7").text == "42"
    woken_once_by_traffic(sandbox.sandbox_id)


def test_a_file_a_request_and_a_socket_wake(new):
    sandbox = new(lifecycle=SLEEPS)
    serve(sandbox)
    sandbox.files.write("/tmp/f", "before")
    sandbox.pause()
    assert sandbox.files.read("/tmp/f") == "before"
    woken_once_by_traffic(sandbox.sandbox_id)
    sandbox.pause()
    assert get(sandbox, "/plain").json()["path"] == "/plain"
    sandbox.pause()

    async def talk():
        async with websocket(sandbox) as socket:
            await socket.recv()
            await socket.send("through the night")
            return await socket.recv()

    assert asyncio.run(talk()) == "through the night"
    sandbox.pause()
    url = sandbox.download_url("/tmp/f")
    assert httpx.get(url, timeout=60).text == "before", "a signed address"
    assert times(sandbox.sandbox_id, "resuming") == 4


def test_fifty_requests_at_once_are_one_resume_and_fifty_answers(new):
    sandbox = new(lifecycle=SLEEPS)
    serve(sandbox)
    sandbox.pause()
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda n: get(sandbox, f"/{n}"), range(50)))
    assert [a.status_code for a in answers] == [200] * 50
    assert [a.json()["path"] for a in answers] == [f"/{n}" for n in range(50)]
    woken_once_by_traffic(sandbox.sandbox_id)


def test_whoever_may_not_use_it_may_not_wake_it(new):
    sandbox = new(lifecycle=SLEEPS)
    sandbox.pause()
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    for token in ({}, {"X-Access-Token": "guess"}):
        answer = httpx.get(wire.URL + "/files?path=/etc/passwd", headers={**headers, **token})
        assert answer.status_code == 401
    assert state(sandbox.sandbox_id) == "paused"


RECORDS = r"""
import sqlite3, time
db = sqlite3.connect('/home/user/r.db', isolation_level=None)
db.execute('create table r (n integer)')
log = open('/home/user/records', 'w')
n = 0
while True:
    n += 1
    print(n, file=log, flush=True)
    db.execute('insert into r values (?)', (n,))
    time.sleep(0.005)
"""


def test_bc_072_a_pause_by_the_clock_loses_no_write(new):
    sandbox = new(timeout=4, lifecycle={"on_timeout": "pause"})
    sandbox.files.write("/tmp/records.py", RECORDS)
    writer = sandbox.commands.run("exec python3 /tmp/records.py", background=True, timeout=0)
    falls_asleep(sandbox.sandbox_id)
    sandbox.connect(timeout=300)

    def newest():
        return int(sandbox.commands.run("tail -n 1 /home/user/records").stdout)

    before = newest()
    eventually(lambda: newest() > before + 20)
    sandbox.commands.run(f"kill -KILL {writer.pid}")
    count = newest()
    assert sandbox.commands.run("awk '$1 != NR' /home/user/records").stdout == "", "no gap"
    look = "import sqlite3; db = sqlite3.connect('/home/user/r.db')\n" \
        "print(*db.execute('pragma integrity_check').fetchone(), *db.execute('select count(*) from r').fetchone())"
    sandbox.files.write("/tmp/look.py", look)
    said, rows = sandbox.commands.run("python3 /tmp/look.py").stdout.split()
    assert said == "ok" and count - 1 <= int(rows) <= count


def start(sandbox, command):
    """Starts a command that nobody reads from."""
    with httpx.Client(timeout=30) as client:
        with wire.open_start(client, sandbox, command) as response:
            next(wire.frames(response.iter_raw()))


def test_a_command_that_runs_longer_than_the_timeout_is_not_frozen():
    # R-L5
    with Raw(timeout=2, lifecycle={"onTimeout": "pause"}) as sandbox:
        began = time.monotonic()
        start(sandbox, "sleep 7; echo done > /tmp/done")
        while time.monotonic() < began + 6.5:
            assert state(sandbox.sandbox_id) == "running", time.monotonic() - began
            time.sleep(0.25)
        falls_asleep(sandbox.sandbox_id)
        assert time.monotonic() - began > 8.5, "a whole window after its end"


def test_a_background_command_does_not_count_if_the_policy_says_so():
    # R-L5
    lifecycle = {"onTimeout": "pause", "autoResume": True, "backgroundCommandsCount": False}
    with Raw(timeout=2, lifecycle=lifecycle) as sandbox:
        start(sandbox, "exec sleep 7777")
        falls_asleep(sandbox.sandbox_id, within=10)
        assert wire.run(sandbox, "pgrep -c -f 'sleep 7777'").stdout == b"1\n", "it is still there"
        # One that somebody reads from does count.
        began = time.monotonic()
        assert wire.run(sandbox, "sleep 5; echo through").stdout == b"through\n"
        assert time.monotonic() - began < 8
        assert times(sandbox.sandbox_id, "paused") == 1


def test_traffic_outlives_an_idle_window_tenfold_and_no_deadline():
    # R-L6
    def lives(sandbox, seconds):
        """How long it answers to a client that keeps asking."""
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            if wire.agent(sandbox, "GET", "/health").status_code != 204:
                break
            time.sleep(0.2)
        return time.monotonic() - began

    # Windows wide enough for a request that waits behind the other tests.
    idle = {"timeout": 6, "lifecycle": {"onTimeout": "kill"}}
    with Raw(**idle) as sliding, Raw("/v2/sandboxes", timeout=5) as fixed:
        with ThreadPoolExecutor(2) as pool:
            lived = list(pool.map(lives, (sliding, fixed), (60, 60)))
        assert lived[0] >= 60 and lived[1] < 20, lived
        eventually(lambda: state(sliding.sandbox_id) is None, within=20)
        for sandbox in (sliding, fixed):
            ended = wire.api("GET", f"/sandboxes/{sandbox.sandbox_id}/events").json()["ended"]
            assert ended["reason"] == "its timeout passed"
        moments = {e["state"]: datetime.datetime.fromisoformat(e["timestamp"]) for e in events(fixed.sandbox_id)}
        # The end is counted from just before the first event.
        assert 4.9 <= (moments["killing"] - moments["creating"]).total_seconds() < 10


async def test_the_asynchronous_sdks():
    sandbox = await AsyncInterpreter.create(timeout=300, lifecycle=SLEEPS)
    try:
        await sandbox.run_code("x = 6")
        assert await sandbox.pause() is True
        assert await sandbox.pause() is False
        assert (await sandbox.run_code("x * 7")).text == "42"
        await sandbox.pause()
        again = await AsyncInterpreter.connect(sandbox.sandbox_id, timeout=120)
        assert (await again.run_code("x")).text == "6"
    finally:
        await sandbox.kill()


async def test_many_wake_beside_each_other():
    made = await asyncio.gather(*(AsyncSandbox.create("base", lifecycle=SLEEPS) for _ in range(4)))
    try:
        await asyncio.gather(*(sandbox.pause() for sandbox in made))
        results = await asyncio.gather(*(sandbox.commands.run("echo awake") for sandbox in made))
        assert [r.stdout for r in results] == ["awake\n"] * 4
    finally:
        await asyncio.gather(*(sandbox.kill() for sandbox in made))


def test_cubes_client():
    sandbox = Cube.create(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        sandbox.run_code("x = 6")
        sandbox.pause()
        assert sandbox.get_info()["state"] == "paused"
        assert sandbox.run_code("x * 7").text == "42", "traffic wakes it"
        sandbox.pause()
        again = Cube.connect(sandbox.sandbox_id)
        assert again.run_code("x").text == "6"
        sandbox.pause()
        sandbox.resume()
        assert sandbox.commands.run("echo awake").stdout == "awake\n"
        assert [s["state"] for s in Cube.list_v2() if s["sandboxID"] == sandbox.sandbox_id] == ["running"]
    finally:
        sandbox.kill()
