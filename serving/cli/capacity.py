"""What a model takes on a node of cards, and how fast its lookups can be: the engine's own placement, without a card.

Nothing is read but the model's description (and access counts, where a snapshot has them). Published models by name
come with what a `ModelSpec` does not say: how many ids a bag of each feature has, and how skewed they are.

- `dlrm-v2`: MLPerf's DLRM-v2 on Criteo 1TB, multi-hot (github.com/mlcommons/training,
  recommendation_v2/torchrec_dlrm/README.MD: table sizes and hotness).
- `merlin-tiny` to `merlin-colossal`: the synthetic models of NVIDIA-Merlin/distributed-embeddings
  (examples/benchmarks/synthetic_models/config_v3.py), ids by a power law of exponent 1.05 (its README).
- `textbook`: one table of 2 * 10^9 rows of 128, 40 lookups a sample: easy to reckon by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.errors import ConfigError
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import Frozen, RowDtype, TableSpec
from router.plan import DEFAULT_REPLICATE_BYTES, Plan, table_bytes
from router.plan_file import PlanFile, with_columns
from router.table_planner import AskedLookups, PlannedFleet, TableLookups
from serving.cli.division import DividedUse, FleetPlan
from serving.cli.network import FleetLookups, NetworkOptions, NetworkUse, ShardTime
from serving.errors import NotFoundError
from shard_node.bags import TableLayout
from shard_node.buckets import Sharding
from shard_node.cuda.kernel_params import RowFormat
from shard_node.planning.card_plan import CARD, HOST, HOT, CardBudget, CardPlan
from shard_node.planning.cost_model import BagLoad, BatchTime, CardSystem, Traffic, batch_time, table_sizes
from shard_node.planning.hotness import Head, Hotness, PartOfRanks, ranked_share
from shard_node.planning.network_cost import BatchBags, NearRows, Network

GB = 1_000_000_000
MAX_BATCH = 10_000_000
MAX_HOTNESS = 1_000_000
MERLIN_ZIPF = 1.05
# Of one shard there is no network to ask about; what is cheapest then does not depend on it.
DEFAULT_NETWORK_GB_PER_S = 12.5
DLRM_V2_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
DLRM_V2_HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

Tier: TypeAlias = Literal["hot", "card", "peer", "pinned"]
Alike: TypeAlias = tuple[int, tuple[int, ...], int, int]
"""So many tables alike, each looked up by one feature for each hotness: number, hotness, rows, embedding_dim."""


class _Published(NamedTuple):
    tables: tuple[Alike, ...]
    dense_model: DenseModelSpec
    num_dense: int = 0
    zipf: float = 0.0


def _merlin(hidden: tuple[int, ...], num_dense: int, *tables: Alike) -> _Published:
    return _Published(tables, DenseModelSpec(kind="mlp", config={"hidden": list(hidden)}), num_dense, MERLIN_ZIPF)


_DLRM_V2_CONFIG: dict[str, Any] = {
    "num_cross_layers": 3,
    "low_rank": 512,
    "bottom_mlp": [512, 256, 128],
    "deep": [1024, 1024, 512, 256],
}
CATALOG: dict[str, _Published] = {
    "dlrm-v2": _Published(
        tuple((1, (ids,), rows, 128) for rows, ids in zip(DLRM_V2_ROWS, DLRM_V2_HOTNESS, strict=True)),
        DenseModelSpec(kind="dcn_v2", config=_DLRM_V2_CONFIG), 13,
    ),
    "merlin-tiny": _merlin(
        (256, 128), 10,
        (1, (1, 10), 10_000, 8), (1, (1, 10), 1_000_000, 16), (1, (1, 10), 25_000_000, 16), (1, (1,), 25_000_000, 16),
        (16, (1,), 10, 8), (10, (1,), 1_000, 8), (4, (1,), 10_000, 8), (2, (1,), 100_000, 16),
        (19, (1,), 1_000_000, 16),
    ),
    "merlin-small": _merlin(
        (512, 256, 128), 10,
        (5, (1, 30), 10_000, 16), (3, (1, 30), 4_000_000, 32), (1, (1, 30), 50_000_000, 32), (1, (1,), 50_000_000, 32),
        (30, (1,), 10, 16), (30, (1,), 1_000, 16), (5, (1,), 10_000, 16), (5, (1,), 100_000, 32),
        (27, (1,), 4_000_000, 32),
    ),
    "merlin-medium": _merlin(
        (1024, 512, 256, 128), 25,
        (20, (1, 50), 100_000, 64), (5, (1, 50), 10_000_000, 64), (1, (1, 50), 100_000_000, 128),
        (1, (1,), 100_000_000, 128), (80, (1,), 10, 32), (60, (1,), 1_000, 32), (80, (1,), 100_000, 64),
        (24, (1,), 200_000, 64), (40, (1,), 10_000_000, 64),
    ),
    "merlin-large": _merlin(
        (2048, 1024, 512, 256), 100,
        (40, (1, 100), 100_000, 64), (16, (1, 100), 15_000_000, 64), (1, (1, 100), 200_000_000, 128),
        (1, (1,), 200_000_000, 128), (100, (1,), 10, 32), (100, (1,), 10_000, 32), (160, (1,), 100_000, 64),
        (50, (1,), 500_000, 64), (144, (1,), 15_000_000, 64),
    ),
    "merlin-jumbo": _merlin(
        (2048, 1024, 512, 256), 200,
        (50, (1, 200), 100_000, 128), (24, (1, 200), 20_000_000, 128), (1, (1, 200), 400_000_000, 256),
        (1, (1,), 400_000_000, 256), (100, (1,), 10, 32), (200, (1,), 10_000, 64), (350, (1,), 100_000, 128),
        (80, (1,), 1_000_000, 128), (216, (1,), 20_000_000, 128),
    ),
    "merlin-colossal": _merlin(
        (4096, 2048, 1024, 512, 256), 500,
        (100, (1, 300), 100_000, 128), (50, (1, 300), 40_000_000, 256), (1, (1, 300), 2_000_000_000, 256),
        (1, (1,), 1_000_000_000, 256), (100, (1,), 10, 32), (400, (1,), 10_000, 128), (100, (1,), 100_000, 128),
        (800, (1,), 1_000_000, 128), (450, (1,), 40_000_000, 256),
    ),
    "textbook": _Published(((1, (40,), 2_000_000_000, 128),), DenseModelSpec(kind="mlp")),
}  # fmt: skip


@dataclass(frozen=True)
class CatalogModel:
    """A model and how it is looked up: by feature, ids in a bag; the exponent of their power law, 0 for uniform."""

    spec: ModelSpec
    hotness: Mapping[str, int]
    zipf: float


def catalog_model(name: str, dtype: RowDtype = "int8", scale: float = 1.0) -> CatalogModel:
    """Return a published model.

    Args:
        name: one of `CATALOG`.
        dtype: in which its rows are stored; they are published as float32.
        scale: of the numbers of rows, above 0 and at most 1; every table keeps at least one.

    Raises:
        NotFoundError: no such name.
        ValueError: a scale out of range.
    """
    if name not in CATALOG:
        says = f"model {name!r} is not in the catalog; it has {', '.join(CATALOG)}"
        raise NotFoundError(says, kind="model_not_found")
    if not 0 < scale <= 1:
        raise ValueError(f"scale is {scale}, allowed is above 0 and at most 1")
    published, tables = CATALOG[name], []
    hotness: dict[str, int] = {}
    alike = [one for one in published.tables for _ in range(one[0])]
    for number, (_, bags, rows, dim) in enumerate(alike):
        features = {f"f{number}" if len(bags) == 1 else f"f{number}_{ids}": ids for ids in bags}
        hotness |= features
        tables.append(
            TableSpec(
                name=f"t{number}",
                num_embeddings=max(1, round(rows * scale)),
                embedding_dim=dim,
                feature_names=tuple(features),
                dtype=dtype,
            )
        )
    spec = ModelSpec(
        model=name,
        tables=tuple(tables),
        features=tuple(FeatureSpec(name=feature, side="candidate") for feature in hotness),
        dense_inputs=DenseInputs(candidate=published.num_dense),
        dense_model=published.dense_model,
    )
    return CatalogModel(spec, hotness, published.zipf)


@dataclass(frozen=True)
class LookupProfile:
    """Ids of each feature, and their skew.

    Attributes:
        hotness: by feature, ids in a bag in the mean; 1 for a feature that is not there.
        longest: by feature, ids of the longest bag; `hotness` for a feature that is not there.
        zipf: exponent of the power law of row numbers, 0 for uniform; of tables without counts.
        head: the rows that the power law is of; None for all of a table.
        counts: by table, uint32 [num_embeddings], observed lookups of each row.
    """

    hotness: Mapping[str, float] = field(default_factory=dict)
    longest: Mapping[str, float] = field(default_factory=dict)
    zipf: float = 0.0
    head: Head | None = None
    counts: Mapping[str, npt.NDArray[np.uint32]] = field(default_factory=dict)

    @classmethod
    def of_requests(cls, requests: GoldenRequests) -> LookupProfile:
        """Count the ids that a set of requests has in each bag."""
        lengths = requests.lengths
        return cls(
            {name: float(one.mean()) if one.size else 0.0 for name, one in lengths.items()},
            {name: float(one.max(initial=0)) for name, one in lengths.items()},
        )

    def with_hotness(self, spec: ModelSpec, told: Mapping[str, float]) -> LookupProfile:
        """Return the same but for features whose hotness is told.

        Raises:
            ConfigError: a feature that the model does not have, or a number out of range.
        """
        known = {feature.name for feature in spec.features}
        for name, ids in told.items():
            if name not in known:
                raise ConfigError(f"hotness of {name!r}: model {spec.model!r} has no such feature")
            if not 0 <= ids <= MAX_HOTNESS:
                raise ConfigError(f"hotness of {name!r} is {ids}, allowed is 0..{MAX_HOTNESS}")
        return replace(self, hotness={**self.hotness, **told}, longest={**self.longest, **told})

    def loads(self, spec: ModelSpec, layout: TableLayout, requests: float, candidates: float) -> tuple[BagLoad, ...]:
        """Count what a batch asks of each table, in layout order: context features by request, others by candidate."""
        asked = self._asked(spec, layout, requests, candidates)
        return tuple(
            BagLoad(
                sum(bags * ids for bags, ids, _ in of_table),
                sum(bags for bags, _, _ in of_table),
                max(longest for _, _, longest in of_table),
            )
            for of_table in asked
        )

    def workload(self, spec: ModelSpec, requests: float, candidates: float) -> AskedLookups:
        """Return what a batch asks of a model's tables, sliced or not."""
        whole = with_columns(spec, {})
        layout = TableLayout.of(whole)
        loads, bags = self.loads(whole, layout, requests, candidates), self.bags(whole, layout, requests, candidates)
        found = {}
        for number, (table, load) in enumerate(zip(layout.tables, loads, strict=True)):
            of_table = bags.table == number
            lengths = zip(bags.lengths[of_table].tolist(), bags.bags[of_table].tolist(), strict=True)
            found[table.name] = TableLookups(load, tuple(lengths))
        per_sample = {name: one.load.values for name, one in found.items()}
        # What a sliced table has once stands with its first slice.
        first = {table.slices[0].name: table.name for table in spec.tables}
        counts = {first[name]: one for name, one in self.counts.items() if name in first}
        return AskedLookups(found, Hotness(counts, per_sample, self.zipf, self.head, part_ranks(spec)))

    def bags(self, spec: ModelSpec, layout: TableLayout, requests: float, candidates: float) -> BatchBags:
        """Count the batch's bags of each table by their length: those of a feature are all as long as their mean."""
        asked = self._asked(spec, layout, requests, candidates)
        flat = [(number, *one) for number, of_table in enumerate(asked) for one in of_table]
        table, bags, lengths, _ = (np.array(column) for column in zip(*flat, strict=True))
        return BatchBags(len(layout.tables), table, lengths, bags)

    def _asked(
        self, spec: ModelSpec, layout: TableLayout, requests: float, candidates: float
    ) -> list[list[tuple[float, float, float]]]:
        """Return bags, ids of a bag and those of the longest, for each feature of each stored table.

        A part by popularity is looked up for its share of the ids, but for as many bags as its table.
        """
        shares, found = self._part_shares(spec), []
        for table in layout.tables:
            divided, share = spec.divided_of(table.name), shares.get(table.name, 1.0)
            is_product = divided is not None and divided.combine == "multiply"
            of_table = []
            for name in table.feature_names:
                times = requests if spec.feature(name).side == "context" else candidates
                ids = self.hotness.get(name, 1.0)
                if is_product or spec.pooling_of(name) == "none":
                    # A bag of what is not pooled is one id.
                    of_table.append((times * ids, share, 1.0))
                else:
                    of_table.append((times, ids * share, self.longest.get(name, ids) * share))
            found.append(of_table)
        return found

    def _part_shares(self, spec: ModelSpec) -> dict[str, float]:
        """Return the share of its table's lookups that each part by popularity has, by counts or the power law."""
        ranks, found = part_ranks(spec), dict[str, float]()
        for table in spec.divided:
            names = [part for part in table.parts if part in ranks]
            lookups = [float(self.counts[part].sum(dtype=np.uint64)) if part in self.counts else 0.0 for part in names]
            if not any(lookups):
                # The last part's last row stands for those that are pruned.
                ends = np.array([*(ranks[part].before for part in names), table.num_embeddings])
                lookups = np.diff(ranked_share(ends, table.num_embeddings, self.zipf, self.head)).tolist()
            found |= {part: one / sum(lookups) for part, one in zip(names, lookups, strict=True)}
        return found


