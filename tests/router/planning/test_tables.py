"""The planner divides each table by the time of the slowest shard, and gives buckets to shards by counted load."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import DividedTable
from router.errors import PlanError
from router.plan import Plan, table_bytes
from router.plan_file import PlanFile
from router.planning.inputs import CapacityOptions, CpuNode, LookupProfile, NetworkOptions
from router.planning.tables import TablePlanner
from shard_node.bags import TableLayout
from shard_node.errors import MemoryBudgetError
from shard_node.planning.cost_model import SYSTEMS
from shardrank_testing.snapshots import model_of, table_of
from shardrank_testing.topologies import spec_of

GB = 10**9


def fleet_of(
    shards: int, cards: int = 1, card_gb: float = 80.0, replicate: int = 1 << 20, hot_gb: float = 0.0
) -> CapacityOptions:
    network = NetworkOptions(gb_per_s=12.5, latency_us=20, hot_rows_gb=hot_gb)
    return CapacityOptions(
        system=SYSTEMS["h100"],
        shards=shards,
        cards=cards,
        card_memory_gb=card_gb,
        pinned_memory_gb=0,
        replicate_bytes=replicate,
        network=network,
    )


def profile_of(spec: ModelSpec, *hotness: float, counts=None) -> LookupProfile:
    ids = {table.feature_names[0]: bag for table, bag in zip(spec.tables, hotness, strict=True)}
    return LookupProfile(hotness=ids, zipf=1.05, counts=counts or {})


def planned(spec: ModelSpec, fleet: CapacityOptions, profile: LookupProfile) -> PlanFile:
    return TablePlanner(spec, fleet, profile).best()


def lookups_by_shard(spec: ModelSpec, file: PlanFile, probability: np.ndarray) -> np.ndarray:
    """What shards draw of the one table and its slices, from each row's own probability."""
    plan = Plan.of_file(file.sliced(spec), file, file.num_shards, file.cards_per_shard)
    drawn = np.zeros(file.num_shards)
    for table, owners in zip(plan.layout.tables, plan.shard_of_bucket, strict=True):
        bucket = RowBuckets.of(table).of_rows(np.arange(probability.size))
        drawn += np.bincount(owners[bucket], probability, file.num_shards)
    return drawn


@pytest.mark.parametrize("shards", [4, 16])
@pytest.mark.parametrize(
    ("known", "bucketing", "dim", "kind"),
    [
        ("counts", "mixed", 32, "row_wise"),
        ("shuffled counts", "mixed", 32, "row_wise"),
        # Wide enough for slices.
        ("near rows", "mixed", 128, "grid_shard"),
    ],
)
def test_every_shard_is_loaded_equally(shards, known, bucketing, dim, kind):
    """By counts of a trace in which the router has answered its hot rows, or by a closed form without these."""
    rows, near = 1_000_000, 1000
    spec = spec_of((rows, dim), bucketing=bucketing)
    probability = np.arange(1, rows + 1, dtype=np.float64) ** -1.05
    probability /= probability.sum()
    probability[:near] = 0
    if known == "shuffled counts":
        np.random.default_rng(3).shuffle(probability)
    counts, hot_gb = {"t0": np.rint(probability * 1e9).astype(np.uint32)}, 0.0
    if known == "near rows":
        counts, hot_gb = {}, near * (dim + 8) / GB
    # Too large for one shard, so that it must be divided.
    fleet = fleet_of(shards, card_gb=rows * (dim * 1.25 + 40) / GB / shards, hot_gb=hot_gb)
    file = planned(spec, fleet, profile_of(spec, 40, counts=counts))
    assert file.tables[0].sharding_type == kind
    drawn = lookups_by_shard(spec, file, probability)
    assert drawn.max() <= 1.1 * drawn.mean()


def test_small_tables_are_replicated_and_others_placed_whole():
    spec = spec_of((100, 32), *[(1_000_000, 64)] * 8)
    file = planned(spec, fleet_of(4), profile_of(spec, 1, *[20] * 8))
    assert [one.sharding_type for one in file.tables] == ["data_parallel"] + ["table_wise"] * 8
    assert sorted(Counter(one.slices[0].ranks for one in file.tables[1:]).values()) == [2, 2, 2, 2]


def test_one_busy_table_is_replicated_or_divided():
    spec = spec_of((10_000_000, 256))
    roomy = planned(spec, fleet_of(4), profile_of(spec, 200))
    assert roomy.tables[0].sharding_type == "data_parallel"
    # Too large for a shard. Sums of few ids are dearer than the ids: by column, or by column and row.
    tight = fleet_of(4, card_gb=1.5)
    assert planned(spec, tight, profile_of(spec, 8)).tables[0].sharding_type in ("column_wise", "grid_shard")
    # A bag of one id is on one shard whichever way rows are divided: by row, ids are sent once.
    assert planned(spec, tight, profile_of(spec, 1)).tables[0].sharding_type == "row_wise"


