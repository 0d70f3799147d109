from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest

from shard_node.answer import Answer
from shard_node.errors import (
    DeadlineExceededError,
    FrameTooLargeError,
    NodeOverloadedError,
    NodeUnavailableError,
    RemoteError,
    WireError,
)
from shard_node.wire.address import Address
from shard_node.wire.client import ClientLimits, ShardClient
from shard_node.wire.frame import FrameType, pack_header
from shard_node.wire.messages import encode_answer, encode_error, encode_info
from shard_node.wire.server import ServerLimits
from shardrank_testing.nodes import (
    MODEL,
    SLOW_ROW,
    VERSION,
    Gate,
    RawPeer,
    connected,
    film_bags,
    in_every_place,
    node_process,
    on_each_once,
    on_every_loop,
    reference_engine,
    serving,
    soon,
    until,
)

EXPECTED = reference_engine().pool(film_bags([7]))[1]


@contextlib.asynccontextmanager
async def scripted(address: Address, script):
    """A node that does what the script does with each connection; gives its real address."""
    peers = []

    async def connection(reader, writer) -> None:
        peer = RawPeer(reader, writer)
        peers.append(peer)
        await script(peer)

    if address.is_unix:
        server = await asyncio.start_unix_server(connection, address.path)
    else:
        server = await asyncio.start_server(connection, address.host, address.port)
        address = Address(*server.sockets[0].getsockname())
    try:
        yield address
    finally:
        server.close()
        for peer in peers:
            await peer.close()


@on_every_loop
def test_the_deadline_ends_a_call_and_a_late_answer_is_dropped(place, tmp_path):
    gate = Gate()

    async def main():
        async with (
            serving(place.address(tmp_path), gate.node, ServerLimits(max_inline_bytes=0)) as server,
            connected(server.addresses[0]) as client,
        ):
            with pytest.raises(DeadlineExceededError, match="before the answer came"):
                await client.pool(MODEL, VERSION, film_bags([SLOW_ROW]), time.monotonic() + 0.05)
            await gate.wait_entered()
            assert client.in_flight == 0
            gate.opened.set()
            answer = await client.pool(MODEL, VERSION, film_bags([7]), soon())
            assert server.num_connections == 1
            with pytest.raises(DeadlineExceededError, match="before sending"):
                await client.pool(MODEL, VERSION, film_bags([7]), time.monotonic() - 1)
            return answer

    np.testing.assert_array_equal(place.run(main()).sums[1], EXPECTED)


@on_every_loop
def test_a_deadline_without_end_is_allowed(place, tmp_path):
    async def main():
        async with serving(place.address(tmp_path)) as server, connected(server.addresses[0]) as client:
            return await client.pool(MODEL, VERSION, film_bags([7]), float("inf"))

    np.testing.assert_array_equal(place.run(main()).sums[1], EXPECTED)


@on_every_loop
def test_a_cancelled_call_leaves_nothing_behind_and_the_connection_in_use(place, tmp_path):
    gate = Gate()

    async def main():
        async with (
            serving(place.address(tmp_path), gate.node, ServerLimits(max_inline_bytes=0)) as server,
            connected(server.addresses[0]) as client,
        ):
            call = asyncio.create_task(client.pool(MODEL, VERSION, film_bags([SLOW_ROW]), soon()))
            await gate.wait_entered()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert client.in_flight == 0
            gate.opened.set()
            answer = await client.pool(MODEL, VERSION, film_bags([7]), soon())
            assert server.num_connections == 1
            return answer

    np.testing.assert_array_equal(place.run(main()).sums[1], EXPECTED)


@on_every_loop
def test_a_call_cancelled_while_connecting_does_not_spoil_the_others(place, tmp_path):
    async def main():
        async with serving(place.address(tmp_path)) as server, connected(server.addresses[0]) as client:
            calls = [asyncio.create_task(client.pool(MODEL, VERSION, film_bags([7]), soon())) for _ in range(3)]
            await asyncio.sleep(0)
            calls[0].cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(results[0], asyncio.CancelledError)
            assert server.num_connections == 1
            return results[1:]

    for answer in place.run(main()):
        np.testing.assert_array_equal(answer.sums[1], EXPECTED)


