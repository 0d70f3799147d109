from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from shard_node.bags import KeyedBags
from shard_node.errors import (
    DeadlineExceededError,
    FrameTooLargeError,
    GenerationNotFoundError,
    InvalidBagsError,
    NodeOverloadedError,
    RemoteError,
    WireError,
)
from shard_node.wire.address import Address
from shard_node.wire.frame import FrameType, pack_header
from shard_node.wire.messages import decode_answer, decode_error, encode_pool
from shard_node.wire.server import ServerLimits
from shardrank_testing.bags import random_table_bags
from shardrank_testing.nodes import (
    EVERY_PLACE,
    MODEL,
    SLOW_ROW,
    VERSION,
    Gate,
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

NO_INLINE = ServerLimits(max_inline_bytes=0, threads=2)


@in_every_place
@pytest.mark.parametrize("inline", [True, False])
def test_answers_equal_the_engines_own(place, inline, tmp_path):
    engine = reference_engine()
    limits = ServerLimits() if inline else NO_INLINE
    rng = np.random.default_rng(3)
    requests = [random_table_bags(rng, engine.layout, 6, 9, weighted=bool(number % 2)) for number in range(12)]

    async def main():
        async with (
            serving(place.address(tmp_path), small_node(engine), limits) as server,
            connected(server.addresses[0]) as client,
        ):
            return await asyncio.gather(*(client.pool(MODEL, VERSION, bags, soon()) for bags in requests))

    for bags, answer in zip(requests, place.run(main()), strict=True):
        for ours, theirs in zip(answer.sums, engine.pool(bags), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@in_every_place
def test_info_is_the_nodes_own(place, tmp_path):
    node = small_node()

    async def main():
        async with (
            serving(place.address(tmp_path), node) as server,
            connected(server.addresses[0]) as client,
        ):
            return await client.info()

    assert place.run(main()) == node.info()


@in_every_place
def test_a_slow_request_does_not_hold_up_later_ones_of_its_connection(place, tmp_path):
    gate = Gate()

    async def main():
        async with (
            serving(place.address(tmp_path), small_node(gate.engine), NO_INLINE) as server,
            connected(server.addresses[0]) as client,
        ):
            slow = asyncio.create_task(client.pool(MODEL, VERSION, film_bags([SLOW_ROW]), soon()))
            await gate.wait_entered()
            fast = await client.pool(MODEL, VERSION, film_bags([1, 2], [3]), soon())
            assert not slow.done()
            assert (client.in_flight, server.in_flight) == (1, 1)
            gate.opened.set()
            return fast, await slow

    fast, slow = place.run(main())
    inner = gate.engine.inner
    np.testing.assert_array_equal(fast.sums[1], inner.pool(film_bags([1, 2], [3]))[1])
    np.testing.assert_array_equal(slow.sums[1], inner.pool(film_bags([SLOW_ROW]))[1])


@in_every_place
def test_large_requests_and_answers_arrive_whole(place, tmp_path):
    engine = reference_engine()
    rng = np.random.default_rng(5)
    bags = film_bags(*rng.integers(0, 500, (20_000, 4)).tolist())

    async def main():
        async with (
            serving(place.address(tmp_path), small_node(engine)) as server,
            connected(server.addresses[0]) as client,
        ):
            return await asyncio.gather(*(client.pool(MODEL, VERSION, bags, soon()) for _ in range(4)))

    expected = engine.pool(bags)
    for answer in place.run(main()):
        np.testing.assert_array_equal(answer.sums[1], expected[1])


def bad_bags() -> list[tuple[KeyedBags, str]]:
    good = film_bags([1, 2], [3])

    def changed(**arrays) -> KeyedBags:
        parts = {name: getattr(good, name) for name in ("keys", "bags_per_key", "offsets", "values", "weights")}
        return KeyedBags(**{**parts, **arrays})

    return [
        (film_bags([1], [2, 500]), "row 500 (value 2) is not in 0..499 of table 'film'"),
        (film_bags([-1]), "row -1 (value 0) is not in 0..499 of table 'film'"),
        (film_bags([2**62]), "row 4611686018427387904"),
        (changed(keys=np.array([3], np.int32)), "key 3 is no table, tables are 0..2"),
        (changed(keys=np.array([-1], np.int32)), "key -1 is no table"),
        (changed(bags_per_key=np.array([1])), "bags_per_key must add up to the 2 bags"),
        (changed(bags_per_key=np.array([2**40])), "bags_per_key must be within 0..2"),
        (changed(bags_per_key=np.array([-1])), "bags_per_key must be within 0..2"),
        (changed(bags_per_key=np.array([1, 1])), "keys has 1 entries, bags_per_key 2"),
        (changed(keys=np.array([1, 1], np.int32), bags_per_key=np.array([1, 1])), "strictly ascending"),
        (changed(offsets=np.array([0, 3, 2])), "offsets must not descend"),
        (changed(offsets=np.array([0, 1, 2])), "offsets ends at 2, but there are 3 values"),
        (changed(offsets=np.array([1, 2, 3])), "offsets must begin with 0"),
        (changed(offsets=np.array([], np.int64)), "bags_per_key"),
        (changed(weights=np.array([1, 2], np.float32)), "2 weights for 3 values"),
        (changed(weights=np.array([1, np.nan, 2], np.float32)), "weights must be finite"),
        (film_bags(range(200)), "values has 200 entries, a request may have at most 100"),
    ]


@on_every_loop
@pytest.mark.parametrize("inline_bytes", [0, 16384])
def test_bad_requests_are_refused_by_name_and_harm_no_other_on_the_connection(place, inline_bytes, tmp_path):
    limits = ServerLimits(max_inline_bytes=inline_bytes, max_values_per_request=100)
    bad = bad_bags()

    async def main():
        async with (
            serving(place.address(tmp_path), None, limits) as server,
            connected(server.addresses[0]) as client,
        ):
            asked = [
                client.pool(MODEL, VERSION, bags, soon()) for wrong, _ in bad for bags in (wrong, film_bags([7], [8]))
            ]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert server.num_connections == 1
            return answers

    answers = place.run(main())
    for (_, message), error in zip(bad, answers[::2], strict=True):
        assert type(error) is InvalidBagsError, error
        assert message in str(error)
    expected = reference_engine().pool(film_bags([7], [8]))[1]
    for answer in answers[1::2]:
        np.testing.assert_array_equal(answer.sums[1], expected)


@on_every_loop
def test_malformed_bodies_and_unknown_types_are_answered_and_the_connection_lives(place, tmp_path):
    good = b"".join(encode_pool(3, 0, MODEL, VERSION, film_bags([7])))

    async def main():
        async with serving(place.address(tmp_path)) as server:
            peer = await RawPeer.connect(server.addresses[0])
            unknown = bytearray(pack_header(FrameType.POOL, 2, 0))
            unknown[6:8] = b"\x63\x00"
            peer.write(pack_header(FrameType.POOL, 1, 8), b"\xff" * 8, unknown, good)
            frames = [await peer.read_frame() for _ in range(3)]
            await peer.close()
            return frames

    malformed, unknown, pooled = place.run(main())
    assert [frame.header.request_id for frame in (malformed, unknown, pooled)] == [1, 2, 3]
    assert "num_arrays is 4294967295" in str(decode_error(malformed))
    assert type(decode_error(unknown)) is WireError
    assert "frame type 99 is not a request" in str(decode_error(unknown))
    np.testing.assert_array_equal(decode_answer(pooled).sums[1], reference_engine().pool(film_bags([7]))[1])


@on_every_loop
def test_an_unknown_version_is_not_found_and_an_unexpected_failure_is_logged_and_carried(place, tmp_path, caplog):
    def fail() -> None:
        raise ZeroDivisionError("card 3 has melted")

    engine = HookedEngine({SLOW_ROW: fail})

    async def main():
        async with (
            serving(place.address(tmp_path), small_node(engine)) as server,
            connected(server.addresses[0]) as client,
        ):
            with pytest.raises(GenerationNotFoundError, match="version 8 of model 'films' is not here"):
                await client.pool(MODEL, 8, film_bags([1]), soon())
            with pytest.raises(RemoteError, match="ZeroDivisionError: card 3 has melted"):
                await client.pool(MODEL, VERSION, film_bags([SLOW_ROW]), soon())

    with caplog.at_level(logging.ERROR):
        place.run(main())
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


@on_every_loop
def test_more_requests_than_allowed_are_refused_at_once_and_the_others_answered(place, tmp_path):
    gate = Gate()
    limits = ServerLimits(max_inline_bytes=0, threads=1, max_in_flight=3)

    async def main():
        async with (
            serving(place.address(tmp_path), small_node(gate.engine), limits) as server,
            connected(server.addresses[0]) as client,
        ):
            first = [asyncio.create_task(client.pool(MODEL, VERSION, film_bags([SLOW_ROW]), soon())) for _ in range(3)]
            await gate.wait_entered()
            with pytest.raises(NodeOverloadedError, match="3 requests in flight, at most 3"):
                await client.pool(MODEL, VERSION, film_bags([1]), soon())
            gate.opened.set()
            await asyncio.gather(*first)
            await client.pool(MODEL, VERSION, film_bags([1]), soon())
            assert server.in_flight == 0

    place.run(main())


@on_every_loop
def test_bytes_in_flight_are_limited_but_one_request_is_always_taken(place, tmp_path):
    gate = Gate()
    limits = ServerLimits(max_inline_bytes=0, threads=1, max_in_flight_bytes=1024)

    async def main():
        async with (
            serving(place.address(tmp_path), small_node(gate.engine), limits) as server,
            connected(server.addresses[0]) as client,
        ):
            first = asyncio.create_task(client.pool(MODEL, VERSION, film_bags([SLOW_ROW], *[[]] * 100), soon()))
            await gate.wait_entered()
            with pytest.raises(NodeOverloadedError, match="more than the 1024 that are taken"):
                await client.pool(MODEL, VERSION, film_bags([1]), soon())
            gate.opened.set()
            await first

    place.run(main())


@on_every_loop
def test_a_request_whose_deadline_has_passed_is_answered_without_pooling(place, tmp_path):
    gate = Gate()
    pooled_late = []
    gate.engine.hooks[43] = lambda: pooled_late.append(1)
    limits = ServerLimits(max_inline_bytes=0, threads=1)

    async def main():
        async with serving(place.address(tmp_path), small_node(gate.engine), limits) as server:
            peer = await RawPeer.connect(server.addresses[0])
            peer.write(*encode_pool(1, 0, MODEL, VERSION, film_bags([SLOW_ROW])))
            await gate.wait_entered()
            # One microsecond is over long before the only thread is free.
            peer.write(*encode_pool(2, 1, MODEL, VERSION, film_bags([43])))
            peer.write(*encode_pool(3, 0, MODEL, VERSION, film_bags([1])))
            await until(lambda: server.in_flight >= 3)
            gate.opened.set()
            frames = {frame.header.request_id: frame for frame in [await peer.read_frame() for _ in range(3)]}
            await peer.close()
            return frames

    frames = place.run(main())
    assert type(decode_error(frames[2])) is DeadlineExceededError
    assert [frames[number].header.frame_type for number in (1, 3)] == [FrameType.POOLED, FrameType.POOLED]
    assert not pooled_late


@on_every_loop
def test_an_answer_that_would_be_too_long_is_refused_before_it_is_pooled(place, tmp_path):
    limits = ServerLimits(max_frame_bytes=8192)

    async def main():
        async with (
            serving(place.address(tmp_path), None, limits) as server,
            connected(server.addresses[0]) as client,
        ):
            with pytest.raises(FrameTooLargeError, match=r"answer has 32\d\d\d bytes, a frame may have at most 8192"):
                await client.pool(MODEL, VERSION, film_bags(*[[]] * 1000), soon())
            assert len((await client.pool(MODEL, VERSION, film_bags([1]), soon())).sums) == 2

    place.run(main())


def test_two_servers_on_one_machine_take_free_ports():
    async def main():
        async with serving(Address.parse("127.0.0.1:0")) as first, serving(Address.parse("127.0.0.1:0")) as second:
            assert first.addresses[0].port != second.addresses[0].port != 0

    EVERY_PLACE[2].run(main())
