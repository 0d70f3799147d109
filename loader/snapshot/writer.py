"""Write a snapshot: float32 rows in, one immutable version out, in bounded memory and resumable file by file.

Everything that is handed in is checked in full before anything is written.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from loader.errors import ExportError, SnapshotCorruptError
from loader.keyed_rows import GivenKeys, checked_keys, key_order, save_mean
from loader.progress import Progress, no_progress
from loader.snapshot import manifest
from loader.snapshot.buckets import MIN_ROWS_PER_FILE, Int64Array, RowBuckets, default_rows_per_file
from loader.snapshot.codecs import ByteArray, RowCodec
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import PROGRAM_PATH, ExportedModelSpec, FileEntry, Manifest, ModelSpec
from loader.snapshot.program import Program, program_bytes
from loader.snapshot.row_classes import RowClasses
from loader.snapshot.row_source import FLOAT_DTYPES, RowSource
from loader.snapshot.store import ExportFolder, Store, open_export_folder
from loader.snapshot.tables import NUM_BUCKETS, AnyTable, TableSpec, refused_as
from loader.snapshot.tensor_files import MAX_HEADER_BYTES, MAX_TENSOR_DIMS
from loader.snapshot.vocabularies_and_counts import Vocabulary, access_count_tensors, vocabulary_tensors

_DENSE_PATH = "dense.safetensors"
_GOLDEN_PATH = "golden.safetensors"
_PLAN_PATH = "plan.safetensors"
_VOCABULARY_PATH = "tables/{}/vocabulary.safetensors"
_ACCESS_COUNTS_PATH = "tables/{}/access-counts.safetensors"
_MISSING_ROW_PATH = "tables/{}/missing-row.safetensors"
_ROW_CLASSES_PATH = "tables/{}/row-classes.safetensors"
# A safetensors file's tensors by name: all of torch, or all of NumPy.
Tensors = Mapping[str, Any]

_INTEGER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# float32 bytes asked of a source at a time.
BLOCK_BYTES = 16 << 20
_KEY_ORDER_BYTES = 40
_NO_KEYS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Export:
    """Checked arguments of an export.

    `files` are the tensors of all files but row files, by path; `keys` of the rows of tables that have such, by the
    names of stored tables.
    """

    spec: ModelSpec
    version: int
    rows_per_file: Mapping[str, int]
    keys: Mapping[str, Int64Array]
    files: Mapping[str, Tensors]
    golden: GoldenRequests | None
    golden_tolerance: float
    metadata: Mapping[str, str]
    last_delta: int | None
    delta_base: int | None

    def rows_paths(self, table: TableSpec) -> list[str]:
        num_files = -(-self.num_rows(table) // self.rows_per_file[table.name])
        return [f"tables/{table.name}/rows-{index:05d}-of-{num_files:05d}.safetensors" for index in range(num_files)]

    def num_rows(self, table: TableSpec) -> int:
        keys = self.keys.get(table.slices[0].name)
        return table.num_embeddings if keys is None else keys.size

    def missing_row_path(self, table: TableSpec) -> str | None:
        return _MISSING_ROW_PATH.format(table.name) if table.missing == "mean" else None

    def digest(self, rows: Mapping[str, RowSource]) -> str:
        """Return the SHA-256 (hex) of all that shapes the files, rows by their fingerprint."""
        arguments = {
            "last_delta": self.last_delta,
            "delta_base": self.delta_base,
            "rows": {table: source.fingerprint() for table, source in rows.items()},
            "format_version": manifest.FORMAT_VERSION,
            "spec": self.spec.model_dump(mode="json"),
            "version": self.version,
            "rows_per_file": dict(self.rows_per_file),
            "keys": {table: hashlib.sha256(keys.data).hexdigest() for table, keys in self.keys.items()},
        }
        digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
        for path, tensors in sorted(self.files.items()):
            for name, tensor in sorted(tensors.items()):
                array = tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor
                digest.update(json.dumps([path, name, str(array.dtype), list(array.shape)]).encode())
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def manifest(self, created_at: datetime, entries: Mapping[str, FileEntry]) -> Manifest:
        # What a table has once is in the folder by its name, and in the manifest with its first stored table.
        firsts = {table.slices[0].name: table for table in self.spec.tables}
        logical = self.spec.logical_by_first

        def once(path: str, stored: TableSpec, tables: Mapping[str, AnyTable]) -> FileEntry | None:
            return entries.get(path.format(tables[stored.name].name)) if stored.name in tables else None

        tables = tuple(
            manifest.TableFiles(
                table=table.name,
                rows_per_file=self.rows_per_file[table.name],
                rows=tuple(entries[path] for path in self.rows_paths(table)),
                vocabulary=once(_VOCABULARY_PATH, table, logical),
                access_counts=once(_ACCESS_COUNTS_PATH, table, firsts),
                row_classes=once(_ROW_CLASSES_PATH, table, logical),
                num_keys=self.num_rows(table) if table.keys is not None else None,
                missing_row=entries.get(_MISSING_ROW_PATH.format(table.name)),
            )
            for table in self.spec.stored_tables
        )
        golden = self.golden and manifest.GoldenEntry(
            file=entries[_GOLDEN_PATH],
            tolerance=self.golden_tolerance,
            num_requests=self.golden.num_requests,
            num_candidates=len(self.golden.scores),
        )
        return Manifest(
            spec=self.spec,
            version=self.version,
            created_at=created_at.astimezone(UTC).isoformat(timespec="seconds"),
            tables=tables,
            dense=entries[PROGRAM_PATH if isinstance(self.spec.dense_model, ExportedModelSpec) else _DENSE_PATH],
            golden=golden,
            plan=entries.get(_PLAN_PATH),
            metadata=dict(self.metadata),
            last_delta=self.last_delta,
            delta_base=self.delta_base,
        )

    def check(self, rows: Mapping[str, RowSource]) -> None:
        """Raise ExportError if rows do not fit the spec, or no reader would accept the manifest."""
        _check_names("rows", set(rows), {table.name for table in self.spec.tables})
        for table in self.spec.tables:
            source = rows[table.name]
            expected = self.num_rows(table), table.embedding_dim
            if (source.num_embeddings, source.embedding_dim) != expected:
                says = "the spec says" if table.keys is None else "its keys, and the spec, say"
                raise ExportError(
                    f"table {table.name!r}: rows are [{source.num_embeddings}, {source.embedding_dim}], "
                    f"{says} {list(expected)}"
                )
        paths = [*self.files, *(path for table in self.spec.stored_tables for path in self.rows_paths(table))]
        paths += [path for path in map(self.missing_row_path, self.spec.stored_tables) if path is not None]
        unknown = {path: FileEntry(path=path, size_bytes=2**63 - 1, sha256="0" * 64) for path in paths}
        try:
            with refused_as(ExportError, "manifest: "):
                text = self.manifest(datetime.max.replace(tzinfo=UTC), unknown).to_json().encode()
            manifest.parse_manifest("manifest", text)
        except SnapshotCorruptError as error:
            raise ExportError(str(error)) from error
        if len(text) > manifest.MAX_MANIFEST_BYTES:
            raise ExportError(
                f"manifest: {len(text)} bytes for {len(paths)} files; at most {manifest.MAX_MANIFEST_BYTES}"
            )

    def write_rows(
        self, folder: ExportFolder, rows: Mapping[str, RowSource], progress: Progress
    ) -> dict[str, FileEntry]:
        """Write the row files that are not finished; memory is bounded by one file of all slices and some blocks."""
        entries = {}
        for table in self.spec.tables:
            ends = zip(table.slices, accumulate(table.slice_dims), strict=True)
            slices = [(part, slice(end - part.embedding_dim, end)) for part, end in ends]
            rows_per_file = self.rows_per_file[table.slices[0].name]
            for file_index, paths in enumerate(zip(*(self.rows_paths(stored) for stored in table.slices), strict=True)):
                missing = [part for part, path in zip(slices, paths, strict=True) if path not in folder.finished]
                first, num_rows = file_index * rows_per_file, self.num_rows(table)
                # Of all slices alike.
                keys = self.keys.get(table.slices[0].name, _NO_KEYS)[first : first + rows_per_file]
                if missing:
                    encoded = self._encode_file(table, missing, rows[table.name], file_index, keys, progress)
                else:
                    encoded = {}
                    progress(f"table {table.name}", min(first + rows_per_file, num_rows), num_rows)
                for stored, path in zip(table.slices, paths, strict=True):
                    # Popped, and let go of, so that each slice is freed once it is written.
                    tensors = {"rows": encoded.pop(stored.name, None)} | (
                        {"keys": keys[key_order(keys)]} if keys.size else {}
                    )
                    entries[path] = folder.write(path, partial(_save, tensors))
                    del tensors
            for stored in table.slices:
                if (path_of_mean := self.missing_row_path(stored)) is not None:
                    files = [folder.path(path) for path in self.rows_paths(stored)]
                    entries[path_of_mean] = folder.write(path_of_mean, partial(save_mean, stored, files))
        return entries

    def _encode_file(
        self,
        table: TableSpec,
        slices: Sequence[tuple[TableSpec, slice]],
        source: RowSource,
        file_index: int,
        keys: Int64Array,
        progress: Progress,
    ) -> dict[str, ByteArray]:
        """Return all rows of one file as some slices store them, by name: uint8 [rows, row_bytes], in bucket order.

        `keys` are of the file's rows, [] of a table without.
        """
        rows_per_file, all_rows = self.rows_per_file[table.slices[0].name], self.num_rows(table)
        first_row = file_index * rows_per_file
        num_rows = min(rows_per_file, all_rows - first_row)
        block_rows = max(1, BLOCK_BYTES // (4 * table.embedding_dim))
        codecs = [_codec(part) for part, _ in slices]
        # By name: slices of a `mixed` table have different seeds.
        buckets = [RowBuckets.of(part) for part, _ in slices]
        if keys.size:
            orders = [buckets[0].of_keys(first_row, keys, key_order(keys).argsort())] * len(slices)
        else:
            orders = [of_slice.in_file(rows_per_file, file_index) for of_slice in buckets]
        stored = [np.empty((num_rows, codec.row_bytes), np.uint8) for codec in codecs]
        for start in range(0, num_rows, block_rows):
            position, stop = start, min(start + block_rows, num_rows)
            for encoded in _encoded(table, slices, source, first_row + start, stop - start):
                local_rows = np.arange(position, position + len(encoded[0]), dtype=np.int64)
                for order, rows, of_slice in zip(orders, stored, encoded, strict=True):
                    rows[order.positions(local_rows)] = of_slice
                position += local_rows.size
            if position != stop:
                raise ExportError(f"table {table.name!r}: the source ended at row {first_row + position}")
            progress(f"table {table.name}", first_row + stop, all_rows)
        return {part.name: rows for (part, _), rows in zip(slices, stored, strict=True)}


def _codec(table: TableSpec) -> RowCodec:
    return RowCodec(table.dtype, table.embedding_dim)


def _encoded(
    table: TableSpec, slices: Sequence[tuple[TableSpec, slice]], source: RowSource, first_row: int, num_rows: int
) -> Iterator[list[ByteArray]]:
    """Yield the blocks of some rows as each slice stores them. Raises ExportError: a row is not as it should be."""
    as_stored, end = source.stored_dtype == table.dtype and len(table.slices) == 1, first_row + num_rows
    for block in source.stored_blocks(first_row, num_rows) if as_stored else source.blocks(first_row, num_rows):
        width, dtype = (_codec(table).row_bytes, np.uint8) if as_stored else (table.embedding_dim, np.float32)
        if block.dtype != dtype or block.shape[1:] != (width,) or len(block) > end - first_row:
            raise ExportError(
                f"table {table.name!r}: the source gave a block {block.dtype} {list(block.shape)}, "
                f"expected {np.dtype(dtype)} [at most {end - first_row}, {width}]"
            )
        if not as_stored and not (finite := np.isfinite(block)).all():
            row = first_row + int(np.argmin(finite.all(axis=1)))
            raise ExportError(f"table {table.name!r}, row {row}{source.location(row)}: holds NaN or inf")
        encoded: list[ByteArray] = []
        for part, columns in slices:
            values: Any = block if as_stored else block[:, columns]
            encoded.append(values if as_stored else _codec(part).encode(values))
            if (bad := _codec(part).first_non_finite(encoded[-1])) is not None:
                row, of = first_row + bad, _codec(part).decode(values[bad:][:1]) if as_stored else values[bad]
                where = f"table {part.name!r}, row {row}{source.location(row)}"
                raise ExportError(f"{where}: values from {of.min()} to {of.max()} overflow as {part.dtype}")
        yield encoded
        first_row += len(block)


def _small_files(
    spec: ModelSpec,
    dense: Mapping[str, torch.Tensor] | Program,
    vocabularies: Mapping[str, Vocabulary],
    golden: GoldenRequests | None,
    access_counts: Mapping[str, npt.NDArray[Any]],
    row_classes: Mapping[str, RowClasses],
    plan: bytes | None,
) -> dict[str, Tensors]:
    tables = {table.name: table for table in spec.tables}
    logical = {table.name: table for table in spec.logical_tables}
    mapped = {name for name, table in logical.items() if table.id_mapping.kind == "vocabulary"}
    divided = {table.name: table for table in spec.divided if table.num_classes > 1}
    _check_names("vocabularies (--vocabulary TABLE=FILE)", set(vocabularies), mapped)
    countable = {name for name, table in tables.items() if table.keys is None}
    _check_names("access_counts (of tables without keys)", set(access_counts), set(access_counts) & countable)
    _check_names("row_classes", set(row_classes), set(divided))
    files: dict[str, Tensors] = {}
    for name, vocabulary in vocabularies.items():
        files[_VOCABULARY_PATH.format(name)] = vocabulary_tensors(logical[name], vocabulary)
    for name, classes in row_classes.items():
        classes.check(divided[name], spec.parts(divided[name]))
        files[_ROW_CLASSES_PATH.format(name)] = classes.tensors()
    for name, counts in access_counts.items():
        files[_ACCESS_COUNTS_PATH.format(name)] = access_count_tensors(tables[name], counts)
    is_program = isinstance(spec.dense_model, ExportedModelSpec)
    if isinstance(dense, Mapping):
        if is_program:
            raise ExportError("dense: the spec's dense_model is exported: expected a program, got tensors")
        files[_DENSE_PATH] = {name: _dense_tensor(name, tensor) for name, tensor in dense.items()}
        _check_limits("dense", files[_DENSE_PATH], manifest.MAX_DENSE_BYTES)
    elif not is_program:
        raise ExportError(f"dense: the spec's dense_model is {spec.dense_model.kind}: expected tensors, got a program")
    else:
        content = program_bytes(dense)
        if len(content) > manifest.MAX_DENSE_BYTES:
            raise ExportError(f"dense: {len(content)} bytes; at most {manifest.MAX_DENSE_BYTES} are allowed")
        files[PROGRAM_PATH] = {PROGRAM_PATH: np.frombuffer(content, np.uint8)}
    if plan is not None:
        files[_PLAN_PATH] = {manifest.PLAN_TENSOR: np.frombuffer(plan, np.uint8)}
        _check_limits("plan", files[_PLAN_PATH], manifest.MAX_PLAN_BYTES)
    if golden is not None:
        golden.check(spec)
        files[_GOLDEN_PATH] = golden.to_tensors()
        _check_limits("golden requests", files[_GOLDEN_PATH], manifest.MAX_GOLDEN_BYTES)
    return files


def _keys_of_stored(spec: ModelSpec, given: Mapping[str, GivenKeys]) -> dict[str, Int64Array]:
    tables = {table.name: table for table in spec.tables if table.keys is not None}
    _check_names("keys", set(given), set(tables))
    checked = {name: checked_keys(tables[name], keys) for name, keys in given.items()}
    return {part.name: checked[name] for name, table in tables.items() for part in table.slices}


def _file_rows(spec: ModelSpec, keys: Mapping[str, Int64Array], rows_per_file: int | None) -> dict[str, int]:
    stored = [(table, part.name) for table in spec.tables for part in table.slices]
    num_rows = {name: keys[name].size if name in keys else table.num_embeddings for table, name in stored}
    return {name: _rows_per_file(table, num_rows[name], rows_per_file) for table, name in stored}


def _rows_per_file(table: TableSpec, num_rows: int, rows_per_file: int | None) -> int:
    if rows_per_file is None:
        row_bytes = sum(RowCodec(part.dtype, part.embedding_dim).row_bytes for part in table.slices)
        # The order of a file's keys is made in memory as well.
        row_bytes += _KEY_ORDER_BYTES if table.keys is not None else 0
        rows_per_file = default_rows_per_file(table, row_bytes, num_rows)
    if not MIN_ROWS_PER_FILE <= rows_per_file < 2**63 or rows_per_file & (rows_per_file - 1):
        raise ExportError(f"rows_per_file: {rows_per_file} is not a power of two of at least {MIN_ROWS_PER_FILE}")
    rows_per_file = max(rows_per_file, NUM_BUCKETS[table.bucketing])
    if (num_files := -(-num_rows // rows_per_file)) > manifest.MAX_ROW_FILES:
        limit = f"at most {manifest.MAX_ROW_FILES} are allowed: give more rows_per_file"
        raise ExportError(f"table {table.name!r}: rows_per_file {rows_per_file} makes {num_files} files; {limit}")
    return rows_per_file


def _dense_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not name or name == "__metadata__":
        raise ExportError(f"dense tensor {name!r}: not a name that safetensors can hold")
    if tensor.ndim > MAX_TENSOR_DIMS:
        raise ExportError(f"dense tensor {name!r}: {tensor.ndim} dims; at most {MAX_TENSOR_DIMS} are allowed")
    # A contiguous copy: safetensors refuses tensors that share memory, such as tied weights.
    if tensor.dtype in FLOAT_DTYPES:
        copied = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        if not bool(torch.isfinite(copied).all()):
            raise ExportError(f"dense tensor {name!r}: holds NaN or inf, or a value beyond float32")
        return copied
    if tensor.dtype in _INTEGER_DTYPES:
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


def export_snapshot(
    store_path: str | Path,
    spec: ModelSpec,
    *,
    rows: Mapping[str, RowSource],
    dense: Mapping[str, torch.Tensor] | Program,
    keys: Mapping[str, GivenKeys] | None = None,
    vocabularies: Mapping[str, Vocabulary] | None = None,
    access_counts: Mapping[str, npt.NDArray[Any]] | None = None,
    row_classes: Mapping[str, RowClasses] | None = None,
    golden: GoldenRequests | None = None,
    golden_tolerance: float = 0.05,
    plan: bytes | None = None,
    version: int | None = None,
    metadata: Mapping[str, str] | None = None,
    last_delta: int | None = None,
    delta_base: int | None = None,
    rows_per_file: int | None = None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    progress: Progress = no_progress,
) -> Path:
    """Write the next version of a model into a store, and return the snapshot's folder.

    Run again after an interruption, the same export (all that shapes a file) goes on.

    Args:
        store_path: the store's folder; made if it is not there.
        spec: what the model is made of.
        rows: a source for every table, by name.
        dense: the dense model's tensors: floats are stored as float32, whole numbers and bools as they are. For the
            kind `exported` a program, or the file or bytes of one, without its sample inputs.
        keys: for every table with keys, those of its rows, in their order.
        vocabularies: for every table with vocabulary mapping, its ids in row order.
        access_counts: for any of the tables, how often each row was looked up: whole numbers [num_embeddings].
        row_classes: for every table divided by popularity, or pruned, the part that each row is in.
        golden: requests with the scores that training computed.
        golden_tolerance: largest |served - expected| that a server may accept.
        plan: the text of a plan file, for fleets that it fits.
        version: by default the next free one.
        metadata: free text about the training run, kept in the manifest.
        last_delta: sequence number of the last delta whose rows are in `rows` already.
        delta_base: the version that began the stream in which `last_delta` counts; by default this one.
        rows_per_file: a power of two of at least 256, 4,096 of `mixed` tables; by default files have up to 256 MiB.
        clock: returns the time of creation.
        progress: gets the rows written per table.

    Raises:
        ExportError: an input does not fit the spec, or the disk fails; a row is not finite in its dtype.
        SnapshotExistsError: the version exists.
    """
    store, files_of = Store(store_path), (vocabularies or {}, golden, access_counts or {}, row_classes or {}, plan)
    version = store.next_version(spec.model) if version is None else version
    if not 1 <= version < 2**63:
        raise ExportError(f"version: {version} is not in [1, 2^63)")
    if not 0 < golden_tolerance < math.inf:
        raise ExportError(f"golden_tolerance: {golden_tolerance} is not a positive number")
    file_rows = _file_rows(spec, of_stored := _keys_of_stored(spec, keys or {}), rows_per_file)
    files = _small_files(spec, dense, *files_of)
    about = golden, golden_tolerance, metadata or {}, last_delta, delta_base
    export = _Export(spec, version, file_rows, of_stored, files, *about)
    export.check(rows)
    target = store.path / spec.model / str(version)
    try:
        with open_export_folder(target, export.digest(rows), progress) as folder:
            entries = export.write_rows(folder, rows, progress)
            entries |= {path: folder.write(path, partial(_save, tensors)) for path, tensors in files.items()}
            folder.publish(manifest.manifest_texts(export.manifest(clock(), entries)))
    except (OSError, SafetensorError) as error:
        raise ExportError(f"export of {spec.model!r} version {version}: {error}") from error
    return target


def _save(tensors: Tensors, path: Path) -> None:
    values: dict[str, Any] = dict(tensors)
    if path.name == PROGRAM_PATH:
        path.write_bytes(values[PROGRAM_PATH].tobytes())
    elif all(isinstance(value, torch.Tensor) for value in values.values()):
        safetensors.torch.save_file(values, path)
    else:
        safetensors.numpy.save_file(values, path)
