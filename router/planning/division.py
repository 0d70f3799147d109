"""How tables are divided: into which parts by the description, and over a fleet's shards, as JSON documents.

Ways to divide tables over shards are compared by the engine's own placement on every shard, and the network between
router and shards: how long does the slowest shard take?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import classes_bytes
from loader.snapshot.tables import DividedTable
from router.errors import PlanError
from router.plan import Plan
from router.plan_file import PlanFile, ShardingType
from router.planning.inputs import CapacityOptions, LookupProfile, TableLookups
from router.planning.network import FleetLookups, NetworkTime, StoredLookups
from router.planning.tables import UNBOUNDED, TablePlanner
from shard_node.bags import Int64Array
from shard_node.cuda.kernel_params import RowFormat
from shard_node.errors import MemoryBudgetError
from shard_node.planning.card_plan import CARD, HOST, HOT, CardPlan
from shard_node.planning.cost_model import Traffic, batch_time, tier_shares
from shard_node.planning.hotness import RowHotness

PURE: dict[str, ShardingType] = {"all row_wise": "row_wise", "all table_wise": "table_wise"}
KERNELS = {HOT: "hot", CARD: "card", HOST: "pinned"}


def divided_use(spec: ModelSpec, table: DividedTable, plan: Plan, lookups: Sequence[TableLookups]) -> dict[str, Any]:
    """Return the bytes and lookups of a table that is stored as parts, by the lookups of tables in layout order.

    `pruned` are rows that are left out; `classes_bytes` are those of which row is in which part, as stored: a router
    has a quarter more.
    """
    stored = spec.parts(table)
    parts = [
        {
            **part.model_dump(include={"name", "num_embeddings", "embedding_dim", "dtype"}),
            "size_bytes": part.num_embeddings * RowFormat.of(part.dtype, part.embedding_dim).row_bytes,
            "lookups": lookups[plan.layout.index[part.name]].values,
        }
        for part in stored
    ]
    return {
        "name": table.name,
        "by": table.by,
        **table.model_dump(include={"num_embeddings", "embedding_dim", "pruned"}),
        "float32_bytes": 4 * table.num_embeddings * table.embedding_dim,
        "stored_bytes": sum(part["size_bytes"] for part in parts),
        "classes_bytes": classes_bytes(table, stored),
        "parts": parts,
    }


def best_division(spec: ModelSpec, fleet: CapacityOptions, profile: LookupProfile) -> tuple[dict[str, Any], PlanFile]:
    """Return a plan per table, compared with dividing all tables alike, and its file.

    Of the ways that are compared the chosen plan is the first. Tables are as in TorchRec's `EmbeddingShardingPlan`:
    `compute_kernel` names the tiers of their rows, `size_bytes` is of one copy of these on cards. A rank is one card of
    the fleet: its rows and places without copies of hot rows, and its share of all lookups.

    Raises PlanError: no way to divide the tables fits.
    """
    planner = TablePlanner(spec, fleet, profile)
    files = {"per table": planner.best()} | {way: planner.pure(kind) for way, kind in PURE.items()}
    placed = {way: PlacedModel(file, spec, fleet, profile) for way, file in files.items()}
    # A table may be divided alike with all others if nothing is better; what does not fit is no choice.
    best = min(placed, key=lambda way: (placed[way].left_over_bytes > 0, placed[way].total_us))
    if left_over := placed[best].left_over_bytes:
        raise PlanError(f"{left_over} bytes of rows are left over, whichever way tables are divided")
    ways = {"per table": placed[best]} | {way: placed[way] for way in PURE}
    return {
        "digest": files[best].digest,
        "ways": [{"way": way, **model.division()} for way, model in ways.items()],
        "tables": placed[best].tables(),
        "ranks": placed[best].ranks(),
    }, files[best]


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
            self._shards.append(self._shard_use(shard, level_rows))
        self.left_over_bytes = sum(shard["left_over_bytes"] for shard in self._shards)
        self.total_us = self._network.alone_us + max(shard["cards_us"] for shard in self._shards)

    def division(self) -> dict[str, Any]:
        """Return how many tables are divided in each way, and the times of the network and of every shard."""
        kinds = Counter(table.sharding_type for table in self._file.tables)
        return {"kinds": dict(kinds), "network": asdict(self._network), "shards": self._shards}

    def tables(self) -> list[dict[str, Any]]:
        """Return where each table is."""
        is_used = np.sum([placed.tier_rows.sum(axis=1) for placed in self._placements], axis=0) > 0
        strides, placements = self._placements[0].strides, []
        for table, spec in zip(self._file.tables, self._spec.tables, strict=True):
            slices = [self._plan.layout.index[stored.name] for stored in spec.slices]
            tiers = is_used[slices].any(axis=0)
            placements.append(
                {
                    **table.model_dump(include={"table", "sharding_type"}),
                    "compute_kernel": "+".join(kernel for tier, kernel in KERNELS.items() if tiers[tier]),
                    "column_dims": table.column_dims,
                    "ranks": [of_slice.ranks for of_slice in table.slices],
                    "size_bytes": int(table.num_embeddings * strides[slices].sum()),
                }
            )
        return placements

    def ranks(self) -> list[dict[str, Any]]:
        """Return the bytes of each card of the fleet, and the lookups of rows in its buckets."""
        values = self._loads[:, 0].copy()
        ranks: list[dict[str, Any]] = []
        for placed in self._placements:
            share = tier_shares(placed, self._stored.near.missed)
            # Batches alternate between copies.
            share[self._is_copied] /= self._fleet.shards
            lookups = values @ share.sum(axis=2) / max(float(values.sum()), 1e-300)
            for size_bytes, of_card in zip(_card_bytes(placed).tolist(), lookups.tolist(), strict=True):
                ranks.append({"rank": len(ranks), "size_bytes": size_bytes, "lookup_share": of_card})
        return ranks

    def _rows_by_rank(self, number: int, rows: RowHotness) -> Int64Array:
        ranks, num_ranks = self._plan.ranks[number], self._file.num_ranks
        if ranks.is_copied:
            by_rank = np.zeros((rows.lookups.size, num_ranks), np.int64)
            by_rank[:, list(ranks.ranks)] = rows.rows()[:, None]
            return by_rank
        return rows.rows_by_owner(ranks.rank_of_bucket(RowBuckets.of(rows.table).count), num_ranks)

    def _shard_use(self, shard: int, level_rows: list[Int64Array]) -> dict[str, Any]:
        """Place a shard's rows, and return the bytes of its fullest card and the time of its part of a batch.

        What is left over is put into pinned memory that does not exist, and is reported in bytes.
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
        return {
            "shard": shard,
            "card_bytes": int(_card_bytes(placed).max()),
            "left_over_bytes": left_over,
            "lookups": float(values.sum()),
            "cards_us": batch_time(traffic, fleet.system).alone_us,
        }


def _card_bytes(placed: CardPlan) -> Int64Array:
    """Return the bytes of the rows in each card's buckets, wherever they are, and of places: int64 [cards]."""
    return np.asarray(placed.tier_rows.sum(axis=2).T @ placed.strides + placed.places_bytes)