def _added(spec: ModelSpec) -> ModelSpec:
    """Return the model as if no parts were multiplied."""
    return spec.model_copy(update={"divided": tuple(one.model_copy(update={"combine": "add"}) for one in spec.divided)})


def part_ranks(spec: ModelSpec) -> dict[str, PartOfRanks]:
    """Return which ranks of their tables the rows of parts by popularity have, by name."""
    found = {}
    for table in spec.divided:
        if table.by == "popularity":
            rows = [part.num_embeddings for part in spec.parts(table)]
            for part, end, own in zip(table.parts, itertools.accumulate(rows), rows, strict=True):
                found[part] = PartOfRanks(end - own, table.num_embeddings)
    return found


class CapacityOptions(Frozen):
    """The node and the batch to plan for. 1 GB is 10^9 bytes.

    Attributes:
        cards: of each shard's node.
        card_memory_gb, pinned_memory_gb: of each card and of the host, for all versions that lie side by side.
        hot_gb: of each card, for one version's copies of hot rows; None as the engine chooses.
        replicate_bytes: tables of at most this size go to every shard.
        candidates: of a batch, all requests together.
        network: to the shards, and hot rows at the router; None for a single node.
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
    network: NetworkOptions | None = None

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
        sizes = [table_sizes(one.num_embeddings, one.embedding_dim, one.dtype) for one in spec.stored_tables]
        codes, stored, on_cards, places = (sum(column) for column in zip(*sizes, strict=True))
        return cls(
            float32_bytes=sum(4 * one.num_embeddings * one.embedding_dim for one in spec.logical_tables),
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
        network = options.network or NetworkOptions(network=Network(gb_per_s=DEFAULT_NETWORK_GB_PER_S, latency_us=0.0))
        fleet = PlannedFleet(
            options.shards, options.cards, options.budget, options.system, network.network, options.replicate_bytes
        )
        workload = replace(profile.workload(spec, options.requests, options.candidates), near=network.hot_rows)
        division, file = FleetPlan.make(spec, fleet, workload)
        sliced = file.sliced(spec)
        first = {table.name: table.slices[0].name for table in spec.tables}
        counts = {
            stored.name: profile.counts[first[table.name]]
            for table in sliced.tables
            if first[table.name] in profile.counts
            for stored in table.slices
        }
        plan = Plan.of_file(sliced, file, options.shards, options.cards)
        made = cls.make(sliced, replace(profile, counts=counts), options, plan)
        return made.model_copy(update={"division": division}), file

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
        shard, budget, layout = _fullest_shard(fleet), options.budget, fleet.layout
        loads = profile.loads(spec, layout, options.requests, options.candidates)
        lookups = {table.name: load.values for table, load in zip(layout.tables, loads, strict=True)}
        hotness = Hotness(profile.counts, lookups, profile.zipf, profile.head, part_ranks(spec))
        plan = CardPlan.make(layout, fleet.partition(shard), budget, hotness)
        network, hot, fleet_lookups, part = options.network, None, None, loads
        if network is not None:
            batch = profile.bags(spec, layout, options.requests, options.candidates)
            fleet_lookups = FleetLookups(fleet, plan.hotness, loads, batch, options.system)
            hot = network.hot_rows(layout, plan.hotness)
            part = fleet_lookups.part(hot, shard)
        added = profile.bags(_added(spec), layout, options.requests, options.candidates)
        traffic = Traffic.of(plan, part, options.system, missed=None if hot is None else hot.missed)
        return cls(
            model=spec.model,
            options=options,
            num_tables=len(spec.logical_tables),
            num_rows=sum(table.num_embeddings for table in spec.logical_tables),
            size=ModelSize.of(spec),
            shard_index=shard,
            cards=tuple(_card_use(plan, card, budget) for card in range(options.cards)),
            pinned_bytes=plan.pinned_bytes,
            all_on_cards_bytes=plan.all_on_cards_bytes,
            fits_on_cards=not plan.tier_rows[:, :, HOST].any(),
            tiers=_tiers(plan, traffic),
            tables=_tables(plan, layout, loads),
            divided=tuple(DividedUse.of(spec, table, fleet, loads, added) for table in spec.divided),
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
            network=None if fleet_lookups is None else _network(fleet, plan, hotness, fleet_lookups, options),
        )


def _network(
    fleet: Plan, placed: CardPlan, hotness: Hotness, lookups: FleetLookups, options: CapacityOptions
) -> NetworkUse:
    """Reckon the network of a fleet whose fullest shard has been placed."""
    assert options.network is not None
    plans = {_fullest_shard(fleet): placed}

    def time(hot: NearRows | None, shard: int) -> ShardTime:
        if shard not in plans:
            plans[shard] = CardPlan.make(fleet.layout, fleet.partition(shard), options.budget, hotness)
        missed = None if hot is None else hot.missed
        traffic = Traffic.of(plans[shard], lookups.part(hot, shard), options.system, missed=missed)
        found = batch_time(traffic, options.system)
        return ShardTime(shard=shard, total_us=found.alone_us, bound=found.bound)

    return NetworkUse.make(lookups, options.network, time)


def _fullest_shard(fleet: Plan) -> int:
    """Return the shard with the most bytes of rows, as stored."""
    sizes = np.zeros(fleet.num_shards)
    for table, owners in zip(fleet.layout.tables, fleet.shard_of_bucket, strict=True):
        rows = RowBuckets.of(table).rows_per_bucket()
        held = np.bincount(np.maximum(owners, 0), rows, minlength=fleet.num_shards)
        # What is on every shard makes none fuller than another.
        sizes += held * (table_bytes(table) / table.num_embeddings) * bool(owners[0] >= 0)
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


def _tables(plan: CardPlan, layout: TableLayout, loads: tuple[BagLoad, ...]) -> tuple[TableUse, ...]:
    rows_here = plan.tier_rows.sum(axis=(1, 2))
    return tuple(
        TableUse(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            dtype=table.dtype,
            on_cards_bytes=int(rows) * RowFormat.of(table.dtype, table.embedding_dim).stride,
            lookups=load.values,
            hot_rows=split.hot_rows,
            card_rows=split.card_rows,
            pinned_rows=split.host_rows,
        )
        for table, rows, load, split in zip(layout.tables, rows_here, loads, plan.splits, strict=True)
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
