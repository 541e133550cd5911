"""A development server with hot reload behind the gateway, with and without host masking (BC-109)."""

import asyncio
import io
import json
import re
import tarfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import wire
from conftest import eventually
from websockets.asyncio.client import connect

PORT = 5173
SITE = Path(__file__).parent.parent / "vite"
PAGE = '<html><body><script type="module" src="/main.js"></script></body></html>'
MAIN = "document.title = '{}'\nimport.meta.hot.accept()\n"


def start_vite(sandbox, allowed_hosts):
    modules = io.BytesIO()
    with tarfile.open(fileobj=modules, mode="w") as archive:
        archive.add(SITE / "node_modules", "node_modules")
    files = {
        "modules.tar": modules.getvalue(),
        "site/package.json": '{"type": "module"}',
        "site/index.html": PAGE,
        "site/main.js": MAIN.format("one"),
        "site/vite.config.js": "export default " + json.dumps({"server": allowed_hosts}),
    }
    sandbox.files.write_files([{"path": path, "data": data} for path, data in files.items()])
    sandbox.commands.run("tar xf modules.tar -C site", timeout=60)
    vite = f"cd site && exec deno run -A node_modules/vite/bin/vite.js --host 127.0.0.1 --port {PORT} --strictPort"
    sandbox.commands.run(vite + " > /tmp/vite.log 2>&1", background=True, timeout=0)
    try:
        eventually(lambda: get(sandbox, "/").status_code != 502, within=90)
    except AssertionError as error:
        raise AssertionError(sandbox.files.read("/tmp/vite.log")) from error


def get(sandbox, path):
    return httpx.get(wire.URL + path, headers=wire.port_headers(sandbox, PORT), timeout=60)


async def seconds_until_update(sandbox):
    """Connects as Vite's own client does, changes a module, and waits to be told."""
    client = get(sandbox, "/@vite/client").text
    token = re.search(r'wsToken = "([^"]+)"', client).group(1)
    host, url = wire.port_headers(sandbox, PORT)["Host"], urlsplit(wire.URL)
    socket = connect(
        f"ws://{host}/?token={token}",
        host=url.hostname,
        port=url.port,
        origin=f"http://{host}",
        subprotocols=["vite-hmr"],
        open_timeout=30,
        proxy=None,
    )
    async with socket as updates:
        assert json.loads(await asyncio.wait_for(updates.recv(), 15)) == {"type": "connected"}
        # A module that nobody asked for is not watched.
        assert "'one'" in get(sandbox, "/main.js").text
        started = time.monotonic()
        sandbox.files.write("site/main.js", MAIN.format("two"))
        told = json.loads(await asyncio.wait_for(updates.recv(), 15))
        waited = time.monotonic() - started
    assert told["type"] == "update" and told["updates"][0]["path"] == "/main.js", told
    return waited


@pytest.mark.parametrize("masked", [False, True], ids=["own host", "masked host"])
def test_bc_109_hot_reload_behind_the_gateway(new, masked):
    if masked:
        # The server sees the host that it knows, so it needs to know no other.
        sandbox = new("code-interpreter-v1", network={"mask_request_host": "localhost:${PORT}"})
        start_vite(sandbox, {})
    else:
        sandbox = new("code-interpreter-v1")
        start_vite(sandbox, {"allowedHosts": [f".{sandbox.sandbox_domain or 'e2b.app'}"]})
    page = get(sandbox, "/")
    assert page.status_code == 200 and "/@vite/client" in page.text, page.text
    assert asyncio.run(seconds_until_update(sandbox)) < 1
    assert "'two'" in get(sandbox, "/main.js").text
