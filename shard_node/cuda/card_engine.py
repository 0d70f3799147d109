"""The CUDA engine: rows of one generation on several cards, and the lanes that pool from them."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from shard_node.access_counts import LookupSampler
from shard_node.answer import Answer
from shard_node.bags import Bags, Float32Array, Int64Array
from shard_node.cuda.batch import (
    MAX_BATCH_VALUES,
    BatchLayout,
    BatchShapes,
    BatchSize,
    BatchViews,
    OutputRuns,
    RowChecks,
    RunTable,
    check_fits,
)
from shard_node.cuda.card_rows import ArenaOnCards, CardRows, LookupCounts, WriteOrder
from shard_node.cuda.card_set import CardSet
from shard_node.cuda.kernel_params import CHUNK_BYTES, MODES, OUT_DTYPES, BatchParams, OutDtype
from shard_node.cuda.uploads import RowWriter, Upload, capacity_for
from shard_node.engine.base import CardsUse, LookupCount, MemoryUse, write_pieces
from shard_node.engine.keyed_tables import KeyedTables
from shard_node.errors import InvalidBagsError
from shard_node.planning.card_plan import CardPlan

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Cards, Graph, Memory
Launch = tuple[str, tuple[int, int], Sequence[ctypes.Structure]]
"""A kernel, its grid and what it takes."""
_FLOATS_PER_CHUNK = 4


class CardStream:
    """One way through one card: a stream, on which its owner may put more. Made by `CardEngine.lane`.

    It has one user at a time, and is closed before the engine. A slot has fixed addresses and launch shapes for all
    batches up to a size, so that its launches can be captured in a graph once and replayed.
    """

    def __init__(self, rows: CardRows, card: int) -> None:
        self.rows = rows
        self.card = rows.cards.cards[card]
        self.stream = self.card.stream()
        self._slots: set[BatchBuffer] = set()
        self._reader = rows.order.reader(self.stream)

    def prepare(self, runs: OutputRuns, size: BatchSize) -> BatchBuffer:
        """Reserve memory for batches up to a size; `runs` say where the bags of each key go, within their output.

        Raises InvalidBagsError for a size that positions of 32 bits can't tell, MemoryBudgetError if the card or the
        host has no room.
        """
        if size.num_values > MAX_BATCH_VALUES or int(size.bags_per_key.sum()) >= MAX_BATCH_VALUES:
            raise InvalidBagsError(f"a batch has at most {MAX_BATCH_VALUES} values and fewer bags, got {size}")
        slot = BatchBuffer(self, RunTable(self.rows.shapes, runs), size)
        self._slots.add(slot)
        return slot

    def launch(self, work: Callable[[], None]) -> None:
        """Run `work`, in which lookups are put on the stream: `BatchBuffer.enqueue`.

        All that one `work` looks up sees every row write in full or not at all. It holds row writes up only while it
        runs, not while the card works.
        """
        self.rows.order.read(self._reader, work)

    def find_keys(self, bags: Bags, tables: Int64Array) -> tuple[Bags, Int64Array]:
        """Return bags with rows in place of keys, and the positions of values whose key is missing.

        Keys of the bags are of `tables`, int64 [S]. Called by a `launch`'s work, which looks the rows up: later they
        may be other keys'. Raises InvalidBagsError for a missing key of another node.
        """
        if self.rows.keyed is None:
            return bags, np.zeros(0, np.int64)
        by_table = Bags(tables.astype(np.int32), bags.bags_per_key, bags.offsets, bags.values)
        found, missing = self.rows.keyed.rows_of(by_table, bags.values_per_key())
        return bags.with_values(found.values, bags.weights), missing

    def wait(self) -> None:
        """Blocks until what the last `launch` put on the stream is done, so that pinned memory can be packed again."""
        if self._reader.last_launch is not None:
            self._reader.last_launch.synchronize()

    def launches(self, layout: BatchLayout, address: int, out: int, out_dtype: OutDtype) -> list[Launch]:
        """Make the launches, one for each arena with bags, that pool the batch at `address` into `out`."""
        number, num_cards = self.card.number, len(self.rows.cards.cards)
        launches: list[Launch] = []
        for arena, shape, blocks_at, num_blocks in zip(
            self.rows.arenas, self.rows.shapes.arenas, layout.blocks_at, layout.num_blocks, strict=True
        ):
            if not num_blocks:
                continue
            batch = BatchParams(
                values=address + layout.values_at,
                weights=address + layout.weights_at if layout.weighted else 0,
                offsets=address + layout.offsets_at,
                runs=address + layout.runs_at,
                blocks=address + blocks_at,
                out=out,
                counters=self.rows.counters[number].address,
                num_blocks=num_blocks,
                rotation=number * num_blocks // num_cards,
                out_dtype=OUT_DTYPES[out_dtype],
                lanes_log2=shape.lanes_log2,
            )
            launches.append((shape.kernel, (num_blocks, shape.column_tiles), (arena.params[number], batch)))
        return launches

    def put(self, launches: Sequence[Launch]) -> None:
        """Put launches on the stream."""
        for kernel, grid, params in launches:
            self.card.launch(kernel, grid, params, self.stream)

    def forget(self, slot: BatchBuffer) -> None:
        """Take a slot back; called by `BatchBuffer.close`."""
        self._slots.discard(slot)

    def close(self) -> None:
        """Wait for all that is on the stream, and give back what the lane and its slots hold. Idempotent."""
        self.stream.synchronize()
        for slot in tuple(self._slots):
            slot.close()
        self.rows.order.forget(self._reader)


class BatchBuffer:
    """Room for one batch at a time on a lane. Made by `CardStream.prepare`.

    `out` has the pooled bags, as the runs say; elements that no bag is written to are left as they are. `extra` goes up
    with the batch, is to be written after `fill`, and lies on the card at byte `extra_at` of `batch`.
    """

    def __init__(self, lane: CardStream, runs: RunTable, size: BatchSize) -> None:
        self._lane = lane
        self._runs = runs
        self._size = size
        num_runs, num_bags = runs.runs.tables.size, int(size.bags_per_key.sum())
        blocks = runs.max_blocks(size)
        layout = BatchLayout(size.num_values, num_bags, num_runs, blocks, size.weighted, size.extra_bytes)
        self._layout = layout
        self._used: tuple[tuple[int, int], ...] = ((0, layout.size_bytes),)
        self._graph: Graph | None = None
        with ExitStack() as memory:
            self._pinned = lane.rows.cards.allocate_pinned(layout.size_bytes)
            memory.callback(self._pinned.free)
            self.batch = lane.card.allocate(layout.size_bytes)
            memory.callback(self.batch.free)
            self.out = lane.card.allocate(max(CHUNK_BYTES, runs.runs.out_bytes))
            memory.callback(self.out.free)
            self._memory = memory.pop_all()
        self.extra_at = layout.extra_at
        self._views = BatchViews(self._pinned.array, layout)
        self._views.write_constant(runs)
        self._launches = lane.launches(layout, self.batch.address, self.out.address, runs.runs.out_dtype)

    @property
    def is_captured(self) -> bool:
        """Whether its launches are a graph."""
        return self._graph is not None

    @property
    def extra(self) -> npt.NDArray[np.uint8]:
        """uint8 [size.extra_bytes], pinned."""
        return self._views.extra

    def fill(self, bags: Bags) -> None:
        """Pack a batch into pinned memory, after what is still to be read from there has been.

        Its keys are those of the runs. Raises InvalidBagsError: as `RowChecks.check`, or it is larger than the slot.
        """
        parts = [(bags, self._runs.tables)]
        self._lane.rows.checks.check(*parts[0])
        for keys, tables in self._runs.further:
            parts.append((bags.of_keys(keys), tables))
            self._lane.rows.checks.check(*parts[-1])
        check_fits(bags, self._size)
        blocks = self._runs.blocks(bags)
        self._lane.wait()
        self._views.pack(bags, blocks)
        self._used = self._layout.used(bags)
        for part, tables in parts:
            self._lane.rows.lookups.add(tables, part)

    def enqueue(self) -> None:
        """Put the copy up of what the batch takes, and the launches, on the stream. Within `CardStream.launch`."""
        card, stream = self._lane.card, self._lane.stream
        for first, end in self._used:
            card.copy_to_card(self.batch.address + first, self._pinned, first, end - first, stream)
        if self._graph is None:
            self._lane.put(self._launches)
        else:
            self._graph.replay(stream)

    def capture(self) -> None:
        """Record the launches, which have been enqueued once: from then on they are one. Raises as `Card.capture`."""
        self._graph = self._lane.card.capture(self._lane.stream, partial(self._lane.put, self._launches))

    def close(self) -> None:
        """Wait for the lane, and give the memory back. Idempotent."""
        self._lane.stream.synchronize()
        self._graph = None
        self._lane.forget(self)
        self._memory.close()


class HostPool:
    """Pools for callers on the host, batches of any size: a lane of its own, with buffers that grow.

    Used by one thread at a time.
    """

    def __init__(self, lane: CardStream) -> None:
        self._lane = lane
        self._upload = Upload(lane.rows.cards, [(lane.card, lane.stream)])
        self._out: Memory | None = None
        self._down: Memory | None = None

    def answer(self, bags: Bags, tables: Int64Array) -> Answer:
        """As `Engine.answer`, of at least one checked bag; `tables`, int64 [S], are its keys."""
        lane, shapes = self._lane, self._lane.rows.shapes
        runs, group_elements = block_runs(shapes, bags, tables)
        table = RunTable(shapes, runs)
        blocks = table.blocks(bags)
        layout = BatchLayout.tight(bags, blocks)
        try:
            views = BatchViews(self._upload.reserve(layout.size_bytes), layout)
            views.write_constant(table)
            views.pack(bags, blocks)
            out, down = self._outputs(runs.out_bytes)
            missing = np.zeros(0, np.int64)

            def put() -> None:
                nonlocal missing
                rows, missing = lane.find_keys(bags, tables)
                if rows is not bags:
                    views.write_values(rows)
                lane.put(lane.launches(layout, self._upload.send(0, 0, layout.size_bytes), out.address, "fp32"))

            lane.launch(put)
            lane.card.copy_to_host(down, 0, out.address, runs.out_bytes, lane.stream)
            lane.stream.record().synchronize()
        except BaseException:
            # What was put on the stream may still use the buffers that the next batch is packed into.
            lane.stream.synchronize()
            raise
        sums = down.array[: runs.out_bytes].view(np.float32)
        of_groups = [
            sums[first:end].reshape(-1, group.embedding_dim).copy()
            for (first, end), group in zip(group_elements, shapes.layout.groups, strict=True)
        ]
        return Answer(of_groups, missing=missing)

    def _outputs(self, size_bytes: int) -> tuple[Memory, Memory]:
        # Nothing is under way: every batch before was waited for.
        if self._out is None or self._down is None or self._down.size_bytes < size_bytes:
            self._free_outputs()
            capacity = capacity_for(size_bytes)
            self._down = self._lane.rows.cards.allocate_pinned(capacity)
            self._out = self._lane.card.allocate(capacity)
        return self._out, self._down

    def _free_outputs(self) -> None:
        for memory in (self._out, self._down):
            if memory is not None:
                memory.free()
        self._out = self._down = None

    def close(self) -> None:
        """Wait for the lane, and free everything. Idempotent."""
        self._lane.close()
        self._upload.free()
        self._free_outputs()


def block_runs(shapes: BatchShapes, bags: Bags, tables: Int64Array) -> tuple[OutputRuns, list[tuple[int, int]]]:
    """Return runs that write one block [bags of the group, embedding_dim] for each group, one after the other.

    Also, for each group, the elements [first, end) of its block; blocks are aligned to 16 bytes.
    """
    dims = shapes.dim_of_table[tables]
    ends = np.zeros(tables.size + 1, np.int64)
    np.cumsum(bags.bags_per_key * dims, out=ends[1:])
    groups = shapes.layout.groups
    first_keys = np.searchsorted(tables, [*(group.first_table for group in groups), groups[-1].end_table])
    edges = ends[first_keys]
    sizes = np.diff(edges)
    room = -(-sizes // _FLOATS_PER_CHUNK) * _FLOATS_PER_CHUNK
    starts = np.cumsum(room) - room
    offsets = ends[:-1] + (starts - edges[:-1])[shapes.arena_of_table[tables]]
    modes = np.full(tables.size, MODES["sum"], np.int64)
    runs = OutputRuns(tables, modes, offsets, dims, "fp32", int(room.sum()))
    return runs, list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))


_COUNTER_BYTES = 16
POOLS_PER_CARD = 2
"""One is packed while the other one's batch is on the card."""


