"""The CUDA engine: rows of one generation on several cards, and the lanes that pool from them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shard_node.access_counts import LookupSampler
from shard_node.answer import Answer
from shard_node.bags import Float32Array, Int64Array, KeyedBags, TableLayout
from shard_node.cuda.batch import MAX_BATCH_VALUES, BatchShapes, RowChecks
from shard_node.cuda.card_rows import ArenaOnCards, CardRows, LookupCounts, WriteOrder
from shard_node.cuda.card_set import CardSet
from shard_node.cuda.lane import HostPool, Lane
from shard_node.cuda.uploads import RowWriter
from shard_node.engine.base import CardsUse, LookupCount, MemoryUse
from shard_node.errors import InvalidBagsError
from shard_node.planning.card_plan import CardPlan

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Cards, Memory

_COUNTER_BYTES = 16
POOLS_PER_CARD = 2
"""One is packed while the other one's batch is on the card."""


class CardEngine:
    """Pools bags from rows on cards. Implements `Engine`.

    `pool` is for callers on the host: batches take turns on all cards, each of which reads all rows. A ranking replica
    takes a `lane` of its card in its place, and keeps what it pooled there.

    Args:
        card_set: the cards of this process.
        arenas: filled, one for each group of the layout, in its order. They belong to the engine from here on, and
            are freed by `close`. If making the engine fails they still belong to the caller.
        plan: where the rows are; its partition says which are here.

    Raises:
        MemoryBudgetError: a card or the host has no room for the first buffers.
    """

    def __init__(self, card_set: CardSet, arenas: Sequence[ArenaOnCards], plan: CardPlan) -> None:
        cards, layout = card_set.cards, plan.layout
        self.card_set = card_set
        self.plan = plan
        self._layout = layout
        self._arenas = tuple(arenas)
        streams = [card.stream() for card in cards.cards]
        self._counters = CardCounters(cards)
        self._writer: RowWriter | None = None
        self._pools: list[HostPool] = []
        self._free_pools: queue.SimpleQueue[HostPool] = queue.SimpleQueue()
        try:
            self._rows = CardRows(
                cards=cards,
                shapes=BatchShapes(layout),
                arenas=self._arenas,
                order=WriteOrder(streams),
                checks=RowChecks(layout, plan.partition),
                counters=self._counters.memories,
                lookups=LookupCounts(layout),
            )
            self._writer = RowWriter(self._rows)
            # Card by card, so that callers who take turns also take cards in turn.
            for number in [*range(len(cards.cards))] * POOLS_PER_CARD:
                self._pools.append(HostPool(Lane(self._rows, number)))
        except BaseException:
            self._free_buffers()
            raise
        for pool in self._pools:
            self._free_pools.put(pool)

    @property
    def layout(self) -> TableLayout:
        """The tables in layout order."""
        return self._layout

    def pool(self, bags: KeyedBags) -> list[Float32Array]:
        """As `Engine.pool`. Waits while as many calls as the engine has lanes of its own are under way."""
        bags = bags.wide()
        self._rows.checks.check(bags)
        if not bags.num_bags:
            return [np.zeros((0, group.embedding_dim), np.float32) for group in self._layout.groups]
        if max(bags.num_bags, bags.num_values) >= MAX_BATCH_VALUES:
            raise InvalidBagsError(
                f"{bags.num_bags} bags of {bags.num_values} values; a batch has fewer than {MAX_BATCH_VALUES} of each"
            )
        tables = bags.keys.astype(np.int64)
        pool = self._free_pools.get()
        try:
            blocks = pool.pool(bags, tables)
        finally:
            self._free_pools.put(pool)
        self._rows.lookups.add(tables, bags)
        return blocks

    def answer(self, bags: KeyedBags) -> Answer:
        """As `Engine.answer`, of sums: rows lie on the cards in another form than the stored one."""
        return Answer(self.pool(bags))

    def lane(self, card: int) -> Lane:
        """Make a lane of a card for a ranking replica, which closes it before the engine is closed."""
        return Lane(self._rows, card)

    def write_rows(self, table: int | tuple[int, ...], rows: Int64Array, stored: npt.NDArray[np.uint8]) -> int:
        """As `Engine.write_rows`. Returns when the rows are on their way: every later `pool` sees them.

        Raises:
            MemoryBudgetError: more rows than before at a time, and no room for the buffers; nothing was written.
        """
        if self._writer is None:
            raise ValueError("the engine is closed")
        return self._writer.write(table, rows, stored)

    def memory(self) -> tuple[MemoryUse, ...]:
        """Bytes held, by card and tier: rows and places of each card, its copies of hot rows, and, once, the host's."""
        uses = []
        for card in range(self.plan.num_cards):
            held = self.plan.bytes(card)
            uses.append(MemoryUse(card, "card", held.card + held.places))
            if held.hot:
                uses.append(MemoryUse(card, "hot", held.hot))
        if self.plan.pinned_bytes:
            uses.append(MemoryUse(0, "pinned", self.plan.pinned_bytes))
        return tuple(uses)

    def rows_looked_up(self) -> tuple[LookupCount, ...]:
        """Counters by table. Which tier a row came from, only the cards know."""
        counts = self._rows.lookups.read().tolist()
        return tuple(
            LookupCount(table.name, "card", count) for table, count in zip(self._layout.tables, counts, strict=True)
        )

    @property
    def access(self) -> LookupSampler:
        """As `Engine.access`: what is pooled by lanes is in it too."""
        return self._rows.lookups.access

    def counters(self) -> tuple[int, int]:
        """Values that kernels found outside their table, and values whose row is on no card of this node.

        Both are 0 as long as the checks before do what they should; such values pool as zeros.
        """
        return self._counters.read()

    def cards(self) -> CardsUse | None:
        """Return what they are, and what they counted. Blocks for what it takes to read a few bytes."""
        cards = self.card_set.cards
        return CardsUse(cards.name, len(cards.cards), cards.peer_access, *self.counters())

    def close(self) -> None:
        """Wait for the cards and free everything. No call may be running, and no lane be in use. Idempotent."""
        for reader in self._rows.order.readers():
            reader.stream.synchronize()
        self._free_buffers()
        for arena in self._arenas:
            arena.free()

    def _free_buffers(self) -> None:
        pools, self._pools = self._pools, []
        for pool in pools:
            pool.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.free()
        self._counters.free()


