"""A partition's arenas, built and filled from a snapshot's row files: the rows of a CPU engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader.errors import SnapshotCorruptError, file_error
from loader.memory import populate
from loader.progress import PIECE_BYTES, Progress
from loader.snapshot.codecs import codec_for
from loader.snapshot.layout import bucket_shift, bucket_start_in_file, row_at_position
from loader.snapshot.manifest import NUM_BUCKETS, FileEntry, TableFiles, TableSpec
from loader.snapshot.reader import Snapshot
from shard_node.bags import Int64Array, TableLayout
from shard_node.engine.arena import NO_FILES_SHIFT, NOT_HERE, Arena, Placement, TablePlace, allocate_rows, row_bytes_of
from shard_node.engine.base import Tier
from shard_node.engine.cpu import CpuEngine
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.node import Partition

ByteArray = npt.NDArray[np.uint8]


class RowCopy:
    """Reads one snapshot's row files for one partition: rows are checked, then copied or brought into memory.

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
            SnapshotCorruptError: a row decodes to NaN or inf; so in all that reads rows.
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
        """Copies the buckets `here`; each is one run of each file and lands behind what it already has.

        Args:
            table: whose rows.
            arena: uint16 [256], the arena that takes a bucket.
            starts: int64 [256], the slot at which a bucket begins there.
            rows_by_arena: the arenas' rows.
            here: the buckets to be copied.
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
        """Checks rows that stay in a mapped file, and brings their pages into memory, as far as that holds them.

        `source` is file `index` of the table, mapped; `here` are the buckets of interest, ascending.
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
    """Makes the error that says which row, in which file, decodes to NaN or inf."""
    return SnapshotCorruptError(f"{snapshot.path / entry.path}: table {table!r}, row {row}: decodes to NaN or inf")


