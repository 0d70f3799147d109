"""One suite for every engine: whatever holds the rows, and however they are divided, the sums are the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.access_counts import SAMPLE_EVERY
from shard_node.answer import add_answers
from shard_node.engine.base import Engine
from shard_node.engine.loading import load_tables
from shard_node.engine.memory import SLOT_BYTES
from shard_node.errors import InvalidBagsError
from shard_node.split import whole
from shardrank_testing.bags import assert_blocks_equal, bags_of, random_table_bags
from shardrank_testing.card_engines import OnCpu, engine_params
from shardrank_testing.reference import ReferenceEngine
from shardrank_testing.snapshots import model_of, plain_buckets, sharding_of, table_of, write_snapshot
from shardrank_testing.topologies import decoded_tables

DTYPES = ["int8", "int4", "fp16", "fp32"]
ROWS_PER_FILE = 256
SEED = 1


def spec_of(dtypes: list[str], bucketing: str = "mixed", rows: tuple[int, ...] = (1, 255, 700, 1500)) -> ModelSpec:
    return model_of(
        [
            table_of(f"{dtype}_{dim}_{count}", count, dim, dtype=dtype, bucketing=bucketing)
            for dtype in dtypes
            for dim, count in zip((4, 16, 4, 64), rows, strict=True)
        ]
    )


ON_CPU = [
    OnCpu(1),
    OnCpu(3),
    OnCpu(40),  # more cards than most tables have buckets
    OnCpu(2, sharding="table"),
    OnCpu(1, 0),
    OnCpu(2, 1 / 8),
]


@pytest.fixture(scope="module", params=["mixed", "range"])
def stored(request, tmp_path_factory) -> tuple[Snapshot, ReferenceEngine]:
    spec = spec_of(DTYPES, request.param)
    path, tables = write_snapshot(tmp_path_factory.mktemp("store"), spec, SEED, rows_per_file=ROWS_PER_FILE)
    return Snapshot.open(path), ReferenceEngine(spec, decoded_tables(spec, tables))


@pytest.fixture(scope="module", params=[*ON_CPU, *engine_params()], ids=str)
def engines(request, stored) -> Iterator[tuple[Engine, ReferenceEngine]]:
    engine = request.param.load(stored[0])
    yield engine, stored[1]
    engine.close()


@pytest.mark.parametrize(
    ("max_bags", "max_hotness", "weighted"),
    [(1, 1, False), (8, 1, True), (6, 3, False), (6, 20, True), (2, 1000, False), (2048, 2, True), (0, 0, False)],
)
def test_pooled_bags_and_answers_are_the_references(engines, weighted, max_bags, max_hotness):
    engine, reference = engines
    rng = np.random.default_rng(max_bags * 7919 + max_hotness)
    for _ in range(2):
        bags = random_table_bags(rng, reference.layout, max_bags, max_hotness, weighted)
        expected, scale = reference.pool(bags), 3.0 * max(1, max_hotness)
        assert_blocks_equal(engine.pool(bags), expected, scale)
        answer = engine.answer(bags)
        # Rows lie on cards in another form than the stored one.
        assert (answer.stored is None) == (engine.cards() is not None)
        answer.check(engine.layout, bags)
        assert_blocks_equal(add_answers(engine.layout, bags, [whole(bags)], [answer]), expected, scale)


def test_every_single_row_is_pooled(engines):
    engine, reference = engines
    layout = reference.layout
    bags = bags_of(
        {number: [[row] for row in range(table.num_embeddings)] for number, table in enumerate(layout.tables)}
    )
    assert_blocks_equal(engine.pool(bags), reference.pool(bags), scale=1.0)


def test_a_row_outside_its_table_is_refused_by_name(engines):
    engine, _ = engines
    number, table = next((number, one) for number, one in enumerate(engine.layout.tables) if one.num_embeddings == 1)
    for row in (-1, 1, 2**40, -(2**63), 2**63 - 1):
        bags = bags_of({number: [[0], [row]]})
        for look_up in (engine.pool, engine.answer):
            with pytest.raises(InvalidBagsError, match=rf"row {row} \(value 1\) .* of table '{table.name}'"):
                look_up(bags)


def test_a_partition_refuses_rows_of_another_node(stored):
    snapshot, _ = stored
    plan = Plan.make(snapshot.spec, num_shards=2, sharding=sharding_of(snapshot.spec), replicate_bytes=0)
    engine = load_tables(snapshot, plan.partition(1), plan.digest).engine
    table = next(number for number, one in enumerate(engine.layout.tables) if one.num_embeddings == 1500)
    shards = plan.shard_of_bucket[table][plain_buckets(engine.layout.tables[table])]
    row = int(np.flatnonzero(shards == 0)[0])
    with pytest.raises(InvalidBagsError, match=rf"row {row} of table '.*_1500' is not on this node"):
        engine.pool(bags_of({table: [[row]]}))


def test_memory_is_reported_by_card_and_tier(tmp_path: Path):
    spec = spec_of(["int8"], rows=(10, 300, 512, 1024))
    snapshot = Snapshot.open(write_snapshot(tmp_path, spec, seed=2, rows_per_file=ROWS_PER_FILE)[0])
    total = 10 * 12 + 300 * 24 + 512 * 12 + 1024 * 72
    assert sum(use.size_bytes for use in OnCpu(2).load(snapshot).memory()) == total
    kept = OnCpu(1, (total - 1) / snapshot.float32_bytes).load(snapshot).memory()
    sizes = {(use.card, use.tier): use.size_bytes for use in kept}
    # The tables that fit half of the budget, and as many rows of the largest as fit what is left.
    in_ram = total - 1024 * 72
    slots = (total - 1 - in_ram) // (72 + SLOT_BYTES)
    assert sizes == {(0, "ram"): in_ram + slots * (72 + SLOT_BYTES), (0, "disk"): 1024 * 72}


@pytest.mark.parametrize("lengths", [(5, 0, 40, 1, 13), (5, 0, 0, 6, 1, 7, 7, 3, 0, 9, 2, 0)], ids=["long", "short"])
@pytest.mark.parametrize("weighted", [False, True])
def test_fp16_rows_gathered_in_chunks_are_the_references(stored, weighted, lengths, monkeypatch):
    snapshot, reference = stored
    monkeypatch.setattr("shard_node.engine.kernels.FP16_GATHER_BYTES", 7 * 16)
    table = next(number for number, one in enumerate(reference.layout.tables) if one.dtype == "fp16")
    rows = reference.layout.tables[table].num_embeddings
    rng = np.random.default_rng(3)
    weights = rng.normal(size=sum(lengths)) if weighted else None
    bags = bags_of({table: [rng.integers(0, rows, length) for length in lengths]}, weights)
    assert_blocks_equal(OnCpu().load(snapshot).pool(bags), reference.pool(bags), scale=40.0)


def test_the_cpu_engine_counts_which_rows_it_pools(tmp_path):
    engine = OnCpu(2).load(Snapshot.open(write_snapshot(tmp_path, spec_of(["int8"]))[0]))
    bags = bags_of({engine.layout.index["int8_16_255"]: [[7, 7], [200]]})
    for _ in range(SAMPLE_EVERY):
        engine.pool(bags)
        engine.answer(bags)
    assert engine.access.lookups == 6 * SAMPLE_EVERY
    counts = engine.access.counts()
    assert {name for name, of_table in counts.items() if of_table[:].any()} == {"int8_16_255"}
    assert counts["int8_16_255"][:][[7, 200]].tolist() == [4, 2]
