"""What a model needs on a fleet of nodes, and how fast its lookups can be: the engine's own placement, without a card.

Nothing is read but the model's description (and access counts, where a snapshot has them). A plan is a JSON document:
what `shardrank plan --json` prints.
"""

from __future__ import annotations

from copy import copy
from itertools import compress
from typing import Any

import numpy as np

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import classes_bytes
from loader.snapshot.tables import DividedTable
from router.plan import Plan, table_bytes
from router.plan_file import PlanFile
from router.planning.division import PlacedModel
from router.planning.inputs import GB, CapacityOptions, CpuNode, LookupProfile
from router.planning.network import NearRows, StoredLookups, network_use, stored_row_bytes
from shard_node.cuda.kernel_params import RowFormat
from shard_node.engine.memory import SLOT_BYTES, choose_tiers
from shard_node.errors import MemoryBudgetError
from shard_node.planning.card_plan import CARD, HOST, HOT, PLACE_BYTES, CardPlan
from shard_node.planning.cost_model import Traffic

_OF_TABLE = {"name", "num_embeddings", "embedding_dim", "dtype"}
_OF_CPU = {"name", "cores", "ram_gb", "disk_gb", "rows_per_s"}
_OF_CARDS = {"card_memory_gb", "pinned_memory_gb", "hot_gb", "peer_access", "on_cards_bytes", "places_bytes"}


def capacity(
    spec: ModelSpec,
    profile: LookupProfile,
    options: CapacityOptions,
    division: tuple[dict[str, Any], PlanFile, PlacedModel] | None = None,
) -> dict[str, Any]:
    """Plan a model on the fullest shard of a fleet: by what `best_division` chose, or as `options.sharding` says.

    Raises:
        MemoryBudgetError: it can't be served on such nodes at all, with the numbers.
        PlanError: it can't be sharded so.
    """
    if division:
        model = division[2]
    else:
        plan = Plan.make(spec, options.shards, options.sharding, options.cards, options.replicate_bytes)
        model = PlacedModel(spec, plan, options, profile)
    spec, lookups, requested = model.spec, model.lookups, model.stored.lookups
    fullest = int(lookups.stored_bytes.argmax())
    on_node = (_on_cpu if isinstance(options.system, CpuNode) else _on_cards)(model, fullest, options)
    return {
        "model": spec.model,
        "options": options.model_dump(),
        "num_tables": len(spec.logical_tables),
        "num_rows": sum(table.num_embeddings for table in spec.logical_tables),
        "size": model_sizes(spec),
        "shard_index": fullest,
        **on_node,
        "batch": {
            "lookups": sum(table.values for table in requested),
            "bags": sum(table.bags for table in requested),
            **on_node["batch"],
        },
        "time": model.time(fullest),
        "divided": [_divided(spec, table) for table in spec.divided],
        "network": options.network and network_use(lookups, model.sent, options.network, model.time),
        "division": division and division[0],
    }


