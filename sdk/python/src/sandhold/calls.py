"""Every route as a request and a way to read its answer: what both clients share. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

from . import wire
from .models import Alarm, Bucket, HeldLease, Lease, Root, RunInfo, Verdict, read
from .wire import Request, given, segment

T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and what its answer says."""

    request: Request
    reads: Callable[[Any], T]


class BucketOf(TypedDict, total=False):
    """Where it counts; as with the key if left out."""

    namespace: str | None
    env: str | None


class LeaseOptions(BucketOf, total=False):
    """What a lease may say."""

    lease_id: str | None
    #: main or light.
    template: str | None
    template_id: str | None
    ttl_s: int | None


class RunOptions(BucketOf, total=False):
    """What a run may say."""

    #: In seconds; as its bucket says if left out.
    timeout: int | None
    files: Mapping[str, str | bytes] | None
    context: Any
    env_vars: Mapping[str, str] | None
    cwd: str | None
    artifacts: Sequence[str] | None
    #: main or light.
    template: str | None
    template_id: str | None
    owner_id: str | None
    lease_id: str | None
    run_id: str | None
    #: sandbox or nothing.
    keep: str | None


class PolicyOptions(TypedDict, total=False):
    """What a bucket may say beside its quota."""

    retention_s: int | None
    main_template: str | None
    light_template: str | None
    run_timeout_s: int | None
    run_timeout_max_s: int | None


def _run_path(run_id: str) -> str:
    return f"/v1/sandbox-runs/{segment(run_id)}"


def _bucket_path(namespace: str, env: str) -> str:
    return f"/v1/buckets/{segment(namespace)}/{segment(env)}"


def _one(kind: type[T]) -> Callable[[Any], T]:
    return lambda answer: read(kind, answer)


def _all(field: str, kind: type[T]) -> Callable[[Any], list[T]]:
    return lambda answer: [read(kind, item) for item in answer[field]]


def _check(what: str, kind: Any, options: Mapping[str, Any]) -> None:
    """A name that is misspelt must not be sent and be ignored."""
    if unknown := options.keys() - kind.__annotations__.keys():
        raise TypeError(f"{what} has no {', '.join(sorted(unknown))}")


def start_run(command: Sequence[str], project_id: str, session_run_id: str, options: RunOptions) -> Request:
    """Answered with a stream."""
    if isinstance(command, str):
        raise TypeError("command is a list: the program and its arguments")
    _check("a run", RunOptions, options)
    more = dict(options)
    files = wire.files_of(options.get("files"))
    for name, plain in (("env_vars", dict), ("artifacts", list)):
        more[name] = plain(more[name]) if more.get(name) else None
    body = {**more, "command": list(command), "project_id": project_id, "session_run_id": session_run_id}
    return Request("POST", "/v1/sandbox-runs", given(**{**body, "files": files}))


def attach_run(run_id: str, after: int) -> Request:
    """Answered with a stream."""
    return Request("GET", f"{_run_path(run_id)}/events", headers={"Last-Event-ID": str(after)})


def run(run_id: str) -> Call[RunInfo]:
    return Call(Request("GET", _run_path(run_id)), _one(RunInfo))


def cancel_run(run_id: str, owner_id: str, lease_id: str) -> Call[bool]:
    body = {"owner_id": owner_id, "lease_id": lease_id}
    return Call(Request("POST", f"{_run_path(run_id)}/cancel", body), lambda answer: bool(answer["cancelled"]))


def take_lease(owner_id: str, options: LeaseOptions) -> Call[Lease]:
    _check("a lease", LeaseOptions, options)
    bucket = given(namespace=options.get("namespace"), env=options.get("env"))
    request = Request("POST", "/v1/leases", given(**options, owner_id=owner_id))
    return Call(request, lambda answer: read(Lease, {**answer, "owner_id": owner_id, **bucket}))


def _holder(lease: Lease) -> dict[str, Any]:
    return given(owner_id=lease.owner_id, lease_id=lease.lease_id, namespace=lease.namespace, env=lease.env)


def renew_lease(lease: Lease) -> Call[Lease]:
    holder = _holder(lease)
    request = Request("POST", "/v1/lease-heartbeats", {**holder, "fence": lease.fence})
    return Call(request, lambda answer: read(Lease, {**holder, **answer}))


def release_lease(lease: Lease) -> Call[None]:
    return Call(Request("POST", "/v1/lease-releases", _holder(lease)), lambda _: None)


def leases() -> Call[list[HeldLease]]:
    return Call(Request("GET", "/v1/leases"), _all("leases", HeldLease))


def buckets() -> Call[list[Bucket]]:
    return Call(Request("GET", "/v1/buckets"), _all("buckets", Bucket))


def bucket(namespace: str, env: str) -> Call[Bucket]:
    return Call(Request("GET", _bucket_path(namespace, env)), _one(Bucket))


def set_bucket(namespace: str, env: str, quota: int, options: PolicyOptions) -> Call[Bucket]:
    _check("a bucket", PolicyOptions, options)
    return Call(Request("PUT", _bucket_path(namespace, env), {**options, "quota": quota}), _one(Bucket))


def verdict(sandbox_id: str) -> Call[Verdict]:
    def reads(answer: Any) -> Verdict:
        return read(Verdict, {**answer, "roots": [read(Root, root) for root in answer["roots"]]})

    return Call(Request("GET", f"/v1/sandboxes/{segment(sandbox_id)}/verdict"), reads)


def alarms() -> Call[list[Alarm]]:
    return Call(Request("GET", "/v1/alarms"), _all("alarms", Alarm))
