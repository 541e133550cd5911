"""The contract without an SDK: bytes as they are on the wire."""

import base64
import json
import os
import struct
import subprocess

import httpx

URL = os.environ.get("SANDHOLD_URL", "")
KEY = os.environ.get("SANDHOLD_API_KEY", "")
ENVD_PORT = 49983
END_OF_STREAM = 0x02


def api(method, path, key=KEY, **options):
    """One call of the control plane."""
    headers = {**({"X-API-KEY": key} if key is not None else {}), **options.pop("headers", {})}
    return httpx.request(method, URL + path, headers=headers, timeout=60, **options)


def token(sandbox):
    """What opens the agent's routes."""
    return sandbox._envd_access_token


def agent_headers(sandbox, user=None, port=ENVD_PORT):
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": str(port),
        "X-Access-Token": token(sandbox),
    }
    if user:
        headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
    return headers


def agent(sandbox, method, path, user=None, headers=None, **options):
    """One HTTP call of the data plane."""
    all_headers = {**agent_headers(sandbox, user), **(headers or {})}
    options.setdefault("timeout", 120)
    return httpx.request(method, URL + path, headers=all_headers, **options)


def rpc(sandbox, method, message, user=None, **options):
    """One unary call of the agent."""
    headers = {"Connect-Protocol-Version": "1", **options.pop("headers", {})}
    return agent(sandbox, "POST", f"/{method}", user, headers, json=message, **options)


def envelope(message, flags=0):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(body)) + body


def frames(chunks):
    """Divides a stream of bytes into (flags, message)."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= 5:
            flags, length = struct.unpack(">BI", buffer[:5])
            if len(buffer) < 5 + length:
                break
            body = bytes(buffer[5 : 5 + length])
            del buffer[: 5 + length]
            yield flags, json.loads(body)


def stream_headers(sandbox, user=None):
    return {
        **agent_headers(sandbox, user),
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
    }


def start_request(command, **options):
    process = {"cmd": "/bin/bash", "args": ["-l", "-c", command], **options.pop("process", {})}
    return {"process": process, "stdin": False, **options}


def open_start(client, sandbox, command, user=None, **options):
    """Opens a Start stream; a context manager of httpx."""
    return client.stream(
        "POST",
        URL + "/process.Process/Start",
        headers=stream_headers(sandbox, user),
        content=envelope(start_request(command, **options)),
    )


class Finished:
    """What a process printed and how it ended."""

    def __init__(self):
        self.pid = None
        self.stdout_length = 0
        self.stdout = bytearray()
        self.end = None
        self.error = None


def run(sandbox, command, keep=True, timeout=150, **options):
    """Runs a command through the raw protocol, to the end of its stream."""
    finished = Finished()
    with httpx.Client(timeout=timeout) as client:
        with open_start(client, sandbox, command, **options) as response:
            assert response.status_code == 200, response.read()
            for flags, message in frames(response.iter_raw()):
                if flags & END_OF_STREAM:
                    finished.error = message.get("error")
                    return finished
                event = message.get("event", {})
                if "start" in event:
                    finished.pid = event["start"]["pid"]
                if "end" in event:
                    finished.end = event["end"]
                text = event.get("data", {}).get("stdout")
                if text:
                    data = base64.b64decode(text)
                    finished.stdout_length += len(data)
                    if keep:
                        finished.stdout += data
    raise AssertionError("the stream had no end")


def agent_memory(sandbox):
    """Resident bytes of the agent inside the sandbox."""
    text = sandbox.commands.run("grep VmRSS /proc/1/status", user="root").stdout
    return int(text.split()[1]) * 1024


def server_memory():
    """Resident bytes of the server."""
    with open(f"/proc/{os.environ['SANDHOLD_PID']}/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def server_files():
    """Descriptors that the server has open."""
    return len(os.listdir(f"/proc/{os.environ['SANDHOLD_PID']}/fd"))


def port_headers(sandbox, port):
    """Routes a request to a port of a sandbox, as a browser would by its host name."""
    return {"Host": f"{port}-{sandbox.sandbox_id}.{sandbox.sandbox_domain or 'e2b.app'}"}


def cli(*arguments, check=True, **options):
    """The command line, for people."""
    command = [os.environ["SANDHOLD_BIN"], *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=check, **options
    )
