"""Tables of TorchRec whose modules map raw ids to rows: each id has its row, from a state dict and from shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from loader.checkpoints import Checkpoint
from loader.errors import CheckpointError
from loader.imports.kinds import describe, open_import
from shardrank_testing.foreign_checkpoints import (
    NO_RAW_ID,
    Saved,
    mpzch_state,
    save_distributed,
    saved_table,
    zch_state,
)

ZCH = "ebc._embedding_module.embedding_bags.films.weight"
MPZCH = "ec._embedding_module.embeddings.shops.weight"
PLAIN = "plain.embedding_bags.cities.weight"
MODULE = "ebc._managed_collision_collection._managed_collision_modules.films."
HASHED = "ec._managed_collision_collection._managed_collision_modules.shops."


def without(saved: Saved, key: int) -> Saved:
    """Give a key that TorchRec can't have another number."""
    assert saved.keys is not None
    return Saved(saved.rows, np.where(saved.keys == key, 4321, saved.keys))


FILMS = without(saved_table(1, 40, 6), NO_RAW_ID)
SHOPS = without(saved_table(2, 9, 4), -1)


def state(ranks: int = 1) -> dict[str, torch.Tensor]:
    cities = torch.arange(24.0).reshape(8, 3)
    films, shops = zch_state("films", FILMS, 48, ranks), mpzch_state("shops", SHOPS, 20)
    return {**films, **shops, PLAIN: cities, "over.weight": torch.eye(2)}


def found(checkpoint: Checkpoint, name: str) -> Saved:
    rows = [block.copy() for start in range(0, 60, 7) for block in checkpoint.rows(name).blocks(start, 7)]
    return Saved(np.concatenate(rows), checkpoint.keys(name))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("form", ["state dict", "distributed"])
def test_each_raw_id_has_its_row(tmp_path: Path, ranks: int, form: str) -> None:
    path = tmp_path / "model.pt"
    if form == "distributed":
        path = save_distributed(tmp_path / "dcp", state(ranks), ranks)
    else:
        torch.save(state(ranks), path)
    checkpoint = open_import("torchrec", path)
    assert checkpoint.names() == [ZCH, MPZCH, "over.weight", PLAIN]
    assert found(checkpoint, ZCH).by_key() == FILMS.by_key()
    assert found(checkpoint, MPZCH).by_key() == SHOPS.by_key()
    assert [checkpoint.shape(name) for name in (ZCH, MPZCH, PLAIN)] == [(40, 6), (9, 4), (8, 3)]
    assert checkpoint.keys(PLAIN) is None
    assert torch.equal(checkpoint.tensor("over.weight"), torch.eye(2))
    assert sorted(checkpoint.tables) == sorted([ZCH, MPZCH, PLAIN])


def test_what_an_id_without_a_row_gets_is_told_of_each_table_that_has_a_map(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "model.pt")
    checkpoint = open_import("torchrec", tmp_path / "model.pt")
    assert sorted(line.partition(":")[0] for line in checkpoint.notes) == sorted([ZCH, MPZCH])
    assert all("an id without a row gets zeros, or what `missing` says" in line for line in checkpoint.notes)
    described = describe(checkpoint, "torchrec", "m")["tables"]
    assert {table["name"]: table.get("keys") for table in described} == {
        "films": "int64", "shops": "int64", "cities": None,
    }  # fmt: skip


def test_the_prefix_of_a_model_in_a_wrapper_is_of_no_account(tmp_path: Path) -> None:
    torch.save(zch_state("films", FILMS, 48, 1, "module.sparse.ebc."), tmp_path / "model.pt")
    checkpoint = open_import("torchrec", tmp_path / "model.pt")
    (name,) = checkpoint.names()
    assert name == "module.sparse.ebc._embedding_module.embedding_bags.films.weight"
    assert found(checkpoint, name).by_key() == FILMS.by_key()


