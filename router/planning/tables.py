"""Chooses how each table of a model is divided over a fleet, by the time of the slowest shard, under capacity.

For every table there are a few ways to divide it (`TablePlanner.options`), each with what it costs a shard: reading
rows, ids in, sums out. For a bound on the time of a shard, tables are packed onto shards like boxes, the most costly
first, each in the cheapest way that fits under the bound and into memory; the lowest bound that can be kept is found by
bisection. Then buckets are dealt to the cards of these shards by counted load (`shard_node.planning.card_plan`). The
costs steer; which plan is taken is decided by `router.planning.division`, the engine's own placement on every shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import TableSpec
from router.errors import PlanError
from router.plan_file import PlanFile, RanksOfBuckets, ShardingType, TablePlan, with_columns
from router.planning.inputs import CapacityOptions, CpuNode, LookupProfile, TableLookups
from router.planning.network import StoredLookups
from shard_node.bags import Int64Array, TableLayout
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.card_plan import PLACE_BYTES, Owners, deal
from shard_node.planning.cost_model import BYTES_PER_US, INDEX_BYTES, SECTOR_BYTES, sector_bytes
from shard_node.planning.hotness import Float64Array

MIN_SLICE_DIM = 32
"""Narrower slices are mostly scale, padding and ids."""
HOT_SHARE = 1 / 16
"""Of a shard's cards, what is left for copies of hot rows when tables are placed."""
UNDIVIDED_SHARE = 1 / 8
"""A table of up to this share of a card is on one card: it needs no places there."""
CPU_ID_BYTES, CPU_GRID_ID_BYTES, CPU_SUM_BYTES, CPU_STORED_BYTES = 256, 400, 5, 3
"""Of an id beyond its row, with rows and columns divided more; of each byte of a float16 sum, and of a row that travels
as stored: bytes of rows that a CPU reads in their time (docs/measurements/2026-11-30-column-slices.md)."""
_BISECTIONS = 24
_SLACK = 1.001
_TINY = 1e-9


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

    @property
    def all_load_us(self) -> float:
        """Of all slices, of the cards of all shards."""
        return self.load_us * self.slices * self.spread


PlacedTable: TypeAlias = tuple[Option, tuple[tuple[int, ...], ...]]
"""How one table is divided over shards: by which option, and the shards of each of its slices."""


def _id_us(fleet: CapacityOptions) -> float:
    """Return the time that an id takes on its way to a card."""
    host = fleet.system.host
    return INDEX_BYTES * host.copied_bytes(1) / (host.gb_per_s * BYTES_PER_US)


def _lookup_us(fleet: CapacityOptions, table: TableSpec, dim: int) -> float:
    """Return the time of one id on a card: the id itself, its place and a row of so many columns."""
    row_bytes = sector_bytes(RowFormat.of(table.dtype, dim)) + SECTOR_BYTES
    return _id_us(fleet) + row_bytes * (1 / (fleet.system.hbm_gb_per_s * BYTES_PER_US))


def _row_bytes(table: TableSpec, dim: int) -> int:
    return RowFormat.of(table.dtype, dim).stride + PLACE_BYTES + table.key_bytes


