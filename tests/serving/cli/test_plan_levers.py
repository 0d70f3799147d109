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
