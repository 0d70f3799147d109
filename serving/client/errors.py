"""The errors of the client: a class for what a caller does about it, with the kind that the server gave."""

from __future__ import annotations

import json
import re
from typing import Any


class ClientError(Exception):
    """A request that brought no answer.

    Args:
        message: what happened, for people.
        kind: the server's kind, see docs/api.md; that of the class if empty.
        field: path of the part of the request that is wrong, such as `candidates.sparse.film_id`; "" if unknown.
        http_status: that came, or that of the class.
        grpc_status: name of the `grpc.StatusCode` that came, or that of the class.
        retry_after_s: seconds after which the server wants to be asked again; None if it did not say.
    """

    kind: str = "internal"
    http_status: int = 500
    grpc_status: str = "INTERNAL"

    def __init_subclass__(cls, kind: str = "", http_status: int = 0, grpc_status: str = "") -> None:
        super().__init_subclass__()
        cls.kind = kind or cls.kind
        cls.http_status = http_status or cls.http_status
        cls.grpc_status = grpc_status or cls.grpc_status

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        field: str = "",
        http_status: int = 0,
        grpc_status: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind or type(self).kind
        self.field = field
        self.http_status = http_status or type(self).http_status
        self.grpc_status = grpc_status or type(self).grpc_status
        self.retry_after_s = retry_after_s


class ClientConfigError(ClientError, kind="client_config", http_status=400, grpc_status="INVALID_ARGUMENT"):
    """An address, a certificate or an option that can't be used."""


class InvalidRequestError(ClientError, kind="bad_request", http_status=400, grpc_status="INVALID_ARGUMENT"):
    """A request that can't be answered as it is, now or later."""


class UnauthenticatedError(ClientError, kind="unauthenticated", http_status=401, grpc_status="UNAUTHENTICATED"):
    """No token, or one that the server does not know."""


class PermissionDeniedError(ClientError, kind="permission_denied", http_status=403, grpc_status="PERMISSION_DENIED"):
    """A token that may not do this."""


class NotFoundError(ClientError, kind="not_found", http_status=404, grpc_status="NOT_FOUND"):
    """No such model, version or route."""


class OverloadedError(ClientError, kind="overloaded", http_status=503, grpc_status="RESOURCE_EXHAUSTED"):
    """The server had too much to do. Nothing was started."""


class UnavailableError(ClientError, kind="unavailable", http_status=503, grpc_status="UNAVAILABLE"):
    """The server was not reached, was not ready, or is ending."""


class DeadlineExceededError(ClientError, kind="deadline_exceeded", http_status=504, grpc_status="DEADLINE_EXCEEDED"):
    """There was no answer in time."""


class InternalError(ClientError):
    """A fault of the server, or an answer that is none."""


_BY_KIND = {
    "overloaded": OverloadedError,
    "buffer_full": OverloadedError,
    "memory_budget": InternalError,
    "header_too_large": InvalidRequestError,
}
_BY_STATUS: dict[int | str, type[ClientError]] = {
    # Of two classes with one status the later: InvalidRequestError, and UnavailableError where no kind says otherwise.
    **{one.http_status: one for one in ClientError.__subclasses__()},
    **{one.grpc_status: one for one in ClientError.__subclasses__()},
    "FAILED_PRECONDITION": InvalidRequestError,
    "OUT_OF_RANGE": InvalidRequestError,
    "UNIMPLEMENTED": InvalidRequestError,
    408: DeadlineExceededError,
    429: OverloadedError,
    502: UnavailableError,
}


def refused(kind: str, field: str, problem: str) -> InvalidRequestError:
    """Make the error for a request that is not sent, in the words that the server would use."""
    return InvalidRequestError(f"{field}: {problem}", kind=kind, field=field)


def grpc_error(status: str, message: str, kind: str, pushback_ms: str = "") -> ClientError:
    """Make the error that a gRPC call ended with: name of its `grpc.StatusCode`, text, and trailers, "" if not there.

    These are `shardrank-error-kind`, and `grpc-retry-pushback-ms`, when to come again.
    """
    error = _BY_KIND.get(kind) or _BY_STATUS.get(status, InternalError)
    # gRPC carries no field of its own; a text about one begins with it.
    found = re.match(r"(\S+): ", message) if error is InvalidRequestError else None
    wait_s = int(pushback_ms) / 1000 if pushback_ms.isdecimal() else None
    field = found[1] if found else ""
    return error(message, kind=kind, field=field, grpc_status=status, retry_after_s=wait_s)


def http_error(status: int, body: bytes, retry_after: str | None) -> ClientError:
    """Make the error that an HTTP answer carries. A `retry-after` that is a date is passed over."""
    try:
        content: dict[str, Any] = json.loads(body)["error"]
        message, kind, field = str(content["message"]), str(content["kind"]), str(content.get("field") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not ours: a proxy's page, perhaps. Its beginning is the best there is.
        message, kind, field = f"HTTP status {status}: {body[:300].decode('utf-8', 'replace')}", "", ""
    error = _BY_KIND.get(kind) or _BY_STATUS.get(status, InvalidRequestError if status < 500 else InternalError)
    wait_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
    return error(message, kind=kind, field=field, http_status=status, retry_after_s=wait_s)
