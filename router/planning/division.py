"""What a plan says of divided tables: into which parts by the description, and how over a fleet's shards.

Ways to divide tables over shards are compared by the engine's own placement on every shard, and the network between
router and shards: how long does the slowest shard take?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import classes_bytes
from loader.snapshot.tables import DividedTable, Frozen, RowDtype
from router.errors import PlanError
from router.plan import Plan
from router.plan_file import PlanFile, ShardingType
from router.planning.lookups import LookupProfile, TableLookups
from router.planning.network import FleetLookups, NetworkTime, StoredLookups
from router.planning.options import CapacityOptions
from router.planning.tables import UNBOUNDED, TablePlanner
from shard_node.bags import Int64Array
from shard_node.cuda.kernel_params import RowFormat
from shard_node.errors import MemoryBudgetError
from shard_node.planning.card_plan import CARD, HOST, HOT, CardPlan
from shard_node.planning.cost_model import Traffic, batch_time, tier_shares
from shard_node.planning.hotness import RowHotness

Way = Literal["per table", "all row_wise", "all table_wise"]
PURE: dict[Way, ShardingType] = {"all row_wise": "row_wise", "all table_wise": "table_wise"}
KERNELS = ("hot", "card", "pinned")


class PartUse(Frozen):
    """A part of a divided table: its bytes as stored, and its lookups in a batch."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: RowDtype
    size_bytes: int
    lookups: float


class DividedUse(Frozen):
    """A table that is stored as parts.

    Attributes:
        pruned: of its rows, how many are left out.
        float32_bytes: of the rows that features see.
        stored_bytes: of its parts.
        classes_bytes: which row is in which part, as stored; a router holds a quarter more.
    """

    name: str
    by: Literal["popularity", "quotient_remainder"]
    num_embeddings: int
    embedding_dim: int
    pruned: int
    float32_bytes: int
    stored_bytes: int
    classes_bytes: int
    parts: tuple[PartUse, ...]

    @classmethod
    def of(cls, spec: ModelSpec, table: DividedTable, plan: Plan, lookups: Sequence[TableLookups]) -> Self:
        """Describe a table of a model over shards, by a batch's lookups of stored tables, in layout order."""
        indices, stored = [plan.layout.index[name] for name in table.parts], spec.parts(table)
        parts = tuple(
            PartUse(
                **part.model_dump(include={"name", "num_embeddings", "embedding_dim", "dtype"}),
                size_bytes=part.num_embeddings * RowFormat.of(part.dtype, part.embedding_dim).row_bytes,
                lookups=lookups[index].load.values,
            )
            for part, index in zip(stored, indices, strict=True)
        )
        return cls(
            **table.model_dump(include={"name", "by", "num_embeddings", "embedding_dim", "pruned"}),
            float32_bytes=4 * table.num_embeddings * table.embedding_dim,
            stored_bytes=sum(part.size_bytes for part in parts),
            classes_bytes=classes_bytes(table, stored),
            parts=parts,
        )


class ShardUse(Frozen):
    """What one shard has and does in a batch.

    Attributes:
        card_bytes: of the fullest card, rows and places, without copies of hot rows.
        left_over_bytes: of rows that fit nowhere; their time is that of rows in pinned memory.
        lookups: of the batch.
        cards_us: ids to the card, launches and pooling.
    """

    shard: int
    card_bytes: int
    left_over_bytes: int
    lookups: float
    cards_us: float


class Division(Frozen):
    """One way to divide the model, and what every shard makes of it."""

    way: Way
    kinds: dict[ShardingType, int]
    network: NetworkTime
    shards: tuple[ShardUse, ...]

    @property
    def slowest(self) -> ShardUse:
        """The shard that takes longest."""
        return max(self.shards, key=lambda shard: shard.cards_us)

    @property
    def total_us(self) -> float:
        """Of the network, and then of the slowest shard."""
        return self.network.alone_us + self.slowest.cards_us

    @property
    def left_over_bytes(self) -> int:
        """Of all shards."""
        return sum(shard.left_over_bytes for shard in self.shards)


