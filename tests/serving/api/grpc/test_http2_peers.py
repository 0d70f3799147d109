"""Peers that are slow, greedy or rude: what they may, what it ends with, and that others go on. On real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

import pytest

from serving.api.grpc import wire as frames
from serving.api.grpc.wire import ErrorCode
from shardrank_testing.http2_peer import END, LIMITS, PING, Http2Peer, data, echoing, http2_peer
from shardrank_testing.serving_api import running_api, until
from shardrank_testing.waiting import Clock

QUICK = dataclasses.replace(LIMITS, patience_s=0.2)
# No connection is ended by its age.
LASTING = dataclasses.replace(LIMITS, patience_s=10_000, idle_s=10_000, age_s=10_000)


NUMBERS = range(3, 6001, 2)
HEAD = b"\x82\x86\x04\x05/hold"
FLOODS = {
    "pings": PING * 6000,
    "settings": frames.settings(dict.fromkeys(range(0x60, 0x7F), 1)) * 3000,
    "window updates": frames.window_update(0, 1) * 6000,
    "data without a byte": data(1, b"") * 6000,
    "frames of no known kind": frames.frame(0x42, 0, 0) * 6000,
    "resets": b"".join(
        frames.frame(frames.HEADERS, frames.END_HEADERS | END, number, HEAD)
        + frames.rst_stream(number, ErrorCode.CANCEL)
        for number in NUMBERS
    ),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_a_flood_ends_its_connection_alone(flood):
    """It is work without a completed call. Neighbours behind the same proxy go on, and new ones come in."""
    async with echoing(LASTING, clock=Clock(step=0.0002)) as (connect, _, _):
        neighbour, peer = await connect(), await connect()
        neighbour.begin()
        peer.begin()
        peer.send(peer.headers(1), flood)
        assert (await peer.rest())[-1].code == ErrorCode.ENHANCE_YOUR_CALM
        newcomer = await connect()
        newcomer.begin()
        for other in (neighbour, newcomer):
            other.send(other.headers(1), data(1, b"served", END))
            assert (await other.answer(1))[0] == b"served"


async def test_a_connection_has_its_turn_and_then_others_come_first():
    unlimited = dataclasses.replace(LASTING, max_idle_work_s=1000)
    async with echoing(unlimited, clock=Clock(step=0.001)) as (connect, _, listener):
        busy, other = await connect(), await connect()
        for peer in (busy, other):
            peer.begin()
            peer.send(PING)
            await peer.find(frames.PING)
        here = busy._writer.get_extra_info("sockname")
        (protocol,) = [one for one in listener.open if one._transport.get_extra_info("peername") == here]
        # All of it is there at once; a turn is good for some five of them.
        busy.send(PING * 2000)
        while not protocol.can_read:  # noqa: ASYNC110  # in the very next turn
            await asyncio.sleep(0)
        other.send(other.headers(1), data(1, b"first", END))
        assert (await other.answer(1))[0] == b"first"
        assert len(protocol._buffer) > 100 * len(PING)
        assert not protocol._transport.is_reading()
        for _ in range(2000):
            await busy.find(frames.PING)
        await until(protocol._transport.is_reading)


async def test_a_peer_that_completes_calls_may_go_on():
    """Its calls make good the work and the frames in between."""
    async with echoing(clock=Clock(step=0.00001)) as (connect, _, _):
        peer = await connect()
        peer.begin()
        for number in range(800):
            stream_id = 2 * number + 1
            peer.send(peer.headers(stream_id), data(stream_id, b"abc", END), frames.window_update(0, 3), PING)
            assert (await peer.answer(stream_id))[0] == b"abc"


async def test_a_stream_whose_window_stays_closed_is_dropped():
    async with http2_peer(QUICK) as (peer, echo, _):
        peer.begin(frames.settings({frames.INITIAL_WINDOW_SIZE: 2}))
        peer.send(peer.headers(1), data(1, b"more than two", END))
        while (frame := await peer.read()).kind != frames.RST_STREAM:
            if frame.kind == frames.PING and not frame.flags:
                peer.send(frames.frame(frames.PING, frames.ACK, 0, frame.payload))
        assert (frame.stream_id, frame.payload[-1]) == (1, ErrorCode.CANCEL)
        await echo.until(lambda: echo.dropped == [1])
        peer.send(peer.headers(3), data(3, b"3", END))
        assert (await peer.answer(3))[0] == b"3"


async def test_a_stream_may_wait_for_the_connections_window():
    async with http2_peer(dataclasses.replace(QUICK, stream_window=70_000)) as (peer, echo, _):
        peer.begin(frames.settings({frames.INITIAL_WINDOW_SIZE: 10**6}))
        # What the first takes is all that the connection's window has.
        peer.send(peer.headers(1), data(1, bytes(35_000)), data(1, bytes(35_000), END))
        peer.send(peer.headers(3), data(3, b"third", END))
        got, pings = 0, 0
        while pings < 6:
            frame = await peer.read()
            if frame.kind == frames.PING and not frame.flags:
                # Instead of an answer, 100 bytes at each ping: far longer than a stuck stream is kept.
                peer.send(frames.window_update(0, 100))
                pings += 1
            if frame.kind == frames.DATA:
                assert frame.stream_id == 1
                got += len(frame.payload)
        assert (65_535 < got < 70_000, echo.dropped) == (True, [])
        peer.send(frames.window_update(0, 10**6))
        assert (await peer.answer(3))[0] == b"third"


async def slow_connection(port: int) -> socket.socket:
    """A client whose receive buffer is small, so that what it does not read stays with the server."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


