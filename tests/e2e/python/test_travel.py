"""Snapshots, copies and rollbacks with the SDKs as they are published (R-T1 to R-T6)."""

import contextlib
import hashlib
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import wire
from conftest import eventually
from cubesandbox import Sandbox as Cube
from e2b import AsyncSandbox, Sandbox, SandboxException, SandboxNotFoundException
from e2b_code_interpreter import Sandbox as Interpreter
from test_gateway import get, serve
from test_uniqueness import DRAW

# A plan of state that nothing but a whole capture keeps: a variable, a large array, an open file, one
# that is deleted and still open, a file's time and mode.
PLANT = """
import hashlib, os
import numpy as np
x = 41
rng = np.random.default_rng(7)
big = rng.integers(0, 256, %d, dtype=np.uint8)
opened = open('/tmp/open', 'w+'); _ = opened.write('before'); opened.flush()
gone = open('/tmp/gone', 'w+'); _ = gone.write('still here'); gone.flush(); os.unlink('/tmp/gone')
open('/tmp/old', 'w').write('old'); os.chmod('/tmp/old', 0o640); os.utime('/tmp/old', (1e9, 1e9))
"""
LOOK = """
import json
gone.seek(0); opened.seek(0)
seen = os.stat('/tmp/old')
print(json.dumps([x, hashlib.sha256(big.tobytes()).hexdigest(), opened.read(), gone.read(), seen.st_mtime, seen.st_mode & 0o777]))
"""
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"


def printed(sandbox, code, timeout=120):
    execution = sandbox.run_code(code, timeout=timeout)
    assert execution.error is None, execution.error
    return "".join(execution.logs.stdout)


def plant(sandbox, bytes_=200_000_000):
    printed(sandbox, PLANT % bytes_)
    sandbox.commands.run(COUNT, background=True, timeout=0)
    serve(sandbox)
    return json.loads(printed(sandbox, LOOK))


def is_as_planted(sandbox, planted):
    assert json.loads(printed(sandbox, LOOK)) == planted
    before = int(sandbox.files.read("/tmp/count") or 0)
    eventually(lambda: int(sandbox.files.read("/tmp/count") or 0) > before)
    assert get(sandbox, "/again").json()["path"] == "/again"


@pytest.fixture
def forget():
    """Snapshots that are deleted after the test."""
    taken = []
    yield taken.append
    for snapshot in taken:
        wire.api("DELETE", "/templates/" + snapshot.replace("/", "%2F").replace(":", "%3A"))


def test_a_snapshot_holds_everything_and_its_source_goes_on(interpreter, new, forget):
    # R-T1: memory, processes, open files, servers; the copy is a sandbox of its own.
    planted = plant(interpreter)
    snapshot = interpreter.create_snapshot()
    forget(snapshot.snapshot_id)
    is_as_planted(interpreter, planted)
    printed(interpreter, "x = 1")
    copy = new(snapshot.snapshot_id, cls=Interpreter)
    is_as_planted(copy, planted)
    assert printed(interpreter, "print(x)") == "1\n", "they are apart"
    interpreter.kill()
    again = new(snapshot.snapshot_id, cls=Interpreter)
    is_as_planted(again, planted)


def test_snapshots_are_listed_named_and_deleted(sandbox, new):
    first = sandbox.create_snapshot()
    named = sandbox.create_snapshot("travel-env:v2")
    assert named.names and named.names[0].endswith("/travel-env:v2")
    pages = sandbox.list_snapshots(limit=1)
    seen = []
    while pages.has_next:
        seen += [item.snapshot_id for item in pages.next_items()]
    assert seen == [named.snapshot_id, first.snapshot_id], "newest first, each once"
    by_name = Sandbox.list_snapshots(name="travel-env").next_items()
    assert [item.snapshot_id for item in by_name] == [named.snapshot_id]
    assert new("travel-env:v2").commands.run("echo in").stdout == "in\n"
    moved = sandbox.create_snapshot("travel-env:v2")
    assert Sandbox.list_snapshots(name="travel-env:v2").next_items()[0].snapshot_id == moved.snapshot_id
    assert new(named.snapshot_id).is_running(), "it lost its name, not its ID"
    for snapshot in (first, named, moved):
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
    assert sandbox.list_snapshots().next_items() == []
    with pytest.raises(SandboxException):
        new(first.snapshot_id)


