"""Rows of one width that memory has no room for: the hottest in an arena, all others in the snapshot's files.

A hash index tells which rows are in the arena; they move between epochs, by how often they were looked up. Rows that
deltas wrote stay in the arena until the next snapshot has them: the files never change, so what is not in the arena is
as the snapshot has it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from loader.access_counts import AccessCounter
from loader.memory import allocate_rows
from shard_node.bags import Bags, Float32Array, Group, Int64Array
from shard_node.engine.arena import Arena
from shard_node.engine.base import Tier
from shard_node.engine.kernels import as_tensor, pool_rows
from shard_node.engine.key_index import ABSENT, KeyIndex
from shard_node.engine.memory import SLOT_BYTES
from shard_node.engine.row_files import RowFiles
from shard_node.errors import MemoryBudgetError, RowReadError
from shard_node.generation import RowLock
from shard_node.split import add, split

logger = logging.getLogger(__name__)

MIN_EPOCH: Final = 1 << 16
"""Lookups of rows on disk after which rows may move; a quarter of the arena's rows, if that is more."""
MOVED_ROWS: Final = 1024
"""That change places between two lookups."""
ADVANTAGE: Final = 1.25
"""How much more often a row on disk must have been looked up than one in the arena to take its slot."""
MIN_WRITTEN: Final = 1024
"""Rows that room is made for at a time, at least; as many again as there are, if that is more and there is memory."""
SCANNED_SLOTS: Final = 1 << 20
IDLE_FACTOR: Final = 10
"""Of the time that the moves of an epoch took, for which none begin."""
_ONE_TABLE: Final = np.zeros(1, np.int32)