class CardEngine:
    """Pools bags from rows on cards. Implements `Engine`.

    `pool` is for callers on the host: batches take turns on all cards, each of which reads all rows. A ranking replica
    takes a `lane` of its card in its place, and keeps what it pooled there. The arenas are filled, one for each group,
    and are freed by `close`; if making the engine fails they still belong to the caller. `plan` is of `slot_tables`
    where there are `keyed` ones, which are freed too. Raises MemoryBudgetError if a card or the host has no room for
    the first buffers.
    """

    def __init__(
        self, card_set: CardSet, arenas: Sequence[ArenaOnCards], plan: CardPlan, keyed: KeyedTables | None = None
    ) -> None:
        cards, layout = card_set.cards, plan.layout if keyed is None else keyed.layout
        self.card_set = card_set
        self.plan = plan
        self.layout = layout
        self._arenas = tuple(arenas)
        self._free_pools: queue.SimpleQueue[HostPool] = queue.SimpleQueue()
        self._is_closed = False
        with ExitStack() as buffers:
            self._counters = CardCounters(cards)
            buffers.callback(self._counters.free)
            self._rows = CardRows(
                cards=cards,
                shapes=BatchShapes(plan.layout),
                arenas=self._arenas,
                order=WriteOrder([card.stream() for card in cards.cards]),
                checks=RowChecks(layout, plan.partition),
                counters=self._counters.memories,
                lookups=LookupCounts(layout),
                keyed=keyed,
            )
            self._writer = RowWriter(self._rows)
            buffers.callback(self._writer.free)
            # Card by card, so that callers who take turns also take cards in turn.
            for number in [*range(len(cards.cards))] * POOLS_PER_CARD:
                self._free_pools.put(pool := HostPool(CardStream(self._rows, number)))
                buffers.callback(pool.close)
            self._buffers = buffers.pop_all()

    def pool(self, bags: Bags) -> list[Float32Array]:
        """As `Engine.pool`. Waits while as many calls as the engine has lanes of its own are under way."""
        return cast("list[Float32Array]", self.answer(bags).sums)

    def answer(self, bags: Bags, *, stored: bool = True) -> Answer:
        """As `Engine.answer`, of sums: rows lie on the cards in another form than the stored one."""
        bags = bags.wide()
        self._rows.checks.check(bags)
        if not bags.num_bags:
            return Answer([np.zeros((0, group.embedding_dim), np.float32) for group in self.layout.groups])
        if max(bags.num_bags, bags.num_values) >= MAX_BATCH_VALUES:
            raise InvalidBagsError(
                f"{bags.num_bags} bags of {bags.num_values} values; a batch has fewer than {MAX_BATCH_VALUES} of each"
            )
        tables = bags.keys.astype(np.int64)
        pool = self._free_pools.get()
        try:
            answer = pool.answer(bags, tables)
        finally:
            self._free_pools.put(pool)
        self._rows.lookups.add(tables, bags)
        return answer

    def lane(self, card: int) -> CardStream:
        """Make a lane of a card for a ranking replica, which closes it before the engine is closed."""
        return CardStream(self._rows, card)

    def update_keys(
        self, tables: Sequence[int], keys: Int64Array, stored: npt.NDArray[np.uint8] | None
    ) -> tuple[int, int]:
        """As `Engine.update_keys`, and as `write_rows`."""
        if self._is_closed:
            raise ValueError("the engine is closed")
        return self._writer.update_keys(tables, keys, stored)

    def write_rows(self, table: int | tuple[int, ...], rows: Int64Array, stored: npt.NDArray[np.uint8]) -> int:
        """As `Engine.write_rows`. Returns when the rows are on their way: every later `pool` sees them.

        Raises MemoryBudgetError for more rows than before, and no room for the buffers; nothing was written.
        """
        if self._is_closed:
            raise ValueError("the engine is closed")
        return sum(self._writer.write(table, rows[piece], stored[piece]) for piece in write_pieces(stored))

    def memory(self) -> tuple[MemoryUse, ...]:
        """Bytes held, by card and tier: rows and places of each card, its copies of hot rows, and, once, the host's."""
        uses = []
        for card in range(self.plan.num_cards):
            used = self.plan.bytes(card)
            uses.append(MemoryUse(card, "card", used.card + used.places))
            if used.hot:
                uses.append(MemoryUse(card, "hot", used.hot))
        if self.plan.pinned_bytes:
            uses.append(MemoryUse(0, "pinned", self.plan.pinned_bytes))
        if self._rows.keyed is not None:
            uses.append(MemoryUse(0, "ram", self._rows.keyed.size_bytes))
        return tuple(uses)

    def rows_looked_up(self) -> tuple[LookupCount, ...]:
        """Counters by table. Which tier a row came from, only the cards know."""
        counts = self._rows.lookups.read().tolist()
        return tuple(
            LookupCount(table.name, "card", count) for table, count in zip(self.layout.tables, counts, strict=True)
        )

    @property
    def access(self) -> LookupSampler:
        """As `Engine.access`: what is pooled by lanes is in it too."""
        return self._rows.lookups.access

    def disk_use(self) -> None:
        """Return None: the last tier of cards is pinned memory."""

    def cards(self) -> CardsUse | None:
        """Return what they are, and what they counted. Blocks for what it takes to read a few bytes."""
        cards = self.card_set.cards
        return CardsUse(cards.name, len(cards.cards), cards.peer_access, *self._counters.read())

    def close(self) -> None:
        """Wait for the cards and free everything. No call may be running, and no lane be in use. Idempotent."""
        for reader in self._rows.order.readers():
            reader.stream.synchronize()
        self._is_closed = True
        self._buffers.close()
        for arena in self._arenas:
            arena.free()
        if self._rows.keyed is not None:
            self._rows.keyed.close()


class CardCounters:
    """uint64 [2] on each card, zero at first: values outside their table, and values whose row is not here."""

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
            self._memory = undo.pop_all()
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
                outside, missing = self._pinned.array.view(np.uint64).reshape(-1, 2).sum(axis=0).tolist()
                self._last = (outside, missing)
            return self._last

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        with self._lock:
            self.memories = ()
            self._memory.close()
