"""Reads a snapshot that is not trusted until it is checked; rows stay in mapped files.

`Snapshot.open` refuses everything that does not fit before any of it can be served. See docs/snapshot-format.md.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from loader.codecs import ByteArray, codec_for
from loader.errors import ExportError, SnapshotCorruptError, SnapshotFormatError, SnapshotNotFoundError
from loader.golden import GoldenRequests
from loader.layout import rows_in_file
from loader.manifest import FileEntry, Manifest, ModelSpec, TableFiles, TableSpec
from loader.manifest_file import check_manifest_checksum, read_manifest
from loader.progress import Progress, no_progress
from loader.row_order import row_positions
from loader.snapshot_paths import snapshot_file
from loader.tensor_files import TensorInfo, expect_tensor, hash_file, load_numpy, load_torch, map_tensor, read_header
from loader.vocabulary import check_vocabulary_header, check_vocabulary_ids, decode_strings, id_type_is_string


class Snapshot:
    """One immutable version of a model on disk, opened for reading. Made by `Snapshot.open`.

    Attributes:
        path: its folder.
        manifest: what its manifest says.
    """

    def __init__(self, path: Path, manifest: Manifest, headers: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        self.path = path
        self.manifest = manifest
        self._headers = headers
        self._files = {files.table: files for files in manifest.tables}
        self._tables = {table.name: table for table in manifest.spec.tables}

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True, threads: int = 2, progress: Progress = no_progress) -> Self:
        """Opens the snapshot in a folder `<store>/<model>/<version>`.

        Args:
            path: the folder.
            verify: also compare every file's SHA-256 and the uniqueness of vocabularies. May be left out for a local
                store that is trusted; paths, sizes, dtypes and shapes are always checked.
            threads: how many files are hashed at a time.
            progress: told the bytes hashed.

        Raises:
            SnapshotNotFoundError: no such folder.
            SnapshotFormatError: a manifest that can't be read, of an unknown format version, or of another folder.
            SnapshotPathError: a path that leaves the folder.
            SnapshotCorruptError: a file that is not what the manifest says.
        """
        root = Path(path)
        if not root.is_dir():
            raise SnapshotNotFoundError(f"{root}: no such snapshot folder")
        manifest = read_manifest(root)
        _check_folder_names(root, manifest)
        paths = {entry.path: snapshot_file(root, entry.path) for entry in manifest.files()}
        check_manifest_checksum(root)
        _check_sizes(paths, manifest)
        if verify:
            _check_hashes(paths, manifest, threads, progress)
        headers = {relative: read_header(at) for relative, at in paths.items()}
        snapshot = cls(root, manifest, headers)
        snapshot._check_shapes()
        if verify:
            snapshot._check_vocabularies()
        return snapshot

    @property
    def spec(self) -> ModelSpec:
        """What the model is made of."""
        return self.manifest.spec

    @property
    def version(self) -> int:
        """The version's number."""
        return self.manifest.version

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.size_bytes for entry in self.manifest.files())

    @property
    def float32_bytes(self) -> int:
        """Bytes that the tables' rows would take as float32."""
        return sum(4 * table.num_embeddings * table.embedding_dim for table in self.spec.tables)

    def rows_file(self, table: str, file_index: int) -> ByteArray:
        """The stored rows of one row file, read-only uint8 [rows, row_bytes] in bucket order, mapped and not copied.

        Raises KeyError or IndexError if there is no such table or file, SnapshotCorruptError if it can't be mapped.
        """
        entry = self._files[table].rows[file_index]
        return map_tensor(self.path / entry.path, self._headers[entry.path]["rows"], np.uint8)

    def read_rows(self, table: str, first_row: int, num_rows: int) -> ByteArray:
        """A copy of rows [first_row, first_row + num_rows) in row order, uint8 [num_rows, row_bytes].

        Raises KeyError for an unknown table, IndexError for rows outside it.
        """
        table_spec, rows_per_file = self._tables[table], self._files[table].rows_per_file
        last_row = first_row + num_rows
        if not 0 <= first_row <= last_row <= table_spec.num_embeddings:
            raise IndexError(f"rows [{first_row}, {last_row}) of table {table!r} with {table_spec.num_embeddings} rows")
        rows = np.empty((num_rows, codec_for(table_spec.dtype, table_spec.embedding_dim).row_bytes), np.uint8)
        row = first_row
        while row < last_row:
            file_index, local_row = divmod(row, rows_per_file)
            count = min(last_row - row, rows_per_file - local_row)
            local_rows = np.arange(local_row, local_row + count, dtype=np.int64)
            positions = row_positions(table_spec, rows_per_file, file_index, local_rows)
            rows[row - first_row : row - first_row + count] = self.rows_file(table, file_index)[positions]
            row += count
        return rows

    def vocabulary(self, table: str) -> npt.NDArray[np.int64]:
        """The ids of a table's vocabulary in row order, read-only int64 [V], mapped. Raises KeyError if it has none."""
        entry = self._vocabulary_entry(table)
        return map_tensor(self.path / entry.path, self._headers[entry.path]["ids"], np.int64)

    def vocabulary_strings(self, table: str) -> list[str] | None:
        """The strings of a string vocabulary in row order; None for an integer one. Raises KeyError as `vocabulary`."""
        entry = self._vocabulary_entry(table)
        if not id_type_is_string(self._tables[table]):
            return None
        path = self.path / entry.path
        return decode_strings(path, self.vocabulary(table), load_numpy(path))

    def dense_tensors(self) -> dict[str, torch.Tensor]:
        """The dense model's tensors by name, in memory."""
        return load_torch(self.path / self.manifest.dense.path)

    def golden(self) -> GoldenRequests | None:
        """The golden requests, if the snapshot has any. Raises SnapshotCorruptError if they do not fit the spec."""
        if self.manifest.golden is None:
            return None
        path = self.path / self.manifest.golden.file.path
        try:
            golden = GoldenRequests.from_tensors(load_numpy(path))
            golden.check(self.spec)
        except ExportError as error:
            raise SnapshotCorruptError(f"{path}: {error}") from error
        stated = (self.manifest.golden.num_requests, self.manifest.golden.num_candidates)
        if (golden.num_requests, len(golden.scores)) != stated:
            raise SnapshotCorruptError(f"{path}: requests and candidates are not the {stated} of the manifest")
        return golden

    def _vocabulary_entry(self, table: str) -> FileEntry:
        entry = self._files[table].vocabulary
        if entry is None:
            raise KeyError(f"table {table!r} has no vocabulary")
        return entry

    def _check_shapes(self) -> None:
        for table, files in zip(self.spec.tables, self.manifest.tables, strict=True):
            self._check_table_shapes(table, files)
        for name, info in self._headers[self.manifest.dense.path].items():
            if info.dtype not in _DENSE_DTYPES:
                path = self.path / self.manifest.dense.path
                raise SnapshotCorruptError(f"{path}: tensor {name!r} is {info.dtype}; allowed: {sorted(_DENSE_DTYPES)}")
        self.dense_tensors()
        self.golden()

    def _check_table_shapes(self, table: TableSpec, files: TableFiles) -> None:
        row_bytes = codec_for(table.dtype, table.embedding_dim).row_bytes
        for file_index, entry in enumerate(files.rows):
            rows = rows_in_file(table.num_embeddings, files.rows_per_file, file_index)
            expect_tensor(self.path / entry.path, self._headers[entry.path], "rows", "U8", (rows, row_bytes))
        if files.vocabulary is not None:
            path = self.path / files.vocabulary.path
            check_vocabulary_header(path, table, self._headers[files.vocabulary.path])

    def _check_vocabularies(self) -> None:
        for files in self.manifest.tables:
            if files.vocabulary is not None:
                check_vocabulary_ids(self.path / files.vocabulary.path, self.vocabulary(files.table))
                self.vocabulary_strings(files.table)


