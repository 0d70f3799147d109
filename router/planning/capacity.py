"""What a model takes on a fleet of nodes, and how fast its lookups can be: the engine's own placement, without a card.

Nothing is read but the model's description (and access counts, where a snapshot has them).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, Self, TypeAlias

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import Frozen, RowDtype
from router.plan import Plan
from router.plan_file import PlanFile
from router.planning.division import DividedUse, FleetPlan
from router.planning.lookups import LookupProfile
from router.planning.network import FleetLookups, NetworkUse, StoredLookups
from router.planning.options import CapacityOptions
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.card_plan import CARD, HOST, HOT, PLACE_BYTES, CardPlan
from shard_node.planning.cost_model import BatchTime, Traffic, batch_time

Tier: TypeAlias = Literal["hot", "card", "peer", "pinned"]


class ModelSize(Frozen):
    """Bytes of all rows of the model, once: as float32, codes or elements alone, as stored, on cards; of its places.

    Float32 are the rows that features see, before tables are divided and pruned.
    """

    float32_bytes: int
    code_bytes: int
    stored_bytes: int
    on_cards_bytes: int
    places_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Add up the tables."""
        rows = [
            (stored.num_embeddings, RowFormat.of(stored.dtype, stored.embedding_dim)) for stored in spec.stored_tables
        ]
        return cls(
            float32_bytes=sum(4 * table.num_embeddings * table.embedding_dim for table in spec.logical_tables),
            code_bytes=sum(num_rows * row.code_bytes for num_rows, row in rows),
            stored_bytes=sum(num_rows * row.row_bytes for num_rows, row in rows),
            on_cards_bytes=sum(num_rows * row.stride for num_rows, row in rows),
            places_bytes=sum(num_rows * PLACE_BYTES for num_rows, _ in rows),
        )


class CardUse(Frozen):
    """What lies on one card."""

    card: int
    hot_bytes: int
    own_bytes: int
    places_bytes: int
    free_bytes: int


class TierUse(Frozen):
    """One way to a row: rows that are reached so, their bytes (hot ones counted on one card), share of lookups.

    `card` and `peer` are the same rows, on the card that pools and on others: a card reaches its own part as `card`.
    """

    tier: Tier
    rows: int
    size_bytes: int
    lookup_share: float
    bytes_per_batch: float


