"""What a model takes on a node of cards, and how fast its lookups can be: the engine's own placement, without a card.

Nothing is read but the model's description (and access counts, where a snapshot has them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.snapshot.codecs import num_buckets_used
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import Frozen, ModelSpec, RowDtype, TableSpec
from router.plan import DEFAULT_REPLICATE_BYTES, Plan, table_bytes
from serving.errors import LookupProfileError
from shard_node.bags import TableLayout
from shard_node.cuda.kernel_params import RowFormat
from shard_node.node import Sharding
from shard_node.planning.card_plan import CARD, HOST, HOT, CardBudget, CardPlan
from shard_node.planning.cost_model import BagLoad, BatchTime, CardSystem, Traffic, batch_time, table_sizes
from shard_node.planning.hotness import Hotness

GB = 1_000_000_000
MAX_BATCH = 10_000_000
MAX_HOTNESS = 1_000_000
MAX_ZIPF = 8.0


@dataclass(frozen=True)
class LookupProfile:
    """Ids of each feature, and their skew.

    Attributes:
        hotness: by feature, ids in a bag in the mean; 1 for a feature that is not there.
        longest: by feature, ids of the longest bag; `hotness` for a feature that is not there.
        zipf: exponent of the power law of row numbers, 0 for uniform; of tables without counts.
        counts: by table, uint32 [num_embeddings], observed lookups of each row.
    """

    hotness: Mapping[str, float] = field(default_factory=dict)
    longest: Mapping[str, float] = field(default_factory=dict)
    zipf: float = 0.0
    counts: Mapping[str, npt.NDArray[np.uint32]] = field(default_factory=dict)

    @classmethod
    def of_requests(cls, requests: GoldenRequests, zipf: float = 0.0) -> LookupProfile:
        """Count the ids that a set of requests has in each bag."""
        lengths = requests.lengths
        return cls(
            {name: float(one.mean()) if one.size else 0.0 for name, one in lengths.items()},
            {name: float(one.max(initial=0)) for name, one in lengths.items()},
            zipf,
        )

    def with_hotness(self, spec: ModelSpec, told: Mapping[str, float]) -> LookupProfile:
        """Return the same but for features whose hotness is told.

        Raises:
            LookupProfileError: a feature that the model does not have, or a number out of range.
        """
        known = {feature.name for feature in spec.features}
        for name, ids in told.items():
            if name not in known:
                raise LookupProfileError(f"hotness of {name!r}: model {spec.model!r} has no such feature")
            if not 0 <= ids <= MAX_HOTNESS:
                raise LookupProfileError(f"hotness of {name!r} is {ids}, allowed is 0..{MAX_HOTNESS}")
        return replace(self, hotness={**self.hotness, **told}, longest={**self.longest, **told})

    def with_zipf(self, zipf: float) -> LookupProfile:
        """Return the same with another skew in place of counts. Raises LookupProfileError for one out of range."""
        if not 0 <= zipf <= MAX_ZIPF:
            raise LookupProfileError(f"zipf is {zipf}, allowed is 0..{MAX_ZIPF:g}")
        return replace(self, zipf=zipf, counts={})

    def ids_of(self, feature: str) -> float:
        """Return the ids in a bag, in the mean."""
        return self.hotness.get(feature, 1.0)

    def loads(self, spec: ModelSpec, layout: TableLayout, requests: float, candidates: float) -> tuple[BagLoad, ...]:
        """Count what a batch asks of each table, in layout order: context features by request, others by candidate.

        Args:
            spec: the model.
            layout: its tables.
            requests: of the batch.
            candidates: of the batch, all requests together.
        """
        return tuple(self._load(spec, table, requests, candidates) for table in layout.tables)

    def placement(self, spec: ModelSpec, layout: TableLayout, requests: float, candidates: float) -> Hotness:
        """Return what placement is told: the same lookups, by table."""
        loads = self.loads(spec, layout, requests, candidates)
        lookups = {table.name: load.values for table, load in zip(layout.tables, loads, strict=True)}
        return Hotness(self.counts, lookups, self.zipf)

    def _load(self, spec: ModelSpec, table: TableSpec, requests: float, candidates: float) -> BagLoad:
        values = bags = longest = 0.0
        for name in table.feature_names:
            times = requests if spec.feature(name).side == "context" else candidates
            ids = self.ids_of(name)
            values += times * ids
            # A bag of a feature that is not pooled is one id.
            bags += times * (ids if spec.pooling_of(name) == "none" else 1)
            longest = max(longest, 1.0 if spec.pooling_of(name) == "none" else self.longest.get(name, ids))
        return BagLoad(values, bags, longest)


class CapacityOptions(Frozen):
    """The node and the batch to plan for. 1 GB is 10^9 bytes.

    Attributes:
        system: the node's bandwidths.
        cards: of each shard's node.
        card_memory_gb: of each card, for all versions that lie side by side.
        pinned_memory_gb: of the host, the same.
        hot_gb: of each card, for one version's copies of hot rows; None as the engine chooses.
        versions: that lie side by side; 2 during a rollout.
        shards: nodes that the rows are divided over.
        sharding: how.
        replicate_bytes: tables of at most this size go to every shard.
        peer_access: whether cards read each other's memory.
        requests: of a batch.
        candidates: of a batch, all requests together.
    """

    system: CardSystem
    cards: int = Field(ge=1, le=64)
    card_memory_gb: float = Field(gt=0)
    pinned_memory_gb: float = Field(ge=0)
    hot_gb: float | None = Field(default=None, ge=0)
    versions: int = Field(default=1, ge=1, le=8)
    shards: int = Field(default=1, ge=1, le=1024)
    sharding: Sharding = "hash"
    replicate_bytes: int = Field(default=DEFAULT_REPLICATE_BYTES, ge=0)
    peer_access: bool = True
    requests: int = Field(default=1, ge=1, le=MAX_BATCH)
    candidates: int = Field(default=500, ge=1, le=MAX_BATCH)

    @property
    def budget(self) -> CardBudget:
        """Return what one version may take."""
        return CardBudget(
            (int(self.card_memory_gb * GB / self.versions),) * self.cards,
            int(self.pinned_memory_gb * GB / self.versions),
            None if self.hot_gb is None else int(self.hot_gb * GB),
            self.peer_access,
        )


class ModelSize(Frozen):
    """Bytes of all rows of the model, once: as float32, codes or elements alone, as stored, on cards; of its places."""

    float32_bytes: int
    code_bytes: int
    stored_bytes: int
    on_cards_bytes: int
    places_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Add up the tables."""
        sizes = [table_sizes(one.num_embeddings, one.embedding_dim, one.dtype) for one in spec.tables]
        codes, stored, on_cards, places = (sum(column) for column in zip(*sizes, strict=True))
        return cls(
            float32_bytes=sum(4 * one.num_embeddings * one.embedding_dim for one in spec.tables),
            code_bytes=codes,
            stored_bytes=stored,
            on_cards_bytes=on_cards,
            places_bytes=places,
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

    tier: Literal["hot", "card", "peer", "pinned"]
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
    batch: BatchUse
    time: BatchTime

    @classmethod
    def make(cls, spec: ModelSpec, profile: LookupProfile, options: CapacityOptions) -> Self:
        """Plan a model.

        Raises:
            MemoryBudgetError: it can't be served on such nodes at all, with the numbers.
            PlanError: it can't be sharded so.
        """
        fleet = Plan.make(spec, options.shards, options.sharding, options.cards, options.replicate_bytes)
        shard = _fullest_shard(fleet)
        requests, candidates = options.requests, options.candidates
        hotness = profile.placement(spec, fleet.layout, requests, candidates)
        plan = CardPlan.make(fleet.layout, fleet.partition(shard), options.budget, hotness)
        loads = profile.loads(spec, fleet.layout, requests, candidates)
        traffic = Traffic.of(plan, loads, options.system)
        rows_here = plan.tier_rows.sum(axis=(1, 2))
        return cls(
            model=spec.model,
            options=options,
            num_tables=len(spec.tables),
            num_rows=sum(table.num_embeddings for table in spec.tables),
            size=ModelSize.of(spec),
            shard_index=shard,
            cards=tuple(_card_use(plan, card, options.budget) for card in range(options.cards)),
            pinned_bytes=plan.pinned_bytes,
            all_on_cards_bytes=int((plan.tier_rows.sum(axis=2).T @ plan.strides).max()) + plan.places_bytes,
            fits_on_cards=not plan.tier_rows[:, :, HOST].any(),
            tiers=_tiers(plan, traffic),
            tables=tuple(
                TableUse(
                    name=table.name,
                    num_embeddings=table.num_embeddings,
                    embedding_dim=table.embedding_dim,
                    dtype=table.dtype,
                    on_cards_bytes=int(rows_here[number]) * RowFormat.of(table.dtype, table.embedding_dim).stride,
                    lookups=loads[number].values,
                    hot_rows=split.hot_rows,
                    card_rows=split.card_rows,
                    pinned_rows=split.host_rows,
                )
                for number, (table, split) in enumerate(zip(fleet.layout.tables, plan.splits, strict=True))
            ),
            batch=BatchUse(
                lookups=float(sum(load.values for load in loads)),
                bags=float(sum(load.bags for load in loads)),
                upload_bytes=traffic.upload_bytes,
                card_memory_bytes=float(traffic.hbm_bytes.max()),
                peer_bytes=float(traffic.peer_bytes.sum(axis=1).max()),
                peer_line_bytes=float(traffic.peer_line_bytes.max()),
                host_bytes=float(traffic.host_bytes.max()),
                host_line_bytes=float(traffic.host_line_bytes.max()),
            ),
            time=batch_time(traffic, options.system),
        )


def _fullest_shard(fleet: Plan) -> int:
    """The shard with the most bytes of rows, as stored."""
    sizes = np.zeros(fleet.num_shards)
    for table, owners in zip(fleet.layout.tables, fleet.shard_of_bucket, strict=True):
        used = num_buckets_used(table)
        held = np.bincount(np.maximum(owners[:used], 0), minlength=fleet.num_shards)
        # What is on every shard makes none fuller than another.
        sizes += held * (table_bytes(table) / used) * bool(owners[0] >= 0)
    return int(sizes.argmax())


def _card_use(plan: CardPlan, card: int, budget: CardBudget) -> CardUse:
    held = plan.bytes(card)
    return CardUse(
        card=card,
        hot_bytes=held.hot,
        own_bytes=held.card,
        places_bytes=held.places,
        free_bytes=budget.card_bytes[card] - held.total,
    )


def _tiers(plan: CardPlan, traffic: Traffic) -> tuple[TierUse, ...]:
    """In the mean over the cards that may pool a batch."""
    rows = plan.tier_rows.sum(axis=1)
    own, peers = traffic.own.mean(), traffic.peer.mean()
    lookups = {"hot": traffic.hot.mean(), "card": own, "peer": peers, "pinned": traffic.host.mean()}
    moved = {"peer": traffic.peer_bytes.sum(axis=1).mean(), "pinned": traffic.host_bytes.mean()}
    total = sum(lookups.values())
    tiers: tuple[tuple[Literal["hot", "card", "peer", "pinned"], int], ...] = (
        ("hot", HOT), ("card", CARD), ("peer", CARD), ("pinned", HOST),
    )  # fmt: skip
    return tuple(
        TierUse(
            tier=tier,
            rows=int(rows[:, column].sum()),
            size_bytes=int(rows[:, column] @ plan.strides),
            lookup_share=float(lookups[tier] / total) if total else 0.0,
            bytes_per_batch=float(moved.get(tier, 0.0)),
        )
        for tier, column in tiers
    )
