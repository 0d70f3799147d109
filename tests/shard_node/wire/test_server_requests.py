"""Requests to a node over real sockets: answers, refusals by name, and the limits of what is in flight."""

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
from shard_node.wire.frame import FrameType, pack_header
from shard_node.wire.messages import decode_answer, decode_error, encode_pool
from shard_node.wire.server import ServerLimits
from shardrank_testing.bags import random_table_bags
from shardrank_testing.nodes import (
    MODEL,
    SLOW_ROW,
    VERSION,
    Gate,
    HookedEngine,
    expected_films,
    film_bags,
    in_every_place,
    on_every_loop,
    pool_films,
    reference_engine,
    small_node,
    soon,
    until,
)


@in_every_place
@pytest.mark.parametrize("inline_bytes", [0, 16384])
def test_answers_over_sockets_are_the_engines(place, inline_bytes, tmp_path):
    engine, rng = reference_engine(), np.random.default_rng(3)
    node = small_node(engine)
    requests = [random_table_bags(rng, engine.layout, 6, 9, weighted=bool(number % 2)) for number in range(12)]
    requests += [film_bags(*rng.integers(0, 500, (10_000, 4)).tolist())]

    async def scenario(server, client):
        assert await client.info() == node.info()
        return await asyncio.gather(*(client.pool(MODEL, VERSION, bags, soon()) for bags in requests))

    answers = place.with_client(tmp_path, scenario, node, ServerLimits(max_inline_bytes=inline_bytes))
    for bags, answer in zip(requests, answers, strict=True):
        for actual, expected in zip(answer.sums, engine.pool(bags), strict=True):
            np.testing.assert_array_equal(actual, expected)


@in_every_place
def test_a_slow_request_holds_up_no_later_one(place, tmp_path):
    gate = Gate()

    async def scenario(server, client):
        slow = asyncio.create_task(pool_films(client, [SLOW_ROW]))
        await gate.wait_entered()
        fast = await pool_films(client, [1, 2], [3])
        assert not slow.done()
        assert (client.in_flight, server.in_flight) == (1, 1)
        gate.opened.set()
        return fast, await slow

    fast, slow = place.with_client(tmp_path, scenario, gate.node, ServerLimits(max_inline_bytes=0, threads=2))
    np.testing.assert_array_equal(fast, expected_films([1, 2], [3]))
    np.testing.assert_array_equal(slow, expected_films([SLOW_ROW]))


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
def test_bad_requests_are_refused_and_harm_no_other(place, inline_bytes, tmp_path):
    limits = ServerLimits(max_inline_bytes=inline_bytes, max_values_per_request=100)
    bad = bad_bags()

    async def scenario(server, client):
        calls = [client.pool(MODEL, VERSION, bags, soon()) for wrong, _ in bad for bags in (wrong, film_bags([7], [8]))]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert server.num_connections == 1
        return answers

    answers = place.with_client(tmp_path, scenario, None, limits)
    for (_, message), error in zip(bad, answers[::2], strict=True):
        assert type(error) is InvalidBagsError, error
        assert message in str(error)
    for answer in answers[1::2]:
        np.testing.assert_array_equal(answer.sums[1], expected_films([7], [8]))


@on_every_loop
def test_malformed_bodies_are_refused_and_the_connection_lives(place, tmp_path):
    async def scenario(server, peer):
        unknown = bytearray(pack_header(FrameType.POOL, 2, 0))
        unknown[6:8] = b"\x63\x00"
        good = encode_pool(3, 0, MODEL, VERSION, film_bags([7]))
        peer.write(pack_header(FrameType.POOL, 1, 8), b"\xff" * 8, unknown, *good)
        return [await peer.read_frame() for _ in range(3)]

    malformed, unknown, pooled = place.with_peer(tmp_path, scenario)
    assert [frame.header.request_id for frame in (malformed, unknown, pooled)] == [1, 2, 3]
    assert "num_arrays is 4294967295" in str(decode_error(malformed))
    assert type(decode_error(unknown)) is WireError
    assert "frame type 99 is not a request" in str(decode_error(unknown))
    np.testing.assert_array_equal(decode_answer(pooled).sums[1], expected_films([7]))


@on_every_loop
def test_unknown_versions_and_failures_are_carried_by_name(place, tmp_path, caplog):
    def fail() -> None:
        raise ZeroDivisionError("card 3 has melted")

    async def scenario(server, client):
        with pytest.raises(GenerationNotFoundError, match="version 8 of model 'films' is not here"):
            await client.pool(MODEL, 8, film_bags([1]), soon())
        with pytest.raises(RemoteError, match="ZeroDivisionError: card 3 has melted"):
            await pool_films(client, [SLOW_ROW])

    with caplog.at_level(logging.ERROR):
        place.with_client(tmp_path, scenario, small_node(HookedEngine({SLOW_ROW: fail})))
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


@on_every_loop
@pytest.mark.parametrize(
    ("limits", "in_flight", "message"),
    [
        ({"max_in_flight": 3}, [[SLOW_ROW]] * 3, "3 requests in flight, at most 3"),
        # One request is always accepted.
        ({"max_in_flight_bytes": 1024}, [[SLOW_ROW], *[[]] * 100], "more than the 1024 that are taken"),
    ],
)
def test_limits_of_requests_and_bytes_in_flight(place, limits, in_flight, message, tmp_path):
    gate = Gate()

    async def scenario(server, client):
        calls = [[bag] for bag in in_flight] if "max_in_flight" in limits else [in_flight]
        tasks = [asyncio.create_task(pool_films(client, *bags)) for bags in calls]
        await gate.wait_entered()
        with pytest.raises(NodeOverloadedError, match=message):
            await pool_films(client, [1])
        gate.opened.set()
        await asyncio.gather(*tasks)
        await pool_films(client, [1])
        assert server.in_flight == 0

    place.with_client(tmp_path, scenario, gate.node, ServerLimits(max_inline_bytes=0, threads=1, **limits))


@on_every_loop
def test_a_request_past_its_deadline_is_not_pooled(place, tmp_path):
    gate, pooled_late = Gate(), []
    gate.engine.hooks[43] = lambda: pooled_late.append(1)

    async def scenario(server, peer):
        peer.write(*encode_pool(1, 0, MODEL, VERSION, film_bags([SLOW_ROW])))
        await gate.wait_entered()
        # One microsecond is over long before the only thread is free.
        peer.write(*encode_pool(2, 1, MODEL, VERSION, film_bags([43])))
        peer.write(*encode_pool(3, 0, MODEL, VERSION, film_bags([1])))
        await until(lambda: server.in_flight >= 3)
        gate.opened.set()
        return {frame.header.request_id: frame for frame in [await peer.read_frame() for _ in range(3)]}

    frames = place.with_peer(tmp_path, scenario, gate.node, ServerLimits(max_inline_bytes=0, threads=1))
    assert type(decode_error(frames[2])) is DeadlineExceededError
    assert [frames[number].header.frame_type for number in (1, 3)] == [FrameType.POOLED, FrameType.POOLED]
    assert not pooled_late


@on_every_loop
def test_a_too_long_answer_is_refused_before_pooling(place, tmp_path):
    async def scenario(server, client):
        with pytest.raises(FrameTooLargeError, match=r"answer has 32\d\d\d bytes, a frame may have at most 8192"):
            await pool_films(client, *[[]] * 1000)
        await pool_films(client, [1])

    place.with_client(tmp_path, scenario, None, ServerLimits(max_frame_bytes=8192))
