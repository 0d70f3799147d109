"""Requests to a node over real sockets: answers in every form, counts, traces, refusals by name, and limits."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.access_counts import MAX_PART_ROWS, CountedPart
from shard_node.answer import FLOAT32_SUMS, Answer, Forms, add_answers
from shard_node.bags import KeyedBags
from shard_node.engine.loading import load_tables
from shard_node.errors import (
    DeadlineExceededError,
    FrameTooLargeError,
    GenerationNotFoundError,
    InvalidBagsError,
    NodeOverloadedError,
    RemoteError,
    WireError,
)
from shard_node.node import ShardNode
from shard_node.split import whole
from shard_node.tracing import MAX_STATE_BYTES, TRACED_LOOKUP, Span, SpanContext, TracedLookup
from shard_node.wire import messages as wire
from shard_node.wire.client import ShardClient
from shard_node.wire.frame import Frame, FrameType, pack_header
from shard_node.wire.messages import Buffer, CountsRequest, decode_answer, decode_error, encode_answer, encode_pool
from shard_node.wire.server import SPARE_SAVED_S, SPARE_SHARE, RequestHandler, ServerLimits
from shardrank_testing.bags import random_table_bags
from shardrank_testing.nodes import (
    EVERY_PLACE,
    MODEL,
    SIZES,
    SLOW_ROW,
    VERSION,
    Gate,
    HookedEngine,
    Place,
    RawPeer,
    connected,
    expected_films,
    film_bags,
    in_every_place,
    on_every_loop,
    pool_films,
    received,
    reference_engine,
    serving,
    small_node,
    small_spec,
    soon,
    until,
)
from shardrank_testing.otlp_receiver import KeptSpans
from shardrank_testing.snapshots import write_snapshot


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


U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FILM = 1
requests = st.builds(CountsRequest, st.text(max_size=60), U64, U32, U64, U32)


@st.composite
def parts(draw: st.DrawFn) -> CountedPart:
    counts = draw(hnp.arrays(np.uint32, st.integers(1, 900), elements=st.integers(0, 2**31 - 1)))
    first = draw(st.integers(0, 2**40))
    rows = first + counts.size + draw(st.integers(0, 2**40))
    return CountedPart(draw(st.text(max_size=60)), draw(U32), rows, first, counts, draw(U64), draw(U64))


@given(requests, parts(), U64)
def test_any_request_and_part_come_back(request, part, request_id):
    frame = received(wire.encode_counts(request_id, 7, request))
    assert (frame.header.frame_type, frame.header.request_id) == (FrameType.COUNTS, request_id)
    assert wire.decode_counts(frame) == request
    decoded = wire.decode_counts_answer(received(wire.encode_counts_answer(1, part)))
    np.testing.assert_array_equal(decoded.counts, part.counts)
    assert dataclasses.replace(decoded, counts=part.counts) == part


PART = CountedPart("film", 3, 100, 10, np.arange(5, dtype=np.uint32), 50, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_embeddings": 14}, "of 5 rows from 10 on, of 14"), ({"counts": PART.counts[:0]}, "of 0 rows"),
     ({"counts": np.array([2**31], np.uint32)}, "none may be negative"),
     ({"table": "t" * 257}, "table has 257 bytes, at most 256")],
)  # fmt: skip
def test_impossible_parts_are_refused(changes, message):
    frame = received(wire.encode_counts_answer(1, dataclasses.replace(PART, **changes)))
    with pytest.raises(WireError, match=message):
        wire.decode_counts_answer(frame)


@on_every_loop
def test_a_node_sends_the_counts_of_its_engine(place, tmp_path):
    async def scenario(server, client):
        await pool_films(client, [3, 3, 499], [3])
        parts = [await client.counts(CountsRequest(MODEL, VERSION, FILM, first, 300), soon()) for first in (0, 300)]
        good = CountsRequest(MODEL, VERSION, FILM, 0, 10)
        for changes, error in (
            ({"version": 8}, GenerationNotFoundError),
            ({"model": "other"}, GenerationNotFoundError),
            ({"table": 3}, InvalidBagsError),
            ({"first_row": 500}, InvalidBagsError),
            ({"max_rows": 0}, InvalidBagsError),
            ({"max_rows": MAX_PART_ROWS + 1}, InvalidBagsError),
        ):
            with pytest.raises(error):
                await client.counts(dataclasses.replace(good, **changes), soon())
        assert (await client.counts(good, soon())).counts.size == 10
        assert client.connections == 1
        return parts

    first, second = place.with_client(tmp_path, scenario)
    assert (first.table, first.num_tables, first.num_embeddings) == ("film", len(SIZES), 500)
    assert (first.counts.size, second.counts.size) == (300, 200)
    assert np.flatnonzero(np.concatenate([first.counts, second.counts])).tolist() == [3, 499]
    assert (first.counts[3], second.counts[199]) == (3, 1)
    assert (first.lookups, first.total) == (4, 4)


TRACED_BAGS = film_bags([7], [8, 9])
LOOKUP = SpanContext(2**127 + 5, 2**63 + 1, "a=b")
IDS = st.integers(0, 2**128 - 1), st.integers(0, 2**64 - 1)


@given(*IDS, st.text(st.characters(codec="ascii"), max_size=MAX_STATE_BYTES), st.booleans())
def test_any_context_comes_back_with_the_bags(trace_id, span_id, state, weighted):
    weights = np.arange(TRACED_BAGS.num_values, dtype=np.float32) if weighted else None
    bags, context = TRACED_BAGS.with_values(TRACED_BAGS.values, weights), SpanContext(trace_id, span_id, state)
    request = wire.decode_pool(received(wire.encode_pool(1, 0, "m", 1, bags, trace=context)))
    assert request.trace == context
    np.testing.assert_array_equal(request.values, bags.values)
    assert (request.weights is None) != weighted
    without = wire.encode_pool(1, 0, "m", 1, bags)
    assert wire.decode_pool(received(without)).trace is None


@pytest.mark.parametrize("size", [0, 23, 24 + MAX_STATE_BYTES + 1])
def test_a_context_of_another_size_is_refused(size):
    frame = received(wire.encode_pool(1, 0, "m", 1, TRACED_BAGS, trace=LOOKUP))
    arrays = struct.unpack_from("<II", frame.body)[1]
    # The rows of the last array header, and as many bytes behind the others.
    at = 8 + 16 * (arrays - 1) + 8
    struct.pack_into("<Q", frame.body, at, size)
    kept = len(frame.body) - (24 + len(LOOKUP.state) + 7) // 8 * 8
    body = np.concatenate([frame.body[:kept], np.zeros((size + 7) // 8 * 8, np.uint8)])
    with pytest.raises(WireError, match=rf"POOL trace has {size} bytes, allowed are 24\.\.536"):
        wire.decode_pool(Frame(frame.header, body))


async def asked(client: ShardClient, model: str = MODEL) -> tuple[Any, list[Span]]:
    """The answer, or the error, of a lookup that is traced; and the client's spans."""
    sink = KeptSpans()
    token = TRACED_LOOKUP.set(TracedLookup(sink, LOOKUP))
    try:
        (found,) = await asyncio.gather(client.pool(model, VERSION, TRACED_BAGS, soon()), return_exceptions=True)
    finally:
        TRACED_LOOKUP.reset(token)
    return found, sink.spans


