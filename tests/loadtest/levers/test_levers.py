"""What levers cost and save: bytes as they are stored, and rows as a snapshot has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from loadtest.levers.movielens import as_stored, describe, levers_of, stored_bytes
from serving.training.dataset import FilmsDataset
from serving.training.trainer import export_trained, train_described
from shardrank_testing.movielens import small_interactions

DATA = small_interactions()


def test_every_lever_describes_a_model_of_fewer_bytes_than_the_first() -> None:
    every = levers_of(DATA)
    assert len({(one.group, one.name) for one in every}) == len(every)
    for lever in every:
        assert {one.name for one in describe(DATA, lever).compiled().features} >= {"user_id", "history", "film_id"}
    assert describe(DATA, every[0]).compiled().table_of("zip_film").dtype == "fp32"


def test_bytes_and_rows_are_those_of_the_snapshot(tmp_path: Path) -> None:
    lever, dataset = levers_of(DATA)[-1], FilmsDataset.split(DATA, seed=0)
    model = train_described(dataset, describe(DATA, lever), pruning=lever.pruning, epochs=1)
    snapshot = Snapshot.open(export_trained(model, dataset, tmp_path))
    decoded, size = as_stored(model).tables, 0
    for table in snapshot.spec.tables:
        rows = snapshot.read_rows(table.name, 0, table.num_embeddings)
        size += rows.nbytes
        found = RowCodec(table.dtype, table.embedding_dim).decode(rows)
        np.testing.assert_array_equal(found, decoded[table.name])
    classes = [snapshot.row_classes(one.name) for one in snapshot.spec.divided if one.num_classes > 1]
    size += sum(bitmap.size_bytes for one in classes for bitmap in one.bitmaps)
    size += sum(one.nbytes for name, one in snapshot.dense_tensors().items() if name.startswith("projections."))
    assert stored_bytes(model) == size
