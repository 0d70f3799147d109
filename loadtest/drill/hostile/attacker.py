"""What an attack works with: connections from addresses of its own, and a tally of what was sent and what came."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

from pydantic import BaseModel, Field

from loader.snapshot.manifest import Frozen
from loadtest.drill.hostile.peer import END_HEADERS, HEADERS, Http2Peer, Reply, call_headers, frame, message

ANSWER_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
READ_BYTES = 1 << 18
FIRST_SOURCE = (127 << 24) + 2
SOURCES_EACH = 256
PAUSE_S = 0.5


class AttackConfig(Frozen):
    """What an attacker is told.

    Attributes:
        name: of the attack.
        host, http_port, grpc_port: where the server is.
        model: that it serves.
        features: of the model, all of candidates.
        dense: floats of a candidate.
        seconds: of a flood.
        repeats: how often a single message is sent.
        refused: how many messages of a kind that must leave nothing behind.
        core: that the process stays on; None for any.
        source: number of the attacker; it has `SOURCES_EACH` addresses of its own, from 127.0.0.2 upward.
        seed: of what is drawn.
    """

    name: str
    host: str = "127.0.0.1"
    http_port: int
    grpc_port: int
    model: str
    features: tuple[str, ...]
    dense: int
    seconds: float = Field(gt=0)
    repeats: int = Field(default=3, ge=1)
    refused: int = Field(default=1000, ge=1)
    core: int | None = None
    source: int = Field(default=0, ge=0, le=4096)
    seed: int = 0


class Tally(BaseModel):
    """What an attacker did and saw.

    Attributes:
        bytes_sent: of all connections.
        messages: requests, messages or frames, whatever the attack counts.
        connections: that were opened.
        answers: how often each answer came: an HTTP status, or the name of a gRPC status.
        ends: how often each end of a connection, or refusal of one, came.
        spans: CLOCK_MONOTONIC (begin, end) of each message, or of the whole flood.
    """

    bytes_sent: int = 0
    messages: int = 0
    connections: int = 0
    answers: dict[str, int] = {}
    ends: dict[str, int] = {}
    spans: list[tuple[float, float]] = []


class EndedError(Exception):
    """The server ended the connection, refused it, or did not answer; the text says how."""


class Attacker:
    """What an attack works with."""

    def __init__(self, config: AttackConfig) -> None:
        self.config = config
        self.random = random.Random(f"{config.seed} {config.name}")
        self.tally = Tally()
        self.until = time.monotonic() + config.seconds
        self._address = FIRST_SOURCE + config.source * SOURCES_EACH
        self._answers: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()

    def goes_on(self) -> bool:
        """Whether a flood has time left."""
        return time.monotonic() < self.until

    def answered(self, answer: str) -> None:
        """Counts an answer."""
        self._answers[answer] += 1

    def ended(self, how: str) -> None:
        """Counts an end of a connection."""
        self._ends[how] += 1

    def next_source(self) -> None:
        """Goes on from another address."""
        first = FIRST_SOURCE + self.config.source * SOURCES_EACH
        self._address = first + (self._address - first + 1) % SOURCES_EACH

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Notes when the block ran, and counts what it raises as an end."""
        begin = time.monotonic()
        try:
            yield
        except (EndedError, OSError, ValueError) as error:
            self.ended(_reason(error))
        finally:
            self.tally.spans.append((begin, time.monotonic()))

    def connect(self, port: int) -> socket.socket:
        """A connection from this attacker's address. Raises EndedError."""
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.settimeout(CONNECT_TIMEOUT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            made.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24), 1)
        try:
            made.bind((socket.inet_ntoa(self._address.to_bytes(4, "big")), 0))
            made.connect((self.config.host, port))
        except OSError as error:
            made.close()
            raise EndedError(f"no connection: {error.strerror or error}") from error
        self.tally.connections += 1
        return made

    def http(self) -> socket.socket:
        """A connection to the HTTP port. Raises EndedError."""
        return self.connect(self.config.http_port)

    def grpc(self) -> socket.socket:
        """A connection to the gRPC port. Raises EndedError."""
        return self.connect(self.config.grpc_port)

    def send(self, sock: socket.socket, data: bytes) -> None:
        """Sends all of it, and counts it. Raises OSError."""
        sock.sendall(data)
        self.tally.bytes_sent += len(data)

    def exchange(self, sock: socket.socket, data: bytes, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
        """Sends a request over HTTP/1.1 and waits for its answer; one that comes before all is sent counts.

        Returns:
            `HTTP <status>`.

        Raises:
            EndedError: there was no answer.
        """
        sock.setblocking(False)
        left, got, deadline = memoryview(data), bytearray(), time.monotonic() + timeout_s
        while b"\r\n\r\n" not in got:
            if time.monotonic() > deadline:
                raise EndedError("no answer")
            readable, writable, _ = _ready(sock, bool(left))
            try:
                if readable:
                    part = sock.recv(READ_BYTES)
                    if not part:
                        raise EndedError("closed")
                    got += part
                if writable and left:
                    sent = sock.send(left)
                    self.tally.bytes_sent += sent
                    left = left[sent:]
            except OSError as error:
                if got.startswith(b"HTTP/1.1 "):
                    break
                raise EndedError(_reason(error)) from error
        return f"HTTP {bytes(got[9:12]).decode('latin-1')}"

    def call(
        self,
        sock: socket.socket,
        peer: Http2Peer,
        path: str,
        body: bytes,
        *,
        compressed: bool = False,
        extra: tuple[tuple[bytes, bytes], ...] = (),
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Reply:
        """A gRPC call with one message, or several that are prefixed already (`compressed` must be false then).

        Raises:
            EndedError: there was no answer.
        """
        stream = peer.open()
        extra = ((b"grpc-encoding", b"gzip"), *extra) if compressed else extra
        head = frame(HEADERS, END_HEADERS, stream, call_headers(path, extra))
        return self._stream(sock, peer, stream, head, memoryview(body), timeout_s)

    def _stream(
        self, sock: socket.socket, peer: Http2Peer, stream: int, head: bytes, left: memoryview, timeout_s: float
    ) -> Reply:
        sock.setblocking(False)
        out, all_out = bytearray(head), False
        reply, deadline = peer.replies[stream], time.monotonic() + timeout_s
        while not reply.ended:
            if time.monotonic() > deadline:
                raise EndedError("no answer")
            if peer.goaway is not None and peer.goaway != 0:
                raise EndedError(f"GOAWAY {peer.goaway}")
            while not all_out and len(out) < READ_BYTES and (peer.room(stream) > 0 or not left):
                size = min(peer.room(stream), len(left))
                out += peer.data(stream, left[:size], last=size == len(left))
                left = left[size:]
                all_out = not left
            out += peer.out
            peer.out.clear()
            readable, writable, _ = _ready(sock, bool(out))
            try:
                if readable:
                    part = sock.recv(READ_BYTES)
                    if not part:
                        raise EndedError("closed")
                    peer.feed(part)
                if writable and out:
                    sent = sock.send(out)
                    self.tally.bytes_sent += sent
                    del out[:sent]
            except OSError as error:
                raise EndedError(_reason(error)) from error
        return peer.replies.pop(stream)

    def grpc_call(self, path: str, body: bytes, *, compressed: bool = False) -> None:
        """A gRPC call on a connection of its own, whose answer is counted. Raises EndedError."""
        with contextlib.closing(self.grpc()) as sock:
            peer = Http2Peer()
            self.send(sock, peer.begin())
            self.answered(str(self.call(sock, peer, path, message(body, compressed=compressed), compressed=compressed)))

    def flood(
        self,
        connect: Callable[[], socket.socket],
        chunks: Callable[[], Iterator[bytes]],
        each: int,
        *,
        on_data: Callable[[bytes], bytes] | None = None,
        reads: bool = True,
    ) -> None:
        """Sends as fast as the server takes it until the time is up, over a new connection whenever one has ended.

        Args:
            connect: opens a connection.
            chunks: of one connection: what to send; an empty one waits for the server, the end closes.
            each: requests or frames in a chunk that is not empty.
            on_data: told what the server says; gives what to send ahead of the next chunk.
            reads: whether what the server says is read at all.
        """
        self.until = time.monotonic() + self.config.seconds
        with self.span():
            while self.goes_on():
                try:
                    with contextlib.closing(connect()) as sock:
                        self._flood_one(sock, chunks(), each, on_data, reads)
                except (EndedError, OSError, ValueError) as error:
                    self.ended(_reason(error))
                    if "no connection" in str(error):
                        time.sleep(0.01)

    def _flood_one(
        self,
        sock: socket.socket,
        chunks: Iterator[bytes],
        each: int,
        on_data: Callable[[bytes], bytes] | None,
        reads: bool,
    ) -> None:
        sock.setblocking(False)
        left = memoryview(b"")
        urgent = b""
        while self.goes_on():
            if not left:
                chunk = next(chunks, None)
                if chunk is None:
                    return
                self.tally.messages += each if chunk else 0
                left, urgent = memoryview(urgent + chunk), b""
            readable, writable, broken = _ready(sock, bool(left), reads)
            if broken and not readable:
                raise EndedError("reset")
            if readable:
                part = sock.recv(READ_BYTES)
                if not part:
                    raise EndedError("closed")
                if on_data is not None:
                    urgent += on_data(part)
            if writable and left:
                sent = sock.send(left)
                self.tally.bytes_sent += sent
                left = left[sent:]

    def done(self) -> Tally:
        """The tally."""
        return self.tally.model_copy(update={"answers": dict(self._answers), "ends": dict(self._ends)})


def _ready(sock: socket.socket, writes: bool, reads: bool = True) -> tuple[bool, bool, bool]:
    """Waits for up to 50 ms until a socket (readable, writable, broken)."""
    poll = select.poll()
    poll.register(sock, (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0))
    found = dict(poll.poll(50)).get(sock.fileno(), 0)
    broken = bool(found & (select.POLLERR | select.POLLHUP))
    return bool(found & select.POLLIN), bool(found & select.POLLOUT) or (broken and writes), broken


def _reason(error: BaseException) -> str:
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "reset"
    return str(error) or type(error).__name__