class CardCounters:
    """uint64 [2] on each card, zero at first: values outside their table, and values whose row is not here.

    Attributes:
        memories: of each card.
    """

    def __init__(self, cards: Cards) -> None:
        self._cards = cards.cards
        # Not those of row writes: who asks for a few bytes does not wait for lookups.
        self._streams = [card.stream() for card in self._cards]
        self._lock = threading.Lock()
        self._last = (0, 0)
        memories: list[Memory] = []
        with ExitStack() as undo:
            self._pinned = cards.allocate_pinned(_COUNTER_BYTES * len(self._cards))
            undo.callback(self._pinned.free)
            for card, stream in zip(self._cards, self._streams, strict=True):
                memories.append(card.allocate(_COUNTER_BYTES))
                undo.callback(memories[-1].free)
                card.zero(memories[-1].address, _COUNTER_BYTES, stream)
            for stream in self._streams:
                stream.synchronize()
            self._held = undo.pop_all()
        self.memories: tuple[Memory, ...] = tuple(memories)

    def read(self) -> tuple[int, int]:
        """Return the sums over all cards. Blocks until a few bytes are read; after `free`, what was read last."""
        with self._lock:
            if self.memories:
                for card, memory, stream in zip(self._cards, self.memories, self._streams, strict=True):
                    first = card.number * _COUNTER_BYTES
                    card.copy_to_host(self._pinned, first, memory.address, _COUNTER_BYTES, stream)
                for stream in self._streams:
                    stream.synchronize()
                outside, not_here = self._pinned.array.view(np.uint64).reshape(-1, 2).sum(axis=0).tolist()
                self._last = (outside, not_here)
            return self._last

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        with self._lock:
            self.memories = ()
            self._held.close()
