"""What a peer may do wrong. Such an error is told to the peer in a frame, with a code of RFC 9113, section 7."""

from __future__ import annotations

import enum

from serving.errors import ServingError


class ErrorCode(enum.IntEnum):
    """Error codes of RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(ServingError):
    """The peer broke the protocol or a limit in a way that ends the connection.

    Attributes:
        code: what the GOAWAY frame says.
    """

    kind = "http2"

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
