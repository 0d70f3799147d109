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
from router.plan import Plan
from router.plan_file import PlanFile
from router.table_planner import AskedLookups, PlannedFleet, TableLookups, TablePlanner
from shard_node.bags import TableLayout
from shard_node.planning.card_plan import CardBudget
from shard_node.planning.cost_model import SYSTEMS, BagLoad
from shard_node.planning.hotness import Hotness
from shard_node.planning.network_cost import NearRows, Network
from shardrank_testing.topologies import spec_of

GB = 10**9


def fleet_of(shards: int, cards: int = 1, card_gb: float = 80.0, network: float = 12.5, replicate: int = 1 << 20):
    budget = CardBudget((int(card_gb * GB),) * cards, 0)
    return PlannedFleet(shards, cards, budget, SYSTEMS["h100"], Network(gb_per_s=network, latency_us=20), replicate)


def workload_of(spec: ModelSpec, *hotness: float, zipf: float = 1.05, candidates: float = 500, **more) -> AskedLookups:
    lookups = {
        table.name: TableLookups(BagLoad(ids * candidates, candidates, ids), ((ids, candidates),))
        for table, ids in zip(spec.tables, hotness, strict=True)
    }
    per_sample = {name: one.load.values for name, one in lookups.items()}
    return AskedLookups(lookups, Hotness(more.pop("counts", {}), per_sample, zipf), **more)


def planned(spec: ModelSpec, fleet: PlannedFleet, workload: AskedLookups) -> PlanFile:
    return TablePlanner(spec, fleet, workload).best()


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
    more = {"counts": {"t0": np.rint(probability * 1e9).astype(np.uint32)}}
    if known == "near rows":
        more = {"near": lambda layout, hotness: NearRows.choose(layout, hotness, num_rows=near)}
    # Too large for one shard, so that it must be divided.
    fleet = fleet_of(shards, card_gb=rows * (dim * 1.25 + 40) / GB / shards)
    file = planned(spec, fleet, workload_of(spec, 40, **more))
    assert file.tables[0].sharding_type == kind
    drawn = lookups_by_shard(spec, file, probability)
    assert drawn.max() <= 1.1 * drawn.mean()


def test_small_tables_are_replicated_and_others_placed_whole():
    spec = spec_of((100, 32), *[(1_000_000, 64)] * 8)
    file = planned(spec, fleet_of(4), workload_of(spec, 1, *[20] * 8))
    assert [one.sharding_type for one in file.tables] == ["data_parallel"] + ["table_wise"] * 8
    assert sorted(Counter(one.slices[0].ranks for one in file.tables[1:]).values()) == [2, 2, 2, 2]


def test_one_busy_table_is_replicated_or_divided():
    spec = spec_of((10_000_000, 256))
    roomy = planned(spec, fleet_of(4), workload_of(spec, 200))
    assert roomy.tables[0].sharding_type == "data_parallel"
    # Too large for a shard. Sums of few ids are dearer than the ids: by column, or by column and row.
    tight = fleet_of(4, card_gb=1.5)
    assert planned(spec, tight, workload_of(spec, 8)).tables[0].sharding_type in ("column_wise", "grid_shard")
    # A bag of one id is on one shard whichever way rows are divided: by row, ids are sent once.
    assert planned(spec, tight, workload_of(spec, 1)).tables[0].sharding_type == "row_wise"


def test_what_fits_in_no_way_is_refused():
    spec = spec_of((100_000_000, 128))
    with pytest.raises(PlanError, match="1 tables do not fit on 2 shards of"):
        planned(spec, fleet_of(2, card_gb=5), workload_of(spec, 40))


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
    workload = workload_of(spec, *hotness[: len(tables)])
    try:
        file = planned(spec, fleet, workload)
    except PlanError:
        # A model that fits in all need not fit in parts: then it says so.
        return
    assert PlanFile.parse("plan", file.to_json().encode()) == file
    assert planned(spec, fleet, workload) == file
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
    file = planned(parted, fleet_of(4, card_gb=1.5), workload_of(parted, 8))
    # Whole it is, see above.
    assert [(one.sharding_type, one.column_dims) for one in file.tables] == [("row_wise", ())]


def test_all_tables_can_be_divided_alike():
    spec = spec_of((100, 32), (1_000_000, 64), (2_000_000, 128))
    planner = TablePlanner(spec, fleet_of(4, 2), workload_of(spec, 1, 20, 20))
    for kind in ("row_wise", "table_wise"):
        assert [table.sharding_type for table in planner.pure(kind).tables] == ["data_parallel", kind, kind]
