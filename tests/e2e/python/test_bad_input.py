"""Input that is wrong or hostile gets the documented error, and nothing is lost or crashed."""

import base64
import hashlib
import json
import os
import struct
import time
import uuid

import httpx
import pytest
import wire
from conftest import eventually

JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def server_lives():
    """The same server process answers before and after."""
    yield
    assert wire.api("GET", "/health", key=None).status_code == 200
    assert os.path.exists(f"/proc/{os.environ['SANDHOLD_PID']}")


def create(**body):
    return wire.api("POST", "/v2/sandboxes", json={"templateID": "base", **body})


def assert_error(answer, *statuses):
    assert answer.status_code in statuses, (answer.status_code, answer.text)
    body = answer.json()
    assert body["code"] == answer.status_code and body["message"]
    return body


@pytest.mark.parametrize(
    "name", ["no-such", "../../etc", "base:none", "x" * 10_000, "", "a/b/c", "base\n", "\u0000"]
)
def test_unknown_templates(name):
    assert_error(create(templateID=name), 400, 404)


@pytest.mark.parametrize("key", ["wrong", "e2b_" + "0" * 40, "", "x" * 5_000])
def test_wrong_keys(key):
    answer = wire.api("GET", "/v2/sandboxes", key=key)
    assert answer.status_code in (401, 431)


def test_a_revoked_key():
    name = "r" + uuid.uuid4().hex[:8]
    made = json.loads(
        wire.cli("key", "create", "--namespace", name, "--env", "dev", "--json").stdout
    )
    assert wire.api("GET", "/v2/sandboxes", key=made["key"]).status_code == 200
    wire.cli("key", "revoke", made["id"], "--yes")
    eventually(lambda: wire.api("GET", "/v2/sandboxes", key=made["key"]).status_code == 401)


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"nul", b"\xff\xfe", b'{"templateID": 3}', b'{"templateID": "base", "timeout": "x"}',
     b'{"templateID":"base","metadata":{"a":1}}', b"[" * 5_000, b'{"a":' * 5_000],
)
def test_malformed_json(body):
    assert_error(wire.api("POST", "/v2/sandboxes", content=body, headers=JSON), 400)


def test_an_oversized_body():
    body = json.dumps({"templateID": "base", "metadata": {"a": "x" * 20_000_000}}).encode()
    try:
        assert_error(wire.api("POST", "/v2/sandboxes", content=body, headers=JSON), 413)
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        pass  # The server hung up before all of it was sent, which is its right.


@pytest.mark.parametrize("timeout", [-5, 0, 10**12, 2**64, 1.5, 1e308, True])
def test_absurd_timeouts(timeout, sandbox):
    answer = create(timeout=timeout)
    if answer.status_code == 201:
        # Large ones may be granted; the end is then a date that clients can read.
        created = answer.json()["sandboxID"]
        assert wire.api("DELETE", f"/sandboxes/{created}").status_code in (204, 404)
    else:
        assert_error(answer, 400)
    path = f"/sandboxes/{sandbox.sandbox_id}/timeout"
    if timeout not in (0, -5):
        assert wire.api("POST", path, json={"timeout": timeout}).status_code in (204, 400)
    assert wire.api("GET", f"/sandboxes/{sandbox.sandbox_id}").status_code == 200


def test_names_of_ten_thousand_characters(sandbox):
    long = "n" * 10_000
    assert_error(wire.api("GET", f"/sandboxes/{long}"), 400, 404, 414)
    answer = wire.agent(sandbox, "GET", f"/files?path=/tmp/{long}")
    assert answer.status_code in (400, 404, 414)
    answer = wire.rpc(sandbox, "filesystem.Filesystem/MakeDir", {"path": f"/tmp/{long}"})
    assert answer.status_code in (400, 404, 500) and answer.json()["code"]
    answer = wire.rpc(sandbox, "filesystem.Filesystem/Stat", {"path": f"/tmp/{long}"}, user=long)
    assert answer.status_code in (400, 401, 404, 431)


@pytest.mark.parametrize("path", ["/sandboxes/..%2f..%2fetc", "/sandboxes/%00", "/sandboxes/A" * 3, "/no/such"])
def test_strange_paths(path):
    assert wire.api("GET", path).status_code in (400, 404)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "99999999999"])
