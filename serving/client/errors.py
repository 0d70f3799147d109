"""The errors of the client: one tree by what a caller does about them, each with the kind that the server gave.

```
ClientError                     500 INTERNAL            all of them
├── ClientConfigError           400 INVALID_ARGUMENT    an address, a certificate or an option that can't be used
├── InvalidRequestError         400 INVALID_ARGUMENT    the request, refused by the server or before it was sent
│   └── SchemaDigestError       409 FAILED_PRECONDITION packed for another schema; the client sees to that itself
├── UnauthenticatedError        401 UNAUTHENTICATED     no token, or one that nobody knows
├── PermissionDeniedError       403 PERMISSION_DENIED   a token that may not do this
├── NotFoundError               404 NOT_FOUND           no such model, version or route
├── OverloadedError             503 RESOURCE_EXHAUSTED  shed at once, nothing was started
├── UnavailableError            503 UNAVAILABLE         not reached, not ready or ending; may be sent again
├── DeadlineExceededError       504 DEADLINE_EXCEEDED   not answered in time
└── InternalError               500 INTERNAL            a fault of the server, or an answer that is none
```
"""

from __future__ import annotations

import json
import re
from typing import Any

_FIELD = re.compile(r"(\S+): ")


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


class ClientConfigError(ClientError):
    """An address, a certificate or an option that can't be used."""

    kind, http_status, grpc_status = "client_config", 400, "INVALID_ARGUMENT"


class InvalidRequestError(ClientError):
    """A request that can't be answered as it is, now or later."""

    kind, http_status, grpc_status = "bad_request", 400, "INVALID_ARGUMENT"


class SchemaDigestError(InvalidRequestError):
    """A packed request for another schema than that of the version that would answer."""

    kind, http_status, grpc_status = "schema_digest", 409, "FAILED_PRECONDITION"


class UnauthenticatedError(ClientError):
    """No token, or one that the server does not know."""

    kind, http_status, grpc_status = "unauthenticated", 401, "UNAUTHENTICATED"


class PermissionDeniedError(ClientError):
    """A token that may not do this."""

    kind, http_status, grpc_status = "permission_denied", 403, "PERMISSION_DENIED"


class NotFoundError(ClientError):
    """No such model, version or route."""

    kind, http_status, grpc_status = "not_found", 404, "NOT_FOUND"


class OverloadedError(ClientError):
    """The server had too much to do. Nothing was started."""

    kind, http_status, grpc_status = "overloaded", 503, "RESOURCE_EXHAUSTED"


class UnavailableError(ClientError):
    """The server was not reached, was not ready, or is ending."""

    kind, http_status, grpc_status = "unavailable", 503, "UNAVAILABLE"


class DeadlineExceededError(ClientError):
    """There was no answer in time."""

    kind, http_status, grpc_status = "deadline_exceeded", 504, "DEADLINE_EXCEEDED"


class InternalError(ClientError):
    """A fault of the server, or an answer that is none."""


_BY_KIND = {"schema_digest": SchemaDigestError, "overloaded": OverloadedError, "memory_budget": InternalError}
_BY_GRPC_STATUS: dict[str, type[ClientError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "FAILED_PRECONDITION": InvalidRequestError,
    "OUT_OF_RANGE": InvalidRequestError,
    "UNIMPLEMENTED": InvalidRequestError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "NOT_FOUND": NotFoundError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
}
_BY_HTTP_STATUS: dict[int, type[ClientError]] = {
    401: UnauthenticatedError,
    403: PermissionDeniedError,
    404: NotFoundError,
    408: DeadlineExceededError,
    429: OverloadedError,
    502: UnavailableError,
    503: UnavailableError,
    504: DeadlineExceededError,
}


def grpc_error(status: str, message: str, kind: str) -> ClientError:
    """Make the error that a gRPC call ended with.

    Args:
        status: name of the `grpc.StatusCode`.
        message: its text, which begins with the field if the request is at fault.
        kind: of the trailer `shardrank-error-kind`; "" if there is none.
    """
    if kind == "header_too_large":
        return InvalidRequestError(message, kind=kind, http_status=431, grpc_status=status)
    error = _BY_KIND.get(kind) or _BY_GRPC_STATUS.get(status, InternalError)
    # gRPC carries no field of its own.
    found = _FIELD.match(message) if issubclass(error, InvalidRequestError) else None
    return error(message, kind=kind, field=found[1] if found else "", grpc_status=status)


def http_error(status: int, body: bytes, retry_after: str | None) -> ClientError:
    """Make the error that an HTTP answer carries.

    Args:
        status: of the answer.
        body: the server's error document, or whatever something between said.
        retry_after: the header of that name; seconds, a date is passed over.
    """
    content: dict[str, Any] = {}
    try:
        document = json.loads(body)
        content = document["error"] if isinstance(document["error"], dict) else {}
    except (ValueError, KeyError, TypeError):
        # Not ours: a proxy's page, perhaps. Its beginning is the best there is.
        content = {"message": f"HTTP status {status}: {body[:300].decode('utf-8', 'replace')}"}
    kind = str(content.get("kind") or "")
    found = _BY_KIND.get(kind) or _BY_HTTP_STATUS.get(status)
    error = found or (InvalidRequestError if status < 500 else InternalError)
    return error(
        str(content.get("message") or f"HTTP status {status}"),
        kind=kind,
        field=str(content.get("field") or ""),
        http_status=status,
        retry_after_s=float(retry_after) if retry_after and retry_after.isdecimal() else None,
    )
