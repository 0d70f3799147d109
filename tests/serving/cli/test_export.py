"""`train`, `export` and `verify` from the command line, of tables that are divided or pruned too."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

from loader.access_counts import AccessCounts, write_access_counts
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from serving.embedded import Ranker
from serving.models.layers import choose_dtype
from shardrank_testing.command_line import shardrank
from shardrank_testing.snapshots import rewrite_manifest

SPEC: dict[str, Any] = {
    "model": "shop",
    "tables": [
        {
            "name": "users", "num_embeddings": 3, "embedding_dim": 4, "feature_names": ["user"], "dtype": "fp32",
            "id_mapping": {"kind": "vocabulary", "id_type": "string"},
        },
        {
            "name": "items", "num_embeddings": 300, "embedding_dim": 4, "feature_names": ["item"],
            "id_mapping": {"kind": "vocabulary"}, "unknown_id": "skip",
        },
    ],
    "features": [{"name": "user", "side": "context"}, {"name": "item", "side": "candidate"}],
    "dense_model": {"kind": "mlp", "config": {"hidden": [2]}},
}  # fmt: skip


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "model.ebc.embedding_bags.users.weight": torch.randn(3, 4),
        "rows_of_items": torch.randn(300, 4),
        "over.mlp.layers.0.weight": torch.randn(2, 8),
        "over.mlp.layers.0.bias": torch.randn(2),
        "over.mlp.layers.1.weight": torch.randn(1, 2),
        "over.mlp.layers.1.bias": torch.randn(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "shop.json").write_text(json.dumps(SPEC))
    (tmp_path / "users.txt").write_text("anna\nbert\ncäcilie\n", encoding="utf-8")
    (tmp_path / "items.txt").write_text("".join(f"{10 * number}\n" for number in range(300)))
    return tmp_path


def export(inputs: Path, *more: object, code: int = 0) -> Result:
    return shardrank(
        "export", "--checkpoint", inputs / "model.safetensors", "--model", inputs / "shop.json",
        "--store", inputs / "models", "--table-key", "items=rows_of_items", "--dense-prefix", "over.",
        "--vocabulary", f"users={inputs / 'users.txt'}", "--vocabulary", f"items={inputs / 'items.txt'}", *more,
        code=code,
    )  # fmt: skip


def test_a_checkpoint_with_foreign_names_becomes_a_version(inputs: Path) -> None:
    result = export(inputs, "--metadata", "run=17", "--version", 4)
    folder = inputs / "models" / "shop" / "4"
    assert f"wrote {folder}" in result.output
    assert json.loads(shardrank("inspect", "--snapshot", folder, "--json").output)["metadata"] == {"run": "17"}
    with Ranker.open(folder) as ranker:
        assert ranker.rank("shop", {"user": "cäcilie"}, {"item": [0, 2990, 7]}).scores.size == 3


def test_tables_with_keys_are_exported_with_theirs(inputs: Path) -> None:
    spec = copy.deepcopy(SPEC)
    for table, kind in zip(spec["tables"], ("string", "int64"), strict=True):
        for name in ("num_embeddings", "id_mapping", "unknown_id"):
            table.pop(name, None)
        table |= {"keys": kind, "capacity": "auto"}
    (inputs / "shop.json").write_text(json.dumps(spec))
    np.save(inputs / "items.npy", np.arange(300, dtype=np.uint64) << np.uint64(55))
    command = (
        "export", "--checkpoint", inputs / "model.safetensors", "--model", inputs / "shop.json",
        "--store", inputs / "models", "--table-key", "items=rows_of_items", "--dense-prefix", "over.",
    )  # fmt: skip
    files = ("--keys", f"users={inputs / 'users.txt'}", "--keys", f"items={inputs / 'items.npy'}")
    shardrank(*command, *files)
    folder = inputs / "models" / "shop" / "1"
    assert "no key is there twice" in shardrank("verify", "--snapshot", folder).output
    with Ranker.open(folder) as ranker:
        found = ranker.lookup("shop", {"user": [["cäcilie"]], "item": [[-(1 << 55)], [1]]}, return_missing=True)
        rows = load_file(inputs / "model.safetensors")
        np.testing.assert_array_equal(found.embeddings["user"][0], rows["model.ebc.embedding_bags.users.weight"][2])
        # Number 511 of those that are 2^55 apart is the last one, as a signed one; there are 300.
        assert {name: one.keys.tolist() for name, one in found.missing.items()} == {"item": [-(1 << 55), 1]}
        assert ranker.rank("shop", {"user": "anna"}, {"item": [0, -(212 << 55)]}).scores.size == 2
    np.save(inputs / "times.npy", np.where(np.arange(300) % 3, 1_767_225_600, 1_767_225_599))
    np.save(inputs / "user-times.npy", np.array([9, 0, 9], np.uint32))
    times = ("--updated", f"items={inputs / 'times.npy'}", "--expire-before", "2026-01-01")
    np.save(inputs / "fewer.npy", np.arange(299))
    fewer = ("--keys", f"items={inputs / 'fewer.npy'}", "--updated", f"items={inputs / 'fewer.npy'}", *times[2:3], "1")
    shardrank(*command, *files, *times)
    shardrank(*command, *files, *times[:2], "--updated", f"users={inputs / 'user-times.npy'}", "--expire-before", "9")
    asked = {"item": [(np.arange(300) << 55).tolist()], "user": [["anna"], ["bert"], ["cäcilie"]]}
    for version, missing_items, missing_users in ((2, range(0, 300, 3), []), (3, [], [1])):
        with Ranker.open(inputs / "models" / "shop" / f"{version}") as ranker:
            found = ranker.lookup("shop", asked, return_missing=True)
        missing = {name: (one.bags.tolist(), one.keys.tolist()) for name, one in found.missing.items()}
        assert missing.get("user", ([], []))[0] == missing_users
        assert missing.get("item", ([], []))[1] == [asked["item"][0][number] for number in missing_items]
        known = np.delete(rows["rows_of_items"], missing_items, axis=0).sum(axis=0)
        np.testing.assert_allclose(found.embeddings["item"][0], known, rtol=1e-2, atol=0.5)
    for flags, problem in (
        (files[:2], "capacity is auto: give its keys"),
        ((*files, "--keys", f"shops={inputs / 'items.npy'}"), "--keys: no table 'shops'"),
        ((*files, *times[:2]), "--updated and --expire-before go with each other"),
        ((*files, *times[:3], "20280101"), "--expire-before 20280101: no key of table 'items' is left"),
        ((*files[:2], *fewer), "'items': 300 rows, but 299 keys"),
        ((*files, *times[:3], "soon"), "--expire-before 'soon' is neither seconds since 1970 nor a date"),
        ((*files, *times, "--updated", f"users={inputs / 'times.npy'}"), "expected integers [3], one for each key"),
        ((*files[:2], *times), "--updated (of those with --keys): no table 'items'"),
    ):
        assert problem in shardrank(*command, *flags, code=1).output


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("shop.json", "{", "shop.json: document: Invalid JSON"),
        ("shop.json", json.dumps({**SPEC, "tabels": []}), "unknown key 'tabels'; allowed are ['model', 'tables', "),
        ("shop.json", json.dumps({**SPEC, "dense_model": {"kind": "oracle"}}), "dense_model 'oracle'"),
        ("items.txt", "1\n2\nthree\n", "items.txt, line 3: 'three' is not a whole number below 2^63"),
        ("items.txt", "1\n1\n", "table 'items': vocabulary: rows 0 and 1 have the same id"),
        ("users.txt", "a\nb\nc\nd\n", "table 'users': vocabulary of 4 ids"),
        ("model.safetensors", "rubbish", "can't be read as safetensors"),
    ],
)
def test_a_bad_input_is_named_and_nothing_is_written(inputs: Path, file: str, content: str, problem: str) -> None:
    (inputs / file).write_text(content)
    result = export(inputs, code=1)
    assert result.output.startswith("error: ")
    assert problem in result.output
    assert not list((inputs / "models").rglob("manifest.json"))


@pytest.mark.parametrize(
    ("renamed", "prefix", "problem"),
    [
        (lambda name: None if name.endswith("1.bias") else name, "over.", "missing tensors: ['mlp.layers.1.bias']\n"),
        (lambda name: name, "over", "the names fit with --dense-prefix over.\n"),
        (lambda name: name, "over.mlp.", "the names fit with --dense-prefix over.\n"),
        (lambda name: name, "top.", "no key below it;"),
        (lambda name: name, "top.", "the names fit with --dense-prefix over.\n"),
        (lambda name: name.replace("over.", "a.over."), "over.", "the names fit with --dense-prefix a.over.\n"),
        (lambda name: name.removeprefix("over."), "over.", "the names fit without --dense-prefix\n"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_a_row_is_written(
    inputs: Path, renamed: Callable[[str], str | None], prefix: str, problem: str
) -> None:
    tensors = load_file(inputs / "model.safetensors")
    kept = {new: tensor for name, tensor in tensors.items() if (new := renamed(name)) is not None}
    save_file(kept, inputs / "model.safetensors")
    assert problem in export(inputs, "--dense-prefix", prefix, code=1).output
    assert not (inputs / "models").exists()


def test_verify_says_yes_with_0_and_no_with_1_and_the_reason(inputs: Path) -> None:
    export(inputs)
    folder = inputs / "models" / "shop" / "1"
    document = json.loads(shardrank("verify", "--store", inputs / "models", "--json").stdout)
    assert (document["ok"], document["model"], document["golden_checked"]) == (True, "shop", False)

    rows = folder / "tables" / "items" / "rows-00000-of-00001.safetensors"
    content = bytearray(rows.read_bytes())
    content[-1] ^= 1
    rows.write_bytes(content)
    bad = shardrank("verify", "--snapshot", folder, code=1)
    assert "SHA-256" in bad.stdout
    assert "must not be served" in bad.stdout
    assert json.loads(shardrank("verify", "--snapshot", folder, "--json", code=1).stdout)["ok"] is False


def test_verify_scores_the_golden_requests_of_a_trained_version(tmp_path: Path) -> None:
    small = ("--ratings", 1500, "--epochs", 1, "--profile", "--kind", "dcn_v2", "--dtype", "int4")
    trained = shardrank("train", "--store", tmp_path, *small)
    folder = tmp_path / "films" / "1"
    assert f"wrote {folder}" in trained.output
    engine = "shard_node.engine.arena_builder"
    with patch(f"{engine}.populate") as bring_in, patch(f"{engine}.ArenaLoad._place_in_ram") as load:
        good = json.loads(shardrank("verify", "--store", tmp_path, "--json").stdout)
    assert (good["ok"], good["golden_checked"]) == (True, True)
    # Only rows that are looked up are read for it.
    assert (bring_in.called, load.called) == (False, False)
    narrowest = choose_dtype("auto")
    assert f"dense model in {narrowest}: golden scores differ by up to 0.0" in "; ".join(good["checks"])
    assert ("cross.full.1 in int8, 0 of " in good["checks"][-1]) == (narrowest == "int8")
    assert "\ngolden: " in shardrank("inspect", "--snapshot", folder).output
    rewrite_manifest(folder, lambda manifest: manifest["golden"].update(tolerance=1e-9))
    bad = shardrank("verify", "--store", tmp_path, code=1)
    assert "bad: golden_mismatch: model 'films' version 1: golden scores differ" in bad.stdout
    (tmp_path / "fleet").mkdir()
    refused = shardrank("publish", folder, "--store", tmp_path / "fleet", code=1)
    assert "must not be served: golden_mismatch: model 'films' version 1: golden scores differ" in refused.stderr
    assert not (tmp_path / "fleet" / "films").exists()


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


def export_described(folder: Path, document: dict[str, Any], *more: object, code: int | None = 0) -> Result:
    (folder / "shop.json").write_text(json.dumps(document))
    return shardrank(
        "export", "--checkpoint", folder / "model.safetensors", "--model", folder / "shop.json",
        "--store", folder / "models", *more, code=code,
    )  # fmt: skip


def written(folder: Path, document: dict[str, Any], *more: object) -> tuple[Snapshot, Result]:
    result = export_described(folder, document, *more)
    return Snapshot.open(folder / "models" / "shop" / "1"), result


def counts_file(folder: Path, seen: dict[int, int], name: str = "counts") -> Path:
    numbers = np.array(sorted(seen.items()), np.int64).reshape(-1, 2)
    write_access_counts(folder / name, {"item": AccessCounts(numbers[:, 0], numbers[:, 1], ROWS)})
    return folder / name


def stored(snapshot: Snapshot, part: str) -> np.ndarray:
    table = next(one for one in snapshot.spec.tables if one.name == part)
    raw = snapshot.read_rows(part, 0, table.num_embeddings)
    return RowCodec(table.dtype, table.embedding_dim).decode(raw)


def test_pruned_rows_go_and_what_their_ids_get_is_their_mean(folder: Path) -> None:
    first, second = counts_file(folder, {7: 3, 299: 1}), counts_file(folder, {7: 1, 40: 2}, "second")
    flags = ("--counts", first, "--counts", second, "--prune")
    snapshot, result = written(folder, DESCRIBED, *flags)
    (table,) = snapshot.spec.divided
    assert (table.parts, table.pruned, table.num_embeddings) == (("item",), ROWS - 3, ROWS)
    gone = np.setdiff1d(np.arange(ROWS), [7, 40, 299])
    np.testing.assert_array_equal(stored(snapshot, "item")[:3], ITEMS[[7, 40, 299]])
    np.testing.assert_allclose(stored(snapshot, "item")[3], ITEMS[gone].mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(np.flatnonzero(snapshot.row_classes("item").classes() == 0), [7, 40, 299])
    np.testing.assert_array_equal(snapshot.access_counts("item"), [4, 2, 1, 0])
    assert f"item: pruned, 3 of {ROWS} rows are kept" in result.output
    shown = shardrank("inspect", "--snapshot", snapshot.path).output
    assert re.search(r"item +4 +4 +fp32", shown)
    assert re.search(r"\b297\b", shown)
    # Of a table without counts nothing is said and nothing goes.
    assert stored(snapshot, "user").shape == (20, DIM)


def test_hot_rows_are_fp32_and_cold_ones_int4_by_the_counts(folder: Path) -> None:
    hot = np.arange(3, 33)
    counts = counts_file(folder, {row: 5 if row in hot else 1 for row in range(ROWS)})
    snapshot, _ = written(folder, described(dtype=HOT_AND_COLD), "--counts", counts)
    np.testing.assert_array_equal(stored(snapshot, "item.b0"), ITEMS[hot])
    cold = RowCodec("int4", DIM)
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
    ("levers", "flags", "reason"),
    [
        ({}, "--counts {0}/most", f"1 of {ROWS} rows could go, and one takes their place"),
        ({"blocks": [{"share": 0.2}, {"dim": 2}]}, "--counts {0}/few", "training divided it into blocks"),
        ({"id_mapping": REMAINDERS}, "--counts {0}/few", "by quotient_remainder a row is of many ids"),
        ({"id_mapping": {"kind": "vocabulary"}}, "--ids item={0}/ids.npy", "--ids do not tell which rows a vocabulary"),
    ],
)
def test_a_table_that_can_not_be_pruned_stays_whole(folder: Path, levers: Any, flags: str, reason: str) -> None:
    np.save(folder / "ids.npy", np.arange(7))
    counts_file(folder, dict.fromkeys(range(ROWS - 1), 1), "most")
    counts_file(folder, {7: 3}, "few")
    (folder / "shop.json").write_text(json.dumps(described(**levers)))
    told = shardrank("plan", "--model", folder / "shop.json", "--prune", *flags.format(folder).split())
    assert f"item: not pruned, {reason}" in told.output


@pytest.mark.parametrize(
    ("levers", "flags", "problem"),
    [
        ({}, "--prune", "--prune needs --counts"),
        ({}, "--keep-share 0.9", "--keep-share goes with --prune"),
        ({}, "--keep {0}/seen", "--keep goes with --prune"),
        ({}, "--prune --counts {0}/seen --keep-share 1.5", "1.5 is not in the range 0<x<=1"),
        ({}, "--prune --counts {0}/seen --keep-share 0", "0.0 is not in the range 0<x<=1"),
        ({}, "--prune --counts {0}/unseen", "table 'item': no row of it was looked up: pruned, it would be empty"),
        ({}, "--prune --counts {0}/seen --keep {0}/users", "--keep: rows of ['user'], of which there are no --counts"),
        ({}, "--table-key films=x", "--table-key: no table 'films'; the description's tables are ['user', 'item']"),
        ({}, "--counts {0}/other", "access counts of ['films']; the model's tables are ['item', 'user']"),
        ({}, "--counts {0}", "no longer from a folder of .npy: `shardrank counts`"),
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
    counts_file(folder, {}, "unseen")
    for name, table, size in (
        ("other", "films", 300), ("sized", "item", 20), ("users", "user", 20), ("parts", "item.b1", 270)
    ):  # fmt: skip
        write_access_counts(folder / name, {table: AccessCounts(np.array([7]), np.array([3]), size)})
    for name, blocks in {"blocks": np.arange(ROWS) % 2, "many": np.arange(ROWS) % 3, "few": np.arange(20)}.items():
        with (folder / name).open("wb") as file:
            np.save(file, blocks.astype(np.uint8))
    result = export_described(folder, described(**levers), *flags.format(folder).split(), code=None)
    assert problem in result.output
    assert not list(folder.rglob("manifest.json"))
