"""Read a snapshot that is not trusted until it is checked; rows stay in mapped files.

`Snapshot.open` refuses everything that does not fit before any of it can be served. See docs/snapshot-format.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from loader import errors
from loader.keyed_rows import first_twice
from loader.progress import Progress, counting, no_progress
from loader.snapshot import manifest as manifests
from loader.snapshot.buckets import RowBuckets, key_buckets
from loader.snapshot.codecs import ByteArray, RowCodec
from loader.snapshot.golden import GoldenRequests, check_golden_header
from loader.snapshot.manifest import FileEntry, Manifest, TableFiles
from loader.snapshot.program import ProgramArchive
from loader.snapshot.row_classes import RowClasses, check_classes_header
from loader.snapshot.store import hash_file, version_numbers
from loader.snapshot.tables import AnyTable, DividedTable, Frozen, TableSpec
from loader.snapshot.tensor_files import (
    TensorInfo,
    expect_at_most,
    expect_tensors,
    length_of,
    load_numpy,
    map_tensor,
    read_header,
)
from loader.snapshot.vocabularies_and_counts import (
    COUNTS_TENSOR,
    check_vocabulary_header,
    check_vocabulary_ids,
    decode_strings,
    id_type_is_string,
)

if TYPE_CHECKING:
    import torch

VerifiedFiles: TypeAlias = Literal["all", "rows", "other"]

_DENSE_DTYPES = frozenset({"F32", "BOOL", "U8", "I8", "I16", "I32", "I64"})
_BLOCK_BYTES = 16 << 20


class Snapshot:
    """One immutable version of a model on disk, opened for reading. Made by `Snapshot.open`.

    `identity` is the SHA-256 (hex) of `manifest.json`, which has the checksums of all other files.
    """

    def __init__(
        self, path: Path, manifest: Manifest, identity: str, headers: Mapping[str, Mapping[str, TensorInfo]]
    ) -> None:
        self.path = path
        self.manifest, self.spec, self.version = manifest, manifest.spec, manifest.version
        self.identity = identity
        self._headers = headers
        self._files = {files.table: files for files in manifest.tables}
        self._tables = {table.name: table for table in manifest.spec.stored_tables}
        # What a table has once is stored with its first slice, or that of its first part: by the names of tables as
        # features see them, of their parts, and of slices.
        self._first_slice: dict[str, str] = {}
        self._logical: dict[str, AnyTable] = {}
        self._first_of: dict[str, str] = {}
        for first, table in manifest.spec.logical_by_first.items():
            names = {table.name}
            for part in manifest.spec.parts(table):
                of_part = {part.name, *(stored.name for stored in part.slices)}
                self._first_slice |= dict.fromkeys(of_part, part.slices[0].name)
                names |= of_part
            self._logical |= dict.fromkeys(names, table)
            self._first_of |= dict.fromkeys(names, first)

    @classmethod
    def open(
        cls,
        path: str | Path,
        identity: str | None = None,
        *,
        verify: bool = True,
        files: VerifiedFiles = "all",
        rows_here: bool = True,
        progress: Progress = no_progress,
    ) -> Self:
        """Open a snapshot in `<store>/<model>/<version>`. Paths, sizes, dtypes and shapes are always checked.

        Args:
            path: the folder.
            identity: that it must have; None for any.
            verify: also do `check_content`. May be left out for a local store that is trusted.
            files: whose content is checked: `rows` (and access counts) for a shard node, `other` (dense model,
                vocabularies, golden requests) for a process that leaves rows to shard nodes.
            rows_here: without, row files need not be there, and none is read; not with `files` all or rows.
            progress: gets the bytes hashed.

        Raises:
            SnapshotNotFoundError: no such folder.
            SnapshotCorruptError: a manifest that can't be read, of an unknown format version, or of another folder; a
                path that leaves the folder; a file that is not what the manifest says.
            SnapshotResourceError: file descriptors or memory ran out.
        """
        root = Path(path)
        with errors.file_errors(root, "read"):
            if not root.is_dir():
                raise errors.SnapshotNotFoundError(errors.no_path("snapshot", root))
            versions = version_numbers(entry.name for entry in root.iterdir())
        if versions and not (root / manifests.MANIFEST_NAME).exists():
            raise errors.SnapshotNotFoundError(
                f"{root} is a model's folder; its newest version is {root / str(versions[-1])}"
            )
        manifest, found = manifests.read_manifest(root)
        if identity not in (None, found):
            problem = f"identity (SHA-256 of its manifest) is {found}, published was {identity}"
            raise errors.SnapshotCorruptError(f"{root}: {problem}")
        real = root.resolve()
        if (real.parent.name, real.name) != (manifest.spec.model, str(manifest.version)):
            # A snapshot copied under another name would be served as what it is not.
            raise errors.SnapshotCorruptError(
                f"{root}: the manifest is of model {manifest.spec.model!r} version {manifest.version}, "
                f"the folder says {real.parent.name!r} {real.name!r}"
            )
        absent = set() if rows_here else {entry.path for tables in manifest.tables for entry in tables.rows}
        entries = [entry for entry in manifest.files() if entry.path not in absent]
        paths = {entry.path: manifests.snapshot_file(root, entry.path) for entry in entries}
        manifests.check_manifest_checksum(root, found)
        for entry in entries:
            at = paths[entry.path]
            with errors.file_errors(at, "read"):
                size_bytes = at.stat().st_size
            if size_bytes != entry.size_bytes:
                raise errors.SnapshotCorruptError(f"{at}: {size_bytes} bytes, the manifest says {entry.size_bytes}")
        headers = {relative: read_header(at) for relative, at in paths.items() if relative != manifests.PROGRAM_PATH}
        snapshot = cls(root, manifest, found, headers)
        snapshot._check_headers()  # before anything is read as a whole, or hashed
        if verify:
            snapshot.check_content(files, progress=progress)
        if files != "rows":
            snapshot.golden()
        return snapshot

    def check_content(
        self, files: VerifiedFiles = "all", *, threads: int = 2, progress: Progress = no_progress
    ) -> None:
        """Compare every file's SHA-256, and check vocabularies and row classes. Raises SnapshotCorruptError as `open`.

        Ids of a vocabulary must not be negative or there twice, and be those of its strings.
        """
        rows = {entry.path for table in self.manifest.tables for entry in (*table.rows, table.access_counts) if entry}
        entries = [file for file in self.manifest.files() if files == "all" or (file.path in rows) == (files == "rows")]
        on_bytes = counting(progress, "checking SHA-256", sum(entry.size_bytes for entry in entries))

        def check(entry: FileEntry, path: Path) -> None:
            with errors.file_errors(path, "read"):
                sha256 = hash_file(path, on_bytes)
            if sha256 != entry.sha256:
                raise errors.SnapshotCorruptError(f"{path}: SHA-256 is {sha256}, the manifest says {entry.sha256}")

        paths = [manifests.snapshot_file(self.path, entry.path) for entry in entries]
        with ThreadPoolExecutor(max_workers=threads) as pool:
            list(pool.map(check, entries, paths))  # which cancels the others when one fails
        for table in self.manifest.tables if files != "rows" else ():
            if table.vocabulary is not None:
                check_vocabulary_ids(self.path / table.vocabulary.path, self.vocabulary(table.table))
                self.vocabulary_strings(table.table)
            if table.row_classes is not None:
                self.row_classes(table.table)

    def as_version(self, version: int) -> Snapshot:
        """Return the same snapshot under another number, which its folder does not have."""
        if version == self.version:
            return self
        # A stream that this version begins, the other one begins.
        base = None if self.manifest.delta_base == self.version else self.manifest.delta_base
        manifest = self.manifest.model_copy(update={"version": version, "delta_base": base})
        return Snapshot(
            self.path, manifest, manifests.manifest_texts(manifest)[manifests.CHECKSUM_NAME].split()[0], self._headers
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.size_bytes for entry in self.manifest.files())

    @property
    def float32_bytes(self) -> int:
        """Bytes that the tables' rows would take as float32."""
        return sum(4 * table.num_embeddings * table.embedding_dim for table in self.spec.logical_tables)

    def rows_at(self, table: str, file_index: int) -> tuple[Path, int]:
        """Return where the stored rows of a row file of a stored table begin: the file, and the offset in it."""
        path, header = self._header(self._files[table].rows[file_index])
        return path, header["rows"].offset

    def rows_file(self, table: str, file_index: int) -> ByteArray:
        """Map the stored rows of a row file of a stored table, uint8 [rows, row_bytes] in bucket order.

        Read-only. Keeps no file descriptor; unmapped when the last array over it is gone. Raises as `map_tensor`.
        """
        path, header = self._header(self._files[table].rows[file_index])
        return map_tensor(path, header["rows"], np.uint8)

    def keys(self, table: str, file_index: int) -> npt.NDArray[np.int64]:
        """Map the keys of a row file of a stored table that has such: read-only int64 [rows], by bucket."""
        path, header = self._header(self._files[table].rows[file_index])
        return map_tensor(path, header["keys"], np.int64)

    def missing_row(self, table: str) -> ByteArray:
        """Return the stored row that a missing key of a stored table gets, uint8 [1, row_bytes]: zeros, or the mean."""
        spec = self._tables[table]
        if (entry := self._files[table].missing_row) is None:
            return np.zeros((1, RowCodec(spec.dtype, spec.embedding_dim).row_bytes), np.uint8)
        path, header = self._header(entry)
        return map_tensor(path, header["row"], np.uint8)

    def read_rows(self, table: str, first_row: int, num_rows: int) -> ByteArray:
        """Copy rows [first_row, first_row + num_rows) of a stored table in row order, uint8 [num_rows, row_bytes]."""
        table_spec, rows_per_file = self._tables[table], self._files[table].rows_per_file
        last_row = first_row + num_rows
        if not 0 <= first_row <= last_row <= table_spec.num_embeddings:
            raise IndexError(f"rows [{first_row}, {last_row}) of table {table!r} with {table_spec.num_embeddings} rows")
        rows = np.empty((num_rows, RowCodec(table_spec.dtype, table_spec.embedding_dim).row_bytes), np.uint8)
        row = first_row
        while row < last_row:
            file_index, local_row = divmod(row, rows_per_file)
            count = min(last_row - row, rows_per_file - local_row)
            local_rows = np.arange(local_row, local_row + count, dtype=np.int64)
            positions = RowBuckets.of(table_spec).in_file(rows_per_file, file_index).positions(local_rows)
            rows[row - first_row : row - first_row + count] = self.rows_file(table, file_index)[positions]
            row += count
        return rows

    def vocabulary(self, table: str) -> npt.NDArray[np.int64]:
        """Map the ids of a table's vocabulary in row order, read-only int64 [V]. Raises KeyError if it has none."""
        path, header = self._header(self._vocabulary_entry(table))
        return map_tensor(path, header["ids"], np.int64)

    def vocabulary_strings(self, table: str) -> list[str] | None:
        """Read the strings of a vocabulary in row order; None for an integer one. Raises KeyError as `vocabulary`."""
        path, header = self._header(self._vocabulary_entry(table))
        if not id_type_is_string(self._logical[table]):
            return None
        tensors = load_numpy(path, header)
        return decode_strings(path, tensors["ids"], tensors)

    def access_counts(self, table: str) -> npt.NDArray[np.uint32] | None:
        """Map how often each row of a table, or slice, was looked up, read-only uint32 [num_embeddings], if known."""
        if (entry := self._files[self._first_slice[table]].access_counts) is None:
            return None
        path, header = self._header(entry)
        return map_tensor(path, header[COUNTS_TENSOR], np.uint32)

    def row_classes(self, table: str) -> RowClasses:
        """Map in which part of a divided table each row is. Raises KeyError if it has no classes.

        Raises SnapshotCorruptError if they do not count what they should, for which they are read in full.
        """
        entry, divided = self._files[self._first_of[table]].row_classes, self._logical[table]
        if entry is None or not isinstance(divided, DividedTable):
            raise KeyError(f"table {table!r} has no row classes")
        path, header = self._header(entry)
        dtypes = {"U8": np.uint8, "U32": np.uint32}
        tensors = {name: map_tensor(path, info, dtypes[info.dtype]) for name, info in header.items()}
        return RowClasses.of_tensors(path, divided, self.spec.parts(divided), tensors)

    def dense_tensors(self) -> dict[str, torch.Tensor]:
        """Return the dense model's tensors by name, in memory; none of an exported program, which has them itself."""
        import torch  # which takes a second: processes that supervise, or place rows, read no dense model

        if self.manifest.dense.path == manifests.PROGRAM_PATH:
            return {}
        return {name: torch.from_numpy(array) for name, array in load_numpy(*self._header(self.manifest.dense)).items()}

    @property
    def program_path(self) -> Path:
        """Return where an exported program lies."""
        return self.path / manifests.PROGRAM_PATH

    def golden(self) -> GoldenRequests | None:
        """Read the golden requests, if the snapshot has any. Raises SnapshotCorruptError if they do not fit."""
        if self.manifest.golden is None:
            return None
        path, header = self._header(self.manifest.golden.file)
        try:
            golden = GoldenRequests.from_tensors(load_numpy(path, header))
            golden.check(self.spec)
        except errors.ExportError as error:
            raise errors.SnapshotCorruptError(f"{path}: {errors.cut(error, 1000)}") from error
        return golden

    def plan_text(self) -> bytes | None:
        """Read the text of the plan file that the snapshot carries, if it does; the router knows what it says."""
        if (entry := self.manifest.plan) is None:
            return None
        return load_numpy(*self._header(entry))[manifests.PLAN_TENSOR].tobytes()

    def _vocabulary_entry(self, table: str) -> FileEntry:
        if (entry := self._files[self._first_of[table]].vocabulary) is None:
            raise KeyError(f"table {table!r} has no vocabulary")
        return entry

    def _check_headers(self) -> None:
        for table, files in zip(self.spec.stored_tables, self.manifest.tables, strict=True):
            logical = self._logical[table.name]
            row_bytes = RowCodec(table.dtype, table.embedding_dim).row_bytes
            for file_index, entry in enumerate(files.rows):
                rows = min(files.rows_per_file, files.num_rows(table) - file_index * files.rows_per_file)
                expected: dict[str, tuple[str, tuple[int, ...]]] = {"rows": ("U8", (rows, row_bytes))}
                if table.keys is not None:
                    expected["keys"] = ("I64", (rows,))
                if entry.path in self._headers:
                    expect_tensors(*self._header(entry), expected)
            if files.missing_row is not None:
                expect_tensors(*self._header(files.missing_row), {"row": ("U8", (1, row_bytes))})
            if files.vocabulary is not None:
                check_vocabulary_header(logical, *self._header(files.vocabulary))
            if files.row_classes is not None and isinstance(logical, DividedTable):
                check_classes_header(logical, self.spec.parts(logical), *self._header(files.row_classes))
            if files.access_counts is not None:
                expect_tensors(*self._header(files.access_counts), {COUNTS_TENSOR: ("U32", (table.num_embeddings,))})
        if (plan := self.manifest.plan) is not None:
            path, header = self._header(plan)
            expect_at_most(path, header, manifests.MAX_PLAN_BYTES)
            expect_tensors(path, header, {manifests.PLAN_TENSOR: ("U8", (length_of(header, manifests.PLAN_TENSOR),))})
        if (golden := self.manifest.golden) is not None:
            check_golden_header(self.spec, golden, *self._header(golden.file))
        dense = self.manifest.dense
        if dense.path == manifests.PROGRAM_PATH:
            if dense.size_bytes > manifests.MAX_DENSE_BYTES:
                limit = f"at most {manifests.MAX_DENSE_BYTES} are allowed"
                raise errors.SnapshotCorruptError(f"{self.program_path}: {dense.size_bytes} bytes; {limit}")
            return
        path, header = self._header(dense)
        expect_at_most(path, header, manifests.MAX_DENSE_BYTES)
        for name, info in header.items():
            if info.dtype not in _DENSE_DTYPES:
                where = f"{path}: tensor {errors.cut(repr(name))}"
                raise errors.SnapshotCorruptError(f"{where} is {info.dtype}; allowed: {sorted(_DENSE_DTYPES)}")

    def _header(self, entry: FileEntry) -> tuple[Path, Mapping[str, TensorInfo]]:
        return self.path / entry.path, self._headers[entry.path]


