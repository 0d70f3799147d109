"""Opens what training saved, without running anything that is in it: named tensors, and rows read in blocks.

Three forms are understood: safetensors (a file, or a folder of them), a plain `state_dict` file written by
`torch.save`, and a `torch.distributed.checkpoint` folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from loader.errors import CheckpointError, ExportError
from loader.metadata_unpickler import UnpicklingError
from loader.named_tensors import Checkpoint
from loader.row_source import RowSource, SafetensorsRows, TensorRows

_STATE_DICT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a checkpoint; its form is told by its name and contents.

    Args:
        path: a `.safetensors` file or a folder of them; a `.pt`, `.pth`, `.bin` or `.ckpt` file with a state dict; or a
            folder that `torch.distributed.checkpoint` wrote.

    Raises:
        CheckpointError: it is none of these, can't be read, or holds objects other than tensors and plain data.
    """
    # Imported here: the distributed checkpoint library is slow to import, and few processes need it.
    from loader.distributed_checkpoint import DistributedCheckpoint

    at = Path(path)
    if at.is_dir():
        if (at / ".metadata").is_file():
            return DistributedCheckpoint(at)
        if files := sorted(at.glob("*.safetensors")):
            return SafetensorsCheckpoint(at, files)
        raise CheckpointError(f"{at}: holds neither .safetensors files nor the .metadata of a distributed checkpoint")
    if not at.is_file():
        raise CheckpointError(f"{at}: no such file or folder")
    if at.suffix == ".safetensors":
        return SafetensorsCheckpoint(at, [at])
    if at.suffix in _STATE_DICT_SUFFIXES:
        return StateDictCheckpoint(at)
    allowed = ", ".join((".safetensors", *_STATE_DICT_SUFFIXES))
    raise CheckpointError(f"{at}: file name must end in one of {allowed}")


class SafetensorsCheckpoint(Checkpoint):
    """Tensors of one or several safetensors files."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        """Raises CheckpointError if a file can't be read or two have a tensor of the same name."""
        super().__init__(path)
        self._file_of: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        for file in files:
            try:
                handle: Any = safe_open(str(file), framework="pt")
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: can't be read as safetensors: {error}") from error
            for name in names:
                if name in self._file_of:
                    raise CheckpointError(f"tensor {name!r} is in both {self._file_of[name]} and {file}")
                self._file_of[name] = file
            self._handles[file] = handle

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in memory."""
        try:
            tensor: torch.Tensor = self._handle(name).get_tensor(name)
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{self._file_of[name]}: tensor {name!r}: {error}") from error
        return tensor

    def rows(self, name: str) -> RowSource:
        """Rows read from the file block by block."""
        self._handle(name)
        try:
            return SafetensorsRows(self._file_of[name], name)
        except ExportError as error:
            raise CheckpointError(str(error)) from error

    def _handle(self, name: str) -> Any:
        if name not in self._file_of:
            raise self._unknown(name)
        return self._handles[self._file_of[name]]


class StateDictCheckpoint(Checkpoint):
    """A state dict written by `torch.save`, mapped. Nested dicts are flattened, their keys joined by dots."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if it can't be read, or holds more than `weights_only` allows."""
        super().__init__(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except UnpicklingError as error:
            raise CheckpointError(
                f"{path}: holds objects other than tensors and plain data, and loading these could run code; "
                f"save the state_dict alone: {error}"
            ) from error
        except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: can't be read as a state_dict in torch's zip format: {error}") from error
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a state_dict")
        self._tensors = dict(_flattened(content, ""))

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self.tensor(name).shape)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, mapped from the file."""
        if name not in self._tensors:
            raise self._unknown(name)
        return self._tensors[name]

    def rows(self, name: str) -> RowSource:
        """Rows of the mapped tensor."""
        try:
            return TensorRows(self.tensor(name), self.path)
        except ExportError as error:
            raise CheckpointError(f"{self.path}: tensor {name!r}: {error}") from error


def _flattened(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a nested dict; anything else in it (step counts, settings) is no part of a model."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flattened(value, f"{name}.")
