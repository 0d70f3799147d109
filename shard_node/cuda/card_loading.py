"""From a snapshot's row files to a CUDA engine: planning, taking memory on cards and host, filling it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from loader.progress import PIECE_BYTES, Progress
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.reader import Snapshot
from shard_node.bags import Int64Array, TableLayout
from shard_node.buckets import Partition
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_rows import PIECE_ROWS, ArenaOnCards, Placer, finder_bytes
from shard_node.cuda.card_set import CardSet
from shard_node.cuda.kernel_params import CHUNK_BYTES, NOT_HERE, ByteArray, RowFormat, UInt32Array, owners_of, round_up
from shard_node.cuda.uploads import NUM_UPLOADS, Uploads
from shard_node.engine.arena_builder import TableLoad, check_finite, keyed_orders, layout_for
from shard_node.engine.key_index import index_bytes
from shard_node.engine.keyed_tables import MISSING_ROW, KeyedTables, capacities_here, local_keys, slot_tables
from shard_node.engine.memory import Claim, RowMemory
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.planning.card_plan import BUCKET_BYTES, CardBudget, CardPlan
from shard_node.planning.hotness import Hotness, ObservedCounts, RowCounts

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Cards

logger = logging.getLogger(__name__)

Place: TypeAlias = Callable[[Int64Array], tuple[Int64Array, UInt32Array]]
"""Returns the rows int64 [n], and their places uint32 [n], of rows, or keys, int64 [n] of this node."""
NamesAt: TypeAlias = Callable[[Int64Array], Int64Array]
"""Returns the rows int64 [n] at positions of a file, int64 [n]; of a table with keys these."""
UPLOAD_BYTES = PIECE_BYTES
NUMBER_BYTES = 4


class CardTableLoad(TableLoad):
    """A load onto cards, before it begins: what it will take is known, nothing is taken yet.

    The plan depends on the card set's options, not on what other versions hold: a version is never placed worse because
    another one is still there. If there is no room beside that, `take` refuses.

    Arguments and errors are those of `prepare_load`; rows pass through buffers of `upload_bytes`. Counts in `observed`
    of another number of rows are left out, and what the snapshot says itself goes first. `card_bytes`, by card, and
    `pinned_bytes` of RAM are what rows and places will take.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        partition: Partition,
        plan_digest: str,
        card_set: CardSet,
        memory_budget_bytes: int | None = None,
        observed: ObservedCounts | None = None,
        upload_bytes: int = UPLOAD_BYTES,
    ) -> None:
        layout = layout_for(snapshot, partition)
        num_cards = len(card_set.cards.cards)
        if partition.num_cards != num_cards:
            raise InvalidBagsError(
                f"the partition is for {partition.num_cards} cards, but there are {num_cards} ({card_set.cards.name})"
            )
        super().__init__(snapshot, partition, plan_digest)
        self._layout, self._card_set = layout, card_set
        self._local = local_keys(layout, partition)
        capacity = capacities_here(layout, self._local)
        self._key_bytes = index_bytes(capacity.values())
        self._upload_bytes = upload_bytes
        options, pinned_bytes = card_set.options, int(card_set.options.pinned_memory_gb * 1e9)
        if memory_budget_bytes is not None:
            if self._key_bytes > memory_budget_bytes:
                raise MemoryBudgetError(f"keys take {self._key_bytes} bytes, the budget is {memory_budget_bytes}")
            pinned_bytes = min(pinned_bytes, memory_budget_bytes - self._key_bytes)
        hot_bytes = None if options.hot_gb is None else int(options.hot_gb * 1e9)
        budget = CardBudget(card_set.card_bytes, pinned_bytes, hot_bytes, card_set.cards.peer_access)
        slots, on_cards = slot_tables(layout, partition, capacity)
        self.plan = CardPlan.make(slots, on_cards, budget, _hotness(snapshot, layout, observed or {}))
        # The plan counts the entries of buckets as places, which arenas have with their tables.
        extra = sum(finder_bytes(self.plan, range(group.first_table, group.end_table)) for group in slots.groups)
        extra -= sum(places.buckets for places in self.plan.places) * BUCKET_BYTES
        self.card_bytes = tuple(self.plan.bytes(card).total + extra for card in range(partition.num_cards))
        self.pinned_bytes = self.plan.pinned_bytes

    def take(self, memory: RowMemory) -> Sequence[Claim]:
        """As `TableLoad.take`."""
        upload_bytes = [NUM_UPLOADS * self._upload_bytes] * len(self.card_bytes)
        with ExitStack() as undo:
            cards = self._card_set.memory.take(self.card_bytes)
            undo.callback(cards.give_back)
            uploads = self._card_set.memory.take(upload_bytes, is_temporary=True)
            undo.callback(uploads.give_back)
            host = memory.take(self.pinned_bytes + self._key_bytes)
            undo.pop_all()
        return cards, uploads, host

    def build(self, progress: Progress) -> CardEngine:
        """As `TableLoad.build`."""
        cards = self._card_set.cards
        keyed = KeyedTables(self._layout, self._local) if self._local else None
        with ExitStack() as undo:
            arenas: list[ArenaOnCards] = []
            # Last in, first out: the cards have ended what was put on them before any memory is freed.
            for group in self.plan.layout.groups:
                arena = ArenaOnCards(cards, group, Placer(self.plan))
                undo.callback(arena.free)
                arenas.append(arena)
            with closing(CardFill(self._snapshot, self.plan, cards, progress, self._upload_bytes)) as fill:
                for arena in arenas:
                    fill.arena(arena, keyed)
                fill.finish()
            engine = CardEngine(self._card_set, arenas, self.plan, keyed)
            undo.pop_all()
        name, version = self._snapshot.spec.model, self._snapshot.version
        for use in engine.memory():
            logger.info("%s %d: card %d holds %d bytes in tier %s", name, version, use.card, use.size_bytes, use.tier)
        return engine