@on_every_loop
@pytest.mark.parametrize("max_inline_bytes", [0, 16 << 10])
def test_a_node_makes_a_span_in_its_callers_trace(place, tmp_path, max_inline_bytes):
    node, sink = small_node(), KeptSpans()
    node.sink = sink

    async def main() -> None:
        async with (
            serving(place.address(tmp_path), node, ServerLimits(max_inline_bytes=max_inline_bytes)) as server,
            connected(server.addresses[0]) as client,
        ):
            # Twice, as after every reconnect: the first answer may be of a process that is gone.
            assert [(await client.info()).takes_traces for _ in range(2)] == [True] * 2
            answer, (own,) = await asked(client)
            np.testing.assert_array_equal(answer.sums[1], reference_engine().pool(TRACED_BAGS)[1])
            (span,) = sink.spans
            assert (own.kind, own.parent, own.error) == ("client", LOOKUP, "")
            assert own.attributes == {"server.address": str(server.addresses[0]), "shardrank.shard": 0}
            assert (span.kind, span.parent, span.error) == ("server", own.context, "")
            assert span.context.trace_id == LOOKUP.trace_id
            assert own.began <= span.began <= span.ended <= own.ended
            told = {"shardrank.model": MODEL, "shardrank.version": VERSION, "shardrank.shard": 0, "shardrank.values": 3}
            assert span.attributes.items() >= told.items()
            # One that nobody traces leaves nothing.
            await client.pool(MODEL, VERSION, TRACED_BAGS, soon())
            assert len(sink.spans) == 1
            node.retire(MODEL, VERSION)
            failure, (own,) = await asked(client)
            assert isinstance(failure, GenerationNotFoundError)
            assert own.error.startswith("generation_not_found: ")

    place.run(main())


