"""Define what every form of a checkpoint is (named tensors, rows in blocks), and unpickle metadata safely.

The only place that knows pickle, because the format of `torch.distributed.checkpoint` leaves no choice: nothing of our
own is ever pickled. The unpickler knows the classes that such metadata is made of and no others.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import IO, Any

import torch

from loader.errors import CheckpointError
from loader.snapshot.row_source import RowSource

__all__ = ["Checkpoint", "UnpicklingError", "load_metadata", "shortened"]

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = {
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}


def load_metadata(stream: IO[bytes]) -> Any:
    """Returns what the metadata file holds. Raises UnpicklingError for any other class, anything if damaged."""
    return _MetadataUnpickler(stream).load()


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of checkpoint metadata and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name.split(".")[0] == "pathlib":
            return PurePosixPath  # the folder it was saved to: of no use here, and a pure path touches no disk
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        if (module_name, global_name) not in _METADATA_CLASSES:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of checkpoint metadata")
        return super().find_class(module_name, global_name)


class Checkpoint(ABC):
    """Named tensors that are read only when asked for.

    Every method raises CheckpointError if there is no such tensor, or it can't be read. `entries` is what a form knows
    of each tensor, by name.
    """

    def __init__(self, path: Path, entries: Mapping[str, Any]) -> None:
        self.path = path
        self._entries = entries

    def names(self) -> list[str]:
        """Returns the names of all tensors, sorted."""
        return sorted(self._entries)

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape, without reading it."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor in memory, or mapped."""

    @abstractmethod
    def rows(self, name: str) -> RowSource:
        """Returns a matrix of floats as a source of rows. Raises CheckpointError if it is not one."""

    def _entry(self, name: str) -> Any:
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}; it has {shortened(self.names())}")
        return self._entries[name]


def shortened(names: list[str], limit: int = 20) -> str:
    """Returns the first names as text, for a message."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{names[:limit]}{more}"
