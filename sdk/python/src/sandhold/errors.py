"""What can go wrong, by what can be done about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import Failed


class SandholdError(Exception):
    """Anything that this package raises."""


class Unreachable(SandholdError):
    """The server did not answer; whether it did what was asked is not known."""


class ServerError(SandholdError):
    """The server said no."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None) -> None:
        super().__init__(f"{message} ({code})")
        self.status = status
        #: The stable name of the cause; docs/errors has a page for each.
        self.code = code
        self.message = message
        #: In how many seconds it is worth asking again; None if never.
        self.retry_after_s = retry_after_s

    @property
    def is_retryable(self) -> bool:
        return self.retry_after_s is not None


class InvalidRequest(ServerError):
    """A field is not what it should be; the message begins with its name."""


class Unauthenticated(ServerError):
    """The key is missing or unknown."""


class Forbidden(ServerError):
    """The key may not do this."""


class NotFound(ServerError):
    """There is no such thing (any more)."""


class CapacityExceeded(ServerError):
    """No room within the time to wait. Worth asking again."""


class StaleLease(ServerError):
    """Another generation has the sandbox. The lease can never act again; take one under a new name."""

    #: The fencing token of the current generation, if there is one.
    current_fence: int | None = None


class RunFailed(SandholdError):
    """A run ended otherwise than by the exit of its command."""

    def __init__(self, event: Failed) -> None:
        super().__init__(f"{event.message} ({event.code})")
        self.event = event


_BY_CODE: dict[str, type[ServerError]] = {
    "invalid_request": InvalidRequest,
    "unauthenticated": Unauthenticated,
    "forbidden": Forbidden,
    "capacity_exceeded": CapacityExceeded,
    "CAPACITY_EXCEEDED": CapacityExceeded,
    "STALE_LEASE": StaleLease,
}


def refusal(status: int, body: Any, retry_after: str | None) -> ServerError:
    """The error of an answer that refuses."""
    body = body if isinstance(body, dict) else {}
    code = str(body.get("error_code", ""))
    kind = _BY_CODE.get(code, NotFound if status == 404 else ServerError)
    retry_after_s = float(retry_after) if retry_after and retry_after.isdigit() else None
    error = kind(status, code, str(body.get("message", f"the server answered {status}")), retry_after_s)
    if isinstance(error, StaleLease):
        error.current_fence = body.get("current_fence")
    return error
