"""Ports of a sandbox from outside: HTTP, WebSocket, streams, and honest errors (R-P7)."""

import asyncio
import json
import time
from urllib.parse import urlsplit

import httpx
import pytest
import websockets
import wire
from conftest import eventually
from e2b import Sandbox
from websockets.asyncio.client import connect

PORT = 8000

ECHO = r"""
import base64, hashlib, http.server, json, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass
    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            return self.upgrade()
        if self.path == "/events":
            return self.events()
        self.answer({"path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()}})
    def do_POST(self):
        length = self.headers.get("Content-Length")
        size = 0
        if length is not None:
            left = int(length)
            while left:
                data = self.rfile.read(min(left, 65536)); left -= len(data); size += len(data)
        else:
            while True:
                n = int(self.rfile.readline(), 16); self.rfile.read(n); self.rfile.readline()
                if not n: break
                size += n
        self.answer({"size": size})
    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def events(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for i in range(5):
            self.wfile.write(b"data: %d\n\n" % i); self.wfile.flush(); time.sleep(0.5)
        self.close_connection = True
    def upgrade(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket"); self.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accept); self.end_headers()
        body = json.dumps({k.lower(): v for k, v in self.headers.items()}).encode()
        self.wfile.write(bytes([0x81, 126]) + len(body).to_bytes(2, "big") + body); self.wfile.flush()
        while True:
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 15 == 8: break
            n = head[1] & 127
            if n == 126: n = int.from_bytes(self.rfile.read(2), "big")
            mask = self.rfile.read(4)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(n)))
            self.wfile.write(bytes([head[0]]) + (bytes([n]) if n < 126 else bytes([126]) + n.to_bytes(2, "big")) + data)
            self.wfile.flush()
        self.close_connection = True

host, port = sys.argv[1], int(sys.argv[2])
http.server.ThreadingHTTPServer((host, port), Handler).serve_forever()
"""


def serve(sandbox, host="0.0.0.0", port=PORT):
    sandbox.files.write("/tmp/echo.py", ECHO)
    handle = sandbox.commands.run(f"python3 /tmp/echo.py {host} {port}", background=True, timeout=0)
    eventually(lambda: get(sandbox, "/", port).status_code == 200)
    return handle


def get(sandbox, path, port=PORT, headers=None):
    headers = {**wire.port_headers(sandbox, port), **(headers or {})}
    return httpx.get(wire.URL + path, headers=headers, timeout=30)


@pytest.fixture(scope="module")
def echo():
    sandbox = Sandbox.create("base", timeout=900)
    serve(sandbox)
    yield sandbox
    sandbox.kill()


