"""What a model needs on a fleet of nodes, and how fast its lookups can be: the engine's own placement, without a card.

Nothing is read but the model's description (and access counts, where a snapshot has them). A plan is a JSON document:
what `shardrank plan --json` prints.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

from loader.snapshot.manifest import ModelSpec
from router.plan import Plan
from router.plan_file import PlanFile
from router.planning.division import divided_use
from router.planning.inputs import CapacityOptions, LookupProfile
from router.planning.network import FleetLookups, StoredLookups, network_use
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.card_plan import CARD, HOST, HOT, PLACE_BYTES, CardPlan
from shard_node.planning.cost_model import BatchTime, Traffic, batch_time


def capacity(
    spec: ModelSpec,
    profile: LookupProfile,
    options: CapacityOptions,
    division: tuple[dict[str, Any], PlanFile] | None = None,
) -> dict[str, Any]:
    """Plan a model on the fullest shard of a fleet: by what `best_division` chose, or as `options.sharding` says.

    `fits_on_cards`: whether all rows of the shard are on cards; `all_on_cards_bytes`: of each card, what that needs.

    Raises:
        MemoryBudgetError: it can't be served on such nodes at all, with the numbers.
        PlanError: it can't be sharded so.
    """
    if division:
        spec = division[1].sliced(spec)
        fleet = Plan.of_file(spec, division[1], options.shards, options.cards)
    else:
        fleet = Plan.make(spec, options.shards, options.sharding, options.cards, options.replicate_bytes)
    layout = fleet.layout
    stored = StoredLookups.of(spec, layout, options, profile)
    lookups = FleetLookups(fleet, stored)

    @cache
    def placed(shard: int) -> tuple[CardPlan, Traffic, BatchTime]:
        plan = CardPlan.make(layout, fleet.partition(shard), options.budget, stored.rows)
        loads = lookups.part(shard) if options.network else lookups.loads
        traffic = Traffic.of(plan, loads, options.system, stored.near.missed)
        return plan, traffic, batch_time(traffic, options.system)

    fullest = int(lookups.stored_bytes.argmax())
    plan, traffic, time = placed(fullest)
    return {
        "model": spec.model,
        "options": options.model_dump(),
        "num_tables": len(spec.logical_tables),
        "num_rows": sum(table.num_embeddings for table in spec.logical_tables),
        "size": _sizes(spec),
        "shard_index": fullest,
        "cards": _cards(plan, options.budget.card_bytes[0]),
        "pinned_bytes": plan.pinned_bytes,
        "all_on_cards_bytes": plan.all_on_cards_bytes,
        "fits_on_cards": not plan.tier_rows[:, :, HOST].any(),
        "tiers": _tiers(plan, traffic),
        "tables": _tables(plan, stored),
        "divided": [divided_use(spec, table, fleet, stored.lookups) for table in spec.divided],
        # What a batch asks, and moves over each way when the slowest card pools it.
        "batch": {
            "lookups": sum(of_table.values for of_table in stored.lookups),
            "bags": sum(of_table.bags for of_table in stored.lookups),
            "upload_bytes": traffic.upload_bytes,
            "card_memory_bytes": float(traffic.hbm_bytes.max()),
            "peer_bytes": float(traffic.peer_bytes.sum(axis=1).max()),
            "peer_line_bytes": float(traffic.peer_line_bytes.max()),
            "host_bytes": float(traffic.host_bytes.max()),
            "host_line_bytes": float(traffic.host_line_bytes.max()),
        },
        "time": asdict(time),
        "network": network_use(lookups, options, lambda shard: placed(shard)[2]) if options.network else None,
        "division": division and division[0],
    }


def _sizes(spec: ModelSpec) -> dict[str, int]:
    """Return bytes of all rows of the model, once: as float32, codes or elements alone, as stored, on cards; of places.

    Float32 are the rows that features see, before tables are divided and pruned.
    """
    rows = [(stored.num_embeddings, RowFormat.of(stored.dtype, stored.embedding_dim)) for stored in spec.stored_tables]
    return {
        "float32_bytes": sum(4 * table.num_embeddings * table.embedding_dim for table in spec.logical_tables),
        "code_bytes": sum(num_rows * row.code_bytes for num_rows, row in rows),
        "stored_bytes": sum(num_rows * row.row_bytes for num_rows, row in rows),
        "on_cards_bytes": sum(num_rows * row.stride for num_rows, row in rows),
        "places_bytes": sum(num_rows * PLACE_BYTES for num_rows, _ in rows),
    }


def _cards(plan: CardPlan, card_bytes: int) -> list[dict[str, int]]:
    cards = []
    for card in range(plan.num_cards):
        used = plan.bytes(card)
        sizes = {"hot_bytes": used.hot, "own_bytes": used.card, "places_bytes": used.places}
        cards.append({"card": card, **sizes, "free_bytes": card_bytes - used.total})
    return cards


def _tables(plan: CardPlan, stored: StoredLookups) -> list[dict[str, Any]]:
    """Return how each table is split on this shard, and its lookups in a batch."""
    rows = plan.tier_rows.sum(axis=1)
    return [
        {
            **table.model_dump(include={"name", "num_embeddings", "embedding_dim", "dtype"}),
            "on_cards_bytes": int(rows[number].sum() * plan.strides[number]),
            "lookups": stored.lookups[number].values,
            **dict(zip(("hot_rows", "card_rows", "pinned_rows"), rows[number].tolist(), strict=True)),
        }
        for number, table in enumerate(stored.layout.tables)
    ]


def _tiers(plan: CardPlan, traffic: Traffic) -> list[dict[str, Any]]:
    """Return the ways to a row, in the mean over the cards that may pool a batch; bytes of hot ones are on one card.

    `card` and `peer` are the same rows, on the card that pools and on others: a card reaches its own part as `card`.
    """
    rows = plan.tier_rows.sum(axis=1)
    # The column of rows, the lookups, and the bytes that a batch moves.
    tiers = {
        "hot": (HOT, traffic.hot.mean(), 0.0),
        "card": (CARD, traffic.local.mean(), 0.0),
        "peer": (CARD, traffic.peer.mean(), traffic.peer_bytes.sum(axis=1).mean()),
        "pinned": (HOST, traffic.host.mean(), traffic.host_bytes.mean()),
    }
    total = sum(lookups for _, lookups, _ in tiers.values())
    return [
        {
            "tier": tier,
            "rows": int(rows[:, column].sum()),
            "size_bytes": int(rows[:, column] @ plan.strides),
            "lookup_share": float(lookups / total) if total else 0.0,
            "bytes_per_batch": float(moved),
        }
        for tier, (column, lookups, moved) in tiers.items()
    ]
