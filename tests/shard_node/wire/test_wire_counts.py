"""Nodes tell how often rows were looked up, in bounded parts, over any socket; nonsense is refused by name."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shard_node.access_counts import MAX_PART_ROWS, CountedPart
from shard_node.errors import (
    FrameTooLargeError,
    GenerationNotFoundError,
    InvalidBagsError,
    RemoteError,
    WireError,
)
from shard_node.wire import messages as wire
from shard_node.wire.frame import FrameType
from shard_node.wire.messages import CountsRequest
from shard_node.wire.server import ServerLimits
from shardrank_testing.nodes import (
    EVERY_PLACE,
    MODEL,
    SIZES,
    VERSION,
    connected,
    film_bags,
    in_every_place,
    on_every_loop,
    received,
    reference_engine,
    serving,
    small_node,
    soon,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FILM = 1
requests = st.builds(CountsRequest, st.text(max_size=60), U64, U32, U64, U32)


@st.composite
def parts(draw: st.DrawFn) -> CountedPart:
    counts = draw(hnp.arrays(np.uint32, st.integers(1, 900), elements=st.integers(0, 2**31 - 1)))
    first = draw(st.integers(0, 2**40))
    rows = first + counts.size + draw(st.integers(0, 2**40))
    return CountedPart(draw(st.text(max_size=60)), draw(U32), rows, first, counts, draw(U64), draw(U64))


@given(requests, U64)
def test_any_request_comes_back_as_it_was_sent(request, request_id):
    frame = received(wire.encode_counts(request_id, 7, request))
    assert (frame.header.frame_type, frame.header.request_id) == (FrameType.COUNTS, request_id)
    assert wire.decode_counts(frame) == request


@given(parts())
def test_any_part_comes_back_as_it_was_sent(part):
    told = wire.decode_counts_answer(received(wire.encode_counts_answer(1, part)))
    np.testing.assert_array_equal(told.counts, part.counts)
    assert dataclasses.replace(told, counts=part.counts) == part


@given(requests, parts(), st.data())
def test_no_damage_to_a_frame_raises_anything_but_a_wire_error(request, part, data):
    for encoded, decode in (
        (wire.encode_counts(1, 0, request), wire.decode_counts),
        (wire.encode_counts_answer(1, part), wire.decode_counts_answer),
    ):
        frame = received(encoded)
        for _ in range(data.draw(st.integers(1, 4))):
            frame.body[data.draw(st.integers(0, frame.body.size - 1))] = data.draw(st.integers(0, 255))
        try:
            told = decode(frame)
        except WireError:
            continue
        if isinstance(told, CountedPart):
            assert 0 < told.counts.size <= told.num_embeddings - told.first_row
            assert told.counts.max() < 2**31


PART = CountedPart("film", 3, 100, 10, np.arange(5, dtype=np.uint32), 50, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_embeddings": 14}, "of 5 rows from 10 on, of 14"), ({"counts": PART.counts[:0]}, "of 0 rows"),
     ({"counts": np.array([2**31], np.uint32)}, "none may be negative"),
     ({"table": "t" * 257}, "table has 257 bytes, at most 256")],
)  # fmt: skip
def test_parts_that_make_no_sense_are_refused(changes, message):
    frame = received(wire.encode_counts_answer(1, dataclasses.replace(PART, **changes)))
    with pytest.raises(WireError, match=message):
        wire.decode_counts_answer(frame)


@pytest.mark.parametrize("field", ["table", "max_rows", "first_row", "version"])
def test_numbers_that_no_field_can_state_are_not_sent(field):
    with pytest.raises(WireError, match=f"{field} -1 is not within"):
        wire.encode_counts(1, 0, dataclasses.replace(CountsRequest("m", 1, 0, 0, 1), **{field: -1}))


@in_every_place
def test_a_node_tells_what_its_engine_counted(place, tmp_path):
    async def main():
        async with (
            serving(place.address(tmp_path)) as server,
            connected(server.addresses[0]) as client,
        ):
            await client.pool(MODEL, VERSION, film_bags([3, 3, 499], [3]), soon())
            ask = [CountsRequest(MODEL, VERSION, FILM, first, 300) for first in (0, 300)]
            return [await client.counts(one, soon()) for one in ask]

    first, second = place.run(main())
    assert (first.table, first.num_tables, first.num_embeddings) == ("film", len(SIZES), 500)
    assert (first.counts.size, second.counts.size) == (300, 200)
    assert np.flatnonzero(np.concatenate([first.counts, second.counts])).tolist() == [3, 499]
    assert (first.counts[3], second.counts[199]) == (3, 1)
    assert (first.lookups, first.total) == (4, 4)


@on_every_loop
@pytest.mark.parametrize(
    ("changes", "error"),
    [({"version": 8}, GenerationNotFoundError), ({"model": "other"}, GenerationNotFoundError),
     ({"table": 3}, InvalidBagsError), ({"first_row": 500}, InvalidBagsError), ({"max_rows": 0}, InvalidBagsError),
     ({"max_rows": MAX_PART_ROWS + 1}, InvalidBagsError)],
)  # fmt: skip
def test_what_a_node_can_not_tell_is_an_error_and_the_connection_goes_on(place, changes, error, tmp_path):
    good = CountsRequest(MODEL, VERSION, FILM, 0, 10)

    async def main():
        async with (
            serving(place.address(tmp_path)) as server,
            connected(server.addresses[0]) as client,
        ):
            with pytest.raises(error):
                await client.counts(dataclasses.replace(good, **changes), soon())
            assert (await client.counts(good, soon())).counts.size == 10
            assert client.connections == 1

    place.run(main())


def test_an_answer_that_is_longer_than_a_frame_may_be_is_refused_before_anything_is_read(tmp_path):
    place = EVERY_PLACE[0]

    async def main():
        async with (
            serving(place.address(tmp_path), limits=ServerLimits(max_frame_bytes=2048)) as server,
            connected(server.addresses[0]) as client,
        ):
            with pytest.raises(FrameTooLargeError):
                await client.counts(CountsRequest(MODEL, VERSION, FILM, 0, 500), soon())
            return await client.counts(CountsRequest(MODEL, VERSION, FILM, 0, 100), soon())

    assert place.run(main()).counts.size == 100


def test_an_answer_to_another_question_is_a_remote_error(tmp_path):
    place = EVERY_PLACE[0]
    engine = reference_engine()
    node = small_node(engine)
    node.counts = lambda model, version, table, first_row, max_rows: engine.access.part(table, 0, 20)

    async def main():
        async with (
            serving(place.address(tmp_path), node) as server,
            connected(server.addresses[0]) as client,
        ):
            with pytest.raises(RemoteError, match="counts of 20 rows from 0 on, asked for 20 from 5"):
                await client.counts(CountsRequest(MODEL, VERSION, FILM, 5, 20), soon())
            with pytest.raises(RemoteError, match="asked for 10 from 0"):
                await client.counts(CountsRequest(MODEL, VERSION, FILM, 0, 10), soon())

    place.run(main())


def test_a_counts_request_with_arrays_or_too_few_fields_is_refused():
    frame = received(wire._encode(FrameType.COUNTS, 1, struct.pack("<Q", 1), []))
    with pytest.raises(WireError, match="COUNTS fields have 8 bytes"):
        wire.decode_counts(frame)
    frame = received(wire._encode(FrameType.COUNTS, 1, bytes(24), [np.zeros(1, np.int32)]))
    with pytest.raises(WireError, match="COUNTS num_arrays is 1"):
        wire.decode_counts(frame)
