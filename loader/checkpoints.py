"""Open what training saved, without running anything in it, and match its tensors with a model's spec.

Three forms are understood: safetensors (a file, or a folder of them), a plain `state_dict` file written by
`torch.save`, and a `torch.distributed.checkpoint` folder.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from loader.errors import CheckpointError, ExportError, cut
from loader.snapshot.buckets import Int64Array
from loader.snapshot.codecs import Float32Array
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_source import FLOAT_DTYPES, ArrayRows, RowSource, file_fingerprint
from loader.snapshot.tables import AnyTable, DividedTable, projection_name

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
}

Chunk: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset of a chunk's first element in its tensor, and the chunk's sizes."""
_QUOTED_NAMES = 20
_METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
_STATE_DICT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# TorchRec: EmbeddingBagCollection and EmbeddingCollection keep a table's rows under these, whatever wraps them.
_COLLECTIONS = ("embedding_bags", "embeddings")


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of a distributed checkpoint's metadata, which is a pickle, and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name.split(".")[0] == "pathlib":
            return PurePosixPath  # the folder it was saved to: of no use here, and a pure path touches no disk
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        if global_name not in _METADATA_CLASSES.get(module_name, ()):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of checkpoint metadata")
        return super().find_class(module_name, global_name)


class Checkpoint(ABC):
    """Named tensors that are read only when asked for.

    Every method raises CheckpointError if there is no such tensor, or it can't be read. `notes` are lines for whoever
    takes it into a snapshot.
    """

    notes: Sequence[str] = ()

    def __init__(self, path: Path, entries: Mapping[str, Any]) -> None:
        self.path = path
        self._entries = entries

    def names(self) -> list[str]:
        """Return the names, sorted."""
        return sorted(self._entries)

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in memory, or mapped."""

    @abstractmethod
    def rows(self, name: str) -> RowSource:
        """Return a matrix of floats as a source of rows. Raises CheckpointError if it is not one."""

    def keys(self, name: str) -> Int64Array | None:
        """Return the keys that name a table's rows, int64 [n], in their order; None if their numbers do."""
        return None

    @property
    def tables(self) -> Mapping[str, str]:
        """Tensors that are tables whatever a model's description says, and their number format."""
        return {}

    def _entry(self, name: str) -> Any:
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}; it has {shortened(self.names())}")
        return self._entries[name]


def shortened(names: list[str]) -> str:
    """Return the first names as text, for a message."""
    more = f" and {len(names) - _QUOTED_NAMES} more" if len(names) > _QUOTED_NAMES else ""
    return f"{names[:_QUOTED_NAMES]}{more}"


