"""What an attack works with: connections from addresses of its own, and a tally of what was sent and what came."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import httptools
from pydantic import BaseModel, Field

from loadtest.drill.hostile.messages import Served
from loadtest.drill.hostile.peer import Http2Peer, call_headers
from serving.api.grpc.wire import END_HEADERS, HEADERS, frame

ANSWER_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
READ_BYTES = 1 << 18
FIRST_SOURCE = (127 << 24) + 2
SOURCES_EACH = 256


class AttackConfig(Served):
    """What an attacker is told: where the server is, what it serves, and how much to send.

    Attributes:
        seconds: of a flood.
        repeats: how often a single message is sent.
        refused: how many messages of a kind that must leave nothing behind.
        core: that the process stays on; None for any.
        source: number of the attacker; it has `SOURCES_EACH` addresses of its own, from 127.0.0.2 upward.
    """

    name: str
    host: str = "127.0.0.1"
    http_port: int
    grpc_port: int
    seconds: float = Field(gt=0)
    repeats: int = Field(default=3, ge=1)
    refused: int = Field(default=1000, ge=1)
    core: int | None = None
    source: int = Field(default=0, ge=0, le=4096)
    seed: int = 0


class Tally(BaseModel):
    """What an attacker did and saw.

    Attributes:
        messages: requests, messages or frames, whatever the attack counts.
        answers: how often each HTTP status, or name of a gRPC status, came.
        ends: how often each end of a connection, or refusal of one, came.
        spans: CLOCK_MONOTONIC (begin, end) of each message, or of the whole flood.
    """

    bytes_sent: int = 0
    messages: int = 0
    connections: int = 0
    answers: Counter[str] = Field(default_factory=Counter)
    ends: Counter[str] = Field(default_factory=Counter)
    spans: list[tuple[float, float]] = []


class EndedError(Exception):
    """The server ended the connection, refused it, or did not answer; the text says how."""


class Responses:
    """Cuts HTTP/1.1 responses from a stream."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._found: list[int] = []

    def on_message_complete(self) -> None:
        """Take a whole response; the parser calls it."""
        self._found.append(self._parser.get_status_code())

    def feed(self, data: bytes) -> list[int]:
        """Return the statuses of responses that are whole now. Raises ValueError."""
        self._found = []
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ValueError(f"not a response: {error}") from error
        return self._found


