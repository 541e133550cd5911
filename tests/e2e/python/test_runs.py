"""Runs against real sandboxes: what they tell, and that nothing of them is left (R-G1, R-G3)."""

import base64
import hashlib
import json
import signal
import subprocess
import threading
import time
import uuid

import httpx
import pytest
from conftest import eventually
from e2b import Sandbox
from test_cli import SANDHOLD, cli
from wire import KEY, URL, api

HEADERS = {"X-API-KEY": KEY}


def events(response):
    """The events of a stream, as (number, kind, data)."""
    number = kind = None
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            number = int(value)
        elif name == "event":
            kind = value
        elif name == "data":
            yield number, kind, json.loads(value)


def body(command, **more):
    return {
        "project_id": "e2e",
        "session_run_id": uuid.uuid4().hex,
        "command": command,
        "timeout": 60,
        **more,
    }


def begin(command, **more):
    """A stream that is open: the context manager of httpx."""
    request = body(command, **more)
    return httpx.stream("POST", f"{URL}/v1/sandbox-runs", json=request, headers=HEADERS, timeout=90)


def run(command, **more):
    """All events of a run."""
    with begin(command, **more) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        return list(events(response))


def shell(script):
    return ["/bin/sh", "-c", script]


def attached(run_id, after=0):
    headers = {**HEADERS, "Last-Event-ID": str(after)}
    url = f"{URL}/v1/sandbox-runs/{run_id}/events"
    with httpx.stream("GET", url, headers=headers, timeout=90) as response:
        assert response.status_code == 200
        return list(events(response))


def start(command, **more):
    """Begins a run and goes away when it has started; the run goes on."""
    with begin(command, **more) as response:
        assert response.status_code == 200
        for _, kind, data in events(response):
            assert kind == "started", data
            return data


def is_gone(sandbox_id):
    verdict = api("GET", f"/v1/sandboxes/{sandbox_id}/verdict").json()
    return verdict["colour"] == "gone" and api("GET", f"/sandboxes/{sandbox_id}").status_code == 404


def owners():
    return {lease["owner_id"] for lease in api("GET", "/v1/leases").json()["leases"]}


def leaves_nothing(started):
    eventually(lambda: is_gone(started["sandbox_id"]))
    assert started["owner_id"] not in owners()


def test_a_run_from_its_files_to_its_exit():
    told = run(
        shell('cat in/data.txt "$SANDHOLD_CONTEXT"; echo made >out.txt; echo $NAME >&2; exit 3'),
        files=[{"path": "in/data.txt", "content": "data "}],
        context={"question": "why"},
        env_vars={"NAME": "value"},
        cwd="work",
        artifacts=["*.txt"],
    )
    assert [number for number, _, _ in told] == list(range(1, len(told) + 1))
    assert [kind for _, kind, _ in told] == ["started", "progress", "completed"]
    started, progress, completed = (data for _, _, data in told)
    assert started["owner_id"].startswith("default:dev:e2e:")
    assert started["workspace"] == "/home/user/work"
    artifact = progress["artifact"]
    assert artifact["path"] == "out.txt"
    assert base64.b64decode(artifact["content_base64"]) == b"made\n"
    assert completed["exit_code"] == 3
    assert completed["stdout"] == 'data {"question":"why"}'
    assert completed["stderr"] == "value\n"
    leaves_nothing(started)
    seen = api("GET", f"/v1/sandbox-runs/{started['run_id']}").json()
    assert (seen["state"], seen["exit_code"]) == ("completed", 3)


def test_artifacts_are_told_while_it_runs():
    with begin(shell("echo 1 >a.txt; while [ ! -e go ]; do sleep 0.1; done"), artifacts=["**/*.txt"]) as stream:
        told = events(stream)
        _, _, started = next(told)
        _, kind, progress = next(told)
        assert (kind, progress["artifact"]["path"]) == ("progress", "a.txt")
        Sandbox.connect(started["sandbox_id"]).files.write("go", "")
        _, kind, _ = list(told)[-1]
        assert kind == "completed"
    leaves_nothing(started)


def test_large_artifacts_come_in_parts_and_larger_ones_are_left_out():
    told = run(
        shell("head -c 3000000 /dev/urandom >a.bin; sha256sum a.bin; head -c 9000000 /dev/zero >b.bin"),
        artifacts=["*.bin"],
    )
    parts = [data["artifact"] for _, kind, data in told if kind == "progress"]
    whole = b""
    for part in (part for part in parts if part["path"] == "a.bin"):
        whole = whole[: part["offset"]] + base64.b64decode(part["content_base64"])
    assert told[-1][2]["stdout"].split()[0] == hashlib.sha256(whole).hexdigest()
    left_out = [part for part in parts if part["path"] == "b.bin"]
    assert [part["omitted"] for part in left_out] == ["too_large"]


def test_a_client_that_drops_misses_nothing():
    started = start(shell("for n in 1 2 3; do echo $n >$n.txt; sleep 0.3; done"), artifacts=["*.txt"])
    all_of_it = attached(started["run_id"])
    kinds = [kind for _, kind, _ in all_of_it]
    assert (kinds[0], kinds[-1]) == ("started", "completed")
    told = {data["artifact"]["path"] for _, kind, data in all_of_it if kind == "progress"}
    assert told == {"1.txt", "2.txt", "3.txt"}
    assert attached(started["run_id"], after=2) == all_of_it[2:]
    leaves_nothing(started)