def test_by_host_and_by_headers(echo):
    assert get(echo, "/a?b=c").json()["path"] == "/a?b=c"
    headers = {"E2b-Sandbox-Id": echo.sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    answer = httpx.get(wire.URL + "/by-header", headers=headers)
    assert answer.json()["path"] == "/by-header"
    assert echo.get_host(PORT).startswith(f"{PORT}-{echo.sandbox_id}.")


def test_keys_and_tokens_stay_outside(echo):
    secrets = {
        "X-API-KEY": wire.KEY,
        "X-Access-Token": wire.token(echo),
        "E2B-Traffic-Access-Token": "t",
        "Cube-Traffic-Access-Token": "t",
        "E2b-Sandbox-Id": echo.sandbox_id,
        "E2b-Sandbox-Port": str(PORT),
    }
    seen = get(echo, "/", headers={**secrets, "X-Mine": "kept"}).json()["headers"]
    names = {name.lower() for name in seen}
    assert "x-mine" in names
    assert not names & {"x-api-key", "e2b-traffic-access-token", "cube-traffic-access-token"}
    assert wire.KEY not in json.dumps(seen)


def test_long_uploads_of_both_kinds(echo):
    headers = wire.port_headers(echo, PORT)
    chunk = b"x" * 65536
    whole = httpx.post(wire.URL + "/", headers=headers, content=chunk * 320, timeout=60)
    assert whole.json() == {"size": 65536 * 320}
    parts = httpx.post(wire.URL + "/", headers=headers, content=(chunk for _ in range(320)), timeout=60)
    assert parts.json() == {"size": 65536 * 320}


def websocket(sandbox):
    url = urlsplit(wire.URL)
    host = wire.port_headers(sandbox, PORT)["Host"]
    return connect(f"ws://{host}/socket", host=url.hostname, port=url.port, open_timeout=30, proxy=None)


async def test_websockets(echo):
    async with websocket(echo) as socket:
        await socket.recv()
        for text in ("hello", "x" * 5000):
            await socket.send(text)
            assert await asyncio.wait_for(socket.recv(), 15) == text


async def test_bc_109_a_websocket_sees_the_same_host_as_a_request(echo):
    plain = get(echo, "/").json()["headers"]
    async with websocket(echo) as socket:
        upgraded = json.loads(await asyncio.wait_for(socket.recv(), 15))
    assert upgraded["host"] == plain["host"]


def test_bc_109_a_masked_host_is_masked_for_both(new):
    sandbox = new(network={"mask_request_host": "inner.example:${PORT}"})
    serve(sandbox)
    assert get(sandbox, "/").json()["headers"]["host"] == f"inner.example:{PORT}"

    async def upgraded():
        async with websocket(sandbox) as socket:
            return json.loads(await asyncio.wait_for(socket.recv(), 15))

    assert asyncio.run(upgraded())["host"] == f"inner.example:{PORT}"


def test_bc_111_events_arrive_one_by_one(echo):
    headers = {**wire.port_headers(echo, PORT), "Accept-Encoding": "gzip"}
    arrived = []
    with httpx.stream("GET", wire.URL + "/events", headers=headers, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                arrived.append(time.monotonic())
    assert len(arrived) == 5
    gaps = [b - a for a, b in zip(arrived, arrived[1:])]
    assert min(gaps) > 0.2, gaps


def test_bc_078_which_502_it_is(new):
    sandbox = new()
    closed = get(sandbox, "/", port=4444)
    assert closed.status_code == 502
    assert "port is not open" in closed.json()["message"]
    assert closed.json()["sandboxId"] == sandbox.sandbox_id
    unknown = httpx.get(wire.URL, headers={"Host": "80-abcdefghij0123456789.e2b.app"})
    assert unknown.status_code == 502
    assert "was not found" in unknown.json()["message"]
    sandbox.kill()
    gone = get(sandbox, "/", port=4444)
    assert gone.status_code == 502
    assert "was not found" in gone.json()["message"]


def test_bc_078_a_listener_that_closes_at_once_is_another_error(sandbox):
    script = "import socket; s = socket.create_server(('', 4545)); print('up', flush=True)\nwhile True: s.accept()[0].close()"
    sandbox.files.write("/tmp/closer.py", script)
    handle = sandbox.commands.run("python3 /tmp/closer.py", background=True, timeout=0)
    next(out for out, _, _ in handle if out)
    answer = get(sandbox, "/", port=4545)
    assert answer.status_code == 502
    assert "not found" not in answer.json()["message"]


def test_bc_078_a_server_on_loopback_only_is_reached_and_found_again(sandbox):
    handle = serve(sandbox, host="127.0.0.1")
    assert get(sandbox, "/x").json()["path"] == "/x"
    handle.kill()
    eventually(lambda: get(sandbox, "/").status_code == 502)
    serve(sandbox, host="127.0.0.1")
    assert get(sandbox, "/").status_code == 200


def test_traffic_tokens(new):
    sandbox = new(network={"allow_public_traffic": False})
    serve_token = sandbox.traffic_access_token
    assert serve_token
    sandbox.files.write("/tmp/echo.py", ECHO)
    sandbox.commands.run(f"python3 /tmp/echo.py 0.0.0.0 {PORT}", background=True, timeout=0)
    with_token = {"E2B-Traffic-Access-Token": serve_token}
    eventually(lambda: get(sandbox, "/", headers=with_token).status_code == 200)
    assert get(sandbox, "/").status_code == 403
    assert get(sandbox, "/", headers={"E2B-Traffic-Access-Token": "wrong"}).status_code == 403
    cube = {"cube-traffic-access-token": serve_token}
    assert get(sandbox, "/", headers=cube).status_code == 200


def test_control_calls_cannot_come_from_outside(sandbox):
    for path in ("/init", "/quiesce", "/ready", "/activity", "/tunnel?port=22", "/freeze"):
        for method in ("GET", "POST"):
            answer = wire.agent(sandbox, method, path, headers={"X-Sandhold-Control": "guess"})
            assert answer.status_code == 404, (method, path)


def test_a_header_cannot_lead_a_host_elsewhere(echo, new):
    other = new()
    headers = {
        **wire.port_headers(echo, PORT),
        "E2b-Sandbox-Id": other.sandbox_id,
        "E2b-Sandbox-Port": str(PORT),
    }
    # The name says which sandbox; the header of somebody else's page does not.
    assert httpx.get(wire.URL + "/", headers=headers).status_code == 200