class Attacker:
    """What an attack works with."""

    def __init__(self, config: AttackConfig) -> None:
        self.config = config
        self.random = random.Random(f"{config.seed} {config.name}")
        self.tally = Tally()
        self.until = 0.0
        self._source = 0

    def goes_on(self) -> bool:
        """Whether a flood has time left."""
        return time.monotonic() < self.until

    def answered(self, answer: str) -> None:
        """Count an answer."""
        self.tally.answers[answer] += 1

    def ended(self, how: str | BaseException) -> None:
        """Count an end of a connection."""
        if isinstance(how, ConnectionResetError | BrokenPipeError):
            how = "reset"
        self.tally.ends[str(how) or type(how).__name__] += 1

    def next_source(self) -> None:
        """Go on from another address."""
        self._source = (self._source + 1) % SOURCES_EACH

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Note when the block ran, and count what it raises as an end."""
        begin = time.monotonic()
        try:
            yield
        except (EndedError, OSError, ValueError) as error:
            self.ended(error)
        finally:
            self.tally.spans.append((begin, time.monotonic()))

    @contextlib.contextmanager
    def flooding(self) -> Iterator[None]:
        """Let a flood begin: its time runs from here."""
        self.until = time.monotonic() + self.config.seconds
        with self.span():
            yield

    def connect(self, port: int) -> socket.socket:
        """Open a connection from this attacker's address. Raises EndedError."""
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.settimeout(CONNECT_TIMEOUT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            made.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24), 1)
        address = FIRST_SOURCE + self.config.source * SOURCES_EACH + self._source
        try:
            made.bind((socket.inet_ntoa(address.to_bytes(4, "big")), 0))
            made.connect((self.config.host, port))
        except OSError as error:
            made.close()
            raise EndedError(f"no connection: {error.strerror or error}") from error
        self.tally.connections += 1
        return made

    def http(self) -> socket.socket:
        """Open a connection to the HTTP port. Raises EndedError."""
        return self.connect(self.config.http_port)

    def grpc(self) -> socket.socket:
        """Open a connection to the gRPC port. Raises EndedError."""
        return self.connect(self.config.grpc_port)

    def send(self, sock: socket.socket, data: bytes) -> None:
        """Send all of it, and count it. Raises OSError."""
        sock.sendall(data)
        self.tally.bytes_sent += len(data)

    def pump(
        self,
        sock: socket.socket,
        more: Callable[[], bytes | None],
        take: Callable[[bytes], bool],
        until: float,
        *,
        reads: bool = True,
    ) -> bool:
        """Send what `more` gives and hand what comes to `take`, at the same time, until `take` says that this is all.

        `more` gives nothing to wait for the server, and None to end. Returns False if the time was up. Raises
        EndedError or OSError when the connection ends.
        """
        sock.setblocking(False)
        left = memoryview(b"")
        while time.monotonic() < until:
            if not left:
                if (chunk := more()) is None:
                    return True
                left = memoryview(chunk)
            poll = select.poll()
            poll.register(sock, (select.POLLIN if reads else 0) | (select.POLLOUT if left else 0))
            events = dict(poll.poll(50)).get(sock.fileno(), 0)
            if events & select.POLLIN:
                part = sock.recv(READ_BYTES)
                if not part:
                    raise EndedError("closed")
                if take(part):
                    return True
            elif events & (select.POLLERR | select.POLLHUP):
                raise EndedError("reset")
            if events & select.POLLOUT and left:
                sent = sock.send(left)
                self.tally.bytes_sent += sent
                left = left[sent:]
        return False

    def exchange(self, sock: socket.socket, data: bytes, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Send a request over HTTP/1.1 and count its answer, which may come early.

        Raises EndedError, OSError or ValueError if there was none.
        """
        pieces, got, responses = [data], bytearray(), Responses()

        def take(part: bytes) -> bool:
            got.extend(part)
            return bool(responses.feed(part))

        try:
            if not self.pump(sock, lambda: pieces.pop() if pieces else b"", take, time.monotonic() + timeout_s):
                raise EndedError("no answer")
        except (OSError, EndedError):
            if not got.startswith(b"HTTP/1.1 "):
                raise
        self.answered(status_of(got))

    def call(self, path: str, body: bytes, extra: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Make a gRPC call with prefixed messages on a connection of its own, and count its answer.

        Raises EndedError, OSError or ValueError if there was none.
        """
        peer = Http2Peer()
        stream = peer.open()
        reply = peer.replies[stream]
        pieces = [peer.begin() + frame(HEADERS, END_HEADERS, stream, call_headers(path, extra))]
        left, is_out = memoryview(body), False

        def more() -> bytes:
            nonlocal left, is_out
            out = bytearray(pieces.pop() if pieces else b"")
            while not is_out and len(out) < READ_BYTES and (peer.room(stream) > 0 or not left):
                size = min(peer.room(stream), len(left))
                is_out = size == len(left)
                out += peer.data(stream, left[:size], last=is_out)
                left = left[size:]
            return bytes(out) + peer.taken_out()

        def take(part: bytes) -> bool:
            peer.feed(part)
            return bool(peer.goaway) or reply.ended

        with contextlib.closing(self.grpc()) as sock:
            if not self.pump(sock, more, take, time.monotonic() + ANSWER_TIMEOUT_S):
                raise EndedError("no answer")
        if not reply.ended:
            raise EndedError(f"GOAWAY {peer.goaway}")
        self.answered(str(reply))

    def again(self, connect: Callable[[], socket.socket], use: Callable[[socket.socket], None]) -> None:
        """Use one connection after the other until the time is up, and count how each ends."""
        with self.flooding():
            while self.goes_on():
                try:
                    with contextlib.closing(connect()) as sock:
                        use(sock)
                except (EndedError, OSError, ValueError) as error:
                    self.ended(error)
                    time.sleep(0.01 if "no connection" in str(error) else 0.001)

    def flood(
        self,
        connect: Callable[[], socket.socket],
        chunks: Callable[[], Iterator[bytes]],
        each: int,
        *,
        on_data: Callable[[bytes], bytes] | None = None,
        reads: bool = True,
    ) -> None:
        """Send as fast as the server takes it until the time is up, over a new connection whenever one has ended.

        Args:
            connect: opens a connection.
            chunks: of one connection: what to send; an empty one waits for the server, the end closes.
            each: requests or frames in a chunk that is not empty.
            on_data: told what the server says; gives what to send ahead of the next chunk.
            reads: whether what the server says is read at all.
        """

        def use(sock: socket.socket) -> None:
            given, urgent = chunks(), bytearray()

            def more() -> bytes | None:
                if (chunk := next(given, None)) is None:
                    return None
                self.tally.messages += each if chunk else 0
                ahead = bytes(urgent)
                urgent.clear()
                return ahead + chunk

            def take(part: bytes) -> bool:
                urgent.extend(on_data(part) if on_data is not None else b"")
                return False

            self.pump(sock, more, take, self.until, reads=reads)

        self.again(connect, use)


def status_of(response: bytes | bytearray) -> str:
    """Return the status of a response over HTTP/1.1 by its head."""
    return f"HTTP {bytes(response[9:12]).decode('latin-1')}"
