"""What the server answers. Fields that a newer server adds are left out."""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields
from typing import Any, TypeVar, Union

T = TypeVar("T")


def read(kind: type[T], data: dict[str, Any]) -> T:
    """A value of ``kind`` from the fields of an answer."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in names})


@dataclass(frozen=True)
class Lease:
    """A granted lease: who has it may use the sandbox until it expires."""

    sandbox_id: str
    lease_id: str
    #: The fencing token: it only grows.
    fence: int
    #: Whether the owner had the sandbox before.
    reused: bool
    #: RFC 3339.
    expires_at: str
    owner_id: str = ""
    namespace: str | None = None
    env: str | None = None


@dataclass(frozen=True)
class HeldLease:
    """A lease in force, as it is listed."""

    namespace: str
    env: str
    owner_id: str
    lease_id: str
    fence: int
    template_id: str
    expires_at: str
    #: None while it is being made.
    sandbox_id: str | None = None


@dataclass(frozen=True)
class Bucket:
    """What a tenant's environment may have, keeps, and has."""

    namespace: str
    env: str
    quota: int
    #: For how long leased but paused sandboxes are kept; None declares nothing.
    retention_s: int | None
    used: int
    direct: int
    paused: int
    uncounted: int
    #: What ``template="main"`` and ``template="light"`` mean for its runs and leases.
    main_template: str = ""
    light_template: str = ""
    #: For how many seconds a run may run that does not say; None: each must say.
    run_timeout_s: int | None = None
    #: For how many seconds a run may ask at most.
    run_timeout_max_s: int | None = None


@dataclass(frozen=True)
class Root:
    """One thing that holds a sandbox."""

    kind: str
    id: str
    age_s: int
    ttl_s: int


@dataclass(frozen=True)
class Verdict:
    """Why a sandbox lives, or who ended it."""

    sandbox_id: str
    #: black, grey, white or gone.
    colour: str
    roots: list[Root]
    deletable_when: str
    last_actions: list[str]
    text: str = ""


@dataclass(frozen=True)
class Alarm:
    """What an operator must know."""

    kind: str
    count: int
    message: str
    bucket: str | None = None


@dataclass(frozen=True)
class RunInfo:
    """How a run is."""

    run_id: str
    #: waiting, running, completed or error.
    state: str
    namespace: str
    env: str
    owner_id: str
    lease_id: str
    project_id: str
    session_run_id: str
    template_id: str
    last_event_id: int
    sandbox_id: str | None = None
    fence: int | None = None
    code: str | None = None
    exit_code: int | None = None
    message: str | None = None


@dataclass(frozen=True)
class Started:
    """The command was started."""

    run_id: str
    sandbox_id: str
    owner_id: str
    lease_id: str
    fence: int
    reused: bool
    template_id: str
    workspace: str | None = None
    event_id: int = 0


@dataclass(frozen=True)
class Artifact:
    """A part of a file that is new or has changed. One with the offset 0 begins the file anew."""

    path: str
    size: int
    offset: int
    #: Whether this is the last part.
    last: bool
    modified_at: str = ""
    #: None if it is left out, see ``omitted``.
    content: bytes | None = None
    #: too_large or total_too_large.
    omitted: str | None = None


@dataclass(frozen=True)
class Progress:
    """There is something new."""

    run_id: str
    artifact: Artifact
    event_id: int = 0


@dataclass(frozen=True)
class Completed:
    """The command ended by itself."""

    run_id: str
    exit_code: int
    #: The last 64 KiB.
    stdout: str
    stderr: str
    artifacts: int
    message: str = ""
    sandbox_id: str | None = None
    event_id: int = 0


@dataclass(frozen=True)
class Failed:
    """The run ended otherwise."""

    run_id: str
    #: cancelled, deadline_exceeded, lease_lost, lease_unconfirmed, sandbox_gone, not_started, sandbox_unresponsive or
    #: replica_lost.
    code: str
    message: str
    stdout: str = ""
    stderr: str = ""
    artifacts: int = 0
    sandbox_id: str | None = None
    event_id: int = 0


Event = Union[Started, Progress, Completed, Failed]


def event(kind: str, event_id: int, data: dict[str, Any]) -> Event | None:
    """The event of this kind; None for one that this version does not know."""
    data = {**data, "event_id": event_id}
    if kind == "started":
        return read(Started, data)
    if kind == "progress":
        content = data["artifact"].get("content_base64")
        artifact = {**data["artifact"], "content": None if content is None else base64.b64decode(content)}
        return read(Progress, {**data, "artifact": read(Artifact, artifact)})
    if kind == "completed":
        return read(Completed, data)
    if kind == "error":
        return read(Failed, data)
    return None
