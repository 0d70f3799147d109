"""What `shardrank plan` says of divided tables: into which parts by the description, and how over a fleet's shards.

Ways to divide tables over shards are compared by the engine's own placement on every shard, and the network between
router and shards: how long does the slowest shard take?
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import click
import numpy as np

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.codecs import codec_for
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import classes_bytes
from loader.snapshot.tables import DividedTable, Frozen, RowDtype
from router.errors import PlanError
from router.plan import Plan
from router.plan_file import PlanFile, ShardingType
from router.table_planner import SUM_ITEM_BYTES, UNBOUNDED, AskedLookups, PlannedFleet, TablePlanner
from serving.cli.output import human_bytes, human_count, print_table
from shard_node.bags import Int64Array, TableLayout
from shard_node.cuda.kernel_params import RowFormat
from shard_node.errors import MemoryBudgetError
from shard_node.planning.card_plan import CARD, HOST, HOT, CardPlan
from shard_node.planning.cost_model import BagLoad, Traffic, batch_time, tier_shares
from shard_node.planning.hotness import Float64Array, Hotness, RowHotness
from shard_node.planning.network_cost import (
    AskedShards,
    NetworkBytes,
    NetworkTime,
    SentLookups,
    WireForm,
)

Way = Literal["per table", "all row_wise", "all table_wise"]
PURE: dict[Way, ShardingType] = {"all row_wise": "row_wise", "all table_wise": "table_wise"}
KERNELS = ("hot", "card", "pinned")
MAX_LINES = 16


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
    def of(cls, spec: ModelSpec, table: DividedTable, plan: Plan, loads: Sequence[BagLoad]) -> Self:
        """Describe one.

        Args:
            spec: of the model.
            table: the one.
            plan: over shards.
            loads: of a batch, by stored table in layout order.
        """
        index, stored = plan.layout.index, spec.parts(table)
        parts = tuple(
            PartUse(
                **one.model_dump(include={"name", "num_embeddings", "embedding_dim", "dtype"}),
                size_bytes=one.num_embeddings * codec_for(one.dtype, one.embedding_dim).row_bytes,
                lookups=loads[index[one.name]].values,
            )
            for one in stored
        )
        return cls(
            **table.model_dump(include={"name", "by", "num_embeddings", "embedding_dim", "pruned"}),
            float32_bytes=4 * table.num_embeddings * table.embedding_dim,
            stored_bytes=sum(part.size_bytes for part in parts),
            classes_bytes=classes_bytes(table, stored),
            parts=parts,
        )


def print_parts(tables: Sequence[DividedUse]) -> None:
    """Print the parts of divided tables, and what dividing them costs beside."""
    rows = [
        (
            one.name, one.by, part.name,
            human_count(part.num_embeddings), part.embedding_dim, part.dtype, human_bytes(part.size_bytes),
            human_count(part.lookups),
        )
        for one in tables
        for part in one.parts
    ]  # fmt: skip
    columns = ("table", "divided by", "part", "#rows", "#dim", "dtype", "#stored", "#lookups")
    print_table("Tables in parts", columns, rows)
    for one in tables:
        pruned = f", {human_count(one.pruned)} of them pruned" if one.pruned else ""
        whole, stored = human_bytes(one.float32_bytes), human_bytes(one.stored_bytes)
        line = f"{one.name}: {human_count(one.num_embeddings)} rows{pruned}; as float32 {whole}, stored {stored}"
        line += f", {one.float32_bytes / one.stored_bytes:.1f} times less"
        if one.classes_bytes:
            line += f"; which row is where: {human_bytes(one.classes_bytes)}, a quarter more in every router"
        click.echo(line)


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
        return max(self.shards, key=lambda one: one.cards_us)

    @property
    def total_us(self) -> float:
        """Of the network, and then of the slowest shard."""
        return self.network.alone_us + self.slowest.cards_us

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
    def make(cls, spec: ModelSpec, fleet: PlannedFleet, workload: AskedLookups) -> tuple[Self, PlanFile]:
        """Choose a plan and compare it.

        Raises PlanError: no way to divide the tables fits.
        """
        planner = TablePlanner(spec, fleet, workload)
        found: list[tuple[PlanFile, Division, _Timing]] = []
        for way, file in _candidates(planner):
            timing = _Timing(file, spec, fleet, workload)
            found.append((file, timing.division(way), timing))
        # A table may be divided alike with all others if nothing is better; what does not fit is no choice.
        file, best, timing = min(found, key=lambda one: (one[1].left_over_bytes > 0, one[1].total_us))
        if best.left_over_bytes:
            raise PlanError(f"{best.left_over_bytes} bytes of rows are left over, whichever way tables are divided")
        ways = (best.model_copy(update={"way": "per table"}), *(one for _, one, _ in found if one.way != "per table"))
        return cls(digest=file.digest, ways=ways, tables=timing.tables(), ranks=timing.ranks()), file


def _candidates(planner: TablePlanner) -> Iterator[tuple[Way, PlanFile]]:
    yield "per table", planner.best()
    for way, kind in PURE.items():
        yield way, planner.pure(kind)


def print_division(plan: FleetPlan) -> None:
    """Print the ways side by side, then the tables of the plan, those alike in one line, and the fullest ranks."""
    ways = []
    for one in plan.ways:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(one.kinds.items(), key=lambda each: -each[1]))
        fits = "" if not one.left_over_bytes else human_bytes(one.left_over_bytes)
        times = ("", "", "does not fit")
        if not fits:
            times = (f"{one.slowest.cards_us:.1f}", f"{one.network.alone_us:.1f}", f"{one.total_us:.1f}")
        ways.append((one.way, kinds, human_bytes(max(each.card_bytes for each in one.shards)), fits, *times))
    columns = ("tables", "kinds", "#fullest card", "#left over", "#slowest shard us", "#network us", "#together us")
    print_table("Ways to divide tables", columns, ways)
    print_table(*_param_lines(plan))
    by_size = sorted(plan.ranks, key=lambda one: -one.size_bytes)
    by_lookups = sorted(plan.ranks, key=lambda one: -one.lookup_share)
    ends = {"fullest": by_size[0], "emptiest": by_size[-1], "most lookups": by_lookups[0], "fewest": by_lookups[-1]}
    print_table(
        f"Ranks, of {len(plan.ranks)}",
        ("", "#rank", "#rows and places", "#lookups"),
        [(what, one.rank, human_bytes(one.size_bytes), f"{one.lookup_share:.2%}") for what, one in ends.items()],
    )


def _param_lines(plan: FleetPlan) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """Return title, columns and lines of the plan, the largest tables first, those alike in one line."""
    lines: dict[tuple[str, ...], list[TablePlacement]] = defaultdict(list)
    for one in sorted(plan.tables, key=lambda each: -each.size_bytes):
        kind = one.sharding_type + (f" {'+'.join(map(str, one.column_dims))}" if one.column_dims else "")
        is_copy = one.sharding_type == "data_parallel"
        ranks = "one card of each shard" if is_copy else "; ".join(map(_told, one.ranks))
        lines[kind, one.compute_kernel, ranks].append(one)
    rows = list[tuple[str, ...]]()
    for (kind, kernel, ranks), alike in list(lines.items())[:MAX_LINES]:
        name = alike[0].table + (f" and {len(alike) - 1} more" if len(alike) > 1 else "")
        rows.append((name, kind, kernel, ranks, human_bytes(sum(one.size_bytes for one in alike))))
    title = f"Plan {plan.digest[:12]}" + (f", {MAX_LINES} of {len(lines)} lines" if len(lines) > MAX_LINES else "")
    return title, ("param", "sharding type", "compute kernel", "ranks", "#bytes"), rows


def _told(ranks: tuple[int, ...]) -> str:
    """Write `3`, `0..7` or `0, 8, 16, ... (32)`."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown}, ... ({len(ranks)})"