class VerifyReport(Frozen):
    """The result of `verify_snapshot`.

    Attributes:
        problems: each names the file, or the table and row, and the reason. A snapshot that can't be opened has only
            one.
        checks: what was checked and right.
        golden_checked: scores of golden requests were compared, which is not done here.
        files: all that the manifest names; empty if it can't be read.
        model, version: what the manifest says; None if it can't be read.
    """

    path: str
    ok: bool
    problems: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    golden_checked: bool = False
    files: tuple[FileEntry, ...] = ()
    model: str | None = None
    version: int | None = None


def verify_snapshot(path: str | Path, *, progress: Progress = no_progress) -> VerifyReport:
    """Check a snapshot in full, every row included, and report; a bad one raises nothing.

    Raises SnapshotResourceError if file descriptors or memory ran out, which says nothing about the snapshot.
    """
    try:
        snapshot = Snapshot.open(path, verify=True, progress=progress)
    except errors.SnapshotResourceError:
        raise
    except errors.SnapshotError as error:
        stated: dict[str, Any] = {}
        with suppress(errors.SnapshotError):
            manifest, _ = manifests.read_manifest(Path(path))
            stated = {"files": manifest.files(), "model": manifest.spec.model, "version": manifest.version}
        return VerifyReport(path=str(path), ok=False, problems=(f"{error.kind}: {error}",), **stated)
    checks = ["manifest, paths, sizes, SHA-256, dtypes, shapes, vocabularies and golden requests of every file"]
    problems: list[str] = []
    for table, files in zip(snapshot.spec.stored_tables, snapshot.manifest.tables, strict=True):
        bad_rows = _check_rows(snapshot, table, files, progress) + _check_keys(snapshot, table, files)
        problems += bad_rows
        if not bad_rows:
            unique = "" if table.keys is None else ", and no key is there twice"
            checks.append(f"table {table.name!r}: all {files.num_rows(table)} rows decode to finite values{unique}")
    dense = snapshot.manifest.dense.path
    for name, tensor in snapshot.dense_tensors().items():
        if not bool(tensor.isfinite().all()):
            problems.append(f"{dense}: tensor {name!r} holds NaN or inf")
    if dense == manifests.PROGRAM_PATH:
        try:
            ProgramArchive.read(snapshot.program_path)
            checks.append("exported program: nothing in it is pickled")
        except errors.SnapshotError as error:
            problems.append(f"{error.kind}: {error}")
    elif not problems:
        checks.append("dense tensors: all values are finite")
    return VerifyReport(
        path=str(path),
        ok=not problems,
        problems=tuple(problems),
        checks=tuple(checks),
        files=snapshot.manifest.files(),
        model=snapshot.spec.model,
        version=snapshot.version,
    )


