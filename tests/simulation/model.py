"""The model that the fleet serves, in versions whose every score tells of what it was made.

A score is sigmoid(-2 + code / 2^18), so its logit gives back the code's 20 bits, exactly: from the row 3 bits of the
row's number, 8 of the last update that wrote it (0: as in the snapshot) and 3 of the version that it is of; from the
dense weights 3 bits of their version and 3 of the dense step. Every candidate is one row.
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
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot

MODEL = "m"
NUM_ROWS = 24
DIM = 4
SCALE = 2.0**-18
MAX_STAMP = 255
MAX_STEP = 7


@dataclass(frozen=True)
class Version:
    """A version: the stream that it continues, the last delta that it contains, and what is wrong with it."""

    number: int
    base: int
    last_delta: int = 0
    is_broken: bool = False
    is_worse: bool = False


VERSIONS = {
    one.number: one
    for one in (
        Version(1, 1),
        Version(2, 1, 3),
        Version(3, 3),
        Version(4, 1, 6),
        Version(5, 5, is_broken=True),
        Version(6, 6, is_worse=True),
        Version(7, 3, 4),
    )
}


class Code(NamedTuple):
    """What a score was made of."""

    row: int
    stamp: int
    row_version: int
    dense_version: int
    dense_step: int


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
    weight = torch.zeros(1, DIM)
    weight[0, 0] = 1.0
    return {
        "mlp.layers.0.weight": weight,
        "mlp.layers.0.bias": torch.tensor([-2.0 + (version << 3 | step) * SCALE]),
    }


def decode(score: float) -> Code:
    """Return what a score was made of."""
    code = round((math.log(score / (1.0 - score)) + 2.0) / SCALE)
    return Code(code >> 17, code >> 9 & 255, code >> 6 & 7, code >> 3 & 7, code & 7)


def model_spec() -> ModelSpec:
    """Return one table and one feature of candidates."""
    table = TableSpec(name="items", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=("item",), dtype="fp32")
    return ModelSpec(
        model=MODEL,
        tables=(table,),
        features=(FeatureSpec(name="item", side="candidate"),),
        dense_model=DenseModelSpec(kind="mlp", config={"hidden": []}),
    )


@functools.cache
def snapshots() -> tuple[Path, dict[int, PublishedVersion], str, Any]:
    """Export all versions, once for all seeds, into a folder in memory where there is one.

    Returns their store, records and description, and what removes the folder when the interpreter ends.
    """
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = tempfile.TemporaryDirectory(prefix="simulation-", dir=where)
    store, spec, records = Path(folder.name), model_spec(), {}
    rows = np.arange(NUM_ROWS)
    for number, version in VERSIONS.items():
        path = export_snapshot(
            store,
            spec,
            rows={"items": ArrayRows(row_values(number, rows, 0))},
            dense=dense_weights(number, 0),
            version=number,
            **({"delta_base": version.base, "last_delta": version.last_delta} if version.base != number else {}),
        )
        snapshot = Snapshot.open(path, verify=False)
        records[number] = PublishedVersion(
            model=MODEL,
            version=number,
            identity=snapshot.identity,
            delta_base=version.base,
            last_delta=version.last_delta,
            rows_bytes=NUM_ROWS * DIM * 4,
            published_at=1.0,
        )
    return store, records, spec.model_dump_json(), folder
