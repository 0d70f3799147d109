"""Snapshots for models that nobody trains: random rows and a random dense model, written in bounded memory."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from loader.progress import Progress, no_progress
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_source import RowSource
from loader.snapshot.store import WORK_FOLDER_PREFIX
from loader.snapshot.writer import export_snapshot
from loadtest.workloads.errors import PrepareError
from serving.models.ranking_models import build_model
from shard_node.bags import Float32Array
from shard_node.engine.arena import row_bytes_of

# Sums of 100 such rows, and so logits, stay of the order of 1.
ROW_LIMIT = 0.08
BLOCK_BYTES = 4 << 20


class RandomRows(RowSource):
    """A table of uniform numbers in ±ROW_LIMIT: the same rows for the same seed, whichever of them are asked for.

    Args:
        seed: of the rows.
        table: its name, so that tables of one seed differ.
        num_embeddings, embedding_dim: its shape.
    """

    def __init__(self, seed: int, table: str, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self._seed = (seed, zlib.crc32(table.encode()))
        self._block_rows = max(1, BLOCK_BYTES // (4 * embedding_dim))

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        """As `RowSource.blocks`; blocks of about 4 MiB."""
        last_row = min(first_row + max_rows, self.num_embeddings)
        while first_row < last_row:
            number, skipped = divmod(first_row, self._block_rows)
            block = self._block(number)[skipped : skipped + last_row - first_row]
            yield block
            first_row += block.shape[0]

    def fingerprint(self) -> str:
        """Of what the rows are drawn from."""
        return f"random {self._seed} {ROW_LIMIT} {self._block_rows}"

    def _block(self, number: int) -> Float32Array:
        rng = np.random.Generator(np.random.SFC64((*self._seed, number)))
        block = rng.random((self._block_rows, self.embedding_dim), dtype=np.float32)
        block -= np.float32(0.5)
        block *= np.float32(2 * ROW_LIMIT)
        return block


def random_dense(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    """Weights by name that keep the size of what passes the layers and their ReLUs; biases of 0."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=draw) * (2 / tensor.shape[-1]) ** 0.5
        if tensor.ndim > 1
        else torch.zeros(tensor.shape)
        for name, tensor in build_model(spec).state_dict().items()
    }


def snapshot_bytes(spec: ModelSpec) -> int:
    """Bytes of all rows as they are stored."""
    return sum(table.num_embeddings * row_bytes_of(table.dtype, table.embedding_dim) for table in spec.tables)


def unfinished_bytes(store: Path, model: str) -> int:
    """Bytes that interrupted exports of a model left in a store: the same export goes on with them.

    Raises:
        OSError: a folder that can't be read.
    """
    left = (store / model).glob(f"{WORK_FOLDER_PREFIX}*/**/*")
    return sum(path.stat().st_size for path in left if path.is_file())


def write_random_snapshot(spec: ModelSpec, store: Path, *, seed: int = 0, progress: Progress = no_progress) -> Path:
    """Writes the next version of a model into a store.

    Args:
        spec: the model; its tables need the identity or hash mapping, for which there is no vocabulary to write.
        store: the store's folder; made if it is not there.
        seed: of rows and weights.
        progress: told the rows written per table.

    Returns:
        The snapshot's folder.

    Raises:
        PrepareError: the disk has too little room.
        ExportError: as `loader.snapshot.writer.export_snapshot`.
        RankingModelError: if the dense model's description is not valid.
    """
    _check_room(spec, store)
    rows = {
        table.name: RandomRows(seed, table.name, table.num_embeddings, table.embedding_dim) for table in spec.tables
    }
    return export_snapshot(
        store,
        spec,
        rows=rows,
        dense=random_dense(spec, seed),
        metadata={"source": "random rows", "seed": str(seed)},
        progress=progress,
    )


def _check_room(spec: ModelSpec, store: Path) -> None:
    try:
        store.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(store).free
        needed = snapshot_bytes(spec) - unfinished_bytes(store, spec.model)
    except OSError as error:
        raise PrepareError(f"{store}: {error.strerror or error}") from error
    if needed > free:
        raise PrepareError(f"{store}: {needed} bytes of rows to write, but {free} are free; take a smaller scale")