def _check_rows(snapshot: Snapshot, table: TableSpec, files: TableFiles, progress: Progress) -> list[str]:
    """Return one problem per file with a bad row: its first one, by number."""
    codec = RowCodec(table.dtype, table.embedding_dim)
    block_rows = max(1, _BLOCK_BYTES // codec.row_bytes)
    problems, done = [], 0
    for file_index, entry in enumerate(files.rows):
        stored = snapshot.rows_file(table.name, file_index)
        for start in range(0, len(stored), block_rows):
            bad = codec.first_non_finite(stored[start : start + block_rows])
            if bad is not None:
                if table.keys is not None:
                    row = f"key {snapshot.keys(table.name, file_index)[start + bad]}"
                else:
                    order = RowBuckets.of(table).in_file(files.rows_per_file, file_index)
                    row = f"row {order.rows_at(np.array([start + bad]))[0]}"
                problems.append(f"{entry.path}: table {table.name!r}, {row}: decodes to NaN or inf")
                break
        done += len(stored)
        progress(f"checking rows of {table.name}", done, files.num_rows(table))
    return problems


def _check_keys(snapshot: Snapshot, table: TableSpec, files: TableFiles) -> list[str]:
    """Return one problem for each file whose keys are not in order, and one for a key that is there twice."""
    if table.keys is None:
        return []
    of_files = [snapshot.keys(table.name, file_index) for file_index in range(len(files.rows))]
    problems = [
        f"{entry.path}: table {table.name!r}: keys are not in the order of their buckets"
        for entry, keys in zip(files.rows, of_files, strict=True)
        if (np.diff(key_buckets(keys)) < 0).any()
    ]
    if (twice := first_twice(np.concatenate(of_files))) is not None:
        problems.append(f"table {table.name!r}: key {twice} is there twice")
    return problems