class TablePlacement(Frozen):
    """One line of the printed plan, as TorchRec's `EmbeddingShardingPlan` has them.

    Attributes:
        compute_kernel: the tiers that its rows are in, the hottest first.
        size_bytes: of one copy of its rows on cards.
    """

    table: str
    sharding_type: ShardingType
    compute_kernel: str
    column_dims: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    size_bytes: int


class RankUse(Frozen):
    """One card of the fleet: bytes of rows and places, copies of hot rows left out, and its share of all lookups."""

    rank: int
    size_bytes: int
    lookup_share: float


class FleetPlan(Frozen):
    """A plan per table, and what dividing all tables alike would be.

    Attributes:
        ways: the plan that was taken is first.
        digest: of the plan file.
    """

    digest: str
    ways: tuple[Division, ...]
    tables: tuple[TablePlacement, ...]
    ranks: tuple[RankUse, ...]

    @classmethod
    def make(cls, spec: ModelSpec, fleet: CapacityOptions, profile: LookupProfile) -> tuple[Self, PlanFile]:
        """Choose a plan and compare it.

        Raises PlanError: no way to divide the tables fits.
        """
        planner = TablePlanner(spec, fleet, profile)
        files: dict[Way, PlanFile] = {"per table": planner.best()}
        files |= {way: planner.pure(kind) for way, kind in PURE.items()}
        placed = {way: PlacedModel(file, spec, fleet, profile) for way, file in files.items()}
        ways = {way: model.division(way) for way, model in placed.items()}
        # A table may be divided alike with all others if nothing is better; what does not fit is no choice.
        best = min(ways, key=lambda way: (ways[way].left_over_bytes > 0, ways[way].total_us))
        if left_over := ways[best].left_over_bytes:
            raise PlanError(f"{left_over} bytes of rows are left over, whichever way tables are divided")
        chosen = ways[best].model_copy(update={"way": "per table"})
        return cls(
            digest=files[best].digest,
            ways=(chosen, *(ways[way] for way in PURE)),
            tables=placed[best].tables(),
            ranks=placed[best].ranks(),
        ), files[best]