def test_a_name_of_a_template_is_refused(sandbox):
    with pytest.raises(SandboxException) as refused:
        sandbox.create_snapshot("base")
    assert refused.value.status_code == 409


def test_a_snapshot_of_files_starts_processes_anew(interpreter, new, forget):
    printed(interpreter, "x = 1; _ = open('/home/user/kept', 'w').write('kept')")
    snapshot = interpreter.create_snapshot(mode="filesystem")
    forget(snapshot.snapshot_id)
    assert printed(interpreter, "print(x)") == "1\n"
    copy = new(snapshot.snapshot_id, cls=Interpreter)
    assert copy.files.read("/home/user/kept") == "kept"
    assert copy.run_code("x").error.name == "NameError"


def test_a_sleeping_sandbox_is_captured_as_it_lies(interpreter, new, forget):
    # R-T4: nothing is woken and nothing copied.
    printed(interpreter, "x = 41")
    interpreter.pause()
    snapshot = interpreter.create_snapshot()
    forget(snapshot.snapshot_id)
    assert str(interpreter.get_info().state.value) == "paused"
    lineage = wire.api("GET", f"/snapshots/{snapshot.snapshot_id}/lineage").json()
    assert lineage["exclusiveBytes"] == 0 and lineage["sharedBytes"] > 0
    interpreter.kill()
    lineage = wire.api("GET", f"/snapshots/{snapshot.snapshot_id}/lineage").json()
    assert lineage["exclusiveBytes"] > 0 and lineage["sharedBytes"] == 0
    assert printed(new(snapshot.snapshot_id, cls=Interpreter), "print(x + 1)") == "42\n"


def test_fork_gives_copies_with_what_their_source_has(new):
    # R-T2, R-T6
    source = new("code-interpreter-v1", cls=Interpreter, metadata={"by": "fork"}, envs={"COLOUR": "teal"})
    printed(source, "x = 41")
    forks = source.fork(count=3, timeout=120)
    try:
        for fork in forks:
            assert isinstance(fork, Interpreter), fork
            assert printed(fork, "print(x + 1)") == "42\n"
            assert fork.commands.run("echo $COLOUR").stdout == "teal\n"
            assert fork.get_info().metadata == {"by": "fork"}
            assert fork.get_info().template_id == source.get_info().template_id
        drawn = [json.loads(printed(s, DRAW)) for s in [source, *forks]]
        for name in drawn[0]:
            assert len({d[name] for d in drawn}) == len(drawn), name
    finally:
        for fork in forks:
            fork.kill()
    assert Sandbox.list_snapshots(sandbox_id=source.sandbox_id).next_items() == []
    with pytest.raises(SandboxNotFoundException):
        Sandbox.fork("a" * 20)


async def test_async(new):
    sandbox = await AsyncSandbox.create("base", timeout=120)
    try:
        await sandbox.files.write("/tmp/f", "kept")
        snapshot = await sandbox.create_snapshot()
        listed = await sandbox.list_snapshots().next_items()
        assert [item.snapshot_id for item in listed] == [snapshot.snapshot_id]
        copy = await AsyncSandbox.create(snapshot.snapshot_id, timeout=120)
        assert await copy.files.read("/tmp/f") == "kept"
        await copy.kill()
        (fork,) = await sandbox.fork(timeout=60)
        assert await fork.files.read("/tmp/f") == "kept"
        await fork.kill()
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is True
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is False
    finally:
        await sandbox.kill()


@pytest.fixture
def cube():
    sandbox = Cube.create(timeout=600)
    yield sandbox
    try:
        sandbox.kill()
    except Exception:
        pass


def said(cube, code):
    execution = cube.run_code(code)
    assert execution.error is None, execution.error
    return execution.text


