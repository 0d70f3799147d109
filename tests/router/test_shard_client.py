"""The connection to a node: cancelled calls, nodes that go away, reply with nonsense or do not read."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from loader.errors import DeadlineExceededError
from router.shard_client import ClientLimits, ShardClient
from shard_node.answer import Answer
from shard_node.errors import NodeUnavailableError, RemoteError, WireError
from shard_node.wire.frame import FrameType, pack_header
from shard_node.wire.messages import encode_answer, encode_error, encode_info
from shard_node.wire.requests import ServerLimits
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import (
    EVERY_PLACE,
    SLOW_ROW,
    Gate,
    Place,
    connected,
    expected_films,
    in_every_place,
    pool_films,
    serving,
    until,
)


@pytest.fixture(params=EVERY_PLACE[1::2], ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    """Each event loop, with Unix sockets."""
    return request.param


@pytest.fixture
def anyio_backend(place: Place) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": place.loop == "uvloop"}


BY_THREADS = ServerLimits(max_inline_bytes=0)
EXPECTED = expected_films([7])


async def test_a_deadline_ends_a_call_and_drops_the_late_answer(place, tmp_path):
    gate = Gate()
    async with place.client(tmp_path, gate.node, BY_THREADS) as (server, client):
        with pytest.raises(DeadlineExceededError, match=r"no reply within 0\.05 s"):
            await pool_films(client, [SLOW_ROW], timeout_s=0.05)
        await gate.wait_entered()
        assert client.connection.is_idle
        gate.opened.set()
        np.testing.assert_array_equal(await pool_films(client, [7]), EXPECTED)
        assert server.num_connections == 1


async def test_a_cancelled_call_leaves_the_connection_in_use(place, tmp_path):
    """Whether it is cancelled while connecting or while it waits for the answer."""
    gate = Gate()
    async with place.client(tmp_path, gate.node, BY_THREADS) as (server, client):
        calls = [asyncio.create_task(pool_films(client, [7])) for _ in range(3)]
        await asyncio.sleep(0)
        calls[0].cancel()
        cancelled, *answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(cancelled, asyncio.CancelledError)
        call = asyncio.create_task(pool_films(client, [SLOW_ROW]))
        await gate.wait_entered()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.connection.is_idle
        gate.opened.set()
        answers.append(await pool_films(client, [7]))
        assert server.num_connections == 1
    for answer in answers:
        np.testing.assert_array_equal(answer, EXPECTED)


@in_every_place
async def test_a_closing_server_fails_what_is_in_flight(place, tmp_path):
    gate = Gate()
    async with place.client(tmp_path, gate.node, BY_THREADS) as (server, client):
        calls = [asyncio.create_task(pool_films(client, [row])) for row in (SLOW_ROW, *range(100))]
        await gate.wait_entered()
        closing = asyncio.create_task(server.close())
        with pytest.raises(NodeUnavailableError, match="connection lost: closed by the node"):
            await calls[0]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {np.ndarray, NodeUnavailableError}
        gate.opened.set()
        await closing


async def test_while_a_node_is_away_calls_fail_and_pauses_double(place, tmp_path):
    pauses = []
    nine, back = asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            nine.set()
            await back.wait()

    async with connected(place.address(tmp_path), sleep=sleep) as client:
        with pytest.raises(NodeUnavailableError, match="No such file"):
            await pool_films(client, [7])
        await nine.wait()
        assert not client.is_available
        with pytest.raises(NodeUnavailableError, match="No such file"):
            await pool_films(client, [7])
        async with serving(client.address):
            back.set()
            await until(lambda: client.is_available)
            assert client.num_connections == 1
            np.testing.assert_array_equal(await pool_films(client, [7]), EXPECTED)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5, 0.5]


async def test_a_connection_ended_by_the_node_is_made_again(place, tmp_path):
    """Answers to requests that were never sent are ignored."""

    async def script(peer) -> None:
        request_id = (await peer.read_frame()).header.request_id
        for number in (99, request_id, request_id):
            peer.write(*encode_answer(number, Answer([np.zeros((1, 4), np.float32), EXPECTED])))
        await peer.close()

    async with place.script(tmp_path, script) as client:
        await pool_films(client, [7])
        await until(lambda: client.connection is None)
        np.testing.assert_array_equal(await pool_films(client, [7]), EXPECTED)
        assert client.num_connections == 2


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.1 400 Bad Request and so on\r\n", NodeUnavailableError, "magic is b'HTTP'"),
        (b"SHRK\x02\0\x02\0" + bytes(16), NodeUnavailableError, "protocol version 2 is not spoken here"),
        (b"SHRK\x02\0\x02\0\x01" + bytes(15), NodeUnavailableError, "protocol version 2 is not spoken here"),
        (pack_header(FrameType.POOLED, 1, 2**31), WireError, "frame has 2147483672 bytes"),
        (pack_header(FrameType.POOLED, 1, 8) + b"\xff" * 8, RemoteError, "malformed reply: POOLED num_arrays"),
        (pack_header(FrameType.ERROR, 1, 8) + b"\xff" * 8, RemoteError, "malformed reply: ERROR num_arrays"),
        (b"".join(encode_info(1)), RemoteError, "frame type 3 is no reply"),
        (b"".join(encode_info(0)), NodeUnavailableError, "frame type 3 without a request id"),
        (b"SHRK\x02" + b"".join(encode_error(1, WireError("only 2 is spoken")))[5:], WireError, "only 2 is spoken"),
    ],
)
async def test_nonsense_from_a_node_is_a_typed_error(place, answer, error, message, tmp_path):
    async def script(peer) -> None:
        await peer.read_frame()
        peer.write(answer)
        await peer.reader.read()

    async with place.script(tmp_path, script) as client:
        with pytest.raises(error, match=message) as caught:
            await pool_films(client, [7])
        assert type(caught.value) is error


async def test_a_node_that_does_not_read_makes_new_calls_wait(place, tmp_path):
    """Memory does not grow."""
    big = [[1]] * 100_000

    async def script(peer) -> None:
        peer.writer.transport.pause_reading()

    async with place.script(tmp_path, script, limits=ClientLimits(max_unsent_bytes=4096)) as client:
        first = asyncio.create_task(pool_films(client, *big))
        await until(lambda: client.connection is not None and client.connection.blocked is not None)
        with pytest.raises(DeadlineExceededError, match=r"no reply within 0\.02 s"):
            await pool_films(client, *big, timeout_s=0.02)
        # The first one is all that was sent.
        assert client.connection._last_request_id == 1
        await client.close()
        with pytest.raises(NodeUnavailableError):
            await first


async def test_a_client_refuses_what_is_over_its_limits(place, tmp_path):
    gate = Gate()

    limits = ClientLimits(max_in_flight=1, max_frame_bytes=1024)
    async with place.client(tmp_path, gate.node, BY_THREADS, limits=limits) as (_, client):
        with raises_kind("frame_too_large", match=r"request has \d+ bytes, the limit is 1024"):
            await pool_films(client, range(400))
        call = asyncio.create_task(pool_films(client, [SLOW_ROW]))
        await gate.wait_entered()
        with raises_kind("node_overloaded", match="1 requests in flight, the limit is 1"):
            await pool_films(client, [7])
        gate.opened.set()
        await call


async def test_a_closed_client_fails_its_calls(place, tmp_path):
    """Whether they connect or wait for an answer; it can be closed twice, and leaves no connection."""
    gate = Gate()
    async with place.client(tmp_path, gate.node, BY_THREADS) as (server, client):
        call = asyncio.create_task(pool_films(client, [SLOW_ROW]))
        await gate.wait_entered()
        connecting = ShardClient(server.addresses[0])
        info = asyncio.create_task(connecting.info())
        await asyncio.sleep(0)
        await connecting.close()
        with pytest.raises(NodeUnavailableError, match="the client is closed"):
            await info
        await client.close()
        with pytest.raises(NodeUnavailableError):
            await call
        assert not client.is_available
        with pytest.raises(NodeUnavailableError, match="the client is closed"):
            await client.info()
        await client.close()
        gate.opened.set()
        await until(lambda: not server.num_connections)