def test_a_run_is_cancelled_by_owner_and_lease():
    started = start(["sleep", "600"])
    path = f"/v1/sandbox-runs/{started['run_id']}/cancel"
    mine = {"owner_id": started["owner_id"], "lease_id": started["lease_id"]}
    assert api("POST", path, json={**mine, "owner_id": "other"}).status_code == 404
    wrong = api("POST", path, json={**mine, "lease_id": "old"})
    assert (wrong.status_code, wrong.json()["error_code"]) == (409, "STALE_LEASE")
    assert api("POST", path, json=mine).status_code == 202
    _, kind, data = attached(started["run_id"])[-1]
    assert (kind, data["code"]) == ("error", "cancelled")
    assert api("POST", path, json=mine).json() == {"cancelled": False}
    leaves_nothing(started)


def test_the_deadline_ends_it():
    began = time.monotonic()
    told = run(shell("echo before; sleep 600"), timeout=2)
    assert time.monotonic() - began < 30
    _, kind, data = told[-1]
    assert (kind, data["code"], data["stdout"]) == ("error", "deadline_exceeded", "before\n")
    leaves_nothing(told[0][2])


def test_a_kept_sandbox_has_no_process_left_and_is_reused():
    owner = f"default:dev:e2e:{uuid.uuid4().hex}"
    mine = {"owner_id": owner, "lease_id": "one"}
    script = "echo kept >note; setsid sleep 1000 & (sleep 1001 &) ; sleep 0.2; exit 0"
    first = run(shell(script), **mine)
    sandbox = Sandbox.connect(first[0][2]["sandbox_id"])
    assert "sleep 100" not in sandbox.commands.run("ps -e -o args").stdout
    second = run(["cat", "note"], **mine)
    assert second[0][2]["reused"] is True
    assert second[0][2]["sandbox_id"] == sandbox.sandbox_id
    assert second[-1][2]["stdout"] == "kept\n"
    left = sandbox.commands.run("ls -A /tmp/.sandhold-runs").stdout
    assert left == "", "the run's own directory goes with it"
    assert api("POST", "/v1/lease-releases", json=mine).status_code == 202
    leaves_nothing(first[0][2])


def test_a_second_run_in_the_same_sandbox_is_refused():
    owner = f"default:dev:e2e:{uuid.uuid4().hex}"
    mine = {"owner_id": owner, "lease_id": "one"}
    started = start(["sleep", "600"], **mine)
    with begin(["true"], **mine) as second:
        second.read()
        assert (second.status_code, second.json()["error_code"]) == (409, "conflict")
    assert api("POST", "/v1/lease-releases", json=mine).status_code == 202
    _, kind, data = attached(started["run_id"])[-1]
    assert (kind, data["code"]) in {("error", "lease_lost"), ("error", "sandbox_gone")}
    leaves_nothing(started)


def test_a_sandbox_that_is_killed_ends_its_run():
    started = start(["sleep", "600"])
    assert api("DELETE", f"/sandboxes/{started['sandbox_id']}").status_code == 204
    _, kind, data = attached(started["run_id"])[-1]
    assert (kind, data["code"]) == ("error", "sandbox_gone")
    leaves_nothing(started)


def test_a_full_disk_does_not_hide_the_exit_code():
    told = run(shell("cat /dev/zero >fill 2>/dev/null; sleep 0.1; exit 7"), timeout=120)
    _, kind, data = told[-1]
    # The disk limit may end the sandbox instead.
    assert (kind, data["exit_code"]) == ("completed", 7) or data["code"] == "sandbox_gone", data
    leaves_nothing(told[0][2])


def test_a_command_that_is_not_there_is_told():
    told = run(["/no/such/program"])
    _, kind, data = told[-1]
    assert (kind, data["exit_code"]) == ("completed", 127)
    assert "/no/such/program" in data["stderr"]


def test_a_run_that_kills_whoever_waits_for_it_still_ends():
    told = run(shell("kill -9 $PPID; sleep 100"))
    _, kind, data = told[-1]
    assert (kind, data["exit_code"]) == ("completed", 137)
    leaves_nothing(told[0][2])


def test_a_slow_reader_slows_nobody():
    with begin(
        shell("for n in $(seq 40); do head -c 500000 /dev/urandom >$n.bin; done"), artifacts=["*.bin"]
    ) as slow:
        told = events(slow)
        _, _, started = next(told)
        # Nobody reads here; the run is over all the same.
        fast = attached(started["run_id"])
        assert fast[-1][1] == "completed"
        assert list(told)[-1][1] == "completed"
    leaves_nothing(started)


def test_the_same_run_id_is_the_same_run():
    run_id = f"mine-{uuid.uuid4().hex}"
    session = uuid.uuid4().hex
    results = []

    def ask():
        results.append(run(shell("echo once"), run_id=run_id, session_run_id=session))

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(results) == 4
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("template", ["light", "main"])
def test_both_templates_by_their_roles(template):
    told = run(["true"], template=template)
    assert told[-1][2]["exit_code"] == 0


def test_the_command_line_runs_a_command_from_its_files_to_its_exit(tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("from here")
    result = cli(
        "run",
        "--file",
        f"{source}:data/in.txt",
        "--artifact",
        "out/*.txt",
        "--save",
        str(tmp_path / "saved"),
        "--env",
        "NAME=value",
        "--",
        "/bin/sh",
        "-c",
        'mkdir out; cp data/in.txt out/a.txt; echo "to $NAME"; exit 6',
    )
    assert (result.returncode, result.stdout) == (6, b"to value\n"), result.stderr
    assert (tmp_path / "saved/out/a.txt").read_text() == "from here"
    refused = cli("run", "--template", "nothing", "--", "true")
    assert refused.returncode == 1
    assert b"template" in refused.stderr


def test_ctrl_c_cancels_the_run():
    session = uuid.uuid4().hex
    process = subprocess.Popen(
        [SANDHOLD, "run", "--session", session, "--", "sleep", "600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert b"started" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"it was cancelled" in told
    owner = f"default:dev:cli:{session}"
    eventually(lambda: owner not in owners())
