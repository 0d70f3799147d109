"""Open what training saved, without running anything in it, and match its tensors with a model's spec.

Three forms are understood: safetensors (a file, or a folder of them), a plain `state_dict` file written by
`torch.save`, and a `torch.distributed.checkpoint` folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from loader.checkpoints.named_tensors import Checkpoint, UnpicklingError, shortened
from loader.errors import CheckpointError, ExportError
from loader.snapshot.manifest import ModelSpec, TableSpec
from loader.snapshot.row_source import RowSource, SafetensorsRows, TensorRows

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
    from loader.checkpoints.distributed import DistributedCheckpoint

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
        found: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                handle: Any = safe_open(str(file), framework="pt")
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: can't be read as safetensors: {error}") from error
            for name in names:
                if name in found:
                    raise CheckpointError(f"tensor {name!r} is in both {found[name][0]} and {file}")
                found[name] = file, handle
        super().__init__(path, found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self._entry(name)[1].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor in memory."""
        file, handle = self._entry(name)
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{file}: tensor {name!r}: {error}") from error
        return tensor

    def rows(self, name: str) -> RowSource:
        """Reads rows from the file block by block."""
        try:
            return SafetensorsRows(self._entry(name)[0], name)
        except ExportError as error:
            raise CheckpointError(str(error)) from error


class StateDictCheckpoint(Checkpoint):
    """A state dict written by `torch.save`, mapped. Nested dicts are flattened, their keys joined by dots."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if it can't be read, or holds more than `weights_only` allows."""
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
        super().__init__(path, dict(_flattened(content, "")))

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self._entry(name).shape)

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor, mapped from the file."""
        tensor: torch.Tensor = self._entry(name)
        return tensor

    def rows(self, name: str) -> RowSource:
        """Reads rows of the mapped tensor."""
        try:
            return TensorRows(self.tensor(name), self.path)
        except ExportError as error:
            raise CheckpointError(f"{self.path}: tensor {name!r}: {error}") from error


def _flattened(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the tensors in a nested dict; anything else in it (step counts, settings) is no part of a model."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flattened(value, f"{name}.")


# TorchRec: EmbeddingBagCollection and EmbeddingCollection keep a table's rows under these, whatever wraps them.
_COLLECTIONS = ("embedding_bags", "embeddings")


def match_checkpoint(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dense_prefix: str | None = None,
    table_keys: Mapping[str, str] | None = None,
) -> tuple[dict[str, RowSource], dict[str, torch.Tensor]]:
    """Splits a checkpoint into the rows of every table and the dense model's state dict.

    A table's rows are looked for, behind any prefix, as `embedding_bags.<table>.weight` or `embeddings.<table>.weight`,
    and if there is neither, as `<table>.weight` or `tables.<table>`.

    Args:
        checkpoint: the opened checkpoint.
        spec: the tables to find.
        dense_prefix: take as the dense model only the keys that start with it, and cut it off. Without it, all keys
            that are no table, as they are.
        table_keys: for tables whose key is not found by the names above, their key.

    Returns:
        A row source for every table, and the dense tensors by name.

    Raises:
        CheckpointError: a table's key is missing or ambiguous (the message lists the candidates), a shape differs from
            the spec, the checkpoint has a table that the spec does not, or nothing starts with `dense_prefix`.
    """
    overrides = dict(table_keys or {})
    if unknown := sorted(set(overrides) - {table.name for table in spec.tables}):
        raise CheckpointError(f"table_keys: unknown tables {unknown}")
    names = checkpoint.names()
    keys: dict[str, str] = {}
    for table in spec.tables:
        key = overrides.get(table.name) or _key_of(checkpoint, table, names)
        if key in (taken := {known: name for name, known in keys.items()}):
            raise CheckpointError(f"{checkpoint.path}: tables {taken[key]!r} and {table.name!r} both match key {key!r}")
        found, expected = checkpoint.shape(key), (table.num_embeddings, table.embedding_dim)
        if found != expected:
            raise CheckpointError(
                f"{checkpoint.path}: table {table.name!r}: {key!r} is {list(found)}, the spec says {list(expected)}"
            )
        keys[table.name] = key
    rest = [name for name in names if name not in set(keys.values())]
    dense = _dense_keys(checkpoint, rest, dense_prefix)
    return (
        {table: checkpoint.rows(key) for table, key in keys.items()},
        {name: checkpoint.tensor(key) for name, key in dense.items()},
    )


def _key_of(checkpoint: Checkpoint, table: TableSpec, names: list[str]) -> str:
    specific = [f"{collection}.{table.name}.weight" for collection in _COLLECTIONS]
    general = [f"{table.name}.weight", f"tables.{table.name}"]
    for suffixes in (specific, general):
        found = [name for name in names if any(name == end or name.endswith("." + end) for end in suffixes)]
        if len(found) > 1:
            raise CheckpointError(
                f"{checkpoint.path}: table {table.name!r}: ambiguous, may be any of {shortened(found)}"
            )
        if found:
            return found[0]
    shape = (table.num_embeddings, table.embedding_dim)
    candidates = [name for name in names if checkpoint.shape(name) == shape]
    raise CheckpointError(
        f"{checkpoint.path}: table {table.name!r}: no key ends in any of {specific + general}; "
        f"keys of its shape {list(shape)}: {shortened(candidates)}; all keys: {shortened(names)}"
    )


def _dense_keys(checkpoint: Checkpoint, rest: list[str], dense_prefix: str | None) -> dict[str, str]:
    """Returns the dense model's keys in the checkpoint by their name in the snapshot."""
    if dense_prefix is not None:
        dense = {key.removeprefix(dense_prefix): key for key in rest if key.startswith(dense_prefix)}
        if not dense or "" in dense:
            raise CheckpointError(
                f"{checkpoint.path}: dense_prefix {dense_prefix!r}: no key below it; keys: {shortened(rest)}"
            )
        return dense
    for key in rest:
        parts = key.split(".")
        if len(parts) >= 3 and parts[-1] == "weight" and parts[-3] in _COLLECTIONS:
            raise CheckpointError(
                f"{checkpoint.path}: {key!r} looks like a table, but the spec has none {parts[-2]!r}; "
                "add it to the spec, or say with dense_prefix which keys are the dense model"
            )
    return {key: key for key in rest}
