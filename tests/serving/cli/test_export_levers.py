"""`export` of a description whose tables are divided or pruned: what is stored where, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file

from loader.snapshot.codecs import codec_for
from loader.snapshot.per_row import write_access_counts
from loader.snapshot.reader import Snapshot
from serving.embedded import Ranker
from shardrank_testing.command_line import shardrank

ROWS, DIM = 300, 4
DESCRIBED: dict[str, Any] = {
    "model": "shop",
    "tables": [
        {"name": "user", "num_embeddings": 20, "embedding_dim": DIM, "feature_names": ["user"], "dtype": "fp32"},
        {"name": "item", "num_embeddings": ROWS, "embedding_dim": DIM, "feature_names": ["item"], "dtype": "fp32"},
    ],
    "features": [{"name": "user", "side": "context"}, {"name": "item", "side": "candidate"}],
    "dense_model": {"kind": "mlp", "config": {"hidden": [2]}},
}
ITEMS = np.random.default_rng(7).standard_normal((ROWS, DIM), np.float32)
HOT_AND_COLD = {"hot": "fp32", "cold": "int4", "hot_share": 0.1}
REMAINDERS = {"kind": "quotient_remainder", "buckets": 16}


def described(**levers: object) -> dict[str, Any]:
    """The model with `levers` in its table `item`."""
    document = copy.deepcopy(DESCRIBED)
    document["tables"][1].update(levers)
    return document


def counts_of(seen: dict[int, int]) -> np.ndarray:
    counts = np.zeros(ROWS, np.uint32)
    counts[list(seen)] = list(seen.values())
    return counts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "embedding_bags.user.weight": torch.randn(20, DIM),
        "embedding_bags.item.weight": torch.from_numpy(ITEMS),
        "mlp.layers.0.weight": torch.randn(2, 2 * DIM),
        "mlp.layers.0.bias": torch.randn(2),
        "mlp.layers.1.weight": torch.randn(1, 2),
        "mlp.layers.1.bias": torch.randn(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "shop.json").write_text(json.dumps(DESCRIBED))
    return tmp_path


def export(folder: Path, document: dict[str, Any], *more: object, code: int | None = 0) -> Result:
    (folder / "shop.json").write_text(json.dumps(document))
    return shardrank(
        "export", "--checkpoint", folder / "model.safetensors", "--model", folder / "shop.json",
        "--store", folder / "models", *more, code=code,
    )  # fmt: skip


def written(folder: Path, document: dict[str, Any], *more: object) -> tuple[Snapshot, Result]:
    result = export(folder, document, *more)
    return Snapshot.open(folder / "models" / "shop" / "1"), result


def counts_file(folder: Path, seen: dict[int, int], name: str = "counts") -> Path:
    numbers = np.array(list(seen.items()))
    write_access_counts(folder / name, {"item": (numbers[:, 0], numbers[:, 1])}, {"item": ROWS})
    return folder / name


def stored(snapshot: Snapshot, part: str) -> np.ndarray:
    table = next(one for one in snapshot.spec.tables if one.name == part)
    raw = snapshot.read_rows(part, 0, table.num_embeddings)
    return codec_for(table.dtype, table.embedding_dim).decode(raw)


def test_pruned_rows_go_and_what_their_ids_get_is_their_mean(folder: Path) -> None:
    first, second = counts_file(folder, {7: 3, 299: 1}), counts_file(folder, {7: 1, 40: 2}, "second")
    flags = ("--counts", first, "--access-counts", second, "--prune")
    snapshot, result = written(folder, DESCRIBED, *flags)
    (table,) = snapshot.spec.divided
    assert (table.parts, table.pruned, table.num_embeddings) == (("item",), ROWS - 3, ROWS)
    gone = np.setdiff1d(np.arange(ROWS), [7, 40, 299])
    np.testing.assert_array_equal(stored(snapshot, "item")[:3], ITEMS[[7, 40, 299]])
    np.testing.assert_allclose(stored(snapshot, "item")[3], ITEMS[gone].mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(np.flatnonzero(snapshot.row_classes("item").classes() == 0), [7, 40, 299])
    np.testing.assert_array_equal(snapshot.access_counts("item"), [4, 2, 1, 0])
    assert f"item: pruned, 3 of {ROWS} rows are kept" in result.output
    # Of a table without counts nothing is said and nothing goes.
    assert stored(snapshot, "user").shape == (20, DIM)


def test_ids_of_rows_that_stay_score_the_same_bits(folder: Path) -> None:
    seen = np.random.default_rng(3).choice(ROWS, 50, replace=False)
    counts = counts_file(folder, dict.fromkeys(seen.tolist(), 1))
    for version, flags in (("1", ()), ("2", ("--prune",))):
        export(folder, described(dtype="int8"), "--counts", counts, "--version", version, *flags)
    candidates = {"sparse": {"item": seen.reshape(25, 2).tolist()}}
    request = {"context": {"sparse": {"user": [3]}}, "candidates": candidates}
    scores = []
    for version in ("1", "2"):
        with Ranker.open(folder / "models" / "shop" / version) as ranker:
            scores.append(ranker.rank(request)["scores"])
    assert len(set(scores[0])) > 1
    assert scores[0] == scores[1]


def test_hot_rows_are_fp32_and_cold_ones_int4_by_the_counts(folder: Path) -> None:
    hot = np.arange(3, 33)
    np.save(folder / "item.npy", np.where(np.isin(np.arange(ROWS), hot), 5, 1))
    snapshot, _ = written(folder, described(dtype=HOT_AND_COLD), "--counts", folder)
    np.testing.assert_array_equal(stored(snapshot, "item.b0"), ITEMS[hot])
    cold = codec_for("int4", DIM)
    expected = cold.decode(cold.encode(np.delete(ITEMS, hot, axis=0)))
    np.testing.assert_array_equal(stored(snapshot, "item.b1"), expected)


def test_a_plan_of_a_divided_table_goes_into_its_snapshot(folder: Path) -> None:
    document, counts = described(dtype=HOT_AND_COLD), counts_file(folder, dict.fromkeys(range(200), 1))
    (folder / "shop.json").write_text(json.dumps(document))
    levers = ("--counts", counts, "--prune")
    shardrank("plan", "--model", folder / "shop.json", *levers, "--shards", 2, "--out", folder / "plan.json")
    snapshot, _ = written(folder, document, *levers, "--plan", folder / "plan.json")
    assert snapshot.plan_text() == (folder / "plan.json").read_bytes()
    shardrank("plan", "--model", snapshot.path, "--counts", counts)


@pytest.mark.parametrize(
    ("levers", "flags", "problem"),
    [
        ({}, "--prune", "--prune needs --counts"),
        ({}, "--keep-share 0.9", "--keep-share goes with --prune"),
        ({}, "--keep {0}/seen", "--keep goes with --prune"),
        ({}, "--prune --counts {0}/seen --keep-share 1.5", "1.5 is not in the range 0<x<=1"),
        ({}, "--prune --counts {0}/seen --keep-share 0", "0.0 is not in the range 0<x<=1"),
        ({}, "--prune --counts {0}/unseen", "table 'item': no row of it was looked up: pruned, it would be empty"),
        ({}, "--counts {0}/other", "access counts of ['films']; the model's tables are ['item', 'user']"),
        ({}, "--counts {0}/short", "table 'item': access counts: expected integers [300], got int64 [20]"),
        ({}, "--counts {0}/sized", "a table 'item' whose num_embeddings was 20; here it is 300"),
        ({"dtype": HOT_AND_COLD}, "--counts {0}/parts", "access counts of 'item.b1', a part of table 'item'"),
        ({"dtype": HOT_AND_COLD}, "", "table 'item' is divided by popularity: counts of its rows are needed"),
        ({"id_mapping": REMAINDERS | {"buckets": 0}}, "", "tables.1.id_mapping.quotient_remainder.buckets: "),
        ({"dtype": HOT_AND_COLD | {"hot_share": 2}}, "", "hot_share: Input should be less than 1"),
        ({"dtype": HOT_AND_COLD}, "--blocks item={0}/blocks", "classes of (150, 150) rows; its parts have (30, 270)"),
        ({"dtype": HOT_AND_COLD}, "--blocks item={0}/many", "blocks 0 to 2; table 'item' has 0 to 1"),
        ({"dtype": HOT_AND_COLD}, "--blocks user={0}/blocks", "table 'user' has no blocks; those that have"),
        ({"dtype": HOT_AND_COLD}, "--blocks item={0}/few", "integers [300], got uint8 [20]"),
        ({"num_embeddings": "auto", "id_mapping": {"kind": "hash"}}, "", "table 'item': num_embeddings is auto"),
    ],
)  # fmt: skip
def test_levers_that_do_not_fit_are_refused(folder: Path, levers: dict[str, Any], flags: str, problem: str) -> None:
    counts_file(folder, {7: 3}, "seen")
    for name, table, counts in (
        ("unseen", "item", counts_of({})),
        ("other", "films", np.ones(3)),
        ("short", "item", 20),
    ):
        (folder / name).mkdir()
        np.save(folder / name / f"{table}.npy", np.arange(counts) if isinstance(counts, int) else counts)
    write_access_counts(folder / "sized", {"item": (np.array([7]), np.array([3]))}, {"item": 20})
    write_access_counts(folder / "parts", {"item.b1": (np.array([7]), np.array([3]))})
    for name, blocks in {"blocks": np.arange(ROWS) % 2, "many": np.arange(ROWS) % 3, "few": np.arange(20)}.items():
        with (folder / name).open("wb") as file:
            np.save(file, blocks.astype(np.uint8))
    result = export(folder, described(**levers), *flags.format(folder).split(), code=None)
    assert problem in result.output
    assert not list(folder.rglob("manifest.json"))
