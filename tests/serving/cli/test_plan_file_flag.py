"""`--plan`: a plan that is chosen, written, exported with a model, and served by processes of a fleet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from router.plan_file import PlanFile, RanksOfBuckets, TablePlan
from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.processes import running
from shardrank_testing.ranking import random_tensors
from shardrank_testing.serving_api import MODEL, api_request, api_spec, write_api_model
from shardrank_testing.snapshots import random_tables


def plan_file() -> PlanFile:
    """Return a plan over 2 shards of 2 cards with every kind in turn, and all odd buckets on the last rank."""
    kinds = ["row_wise", "column_wise", "grid_shard", "table_wise", "data_parallel"]
    tables = []
    for number, table in enumerate(api_spec().tables):
        kind = kinds[number % len(kinds)]
        count = 4096 if table.bucketing == "mixed" else 256
        halves = RanksOfBuckets.of(np.where(np.arange(count) % 2, 3, 0))
        one = RanksOfBuckets(ranks=(number % 4,))
        copies = RanksOfBuckets(ranks=(0, 2))
        slices = 2 if kind in ("column_wise", "grid_shard") else 1
        of_kind = {"row_wise": halves, "grid_shard": halves, "data_parallel": copies}.get(kind, one)
        tables.append(
            TablePlan(
                table=table.name,
                num_embeddings=table.num_embeddings,
                bucketing=table.bucketing,
                sharding_type=kind,
                column_dims=(table.embedding_dim // 2,) * 2 if slices == 2 else (),
                slices=(of_kind,) * slices,
            )
        )
    return PlanFile.of(MODEL, 2, 2, tables)


def swapped(table: TablePlan) -> TablePlan:
    """Return a table's plan with another owner of every bucket."""
    if table.sharding_type == "data_parallel":
        return table
    ranks = [RanksOfBuckets.of(3 - one.rank_of_bucket(table.num_buckets)) for one in table.slices]
    return table.model_copy(update={"slices": tuple(ranks)})


def test_a_fleet_serves_by_the_plan_in_the_snapshot_or_a_named_one(tmp_path: Path) -> None:
    file = plan_file()
    other = PlanFile.of(MODEL, 2, 2, [swapped(table) for table in file.tables])
    (tmp_path / "plan.json").write_text(other.to_json())
    model = write_api_model(tmp_path / "models", spec=file.sliced(api_spec()), plan=file.to_json().encode())
    flags = ("up", "--snapshot", str(model.path), "--shards", "2", "--cards", "2", "--dtype", "float32", *ANY_PORTS)
    for plan, more in ((file, ()), (other, ("--plan", str(tmp_path / "plan.json")))):
        with running(*flags, *more) as program:
            program.read_until(f"by plan {plan.digest[:12]} over 2 shards: ")
            answer = program.rank(MODEL, api_request(1)).json()
            np.testing.assert_allclose(answer["scores"], model.scores(api_request(1)), rtol=1e-4)
            assert program.stop() == 0


def test_a_plan_is_chosen_written_and_exported_with_the_model(tmp_path: Path) -> None:
    spec = api_spec()
    (tmp_path / "shop.json").write_text(spec.model_dump_json())
    result = shardrank(
        "plan", "--model", tmp_path / "shop.json", "--shards", 3, "--cards", 2, "--replicate-bytes", 0,
        "--out", tmp_path / "plan.json", "--json",
    )  # fmt: skip
    division = json.loads(result.stdout)["division"]
    file = PlanFile.read(tmp_path / "plan.json")
    assert division["digest"] == file.digest
    assert [one["table"] for one in division["tables"]] == [one.name for one in spec.tables]
    assert [one["way"] for one in division["ways"]] == ["per table", "all row_wise", "all table_wise"]
    assert sum(one["lookup_share"] for one in division["ranks"]) == pytest.approx(1)
    tensors = {f"e.{name}.weight": torch.from_numpy(rows) for name, rows in random_tables(spec, 5).items()}
    dense = {f"over.{name}": tensor.contiguous() for name, tensor in random_tensors(spec, 5).items()}
    save_file(tensors | dense, tmp_path / "model.safetensors")
    keys = [part for one in spec.tables for part in ("--table-key", f"{one.name}=e.{one.name}.weight")]
    vocabularies = []
    for table in spec.tables:
        if table.id_mapping.kind == "vocabulary":
            (tmp_path / table.name).write_text("\n".join(str(one) for one in range(table.num_embeddings)))
            vocabularies += ["--vocabulary", f"{table.name}={tmp_path / table.name}"]
    shardrank(
        "export", "--checkpoint", tmp_path / "model.safetensors", "--model", tmp_path / "shop.json", "--store",
        tmp_path / "models", "--dense-prefix", "over.", *keys, *vocabularies, "--plan", tmp_path / "plan.json",
    )  # fmt: skip
    snapshot = Snapshot.open(tmp_path / "models" / spec.model / "1")
    assert Plan.of_snapshot(snapshot, 3, cards_per_shard=2).digest == file.digest
