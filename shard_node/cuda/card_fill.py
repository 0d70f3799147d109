"""Rows on their way from a snapshot's files to cards: checked, laid out anew, and sent where their places say.

A piece of a file is packed by owner into a pinned buffer, and each card is sent its own rows and the hot ones; pinned
rows are written by card 0, over the bus, so that all rows go one way. While cards work on one buffer, the other is
packed. Their streams have a low priority: lookups of live versions go first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.progress import PIECE_BYTES, Progress
from loader.snapshot.codecs import codec_for
from loader.snapshot.layout import bucket_start_in_file, rows_at_positions, rows_in_file
from loader.snapshot.manifest import TableFiles, TableSpec
from loader.snapshot.reader import Snapshot
from shard_node.bags import Int64Array
from shard_node.cuda.arena_on_card import ArenaOnCards
from shard_node.cuda.cards import Cards
from shard_node.cuda.kernel_params import CHUNK_BYTES
from shard_node.cuda.placer import PIECE_ROWS, Placer
from shard_node.cuda.places import owners_of
from shard_node.cuda.row_upload import RowUpload
from shard_node.engine.arena_builder import not_finite, runs_of
from shard_node.planning.card_plan import CardPlan

ByteArray = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
Spans = list[tuple[int, int]]

NUM_UPLOADS = 2
UPLOAD_BYTES = PIECE_BYTES
NUMBER_BYTES = 4


class CardFill:
    """Fills the arenas of one plan, one after the other; a context in which its buffers exist.

    Args:
        snapshot: whose rows.
        plan: where they go.
        cards: all cards.
        progress: told the bytes, as stored, every few megabytes.
        upload_bytes: of one buffer; two of them are on the host and on each card.

    Raises:
        MemoryBudgetError: a card or the host has no room for the buffers.
    """

    def __init__(
        self, snapshot: Snapshot, plan: CardPlan, cards: Cards, progress: Progress, upload_bytes: int = UPLOAD_BYTES
    ) -> None:
        self._snapshot = snapshot
        self._plan = plan
        self._placer = Placer(plan)
        self._files = {files.table: files for files in snapshot.manifest.tables}
        self._num_cards = plan.num_cards
        self._upload_bytes = upload_bytes
        self._progress = progress
        self._total_bytes = sum(
            _stored_bytes(plan, number) for number in range(len(plan.layout.tables)) if _is_streamed(plan, number)
        )
        self._done_bytes = 0
        self._told_bytes = 0
        self._tell()
        self._streams = [card.stream(low_priority=True) for card in cards.cards]
        self._uploads: list[RowUpload] = []
        try:
            for _ in range(NUM_UPLOADS):
                self._uploads.append(RowUpload(cards, self._streams, upload_bytes))
        except BaseException:
            self.close()
            raise

    def arena(self, arena: ArenaOnCards) -> None:
        """Sends all places and rows of an arena's tables. They may still be on their way when it returns.

        Raises:
            SnapshotCorruptError: a row decodes to NaN or inf, or a file is not there any more.
        """
        for number in range(arena.group.first_table, arena.group.end_table):
            self._table(arena, number)

    def finish(self) -> None:
        """Waits until everything that was sent is in place."""
        for stream in self._streams:
            stream.synchronize()
        self._tell()

    def close(self) -> None:
        """Waits until no card works on anything of this, and frees the buffers. Idempotent."""
        uploads, self._uploads = self._uploads, []
        try:
            for stream in self._streams:
                stream.synchronize()
        finally:
            for upload in uploads:
                upload.free()

    def __enter__(self) -> CardFill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _table(self, arena: ArenaOnCards, number: int) -> None:
        table = self._plan.layout.tables[number]
        files = self._files[table.name]
        buckets: list[int] = np.flatnonzero(self._plan.partition.card_of_bucket[number] >= 0).tolist()
        is_streamed = _is_streamed(self._plan, number)
        pieces = self._placer.pieces(number, min(PIECE_ROWS, files.rows_per_file))
        places = np.empty(min(files.rows_per_file, table.num_embeddings), np.uint32)
        for index in range(len(files.rows)):
            num_rows = rows_in_file(table.num_embeddings, files.rows_per_file, index)
            placed = 0
            while placed < num_rows:
                _, piece = next(pieces)
                places[placed : placed + piece.size] = piece
                placed += piece.size
            self._send_places(arena, number, index * files.rows_per_file, places[:num_rows])
            if is_streamed:
                self._file(arena, number, index, places[:num_rows], buckets)

    def _send_places(self, arena: ArenaOnCards, number: int, first_row: int, places: UInt32Array) -> None:
        step = self._upload_bytes // NUMBER_BYTES
        for first in range(0, places.size, step):
            piece = places[first : first + step]
            upload = self._next_upload()
            upload.array[: piece.nbytes].view(np.uint32)[:] = piece
            for card in range(self._num_cards):
                target = arena.places_address(card, number - arena.group.first_table, first_row + first)
                upload.send(card, 0, piece.nbytes, target)
                upload.used(card)

    def _file(self, arena: ArenaOnCards, number: int, index: int, places: UInt32Array, buckets: list[int]) -> None:
        table = self._plan.layout.tables[number]
        files = self._files[table.name]
        codec = codec_for(table.dtype, table.embedding_dim)
        source = self._snapshot.rows_file(table.name, index)
        for spans in _pieces(_spans_of_buckets(table, files, index, buckets), self._rows_per_piece(arena)):
            stored = _joined([source[begin:end] for begin, end in spans])
            rows = _joined([rows_at_positions(table, files.rows_per_file, index, *span) for span in spans])
            bad = codec.first_non_finite(stored)
            if bad is not None:
                raise not_finite(self._snapshot, table.name, files.rows[index], int(rows[bad]))
            local = number - arena.group.first_table
            self._send_rows(arena, local, rows, stored, places[rows - index * files.rows_per_file])
            self._done_bytes += stored.nbytes
            if self._done_bytes - self._told_bytes >= min(PIECE_BYTES, self._upload_bytes):
                self._tell()

    def _rows_per_piece(self, arena: ArenaOnCards) -> int:
        """As many as fit an upload, whoever owns them: each owner's rows begin aligned, behind their numbers."""
        owners = self._num_cards + 2
        return (self._upload_bytes - owners * CHUNK_BYTES) // (arena.format.stride + NUMBER_BYTES)

    def _send_rows(
        self, arena: ArenaOnCards, table: int, rows: Int64Array, stored: ByteArray, places: UInt32Array
    ) -> None:
        owner = owners_of(places, self._num_cards)
        counts = np.bincount(owner, minlength=self._num_cards + 3)[: self._num_cards + 2]
        if counts.max() < owner.size:
            # By owner; mapped rows come last and are left out.
            order = np.argsort(owner, kind="stable")[: counts.sum()]
            rows, stored = rows[order], stored.view(f"V{stored.shape[1]}").reshape(-1)[order].view(np.uint8)
            stored = stored.reshape(rows.size, arena.format.row_bytes)
        upload = self._next_upload()
        first = first_byte = 0
        for number in np.flatnonzero(counts).tolist():
            end = first + int(counts[number])
            first_byte = self._send_owned(upload, arena, table, number, rows[first:end], stored[first:end], first_byte)
            first = end
        for card in range(self._num_cards):
            upload.used(card)

    def _send_owned(
        self,
        upload: RowUpload,
        arena: ArenaOnCards,
        table: int,
        owner: int,
        rows: Int64Array,
        stored: ByteArray,
        first: int,
    ) -> int:
        """Packs one owner's rows from byte `first` on, and sends them to who keeps them. Tells the next free byte."""
        num_rows = rows.size
        rows_at = _aligned(NUMBER_BYTES * num_rows)
        end = first + rows_at + num_rows * arena.format.stride
        upload.array[first : first + NUMBER_BYTES * num_rows].view(np.uint32)[:] = rows
        arena.format.relay(stored, upload.array[first + rows_at : end].reshape(num_rows, -1))
        pinned = owner == self._num_cards + 1
        for card in self._keepers(owner):
            numbers = upload.send(card, first, end - first)
            stream = self._streams[card]
            arena.write(card, table, numbers, numbers + rows_at, num_rows, stream, writes_host=pinned)
        return end

    def _keepers(self, owner: int) -> Sequence[int]:
        """The cards that write an owner's rows."""
        if owner < self._num_cards:
            return (owner,)
        return range(self._num_cards) if owner == self._num_cards else (0,)

    def _next_upload(self) -> RowUpload:
        upload = self._uploads.pop(0)
        self._uploads.append(upload)
        upload.wait()
        return upload

    def _tell(self) -> None:
        self._told_bytes = self._done_bytes
        self._progress("load", self._done_bytes, self._total_bytes)


