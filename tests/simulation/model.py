"""The model that the fleet serves, in versions whose every score tells of what it was made.

A score is sigmoid(-2 + code / 2^18), so its logit gives back the code's 20 bits, exactly: from the row 3 bits of the
row's number, 8 of the last update that wrote it (0: as in the snapshot) and 3 of the version that it is of; from the
dense weights 3 bits of their version and 3 of the dense step. Every candidate is one row, by number or by key; what is
known of both is by one number, since no key is a row's. A key that is missing has zeros.
"""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loader.registry.fleet import PublishedVersion
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.publishing import rows_bytes_of
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from shard_node.engine.key_index import index_bytes

MODEL = "m"
NUM_ROWS = 24
KEYS = (-1, 99, -(2**63), 2**31, -2, 2**63 - 1, -3, 2**53, 2**32, -(2**31), 25, -(2**53), 26, -(2**32))
"""All that are ever given a row: of two shards the second has ten of them."""
EVERYTHING = [*range(NUM_ROWS), *KEYS]
FEW_KEYS = 7
"""The capacity that a fleet may begin with, and exceed."""
MARK = 1 << 40
"""Deletions are told apart by a key that is nowhere: this, and their stamp."""
DIM = 4
SCALE = 2.0**-18
MISSING = -1
"""In place of the last stamp of a row that is not there."""
STAMPS, STEPS = range(1, 255), range(1, 8)


@dataclass(frozen=True)
class Version:
    """A version: the stream that it continues, the last delta that it contains, and what is wrong with it."""

    number: int
    base: int
    last_delta: int = 0
    is_broken: bool = False
    is_worse: bool = False

    @property
    def keys(self) -> tuple[int, ...]:
        """Return the keys that the snapshot has."""
        return KEYS[self.number % 3 :: 3]

    def capacity(self, least: int) -> int:
        """Return how many keys a shard of it takes, where those that a fleet begins with take `least`."""
        return len(KEYS) if self.number in (4, 7) else least


_FIRST = (Version(1, 1), Version(2, 1, 3), Version(3, 3), Version(4, 1, 6))
_LAST = (Version(5, 5, is_broken=True), Version(6, 6, is_worse=True), Version(7, 3, 4))
VERSIONS = {one.number: one for one in (*_FIRST, *_LAST)}


class Code(NamedTuple):
    """What a score was made of."""

    row: int
    stamp: int
    row_version: int
    dense_version: int
    dense_step: int

    @property
    def seen(self) -> int:
        """Return the last update that wrote the row, 0 for none, or that it is missing."""
        return self.stamp if (self.row, self.stamp, self.row_version) != (0, 0, 0) else MISSING


def row_bits(version: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bits that tell rows apart. Those of a worse version give other scores."""
    return rows % 4 + (4 if VERSIONS[version].is_worse else 0)


def row_values(version: int, rows: npt.NDArray[np.int64], stamp: int) -> npt.NDArray[np.float32]:
    """Return rows of a version: float32 [n, DIM]."""
    values = np.zeros((rows.size, DIM), np.float32)
    values[:, 0] = (row_bits(version, rows) << 17 | stamp << 9 | version << 6) * SCALE
    return values


def dense_weights(version: int, step: int) -> dict[str, torch.Tensor]:
    """Return the dense model of a version, at a step; 0 is the snapshot's."""
    weight = torch.tensor([[1.0] + [0.0] * (DIM - 1)] * 2).reshape(1, 2 * DIM)
    return {
        "mlp.layers.0.weight": weight,
        "mlp.layers.0.bias": torch.tensor([-2.0 + (version << 3 | step) * SCALE]),
    }


def decode(score: float) -> Code:
    """Return what a score was made of."""
    code = round((math.log(score / (1.0 - score)) + 2.0) / SCALE)
    return Code(code >> 17, code >> 9 & 255, code >> 6 & 7, code >> 3 & 7, code & 7)


def model_spec(capacity: int) -> ModelSpec:
    """Return two tables, one of them with keys, and a feature of candidates for each."""
    shape: Any = {"embedding_dim": DIM, "dtype": "fp32"}
    tables = (
        TableSpec(name="items", num_embeddings=NUM_ROWS, feature_names=("item",), **shape),
        TableSpec(name="keys", num_embeddings=capacity, feature_names=("key",), keys="int64", **shape),
    )
    features = tuple(FeatureSpec(name=name, side="candidate") for name in ("item", "key"))
    dense = DenseModelSpec(kind="mlp", config={"hidden": []})
    return ModelSpec(model=MODEL, tables=tables, features=features, dense_model=dense)


@functools.cache
def rows_of(shard: int, num_shards: int) -> dict[int, bool]:
    """Return the rows of a shard, and which of them are by key."""
    tables = model_spec(len(KEYS)).tables
    shards = np.stack([RowBuckets.of(table).of_rows(np.array(EVERYTHING)) % num_shards for table in tables])
    return {row: row in KEYS for at, row in enumerate(EVERYTHING) if shards[int(row in KEYS), at] == shard}


def bytes_of(num_shards: int) -> int:
    """Return what a version takes in memory, at a shard that has all keys."""
    return 4 * DIM * (NUM_ROWS // num_shards + 1 + len(KEYS)) + index_bytes([len(KEYS)])


@functools.cache
def snapshots(capacity: int) -> tuple[Path, dict[int, PublishedVersion], dict[int, str], Any]:
    """Export all versions, once for all seeds of a capacity, into a folder in memory where there is one.

    Returns their store, records and descriptions, and what removes the folder when the interpreter ends.
    """
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = tempfile.TemporaryDirectory(prefix="simulation-", dir=where)
    store, records, specs = Path(folder.name), {}, {}
    for number, version in VERSIONS.items():
        rows, keys, spec = np.arange(NUM_ROWS), np.array(version.keys), model_spec(version.capacity(capacity))
        given = {name: ArrayRows(row_values(number, of, 0)) for name, of in (("items", rows), ("keys", keys))}
        start: Any = {"delta_base": version.base, "last_delta": version.last_delta}
        options: Any = {"keys": {"keys": keys}, "dense": dense_weights(number, 0), "version": number}
        path = export_snapshot(store, spec, rows=given, **options, **(start if version.base != number else {}))
        start |= {"identity": Snapshot.open(path, verify=False).identity, "rows_bytes": rows_bytes_of(spec)}
        records[number] = PublishedVersion(model=MODEL, version=number, published_at=1.0, **start)
        specs[number] = spec.model_dump_json()
    return store, records, specs, folder
