"""`shardrank fit`: the textbook's sizes, what a trace says, a proposal that is a description, wrong input by name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loader.access_counts import AccessCounts, write_access_counts
from loader.description import ModelDescription
from serving.cli.options import byte_size
from serving.models.ranking_models import build_model
from shardrank_testing.command_line import shardrank

LEVERS_PAGE = Path(__file__).resolve().parents[3] / "docs/levers"


def found(*arguments: object) -> dict[str, Any]:
    return json.loads(shardrank("fit", *arguments, "--json").output)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A description with a hashed and an identity table, and in its folder a trace of 20,000 lookups of each."""
    rng = np.random.default_rng(3)
    np.save(tmp_path / "item.npy", np.minimum(rng.zipf(1.3, 20_000), 2**40))
    np.save(tmp_path / "user.npy", np.minimum(rng.zipf(1.1, 20_000), 9999))
    tables = [
        {"name": "items", "feature_names": ["item"], "num_embeddings": 200_000, "id_mapping": {"kind": "hash"}},
        {"name": "users", "feature_names": ["user"], "num_embeddings": 10_000},
    ]
    described = {
        "model": "shop",
        "tables": [table | {"embedding_dim": 16, "dtype": "fp32"} for table in tables],
        "features": [{"name": name, "side": "candidate"} for name in ("item", "user")],
        "dense_model": {"kind": "mlp"},
    }
    path = tmp_path / "shop.json"
    path.write_text(json.dumps(described))
    return path


def traces(shop: Path) -> list[str]:
    return [word for name in ("item", "user") for word in ("--trace", f"{name}={shop.parent / name}.npy")]


def test_the_textbook_table_has_the_textbooks_sizes() -> None:
    table = {one["dtype"]: one for one in found(LEVERS_PAGE / "textbook.json")["bytes"]}
    assert {name: table[name]["code_bytes"] for name in ("fp32", "int8", "int4")} == {
        "fp32": 1.024e12, "int8": 0.256e12, "int4": 0.128e12
    }  # fmt: skip
    # A float32 scale and bias a row of int8, float16 of int4.
    assert (table["int8"]["scale_bytes"], table["int4"]["scale_bytes"]) == (8 * 2e9, 4 * 2e9)
    assert table["as described"]["stored_bytes"] == 1.024e12
    text = " ".join(shardrank("fit", LEVERS_PAGE / "textbook.json").output.split())
    for words in ("as described 1.02 TB", "int8 256.0 GB 16.0 GB", "int4 128.0 GB 8.0 GB"):
        assert words in text


def test_six_terabytes_become_a_fifth_by_popularity() -> None:
    six = LEVERS_PAGE / "six-terabytes.json"
    document = found(six, "--bytes", "1.2TB", "--levers", "precision")
    sizes = {size["dtype"]: size for size in document["bytes"]}
    by_popularity = sizes["hottest 50% int8, others int4"]
    assert sizes["as described"]["stored_bytes"] == 6e12
    rows = 6e12 / 512
    assert by_popularity["code_bytes"] == rows * (128 + 64) / 2
    assert by_popularity["scale_bytes"] == rows * (8 + 4) / 2
    assert by_popularity["class_bytes"] == pytest.approx(rows * 1.0625 / 8, rel=1e-6)
    assert 0.19 < by_popularity["of_float32"] < 0.2
    (step,) = document["proposal"]["steps"]
    assert step["bytes_after"] == by_popularity["stored_bytes"]


