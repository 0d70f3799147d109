"""What the answers of a server become: the classes of `serving.errors` and `loader.errors`, with the server's kind."""

from __future__ import annotations

import json
import re
from typing import Any

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from serving.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)

_BY_KIND: dict[str, type[ShardrankError]] = {
    "overloaded": OverloadedError,
    "buffer_full": OverloadedError,
    "memory_budget": InternalError,
    "header_too_large": InvalidRequestError,
}
_BY_STATUS: dict[int | str, type[ShardrankError]] = {
    **dict.fromkeys(
        (400, "INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED"), InvalidRequestError
    ),
    **dict.fromkeys((401, "UNAUTHENTICATED"), UnauthenticatedError),
    **dict.fromkeys((403, "PERMISSION_DENIED"), PermissionDeniedError),
    **dict.fromkeys((404, "NOT_FOUND"), NotFoundError),
    **dict.fromkeys((408, 504, "DEADLINE_EXCEEDED"), DeadlineExceededError),
    **dict.fromkeys((429, "RESOURCE_EXHAUSTED"), OverloadedError),
    # 503 is OverloadedError's as well, whose kind says so.
    **dict.fromkeys((502, 503, "UNAVAILABLE"), UnavailableError),
}


def grpc_error(status: str, message: str, kind: str, pushback_ms: str = "") -> ShardrankError:
    """Make the error that a gRPC call ended with: name of its `grpc.StatusCode`, text, and trailers, "" if not there.

    These are `shardrank-error-kind`, and `grpc-retry-pushback-ms`, when to come again.
    """
    error = _BY_KIND.get(kind) or _BY_STATUS.get(status, InternalError)
    # gRPC carries no field of its own; a text about one begins with it.
    found = re.match(r"(\S+): ", message) if error is InvalidRequestError else None
    wait_s = int(pushback_ms) / 1000 if pushback_ms.isdecimal() else None
    return _made(error, message, found[1] if found else "", kind=kind or None, grpc_status=status, retry_after_s=wait_s)


def http_error(status: int, body: bytes, retry_after: str | None) -> ShardrankError:
    """Make the error that an HTTP answer carries. A `retry-after` that is a date is passed over."""
    try:
        content: dict[str, Any] = json.loads(body)["error"]
        message, kind, field = str(content["message"]), str(content["kind"]), str(content.get("field") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not ours: a proxy's page, perhaps. Its beginning is the best there is.
        message, kind, field = f"HTTP status {status}: {body[:300].decode('utf-8', 'replace')}", "", ""
    error = _BY_KIND.get(kind) or _BY_STATUS.get(status, InvalidRequestError if status < 500 else InternalError)
    wait_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
    return _made(error, message, field, kind=kind or None, http_status=status, retry_after_s=wait_s)


def _made(error: type[ShardrankError], message: str, field: str, **known: Any) -> ShardrankError:
    if issubclass(error, InvalidRequestError):
        return error(field, message.removeprefix(f"{field}: "), **known)
    return error(message, field=field, **known)
