"""TorchRec's plan becomes a plan file: whose rows and columns a rank has there, it has as large a share of here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import NUM_BUCKETS
from router.errors import PlanError
from router.plan_file import PlanFile
from router.torchrec_plan import read_plan
from shardrank_testing.snapshots import model_of, table_of

ROWS, DIM, BUCKETS = 1000, 16, NUM_BUCKETS["mixed"]
SPEC = model_of([table_of("films", ROWS, DIM, "film", bucketing="mixed")])


def shard(rank: int, card: int | None, offsets: tuple[int, int], sizes: tuple[int, int]) -> dict[str, Any]:
    """Return a shard as `ShardMetadata` is serialized."""
    device = "cpu" if card is None else f"cuda:{card}"
    return {"shard_offsets": list(offsets), "shard_sizes": list(sizes), "placement": f"rank:{rank}/{device}"}


def document(kind: str, ranks: list[int], shards: list[dict[str, Any]] | None) -> dict[str, Any]:
    table = {"sharding_type": kind, "compute_kernel": "fused", "ranks": ranks, "shards": shards}
    return {"plan": {"model.ebc": {"films": table}}}


def read(folder: Path, given: object, spec: ModelSpec = SPEC) -> PlanFile:
    (folder / "plan.json").write_text(json.dumps(given))
    plan = read_plan(folder / "plan.json", spec)
    plan.check_fits(plan.sliced(spec))
    return plan


def shares(plan: PlanFile, number: int = 0) -> dict[int, float]:
    """Return the share of the buckets of a slice that each rank has."""
    ranks = plan.tables[0].slices[number].rank_of_bucket(BUCKETS)
    found, counts = np.unique(ranks, return_counts=True)
    return dict(zip(found.tolist(), (counts / BUCKETS).tolist(), strict=True))


def test_a_table_that_is_whole_on_a_rank_is_whole_on_its_card(tmp_path: Path) -> None:
    plan = read(tmp_path, document("table_wise", [9], [shard(9, 1, (0, 0), (ROWS, DIM))]))
    # Rank 9 is card 1 of host 1, of 8 cards each.
    assert (plan.num_shards, plan.cards_per_shard) == (2, 8)
    assert plan.tables[0].sharding_type == "table_wise"
    assert shares(plan) == {9: 1.0}


def test_rows_of_a_rank_are_as_large_a_share_of_the_buckets(tmp_path: Path) -> None:
    sizes = [500, 250, 250, 0]
    shards = [shard(rank, rank % 2, (sum(sizes[:rank]), 0), (rows, DIM)) for rank, rows in enumerate(sizes)]
    plan = read(tmp_path, document("row_wise", [0, 1, 2, 3], shards))
    assert (plan.num_shards, plan.cards_per_shard, plan.tables[0].sharding_type) == (2, 2, "row_wise")
    assert shares(plan) == {0: 0.5, 1: 0.25, 2: 0.25}


def test_a_table_whose_rows_are_divided_over_one_host_is_divided_so(tmp_path: Path) -> None:
    shards = [shard(8 + card, card, (250 * card, 0), (250, DIM)) for card in range(4)]
    plan = read(tmp_path, document("table_row_wise", [8, 9, 10, 11], shards))
    # Four of its cards are used; that a host has eight is told by its first rank.
    assert (plan.num_shards, plan.cards_per_shard, plan.tables[0].sharding_type) == (2, 8, "row_wise")
    assert shares(plan) == {8: 0.25, 9: 0.25, 10: 0.25, 11: 0.25}


@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise"])
def test_columns_of_ranks_are_slices_from_left_to_right(tmp_path: Path, kind: str) -> None:
    shards = [shard(1, None, (0, 12), (ROWS, 4)), shard(0, None, (0, 0), (ROWS, 8)), shard(1, None, (0, 8), (ROWS, 4))]
    plan = read(tmp_path, document(kind, [1, 0, 1], shards))
    (table,) = plan.tables
    assert (plan.num_shards, plan.cards_per_shard) == (2, 1)
    assert (table.sharding_type, table.column_dims) == ("column_wise", (8, 4, 4))
    assert [shares(plan, number) for number in range(3)] == [{0: 1.0}, {1: 1.0}, {1: 1.0}]


def test_a_grid_is_slices_whose_rows_are_divided(tmp_path: Path) -> None:
    shards = [
        shard(rank, rank % 2, (500 * (rank % 2), 8 * (rank // 2)), (500, 8)) for rank in range(4)
    ]  # fmt: skip
    plan = read(tmp_path, document("grid_shard", [0, 1, 2, 3], shards))
    assert (plan.num_shards, plan.cards_per_shard) == (2, 2)
    assert (plan.tables[0].sharding_type, plan.tables[0].column_dims) == ("grid_shard", (8, 8))
    assert [shares(plan, number) for number in range(2)] == [{0: 0.5, 1: 0.5}, {2: 0.5, 3: 0.5}]


@pytest.mark.parametrize(("kind", "ours"), [("column_wise", "table_wise"), ("grid_shard", "row_wise")])
def test_columns_that_are_all_on_one_rank_are_no_slices(tmp_path: Path, kind: str, ours: str) -> None:
    halves = [shard(0, None, (500 * n, 0), (500, DIM)) for n in (0, 1)]
    whole = [shard(0, None, (0, 0), (ROWS, DIM))]
    plan = read(tmp_path, document(kind, [0] * (1 + (ours == "row_wise")), halves if ours == "row_wise" else whole))
    assert (plan.tables[0].sharding_type, plan.tables[0].column_dims, shares(plan)) == (ours, (), {0: 1.0})


def test_a_table_that_each_rank_has_is_on_the_first_card_of_each_host(tmp_path: Path) -> None:
    spec = model_of([table_of("films", ROWS, DIM, "film"), table_of("users", 50, DIM, "user")])
    given = document("data_parallel", [0, 1, 2, 3], None)
    whole = {"sharding_type": "table_wise", "ranks": [3], "shards": [shard(3, 1, (0, 0), (50, DIM))]}
    given["plan"]["other"] = {"users": whole, "unknown": whole}
    plan = read(tmp_path, given, spec)
    assert (plan.num_shards, plan.cards_per_shard) == (2, 2)
    assert [(one.table, one.sharding_type, one.slices[0].ranks) for one in plan.tables] == [
        ("films", "data_parallel", (0, 2)),
        ("users", "table_wise", (3,)),
    ]


def test_a_plan_file_is_read_as_it_is(tmp_path: Path) -> None:
    plan = read(tmp_path, document("table_wise", [0], [shard(0, None, (0, 0), (ROWS, DIM))]))
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert read_plan(tmp_path / "plan.json", SPEC) == plan


WHOLE = [shard(0, None, (0, 0), (ROWS, DIM))]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (document("some_wise", [0], WHOLE), r"table 'films': sharding_type 'some_wise'; allowed: \['data_parallel', "),
        (document("column_wise", [0, 0], [shard(0, None, (0, 8 * n), (ROWS, 4)) for n in (0, 1)]), r"table 'films': "
         r"shards of \[4, 4\] columns; it has 16"),
        (document("table_wise", [0, 1], WHOLE), r"not a plan as ShardingPlan\._serialize gives it"),
        (document("table_wise", [], []), r"not a plan as ShardingPlan\._serialize gives it"),
        (document("table_wise", [0], None), r"not a plan as ShardingPlan\._serialize gives it"),
        (document("table_wise", [-1], WHOLE), r"ranks must ascend from 0 on"),
        (document("table_wise", [0.5], WHOLE), r"not a plan as|ranks"),
        (document("table_wise", [10**18], WHOLE), rf"{10**18 + 1} ranks, 1 or more cards to a host"),
        (document("row_wise", [0], [shard(0, None, (0, 0), (10**400, DIM))]), "not a plan as"),
        (
            document("row_wise", [0, 3], [shard(0, 0, (0, 0), (1, DIM)), shard(3, 4, (1, 0), (1, DIM))]),
            r"4 ranks, 5 or more cards to a host: these are no hosts of one size",
        ),
        (
            document("table_wise", [0, 1], [shard(rank, None, (500 * rank, 0), (500, DIM)) for rank in (0, 1)]),
            r"table 'films': ranks are of 2 shards; table_wise allows 1",
        ),
        ({"plan": {"ebc": {"users": {"sharding_type": "table_wise", "ranks": [0], "shards": WHOLE}}}},
         r"tables \['films'\] are not in it; it has \['users'\]"),
        ({"plan": document("table_wise", [0], WHOLE)["plan"] | {"b": {"films": {}}}}, "'films' is in two modules"),
        ({"plan": {"ebc": [1]}}, "not a plan as"),
        ({"plan": {}}, "not a plan as"),
        ({"plan": 3}, "plan.json: "),
        ([], "plan.json: "),
    ],
)  # fmt: skip
def test_a_document_that_is_no_plan_for_the_model_is_refused(tmp_path: Path, given: object, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        read(tmp_path, given)
    assert "plan.json" in str(caught.value)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    for content in (b"{", b"[" * 100_000, b"\xff"):
        (tmp_path / "plan.json").write_bytes(content)
        with pytest.raises(PlanError, match=r"plan\.json: "):
            read_plan(tmp_path / "plan.json", SPEC)
    with pytest.raises(PlanError, match="No such file"):
        read_plan(tmp_path / "none.json", SPEC)
