"""Create, list, look, prolong, end: the sandbox calls of every SDK (wire contract 1)."""

import datetime
import uuid

import pytest
import wire
from conftest import eventually
from e2b import (
    AuthenticationException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
)


def pages(paginator):
    items = []
    while paginator.has_next:
        items += paginator.next_items()
    return items


def seconds_left(sandbox):
    return (sandbox.get_info().end_at - datetime.datetime.now(datetime.UTC)).total_seconds()


def test_a_created_sandbox_answers_at_once(new):
    # R-P6
    sandbox = new()
    assert sandbox.is_running()
    assert sandbox.commands.run("echo ready").stdout == "ready\n"


def test_info_tells_what_was_asked_for(new):
    sandbox = new(metadata={"team": "blue", "ü": "ö & ="}, timeout=600)
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"team": "blue", "ü": "ö & ="}
    assert info.state == SandboxState.RUNNING
    assert info.name == "base"
    assert info.cpu_count >= 1 and info.memory_mb >= 128
    assert info.envd_version == "0.6.13"
    assert 590 < (info.end_at - info.started_at).total_seconds() < 615


def test_the_default_lifetime_is_five_minutes(new):
    sandbox = new(timeout=None)
    info = sandbox.get_info()
    assert 295 < (info.end_at - info.started_at).total_seconds() < 310


def test_environment_reaches_every_command(new):
    sandbox = new(envs={"COLOUR": "teal"})
    assert sandbox.commands.run("echo $COLOUR").stdout == "teal\n"
    assert sandbox.commands.run("echo $COLOUR", envs={"COLOUR": "red"}).stdout == "red\n"
    assert sandbox.commands.run("sudo -E true; echo $E2B_SANDBOX").stdout == "true\n"
    assert sandbox.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == sandbox.sandbox_id


def test_kill_is_final_and_told_apart_from_never(sandbox):
    # R-L8
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert Sandbox.kill(str(uuid.uuid4()).replace("-", "")[:20]) is False
    assert sandbox.is_running() is False
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def test_set_timeout_shortens_and_prolongs(sandbox):
    # R-L11
    sandbox.set_timeout(1000)
    assert 980 < seconds_left(sandbox) <= 1001
    sandbox.set_timeout(60)
    assert 40 < seconds_left(sandbox) <= 61


def test_a_lifetime_that_is_over_ends_the_sandbox(new):
    sandbox = new()
    sandbox.set_timeout(1)
    eventually(lambda: not sandbox.is_running())
    with pytest.raises(SandboxNotFoundException):
        sandbox.set_timeout(100)


def test_bc_069_connect_never_shortens_a_life(new):
    sandbox = new(timeout=1800)
    for timeout in (300, None):
        Sandbox.connect(sandbox.sandbox_id, timeout=timeout)
        assert seconds_left(sandbox) > 1780
    Sandbox.connect(sandbox.sandbox_id, timeout=3600)
    assert seconds_left(sandbox) > 3580


def test_connect_gives_a_usable_sandbox(sandbox):
    sandbox.files.write("note", "mine")
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.files.read("note") == "mine"
    assert wire.token(again) == wire.token(sandbox)


def test_list_finds_by_metadata_state_template_and_time(new):
    mark = uuid.uuid4().hex
    before = datetime.datetime.now(datetime.UTC)
    first = new(metadata={"mark": mark, "n": "1 & 2=3 %"})
    second = new(metadata={"mark": mark, "n": "2"})

    def found(**query):
        query.setdefault("metadata", {"mark": mark})
        return {item.sandbox_id for item in pages(Sandbox.list(SandboxQuery(**query)))}

    both = {first.sandbox_id, second.sandbox_id}
    assert found() == both
    assert found(metadata={"mark": mark, "n": "1 & 2=3 %"}) == {first.sandbox_id}
    assert found(state=[SandboxState.RUNNING]) == both
    assert found(state=[SandboxState.PAUSED]) == set()
    assert found(template="base") == both
    assert found(template=first.get_info().template_id) == both
    assert found(template="code-interpreter-v1") == set()
    assert found(started_after=before - datetime.timedelta(seconds=2)) == both
    assert found(started_after=before + datetime.timedelta(hours=1)) == set()


def test_bc_084_a_filter_that_matches_nothing_finds_nothing(new):
    mark = uuid.uuid4().hex
    new(metadata={"mark": mark})
    for metadata in ({"no-such-key": "x"}, {"mark": "no-such-value"}):
        assert pages(Sandbox.list(SandboxQuery(metadata=metadata))) == []
    answer = wire.api("GET", "/v2/sandboxes?metadata=without-equals-sign")
    assert answer.status_code == 400 or answer.json() == []
    query = SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED])
    assert pages(Sandbox.list(query)) == [], "it runs"


def test_bc_082_paging_gives_each_once(new):
    mark = uuid.uuid4().hex
    made = [new(metadata={"mark": mark}).sandbox_id for _ in range(7)]
    query = SandboxQuery(metadata={"mark": mark})
    for limit in (1, 3, 7, 100):
        seen = [item.sandbox_id for item in pages(Sandbox.list(query, limit=limit))]
        assert sorted(seen) == sorted(made), limit
    newest = [i.sandbox_id for i in pages(Sandbox.list(query, limit=2, order="desc"))]
    oldest = [i.sandbox_id for i in pages(Sandbox.list(query, limit=2, order="asc"))]
    assert oldest == made and newest == made[::-1]
    for path in ("limit=0", "limit=101", "limit=-1", "limit=x", "nextToken=forged"):
        assert wire.api("GET", f"/v2/sandboxes?{path}").status_code == 400, path


