"""`plan` of descriptions with divided tables: bytes of parts, who draws which lookups, and what products cost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from loader.snapshot.per_row import write_access_counts
from serving.cli import main
from serving.cli.capacity import CapacityPlan

TWO_BILLION = Path(__file__).resolve().parents[3] / "docs" / "levers" / "quotient-remainder.json"
ROWS = 100_000
DESCRIBED: dict[str, Any] = {
    "model": "shop",
    "tables": [{"name": "item", "num_embeddings": ROWS, "embedding_dim": 64, "feature_names": ["item"]}],
    "features": [{"name": "item", "side": "candidate"}],
    "dense_model": {"kind": "mlp", "config": {"hidden": [2]}},
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)], prog_name="shardrank")


def planned(*arguments: object) -> CapacityPlan:
    result = run(*arguments, "--cards", 1, "--json")
    assert result.exit_code == 0, result.output
    return CapacityPlan.model_validate_json(result.stdout)


def described(folder: Path, **levers: object) -> Path:
    document = copy.deepcopy(DESCRIBED)
    document["tables"][0].update(levers)
    (folder / "shop.json").write_text(json.dumps(document))
    return folder / "shop.json"


def test_two_billion_ids_by_quotient_and_remainder_take_five_gigabytes_of_a_terabyte() -> None:
    text = run("--model", TWO_BILLION, "--cards", 1).output
    assert "two_billion_ids: 1 table, 2 G rows; as float32 1.02 TB, stored 5.1 GB" in text
    assert "id: 2 G rows; as float32 1.02 TB, stored 5.1 GB, 200.0 times less\n" in text
    plan = planned("--model", TWO_BILLION)
    assert (plan.size.float32_bytes, plan.size.stored_bytes) == (1_024_000_000_000, 200 * 512 + 10_000_000 * 512)
    (divided,) = plan.divided
    assert [(part.name, part.num_embeddings) for part in divided.parts] == [("id.q", 200), ("id.r", 10_000_000)]
    # Every id has a row in both.
    assert [part.lookups for part in divided.parts] == [500, 500]
    assert divided.multiply is None


def test_products_ask_for_the_rows_of_both_parts_and_never_for_sums(tmp_path: Path) -> None:
    remainders = {"kind": "quotient_remainder", "buckets": 20_000, "combine": "multiply"}
    model, shards, ids, bags = described(tmp_path, id_mapping=remainders), 4, 20, 500
    plan = planned("--model", model, "--shards", shards, "--hotness", f"item={ids}")
    (divided,) = plan.divided
    assert divided.multiply is not None
    # A row number and the beginning of a bag out, 64 columns of float16 back; of each part.
    assert divided.multiply.id_bytes == 2 * (4 + 4 + 128)
    assert divided.multiply.batch_bytes == bags * ids * divided.multiply.id_bytes
    # The five quotients are on every shard, the remainders on four: 4 * (1 - (3 / 4) ** 20) of them have a bag's.
    sums = bags * (1 + shards * (1 - (1 - 1 / shards) ** ids))
    assert divided.multiply.added_bytes == pytest.approx(2 * bags * ids * 4 + sums * (4 + 128))
    assert plan.batch.bags == 2 * bags * ids
    text = run("--model", model, "--cards", 1, "--shards", shards, "--hotness", f"item={ids}").output
    assert "item: multiplied, so rows are asked for and never sums: 272 B an id, 2.7 MB a batch; added it" in text


def test_the_hot_part_draws_the_lookups_of_its_ranks_or_those_that_were_counted(tmp_path: Path) -> None:
    model = described(tmp_path, dtype={"hot": "fp16", "cold": "int4", "hot_share": 0.1})
    weights = np.arange(1, ROWS + 1) ** -1.05
    (divided,) = planned("--model", model, "--zipf", 1.05).divided
    expected = 500 * weights[: ROWS // 10].sum() / weights.sum()
    assert [part.lookups for part in divided.parts] == pytest.approx([expected, 500 - expected], rel=1e-6)
    (divided,) = planned("--model", model, "--zipf", 1.05, "--head", "20000:0.5").divided
    expected = 500 * (0.5 * weights[: ROWS // 10].sum() / weights[:20_000].sum() + 0.5 * 0.1)
    assert divided.parts[0].lookups == pytest.approx(expected, rel=1e-6)
    assert divided.classes_bytes == -(-ROWS // 512) * 68
    counts = np.ones(ROWS, np.uint32)
    counts[7] = ROWS
    write_access_counts(tmp_path / "counts", {"item": (np.arange(ROWS), counts)})
    (divided,) = planned("--model", model, "--counts", tmp_path / "counts").divided
    expected = 500 * (ROWS + 9_999) / (2 * ROWS - 1)
    assert [part.lookups for part in divided.parts] == pytest.approx([expected, 500 - expected])


def test_pruned_rows_are_not_planned_for_and_which_row_is_where_takes_a_bit_each(tmp_path: Path) -> None:
    seen = np.arange(0, ROWS, 4)
    write_access_counts(tmp_path / "counts", {"item": (seen, np.ones(seen.size))})
    flags = ("--model", described(tmp_path, dtype="fp32"), "--counts", tmp_path / "counts", "--prune")
    plan = planned(*flags)
    (divided,) = plan.divided
    assert (divided.pruned, divided.stored_bytes) == (ROWS - seen.size, (seen.size + 1) * 256)
    assert divided.classes_bytes == pytest.approx(ROWS * 1.0625 / 8, rel=0.01)
    assert "75 k of them pruned; as float32 25.6 MB, stored 6.4 MB, 4.0 times less; which row" in run(*flags).output


@pytest.mark.parametrize(
    ("levers", "flags", "problem"),
    [
        ({}, ["--prune"], "--prune needs --counts"),
        ({"dtype": {"hot": "fp16", "cold": "int4", "hot_share": 2}}, [], "hot_share: Input should be less than 1"),
        ({"id_mapping": {"kind": "quotient_remainder", "buckets": 0}}, [], "buckets: Input should be greater than"),
        ({"column_dims": [32, 32], "project_to": 128}, [], "column_dims goes with a table that is stored whole"),
    ],
)
def test_levers_that_can_not_be_are_named(
    tmp_path: Path, levers: dict[str, Any], flags: list[str], problem: str
) -> None:
    result = run("--model", described(tmp_path, **levers), *flags)
    assert result.exit_code == 1
    assert problem in result.output


def test_what_has_no_description_can_not_be_pruned() -> None:
    result = run("--model", "merlin-tiny", "--prune")
    assert result.exit_code == 2
    assert "go with a model description" in result.output
