"""Reads the `.metadata` of `torch.distributed.checkpoint`, which is a pickle, without letting it run code.

The only place that knows pickle, and only because that format leaves no choice: nothing of our own is ever pickled. The
unpickler knows the classes that such metadata is made of and no others.
"""

from __future__ import annotations

import pickle
from pathlib import PurePosixPath
from pickle import UnpicklingError
from typing import IO, Any

import torch

__all__ = ["UnpicklingError", "load_metadata"]

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
    """What the metadata file holds. Raises UnpicklingError for any other class, anything if damaged."""
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