def test_bc_082_a_token_belongs_to_its_filter(new):
    mark = uuid.uuid4().hex
    for _ in range(2):
        new(metadata={"mark": mark})
    first = wire.api("GET", f"/v2/sandboxes?limit=1&metadata=mark%3D{mark}")
    token = first.headers["x-next-token"]
    other = wire.api("GET", f"/v2/sandboxes?limit=1&metadata=other%3Dx&nextToken={token}")
    assert other.status_code == 400 or other.json() == []


def test_metrics_are_sampled(sandbox):
    samples = eventually(sandbox.get_metrics, within=30)
    sample = samples[-1]
    assert sample.cpu_count >= 1
    assert 0 < sample.mem_used <= sample.mem_total
    assert 0 <= sample.disk_used <= sample.disk_total
    assert sample.cpu_used_pct >= 0


def test_logs_are_there(sandbox):
    for path in ("/sandboxes/{}/logs", "/v2/sandboxes/{}/logs"):
        answer = wire.api("GET", path.format(sandbox.sandbox_id))
        assert answer.status_code == 200
        assert "logs" in answer.json()


def test_an_idempotency_key_makes_one_sandbox(new):
    key = uuid.uuid4().hex
    first = new(idempotency_key=key, metadata={"a": "1"})
    second = new(idempotency_key=key, metadata={"a": "1"})
    assert first.sandbox_id == second.sandbox_id
    with pytest.raises(SandboxException) as refused:
        new(idempotency_key=key, metadata={"a": "2"})
    assert refused.value.status_code == 422


def test_what_is_not_built_yet_is_refused_and_not_ignored(new):
    before = len(pages(Sandbox.list()))
    with pytest.raises(SandboxException):
        new(mcp={"duckduckgo": {}})
    assert len(pages(Sandbox.list())) >= before - 100


def test_a_wrong_key_is_refused():
    for key in ("e2b_" + "0" * 40, "x", " "):
        with pytest.raises(AuthenticationException):
            Sandbox.create("base", api_key=key)
    assert wire.api("GET", "/v2/sandboxes", key=None).status_code == 401


def test_an_unknown_template_is_told(new):
    with pytest.raises(SandboxException) as refused:
        new("no-such-template")
    assert refused.value.status_code == 404
    assert "template" in str(refused.value)


def test_bc_068_deletes_at_once_and_of_one_being_made(new):
    from concurrent.futures import ThreadPoolExecutor

    sandbox = new()
    with ThreadPoolExecutor(4) as pool:
        path = f"/sandboxes/{sandbox.sandbox_id}"
        answers = list(pool.map(lambda _: wire.api("DELETE", path).status_code, range(4)))
    assert 204 in answers and set(answers) <= {204, 404}
    assert wire.api("GET", path).status_code == 404


def test_bc_074_both_generations_of_routes_work(new):
    body = {"templateID": "base", "timeout": 60}
    for path in ("/sandboxes", "/v2/sandboxes"):
        answer = wire.api("POST", path, json=body)
        assert answer.status_code == 201, answer.text
        created = answer.json()
        assert {"templateID", "sandboxID", "clientID", "envdVersion"} <= created.keys()
        assert created["envdAccessToken"]
        assert wire.api("DELETE", f"/sandboxes/{created['sandboxID']}").status_code == 204


def test_bc_074_a_wrong_method_is_told_with_the_right_ones(sandbox):
    for path in ("/v2/sandboxes", f"/sandboxes/{sandbox.sandbox_id}/timeout"):
        answer = wire.api("PATCH", path, json={})
        assert answer.status_code == 405
        assert answer.headers["allow"]
        assert answer.json()["message"]


@pytest.mark.parametrize("route", ["/v2/sandboxes/{}/connect", "/sandboxes/{}/refreshes"])
def test_bc_075_bodies_of_every_kind(sandbox, route):
    path = route.format(sandbox.sandbox_id)
    bodies = {
        "none": {},
        "object": {"json": {}},
        "empty with type": {"content": b"", "headers": {"Content-Type": "application/json"}},
        "chunked": {
            "content": iter([b"{", b"}"]),
            "headers": {"Content-Type": "application/json"},
        },
        "null": {"content": b"null", "headers": {"Content-Type": "application/json"}},
        "extra field": {"json": {"somethingNew": {"deep": [1]}}},
    }
    for name, body in bodies.items():
        status = wire.api("POST", path, **body).status_code
        assert status in (200, 201, 204) or (name == "null" and status == 400), (name, status)
    large = wire.api("POST", path, json={"x": "y" * 2_000_000})
    assert large.status_code in (200, 201, 204, 400, 413)
    wrong = wire.api("POST", path, json={"timeout": "soon", "duration": "soon"})
    assert wrong.status_code == 400 and wrong.json()["message"]


def test_bc_081_a_killed_sandbox_leaves_room_at_once():
    from concurrent.futures import ThreadPoolExecutor

    def loop(_):
        for _ in range(3):
            sandbox = Sandbox.create("base", timeout=60)
            assert sandbox.kill() is True

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(loop, range(5)))


def test_another_tenant_sees_nothing(sandbox):
    # R-P8
    name = "t" + uuid.uuid4().hex[:8]
    made = wire.cli("key", "create", "--namespace", name, "--env", "dev", "--json")
    import json

    key = json.loads(made.stdout)["key"]
    path = f"/sandboxes/{sandbox.sandbox_id}"
    assert wire.api("GET", path, key=key).status_code == 404
    assert wire.api("DELETE", path, key=key).status_code == 404
    assert wire.api("POST", path + "/timeout", key=key, json={"timeout": 1}).status_code == 404
    assert wire.api("GET", "/v2/sandboxes", key=key).json() == []
    assert sandbox.is_running()


def test_health_is_json():
    answer = wire.api("GET", "/health", key=None)
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
