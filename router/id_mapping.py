"""From raw ids to rows, for all features of a batch at once: hashes, vocabularies, rows as they are, parts of tables.

Rows of divided tables become rows of their parts in two steps, between which a value has the number of its part in the
top byte: the first step finds each row once for a feature, the second keeps, for each lookup, the rows of its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from loader.errors import ShardrankError
from loader.snapshot.buckets import splitmix64
from loader.snapshot.row_classes import BLOCK_BITS, RowClasses, find_bits
from loader.snapshot.tables import DividedTable, HashMapping, VocabularyMapping
from router.feature_schema import FeatureSchema
from shard_node.bags import Bags, Int32Array, Int64Array, first_outside
from shard_node.engine.key_index import KeyIndex

_UNDIVIDED, _CLASS, _QUOTIENT, _REMAINDER = range(4)
_PART_SHIFT = 56
_ROW_MASK = (1 << _PART_SHIFT) - 1
_NO_IDS = np.zeros(0, np.int64)
_IDENTITY, _HASH, _VOCABULARY = 0, 1, 2
_REJECT, _DEFAULT_ROW, _SKIP = 0, 1, 2


class PartRows:
    """Maps rows of one model version's divided tables.

    `row_classes` are of each table that has classes, by its name. Raises ShardrankError if some are missing, or of a
    table that has none.
    """

    def __init__(self, schema: FeatureSchema, row_classes: Mapping[str, RowClasses]) -> None:
        spec = schema.spec
        chained = {table.name: table for table in spec.divided if table.num_classes > 1}
        if chained.keys() != row_classes.keys():
            raise ShardrankError(f"row classes of {sorted(row_classes)} were given; the model needs {sorted(chained)}")
        bitmaps = [bitmap for name in chained for bitmap in row_classes[name].bitmaps]
        words = [bitmap.words for bitmap in bitmaps]
        self._words = words[0] if len(words) == 1 else np.concatenate([*words, np.zeros((0, 8), np.uint64)])
        self._ranks = np.concatenate([*(bitmap.ranks for bitmap in bitmaps), np.zeros(0, np.uint32)])
        self._within = np.concatenate([*(bitmap.within for bitmap in bitmaps), np.zeros((0, 8), np.uint16)])
        firsts = iter(np.cumsum([0, *(bitmap.ranks.size for bitmap in bitmaps)]).tolist())
        # Of each chain, where the bits of its bitmaps begin: -1 after the last.
        depth = max((table.num_classes - 1 for table in chained.values()), default=0)
        self._first_bit = np.full((len(chained), depth), -1, np.int64)
        # The class that has no part, and the row that its ids read instead: the last of the last part.
        self._pruned_class = np.full(len(chained), -1, np.int64)
        self._default_row = np.zeros(len(chained), np.int64)
        for number, table in enumerate(chained.values()):
            parts = spec.parts(table)
            for level in range(table.num_classes - 1):
                self._first_bit[number, level] = next(firsts) * BLOCK_BITS
            if table.pruned:
                self._pruned_class[number] = len(parts)
                self._default_row[number] = parts[-1].num_embeddings - 1
        number_of = {name: number for number, name in enumerate(chained)}
        tables = [spec.table_of(feature.name) for feature in schema.features]
        self._chain = np.array([number_of.get(table.name, -1) for table in tables], np.int64)
        lookups, kinds, divisors = schema.lookups, [], []
        for feature, part in zip(lookups.feature.tolist(), lookups.part.tolist(), strict=True):
            of_feature = tables[feature]
            buckets = of_feature.buckets if isinstance(of_feature, DividedTable) else None
            if buckets is not None:
                kinds.append(_REMAINDER if part else _QUOTIENT)
            else:
                kinds.append(_CLASS if self._chain[feature] >= 0 else _UNDIVIDED)
            divisors.append(buckets or 1)
        self._kind, self._divisor = np.array(kinds, np.int8), np.array(divisors, np.int64)
        self._class = np.where(self._kind == _CLASS, lookups.part, 0)
        self._has_classes = bool((self._kind == _CLASS).any())
        self._has_several = bool(self._class.any())
        self._has_pruned = bool((self._pruned_class >= 0).any())
        self._has_quotients = bool((self._kind >= _QUOTIENT).any())

    def find(self, bags: Bags) -> Bags:
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

    def take(self, bags: Bags) -> Bags:
        """Return the bags, by lookup and with values of `find`, with only the rows that each lookup reads."""
        counts, values = bags.values_per_key(), bags.values
        if self._has_quotients:
            kind, values = np.repeat(self._kind[bags.keys], counts), values.copy()
            divisor = np.repeat(self._divisor[bags.keys], counts)
            for chosen, operator in ((_QUOTIENT, np.floor_divide), (_REMAINDER, np.remainder)):
                at = np.flatnonzero(kind == chosen)
                values[at] = operator(values[at], divisor[at])
        if not self._has_several:
            return bags.with_values(values, bags.weights)
        # Rows of features that have no classes have 0 above them.
        is_kept = values >> _PART_SHIFT == np.repeat(self._class[bags.keys], counts)
        bags = bags.with_values(values & _ROW_MASK, bags.weights)
        return bags if is_kept.all() else bags.kept(is_kept)


if TYPE_CHECKING:
    # It loads torch, which a client's processes do without.
    from loader.snapshot.reader import Snapshot


def hashed_rows(
    ids: npt.NDArray[np.int64], seed: npt.NDArray[np.uint64], num_embeddings: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Map each id to the row floor(top 32 bits of splitmix64(id + seed) * num_embeddings / 2^32).

    A multiplication and a shift in place of a division (Lemire, "Fast Random Integer Generation in an Interval", 2019);
    num_embeddings is below 2^32, so the product fits in 64 bits. `seed` and `num_embeddings` are [n] or [1].
    """
    mixed = splitmix64(ids.view(np.uint64) + seed)
    mixed >>= np.uint64(32)
    mixed *= num_embeddings
    mixed >>= np.uint64(32)
    return mixed.view(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class BagIds:
    """Some ids of bags: such as their tables have no row for.

    Attributes:
        feature: int32 [k], the flat index of the feature.
        bag: int64 [k], the bag's number within that feature.
        id: int64 [k], the id as it was sent (the fingerprint, for a string).
    """

    feature: Int32Array
    bag: Int64Array
    id: Int64Array

    def __len__(self) -> int:
        return self.bag.size


NO_IDS = BagIds(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class MappedBags:
    """Bags whose values are rows, or keys.

    A bag with a `rejected` id, under `unknown_id: reject` (the first of each is told), must not be used.
    """

    bags: Bags
    rejected: BagIds


class IdMapper:
    """Maps the raw ids of one model version.

    Args:
        vocabularies: int64 [V] ids by table name, for tables with the vocabulary mapping; a position is a row.
        row_classes: of divided tables that have such, by name.

    Attributes:
        parts: where rows of divided tables lie; None of a model without such.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        vocabularies: Mapping[str, Int64Array],
        row_classes: Mapping[str, RowClasses] | None = None,
    ) -> None:
        self._schema = schema
        self.parts = PartRows(schema, row_classes or {}) if schema.spec.divided else None
        tables = [schema.spec.table_of(feature.name) for feature in schema.features]
        kinds = {"identity": _IDENTITY, "hash": _HASH, "vocabulary": _VOCABULARY}
        policies = {"reject": _REJECT, "default_row": _DEFAULT_ROW, "skip": _SKIP}
        self._kind = np.array([kinds[table.id_mapping.kind] for table in tables], np.int8)
        self._only_identity = bool((self._kind == _IDENTITY).all())
        self._policy = np.array([policies[table.unknown_id] for table in tables], np.int8)
        self._num_embeddings = np.array([table.num_embeddings for table in tables], np.uint64)
        # Where ids are rows, or keys, of which none is unknown here.
        self._last = np.array([table.last_value for table in tables], np.uint64)
        # Tables that all have as many rows as each other need no bounds by feature.
        self._common_last = int(self._last[0]) if (self._last == self._last[0]).all() else None
        self._default_row = np.array([table.default_row for table in tables], np.int64)
        mappings = [(feature.name, table.id_mapping) for feature, table in zip(schema.features, tables, strict=True)]
        seeds = [mapping.seed_of(name) if isinstance(mapping, HashMapping) else 0 for name, mapping in mappings]
        self._seed = np.array(seeds, np.uint64)
        numbers = zip(tables, schema.table_index.tolist(), strict=True)
        names = {number: table.name for table, number in numbers if isinstance(table.id_mapping, VocabularyMapping)}
        of_tables = {number: vocabularies[name] for number, name in names.items()}
        # By table in layout order; of those without a vocabulary there is nothing to find.
        stored = range(len(schema.layout.tables) if of_tables else 0)
        self._vocabulary = KeyIndex([of_tables.get(number, _NO_IDS).size for number in stored])
        for number, ids in of_tables.items():
            self._vocabulary.insert(number, ids, np.arange(ids.size))

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot, schema: FeatureSchema) -> Self:
        """Make what maps a snapshot's ids. Raises SnapshotError."""
        tables, divided = snapshot.spec.logical_tables, snapshot.spec.divided
        return cls(
            schema,
            {each.name: snapshot.vocabulary(each.name) for each in tables if each.id_mapping.kind == "vocabulary"},
            {each.name: snapshot.row_classes(each.name) for each in divided if each.num_classes > 1},
        )

    def map(self, bags: Bags) -> MappedBags:
        """Map raw ids, keyed by flat feature index, to rows of their features' tables; of divided ones see `parts`.

        Ids unknown under `skip` are left out of their bags.
        """
        keys = bags.keys
        if keys.size == 0 or not bags.values.size:
            return MappedBags(bags, NO_IDS)
        if self._only_identity:
            if self._common_last is not None:
                # As unsigned numbers, negative values are larger than any row.
                are_rows = int(np.maximum.reduce(bags.values.view(np.uint64))) <= self._common_last
            else:
                last = self._last if keys.size == self._last.size else self._last[keys]
                are_rows = first_outside(bags.values, bags.value_starts(), last) is None
            if are_rows:
                return MappedBags(bags, NO_IDS)
        values_per_key = bags.values_per_key()
        kinds = self._kind[keys]
        if (kinds == _IDENTITY).all():
            last = self._last[keys]
            if not self._only_identity and first_outside(bags.values, bags.value_starts(), last) is None:
                return MappedBags(bags, NO_IDS)
            rows = bags.values
            unknown = rows.view(np.uint64) > np.repeat(last, values_per_key)
        elif (kinds == _HASH).all():
            by_key = (self._seed[keys], self._num_embeddings[keys])
            factors = (one[:1] if (one == one[0]).all() else np.repeat(one, values_per_key) for one in by_key)
            rows = hashed_rows(bags.values, *factors)
            return MappedBags(bags.with_values(rows, bags.weights), NO_IDS)
        else:
            kind = np.repeat(kinds, values_per_key)
            feature = np.repeat(keys, values_per_key)
            rows = bags.values.copy()
            hashed = np.flatnonzero(kind == _HASH)
            of = feature[hashed]
            rows[hashed] = hashed_rows(bags.values[hashed], self._seed[of], self._num_embeddings[of])
            known, of = np.flatnonzero(kind == _VOCABULARY), kinds == _VOCABULARY
            tables = self._schema.table_index[keys[of]]
            # A row that no vocabulary gave is -1: as an unsigned number, beyond every table.
            rows[known] = self._vocabulary.find(tables, values_per_key[of], bags.values[known])
            unknown = rows.view(np.uint64) > self._last[feature]
        if not unknown.any():
            return MappedBags(bags.with_values(rows, bags.weights), NO_IDS)
        positions = np.flatnonzero(unknown)
        segment = np.searchsorted(np.cumsum(values_per_key), positions, side="right")
        feature = bags.keys[segment]
        policy = self._policy[feature]
        rows = rows.copy()
        rows[positions] = np.where(policy == _DEFAULT_ROW, self._default_row[feature], 0)
        refused = policy == _REJECT
        # One id is enough to refuse a bag.
        bag_of_batch = np.searchsorted(bags.offsets, positions[refused], side="right") - 1
        refused_bags, first = np.unique(bag_of_batch, return_index=True)
        at, segment = positions[refused][first], segment[refused][first]
        rejected = BagIds(bags.keys[segment], refused_bags - bags.bag_starts()[segment], bags.values[at])
        mapped, skipped = bags.with_values(rows, bags.weights), positions[policy == _SKIP]
        if skipped.size:
            keep = np.ones(rows.size, dtype=bool)
            keep[skipped] = False
            mapped = mapped.kept(keep)
        return MappedBags(mapped, rejected)
