"""The gRPC API's branch of the error tree."""

from __future__ import annotations

from serving.api.body_coding import CODINGS
from serving.errors import ServingError, printable

MAX_CODING_CHARS = 64


class UnknownCodingError(ServingError):
    """A message is compressed in a way that is not known here."""

    http_status = 415
    grpc_status = "UNIMPLEMENTED"
    kind = "unknown_coding"

    def __init__(self, coding: str) -> None:
        known = ", ".join(CODINGS)
        super().__init__(f"grpc-encoding is {printable(coding, MAX_CODING_CHARS)!r}; known are identity, {known}")
