"""The HTTP/2 connection by bytes alone: no sockets, no event loop, a clock that stands still or is told to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import hpack
from hypothesis import given
from hypothesis import strategies as st

from serving.api.grpc import wire
from serving.api.grpc.connection import Connection, Stream
from serving.api.grpc.wire import ConnectionLimits, HeaderList
from shardrank_testing.http2_peer import END, END_HEADERS, LIMITS, data

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("te", "trailers")]
BEGIN = wire.PREFACE + wire.settings({})


def headers(stream_id: int, flags: int = 0, more: Iterable[tuple[str, str]] = ()) -> bytes:
    block = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*one) for one in (*REQUEST, *more)])
    return wire.frame(wire.HEADERS, flags | END_HEADERS, stream_id, block)


class Events:
    """Keeps what a connection passes to the exchanges of its streams; data that follow data of a stream as one."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def open(self, stream_id: int, headers: HeaderList) -> Stream:
        self.events.append(("opened", stream_id, headers))
        stream = Stream()
        for kind in ("end", "drained", "dropped"):
            setattr(stream, f"on_{kind}", partial(self.events.append, (kind, stream_id)))
        stream.on_data = partial(self.keep, stream_id)  # type: ignore[method-assign]
        return stream

    def keep(self, stream_id: int, data: memoryview) -> None:
        before = self.events.pop()[2] if self.events[-1][:2] == ("data", stream_id) else b""
        self.events.append(("data", stream_id, before + bytes(data)))

    def ids(self, kind: str) -> set[object]:
        return {event[1] for event in self.events if event[0] == kind}


def connection(
    limits: ConnectionLimits = LIMITS, told: Events | None = None, clock: Callable[[], float] = lambda: 0.0
) -> Connection:
    made = Connection(limits, clock)
    made.open_stream = (told or Events()).open  # type: ignore[method-assign]
    return made


def test_a_request_is_told_of_and_answered_in_bytes():
    told = Events()
    at = connection(told=told)
    at.feed(BEGIN + headers(1) + data(1, b"abc") + data(1, b"def", END))
    at.read()
    opened, *others = told.events
    assert opened[2].headers == [(name.encode(), value.encode()) for name, value in REQUEST]
    assert (opened[:2], opened[2].problem) == (("opened", 1), None)
    assert others == [("data", 1, b"abcdef"), ("end", 1)]
    at.outgoing()
    assert at.send(1, b"\x88", b"answer", b"\x88")
    ends = wire.frame(wire.HEADERS, END | END_HEADERS, 1, b"\x88")
    assert at.outgoing() == wire.frame(wire.HEADERS, END_HEADERS, 1, b"\x88") + data(1, b"answer") + ends
    assert at.streams == {}


def padded(payload: bytes, padding: int) -> bytes:
    return bytes((padding,)) + payload + bytes(padding)


@given(st.lists(st.integers(1, 60), max_size=30), st.lists(st.binary(max_size=200), max_size=4), st.integers(0, 255))
def test_a_request_is_the_same_in_whatever_frames_it_comes(sizes, payloads, padding):
    """With padding, a priority, continuations and frames that nobody knows, and cut anywhere."""
    block = hpack.Encoder().encode([*REQUEST, ("x" * 50, "y" * 70)])
    sent = BEGIN + wire.frame(0x55, 0xFF, 7, bytes(300))
    sent += wire.frame(wire.HEADERS, wire.PADDED | wire.HAS_PRIORITY, 1, padded(bytes(5) + block[:9], 3))
    sent += wire.frame(wire.CONTINUATION, 0, 1, block[9:20]) + wire.frame(wire.CONTINUATION, END_HEADERS, 1, block[20:])
    sent += b"".join(data(1, padded(payload, padding), wire.PADDED) for payload in payloads[:2])
    sent += b"".join(data(1, payload) for payload in payloads[2:]) + data(1, b"", END)
    told = Events()
    at = connection(told=told)
    for size in [*sizes, len(sent)]:
        at.feed(sent[:size])
        at.read()
        sent = sent[size:]
    opened, *others = told.events
    assert opened[2].headers[-1] == (b"x" * 50, b"y" * 70)
    assert b"".join(event[2] for event in others[:-1]) == b"".join(payloads)
    assert others[-1] == ("end", 1)


def test_reading_stops_when_the_clock_says_so_and_goes_on_later():
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    at = connection(clock=clock)
    pings = [wire.frame(wire.PING, 0, 0, number.to_bytes(8, "big")) for number in range(100)]
    at.feed(BEGIN + b"".join(pings))
    at.outgoing()
    out, turns = b"", 0
    while at.can_read:
        at.read(now + 0.005)
        out += at.outgoing()
        turns += 1
    assert 20 <= turns <= 30
    pongs = [wire.frame(wire.PING, wire.ACK, 0, number.to_bytes(8, "big")) for number in range(100)]
    assert out == wire.frame(wire.SETTINGS, wire.ACK, 0) + b"".join(pongs)


def test_a_peer_is_alive_while_a_frame_comes_in_pieces():
    now = [0.0]
    at = connection(clock=lambda: now[0])
    for piece in (BEGIN + headers(1), *(bytes([byte]) for byte in data(1, b"abcdef"))):
        at.feed(piece)
        at.read()
        now[0] += LIMITS.patience_s
        assert at.tick(0, 0)
    now[0] += LIMITS.patience_s
    assert not at.tick(0, 0)
