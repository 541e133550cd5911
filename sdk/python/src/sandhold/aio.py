"""The client for asyncio: the same methods, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from . import wire
from .errors import RunFailed, ServerError, Unreachable
from .models import Alarm, Bucket, Completed, Event, Failed, HeldLease, Lease, Root, RunInfo, Verdict, read


class AsyncRun:
    """A run that goes on by itself. Iterating tells its events; a stream that breaks off is attached again."""

    def __init__(self, client: AsyncSandhold, run_id: str, stream: httpx.Response | None, after: int) -> None:
        self.run_id = run_id
        self._client = client
        self._stream = stream
        self._reader = wire.EventReader()
        self._reader.last = after

    @property
    def last_event_id(self) -> int:
        """The number of the last event that was read; to attach again later."""
        return self._reader.last

    async def __aiter__(self) -> AsyncIterator[Event]:
        attaches = 0
        while True:
            try:
                stream = self._stream or await self._client._attach(self.run_id, self._reader.last)
                self._stream = None
                try:
                    async for line in stream.aiter_lines():
                        for event in self._reader.line(line):
                            attaches = 0
                            yield event
                            if isinstance(event, (Completed, Failed)):
                                return
                finally:
                    await stream.aclose()
            except (httpx.TransportError, Unreachable):
                pass
            except ServerError as error:
                if not error.is_retryable:
                    raise
            self._reader.broke_off()
            attaches += 1
            if attaches > wire.ATTACHES_MAX:
                raise Unreachable(f"run {self.run_id} cannot be followed any more; it may go on")
            await asyncio.sleep(wire.ATTACH_PAUSE_S)

    async def wait(self) -> Completed:
        """Its end. Raises RunFailed unless its command ended by itself."""
        async for event in self:
            if isinstance(event, Completed):
                return event
            if isinstance(event, Failed):
                raise RunFailed(event)
        raise Unreachable(f"run {self.run_id} was read to its end before")

    async def info(self) -> RunInfo:
        return await self._client.run(self.run_id)

    async def cancel(self) -> bool:
        """Asks for its end; False if it has ended."""
        info = await self.info()
        return await self._client.cancel_run(self.run_id, owner_id=info.owner_id, lease_id=info.lease_id)

    async def close(self) -> None:
        """Stops listening. The run goes on."""
        if self._stream is not None:
            await self._stream.aclose()
            self._stream = None


class AsyncSandhold:
    """A Sandhold server. ``url`` and ``api_key`` default to SANDHOLD_URL and SANDHOLD_API_KEY."""

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self._http = httpx.AsyncClient(**wire.client_options(url, api_key))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncSandhold:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, request: wire.Request) -> Any:
        try:
            response = await self._http.request(request.method, request.path, json=request.body)
        except httpx.TransportError as error:
            raise Unreachable(str(error)) from error
        return wire.answer(response)

    async def _stream(self, request: wire.Request, headers: dict[str, str]) -> httpx.Response:
        sent = self._http.build_request(
            request.method, request.path, json=request.body, headers=headers, timeout=wire.stream_timeout()
        )
        try:
            response = await self._http.send(sent, stream=True)
            if not response.is_success:
                await response.aread()
        except httpx.TransportError as error:
            raise Unreachable(str(error)) from error
        if not response.is_success:
            wire.answer(response)
        return response

    async def _attach(self, run_id: str, after: int) -> httpx.Response:
        path = f"/v1/sandbox-runs/{wire.segment(run_id)}/events"
        return await self._stream(wire.Request("GET", path), {"Last-Event-ID": str(after)})

    # Runs

    async def start_run(
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
    ) -> AsyncRun:
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
        stream = await self._stream(request, {})
        return AsyncRun(self, stream.headers["x-run-id"], stream, 0)

    async def attach_run(self, run_id: str, after: int = 0) -> AsyncRun:
        """A run that there is, from the event after the one of this number."""
        return AsyncRun(self, run_id, await self._attach(run_id, after), after)

    async def run(self, run_id: str) -> RunInfo:
        return read(RunInfo, await self._call(wire.Request("GET", f"/v1/sandbox-runs/{wire.segment(run_id)}")))

    async def cancel_run(self, run_id: str, *, owner_id: str, lease_id: str) -> bool:
        """Asks for the end of a run; False if it has ended."""
        path = f"/v1/sandbox-runs/{wire.segment(run_id)}/cancel"
        answer = await self._call(wire.Request("POST", path, {"owner_id": owner_id, "lease_id": lease_id}))
        return bool(answer["cancelled"])

    # Leases

    async def take_lease(
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
        answer = await self._call(wire.take_request(owner_id, **more))
        return read(Lease, {**answer, "owner_id": owner_id, **bucket})

    async def renew_lease(self, lease: Lease) -> Lease:
        """Says that the holder is alive; at least every 30 s. Raises StaleLease if another has the sandbox."""
        return read(Lease, {**wire.holder(lease), **await self._call(wire.renew_request(lease))})

    async def release_lease(self, lease: Lease) -> None:
        """Ends the sandbox. Raises StaleLease if another has it."""
        await self._call(wire.release_request(lease))

    async def leases(self) -> list[HeldLease]:
        return [read(HeldLease, held) for held in (await self._call(wire.Request("GET", "/v1/leases")))["leases"]]

    # Buckets and verdicts

    async def buckets(self) -> list[Bucket]:
        return [read(Bucket, bucket) for bucket in (await self._call(wire.Request("GET", "/v1/buckets")))["buckets"]]

    async def bucket(self, namespace: str, env: str) -> Bucket:
        path = f"/v1/buckets/{wire.segment(namespace)}/{wire.segment(env)}"
        return read(Bucket, await self._call(wire.Request("GET", path)))

    async def set_bucket(self, namespace: str, env: str, *, quota: int, retention_s: int | None = None) -> Bucket:
        """Sets what a bucket may have and keeps. Needs an administrator's key."""
        path = f"/v1/buckets/{wire.segment(namespace)}/{wire.segment(env)}"
        body = {"quota": quota, "retention_s": retention_s}
        return read(Bucket, await self._call(wire.Request("PUT", path, body)))

    async def verdict(self, sandbox_id: str) -> Verdict:
        """Why a sandbox lives, or who ended it."""
        answer = await self._call(wire.Request("GET", f"/v1/sandboxes/{wire.segment(sandbox_id)}/verdict"))
        return read(Verdict, {**answer, "roots": [read(Root, root) for root in answer["roots"]]})

    async def alarms(self) -> list[Alarm]:
        """What an operator must know. Needs an administrator's key."""
        return [read(Alarm, alarm) for alarm in (await self._call(wire.Request("GET", "/v1/alarms")))["alarms"]]
