"""Serving's branch of the error tree.

```
ServingError
├── BadRequestError             400 INVALID_ARGUMENT     the request; `field` says which part of it
│   ├── MalformedRequestError   400                      not JSON, not protobuf
│   ├── InvalidFieldError       400                      wrong type, unknown key, value out of its range
│   ├── UnknownFeatureError     400                      a feature that the model does not have
│   ├── MissingFeatureError     400                      a feature that the model needs
│   ├── CountMismatchError      400                      counts of candidates, weights or dense values that don't agree
│   ├── InvalidIdError          400                      negative, float, boolean, >= 2^63, or of the wrong type
│   ├── UnknownIdError          400                      an id without a row, in a table that rejects it
│   └── LimitExceededError      400                      more than a configured limit; the message names it
│       └── BodyTooLargeError   413
├── UnauthenticatedError        401 UNAUTHENTICATED      no token, or one that is not known
├── PermissionDeniedError       403 PERMISSION_DENIED    a token whose scope is too narrow
├── ModelNotFoundError          404 NOT_FOUND            no such model here, or not that version of it
├── NoSuchRouteError            404 UNIMPLEMENTED        a path that the API does not have
├── MethodNotAllowedError       405 UNIMPLEMENTED
├── RequestTimeoutError         408 DEADLINE_EXCEEDED    the request was not complete in time
├── UnknownCodingError          415 UNIMPLEMENTED        a gRPC message compressed in a way that is not known here
├── HeaderTooLargeError         431 RESOURCE_EXHAUSTED
├── ClientGoneError             499 CANCELLED            the client left before its answer
├── OverloadedError             503 RESOURCE_EXHAUSTED   shed at once: too many requests in flight or waiting
├── ShuttingDownError           503 UNAVAILABLE
├── NotReadyError               503 UNAVAILABLE
├── LookupProfileError          400 INVALID_ARGUMENT     a hotness or skew to plan with that can't be
├── CanaryShareError            400 INVALID_ARGUMENT     a share of requests that is none
├── GoldenMismatchError         422 FAILED_PRECONDITION  a version that does not give its own golden scores
├── ModelOutputError            500 INTERNAL             the dense model gave NaN or inf
├── TokensFileError             400 INVALID_ARGUMENT     a file of tokens that can't be read, or not be added to
├── ListenError                 500 INTERNAL             a port can't be bound
└── ProfileFileError            500 INTERNAL             the file of `--profile` can't be written
```

A deadline that passes is `shard_node.errors.DeadlineExceededError` (504), wherever it is noticed.
"""

from __future__ import annotations

from loader.errors import ShardrankError

MAX_FIELD_CHARS = 256
MAX_PROBLEM_CHARS = 768
MAX_CODING_CHARS = 64


