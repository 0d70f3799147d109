"""What is handed to the writer, checked in full before anything is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from loader.codecs import codec_for
from loader.errors import ExportError
from loader.golden import GoldenRequests
from loader.manifest import FORMAT_VERSION, NUM_BUCKETS, ModelSpec, TableSpec
from loader.row_order import default_rows_per_file
from loader.row_source import FLOAT_DTYPES, RowSource
from loader.vocabulary import Vocabulary, vocabulary_tensors

DENSE_PATH = "dense.safetensors"
GOLDEN_PATH = "golden.safetensors"
# A safetensors file's tensors by name: all of torch, or all of NumPy.
Tensors = Mapping[str, Any]

_WHOLE_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def vocabulary_path(table: str) -> str:
    """Where a table's vocabulary lies in the snapshot."""
    return f"tables/{table}/vocabulary.safetensors"


def check_rows(spec: ModelSpec, rows: Mapping[str, RowSource]) -> None:
    """Raises ExportError unless there is one source of the right shape for every table, and no other."""
    _check_names("rows", set(rows), {table.name for table in spec.tables})
    for table in spec.tables:
        source = rows[table.name]
        if (source.num_embeddings, source.embedding_dim) != (table.num_embeddings, table.embedding_dim):
            raise ExportError(
                f"table {table.name!r}: rows are [{source.num_embeddings}, {source.embedding_dim}], "
                f"the spec says [{table.num_embeddings}, {table.embedding_dim}]"
            )


def small_files(
    spec: ModelSpec,
    dense: Mapping[str, torch.Tensor],
    vocabularies: Mapping[str, Vocabulary],
    golden: GoldenRequests | None,
) -> dict[str, Tensors]:
    """Tensors of all files but the row files, by path. Raises ExportError for what does not fit the spec."""
    with_vocabulary = [table for table in spec.tables if table.id_mapping.kind == "vocabulary"]
    _check_names("vocabularies", set(vocabularies), {table.name for table in with_vocabulary})
    files: dict[str, Tensors] = {
        vocabulary_path(table.name): vocabulary_tensors(table, vocabularies[table.name]) for table in with_vocabulary
    }
    files[DENSE_PATH] = {name: _dense_tensor(name, tensor) for name, tensor in dense.items()}
    if golden is not None:
        golden.check(spec)
        files[GOLDEN_PATH] = golden.to_tensors()
    return files


def rows_per_file_of(table: TableSpec, rows_per_file: int | None) -> int:
    """The given rows per file, checked, or the table's default."""
    if rows_per_file is None:
        return default_rows_per_file(table.num_embeddings, codec_for(table.dtype, table.embedding_dim).row_bytes)
    if rows_per_file < NUM_BUCKETS or rows_per_file & (rows_per_file - 1):
        raise ExportError(f"rows_per_file: {rows_per_file} is not a power of two of at least {NUM_BUCKETS}")
    return rows_per_file


def inputs_digest(spec: ModelSpec, version: int, rows_per_file: Mapping[str, int], files: Mapping[str, Tensors]) -> str:
    """SHA-256 (hex) of everything but the rows that shapes the files: what makes an export "the same export"."""
    arguments = {
        "format_version": FORMAT_VERSION,
        "spec": spec.model_dump(mode="json"),
        "version": version,
        "rows_per_file": dict(rows_per_file),
    }
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
    for path, tensors in sorted(files.items()):
        for name, tensor in sorted(tensors.items()):
            array = tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor
            digest.update(json.dumps([path, name, str(array.dtype), list(array.shape)]).encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _dense_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory: safetensors refuses tensors that share memory, such as tied weights."""
    if not name or name == "__metadata__":
        raise ExportError(f"dense tensor {name!r}: not a name that safetensors can hold")
    if tensor.dtype in FLOAT_DTYPES:
        copied = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        if not bool(torch.isfinite(copied).all()):
            raise ExportError(f"dense tensor {name!r}: holds NaN or inf, or a value beyond float32")
        return copied
    if tensor.dtype in _WHOLE_DTYPES:
        return tensor.detach().to("cpu", copy=True).contiguous()
    raise ExportError(f"dense tensor {name!r}: {tensor.dtype} is neither a float nor a whole number")


def _check_names(what: str, given: set[str], expected: set[str]) -> None:
    if given != expected:
        raise ExportError(f"{what}: missing for tables {sorted(expected - given)}, unknown {sorted(given - expected)}")