def answered(request: bytes, encoder_peer, window: int = 2**30) -> bytes:
    windows = frames.settings({frames.INITIAL_WINDOW_SIZE: window, frames.MAX_FRAME_SIZE: 2**20})
    opened = frames.PREFACE + windows + frames.window_update(0, window)
    pieces = [data(1, request[at : at + 50_000]) for at in range(0, len(request), 50_000)]
    return opened + encoder_peer.headers(1) + b"".join(pieces) + data(1, b"", END)


async def send_for_ever(connection: socket.socket, sent: bytes) -> None:
    while True:
        await asyncio.get_running_loop().sock_sendall(connection, sent)
        await asyncio.sleep(0.05)


BIG = 12 * 2**20


@pytest.mark.parametrize(
    ("window", "is_asked_to_go"),
    [(2**30, False), (2**30, True), (8 * 2**20, False)],
    ids=["all is sent at once", "and the server stops", "some is held back"],
)
async def test_a_slow_reader_gets_the_whole_of_its_answer(window, is_asked_to_go):
    # Longer than the kernel holds, and it takes longer than any patience.
    limits = dataclasses.replace(LIMITS, patience_s=0.4, stream_window=BIG, connection_window=2 * BIG)

    loop = asyncio.get_running_loop()
    async with http2_peer(limits) as (peer, echo, listener):
        connection = await slow_connection(listener.port)
        await loop.sock_sendall(connection, answered(bytes(BIG), peer, window))
        await echo.until(lambda: echo.num_received == BIG)
        stopping = asyncio.create_task(listener.stop(20)) if is_asked_to_go else None
        got, began = 0, loop.time()
        while got < BIG:
            piece = await loop.sock_recv(connection, 2**17)
            assert piece
            got += len(piece)
            if window < BIG:
                more = frames.window_update(0, len(piece)) + frames.window_update(1, len(piece))
                await loop.sock_sendall(connection, more)
            if loop.time() - began < 4 * limits.patience_s:
                await asyncio.sleep(0.01)
        connection.close()
        peer.close()
        if stopping is not None:
            await stopping


async def test_a_peer_that_reads_nothing_is_dropped():
    limits = dataclasses.replace(LIMITS, patience_s=0.2, stream_window=BIG, connection_window=2 * BIG)

    loop = asyncio.get_running_loop()
    async with http2_peer(limits) as (peer, echo, listener):
        connection = await slow_connection(listener.port)
        await loop.sock_sendall(connection, answered(bytes(BIG), peer) + peer.headers(3))
        # Sends what makes it look alive, and reads nothing.
        pong = frames.frame(frames.PING, frames.ACK, 0, bytes(8))
        with pytest.raises(ConnectionError):
            await send_for_ever(connection, pong)
        connection.close()
        await echo.until(lambda: echo.dropped == [3])


async def test_calls_that_are_reset_unread_are_counted_out(api_service):
    """Their heads were admitted; whoever resets them must not fill `max_receiving`."""
    async with running_api(api_service) as api:
        peer = Http2Peer(*await asyncio.open_connection(api.listening.host, api.listening.grpc_port))
        peer.begin()
        heads = [peer.call(stream_id, "/shardrank.v1.RankingService/Rank") for stream_id in (1, 3, 5)]
        peer.send(*heads)
        await until(lambda: api_service.in_flight == 3)
        peer.send(*(frames.rst_stream(stream_id, ErrorCode.CANCEL) for stream_id in (1, 3, 5)))
        await until(lambda: api_service.in_flight == 0)
        counted = b'shardrank_requests_total{api="grpc",method="rank",model="",status="client_gone"} 3.0'
        assert counted in api_service.metrics.render()
        peer.close()
