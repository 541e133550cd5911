"""Leases, quotas and verdicts against real sandboxes."""

import uuid

import pytest
from conftest import eventually
from e2b import Sandbox
from test_cli import cli, lines
from wire import api


@pytest.fixture
def owner():
    """An owner of one test; whatever lease it has at the end is released."""
    name = f"default:dev:e2e:{uuid.uuid4().hex}"
    yield name
    held = api("GET", "/v1/leases").json()["leases"]
    for lease in (lease for lease in held if lease["owner_id"] == name):
        release(name, lease["lease_id"])


def take(owner, lease, **more):
    body = {"owner_id": owner, "lease_id": lease, "template_id": "base", **more}
    return api("POST", "/v1/leases", json=body)


def release(owner, lease):
    return api("POST", "/v1/lease-releases", json={"owner_id": owner, "lease_id": lease})


def colour(sandbox):
    return api("GET", f"/v1/sandboxes/{sandbox}/verdict").json()["colour"]


def test_a_late_clean_up_leaves_the_new_session_alone(owner):
    # R-G6, R-G7, R-I5
    first = take(owner, "first")
    assert first.status_code == 201, first.text
    sandbox_id = first.json()["sandbox_id"]
    sandbox = Sandbox.connect(sandbox_id)
    sandbox.commands.run("echo kept >/tmp/work")

    second = take(owner, "second")
    assert second.status_code == 200, second.text
    assert second.json()["sandbox_id"] == sandbox_id
    assert second.json()["reused"] is True
    assert second.json()["fence"] > first.json()["fence"]

    late = release(owner, "first")
    assert late.status_code == 409
    assert late.json()["error_code"] == "STALE_LEASE"
    assert late.json()["sealed"] is True
    assert late.json()["current_fence"] == second.json()["fence"]
    assert sandbox.commands.run("cat /tmp/work").stdout == "kept\n"
    assert colour(sandbox_id) == "black"

    assert release(owner, "second").status_code == 202
    eventually(lambda: colour(sandbox_id) == "gone")
    assert api("GET", f"/sandboxes/{sandbox_id}").status_code == 404


def test_a_leased_sandbox_tells_whose_it_is(owner):
    # R-G2
    sandbox_id = take(owner, "l").json()["sandbox_id"]
    metadata = api("GET", f"/sandboxes/{sandbox_id}").json()["metadata"]
    assert metadata["namespace"] == "default"
    assert metadata["env"] == "dev"
    assert metadata["owner_id"] == owner
    assert metadata["managed_by"] == "sandhold-governor"


def test_sandboxes_of_sdks_are_counted_and_let_go(new):
    # R-G19
    used = lambda: api("GET", "/v1/buckets/default/dev").json()["direct"]
    sandbox = new()
    verdict = api("GET", f"/v1/sandboxes/{sandbox.sandbox_id}/verdict").json()
    assert verdict["colour"] == "black"
    assert [root["kind"] for root in verdict["roots"]] == ["lifetime"]
    assert used() >= 1
    sandbox.kill()
    assert colour(sandbox.sandbox_id) == "gone"


def test_the_command_line_takes_explains_and_releases(owner):
    # R-G17
    [sandbox_id] = lines("lease", "take", owner, "--lease", "one", "--template", "base")
    why = "\n".join(lines("why", sandbox_id))
    assert f"{sandbox_id} is black" in why
    assert "lease one: heard" in why
    assert [line for line in lines("lease", "ls") if owner in line]
    stale = cli("lease", "release", owner, "--lease", "another")
    assert stale.returncode != 0
    assert b"sealed" in stale.stderr
    lines("lease", "release", owner, "--lease", "one")
    eventually(lambda: colour(sandbox_id) == "gone")
    told = "\n".join(lines("why", sandbox_id))
    assert "its owner released it" in told
    assert "its platform deleted it" in told


def test_a_plan_can_be_asked_for():
    # R-G10
    plan = api("GET", "/v1/reclaimer/plan").json()
    assert plan["confirmed"] is True
    assert plan["white_rounds"] == 2
    assert cli("gc", "alarms").returncode == 0
