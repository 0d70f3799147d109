"""How often rows are looked up, observed while they are served: for the placement of the next version.

One batch in 256 is counted, and of a large one a random part, so that it costs the batch well under a millisecond: its
rows are queued, and a thread counts them once the queue is full. Memory is bounded: the rows that were looked up most
keep their counts.

Every engine has its `LookupSampler`. Whoever answers lookups in an engine's place, as a tier of hot rows before it
does, observes those in another one: no count is of all lookups, only their sum is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from loader.access_counts import AccessCounter, AccessCounts
from shard_node.bags import Int64Array, TableLayout

SAMPLE_EVERY: Final = 256
MAX_VALUES: Final = 4_096
"""Values of one batch that are counted."""
MAX_ROWS: Final = 5 << 19
"""Rows that have a count: with the queue, at most 64 MB."""
MIN_QUEUED: Final = 1 << 18
HALF_LIFE: Final = 2.0**30
"""Counted lookups after which a count weighs half, so that none passes 31 bits."""
MAX_FILE_BYTES: Final = 24 << 20
"""Of the rows that have a count, in a file of access counts: 8 for each, and the names of tables."""
TABLE_SHIFT: Final = 32
"""A key is table << 32 | row; no table has more rows."""
_PIECE_ROWS: Final = 1 << 20
_LEVELS_PER_DOUBLING: Final = 1024
_LOWEST: Final = -20
"""Log2 of the fewest lookups for a byte that are told apart: one of a row of a MiB."""


def hottest_rows(
    counted: Mapping[int, tuple[AccessCounts | npt.NDArray[np.uint32], float]],
    max_bytes: float,
    is_local: Callable[[int, Int64Array], npt.NDArray[np.bool_]] = lambda table, rows: np.ones(rows.size, np.bool_),
) -> Int64Array:
    """Return the rows with the most lookups for a byte that fit so many bytes: table << 32 | row, int64, ascending.

    `counted` has of tables, by number, how often each row was looked up, which is read in slices, twice, and the bytes
    of a row. Rows, int64 [n], that are not `is_local` are left out. Counts that differ by less than a thousandth are
    alike: of such rows the first fit.
    """

    def levels() -> Iterator[tuple[int, float, Int64Array, Int64Array]]:
        for number, (counts, row_bytes) in counted.items():
            for first in range(0, counts.shape[0], _PIECE_ROWS):
                piece = counts[first : first + _PIECE_ROWS]
                rows = piece.nonzero()[0]
                rows = rows[is_local(number, rows + first)]
                density = np.log2(piece[rows] / row_bytes) - _LOWEST
                yield number, row_bytes, rows + first, (density * _LEVELS_PER_DOUBLING).astype(np.int64)

    bytes_of_level = np.zeros((32 - _LOWEST) * _LEVELS_PER_DOUBLING + 1)
    for _, row_bytes, _, level in levels():
        bytes_of_level += np.bincount(level, minlength=bytes_of_level.size) * row_bytes
    from_level = np.cumsum(bytes_of_level[::-1])[::-1]
    lowest = int(np.count_nonzero(from_level > max_bytes))
    left = max_bytes - (from_level[lowest] if lowest < from_level.size else 0.0)
    hottest = [np.zeros(0, np.int64)]
    for number, row_bytes, rows, level in levels():
        is_hot = level >= lowest
        some = (level == lowest - 1).nonzero()[0][: int(left / row_bytes)]
        is_hot[some] = True
        left -= some.size * row_bytes
        hottest.append(rows[is_hot] + (number << TABLE_SHIFT))
    return np.concatenate(hottest)


class LookupSampler:
    """Counts a sample of one generation's lookups, by row. Thread-safe.

    Args:
        layout: the tables.
        rng: chooses batches, and values of large ones; None for chance from the system.
        sample_every: batches of which one is counted.
        max_values: values of one batch that are counted; of more, as many at random, each for its share.
        counter: what counts them; keys are table << 32 | row.

    Attributes:
        lookups: values of all batches that were observed, counted or not.
    """

    def __init__(
        self,
        layout: TableLayout,
        rng: np.random.Generator | None = None,
        *,
        sample_every: int = SAMPLE_EVERY,
        max_values: int = MAX_VALUES,
        counter: AccessCounter | None = None,
    ) -> None:
        self._layout = layout
        self._rng = rng or np.random.default_rng()
        self._sample_every, self._max_values = sample_every, max_values
        self._counter = counter or AccessCounter(MAX_ROWS, MIN_QUEUED, HALF_LIFE)
        self._lock = threading.Lock()
        self._position = self._chosen = 0
        self.lookups = 0
        self._folder = threading.Thread()

    def observe(
        self, tables: npt.NDArray[np.integer], values_per_key: Int64Array, values: npt.NDArray[np.integer]
    ) -> None:
        """Count a batch, or leave it out of the sample. To be called with every one.

        Args:
            tables: integers [S], the table of each key, by its number in the layout; one may be there twice.
            values_per_key: int64 [S].
            values: integers [n], the rows, key by key; the caller has checked that they are in their tables.
        """
        # Rows by key have no number that would tell them apart from other tables' rows.
        is_counted = ~self._layout.is_keyed[tables] if self._layout.has_keys else None
        size = values.size if is_counted is None else int(values_per_key[is_counted].sum())
        with self._lock:
            self.lookups += size
            # One of `sample_every`, at a random place: a fixed one would meet periodic traffic out of step.
            if self._position == 0:
                self._chosen = int(self._rng.integers(self._sample_every))
            is_chosen = self._position == self._chosen and size > 0
            self._position = (self._position + 1) % self._sample_every
        if not is_chosen:
            return
        if self._counter.is_full:
            if not self._folder.is_alive():
                self._folder = threading.Thread(target=self._counter.fold, daemon=True)
                self._folder.start()
            return
        if is_counted is not None:
            values = values[is_counted.repeat(values_per_key)]
            tables, values_per_key = tables[is_counted], values_per_key[is_counted]
        amount = 1
        if values.size > self._max_values:
            # A whole number that is right in the mean.
            amount = int(values.size / self._max_values + self._rng.random())
            at = self._rng.integers(0, values.size, self._max_values)
            values, tables = values[at], tables[np.searchsorted(np.cumsum(values_per_key), at, side="right")]
        else:
            tables = np.repeat(tables, values_per_key)
        self._counter.add((tables.astype(np.int64) << TABLE_SHIFT) + values, amount)

    def counts(self) -> dict[str, AccessCounts]:
        """Return how often each row was counted, by table; empty before any was."""
        counted = self._counter.fold()
        if not counted.keys.size:
            return {}
        firsts = np.arange(len(self._layout.tables) + 1) << TABLE_SHIFT
        starts = counted.keys.searchsorted(firsts)
        return {
            table.name: AccessCounts(counted.keys[start:end] - first, counted.counts[start:end], table.num_embeddings)
            for table, first, start, end in zip(self._layout.tables, firsts, starts, starts[1:], strict=False)
        }

    def estimated_lookups(self) -> dict[str, AccessCounts]:
        """Return how often each row was looked up, by table, as far as the sample says it."""
        counted = self.counts()
        scale = self.lookups / max(self._counter.total, 1.0)
        return {name: replace(table, counts=table.counts * scale) for name, table in counted.items()}
