"""Rows on their way out of a snapshot's files: checked, copied or brought into memory, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from loader.errors import SnapshotCorruptError, file_error
from loader.memory import populate
from loader.progress import PIECE_BYTES, Progress
from loader.snapshot.codecs import bucket_start_in_file, codec_for, row_at_position
from loader.snapshot.manifest import NUM_BUCKETS, FileEntry, TableFiles, TableSpec
from loader.snapshot.reader import Snapshot
from shard_node.bags import Int64Array

ByteArray = npt.NDArray[np.uint8]


class RowCopy:
    """Reads one snapshot's row files for one partition.

    Args:
        snapshot: whose rows.
        total_bytes: that will be copied.
        mapped_bytes: that will be brought in.
        progress: told the bytes, every few megabytes.
    """

    def __init__(self, snapshot: Snapshot, total_bytes: int, mapped_bytes: int, progress: Progress) -> None:
        self._snapshot = snapshot
        self._files: Mapping[str, TableFiles] = {files.table: files for files in snapshot.manifest.tables}
        self._total_bytes = total_bytes
        self._mapped_bytes = mapped_bytes
        self._progress = progress
        self._done_bytes = 0
        self._told_bytes = 0
        self._populated_bytes = 0
        progress("load", 0, total_bytes)

    def in_row_order(self, table: TableSpec, target: ByteArray) -> None:
        """Copies a whole table, undoing the bucket order of `hash` files: bucket b's rows are b, b + 256, ...

        Raises:
            SnapshotCorruptError: a row decodes to NaN or inf.
        """
        files = self._files[table.name]
        for index in range(len(files.rows)):
            source = self._snapshot.rows_file(table.name, index)
            part = target[index * files.rows_per_file :][: source.shape[0]]
            checked = self._check_if_small(table, index, source)
            if table.bucketing == "range":
                self._copy(table, index, source, 0, source.shape[0], part, checked)
                continue
            for bucket in range(min(NUM_BUCKETS, source.shape[0])):
                begin = bucket_start_in_file(table, files.rows_per_file, index, bucket)
                end = bucket_start_in_file(table, files.rows_per_file, index, bucket + 1)
                self._copy(table, index, source, begin, end, part[bucket::NUM_BUCKETS], checked)
        self._tell()

    def buckets(
        self,
        table: TableSpec,
        arena: npt.NDArray[np.uint16],
        starts: Int64Array,
        rows_by_arena: Mapping[int, ByteArray],
        here: list[int],
    ) -> None:
        """Copies some buckets; each is one run of each file and lands behind what it already has.

        Args:
            table: whose rows.
            arena: uint16 [256], the arena that takes a bucket.
            starts: int64 [256], the slot at which a bucket begins there.
            rows_by_arena: the arenas' rows.
            here: the buckets to be copied.

        Raises:
            SnapshotCorruptError: a row decodes to NaN or inf.
        """
        files = self._files[table.name]
        filled = np.zeros(NUM_BUCKETS, np.int64)
        for index in range(len(files.rows)):
            source = self._snapshot.rows_file(table.name, index)
            checked = self._check_if_small(table, index, source)
            for bucket in here:
                begin = bucket_start_in_file(table, files.rows_per_file, index, bucket)
                end = bucket_start_in_file(table, files.rows_per_file, index, bucket + 1)
                slot = int(starts[bucket] + filled[bucket])
                target = rows_by_arena[int(arena[bucket])][slot : slot + end - begin]
                self._copy(table, index, source, begin, end, target, checked)
                filled[bucket] += end - begin
        self._tell()

    def bring_in(self, table: TableSpec, index: int, source: ByteArray, here: list[int]) -> None:
        """Checks rows that stay in a mapped file, and has their pages in memory, as far as that holds them.

        Args:
            table: whose rows.
            index: of the file.
            source: its rows, mapped.
            here: the buckets that are of interest, ascending.

        Raises:
            SnapshotCorruptError: a row decodes to NaN or inf, or the file can't be read.
        """
        rows_per_file = self._files[table.name].rows_per_file
        for first, end in runs_of(here):
            begin = bucket_start_in_file(table, rows_per_file, index, first)
            stop = bucket_start_in_file(table, rows_per_file, index, end)
            for piece_begin, piece_end in _pieces(begin, stop, source.shape[1]):
                piece = source[piece_begin:piece_end]
                try:
                    populate(piece)
                except OSError as error:
                    path = self._snapshot.path / self._files[table.name].rows[index].path
                    raise file_error(path, "read", error) from error
                self._check(table, index, source, piece_begin, piece_end)
                self._populated_bytes += piece.nbytes
                self._progress("bring in mapped rows", self._populated_bytes, self._mapped_bytes)

    def _copy(
        self, table: TableSpec, index: int, source: ByteArray, begin: int, end: int, target: ByteArray, checked: bool
    ) -> None:
        for piece_begin, piece_end in _pieces(begin, end, source.shape[1]):
            if not checked:
                self._check(table, index, source, piece_begin, piece_end)
            target[piece_begin - begin : piece_end - begin] = source[piece_begin:piece_end]
            self._done_bytes += (piece_end - piece_begin) * source.shape[1]
            if self._done_bytes - self._told_bytes >= PIECE_BYTES:
                self._tell()

    def _check_if_small(self, table: TableSpec, index: int, source: ByteArray) -> bool:
        """Checks a small file at once: its buckets are too short to be checked one by one."""
        if source.nbytes > PIECE_BYTES:
            return False
        self._check(table, index, source, 0, source.shape[0])
        return True

    def _check(self, table: TableSpec, index: int, source: ByteArray, begin: int, end: int) -> None:
        bad = codec_for(table.dtype, table.embedding_dim).first_non_finite(source[begin:end])
        if bad is not None:
            files = self._files[table.name]
            row = row_at_position(table, files.rows_per_file, index, begin + bad)
            raise not_finite(self._snapshot, table.name, files.rows[index], row)

    def _tell(self) -> None:
        self._told_bytes = self._done_bytes
        self._progress("load", self._done_bytes, self._total_bytes)


def not_finite(snapshot: Snapshot, table: str, entry: FileEntry, row: int) -> SnapshotCorruptError:
    """The error that says which row, in which file, decodes to NaN or inf."""
    return SnapshotCorruptError(f"{snapshot.path / entry.path}: table {table!r}, row {row}: decodes to NaN or inf")


def _pieces(begin: int, end: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    rows = max(1, PIECE_BYTES // row_bytes)
    for first in range(begin, end, rows):
        yield first, min(first + rows, end)


def runs_of(buckets: list[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as [first, end) of what follows one another."""
    edges = np.flatnonzero(np.diff(buckets) != 1) + 1 if buckets else np.zeros(0, np.int64)
    for part in np.split(np.array(buckets, np.int64), edges):
        if part.size:
            yield int(part[0]), int(part[-1]) + 1