@on_each_once
def test_a_node_killed_mid_request_fails_it_at_once_and_is_found_again_when_it_is_back(place, tmp_path):
    async def main():
        with node_process(place.address(tmp_path)) as (process, bound):
            async with connected(bound) as client:
                await client.pool(MODEL, VERSION, film_bags([7]), soon())
                process.kill()
                # A hundred calls on their way: each is answered or fails as unavailable, none hangs.
                calls = [client.pool(MODEL, VERSION, film_bags([7]), soon()) for _ in range(100)]
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(outcome) for outcome in outcomes} <= {list, NodeUnavailableError}
                await asyncio.to_thread(process.wait)
                with pytest.raises(NodeUnavailableError):
                    await client.pool(MODEL, VERSION, film_bags([7]), soon())
                with node_process(bound):
                    back_at = time.monotonic()
                    while True:
                        with contextlib.suppress(NodeUnavailableError):
                            answer = await client.pool(MODEL, VERSION, film_bags([7]), soon())
                            return answer, time.monotonic() - back_at
                        await asyncio.sleep(0.01)

    answer, resumed_after_s = place.run(main())
    np.testing.assert_array_equal(answer.sums[1], EXPECTED)
    assert resumed_after_s < 5


@in_every_place
def test_a_server_that_closes_fails_what_is_in_flight_as_unavailable(place, tmp_path):
    gate = Gate()

    async def main():
        async with (
            serving(place.address(tmp_path), gate.node, ServerLimits(max_inline_bytes=0)) as server,
            connected(server.addresses[0]) as client,
        ):
            call = asyncio.create_task(client.pool(MODEL, VERSION, film_bags([SLOW_ROW]), soon()))
            await gate.wait_entered()
            closing = asyncio.create_task(server.close())
            with pytest.raises(NodeUnavailableError, match="connection lost before the answer came"):
                await call
            gate.opened.set()
            await closing

    place.run(main())


@on_every_loop
def test_while_a_node_is_away_calls_fail_at_once_and_pauses_between_attempts_double_up_to_their_limit(place, tmp_path):
    pauses = []

    async def main():
        nine, found = asyncio.Event(), asyncio.Event()

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 9:
                nine.set()
                await found.wait()

        async with connected(place.address(tmp_path), sleep=sleep) as client:
            assert client.available
            with pytest.raises(NodeUnavailableError, match="No such file"):
                await client.pool(MODEL, VERSION, film_bags([7]), soon())
            await nine.wait()
            assert not client.available
            with pytest.raises(NodeUnavailableError, match="No such file"):
                await client.pool(MODEL, VERSION, film_bags([7]), soon())
            async with serving(client.address):
                found.set()
                await until(lambda: client.available)
                assert client.connections == 1
                return await client.pool(MODEL, VERSION, film_bags([7]), soon())

    np.testing.assert_array_equal(place.run(main()).sums[1], EXPECTED)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5, 0.5]


@in_every_place
def test_a_connection_that_the_node_ends_is_back_for_the_next_call(place, tmp_path):
    async def main():
        served = []

        async def one_answer(peer) -> None:
            request = await peer.read_frame()
            peer.write(*encode_answer(request.header.request_id, Answer([EXPECTED])))
            served.append(1)
            await peer.close()

        async with scripted(place.address(tmp_path), one_answer) as address, connected(address) as client:
            await client.pool(MODEL, VERSION, film_bags([7]), soon())
            await until(lambda: not client.available)
            answer = await client.pool(MODEL, VERSION, film_bags([7]), soon())
            return answer, len(served), client.connections

    answer, served, connections = place.run(main())
    np.testing.assert_array_equal(answer.sums[0], EXPECTED)
    assert served == connections == 2


@in_every_place
def test_a_node_that_accepts_and_says_nothing_costs_a_call_its_deadline_only(place, tmp_path):
    async def main():
        async def silent(peer) -> None:
            await peer.reader.read()

        async with scripted(place.address(tmp_path), silent) as address, connected(address) as client:
            with pytest.raises(DeadlineExceededError):
                await client.pool(MODEL, VERSION, film_bags([7]), time.monotonic() + 0.03)

    place.run(main())