def check_chunks(where: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
    """Raise CheckpointError unless every element of `shape` is in exactly one chunk; `where` names the tensor."""
    texts = [f"{where}: chunk at {cut(list(offsets))} of size {cut(list(sizes))}" for offsets, sizes in chunks]
    for text, (offsets, sizes) in zip(texts, chunks, strict=True):
        fits = len(offsets) == len(sizes) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= dim
            for start, size, dim in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            raise CheckpointError(f"{text} is not inside its shape {cut(list(shape))}")
    bounds = np.array(chunks, np.int64).reshape(len(chunks), 2, len(shape))
    begins, ends = bounds[:, 0], bounds.sum(axis=1)
    for index, text in enumerate(texts):
        shared = np.minimum(ends[index], ends[:index]) - np.maximum(begins[index], begins[:index])
        if (shared > 0).all(axis=1).any():
            raise CheckpointError(f"{text} overlaps another one")
    elements, total = sum(math.prod(sizes) for _, sizes in chunks), math.prod(shape)
    if elements != total:
        raise CheckpointError(f"{where} {list(shape)}: its chunks hold {elements} of its {total} elements")


class _DistributedCheckpoint(Checkpoint):
    # `.metadata` says which chunks (a rank's part of a tensor, as `torch.save` wrote it) make up a tensor.
    # One chunk is read at a time; two of them bound the memory.

    def __init__(self, path: Path) -> None:
        file = path / _METADATA_NAME
        try:
            if file.stat().st_size > _MAX_METADATA_BYTES:
                raise CheckpointError(f"{file}: larger than {_MAX_METADATA_BYTES} bytes")
            with file.open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
            for info in metadata.storage_data.values():
                if PurePath(info.relative_path).name != info.relative_path:
                    raise CheckpointError(f"{file}: path {info.relative_path!r} is not a plain file name")
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            raise CheckpointError(f"{file}: not the metadata of a distributed checkpoint: {error}") from error
        entries = metadata.state_dict_metadata.items()
        super().__init__(path, {name: entry for name, entry in entries if hasattr(entry, "chunks")})
        self._stored = {(at.fqn, tuple(at.offset or ())): info for at, info in metadata.storage_data.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name).size)

    def tensor(self, name: str) -> torch.Tensor:
        entry = self._entry(name)
        target = torch.empty(entry.size, dtype=entry.properties.dtype)
        for offsets, sizes in self._chunks_of(name):
            part = target[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            part.copy_(self.read_chunk(name, offsets, sizes))
        return target

    def rows(self, name: str) -> RowSource:
        entry = self._entry(name)
        if len(entry.size) != 2 or entry.properties.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: expected floats [rows, dim], "
                f"got {entry.properties.dtype} {list(entry.size)}"
            )
        return _ChunkedRows(self, name, self._chunks_of(name))

    def read_chunk(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        where = f"{self.path}: tensor {name!r}: can't be read"
        try:
            info = self._stored[name, offsets]
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{where}: it is stored with {cut(info.transform_descriptors)}")
            with (self.path / info.relative_path).open("rb") as file:
                if not 0 <= info.offset <= info.offset + info.length <= os.fstat(file.fileno()).st_size:
                    raise CheckpointError(f"{where}: {info.relative_path} ends before it does")
                file.seek(info.offset)
                content = io.BytesIO(file.read(info.length))
            chunk: torch.Tensor = torch.load(content, map_location="cpu", weights_only=True)
            if tuple(chunk.shape) != sizes:
                raise CheckpointError(f"{where}: a chunk is {list(chunk.shape)}, stated is {list(sizes)}")
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file raises nearly anything
            raise CheckpointError(f"{where}: {error!r}") from error
        return chunk.detach()

    def _chunks_of(self, name: str) -> list[Chunk]:
        """Return the chunks that are not empty. Raises CheckpointError unless they make up the tensor's shape."""
        entry = self._entry(name)
        where = f"{self.path}: tensor {name!r}"
        try:
            chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            check_chunks(where, tuple(entry.size), chunks)
        except (TypeError, AttributeError) as error:
            raise CheckpointError(f"{where}: its chunks are not described as chunks are: {cut(error)}") from error
        return [(offsets, sizes) for offsets, sizes in chunks if 0 not in sizes]


class _ChunkedRows(RowSource):
    """Rows of one table of a distributed checkpoint. Keeps the chunks that the last block came from, and no others."""

    def __init__(self, checkpoint: _DistributedCheckpoint, name: str, chunks: list[Chunk]) -> None:
        super().__init__(*checkpoint.shape(name))
        self._checkpoint, self._name, self._chunks = checkpoint, name, chunks
        self._loaded: dict[tuple[int, ...], torch.Tensor] = {}

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        last_row = min(first_row + max_rows, self.num_embeddings)
        chunks = {at: sizes for at, sizes in self._chunks if at[0] < last_row and first_row < at[0] + sizes[0]}
        self._loaded = {offsets: tensor for offsets, tensor in self._loaded.items() if offsets in chunks}
        block = torch.empty(last_row - first_row, self.embedding_dim)
        for offsets, sizes in chunks.items():
            if offsets not in self._loaded:
                self._loaded[offsets] = self._checkpoint.read_chunk(self._name, offsets, sizes)
            row, column = offsets
            start, stop = max(first_row, row), min(last_row, row + sizes[0])
            chunk_rows = self._loaded[offsets][start - row : stop - row]
            block[start - first_row : stop - first_row, column : column + sizes[1]] = chunk_rows
        yield block.numpy()

    def fingerprint(self) -> str:
        # Every save writes the metadata file anew.
        return file_fingerprint(self._checkpoint.path / _METADATA_NAME, self._name)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint.

    It is a `.safetensors` file or a folder of them; a `.pt`, `.pth`, `.bin` or `.ckpt` file with a state dict; or a
    folder that `torch.distributed.checkpoint` wrote. Raises CheckpointError for anything else, and for objects other
    than tensors and plain data.
    """
    at = Path(path)
    if at.is_dir():
        if (at / ".metadata").is_file():
            return _DistributedCheckpoint(at)
        if files := sorted(at.glob("*.safetensors")):
            return _MappedCheckpoint(at, _safetensors(files))
        raise CheckpointError(f"{at}: holds neither .safetensors files nor the .metadata of a distributed checkpoint")
    if not at.is_file():
        raise CheckpointError(f"{at}: no such file or folder")
    if at.suffix == ".safetensors":
        return _MappedCheckpoint(at, _safetensors([at]))
    if at.suffix in _STATE_DICT_SUFFIXES:
        return _MappedCheckpoint(at, _state_dict(at))
    allowed = ", ".join((".safetensors", *_STATE_DICT_SUFFIXES))
    raise CheckpointError(f"{at}: file name must end in one of {allowed}")


def open_state_dict(model: torch.nn.Module | Mapping[str, Any]) -> Checkpoint:
    """Take a module, or its state dict, as it is now for a checkpoint; nested dicts are flattened as of a file."""
    content = model.state_dict() if isinstance(model, torch.nn.Module) else model
    return _MappedCheckpoint(Path("state dict"), _entries(None, content))


class _Mapped(NamedTuple):
    file: Path | None
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


class _MappedCheckpoint(Checkpoint):
    def shape(self, name: str) -> tuple[int, ...]:
        entry: _Mapped = self._entry(name)
        return entry.shape

    def tensor(self, name: str) -> torch.Tensor:
        entry: _Mapped = self._entry(name)
        try:
            return entry.load()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: tensor {name!r}: {error}") from error

    def rows(self, name: str) -> RowSource:
        tensor, file = self.tensor(name), self._entry(name).file
        try:
            return ArrayRows(tensor, file, name)
        except ExportError as error:
            raise CheckpointError(f"{file or self.path}: tensor {name!r}: {error}") from error


def _safetensors(files: list[Path]) -> dict[str, _Mapped]:
    tensors: dict[str, _Mapped] = {}
    for file in files:
        try:
            handle: Any = safe_open(str(file), framework="pt")
            for name in sorted(handle.keys()):
                if name in tensors:
                    raise CheckpointError(f"tensor {name!r} is in both {tensors[name].file} and {file}")
                shape = tuple(handle.get_slice(name).get_shape())
                tensors[name] = _Mapped(file, shape, partial(handle.get_tensor, name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: can't be read as safetensors: {error}") from error
    return tensors


def _state_dict(path: Path) -> dict[str, _Mapped]:
    """Map a state dict written by `torch.save`. Nested dicts are flattened, their keys joined by dots."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds objects other than tensors and plain data, and loading these could run code; "
            f"save the state_dict alone: {error}"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: can't be read as a state_dict in torch's zip format: {error}") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a state_dict")
    return _entries(path, content)


