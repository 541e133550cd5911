"""The package `sandhold` against a running server."""

import os
import uuid

import pytest
from conftest import eventually
from sandhold import (
    AsyncSandhold,
    Completed,
    InvalidRequest,
    NotFound,
    Progress,
    RunFailed,
    Sandhold,
    SandholdError,
    StaleLease,
    Started,
    Unauthenticated,
    Unreachable,
)


@pytest.fixture
def client():
    with Sandhold() as client:
        yield client


def names():
    return {"project_id": "sdk", "session_run_id": uuid.uuid4().hex}


def test_a_run_and_its_events(client):
    run = client.start_run(
        ["/bin/sh", "-c", "cat in.bin >out.bin; echo done; exit 4"],
        **names(),
        timeout=60,
        files={"in.bin": b"\x00\xff", "text": "text"},
        artifacts=["*.bin"],
    )
    events = list(run)
    assert [type(event) for event in events[:1] + events[-1:]] == [Started, Completed]
    told = {e.artifact.path: e.artifact.content for e in events if isinstance(e, Progress)}
    assert told == {"in.bin": b"\x00\xff", "out.bin": b"\x00\xff"}
    assert (events[-1].exit_code, events[-1].stdout) == (4, "done\n")
    again = list(client.attach_run(run.run_id, after=1))
    assert again == events[1:]
    assert run.info().state == "completed"
    eventually(lambda: client.verdict(events[0].sandbox_id).colour == "gone")


def test_a_run_that_is_cancelled_fails(client):
    run = client.start_run(["sleep", "600"], **names(), timeout=900)
    assert isinstance(next(iter(run)), Started)
    assert run.cancel() is True
    with pytest.raises(RunFailed) as failed:
        client.attach_run(run.run_id, after=1).wait()
    assert failed.value.event.code == "cancelled"
    assert run.cancel() is False


def test_leases(client):
    owner = f"default:dev:sdk:{uuid.uuid4().hex}"
    first = client.take_lease(owner, lease_id="a", template_id="base")
    assert first.reused is False
    assert client.renew_lease(first).sandbox_id == first.sandbox_id
    second = client.take_lease(owner, lease_id="b", template_id="base")
    assert (second.reused, second.sandbox_id) == (True, first.sandbox_id)
    with pytest.raises(StaleLease) as stale:
        client.release_lease(first)
    assert stale.value.current_fence == second.fence
    assert owner in {held.owner_id for held in client.leases()}
    verdict = client.verdict(second.sandbox_id)
    assert (verdict.colour, verdict.roots[0].kind) == ("black", "lease")
    client.release_lease(second)
    eventually(lambda: client.verdict(second.sandbox_id).colour == "gone")


def test_buckets(client):
    name = f"sdk{uuid.uuid4().hex[:8]}"
    with pytest.raises(NotFound):
        client.bucket(name, "dev")
    made = client.set_bucket(name, "dev", quota=3, retention_s=60)
    assert (made.quota, made.retention_s, made.used) == (3, 60, 0)
    assert (made.main_template, made.light_template) == ("code-interpreter-v1", "base")
    made = client.set_bucket(name, "dev", quota=3, main_template="base", run_timeout_s=60)
    assert (made.main_template, made.run_timeout_s, made.retention_s) == ("base", 60, None)
    assert client.bucket(name, "dev") == made
    assert made in client.buckets()
    assert isinstance(client.alarms(), list)


def test_errors_have_their_types(client):
    with pytest.raises(InvalidRequest, match="^timeout"):
        client.start_run(["true"], **names(), timeout=0)
    with pytest.raises(NotFound):
        client.run("nothing")
    with pytest.raises(TypeError):
        client.start_run("ls -l", **names(), timeout=60)
    with pytest.raises(TypeError, match="timeuot"):
        client.start_run(["true"], **names(), timeuot=60)
    with pytest.raises(TypeError, match="quote"):
        client.set_bucket("a", "dev", quota=1, quote=1)
    with Sandhold(api_key="e2b_wrong") as stranger, pytest.raises(Unauthenticated):
        stranger.leases()
    with Sandhold(url="http://127.0.0.1:9") as nowhere, pytest.raises(Unreachable):
        nowhere.leases()


def test_a_key_is_needed(monkeypatch):
    monkeypatch.delenv("SANDHOLD_API_KEY", raising=False)
    with pytest.raises(SandholdError, match="API key"):
        Sandhold(url=os.environ["SANDHOLD_URL"])


@pytest.mark.asyncio
async def test_the_same_with_asyncio():
    async with AsyncSandhold() as client:
        run = await client.start_run(["/bin/sh", "-c", "echo 1 >a.txt"], **names(), timeout=60, artifacts=["*.txt"])
        kinds = [type(event) async for event in run]
        assert kinds == [Started, Progress, Completed]
        again = await client.attach_run(run.run_id)
        assert (await again.wait()).exit_code == 0
        lease = await client.take_lease(f"default:dev:sdk:{uuid.uuid4().hex}", template_id="base")
        assert (await client.verdict(lease.sandbox_id)).colour == "black"
        await client.renew_lease(lease)
        await client.release_lease(lease)