@on_every_loop
@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.1 400 Bad Request and so on\r\n", NodeUnavailableError, "magic is b'HTTP'"),
        (b"SHRK\x02\0\x02\0" + bytes(16), NodeUnavailableError, "protocol version 2 is not spoken here"),
        (pack_header(FrameType.POOLED, 1, 2**31), FrameTooLargeError, "frame has 2147483672 bytes"),
        (pack_header(FrameType.POOLED, 1, 8) + b"\xff" * 8, RemoteError, "malformed answer: POOLED num_arrays"),
        (pack_header(FrameType.ERROR, 1, 8) + b"\xff" * 8, RemoteError, "malformed answer: ERROR num_arrays"),
        (b"".join(encode_info(1)), RemoteError, "frame type 3 is no answer"),
        (b"".join(encode_info(0)), NodeUnavailableError, "frame type 3 without a request id"),
        (b"SHRK\x02" + b"".join(encode_error(1, WireError("only 2 is spoken")))[5:], WireError, "only 2 is spoken"),
    ],
)
def test_a_node_that_answers_nonsense_gives_a_typed_error(place, answer, error, message, tmp_path):
    async def main():
        async def nonsense(peer) -> None:
            await peer.read_frame()
            peer.write(answer)
            await peer.reader.read()

        async with scripted(place.address(tmp_path), nonsense) as address, connected(address) as client:
            with pytest.raises(error, match=message) as caught:
                await client.pool(MODEL, VERSION, film_bags([7]), soon())
            assert type(caught.value) is error

    place.run(main())


@on_every_loop
def test_answers_to_requests_that_nobody_made_are_ignored(place, tmp_path):
    async def main():
        async def chatty(peer) -> None:
            await peer.read_frame()
            peer.write(*encode_answer(99, Answer([np.zeros((1, 8), np.float32)])))
            peer.write(*encode_answer(1, Answer([EXPECTED])), *encode_answer(1, Answer([EXPECTED])))
            await peer.reader.read()

        async with scripted(place.address(tmp_path), chatty) as address, connected(address) as client:
            return await client.pool(MODEL, VERSION, film_bags([7]), soon())

    np.testing.assert_array_equal(place.run(main()).sums[0], EXPECTED)


@on_every_loop
def test_a_node_that_does_not_read_makes_new_calls_wait_not_memory_grow(place, tmp_path):
    big = film_bags(*[[1]] * 200_000)

    async def main():
        enough = asyncio.Event()

        async def deaf(peer) -> None:
            peer.writer.transport.pause_reading()
            await enough.wait()

        limits = ClientLimits(max_unsent_bytes=4096)
        async with scripted(place.address(tmp_path), deaf) as address, connected(address, limits=limits) as client:
            first = asyncio.create_task(client.pool(MODEL, VERSION, big, soon()))
            await until(lambda: client._connection is not None)
            await until(lambda: client._connection._writable is not None)
            with pytest.raises(DeadlineExceededError, match="before the request could be sent"):
                await client.pool(MODEL, VERSION, big, time.monotonic() + 0.02)
            await client.close()
            with pytest.raises(NodeUnavailableError):
                await first
            enough.set()

    place.run(main())


@on_every_loop
def test_a_client_refuses_what_is_over_its_own_limits(place, tmp_path):
    gate = Gate()
    limits = ClientLimits(max_in_flight=1, max_frame_bytes=1024)

    async def main():
        async with (
            serving(place.address(tmp_path), gate.node, ServerLimits(max_inline_bytes=0)) as server,
            connected(server.addresses[0], limits=limits) as client,
        ):
            with pytest.raises(FrameTooLargeError, match=r"request has \d+ bytes, at most 1024 are sent"):
                await client.pool(MODEL, VERSION, film_bags(range(400)), soon())
            call = asyncio.create_task(client.pool(MODEL, VERSION, film_bags([SLOW_ROW]), soon()))
            await gate.wait_entered()
            with pytest.raises(NodeOverloadedError, match="1 requests in flight, at most 1"):
                await client.pool(MODEL, VERSION, film_bags([7]), soon())
            gate.opened.set()
            await call

    place.run(main())


@in_every_place
def test_a_closed_client_fails_its_calls_and_can_be_closed_twice(place, tmp_path):
    gate = Gate()

    async def main():
        async with serving(place.address(tmp_path), gate.node, ServerLimits(max_inline_bytes=0)) as server:
            client = ShardClient(server.addresses[0])
            call = asyncio.create_task(client.pool(MODEL, VERSION, film_bags([SLOW_ROW]), soon()))
            await gate.wait_entered()
            await client.close()
            with pytest.raises(NodeUnavailableError):
                await call
            assert not client.available
            with pytest.raises(NodeUnavailableError, match="the client is closed"):
                await client.info()
            await client.close()
            gate.opened.set()

    place.run(main())


@on_every_loop
def test_a_client_closed_while_connecting_leaves_no_connection(place, tmp_path):
    async def main():
        async with serving(place.address(tmp_path)) as server:
            client = ShardClient(server.addresses[0])
            call = asyncio.create_task(client.info())
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(NodeUnavailableError, match="the client is closed"):
                await call
            await until(lambda: not server.num_connections)

    place.run(main())