def _entries(path: Path | None, content: Mapping[Any, Any]) -> dict[str, _Mapped]:
    return {name: _Mapped(path, tuple(tensor.shape), tensor.detach) for name, tensor in _flattened(content, "")}


def _flattened(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    # Anything but tensors (step counts, settings) is no part of a model.
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flattened(value, f"{name}.")


def match_checkpoint(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dense_prefix: str | None = None,
    table_keys: Mapping[str, str] | None = None,
    *,
    none_dense: bool = False,
) -> tuple[dict[str, RowSource], dict[str, torch.Tensor]]:
    """Split a checkpoint into the rows of every table and the dense model's state dict.

    A table's rows are, after any prefix, `embedding_bags.<table>.weight` or `embeddings.<table>.weight`, and if there
    is neither, `<table>.weight` or `tables.<table>`, else `<table>`; `table_keys` has the key of other tables. Those of
    a divided table are under its name, to be divided; or, where training has divided it or its parts differ in width,
    under its parts' names. In names `/` stands for a dot as well, which modules can't have. Projections,
    `projections.<part>`, belong to the dense model wherever they are; that of a table is that of every part which has
    none. The dense model
    has the keys that start with `dense_prefix`, without it; with None, all that are no table; or, `none_dense`, none.
    Tables that the checkpoint alone has are left out, and notes, if they can't be anything else.

    Raises CheckpointError if a table's key is missing or ambiguous (the message lists the candidates), a shape differs
    from the spec, the checkpoint has a table that the spec does not, or nothing starts with `dense_prefix`.
    """
    table_keys = table_keys or {}
    if unknown := sorted(set(table_keys) - {table.name for table in (*spec.logical_tables, *spec.tables)}):
        raise CheckpointError(f"table_keys: unknown tables {unknown}")
    names = checkpoint.names()
    with_keys = {table.name: table.keys for table in spec.tables if table.keys is not None}
    table_of_key: dict[str, str] = {}
    for name, shape in (rows for table in spec.logical_tables for rows in _given(spec, table, table_keys, names)):
        key = table_keys.get(name) or _key_of(checkpoint, name, shape, names)
        if key in table_of_key:
            both = f"{table_of_key[key]!r} and {name!r}"
            raise CheckpointError(f"{checkpoint.path}: tables {both} both match key {key!r}")
        # As many rows as there are keys, which the checkpoint does not have.
        expected = (*checkpoint.shape(key)[:1], shape[1]) if name in with_keys else shape
        _check_shape(checkpoint, f"table {name!r}", key, expected)
        if with_keys.get(name) != "int64" and checkpoint.keys(key) is not None:
            problem = f"{key!r} has keys, the description has {with_keys.get(name) or 'none'}; allowed is int64"
            raise CheckpointError(f"{checkpoint.path}: table {name!r}: {problem}")
        table_of_key[key] = name
    unused = sorted(set(checkpoint.tables) - table_of_key.keys())
    checkpoint.notes = (*checkpoint.notes, *(f"{name}: left out, the description has no such table" for name in unused))
    others = [name for name in names if name not in table_of_key and name not in unused]
    projections = _projection_keys(checkpoint, spec, others)
    others = [name for name in others if name not in set(projections.values())]
    dense = ({} if none_dense else _dense_keys(checkpoint, others, dense_prefix)) | projections
    return (
        {table: checkpoint.rows(key) for key, table in table_of_key.items()},
        {name: checkpoint.tensor(key) for name, key in dense.items()},
    )


def keys_of(
    checkpoint: Checkpoint, tables: Iterable[str], table_keys: Mapping[str, str] | None = None
) -> dict[str, Int64Array]:
    """Return the keys that a checkpoint has of tables, found by name as `match_checkpoint` does. Raises as it."""
    names = checkpoint.names()
    keyed = {name: (table_keys or {}).get(name) or _key_of(checkpoint, name, None, names) for name in tables}
    return {name: keys for name, key in keyed.items() if (keys := checkpoint.keys(key)) is not None}


def _given(
    spec: ModelSpec, table: AnyTable, table_keys: Mapping[str, str], names: list[str]
) -> list[tuple[str, tuple[int, int]]]:
    """Return names and shapes of the rows that make up a table: those of its parts, or of itself."""
    parts = [(part.name, (part.num_embeddings, part.embedding_dim)) for part in spec.parts(table)]
    dims = {part.embedding_dim for part in spec.parts(table)}
    if not isinstance(table, DividedTable) or table.by == "quotient_remainder" or len(dims) > 1:
        return parts
    if len(parts) > 1 and all(name in table_keys or _ending_in(names, *_suffixes(name)) for name, _ in parts):
        return parts
    return [(table.name, (table.num_embeddings, dims.pop()))]


def _check_shape(checkpoint: Checkpoint, what: str, key: str, expected: tuple[int, ...]) -> None:
    if (shape := checkpoint.shape(key)) != expected:
        raise CheckpointError(f"{checkpoint.path}: {what}: {key!r} is {list(shape)}, the spec says {list(expected)}")


def _suffixes(name: str) -> tuple[list[str], list[str]]:
    spelled = dict.fromkeys((name, name.replace(".", "/")))
    specific = [f"{collection}.{spelling}.weight" for spelling in spelled for collection in _COLLECTIONS]
    return specific, [end for spelling in spelled for end in (f"{spelling}.weight", f"tables.{spelling}")]


def _ending_in(names: Iterable[str], *suffixes: Sequence[str]) -> list[str]:
    """Return the names that end in the first group of suffixes that any name ends in."""
    for group in suffixes:
        if keys := [name for name in names if any(name == end or name.endswith("." + end) for end in group)]:
            return keys
    return []


def _key_of(checkpoint: Checkpoint, table: str, shape: tuple[int, int] | None, names: list[str]) -> str:
    specific, general = _suffixes(table)
    # What can only be a table goes before what else is called so.
    keys = _ending_in(checkpoint.tables, specific, general, [table])
    keys = keys or _ending_in(names, specific, general, [table])
    if len(keys) == 1:
        return keys[0]
    where = f"{checkpoint.path}: table {table!r}:"
    if keys:
        raise CheckpointError(f"{where} ambiguous, may be any of {shortened(keys)}")
    candidates = [name for name in names if checkpoint.shape(name) == shape]
    of_shape = f"keys of its shape {list(shape)}: {shortened(candidates)}; " if shape is not None else ""
    raise CheckpointError(f"{where} no key ends in any of {specific + general}; {of_shape}all keys: {shortened(names)}")


def _projection_keys(checkpoint: Checkpoint, spec: ModelSpec, names: list[str]) -> dict[str, str]:
    key_of = {}
    for part, shape in spec.projections().items():
        table = spec.divided_of(part)
        assert table is not None
        allowed = [projection_name(part), projection_name(table.name)]
        keys = _ending_in(names, allowed[:1], allowed[1:])
        if len(keys) != 1:
            problem = f"ambiguous, may be any of {shortened(keys)}" if keys else f"no key ends in any of {allowed}"
            raise CheckpointError(f"{checkpoint.path}: projection of table {part!r}: {problem}")
        _check_shape(checkpoint, f"projection of table {part!r}", keys[0], shape)
        key_of[allowed[0]] = keys[0]
    return key_of


def _dense_keys(checkpoint: Checkpoint, names: list[str], dense_prefix: str | None) -> dict[str, str]:
    if dense_prefix is not None:
        dense = {name.removeprefix(dense_prefix): name for name in names if name.startswith(dense_prefix)}
        if not dense or "" in dense:
            problem = f"no key below it; keys: {shortened(names)}"
            raise CheckpointError(f"{checkpoint.path}: dense_prefix {dense_prefix!r}: {problem}")
        return dense
    for name in names:
        parts = name.split(".")
        if len(parts) >= 3 and parts[-1] == "weight" and parts[-3] in _COLLECTIONS:
            raise CheckpointError(
                f"{checkpoint.path}: {name!r} looks like a table, but the spec has none {parts[-2]!r}; "
                "add it to the spec, or say with dense_prefix which keys are the dense model"
            )
    return {name: name for name in names}