def _pieces(begin: int, end: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    rows = max(1, PIECE_BYTES // row_bytes)
    for first in range(begin, end, rows):
        yield first, min(first + rows, end)


def runs_of(buckets: list[int]) -> Iterator[tuple[int, int]]:
    """Gives ascending numbers as [first, end) of what follows one another."""
    edges = np.flatnonzero(np.diff(buckets) != 1) + 1 if buckets else np.zeros(0, np.int64)
    for part in np.split(np.array(buckets, np.int64), edges):
        if part.size:
            yield int(part[0]), int(part[-1]) + 1


def layout_for(snapshot: Snapshot, partition: Partition) -> TableLayout:
    """Returns the layout of a snapshot's tables. Raises InvalidBagsError unless the partition has as many tables."""
    layout = TableLayout.of(snapshot.spec)
    if partition.card_of_bucket.shape[0] != len(layout.tables):
        raise InvalidBagsError(
            f"the partition is for {partition.card_of_bucket.shape[0]} tables, the model has {len(layout.tables)}"
        )
    return layout


@dataclass(slots=True)
class _Filling:
    """An arena while it is filled: the next free slot."""

    number: int
    rows: npt.NDArray[np.uint8]
    next_slot: int = 0


class ArenaBuilder:
    """Builds the arenas and places of one partition, table by table in layout order.

    `table_bytes` are those of the rows of each table.
    """

    def __init__(self, snapshot: Snapshot, layout: TableLayout, partition: Partition) -> None:
        self._snapshot = snapshot
        self._layout = layout
        self._cards = partition.card_of_bucket
        self._files = {files.table: files for files in snapshot.manifest.tables}
        self._bucket_rows = np.stack([rows_of_buckets(table) for table in layout.tables])
        rows = np.where(self._cards >= 0, self._bucket_rows, 0).sum(axis=1)
        self._row_bytes = [row_bytes_of(table.dtype, table.embedding_dim) for table in layout.tables]
        self.table_bytes = [int(count) * size for count, size in zip(rows.tolist(), self._row_bytes, strict=True)]
        self._arenas: list[Arena] = []

    def build(self, tiers: Sequence[Tier], copy: RowCopy) -> CpuEngine:
        """Allocates and fills all arenas, once; `tiers` are those of the tables."""
        places: list[TablePlace] = []
        group_arenas: list[range] = []
        for group in self._layout.groups:
            first_arena = len(self._arenas)
            by_card = self._allocate(group.first_table, group.end_table, tiers)
            for number in range(group.first_table, group.end_table):
                table = self._layout.tables[number]
                if tiers[number] == "ram":
                    places.append(self._place_in_ram(number, table, by_card, copy))
                else:
                    places.append(self._place_mapped(number, table, copy))
            group_arenas.append(range(first_arena, len(self._arenas)))
        return CpuEngine(self._layout, self._arenas, group_arenas, Placement(self._layout, places), tiers)

    def _allocate(self, first_table: int, end_table: int, tiers: Sequence[Tier]) -> dict[int, _Filling]:
        in_ram = np.array([tier == "ram" for tier in tiers[first_table:end_table]])[:, None]
        cards = np.where(in_ram, self._cards[first_table:end_table], -1)
        rows = self._bucket_rows[first_table:end_table]
        table = self._layout.tables[first_table]
        by_card: dict[int, _Filling] = {}
        for card in np.unique(cards[(cards >= 0) & (rows > 0)]).tolist():
            memory = allocate_rows(int(rows[cards == card].sum()), self._row_bytes[first_table])
            by_card[card] = _Filling(len(self._arenas), memory)
            self._arenas.append(Arena(table.dtype, table.embedding_dim, memory, card, "ram"))
        return by_card

    def _place_in_ram(self, number: int, table: TableSpec, by_card: dict[int, _Filling], copy: RowCopy) -> TablePlace:
        cards = self._cards[number]
        used = self._bucket_rows[number] > 0
        arena = np.full(NUM_BUCKETS, NOT_HERE, np.uint16)
        base = np.zeros(NUM_BUCKETS, np.int64)
        here = np.unique(cards[used]).tolist()
        shift = bucket_shift(table.bucketing, table.num_embeddings)
        if len(here) == 1 and here[0] >= 0:
            filling = by_card[here[0]]
            arena[:], base[:] = filling.number, filling.next_slot
            copy.in_row_order(table, filling.rows[filling.next_slot :][: table.num_embeddings])
            filling.next_slot += table.num_embeddings
            return TablePlace(NO_FILES_SHIFT, shift, 0, arena, base)
        starts = np.zeros(NUM_BUCKETS, np.int64)
        for bucket in np.flatnonzero(used & (cards >= 0)).tolist():
            filling = by_card[int(cards[bucket])]
            arena[bucket], starts[bucket] = filling.number, filling.next_slot
            filling.next_slot += int(self._bucket_rows[number, bucket])
        rows_by_arena = {filling.number: filling.rows for filling in by_card.values()}
        copy.buckets(table, arena, starts, rows_by_arena, np.flatnonzero(arena != NOT_HERE).tolist())
        if table.bucketing == "hash":
            return TablePlace(NO_FILES_SHIFT, shift, 8, arena, starts)
        # In a range bucket the row itself counts up, from the bucket's first row.
        return TablePlace(NO_FILES_SHIFT, shift, 0, arena, starts - (np.arange(NUM_BUCKETS, dtype=np.int64) << shift))

    def _place_mapped(self, number: int, table: TableSpec, copy: RowCopy) -> TablePlace:
        """Leaves a table in its row files: one arena for each, on the card of its first bucket here."""
        files = self._files[table.name]
        cards = self._cards[number]
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
            copy.bring_in(table, index, source, here.tolist())
            arena[index, here] = len(self._arenas)
            self._arenas.append(Arena(table.dtype, table.embedding_dim, source, int(cards[here[0]]), "mapped"))
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


def rows_of_buckets(table: TableSpec) -> Int64Array:
    """Counts the rows of a table in each bucket, int64 [256]."""
    rows = table.num_embeddings
    buckets = np.arange(NUM_BUCKETS + 1, dtype=np.int64)
    if table.bucketing == "hash":
        rounded_up: Int64Array = -((buckets[:-1] - rows) // NUM_BUCKETS)
        return rounded_up.clip(min=0)
    edges: Int64Array = np.minimum(buckets << bucket_shift("range", rows), rows)
    return np.diff(edges)
