"""The client for code that waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import httpx

from . import calls, wire
from .errors import SandholdError, Unreachable
from .models import Alarm, Bucket, Completed, Event, HeldLease, Lease, RunInfo, Verdict

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class Run:
    """A run that goes on by itself. Iterating tells its events; a stream that breaks off is attached again."""

    def __init__(self, client: Sandhold, run_id: str, stream: httpx.Response | None, after: int) -> None:
        self.run_id = run_id
        self._client = client
        self._stream = stream
        self._reader = wire.EventReader(run_id, after)

    @property
    def last_event_id(self) -> int:
        """The number of the last event that was read; to attach again later."""
        return self._reader.last

    def __iter__(self) -> Iterator[Event]:
        while not self._reader.is_over:
            try:
                stream = self._stream or self._client._stream(calls.attach_run(self.run_id, self._reader.last))
                self._stream = None
                with closing(stream):
                    for line in stream.iter_lines():
                        yield from self._reader.line(line)
                        if self._reader.is_over:
                            return
            except (httpx.TransportError, SandholdError) as error:
                if not wire.may_attach_again(error):
                    raise
            self._reader.broke_off()
            time.sleep(wire.ATTACH_PAUSE_S)

    def wait(self) -> Completed:
        """Its end. Raises RunFailed unless its command ended by itself."""
        for event in self:
            if end := wire.end_of(event):
                return end
        raise self._reader.never_ended()

    def info(self) -> RunInfo:
        return self._client.run(self.run_id)

    def cancel(self) -> bool:
        """Asks for its end; False if it has ended."""
        info = self.info()
        return self._client.cancel_run(self.run_id, owner_id=info.owner_id, lease_id=info.lease_id)

    def close(self) -> None:
        """Stops listening. The run goes on."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class Sandhold:
    """A Sandhold server. ``url`` and ``api_key`` default to SANDHOLD_URL and SANDHOLD_API_KEY."""

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self._http = httpx.Client(**wire.client_options(url, api_key))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Sandhold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, call: calls.Call[T]) -> T:
        request = call.request
        try:
            response = self._http.request(request.method, request.path, json=request.body)
        except httpx.TransportError as error:
            raise Unreachable(str(error)) from error
        return call.reads(wire.answer(response))

    def _stream(self, request: wire.Request) -> httpx.Response:
        sent = self._http.build_request(**wire.stream_options(request))
        try:
            response = self._http.send(sent, stream=True)
            if not response.is_success:
                response.read()
        except httpx.TransportError as error:
            raise Unreachable(str(error)) from error
        if not response.is_success:
            wire.answer(response)
        return response

    # Runs

    def start_run(
        self, command: Sequence[str], *, project_id: str, session_run_id: str, **options: Unpack[calls.RunOptions]
    ) -> Run:
        """Gets a sandbox and begins a run in it. With the ``run_id`` of a run that there is, attaches to it."""
        stream = self._stream(calls.start_run(command, project_id, session_run_id, options))
        return Run(self, stream.headers["x-run-id"], stream, 0)

    def attach_run(self, run_id: str, after: int = 0) -> Run:
        """A run that there is, from the event after the one of this number."""
        return Run(self, run_id, self._stream(calls.attach_run(run_id, after)), after)

    def run(self, run_id: str) -> RunInfo:
        return self._call(calls.run(run_id))

    def cancel_run(self, run_id: str, *, owner_id: str, lease_id: str) -> bool:
        """Asks for the end of a run; False if it has ended."""
        return self._call(calls.cancel_run(run_id, owner_id, lease_id))

    # Leases

    def take_lease(self, owner_id: str, **options: Unpack[calls.LeaseOptions]) -> Lease:
        """The owner's sandbox, or a new one. The same ``lease_id`` renews; another one takes the sandbox over."""
        return self._call(calls.take_lease(owner_id, options))

    def renew_lease(self, lease: Lease) -> Lease:
        """Says that the holder is alive; at least every 30 s. Raises StaleLease if another has the sandbox."""
        return self._call(calls.renew_lease(lease))

    def release_lease(self, lease: Lease) -> None:
        """Ends the sandbox. Raises StaleLease if another has it."""
        self._call(calls.release_lease(lease))

    def leases(self) -> list[HeldLease]:
        return self._call(calls.leases())

    # Buckets and verdicts

    def buckets(self) -> list[Bucket]:
        return self._call(calls.buckets())

    def bucket(self, namespace: str, env: str) -> Bucket:
        return self._call(calls.bucket(namespace, env))

    def set_bucket(self, namespace: str, env: str, *, quota: int, **options: Unpack[calls.PolicyOptions]) -> Bucket:
        """Sets what a bucket may have, keeps and gives to its runs. Needs an administrator's key."""
        return self._call(calls.set_bucket(namespace, env, quota, options))

    def verdict(self, sandbox_id: str) -> Verdict:
        """Why a sandbox lives, or who ended it."""
        return self._call(calls.verdict(sandbox_id))

    def alarms(self) -> list[Alarm]:
        """What an operator must know. Needs an administrator's key."""
        return self._call(calls.alarms())
