"""Mutated requests on connections: what is sent, and what the answers are. No I/O.

Each `Channel` is one connection's worth: a batch of bytes out, answers in, and whether another batch may follow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from loadtest.drill.hostile.documents import Body
from loadtest.drill.hostile.mutate import Mutator
from loadtest.drill.hostile.peer import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    Http2Peer,
    Reply,
    call_headers,
    frame,
    message,
)
from shard_node.wire.frame import HEADER, FrameType

BODIES_EACH, CALLS_EACH, RAW_CALLS_EACH, FRAMES_EACH = 16, 32, 4, 16
LAST_GET = b"GET /healthz HTTP/1.1\r\nhost: drill\r\nconnection: close\r\n\r\n"
LAST_ID = 2**63
_MAX_REQUEST_BYTES = 30_000
_WIRE_STATUS = struct.Struct("<H")
# A deadline that passed, and what a busy server sheds.
_ALLOWED = frozenset({"HTTP 503", "HTTP 504", "wire 503", "wire 504"})
_BLAMES = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})


def blames_server(answer: str) -> bool:
    """Whether an answer says that the fault is the server's, which no client's mistake may come to."""
    if answer.startswith(("HTTP 5", "wire 5")):
        return answer not in _ALLOWED
    return answer in _BLAMES or answer.startswith("grpc ")


class Channel(Protocol):
    """One connection's worth of mutated requests."""

    @property
    def done(self) -> bool:
        """Whether all answers to the batch are here, and another batch may follow."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to come and the connection is to be closed."""

    def batch(self) -> tuple[bytes, int]:
        """(bytes to send, mutated requests in them). Called for a new connection and whenever `done`."""

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """(answer, the request that got it) of what came. Raises ValueError if it isn't the protocol."""

    def out(self) -> bytes:
        """What must be sent in between."""


class Responses:
    """Cuts HTTP/1.1 responses from a stream: `feed` gives their statuses. Bodies are skipped."""

    def __init__(self) -> None:
        self._in = b""

    def feed(self, data: bytes) -> list[int]:
        """The statuses of responses that are whole now. Raises ValueError."""
        self._in += data
        found: list[int] = []
        while True:
            head, end, rest = self._in.partition(b"\r\n\r\n")
            if not end:
                return found
            if not head.startswith(b"HTTP/1.1 "):
                raise ValueError(f"not a response: {head[:40]!r}")
            length = 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line[len(b"content-length:") :])
            if b"transfer-encoding: chunked" in head.lower():
                _, end, rest = rest.partition(b"0\r\n\r\n")
                if not end:
                    return found
            elif len(rest) < length:
                return found
            else:
                rest = rest[length:]
            self._in = rest
            found.append(int(head[9:12]))


class Bodies:
    """Mutated bodies under valid heads, several ahead on one connection.

    Args:
        mutators: of bodies, each with a request that it shall look like.
        model: its name.
    """

    over = False

    def __init__(self, mutators: Sequence[tuple[Body, Mutator]], model: str) -> None:
        self._mutators, self._model = mutators, model
        self._waiting: list[bytes] = []
        self._responses = Responses()
        self._turn = 0

    @property
    def done(self) -> bool:
        """As `Channel.done`."""
        return not self._waiting

    def batch(self) -> tuple[bytes, int]:
        """As `Channel.batch`."""
        for _ in range(BODIES_EACH):
            like, mutator = self._mutators[self._turn % len(self._mutators)]
            self._turn += 1
            body = mutator.next()
            lines = [f"POST {like.path.format(model=self._model)} HTTP/1.1", "host: drill"]
            lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in like.headers.items())]
            self._waiting.append(("\r\n".join(lines) + "\r\n\r\n").encode() + body)
        return b"".join(self._waiting), BODIES_EACH

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """As `Channel.feed`."""
        found = self._responses.feed(data)
        requests, self._waiting = self._waiting[: len(found)], self._waiting[len(found) :]
        return [(f"HTTP {status}", request) for status, request in zip(found, requests, strict=False)]

    def out(self) -> bytes:
        """As `Channel.out`."""
        return b""


class RawHttp:
    """One mutated request, head and all, and a valid one behind it that closes the connection."""

    done = over = False

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        self._responses = Responses()
        self._request = b""

    def batch(self) -> tuple[bytes, int]:
        """As `Channel.batch`."""
        self._request = self._mutator.next()
        return self._request + LAST_GET, 1

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """As `Channel.feed`."""
        return [(f"HTTP {status}", self._request) for status in self._responses.feed(data)]

    def out(self) -> bytes:
        """As `Channel.out`."""
        return b""


@dataclass(frozen=True, slots=True)
class Method:
    """Messages of one gRPC method, mutated."""

    path: str
    mutator: Mutator


