"""From raw ids to rows, for all features of a batch at once: hashes, vocabularies, and rows as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from loader.snapshot.row_classes import RowClasses
from loader.snapshot.tables import HashMapping, VocabularyMapping
from router.feature_schema import FeatureSchema
from router.parts import PartRows
from shard_node.bags import Int32Array, Int64Array, KeyedBags, first_outside

if TYPE_CHECKING:
    # It loads torch, which a client's processes do without.
    from loader.snapshot.reader import Snapshot

UNKNOWN = -1
_IDENTITY, _HASH, _VOCABULARY = 0, 1, 2
_REJECT, _DEFAULT_ROW, _SKIP = 0, 1, 2
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of Steele, Lea and Flood's SplitMix64 (OOPSLA 2014), a bijection of uint64."""
    mixed = values + _GAMMA
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


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


class VocabularyIndex:
    """All vocabularies of a model in one flat index, so that a batch's ids are looked up together.

    Entries (table, id) are sorted by a 64-bit mix; the top bits of the mix pick a short run of them, which is compared
    step by step for all ids at once. With about one entry to a run, a few steps find every id or show that it is
    unknown.

    `ids` gives the ids of each table number, int64 [V], all different; an id's position is its row.
    """

    def __init__(self, ids: Mapping[int, Int64Array]) -> None:
        tables = [np.full(entry.size, table, np.int32) for table, entry in ids.items()]
        rows = [np.arange(entry.size, dtype=np.int64) for entry in ids.values()]
        table = np.concatenate(tables) if tables else np.zeros(0, np.int32)
        flat_ids = np.concatenate(list(ids.values())) if ids else np.zeros(0, np.int64)
        mix = _mix(table, flat_ids)
        order = np.argsort(mix)
        self._ids = flat_ids[order]
        self._table = table[order]
        self._rows = (np.concatenate(rows) if rows else np.zeros(0, np.int64))[order]
        run_bits = max(1, int(flat_ids.size).bit_length())
        self._run_shift = np.uint64(64 - run_bits)
        self._run_starts = np.searchsorted(mix[order] >> self._run_shift, np.arange((1 << run_bits) + 1))

    def rows(self, table: npt.NDArray[np.int32], ids: Int64Array) -> Int64Array:
        """Find the row, int64 [n], of each id in its table (int32 [n]); `UNKNOWN` for one that has none."""
        run = _mix(table, ids) >> self._run_shift
        position, end = self._run_starts[run], self._run_starts[run + np.uint64(1)]
        rows = np.full(ids.size, UNKNOWN, np.int64)
        pending = np.flatnonzero(position < end)
        while pending.size:
            at = position[pending]
            found = (self._ids[at] == ids[pending]) & (self._table[at] == table[pending])
            rows[pending[found]] = self._rows[at[found]]
            position[pending] += 1
            pending = pending[~found & (at + 1 < end[pending])]
        return rows


def _mix(table: npt.NDArray[np.int32], ids: Int64Array) -> npt.NDArray[np.uint64]:
    return splitmix64(ids.view(np.uint64) ^ splitmix64(table.astype(np.uint64)))


