"""Read a folder written by `torch.distributed.checkpoint` in one process, without a process group.

The library's `.metadata` is a pickle, read by `load_metadata`. Tensors are read by the library itself, which loads
them with `weights_only`.
Memory: the library reads a stored chunk (one rank's shard of a table) as a whole, so one or two chunks bound it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from loader.checkpoints.named_tensors import Checkpoint, UnpicklingError, load_metadata
from loader.errors import CheckpointError, cut
from loader.snapshot.codecs import Float32Array
from loader.snapshot.row_source import FLOAT_DTYPES, RowSource, ShapedRows, file_fingerprint

# Cells of the grid that all chunks' borders make: many chunks along both dims would need more.
MAX_CELLS = 1 << 24


def check_chunks(where: str, shape: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raises CheckpointError unless every element of `shape` is in exactly one chunk.

    The borders of all chunks cut the shape into a grid whose cells are each wholly inside or outside of every chunk; it
    is enough to count the chunks of each cell.
    `chunks` are the offset of each chunk's first element, and its sizes; `where` names the tensor in errors.
    """
    for offsets, sizes in chunks:
        fits = len(offsets) == len(sizes) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= dim
            for start, size, dim in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            chunk = f"chunk at {cut(list(offsets))} of size {cut(list(sizes))}"
            raise CheckpointError(f"{where}: {chunk} is not inside its shape {cut(list(shape))}")
    borders = [
        np.unique([0, size, *(edge for start, length in chunks for edge in (start[dim], start[dim] + length[dim]))])
        for dim, size in enumerate(shape)
    ]
    cells = [len(edges) - 1 for edges in borders]
    if math.prod(cells) > MAX_CELLS:
        raise CheckpointError(f"{where}: {len(chunks)} chunks cut it into {cells} cells; at most {MAX_CELLS} in all")
    count = np.zeros(cells, np.int64)
    for offsets, sizes in chunks:
        region = tuple(
            slice(np.searchsorted(edges, start), np.searchsorted(edges, start + size))
            for edges, start, size in zip(borders, offsets, sizes, strict=True)
        )
        count[region] += 1
    wrong = np.argwhere(count != 1)
    if len(wrong):
        cell = tuple(wrong[0].tolist())
        part = [f"{edges[at]}:{edges[at + 1]}" for edges, at in zip(borders, cell, strict=True)]
        found = f"is in {count[cell]} of its {len(chunks)} chunks" if count[cell] else "is in none of its chunks"
        raise CheckpointError(f"{where} {list(shape)}: the part [{', '.join(part)}] {found}")


METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 1 << 30


class DistributedCheckpoint(Checkpoint):
    """Tensors of a distributed checkpoint; what is not a tensor in it is left alone."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if the metadata can't be read, or holds what metadata never does."""
        metadata = _read_metadata(path)
        found = metadata.state_dict_metadata.items()
        super().__init__(path, {name: one for name, one in found if isinstance(one, TensorStorageMetadata)})
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self._entry(name).size)

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor, put together from all its chunks."""
        size = self._covered_entry(name).size
        return self.read_part(name, ChunkStorageMetadata(torch.Size([0] * len(size)), size))

    def rows(self, name: str) -> RowSource:
        """Reads rows chunk by chunk."""
        entry: TensorStorageMetadata = self._entry(name)
        if len(entry.size) != 2 or entry.properties.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: expected floats [rows, dim], "
                f"got {entry.properties.dtype} {list(entry.size)}"
            )
        return ChunkedRows(self, name, self._covered_entry(name))

    def read_part(self, name: str, part: ChunkStorageMetadata) -> torch.Tensor:
        """Reads a tensor's part at `part.offsets` of `part.sizes`, which chunks must cover. Raises CheckpointError."""
        entry: TensorStorageMetadata = self._entry(name)
        target = torch.empty(part.sizes, dtype=entry.properties.dtype)
        items = create_read_items_for_chunk_list(name, entry, [part])
        try:
            self._reader.read_data(LoadPlan(items), _IntoTensor(target)).wait()
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, AssertionError, UnpicklingError) as error:
            raise CheckpointError(f"{self.path}: tensor {name!r}: can't be read: {error!r}") from error
        return target

    def _covered_entry(self, name: str) -> TensorStorageMetadata:
        """The tensor's metadata. Raises CheckpointError unless its chunks make up its shape, each element once."""
        entry: TensorStorageMetadata = self._entry(name)
        where = f"{self.path}: tensor {name!r}"
        try:
            chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            check_chunks(where, tuple(entry.size), chunks)
        except (TypeError, AttributeError) as error:
            raise CheckpointError(f"{where}: its chunks are not described as chunks are: {cut(error)}") from error
        return entry


class ChunkedRows(ShapedRows):
    """Rows of one table of a distributed checkpoint. Keeps the chunks that the last block came from, and no others."""

    def __init__(self, checkpoint: DistributedCheckpoint, name: str, entry: TensorStorageMetadata) -> None:
        super().__init__(*entry.size)
        self._checkpoint = checkpoint
        self._name = name
        self._chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
        self._loaded: dict[tuple[int, ...], torch.Tensor] = {}

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        """One block, put together from the chunks that hold these rows, be the table split by rows or by columns."""
        last_row = min(first_row + max_rows, self.num_embeddings)
        wanted = [
            chunk
            for chunk in self._chunks
            if chunk.offsets[0] < last_row and first_row < chunk.offsets[0] + chunk.sizes[0]
        ]
        kept = {tuple(chunk.offsets) for chunk in wanted}
        self._loaded = {offsets: tensor for offsets, tensor in self._loaded.items() if offsets in kept}
        block = torch.empty(last_row - first_row, self.embedding_dim)
        for chunk in wanted:
            row, column = chunk.offsets
            if (row, column) not in self._loaded:
                self._loaded[row, column] = self._checkpoint.read_part(self._name, chunk)
            start, stop = max(first_row, row), min(last_row, row + chunk.sizes[0])
            columns = slice(column, column + chunk.sizes[1])
            block[start - first_row : stop - first_row, columns] = self._loaded[row, column][start - row : stop - row]
        yield block.numpy()

    def fingerprint(self) -> str:
        """Of the checkpoint's metadata file, which every save writes anew, and the tensor's name."""
        return file_fingerprint(self._checkpoint.path / METADATA_NAME, self._name)


class _IntoTensor(LoadPlanner):
    """Has the library's reader copy what it reads into one tensor; the planning methods are not used."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn!r} is not a tensor")

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError


def _read_metadata(path: Path) -> Metadata:
    file = path / METADATA_NAME
    try:
        if file.stat().st_size > MAX_METADATA_BYTES:
            raise CheckpointError(f"{file}: larger than {MAX_METADATA_BYTES} bytes")
        with file.open("rb") as stream:
            metadata = load_metadata(stream)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{file}: not the metadata of a distributed checkpoint: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{file}: not the metadata of a distributed checkpoint")
    for info in metadata.storage_data.values():
        if PurePath(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{file}: path {info.relative_path!r} is not a plain file name")
    return metadata
