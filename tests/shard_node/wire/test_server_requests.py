"""Requests to a node over real sockets: answers in every form, counts, traces, refusals by name, and limits."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest

from loader.errors import DeadlineExceededError
from shard_node.answer import FLOAT32_SUMS, Answer, ReplyEncoding
from shard_node.bags import Bags
from shard_node.byte_budget import ByteAccount, ByteBudget
from shard_node.errors import GenerationNotFoundError, InvalidBagsError, RemoteError, WireError
from shard_node.node import TrainingReport
from shard_node.tracing import SpanContext
from shard_node.training.push import Push
from shard_node.wire.frame import Buffer, FrameType, pack_header
from shard_node.wire.messages import decode_answer, decode_error, encode_answer, encode_pool
from shard_node.wire.requests import SPARE_SAVED_S, SPARE_SHARE, Peer, RequestHandler, ServerLimits
from shardrank_testing.bags import random_table_bags
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import (
    MODEL,
    NEVER_S,
    SIZES,
    SLOW_ROW,
    VERSION,
    Gate,
    HookedEngine,
    RawPeer,
    connected,
    expected_films,
    film_bags,
    in_every_place,
    pool,
    pool_films,
    raw_peer,
    received,
    reference_engine,
    small_node,
    until,
)
from shardrank_testing.otlp_receiver import KeptSpans

by_loop_and_threads = pytest.mark.parametrize("inline_bytes", [0, 16384])
BY_THREADS = ServerLimits(max_inline_bytes=0)
BY_ONE_THREAD = ServerLimits(max_inline_bytes=0, threads=1)


@in_every_place
@by_loop_and_threads
async def test_answers_over_sockets_are_the_engines(place, inline_bytes, tmp_path):
    engine, rng = reference_engine(), np.random.default_rng(3)
    node = small_node(engine)
    requests = [random_table_bags(rng, engine.layout, 6, 9, weighted=bool(number % 2)) for number in range(12)]
    requests += [film_bags(*rng.integers(0, 500, (10_000, 4)).tolist())]

    async with place.client(tmp_path, node, ServerLimits(max_inline_bytes=inline_bytes)) as (_, client):
        assert await client.info() == node.info()
        answers = await asyncio.gather(*(pool(client, MODEL, VERSION, bags) for bags in requests))
    for bags, answer in zip(requests, answers, strict=True):
        for actual, expected in zip(answer.sums, engine.pool(bags), strict=True):
            np.testing.assert_array_equal(actual, expected)


@in_every_place
async def test_a_slow_request_holds_up_no_later_one(place, tmp_path):
    gate = Gate()
    async with place.client(tmp_path, gate.node, ServerLimits(max_inline_bytes=0, threads=2)) as (server, client):
        slow = asyncio.create_task(pool_films(client, [SLOW_ROW]))
        await gate.wait_entered()
        fast = await pool_films(client, [1, 2], [3])
        assert not slow.done()
        assert (client.connection.is_idle, server.in_flight) == (False, 1)
        gate.opened.set()
        slow = await slow
    np.testing.assert_array_equal(fast, expected_films([1, 2], [3]))
    np.testing.assert_array_equal(slow, expected_films([SLOW_ROW]))


GOOD = film_bags([1, 2], [3])
# What else is refused of bags is in engine/test_checks.py.
BAD_BAGS = [
    (film_bags([1], [2, 500]), "row 500 (value 2) is not in 0..499 of table 'film'"),
    (dataclasses.replace(GOOD, keys=np.array([3], np.int32)), "key 3 is no table, tables are 0..2"),
    (film_bags(range(200)), "values has 200 entries, a request may have at most 100"),
]


@by_loop_and_threads
async def test_bad_requests_are_refused_and_harm_no_other(place, inline_bytes, tmp_path):
    limits = ServerLimits(max_inline_bytes=inline_bytes, max_values_per_request=100)
    async with place.client(tmp_path, None, limits) as (server, client):
        calls = [pool(client, MODEL, VERSION, bags) for bad, _ in BAD_BAGS for bags in (bad, film_bags([7], [8]))]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert server.num_connections == 1
    for (_, message), error in zip(BAD_BAGS, answers[::2], strict=True):
        assert type(error) is InvalidBagsError, error
        assert message in str(error)
    for answer in answers[1::2]:
        np.testing.assert_array_equal(answer.sums[1], expected_films([7], [8]))


async def test_malformed_bodies_are_refused_and_the_connection_lives(place, tmp_path):
    async with place.peer(tmp_path) as (_, peer):
        unknown = bytearray(pack_header(FrameType.POOL, 2, 0))
        unknown[6:8] = b"\x63\x00"
        peer.write(pack_header(FrameType.POOL, 1, 8), b"\xff" * 8, unknown)
        peer.write(*encode_pool(3, 0, MODEL, VERSION, film_bags([7])))
        malformed, unknown, pooled = [await peer.read_frame() for _ in range(3)]
    assert [frame.header.request_id for frame in (malformed, unknown, pooled)] == [1, 2, 3]
    assert "num_arrays is 4294967295" in str(decode_error(malformed))
    assert type(decode_error(unknown)) is WireError
    assert "frame type 99 is not a request" in str(decode_error(unknown))
    np.testing.assert_array_equal(decode_answer(pooled).sums[1], expected_films([7]))


async def test_unknown_versions_and_failures_are_carried_by_name(place, tmp_path, caplog):
    def fail() -> None:
        raise ZeroDivisionError("card 3 has melted")

    with caplog.at_level(logging.ERROR):
        async with place.client(tmp_path, small_node(HookedEngine({SLOW_ROW: fail}))) as (_, client):
            with pytest.raises(GenerationNotFoundError, match="version 8 of model 'films' is not here"):
                await pool(client, MODEL, 8, film_bags([1]))
            with pytest.raises(RemoteError, match="ZeroDivisionError: card 3 has melted"):
                await pool_films(client, [SLOW_ROW])
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


@pytest.mark.parametrize(
    ("limits", "requests", "message"),
    [
        ({"max_in_flight": 3}, [[[SLOW_ROW]]] * 3, "3 requests in flight, at most 3"),
        ({"max_buffered_bytes": 9000}, [[[SLOW_ROW], *[[]] * 100]], "bytes of messages are buffered of the limit"),
    ],
)
async def test_limits_of_requests_and_bytes_in_flight(place, limits, requests, message, tmp_path):
    gate = Gate()
    async with place.client(tmp_path, gate.node, BY_ONE_THREAD.model_copy(update=limits)) as (server, client):
        tasks = [asyncio.create_task(pool_films(client, *bags)) for bags in requests]
        await gate.wait_entered()
        with raises_kind("node_overloaded", match=message):
            await pool_films(client, [1])
        gate.opened.set()
        await asyncio.gather(*tasks)
        await pool_films(client, [1])
        assert server.in_flight == 0


async def test_places_are_shared_once_half_are_taken(place, tmp_path):
    gate = Gate()
    limits = BY_ONE_THREAD.model_copy(update={"max_in_flight": 8})
    async with place.client(tmp_path, gate.node, limits) as (server, first), connected(server.addresses[0]) as second:
        tasks = [asyncio.create_task(pool_films(first, [SLOW_ROW])) for _ in range(5)]
        await gate.wait_entered()
        await until(lambda: server.in_flight == 5)
        tasks += [asyncio.create_task(pool_films(second, [1])) for _ in range(2)]
        await until(lambda: server.in_flight == 7)
        with raises_kind("node_overloaded", match="5 of 7 requests in flight are of this connection, one of 2"):
            await pool_films(first, [1])
        tasks.append(asyncio.create_task(pool_films(second, [1])))
        await until(lambda: server.in_flight == 8)
        gate.opened.set()
        await asyncio.gather(*tasks)


async def test_a_request_past_its_deadline_is_not_pooled(place, tmp_path):
    gate, pooled_late = Gate(), []
    gate.engine.hooks[43] = lambda: pooled_late.append(1)

    async with place.peer(tmp_path, gate.node, BY_ONE_THREAD) as (server, peer):
        peer.write(*encode_pool(1, 0, MODEL, VERSION, film_bags([SLOW_ROW])))
        await gate.wait_entered()
        # One microsecond is over long before the only thread is free.
        peer.write(*encode_pool(2, 1, MODEL, VERSION, film_bags([43])))
        peer.write(*encode_pool(3, 0, MODEL, VERSION, film_bags([1])))
        await until(lambda: server.in_flight >= 3)
        gate.opened.set()
        frames = {frame.header.request_id: frame for frame in [await peer.read_frame() for _ in range(3)]}
    assert type(decode_error(frames[2])) is DeadlineExceededError
    assert [frames[number].header.frame_type for number in (1, 3)] == [FrameType.POOLED, FrameType.POOLED]
    assert not pooled_late


async def test_a_too_long_answer_is_refused_before_pooling(place, tmp_path):
    async with place.client(tmp_path, None, ServerLimits(max_frame_bytes=8192)) as (_, client):
        with raises_kind("frame_too_large", match=r"answer has 32\d\d\d bytes, a frame may have at most 8192"):
            await pool_films(client, *[[]] * 1000)
        await pool_films(client, [1])


async def test_a_node_sends_the_counts_of_its_engine(place, tmp_path):
    async with place.client(tmp_path) as (_, client):
        assert await client.counts(MODEL, VERSION, NEVER_S) == {}
        await pool_films(client, [3, 3, 499], [3])
        for model, version in ((MODEL, 8), ("other", VERSION)):
            with pytest.raises(GenerationNotFoundError):
                await client.counts(model, version, NEVER_S)
        counts = await client.counts(MODEL, VERSION, NEVER_S)
        assert client.num_connections == 1
    assert {name: table.limit for name, table in counts.items()} == {name: rows for name, (rows, _) in SIZES.items()}
    assert (counts["film"].keys.tolist(), counts["film"].counts.tolist()) == ([3, 499], [3, 1])


async def test_a_node_that_does_not_train_refuses_pushes(place, tmp_path):
    async with place.client(tmp_path) as (_, client):
        with raises_kind("not_training", match="start it with --train"):
            await client.push(MODEL, VERSION, Push(0, 1, {}), NEVER_S)
        assert (await client.info()).training is None
        await pool_films(client, [1])


class Taker:
    """Answers what pushes are at once, from another thread."""

    def submit(self, model, version, body, push, kept, done):
        said = WireError("no") if push.step == 13 else push.step + push.worker
        threading.Thread(target=lambda: (push.step % 2 and kept(), done(said))).start()

    def report(self):
        return TrainingReport(steps=(1,), is_active=(True,), resume_steps=(2,))


async def test_pushes_are_answered_from_the_trainers_thread(place, tmp_path):
    node = small_node()
    node.trainer = Taker()
    gradients = {1: (np.arange(40), np.ones((40, 8), np.float32))}
    limits = ServerLimits(max_values_per_request=100)
    async with place.client(tmp_path, node, limits) as (server, client):
        pushed = [client.push(MODEL, VERSION, Push(2, step, gradients), NEVER_S) for step in range(1, 9)]
        assert await asyncio.gather(*pushed) == list(range(3, 11))
        with raises_kind("wire", match="no"):
            await client.push(MODEL, VERSION, Push(2, 13, gradients), NEVER_S)
        with raises_kind("push_refused", match="a push has 120 ids, a request may have at most 100"):
            await client.push(MODEL, VERSION, Push(2, 1, gradients | {2: gradients[1], 0: gradients[1]}), NEVER_S)
        assert (await client.info()).training == node.trainer.report()
        assert (server.in_flight, server.buffers.buffered) == (0, 0)


async def test_pushes_that_wait_take_no_place_and_no_bytes(place, tmp_path):
    """More of them than may be in flight, and of more bytes than may be held: the last one is what they wait for."""
    waiting: list[Any] = []

    class Barrier(Taker):
        def submit(self, model, version, body, push, kept, done):
            waiting.append(done)
            kept()
            if len(waiting) == 20:
                for number, answer in enumerate(waiting):
                    answer(number)

    node, gradients = small_node(), {1: (np.arange(1000), np.ones((1000, 8), np.float32))}
    node.trainer = Barrier()
    limits = ServerLimits(max_in_flight=2, max_frame_bytes=50_000, max_buffered_bytes=200_000)
    async with place.client(tmp_path, node, limits) as (server, client):
        pushed = []
        for worker in range(19):
            pushed.append(asyncio.ensure_future(client.push(MODEL, VERSION, Push(worker, 1, gradients), NEVER_S)))
            await until(lambda worker=worker: len(waiting) > worker)
        await until(lambda: (server.in_flight, server.buffers.buffered) == (0, 0))
        assert await client.push(MODEL, VERSION, Push(19, 1, gradients), NEVER_S) == 19
        assert await asyncio.gather(*pushed) == list(range(19))
        await until(lambda: server.buffers.buffered == 0)


async def test_counts_of_an_earlier_release_are_refused(place, tmp_path):
    async with place.client(tmp_path) as (server, _), raw_peer(server.addresses[0]) as peer:
        peer.write(pack_header(8, 1, 0))
        error = decode_error(await peer.read_frame())
    assert "frame type 8 is not a request" in str(error)
    assert "10 (COUNTS)" in str(error)


TRACED_BAGS = film_bags([7], [8, 9])
LOOKUP = SpanContext(2**127 + 5, 2**63 + 1, "a=b")


@by_loop_and_threads
async def test_a_node_makes_a_span_in_its_callers_trace(place, tmp_path, inline_bytes):
    """What spans of a whole fleet are like is in tests/serving/observe/test_traces.py."""
    node, sink = small_node(), KeptSpans()
    node.sink = sink
    async with place.client(tmp_path, node, ServerLimits(max_inline_bytes=inline_bytes)) as (_, client):
        assert (await client.info()).takes_traces
        started_at = time.monotonic()
        answer = await pool(client, MODEL, VERSION, TRACED_BAGS, trace=LOOKUP)
        np.testing.assert_array_equal(answer.sums[1], reference_engine().pool(TRACED_BAGS)[1])
        (span,) = sink.spans
        assert (span.parent, span.error) == (LOOKUP, "")
        assert started_at <= span.began <= span.ended <= time.monotonic()
        assert span.attributes["shardrank.values"] == 3
        # One that is not traced leaves nothing.
        await pool(client, MODEL, VERSION, TRACED_BAGS)
        assert len(sink.spans) == 1


@pytest.mark.parametrize("forms", [FLOAT32_SUMS, ReplyEncoding(sums="float16")])
async def test_unrequested_rows_as_stored_are_no_answer(place, tmp_path, forms):
    stored = Answer([np.zeros((0, 4), np.float32)], [np.zeros((1, 16), np.uint8)])

    async def script(peer: RawPeer) -> None:
        frame = await peer.read_frame()
        peer.write(*encode_answer(frame.header.request_id, stored))

    async with place.script(tmp_path, script) as client:
        with pytest.raises(RemoteError, match="frame type 7 is no reply to this request"):
            await pool(client, MODEL, VERSION, film_bags([7]), forms)


# 32 KB of answer: too long for what is pooled by the loop in any case.
LONG = film_bags([SLOW_ROW], *[[7]] * 1000)


async def pooled_by_loop(limits: ServerLimits, pooling_s: float, requests: list[Bags]) -> list[bool]:
    """Whether the loop's thread pooled each request, on a clock that only pooling moves."""
    now, threads = [100.0], []

    def pooling() -> None:
        threads.append(threading.get_ident())
        now[0] += pooling_s

    handler = RequestHandler(small_node(HookedEngine({SLOW_ROW: pooling})), limits, lambda: now[0])
    peer = Peer(ByteAccount(ByteBudget(1 << 20), lambda error: None), lambda: True)
    for bags in requests:
        answered: asyncio.Future[list[Buffer]] = asyncio.get_running_loop().create_future()
        frame = received(encode_pool(1, 0, MODEL, VERSION, bags))
        handler.handle(frame, None, answered.set_result, peer)
        answer = decode_answer(received(await answered))
        np.testing.assert_array_equal(answer.sums[1], reference_engine().pool(bags)[1])
    await handler.close()
    return [thread == threading.get_ident() for thread in threads]


async def test_the_loop_pools_long_requests_in_its_spare_time():
    saved = int(SPARE_SAVED_S / (0.001 * (1 - SPARE_SHARE)))
    # Each takes 1 ms of the clock, of which half comes back meanwhile: what was saved lasts for twice as many.
    by_loop = await pooled_by_loop(ServerLimits(), 0.001, [LONG] * (saved + 4))
    assert by_loop[:saved] == [True] * saved
    # A thread's 1 ms passes as well, so from now on loop and threads take turns.
    assert set(by_loop[saved:]) == {True, False}


@pytest.mark.parametrize(
    ("limits", "bags", "by_loop"),
    [
        (ServerLimits(), film_bags([SLOW_ROW]), True),
        (BY_THREADS, LONG, False),
        (ServerLimits(max_spare_inline_bytes=0), LONG, False),
        (ServerLimits(max_spare_inline_bytes=32_000), LONG, False),
    ],
    ids=["short", "none may", "no long one may", "this one is longer"],
)
async def test_limits_decide_whether_loop_or_threads_pool(limits, bags, by_loop):
    assert await pooled_by_loop(limits, 1.0 if by_loop else 0.0, [bags] * 5) == [by_loop] * 5