def test_cube_goes_back_ten_times_and_forward(cube, forget):
    # R-T3
    said(cube, "x = 0")
    cube.files.write("/tmp/f", "first")
    first = cube.create_snapshot()
    forget(first.snapshot_id)
    said(cube, "x = 1")
    cube.files.write("/tmp/f", "second")
    second = cube.create_snapshot()
    forget(second.snapshot_id)
    for round_ in range(10):
        said(cube, f"x = 'after {round_}'; y = 1")
        cube.files.write("/tmp/f", "lost")
        cube.files.write(f"/tmp/new{round_}", "lost")
        answer = cube.rollback(first.snapshot_id)
        assert answer["sandboxID"] == cube.sandbox_id
        assert said(cube, "x") == "0"
        assert cube.run_code("y").error.name == "NameError"
        assert cube.files.read("/tmp/f") == "first"
        assert not cube.files.exists(f"/tmp/new{round_}")
    cube.rollback(second.snapshot_id)
    assert said(cube, "x") == "1"
    assert cube.files.read("/tmp/f") == "second"
    assert {s.snapshot_id for s in Cube.list_snapshots(sandbox_id=cube.sandbox_id)[0]} == {
        first.snapshot_id,
        second.snapshot_id,
    }


def test_cube_clones_by_itself(cube):
    # The client's own way: a snapshot and n creates.
    said(cube, "x = 41")
    clones = cube.clone(n=10, concurrency=5)
    assert len({clone.sandbox_id for clone in clones}) == 10
    for clone in clones:
        assert said(clone, "x + 1") == "42"
        said(clone, "x = 0")
    assert said(cube, "x + 1") == "42"
    for clone in clones:
        clone.kill()
    assert Cube.list_snapshots(sandbox_id=cube.sandbox_id)[0] == []


def test_a_rollback_keeps_who_it_is_and_cuts_what_was_under_way(interpreter, forget):
    # R-T3
    planted = plant(interpreter, 10_000_000)
    before = interpreter.get_info()
    token = wire.token(interpreter)
    snapshot = interpreter.create_snapshot()
    forget(snapshot.snapshot_id)
    ended = []
    stream = ThreadPoolExecutor(1).submit(
        lambda: ended.append(httpx.get(wire.URL + "/hang", headers=wire.agent_headers(interpreter, port=8000), timeout=30))
    )
    printed(interpreter, "x = 1; del big; opened.close()")
    answer = wire.api("POST", f"/sandboxes/{interpreter.sandbox_id}/rollback", json={"snapshotID": snapshot.snapshot_id})
    assert answer.status_code == 200, answer.text
    is_as_planted(interpreter, planted)
    after = interpreter.get_info()
    assert (after.end_at, after.metadata, after.template_id) == (before.end_at, before.metadata, before.template_id)
    assert wire.token(interpreter) == token
    assert interpreter.commands.run("hostname").stdout.strip() == interpreter.sandbox_id
    stream.exception(timeout=40)
    draws = set()
    for _ in range(3):
        wire.api("POST", f"/sandboxes/{interpreter.sandbox_id}/rollback", json={"snapshotID": snapshot.snapshot_id})
        draws.add(printed(interpreter, "import random, ssl; print(random.random(), ssl.RAND_bytes(8))"))
    assert len(draws) == 3, "R-T6"


