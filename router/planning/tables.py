"""Chooses how each table of a model is divided over a fleet, by the time of the slowest shard, under capacity.

For every table there are a few ways to divide it (`TablePlanner.options`), each with what it costs a shard: reading
rows, ids in, sums out. For a bound on the time of a shard, tables are packed onto shards like boxes, the most costly
first, each in the cheapest way that fits under the bound and into memory; the lowest bound that can be kept is found by
bisection. Then buckets are dealt to shards, and each shard's to its cards, by counted load
(`shard_node.planning.card_plan`). The costs steer; which plan is taken is decided by `router.planning.division`, the
engine's own placement on every shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import TableSpec
from router.errors import PlanError
from router.plan_file import PlanFile, RanksOfBuckets, ShardingType, TablePlan, with_columns
from router.planning.inputs import CapacityOptions, LookupProfile, TableLookups
from router.planning.network import StoredLookups
from shard_node.bags import Int64Array, TableLayout
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.card_plan import PLACE_BYTES, Int16Array, Owners, deal
from shard_node.planning.cost_model import BYTES_PER_US, INDEX_BYTES, SECTOR_BYTES, SUM_ITEM_BYTES, sector_bytes
from shard_node.planning.hotness import Float64Array

MIN_SLICE_DIM = 32
"""Narrower slices are mostly scale, padding and ids."""
HOT_SHARE = 1 / 16
"""Of a shard's cards, what is left for copies of hot rows when tables are placed."""
UNDIVIDED_SHARE = 1 / 8
"""A table of up to this share of a card is on one card: it needs no places there."""
UNBOUNDED = 1 << 60
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
    return RowFormat.of(table.dtype, dim).stride + PLACE_BYTES