def _hotness(snapshot: Snapshot, layout: TableLayout, observed: ObservedCounts) -> Hotness:
    """Return the snapshot's access counts if it has any, else what was observed, else tables by their lookups per byte.

    Not both: they were counted over other batches, and would not compare.
    """
    # Rows with keys are alike: they are not counted, and their numbers come and go.
    tables = [table for table in layout.tables if table.keys is None]
    stated = {table.name: snapshot.access_counts(table.name) for table in tables}
    known: dict[str, RowCounts] = {name: counts for name, counts in stated.items() if counts is not None}
    if not known:
        known = {
            table.name: observed[table.name]
            for table in tables
            if table.name in observed and observed[table.name].shape == (table.num_embeddings,)
        }
    return Hotness(known)


class CardFill:
    """Fills the arenas of one plan, one after the other: rows are checked, laid out anew, and sent where they belong.

    A piece of a file is packed by owner into a pinned buffer, and each card is sent its own rows and the hot ones;
    pinned rows are written by card 0, over the bus, so that all rows go one way. While cards work on one buffer, the
    other is packed. Their streams have a low priority: lookups of live versions go first. Raises MemoryBudgetError if a
    card or the host has no room for the buffers, two of `upload_bytes` on each.
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
        row_bytes = [RowFormat.of(table.dtype, table.embedding_dim).row_bytes for table in plan.layout.tables]
        self._total_bytes = int(plan.tier_rows.sum(axis=(1, 2)) @ row_bytes)
        self._done_bytes = self._reported_bytes = 0
        self._report()
        self._streams = [card.stream(low_priority=True) for card in cards.cards]
        self._uploads = Uploads(cards, list(zip(cards.cards, self._streams, strict=True)), upload_bytes)

    def arena(self, arena: ArenaOnCards, keyed: KeyedTables | None) -> None:
        """Send all places and rows of an arena's tables, which may still be on their way when it returns."""
        for number in range(arena.group.first_table, arena.group.end_table):
            if keyed is None or number not in keyed.capacity:
                self._table(arena, number)
            else:
                self._keyed_table(arena, number, keyed)

    def finish(self) -> None:
        """Wait until everything that was sent is in place."""
        for stream in self._streams:
            stream.synchronize()
        self._report()

    def close(self) -> None:
        """Wait until no card works on anything of this, and free the buffers. Idempotent."""
        try:
            for stream in self._streams:
                stream.synchronize()
        finally:
            self._uploads.free()

    def _table(self, arena: ArenaOnCards, number: int) -> None:
        """Send the places of a table's rows, by which cards put rows where they belong, then rows file by file."""
        table = self._plan.layout.tables[number]
        files, buckets = self._files[table.name], RowBuckets.of(table)
        is_local = self._plan.partition.card_of_bucket[number] >= 0
        by_bucket = self._places_by_bucket(arena, number, buckets) if self._plan.places[number].buckets else None
        pieces = self._placer.pieces(number, min(PIECE_ROWS, files.rows_per_file))
        in_order = np.empty(min(files.rows_per_file, table.num_embeddings), np.uint32)
        for index in range(len(files.rows)):
            order = buckets.in_file(files.rows_per_file, index)
            positions = order.positions_of(is_local)
            if by_bucket is not None:
                self._file(arena, number, index, positions, order.rows_at, by_bucket)
                continue
            placed = 0
            while placed < order.num_rows:
                _, piece = next(pieces)
                in_order[placed : placed + piece.size] = piece
                placed += piece.size
            if self._plan.places[number].rows:
                self._send_places(arena, number, order.first_row, in_order[:placed])
            place = partial(lambda first, rows: (rows, in_order[rows - first]), order.first_row)
            self._file(arena, number, index, positions, order.rows_at, place)

    def _keyed_table(self, arena: ArenaOnCards, number: int, keyed: KeyedTables) -> None:
        """Send the places of all rows that a table with keys may have, what missing keys get, and keys' rows."""
        table = keyed.layout.tables[number]
        places = np.concatenate([piece for _, piece in self._placer.pieces(number)])
        if self._plan.places[number].rows:
            self._send_places(arena, number, 0, places)
        first, missing, stored = self._done_bytes, np.array([MISSING_ROW]), self._snapshot.missing_row(table.name)
        self._send_rows(arena, number - arena.group.first_table, stored, missing, places[missing])
        for index, order in enumerate(keyed_orders(self._snapshot, table)):
            load = partial(keyed.load, self._snapshot.path / self._files[table.name].rows[index].path, number)
            positions, keys = order.positions_of(keyed.is_local[number]), self._snapshot.keys(table.name, index)
            place = partial(lambda load, keys: (rows := load(keys), places[rows]), load)
            self._file(arena, number, index, positions, keys.take, place)
        # There may be fewer keys than rows.
        self._done_bytes = first + places.size * arena.format.row_bytes

    def _places_by_bucket(self, arena: ArenaOnCards, number: int, buckets: RowBuckets) -> Place:
        """Send the places of a table's rows, which are stored bucket by bucket, and return what reads them."""
        begins = self._placer.bucket_places(number)
        places = np.empty(self._plan.places[number].rows, np.uint32)

        def index_of(rows: Int64Array) -> Int64Array:
            return (begins[buckets.of_rows(rows)] + (rows >> buckets.slot_shift).view(np.uint64)).view(np.int64)

        for first, piece in self._placer.pieces(number):
            local = np.flatnonzero(piece != NOT_HERE)
            places[index_of(local + first)] = piece[local]
        self._send_places(arena, number, 0, places)
        return lambda rows: (rows, places[index_of(rows)])

    def _send_places(self, arena: ArenaOnCards, number: int, first_place: int, places: UInt32Array) -> None:
        step = self._upload_bytes // NUMBER_BYTES
        for first in range(0, places.size, step):
            piece = places[first : first + step]
            upload = self._uploads.next()
            upload.reserve(piece.nbytes).view(np.uint32)[:] = piece
            for card in range(self._num_cards):
                target = arena.places_address(card, number - arena.group.first_table, first_place + first)
                upload.send(card, 0, piece.nbytes, target)
                upload.used(card)

    def _file(
        self, arena: ArenaOnCards, number: int, index: int, positions: Int64Array, named_at: NamesAt, place: Place
    ) -> None:
        table = self._plan.layout.tables[number]
        files = self._files[table.name]
        source = self._snapshot.rows_file(table.name, index)
        items = source.view(f"V{source.shape[1]}").reshape(-1)
        # As many rows as fit an upload, whoever owns them: each owner's begin aligned, after their numbers.
        step = (self._upload_bytes - (self._num_cards + 2) * CHUNK_BYTES) // (arena.format.stride + NUMBER_BYTES)
        for first in range(0, positions.size, step):
            piece = positions[first : first + step]
            stored = items.take(piece).view(np.uint8).reshape(piece.size, -1)
            named = named_at(piece)
            check_finite(self._snapshot.path / files.rows[index].path, table, stored, named)
            self._send_rows(arena, number - arena.group.first_table, stored, *place(named))
            self._done_bytes += stored.nbytes
            if self._done_bytes - self._reported_bytes >= min(PIECE_BYTES, self._upload_bytes):
                self._report()

    def _send_rows(
        self, arena: ArenaOnCards, table: int, stored: ByteArray, rows: Int64Array, places: UInt32Array
    ) -> None:
        owner = owners_of(places, self._num_cards)
        counts = np.bincount(owner, minlength=self._num_cards + 2)
        if counts.max() < owner.size:
            order = np.argsort(owner, kind="stable")
            rows, stored = rows[order], stored.view(f"V{stored.shape[1]}").reshape(-1)[order].view(np.uint8)
            stored = stored.reshape(rows.size, arena.format.row_bytes)
        upload = self._uploads.next()
        array = upload.reserve(self._upload_bytes)
        first = first_byte = 0
        for number in np.flatnonzero(counts).tolist():
            end = first + int(counts[number])
            numbers_at, rows_at = first_byte, first_byte + round_up(NUMBER_BYTES * (end - first))
            first_byte = rows_at + (end - first) * arena.format.stride
            array[numbers_at : numbers_at + NUMBER_BYTES * (end - first)].view(np.uint32)[:] = rows[first:end]
            arena.format.relay(stored[first:end], array[rows_at:first_byte].reshape(end - first, -1))
            # An owner is a card, all cards (hot rows), or the host, whose rows card 0 writes.
            is_host, is_hot = number == self._num_cards + 1, number == self._num_cards
            for card in range(self._num_cards) if is_hot else [0 if is_host else number]:
                numbers = upload.send(card, numbers_at, first_byte - numbers_at)
                rows_on_card, stream = numbers + rows_at - numbers_at, self._streams[card]
                arena.write(card, table, numbers, rows_on_card, end - first, stream, writes_host=is_host)
            first = end
        for card in range(self._num_cards):
            upload.used(card)

    def _report(self) -> None:
        self._reported_bytes = self._done_bytes
        self._progress("load", self._done_bytes, self._total_bytes)