def test_a_table_of_which_no_id_was_seen_has_no_rows(tmp_path: Path) -> None:
    empty = Saved(np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    torch.save(mpzch_state("shops", empty, 20), tmp_path / "model.pt")
    checkpoint = open_import("torchrec", tmp_path / "model.pt")
    assert checkpoint.shape(MPZCH) == (0, 4)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = state()
    return tensors | {name: change(tensors[name])}


def with_first(tensor: torch.Tensor, value: int) -> torch.Tensor:
    """Return it with another value where the first id is."""
    tensor.reshape(-1)[0] = value
    return tensor


@pytest.mark.parametrize(
    ("tensors", "name", "expected"),
    [
        (
            lambda: changed(f"{MODULE}_mch_sorted_raw_ids", lambda ids: ids.to(torch.int32)),
            ZCH,
            r"_mch_sorted_raw_ids: torch.int64 \[48\], at most one for each row, found torch.int32 \[48\]",
        ),
        (
            lambda: changed(f"{MODULE}_mch_sorted_raw_ids", lambda ids: torch.cat([ids, ids])),
            ZCH,
            r"_mch_sorted_raw_ids: torch.int64 \[48\], at most one for each row, found torch.int64 \[96\]",
        ),
        (
            lambda: changed(f"{HASHED}_hash_zch_identities", lambda ids: torch.cat([ids, ids])),
            MPZCH,
            r"_hash_zch_identities: torch.int64 \[20\], at most one for each row, found torch.int64 \[40\]",
        ),
        (
            lambda: changed(f"{MODULE}_mch_remapped_ids_mapping", lambda rows: with_first(rows, 48)),
            ZCH,
            r"_mch_remapped_ids_mapping: rows below 48, found \d+ to 48",
        ),
        (
            lambda: changed(f"{MODULE}_mch_remapped_ids_mapping", lambda rows: with_first(rows, -1)),
            ZCH,
            r"_mch_remapped_ids_mapping: rows below 48, found -1 to \d+",
        ),
        (
            lambda: changed(f"{MODULE}_mch_remapped_ids_mapping", lambda rows: with_first(rows, int(rows[1]))),
            ZCH,
            r"_mch_remapped_ids_mapping: a row for each of 40 ids, found 39 different rows",
        ),
        (
            lambda: changed(f"{MODULE}_mch_remapped_ids_mapping", lambda rows: rows[:-1]),
            ZCH,
            r"_mch_remapped_ids_mapping: torch.int64 \[48\], at most one for each row, found torch.int64 \[47\]",
        ),
        (
            lambda: changed(f"{MODULE}_mch_remapped_ids_mapping", lambda rows: rows.to(torch.float32)),
            ZCH,
            r"_mch_remapped_ids_mapping: torch.int64 \[48\], at most one for each row, found torch.float32 \[48\]",
        ),
    ],
)
def test_a_map_that_does_not_fit_its_table_is_refused(
    tmp_path: Path, tensors: Callable[[], dict[str, torch.Tensor]], name: str, expected: str
) -> None:
    torch.save(tensors(), tmp_path / "model.pt")
    checkpoint = open_import("torchrec", tmp_path / "model.pt")
    for read in (checkpoint.keys, checkpoint.rows, checkpoint.shape):
        with pytest.raises(CheckpointError) as caught:
            read(name)
        assert re.search(rf"model\.pt: table '{name}': expected .*{expected}", str(caught.value)), str(caught.value)


@pytest.mark.parametrize("missing", ["_mch_remapped_ids_mapping", "_mch_sorted_raw_ids"])
def test_a_map_of_which_a_part_is_missing_is_refused(tmp_path: Path, missing: str) -> None:
    tensors = state()
    del tensors[f"{MODULE}{missing}"]
    torch.save(tensors, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt: has no tensor .*films\._"):
        open_import("torchrec", tmp_path / "model.pt").keys(ZCH)


def test_a_raw_id_that_two_rows_have_is_refused(tmp_path: Path) -> None:
    torch.save(changed(f"{HASHED}_hash_zch_identities", lambda ids: ids.fill_(5)), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=rf"table '{MPZCH}': expected each raw id once, found 5 twice"):
        open_import("torchrec", tmp_path / "model.pt").keys(MPZCH)


def test_rows_of_a_store_of_keys_are_refused(tmp_path: Path) -> None:
    name = "ebc.embedding_bags.films.weight"
    torch.save({name: torch.ones(2, 2), f"{name}_id": torch.ones(2, 1)}, tmp_path / "model.pt")
    message = r"table 'ebc\.embedding_bags\.films': expected rows by number, found rows of a key-value kernel"
    with pytest.raises(CheckpointError, match=message):
        open_import("torchrec", tmp_path / "model.pt")