class TablePlanner:
    """Plans of one model on one fleet."""

    def __init__(self, spec: ModelSpec, fleet: CapacityOptions, profile: LookupProfile) -> None:
        self._spec = with_columns(spec, {})
        self._fleet = fleet
        self._profile = profile
        stored = StoredLookups.of(self._spec, TableLayout.of(self._spec), fleet, profile)
        lookups = {
            table.name: of_table.missed(hit_rate)
            for table, of_table, hit_rate in zip(
                stored.layout.tables, stored.lookups, stored.near.hit_rates.tolist(), strict=True
            )
        }
        self._options = [
            self.options(table, lookups[table.name], is_part=spec.divided_of(table.name) is not None)
            for table in spec.tables
        ]
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
        # Ids and where bags begin to shards, and sums back.
        moved_bytes = INDEX_BYTES * (values + hit) + SUM_ITEM_BYTES * dim * hit
        network_us = moved_bytes * (1 / (fleet.shard_network.network.gb_per_s * BYTES_PER_US))
        cost_us = slices * (spread * load_us / fleet.shards + network_us)
        return Option(kind, slices, spread, load_us, size if is_copy else -(-size // spread), cost_us)

    def best(self) -> PlanFile:
        """Return the plan with the lowest bound on the time of a shard.

        Raises PlanError: the tables do not fit, whichever way each is divided.
        """
        best = self._packed(self._options, self._shard_bytes, np.inf)
        if best is None:
            raise PlanError(
                f"{len(self._options)} tables do not fit on {self._fleet.shards} shards of {self._shard_bytes} bytes, "
                "whichever way each of them is divided"
            )
        # Of all bounds that can be kept, the one with which the slowest shard and the network together take least.
        low, high = self._total_us / self._fleet.shards, 2 * self._total_us + _TINY
        for _ in range(_BISECTIONS):
            bound = (max(low, _TINY) * high) ** 0.5
            packed = self._packed(self._options, self._shard_bytes, bound)
            if packed is None:
                low = bound
                continue
            high = bound
            best = min(best, packed, key=self._time_us)
            if high <= low * _SLACK:
                break
        budget = self._fleet.budget
        card_bytes, shard_bytes = int(min(budget.card_bytes) * UNDIVIDED_SHARE), sum(budget.card_bytes)
        return self._file(best, card_bytes, shard_bytes + budget.pinned_bytes, counted=True)

    def pure(self, kind: ShardingType) -> PlanFile:
        """Return the plan that divides every table alike, but for small ones, which are on every shard.

        Capacity is left out of account, so that what does not fit can be shown. Whole tables are on one card each.
        """
        options = [[next((way for way in ways if way.kind == kind), ways[0])] for ways in self._options]
        placed = self._packed(options, UNBOUNDED, np.inf)
        assert placed is not None
        return self._file(placed, UNBOUNDED, UNBOUNDED, counted=False)

    def _packed(
        self, options: Sequence[Sequence[Option]], free_bytes: int, bound_us: float
    ) -> list[PlacedTable] | None:
        """Place every table by the first of its options that keeps to a bound; None if there is one that can't."""
        owners, placed = Owners.empty([free_bytes] * self._fleet.shards), {}
        for number in self._order:
            tables = (self._fitted(owners, option, bound_us) for option in options[number])
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
        """Return the time of the slowest shard, and of the network."""
        load, network = np.zeros(self._fleet.shards), 0.0
        for option, of_slices in placed:
            for shards in of_slices:
                load[list(shards)] += option.load_us
            network += option.cost_us - option.all_load_us / self._fleet.shards
        return float(load.max()) + network

    def _file(self, placed: Sequence[PlacedTable], card_bytes: int, shard_bytes: int, *, counted: bool) -> PlanFile:
        """Give buckets to shards and to cards; what a shard has all of, up to `card_bytes`, is on one card."""
        dims = {
            table.name: (table.embedding_dim // option.slices,) * option.slices if option.slices > 1 else ()
            for table, (option, _) in zip(self._spec.tables, placed, strict=True)
        }
        spec = with_columns(self._spec, dims)
        stored = StoredLookups.of(spec, TableLayout.of(spec), self._fleet, self._profile)
        pieces = [
            self._piece(stored, table_slice, option, shards, counted=counted)
            for table, (option, of_slices) in zip(spec.tables, placed, strict=True)
            for table_slice, shards in zip(table.slices, of_slices, strict=True)
        ]
        ranks = iter(self._ranks(pieces, card_bytes, shard_bytes))
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

    def _piece(
        self, stored: StoredLookups, table: TableSpec, option: Option, shards: tuple[int, ...], *, counted: bool
    ) -> _Piece:
        """Return a stored table with its buckets, whose loads are in proportion to their bytes if not `counted`."""
        index = stored.layout.index[table.name]
        sizes = RowBuckets.of(table).rows_per_bucket() * _row_bytes(table, table.embedding_dim)
        rows = stored.rows[index]
        total = float(rows.lookups @ rows.rows()) if counted else 0.0
        loads = rows.lookups_by_bucket(stored.near.missed[index]) if total else sizes.astype(np.float64)
        us = stored.lookups[index].values * _lookup_us(self._fleet, table, table.embedding_dim)
        return _Piece(option, shards, sizes, loads * (us / (total or float(sizes.sum()))))

    def _ranks(self, pieces: Sequence[_Piece], card_bytes: int, shard_bytes: int) -> list[RanksOfBuckets]:
        """Return who owns each piece."""
        shard_of_bucket = self._deal_to_shards(pieces, shard_bytes)
        ranks = [np.zeros(shards.size, np.int32) for shards in shard_of_bucket]
        copies: list[list[int]] = [[] for _ in pieces]
        for shard in range(self._fleet.shards):
            is_local = {
                number: shard_of_bucket[number] == shard for number, piece in enumerate(pieces) if shard in piece.shards
            }
            first_rank = shard * self._fleet.cards
            for number, card_of_bucket in self._deal_to_cards(pieces, is_local, card_bytes).items():
                ranks[number][is_local[number]] = first_rank + card_of_bucket[is_local[number]]
                copies[number].append(first_rank + int(card_of_bucket[0]))
        return [
            RanksOfBuckets(ranks=tuple(copies[number])) if piece.is_copy else RanksOfBuckets.of(ranks[number])
            for number, piece in enumerate(pieces)
        ]

    def _deal_to_shards(self, pieces: Sequence[_Piece], shard_bytes: int) -> list[Int16Array]:
        """Return the shard of each bucket, int16 [buckets] for each piece; of one on every shard, -1."""
        owners = Owners.empty([shard_bytes] * self._fleet.shards)
        shard_of_bucket: list[Int16Array] = []
        divided: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, piece in enumerate(pieces):
            shard_of_bucket.append(np.full(piece.sizes.size, -1 if piece.is_copy else piece.shards[0], np.int16))
            if piece.is_copy or len(piece.shards) == 1:
                owners.give(np.array(piece.shards), piece.option.load_us, piece.size_bytes)
            else:
                divided[piece.shards].append(number)
        # Those with the least choice first.
        for shards, numbers in sorted(divided.items(), key=lambda alike: (len(alike[0]), alike[0])):
            some = owners.of(shards)
            dealt = deal(
                [pieces[number].loads for number in numbers], [pieces[number].sizes for number in numbers], some
            )
            owners.put(shards, some)
            for number, owner in zip(numbers, dealt, strict=True):
                shard_of_bucket[number] = np.array(shards, np.int16)[owner]
        return shard_of_bucket

    def _deal_to_cards(
        self, pieces: Sequence[_Piece], is_local: Mapping[int, npt.NDArray[np.bool_]], card_bytes: int
    ) -> dict[int, Int16Array]:
        """Return the card of each bucket of the pieces on a shard, int16 [buckets]: bytes are even, then loads."""
        cards = Owners.empty([UNBOUNDED] * self._fleet.cards)
        card_of_bucket: dict[int, Int16Array] = {}
        undivided, parts = list[int](), list[int]()
        for number in is_local:
            piece = pieces[number]
            is_small = len(piece.shards) == 1 and piece.size_bytes <= card_bytes
            (undivided if is_small or piece.is_copy else parts).append(number)
        for number in sorted(undivided, key=lambda number: -pieces[number].size_bytes):
            piece, card = pieces[number], int(np.lexsort((cards.load, cards.used))[0])
            cards.give(card, piece.option.load_us, piece.size_bytes)
            card_of_bucket[number] = np.full(piece.sizes.size, card, np.int16)
        sizes = [np.where(is_local[number], pieces[number].sizes, 0) for number in parts]
        dealt = deal([pieces[number].loads for number in parts], sizes, cards, even="bytes")
        return card_of_bucket | dict(zip(parts, dealt, strict=True))


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

    @property
    def is_copy(self) -> bool:
        return self.option.kind == "data_parallel"