@dataclass(frozen=True, slots=True, eq=False)
class RejectedIds:
    """Ids that their tables have no row for, under `unknown_id: reject`: the first of each bag, in the order of bags.

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


NONE_REJECTED = RejectedIds(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class MappedBags:
    """Bags whose values are rows. A bag with a `rejected` id (the first of each is told) must not be used."""

    bags: KeyedBags
    rejected: RejectedIds


class IdMapper:
    """Maps the raw ids of one model version.

    Args:
        schema: the model's features.
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
        sizes = {table.num_embeddings for table in tables}
        # Tables that all have as many rows as each other need no bounds by feature.
        self._common_size = sizes.pop() if len(sizes) == 1 else None
        self._default_row = np.array([table.default_row for table in tables], np.int64)
        mappings = [(feature.name, table.id_mapping) for feature, table in zip(schema.features, tables, strict=True)]
        seeds = [one.seed_of(name) if isinstance(one, HashMapping) else 0 for name, one in mappings]
        self._seed = np.array(seeds, np.uint64)
        numbers = zip(tables, schema.table_index.tolist(), strict=True)
        wanted = {number: table.name for table, number in numbers if isinstance(table.id_mapping, VocabularyMapping)}
        self._vocabulary = VocabularyIndex({number: vocabularies[name] for number, name in wanted.items()})

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot, schema: FeatureSchema) -> Self:
        """Make what maps a snapshot's ids, with its vocabularies and the classes of its rows. Raises SnapshotError."""
        tables, divided = snapshot.spec.logical_tables, snapshot.spec.divided
        return cls(
            schema,
            {one.name: snapshot.vocabulary(one.name) for one in tables if one.id_mapping.kind == "vocabulary"},
            {one.name: snapshot.row_classes(one.name) for one in divided if one.num_classes > 1},
        )

    def map(self, bags: KeyedBags) -> MappedBags:
        """Map raw ids, keyed by flat feature index, to rows of their features' tables; of divided ones see `parts`.

        Ids unknown under `skip` are left out of their bags.
        """
        keys = bags.keys
        if keys.size == 0 or not bags.values.size:
            return MappedBags(bags, NONE_REJECTED)
        if self._only_identity:
            if self._common_size is not None:
                # As unsigned numbers, negative values are larger than any size.
                are_rows = int(np.maximum.reduce(bags.values.view(np.uint64))) < self._common_size
            else:
                limits = self._num_embeddings if keys.size == self._num_embeddings.size else self._num_embeddings[keys]
                are_rows = first_outside(bags.values, bags.value_starts(), limits) is None
            if are_rows:
                return MappedBags(bags, NONE_REJECTED)
        values_per_key = bags.values_per_key()
        kinds = self._kind[keys]
        if (kinds == _IDENTITY).all():
            limits = self._num_embeddings[keys]
            if not self._only_identity and first_outside(bags.values, bags.value_starts(), limits) is None:
                return MappedBags(bags, NONE_REJECTED)
            rows = bags.values
            unknown = rows.view(np.uint64) >= np.repeat(limits, values_per_key)
        elif (kinds == _HASH).all():
            rows = hashed_rows(
                bags.values,
                _spread(self._seed[keys], values_per_key),
                _spread(self._num_embeddings[keys], values_per_key),
            )
            return MappedBags(bags.with_values(rows, bags.weights), NONE_REJECTED)
        else:
            rows, unknown = self._map_mixed(bags, values_per_key)
        if not unknown.any():
            return MappedBags(bags.with_values(rows, bags.weights), NONE_REJECTED)
        return self._resolve_unknown(bags, rows, unknown, values_per_key)

    def _map_mixed(self, bags: KeyedBags, values_per_key: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        keys = bags.keys
        kind = np.repeat(self._kind[keys], values_per_key)
        feature = np.repeat(keys, values_per_key)
        rows = bags.values.copy()
        hashed = np.flatnonzero(kind == _HASH)
        of = feature[hashed]
        rows[hashed] = hashed_rows(bags.values[hashed], self._seed[of], self._num_embeddings[of])
        known = np.flatnonzero(kind == _VOCABULARY)
        rows[known] = self._vocabulary.rows(self._schema.table_index[feature[known]], bags.values[known])
        # A row that no vocabulary gave is -1: as an unsigned number, beyond every table.
        return rows, rows.view(np.uint64) >= self._num_embeddings[feature]

    def _resolve_unknown(
        self, bags: KeyedBags, rows: Int64Array, unknown: npt.NDArray[np.bool_], values_per_key: Int64Array
    ) -> MappedBags:
        positions = np.flatnonzero(unknown)
        segment = np.searchsorted(np.cumsum(values_per_key), positions, side="right")
        feature = bags.keys[segment]
        policy = self._policy[feature]
        rows = rows.copy()
        rows[positions] = np.where(policy == _DEFAULT_ROW, self._default_row[feature], 0)
        refused = policy == _REJECT
        rejected = self._rejected(bags, positions[refused], segment[refused])
        skipped = positions[policy == _SKIP]
        found = bags.with_values(rows, bags.weights)
        if not skipped.size:
            return MappedBags(found, rejected)
        keep = np.ones(rows.size, dtype=bool)
        keep[skipped] = False
        return MappedBags(found.kept(keep), rejected)

    def _rejected(self, bags: KeyedBags, positions: Int64Array, segment: Int64Array) -> RejectedIds:
        # One id is enough to refuse a bag.
        bag_of_batch, first = np.unique(np.searchsorted(bags.offsets, positions, side="right") - 1, return_index=True)
        positions, segment = positions[first], segment[first]
        return RejectedIds(bags.keys[segment], bag_of_batch - bags.bag_starts()[segment], bags.values[positions])


def _spread(by_key: npt.NDArray[np.uint64], values_per_key: Int64Array) -> npt.NDArray[np.uint64]:
    """One number for each value; a single one if all keys share it."""
    if (by_key == by_key[0]).all():
        return by_key[:1]
    return np.repeat(by_key, values_per_key)
