"""Requests as values, and answers read: what both clients share. No I/O."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from .errors import SandholdError, refusal
from .models import Event, Lease, event

#: Where a server listens unless it is told otherwise.
DEFAULT_URL = "http://127.0.0.1:3000"
#: How long a request may take. One for a sandbox waits up to 30 s for a place.
TIMEOUT_S = 120.0
#: Without anything from a stream for this long it is attached again; the server says something every 15 s.
SILENCE_S = 60.0
#: How often a stream is attached again without an event in between.
ATTACHES_MAX = 30
#: How long to wait before that.
ATTACH_PAUSE_S = 1.0


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: Any = None


def client_options(url: str | None, api_key: str | None) -> dict[str, Any]:
    """What an httpx client is made with."""
    key = api_key or os.environ.get("SANDHOLD_API_KEY")
    if not key:
        raise SandholdError("there is no API key: give api_key or set SANDHOLD_API_KEY")
    url = url or os.environ.get("SANDHOLD_URL") or DEFAULT_URL
    return {
        "base_url": url.rstrip("/"),
        "headers": {"X-API-KEY": key},
        "timeout": httpx.Timeout(TIMEOUT_S, connect=10.0),
    }


def stream_timeout() -> httpx.Timeout:
    """A stream may last; silence may not. The first answer waits for a sandbox."""
    return httpx.Timeout(SILENCE_S, read=TIMEOUT_S, connect=10.0)


def answer(response: httpx.Response) -> Any:
    """What a read response says, or why not."""
    try:
        body = response.json() if response.content else None
    except json.JSONDecodeError:
        body = None
    if response.is_success:
        return body
    raise refusal(response.status_code, body, response.headers.get("retry-after"))


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def segment(text: str) -> str:
    return quote(text, safe="")


def files_of(files: Mapping[str, str | bytes] | None) -> list[dict[str, str]]:
    """Files by path, as the server takes them."""

    def file(path: str, content: str | bytes) -> dict[str, str]:
        if isinstance(content, str):
            return {"path": path, "content": content}
        return {"path": path, "content_base64": base64.b64encode(content).decode()}

    return [file(path, content) for path, content in (files or {}).items()]


def run_request(
    command: Sequence[str],
    *,
    project_id: str,
    session_run_id: str,
    timeout: int,
    files: Mapping[str, str | bytes] | None,
    **more: Any,
) -> Request:
    if isinstance(command, str):
        raise TypeError("command is a list: the program and its arguments")
    body = given(
        command=list(command),
        project_id=project_id,
        session_run_id=session_run_id,
        timeout=timeout,
        files=files_of(files),
        **more,
    )
    return Request("POST", "/v1/sandbox-runs", body)


def take_request(owner_id: str, **more: Any) -> Request:
    return Request("POST", "/v1/leases", given(owner_id=owner_id, **more))


def renew_request(lease: Lease) -> Request:
    return Request("POST", "/v1/lease-heartbeats", {**holder(lease), "fence": lease.fence})


def release_request(lease: Lease) -> Request:
    return Request("POST", "/v1/lease-releases", holder(lease))


def holder(lease: Lease) -> dict[str, Any]:
    return given(owner_id=lease.owner_id, lease_id=lease.lease_id, namespace=lease.namespace, env=lease.env)


class EventReader:
    """Lines of a stream of server-sent events, made events."""

    def __init__(self) -> None:
        #: The number of the last event that was read.
        self.last = 0
        self._fields: dict[str, str] = {}

    def line(self, line: str) -> Iterator[Event]:
        """Takes a line; yields the event that it completes."""
        if line:
            name, _, value = line.partition(":")
            self._fields[name] = value.removeprefix(" ")
            return
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return
        number = int(fields.get("id", self.last))
        read = event(fields.get("event", ""), number, json.loads(fields["data"]))
        self.last = number
        if read is not None:
            yield read

    def broke_off(self) -> None:
        """What has come of an event that is not whole comes again."""
        self._fields = {}
