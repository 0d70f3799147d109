"""Hot rows are found exactly, and a lookup with them gives what it gives without."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.access_counts import AccessCounter
from router.errors import HotRowsError
from router.hot_rows import ROW_OVERHEAD_BYTES, HotRows, HotRowsConfig, HotSet
from shard_node.access_counts import TABLE_SHIFT
from shard_node.answer import ReplyEncoding
from shard_node.bags import Bags
from shard_node.freshness import FreshnessBound
from shard_node.node import LocalShard
from shardrank_testing.snapshots import make_spec
from shardrank_testing.topologies import (
    StoredModel,
    Topology,
    hold,
    hot_keys,
    local_router,
    lookup,
    make_node,
    make_router,
)

DTYPES = ["int8", "int4", "fp16", "fp32"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return {
        dtype: StoredModel(
            tmp_path_factory.mktemp("store"), make_spec(bucketing="mixed", dtype=dtype), rows_per_file=4096
        )
        for dtype in [None, *DTYPES]
    }


def random_hot(stored: StoredModel, rng: np.random.Generator, fraction: float) -> HotRows:
    """A tier of a random fraction of each table's rows."""
    hot = HotRows(stored.layout)
    rows = {
        table.name: np.flatnonzero(rng.random(table.num_embeddings) < fraction).tolist() for table in stored.spec.tables
    }
    hold(hot, stored.snapshot, hot_keys(stored.layout, rows))
    return hot


def expected_hits(stored: StoredModel, hot: HotRows, bags: Bags) -> int:
    tables = np.repeat(stored.schema.table_index[bags.keys], bags.values_per_key()).astype(np.int64)
    return int(np.isin((tables << TABLE_SHIFT) + bags.values, hot.current.keys).sum())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from([None, *DTYPES]),
    shards=st.integers(2, 8),
    replicate_bytes=st.sampled_from([0, 5000]),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    max_hotness=st.integers(0, 9),
    seed=st.integers(0, 2**32),
)
def test_drawn_hot_sets_give_the_answer_without_them(stores, dtype, shards, replicate_bytes, share, max_hotness, seed):
    stored, rng = stores[dtype], np.random.default_rng(seed)
    topology = Topology(shards=shards, replicate_bytes=replicate_bytes)
    hot = random_hot(stored, rng, share)
    bags = stored.bags(rng, 5, max_hotness)
    router = local_router(stored.snapshot, topology, hot)
    with_hot = asyncio.run(lookup(router, stored.snapshot, bags))
    without = asyncio.run(lookup(local_router(stored.snapshot, topology), stored.snapshot, bags))
    for ours, theirs in zip(with_hot.blocks, without.blocks, strict=True):
        # What is no sum has the same bits wherever it is from.
        assert max_hotness > 1 or ours.tobytes() == theirs.tobytes()
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    lookups, hits = hot.counts()
    assert (lookups.sum(), hits.sum()) == (bags.num_values, expected_hits(stored, hot, bags))


def test_lookups_and_hits_are_counted_by_table(stores):
    stored, rng = stores[None], np.random.default_rng(7)
    bags = stored.bags(rng, 6, 4, min_hotness=1)
    hot = HotRows(stored.layout, learned=AccessCounter(100_000, min_queued=2 * bags.num_values))
    hold(hot, stored.snapshot, hot_keys(stored.layout, {"genre": list(range(19)), "film": [0, 1]}))
    router = local_router(stored.snapshot, Topology(shards=2), hot)
    for _ in range(5):
        asyncio.run(lookup(router, stored.snapshot, bags))
    genre, user = stored.layout.index["genre"], stored.layout.index["user"]
    lookups, hits = hot.counts()
    assert hits[genre] == lookups[genre] > 0
    assert hits[user] == 0 < lookups[user]
    assert hot.access.lookups == hits.sum()
    # With two batches the queue is full.
    assert hot.learned.fold().total == 2 * bags.num_values
    assert not hot.learned.is_full


