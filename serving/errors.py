"""Serving's branch of the error tree.

Each class says its stable `kind` and the HTTP and gRPC status of the answer that carries it; what it does not say is as
the class above has it. A deadline that passes is always `shard_node.errors.DeadlineExceededError` (504).
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


class BadRequestError(ServingError, kind="bad_request", http_status=400, grpc_status="INVALID_ARGUMENT"):
    """The request can't be answered as it is, now or later.

    Attributes:
        field: path of the part that is wrong, such as `candidates.sparse.film_id[3][0]`; "" for the whole request.
    """

    def __init__(self, field: str, problem: str) -> None:
        # What a client sent stands in here, so it is cut short, and made text that every encoding can carry.
        self.field = printable(field, MAX_FIELD_CHARS)
        self.problem = printable(problem, MAX_PROBLEM_CHARS)
        super().__init__(f"{self.field}: {self.problem}" if field else self.problem)


class MalformedRequestError(BadRequestError, kind="malformed"):
    """The body is not JSON, or not the protobuf message."""


class InvalidFieldError(BadRequestError, kind="invalid_field"):
    """A field of the wrong type, an unknown key, or a value out of its range."""


class UnknownFeatureError(BadRequestError, kind="unknown_feature"):
    """A feature that the model does not have, or not on this side of the request."""


class MissingFeatureError(BadRequestError, kind="missing_feature"):
    """A feature that the model needs is not in the request."""


class CountMismatchError(BadRequestError, kind="count_mismatch"):
    """Counts that must agree do not: candidates across features, weights and ids, dense values."""


class InvalidIdError(BadRequestError, kind="invalid_id"):
    """An id that no table could have: negative, not an integer, 2^63 or more, or text where integers belong."""


class UnknownIdError(BadRequestError, kind="unknown_id"):
    """An id without a row, in a table whose `unknown_id` is `reject`."""


class LimitExceededError(BadRequestError, kind="limit_exceeded"):
    """More than a configured limit. The message names the limit, its value and what came."""

    def __init__(self, field: str, limit: str, allowed: int, got: int | str, unit: str) -> None:
        super().__init__(field, f"{got} {unit}, more than the limit {limit} = {allowed}")


class BodyTooLargeError(LimitExceededError, kind="body_too_large", http_status=413):
    """The body is longer than the limit; it was refused before it was read whole."""


class UnsupportedExtensionError(BadRequestError, kind="unsupported_extension"):
    """Something that would change the answer, by an unknown extension of the Open Inference Protocol."""


class SchemaDigestError(BadRequestError, kind="schema_digest", http_status=409, grpc_status="FAILED_PRECONDITION"):
    """A packed request made for another schema than that of the version that would answer. Ask for the model again."""

    def __init__(self, model: str, got: str, wanted: str) -> None:
        super().__init__("packed.schema_digest", f"{got!r}; that of model {model!r} is {wanted!r}")


class UnauthenticatedError(ServingError, kind="unauthenticated", http_status=401, grpc_status="UNAUTHENTICATED"):
    """No token came with the request, or one that is not known."""


class PermissionDeniedError(ServingError, kind="permission_denied", http_status=403, grpc_status="PERMISSION_DENIED"):
    """A token whose scope does not reach as far as the request."""


class ModelNotFoundError(ServingError, kind="model_not_found", http_status=404, grpc_status="NOT_FOUND"):
    """No such model here, or not that version of it."""

    field = "model"


class NoSuchRouteError(ServingError, kind="no_such_route", http_status=404, grpc_status="UNIMPLEMENTED"):
    """A path that the API does not have."""


class MethodNotAllowedError(ServingError, kind="method_not_allowed", http_status=405, grpc_status="UNIMPLEMENTED"):
    """A method that a path does not take."""


class MisdirectedRequestError(ServingError, kind="misdirected", http_status=421, grpc_status="FAILED_PRECONDITION"):
    """A request whose Host is none of the names of the loopback port that it came to."""


class RequestTimeoutError(ServingError, kind="request_timeout", http_status=408, grpc_status="DEADLINE_EXCEEDED"):
    """The client did not send its request, or take its answer, in time."""


class UnknownCodingError(ServingError, kind="unknown_coding", http_status=415, grpc_status="UNIMPLEMENTED"):
    """A gRPC message is compressed in a way that is not known here."""

    def __init__(self, coding: str, known: str) -> None:
        super().__init__(f"grpc-encoding is {printable(coding, MAX_CODING_CHARS)!r}; known are {known}")


class HeaderTooLargeError(ServingError, kind="header_too_large", http_status=431, grpc_status="RESOURCE_EXHAUSTED"):
    """The request line and headers are longer than the limit."""


class ClientGoneError(ServingError, kind="client_gone", http_status=499, grpc_status="CANCELLED"):
    """The client closed the connection before it was answered. Nobody reads this error; metrics count it."""


class OverloadedError(ServingError, kind="overloaded", http_status=503, grpc_status="RESOURCE_EXHAUSTED"):
    """Too many requests in flight or waiting. Nothing was started, so the request may be sent again."""


class ShuttingDownError(ServingError, kind="shutting_down", http_status=503, grpc_status="UNAVAILABLE"):
    """The process, or the generation that was to answer, is ending."""


class NotReadyError(ServingError, kind="not_ready", http_status=503, grpc_status="UNAVAILABLE"):
    """A configured model has no live version, or its shards can't be reached."""


