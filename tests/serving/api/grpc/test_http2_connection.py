"""The frames of HTTP/2, right and wrong ones, on real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from unittest.mock import Mock

import pytest

from serving.api.grpc import wire as frames
from serving.api.grpc.listener import Http2Protocol
from serving.api.grpc.wire import ErrorCode
from shardrank_testing.http2_peer import (
    END,
    END_HEADERS,
    LIMITS,
    PING,
    SETTINGS,
    Echo,
    EchoListener,
    Http2Peer,
    data,
    http2_peer,
)
from shardrank_testing.serving_api import until


async def connected() -> tuple[Mock, Http2Protocol]:
    """A connection that has said its settings, and the transport that it writes to."""
    transport = Mock(asyncio.Transport)
    transport.is_closing.return_value, transport.get_write_buffer_size.return_value = False, 0
    transport.get_extra_info.return_value = None
    listener = EchoListener(Echo())
    connection = listener.make("")
    connection.connection_made(transport)
    await asyncio.sleep(0)
    transport.reset_mock()
    return transport, connection


def written(transport: Mock) -> list[bytes | str]:
    """What was written, piece by piece, and how it ended."""
    calls = [(name, *args) for name, args, _ in transport.mock_calls if name in ("write", "write_eof", "close")]
    return [call[-1] for call in calls]


async def test_one_turn_writes_once_and_nothing_after_an_end():
    transport, connection = await connected()
    ping, pong = (frames.frame(frames.PING, flags, 0, bytes(8)) for flags in (0, frames.ACK))
    connection.data_received(frames.PREFACE + SETTINGS + ping)
    connection.data_received(ping)
    assert written(transport) == []
    await asyncio.sleep(0)
    acknowledged = frames.frame(frames.SETTINGS, frames.ACK, 0)
    assert written(transport) == [acknowledged + pong + pong]
    connection.data_received(ping + frames.frame(frames.PING, 0, 0, b"short"))
    connection.data_received(ping)
    await asyncio.sleep(0)
    told = f"a frame of type {frames.PING} and 5 bytes"
    last = frames.goaway(0, ErrorCode.FRAME_SIZE_ERROR, told)
    assert written(transport)[1:] == [pong + last, "write_eof"]
    connection.connection_lost(None)


async def test_what_is_answered_goes_out_before_the_close():
    transport, connection = await connected()
    connection.data_received(frames.PREFACE + SETTINGS + frames.frame(frames.PING, 0, 0, b"12345678"))
    # As event loops do at an end of file that comes in the same turn.
    if not connection.eof_received():
        transport.close()
    await asyncio.sleep(0)
    acknowledged = frames.frame(frames.SETTINGS, frames.ACK, 0)
    assert written(transport) == [acknowledged + frames.frame(frames.PING, frames.ACK, 0, b"12345678"), "close"]
    connection.connection_lost(None)


async def test_settings_say_the_limits_and_are_acknowledged():
    async with http2_peer() as (peer, _, _):
        peer.begin()
        told = await peer.find(frames.SETTINGS)
        assert dict(frames.read_settings(told.payload)) == {
            frames.MAX_CONCURRENT_STREAMS: LIMITS.max_streams,
            frames.INITIAL_WINDOW_SIZE: LIMITS.stream_window,
            frames.MAX_FRAME_SIZE: LIMITS.frame_size,
            frames.MAX_HEADER_LIST_SIZE: LIMITS.max_header_bytes,
        }
        window = await peer.find(frames.WINDOW_UPDATE)
        assert int.from_bytes(window.payload, "big") == LIMITS.connection_window - 65_535
        while not ((frame := await peer.read()).kind == frames.SETTINGS and frame.flags & frames.ACK):
            pass
        peer.send(frames.frame(frames.PING, 0, 0, b"12345678"))
        pong = await peer.find(frames.PING)
        assert (pong.flags, pong.payload) == (frames.ACK, b"12345678")


async def test_an_answer_keeps_to_the_peers_windows_and_frame_size():
    async with http2_peer(dataclasses.replace(LIMITS, stream_window=90_000)) as (peer, _, _):
        body = bytes(range(256)) * 300
        peer.begin(frames.settings({frames.INITIAL_WINDOW_SIZE: 10}))
        peer.send(peer.headers(1), data(1, body[:40_000]), data(1, body[40_000:], END))
        assert (await peer.find(frames.DATA, 1)).payload == body[:10]
        # A window of 10 becomes one of 30, of which 10 are used.
        peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 30}))
        assert (await peer.find(frames.DATA, 1)).payload == body[10:30]
        peer.send(frames.window_update(1, 10**6))
        got = b""
        while len(got) < 65_535 - 30:
            payload = (await peer.find(frames.DATA, 1)).payload
            assert len(payload) <= 16_384
            got += payload
        # The window of the connection is used up; another stream waits for it too, behind the first.
        peer.send(peer.headers(3), data(3, b"third", END), PING)
        await peer.find(frames.PING)
        peer.send(frames.window_update(0, 10**6))
        rest, _ = await peer.answer(1)
        assert body[:30] + got + rest == body
        peer.send(frames.window_update(3, 10**6))
        assert (await peer.answer(3))[0] == b"third"


async def test_streams_beyond_the_limit_are_refused():
    async with http2_peer() as (peer, echo, _):
        peer.begin()
        peer.send(*(peer.headers(one) for one in (1, 3, 5, 7, 9)))
        reset = await peer.find(frames.RST_STREAM)
        assert (reset.stream_id, reset.payload[-1]) == (9, ErrorCode.REFUSED_STREAM)
        peer.send(frames.rst_stream(1, ErrorCode.CANCEL), peer.headers(11), data(11, b"x", END))
        assert (await peer.answer(11))[0] == b"x"
        assert (echo.dropped, [one.stream_id for one in echo.streams]) == ([1], [1, 3, 5, 7, 11])


async def test_an_answer_before_its_request_has_ended_stops_it():
    async with http2_peer() as (peer, echo, _):
        peer.begin()
        peer.send(peer.headers(1), data(1, b"half"))
        await echo.until(lambda: echo.num_received == 4)
        echo.streams[0].reply()
        assert (await peer.answer(1))[0] == b"half"
        reset = await peer.find(frames.RST_STREAM)
        assert (reset.stream_id, reset.payload[-1]) == (1, ErrorCode.NO_ERROR)


HEADERS, CONTINUATION = frames.HEADERS, frames.CONTINUATION
BREACHES = [
    ("no preface", b"GET / HTTP/1.1\r\n", ErrorCode.PROTOCOL_ERROR),
    ("no settings", frames.PREFACE + PING, ErrorCode.PROTOCOL_ERROR),
    ("data on an idle stream", data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
    ("data on no stream", data(0, b"x"), ErrorCode.PROTOCOL_ERROR),
    ("headers on an even stream", frames.frame(HEADERS, END_HEADERS, 2, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    ("headers that are none", frames.frame(HEADERS, END_HEADERS, 1, b"\xff\xff"), ErrorCode.COMPRESSION_ERROR),
    ("headers cut short", frames.frame(HEADERS, END_HEADERS, 1, b"\x00\x05a"), ErrorCode.COMPRESSION_ERROR),
    ("headers beyond the limit",
     frames.frame(HEADERS, END_HEADERS, 1, b"\x40\x01a\x7e" + bytes(126) + b"\xbe" * 110), ErrorCode.ENHANCE_YOUR_CALM),
    ("a header block without an end",
     frames.frame(HEADERS, 0, 1, b"\x82") + frames.frame(CONTINUATION, 0, 1, b"\x82" * 999) * 17,
     ErrorCode.ENHANCE_YOUR_CALM),
    ("an interrupted header block", frames.frame(HEADERS, 0, 1, b"\x82") + PING, ErrorCode.PROTOCOL_ERROR),
    ("continuation of nothing", frames.frame(CONTINUATION, END_HEADERS, 1, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    ("padding longer than the frame", frames.frame(HEADERS, END_HEADERS | frames.PADDED, 1, b"\x09\x82"),
     ErrorCode.PROTOCOL_ERROR),
    ("a frame that is too long", data(1, bytes(50_001)), ErrorCode.FRAME_SIZE_ERROR),
    ("a ping of seven bytes", frames.frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    ("a ping on a stream", frames.frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    ("settings of five bytes", frames.frame(frames.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    ("settings on a stream", frames.frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    ("a window of too much", frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
    ("frames of too little", frames.settings({frames.MAX_FRAME_SIZE: 16_383}), ErrorCode.PROTOCOL_ERROR),
    ("a window update of nothing", frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    ("a window that overflows", frames.window_update(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
    ("a window update of an idle stream", frames.window_update(1, 5), ErrorCode.PROTOCOL_ERROR),
    ("a reset of an idle stream", frames.rst_stream(1, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    ("a reset of no stream", frames.rst_stream(0, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    ("a push promise", frames.frame(frames.PUSH_PROMISE, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "code"), [pytest.param(*row, id=name) for name, *row in BREACHES])
async def test_a_breach_of_the_protocol_ends_the_connection(sent, code):
    async with http2_peer() as (peer, echo, _):
        if not sent.startswith((b"GET", frames.PREFACE)):
            peer.begin()
        peer.send(sent)
        going = (await peer.rest())[-1]
        assert going.code == code
        assert going.payload[8:]
        assert sorted(echo.dropped) == sorted(stream.stream_id for stream in echo.streams)


async def test_a_connection_that_is_asked_to_go_serves_what_it_began():
    async with http2_peer() as (peer, echo, listener):
        peer.begin()
        peer.send(peer.headers(1))
        await peer.find(frames.SETTINGS)
        stopping = asyncio.create_task(listener.stop(20))
        going = await peer.find(frames.GOAWAY)
        assert int.from_bytes(going.payload[:4], "big") == frames.MAX_STREAM_ID
        ping = await peer.find(frames.PING)
        # Sent before it knew: served. After that it knows.
        peer.send(peer.headers(3), frames.frame(frames.PING, frames.ACK, 0, ping.payload))
        going = await peer.find(frames.GOAWAY)
        assert int.from_bytes(going.payload[:4], "big") == 3
        peer.send(peer.headers(5), data(1, b"one", END), data(3, b"two", END))
        assert (await peer.answer(1))[0] == b"one"
        assert (await peer.answer(3))[0] == b"two"
        assert await peer.rest() == []
        assert echo.begun == [1, 3]
        peer.close()
        await stopping


async def test_a_connection_too_many_is_closed_at_once_if_none_is_idle():
    async with http2_peer() as (_, echo, listener):
        others = [Http2Peer(*await asyncio.open_connection("127.0.0.1", listener.port)) for _ in range(4)]
        for other in others[1:]:
            other.begin()
            other.send(other.headers(1))
        await echo.until(lambda: len(echo.begun) == 3)
        last = Http2Peer(*await asyncio.open_connection("127.0.0.1", listener.port))
        assert await last.rest() == []
        for other in (*others, last):
            other.close()


async def test_a_lost_connection_leaves_nothing_to_the_collector():
    gc.collect()
    gc.disable()
    try:
        async with http2_peer() as (_, echo, listener):
            for ends_it in (b"", frames.frame(frames.PUSH_PROMISE, 0, 0)):
                other = Http2Peer(*await asyncio.open_connection("127.0.0.1", listener.port))
                other.begin()
                other.send(other.headers(1), data(1, b"x" * 1000, END), ends_it)
                await (other.find(frames.GOAWAY) if ends_it else other.find(frames.DATA, 1))
                held = [weakref.ref(connection) for connection in listener.open]
                other.close()
                del other
                echo.streams.clear()
                await until(lambda: len(listener.open) == 1)
                await asyncio.sleep(0.01)
                assert [found() for found in held if found() is not None] == list(listener.open)
    finally:
        gc.enable()


@pytest.mark.parametrize("path", [b"/echo", b"/hold"])
@pytest.mark.parametrize("size", [0, 100, 4095])
async def test_a_smaller_header_table_of_the_peer_is_kept_to(size, path):
    async with http2_peer() as (peer, echo, _):
        # RFC 7541, section 4.2: a decoder refuses the next block unless it begins with the new size.
        peer.decoder.max_allowed_table_size = size
        peer.begin(frames.settings({frames.HEADER_TABLE_SIZE: size}))
        peer.send(peer.headers(1, more=[(b":path", path)]), data(1, b"held", END))
        await echo.until(lambda: echo.num_received == 4)
        if path == b"/hold":
            # A block without headers before it, as a status without an answer is.
            echo.streams[0].send(b"", b"", b"\x88")
            assert await peer.answer(1) == (b"", [(":status", "200")])
        else:
            assert await peer.answer(1) == (b"held", [(":status", "200")])
        assert peer.decoder.header_table_size <= size
        # Said once, it holds, even where the peer takes it back and then gives less again.
        peer.send(frames.settings({frames.HEADER_TABLE_SIZE: 65536}))
        peer.send(frames.settings({frames.HEADER_TABLE_SIZE: 0}))
        peer.send(peer.headers(3), data(3, b"", END))
        first = await peer.find(frames.HEADERS, 3)
        assert first.payload == b"\x88"