def test_a_rollback_that_fails_leaves_it_as_it_was(interpreter, forget):
    # R-T3: the image of the snapshot is broken on the disk.
    printed(interpreter, "x = 41")
    snapshot = interpreter.create_snapshot().snapshot_id
    forget(snapshot)
    printed(interpreter, "x = 42")
    image = f"{os.environ['SANDHOLD_DATA_DIR']}/snapshots/{snapshot}/image"
    for name in os.listdir(image):
        os.truncate(f"{image}/{name}", os.path.getsize(f"{image}/{name}") // 2)
    body = {"snapshotID": snapshot}
    refused = wire.api("POST", f"/sandboxes/{interpreter.sandbox_id}/rollback", json=body)
    assert refused.status_code == 500, refused.text
    assert printed(interpreter, "print(x)") == "42\n"
    assert wire.api("GET", f"/sandboxes/{interpreter.sandbox_id}").json()["state"] == "running"
    assert interpreter.commands.run("echo in").stdout == "in\n"


def test_only_snapshots_of_its_own_line_are_gone_back_to(new, forget):
    mine, other = new(), new()
    snapshot = mine.create_snapshot()
    forget(snapshot.snapshot_id)
    body = {"snapshotID": snapshot.snapshot_id}
    refused = wire.api("POST", f"/sandboxes/{other.sandbox_id}/rollback", json=body)
    assert (refused.status_code, refused.json()["error_code"]) == (404, "snapshot_not_found")
    assert other.commands.run("echo in").stdout == "in\n"
    mine.pause()
    assert wire.api("POST", f"/sandboxes/{mine.sandbox_id}/rollback", json=body).status_code == 200
    assert mine.commands.run("echo in").stdout == "in\n", "one that slept runs"


def test_deleting_source_and_middle_breaks_nothing(new, forget):
    # R-T5
    source = new()
    chain = []
    for number in range(3):
        source.files.write("/tmp/n", str(number))
        chain.append(source.create_snapshot().snapshot_id)
        forget(chain[-1])
    copy = new(chain[1])
    Sandbox.delete_snapshot(chain[1])
    source.kill()
    assert copy.files.read("/tmp/n") == "1"
    for number in (0, 2):
        assert new(chain[number]).files.read("/tmp/n") == str(number)
    lineage = wire.api("GET", f"/snapshots/{chain[2]}/lineage").json()
    told = [(a["snapshotID"], a["deleted"]) for a in lineage["ancestors"]]
    assert told == [(chain[1], True), (chain[0], False)]


def clones_of(sandbox, **body):
    return wire.api("POST", f"/sandboxes/{sandbox.sandbox_id}/clones", json=body)


@pytest.mark.long
def test_fifty_clones_of_a_large_sandbox(new):
    # R-T2, R-T6
    source = new("code-interpreter-v1", cls=Interpreter, timeout=900)
    printed(source, "import numpy as np, hashlib; big = np.random.default_rng(7).bytes(200_000_000)")
    digest = printed(source, "print(hashlib.sha256(big).hexdigest())")
    made = httpx.post(
        f"{wire.URL}/sandboxes/{source.sandbox_id}/clones",
        headers={"X-API-KEY": wire.KEY},
        json={"count": 50, "concurrency": 8},
        timeout=180,
    )
    assert made.status_code == 201, made.text
    ids = [copy["sandbox"]["sandboxID"] for copy in made.json()]
    try:
        assert len(set(ids)) == 50
        drawn = []
        for id_ in ids:
            clone = Interpreter.connect(id_)
            assert printed(clone, "print(hashlib.sha256(big).hexdigest())") == digest
            drawn.append(json.loads(printed(clone, DRAW)))
            printed(clone, "del big")
        for name in drawn[0]:
            assert len({d[name] for d in drawn}) == 50, name
    finally:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda id_: wire.api("DELETE", f"/sandboxes/{id_}"), ids))


def records_of_snapshots():
    """What the server has written down about each snapshot, hidden ones included; other tests have some too."""
    for record in Path(os.environ["SANDHOLD_DATA_DIR"]).glob("snapshots/*/*.json"):
        with contextlib.suppress(FileNotFoundError):
            yield record.read_text()


def test_clones_are_bounded_and_leave_no_snapshot(new):
    source = new()
    made = clones_of(source, count=3, concurrency=2, timeout=60)
    assert made.status_code == 201
    for copy in made.json():
        wire.api("DELETE", f"/sandboxes/{copy['sandbox']['sandboxID']}")
    for body in ({"count": 0}, {"count": 101}, {"concurrency": 0}):
        assert clones_of(source, **body).status_code == 400
    assert not [kept for kept in records_of_snapshots() if source.sandbox_id in kept]


