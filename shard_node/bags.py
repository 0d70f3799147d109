"""Bags: all those of a batch in flat arrays, the form in which ids travel through shardrank; and their checks.

Tables have one order, which router and shard nodes derive from the model and never send. Engines check bags and rows
against it before they read or write a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.snapshot.buckets import starts_of
from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import RowDtype, TableSpec
from shard_node.errors import InvalidBagsError

Int64Array: TypeAlias = npt.NDArray[np.int64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]

_INT64 = np.dtype(np.int64)
_INT32 = np.dtype(np.int32)
_FORM = (
    ("keys", (_INT32,)),
    ("bags_per_key", (_INT64,)),
    ("offsets", (_INT64, _INT32)),
    ("values", (_INT64, _INT32)),
    ("weights", (np.dtype(np.float32),)),
)
# The last row that int32 numbers can name.
_LAST_INT32 = np.uint64(2**31 - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """Bags of several keys, key by key (TorchRec's KeyedJaggedTensor with its own bag count for each key).

    At the router a key is a feature and a value a raw id; at a shard a key is a table (its number in `TableLayout`)
    and a value a row. Keys ascend; the same key may not come twice.

    Attributes:
        keys: int32 [S], strictly ascending.
        bags_per_key: int64 [S], how many bags each key has.
        offsets: int64 [B + 1], bag b holds values[offsets[b] : offsets[b + 1]]; B = bags_per_key.sum(). At a shard
            offsets and values may be int32, as they travel.
        values: int64 [n].
        weights: float32 [n], the factor of each value, or None for all ones.
    """

    keys: Int32Array
    bags_per_key: Int64Array
    offsets: Int64Array
    values: Int64Array
    weights: Float32Array | None = None
    # Both are asked for at every step from parsing to pooling, so they are worked out once.
    _bag_starts: Int64Array | None = field(default=None, init=False, repr=False)
    _value_starts: Int64Array | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_lengths(
        cls,
        keys: Int32Array,
        bags_per_key: Int64Array,
        lengths: npt.NDArray[np.integer],
        values: Int64Array,
        weights: Float32Array | None = None,
    ) -> Bags:
        """Build offsets from the length of each bag (any integer dtype, [B])."""
        bags = cls(keys, bags_per_key, offsets := starts_of(lengths), values, weights)
        # Every bag that is made is asked for both, more than once.
        bag_starts = starts_of(bags_per_key)
        object.__setattr__(bags, "_bag_starts", bag_starts)
        object.__setattr__(bags, "_value_starts", offsets[bag_starts])
        return bags

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
        return self.offsets[1:] - self.offsets[:-1]

    def bag_starts(self) -> Int64Array:
        """int64 [S + 1], the first bag of each key, then B. Not to be changed."""
        starts = self._bag_starts
        if starts is None:
            starts = starts_of(self.bags_per_key)
            object.__setattr__(self, "_bag_starts", starts)
        return starts

    def value_starts(self) -> Int64Array:
        """int64 [S + 1], the first value of each key, then n. Not to be changed."""
        starts = self._value_starts
        if starts is None:
            bag_starts = self._bag_starts
            starts = self.offsets[self.bag_starts() if bag_starts is None else bag_starts].astype(np.int64, copy=False)
            object.__setattr__(self, "_value_starts", starts)
        return starts

    def values_per_key(self) -> Int64Array:
        """int64 [S], values of each key."""
        starts = self._value_starts
        if starts is None:
            starts = self.value_starts()
        return starts[1:] - starts[:-1]

    def with_values(self, values: Int64Array, weights: Float32Array | None) -> Bags:
        """Return bags of the same shape with other contents, int64 [n] and float32 [n]."""
        bags = Bags(self.keys, self.bags_per_key, self.offsets, values, weights)
        object.__setattr__(bags, "_bag_starts", self._bag_starts)
        object.__setattr__(bags, "_value_starts", self._value_starts)
        return bags

    def kept(self, chosen: npt.NDArray[np.bool_]) -> Bags:
        """Return the same bags with some of their values alone: bool [n]."""
        weights = None if self.weights is None else self.weights[chosen]
        return Bags(self.keys, self.bags_per_key, starts_of(chosen)[self.offsets], self.values[chosen], weights)

    def wide(self) -> Bags:
        """Return the same bags with int64 offsets and values."""
        if self.values.dtype == _INT64 and self.offsets.dtype == _INT64:
            return self
        offsets, values = (array.astype(np.int64) for array in (self.offsets, self.values))
        return Bags(self.keys, self.bags_per_key, offsets, values, self.weights)

    def of_keys(self, chosen: npt.NDArray[np.bool_]) -> Bags:
        """Return the bags of some keys: bool [S]."""
        values = chosen.repeat(self.values_per_key())
        return Bags.from_lengths(
            self.keys[chosen],
            self.bags_per_key[chosen],
            self.lengths[chosen.repeat(self.bags_per_key)],
            self.values[values],
            None if self.weights is None else self.weights[values],
        )

    def validate(self) -> None:
        """Raise InvalidBagsError, naming the array, unless the arrays describe bags: for input from outside."""
        keys, counts, offsets = self.keys, self.bags_per_key, self.offsets
        if keys.size != counts.size:
            raise InvalidBagsError(f"keys has {keys.size} entries, bags_per_key {counts.size}")
        if keys.size and (keys[0] < 0 or (keys[1:] <= keys[:-1]).any()):
            raise InvalidBagsError("keys must be non-negative and strictly ascending")
        if offsets.size == 0 or offsets[0] != 0:
            raise InvalidBagsError("offsets must begin with 0")
        # A negative count is a huge unsigned one. Each is bounded before they are summed, so that no sum wraps around.
        is_bounded = not counts.size or int(np.maximum.reduce(counts.view(np.uint64))) <= self.num_bags
        if not is_bounded or self.bag_starts()[-1] != self.num_bags:
            says = f"must not be negative, and add up to the {self.num_bags} bags that offsets describes"
            raise InvalidBagsError(f"bags_per_key {says}")
        # Compared, not subtracted: a difference of two int64 can wrap around.
        if (offsets[1:] < offsets[:-1]).any():
            raise InvalidBagsError("offsets must not descend")
        if offsets[-1] != self.values.size:
            raise InvalidBagsError(f"offsets ends at {int(offsets[-1])}, but there are {self.values.size} values")
        if self.weights is not None:
            if self.weights.size != self.values.size:
                raise InvalidBagsError(f"{self.weights.size} weights for {self.values.size} values")
            if not np.isfinite(self.weights).all():
                raise InvalidBagsError("weights must be finite")


@dataclass(frozen=True, slots=True, eq=False)
class CheckedBags(Bags):
    """Bags of tables whose values this process has just checked against `layout`, as `TableLayout.check` would."""

    layout: TableLayout = field(kw_only=True)


def first_outside(values: Int64Array, value_starts: Int64Array, last: npt.NDArray[np.uint64]) -> tuple[int, int] | None:
    """Find a value, int64 [n], key by key, that is, as an unsigned number, beyond its key's last one.

    `value_starts`, int64 [S + 1], are the first value of each key, then n; `last` uint64 [S]. Returns (segment,
    position) of the first one, or None. If all is well this costs one pass over the values.
    """
    if not values.size:
        return None
    # As unsigned numbers, negative values are larger than any row: the largest of a key decides for both bounds.
    narrow = values.dtype == _INT32
    unsigned = values.view(np.uint32 if narrow else np.uint64)
    last = np.minimum(last, _LAST_INT32) if narrow else last
    if (last == last[0]).all() and np.maximum.reduce(unsigned) <= last[0]:
        return None
    # reduceat gives an element, not a neutral value, for an empty segment: such keys are left out.
    filled = np.flatnonzero(value_starts[:-1] < value_starts[1:])
    starts, last = value_starts[filled], last[filled]
    wrong = np.maximum.reduceat(unsigned, starts) > last
    if not wrong.any():
        return None
    which = int(wrong.argmax())
    start, end = int(starts[which]), int(value_starts[filled[which] + 1])
    return int(filled[which]), start + int((unsigned[start:end] > last[which]).argmax())


@dataclass(frozen=True)
class Group:
    """The tables [first_table, end_table) of one embedding_dim and dtype. A pooled answer has one block per group."""

    embedding_dim: int
    dtype: RowDtype
    first_table: int
    end_table: int

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one stored row."""
        return RowCodec(self.dtype, self.embedding_dim).row_bytes


@dataclass(frozen=True)
class TableLayout:
    """All stored tables of a model in layout order, and their groups; a table's place is its number on the wire.

    Tables of one (embedding_dim, dtype) are neighbours, so that all their bags are one contiguous run of a batch, are
    pooled in one call per arena, and come back as one block. A slice of a wide table is a table here like any other.
    `sliced` names each table that is stored in slices, with their numbers in column order.
    """

    tables: tuple[TableSpec, ...]
    groups: tuple[Group, ...]
    sliced: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, spec: ModelSpec) -> TableLayout:
        """Sorts the stored tables by (embedding_dim, dtype); within a group they keep the model's order."""
        tables = tuple(sorted(spec.stored_tables, key=lambda table: (table.embedding_dim, table.dtype)))
        edges = accumulate((len(list(alike)) for _, alike in groupby(tables, _kind)), initial=0)
        number = {table.name: at for at, table in enumerate(tables)}
        sliced = tuple(
            (table.name, tuple(number[one.name] for one in table.slices)) for table in spec.tables if table.column_dims
        )
        groups = tuple(Group(*_kind(tables[first]), first, end) for first, end in pairwise(edges))
        return cls(tables, groups, sliced)

    @cached_property
    def index(self) -> dict[str, int]:
        """Stored table's name to its number in layout order."""
        return {table.name: number for number, table in enumerate(self.tables)}

    @cached_property
    def slices(self) -> dict[str, tuple[int, ...]]:
        """Name of a table of the model to the numbers of what it is stored as, in column order; one if it is whole."""
        numbers: dict[str, tuple[int, ...]] = {name: (number,) for name, number in self.index.items()}
        for name, parts in self.sliced:
            for number in parts:
                del numbers[self.tables[number].name]
            numbers[name] = parts
        return numbers

    @cached_property
    def _last_values(self) -> npt.NDArray[np.uint64]:
        return np.array([table.last_value for table in self.tables], np.uint64)

    @cached_property
    def is_keyed(self) -> npt.NDArray[np.bool_]:
        """Bool [tables], which of them name their rows by keys."""
        return np.array([table.keys is not None for table in self.tables])

    @cached_property
    def has_keys(self) -> bool:
        """Whether some table names its rows by keys."""
        return bool(self.is_keyed.any())

    @cached_property
    def bag_bytes(self) -> Int64Array:
        """int64 [tables], bytes that one bag of each takes in an answer at most: as a float32 sum or a stored row."""
        # Rows travel as stored up to twice as many bytes as float16 sums take, or one for each bag.
        most = [max(4 * group.embedding_dim, group.row_bytes) for group in self.groups]
        return np.repeat(np.array(most, np.int64), [group.end_table - group.first_table for group in self.groups])

    @cached_property
    def _common_bag_bytes(self) -> int | None:
        return int(self.bag_bytes[0]) if (self.bag_bytes == self.bag_bytes[0]).all() else None

    @cached_property
    def _equals(self) -> list[TableLayout]:
        # The layout that was found equal to this one last: one process has few of a model, so it is compared once.
        return [self]

    def answer_bytes(self, keys: Int32Array, bags_per_key: npt.NDArray[np.integer[Any]], num_bags: int) -> int:
        """Return the bytes of what answers a request at most: before any memory is taken.

        Of `keys`, int32 [S], tables, and `bags_per_key`, [S], as claimed; `num_bags` as claimed by the length of
        `offsets`.

        Raises InvalidBagsError, where tables differ in width, for a key that is no table, or a count of bags that is
        not within 0..num_bags. Where they don't, neither is read, and `check` refuses it later.
        """
        if self._common_bag_bytes is not None:
            return self._common_bag_bytes * max(num_bags, 0)
        if keys.size != bags_per_key.size:
            raise InvalidBagsError(f"keys has {keys.size} entries, bags_per_key {bags_per_key.size}")
        if not keys.size:
            return 0
        self._check_keys(keys)
        counts = bags_per_key.astype(np.int64, copy=False)
        # A negative count is a huge unsigned one.
        if int(np.maximum.reduce(counts.view(np.uint64))) > max(num_bags, 0):
            raise InvalidBagsError(f"bags_per_key must be within 0..{num_bags}, the bags that offsets describes")
        return int(np.dot(self.bag_bytes[keys], counts))

    def check(self, bags: Bags, tables: Int64Array | None = None) -> None:
        """Check what `Bags.validate` does, that arrays are flat, keys tables, and values rows of them.

        What passes can be handed to code that checks nothing. Every request passes here, so the check is one run of few
        vector operations. `CheckedBags` of an equal layout have been through it: of them only what costs nothing is
        checked, that arrays are flat and end together. `tables`, int64 [S], are the table of each key, where keys
        number something else; known to be tables.

        Raises InvalidBagsError, naming the array, or the table, the row and the limit.
        """
        arrays: tuple[npt.NDArray[Any], ...] = (bags.keys, bags.bags_per_key, bags.offsets, bags.values)
        if bags.weights is not None:
            arrays = (*arrays, bags.weights)
        # The torch ops read flat memory of these dtypes without asking.
        for array, (name, dtypes) in zip(arrays, _FORM, strict=False):
            if array.ndim != 1 or array.dtype not in dtypes or not array.flags.c_contiguous:
                told = f"{array.dtype} {list(array.shape)}"
                raise InvalidBagsError(f"{name} must be flat and contiguous {dtypes[0]}, got {told}")
        if tables is None and isinstance(bags, CheckedBags) and bags.offsets.size:
            is_equal = bags.layout is self._equals[0] or bags.layout == self
            ends = int(bags.offsets[-1]), int(bags.bag_starts()[-1])
            if is_equal and ends == (bags.values.size, bags.offsets.size - 1):
                self._equals[0] = bags.layout
                return
        if tables is not None and tables.size != bags.keys.size:
            raise InvalidBagsError(f"the batch has {bags.keys.size} keys, there must be {tables.size}")
        bags.validate()
        if tables is None:
            self._check_keys(bags.keys)
        numbers = bags.keys if tables is None else tables
        outside = first_outside(bags.values, bags.value_starts(), self._last_values[numbers])
        if outside is None:
            return
        segment, position = outside
        table = self.tables[int(numbers[segment])]
        raise InvalidBagsError(
            f"row {int(bags.values[position])} (value {position}) is not in 0..{table.num_embeddings - 1} "
            f"of table {table.name!r}"
        )

    def rows_by_table(
        self, table: int | tuple[int, ...], rows: Int64Array, stored: npt.NDArray[np.uint8]
    ) -> list[tuple[int, npt.NDArray[np.uint8]]]:
        """Check what `Engine.write_rows` is given, and cut it into the rows of each table, contiguous.

        Raises InvalidBagsError, naming table, row and limit, or the array.
        """
        if not isinstance(table, tuple):
            self._check_rows(table, rows, stored)
            return [(table, stored)]
        for one in table:
            self._check_table(one)
        specs = [self.tables[one] for one in table]
        ends = list(accumulate(RowCodec(one.dtype, one.embedding_dim).row_bytes for one in specs))
        if not ends or len(set(table)) != len(table) or stored.shape != (rows.size, ends[-1]):
            raise InvalidBagsError(
                f"tables {[one.name for one in specs]}: stored must be uint8 {[rows.size, *ends[-1:]]} for tables that "
                f"are all different, got {stored.dtype} {list(stored.shape)}"
            )
        parts = [np.ascontiguousarray(part) for part in np.split(stored, ends[:-1], axis=1)]
        for one, part in zip(table, parts, strict=True):
            self._check_rows(one, rows, part)
        return list(zip(table, parts, strict=True))

    def _check_table(self, table: int) -> None:
        if not 0 <= table < len(self.tables):
            raise InvalidBagsError(f"{table} is no table, tables are 0..{len(self.tables) - 1}")

    def _check_rows(self, table: int, rows: Int64Array, stored: npt.NDArray[np.uint8]) -> None:
        self._check_table(table)
        spec = self.tables[table]
        where = f"table {spec.name!r}"
        if rows.ndim != 1 or rows.dtype != np.int64:
            raise InvalidBagsError(f"{where}: rows must be flat int64, got {rows.dtype} {list(rows.shape)}")
        shape = (rows.size, RowCodec(spec.dtype, spec.embedding_dim).row_bytes)
        if stored.dtype != np.uint8 or stored.shape != shape or not stored.flags.c_contiguous:
            raise InvalidBagsError(
                f"{where}: stored must be contiguous uint8 {list(shape)}, got {stored.dtype} {list(stored.shape)}"
            )
        if (rows[1:] <= rows[:-1]).any():
            raise InvalidBagsError(f"{where}: rows must ascend, none twice")
        if rows.size and spec.keys is None and (rows[0] < 0 or rows[-1] >= spec.num_embeddings):
            wrong = rows[0] if rows[0] < 0 else rows[-1]
            raise InvalidBagsError(f"{where}: row {wrong} is not in 0..{spec.num_embeddings - 1}")

    def _check_keys(self, keys: Int32Array) -> None:
        num_tables = len(self.tables)
        if keys.size and int(np.maximum.reduce(keys.view(np.uint32))) >= num_tables:
            wrong = keys[(keys < 0) | (keys >= num_tables)]
            raise InvalidBagsError(f"key {int(wrong[0])} is no table, tables are 0..{num_tables - 1}")


def _kind(table: TableSpec) -> tuple[int, RowDtype]:
    return table.embedding_dim, table.dtype
