"""A trace travels in the frames of lookups, to nodes that make spans of them; no other node sees that there is one."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.errors import GenerationNotFoundError, WireError
from shard_node.tracing import MAX_STATE_BYTES, TRACED_LOOKUP, Span, SpanContext, TracedLookup
from shard_node.wire import messages as wire
from shard_node.wire.client import ShardClient
from shard_node.wire.frame import Frame
from shard_node.wire.server import ServerLimits
from shardrank_testing.nodes import (
    MODEL,
    VERSION,
    connected,
    film_bags,
    on_every_loop,
    received,
    reference_engine,
    serving,
    small_node,
    soon,
)
from shardrank_testing.otlp_receiver import KeptSpans

BAGS = film_bags([7], [8, 9])
LOOKUP = SpanContext(2**127 + 5, 2**63 + 1, "a=b")
IDS = st.integers(0, 2**128 - 1), st.integers(0, 2**64 - 1)


@given(*IDS, st.text(st.characters(codec="ascii"), max_size=MAX_STATE_BYTES), st.booleans())
def test_any_context_comes_back_with_the_bags(trace_id, span_id, state, weighted):
    weights = np.arange(BAGS.num_values, dtype=np.float32) if weighted else None
    bags, context = BAGS.with_values(BAGS.values, weights), SpanContext(trace_id, span_id, state)
    request = wire.decode_pool(received(wire.encode_pool(1, 0, "m", 1, bags, trace=context)))
    assert request.trace == context
    np.testing.assert_array_equal(request.values, bags.values)
    assert (request.weights is None) != weighted
    without = wire.encode_pool(1, 0, "m", 1, bags)
    assert wire.decode_pool(received(without)).trace is None


@pytest.mark.parametrize("size", [0, 23, 24 + MAX_STATE_BYTES + 1])
def test_a_context_of_another_size_is_refused(size):
    frame = received(wire.encode_pool(1, 0, "m", 1, BAGS, trace=LOOKUP))
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
        (found,) = await asyncio.gather(client.pool(model, VERSION, BAGS, soon()), return_exceptions=True)
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
            np.testing.assert_array_equal(answer.sums[1], reference_engine().pool(BAGS)[1])
            (span,) = sink.spans
            assert (own.kind, own.parent, own.error) == ("client", LOOKUP, "")
            assert own.attributes == {"server.address": str(server.addresses[0]), "shardrank.shard": 0}
            assert (span.kind, span.parent, span.error) == ("server", own.context, "")
            assert span.context.trace_id == LOOKUP.trace_id
            assert own.began <= span.began <= span.ended <= own.ended
            told = {"shardrank.model": MODEL, "shardrank.version": VERSION, "shardrank.shard": 0, "shardrank.values": 3}
            assert span.attributes.items() >= told.items()
            # One that nobody traces leaves nothing.
            await client.pool(MODEL, VERSION, BAGS, soon())
            assert len(sink.spans) == 1
            node.retire(MODEL, VERSION)
            failure, (own,) = await asked(client)
            assert isinstance(failure, GenerationNotFoundError)
            assert own.error.startswith("generation_not_found: ")

    place.run(main())
