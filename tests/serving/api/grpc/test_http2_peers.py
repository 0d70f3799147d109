"""Peers that are slow, greedy or rude, without breaking a rule: what they may, and what it ends with."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

import pytest
import uvloop

from serving.api.grpc import wire as frames
from serving.api.grpc.wire import ErrorCode
from shardrank_testing.http2_peer import LIMITS, http2_peer

END, END_HEADERS = frames.END_STREAM, frames.END_HEADERS
QUICK = dataclasses.replace(LIMITS, patience_s=0.2)


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(30):
            await coroutine

    uvloop.run(bounded())


def data(stream_id: int, payload: bytes, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags, stream_id, payload)


def code_of(going) -> int:
    return int.from_bytes(going.payload[4:8], "big")


FLOODS = {
    # Requests that are whole, and are given up at once: none is ever answered.
    "requests and resets": b"".join(
        frames.frame(frames.HEADERS, END_HEADERS | END, stream_id, b"\x04\x05/hold")
        + frames.rst_stream(stream_id, ErrorCode.CANCEL)
        for stream_id in range(3, 1003, 2)
    ),
    "window updates of the connection": frames.window_update(0, 1) * 300,
    "window updates of a stream": frames.window_update(1, 1) * 300,
    "farewells": frames.goaway(0, ErrorCode.NO_ERROR) * 300,
    "settings": frames.settings(dict.fromkeys(range(0x60, 0x7F), 1)) * 150,
    "acknowledged settings": frames.frame(frames.SETTINGS, frames.ACK, 0) * 300,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_of_frames_that_ask_for_nothing_ends_the_connection(flood):
    async def main() -> None:
        async with http2_peer() as (peer, _, _):
            peer.begin(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
            peer.send(peer.headers(1, more=[("x-none", "1")]), data(1, b"held", END))
            # No answer goes out, so nothing is earned by them.
            peer.send(flood)
            assert code_of((await peer.rest())[-1]) == ErrorCode.ENHANCE_YOUR_CALM

    run(main())


def test_a_peer_that_takes_answers_may_send_more_frames_than_one_that_does_not():
    async def main() -> None:
        async with http2_peer() as (peer, _, _):
            peer.begin()
            for number in range(2 * LIMITS.max_control_frames):
                stream_id = 2 * number + 1
                peer.send(peer.headers(stream_id), data(stream_id, b"abc", END))
                peer.send(frames.window_update(0, 3), frames.frame(frames.PING, 0, 0, bytes(8)))
                assert (await peer.answer(stream_id))[0] == b"abc"

    run(main())


def test_a_stream_whose_window_stays_closed_is_dropped_and_another_is_served():
    async def main() -> None:
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

    run(main())


def test_a_stream_that_waits_for_the_connections_window_stays_while_others_go_on():
    async def main() -> None:
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

    run(main())


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
def test_a_slow_reader_gets_the_whole_of_its_answer(window, is_asked_to_go):
    # Longer than the kernel holds, and it takes longer than any patience.
    limits = dataclasses.replace(LIMITS, patience_s=0.4, stream_window=BIG, connection_window=2 * BIG)

    async def main() -> None:
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

    run(main())


def test_a_peer_that_takes_nothing_is_dropped_and_its_answer_with_it():
    limits = dataclasses.replace(LIMITS, patience_s=0.2, stream_window=BIG, connection_window=2 * BIG)

    async def main() -> None:
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

    run(main())