_DENSE_DTYPES = frozenset({"F32", "BOOL", "U8", "I8", "I16", "I32", "I64"})


def _check_folder_names(root: Path, manifest: Manifest) -> None:
    """A snapshot that was copied under another name would be served as what it is not."""
    real = root.resolve()
    if (real.parent.name, real.name) != (manifest.spec.model, str(manifest.version)):
        raise SnapshotFormatError(
            f"{root}: the manifest is of model {manifest.spec.model!r} version {manifest.version}, "
            f"the folder says {real.parent.name!r} {real.name!r}"
        )


def _check_sizes(paths: Mapping[str, Path], manifest: Manifest) -> None:
    for entry in manifest.files():
        size_bytes = paths[entry.path].stat().st_size
        if size_bytes != entry.size_bytes:
            raise SnapshotCorruptError(f"{paths[entry.path]}: {size_bytes} bytes, the manifest says {entry.size_bytes}")


def _check_hashes(paths: Mapping[str, Path], manifest: Manifest, threads: int, progress: Progress) -> None:
    entries = manifest.files()
    total = sum(entry.size_bytes for entry in entries)
    done = 0
    lock = threading.Lock()

    def on_bytes(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress("checking SHA-256", done, total)

    def check(entry: FileEntry) -> None:
        path = paths[entry.path]
        try:
            found = hash_file(path, on_bytes)
        except OSError as error:
            raise SnapshotCorruptError(f"{path}: can't be read: {error}") from error
        if found != entry.sha256:
            raise SnapshotCorruptError(f"{path}: SHA-256 is {found}, the manifest says {entry.sha256}")

    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            for _ in pool.map(check, entries):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