@pytest.mark.parametrize(
    ("shards", "dim", "dtype", "ids", "kind"),
    [
        # Rows travel as they are stored: slices would only repeat the ids.
        (2, 512, "int8", 1, "row_wise"),
        (4, 1024, "int8", 1, "row_wise"),
        (4, 512, "int8", 5, "row_wise"),
        # As float32 they would not: the shards add, and columns have fewer sums.
        (4, 512, "fp32", 5, "column_wise"),
        (2, 1024, "int8", 5, "column_wise"),
        (4, 1024, "int8", 20, "column_wise"),
        # Narrow rows: an id costs as much as a sum.
        (4, 128, "int8", 20, "row_wise"),
        # Many shards: neither an id for each of 16 slices, nor a sum of all columns from 12 shards.
        (16, 1024, "int8", 20, "grid_shard"),
    ],
)
def test_cpus_divide_a_table_by_what_ids_and_sums_cost(shards, dim, dtype, ids, kind):
    """Int8 rows of 512 and 1,024 columns over 2 and 4 shards: docs/measurements/2026-11-30-column-slices.md."""
    spec = model_of([table_of("t0", 200_000, dim, dtype=dtype)])
    ram_gb = 1.3 * table_bytes(spec.tables[0]) / shards / GB
    fleet = CapacityOptions(
        system=CpuNode.of(cores=1, ram_gb=ram_gb, disk_gb=0, rows_per_s=20e6),
        shards=shards,
        cards=1,
        card_memory_gb=ram_gb,
        pinned_memory_gb=0,
        candidates=275,
        network=NetworkOptions(gb_per_s=12.5, latency_us=20),
    )
    table = planned(spec, fleet, LookupProfile(hotness={"f.t0": ids})).tables[0]
    assert table.sharding_type == kind


def test_what_fits_in_no_way_is_refused():
    spec = spec_of((100_000_000, 128))
    with pytest.raises(PlanError, match="1 tables do not fit on 2 shards of"):
        planned(spec, fleet_of(2, card_gb=5), profile_of(spec, 40))


@given(
    tables=st.lists(st.tuples(st.integers(1, 300_000), st.sampled_from([16, 64, 128, 256])), min_size=1, max_size=6),
    hotness=st.lists(st.sampled_from([0.0, 1.0, 5.0, 80.0]), min_size=6, max_size=6),
    bucketing=st.sampled_from(["mixed", "range"]),
    shards=st.sampled_from([1, 3, 4]),
    cards=st.sampled_from([1, 4]),
    replicate=st.sampled_from([0, 1 << 20]),
)
def test_any_plan_is_a_valid_file_and_deterministic(tables, hotness, bucketing, shards, cards, replicate):
    spec = spec_of(*tables, bucketing=bucketing)
    needed = sum(rows * (dim + 32) for rows, dim in tables) / GB
    fleet = fleet_of(shards, cards, card_gb=max(needed * 2 / shards / cards, 1e-4), replicate=replicate)
    profile = profile_of(spec, *hotness[: len(tables)])
    try:
        file = planned(spec, fleet, profile)
    except (PlanError, MemoryBudgetError):
        # A model that fits in all need not fit in parts: then it says so.
        return
    assert PlanFile.parse("plan", file.to_json().encode()) == file
    assert planned(spec, fleet, profile) == file
    plan = Plan.of_file(file.sliced(spec), file, shards, cards)
    for number, table in enumerate(TableLayout.of(file.sliced(spec)).tables):
        assert plan.layout.tables[number] == table
        cards_of = np.stack([plan.partition(shard).card_of_bucket[number] for shard in range(shards)])
        assert ((cards_of >= 0).sum(axis=0) == (shards if plan.shard_of_bucket[number][0] < 0 else 1)).all()


def test_columns_of_a_divided_tables_part_are_not_sliced():
    whole = spec_of((10_000_000, 256))
    divided = DividedTable(
        name="t", num_embeddings=10_000_000, embedding_dim=256, feature_names=("f.t0",), parts=("t0",)
    )
    parted = whole.model_copy(update={"divided": (divided,)})
    file = planned(parted, fleet_of(4, card_gb=1.5), profile_of(parted, 8))
    # Whole it is, see above.
    assert [(one.sharding_type, one.column_dims) for one in file.tables] == [("row_wise", ())]
