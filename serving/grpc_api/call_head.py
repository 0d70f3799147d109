"""What the headers of a gRPC call say, and the header blocks of its answers.

The format: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote

import grpc

from serving.api.body_coding import CODINGS
from serving.errors import HeaderTooLargeError
from serving.grpc_api.message_reader import IDENTITY
from serving.http2.header_blocks import Header, header_block
from serving.http2.request_headers import malformation

ERROR_KIND_METADATA = "shardrank-error-kind"
MAX_DETAILS_BYTES = 4096
HEADER_OVERHEAD_BYTES = 32
_CUT = "..."
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONTENT_TYPE = b"application/grpc"
# The messages' format may follow. `application/grpc-web` is something else.
_CONTENT_TYPES = re.compile(rb"application/grpc(?:[+;]|$)")
# Printable ASCII but `%`, which travels as it is.
_OUTER_SPACE = re.compile(r"\A | \Z")
_UNQUOTED = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"

Problem: TypeAlias = tuple[grpc.StatusCode, str] | tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class CallHead:
    """What is to be known of a call's headers.

    Attributes:
        path: `/service/method`.
        timeout_s: how long the client waits; None if it does not say.
        coding: of messages that are flagged as compressed.
        problem: status, message and perhaps trailers with which the call is refused; None if it is a gRPC call.
        http_status: of the answer; other than 200 for what no gRPC client sends.
    """

    path: bytes
    timeout_s: float | None = None
    coding: str = IDENTITY
    problem: Problem | None = None
    http_status: int = 200


def read_head(headers: Sequence[Header], max_bytes: int) -> CallHead:
    """Reads the headers of a call. What can't be is left for the answer to say.

    Args:
        headers: of it.
        max_bytes: that they may take, as RFC 9113 counts them (section 10.5.1).
    """
    path, method, content_type, timeout, coding = b"", b"", b"", b"", b""
    size = 0
    for name, value in headers:
        size += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if name == b":path":
            path = value
        elif name == b":method":
            method = value
        elif name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            timeout = value
        elif name == b"grpc-encoding":
            coding = value
    problem: Problem | None = None
    timeout_s, http_status = None, 200
    if size > max_bytes:
        says = f"the headers take {size} bytes, more than the limit max_header_bytes = {max_bytes}"
        problem = grpc.StatusCode.RESOURCE_EXHAUSTED, says, ((ERROR_KIND_METADATA, HeaderTooLargeError.kind),)
    elif (wrong := malformation(headers)) is not None:
        # RFC 9113, section 8.1.1: an answer may say so.
        problem = grpc.StatusCode.INVALID_ARGUMENT, wrong
        http_status = 400
    elif method != b"POST":
        problem = grpc.StatusCode.UNIMPLEMENTED, f"the method is {method.decode('latin-1')!r}; it must be POST"
        http_status = 405
    elif not _CONTENT_TYPES.match(content_type):
        http_status = 415
        said = content_type.decode("latin-1")
        problem = grpc.StatusCode.INVALID_ARGUMENT, f"content-type is {said!r}; it must be application/grpc"
    elif timeout:
        found = _TIMEOUT.fullmatch(timeout)
        if found is None:
            said = timeout.decode("latin-1")
            problem = grpc.StatusCode.INVALID_ARGUMENT, f"grpc-timeout is {said!r}; it must be digits and a unit"
        else:
            timeout_s = int(found[1]) * _UNIT_S[found[2]]
    return CallHead(path, timeout_s, coding.decode("latin-1") or IDENTITY, problem, http_status)


_BEGINNING = (
    (b"content-type", _CONTENT_TYPE),
    (b"grpc-accept-encoding", ",".join((IDENTITY, *CODINGS)).encode()),
)
ANSWER_HEAD = header_block(_BEGINNING[:1], status=200)
OK_TRAILERS = header_block(((b"grpc-status", b"0"),), status=None)


def status_block(
    code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, str]], *, http_status: int | None
) -> bytes:
    """The header block that ends a call.

    Args:
        code: its status.
        details: of the status; cut where they take too much.
        metadata: further trailers; printable ASCII.
        http_status: None where it was sent before.
    """
    trailers = [(b"grpc-status", str(code.value[0]).encode())]
    if details:
        quoted = quote(status_details(details), _UNQUOTED, "utf-8", "replace")
        # A header's value neither begins nor ends with a space (RFC 9113, section 8.2.1).
        quoted = _OUTER_SPACE.sub("%20", quoted)
        trailers.append((b"grpc-message", quoted.encode()))
    trailers += ((name.encode(), value.encode()) for name, value in metadata)
    return header_block(trailers if http_status is None else (*_BEGINNING, *trailers), status=http_status)


def status_details(message: str) -> str:
    """A message, cut where it would take more than `MAX_DETAILS_BYTES` on the wire.

    There it is percent-encoded (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md): printable ASCII but
    `%` takes one byte, every other byte of its UTF-8 form three. Peers refuse trailers that are too long as a whole.
    """
    if 12 * len(message) <= MAX_DETAILS_BYTES:
        return message
    # No character takes less than a byte, so what is beyond the limit need not be looked at.
    size, head = 0, message[: MAX_DETAILS_BYTES + 1]
    for end, letter in enumerate(head):
        size += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode("utf-8", "replace"))
        if size > MAX_DETAILS_BYTES:
            return message[: max(0, end - len(_CUT))] + _CUT
    return message