def _on_cpu(model: PlacedModel, shard: int, options: CapacityOptions) -> dict[str, Any]:
    """Return which tables of a shard are in RAM, and which are on disk but for their hottest rows.

    Raises MemoryBudgetError if the disk has no room for these.
    """
    node = options.system
    assert isinstance(node, CpuNode)
    layout, lookups, sizes = model.stored.layout, model.sent.values[:, shard].tolist(), model.lookups.table_bytes(shard)
    ram, disk = (int(size_gb * GB / options.versions) for size_gb in (node.ram_gb, node.disk_gb))
    tables = [
        {**table.model_dump(include=_OF_TABLE), "tier": tier, "size_bytes": size_bytes, "lookups": of_table}
        for table, tier, size_bytes, of_table in zip(
            layout.tables, choose_tiers(sizes, ram), sizes, lookups, strict=True
        )
    ]
    on_disk = np.array([table["tier"] == "disk" for table in tables])
    # Files have the rows of other shards in them.
    if (disk_bytes := sum(map(table_bytes, compress(layout.tables, on_disk)))) > disk:
        files = f"tables that {ram} bytes of RAM have no room for have files of {disk_bytes} bytes, of all shards' rows"
        raise MemoryBudgetError(f"shard {shard}: {files}; for each version there are {disk} bytes of disk")
    row_bytes = stored_row_bytes(layout)
    in_ram, slots = float(np.array(sizes)[~on_disk].sum()), np.where(on_disk, sizes / row_bytes, 0)
    slots_bytes = float(slots @ (row_bytes + SLOT_BYTES))
    hot_bytes = min(max(0.0, ram - in_ram), slots_bytes)
    # Of the tables on disk this fraction is in memory, the hottest rows first; each shard has its share of these.
    stored = [table_bytes(table) if is_there else 0 for table, is_there in zip(layout.tables, on_disk, strict=True)]
    bound = sum(stored) * hot_bytes / slots_bytes if slots_bytes else 0.0
    cold = [copy(rows) for rows in model.stored.rows]
    for rows in compress(cold, ~on_disk):
        rows.lookups = rows.lookups * 0
    missed = 1 - NearRows.choose(layout, cold, "bytes", bound).hit_rates
    return {
        "options": options.model_dump(exclude=_OF_CARDS) | {"system": node.model_dump(include=_OF_CPU)},
        "size": {name: size for name, size in model_sizes(model.spec).items() if name not in _OF_CARDS},
        "ram_bytes": int(in_ram + hot_bytes),
        "disk_bytes": disk_bytes,
        "fits_in_ram": not bool(on_disk.any()),
        "tables": tables,
        "batch": {"disk_lookups": float((np.array(lookups) * missed)[on_disk].sum())},
    }


def _on_cards(model: PlacedModel, shard: int, options: CapacityOptions) -> dict[str, Any]:
    """Return what is on which card of a shard, and moves over each way when the slowest card pools.

    `fits_on_cards`: whether all rows of the shard are on cards; `all_on_cards_bytes`: of each card, what that needs.
    """
    cards, _, traffic, _ = model.shard(shard)
    return {
        "cards": _cards(cards, options.budget.card_bytes[0]),
        "pinned_bytes": cards.pinned_bytes,
        "all_on_cards_bytes": cards.all_on_cards_bytes,
        "fits_on_cards": not cards.tier_rows[:, :, HOST].any(),
        "tiers": _tiers(cards, traffic),
        "tables": _tables(cards, model.stored),
        "batch": {
            "upload_bytes": traffic.upload_bytes,
            "card_memory_bytes": float(traffic.hbm_bytes.max()),
            "peer_bytes": float(traffic.peer_bytes.sum(axis=1).max()),
            "peer_line_bytes": float(traffic.peer_line_bytes.max()),
            "host_bytes": float(traffic.host_bytes.max()),
            "host_line_bytes": float(traffic.host_line_bytes.max()),
        },
    }


def model_sizes(spec: ModelSpec) -> dict[str, int]:
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


def _divided(spec: ModelSpec, table: DividedTable) -> dict[str, Any]:
    """Return the bytes of a table that is stored as parts, which are among the tables.

    `pruned` are rows that are left out; `classes_bytes` are those of which row is in which part, as stored: a router
    has a quarter more.
    """
    parts = spec.parts(table)
    return {
        "name": table.name,
        "by": table.by,
        **table.model_dump(include={"num_embeddings", "embedding_dim", "pruned"}),
        "float32_bytes": 4 * table.num_embeddings * table.embedding_dim,
        "stored_bytes": sum(table_bytes(part) for part in parts),
        "classes_bytes": classes_bytes(table, parts),
        "parts": table.parts,
    }


def _cards(plan: CardPlan, card_bytes: int) -> list[dict[str, int]]:
    cards = []
    for card in range(plan.num_cards):
        used = plan.bytes(card)
        sizes = {"hot_bytes": used.hot, "own_bytes": used.card, "places_bytes": used.places}
        cards.append({"card": card, **sizes, "free_bytes": card_bytes - used.total})
    return cards


def _tables(plan: CardPlan, stored: StoredLookups) -> list[dict[str, Any]]:
    rows = plan.tier_rows.sum(axis=1)
    return [
        {
            **table.model_dump(include=_OF_TABLE),
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
