"""What `shardrank plan` says of a fleet: which way each table is divided, and how long the slowest shard then takes.

The ways are compared by the engine's own placement on every shard, and the network between router and shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from loader.snapshot.manifest import Frozen, ModelSpec
from router.errors import PlanError
from router.plan import REPLICATED, Plan
from router.plan_file import PlanFile, ShardingType
from router.table_planner import SUM_ITEM_BYTES, UNBOUNDED, PlannedFleet, TablePlanner, Workload
from shard_node.bags import TableLayout
from shard_node.errors import MemoryBudgetError
from shard_node.planning.card_plan import CARD, HOST, HOT, CardPlan
from shard_node.planning.cost_model import BYTES_PER_US, INDEX_BYTES, BagLoad, Traffic, batch_time
from shard_node.planning.hotness import Float64Array, Hotness, RowHotness

Way = Literal["per table", "all row_wise", "all table_wise"]
PURE: dict[Way, ShardingType] = {"all row_wise": "row_wise", "all table_wise": "table_wise"}
KERNELS = ("hot", "card", "pinned")


class ShardTime(Frozen):
    """What one shard has and does in a batch.

    Attributes:
        card_bytes: of the fullest card, rows and places, without copies of hot rows.
        left_over_bytes: of rows that fit nowhere; their time is that of rows in pinned memory.
        lookups: of the batch.
        cards_us: ids to the card, launches and pooling.
        network_us: ids in or sums out, whichever takes longer, and the latency.
    """

    shard: int
    card_bytes: int
    left_over_bytes: int
    lookups: float
    cards_us: float
    network_us: float

    @property
    def total_us(self) -> float:
        """Of both, one after the other."""
        return self.cards_us + self.network_us


class Division(Frozen):
    """One way to divide the model, and what every shard makes of it."""

    way: Way
    kinds: dict[ShardingType, int]
    shards: tuple[ShardTime, ...]

    @property
    def slowest(self) -> ShardTime:
        """The shard that takes longest."""
        return max(self.shards, key=lambda one: one.total_us)

    @property
    def left_over_bytes(self) -> int:
        """Of all shards."""
        return sum(one.left_over_bytes for one in self.shards)

    @property
    def busiest_to_mean(self) -> float:
        """The most lookups of a shard, by the mean."""
        lookups = [one.lookups for one in self.shards]
        return max(lookups) / (sum(lookups) / len(lookups)) if any(lookups) else 1.0


class TablePlacement(Frozen):
    """One line of the printed plan, as TorchRec's `EmbeddingShardingPlan` has them.

    Attributes:
        compute_kernel: the tiers that its rows are in, the hottest first.
    """

    table: str
    sharding_type: ShardingType
    compute_kernel: str
    column_dims: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


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
    def make(cls, spec: ModelSpec, fleet: PlannedFleet, workload: Workload, network_us: float) -> tuple[Self, PlanFile]:
        """Choose a plan and compare it.

        Raises PlanError: no way to divide the tables fits.
        """
        planner = TablePlanner(spec, fleet, workload)
        found: list[tuple[PlanFile, Division, _Timing]] = []
        for way, file in _candidates(planner):
            timing = _Timing(file, spec, fleet, workload, network_us)
            found.append((file, timing.division(way), timing))
        # A table may be divided alike with all others if nothing is better; what does not fit is no choice.
        file, best, timing = min(found, key=lambda one: (one[1].left_over_bytes > 0, one[1].slowest.total_us))
        if best.left_over_bytes:
            raise PlanError(f"{best.left_over_bytes} bytes of rows are left over, whichever way tables are divided")
        ways = (best.model_copy(update={"way": "per table"}), *(one for _, one, _ in found if one.way != "per table"))
        return cls(digest=file.digest, ways=ways, tables=timing.tables(), ranks=timing.ranks()), file


def _candidates(planner: TablePlanner) -> Iterator[tuple[Way, PlanFile]]:
    yield "per table", planner.best()
    for way, kind in PURE.items():
        yield way, planner.pure(kind)


@dataclass(frozen=True)
class _Known(Hotness):
    """Hotness that was worked out already: counts are read once for all shards."""

    rows: tuple[RowHotness, ...] = ()

    def of(self, layout: TableLayout) -> tuple[RowHotness, ...]:
        return self.rows


class _Timing:
    """One plan's placement on every shard."""

    def __init__(
        self, file: PlanFile, spec: ModelSpec, fleet: PlannedFleet, workload: Workload, network_us: float
    ) -> None:
        self._file = file
        self._fleet = fleet
        self._spec = file.sliced(spec)
        self._plan = plan = Plan.of_file(self._spec, file, fleet.shards, fleet.cards)
        self._loads, rows = workload.of_stored(self._spec, plan.layout)
        self._totals = np.array([float(_lookups(one) @ one.rows()) for one in rows])
        self._is_copy = np.array([one[0] == REPLICATED for one in plan.shard_of_bucket])
        self._placements: list[CardPlan] = []
        self._times = []
        for shard in range(fleet.shards):
            placed, left_over = self._placed(shard, rows)
            self._placements.append(placed)
            self._times.append(self._time(shard, placed, left_over, network_us))

    def division(self, way: Way) -> Division:
        """Return the times."""
        kinds = Counter(table.sharding_type for table in self._file.tables)
        return Division(way=way, kinds=dict(kinds), shards=tuple(self._times))

    def tables(self) -> tuple[TablePlacement, ...]:
        """Return where each table is."""
        tiers = np.array([one.tier_rows.sum(axis=1) for one in self._placements]).sum(axis=0) > 0
        layout, found = self._plan.layout, []
        for table, spec in zip(self._file.tables, self._spec.tables, strict=True):
            here = np.any([tiers[layout.index[one.name]] for one in spec.slices], axis=0)
            found.append(
                TablePlacement(
                    table=table.table,
                    sharding_type=table.sharding_type,
                    compute_kernel="+".join(KERNELS[tier] for tier in (HOT, CARD, HOST) if here[tier]),
                    column_dims=table.column_dims,
                    ranks=tuple(one.ranks for one in table.slices),
                )
            )
        return tuple(found)

    def ranks(self) -> tuple[RankUse, ...]:
        """Return what each card of the fleet has."""
        found = []
        total = sum(load.values for load in self._loads)
        for shard, placed in enumerate(self._placements):
            by_card = np.array([self._share(placed, card) for card in range(self._fleet.cards)])
            by_card = by_card @ np.array([load.values for load in self._loads]) / max(total, 1e-300)
            sizes = _card_bytes(placed)
            for card in range(self._fleet.cards):
                found.append(
                    RankUse(
                        rank=shard * self._fleet.cards + card,
                        size_bytes=int(sizes[card]),
                        lookup_share=float(by_card[card]),
                    )
                )
        return tuple(found)

    def _placed(self, shard: int, rows: tuple[RowHotness, ...]) -> tuple[CardPlan, int]:
        """Place a shard's rows; what is left over is put into pinned memory that is not there, and told in bytes."""
        plan, budget = self._plan, self._fleet.budget
        partition = plan.partition(shard)
        try:
            return CardPlan.make(plan.layout, partition, budget, _Known(rows=rows)), 0
        except MemoryBudgetError:
            unbounded = replace(budget, pinned_bytes=UNBOUNDED)
            placed = CardPlan.make(plan.layout, partition, unbounded, _Known(rows=rows))
            return placed, placed.pinned_bytes - budget.pinned_bytes

    def _share(self, placed: CardPlan, card: int | None = None) -> Float64Array:
        """Return the share of each table's lookups that go to a shard, or to one of its cards: float64 [tables].

        A table on every shard is looked up on each of them in turn.
        """
        counts = [one.sum(axis=1) if card is None else one[:, card] for one in placed.level_rows]
        share = np.array([float(_lookups(rows) @ count) for rows, count in zip(placed.hotness, counts, strict=True)])
        share /= self._totals
        share[self._is_copy] /= self._fleet.shards
        return share

    def _time(self, shard: int, placed: CardPlan, left_over: int, network_us: float) -> ShardTime:
        share = self._share(placed)
        loads, ids, sums = [], 0.0, 0.0
        for table, load, part, is_copy in zip(
            placed.layout.tables, self._loads, share.tolist(), self._is_copy.tolist(), strict=True
        ):
            # Of a bag of L ids none is here with a chance of (1 - share) ** L; of a copy's bags each is here or not.
            length = load.values / load.bags if load.bags else 0.0
            bags = load.bags * (part if is_copy else 1 - (1 - min(1.0, part)) ** length)
            values = load.values * part
            ids += INDEX_BYTES * (values + bags)
            sums += SUM_ITEM_BYTES * table.embedding_dim * bags
            asked = part if is_copy else float(part > 0)
            loads.append(BagLoad(load.values * asked, bags, load.longest_bag if part else 0.0))
        time = batch_time(Traffic.of(placed, loads, self._fleet.system), self._fleet.system)
        return ShardTime(
            shard=shard,
            card_bytes=int(_card_bytes(placed).max()),
            left_over_bytes=left_over,
            lookups=float(np.array([load.values for load in self._loads]) @ share),
            cards_us=time.alone_us,
            network_us=network_us + (ids + sums) / (self._fleet.network_gb_per_s * BYTES_PER_US),
        )


def _lookups(rows: RowHotness) -> Float64Array:
    """Return how often a row of each level is looked up; alike, if none ever is."""
    return rows.lookups if rows.lookups.any() else np.ones_like(rows.lookups)


def _card_bytes(placed: CardPlan) -> Float64Array:
    """Return the bytes of the rows in each card's buckets, wherever they are, and of places: float64 [cards]."""
    sizes: Float64Array = placed.tier_rows.sum(axis=2).T @ placed.strides + float(placed.places_bytes)
    return sizes