class PlacedModel:
    """A model on every shard of a fleet, by a plan file."""

    def __init__(self, file: PlanFile, spec: ModelSpec, fleet: CapacityOptions, profile: LookupProfile) -> None:
        self._file = file
        self._fleet = fleet
        self._spec = file.sliced(spec)
        self._plan = plan = Plan.of_file(self._spec, file, fleet.shards, fleet.cards)
        self._stored = stored = StoredLookups.of(self._spec, plan.layout, fleet, profile)
        # Counted once for all shards, which takes longer than all else: int64 [levels, ranks] for each table.
        by_rank = [self._rows_by_rank(number, rows) for number, rows in enumerate(stored.rows)]
        by_shard = [rows.reshape(len(rows), fleet.shards, fleet.cards).sum(axis=2) for rows in by_rank]
        lookups = FleetLookups(plan, stored, by_shard)
        self._loads, self._is_copied = lookups.loads, lookups.is_copied
        self._sent = lookups.sent(stored.near)
        self._network = NetworkTime.of(self._sent, fleet.shard_network.network)
        self._placements: list[CardPlan] = []
        self._shards = []
        for shard in range(fleet.shards):
            level_rows = [rows[:, shard * fleet.cards : (shard + 1) * fleet.cards] for rows in by_rank]
            self._shards.append(self._place(shard, level_rows))

    def division(self, way: Way) -> Division:
        """Return the times."""
        kinds = Counter(table.sharding_type for table in self._file.tables)
        return Division(way=way, kinds=dict(kinds), network=self._network, shards=tuple(self._shards))

    def tables(self) -> tuple[TablePlacement, ...]:
        """Return where each table is."""
        is_used = np.sum([placed.tier_rows.sum(axis=1) for placed in self._placements], axis=0) > 0
        placements = []
        for table, spec in zip(self._file.tables, self._spec.tables, strict=True):
            tiers = np.any([is_used[self._plan.layout.index[stored.name]] for stored in spec.slices], axis=0)
            rows = [(stored.num_embeddings, RowFormat.of(stored.dtype, stored.embedding_dim)) for stored in spec.slices]
            placements.append(
                TablePlacement(
                    table=table.table,
                    sharding_type=table.sharding_type,
                    compute_kernel="+".join(KERNELS[tier] for tier in (HOT, CARD, HOST) if tiers[tier]),
                    column_dims=table.column_dims,
                    ranks=tuple(of_slice.ranks for of_slice in table.slices),
                    size_bytes=sum(num_rows * row.stride for num_rows, row in rows),
                )
            )
        return tuple(placements)

    def ranks(self) -> tuple[RankUse, ...]:
        """Return what each card of the fleet has; its lookups are those of rows in its buckets."""
        values = self._loads[:, 0].copy()
        ranks = []
        for placed in self._placements:
            share = tier_shares(placed, self._stored.near.missed)
            # Batches alternate between copies.
            share[self._is_copied] /= self._fleet.shards
            lookups = values @ share.sum(axis=2) / max(float(values.sum()), 1e-300)
            ranks += list(zip(_card_bytes(placed).tolist(), lookups.tolist(), strict=True))
        return tuple(
            RankUse(rank=rank, size_bytes=size_bytes, lookup_share=share)
            for rank, (size_bytes, share) in enumerate(ranks)
        )

    def _rows_by_rank(self, number: int, rows: RowHotness) -> Int64Array:
        """Count the rows of each level of a table on each card of the fleet, int64 [levels, ranks]."""
        ranks, num_ranks = self._plan.ranks[number], self._file.num_ranks
        if ranks.is_copied:
            by_rank = np.zeros((rows.lookups.size, num_ranks), np.int64)
            by_rank[:, list(ranks.ranks)] = rows.rows()[:, None]
            return by_rank
        return rows.rows_by_owner(ranks.rank_of_bucket(RowBuckets.of(rows.table).count), num_ranks)

    def _place(self, shard: int, level_rows: list[Int64Array]) -> ShardUse:
        """Place a shard's rows, and return the time of its part of a batch.

        What is left over is put into pinned memory that is not there, and is reported in bytes.
        """
        layout, fleet, rows = self._plan.layout, self._fleet, self._stored.rows
        partition, left_over = self._plan.partition(shard), 0
        try:
            placed = CardPlan.make(layout, partition, fleet.budget, rows, level_rows)
        except MemoryBudgetError:
            ample = replace(fleet.budget, pinned_bytes=UNBOUNDED)
            placed = CardPlan.make(layout, partition, ample, rows, level_rows)
            left_over = placed.pinned_bytes - fleet.budget.pinned_bytes
        self._placements.append(placed)
        values, bags = self._sent.values[:, shard], self._sent.hit[:, shard]
        # Which share of a table is on this shard, the placement says itself.
        all_values, _, longest = self._loads.T
        loads = np.column_stack([all_values * (values > 0) / self._sent.turns, bags, longest * (values > 0)])
        traffic = Traffic.of(placed, loads, fleet.system, self._stored.near.missed)
        return ShardUse(
            shard=shard,
            card_bytes=int(_card_bytes(placed).max()),
            left_over_bytes=left_over,
            lookups=float(values.sum()),
            cards_us=batch_time(traffic, fleet.system).alone_us,
        )


def _card_bytes(placed: CardPlan) -> Int64Array:
    """Return the bytes of the rows in each card's buckets, wherever they are, and of places: int64 [cards]."""
    sizes: Int64Array = placed.tier_rows.sum(axis=2).T @ placed.strides + placed.places_bytes
    return sizes
