"""Which rows are the hottest, learned while lookups go by: counts of candidates that age, and are forgotten by shifts.

Lookups are counted in epochs of as many as rows are wanted (`capacity`), and fewer at first. At an epoch's end the
counts of its keys are added to those of the candidates, and of all the `CANDIDATES` × capacity most frequent are kept.
That is nearly exact: whoever belongs to the top is rarely forgotten, and what happens to be seen once makes room for
the next. A count halves over `HALF_LIFE` × capacity lookups.

A shift of popularity is seen by the share of lookups that go to the top as it is known. If it falls clearly, over two
quarters of an epoch, the epoch ends, and counts from before keep only (share / share as it was) ** `TRUST` of their
weight: nearly all after a small shift, next to nothing after a complete one.
docs/decisions/hot-rows.md has the measured figures.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from router.errors import HotRowsError

Int64Array: TypeAlias = npt.NDArray[np.int64]

CANDIDATES = 4
"""Keys that have a count, × capacity."""
HALF_LIFE = 64
"""Lookups after which a count weighs half, × capacity."""
TRUST = 4
"""How fast trust in older counts falls with the hit rate of what they tell."""
MIN_EPOCH = 256
"""Lookups of an epoch at least, whatever the capacity: fewer tell nothing of a shift."""

# A fall of the hit rate over two quarters of an epoch is a shift, if each is more than chance explains, and more than
# is worth forgetting for.
_STANDARD_ERRORS = 3.0
_LEAST_FALL = 0.02
_SMOOTHING = 0.125


class Popularity:
    """Learns the hottest keys of a stream of lookups. Not thread-safe: one thread observes and asks.

    Memory: at most 60 bytes for each row of capacity (13 for a candidate, 8 for a lookup that waits for its epoch's
    end) beside the batch in hand; while an epoch is added, about three times that.

    Args:
        capacity: of how many rows the top is wanted, 1 or more. Epochs, memory and half-life are multiples of it.

    Raises:
        HotRowsError: capacity is below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise HotRowsError(f"capacity {capacity} of the rows whose popularity is learned must be at least 1")
        self.capacity = capacity
        self.epochs = 0
        """How many have ended. `top` changes only when this does."""
        self.shifts = 0
        """How many shifts were seen."""
        self.hit_rate = math.nan
        """Share of late of the lookups that go to the top as it is known; NaN before the second epoch."""
        self._longest = max(-(-capacity // 4) * 4, MIN_EPOCH)
        self._waiting = np.empty(MIN_EPOCH, np.int64)
        self._num_waiting = 0
        self._was_low = False
        # Candidates in order of their keys.
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float32)
        self._is_hot = np.empty(0, np.bool_)

    @property
    def size_bytes(self) -> int:
        """Of what is kept between two calls."""
        return sum(array.nbytes for array in (self._waiting, self._keys, self._counts, self._is_hot))

    def observe(self, keys: Int64Array) -> None:
        """Count the lookups of whole batches, or of a sample of them: every lookup of a key counts.

        Args:
            keys: int64 [n], table << 32 | row; any n, in any order.
        """
        quarter = self._waiting.size // 4
        while keys.size:
            taken = keys[: quarter - self._num_waiting % quarter]
            self._waiting[self._num_waiting :][: taken.size] = taken
            self._num_waiting += taken.size
            keys = keys[taken.size :]
            if self._num_waiting % quarter == 0:
                trust = self._trust(self._waiting[: self._num_waiting][-quarter:]) if self.epochs else 1.0
                if trust < 1 or self._num_waiting == self._waiting.size:
                    self._end_epoch(trust)
                    quarter = self._waiting.size // 4

    def top(self, count: int) -> Int64Array:
        """Return the hottest keys, int64 [at most count], hottest first; none before the first epoch has ended.

        More than `capacity` can be asked for, but those beyond it are little more than guesses.
        """
        at = self._hottest(count)
        return self._keys[at[np.argsort(-self._counts[at], kind="stable")]]

    def _hottest(self, count: int) -> Int64Array:
        size = self._keys.size
        if not 0 < count < size:
            return np.arange(size if count > 0 else 0)
        return np.argpartition(self._counts, size - count)[size - count :]

    def _trust(self, quarter: Int64Array) -> float:
        """Return what counts so far are still worth, by the hit rate of the top that they gave: 1 without a shift.

        The lookups in which a shift begins are a mixture, of which the first that are low may consist. The next
        ones tell how much has changed.
        """
        at, _ = self._find(quarter)
        rate = int(self._is_hot[at].sum()) / quarter.size
        usual = rate if math.isnan(self.hit_rate) else self.hit_rate
        chance = math.sqrt(max(usual * (1 - usual), rate * (1 - rate)) / quarter.size)
        is_low = usual - rate > max(_STANDARD_ERRORS * chance, _LEAST_FALL)
        if is_low and self._was_low:
            self.shifts += 1
            self._was_low, self.hit_rate = False, rate
            return float((rate / usual) ** TRUST)
        self._was_low = is_low
        self.hit_rate = usual if is_low else usual + _SMOOTHING * (rate - usual)
        return 1.0

    def _end_epoch(self, trust: float) -> None:
        keys, counts = np.unique(self._waiting[: self._num_waiting], return_counts=True)
        at, known = self._find(keys)
        self._counts *= np.float32(0.5 ** (self._num_waiting / (HALF_LIFE * self.capacity)) * trust)
        self._counts[at] += counts[known].astype(np.float32)
        self._keep_most_frequent(
            np.concatenate([self._keys, keys[~known]]),
            np.concatenate([self._counts, counts[~known].astype(np.float32)]),
        )
        self.epochs += 1
        self._num_waiting = 0
        if self._waiting.size < self._longest:
            self._waiting = np.empty(min(2 * self._waiting.size, self._longest), np.int64)

    def _find(self, keys: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Return where those of the keys are that are candidates, int64 [m], and which these are, bool [n]."""
        at = np.searchsorted(self._keys, keys)
        known = np.zeros(keys.size, np.bool_)
        within = at < self._keys.size
        known[within] = self._keys[at[within]] == keys[within]
        return at[known], known

    def _keep_most_frequent(self, keys: Int64Array, counts: npt.NDArray[np.float32]) -> None:
        if (surplus := keys.size - CANDIDATES * self._longest) > 0:
            kept = np.argpartition(counts, surplus)[surplus:]
            keys, counts = keys[kept], counts[kept]
        order = np.argsort(keys)
        self._keys, self._counts = keys[order], counts[order]
        self._is_hot = np.zeros(keys.size, np.bool_)
        self._is_hot[self._hottest(self.capacity)] = True