# Of genre a row for each bag; of film more, so that sums are shorter; of user both kinds of bags, on average one row.
BAGS = KeyedBags.from_lengths(
    np.array([0, 1, 2], np.int32),
    np.array([2, 2, 3], np.int64),
    np.array([1, 1, 5, 4, 0, 1, 2]),
    np.array([3, 29, *range(400, 409), 17, 900, 901], np.int64),
    np.linspace(-2, 2, 14, dtype=np.float32),
)


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> ShardNode:
    """A node whose rows are in this machine's memory, so that it can give them as they are stored."""
    path, _ = write_snapshot(tmp_path_factory.mktemp("store"), small_spec(), seed=5)
    snapshot, plan = Snapshot.open(path), Plan.make(small_spec())
    node = ShardNode(plan.identity(0))
    node.stage(MODEL, VERSION, load_tables(snapshot, plan.partition(0), plan.digest))
    node.flip(MODEL, VERSION)
    return node


def added(node: ShardNode, answer: Answer) -> list[np.ndarray]:
    layout = node.table_layout(MODEL, VERSION)
    answer.check(layout, BAGS)
    return add_answers(layout, BAGS, [whole(BAGS)], [answer])


def dtypes(answer: Answer) -> set[str]:
    return {str(sums.dtype) for sums in answer.sums if sums.size}


@on_every_loop
@pytest.mark.parametrize("max_inline_bytes", [0, 16 << 10])
@pytest.mark.parametrize("forms", [Forms(stored, float16) for stored in (False, True) for float16 in (False, True)])
def test_a_node_answers_in_the_accepted_forms(place, node, tmp_path, max_inline_bytes, forms):
    async def scenario(server, client) -> Answer:
        return await client.pool(MODEL, VERSION, BAGS, soon(), forms)

    answer = place.with_client(tmp_path, scenario, node, ServerLimits(max_inline_bytes=max_inline_bytes))
    assert (answer.stored is not None) == forms.stored
    assert dtypes(answer) == ({"float16"} if forms.float16 else {"float32"})
    if forms.stored:
        # Rows of 4 and of 8 floats: both of genre and all of user, none of film.
        assert [rows.shape for rows in answer.stored] == [(2, 16), (3, 32)]
        assert [sums.shape for sums in answer.sums] == [(0, 4), (2, 8)]
    for actual, expected in zip(added(node, answer), node.pool(MODEL, VERSION, BAGS), strict=True):
        tolerance = {"rtol": 2**-10, "atol": 1e-6} if forms.float16 else {"rtol": 0}
        np.testing.assert_allclose(actual, expected, **tolerance)


@on_every_loop
@pytest.mark.parametrize("note", [0, 0x8000])
def test_clients_that_know_no_forms_get_float32_sums(place, node, tmp_path, note):
    request = bytearray(b"".join(encode_pool(7, 0, MODEL, VERSION, BAGS)))
    # The note is where older clients send 0, and newer ones may send what this node does not know.
    request[24 + 8 + 2 : 24 + 8 + 4] = note.to_bytes(2, "little")

    async def scenario(server, peer):
        peer.write(request)
        return await peer.read_frame()

    frame = place.with_peer(tmp_path, scenario, node)
    assert frame.header.frame_type == FrameType.POOLED
    answer = decode_answer(frame)
    assert answer.stored is None
    assert dtypes(answer) == {"float32"}
    for actual, expected in zip(answer.sums, node.pool(MODEL, VERSION, BAGS), strict=True):
        np.testing.assert_array_equal(actual, expected)