class TablePlanner:
    """Plans of one model on one fleet."""

    def __init__(self, spec: ModelSpec, fleet: CapacityOptions, profile: LookupProfile) -> None:
        self._spec = with_columns(spec, {})
        self._fleet = fleet
        self._profile = profile
        stored = StoredLookups.of(self._spec, TableLayout.of(self._spec), fleet, profile)
        self._options = []
        for table in spec.tables:
            index, is_part = stored.layout.index[table.name], spec.divided_of(table.name) is not None
            missed = stored.lookups[index].missed(float(stored.near.hit_rates[index]))
            self._options.append(self.options(table, missed, is_part=is_part))
        budget = fleet.budget
        self._shard_bytes = int(sum(budget.card_bytes) * (1 - HOT_SHARE)) + budget.pinned_bytes
        costs = [options[0].all_load_us for options in self._options]
        self._total_us = sum(costs)
        sizes = [table.num_embeddings * _row_bytes(table, table.embedding_dim) for table in spec.tables]
        self._mean_us = max(self._total_us / fleet.shards, _TINY)
        self._mean_bytes = max(sum(sizes) / fleet.shards, 1.0)
        # The costliest first, in time or in bytes: what is large has the least choice.
        weights = [
            max(cost / max(self._total_us, _TINY), size / max(self._shard_bytes, 1))
            for cost, size in zip(costs, sizes, strict=True)
        ]
        rows = [table.num_embeddings for table in spec.tables]
        self._order = sorted(range(len(weights)), key=lambda number: (-weights[number], -rows[number]))

    def options(self, table: TableSpec, lookups: TableLookups, *, is_part: bool = False) -> list[Option]:
        """Return the ways to divide a table, the cheapest first; among equals the one that takes fewest bytes.

        Of a part of a divided table no columns are sliced.
        """
        shards = self._fleet.shards
        undivided = self._option("table_wise", table, lookups, 1, 1)
        if shards == 1:
            return [undivided]
        replicated = self._option("data_parallel", table, lookups, 1, shards)
        if replicated.size_bytes <= self._fleet.replicate_bytes:
            return [replicated]
        ways = [undivided, replicated, self._option("row_wise", table, lookups, 1, shards)]
        for slices in () if is_part else (2, 4, 8, 16, 32):
            dim, remainder = divmod(table.embedding_dim, slices)
            if remainder or dim < MIN_SLICE_DIM or (table.dtype == "int4" and dim % 2) or slices > shards:
                break
            ways.append(self._option("column_wise", table, lookups, slices, 1))
            if shards % slices == 0 and shards > slices:
                ways.append(self._option("grid_shard", table, lookups, slices, shards // slices))
        return sorted(ways, key=lambda option: (option.cost_us, option.size_bytes * option.slices * option.spread))

    def _option(self, kind: ShardingType, table: TableSpec, lookups: TableLookups, slices: int, spread: int) -> Option:
        """Return the costs of `slices` of the columns, the rows of each over `spread` shards, or copied to all."""
        fleet, dim, is_copy = self._fleet, table.embedding_dim // slices, kind == "data_parallel"
        # Batches alternate between copies.
        values, hit = lookups.values, lookups.bags_hit(1 if is_copy else spread)
        load_us = (values * _lookup_us(fleet, table, dim) + hit * _id_us(fleet)) / spread
        size = table.num_embeddings * _row_bytes(table, dim)
        network = fleet.shard_network
        back_bytes = network.sum_bytes(dim) * hit
        if isinstance(fleet.system, CpuNode):
            row_bytes = RowFormat.of(table.dtype, dim).row_bytes
            # As in `shard_node.answer.travel_as_stored`.
            is_stored = values * row_bytes <= max(hit * row_bytes, back_bytes)
            back_bytes = values * row_bytes if is_stored else back_bytes
            work_bytes = values * (CPU_GRID_ID_BYTES if kind == "grid_shard" else CPU_ID_BYTES)
            work_bytes += back_bytes * (CPU_STORED_BYTES if is_stored else CPU_SUM_BYTES)
            load_us += work_bytes / spread / (fleet.system.hbm_gb_per_s * BYTES_PER_US)
        # Ids and where bags begin to shards, and sums or stored rows back.
        moved_bytes = INDEX_BYTES * (values + hit) + back_bytes
        line_gb = min(network.gb_per_s, fleet.shards * (network.shard_gb_per_s or np.inf))
        network_us = moved_bytes * (1 / (line_gb * BYTES_PER_US))
        cost_us = slices * (spread * load_us / fleet.shards + network_us)
        return Option(kind, slices, spread, load_us, size if is_copy else -(-size // spread), cost_us)

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
        rank_bytes = (sum(budget.card_bytes) + budget.pinned_bytes) // self._fleet.cards
        return self._file(best, int(min(budget.card_bytes) * UNDIVIDED_SHARE), rank_bytes)

    def _packed(self, bound_us: float) -> list[PlacedTable] | None:
        """Place every table by the first of its options that keeps to a bound; None if there is one that can't."""
        owners, placed = Owners.empty([self._shard_bytes] * self._fleet.shards), {}
        for number in self._order:
            tables = (self._fitted(owners, option, bound_us) for option in self._options[number])
            if (table := next(filter(None, tables), None)) is None:
                return None
            placed[number] = table
        return [placed[number] for number in range(len(placed))]

    def _fitted(self, owners: Owners, option: Option, bound_us: float) -> PlacedTable | None:
        """Place a table so, each slice on the shards that have the least; None, and nothing is placed, if it can't."""
        placed = list[Int64Array]()
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
        return option, tuple(tuple(sorted(shards.tolist())) for shards in placed)

    def _time_us(self, placed: Sequence[PlacedTable]) -> float:
        load, network = np.zeros(self._fleet.shards), 0.0
        for option, of_slices in placed:
            for shards in of_slices:
                load[list(shards)] += option.load_us
            network += option.cost_us - option.all_load_us / self._fleet.shards
        return float(load.max()) + network

    def _file(self, placed: Sequence[PlacedTable], card_bytes: int, rank_bytes: int) -> PlanFile:
        """Give buckets to ranks; what a shard has all of, up to `card_bytes`, is on one card."""
        dims = {
            table.name: (table.embedding_dim // option.slices,) * option.slices if option.slices > 1 else ()
            for table, (option, _) in zip(self._spec.tables, placed, strict=True)
        }
        spec = with_columns(self._spec, dims)
        stored = StoredLookups.of(spec, TableLayout.of(spec), self._fleet, self._profile)
        pieces = [
            self._piece(stored, table_slice, option, shards)
            for table, (option, of_slices) in zip(spec.tables, placed, strict=True)
            for table_slice, shards in zip(table.slices, of_slices, strict=True)
        ]
        ranks = iter(self._ranks(pieces, card_bytes, rank_bytes))
        tables = [
            TablePlan(
                table=table.name,
                num_embeddings=table.num_embeddings,
                bucketing=table.bucketing,
                sharding_type=option.kind,
                column_dims=table.column_dims,
                slices=tuple(next(ranks) for _ in table.slices),
            )
            for table, (option, _) in zip(spec.tables, placed, strict=True)
        ]
        return PlanFile.of(spec.model, self._fleet.shards, self._fleet.cards, tables)

    def _piece(self, stored: StoredLookups, table: TableSpec, option: Option, shards: tuple[int, ...]) -> _Piece:
        """Return a stored table with its buckets, whose loads are in proportion to their bytes if none is known."""
        index = stored.layout.index[table.name]
        sizes = RowBuckets.of(table).rows_per_bucket() * _row_bytes(table, table.embedding_dim)
        rows = stored.rows[index]
        total = float(rows.lookups @ rows.rows())
        loads = rows.lookups_by_bucket(stored.near.missed[index]) if total else sizes.astype(np.float64)
        us = stored.lookups[index].values * _lookup_us(self._fleet, table, table.embedding_dim)
        return _Piece(option, shards, sizes, loads * (us / (total or float(sizes.sum()))))

    def _ranks(self, pieces: Sequence[_Piece], card_bytes: int, rank_bytes: int) -> list[RanksOfBuckets]:
        cards = self._fleet.cards
        owners = Owners.empty([rank_bytes] * (self._fleet.shards * cards))
        divided = defaultdict[tuple[int, ...], list[int]](list)
        ranks: dict[int, RanksOfBuckets] = {}
        for number in sorted(range(len(pieces)), key=lambda number: -pieces[number].size_bytes):
            piece = pieces[number]
            of_shards = [range(shard * cards, (shard + 1) * cards) for shard in piece.shards]
            if piece.option.kind == "data_parallel" or (len(of_shards) == 1 and piece.size_bytes <= card_bytes):
                chosen = [
                    min(of_shard, key=lambda rank: (owners.used[rank], owners.load[rank])) for of_shard in of_shards
                ]
                owners.give(np.array(chosen), piece.option.load_us, piece.size_bytes)
                ranks[number] = RanksOfBuckets(ranks=tuple(chosen))
            else:
                divided[tuple(chain.from_iterable(of_shards))].append(number)
        # Those with the least choice first.
        for among, numbers in sorted(divided.items(), key=lambda alike: (len(alike[0]), alike[0])):
            some = [pieces[number] for number in numbers]
            dealt = deal([piece.loads for piece in some], [piece.sizes for piece in some], owners, among)
            ranks |= zip(numbers, map(RanksOfBuckets.of, dealt), strict=True)
        return [ranks[number] for number in range(len(pieces))]


class _Piece(NamedTuple):
    """One stored table, how it is divided over which shards, and the bytes and loads of its buckets, [buckets].

    Loads are microseconds of a bucket's owner, without rows at the router.
    """

    option: Option
    shards: tuple[int, ...]
    sizes: Int64Array
    loads: Float64Array

    @property
    def size_bytes(self) -> int:
        return int(self.sizes.sum())
