from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from shard_node.errors import NodeUnavailableError
from shard_node.wire.address import Address
from shard_node.wire.frame import FrameType
from shard_node.wire.messages import encode_pool
from shard_node.wire.server import NodeServer, ServerLimits
from shardrank_testing.nodes import (
    MODEL,
    NEVER_S,
    SLOW_ROW,
    VERSION,
    HookedEngine,
    RawPeer,
    connected,
    film_bags,
    in_every_place,
    on_every_loop,
    reference_engine,
    serving,
    small_node,
    soon,
    until,
)


def replica_address(place, folder, name) -> Address:
    return Address(path=str(folder / name)) if place.socket == "unix" else Address.parse("127.0.0.1:0")


@in_every_place
@pytest.mark.parametrize("inline_bytes", [0, 16384])
def test_draining_under_load_fails_no_request_that_has_another_replica(place, inline_bytes, tmp_path):
    limits = ServerLimits(max_inline_bytes=inline_bytes)
    expected = reference_engine().pool(film_bags([7, 8]))[1]

    async def main():
        async with (
            serving(replica_address(place, tmp_path, "a"), None, limits) as first,
            serving(replica_address(place, tmp_path, "b"), None, limits) as second,
            connected(first.addresses[0]) as one,
            connected(second.addresses[0]) as two,
        ):
            answered = {one: 0, two: 0}
            drained = asyncio.Event()

            async def load() -> None:
                after = 0
                while after < 20:
                    after += drained.is_set()
                    client = one if one.available else two
                    answer = await client.pool(MODEL, VERSION, film_bags([7, 8]), soon())
                    np.testing.assert_array_equal(answer.sums[1], expected)
                    answered[client] += 1

            tasks = [asyncio.create_task(load()) for _ in range(16)]
            await until(lambda: answered[one] >= 100)
            whole = await first.drain(NEVER_S)
            drained.set()
            await asyncio.gather(*tasks)
            return whole, first.num_connections, answered[two]

    whole, connections_left, by_second = place.run(main())
    assert whole
    assert connections_left == 0
    assert by_second > 0


@in_every_place
def test_a_request_in_flight_is_answered_while_new_ones_are_sent_elsewhere(place, tmp_path):
    opened, entered = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert opened.wait(NEVER_S)

    node = small_node(HookedEngine({SLOW_ROW: slow}))

    async def main():
        async with (
            serving(place.address(tmp_path), node, ServerLimits(max_inline_bytes=0)) as server,
            connected(server.addresses[0]) as client,
        ):
            in_flight = asyncio.create_task(client.pool(MODEL, VERSION, film_bags([SLOW_ROW]), soon()))
            await asyncio.to_thread(entered.wait, NEVER_S)
            draining = asyncio.create_task(server.drain(NEVER_S))
            await until(lambda: not client.available)
            with pytest.raises(NodeUnavailableError, match="draining"):
                await client.pool(MODEL, VERSION, film_bags([1]), soon())
            assert not draining.done()
            opened.set()
            return await in_flight, await draining

    answer, whole = place.run(main())
    assert whole
    np.testing.assert_array_equal(answer.sums[1], reference_engine().pool(film_bags([SLOW_ROW]))[1])


@on_every_loop
def test_requests_that_cross_the_goaway_frame_are_answered_and_a_deaf_peer_is_cut_at_the_end(place, tmp_path):
    async def main():
        server = NodeServer(small_node())
        await server.start([place.address(tmp_path)])
        peer = await RawPeer.connect(server.addresses[0])
        peer.write(*encode_pool(1, 0, MODEL, VERSION, film_bags([1])))
        await peer.read_frame()
        draining = asyncio.create_task(server.drain(0.1))
        goaway = await peer.read_frame()
        peer.write(*encode_pool(2, 0, MODEL, VERSION, film_bags([1])))
        crossed = await peer.read_frame()
        whole = await draining
        await server.close()
        end = await peer.read_end()
        await peer.close()
        return goaway, crossed, whole, end

    goaway, crossed, whole, end = place.run(main())
    assert goaway.header.frame_type == FrameType.GOAWAY
    assert crossed.header.frame_type == FrameType.POOLED
    assert crossed.header.request_id == 2
    assert not whole
    assert end == b""


@on_every_loop
def test_a_drained_address_can_be_taken_by_a_successor_at_once(place, tmp_path):
    address = place.address(tmp_path)

    async def main():
        async with serving(address) as first, connected(address) as client:
            await client.info()
            assert await first.drain(NEVER_S)
            async with serving(address):
                await until(lambda: client.available)
                return await client.info()

    assert place.run(main()) == small_node().info()


@on_every_loop
def test_a_server_without_connections_drains_at_once(place, tmp_path):
    async def main():
        async with serving(place.address(tmp_path)) as server:
            return await server.drain(NEVER_S)

    assert place.run(main())