@dataclass(frozen=True)
class _Known(Hotness):
    """Hotness that was worked out already: counts are read once for all shards."""

    rows: tuple[RowHotness, ...] = ()

    def of(self, layout: TableLayout) -> tuple[RowHotness, ...]:
        return self.rows


class _Timing:
    """One plan's placement on every shard."""

    def __init__(self, file: PlanFile, spec: ModelSpec, fleet: PlannedFleet, workload: AskedLookups) -> None:
        self._file = file
        self._fleet = fleet
        self._spec = file.sliced(spec)
        self._plan = plan = Plan.of_file(self._spec, file, fleet.shards, fleet.cards)
        self._loads, batch, rows = workload.of_stored(self._spec, plan.layout)
        near = workload.near(plan.layout, rows)
        self._missed = None if near is None else near.missed
        # Counted once for all shards, which takes longer than all else.
        by_rank = [self._rows_by_rank(number, one) for number, one in enumerate(rows)]
        by_shard = [one.reshape(len(one), fleet.shards, fleet.cards).sum(axis=2) for one in by_rank]
        sent = SentLookups.of(rows, plan.shard_of_bucket, by_shard, near)
        self._asked = AskedShards.of(batch, sent)
        network = NetworkBytes.of(plan.layout, batch, sent, WireForm(SUM_ITEM_BYTES, stored=False))
        self._network = NetworkTime.of(float(network.out.sum()), float(network.back.sum()), fleet.network)
        self._is_copy = sent.takes_turns
        self._placements: list[CardPlan] = []
        self._times = []
        for shard in range(fleet.shards):
            here = [one[:, shard * fleet.cards : (shard + 1) * fleet.cards] for one in by_rank]
            placed, left_over = self._placed(shard, rows, here)
            self._placements.append(placed)
            self._times.append(self._time(shard, placed, left_over))

    def division(self, way: Way) -> Division:
        """Return the times."""
        kinds = Counter(table.sharding_type for table in self._file.tables)
        return Division(way=way, kinds=dict(kinds), network=self._network, shards=tuple(self._times))

    def tables(self) -> tuple[TablePlacement, ...]:
        """Return where each table is."""
        tiers = np.sum([one.tier_rows.sum(axis=1) for one in self._placements], axis=0) > 0
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
                    size_bytes=sum(
                        one.num_embeddings * RowFormat.of(one.dtype, one.embedding_dim).stride for one in spec.slices
                    ),
                )
            )
        return tuple(found)

    def ranks(self) -> tuple[RankUse, ...]:
        """Return what each card of the fleet has; its lookups are those of rows in its buckets."""
        values = np.array([load.values for load in self._loads])
        found = []
        for shard, placed in enumerate(self._placements):
            lookups = values @ self._share(placed).sum(axis=2) / max(float(values.sum()), 1e-300)
            for card, size_bytes in enumerate(_card_bytes(placed).tolist()):
                found.append(
                    RankUse(
                        rank=shard * self._fleet.cards + card,
                        size_bytes=int(size_bytes),
                        lookup_share=float(lookups[card]),
                    )
                )
        return tuple(found)

    def _rows_by_rank(self, number: int, rows: RowHotness) -> Int64Array:
        """Count the rows of each level of a table on each card of the fleet, int64 [levels, ranks]."""
        ranks, num_ranks = self._plan.ranks[number], self._file.num_ranks
        if ranks.is_copied:
            by_rank = np.zeros((rows.lookups.size, num_ranks), np.int64)
            by_rank[:, list(ranks.ranks)] = rows.rows()[:, None]
            return by_rank
        owners = ranks.rank_of_bucket(RowBuckets.of(rows.table).count)
        return rows.rows_by_owner(owners, num_ranks)

    def _placed(self, shard: int, rows: tuple[RowHotness, ...], level_rows: list[Int64Array]) -> tuple[CardPlan, int]:
        """Place a shard's rows; what is left over is put into pinned memory that is not there, and told in bytes."""
        layout, budget, known = self._plan.layout, self._fleet.budget, _Known(rows=rows)
        partition = self._plan.partition(shard)
        try:
            return CardPlan.make(layout, partition, budget, known, level_rows), 0
        except MemoryBudgetError:
            placed = CardPlan.make(layout, partition, replace(budget, pinned_bytes=UNBOUNDED), known, level_rows)
            return placed, placed.pinned_bytes - budget.pinned_bytes

    def _share(self, placed: CardPlan) -> Float64Array:
        """Return the share of each table's lookups that go to each tier of a shard: float64 [tables, cards, 3].

        A table on every shard is looked up on each of them in turn.
        """
        share = tier_shares(placed, self._missed)
        share[self._is_copy] /= self._fleet.shards
        return share

    def _time(self, shard: int, placed: CardPlan, left_over: int) -> ShardUse:
        """Reckon a batch on one shard's cards: which share of each table is there, the placement says itself."""
        values, bags = self._asked.values[:, shard], self._asked.hit[:, shard]
        loads = [
            BagLoad(
                load.values * bool(here) / (self._fleet.shards if is_copy else 1),
                bags_here,
                load.longest_bag * bool(here),
            )
            for load, here, bags_here, is_copy in zip(
                self._loads, values.tolist(), bags.tolist(), self._is_copy.tolist(), strict=True
            )
        ]
        system = self._fleet.system
        time = batch_time(Traffic.of(placed, loads, system, SUM_ITEM_BYTES, self._missed), system)
        return ShardUse(
            shard=shard,
            card_bytes=int(_card_bytes(placed).max()),
            left_over_bytes=left_over,
            lookups=float(values.sum()),
            cards_us=time.alone_us,
        )


def _card_bytes(placed: CardPlan) -> Int64Array:
    """Return the bytes of the rows in each card's buckets, wherever they are, and of places: int64 [cards]."""
    sizes: Int64Array = placed.tier_rows.sum(axis=2).T @ placed.strides + placed.places_bytes
    return sizes