@pytest.mark.parametrize("begins_late", [False, True])
def test_a_row_update_reaches_the_set_in_use_and_the_next(stores, begins_late):
    """Also one that begins between the rows and their delta's number: nodes that are read may lack it."""
    stored = stores["fp32"]
    hot = HotRows(stored.layout)
    table = stored.layout.index["city"]
    hold(hot, stored.snapshot, hot_keys(stored.layout, {"city": [3, 5]}))
    pending = HotSet(stored.layout, hot_keys(stored.layout, {"city": [5, 9]}))
    if not begins_late:
        hot.begin(pending)
    old = {row: stored.snapshot.read_rows("city", row, 1) for row in (3, 5, 9)}
    new = np.frombuffer(np.full((4, 4), 7.0, np.float32).tobytes(), np.uint8).reshape(4, 16)
    assert hot.write_rows(table, np.array([2, 3, 5, 9]), new) == 2
    if begins_late:
        hot.begin(pending)
    numbers = np.array([0, 1])
    # What was read before the update came must not undo it.
    hot.copy(pending, numbers)
    number = next(n for n, group in enumerate(stored.layout.groups) if table < group.end_table)
    rows = [np.zeros((0, group.row_bytes), np.uint8) for group in stored.layout.groups]
    rows[number] = np.concatenate([old[5], old[9]])
    hot.fill(pending, numbers, rows)
    hot.use(pending).close()
    assert hot.current.read(numbers)[number].tobytes() == new[:2].tobytes()
    # What was written to rows that are dropped, as those of a fork, reaches no other set.
    hot.use(None).close()
    hot.begin(pending := HotSet(stored.layout, pending.keys))
    assert not pending.is_filled.any()


@pytest.mark.parametrize(
    ("copies", "bound", "is_used"),
    [
        ((3.0, False), None, True),
        ((3.0, False), FreshnessBound(max_age_ms=9000), True),
        ((30.0, False), FreshnessBound(max_age_ms=9000), False),
        ((30.0, False), FreshnessBound(min_sequence=2), False),
        ((3.0, True), None, False),
    ],
)
def test_copies_are_as_old_as_their_stream_and_left_out_beyond_a_bound(stores, copies, bound, is_used):
    stored, (age_s, forked), now = stores["fp32"], copies, time.time()
    hot, plan = HotRows(stored.layout), Topology(shards=2).plan(stored.spec)
    hold(hot, stored.snapshot, hot_keys(stored.layout, {"genre": list(range(19))}))
    hot.deltas.applied(1, now - age_s, 0, now - age_s)
    hot.deltas.now = replace(hot.deltas.now, forked=forked)
    nodes = [make_node(stored.snapshot, plan, shard) for shard in range(2)]
    for node in nodes:
        node.generations.payload(stored.spec.model, stored.snapshot.version).deltas.applied(2, now - 1, 0, now - 1)
    router = make_router(stored.snapshot, plan, [LocalShard(node) for node in nodes], hot)
    bags = stored.bags(np.random.default_rng(7), 6, 4, min_hotness=1)
    embeddings = asyncio.run(lookup(router, stored.snapshot, bags, forms=ReplyEncoding(stored=True, bound=bound)))
    stored.check(bags, embeddings)
    assert bool(hot.counts()[1].sum()) == is_used
    assert embeddings.sequence == (1 if is_used else 2)
    assert (embeddings.age_ms >= 3000) == is_used


def test_a_set_in_use_keeps_its_delta(stores):
    stored = stores["fp32"]
    hot, keys = HotRows(stored.layout), hot_keys(stored.layout, {"city": [3]})
    hold(hot, stored.snapshot, keys)
    hot.deltas.applied(7, 1.0, 0, 1.0)
    numbers = np.array([0])
    with hot.used() as (taken, sequence, _):
        rows = b"".join(map(bytes, taken.read(numbers)))
        pending = HotSet(stored.layout, keys)
        hot.begin(pending)
        hot.copy(pending, numbers)
        replaced = hot.use(pending)
        assert hot.write_rows(stored.layout.index["city"], np.array([3]), np.full((1, 16), 1, np.uint8)) == 1
        hot.deltas.applied(8, 2.0, 1, 2.0)
        # Delta 8 reached the set that came after, and nothing that is looked up in this one may count as having it.
        assert replaced is taken
        assert b"".join(map(bytes, taken.read(numbers))) == rows
        assert sequence == 7
        with hot.used() as (current, newer, _):
            assert b"".join(map(bytes, current.read(numbers))) == bytes([1] * 16)
            assert newer == 8
    replaced.close()


def test_a_set_uses_the_counted_bytes(stores):
    stored = stores["int8"]
    hot = random_hot(stored, np.random.default_rng(8), 0.5).current
    rows = sum(use.size_bytes for use in hot._engine.memory())
    assert 0 < hot.size_bytes <= rows + ROW_OVERHEAD_BYTES * hot.keys.size + 12 * 64
    with pytest.raises(HotRowsError, match="all rows are in this process"):
        local_router(stored.snapshot, Topology(), HotRows(stored.layout))
    for options, message in (({"size_bytes": 0}, "size_bytes"), ({"size_bytes": 1, "policy": "lru"}, "policy")):
        with pytest.raises(ValueError, match=message):
            HotRowsConfig(**options)
