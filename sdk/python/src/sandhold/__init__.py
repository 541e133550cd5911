"""Runs, leases, buckets and verdicts of a Sandhold server.

A thin layer over the routes under ``/v1``: one method for each route, one type for each answer. What is in a sandbox
is used with the E2B SDK.
"""

from .aio import AsyncRun, AsyncSandhold
from .client import Run, Sandhold
from .errors import (
    CapacityExceeded,
    Forbidden,
    InvalidRequest,
    NotFound,
    RunFailed,
    SandholdError,
    ServerError,
    StaleLease,
    Unauthenticated,
    Unreachable,
)
from .models import (
    Alarm,
    Artifact,
    Bucket,
    Completed,
    Event,
    Failed,
    HeldLease,
    Lease,
    Progress,
    Root,
    RunInfo,
    Started,
    Verdict,
)

__all__ = [
    "Alarm",
    "Artifact",
    "AsyncRun",
    "AsyncSandhold",
    "Bucket",
    "CapacityExceeded",
    "Completed",
    "Event",
    "Failed",
    "Forbidden",
    "HeldLease",
    "InvalidRequest",
    "Lease",
    "NotFound",
    "Progress",
    "Root",
    "Run",
    "RunFailed",
    "RunInfo",
    "Sandhold",
    "SandholdError",
    "ServerError",
    "StaleLease",
    "Started",
    "Unauthenticated",
    "Unreachable",
    "Verdict",
]