def test_bc_068_deleting_while_it_is_captured(new):
    # BC-068
    sandbox = new("code-interpreter-v1", cls=Interpreter)
    printed(sandbox, "big = bytes(200_000_000)")
    with ThreadPoolExecutor(3) as pool:
        capture = pool.submit(wire.api, "POST", f"/sandboxes/{sandbox.sandbox_id}/snapshots")
        time.sleep(0.05)
        deletes = [pool.submit(wire.api, "DELETE", f"/sandboxes/{sandbox.sandbox_id}") for _ in range(2)]
        statuses = sorted(delete.result().status_code for delete in deletes)
    assert statuses == [204, 404]
    assert capture.result().status_code in (201, 404)
    if capture.result().status_code == 201:
        assert Sandbox.delete_snapshot(capture.result().json()["snapshotID"])


def test_bc_094_the_first_request_to_each_copy_is_answered(interpreter, new, forget):
    # BC-094
    printed(interpreter, "x = 41")
    snapshot = interpreter.create_snapshot().snapshot_id
    forget(snapshot)
    for _ in range(3):
        copy = new(snapshot, cls=Interpreter)
        assert copy.run_code("x + 1", timeout=15).text == "42"
        copy.kill()


def test_bc_097_a_copys_clock_is_right(interpreter, new, forget):
    # BC-097
    printed(interpreter, "import time")
    snapshot = interpreter.create_snapshot().snapshot_id
    forget(snapshot)
    time.sleep(3)
    copy = new(snapshot, cls=Interpreter)
    before = time.time()
    inside = float(printed(copy, "print(time.time())"))
    assert before - 0.5 < inside < time.time() + 0.5


def test_bc_100_a_database_that_is_written_to_stays_whole(interpreter, new, forget):
    # BC-100
    writer = """
import sqlite3, time
db = sqlite3.connect('/home/user/db', timeout=30); db.execute('pragma journal_mode=wal')
db.execute('create table if not exists t (x)')
while True:
    with db: db.execute('insert into t values (1)')
    time.sleep(0.002)
"""
    interpreter.files.write("/home/user/w.py", writer)
    for _ in range(3):
        interpreter.commands.run("python3 /home/user/w.py", background=True, timeout=0)
    count = "import sqlite3; db = sqlite3.connect('/home/user/db', timeout=30); print(db.execute('pragma integrity_check').fetchone()[0], db.execute('select count(*) from t').fetchone()[0])"
    rows = lambda s: printed(s, count).split()  # noqa: E731
    eventually(lambda: interpreter.run_code(count).error is None)
    eventually(lambda: int(rows(interpreter)[1]) > 20)
    snapshot = interpreter.create_snapshot().snapshot_id
    forget(snapshot)
    for sandbox in (interpreter, new(snapshot, cls=Interpreter)):
        verdict, seen = rows(sandbox)
        assert verdict == "ok" and int(seen) > 20
        eventually(lambda: int(rows(sandbox)[1]) > int(seen))


def test_the_command_line(sandbox):
    def run(*line):
        done = subprocess.run(
            [os.environ["SANDHOLD_BIN"], "sandbox", *line, "--url", wire.URL, "--api-key", wire.KEY],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip("\n")

    id_ = sandbox.sandbox_id
    sandbox.files.write("/tmp/f", "1")
    first = run("snapshot", id_)
    sandbox.files.write("/tmp/f", "2")
    second = run("snapshot", id_, "--name", "cli-env")
    rows = [row.split("\t") for row in run("timeline", id_).splitlines()]
    assert [(row[0], row[1], row[3]) for row in rows] == [("", first, "-"), ("*", second, first)]
    run("rollback", id_, first)
    assert sandbox.files.read("/tmp/f") == "1"
    assert json.loads(run("timeline", id_, "--json"))["currentSnapshotID"] == first
    run("rollback", id_, "cli-env")
    assert sandbox.files.read("/tmp/f") == "2"
    copies = run("clone", id_, "--count", "2", "--timeout", "60").splitlines()
    assert len(copies) == 2
    for copy in copies:
        assert Sandbox.connect(copy).files.read("/tmp/f") == "2"
        run("kill", copy)
    for snapshot in (first, second):
        assert Sandbox.delete_snapshot(snapshot)