class TieredRows:
    """Rows by their positions in files. Lookups may run in any thread, between two changes.

    Args:
        group: of the tables whose rows they are.
        files: all rows.
        hottest: positions that begin in the arena, int64 [n], ascending; `load` writes their rows.
        card: that `bytes_of_cards` counts the rows for.

    Attributes:
        bytes_of_cards: bytes of the rows on disk, by card.
    """

    tier: Tier = "disk"

    def __init__(
        self,
        group: Group,
        files: RowFiles,
        hottest: Int64Array,
        card: int,
    ) -> None:
        self.group, self.files = group, files
        self.bytes_of_cards = {card: files.num_rows * group.row_bytes}
        self._slot_bytes = group.row_bytes + SLOT_BYTES
        # Address space for all rows: memory is used by those that come.
        self._rows = allocate_rows(max(1, files.num_rows), group.row_bytes, is_reserved=True)
        self.arena = Arena(group.dtype, group.embedding_dim, self._rows, {})
        self._num_slots = hottest.size
        self._index = KeyIndex([hottest.size])
        self._index.insert(0, hottest, np.arange(hottest.size))
        self._position_of = hottest.copy()
        self._hits = np.zeros(hottest.size, np.uint32)
        self._is_pinned = np.zeros(hottest.size, np.bool_)
        self.size_bytes = hottest.size * self._slot_bytes
        epoch = max(MIN_EPOCH, hottest.size // 4)
        self._missed = AccessCounter(epoch, epoch, epoch)
        self._moving, self._next_move_at, self._is_closed = threading.Lock(), 0.0, False
        # Rows that were not there when they were written, in slots after all others.
        self._written, self._written_positions, self._num_written = KeyIndex([0]), np.zeros(0, np.int64), 0

    def load(self, first: int, stored: npt.NDArray[np.uint8]) -> None:
        """Fill the slots of rows from position `first` on, uint8 [n, row_bytes], before anything is looked up."""
        begin, end = self._position_of.searchsorted([first, first + len(stored)])
        self._rows[begin:end] = stored[self._position_of[begin:end] - first]

    def fetch(self, positions: Int64Array) -> FetchedRows:
        """Read those of the rows, int64 [n], that are not in the arena. Rows may change meanwhile.

        Raises RowReadError.
        """
        positions = positions.astype(np.int64, copy=False)
        is_cold = self.find(positions) == ABSENT
        return FetchedRows(self, is_cold, np.unique(positions[is_cold]))

    def find(self, positions: Int64Array) -> Int64Array:
        """Return the slot of each row in the arena, int64 [n]; `ABSENT` for one on disk."""
        slots = self._index.find(_ONE_TABLE, np.array([positions.size]), positions)
        if self._num_written:
            others = (slots == ABSENT).nonzero()[0]
            written = self._written.find(_ONE_TABLE, np.array([others.size]), positions[others])
            slots[others] = np.where(written == ABSENT, ABSENT, written + self._num_slots)
        return slots

    def looked_up(self, slots: Int64Array, cold: Int64Array) -> None:
        """Count lookups of slots, and of positions on disk, if there is room for them."""
        # Threads may overwrite each other's counts: then a few are missing.
        np.add.at(self._hits, slots[slots < self._num_slots] if self._num_written else slots, 1)
        if cold.size and not self._missed.is_full:
            self._missed.add(cold)

    def reserve(self, positions: Int64Array, claim: Callable[[int], object]) -> None:
        """Make room for rows that will be written, int64 [n], by one thread at a time.

        `claim` claims bytes of memory for more slots, or raises MemoryBudgetError.
        """
        slots = self.find(np.unique(positions))
        needed = self._num_written + int((slots == ABSENT).sum())
        before = self._written_positions.size
        if needed > before:
            capacity = min(max(needed, 2 * before, MIN_WRITTEN), self.files.num_rows)
            try:
                claim((capacity - before) * self._slot_bytes)
            except MemoryBudgetError:
                capacity = needed
                claim((capacity - before) * self._slot_bytes)
            written, numbers = KeyIndex([capacity]), np.arange(self._num_written)
            written.insert(0, self._written_positions[numbers], numbers)
            self._written_positions = np.resize(self._written_positions, capacity)
            # Lookups find the same in both.
            self._written = written
        # None that is there may leave before it is written.
        self._is_pinned[slots[(slots != ABSENT) & (slots < self._num_slots)]] = True

    def write(self, positions: Int64Array, stored: npt.NDArray[np.uint8]) -> None:
        """Replace rows at int64 [n], none twice, by uint8 [n, row_bytes]; they stay in memory. No lookup may run."""
        slots = self.find(positions)
        new = (slots == ABSENT).nonzero()[0]
        numbers = np.arange(self._num_written, self._num_written + new.size)
        assert self._num_written + new.size <= self._written_positions.size, "`reserve` comes first"
        slots[new] = numbers + self._num_slots
        self.arena.write(slots, np.ascontiguousarray(stored))
        self._written.insert(0, positions[new], numbers)
        self._written_positions[numbers] = positions[new]
        self._is_pinned[slots[slots < self._num_slots]] = True
        self._num_written += new.size

    def is_due(self) -> bool:
        """Return whether an epoch of lookups is over, and no rows move."""
        return self._missed.is_full and not self._moving.locked() and time.monotonic() >= self._next_move_at

    def move(self, writing: threading.Lock, row_lock: RowLock) -> None:
        """Give rows that were looked up the most in the last epochs the slots of those that were the least."""
        if not self._moving.acquire(blocking=False):
            return
        started_at = time.monotonic()
        try:
            if self._is_closed:
                return
            counted = self._missed.fold()
            is_cold = self.find(counted.keys) == ABSENT
            keys, counts = counted.keys[is_cold], counted.counts[is_cold]
            coldest = self._coldest(keys.size)
            order = np.argsort(-counts, kind="stable")[: coldest.size]
            gains = counts[order] > ADVANTAGE * self._hits[coldest] + 1
            count = int(gains.size if gains.all() else gains.argmin())
            for begin in range(0, count, MOVED_ROWS):
                piece = slice(begin, min(begin + MOVED_ROWS, count))
                positions = keys[order[piece]]
                stored = self.files.read(positions)
                with writing:
                    self._swap(positions, counts[order[piece]], stored, coldest[piece], row_lock)
            self._hits >>= 1
            logger.debug("%d rows moved to memory", count)
        except RowReadError as error:
            logger.warning("rows stay where they are: %s", error)
        finally:
            now = time.monotonic()
            self._next_move_at = now + IDLE_FACTOR * (now - started_at)
            self._moving.release()

    def _coldest(self, count: int) -> Int64Array:
        """Return at most so many slots that may be given away, with the fewest lookups, in their order."""
        by_hits, chosen = np.zeros(256, np.int64), [np.zeros(0, np.int64)]

        def hits_of(first: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
            piece = slice(first, first + SCANNED_SLOTS)
            return np.minimum(self._hits[piece], 255), ~self._is_pinned[piece]

        for first in range(0, self._num_slots, SCANNED_SLOTS):
            hits, is_free = hits_of(first)
            by_hits += np.bincount(hits[is_free], minlength=256)
        # All below this many lookups, and the first of those that have as many.
        level = int(np.cumsum(by_hits).searchsorted(count))
        left = count - int(by_hits[:level].sum())
        for first in range(0, self._num_slots, SCANNED_SLOTS):
            hits, is_free = hits_of(first)
            some = (is_free & (hits == level)).nonzero()[0][:left]
            left -= some.size
            chosen += [(is_free & (hits < level)).nonzero()[0] + first, some + first]
        slots = np.concatenate(chosen)
        return slots[np.argsort(self._hits[slots], kind="stable")]

    def _swap(
        self,
        positions: Int64Array,
        counts: npt.NDArray[np.generic],
        stored: npt.NDArray[np.uint8],
        slots: Int64Array,
        lock: RowLock,
    ) -> None:
        # Deltas may have come since these were read.
        may_move = (self.find(positions) == ABSENT) & ~self._is_pinned[slots]
        positions, counts, slots = positions[may_move], counts[may_move], slots[may_move]
        lock.begin_write()
        try:
            self._index.remove(0, self._position_of[slots])
            self._index.insert(0, positions, slots)
            self.arena.write(slots, np.ascontiguousarray(stored[may_move]))
            self._position_of[slots], self._hits[slots] = positions, counts
        finally:
            lock.end_write()

    def free(self) -> None:
        """Close the files and give the memory back, once no rows move. Nobody may need them."""
        with self._moving:
            self._is_closed = True
            self.files.close()
            self.arena.free()
            self._index.free()
            self._written.free()


class FetchedRows:
    """What one batch looks up of tiered rows, with what it has read of them from disk.

    `is_cold`, bool [n], tells which of the batch's rows were not in the arena; `cold` are their positions, ascending,
    none twice.
    """

    def __init__(self, rows: TieredRows, is_cold: npt.NDArray[np.bool_], cold: Int64Array) -> None:
        self._tiered, self.is_cold, self._cold = rows, is_cold, cold
        self._stored = rows.files.read(cold)

    def take(self, positions: Int64Array) -> npt.NDArray[np.uint8]:
        """Copy rows as they are stored, uint8 [n, row_bytes], of int64 [n] positions. No row may change meanwhile."""
        slots, is_cold = self._slots(positions)
        rows = self._tiered.arena.take(np.where(is_cold, 0, slots))
        rows[is_cold] = self._stored[slots[is_cold]]
        return rows

    def pool(self, positions: Int64Array, offsets: Int64Array, weights: Float32Array | None) -> Float32Array:
        """Sum the rows of each bag, as `Arena.pool`. No row may change meanwhile."""
        slots, is_cold = self._slots(positions)
        if not is_cold.any():
            return self._tiered.arena.pool(slots, offsets, weights)
        bags = Bags(_ONE_TABLE, np.array([offsets.size - 1]), offsets.astype(np.int64, copy=False), slots, weights)
        parts = split(bags, is_cold.view(np.uint8), range(2))
        pooled = [
            (part.bag_index, self._pool(part.owner == 1, part.bags.values, part.bags.offsets, part.bags.weights))
            for part in parts
        ]
        share_no_bag = all(part.shares_no_bag for part in parts)
        return add(pooled, bags.num_bags, self._tiered.group.embedding_dim, share_no_bag=share_no_bag)

    def _pool(
        self, is_cold: bool, slots: Int64Array, offsets: Int64Array, weights: Float32Array | None
    ) -> Float32Array:
        if not is_cold:
            return self._tiered.arena.pool(slots, offsets, weights)
        dtype = self._tiered.group.dtype
        return pool_rows(dtype, as_tensor(dtype, self._stored), slots, offsets, weights)

    def _slots(self, positions: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Return where each row is: its slot in the arena, or, of those that are cold, its place in what was read."""
        positions = positions.astype(np.int64, copy=False)
        slots = self._tiered.find(positions)
        is_cold = slots == ABSENT
        cold = positions[is_cold]
        at = self._cold.searchsorted(cold)
        if cold.size and not (self._cold.size and (self._cold.take(at, mode="clip") == cold).all()):
            # Rows that were in the arena when these were read, and had to go since.
            self._cold = np.unique(cold)
            self._stored, at = self._tiered.files.read(self._cold), self._cold.searchsorted(cold)
        slots[is_cold] = at
        self._tiered.looked_up(slots[~is_cold], cold)
        return slots, is_cold
