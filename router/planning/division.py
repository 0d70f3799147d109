"""How tables are divided over a fleet's shards, as JSON documents.

Ways to divide tables over shards are compared by the engine's own placement on every shard, and the network between
router and shards: how long does the slowest shard take?
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from loader.snapshot.manifest import ModelSpec
from router.errors import PlanError
from router.plan import Plan
from router.plan_file import PlanFile, ShardingType, with_columns
from router.planning.inputs import CapacityOptions, CpuNode, LookupProfile
from router.planning.network import FleetLookups, NetworkTime, StoredLookups
from router.planning.tables import TablePlanner
from shard_node.buckets import Sharding
from shard_node.errors import MemoryBudgetError
from shard_node.planning.card_plan import CardPlan
from shard_node.planning.cost_model import BatchTime, Traffic, batch_time


def best_division(
    spec: ModelSpec, fleet: CapacityOptions, profile: LookupProfile
) -> tuple[dict[str, Any], PlanFile, PlacedModel]:
    """Return a plan per table, compared with dividing all tables alike, its file, and the model placed by it.

    Of the ways that are compared the plan per table is the first. Tables are as in TorchRec's `EmbeddingShardingPlan`:
    `size_bytes` is of one copy of their rows on cards, a rank is a card.

    Raises PlanError: no way to divide the tables fits.
    """
    file = TablePlanner(spec, fleet, profile).best()
    sliced, undivided = file.sliced(spec), with_columns(spec, {})
    chosen = PlacedModel(sliced, Plan.of_file(sliced, file, fleet.shards, fleet.cards), fleet, profile)
    ways = {"per table": chosen}
    bucketings = {table.bucketing for table in spec.tables}
    alike: dict[str, Sharding] = {"all table_wise": "table"}
    if len(bucketings) == 1:
        alike = {"all row_wise": "range" if "range" in bucketings else "hash", **alike}
    for way, sharding in alike.items():
        plan = Plan.make(undivided, fleet.shards, sharding, fleet.cards, fleet.replicate_bytes)
        ways[way] = PlacedModel(undivided, plan, fleet, profile)
    divided = [{"way": way, **placed.division()} for way, placed in ways.items()]
    if left_over := sum(shard["left_over_bytes"] for shard in divided[0]["shards"]):
        raise PlanError(f"{left_over} bytes of rows are left over, whichever way each of the tables is divided")
    return {"digest": file.digest, "ways": divided, "tables": chosen.tables(file)}, file, chosen


class PlacedShard(NamedTuple):
    """Where the rows of a shard are, those that no memory has room for in bytes, and what its part of a batch takes."""

    cards: CardPlan
    left_over_bytes: int
    traffic: Traffic
    time: BatchTime


class PlacedModel:
    """A model on the shards of a fleet, by a plan; each is placed when it is first asked for."""

    def __init__(self, spec: ModelSpec, plan: Plan, fleet: CapacityOptions, profile: LookupProfile) -> None:
        self.spec, self.plan, self._fleet = spec, plan, fleet
        self.stored = StoredLookups.of(spec, plan.layout, fleet, profile)
        self.lookups = FleetLookups(plan, self.stored)
        self.sent = self.lookups.sent(self.stored.near)
        self._placed: dict[int, PlacedShard] = {}

    def shard(self, shard: int, *, left_over: bool = False) -> PlacedShard:
        """Place a shard's rows; with `left_over` what does not fit is put into pinned memory that does not exist.

        Raises MemoryBudgetError: it does not fit.
        """
        if shard in self._placed:
            return self._placed[shard]
        fleet, partition, left_over_bytes = self._fleet, self.plan.partition(shard), 0
        try:
            cards = CardPlan.make(self.plan.layout, partition, fleet.budget, self.stored.rows)
        except MemoryBudgetError:
            if not left_over:
                raise
            ample = replace(fleet.budget, pinned_bytes=1 << 60)
            cards = CardPlan.make(self.plan.layout, partition, ample, self.stored.rows)
            left_over_bytes = cards.pinned_bytes - fleet.budget.pinned_bytes
        # Which share of a table is on this shard, the placement says itself.
        loads = self.lookups.loads if fleet.shards == 1 else self.lookups.part(shard, self.sent)
        traffic = Traffic.of(cards, loads, fleet.system, self.stored.near.missed)
        self._placed[shard] = placed = PlacedShard(cards, left_over_bytes, traffic, batch_time(traffic, fleet.system))
        return placed

    def time(self, shard: int) -> dict[str, Any]:
        """Return what a shard's part of a batch takes, on cards or on one core. Raises MemoryBudgetError as `shard`."""
        node, values = self._fleet.system, float(self.sent.values[:, shard].sum())
        if not isinstance(node, CpuNode):
            return asdict(self.shard(shard).time)
        all_cores = node.cores * node.rows_per_s
        rates = {"batches_per_s": all_cores / values if values else 0.0, "lookups_per_s": all_cores}
        return {"alone_us": values * 1e6 / node.rows_per_s, "bound": "core", **rates}

    def division(self) -> dict[str, Any]:
        """Return how many tables are divided in each way, and the times of the network and of every shard."""
        shards = []
        for shard in range(self._fleet.shards):
            placed = self.shard(shard, left_over=True)
            by_card = placed.cards.tier_rows.sum(axis=2).T @ placed.cards.strides + placed.cards.places_bytes
            use = {"card_bytes": int(by_card.max()), "left_over_bytes": placed.left_over_bytes}
            lookups = float(self.sent.values[:, shard].sum())
            shards.append({"shard": shard, **use, "lookups": lookups, "cards_us": placed.time.alone_us})
        if file := self.plan.file:
            kinds = Counter(table.sharding_type for table in file.tables)
        else:
            alike: ShardingType = "table_wise" if self.plan.sharding == "table" else "row_wise"
            kinds = Counter("data_parallel" if is_copied else alike for is_copied in self.lookups.is_copied)
        network = NetworkTime.of(self.sent, self._fleet.shard_network)
        return {"kinds": dict(kinds), "network": asdict(network), "shards": shards}

    def tables(self, file: PlanFile) -> list[dict[str, Any]]:
        """Return where each table is, by the plan's file."""
        strides, index = self.shard(0).cards.strides, self.plan.layout.index
        return [
            {
                **table.model_dump(include={"table", "sharding_type"}),
                "column_dims": table.column_dims,
                "ranks": [of_slice.ranks for of_slice in table.slices],
                "size_bytes": table.num_embeddings * sum(int(strides[index[stored.name]]) for stored in spec.slices),
            }
            for table, spec in zip(file.tables, self.spec.tables, strict=True)
        ]