class Calls:
    """Mutated messages in valid gRPC calls, many at a time on one connection."""

    over = False

    def __init__(self, methods: Sequence[Method]) -> None:
        self._methods = methods
        self._peer = Http2Peer()
        self._begun = False
        self._requests: dict[int, bytes] = {}
        self._turn = 0

    @property
    def done(self) -> bool:
        """As `Channel.done`."""
        return not self._requests

    def batch(self) -> tuple[bytes, int]:
        """As `Channel.batch`; fewer calls, or none, while the server's window is too small."""
        peer, made, count = self._peer, bytearray(b"" if self._begun else self._peer.begin()), 0
        self._begun = True
        while count < CALLS_EACH:
            method = self._methods[self._turn % len(self._methods)]
            self._turn += 1
            body = message(method.mutator.next()[:_MAX_REQUEST_BYTES])
            if peer.window < len(body):
                break
            stream = peer.open()
            made += frame(HEADERS, END_HEADERS, stream, call_headers(method.path))
            for first in range(0, len(body), 16_384):
                made += peer.data(stream, body[first : first + 16_384], last=first + 16_384 >= len(body))
            self._requests[stream] = method.path.encode() + b" " + body
            count += 1
        return bytes(made), count

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """As `Channel.feed`."""
        peer = self._peer
        peer.feed(data)
        if peer.goaway:
            raise ValueError(f"GOAWAY {peer.goaway}")
        ended = [stream for stream, reply in peer.replies.items() if reply.ended]
        return [(str(peer.replies.pop(stream)), self._requests.pop(stream)) for stream in ended]

    def out(self) -> bytes:
        """As `Channel.out`."""
        out = bytes(self._peer.out)
        self._peer.out.clear()
        return out


class RawHttp2:
    """A few mutated calls, frames and all, and a PING behind them."""

    def __init__(self, frames: Mutator) -> None:
        self._frames = frames
        self._peer = Http2Peer()
        self._sent = b""

    @property
    def done(self) -> bool:
        """As `Channel.done`: the connection is not used again, so it is done when it is over."""
        return False

    @property
    def over(self) -> bool:
        """Whether the server has answered the PING or said goodbye."""
        return bool(self._peer.pongs) or self._peer.goaway is not None

    def batch(self) -> tuple[bytes, int]:
        """As `Channel.batch`."""
        for number in range(RAW_CALLS_EACH):
            self._peer.replies[2 * number + 1] = Reply()
            made = bytearray(self._frames.next())
            if len(made) > 9 and number:
                # The corpus has its calls on stream 1.
                made[5:9] = struct.pack(">I", 2 * number + 1)
            self._sent += bytes(made)
        return self._peer.begin() + self._sent + frame(PING, 0, 0, b"drilling"), RAW_CALLS_EACH

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """As `Channel.feed`."""
        self._peer.feed(data)
        ended = [stream for stream, reply in self._peer.replies.items() if reply.ended]
        found = [(str(self._peer.replies.pop(stream)), self._sent) for stream in ended]
        if self._peer.goaway is not None:
            found.append((f"GOAWAY {self._peer.goaway}", self._sent))
        return found

    def out(self) -> bytes:
        """As `Channel.out`."""
        out = bytes(self._peer.out)
        self._peer.out.clear()
        return out


def call_frames(path: str, body: bytes) -> bytes:
    """A valid call on stream 1 as frames."""
    head = frame(HEADERS, END_HEADERS, 1, call_headers(path))
    return head + frame(0, END_STREAM, 1, message(body)[:16_384])


class Wire:
    """Mutated frames of the protocol between router and shard nodes, and a valid one behind them.

    Args:
        mutator: of frames.
        raw: whether headers are mutated too; then one a connection, else `FRAMES_EACH` a batch.
    """

    def __init__(self, mutator: Mutator, *, raw: bool) -> None:
        self._mutator, self._raw = mutator, raw
        self._in = b""
        self._sent = b""
        self._answered = False

    @property
    def done(self) -> bool:
        """As `Channel.done`."""
        return self._answered and not self._raw

    @property
    def over(self) -> bool:
        """As `Channel.over`."""
        return self._answered and self._raw

    def batch(self) -> tuple[bytes, int]:
        """As `Channel.batch`."""
        made = [self._mutator.next() for _ in range(1 if self._raw else FRAMES_EACH)]
        if not self._raw:
            for number, one in enumerate(made):
                magic, version, kind, _, _, budget = HEADER.unpack_from(one)
                body = one[HEADER.size :]
                made[number] = HEADER.pack(magic, version, kind, number + 1, len(body), budget) + body
        self._sent = b"".join(made)
        self._answered = False
        return self._sent + HEADER.pack(b"SHRK", 1, FrameType.INFO, LAST_ID, 0, 0), len(made)

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """As `Channel.feed`."""
        self._in += data
        found = []
        while len(self._in) >= HEADER.size:
            magic, _, kind, request_id, size, _ = HEADER.unpack_from(self._in)
            if magic != b"SHRK":
                raise ValueError(f"not a frame: {self._in[:24]!r}")
            if len(self._in) < HEADER.size + size:
                break
            body, self._in = self._in[HEADER.size : HEADER.size + size], self._in[HEADER.size + size :]
            if kind == FrameType.ERROR:
                found.append((f"wire {_WIRE_STATUS.unpack_from(body, 8)[0]}", self._sent))
            elif request_id == LAST_ID:
                self._answered = True
            else:
                found.append((f"wire {FrameType(kind).name}", self._sent))
        return found

    def out(self) -> bytes:
        """As `Channel.out`."""
        return b""
