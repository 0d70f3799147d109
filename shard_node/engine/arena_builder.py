"""A partition's arenas, built and filled from a snapshot's row files: the rows of a CPU engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loader.errors import SnapshotCorruptError, file_error
from loader.memory import populate
from loader.progress import PIECE_BYTES, Progress, no_progress
from loader.snapshot.codecs import bucket_shift, bucket_start_in_file, codec_for, row_at_position
from loader.snapshot.manifest import NUM_BUCKETS, FileEntry, TableSpec
from loader.snapshot.reader import Snapshot
from shard_node.bags import Int64Array, TableLayout
from shard_node.engine.arena import NO_FILES_SHIFT, NOT_HERE, Arena, Placement, TablePlace, allocate_rows
from shard_node.engine.base import Tier
from shard_node.engine.cpu import CpuEngine
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.partition import Partition

ByteArray = npt.NDArray[np.uint8]


class _Run(NamedTuple):
    """Rows [begin, end) of a table's row file: those of one bucket."""

    table: TableSpec
    file: int
    source: ByteArray
    is_checked: bool
    bucket: int
    begin: int
    end: int


@dataclass(slots=True)
class _Filling:
    """An arena while it is filled: the next free slot."""

    number: int
    rows: npt.NDArray[np.uint8]
    next_slot: int = 0


