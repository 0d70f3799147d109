"""Where rows of divided tables lie: from the rows of such tables to rows of their parts, for a whole batch at once.

Between the two steps a value is a row of its part with the part's number in the top byte: the first step looks rows up
once for each feature, the second keeps, for each lookup, the rows of the part that is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from loader.snapshot.row_classes import BLOCK_BITS, RowClasses, find_bits
from loader.snapshot.tables import DividedTable
from router.errors import RouterError
from router.feature_schema import FeatureSchema
from shard_node.bags import Int64Array, KeyedBags

_WHOLE, _CLASS, _QUOTIENT, _REMAINDER = range(4)
_PART_SHIFT = 56
_ROW_MASK = (1 << _PART_SHIFT) - 1


class PartRows:
    """Maps rows of one model version's divided tables.

    Args:
        schema: the model's features.
        row_classes: of each table that has classes, by its name.

    Raises:
        RouterError: classes are missing, or of a table that has none.
    """

    def __init__(self, schema: FeatureSchema, row_classes: Mapping[str, RowClasses]) -> None:
        spec = schema.spec
        chained = {one.name: one for one in spec.divided if one.num_classes > 1}
        if chained.keys() != row_classes.keys():
            raise RouterError(f"row classes of {sorted(row_classes)} were given; the model needs {sorted(chained)}")
        bitmaps = [one for name in chained for one in row_classes[name].bitmaps]
        words = [one.words for one in bitmaps]
        self._words = words[0] if len(words) == 1 else np.concatenate([*words, np.zeros((0, 8), np.uint64)])
        self._ranks = np.concatenate([*(one.ranks for one in bitmaps), np.zeros(0, np.uint32)])
        self._within = np.concatenate([*(one.within for one in bitmaps), np.zeros((0, 8), np.uint16)])
        firsts = iter(np.cumsum([0, *(one.ranks.size for one in bitmaps)]).tolist())
        # Of each chain, where the bits of its bitmaps begin: -1 behind the last.
        depth = max((one.num_classes - 1 for one in chained.values()), default=0)
        self._first_bit = np.full((len(chained), depth), -1, np.int64)
        # The class that has no part, and the row that its ids read instead: the last of the last part.
        self._pruned_class = np.full(len(chained), -1, np.int64)
        self._default_row = np.zeros(len(chained), np.int64)
        for number, one in enumerate(chained.values()):
            parts = spec.parts(one)
            for level in range(one.num_classes - 1):
                self._first_bit[number, level] = next(firsts) * BLOCK_BITS
            if one.pruned:
                self._pruned_class[number] = len(parts)
                self._default_row[number] = parts[-1].num_embeddings - 1
        number_of = {name: number for number, name in enumerate(chained)}
        names = [spec.table_of(feature.name).name for feature in schema.features]
        self._chain = np.array([number_of.get(name, -1) for name in names], np.int64)
        self._of_lookups(schema)

    def _of_lookups(self, schema: FeatureSchema) -> None:
        lookups = schema.lookups
        kinds, divisors = [], []
        for feature, part in zip(lookups.feature.tolist(), lookups.part.tolist(), strict=True):
            table = schema.spec.table_of(schema.features[feature].name)
            buckets = table.buckets if isinstance(table, DividedTable) else None
            if buckets is not None:
                kinds.append(_REMAINDER if part else _QUOTIENT)
            else:
                kinds.append(_CLASS if self._chain[feature] >= 0 else _WHOLE)
            divisors.append(buckets or 1)
        self._kind, self._divisor = np.array(kinds, np.int8), np.array(divisors, np.int64)
        self._class = np.where(self._kind == _CLASS, lookups.part, 0)
        self._has_classes = bool((self._kind == _CLASS).any())
        self._has_several = bool(self._class.any())
        self._has_pruned = bool((self._pruned_class >= 0).any())
        self._has_quotients = bool((self._kind >= _QUOTIENT).any())

    def find(self, bags: KeyedBags) -> KeyedBags:
        """Find the part and the row in it of each value, of bags by feature whose values are rows of their tables."""
        if not self._has_classes:
            return bags
        chains, counts = self._chain[bags.keys], bags.values_per_key()
        chain = np.repeat(chains, counts)
        positions: Int64Array | None = None
        rows = bags.values
        if int(chains.min(initial=0)) < 0:
            positions = np.flatnonzero(chain >= 0)
            chain, rows = chain[positions], rows[positions]
        first = np.repeat(self._first_bit[chains, 0], counts) if positions is None else self._first_bit[chain, 0]
        is_of, rows = find_bits(self._words, self._ranks, self._within, rows, first)
        part = (~is_of).astype(np.int64)
        left = np.flatnonzero(part) if self._first_bit.shape[1] > 1 else np.zeros(0, np.int64)
        for level in range(1, self._first_bit.shape[1]):
            first = self._first_bit[chain[left], level]
            if (first < 0).any():
                left, first = left[first >= 0], first[first >= 0]
            is_of, rows[left] = find_bits(self._words, self._ranks, self._within, rows[left], first)
            left = left[~is_of]
            part[left] += 1
        if self._has_pruned:
            pruned = np.flatnonzero(part == self._pruned_class[chain])
            rows[pruned] = self._default_row[chain[pruned]]
            part[pruned] -= 1
        if self._has_several:
            rows |= part << _PART_SHIFT
        if positions is not None:
            values = bags.values.copy()
            values[positions] = rows
            rows = values
        return bags.with_values(rows, bags.weights)

    def take(self, bags: KeyedBags) -> KeyedBags:
        """Leave each lookup the rows of its part, of bags by lookup whose values `find` gave: as many bags."""
        counts, values = bags.values_per_key(), bags.values
        if self._has_quotients:
            kind, values = np.repeat(self._kind[bags.keys], counts), values.copy()
            divisor = np.repeat(self._divisor[bags.keys], counts)
            for wanted, operator in ((_QUOTIENT, np.floor_divide), (_REMAINDER, np.remainder)):
                at = np.flatnonzero(kind == wanted)
                values[at] = operator(values[at], divisor[at])
        if not self._has_several:
            return bags.with_values(values, bags.weights)
        # Rows of features that have no classes have 0 above them.
        is_own = values >> _PART_SHIFT == np.repeat(self._class[bags.keys], counts)
        bags = bags.with_values(values & _ROW_MASK, bags.weights)
        return bags if is_own.all() else bags.kept(is_own)