def _is_streamed(plan: CardPlan, number: int) -> bool:
    """Whether a row of the table goes anywhere but into a mapped file."""
    split = plan.splits[number]
    return split.hot_rows + split.card_rows + split.host_rows > 0


def _stored_bytes(plan: CardPlan, number: int) -> int:
    """Of a table's rows on this node, as stored."""
    table = plan.layout.tables[number]
    return int(plan.tier_rows[number].sum()) * codec_for(table.dtype, table.embedding_dim).row_bytes


def _spans_of_buckets(table: TableSpec, files: TableFiles, index: int, buckets: list[int]) -> Spans:
    """Where, in one file, the rows of these buckets lie."""
    places = [
        tuple(bucket_start_in_file(table, files.rows_per_file, index, bucket) for bucket in run)
        for run in runs_of(buckets)
    ]
    return [(begin, end) for begin, end in places if begin < end]


def _pieces(spans: Spans, num_rows: int) -> Iterator[Spans]:
    """The spans, joined and cut so that each piece has at most num_rows rows."""
    piece: Spans = []
    left = num_rows
    for first, end in spans:
        begin = first
        while begin < end:
            cut = min(end, begin + left)
            piece.append((begin, cut))
            left -= cut - begin
            begin = cut
            if not left:
                yield piece
                piece, left = [], num_rows
    if piece:
        yield piece


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES) * CHUNK_BYTES
