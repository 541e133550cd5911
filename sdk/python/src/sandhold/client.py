"""The client for code that waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

import httpx

from . import wire
from .errors import RunFailed, ServerError, Unreachable
from .models import Alarm, Bucket, Completed, Event, Failed, HeldLease, Lease, Root, RunInfo, Verdict, read


class Run:
    """A run that goes on by itself. Iterating tells its events; a stream that breaks off is attached again."""

    def __init__(self, client: Sandhold, run_id: str, stream: httpx.Response | None, after: int) -> None:
        self.run_id = run_id
        self._client = client
        self._stream = stream
        self._reader = wire.EventReader()
        self._reader.last = after

    @property
    def last_event_id(self) -> int:
        """The number of the last event that was read; to attach again later."""
        return self._reader.last

    def __iter__(self) -> Iterator[Event]:
        attaches = 0
        while True:
            try:
                stream = self._stream or self._client._attach(self.run_id, self._reader.last)
                self._stream = None
                with closing(stream):
                    for line in stream.iter_lines():
                        for event in self._reader.line(line):
                            attaches = 0
                            yield event
                            if isinstance(event, (Completed, Failed)):
                                return
            except (httpx.TransportError, Unreachable):
                pass
            except ServerError as error:
                if not error.is_retryable:
                    raise
            self._reader.broke_off()
            attaches += 1
            if attaches > wire.ATTACHES_MAX:
                raise Unreachable(f"run {self.run_id} cannot be followed any more; it may go on")
            time.sleep(wire.ATTACH_PAUSE_S)

    def wait(self) -> Completed:
        """Its end. Raises RunFailed unless its command ended by itself."""
        for event in self:
            if isinstance(event, Completed):
                return event
            if isinstance(event, Failed):
                raise RunFailed(event)
        raise Unreachable(f"run {self.run_id} was read to its end before")

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

    def _call(self, request: wire.Request) -> Any:
        try:
            response = self._http.request(request.method, request.path, json=request.body)
        except httpx.TransportError as error:
            raise Unreachable(str(error)) from error
        return wire.answer(response)

    def _stream(self, request: wire.Request, headers: dict[str, str]) -> httpx.Response:
        sent = self._http.build_request(
            request.method, request.path, json=request.body, headers=headers, timeout=wire.stream_timeout()
        )
        try:
            response = self._http.send(sent, stream=True)
            if not response.is_success:
                response.read()
        except httpx.TransportError as error:
            raise Unreachable(str(error)) from error
        if not response.is_success:
            wire.answer(response)
        return response

    def _attach(self, run_id: str, after: int) -> httpx.Response:
        path = f"/v1/sandbox-runs/{wire.segment(run_id)}/events"
        return self._stream(wire.Request("GET", path), {"Last-Event-ID": str(after)})

    # Runs

    def start_run(
        self,
        command: Sequence[str],
        *,
        project_id: str,
        session_run_id: str,
        timeout: int,
        files: Mapping[str, str | bytes] | None = None,
        context: Any = None,
        env_vars: Mapping[str, str] | None = None,
        cwd: str | None = None,
        artifacts: Sequence[str] | None = None,
        template: str | None = None,
        template_id: str | None = None,
        owner_id: str | None = None,
        lease_id: str | None = None,
        run_id: str | None = None,
        keep: str | None = None,
        namespace: str | None = None,
        env: str | None = None,
    ) -> Run:
        """Gets a sandbox and begins a run in it. With the ``run_id`` of a run that there is, attaches to it."""
        request = wire.run_request(
            command,
            project_id=project_id,
            session_run_id=session_run_id,
            timeout=timeout,
            files=files,
            context=context,
            env_vars=dict(env_vars) if env_vars else None,
            cwd=cwd,
            artifacts=list(artifacts) if artifacts else None,
            template=template,
            template_id=template_id,
            owner_id=owner_id,
            lease_id=lease_id,
            run_id=run_id,
            keep=keep,
            namespace=namespace,
            env=env,
        )
        stream = self._stream(request, {})
        return Run(self, stream.headers["x-run-id"], stream, 0)

    def attach_run(self, run_id: str, after: int = 0) -> Run:
        """A run that there is, from the event after the one of this number."""
        return Run(self, run_id, self._attach(run_id, after), after)

    def run(self, run_id: str) -> RunInfo:
        return read(RunInfo, self._call(wire.Request("GET", f"/v1/sandbox-runs/{wire.segment(run_id)}")))

    def cancel_run(self, run_id: str, *, owner_id: str, lease_id: str) -> bool:
        """Asks for the end of a run; False if it has ended."""
        path = f"/v1/sandbox-runs/{wire.segment(run_id)}/cancel"
        answer = self._call(wire.Request("POST", path, {"owner_id": owner_id, "lease_id": lease_id}))
        return bool(answer["cancelled"])

    # Leases

    def take_lease(
        self,
        owner_id: str,
        *,
        lease_id: str | None = None,
        template_id: str | None = None,
        ttl_s: int | None = None,
        namespace: str | None = None,
        env: str | None = None,
    ) -> Lease:
        """The owner's sandbox, or a new one. The same ``lease_id`` renews; another one takes the sandbox over."""
        bucket = wire.given(namespace=namespace, env=env)
        more = wire.given(lease_id=lease_id, template_id=template_id, ttl_s=ttl_s, **bucket)
        answer = self._call(wire.take_request(owner_id, **more))
        return read(Lease, {**answer, "owner_id": owner_id, **bucket})

    def renew_lease(self, lease: Lease) -> Lease:
        """Says that the holder is alive; at least every 30 s. Raises StaleLease if another has the sandbox."""
        return read(Lease, {**wire.holder(lease), **self._call(wire.renew_request(lease))})

    def release_lease(self, lease: Lease) -> None:
        """Ends the sandbox. Raises StaleLease if another has it."""
        self._call(wire.release_request(lease))

    def leases(self) -> list[HeldLease]:
        return [read(HeldLease, held) for held in self._call(wire.Request("GET", "/v1/leases"))["leases"]]

    # Buckets and verdicts

    def buckets(self) -> list[Bucket]:
        return [read(Bucket, bucket) for bucket in self._call(wire.Request("GET", "/v1/buckets"))["buckets"]]

    def bucket(self, namespace: str, env: str) -> Bucket:
        path = f"/v1/buckets/{wire.segment(namespace)}/{wire.segment(env)}"
        return read(Bucket, self._call(wire.Request("GET", path)))

    def set_bucket(self, namespace: str, env: str, *, quota: int, retention_s: int | None = None) -> Bucket:
        """Sets what a bucket may have and keeps. Needs an administrator's key."""
        path = f"/v1/buckets/{wire.segment(namespace)}/{wire.segment(env)}"
        body = {"quota": quota, "retention_s": retention_s}
        return read(Bucket, self._call(wire.Request("PUT", path, body)))

    def verdict(self, sandbox_id: str) -> Verdict:
        """Why a sandbox lives, or who ended it."""
        answer = self._call(wire.Request("GET", f"/v1/sandboxes/{wire.segment(sandbox_id)}/verdict"))
        return read(Verdict, {**answer, "roots": [read(Root, root) for root in answer["roots"]]})

    def alarms(self) -> list[Alarm]:
        """What an operator must know. Needs an administrator's key."""
        return [read(Alarm, alarm) for alarm in self._call(wire.Request("GET", "/v1/alarms"))["alarms"]]
