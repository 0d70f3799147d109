"""Each kind's tables, keys and rows are what training had, however many ranks saved them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader.checkpoints import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.imports.kinds import Kind, describe, open_import
from loader.snapshot.codecs import RowCodec
from shardrank_testing.foreign_checkpoints import (
    EXTREME_KEYS,
    Saved,
    of_quantised,
    quantised,
    save_distributed,
    saved_table,
    write_dynamicemb,
    write_hps,
    write_numpy,
    write_tfra,
    write_tzrec,
)

TABLES = {"films": saved_table(1, 40, 6), "shops": saved_table(2, 9, 4)}
WITHOUT_KEYS = {"model.ebc.cities": saved_table(3, 11, 4, with_keys=False)}


def read(checkpoint: Checkpoint, name: str, block_rows: int = 7) -> Saved:
    """Return all of a table, read in small blocks."""
    source = checkpoint.rows(name)
    starts = range(0, source.num_embeddings, block_rows)
    blocks = [block.copy() for start in starts for block in source.blocks(start, block_rows)]
    rows = np.concatenate(blocks)
    assert rows.shape == checkpoint.shape(name)
    return Saved(rows, checkpoint.keys(name))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "write", "prefix"),
    [
        ("dynamicemb", write_dynamicemb, "model."),
        ("tzrec", write_tzrec, ""),
        ("tfra", write_tfra, "variables.TFRADynamicEmbedding."),
    ],
)
def test_keys_and_rows_of_all_ranks_are_those_that_training_had(
    tmp_path: Path, kind: Kind, write: Callable[..., Path], prefix: str, ranks: int
) -> None:
    checkpoint = open_import(kind, write(tmp_path, TABLES, ranks))
    assert checkpoint.names() == sorted(f"{prefix}{name}" for name in TABLES)
    for name, saved in TABLES.items():
        found = read(checkpoint, f"{prefix}{name}")
        assert set(EXTREME_KEYS) <= set(found.by_key())
        assert found.by_key() == saved.by_key()


@pytest.mark.parametrize(
    ("kind", "write"), [("hps", write_hps), ("numpy", lambda at, tables: write_numpy(at, tables, {}))]
)
def test_keys_and_rows_of_a_folder_are_those_that_training_had(
    tmp_path: Path, kind: Kind, write: Callable[[Path, Mapping[str, Saved]], Path]
) -> None:
    checkpoint = open_import(kind, write(tmp_path, TABLES))
    assert checkpoint.names() == sorted(TABLES)
    assert {name: read(checkpoint, name).by_key() for name in TABLES} == {
        name: saved.by_key() for name, saved in TABLES.items()
    }


@given(
    kind=st.sampled_from(["dynamicemb", "tfra", "tzrec"]),
    ranks=st.integers(1, 5),
    parts=st.integers(1, 3),
    rows=st.integers(1, 50),
    dim=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    extremes=st.booleans(),
)
def test_any_number_of_ranks_rows_and_columns_is_read(
    tmp_path_factory: pytest.TempPathFactory, kind: Kind, ranks: int, parts: int, rows: int, dim: int, seed: int,
    extremes: bool,
) -> None:  # fmt: skip
    """Some ranks have no rows where rows are few."""
    saved, folder = saved_table(seed, rows, dim, extremes=extremes), tmp_path_factory.mktemp("any")
    match kind:
        case "tfra":
            write_tfra(folder, {"t": saved}, ranks, parts)
        case "tzrec":
            write_tzrec(folder, {"t": saved}, ranks)
        case _:
            write_dynamicemb(folder, {"t": saved}, ranks)
    checkpoint = open_import(kind, folder)
    (name,) = checkpoint.names()
    assert read(checkpoint, name, 8).by_key() == saved.by_key()


def test_a_name_of_a_tfra_layer_has_no_end_and_its_optimizers_tables_are_tables(tmp_path: Path) -> None:
    slot = "films-parameter_DynamicEmbedding_films-parameter_Adam_m"
    write_tfra(
        tmp_path, {"films-parameter": TABLES["films"], slot: TABLES["films"], "shops-parameter": TABLES["shops"]}
    )
    checkpoint = open_import("tfra", tmp_path)
    folder = "variables.TFRADynamicEmbedding."
    assert checkpoint.names() == [f"{folder}films", f"{folder}{slot}", f"{folder}shops"]
    assert {table["name"] for table in describe(checkpoint, "tfra", "m")["tables"]} == {"films", slot, "shops"}


def test_files_of_tfra_before_ranks_had_names_are_read(tmp_path: Path) -> None:
    write_tfra(tmp_path, TABLES, 1, 2)
    for file in [*tmp_path.rglob("*_mht_*")]:
        file.rename(file.with_name(file.name.replace("_rank0_size1", "")))
    checkpoint = open_import("tfra", tmp_path / "variables" / "TFRADynamicEmbedding")
    assert {name: read(checkpoint, name).by_key() for name in checkpoint.names()} == {
        name: saved.by_key() for name, saved in TABLES.items()
    }


@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint32", "uint64"])
@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16", "float64"])
def test_values_and_keys_of_tfra_are_of_the_dtypes_that_are_told(
    tmp_path: Path, key_dtype: str, value_dtype: str
) -> None:
    """Unsigned keys of 64 bits are their bits, as everywhere."""
    least, most = np.iinfo(key_dtype).min, np.iinfo(key_dtype).max
    told = np.array([least, most, 5], key_dtype)
    # Values that all these formats have.
    saved = Saved(np.array([[1, -2.5], [0.125, 3], [96, -0.0]], np.float32), told.astype(np.int64))
    write_tfra(tmp_path, {"t": saved}, key_dtype=key_dtype, value_dtype=value_dtype)
    checkpoint = open_import("tfra", tmp_path, None, key_dtype, value_dtype)
    (name,) = checkpoint.names()
    found = read(checkpoint, name)
    assert found.by_key() == saved.by_key()
    assert found.keys is not None
    assert found.keys.tolist() == told.astype(np.int64).tolist()


def test_keys_of_an_old_hps_folder_may_be_of_32_bits(tmp_path: Path) -> None:
    saved = Saved(TABLES["shops"].rows[:3], np.array([0, 7, 2**32 - 1]))
    checkpoint = open_import("hps", write_hps(tmp_path, {"t": saved}, "<u4"), None, "uint32")
    assert read(checkpoint, "t").by_key() == saved.by_key()


def test_a_folder_of_hps_that_is_a_table_itself_is_called_by_its_own_name(tmp_path: Path) -> None:
    write_hps(tmp_path, TABLES)
    checkpoint = open_import("hps", tmp_path / "films")
    assert checkpoint.names() == ["films"]
    assert read(checkpoint, "films").by_key() == TABLES["films"].by_key()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tables_of_tzrec_without_keys_are_joined_in_the_order_of_ranks(tmp_path: Path, ranks: int) -> None:
    checkpoint = open_import("tzrec", write_tzrec(tmp_path, TABLES | WITHOUT_KEYS, ranks))
    found = read(checkpoint, "model.ebc.cities")
    assert found.keys is None
    np.testing.assert_array_equal(found.rows, WITHOUT_KEYS["model.ebc.cities"].rows)


@pytest.mark.parametrize("with_keys", [True, False])
def test_codes_of_quantised_rows_stay_and_mean_the_same(tmp_path: Path, with_keys: bool) -> None:
    saved = saved_table(5, 40, 12, with_keys=with_keys)
    saved.rows[3] = 1.5  # all alike: a scale of 1
    stored = quantised(saved.rows)
    source = open_import("tzrec", write_tzrec(tmp_path, {"t": saved}, 1, is_quantised=True)).rows("t")
    (encoded,), (decoded,) = source.stored_blocks(0, 99), source.blocks(0, 99)
    assert source.stored_dtype == "int8"
    np.testing.assert_array_equal(decoded, of_quantised(stored))
    np.testing.assert_array_equal(encoded[:, :12], stored[:, :12])
    np.testing.assert_array_equal(RowCodec("int8", 12).decode(encoded), of_quantised(stored))


def test_rows_of_another_checkpoint_are_there_beside_those_of_the_files(tmp_path: Path) -> None:
    dense = {"over.weight": torch.eye(3), "ebc.embedding_bags.cities.weight": torch.ones(4, 2)}
    torch.save(dense, tmp_path / "rest.pt")
    rest = open_checkpoint(tmp_path / "rest.pt")
    checkpoint = open_import("hps", write_hps(tmp_path / "hps", TABLES), rest)
    assert checkpoint.names() == sorted([*TABLES, *dense])
    assert torch.equal(checkpoint.tensor("over.weight"), torch.eye(3))
    assert checkpoint.keys("over.weight") is None
    np.testing.assert_array_equal(read(checkpoint, "ebc.embedding_bags.cities.weight").rows, np.ones((4, 2)))
    assert read(checkpoint, "films").by_key() == TABLES["films"].by_key()
    with pytest.raises(CheckpointError, match=r"'films' is a table: it is read as rows"):
        checkpoint.tensor("films")
    with pytest.raises(CheckpointError, match="has no tensor 'unknown'"):
        checkpoint.rows("unknown")
    torch.save({"films": torch.ones(1, 1)}, tmp_path / "both.pt")
    with pytest.raises(CheckpointError, match=r"\['films'\] are both there and in --checkpoint"):
        open_import("hps", tmp_path / "hps", open_checkpoint(tmp_path / "both.pt"))
    for kind in ("torchrec", "numpy"):
        with pytest.raises(CheckpointError, match=f"--checkpoint: kind {kind} has all of the model in PATH"):
            open_import(kind, tmp_path, rest)


@pytest.mark.parametrize(
    ("kind", "key_dtype", "value_dtype", "message"),
    [
        ("dynamicemb", "int32", "float32", "--key-dtype int32: of kind dynamicemb it is int64"),
        ("hps", "int64", "float16", "--value-dtype float16: of kind hps it is float32"),
        ("numpy", "uint64", "float32", "--key-dtype uint64: of kind numpy it is int64"),
    ],
)
def test_dtypes_that_a_kind_does_not_have_are_refused(
    tmp_path: Path, kind: Kind, key_dtype: str, value_dtype: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_import(kind, tmp_path, None, key_dtype, value_dtype)


def test_a_description_has_tables_features_and_what_is_to_be_filled_in(tmp_path: Path) -> None:
    path = write_tzrec(tmp_path, {f"model.embedding_bags.{name}": one for name, one in TABLES.items()} | WITHOUT_KEYS)
    assert describe(open_import("tzrec", path), "tzrec", "my films") == {
        "model": "my_films",
        "tables": [
            {
                "name": "model.ebc.cities", "num_embeddings": 11, "embedding_dim": 4,
                "feature_names": ["model.ebc.cities"],
            },
            {
                "name": "films", "keys": "int64", "capacity": "auto", "missing": "zeros", "embedding_dim": 6,
                "feature_names": ["films"],
            },
            {
                "name": "shops", "keys": "int64", "capacity": "auto", "missing": "zeros", "embedding_dim": 4,
                "feature_names": ["shops"],
            },
        ],
        "features": [
            {"name": name, "side": "TODO: context or candidate"} for name in ("model.ebc.cities", "films", "shops")
        ],
        "dense_inputs": {"context": 0, "candidate": 0},
        "dense_model": {"kind": "TODO: mlp, dlrm, dcn_v2, target_attention or exported, and its config"},
    }  # fmt: skip


def test_tables_of_one_name_in_two_collections_are_described_by_their_full_names(tmp_path: Path) -> None:
    for collection in ("users", "items"):
        write_dynamicemb(
            tmp_path, {"city": TABLES["shops"], f"of_{collection}": TABLES["films"]}, collection=collection
        )
    described = describe(open_import("dynamicemb", tmp_path), "dynamicemb", "m")
    assert [table["name"] for table in described["tables"]] == ["items.city", "of_items", "users.city", "of_users"]


def test_matrices_of_numpy_files_may_all_be_tables(tmp_path: Path) -> None:
    write_numpy(tmp_path, TABLES, {"kernel": np.zeros((3, 4), np.float32), "bias": np.zeros(4)})
    described = describe(open_import("numpy", tmp_path), "numpy", "m")
    assert [(one["name"], one.get("keys")) for one in described["tables"]] == [
        ("films", "int64"),
        ("kernel", None),
        ("shops", "int64"),
    ]


@pytest.mark.parametrize("ranks", [1, 3])
def test_torchrec_tables_without_maps_are_read_as_ever(tmp_path: Path, ranks: int) -> None:
    rows = saved_table(4, 12, 5, with_keys=False).rows
    name = "module.ebc.embedding_bags.films.weight"
    checkpoint = open_import("torchrec", save_distributed(tmp_path / "dcp", {name: torch.from_numpy(rows)}, ranks))
    np.testing.assert_array_equal(read(checkpoint, name).rows, rows)
    assert checkpoint.keys(name) is None
    assert list(checkpoint.tables) == [name]
