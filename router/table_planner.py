"""Chooses how each table of a model is divided over a fleet, by the time of the slowest shard, under capacity.

For every table there are a few ways to divide it (`options`), each with what it costs a shard: reading rows, ids in,
sums out. For a bound on the time of a shard, tables are packed onto shards like boxes, the most costly first, each in
the cheapest way that fits under the bound and into memory; the lowest bound that can be kept is found by bisection.
Then buckets are dealt to shards, and each shard's to its cards, by counted load (`shard_node.planning.balance`).
The costs steer; which plan is taken is decided by `PlannedTimes`, the engine's own placement on every shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.codecs import codec_for
from loader.snapshot.manifest import ModelSpec, TableSpec
from router.errors import PlanError
from router.plan_file import PlanFile, RanksOfBuckets, ShardingType, TablePlan, with_columns
from shard_node.bags import Int64Array, TableLayout
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.balance import Int16Array, Owners, deal
from shard_node.planning.card_plan import PLACE_BYTES, CardBudget
from shard_node.planning.cost_model import BYTES_PER_US, INDEX_BYTES, SECTOR_BYTES, BagLoad, CardSystem, sector_bytes
from shard_node.planning.hotness import Float64Array, Hotness, RowHotness

SUM_ITEM_BYTES = 2
"""Of one element of a sum between shard and router: float16, the default where golden scores allow it."""
MIN_SLICE_DIM = 32
"""Narrower slices are mostly scale, padding and ids."""
HOT_SHARE = 1 / 16
"""Of a shard's cards, what is left for copies of hot rows when tables are placed."""
WHOLE_SHARE = 1 / 8
"""A table of up to this share of a card lies whole on one card: it needs no places there."""
UNBOUNDED = 1 << 60
_BISECTIONS = 16
_SLACK = 1.02
_TINY = 1e-9


class PlannedFleet(NamedTuple):
    """The fleet that a plan is for.

    Attributes:
        shards: nodes.
        cards: of each.
        budget: what one version may take of a node.
        system: the nodes' bandwidths.
        network_gb_per_s: of one node, one direction.
        replicate_bytes: tables of at most this size go to every shard.
    """

    shards: int
    cards: int
    budget: CardBudget
    system: CardSystem
    network_gb_per_s: float
    replicate_bytes: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What is looked up.

    Attributes:
        loads: by table of the model, what a batch asks of it.
        hotness: how often its rows are looked up, by table of the model.
        near_bytes: of the router's own copies of the hottest rows, as stored; those draw no load on shards.
    """

    loads: Mapping[str, BagLoad]
    hotness: Hotness
    near_bytes: int = 0

    def of_stored(self, spec: ModelSpec, layout: TableLayout) -> tuple[list[BagLoad], tuple[RowHotness, ...]]:
        """Return loads and hotness in layout order: slices of a table are looked up like it."""
        table_of = {stored.name: table.name for table in spec.tables for stored in table.slices}
        counts, lookups = self.hotness.counts, self.hotness.lookups_per_sample
        hotness = replace(
            self.hotness,
            counts={stored: counts[name] for stored, name in table_of.items() if name in counts},
            lookups_per_sample={stored: lookups[name] for stored, name in table_of.items() if name in lookups},
        )
        return [self.loads[table_of[table.name]] for table in layout.tables], hotness.of(layout)

    def near_levels(self, spec: ModelSpec) -> dict[str, int]:
        """Return how many of each table's levels, the hottest, are at the router: whole levels, most hits per byte."""
        layout = TableLayout.of(spec)
        rows = self.hotness.of(layout)
        strides = [codec_for(table.dtype, table.embedding_dim).row_bytes for table in layout.tables]
        table = np.repeat(np.arange(len(rows)), [one.lookups.size for one in rows])
        lookups = np.concatenate([one.lookups for one in rows])
        size = np.concatenate([one.rows() for one in rows]) * np.array(strides)[table]
        order = np.argsort(-lookups / np.array(strides)[table], kind="stable")
        taken = order[(np.cumsum(size[order]) <= self.near_bytes) & (lookups[order] > 0)]
        levels = np.bincount(table[taken], minlength=len(rows)).tolist()
        return {one.name: levels[number] for number, one in enumerate(layout.tables)}

    def without_near(self, spec: ModelSpec) -> tuple[Workload, dict[str, int]]:
        """Return what is left for shards, and the levels of each table that are at the router."""
        if not self.near_bytes:
            return self, {table.name: 0 for table in spec.tables}
        levels, loads = self.near_levels(spec), dict(self.loads)
        layout = TableLayout.of(spec)
        for table, rows in zip(layout.tables, self.hotness.of(layout), strict=True):
            by_level = rows.lookups * rows.rows()
            left = float(by_level[levels[table.name] :].sum()) / max(float(by_level.sum()), _TINY)
            load = loads[table.name]
            loads[table.name] = load._replace(values=load.values * left, longest_bag=load.longest_bag * left)
        return replace(self, loads=loads), levels