class CanaryShareError(ServingError, kind="canary_share", http_status=400, grpc_status="INVALID_ARGUMENT"):
    """A canary's share of the requests that is not above 0 and below 1."""


class GoldenMismatchError(ServingError, kind="golden_mismatch", http_status=422, grpc_status="FAILED_PRECONDITION"):
    """A loaded version does not give the scores that training stored with it, so it must not serve."""


class ModelOutputError(ServingError, kind="model_output"):
    """The dense model gave NaN or inf for a request."""


class AmbiguousInputsError(ServingError, kind="ambiguous_inputs", http_status=400, grpc_status="FAILED_PRECONDITION"):
    """Two inputs of a model would have the same name in the Open Inference Protocol."""


class RepositoryControlError(
    ServingError, kind="repository_control", http_status=400, grpc_status="FAILED_PRECONDITION"
):
    """A client asked to load or unload a model."""

    def __init__(self) -> None:
        super().__init__("models are not loaded or unloaded by clients; versions come and go by rollouts")


class TokensFileError(ServingError, kind="tokens_file", http_status=400, grpc_status="INVALID_ARGUMENT"):
    """A file of tokens that can't be read, or that an entry can't be added to. The message names the file."""


class ListenError(ServingError, kind="listen"):
    """An address can't be listened on."""


class RecordingFolderError(ServingError, kind="recording_folder", http_status=400, grpc_status="INVALID_ARGUMENT"):
    """A folder of recorded requests that can't be used, or that another process records into."""


class RecordingDamagedError(ServingError, kind="recording_damaged", http_status=422, grpc_status="FAILED_PRECONDITION"):
    """A file of recorded requests that was changed, or is of another format. The message has the place."""


class HistogramLayoutError(ServingError, kind="histogram_layout"):
    """The installed metrics library keeps its histograms in another way than this process fills them."""


class RankingModelError(ServingError, kind="bad_model", http_status=422, grpc_status="FAILED_PRECONDITION"):
    """A config, a tensor or a number format that the ranking model can't be built with."""


class UntrustedProgramError(RankingModelError, kind="untrusted_program"):
    """A version brings a program, which is code, from a store that was not marked as trusted."""


class FleetError(ServingError, kind="fleet"):
    """A fleet that can't be started: no port, no room for a socket path, a setting that makes no sense."""


class ChildFailedError(FleetError, kind="child_failed"):
    """A child process ended, or did not become ready in time. The message carries its last log lines."""
