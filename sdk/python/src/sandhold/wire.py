"""Requests as values, answers and streams read: what both clients share. No I/O."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from .errors import RunFailed, SandholdError, ServerError, Unreachable, refusal
from .models import Completed, Event, Failed, event

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
    headers: Mapping[str, str] = field(default_factory=dict)


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


def stream_options(request: Request) -> dict[str, Any]:
    """What a request for a stream is built with. A stream may last; silence may not. The first answer waits for a
    sandbox."""
    timeout = httpx.Timeout(SILENCE_S, read=TIMEOUT_S, connect=10.0)
    return {
        "method": request.method,
        "url": request.path,
        "json": request.body,
        "headers": dict(request.headers),
        "timeout": timeout,
    }


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


class EventReader:
    """Lines of the streams of a run's events, made events; and how often a stream is attached again."""

    def __init__(self, run_id: str, after: int) -> None:
        self.run_id = run_id
        #: The number of the last event that was read.
        self.last = after
        #: Whether the last event that was read is the run's end.
        self.is_over = False
        self._attaches = 0
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
            self._attaches = 0
            self.is_over = isinstance(read, (Completed, Failed))
            yield read

    def broke_off(self) -> None:
        """What has come of an event that is not whole comes again. Raises Unreachable if it broke off too often."""
        self._fields = {}
        self._attaches += 1
        if self._attaches > ATTACHES_MAX:
            raise Unreachable(f"run {self.run_id} cannot be followed any more; it may go on")

    def never_ended(self) -> Unreachable:
        return Unreachable(f"run {self.run_id} was read to its end before")


def end_of(event: Event) -> Completed | None:
    """The event, if it is a run's end. Raises RunFailed unless its command ended by itself."""
    if isinstance(event, Failed):
        raise RunFailed(event)
    return event if isinstance(event, Completed) else None


def may_attach_again(error: Exception) -> bool:
    """Whether a stream that ended with this error is worth attaching to again."""
    if isinstance(error, ServerError):
        return error.is_retryable
    return isinstance(error, (httpx.TransportError, Unreachable))
