"""Nodes tell how often rows were looked up, in bounded parts, over any socket; nonsense is refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shard_node.access_counts import MAX_PART_ROWS, CountedPart
from shard_node.errors import (
    GenerationNotFoundError,
    InvalidBagsError,
    WireError,
)
from shard_node.wire import messages as wire
from shard_node.wire.frame import FrameType
from shard_node.wire.messages import CountsRequest
from shardrank_testing.nodes import (
    MODEL,
    SIZES,
    VERSION,
    on_every_loop,
    pool_films,
    received,
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
