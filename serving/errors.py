"""Serving's errors, which its client raises too, for the answers of a server.

Those that all packages raise are in `loader.errors`: a deadline that passes is always DeadlineExceededError, what is
shed OverloadedError, what is not ready UnavailableError, and what is wrong with the process's own options ConfigError.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from loader.errors import ShardrankError, UnavailableError

MAX_FIELD_CHARS = 256
MAX_PROBLEM_CHARS = 768
MAX_MESSAGE_CHARS = 4096
RETRY_AFTER_S = 1
"""Reported to a client that was shed."""


def printable(text: str, max_chars: int) -> str:
    """Text of at most `max_chars` characters that UTF-8 can hold: a lone surrogate is written as its escape."""
    text = text if len(text) <= max_chars else text[: max_chars - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class InvalidRequestError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="bad_request"):
    """The request can't be answered as it is, now or later.

    Args:
        field: path of the part that is wrong, such as `candidates.sparse.film_id[3][0]`; "" for the whole request.
        problem: with the value and what is allowed.
        known: as of `ShardrankError`; docs/api.md has all kinds.
    """

    kinds: ClassVar = {
        "body_too_large": (413, "INVALID_ARGUMENT"),
        "schema_digest": (409, "FAILED_PRECONDITION"),
        "ambiguous_inputs": (400, "FAILED_PRECONDITION"),
        "method_not_allowed": (405, "UNIMPLEMENTED"),
        "unknown_coding": (415, "UNIMPLEMENTED"),
        "misdirected": (421, "FAILED_PRECONDITION"),
        "header_too_large": (431, "RESOURCE_EXHAUSTED"),
        # The client closed the connection before it was answered. Nobody reads this error; metrics count it.
        "client_gone": (499, "CANCELLED"),
    }

    def __init__(self, field: str, problem: str, **known: Any) -> None:
        # What a client sent stands in here, so it is cut short, and made text that every encoding can carry.
        field, problem = printable(field, MAX_FIELD_CHARS), printable(problem, MAX_PROBLEM_CHARS)
        super().__init__(field, problem, field=field, **known)
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}" if self.field else self.problem


invalid_field = partial(InvalidRequestError, kind="invalid_field")
invalid_id = partial(InvalidRequestError, kind="invalid_id")
count_mismatch = partial(InvalidRequestError, kind="count_mismatch")
missing_feature = partial(InvalidRequestError, kind="missing_feature")
unknown_feature = partial(InvalidRequestError, kind="unknown_feature")
malformed = partial(InvalidRequestError, kind="malformed")
not_ready = partial(UnavailableError, kind="not_ready")


def limit_exceeded(
    field: str, limit: str, allowed: int, got: int | str, unit: str, kind: str = "limit_exceeded"
) -> InvalidRequestError:
    """Return the error for more than a configured limit allows: it names the limit, its value and what came."""
    return InvalidRequestError(field, f"{got} {unit}, more than the limit {limit} = {allowed}", kind=kind)


class UnauthenticatedError(ShardrankError, kind="unauthenticated", http_status=401, grpc_status="UNAUTHENTICATED"):
    """No token came with the request, or one that is not known."""


class PermissionDeniedError(ShardrankError, kind="permission_denied", http_status=403, grpc_status="PERMISSION_DENIED"):
    """A token whose scope does not reach as far as the request."""


class NotFoundError(ShardrankError, kind="not_found", http_status=404, grpc_status="NOT_FOUND"):
    """No such model or version, route, or service to be healthy."""

    kinds: ClassVar = {"no_such_route": (404, "UNIMPLEMENTED")}


class InternalError(ShardrankError):
    """A fault of the server, or an answer that is none.

    `model_output`: the dense model gave NaN or inf for a request.
    """


class RankingModelError(ShardrankError, kind="bad_model", http_status=422, grpc_status="FAILED_PRECONDITION"):
    """A config, a tensor or a number format that the ranking model can't be built with.

    `golden_mismatch`: a loaded version does not give the scores that training stored with it, so it must not serve.
    `untrusted_program`: it brings a program, which is code, from a store that was not marked as trusted.
    """


class RecordingDamagedError(
    ShardrankError, kind="recording_damaged", http_status=422, grpc_status="FAILED_PRECONDITION"
):
    """A file of recorded requests that was changed, or is of another format. The message has the place."""


class FleetError(ShardrankError, kind="fleet"):
    """A fleet that can't be started: no port, no room for a socket path, a setting that makes no sense.

    `child_failed`: a child process ended, or did not become ready in time. The message carries its last log lines.
    """


def error_document(error: ShardrankError, request_id: str = "") -> dict[str, Any]:
    """Return the JSON form of an error, cut short, and text that every encoding can carry."""
    content: dict[str, Any] = {"kind": error.kind, "message": printable(str(error), MAX_MESSAGE_CHARS)}
    if error.field:
        content["field"] = printable(error.field, MAX_FIELD_CHARS)
    if request_id:
        content["request_id"] = request_id
    return {"error": content}