class ArenaBuilder:
    """Builds the arenas and places of one partition: checks rows, and copies them or brings them into memory.

    `table_bytes` are those of the rows of each table, in layout order.
    """

    def __init__(self, snapshot: Snapshot, layout: TableLayout, partition: Partition) -> None:
        self._snapshot = snapshot
        self._layout = layout
        self._cards = partition.card_of_bucket
        self._files = {files.table: files for files in snapshot.manifest.tables}
        self._bucket_rows = np.stack([rows_of_buckets(table) for table in layout.tables])
        rows = np.where(self._cards >= 0, self._bucket_rows, 0).sum(axis=1)
        self._row_bytes = [codec_for(table.dtype, table.embedding_dim).row_bytes for table in layout.tables]
        self.table_bytes = [int(count) * size for count, size in zip(rows.tolist(), self._row_bytes, strict=True)]
        self._arenas: list[Arena] = []
        self._progress = no_progress
        self._total_bytes = self._done_bytes = self._told_bytes = 0
        self._mapped_bytes = self._populated_bytes = 0

    def build(self, tiers: Sequence[Tier], progress: Progress) -> CpuEngine:
        """Allocates and fills all arenas, once; `tiers` are those of the tables.

        Raises:
            SnapshotCorruptError: a row decodes to NaN or inf, or a mapped file can't be read.
        """
        self._progress = progress
        self._total_bytes = sum(size for size, tier in zip(self.table_bytes, tiers, strict=True) if tier == "ram")
        self._mapped_bytes = sum(self.table_bytes) - self._total_bytes
        progress("load", 0, self._total_bytes)
        places: list[TablePlace] = []
        group_arenas: list[range] = []
        for group in self._layout.groups:
            first_arena = len(self._arenas)
            filling = self._allocate(group.first_table, group.end_table, tiers)
            for number in range(group.first_table, group.end_table):
                in_ram = tiers[number] == "ram"
                places.append(self._place_in_ram(number, filling) if in_ram else self._place_mapped(number))
            group_arenas.append(range(first_arena, len(self._arenas)))
        return CpuEngine(self._layout, self._arenas, group_arenas, Placement(self._layout, places), tiers)

    def _allocate(self, first_table: int, end_table: int, tiers: Sequence[Tier]) -> _Filling:
        """Allocate one arena for a group's rows in RAM, whichever cards they are for: RAM is one memory."""
        in_ram = np.array([tier == "ram" for tier in tiers[first_table:end_table]])[:, None]
        cards = np.where(in_ram, self._cards[first_table:end_table], -1)
        rows = self._bucket_rows[first_table:end_table]
        table, row_bytes = self._layout.tables[first_table], self._row_bytes[first_table]
        used = np.unique(cards[(cards >= 0) & (rows > 0)]).tolist()
        bytes_of_cards = {card: int(rows[cards == card].sum()) * row_bytes for card in used}
        filling = _Filling(len(self._arenas), allocate_rows(sum(bytes_of_cards.values()) // row_bytes, row_bytes))
        if used:
            self._arenas.append(Arena(table.dtype, table.embedding_dim, filling.rows, bytes_of_cards, "ram"))
        return filling

    def _place_in_ram(self, number: int, filling: _Filling) -> TablePlace:
        table, cards = self._layout.tables[number], self._cards[number]
        used = self._bucket_rows[number] > 0
        arena = np.full(NUM_BUCKETS, NOT_HERE, np.uint16)
        starts = np.zeros(NUM_BUCKETS, np.int64)
        shift = bucket_shift(table.bucketing, table.num_embeddings)
        if (cards[used] >= 0).all():
            arena[:], starts[:] = filling.number, filling.next_slot
            self._copy_in_row_order(table, filling.rows[filling.next_slot :][: table.num_embeddings])
            filling.next_slot += table.num_embeddings
            return TablePlace(NO_FILES_SHIFT, shift, 0, arena, starts)
        here = np.flatnonzero(used & (cards >= 0)).tolist()
        for bucket in here:
            arena[bucket], starts[bucket] = filling.number, filling.next_slot
            filling.next_slot += int(self._bucket_rows[number, bucket])
        filled = starts.copy()
        for run in self._runs(table, here):
            slot, count = int(filled[run.bucket]), run.end - run.begin
            self._copy(run, filling.rows[slot : slot + count])
            filled[run.bucket] += count
        self._tell()
        if table.bucketing == "hash":
            return TablePlace(NO_FILES_SHIFT, shift, 8, arena, starts)
        # In a range bucket the row itself counts up, from the bucket's first row.
        return TablePlace(NO_FILES_SHIFT, shift, 0, arena, starts - (np.arange(NUM_BUCKETS, dtype=np.int64) << shift))

    def _copy_in_row_order(self, table: TableSpec, target: ByteArray) -> None:
        """Copy a whole table, undoing the bucket order of `hash` files: bucket b's rows are b, b + 256, ..."""
        rows_per_file = self._files[table.name].rows_per_file
        for run in self._runs(table, range(NUM_BUCKETS)):
            part = target[run.file * rows_per_file :][: run.source.shape[0]]
            self._copy(run, part[run.bucket :: NUM_BUCKETS] if table.bucketing == "hash" else part[run.begin : run.end])
        self._tell()

    def _place_mapped(self, number: int) -> TablePlace:
        """Leaves a table in its row files: one arena for each, on the card of its first bucket here."""
        table, cards = self._layout.tables[number], self._cards[number]
        files = self._files[table.name]
        here = np.flatnonzero(cards >= 0)
        file_shift = files.rows_per_file.bit_length() - 1
        arena = np.full((len(files.rows), NUM_BUCKETS), NOT_HERE, np.uint16)
        base = np.zeros((len(files.rows), NUM_BUCKETS), np.int64)
        for index in range(len(files.rows) if here.size else 0):
            source = self._snapshot.rows_file(table.name, index, copy_on_write=True)
            if len(self._arenas) == NOT_HERE:
                raise MemoryBudgetError(
                    f"table {table.name!r}: a node has at most {NOT_HERE} arenas (row files mapped)"
                )
            self._bring_in(table, index, source, here.tolist())
            arena[index, here] = len(self._arenas)
            card = int(cards[here[0]])
            self._arenas.append(Arena(table.dtype, table.embedding_dim, source, {card: source.nbytes}, "mapped"))
            first_row = index * files.rows_per_file
            if table.bucketing == "hash":
                for bucket in here.tolist():
                    start = bucket_start_in_file(table, files.rows_per_file, index, bucket)
                    base[index, bucket] = start - (first_row >> 8)
            else:
                base[index, :] = -first_row
        shift = bucket_shift(table.bucketing, table.num_embeddings)
        slot_shift = 8 if table.bucketing == "hash" else 0
        return TablePlace(file_shift, shift, slot_shift, arena.reshape(-1), base.reshape(-1))

    def _bring_in(self, table: TableSpec, index: int, source: ByteArray, here: list[int]) -> None:
        """Check rows that stay in a mapped file, and bring their pages into memory, as far as that holds them."""
        files = self._files[table.name]
        for first, end in runs_of(here):
            begin = bucket_start_in_file(table, files.rows_per_file, index, first)
            stop = bucket_start_in_file(table, files.rows_per_file, index, end)
            for piece_begin, piece_end in _pieces(begin, stop, source.shape[1]):
                piece = source[piece_begin:piece_end]
                try:
                    populate(piece)
                except OSError as error:
                    raise file_error(self._snapshot.path / files.rows[index].path, "read", error) from error
                self._check(table, index, source, piece_begin, piece_end)
                self._populated_bytes += piece.nbytes
                self._progress("bring in mapped rows", self._populated_bytes, self._mapped_bytes)

    def _runs(self, table: TableSpec, here: Iterable[int]) -> Iterator[_Run]:
        """Find the buckets' runs of each row file; a small file is checked at once: its runs are too short."""
        files = self._files[table.name]
        for index in range(len(files.rows)):
            source = self._snapshot.rows_file(table.name, index)
            is_checked = source.nbytes <= PIECE_BYTES
            if is_checked:
                self._check(table, index, source, 0, source.shape[0])
            for bucket in here:
                begin = bucket_start_in_file(table, files.rows_per_file, index, bucket)
                end = bucket_start_in_file(table, files.rows_per_file, index, bucket + 1)
                if begin < end:
                    yield _Run(table, index, source, is_checked, bucket, begin, end)

    def _copy(self, run: _Run, target: ByteArray) -> None:
        for begin, end in _pieces(run.begin, run.end, run.source.shape[1]):
            if not run.is_checked:
                self._check(run.table, run.file, run.source, begin, end)
            target[begin - run.begin : end - run.begin] = run.source[begin:end]
            self._done_bytes += (end - begin) * run.source.shape[1]
            if self._done_bytes - self._told_bytes >= PIECE_BYTES:
                self._tell()

    def _check(self, table: TableSpec, index: int, source: ByteArray, begin: int, end: int) -> None:
        bad = codec_for(table.dtype, table.embedding_dim).first_non_finite(source[begin:end])
        if bad is not None:
            files = self._files[table.name]
            row = row_at_position(table, files.rows_per_file, index, begin + bad)
            raise not_finite(self._snapshot, table.name, files.rows[index], row)

    def _tell(self) -> None:
        self._told_bytes = self._done_bytes
        self._progress("load", self._done_bytes, self._total_bytes)


def layout_for(snapshot: Snapshot, partition: Partition) -> TableLayout:
    """Return the layout of a snapshot's tables. Raises InvalidBagsError unless the partition has as many tables."""
    layout = TableLayout.of(snapshot.spec)
    if partition.card_of_bucket.shape[0] != len(layout.tables):
        raise InvalidBagsError(
            f"the partition is for {partition.card_of_bucket.shape[0]} tables, the model has {len(layout.tables)}"
        )
    return layout


def rows_of_buckets(table: TableSpec) -> Int64Array:
    """Count the rows of a table in each bucket, int64 [256]."""
    rows = table.num_embeddings
    buckets = np.arange(NUM_BUCKETS + 1, dtype=np.int64)
    if table.bucketing == "hash":
        rounded_up: Int64Array = -((buckets[:-1] - rows) // NUM_BUCKETS)
        return rounded_up.clip(min=0)
    edges: Int64Array = np.minimum(buckets << bucket_shift("range", rows), rows)
    return np.diff(edges)


def not_finite(snapshot: Snapshot, table: str, entry: FileEntry, row: int) -> SnapshotCorruptError:
    """Make the error that says which row, in which file, decode to NaN or inf."""
    return SnapshotCorruptError(f"{snapshot.path / entry.path}: table {table!r}, row {row}: decodes to NaN or inf")


def _pieces(begin: int, end: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    rows = max(1, PIECE_BYTES // row_bytes)
    for first in range(begin, end, rows):
        yield first, min(first + rows, end)


def runs_of(buckets: list[int]) -> Iterator[tuple[int, int]]:
    """Give ascending numbers as [first, end) of what follows one another."""
    edges = np.flatnonzero(np.diff(buckets) != 1) + 1 if buckets else np.zeros(0, np.int64)
    for part in np.split(np.array(buckets, np.int64), edges):
        if part.size:
            yield int(part[0]), int(part[-1]) + 1