def test_unknown_ports(sandbox, port):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": port}
    answer = httpx.get(wire.URL + "/", headers=headers)
    assert answer.status_code in (400, 404, 502)
    answer = httpx.get(wire.URL + "/", headers={"Host": f"{port}-{sandbox.sandbox_id}.e2b.app"})
    assert answer.status_code in (400, 404, 502)


def sign(sandbox, path, operation="read", expiration=None, user=""):
    raw = f"{path}:{operation}:{user}:{wire.token(sandbox)}"
    if expiration is not None:
        raw += f":{expiration}"
    return "v1_" + base64.b64encode(hashlib.sha256(raw.encode()).digest()).rstrip(b"=").decode()


def test_signatures_are_for_one_path_operation_and_time(sandbox):
    sandbox.files.write("/tmp/a", "a")
    sandbox.files.write("/tmp/b", "b")

    def get(path, signature, **more):
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
        query = {"path": path, "signature": signature, **more}
        return httpx.get(wire.URL + "/files", params=query, headers=headers).status_code

    assert get("/tmp/a", sign(sandbox, "/tmp/a")) == 200
    assert get("/tmp/b", sign(sandbox, "/tmp/a")) == 401
    assert get("/tmp/a", sign(sandbox, "/tmp/a", "write")) == 401
    past, future = int(time.time()) - 10, int(time.time()) + 100
    assert get("/tmp/a", sign(sandbox, "/tmp/a", expiration=future), signature_expiration=future) == 200
    assert get("/tmp/a", sign(sandbox, "/tmp/a", expiration=past), signature_expiration=past) == 401
    assert get("/tmp/a", sign(sandbox, "/tmp/a", expiration=past), signature_expiration=future) == 401
    assert get("/tmp/a", "v1_nonsense") == 401
    assert get("/tmp/a", "") == 401


FRAMES = {
    "longer than it says": struct.pack(">BI", 0, 2) + b'{"process":{"cmd":"true"}}',
    "shorter than it says": struct.pack(">BI", 0, 10_000) + b"{}",
    "gigantic": struct.pack(">BI", 0, 2**32 - 1) + b"{}",
    "compressed without a coding": struct.pack(">BI", 1, 2) + b"{}",
    "not json": struct.pack(">BI", 0, 3) + b"abc",
    "empty": b"",
    "half a head": b"\0\0",
}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_that_lie(sandbox, kind):
    answer = httpx.post(
        wire.URL + "/process.Process/Start",
        headers=wire.stream_headers(sandbox),
        content=FRAMES[kind],
        timeout=30,
    )
    if answer.status_code == 200:
        ends = [m for flags, m in wire.frames([answer.content]) if flags & wire.END_OF_STREAM]
        assert ends and ends[-1]["error"]["code"]
    else:
        assert 400 <= answer.status_code < 500
    assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_a_guest_that_answers_garbage(sandbox):
    from test_gateway import get

    script = (
        "import socket\ns = socket.create_server(('', 4646)); print('up', flush=True)\n"
        "while True:\n c = s.accept()[0]; c.recv(4096); c.sendall(b'\\x00\\xffnot http at all\\r\\n\\r\\n'); c.close()"
    )
    sandbox.files.write("/tmp/garbage.py", script)
    handle = sandbox.commands.run("python3 /tmp/garbage.py", background=True, timeout=0)
    next(out for out, _, _ in handle if out)
    assert get(sandbox, "/", port=4646).status_code == 502
    assert sandbox.is_running()


def test_a_guest_whose_agent_answers_nothing(new):
    sandbox = new()
    # Root inside may stop the agent itself; the platform must outlive it and remove it.
    try:
        sandbox.commands.run("kill -STOP 1 || true; kill -KILL 1 || true", user="root", timeout=5)
    except Exception:
        pass
    assert wire.api("GET", "/v2/sandboxes").status_code == 200
    assert wire.api("DELETE", f"/sandboxes/{sandbox.sandbox_id}").status_code in (204, 404)
    assert wire.api("GET", f"/sandboxes/{sandbox.sandbox_id}").status_code == 404


def test_half_a_request_holds_nobody_up():
    import socket
    from urllib.parse import urlsplit

    url = urlsplit(wire.URL)
    sockets = []
    for text in (b"GET / HTTP/1.1\r\nHost: x\r\n", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        s = socket.create_connection((url.hostname, url.port))
        s.sendall(text)
        sockets.append(s)
    assert wire.api("GET", "/health", key=None).status_code == 200
    for s in sockets:
        s.close()