def test_a_proposal_is_a_description_that_has_its_bytes(shop: Path, tmp_path: Path) -> None:
    out = tmp_path / "smaller.json"
    arguments = (shop, *traces(shop), "--bytes", "100kB", "--out", out)
    document = found(*arguments)
    items, users = document["tables"]
    ids = np.load(shop.parent / "item.npy")
    assert (items["lookups"], items["distinct_ids"]) == (20_000, np.unique(ids).size)
    assert users["unseen_share"] == users["ids_seen_once"] / 20_000
    assert items["rows_used"] == pytest.approx(items["expected_rows_used"], rel=0.01)
    assert (users["expected_rows_used"], users["lookups_colliding_share"]) == (None, 0)
    proposal = document["proposal"]
    assert [one["lever"] for one in proposal["steps"]] == ["prune", "precision"]
    assert proposal["bytes_after"] <= 100_000
    described = ModelDescription.model_validate_json(out.read_text(), strict=True)
    described.compiled()
    text = shardrank("fit", *arguments).output
    for one in proposal["steps"]:
        assert one["lever"] in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--bytes 0", "'0' is not a number of bytes, 1 or more"),
        ("--bytes 1XB", "'1XB' is not a number of bytes"),
        ("--bytes '6 apples'", "'6 apples' is not a number of bytes"),
        ("--max-collision-share 0", "is not a share above 0% and below 100%"),
        ("--max-collision-share 1", "is not a share above 0% and below 100%"),
        ("--keep-share 0", "0.0 is not in the range"),
        ("--levers prune,fold", "'fold' is none of prune, precision"),
        ("--out x.json", "--out needs --bytes"),
        ("--trace user=far.npy", "table 'users': id 10000 of features ['user'] is not below"),
        ("--trace item=below.npy", "id -1 is not in [0, 2^63)"),
        ("--trace shop=far.npy", "no feature 'shop'; the model has ['item', 'user']"),
        ("--counts other", "access counts of ['films']; the model's tables are ['items', 'users']"),
        ("--counts short", "a table 'users' whose num_embeddings was 7; here it is 10000"),
        ("--counts short --trace item=far.npy", "give one of them"),
    ],
)
def test_wrong_input_is_refused_by_name(
    shop: Path, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shop.parent)
    for file, table in (("other", "films"), ("short", "users")):
        write_access_counts(Path(file), {table: AccessCounts.from_rows(np.arange(7))})
    for name, array in {"far": [1, 10_000], "below": [5, -1]}.items():
        np.save(f"{name}.npy", np.array(array))
    assert message in shardrank("fit", shop, *shlex.split(arguments), code=None).output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bytes 1kB --levers precision", "are left, and --levers leaves out shard"),
        ("--bytes 1kB --levers shard", "bytes_after 13.4 MB, shards 13440\n"),
        ("--counts {counts}", "Counts are of rows, not of ids, so collisions can't be measured"),
    ],
)
def test_what_does_not_fit_or_is_not_known_is_told(shop: Path, flags: str, message: str) -> None:
    counts = shop.parent / "counts"
    users = np.bincount(np.load(shop.parent / "user.npy"), minlength=10_000)
    write_access_counts(counts, {"users": AccessCounts.from_rows(users)})
    assert message in shardrank("fit", shop, *flags.format(counts=counts).split()).output


def test_plan_and_export_size_auto_tables_by_ids_and_prune(shop: Path, tmp_path: Path) -> None:
    document = json.loads(shop.read_text())
    document["tables"][0] |= {"num_embeddings": "auto", "max_collision_share": 0.2}
    shop.write_text(json.dumps(document))
    measured = found(shop, *traces(shop))["tables"]
    rows = [one["num_embeddings"] for one in measured]
    ids = [word.replace("--trace", "--ids") for word in traces(shop)]
    planned = shardrank("plan", "--model", shop, "--json", "--prune", *ids)
    kept = [
        f"{name}: pruned, {one['rows_used']} of {size} rows are kept"
        for name, one, size in zip(("items", "users"), measured, rows, strict=True)
    ]
    assert all(line in planned.stderr for line in kept)
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": rng.normal(size=(size, 16)).astype(np.float32)
        for name, size in zip(("items", "users"), rows, strict=True)
    }
    spec = ModelDescription.model_validate_json(json.dumps(document)).model_copy()
    tables = tuple(one.model_copy(update={"num_embeddings": size}) for one, size in zip(spec.tables, rows, strict=True))
    dense = build_model(spec.model_copy(update={"tables": tables}).compiled()).state_dict()
    save_file({**weights, **{name: one.numpy() for name, one in dense.items()}}, tmp_path / "model.safetensors")
    where = ("--checkpoint", tmp_path / "model.safetensors", "--store", tmp_path / "store")
    exported = shardrank("export", *where, "--model", shop, "--prune", *ids)
    assert all(line in exported.output for line in kept)


@pytest.mark.parametrize(
    ("text", "size"),
    [("300KB", 300_000), ("300kb", 300_000), ("1.5 TB", 15 * 10**11), ("2GiB", 2 << 30), ("4096", 4096)],
)
def test_sizes_are_read_in_any_case(text: str, size: int) -> None:
    assert byte_size(text) == size
