"""Models whose rows are named by keys, and a dict that says what lookups in them give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import RowDtype, TableSpec
from router.feature_schema import FeatureSchema
from router.router import Embeddings
from shard_node.bags import Bags
from shardrank_testing.bags import bags_of, by_bag
from shardrank_testing.snapshots import DEFAULT_DENSE_MODEL, random_rows, write_snapshot
from shardrank_testing.topologies import decoded_rows

EXTREMES = (0, -1, 1, 2**63 - 1, -(2**63), 2**31, -(2**31))
CAPACITY = 400


def keyed_spec(dtype: RowDtype = "int8") -> ModelSpec:
    """Four tables with keys, of every `missing` and pooling, one in slices; and two without, of the same width."""
    shape: dict[str, Any] = {"dtype": dtype, "num_embeddings": CAPACITY}
    tables = (
        TableSpec(name="films", keys="int64", embedding_dim=8, feature_names=("film", "weighted"), **shape),
        TableSpec(name="plain", embedding_dim=8, feature_names=("plain",), **shape),
        TableSpec(
            name="shops",
            keys="int64",
            embedding_dim=8,
            missing="mean",
            pooling="mean",
            feature_names=("shop",),
            **shape,
        ),
        TableSpec(
            name="words", keys="int64", embedding_dim=8, missing="skip", feature_names=("word", "words"), **shape
        ),
        TableSpec(
            name="wide",
            keys="int64",
            embedding_dim=12,
            column_dims=(8, 4),
            missing="skip",
            pooling="mean",
            feature_names=("wide",),
            **shape,
        ),
    )
    features = (
        FeatureSpec(name="film", side="candidate"),
        FeatureSpec(name="weighted", side="candidate", weighted=True),
        FeatureSpec(name="plain", side="candidate"),
        FeatureSpec(name="shop", side="candidate"),
        FeatureSpec(name="word", side="candidate", pooling="mean"),
        FeatureSpec(name="words", side="context", pooling="none"),
        FeatureSpec(name="wide", side="candidate"),
    )
    return ModelSpec(model="m", tables=tables, features=features, dense_model=DEFAULT_DENSE_MODEL)


def random_keys(rng: np.random.Generator, count: int) -> np.ndarray:
    """Different keys of the whole range, small ones and the extremes among them."""
    drawn = np.concatenate([EXTREMES, rng.integers(-(2**63), 2**63 - 1, count), rng.integers(-99, 99, count)])
    return rng.permutation(np.unique(drawn.astype(np.int64)))[:count]


class KeyedModel:
    """A snapshot of `keyed_spec`, and what its lookups must give: rows by key, as stored.

    Attributes:
        rows: by table with keys, float32 [dim] by key.
    """

    def __init__(self, folder: Path, dtype: RowDtype = "int8", seed: int = 0, num_keys: int = 90) -> None:
        self.rng, self.spec = np.random.default_rng(seed), keyed_spec(dtype)
        self.keyed = {table.name: table for table in self.spec.tables if table.keys is not None}
        # As they were given, and by key as they are worth once stored.
        self._given: dict[str, dict[int, np.ndarray]] = {name: {} for name in self.keyed}
        self.rows: dict[str, dict[int, np.ndarray]] = {name: {} for name in self.keyed}
        for name, table in self.keyed.items():
            self.put(name, random_keys(self.rng, num_keys), random_rows(self.rng, num_keys, table.embedding_dim))
        self._plain = random_rows(self.rng, CAPACITY, 8)
        self.schema = FeatureSchema.of(self.spec)
        self.export(folder)

    def export(self, folder: Path, **options: Any) -> None:
        """Write the next version, of the rows that there are."""
        tables = {name: np.array(list(given.values()), np.float32) for name, given in self._given.items()}
        keys = {name: np.array(list(given), np.int64) for name, given in self._given.items()}
        tables["plain"] = self._plain
        path, _ = write_snapshot(folder, self.spec, tables=tables, keys=keys, rows_per_file=4096, **options)
        self.snapshot = Snapshot.open(path)
        self.plain = decoded_rows(self.spec.tables[1], self._plain)
        stored = {name: np.array(list(rows.values())) for name, rows in self.rows.items()}
        self._missing = {name: self._missing_row(table, stored[name]) for name, table in self.keyed.items()}

    def some_keys(self, table: str, count: int) -> list[int]:
        """Keys of a table, some that it has and some that it has not."""
        there = list(self.rows[table])
        known = [there[at] for at in self.rng.integers(0, len(there), count)] if there else []
        return [int(key) for key in self.rng.permutation([*known, *random_keys(self.rng, count)])[:count]]

    def put(self, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        """Give keys rows here."""
        self._given[table] |= dict(zip(keys.tolist(), rows, strict=True))
        self.rows[table] |= dict(zip(keys.tolist(), decoded_rows(self.keyed[table], rows), strict=True))

    def upsert(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Give keys, ascending, new rows here; returns them as stored, uint8 [n, bytes of all slices]."""
        spec = self.keyed[table]
        rows = random_rows(self.rng, keys.size, spec.embedding_dim)
        self.put(table, keys, rows)
        columns = np.split(rows, np.cumsum(spec.slice_dims)[:-1], axis=1)
        pieces = zip(spec.slice_dims, columns, strict=True)
        return np.concatenate([RowCodec(spec.dtype, dim).encode(one) for dim, one in pieces], axis=1)

    def delete(self, table: str, keys: np.ndarray) -> None:
        """Take keys out here."""
        for key in keys.tolist():
            self.rows[table].pop(key, None)
            self._given[table].pop(key, None)

    def bags(self, max_bags: int = 4, max_hotness: int = 5) -> Bags:
        """Random bags of all features, with keys that are missing and empty bags."""
        drawn: dict[int, list[list[int]]] = {}
        for number, feature in enumerate(self.schema.features):
            table = self.spec.table_of(feature.name).name
            sizes = self.rng.integers(0, max_hotness + 1, self.rng.integers(0, max_bags + 1)).tolist()
            if table in self.keyed:
                drawn[number] = [self.some_keys(table, size) for size in sizes]
            else:
                drawn[number] = [self.rng.integers(0, CAPACITY, size).tolist() for size in sizes]
        bags = bags_of(drawn)
        is_weighted = np.repeat([feature.weighted for feature in self.schema.features], bags.values_per_key())
        weights = np.where(is_weighted, self.rng.normal(size=bags.num_values), 1.0).astype(np.float32)
        return bags.with_values(bags.values, weights)

    def check(self, bags: Bags, embeddings: Embeddings) -> None:
        """Assert that an answer has the pooled rows of the keys that are there, and tells which are not."""
        missing = list[tuple[int, int, int]]()
        for number, feature in enumerate(self.schema.features):
            assert bags.weights is not None
            values, weights = by_bag(bags.values, bags, number), by_bag(bags.weights, bags, number)
            expected, lengths = list[np.ndarray](), list[int]()
            for place, (bag, factors) in enumerate(zip(values, weights, strict=True)):
                rows = list[np.ndarray]()
                for key, factor in zip(bag.tolist(), factors.tolist(), strict=True):
                    row, is_there = self._row(feature.name, key)
                    missing += [] if is_there else [(number, place, key)]
                    rows += [] if row is None else [row * factor]
                total = np.sum(rows, axis=0) if rows else np.zeros(self.spec.table_of(feature.name).embedding_dim)
                pooling = self.spec.pooling_of(feature.name)
                expected += {"none": rows, "sum": [total], "mean": [total / max(1, len(rows))]}[pooling]
                lengths.append(len(rows))
            found = embeddings.feature(number)
            np.testing.assert_allclose(found, np.array(expected).reshape(found.shape), rtol=1e-4, atol=2e-3)
            assert embeddings.lengths(number).tolist() == lengths
        told = zip(*(one.tolist() for one in (embeddings.missing.feature, embeddings.missing.bag)), strict=True)
        assert list(zip(*zip(*told, strict=True), embeddings.missing.id.tolist(), strict=True)) == missing

    def _row(self, feature: str, key: int) -> tuple[np.ndarray | None, bool]:
        table = self.spec.table_of(feature).name
        if table not in self.keyed:
            return self.plain[key], True
        row = self.rows[table].get(key)
        return (self._missing[table], False) if row is None else (row, True)

    @staticmethod
    def _missing_row(table: TableSpec, stored: np.ndarray) -> np.ndarray | None:
        if table.missing == "skip":
            return None
        mean = stored.mean(axis=0, dtype=np.float64).astype(np.float32)[None]
        return decoded_rows(table, mean)[0] if table.missing == "mean" else np.zeros(table.embedding_dim)