class TableUse(Frozen):
    """How one table is split on this shard, and its lookups in a batch."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: RowDtype
    on_cards_bytes: int
    lookups: float
    hot_rows: int
    card_rows: int
    pinned_rows: int


class BatchUse(Frozen):
    """What one batch asks, and moves over each way when the slowest card pools it."""

    lookups: float
    bags: float
    upload_bytes: float
    card_memory_bytes: float
    peer_bytes: float
    peer_line_bytes: float
    host_bytes: float
    host_line_bytes: float


class CapacityPlan(Frozen):
    """A model on the fullest shard of a fleet of such nodes.

    Attributes:
        all_on_cards_bytes: what each card would need for every row of the shard to be on cards, once, with places.
        fits_on_cards: whether they are.
    """

    model: str
    options: CapacityOptions
    num_tables: int
    num_rows: int
    size: ModelSize
    shard_index: int
    cards: tuple[CardUse, ...]
    pinned_bytes: int
    all_on_cards_bytes: int
    fits_on_cards: bool
    tiers: tuple[TierUse, ...]
    tables: tuple[TableUse, ...]
    divided: tuple[DividedUse, ...] = ()
    batch: BatchUse
    time: BatchTime
    network: NetworkUse | None = None
    division: FleetPlan | None = None

    @classmethod
    def per_table(cls, spec: ModelSpec, profile: LookupProfile, options: CapacityOptions) -> tuple[Self, PlanFile]:
        """Choose how each table is divided, and plan a model so.

        Raises as `make`.
        """
        division, file = FleetPlan.make(spec, options, profile)
        sliced = file.sliced(spec)
        plan = cls.make(sliced, profile, options, Plan.of_file(sliced, file, options.shards, options.cards))
        return plan.model_copy(update={"division": division}), file

    @classmethod
    def make(
        cls, spec: ModelSpec, profile: LookupProfile, options: CapacityOptions, plan_of_tables: Plan | None = None
    ) -> Self:
        """Plan a model: by a plan of its tables, or as `options.sharding` says.

        Raises:
            MemoryBudgetError: it can't be served on such nodes at all, with the numbers.
            PlanError: it can't be sharded so.
        """
        fleet = plan_of_tables or Plan.make(
            spec, options.shards, options.sharding, options.cards, options.replicate_bytes
        )
        system, layout = options.system, fleet.layout
        stored = StoredLookups.of(spec, layout, options, profile)
        lookups = FleetLookups(fleet, stored)

        @cache
        def placed(shard: int) -> tuple[CardPlan, Traffic, BatchTime]:
            plan = CardPlan.make(layout, fleet.partition(shard), options.budget, stored.rows)
            loads = lookups.part(shard) if options.network else lookups.loads
            traffic = Traffic.of(plan, loads, system, stored.near.missed)
            return plan, traffic, batch_time(traffic, system)

        fullest = int(lookups.stored_bytes.argmax())
        plan, traffic, time = placed(fullest)
        network = None
        if options.network:
            network = NetworkUse.make(lookups, options.network, system, lambda shard: placed(shard)[2])
        return cls(
            model=spec.model,
            options=options,
            num_tables=len(spec.logical_tables),
            num_rows=sum(table.num_embeddings for table in spec.logical_tables),
            size=ModelSize.of(spec),
            shard_index=fullest,
            cards=_cards(plan, options),
            pinned_bytes=plan.pinned_bytes,
            all_on_cards_bytes=plan.all_on_cards_bytes,
            fits_on_cards=not plan.tier_rows[:, :, HOST].any(),
            tiers=_tiers(plan, traffic),
            tables=_tables(plan, stored),
            divided=tuple(DividedUse.of(spec, table, fleet, stored.lookups) for table in spec.divided),
            batch=BatchUse(
                lookups=float(sum(of_table.load.values for of_table in stored.lookups)),
                bags=float(sum(of_table.load.bags for of_table in stored.lookups)),
                upload_bytes=traffic.upload_bytes,
                card_memory_bytes=float(traffic.hbm_bytes.max()),
                peer_bytes=float(traffic.peer_bytes.sum(axis=1).max()),
                peer_line_bytes=float(traffic.peer_line_bytes.max()),
                host_bytes=float(traffic.host_bytes.max()),
                host_line_bytes=float(traffic.host_line_bytes.max()),
            ),
            time=time,
            network=network,
        )


def _cards(plan: CardPlan, options: CapacityOptions) -> tuple[CardUse, ...]:
    budget = options.budget.card_bytes
    return tuple(
        CardUse(
            card=card,
            hot_bytes=used.hot,
            own_bytes=used.card,
            places_bytes=used.places,
            free_bytes=budget[card] - used.total,
        )
        for card, used in enumerate(map(plan.bytes, range(plan.num_cards)))
    )


def _tables(plan: CardPlan, stored: StoredLookups) -> tuple[TableUse, ...]:
    rows_on_shard = plan.tier_rows.sum(axis=(1, 2)) * plan.strides
    return tuple(
        TableUse(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            dtype=table.dtype,
            on_cards_bytes=size_bytes,
            lookups=of_table.load.values,
            hot_rows=split.hot_rows,
            card_rows=split.card_rows,
            pinned_rows=split.host_rows,
        )
        for table, size_bytes, of_table, split in zip(
            stored.layout.tables, rows_on_shard.tolist(), stored.lookups, plan.splits, strict=True
        )
    )


def _tiers(plan: CardPlan, traffic: Traffic) -> tuple[TierUse, ...]:
    """In the mean over the cards that may pool a batch."""
    rows = plan.tier_rows.sum(axis=1)
    # The column of rows, the lookups, and the bytes that a batch moves.
    tiers: dict[Tier, tuple[int, float, float]] = {
        "hot": (HOT, traffic.hot.mean(), 0.0),
        "card": (CARD, traffic.own.mean(), 0.0),
        "peer": (CARD, traffic.peer.mean(), traffic.peer_bytes.sum(axis=1).mean()),
        "pinned": (HOST, traffic.host.mean(), traffic.host_bytes.mean()),
    }
    total = sum(lookups for _, lookups, _ in tiers.values())
    return tuple(
        TierUse(
            tier=tier,
            rows=int(rows[:, column].sum()),
            size_bytes=int(rows[:, column] @ plan.strides),
            lookup_share=float(lookups / total) if total else 0.0,
            bytes_per_batch=float(moved),
        )
        for tier, (column, lookups, moved) in tiers.items()
    )