async def answered_by(place: Place, folder: Path, answer: Answer, forms: Forms) -> Answer:
    """What a client makes of an answer that a node sends whatever it was asked for."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = RawPeer(reader, writer)
        frame = await peer.read_frame()
        peer.write(*encode_answer(frame.header.request_id, answer))
        await peer.read_end()
        await peer.close()

    address = place.address(folder)
    async with await asyncio.start_unix_server(play, address.path), connected(address) as client:
        return await client.pool(MODEL, VERSION, BAGS, soon(), forms)


@on_every_loop
@pytest.mark.parametrize("forms", [FLOAT32_SUMS, Forms(float16=True)])
def test_unrequested_rows_as_stored_are_no_answer(place, node, tmp_path, forms):
    stored = node.answer(MODEL, VERSION, BAGS, Forms(stored=True))
    with pytest.raises(RemoteError, match="frame type 7 is no answer to this request"):
        place.run(answered_by(place, tmp_path, stored, forms))


ROW = 42
# 32 KB of answer: too long for what is pooled by the loop in any case.
LONG = film_bags([ROW], *[[7]] * 1000)


class Handled:
    """A handler on a clock that only pooling moves, and the threads that pooled."""

    def __init__(self, limits: ServerLimits, pooling_s: float) -> None:
        self.now = 100.0
        self._pooling_s = pooling_s
        self.threads: list[int] = []
        self.handler = RequestHandler(small_node(HookedEngine({ROW: self._pooled})), limits, lambda: self.now)

    def _pooled(self) -> None:
        self.threads.append(threading.get_ident())
        self.now += self._pooling_s

    async def ask(self, bags) -> Answer:
        answered: asyncio.Future[list[Buffer]] = asyncio.get_running_loop().create_future()
        frame = received(encode_pool(1, 0, MODEL, VERSION, bags))
        self.handler.handle(frame, None, answered.set_result, lambda: True)
        return decode_answer(received(await answered))

    def by_loop(self) -> list[bool]:
        return [one == threading.get_ident() for one in self.threads]


def pooled_by_loop(limits: ServerLimits, pooling_s: float, requests: list) -> list[bool]:
    async def main():
        handled = Handled(limits, pooling_s)
        for bags in requests:
            np.testing.assert_array_equal((await handled.ask(bags)).sums[1], reference_engine().pool(bags)[1])
        await handled.handler.close()
        return handled.by_loop()

    return asyncio.run(main())


def test_the_loop_pools_long_requests_in_its_spare_time():
    saved = int(SPARE_SAVED_S / (0.001 * (1 - SPARE_SHARE)))
    # Each takes 1 ms of the clock, of which half comes back meanwhile: what was saved lasts for twice as many.
    by_loop = pooled_by_loop(ServerLimits(), 0.001, [LONG] * (saved + 4))
    assert by_loop[:saved] == [True] * saved
    # A thread's 1 ms passes as well, so from now on loop and threads take turns.
    assert set(by_loop[saved:]) == {True, False}


@pytest.mark.parametrize(
    ("limits", "bags", "by_loop"),
    [
        (ServerLimits(), film_bags([ROW]), True),
        (ServerLimits(max_inline_bytes=0), LONG, False),
        (ServerLimits(max_spare_inline_bytes=0), LONG, False),
        (ServerLimits(max_spare_inline_bytes=32_000), LONG, False),
    ],
    ids=["short", "none may", "no long one may", "this one is longer"],
)
def test_limits_decide_whether_loop_or_threads_pool(limits, bags, by_loop):
    assert pooled_by_loop(limits, 1.0 if by_loop else 0.0, [bags] * 5) == [by_loop] * 5


def test_counts_of_other_rows_are_a_remote_error(tmp_path):
    engine = reference_engine()
    node = small_node(engine)
    node.counts = lambda model, version, table, first_row, max_rows: engine.access.part(table, 0, 20)

    async def scenario(server, client):
        with pytest.raises(RemoteError, match="counts of 20 rows from 0 on, asked for 20 from 5"):
            await client.counts(CountsRequest(MODEL, VERSION, FILM, 5, 20), soon())

    EVERY_PLACE[0].with_client(tmp_path, scenario, node)