def printable(text: str, max_chars: int) -> str:
    """Text of at most `max_chars` characters that UTF-8 can hold: a lone surrogate is written as its escape."""
    text = text if len(text) <= max_chars else text[: max_chars - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class ServingError(ShardrankError):
    """Something that the serving process refused or failed at."""


class BadRequestError(ServingError):
    """The request can't be answered as it is, now or later.

    Attributes:
        field: path of the part that is wrong, such as `candidates.sparse.film_id[3][0]`; "" for the whole request.
    """

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "bad_request"

    def __init__(self, field: str, problem: str) -> None:
        # What a client sent stands in here, so it is cut short, and made text that every encoding can carry.
        self.field = printable(field, MAX_FIELD_CHARS)
        self.problem = printable(problem, MAX_PROBLEM_CHARS)
        super().__init__(f"{self.field}: {self.problem}" if field else self.problem)


class MalformedRequestError(BadRequestError):
    """The body is not JSON, or not the protobuf message."""

    kind = "malformed"


class InvalidFieldError(BadRequestError):
    """A field of the wrong type, an unknown key, or a value out of its range."""

    kind = "invalid_field"


class UnknownFeatureError(BadRequestError):
    """A feature that the model does not have, or not on this side of the request."""

    kind = "unknown_feature"


class MissingFeatureError(BadRequestError):
    """A feature that the model needs is not in the request."""

    kind = "missing_feature"


class CountMismatchError(BadRequestError):
    """Counts that must agree do not: candidates across features, weights and ids, dense values."""

    kind = "count_mismatch"


class InvalidIdError(BadRequestError):
    """An id that no table could have: negative, not an integer, 2^63 or more, or text where integers belong."""

    kind = "invalid_id"


class UnknownIdError(BadRequestError):
    """An id without a row, in a table whose `unknown_id` is `reject`."""

    kind = "unknown_id"


class LimitExceededError(BadRequestError):
    """More than a configured limit. The message names the limit, its value and what came."""

    kind = "limit_exceeded"

    def __init__(self, field: str, limit: str, allowed: int, got: int | str, unit: str) -> None:
        super().__init__(field, f"{got} {unit}, more than the limit {limit} = {allowed}")
        self.limit = limit


class BodyTooLargeError(LimitExceededError):
    """The body is longer than the limit; it was refused before it was read whole."""

    http_status = 413
    kind = "body_too_large"


class UnsupportedExtensionError(BadRequestError):
    """Something that would change the answer, by an unknown extension of the Open Inference Protocol."""

    kind = "unsupported_extension"


class SchemaDigestError(BadRequestError):
    """A packed request made for another schema than that of the version that would answer. Ask for the model again."""

    http_status = 409
    grpc_status = "FAILED_PRECONDITION"
    kind = "schema_digest"

    def __init__(self, model: str, got: str, wanted: str) -> None:
        super().__init__("packed.schema_digest", f"{got!r}; that of model {model!r} is {wanted!r}")


class UnauthenticatedError(ServingError):
    """No token came with the request, or one that is not known."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    kind = "unauthenticated"


class PermissionDeniedError(ServingError):
    """A token whose scope does not reach as far as the request."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    kind = "permission_denied"


class ModelNotFoundError(ServingError):
    """No such model here, or not that version of it."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    kind = "model_not_found"

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.field = "model"


class NoSuchRouteError(ServingError):
    """A path that the API does not have."""

    http_status = 404
    grpc_status = "UNIMPLEMENTED"
    kind = "no_such_route"


class MethodNotAllowedError(ServingError):
    """A method that a path does not take."""

    http_status = 405
    grpc_status = "UNIMPLEMENTED"
    kind = "method_not_allowed"


class RequestTimeoutError(ServingError):
    """The client did not send its request, or take its answer, in time."""

    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"
    kind = "request_timeout"


class UnknownCodingError(ServingError):
    """A gRPC message is compressed in a way that is not known here."""

    http_status = 415
    grpc_status = "UNIMPLEMENTED"
    kind = "unknown_coding"

    def __init__(self, coding: str, known: str) -> None:
        super().__init__(f"grpc-encoding is {printable(coding, MAX_CODING_CHARS)!r}; known are {known}")


class HeaderTooLargeError(ServingError):
    """The request line and headers are longer than the limit."""

    http_status = 431
    grpc_status = "RESOURCE_EXHAUSTED"
    kind = "header_too_large"


class ClientGoneError(ServingError):
    """The client closed the connection before it was answered. Nobody reads this error; metrics count it."""

    http_status = 499
    grpc_status = "CANCELLED"
    kind = "client_gone"


class OverloadedError(ServingError):
    """Too many requests in flight or waiting. Nothing was started, so the request may be sent again."""

    http_status = 503
    grpc_status = "RESOURCE_EXHAUSTED"
    kind = "overloaded"


class ShuttingDownError(ServingError):
    """The process, or the generation that was to answer, is ending."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    kind = "shutting_down"


class NotReadyError(ServingError):
    """A configured model has no live version, or its shards can't be reached."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    kind = "not_ready"


class LookupProfileError(ServingError):
    """A hotness or a skew to plan with that is out of range, or of a feature that the model does not have."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "lookup_profile"


class CanaryShareError(ServingError):
    """A canary's share of the requests that is not above 0 and below 1."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "canary_share"


class GoldenMismatchError(ServingError):
    """A loaded version does not give the scores that training stored with it, so it must not serve."""

    http_status = 422
    grpc_status = "FAILED_PRECONDITION"
    kind = "golden_mismatch"


class ModelOutputError(ServingError):
    """The dense model gave NaN or inf for a request."""

    kind = "model_output"


class AmbiguousInputsError(ServingError):
    """Two inputs of a model would have the same name in the Open Inference Protocol."""

    http_status = 400
    grpc_status = "FAILED_PRECONDITION"
    kind = "ambiguous_inputs"


class RepositoryControlError(ServingError):
    """A client asked to load or unload a model."""

    http_status = 400
    grpc_status = "FAILED_PRECONDITION"
    kind = "repository_control"

    def __init__(self) -> None:
        super().__init__("models are not loaded or unloaded by clients; versions come and go by rollouts")


class TokensFileError(ServingError):
    """A file of tokens that can't be read, or that an entry can't be added to. The message names the file."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "tokens_file"


class ListenError(ServingError):
    """An address can't be listened on."""

    kind = "listen"


class ProfileFileError(ServingError):
    """The file that a process writes its profile to can't be written."""

    kind = "profile_file"


class HistogramLayoutError(ServingError):
    """The installed metrics library keeps its histograms in another way than this process fills them."""

    kind = "histogram_layout"


class RankingModelError(ShardrankError):
    """A config, a tensor or a number format that the ranking model can't be built with."""

    http_status = 422
    grpc_status = "FAILED_PRECONDITION"
    kind = "bad_model"


class FleetError(ServingError):
    """A fleet that can't be started: no port, no room for a socket path, a setting that makes no sense."""

    kind = "fleet"


class ChildFailedError(FleetError):
    """A child process ended, or did not become ready in time. The message carries its last log lines."""

    kind = "child_failed"
