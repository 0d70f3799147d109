"""What is handed to the writer, checked in full before anything is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loader.access_counts import access_count_tensors
from loader.codecs import codec_for
from loader.errors import ExportError
from loader.golden import GoldenRequests
from loader.manifest import (
    FORMAT_VERSION,
    MAX_DENSE_BYTES,
    MAX_GOLDEN_BYTES,
    MAX_ROW_FILES,
    NUM_BUCKETS,
    ModelSpec,
    TableSpec,
)
from loader.row_fingerprint import fingerprint_of
from loader.row_order import default_rows_per_file
from loader.row_source import FLOAT_DTYPES, RowSource
from loader.tensor_files import MAX_HEADER_BYTES, MAX_TENSOR_DIMS
from loader.vocabulary import Vocabulary, vocabulary_tensors

DENSE_PATH = "dense.safetensors"
GOLDEN_PATH = "golden.safetensors"
# A safetensors file's tensors by name: all of torch, or all of NumPy.
Tensors = Mapping[str, Any]

_WHOLE_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def vocabulary_path(table: str) -> str:
    """Where a table's vocabulary lies in the snapshot."""
    return f"tables/{table}/vocabulary.safetensors"


def access_counts_path(table: str) -> str:
    """Where a table's access counts lie in the snapshot."""
    return f"tables/{table}/access-counts.safetensors"


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
    access_counts: Mapping[str, npt.NDArray[Any]],
) -> dict[str, Tensors]:
    """Tensors of all files but the row files, by path. Raises ExportError for what does not fit the spec."""
    with_vocabulary = [table for table in spec.tables if table.id_mapping.kind == "vocabulary"]
    _check_names("vocabularies", set(vocabularies), {table.name for table in with_vocabulary})
    files: dict[str, Tensors] = {
        vocabulary_path(table.name): vocabulary_tensors(table, vocabularies[table.name]) for table in with_vocabulary
    }
    counted = [table for table in spec.tables if table.name in access_counts]
    _check_names("access_counts", set(access_counts), {table.name for table in counted})
    files |= {access_counts_path(one.name): access_count_tensors(one, access_counts[one.name]) for one in counted}
    files[DENSE_PATH] = {name: _dense_tensor(name, tensor) for name, tensor in dense.items()}
    _check_limits("dense", files[DENSE_PATH], MAX_DENSE_BYTES)
    if golden is not None:
        golden.check(spec)
        files[GOLDEN_PATH] = golden.to_tensors()
        _check_limits("golden requests", files[GOLDEN_PATH], MAX_GOLDEN_BYTES)
    return files


def rows_per_file_of(table: TableSpec, rows_per_file: int | None) -> int:
    """The given rows per file, checked, or the table's default."""
    if rows_per_file is None:
        row_bytes = codec_for(table.dtype, table.embedding_dim).row_bytes
        rows_per_file = default_rows_per_file(table.num_embeddings, row_bytes)
    if not NUM_BUCKETS <= rows_per_file < 2**63 or rows_per_file & (rows_per_file - 1):
        raise ExportError(f"rows_per_file: {rows_per_file} is not a power of two of at least {NUM_BUCKETS}")
    if (num_files := -(-table.num_embeddings // rows_per_file)) > MAX_ROW_FILES:
        limit = f"at most {MAX_ROW_FILES} are allowed: give more rows_per_file"
        raise ExportError(f"table {table.name!r}: rows_per_file {rows_per_file} makes {num_files} files; {limit}")
    return rows_per_file


def inputs_digest(
    spec: ModelSpec,
    version: int,
    rows_per_file: Mapping[str, int],
    files: Mapping[str, Tensors],
    rows: Mapping[str, RowSource],
    last_delta: int | None,
    delta_base: int | None,
) -> str:
    """SHA-256 (hex) of what shapes the files, rows by their fingerprint: what makes an export "the same export"."""
    arguments = {
        "last_delta": last_delta,
        "delta_base": delta_base,
        "rows": {table: fingerprint_of(source) for table, source in rows.items()},
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
    if tensor.ndim > MAX_TENSOR_DIMS:
        raise ExportError(f"dense tensor {name!r}: {tensor.ndim} dims; at most {MAX_TENSOR_DIMS} are allowed")
    if tensor.dtype in FLOAT_DTYPES:
        copied = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        if not bool(torch.isfinite(copied).all()):
            raise ExportError(f"dense tensor {name!r}: holds NaN or inf, or a value beyond float32")
        return copied
    if tensor.dtype in _WHOLE_DTYPES:
        return tensor.detach().to("cpu", copy=True).contiguous()
    raise ExportError(f"dense tensor {name!r}: {tensor.dtype} is neither a float nor a whole number")


def _check_limits(what: str, tensors: Tensors, max_bytes: int) -> None:
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if size_bytes > max_bytes:
        raise ExportError(f"{what}: {size_bytes} bytes; at most {max_bytes} are allowed")
    # As long as the file's header can become, whatever the dtypes and offsets.
    longest = {"dtype": "BOOL", "data_offsets": [2**63, 2**63]}
    header = json.dumps({name: {**longest, "shape": list(tensor.shape)} for name, tensor in tensors.items()})
    if len(header) > MAX_HEADER_BYTES:
        raise ExportError(f"{what}: names and shapes of {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")


def _check_names(what: str, given: set[str], expected: set[str]) -> None:
    if given != expected:
        raise ExportError(f"{what}: missing for tables {sorted(expected - given)}, unknown {sorted(given - expected)}")