class Option(NamedTuple):
    """One way to divide a table.

    Attributes:
        kind: as TorchRec names it.
        slices: how many slices of its columns.
        spread: shards that each slice's rows are divided over; 1 for whole slices.
        load_us: of one slice on each of these shards.
        size_bytes: of one slice on each of these shards.
    """

    kind: ShardingType
    slices: int
    spread: int
    load_us: float
    size_bytes: int

    @property
    def total_us(self) -> float:
        """Of all slices and shards."""
        return self.slices * self.spread * self.load_us


class Placed(NamedTuple):
    """How one table is divided: by which option, and the shards of each of its slices."""

    option: Option
    shards: tuple[tuple[int, ...], ...]


def column_dims(table: TableSpec, slices: int) -> tuple[int, ...]:
    """Return the widths of so many equal slices; none if it is not sliced."""
    return (table.embedding_dim // slices,) * slices if slices > 1 else ()


@dataclass(frozen=True, slots=True)
class _Costs:
    """Microseconds that an id, a byte of a row and a byte of an answer take of a shard."""

    fleet: PlannedFleet
    id_us: float
    network_byte_us: float
    memory_byte_us: float

    @classmethod
    def of(cls, fleet: PlannedFleet) -> _Costs:
        system = fleet.system
        network = 1 / (fleet.network_gb_per_s * BYTES_PER_US)
        ids = INDEX_BYTES * (network + system.host.copied_bytes(1) / (system.host.gb_per_s * BYTES_PER_US))
        return cls(fleet, ids, network, 1 / (system.hbm_gb_per_s * BYTES_PER_US))

    def lookup_us(self, table: TableSpec) -> float:
        """Of one id, and reading its row and place."""
        row = RowFormat.of(table.dtype, table.embedding_dim)
        return self.id_us + (sector_bytes(row) + SECTOR_BYTES) * self.memory_byte_us

    def load_us(self, table: TableSpec, load: BagLoad, slices: int, spread: int) -> float:
        """Of one slice on each of `spread` shards."""
        if not load.values:
            return 0.0
        dim = table.embedding_dim // slices
        row_us = (sector_bytes(RowFormat.of(table.dtype, dim)) + SECTOR_BYTES) * self.memory_byte_us
        bags = load.bags * (1 - (1 - 1 / spread) ** (load.values / load.bags)) if load.bags else 0.0
        sum_us = self.id_us + SUM_ITEM_BYTES * dim * self.network_byte_us
        return load.values / spread * (self.id_us + row_us) + bags * sum_us

    def options(self, table: TableSpec, load: BagLoad) -> list[Option]:
        """Return the ways to divide a table, the cheapest first; among equals the one that takes fewest bytes."""
        shards = self.fleet.shards
        size = _size_bytes(table, 1)
        if shards == 1:
            return [Option("table_wise", 1, 1, self.load_us(table, load, 1, 1), size)]
        whole_us = self.load_us(table, load, 1, 1)
        replicated = Option("data_parallel", 1, shards, whole_us / shards, size)
        if size <= self.fleet.replicate_bytes:
            return [replicated]
        found = [Option("table_wise", 1, 1, whole_us, size), replicated]
        found.append(Option("row_wise", 1, shards, self.load_us(table, load, 1, shards), -(-size // shards)))
        for slices in _slice_counts(table, shards):
            size = _size_bytes(table, slices)
            found.append(Option("column_wise", slices, 1, self.load_us(table, load, slices, 1), size))
            if shards % slices == 0 and (spread := shards // slices) > 1:
                found.append(
                    Option("grid_shard", slices, spread, self.load_us(table, load, slices, spread), -(-size // spread))
                )
        return sorted(found, key=lambda one: (one.total_us, one.size_bytes * one.slices * one.spread))


def _slice_counts(table: TableSpec, shards: int) -> Iterator[int]:
    for slices in (2, 4, 8, 16, 32):
        dim, rest = divmod(table.embedding_dim, slices)
        if rest or dim < MIN_SLICE_DIM or (table.dtype == "int4" and dim % 2) or slices > shards:
            return
        yield slices


def _size_bytes(table: TableSpec, slices: int) -> int:
    stride = RowFormat.of(table.dtype, table.embedding_dim // slices).stride
    return table.num_embeddings * (stride + PLACE_BYTES)


def _row_bytes(table: TableSpec) -> int:
    return RowFormat.of(table.dtype, table.embedding_dim).stride + PLACE_BYTES


class _Packing:
    """Shards as tables are packed onto them."""

    def __init__(self, shards: int, free_bytes: int) -> None:
        self.owners = Owners.empty([free_bytes] * shards)

    def place(self, option: Option, bound_us: float) -> Placed | None:
        """Place a table so, each slice on the shards with the least load; None, and nothing is placed, if it can't."""
        owners, placed = self.owners, list[Int64Array]()
        for _ in range(option.slices):
            fits = np.flatnonzero((owners.free >= option.size_bytes) & (owners.load + option.load_us <= bound_us))
            if fits.size < option.spread:
                for chosen in placed:
                    owners.give(chosen, -option.load_us, -option.size_bytes)
                return None
            chosen = fits[np.lexsort((owners.used[fits], owners.load[fits]))[: option.spread]]
            owners.give(chosen, option.load_us, option.size_bytes)
            placed.append(chosen)
        return Placed(option, tuple(tuple(sorted(one.tolist())) for one in placed))


class TablePlanner:
    """Plans of one model on one fleet."""

    def __init__(self, spec: ModelSpec, fleet: PlannedFleet, workload: Workload) -> None:
        self._spec = with_columns(spec, {})
        self._fleet = fleet
        self._workload, self._near = workload.without_near(self._spec)
        self._costs = _Costs.of(fleet)
        self._options = [self._costs.options(table, self._workload.loads[table.name]) for table in spec.tables]
        budget = fleet.budget
        self._shard_bytes = int(sum(budget.card_bytes) * (1 - HOT_SHARE)) + budget.pinned_bytes
        cheapest = [options[0].total_us for options in self._options]
        self._total_us = sum(cheapest)
        # The costliest first, in time or in bytes: what is large has the least choice.
        weights = [
            max(us / max(self._total_us, _TINY), _size_bytes(table, 1) / max(self._shard_bytes, 1))
            for us, table in zip(cheapest, spec.tables, strict=True)
        ]
        self._order = sorted(range(len(weights)), key=lambda number: -weights[number])

    def best(self) -> PlanFile:
        """Return the plan with the lowest bound on the time of a shard.

        Raises PlanError: the tables do not fit, whichever way each is divided.
        """
        best = self._packed(np.inf)
        if best is None:
            raise PlanError(
                f"{len(self._options)} tables do not fit on {self._fleet.shards} shards of {self._shard_bytes} bytes, "
                "whichever way each of them is divided"
            )
        low, high = self._total_us / self._fleet.shards, 2 * self._total_us + _TINY
        for _ in range(_BISECTIONS):
            bound = (max(low, _TINY) * high) ** 0.5
            packed = self._packed(bound)
            low, high, best = (bound, high, best) if packed is None else (low, bound, packed)
            if high <= low * _SLACK:
                break
        budget = self._fleet.budget
        return self._file(best, int(min(budget.card_bytes) * WHOLE_SHARE), sum(budget.card_bytes) + budget.pinned_bytes)

    def pure(self, kind: ShardingType) -> PlanFile:
        """Return the plan that divides every table alike, but for small ones, which are on every shard.

        Capacity is left out of account, so that what does not fit can be told. Whole tables lie on one card each.
        """
        packing, placed = _Packing(self._fleet.shards, UNBOUNDED), {}
        for number in self._order:
            options = self._options[number]
            found = packing.place(next((one for one in options if one.kind == kind), options[0]), np.inf)
            assert found is not None
            placed[number] = found
        return self._file([placed[number] for number in range(len(placed))], UNBOUNDED, UNBOUNDED)

    def _packed(self, bound_us: float) -> list[Placed] | None:
        """Place every table in the cheapest way that keeps to a bound; None if there is one that can't."""
        packing, placed = _Packing(self._fleet.shards, self._shard_bytes), {}
        for number in self._order:
            tried = (packing.place(option, bound_us) for option in self._options[number])
            if (found := next((one for one in tried if one is not None), None)) is None:
                return None
            placed[number] = found
        return [placed[number] for number in range(len(placed))]

    def _file(self, placed: Sequence[Placed], whole_bytes: int, shard_bytes: int) -> PlanFile:
        """Give buckets to shards, and to cards, where a whole table of up to so many bytes lies on one."""
        tables, fleet = self._spec.tables, self._fleet
        dims = {table.name: column_dims(table, one.option.slices) for table, one in zip(tables, placed, strict=True)}
        spec = with_columns(self._spec, dims)
        pieces = [
            _Piece(slice_of, option.kind, option.load_us, shards)
            for table, (option, of_slices) in zip(spec.tables, placed, strict=True)
            for slice_of, shards in zip(table.slices, of_slices, strict=True)
        ]
        near = {stored.name: self._near[table.name] for table in spec.tables for stored in table.slices}
        dealing = _Dealing(pieces, spec, fleet, self._workload, self._costs, near, shard_bytes)
        ranks = iter(dealing.ranks(whole_bytes))
        return PlanFile.of(
            spec.model,
            fleet.shards,
            fleet.cards,
            [
                TablePlan(
                    table=table.name,
                    num_embeddings=table.num_embeddings,
                    bucketing=table.bucketing,
                    sharding_type=one.option.kind,
                    column_dims=table.column_dims,
                    slices=tuple(next(ranks) for _ in table.slices),
                )
                for table, one in zip(spec.tables, placed, strict=True)
            ],
        )


class _Piece(NamedTuple):
    """One stored table: how its table is divided, what it costs each of its shards, and which these are."""

    table: TableSpec
    kind: ShardingType
    load_us: float
    shards: tuple[int, ...]


class _Dealing:
    """Stored tables of which the shards are known, as their buckets are given to these shards and to their cards."""

    def __init__(
        self,
        pieces: Sequence[_Piece],
        spec: ModelSpec,
        fleet: PlannedFleet,
        workload: Workload,
        costs: _Costs,
        near: Mapping[str, int],
        shard_bytes: int,
    ) -> None:
        self._pieces = pieces
        self._fleet = fleet
        self._costs = costs
        self._near = near
        self._shard_bytes = shard_bytes
        layout = TableLayout.of(spec)
        loads, rows = workload.of_stored(spec, layout)
        self._values = {table.name: load.values for table, load in zip(layout.tables, loads, strict=True)}
        self._rows = {table.name: one for table, one in zip(layout.tables, rows, strict=True)}
        self._sizes = [RowBuckets.of(piece.table).rows_per_bucket() * _row_bytes(piece.table) for piece in pieces]
        self._loads: dict[int, Float64Array] = {}
        self._shard_of_bucket = self._to_shards()

    def ranks(self, whole_bytes: int) -> list[RanksOfBuckets]:
        """Return who owns each piece. A piece of up to so many bytes that a shard has whole lies on one card."""
        cards = self._fleet.cards
        ranks = [np.zeros(one.size, np.int32) for one in self._shard_of_bucket]
        copies: list[list[int]] = [[] for _ in self._pieces]
        for shard in range(self._fleet.shards):
            for number, card_of_bucket in self._to_cards(shard, whole_bytes).items():
                mine = self._shard_of_bucket[number] == shard
                ranks[number][mine] = shard * cards + card_of_bucket[mine]
                copies[number].append(shard * cards + int(card_of_bucket[0]))
        return [
            RanksOfBuckets(ranks=tuple(copies[number]))
            if piece.kind == "data_parallel"
            else RanksOfBuckets.of(ranks[number])
            for number, piece in enumerate(self._pieces)
        ]

    def _bucket_loads(self, number: int) -> Float64Array:
        """Return what each bucket of a piece costs whoever has it, float64 [buckets], without the router's own rows."""
        if number not in self._loads:
            table = self._pieces[number].table
            by_bucket = self._rows[table.name].lookups_by_bucket(self._near[table.name])
            if not by_bucket.any():
                by_bucket = self._sizes[number].astype(np.float64)
            us = self._values[table.name] * self._costs.lookup_us(table)
            self._loads[number] = by_bucket * (us / float(by_bucket.sum()))
        return self._loads[number]

    def _to_shards(self) -> list[Int16Array]:
        """Return the shard of each bucket, int16 [buckets] for each piece; of one on every shard, -1."""
        owners = Owners.empty([self._shard_bytes] * self._fleet.shards)
        owner_of_bucket: list[Int16Array] = []
        divided: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, piece in enumerate(self._pieces):
            count, size = self._sizes[number].size, int(self._sizes[number].sum())
            owner_of_bucket.append(np.full(count, -1 if piece.kind == "data_parallel" else piece.shards[0], np.int16))
            if piece.kind == "data_parallel" or len(piece.shards) == 1:
                owners.give(np.array(piece.shards), piece.load_us, size)
            else:
                divided[piece.shards].append(number)
        # Those with the least choice first.
        for shards, numbers in sorted(divided.items(), key=lambda one: (len(one[0]), one[0])):
            some = owners.of(shards)
            dealt = deal([self._bucket_loads(one) for one in numbers], [self._sizes[one] for one in numbers], some)
            owners.put(shards, some)
            for number, owner in zip(numbers, dealt, strict=True):
                owner_of_bucket[number] = np.array(shards, np.int16)[owner]
        return owner_of_bucket

    def _to_cards(self, shard: int, whole_bytes: int) -> dict[int, Int16Array]:
        """Return the card of each bucket of what a shard has, int16 [buckets]: bytes are even, then loads."""
        cards = Owners.empty([UNBOUNDED] * self._fleet.cards)
        found: dict[int, Int16Array] = {}
        whole, parts = list[int](), list[int]()
        for number, piece in enumerate(self._pieces):
            if shard not in piece.shards:
                continue
            is_whole = len(piece.shards) == 1 or piece.kind == "data_parallel"
            size = int(self._sizes[number].sum())
            (whole if is_whole and size <= whole_bytes else parts).append(number)
        for number in sorted(whole, key=lambda one: -int(self._sizes[one].sum())):
            card = int(np.lexsort((cards.load, cards.used))[0])
            cards.give(card, self._pieces[number].load_us, int(self._sizes[number].sum()))
            found[number] = np.full(self._sizes[number].size, card, np.int16)
        mine = [np.where(self._shard_of_bucket[one] == shard, self._sizes[one], 0) for one in parts]
        dealt = deal([self._bucket_loads(one) for one in parts], mine, cards, even="bytes")
        return found | dict(zip(parts, dealt, strict=True))
