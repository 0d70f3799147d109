"""Chooses how each table of a model is divided over a fleet, by the time of the slowest shard, under capacity.

For every table there are a few ways to divide it (`options`), each with what it costs a shard: reading rows, ids in,
sums out. For a bound on the time of a shard, tables are packed onto shards like boxes, the most costly first, each in
the cheapest way that fits under the bound and into memory; the lowest bound that can be kept is found by bisection.
Then buckets are dealt to shards, and each shard's to its cards, by counted load (`shard_node.planning.balance`).
The costs steer; which plan is taken is decided by `PlannedTimes`, the engine's own placement on every shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import TableSpec
from router.errors import PlanError
from router.plan_file import PlanFile, RanksOfBuckets, ShardingType, TablePlan, with_columns
from shard_node.bags import Int64Array, TableLayout
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.balance import Int16Array, Owners, deal
from shard_node.planning.card_plan import PLACE_BYTES, CardBudget
from shard_node.planning.cost_model import BYTES_PER_US, INDEX_BYTES, SECTOR_BYTES, BagLoad, CardSystem, sector_bytes
from shard_node.planning.hotness import Float64Array, Hotness, RowHotness
from shard_node.planning.network_cost import BatchBags, NearRows, Network, shards_hit

SUM_ITEM_BYTES = 2
"""Of one element of a sum between shard and router: float16, the default where golden scores allow it."""
MIN_SLICE_DIM = 32
"""Narrower slices are mostly scale, padding and ids."""
HOT_SHARE = 1 / 16
"""Of a shard's cards, what is left for copies of hot rows when tables are placed."""
WHOLE_SHARE = 1 / 8
"""A table of up to this share of a card lies whole on one card: it needs no places there."""
UNBOUNDED = 1 << 60
_BISECTIONS = 24
_SLACK = 1.001
_TINY = 1e-9


class PlannedFleet(NamedTuple):
    """The fleet that a plan is for.

    Attributes:
        shards: nodes.
        cards: of each.
        budget: what one version may take of a node.
        system: the nodes' bandwidths.
        network: between router and nodes.
        replicate_bytes: tables of at most this size go to every shard.
    """

    shards: int
    cards: int
    budget: CardBudget
    system: CardSystem
    network: Network
    replicate_bytes: int


class TableLookups(NamedTuple):
    """What a batch asks of one table.

    Attributes:
        load: ids and bags.
        lengths: ids of a bag, and how many bags have as many.
    """

    load: BagLoad
    lengths: tuple[tuple[float, float], ...]

    def less(self, hit_rate: float) -> TableLookups:
        """Return what is left without the lookups that hot rows at the router answer."""
        load = self.load._replace(values=self.load.values * (1 - hit_rate))
        return TableLookups(load, tuple((length * (1 - hit_rate), bags) for length, bags in self.lengths))

    def bags_hit(self, shards: int) -> float:
        """Return how many bags shards are asked for, all together, if so many share the rows."""
        return sum(
            bags * (shards_hit(shards, length) if shards > 1 else min(1.0, length)) for length, bags in self.lengths
        )


@dataclass(frozen=True, slots=True)
class AskedLookups:
    """What is looked up.

    Attributes:
        lookups: by table of the model, what a batch asks of it.
        hotness: how often its rows are looked up, by table of the model.
        near: tells which rows the router has itself; None for none. They draw no load on shards.
    """

    lookups: Mapping[str, TableLookups]
    hotness: Hotness
    near: Callable[[TableLayout, Sequence[RowHotness]], NearRows | None] = lambda layout, rows: None

    def of_stored(
        self, spec: ModelSpec, layout: TableLayout
    ) -> tuple[list[BagLoad], BatchBags, tuple[RowHotness, ...]]:
        """Return loads, bags and hotness in layout order: slices of a table are looked up like it."""
        table_of = {stored.name: table.name for table in spec.tables for stored in table.slices}
        counts, per_sample = self.hotness.counts, self.hotness.lookups_per_sample
        hotness = replace(
            self.hotness,
            counts={stored: counts[name] for stored, name in table_of.items() if name in counts},
            lookups_per_sample={stored: per_sample[name] for stored, name in table_of.items() if name in per_sample},
        )
        lookups = [self.lookups[table_of[table.name]] for table in layout.tables]
        flat = [(number, *one) for number, asked in enumerate(lookups) for one in asked.lengths or ((0.0, 0.0),)]
        table, lengths, bags = (np.array(column) for column in zip(*flat, strict=True))
        return [one.load for one in lookups], BatchBags(len(lookups), table, lengths, bags), hotness.of(layout)

    def at_shards(self, spec: ModelSpec) -> Mapping[str, TableLookups]:
        """Return what shards are asked of each table of the model."""
        layout = TableLayout.of(spec)
        near = self.near(layout, self.hotness.of(layout))
        if near is None:
            return self.lookups
        hits = {table.name: hit for table, hit in zip(layout.tables, near.hit_rates.tolist(), strict=True)}
        return {name: one.less(hits[name]) for name, one in self.lookups.items()}


