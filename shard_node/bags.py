"""Keyed bags: all bags of a batch in flat arrays, the form in which ids travel through shardrank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shard_node.errors import InvalidBagsError
from shard_node.table_layout import TableLayout

Int64Array: TypeAlias = npt.NDArray[np.int64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class KeyedBags:
    """Bags of several keys, key by key (TorchRec's KeyedJaggedTensor with its own bag count for each key).

    At the router a key is a feature and a value a raw id; at a shard a key is a table (its number in `TableLayout`)
    and a value a row. Keys ascend; the same key may not come twice.

    Attributes:
        keys: int32 [S], strictly ascending.
        bags_per_key: int64 [S], how many bags each key has.
        offsets: int64 [B + 1], bag b holds values[offsets[b] : offsets[b + 1]]; B = bags_per_key.sum().
        values: int64 [n].
        weights: float32 [n], the factor of each value, or None for all ones.
    """

    keys: Int32Array
    bags_per_key: Int64Array
    offsets: Int64Array
    values: Int64Array
    weights: Float32Array | None = None
    # Both are asked for at every step from parsing to pooling, so they are worked out once.
    _bag_starts: Int64Array | None = field(default=None, init=False, repr=False, compare=False)
    _value_starts: Int64Array | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def from_lengths(
        cls,
        keys: Int32Array,
        bags_per_key: Int64Array,
        lengths: npt.NDArray[np.integer],
        values: Int64Array,
        weights: Float32Array | None = None,
    ) -> KeyedBags:
        """Builds offsets from the length of each bag (any integer dtype, [B])."""
        offsets = np.zeros(lengths.size + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(keys, bags_per_key, offsets, values, weights)

    @property
    def num_bags(self) -> int:
        """The number of bags, B."""
        return self.offsets.size - 1

    @property
    def num_values(self) -> int:
        """The number of values, n."""
        return self.values.size

    @property
    def lengths(self) -> Int64Array:
        """int64 [B], values in each bag."""
        lengths: Int64Array = self.offsets[1:] - self.offsets[:-1]
        return lengths

    def bag_starts(self) -> Int64Array:
        """int64 [S + 1], the first bag of each key, then B. Not to be changed."""
        starts = self._bag_starts
        if starts is None:
            starts = np.zeros(self.keys.size + 1, dtype=np.int64)
            np.add.accumulate(self.bags_per_key, out=starts[1:])
            object.__setattr__(self, "_bag_starts", starts)
        return starts

    def value_starts(self) -> Int64Array:
        """int64 [S + 1], the first value of each key, then n. Not to be changed."""
        starts = self._value_starts
        if starts is None:
            starts = self.offsets[self.bag_starts()]
            object.__setattr__(self, "_value_starts", starts)
        return starts

    def values_per_key(self) -> Int64Array:
        """int64 [S], values of each key."""
        starts = self.value_starts()
        counts: Int64Array = starts[1:] - starts[:-1]
        return counts

    def with_values(self, values: Int64Array, weights: Float32Array | None) -> KeyedBags:
        """Bags of the same shape with other contents, int64 [n] and float32 [n]: what was worked out is kept."""
        bags = KeyedBags(self.keys, self.bags_per_key, self.offsets, values, weights)
        object.__setattr__(bags, "_bag_starts", self._bag_starts)
        object.__setattr__(bags, "_value_starts", self._value_starts)
        return bags

    def validate(self) -> None:
        """Checks that the arrays describe bags; for input that comes from outside the process.

        Raises:
            InvalidBagsError: naming the array and what is wrong with it.
        """
        if self.keys.size != self.bags_per_key.size:
            raise InvalidBagsError(f"keys has {self.keys.size} entries, bags_per_key {self.bags_per_key.size}")
        if self.keys.size and (self.keys[0] < 0 or (np.diff(self.keys) <= 0).any()):
            raise InvalidBagsError("keys must be non-negative and strictly ascending")
        if (self.bags_per_key < 0).any():
            raise InvalidBagsError("bags_per_key must not be negative")
        if self.offsets.size == 0 or self.offsets[0] != 0:
            raise InvalidBagsError("offsets must begin with 0")
        # Each count is bounded by the number of bags before it is summed, so that the sum can't wrap around.
        if (self.bags_per_key > self.num_bags).any() or int(self.bags_per_key.sum()) != self.num_bags:
            raise InvalidBagsError(f"bags_per_key must add up to the {self.num_bags} bags that offsets describes")
        # Compared, not subtracted: a difference of two int64 can wrap around.
        if (self.offsets[1:] < self.offsets[:-1]).any():
            raise InvalidBagsError("offsets must not descend")
        if int(self.offsets[-1]) != self.values.size:
            raise InvalidBagsError(f"offsets ends at {int(self.offsets[-1])}, but there are {self.values.size} values")
        if self.weights is not None:
            if self.weights.size != self.values.size:
                raise InvalidBagsError(f"{self.weights.size} weights for {self.values.size} values")
            if not np.isfinite(self.weights).all():
                raise InvalidBagsError("weights must be finite")


@dataclass(frozen=True, slots=True, eq=False)
class CheckedBags(KeyedBags):
    """Bags of tables whose values somebody in this process has just checked against a layout, every one of them.

    An engine of the same layout need not look at them again (`TableLimits.check`). The router makes them, of what its
    id mapping gives: each of those is a row of its table. What came over a socket is never of this type: decoding makes
    `KeyedBags`.

    Attributes:
        layout: the tables that keys number, and whose rows values are.
    """

    layout: TableLayout = field(kw_only=True)