class Option(NamedTuple):
    """One way to divide a table.

    Attributes:
        kind: as TorchRec names it.
        slices: how many slices of its columns.
        spread: shards that each slice's rows are divided over; 1 for whole slices.
        load_us: of one slice, of the cards of each of these shards.
        size_bytes: of one slice on each of these shards.
        cost_us: what the table adds to the time of a batch if all shards are busy alike, the network included.
    """

    kind: ShardingType
    slices: int
    spread: int
    load_us: float
    size_bytes: int
    cost_us: float


class PlacedTable(NamedTuple):
    """How one table is divided over shards: by which option, and the shards of each of its slices."""

    option: Option
    shards: tuple[tuple[int, ...], ...]


def column_dims(table: TableSpec, slices: int) -> tuple[int, ...]:
    """Return the widths of so many equal slices; none if it is not sliced."""
    return (table.embedding_dim // slices,) * slices if slices > 1 else ()


@dataclass(frozen=True, slots=True)
class _Costs:
    """Microseconds that an id takes on its way to a card, and a byte of memory and of the network."""

    fleet: PlannedFleet
    id_us: float
    memory_byte_us: float
    network_byte_us: float

    @classmethod
    def of(cls, fleet: PlannedFleet) -> _Costs:
        host = fleet.system.host
        return cls(
            fleet,
            INDEX_BYTES * host.copied_bytes(1) / (host.gb_per_s * BYTES_PER_US),
            1 / (fleet.system.hbm_gb_per_s * BYTES_PER_US),
            1 / (fleet.network.gb_per_s * BYTES_PER_US),
        )

    def lookup_us(self, table: TableSpec, dim: int) -> float:
        """Of one id on a card: the id itself, its place and a row of so many columns."""
        row = RowFormat.of(table.dtype, dim)
        return self.id_us + (sector_bytes(row) + SECTOR_BYTES) * self.memory_byte_us

    def option(self, kind: ShardingType, table: TableSpec, asked: TableLookups, slices: int, spread: int) -> Option:
        """Reckon one way: `slices` of the columns, the rows of each over `spread` shards, or copied to all."""
        dim, is_copy = table.embedding_dim // slices, kind == "data_parallel"
        # Copies take turns.
        values, hit = asked.load.values, asked.bags_hit(1 if is_copy else spread)
        sent = INDEX_BYTES * (values + hit) + SUM_ITEM_BYTES * dim * hit
        load_us = (values * self.lookup_us(table, dim) + hit * self.id_us) / spread
        size = table.num_embeddings * (RowFormat.of(table.dtype, dim).stride + PLACE_BYTES)
        return Option(
            kind,
            slices,
            spread,
            load_us,
            size if is_copy else -(-size // spread),
            slices * (spread * load_us / self.fleet.shards + sent * self.network_byte_us),
        )

    def options(self, table: TableSpec, asked: TableLookups, *, is_part: bool = False) -> list[Option]:
        """Return the ways to divide a table, the cheapest first; among equals the one that takes fewest bytes.

        Of a part of a divided table no columns are sliced.
        """
        shards = self.fleet.shards
        whole = self.option("table_wise", table, asked, 1, 1)
        if shards == 1:
            return [whole]
        replicated = self.option("data_parallel", table, asked, 1, shards)
        if replicated.size_bytes <= self.fleet.replicate_bytes:
            return [replicated]
        found = [whole, replicated, self.option("row_wise", table, asked, 1, shards)]
        for slices in () if is_part else _slice_counts(table, shards):
            found.append(self.option("column_wise", table, asked, slices, 1))
            if shards % slices == 0 and shards > slices:
                found.append(self.option("grid_shard", table, asked, slices, shards // slices))
        return sorted(found, key=lambda one: (one.cost_us, one.size_bytes * one.slices * one.spread))


def _slice_counts(table: TableSpec, shards: int) -> Iterator[int]:
    for slices in (2, 4, 8, 16, 32):
        dim, rest = divmod(table.embedding_dim, slices)
        if rest or dim < MIN_SLICE_DIM or (table.dtype == "int4" and dim % 2) or slices > shards:
            return
        yield slices


def _row_bytes(table: TableSpec) -> int:
    return RowFormat.of(table.dtype, table.embedding_dim).stride + PLACE_BYTES


class _Packing:
    """Shards as tables are packed onto them."""

    def __init__(self, shards: int, free_bytes: int, mean_us: float, mean_bytes: float) -> None:
        self.owners = Owners.empty([free_bytes] * shards)
        self._mean_us = max(mean_us, _TINY)
        self._mean_bytes = max(mean_bytes, 1.0)

    def place(self, option: Option, bound_us: float) -> PlacedTable | None:
        """Place a table so, each slice on the shards that have the least; None, and nothing is placed, if it can't."""
        owners, placed = self.owners, list[Int64Array]()
        for _ in range(option.slices):
            fits = np.flatnonzero((owners.free >= option.size_bytes) & (owners.load + option.load_us <= bound_us))
            if fits.size < option.spread:
                for chosen in placed:
                    owners.give(chosen, -option.load_us, -option.size_bytes)
                return None
            # What weighs more of the table, load or bytes, weighs more in the choice.
            crowd = owners.load[fits] * (option.load_us / self._mean_us**2)
            crowd += owners.used[fits] * (option.size_bytes / self._mean_bytes**2)
            chosen = fits[np.lexsort((owners.load[fits], crowd))[: option.spread]]
            owners.give(chosen, option.load_us, option.size_bytes)
            placed.append(chosen)
        return PlacedTable(option, tuple(tuple(sorted(one.tolist())) for one in placed))


class TablePlanner:
    """Plans of one model on one fleet."""

    def __init__(self, spec: ModelSpec, fleet: PlannedFleet, workload: AskedLookups) -> None:
        self._spec = with_columns(spec, {})
        self._fleet = fleet
        self._workload = workload
        lookups = workload.at_shards(self._spec)
        self._costs = _Costs.of(fleet)
        self._options = [
            self._costs.options(table, lookups[table.name], is_part=spec.divided_of(table.name) is not None)
            for table in spec.tables
        ]
        budget = fleet.budget
        self._shard_bytes = int(sum(budget.card_bytes) * (1 - HOT_SHARE)) + budget.pinned_bytes
        # The costliest first, in time or in bytes: what is large has the least choice.
        self._total_us = sum(options[0].load_us * options[0].slices * options[0].spread for options in self._options)
        self._total_bytes = sum(table.num_embeddings * _row_bytes(table) for table in spec.tables)
        weights = [
            max(
                options[0].load_us * options[0].slices * options[0].spread / max(self._total_us, _TINY),
                table.num_embeddings * _row_bytes(table) / max(self._shard_bytes, 1),
            )
            for table, options in zip(spec.tables, self._options, strict=True)
        ]
        rows = [table.num_embeddings for table in spec.tables]
        self._order = sorted(range(len(weights)), key=lambda number: (-weights[number], -rows[number]))

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
        # Of all bounds that can be kept, the one with which the slowest shard and the network together take least.
        low, high = self._total_us / self._fleet.shards, 2 * self._total_us + _TINY
        for _ in range(_BISECTIONS):
            bound = (max(low, _TINY) * high) ** 0.5
            packed = self._packed(bound)
            if packed is None:
                low = bound
                continue
            high = bound
            best = min(best, packed, key=self._time_us)
            if high <= low * _SLACK:
                break
        budget = self._fleet.budget
        return self._file(
            best,
            int(min(budget.card_bytes) * WHOLE_SHARE),
            sum(budget.card_bytes) + budget.pinned_bytes,
            counted=True,
        )

    def _time_us(self, placed: Sequence[PlacedTable]) -> float:
        """Return the time of the slowest shard, and of the network."""
        load, network = np.zeros(self._fleet.shards), 0.0
        for option, of_slices in placed:
            for shards in of_slices:
                load[list(shards)] += option.load_us
            network += option.cost_us - option.load_us * option.slices * option.spread / self._fleet.shards
        return float(load.max()) + network

    def pure(self, kind: ShardingType) -> PlanFile:
        """Return the plan that divides every table alike, but for small ones, which are on every shard.

        Capacity is left out of account, so that what does not fit can be told. Whole tables lie on one card each.
        """
        packing, placed = self._packing(UNBOUNDED), {}
        for number in self._order:
            options = self._options[number]
            found = packing.place(next((one for one in options if one.kind == kind), options[0]), np.inf)
            assert found is not None
            placed[number] = found
        return self._file([placed[number] for number in range(len(placed))], UNBOUNDED, UNBOUNDED, counted=False)

    def _packing(self, free_bytes: int) -> _Packing:
        shards = self._fleet.shards
        return _Packing(shards, free_bytes, self._total_us / shards, self._total_bytes / shards)

    def _packed(self, bound_us: float) -> list[PlacedTable] | None:
        """Place every table in the cheapest way that keeps to a bound; None if there is one that can't."""
        packing, placed = self._packing(self._shard_bytes), {}
        for number in self._order:
            tried = (packing.place(option, bound_us) for option in self._options[number])
            if (found := next((one for one in tried if one is not None), None)) is None:
                return None
            placed[number] = found
        return [placed[number] for number in range(len(placed))]

    def _file(self, placed: Sequence[PlacedTable], whole_bytes: int, shard_bytes: int, *, counted: bool) -> PlanFile:
        """Give buckets to shards, and to cards, where a whole table of up to so many bytes lies on one."""
        tables, fleet = self._spec.tables, self._fleet
        dims = {table.name: column_dims(table, one.option.slices) for table, one in zip(tables, placed, strict=True)}
        spec = with_columns(self._spec, dims)
        pieces = [
            _Piece(slice_of, option.kind, option.load_us, shards)
            for table, (option, of_slices) in zip(spec.tables, placed, strict=True)
            for slice_of, shards in zip(table.slices, of_slices, strict=True)
        ]
        dealing = _Dealing(pieces, spec, fleet, self._workload, self._costs, shard_bytes, counted=counted)
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
        workload: AskedLookups,
        costs: _Costs,
        shard_bytes: int,
        *,
        counted: bool,
    ) -> None:
        self._pieces = pieces
        self._fleet = fleet
        self._costs = costs
        self._counted = counted
        self._shard_bytes = shard_bytes
        self._layout = layout = TableLayout.of(spec)
        self._asked, _, self._rows = workload.of_stored(spec, layout)
        near = workload.near(layout, self._rows)
        self._missed = [None] * len(layout.tables) if near is None else near.missed
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
            table, sizes = self._pieces[number].table, self._sizes[number]
            at = self._layout.index[table.name]
            us = self._asked[at].values * self._costs.lookup_us(table, table.embedding_dim)
            rows, missed = self._rows[at], self._missed[at]
            total = float(rows.lookups @ rows.rows())
            is_counted = bool(total) and self._counted
            by_bucket = rows.lookups_by_bucket(missed) if is_counted else sizes.astype(np.float64)
            self._loads[number] = by_bucket * (us / (total if is_counted else float(sizes.sum())))
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
            is_whole = len(piece.shards) == 1 and int(self._sizes[number].sum()) <= whole_bytes
            (whole if is_whole or piece.kind == "data_parallel" else parts).append(number)
        for number in sorted(whole, key=lambda one: -int(self._sizes[one].sum())):
            card = int(np.lexsort((cards.load, cards.used))[0])
            cards.give(card, self._pieces[number].load_us, int(self._sizes[number].sum()))
            found[number] = np.full(self._sizes[number].size, card, np.int16)
        mine = [np.where(self._shard_of_bucket[one] == shard, self._sizes[one], 0) for one in parts]
        dealt = deal([self._bucket_loads(one) for one in parts], mine, cards, even="bytes")
        return found | dict(zip(parts, dealt, strict=True))
